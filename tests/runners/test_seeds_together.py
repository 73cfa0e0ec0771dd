"""Seeds side by side in one loop, in this process: each leaves the run folder that it would leave alone."""

import json
import math
import os
import signal

import numpy as np
import pytest
import torch
from sample_envs import Crew

import hurtle
from hurtle.envs.registry import name_of
from hurtle.errors import HurtleError
from hurtle.experiments.records import RunRecord
from hurtle.runners import evaluate, seeds_assembly, seeds_together
from hurtle.runners.evaluate import evaluate_run
from hurtle.runners.seed_record import SeedParts, SeedStart
from hurtle.runners.seeds_obstacle import together_obstacle
from hurtle.runners.seeds_together import SeedsTogether, grouped
from hurtle.runners.settings import make_settings, settings_from_dict, settings_to_dict
from hurtle.tracking.checkpoints import Checkpoints, load_checkpoint
from hurtle.tracking.run_state import is_running

SMALL = {
    "num_envs": 2, "hidden_sizes": (8,), "learning_starts": 16, "batch_size": 8, "capacity": 400, "replay_ratio": 0.25,
    "eval_episodes": 2, "trackers": (), "progress": "quiet", "preset": False,
}  # fmt: skip
SMALL_PPO = {
    "num_envs": 4, "hidden_sizes": (8,), "num_steps": 8, "minibatch_size": 16, "eval_episodes": 2, "trackers": (),
    "progress": "quiet", "preset": False, "anneal_learning_rate": False,
}  # fmt: skip
SEEDS = (3, 4, 5)
play = evaluate._play_compiled
FIXED = {"epsilon_fraction": 0.0, "priority_beta": 1.0}
"""Nothing depends on the length of the run."""


def starts(tmp_path, algorithm="sac", env="pendulum", folders=None, seeds=SEEDS, **options):
    """New seeds, or those that go on from their newest checkpoints."""
    small = SMALL_PPO if algorithm == "ppo" else SMALL
    flat = settings_to_dict(make_settings(env, {**small, "algorithm": algorithm, "runs": str(tmp_path), **options}))
    found = []
    for seed in seeds:
        settings = settings_from_dict({**flat, "seed": seed, "name": f"seed-{seed}"})
        folder = None if folders is None else folders / f"seed-{seed}"
        found.append(SeedStart(settings, folder, folder and Checkpoints(folder / "checkpoints").latest()))
    return found


def trained(given, **patches):
    """Train them; what was told."""
    told = []
    together = SeedsTogether(given, lambda *event: told.append(event))
    for name, replacement in patches.items():
        setattr(together, name, replacement(together))
    together.run()
    return told


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_each_seed_has_the_folder_of_a_run(tmp_path):
    told = trained(starts(tmp_path, total_steps=440, eval_every=220, checkpoint_every=200, replay_ratio=0.05))
    assert told == [("ended", seed, "") for seed in SEEDS]
    values = set()
    for seed in SEEDS:
        folder = tmp_path / f"seed-{seed}"
        record, newest = RunRecord.read(folder), lines(folder)
        assert (record.seed, record.state, record.steps) == (seed, "finished", 440)
        assert math.isfinite(record.evaluation)
        assert math.isfinite(record.steps_per_second)
        assert json.loads((folder / "about.json").read_text())["gear"] == "side by side"
        assert json.loads((folder / "summary.json").read_text())["stopped_by"] == "total_steps"
        assert {"README.md", "config.toml", "checkpoints"} < {path.name for path in folder.iterdir()}
        saved = [path.name for path in sorted((folder / "checkpoints").iterdir())]
        assert saved == ["best.pt", "step-000000000200.pt", "step-000000000400.pt", "step-000000000440.pt"]
        assert [line["step"] for line in newest if "eval_return" in line] == [220, 440, 440]
        last = [line for line in newest if "value_loss" in line][-1]
        assert (last["steps"], last["updates"], last["episodes"]) == (440, 220, 2)
        values.add((last["value_loss"], last["episode_return"], record.evaluation))
        policy = hurtle.load(folder)
        assert policy.act(np.zeros((2, 3), np.float32)).shape == (2, 1)
        assert evaluate_run(folder, episodes=2).episodes == 2
        assert not is_running(folder)
    assert len(values) == len(SEEDS)


@pytest.mark.parametrize(("algorithm", "env"), [("sac", "pendulum"), ("dqn", "cartpole")])
def test_until_it_learns_a_seed_is_the_run_that_it_would_be_alone(algorithm, env, tmp_path):
    """The same envs, actions, episodes and first weights."""
    how = {"total_steps": 420, "learning_starts": 10_000, "capacity": 2_000}
    trained(starts(tmp_path / "together", algorithm, env, **how))
    for seed in SEEDS[::2]:
        alone = hurtle.train(env, algorithm, seed=seed, runs=tmp_path, name=f"alone-{seed}", gear="general", **SMALL | how)
        own = tmp_path / "together" / f"seed-{seed}"
        expected, found = lines(alone.path)[-2], lines(own)[-2]
        same = [name for name in expected if not name.startswith(("seconds", "steps_per", "time/", "threads/", "replay"))]
        assert found["episodes"] > 0
        assert {name: found[name] for name in same} == {name: expected[name] for name in same}
        assert RunRecord.read(own).evaluation == alone.evaluation.mean
        one, other = (load_checkpoint(Checkpoints(path / "checkpoints").latest()) for path in (own, alone.path))
        for name, array in other["collector"]["envs"].items():
            if name != "actions":  # the last ones, which differ in rounding
                np.testing.assert_allclose(one["collector"]["envs"][name], array, atol=1e-6, err_msg=name)
        own, expected = ({**saved["settings"], "runs": "", "name": ""} for saved in (one, other))
        assert settings_from_dict({**own, "gear": "general"}) == settings_from_dict(expected)


@pytest.mark.parametrize(
    ("algorithm", "env", "options"),
    [
        ("sac", "pendulum", {}),
        ("dqn", "cartpole", {**FIXED, "priority_alpha": 0.6, "n_step": 3, "env_parameters": {"max_steps": 9}}),
        ("ppo", "pendulum", {"normalize_observations": True, "reward_mode": "normalize", "env_parameters": {"max_steps": 9}}),
    ],
)
def test_going_on_is_exact(algorithm, env, options, tmp_path):
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    trained(starts(straight, algorithm, env, total_steps=64, **options))
    trained(starts(stopped, algorithm, env, total_steps=40, **options))
    trained(starts(stopped, algorithm, env, folders=stopped, total_steps=64, **options))
    for seed in SEEDS:
        one, other = (Checkpoints(path / f"seed-{seed}" / "checkpoints").latest() for path in (straight, stopped))
        one, other = load_checkpoint(one), load_checkpoint(other)
        for name in ("policy", "learner", "collector"):
            assert_equal(other[name], one[name], name)
        assert lines(stopped / f"seed-{seed}")[-1]["eval_return"] == lines(straight / f"seed-{seed}")[-1]["eval_return"]


def assert_equal(found, expected, where):
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for name, value in expected.items():
            assert_equal(found[name], value, f"{where} {name}")
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected), where
    elif isinstance(expected, list | tuple):
        for k, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_equal(one, other, f"{where} {k}")
    elif isinstance(expected, np.ndarray):
        np.testing.assert_array_equal(found, expected, where)
    else:
        assert found == expected, where


def test_a_seed_of_ppo_is_the_run_that_it_would_be_alone(tmp_path):
    """To rounding, statistics included; alone, and from the state of the run side by side."""
    how = {"total_steps": 160, "normalize_observations": True, "reward_mode": "normalize", "num_epochs": 2}
    trained(starts(tmp_path / "together", "ppo", "pendulum", **how))
    for seed in SEEDS[::2]:
        alone = hurtle.train("pendulum", seed=seed, runs=tmp_path, name=f"alone-{seed}", gear="device", **SMALL_PPO | how)
        own = tmp_path / "together" / f"seed-{seed}"
        found, expected = lines(own)[-2], lines(alone.path)[-2]
        for name in ("steps", "updates", "policy_loss", "value_loss", "explained_variance", "learning_rate", "entropy"):
            assert found[name] == pytest.approx(expected[name], rel=1e-2, abs=1e-4), name
        one, other = (load_checkpoint(Checkpoints(path / "checkpoints").latest()) for path in (own, alone.path))
        for name, part in other["policy"].items():
            torch.testing.assert_close(one["policy"][name], part, rtol=1e-3, atol=1e-4, msg=name)
        assert one["policy"]["normalizer.count"] == other["policy"]["normalizer.count"] == 160
        torch.testing.assert_close(
            one["learner"]["postprocess"]["m2"], other["learner"]["postprocess"]["m2"], rtol=1e-3, atol=0
        )
    run = hurtle.train(resume=tmp_path / "together" / "seed-4", total_steps=192, gear="general")
    assert run.steps == 192


def test_on_a_gpu_native_envs_are_evaluated_in_compiled_code(tmp_path, monkeypatch):
    """To rounding the returns of torch; the policies stay where they are."""
    together = SeedsTogether(starts(tmp_path, "ppo", "pendulum", total_steps=32), lambda *_: None)
    together._prepare()
    record = together.records[1]
    expected = record.evaluate()
    played = []
    monkeypatch.setattr(SeedParts, "device", torch.device("cuda"))
    monkeypatch.setattr(evaluate, "_play_compiled", lambda *given: played.append(given) or play(*given))
    assert record.evaluate().returns == pytest.approx(expected.returns, rel=1e-4)
    assert len(played) == 1
    for each in together.records:
        each.close()
    together.parts.close()


def test_episodes_of_ppo_are_counted_for_each_seed(tmp_path):
    trained(starts(tmp_path, "ppo", "bandit", total_steps=640, checkpoint_every=320))
    counts = [lines(tmp_path / f"seed-{seed}")[-1] for seed in SEEDS]
    assert [json.loads((tmp_path / f"seed-{seed}" / "summary.json").read_text())["steps"] for seed in SEEDS] == [640] * 3
    episodes = [[line["episodes"] for line in lines(tmp_path / f"seed-{seed}") if "episodes" in line][-1] for seed in SEEDS]
    assert all(episodes), counts


def test_a_seed_that_diverges_fails_alone(tmp_path):
    def break_one(together):
        update = together._update

        def broken():
            if together.clock.updates == 12:
                for parameter in together.parts.learner.learners[1].critics.parameters():
                    parameter.data.fill_(torch.nan)
            return update()

        return broken

    told = trained(starts(tmp_path, total_steps=64, checkpoint_every=10), _update=break_one)
    assert [(what, seed) for what, seed, _ in told] == [("failed", 4), ("ended", 3), ("ended", 5)]
    assert "value_loss" in told[0][2]
    assert "step-000000000020.pt" in told[0][2]
    states = [RunRecord.read(tmp_path / f"seed-{seed}").state for seed in SEEDS]
    assert states == ["finished", "crashed", "finished"]
    for seed, steps in zip(SEEDS, (64, 26, 64), strict=True):
        assert lines(tmp_path / f"seed-{seed}")[-1]["steps"] == pytest.approx(steps, abs=2)
        policy = load_checkpoint(Checkpoints(tmp_path / f"seed-{seed}" / "checkpoints").latest())["policy"]
        assert all(part.isfinite().all() for part in policy.values())


@pytest.mark.parametrize("what", ["policy", "loss"])
def test_a_seed_of_ppo_that_diverges_fails_alone(what, tmp_path):
    """Its policy acts with numbers that are not finite, or its loss is none; those that go on go on after a stop, too."""

    def break_one(together):
        def broken():
            learner = together.parts.learner.learners[1]
            if together.clock.updates == 2 and what == "policy":
                for parameter in learner.policy.parameters():
                    parameter.data.fill_(torch.nan)
            elif together.clock.updates == 2:
                learn = together.parts.learner.update

                def update(rollout, progress):
                    rollout.of_rows(4, 4).log_probs.fill_(torch.nan)
                    return learn(rollout, progress)

                together.parts.learner.update = update
            return type(together)._update(together)

        return broken

    told = trained(starts(tmp_path, "ppo", "pendulum", total_steps=192, checkpoint_every=32), _update=break_one)
    assert [(what, seed) for what, seed, _ in told] == [("failed", 4), ("ended", 3), ("ended", 5)]
    assert ("of seed 4" if what == "policy" else "value_loss") in told[0][2]
    assert [RunRecord.read(tmp_path / f"seed-{seed}").state for seed in SEEDS] == ["finished", "crashed", "finished"]
    saved = {seed: Checkpoints(tmp_path / f"seed-{seed}" / "checkpoints").latest().stem for seed in SEEDS}
    assert saved == {3: "step-000000000192", 4: "step-000000000064", 5: "step-000000000192"}
    for seed in SEEDS:
        policy = load_checkpoint(Checkpoints(tmp_path / f"seed-{seed}" / "checkpoints").latest())["policy"]
        assert all(part.isfinite().all() for part in policy.values())


def test_a_seed_that_fails_while_states_are_taken_is_not_saved(tmp_path):
    """On a GPU a failure may be reported only then."""

    def fail_late(together):
        def late():
            type(together)._settle(together)
            if together.clock.steps == 96:
                together._fail(1, HurtleError("it was not finite."))

        return late

    told = trained(starts(tmp_path, "ppo", "pendulum", total_steps=160, checkpoint_every=32), _settle=fail_late)
    assert [(what, seed) for what, seed, _ in told] == [("failed", 4), ("ended", 3), ("ended", 5)]
    assert Checkpoints(tmp_path / "seed-4" / "checkpoints").latest().stem == "step-000000000064"


def test_checkpoints_describe_the_env_as_a_run_alone_does(tmp_path):
    how = {"total_steps": 64, "minibatch_size": 24}
    trained(starts(tmp_path, "ppo", name_of(Crew), **how))
    hurtle.train(Crew, seed=3, runs=tmp_path, name="alone", gear="device", **SMALL_PPO | how)
    found = [load_checkpoint(Checkpoints(tmp_path / name / "checkpoints").latest())["spaces"] for name in ("seed-3", "alone")]
    assert found[0] == found[1]
    assert found[0]["masked"]


@pytest.mark.parametrize("algorithm", ["sac", "ppo"])
def test_if_all_diverge_all_fail(algorithm, tmp_path):
    def break_all(together):
        def broken():
            for learner in together.parts.learner.learners:
                for parameter in (learner.policy if algorithm == "ppo" else learner.critics).parameters():
                    parameter.data.fill_(torch.nan)
            return type(together)._update(together)

        return broken

    told = trained(starts(tmp_path, algorithm, total_steps=64), _update=break_all)
    assert [(what, seed) for what, seed, _ in told] == [("failed", seed) for seed in SEEDS]


def test_ctrl_c_saves_all(tmp_path):
    def interrupt(together):
        def save(*_):
            os.kill(os.getpid(), signal.SIGINT)

        return lambda: (save() if together.clock.updates == 10 else None, type(together)._update(together))[1]

    told = trained(starts(tmp_path, total_steps=400), _update=interrupt)
    assert [what for what, *_ in told] == ["ended"] * 3
    records = [RunRecord.read(tmp_path / f"seed-{seed}") for seed in SEEDS]
    assert [(record.state, record.steps) for record in records] == [("stopped", 22)] * 3
    assert all((record.path / "checkpoints" / "step-000000000022.pt").is_file() for record in records)
    assert all(math.isnan(record.evaluation) for record in records)
    trained(starts(tmp_path, folders=tmp_path, total_steps=30))
    assert [RunRecord.read(record.path).state for record in records] == ["finished"] * 3


def test_an_env_that_fails_ends_all_and_names_the_seed(tmp_path):
    def fail(together):
        together.parts.vec.step = lambda actions: (_ for _ in ()).throw(HurtleError("it broke"))
        return type(together)._update.__get__(together)

    with pytest.raises(HurtleError, match=r"it broke Last checkpoint: .*step-000000000000.pt"):
        trained(starts(tmp_path, total_steps=64), _update=fail)
    assert [RunRecord.read(tmp_path / f"seed-{seed}").state for seed in SEEDS] == ["crashed"] * 3
    together = SeedsTogether(starts(tmp_path / "other"), lambda *_: None)
    assert together.parts.collector.rows.name_of(3) == "env 1 of seed 4"
    together.parts.close()


def test_a_seed_stops_at_its_return_while_others_go_on(tmp_path):
    told = trained(starts(tmp_path, "dqn", "bandit", total_steps=600, stop_at_return=0.1, learning_starts=10_000))
    assert sorted(seed for _, seed, _ in told) == list(SEEDS)
    for seed in SEEDS:
        summary = json.loads((tmp_path / f"seed-{seed}" / "summary.json").read_text())
        assert summary["stopped_by"] in ("stop_at_return", "total_steps")
        assert (summary["steps"] < 600) == (summary["stopped_by"] == "stop_at_return")
    assert {json.loads((tmp_path / f"seed-{seed}" / "summary.json").read_text())["stopped_by"] for seed in SEEDS} != {
        "total_steps"
    }


def test_a_seed_goes_on_alone(tmp_path, capfd):
    """On the same kind of learner with its replay buffer; in compiled code with an empty one."""
    trained(starts(tmp_path, total_steps=64))
    run = hurtle.train(resume=tmp_path / "seed-4", total_steps=80, gear="device")
    assert run.steps == 80
    assert "empty replay" not in capfd.readouterr().err
    run = hurtle.train(resume=tmp_path / "seed-5", total_steps=80, gear="general")
    assert run.steps == 80
    assert "begins with an empty replay buffer" in capfd.readouterr().err


def test_what_does_not_fit_is_left_for_another_turn(tmp_path, monkeypatch):
    given = starts(tmp_path, total_steps=4, seeds=range(5))
    monkeypatch.setattr(seeds_assembly, "replay_bytes", lambda like, capacity: 1000)
    monkeypatch.setattr(seeds_assembly, "available_memory", lambda: 4 * 1000 / seeds_assembly.REPLAY_SHARE)
    told = trained(given)
    assert told == [("left", 3, ""), ("left", 4, ""), *(("ended", seed, "") for seed in range(3))]  # 3 and 2, not 4 and 1
    monkeypatch.setattr(seeds_assembly, "available_memory", lambda: 900)
    with pytest.raises(HurtleError, match="use a smaller capacity than 400"):
        trained(given)


def test_seeds_are_grouped_by_their_checkpoints(tmp_path, monkeypatch):
    monkeypatch.setattr(seeds_together, "is_whole", lambda file: file.read_text() != "damaged")

    def folder(name, *steps, damaged=()):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
        for step in steps:
            file = tmp_path / name / "checkpoints" / f"step-{step:012}.pt"
            file.write_text("damaged" if step in damaged else "")
        return tmp_path / name

    def steps_of(*folders):
        found = grouped(folders)
        return [[(k, None if file is None else int(file.stem[5:])) for k, file in group] for group in found]

    a, b = folder("a", 10, 20, 30), folder("b", 10, 20)
    assert steps_of(a, b) == [[(0, 20), (1, 20)]]
    assert steps_of(a, None, a) == [[(0, 30), (2, 30)], [(1, None)]]
    assert steps_of(a, folder("c", 10), a) == [[(0, 30), (2, 30)], [(1, 10)]]
    assert steps_of(a, folder("d", 20, 30, damaged=(30,))) == [[(0, 20), (1, 20)]]
    assert steps_of(None, None) == [[(0, None), (1, None)]]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, ""),
        ({"algorithm": "a2c", "normalize_observations": True}, ""),
        ({"algorithm": "impala"}, "impala has no version for many seeds"),
        ({"recurrent": "gru"}, "has a memory"),
        ({"priority_alpha": 0.5}, "priorities and V-trace"),
        ({"vtrace": True}, "priorities and V-trace"),
        ({"optimizer": "muon"}, "optimizer='muon'"),
        ({"backend": "process"}, "these step on the CPU"),
        ({"policy": "my_policy.py:Net"}, "not one of Hurtle's own"),
        ({"algorithm": "rainbow"}, "noisy layers"),
        ({"algorithm": "r2d2"}, "has a memory"),
        ({"algorithm": "apex"}, "collects with actors"),
        ({"algorithm": "dqn", "normalize_observations": True}, "running statistics"),
        ({"algorithm": "dqn", "pool_batch_size": 1}, "not in step"),
        ({"algorithm": "dqn", "curriculum": {"max_steps": "uniform:10:20"}}, "a curriculum"),
        ({"algorithm": "dqn", "gear": "native"}, "gear='native' is for single runs"),
        ({"algorithm": "xqc"}, ""),
        ({"algorithm": "dqn", "reward_mode": "sign"}, ""),
    ],
)
def test_what_cannot_be_trained_side_by_side_is_named(options, why):
    found = together_obstacle(make_settings("cartpole", {"preset": False, **options}))
    assert why in found if why else found is None


@pytest.mark.parametrize(("env", "why"), [("Pendulum-v1", "these step on the CPU"), ("snake", "agents may be absent")])
def test_envs_that_cannot_be_side_by_side_with_ppo_are_named(env, why):
    assert why in together_obstacle(make_settings(env, {"preset": False}))
