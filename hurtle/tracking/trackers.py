"""Trackers record metrics: metrics.jsonl always; TensorBoard, Weights & Biases and MLflow behind the same `Tracker` protocol.

metrics after every update → tracker.log → file or service; `finish` at the end. A failing tracker never ends a run.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from time import monotonic, time
from typing import Any, Protocol

from hurtle.errors import HurtleError, UnknownNameError, did_you_mean
from hurtle.tracking.json_text import to_json
from hurtle.tracking.run_folder import RunFolder
from hurtle.tracking.whole_files import open_without_links, replacing


class Tracker(Protocol):
    """Records metrics during training and the result at the end."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record the metrics after `step` steps; NaN means "unknown"."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Record the result of the run; nothing is logged afterwards."""


class JsonlTracker:
    """Writes one JSON line per `log` and flushes it, so that a crash leaves a readable file.

    Args:
        path: The file. A new run overwrites it.
        resume_step: Append to an existing file after dropping its lines beyond this step, which will be trained again.
    """

    def __init__(self, path: str | Path, resume_step: int | None = None):
        path = Path(path)
        if resume_step is not None:
            _keep_until(path, resume_step)
        mode = "w" if resume_step is None else "a"
        self._file = open(path, mode, encoding="utf-8", opener=open_without_links)  # noqa: SIM115 (finish closes it)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Append one line: `step`, then the metrics."""
        self._file.write(to_json({"step": step, **metrics}))
        self._file.flush()

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Close the file."""
        self._file.close()


class TensorBoardTracker:
    """TensorBoard event files. Needs the extra `tracking`.

    Args:
        folder: The folder of the event files.
        resume_step: Hide what the run logged beyond this step before it was resumed.
    """

    def __init__(self, folder: str | Path, resume_step: int | None = None):
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise _missing("TensorBoard", "tracking") from error
        self._event, self._summary = event_pb2, summary_pb2
        self._writer = EventFileWriter(str(folder), flush_secs=10)
        if resume_step is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._writer.add_event(event_pb2.Event(wall_time=time(), step=resume_step + 1, session_log=start))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write one event with all known metrics, grouped as episode/, eval/, train/ and time/."""
        values = [self._summary.Summary.Value(tag=_tag(name), simple_value=x) for name, x in _known(metrics).items()]
        summary = self._summary.Summary(value=values)
        self._writer.add_event(self._event.Event(wall_time=time(), step=step, summary=summary))

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Flush and close the file."""
        self._writer.close()


class WandbTracker:
    """Weights & Biases. Needs the extra `wandb`; WANDB_MODE=offline and its other variables work as usual.

    Args:
        project: The project; WANDB_PROJECT takes precedence.
        name: The name and id of the run, so that a resumed run continues the same one.
        config: The settings.
        folder: The folder of its local files.
    """

    def __init__(self, project: str, name: str, config: Mapping[str, Any], folder: str | Path | None = None):
        try:
            import wandb
        except ImportError as error:
            raise _missing("Weights & Biases", "wandb") from error
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", project),
            name=name,
            id=name,
            resume="allow",
            config=dict(config),
            dir=None if folder is None else str(folder),
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log all known metrics."""
        self._run.log(_known(metrics), step=step)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Set the summary and end the run."""
        self._run.summary.update(dict(summary))
        self._run.finish()


class MlflowTracker:
    """MLflow. Needs the extra `mlflow`; MLFLOW_TRACKING_URI and its other variables work as usual.

    Args:
        experiment: The experiment; MLFLOW_EXPERIMENT_NAME takes precedence.
        name: The name of the run.
        config: The settings, logged as parameters.
    """

    def __init__(self, experiment: str, name: str, config: Mapping[str, Any]):
        try:
            import mlflow
        except ImportError as error:
            raise _missing("MLflow", "mlflow") from error
        self._mlflow = mlflow
        mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", experiment))
        mlflow.start_run(run_name=name)
        mlflow.log_params({key: str(value) for key, value in config.items()})

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log all known metrics."""
        self._mlflow.log_metrics(_known(metrics), step=step)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Log the numbers of the result as summary/… and end the run."""
        numbers = {name: x for name, x in summary.items() if isinstance(x, (int, float))}
        self._mlflow.log_metrics({f"summary/{name}": x for name, x in _known(numbers).items()})
        self._mlflow.end_run()


def make_trackers(
    names: Iterable[str],
    folder: RunFolder,
    config: Mapping[str, Any],
    resume_step: int | None = None,
    warn: Callable[[str], None] | None = None,
) -> list[Tracker]:
    """metrics.jsonl and the trackers in `names`, each guarded: if one fails, the user is warned and training continues.

    Args:
        names: Any of tensorboard, wandb and mlflow; jsonl is always included.
        folder: The folder of the run; its name is the name of the run everywhere.
        config: The settings, for trackers that show them.
        resume_step: The step from which the run is resumed, or None.
        warn: Called with a warning for the user, such as a display's `message`; None prints to standard error.

    Raises:
        UnknownNameError: There is no such tracker.
        HurtleError: W&B or MLflow was requested and is not installed. (TensorBoard, a default, is skipped instead.)
    """
    say = warn or _to_stderr
    name = folder.path.name
    makers: dict[str, tuple[Callable[[], Tracker], float]] = {  # with the minimum seconds between two logs
        "jsonl": (lambda: JsonlTracker(folder.metrics_file, resume_step), 0.0),
        "tensorboard": (lambda: TensorBoardTracker(folder.tensorboard, resume_step), 0.25),
        "wandb": (lambda: WandbTracker("hurtle", name, config, folder.path), 1.0),
        "mlflow": (lambda: MlflowTracker("hurtle", name, config), 2.0),
    }
    found: list[Tracker] = []
    for wanted in dict.fromkeys(("jsonl", *names)):
        if wanted not in makers:
            raise UnknownNameError(f"No tracker {wanted!r}. {did_you_mean(wanted, makers)}")
        make, every = makers[wanted]
        try:
            found.append(_Guarded(wanted, make(), every, say))
        except HurtleError as error:  # not installed
            if wanted != "tensorboard":
                raise
            say(f"No TensorBoard files: {error}")
        except Exception as error:  # not logged in, no network …
            say(f"The tracker {wanted} did not start; training continues without it: {error}")
    return found


class _Guarded:
    """A tracker that never raises, and that is called at a limited rate.

    Evaluations and the last metrics are always logged. After three failures in a row the tracker is not called again.
    """

    def __init__(self, name: str, tracker: Tracker, every: float, say: Callable[[str], None]):
        self._name, self._tracker, self._every, self._say = name, tracker, every, say
        self._failures, self._warned = 0, False
        self._logged_at = -math.inf
        self._held: tuple[Mapping[str, float], int] | None = None

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        now = monotonic()
        if now - self._logged_at < self._every and not any(name.startswith("eval_") for name in metrics):
            self._held = (metrics, step)
            return
        self._logged_at, self._held = now, None
        self._attempt(self._tracker.log, metrics, step)

    def finish(self, summary: Mapping[str, Any]) -> None:
        if self._held is not None:
            self._attempt(self._tracker.log, *self._held)
            self._held = None
        self._attempt(self._tracker.finish, summary)

    def _attempt(self, method: Callable[..., None], *arguments: Any) -> None:
        if self._failures >= 3:
            return
        try:
            method(*arguments)
            self._failures = 0
        except Exception as error:
            self._failures += 1
            if not self._warned:
                self._warned = True
                self._say(f"The tracker {self._name} failed; training continues: {error}")


def _keep_until(path: Path, step: int) -> None:
    """Drop the lines beyond `step`, and any truncated by a crash."""
    kept = []
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    for line in text.splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            if json.loads(line)["step"] <= step:
                kept.append(f"{line}\n")
    with replacing(path) as file:
        file.write("".join(kept).encode())


def _known(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: float(x) for name, x in metrics.items() if math.isfinite(x)}


def _tag(name: str) -> str:
    if "/" in name:
        return name
    if name.startswith("eval_"):
        return f"eval/{name.removeprefix('eval_')}"
    return f"episode/{name}" if name.startswith("episode") else f"train/{name}"


def _missing(what: str, extra: str) -> HurtleError:
    return HurtleError(f'{what} is not installed: pip install "hurtle[{extra}]".')


def _to_stderr(text: str) -> None:
    print(f"hurtle: {text}", file=sys.stderr)
