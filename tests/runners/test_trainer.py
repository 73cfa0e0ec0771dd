"""The loop: runs, run folders, stopping, resuming, fine-tuning, bad input."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import tomllib
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from sample_envs import SHORT_PENDULUM, SNAKES
from torch import nn
from torch.distributions import Categorical
from vector_envs import Faulty

import hurtle
from hurtle.algorithms.ppo import PPO
from hurtle.cli import main
from hurtle.errors import CheckpointError, DeviceError, HurtleError, NonFiniteError, UnknownNameError
from hurtle.experiments.records import RunRecord
from hurtle.runners.assembly import run_seed
from hurtle.tracking.checkpoints import load_checkpoint

QUIET = {"progress": "quiet", "trackers": (), "eval_episodes": 5}
SMALL = {**QUIET, "preset": False, "num_envs": 4, "num_steps": 16, "minibatch_size": 32, "num_epochs": 2, "hidden_sizes": (16,)}


def final_weights(run):
    return load_checkpoint(max((run.path / "checkpoints").glob("step-*.pt")))["policy"]


def stop_after(updates):
    return lambda trainer: trainer.updates < updates


def metrics_of(run, without=("seconds", "steps_per_second")):
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    updates = [line for line in lines if "eval_return" not in line]
    return [{k: v for k, v in line.items() if k not in without and not k.startswith(("time", "threads"))} for line in updates]


@pytest.fixture
def small(tmp_path):
    return {**SMALL, "runs": str(tmp_path)}


def test_a_run_leaves_a_folder_that_explains_itself(small, with_curve):
    run = hurtle.train("cartpole", total_steps=640, **{**small, "trackers": ("tensorboard",)})
    assert (run.steps, run.stopped_by) == (640, "total_steps")
    assert run.evaluation is not None
    assert run.evaluation.episodes == 5
    files = {path.name for path in run.path.iterdir()}
    assert {"config.toml", "about.json", "metrics.jsonl", "summary.json", "README.md", "checkpoints", "curve.png"} <= files
    config = tomllib.loads((run.path / "config.toml").read_text())
    assert (config["env"], config["num_steps"], config["hidden_sizes"]) == ("cartpole", 16, [16])
    assert len(metrics_of(run)) >= 10  # one line per update
    assert json.loads((run.path / "summary.json").read_text())["steps"] == 640


def test_the_same_seed_gives_the_same_run_and_another_seed_another(small):
    first, again, other = (hurtle.train("cartpole", total_steps=256, seed=seed, **small) for seed in (1, 1, 2))
    one, two, three = final_weights(first), final_weights(again), final_weights(other)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not all(torch.equal(one[name], three[name]) for name in one)
    assert metrics_of(first) == metrics_of(again)


OPTIONS = {
    "plain": ("cartpole", {}),
    "annealed": ("cartpole", {"anneal_clip_range": True, "target_kl": 0.01, "optimizer": "adamw"}),
    "normalized": (
        "pendulum",
        {"normalize_observations": True, "reward_mode": "normalize", "env_parameters": SHORT_PENDULUM},
    ),
    "recurrent": ("memory", {"recurrent": "lstm"}),
    "agents": ("snake", {"minibatch_size": 64, "env_parameters": SNAKES}),
    "prioritized": ("cartpole", {"priority_alpha": 0.8, "minibatch_size": 32}),
    "a2c": ("cartpole", {"algorithm": "a2c"}),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case in ("annealed", "a2c"))) for case in OPTIONS]
)
def test_stopping_and_resuming_gives_bitwise_the_run_that_was_never_stopped(case, small):
    env, options = OPTIONS[case]
    settings = {**small, **options}
    if settings.get("algorithm") == "a2c":
        settings = {k: v for k, v in settings.items() if k not in ("minibatch_size", "num_epochs")}
    rows = hurtle.make_vec(env, num_envs=1, **options.get("env_parameters", {})).num_agents * 4
    total = 6 * 16 * rows
    whole = hurtle.train(env, total_steps=total, **settings)
    half = hurtle.train(env, total_steps=total, callbacks=[stop_after(3)], **settings)
    assert half.stopped_by == "callback"
    assert half.steps == total // 2 or case == "agents"  # steps of absent agents do not count
    resumed = hurtle.train(resume=half)
    assert resumed.path == half.path
    assert (resumed.steps, resumed.stopped_by) == (whole.steps, "total_steps")
    expected, found = final_weights(whole), final_weights(resumed)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert metrics_of(whole) == metrics_of(resumed)


def test_a_pause_changes_nothing_but_leaves_out_evaluation_and_curve(small):
    annealed = {**small, "anneal_learning_rate": True, "anneal_clip_range": True}
    whole = hurtle.train("cartpole", total_steps=640, **annealed)
    part = hurtle.train("cartpole", total_steps=640, until=200, **annealed)
    assert (part.steps, part.stopped_by, part.evaluation) == (256, "until", None)  # the rollout that reaches it is the last
    assert not (part.path / "curve.png").exists()
    assert RunRecord.read(part.path).state == "stopped"
    with pytest.raises(HurtleError, match="has 256 steps: until=256 must be more"):
        hurtle.train(resume=part, until=256)
    part = hurtle.train(resume=part, until=512)
    assert (part.steps, part.stopped_by) == (512, "until")
    done = hurtle.train(resume=part, until=10_000)
    assert (done.steps, done.stopped_by, done.evaluation is None) == (640, "total_steps", False)
    expected, found = final_weights(whole), final_weights(done)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert metrics_of(whole) == metrics_of(done)
    with pytest.raises(HurtleError, match="until must be a whole number of steps of at least 1, got 0"):
        hurtle.train("cartpole", until=0, **small)


def test_a_resumed_run_can_be_made_longer(small):
    run = hurtle.train("cartpole", total_steps=128, **small)
    longer = hurtle.train(resume=run, total_steps=256)
    assert (longer.steps, longer.path) == (256, run.path)
    assert tomllib.loads((run.path / "config.toml").read_text())["total_steps"] == 256


def test_python_envs_resume_with_new_episodes(small):
    run = hurtle.train("CartPole-v1", total_steps=128, backend="serial", **small)
    assert hurtle.train(resume=run, total_steps=256).steps == 256


def test_a_damaged_checkpoint_names_the_older_one(small, capsys):
    run = hurtle.train("cartpole", total_steps=640, checkpoint_every=128, **small)
    newest = max((run.path / "checkpoints").glob("step-*.pt"))
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"step-000000000512.pt"):
        hurtle.train(resume=newest)
    capsys.readouterr()
    assert hurtle.train(resume=run, total_steps=704).steps == 704  # a folder means its newest intact checkpoint
    assert f"{newest} is damaged" in capsys.readouterr().err


def test_a_checkpoint_of_another_policy_is_refused(small):
    run = hurtle.train("cartpole", total_steps=64, **small)
    with pytest.raises(CheckpointError, match=r"built differently.*\[16, 4\], expected \[32, 4\]"):
        hurtle.train(resume=run, total_steps=128, hidden_sizes=(32,))


def test_fine_tuning_begins_with_the_weights_and_a_new_optimizer(small):
    run = hurtle.train("cartpole", total_steps=256, **small)
    tuned = hurtle.train("cartpole", total_steps=64, learning_rate=1e-9, fine_tune=str(run.path), seed=5, **small)
    assert tuned.path != run.path
    before, after = final_weights(run), final_weights(tuned)
    assert all(torch.allclose(before[name], after[name], atol=1e-6) for name in before)


def test_stop_at_return_needs_a_full_window(small):
    run = hurtle.train("bandit", total_steps=100_000, stop_at_return=0.0, **small)
    assert run.stopped_by == "stop_at_return"
    assert run.steps < 5_000


def test_callbacks_see_the_run_and_all_are_called(small):
    seen = []
    hurtle.train(
        "cartpole",
        total_steps=10_000,
        callbacks=[lambda t: False, lambda t: seen.append((t.steps, t.metrics["entropy"]))],
        **small,
    )
    assert len(seen) == 1
    assert seen[0][0] == 64
    assert 0.5 < seen[0][1] <= np.log(2) + 1e-6


def test_a_rate_is_given_only_when_the_update_has_said_something(small, monkeypatch):
    update, said = PPO.update, [False, True, True]

    def updates_that_tell_late(self, *arguments):
        found = update(self, *arguments)
        return found if said.pop(0) else {}

    monkeypatch.setattr(PPO, "update", updates_that_tell_late)
    rates = []
    seen = [lambda t: rates.append(t.metrics["steps_per_second"])]
    hurtle.train("cartpole", gear="general", total_steps=192, callbacks=seen, **small)
    assert [rate > 0 for rate in rates] == [False, True, True]
    assert np.isnan(rates[0])


def test_evaluations_keep_the_best_policy(small):
    run = hurtle.train("cartpole", total_steps=256, eval_every=128, **small)
    best = load_checkpoint(run.path / "checkpoints" / "best.pt")
    assert best["progress"]["steps"] in (128, 256)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("env", ["cartpole", "CartPole-v1"])
def test_signals_save_and_return(env, number, small):
    def ask(trainer):
        if trainer.updates == 3:
            os.kill(os.getpid(), number)

    handler = signal.getsignal(number)
    backend = "auto" if env == "cartpole" else "serial"
    run = hurtle.train(env, total_steps=100_000_000, backend=backend, callbacks=[ask], **small)
    assert run.stopped_by == ("Ctrl-C" if number == signal.SIGINT else "SIGTERM")
    assert run.evaluation is None
    assert load_checkpoint(max((run.path / "checkpoints").glob("step-*.pt")))["progress"]["steps"] == run.steps
    assert signal.getsignal(number) is handler
    assert hurtle.train(resume=run, total_steps=run.steps + 64).steps >= run.steps + 64


class Net(nn.Module):
    def __init__(self, inputs=4, actions=2):
        super().__init__()
        self.body, self.actor, self.critic = nn.Linear(inputs, 8), nn.Linear(8, actions), nn.Linear(8, 1)

    def encode(self, obs):
        return self.body(obs).tanh()

    def decode(self, features):
        return Categorical(logits=self.actor(features)), self.critic(features)


def test_your_own_module_is_trained_in_place_and_must_be_given_again(small):
    net = Net()
    before = net.actor.weight.clone()
    run = hurtle.train("cartpole", policy=net, total_steps=128, **small)
    assert not torch.equal(net.actor.weight, before)
    with pytest.raises(HurtleError, match="policy=module"):
        hurtle.train(resume=run, total_steps=256)
    assert hurtle.train(resume=run, policy=Net(), total_steps=256).steps == 256


def test_a_class_of_your_own_is_called_with_the_spaces(small):
    class Made(Net):
        def __init__(self, observation_space, action_space):
            super().__init__(observation_space.shape[0], int(action_space.n))

    seen = []
    hurtle.train("cartpole", policy=Made, total_steps=64, callbacks=lambda t: seen.append(type(t.policy.network)), **small)
    assert seen == [Made]


def test_a_ready_vector_env_is_used_as_it_is(small):
    vec = gymnasium.make_vec("CartPole-v1", num_envs=4, vectorization_mode="sync")
    run = hurtle.train(vec, total_steps=128, **small)
    assert run.steps <= 128 + 64
    assert run.evaluation is None


def test_the_global_random_state_and_thread_count_are_left_alone(small):
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    threads = torch.get_num_threads()
    hurtle.train("cartpole", total_steps=64, **small)
    assert torch.equal(torch.rand(1), expected)
    assert torch.get_num_threads() == threads


# Bad input.


def test_minibatches_must_divide_the_batch(small):
    with pytest.raises(HurtleError, match=r"minibatch_size=48.*64 steps.*32 or 64"):
        hurtle.train("cartpole", total_steps=64, **{**small, "minibatch_size": 48})


def test_recurrent_minibatches_are_whole_segments(small):
    with pytest.raises(HurtleError, match="multiple of num_steps=16"):
        hurtle.train("cartpole", total_steps=64, recurrent="gru", **{**small, "minibatch_size": 8})


def test_unknown_words_and_envs_are_refused_with_a_suggestion(small):
    with pytest.raises(UnknownNameError, match="clip_range"):
        hurtle.train("cartpole", clip_rang=0.1, **small)
    with pytest.raises(UnknownNameError, match="cartpole"):
        hurtle.train("cartpol", **small)
    assert not list(os.scandir(small["runs"])), "nothing is left behind"


def test_a_gpu_that_is_not_there(small):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(DeviceError, match=r"no GPU.*device='cpu'"):
        hurtle.train("cartpole", device="cuda", **small)


@pytest.mark.parametrize(("env", "distribution"), [("cartpole", "gaussian"), ("cartpole", "beta")])
def test_continuous_distributions_for_discrete_actions_are_refused(env, distribution, small):
    with pytest.raises(HurtleError, match="Discrete"):
        hurtle.train(env, distribution=distribution, **small)


class PoisonedPython(gymnasium.Env):
    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, what="reward"):
        self.what = what

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.count += 1
        bad = self.count == 100
        obs = np.full(1, np.nan if bad and self.what == "obs" else 0.0, np.float32)
        return obs, (np.nan if bad and self.what == "reward" else 1.0), False, False, {}


@pytest.mark.parametrize("what", ["reward", "obs"])
def test_nan_stops_the_run_and_names_env_step_and_checkpoint(what, small):
    with pytest.raises(NonFiniteError, match=r"env 0 at its step 100.*Last checkpoint: .*step-0000000003\d\d.pt") as caught:
        hurtle.train(lambda: PoisonedPython(what), total_steps=100_000, backend="serial", checkpoint_every=64, **small)
    assert ("reward" if what == "reward" else "observation") in str(caught.value)
    (run,) = os.scandir(small["runs"])
    newest = max(p.path for p in os.scandir(f"{run.path}/checkpoints"))
    assert all(torch.isfinite(value).all() for value in load_checkpoint(newest)["policy"].values())


def test_a_disk_that_is_full_for_a_while_does_not_end_the_run(small, monkeypatch, capsys):
    from hurtle.tracking import checkpoints

    real, calls = checkpoints.save_checkpoint, []

    def sometimes(path, state):
        calls.append(path)
        if len(calls) == 2:
            raise CheckpointError(f"The checkpoint {path} could not be written: No space left on device.")
        real(path, state)

    monkeypatch.setattr(checkpoints, "save_checkpoint", sometimes)
    run = hurtle.train("cartpole", total_steps=256, checkpoint_every=64, **small)
    assert run.steps == 256
    assert len(list((run.path / "checkpoints").glob("step-*.pt"))) == 3
    assert "No space left" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_stays_under_a_gigabyte(small):
    code = (
        "import hurtle, pathlib\n"
        f"hurtle.train('cartpole', total_steps=20_000, progress='quiet', trackers=(), runs={small['runs']!r})\n"
        "print(pathlib.Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout.split()[-1]) < 1_000_000  # peak KB of this process


class Chat(gymnasium.Env):
    """Structured on both sides: the reward is for answering with the number that is shown."""

    observation_space = spaces.Dict({"shown": spaces.Discrete(3), "noise": spaces.Box(-1, 1, (2,), np.float32)})
    action_space = spaces.Dict({"answer": spaces.Discrete(3), "tone": spaces.Discrete(2)})

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self._observe(), {}

    def step(self, action):
        reward = float(action["answer"] == self.shown)
        self.steps += 1
        return self._observe(), reward, False, self.steps == 8, {}

    def _observe(self):
        self.shown = int(self.np_random.integers(3))
        return {"shown": self.shown, "noise": self.np_random.uniform(-1, 1, 2).astype(np.float32)}


@pytest.mark.parametrize("emulated", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_structured_envs_are_emulated_and_learn(emulated, small):
    make = (lambda: hurtle.emulate(Chat())) if emulated else Chat
    settings = {**small, "num_envs": 8, "num_steps": 32, "minibatch_size": 64, "num_epochs": 4, "learning_rate": 1e-2}
    run = hurtle.train(make, total_steps=2_000, backend="serial", **settings)
    assert run.evaluation.mean > 7  # a random policy gets 8/3
    policy = hurtle.load(run)
    for shown in range(3):
        assert policy.act({"shown": shown, "noise": np.zeros(2, np.float32)})["answer"] == shown


def test_a_pool_trains_through_the_same_words_and_resumes(small):
    settings = {**small, "pool_batch_size": 2, "backend": "serial"}
    run = hurtle.train("CartPole-v1", total_steps=256, **settings)
    assert run.steps == 256
    assert hurtle.train(resume=run, total_steps=512).steps == 512


def test_a_dead_worker_is_replaced_if_asked(small, tmp_path):
    once = tmp_path / "died"
    mortal = partial(Faulty, "exit", at=2, seeds=(run_seed(4) + 1,), once=str(once))  # from a module without torch: starts fast
    settings = {**small, "backend": "process", "num_workers": 2, "restart_workers": True, "eval_episodes": 1}
    run = hurtle.train(mortal, total_steps=256, seed=4, **settings)
    assert once.exists()
    assert run.steps >= 256
    assert run.evaluation is not None


# Errors during a run.


def test_a_finished_run_asks_for_more_steps(small):
    run = hurtle.train("cartpole", total_steps=64, **small)
    with pytest.raises(HurtleError, match="is done after 64 steps"):
        hurtle.train(resume=run)


def test_resuming_a_fine_tuned_run_needs_its_source_no_more(small):
    source = hurtle.train("cartpole", total_steps=64, **small)
    tuned = hurtle.train("cartpole", total_steps=64, fine_tune=str(source.path), **small)
    shutil.rmtree(source.path)
    assert hurtle.train(resume=tuned, total_steps=128).steps == 128


def test_resuming_with_another_optimizer_is_refused(small):
    run = hurtle.train("cartpole", total_steps=64, **small)
    with pytest.raises(HurtleError, match=r"optimizer='adam', .*'rmsprop'"):
        hurtle.train(resume=run, total_steps=128, optimizer="rmsprop")


def test_a_checkpoint_outside_a_run_folder_is_not_resumed(small, tmp_path):
    run = hurtle.train("cartpole", total_steps=64, **small)
    elsewhere = tmp_path / "some" / "folder" / "my.pt"
    elsewhere.parent.mkdir(parents=True)
    shutil.copy(max((run.path / "checkpoints").glob("step-*.pt")), elsewhere)
    with pytest.raises(HurtleError, match="not in a run folder"):
        hurtle.train(resume=elsewhere, total_steps=128)
    assert sorted(path.name for path in (tmp_path / "some").iterdir()) == ["folder"]


def test_a_run_whose_policy_cannot_be_evaluated_is_kept(small, monkeypatch, capsys):
    def fails(*args, **kwargs):
        raise HurtleError("an episode took more than 100,000 steps")

    monkeypatch.setattr("hurtle.runners.trainer.evaluate_trained", fails)
    run = hurtle.train("cartpole", total_steps=64, **small)
    assert run.evaluation is None
    assert (run.path / "summary.json").exists()
    assert "no evaluation: an episode took more" in capsys.readouterr().err


def test_a_best_checkpoint_that_cannot_be_written_is_a_warning(small, monkeypatch, capsys):
    from hurtle.tracking import checkpoints

    real = checkpoints.save_checkpoint

    def full(path, state):
        if path.name == "best.pt":
            raise CheckpointError("No space left on device.")
        real(path, state)

    monkeypatch.setattr(checkpoints, "save_checkpoint", full)
    assert hurtle.train("cartpole", total_steps=128, eval_every=64, **small).steps == 128
    assert "No space left" in capsys.readouterr().err


def test_what_was_learned_is_saved_when_a_callback_raises_and_nothing_stays_open(small):
    def breaks(trainer):
        if trainer.updates == 3:
            raise RuntimeError("mine")

    before = set(threading.enumerate())
    with pytest.raises(RuntimeError, match="mine"):
        hurtle.train("cartpole", total_steps=640, callbacks=[breaks], **{**small, "trackers": ("tensorboard",)})
    (run,) = os.scandir(small["runs"])
    assert load_checkpoint(f"{run.path}/checkpoints/step-000000000192.pt")["progress"]["updates"] == 3
    assert not set(threading.enumerate()) - before


def test_files_of_envs_and_policies_are_found_from_another_folder(small, tmp_path, monkeypatch):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "my_env.py").write_text("from hurtle.envs.cartpole import CartPole as MyEnv\n")  # compiled already
    monkeypatch.chdir(folder)
    run = hurtle.train("my_env.py:MyEnv", total_steps=64, gear="general", **small)
    monkeypatch.chdir(tmp_path)
    assert hurtle.train(resume=run, total_steps=128).steps == 128


def test_a_vector_that_was_emulated_already_gets_a_structured_policy(small):
    vec = hurtle.make_vec(Chat, 4, backend="serial", emulate=True)
    seen = []
    hurtle.train(vec, total_steps=64, callbacks=[lambda trainer: seen.append(type(trainer.policy.network).__name__)], **small)
    assert seen == ["Structured"]
    vec.reset()  # still open
    vec.close()


def test_a_tracker_that_is_not_installed_leaves_no_folder(small, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(HurtleError, match="wandb"):
        hurtle.train("cartpole", total_steps=64, **{**small, "trackers": ("wandb",)})
    assert not list(os.scandir(small["runs"]))


OWN_ENV = """
import gymnasium
import numpy as np


class Tiny(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, length=5):
        self.length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.time += 1
        return np.zeros(2, np.float32), float(action), self.time >= self.length, False, {}
"""


def test_a_class_of_a_file_is_recorded_by_its_name(small, tmp_path, monkeypatch, capsys):
    (tmp_path / "own_env_of_test.py").write_text(OWN_ENV)
    monkeypatch.syspath_prepend(tmp_path)
    from own_env_of_test import Tiny

    shown = {**small, "progress": "plain", "backend": "serial"}
    run = hurtle.train(Tiny, total_steps=128, env_parameters={"length": 3}, **shown)
    name = f"{tmp_path.resolve()}/own_env_of_test.py:Tiny"
    assert tomllib.loads((run.path / "config.toml").read_text())["env"] == name
    assert run.path.name.startswith("Tiny-ppo-0-")
    out = capsys.readouterr().out
    assert f"next        hurtle watch {run.path}\n            hurtle eval {run.path}\n" in out
    assert main(["eval", str(run.path), "--episodes", "4"]) == 0
    assert "(4 deterministic episodes)" in capsys.readouterr().out
    assert hurtle.train(resume=run, total_steps=192).steps == 192


def test_a_run_says_why_the_command_line_cannot_play_it(small, capsys):
    class Local(gymnasium.make("CartPole-v1").unwrapped.__class__):
        pass

    run = hurtle.train(Local, total_steps=64, **{**small, "progress": "plain", "backend": "serial"})
    out = capsys.readouterr().out
    assert "next        hurtle watch and eval cannot play it: the env has no name: " in out
    assert "Local is not at the top level of a file, so it cannot be imported. In Python, hurtle.load(run) can" in out
    assert main(["eval", str(run.path)]) == 2
    assert "an object without a name" in capsys.readouterr().err
