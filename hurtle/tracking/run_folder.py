"""`RunFolder`: the self-explanatory folder of one run.

env, algorithm, seed → runs/cartpole-ppo-0-20261116-101500/ with config, provenance, metrics, checkpoints, summary, curve.
Defines the names of the files; other modules write most of them.
"""

from __future__ import annotations

import difflib
import json
import re
import shlex
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hurtle.errors import HurtleError
from hurtle.tracking.json_text import to_json
from hurtle.tracking.provenance import provenance
from hurtle.tracking.toml_text import to_toml
from hurtle.tracking.whole_files import replacing

README = """\
# {name}

A training run of Hurtle on {env}.

| file | contents |
|---|---|
| `config.toml` | every setting; train again with `hurtle train {env} --config {path}/config.toml` |
| `about.json` | provenance: command, git commit, versions, machine, seed, number of learners |
| `metrics.jsonl` | one JSON line per update; `step` is the number of steps so far, null means "unknown" |
| `summary.json` | the result, with the final evaluation (written at the end) |
| `evaluation.json` | the last `hurtle eval` of this run, if there was one |
| `curve.png` | the learning curve |
| `checkpoints/` | the newest few `step-….pt`, and `best.pt` |
| `tensorboard/` | the same metrics: `tensorboard --logdir {path}` |

```
hurtle eval {path}             # many episodes: mean, IQM, 95 % interval
hurtle watch {path}            # watch the policy act
hurtle train --resume {path}   # continue where it stopped
```
"""


class RunFolder:
    """The folder of one run. `create` makes a new one, `open` finds an existing one.

    Attributes:
        path: The folder.
    """

    def __init__(self, path: Path):
        self.path = path

    @classmethod
    def create(
        cls, parent: str | Path = "runs", env: str = "env", algorithm: str = "ppo", seed: int = 0, name: str | None = None
    ) -> RunFolder:
        """Create a folder in `parent`; if the name is taken, even by a concurrent process, -2, -3 … is appended."""
        run = cls(new_folder(parent, env, algorithm, str(seed), name))
        run.checkpoints.mkdir()
        about = {"name": run.path.name, "path": shlex.quote(str(run.path)), "env": shlex.quote(env)}
        write_whole(run.path / "README.md", README.format(**about))
        return run

    @classmethod
    def open(cls, path: str | Path, parent: str | Path = "runs") -> RunFolder:
        """Find an existing run.

        Args:
            path: Its folder, its name in `parent`, or "latest" for the run in `parent` that was started or resumed last.
            parent: The folder of all runs.
        """
        runs = [file.parent for file in sorted(Path(parent).glob("*/config.toml"))]
        if str(path) == "latest":
            if not runs:
                raise HurtleError(f"There is no run in {Path(parent)} yet: start one with `hurtle train cartpole`.")
            return cls(max(runs, key=_last_started))
        for folder in (Path(path), Path(parent) / path):
            if (folder / "config.toml").is_file():
                return cls(folder)
        inside = [file.parent.name for base in (Path(path), Path(parent) / path) for file in sorted(base.glob("*/config.toml"))]
        if Path(path).is_dir() or inside:
            hint = f" It holds {len(inside)} runs: {', '.join(inside[:5])}{' …' * (len(inside) > 5)}" if inside else ""
            raise HurtleError(f"{path} is not a run folder: it has no config.toml.{hint}")
        near = difflib.get_close_matches(Path(path).name, [run.name for run in runs])
        newest = [run.name for run in sorted(runs, key=_last_started, reverse=True)[:5]]
        hint = f"Did you mean {' or '.join(near)}?" if near else f"The newest in {parent}: {', '.join(newest) or 'none yet'}."
        raise HurtleError(f"There is no run {path}. {hint}")

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def metrics_file(self) -> Path:
        """One JSON line per update."""
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        """The folder of TensorBoard's event files."""
        return self.path / "tensorboard"

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write the settings to config.toml; resuming rewrites it, which makes this run the latest."""
        write_whole(self.path / "config.toml", to_toml(config))

    def read_config(self) -> dict[str, Any]:
        """The settings of config.toml."""
        file = self.path / "config.toml"
        try:
            return tomllib.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise HurtleError(f"{file} could not be read: {error.strerror}.") from error
        except ValueError as error:  # not TOML, or not UTF-8
            raise HurtleError(f"{file} is not valid TOML: {error}.") from error

    def write_about(self, extra: Mapping[str, Any] | None = None) -> None:
        """Write the provenance of this run plus `extra` to about.json; a resume is appended to the list "resumed"."""
        file = self.path / "about.json"
        now = {**provenance(), **(extra or {})}
        first = read_json(file)
        if first:
            now = {**first, "resumed": [*first.get("resumed", []), now]}
        write_whole(file, to_json(now, indent=2))

    def write_evaluation(self, evaluation: Mapping[str, Any]) -> None:
        """Write the result of `hurtle eval` to evaluation.json."""
        write_whole(self.path / "evaluation.json", to_json(evaluation))

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write the result of the run to summary.json."""
        write_whole(self.path / "summary.json", to_json(summary, indent=2))

    def read_summary(self) -> dict[str, Any]:
        """The result of the run; empty if it has not ended, or crashed."""
        return read_json(self.path / "summary.json")

    def remove_summary(self) -> None:
        """The run goes on: what it had reached is no longer its result."""
        (self.path / "summary.json").unlink(missing_ok=True)


def _last_started(run: Path) -> int:
    """The time of the last start or resume, in nanoseconds."""
    return (run / "config.toml").stat().st_mtime_ns


def new_folder(parent: str | Path, env: str, algorithm: str, what: str, name: str | None = None) -> Path:
    """Create the folder ENV-ALGORITHM-WHAT-TIME in `parent`, or one called `name`; if it is taken, -2, -3 … is appended."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    stem = _slug(name) if name else f"{_slug(env.rpartition(':')[2])}-{_slug(algorithm)}-{what}-{stamp}"
    if stem in ("", "latest"):
        raise HurtleError(f"A run cannot be named {name!r}: use letters and digits; 'latest' means the newest run.")
    return _new_folder(Path(parent), stem)


def _new_folder(parent: Path, stem: str) -> Path:
    number, path = 1, parent / stem
    while True:
        try:
            path.mkdir(parents=True)  # fails if it exists, so only one of two processes gets it
        except FileExistsError:
            number += 1
            path = parent / f"{stem}-{number}"
        except OSError as error:
            raise HurtleError(
                f"The run folder {path} could not be created: {error.strerror}. Choose another folder for runs."
            ) from error
        else:
            return path


def _slug(text: str) -> str:
    """`text` as part of a file name: "ALE/Pong-v5" is ALE-Pong-v5."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if it is missing or damaged."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_whole(file: Path, text: str) -> None:
    """Write a file atomically."""
    try:
        with replacing(file) as new:
            new.write(text.encode())
    except OSError as error:
        raise HurtleError(f"{file} could not be written: {error.strerror}.") from error
