"""The sanity suite: memory, stochastic, password, bandit, squared.

Scripted policies must reach the returns that the classes promise; plain re-implementations must agree step by step.
"""

import itertools
import math
from functools import cache

import numpy as np
import pytest

import hurtle
from hurtle.envs.bandit import Bandit
from hurtle.envs.memory import Memory
from hurtle.envs.password import Password
from hurtle.envs.squared import MOVE_X, MOVE_Y, Squared
from hurtle.envs.stochastic import Stochastic
from hurtle.errors import EnvDefinitionError

NAMES = {"memory": Memory, "stochastic": Stochastic, "password": Password, "bandit": Bandit, "squared": Squared}


def first_returns(name, policy, num_envs, seed=0, **parameters):
    """Returns of the first episode of each env, played by `policy(obs, time)`; taking more would favour short ones."""
    vec = hurtle.make_vec(name, num_envs=num_envs, **parameters)
    obs, _ = vec.reset(seed=seed)
    returns, done = np.zeros(num_envs), np.zeros(num_envs, bool)
    for time in itertools.count():
        obs, rewards, terminated, truncated, _ = vec.step(policy(obs, time))
        returns += np.where(done, 0.0, rewards)
        done |= terminated | truncated
        if done.all():
            vec.close()
            return returns


def assert_mean(samples, expected):
    """The mean of the samples is within four standard errors of the expected value."""
    error = max(4.0 * samples.std() / math.sqrt(len(samples)), 1e-5)
    assert abs(samples.mean() - expected) < error, f"{samples.mean():.4f}, expected {expected:.4f} within {error:.4f}"


def uniform_policy(num_actions, seed=1):
    rng = np.random.default_rng(seed)
    return lambda obs, time: rng.integers(num_actions, size=len(obs))


def constant_policy(action):
    return lambda obs, time: np.full(len(obs), action)


def coin_policy(q, seed=1):
    """Action 0 with probability q, else 1."""
    rng = np.random.default_rng(seed)
    return lambda obs, time: (rng.random(len(obs)) >= q).astype(int)


def reciter(mem_length, mem_delay):
    """The optimal policy for memory: keep the tokens, play them back when asked."""
    tokens = []

    def policy(obs, time):
        if time < mem_length:
            tokens.append((obs[:, 0] > 0).astype(int))
        return tokens[max(time - mem_length - mem_delay, 0)]

    return policy


def move_towards(dx, dy):
    """The king's move in the direction of a displacement."""
    moves = {move: action for action, move in enumerate(zip(MOVE_X, MOVE_Y, strict=True))}
    return moves[int(np.sign(dx)), int(np.sign(dy))]


def seeker(obs, time):
    """An optimal policy for squared: walk to any nearest target, by the observation alone."""
    actions = np.zeros(len(obs), int)
    for i, grid in enumerate(obs):
        (y,), (x,) = np.nonzero(grid[..., 0])
        targets = np.argwhere(grid[..., 1])
        target_y, target_x = targets[np.abs(targets - (y, x)).max(1).argmin()]
        actions[i] = move_towards(target_x - x, target_y - y)
    return actions


# All of them ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("memory", {}),
        pytest.param("memory", {"mem_length": 1, "mem_delay": 0}, marks=pytest.mark.slow),
        ("stochastic", {}),
        pytest.param("stochastic", {"p": 0.3, "horizon": 2}, marks=pytest.mark.slow),
        ("password", {}),
        pytest.param("password", {"length": 32}, marks=pytest.mark.slow),
        ("bandit", {}),
        pytest.param("bandit", {"num_actions": 10, "reward_scale": 100.0, "reward_noise": 0.0}, marks=pytest.mark.slow),
        ("squared", {}),
        pytest.param("squared", {"distance": 1, "num_targets": 8, "slip_prob": 0.5}, marks=pytest.mark.slow),
        pytest.param(
            "squared", {"distance": 5, "num_targets": 1, "hide_targets": True, "sparse_reward": True}, marks=pytest.mark.slow
        ),
    ],
)
def test_random_play_keeps_to_the_spaces_and_counts_episodes(name, parameters):
    num_envs = 64
    env = NAMES[name](**parameters)
    vec = hurtle.make_vec(name, num_envs=num_envs, **parameters)
    obs, _ = vec.reset(seed=3)
    policy = uniform_policy(env.action_space.n)
    returns, lengths = np.zeros(num_envs), np.zeros(num_envs, int)
    ended = 0
    for time in range(100):
        assert obs.dtype == env.observation_space.dtype
        assert obs.shape == (num_envs, *env.observation_space.shape)
        assert (obs >= env.observation_space.low).all()
        assert (obs <= env.observation_space.high).all()
        obs, rewards, terminated, truncated, infos = vec.step(policy(obs, time))
        returns += rewards
        lengths += 1
        done = terminated | truncated
        if done.any():
            ended += done.sum()
            np.testing.assert_array_equal(infos["_episode"], done)
            np.testing.assert_allclose(infos["episode"]["r"][done], returns[done], rtol=1e-4, atol=1e-5)
            np.testing.assert_array_equal(infos["episode"]["l"][done], lengths[done])
        returns[done], lengths[done] = 0.0, 0
    assert ended >= num_envs
    vec.close()


@pytest.mark.parametrize("name", NAMES)
def test_render_draws_an_image(name):
    env = hurtle.make(name, render_mode="rgb_array", debug=True)
    env.reset(seed=0)
    env.step(0)
    image = env.render()
    assert image.dtype == np.uint8
    assert image.ndim == 3
    assert image.shape[2] == 3
    assert len(np.unique(image)) > 1
    env.close()


@pytest.mark.parametrize(
    ("env", "parameters"),
    [
        (Stochastic, {"p": 0.0}),
        (Stochastic, {"p": 1.0}),
        (Stochastic, {"horizon": 1}),
        (Password, {"length": 0}),
        (Password, {"length": 33}),
        (Squared, {"num_targets": 0}),
        (Squared, {"num_targets": 9, "distance": 1}),
    ],
)
def test_impossible_parameters_are_refused(env, parameters):
    with pytest.raises(EnvDefinitionError, match=next(iter(parameters))):
        env(**parameters)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("memory", {}),
        pytest.param("memory", {"mem_length": 1, "mem_delay": 0}, marks=pytest.mark.slow),
        ("stochastic", {}),
        pytest.param("stochastic", {"p": 0.3, "horizon": 2}, marks=pytest.mark.slow),
        ("password", {}),
        ("bandit", {}),
        pytest.param("bandit", {"num_actions": 10, "reward_scale": 100.0, "reward_noise": 0.0}, marks=pytest.mark.slow),
        ("squared", {}),
    ],
)
def test_random_return(name, parameters):
    env = NAMES[name](**parameters)
    returns = first_returns(name, uniform_policy(env.action_space.n), 16384, **parameters)
    assert_mean(returns, env.random_return)


# Memory --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mem_length", "mem_delay"), [(2, 2), *(pytest.param(*other, marks=pytest.mark.slow) for other in ((1, 0), (7, 5)))]
)
def test_memory_is_solved_by_reciting(mem_length, mem_delay):
    returns = first_returns("memory", reciter(mem_length, mem_delay), 512, mem_length=mem_length, mem_delay=mem_delay)
    np.testing.assert_allclose(returns, Memory.best_return, rtol=1e-5)


@pytest.mark.parametrize("action", [0, 1])
def test_memory_pays_half_without_memory(action):
    assert_mean(first_returns("memory", constant_policy(action), 16384), 0.5)


def test_memory_shows_each_token_once_and_nothing_of_it_later():
    vec = hurtle.make_vec("memory", num_envs=256, mem_length=7, mem_delay=5, debug=True)
    obs, _ = vec.reset(seed=0)
    tokens = vec.states["tokens"].copy()
    for time in range(19):
        if time < 7:
            np.testing.assert_array_equal(obs[:, 0], 2.0 * tokens[:, time] - 1.0)
        else:
            assert not obs[:, 0].any()
        assert (obs[:, 1] == (time >= 12)).all()
        obs, rewards, terminated, _, _ = vec.step(np.ones(256, int))
        expected = tokens[:, time - 12] / 7.0 if time >= 12 else np.zeros(256)
        np.testing.assert_allclose(rewards, expected, rtol=1e-6)
        assert (terminated == (time == 18)).all()
    # The first three tokens come up in all eight combinations, about equally often.
    counts = np.bincount(tokens[:, :3] @ (4, 2, 1), minlength=8)
    assert ((counts - 32.0) ** 2 / 32.0).sum() < 24.3  # chi-square, 7 degrees of freedom, p = 0.001
    vec.close()


# Stochastic ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("p", "horizon"), [(0.75, 32), pytest.param(0.3, 2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("q", [0.0, 0.2, 0.3, 0.5, 0.75, 0.9, 1.0])
def test_stochastic_pays_for_the_distribution_whatever_the_horizon(p, horizon, q):
    returns = first_returns("stochastic", coin_policy(q), 8192, p=p, horizon=horizon)
    assert_mean(returns, 1.0 - ((q - p) / min(p, 1.0 - p)) ** 2)


def test_stochastic_best_and_deterministic_returns():
    env = Stochastic()
    assert_mean(first_returns("stochastic", coin_policy(env.p), 16384), env.best_return)
    always = [first_returns("stochastic", constant_policy(action), 4).max() for action in (0, 1)]
    assert max(always) == pytest.approx(env.deterministic_return, abs=1e-5)
    assert always[1] == pytest.approx(1.0 - 3.0**2, abs=1e-4)


def test_stochastic_pays_a_clocked_policy_only_a_little_more():
    env = Stochastic()
    clocked = first_returns("stochastic", lambda obs, time: np.full(len(obs), int(time >= env.p * env.horizon)), 4)
    assert 1.0 < clocked.max() < 1.1


# Password ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [5, pytest.param(10, marks=pytest.mark.slow)])
def test_password_is_one_string_and_the_same_everywhere(length):
    guesses = np.array(list(itertools.product((0, 1), repeat=length)))
    returns = first_returns("password", lambda obs, time: guesses[:, time], len(guesses), seed=5, length=length)
    assert sorted(set(returns)) == [0.0, Password.best_return]
    assert guesses[returns > 0].tolist() == [Password.DIGITS[:length].tolist()]


def test_password_digits_are_those_of_e():
    assert "".join(map(str, Password.DIGITS)) == f"{int(math.e % 1.0 * 2**32):032b}"


def test_password_shows_the_guesses_so_far():
    vec = hurtle.make_vec("password", num_envs=16)
    obs, _ = vec.reset(seed=0)
    rng = np.random.default_rng(0)
    expected = np.zeros((16, 5))
    for time in range(4):
        guess = rng.integers(2, size=16)
        obs, rewards, terminated, _, _ = vec.step(guess)
        expected[:, time] = 2 * guess - 1
        np.testing.assert_array_equal(obs, expected)
        assert not rewards.any()
        assert not terminated.any()
    obs, _, terminated, _, infos = vec.step(np.zeros(16, int))
    assert terminated.all()
    assert not obs.any()
    expected[:, 4] = -1
    np.testing.assert_array_equal(np.stack(infos["final_obs"]), expected)
    vec.close()


# Bandit --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scale", "noise"), [(1.0, 1.0), pytest.param(100.0, 0.1, marks=pytest.mark.slow)])
def test_bandit_arms(scale, noise):
    env = Bandit(reward_scale=scale, reward_noise=noise)
    for arm in range(env.num_actions):
        returns = first_returns("bandit", constant_policy(arm), 16384, arm, reward_scale=scale, reward_noise=noise)
        assert_mean(returns, env.best_return if arm == env.num_actions - 1 else 0.0)
        assert returns.std() == pytest.approx(noise * scale, rel=0.03, abs=1e-6)


# Squared -------------------------------------------------------------------------------------------------------------


class PlainSquared:
    """The rules of squared without slips, over (x, y) pairs and sets."""

    def __init__(self, env):
        self.env = env

    def closeness(self, agent, targets):
        return max(1.0 - max(abs(agent[0] - x), abs(agent[1] - y)) / self.env.distance for x, y in targets)

    def step(self, agent, targets, action):
        """(agent, targets) after the move, and the reward."""
        edge = self.env.distance
        moved = tuple(
            int(np.clip(at + by, -edge, edge)) for at, by in zip(agent, (MOVE_X[action], MOVE_Y[action]), strict=True)
        )
        gain = self.closeness(moved, targets) - self.closeness(agent, targets)
        hit = moved in targets
        if hit:
            targets, moved = targets - {moved}, (0, 0)
        return moved, targets, (float(hit) if self.env.sparse_reward else gain) / self.env.num_targets

    def best_return(self, targets):
        """The optimal expected return from the start, by going through all there is."""

        @cache
        def value(agent, targets, steps_left):
            if not targets or steps_left == 0:
                return 0.0
            stay = value(agent, targets, steps_left - 1)
            best = -math.inf
            for action in range(8):
                moved, remaining, reward = self.step(agent, targets, action)
                best = max(best, reward + value(moved, remaining, steps_left - 1))
            return (1.0 - self.env.slip_prob) * best + self.env.slip_prob * stay

        return value((0, 0), frozenset(targets), self.env.max_steps)


def squared_situation(state):
    targets = zip(state["target_x"].tolist(), state["target_y"].tolist(), strict=True)
    return (int(state["x"]), int(state["y"])), frozenset(itertools.islice(targets, int(state["remaining"])))


@pytest.mark.parametrize(
    ("parameters", "debug"),
    [
        ({}, False),
        pytest.param({"distance": 1, "num_targets": 1}, False, marks=pytest.mark.slow),
        pytest.param({"distance": 2, "num_targets": 16, "sparse_reward": True}, False, marks=pytest.mark.slow),
        ({"distance": 2, "num_targets": 16, "sparse_reward": True}, True),  # uncompiled: sooner done than compiled
    ],
)
def test_squared_agrees_with_the_plain_rules(parameters, debug):
    env = Squared(**parameters)
    plain = PlainSquared(env)
    num_envs = 6 if debug else 24
    vec = hurtle.make_vec("squared", num_envs, debug=debug, **parameters)
    obs, _ = vec.reset(seed=0)
    rng = np.random.default_rng(0)
    for time in range(64):
        before = [squared_situation(state) for state in vec.states]
        for grid, (agent, targets) in zip(obs, before, strict=True):
            expected = np.zeros(env.observation_space.shape)
            for x, y in targets:
                expected[y + env.distance, x + env.distance, 1] = 1
            expected[agent[1] + env.distance, agent[0] + env.distance, 0] = 1
            np.testing.assert_array_equal(grid, expected)
        # Half of the envs play well, to see the later targets too.
        actions = np.where(np.arange(num_envs) % 2, rng.integers(8, size=num_envs), seeker(obs, time))
        obs, rewards, terminated, truncated, _ = vec.step(actions)
        for i, (agent, targets) in enumerate(before):
            agent, targets, reward = plain.step(agent, targets, actions[i])
            assert rewards[i] == pytest.approx(reward, abs=1e-6)
            assert terminated[i] == (not targets)
            if not (terminated[i] or truncated[i]):
                assert squared_situation(vec.states[i]) == (agent, targets)
    vec.close()


@pytest.mark.parametrize("slip_prob", [0.0, 0.3])
@pytest.mark.parametrize("sparse_reward", [False, True])
@pytest.mark.parametrize("targets", [[(2, 1)], [(-2, -2), (0, 2)], [(2, 0), (2, 1), (-1, -2)]])
def test_squared_best_return_is_the_optimum(targets, sparse_reward, slip_prob):
    env = Squared(distance=2, num_targets=len(targets), sparse_reward=sparse_reward, slip_prob=slip_prob)
    assert PlainSquared(env).best_return(targets) == pytest.approx(env.best_return)


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        pytest.param({"slip_prob": 0.2}, marks=pytest.mark.slow),
        pytest.param({"slip_prob": 0.2, "sparse_reward": True}, marks=pytest.mark.slow),
        pytest.param({"distance": 2, "num_targets": 16, "sparse_reward": True}, marks=pytest.mark.slow),
    ],
)
def test_squared_is_solved_by_walking_to_the_nearest_target(parameters):
    returns = first_returns("squared", seeker, 256, **parameters)
    assert_mean(returns, Squared(**parameters).best_return)


def test_squared_shows_hidden_targets_once():
    vec = hurtle.make_vec("squared", num_envs=8, hide_targets=True, debug=True)
    obs, _ = vec.reset(seed=0)
    assert (obs[..., 1].sum((1, 2)) == 4).all()
    for _ in range(2):
        obs, *_ = vec.step(np.zeros(8, int))
        assert not obs[..., 1].any()
        assert (obs[..., 0].sum((1, 2)) == 1).all()
    vec.close()


def test_squared_puts_targets_on_the_edge_evenly():
    vec = hurtle.make_vec("squared", num_envs=6000)
    obs, _ = vec.reset(seed=0)
    targets = obs[..., 1]
    assert (targets.sum((1, 2)) == 4).all()
    counts = targets.sum(0, dtype=int)
    assert not counts[1:-1, 1:-1].any()
    edge = counts[counts > 0]
    assert len(edge) == 24
    assert ((edge - 1000.0) ** 2 / 1000.0).sum() < 49.7  # chi-square, 23 degrees of freedom, p = 0.001
    vec.close()
