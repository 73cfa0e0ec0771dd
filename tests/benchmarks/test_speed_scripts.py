"""benchmarks/advantages.py, collect.py and train.py: that they run against their peers, and what they make of the numbers."""

import contextlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # scripts import each other as neighbours

import advantages
import collect
import peers
import record
import side_by_side
import train
from peers import GAE_LAMBDA, GAMMA, PlainPPO, Sizes
from side_by_side import GENERAL, NATIVE, compare, repeated

import hurtle
from hurtle import cli
from hurtle.kernels.gae import gae_reference
from hurtle.runners.trainer import Run


@pytest.fixture(autouse=True)
def results(tmp_path, monkeypatch):
    """The folder of results; nothing is kept in the real one."""
    for module in (record, side_by_side):
        monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    return tmp_path / "results"


def rows_of(output):
    """Who has a figure, and who was left out, in the table that a script printed."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in output.split("\n") if line.startswith("| ")]
    found = {(row[0], row[1]): row[2] for row in rows[2:]}
    return found, {who for (_, who), figure in found.items() if figure == "left out"}


# Running --------------------------------------------------------------------------------------------------------------


def test_advantages_agree_with_rlox_and_are_timed(capsys, results):
    pytest.importorskip("rlox")
    advantages.main(["--quick"])
    output = capsys.readouterr().out
    assert "### GAE" in output
    assert "### V-trace" in output
    assert "left out" not in output
    assert not results.exists()


def test_an_advantage_that_differs_is_not_timed():
    arrays = advantages.Arrays.random(6, 3)
    ours = advantages.our_gae(arrays)
    found = [array.copy() for array in ours()]
    advantages.check(ours, lambda: [array.T.reshape(-1) for array in found])
    found[1][2, 1] += 0.01
    with pytest.raises(AssertionError, match="Mismatched elements: 1 / 18"):
        advantages.check(ours, lambda: [array.T.reshape(-1) for array in found])


@pytest.mark.slow
def test_everybody_collects(capsys, results):
    pytest.importorskip("rlox")
    collect.main(["--quick"])
    found, left_out = rows_of(capsys.readouterr().out)
    assert {who for _, who in found} == set(collect.entrants(Sizes(1), 0.0))
    assert left_out == set()
    assert not results.exists()


@pytest.mark.slow
def test_everybody_trains(capsys, results):
    pytest.importorskip("rlox")
    train.main(["--quick", "--settings", "cartpole-8"])
    found, left_out = rows_of(capsys.readouterr().out)
    everybody = ("SB3", "plain torch script", "rlox PPO", "rlox HybridPPO", GENERAL, NATIVE)
    assert list(found) == [("CartPole, 8 × 128", who) for who in everybody]
    assert left_out == set()
    assert not results.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "who_is_there"),
    [
        ("pendulum", ["SB3", "plain torch script"]),
        ("asterix", ["SB3", "plain torch script"]),
        ("snake", ["SB3"]),
        ("Pendulum-v1-8", ["SB3", "SB3 SubprocVecEnv", train.BARE]),
        ("breakout-cnn", ["SB3"]),
    ],
)
def test_peers_train_on_the_other_envs(name, who_is_there):
    setting = (train.SETTINGS | train.PYTHON_ENVS | train.NETWORKS)[name]
    sizes = replace(setting.sizes, num_envs=2, num_steps=16, minibatch_size=32)
    makers = train.entrants(replace(setting, sizes=sizes), quick=True)
    assert list(makers) == [*who_is_there, GENERAL, NATIVE]
    with contextlib.ExitStack() as stack:
        for who in who_is_there:
            steps, seconds = makers[who](stack)()
            assert steps == sizes.batch == 2 * 16 * sizes.agents
            assert seconds > 0


def test_a_peer_that_hangs_is_tried_again_and_given_up(monkeypatch, capsys):
    monkeypatch.setattr(peers, "PATIENCE", 0.01)
    with pytest.raises(RuntimeError, match="did not end in 3 tries"):
        peers.in_own_process("candle_turn", Sizes(8), 0.0)
    assert capsys.readouterr().out.count("another try") == 3


def test_our_training_gets_the_numbers_of_the_setting(monkeypatch):
    calls = []

    def note(env, **words):
        calls.append({"env": env, **words})
        return Run(Path(), words["total_steps"], 0.5, 0.0, None, "total_steps")

    monkeypatch.setattr(hurtle, "train", note)
    job = train.entrants(train.SETTINGS["snake"], quick=False)[NATIVE](contextlib.ExitStack())
    assert job() == (98 * 4096, 0.5)  # the first number of whole rollouts that makes 400,000 steps
    assert [call["total_steps"] for call in calls] == [4096, 98 * 4096]  # once through first
    expected = {"env": "snake", "gear": "native", "num_envs": 8, "num_steps": 128, "minibatch_size": 512, "num_epochs": 4}
    assert {word: calls[1][word] for word in expected} == expected
    assert (calls[1]["policy"], calls[1]["hidden_sizes"], calls[1]["preset"]) == ("mlp", (64, 64), False)
    for name, policy, recurrent in (("breakout-cnn", "grid_cnn", "none"), ("cartpole-gru", "mlp", "gru")):
        train.entrants(train.NETWORKS[name], quick=True)[NATIVE](contextlib.ExitStack())
        assert (calls[-1]["policy"], calls[-1]["recurrent"]) == (policy, recurrent)


# What is made of it ---------------------------------------------------------------------------------------------------


def entrant(*speeds):
    """Somebody with these steps per second, round after round."""
    left = list(speeds)
    return lambda _: lambda: (int(2 * left.pop(0)), 2.0)


def missing(_):
    raise ImportError("No module named 'peer'")


def test_ratios_are_made_within_rounds_and_who_is_missing_is_named(capsys):
    makers = {"slow": entrant(100, 10, 100), "peer": missing, NATIVE: entrant(400, 50, 300)}
    numbers, rows = compare("a case", makers, rounds=3)
    assert rows == [
        ["a case", "slow", "100", "4.00x", "–"],  # 4, 5 and 3 times; not 300 / 100
        ["a case", "peer", "left out", "–", "–"],
        ["a case", NATIVE, "300", "1.00x", "–"],
    ]
    assert numbers["steps_per_second"] == {"slow": [100, 10, 100], NATIVE: [400, 50, 300]}
    assert numbers["left_out"] == {"peer": "ImportError: No module named 'peer'"}
    assert "a case, round 3 of 3: slow 100, hurtle native 300" in capsys.readouterr().out


def test_a_job_repeats_until_its_time_is_over():
    calls = []
    assert repeated(lambda: calls.append(1), 10, 0.0)()[0] == 10
    steps, seconds = repeated(lambda: calls.append(1), 10, 0.01)()
    assert seconds >= 0.01
    assert steps == 10 * (len(calls) - 1)


def test_results_are_drawn(results):
    pytest.importorskip("matplotlib")
    results.mkdir()
    rates = {"SB3": [1e3, 2e3, 3e3], NATIVE: [2e5, 2e5, 1e5]}
    content = {"machine": {}, "8 envs": {"steps_per_second": rates}, "64 envs": {"steps_per_second": rates}}
    (results / "collect.json").write_text(json.dumps(content))
    collect.main(["--plot"])
    assert (results / "collect.png").stat().st_size > 5000


def test_time_to_solve_is_read_from_the_run(capsys, monkeypatch, results):
    def in_this_process(command, **_):
        assert command[:3] == [sys.executable, "-m", "hurtle"]
        assert cli.main(command[3:]) == 0

    monkeypatch.setattr(train, "subprocess", SimpleNamespace(run=in_this_process, DEVNULL=None))
    train.main(["--quick", "--time-to-solve"])
    assert "['0', '512', 'not solved', 'not solved']" in capsys.readouterr().out
    assert not results.exists()


def test_time_to_solve_tells_training_from_the_process(monkeypatch):
    def solved(seed, *_):
        seconds = {"seconds": 1.0 + seed, "process_seconds": 3.0 + seed}
        return {"seed": seed, "steps": 1000 * (seed + 1), "stopped_by": "stop_at_return", **seconds}

    monkeypatch.setattr(train, "solve", solved)
    results, text = train.measure_time_to_solve(3)
    assert [run["seed"] for run in results["runs"]] == [0, 1, 2]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.split("\n") if line.startswith("| ")]
    assert cells[2] == ["0", "1,000", "1.00 s", "3.00 s"]
    assert cells[-1] == ["median", "2,000", "2.00 s", "4.00 s"]
    unsolved = [{**run, "stopped_by": "total_steps"} for run in results["runs"][:2]]
    assert train._until_solved([*unsolved, results["runs"][2]]) == ["not solved", "not solved"]
    assert train._until_solved([*results["runs"][:2], unsolved[0]]) == ["2.00 s", "4.00 s"]


# The plain torch script -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cartpole-8", "pendulum", "asterix"])
def test_the_plain_script_computes_advantages_and_learns(name):
    script = PlainPPO([train.SETTINGS[name].make] * 3, Sizes(3, num_steps=40, minibatch_size=30))
    script.collect()
    arrays = [field.numpy() for field in (script.rewards, script.values, script.dones.bool())]
    last = script.critic(script.next_obs)[:, 0].detach().numpy()
    never, unread = np.zeros((40, 3), bool), np.zeros((40, 3), np.float32)
    expected = gae_reference(*arrays, never, unread, last, GAMMA, GAE_LAMBDA)
    np.testing.assert_allclose(script.advantages, expected, rtol=1e-4, atol=1e-4)
    before = [weight.detach().clone() for weight in script.weights]
    script.update()
    assert all(bool((old != new).any()) for old, new in zip(before, script.weights, strict=True))


@pytest.mark.slow
def test_everybody_plays_atari(capsys, results):
    pytest.importorskip("ale_py")
    import atari

    atari.main(["--quick"])
    found, left_out = rows_of(capsys.readouterr().out)
    assert {atari.EMULATING, atari.SCREENS, atari.OURS, atari.POOL, atari.ALE} <= {who for _, who in found} - left_out
    assert left_out <= {atari.ENVPOOL, atari.GYMNASIUM}
    assert not results.exists()
