"""A user's algorithm, by name and as a class: settings, resuming, exporting, and untrusted code in files."""

import shutil
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pytest
import torch

import hurtle
from hurtle.algorithms.algorithm import AlgorithmConfig, algorithm_name, algorithm_names, find_algorithm, short_name
from hurtle.algorithms.ppo_config import PPOConfig
from hurtle.cli import main
from hurtle.contracts import Learner, Weights
from hurtle.errors import HurtleError, TrustError, UnknownNameError
from hurtle.ranges import positive
from hurtle.references import load_reference
from hurtle.runners.settings import check_settings
from hurtle.tracking.checkpoints import Checkpoints, load_checkpoint

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_algorithm.py"
NAME = f"{EXAMPLE}:Reinforce"
HOW = {"num_envs": 8, "num_steps": 16, "progress": "quiet", "trackers": (), "eval_episodes": 2, "threads": 1}


def weights_of(run):
    return load_checkpoint(Checkpoints(run.path / "checkpoints").latest())["policy"]


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def test_the_example_is_short():
    assert len(EXAMPLE.read_text().splitlines()) <= 80


def test_by_name_and_as_a_class(tmp_path):
    named = hurtle.train("cartpole", algorithm=NAME, total_steps=256, runs=tmp_path, name="named", **HOW)
    cls = load_reference(NAME)
    passed = hurtle.train("cartpole", algorithm=cls, total_steps=256, runs=tmp_path, name="passed", **HOW)
    assert same(weights_of(named), weights_of(passed))
    assert "own_algorithm.py:Reinforce" in (named.path / "config.toml").read_text()


def test_it_learns(tmp_path):
    run = hurtle.train(
        "bandit", algorithm=NAME, total_steps=10_000, learning_rate=0.02, runs=tmp_path, **{**HOW, "eval_episodes": 20}
    )
    assert run.mean_return > 0.9


def test_a_resumed_run_equals_one_that_was_never_stopped(tmp_path):
    how = {**HOW, "reward_mode": "normalize"}  # its statistics must be saved, too
    whole = hurtle.train("cartpole", algorithm=NAME, total_steps=512, runs=tmp_path, name="whole", **how)

    def halfway(trainer):
        return trainer.steps < 256

    # The learning rate is annealed over total_steps, so the first part must know the full number.
    part = hurtle.train("cartpole", algorithm=NAME, total_steps=512, runs=tmp_path, name="part", callbacks=halfway, **how)
    assert part.steps == 256
    rest = hurtle.train(resume=part.path)
    assert rest.steps == 512
    assert same(weights_of(whole), weights_of(rest))


@pytest.mark.slow  # loading, which comes first, is seen below; exporting, in tests/deploy
def test_export(tmp_path):
    run = hurtle.train("cartpole", algorithm=NAME, total_steps=256, runs=tmp_path, **HOW)
    hurtle.export(run, tmp_path / "cartpole.onnx")
    obs = np.zeros((3, 4), np.float32)
    assert (hurtle.load(tmp_path / "cartpole.onnx").act(obs)[0] == hurtle.load(run.path).act(obs)[0]).all()


def test_its_settings_are_checked_and_suggested(tmp_path):
    with pytest.raises(HurtleError, match=r"learning_rate must be more than 0, got 0.0"):
        hurtle.train("cartpole", algorithm=NAME, learning_rate=0, runs=tmp_path, **HOW)
    with pytest.raises(UnknownNameError, match="Did you mean entropy_coef"):
        hurtle.train("cartpole", algorithm=NAME, entropy_coeff=0.1, runs=tmp_path, **HOW)
    with pytest.raises(UnknownNameError, match=r"clip_range is a setting of ppo, not of .*Reinforce"):
        hurtle.train("cartpole", algorithm=NAME, clip_range=0.1, runs=tmp_path, **HOW)


def test_the_help_shows_its_settings(capsys):
    assert main(["train", "cartpole", "--algorithm", NAME, "--help"]) == 0
    shown = capsys.readouterr().out
    assert "REINFORCE" in shown
    assert "--learning-rate 0.003" in shown
    assert "Steps per env and rollout" in shown  # inherited
    assert "--clip-range" not in shown.partition("REINFORCE")[2]


def test_a_file_may_not_bring_code_along(tmp_path, monkeypatch):
    """Neither a TOML file nor a run folder can run code unless the user names it or trusts the file."""
    mark = tmp_path / "ran"
    evil = tmp_path / "evil.py"
    evil.write_text(f"open({str(mark)!r}, 'w')\n{EXAMPLE.read_text()}")
    config = tmp_path / "evil.toml"
    config.write_text(f'env = "cartpole"\nalgorithm = "{evil}:Reinforce"\n')
    with pytest.raises(TrustError, match=r"algorithm = .*evil.py:Reinforce"):
        hurtle.train(config=config, total_steps=256, runs=tmp_path, **HOW)
    assert not mark.exists()

    run = hurtle.train("cartpole", algorithm=NAME, total_steps=256, runs=tmp_path, name="run", **HOW)
    shipped = tmp_path / "shipped"
    shutil.copytree(run.path, shipped)
    text = (shipped / "config.toml").read_text()
    (shipped / "config.toml").write_text(text.replace(str(EXAMPLE), str(evil)))
    with pytest.raises(TrustError):
        hurtle.train(resume=shipped, total_steps=512)
    assert not mark.exists()
    hurtle.load(run.path)  # needs no algorithm


def test_a_class_that_cannot_be_found_again(tmp_path):
    class Idle(Learner):
        @dataclass(frozen=True)
        class Config(AlgorithmConfig):
            """Nothing."""

        def __init__(self, policy, config, setup):
            self.policy = policy

        def update(self, rollout, progress=0.0):
            assert rollout.num_valid
            return {"idle": 1.0}

        def weights(self):
            return Weights.of(self.policy)

    run = hurtle.train("cartpole", algorithm=Idle, total_steps=256, runs=tmp_path, **HOW)
    assert 'algorithm = "Idle"' in (run.path / "config.toml").read_text()
    assert hurtle.train(resume=run, algorithm=Idle, total_steps=512).steps == 512


def test_what_is_no_algorithm():
    with pytest.raises(HurtleError, match=r"is not an algorithm: it needs a dataclass `Config` .* from AlgorithmConfig"):
        algorithm_name(dict)

    class Silent(Learner):
        @dataclass(frozen=True)
        class Config(AlgorithmConfig):
            """Nothing."""

    with pytest.raises(HurtleError, match="Silent is not an algorithm: it has no update and no weights"):
        algorithm_name(Silent)

    class ppo(Silent):
        update = weights = close = Learner.close

    with pytest.raises(HurtleError, match="ppo is the name of a built-in algorithm"):
        algorithm_name(ppo)
    assert find_algorithm("ppo").config is PPOConfig
    with pytest.raises(UnknownNameError, match="Did you mean ppo"):
        find_algorithm("pp0")


def with_settings(**fields):
    """The name of an algorithm whose config has these fields: (type, default)."""
    made = make_dataclass("Config", [(name, *field) for name, field in fields.items()], bases=(AlgorithmConfig,), frozen=True)
    return algorithm_name(type("Mine", (Learner,), {"Config": made, "update": len, "weights": len}))


def test_a_setting_that_every_run_has_is_refused():
    with pytest.raises(HurtleError, match=r"Config.compile is already the name of a setting of every run"):
        check_settings({}, with_settings(compile=(bool, True)))


def test_annotations_of_settings():
    name = with_settings(stages=(Literal[1, 2], 1), limit=(Annotated[float, positive()] | None, None), widths=(list[int], ()))
    assert check_settings({"stages": "2", "limit": None}, name) == {"stages": 2, "limit": None}
    with pytest.raises(HurtleError, match="stages must be one of 1, 2, got '3'"):
        check_settings({"stages": "3"}, name)
    with pytest.raises(HurtleError, match=r"limit must be more than 0, got -3.0"):
        check_settings({"limit": -3}, name)
    with pytest.raises(HurtleError, match=r"widths is declared as list\[int\]: use int"):
        check_settings({"widths": [1]}, name)


def test_ours_are_the_files_of_the_folder():
    assert algorithm_names() == ("a2c", "apex", "dqn", "impala", "ppo", "pqn", "r2d2", "rainbow", "sac", "td3", "xqc")
    assert short_name(NAME) == "reinforce"
