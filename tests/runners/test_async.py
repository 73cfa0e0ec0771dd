"""The asynchronous runner: the same bits as the local one, nothing lost or used twice, faults and stops end it cleanly."""

import gc
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from sample_envs import SHORT_PENDULUM
from slow_envs import Simulator

import hurtle
from hurtle.algorithms.ppo import PPO
from hurtle.buffers.rollout import Rollout
from hurtle.collect.general_collector import GeneralCollector
from hurtle.collect.inference import Actor
from hurtle.contracts import Collector, Episodes, Weights
from hurtle.errors import CheckpointError, EnvFailedError, EnvTimeoutError, HurtleError, NonFiniteError, WorkerDiedError
from hurtle.policies.build import PolicyConfig, build_policy
from hurtle.runners import actors
from hurtle.runners.async_collector import AsyncCollector
from hurtle.runners.settings import TrainConfig
from hurtle.tracking.checkpoints import load_checkpoint
from hurtle.vector.native_vec import NativeVecEnv

SMALL = {
    "progress": "quiet",
    "trackers": (),
    "eval_episodes": 2,
    "preset": False,
    "num_envs": 8,
    "num_steps": 16,
    "minibatch_size": 64,
    "num_epochs": 2,
    "hidden_sizes": (16,),
    "total_steps": 1024,
}
DQN = {**SMALL, "algorithm": "dqn", "num_steps": 4, "learning_starts": 64, "capacity": 1000, "batch_size": 16}
DQN = {name: value for name, value in DQN.items() if name not in ("minibatch_size", "num_epochs")}
SAC = {**DQN, "algorithm": "sac", "env_parameters": SHORT_PENDULUM}
POLICY = build_policy(PolicyConfig(hidden_sizes=(4,)), Simulator.observation_space, Simulator.action_space)
VALID_LAGS = [0, 1, None]


@pytest.fixture
def runs(tmp_path):
    return {"runs": str(tmp_path)}


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture(autouse=True)
def nothing_is_left():
    """No test leaves threads, processes or open files."""
    gc.collect()
    files, threads = open_files(), threading.active_count()
    yield
    gc.collect()
    until = time.monotonic() + 5
    while time.monotonic() < until and (threading.active_count() > threads or multiprocessing.active_children()):
        time.sleep(0.01)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("hurtle actor")]
    assert not multiprocessing.active_children()
    assert open_files() <= files + 2  # torch may open some of its own


def newest(run):
    return load_checkpoint(max((run.path / "checkpoints").glob("step-*.pt")))


def weights(run):
    return torch.cat([part.double().flatten() for part in newest(run)["policy"].values()])


def train(env="cartpole", **settings):
    return hurtle.train(env, **{**SMALL, **settings})


# Results.


@pytest.mark.parametrize("actors", [1, 3])
def test_lag_0_is_the_local_run(runs, actors):
    local = weights(train(**runs))
    assert torch.equal(local, weights(train(**runs, runner="async", lag="0", num_actors=actors)))


@pytest.mark.parametrize("settings", [DQN, pytest.param(SAC, marks=pytest.mark.slow)], ids=["dqn", "sac"])
def test_lag_0_is_the_local_run_off_policy(runs, settings):
    env = "cartpole" if settings is DQN else "pendulum"
    local, other = (hurtle.train(env, **settings, **runs, **how) for how in ({}, {"runner": "async", "lag": "0"}))
    assert torch.equal(weights(local), weights(other))


def test_lag_0_is_the_local_run_of_envs_in_python(runs):
    local, other = (
        train(partial(Simulator), **runs, backend="serial", total_steps=256, **how)
        for how in ({}, {"runner": "async", "lag": "0"})
    )
    assert torch.equal(weights(local), weights(other))


def test_lag_1_repeats_with_any_number_of_actors(runs):
    found = [weights(train(**runs, runner="async", num_actors=actors)) for actors in (1, 2, 4, 1, 2, 4)]
    assert all(torch.equal(found[0], other) for other in found[1:])
    assert not torch.equal(found[0], weights(train(**runs)))


def test_devices_of_actors(runs):
    """Named ones act as those that are not; see tests/gpu for others than the learner's."""
    own, named = (weights(train(**runs, runner="async", num_actors=2, actor_devices=names)) for names in ((), ("cpu",)))
    assert torch.equal(own, named)
    with pytest.raises(HurtleError, match="A device is cpu, cuda, cuda:1"):
        train(**runs, runner="async", actor_devices=("cpu", "gpu"), num_actors=2)
    with pytest.raises(HurtleError, match="actor_devices is for actors: set runner='async'"):
        train(**runs, actor_devices=("cpu",))


def test_lag_1_with_a_memory_repeats(runs):
    found = [weights(train(**runs, runner="async", recurrent="gru", num_actors=actors)) for actors in (1, 2)]
    assert torch.equal(*found)


@pytest.mark.parametrize("actors", [1, 2])
@pytest.mark.parametrize("rewards", ["raw", "normalize"])
def test_a_run_that_was_resumed_is_the_run_that_was_not(runs, actors, rewards):
    config = {**runs, "anneal_learning_rate": False, "reward_mode": rewards, "runner": "async", "num_actors": actors}
    whole, half = (train(**config, total_steps=steps) for steps in (1024, 512))
    assert len(newest(half)["collector"]["slots"][0]) == 1  # collected, not yet learned from
    resumed = hurtle.train(resume=str(half.path), total_steps=1024)
    assert torch.equal(weights(resumed), weights(whole))
    assert newest(resumed)["progress"]["episodes"]["count"] == newest(whole)["progress"]["episodes"]["count"]


@pytest.mark.parametrize("settings", [SMALL, DQN], ids=["ppo", "dqn"])
def test_rollouts_of_another_length_are_not_resumed(runs, settings):
    half = hurtle.train("cartpole", **settings, **runs, runner="async")
    steps = {"num_steps": 2 * settings["num_steps"]}
    resumed = hurtle.train(resume=str(half.path), total_steps=2048, **steps)
    assert resumed.steps == 2048


@pytest.mark.parametrize("lag", ["0", "1", "free"])
def test_runs_change_runner_when_they_resume(runs, lag):
    local = train(**runs, total_steps=256)
    there = hurtle.train(resume=str(local.path), total_steps=512, runner="async", lag=lag, num_actors=2)
    assert there.steps == 512
    others = hurtle.train(resume=str(there.path), total_steps=768, num_actors=4)
    assert others.steps == 768
    back = hurtle.train(resume=str(there.path), total_steps=1024, runner="local")
    assert back.steps == 1024


def test_lag_0_resumes_a_local_run_exactly(runs):
    config = {**runs, "anneal_learning_rate": False}
    half = train(**config, total_steps=512)
    there = hurtle.train(resume=str(half.path), total_steps=1024, runner="async", lag="0")
    assert torch.equal(weights(there), weights(train(**config)))


@pytest.mark.parametrize("settings", [SMALL, DQN], ids=["ppo", "dqn"])
def test_a_free_lag_trains_and_resumes(runs, settings):
    half = hurtle.train("cartpole", **settings, **runs, runner="async", lag="free", num_actors=2)
    resumed = hurtle.train(resume=str(half.path), total_steps=1500)
    assert resumed.steps >= 1500


def test_pools_and_processes(runs):
    run = train(
        partial(Simulator), **runs, backend="process", runner="async", num_actors=2, num_workers=2, pool_batch_size=4,
        total_steps=512,
    )  # fmt: skip
    assert run.steps == 512


# Experience: every rollout by its number.


class Numbered(Collector):
    """Fills rollouts with their numbers, at random moments."""

    resumes_exactly = True

    def __init__(self, rows=2, seconds=0.0, fails_at=-1):
        self.num_rows, self.seconds, self.fails_at = rows, seconds, fails_at
        self.begun, self.closed, self.version, self.stops = 0, False, 0, 0
        self.dice = random.Random(rows)

    has_masks = False

    def new_rollout(self, num_steps):
        return Rollout(POLICY, num_steps, self.num_rows)

    def load_weights(self, weights):
        self.version = weights.version

    def collect(self, rollout):
        number = self.begun
        if number == self.fails_at:
            raise ValueError("broke")
        if self.seconds:
            time.sleep(self.seconds * self.dice.random())
        if self.stops:
            self.stops = 0
            return None
        self.begun += 1
        rollout.rewards.fill_(number)
        rollout.obs.fill_(number)
        rollout.version = self.version
        return Episodes.of([number], [1])

    def request_stop(self):
        self.stops += 1

    def state_dict(self, with_envs=True):
        saved = {"steps": self.begun, "actor": {"steps": torch.zeros(self.num_rows)}}
        return {**saved, "envs": self.begun} if with_envs else saved

    def load_state_dict(self, saved):
        self.begun = saved["envs"]

    def close(self, envs=True):
        self.closed = True


def joined(lag, actors=2, **settings):
    collector = AsyncCollector([Numbered(**settings) for _ in range(actors)], POLICY, lag)
    return collector, collector.new_rollout(3)


def weights_of(version):
    return Weights.of(POLICY, version)


@pytest.mark.parametrize("lag", VALID_LAGS)
@pytest.mark.parametrize("actors", [1, 3])
def test_every_rollout_is_used_once(lag, actors):
    collector, rollout = joined(lag, actors, seconds=0.002)
    seen, random_stops = [[] for _ in range(actors)], random.Random(0)
    for update in range(60):
        collector.load_weights(weights_of(update))
        if random_stops.random() < 0.1:
            collector.request_stop()
        while (episodes := collector.collect(rollout)) is None:
            pass
        rows = np.arange(2 * actors) if rollout.columns is None else rollout.columns
        for column in range(0, 2 * actors, 2):
            number = int(rollout.rewards[0, column])
            assert bool((rollout.obs[:, column : column + 2] == number).all())
            seen[rows[column] // 2].append(number)
        assert episodes.count == actors
        if lag is not None:
            assert rollout.version == max(0, update - lag)
    collector.close()
    for numbers in seen:
        assert numbers == list(range(len(numbers)))
    assert sum(map(len, seen)) == 60 * actors


class Leaving(Numbered):
    """Is lost with the rollout `leaves_at`, and away until `comes_back` is set."""

    def __init__(self, leaves_at=3, **settings):
        super().__init__(**settings)
        self.leaves_at, self.comes_back, self.is_away = leaves_at, threading.Event(), False

    def is_ready(self, seconds):
        if self.is_away and self.comes_back.wait(min(seconds, 0.01)):
            self.is_away = False
        return not self.is_away

    def collect(self, rollout):
        if self.begun == self.leaves_at and not self.comes_back.is_set():
            self.is_away = True
            return None
        return super().collect(rollout)


def numbers_of(rollout):
    """The row of each part of a joined rollout, and its number."""
    rows = np.arange(rollout.num_rows) if rollout.columns is None else rollout.columns
    return [(int(rows[column]) // 2, int(rollout.rewards[0, column])) for column in range(0, rollout.num_rows, 2)]


def test_the_others_fill_the_slots_of_one_that_is_away():
    """With a free lag: even a single one that is left fills all of a rollout; one that comes back has its slots again."""
    leaving = [Leaving(leaves_at=at) for at in (0, 3)]
    collector = AsyncCollector([*leaving, Numbered()], POLICY, None)
    rollout = collector.new_rollout(3)
    seen = [[], [], []]

    def update(version):
        collector.load_weights(weights_of(version))
        assert collector.collect(rollout).count == 3
        for row, number in numbers_of(rollout):
            seen[row].append(number)

    for version in range(20):
        update(version)
    assert [len(numbers) for numbers in seen[:2]] == [0, 3]
    assert [actor.collector.is_away for actor in collector._actors] == [True, True, False]
    for each in leaving:
        each.comes_back.set()
    for version in range(20, 200):
        update(version)
    collector.close()
    assert all(numbers == list(range(len(numbers))) for numbers in seen)
    assert min(map(len, seen)) > 3


@pytest.mark.parametrize("lag", [0, 1])
def test_a_fixed_lag_waits_for_one_that_is_away(lag):
    """It collects its rollout again, with the weights that it had to have."""
    leaving = Leaving()
    collector = AsyncCollector([leaving, Numbered()], POLICY, lag)
    rollout = collector.new_rollout(3)
    timer = threading.Timer(0.3, leaving.comes_back.set)
    timer.start()
    for update in range(8):
        collector.load_weights(weights_of(update))
        collector.collect(rollout)
        assert numbers_of(rollout) == [(0, update), (1, update)]
        assert rollout.version == max(0, update - lag)
        assert update < 3 or leaving.comes_back.is_set()
    timer.join()
    collector.close()


def test_the_queue_is_bounded_and_nobody_spins():
    """A slow learner stops the actors: each fills its slots, and then uses no CPU time."""
    collector, rollout = joined(None)
    collector.load_weights(weights_of(0))
    collector.collect(rollout)
    time.sleep(0.1)
    begun = [actor.collector.begun for actor in collector._actors]
    assert max(begun) <= 4
    used = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - used < 0.1
    assert [actor.collector.begun for actor in collector._actors] == begun
    assert collector.metrics()["queue"] == sum(begun) - 2
    collector.close()


def test_an_actor_without_weights_waits():
    collector, rollout = joined(1)
    collector.load_weights(weights_of(0))
    collector.collect(rollout)
    time.sleep(0.05)
    assert [actor.collector.begun for actor in collector._actors] == [2, 2]  # the third needs the weights of update 1
    for update in (1, 2):
        collector.load_weights(weights_of(update))
        collector.collect(rollout)
        assert rollout.version == update - 1
    collector.close()


def test_states_hold_what_the_learner_has_not_seen():
    collector, rollout = joined(1, seconds=0.01)
    for update in range(3):
        collector.load_weights(weights_of(update))
        collector.collect(rollout)
    saved = collector.state_dict()
    collector.close()
    assert [[slot["rollout"]["rewards"][0, 0] for slot in slots] for slots in saved["slots"]] == [[3], [3]]
    other, rollout = joined(1)
    other.load_state_dict(saved)
    for update in range(3, 6):
        other.load_weights(weights_of(update))
        other.collect(rollout)
        assert set(rollout.rewards.flatten().tolist()) == {update}
        assert rollout.version == update - 1
    other.close()


def test_metrics_and_advice():
    collector, rollout = joined(1, seconds=0.02)
    for update in range(5):
        collector.load_weights(weights_of(update))
        collector.collect(rollout)
    found = collector.metrics()
    assert (found["lag"], found["lag_max"]) == (1.0, 1.0)
    assert found["idle/learner"] > 0.5
    assert "actor-bound: the learner waits" in collector.advice
    collector.close()
    collector, rollout = joined(1)
    for update in range(5):
        collector.load_weights(weights_of(update))
        collector.collect(rollout)
        time.sleep(0.02)
    assert "learner-bound: actors wait" in collector.advice
    collector.close()
    collector, rollout = joined(0)
    assert collector.advice.startswith("lag 0: actors and learner take turns")


def test_the_metrics_are_in_the_run(runs):
    run = train(**runs, runner="async")
    last = json.loads((run.path / "metrics.jsonl").read_text().splitlines()[-2])
    assert (last["lag"], last["lag_max"]) == (1, 1)
    assert 0 <= last["idle/actors"] <= 1
    assert last["time/wait"] >= 0


# Faults and stops.


def ends_within(seconds, error, match, **settings):
    """The run raises this error soon after the fault, and leaves a checkpoint that loads."""
    began = time.perf_counter()
    with pytest.raises(error, match=match) as caught:
        train(**settings)
    assert time.perf_counter() - began < seconds
    (folder,) = Path(settings["runs"]).iterdir()
    assert load_checkpoint(max((folder / "checkpoints").glob("step-*.pt")))["policy"]
    return caught.value


@pytest.mark.parametrize("lag", ["0", "1", "free"])
def test_an_env_that_raises_ends_the_run(runs, lag):
    env = partial(Simulator, fails_at=100)
    ends_within(20, EnvFailedError, "the simulator broke", env=env, **runs, runner="async", lag=lag, backend="serial")
    (folder,) = (run for run in os.scandir(runs["runs"]))
    again = hurtle.train(partial(Simulator), resume=folder.path, total_steps=2048, trust=True)
    assert again.steps >= 2048


def test_a_worker_that_dies_ends_the_run(runs):
    env = partial(Simulator, fails_at=60, fails_by="exit")
    settings = {"runner": "async", "backend": "process", "num_actors": 2, "num_workers": 2}
    ends_within(30, WorkerDiedError, "exited with code 3", env=env, **runs, **settings)


class FailingPPO(PPO):
    """Its third update fails."""

    def update(self, experience, progress=0.0):
        if self.updates == 2:
            raise NonFiniteError("the learner broke")
        return super().update(experience, progress)

    from hurtle.algorithms.ppo_config import PPOConfig as Config


def test_a_learner_that_raises_ends_the_run(runs):
    settings = {**runs, "runner": "async", "num_actors": 2, "algorithm": FailingPPO, "checkpoint_every": 128}
    error = ends_within(20, NonFiniteError, "the learner broke", **settings)
    assert "Last checkpoint" in str(error)


def test_an_actors_error_is_the_runs_error():
    collector, rollout = joined(1, fails_at=2)

    def run():
        for update in range(9):
            collector.load_weights(weights_of(update))
            collector.collect(rollout)

    with pytest.raises(ValueError, match="broke") as caught:
        run()
    assert caught.traceback[-1].name == "collect"  # the actor's own frames
    assert "actors" not in collector.state_dict()
    began = time.perf_counter()
    collector.close()
    assert time.perf_counter() - began < 1
    assert all(actor.collector.closed for actor in collector._actors)


def test_an_actor_that_hangs_is_left_behind(capsys):
    """In a step of this process, which nothing can end: its env stays open. In other processes the step is killed."""
    hangs, release, closed = threading.Event(), threading.Event(), []

    class Hanging(Simulator):
        def step(self, action):
            if self.age == 40:
                hangs.set()
                release.wait(30)
            return super().step(action)

        def close(self):
            closed.append(self)

    vec = hurtle.make_vec(Hanging, num_envs=1, backend="serial")
    collector = AsyncCollector([GeneralCollector(vec, Actor(POLICY, 1, 0))], POLICY, 1)
    rollout = collector.new_rollout(10)
    for update in range(4):
        collector.load_weights(weights_of(update))
        collector.collect(rollout)
    collector.load_weights(weights_of(4))
    assert hangs.wait(10)
    closed.clear()  # the one that told its spaces
    collector.close()
    assert "actor 0 is still in a step; its envs are left open" in capsys.readouterr().err
    assert not closed
    release.set()
    collector._actors[0].thread.join()
    vec.close()
    assert closed


def test_a_worker_that_hangs_is_killed(runs):
    env = partial(Simulator, fails_at=60, fails_by="hang")
    settings = {"runner": "async", "backend": "process", "num_workers": 2, "step_timeout": 0.5}
    ends_within(30, EnvTimeoutError, "0.5", env=env, **runs, **settings)


def test_a_stop_that_wakes_nobody_is_found(monkeypatch):
    """A signal handler may run after the learner has looked for a stop, and before it waits."""
    collector, rollout = joined(0, seconds=0.5)
    collector.load_weights(weights_of(0))
    ready = AsyncCollector._is_ready

    def between(self):
        monkeypatch.setattr(AsyncCollector, "_is_ready", ready)
        self.request_stop()
        return False

    monkeypatch.setattr(AsyncCollector, "_is_ready", between)
    assert collector.collect(rollout) is None
    collector.close()


@pytest.mark.parametrize(  # test_trainer.py sends both to a local run, which takes them the same way
    "sent", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_signals_save_and_end_it(tmp_path, sent):
    code = (
        "import hurtle; from functools import partial; from slow_envs import Simulator\n"
        "hurtle.train(partial(Simulator, seconds=0.02), runner='async', backend='process', num_envs=4, num_actors=2, "
        f"num_steps=50, minibatch_size=100, preset=False, progress='plain', trackers=(), runs={str(tmp_path)!r})"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(["tests", *sys.path])}
    process = subprocess.Popen(
        [sys.executable, "-uc", code], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        seen = []
        for line in process.stdout:
            seen.append(line)
            if "steps/s" in line:
                break
        process.send_signal(sent)
        rest, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, (seen, rest)
    assert "saving" in rest
    (folder,) = tmp_path.iterdir()
    assert list((folder / "checkpoints").glob("step-*.pt"))


def one_cycle(seed):
    """Start, and stop at a random moment in a random way."""
    dice = random.Random(seed)
    lag, actors = dice.choice(VALID_LAGS), dice.randint(1, 3)
    fails = dice.randint(0, 20) if dice.random() < 0.3 else -1
    collector, rollout = joined(lag, actors, seconds=dice.choice([0.0, 0.002]), fails_at=fails)
    try:
        for update in range(dice.randint(0, 12)):
            collector.load_weights(weights_of(update))
            if dice.random() < 0.1:
                collector.request_stop()
            collector.collect(rollout)
            if dice.random() < 0.1:
                collector.state_dict()
            time.sleep(dice.choice([0, 0.001]))
    except ValueError:
        assert fails >= 0
    began = time.perf_counter()
    collector.close()
    return time.perf_counter() - began


def test_cycles_of_start_and_stop():
    assert max(map(one_cycle, range(60))) < 2


@pytest.mark.slow
def test_a_thousand_cycles_of_start_and_stop():
    assert max(map(one_cycle, range(1000))) < 2


def no_space(*arguments, **words):
    raise CheckpointError("no space left")


def one_fault(seed, folder):
    """A whole run with a fault at a random moment, or none."""
    dice = random.Random(seed)
    kind = dice.choice(["env", "worker", "learner", "slow learner", "disk", "none"])
    at = dice.randint(1, 120)
    env = partial(Simulator, fails_at=at if kind in ("env", "worker") else 0, fails_by="exit" if kind == "worker" else "raise")

    def fail(trainer):
        if kind == "slow learner":
            time.sleep(0.01)
        if kind == "learner" and trainer.updates == at % 5 + 1:
            raise ZeroDivisionError
        if kind == "disk" and trainer.updates == 1:  # no checkpoint can be written from here on
            trainer._saver.checkpoints.save = no_space

    settings = {
        "lag": dice.choice(["0", "1", "free"]), "runner": "async", "num_actors": dice.choice([1, 2, 4]), "total_steps": 640,
        "backend": "process" if kind == "worker" else "serial", "num_workers": 2 if kind == "worker" else None,
        "checkpoint_every": 128, "runs": str(folder), "seed": seed, "callbacks": [fail],
    }  # fmt: skip
    try:
        run = train(env, **settings)
    except (EnvFailedError, WorkerDiedError, ZeroDivisionError):
        assert kind in ("env", "worker", "learner")
    except CheckpointError:
        assert kind == "disk"
    else:
        assert run.steps >= 640


@pytest.mark.parametrize("seed", range(8))
def test_faults(tmp_path, seed):
    one_fault(seed, tmp_path)


@pytest.mark.slow
def test_five_hundred_faults(tmp_path):
    for seed in range(500):
        one_fault(seed, tmp_path / str(seed))


# What is chosen, and what is refused.


def said(capsys, *arguments, **settings):
    train(*arguments, **{**settings, "progress": "plain"})
    return capsys.readouterr().out


def test_auto_stays_local_where_it_cannot_pay(runs, capsys):
    text = said(capsys, **runs, runner="auto")
    assert "runner      local: envs are compiled" in text
    text = said(capsys, partial(Simulator), **runs, runner="auto", total_steps=256)
    assert "runner      local: envs step in this process, since they are too fast for others" in text


def test_auto_takes_actors_for_envs_in_processes(runs, capsys):
    text = said(capsys, partial(Simulator), **runs, runner="auto", backend="process", total_steps=256)
    assert "runner      async: 1 actor (8 envs), lag 1; envs step in processes of their own" in text
    assert "actors      " in text


def test_auto_takes_actors_where_they_explore_differently(monkeypatch):
    """Unless the envs are on the GPU, where nothing is gained by another thread."""
    train = TrainConfig(algorithm="apex", runner="auto", num_envs=8)
    made = actors.local_or_actors(train, lambda share: hurtle.make_vec("cartpole", share.num_envs))
    assert "async: 4 actors (2 + 2 + 2 + 2 envs), lag 1; its actors explore differently" in made.described
    made.close()
    monkeypatch.setattr(actors, "CudaVecEnv", NativeVecEnv)
    made = actors.local_or_actors(train, lambda share: hurtle.make_vec("cartpole", share.num_envs))
    assert made.described == "local: envs run on the GPU"
    made.close()


def test_no_actor_has_more_workers_than_envs(monkeypatch):
    monkeypatch.setattr(actors, "free_cores", lambda: 16)
    train = TrainConfig(runner="async", backend="process", num_envs=4, num_actors=2)
    shares = actors._shares(train, 2, "process")
    assert [(share.num_envs, share.num_workers) for share in shares] == [(2, 2), (2, 2)]
    assert [share.num_workers for share in actors._shares(train, 2, "serial")] == [None, None]


def test_auto_stays_local_for_algorithms_that_cannot_lag(runs, capsys):
    settings = {"backend": "process", "total_steps": 256, "algorithm": "a2c", **runs}
    small = {name: value for name, value in SMALL.items() if name not in ("minibatch_size", "num_epochs")}
    hurtle.train(partial(Simulator), **{**small, **settings, "runner": "auto", "progress": "plain"})
    assert "runner      local: a2c learns from steps of the newest policy only" in capsys.readouterr().out
    hurtle.train(partial(Simulator), **{**small, **settings, "runner": "async", "progress": "plain"})
    assert "lag 1; envs step in processes of their own; a2c does not correct for the lag" in capsys.readouterr().out


@pytest.mark.parametrize("envs", [1, 2, 8])
def test_algorithms_with_actors_take_what_there_is(runs, capsys, envs):
    how = {**runs, "progress": "plain", "trackers": (), "eval_episodes": 1, "preset": False, "total_steps": 64}
    hurtle.train("cartpole", algorithm="apex", num_envs=envs, **how)
    assert f"async: {min(4, envs)} actor" in capsys.readouterr().out
    with hurtle.make_vec("cartpole", num_envs=envs) as vec:
        hurtle.train(vec, algorithm="apex", **how)
    assert "local: the vector is your own" in capsys.readouterr().out


def test_a_local_run_says_nothing_of_runners(runs, capsys):
    text = said(capsys, **runs)
    assert "runner" not in text
    assert "actors" not in text


def test_settings_that_do_not_fit(runs):
    with pytest.raises(HurtleError, match="num_actors=9 is more than num_envs=8"):
        train(**runs, runner="async", num_actors=9)
    with pytest.raises(HurtleError, match="make num_envs a multiple of num_actors"):
        train(**runs, runner="async", lag="free", num_actors=3)
    with pytest.raises(HurtleError, match="lag must be one of auto, 0, 1"):
        train(**runs, lag="2")
    vec = hurtle.make_vec("cartpole", num_envs=8)
    with pytest.raises(HurtleError, match="A vector of your own belongs to one actor: leave out num_actors=2"):
        train(vec, **runs, runner="async", num_actors=2)
    assert train(vec, **runs, runner="async").steps == 1024
    vec.close()
