"""DQN, SAC, XQC, TD3 and PQN on a GPU: gradient steps in CUDA graphs are those without, sampling is torch's, runs resume."""

import pytest
import torch
from replay_worlds import GAMMA, World
from test_replay import WORLDS

import hurtle
from hurtle.buffers.device_replay import DeviceReplay
from hurtle.buffers.rollout import Finals, Rollout

pytestmark = pytest.mark.gpu
HOW = {"progress": "quiet", "trackers": (), "eval_episodes": 2, "num_envs": 16, "device": "cuda", "preset": False}
REPLAY = {"learning_starts": 64, "capacity": 20_000, "batch_size": 64, "hidden_sizes": (32, 32)}


def moved(rollout, world):
    """A rollout on the GPU."""
    made = Rollout(world.policy, rollout.num_steps, rollout.num_rows, rollout.masks is not None, "cuda")
    for name in ("obs", "actions", "rewards", "terminated", "truncated", "starts", "valid", "last_obs", "masks"):
        if getattr(rollout, name) is not None:
            getattr(made, name).copy_(getattr(rollout, name))
    made.finals = Finals(*(part.cuda() for part in rollout.finals[:3]), ())
    made.all_valid = rollout.all_valid
    return made


@pytest.mark.parametrize("alpha", [0.0, 0.6])
@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("kind", ["plain", "bytes", "absent", "masks"])
def test_what_is_sampled_is_what_happened(kind, n_step, alpha):
    world = World(0, **WORLDS[kind])
    replay = DeviceReplay(moved(world.rollout(), world), 60, n_step=n_step, gamma=GAMMA, priority_alpha=alpha)
    for _ in range(8):
        replay.add(moved(world.rollout(), world))
    assert replay.fused == (kind != "masks")
    expected, batch = world.transitions(n_step), replay.sample(512)
    known = [b for b in range(512) if batch.weights[b] > 0]
    assert len(known) > 100
    for b in known:
        action, _, total, factor, after, _ = expected[batch.obs[b].cpu().numpy().tobytes()]
        assert int(batch.actions[b]) == action
        assert float(batch.rewards[b]) == pytest.approx(total, abs=1e-4)
        assert float(batch.discounts[b]) == pytest.approx(factor, abs=1e-5)
        assert not factor or torch.equal(batch.next_obs[b].cpu(), torch.from_numpy(after))


@pytest.mark.parametrize(
    ("env", "algorithm", "options"),
    [
        ("cartpole", "dqn", {"priority_alpha": 0.6, "target_every": 5}),
        ("cartpole", "rainbow", {}),
        ("breakout", "dqn", {"replay_ratio": 0.05}),
        ("cartpole", "sac", {}),
        ("pendulum", "sac", {"temperature": 0.1, "normalize_observations": True, "reward_mode": "normalize"}),
        ("pendulum", "td3", {"precision": "tf32", "policy_every": 3}),
        ("pendulum", "xqc", {"precision": "bf16", "policy_every": 2, "normalize_observations": True}),
        ("Pendulum-v1", "sac", {"backend": "serial", "num_envs": 2}),
        ("Pendulum-v1", "td3", {"backend": "process", "num_workers": 2, "num_envs": 4}),
    ],
)
def test_runs_learn_in_graphs_and_resume(env, algorithm, options, tmp_path):
    how = {**HOW, **REPLAY, "runs": tmp_path, "total_steps": 1_000, **options}
    run = hurtle.train(env, algorithm=algorithm, **how)
    losses = []
    again = hurtle.train(
        resume=run.path, total_steps=1_500, progress="quiet",
        callbacks=[lambda trainer: losses.append(trainer.metrics.get("value_loss"))],
    )  # fmt: skip
    assert again.steps >= 1_500
    assert losses[-1] is not None
    assert torch.isfinite(torch.tensor(losses[-1]))


def test_r2d2_learns_in_graphs_and_resumes(tmp_path):
    small = {"num_steps": 4, "sequence_length": 8, "burn_in": 2, "batch_size": 16, "learning_starts": 64, "capacity": 4_000}
    how = {**HOW, **small, "replay_ratio": 0.05, "save_replay": True, "precision": "bf16", "policy": "grid_cnn"}
    run = hurtle.train("breakout", algorithm="r2d2", total_steps=1_000, runs=tmp_path, **how)
    losses = []
    again = hurtle.train(
        resume=run.path, total_steps=1_500, progress="quiet",
        callbacks=[lambda trainer: losses.append(trainer.metrics.get("value_loss"))],
    )  # fmt: skip
    assert again.steps >= 1_500
    assert torch.isfinite(torch.tensor(losses[-1]))


def test_pqn(tmp_path):
    run = hurtle.train("cartpole", algorithm="pqn", total_steps=4_096, runs=tmp_path, minibatch_size=128, **HOW)
    assert run.steps >= 4_096


class Given:
    """A replay buffer that always returns the same batch."""

    def __init__(self, batch):
        self.batch = batch

    def sample(self, size, beta):
        return self.batch

    def update_priorities(self, ids, errors):
        pass


@pytest.mark.parametrize("algorithm", ["dqn", "sac", "td3", "xqc"])
def test_graphs_take_the_steps_of_the_cpu(algorithm):
    """The same batches: after several steps in graphs, weights are those of plain steps on the CPU."""
    from test_off_policy_native import batch, learners

    from hurtle.algorithms.algorithm import LearnerSetup, find_algorithm
    from hurtle.kernels.cuda_graphs import Graphs

    settings = {"dqn": {"target_every": 2}, "xqc": {"critic_sizes": (24, 40)}}
    (plain,) = learners(algorithm, gears=("general",), **settings.get(algorithm, {}))
    import copy

    policy = copy.deepcopy(plain.policy).cuda()
    graphs = LearnerSetup(3, graphs=Graphs("cuda"))
    device = find_algorithm(algorithm).make_learner("device", policy, plain.config, graphs)
    given, noise = batch(64, algorithm == "dqn"), torch.zeros(64, 2)
    if algorithm != "dqn":
        device.critics.load_state_dict(plain.critics.state_dict())
        device.move_targets()
        for target, source in (*device._targets, *plain._targets):
            target.load_state_dict(source.state_dict())
        plain.normals = lambda *shape: noise.view(shape)
        device.normals = lambda *shape: noise.cuda().view(shape)
    fixed = type(given)(*(part if part is None else part.cuda() for part in given))
    if algorithm != "dqn":
        still = noise.cuda()
        device.normals = lambda *shape: still.view(shape)

    device._replay = Given(fixed)
    for _ in range(4):
        device._graphs.run(2, 1.0)
    assert not device._graphs.graphs.failure
    for _ in range(8):
        plain.gradient_step(given)
        plain.gradient_steps += 1
        if plain.gradient_steps % plain.config.target_every == 0:
            plain.move_targets()
    for own, parameter in zip(device.policy.parameters(), plain.policy.parameters(), strict=True):
        torch.testing.assert_close(own.cpu(), parameter, atol=3e-4, rtol=1e-2)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("algorithm", ["dqn", "sac", "td3"])
def test_seeds_side_by_side_take_the_steps_of_the_cpu(algorithm, compiled):
    """The same batches and noise: after several steps in graphs, each seed has the weights of plain steps on the CPU."""
    from test_side_by_side import BATCH, SEEDS, batches, learners

    from hurtle.algorithms.side_by_side import SideBySide

    options = {"target_every": 2} if algorithm == "dqn" else {}
    together = SideBySide(learners(algorithm, device="cuda", compiled=compiled, **options))
    plain = SideBySide(learners(algorithm, **options))
    for one, other in zip(together.learners, plain.learners, strict=True):
        one.load_state_dict(other.state_dict())
        one.policy.load_state_dict(other.policy.state_dict())
    _, given = batches(SEEDS, algorithm == "dqn")
    noise = torch.randn(SEEDS, BATCH, 2)
    for learner, device in ((together, "cuda"), (plain, "cpu")):
        fixed = type(given)(*(part if part is None else part.to(device) for part in given))
        still = noise.to(device)
        learner._steps.normals = lambda *shape, still=still: still
        learner._replay = Given(fixed)
        for _ in range(4):
            learner._graphs.run(2, 1.0)
    assert not together._graphs.graphs.failure
    for one, other in zip(together.learners, plain.learners, strict=True):
        for own, parameter in zip(one.policy.parameters(), other.policy.parameters(), strict=True):
            torch.testing.assert_close(own.cpu(), parameter, atol=3e-4, rtol=1e-2)
    together.pending(wait=True)
    for own, other in zip(together.seed_metrics, plain.seed_metrics, strict=True):
        assert own == pytest.approx(other, rel=1e-2, abs=1e-3, nan_ok=True)


@pytest.mark.parametrize("alpha", [0.0, 0.6])
def test_seeds_draw_from_their_own_rows(alpha):
    world = World(0, num_rows=6)
    replay = DeviceReplay(moved(world.rollout(), world), 600, gamma=GAMMA, priority_alpha=alpha, groups=3)
    for _ in range(8):
        replay.add(moved(world.rollout(), world))
    assert replay.fused
    rows = replay.sample(512).ids.cpu() % 6
    assert [sorted(set(part)) for part in rows.tolist()] == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize(
    ("env", "algorithm", "options"),
    [
        ("pendulum", "sac", {"precision": "tf32"}),
        ("cartpole", "dqn", {"priority_alpha": 0.6}),
        ("Pendulum-v1", "td3", {"backend": "serial", "num_envs": 2}),
    ],
)
def test_seeds_train_side_by_side_in_graphs_and_resume(env, algorithm, options, tmp_path):
    """The loop of `hurtle train --seeds N --device cuda`: folders, checkpoints, and going on, together and alone."""
    from hurtle.experiments.records import RunRecord
    from hurtle.experiments.together_worker import train_together
    from hurtle.runners.settings import make_settings, settings_to_dict

    how = {**HOW, **REPLAY, "num_envs": 4, "runs": str(tmp_path), **options, "algorithm": algorithm}
    told = []
    for steps, resume in ((600, False), (900, True)):
        flat = settings_to_dict(make_settings(env, {**how, "total_steps": steps}))
        folders = [tmp_path / f"seed-{seed}" for seed in range(3)]
        runs = [
            {"settings": {**flat, "seed": k, "name": path.name}, "resume": str(path) if resume else "", "trust": False}
            for k, path in enumerate(folders)
        ]
        train_together(runs, None, lambda *event: told.append(event))
    assert told == [("ended", seed, "") for seed in range(3)] * 2
    records = [RunRecord.read(path) for path in folders]
    assert [record.state for record in records] == ["finished"] * 3
    assert all(record.steps >= 900 for record in records)
    assert len({record.evaluation for record in records}) == 3
    assert hurtle.train(resume=folders[1], total_steps=1_000, progress="quiet").steps >= 1_000


def test_the_replay_of_seeds_is_saved_and_loaded_seed_by_seed():
    from hurtle.buffers.replay_groups import load_group, state_of_group

    world = World(0, num_rows=6)
    whole, again = (
        DeviceReplay(moved(world.rollout(), world), 600, gamma=GAMMA, priority_alpha=0.6, groups=3) for _ in range(2)
    )
    for _ in range(8):
        whole.add(moved(world.rollout(), world))
    for k in range(3):
        load_group(again, k, state_of_group(whole, k))
    ids = whole.sample(128).ids.flatten()
    for replay in (whole, again):
        assert replay.written == whole.written
    found, expected = (replay._read(ids // 6, ids % 6, torch.ones(len(ids), device="cuda")) for replay in (again, whole))
    for one, other in zip(found[:5], expected[:5], strict=True):
        torch.testing.assert_close(one, other)
