"""`NativeVecEnv` keeps Gymnasium's contract for vector envs, and works inside Gymnasium's own wrappers."""

import gymnasium
import numpy as np
import pytest
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


# Gymnasium's wrappers ------------------------------------------------------------------------------------------------


@BOTH_MODES
def test_record_episode_statistics_agrees_with_our_own(mode):
    """Under a key of its own: `episode` is where native envs put theirs."""
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
    """As with any env that tells its own: the wrapper never overwrites them."""
    vec = RecordEpisodeStatistics(hurtle.make_vec(Walk, 6))
    vec.reset(seed=0)
    for _ in range(6):
        vec.env.step(np.ones(6, int))  # to the last step but one, whoever has not ended before
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
