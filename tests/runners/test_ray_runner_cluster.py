"""A run on a cluster of several nodes, which come and go: no hang, nothing lost but the unfinished, nothing used twice.

The nodes are Ray's own (`ray.cluster_utils`): raylets on this machine, each with an object store and workers of its own.
"""

import contextlib
import importlib.util
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
from slow_envs import Simulator
from test_ray_runner import DQN, SMALL, Watch, last_metrics

import hurtle
from hurtle.errors import HurtleError, WorkerDiedError
from hurtle.runners.ray_answers import About

if importlib.util.find_spec("ray") is None or importlib.util.find_spec("psutil") is None:
    pytest.skip("needs Ray and psutil: pip install 'hurtle[ray]' psutil", allow_module_level=True)

pytestmark = pytest.mark.slow
MEMORY = 80_000_000
ROOT = Path(__file__).parents[2]


@pytest.fixture
def cluster():
    """A head without CPUs, where the learner is, and two nodes with two each."""
    global psutil, ray
    import psutil
    import ray
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "object_store_memory": MEMORY, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        made.add_node(num_cpus=2, object_store_memory=MEMORY)
    ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture
def received(monkeypatch):
    """The ids of all rollouts that came, as a list that grows."""
    from hurtle.runners.ray_collector import RayCollector

    ids, receive = [], RayCollector._receive

    def note(self, header, *rest):
        ids.extend(header.contents.ids)
        return receive(self, header, *rest)

    monkeypatch.setattr(RayCollector, "_receive", note)
    return ids


class Run(Watch):
    """Notes ids, and lets the run go on until it is told to stop."""

    def __init__(self):
        super().__init__()
        self.is_over = threading.Event()
        self.collector = None
        self.errands = queue.SimpleQueue()

    def __call__(self, trainer):
        super().__call__(trainer)
        self.collector = trainer._parts.collector
        with contextlib.suppress(queue.Empty):
            while True:
                errand, is_done = self.errands.get_nowait()
                errand()
                is_done.set()
        return not self.is_over.is_set()

    def add_node(self, cluster):
        """Add a node, from another thread: only the main one may start its processes."""
        is_done = threading.Event()
        self.errands.put((lambda: cluster.add_node(num_cpus=2, object_store_memory=MEMORY), is_done))
        assert is_done.wait(120)

    @property
    def collectors(self):
        return [actor.collector for actor in self.collector._actors]

    def check(self, received, per_update):
        """What came was used once, or waits for the learner."""
        used = self.used_once(per_update)
        waiting = [name for actor in self.collector._actors for slot in actor.full for name in slot.rollout.ids]
        assert len(set(received)) == len(received)
        assert sorted(used + waiting) == sorted(received)


def in_background(work, watch):
    """A thread that ends the run in the end; its error is raised by the function that is returned."""
    errors = []

    def run():
        try:
            work()
        except BaseException as error:
            errors.append(error)
        finally:
            watch.is_over.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def join():
        thread.join(60)
        assert not thread.is_alive()
        if errors:
            raise errors[0]

    return join


def wait_for(condition, seconds=120):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def settings(tmp_path, **more):
    return {**SMALL, "runs": str(tmp_path), "backend": "serial", "num_collectors": 4, "total_steps": 10**9, **more}


def test_a_node_leaves_and_another_comes(cluster, tmp_path, received, capfd):
    """With half of the collectors the run goes on, and they come back as soon as there is room for them."""
    watch = Run()

    def leave_and_come():
        wait_for(lambda: watch.collector and all(not collector.is_away for collector in watch.collectors))
        cluster.remove_node(cluster.list_all_nodes()[-1])
        wait_for(lambda: sum(not collector.is_away for collector in watch.collectors) == 2)
        updates = len(watch.ids)
        wait_for(lambda: len(watch.ids) > updates + 20)
        assert sum(not collector.is_away for collector in watch.collectors) == 2
        watch.add_node(cluster)
        wait_for(lambda: all(not collector.is_away for collector in watch.collectors))
        updates = len(watch.ids)
        wait_for(lambda: len(watch.ids) > updates + 5)

    join = in_background(leave_and_come, watch)
    run = hurtle.train(partial(Simulator, seconds=0.001), callbacks=watch, **settings(tmp_path))
    join()
    watch.check(received, 4)
    assert run.stopped_by == "callback"
    assert last_metrics(run)["collectors_lost"] == 2
    assert capfd.readouterr().err.count("It is replaced when there is room.") == 2


@pytest.mark.parametrize("algorithm", ["ppo", "dqn"])
@pytest.mark.parametrize("faults", [200])
def test_faults_at_random_moments(cluster, tmp_path, received, faults, algorithm):
    """Workers are killed, and nodes leave and come back, whatever they are doing."""
    if algorithm == "dqn":
        faults //= 10  # takes what it gets from the same collectors: what differs is the learner
    watch, dice = Run(), random.Random(faults)
    how = settings(tmp_path) if algorithm == "ppo" else {**DQN, **settings(tmp_path, num_steps=4)}
    how = {name: value for name, value in how.items() if algorithm == "ppo" or name not in ("minibatch_size", "num_epochs")}
    done = [0]

    def break_things():
        wait_for(lambda: watch.collector is not None)
        while done[0] < faults:
            time.sleep(dice.uniform(0, 5))
            wait_for(lambda: not all(collector.is_away for collector in watch.collectors))
            if dice.random() < 0.1:
                cluster.remove_node(dice.choice(cluster.list_all_nodes()[1:]))
                watch.add_node(cluster)
                done[0] += 1
                continue
            places = [about for collector in watch.collectors if isinstance(about := collector.about, About)]
            if places:
                with contextlib.suppress(ProcessLookupError):  # it may be gone already
                    os.kill(dice.choice(places).pid, signal.SIGKILL)
                done[0] += 1
        updates = len(watch.ids)
        wait_for(lambda: len(watch.ids) > updates + 5)

    join = in_background(break_things, watch)
    run = hurtle.train(partial(Simulator, seconds=0.001), callbacks=watch, **how)
    join()
    watch.check(received, 4)
    assert done[0] == faults
    assert run.stopped_by == "callback"
    assert last_metrics(run)["collectors_lost"] >= faults / 2  # some were shot at twice


def test_an_env_that_always_kills_its_process(cluster, tmp_path):
    """It is not replaced for ever: nothing was ever finished."""
    env = partial(Simulator, fails_at=12, fails_by="exit")
    with pytest.raises(
        WorkerDiedError, match=r"^\d+ collectors were lost, and none has finished a rollout since\. The last one:"
    ):
        hurtle.train(env, **settings(tmp_path, num_collectors=1))


def test_no_collector_is_left(cluster, tmp_path):
    """After the stated time the run ends with the reason and a checkpoint, from which it continues."""
    watch = Run()

    def leave():
        wait_for(lambda: len(watch.ids) > 3)
        for node in cluster.list_all_nodes()[1:]:
            cluster.remove_node(node)

    join = in_background(leave, watch)
    how = settings(tmp_path, collector_wait=3.0)
    with pytest.raises(
        WorkerDiedError, match=r"There has been no collector for 3 s .* Add machines(.|\n)*Last checkpoint"
    ) as caught:
        hurtle.train(Simulator, callbacks=watch, **how)
    join()
    assert "The last one: Collector" in str(caught.value)
    cluster.add_node(num_cpus=2, object_store_memory=MEMORY)
    (folder,) = tmp_path.iterdir()
    again = hurtle.train(resume=str(folder), total_steps=10**9, until=128 * 20, num_collectors=2, trust=True)
    assert again.steps >= 128 * 20


def test_lag_1_waits_for_the_collector_that_it_needs(cluster, tmp_path, received):
    watch = Run()

    def kill():
        wait_for(lambda: len(watch.ids) > 3)
        os.kill(watch.collectors[1].about.pid, signal.SIGKILL)
        wait_for(lambda: watch.collectors[1]._all_losses == 1 and not watch.collectors[1].is_away)
        updates = len(watch.ids)
        wait_for(lambda: len(watch.ids) > updates + 5)

    join = in_background(kill, watch)
    hurtle.train(partial(Simulator, seconds=0.001), callbacks=watch, **settings(tmp_path, lag="1", num_collectors=3))
    join()
    watch.check(received, 3)
    for ids in watch.ids:
        assert [name[0] for name in ids] == ["0", "1", "2"]


def run_of_its_own(code, **variables):
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests" / "runners")))
    environment = {**os.environ, "PYTHONPATH": paths, **variables}
    return subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


OWN = """
import sys
from functools import partial
import psutil
from slow_envs import Simulator
from test_ray_runner import SMALL
import hurtle

def look(trainer):
    if trainer.updates == 2:
        processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
        sockets = [found.laddr.ip for each in processes for found in each.net_connections("inet") if found.status == "LISTEN"]
        print(*sorted(set(sockets)), flush=True)
        print(*[each.pid for each in processes[1:]], flush=True)

how = {**SMALL, "runs": sys.argv[1], "total_steps": 10**9, "address": "local", "backend": "serial", "eval_episodes": 1}
run = hurtle.train(partial(Simulator, seconds=0.001), callbacks=look, **how)
import ray
print(run.stopped_by, ray.is_initialized(), flush=True)
"""


@pytest.mark.parametrize("ends_by", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_ray_of_the_runs_own(tmp_path, ends_by):
    """It listens on the loopback interface only, and is gone when the run has ended, however it ends; stops save."""
    import psutil

    with run_of_its_own(OWN.replace("sys.argv[1]", repr(str(tmp_path)))) as run:
        listening = run.stdout.readline().split()
        processes = [psutil.Process(int(pid)) for pid in run.stdout.readline().split()]
        assert processes, run.stderr.read()
        run.send_signal(getattr(signal, ends_by))
        said, errors = run.communicate(timeout=120)
    assert listening, errors
    assert {address.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}
    if ends_by != "SIGKILL":
        assert said.split() == ["Ctrl-C" if ends_by == "SIGINT" else "SIGTERM", "False"], errors
        assert list(tmp_path.glob("*/checkpoints/step-*.pt"))
    collectors = [each for each in processes if each.is_running() and "CollectorHost" in " ".join(cmdline_of(each))]
    psutil.wait_procs(collectors, timeout=30)
    assert not [each for each in collectors if each.is_running()]
    _, alive = psutil.wait_procs(processes, timeout=90)
    assert alive == []


def cmdline_of(process):
    import psutil

    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_a_file_that_only_the_learner_has(cluster, tmp_path):
    """Its text travels: a collector that comes after the file has gone makes the env all the same."""
    file = tmp_path / "only_here.py"
    file.write_text("from slow_envs import Simulator\n\n\nclass Here(Simulator):\n    pass\n")
    watch = Watch(until_back=True)

    def move(trainer):
        if trainer.updates == 2:
            file.rename(tmp_path / "away.py")
            os.kill(trainer._parts.collector._actors[0].collector.about.pid, signal.SIGKILL)
        return watch(trainer)

    run = hurtle.train(f"{file}:Here", callbacks=move, **settings(tmp_path / "runs", num_collectors=2))
    assert run.stopped_by == "callback"
    assert len(watch.places[0]) == 2


def test_addresses():
    with pytest.raises(HurtleError, match=r"No Ray cluster answers at '127\.0\.0\.1:1'"):
        hurtle.train("cartpole", **{**SMALL, "address": "127.0.0.1:1"})
    with pytest.raises(HurtleError, match="ray job submit"):
        hurtle.train("cartpole", **{**SMALL, "address": "ray://somewhere:10001"})
