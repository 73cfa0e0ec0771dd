"""`GeneralCollector` against envs stepped one by one: every field of every step, for all kinds of autoreset."""

import numpy as np
import pytest
import torch
from env_replay import Replay, check_statistics
from fake_gpu import FakeGpu
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from scripted_envs import Script, Walk, collector_of, sharp_policy

import hurtle
from hurtle.algorithms.ppo import evaluate_actions
from hurtle.collect.inference import Actor
from hurtle.collect.transfer import Staging
from hurtle.errors import HurtleError

NUM_ENVS = 5
FIELDS = (
    *("obs", "inputs", "actions", "log_probs", "values", "rewards", "terminated", "truncated", "starts", "valid"),
    *("last_obs", "last_starts", "last_values", "final_values", "scaled_rewards", "advantages", "returns"),
)
SAME, NEXT = AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP


def gymnasium_vector(maker, mode):
    return SyncVectorEnv([maker] * NUM_ENVS, autoreset_mode=mode)


VECTORS = {
    "serial": lambda mode, maker=Script: hurtle.make_vec(maker, NUM_ENVS, backend="serial", autoreset_mode=mode),
    "gymnasium": lambda mode, maker=Script: gymnasium_vector(maker, mode),
    "native": lambda mode: hurtle.make_vec(Walk, NUM_ENVS, autoreset_mode=mode),
}


def masked_script():
    return Script(masks=True)


def checked(vec, make_env, policy, mode, num_steps=5, rollouts=4, seed=3):
    collector, rollout = collector_of(vec, policy, num_steps, seed=seed)
    replays = [Replay(make_env(), seed + n, policy, mode is NEXT) for n in range(NUM_ENVS)]
    stats, kinds = [], set()
    for _ in range(rollouts):
        stats.append(collector.collect(rollout))
        for n, replay in enumerate(replays):
            replay.check(rollout, n)
        assert rollout.all_valid == bool(rollout.valid.all())
        ends = torch.stack([rollout.terminated, rollout.truncated]).flatten(1).T
        kinds |= {tuple(pair) for pair in ends.tolist()}
    check_statistics(stats, replays)
    assert {(True, False), (False, True)} <= kinds  # both kinds of end were seen
    collector.close()


@pytest.mark.parametrize("recurrent", ["none", pytest.param("lstm", marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", [SAME, NEXT])
@pytest.mark.parametrize("kind", VECTORS)
def test_every_field_of_every_step(kind, mode, recurrent):
    vec = VECTORS[kind](mode)
    policy = sharp_policy(vec.single_observation_space, vec.single_action_space, recurrent)
    checked(vec, (lambda: hurtle.make(Walk)) if kind == "native" else Script, policy, mode)


@pytest.mark.parametrize("num_steps", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", [SAME, NEXT])
def test_rollouts_shorter_than_episodes(mode, num_steps):
    vec = VECTORS["serial"](mode)
    policy = sharp_policy(vec.single_observation_space, vec.single_action_space, "gru")
    checked(vec, Script, policy, mode, num_steps, rollouts=12)


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("serial", NEXT),
        ("gymnasium", SAME),
        pytest.param("serial", SAME, marks=pytest.mark.slow),
        pytest.param("gymnasium", NEXT, marks=pytest.mark.slow),
    ],
)
def test_masks(kind, mode):
    vec = VECTORS[kind](mode, masked_script)
    policy = sharp_policy(vec.single_observation_space, vec.single_action_space, "gru")
    collector, rollout = collector_of(vec, policy, 12, seed=3)
    assert collector.has_masks
    replays = [Replay(masked_script(), 3 + n, policy, mode is NEXT) for n in range(NUM_ENVS)]
    for _ in range(2):
        collector.collect(rollout)
        for n, replay in enumerate(replays):
            replay.check(rollout, n)
        legal = rollout.masks.gather(-1, rollout.actions[..., None])[..., 0]
        assert bool(legal.all())
    collector.close()


class SometimesMasked(Script):
    """Reports legal actions only at the first observation, where just action 2 is legal; later all are."""

    def told(self):
        return {"action_mask": np.array([0, 0, 1], np.int8)} if self.now == 0 else {}


@pytest.mark.parametrize("kind", ["serial", "gymnasium"])
def test_no_mask_means_that_all_actions_are_legal(kind):
    vec = VECTORS[kind](SAME, SometimesMasked)
    policy = sharp_policy(vec.single_observation_space, vec.single_action_space)
    collector, rollout = collector_of(vec, policy, 12, seed=3)
    for _ in range(2):
        collector.collect(rollout)
        for t in range(12):
            for n in range(NUM_ENVS):
                expected = [False, False, True] if rollout.starts[t, n] else [True, True, True]
                assert rollout.masks[t, n].tolist() == expected, (t, n)
    batch = rollout.steps(rollout.valid_steps())
    log_probs, _, _ = evaluate_actions(policy, batch)
    torch.testing.assert_close(log_probs, batch.log_probs, rtol=0, atol=1e-5)
    collector.close()


@pytest.mark.parametrize(
    ("mode", "recurrent"),
    [
        *((SAME, recurrent) for recurrent in ("none", "lstm", "gru", "mingru")),
        *((NEXT, recurrent) for recurrent in ("none", "lstm")),
        *(pytest.param(NEXT, recurrent, marks=pytest.mark.slow) for recurrent in ("gru", "mingru")),
    ],
)
def test_the_update_sees_the_log_probs_and_values_of_the_collection(mode, recurrent):
    """Before any gradient step, the learner's view of a rollout is the actor's: memory rebuilt and reset at the same steps."""
    vec = VECTORS["serial"](mode)
    policy = sharp_policy(vec.single_observation_space, vec.single_action_space, recurrent)
    collector, rollout = collector_of(vec, policy, 16)
    for k in range(3):  # later ones begin mid-episode
        collector.collect(rollout)
        assert rollout.starts[1:].any()
        remembers = recurrent != "none"
        batch = rollout.segments(torch.tensor([3, 0, 4, 2, 1])) if remembers else rollout.steps(rollout.valid_steps())
        log_probs, _, values = evaluate_actions(policy, batch)
        torch.testing.assert_close(log_probs, batch.log_probs, rtol=0, atol=1e-5)
        torch.testing.assert_close(values, batch.values, rtol=0, atol=1e-5)
        if remembers and k:  # the test has power: it would fail without resets, or from another state
            for wrong in (
                batch._replace(starts=torch.zeros_like(batch.starts)),
                batch._replace(state=tuple(part + 1 for part in batch.state)),
            ):
                others, _, _ = evaluate_actions(policy, wrong)
                assert float((others - batch.log_probs).abs().max().detach()) > 1e-3
    collector.close()


def test_continuous_actions_are_stored_raw_and_clipped_for_the_env():
    class Pushed(Script):
        action_space = spaces.Box(-0.5, 0.5, (1,), np.float32)

        def step(self, action):
            assert self.action_space.contains(action)
            return super().step(action[0])

    vec = VECTORS["serial"](SAME, Pushed)
    policy = sharp_policy(vec.single_observation_space, vec.single_action_space)
    collector, rollout = collector_of(vec, policy, 20)
    collector.collect(rollout)
    assert float(rollout.actions.abs().max()) > 1.0
    batch = rollout.steps(rollout.valid_steps())
    torch.testing.assert_close(evaluate_actions(policy, batch)[0], batch.log_probs, rtol=0, atol=1e-5)
    replay = Replay(Pushed(), 0, policy)
    replay.check(rollout, 0)
    collector.close()


def test_an_actors_draws_do_not_depend_on_the_other_rows():
    """Env i of five does what env i of three does."""
    found = []
    for count in (5, 3):
        vec = hurtle.make_vec(Script, count, backend="serial")
        policy = sharp_policy(vec.single_observation_space, vec.single_action_space)
        collector, rollout = collector_of(vec, policy, 30, seed=11)
        collector.collect(rollout)
        found.append(rollout.actions[:, :3].clone())
        collector.close()
    assert torch.equal(*found)
    assert len({tuple(column) for column in found[0].T.tolist()}) == 3


def test_a_vector_without_autoreset_is_refused():
    vec = gymnasium_vector(Script, AutoresetMode.DISABLED)
    policy = sharp_policy(vec.single_observation_space, vec.single_action_space)
    with pytest.raises(HurtleError, match="DISABLED"):
        collector_of(vec, policy, 4)
    vec.close()


def test_stopping_in_the_middle():
    vec = VECTORS["serial"](SAME)
    policy = sharp_policy(vec.single_observation_space, vec.single_action_space)
    collector, rollout = collector_of(vec, policy, 10)
    collector.request_stop()
    assert collector.collect(rollout) is None
    assert collector.collect(rollout) is not None
    collector.close()


def test_a_saved_native_collector_goes_on_bitwise():
    def parts():
        vec = hurtle.make_vec(Walk, NUM_ENVS)
        policy = sharp_policy(vec.single_observation_space, vec.single_action_space, "gru", normalize=True)
        return policy, *collector_of(vec, policy, 7, mode="normalize")

    policy, collector, rollout = parts()
    for _ in range(3):
        collector.collect(rollout)
    weights = {name: value.clone() for name, value in policy.state_dict().items()}
    saved = collector.state_dict()
    other_policy, other, other_rollout = parts()
    other_policy.load_state_dict(weights)
    other.load_state_dict(saved)
    for _ in range(3):
        first, second = collector.collect(rollout), other.collect(other_rollout)
        for name in FIELDS:
            assert torch.equal(getattr(rollout, name), getattr(other_rollout, name)), name
        assert first.returns.tolist() == second.returns.tolist()
    collector.close()
    other.close()


def test_python_envs_resume_with_new_seeds():
    def parts():
        vec = VECTORS["serial"](SAME)
        policy = sharp_policy(vec.single_observation_space, vec.single_action_space)
        return collector_of(vec, policy, 7, seed=2)

    collector, rollout = parts()
    collector.collect(rollout)
    other, other_rollout = parts()
    other.load_state_dict(collector.state_dict())
    other.collect(other_rollout)
    used = {round(10 * value) for value in rollout.obs[..., 0].flatten().tolist()}
    new = {round(10 * value) for value in other_rollout.obs[..., 0].flatten().tolist()}
    assert not used & new
    assert bool(other_rollout.starts[0].all())
    collector.close()
    other.close()


@pytest.mark.parametrize("recurrent", ["none", "lstm"])
@pytest.mark.parametrize("mode", [SAME, NEXT])
def test_a_gpu_in_between_changes_no_bit(mode, recurrent):
    """With pinned buffers to the policy and back, and outcomes copied at the end."""
    found = []
    for gpu in (None, FakeGpu(late_uploads=False)):
        vec = VECTORS["serial"](mode, masked_script)
        policy = sharp_policy(vec.single_observation_space, vec.single_action_space, recurrent, normalize=True)
        collector, rollout = collector_of(vec, policy, 7, mode="normalize", seed=3)
        if gpu is not None:
            collector.collector.actor = Actor(policy, NUM_ENVS, 3, staging=Staging("cpu", gpu))
        for _ in range(3):
            collector.collect(rollout)
            fields = {name: getattr(rollout, name).clone() for name in (*FIELDS, "masks")}
            fields |= {f"state {k}": part.clone() for k, part in enumerate(rollout.initial_state)}
            found.append({**fields, "all valid": rollout.all_valid, "mean": policy.normalizer.mean.clone()})
        collector.close()
    for expected, staged in zip(found[:3], found[3:], strict=True):
        for name, value in expected.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(staged[name])), name


def test_a_step_waits_for_its_actions_and_for_nothing_else():
    """One wait before each env step, after all of its work was launched; none in between."""
    vec, gpu = VECTORS["serial"](SAME), FakeGpu(late_uploads=False)
    policy = sharp_policy(vec.single_observation_space, vec.single_action_space)
    collector, rollout = collector_of(vec, policy, 6)
    collector.collector.actor = Actor(policy, NUM_ENVS, 0, staging=Staging("cpu", gpu))
    step = vec.step

    def noted(actions):
        gpu.log.append("step")
        return step(actions)

    vec.step = noted
    collector.collect(rollout)
    uploads = ["upload"] * 3  # observations, starts, uniforms
    assert gpu.log[: 6 * 6] == [*uploads, "download", "wait", "step"] * 6
    assert "wait" not in gpu.log[6 * 6 :]
    collector.close()
