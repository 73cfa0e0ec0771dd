"""Native envs behind PettingZoo's interface."""

import sys
import warnings

import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from sample_envs import SNAKES

import hurtle
from hurtle.errors import ActionError, HurtleError, UnknownNameError
from hurtle.native import Box, Env, int32

pytest.importorskip("pettingzoo", reason='needs "hurtle[pettingzoo]"')
from pettingzoo import ParallelEnv
from pettingzoo.test import parallel_api_test, parallel_seed_test


class Race(Env):
    """Agent a ends after a + 1 steps; its reward is its action, and it sees the clock."""

    observation_space = Box(0, 100, (1,))
    action_space = Box(0.5, 1.0, (1,))
    num_agents = 3
    max_steps = 50

    class State:
        clock: int32
        handicap: int32 = 0

    def reset(self, state, rng):
        state.clock = 0

    def step(self, state, action, reward, terminated, rng):
        state.clock += 1
        for a in range(self.num_agents):
            reward[a] = action[a, 0]
            terminated[a] = state.clock > a + state.handicap
        return state.clock > 2 + state.handicap

    def present(self, state, present):
        for a in range(self.num_agents):
            present[a] = state.clock <= a + state.handicap

    def observe(self, state, obs):
        for a in range(self.num_agents):
            obs[a, 0] = state.clock


@pytest.mark.parametrize("settings", [SNAKES, pytest.param({**SNAKES, "respawn": False}, marks=pytest.mark.slow)])
def test_pettingzoos_own_tests(settings):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Snake has no option 'options', which is ignored")
        parallel_api_test(hurtle.make("snake", api="pettingzoo", **settings), num_cycles=200)
        parallel_seed_test(lambda: hurtle.make("snake", api="pettingzoo", **settings), num_cycles=20)


def test_agents_that_are_away():
    env = hurtle.make(Race, api="pettingzoo")
    assert isinstance(env, ParallelEnv)
    obs, infos = env.reset(seed=0)
    assert env.agents == env.possible_agents == ["agent_0", "agent_1", "agent_2"]
    assert all(info == {"agent_mask": True} for info in infos.values())
    act = {agent: np.full(1, 0.75, np.float32) for agent in env.agents}

    obs, rewards, terminated, truncated, infos = env.step(act)
    assert rewards == dict.fromkeys(act, 0.75)
    assert not any(terminated.values())
    ended = {"agent_mask": False, "terminated": True, "truncated": False, "episode": {"r": 0.75, "l": 1}}
    assert infos["agent_0"] == ended
    assert infos["agent_1"] == {"agent_mask": True}
    assert obs["agent_0"] == [1]  # its last

    del act["agent_0"]
    obs, rewards, terminated, truncated, infos = env.step(act)
    assert rewards == {"agent_0": 0.0, "agent_1": 0.75, "agent_2": 0.75}
    assert (obs["agent_0"], obs["agent_1"]) == ([0], [2])
    assert infos["agent_0"] == {"agent_mask": False}
    assert env.agents == env.possible_agents

    obs, rewards, terminated, truncated, infos = env.step(act)
    assert terminated == dict.fromkeys(env.possible_agents, True)
    assert truncated == dict.fromkeys(env.possible_agents, False)
    assert infos["agent_2"]["episode"] == {"r": 2.25, "l": 3}
    assert env.agents == []
    with pytest.raises(ResetNeeded):
        env.step({})


def test_the_same_as_the_arrays():
    alone, arrays = hurtle.make("snake", api="pettingzoo", **SNAKES), hurtle.make("snake", **SNAKES)
    obs, infos = alone.reset(seed=3)
    stacked, _ = arrays.reset(seed=3)
    assert np.array_equal(np.stack(list(obs.values())), stacked)
    rng = np.random.default_rng(0)
    while alone.agents:
        actions, acted = rng.integers(0, 3, 3), [info["agent_mask"] for info in infos.values()]
        obs, rewards, terminated, truncated, infos = alone.step(dict(zip(alone.agents, actions, strict=True)))
        stacked, reward, died, _, info = arrays.step(actions)
        assert np.array_equal(np.array(list(rewards.values()))[acted], reward[acted])
        assert [told["agent_mask"] for told in infos.values()] == info["agent_mask"].tolist()
        assert [told.get("terminated", False) for told in infos.values()] == (died & acted).tolist()
        for told, row, seen in zip(infos.values(), stacked, obs.values(), strict=True):
            assert not told["agent_mask"] or np.array_equal(seen, row)
    assert all(terminated[agent] or truncated[agent] for agent in alone.possible_agents)


def test_one_agent():
    env = hurtle.make("cartpole", api="pettingzoo")
    obs, _ = env.reset(seed=0)
    assert obs["agent_0"].shape == (4,)
    _, rewards, *_ = env.step({"agent_0": 1})
    assert rewards == {"agent_0": 1.0}


def test_options():
    env = hurtle.make(Race, api="pettingzoo")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env.reset(seed=0, options={"handicap": 4})
    *_, infos = env.step({agent: np.ones(1, np.float32) for agent in env.agents})
    assert infos["agent_0"]["agent_mask"]
    with pytest.warns(UserWarning, match=r"Race has no option 'handycap', which is ignored\. Did you mean handicap\?"):
        env.reset(options={"handycap": 4})


def test_errors(monkeypatch):
    env = hurtle.make(Race, api="pettingzoo")
    with pytest.raises(ResetNeeded):
        env.step({})
    env.reset(seed=0)
    with pytest.raises(
        ActionError, match=r"Agent 'agent_2' is there but got no action; got actions for \['agent_0', 'agent_1'\]"
    ):
        env.step({agent: np.ones(1, np.float32) for agent in env.agents[:2]})
    with pytest.raises(ActionError, match=r"The action of 'agent_1' must have the shape \(1,\), got \(2,\)"):
        env.step({agent: np.ones(1 + (agent == "agent_1"), np.float32) for agent in env.agents})
    with pytest.raises(UnknownNameError, match="Race has no agent 'agent_3'"):
        env.action_space("agent_3")
    with pytest.raises(UnknownNameError, match=r"No api 'petting'\. Did you mean pettingzoo\?"):
        hurtle.make("snake", api="petting")
    with pytest.raises(HurtleError, match="api='pettingzoo' is for native envs; 'CartPole-v1' has its own"):
        hurtle.make("CartPole-v1", api="pettingzoo")
    monkeypatch.setitem(sys.modules, "pettingzoo", None)
    with pytest.raises(HurtleError, match=r'pip install "hurtle\[pettingzoo\]"'):
        hurtle.make("snake", api="pettingzoo")
