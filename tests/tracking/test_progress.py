"""How far something is: lines in a log, a bar on a terminal, nothing if nobody asked."""

from rich.console import Console

from hurtle.tracking import progress as module
from hurtle.tracking.progress import progress_of


def test_a_log_gets_a_line_now_and_then(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(module, "monotonic", lambda: now[0])
    with progress_of("evaluating", 2000) as advance:
        for _ in range(4):
            now[0] += 2.0
            advance(400)
    assert capsys.readouterr().err == "hurtle: evaluating: 1,200 of 2,000 …\n"


def test_a_terminal_gets_a_bar_that_goes_away(monkeypatch, capsys):
    monkeypatch.setattr("rich.console.Console", lambda **words: Console(**words, force_terminal=True, width=80))
    with progress_of("evaluating", 2000) as advance:
        advance(500)
    said = capsys.readouterr().err
    assert "evaluating" in said
    assert "500/2000" in said
    assert said.endswith("\x1b[2K")


def test_nobody_asked(capsys):
    with progress_of("evaluating", 10, wanted=False) as advance:
        advance(10)
    assert capsys.readouterr() == ("", "")
