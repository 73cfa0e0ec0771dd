"""Infos of many envs as arrays: the layout of Gymnasium's own vector envs."""

import numpy as np
import pytest
from gymnasium.vector import VectorEnv

from hurtle.vector.infos import merge_infos


def gymnasiums(pairs, size):
    vector = VectorEnv()
    vector.num_envs = size
    infos = {}
    for row, info in pairs:
        infos = vector._add_info(infos, info, row)
    return infos


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        if isinstance(value, dict):
            assert_same(ours[key], value)
        else:
            assert ours[key].dtype == value.dtype, key
            assert ours[key].shape == value.shape, key
            for one, other in zip(ours[key], value, strict=True):
                np.testing.assert_equal(one, other)


def random_info(rng, depth=0):
    makers = {
        "int": lambda: int(rng.integers(100)),
        "float": lambda: float(rng.random()),
        "flag": lambda: bool(rng.random() < 0.5),
        "np32": lambda: np.float32(rng.random()),
        "vector": lambda: rng.random(3),
        "image": lambda: rng.integers(0, 255, (2, 2), np.uint8),
        "text": lambda: f"level {rng.integers(9)}",
        "things": lambda: [1, 2, 3],
        "nothing": lambda: None,
        "nested": lambda: random_info(rng, depth + 1) if depth < 2 else 1.5,
    }
    return {key: make() for key, make in makers.items() if rng.random() < 0.5}


@pytest.mark.parametrize("seed", range(20))
def test_like_gymnasium(seed):
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 9))
    pairs = [(row, random_info(rng)) for row in range(size) if rng.random() < 0.8]
    assert_same(merge_infos(pairs, size), gymnasiums(pairs, size))


def test_full_columns_keep_their_dtype():
    merged = merge_infos([(row, {"x": np.float32(row), "n": row}) for row in range(4)], 4)
    assert merged["x"].dtype == np.float32
    assert merged["n"].tolist() == [0, 1, 2, 3]
    assert merged["_n"].all()


def test_what_does_not_fit_becomes_objects():
    merged = merge_infos([(0, {"x": 1}), (1, {"x": "one"}), (2, {"x": np.zeros(2)})], 4)
    assert merged["x"].tolist()[:2] == [1, "one"]
    assert merged["x"].dtype == object
    assert merged["x"][3] is None
    ragged = merge_infos([(0, {"x": np.zeros(2)}), (1, {"x": np.zeros(3)})], 2)["x"]
    assert [len(entry) for entry in ragged] == [2, 3]
    assert merge_infos([(0, {"x": 2**70}), (1, {"x": 1})], 2)["x"].tolist() == [2**70, 1]
    assert merge_infos([(0, {"x": 1}), (1, {"x": 0.5})], 2)["x"].tolist() == [1.0, 0.5]


def test_nothing():
    assert merge_infos([], 3) == {}
