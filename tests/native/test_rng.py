"""The random library: compiled code against its plain reference, and both against statistical tests."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from numba import njit

from hurtle.native import rng as reference
from hurtle.native.bounds import OutOfBounds, at_source
from hurtle.native.generate import paste

RECORD = np.dtype([("_rng", np.uint64)])
SEEDS = [0, 1, 2, 7, 12345, 2**31 - 1, 2**63, 2**64 - 1]
DRAWS = 200


@pytest.fixture(scope="module")
def compiled():
    """The functions of stream.py, compiled as in a generated module."""
    names = {"np": np, "math": math, "f4": np.float32, "jit": njit(nogil=True, error_model="numpy", forceinline=True)}
    names |= {"njit": njit, "INNER": {"nogil": True}, "OutOfBounds": OutOfBounds}
    exec(paste("stream.py") + at_source("cpu", unsafe=False), names)
    return SimpleNamespace(**{name: value for name, value in names.items() if name.startswith(("rng_", "mix", "action_"))})


@pytest.fixture(scope="module")
def draw(compiled):
    """Fills arrays with draws of every kind, from one stream, interleaved."""
    rng_next, rng_random, rng_uniform, rng_integers = (
        compiled.rng_next,
        compiled.rng_random,
        compiled.rng_uniform,
        compiled.rng_integers,
    )
    rng_normal, rng_choice, rng_shuffle = compiled.rng_normal, compiled.rng_choice, compiled.rng_shuffle

    @njit
    def draw(records, words, floats, integers, items):
        rng = records[0]
        for k in range(len(words)):
            words[k] = rng_next(rng)
            floats[0, k] = rng_random(rng)
            floats[1, k] = rng_uniform(rng, np.float32(-0.3), np.float32(2.7))
            floats[2, k] = rng_normal(rng, np.float32(1.5), np.float32(0.5))
            integers[0, k] = rng_integers(rng, 0, 6)
            integers[1, k] = rng_integers(rng, -1000, 1000)
            integers[2, k] = rng_integers(rng, 5, 6)
            rng_shuffle(rng, items)
            integers[3, k] = rng_choice(rng, items, 0)

    return draw


def draw_reference(rng, words, floats, integers, items):
    for k in range(len(words)):
        words[k] = reference.rng_next(rng)
        floats[0, k] = reference.rng_random(rng)
        floats[1, k] = reference.rng_uniform(rng, -0.3, 2.7)
        floats[2, k] = reference.rng_normal(rng, 1.5, 0.5)
        integers[0, k] = reference.rng_integers(rng, 0, 6)
        integers[1, k] = reference.rng_integers(rng, -1000, 1000)
        integers[2, k] = reference.rng_integers(rng, 5, 6)
        reference.rng_shuffle(rng, items)
        integers[3, k] = reference.rng_choice(rng, items)


def buffers(draws):
    return np.zeros(draws, np.uint64), np.zeros((3, draws), np.float32), np.zeros((4, draws), np.int64), np.arange(11)


@pytest.mark.parametrize("seed", SEEDS)
def test_compiled_stream_is_the_reference_stream(draw, seed):
    state = reference.stream_state(seed)
    records = np.array([(state,)], RECORD)
    got, expected = buffers(DRAWS), buffers(DRAWS)
    plain = SimpleNamespace(_rng=state)
    draw(records, *got)
    draw_reference(plain, *expected)
    words, floats, integers, items = got
    np.testing.assert_array_equal(words, expected[0])
    np.testing.assert_array_equal(floats[:2].view(np.uint32), expected[1][:2].view(np.uint32))
    np.testing.assert_allclose(floats[2], expected[1][2], rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(integers, expected[2])
    np.testing.assert_array_equal(items, expected[3])
    assert int(records["_rng"][0]) == plain._rng


def test_splitmix64_gives_its_published_numbers():
    # The first outputs of SplitMix64 from the state 1234567, from its authors' test vector.
    rng = SimpleNamespace(_rng=1234567)
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert [reference.rng_next(rng) for _ in published] == published


def test_stream_states_equal_stream_state():
    for stream in (reference.ENV_STREAM, reference.ACTION_STREAM):
        seeds = np.array(SEEDS, np.uint64)
        together = reference.stream_states(seeds, stream)
        assert together.dtype == np.uint64
        assert together.tolist() == [reference.stream_state(seed, stream) for seed in SEEDS]


def test_negative_seeds_have_streams_too():
    assert reference.stream_states(np.array([-1, -5])).tolist() == [reference.stream_state(-1), reference.stream_state(-5)]


def test_action_bits_agree(compiled):
    action_bits = compiled.action_bits
    for seed in SEEDS:
        start = reference.stream_state(seed, reference.ACTION_STREAM)
        for step in (0, 1, 2, 1000, 2**40):
            bits = int(action_bits(np.uint64(start), step))
            assert bits == reference.action_bits(start, step)
            assert 0 <= bits < 2**32


def test_shuffle_keeps_the_items_and_reaches_every_order():
    rng = SimpleNamespace(_rng=reference.stream_state(3))
    seen = {}
    for _ in range(2400):
        items = [0, 1, 2, 3]
        reference.rng_shuffle(rng, items)
        assert sorted(items) == [0, 1, 2, 3]
        seen[tuple(items)] = seen.get(tuple(items), 0) + 1
    assert len(seen) == 24
    assert min(seen.values()) > 50
    assert max(seen.values()) < 160  # 100 are expected of each, with a standard deviation of 10


# Statistics ----------------------------------------------------------------------------------------------------------


def chi_square(counts):
    """How many standard deviations a chi-square statistic of equally likely outcomes is above its mean."""
    expected = counts.sum() / counts.size
    freedom = counts.size - 1
    return (((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom)


@pytest.fixture(scope="module")
def long_run(draw):
    records = np.array([(reference.stream_state(42),)], RECORD)
    words, floats, integers, items = buffers(400_000)
    draw(records, words, floats, integers, items)
    return words, floats, integers


def test_random_is_uniform(long_run):
    floats = long_run[1][0].astype(np.float64)
    n = len(floats)
    assert floats.min() >= 0.0
    assert floats.max() < 1.0
    assert abs(floats.mean() - 0.5) < 4 * math.sqrt(1 / 12 / n)
    assert abs(floats.var() - 1 / 12) < 4 * math.sqrt(1 / 180 / n)
    assert abs(chi_square(np.histogram(floats, 64, (0.0, 1.0))[0])) < 4.5
    assert abs(np.corrcoef(floats[:-1], floats[1:])[0, 1]) < 4 / math.sqrt(n)


def test_uniform_fills_its_interval(long_run):
    floats = long_run[1][1].astype(np.float64)
    assert floats.min() >= -0.3 - 1e-7
    assert floats.max() < 2.7
    assert abs(floats.mean() - 1.2) < 4 * 3.0 * math.sqrt(1 / 12 / len(floats))
    assert abs(floats.var() - 9 / 12) < 4 * 9 * math.sqrt(1 / 180 / len(floats))


def test_normal_is_normal(long_run):
    z = (long_run[1][2].astype(np.float64) - 1.5) / 0.5
    n = len(z)
    assert np.isfinite(z).all()
    assert abs(z.mean()) < 4 / math.sqrt(n)
    assert abs(z.var() - 1.0) < 4 * math.sqrt(2 / n)
    assert abs((z**3).mean()) < 4 * math.sqrt(15 / n)
    for bound, inside in ((1.0, 0.682689), (2.0, 0.954500), (3.0, 0.997300)):
        assert abs((abs(z) < bound).mean() - inside) < 4 * math.sqrt(inside * (1 - inside) / n)


def test_integers_are_uniform(long_run):
    dice, wide, constant, chosen = long_run[2]
    assert set(dice) == set(range(6))
    assert abs(chi_square(np.bincount(dice))) < 4.5
    assert (wide.min(), wide.max()) == (-1000, 999)
    assert abs(chi_square(np.bincount(wide + 1000))) < 4.5
    assert (constant == 5).all()
    assert abs(chi_square(np.bincount(chosen))) < 4.5


def test_every_bit_is_fair(long_run):
    words = long_run[0]
    for bit in range(64):
        ones = ((words >> np.uint64(bit)) & np.uint64(1)).mean()
        assert abs(ones - 0.5) < 4.5 * 0.5 / math.sqrt(len(words)), f"bit {bit}"


def first_draws(seeds, stream, count=4):
    """The first `count` numbers in [0, 1) of the stream of each seed. [count, seeds]"""
    states = reference.stream_states(seeds, stream)
    gamma = np.uint64(reference.GAMMA)
    with np.errstate(over="ignore"):
        return np.stack([reference._mix_array(states + np.uint64(k) * gamma) for k in range(1, count + 1)]) / 2.0**64


def test_neighbouring_seeds_have_nothing_in_common():
    n = 200_000
    limit = 4.5 / math.sqrt(n)
    draws = first_draws(np.arange(n), reference.ENV_STREAM)
    for k in range(4):
        assert abs(draws[k].mean() - 0.5) < 4.5 * math.sqrt(1 / 12 / n)
        assert abs(chi_square(np.histogram(draws[k], 64, (0.0, 1.0))[0])) < 4.5
        for lag in (1, 2, 8, 64):
            assert abs(np.corrcoef(draws[k][:-lag], draws[k][lag:])[0, 1]) < limit, f"draw {k}, seeds {lag} apart"
            later = draws[(k + 1) % 4]
            assert abs(np.corrcoef(draws[k][:-lag], later[lag:])[0, 1]) < limit, "one stream is another, one draw later"


def test_actions_and_dynamics_share_no_numbers():
    n = 50_000
    dynamics = first_draws(np.arange(n), reference.ENV_STREAM)
    actions = first_draws(np.arange(n), reference.ACTION_STREAM)
    assert abs(np.corrcoef(dynamics.ravel(), actions.ravel())[0, 1]) < 4.5 / math.sqrt(4 * n)
    assert not set(dynamics.ravel()) & set(actions.ravel())
    assert len(set(dynamics.ravel())) == 4 * n


# The ends of the range -----------------------------------------------------------------------------------------------


def unmix(z):
    """The inverse of `mix`: each of its three steps undone."""
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
        unshifted = z
        for _ in range(64 // shift + 1):
            unshifted = z ^ (unshifted >> shift)
        z = unshifted * pow(factor, -1, 2**64) & reference.MASK
    return z


def rng_about_to_draw(word):
    return SimpleNamespace(_rng=(unmix(word) - reference.GAMMA) & reference.MASK)


def test_unmix_undoes_mix():
    for word in (0, 1, 2**64 - 1, 0x0123456789ABCDEF):
        assert reference.mix(unmix(word)) == word
        assert reference.rng_next(rng_about_to_draw(word)) == word


def test_extreme_words_stay_in_bounds():
    top = 2**64 - 1
    assert reference.rng_random(rng_about_to_draw(0)) == 0.0
    assert reference.rng_random(rng_about_to_draw(top)) == np.float32(1.0 - 2.0**-24)
    assert reference.rng_integers(rng_about_to_draw(0), -7, 9) == -7
    assert reference.rng_integers(rng_about_to_draw(top), -7, 9) == 8
    assert reference.rng_integers(rng_about_to_draw(top), 0, 2**31) == 2**31 - 1
    assert np.isfinite(reference.rng_normal(rng_about_to_draw(top)))
    assert np.isfinite(reference.rng_normal(rng_about_to_draw(0)))


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-0.05, 0.05), (1.0, 2.0), (-3.0, 100.0), (1000.0, 1001.0)])
def test_uniform_never_returns_high(low, high):
    for word in (2**64 - 1, 0xFFFFFE << 40):
        assert low <= reference.rng_uniform(rng_about_to_draw(word), low, high) < high
