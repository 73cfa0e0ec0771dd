"""What Gymnasium's own vector envs promise, on every back end; gymnasium_suite.py runs its full suite."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.error import ClosedEnvironmentError
from gymnasium.wrappers.vector import DictInfoToList
from sample_envs import Masked as NativeMasked
from vector_envs import Counter, Masked

import hurtle
from hurtle.errors import ActionError, EnvFailedError, HurtleError, ResetMaskError

BACKENDS = {
    "native": ("cartpole", {}),
    "native pool": ("cartpole", {"batch_size": 2}),
    "serial": (Counter, {"backend": "serial"}),
    "process": (Counter, {"backend": "process", "num_workers": 1}),
    "mujoco": ("InvertedPendulum-v5", {"backend": "mujoco"}),
}
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def make(backend, num_envs=4, **options):
    if backend == "mujoco":
        pytest.importorskip("mujoco", reason="needs hurtle[mujoco]")
    env, own = BACKENDS[backend]
    return hurtle.make_vec(env, num_envs, **own, **options)


@every_backend
def test_the_seeds_of_the_envs(backend):
    with make(backend, seed=5) as vec:
        assert vec.np_random_seed == (5, 6, 7, 8)
        vec.reset(seed=42)
        assert vec.np_random_seed == (42, 43, 44, 45)
        vec.reset()
        assert vec.np_random_seed == (42, 43, 44, 45)
        vec.reset(seed=[1, None, 2, None])
        assert vec.np_random_seed == (1, 43, 2, 45)
        if backend != "native pool":
            vec.reset(seed=9, options={"reset_mask": np.array([True, False, False, False])})
            assert vec.np_random_seed == (9, 43, 2, 45)
            vec.reset_env(3, seed=7)
            assert vec.np_random_seed == (9, 43, 2, 7)


@pytest.mark.parametrize("backend", ["native", "serial", "process"])
def test_wrong_masks_wrong_actions_and_a_closed_vector(backend):
    with make(backend, 3) as vec:
        vec.reset(seed=0)
        for mask, kind, message in [
            (np.ones(1, bool), ValueError, r"must have shape `\(3,\)`, got \(1,\)"),
            (np.ones((1, 3), bool), ValueError, r"must have shape `\(3,\)`, got \(1, 3\)"),
            (np.zeros(3, bool), ValueError, r"at least one True value, got reset_mask=\[False False False\]"),
            (np.ones(3, int), TypeError, "must have `dtype=np.bool_`, got int64"),
        ]:
            with pytest.raises(ResetMaskError, match=rf"^`options\['reset_mask'\]`.*{message}") as error:
                vec.reset(options={"reset_mask": mask})
            assert isinstance(error.value, kind)
        vec.step(np.zeros(3, int))  # nothing was reset, and the vector continues
        with pytest.raises(TypeError) as error:
            vec.step(0)
        assert isinstance(error.value, ActionError)
        with pytest.raises(ValueError, match="one row per env"):
            vec.step(np.zeros(2, int))
    refuses_when_closed(vec)


def test_a_closed_pool():
    vec = make("native pool")
    vec.close()
    refuses_when_closed(vec)


def refuses_when_closed(vec):
    with pytest.raises(ClosedEnvironmentError, match="closed") as error:
        vec.reset()
    assert isinstance(error.value, HurtleError)


@pytest.mark.parametrize(
    ("env", "options", "copy"),
    [
        (NativeMasked, {}, True),
        (NativeMasked, {}, False),
        (Masked, {"backend": "serial"}, True),
        (Masked, {"backend": "serial"}, False),
        pytest.param(Masked, {"backend": "process", "num_workers": 1}, True, marks=pytest.mark.slow),
        (Masked, {"backend": "process", "num_workers": 1}, False),
    ],
)
def test_action_masks_say_whose_they_are(env, options, copy):
    with hurtle.make_vec(env, 3, copy=copy, **options) as vec:
        _, reset_infos = vec.reset(seed=0)
        *_, infos = vec.step(reset_infos["action_mask"].argmax(1) + vec.single_action_space.start)
        for told in (reset_infos, infos):
            assert told["_action_mask"].tolist() == [True, True, True]
            assert told["_action_mask"].dtype == bool
        assert "_action_mask" not in vec.reset_env(0)[1]


def test_infos_as_a_list():
    with hurtle.make_vec(Masked, 2, backend="serial") as vec:
        _, infos = DictInfoToList(vec).reset(seed=0)
    assert [info["action_mask"].tolist() for info in infos] == [[True, False, False, False, False]] * 2


class Shifty(gymnasium.Env):
    """The envs made after the first observe something else."""

    made = 0

    def __init__(self):
        Shifty.made += 1
        self.observation_space = spaces.Box(0, 1 if Shifty.made == 1 else 2, (2,))
        self.action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), 0.0, False, False, {}


def test_envs_of_different_spaces(monkeypatch):
    monkeypatch.setattr(Shifty, "made", 0)
    with pytest.raises(EnvFailedError, match=r"Env 0 .*observation_space: expected Box\(0.0, 1.0, .* got Box\(0.0, 2.0,"):
        hurtle.make_vec(Shifty, 2, backend="serial")
