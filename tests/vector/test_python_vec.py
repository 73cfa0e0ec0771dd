"""Vectors of Python envs: every back end gives the same results as Gymnasium."""

from functools import partial

import gymnasium
import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array, iterate
from vector_envs import BadSpace, Counter, Fixed, Masked, Nested, Slow

import hurtle
from hurtle.errors import ActionError, EmulationError, EnvFailedError, HurtleError, UnknownNameError

BACKENDS = ["serial", "process"]
both = pytest.mark.parametrize("backend", BACKENDS)
process_slowly = pytest.mark.parametrize("backend", ["serial", pytest.param("process", marks=pytest.mark.slow)])
"""For what the back ends share: in worker processes only in the slow suite."""


def make(env, num_envs=4, *, backend, workers=1, **options):
    """A vector; `workers` are those of the process back end."""
    if backend == "process":
        options["num_workers"] = workers
    return hurtle.make_vec(env, num_envs, backend=backend, **options)


def play(vec, steps=30, seed=3):
    """Everything a vector env returns for fixed actions, copied."""
    rng = np.random.default_rng(0)
    obs, infos = vec.reset(seed=seed)
    history = [(np.copy(obs), {**infos})]
    for _ in range(steps):
        actions = rng.integers(0, 5, vec.num_envs)
        obs, rewards, terminated, truncated, infos = vec.step(actions)
        history.append((*map(np.copy, (obs, rewards, terminated, truncated)), infos))
    return history


@pytest.mark.parametrize(
    ("mode", "backend"),
    [
        (AutoresetMode.SAME_STEP, "serial"),
        (AutoresetMode.SAME_STEP, "process"),
        (AutoresetMode.NEXT_STEP, "serial"),
        pytest.param(AutoresetMode.NEXT_STEP, "process", marks=pytest.mark.slow),
    ],
)
def test_equals_gymnasium(backend, mode):
    theirs = SyncVectorEnv([Counter] * 5, autoreset_mode=mode)
    with make(Counter, 5, backend=backend, workers=2, autoreset_mode=mode, copy=True) as vec:
        assert isinstance(vec, VectorEnv)
        assert vec.metadata["autoreset_mode"] is mode
        assert vec.single_observation_space == theirs.single_observation_space
        assert vec.observation_space == theirs.observation_space
        assert vec.action_space == theirs.action_space
        for ours, expected in zip(play(vec), play(theirs), strict=True):
            for one, other in zip(ours[:-1], expected[:-1], strict=True):
                assert one.dtype == other.dtype
                np.testing.assert_array_equal(one, other)
            for key, value in expected[-1].items():
                if key == "final_obs":
                    rows = np.flatnonzero(expected[-1]["_final_obs"])
                    np.testing.assert_array_equal(np.stack([value[i] for i in rows]), ours[-1][key][rows])
                elif key == "final_info":
                    np.testing.assert_array_equal(ours[-1][key]["squared"], value["squared"])
                    np.testing.assert_array_equal(ours[-1][key]["last"]["action"], value["last"]["action"])
                elif not isinstance(value, dict):
                    np.testing.assert_array_equal(ours[-1][key], value)


@process_slowly
def test_episode_statistics(backend):
    with make(Counter, 4, backend=backend, copy=True) as vec:
        returns, lengths = np.zeros(4), np.zeros(4, int)
        ended = 0
        for _, rewards, terminated, truncated, infos in play(vec, 40, seed=0)[1:]:
            returns += rewards
            lengths += 1
            over = terminated | truncated
            assert ("episode" in infos) == over.any()
            if over.any():
                np.testing.assert_array_equal(infos["_episode"], over)
                np.testing.assert_allclose(infos["episode"]["r"][over], returns[over])
                np.testing.assert_array_equal(infos["episode"]["l"][over], lengths[over])
                np.testing.assert_array_equal(infos["final_info"]["episode"]["l"][over], lengths[over])
                returns[over] = lengths[over] = 0
            ended += over.sum()
        assert ended > 20


@process_slowly
def test_episode_statistics_without_the_reset_steps(backend):
    with make(Counter, 3, backend=backend, autoreset_mode="NextStep") as vec:
        lengths = [
            length
            for *_, infos in play(vec, 40, seed=0)[1:]
            if "episode" in infos
            for length in infos["episode"]["l"][infos["_episode"]]
        ]
        assert set(lengths) == {3, 4, 5}
        assert "final_obs" not in vec.step(np.zeros(3, int))[4]


@process_slowly
def test_autoreset_disabled(backend):
    with make(Counter, 2, backend=backend, autoreset_mode="DISABLED") as vec:
        vec.reset(seed=0)  # env 0 ends after 3 steps, env 1 after 4
        for _ in range(3):
            obs, _, terminated, _, infos = vec.step(np.zeros(2, int))
        assert terminated.tolist() == [True, False]
        assert obs[:, 2].tolist() == [3, 3]
        obs, infos = vec.reset(options={"reset_mask": terminated.copy()})
        assert obs[:, 2].tolist() == [0, 3]
        *_, infos = vec.step(np.zeros(2, int))
        assert infos["episode"]["l"].tolist()[1] == 4


@both
def test_trees_and_text(backend):
    """Structured observations and actions are batched as in Gymnasium."""
    theirs = SyncVectorEnv([Nested] * 3, autoreset_mode=AutoresetMode.SAME_STEP)
    with make(Nested, 3, backend=backend, copy=True) as vec:
        assert vec.observation_space == theirs.observation_space
        ours_obs, _ = vec.reset(seed=1)
        their_obs, _ = theirs.reset(seed=1)
        theirs.action_space.seed(0)
        for _ in range(9):
            assert_same_tree(ours_obs, their_obs)
            actions = theirs.action_space.sample()
            ours_obs, rewards, terminated, _, infos = vec.step(actions)
            their_obs, their_rewards, their_terminated, _, their_infos = theirs.step(actions)
            np.testing.assert_array_equal(rewards, their_rewards)
            np.testing.assert_array_equal(terminated, their_terminated)
            if terminated.any():
                for one, other in zip(infos["final_obs"], their_infos["final_obs"], strict=True):
                    assert_same_tree(one, other)


def assert_same_tree(one, other):
    if isinstance(other, dict):
        assert list(one) == list(other)
        for key in other:
            assert_same_tree(one[key], other[key])
    elif isinstance(other, tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same_tree(a, b)
    else:
        np.testing.assert_array_equal(one, other)
        assert getattr(one, "dtype", None) == getattr(other, "dtype", None)


@process_slowly
def test_emulated(backend):
    """`emulate=True` is flat in both directions, and `unflatten` gives the views back."""
    single = Fixed()
    with make(Fixed, 3, backend=backend, emulate=True) as vec:
        obs, _ = vec.reset(seed=1)
        assert vec.single_observation_space.dtype == np.uint8
        assert vec.single_action_space == gymnasium.spaces.MultiDiscrete([3, 2, 2])
        for _ in range(3):
            obs, rewards, *_ = vec.step(np.array([[1, 0, 1]] * 3))
            assert rewards.tolist() == [2.0] * 3
        tree = vec.unflatten(obs)
        assert np.shares_memory(tree["inventory"]["gold"], obs)
        expected, _ = single.reset(seed=1 + 2)
        for _ in range(3):
            expected, *_ = single.step({"move": 1, "use": np.array([0, 1], np.int8)})
        assert tree["inventory"]["gold"][2] == expected["inventory"]["gold"]
        np.testing.assert_array_equal(tree["pair"][0][2], expected["pair"][0])


@both
def test_an_emulated_env_writes_into_the_batch(backend):
    with make(lambda: hurtle.emulate(Nested(), shape_reward=lambda r, o, a, i: -r), 3, backend=backend) as vec:
        obs, _ = vec.reset(seed=1)
        obs, rewards, *_ = vec.step(np.array([[2, 1, 1]] * 3))
        assert rewards.tolist() == [-4.0] * 3
        assert vec.unflatten(obs)["inventory"]["items"].shape == (3, 4)
        for _ in range(3):
            obs, _, terminated, _, infos = vec.step(np.zeros((3, 3), int))
        assert terminated.all()
        assert not np.array_equal(infos["final_obs"], obs)


@process_slowly
def test_action_masks(backend):
    with make(Masked, 2, backend=backend) as vec:
        _, infos = vec.reset(seed=0)
        assert infos["action_mask"].tolist() == [[True, False, False, False, False]] * 2
        assert infos["action_mask"].dtype == bool
        *_, infos = vec.step(np.zeros(2, int))
        assert infos["action_mask"].sum(1).tolist() == [2, 2]
        assert infos["_action_mask"].tolist() == [True, True]


@both
def test_arrays_are_reused_unless_copied(backend):
    with make(Counter, 2, backend=backend) as vec:
        vec.reset(seed=0)
        first, *_ = vec.step(np.zeros(2, int))
        second, *_ = vec.step(np.zeros(2, int))
        assert np.shares_memory(first, second)
    with make(Counter, 1, backend=backend, copy=True) as vec:
        vec.reset(seed=0)
        first, *_ = vec.step(np.zeros(1, int))
        second, *_ = vec.step(np.zeros(1, int))
        assert first[0, 2] == 1
        assert second[0, 2] == 2


@process_slowly
def test_seeds(backend):
    with make(Counter, 4, backend=backend, seed=7) as vec:
        assert vec.reset()[0][:, 0].tolist() == [7, 8, 9, 10]
        assert vec.reset()[0][:, :2].tolist() == [[7, 1], [8, 1], [9, 1], [10, 1]]
        assert vec.reset(seed=[1, None, 5, None])[0][:, 0].tolist() == [1, 8, 5, 10]
        with pytest.raises(HurtleError, match="seed has 2 entries for 4 envs"):
            vec.reset(seed=[1, 2])
        with pytest.raises(HurtleError, match="seed must be an int of at least 0, got -3"):
            vec.reset(seed=-3)
    with make(Counter, 4, backend=backend, seed=7) as vec:
        assert vec.reset(seed=[None, 1, None, 2])[0][:, 0].tolist() == [7, 1, 9, 2]


@both
def test_single_envs(backend):
    with make(Counter, 3, backend=backend, workers=2, render_mode="rgb_array") as vec:
        vec.reset(seed=0)
        vec.step(np.zeros(3, int))
        assert vec.call("triple", 2) == (6, 6, 6)
        assert vec.call("triple", 2, add=1, indices=[2, 0]) == (7, 7)
        assert vec.get_attr("given") == (0, 1, 2)
        assert vec.get_attr("given", indices=1) == (1,)
        vec.set_attr("task", [4, 5, 6])
        assert vec.get_attr("task") == (4, 5, 6)
        vec.set_attr("task", 9, indices=-1)
        assert vec.get_attr("task") == (4, 5, 9)
        assert [picture[0, 0, 0] for picture in vec.render()] == [1, 1, 1]
        obs, info = vec.reset_env(1, seed=30, options={"task": 8})
        assert obs[0] == 30
        assert info == {"task": 8}
        obs, *_ = vec.step(np.zeros(3, int))
        assert obs[:, 2].tolist() == [2, 1, 2]
        assert obs[:, 0].tolist() == [0, 30, 2]
        *_, infos = vec.step(np.zeros(3, int))
        assert infos["episode"]["l"].tolist()[0] == 3
        with pytest.raises(HurtleError, match="2 values of 'task' for 3 envs"):
            vec.set_attr("task", [1, 2])
        with pytest.raises(HurtleError, match=r"envs 0 … 2, got \[3\]"):
            vec.get_attr("task", indices=3)
        with pytest.raises(EnvFailedError, match=r"AttributeError in the call of 'nonsense'"):
            vec.call("nonsense")
        with pytest.raises(EnvFailedError, match=r"Env 1 raised TypeError in the call of 'triple'"):
            vec.call("triple", indices=[1, 2])
        assert vec.get_attr("given") == (0, 30, 2)  # an error in a call does not end the vector


@process_slowly
def test_options_reach_the_envs(backend):
    with make(Counter, 3, backend=backend, workers=2) as vec:
        _, infos = vec.reset(seed=0, options={"task": 3})
        assert infos["task"].tolist() == [3, 3, 3]
        vec.step(np.zeros(3, int))
        obs, infos = vec.reset(options={"reset_mask": np.array([False, True, False]), "task": 4})
        assert infos["task"].tolist() == [0, 4, 0]
        assert infos["_task"].tolist() == [False, True, False]
        assert obs[:, 2].tolist() == [1, 0, 1]
        with pytest.raises(HurtleError, match="reset_mask"):
            vec.reset(options={"reset_mask": np.array([1, 0, 0])})


@pytest.mark.parametrize(
    ("backend", "order"),
    [("serial", "ready"), ("serial", "fair"), ("process", "ready"), pytest.param("process", "fair", marks=pytest.mark.slow)],
)
def test_pool(backend, order):
    """Every env of a pool takes the same trajectory as in a synchronous vector."""
    with make(Counter, 6, backend=backend, workers=2, batch_size=2, order=order) as vec:
        assert vec.observation_space.shape == (2, 4)
        vec.async_reset(seed=5)
        seen = {i: [] for i in range(6)}
        counts = np.zeros(6, int)
        while counts.min() < 12:
            obs, rewards, terminated, truncated, infos = vec.recv()
            ids = infos["env_id"]
            assert obs.shape == (2, 4)
            assert sorted(set(ids)) == ids.tolist()
            for k, i in enumerate(ids):
                seen[i].append((*obs[k], rewards[k], terminated[k], truncated[k]))
            counts[ids] += 1
            vec.send(ids % 5)
        if order == "fair":
            assert counts.max() - counts.min() <= 1
    reference = make(Counter, 6, backend="serial")
    obs, _ = reference.reset(seed=5)
    expected = {i: [(*obs[i], 0.0, False, False)] for i in range(6)}
    for _ in range(counts.max()):
        obs, rewards, terminated, truncated, _ = reference.step(np.arange(6) % 5)
        for i in range(6):
            expected[i].append((*obs[i], rewards[i], terminated[i], truncated[i]))
    for i, rows in seen.items():
        np.testing.assert_array_equal(rows, expected[i][: len(rows)])
        assert len(rows) >= 12


def test_a_pool_returns_the_first_that_are_ready():
    slow = partial(Slow, seconds=0.001, slow=0.5, slow_seed=1)
    with make(slow, 2, backend="process", workers=2, batch_size=1, check=False) as vec:
        vec.async_reset(seed=0)
        late = []
        for _ in range(10):
            *_, infos = vec.recv()
            late.append(1 in infos["env_id"])
            vec.send(np.zeros(1, int))
        assert sum(late) <= 2


def test_double_buffering_is_zero_copy():
    with make(Counter, 8, backend="process", workers=2, batch_size=4, order="fair") as vec:
        vec.async_reset(seed=0)
        for k in range(6):
            obs, *_, infos = vec.recv()
            assert infos["env_id"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]][k % 2]
            assert np.shares_memory(obs, vec._rows.obs)
            vec.send(np.zeros(4, int))


@process_slowly
def test_pool_through_step_and_reset(backend):
    with make(Counter, 4, backend=backend, batch_size=2, order="fair") as vec:
        obs, infos = vec.reset(seed=0)
        assert infos["env_id"].tolist() == [0, 1]
        obs, *_, infos = vec.step(np.zeros(2, int))
        assert infos["env_id"].tolist() == [2, 3]
        obs, *_, infos = vec.step(np.zeros(2, int))
        assert infos["env_id"].tolist() == [0, 1]
        assert obs[:, 2].tolist() == [1, 1]


@process_slowly
def test_wrong_calls(backend):
    with make(Counter, 3, backend=backend) as vec:
        with pytest.raises(ResetNeeded, match="Call reset"):
            vec.step(np.zeros(3, int))
        with pytest.raises(HurtleError, match=r"recv\(\) would wait forever: 0 envs are running and batch_size is 3"):
            vec.recv()
        vec.reset(seed=0)
        with pytest.raises(ActionError, match=r"int64 of shape \(3,\) .* got int64 of shape \(2,\)"):
            vec.step(np.zeros(2, int))
        with pytest.raises(ActionError, match=r"got float64 of shape \(3,\)"):
            vec.step(np.zeros(3))
        with pytest.raises(HurtleError, match="or pass env_id"):
            vec.send(np.zeros(0, int))
        vec.send(np.zeros(3, int), env_id=[0, 1, 2])
        with pytest.raises(HurtleError, match=r"Envs \[1\] are still running"):
            vec.send(np.zeros(1, int), env_id=[1])
        with pytest.raises(HurtleError, match="call recv"):
            vec.step(np.zeros(3, int))
        with pytest.raises(HurtleError, match="call recv"):
            vec.reset()
        assert vec.recv()[4]["env_id"].tolist() == [0, 1, 2]
        with pytest.raises(HurtleError, match="Each env at most once"):
            vec.send(np.zeros(2, int), env_id=[1, 1])
    vec.close()
    with make(Nested, 1, backend=backend) as vec:
        vec.reset(seed=0)
        with pytest.raises(ActionError, match="batch of 1"):
            vec.step({"move": np.zeros(1, int)})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_envs": 0}, "num_envs must be an int of at least 1, got 0"),
        ({"batch_size": 9}, "batch_size=9 is more than num_envs=4"),
        ({"num_workers": 5}, "num_workers=5 is more than num_envs=4"),
        ({"order": "fiar"}, "Did you mean fair"),
        ({"backend": "proces"}, "Did you mean process"),
        ({"backend": "native"}, "backend='native' is for native envs"),
        ({"device": "cuda"}, "device='cuda' runs native envs"),
        ({"step_timeout": 0}, "step_timeout must be a positive number"),
        ({"seed": -1}, "seed must be an int of at least 0, got -1"),
        ({"seed": None}, "seed must be an int of at least 0, got None"),
        ({"step_timeout": "a"}, "step_timeout must be a positive number"),
        ({"num_workers": 2}, "serial steps all envs in this process: leave out num_workers"),
        ({"step_timeout": 1.0}, "serial steps all envs in this process: leave out step_timeout"),
        ({"num_worker": 2}, "make_vec has no argument 'num_worker'. Did you mean num_workers"),
        ({"autoreset_mode": "sometimes"}, "autoreset_mode must be NEXT_STEP or SAME_STEP or DISABLED"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(HurtleError, match=message):
        make(Counter, **{"num_envs": 4, "backend": "serial", **arguments})


def test_unknown_parameters_and_makers():
    with pytest.raises(UnknownNameError, match="Did you mean"):
        make("CartPol-v1", backend="serial")
    for backend in BACKENDS:
        with pytest.raises(HurtleError, match="emulate takes a Gymnasium env"):
            make(lambda: 3, 1, backend=backend)
        with pytest.raises(UnknownNameError, match="CartPole-v9"):
            make("CartPole-v9", backend=backend)


@process_slowly
def test_observations_that_contradict_their_space(backend):
    with pytest.raises(
        EmulationError, match=r'observation\["a"\]: expected float32 of shape \(2,\), got float32 of shape \(3,\)'
    ):
        make(BadSpace, 2, backend=backend)


@both
def test_closures_and_lambdas(backend):
    scale = 3

    class Local(Counter):
        def step(self, action):
            obs, reward, *rest = super().step(action)
            return obs, reward * scale, *rest

    with make(lambda: Local(), 2, backend=backend) as vec:
        vec.reset(seed=0)
        assert vec.step(np.ones(2, int))[1].tolist() == pytest.approx([3.3, 3.3])


@process_slowly
def test_ids_parameters_and_wrappers(backend):
    with make("CartPole-v1", 2, backend=backend, sutton_barto_reward=True) as vec:
        obs, _ = vec.reset(seed=0)
        expected, _ = gymnasium.make("CartPole-v1").reset(seed=1)
        np.testing.assert_array_equal(obs[1], expected)
        assert vec.step(np.zeros(2, int))[1].tolist() == [0.0, 0.0]
        assert vec.spec.id == "CartPole-v1"


@process_slowly
def test_native_envs_one_at_a_time(backend):
    with make("cartpole", 2, backend=backend) as vec:
        native = hurtle.make_vec("cartpole", 2)
        np.testing.assert_array_equal(vec.reset(seed=4)[0], native.reset(seed=4)[0])


def test_envs_keep_their_actions():
    """An env may keep the array it was given; the next step must not change it."""

    class Keeps(Counter):
        action_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
        kept = ()

        def step(self, action):
            self.kept = (*self.kept, action)
            return super().step(action[0])

        def first(self):
            return self.kept[0].tolist()

    with make(Keeps, 1, backend="serial") as vec:
        vec.reset(seed=0)
        vec.step(np.full((1, 2), 0.5, np.float32))
        vec.step(np.full((1, 2), 0.25, np.float32))
        assert vec.call("first") == ([0.5, 0.5],)


def test_gymnasiums_own_batching_of_actions():
    """What `iterate` gives an env in Gymnasium's vectors is what ours gives."""
    kinds = []

    class Spy(Nested):
        def step(self, action):
            kinds.append(action)
            return super().step(action)

    with make(Spy, 2, backend="serial") as vec:
        vec.reset(seed=0)
        kinds.clear()
        vec.action_space.seed(3)
        actions = vec.action_space.sample()
        vec.step(actions)
    for ours, theirs in zip(kinds, iterate(vec.action_space, actions), strict=True):
        assert_same_tree(ours, dict(theirs))
    batch = concatenate(Spy.action_space, kinds, create_empty_array(Spy.action_space, 2))
    assert_same_tree(batch, dict(actions))


@pytest.mark.parametrize(
    ("backend", "num_envs", "batch_size"),
    [
        ("serial", 5, 2),
        ("serial", 7, 3),
        ("serial", 6, 2),
        ("process", 7, 3),
        pytest.param("process", 5, 2, marks=pytest.mark.slow),
        pytest.param("process", 6, 2, marks=pytest.mark.slow),
    ],
)
def test_fair_is_fair(backend, num_envs, batch_size):
    with make(Counter, num_envs, backend=backend, workers=2, batch_size=batch_size, order="fair") as vec:
        vec.async_reset(seed=0)
        counts = np.zeros(num_envs, int)
        for _ in range(60):
            *_, infos = vec.recv()
            counts[infos["env_id"]] += 1
            assert counts.max() - counts.min() <= 1
            infos["env_id"] += 1  # the user owns what is returned
            vec.send(np.zeros(batch_size, int))


@both
def test_a_pool_is_reset_again(backend):
    with make(Counter, 5, backend=backend, workers=2, batch_size=2) as vec:
        for seed in (3, 8):
            obs, infos = vec.reset(seed=seed)
            assert obs[:, 0].tolist() == (infos["env_id"] + seed).tolist()
            assert (obs[:, 2] == 0).all()
            for _ in range(5):
                vec.step(np.zeros(2, int))
        vec.reset(seed=1)
        for wrong in ({"options": 3}, {"seed": "x"}):  # rejected before discarding anything that runs
            with pytest.raises(HurtleError, match="must be"):
                vec.async_reset(**wrong)
        vec.step(np.zeros(2, int))
        with pytest.raises(HurtleError, match="A pool resets all its envs"):
            vec.async_reset(options={"reset_mask": np.ones(5, bool)})


@process_slowly
def test_an_error_in_a_step_ends_the_vector(backend):
    from vector_envs import Faulty

    with make(partial(Faulty, at=2, seeds=(1,)), backend=backend) as vec:
        vec.reset(seed=0)
        vec.step(np.zeros(4, int))
        for _ in range(2):
            with pytest.raises(HurtleError, match=r"Env 1 raised|ended by an earlier error"):
                vec.step(np.zeros(4, int))


def test_statistics_of_a_wrapper_win():
    """RecordEpisodeStatistics under a reward scaling knows the true return."""

    def wrapped():
        recorded = gymnasium.wrappers.RecordEpisodeStatistics(Counter())
        return gymnasium.wrappers.TransformReward(recorded, lambda reward: 0.1 * reward)

    theirs = SyncVectorEnv([wrapped] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    with make(wrapped, 2, backend="serial") as vec:
        vec.reset(seed=0)
        theirs.reset(seed=0)
        for _ in range(3):
            *_, infos = vec.step(np.full(2, 4))
            *_, expected = theirs.step(np.full(2, 4))
        assert infos["final_info"]["episode"]["r"][0] == expected["final_info"]["episode"]["r"][0] == pytest.approx(12.3)
        assert "t" in infos["final_info"]["episode"]
        assert infos["episode"]["r"][0] == pytest.approx(1.23)


def test_an_env_may_use_its_info_again():
    class Reuses(Counter):
        def __init__(self):
            super().__init__()
            self.info = {}

        def reset(self, *, seed=None, options=None):
            self.info.clear()
            return super().reset(seed=seed, options=options)[0], self.info

        def step(self, action):
            *outcome, _ = super().step(action)
            self.info["steps"] = self.steps
            return *outcome, self.info

    with make(Reuses, 1, backend="serial") as vec:
        vec.reset(seed=0)
        for _ in range(3):
            *_, infos = vec.step(np.zeros(1, int))
        assert infos["final_info"]["steps"].tolist() == [3]


@process_slowly
def test_floats_are_refused_in_trees(backend):
    with make(Nested, 2, backend=backend) as vec:
        vec.reset(seed=0)
        with pytest.raises(ActionError, match=r'action\["move"\]: expected int64, got float64'):
            vec.step({"move": np.array([1.7, 2.0]), "use": np.zeros((2, 2), np.int8)})


def test_native_envs_of_several_agents_run_natively():
    with pytest.raises(HurtleError, match="backend='native' runs it"):
        make("snake", 2, backend="serial")


def test_close_that_raises_closes():
    class Stubborn(Counter):
        closes = 0

        def close(self):
            Stubborn.closes += 1
            if Stubborn.closes > 1:  # not in the start-up check
                raise OSError("still in use")

    vec = make(Stubborn, 1, backend="serial")
    vec.reset(seed=0)
    with pytest.raises(OSError, match="still in use"):
        vec.close()
    with pytest.raises(HurtleError, match="closed"):
        vec.step(np.zeros(1, int))
