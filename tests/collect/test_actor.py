"""`Actor`: what the policy sees, how it samples, and what it remembers."""

import numpy as np
import pytest
import torch
from fake_gpu import FakeGpu
from gymnasium import spaces
from scripted_envs import Script, collector_of, sharp_policy

import hurtle
from hurtle.buffers.rollout import Rollout
from hurtle.collect.inference import Actor
from hurtle.collect.postprocess import Postprocess
from hurtle.collect.transfer import Staging
from hurtle.policies.numpy_acting import see

OBS, ACTIONS = spaces.Box(-1, 1, (3,), np.float64), spaces.Discrete(3)


def seen(actor, obs):
    """Observations as the actor's policy sees them, the way they get into rollouts."""
    rollout = Rollout(actor.policy, 1, len(obs))
    actor.store_obs(rollout.obs[0], rollout.inputs[0], obs)
    return rollout.inputs[0]


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [
        (np.float64, torch.float32),
        (np.float32, torch.float32),
        (np.float16, torch.float32),
        (np.uint8, torch.uint8),
        (np.uint16, torch.int64),
        (np.int32, torch.int32),
    ],
)
def test_observations_are_seen_as_rollouts_store_them(dtype, stored):
    """A user's network must not get float64 at the end of a rollout but float32 within it."""
    policy = sharp_policy(spaces.Box(0, 9, (3,), dtype), ACTIONS)
    rollout = Rollout(policy, 1, 2)
    assert see(policy, np.ones((2, 3), dtype), rollout.device).dtype == rollout.obs.dtype == rollout.last_obs.dtype == stored
    Postprocess(policy, 0.9, 0.8)(rollout)
    assert rollout.last_values.dtype == torch.float32


def test_rows_draw_from_streams_of_their_own():
    """In whatever order and groups rows act, row n's k-th draw is the same."""
    policy = sharp_policy(OBS, ACTIONS)
    obs = np.random.default_rng(0).normal(size=(6, 3))
    whole, parts = Actor(policy, 6, 9), Actor(policy, 6, 9)
    starts = torch.zeros(6, dtype=torch.bool)
    expected = [whole.act(seen(whole, obs), None, starts)[0] for _ in range(4)]
    found = torch.zeros(4, 6, dtype=torch.int64)
    rng, done = np.random.default_rng(1), np.zeros(6, int)
    while (done < 4).any():
        rows = rng.permutation(np.flatnonzero(done < 4))[:2]
        actions, _, _ = parts.act(seen(parts, obs[rows]), None, starts[: len(rows)], rows)
        found[done[rows], rows] = actions
        done[rows] += 1
    assert torch.equal(torch.stack(expected), found)
    assert len({tuple(column) for column in torch.stack([*expected]).T.tolist()}) > 1


def test_draws_follow_the_probabilities():
    policy = sharp_policy(OBS, ACTIONS)
    actor = Actor(policy, 4000, 0)
    obs = np.tile([[0.9, -0.5, 0.7]], (4000, 1))
    actions, log_probs, _ = actor.act(seen(actor, obs), None, torch.zeros(4000, dtype=torch.bool))
    share = np.bincount(actions, minlength=3) / 4000
    for action in range(3):
        probability = float(log_probs[actions == action][0].exp())
        assert share[action] == pytest.approx(probability, abs=4 * np.sqrt(probability / 4000))


def test_memory_of_some_rows():
    """Acting for two rows changes their memory, and no other row's; computing values changes none."""
    policy = sharp_policy(OBS, ACTIONS, "lstm")
    actor = Actor(policy, 4, 0)
    obs, starts = np.ones((4, 3)), torch.zeros(4, dtype=torch.bool)
    actor.act(seen(actor, obs), None, starts)
    before = [part.clone() for part in actor.state]
    policy.value(seen(actor, obs), actor.state)
    policy.value(seen(actor, obs), actor.state, ~starts)
    assert all(torch.equal(part, old) for part, old in zip(actor.state, before, strict=True))
    actor.act(seen(actor, obs[:2]), None, starts[:2], np.array([3, 1]))
    for part, old in zip(actor.state, before, strict=True):
        assert torch.equal(part[[0, 2]], old[[0, 2]])
        assert not torch.equal(part[[1, 3]], old[[1, 3]])
    copied = actor.state_of(np.array([1]))[0]
    copied += 1
    assert not torch.equal(copied, actor.state[0][[1]])


def test_starts_forget():
    policy = sharp_policy(OBS, ACTIONS, "gru")
    actor = Actor(policy, 2, 0)
    obs = np.ones((2, 3))
    _, _, fresh = actor.act(seen(actor, obs), None, torch.tensor([True, True]))
    _, _, values = actor.act(seen(actor, obs), None, torch.tensor([True, False]))
    assert float(values[0]) == pytest.approx(float(fresh[0]), abs=1e-6)
    assert abs(float(values[1]) - float(fresh[1])) > 1e-4


def test_saved_streams_go_on():
    policy = sharp_policy(OBS, ACTIONS, "gru")
    actor, again, fewer = Actor(policy, 3, 5), Actor(policy, 3, 5), Actor(policy, 2, 5)
    obs, starts = np.ones((3, 3)), torch.zeros(3, dtype=torch.bool)
    for _ in range(3):
        actor.act(seen(actor, obs), None, starts)
    saved = actor.state_dict()
    expected = [actor.act(seen(actor, obs), None, starts) for _ in range(3)]
    again.load_state_dict(saved)
    fewer.load_state_dict(saved, with_state=False)  # another number of rows
    for actions, log_probs, values in expected:
        for one, other in zip((actions, log_probs, values), again.act(seen(again, obs), None, starts), strict=True):
            assert torch.equal(one, other)
    fewer.act(seen(fewer, obs[:2]), None, starts[:2])


@pytest.mark.parametrize("recurrent", ["none", "lstm"])
def test_mixed_precision(recurrent):
    """Collecting in bfloat16 gives float32 log-probs near those of float32."""
    found = []
    for autocast in (None, torch.bfloat16):
        policy = sharp_policy(OBS, ACTIONS, recurrent)
        actor = Actor(policy, 8, 0, autocast=autocast)
        obs, starts = np.random.default_rng(0).normal(size=(8, 3)), torch.zeros(8, dtype=torch.bool)
        for _ in range(3):
            _, log_probs, values = actor.act(seen(actor, obs), None, starts)
        assert log_probs.dtype == values.dtype == torch.float32
        found.append(values)
    torch.testing.assert_close(found[1], found[0], rtol=0.05, atol=0.05)


def test_actions_come_back_while_the_rest_is_still_under_way():
    """Only `env_actions` waits for the device, and only for a copy launched before the log-probs."""
    policy = sharp_policy(OBS, spaces.Discrete(3, start=5), "gru")
    gpu = FakeGpu(late_uploads=False)
    actor = Actor(policy, 4, 0, staging=Staging("cpu", gpu))
    log_prob = torch.Tensor.gather

    def noted(*given):
        gpu.log.append("log_prob")
        return log_prob(*given)

    obs, starts = np.random.default_rng(0).normal(size=(4, 3)), torch.zeros(4, dtype=torch.bool)
    for rows in (None, np.array([2, 0])):
        inputs = seen(actor, obs if rows is None else obs[rows])
        gpu.log.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "gather", noted)
            actions, _, _ = actor.act(inputs, None, starts[: len(inputs)], rows)
        launched = ["upload"] * (1 if rows is None else 2)  # the uniforms; the row indices
        assert gpu.log == [*launched, "download", "log_prob"]
        assert actor.env_actions().tolist() == (actions + 5).tolist()
        assert gpu.log[-1] == "wait"


def test_a_policy_acts_the_same_through_a_gpu():
    """Draws, memory and values of rows in odd groups; a staged array in the wrong place would change them."""
    policy = sharp_policy(OBS, ACTIONS, "lstm", normalize=True)
    policy.normalizer.update(np.random.default_rng(2).normal(1.0, 3.0, (9, 4, 3)))
    plain, staged = Actor(policy, 6, 9), Actor(policy, 6, 9, staging=Staging("cpu", FakeGpu(late_uploads=False)))
    rng = np.random.default_rng(0)
    for _ in range(20):
        rows = rng.permutation(6)[: rng.integers(1, 6)]
        obs, starts = rng.normal(size=(len(rows), 3)), torch.from_numpy(rng.random(len(rows)) < 0.3)
        found, expected = ((*actor.act(seen(actor, obs), None, starts, rows), actor.env_actions()) for actor in (staged, plain))
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other)
        for one, other in zip(staged.state_of(rows), plain.state_of(rows), strict=True):
            assert torch.equal(one, other)
    for one, other in zip(staged.state, plain.state, strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
def test_a_compiled_actor_collects_the_same():
    found = []
    for compiled in (False, True):
        vec = hurtle.make_vec(Script, 3, backend="serial")
        policy = sharp_policy(vec.single_observation_space, vec.single_action_space)
        collector, rollout = collector_of(vec, policy, 6)
        collector.collector.actor = Actor(policy, 3, 0, compiled=compiled)
        collector.collect(rollout)
        found.append((rollout.actions.clone(), rollout.log_probs.clone(), rollout.last_values.clone()))
        collector.close()
    assert torch.equal(found[0][0], found[1][0])
    for one, other in zip(found[0][1:], found[1][1:], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
