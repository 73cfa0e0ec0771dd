"""A native vector resumes bitwise from its state_dict: in a fresh vector, with other threads, in a pool, before a recv."""

import json

import numpy as np
import pytest
from sample_envs import Crew, Shift, Walk

import hurtle
from hurtle.errors import HurtleError


def copied(value):
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(copied(item) for item in value)
    return np.array(value)


def assert_same_bits(got, expected):
    if isinstance(expected, dict):
        assert got.keys() == expected.keys()
        for key in expected:
            assert_same_bits(got[key], expected[key])
    elif isinstance(expected, tuple):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            assert_same_bits(one, other)
    else:
        assert (got.dtype, got.shape, got.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())


def actions_of(vec, count, seed=0):
    vec.action_space.seed(seed)
    return [vec.action_space.sample() for _ in range(count)]


def endings(outputs):
    return sum(int(terminated.sum() + truncated.sum()) for _, _, terminated, truncated, _ in outputs)


def continued(make, before, after, load_into=None):
    """Outputs of `after` steps, once continuing directly and once from a state in a fresh vector; and both vectors."""
    vec = make()
    actions = actions_of(vec, before + after)
    vec.reset(seed=3)
    for action in actions[:before]:
        vec.step(action)
    state = vec.state_dict()
    assert "max_steps" not in state, "a setting, which states of earlier versions do not have"
    expected = [copied(vec.step(action)) for action in actions[before:]]
    fresh = (load_into or make)()
    fresh.load_state_dict(state)
    return [copied(fresh.step(action)) for action in actions[before:]], expected, fresh, vec


@pytest.mark.parametrize("autoreset_mode", ["SameStep", "NextStep"])
@pytest.mark.parametrize(
    ("name", "before", "after"), [("cartpole", 17, 40), ("snake", 9, 30), ("breakout", 60, 60), ("memory", 7, 20)]
)
@pytest.mark.usefixtures("all_threads")
def test_goes_on_bitwise(name, before, after, autoreset_mode):
    def make(num_workers):
        return hurtle.make_vec(name, 37, num_workers=num_workers, autoreset_mode=autoreset_mode)

    got, expected, fresh, vec = continued(lambda: make(2), before, after, lambda: make(1))
    assert_same_bits(tuple(got), tuple(expected))
    assert_same_bits(fresh.state_dict(), vec.state_dict())
    assert endings(expected) > 0
    vec.close()


@pytest.mark.parametrize("num_workers", [1, 3, None])
@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.usefixtures("all_threads")
def test_threads_and_debugging_make_no_difference(num_workers, debug):
    got, expected, _, vec = continued(
        lambda: hurtle.make_vec(Walk, 40, num_workers=num_workers), 5, 12, lambda: hurtle.make_vec(Walk, 40, debug=debug)
    )
    assert_same_bits(tuple(got), tuple(expected))
    assert endings(expected) > 0
    vec.close()


@pytest.mark.parametrize("env", [Crew, Shift])
@pytest.mark.parametrize("copy", [False, True])
def test_masks_absent_agents_and_copies(env, copy):
    got, expected, *_ = continued(lambda: hurtle.make_vec(env, 5, copy=copy, debug=env is Crew), 8, 25)
    assert_same_bits(tuple(got), tuple(expected))


def test_a_pending_reset_of_next_step_mode_is_part_of_it():
    vec = hurtle.make_vec("cartpole", 3, autoreset_mode="NextStep")
    vec.reset(seed=0)
    action = np.zeros(3, np.int64)
    while not vec.step(action)[2].any():
        pass
    state, ended = vec.state_dict(), vec._outcome[2].copy()
    fresh = hurtle.make_vec("cartpole", 3, autoreset_mode="NextStep")
    fresh.load_state_dict(state)
    got, expected = copied(fresh.step(action)), copied(vec.step(action))
    assert_same_bits(got, expected)
    assert (expected[1][ended] == 0).all()  # the reset took the place of a step
    assert (expected[1][~ended] == 1).all()


def test_a_state_is_a_copy_and_of_plain_numbers():
    vec = hurtle.make_vec("snake", 2)
    vec.reset(seed=0)
    state = vec.state_dict()
    kept = copied(state)
    vec.step(vec.action_space.sample())
    assert_same_bits(state, kept)
    assert {array.dtype.kind for array in state.values()} <= set("biuf")
    assert json.loads(state["about"].tobytes())["num_envs"] == 2


def test_before_the_first_reset_the_seed_is_still_to_come():
    vec = hurtle.make_vec("cartpole", 4, seed=11)
    fresh = hurtle.make_vec("cartpole", 4)
    fresh.load_state_dict(vec.state_dict())
    np.testing.assert_array_equal(fresh.reset()[0], vec.reset()[0])
    late = hurtle.make_vec("cartpole", 4, seed=2**63 + 5)
    fresh.load_state_dict(late.state_dict())
    np.testing.assert_array_equal(fresh.reset()[0], late.reset()[0])


def test_a_reset_without_seed_continues_the_same_streams():
    vec, fresh = hurtle.make_vec("cartpole", 4), hurtle.make_vec("cartpole", 4, seed=9)
    vec.reset(seed=1)
    fresh.load_state_dict(vec.state_dict())
    np.testing.assert_array_equal(fresh.reset()[0], vec.reset()[0])


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("sends", [0, 1, 12])
def test_what_was_sent_can_be_received(sends, copy):
    vec, fresh = (hurtle.make_vec("cartpole", 6, copy=copy) for _ in range(2))
    vec.async_reset(seed=0)
    for action in actions_of(vec, sends):
        vec.recv()
        vec.send(action)
    fresh.load_state_dict(vec.state_dict())
    got, expected = copied(fresh.recv()), copied(vec.recv())
    assert_same_bits(got, expected)
    assert [part.dtype for part in got[1:4]] == [np.float32, np.bool_, np.bool_]


def test_random_play_goes_on():
    vec, fresh = hurtle.make_vec("cartpole", 5), hurtle.make_vec("cartpole", 5)
    vec.reset(seed=0)
    vec.play(30)
    fresh.load_state_dict(vec.state_dict())
    assert fresh.play(50) == vec.play(50) > 0
    assert_same_bits(fresh.state_dict(), vec.state_dict())


@pytest.mark.parametrize("name", ["cartpole", "snake"])
@pytest.mark.parametrize("received", [1, 2, 3])
def test_a_pool_goes_on_in_the_middle_of_a_round(name, received):
    vec, fresh = (hurtle.make_vec(name, 12, batch_size=4) for _ in range(2))
    actions = actions_of(vec, 80)
    vec.reset(seed=5)
    for action in actions[:20]:
        vec.step(action)
    for _ in range(received - 1):  # the caller holds several batches
        vec.recv()
    fresh.load_state_dict(vec.state_dict())
    for action in actions[20:]:
        assert_same_bits(copied(fresh.step(action)), copied(vec.step(action)))
    assert_same_bits(fresh.state_dict(), vec.state_dict())


def test_a_state_of_something_else_is_refused_and_nothing_changes():
    vec = hurtle.make_vec("cartpole", 4)
    vec.reset(seed=0)
    state = vec.state_dict()

    def refused(target, given, message):
        before = target.state_dict()
        with pytest.raises(HurtleError, match=message):
            target.load_state_dict(given)
        assert_same_bits(target.state_dict(), before)

    refused(hurtle.make_vec("memory", 4), state, "Its env: 'CartPole'; here: 'Memory'")
    refused(hurtle.make_vec("cartpole", 5), state, "Its num_envs: 4; here: 5")
    refused(hurtle.make_vec("cartpole", 4, gravity=1.6, debug=True), state, "Its parameters: .*9.8.*here: .*1.6")
    refused(
        hurtle.make_vec("cartpole", 4, autoreset_mode="NextStep"), state, "Its autoreset_mode: 'SameStep'; here: 'NextStep'"
    )
    refused(vec, {key: array for key, array in state.items() if key != "obs"}, "lacks 'obs'")
    refused(vec, state | {"extra": np.zeros(1)}, "unknown array 'extra'")
    refused(vec, state | {"reward": np.zeros((4, 1))}, "'reward' must be float32.*got float64")
    refused(vec, state | {"envs": state["envs"][:, :-1]}, "'envs' must be uint8")

    pool = hurtle.make_vec("cartpole", 8, batch_size=4)
    pool.reset(seed=0)
    given = pool.state_dict()
    refused(hurtle.make_vec("cartpole", 8, batch_size=2), given, "num_envs=8, batch_size=4; this one has .* batch_size=2")
    refused(hurtle.make_vec("memory", 8, batch_size=4), given, "Batch 0: .*'CartPole'")
    refused(pool, {key: array for key, array in given.items() if key != "1.obs"}, "Batch 1: .*lacks 'obs'")
    refused(pool, state, "a pool has an array 'shape'")


def test_torch_tensors_do_as_well():
    import torch

    vec, fresh = hurtle.make_vec("snake", 3), hurtle.make_vec("snake", 3)
    vec.reset(seed=0)
    fresh.load_state_dict({name: torch.from_numpy(array) for name, array in vec.state_dict().items()})
    assert_same_bits(fresh.state_dict(), vec.state_dict())


SIMULATED = """
import numpy as np
import hurtle

vec, fresh = hurtle.make_vec("cartpole", 3, device="cuda"), hurtle.make_vec("cartpole", 3, device="cuda")
assert vec.agent_observation_space == vec.single_observation_space
assert vec.agent_action_space == vec.single_action_space
vec.reset(seed=0)
for _ in range(15):
    vec.step(np.ones(3, np.int64))
fresh.load_state_dict(vec.state_dict())
for _ in range(5):
    got, expected = fresh.step(np.zeros(3, np.int64)), vec.step(np.zeros(3, np.int64))
    for one, other in zip(got[:4], expected[:4]):
        assert np.array_equal(one, other)
mine, theirs = fresh.state_dict(), vec.state_dict()
assert all(np.array_equal(mine[name], theirs[name]) for name in theirs)
"""


def test_on_a_simulated_gpu(run_simulated):
    run_simulated(SIMULATED)
