"""NaN and infinities stop a collector before anything is learned, with the env, the agent and the step in the message."""

from functools import partial

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from scripted_envs import Script, collector_of, sharp_policy

import hurtle
from hurtle.errors import NonFiniteError
from hurtle.policies.build import PolicyConfig, build_policy

SAME, NEXT = AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP


def vector(kind, maker, mode=SAME):
    if kind == "gymnasium":
        return SyncVectorEnv([maker] * 4, autoreset_mode=mode)
    more = {"batch_size": 2} if kind == "pool" else {}
    return hurtle.make_vec(maker, 4, backend="serial", autoreset_mode=mode, check=False, **more)


def collected(vec, normalize=False):
    policy = sharp_policy(vec.single_observation_space, vec.single_action_space, normalize=normalize)
    collector, rollout = collector_of(vec, policy, 8)
    try:
        for _ in range(3):
            collector.collect(rollout)
    finally:
        collector.close()
        if normalize:
            assert float(policy.normalizer.count) == 0.0  # nothing from the unfinished rollout


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", ["serial", "gymnasium", "pool"])
def test_observations(kind, value):
    """Env 2, whose first episode has four steps, at its third."""
    vec = vector(kind, partial(Script, spoil=("observation", 2, 3, value)))
    with pytest.raises(NonFiniteError, match="observation of env 2 at its step 3 is not finite"):
        collected(vec)


@pytest.mark.parametrize("kind", ["serial", "gymnasium", "pool"])
@pytest.mark.parametrize("mode", [SAME, NEXT])
def test_rewards(kind, mode):
    vec = vector(kind, partial(Script, spoil=("reward", 3, 2, np.nan)), mode)
    with pytest.raises(NonFiniteError, match="reward of env 3 at its step 2 is not finite: nan"):
        collected(vec)


@pytest.mark.parametrize("kind", ["serial", "gymnasium", "pool"])
def test_final_observations(kind):
    """Env 1's first episode is cut off after three steps: V of its last observation would be NaN."""
    vec = vector(kind, partial(Script, spoil=("final observation", 1, 3, np.nan)))
    with pytest.raises(NonFiniteError, match="final observation of env 1 at its step 3 is not finite"):
        collected(vec)


def test_final_observations_of_terminated_episodes_do_not_matter():
    vec = vector("serial", partial(Script, spoil=("final observation", 0, 2, np.nan)))
    collected(vec)


@pytest.mark.parametrize("kind", ["serial", "pool"])
def test_first_observations(kind):
    vec = vector(kind, partial(Script, spoil=("observation", 1, 0, np.nan)))
    with pytest.raises(NonFiniteError, match="observation of env 1 at its step 0"):
        collected(vec)


def test_the_normalizer_stays_clean():
    vec = vector("serial", partial(Script, spoil=("observation", 2, 3, np.nan)))
    with pytest.raises(NonFiniteError):
        collected(vec, normalize=True)


class Deep(gymnasium.Env):
    """A structured observation whose float leaf is NaN in env 1 from its second step on."""

    observation_space = spaces.Dict(
        {"kind": spaces.Discrete(3), "pose": spaces.Tuple((spaces.Box(-1, 1, (2,), np.float32), spaces.MultiBinary(2)))}
    )
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.given, self.now = seed, 0
        return self.observed(), {}

    def step(self, action):
        self.now += 1
        return self.observed(), 0.0, False, False, {}

    def observed(self):
        number = np.nan if (self.given, self.now) == (1, 2) else 0.5
        return {"kind": np.int64(1), "pose": (np.full(2, number, np.float32), np.zeros(2, np.int8))}


def test_leaves_of_structured_observations():
    vec = hurtle.make_vec(Deep, 3, backend="serial", emulate=True, check=False)
    policy = build_policy(PolicyConfig(), vec.single_observation_space, vec.single_action_space, layout=vec.layout)
    collector, rollout = collector_of(vec, policy, 4)
    with pytest.raises(NonFiniteError, match="observation of env 1 at its step 2"):
        collector.collect(rollout)
    collector.close()


def test_agents_are_named():
    pytest.importorskip("pettingzoo", reason='needs "hurtle[pettingzoo]"')
    from emulation_envs import Crowd

    class Spoilt(Crowd):
        def observe(self, agents):
            found = super().observe(agents)
            if self.time == 2 and self.spoilt:
                found["a_2"][0] = np.nan
            return found

        def reset(self, seed=None, options=None):
            self.spoilt = seed == 1
            return super().reset(seed, options)

    vec = hurtle.make_vec(partial(Spoilt, [["a_1", "a_2"]] * 5), 2, backend="serial", check=False)
    policy = sharp_policy(vec.agent_observation_space, vec.agent_action_space)
    collector, rollout = collector_of(vec, policy, 4)
    with pytest.raises(NonFiniteError, match="observation of agent 1 of env 1 at its step 2"):
        collector.collect(rollout)
    collector.close()
