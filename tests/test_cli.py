"""The command line: what a user reads."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

import hurtle
from hurtle.cli import main
from hurtle.cli.messages import loading
from hurtle.cli.train import field_documents
from hurtle.envs.registry import names
from hurtle.runners.settings import make_settings, settings_to_dict
from hurtle.tracking.run_folder import RunFolder

REPO = Path(__file__).parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH", "")]))}


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


COUNTER = """
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


@pytest.mark.parametrize("checked", ["as if", pytest.param("truly", marks=pytest.mark.slow)])
def test_a_users_own_file_is_shown_and_checked(tmp_path, capsys, monkeypatch, checked):
    """A check compiles the env anew; tests/native/test_check.py has its own."""
    file, seen = tmp_path / "my_env.py", []
    file.write_text(COUNTER)
    if checked == "as if":
        monkeypatch.setattr("hurtle.native.check", lambda env: seen.append(env) or "Counter: 5 checks passed, 0 warnings")
    assert main(["envs", f"{file}:Counter", "--check"]) == 0
    out = capsys.readouterr().out
    assert "Counts." in out
    assert "checks passed, 0 warnings" in out
    assert [type(env).__name__ for env in seen] == ["Counter"] * (checked == "as if")


def test_help_names_the_verbs(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert "envs" in capsys.readouterr().out


@pytest.fixture
def calls(monkeypatch):
    """What the command line would have called, instead of training."""
    made = []
    trainer = types.SimpleNamespace(train=lambda *args, **words: made.append((args, words)))
    monkeypatch.setitem(sys.modules, "hurtle.runners.training", trainer)
    return made


def trained_with(calls, *arguments):
    assert main(["train", *arguments]) == 0
    (args, words) = calls.pop()
    assert args == ()
    return words


def refused(capsys, *arguments):
    try:
        code = main(list(arguments))
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    return capsys.readouterr().err


def test_version_and_verbs(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"hurtle {hurtle.__version__}\n"
    with pytest.raises(SystemExit):
        main([])
    out = capsys.readouterr().out
    for verb in ("train", "eval", "watch", "sanity", "envs", "bench"):
        assert f"• {verb}" in out
    assert "No verb 'trian'. Did you mean train?" in refused(capsys, "trian", "cartpole")


def test_train_passes_the_preset_and_the_flags_on_top(calls):
    words = trained_with(
        calls, "cartpole", "--clip-range", "0.1", "--hidden-sizes", "32", "16", "--no-anneal-learning-rate", "--total_steps=1e4"
    )
    expected = settings_to_dict(make_settings("cartpole", {}))
    expected |= {"clip_range": 0.1, "hidden_sizes": [32, 16], "anneal_learning_rate": False, "total_steps": 10_000}
    assert words == expected
    assert words["num_epochs"] == 20  # the preset's


def test_train_takes_flags_before_the_env_and_numbers_as_people_write_them(calls):
    words = trained_with(
        calls,
        *("--seed", "3", "--stop-at-return", "-110.5", "--target-kl", "none", "--separate-networks", "false", "cartpole"),
        *("--num-steps", "1_000", "--env-parameters", "gravity=1.6", "mode=easy", "--trackers"),
    )
    assert (words["env"], words["seed"], words["stop_at_return"], words["num_steps"]) == ("cartpole", 3, -110.5, 1000)
    assert (words["target_kl"], words["separate_networks"], words["trackers"]) == ("none", False, [])
    assert words["env_parameters"] == {"gravity": 1.6, "mode": "easy"}


def test_train_without_its_preset_or_with_another_algorithm(calls):
    assert trained_with(calls, "cartpole", "--no-preset")["num_epochs"] == 4
    words = trained_with(calls, "cartpole", "--algorithm", "a2c")
    assert words == settings_to_dict(make_settings("cartpole", {"algorithm": "a2c"}))
    assert "clip_range" not in words


def test_train_reads_a_file_below_the_flags(calls, tmp_path):
    file = tmp_path / "my.toml"
    file.write_text("env = 'cartpole'\nalgorithm = 'a2c'\n[a2c]\ngamma = 0.5\nnum_steps = 9\n")
    words = trained_with(calls, "--config", str(file), "--num-steps", "7")
    assert (words["env"], words["algorithm"], words["gamma"], words["num_steps"]) == ("cartpole", "a2c", 0.5, 7)
    assert trained_with(calls, "pendulum", "--config", str(file), "--algorithm", "ppo")["gamma"] == 0.97  # the preset's
    file.write_text("preset = false")
    assert trained_with(calls, "cartpole", f"--config={file}")["num_epochs"] == 4
    assert trained_with(calls, "cartpole", f"--config={file}", "--preset")["num_epochs"] == 20


def test_train_mistakes(calls, capsys):
    assert "No setting --clip-rang. Did you mean --clip-range?" in refused(capsys, "train", "cartpole", "--clip-rang", "0.1")
    assert "Did you mean --shuffle?" in refused(capsys, "train", "cartpole", "--no-shufle")
    assert "--clip-range is a setting of ppo" in refused(capsys, "train", "cartpole", "--algorithm=a2c", "--clip-range", "0.1")
    assert "--gamma must be from 0 to 1, got 1.5. The preset of cartpole has 0.98." in refused(
        capsys, "train", "cartpole", "--gamma", "1.5"
    )
    assert "No algorithm 'poo'. Did you mean ppo?" in refused(capsys, "train", "cartpole", "--algorithm", "poo")
    assert "One env at a time: cartpole, and then snake?" in refused(capsys, "train", "cartpole", "snake")
    nothing = refused(capsys, "train")
    assert "Which env? For example:\n  hurtle train cartpole\n" in nothing
    assert "--resume" in nothing
    assert calls == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--learning-rate fast", "--learning-rate must be a number, got 'fast'. The preset of cartpole has 0.001."),
        ("--learning-rate=inf", "--learning-rate must be finite, got inf. The preset of cartpole has 0.001."),
        ("--seed 99999999999999999999999", "--seed must be from 0 to 2**63 - 1, got 99999999999999999999999."),
        ("--eval-episodes many", "--eval-episodes must be a whole number, got 'many'."),
        ("--hidden-sizes 64 wide", "--hidden-sizes must be a whole number, got 'wide'."),
        ("--hidden-sizes", "--hidden-sizes: give at least one width, such as 64 64."),
        ("--learning-rate", "--learning-rate needs a value."),
        ("--learning-rate --seed 3", "--learning-rate needs a value."),
        ("--resume", "--resume needs a value."),
        ("--shuffle=maybe", "--shuffle is a switch: --shuffle or --no-shuffle, without a value."),
        ("--shuffle true", "--shuffle is a switch: --shuffle or --no-shuffle, without a value."),
    ],
)
def test_values_that_do_not_fit_their_flags(calls, capsys, flags, message):
    assert refused(capsys, "train", "cartpole", *flags.split()) == f"hurtle: error: {message}\n"
    assert calls == []


def test_numbers_of_the_other_verbs(capsys):
    assert (
        refused(capsys, "eval", "x", "--episodes", "many") == "hurtle: error: --episodes must be a whole number, got 'many'.\n"
    )
    assert refused(capsys, "eval", "x", "--num-envs=2.5") == "hurtle: error: --num-envs must be a whole number, got '2.5'.\n"
    expected = "hurtle: error: --num-envs must be a whole number, got 'x'.\n"
    assert refused(capsys, "bench", "vector", "cartpole", "--num-envs", "8", "x") == expected


def test_train_help_has_one_line_per_setting_with_the_presets_defaults(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["train", "cartpole", "--help"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "  --num-epochs 20 " in out
    assert "  --[no-]anneal-clip-range " in out
    settings = make_settings("cartpole", {})
    for word in settings_to_dict(settings):
        flag = word.replace("_", "-")
        assert word == "env" or out.count(f"  --{flag} ") + out.count(f"  --[no-]{flag} ") == 1, word
    for part in vars(settings).values():
        for word, text in field_documents(type(part)).items():
            assert text, f"{word} has no help"
    assert [line for line in out.splitlines() if line in ("Run", "Envs", "Results", "Policy", "PPO")] == [
        *("Run", "Envs", "Results", "Policy", "PPO")
    ]
    assert main(["train", "-h", "--algorithm", "a2c"]) == 0
    out = capsys.readouterr().out
    assert "\nA2C\n" in out
    assert "--clip-range 0.2" not in out


def test_resume_passes_only_what_was_given(calls, tmp_path, capsys):
    run = RunFolder.create(tmp_path, env="cartpole", algorithm="ppo")
    run.write_config(settings_to_dict(make_settings("cartpole", {"gamma": 0.5})))
    assert trained_with(calls, "--resume", str(run.path)) == {"resume": str(run.path)}
    words = trained_with(calls, "--resume", str(run.path), "--total-steps", "200_000", "--gamma", "0.5")
    assert words == {"resume": str(run.path), "total_steps": 200_000, "gamma": 0.5}  # as in config.toml, but perhaps not saved
    assert trained_with(calls, "--resume", str(run.path), "--no-shuffle") == {"resume": str(run.path), "shuffle": False}
    assert trained_with(calls, "--resume", str(run.path), "--trust") == {"resume": str(run.path), "trust": True}
    words = trained_with(calls, "--resume", "latest", "--runs", str(tmp_path))
    assert words == {"resume": str(run.path), "runs": str(tmp_path)}
    assert trained_with(calls, "cartpole", "--resume", str(run.path)) == {"resume": str(run.path)}
    assert f"hurtle train snake --fine-tune {run.path}" in refused(capsys, "train", "snake", "--resume", str(run.path))
    assert "leave out --config" in refused(capsys, "train", "--resume", str(run.path), "--config", "a.toml")
    checkpoint = run.checkpoints / "step-000000000001.pt"
    checkpoint.parent.mkdir(exist_ok=True)
    checkpoint.touch()
    assert trained_with(calls, "--resume", str(checkpoint), "--seed", "1") == {"resume": str(checkpoint), "seed": 1}


def test_an_override_survives_a_resume_that_crashed(tmp_path):
    quick = ("--progress", "quiet", "--trackers", "--eval-episodes", "2", "--runs", str(tmp_path))
    assert main(["train", "bandit", "--total-steps", "1024", "--num-steps", "32", *quick]) == 0
    run = RunFolder.open("latest", tmp_path)
    run.write_config(run.read_config() | {"total_steps": 2048})  # what a resume writes before its first checkpoint
    assert main(["train", "--resume", str(run.path), "--total-steps", "2048"]) == 0
    assert json.loads((run.path / "summary.json").read_text())["steps"] == 2048


def assert_trained(runs):
    assert json.loads(next(runs.glob("*/summary.json")).read_text())["steps"] >= 2000


def test_training_goes_on_when_the_reader_of_its_output_is_gone(tmp_path, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    quick = ("--num-steps", "32", "--eval-episodes", "2", "--trackers", "--runs", str(tmp_path))
    with open(writer, "w") as gone:  # noqa: PTH123
        monkeypatch.setattr(sys, "stdout", gone)
        assert main(["train", "bandit", "--total-steps", "2000", *quick]) == 0
    assert_trained(tmp_path)


@pytest.mark.slow  # tests/tracking/test_dashboard.py has quicker processes
def test_a_process_that_trains_goes_on_when_the_reader_of_its_output_is_gone(tmp_path):
    command = [sys.executable, "-m", "hurtle", "train", "bandit", "--total-steps", "2000", "--runs", str(tmp_path)]
    with subprocess.Popen([*command, "--trackers"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 0
    assert_trained(tmp_path)


@pytest.mark.parametrize("words", [["serve", "--help"], ["bench", "serve", "--help"]])
def test_help_may_be_cut_short_by_its_reader(words):
    with subprocess.Popen([sys.executable, "-m", "hurtle", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 141


def test_eval_watch_and_sanity_pass_their_words_on(monkeypatch, capsys, tmp_path):
    def module(name, **functions):
        monkeypatch.setitem(sys.modules, f"hurtle.runners.{name}", types.SimpleNamespace(**functions))

    seen = []

    class Found(str):
        stopped = ""

    module("evaluate", evaluate_run=lambda run, **words: seen.append((run, words)) or Found("mean 1.0"))
    module("watch", watch_run=lambda run, **words: seen.append((run, words)))
    monkeypatch.setattr(
        "hurtle.runners.sanity.run_sanity", lambda envs, **words: seen.append((envs, words)) or envs != ("bandit",)
    )
    path = RunFolder.create(tmp_path, name="a").path
    (path / "config.toml").touch()
    flags = ["--runs", str(tmp_path), "--env", "CartPole-v1", "--env-parameters", "gravity=1.6"]
    assert main(["eval", "latest", "--episodes", "7", "--sampled", *flags]) == 0
    assert capsys.readouterr() == ("mean 1.0\n", f"hurtle: the latest run is {path}\nhurtle: loading torch …\n")
    Found.stopped = "stopped by Ctrl-C"
    assert main(["eval", str(path), "--seed", "1"]) == 130
    assert seen.pop()[1]["seed"] == 1
    capsys.readouterr()
    played = {"env": "CartPole-v1", "env_parameters": {"gravity": 1.6}, "trust": False}
    expected = {"episodes": 7, "sampled": True, "seed": 0, "num_envs": None, "device": "cpu", "keep_stopped": True, **played}
    assert seen.pop() == (str(path), expected)
    assert main(["watch", "a", "--video", "out.gif", "--device", "cuda", *flags]) == 0
    expected = {"episodes": 1, "video": "out.gif", "fps": 30, "seed": 0, "sampled": False, "device": "cuda", **played}
    assert seen.pop() == (str(path), expected)
    assert main(["watch", str(path)]) == 0
    assert seen.pop()[1]["env_parameters"] == {}
    assert "--env-parameters must be NAME=VALUE pairs" in refused(capsys, "eval", str(path), "--env-parameters", "gravity")
    assert main(["sanity"]) == 0
    assert seen.pop() == ((), {"seed": 0, "device": "cpu"})
    assert main(["sanity", "bandit", "--seed", "1"]) == 1
    assert seen.pop() == (("bandit",), {"seed": 1, "device": "cpu"})


HEAVY = ("torch", "numba", "matplotlib", "scipy")
QUICK = [
    ["envs"],
    ["runs"],
    ["--help"],
    ["envs", "cartpole"],
    *([verb, "--help"] for verb in ("train", "eval", "compare", "plot")),
]
REFUSED = {
    "eval nowhere": "There is no run nowhere",
    "watch nowhere": "There is no run nowhere",
    "export nowhere x.onnx": "There is no run nowhere",
    "export a x.txt": "must end in .onnx or .pt2, got 'x.txt'",
    "eval a --env-parameters gravity": "--env-parameters must be NAME=VALUE pairs",
    "eval x.onnx --device cuda": "exported policies run on the CPU",
    "sanity bandid": "No sanity env 'bandid'. Did you mean bandit?",
    "train cartpol": "No environment 'cartpol'. Did you mean cartpole",
    "train CartPol-v1": "No environment 'CartPol-v1'. Did you mean CartPole-v1",
    "compare nowhere": "There is no run nowhere",
    "plot a --metrics entropy": "a has no metrics yet",
    "train cartpol --seeds 3": "No environment 'cartpol'. Did you mean cartpole",
    "train bandit --gamma 2": "--gamma must be from 0 to 1, got 2",
}
SAID = {
    "train bandit --progress plain": "bandit · ppo: importing torch …",
    "train --resume runs/a": "bandit · ppo: importing torch …",
    "eval runs/a": "hurtle: loading torch …",
    "watch a": "hurtle: loading torch …",
    "export a x.onnx": "hurtle: loading torch …",
    "sanity": "hurtle: loading torch …",
}
SCRIPT = """
import contextlib, io, json, sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise ImportError("no torch in this test")

sys.meta_path.insert(0, NoTorch())
from hurtle.cli import main
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            code = main(words)
        except SystemExit as ended:
            code = ended.code
        except ImportError as error:
            code = str(error)
    print(json.dumps([code, out.getvalue(), err.getvalue(), [name for name in %r if name in sys.modules]]))
"""


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory):
    """What each command does until it needs torch: its exit code or ImportError, its output, and what heavy was imported."""
    folder = tmp_path_factory.mktemp("without_torch")
    run = RunFolder.create(folder / "runs", env="bandit", name="a")
    run.write_config(settings_to_dict(make_settings("bandit", {"progress": "plain"})))
    commands = [*QUICK, *(line.split() for line in (*REFUSED, *SAID))]
    command = [sys.executable, "-c", SCRIPT % ((*HEAVY, "tyro"),), json.dumps(commands)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, env=ENVIRONMENT)
    return {" ".join(words): json.loads(line) for words, line in zip(commands, done.stdout.splitlines(), strict=True)}


@pytest.mark.parametrize("line", [" ".join(words) for words in QUICK])
def test_the_quick_verbs_load_nothing_heavy(without_torch, line):
    code, out, _, loaded = without_torch[line]
    assert (code, [name for name in loaded if name in HEAVY]) == (0, [])
    assert out


def test_lists_do_not_wait_for_tyro(without_torch):
    assert "tyro" not in without_torch["envs"][3]  # the first command
    assert "tyro" not in without_torch["runs"][3]
    assert "tyro" in without_torch["--help"][3]


@pytest.mark.parametrize("line", REFUSED)
def test_mistakes_are_found_before_torch_is_imported(without_torch, line):
    code, _, err, _ = without_torch[line]
    assert code == 2
    assert REFUSED[line] in err


@pytest.mark.parametrize("line", SAID)
def test_something_is_said_before_torch_is_imported(without_torch, line):
    code, out, err, _ = without_torch[line]
    assert code == "no torch in this test"
    assert (out + err).splitlines()[0] == SAID[line]


def test_a_verb_says_at_once_what_it_loads_and_erases_that_on_a_terminal(monkeypatch, capsys):
    with loading("torch"):
        assert capsys.readouterr().err == "hurtle: loading torch …\n"
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with loading("torch"):
        assert capsys.readouterr().err == "hurtle: loading torch …"
    assert capsys.readouterr().err == "\r\033[2K"


def test_names_and_numbers_that_cannot_be_are_errors_not_tracebacks(tmp_path, capsys):
    flags = ["--runs", str(tmp_path / "runs"), "--progress", "quiet"]
    said = refused(capsys, "train", "cartpole", "--num-envs", "1000000000000", *flags)
    assert "num_envs=1000000000000 needs" in said
    assert "GiB of memory and this machine has" in said
    said = refused(capsys, "train", "CartPole-v1", "--num-envs", "1000000000000", *flags)
    assert "num_envs=1000000000000 needs" in said
    said = refused(capsys, "train", str(tmp_path), *flags)
    assert f"{str(tmp_path)!r} is a folder; add a file and a class: {tmp_path}/my_env.py:MyEnv." in said
    assert "No algorithm 'trpo'. Known: a2c, apex, dqn, impala, ppo, pqn, r2d2, rainbow, sac, td3, xqc." in refused(
        capsys, "train", "cartpole", "--algorithm", "trpo"
    )
    assert "Did you mean breakout, Hurtle's own?" in refused(capsys, "train", "minatar/breakout", *flags)
    assert not (tmp_path / "runs").exists()
