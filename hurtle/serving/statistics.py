"""A model's counts, times and histograms: as Triton's statistics, as Prometheus text, summed over processes."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Any

SECONDS = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
ROWS = tuple(float(1 << k) for k in range(13))
_HISTOGRAMS = {
    "request_seconds": ("Time from a request's arrival to its answer.", SECONDS),
    "queue_seconds": ("Time that a request waited for a lane.", SECONDS),
    "compute_seconds": ("Time of one backend call.", SECONDS),
    "batch_rows": ("Rows of one backend call.", ROWS),
}


class Histogram:
    """Counts of values between bounds."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]):
        self.bounds, self.counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class ModelStatistics:
    """Statistics of one version of a model. Times are in nanoseconds; only the event loop's thread writes."""

    def __init__(self) -> None:
        self.succeeded = self.succeeded_ns = self.failed = self.failed_ns = self.cancelled = 0
        self.queue_ns = self.compute_ns = 0
        self.rows = self.executions = 0
        self.last_ms = 0
        self.measured = self.input_ns = self.output_ns = 0
        """Requests timed by phase, and the times of input and output, which are part of `compute_ns`."""
        self.measures_phases = False
        """Whether the backend times its phases; otherwise statistics leave them out."""
        self.batches: dict[int, list[int]] = {}
        """Rows of a call → number of such calls, and their total time."""
        self.batch_phases: dict[int, list[int]] = {}
        """Rows of a call → number of such calls timed by phase, and their input and output times."""
        self.reasons: dict[str, int] = {}
        self.histograms = {name: Histogram(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}

    def succeed(self, job: Any, now: int) -> None:
        """Count a successful job."""
        queued, total = job.started - job.arrived, now - job.arrived
        self.succeeded += 1
        self.succeeded_ns += total
        self.queue_ns += queued
        self.compute_ns += job.finished - job.started
        self.rows += job.rows
        if job.phases is not None:
            self.measured += 1
            self.input_ns += job.phases[0]
            self.output_ns += job.phases[1]
        self.histograms["request_seconds"].observe(total * 1e-9)
        self.histograms["queue_seconds"].observe(queued * 1e-9)

    def execute(self, job: Any) -> None:
        """Count the backend call of which this job is the first."""
        spent = job.finished - job.started
        self.executions += 1
        self.last_ms = time.time_ns() // 1_000_000
        batch = self.batches.setdefault(job.batch, [0, 0])
        batch[0] += 1
        batch[1] += spent
        if job.phases is not None:
            timed = self.batch_phases.setdefault(job.batch, [0, 0, 0])
            timed[0] += 1
            timed[1] += job.phases[0]
            timed[2] += job.phases[1]
        self.histograms["compute_seconds"].observe(spent * 1e-9)
        self.histograms["batch_rows"].observe(job.batch)

    def fail(self, reason: str, spent_ns: int = 0) -> None:
        """Count a failed request."""
        self.failed += 1
        self.failed_ns += spent_ns
        self.reasons[reason] = self.reasons.get(reason, 0) + 1

    def snapshot(self) -> dict[str, Any]:
        """Everything as plain values, which `add` sums."""
        plain = {name: value for name, value in vars(self).items() if isinstance(value, int)}
        return {
            **plain,
            "reasons": dict(self.reasons),
            "batches": {str(rows): list(values) for rows, values in self.batches.items()},
            "batch_phases": {str(rows): list(values) for rows, values in self.batch_phases.items()},
            "histograms": {name: {"counts": list(h.counts), "total": h.total} for name, h in self.histograms.items()},
        }


def add(one: Any, other: Any, key: str = "") -> Any:
    """The sum of two snapshots; the later of two timestamps."""
    if isinstance(one, dict):
        return {name: add(one.get(name), other.get(name), name) for name in {**one, **other}} if other is not None else one
    if one is None or other is None:
        return one if other is None else other
    if isinstance(one, list):
        return [add(a, b) for a, b in zip(one, other, strict=True)]
    return max(one, other) if key == "last_ms" else one + other


def past_counts(found: dict[str, Any]) -> dict[str, Any]:
    """The snapshot of a dead process without the values that only a living one has."""
    models = {key: {**values, "queued": 0} for key, values in found["models"].items()}
    return {"models": models, "refused": found["refused"]}


def as_triton(name: str, version: str, found: dict[str, Any]) -> dict[str, Any]:
    """A snapshot as an entry of Triton's ModelStatisticsResponse."""

    def duration(count: int, spent: int) -> dict[str, int]:
        return {"count": count, "ns": spent}

    def compute(count: int, spent: int, measured: int, input_ns: int, output_ns: int) -> dict[str, dict[str, int]]:
        """The phases of computing; inputs and outputs only if they are measured."""
        infer = {"compute_infer": duration(count, spent - input_ns - output_ns)}
        if not (found["measures_phases"] or measured):
            return infer
        return {"compute_input": duration(measured, input_ns), **infer, "compute_output": duration(measured, output_ns)}

    return {
        "name": name,
        "version": version,
        "last_inference": found["last_ms"],
        "inference_count": found["rows"],
        "execution_count": found["executions"],
        "inference_stats": {
            "success": duration(found["succeeded"], found["succeeded_ns"]),
            "fail": duration(found["failed"], found["failed_ns"]),
            "queue": duration(found["succeeded"], found["queue_ns"]),
            **compute(found["succeeded"], found["compute_ns"], found["measured"], found["input_ns"], found["output_ns"]),
            "cache_hit": duration(0, 0),
            "cache_miss": duration(0, 0),
        },
        "batch_stats": [
            {
                "batch_size": int(rows),
                **compute(count, spent, *found["batch_phases"].get(rows, (0, 0, 0))),
            }
            for rows, (count, spent) in sorted(found["batches"].items(), key=lambda item: int(item[0]))
        ],
    }


def as_prometheus(
    models: Iterable[tuple[str, str, dict[str, Any]]], others: dict[str, tuple[str, str, float]], refused: dict[str, int]
) -> str:
    """Snapshots (name, version, values) as Prometheus text.

    Args:
        models: The snapshots.
        others: Name → (type, help, value).
        refused: Reason → failures of no model, which have no labels `model` and `version`.
    """
    models = list(models)
    lines: list[str] = []

    def head(name: str, kind: str, text: str) -> str:
        lines.extend((f"# HELP hurtle_{name} {text}", f"# TYPE hurtle_{name} {kind}"))
        return f"hurtle_{name}"

    for name, (kind, text, value) in others.items():
        lines.append(f"{head(name, kind, text)} {value:g}")
    for name, key, text in (
        ("requests_total", "succeeded", "Requests that were answered with a result."),
        ("rows_total", "rows", "Rows in them."),
        ("executions_total", "executions", "Calls of the backend."),
        ("cancelled_total", "cancelled", "Requests whose client went away."),
    ):
        metric = head(name, "counter", text)
        lines += [f"{metric}{_labels(model, version)} {found[key]}" for model, version, found in models]
    metric = head("failures_total", "counter", "Requests that were answered with an error, by reason.")
    lines += [f'{metric}{{reason="{why}"}} {n}' for why, n in sorted(refused.items())]
    for model, version, found in models:
        lines += [f"{metric}{_labels(model, version, reason=why)} {n}" for why, n in sorted(found["reasons"].items())]
    metric = head("queue_length", "gauge", "Requests that wait now.")
    lines += [f"{metric}{_labels(model, version)} {found.get('queued', 0)}" for model, version, found in models]
    for name, (text, bounds) in _HISTOGRAMS.items():
        metric = head(name, "histogram", text)
        for model, version, found in models:
            histogram, below = found["histograms"][name], 0
            for bound, count in zip((*bounds, None), histogram["counts"], strict=True):
                below += count
                at = "+Inf" if bound is None else f"{bound:g}"
                lines.append(f"{metric}_bucket{_labels(model, version, le=at)} {below}")
            lines.append(f"{metric}_sum{_labels(model, version)} {histogram['total']:.9g}")
            lines.append(f"{metric}_count{_labels(model, version)} {below}")
    return "\n".join(lines) + "\n"


def _labels(model: str, version: str, **others: str) -> str:
    pairs = {"model": model, "version": version, **others}
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in pairs.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


_TRITON_REASONS = {"deadline_exceeded": "REJECTED", "cancelled": "CANCELED", "internal": "BACKEND"}
"""Triton's failure reasons by ours; the others are OTHER."""


def as_triton_metrics(models: Iterable[tuple[str, str, dict[str, Any]]]) -> str:
    """Snapshots (name, version, values) as Prometheus text with Triton's names, labels and units."""
    models = list(models)
    lines: list[str] = []

    def metric(name: str, text: str, value: Callable[[dict[str, Any]], int | None], kind: str = "counter") -> None:
        lines.extend((f"# HELP nv_inference_{name} {text}", f"# TYPE nv_inference_{name} {kind}"))
        values = [(model, version, value(found)) for model, version, found in models]
        lines.extend(f"nv_inference_{name}{_labels(model, version)} {n}" for model, version, n in values if n is not None)

    def measured_us(key: str) -> Callable[[dict[str, Any]], int | None]:
        return lambda found: found[key] // 1000 if found["measures_phases"] or found["measured"] else None

    metric("request_success", "Number of successful inference requests, all batch sizes", lambda found: found["succeeded"])
    lines.extend(_triton_failures(models))
    metric("count", "Number of inferences performed (a batch of n counts as n)", lambda found: found["rows"])
    metric("exec_count", "Number of model executions performed", lambda found: found["executions"])
    metric("request_duration_us", "Cumulative inference request duration in microseconds", lambda f: f["succeeded_ns"] // 1000)
    metric("queue_duration_us", "Cumulative inference queuing duration in microseconds", lambda f: f["queue_ns"] // 1000)
    metric("compute_input_duration_us", "Cumulative compute input duration in microseconds", measured_us("input_ns"))
    metric(
        "compute_infer_duration_us",
        "Cumulative compute inference duration in microseconds",
        lambda found: (found["compute_ns"] - found["input_ns"] - found["output_ns"]) // 1000,
    )
    metric("compute_output_duration_us", "Cumulative compute output duration in microseconds", measured_us("output_ns"))
    metric("pending_request_count", "Number of requests awaiting execution now", lambda found: found.get("queued", 0), "gauge")
    return "\n".join(lines) + "\n"


def _triton_failures(models: Sequence[tuple[str, str, dict[str, Any]]]) -> list[str]:
    """Failures by Triton's reasons; a request whose client is gone counts as one, as in Triton."""
    name = "nv_inference_request_failure"
    lines = [f"# HELP {name} Number of failed inference requests, all batch sizes", f"# TYPE {name} counter"]
    for model, version, found in models:
        counts = dict.fromkeys(("REJECTED", "CANCELED", "BACKEND", "OTHER"), 0)
        counts["CANCELED"] = found["cancelled"]
        for reason, count in found["reasons"].items():
            counts[_TRITON_REASONS.get(reason, "OTHER")] += count
        lines += [f"{name}{_labels(model, version, reason=reason)} {count}" for reason, count in counts.items()]
    return lines
