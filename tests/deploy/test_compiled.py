import copy
import ctypes
import gc
import itertools
import pickle
import threading
import weakref

import numba
import numpy as np
import pytest
import torch
from gymnasium import spaces
from numba.core.errors import TypingError

from hurtle.deploy import compiled
from hurtle.deploy.compiled import CompiledMLP, Layer, MLPDescription
from hurtle.emulation.flat_layout import SpaceLayout
from hurtle.errors import HurtleError
from hurtle.policies.build import PolicyConfig, build_policy
from hurtle.policies.numpy_acting import choose
from hurtle.policies.plain_mlp import UnsupportedError


def bounded(low, high):
    return spaces.Box(np.array(low, np.float32), np.array(high, np.float32))


CPU = torch.device("cpu")
OBSERVATIONS = {
    "vector": spaces.Box(-np.inf, np.inf, (4,), np.float32),
    "matrix": spaces.Box(-3, 3, (5, 7), np.float32),
    "scalar": spaces.Box(-3, 3, (), np.float32),
    "double": spaces.Box(-np.inf, np.inf, (3, 2), np.float64),
    "wide": spaces.Box(-1, 1, (150,), np.float32),
    "image": spaces.Box(0, 255, (9, 8, 3), np.uint8),
    "bits": spaces.Box(0, 1, (10, 10, 4), np.uint8),
    "bytes": spaces.Box(np.array([-128, -3, 0], np.int8), np.array([127, 4, 0], np.int8), dtype=np.int8),
    "bools": spaces.Box(0, 1, (6,), np.bool_),
    "int16": spaces.Box(-300, 300, (3,), np.int16),
    "uint16": spaces.Box(0, 60000, (3,), np.uint16),
    "int32": spaces.Box(-300, 300, (3,), np.int32),
    "uint32": spaces.Box(0, 3_000_000_000, (3,), np.uint32),
    "int64": spaces.Box(-300, 300, (3,), np.int64),
    "uint64": spaces.Box(0, 300, (3,), np.uint64),
    "discrete": spaces.Discrete(5, start=-2),
    "multi_discrete": spaces.MultiDiscrete([[3, 1], [40, 5]], start=[[0, 7], [-20, 1]]),
    "multi_binary": spaces.MultiBinary([3, 4]),
}
ACTIONS = {
    "discrete": (spaces.Discrete(3, start=5), "auto"),
    "many": (spaces.Discrete(70), "auto"),
    "one": (spaces.Discrete(1), "auto"),
    "multi_discrete": (spaces.MultiDiscrete([[3, 1], [4, 20]], start=[[0, 7], [-20, 1]]), "auto"),
    "small_ints": (spaces.MultiDiscrete([3, 2], dtype=np.int16), "auto"),
    "multi_binary": (spaces.MultiBinary((2, 3)), "auto"),
    "gaussian": (bounded([-0.5, -np.inf, 0.1], [0.5, np.inf, 9.0]), "auto"),
    "double": (spaces.Box(-0.3, 0.2, (2, 2), np.float64), "auto"),
    "integers": (spaces.Box(-1, 2, (4,), np.int32), "auto"),
    "bytes": (spaces.Box(100, 200, (4,), np.uint8), "beta"),
    "squashed": (bounded([-2.0, 0.0], [3.0, 1.0]), "squashed_gaussian"),
    "beta": (bounded([[-2.0], [0.0]], [[3.0], [1.0]]), "beta"),
}
NETWORKS = [((1, 33), "relu"), ((), "tanh"), ((7,), "relu"), ((64, 64), "tanh"), ((130, 7, 33), "tanh")]


def first_of_each(kinds, networks):
    """All pairs; those with neither the first kind nor the first network are slow tests."""
    found = []
    for kind, network in itertools.product(kinds, networks):
        is_slow = kind != next(iter(kinds)) and network != networks[0]
        found.append(pytest.param(kind, network, marks=[pytest.mark.slow] * is_slow))
    return found


def made(obs_space, action_space, *, distribution="auto", sizes=(64, 64), activation="tanh", normalize=False, seed=0, **more):
    config = PolicyConfig("mlp", sizes, activation, distribution=distribution, **more)
    policy = build_policy(config, obs_space, action_space, normalize_observations=normalize, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for parameter in policy.network.actor.parameters():  # else all actions are nearly the same
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    if normalize:
        policy.normalizer.update(drawn(obs_space, 50, seed=9).reshape(10, 5, *obs_space.shape) * 2 + 1)
    return policy


def drawn(space, count, seed=0):
    """Observations, of which some are mostly zeros."""
    space.seed(seed)
    rows = np.array([space.sample() for _ in range(count)], space.dtype)
    if isinstance(space, spaces.Box):
        rng = np.random.default_rng(seed)
        rows[rng.random(rows.shape) < rng.choice([0.0, 0.9], (count, *[1] * len(space.shape)))] = 0
    return rows.reshape(count, *space.shape)


def check(policy, count=70):
    """That it is the policy, for one observation and for many."""
    fast, rows = CompiledMLP(MLPDescription.of(policy)), drawn(policy.observation_space, count)
    expected, _ = choose(policy, rows, (), None, None, None, CPU)
    seen = torch.as_tensor(rows).to(torch.int64) if rows.dtype.kind == "u" and rows.itemsize > 1 else torch.as_tensor(rows)
    with torch.inference_mode():
        seen = policy.normalizer.normalize(seen) if policy.normalizer else seen
        features = policy.network.actor_body(seen)
        logits = policy.network.actor(features).numpy()
    outputs = fast.outputs(rows)
    largest = abs(rows.astype(np.float64)).max() if rows.dtype.kind in "iu" and rows.itemsize > 1 else 1.0
    np.testing.assert_allclose(outputs, logits, rtol=1e-5, atol=1e-5 * largest)  # sums of large numbers may cancel
    assert outputs.dtype == np.float32
    same(fast.act_rows(rows), expected)
    is_discrete = isinstance(policy.action_space, spaces.Discrete)
    for row, action in zip(rows, expected, strict=True):
        obs = int(row) if isinstance(policy.observation_space, spaces.Discrete) else row
        chosen = fast.act_one(np.asarray(obs) if np.ndim(row) == 0 and not isinstance(obs, int) else obs)
        if is_discrete:
            assert type(chosen) is int
            chosen = np.array(chosen, expected.dtype)
        same(chosen, action)
    return fast


def same(found, expected):
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    if expected.dtype.kind == "f":
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    else:
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("kind", "sizes"), first_of_each(OBSERVATIONS, [(33,), (), (64, 64)]))
def test_every_kind_of_observation(kind, sizes):
    check(made(OBSERVATIONS[kind], spaces.Discrete(3, start=5), sizes=sizes))


@pytest.mark.parametrize(("kind", "network"), first_of_each(ACTIONS, NETWORKS))
def test_every_kind_of_action(kind, network):
    (space, distribution), (sizes, activation) = ACTIONS[kind], network
    check(made(OBSERVATIONS["vector"], space, distribution=distribution, sizes=sizes, activation=activation))


@pytest.mark.parametrize("kind", ["discrete", "multi_discrete", "beta"])
def test_integers_in_and_any_actions_out(kind):
    space, distribution = ACTIONS[kind]
    check(made(OBSERVATIONS["discrete"], space, distribution=distribution))


@pytest.mark.parametrize("kind", ["vector", "matrix", "double"])
@pytest.mark.parametrize("separate", [True, False])
def test_normalized_observations_and_shared_networks(kind, separate):
    check(made(OBSERVATIONS[kind], spaces.Discrete(4), normalize=True, separate_networks=separate))


def test_observations_far_out_are_clipped_by_the_normalizer():
    policy = made(OBSERVATIONS["vector"], spaces.Box(-9, 9, (2,)), normalize=True)
    fast = CompiledMLP(MLPDescription.of(policy))
    rows = np.array([[1e30, -np.inf, 0, np.inf], [0, 0, 0, 3e38]], np.float32)
    expected, _ = choose(policy, rows, (), None, None, None, CPU)
    np.testing.assert_allclose(fast.act_rows(rows), expected, atol=1e-5)
    np.testing.assert_allclose([fast.act_one(row) for row in rows], expected, atol=1e-5)


@pytest.mark.parametrize("size", [1, 63, 64, 65, 130, 0])
def test_any_number_of_rows(size):
    policy = made(OBSERVATIONS["image"], ACTIONS["multi_discrete"][0], sizes=(33,))
    rows = drawn(policy.observation_space, 130)[:size]
    expected = choose(policy, rows, (), None, None, None, CPU)[0] if size else np.empty((0, 2, 2), np.int64)
    same(CompiledMLP(MLPDescription.of(policy)).act_rows(rows), expected)


@pytest.mark.parametrize(
    ("inputs", "sizes"), [(5000, (64,)), (6, (2000, 40)), pytest.param(300, (300, 300), marks=pytest.mark.slow)]
)
def test_large_policies(inputs, sizes):
    check(made(spaces.Box(-1, 1, (inputs,)), spaces.Discrete(6), sizes=sizes, activation="relu"), count=9)


def test_numbers_outside_of_the_space_count_as_the_nearest_inside():
    fast = check(made(OBSERVATIONS["discrete"], spaces.Discrete(50)))
    actions = [fast.act_one(obs) for obs in range(-2, 3)]
    assert len(set(actions)) > 1
    assert fast.act_one(-3) == fast.act_one(-(10**30)) == actions[0]
    assert fast.act_one(3) == fast.act_one(np.int64(2**63 - 1)) == fast.act_one(10**30) == actions[-1]
    policy = made(OBSERVATIONS["multi_discrete"], spaces.Discrete(50))
    rows = np.array([[[-9, 3], [9, 99]], [[9, 9], [-99, 0]]])
    expected, _ = choose(policy, rows, (), None, None, None, CPU)
    fast = CompiledMLP(MLPDescription.of(policy))
    np.testing.assert_array_equal([fast.act_one(row) for row in rows], expected)
    np.testing.assert_array_equal(fast.act_rows(rows), expected)


@pytest.mark.parametrize("kind", ["discrete", "many", "multi_discrete", "multi_binary"])
def test_illegal_actions_are_never_chosen(kind):
    policy = made(OBSERVATIONS["vector"], ACTIONS[kind][0])
    rows, size = drawn(policy.observation_space, 100), policy.head.mask_size
    mask = np.random.default_rng(0).random((100, size)) < 0.4
    mask[0], mask[1] = False, True
    expected, _ = choose(policy, rows, (), mask, None, None, CPU)
    fast = CompiledMLP(MLPDescription.of(policy))
    np.testing.assert_array_equal(fast.act_rows(rows, mask), expected)
    assert (expected != fast.act_rows(rows)).any()


def linear(weight, bias=None, activation="none"):
    weight = np.array(weight, np.float32)
    return Layer(weight, np.zeros(len(weight), np.float32) if bias is None else np.array(bias, np.float32), activation)


def test_the_first_of_equal_actions_is_chosen():
    layer = linear(np.zeros((40, 2)), np.arange(40) // 10 * 3 % 7)  # 0, 3, 6, 2, each ten times
    fast = CompiledMLP(MLPDescription(spaces.Box(-1, 1, (2,)), spaces.Discrete(40), (layer,), "categorical"))
    assert fast.act_one(np.ones(2, np.float32)) == 20
    mask = np.ones((1, 40), bool)
    mask[0, 20:30] = False
    assert fast.act_rows(np.ones((1, 2), np.float32), mask) == 10


def test_outputs_that_are_no_numbers_give_the_first_action():
    layer = linear([[0, 1], [1, 0], [1, 1]])
    fast = CompiledMLP(MLPDescription(spaces.Box(-9, 9, (2,)), spaces.Discrete(3, start=4), (layer,), "categorical"))
    assert fast.act_one(np.array([1.0, np.inf], np.float32)) == 4  # as of torch's log_softmax
    assert fast.act_one(np.array([1.0, -np.inf], np.float32)) == 4


def test_tanh_is_precise_everywhere():
    x = np.concatenate([np.linspace(-12, 12, 20001), [0.0, 1e-30, -1e-6, 100, -np.inf, np.inf]]).astype(np.float32)
    layers = (linear(np.ones((1, 1)), activation="tanh"), linear(np.ones((1, 1))))
    fast = CompiledMLP(MLPDescription(spaces.Box(-np.inf, np.inf, (1,)), spaces.Box(-2, 2, (1,)), layers, "gaussian"))
    expected = np.tanh(x.astype(np.float64))
    np.testing.assert_allclose(fast.act_rows(x[:, None])[:, 0], expected, rtol=1e-6, atol=0)
    np.testing.assert_allclose([fast.act_one(row)[0] for row in x[::40, None]], expected[::40], rtol=1e-6, atol=0)


def test_emulated_integers_are_still_one_hot():
    layout = SpaceLayout(spaces.MultiDiscrete([3, 4], start=[1, 0]))
    policy = build_policy(PolicyConfig("mlp"), layout.flat_space, spaces.Discrete(9), layout)
    assert isinstance(policy.observation_space, spaces.Box)
    fast = CompiledMLP(MLPDescription.of(policy))
    rows = np.array([[a, b] for a in (1, 2, 3) for b in range(4)], policy.observation_space.dtype)
    expected, _ = choose(policy, rows, (), None, None, None, CPU)
    np.testing.assert_array_equal(fast.act_rows(rows), expected)
    np.testing.assert_array_equal([fast.act_one(row) for row in rows], expected)


def test_act_one_refuses_what_is_not_an_observation():
    obs = np.ones((5, 7), np.float32)
    fast = CompiledMLP(MLPDescription.of(made(OBSERVATIONS["matrix"], spaces.Discrete(3))))
    assert fast.act_one(obs) is not None
    readonly = obs.copy()
    readonly.flags.writeable = False
    assert fast.act_one(readonly) == fast.act_one(obs)
    holes, infinite = obs.copy(), obs.copy()
    holes[4, 6], infinite[4, 6] = np.nan, np.inf
    assert fast.act_one(infinite) is not None
    room = np.zeros(5 * 7 * 4 + 1, np.uint8)
    shapes = [obs[None], obs.ravel(), obs.T, np.ones((7, 5), np.float32)]
    dtypes = [obs.astype(dtype) for dtype in (np.float64, np.int32, ">f4", object)]
    memory = [np.asfortranarray(obs), np.ones((5, 14), np.float32)[:, ::2], room[1:].view(np.float32).reshape(5, 7)]
    kinds = [
        obs.view(np.ma.MaskedArray),
        obs.tolist(),
        np.float32(1),
        1,
        1.0,
        None,
        "obs",
        object(),
        np.ndarray,
    ]
    for wrong in [holes, *shapes, *dtypes, *memory, *kinds]:
        assert fast.act_one(wrong) is None, wrong


def test_act_one_refuses_what_is_not_an_integer():
    for action in (spaces.Discrete(3), spaces.Box(-1, 1, (2,))):
        fast = CompiledMLP(MLPDescription.of(made(OBSERVATIONS["discrete"], action)))
        np.testing.assert_array_equal(fast.act_one(1), fast.act_one(np.int64(1)))
        for wrong in (True, 1.0, np.int32(1), np.array([1]), np.array(1), [1], None, "1"):
            assert fast.act_one(wrong) is None, wrong


def test_act_one_refuses_all_where_arrays_are_built_otherwise(monkeypatch):
    assert compiled.arrays_are_known()
    monkeypatch.setattr(compiled, "arrays_are_known", lambda: False)
    fast = CompiledMLP(MLPDescription.of(made(OBSERVATIONS["vector"], spaces.Discrete(3))))
    assert fast.act_one(np.zeros(4, np.float32)) is None
    assert fast.act_rows(np.zeros((1, 4), np.float32)).shape == (1,)
    assert CompiledMLP(MLPDescription.of(made(OBSERVATIONS["discrete"], spaces.Box(-1, 1, (2,))))).act_one(1) is None
    assert CompiledMLP(MLPDescription.of(made(OBSERVATIONS["discrete"], spaces.Discrete(3)))).act_one(1) is not None


def test_actions_are_arrays_of_their_own():
    fast = CompiledMLP(MLPDescription.of(made(OBSERVATIONS["vector"], spaces.Box(-9, 9, (2,)))))
    first = fast.act_one(np.ones(4, np.float32))
    kept = first.copy()
    fast.act_one(-np.ones(4, np.float32))
    np.testing.assert_array_equal(first, kept)


def test_wrong_rows_and_masks_are_refused():
    fast = CompiledMLP(MLPDescription.of(made(OBSERVATIONS["vector"], spaces.Discrete(3))))
    rows = np.ones((2, 4), np.float32)
    with pytest.raises(HurtleError, match=r"rows: expected a contiguous array of float32 \[2, 4\], got float64 \[2, 4\]"):
        fast.act_rows(rows.astype(np.float64))
    with pytest.raises(HurtleError, match=r"float32 \[4, 4\], got float32 \[4\]"):
        fast.outputs(rows[0])
    with pytest.raises(HurtleError, match=r"rows: expected a contiguous"):
        fast.act_rows(np.ones((2, 8), np.float32)[:, ::2])
    with pytest.raises(HurtleError, match=r"rows: expected .* got list"):
        fast.act_rows(rows.tolist())
    with pytest.raises(HurtleError, match=r"mask: expected a contiguous array of bool \[2, 3\], got bool \[3\]"):
        fast.act_rows(rows, np.ones(3, bool))
    box = CompiledMLP(MLPDescription.of(made(OBSERVATIONS["vector"], spaces.Box(-1, 1, (2,)))))
    with pytest.raises(HurtleError, match="A mask is for discrete actions"):
        box.act_rows(rows, np.ones((2, 2), bool))


def test_a_second_policy_compiles_nothing():
    CompiledMLP(MLPDescription.of(made(OBSERVATIONS["vector"], spaces.Discrete(3)))).act_one(np.zeros(4, np.float32))
    events = []

    class Listener(numba.core.event.Listener):
        def on_start(self, event):
            events.append(event)

        def on_end(self, event):
            pass

    with numba.core.event.install_listener("numba:compile", Listener()):
        fast = CompiledMLP(MLPDescription.of(made(OBSERVATIONS["image"], spaces.Discrete(7), sizes=(9,), activation="relu")))
        fast.act_one(np.zeros((9, 8, 3), np.uint8))
        assert events == []
        numba.njit(lambda x: x + 1)(1)
        assert len(events) == 1  # it would have been heard


@pytest.mark.parametrize(
    "kind", ["discrete", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("vector", "image", "multi_discrete"))]
)
def test_native_in_a_loop_of_single_numbers(kind):
    policy = made(OBSERVATIONS[kind], spaces.Discrete(4, start=-1))
    native, rows = CompiledMLP(MLPDescription.of(policy)).native, drawn(policy.observation_space, 50)

    @numba.njit(nogil=True)
    def loop(rows, actions):
        for n in range(len(rows)):
            actions[n] = native(rows[n])

    actions = np.zeros(50, np.int64)
    loop(rows, actions)
    np.testing.assert_array_equal(actions, choose(policy, rows, (), None, None, None, CPU)[0])


@pytest.mark.parametrize(
    ("obs", "kind"),
    [
        ("vector", "beta"),
        pytest.param("discrete", "multi_binary", marks=pytest.mark.slow),
        pytest.param("vector", "multi_binary", marks=pytest.mark.slow),
        pytest.param("discrete", "beta", marks=pytest.mark.slow),
    ],
)
def test_native_in_a_loop_of_arrays(obs, kind):
    space, distribution = ACTIONS[kind]
    policy = made(OBSERVATIONS[obs], space, distribution=distribution)
    native, rows = CompiledMLP(MLPDescription.of(policy)).native, drawn(policy.observation_space, 50)

    @numba.njit(nogil=True)
    def loop(rows, actions):
        for n in range(len(rows)):
            native(rows[n], actions[n])

    actions, flat = np.zeros((50, *space.shape), space.dtype), np.zeros((50, np.prod(space.shape)), space.dtype)
    loop(rows, actions)
    loop(rows, flat)
    same(actions, choose(policy, rows, (), None, None, None, CPU)[0])
    np.testing.assert_array_equal(actions.reshape(flat.shape), flat)


def test_native_may_be_called_by_threads_and_outlive_its_policy():
    policy = made(OBSERVATIONS["wide"], ACTIONS["gaussian"][0], sizes=(130, 64))
    fast, rows = CompiledMLP(MLPDescription.of(policy)), drawn(policy.observation_space, 400)
    native, gone = fast.native, weakref.ref(fast)

    @numba.njit(nogil=True)
    def loop(rows, actions):
        for _ in range(20):
            for n in range(len(rows)):
                native(rows[n], actions[n])

    loop(rows[:1], np.zeros((1, 3), np.float32))
    del fast
    gc.collect()
    assert gone() is None
    filler = [np.full(20_000, np.nan, np.float32) for _ in range(50)]  # where the weights were, had they been freed
    parts = [np.zeros((100, 3), np.float32) for _ in range(4)]
    threads = [threading.Thread(target=loop, args=(rows[100 * n : 100 * (n + 1)], parts[n])) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    same(np.concatenate(parts), choose(policy, rows, (), None, None, None, CPU)[0])
    assert len(filler) == 50


def test_native_refuses_what_is_not_an_observation():
    native = CompiledMLP(MLPDescription.of(made(OBSERVATIONS["vector"], spaces.Discrete(3)))).native
    with pytest.raises(TypingError, match="obs: expected a contiguous array of float32"):
        native(np.zeros(4))
    with pytest.raises(ValueError, match="size does not match the policy"):
        native(np.zeros(3, np.float32))
    with pytest.raises(ValueError, match="NaN"):
        native(np.array([0, 0, 0, np.nan], np.float32))
    into = CompiledMLP(MLPDescription.of(made(OBSERVATIONS["vector"], spaces.Box(-1, 1, (2,))))).native
    with pytest.raises(TypingError, match="out: expected a contiguous array of float32"):
        into(np.zeros(4, np.float32), np.zeros(2))
    with pytest.raises(ValueError, match="output array's size"):
        into(np.zeros(4, np.float32), np.zeros(1, np.float32))


def test_what_calls_native_is_not_kept_on_disk(write_module):
    module = write_module("""
import numba
def make(native):
    @numba.njit(cache=True)
    def loop(obs):
        return native(obs)
    return loop
""")
    native = CompiledMLP(MLPDescription.of(made(OBSERVATIONS["vector"], spaces.Discrete(3)))).native
    with pytest.warns(numba.NumbaWarning, match="dynamic globals"):
        module.make(native)(np.zeros(4, np.float32))


def test_threads_may_call_one_policy_from_python():
    policy = made(OBSERVATIONS["wide"], ACTIONS["gaussian"][0], sizes=(256, 256))  # large enough to release the lock
    fast, rows = CompiledMLP(MLPDescription.of(policy)), drawn(policy.observation_space, 400)
    found = [None] * 4

    def act(n):
        found[n] = [fast.act_one(row) for row in rows[100 * n : 100 * (n + 1)]]

    threads = [threading.Thread(target=act, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    same(np.concatenate(found), choose(policy, rows, (), None, None, None, CPU)[0])


def test_act_one_neither_keeps_nor_frees_its_observation():
    fast = CompiledMLP(MLPDescription.of(made(OBSERVATIONS["vector"], spaces.Box(-1, 1, (2,)))))
    obs = np.zeros(4, np.float32)

    def references(array):
        return ctypes.c_ssize_t.from_address(id(array)).value

    before, other = references(obs), [np.zeros(2, np.float32)]
    actions = [fast.act_one(obs) for _ in range(1000)]
    assert references(obs) == before
    assert references(actions[0]) == references(other[0])


def test_a_policy_that_is_no_plain_mlp_has_no_description():
    obs, act = OBSERVATIONS["vector"], spaces.Discrete(2)
    with pytest.raises(UnsupportedError, match="it has a memory"):
        MLPDescription.of(build_policy(PolicyConfig("mlp", recurrent="gru"), obs, act))
    with pytest.raises(UnsupportedError, match="its network is a GridCNN"):
        MLPDescription.of(build_policy(PolicyConfig("grid_cnn"), spaces.Box(0, 1, (6, 6, 2), np.uint8), act))
    changed = made(obs, act)
    changed.network.actor_body.hidden[1] = torch.nn.GELU()
    with pytest.raises(UnsupportedError, match="its activation is GELU"):
        MLPDescription.of(changed)
    changed = made(obs, act)
    changed.network.actor_body.hidden[0] = torch.nn.Linear(4, 64, bias=False)
    with pytest.raises(UnsupportedError, match="a Linear where a float32 Linear with a bias"):
        MLPDescription.of(changed)
    with pytest.raises(UnsupportedError):
        MLPDescription.of(made(obs, act).double())


def test_a_description_is_a_copy():
    policy = made(OBSERVATIONS["vector"], spaces.Box(-9, 9, (2,)))
    description = MLPDescription.of(policy)
    fast, obs = CompiledMLP(description), np.ones(4, np.float32)
    before = fast.act_one(obs)
    for parameter in policy.parameters():
        parameter.data.zero_()
    np.testing.assert_array_equal(CompiledMLP(description).act_one(obs), before)
    for layer in description.layers:
        layer.weight[:] = 0
    np.testing.assert_array_equal(fast.act_one(obs), before)


def test_copies_stand_on_their_own():
    fast, obs = CompiledMLP(MLPDescription.of(made(OBSERVATIONS["vector"], spaces.Box(-9, 9, (2,))))), np.ones(4, np.float32)
    copies, expected = [copy.copy(fast), copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))], fast.act_one(obs)
    del fast
    gc.collect()
    filler = [np.full(20_000, np.nan, np.float32) for _ in range(50)]
    for other in copies:
        np.testing.assert_array_equal(other.act_one(obs), expected)
    assert len(filler) == 50


BOX, CHOICE, GOOD = spaces.Box(-1, 1, (2,)), spaces.Discrete(3), linear(np.zeros((3, 2)))
MALFORMED = {
    "layers": ({"layers": ()}, "at least one layer, from 2 inputs to 3 outputs"),
    "inputs": ({"layers": (linear(np.zeros((3, 4))),)}, r"Layer 0: expected weights of shape \[3, 2\], got \[3, 4\]"),
    "outputs": ({"layers": (linear(np.zeros((2, 2))),)}, r"Layer 0: expected weights of shape \[3, 2\], got \[2, 2\]"),
    "chain": (
        {"layers": (linear(np.zeros((5, 2))), linear(np.zeros((3, 4))))},
        r"Layer 1: expected weights of shape \[3, 5\], got \[3, 4\]",
    ),
    "flat": ({"layers": (Layer(np.zeros(6, np.float32), np.zeros(3, np.float32), "none"),)}, r"got \[6\]"),
    "biases": ({"layers": (Layer(GOOD.weight, np.zeros(2, np.float32), "none"),)}, r"expected 3 biases, got shape \[2\]"),
    "dtype": ({"layers": (Layer(GOOD.weight.astype(np.float64), GOOD.bias, "none"),)}, "of float32, got float64 and float32"),
    "activation": ({"layers": (Layer(GOOD.weight, GOOD.bias, "gelu"),)}, "activation none, tanh, relu, got 'gelu'"),
    "distribution": ({"distribution": "gaussian"}, "expected categorical, got 'gaussian'"),
    "unknown": ({"action_space": BOX, "distribution": "cauchy"}, "gaussian or squashed_gaussian or beta, got 'cauchy'"),
    "unbounded": ({"action_space": spaces.Box(-np.inf, 1, (3,)), "distribution": "beta"}, "needs a Box with finite bounds"),
    "observations": ({"observation_space": spaces.Dict(a=BOX)}, "observations in a Box, Discrete"),
    "actions": ({"action_space": spaces.Tuple([CHOICE])}, "actions in a Box, Discrete"),
    "half": ({"observation_space": spaces.Box(-1, 1, (2,), np.float16)}, "got float16"),
    "wide": ({"action_space": spaces.Box(0, 9, (3,), np.uint64), "distribution": "gaussian"}, "dtype uint64"),
    "mean": ({"mean": np.zeros(3), "std": np.ones(2)}, r"mean: expected shape \(2,\), got \(3,\)"),
    "std": ({"mean": np.zeros(2)}, r"std: expected shape \(2,\), got None"),
    "zero": ({"mean": np.zeros(2), "std": np.zeros(2)}, "no std 0"),
    "normalized": (
        {"observation_space": spaces.Box(0, 9, (2,), np.uint8), "mean": np.zeros(2), "std": np.ones(2)},
        "A normalizer is for observations that are floats",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", MALFORMED)
def test_malformed_descriptions_are_refused(what):
    changes, message = MALFORMED[what]
    good = {"observation_space": BOX, "action_space": CHOICE, "layers": (GOOD,), "distribution": "categorical"}
    CompiledMLP(MLPDescription(**good))
    with pytest.raises(HurtleError, match=message):
        CompiledMLP(MLPDescription(**{**good, **changes}))
