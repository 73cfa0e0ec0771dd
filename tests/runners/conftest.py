"""Shared setup of run tests: no plot at the end of a run, which would take longer than the run itself."""

import pytest


@pytest.fixture(autouse=True)
def no_curve(request, monkeypatch):
    """Unless a test asks for `with_curve`; tests/tracking/test_curves.py checks the plots."""
    if "with_curve" not in request.fixturenames:
        monkeypatch.setattr("hurtle.runners.reporting.plot_run", lambda folder: None)


@pytest.fixture
def with_curve():
    """Enable the curve."""
