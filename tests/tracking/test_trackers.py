"""Trackers: a JSONL file that survives crashes, real TensorBoard events, faked services, and failures that end nothing."""

import json
import math
import sys
import types

import numpy as np
import pytest

from hurtle.errors import HurtleError, UnknownNameError
from hurtle.tracking import trackers as module
from hurtle.tracking.run_folder import RunFolder
from hurtle.tracking.trackers import JsonlTracker, MlflowTracker, TensorBoardTracker, WandbTracker, make_trackers

NAN = math.nan


def lines(path):
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


@pytest.fixture
def run(tmp_path):
    return RunFolder.create(tmp_path, name="my-run")


# JSON lines


def test_each_line_is_on_the_disk_at_once(tmp_path):
    file = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(file)
    tracker.log({"steps": 128, "loss": np.float32(0.5), "kl": NAN, "norm": -math.inf, "name/ü": 1.0}, step=128)
    assert lines(file) == [{"step": 128, "steps": 128, "loss": 0.5, "kl": None, "norm": None, "name/ü": 1.0}]
    tracker.log({"loss": 0.1}, step=256)
    assert lines(file)[1] == {"step": 256, "loss": 0.1}
    tracker.finish({})
    assert len(lines(file)) == 2


def test_a_killed_process_leaves_a_readable_file(tmp_path, run_python):
    code = """
import os, sys
from hurtle.tracking.trackers import JsonlTracker
tracker = JsonlTracker(sys.argv[1])
for step in range(100):
    tracker.log({"loss": 1.0}, step)
print("torch" in sys.modules, flush=True)
os._exit(0)
"""
    assert run_python(code, tmp_path / "metrics.jsonl").stdout == "False\n"
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == list(range(100))


def test_resuming_drops_what_will_be_trained_again(tmp_path):
    file = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(file)
    for step in (100, 200, 300, 400):
        tracker.log({"loss": 1.0}, step)
    tracker.finish({})
    file.write_text(file.read_text() + 'null\n{"other": 1}\n{"step": 150, "lo')  # the last line is cut off by a crash
    tracker = JsonlTracker(file, resume_step=200)
    tracker.log({"loss": 2.0}, 300)
    tracker.finish({})
    assert [(line["step"], line["loss"]) for line in lines(file)] == [(100, 1), (200, 1), (300, 2)]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_resuming_without_a_file_and_a_new_run_over_an_old_file(tmp_path):
    file = tmp_path / "metrics.jsonl"
    JsonlTracker(file, resume_step=5).log({}, 6)
    assert lines(file) == [{"step": 6}]
    JsonlTracker(file).log({}, 1)
    assert lines(file) == [{"step": 1}]


# TensorBoard


def scalars(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_events_are_grouped_and_purged_on_resuming(tmp_path):
    pytest.importorskip("tensorboard")
    metrics = {"episode_return": 10.0, "eval_return": 2.0, "policy_loss": 0.5, "time/env": 0.25, "kl": NAN}
    tracker = TensorBoardTracker(tmp_path)
    for step in (100, 200, 300):
        tracker.log({**metrics, "episode_return": step / 10}, step)
    tracker.finish({})
    found = scalars(tmp_path)
    assert set(found) == {"episode/episode_return", "eval/return", "train/policy_loss", "time/env"}
    assert found["episode/episode_return"] == [(100, 10), (200, 20), (300, 30)]
    assert found["time/env"][0] == (100, 0.25)
    tracker = TensorBoardTracker(tmp_path, resume_step=200)
    tracker.log({"episode_return": 99.0}, 250)
    tracker.finish({})
    assert scalars(tmp_path)["episode/episode_return"] == [(100, 10), (200, 20), (250, 99)]


def test_without_tensorboard_there_is_one_message_and_no_error(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto", None)
    said = []
    found = make_trackers(("tensorboard",), run, {}, warn=said.append)
    assert len(found) == 1
    assert len(said) == 1
    assert 'pip install "hurtle[tracking]"' in said[0]


# Services


class FakeWandbRun:
    def __init__(self):
        self.logged, self.summary, self.finished = [], {}, False

    def log(self, metrics, step):
        self.logged.append((step, metrics))

    def finish(self):
        self.finished = True


@pytest.fixture
def wandb(monkeypatch):
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    fake = types.SimpleNamespace(run=FakeWandbRun(), options=None)

    def init(**options):
        fake.options = options
        return fake.run

    fake.init = init
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_wandb(wandb, tmp_path, monkeypatch):
    tracker = WandbTracker("hurtle", "my-run", {"env": "cartpole"}, tmp_path)
    assert wandb.options["config"] == {"env": "cartpole"}
    assert (wandb.options["project"], wandb.options["name"], wandb.options["id"]) == ("hurtle", "my-run", "my-run")
    assert wandb.options["resume"] == "allow"
    tracker.log({"loss": 0.5, "kl": NAN}, 100)
    tracker.finish({"mean_return": 3.0})
    assert wandb.run.logged == [(100, {"loss": 0.5})]
    assert wandb.run.summary == {"mean_return": 3.0}
    assert wandb.run.finished
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    WandbTracker("hurtle", "my-run", {})
    assert wandb.options["project"] == "mine"


def test_mlflow(monkeypatch):
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    calls = []
    fake = types.SimpleNamespace(
        set_experiment=lambda name: calls.append(("experiment", name)),
        start_run=lambda run_name: calls.append(("start", run_name)),
        log_params=lambda params: calls.append(("params", params)),
        log_metrics=lambda metrics, step=None: calls.append((step, metrics)),
        end_run=lambda: calls.append("end"),
    )
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    tracker = MlflowTracker("hurtle", "my-run", {"env": "cartpole", "hidden_sizes": [64, 64]})
    tracker.log({"loss": 0.5, "kl": NAN}, 100)
    tracker.finish({"mean_return": 3.0, "path": "runs/x", "best": NAN})
    assert calls == [
        ("experiment", "hurtle"),
        ("start", "my-run"),
        ("params", {"env": "cartpole", "hidden_sizes": "[64, 64]"}),
        (100, {"loss": 0.5}),
        (None, {"summary/mean_return": 3.0}),
        "end",
    ]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_service_that_is_not_installed_names_the_extra(run, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(HurtleError, match=rf'pip install "hurtle\[{name}\]"'):
        make_trackers((name,), run, {})


def test_a_service_that_cannot_start_is_left_out(run, wandb, capsys):
    def init(**options):
        raise ConnectionError("not logged in")

    wandb.init = init
    assert len(make_trackers(("wandb",), run, {})) == 1
    assert "training continues without it: not logged in" in capsys.readouterr().err


def test_unknown_names_are_refused(run):
    with pytest.raises(UnknownNameError, match=r"No tracker 'tensorbord'. Did you mean tensorboard"):
        make_trackers(("tensorbord",), run, {})


# All together


def test_a_failing_tracker_is_warned_about_once_and_then_left_alone(run, wandb, monkeypatch):
    monkeypatch.setattr(module, "monotonic", iter(range(1000)).__next__)  # a second between two calls
    calls, said = [], []

    def log(metrics, step):
        calls.append(step)
        if step != 2:
            raise TimeoutError("no answer")

    wandb.run.log = log
    jsonl, service = make_trackers(("wandb",), run, {}, warn=said.append)
    for step in range(1, 10):
        jsonl.log({"loss": 1.0}, step)
        service.log({"loss": 1.0}, step)
    service.finish({})
    jsonl.finish({})
    assert calls == [1, 2, 3, 4, 5]  # three failures in a row
    assert said == ["The tracker wandb failed; training continues: no answer"]
    assert len(lines(run.metrics_file)) == 9


def test_services_are_not_flooded_but_see_every_evaluation_and_the_end(run, wandb, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module, "monotonic", lambda: now[0])
    jsonl, service = make_trackers(("wandb", "wandb"), run, {})
    for step in range(1, 41):  # eight updates a second
        now[0] = step / 8
        metrics = {"loss": float(step)} | ({"eval_return": 1.0} if step == 13 else {})
        jsonl.log(metrics, step)
        service.log(metrics, step)
    service.finish({})
    assert [step for step, _ in wandb.run.logged] == [1, 9, 13, 21, 29, 37, 40]
    assert wandb.run.finished
    assert [line["step"] for line in lines(run.metrics_file)] == list(range(1, 41))


def test_everything_resumes_together(run):
    pytest.importorskip("tensorboard")
    for resume_step, steps in ((None, (10, 20, 30)), (20, (30, 40))):
        for tracker in make_trackers(("tensorboard",), run, {}, resume_step=resume_step):
            for step in steps:
                tracker.log({"eval_return": float(resume_step is None)}, step)
            tracker.finish({})
    assert [(line["step"], line["eval_return"]) for line in lines(run.metrics_file)] == [(10, 1), (20, 1), (30, 0), (40, 0)]
    assert scalars(run.tensorboard)["eval/return"] == [(10, 1), (20, 1), (30, 0), (40, 0)]
