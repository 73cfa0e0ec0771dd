"""Trials on a cluster: folders brought back, stops, lost nodes, versions. Quick tests replace Ray by calls in this process."""

import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from made_sweeps import COMMAND, SPACE

import hurtle
from hurtle.errors import HurtleError
from hurtle.experiments import run_processes
from hurtle.experiments.run_processes import RunProcesses, Task
from hurtle.experiments.sweeps import ray_workers
from hurtle.experiments.sweeps.ray_workers import RayWorker, TrialHost


class RayError(Exception):
    pass


class Ray:
    """Calls at once; a reference is a function that returns the outcome. `lost` makes every call fail."""

    exceptions = SimpleNamespace(RayError=RayError)

    def __init__(self):
        self.lost, self.killed = False, 0

    def actor(self, host):
        def method(name):
            def remote(*arguments):
                outcome = getattr(host, name)(*arguments)
                return lambda: outcome

            return SimpleNamespace(remote=remote)

        return SimpleNamespace(**{name: method(name) for name in ("about", "start", "look", "take", "stop", "close")})

    def get(self, reference, timeout=None):
        if self.lost:
            raise RayError("The actor died because its node has died.\nmore")
        return reference()

    def wait(self, references, timeout):
        return references, []

    def kill(self, host):
        self.killed += 1


@pytest.fixture
def cluster(monkeypatch, tmp_path):
    """A made-up Ray, and a function that makes processes on it."""
    monkeypatch.setattr(run_processes, "COMMAND", COMMAND)
    monkeypatch.setattr(ray_workers, "LOOK_SECONDS", 0.01)
    monkeypatch.setenv("BEHAVIOUR", json.dumps({"trial-0001": "crash", "trial-0002": "wait"}))
    ray, hosts = Ray(), []

    def start(task, cores, device):
        hosts.append(TrialHost(cores))
        return RayWorker(ray, ray.actor(hosts[-1]), task)

    def processes(*numbers):
        found = RunProcesses([task(number) for number in numbers], 1, start=start)
        found.is_local = False
        return found

    def task(number):
        name = f"trial-{number:04}"
        settings = {"learning_rate": 0.003, "gamma": 0.98, "total_steps": 1000, "seed": 0, "env": "cartpole"}
        settings |= {"algorithm": "ppo", "runs": str(tmp_path / "here"), "name": name}
        return Task(number, tmp_path / "here" / name, {"settings": settings, "resume": "", "trust": False})

    (tmp_path / "here").mkdir()
    return SimpleNamespace(ray=ray, hosts=hosts, processes=processes, here=tmp_path / "here")


def until(done, seconds=30.0):
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_folders_come_back_and_a_failure_is_that_of_its_trial(cluster):
    with cluster.processes(0, 1, 3) as processes:
        until(lambda: not processes.poll())
        assert set(processes.failed) == {1}
        assert "ValueError: it broke" in processes.failed[1]
        assert [task.number for task in processes.take_ended()] == [0, 1, 3]
    for name in ("trial-0000", "trial-0003"):
        assert json.loads((cluster.here / name / "summary.json").read_text())["stopped_by"] == "total_steps"
        assert (cluster.here / name / "checkpoints").is_dir()
        assert len((cluster.here / name / "metrics.jsonl").read_text().splitlines()) == 10
    assert "it broke" in (cluster.here / "trial-0001.log").read_text()
    assert not any(host._folder.exists() for host in cluster.hosts)  # nothing is left there


def test_a_trial_is_stopped_and_its_metrics_are_seen_while_it_runs(cluster):
    with cluster.processes(2) as processes:
        processes.poll()
        until(lambda: (cluster.hosts[0]._folder / "trial-0002" / "waits").exists())
        (cluster.hosts[0]._folder / "trial-0002" / "metrics.jsonl").write_text('{"steps": 1}\n')
        until(lambda: processes.poll() and (cluster.here / "trial-0002" / "metrics.jsonl").exists())
        processes.stop(2)
        until(lambda: not processes.poll())
    assert json.loads((cluster.here / "trial-0002" / "summary.json").read_text())["stopped_by"] == "Ctrl-C"


def test_a_lost_node_fails_its_trial_and_the_next_one_gets_another(cluster):
    with cluster.processes(2, 0) as processes:
        processes.poll()
        until(lambda: (cluster.hosts[0]._folder / "trial-0002" / "waits").exists())
        cluster.ray.lost = True
        until(lambda: processes.poll() and processes.failed)
        assert processes.failed[2] == "its node or process was lost: The actor died because its node has died."
        cluster.ray.lost = False
        until(lambda: not processes.poll())
        assert len(cluster.hosts) == 2
        assert (cluster.here / "trial-0000" / "summary.json").exists()
    assert not any(host._folder.exists() for host in cluster.hosts)


def test_a_node_with_another_version_is_an_error(cluster, monkeypatch):
    monkeypatch.setattr(TrialHost, "about", lambda self: ("9.9", "3.11.1", "far"))
    with cluster.processes(0) as processes, pytest.raises(HurtleError, match=r"The node far has Hurtle 9.9 on Python 3.11.1"):
        until(lambda: not processes.poll())


@pytest.mark.slow
def test_a_sweep_on_ray_survives_the_loss_of_workers(tmp_path, monkeypatch):
    ray = pytest.importorskip("ray")
    monkeypatch.chdir(tmp_path)
    Path("space.toml").write_text(SPACE.splitlines()[2])
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    killed = []

    class Killer(RayWorker):
        def poll(self):
            if self.task is not None and self.task.number == 1 and not killed:
                about = ray.get(self._host.__ray_call__.remote(lambda host: os.getpid()))
                killed.append(about)
                os.kill(about, signal.SIGKILL)
            return super().poll()

    monkeypatch.setattr(ray_workers, "RayWorker", Killer)
    try:
        found = hurtle.sweep(
            "bandit", trials=4, budget="inf", space="space.toml", total_steps=4_000, check_seeds=1, ray="auto", parallel=2,
            progress="quiet",
        )  # fmt: skip
    finally:
        ray.shutdown()
    assert killed
    assert {trial.number for trial in found.searched if trial.state == "failed"} == {1}
    assert "was lost" in found.trials[1].error
    assert found.best.has_score
    assert found.checks
