"""Runs under a curriculum: the same in all gears, with any number of threads and after a resume; what they report; errors."""

import json

import gymnasium
import pytest
import torch
from ladder_envs import Ladder, PythonLadder

import hurtle
from hurtle.cli.dispatch import main
from hurtle.errors import HurtleError, UnknownNameError
from hurtle.runners.assembly import assemble
from hurtle.runners.settings import make_settings
from hurtle.tracking.checkpoints import load_checkpoint

RULES = {"size": "gated:1:6:2.0:5:20", "push": "uniform:0.5:1.0"}
SMALL = {
    "progress": "quiet",
    "trackers": (),
    "eval_episodes": 4,
    "preset": False,
    "num_envs": 6,
    "num_steps": 16,
    "minibatch_size": 96,
    "num_epochs": 1,
    "hidden_sizes": (8,),
}
BATCH = 96


def train(env, tmp_path, updates=6, **words):
    return hurtle.train(env, total_steps=updates * BATCH, **{**SMALL, "runs": str(tmp_path), "curriculum": RULES, **words})


def lines(run):
    return [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]


def told(run):
    """What a curriculum decides, update by update."""
    names = ("curriculum/", "episode/", "episode_return", "episodes")
    return [{name: value for name, value in line.items() if name.startswith(names)} for line in lines(run) if "updates" in line]


def saved(run):
    return load_checkpoint(max((run.path / "checkpoints").glob("step-*.pt")))


@pytest.fixture(scope="module")
def native(tmp_path_factory):
    return train(Ladder, tmp_path_factory.mktemp("native"))


def test_a_run_reports_values_ranges_and_the_gate(native):
    last, levels = told(native)[-1], [line["curriculum/size_level"] for line in told(native)]
    assert levels == sorted(levels)
    assert last["curriculum/size_low"] == 1.0
    assert [line["curriculum/size_high"] for line in told(native)] == [1.0, *(1.0 + level for level in levels[:-1])]
    assert levels[-1] > 1.0
    assert 1.0 <= last["episode/size"] <= last["curriculum/size_high"]
    assert last["curriculum/push"] == pytest.approx(0.75)
    assert 0.7 < last["episode/push"] < 0.8


@pytest.mark.parametrize(
    "words",
    [{"gear": "general"}, {"num_workers": 1}, {"runner": "async", "lag": "0", "num_actors": 1}],
    ids=str,
)
def test_gears_threads_and_runners_agree(native, tmp_path, words):
    run = train(Ladder, tmp_path, **words)
    for found, expected in zip(told(run), told(native), strict=True):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name] == (None if value is None else pytest.approx(value, rel=1e-6)), name


def test_a_resumed_run_ends_as_if_it_had_never_stopped(native, tmp_path):
    half = train(Ladder, tmp_path, callbacks=[lambda trainer: trainer.updates < 3])
    assert half.stopped_by == "callback"
    whole = hurtle.train(resume=half)
    assert told(whole) == told(native)
    found, expected = saved(whole), saved(native)
    assert found["collector"]["curriculum"] == expected["collector"]["curriculum"]
    assert all(torch.equal(found["policy"][name], value) for name, value in expected["policy"].items())


def test_python_envs_go_on_at_the_level_they_had(tmp_path):
    half = train(PythonLadder, tmp_path, backend="serial", callbacks=[lambda trainer: trainer.updates < 4])
    level = saved(half)["collector"]["curriculum"]["rules"]["size"]["level"]
    whole = hurtle.train(resume=half)
    assert told(whole)[4]["curriculum/size_level"] >= level > 0


@pytest.mark.parametrize("runner", ["async", "local"])
def test_asynchronous_actors_of_python_envs_keep_their_levels(tmp_path, runner):
    half = train(PythonLadder, tmp_path, backend="serial", runner="async", num_actors=2, lag="1", updates=12,
                 callbacks=[lambda trainer: trainer.updates < 9])  # fmt: skip
    kept = saved(half)["collector"]["curricula"]
    assert len(kept) == 2
    whole = hurtle.train(resume=half, runner=runner)
    mean = sum(own["rules"]["size"]["level"] for own in kept) / 2
    assert told(whole)[9]["curriculum/size_level"] >= mean > 0  # actors add up what each reports, by its share of the envs


def test_evaluations_play_the_defaults(tmp_path):
    run = train(Ladder, tmp_path, updates=1)
    assert set(run.evaluation.returns / run.evaluation.lengths) == {3.0}


def test_settings_are_kept_and_override_each_other(tmp_path, native):
    assert 'size = "gated:1:6:2.0:5:20"' in (native.path / "config.toml").read_text()
    file = tmp_path / "my.toml"
    file.write_text('[train.curriculum]\nsize = "linear:1:6"\n')
    assert make_settings("cartpole", {}, file).train.curriculum == {"size": "linear:1:6"}
    found = make_settings("cartpole", {"curriculum": ["a=uniform:1:2", "b=progress:0.5:1:4"]}, file)
    assert found.train.curriculum == {"a": "uniform:1:2", "b": "progress:0.5:1:4"}


def test_python_acts_between_updates():
    parts = assemble(make_settings("ladder", {**SMALL, "curriculum": {}, "num_workers": 1}), Ladder)
    assert parts.gear.loop is not None
    parts.close()
    parts = assemble(make_settings("ladder", {**SMALL, "curriculum": RULES, "num_workers": 1}), Ladder)
    assert parts.gear.loop is None
    parts.close()


@pytest.mark.parametrize(
    ("env", "words", "error", "text"),
    [
        (Ladder, {"curriculum": {"sise": "uniform:1:2"}}, UnknownNameError, "Ladder has no option 'sise'. Did you mean size?"),
        ("pendulum", {"curriculum": {"mass": "uniform:1:2"}}, UnknownNameError, "'mass' is a parameter, a constant"),
        (Ladder, {"curriculum": {"size": "uniform:0.5:2"}}, HurtleError, "size is an option that holds whole numbers"),
        (
            Ladder,
            {"curriculum": {"size": "gate:1:2:3"}},
            HurtleError,
            "curriculum size=gate:1:2:3 must be .*Did you mean gated",
        ),
        (Ladder, {"curriculum": {"size": "uniform:1:300"}}, HurtleError, "'size' of Ladder holds int8, got"),
        ("snake", {"curriculum": {"longest": "progress:1:2"}}, UnknownNameError, "no options at all"),
        (PythonLadder, {"backend": "serial", "pool_batch_size": 3}, HurtleError, "leave out the batch size"),
        (PythonLadder, {"backend": "serial", "curriculum": {"sise": "uniform:1:2"}}, HurtleError, "Did you mean size"),
    ],
)
def test_mistakes_are_explained(env, words, error, text, tmp_path):
    with pytest.raises(error, match=text):
        train(env, tmp_path, updates=1, **words)


def test_a_vector_of_ones_own_must_draw_the_options(tmp_path):
    vec = hurtle.make_vec(Ladder, 6)
    with pytest.raises(HurtleError, match=r"your vector draws nothing: .*drawn=\('size', 'push'\)"):
        train(vec, tmp_path, num_envs=6)
    with pytest.raises(HurtleError, match="draws nothing"):
        train(gymnasium.make_vec("CartPole-v1", 2), tmp_path, curriculum={"length": "uniform:0.5:1"})
    run = train(hurtle.make_vec(Ladder, 6, drawn=("size", "push")), tmp_path, updates=2, num_envs=6)
    assert told(run)[-1]["curriculum/push"] == pytest.approx(0.75)


def test_the_command_line_takes_rules(capsys, tmp_path):
    assert main(["train", "cartpole", "--curriculum", "length=uniform:1", "--runs", str(tmp_path)]) != 0
    assert "--curriculum length=uniform:1 must be uniform:LOW:HIGH" in capsys.readouterr().err
