"""Run folders: unique names, settings that come back equal, provenance that never fails, finding the latest."""

import json
import math
import os
import subprocess
import tomllib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import hurtle
from hurtle.errors import HurtleError
from hurtle.tracking.json_text import to_json
from hurtle.tracking.provenance import git_state
from hurtle.tracking.run_folder import RunFolder
from hurtle.tracking.toml_text import to_toml

ODD_STRINGS = [
    "",
    " ",
    'a "quoted" word',
    "back\\slash\\n",
    "line\nbreak\r\n\ttab",
    "'''\"\"\"",
    "\x00\x01\x1f\x7f\x80",
    "ünïcödé ☃ 🐢 \u2028",
    "# not a comment",
    "[not.a.table]",
    "a = 1",
    "C:\\new\\users",
]


def test_names_tell_env_algorithm_and_seed(tmp_path):
    run = RunFolder.create(tmp_path / "runs", env="ALE/Pong-v5", algorithm="a2c", seed=7)
    assert run.path.name.startswith("ALE-Pong-v5-a2c-7-20")
    assert run.checkpoints.is_dir()
    assert RunFolder.create(tmp_path, env="some/where/my_env.py:MyEnv").path.name.startswith("MyEnv-ppo-0-20")
    assert RunFolder.create(tmp_path, name="my run/../x").path == tmp_path / "my-run-..-x"
    readme = (run.path / "README.md").read_text()
    assert f"hurtle train --resume {run.path}" in readme
    assert f"hurtle eval {run.path}" in readme


def test_folders_are_unique_when_made_at_once(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        runs = list(pool.map(lambda _: RunFolder.create(tmp_path, env="cartpole", name="same"), range(40)))
    assert {run.path.name for run in runs} == {"same", *(f"same-{n}" for n in range(2, 41))}


@pytest.mark.parametrize("name", ["latest", "///", ".."])
def test_impossible_names(tmp_path, name):
    with pytest.raises(HurtleError, match="cannot be named"):
        RunFolder.create(tmp_path, name=name)


def test_parent_that_is_a_file(tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(HurtleError, match="could not be created"):
        RunFolder.create(tmp_path / "runs", name="x")


def test_config_comes_back_equal(tmp_path):
    config = {
        "env": "cartpole",
        "total_steps": 10**18,
        "negative": -3,
        "learning_rate": 2.5e-4,
        "tiny": 1e-300,
        "huge": 1e300,
        "whole": 3.0,
        "big": 1e16,
        "third": 1 / 3,
        "reward_clip": math.inf,
        "low": -math.inf,
        "compile": True,
        "anneal": False,
        "hidden_sizes": [64, 64],
        "empty": [],
        "nested": [[1, 2], ["a", 0.5], []],
        "odd": ODD_STRINGS,
        "env_parameters": {"gravity": 1.6, "odd key": "x", "": 1, "list": [True], 'qu"ote': 2, "ü": 3},
        "no_parameters": {},
        **{text: text for text in ODD_STRINGS},
    }
    run = RunFolder.create(tmp_path)
    run.write_config(config)
    found = run.read_config()
    assert found == config
    assert [type(found[key]) for key in ("whole", "big", "total_steps", "compile")] == [float, float, int, bool]
    assert not list(run.path.glob(".*"))


def test_toml_of_what_tomllib_cannot_say_itself():
    found = tomllib.loads(to_toml({"nan": math.nan, "none": None, "sizes": (64, 64), "n": np.int64(3), "x": np.float32(0.5)}))
    assert math.isnan(found.pop("nan"))
    assert found == {"sizes": [64, 64], "n": 3, "x": 0.5}
    assert tomllib.loads(to_toml({"first": {"a": 1}, "b": 2})) == {"first": {"a": 1}, "b": 2}  # keys stay out of the table
    with pytest.raises(HurtleError, match=r"setting env_parameters.policy cannot be written.*got object"):
        to_toml({"env_parameters": {"policy": object()}})
    with pytest.raises(HurtleError, match="not valid Unicode"):
        to_toml({"name": "\ud800"})


def test_config_that_cannot_be_read(tmp_path):
    run = RunFolder.create(tmp_path)
    with pytest.raises(HurtleError, match=r"config.toml could not be read"):
        run.read_config()
    (run.path / "config.toml").write_text("a = ")
    with pytest.raises(HurtleError, match=r"config.toml is not valid TOML"):
        run.read_config()


def test_open_finds_by_path_by_name_and_latest(tmp_path):
    with pytest.raises(HurtleError, match="no run in"):
        RunFolder.open("latest", tmp_path)
    for age, name in enumerate(["newest", "zebra", "alpha"]):
        run = RunFolder.create(tmp_path, name=name)
        run.write_config({"env": name})
        os.utime(run.path / "config.toml", (1000 - age, 1000 - age))
    (tmp_path / "not-a-run").mkdir()
    assert RunFolder.open("latest", tmp_path).path.name == "newest"
    RunFolder.open("zebra", tmp_path).write_config({"env": "zebra"})  # as resuming does
    assert RunFolder.open("latest", tmp_path).path.name == "zebra"
    assert RunFolder.open(tmp_path / "alpha").read_config() == {"env": "alpha"}
    with pytest.raises(HurtleError, match=r"There is no run zebar. Did you mean zebra"):
        RunFolder.open("zebar", tmp_path)
    for age in range(7):
        (tmp_path / f"run{age}").mkdir()
        (tmp_path / f"run{age}" / "config.toml").touch()
        os.utime(tmp_path / f"run{age}" / "config.toml", (1e10 - age, 1e10 - age))
    with pytest.raises(HurtleError, match=r"There is no run xyz. The newest in .*: run0, run1, run2, run3, run4\.$"):
        RunFolder.open("xyz", tmp_path)
    with pytest.raises(HurtleError, match=r"There is no run xyz. The newest in .*: none yet\."):
        RunFolder.open("xyz", tmp_path / "alpha")
    with pytest.raises(HurtleError, match=r"not a run folder: it has no config.toml"):
        RunFolder.open(tmp_path / "not-a-run")


def test_about_tells_where_a_run_comes_from(tmp_path, monkeypatch):
    run = RunFolder.create(tmp_path)
    monkeypatch.setattr("sys.argv", ["/somewhere/hurtle/__main__.py", "train", "my env.py:E"])
    run.write_about({"seed": 3})
    first = json.loads((run.path / "about.json").read_text())
    assert first["command"] == "python -m hurtle train 'my env.py:E'"
    assert first["seed"] == 3
    assert first["versions"]["hurtle"] == hurtle.__version__
    assert first["versions"]["numpy"] == np.__version__
    assert first["machine"]["cores"] == os.cpu_count()
    run.write_about({"seed": 4})
    again = json.loads((run.path / "about.json").read_text())
    assert [again["seed"], again["resumed"][0]["seed"]] == [3, 4]
    run.write_about()
    assert len(json.loads((run.path / "about.json").read_text())["resumed"]) == 2


def test_git_commit_of_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    assert git_state() is None
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    try:
        subprocess.run(["git", "init", "-q", "-b", "trunk"], check=True)
    except FileNotFoundError:
        pytest.skip("no git here")
    (tmp_path / "code.py").write_text("1")
    subprocess.run(["git", "add", "code.py"], check=True)
    subprocess.run(["git", *identity, "commit", "-q", "--no-verify", "-m", "first"], check=True)
    state = git_state()
    assert len(state["commit"]) == 40
    assert (state["branch"], state["dirty"]) == ("trunk", False)
    (tmp_path / "code.py").write_text("2")
    assert git_state()["dirty"] is True


def test_no_git_is_no_failure(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state() is None
    run = RunFolder.create(tmp_path)
    run.write_about()
    assert json.loads((run.path / "about.json").read_text())["git"] is None


def test_summary_is_plain_json(tmp_path):
    run = RunFolder.create(tmp_path)
    run.write_summary(
        {"mean_return": np.float32(1.5), "best": math.nan, "returns": np.arange(3), "path": run.path, "n": (1, math.inf)}
    )
    found = json.loads((run.path / "summary.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert found == {"mean_return": 1.5, "best": None, "returns": [0, 1, 2], "path": str(run.path), "n": [1, None]}
    assert to_json({"a": True}) == '{"a": true}\n'
