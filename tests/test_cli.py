"""The command line: what a user reads."""

import pytest

from hurtle.cli import main
from hurtle.envs.registry import names


def test_envs_lists_every_env_with_its_spaces(capsys):
    assert main(["envs"]) == 0
    out = capsys.readouterr().out
    for name in names():
        assert name in out
    assert "float32[4]" in out
    assert "uint8[10, 10, 4]" in out
    assert "4 agents" in out


def test_envs_shows_one_env(capsys):
    assert main(["envs", "cartpole"]) == 0
    out = capsys.readouterr().out
    assert "gravity=9.8" in out
    assert "theta_dot: float32" in out
    assert "after 500 steps" in out


def test_a_wrong_name_is_an_error_with_a_suggestion(capsys):
    assert main(["envs", "cartpol"]) == 2
    assert "Did you mean cartpole?" in capsys.readouterr().err


def test_a_users_own_file_is_shown_and_checked(tmp_path, capsys):
    file = tmp_path / "my_env.py"
    file.write_text(
        """
from hurtle.native import Box, Discrete, Env, int32

class Counter(Env):
    \"\"\"Counts.\"\"\"
    observation_space = Box(0.0, 100.0, (1,))
    action_space = Discrete(2)
    max_steps = 20
    class State:
        n: int32
    def reset(self, state, rng):
        pass
    def step(self, state, action, rng):
        state.n += action
        return 1.0, False
    def observe(self, state, obs):
        obs[0] = float(state.n)
"""
    )
    assert main(["envs", f"{file}:Counter", "--check"]) == 0
    out = capsys.readouterr().out
    assert "Counts." in out
    assert "checks passed, 0 warnings" in out


def test_help_names_the_verbs(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert "envs" in capsys.readouterr().out
