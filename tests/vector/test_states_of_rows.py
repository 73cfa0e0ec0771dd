"""Saved states of vectors, taken apart and joined: each part goes on as the whole does."""

import numpy as np
import pytest

import hurtle
from hurtle.vector.states_of_rows import joined_states, state_of_envs


@pytest.mark.parametrize("env", ["cartpole", "snake", "InvertedPendulum-v5"])
def test_parts_go_on_as_the_whole(env):
    counts, first = (1, 3, 2), 0
    with hurtle.make_vec(env, 6) as whole, hurtle.make_vec(env, 6) as again:
        whole.reset(seed=4)
        whole.action_space.seed(0)
        for _ in range(7):
            whole.step(whole.action_space.sample())
        saved, actions, parts = whole.state_dict(), whole.action_space.sample(), []
        expected = [np.array(part) for part in whole.step(actions)[:4]]
        for count in counts:
            with hurtle.make_vec(env, count) as vec:
                vec.load_state_dict(state_of_envs(saved, first, count))
                parts.append(vec.state_dict())
                found = vec.step(actions[first : first + count])[:4]
                for one, other in zip(found, expected, strict=True):
                    np.testing.assert_array_equal(one, other[first : first + count])
            first += count
        joined = joined_states(parts)
        for name, values in saved.items():
            np.testing.assert_array_equal(joined[name], values, name)
        again.load_state_dict(joined)
        for one, other in zip(again.step(actions)[:4], expected, strict=True):
            np.testing.assert_array_equal(one, other)


def test_states_of_python_envs_are_lists():
    whole = {"envs": [b"a", b"b", b"c"], "seeds": [1, 2, 3], "over": np.array([True, False, True])}
    parts = [state_of_envs(whole, 0, 1), state_of_envs(whole, 1, 2)]
    assert parts[1]["envs"] == [b"b", b"c"]
    assert parts[1]["over"].tolist() == [False, True]
    joined = joined_states(parts)
    assert joined["over"].tolist() == [True, False, True]
    assert {name: joined[name] for name in ("envs", "seeds")} == {"envs": whole["envs"], "seeds": [1, 2, 3]}
