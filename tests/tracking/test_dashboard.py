"""What a user sees: frames that fit, plain lines that read well, quiet that is quiet, and a terminal left in order."""

import io
import math
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import timeit
from time import monotonic, sleep

import pytest
from rich.console import Console

from hurtle.errors import UnknownNameError
from hurtle.tracking import dashboard as module
from hurtle.tracking.chart import History, block_chart
from hurtle.tracking.dashboard import LiveDisplay, PlainDisplay, QuietDisplay, make_display
from hurtle.tracking.formatting import count, duration, figure, memory, quantity
from hurtle.tracking.frame import Report, draw

NAN = math.nan
METRICS = {
    "steps": 214_016.0,
    "updates": 209.0,
    "seconds": 17.2,
    "steps_per_second": 12_345.6,
    "episode_return": 187.31,
    "episode_return_best": 500.0,
    "episode_length": 187.3,
    "episode_length_best": 432.0,
    "episodes": 1204.0,
    "policy_loss": -0.01234,
    "value_loss": 12.345,
    "entropy": 0.5123,
    "approx_kl": 0.0081,
    "clip_fraction": 0.123,
    "explained_variance": 0.9812,
    "learning_rate": 2.5e-4,
    "clip_range": 0.2,
    "grad_norm": 0.4821,
}
TIMES = {"time/env": 0.3, "time/inference": 0.25, "time/learn": 0.35, "time/copy": 0.04, "time/other": 0.06}
EVALUATION = {"eval_return": 495.25, "eval_return_low": 490.1, "eval_return_high": 499.3, "eval_length": 495.2}
HUGE = dict.fromkeys(METRICS, -1.234e300) | {"steps": 1.2e11, "steps_per_second": 193.4e6, "grad_norm": math.inf}


def report_of(metrics, total_steps=500_000, points=300, **more):
    report = Report("cartpole · ppo", total_steps, "runs/cartpole-ppo-0", dict(metrics), elapsed=17.2, **more)
    for point in range(points):
        report.returns.add(point * metrics.get("episode_return", NAN))
    return report


def text_of(report, width=80, height=23, colored=True):
    console = Console(width=width, height=height, file=io.StringIO())
    console.print(draw(report, width, height, colored))
    return console.file.getvalue()


# The frame


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
@pytest.mark.parametrize("height", [15, 23, 40])
@pytest.mark.parametrize("metrics", [{}, METRICS, METRICS | EVALUATION, dict.fromkeys(METRICS, NAN), HUGE | EVALUATION])
def test_frames_fit(width, height, metrics):
    shares = {name[5:]: share for name, share in TIMES.items()} if metrics else {}
    usage = {"cpu_percent": 1600.0, "memory": 3e12, "gpu_memory": 31e9, "gpu_memory_total": 143e9, "gpu_percent": 100.0}
    rows = text_of(report_of(metrics, shares=shares, usage=usage), width, height).splitlines()
    assert {len(row) for row in rows} == {min(width, 120)}
    assert rows[0].startswith("╭─ cartpole · ppo")
    assert rows[-1].endswith("─╯")
    if width >= 60:  # narrower ones need more lines for the grid
        assert len(rows) <= height
    assert "nan" not in "".join(rows)


def test_a_frame_says_everything():
    metrics = METRICS | EVALUATION
    text = text_of(report_of(metrics, shares={"env": 0.31, "learn": 0.69}, usage={"cpu_percent": 142.0, "memory": 612e6}))
    flat = re.sub(r"[\s│]+", " ", text)
    for part in (
        "steps 214,016 of 500,000 12.3K steps/s elapsed 0:17 ETA 0:23",
        "return 187.3 best 500.0 length 187.3 longest 432.0 episodes 1,204",
        "evaluation 495.2 95 % 490.1…499.3 length 495.2",
        "policy loss -0.0123 entropy 0.5123 learning rate 2.5e-4",
        "value loss 12.35 KL divergence 0.0081 clip range 0.2000",
        "gradient norm 0.4821 clip fraction 0.1230 explained var. 0.9812",
        "■ env 31 % ■ learn 69 %",
        "cpu 142 % memory 612 MB updates 209",
        "runs/cartpole-ppo-0",
    ):
        assert part in flat, part
    assert " 42 % " in flat


def test_a_first_frame_shows_dashes():
    flat = re.sub(r"[\s│]+", " ", text_of(Report("cartpole · ppo", 1000, elapsed=0.0)))
    assert "steps 0 of 1,000 - steps/s elapsed 0:00 ETA -" in flat
    assert "return - best - length - longest - episodes -" in flat
    assert "policy loss - entropy - " in flat
    assert "no episode has ended yet" in flat


def test_metrics_of_the_user_come_last_and_as_many_as_fit():
    users = {"food_eaten": 12.0, "a_very_long_name_that_does_not_fit": 1.0}
    text = text_of(report_of(METRICS | users))
    assert re.search(r"food eaten +12\.00", text)
    assert re.search(r"a very long \w* ?… +1\.000", text)
    assert "updates" not in text.splitlines()[-2]
    crowded = text_of(report_of(METRICS | {f"metric_{n}": float(n) for n in range(60)}))
    assert len(crowded.splitlines()) <= 23
    shown = len(re.findall(r"metric \d+ ", crowded))
    assert shown > 5
    assert f"and {60 - shown} more" in crowded


def test_the_learner_shows_only_what_it_reports():
    text = text_of(report_of({"steps": 1.0, "policy_loss": 1.0, "entropy": 0.5}))
    assert "policy loss" in text
    assert "clip range" not in text


def test_the_time_bar_is_proportional_and_full():
    shares = {"env": 0.5, "inference": 0.0, "learn": 0.25, "copy": 0.125, "other": 0.125}
    bar = next(row for row in text_of(report_of(METRICS, shares=shares), 84, colored=False).splitlines() if "▒" in row)
    assert [bar.count(glyph) for glyph in "█▓▒░·"] == [40, 0, 20, 10, 10]


@pytest.mark.parametrize(("steps", "shown"), [(499_999, " 99 % "), (500_000, " 100 % "), (600_000, " 100 % "), (0, " 0 % ")])
def test_progress_is_never_rounded_up_to_done(steps, shown):
    assert shown in text_of(report_of(METRICS | {"steps": steps}))


# Numbers and the curve


def test_numbers():
    assert [duration(s) for s in (0.4, 59.6, 3599, 86399, 90_061, NAN, math.inf, -5)] == [
        *("0:00", "1:00", "59:59", "23:59:59", "1d 01:01", "-", "-", "0:00")
    ]
    assert [quantity(x) for x in (0, 999.4, 999.6, 99_960, 1e12, NAN)] == ["0", "999", "1.00K", "100K", "1.00T", "-"]
    assert [figure(x) for x in (-0.5, 9.9999, 999.96, 999_999.4, 1e6, 1e-12, -math.inf)] == [
        *("-0.5000", "10.000", "1,000.0", "999,999", "1.00e6", "1.0e-12", "-inf")
    ]
    assert (count(1234567), memory(1e9), memory(143e9)) == ("1,234,567", "1.0 GB", "143 GB")


def test_history_keeps_the_shape_of_any_length():
    history = History(size=64)
    for point in range(10_000):
        history.add(float(point))
        history.add(NAN)
    columns = history.columns(20)
    assert len(columns) == 20
    assert columns == sorted(columns)
    assert columns[0] == pytest.approx(250, abs=250)
    assert columns[-1] == pytest.approx(9750, abs=250)
    assert len(history._points) <= 64
    short = History()
    short.add(1.0)
    short.add(2.0)
    assert short.columns(20) == [1.0, 2.0]


def test_block_chart():
    assert block_chart([0.0, 0.5, 1.0], rows=2) == ["  █", "▁██"]
    assert block_chart([5.0, 5.0], rows=1) == ["▄▄"]
    assert block_chart([], rows=2) == ["", ""]


# Plain lines


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(module, "monotonic", lambda: now[0])
    return now


def plain(total_steps=500_000):
    console = Console(file=io.StringIO(), width=80)
    display = make_display("plain", "cartpole · ppo", total_steps, console)
    assert isinstance(display, PlainDisplay)
    return display, console.file


def test_plain_lines_read_well_and_are_aligned(clock):
    display, out = plain()
    with display:
        display.start("runs/cartpole-ppo-0")
        display.update(dict.fromkeys(METRICS, NAN) | {"steps": 1024.0, "steps_per_second": 950.0})
        clock[0] += 10
        display.update(METRICS)
        clock[0] += 10
        display.update(METRICS | {"steps": 500_000.0, "episode_return": -1.5} | EVALUATION)
    header, *rows = out.getvalue().splitlines()
    assert header == "cartpole · ppo  500,000 steps  runs/cartpole-ppo-0"
    assert len(rows) == 3
    assert rows[0].startswith("steps   1,024 (  0 %)    950 steps/s  ETA    8:45  return       - (best -)")
    assert rows[1].startswith(
        "steps 214,016 ( 42 %)  12.3K steps/s  ETA    0:23  return   187.3 (best 500.0)    length  187.3  policy loss -0.0123"
    )
    assert rows[2].endswith("evaluation 495.2 (490.1 to 499.3)")
    for word in ("return", "length", "policy loss", "value loss", "entropy", "KL"):
        assert len({row.index(word) for row in rows}) == 1, word
    assert all(ord(character) < 128 for row in rows for character in row)


def test_plain_is_not_chatty(clock):
    display, out = plain(total_steps=1_000_000)
    display.start()
    for step in range(0, 1_000_000, 1000):  # 0.1 % and half a second each
        clock[0] += 0.5
        display.update({"steps": float(step)})
    display.stop()
    assert len(out.getvalue().splitlines()) == 1 + 100 + 1  # header, every 1 % (5 s), the last


def test_plain_at_most_every_two_seconds_at_least_every_minute(clock):
    display, out = plain(total_steps=1000)
    for step in range(0, 1001, 10):  # 1 % every tenth of a second
        clock[0] += 0.1
        display.update({"steps": float(step)})
    display.stop()
    assert len(out.getvalue().splitlines()) == 6
    display, out = plain(total_steps=10**9)
    for step in range(600):
        clock[0] += 1
        display.update({"steps": float(step)})
    assert len(out.getvalue().splitlines()) == 10


def test_plain_shows_every_evaluation_and_the_end_once(clock):
    display, out = plain()
    display.update({"steps": 1.0})
    display.update({"steps": 2.0} | EVALUATION)
    assert "evaluation" not in out.getvalue()
    display.stop()
    display.stop()
    rows = out.getvalue().splitlines()
    assert len(rows) == 2
    assert "evaluation 495.2" in rows[1]


def test_a_log_that_takes_only_ascii():
    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, encoding="ascii", write_through=True))
    display = make_display("auto", "cartpole · ppo", 100, console)
    display.start()
    display.message("größer [bold]")
    assert raw.getvalue().decode().splitlines() == ["cartpole ? ppo  100 steps", "gr??er [bold]"]


CLOSED = """
import signal, sys, time
from hurtle.tracking.dashboard import make_display
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
with make_display({mode!r}, "cartpole", 1000) as display:
    display.every = 0.0
    display.start("runs/x")
    for step in range(20):
        display.update({{"steps": 50.0 * step}})
        display.message("step")
        time.sleep(0.01)
open({file!r}, "w").write("trained")
"""


@pytest.mark.parametrize("mode", ["plain", "live", "quiet"])
def test_a_reader_that_goes_away_does_not_end_training(tmp_path, mode):
    file = tmp_path / "result"
    code = CLOSED.format(mode=mode, file=str(file))
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT if mode == "quiet" else subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "FORCE_COLOR": "1"}, **both) as process:
        process.stdout.readline()
        process.stdout.close()  # as head does
        errors = process.stderr.read() if process.stderr else b""
        assert process.wait(30) == 0
    assert errors == b""
    assert file.read_text() == "trained"


# Choosing


def test_modes(capsys):
    terminal = Console(file=io.StringIO(), force_terminal=True, width=80)
    assert isinstance(make_display("auto", "t", 1, terminal), LiveDisplay)
    assert isinstance(make_display("auto", "t", 1, Console(file=io.StringIO())), PlainDisplay)
    assert isinstance(make_display("auto", "t", 1, Console(file=io.StringIO(), force_terminal=True, width=30)), PlainDisplay)
    quiet = make_display("quiet", "t", 1)
    assert type(quiet) is QuietDisplay
    with quiet:
        quiet.start("about")
        quiet.update(METRICS)
        quiet.message("careful")
    assert capsys.readouterr() == ("", "hurtle: careful\n")
    with pytest.raises(UnknownNameError, match=r"No progress display 'lively'. Did you mean live"):
        make_display("lively", "t", 1)


# Live


def live():
    console = Console(file=io.StringIO(), force_terminal=True, width=80, height=24, color_system=None, legacy_windows=False)
    return LiveDisplay("cartpole · ppo", 500_000, console), console.file


def test_live_draws_messages_above_and_leaves_the_last_frame():
    display, out = live()
    with display:
        display.start("runs/x")
        display.update(METRICS | TIMES)
        display.message("checkpoint [saved]")
        display.update({"steps": 500_000.0, "episode_return": 499.0})
    text = out.getvalue()
    assert "checkpoint [saved]" in text
    last = text[text.rindex("╭") :]
    assert "500,000 of 500,000" in last
    assert "return 499.0" in last
    assert "env 30 %" not in last  # stages that the newest update did not report are gone
    assert "entropy         0.5123" in last  # other metrics stay
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor is back
    display.stop()
    assert out.getvalue() == text


def test_live_draws_by_time_not_by_update_and_its_clock_moves():
    display, out = live()
    began = monotonic()
    with display:
        display.start()
        for _ in range(3000):
            display.update(METRICS | TIMES | {"seconds": 3600.0 - 0.7})
        sleep(1.0)  # a long update
    frames = out.getvalue().count("╭")
    assert 3 <= frames <= 4 * (monotonic() - began) + 3
    assert "elapsed 59:59" in out.getvalue()
    assert "elapsed 1:00:00" in out.getvalue()


def test_an_update_is_cheap():
    display, _ = live()
    metrics = METRICS | TIMES
    assert min(timeit.repeat(lambda: display.update(metrics), number=200, repeat=10)) / 200 < 60e-6


def test_live_smooths_where_the_time_goes():
    display, _ = live()
    display.update({"time/env": 1.0, "time/other": 0.0})
    display.update({"time/env": 0.0, "time/other": 1.0})
    assert display._report.shares == pytest.approx({"env": 0.9, "other": 0.1})


def test_an_exception_leaves_the_terminal_in_order():
    display, out = live()

    def train():
        with display:
            display.start()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    _, shows_cursor, rest = out.getvalue().rpartition("\x1b[?25h")
    assert shows_cursor
    assert rest.count("\x1b[1A\x1b[2K") > 10  # nothing was learned: the frame is erased, and the error stands alone


def test_the_dashboard_says_what_is_done_before_the_first_update():
    display, out = live()
    with display:
        display.status("importing torch")
        assert "importing torch …" in out.getvalue()
        assert "no episode" not in out.getvalue()
        display.status("building")
        assert "building …" in out.getvalue()
        display.start("runs/x")
        before = len(out.getvalue())
        display.update({"steps": 10.0})
        display._live.refresh()
        last = out.getvalue()[before:]
        assert "no episode has ended yet" in last
        assert "building" not in last
    assert out.getvalue().endswith("\x1b[?25h")  # the last frame stays


def test_a_log_says_what_is_done_before_the_first_update():
    console = Console(file=io.StringIO(), width=80)
    with make_display("plain", "cartpole · ppo", 1000, console) as display:
        display.status("importing torch")
        assert console.file.getvalue() == "cartpole · ppo: importing torch …\n"
        display.start("runs/x")
    assert console.file.getvalue().splitlines()[1:] == ["cartpole · ppo  1,000 steps  runs/x"]


def test_ctrl_c_on_a_real_terminal_leaves_it_in_order():
    code = """
import signal, sys, time
from hurtle.tracking.dashboard import make_display
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
with make_display("auto", "cartpole", 1000) as display:
    display.start("runs/x")
    display.update({"steps": 10.0})
    print("ready", file=sys.stderr)
    while True:
        time.sleep(0.1)
"""
    parent, child = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=child, stderr=child, env={**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    )
    os.close(child)
    hang_guard = threading.Timer(300, process.kill)
    hang_guard.start()
    output, interrupted = b"", False
    try:
        while True:  # until the process has closed its end
            try:
                piece = os.read(parent, 65536)
            except OSError:
                break
            if not piece:
                break
            output += piece
            if not interrupted and b"ready" in output:
                process.send_signal(signal.SIGINT)
                interrupted = True
        assert process.wait() != 0
    finally:
        hang_guard.cancel()
        process.kill()
        os.close(parent)
    seen = output.decode(errors="replace")
    assert "cartpole" in seen
    assert "KeyboardInterrupt" in seen
    assert seen.rindex("\x1b[?25h") > seen.rindex("\x1b[?25l")
    assert seen.rindex("KeyboardInterrupt") > seen.rindex("╭")  # the last frame, then the error below it
