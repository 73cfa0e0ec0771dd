"""Several agents per env: rows that come and go, masks, per-agent episodes; the same from every back end."""

import os
import signal
from functools import partial

import numpy as np
import pytest

pytest.importorskip("pettingzoo", reason='needs "hurtle[pettingzoo]"')

from emulation_envs import Crowd

import hurtle
from hurtle.emulation.agents import AgentRows

NUM_ENVS = 3
SCRIPT = [["a_2", "a_10"], ["a_2", "a_10", "a_1"], ["a_10", "a_1"], ["a_10"], ["a_2", "a_10"], ["a_2", "a_10"]]
ENDS = {(2, "a_2"): "truncated", (6, "a_10"): "truncated"}
crowd = partial(Crowd, SCRIPT, ENDS)


def played(vec, steps=25):
    rng = np.random.default_rng(0)
    obs, infos = vec.reset(seed=5)
    yield obs, None, None, None, infos
    for _ in range(steps):
        yield vec.step(rng.integers(0, 4, (NUM_ENVS, vec.num_agents)))


def reference(steps=25):
    """The same envs one by one, with the array interface of `emulate` and a reset whenever one is over."""
    rng = np.random.default_rng(0)
    envs = [hurtle.emulate(crowd()) for _ in range(NUM_ENVS)]
    rows = [AgentRows.zeros(env.layout.memory(env.num_agents_max), env.mask_size) for env in envs]
    for i, env in enumerate(envs):
        env.reset_into(rows[i], seed=5 + i)

    def obs():
        return np.stack([env.layout.flat(row.memory) for env, row in zip(envs, rows, strict=True)])

    def masks():
        return np.stack([row.agent_mask for row in rows])

    yield obs(), masks()
    for _ in range(steps):
        actions = rng.integers(0, 4, (NUM_ENVS, envs[0].num_agents_max))
        overs = [env.step_into(actions[i], rows[i])[0] for i, env in enumerate(envs)]
        outcome = [np.stack([getattr(row, name) for row in rows]) for name in ("rewards", "terminated", "truncated")]
        final = obs()
        for i, over in enumerate(overs):
            if over:
                envs[i].reset_into(rows[i])
        yield obs(), *outcome, masks(), np.array(overs), final


@pytest.mark.parametrize("backend", ["serial", "process"])
def test_equals_envs_one_by_one(backend):
    workers = {"num_workers": 2} if backend == "process" else {}
    with hurtle.make_vec(crowd, NUM_ENVS, backend=backend, emulate=True, copy=True, **workers) as vec:
        ours, theirs = played(vec), reference()
        obs, *_, infos = next(ours)
        expected_obs, expected_mask = next(theirs)
        np.testing.assert_array_equal(obs, expected_obs)
        np.testing.assert_array_equal(infos["agent_mask"], expected_mask)
        acting, lengths, ended_agents, ended_envs = expected_mask, np.zeros(expected_mask.shape, int), 0, 0
        for outcome, expected in zip(ours, theirs, strict=True):
            obs, rewards, terminated, truncated, infos = outcome
            expected_obs, expected_rewards, expected_terminated, expected_truncated, mask, over, final = expected
            np.testing.assert_array_equal(obs, expected_obs)
            np.testing.assert_array_equal(rewards, expected_rewards)
            np.testing.assert_array_equal(terminated, expected_terminated)
            np.testing.assert_array_equal(truncated, expected_truncated)
            np.testing.assert_array_equal(infos["agent_mask"], mask)
            lengths += acting
            ended = (terminated | truncated) & acting
            if ended.any():
                np.testing.assert_array_equal(infos["_episode"], ended)
                np.testing.assert_array_equal(infos["episode"]["l"][ended], lengths[ended])
                lengths[ended] = 0
            if over.any():
                np.testing.assert_array_equal(infos["_final_obs"], over)
                np.testing.assert_array_equal(infos["final_obs"][over], final[over])
            acting = mask
            ended_agents += ended.sum()
            ended_envs += over.sum()
        assert ended_agents > ended_envs > 0


@pytest.mark.parametrize("backend", ["serial", pytest.param("process", marks=pytest.mark.slow)])
def test_shapes_and_structure(backend):
    with hurtle.make_vec(crowd, NUM_ENVS, backend=backend) as vec:
        obs, infos = vec.reset(seed=0)
        agents = vec.num_agents
        assert vec.agents == tuple(hurtle.emulate(crowd()).possible_agents)
        assert infos["agent_mask"].shape == (NUM_ENVS, agents)
        obs, rewards, terminated, truncated, infos = vec.step(vec.action_space.sample())
        assert rewards.shape == terminated.shape == truncated.shape == (NUM_ENVS, agents)
        assert vec.observation_space.contains(obs)


def test_a_pool_of_crowds():
    with hurtle.make_vec(crowd, 4, backend="process", num_workers=1, batch_size=2, emulate=True) as vec:
        vec.async_reset(seed=0)
        for _ in range(20):
            obs, rewards, *_, infos = vec.recv()
            assert obs.shape[:2] == rewards.shape == infos["agent_mask"].shape == (2, vec.num_agents)
            vec.send(np.zeros((2, vec.num_agents), int))


def test_restarted_agents_are_truncated():
    with hurtle.make_vec(crowd, 2, backend="process", num_workers=2, restart_workers=True, emulate=True) as vec:
        _, infos = vec.reset(seed=0)
        acting = infos["agent_mask"].copy()
        os.kill(vec.worker_pids[1], signal.SIGKILL)
        _, _, _, truncated, infos = vec.step(np.zeros((2, vec.num_agents), int))
        np.testing.assert_array_equal(truncated[1], acting[1])
        assert infos["_final_obs"].tolist() == [False, True]


def test_one_env_is_reset():
    with hurtle.make_vec(crowd, 2, backend="serial") as vec:
        vec.reset(seed=0)
        vec.step(np.zeros((2, vec.num_agents), int))
        obs, _ = vec.reset_env(1)
        assert obs.shape == vec.single_observation_space.shape
        assert obs[:, 0].max() == 0  # time
        after, *_ = vec.step(np.zeros((2, vec.num_agents), int))
        assert after[:, :, 0].max(1).tolist() == [2, 1]


def test_returns_of_agents_that_vanished_do_not_leak():
    """An agent that leaves without a flag, before the env is over, starts the next episode from zero."""
    script = [["a_1", "a_2"], ["a_1", "a_2"], ["a_1"], ["a_1"]]
    with hurtle.make_vec(partial(Crowd, script, {(2, "a_2"): None}), 1, backend="serial") as vec:
        vec.reset(seed=0)
        lengths = []
        for _ in range(8):
            *_, infos = vec.step(np.zeros((1, 2), int))
            if "episode" in infos:
                lengths += [infos["episode"]["l"][0].tolist()] if infos["_episode"][0, 0] else []
        assert lengths == [[4, 2], [4, 2]]
