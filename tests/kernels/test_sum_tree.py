"""The sum tree beside `np.cumsum`."""

import numpy as np
import pytest

from hurtle.kernels.replay import find_leaf, new_tree, set_leaf


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 100])
def test_draws_are_those_of_the_cumulative_sum(size):
    rng = np.random.default_rng(size)
    priorities, tree = np.zeros(size), new_tree(size)
    for _ in range(200):
        leaf = rng.integers(size)
        priorities[leaf] = rng.choice([0.0, rng.random(), 1e-9, 1e9])
        set_leaf(tree, leaf, priorities[leaf])
        sums = np.cumsum(priorities)
        assert tree[1] == pytest.approx(sums[-1])
        if not sums[-1]:
            continue
        mass = rng.random() * tree[1]
        found = find_leaf(tree, mass)
        assert priorities[found] > 0
        expected = np.searchsorted(sums, mass, side="right")
        near = np.abs(sums - mass).min() < 1e-12 * sums[-1]  # on an edge, rounding decides
        assert near or found == expected


@pytest.mark.parametrize("size", [5, 8])
def test_a_leaf_without_priority_is_never_found(size):
    tree = new_tree(size)
    for leaf in (1, 3):
        set_leaf(tree, leaf, 0.1)
    for mass in (0.0, 0.05, 0.1, np.nextafter(0.2, 0), 0.2, 0.3):  # the last two by rounding
        assert find_leaf(tree, mass) in (1, 3)
    set_leaf(tree, 3, 0.0)
    assert {int(find_leaf(tree, mass)) for mass in np.linspace(0, 0.1, 7)} == {1}
