"""Envs in Ray actors: the same results as serial; actors that die, hang or cannot be placed raise errors; nothing is left."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from emulation_envs import Crowd
from small_ray import small_ray
from vector_envs import Counter, Faulty, Masked, Nested, Slow

import hurtle
from hurtle.errors import EnvFailedError, EnvTimeoutError, HurtleError, WorkerDiedError

if importlib.util.find_spec("ray") is None or importlib.util.find_spec("psutil") is None:
    pytest.skip("needs Ray and psutil: pip install 'hurtle[ray]' psutil", allow_module_level=True)


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """One small Ray for all tests."""
    global psutil, ray  # not before, see small_ray
    import psutil
    import ray

    yield from small_ray(2)


class Placed(Counter):
    """Reports on the process it runs in."""

    def process(self):
        return os.getpid(), os.environ.get("OMP_NUM_THREADS"), "torch" in sys.modules

    def plus_one(self, array):
        array += 1  # would fail with Ray's read-only arrays
        return array


class Deaf(Faulty):
    """Stuck where no signal reaches it, as in native code."""

    def _maybe(self, now):
        if now == self.at and self.given in self.seeds:
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        super()._maybe(now)


def make(env, num_envs=4, **options):
    return hurtle.make_vec(env, num_envs, **{"backend": "ray", "num_workers": 2, "copy": True, **options})


def crowd():
    script = [["a_1", "a_2"], ["a_1", "a_2", "a_10"], ["a_2", "a_10"], ["a_1", "a_10"], ["a_1"]]
    return Crowd(script, ends={(2, "a_1"): "truncated"}, masks=True)


def play(vec, steps=20):
    """Everything returned for fixed actions."""
    vec.action_space.seed(0)
    return [vec.reset(seed=3), *(vec.step(vec.action_space.sample()) for _ in range(steps))]


def assert_same(one, other):
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert list(one) == list(other)
        one, other = list(one.values()), list(other.values())
    if isinstance(one, list | tuple) or (isinstance(one, np.ndarray) and one.dtype == object):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    elif isinstance(one, np.ndarray):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    else:
        assert one == other


def gone(pids, within=5.0):
    """Whether these processes end within this many seconds."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
            return True
        time.sleep(0.02)
    return False


def pids_of(vec):
    return {worker.pid for worker in vec._fleet.workers}


# The same results.


@pytest.mark.parametrize(
    ("env", "options"),
    [
        (Counter, {}),
        pytest.param(Masked, {"autoreset_mode": "NEXT_STEP"}, marks=pytest.mark.slow),
        pytest.param(Nested, {}, marks=pytest.mark.slow),
        pytest.param(Nested, {"emulate": True, "num_workers": 1}, marks=pytest.mark.slow),
        pytest.param(crowd, {}, marks=pytest.mark.slow),
    ],
    ids=["plain", "masked next step", "trees", "emulated", "agents"],
)
def test_equals_serial(env, options):
    if env is crowd:
        pytest.importorskip("pettingzoo", reason="needs PettingZoo: pip install 'hurtle[pettingzoo]'")
    with make(env, 5, **options) as vec, make(env, 5, **{**options, "backend": "serial", "num_workers": None}) as serial:
        assert vec.num_workers == options.get("num_workers", 2)
        assert vec.observation_space == serial.observation_space
        history = play(vec)
        assert_same(history, play(serial))
        assert any("episode" in infos for *_, infos in history)
        if env is Counter:
            assert_same(vec.reset(seed=[9, None, 8, None, 7]), serial.reset(seed=[9, None, 8, None, 7]))
            some = {"reset_mask": np.arange(5) % 2 == 0, "task": 6}
            assert_same(vec.reset(options=some), serial.reset(options=some))
            vec.send(np.zeros(2, int), env_id=[3, 1])
            serial.send(np.zeros(2, int), env_id=[3, 1])
            vec.send(np.ones(3, int), env_id=[0, 2, 4])
            serial.send(np.ones(3, int), env_id=[0, 2, 4])
            assert_same(vec.recv(), serial.recv())


@pytest.mark.slow
@pytest.mark.parametrize("order", ["ready", "fair"])
def test_pool_by_env_id(order):
    """Every env of a pool takes the same trajectory as on its own."""
    with make(Counter, 6, batch_size=2, order=order) as vec, make(Counter, 6, backend="serial", num_workers=None) as serial:
        obs, _ = serial.reset(seed=5)
        expected = [[(*obs[i], 0.0, False, False)] for i in range(6)]
        for _ in range(40):
            obs, rewards, terminated, truncated, _ = serial.step(np.arange(6) % 5)
            for i in range(6):
                expected[i].append((*obs[i], rewards[i], terminated[i], truncated[i]))
        vec.async_reset(seed=5)
        counts = np.zeros(6, int)
        for _ in range(45):
            obs, rewards, terminated, truncated, infos = vec.recv()
            for k, i in enumerate(infos["env_id"]):
                assert (*obs[k], rewards[k], terminated[k], truncated[k]) == expected[i][counts[i]]
                counts[i] += 1
            vec.send(infos["env_id"] % 5)
        assert counts.sum() == 90
        if order == "fair":
            assert counts.max() - counts.min() <= 1


@pytest.mark.slow
def test_a_pool_returns_the_first_that_are_ready():
    with make(partial(Slow, seconds=0.0, slow=0.5, slow_seed=1), 2, batch_size=1) as vec:
        vec.async_reset(seed=0)
        slow = []
        for _ in range(12):
            *_, infos = vec.recv()
            slow.append(infos["env_id"][0] == 1)
            vec.send(np.zeros(1, int))
        assert sum(slow) <= 2


@pytest.mark.slow
def test_single_envs_and_their_processes():
    with make(Placed, 3, render_mode="rgb_array") as vec:
        vec.reset(seed=0)
        vec.step(np.zeros(3, int))
        processes = vec.call("process")
        assert {pid for pid, *_ in processes} == pids_of(vec)
        assert [rest for _, *rest in processes] == [["1", False]] * 3  # one thread for BLAS, no torch
        assert vec.call("triple", 2, add=1, indices=[2, 0]) == (7, 7)
        vec.set_attr("task", [4, 5, 6])
        vec.set_attr("task", 9, indices=-1)
        assert vec.get_attr("task") == (4, 5, 9)
        assert vec.call("triple", 1, indices=[]) == ()
        (array,) = vec.call("plus_one", np.zeros(2), indices=1)
        array += 1
        assert array.tolist() == [2, 2]
        assert [picture[0, 0, 0] for picture in vec.render()] == [1, 1, 1]
        obs, info = vec.reset_env(1, seed=30, options={"task": 8})
        assert obs[0] == 30
        assert info == {"task": 8}
        assert vec.step(np.zeros(3, int))[0][:, 2].tolist() == [2, 1, 2]
        with pytest.raises(EnvFailedError, match="Env 0 raised AttributeError in the call of 'nonsense'"):
            vec.call("nonsense")
        assert vec.step(np.zeros(3, int))[0][:, 2].tolist() == [0, 2, 3]
    assert gone({pid for pid, *_ in processes})


# Faults.


def test_a_killed_actor_is_an_error():
    with make(Counter) as vec:
        vec.reset(seed=0)
        pids = pids_of(vec)
        os.kill(vec._fleet.workers[1].pid, signal.SIGKILL)
        with pytest.raises(
            WorkerDiedError, match=r"Worker 1 \(pid \d+ on .*, envs 2 … 3\) died. Pass restart_workers=True"
        ) as caught:
            play(vec, steps=1000)
        assert "Ray says:" in str(caught.value)
        assert gone(pids)
        with pytest.raises(HurtleError, match="closed, or was ended by an earlier error"):
            vec.step(np.zeros(4, int))
        vec.close()
        vec.close()
    assert ray.is_initialized()  # not ours to shut down


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["SAME_STEP", pytest.param("NEXT_STEP", marks=pytest.mark.slow)])
def test_lost_envs_come_back_truncated(mode, tmp_path):
    """Env 3 kills its process in its second step; envs 2 and 3 start new episodes, and envs 0 and 1 are unaffected."""
    env = partial(Faulty, "kill", at=2, seeds=(3,), once=str(tmp_path / "once"))
    with (
        make(env, restart_workers=True, autoreset_mode=mode) as vec,
        make(Counter, backend="serial", num_workers=None, autoreset_mode=mode) as serial,
    ):
        vec.reset(seed=0)
        serial.reset(seed=0)
        before, *_ = vec.step(np.ones(4, int))
        serial.step(np.ones(4, int))
        obs, rewards, terminated, truncated, infos = vec.step(np.ones(4, int))
        assert_same(obs[:2], serial.step(np.ones(4, int))[0][:2])
        assert truncated.tolist() == infos["worker_restarted"].tolist() == [False, False, True, True]
        assert not terminated.any()
        assert rewards.tolist() == [1.1, 1.1, 0, 0]
        assert infos["episode"]["l"].tolist()[2:] == [1, 1]
        last = infos["final_obs"] if mode == "SAME_STEP" else obs
        assert_same(last[2:], before[2:])
        if mode == "NEXT_STEP":
            obs, rewards, _, truncated, infos = vec.step(np.ones(4, int))
            assert_same(obs[:2], serial.step(np.ones(4, int))[0][:2])
            assert not truncated[2:].any()
            assert rewards.tolist()[2:] == [0, 0]
            assert "worker_restarted" not in infos
        seeds = obs[2:, 0]
        assert obs[2:, 2].tolist() == [0, 0]
        assert len({2, 3, *seeds.tolist()}) == 4  # new seeds
        for _ in range(10):
            ours, theirs = vec.step(np.zeros(4, int)), serial.step(np.zeros(4, int))
            assert_same(ours[0][:2], theirs[0][:2])
            assert (ours[0][2:, 0] == seeds).all()
        # An actor dies between steps; the user resets its envs and gets no error.
        os.kill(vec._fleet.workers[1].pid, signal.SIGKILL)
        obs, infos = vec.reset(seed=20)
        assert obs[:, 0].tolist() == [20, 21, 22, 23]
        assert "worker_restarted" not in infos
        _, _, terminated, truncated, _ = vec.step(np.zeros(4, int))
        assert not (terminated | truncated).any()


@pytest.mark.slow
def test_an_actor_that_keeps_dying_is_given_up():
    with (
        pytest.raises(WorkerDiedError, match="Gave up after 3 restarts in a row"),
        make(partial(Faulty, "exit", at=0), 2, num_workers=1, restart_workers=True) as vec,
    ):
        vec.reset(seed=0)


@pytest.mark.parametrize("at", [2, pytest.param(0, marks=pytest.mark.slow)])
def test_an_env_that_raises(at):
    with make(partial(Faulty, "raise", at=at, seeds=(6,)), num_workers=1) as vec:
        doing = r"step\(\)" if at else r"reset\(\)"
        with pytest.raises(
            EnvFailedError, match=rf"Env 3 raised ZeroDivisionError in {doing} \(last seeded with 6\)"
        ) as caught:
            play(vec)
        assert (caught.value.env_index, caught.value.seed) == (3, 6)
        assert 'raise ZeroDivisionError("the env is broken")' in str(caught.value)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.slow  # that an error arrives is tested above, and that of a constructor with worker processes
@pytest.mark.parametrize(
    ("maker", "message"),
    [
        (partial(exec, "raise RuntimeError('no licence')"), "Env 0 raised RuntimeError in its constructor: no licence"),
        (lambda: 3, "emulate takes a Gymnasium env"),
    ],
    ids=["raises", "makes no env"],
)
def test_makers_that_fail(maker, message):
    with pytest.raises(EnvFailedError, match=message):
        make(maker, num_workers=1)


@pytest.mark.slow
def test_a_stuck_env_is_named():
    """Env 2 of three in the worker; the traceback says where."""
    with make(partial(Faulty, "stick", at=2, seeds=(2,)), 3, num_workers=1, step_timeout=0.4) as vec:
        vec.reset(seed=0)
        vec.step(np.zeros(3, int))
        pids, began = pids_of(vec), time.monotonic()
        with pytest.raises(
            EnvTimeoutError, match=r"Env 2 \(worker 0\) has been busy for over 0.4 s \(step_timeout\)"
        ) as caught:
            vec.step(np.zeros(3, int))
        assert time.monotonic() - began >= 0.4
        assert "stuck_here" in str(caught.value)
        assert gone(pids)


@pytest.mark.slow
def test_a_stuck_env_that_cannot_be_interrupted():
    with make(partial(Deaf, "stick", at=1, seeds=(1,)), 2, num_workers=1, step_timeout=0.2) as vec:
        vec.reset(seed=0)
        pids = pids_of(vec)
        with pytest.raises(EnvTimeoutError, match=r"One of the envs \[0, 1\] \(worker 0\) has been busy .* interrupted"):
            vec.step(np.zeros(2, int))
        assert gone(pids)


@pytest.mark.slow
def test_slow_is_not_stuck_and_stuck_is_replaced(tmp_path):
    """Three steps that together take longer than the timeout are fine; a worker whose single step does is replaced."""
    slow = partial(Slow, seconds=0.5)
    with make(slow, 3, num_workers=1, step_timeout=1.2) as vec:
        vec.reset(seed=0)
        assert vec.step(np.zeros(3, int))[0][:, 2].tolist() == [1, 1, 1]
    stuck = partial(Faulty, "stick", at=1, seeds=(0,), once=str(tmp_path / "once"))
    with make(stuck, 2, num_workers=2, step_timeout=1.2, restart_workers=True, batch_size=1) as vec:
        vec.async_reset(seed=0)
        seen = {0: [], 1: []}
        while len(seen[0]) < 3:
            *_, truncated, infos = vec.recv()
            seen[int(infos["env_id"][0])].append((bool(truncated[0]), "worker_restarted" in infos))
            vec.send(np.zeros(1, int))
        assert seen[0] == [(False, False), (True, True), (False, False)]
        assert not any(restarted for _, restarted in seen[1])


@pytest.mark.slow
def test_more_actors_than_cpus(capfd):
    with pytest.raises(
        HurtleError, match=r"Ray started [0-2] of 3 workers within 1 s .* need 3 CPUs, one each; the cluster has 2, of"
    ):
        make(Counter, num_workers=3, start_timeout=1.0)
    assert "hurtle: 3 Ray workers need 3 CPUs and the cluster has 2; waiting up to 1 s" in capfd.readouterr().err
    with make(Counter, num_workers=None) as vec:  # their resources are free again
        assert vec.num_workers == 2


@pytest.mark.slow
def test_a_module_that_makes_vectors_when_imported(write_module, tmp_path, monkeypatch):
    """Actors that import it must not start more actors."""
    monkeypatch.syspath_prepend(tmp_path)
    module = write_module(
        f"import os, hurtle\nfrom vector_envs import Counter\nclass Mine(Counter): pass\n"
        f"if os.getpid() != {os.getpid()}: hurtle.make_vec(Mine, 1, backend='ray')"
    )
    with pytest.raises(EnvFailedError, match="while a worker imported the module that defines the env"):
        make(module.Mine, 1, num_workers=1)


# Our own Ray instance.


@pytest.mark.slow
def test_our_own_ray(run_python, tmp_path):
    """Started when needed, with enough CPUs, and ended with its last user or at exit, which also closes the envs."""
    code = """
import atexit, pathlib, sys
import ray
from vector_envs import Counter
import hurtle
from hurtle.vector.ray_cluster import join, leave

class Closes(Counter):
    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def close(self):
        pathlib.Path(self.folder, f"closed_{self.given}").touch()

def make():
    vec = hurtle.make_vec(Closes, 2, backend="ray", num_workers=1, folder=sys.argv[1])
    vec.reset(seed=7)
    return vec

atexit.register(lambda: print("at exit", ray.is_initialized()))
join(50)
print(ray.cluster_resources()["CPU"])
make().close()
print(ray.is_initialized())
vec = make()
leave()
print(ray.is_initialized())
"""
    done = run_python(code, tmp_path)
    assert done.stdout.split("\n")[:-1] == ["50.0", "True", "True", "at exit False"]
    assert {"closed_7", "closed_8"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.slow
def test_no_actor_is_left_when_the_learner_is_killed():
    code = """
from vector_envs import Slow
import hurtle
vec = hurtle.make_vec(Slow, 1, backend="ray", num_workers=1, slow=60, slow_seed=5)
vec.reset(seed=5)
print(vec._fleet.workers[0].pid, flush=True)
vec.step([0])
"""
    folders = Path(__file__).parents[2], Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    environment["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address  # starting another would take seconds
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True) as learner:
        actor = int(learner.stdout.readline())
        time.sleep(0.2)
        learner.kill()
    assert gone([actor])


@pytest.mark.slow
def test_a_cluster_of_others(run_python):
    """RAY_ADDRESS names an existing cluster, which keeps running afterwards."""
    code = """
import ray, hurtle
vec = hurtle.make_vec("CartPole-v1", 2, backend="ray", num_workers=1)
print(ray.cluster_resources()["CPU"], vec.reset(seed=0)[0].shape)
vec.close()
print(ray.is_initialized())
vec = hurtle.make_vec("CartPole-v1", 2, backend="ray", num_workers=1)
vec.reset(seed=0)
ray.shutdown()
try:
    vec.step([0, 0])
except hurtle.HurtleError as error:
    print(error)
vec.close()
print(ray.is_initialized())
"""
    done = run_python(code, RAY_ADDRESS=ray.get_runtime_context().gcs_address)
    gone = "Ray was shut down, and the envs in it are gone; make a new vector env."
    assert done.stdout.splitlines() == ["2.0 (2, 4)", "False", gone, "False"]
    assert ray.cluster_resources()["CPU"] == 2


def test_without_ray(monkeypatch):
    for module in ("ray_cluster", "ray_vec"):  # import Ray again
        monkeypatch.delitem(sys.modules, f"hurtle.vector.{module}", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(HurtleError) as caught:
        hurtle.make_vec("CartPole-v1", 2, backend="ray")
    assert str(caught.value) == 'Ray is not installed: pip install "hurtle[ray]".'
