"""hurtle/trust.py: what a file names runs only if the user allows it, however it is loaded, and one's own runs need no word."""

import os
import shutil
import stat
import sys
from pathlib import Path

import gymnasium
import pytest
from gymnasium.envs.classic_control import CartPoleEnv

import hurtle
from hurtle import trust
from hurtle.cli import main
from hurtle.deploy.restore import find_checkpoint
from hurtle.errors import HurtleError, TrustError
from hurtle.policies.build import NETWORKS
from hurtle.runners.evaluate import evaluate_run
from hurtle.runners.evaluate_file import evaluate_file
from hurtle.runners.watch import watch_run
from hurtle.tracking.checkpoints import load_checkpoint, save_checkpoint
from hurtle.trust import check_code, is_signed, key_file, signed

HELPER = """
from pathlib import Path
Path(__file__).with_name("ran").touch()
import torch
from gymnasium.envs.classic_control import CartPoleEnv
from torch import nn
from torch.distributions import Categorical

class P(nn.Module):
    def __init__(self, observation_space, action_space):
        super().__init__()
        self.head = nn.Linear(observation_space.shape[0], int(action_space.n))

    def encode(self, obs):
        return obs

    def decode(self, features):
        return Categorical(logits=self.head(features)), features.sum(1)

class E(CartPoleEnv):
    pass

class NoModule:
    pass

class NoArguments(nn.Module):
    def __init__(self):
        super().__init__()

"""
SMALL = {"num_envs": 4, "num_steps": 16, "minibatch_size": 32, "num_epochs": 1, "eval_episodes": 2, "hidden_sizes": (8,)}
QUIET = {"progress": "quiet", "trackers": (), "gear": "general", "backend": "serial"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with code of somebody else's in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "helper.py").write_text(HELPER)
    return tmp_path


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two short runs, with a policy of ours and with one of a file."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "helper.py").write_text(HELPER)
    words = {"total_steps": 64, "runs": str(folder), **SMALL, **QUIET}
    return [hurtle.train("CartPole-v1", policy=policy, **words).path for policy in ("mlp", f"{folder}/helper.py:P")]


@pytest.fixture
def foreign(runs, folder):
    """A function that makes a run folder as a stranger would ship it: with these settings, and no signature of ours."""

    def make(**words):
        plain, with_file = runs
        shutil.copytree(with_file if "policy" in words else plain, folder / "shipped")
        change(folder / "shipped", signature=None, **words)
        return folder / "shipped"

    return make


def change(run, **words):
    """Write other settings into the checkpoint of a run."""
    file = find_checkpoint(run)[1]
    state = load_checkpoint(file)
    save_checkpoint(file, {**state, "settings": {**state["settings"], **words}})


def ran(folder):
    """Whether helper.py was run."""
    return (folder / "ran").exists()


WAYS = {
    "load": lambda run, **words: hurtle.load(run, **words),
    "resume": lambda run, **words: hurtle.train(resume=run, total_steps=128, **words),
    "export": lambda run, **words: hurtle.export(run, "policy.pt2", **words),
    "eval": lambda run, **words: evaluate_run(run, episodes=2, **words),
    "watch": lambda run, **words: watch_run(run, video="out.gif", **words),
}
VERBS = {
    "resume": ["train", "--resume", "shipped", "--total-steps", "128"],
    "export": ["export", "shipped", "policy.pt2"],
    "eval": ["eval", "shipped", "--episodes", "2"],
    "watch": ["watch", "shipped", "--video", "out.gif"],
}


# Code of strangers.


@pytest.mark.parametrize("way", WAYS)
def test_a_policy_that_a_checkpoint_names_is_not_run(foreign, folder, way):
    run = foreign(policy="helper.py:P")
    with pytest.raises(TrustError, match=r"\.pt names code .*policy = 'helper.py:P'.*policy=MyPolicy.*trust=True.*--trust"):
        WAYS[way](run)
    assert not ran(folder)
    assert not (folder / "policy.pt2").exists()


@pytest.mark.parametrize("verb", VERBS)
def test_nor_on_the_command_line(foreign, folder, verb, capsys):
    foreign(policy="helper.py:P")
    assert main(VERBS[verb]) == 2
    assert "'helper.py:P'" in capsys.readouterr().err
    assert not ran(folder)


@pytest.mark.parametrize("way", ["resume", "eval", "watch"])
@pytest.mark.parametrize("env", ["helper.py:E", "{folder}/helper.py:E", "helper:CartPole-v1", "os:system-v0", "helper:x/E-v0"])
def test_an_env_that_a_checkpoint_names_is_not_run(foreign, folder, way, env, monkeypatch):
    monkeypatch.syspath_prepend(str(folder))  # as with python -m hurtle
    monkeypatch.setattr("importlib.import_module", lambda name, *_: pytest.fail(f"{name} was imported"))
    run = foreign(env=env.format(folder=folder))
    with pytest.raises(TrustError, match=r"env = '.*env=MyEnv"):
        WAYS[way](run)
    assert not ran(folder)


@pytest.fixture(params=["torch:/../helper.py", "torch:helper.py", "numpy:x/../helper.py"])
def disguised(request, folder):
    """A file whose name begins like that of something in an installed package."""
    (folder / "torch:").mkdir()
    (folder / "numpy:x").mkdir()
    shutil.copy("helper.py", "torch:helper.py")
    return request.param


def test_a_policy_behind_the_name_of_a_package_is_not_run(foreign, folder, disguised):
    run = foreign(policy=f"{disguised}:P")
    for way in WAYS.values():
        with pytest.raises(TrustError, match="policy = "):
            way(run)
    assert not ran(folder)


def test_an_env_behind_the_name_of_a_package_is_not_run(foreign, folder, disguised):
    run = foreign(env=f"{disguised}:E")
    for way in ("resume", "eval", "watch"):
        with pytest.raises(TrustError, match="env = "):
            WAYS[way](run)
    Path("stranger.toml").write_text(f'env = "{disguised}:E"\n')
    with pytest.raises(TrustError, match="env = "):
        hurtle.train(config="stranger.toml")
    assert not ran(folder)


def test_an_env_that_is_not_made_is_not_asked_about(foreign, folder):
    run = foreign(env="helper.py:E")
    assert hurtle.load(run).act([0.0, 0.0, 0.0, 0.0]) in (0, 1)
    assert evaluate_run(run, episodes=2, env="CartPole-v1").episodes == 2
    assert hurtle.export(run, "policy.pt2").card.env == "helper.py:E"
    with pytest.raises(TrustError, match=r"policy.pt2 names code .*env = 'helper.py:E'"):
        evaluate_file("policy.pt2", episodes=2)
    assert main(["eval", "policy.pt2", "--episodes", "2"]) == 2
    assert not ran(folder)
    assert evaluate_file("policy.pt2", episodes=2, trust=True).episodes == 2
    assert ran(folder)


def test_text_for_an_env_may_name_code(foreign):
    run = foreign(env_parameters={"sutton_barto_reward": True, "entry": ["helper.py"]})
    for way in ("resume", "eval", "watch"):
        with pytest.raises(TrustError, match=r"names a file or module for its env: env_parameters = .*helper.py"):
            WAYS[way](run)
    assert evaluate_run(run, episodes=2, env="cartpole").episodes == 2  # other envs do not get it


def test_numbers_and_words_for_an_env_are_free(foreign):
    words = {"sutton_barto_reward": True, "render_mode": "rgb_array"}
    assert evaluate_run(foreign(env_parameters=words), episodes=2).mean == -1.0
    for text in ("a/b", "a.b", "a:b", "a\\b"):
        with pytest.raises(TrustError):
            check_code("run", {"env_parameters": {"x": [1, text]}}, trusted=False)
    with pytest.raises(TrustError):
        check_code("run", {"env_parameters": {"x": {"y": 1}}}, trusted=False)


@pytest.mark.parametrize("way", WAYS)
def test_the_user_can_trust_a_file(foreign, folder, way):
    short = {"max_episode_steps": 5}  # a video of many frames takes seconds
    WAYS[way](foreign(policy="helper.py:P", env_parameters=short), trust=True)
    assert ran(folder)


@pytest.mark.parametrize("verb", [pytest.param(verb, marks=[pytest.mark.slow] * (verb == "watch")) for verb in VERBS])
def test_the_user_can_trust_a_file_on_the_command_line(foreign, folder, verb):
    foreign(policy="helper.py:P")
    assert main([*VERBS[verb], "--trust"]) == 0
    assert ran(folder)


@pytest.mark.parametrize("way", ["load", "resume", "export"])
def test_the_user_can_pass_the_class(foreign, folder, way, write_module):
    mine = write_module(HELPER.replace("Path(__file__)", "Path('.') and Path('elsewhere/x')").replace(".touch()", ""))
    WAYS[way](foreign(policy="helper.py:P"), policy=mine.P)
    assert not ran(folder)


def test_the_user_can_name_the_class(foreign, folder):
    run = foreign(policy="elsewhere.py:P")
    hurtle.load(run, policy="helper.py:P")
    assert ran(folder)


@pytest.mark.parametrize("env", ["CartPole-v1", lambda: gymnasium.make("CartPole-v1"), CartPoleEnv])
def test_what_the_user_replaced_is_not_signed(foreign, folder, write_module, env):
    mine = write_module(HELPER.replace(".touch()", ""))
    run = foreign(policy=f"{folder}/helper.py:P", env=f"{folder}/helper.py:E")
    hurtle.train(env, resume=run, policy=mine.P, total_steps=128)
    assert "helper.py" not in (run / "config.toml").read_text()
    assert "helper.py" not in str(load_checkpoint(run / "checkpoints" / "step-000000000128.pt")["settings"])
    assert not ran(folder)


def test_bounds_checks_are_not_switched_off_by_a_file(foreign, folder):
    Path("stranger.toml").write_text('env = "bandit"\nunsafe = true\n')
    with pytest.raises(TrustError, match=r"stranger\.toml switches off the bounds checks of native envs: unsafe = True"):
        hurtle.train(config="stranger.toml")
    with pytest.raises(TrustError, match="switches off the bounds checks"):
        WAYS["resume"](foreign(unsafe=True))
    with pytest.raises(TrustError, match="switches off the bounds checks"):
        check_code("run", {"env_parameters": {"unsafe": 1}}, trusted=False)
    words = signed({"env": "bandit", "unsafe": True})
    assert is_signed(words, words["signature"])
    assert not is_signed({**words, "env": "cartpole"}, words["signature"])
    code = {"env": "helper.py:E"}
    assert not is_signed({**code, "unsafe": True}, signed(code)["signature"])


def test_a_signature_of_another_key_is_named(foreign):
    run = foreign(policy="helper.py:P")
    with pytest.raises(TrustError, match="this file has none"):
        hurtle.load(run)
    change(run, signature="0" * 64)
    with pytest.raises(TrustError, match="this file is signed, but not with your current key"):
        hurtle.load(run)


def test_a_signature_of_another_key_is_named_for_an_env(foreign):
    run = foreign(env="helper.py:E")
    change(run, signature="0" * 64)
    with pytest.raises(TrustError, match="this file is signed, but not with your current key"):
        evaluate_run(run, 1)


# TOML files.


def test_a_settings_file_names_no_code(folder, capsys):
    Path("stranger.toml").write_text('env = "helper.py:E"\npolicy = "helper.py:P"\n')
    rest = {"total_steps": 64, "runs": "runs", **SMALL, **QUIET}
    with pytest.raises(TrustError, match=r"stranger.toml names code .*env = '.*helper.py:E', policy = '.*helper.py:P'"):
        hurtle.train(config="stranger.toml", **rest)
    with pytest.raises(TrustError, match=r"stranger.toml names code .*: policy = "):
        hurtle.train("cartpole", config="stranger.toml", **rest)
    assert main(["train", "--config", "stranger.toml"]) == 2
    assert main(["train", "cartpole", "--config", "stranger.toml"]) == 2
    assert main(["train", "--config", "stranger.toml", "--policy", "mlp"]) == 2
    assert capsys.readouterr().err.count("names code") == 3
    assert not ran(folder)
    hurtle.train("CartPole-v1", config="stranger.toml", policy="mlp", **rest)  # all that it names is overridden
    assert not ran(folder)


def test_a_class_takes_the_place_of_what_a_settings_file_names(folder, write_module):
    mine = write_module(HELPER.replace(".touch()", ""))
    Path("stranger.toml").write_text(f'env = "CartPole-v1"\npolicy = "{folder}/helper.py:P"\n')
    run = hurtle.train(config="stranger.toml", policy=mine.P, total_steps=64, runs="runs", **SMALL, **QUIET)
    assert "helper.py" not in (run.path / "config.toml").read_text()
    assert not ran(folder)


@pytest.mark.slow
def test_a_settings_file_may_be_trusted(folder):
    flags = "--total-steps 64 --num-envs 4 --num-steps 16 --minibatch-size 32 --eval-episodes 2 --progress quiet --trackers"
    Path("mine.toml").write_text('env = "helper.py:E"\npolicy = "helper.py:P"\n')
    assert main(["train", "--config", "mine.toml", "--trust", *flags.split()]) == 0
    (run,) = Path("runs").iterdir()
    assert main(["train", "--config", str(run / "config.toml")]) == 0  # the run is the user's now


# One's own runs.


@pytest.fixture
def own(runs, folder):
    """A run of this user's with an env and a policy of their own file."""
    path = folder / "own"
    shutil.copytree(runs[1], path)
    change(path, **signed({"env": f"{folder}/helper.py:E", "policy": f"{folder}/helper.py:P"}))
    return path


def use_again(run, others):
    """All that one does with a run of one's own."""
    hurtle.load(run)
    assert main(["eval", str(run), "--episodes", "2"]) == 0
    assert main(["train", "--resume", str(run), "--total-steps", "128"]) == 0
    assert main(["train", "--config", f"{run}/config.toml", "--name", "again", "--runs", str(others)]) == 0


def test_own_runs_need_no_flag(folder, monkeypatch):
    run = hurtle.train("helper.py:E", policy="helper.py:P", total_steps=64, runs="runs", **SMALL, **QUIET)
    (folder / "ran").unlink()
    monkeypatch.setattr(trust, "_OF_THIS_PROCESS", bytes(32))  # as in another
    use_again(run.path.resolve(), folder / "others")
    assert ran(folder)
    assert (folder / "others" / "again" / "summary.json").exists()


@pytest.mark.slow
def test_own_runs_need_no_flag_in_another_process(folder, run_python):
    run = hurtle.train("helper.py:E", policy="helper.py:P", total_steps=64, runs="runs", **SMALL, **QUIET)
    (folder / "ran").unlink()
    code = "import sys; from test_trust import use_again; use_again(*sys.argv[1:])"
    run_python(code, run.path.resolve(), folder / "others")
    assert ran(folder)
    assert (folder / "others" / "again" / "summary.json").exists()


def test_own_runs_may_be_moved_and_their_code_edited(own, folder):
    shutil.move(own, folder / "moved")
    with (folder / "helper.py").open("a") as file:
        file.write("\nedited = True\n")
    assert evaluate_run(folder / "moved", episodes=2).episodes == 2


def test_a_signature_is_not_of_another_file(own, folder, monkeypatch):
    (folder / "other").mkdir()
    shutil.copytree(own, folder / "other" / "run")
    shutil.copy("helper.py", "other/helper.py")
    for words in ({"policy": "helper.py:P"}, {"policy": f"{folder}/other/helper.py:P"}, {"env_parameters": {"x": "y"}}):
        change(folder / "other" / "run", **words)
        monkeypatch.chdir(folder / "other")
        with pytest.raises(TrustError):
            evaluate_run("run", episodes=2)
    assert not ran(folder)
    assert not ran(folder / "other")


def test_a_link_in_place_of_the_file_is_another_file(own, folder):
    (folder / "evil").mkdir()
    shutil.move("helper.py", "evil/helper.py")
    (folder / "helper.py").symlink_to("evil/helper.py")
    with pytest.raises(TrustError):
        hurtle.load(own)
    assert not ran(folder / "evil")


def test_another_users_signature_is_none(own, folder, tmp_path_factory, monkeypatch):
    monkeypatch.setenv("HURTLE_DATA_DIR", str(tmp_path_factory.mktemp("another")))
    with pytest.raises(TrustError):
        hurtle.load(own)
    assert not ran(folder)
    assert not key_file().exists()  # reading makes no key


@pytest.mark.parametrize("forged", ["", "0" * 64, "ä", 7, None, b"x"])
def test_forged_signatures(forged):
    words = {"env": "/home/me/e.py:E"}
    assert is_signed(words, signed(words)["signature"])
    assert not is_signed(words, forged)


def test_a_signature_is_bound_to_all_that_can_run_code(monkeypatch, folder):
    words = {"env": "helper.py:E", "policy": "/x/p.py:P", "env_parameters": {"path": "a", "n": 1}}
    signature = signed(words)["signature"]
    assert is_signed({**words, "clip_range": 0.1}, signature)
    others = [{"env": "helper.py:F"}, {"policy": "/y/p.py:P"}, {"env_parameters": {"path": "b", "n": 1}}, {"policy": "auto"}]
    assert not any(is_signed({**words, **other}, signature) for other in others)
    (folder / "below").mkdir()
    monkeypatch.chdir(folder / "below")
    assert not is_signed(words, signature)


def test_a_module_is_bound_to_its_file(folder, monkeypatch):
    words = {"env": "helper:CartPole-v1"}
    monkeypatch.syspath_prepend(str(folder))
    signature = signed(words)["signature"]
    assert is_signed(words, signature)
    (folder / "below").mkdir()
    shutil.copy("helper.py", "below/helper.py")
    monkeypatch.syspath_prepend(str(folder / "below"))
    assert not is_signed(words, signature)
    assert not ran(folder)


def test_what_names_no_code_is_not_signed(tmp_path, monkeypatch):
    monkeypatch.setenv("HURTLE_DATA_DIR", str(tmp_path / "data"))
    for env in (
        "cartpole",
        "CartPole-v1",
        "ALE/Pong-v5",
        "atari/Pong",
        "pettingzoo/butterfly/pistonball_v6",
        "MiniGrid-Empty-5x5-v0",
    ):
        words = {"env": env, "policy": "auto", "env_parameters": {"a": 1.5, "b": [True, None]}}
        assert signed(words) == words
        check_code("run", words, trusted=False)
    assert not (tmp_path / "data").exists()


def test_installed_packages_may_be_named():
    check_code("run", {"env": "gymnasium:CartPole-v1"}, trusted=False)
    check_code("run", {"env": "gymnasium:a.b/CartPole-v1"}, trusted=False)
    modules = ("gymnasium.envs:CartPole-v1", "this:X-v0", "antigravity:X-v0", "nowhere:X-v0", ":X-v0", "/a/b.py:C")
    odd = ("torch:X", "torch:a:X-v0", "torch:x.py-v0", "torch:x.py:X-v0", "torch:X-v0\n", "atari/torch:X-v0", "ALE/torch:X-v5")
    for env in (*modules, *odd):
        with pytest.raises(TrustError):
            check_code("run", {"env": env}, trusted=False)


def test_only_plain_words_are_free_as_a_policy():
    for policy in NETWORKS:
        check_code("run", {"policy": policy}, trusted=False)
    for policy in ("gymnasium:CartPole-v1", "torch:nn", "p.py:P", "a/b", "torch.nn", "/p", ""):
        with pytest.raises(TrustError):
            check_code("run", {"policy": policy}, trusted=False)


def test_a_module_that_stands_before_an_installed_package(monkeypatch, tmp_path):
    (tmp_path / "minigrid.py").touch()  # stands before the installed one
    monkeypatch.delitem(sys.modules, "minigrid", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(TrustError):
        check_code("run", {"env": "minigrid:X-v0"}, trusted=False)


# The key.


def test_the_key_is_the_users_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("HURTLE_DATA_DIR", str(tmp_path / "new" / "folder"))
    before = os.umask(0)
    try:
        words = signed({"policy": "p.py:P"})
    finally:
        os.umask(before)
    file = key_file()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    assert len(file.read_bytes()) == 32
    assert signed({"policy": "p.py:P"}) == words
    file.chmod(0o640)
    assert not is_signed({"policy": "p.py:P"}, words["signature"])
    with pytest.raises(TrustError, match=r"signing-key must belong to you and be readable by nobody else \(chmod 600\)"):
        check_code("run", words, trusted=False)


def test_a_second_process_takes_the_key_of_the_first(tmp_path, monkeypatch):
    monkeypatch.setenv("HURTLE_DATA_DIR", str(tmp_path))
    trust._create(key_file())
    first = key_file().read_bytes()
    trust._create(key_file())
    assert key_file().read_bytes() == first
    assert len(list(tmp_path.iterdir())) == 1


def test_where_the_key_is(monkeypatch, tmp_path):
    monkeypatch.delenv("HURTLE_DATA_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    assert key_file() == tmp_path / ".local/share/hurtle/signing-key"
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert key_file() == tmp_path / "data/hurtle/signing-key"


def test_without_a_home_runs_are_ones_own_in_the_same_process(folder, monkeypatch, capsys):
    (folder / "file").touch()
    monkeypatch.setenv("HURTLE_DATA_DIR", str(folder / "file" / "below"))  # cannot be made, not even by root
    run = hurtle.train("CartPole-v1", policy="helper.py:P", total_steps=64, runs="runs", **SMALL, **QUIET)
    assert hurtle.load(run).steps == 64
    monkeypatch.setattr(trust, "_OF_THIS_PROCESS", bytes(32))  # as in another
    assert main(["export", str(run.path), "policy.pt2"]) == 2
    assert "your key cannot be used" in capsys.readouterr().err


# Code that does not fit.


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NoModule", r"A policy is a torch.nn.Module with two methods, .*NoModule has no encode and no decode"),
        ("NoArguments", r"NoArguments\(observation_space, action_space\) failed: TypeError: "),
        ("HELP", r"'.*helper.py' has no 'HELP'"),
    ],
)
def test_a_policy_that_does_not_fit(foreign, name, message):
    with pytest.raises(HurtleError, match=message):
        hurtle.load(foreign(policy=f"helper.py:{name}"), trust=True)


def test_an_env_that_does_not_fit(foreign):
    with pytest.raises(HurtleError, match=r"'helper.py:P' cannot be made with the parameters \{\}: .*missing"):
        evaluate_run(foreign(env="helper.py:P"), episodes=2, trust=True)
