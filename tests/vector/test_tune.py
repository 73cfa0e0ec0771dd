"""Which back end is chosen and why, the autotuner's table, and the command that prints it."""

import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from emulation_envs import Crowd, Quest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

import hurtle
from hurtle.cli import main
from hurtle.errors import EnvFailedError, HurtleError, UnknownNameError
from hurtle.vector import autotune as autotune_module
from hurtle.vector import backend_choice
from hurtle.vector.autotune import Result, Setting, autotune, best, settings_for, steps_per_second
from hurtle.vector.backend_choice import Trial, batch_seconds, choose, duration, legal_actions, try_env
from hurtle.vector.options import VecOptions

REPO = Path(__file__).parent.parent.parent


class Sleeper(gymnasium.Env):
    """Each step takes `seconds`; logs what happens to the instances."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(3)

    def __init__(self, seconds=0.0, log=None, episode=1000):
        self.seconds, self.episode = seconds, episode
        self.log = [] if log is None else log
        self.log.append("made")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        self.log.append("reset")
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        self.log.append("step")
        if self.seconds:
            time.sleep(self.seconds)
        return np.zeros(2, np.float32), 0.0, self.steps == self.episode, False, {}

    def close(self):
        self.log.append("closed")


class Picky(Sleeper):
    """Allows one action at a time and raises on others."""

    def __init__(self, action_space):
        super().__init__(episode=7)
        self.action_space = action_space

    def _info(self):
        counts = [self.action_space.n] if isinstance(self.action_space, spaces.Discrete) else self.action_space.nvec
        self.legal = [self.steps % n for n in counts]
        return {"action_mask": np.concatenate([np.arange(n) == a for n, a in zip(counts, self.legal, strict=True)])}

    def reset(self, **arguments):
        obs, _ = super().reset(**arguments)
        return obs, self._info()

    def step(self, action):
        assert np.array_equal(np.reshape(action, -1), np.add(self.legal, self.action_space.start)), (action, self.legal)
        obs, reward, terminated, truncated, _ = super().step(action)
        return obs, reward, terminated, truncated, self._info()


class Telling(Picky):
    """The same, but its mask is in its observation."""

    def __init__(self, action_space):
        super().__init__(action_space)
        legal = spaces.MultiBinary(int(action_space.n))
        self.observation_space = spaces.Dict({"action_mask": legal, "rest": spaces.Box(-1, 1, (2,), np.float32)})

    def reset(self, **arguments):
        rest, info = super().reset(**arguments)
        return {"action_mask": info["action_mask"].astype(np.int8), "rest": rest}, {}

    def step(self, action):
        rest, *outcome, info = super().step(action)
        return {"action_mask": info["action_mask"].astype(np.int8), "rest": rest}, *outcome, {}


def options(num_envs, **others):
    return VecOptions(num_envs, num_envs, **others)


@pytest.fixture
def cores(monkeypatch):
    """A function that sets the number of cores."""

    def set_cores(count):
        for module in (backend_choice, autotune_module):
            monkeypatch.setattr(module, "free_cores", lambda: count)

    set_cores(2)
    return set_cores


@pytest.fixture
def a_step_takes(monkeypatch):
    """A function that fixes the trial's result, so that the choice can be checked exactly."""

    def fix(seconds, name="CartPole-v1"):
        monkeypatch.setattr(backend_choice, "try_env", lambda maker, options: Trial(name, seconds))
        monkeypatch.setattr(backend_choice, "measured_speed_up", as_predicted)

    return fix


def as_predicted(maker, options, workers, step_seconds):
    """Workers that are as fast as the cost model says."""
    return options.num_envs * step_seconds / batch_seconds(step_seconds, options.num_envs, workers, backend_choice.free_cores())


# The choice.


def test_a_cheap_env_runs_in_series_and_the_reason_says_what_workers_would_give(cores, a_step_takes):
    a_step_takes(8.1e-6)
    backend, chosen, why = choose(None, options(8))
    assert (backend, chosen.num_workers) == ("serial", None)
    assert why == "CartPole-v1: 8.1 µs per step, 8 envs: serial (process with 2 workers would be about 0.7×)"


def test_many_cheap_envs_and_slow_ones_run_in_workers(cores, a_step_takes):
    a_step_takes(8.1e-6)
    backend, chosen, why = choose(None, options(64))
    assert (backend, chosen.num_workers) == ("process", 2)
    assert why == "CartPole-v1: 8.1 µs per step, 64 envs: process with 2 workers (about 1.6× serial)"
    a_step_takes(1e-3, "Slow")
    backend, chosen, why = choose(None, options(8))
    assert (backend, chosen.num_workers) == ("process", 2)
    assert why == "Slow: 1.0 ms per step, 8 envs: process with 2 workers (about 1.9× serial)"


def test_more_cores_are_used_as_far_as_they_help(cores, a_step_takes):
    cores(16)
    a_step_takes(1e-2)
    assert choose(None, options(8))[1].num_workers == 8
    assert choose(None, options(64))[1].num_workers == 16
    assert choose(None, options(20))[1].num_workers == 10  # two envs each, as with 16 workers, and fewer to wake
    a_step_takes(8.1e-6)
    workers = choose(None, options(64))[1].num_workers
    assert workers == min(range(2, 17), key=lambda w: batch_seconds(8.1e-6, 64, w, 16))
    assert workers < 16


def test_workers_are_never_chosen_where_they_promise_less_than_the_least_speed_up(cores, a_step_takes):
    for count in (2, 3, 8, 64):
        cores(count)
        for seconds in np.geomspace(1e-6, 1e-1, 40):
            a_step_takes(seconds)
            for num_envs in (2, 3, 8, 64):
                backend, chosen, _ = choose(None, options(num_envs))
                if backend == "process":
                    predicted = batch_seconds(seconds, num_envs, chosen.num_workers, count)
                    assert num_envs * seconds / predicted >= 1.2


class Machine:
    """A clock, and turns that take longer as the machine slows down."""

    def __init__(self, slowness):
        self.now, self._slowness = 0.0, slowness

    def clock(self):
        return self.now

    def turn(self, seconds):
        def run():
            self.now += seconds * self._slowness(self.now)

        return run


@pytest.mark.parametrize(
    "slowness",
    [
        lambda now: 1.0,
        lambda now: 1.0 + now / 20,  # slower and slower
        lambda now: max(5.0 - now / 20, 1.0),  # faster and faster
        lambda now: 1.0 if now < 6 else 5.0,  # another process starts using it
        lambda now: 1.0 + 0.5 * np.sin(now / 3),
    ],
)
@pytest.mark.parametrize("ratio", [0.5, 1.0, 1.3, 1.6])
def test_a_machine_whose_speed_changes_favours_nobody(slowness, ratio):
    machine = Machine(slowness)
    found = backend_choice.speed_up_in_turns(machine.turn(1.0), machine.turn(1.0 / ratio), machine.clock)
    assert found == pytest.approx(ratio, rel=0.08)


def test_one_turn_after_the_other_would_be_fooled():
    machine = Machine(lambda now: 1.0 if now > 8 else 3.0)  # why turns alternate
    serial, workers = machine.turn(1.0), machine.turn(1.0)
    seconds = []
    for turn in (serial, workers):
        began = machine.clock()
        for _ in range(backend_choice.ROUNDS):
            turn()
        seconds.append(machine.clock() - began)
    assert seconds[0] / seconds[1] > backend_choice.LEAST_SPEED_UP


def test_workers_must_show_what_they_promise(cores, a_step_takes, monkeypatch):
    a_step_takes(20e-6)  # promises 1.7
    for shown, backend in [(0.8, "serial"), (1.39, "serial"), (1.4, "process")]:
        monkeypatch.setattr(backend_choice, "measured_speed_up", lambda *_, shown=shown: shown)
        assert choose(None, options(64))[0] == backend
        assert f"about {shown:.1f}×" in choose(None, options(64))[2]


def test_only_doubtful_cases_are_measured(cores, a_step_takes, monkeypatch):
    a_step_takes(8.1e-6)
    monkeypatch.setattr(backend_choice, "measured_speed_up", unmakable)
    assert choose(None, options(8))[0] == "serial"  # workers promise too little
    a_step_takes(2e-3)
    monkeypatch.setattr(backend_choice, "measured_speed_up", unmakable)
    assert choose(None, options(8))[0] == "process"  # the cost of workers is negligible


def test_real_vectors_are_measured(cores):
    found = backend_choice.measured_speed_up(Sleeper, VecOptions(4, 2, autoreset_mode=AutoresetMode.DISABLED), 2, 1e-3)
    assert 0 < found < 100


def test_a_given_number_of_workers_is_kept_or_not_used_at_all(cores, a_step_takes):
    a_step_takes(1e-2)
    assert choose(None, options(8, num_workers=4))[:2] == ("process", options(8, num_workers=4))
    assert choose(None, options(8, num_workers=1))[0] == "serial"
    a_step_takes(1e-6)
    assert choose(None, options(8, num_workers=4))[0] == "serial"


def test_a_pool_is_chosen_like_any_vector_and_keeps_its_batch(cores, a_step_takes):
    a_step_takes(1e-2)
    backend, chosen, _ = choose(None, VecOptions(8, 4))
    assert (backend, chosen.batch_size) == ("process", 4)


def unmakable():
    raise AssertionError("an env was made to find out what is known already")


def test_what_is_clear_beforehand_is_not_measured(cores, monkeypatch):
    assert choose(unmakable, options(1)) == ("serial", options(1), "serial, because there is only one env")
    backend, chosen, why = choose(unmakable, options(8, step_timeout=5.0))
    assert (backend, chosen.num_workers, why) == ("process", 2, "process with 2 workers, because of step_timeout")
    cores(1)
    assert choose(unmakable, options(8)) == ("serial", options(8), "serial, because there is only one core")
    backend, chosen, why = choose(unmakable, options(8, restart_workers=True))
    assert (backend, chosen.num_workers, why) == ("process", 1, "process with 1 worker, because of restart_workers")
    monkeypatch.setenv("HURTLE_CORES", "1")  # a share: the machine has more
    assert choose(unmakable, options(8)) == ("serial", options(8), "")


def test_real_envs_are_told_apart(cores):
    backend, _, why = choose(Sleeper, options(2))
    assert backend == "serial"
    assert re.fullmatch(r"Sleeper: [\d.]+ µs per step, 2 envs: serial \(process with 2 workers would be about \d\.\d×\)", why)
    backend, _, why = choose(partial(Sleeper, 0.004), options(4))
    assert backend == "process"
    assert re.fullmatch(r"Sleeper: [\d.]+ ms per step, 4 envs: process with 2 workers \(about 1\.[89]× serial\)", why)


def test_make_vec_says_what_it_chose(cores, capsys):
    vec = hurtle.make_vec("CartPole-v1", 2)
    vec.close()
    assert vec.num_workers == 1
    assert capsys.readouterr().err.startswith("hurtle: CartPole-v1: ")


# The trial.


def test_the_trial_makes_one_env_resets_it_as_its_episodes_end_and_closes_it():
    log = []
    began = time.perf_counter()
    trial = try_env(partial(Sleeper, log=log, episode=10), options(8))
    assert trial.name == "Sleeper"
    assert 0 < trial.step_seconds * log.count("step") < time.perf_counter() - began
    assert (log.count("made"), log.count("closed"), log[-1]) == (1, 1, "closed")
    steps = log.count("step")
    assert backend_choice.FEWEST_STEPS <= steps <= backend_choice.TRIAL_STEPS
    assert log.count("reset") == 2 + steps // 10  # to inspect it, to start, and after each episode


def test_slow_envs_are_tried_for_a_few_steps_and_very_slow_ones_for_one(monkeypatch):
    log = []
    began = time.perf_counter()
    trial = try_env(partial(Sleeper, 0.05, log), options(8))
    assert log.count("step") == backend_choice.FEWEST_STEPS
    assert 0.05 <= trial.step_seconds < (time.perf_counter() - began) / backend_choice.FEWEST_STEPS
    monkeypatch.setattr(backend_choice, "SLOW_STEP", 0.04)
    log.clear()
    assert try_env(partial(Sleeper, 0.05, log), options(8)).step_seconds >= 0.05
    assert log.count("step") == 1


@pytest.mark.parametrize("space", [spaces.Discrete(4, start=-1), spaces.MultiDiscrete([3, 2]), spaces.Discrete(3)])
def test_only_legal_actions_are_tried(space):
    assert try_env(partial(Picky, space), options(8)).step_seconds > 0
    if isinstance(space, spaces.Discrete):
        assert try_env(partial(Telling, space), options(8)).step_seconds > 0
        assert try_env(partial(Telling, space), options(8, emulate=space.start == 0)).step_seconds > 0


def test_structured_envs_and_agents_are_tried():
    assert try_env(Quest, options(8)).step_seconds > 0
    assert try_env(Quest, options(8, emulate=True)).step_seconds > 0
    pytest.importorskip("pettingzoo", reason='needs "hurtle[pettingzoo]"')
    envs = []

    def make():
        envs.append(Crowd([["agent_0", "agent_1"]] * 4, masks=True))
        return envs[-1]

    trial = try_env(make, options(8))
    assert (trial.name, len(envs)) == ("crowd", 1)
    taken = {int(action) for actions in envs[0].received for action in actions.values()}
    assert taken == {1, 3}  # allowed by its masks


def test_the_envs_own_random_actions_are_left_alone():
    Sleeper.action_space.seed(5)
    expected = [Sleeper.action_space.sample() for _ in range(20)]
    Sleeper.action_space.seed(5)
    try_env(Sleeper, options(8))
    assert [Sleeper.action_space.sample() for _ in range(20)] == expected


class Failing(Sleeper):
    def __init__(self, where, log=None):
        super().__init__(log=log)
        self.where = where
        self._fail("constructor")

    def _fail(self, where):
        if self.where == where:
            raise ZeroDivisionError(f"in {where}")

    def reset(self, **arguments):
        self._fail("reset")
        return super().reset(**arguments)

    def step(self, action):
        self._fail("step")
        return super().step(action)


@pytest.mark.parametrize("where", ["constructor", "reset", "step"])
def test_an_env_that_raises_is_an_error_with_its_traceback_and_is_closed(where, cores):
    log = []
    with pytest.raises(EnvFailedError, match=f"Env 0 raised ZeroDivisionError in .*{where}") as caught:
        choose(partial(Failing, where, log), options(8))
    assert "self._fail(" in str(caught.value)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert log.count("closed") == (0 if where == "constructor" else 1)


def test_legal_actions_are_drawn_from_what_the_masks_allow():
    rng = np.random.default_rng(0)
    masks = rng.random((500, 5)) < 0.5
    masks[:, 3] = True
    drawn = legal_actions(spaces.Discrete(5, start=10), masks, rng)
    assert masks[np.arange(500), drawn - 10].all()
    assert set(drawn) == {10, 11, 12, 13, 14}
    masks = np.array([[True, False, False, True, False], [False, False, True, True, True]])
    drawn = legal_actions(spaces.MultiDiscrete([3, 2]), masks, rng)
    assert drawn[0].tolist() == [0, 0]
    assert drawn[1, 0] == 2
    assert legal_actions(spaces.Box(-1, 1, (2,)), masks, rng) is None
    assert legal_actions(spaces.Discrete(6), masks, rng) is None


def test_times_are_written_for_people():
    assert [duration(t) for t in (3.2e-7, 9.99e-4, 1e-3, 0.25, 12.3)] == ["0.3 µs", "999 µs", "1.0 ms", "250 ms", "12 s"]


# The autotuner.


def test_the_settings_go_from_simple_to_complex(cores):
    settings = [(s.backend, s.num_workers, s.batch_size) for s in settings_for("CartPole-v1", 8)]
    pools = [(workers, batch) for workers in (1, 2, 4) for batch in (8, 4, 2)]
    assert settings == [("serial", 1, 8)] + [("process", *pool) for pool in pools]
    assert [(s.num_envs, s.num_workers, s.batch_size) for s in settings_for("CartPole-v1", (3, 2), ["process"])] == [
        (3, 1, 3),
        (3, 2, 3),
        (2, 1, 2),
        (2, 1, 1),
        (2, 2, 2),
        (2, 2, 1),
    ]
    assert [(s.backend, s.num_workers) for s in settings_for("cartpole", 1)] == [("serial", 1), ("native", 1), ("process", 1)]
    cores(16)
    assert {s.num_workers for s in settings_for("CartPole-v1", 64, ["process"])} == {1, 8, 16, 32}


def test_autotune_measures_every_setting(cores):
    results = autotune("CartPole-v1", 2, seconds=0.02)
    assert [r.setting for r in results] == settings_for("CartPole-v1", 2)
    serial = results[0].steps_per_second
    assert results[0].speed_up == 1.0
    for result in results:
        assert 10 < result.steps_per_second < 1e7
        assert result.speed_up == pytest.approx(result.steps_per_second / serial)
    assert [r.speed_up for r in autotune("CartPole-v1", 1, seconds=0.01, backends=["process"])] == [None]


def test_the_work_of_a_policy_counts(cores):
    with_policy = autotune(Sleeper, 2, seconds=0.1, backends=["serial"], policy_ms=5)[0]
    assert with_policy.steps_per_second < 2 / 0.005


def test_the_other_envs_of_a_pool_run_while_the_policy_works(monkeypatch):
    running = set()
    for batch, others in ((4, 0), (1, 3)):
        running.clear()
        with hurtle.make_vec(Sleeper, 4, backend="serial", batch_size=batch) as vec:
            monkeypatch.setattr(autotune_module, "_work", lambda seconds, vec=vec: running.add(len(vec._running)))
            steps_per_second(vec, batch, 0.01, policy_seconds=0.12)
        assert running == {others}


@pytest.mark.slow
def test_a_pool_hides_the_work_of_a_policy(cores, monkeypatch):
    monkeypatch.setattr(autotune_module, "_work", time.sleep)  # work would take longer on a busy machine
    # 300 ms of sleep in the env and 240 ms of policy: in sequence a batch takes 540 ms, overlapped 420 at most.
    slow = partial(Sleeper, 0.3)
    rates = {}
    for batch in (2, 1):
        vec = hurtle.make_vec(slow, 2, backend="process", num_workers=2, batch_size=batch)
        rates[batch] = steps_per_second(vec, batch, 3.0, policy_seconds=0.12 * batch)
        vec.close()
    assert rates[2] < 2 / 0.54 < rates[1]


def test_masks_are_respected_while_tuning():
    vec = hurtle.make_vec(partial(Picky, spaces.Discrete(4)), 4, backend="process", num_workers=1, batch_size=2)
    assert steps_per_second(vec, 2, 0.02) > 0
    vec.close()
    for emulate in (False, True):
        vec = hurtle.make_vec(partial(Telling, spaces.Discrete(4)), 4, backend="serial", batch_size=2, emulate=emulate)
        assert steps_per_second(vec, 2, 0.02) > 0
    pytest.importorskip("pettingzoo", reason='needs "hurtle[pettingzoo]"')
    vec = hurtle.make_vec(partial(Crowd, [["agent_0", "agent_1"]] * 4, masks=True), 2, backend="serial")
    assert steps_per_second(vec, 2, 0.02) > 0
    received = [actions for env in vec.get_attr("received") for actions in env]
    assert {int(a) for actions in received for a in actions.values()} == {1, 3}


def test_a_slow_env_is_stepped_no_longer_than_needed():
    log = []
    vec = hurtle.make_vec(partial(Sleeper, 0.05, log), 2, backend="serial", check=False)
    rate = steps_per_second(vec, 2, seconds=0.05)
    assert log.count("step") == 2  # one batch of two envs took longer than the time asked for
    assert 1 < rate <= 2 / 0.1


def test_the_best_is_the_simplest_of_the_fastest():
    serial = Result(Setting("serial", 8, 1, 8), 98.0, 1.0)
    two = Result(Setting("process", 8, 2, 8), 100.0, 1.02)
    four = Result(Setting("process", 8, 4, 4), 120.0, 1.22)
    assert best([serial, two]) is serial
    assert best([serial, two, four]) is four


def test_the_call_to_paste_works(cores):
    setting = Setting("process", 4, 1, 2)
    call = setting.call("CartPole-v1", emulate=True)
    assert call == ('hurtle.make_vec("CartPole-v1", num_envs=4, backend="process", num_workers=1, batch_size=2, emulate=True)')
    vec = eval(call)
    assert (vec.num_envs, vec.num_workers, vec.batch_size) == (4, 1, 2)
    vec.close()
    assert Setting("serial", 8, 1, 8).call(Sleeper) == 'hurtle.make_vec(Sleeper, num_envs=8, backend="serial")'


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"num_envs": 0}, HurtleError, "num_envs must be an int of at least 1, got 0"),
        ({"num_envs": ()}, HurtleError, "at least one number"),
        ({"backends": ["proces"]}, UnknownNameError, "Did you mean process"),
        ({"backends": ["native"]}, UnknownNameError, "No back end 'native' for 'CartPole-v1'"),
        ({"seconds": 0}, HurtleError, "seconds must be positive, got 0"),
        ({"seconds": float("nan")}, HurtleError, "seconds must be positive"),
        ({"policy_ms": -1.0}, HurtleError, r"policy_ms must be 0 or more, got -1\.0"),
    ],
)
def test_wrong_requests_are_refused(wrong, error, message):
    with pytest.raises(error, match=message):
        autotune("CartPole-v1", **{"num_envs": 2, **wrong})


# The command.


def test_bench_vector_prints_rows_and_the_call(cores, capsys):
    assert main(["bench", "vector", "CartPole-v1", "--num-envs", "2", "4", "--seconds", "0.01", "--backends", "serial"]) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines() if line.startswith("serial")]
    assert [row[:5] for row in rows] == [["serial", "2", "1", "2", "2"], ["serial", "4", "1", "4", "4"]]
    assert all(row[6] == "1.00" for row in rows)
    assert 'vec = hurtle.make_vec("CartPole-v1", num_envs=4, backend="serial")' in out


def test_ctrl_c_shows_what_is_known(monkeypatch, cores, capsys):
    def interrupted(env, settings, **rest):
        yield Result(settings[0], 1234.0, 1.0)
        raise KeyboardInterrupt

    monkeypatch.setattr(autotune_module, "measure_all", interrupted)
    assert main(["bench", "vector", "CartPole-v1", "--num-envs", "8"]) == 130
    out = capsys.readouterr().out
    assert "Stopped after 1 of 10 settings." in out
    assert "Best with 8 envs (1,234 steps/s):" in out


def test_bench_vector_explains_mistakes(capsys):
    assert main(["bench", "vector", "CartPol-v1"]) == 2
    assert "No environment 'CartPol-v1'" in capsys.readouterr().err
    assert main(["bench", "vector", "CartPole-v1", "--backends", "serail"]) == 2
    assert "Did you mean serial?" in capsys.readouterr().err
    for wrong, message in (
        (("--seconds", "0"), "seconds must be positive, got 0.0."),
        (("--policy-ms", "-3"), "policy_ms must be 0 or more, got -3.0."),
        (("--backends", "proces"), "No back end 'proces' for 'CartPole-v1'. Did you mean process?"),
    ):
        assert main(["bench", "vector", "CartPole-v1", *wrong]) == 2
        printed = capsys.readouterr()
        assert (printed.out, printed.err) == ("", f"hurtle: loading the environments …\nhurtle: error: {message}\n")
    with pytest.raises(SystemExit) as ended:
        main(["bench", "vector", "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    for word in ("ENV", "--num-envs", "--backends", "--policy-ms"):
        assert word in out


# The benchmark.

ONLY_NUMPY_AND_GYMNASIUM = """
import runpy, sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("numba", "torch", "rich", "tyro", "matplotlib", "scipy", "cv2", "ray", "stable_baselines3"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
sys.argv = ["vector.py", "--quick", "--sections", *sys.argv[1:]]
sys.path.insert(0, "benchmarks")
runpy.run_path("benchmarks/vector.py", run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sections", "found"),
    [
        (("emulation", "ray"), ("### Emulation", "Section ray is skipped")),
        (
            ("delay", "images"),
            (
                "### The delay study",
                "### A batch of envs that do nothing",
                "### 100 KB observations",
                r"copies on the reading side +\| +≤ 0 \| +0\.00 \| yes",
            ),
        ),
    ],
)
def test_the_benchmark_runs_with_numpy_and_gymnasium_alone(sections, found):
    before = sorted((REPO / "benchmarks" / "results").iterdir())
    done = subprocess.run(
        [sys.executable, "-c", ONLY_NUMPY_AND_GYMNASIUM, *sections],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for pattern in found:
        assert re.search(pattern, done.stdout)
    assert sorted((REPO / "benchmarks" / "results").iterdir()) == before
