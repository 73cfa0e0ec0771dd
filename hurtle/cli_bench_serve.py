"""`hurtle bench serve`: loads an inference server and shows how many requests it answers, and how fast."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from hurtle.errors import HurtleError

CLOSED, OPEN = (1, 16, 64), (64,)
"""Connections by default."""


def bench_serve(
    address: Annotated[
        str | None, tyro.conf.arg(metavar="HOST:PORT", help_behavior_hint="(default: 127.0.0.1:8000, grpc: 8001)")
    ] = None,
    protocol: Literal["http", "grpc"] = "http",
    model: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="(default: the server's only one)")] = None,
    rows: int = 1,
    connections: Annotated[
        tuple[int, ...], tyro.conf.arg(metavar="N [N ...]", help_behavior_hint="(default: 1 16 64; with --rate 64)")
    ] = (),
    rate: Annotated[tuple[float, ...], tyro.conf.arg(metavar="R [R ...]", help_behavior_hint="(default: closed loop)")] = (),
    seconds: float = 5.0,
    warm_up: float = 1.0,
    processes: int = 1,
    encoding: Literal["binary", "json"] = "binary",
    input_file: Annotated[str | None, tyro.conf.arg(name="input", metavar="FILE", help_behavior_hint="")] = None,
    plot: Annotated[str | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None,
    json_file: Annotated[str | None, tyro.conf.arg(name="json", metavar="FILE", help_behavior_hint="")] = None,
    token: Annotated[str | None, tyro.conf.arg(metavar="TEXT", help_behavior_hint="")] = None,
) -> None:
    """Load an inference server: requests per second and latencies.

    Works with every server of the Open Inference Protocol. Closed loop: a connection sends its next request when the answer
    came. Open loop (--rate): requests are due at random moments, and latency counts from then, also while all connections
    wait for answers. Ctrl-C ends it early and shows what is known.

    Args:
        address: Of the server.
        protocol: http (REST) or grpc.
        model: Its name.
        rows: In each request.
        connections: How many; several numbers are measured one after the other.
        rate: Open loop: requests per second that are due; several are measured one after the other.
        seconds: How long each setting is measured.
        warm_up: Seconds before that.
        processes: To spread the client over, for servers that are faster than one.
        encoding: Of tensors over http: binary, or JSON numbers.
        input_file: JSON with "inputs" as the protocol has them, to send; random numbers by default.
        plot: Draw the throughput/latency curve here (.png); needs hurtle[tracking].
        json_file: Write the figures here.
        token: For servers that want one.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from hurtle.serving.load.generator import Result, Setting
    from hurtle.serving.load.processes import measure, split
    from hurtle.serving.load.request import Target, parse_address, read_inputs

    host, port = parse_address(address or f"127.0.0.1:{8001 if protocol == 'grpc' else 8000}")
    if plot is not None:
        _check_plot(plot)
    rates: tuple[float | None, ...] = rate or (None,)
    settings = [Setting(n, r, seconds, warm_up) for n in connections or (OPEN if rate else CLOSED) for r in rates]
    split(settings[0], processes)  # refuses before anything is asked
    inputs = read_inputs(Path(input_file)) if input_file is not None else None
    plan = asyncio.run(_planned(Target(host, port, protocol, model or "", token), rows, encoding, inputs))
    results: list[Result] = []
    say = partial(Console().print, highlight=False, markup=False, soft_wrap=True)
    format_ = f", {encoding}" if protocol == "http" else ""
    title = f"{plan.target.model} at {plan.target.address}, {protocol}{format_}, rows per request: {plan.rows}"
    say(title)
    say(_columns("connections", "due/s", "requests/s", "rows/s", "p50 ms", "p90", "p99", "p99.9", "max", "errors"))
    progress = Progress(
        TextColumn("measuring"), BarColumn(), TimeRemainingColumn(), transient=True, console=Console(stderr=True)
    )
    each = seconds + warm_up
    task = progress.add_task("", total=each * len(settings))
    for number, setting in enumerate(settings):
        try:
            with progress:
                done = number * each
                look = lambda elapsed, done=done: progress.update(task, completed=done + min(elapsed, each))  # noqa: E731
                result = measure(plan, setting, processes, look)
        except KeyboardInterrupt:
            break
        results.append(result)
        say(_line(result))
        if result.stopped:
            break
    _finish(results, len(settings), say)
    if json_file is not None and results:
        about = {"address": plan.target.address, "protocol": protocol, "model": plan.target.model, "rows": plan.rows}
        found = {**about, "encoding": encoding if protocol == "http" else "raw", "results": [r.as_dict() for r in results]}
        _write(json_file, json.dumps(found, indent=1) + "\n")
    if plot is not None and results:
        from hurtle.serving.load.plot import plot_curve

        plot_curve(results, Path(plot), title)
        say(f"\nsaved {plot}")
    if results and not any(result.answers for result in results):
        raise HurtleError("No request was answered.")


async def _planned(target: Any, rows: int, encoding: Any, inputs: Any) -> Any:
    from hurtle.serving.load.probe import plan

    return await plan(target, rows, encoding, inputs)


def _check_plot(path: str) -> None:
    """Before minutes of measuring, not after."""
    if not path.endswith((".png", ".svg", ".pdf")):
        raise HurtleError(f"--plot: expected a file that ends with .png, .svg or .pdf, got {path!r}.")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise HurtleError("--plot needs matplotlib: pip install 'hurtle[tracking]'.") from None


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise HurtleError(f"Cannot write {path}: {error.strerror}.") from None


def _finish(results: list[Any], asked: int, say: Any) -> None:
    """What the table has no room for."""
    whole = [result for result in results if not result.stopped]
    if len(whole) < asked:
        part = " and a part of the next" if len(results) > len(whole) else ""
        say(f"\nStopped after {len(whole)} of {asked} settings{part}.")
    for result in results:
        for error, count in result.errors.items():
            say(f"{_name(result)}: {count:,} × {error}")
        if result.unanswered:
            say(f"{_name(result)}: {result.unanswered:,} unanswered at the end; they count with the time they had waited.")


def _name(result: Any) -> str:
    setting = result.setting
    return f"{setting.connections} connections" + ("" if setting.rate is None else f", {setting.rate:g}/s")


def _line(result: Any) -> str:
    setting = result.setting
    return _columns(
        setting.connections,
        "–" if setting.rate is None else f"{setting.rate:,.0f}",
        f"{result.requests_per_second:,.0f}",
        f"{result.rows_per_second:,.0f}",
        *(
            f"{result.latency_ms(q):.3g}" if result.latency_ms(q) < 1000 else f"{result.latency_ms(q):,.0f}"
            for q in (50, 90, 99, 99.9, 100)
        ),
        f"{result.failed:,}",
    )


def _columns(first: Any, *others: Any) -> str:
    return f"{first:<11}" + "".join(f"{cell:>12}" if n < 3 else f"{cell:>9}" for n, cell in enumerate(others))


BenchServe = Annotated[Any, tyro.conf.subcommand(name="serve", constructor=bench_serve)]
