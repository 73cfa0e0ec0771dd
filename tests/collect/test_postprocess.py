"""`Postprocess`: each part is done once, by the collector or by the stage, with the same result."""

import copy
from functools import partial

import pytest
import torch
from scripted_envs import Script, Staged, Walk, assert_finals_of_truncations, collector_of, finals_of, sharp_policy

import hurtle
from hurtle.buffers.rollout import Done
from hurtle.collect.device_collector import DeviceCollector
from hurtle.collect.native_collector import NativeCollector
from hurtle.collect.postprocess import Postprocess
from hurtle.collect.rewards import RewardRule

GAMMA, LAMBDA, NUM_ENVS = 0.9, 0.8, 4
MADE = ("last_values", "final_values", "scaled_rewards", "advantages", "returns")
PARTS = {
    Done.BOOTSTRAP: ("last_values", "final_values"),
    Done.REWARDS: ("scaled_rewards",),
    Done.STATISTICS: (),
    Done.ADVANTAGES: ("advantages", "returns"),
}


def filled(recurrent="none", mode="normalize"):
    """A rollout straight from a collector, after one that filled the statistics; and its stage."""
    vec = hurtle.make_vec(Script, NUM_ENVS, backend="serial")
    policy = sharp_policy(vec.single_observation_space, vec.single_action_space, recurrent, normalize=True)
    staged, rollout = collector_of(vec, policy, 8, mode=mode, gamma=GAMMA)
    staged.collect(rollout)
    staged.collector.collect(rollout)
    staged.close()
    return rollout, staged.postprocess


def statistics(stage):
    return {**stage.state_dict(), **{f"obs {name}": value for name, value in stage.policy.normalizer.state_dict().items()}}


def test_a_collector_of_any_env_leaves_all_to_the_stage():
    rollout, stage = filled()
    assert rollout.done == Done.NOTHING
    stage(rollout)
    assert rollout.done == Done.NOTHING  # consumed: the next rollout reports anew what was done


@pytest.mark.parametrize("part", PARTS)
def test_what_is_done_already_is_skipped(part):
    rollout, stage = filled()
    before = copy.deepcopy(statistics(stage))
    for name in PARTS[part]:
        if name == "scaled_rewards":
            rollout.scaled_rewards = torch.zeros_like(rollout.rewards)
        getattr(rollout, name).fill_(7.0)
    rollout.done = part
    stage(rollout)
    for name in MADE:
        assert bool((getattr(rollout, name) == 7.0).all()) == (name in PARTS[part]), name
    after = statistics(stage)
    unchanged = {name for name in after if torch.equal(after[name], before[name])}
    expected = {name for name in after if name.startswith("obs ")} if part is Done.STATISTICS else set()
    expected |= {name for name in after if not name.startswith("obs ")} if part is Done.REWARDS else set()
    assert unchanged == expected


@pytest.mark.parametrize("recurrent", ["none", "lstm"])
def test_one_part_at_a_time_is_the_whole(recurrent):
    (whole, stage), (parts, other) = filled(recurrent), filled(recurrent)
    stage(whole)
    for part in PARTS:
        parts.done = ~part & (Done.BOOTSTRAP | Done.REWARDS | Done.STATISTICS | Done.ADVANTAGES)
        other(parts)
    for name in MADE:
        assert torch.equal(getattr(parts, name), getattr(whole, name)), name
        assert bool(getattr(whole, name).any()), name
    for name, value in statistics(stage).items():
        assert torch.equal(statistics(other)[name], value), name


def test_values_are_those_of_the_statistics_that_acted():
    """Bootstrap values are computed before the normalizer learns from the rollout."""
    rollout, stage = filled()
    acted = copy.deepcopy(stage.policy)
    stage(rollout)
    with torch.no_grad():
        expected = acted.value(acted.normalizer.normalize(rollout.last_obs))
        late = stage.policy.value(stage.policy.normalizer.normalize(rollout.last_obs))
        finals = {place: acted.value(acted.normalizer.normalize(obs[None]))[0] for place, obs in finals_of(rollout).items()}
    torch.testing.assert_close(rollout.last_values, expected, rtol=0, atol=1e-6)
    assert float((late - expected).abs().max()) > 1e-4
    assert finals
    for place, value in finals.items():
        torch.testing.assert_close(rollout.final_values[place], value, rtol=0, atol=1e-6)


def test_unused_places_of_finals_change_nothing():
    rollout, stage = filled()
    steps, rows, obs, _ = rollout.finals
    stage(rollout)
    expected = rollout.final_values.clone()
    gaps = rollout.new_finals(2 * len(steps), stage.policy)
    gaps.steps[1::2], gaps.rows[1::2], gaps.obs[1::2] = steps, rows, obs
    frozen, rollout.finals = copy.deepcopy(stage), gaps
    rollout.final_values.fill_(7.0)
    rollout.done = ~Done.BOOTSTRAP & (Done.REWARDS | Done.STATISTICS | Done.ADVANTAGES)
    frozen.policy.normalizer.load_state_dict(filled()[1].policy.normalizer.state_dict())  # as it was when the policy acted
    frozen(rollout)
    torch.testing.assert_close(rollout.final_values, expected, rtol=0, atol=1e-6)


def test_statistics_of_rewards_are_saved():
    rollout, stage = filled()
    other = Postprocess(stage.policy, GAMMA, LAMBDA, RewardRule("normalize", NUM_ENVS, GAMMA))
    other.load_state_dict(copy.deepcopy(stage.state_dict()))
    rollout.done = Done.STATISTICS
    stage(rollout)
    expected = rollout.scaled_rewards.clone()
    rollout.done = Done.STATISTICS
    other(rollout)
    assert torch.equal(rollout.scaled_rewards, expected)
    assert not torch.equal(expected, rollout.rewards)


def serial(policy, num_steps, **how):
    vec = hurtle.make_vec(Walk, NUM_ENVS, backend="native", **how)
    return collector_of(vec, policy, num_steps, seed=3)[0]


def compiled(collector, policy, num_steps):
    stage = Postprocess(policy, GAMMA, LAMBDA)
    return Staged(collector(hurtle.make_vec(Walk, NUM_ENVS), policy, 3, postprocess=stage), stage)


COLLECTORS = {
    "general": serial,
    "next step": partial(serial, autoreset_mode="next_step"),
    "pool": partial(serial, batch_size=2),
    "native": partial(compiled, NativeCollector),
    "device": partial(compiled, DeviceCollector),
}


@pytest.mark.parametrize("kind", COLLECTORS)
def test_observations_are_stored_raw_and_finals_kept(kind):
    """In every collector, with a normalizer: a `Walk`'s observation is a cell and the steps so far, both integers."""
    policy = sharp_policy(Walk.observation_space, Walk.action_space, normalize=True)
    collector = COLLECTORS[kind](policy, 12)
    rollout, cuts, used = collector.new_rollout(12), 0, []
    for k in range(3):
        normalizer = copy.deepcopy(policy.normalizer)
        used = [*used, normalizer] if kind == "pool" else [normalizer]  # a pool's segments may begin before an update
        collector.collect(rollout)
        seen = torch.stack([torch.isclose(rollout.inputs, one.normalize(rollout.obs), 1e-6, 1e-6).all(-1) for one in used])
        assert bool(seen.any(0).all())
        assert torch.equal(rollout.obs, rollout.obs.round())
        assert torch.equal(rollout.last_obs, rollout.last_obs.round())
        assert not k or float((rollout.inputs - rollout.obs).abs().max()) > 0.1
        assert int(policy.normalizer.count) == int(normalizer.count) + rollout.num_valid
        assert_finals_of_truncations(rollout)
        for (step, row), obs in finals_of(rollout).items():
            moved = rollout.obs[step, row, 0] + rollout.actions[step, row] - 1
            assert obs.tolist() == [float(moved), 5.0]  # the cell after its last action, at the time limit
            cuts += 1
    assert cuts > 0
    collector.close()


def test_all_collectors_make_the_same_of_the_same():
    """Same seed, same weights: only who did which part of the stage differs."""
    found = {}
    for kind in ("general", "native", "device"):
        policy = sharp_policy(Walk.observation_space, Walk.action_space, normalize=True)
        collector = COLLECTORS[kind](policy, 12)
        rollout = collector.new_rollout(12)
        for _ in range(2):
            collector.collect(rollout)
        found[kind] = {name: getattr(rollout, name).clone() for name in ("obs", "actions", "inputs", *MADE)}
        collector.close()
    for kind in ("native", "device"):
        for name, value in found["general"].items():
            torch.testing.assert_close(found[kind][name], value, rtol=1e-5, atol=1e-5, msg=f"{kind}: {name}")
    assert bool(found["general"]["advantages"].isfinite().all())
