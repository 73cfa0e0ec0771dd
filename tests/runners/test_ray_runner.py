"""Collectors on a Ray cluster: they learn, continue, and are replaced; errors name them; nothing is used twice or left."""

import importlib.util
import itertools
import json
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import test_async
import torch
from cluster_envs import FailsOnce
from ladder_envs import Ladder
from slow_envs import Simulator
from small_ray import small_ray
from vector_envs import Masked, Nested

import hurtle
from hurtle.errors import EnvFailedError, HurtleError
from hurtle.tracking.checkpoints import load_checkpoint

if importlib.util.find_spec("ray") is None or importlib.util.find_spec("psutil") is None:
    pytest.skip("needs Ray and psutil: pip install 'hurtle[ray]' psutil", allow_module_level=True)

SMALL = {**test_async.SMALL, "runner": "ray", "num_collectors": 2}
DQN = {**test_async.DQN, "runner": "ray", "num_collectors": 2}


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """One small Ray for all tests."""
    global ray  # not before, see small_ray
    import ray

    yield from small_ray(3)


@pytest.fixture(autouse=True)
def nothing_is_left(cluster):
    """After each run all collectors are gone, their CPUs are free, and no thread waits for them."""
    yield
    until = time.monotonic() + 10
    while time.monotonic() < until and ray.available_resources().get("CPU") != 3:
        time.sleep(0.05)
    assert ray.available_resources()["CPU"] == 3
    assert ray.is_initialized()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("hurtle actor")]


@pytest.fixture
def runs(tmp_path):
    return {"runs": str(tmp_path)}


class Watch:
    """A callback that notes the ids of the rollouts that each update has learned from.

    Args:
        act: Called once with the collectors, at the second update.
        until_back: End the run when a lost collector's successor has given a rollout that was learned from.
    """

    def __init__(self, act=None, until_back=False):
        self.ids, self.act, self.until_back = [], act, until_back
        self.places = {}  # of the actors of each collector, in order

    def __call__(self, trainer):
        self.ids.append(trainer._parts.rollout.ids)
        collectors = [actor.collector for actor in trainer._parts.collector._actors]
        self.published = collectors[0]._squad._published
        for number, collector in enumerate(collectors):
            known = self.places.setdefault(number, [])
            if (about := collector.about) is not None and about.pid not in [place.pid for place, _ in known]:
                known.append((about, len(self.ids)))
        if self.act and trainer.updates == 2:
            self.act(collectors)
        if not self.until_back:
            return True
        back = [(str(number), places[-1][1]) for number, places in self.places.items() if len(places) > 1]
        return not any(
            name.startswith(f"{number}-") for number, update in back for ids in self.ids[update + 2 :] for name in ids
        )

    def used_once(self, per_update=2):
        """All ids, each of which was used once; those of a collector came in order."""
        found = list(itertools.chain.from_iterable(self.ids))
        assert all(len(ids) == per_update for ids in self.ids)
        assert len(set(found)) == len(found)
        for number in {name.partition("-")[0] for name in found}:
            counts = [int(name.partition("-")[2]) for name in found if name.startswith(f"{number}-")]
            assert counts == sorted(counts)
        return found


def train(env="cartpole", **settings):
    return hurtle.train(env, **{**SMALL, **settings})


def last_metrics(run):
    return json.loads((run.path / "metrics.jsonl").read_text().splitlines()[-2])


def newest(run):
    return load_checkpoint(max((run.path / "checkpoints").glob("step-*.pt")))


def test_ppo_learns_on_a_native_env(runs):
    watch = Watch()
    run = train("bandit", **runs, callbacks=watch, total_steps=20_480, num_envs=16, num_steps=32, minibatch_size=128,
                learning_rate=5e-3, eval_episodes=1000)  # fmt: skip
    assert run.evaluation.mean > 0.9
    assert run.steps == 20_480
    assert {name[0] for name in watch.used_once()} == {"0", "1"}
    metrics = last_metrics(run)
    assert (metrics["collectors"], metrics["collectors_lost"]) == (2, 0)
    assert 0 <= metrics["lag"] <= metrics["lag_max"] <= 5
    numbers = [number for number, _, _ in watch.published]
    assert numbers == list(range(numbers[0], numbers[0] + 3))  # each once, and the oldest are gone
    assert numbers[-1] <= 41
    assert json.loads((run.path / "about.json").read_text())["gear"] == "native"


@pytest.mark.slow
def test_dqn_fills_replay_from_a_gymnasium_env_and_resumes(runs):
    half = hurtle.train("CartPole-v1", **DQN, **runs, backend="serial")
    assert half.steps == 1024
    saved = newest(half)["collector"]
    assert int(saved["steps"]) >= 128  # of each env
    watch = Watch()
    resumed = hurtle.train(resume=str(half.path), total_steps=2048, callbacks=watch)
    assert resumed.steps == 2048
    assert len(watch.used_once()) == 2 * 1024 // 32
    assert int(newest(resumed)["collector"]["steps"]) > int(saved["steps"])


def kill_first(collectors):
    os.kill(collectors[0].about.pid, signal.SIGKILL)


def test_a_collector_that_is_killed_is_replaced(runs, capfd):
    watch = Watch(kill_first, until_back=True)
    run = train(partial(Simulator, seconds=0.002), **runs, callbacks=watch, backend="serial", total_steps=10**6)
    assert run.stopped_by == "callback"
    found = watch.used_once()
    assert {name[0] for name in found} == {"0", "1"}
    numbers = [int(name[2:]) for name in found if name[0] == "0"]
    assert max(numbers) > len(numbers)  # what it had not finished is missing
    assert [len(watch.places[number]) for number in (0, 1)] == [2, 1]
    assert last_metrics(run)["collectors_lost"] == 1
    said = capfd.readouterr().err
    assert f"Collector 0 (pid {watch.places[0][0][0].pid} on " in said
    assert "It is replaced when there is room." in said


@pytest.mark.slow
def test_a_hanging_env_is_given_up(runs, tmp_path, capfd):
    env, watch = partial(FailsOnce, str(tmp_path), "hang", seconds=0.002), Watch(until_back=True)
    run = train(env, **runs, callbacks=watch, backend="serial", collector_timeout=5.0, total_steps=10**6)
    assert run.stopped_by == "callback"
    watch.used_once()
    assert last_metrics(run)["collectors_lost"] >= 1  # more only if this machine stood still for so long
    assert "its rollout took over 5 s (collector_timeout)" in capfd.readouterr().err


def test_an_env_that_raises_ends_the_run(runs):
    env = partial(Simulator, fails_at=100)
    with pytest.raises(EnvFailedError, match="the simulator broke") as caught:
        train(env, **runs, backend="serial", num_collectors=1)
    text = str(caught.value)
    assert text.startswith("Collector 0 (pid ")
    assert f"on {os.uname().nodename}, node " in text
    assert "raise ValueError" in text  # the traceback from there
    assert "Last checkpoint: " in text
    (folder,) = Path(runs["runs"]).iterdir()
    assert load_checkpoint(max((folder / "checkpoints").glob("step-*.pt")))["policy"]


def test_other_versions_are_refused(runs, monkeypatch):
    monkeypatch.setattr("hurtle.runners.ray_answers.versions", lambda: {"hurtle": "9.9", "numpy": "1.0"})
    with pytest.raises(
        HurtleError, match=rf"Collector \d .* has hurtle {hurtle.__version__} instead of 9\.9, numpy .* install"
    ):
        train(**runs)


@pytest.mark.slow
def test_lag_0_is_the_local_run(runs):
    """The same weights bit for bit, and exactly the same after a stop."""
    settings = {**runs, "anneal_learning_rate": False}
    local = newest(train(**settings, runner="local", num_collectors=None))["policy"]
    half = train(**settings, lag="0", total_steps=512)
    resumed = newest(hurtle.train(resume=str(half.path), total_steps=1024))["policy"]
    assert all(torch.equal(local[name], resumed[name]) for name in local)
    assert hurtle.train(resume=str(half.path), total_steps=1152, runner="local").steps == 1152


@pytest.mark.slow
@pytest.mark.parametrize("lag", ["1", "free"])
def test_a_single_collector(runs, lag):
    """Its rollouts are copied all the same: the learner writes to its own, and a resumed run begins with a saved one."""
    half = train(**runs, num_collectors=1, lag=lag, total_steps=512)
    watch = Watch()
    assert hurtle.train(resume=str(half.path), total_steps=1024, callbacks=watch).steps == 1024
    watch.used_once(1)


@pytest.mark.slow
def test_a_cluster_with_less_room(runs, capfd):
    """The run begins with those that have a place, which give the rollouts of the others too; it connects, and leaves."""
    watch = Watch()
    assert train(**runs, num_collectors=4, callbacks=watch, address="auto").steps == 1024
    assert {name[0] for name in watch.used_once(4)} < {"0", "1", "2", "3"}
    said = "3 of 4 collectors have a place; each asks for 1 CPU, and the cluster has 3 CPUs"
    assert capfd.readouterr().err.count(said) == 1


@pytest.mark.slow
def test_a_cluster_that_was_there_stays(runs, run_python):
    code = (
        "import sys; sys.path.append(sys.argv[2]); import hurtle, ray; from test_ray_runner import SMALL\n"
        "run = hurtle.train('cartpole', **SMALL, runs=sys.argv[1], address='auto'); print(run.steps, ray.is_initialized())"
    )
    done = run_python(code, runs["runs"], Path(__file__).parent, RAY_ADDRESS=ray.get_runtime_context().gcs_address)
    assert done.stdout.splitlines()[-1] == "1024 False"
    assert ray.cluster_resources()["CPU"] == 3


KINDS = {
    "worker processes": {"env": Simulator, "backend": "process", "num_workers": 2},
    "a pool": {"env": Simulator, "backend": "process", "num_workers": 2, "pool_batch_size": 4},
    "a memory": {"env": "CartPole-v1", "backend": "serial", "recurrent": "gru"},
    "torch": {"env": "CartPole-v1", "backend": "serial", "gear": "general", "normalize_observations": True},
    "a mask": {"env": Masked, "backend": "serial"},
    "nested observations": {"env": Nested, "backend": "serial"},
    "several agents": {"env": "snake", "env_parameters": {"num_agents": 2}},
    "a curriculum": {"env": Ladder, "curriculum": {"size": "uniform:1:3"}},
    "scaled rewards": {"env": "cartpole", "reward_mode": "normalize", "normalize_observations": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_all_kinds_of_collectors(runs, kind):
    watch = Watch()
    run = train(**{**KINDS[kind], **runs, "callbacks": watch})
    assert run.steps >= 1024
    watch.used_once()


def test_settings_that_do_not_fit(runs):
    """Each is refused with the reason, and the cluster is left as it was."""
    for settings, reason in (
        ({"num_collectors": 9}, "num_collectors=9 is more than num_envs=8"),
        ({"num_collectors": 3}, "make num_envs=8 a multiple of num_collectors=3"),
        ({"backend": "ray"}, "backend='ray' puts each step on the network"),
        ({"actor_devices": ("cpu",)}, "with runner='ray' set collector_gpus"),
        ({"env": "missing.py:Env"}, "cannot read '.*missing.py': No such file"),
        ({"collector_cpus": 64.0, "collector_wait": 0.5}, "has found no place for a collector .* each asks for 64 CPUs"),
    ):
        with pytest.raises(HurtleError, match=reason):
            train(**{**runs, **settings})
    with hurtle.make_vec("cartpole", num_envs=8) as vec, pytest.raises(HurtleError, match="name the env instead"):
        train(vec, **runs)
