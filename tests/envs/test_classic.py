"""The classic control envs do what Gymnasium's do: same transitions, spaces, time limits and env-checker verdicts."""

import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.classic_control import (
    AcrobotEnv,
    CartPoleEnv,
    Continuous_MountainCarEnv,
    MountainCarEnv,
    PendulumEnv,
)
from gymnasium.utils.env_checker import check_env

import hurtle

NUM_ENVS = 2048
PLAYED_STEPS = 4
CLASSES = {
    "cartpole": ("CartPole-v1", CartPoleEnv),
    "mountain_car": ("MountainCar-v0", MountainCarEnv),
    "mountain_car_continuous": ("MountainCarContinuous-v0", Continuous_MountainCarEnv),
    "acrobot": ("Acrobot-v1", AcrobotEnv),
    "pendulum": ("Pendulum-v1", PendulumEnv),
}
FIELDS = {
    "cartpole": ["x", "x_dot", "theta", "theta_dot"],
    "mountain_car": ["position", "velocity"],
    "mountain_car_continuous": ["position", "velocity"],
    "acrobot": ["theta_1", "theta_2", "speed_1", "speed_2"],
    "pendulum": ["theta", "theta_dot"],
}
# States are drawn from these ranges; they reach past walls, goals and the limits of angles and speeds where there are any.
RANGES = {
    "cartpole": [(-2.5, 2.5), (-4.0, 4.0), (-0.22, 0.22), (-4.0, 4.0)],
    "mountain_car": [(-1.2, 0.6), (-0.07, 0.07)],
    "mountain_car_continuous": [(-1.2, 0.6), (-0.07, 0.07)],
    "acrobot": [(-np.pi, np.pi), (-np.pi, np.pi), (-12.5, 12.5), (-28.2, 28.2)],
    "pendulum": [(-12.0, 12.0), (-8.0, 8.0)],
}
# Where float32 may fall on the other side of a threshold than Gymnasium's float64: distance from it that is left out.
MARGIN = 2e-5
TOLERANCE = {"cartpole": 1e-6, "mountain_car": 3e-7, "mountain_car_continuous": 3e-7, "pendulum": 1e-6}
HALF_ULP = 6e-8


def drawn_states(name, rng):
    """States over all the ranges; in a quarter of them each, one field is at or next to one of its ends."""
    low, high = np.array(RANGES[name]).T
    states = rng.uniform(low, high, (NUM_ENVS, len(low)))
    for k in range(len(low)):
        rows = rng.random(NUM_ENVS) < 0.25 / len(low)
        ends = np.where(rng.random(NUM_ENVS) < 0.5, low[k], high[k])
        states[rows, k] = (ends + rng.choice([0.0, 1e-3, -1e-3], NUM_ENVS) * (high[k] - low[k]))[rows].clip(low[k], high[k])
    return states.astype(np.float32)


def drawn_actions(vec, rng):
    space = vec.single_action_space
    if isinstance(space, gymnasium.spaces.Discrete):
        return rng.integers(space.n, size=NUM_ENVS)
    return rng.uniform(1.3 * space.low, 1.3 * space.high, (NUM_ENVS, *space.shape)).astype(np.float32)


def step_gymnasium(env, name, states, actions):
    """Next states (angles unwrapped as they come), observations, rewards and terminated, one transition at a time."""
    after, observations, rewards, terminated = [], [], [], []
    for state, action in zip(states.astype(np.float64), actions, strict=True):
        env.state = tuple(state) if name in ("cartpole", "mountain_car") else state
        if name == "cartpole":
            env.steps_beyond_terminated = None
        obs, reward, over, _, _ = env.step(action)
        after.append(env.state)
        observations.append(obs)
        rewards.append(reward)
        terminated.append(over)
    return (
        np.array(after, np.float64).reshape(states.shape),
        np.array(observations),
        np.array(rewards, np.float64),
        np.array(terminated),
    )


def near_threshold(name, after, states):
    """Transitions that end so close to a limit that float32 and float64 may judge them differently."""
    if name == "cartpole":
        return (abs(abs(after[:, 0]) - 2.4) < MARGIN) | (abs(abs(after[:, 2]) - 12 * np.pi / 180) < MARGIN)
    if name.startswith("mountain_car"):
        goal = 0.5 if name == "mountain_car" else 0.45
        return (abs(after[:, 0] - goal) < MARGIN) | ((after[:, 0] >= goal) & (abs(after[:, 1]) < MARGIN))
    if name == "acrobot":
        height = -np.cos(after[:, 0]) - np.cos(after[:, 0] + after[:, 1])
        return abs(height - 1.0) < 1e-3
    turns = (states[:, 0].astype(np.float64) + np.pi) / (2 * np.pi)  # the cost jumps where the angle wraps around
    return abs(turns - np.round(turns)) < MARGIN


def angle_difference(name, difference):
    if name == "acrobot":
        difference[:, :2] = (difference[:, :2] + np.pi) % (2 * np.pi) - np.pi
    return difference


def tolerance(name, env, states, actions, after, error):
    """How far a float32 step may be off, per transition.

    Acrobot near its speed limits is ill-conditioned: moving Gymnasium's own input by half a float32 ulp moves its result
    by up to 1e-4. So there the bound is a small multiple of that movement; elsewhere it is a constant. Where `error` is
    within the bound of no movement at all, the movement is not looked for: that takes eight steps.
    """
    if name != "acrobot":
        return np.full(len(states), TOLERANCE[name])
    moved, unsure = np.zeros(len(states)), error >= 16 * HALF_ULP
    states, actions, after = states[unsure].astype(np.float64), actions[unsure], after[unsure]
    for k in range(states.shape[1]):
        for sign in (1, -1):
            nudged = states.copy()
            nudged[:, k] *= 1 + sign * HALF_ULP
            shift = step_gymnasium(env, name, nudged, actions)[0] - after
            moved[unsure] = np.maximum(moved[unsure], (abs(angle_difference(name, shift)) / (1.0 + abs(after))).max(1))
    return 16 * (moved + HALF_ULP)


def compare(name, vec, env, states, actions):
    """One step from the same states on both sides; returns how many transitions were compared."""
    for k, field in enumerate(FIELDS[name]):
        vec.states[field][:] = states[:, k]
    obs, rewards, terminated, truncated, _ = vec.step(actions)
    got = np.stack([vec.states[field] for field in FIELDS[name]], axis=1).astype(np.float64)
    after, observations, expected_rewards, expected_terminated = step_gymnasium(env, name, states, actions)
    clear = ~near_threshold(name, after, states)
    assert clear.mean() > 0.98
    scale = 1.0 + abs(after)
    error = abs(angle_difference(name, got - after)) / scale
    obs_error = abs(obs - observations).max(1) / scale.max()
    allowed = tolerance(name, env, states, actions, after, np.maximum(error.max(1), obs_error))
    worst = (error.max(1) / allowed).argmax()
    assert error[worst].max() < allowed[worst], f"state {states[worst]}, action {actions[worst]}"
    assert (obs_error <= allowed).all()
    assert obs.dtype == observations.dtype
    np.testing.assert_array_equal(terminated[clear], expected_terminated[clear])
    np.testing.assert_allclose(rewards[clear], expected_rewards[clear], rtol=2e-6, atol=2e-5)
    assert not truncated.any()
    return int(clear.sum()), int(terminated.sum())


@pytest.mark.parametrize("name", CLASSES)
def test_transitions(name):
    rng = np.random.default_rng(0)
    env = CLASSES[name][1]()
    env.reset(seed=0)
    vec = hurtle.make_vec(name, NUM_ENVS, autoreset_mode="NextStep")
    compared, ended = 0, 0
    for seed in range(3):
        vec.reset(seed=seed)
        n, over = compare(name, vec, env, drawn_states(name, rng), drawn_actions(vec, rng))
        compared, ended = compared + n, ended + over
    # The same from play: each step's states as the envs themselves came to them.
    playing = hurtle.make_vec(name, NUM_ENVS)
    playing.reset(seed=7)
    for _ in range(PLAYED_STEPS):
        for _ in range(9):
            playing.step(drawn_actions(vec, rng))
        vec.reset(seed=0)
        states = np.stack([playing.states[field] for field in FIELDS[name]], axis=1)
        n, over = compare(name, vec, env, states, drawn_actions(vec, rng))
        compared, ended = compared + n, ended + over
    assert compared >= 10_000
    if name != "pendulum":
        assert ended > 10


@pytest.mark.parametrize("name", ["mountain_car", "mountain_car_continuous"])
def test_the_wall_stops_the_car(name):
    vec = hurtle.make_vec(name, 1, autoreset_mode="NextStep")
    vec.reset(seed=0)
    vec.states["position"][:] = -1.19
    vec.states["velocity"][:] = -0.07
    vec.step(np.zeros(vec.action_space.shape, vec.action_space.dtype))
    assert vec.states["position"][0] == np.float32(-1.2)
    assert vec.states["velocity"][0] == 0.0


@pytest.mark.parametrize("name", CLASSES)
def test_spaces_and_time_limit(name):
    env_id, original = CLASSES[name]
    env = hurtle.make(name)
    assert env.observation_space == original().observation_space
    assert env.action_space == original().action_space
    assert env.native_spec.max_steps == gymnasium.spec(env_id).max_episode_steps


@pytest.mark.parametrize("name", CLASSES)
def test_start_states_have_gymnasiums_distribution(name):
    original = CLASSES[name][1]()
    starts = np.array([original.reset(seed=seed)[0] for seed in range(500)], np.float64)
    ours, _ = hurtle.make_vec(name, 4000).reset(seed=0)
    for k in range(starts.shape[1]):
        assert abs(ours[:, k].mean() - starts[:, k].mean()) < 4.5 * starts[:, k].std() / np.sqrt(450) + 1e-7
        assert ours[:, k].std() == pytest.approx(starts[:, k].std(), rel=0.12, abs=1e-6)
        assert ours[:, k].min() >= starts[:, k].min() - 0.05 * np.ptp(starts[:, k]) - 1e-6
        assert ours[:, k].max() <= starts[:, k].max() + 0.05 * np.ptp(starts[:, k]) + 1e-6


def checker_warnings(env):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_env(env)
    return {str(warning.message) for warning in caught}


@pytest.mark.parametrize("name", CLASSES)
def test_the_env_checker_has_no_more_to_say_than_of_the_original(name):
    assert checker_warnings(hurtle.make(name)) <= checker_warnings(CLASSES[name][1]())
