"""R2D2: its loss against plain NumPy, burn-in and stored states, replay of what actors saw; Ape-X and the ladder."""

import numpy as np
import pytest
import torch
from made_rollouts import ACTIONS, OBS

import hurtle
from hurtle.algorithms.algorithm import LearnerSetup, find_algorithm
from hurtle.algorithms.q_targets import has_targets, rescaled, unscaled
from hurtle.algorithms.r2d2 import R2D2, make_network
from hurtle.algorithms.r2d2_config import R2D2Config
from hurtle.buffers.rollout import Rollout
from hurtle.buffers.sequences import Sequences
from hurtle.errors import HurtleError
from hurtle.kernels.cuda_graphs import Graphs
from hurtle.policies.build import PolicyConfig, build_policy
from hurtle.policies.q_network import QNetwork
from hurtle.tracking.checkpoints import load_checkpoint

SMALL = {"num_steps": 4, "sequence_length": 9, "burn_in": 3, "capacity": 2000, "batch_size": 8, "learning_starts": 32}


def learner(recurrent="gru", seed=0, **settings):
    config = R2D2Config(**{**SMALL, **settings})
    policy = build_policy(
        PolicyConfig(hidden_sizes=(8,), recurrent=recurrent), OBS, ACTIONS, seed=seed,
        make_network=lambda head, make_body: make_network(config, head, make_body),
    )  # fmt: skip
    return R2D2(policy, config, LearnerSetup(seed=seed))


def sequences(policy, length=9, count=5, seed=0, masked=False):
    rng = np.random.default_rng(seed)
    shape = (length, count)
    valid = torch.from_numpy(rng.random(shape) > 0.15)
    starts = torch.zeros(shape, dtype=torch.bool)
    starts[1:] = ~valid[:-1]
    terminated = torch.from_numpy(rng.random(shape) < 0.1) & valid
    masks = torch.from_numpy(rng.random((*shape, 3)) < 0.7) if masked else None
    if masks is not None:
        masks[..., 0] = True
    return Sequences(
        torch.from_numpy(rng.normal(size=(*shape, 3)).astype(np.float32)),
        torch.from_numpy(rng.integers(0, 3, shape)),
        torch.from_numpy(rng.normal(size=shape).astype(np.float32)),
        terminated,
        torch.zeros(shape, dtype=torch.bool),
        starts,
        valid,
        masks,
        tuple(torch.from_numpy(rng.normal(size=part.shape).astype(np.float32)) for part in policy.initial_state(count)),
        torch.from_numpy(rng.random(count).astype(np.float32)),
        torch.arange(count),
    )


def q_values(policy, batch):
    """Of every step, one at a time, from the stored state."""
    state, found = batch.state, []
    with torch.no_grad():
        for obs, starts in zip(batch.obs, batch.starts, strict=True):
            distribution, _, state = policy(obs, state, starts=starts)
            found.append(distribution.action_values.numpy())
    return np.stack(found)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("rescale_values", [False, True])
def test_the_loss_by_hand(double, rescale_values, masked):
    own = learner(double=double, rescale_values=rescale_values)
    with torch.no_grad():
        for parameter in own.target.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    config, batch = own.config, sequences(own.policy, masked=masked)
    loss, priorities, (_, q_value, td_error) = own.sequence_loss(batch)
    online, target = (q_values(policy, batch) for policy in (own.policy, own.target))
    valid, terminated = batch.valid.numpy(), batch.terminated.numpy()
    choosing = (online if double else target).copy()
    if masked:
        choosing[~batch.masks.numpy() & valid[..., None]] = -np.inf
    best = np.take_along_axis(target, choosing.argmax(-1)[..., None], -1)[..., 0]
    best = unscaled(torch.from_numpy(best)).numpy() if rescale_values else best
    errors, chosen = [[] for _ in range(5)], []
    for b in range(5):
        for t in range(config.burn_in, 8):
            if not valid[t, b]:
                continue
            total, discount, k = 0.0, 1.0, t
            while k < 8 and k - t < config.n_step and valid[k, b]:
                total += discount * float(batch.rewards[k, b])
                discount *= config.gamma
                if terminated[k, b]:
                    discount = 0.0
                    break
                k += 1
            total += discount * best[k, b]
            goal = float(rescaled(torch.tensor(total))) if rescale_values else total
            chosen.append(online[t, b, batch.actions[t, b]])
            errors[b].append(goal - chosen[-1])
    count = len(chosen)
    weighted = sum(float(batch.weights[b]) * np.square(errors[b]).sum() for b in range(5))
    assert loss.item() == pytest.approx(0.5 * weighted / count, rel=1e-4)
    assert float(q_value) == pytest.approx(np.mean(chosen), rel=1e-4)
    assert float(td_error) == pytest.approx(np.abs(np.concatenate(errors)).mean(), rel=1e-4)
    for b in range(5):
        sizes = np.abs(errors[b])
        assert float(priorities[b]) == pytest.approx(0.9 * sizes.max() + 0.1 * sizes.mean(), rel=1e-4)


def test_the_burn_in_gets_no_gradient_and_no_loss():
    own = learner()
    batch = sequences(own.policy)
    batch.obs.requires_grad_()
    loss, _, _ = own.sequence_loss(batch)
    loss.backward()
    assert not batch.obs.grad[:3].any()
    assert batch.obs.grad[3:].any()
    junk = batch._replace(rewards=batch.rewards.clone(), actions=batch.actions.clone())
    junk.rewards[:3], junk.actions[:3] = 100.0, 2
    assert torch.equal(own.sequence_loss(junk)[0], loss)


def test_the_state_is_the_stored_one_or_zero():
    stored, zero = learner(), learner(stored_state=False)
    batch = sequences(stored.policy)
    cleared = batch._replace(state=tuple(torch.zeros_like(part) for part in batch.state))
    assert torch.equal(zero.sequence_loss(batch)[0], stored.sequence_loss(cleared)[0])
    assert not torch.equal(stored.sequence_loss(batch)[0], stored.sequence_loss(cleared)[0])


def test_gradient_steps_change_priorities_and_targets(tmp_path):
    """Through `update`, with what a collector would have filled."""
    own = learner(target_every=3, replay_ratio=0.25)
    rollout = Rollout(own.policy, 4, 4)
    own.prepare(rollout)
    rng = np.random.default_rng(0)
    before = [parameter.clone() for parameter in own.policy.parameters()]
    for _ in range(12):
        rollout.obs.copy_(torch.from_numpy(rng.normal(size=rollout.obs.shape)))
        rollout.rewards.copy_(torch.from_numpy(rng.normal(size=rollout.rewards.shape)))
        metrics = own.update(rollout)
    assert own.gradient_steps > 3
    assert {"value_loss", "q_value", "replay_age"} <= set(metrics)
    assert metrics["replay_age"] > 0
    assert any(not torch.equal(*pair) for pair in zip(before, own.policy.parameters(), strict=True))
    assert any(not torch.equal(*pair) for pair in zip(before, own.target.parameters(), strict=True))


def test_which_targets_are_known():
    """A sum that would need the final observation of a truncated episode, which has no slot, is not known."""
    rng = np.random.default_rng(0)
    terminated, truncated, valid = (torch.from_numpy(rng.random((30, 6)) < share) for share in (0.1, 0.15, 0.8))
    known = has_targets(terminated, truncated, valid, 3)
    for row in range(6):
        for first in range(30):
            last = first
            while last < first + 2 and last < 29 and not terminated[last, row] and not truncated[last, row]:
                last += 1
            lost = truncated[last, row] and not terminated[last, row] and last < 29 and valid[last + 1, row]
            assert bool(known[first, row]) == (first < 29 and not lost)


def test_what_follows_a_truncation_changes_no_loss():
    own = learner()
    batch = sequences(own.policy)
    batch.valid.fill_(True)
    batch.terminated.fill_(False)
    batch.starts.fill_(False)
    batch.truncated[5], batch.starts[6] = True, True
    others = batch._replace(rewards=batch.rewards.clone())
    others.rewards[3:6] += 100.0
    loss = own.sequence_loss(batch)[0]
    assert torch.equal(own.sequence_loss(others)[0], loss)  # all of these sums reach it
    others.rewards[6] += 1.0
    assert not torch.equal(own.sequence_loss(others)[0], loss)


def test_it_learns_on_a_device_as_elsewhere():
    """From the same sequences, with the same weights: both buffers, both optimizers."""
    settings = {"learning_starts": 0, "replay_ratio": 0.25, "priority_alpha": 0.0, "capacity": 16 * 3, "batch_size": 64}
    config = R2D2Config(**{**SMALL, **settings, "sequence_length": 12})
    learners = []
    for graphs in (None, Graphs("cpu")):
        policy = learner().policy
        learners.append(R2D2(policy, config, LearnerSetup(graphs=graphs)))
    rollout, rng = Rollout(learners[0].policy, 4, 1), np.random.default_rng(0)
    for each in learners:
        each.prepare(rollout)
    for k in range(3):  # one sequence in all, of the only row
        rollout.obs.copy_(torch.from_numpy(rng.normal(size=rollout.obs.shape)))
        rollout.obs[0] = rollout.last_obs
        rollout.last_obs.copy_(torch.from_numpy(rng.normal(size=rollout.last_obs.shape)))
        rollout.rewards.copy_(torch.from_numpy(rng.normal(size=rollout.rewards.shape)))
        rollout.terminated[k, 0] = True
        rollout.starts[0], rollout.starts[1:] = k == 0, rollout.terminated[:-1]
        found = [each.update(rollout, 0.5) for each in learners]
    assert learners[0].gradient_steps == learners[1].gradient_steps == 1
    for name in R2D2.METRICS:
        assert found[0][name] == pytest.approx(found[1][name], rel=1e-4)
    for one, other in zip(*(each.policy.parameters() for each in learners), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_settings_that_do_not_fit():
    with pytest.raises(HurtleError, match="r2d2 learns with a memory"):
        hurtle.train("cartpole", algorithm="r2d2", recurrent="none")
    with pytest.raises(HurtleError, match="burn_in=8 leaves nothing to learn from in sequences of 9 steps: at most 7"):
        learner(burn_in=8).config.check(1, True)


RUN = {
    "algorithm": "r2d2", "progress": "quiet", "trackers": (), "eval_episodes": 2, "preset": False, "hidden_sizes": (16,),
    "num_envs": 8, "total_steps": 640, **SMALL, "capacity": 4000, "replay_ratio": 0.1,
}  # fmt: skip


def weights(run):
    saved = load_checkpoint(max((run.path / "checkpoints").glob("step-*.pt")))["policy"]
    return torch.cat([part.double().flatten() for part in saved.values()])


@pytest.mark.parametrize("recurrent", ["lstm", pytest.param("mingru", marks=pytest.mark.slow)])
def test_runs_repeat_and_resume(tmp_path, recurrent):
    how = {**RUN, "runs": str(tmp_path), "recurrent": recurrent, "epsilon_fraction": 0.0}
    how["priority_beta"] = 1.0  # otherwise annealed over other numbers of steps
    whole, again, half = (hurtle.train("cartpole", **{**how, "total_steps": steps}) for steps in (640, 640, 320))
    assert torch.equal(weights(whole), weights(again))
    resumed = hurtle.train(resume=str(half.path), total_steps=640)
    assert torch.equal(weights(whole), weights(resumed))


def test_the_device_gear_learns_and_resumes(tmp_path):
    """As on a GPU, but on the CPU; with the sequences saved, the same weights."""
    how = {**RUN, "runs": str(tmp_path), "runner": "local", "gear": "device", "save_replay": True, "priority_beta": 1.0}
    how |= {"epsilon_fraction": 0.0, "target_every": 4}
    whole, half = (hurtle.train("breakout", **{**how, "total_steps": steps}) for steps in (640, 320))
    resumed = hurtle.train(resume=str(half.path), total_steps=640)
    first, other = (load_checkpoint(max((run.path / "checkpoints").glob("step-*.pt"))) for run in (whole, resumed))
    assert first["learner"]["counts"] == other["learner"]["counts"]
    assert first["learner"]["counts"][2] > 20
    assert torch.equal(first["learner"]["replay"]["rings"]["starts"], other["learner"]["replay"]["rings"]["starts"])


def test_other_spaces_and_statistics(tmp_path):
    how = {**RUN, "runs": str(tmp_path), "total_steps": 320, "reward_mode": "normalize"}
    assert hurtle.train("breakout", **how).steps >= 320  # a grid of bytes
    how["normalize_observations"] = True
    assert hurtle.train("CartPole-v1", **how, backend="serial", num_actors=1).steps >= 320


def test_actors_explore_differently():
    config = find_algorithm("apex").config(epsilon_ladder=7.0)
    policies = [learner().policy for _ in range(4)]
    for actor, policy in enumerate(policies):
        config.diversify(policy, actor, 4)
        assert isinstance(policy.network, QNetwork)
        policy.network.epsilon.fill_(0.4)
    shares = [policy.network.exploration()[0] for policy in policies]
    assert shares == pytest.approx([0.4 ** (1 + 7 * i / 3) for i in range(4)])
    for policy, share in zip(policies, shares, strict=True):
        features = torch.randn(1, 8)
        assert float(policy.network.decode(features)[0].log_probs.exp().min()) == pytest.approx(share / 3, rel=1e-3)
    config.diversify(policies[0], 0, 1)  # alone
    assert policies[0].network.epsilon_power == 1.0


def test_apex_trains_with_its_actors(tmp_path, capsys):
    how = {"progress": "plain", "trackers": (), "eval_episodes": 2, "preset": False, "runs": str(tmp_path)}
    run = hurtle.train("cartpole", algorithm="apex", total_steps=1500, learning_starts=500, **how)
    assert run.steps >= 1500
    assert "async: 4 actors (2 + 2 + 2 + 2 envs), lag 1" in capsys.readouterr().out
