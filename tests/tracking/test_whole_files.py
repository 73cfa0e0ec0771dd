"""hurtle/tracking/whole_files.py: files are whole or not there, and links in a run folder lead nowhere."""

import json
import os
import stat

import pytest

from hurtle.tracking.checkpoints import Checkpoints, load_checkpoint
from hurtle.tracking.curves import plot_run
from hurtle.tracking.run_folder import RunFolder
from hurtle.tracking.trackers import JsonlTracker
from hurtle.tracking.whole_files import replacing

MINE = "alias ll='ls -l'\n"


@pytest.fixture
def mine(tmp_path):
    """A file of the user's, outside of the run."""
    file = tmp_path / "mine"
    file.write_text(MINE)
    return file


@pytest.fixture
def run(tmp_path):
    return RunFolder.create(tmp_path, name="run")


def test_a_file_is_replaced_when_it_is_whole(tmp_path):
    file = tmp_path / "file"
    file.write_text("old")
    with replacing(file) as new:
        new.write(b"new")
        new.flush()
        assert file.read_text() == "old"
    assert file.read_text() == "new"

    def fail():
        with replacing(file) as new:
            new.write(b"half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert file.read_text() == "new"
    assert list(tmp_path.iterdir()) == [file]


def test_the_umask_says_who_may_read(tmp_path):
    before = os.umask(0o027)
    try:
        with replacing(tmp_path / "file"):
            pass
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


WRITERS = {
    "config.toml": lambda run: run.write_config({"env": "cartpole"}),
    "about.json": lambda run: run.write_about(),
    "summary.json": lambda run: run.write_summary({}),
    "evaluation.json": lambda run: run.write_evaluation({}),
    "checkpoints/step-000000000007.pt": lambda run: Checkpoints(run.checkpoints).save(7, {}),
    "checkpoints/best.pt": lambda run: Checkpoints(run.checkpoints).save(7, {}, best=True),
    "metrics.jsonl": lambda run: JsonlTracker(run.metrics_file, resume_step=5).finish({}),
    "curve.png": lambda run: (run.metrics_file.write_text('{"step": 1}\n'), plot_run(run)),
}


@pytest.mark.parametrize("name", WRITERS)
def test_nothing_is_written_through_links(run, mine, name):
    file = run.path / name
    links = [file, file.with_name(f".{file.name}.tmp")]
    for link in links:
        link.symlink_to(mine)
    WRITERS[name](run)
    assert mine.read_text() == MINE
    assert file.is_file()
    assert not file.is_symlink()


def test_metrics_are_not_appended_behind_a_link(run, mine, tmp_path):
    for target in (mine, tmp_path / "not there"):
        run.metrics_file.symlink_to(target)
        with pytest.raises(OSError, match="symbolic link"):
            JsonlTracker(run.metrics_file)
        tracker = JsonlTracker(run.metrics_file, resume_step=5)
        tracker.log({"x": 1.0}, 6)
        tracker.finish({})
        assert json.loads(run.metrics_file.read_text()) == {"step": 6, "x": 1.0}
        run.metrics_file.unlink()
    assert mine.read_text() == MINE
    assert not (tmp_path / "not there").exists()


def test_what_a_killed_process_left_is_removed(tmp_path):
    left = tmp_path / ".0123456789abcdef.step-000000000001.pt.tmp"
    left.touch()
    path = Checkpoints(tmp_path).save(2, {"n": 2})
    assert list(tmp_path.iterdir()) == [path]
    assert load_checkpoint(path)["n"] == 2
