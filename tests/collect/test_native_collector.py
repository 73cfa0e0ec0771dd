"""`NativeCollector` against `GeneralCollector`, which is forced to take the same actions: every field of every step."""

import copy
import os
import runpy
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from sample_envs import ASTERIX, SHORT_CARTPOLE, SHORT_PENDULUM, SNAKES, Levers, Masked, Thrust
from scripted_envs import Staged, assert_finals_of_truncations, finals_of

import hurtle
from hurtle.algorithms.ppo_config import PPOConfig
from hurtle.algorithms.ppo_native import NativePPO
from hurtle.buffers.rollout import Done, Rollout
from hurtle.collect.general_collector import GeneralCollector
from hurtle.collect.inference import Actor
from hurtle.collect.native_collector import NativeCollector
from hurtle.collect.postprocess import Postprocess
from hurtle.collect.rewards import RewardRule
from hurtle.contracts import Weights
from hurtle.errors import ActionError, HurtleError, NonFiniteError
from hurtle.native import Box, Discrete, Env, float32, int32
from hurtle.policies.build import PolicyConfig, build_policy

ROOT = Path(__file__).parents[2]
GAMMA, LAMBDA = 0.97, 0.9
EXACT = (
    *("obs", "inputs", "actions", "masks", "rewards", "scaled_rewards", "terminated", "truncated", "starts", "valid"),
    *("last_obs", "last_starts"),
)
CLOSE = ("log_probs", "values", "final_values", "last_values", "advantages", "returns")


class Comings(Env):
    """Four agents: 0 stays, 1 dies and returns, 2 leaves without a flag, 3 is present only in the first steps.

    The env is over after `span` steps; in some episodes all agents are gone by then, or the time limit comes first.
    """

    observation_space = Box(-100, 100, (3,))
    action_space = Discrete(3)
    max_steps = 11
    num_agents = 4
    metrics = ("now", "span")

    class State:
        now: int32
        span: int32
        away: int32

    def reset(self, state, rng):
        state.span = rng.integers(5, 14)
        state.away = rng.integers(0, 2)

    def step(self, state, action, reward, terminated, rng):
        state.now += 1
        for a in range(4):
            reward[a] = float32(10 * a + state.now) + float32(0.1) * float32(action[a])
        terminated[1] = state.now % 3 == 0
        return state.now >= state.span

    def observe(self, state, obs):
        for a in range(4):
            obs[a, 0] = state.now
            obs[a, 1] = a
            obs[a, 2] = state.span

    def present(self, state, present):
        present[0] = state.away == 0 or state.now < 4
        present[1] = (state.away == 0 or state.now < 4) and state.now % 5 != 3
        present[2] = state.now % 6 < 3
        present[3] = state.now < 2

    def mask(self, state, mask):
        for a in range(4):
            mask[a, state.now % 3] = a == 0


class Spoilt(Env):
    """A walk with one non-finite number in the step set by `what` and `when`."""

    observation_space = Box(-100, 100, (2,))
    action_space = Box(-1, 1, (1,))
    max_steps = 6

    class State:
        now: int32
        life: int32 = 0
        what: int32 = 0
        when: int32 = -1

    def reset(self, state, rng):
        state.now = 0

    def step(self, state, action, rng):
        state.now += 1
        state.life += 1
        reward = action[0]
        if state.what == 1 and state.life == state.when:
            reward = float32(1e38) * float32(1e38)
        return reward, False

    def observe(self, state, obs):
        obs[0] = state.now
        obs[1] = 1.0
        if state.what == 2 and state.life == state.when:
            obs[1] = float32(1e38) * float32(1e38) - float32(1e38) * float32(1e38)


class Taught(Actor):
    """Checks that it would take a rollout's actions, up to rounding, then takes them."""

    def learn_from(self, rollout):
        self.rollout, self.now = rollout, 0

    def act(self, seen, mask, starts, rows=None):
        before = self.state
        own, _, values = super().act(seen, mask, starts)
        taken = self.rollout.actions[self.now].clone()
        self.now += 1
        torch.testing.assert_close(taken, own, rtol=1e-5, atol=1e-5)
        self._chosen = self.staging.start_to_host("actions", taken)
        with torch.no_grad():
            return taken, self.policy(seen, before, mask, starts)[0].log_prob(taken), values


def sharp_policy(vec, normalize=False, seed=0, **config):
    """A policy whose log-probs and values depend strongly on what it sees."""
    spaces = vec.agent_observation_space, vec.agent_action_space
    policy = build_policy(PolicyConfig(**{"policy": "mlp", **config}), *spaces, normalize_observations=normalize, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            small = name.startswith("network.critic_body") or len(parameter) == 128  # else a CNN's outputs are huge
            parameter.add_((0.02 if small else 0.3) * noise)
    return policy


def native(env, num_envs, config=None, seed=3, num_threads=1, rewards=None, advantages=True, **parameters):
    vec = hurtle.make_vec(env, num_envs, num_workers=1, **parameters)
    policy = sharp_policy(vec, **(config or {}))
    stage = Postprocess(policy, GAMMA, LAMBDA, rewards)
    sooner = stage if advantages else None
    return Staged(NativeCollector(vec, policy, seed, postprocess=sooner, num_threads=num_threads), stage)


def general(collector, seed=3, rewards=None, **parameters):
    """A general collector with its own policy and envs, which start in the same state as the native one's."""
    env = type(collector.vec.native_spec.env)
    vec = hurtle.make_vec(env, collector.vec.num_envs, num_workers=1, **parameters)
    actor = Taught(copy.deepcopy(collector.policy), collector.rows.num_rows, seed)
    return Staged(GeneralCollector(vec, actor, seed), Postprocess(actor.policy, GAMMA, LAMBDA, rewards))


def assert_same_rollout(rollout, expected):
    for name in EXACT:
        mine, theirs = getattr(rollout, name), getattr(expected, name)
        assert (mine is None) == (theirs is None), name
        if mine is not None:
            assert torch.equal(mine, theirs), f"{name} differ at {(mine != theirs).nonzero()[:5].tolist()}"
    for name in CLOSE:
        mine, theirs = getattr(rollout, name), getattr(expected, name)
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    states = zip((*rollout.initial_state, *rollout.last_state), (*expected.initial_state, *expected.last_state), strict=True)
    for mine, theirs in states:
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    assert_finals_of_truncations(rollout)
    finals = finals_of(expected)
    assert all(torch.equal(obs, finals[place]) for place, obs in finals_of(rollout).items())
    assert rollout.all_valid == expected.all_valid


def assert_same_stats(stats, expected):
    np.testing.assert_array_equal(stats.returns, expected.returns)
    np.testing.assert_array_equal(stats.lengths, expected.lengths)
    assert (stats.returns.dtype, stats.lengths.dtype) == (expected.returns.dtype, expected.lengths.dtype)
    assert list(stats.metrics) == list(expected.metrics)
    for name, values in stats.metrics.items():
        np.testing.assert_array_equal(values, expected.metrics[name])


def compare(collector, other, num_steps, rollouts=3):
    rollout = collector.new_rollout(num_steps)
    expected = Rollout(other.actor.policy, num_steps, collector.rows.num_rows, other.has_masks)
    seen = []
    for _ in range(rollouts):
        stats = collector.collect(rollout)
        other.actor.learn_from(rollout)
        assert_same_stats(stats, other.collect(expected))
        assert_same_rollout(rollout, expected)
        seen.append((rollout.terminated & ~rollout.truncated, rollout.truncated & ~rollout.terminated, ~rollout.valid))
    assert collector.steps == other.steps == num_steps * rollouts
    return [bool(torch.stack(kind).any()) for kind in zip(*seen, strict=True)]


CASES = {
    "cartpole": ("cartpole", SHORT_CARTPOLE, {}),
    "cartpole relu": ("cartpole", SHORT_CARTPOLE, {"activation": "relu", "hidden_sizes": (24, 8, 5)}),
    "cartpole shared": ("cartpole", SHORT_CARTPOLE, {"separate_networks": False}),
    "cartpole normalized": ("cartpole", SHORT_CARTPOLE, {"normalize": True}),
    "cartpole normalized, shared": ("cartpole", SHORT_CARTPOLE, {"normalize": True, "separate_networks": False}),
    "cartpole linear": ("cartpole", SHORT_CARTPOLE, {"hidden_sizes": ()}),
    "pendulum": ("pendulum", SHORT_PENDULUM, {}),
    "pendulum beta": ("pendulum", SHORT_PENDULUM, {"distribution": "beta", "normalize": True}),
    "squared": ("squared", {}, {"separate_networks": False, "activation": "relu"}),
    "asterix": ("asterix", ASTERIX, {"hidden_sizes": (32,)}),
    "memory": ("memory", {}, {}),
    "snake": ("snake", SNAKES, {}),
    "levers": (Levers, {}, {}),
    "levers shared": (Levers, {}, {"separate_networks": False}),
    "masked": (Masked, {}, {}),
    "thrust": (Thrust, {}, {"normalize": True}),
    "comings": (Comings, {}, {}),
    "comings shared": (Comings, {}, {"separate_networks": False, "normalize": True}),
    "cartpole lstm": ("cartpole", SHORT_CARTPOLE, {"recurrent": "lstm", "normalize": True}),
    "comings gru": (Comings, {}, {"recurrent": "gru"}),
    "masked mingru": (Masked, {}, {"recurrent": "mingru", "hidden_sizes": (20,)}),
    "pendulum lstm": ("pendulum", SHORT_PENDULUM, {"recurrent": "lstm", "hidden_sizes": (9,)}),
    "asterix cnn": ("asterix", ASTERIX, {"policy": "grid_cnn"}),
    "asterix cnn, separate": ("asterix", ASTERIX, {"policy": "grid_cnn", "separate_networks": True}),
    "asterix cnn with gru": ("asterix", ASTERIX, {"policy": "grid_cnn", "recurrent": "gru"}),
}
BOTH_ENDS = {"cartpole", "masked", "comings"}


SLOW = {"squared", "asterix", "memory", "thrust", "snake", "cartpole normalized", "cartpole linear", "levers", "comings"}
SLOW |= {"pendulum lstm", "asterix cnn, separate", "cartpole shared", "cartpole normalized, shared", "asterix cnn"}
"""Covered by others."""


@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.slow) if case in SLOW else case for case in CASES])
def test_every_field_of_every_step(case):
    env, parameters, config = CASES[case]
    collector = native(env, 7, config, num_threads=2, **parameters)
    terminated, truncated, absent = compare(collector, general(collector, **parameters), 40)
    if case.split()[0] in BOTH_ENDS:
        assert terminated
        assert truncated
    assert absent == (case.split()[0] in ("snake", "comings"))


@pytest.mark.parametrize("num_envs", [1, 3, 130])
def test_rows_that_fill_tiles_and_rows_that_do_not(num_envs):
    """130 envs of 4 agents are 520 rows: eight tiles and a remainder; 130 truncations in one step also fill tiles."""
    collector = native(Comings, num_envs)
    compare(collector, general(collector), 13, rollouts=2)


@pytest.mark.parametrize("num_steps", [1, 2])
def test_rollouts_shorter_than_episodes(num_steps):
    collector = native(Comings, 2)
    compare(collector, general(collector), num_steps, rollouts=30)


@pytest.mark.parametrize("case", [pytest.param("cartpole", marks=pytest.mark.slow), "comings", "pendulum", "comings gru"])
@pytest.mark.usefixtures("all_threads")
def test_the_number_of_threads_changes_no_bit(case):
    env, parameters, config = CASES[case]
    rollouts, statistics = [], []
    for threads in (1, 2, 3):
        collector = native(env, 7, config, num_threads=threads, **parameters)
        assert collector.threads() == (threads, threads)
        rollout = collector.new_rollout(25)
        collector.collect(rollout)
        statistics.append(collector.collect(rollout))
        rollouts.append(rollout)
    for rollout, stats in zip(rollouts[1:], statistics[1:], strict=True):
        assert_same_stats(stats, statistics[0])
        for name in EXACT + CLOSE:
            mine, theirs = getattr(rollout, name), getattr(rollouts[0], name)
            assert (mine is None and theirs is None) or torch.equal(mine, theirs), name


def test_the_length_of_calls_changes_no_bit():
    whole, sliced = native("cartpole", 5, max_steps=14), native("cartpole", 5, max_steps=14)
    one, other = whole.new_rollout(30), sliced.new_rollout(30)
    for _ in range(2):
        sliced.collector.tuner.fitting = lambda seconds: 1
        whole.collect(one)
        sliced.collect(other)
    for name in ("obs", "actions", *CLOSE):
        assert torch.equal(getattr(one, name), getattr(other, name)), name


@pytest.mark.parametrize("mode", ["sign", "normalize"])
def test_rewards_are_changed_after_the_rollout(mode):
    rules = [RewardRule(mode, 28, GAMMA) for _ in range(2)]
    collector = native(Comings, 7, rewards=rules[0])
    compare(collector, general(collector, rewards=rules[1]), 20)
    rollout = collector.new_rollout(5)
    collector.collector.collect(rollout)
    assert rollout.done == Done.BOOTSTRAP  # advantages wait for the changed rewards


def test_advantages_are_computed_at_once_if_wanted():
    staged = native("cartpole", 4, max_steps=14)
    collector, postprocess = staged.collector, staged.postprocess
    rollout = collector.new_rollout(20)
    collector.collect(rollout)
    assert rollout.done == Done.BOOTSTRAP | Done.ADVANTAGES
    advantages, returns = rollout.advantages.clone(), rollout.returns.clone()
    rollout.compute_advantages(GAMMA, LAMBDA)
    assert torch.equal(rollout.advantages, advantages)  # bitwise
    assert torch.equal(rollout.returns, returns)
    collector.collect(rollout)
    advantages = rollout.advantages.fill_(7.0).clone()
    postprocess(rollout)
    assert torch.equal(rollout.advantages, advantages)  # nothing left to do
    postprocess(rollout)
    assert not torch.equal(rollout.advantages, advantages)  # the collector's work counts once
    before = rollout.advantages.clone()
    rollout.rewards += 1.0
    rollout.compute_advantages(GAMMA, LAMBDA)
    assert not torch.equal(rollout.advantages, before)
    later = native("cartpole", 4, advantages=False).collector
    later.collect(rollout)
    assert rollout.done == Done.BOOTSTRAP


def test_masks_that_the_rollout_does_not_hold_are_not_used():
    collector = native(Levers, 5)
    rollout = Rollout(collector.policy, 30, 5, has_masks=False)
    collector.collect(rollout)
    with torch.no_grad():
        distribution = collector.policy(rollout.obs.flatten(0, 1))[0]
        expected = distribution.log_prob(rollout.actions.flatten(0, 1))
    torch.testing.assert_close(rollout.log_probs.flatten(), expected, rtol=1e-5, atol=1e-5)


def test_a_rollout_with_masks_of_an_env_without():
    collector = native("cartpole", 4, max_steps=14)
    rollout = Rollout(collector.policy, 10, 4, has_masks=True)
    collector.collect(rollout)
    assert bool(rollout.masks.all())


# Resuming from a saved state, in both directions


@pytest.mark.parametrize(("env", "recurrent"), [("cartpole", "none"), (Comings, "none"), (Comings, "lstm")])
def test_the_state_moves_to_the_general_collector_and_back(env, recurrent):
    more = {"max_steps": 14} if env == "cartpole" else {}
    first, last = (native(env, 5, {"recurrent": recurrent}, num_threads=2, **more) for _ in range(2))
    first.collect(first.new_rollout(9))
    saved = copy.deepcopy(first.state_dict())
    other = general(first, **more)
    other.load_state_dict(copy.deepcopy(saved))
    rollout, expected = first.new_rollout(11), Rollout(other.actor.policy, 11, other.rows.num_rows, other.has_masks)
    stats = first.collect(rollout)
    other.actor.learn_from(rollout)
    assert_same_stats(stats, other.collect(expected))
    assert_same_rollout(rollout, expected)
    back = copy.deepcopy(other.state_dict())
    assert {key: type(value) for key, value in back.items()} == {key: type(value) for key, value in saved.items()}
    last.load_state_dict(back)
    again = last.new_rollout(11)
    assert_same_stats(last.collect(again), first.collect(rollout))
    exact = EXACT + (CLOSE if recurrent == "none" else ())  # a memory's state has been in torch's hands
    for name in exact:
        assert (rollout.masks is None and name == "masks") or torch.equal(getattr(again, name), getattr(rollout, name)), name
    for name in CLOSE:
        torch.testing.assert_close(getattr(again, name), getattr(rollout, name), rtol=1e-5, atol=1e-5)
    assert last.steps == first.steps == 31


def test_without_the_envs_new_episodes_begin_with_other_seeds():
    collector, other = native("cartpole", 3), native("cartpole", 3)
    rollout = collector.new_rollout(5)
    collector.collect(rollout)
    saved = collector.state_dict()
    del saved["envs"]
    other.load_state_dict(saved)
    again = other.new_rollout(5)
    other.collect(again)
    assert other.steps == 10
    assert bool(again.starts[0].all())
    assert not torch.equal(again.obs[0], rollout.obs[0])


@pytest.mark.parametrize("case", [pytest.param("cartpole", marks=pytest.mark.slow), "comings", "pendulum"])
def test_the_number_of_threads_may_change_at_any_time(case, other_number_each_call):
    env, parameters, _ = CASES[case]
    expected, got = native(env, 7, **parameters), native(env, 7, num_threads=4, **parameters)
    other_number_each_call(got.collector, "tuner")
    for num_steps in (25, 25, 7):
        rollouts = [collector.new_rollout(num_steps) for collector in (expected, got)]
        assert_same_stats(got.collect(rollouts[1]), expected.collect(rollouts[0]))
        for name in EXACT + CLOSE:
            one, other = (getattr(rollout, name) for rollout in rollouts)
            assert (one is None and other is None) or torch.equal(one, other), name


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.usefixtures("all_threads")
def test_the_vector_stays_usable(threads):
    collector = native("cartpole", 3, num_threads=threads)
    rollout = collector.new_rollout(6)
    collector.collect(rollout)
    state = copy.deepcopy(collector.vec.state_dict())
    np.testing.assert_array_equal(state["reward"][:, 0], rollout.rewards[-1])
    actions = np.array([0, 1, 1])
    first = [np.copy(part) for part in collector.vec.step(actions)[:4]]
    collector.vec.load_state_dict(state)
    for part, again in zip(first, collector.vec.step(actions)[:4], strict=True):
        np.testing.assert_array_equal(part, again)


# Weights


def test_weights_are_the_policys_first_ones_until_others_are_loaded():
    collector, same = native("cartpole", 4), native("cartpole", 4)
    other = sharp_policy(collector.vec, seed=5)
    flat = Weights.of(other).flat
    assert collector.num_weights == flat.numel()
    rollout, expected = collector.new_rollout(10), collector.new_rollout(10)
    collector.collect(rollout)
    same.collect(expected)
    assert torch.equal(rollout.values, expected.values)
    with torch.no_grad():
        for parameter, new in zip(same.policy.parameters(), other.parameters(), strict=True):
            parameter.copy_(new)  # trained in place: the next rollout still uses the old policy
    for one, found in ((collector, rollout), (same, expected)):
        one.collect(found)
    assert torch.equal(rollout.values, expected.values)
    same.load_weights(Weights.of(same.policy))
    collector.load_weights(Weights(flat, version=7))
    for _ in range(2):
        collector.collect(rollout)
        same.collect(expected)
        assert torch.equal(rollout.values, expected.values)
        assert torch.equal(rollout.log_probs, expected.log_probs)
        assert (rollout.version, expected.version) == (7, 0)
    for mine, new in zip(collector.policy.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, new)  # the module also has them
    flat.zero_()  # the learner's memory, which the collector copied
    collector.collect(rollout)
    assert bool(rollout.values.any())
    collector.load_weights(Weights(flat))
    collector.collect(rollout)
    assert bool((rollout.values == 0).all())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda flat: flat[:-1], r"float32 buffer of \d+ weights .*got float32 of shape \(\d+,\)"),
        (lambda flat: flat.double(), "got float64"),
        (lambda flat: flat.bfloat16(), "got bfloat16"),
        (lambda flat: flat[None], r"of shape \(1, \d+\)"),
        (lambda flat: flat.repeat_interleave(2)[::2], "with gaps"),
        (lambda flat: flat.to("meta"), "on meta"),
    ],
)
def test_weights_that_do_not_fit(change, message):
    collector = native("cartpole", 2)
    before = Weights.of(collector.policy).flat
    with pytest.raises(HurtleError, match=message):
        collector.load_weights(Weights(change(before)))
    assert torch.equal(Weights.of(collector.policy).flat, before)


def test_the_first_weights_again():
    collector, same = native("cartpole", 4), native("cartpole", 4)
    first = Weights.of(collector.policy)
    collector.load_weights(Weights(torch.zeros(collector.num_weights)))
    collector.load_weights(first)
    rollouts = [one.new_rollout(8) for one in (collector, same)]
    for one, rollout in zip((collector, same), rollouts, strict=True):
        one.collect(rollout)
    assert torch.equal(rollouts[0].values, rollouts[1].values)


def test_a_policy_from_a_config():
    vec = hurtle.make_vec("cartpole", 2)
    collector = NativeCollector(vec, PolicyConfig(hidden_sizes=(8,)), seed=4)
    built = build_policy(PolicyConfig(hidden_sizes=(8,)), vec.agent_observation_space, vec.agent_action_space, seed=4)
    assert all(torch.equal(a, b) for a, b in zip(collector.policy.parameters(), built.parameters(), strict=True))


# Unsupported cases


def test_vectors_that_it_cannot_step():
    policy = PolicyConfig()
    for vec, why in (
        (hurtle.make_vec("cartpole", 2, autoreset_mode="next_step"), "NEXT_STEP"),
        (hurtle.make_vec("cartpole", 2, debug=True), "debug=True"),
        (hurtle.make_vec("cartpole", 4, batch_size=2), "NativePool"),
        (hurtle.make_vec("CartPole-v1", 2, backend="serial"), "not a native one.*`hurtle envs` lists native ones"),
        (hurtle.make("cartpole"), "not a native one"),
    ):
        with pytest.raises(HurtleError, match=f"{why}.*GeneralCollector"):
            NativeCollector(vec, policy)
    with pytest.raises(HurtleError, match=r"got the name 'cartpole'; use hurtle.make_vec\('cartpole', num_envs=8\)"):
        NativeCollector("cartpole", policy)


def test_a_vector_on_the_gpu_is_named_as_one(monkeypatch):
    vec = hurtle.make_vec("cartpole", 2)
    monkeypatch.setattr(vec, "_batch", object())  # the envs' class tells where they are
    with pytest.raises(HurtleError, match=r"on the GPU, not on the CPU.*GeneralCollector"):
        NativeCollector(vec, PolicyConfig())


def test_policies_that_it_cannot_run():
    vec = hurtle.make_vec("asterix", 2)
    changed = sharp_policy(vec, policy="grid_cnn")
    changed.network.actor_body.linear[1] = torch.nn.Tanh()
    with pytest.raises(HurtleError, match=r"changed after it was built.*GeneralCollector"):
        NativeCollector(vec, changed)
    other = hurtle.make_vec("cartpole", 2)
    with pytest.raises(HurtleError, match=r"observations are .*build it for the vector's spaces"):
        NativeCollector(other, sharp_policy(vec))


def test_rollouts_that_do_not_fit():
    collector = native("cartpole", 3)
    with pytest.raises(HurtleError, match=r"has 2 rows, the vector 3: use new_rollout"):
        collector.collect(Rollout(collector.policy, 4, 2))
    rollout = collector.new_rollout(4)
    collector.collect(rollout)
    for wrong in (rollout.values.double(), rollout.values[:2], torch.zeros(3, 4).T):
        rollout.values = wrong
        with pytest.raises(HurtleError, match="values must be"):
            collector.collect(rollout)
    collector.close()
    with pytest.raises(HurtleError, match="closed"):
        collector.collect(collector.new_rollout(2))


# Non-finite numbers


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("what", "when", "message"),
    [
        (1, 9, r"reward of env 2 at its step 9 is not finite: inf\. Nothing"),
        (2, 9, r"observation of env 2 at its step 9 is not finite: \[ 3\. nan\]\. Nothing"),
        (2, 6, r"final observation of env 2 at its step 6 is not finite: \[ 6\. nan\]\. Nothing"),
    ],
)
@pytest.mark.usefixtures("all_threads")
def test_bad_numbers_are_found(what, when, message, threads):
    messages = []
    for make in (lambda: native(Spoilt, 5, num_threads=threads), lambda: general(native(Spoilt, 5))):
        collector = make()
        collector.state_dict()  # resets the envs
        values = [0, 0, what, 0, what]
        collector.vec.set_attr("what", values)
        collector.vec.set_attr("when", when)
        policy = collector.actor.policy
        rollout = Rollout(policy, 4, 5)
        if isinstance(collector.collector, GeneralCollector):
            collector.collector.actor = Actor(policy, 5, 3)
        with pytest.raises(NonFiniteError, match=message) as caught:  # noqa: PT012
            for _ in range(4):
                collector.collect(rollout)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_nothing_is_learned_from_bad_numbers():
    collector = native(Spoilt, 3, {"normalize": True})
    collector.state_dict()
    collector.vec.set_attr("what", 2)
    collector.vec.set_attr("when", 3)
    with pytest.raises(NonFiniteError):
        collector.collect(collector.new_rollout(8))
    assert float(collector.policy.normalizer.count) == 0.0


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.usefixtures("all_threads")
def test_weights_that_are_not_finite(threads):
    collector = native(Spoilt, 3, num_threads=threads)
    collector.load_weights(Weights(torch.full((collector.num_weights,), np.nan)))
    with pytest.raises(ActionError, match=r"Env 0 got the action \[nan\]"):
        collector.collect(collector.new_rollout(2))


# Threads and signals


def test_a_request_to_stop():
    collector = native("cartpole", 2).collector
    rollout = collector.new_rollout(50)
    collector.request_stop()
    assert collector.collect(rollout) is None
    assert collector.steps == 0
    assert collector.collect(rollout) is not None  # one request stops one rollout
    assert collector.steps == 50
    collect = collector._collect_together

    def collect_and_ask(*steps):
        collector.request_stop()
        return collect(*steps)

    collector.tuner.fitting, collector._collect_together = lambda seconds: 1, collect_and_ask
    assert collector.collect(rollout) is None
    assert collector.steps == 51


def test_others_run_meanwhile():
    """While one thread collects, another one counts: the GIL is released."""
    collector = native("cartpole", 64).collector
    rollout = collector.new_rollout(2_000)
    collector.collect(rollout)
    counted, stop = [0], threading.Event()

    def count():
        while not stop.is_set():
            counted[0] += 1

    thread = threading.Thread(target=count)
    thread.start()
    before = counted[0]
    collector._collect_together(collector._shards_for(1), 0, 2_000)
    during = counted[0] - before
    stop.set()
    thread.join()
    assert during > 1_000


def test_ctrl_c_is_heard():
    collector = native("cartpole", 64).collector
    collector.collect(collector.new_rollout(16))
    rollout = collector.new_rollout(100_000)

    def interrupt():
        while collector.steps == 16:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    thread = threading.Thread(target=interrupt)
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            collector.collect(rollout)
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)
    assert 16 < collector.steps < 100_000


def test_the_example_learns(capsys):
    """A custom training loop in plain torch, around the collector."""
    example = runpy.run_path(str(ROOT / "examples" / "own_loop.py"))
    example["main"](total_steps=16_000)
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert float(last.split()[-1]) > 100


def test_threads_are_counted_and_never_more_than_there_are_cores(monkeypatch):
    monkeypatch.setattr("hurtle.native.threads.free_cores", lambda: 3)
    assert native("cartpole", 64, num_threads=128).tuner.most == 3
    assert native("cartpole", 2, num_threads=3).tuner.most == 2
    for wrong in (0, -3, 2.5, True):
        with pytest.raises(HurtleError, match="int of at least 1"):
            native("cartpole", 4, num_threads=wrong)


def test_a_learners_weights_arrive_when_they_are_loaded():
    """Shares the collector's policy: nothing is copied into the module, everything into compiled code."""
    collector = native("cartpole", 4)
    learner = NativePPO(collector.policy, PPOConfig(minibatch_size=16, learning_rate=0.1))
    rollout, kept = collector.new_rollout(4), Rollout(collector.policy, 4, 4)

    def follows():
        collector.collect(rollout)
        with torch.no_grad():
            return torch.allclose(rollout.values, collector.policy.value(rollout.inputs.flatten(0, 1)).view(4, 4), atol=1e-5)

    assert follows()
    collector.collector.collect(kept)
    learner.update(kept)
    assert not follows()
    collector.load_weights(learner.weights())
    assert follows()
    assert rollout.version == 1
    learner.close()


def test_weights_that_are_not_finite_are_named():
    collector = native("cartpole", 4)
    collector.load_weights(Weights(torch.full((collector.num_weights,), np.nan)))
    with pytest.raises(NonFiniteError, match="policy's log-probability in env 0 at its step 1 is not finite"):
        collector.collect(collector.new_rollout(4))


def test_a_normalizer_of_another_precision_is_read_as_what_it_is():
    vec = hurtle.make_vec("cartpole", 4)
    policy = build_policy(PolicyConfig(), vec.agent_observation_space, vec.agent_action_space, normalize_observations=True)
    collector = NativeCollector(vec, policy)
    rollout = collector.new_rollout(8)
    collector.collect(rollout)
    Postprocess(policy, GAMMA, LAMBDA)(rollout)
    policy.float()
    mean, std = policy.normalizer.mean.clone(), (policy.normalizer.variance + policy.normalizer.eps).sqrt()
    collector.collect(rollout)
    expected = ((rollout.obs - mean) / std).clamp(-10, 10)
    torch.testing.assert_close(rollout.inputs, expected.float(), rtol=1e-5, atol=1e-5)
    assert float((rollout.inputs - rollout.obs).abs().max()) > 0.1


def test_the_finals_of_another_collector_are_replaced():
    """The device collector counts steps in int32; compiled code writes int64."""
    collector = native("cartpole", 4, max_steps=5).collector
    rollout = collector.new_rollout(10)
    collector.collect(rollout)
    slots = rollout.finals.steps.shape
    rollout.finals = rollout.finals._replace(steps=rollout.finals.steps.int())
    collector._known = []
    collector.collect(rollout)
    assert (rollout.finals.steps.shape, rollout.finals.steps.dtype) == (slots, torch.int64)
    assert rollout.finals.steps.tolist() == [4] * 4 + [9] * 4
