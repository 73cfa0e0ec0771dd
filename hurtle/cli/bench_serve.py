"""`hurtle bench serve`: load-test an inference server, and print its throughput and latencies.

options → settings (connections, rate) → one measurement each → table, JSON, plot.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from hurtle.cli.options import option
from hurtle.errors import HurtleError

CLOSED, OPEN = (1, 16, 64), (64,)
"""Default numbers of connections."""


def bench_serve(
    address: Annotated[str | None, option("Address of the server.", "HOST:PORT", "127.0.0.1:8000, grpc: 8001")] = None,
    protocol: Annotated[Literal["http", "grpc"], option("http (REST) or grpc.")] = "http",
    model: Annotated[str | None, option("Name of the model.", "NAME", "the server's only one")] = None,
    rows: Annotated[int, option("Rows per request.")] = 1,
    connections: Annotated[
        tuple[int, ...],
        option("Number of connections; several numbers are measured in turn.", "N [N ...]", "1 16 64; with --rate 64"),
    ] = (),
    rate: Annotated[
        tuple[float, ...],
        option("Open loop: requests due per second; several rates are measured in turn.", "R [R ...]", "closed loop"),
    ] = (),
    seconds: Annotated[float, option("Time to measure each setting.")] = 5.0,
    warm_up: Annotated[float, option("Seconds before the measurement starts.")] = 1.0,
    processes: Annotated[int, option("Client processes, for servers that are faster than one.")] = 1,
    encoding: Annotated[Literal["binary", "json"], option("Tensors over http: binary, or JSON numbers.")] = "binary",
    input_file: Annotated[
        str | None,
        option('JSON file with the "inputs" to send, in protocol format; else random numbers.', "FILE", "", name="input"),
    ] = None,
    plot: Annotated[
        str | None, option("Draw the throughput/latency curve to this file (.png); needs hurtle[tracking].", "FILE", "")
    ] = None,
    json_file: Annotated[str | None, option("Write the figures to this file.", "FILE", "", name="json")] = None,
    token: Annotated[str | None, option("Bearer token, if the server requires one.", "TEXT", "")] = None,
) -> None:
    """Load-test an inference server: requests per second and latencies.

    Works with any Open Inference Protocol server. Closed loop: a connection sends its next request when the answer
    to the last one arrives. Open loop (--rate): requests are due at random times, and latency counts from then, even while all
    connections wait for answers. Ctrl-C stops early and shows what was measured.
    """
    import asyncio

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
    split(settings[0], processes)  # raises before anything is sent
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
    """Reject a plot that cannot be drawn, before minutes of measuring."""
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
    """Print what does not fit in the table: early stops, errors, requests without an answer."""
    whole = [result for result in results if not result.stopped]
    if len(whole) < asked:
        part = " and part of the next" if len(results) > len(whole) else ""
        say(f"\nStopped after {len(whole)} of {asked} settings{part}.")
    for result in results:
        for error, count in result.errors.items():
            say(f"{_name(result)}: {count:,} × {error}")
        if result.unanswered:
            say(f"{_name(result)}: {result.unanswered:,} unanswered at the end; their latency is the time they had waited.")


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
