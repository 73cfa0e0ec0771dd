"""The cache folder: what is removed when it gets too large, what stays, and who may look meanwhile."""

import os
import time

import pytest

from hurtle.native import code_cache
from hurtle.native.code_cache import cache_folder, make_room, used

HOUR = 3600.0


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HURTLE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("HURTLE_CACHE_MIB", "0.01")
    cache_folder.cache_clear()
    yield tmp_path
    cache_folder.cache_clear()


def write(path, hours, size=4096):
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"x" * size)
    os.utime(path, (time.time() - hours * HOUR,) * 2)


def module(folder, name, hours):
    """A module that was written that long ago, with its lock and its compiled code."""
    write(folder / f"{name}.py", hours)
    write(folder / f"{name}.py.run_envs.lock", hours, 0)
    write(folder / "__pycache__" / f"{name}.run_envs-3.py311.1.nbc", hours)


def names(folder):
    return {path.name.partition(".")[0] for path in folder.rglob("*") if path.is_file()} - {""}


def test_what_was_unused_for_the_longest_time_is_removed_until_the_rest_fits(folder):
    for name, hours in (("b", 30), ("a", 90), ("c", 60)):
        module(folder, name, hours)
    make_room()  # 24 KiB, of which 10 may stay
    assert names(folder) == {"b"}


def test_a_folder_is_removed_as_a_whole(folder):
    write(folder / "kernels_16" / "gemm.py", 50, 9000)
    os.utime(folder / "kernels_16", (time.time() - 50 * HOUR,) * 2)
    module(folder, "b", 30)
    make_room()
    assert names(folder) == {"b"}
    assert not (folder / "kernels_16").exists()


def test_what_was_used_within_a_day_stays(folder):
    for name in "abc":
        module(folder, name, 90)
    module(folder, "new", 1)
    for name in "ab":
        with used(name):
            pass
    make_room()
    assert names(folder) == {"a", "b", "new"}


def test_marks_are_renewed_and_leave_the_time_of_the_module_alone(folder):
    """Numba would compile a module again if its file had another time."""
    module(folder, "a", 90)
    before = (folder / "a.py").stat().st_mtime_ns
    write(folder / "a.used", 90, 0)
    with used("a"):
        pass
    assert time.time() - (folder / "a.used").stat().st_mtime < HOUR
    assert (folder / "a.py").stat().st_mtime_ns == before


def test_a_folder_that_fits_is_left_alone(folder, monkeypatch):
    monkeypatch.setenv("HURTLE_CACHE_MIB", "1")
    module(folder, "a", 90)
    make_room()
    assert names(folder) == {"a"}


def test_nothing_is_removed_while_a_module_is_looked_up(folder):
    module(folder, "a", 90)
    module(folder, "b", 90)
    with used("c"):
        make_room()
        assert names(folder) == {"a", "b", "c"}
    make_room()
    assert names(folder) == {"b", "c"} or names(folder) == {"a", "c"}


@pytest.mark.parametrize("size", ["a lot", ""])
def test_a_size_that_is_no_number_means_the_default(folder, monkeypatch, size):
    monkeypatch.setenv("HURTLE_CACHE_MIB", size)
    assert code_cache._most_bytes() == code_cache.MOST_MIB * 2**20


def test_a_folder_without_write_permission_is_no_error(folder, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError

    module(folder, "a", 90)
    monkeypatch.setattr("pathlib.Path.touch", refuse)
    monkeypatch.setattr("pathlib.Path.unlink", refuse)
    with used("a"):
        pass
    make_room()
    assert "a" in names(folder)
