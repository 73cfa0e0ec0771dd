"""A population that really trains, in this process; and its picture."""

import json
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import hurtle
from hurtle.errors import HurtleError
from hurtle.experiments.populations import population
from hurtle.experiments.populations.lineage import Entry, Lineage
from hurtle.experiments.populations.search_space import make_space
from hurtle.experiments.run_worker import train_run
from hurtle.tracking.checkpoints import load_checkpoint


class InThisProcess:
    """Runs tasks one after the other, without processes: importing torch again would take seconds."""

    def __init__(self):
        self.running, self.failed, self.expects_more, self._tasks = {}, {}, False, []

    waiting = property(lambda self: {task.number for task in self._tasks})

    def add(self, task):
        self._tasks.append(task)

    def poll(self):
        if self._tasks:
            task = self._tasks.pop(0)
            try:
                train_run(**task.words)
            except HurtleError as error:
                self.failed[task.number] = str(error)
        return bool(self._tasks)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Trains in this process; returns the settings of small runs."""
    monkeypatch.setattr(population, "share_machine", lambda *_: InThisProcess())
    monkeypatch.setattr("hurtle.experiments.seeds_progress.POLL_SECONDS", 0.0)
    monkeypatch.chdir(tmp_path)
    return {
        "trackers": (), "progress": "quiet", "eval_episodes": 5, "preset": False, "num_envs": 4, "num_steps": 16,
        "minibatch_size": 32, "hidden_sizes": (8,), "keep_checkpoints": 9,
    }  # fmt: skip


def parts(file):
    """The weights, the optimizer's moments and everything else that is saved, flat."""
    found = {}

    def walk(value, name):
        if isinstance(value, dict):
            for key, item in value.items():
                walk(item, f"{name}.{key}")
        elif isinstance(value, list | tuple):
            for key, item in enumerate(value):
                walk(item, f"{name}.{key}")
        elif hasattr(value, "shape"):
            found[name] = value

    walk({key: value for key, value in load_checkpoint(file).items() if key != "settings"}, "")
    return found


def differing(one, other):
    """What two checkpoints do not have in common."""
    return [name for name in one.keys() | other.keys() if name not in one or not (one[name] == other[name]).all()]


def test_a_copy_has_weights_and_moments_of_whom_it_copied_and_trains_on_with_other_settings(small):
    search = {"learning_rate": {"low": 1e-4, "high": 1e-2}, "num_epochs": [1, 2, 4]}
    found = hurtle.train_population("cartpole", 2, 256, total_steps=512, search=search, **small)
    first = Lineage.read(found.path, 2).generations[1]
    (copy,) = [entry for entry in first if entry.copied_from is not None]
    source = found.path / f"member-{copy.copied_from}"
    copied, own = (run / "checkpoints" / "step-000000000256.pt" for run in (found.path / f"member-{copy.member}", source))
    assert not differing(parts(copied), parts(own))
    moments = [name for name in parts(copied) if "exp_avg" in name]
    assert moments
    assert all(parts(copied)[name].abs().sum() > 0 for name in moments)
    ends = [found.path / f"member-{k}" / "checkpoints" / "step-000000000512.pt" for k in range(2)]
    assert any("policy" in name for name in differing(*map(parts, ends)))
    shutil.copytree(source, "alone")  # the same by hand
    for file in Path("alone/checkpoints").glob("step-*512.pt"):
        file.unlink()
    hurtle.train(resume="alone", progress="quiet", seed=copy.member, **copy.settings)
    assert not differing(parts(Path("alone/checkpoints/step-000000000512.pt")), parts(ends[copy.member]))
    saved = load_checkpoint(ends[copy.member])["settings"]
    assert {name: saved[name] for name in search} == copy.settings
    assert (saved["seed"], saved["name"]) == (copy.member, f"member-{copy.member}")
    assert hurtle.load(found.best).act(hurtle.make("cartpole").reset(seed=0)[0]) in (0, 1)


def test_members_can_be_compared_by_evaluations(small):
    found = hurtle.train_population("cartpole", 2, 128, total_steps=256, search=["learning_rate"], score="evaluation", **small)
    lineage = Lineage.read(found.path, 2)
    for run in found.members:
        lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
        seen = {line["step"]: line["eval_return"] for line in lines if "eval_return" in line}
        entries = [entries[int(run.path.name[-1])] for entries in lineage.generations]
        assert entries[2].score == seen[256]
        assert entries[1].score == seen[128]
    assert found.score == found.best.evaluation
    compared = hurtle.compare([found])
    assert sum(len(group.runs) for group in compared.groups) == 2


REAL = """
import sys
import hurtle
if __name__ == "__main__":
    hurtle.train_population("cartpole", 3, 30_000, total_steps=90_000, search=["learning_rate", "gamma"], runs=sys.argv[1],
        name="mine", trackers=(), progress="quiet", parallel=2, eval_episodes=5)
"""


@pytest.mark.slow
def test_a_population_that_was_killed_in_mid_interval_ends_as_if_it_had_not_been(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(REAL)
    paths = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": paths}
    subprocess.run([sys.executable, script, tmp_path / "whole"], env=environment, check=True)
    process = subprocess.Popen([sys.executable, script, tmp_path / "killed"], env=environment)
    lineage, until = tmp_path / "killed" / "mine" / "lineage.jsonl", time.monotonic() + 120
    while not (lineage.is_file() and len(lineage.read_text().splitlines()) > 3) and time.monotonic() < until:
        time.sleep(0.02)
    time.sleep(0.3)  # the second interval is under way
    process.kill()
    process.wait()
    again = hurtle.train_population(resume=tmp_path / "killed" / "mine", progress="quiet", parallel=1)
    assert lineage.read_text() == (tmp_path / "whole" / "mine" / "lineage.jsonl").read_text()
    for run in again.members:
        whole = tmp_path / "whole" / "mine" / run.path.name
        newest = [max((path / "checkpoints").glob("step-*.pt")) for path in (run.path, whole)]
        assert not differing(*map(parts, newest))


def test_the_picture_has_a_panel_for_the_scores_and_one_for_each_setting(tmp_path, monkeypatch):
    from hurtle.experiments.populations import figure as population_figure

    drawn = []
    monkeypatch.setattr(population_figure, "save", lambda figure, file: drawn.append(figure) or file)
    lineage = Lineage(tmp_path, 3)
    ranges = {"learning_rate": {"low": 1e-4, "high": 1.0}, "gamma": {"low": 0.9, "high": 0.99}, "num_epochs": [1, 2, 4]}

    def entry(generation, member, score, copied_from, rate):
        settings = {"learning_rate": rate, "gamma": 0.95, "num_epochs": 2}
        return Entry(generation, member, 100 * generation, score, copied_from, "", settings)

    lineage.generations = [
        [entry(0, k, math.nan, None, 0.1 * (k + 1)) for k in range(3)],
        [entry(1, 0, 1.0, 1, 0.25), entry(1, 1, 3.0, None, 0.2), entry(1, 2, math.nan, None, 0.3)],
        [entry(2, 0, 5.0, None, 0.25), entry(2, 1, 4.0, None, 0.2), entry(2, 2, 1.0, None, 0.3)],
    ]
    population_figure.draw_population(lineage, make_space(ranges, "ppo"), tmp_path / "p.png")
    panels = drawn[0].axes
    assert [axes.get_title(loc="left") for axes in panels[:4]] == ["score", "learning rate", "gamma", "num epochs"]
    best = [line for line in panels[1].lines if line.get_color() == population_figure.BEST]
    assert [list(zip(*line.get_data(), strict=True)) for line in best] == [[(0, 0.2), (100, 0.2), (100, 0.25), (200, 0.25)]]
    (rise,) = [line for line in panels[0].lines if line.get_color() == population_figure.BEST]
    assert list(zip(*rise.get_data(), strict=True)) == [(100, 3.0), (200, 5.0)]  # from whom it copied
    drawn[0].canvas.draw()
