"""The engine on the CPU: episodes, autoreset, statistics, runtime parameters, actions, determinism, cache, threads."""

import gc
import itertools
import json
import threading

import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from sample_envs import Crew, Levers, Masked, PlainWalk, Shift, Thrust, Walk

import hurtle
from hurtle.envs.registry import names
from hurtle.errors import ActionError, EnvDefinitionError, HurtleError, ResetMaskError, UnknownNameError
from hurtle.native import Box, Env
from hurtle.native.build import build
from hurtle.native.code_cache import cache_folder
from hurtle.native.env import EnvSpec
from hurtle.native.generate import generate

BOTH_TARGETS = pytest.mark.parametrize("debug", [False, True], ids=["compiled", "uncompiled"])
BOTH_MODES = pytest.mark.parametrize("mode", ["SameStep", "NextStep"])


def play(vec, actions, seed=0, options=None):
    """Everything a vector of envs returns for the given actions. actions [T, N, …]"""
    obs, infos = vec.reset(seed=seed, options=options)
    outcomes = [(obs.copy(), *([None] * 3), copied(infos))]
    for row in actions:
        *arrays, infos = vec.step(row)
        outcomes.append((*(array.copy() for array in arrays), copied(infos)))
    return outcomes


def copied(infos, fresh=None):
    """A copy of infos in which stale rows, those no mask marks as new, are zero."""
    if not isinstance(infos, dict):
        rows = np.ones(len(infos), bool) if fresh is None else fresh
        if rows.ndim > 1 and infos.ndim == 1:
            rows = rows.any(axis=1)
        return np.where(rows.reshape(rows.shape + (1,) * (infos.ndim - rows.ndim)), infos, 0)
    return {key: copied(value, infos.get(f"_{key}", fresh)) for key, value in infos.items()}


def assert_same(first, second):
    """Two outcomes are bitwise equal, including infos."""
    assert len(first) == len(second)
    for t, (a, b) in enumerate(zip(first, second, strict=True)):
        for x, y in zip(a[:4], b[:4], strict=True):
            if x is not None:
                np.testing.assert_array_equal(x, y, err_msg=f"step {t}")
        assert_same_infos(a[4], b[4], f"step {t}")


def assert_same_infos(a, b, where):
    assert a.keys() == b.keys(), where
    for key in a:
        if isinstance(a[key], dict):
            assert_same_infos(a[key], b[key], where)
        else:
            np.testing.assert_array_equal(a[key], b[key], err_msg=f"{where}: {key}")


# Autoreset against a plain loop --------------------------------------------------------------------------------------


@BOTH_TARGETS
@BOTH_MODES
@pytest.mark.parametrize("options", [{}, {"goal": 3, "gain": 0.25}], ids=["defaults", "options"])
def test_autoreset_is_a_plain_loop_over_single_envs(debug, mode, options):
    num_envs, num_steps, seed = 16, 120, 5
    actions = np.random.default_rng(0).integers(3, size=(num_steps, num_envs))
    vec = hurtle.make_vec(Walk, num_envs, autoreset_mode=mode, debug=debug)
    plain = [PlainWalk(seed + i, **options) for i in range(num_envs)]
    obs, infos = vec.reset(seed=seed, options=options)
    assert obs.tolist() == [walk.reset() for walk in plain]
    assert infos == {}
    waits_for_reset = [False] * num_envs
    ends = {"terminated": 0, "truncated": 0, "both": 0}
    for row in actions:
        obs, rewards, terminated, truncated, infos = vec.step(row)
        any_ended = False
        for i, walk in enumerate(plain):
            if waits_for_reset[i]:
                assert obs[i].tolist() == walk.reset()
                assert (rewards[i], terminated[i], truncated[i]) == (0.0, False, False)
                waits_for_reset[i] = False
                continue
            expected_obs, reward, ended, out_of_time = walk.step(int(row[i]))
            assert (rewards[i], terminated[i], truncated[i]) == (reward, ended, out_of_time)
            if not (ended or out_of_time):
                assert obs[i].tolist() == expected_obs
                if "_episode" in infos:
                    assert not infos["_episode"][i]
                continue
            any_ended = True
            ends["both" if ended and out_of_time else "terminated" if ended else "truncated"] += 1
            assert infos["_episode"][i]
            assert {name: infos["episode"][name][i] for name in infos["episode"]} == walk.episode()
            if mode == "SameStep":
                assert infos["_final_obs"][i]
                assert infos["final_obs"][i].tolist() == expected_obs
                assert infos["final_info"]["episode"]["r"][i] == walk.episode()["r"]
                assert infos["_final_info"][i]
                assert obs[i].tolist() == walk.reset()
            else:
                assert "final_obs" not in infos
                assert obs[i].tolist() == expected_obs
                waits_for_reset[i] = True
        assert ("episode" in infos) == any_ended
    assert min(ends.values()) >= 3, ends


def test_both_flags_are_true_when_the_goal_is_reached_in_the_last_step():
    vec = hurtle.make_vec(Walk, 3)
    vec.reset(seed=0, options={"goal": 100})
    for _ in range(6):
        vec.step(np.ones(3, int))  # action 1 stands still
    vec.states["x"][:] = 50
    vec.states["goal"][1] = 10
    _, _, terminated, truncated, infos = vec.step(np.ones(3, int))
    assert terminated.tolist() == [False, True, False]
    assert truncated.tolist() == [True, True, True]
    assert infos["episode"]["l"].tolist() == [7, 7, 7]


@BOTH_TARGETS
def test_state_and_observations_arrive_zeroed(debug):
    vec = hurtle.make_vec(Thrust, 2, debug=debug)
    obs, _ = vec.reset(seed=0)
    assert (obs[:, 0, 0] != 0).all()
    assert (obs[:, 0, 1:] == 0).all()
    assert (obs[:, 1] == 0).all()
    for t in range(1, 5):
        obs, _, _, _, _ = vec.step(np.full((2, 2), 0.5, np.float32))
        row = t % 2
        np.testing.assert_array_equal(obs[:, row], np.tile(np.float32([0.5, 0.5, t]), (2, 1)))
        assert (obs[:, 1 - row] == 0).all()
    obs, _, _, truncated, infos = vec.step(np.full((2, 2), 0.5, np.float32))
    assert truncated.all()
    assert (infos["final_obs"][:, 1] == np.float32([0.5, 0.5, 5.0])).all()
    assert (infos["final_obs"][:, 0] == 0).all()
    assert (vec.states["time"] == 0).all()
    assert (vec.states["total"] == 0).all()
    assert (vec.states["last"][:, 1] == 0).all()
    assert (obs[:, 1] == 0).all()


def test_without_max_steps_nothing_is_truncated():
    vec = hurtle.make_vec("password", 2, length=12, debug=True)
    vec.reset(seed=0)
    flags = np.array([np.array(vec.step(np.zeros(2, int))[2:4]) for _ in range(24)])
    assert not flags[:, 1].any()
    assert flags[:, 0, 0].nonzero()[0].tolist() == [11, 23]


# Runtime parameters --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def walks():
    return hurtle.make_vec(Walk, 5)


def test_options_set_runtime_parameters_of_all_or_each(walks):
    walks.reset(seed=0, options={"goal": 9, "gain": [1.0, 2.0, 3.0, 4.0, 5.0]})
    assert walks.states["goal"].tolist() == [9] * 5
    assert walks.states["gain"].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    rewards = walks.step(np.full(5, 2))[1]
    np.testing.assert_array_equal(abs(rewards + 0.125), [1.0, 2.0, 3.0, 4.0, 5.0])


def test_runtime_parameters_survive_resets_without_a_seed(walks):
    walks.reset(seed=0, options={"gain": 2.0})
    for _ in range(20):  # many autoresets
        walks.step(np.full(5, 2))
    walks.reset()
    assert walks.states["gain"].tolist() == [2.0] * 5
    walks.reset(seed=1)
    assert walks.states["gain"].tolist() == [0.5] * 5


def test_options_may_come_with_a_reset_of_some(walks):
    walks.reset(seed=0)
    walks.step(np.full(5, 2))
    before = walks.states.copy()
    obs_before = walks._outcome[0].copy()
    mask = np.array([True, False, False, True, False])
    obs, _ = walks.reset(seed=[40, 41, 42, 43, 44], options={"reset_mask": mask, "gain": 8.0})
    assert walks.states["gain"].tolist() == [8.0, 0.5, 0.5, 8.0, 0.5]
    np.testing.assert_array_equal(walks.states[~mask], before[~mask])
    np.testing.assert_array_equal(obs[~mask], obs_before[~mask])
    assert obs[0].tolist() == PlainWalk(40).reset()
    assert obs[3].tolist() == PlainWalk(43).reset()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"gaol": 1}, UnknownNameError, r"Walk has no option 'gaol'. Did you mean goal\?"),
        ({"x": 1}, UnknownNameError, "An option is a State field with a default"),
        ({"goal": [1, 2]}, EnvDefinitionError, r"takes one value or an array of shape \(5,\), got shape \(2,\)"),
        ({"reset_mask": [1, 0, 0, 0, 0]}, ResetMaskError, r"reset_mask'\]` must have `dtype=np.bool_`, got int64"),
        ({"reset_mask": [True]}, ResetMaskError, r"reset_mask'\]` must have shape `\(5,\)`, got \(1,\)"),
    ],
)
def test_wrong_options(walks, options, error, message):
    with pytest.raises(error, match=message):
        walks.reset(seed=0, options=options)


# The same seed -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["snake", Walk], ids=["snake", "walk"])
@pytest.mark.usefixtures("all_threads")
def test_trajectories_depend_on_nothing_but_the_seed(name):
    few, many = 4, 33
    actions = np.random.default_rng(1).integers(3, size=(80, many, *((4,) if name == "snake" else ())))
    reference = play(hurtle.make_vec(name, many, num_workers=1), actions, seed=11)
    two = hurtle.make_vec(name, many, num_workers=2)
    assert two.num_workers == 2
    assert_same(reference, play(two, actions, seed=11))
    assert_same(reference, play(two, actions, seed=11))  # earlier play leaves no trace
    timed = hurtle.make_vec(name, many)
    assert_same(reference, play(timed, actions, seed=11))
    fewer = play(hurtle.make_vec(name, few), actions[:, :few], seed=11)
    for big, small in zip(reference, fewer, strict=True):
        for a, b in zip(big[:4], small[:4], strict=True):
            if a is not None:
                np.testing.assert_array_equal(a[:few], b)
    for vec in (two, timed):
        vec.close()


def test_an_env_of_a_vector_is_a_single_env_with_its_seed():
    actions = np.random.default_rng(2).integers(3, size=(60, 3))
    played = play(hurtle.make_vec(Walk, 3, autoreset_mode="NextStep"), actions, seed=100)
    for i in range(3):
        env = hurtle.make(Walk)
        obs, _ = env.reset(seed=100 + i)
        over = False
        for t, action in enumerate(actions[:, i]):
            assert obs.tolist() == played[t][0][i].tolist()
            if over:
                (obs, _), over = env.reset(), False
                continue
            obs, reward, terminated, truncated, info = env.step(action)
            assert (reward, terminated, truncated) == tuple(array[i] for array in played[t + 1][1:4])
            over = terminated or truncated
            assert ("episode" in info) == over
            if over:
                assert info["episode"] == {name: values[i] for name, values in played[t + 1][4]["episode"].items()}


def test_a_seed_given_at_construction_is_that_of_the_first_reset():
    first, _ = hurtle.make_vec(Walk, 64, seed=9).reset()
    second, _ = hurtle.make_vec(Walk, 64).reset(seed=9)
    np.testing.assert_array_equal(first, second)
    third, _ = hurtle.make_vec(Walk, 64, seed=10).reset()
    assert (first != third).any()
    np.testing.assert_array_equal(first[1:], third[:-1])


def test_single_envs_without_a_seed_differ():
    env = hurtle.make(Walk)
    starts = {float(hurtle.make(Walk, start_range=100, max_steps=50, debug=True).reset()[0][0]) for _ in range(6)}
    assert len(starts) > 1
    with pytest.raises(ResetNeeded):
        env.step(0)


# Every env of the zoo, compiled and uncompiled -----------------------------------------------------------------------

TRANSCENDENTAL = {"cartpole", "mountain_car", "mountain_car_continuous", "acrobot", "pendulum", "bandit"}


def random_actions(vec, num_steps, seed=0):
    vec.action_space.seed(seed)
    return [vec.action_space.sample() for _ in range(num_steps)]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name in ("asterix", "freeway", "seaquest", "space_invaders")))
        for name in names()  # those are compared with their originals, compiled, in tests/envs
    ],
)
def test_compiled_code_does_what_plain_python_does(name):
    num_envs = 2
    compiled, debug = (hurtle.make_vec(name, num_envs, debug=flag) for flag in (False, True))
    exact = name not in TRANSCENDENTAL
    slow = name in ("snake", "seaquest", "freeway", "space_invaders")
    limit = compiled.native_spec.max_steps
    np.testing.assert_array_equal(compiled.reset(seed=3)[0], debug.reset(seed=3)[0])
    if limit:  # begin near the end of an episode
        for vec in (compiled, debug):
            vec._batch.arrays.envs["_steps"][:] = max(0, limit - 20)
    for t, actions in enumerate(random_actions(compiled, 30 if slow else 60)):
        if not exact:
            compiled._batch.arrays.envs[...] = debug._batch.arrays.envs
        outcome, expected = compiled.step(actions), debug.step(actions)
        for a, b in zip(outcome[:4], expected[:4], strict=True):
            if exact or a.dtype == bool:
                np.testing.assert_array_equal(a, b, err_msg=f"step {t}")
            else:
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5, err_msg=f"step {t}")
        assert outcome[4].keys() == expected[4].keys()
        if exact:
            assert_same_infos(outcome[4], expected[4], f"step {t}")
            np.testing.assert_array_equal(compiled._batch.arrays.envs, debug._batch.arrays.envs)


# Several agents ------------------------------------------------------------------------------------------------------


def test_agents_come_and_go():
    """Agent a works a + 2 steps, is absent for two, and returns; the shift closes after 9 steps."""
    vec = hurtle.make_vec(Shift, 2)
    obs, infos = vec.reset(seed=0)
    assert obs.shape == (2, 3, 2)
    assert infos["agent_mask"].tolist() == [[True] * 3] * 2
    assert infos["action_mask"].shape == (2, 3, 3)
    assert infos["action_mask"][0].tolist() == [[True, True, False]] * 3
    # For each step: who was done, with which return and length; who is present afterwards.
    story = [
        ({}, "012"),
        ({0: (2.0, 2)}, "12"),
        ({1: (6.0, 3)}, "2"),
        ({2: (12.0, 4)}, "0"),  # agent 0 is back
        ({}, "01"),
        ({0: (2.0, 2)}, "12"),
        ({}, "12"),
        ({1: (6.0, 3)}, "02"),
        ({0: (1.0, 1), 2: (9.0, 3)}, "012"),  # closing time: everyone present is done, then it starts over
        ({}, "012"),
        ({0: (2.0, 2)}, "12"),
    ]
    away = np.zeros(3, bool)
    for t, (done, present) in enumerate(story):
        obs, rewards, terminated, truncated, infos = vec.step(np.zeros((2, 3), int))
        expected = np.where(away, 0.0, [1.0, 2.0, 3.0])
        for i in range(2):
            assert rewards[i].tolist() == expected.tolist(), t
            assert terminated[i].tolist() == [a in done for a in range(3)], t
            assert not truncated[i].any()
            assert infos["agent_mask"][i].tolist() == [str(a) in present for a in range(3)], t
            if done:
                assert infos["_episode"][i].tolist() == [a in done for a in range(3)]
                for a, (total, length) in done.items():
                    assert (infos["episode"]["r"][i, a], infos["episode"]["l"][i, a]) == (total, length), t
                assert infos["_final_obs"][i] == (t == 8)
        assert ("episode" in infos) == bool(done)
        if t == 8:
            assert infos["episode"]["clock"].tolist() == [9.0, 9.0]
            assert infos["final_obs"][0].tolist() == [[1.0, 0.0], [0.0, 1.0], [3.0, 0.0]]
        away = ~infos["agent_mask"][0].copy()


def test_agents_that_stay_begin_again_at_once():
    vec = hurtle.make_vec(Crew, 1, debug=True)
    vec.reset(seed=0, options={"closing": 100})
    lengths = {a: [] for a in range(3)}
    returns = {a: [] for a in range(3)}
    for t in range(12):
        _, _, _, truncated, infos = vec.step(np.full((1, 3), 2))
        assert "agent_mask" not in infos
        assert truncated.all() == (t == 11)
        for a in range(3):
            if "episode" in infos and infos["_episode"][0, a]:
                lengths[a].append(int(infos["episode"]["l"][0, a]))
                returns[a].append(float(infos["episode"]["r"][0, a]))
    assert lengths == {0: [2] * 6, 1: [3] * 4, 2: [4] * 3}
    assert returns == {0: [3.0] * 6, 1: [7.5] * 4, 2: [14.0] * 3}
    assert vec.states["clock"][0] == 0


def test_truncation_ends_the_episodes_of_those_present():
    vec = hurtle.make_vec(Shift, 1, max_steps=3, debug=True)
    vec.reset(seed=0)
    for _ in range(2):
        vec.step(np.zeros((1, 3), int))
    _, _, terminated, truncated, infos = vec.step(np.zeros((1, 3), int))
    assert terminated.tolist() == [[False, True, False]]
    assert truncated.tolist() == [[False, True, True]]  # agent 0 was absent
    assert infos["_episode"].tolist() == [[False, True, True]]
    assert infos["episode"]["l"][0, 1:].tolist() == [3, 3]
    assert infos["_final_obs"].tolist() == [True]


@BOTH_MODES
def test_several_agents_compiled_and_uncompiled(mode):
    actions = np.random.default_rng(0).integers(3, size=(40, 3, 3))
    compiled, debug = (hurtle.make_vec(Shift, 3, autoreset_mode=mode, debug=flag) for flag in (False, True))
    assert_same(play(compiled, actions), play(debug, actions))


def test_single_env_of_several_agents():
    env = hurtle.make(Shift)
    obs, info = env.reset(seed=0)
    assert obs.shape == (3, 2)
    assert info["agent_mask"].tolist() == [True] * 3
    assert env.action_space.shape == (3,)
    _, reward, terminated, _, _ = env.step([0, 1, 2])
    assert reward.tolist() == [1.0, 2.25, 3.5]
    assert not terminated.any()
    _, _, terminated, _, info = env.step([0, 0, 0])
    assert terminated.tolist() == [True, False, False]
    assert info["agent_mask"].tolist() == [False, True, True]


def test_single_env_tells_the_episodes_of_its_agents():
    env = hurtle.make(Shift, debug=True)
    env.reset(seed=0)
    assert "episode" not in env.step([0, 0, 0])[4]
    info = env.step([0, 0, 0])[4]
    assert info["_episode"].tolist() == [True, False, False]
    assert info["episode"]["r"][0] == 2.0
    assert info["episode"]["l"][0] == 2


def test_single_env_hands_out_copies():
    env = hurtle.make(Shift, debug=True)
    env.reset(seed=0)
    for _ in range(9):
        *_, info = env.step([0, 0, 0])
    kept = {name: np.copy(value) for name, value in info["episode"].items()}
    env.reset(seed=1)
    for _ in range(9):
        env.step([2, 2, 2])
    for name, value in kept.items():
        np.testing.assert_array_equal(info["episode"][name], value)


# Action spaces, masks and observation types --------------------------------------------------------------------------


@BOTH_TARGETS
def test_multi_discrete_actions_and_masks(debug):
    vec = hurtle.make_vec(Levers, 3, debug=debug)
    obs, infos = vec.reset(seed=0)
    assert obs.shape == (3, 5)
    assert obs.dtype == np.uint8
    for t in range(4):
        dice, time_before = obs[:, 4].copy(), obs[:, 0].copy()
        expected = np.ones((3, 5), bool)
        expected[:, 0] = time_before % 2 == 0
        expected[:, 4] = dice > 3
        np.testing.assert_array_equal(infos["action_mask"], expected)
        actions = np.array([[1, -1], [2, 0], [1 + t % 2, 1]])
        obs, rewards, terminated, _, infos = vec.step(actions)
        assert rewards.tolist() == (actions[:, 0] * 10 + actions[:, 1]).tolist()
        running = ~terminated
        np.testing.assert_array_equal(obs[running, 1], actions[running, 0])
        np.testing.assert_array_equal(obs[running, 2], actions[running, 1] + 1)
        assert (obs[:, 3] == 0).all()


@BOTH_TARGETS
def test_discrete_actions_with_a_start_and_16_bit_observations(debug):
    vec = hurtle.make_vec(Masked, 4, debug=debug)
    obs, infos = vec.reset(seed=0)
    assert obs.dtype == np.int16
    levels = vec.states["level"].copy()
    for i, level in enumerate(levels):
        assert obs[i].tolist() == [-100 * (k + 1) if k == level else level for k in range(3)]
        assert infos["action_mask"][i].tolist() == [k < level for k in range(4)]
    _, rewards, terminated, _, infos = vec.step([2, 3, 4, 5])
    assert rewards.tolist() == [2.0, 3.0, 4.0, 5.0]
    assert infos["action_mask"][~terminated, 3].all()
    np.testing.assert_array_equal(vec.states["level"][~terminated], ((levels + np.arange(1, 5)) % 5)[~terminated])


@pytest.mark.parametrize(
    ("env", "actions", "bad", "shown"),
    [
        (Walk, np.ones(4, int), 3, "3"),
        (Walk, np.ones(4, int), -1, "-1"),
        (Masked, np.full(4, 2), 1, "1"),
        (Masked, np.full(4, 2), 6, "6"),
        (Levers, np.ones((4, 2), int), [2, 2], "[2 2]"),
        (Levers, np.ones((4, 2), int), [0, 0], "[0 0]"),
        (Thrust, np.zeros((4, 2), np.float32), [0.0, np.nan], "nan"),
    ],
)
@pytest.mark.parametrize("num_workers", [1, 2])
def test_illegal_actions_name_env_and_action(env, actions, bad, shown, num_workers):
    vec = hurtle.make_vec(env, 4, num_workers=num_workers)
    vec.reset(seed=0)
    for culprit in (0, 3):
        wrong = actions.copy()
        wrong[culprit] = bad
        with pytest.raises(ActionError) as caught:
            vec.step(wrong)
        assert f"Env {culprit} got the action " in str(caught.value)
        assert shown in str(caught.value)
        assert str(vec.single_action_space) in str(caught.value)
    vec.close()


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_refused_step_is_no_step_for_anybody(num_workers):
    vec = hurtle.make_vec(Walk, 4, num_workers=num_workers)
    vec.reset(seed=0)
    before = vec.states.copy()
    with pytest.raises(ActionError):
        vec.step(np.array([3, 2, 2, 2]))
    np.testing.assert_array_equal(vec.states, before)
    vec.close()


@pytest.mark.parametrize(
    "actions",
    [1, [1], [1, 1, 1], np.ones((4, 1), np.int32), np.ones(1, np.int32), np.ones((1, 4), np.int32), [0.5] * 4, ["a"] * 4],
)
def test_actions_of_the_wrong_shape_or_type(actions):
    vec = hurtle.make_vec(Walk, 4)
    vec.reset(seed=0)
    with pytest.raises(ActionError, match=r"int64 of shape \(4,\)"):
        vec.step(actions)


@pytest.mark.parametrize("kind", [list, np.int32, np.uint8, bool, "strided"])
def test_actions_of_other_types_are_converted(kind):
    vec = hurtle.make_vec(Walk, 4)
    values = np.array([0, 1, 1, 0])
    expected = play(vec, [values])
    given = values.tolist() if kind is list else np.repeat(values, 2)[::2] if kind == "strided" else values.astype(kind)
    assert_same(expected, play(vec, [given]))


@pytest.mark.parametrize("action", [0.7, 3, -1, [0, 1], None, "left"])
def test_single_envs_refuse_wrong_actions(action):
    env = hurtle.make(Walk)
    env.reset(seed=0)
    with pytest.raises(ActionError):
        env.step(action)


def test_box_actions_need_not_be_inside_the_box():
    vec = hurtle.make_vec(Thrust, 2)
    vec.reset(seed=0)
    rewards = vec.step(np.array([[5.0, 1.0], [-5.0, 2.0]], np.float32))[1]
    assert rewards.tolist() == [4.0, -7.0]


class Everything(Env):
    """An observation of each supported type; uncompiled only."""

    action_space = Box(-1.0, 1.0, (1,))

    class State:
        pass

    def reset(self, state, rng):
        pass

    def step(self, state, action, rng):
        return action[0], False

    def observe(self, state, obs):
        obs[0] = 1
        obs[2] = 2


@pytest.mark.parametrize("dtype", [np.float32, np.uint8, np.int8, np.int16, np.int32])
def test_observation_types(dtype):
    env = type("Typed", (Everything,), {"observation_space": Box(0, 2, (3,), dtype)})
    obs, _ = hurtle.make_vec(env, 2, debug=True).reset(seed=0)
    assert obs.dtype == dtype
    assert obs.tolist() == [[1, 0, 2]] * 2


# Random play inside the engine ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("all_threads")
def test_play_is_the_same_on_any_number_of_threads():
    results = []
    for num_workers in (1, 2):
        vec = hurtle.make_vec(Walk, 64, num_workers=num_workers)
        vec.reset(seed=0)
        ended = vec.play(50, seed=3)
        results.append((ended, vec._batch.arrays.envs.tobytes(), vec._batch.arrays.obs.tobytes()))
        vec.close()
    assert results[0] == results[1]
    assert 64 * 50 / 7 <= results[0][0] < 64 * 50 / 2


def test_the_number_of_threads_may_change_at_any_time(other_number_each_call, monkeypatch):
    monkeypatch.setattr("hurtle.native.batch.TRIALS", 0)
    monkeypatch.setattr("hurtle.native.batch.REPORT_SECONDS", 0.0)
    vecs = [hurtle.make_vec(Walk, 37, num_workers=num_workers) for num_workers in (1, 4)]
    for tuner in ("_stepping", "_playing"):
        other_number_each_call(vecs[1].batch, tuner).fitting = lambda seconds: 3
    actions = np.random.default_rng(0).integers(3, size=(20, 37))
    results = []
    for vec in vecs:
        vec.reset(seed=0)
        seen = [np.copy(part) for action in actions for part in vec.step(action)[:4]]
        ended = vec.play(50, seed=3)
        results.append((ended, [part.tobytes() for part in seen], vec.batch.arrays.envs.tobytes()))
        vec.close()
    assert results[0] == results[1]


@pytest.mark.parametrize("env", [Walk, Levers, Thrust, Masked, Shift])
def test_played_actions_cover_the_space(env):
    vec = hurtle.make_vec(env, 40, debug=True)
    vec.reset(seed=0)
    drawn = []
    for _ in range(12):
        vec._batch.play(1, seed=0)
        drawn.append(vec._batch.actions.copy())
    drawn = np.stack(drawn)
    assert vec._batch.functions.first_illegal(drawn[0], 0, 40) == -1
    if env is Thrust:
        assert -1.0 <= drawn[..., 0].min() < -0.9
        assert 0.9 < drawn[..., 0].max() <= 1.0
        assert -1.0 <= drawn[..., 1].min() < -0.8  # a missing bound counts as ±1
        assert 1.8 < drawn[..., 1].max() <= 2.0
    elif env is Levers:
        assert set(drawn[..., 0].ravel()) == {1, 2}
        assert set(drawn[..., 1].ravel()) == {-1, 0, 1}
    else:
        space = env.action_space
        counts = np.bincount(drawn.ravel() - space.start, minlength=space.n)
        assert counts.size == space.n
        assert counts.min() > 0.7 * drawn.size / space.n


# Arrays, threads, closing --------------------------------------------------------------------------------------------


def test_arrays_are_reused_unless_copies_are_wanted():
    shared, apart = hurtle.make_vec(Walk, 6), hurtle.make_vec(Walk, 6, copy=True)
    for vec, same in ((shared, True), (apart, False)):
        vec.reset(seed=0)
        steps = [vec.step(np.full(6, 2)) for _ in range(14)]
        for first, second in itertools.pairwise(steps):
            for a, b in zip(first[:4], second[:4], strict=True):
                assert np.shares_memory(a, b) == same
        ends = [infos for *_, infos in steps if "episode" in infos]
        assert np.shares_memory(ends[0]["final_obs"], ends[1]["final_obs"]) == same
        assert np.shares_memory(ends[0]["episode"]["r"], ends[1]["episode"]["r"]) == same
    obs, _ = apart.reset(seed=0)
    kept = obs.copy()
    apart.step(np.full(6, 2))
    np.testing.assert_array_equal(obs, kept)


def helper_threads_of(make):
    """Step a vector of envs once; returns it and the threads it started."""
    before = set(threading.enumerate())
    vec = make()
    vec.reset(seed=0)
    vec.step(np.ones(8, int))
    return vec, [thread for thread in threading.enumerate() if thread not in before]


@pytest.mark.usefixtures("all_threads")
def test_threads_end_with_close_or_with_the_object():
    for by_close in (True, False):
        vec, helpers = helper_threads_of(lambda: hurtle.make_vec(Walk, 8, num_workers=3))
        assert len(helpers) == 2  # the caller's own thread is the third
        if by_close:
            vec.close()
            vec.close()
        else:
            del vec
            gc.collect()
        for thread in helpers:
            thread.join(300)
            assert not thread.is_alive()


def test_small_envs_are_left_on_one_thread(monkeypatch):
    monkeypatch.setattr("hurtle.native.batch.SHORT_SECONDS", 1.0)
    vec = hurtle.make_vec(Walk, 8)
    vec.reset(seed=0)
    for _ in range(20):
        vec.step(np.ones(8, int))
    assert vec.num_workers == 1
    vec.close()


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.usefixtures("all_threads")
def test_a_step_after_close_does_not_hang(num_workers):
    vec = hurtle.make_vec(Walk, 8, num_workers=num_workers)
    vec.reset(seed=0)
    vec.close()
    outcome = []

    def step():
        try:
            outcome.append(vec.step(np.ones(8, int)))
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=step, daemon=True)
    thread.start()
    thread.join(300)
    assert outcome, "step waits for threads that have ended"
    assert isinstance(outcome[0], tuple | HurtleError)


# The disk cache ------------------------------------------------------------------------------------------------------


def test_parameters_make_different_modules_but_the_limit_of_steps_does_not():
    def module(env):
        return build(EnvSpec.of(env), "cpu").functions.__name__

    assert module(Walk()) != module(Walk(start_range=0))
    assert module(Walk()) == module(Walk(max_steps=8)) == module(Walk(max_steps=None))
    vecs = [hurtle.make_vec(Walk, 3, max_steps=limit, start_range=0) for limit in (1, 2, None)]
    for vec in vecs:
        vec.reset(seed=0)
    cut = [[bool(vec.step(np.ones(3, int))[3].any()) for _ in range(4)] for vec in vecs]
    assert cut == [[True] * 4, [False, True] * 2, [False] * 4]


class Slows(Walk):
    def step(self, state, action, rng):
        return 1.0 / self.max_steps, False


def test_a_limit_of_steps_that_the_env_reads_is_a_constant():
    assert generate(EnvSpec.of(Slows()), "cpu")[0] != generate(EnvSpec.of(Slows(max_steps=8)), "cpu")[0]
    vec = hurtle.make_vec(Slows, 2, max_steps=4)
    vec.reset()
    found = []
    for _ in range(5):
        _, reward, _, truncated, _ = vec.step(np.zeros(2, int))
        found.append((float(reward[0]), bool(truncated[0])))
    assert found == [(0.25, False), (0.25, False), (0.25, False), (0.25, True), (0.25, False)]


def test_an_unusable_cache_folder_is_replaced(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("HURTLE_CACHE_DIR", str(file / "below"))
    cache_folder.cache_clear()
    try:
        assert cache_folder().is_dir()
        assert tmp_path not in cache_folder().parents
    finally:
        monkeypatch.undo()
        cache_folder.cache_clear()


CACHE_SCRIPT = """
import json
import numpy as np
import hurtle
from sample_envs import Walk
vec = hurtle.make_vec(Walk, 3)
obs, _ = vec.reset(seed=1)
for _ in range(5):
    obs, *_ = vec.step(np.ones(3, int))
print(json.dumps([obs.tolist(), vec._batch._program.functions.__file__]))
"""


def test_a_second_process_does_not_compile_again(run_python, tmp_path):
    cache = tmp_path / "cache"

    def run():
        result = run_python(CACHE_SCRIPT, HURTLE_CACHE_DIR=str(cache))
        files = {str(path): path.stat().st_mtime_ns for path in cache.rglob("*") if path.is_file() and path.suffix != ".pyc"}
        return json.loads(result.stdout), result.stderr, files

    first, said, files = run()
    assert "compiling Walk (first run only)" in said
    assert first[1].startswith(str(cache))
    suffixes = [path.rpartition(".")[2] for path in files]
    assert suffixes.count("py") == 2  # the env, and the calls that all envs share
    assert (
        suffixes.count("nbi") == suffixes.count("nbc") == 2 + 3
    )  # run_envs and first_illegal; reset_envs, first_illegal and step_envs
    second, said, files_after = run()
    assert said == ""
    assert second == first
    assert files_after == files
