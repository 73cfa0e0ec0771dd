"""Watching draws in the terminal or writes videos, and plays the same episodes as an evaluation."""

import io
import json
import os
import re
import signal

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from hand_made_runs import write_run
from rich.console import Console
from sample_envs import SNAKES

import hurtle
from hurtle.deploy.loading import load
from hurtle.envs.cartpole import CartPole
from hurtle.errors import DeviceError, HurtleError
from hurtle.runners.evaluate import evaluate_policy, evaluate_run
from hurtle.runners.playing import eval_seed
from hurtle.runners.watch import watch_run

imageio = pytest.importorskip("imageio.v2")


class Painted(gymnasium.Env):
    """A gray frame that gets brighter; three steps."""

    metadata = {"render_modes": ["human", "rgb_array"]}
    observation_space = spaces.Box(0, 1, (1,))
    action_space = spaces.Discrete(2)

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return np.ones(1, np.float32), {}

    def step(self, action):
        self.time += 1
        return np.ones(1, np.float32), 1.5, self.time == 3, False, {}

    def render(self):
        return np.full((30, 41), 60 * self.time, np.uint8)


class Unseen(Painted):
    metadata = {"render_modes": ["human"]}


def terminal(width=80, height=24):
    return Console(file=io.StringIO(), force_terminal=True, color_system="truecolor", width=width, height=height)


def shown(console):
    return console.file.getvalue()


def test_draws_in_the_terminal(tmp_path):
    path, _ = write_run(tmp_path, "cartpole", parameters={"max_steps": 5})
    console = terminal(60, 20)
    results = watch_run(path, episodes=2, fps=1000, console=console)
    assert results == [(5.0, 5), (5.0, 5)]
    text = shown(console)
    assert "▀" in text
    assert "\x1b[38;2;" in text  # 24-bit colours
    assert "episode 2  step 5  return 5" in text
    assert "episode 2: return 5 in 5 steps" in text
    assert text.count("▀\x1b[0m\n") > 10


def test_pictures_fit_into_the_terminal(tmp_path):
    path, _ = write_run(tmp_path, "cartpole", parameters={"max_steps": 5})
    console = terminal(30, 10)
    watch_run(path, fps=1000, console=console)
    lines = [line.count("▀") for line in shown(console).splitlines()]
    assert 15 <= max(lines) <= 30
    assert shown(console).count("…") == 0


def test_plays_what_an_evaluation_plays(tmp_path):
    path, policy = write_run(tmp_path, "cartpole")
    seen = watch_run(path, seed=3, console=Console(file=io.StringIO()))
    found = evaluate_policy(policy, "cartpole", episodes=1, seed=3)
    assert seen == [(found.returns[0], found.lengths[0])]
    sampled = watch_run(path, seed=3, sampled=True, console=Console(file=io.StringIO()))
    found = evaluate_policy(policy, "cartpole", episodes=1, seed=3, deterministic=False)
    assert sampled == [(found.returns[0], found.lengths[0])]


def test_parameters_of_the_run_stay_on_its_own_env(tmp_path):
    path, _ = write_run(tmp_path, "cartpole", parameters={"max_steps": 5})

    def length(**words):
        ((_, steps),) = watch_run(path, console=Console(file=io.StringIO()), **words)
        return steps

    assert length() == length(env="cartpole") == 5
    assert length(env_parameters={"max_steps": 3}) == 3
    assert length(env="CartPole-v1") > 5  # has no such parameter
    with pytest.raises(DeviceError):
        length(device="cuda:99")


def test_evaluations_take_the_same_parameters(tmp_path):
    path, _ = write_run(tmp_path, "cartpole", parameters={"max_steps": 5, "gravity": 1.6})
    assert evaluate_run(path, episodes=4, env="cartpole").lengths.max() == 5
    assert evaluate_run(path, episodes=4, env_parameters={"max_steps": 3}).lengths.max() == 3
    saved = json.loads((path / "evaluation.json").read_text())
    assert saved["env_parameters"] == {"max_steps": 3, "gravity": 1.6}
    assert evaluate_run(path, episodes=4, env="CartPole-v1").lengths.max() > 5


def test_without_a_terminal_only_results_are_printed(tmp_path):
    path, _ = write_run(tmp_path, "cartpole", parameters={"max_steps": 5})
    console = Console(file=io.StringIO())
    watch_run(path, episodes=2, fps=1, console=console)  # and does not wait for frames
    assert shown(console) == "episode 1: return 5 in 5 steps\nepisode 2: return 5 in 5 steps\n"


def test_text(tmp_path, monkeypatch):
    monkeypatch.setattr(CartPole, "render", lambda self, state: f"x is {state.x:.6f}")
    path, _ = write_run(tmp_path, "cartpole", parameters={"max_steps": 5})
    console = terminal()
    assert watch_run(path, fps=1000, console=console) == [(5.0, 5)]
    assert len(set(re.findall(r"x is -?0\.\d{6}", shown(console)))) == 6  # including the episode's last frame
    with pytest.raises(HurtleError, match="returns text"):
        watch_run(path, video=tmp_path / "told.gif", console=console)


def test_gymnasium_envs(tmp_path):
    path, _ = write_run(tmp_path, Painted)
    console = terminal()
    assert watch_run(path, fps=1000, env=Painted, console=console) == [(4.5, 3)]
    for grey in (0, 60, 120, 180):
        assert f"38;2;{grey};{grey};{grey}" in shown(console)
    with pytest.raises(HurtleError, match=r"offers the render modes \['human'\], but ansi or rgb_array is needed"):
        watch_run(path, env=Unseen, console=console)
    path, _ = write_run(tmp_path, "FrozenLake-v1")
    console = terminal()
    assert watch_run(path, fps=1000, console=console)[0][1] > 0
    assert "FHFH" in shown(console)  # ansi, if available


def test_several_agents(tmp_path):
    path, _ = write_run(tmp_path, "snake", parameters=SNAKES)
    (total, steps), (_, again) = watch_run(path, episodes=2, console=Console(file=io.StringIO()))
    assert (steps, again) == (SNAKES["max_steps"], SNAKES["max_steps"])
    policy, env, expected = load(path), hurtle.make("snake", **SNAKES), 0.0
    obs, info = env.reset(seed=eval_seed(0))
    for _ in range(SNAKES["max_steps"]):
        acting = info["agent_mask"]
        obs, rewards, _, _, info = env.step(policy.act(obs))
        expected += rewards[acting].sum() / SNAKES["num_agents"]
    assert total == pytest.approx(expected)


def test_an_episode_goes_on_when_an_agent_dies(tmp_path):
    path, _ = write_run(tmp_path, "snake", parameters=SNAKES)
    ((_, steps),) = watch_run(path, episodes=1, console=Console(file=io.StringIO()))
    assert steps == SNAKES["max_steps"]


@pytest.mark.parametrize("ending", ["gif", "mp4"])
def test_video(tmp_path, ending):
    path, _ = write_run(tmp_path, Painted)
    file = tmp_path / f"painted.{ending}"
    console = terminal()
    assert watch_run(path, episodes=2, video=file, fps=10, env=Painted, console=console) == [(4.5, 3)] * 2
    frames = imageio.mimread(file)
    assert len(frames) == 8
    assert frames[0].shape[:2] == (180, 246)  # enlarged six times
    for frame, grey in zip(frames, [0, 60, 120, 180] * 2, strict=True):
        assert abs(float(frame[..., :3].mean()) - grey) < 3
    assert f"wrote {file}" in shown(console).replace("\n", "")


def test_bad_videos(tmp_path):
    path, _ = write_run(tmp_path, "cartpole")
    with pytest.raises(HurtleError, match=r"'out.avi' must end in .mp4 or .gif"):
        watch_run(path, video="out.avi")
    with pytest.raises(HurtleError, match="there is no folder"):
        watch_run(path, video=tmp_path / "nowhere" / "out.gif")
    with pytest.raises(HurtleError, match="fps must be an int of at least 1"):
        watch_run(path, fps=0)


@pytest.mark.parametrize("ending", ["gif", "mp4"])
def test_an_interrupt_ends_it_cleanly(tmp_path, ending):
    path, _ = write_run(tmp_path, Painted)
    drawn = []

    class Interrupted(Painted):
        def render(self):
            drawn.append(self.time)
            if len(drawn) == 6:  # in the second episode
                os.kill(os.getpid(), signal.SIGINT)
            return super().render()

    console, file = Console(file=io.StringIO()), tmp_path / f"cut.{ending}"
    assert watch_run(path, episodes=50, video=file, fps=10, env=Interrupted, console=console) == [(4.5, 3)]
    assert "Stopped." in shown(console)
    assert drawn == [0, 1, 2, 3, 0, 1]
    assert len(imageio.mimread(file)) == 6


def test_another_env(tmp_path):
    path, _ = write_run(tmp_path, "cartpole")
    with pytest.raises(HurtleError, match="trained on another env"):
        watch_run(path, env="bandit")
