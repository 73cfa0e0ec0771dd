"""The run folders of a population's members: how far each is, and copying one's state to another so that a kill loses nothing.

newest checkpoint of the source → staged beside the members → (the decision is written) → the member's only checkpoint. Every
step can be repeated. Knows checkpoints as files: it neither reads them nor imports torch.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

from hurtle.errors import HurtleError
from hurtle.experiments.populations.lineage import Entry
from hurtle.tracking.run_folder import README, RunFolder, write_whole

_CONFIG = "settings-of-source.toml"  # not config.toml, which would make it a run
_STAGED = re.compile(r"\.member-(\d+)-at-(\d+)")


def member_folder(folder: Path, member: int) -> Path:
    """The run folder of a member."""
    return folder / f"member-{member}"


def saved_steps(run: Path) -> int:
    """Steps at a run's newest checkpoint; 0 if there is none."""
    newest = _newest(run)
    return _steps(newest) if newest is not None else 0


def stage(folder: Path, entries: list[Entry]) -> None:
    """Put aside what members are about to copy, before the decision is written: their sources will train on.

    Raises:
        HurtleError: A file cannot be written.
    """
    for entry in entries:
        if entry.copied_from is None:
            continue
        source, staged = member_folder(folder, entry.copied_from), _staged(folder, entry.member, entry.generation)
        newest = _newest(source)
        assert newest is not None, f"{source} has a score and no checkpoint"
        shutil.rmtree(staged, ignore_errors=True)
        try:
            staged.mkdir()
            for file in (newest, newest.with_name("best.pt")):
                if file.is_file():
                    _link(file, staged / file.name)
            _link(source / "config.toml", staged / _CONFIG)
        except OSError as error:
            raise HurtleError(f"{staged} could not be written: {error.strerror}.") from None


def adopt(folder: Path, generation: int) -> None:
    """Give members what was put aside for them at this comparison; drop what was meant for a later one, never decided.

    Raises:
        HurtleError: A file cannot be written.
    """
    for staged in sorted(folder.glob(".member-*-at-*")):
        if (found := _STAGED.fullmatch(staged.name)) is None:
            continue
        if int(found[2]) == generation:
            try:
                _adopt(member_folder(folder, int(found[1])), staged)
            except OSError as error:
                raise HurtleError(f"{folder} could not be written: {error.strerror}.") from None
        shutil.rmtree(staged)


def set_log_aside(folder: Path, member: int, generation: int) -> None:
    """Rename the log of a member that failed, so that the next failure is not explained by it."""
    log = member_folder(folder, member).with_name(f"member-{member}.log")
    if log.is_file():
        log.replace(log.with_name(f"member-{member}-generation-{generation}.log"))


def summary_of(run: Path) -> dict[str, Any]:
    """The summary of a run; empty if it has none."""
    return RunFolder(run).read_summary()


def _adopt(run: Path, staged: Path) -> None:
    checkpoints = run / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    if not (run / "config.toml").is_file():  # it failed before it had begun
        _link(staged / _CONFIG, run / "config.toml")
        about = {"name": run.name, "path": shlex.quote(str(run)), "env": shlex.quote(RunFolder(run).read_config()["env"])}
        write_whole(run / "README.md", README.format(**about))
    given = [file for file in staged.iterdir() if file.suffix == ".pt"]
    for file in given:
        _link(file, checkpoints / file.name)
    for file in checkpoints.glob("*.pt"):
        if file.name not in {other.name for other in given}:
            file.unlink()


def _link(source: Path, target: Path) -> None:
    """The same file in another place, without copying its bytes where that is possible: files are replaced, never changed."""
    part = target.with_name(f".{target.name}.tmp")
    part.unlink(missing_ok=True)
    try:
        os.link(source, part)
    except OSError:
        with source.open("rb") as file, part.open("xb") as new:
            shutil.copyfileobj(file, new)
            new.flush()
            os.fsync(new.fileno())
    part.replace(target)
    part.unlink(missing_ok=True)  # renaming one name of a file to another name of it does nothing


def _staged(folder: Path, member: int, generation: int) -> Path:
    return folder / f".member-{member}-at-{generation}"


def _newest(run: Path) -> Path | None:
    return max((run / "checkpoints").glob("step-*.pt"), key=_steps, default=None)


def _steps(checkpoint: Path) -> int:
    digits = checkpoint.stem.partition("-")[2]
    return int(digits) if digits.isdecimal() else 0
