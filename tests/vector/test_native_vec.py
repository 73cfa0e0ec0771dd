"""`NativeVecEnv` keeps Gymnasium's contract for vector envs, and works inside Gymnasium's own wrappers."""

import gymnasium
import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from gymnasium.wrappers.vector import NormalizeReward, RecordEpisodeStatistics, TransformObservation
from sample_envs import Levers, PlainWalk, Shift, Thrust, Walk

import hurtle
from hurtle.errors import HurtleError, UnknownNameError

BOTH_MODES = pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP])


@pytest.mark.parametrize("env", [Walk, Levers, Thrust, Shift])
def test_spaces_are_batched(env):
    vec = hurtle.make_vec(env, 3, debug=True)
    assert isinstance(vec, VectorEnv)
    assert vec.num_envs == 3
    for single, batched in (
        (vec.single_observation_space, vec.observation_space),
        (vec.single_action_space, vec.action_space),
    ):
        assert batched == batch_space(single, 3)
    native = env()
    if env is Shift:
        assert vec.single_observation_space == batch_space(native.observation_space, 3)
        assert vec.num_agents == 3
    else:
        assert vec.single_observation_space == native.observation_space
        assert vec.single_action_space == native.action_space
    obs, infos = vec.reset(seed=0)
    assert vec.observation_space.contains(obs)
    assert isinstance(infos, dict)
    vec.action_space.seed(0)
    obs, rewards, terminated, truncated, infos = vec.step(vec.action_space.sample())
    shape = (3, 3) if env is Shift else (3,)
    assert vec.observation_space.contains(obs)
    assert (rewards.shape, terminated.shape, truncated.shape) == (shape, shape, shape)
    assert (rewards.dtype, terminated.dtype, truncated.dtype) == (np.float32, np.bool_, np.bool_)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (AutoresetMode.SAME_STEP, AutoresetMode.SAME_STEP),
        (AutoresetMode.NEXT_STEP, AutoresetMode.NEXT_STEP),
        ("SameStep", AutoresetMode.SAME_STEP),
        ("NextStep", AutoresetMode.NEXT_STEP),
    ],
)
def test_metadata_tells_the_autoreset_mode(given, expected):
    vec = hurtle.make_vec(Walk, 2, autoreset_mode=given, debug=True)
    assert vec.metadata["autoreset_mode"] is expected
    assert hurtle.make_vec(Walk, 2, debug=True).metadata["autoreset_mode"] is AutoresetMode.SAME_STEP


def test_metadata_belongs_to_the_instance():
    hurtle.make_vec(Walk, 2, autoreset_mode="NextStep", debug=True)
    assert VectorEnv.metadata == gymnasium.vector.VectorEnv.metadata
    assert "autoreset_mode" not in VectorEnv.metadata


def test_unbatched_seed_counts_up():
    vec = hurtle.make_vec(Walk, 4, debug=True)
    obs, _ = vec.reset(seed=20)
    assert obs.tolist() == [PlainWalk(20 + i).reset() for i in range(4)]
    obs, _ = vec.reset(seed=np.int64(21))
    assert obs.tolist() == [PlainWalk(21 + i).reset() for i in range(4)]


def test_a_list_of_seeds_with_none_leaves_those_streams_alone():
    vec = hurtle.make_vec(Walk, 3, debug=True)
    vec.reset(seed=50)
    plain = PlainWalk(51)
    plain.reset()
    obs, _ = vec.reset(seed=[7, None, 9])
    assert obs.tolist() == [PlainWalk(7).reset(), plain.reset(), PlainWalk(9).reset()]
    obs, _ = vec.reset(seed=(1, 2, 0))
    assert obs.tolist() == [PlainWalk(seed).reset() for seed in (1, 2, 0)]


@pytest.mark.parametrize("seed", [[1, 2], [1, 2, 3, 4], []])
def test_seeds_must_be_as_many_as_envs(seed):
    with pytest.raises(HurtleError, match=f"seed has {len(seed)} entries for 3 envs"):
        hurtle.make_vec(Walk, 3, debug=True).reset(seed=seed)


def test_reset_without_a_seed_goes_on():
    vec = hurtle.make_vec(Walk, 64, debug=True)
    first, _ = vec.reset(seed=0)
    first = first.copy()
    second, _ = vec.reset()
    assert (first != second).any()
    again, _ = vec.reset(seed=0)
    np.testing.assert_array_equal(again, first)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_envs": 0}, "num_envs must be an int of at least 1, got 0"),
        ({"num_envs": 2.5}, "num_envs must be an int of at least 1, got 2.5"),
        ({"num_envs": 2, "num_workers": 0}, "num_workers must be an int of at least 1, got 0"),
        ({"num_envs": 2, "seed": None}, "seed must be an int of at least 0, got None."),
        ({"num_envs": 2, "seed": 1.5}, "seed must be an int of at least 0, got 1.5."),
        ({"num_envs": 2, "seed": -1}, "seed must be an int of at least 0, got -1."),
        ({"num_envs": 2, "batch_size": 1, "seed": None}, "seed must be an int of at least 0, got None."),
        ({"num_envs": 2, "batch_size": 1, "seed": "7"}, "seed must be an int of at least 0, got '7'."),
        ({"num_envs": 2, "device": "tpu"}, "device must be 'cpu' or 'cuda', got 'tpu'"),
        ({"num_envs": 2, "autoreset_mode": AutoresetMode.DISABLED}, "SAME_STEP or NEXT_STEP"),
        ({"num_envs": 2, "render_mode": "human"}, "render_mode must be one of"),
        ({"num_envs": 2, "device": "cuda", "debug": True}, "debug=True runs on the CPU"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(HurtleError) as caught:
        hurtle.make_vec(Walk, **arguments)
    assert message in str(caught.value)


def test_unknown_autoreset_mode_and_back_end():
    with pytest.raises((HurtleError, ValueError), match="sometimes"):
        hurtle.make_vec(Walk, 2, autoreset_mode="sometimes", debug=True)
    with pytest.raises(UnknownNameError, match=r"No back end 'natif'. Did you mean native\?"):
        hurtle.make_vec(Walk, 2, backend="natif")


def test_states_are_the_envs_themselves():
    vec = hurtle.make_vec(Walk, 3, debug=True)
    vec.reset(seed=0)
    assert vec.states.dtype.names == ("x", "visits", "drift", "trail", "goal", "gain")
    vec.states["x"][:] = [4, -4, 0]
    obs, _, terminated, _, _ = vec.step(np.array([1, 1, 1]))  # action 1 stands still
    assert obs[:, 0].tolist() == [4.0, -4.0, 0.0]
    assert not terminated.any()


def test_close_is_final_and_may_come_twice():
    vec = hurtle.make_vec(Walk, 3, debug=True)
    vec.reset(seed=0)
    vec.close()
    assert vec.closed
    vec.close()


@pytest.mark.parametrize("batch_size", [4, 2])
def test_a_closed_vector_says_so(batch_size):
    vec = hurtle.make_vec(Walk, 4, batch_size=batch_size, debug=True)
    vec.reset(seed=0)
    actions = np.ones(batch_size, int)
    vec.close()
    for use in (
        lambda: vec.step(actions),
        lambda: vec.send(actions),
        vec.recv,
        vec.reset,
        vec.async_reset,
        lambda: vec.reset_env(0),
        lambda: vec.get_attr("x"),
        lambda: vec.set_attr("x", 0),
        lambda: vec.call("render"),
    ):
        with pytest.raises(HurtleError, match=r"^This vector env is closed; make a new one\.$"):
            use()


def test_closed_comes_before_not_yet_reset():
    vec = hurtle.make_vec(Walk, 2, debug=True)
    vec.close()
    for use in (lambda: vec.step(np.ones(2, int)), lambda: vec.play(3)):
        with pytest.raises(HurtleError, match="closed"):
            use()


# Single envs ---------------------------------------------------------------------------------------------------------


@BOTH_MODES
@pytest.mark.parametrize("copy", [False, True])
def test_reset_env_resets_that_env_and_no_other(mode, copy):
    """Envs 0, 1 and 3 continue as in an untouched vector, env 2 as a single env with the new seed."""
    vec, calm = (hurtle.make_vec(Walk, 4, autoreset_mode=mode, copy=copy, debug=True) for _ in range(2))
    single = hurtle.make_vec(Walk, 1, autoreset_mode=mode, copy=copy, debug=True)
    for each in (vec, calm):
        each.reset(seed=5)
    actions = np.random.default_rng(0).integers(3, size=(30, 4))
    for row in actions[:10]:
        vec.step(row)
        calm.step(row)
    before = [part.copy() for part in vec._outcome]
    obs, info = vec.reset_env(2, seed=40)
    assert info == {}
    assert obs.tolist() == PlainWalk(40).reset() == single.reset(seed=40)[0][0].tolist()
    others = [0, 1, 3]
    for now, then in zip(vec._outcome, before, strict=True):
        np.testing.assert_array_equal(now[others], then[others])
    kept = obs.copy()
    for row in actions[10:]:
        outcome, expected, alone = vec.step(row), calm.step(row), single.step(row[[2]])
        for ours, theirs, own in zip(outcome[:4], expected[:4], alone[:4], strict=True):
            np.testing.assert_array_equal(ours[others], theirs[others])
            np.testing.assert_array_equal(ours[2], own[0])
    np.testing.assert_array_equal(obs, kept)  # a copy


def test_reset_env_takes_options_and_goes_on_without_a_seed():
    vec = hurtle.make_vec(Walk, 3, debug=True)
    with pytest.raises(ResetNeeded, match=r"Call reset\(\) before reset_env\(\)"):
        vec.reset_env(0)
    vec.reset(seed=8)
    plain = PlainWalk(10)
    plain.reset()
    obs, _ = vec.reset_env(-1, options={"goal": 2, "gain": 4.0})
    assert obs.tolist() == plain.reset()
    assert vec.get_attr("goal") == (5, 5, 2)
    assert vec.get_attr("gain") == (0.5, 0.5, 4.0)
    with pytest.raises(UnknownNameError, match="Walk has no option 'reset_mask'"):
        vec.reset_env(0, options={"reset_mask": np.ones(3, bool)})
    with pytest.raises(HurtleError, match="seed is an int of at least 0, got -1"):
        vec.reset_env(0, seed=-1)


def test_reset_env_hands_out_the_masks_of_that_env():
    vec = hurtle.make_vec(Shift, 3, debug=True)
    vec.reset(seed=0)
    for _ in range(2):
        _, _, _, _, infos = vec.step(np.zeros((3, 3), int))
    assert infos["agent_mask"].tolist() == [[False, True, True]] * 3
    obs, info = vec.reset_env(1)
    assert obs.tolist() == [[0.0, 0.0]] * 3
    assert info["agent_mask"].tolist() == [True] * 3
    assert info["action_mask"].tolist() == [[True, True, False]] * 3
    assert infos["agent_mask"].tolist() == [[False, True, True], [True] * 3, [False, True, True]]
    vec.step(np.zeros((3, 3), int))
    assert info["action_mask"].tolist() == [[True, True, False]] * 3  # a copy


@pytest.mark.parametrize("batch_size", [6, 2])
def test_attributes_and_calls_of_single_envs(batch_size):
    vec = hurtle.make_vec(Walk, 6, batch_size=batch_size, render_mode="rgb_array", debug=True)
    vec.reset(seed=0)
    while batch_size < 6 and len(vec._ready):
        vec.recv()
    vec.set_attr("x", [0, 1, 2, 3, 4, -4])
    assert vec.get_attr("x") == (0, 1, 2, 3, 4, -4)
    assert vec.get_attr("x", indices=[5, 0, -2]) == (-4, 0, 4)
    assert vec.get_attr("start_range", indices=3) == (3,)
    vec.set_attr("x", (-1, -2), indices=[4, 1])
    vec.set_attr("x", 2, indices=np.array([0, 5]))
    assert vec.call("x") == (2, -2, 2, 3, -1, 2)
    assert vec.call("x", indices=[]) == ()
    vec.set_attr("trail", [[1, 2, 3, 4], [5, 6, 7, 8]], indices=[0, 5])
    assert [trail.tolist() for trail in vec.get_attr("trail", indices=[5, 0])] == [[5, 6, 7, 8], [1, 2, 3, 4]]
    pictures = vec.call("render", indices=[3, 1])
    assert [int(picture[0, :, 0].argmax()) for picture in pictures] == [8, 3]  # column x + 5
    np.testing.assert_array_equal(vec.render()[1], pictures[1])
    for wrong, message in (
        (lambda: vec.get_attr("x", indices=6), r"There are envs 0 … 5, got \[6\]"),
        (lambda: vec.get_attr("x", indices=[True, False]), r"indices must be an int or ints, got \[True, False\]"),
        (lambda: vec.set_attr("x", [1, 2], indices=[0, 1, 2]), "set_attr got 2 values of 'x' for 3 envs"),
        (lambda: vec.set_attr("x", np.zeros(6)), r"'x' of one env is int16 of shape \(\), got array"),
        (lambda: vec.set_attr("start_range", 1), "'start_range' is a parameter"),
        (lambda: vec.get_attr("y"), "Walk has no 'y'"),
    ):
        with pytest.raises(HurtleError, match=message):
            wrong()
    assert vec.get_attr("x") == (2, -2, 2, 3, -1, 2)


def test_running_envs_are_refused():
    vec = hurtle.make_vec(Walk, 2, debug=True)
    vec.reset(seed=0)
    vec.send(np.ones(2, int))
    for use in (lambda: vec.reset_env(1), lambda: vec.get_attr("x", 1), lambda: vec.set_attr("x", 0, 1)):
        with pytest.raises(HurtleError, match=r"Envs \[1\] are still running: call recv\(\) until they are back"):
            use()
    vec.recv()
    vec.reset_env(1)


# Pools ---------------------------------------------------------------------------------------------------------------


def test_a_pool_resets_the_envs_in_hand_and_refuses_the_running_ones():
    vec = hurtle.make_vec(Walk, 4, batch_size=2, debug=True)
    obs, infos = vec.reset(seed=0)
    assert infos["env_id"].tolist() == [0, 1]
    for use in (
        lambda: vec.reset_env(3),
        lambda: vec.call("x", indices=[0, 3]),
        lambda: vec.get_attr("x", indices=[3]),
        lambda: vec.set_attr("x", 0, indices=3),
    ):
        with pytest.raises(HurtleError, match=r"Envs \[3\] are still running: call recv\(\) until they are back"):
            use()
    with pytest.raises(HurtleError, match=r"Envs \[2, 3\] are still running"):
        vec.get_attr("x")
    first, _ = vec.reset_env(1, seed=40)
    assert first.tolist() == PlainWalk(40).reset() == obs[1].tolist()
    assert obs[0].tolist() == PlainWalk(0).reset()
    plain = [PlainWalk(0), PlainWalk(40), PlainWalk(2), PlainWalk(3)]
    firsts = [each.reset() for each in plain]
    obs, *_ = vec.step(np.array([2, 2]))  # the actions of envs 0 and 1; the results of 2 and 3
    assert obs.tolist() == firsts[2:]
    assert vec.reset_env(3, seed=41)[0].tolist() == PlainWalk(41).reset()
    obs, *_, infos = vec.recv()
    assert infos["env_id"].tolist() == [0, 1]
    assert obs.tolist() == [each.step(2)[0] for each in plain[:2]]


@pytest.mark.parametrize("kind", [list, tuple, np.array])
def test_seeds_of_a_pool(kind):
    vec = hurtle.make_vec(Walk, 4, batch_size=2, debug=True)
    seeds = [9, 3, 7, 1]
    for _ in range(2):
        obs, _ = vec.reset(seed=kind(seeds))
        assert obs.tolist() == [PlainWalk(seed).reset() for seed in seeds[:2]]
        assert vec.recv()[0].tolist() == [PlainWalk(seed).reset() for seed in seeds[2:]]
    vec.reset(seed=np.int64(20))
    assert vec.recv()[0].tolist() == [PlainWalk(seed).reset() for seed in (22, 23)]
    for wrong, message in (
        (kind([1, 2, 3, 4, 5, 6]), r"^seed has 6 entries for 4 envs\.$"),
        (kind([1, 2]), r"^seed has 2 entries for 4 envs\.$"),
        (kind([1, 2, 3, -4]), "seed must be an int of at least 0, got"),
        (-1, "seed must be an int of at least 0, got -1"),
        ("abcd", "seed must be an int of at least 0, got 'abcd'"),
    ):
        with pytest.raises(HurtleError, match=message):
            vec.async_reset(wrong)
    assert vec.get_attr("x", indices=3) == (PlainWalk(23).reset()[0],)  # nothing was reset


def test_a_list_with_none_leaves_those_streams_of_a_pool_alone():
    vec = hurtle.make_vec(Walk, 4, batch_size=2, debug=True)
    vec.reset(seed=50)
    plain = PlainWalk(52)
    plain.reset()
    vec.reset(seed=[1, 2, None, 4])
    assert vec.recv()[0].tolist() == [plain.reset(), PlainWalk(4).reset()]


def test_env_ids_are_the_callers_own():
    vec = hurtle.make_vec(Walk, 4, batch_size=2, debug=True)
    _, infos = vec.reset(seed=0)
    infos["env_id"][:] = 77
    vec.step(np.ones(2, int))
    *_, infos = vec.recv()
    assert infos["env_id"].tolist() == [0, 1]


# Gymnasium's wrappers ------------------------------------------------------------------------------------------------


@BOTH_MODES
def test_record_episode_statistics_agrees_with_our_own(mode):
    """Under a key of its own: native envs use `episode` themselves."""
    vec = RecordEpisodeStatistics(hurtle.make_vec(Walk, 6, autoreset_mode=mode), stats_key="recorded")
    vec.reset(seed=0)
    actions = np.random.default_rng(0).integers(3, size=(100, 6))
    episodes = 0
    for row in actions:
        *_, infos = vec.step(row)
        assert ("recorded" in infos) == ("episode" in infos)
        if "episode" in infos:
            ended = infos["_episode"]
            np.testing.assert_array_equal(infos["_recorded"], ended)
            np.testing.assert_allclose(infos["recorded"]["r"][ended], infos["episode"]["r"][ended])
            np.testing.assert_array_equal(infos["recorded"]["l"][ended], infos["episode"]["l"][ended])
            episodes += int(ended.sum())
    assert vec.episode_count == episodes > 50
    assert max(vec.length_queue) == 7


def test_record_episode_statistics_under_its_usual_key_says_that_they_are_there_already():
    """As with any env that reports its own: the wrapper never overwrites them."""
    vec = RecordEpisodeStatistics(hurtle.make_vec(Walk, 6))
    vec.reset(seed=0)
    for _ in range(6):
        vec.env.step(np.ones(6, int))  # to the last step but one, for envs that have not ended earlier
    with pytest.raises(ValueError, match="'episode' but this key already exists"):
        vec.step(np.ones(6, int))


@pytest.mark.filterwarnings("ignore:.*observation space")
def test_other_wrappers():
    vec = hurtle.make_vec(Walk, 6, autoreset_mode="NextStep")
    wrapped = NormalizeReward(TransformObservation(vec, lambda obs: obs * 2.0, vec.single_observation_space))
    obs, _ = wrapped.reset(seed=0)
    np.testing.assert_array_equal(obs, 2.0 * vec._outcome[0])
    for _ in range(20):
        obs, rewards, *_ = wrapped.step(wrapped.action_space.sample())
        assert np.isfinite(rewards).all()
    wrapped.close()
    assert vec.closed


def test_steps_between_send_and_recv_are_refused():
    vec = hurtle.make_vec("cartpole", 2)
    vec.reset(seed=0)
    vec.send(np.zeros(2, int))
    with pytest.raises(HurtleError, match="call recv"):
        vec.step(np.zeros(2, int))
    vec.recv()
    vec.step(np.zeros(2, int))


def test_a_reset_mask_may_be_a_view():
    vec = hurtle.make_vec("cartpole", 4)
    vec.reset(seed=0)
    obs = vec.step(np.ones(4, int))[0].copy()
    strided = np.array([True, False, True, False, False, False, False, False])[::2]
    after, _ = vec.reset(options={"reset_mask": strided})
    assert (after != obs).all(axis=1).tolist() == strided.tolist() == [True, True, False, False]
