"""Worker faults: each one raises a named error in time and leaves nothing behind. With real kills."""

import collections
import gc
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from vector_envs import Counter, Faulty, Slow

import hurtle
from hurtle.errors import EnvFailedError, EnvTimeoutError, HurtleError, WorkerDiedError
from hurtle.vector import fleet

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


def children():
    """Workers of this process that still exist, including zombies."""
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


def descriptors():
    """What this process has open, including shared memory, and how often."""
    opened = collections.Counter()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the one that listed them is closed by now
            opened[descriptor.readlink()] += 1
    return opened


def segments():
    """Named shared memory of ours; other programs may have some, too."""
    return set(Path("/dev/shm").glob("*hurtle*"))


def holdings():
    return children(), descriptors(), segments()


def added(before):
    """What is held now and was not before. An earlier test's garbage may go meanwhile."""
    return [now - then for now, then in zip(holdings(), before, strict=True)]


@pytest.fixture(autouse=True)
def _nothing_left():
    before = holdings()
    yield
    if any(added(before)):
        gc.collect()  # takes a fifth of a second
    assert not any(added(before))


def make(maker, num_envs=4, **options):
    return hurtle.make_vec(maker, num_envs, **{"backend": "process", "num_workers": 2, **options})


def reset_and_step(vec, seed):
    vec.reset(seed=seed)
    step(vec, 3)


def step(vec, count=1):
    for _ in range(count):
        outcome = vec.step(np.zeros(vec.batch_size, int))
    return outcome


@pytest.mark.parametrize(
    ("backend", "at", "where"),
    [
        ("serial", 2, r"step\(\)"),
        ("process", 2, r"step\(\)"),
        ("serial", 0, r"reset\(\)"),
        pytest.param("process", 0, r"reset\(\)", marks=pytest.mark.slow),
    ],
)
def test_env_raises(backend, at, where):
    with make(partial(Faulty, at=at, seeds=(12,)), backend=backend, num_workers=1 if backend == "process" else None) as vec:
        message = rf"Env 2 raised ZeroDivisionError in {where} \(last seeded with 12\)"
        with pytest.raises(EnvFailedError, match=message) as caught:
            reset_and_step(vec, seed=10)
        assert caught.value.env_index == 2
        assert caught.value.seed == 12
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        assert 'raise ZeroDivisionError("the env is broken")' in str(caught.value)
        if backend == "process":
            with pytest.raises(HurtleError, match="ended by an earlier error"):
                step(vec)


class Unbuildable(Counter):
    def __init__(self):
        raise OSError("no such ROM")


@pytest.mark.parametrize("backend", ["serial", "process"])
def test_constructor_raises(backend):
    with pytest.raises((EnvFailedError, OSError), match="no such ROM"):
        make(Unbuildable, 1, backend=backend, num_workers=None)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("crash", "was killed by SIGSEGV"),
        pytest.param("kill", "was killed by SIGKILL .out of memory", marks=pytest.mark.slow),
        pytest.param("exit", "exited with code 7", marks=pytest.mark.slow),
    ],
)
def test_worker_dies_in_a_step(what, message):
    vec = make(partial(Faulty, what=what, seeds=(3,)))
    vec.reset(seed=0)
    step(vec)
    with pytest.raises(WorkerDiedError, match=rf"Worker 1 \(pid \d+, envs 2 … 3\) {message}") as caught:
        step(vec)
    if what == "crash":  # its own traceback, written as it died
        assert "vector_envs.py" in str(caught.value)
    vec.close()


@pytest.mark.parametrize("busy", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_worker_is_killed_while_busy_or_idle(busy):
    vec = make(partial(Slow, seconds=120.0 if busy else 0.0), check=False)
    vec.reset(seed=0)
    if busy:
        vec.send(np.zeros(4, int), env_id=np.arange(4))
    os.kill(vec.worker_pids[0], signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(WorkerDiedError, match="SIGKILL"):
        vec.recv() if busy else step(vec)
    assert time.monotonic() - start < 60  # it did not wait for the step
    vec.close()


@pytest.mark.slow  # what notices it is that of a step
def test_worker_is_killed_before_a_call():
    vec = make(Counter, 2, num_workers=1)
    vec.reset(seed=0)
    os.kill(vec.worker_pids[0], signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match="SIGKILL"):
        vec.get_attr("task")
    vec.close()


@pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP"])
def test_restart(mode):
    """Lost envs return reset and truncated; the others are unaffected."""
    with make(Counter, restart_workers=True, autoreset_mode=mode) as vec:
        vec.reset(seed=0)
        before, *_ = step(vec, 2)
        before = before.copy()
        os.kill(vec.worker_pids[1], signal.SIGKILL)
        obs, rewards, terminated, truncated, infos = step(vec)
        assert truncated.tolist() == [False, False, True, True]
        assert terminated.tolist() == [True, False, False, False]
        assert rewards.tolist() == pytest.approx([0.1, 0.1, 0, 0])
        assert infos["worker_restarted"].tolist() == [False, False, True, True]
        assert infos["episode"]["l"][2:].tolist() == [2, 2]
        assert infos["_episode"].tolist() == [True, False, True, True]
        if mode == "SAME_STEP":
            assert obs[2:, 2].tolist() == [0, 0]
            np.testing.assert_array_equal(infos["final_obs"][2:], before[2:])
        else:
            np.testing.assert_array_equal(obs[2:], before[2:])
        obs, rewards, terminated, truncated, infos = step(vec)
        assert obs[2:, 2].tolist() == ([1, 1] if mode == "SAME_STEP" else [0, 0])
        assert not truncated[2:].any()
        obs, *_ = step(vec)
        assert obs[2:, 2].tolist() == ([2, 2] if mode == "SAME_STEP" else [1, 1])


def test_restart_between_an_end_and_its_reset():
    """With NEXT_STEP an env that is over when its worker dies is simply reset."""
    with make(Counter, 2, restart_workers=True, autoreset_mode="NEXT_STEP") as vec:
        vec.reset(seed=0)
        *_, terminated, truncated, _ = step(vec, 3)
        assert terminated.tolist() == [True, False]
        os.kill(vec.worker_pids[0], signal.SIGKILL)
        obs, *_, truncated, infos = step(vec)
        assert obs[0, 2] == 0
        assert truncated.tolist() == [False, False]
        assert "worker_restarted" not in infos
        obs, *_ = step(vec)
        assert obs[0, 2] == 1


def test_a_reset_after_a_death_tells_of_no_truncation():
    with make(Counter, 2, num_workers=1, restart_workers=True) as vec:
        vec.reset(seed=0)
        step(vec)
        os.kill(vec.worker_pids[0], signal.SIGKILL)
        time.sleep(0.1)
        obs, _ = vec.reset()
        assert obs[:, 2].tolist() == [0, 0]
        *_, truncated, infos = step(vec)
        assert not truncated.any()
        assert "worker_restarted" not in infos


def test_restart_in_a_step_and_in_a_pool(tmp_path):
    maker = partial(Faulty, what="kill", at=3, seeds=(1,), once=str(tmp_path / "killed"))
    with make(maker, 2, restart_workers=True, batch_size=1, order="fair") as vec:
        vec.async_reset(seed=0)
        lost = []
        for _ in range(30):
            *_, truncated, infos = vec.recv()
            if "worker_restarted" in infos:
                lost += [
                    (int(i), bool(t))
                    for i, t, w in zip(infos["env_id"], truncated, infos["worker_restarted"], strict=True)
                    if w
                ]
            vec.send(np.zeros(1, int))
        assert lost == [(1, True)]


def test_restart_in_a_reset(tmp_path):
    maker = partial(Faulty, what="kill", at=0, seeds=(2,), once=str(tmp_path / "killed"))
    with make(maker, restart_workers=True) as vec:
        obs, _ = vec.reset(seed=0)
        assert obs[:, 0].tolist() == [0, 1, 2, 3]
        *_, truncated, infos = step(vec)
        assert not truncated.any()
        assert "worker_restarted" not in infos


@pytest.mark.slow
def test_gives_up_on_a_worker_that_always_dies():
    vec = make(partial(Faulty, what="exit", at=0, seeds=(1,)), 2, num_workers=1, restart_workers=True)
    with pytest.raises(WorkerDiedError, match=r"Gave up after 3 restarts in a row\. Worker 0 .* exited with code 7"):
        vec.reset(seed=0)
    vec.close()


def test_stuck_env_is_named_with_its_stack():
    vec = make(partial(Faulty, what="stick", seeds=(2,)), step_timeout=0.4)
    vec.reset(seed=0)
    step(vec)
    with pytest.raises(EnvTimeoutError, match=r"Env 2 \(worker 1\) has been busy for over 0.4 s \(step_timeout\)") as caught:
        step(vec)
    assert "stuck_here" in str(caught.value)
    vec.close()


@pytest.mark.slow
def test_stuck_env_in_a_pool_is_noticed_though_others_go_on():
    vec = make(partial(Faulty, what="stick", seeds=(1,)), 2, step_timeout=0.4, batch_size=1)
    vec.async_reset(seed=0)
    with pytest.raises(EnvTimeoutError, match="Env 1"):
        keep_going(vec)
    vec.close()


def keep_going(vec):
    while True:
        vec.recv()
        vec.send(np.zeros(1, int))


def test_stuck_env_is_replaced(tmp_path):
    maker = partial(Faulty, what="stick", seeds=(2,), once=str(tmp_path / "stuck"))
    with make(maker, step_timeout=0.4, restart_workers=True) as vec:
        vec.reset(seed=0)
        *_, truncated, _ = step(vec, 2)
        assert truncated.tolist() == [False, False, True, True]


class Uneven(Counter):
    """The first step of an env is short, the second long."""

    def step(self, action):
        result = super().step(action)
        time.sleep(0.9 if self.given == 1 else 0.3)
        return result


@pytest.mark.slow
def test_an_env_is_not_charged_for_those_before_it():
    with make(Uneven, 2, num_workers=1, step_timeout=1.5, check=False) as vec:
        vec.reset(seed=0)
        step(vec, 2)


@pytest.mark.slow
def test_slow_envs_are_not_stuck():
    """The limit is for one step of one env, not for all of a worker's work."""
    with make(partial(Slow, seconds=0.3), 4, num_workers=1, step_timeout=1.0, check=False) as vec:
        vec.reset(seed=0)
        step(vec)


class NeverBuilt(Counter):
    def __init__(self):
        while True:
            time.sleep(0.1)


@pytest.mark.parametrize("seconds", [0.1, pytest.param(4, marks=pytest.mark.slow)])
def test_constructor_that_never_ends(seconds):
    message = rf"constructor or start-up check did not answer within {seconds} s"
    with pytest.raises(EnvTimeoutError, match=message) as caught:
        make(NeverBuilt, num_workers=1, start_timeout=seconds)
    if seconds > 1:  # long enough for the worker to reach the constructor
        assert "test_faults.py" in str(caught.value)


def test_close_at_any_time(monkeypatch):
    monkeypatch.setattr(fleet, "_PATIENCE", 0.2)
    vec = make(Counter, 1, num_workers=1)
    vec.close()
    vec.close()
    vec = make(partial(Slow, seconds=120), num_workers=1, check=False)
    vec.reset(seed=0)
    vec.send(np.zeros(4, int), env_id=np.arange(4))
    start = time.monotonic()
    vec.close()  # in the middle of a step of two minutes
    assert time.monotonic() - start < 60
    make(Counter, 1, num_workers=1)  # dropped without close
    gc.collect()


def test_a_large_info_and_a_large_call():
    """More than a pipe holds, in both directions."""

    class Talkative(Counter):
        def step(self, action):
            *outcome, _ = super().step(action)
            return *outcome, {"text": "x" * 300_000}

        def length(self, text):
            return len(text), text

    with make(Talkative, 2, num_workers=1) as vec:
        vec.reset(seed=0)
        *_, infos = step(vec)
        assert [len(text) for text in infos["text"]] == [300_000] * 2
        assert vec.call("length", "y" * 3_000_000)[1][0] == 3_000_000


class Forking(Counter):
    """Has a child of its own, which outlives it."""

    def __init__(self):
        super().__init__()
        self.child = os.fork()
        if self.child == 0:
            time.sleep(120)
            os._exit(0)

    def close(self):
        os.kill(self.child, signal.SIGKILL)
        os.waitpid(self.child, 0)


@pytest.mark.parametrize("restart", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_death_is_noticed_though_a_child_of_the_env_keeps_the_pipes_open(restart):
    vec = make(Forking, 2, check=False, restart_workers=restart)
    vec.reset(seed=0)
    os.kill(vec.worker_pids[1], signal.SIGKILL)
    start = time.monotonic()
    if restart:
        assert step(vec)[3].tolist() == [False, True]
    else:
        with pytest.raises(WorkerDiedError, match="SIGKILL"):
            step(vec)
    assert time.monotonic() - start < 60  # the child lives for two more minutes
    vec.close()


class WithSubprocess(Faulty):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.program = subprocess.Popen(["sleep", "60"])

    def program_pid(self):
        return self.program.pid


def test_what_an_env_started_ends_with_its_worker():
    vec = make(partial(WithSubprocess, what="stick", seeds=(1,)), 2, num_workers=1, step_timeout=0.4, check=False)
    vec.reset(seed=0)
    pids = vec.call("program_pid")
    with pytest.raises(EnvTimeoutError):
        step(vec, 2)
    assert gone(pids)


def interrupted(call, after=0.1):
    """Ctrl-C in the middle of a call."""
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, after)
    with pytest.raises(KeyboardInterrupt):
        call()


def test_ctrl_c_in_a_step_ends_the_vector():
    """Continuing would mistake the results of the old step for those of the new one."""
    with make(partial(Slow, seconds=0.3), 1, num_workers=1, check=False) as vec:
        vec.reset(seed=0)
        interrupted(lambda: step(vec))
        with pytest.raises(HurtleError, match="ended by an earlier error"):
            step(vec)


def test_ctrl_c_in_a_call_ends_the_vector():
    class Sleepy(Counter):
        def sleep(self):
            time.sleep(0.5)
            return "slept"

    with make(Sleepy, 1, num_workers=1) as vec:
        vec.reset(seed=0)
        interrupted(lambda: vec.call("sleep"))
        with pytest.raises(HurtleError, match="ended by an earlier error"):
            vec.call("triple", 1)


def test_ctrl_c_in_close_leaves_no_worker():
    vec = make(partial(Slow, seconds=30), 1, num_workers=1, check=False)
    vec.reset(seed=0)
    vec.send(np.zeros(1, int), env_id=[0])
    pids = vec.worker_pids
    interrupted(vec.close)
    assert gone(pids)
    vec.close()


def test_a_call_that_cannot_be_pickled_changes_nothing():
    class Odd(Counter):
        def generator(self):
            return (i for i in range(3))

    with make(Odd, 2, num_workers=1) as vec:
        vec.reset(seed=0)
        with pytest.raises(TypeError):
            vec.set_attr("task", [1, (i for i in range(3))])
        assert vec.call("triple", 1) == (3, 3)
        with pytest.raises(HurtleError, match="cannot be pickled"):
            vec.call("generator")
        assert vec.call("triple", 2) == (6, 6)


def test_a_call_that_takes_too_long():
    class Sleepy(Counter):
        def sleep(self):
            time.sleep(5)

    vec = make(Sleepy, 1, num_workers=1, step_timeout=0.4)
    vec.reset(seed=0)
    with pytest.raises(EnvTimeoutError, match=r"did not answer within 0\.4 s"):
        vec.call("sleep")
    vec.close()


@pytest.mark.slow
def test_a_call_to_a_dead_worker_that_is_replaced():
    with make(Counter, 2, restart_workers=True) as vec:
        vec.reset(seed=0)
        step(vec)
        os.kill(vec.worker_pids[1], signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match="SIGKILL"):
            vec.get_attr("task")
        assert vec.get_attr("task") == (0, 0)
        *_, truncated, _ = step(vec)
        assert truncated.tolist() == [False, True]


class Chatty(Counter):
    """Prints at every reset."""

    def reset(self, *, seed=None, options=None):
        obs, _ = super().reset(seed=seed, options=options)
        return obs, {"map": 5}


@pytest.mark.slow
def test_restarted_envs_that_say_something_are_all_marked():
    with make(Chatty, 8, restart_workers=True) as vec:
        vec.reset(seed=0)
        step(vec)
        os.kill(vec.worker_pids[0], signal.SIGKILL)
        *_, truncated, infos = step(vec)
        assert infos["worker_restarted"].tolist() == truncated.tolist() == [True] * 4 + [False] * 4
        assert infos["map"].tolist() == [5] * 4 + [0] * 4


def test_a_start_that_fails_leaves_nothing(tmp_path):
    """Too few descriptors for the last worker."""
    body = """
        import resource, os, hurtle
        from vector_envs import Counter
        resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))
        before = len(os.listdir("/proc/self/fd"))
        try:
            hurtle.make_vec(Counter, 16, backend="process", num_workers=16)
        except OSError as error:
            print(type(error).__name__)
        print(len(os.listdir("/proc/self/fd")) - before, open(f"/proc/self/task/{os.getpid()}/children").read())
    """
    out, err = script(tmp_path, body).communicate(timeout=60)
    assert out.split() == ["OSError", "0"], (out, err)


@pytest.mark.slow
def test_a_constructor_may_take_its_time_for_each_env():
    class Slowly(Counter):
        def __init__(self):
            super().__init__()
            time.sleep(0.75)

    with make(Slowly, 6, num_workers=1, start_timeout=4) as vec:
        vec.reset(seed=0)


def script(tmp_path, body):
    file = tmp_path / "script.py"
    file.write_text(textwrap.dedent(body))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sys.path))}
    return subprocess.Popen([sys.executable, str(file)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pids, within=3.0):
    deadline = time.monotonic() + within
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(alive, pids))


STUCK = """
    import hurtle, numpy as np, sys
    from vector_envs import Counter, Slow
    vec = hurtle.make_vec(lambda: Slow(seconds={seconds}), 4, backend="process", num_workers=2, check=False)
    vec.reset(seed=0)
    print(*vec.worker_pids, flush=True)
    {then}
"""


@pytest.mark.slow  # the learner whose child lives on, below, is killed too
@pytest.mark.parametrize("seconds", [60.0, 0.0])
def test_learner_is_killed(tmp_path, seconds):
    """Workers exit on their own, even in the middle of a long step."""
    then = "while True: vec.step(np.zeros(4, int))"
    learner = script(tmp_path, STUCK.format(seconds=seconds, then=then))
    pids = [int(pid) for pid in learner.stdout.readline().split()]
    assert len(pids) == 2
    time.sleep(0.3)
    learner.kill()
    learner.communicate()
    assert gone(pids)


@pytest.mark.parametrize(
    "how",
    [
        "1 / 0",
        pytest.param("", marks=pytest.mark.slow),
        pytest.param("vec.close()", marks=pytest.mark.slow),
        pytest.param("vec.step(np.zeros(4, int)); sys.exit(3)", marks=pytest.mark.slow),
    ],
)
def test_learner_ends(tmp_path, how):
    learner = script(tmp_path, STUCK.format(seconds=0.0, then=how))
    out, err = learner.communicate(timeout=60)
    assert gone(int(pid) for pid in out.split())
    assert learner.returncode == (1 if "/" in how else 3 if "exit" in how else 0)
    assert ("ZeroDivisionError" in err) == ("/" in how)
    assert "Exception ignored" not in err


def test_ctrl_c(tmp_path):
    then = """
    import signal
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what runs in the background
    try:
        print("stepping", flush=True)
        while True: vec.step(np.zeros(4, int))
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    """
    learner = script(tmp_path, STUCK.format(seconds=0.5, then=then))
    pids = [int(pid) for pid in learner.stdout.readline().split()]
    assert learner.stdout.readline() == "stepping\n"
    time.sleep(0.2)
    os.kill(learner.pid, signal.SIGINT)
    out, err = learner.communicate(timeout=30)
    assert "interrupted" in out
    assert err == ""
    assert learner.returncode == 0
    assert gone(pids)


def test_workers_end_with_a_learner_whose_child_lives_on(tmp_path):
    """And is killed in the middle of a step, of 60 seconds."""
    then = (
        "child = os.fork()\n    if child == 0: time.sleep(20); os._exit(0)\n    print(child, flush=True)\n    vec.step([0] * 4)"
    )
    learner = script(tmp_path, "    import os, time" + STUCK.format(seconds=60.0, then=then))
    pids = [int(pid) for pid in learner.stdout.readline().split()]
    child = int(learner.stdout.readline())
    time.sleep(0.3)
    learner.kill()
    try:
        assert gone(pids)
        assert alive(child)
    finally:
        os.kill(child, signal.SIGKILL)
        learner.communicate()


def test_a_fork_of_the_learner_leaves_the_workers_alone():
    with make(Counter, 1, num_workers=1) as vec:
        vec.reset(seed=0)
        child = os.fork()
        if child == 0:
            vec.close()
            os._exit(0)
        os.waitpid(child, 0)
        step(vec)


def test_scripts_need_no_guard(tmp_path):
    body = """
        import gymnasium, hurtle, numpy as np
        class Mine(gymnasium.Env):
            observation_space = gymnasium.spaces.Box(0, 1, (1,))
            action_space = gymnasium.spaces.Discrete(2)
            def reset(self, *, seed=None, options=None): return np.zeros(1, np.float32), {}
            def step(self, action): return np.ones(1, np.float32), 1.0, False, False, {}
        vec = hurtle.make_vec(Mine, 4, backend="process", num_workers=1)
        vec.reset(seed=0)
        print(vec.step(np.zeros(4, int))[1].sum())
    """
    out, err = script(tmp_path, body).communicate(timeout=60)
    assert out == "4.0\n", err
    assert err == ""


def test_a_module_that_trains_when_imported_is_refused(tmp_path):
    (tmp_path / "my_module.py").write_text(
        "import hurtle\nfrom vector_envs import Counter\nclass Mine(Counter): pass\n"
        "vec = hurtle.make_vec(Mine, 2, backend='process')\n"
    )
    _, err = script(tmp_path, "import sys; sys.path.insert(0, sys.path[0]); import my_module").communicate(timeout=60)
    assert re.search(r"was called while a worker imported the module that defines the env.*__main__", err, re.S)
