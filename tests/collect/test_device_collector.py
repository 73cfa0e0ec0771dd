"""`DeviceCollector` on the CPU against `GeneralCollector`, forced to take the same actions: every field of every step."""

import copy

import gymnasium
import numpy as np
import pytest
import torch
from sample_envs import SNAKES, Levers, Masked, Shift, Thrust
from scripted_envs import Staged, assert_finals_of_truncations, finals_of
from test_native_collector import Comings, Spoilt
from torch import nn
from torch.distributions import Normal

import hurtle
from hurtle.buffers.rollout import Done, Rollout
from hurtle.collect.device_collector import DeviceCollector
from hurtle.collect.general_collector import GeneralCollector
from hurtle.collect.inference import Actor
from hurtle.collect.postprocess import Postprocess
from hurtle.collect.rewards import RewardRule
from hurtle.contracts import SHOWN, Weights
from hurtle.errors import HurtleError, NonFiniteError
from hurtle.native import Box, Discrete, Env, float32, int32
from hurtle.policies.build import PolicyConfig, build_policy

GAMMA, SEED = 0.97, 3
FLAGS = ("actions", "masks", "terminated", "truncated", "starts", "valid", "last_starts")
POLICY_SETTINGS = ("normalize", "module", "distribution", "recurrent", "hidden_sizes")
NUMBERS = (
    *("obs", "inputs", "last_obs", "rewards", "scaled_rewards", "log_probs", "values", "final_values", "last_values"),
    *("advantages", "returns"),
)


class Faulty(Env):
    """A walk with one non-finite number in the step set by `what` and `when`, or at every end."""

    observation_space = Box(-100, 100, (2,))
    action_space = Discrete(3)
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
        reward = float32(action)
        if state.what == 1 and state.life == state.when:
            reward = float32(1e38) * float32(1e38)
        return reward, False

    def observe(self, state, obs):
        obs[0] = state.now
        obs[1] = 1.0
        if state.what == 2 and state.life == state.when:
            obs[1] = float32(1e38) * float32(1e38)
        late = state.what == 4 and state.now == 6
        if late or (state.what == 3 and state.life == state.when):
            obs[1] = float32(1e38) * float32(1e38) - float32(1e38) * float32(1e38)


class OddNormal(nn.Module):
    """A user's network, whose standard deviations depend on what it sees."""

    def __init__(self, observation_space, action_space):
        super().__init__()
        size = int(np.prod(observation_space.shape))
        self.body = nn.Linear(size, 2 * action_space.shape[0] + 1)

    def encode(self, obs):
        return self.body(obs.flatten(1))

    def decode(self, features):
        mean, log_std = features[:, 1:].chunk(2, 1)
        return Normal(mean, (0.3 * log_std.tanh()).exp()), features[:, :1]


class Taught(Actor):
    """Checks that it would take a rollout's actions, up to rounding, then takes them."""

    def learn_from(self, rollout):
        self.rollout, self.now = rollout, 0

    @torch.no_grad()
    def act(self, seen, mask, starts, rows=None):
        before = self.state
        own, _, values = super().act(seen, mask, starts)
        taken = self.rollout.actions[self.now].clone()
        self.now += 1
        torch.testing.assert_close(taken, own, rtol=1e-5, atol=1e-5)
        self._chosen = self.staging.start_to_host("actions", taken)
        return taken, self.policy(seen, before, mask, starts)[0].log_prob(taken), values


def sharp_policy(vec, normalize=False, module=None, seed=0, **config):
    """A policy whose log-probs and values depend strongly on what it sees."""
    spaces = vec.agent_observation_space, vec.agent_action_space
    own = None if module is None else module(*spaces)
    policy = build_policy(PolicyConfig(**config), *spaces, normalize_observations=normalize, module=own, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            strength = 0.3 if "bias" in name or "actor" in name or "critic" in name else 0.1
            parameter.add_(strength / max(1, parameter[0].numel()) ** 0.5 * torch.randn(parameter.shape, generator=generator))
    return policy


def stage(policy, mode, vec):
    return Postprocess(policy, GAMMA, 0.9, RewardRule(mode, vec.num_envs * vec.num_agents, GAMMA))


def on_device(env, num_envs=5, mode="raw", final_slots=None, **settings):
    """A collector on the CPU; `settings` are POLICY_SETTINGS and those of its env."""
    config = {key: settings.pop(key) for key in POLICY_SETTINGS if key in settings}
    vec = hurtle.make_vec(env, num_envs, num_workers=1, **settings)
    policy = sharp_policy(vec, **config)
    postprocess = stage(policy, mode, vec)
    return Staged(DeviceCollector(vec, policy, SEED, postprocess=postprocess, final_slots=final_slots), postprocess)


def noting_metrics(vec):
    """A `step` that records the metrics of every ended env in `vec.told`; a collector may see only some of them."""
    step, vec.told = vec.step, []

    def noted(actions):
        *outcome, infos = step(actions)
        over = infos.get("_metrics", infos.get("_episode"))
        if over is not None:
            vec.told.append({name: infos["episode"][name][over] for name in vec.native_spec.env.metrics})
        return *outcome, infos

    return noted


def general(collector):
    """A general collector with its own policy and envs, which start in the same state as this one's."""
    vec = hurtle.make_vec(collector.vec.native_spec.env, collector.vec.num_envs, num_workers=1)
    vec.step = noting_metrics(vec)
    actor = Taught(copy.deepcopy(collector.policy), collector.rows.num_rows, SEED)
    return Staged(GeneralCollector(vec, actor, SEED), stage(actor.policy, collector.postprocess.rewards.mode, vec))


def rollout_like(rollout, other):
    return Rollout(other.actor.policy, rollout.num_steps, rollout.num_rows, other.has_masks)


def assert_same_rollout(rollout, expected):
    for name in FLAGS:
        mine, theirs = getattr(rollout, name), getattr(expected, name)
        assert (mine is None) == (theirs is None), name
        if mine is not None and mine.dtype != torch.float32:
            assert torch.equal(mine, theirs), f"{name} differ at {(mine != theirs).nonzero()[:5].tolist()}"
    for name in NUMBERS:
        mine, theirs = getattr(rollout, name), getattr(expected, name)
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    states = (rollout.initial_state, expected.initial_state), (rollout.last_state, expected.last_state)
    for mine, theirs in ((one, other) for pair in states for one, other in zip(*pair, strict=True)):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    assert_finals_of_truncations(rollout)
    finals = finals_of(expected)
    assert all(torch.equal(obs, finals[place]) for place, obs in finals_of(rollout).items())


def assert_same_episodes(totals, stats, told):
    """Totals list each episode as the mean. An env that ends with no agents adds metrics, but only if episodes ended."""
    assert totals.count == len(stats.returns)
    assert len(totals.returns) == len(totals.lengths) == min(totals.count, SHOWN)
    if totals.count:
        assert np.unique(totals.lengths) * totals.count == pytest.approx(stats.lengths.sum())
        assert np.unique(totals.returns) * totals.count == pytest.approx(stats.returns.sum(), rel=1e-5, abs=1e-4)
        assert totals.best_return == pytest.approx(stats.returns.max(), rel=1e-6)
        assert totals.best_length == stats.lengths.max()
    values = {name: np.concatenate([np.zeros(0), *(metrics[name] for metrics in told)]) for name in (told[0] if told else ())}
    means = {name: value for name, (value,) in ((name, np.unique(listed)) for name, listed in totals.metrics.items())}
    expected = {name: found.mean() for name, found in values.items() if len(found) and totals.count}
    assert means == pytest.approx(expected, rel=1e-5)
    told.clear()


def assert_equal_episodes(found, expected):
    assert (found.count, found.best_return, found.best_length) == (expected.count, expected.best_return, expected.best_length)
    np.testing.assert_array_equal(found.returns, expected.returns)
    np.testing.assert_array_equal(found.lengths, expected.lengths)
    assert {name: list(values) for name, values in found.metrics.items()} == {
        name: list(values) for name, values in expected.metrics.items()
    }


def compare(collector, other, num_steps, rollouts=2):
    """Whether anything terminated, was truncated, or was absent."""
    rollout = collector.new_rollout(num_steps)
    expected = rollout_like(rollout, other)
    seen = []
    for _ in range(rollouts):
        totals = collector.collect(rollout)
        other.actor.learn_from(rollout)
        assert_same_episodes(totals, other.collect(expected), other.vec.told)
        assert_same_rollout(rollout, expected)
        seen.append((rollout.terminated & ~rollout.truncated, rollout.truncated & ~rollout.terminated, ~rollout.valid))
    assert collector.steps == other.steps
    assert rollout.all_valid == (not collector.vec.native_spec.has_present)
    return [bool(torch.stack(kind).any()) for kind in zip(*seen, strict=True)]


CASES = {
    # name: env, settings, what happens (T: an episode terminates, C: is truncated, A: an agent is absent)
    "cartpole": ("cartpole", {"max_steps": 14}, "TC"),
    "pendulum": ("pendulum", {"max_steps": 9, "normalize": True, "mode": "normalize"}, "C"),
    "pendulum beta": ("pendulum", {"max_steps": 9, "distribution": "beta"}, "C"),
    "pendulum squashed": ("pendulum", {"max_steps": 9, "distribution": "squashed_gaussian"}, "C"),
    "a user's distribution": (Thrust, {"module": OddNormal}, "C"),
    "snake": ("snake", SNAKES, "TCA"),
    "asterix": ("asterix", {"max_steps": 17, "hidden_sizes": (16,)}, "C"),
    "memory with lstm": ("memory", {"recurrent": "lstm"}, "T"),
    "squared with mingru": ("squared", {"recurrent": "mingru", "mode": "sign"}, "C"),
    "cartpole with gru": ("cartpole", {"max_steps": 14, "recurrent": "gru", "normalize": True}, "TC"),
    "levers": (Levers, {}, "TC"),
    "masked": (Masked, {}, "TC"),
    "shift": (Shift, {"mode": "normalize"}, "TA"),
    "comings": (Comings, {"normalize": True}, "TCA"),
    "comings with lstm": (Comings, {"recurrent": "lstm", "mode": "normalize"}, "TCA"),
}


SLOW = {"pendulum squashed", "pendulum beta", "asterix", "squared with mingru", "memory with lstm", "levers", "comings"}
SLOW |= {"snake"}
"""Covered by others."""


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case in SLOW)) for case in CASES])
def test_every_field_of_every_step(case):
    env, words, happens = CASES[case]
    collector = on_device(env, **words)
    other = general(collector)
    terminated, truncated, absent = compare(collector, other, 40)
    assert "".join(letter for letter, seen in zip("TCA", (terminated, truncated, absent), strict=True) if seen) == happens
    assert collector.overflow == 0
    for mine, theirs in (
        (collector.policy.normalizer, other.actor.policy.normalizer),
        (collector.postprocess.rewards.normalizer, other.postprocess.rewards.normalizer),
    ):
        assert (mine is None) == (theirs is None)
        for name, value in theirs.state_dict().items() if theirs is not None else ():
            torch.testing.assert_close(mine.state_dict()[name], value, rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.parametrize("num_steps", [1, 2])
def test_rollouts_shorter_than_episodes(num_steps):
    collector = on_device(Comings, 2)
    compare(collector, general(collector), num_steps, rollouts=25)


def test_rollouts_of_several_lengths_follow_on():
    collector = on_device("cartpole", max_steps=14)
    other = general(collector)
    for num_steps in (7, 30, 7):
        compare(collector, other, num_steps, rollouts=1)
    assert collector.steps == 44


def test_many_short_episodes_need_several_slots():
    collector = on_device(Thrust)  # of five steps each
    other = general(collector)
    for num_steps in (17, 17, 15):  # starting mid-episode: up to four truncations per row
        compare(collector, other, num_steps, rollouts=1)
    assert collector.overflow == 0


@pytest.mark.parametrize("slots", [0, 1, 3])
def test_without_a_slot_the_observation_before_must_do(slots):
    whole, few = on_device(Thrust), on_device(Thrust, final_slots=slots)
    expected, rollout = whole.new_rollout(24), few.new_rollout(24)
    lost = 0
    for _ in range(2):
        whole.collect(expected)
        few.collect(rollout)
        assert torch.equal(rollout.values, expected.values)
        cut = rollout.truncated & ~rollout.terminated
        late = cut & (cut.cumsum(0) > slots)
        lost += int(late.sum())
        assert torch.equal(rollout.final_values[~late], expected.final_values[~late])
        assert torch.equal(rollout.final_values[late], rollout.values[late])
        assert not rollout.final_values[~cut].any()
        assert (rollout.final_values[late] - expected.final_values[late]).abs().min() > 1e-6  # they do differ
    assert few.overflow == lost > 0


def test_masks_that_the_rollout_does_not_hold_are_not_used():
    collector = on_device(Levers)
    rollout = Rollout(collector.policy, 30, 5, has_masks=False)
    collector.collect(rollout)
    with torch.no_grad():
        distribution = collector.policy(rollout.obs.flatten(0, 1))[0]
        expected = distribution.log_prob(rollout.actions.flatten(0, 1))
    torch.testing.assert_close(rollout.log_probs.flatten(), expected, rtol=1e-5, atol=1e-5)


def test_a_rollout_with_masks_of_an_env_without():
    collector = on_device("cartpole", 4, max_steps=14)
    rollout = Rollout(collector.policy, 10, 4, has_masks=True)
    collector.collect(rollout)
    assert bool(rollout.masks.all())


def test_a_request_to_stop():
    collector = on_device("cartpole", 2)
    rollout = collector.new_rollout(5)
    collector.request_stop()
    assert collector.collect(rollout) is None
    assert collector.steps == 0
    assert collector.collect(rollout) is not None
    assert collector.steps == 5


def test_episodes_are_reported_once():
    collector = on_device("memory", 6)
    totals = collector.collect(collector.new_rollout(40))
    assert totals.count > 0
    assert collector.pending(wait=True).count == 0


def test_what_is_done_of_the_stage():
    """Rewards and statistics if it knows the learner's stage; bootstrap values always."""
    staged = on_device("pendulum", max_steps=9, mode="normalize", normalize=True)
    collector, rollout = staged.collector, staged.new_rollout(8)
    collector.collect(rollout)
    assert rollout.done == Done.BOOTSTRAP | Done.REWARDS | Done.STATISTICS
    alone = DeviceCollector(hurtle.make_vec("pendulum", 5, max_steps=9), collector.policy, SEED)
    same = alone.new_rollout(8)
    alone.collect(same)
    assert same.done == Done.BOOTSTRAP
    assert same.scaled_rewards is same.rewards


def test_weights_of_another_policy():
    collector, other = on_device("cartpole", 3), on_device("cartpole", 3)
    with torch.no_grad():
        for parameter in other.policy.parameters():
            parameter.add_(0.1)
    collector.load_weights(Weights.of(other.policy, version=4))
    rollout, expected = collector.new_rollout(6), other.new_rollout(6)
    collector.collect(rollout)
    other.collect(expected)
    assert torch.equal(rollout.values, expected.values)
    assert (rollout.version, expected.version) == (4, 0)


# Resuming from a saved state, in both directions

MOVES = {
    "cartpole": ("cartpole", {"max_steps": 14}),
    "comings": (Comings, {}),
    "memory with lstm": ("memory", {"recurrent": "lstm"}),
    "pendulum": ("pendulum", {"max_steps": 9, "mode": "normalize"}),
}


@pytest.mark.parametrize("case", MOVES)
def test_the_state_moves_to_the_general_collector_and_back(case):
    env, words = MOVES[case]
    first, last = (on_device(env, **words) for _ in range(2))
    other = general(first)
    first.collect(first.new_rollout(9))
    saved = copy.deepcopy(first.state_dict())
    other.load_state_dict(copy.deepcopy(saved))
    rollout = first.new_rollout(11)
    expected = rollout_like(rollout, other)
    totals = first.collect(rollout)
    other.actor.learn_from(rollout)
    assert_same_episodes(totals, other.collect(expected), other.vec.told)
    assert_same_rollout(rollout, expected)
    back = copy.deepcopy(other.state_dict())
    assert {key: type(value) for key, value in back.items()} == {key: type(value) for key, value in saved.items()}
    last.load_state_dict(back)
    again = last.new_rollout(11)
    assert_equal_episodes(last.collect(again), first.collect(rollout))
    assert_same_rollout(again, rollout)
    assert last.steps == first.steps == 31


@pytest.mark.parametrize("case", MOVES)
def test_going_on_from_a_saved_state_changes_no_bit(case):
    env, words = MOVES[case]
    first, last = (on_device(env, **words) for _ in range(2))
    rollout, again = first.new_rollout(9), last.new_rollout(9)
    first.collect(rollout)
    saved = copy.deepcopy(first.state_dict())
    last.collect(again)
    last.collect(again)  # its earlier state does not matter
    last.load_state_dict(saved)
    for _ in range(2):
        assert_equal_episodes(last.collect(again), first.collect(rollout))
        for name in (*FLAGS, *NUMBERS):
            mine, theirs = getattr(again, name), getattr(rollout, name)
            assert (mine is None and theirs is None) or torch.equal(mine, theirs), name


def test_without_the_envs_new_episodes_begin_with_other_seeds():
    collector, other = on_device("cartpole", 3), on_device("cartpole", 3)
    rollout, again = collector.new_rollout(5), other.new_rollout(5)
    collector.collect(rollout)
    saved = collector.state_dict()
    del saved["envs"]
    other.load_state_dict(saved)
    other.collect(again)
    assert other.steps == 10
    assert bool(again.starts[0].all())
    assert not torch.equal(again.obs[0], rollout.obs[0])


# Unsupported cases


def test_vectors_that_it_cannot_step():
    native = hurtle.make_vec("cartpole", 2)
    policy = sharp_policy(native)
    foreign = gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync")
    for vec, why in (
        (foreign, "not native"),
        (hurtle.make_vec("CartPole-v1", 2, backend="serial"), "not native"),
        (hurtle.make_vec("cartpole", 2, autoreset_mode="next_step"), "NEXT_STEP"),
        (hurtle.make_vec("cartpole", 4, batch_size=2), "native"),
    ):
        with pytest.raises(
            HurtleError, match=f"cannot be collected from on the policy's device: .*{why}.*Use GeneralCollector"
        ):
            DeviceCollector(vec, policy)
        vec.close()
    with pytest.raises(HurtleError, match=r"envs are on cpu, the policy on meta \(hurtle.make_vec"):
        DeviceCollector(native, policy.to("meta"))


def test_rollouts_that_do_not_fit():
    collector = on_device("cartpole", 3)
    with pytest.raises(HurtleError, match=r"has 2 rows on cpu, the vector 3 on cpu: use new_rollout\(num_steps\)"):
        collector.collect(Rollout(collector.policy, 4, 2))
    collector.collect(collector.new_rollout(4))
    assert collector.steps == 4


# Non-finite numbers


def spoil(collector, what, when):
    """Set `what` and `when` per env."""
    collector.state_dict()  # resets the envs
    collector.vec.set_attr("what", what)
    collector.vec.set_attr("when", when)
    return collector.new_rollout(4)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("what", "name"), [(1, "reward"), (2, "observation"), (3, "observation")])
def test_bad_numbers_are_found(what, name, normalize):
    collector = on_device(Faulty, normalize=normalize)
    rollout = spoil(collector, [0, 0, what, 0, 0], 10)
    for _ in range(2):
        collector.collect(rollout)
    with pytest.raises(NonFiniteError, match=rf"The {name} of env 2, at step 2 of its rollout, is not finite"):
        collector.collect(rollout)


@pytest.mark.parametrize("what", [1, 2, 3])
def test_the_last_step_of_a_rollout_is_looked_at_too(what):
    collector = on_device(Faulty)
    rollout = spoil(collector, [0, 0, 0, what, 0], 4)
    with pytest.raises(NonFiniteError, match=r"env 3, at step 4 of its rollout"):
        collector.collect(rollout)


@pytest.mark.parametrize("what", [3, 4])  # 4: the next episode begins with good numbers
def test_final_observations_are_looked_at_too(what):
    collector = on_device(Faulty)
    rollout = spoil(collector, [0, what, 0, 0, 0], 6)
    collector.collect(rollout)
    with pytest.raises(NonFiniteError, match=r"The final observation of env 1, at step 2 of its rollout"):
        collector.collect(rollout)


def test_so_are_those_of_the_reset():
    collector = on_device(Faulty)
    reset = collector.vec.reset
    collector.vec.reset = lambda **how: (reset(**how), collector._envs.obs[0].fill_(torch.nan))
    with pytest.raises(NonFiniteError, match=r"The observation of env 0 at its step 0"):
        collector.collect(collector.new_rollout(3))


@pytest.mark.parametrize("times", [[-1, 3, -1, 2, -1], [-1, 2, -1, 3, -1]])
def test_of_several_the_first_is_named(times):
    collector = on_device(Faulty)
    rollout = spoil(collector, 1, times)
    with pytest.raises(NonFiniteError, match=rf"The reward of env {times.index(2)}, at step 2"):
        collector.collect(rollout)


@pytest.mark.parametrize("when", [2, 4])
def test_a_bad_observation_is_named_where_actions_are_numbers(when):
    """The policy's next action is not finite either and is rejected by the env, but it is not the cause."""
    collector = on_device(Spoilt)
    rollout = spoil(collector, [0, 0, 2, 0, 0], when)
    with pytest.raises(NonFiniteError, match=rf"The observation of env 2, at step {when}"):
        collector.collect(rollout)


@pytest.mark.parametrize("what", [1, 2, 3])
def test_nothing_is_learned_from_bad_numbers(what):
    """A run saves its policy, with the statistics, when this is raised."""
    collector = on_device(Faulty, normalize=True, mode="normalize")
    rollout = spoil(collector, [0, 0, what, 0, 0], 2)
    with pytest.raises(NonFiniteError):
        collector.collect(rollout)
    for normalizer in (collector.policy.normalizer, collector.postprocess.rewards.normalizer):
        assert not any(bool(value.any()) for value in normalizer.state_dict().values())


def test_weights_that_are_not_finite():
    collector = on_device(Faulty)
    with torch.no_grad():
        next(collector.policy.parameters()).fill_(torch.nan)
    with pytest.raises(NonFiniteError, match=r"The policy's log-probability in env 0, at step 1.*learning_rate"):
        collector.collect(collector.new_rollout(3))
