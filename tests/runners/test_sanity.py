"""`hurtle sanity` passes envs that were learned, and explains failures for the others."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from hurtle.envs.registry import native_class
from hurtle.errors import UnknownNameError
from hurtle.runners import sanity
from hurtle.runners.sanity import SUITE, run_sanity


def console():
    return Console(file=io.StringIO(), width=120)


def test_the_whole_suite_has_a_best_return():
    assert set(SUITE) == {"bandit", "memory", "password", "squared", "stochastic"}
    for name in SUITE:
        assert native_class(name)().best_return == 1.0


def test_all_pass(monkeypatch):
    monkeypatch.setattr(sanity, "_score", lambda *_: 0.95)
    out = console()
    assert run_sanity(console=out)
    text = out.file.getvalue()
    assert text.count("PASS") == 5
    assert "FAIL" not in text
    assert "0.90" in text
    assert "0.950" in text


def test_a_failure_says_what_it_means(monkeypatch):
    monkeypatch.setattr(sanity, "_score", lambda name, *_: 0.5 if name == "memory" else 0.899 if name == "bandit" else 1.0)
    out = console()
    assert not run_sanity(console=out)
    text = out.file.getvalue()
    assert (text.count("PASS"), text.count("FAIL")) == (3, 2)
    assert "memory: recurrence" in text
    assert "bandit: no learning signal" in text
    assert "squared:" not in text


def test_a_log_gets_one_line_as_each_env_begins_and_ends(monkeypatch):
    out = console()
    begun = []
    monkeypatch.setattr(sanity, "_score", lambda name, *_: begun.append(out.file.getvalue()) or 1.0)
    assert run_sanity(envs=["bandit", "squared"], console=out)
    assert "bandit" in begun[0]
    assert begun[0].endswith("training …\n")
    lines = out.file.getvalue().splitlines()
    assert [line.split() for line in lines[:3:2]] == [
        ["env", "needed", "score", "seconds"],
        ["bandit", "0.90", "1.000", "0.0", "PASS"],
    ]
    assert lines[-1] == "All passed."


def test_a_terminal_gets_a_table(monkeypatch):
    monkeypatch.setattr(sanity, "_score", lambda *_: 1.0)
    out = Console(file=io.StringIO(), width=120, force_terminal=True)
    assert run_sanity(envs=["bandit"], console=out)
    assert "PASS" in out.file.getvalue()
    assert out.file.getvalue().endswith("\x1b[?25hbandit passed.\n")


def test_some_envs(monkeypatch):
    monkeypatch.setattr(sanity, "_score", lambda *_: 1.0)
    out = console()
    assert run_sanity(envs=["password"], console=out)
    assert "bandit" not in out.file.getvalue()
    with pytest.raises(UnknownNameError, match="Did you mean password"):
        run_sanity(envs=["pasword"])


def test_bandit_learns():
    assert run_sanity(envs=["bandit"], console=console())


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_the_suite_learns(seed):
    assert run_sanity(seed=seed, console=console())


@pytest.mark.parametrize("why", ["Ctrl-C", "SIGTERM"])
def test_what_was_stopped_has_not_failed(monkeypatch, why):
    monkeypatch.setattr("hurtle.runners.training.train", lambda *_, **__: SimpleNamespace(stopped_by=why, path=None))
    out = console()
    with pytest.raises(KeyboardInterrupt):
        run_sanity(["bandit", "memory"], console=out)
    assert "FAIL" not in out.file.getvalue()
