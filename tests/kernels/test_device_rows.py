"""What the device gear does row by row: against the distributions, the draws and the returns of the other gears.

The CUDA kernels are in test_simulated.py; what a step brings is held against `GeneralCollector` in tests/collect.
"""

import copy
import math

import numpy as np
import pytest
import torch

from hurtle.kernels import device_rows
from hurtle.kernels.device_rows import Draw, Episodes, Outcome, Step
from hurtle.kernels.error_codes import NO_ERROR_INT32
from hurtle.kernels.returns import running_returns
from hurtle.kernels.uniforms import uniforms
from hurtle.native.rng import GAMMA, MASK, mix
from hurtle.policies.distributions import Categorical, Gaussian, MultiCategorical, masked

LARGEST_UNIFORM = 1.0 - 2.0**-24
NEAR = 1e-6
"""Float32 sums of probabilities are good to this; a uniform that is nearer to their edge may fall on either side."""


def drawing(rows, clock=0, seed=0):
    """Random streams, the first of which makes the counter pass 2^64."""
    streams = np.random.default_rng(seed).integers(0, 2**64, rows, np.uint64)
    streams[0] = MASK
    return streams, Draw(streams.view(np.int64), np.array([clock]))


def drawing_of(numbers):
    """Streams whose first uniforms are these: SplitMix64 backwards."""

    def unshifted(x, by):
        found = x
        while x:
            x >>= by
            found ^= x
        return found

    streams = []
    for number in numbers:
        z = unshifted(int(number * 2**24) << 40, 31)
        z = unshifted(z * pow(0x94D049BB133111EB, -1, 2**64) & MASK, 27)
        z = unshifted(z * pow(0xBF58476D1CE4E5B9, -1, 2**64) & MASK, 30)
        assert mix(z) >> 40 == int(number * 2**24)
        streams.append((z - GAMMA) & MASK)
    return Draw(np.array(streams, np.uint64).view(np.int64), np.zeros(1, np.int64))


# Draws


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize(("clock", "t"), [(0, 0), (3, 4), (2**40, 17)])
def test_uniforms_are_those_of_every_gear(clock, t, count):
    streams, draw = drawing(40, clock)
    out = np.full((40, count), np.nan, np.float32)
    device_rows.uniform_rows(40, t, draw, out)
    np.testing.assert_array_equal(out, uniforms(streams, np.full(40, clock + t), count))


# Choices


def choose(draw, logits, nvec, mask=None, start=None, t=0):
    """Actions [N, k], log-probs [N] and what the env gets [N, k]; all else of the three arrays must stay as it is."""
    rows, choices = len(logits), len(nvec)
    start = np.zeros(choices, np.int64) if start is None else np.array(start)
    actions, log_probs = np.full((t + 2, rows, choices), -7), np.full((t + 2, rows), 7.0, np.float32)
    env_actions = np.full((rows, choices), -7)
    has_mask = mask is not None
    device_rows.choose_rows(
        rows, t, draw, logits, mask if has_mask else logits.astype(bool), has_mask, np.array(nvec), start, actions, log_probs,
        env_actions,
    )  # fmt: skip
    untouched = np.arange(t + 2) != t
    assert (actions[untouched] == -7).all()
    assert (log_probs[untouched] == 7.0).all()
    return actions[t], log_probs[t], env_actions


def expected_choice(logits, nvec, mask, drawn):
    """By our distributions: actions [N, k], their log-probs, and whether no uniform is too near to an edge to say."""
    logits = torch.from_numpy(logits)
    distribution = Categorical(logits) if len(nvec) == 1 else MultiCategorical(logits, tuple(nvec))
    if mask is not None:
        distribution = masked(distribution, torch.from_numpy(mask))
    actions = distribution.sample(torch.from_numpy(drawn))
    cumulative = distribution.log_probs.double().exp().cumsum(-1).view(len(logits), len(nvec), -1)
    distance = (cumulative - torch.from_numpy(drawn).double().unsqueeze(-1)).abs().amin((1, 2))
    return actions.view(len(logits), -1).numpy(), distribution.log_prob(actions).numpy(), (distance > NEAR).numpy()


NVECS = [(2,), (5,), (18,), (3, 2, 5), (2, 2), (1, 4)]


def random_logits(rows, nvec, seed=0, scale=3.0):
    return (scale * np.random.default_rng(seed).normal(size=(rows, sum(nvec)))).astype(np.float32)


@pytest.mark.parametrize("kind", ["all legal", "masks", "impossible", "masks of impossible"])
@pytest.mark.parametrize("nvec", NVECS)
def test_choices_are_those_of_the_distributions(nvec, kind):
    rows, clock, t = 700, 11, 3
    logits, mask = random_logits(rows, nvec), None
    rng = np.random.default_rng(1)
    if "masks" in kind:
        mask = rng.random(logits.shape) < 0.5
        mask[rng.random(rows) < 0.1] = False  # nothing is legal
    if "impossible" in kind:
        never = rng.random(logits.shape) < 0.3
        first = 0
        for n in nvec:  # something legal stays possible in each choice
            possible = (
                np.arange(rows),
                first + (logits[:, first : first + n] if mask is None else mask[:, first : first + n]).argmax(1),
            )
            never[possible] = False
            first += n
        logits[never] = -np.inf
    streams, draw = drawing(rows, clock)
    drawn = uniforms(streams, np.full(rows, clock + t), len(nvec))
    actions, log_probs, clear = expected_choice(logits, nvec, mask, drawn)
    start = np.arange(len(nvec)) * 3 - 1
    found, found_log_probs, for_env = choose(draw, logits, nvec, mask, start, t)
    assert clear.mean() > 0.99
    np.testing.assert_array_equal(found[clear], actions[clear])
    np.testing.assert_allclose(found_log_probs[clear], log_probs[clear], rtol=2e-6, atol=2e-6)
    np.testing.assert_array_equal(for_env, found + start)
    if max(nvec) > 1:
        assert len(np.unique(found, axis=0)) > 1


@pytest.mark.parametrize(("uniform", "chosen"), [(0.0, 1), (LARGEST_UNIFORM, 3)])
def test_what_is_impossible_is_not_chosen_at_the_edges(uniform, chosen):
    logits = np.array([[-np.inf, 0.3, -1.0, 1.0, -np.inf], [-900.0, 0.3, -1.0, 1.0, -900.0]], np.float32)
    mask = np.array([[True] * 5, [False, True, True, True, False]])
    for legal in (mask, None):
        found, log_probs, _ = choose(drawing_of([uniform] * 2), logits, (5,), legal)
        assert found.ravel().tolist() == [chosen, chosen]
        np.testing.assert_allclose(log_probs, logits[0, chosen] - np.log(np.exp(logits[0, 1:4]).sum()), rtol=1e-6)


@pytest.mark.parametrize("uniform", [0.0, 0.25, 0.5, LARGEST_UNIFORM])
def test_where_nothing_is_legal_all_choices_are_equally_likely(uniform):
    logits = np.array([[50.0, -np.inf, 0.0, 1.0]], np.float32)
    found, log_probs, _ = choose(drawing_of([uniform]), logits, (4,), np.zeros((1, 4), bool))
    assert found.item() == int(4 * uniform)
    assert log_probs.item() == pytest.approx(-math.log(4))


def test_logits_of_any_size_give_the_same_choice():
    logits = random_logits(300, (5,))
    _, draw = drawing(300)
    found, log_probs, _ = choose(draw, logits, (5,))
    shifted, shifted_log_probs, _ = choose(draw, logits + np.float32(2.0**14), (5,))
    same = (logits + np.float32(2.0**14)) - np.float32(2.0**14)  # what the sum leaves of them
    exact, exact_log_probs, _ = choose(draw, same, (5,))
    np.testing.assert_array_equal(shifted, exact)
    np.testing.assert_allclose(shifted_log_probs, exact_log_probs, rtol=1e-6, atol=1e-6)
    assert (found == shifted).mean() > 0.98
    assert np.isfinite(log_probs).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_show_in_the_log_prob(bad):
    logits = np.array([[0.0, bad, 0.0], [0.0, 1.0, 0.0]], np.float32)
    found, log_probs, _ = choose(drawing_of([0.5, 0.5]), logits, (3,))
    assert 0 <= found[0, 0] < 3
    assert not np.isfinite(log_probs[0])
    assert np.isfinite(log_probs[1])


# Numbers


def gauss(draw, mean, log_std, low, high, t=0):
    rows, size = mean.shape
    actions, log_probs = np.zeros((t + 1, rows, size), np.float32), np.zeros((t + 1, rows), np.float32)
    env_actions = np.zeros((rows, size), np.float32)
    device_rows.gauss_rows(rows, t, draw, mean, log_std, low, high, actions, log_probs, env_actions)
    return actions[t], log_probs[t], env_actions


@pytest.mark.parametrize("size", [1, 3, 6])
def test_normals_are_those_of_the_distribution(size):
    rows, clock, t = 500, 9, 2
    rng = np.random.default_rng(size)
    mean, log_std = rng.normal(size=(rows, size)).astype(np.float32), rng.normal(size=size).astype(np.float32)
    low, high = np.full(size, -0.5, np.float32), np.full(size, 0.75, np.float32)
    low[0] = -np.inf
    streams, draw = drawing(rows, clock)
    drawn = torch.from_numpy(uniforms(streams, np.full(rows, clock + t), 2 * size))
    distribution = Gaussian(torch.from_numpy(mean), torch.from_numpy(log_std))
    actions, log_probs, for_env = gauss(draw, mean, log_std, low, high, t)
    np.testing.assert_allclose(actions, distribution.sample(drawn), rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(log_probs, distribution.log_prob(torch.from_numpy(actions)), rtol=2e-6, atol=5e-6)
    np.testing.assert_array_equal(for_env, np.clip(actions, low, high))
    assert (for_env == actions).any()
    assert (for_env != actions).any()


def test_normals_at_the_edges_of_the_uniforms():
    mean, log_std = np.ones((2, 1), np.float32), np.zeros(1, np.float32)
    everywhere = np.full(1, -np.inf, np.float32), np.full(1, np.inf, np.float32)
    actions, log_probs, _ = gauss(drawing_of([0.0, LARGEST_UNIFORM]), mean, log_std, *everywhere)
    assert actions[0, 0] == 1.0
    assert np.isfinite(actions).all()
    assert np.isfinite(log_probs).all()


# Shuffling


def shuffled(size, key):
    out = np.full(size, -1)
    device_rows.shuffle_rows(size, size, np.array([key]), out)
    return out


@pytest.mark.parametrize("size", [*range(1, 71), 1000, 4096, 65537])
def test_everything_goes_somewhere_once(size):
    for key in (0, 1, -(2**61)):
        np.testing.assert_array_equal(np.sort(shuffled(size, key)), np.arange(size))


@pytest.mark.parametrize("size", [20, 64, 1000, 65537])
def test_another_key_is_another_order(size):
    orders = [shuffled(size, key) for key in (5, 6, -5, 5 + 2**60)]
    np.testing.assert_array_equal(orders[0], shuffled(size, 5))
    for k, order in enumerate(orders):
        assert (order != np.arange(size)).mean() > 0.7
        for other in orders[:k]:
            assert (order != other).mean() > 0.7


def chi_squared(counts, degrees=None):
    """How far counts are from equal: chi-squared as a standard normal (Wilson and Hilferty)."""
    expected = counts.sum() / counts.size
    degrees = degrees or counts.size - 1
    spread = 2 / (9 * degrees)
    return ((((counts - expected) ** 2 / expected).sum() / degrees) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8, 13, 16])
def test_over_many_keys_everything_goes_everywhere(size):
    """How often each goes to each place, and a pair of neighbours to each pair of places."""
    keys = np.random.default_rng(size).integers(0, 2**62, 20_000)
    orders = np.stack([shuffled(size, key) for key in keys])
    places = np.stack([np.bincount(orders[:, n], minlength=size) for n in range(size)])
    assert chi_squared(places, (size - 1) ** 2) < 4
    if size > 2:
        pairs = np.bincount(orders[:, 0] * size + orders[:, 1], minlength=size * size).reshape(size, size)
        assert not pairs.diagonal().any()
        assert chi_squared(pairs[~np.eye(size, dtype=bool)]) < 4


@pytest.mark.parametrize(
    "size", [pytest.param(size, marks=[pytest.mark.slow] * (size not in (3, 13))) for size in (3, 4, 5, 8, 13, 16)]
)
def test_one_epochs_order_tells_nothing_about_the_next(size):
    """Keys of consecutive epochs differ by a constant: the pair (place now, place next) must be uniform, too."""
    from hurtle.algorithms.device_epochs import NEXT_KEY

    with np.errstate(over="ignore"):
        keys = np.random.default_rng(size).integers(0, 2**62, 20_000)
        following = keys + np.int64(NEXT_KEY)
    now, later = (np.stack([shuffled(size, key) for key in some]) for some in (keys, following))
    for n in (0, size - 1):
        assert chi_squared(np.bincount(now[:, n] * size + later[:, n], minlength=size * size)) < 4


# Returns


@pytest.mark.parametrize("masked_steps", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (9, 1), (40, 17)])
def test_returns_are_those_of_reward_normalization(shape, masked_steps):
    rng = np.random.default_rng(sum(shape))
    running = rng.normal(size=shape[1])
    expected_running = running.copy()
    for _ in range(2):  # from one rollout to the next
        rewards = (3 * rng.normal(size=shape)).astype(np.float32)
        ended, valid = rng.random(shape) < 0.2, rng.random(shape) < (0.6 if masked_steps else 2.0)
        out = np.full(shape, np.nan)
        device_rows.return_rows(shape[1], rewards, ended, valid, 0.97, running, out)
        np.testing.assert_array_equal(out, running_returns(rewards, ended, valid, None, 0.97, expected_running))
        np.testing.assert_array_equal(running, expected_running)


# The same functions as CUDA kernels


def kernel_cases(rows=150):
    """Each kernel's name, with its number of rows and its other arguments: rows that fill more than a block, and odd sizes."""
    rng = np.random.default_rng(0)
    steps, t, agents, slots = 4, 2, 3, 2
    _, draw = drawing(rows, 5)

    def floats(*shape):
        return rng.normal(size=shape).astype(np.float32)

    def flags(*shape):
        return rng.random(shape) < 0.4

    nvec, envs = np.array([3, 2]), rows // agents
    choice = (floats(rows, 5), flags(rows, 5), True, nvec, np.array([1, -2]))
    taken = (np.zeros((steps, rows, 2), np.int64), np.zeros((steps, rows), np.float32), np.zeros((rows, 2), np.int64))
    bounds = np.full(2, -0.5, np.float32), np.full(2, 0.5, np.float32)
    numbers = (np.zeros((steps, rows, 2), np.float32), np.zeros((steps, rows), np.float32), np.zeros((rows, 2), np.float32))
    step = Step(
        reward=floats(envs, agents), terminated=flags(envs, agents), truncated=flags(envs, agents), ended=flags(envs),
        episode_ended=flags(envs, agents), episode_return=floats(envs, agents),
        episode_length=rng.integers(1, 9, (envs, agents), np.int32), episode_metrics=floats(envs, 2),
        final_obs=floats(envs, agents * 3), numbers=floats(envs, agents * 3),
        final_numbers=floats(envs, agents * 3),
    )  # fmt: skip
    step.numbers[2, 4], step.reward[3, 1], step.final_numbers[4, 4], step.truncated[4, 1] = np.nan, np.inf, np.nan, True
    out = Outcome(
        rewards=floats(steps, rows), terminated=flags(steps, rows), truncated=flags(steps, rows), starts=flags(steps, rows),
        valid=flags(steps, rows), beginning=flags(rows), cuts=rng.integers(0, slots + 1, rows, np.int32),
        final_steps=np.full((slots, rows), -1, np.int32), final_obs=floats(slots, rows, 3), log_probs=floats(steps, rows),
        error=np.full(rows, NO_ERROR_INT32, np.int32),
    )  # fmt: skip
    out.log_probs[t, rows - 11], out.valid[t] = np.nan, out.valid[t] | (np.arange(rows) % agents == 1)
    episodes = Episodes(
        count=np.zeros(rows, np.int32), returns=floats(rows), best_return=floats(rows), lengths=np.zeros(rows, np.int32),
        best_length=np.zeros(rows, np.int32), metrics=floats(envs, 3),
    )  # fmt: skip
    final_steps = rng.integers(0, steps, (slots, rows), np.int32)
    rewards = (floats(steps, rows), flags(steps, rows), flags(steps, rows), 0.9, rng.normal(size=rows))
    return {
        "uniform_rows": (rows, t, draw, np.zeros((rows, 3), np.float32)),
        "choose_rows": (rows, t, draw, *choice, *taken),
        "gauss_rows": (rows, t, draw, floats(rows, 2), floats(2), *bounds, *numbers),
        "outcome_rows": (rows, t, agents, step, out, episodes),
        "keep_rows": (rows, t, final_steps, floats(rows, 4), floats(slots, rows, 4)),
        "shuffle_rows": (rows, rows, np.array([2**61 + 5]), np.zeros(rows, np.int64)),
        "return_rows": (rows, *rewards, np.zeros((steps, rows))),
    }


def arrays_of(arguments):
    """All arrays, those in named tuples too, by their place."""
    found = {}
    for k, argument in enumerate(arguments):
        if isinstance(argument, tuple):
            found |= {f"{k} {name}": part for name, part in zip(argument._fields, argument, strict=True)}
        elif isinstance(argument, np.ndarray):
            found[str(k)] = argument
    return found


def worst_differences(launch, rows=150):
    """Run each kernel by `launch(name, count, *arguments)` and on the CPU: the greatest difference in any array, by name."""
    worst = {}
    for name, (count, *arguments) in kernel_cases(rows).items():
        expected, before = copy.deepcopy(arguments), arrays_of(copy.deepcopy(arguments))
        getattr(device_rows, name)(count, *expected)
        launch(name, count, *arguments)
        changed = 0
        for key, array in arrays_of(expected).items():
            found = arrays_of(arguments)[key]
            changed += not np.array_equal(array, before[key])
            same = (found == array) | ((found != found) & (array != array))
            with np.errstate(invalid="ignore"):
                difference = np.where(same, 0.0, np.abs(found.astype(np.float64) - array.astype(np.float64))).max()
            exact = array.dtype.kind != "f" or name in ("uniform_rows", "outcome_rows", "keep_rows", "return_rows")
            worst[f"{name} {key}"] = [float(difference), 0.0 if exact else 5e-6]
        assert changed, f"{name} changes nothing"
    return worst
