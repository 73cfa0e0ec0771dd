"""`show_last=True`: the env's own observation, and beside it the last action and reward, cleared with each episode."""

import pickle

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from sample_envs import SHORT_CARTPOLE

import hurtle
from hurtle.envs.registry import resolve
from hurtle.errors import HurtleError
from hurtle.native import check


def played(name, steps=40, **parameters):
    """Observations, actions, rewards and episode starts of three envs."""
    rng = np.random.default_rng(0)
    with hurtle.make_vec(name, num_envs=3, **parameters) as vec:
        obs, _ = vec.reset(seed=5)
        found, starts = [obs.copy()], [np.ones(3, bool)]
        actions, rewards = [], []
        for _ in range(steps):
            action = rng.integers(0, vec.single_action_space.n, 3)
            obs, reward, terminated, truncated, _ = vec.step(action)
            for part, new in zip((found, actions, rewards, starts), (obs, action, reward, terminated | truncated), strict=True):
                part.append(np.array(new))
    return np.stack(found), np.stack(actions), np.stack(rewards), np.stack(starts)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("cartpole", SHORT_CARTPOLE), ("CartPole-v1", {"max_episode_steps": 14, "backend": "serial"}), ("memory", {})],
)
def test_numbers_beside_numbers(name, parameters):
    plain, *same = played(name, **parameters)
    shown, actions, rewards, starts = played(name, show_last=True, **parameters)
    for own, other in zip((actions, rewards, starts), same, strict=True):
        np.testing.assert_array_equal(own, other)
    size, count = plain.shape[-1], 2
    np.testing.assert_array_equal(shown[..., :size], plain)
    assert starts[1:].any()
    for t in range(1, len(shown)):
        for n in range(3):
            wanted = np.zeros(count + 1)
            if not starts[t, n]:
                wanted[actions[t - 1, n]], wanted[-1] = 1, rewards[t - 1, n]
            np.testing.assert_array_equal(shown[t, n, size:], wanted)


def test_planes_behind_grids():
    plain, *_ = played("asterix", 60, debug=True)  # the same steps, and nothing to compile
    shown, actions, rewards, starts = played("asterix", 60, show_last=True)
    size = plain.shape[-1]
    np.testing.assert_array_equal(shown[..., :size], plain)
    for t in range(1, len(shown)):
        for n in range(3):
            wanted = np.zeros(shown.shape[-1] - size, np.uint8)
            if not starts[t, n]:
                wanted[actions[t - 1, n]], wanted[-1] = 1, rewards[t - 1, n] > 0
            assert (shown[t, n, :, :, size:] == wanted).all()


def test_the_final_observation_of_an_episode_shows_its_last_step():
    with hurtle.make_vec("cartpole", num_envs=1, show_last=True, **SHORT_CARTPOLE) as vec:
        vec.reset(seed=0)
        while True:
            obs, _, terminated, truncated, infos = vec.step(np.array([1]))
            if terminated[0] or truncated[0]:
                break
    assert infos["final_obs"][0][4:].tolist() == [0, 1, 1]
    assert obs[0, 4:].tolist() == [0, 0, 0]


def test_it_is_a_sound_env():
    assert len(check(type(resolve("cartpole", {"show_last": True}))).passed) == 5


def test_false_is_as_without_it():
    assert hurtle.make("cartpole", show_last=False).observation_space.shape == (4,)


def test_it_travels():
    env = pickle.loads(pickle.dumps(resolve("cartpole", {"show_last": True, "gravity": 3.0})))
    assert (env.observation_space.shape, env.gravity) == ((7,), 3.0)
    with hurtle.make_vec("CartPole-v1", num_envs=2, backend="process", num_workers=2, show_last=True) as vec:
        assert vec.reset(seed=0)[0].shape == (2, 7)


class Pictures(gymnasium.Env):
    observation_space = spaces.Dict({"x": spaces.Discrete(3)})
    action_space = spaces.Discrete(2)


@pytest.mark.parametrize("env", ["snake", "pendulum", "Pendulum-v1", Pictures, "pettingzoo/mpe/simple_spread_v3"])
def test_others_are_refused(env):
    with pytest.raises(HurtleError, match="show_last=True"):
        hurtle.make(env, show_last=True)


def test_runs_are_played_as_they_were_trained(tmp_path):
    run = hurtle.train(
        "memory", algorithm="r2d2", env_parameters={"show_last": True}, total_steps=320, num_steps=8, sequence_length=12,
        burn_in=2, learning_starts=200, eval_episodes=3, preset=False, progress="quiet", trackers=(), runs=str(tmp_path),
    )  # fmt: skip
    assert run.evaluation.episodes == 3
    obs = hurtle.make("memory", show_last=True).reset(seed=0)[0]
    assert int(hurtle.load(run).act(obs)) in (0, 1)
