"""benchmarks/mujoco_vector.py: that it runs beside bare physics and its peers, and leaves out what is not installed."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # scripts import each other as neighbours

import mujoco_vector
import record


@pytest.mark.slow
def test_measures_all_in_one_run(capsys, monkeypatch, tmp_path):
    pytest.importorskip("mujoco", reason="needs hurtle[mujoco]")
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")
    monkeypatch.setitem(sys.modules, "envpool", None)  # as if it were not installed
    mujoco_vector.main(["--quick", "--tasks", "InvertedPendulum-v5"])
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.split("\n") if "|" in line]
    rates = {row[1]: row[2] for row in rows if row[0].startswith("Inverted")}
    assert set(rates) == {mujoco_vector.US, mujoco_vector.BARE, *mujoco_vector.PEERS}
    assert [who for who, rate in rates.items() if rate == "left out"] == ["EnvPool"]
    assert not (tmp_path / "results").exists()
