"""`agent_observation_space` and `agent_action_space`: the spaces of one row, whichever back end steps the envs."""

from functools import partial

import numpy as np
import pytest
from gymnasium import spaces
from vector_envs import Counter, Nested

import hurtle


def rows_of(vec):
    """All rows of the first observations, env-major."""
    obs, _ = vec.reset(seed=0)
    return np.asarray(obs).reshape(-1, *vec.agent_observation_space.shape)


@pytest.mark.parametrize("settings", [{}, {"batch_size": 2}], ids=["vector", "pool"])
def test_native_envs(settings):
    with hurtle.make_vec("cartpole", 4, **settings) as vec:
        assert vec.agent_observation_space == vec.single_observation_space
        assert vec.agent_action_space == vec.single_action_space == spaces.Discrete(2)
    with hurtle.make_vec("snake", 4, **settings) as vec:
        assert vec.num_agents > 1
        assert vec.single_observation_space.shape == (vec.num_agents, *vec.agent_observation_space.shape)
        assert isinstance(vec.agent_action_space, spaces.Discrete)
        assert vec.single_action_space == spaces.MultiDiscrete([vec.agent_action_space.n] * vec.num_agents)
        rows = rows_of(vec)
        assert len(rows) == vec.batch_size * vec.num_agents
        assert all(row in vec.agent_observation_space for row in rows)


@pytest.mark.parametrize("backend", ["serial", pytest.param("process", marks=pytest.mark.slow)])
def test_python_envs(backend):
    with hurtle.make_vec(Counter, 3, backend=backend) as vec:
        assert vec.agent_observation_space == vec.single_observation_space == Counter.observation_space
        assert vec.agent_action_space == vec.single_action_space == Counter.action_space
    with hurtle.make_vec(Counter, 4, backend=backend, batch_size=2) as vec:
        assert vec.agent_observation_space == Counter.observation_space


def test_structured_envs():
    with hurtle.make_vec(Nested, 2, backend="serial") as vec:
        assert vec.agent_observation_space == Nested.observation_space
        assert vec.agent_action_space == Nested.action_space
    with hurtle.make_vec(Nested, 2, backend="serial", emulate=True) as vec:
        assert vec.agent_observation_space == vec.single_observation_space
        assert isinstance(vec.agent_observation_space, spaces.Box)
        assert vec.agent_action_space == vec.single_action_space
        assert isinstance(vec.agent_action_space, spaces.MultiDiscrete)
        assert all(row in vec.agent_observation_space for row in rows_of(vec))


class TestAgents:
    """PettingZoo envs, padded to the maximum number of agents."""

    @pytest.fixture(autouse=True)
    def crowd(self):
        pytest.importorskip("pettingzoo", reason='needs "hurtle[pettingzoo]"')
        from emulation_envs import Crowd

        self.crowd = Crowd

    @pytest.mark.parametrize("names", [["a_1", "a_2"], ["a_1"]], ids=["two", "one"])
    @pytest.mark.parametrize("emulate", [False, True])
    def test_of_one_agent(self, names, emulate):
        with hurtle.make_vec(partial(self.crowd, [names, names]), 3, backend="serial", emulate=emulate) as vec:
            of_one = self.crowd([names]).observation_space(names[0])
            assert vec.num_agents == len(names)
            assert vec.single_observation_space.shape == (vec.num_agents, *vec.agent_observation_space.shape)
            assert vec.single_action_space.shape == (vec.num_agents, *vec.agent_action_space.shape)
            assert vec.agent_action_space == self.crowd([names]).action_space(names[0])
            if emulate:
                assert vec.agent_observation_space == vec.layout.flat_space
            else:
                assert vec.agent_observation_space == of_one
            rows = rows_of(vec)
            assert len(rows) == 3 * vec.num_agents
            assert all(row in vec.agent_observation_space for row in rows)
