"""The access log is rotated by size: lines are whole, in order, and none but the oldest are lost."""

import fcntl
import json
import threading
from pathlib import Path

import pytest

from hurtle.errors import HurtleError
from hurtle.serving import access_log
from hurtle.serving.access_log import AccessLog


def numbers(path):
    return [json.loads(line)["n"] for line in path.read_text().splitlines()]


def rotated(path):
    return sorted((one for one in path.parent.iterdir() if one != path), key=lambda one: int(one.suffix[1:]))


def test_a_full_log_moves_on_and_the_oldest_go(tmp_path):
    path = tmp_path / "access.jsonl"
    log = AccessLog(str(path), max_bytes=1000, files=3)
    for n in range(200):
        log.write(n=n)
        log.flush()
    log.close()
    old = rotated(path)
    assert [one.name for one in old] == ["access.jsonl.1", "access.jsonl.2", "access.jsonl.3"]
    assert all(one.stat().st_size <= 1000 for one in (path, *old))
    kept = [n for one in (*reversed(old), path) for n in numbers(one)]
    assert kept == list(range(200 - len(kept), 200))
    assert len(kept) > 3 * len(numbers(old[0]))


def test_what_was_there_counts(tmp_path):
    path = tmp_path / "access.jsonl"
    path.write_text('{"n": -1}\n' * 50)
    log = AccessLog(str(path), max_bytes=520, files=1)
    log.write(n=0)
    log.flush()
    log.write(n=1)
    log.close()
    assert numbers(path) == [0, 1]
    assert numbers(tmp_path / "access.jsonl.1") == [-1] * 50


def test_lines_wait_in_a_buffer_and_are_written_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(access_log, "BUFFER", 500)
    path = tmp_path / "access.jsonl"
    log = AccessLog(str(path))
    log.write(n=0)
    assert path.read_text() == ""
    for n in range(1, 100):
        log.write(n=n)
        assert path.read_text().endswith(("}\n", ""))
        assert numbers(path) == list(range(len(numbers(path))))
    log.close()
    assert numbers(path) == list(range(100))


def test_several_writers_share_a_file_and_lose_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("hurtle.serving.access_log.CLOSE_SECONDS", 30.0)  # of waiting for the others
    path = tmp_path / "access.jsonl"
    logs = [AccessLog(str(path), max_bytes=500, files=1000) for _ in range(3)]

    def work(log, first):
        for n in range(first, first + 200):
            log.write(n=n)
            if n % 3 == 0:
                log.flush()
        log.close()

    threads = [threading.Thread(target=work, args=(log, 1000 * n)) for n, log in enumerate(logs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    old = rotated(path)
    found = [n for one in (*reversed(old), path) for n in numbers(one)]
    assert sorted(found) == [1000 * n + m for n in range(3) for m in range(200)]
    for n in range(3):
        assert [one for one in found if one // 1000 == n] == list(range(1000 * n, 1000 * n + 200))
    assert len(old) >= 2  # each of the three writes at least once, and at least 200 lines in all


def test_a_log_that_another_program_moved_or_removed_is_begun_anew(tmp_path):
    path = tmp_path / "access.jsonl"
    log = AccessLog(str(path))
    for n, leave in enumerate((lambda: path.rename(tmp_path / "moved"), path.unlink, lambda: None)):
        log.write(n=n)
        log.flush()
        assert numbers(path) == [n]
        leave()
    log.close()
    assert numbers(tmp_path / "moved") == [0]


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    path, link = tmp_path / "real" / "access.jsonl", tmp_path / "link"
    path.touch()
    link.symlink_to(path)
    log = AccessLog(str(link), max_bytes=60, files=2)
    for n in range(3):
        log.write(n=n)
        log.flush()
    log.close()
    assert link.is_symlink()
    assert numbers(link) == [2]
    assert numbers(tmp_path / "real" / "access.jsonl.1") == [1]


def test_what_is_no_file_is_not_rotated(caplog):
    log = AccessLog("/dev/null", max_bytes=10)
    for n in range(100):
        log.write(n=n)
        log.flush()
    log.close()
    assert Path("/dev/null").is_char_device()
    assert not caplog.records


def test_standard_output_gets_each_line_at_once(capfdbinary):
    log = AccessLog("-", max_bytes=10)
    for n in range(3):
        log.write(n=n)
        assert json.loads(capfdbinary.readouterr().out)["n"] == n
    log.close()


def test_a_log_that_cannot_be_written_is_said_once(tmp_path, caplog):
    with pytest.raises(HurtleError, match="Cannot write the access log"):
        AccessLog(str(tmp_path / "nowhere" / "access.jsonl"))
    folder = tmp_path / "folder"
    folder.mkdir()
    path = folder / "access.jsonl"
    log = AccessLog(str(path))
    path.unlink()
    folder.rmdir()
    for n in range(3):
        log.write(n=n)
        log.flush()
    log.close()
    (record,) = caplog.records
    assert "the access log cannot be written" in record.getMessage()


def test_lines_wait_while_another_program_holds_a_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(access_log, "MOST_WAITING", 3000)
    path = tmp_path / "access.jsonl"
    log = AccessLog(str(path))
    with path.open() as reader:
        fcntl.flock(reader, fcntl.LOCK_EX)
        for n in range(200):
            log.write(n=n)
            log.flush()  # does not block
        assert path.read_text() == ""
        fcntl.flock(reader, fcntl.LOCK_UN)
    log.flush()
    kept = numbers(path)
    assert kept == list(range(len(kept)))
    assert 3000 <= path.stat().st_size < 3100
    log.write(n=200)
    log.close()
    assert numbers(path) == [*kept, 200]
