"""The learning curve: metrics are read whatever a crash left, and the picture shows what is there."""

import json
import math
import sys

import numpy as np
import pytest

from hurtle.errors import HurtleError
from hurtle.tracking.curves import _thinned, plot_run, read_metrics
from hurtle.tracking.run_folder import RunFolder

pytest.importorskip("matplotlib")


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def pixels(path):
    from matplotlib.image import imread

    return imread(path)[:, :, :3]


def test_columns_of_a_file_that_was_cut_off(tmp_path):
    file = tmp_path / "metrics.jsonl"
    write_lines(file, [{"step": 1, "a": None}, {"step": 2, "a": 0.5, "b": 7}])
    file.write_text(file.read_text() + '[1]\n\n{"step": 3, "a": 1')
    found = read_metrics(file)
    assert found["step"].tolist() == [1, 2]
    np.testing.assert_array_equal(found["a"], [np.nan, 0.5])
    np.testing.assert_array_equal(found["b"], [np.nan, 7])


def test_the_picture_shows_curve_evaluations_and_panels(tmp_path):
    run = RunFolder.create(tmp_path, name="run")
    lines = [{"step": 100 * i, "episode_return": 5.0 * i, "entropy": 1 / i, "value_loss": 2.0} for i in range(1, 50)]
    write_lines(run.metrics_file, lines)
    assert plot_run(run) == run.path / "curve.png"
    without = pixels(run.path / "curve.png")
    lines[30] |= {"eval_return": 100.0, "eval_return_low": 20.0, "eval_return_high": 180.0}
    write_lines(run.metrics_file, lines)
    plot_run(str(run.path))
    with_evaluation = pixels(run.path / "curve.png")
    red = np.array([0xD1, 0x49, 0x5B]) / 255

    def reds(picture):
        return int((np.abs(picture - red).max(axis=2) < 0.02).sum())

    assert reds(without) == 0
    assert reds(with_evaluation) > 200
    for line in lines:
        line |= {"approx_kl": 0.01, "policy_loss": 0.0}
    write_lines(run.metrics_file, lines)
    plot_run(run)
    assert pixels(run.path / "curve.png").shape[0] > with_evaluation.shape[0]  # a second row of panels


@pytest.mark.parametrize("lines", [[], [{"step": 1}], [{"step": 1, "episode_return": None, "entropy": None}], [{"other": 1}]])
def test_runs_that_know_nothing_yet(tmp_path, lines):
    run = RunFolder.create(tmp_path, name="run")
    write_lines(run.metrics_file, lines)
    assert pixels(plot_run(run)).size


def test_long_runs_are_averaged_not_cut():
    steps, values = np.arange(10_000.0), np.arange(10_000.0)
    values[::7] = math.nan
    thin_steps, thin = _thinned(steps, values, points=100)
    np.testing.assert_allclose(thin, thin_steps)
    assert len(thin) == 100
    assert thin.mean() == pytest.approx(np.nanmean(values), rel=0.01)


def test_nothing_to_plot_and_nothing_to_plot_with(tmp_path, monkeypatch):
    run = RunFolder.create(tmp_path)
    with pytest.raises(HurtleError, match=r"metrics.jsonl does not exist"):
        plot_run(run)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(HurtleError, match=r'pip install "hurtle\[tracking\]"'):
        plot_run(run)
