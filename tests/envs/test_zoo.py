"""What holds for every env of the zoo: spaces, statistics, final observations, pictures, docs; and how envs are found."""

import doctest
import importlib
from functools import partial

import gymnasium
import numpy as np
import pytest
from sample_envs import Walk

import hurtle
from hurtle.envs import registry
from hurtle.envs.registry import names, native_class
from hurtle.errors import HurtleError, UnknownNameError
from hurtle.native import Env

NUM_ENVS, NUM_STEPS = 8, 150
EVERY_ENV = pytest.mark.parametrize("name", names())
ONE_OF_EACH_KIND = {"cartpole", "squared", "breakout", "snake"}
MOST_OF_THEM_SLOWLY = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in ONE_OF_EACH_KIND)) for name in names()]
)


def near_the_end(vec):
    """Let envs with a time limit begin close to it, at different distances, so that all of them reach it."""
    limit = vec.native_spec.max_steps
    if "frames_left" in vec.native_spec.fields:  # freeway counts for itself
        vec.states["frames_left"][:] = 20 + np.arange(vec.num_envs)
    if limit > 100:
        steps = limit - 30 - np.arange(vec.num_envs)
        vec.batch.arrays.envs["_steps"][:] = steps
        return steps
    return np.zeros(vec.num_envs, int)


def sampled_actions(vec, seed=0):
    """One action per env and step. [NUM_STEPS, NUM_ENVS, …]"""
    vec.action_space.seed(seed)
    return np.stack([vec.action_space.sample() for _ in range(NUM_STEPS)])


@MOST_OF_THEM_SLOWLY
def test_random_play(name):
    vec = hurtle.make_vec(name, NUM_ENVS)
    space, agents = vec.single_observation_space, vec.num_agents
    obs, infos = vec.reset(seed=0)
    begun = near_the_end(vec)
    lengths = np.repeat(begun[:, None], agents, 1)
    returns = np.zeros((NUM_ENVS, agents), np.float32)
    present = infos.get("agent_mask", np.ones((NUM_ENVS, agents), bool)).copy()
    episodes = 0
    for actions in sampled_actions(vec):
        obs, *outcome, infos = vec.step(actions)
        rewards, terminated, truncated = (array.reshape(NUM_ENVS, agents) for array in outcome)
        assert obs.shape == (NUM_ENVS, *space.shape)
        assert obs.dtype == space.dtype
        assert (obs >= space.low).all()
        assert (obs <= space.high).all()  # and no NaN, which compares as False
        assert np.isfinite(rewards).all()
        assert (rewards[~present] == 0).all()
        assert not (terminated | truncated)[~present].any()
        returns += np.where(present, rewards, np.float32(0))
        lengths += present
        ended = (terminated | truncated) & present
        if ended.any():
            np.testing.assert_array_equal(infos["_episode"].reshape(ended.shape), ended)
            np.testing.assert_array_equal(infos["episode"]["r"].reshape(ended.shape)[ended], returns[ended])
            np.testing.assert_array_equal(infos["episode"]["l"].reshape(ended.shape)[ended], lengths[ended])
            for metric in vec.native_spec.env.metrics:
                assert np.isfinite(infos["episode"][metric]).all()
            episodes += int(ended.sum())
        else:
            assert "episode" not in infos
        now = infos.get("agent_mask", present).copy()
        returns[ended | ~now] = 0
        lengths[ended | ~now] = 0
        present = now
    assert episodes >= NUM_ENVS / 2
    assert vec.single_action_space.contains(vec.single_action_space.sample())


@MOST_OF_THEM_SLOWLY
def test_final_observation_is_the_one_that_next_step_autoreset_shows(name):
    same, later = (hurtle.make_vec(name, NUM_ENVS, autoreset_mode=mode) for mode in ("SameStep", "NextStep"))
    for vec in (same, later):
        vec.reset(seed=4)
        near_the_end(vec)
    actions = sampled_actions(same, seed=1)

    # What each env showed after its k-th action, before any reset.
    shown = []
    for row in actions:
        obs, *outcome, infos = same.step(row)
        last = obs.copy()
        if "final_obs" in infos:
            last[infos["_final_obs"]] = infos["final_obs"][infos["_final_obs"]]
        shown.append((last, *(array.copy() for array in outcome)))
    finals = 0

    taken = np.zeros(NUM_ENVS, int)
    resets = np.zeros(NUM_ENVS, bool)
    everyone = np.arange(NUM_ENVS)
    for _ in range(2 * NUM_STEPS):
        if (taken == NUM_STEPS).any():
            break
        obs, *outcome, infos = later.step(actions[taken, everyone])
        for i in np.flatnonzero(~resets):
            expected = [array[i] for array in shown[taken[i]]]
            np.testing.assert_array_equal(obs[i], expected[0])
            for got, wanted in zip(outcome, expected[1:], strict=True):
                np.testing.assert_array_equal(got[i], wanted)
        taken += ~resets
        resets = np.where(resets, False, later.batch.arrays.ended)
        finals += int(resets.sum())
    assert finals >= NUM_ENVS / 2


@EVERY_ENV
def test_pictures(name):
    env = hurtle.make(name, render_mode="rgb_array", debug=True)
    env.reset(seed=0)
    first = env.render()
    for _ in range(3):
        *_, terminated, truncated, _ = env.step(env.action_space.sample())
        if np.all(terminated) or np.all(truncated):
            env.reset()
    for picture in (first, env.render()):
        assert picture.dtype == np.uint8
        assert picture.ndim == 3
        assert picture.shape[2] == 3
        assert min(picture.shape[:2]) >= 2
        assert len(np.unique(picture.reshape(-1, 3), axis=0)) > 1  # not all of one colour
    text = hurtle.make_vec(name, 2, render_mode="ansi", debug=True)
    text.reset(seed=0)
    pictures = text.render()
    assert len(pictures) == 2
    for picture in pictures:
        assert "▀" in picture
        assert picture.endswith("\x1b[0m")
    silent = hurtle.make_vec(name, 2, debug=True)
    silent.reset(seed=0)
    assert silent.render() is None


@EVERY_ENV
def test_examples_in_the_docs(name, monkeypatch):
    """Uncompiled: the examples' parameters would each be compiled just for this, and other tests compare both ways."""
    for function in (hurtle.make, hurtle.make_vec):
        monkeypatch.setattr(hurtle, function.__name__, partial(function, debug=True))
    results = doctest.testmod(importlib.import_module(native_class(name).__module__))
    assert results.attempted > 0
    assert results.failed == 0


@EVERY_ENV
def test_description(name):
    env = native_class(name)
    assert issubclass(env, Env)
    description = hurtle.make(name, debug=True).native_spec.description
    assert 20 < len(description) < 120
    assert description.endswith(".")


def test_render_mode_is_checked():
    with pytest.raises(HurtleError, match=r"render_mode must be one of \['rgb_array', 'ansi'\] or None, got 'human'"):
        hurtle.make("cartpole", render_mode="human")


# Names ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typo", "meant"), [("cartpol", "cartpole"), ("breakot", "breakout"), ("spaceinvaders", "space_invaders")]
)
@pytest.mark.parametrize("make", [hurtle.make, lambda name: hurtle.make_vec(name, 2)], ids=["make", "make_vec"])
def test_unknown_names_suggest_the_nearest(typo, meant, make):
    with pytest.raises(UnknownNameError, match=rf"No environment '{typo}'. Did you mean .*{meant}") as caught:
        make(typo)
    assert "hurtle envs" in str(caught.value)


@pytest.mark.parametrize(("name", "native"), [("minatar/breakout", "breakout"), ("MinAtar/SpaceInvaders-v1", "space_invaders")])
def test_a_native_env_under_the_name_of_another_package(name, native):
    with pytest.raises(UnknownNameError, match=rf"No environment '{name}'\. Did you mean {native}, Hurtle's own\?"):
        hurtle.make(name)


def test_a_folder_or_a_malformed_name_is_no_env(tmp_path, monkeypatch):
    with pytest.raises(UnknownNameError, match=r"is a folder; add a file and a class: .*/my_env.py:MyEnv"):
        hurtle.make(f"{tmp_path}/")
    (tmp_path / "CartPole-v1").mkdir()
    monkeypatch.chdir(tmp_path)
    assert hurtle.make("CartPole-v1").spec.id == "CartPole-v1"  # where its results are
    with pytest.raises(UnknownNameError, match="No environment 'a/b/c'"):
        hurtle.make("a/b/c")


def test_unknown_parameters_suggest_the_nearest():
    with pytest.raises(UnknownNameError, match=r"CartPole has no parameter 'gravty'. Did you mean gravity\?"):
        hurtle.make("cartpole", gravty=1.0)


ENV_FILE = '''
from hurtle.native import Box, Discrete, Env, float32
from neighbour import BONUS

class Tiny(Env):
    """Counts."""
    observation_space = Box(0.0, 100.0, (1,))
    action_space = Discrete(2)
    bonus: float = BONUS
    class State:
        x: float32
    def reset(self, state, rng):
        state.x = 0.0
    def step(self, state, action, rng):
        state.x += 1.0
        return self.bonus, state.x >= 3.0
    def observe(self, state, obs):
        obs[0] = state.x

def build(**parameters):
    import gymnasium
    return gymnasium.make("CartPole-v1", **parameters)
'''


@pytest.fixture
def env_file(tmp_path):
    (tmp_path / "neighbour.py").write_text("BONUS = 2.5\n")
    path = tmp_path / "tiny_env.py"
    path.write_text(ENV_FILE)
    return path


def test_env_from_a_file(env_file, monkeypatch):
    env = hurtle.make(f"{env_file}:Tiny", debug=True)
    env.reset(seed=0)
    assert [env.step(0)[1:3] for _ in range(3)] == [(2.5, False), (2.5, False), (2.5, True)]
    monkeypatch.chdir(env_file.parent)
    assert hurtle.make("tiny_env.py:Tiny", debug=True, bonus=1.0).native_spec.env.bonus == 1.0
    assert isinstance(hurtle.make(f"{env_file}:build").unwrapped, gymnasium.Env)


def test_env_from_a_file_that_does_not_have_it(env_file):
    with pytest.raises(UnknownNameError, match=r"has no 'Tini'. Did you mean Tiny\?"):
        hurtle.make(f"{env_file}:Tini")
    with pytest.raises(UnknownNameError, match=r"has no 'biuld'. Did you mean build\?"):
        hurtle.make(f"{env_file}:biuld")
    env_file.write_text(f"{ENV_FILE}\nfrom gymnasium import Env as Quests\nclass Quest(Quests): ...\ndef _quest(): ...\n")
    with pytest.raises(UnknownNameError, match=r"has no 'Qest'. Did you mean Quest\?"):
        hurtle.make(f"{env_file}:Qest")
    with pytest.raises(UnknownNameError, match=r"has no 'xyz'. Known: Quest, Tiny, build\.$"):
        hurtle.make(f"{env_file}:xyz")
    with pytest.raises(UnknownNameError, match=r"there is no file '/nowhere/env.py'"):
        hurtle.make("/nowhere/env.py:Tiny")


def test_register(monkeypatch):
    monkeypatch.setattr(registry, "_ZOO", dict(registry._ZOO))
    hurtle.register("walk", Walk)
    hurtle.register("walk", Walk)  # the same again is no conflict
    assert "walk" in names()
    assert hurtle.make("walk", debug=True).native_spec.name == "Walk"
    with pytest.raises(HurtleError, match="'cartpole' is taken"):
        hurtle.register("cartpole", Walk)
    with pytest.raises(HurtleError, match="register takes a subclass"):
        hurtle.register("walker", Walk())


def test_make_takes_classes_instances_ids_and_callables():
    assert hurtle.make(Walk, debug=True, start_range=1).native_spec.env.start_range == 1
    assert hurtle.make(Walk(start_range=2), debug=True).native_spec.env.start_range == 2
    assert hurtle.make("CartPole-v1").spec.id == "CartPole-v1"
    assert hurtle.make(lambda: gymnasium.make("Acrobot-v1")).spec.id == "Acrobot-v1"
    with pytest.raises(HurtleError, match="is an instance; pass its parameters to its constructor"):
        hurtle.make(Walk(), start_range=2)
    with pytest.raises(HurtleError, match="debug=True is for native envs"):
        hurtle.make("CartPole-v1", debug=True)
    with pytest.raises(HurtleError, match=r"made a int; expected a gymnasium.Env"):
        hurtle.make(lambda: 3)
    with pytest.raises(HurtleError, match="An environment is a name"):
        hurtle.make(3)


IMPORTS = """
import sys
import hurtle
assert "numba" not in sys.modules and "gymnasium" not in sys.modules, "import hurtle is not light"
vec = hurtle.make_vec("cartpole", 4)
vec.reset(seed=0)
vec.step(vec.action_space.sample())
hurtle.make("snake")
assert "torch" not in sys.modules, "envs need no torch"
"""


def test_envs_do_not_import_torch(run_python):
    run_python(IMPORTS)
