"""Compares Hurtle's MinAtar games with the `minatar` package, move by move and in distribution.

The package is played and recorded. Its states are then injected into as many Hurtle envs, one per transition, which
take the same actions in a single step; rewards, ends, observations and states must come out the same. What the games
draw at random is compared by playing the same state many times on both sides and comparing how often each outcome
comes up. All seeds are fixed, and bounds are at about four standard deviations.
"""

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import minatar
import numpy as np
import pytest

import hurtle

Arrays = dict[str, np.ndarray]
Policy = Callable[[np.ndarray, np.random.Generator], np.ndarray]  # observations [n, 10, 10, C] -> actions [n]
Snapshot = dict[str, object]

NUM_ACTIONS = 6
DEVIATIONS = 4.0


def short_and_long(part: float) -> list:
    """Lengths of a recording: a part of the long one, which is for slow tests, and the long one."""
    return [pytest.param(part, id="short"), pytest.param(1.0, id="long", marks=pytest.mark.slow)]


@dataclass
class Transitions:
    """What happened in n single steps; `after` has no meaning where `terminated`."""

    before: Arrays
    actions: np.ndarray
    rewards: np.ndarray
    terminated: np.ndarray
    observations: np.ndarray
    after: Arrays

    def __len__(self) -> int:
        return len(self.actions)

    def __getitem__(self, index: np.ndarray) -> "Transitions":
        """The transitions that an index or mask array selects."""
        picked = {f.name: getattr(self, f.name) for f in fields(self)}
        return Transitions(
            **{
                name: {key: v[index] for key, v in value.items()} if isinstance(value, dict) else value[index]
                for name, value in picked.items()
            }
        )


@dataclass
class Episodes:
    """Return and length of each played episode."""

    returns: np.ndarray
    lengths: np.ndarray


class Reference:
    """A game of the package, played as a black box.

    Args:
        game: The game's name.
        encode: Says a package game in the fields of Hurtle's `State`.
        seed: Seeds the package's random numbers.
        options: Go to `minatar.Environment`. Sticky actions are off unless asked for.
    """

    def __init__(self, game: str, encode: Callable[[object], dict], seed: int, **options: object):
        self.game, self.encode, self.seed = game, encode, seed
        self.options = {"sticky_action_prob": 0.0, **options}
        self.environment = self.begin(seed)

    def begin(self, seed: int) -> minatar.Environment:
        """A new game like this one."""
        environment = minatar.Environment(self.game, **self.options)
        environment.seed(seed)
        environment.reset()
        return environment

    @property
    def variables(self):
        """The game itself; its attributes are the state, to read and to set."""
        return self.environment.env

    def observation(self) -> np.ndarray:
        return self.environment.state().astype(np.uint8)

    def snapshot(self) -> Snapshot:
        """The state, to `restore`; random numbers are no part of it."""
        return copy.deepcopy({name: value for name, value in vars(self.variables).items() if name != "random"})

    def restore(self, snapshot: Snapshot) -> None:
        vars(self.variables).update(copy.deepcopy(snapshot))

    def record(
        self, policy: Policy, steps: int, prepare: Callable[[object, np.random.Generator], None] | None = None
    ) -> Transitions:
        """Play and write down every step.

        Args:
            policy: Chooses the actions.
            steps: How many.
            prepare: Changes the variables after each reset, to get to states that a policy seldom reaches.
        """
        rng = np.random.default_rng(0)
        rows: list[tuple] = []
        self.environment.reset()
        start = True
        for _ in range(steps):
            if start:
                if prepare is not None:
                    prepare(self.variables, rng)
                before, observation = self.encode(self.variables), self.observation()
            action = int(policy(observation[None], rng)[0])
            reward, terminated = self.environment.act(action)
            after, observation = self.encode(self.variables), self.observation()
            rows.append((before, action, reward, terminated, observation, after))
            before, start = after, bool(terminated)
            if start:
                self.environment.reset()
        before, actions, rewards, terminated, observations, after = zip(*rows, strict=True)
        return Transitions(
            _stack(before),
            np.array(actions),
            np.array(rewards, np.float32),
            np.array(terminated, bool),
            np.array(observations),
            _stack(after),
        )

    def outcomes(self, snapshot: Snapshot, action: int, samples: int) -> Counter:
        """How often each (reward, terminated, observation) follows from one state and action."""
        counts: Counter = Counter()
        for _ in range(samples):
            self.restore(snapshot)
            reward, terminated = self.environment.act(action)
            counts[_outcome(reward, terminated, self.observation())] += 1
        return counts

    def play(self, policy: Policy, episodes: int, horizon: int) -> Episodes:
        """Play episodes from the start, each in a game of its own; those longer than `horizon` are cut there."""
        rng = np.random.default_rng(1)
        games = [self.begin(1000 * self.seed + episode) for episode in range(episodes)]
        returns, lengths, running = np.zeros(episodes), np.zeros(episodes), np.arange(episodes)
        for _ in range(horizon):
            actions = policy(np.array([games[i].state() for i in running], np.uint8), rng)
            rewards, terminated = zip(*(games[i].act(int(a)) for i, a in zip(running, actions, strict=True)), strict=True)
            returns[running] += rewards
            lengths[running] += 1
            running = running[~np.array(terminated, bool)]
            if not len(running):
                break
        return Episodes(returns, lengths)


def join(*parts: Transitions) -> Transitions:
    """Several recordings in one."""

    def concatenate(name: str):
        values = [getattr(part, name) for part in parts]
        if isinstance(values[0], dict):
            return {key: np.concatenate([v[key] for v in values]) for key in values[0]}
        return np.concatenate(values)

    return Transitions(**{f.name: concatenate(f.name) for f in fields(Transitions)})


def replay(game: str, recorded: Transitions, **options: object) -> Transitions:
    """Take the recorded actions in the recorded states, in Hurtle: one env per transition, one step."""
    vec = hurtle.make_vec(game, num_envs=len(recorded), **{"sticky_action_prob": 0.0, **options})
    vec.reset(seed=0)
    for name, values in recorded.before.items():
        vec.states[name] = values
    obs, rewards, terminated, truncated, infos = vec.step(recorded.actions)
    assert not truncated.any(), "MinAtar games are never truncated"
    observations = np.array(obs)
    if terminated.any():
        observations[terminated] = np.stack(list(infos["final_obs"][terminated]))
    after = {name: np.array(vec.states[name]) for name in vec.states.dtype.names}
    vec.close()
    return Transitions(recorded.before, recorded.actions, rewards.copy(), terminated.copy(), observations, after)


def assert_same(ours: Transitions, theirs: Transitions, normalise: Callable[[Arrays], Arrays] = lambda states: states) -> None:
    """Every reward, end, observation and (while the episode goes on) state variable is the same.

    Args:
        ours: From `replay`.
        theirs: From `Reference.record`.
        normalise: Clears what has no meaning in our states, such as the position of an entity that is gone.
    """
    assert len(ours) == len(theirs) > 0
    np.testing.assert_array_equal(ours.rewards, theirs.rewards, "rewards differ")
    np.testing.assert_array_equal(ours.terminated, theirs.terminated, "terminated differs")
    _assert_equal_rows(ours.observations, theirs.observations, theirs, "observation")
    alive = ~theirs.terminated
    states = normalise({name: ours.after[name][alive] for name in theirs.after})
    for name, values in theirs.after.items():
        _assert_equal_rows(states[name], values[alive], theirs[alive], name)


def assert_same_outcomes(reference: Reference, snapshot: Snapshot, action: int, samples: int) -> None:
    """One state and action lead to the same outcomes on both sides, equally often."""
    theirs = reference.outcomes(snapshot, action, samples)
    reference.restore(snapshot)
    before = _stack([reference.encode(reference.variables)] * samples)
    unknown = np.zeros(samples)
    start = Transitions(before, np.full(samples, action), unknown, unknown, unknown, {})
    result = replay(reference.game, start)
    ours = Counter(
        _outcome(reward, terminated, obs)
        for reward, terminated, obs in zip(result.rewards, result.terminated, result.observations, strict=True)
    )
    assert set(ours) == set(theirs), f"{len(set(ours) ^ set(theirs))} outcomes come up on one side only"
    assert_same_frequencies(ours, theirs)


def assert_same_frequencies(ours: Counter, theirs: Counter) -> None:
    """Two samples of a discrete quantity come from one distribution (two-sample chi-square test)."""
    n, m = ours.total(), theirs.total()
    keys = set(ours) | set(theirs)
    statistic = sum((ours[k] * (m / n) ** 0.5 - theirs[k] * (n / m) ** 0.5) ** 2 / (ours[k] + theirs[k]) for k in keys)
    if len(keys) > 1:
        assert statistic < chi_square_bound(len(keys) - 1), f"{statistic:.1f}: {sorted(ours.items())} {theirs}"


def chi_square_bound(degrees: int) -> float:
    """The chi-square value that is as rare as `DEVIATIONS` standard deviations (Wilson and Hilferty's formula).

    Example:
        >>> 30 < chi_square_bound(5) < 32
        True
    """
    spread = 2.0 / (9.0 * degrees)
    return degrees * (1.0 - spread + DEVIATIONS * spread**0.5) ** 3


def assert_same_play(reference: Reference, policy: Policy, episodes: int, horizon: int, num_envs: int) -> None:
    """Both sides have the same mean return and episode length.

    Args:
        reference: The package's game.
        policy: Plays on both sides.
        episodes: How many episodes the package plays.
        horizon: Longer episodes are cut there.
        num_envs: How many episodes Hurtle plays, one per env.
    """
    theirs = reference.play(policy, episodes, horizon)
    ours = play(reference, policy, num_envs, horizon)
    assert theirs.returns.std() > 0, "returns that never vary compare nothing"
    for name in ("returns", "lengths"):
        a, b = getattr(ours, name), getattr(theirs, name)
        error = (a.var() / len(a) + b.var() / len(b)) ** 0.5
        assert abs(a.mean() - b.mean()) <= DEVIATIONS * error, f"{name}: {a.mean():.3f}, {b.mean():.3f} +- {error:.3f}"


def play(reference: Reference, policy: Policy, num_envs: int, horizon: int) -> Episodes:
    """Play the first episode of each env in Hurtle, cut at `horizon`, with the options of the reference."""
    rng = np.random.default_rng(2)
    vec = hurtle.make_vec(reference.game, num_envs=num_envs, **reference.options)
    obs, _ = vec.reset(seed=1)
    returns, lengths, running = np.zeros(num_envs), np.zeros(num_envs), np.ones(num_envs, bool)
    for _ in range(horizon):
        obs, rewards, terminated, _, _ = vec.step(policy(np.asarray(obs), rng))
        returns += rewards * running
        lengths += running
        running &= ~terminated
        if not running.any():
            break
    vec.close()
    return Episodes(returns, lengths)


def assert_sticky(reference: Reference, recorded: Transitions, normalise=lambda states: states, debug: bool = False) -> None:
    """The action that was last executed repeats with the right probability, also across a reset.

    Args:
        reference: Any game of the package.
        recorded: Transitions of that game without random events, some of them ends of episodes.
        normalise: As in `assert_same`.
        debug: Replay these transitions uncompiled; few are sooner done than the game is compiled.
    """
    # Certain: whatever is asked for, the last action happens.
    rng = np.random.default_rng(3)
    stuck = replace(
        recorded,
        before={**recorded.before, "last_action": recorded.actions},
        actions=rng.integers(NUM_ACTIONS, size=len(recorded)),
    )
    repeated = replay(reference.game, stuck, sticky_action_prob=1.0, debug=debug)
    assert_same(repeated, recorded, normalise)
    assert recorded.terminated.any()
    np.testing.assert_array_equal(repeated.after["last_action"], recorded.actions, "last_action must outlive a reset")

    # By default: as often as in the package, and what was executed is what may stick next.
    samples = 20_000
    asked, last = 1, 3
    one = replace(recorded[np.zeros(samples, int)], actions=np.full(samples, asked))
    one.before["last_action"] = np.full(samples, last)
    ours = Counter(replay(reference.game, one, sticky_action_prob=0.1).after["last_action"].tolist())

    environment = minatar.Environment(reference.game)
    environment.seed(4)
    theirs: Counter = Counter()
    for _ in range(samples):
        environment.last_action = last
        if environment.act(asked)[1]:
            environment.reset()
        theirs[environment.last_action] += 1
    assert set(ours) == set(theirs) == {asked, last}
    assert_same_frequencies(ours, theirs)
    assert abs(ours[last] / samples - 0.1) < DEVIATIONS * (0.1 * 0.9 / samples) ** 0.5

    # The package's last action outlives a reset, and is a no-op at the very beginning.
    environment.last_action = last
    environment.reset()
    assert environment.last_action == last
    fresh = hurtle.make_vec(reference.game, num_envs=4)
    fresh.reset(seed=0)
    assert minatar.Environment(reference.game).last_action == 0
    assert (fresh.states["last_action"] == 0).all()
    fresh.close()


def uniform_policy(observations: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return rng.integers(NUM_ACTIONS, size=len(observations))


def _outcome(reward: float, terminated: bool, observation: np.ndarray) -> tuple:
    return float(reward), bool(terminated), observation.astype(np.uint8).tobytes()


def _stack(states) -> Arrays:
    return {name: np.array([state[name] for state in states]) for name in states[0]}


def _assert_equal_rows(ours: np.ndarray, theirs: np.ndarray, recorded: Transitions, name: str) -> None:
    """Compare per transition, and show the first one that differs."""
    assert ours.shape == theirs.shape, name
    different = (ours != theirs).reshape(len(ours), -1).any(axis=1)
    if different.any():
        i = int(different.argmax())
        before = {key: value[i].tolist() for key, value in recorded.before.items()}
        where = np.argwhere(ours[i] != theirs[i]).tolist()
        raise AssertionError(
            f"{name} differs in {different.sum()} of {len(ours)} transitions, first in {i}: at {where}, "
            f"after action {recorded.actions[i]} in {before}"
        )
