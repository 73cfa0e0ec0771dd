"""`CompiledActor` against `Actor`: the same envs, seeds and weights give the same rollouts, but for rounding."""

import gymnasium
import numpy as np
import pytest
import torch
from emulation_envs import Crowd
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from scripted_envs import Script, sharp_policy

import hurtle
from hurtle.buffers.rollout import Done, Rollout
from hurtle.collect.compiled_actor import CompiledActor
from hurtle.collect.general_collector import GeneralCollector
from hurtle.collect.inference import Actor
from hurtle.collect.pool_collector import PoolCollector
from hurtle.collect.postprocess import Postprocess
from hurtle.contracts import Weights
from hurtle.emulation.flat_layout import SpaceLayout
from hurtle.errors import HurtleError, NonFiniteError, UnsupportedError
from hurtle.policies.build import PolicyConfig, build_policy

EXACT = (
    "obs",
    "inputs",
    "actions",
    "masks",
    "rewards",
    "terminated",
    "truncated",
    "starts",
    "valid",
    "last_obs",
    "last_starts",
)
CLOSE = ("log_probs", "values", "last_values", "final_values")
BOX, DISCRETE = spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(3)
OBSERVATIONS = {
    "float32": BOX,
    "float64": spaces.Box(-1, 1, (2, 2), np.float64),
    "many zeros": spaces.Box(0, 1, (80,), np.float32),
    "bytes": spaces.Box(0, 255, (5, 4), np.uint8),
    "signed bytes": spaces.Box(-3, 9, (5,), np.int8),
    "uint16": spaces.Box(0, 9, (3,), np.uint16),
    "int32": spaces.Box(-9, 9, (3,), np.int32),
    "binary": spaces.MultiBinary((2, 3)),
    "discrete": spaces.Discrete(5, start=-2),
    "several discrete": spaces.MultiDiscrete([2, 5, 3]),
}
ACTIONS = {
    "discrete": spaces.Discrete(3, start=4),
    "several discrete": spaces.MultiDiscrete([2, 4]),
    "binary": spaces.MultiBinary(3),
    "box": spaces.Box(np.float32([-1, -0.1]), np.float32([0.5, 2])),
    "float64 box": spaces.Box(-0.5, 0.5, (2, 1), np.float64),
    "whole box": spaces.Box(0, 3, (2,), np.int64),
}


class Echo(gymnasium.Env):
    """Observations are drawn from the space; the reward tells the action; episodes of 3 to 6 steps end in turns."""

    def __init__(self, observation_space, action_space, masks=False):
        self.observation_space, self.action_space, self.masks = observation_space, action_space, masks
        self.episode = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.now, self.episode = 0, self.episode + 1
        return self.observed()

    def step(self, action):
        assert self.action_space.contains(action), action
        self.now += 1
        over = self.now == 3 + self.episode % 4
        obs, info = self.observed()
        return obs, float(np.sum(action)), over and self.episode % 2 == 0, over and self.episode % 3 > 0, info

    def observed(self):
        obs = self.observation_space.sample()
        if isinstance(obs, np.ndarray) and obs.size == 80:
            obs *= self.np_random.random(80) < 0.1
        return obs, {"action_mask": np.int8([self.now % 2, 1, 0])} if self.masks else {}


NESTED = {
    "several dtypes": spaces.Dict(
        gold=spaces.Discrete(7, start=-1),
        speed=spaces.Box(-100, 100, (3,), np.float64),  # compressed
        bag=spaces.Tuple([spaces.MultiDiscrete([3, 1, 4]), spaces.MultiBinary(4)]),
        near=spaces.Box(0, 200, (2, 3), np.uint8),
    ),
    "one dtype": spaces.Dict(a=spaces.Box(-1, 1, (3,), np.float64), b=spaces.Box(-9, 9, (2, 2), np.float64)),
    "choices": spaces.Tuple([spaces.Discrete(3), spaces.MultiDiscrete([2, 6])]),
}


def nested_policy(space, seed=0, **config):
    layout = SpaceLayout(space)
    return build_policy(PolicyConfig(hidden_sizes=(16,), **config), layout.flat_space, DISCRETE, layout, seed=seed)


def collected(actor_kind, make, policy, updates=3, num_envs=5, num_steps=11, **how):
    """Rollouts of a new vector, the weights changed in between."""
    vec = hurtle.make_vec(make, num_envs, backend="serial", **how)
    num_rows = num_envs * vec.num_agents
    collector_kind = PoolCollector if "batch_size" in how else GeneralCollector
    collector = collector_kind(vec, actor_kind(policy, num_rows, 7), 7)
    found = []
    for update in range(updates):
        flat = Weights.of(policy).flat
        collector.load_weights(Weights(flat * (1 + 0.1 * update), update, tuple(policy.buffers())))
        rollout = collector.new_rollout(num_steps)
        assert collector.collect(rollout) is not None
        assert (rollout.done is Done.BOOTSTRAP) == (actor_kind is CompiledActor)
        Postprocess(policy, 0.9, 0.8)(rollout)
        found.append(rollout)
    saved = collector.actor.state_dict()["steps"]
    collector.close()
    return found, saved


def assert_same(make, make_policy, **how):
    """Both actors fill every field alike, and leave the streams at the same place."""
    (plain, steps), (compiled, others) = (collected(kind, make, make_policy(), **how) for kind in (Actor, CompiledActor))
    assert torch.equal(steps, others)
    assert steps.min() > 0
    for one, other in zip(plain, compiled, strict=True):
        assert one.version == other.version
        for name in EXACT:
            ours, theirs = getattr(one, name), getattr(other, name)
            assert (ours is None) == (theirs is None)
            if ours is not None and name == "inputs":
                torch.testing.assert_close(theirs, ours, rtol=1e-6, atol=1e-6)
            elif ours is not None and ours.dtype == torch.float32 and name == "actions":
                torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-5)
            elif ours is not None and name == "rewards":
                torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4)
            elif ours is not None:
                assert torch.equal(ours, theirs), name
        for name in CLOSE:
            torch.testing.assert_close(getattr(other, name), getattr(one, name), rtol=2e-4, atol=2e-4)
        assert float(one.values.std()) > 0.01
    assert any(float(one.final_values.abs().max()) > 0.01 for one in plain)


@pytest.mark.parametrize("kind", OBSERVATIONS)
def test_observations(kind):
    space = OBSERVATIONS[kind]
    assert_same(lambda: Echo(space, DISCRETE), lambda: sharp_policy(*spaces_of(lambda: Echo(space, DISCRETE))))


@pytest.mark.parametrize("kind", NESTED)
def test_nested_observations(kind):
    assert_same(lambda: Echo(NESTED[kind], DISCRETE), lambda: nested_policy(NESTED[kind]), emulate=True)


@pytest.mark.parametrize(
    ("space", "config", "reason"),
    [
        (spaces.Dict(a=BOX, b=spaces.Box(0, 255, (9, 9, 3), np.uint8)), {}, "is encoded by a"),
        (spaces.Dict(a=BOX, b=spaces.Text(5)), {}, "is a String"),
        (NESTED["one dtype"], {"separate_networks": True}, "encoders of their own"),
        (spaces.Dict(a=BOX, b=spaces.Box(-1, 1, (2,), np.float16)), {}, r"observation\[.b.\] is float16"),
        (spaces.Dict(a=BOX, b=spaces.Discrete(510)), {}, "more than 512"),
    ],
)
def test_other_nested_policies_have_no_compiled_actor(space, config, reason):
    with pytest.raises(UnsupportedError, match=reason):
        CompiledActor(nested_policy(space, **config), 2, 0)


@pytest.mark.parametrize("kind", ACTIONS)
def test_actions(kind):
    space = ACTIONS[kind]
    assert_same(lambda: Echo(BOX, space), lambda: sharp_policy(BOX, space))


def test_a_beta_and_a_shared_body():
    space = ACTIONS["box"]
    assert_same(
        lambda: Echo(BOX, space),
        lambda: sharp_policy(BOX, space, distribution="beta", separate_networks=False, activation="relu"),
    )


@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_normalized_observations(kind):
    space = OBSERVATIONS[kind]
    assert_same(lambda: Echo(space, DISCRETE), lambda: sharp_policy(space, DISCRETE, normalize=True))


@pytest.mark.parametrize("how", [{}, {"autoreset_mode": "NextStep"}, {"batch_size": 2}], ids=str)
def test_masks_resets_and_pools(how):
    assert_same(lambda: Echo(BOX, DISCRETE, masks=True), lambda: sharp_policy(BOX, DISCRETE), **how)


def test_a_normalizing_pool():
    space = OBSERVATIONS["float64"]
    assert_same(lambda: Echo(space, DISCRETE), lambda: sharp_policy(space, DISCRETE, normalize=True), batch_size=2)


def test_more_rows_than_a_tile():
    assert_same(lambda: Echo(BOX, DISCRETE), lambda: sharp_policy(BOX, DISCRETE), num_envs=70, num_steps=3)


@pytest.mark.parametrize(
    ("memory", "how"),
    [
        pytest.param(memory, how, marks=[pytest.mark.slow] * (memory not in fast))
        for fast, how in (
            (("lstm", "mingru"), {}),
            (("gru",), {"autoreset_mode": "NextStep"}),
            (("gru", "mingru"), {"batch_size": 2}),
            (("lstm",), {"num_envs": 70, "num_steps": 5}),
        )
        for memory in ("lstm", "gru", "mingru")
    ],
    ids=str,
)
def test_memories(memory, how):
    masks = memory == "gru"
    assert_same(
        lambda: Echo(BOX, DISCRETE, masks=masks), lambda: sharp_policy(BOX, DISCRETE, memory, normalize=not masks), **how
    )


@pytest.mark.parametrize("memory", ["none", "lstm"])
def test_grids(memory):
    space = spaces.Box(0, 1, (6, 7, 3), np.uint8)
    assert_same(lambda: Echo(space, DISCRETE), lambda: sharp_policy(space, DISCRETE, memory))


def test_nested_observations_with_a_memory():
    space = NESTED["several dtypes"]
    assert_same(lambda: Echo(space, DISCRETE), lambda: nested_policy(space, recurrent="gru"), emulate=True)


def test_a_policy_of_your_own_has_no_compiled_actor():
    class Own(torch.nn.Module):
        def __init__(self, observation_space, action_space):
            super().__init__()
            self.linear = torch.nn.Linear(3, 4)

        def encode(self, obs):
            return self.linear(obs)

        def decode(self, features):
            return torch.distributions.Categorical(logits=features[:, :3]), features[:, 3]

    with pytest.raises(UnsupportedError, match="is a Own, which is not one of Hurtle's own"):
        CompiledActor(build_policy(PolicyConfig(), BOX, DISCRETE, module=Own), 2, 0)


class Keeps(Echo):
    """Its reward is the distance from the action before, which it keeps."""

    def step(self, action):
        obs, _, terminated, truncated, info = super().step(action)
        before, self.before = getattr(self, "before", action), action
        return obs, float(np.abs(action - before).sum()), terminated, truncated, info


def test_an_env_of_another_vector_may_keep_its_action():
    space = ACTIONS["box"]
    vec = SyncVectorEnv([lambda: Keeps(BOX, space)] * 3, autoreset_mode=AutoresetMode.SAME_STEP)
    collector = GeneralCollector(vec, CompiledActor(sharp_policy(BOX, space), 3, 0), 0)
    rollout = collector.new_rollout(6)
    collector.collect(rollout)
    assert (rollout.rewards[1:] > 0.01).all()
    collector.close()


def test_agents_that_come_and_go():
    script = [["a_1", "a_2"], ["a_1", "a_2", "a_3"], ["a_1", "a_3"], ["a_1", "a_3"], ["a_2"]]
    ends = {(3, "a_1"): "truncated", (2, "a_2"): None}
    vecs = [hurtle.make_vec(lambda: Crowd(script, ends, masks=True), 3, backend="serial") for _ in range(2)]
    policy = sharp_policy(vecs[0].agent_observation_space, vecs[0].agent_action_space)
    rollouts = []
    for vec, kind in zip(vecs, (Actor, CompiledActor), strict=True):
        collector = GeneralCollector(vec, kind(policy, 3 * vec.num_agents, 5), 5)
        rollouts.append(collector.new_rollout(12))
        collector.collect(rollouts[-1])
        collector.close()
    for name in ("obs", "actions", "rewards", "masks", "terminated", "truncated", "starts", "valid"):
        assert torch.equal(getattr(rollouts[0], name), getattr(rollouts[1], name)), name
    assert not rollouts[0].all_valid


def test_a_learner_with_values_of_another_policy_gets_none():
    policy = sharp_policy(BOX, DISCRETE)
    vec = hurtle.make_vec(lambda: Echo(BOX, DISCRETE), 2, backend="serial")
    collector = GeneralCollector(vec, CompiledActor(policy, 2, 0, bootstraps=False), 0)
    rollout = collector.new_rollout(4)
    collector.collect(rollout)
    assert rollout.done is Done.NOTHING
    collector.close()


def test_sizes_that_do_not_fit_are_refused():
    policy = sharp_policy(BOX, DISCRETE)
    actor, obs = CompiledActor(policy, 4, 0), np.zeros((3, 3), np.float32)
    with pytest.raises(HurtleError, match="rollout has 3 rows, but the policy acts for 4"):
        actor.act_step(Rollout(policy, 2, 3), 0, obs, None, np.zeros(3, np.bool_))
    with pytest.raises(HurtleError, match="3 observations for 2 rows"):
        actor.act(torch.from_numpy(obs), None, torch.zeros(3, dtype=torch.bool), np.array([1, 2], np.int32))
    with pytest.raises(HurtleError, match="load_weights takes one contiguous float32 buffer"):
        actor.load_weights(Weights(torch.zeros(5)))
    assert len(actor.act(torch.from_numpy(obs), None, torch.zeros(3, dtype=torch.bool), np.array([1, 2, 0], np.int32))[0]) == 3


def test_weights_that_are_not_finite_are_named():
    policy = sharp_policy(spaces.Box(-100, 100, (3,), np.float64), DISCRETE)
    vec = hurtle.make_vec(Script, 3, backend="serial")
    collector = GeneralCollector(vec, CompiledActor(policy, 3, 0), 0)
    weights = Weights.of(policy)
    weights.flat[5] = torch.nan
    collector.load_weights(Weights(weights.flat, 1))
    with pytest.raises(NonFiniteError, match="log-probability in env 0 at its step 1"):
        collector.collect(collector.new_rollout(4))
    collector.close()


def spaces_of(make):
    """The spaces of an env as a vector has them."""
    with hurtle.make_vec(make, 1, backend="serial") as vec:
        return vec.single_observation_space, vec.single_action_space
