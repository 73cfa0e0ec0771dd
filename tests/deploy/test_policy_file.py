"""Files that are damaged, cut off, too large or not there are refused by name, whatever their format."""

import os

import numpy as np
import onnx
import pytest
from file_helpers import assert_refused, both, onnx_with, pt2_with, use
from google.protobuf.message import DecodeError

from hurtle.deploy import policy_file
from hurtle.errors import PolicyFileError


@both
def test_the_good_file_is_good(good, put, suffix):
    assert use(put(good[suffix], suffix))


@both
@pytest.mark.parametrize(
    "content", [b"", b"\0", b"Hello, policy.\n" * 100, bytes(5000), b"PK\x03\x04" + bytes(100), b"\x08" * 3000]
)
def test_what_is_no_policy_at_all(put, suffix, content):
    assert_refused(put(content, suffix))


@both
def test_random_bytes(put, suffix):
    rng = np.random.default_rng(0)
    for size in (1, 10, 100, 1000, 10_000):
        assert_refused(put(rng.bytes(size), suffix))


@both
def test_files_that_were_cut_off(good, put, suffix):
    content = good[suffix]
    for length in [*(len(content) * k // 20 for k in range(20)), len(content) - 1]:
        assert_refused(put(content[:length], suffix))


@both
def test_files_with_the_ending_of_another_format(good, put, suffix):
    assert_refused(put(good[".pt2" if suffix == ".onnx" else ".onnx"], suffix))


def flipped(content, place, bit):
    return content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :]


def is_the_same_model(content, other):
    try:
        return onnx.load_from_string(content) == onnx.load_from_string(other)
    except DecodeError:
        return False


def test_any_flipped_bit_of_an_onnx_file_is_found_or_means_nothing(good, put):
    """The tenth byte of a negative number has bits that nobody reads."""
    content, rng, refused = good[".onnx"], np.random.default_rng(0), 0
    for place in rng.integers(0, len(content), 400):
        changed = flipped(content, int(place), int(rng.integers(8)))
        if not is_the_same_model(changed, content):
            assert_refused(put(changed, ".onnx"))
            refused += 1
    assert refused > 390


def test_any_flipped_bit_of_a_card_is_found(good, put):
    for suffix, content in good.items():
        start = content.index(b'{"env"')
        for place in range(start, content.index(b'"format": 1}', start) + 12, 3):
            assert_refused(put(flipped(content, place, place % 8), suffix))


def test_any_flipped_bit_of_a_pt2_file_is_found_or_means_nothing(good, put):
    """An archive has dates and attributes, which nobody reads."""
    content, rng = good[".pt2"], np.random.default_rng(0)
    expected, refused = use(put(content, ".pt2")), 0
    for place in rng.integers(0, len(content), 80):
        path = put(flipped(content, int(place), int(rng.integers(8))), ".pt2")
        try:
            found = use(path)
        except PolicyFileError:
            refused += 1
        else:
            assert found == expected
    assert refused > 30
    weights = content.index(b"weight_0") + 100
    assert_refused(put(flipped(content, weights, 3), ".pt2"))


@both
def test_what_is_no_file(tmp_path, suffix):
    assert_refused(tmp_path / f"none{suffix}", "No such file")
    (tmp_path / f"folder{suffix}").mkdir()
    assert_refused(tmp_path / f"folder{suffix}", "it is not a file")
    (tmp_path / f"loop{suffix}").symlink_to(tmp_path / f"loop{suffix}")
    assert_refused(tmp_path / f"loop{suffix}")


@both
@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(good, put, suffix):
    path = put(good[suffix], suffix)
    path.chmod(0)
    assert_refused(path, "Permission denied")


@both
def test_a_read_that_fails(good, put, suffix, monkeypatch):
    path = put(good[suffix], suffix)

    def fail(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(path), "read_bytes", fail)
    assert_refused(path, "Permission denied")


@both
def test_files_that_are_too_large(good, put, suffix, monkeypatch):
    path = put(good[suffix], suffix)
    monkeypatch.setitem(policy_file.MAX_BYTES, suffix, len(good[suffix]) - 1)
    assert_refused(path, f"it has {len(good[suffix]):,} bytes, and must have 1 to {len(good[suffix]) - 1:,}")


def test_a_new_hash_makes_a_changed_card_good(good, put):
    """What the tests below refuse is refused for what it says, not for its hash."""
    assert use(put(onnx_with(good[".onnx"], lambda card: card.update(steps=7)), ".onnx"))[0][1] == 7
    assert use(put(pt2_with(good[".pt2"], change_card=lambda card: card.update(steps=7)), ".pt2"))[0][1] == 7
