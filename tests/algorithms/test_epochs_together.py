"""Seeds of PPO and A2C side by side: each collects and learns what it would alone, and stays a learner that is saved."""

import copy

import pytest
import torch
from sample_envs import Crew

import hurtle
from hurtle.algorithms.algorithm import LearnerSetup, find_algorithm
from hurtle.algorithms.epochs_together import EpochsTogether
from hurtle.collect.device_collector import DeviceCollector
from hurtle.collect.rewards import RewardRule
from hurtle.collect.seeds_device_collector import SeedsDeviceCollector
from hurtle.errors import HurtleError, NonFiniteError
from hurtle.kernels.cuda_graphs import Graphs
from hurtle.policies.build import PolicyConfig, build_policy

BASES, SHARE, STEPS = (700, 20, 90_000), 4, 16
PPO = {"num_steps": STEPS, "minibatch_size": 16, "num_epochs": 2, "learning_rate": 3e-3, "adam_eps": 1e-3}
"""With a larger adam_eps than usual: else the rounding of gradients near 0 decides about the signs of whole steps."""
CASES = {
    "choices": ("cartpole", "ppo", {}, {}),
    "several agents, illegal actions": (Crew, "ppo", {"minibatch_size": 48, "separate_networks": False}, {}),
    "numbers": ("pendulum", "ppo", {"clip_values": False, "entropy_coef": 0.0}, {"statistics": True}),
    "bounded numbers": ("pendulum", "ppo", {"distribution": "beta", "normalize_advantages": False}, {}),
    "a KL stop": ("cartpole", "ppo", {"target_kl": 2e-4, "num_epochs": 4}, {}),
    "frames": ("breakout", "ppo", {"policy": "grid_cnn"}, {}),
    "a2c": ("cartpole", "a2c", {"optimizer": "rmsprop"}, {}),
    "in order": ("cartpole", "ppo", {"shuffle": False, "optimizer": "adamw", "weight_decay": 0.1}, {}),
}


class Made:
    """A learner and its collector for each seed, and all seeds of the same kind together."""

    def __init__(self, env, algorithm, settings, statistics=False, device="cpu"):
        self.env, self.device = env, device
        self.algorithm = find_algorithm(algorithm)
        policy = {"hidden_sizes": (16,), **{name: settings[name] for name in settings if hasattr(PolicyConfig, name)}}
        own = {name: value for name, value in settings.items() if name not in policy}
        self.config = self.algorithm.config(**(PPO if algorithm == "ppo" else {"num_steps": STEPS}) | own)
        self.policy_config, self.statistics = PolicyConfig(**policy), statistics

    def vec(self, envs):
        return hurtle.make_vec(self.env, envs, device=self.device)

    def learner(self, vec, n, graphs):
        spaces = vec.agent_observation_space, vec.agent_action_space
        policy = build_policy(self.policy_config, *spaces, normalize_observations=self.statistics, seed=n).to(self.device)
        rewards = RewardRule("normalize" if self.statistics else "raw", SHARE * vec.num_agents)
        setup = LearnerSetup(n, rewards, graphs=graphs)
        return self.algorithm.make_learner("device", policy, self.config, setup)

    def alone(self):
        found = []
        for n, base in enumerate(BASES):
            vec, graphs = self.vec(SHARE), Graphs(self.device)
            learner = self.learner(vec, n, graphs)
            how = {"postprocess": learner.postprocess, "graphs": graphs, "fused": learner.acting_kernels}
            collector = DeviceCollector(vec, learner.policy, base, **how)
            found.append((learner, collector, collector.new_rollout(STEPS)))
        return found

    def together(self):
        vec, graphs = self.vec(SHARE * len(BASES)), Graphs(self.device)
        learners = [self.learner(vec, n, Graphs(self.device, enabled=False)) for n in range(len(BASES))]
        learner = EpochsTogether(learners, LearnerSetup(graphs=graphs))
        how = {"postprocess": learner.postprocess, "graphs": graphs, "fused": learner.acting_kernels}
        collector = SeedsDeviceCollector(vec, learner.policy, BASES, (5, 6, 7), **how)
        return learner, collector, collector.new_rollout(STEPS)


def assert_same(found, expected, where="", atol=2e-6, rtol=1e-4):
    """Saved states to a few roundings."""
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected, atol=atol, rtol=rtol, msg=lambda text: f"{where}: {text}")
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_same(found[key], value, f"{where} {key}", atol, rtol)
    elif isinstance(expected, list | tuple):
        for n, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{where} {n}", atol, rtol)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, abs=1e-4, rel=1e-3, nan_ok=True), where
    elif isinstance(expected, int | str):
        assert found == expected, where


def updates_as_alone(made, count=3):
    """Collect and learn together and alone: the same rollouts, episodes, metrics and states."""
    (learner, collector, rollout), alone = made.together(), made.alone()
    collector.prepare(rollout)
    learner.prepare(rollout)
    for _ in range(count):
        collector.collect(rollout)
        learner.update(rollout)
        collector.pending(wait=True)
        learner.pending(wait=True)
        ended = collector.take_episodes()
        for n, (own, own_collector, own_rollout) in enumerate(alone):
            episodes = own_collector.collect(own_rollout)
            if made.device != "cpu":
                episodes = own_collector.pending(wait=True)
            rows = own_rollout.num_rows
            part = rollout.of_rows(n * rows, rows)
            for name in ("obs", "actions", "rewards", "terminated", "truncated", "starts"):
                assert_same(getattr(part, name), getattr(own_rollout, name), name, atol=1e-4, rtol=1e-3)
            metrics = own.update(own_rollout) or own.pending(wait=True)
            for name in ("log_probs", "values", "advantages", "returns", "scaled_rewards"):
                assert_same(getattr(part, name), getattr(own_rollout, name), name, atol=1e-4, rtol=1e-3)
            assert_same(learner.seed_metrics[n], dict(metrics))
            found = ended.get(n)
            assert (found.count if found else 0) == episodes.count
            if found:
                assert found.best_return == pytest.approx(episodes.best_return)
    for n, (own, _, _) in enumerate(alone):
        assert_same(learner.learners[n].policy.state_dict(), own.policy.state_dict(), "weights", atol=2e-5, rtol=1e-3)
        states = learner.state_of(n), own.state_dict()
        for name in states[1]:
            assert_same(states[0][name], states[1][name], name, atol=2e-5, rtol=2e-3)
    return learner, collector, rollout, alone


@pytest.mark.parametrize("case", CASES)
def test_each_seed_learns_what_it_would_alone(case):
    env, algorithm, settings, more = CASES[case]
    learner, collector, _, _ = updates_as_alone(Made(env, algorithm, settings, **more))
    before = [one.policy.state_dict() for one in learner.learners]
    assert any(not torch.equal(before[0][name], before[1][name]) for name in before[0])
    learner.close()
    collector.close()


def test_seeds_beyond_the_target_kl_stop_alone():
    """The seeds of the case stop after different epochs; one that has stopped learns again in the next update."""
    env, algorithm, settings, _ = CASES["a KL stop"]
    made = Made(env, algorithm, settings)
    learner, collector, rollout = made.together()
    counts = []
    for _ in range(4):
        collector.collect(rollout)
        before = learner.optimizer.count.clone()
        learner.update(rollout)
        counts.append((learner.optimizer.count - before).tolist())
    assert len({steps for each in counts for steps in each}) > 1
    assert min(steps for each in counts for steps in each) >= 4
    assert any(len(set(each)) > 1 for each in counts)


def test_a_seed_with_a_bad_gradient_is_left_as_it_is():
    made = Made("cartpole", "ppo", {})
    learner, collector, rollout = made.together()
    collector.collect(rollout)
    before = copy.deepcopy([one.policy.state_dict() for one in learner.learners])
    rollout.of_rows(SHARE, SHARE).log_probs.fill_(torch.nan)
    metrics = learner.update(rollout)
    assert metrics["diverged"] == pytest.approx(1 / 3)
    assert [error is None for error in learner.failures()] == [True, False, True]
    for n, one in enumerate(learner.learners):
        moved = any(not torch.equal(before[n][name], part) for name, part in one.policy.state_dict().items())
        assert moved == (n != 1)
    collector.collect(rollout)
    rollout.log_probs.fill_(torch.nan)
    with pytest.raises(NonFiniteError, match="not finite"):
        learner.update(rollout)


def test_seeds_go_on_together_and_alone_from_each_others_states():
    made = Made("cartpole", "ppo", {})
    learner, collector, rollout, alone = updates_as_alone(made, 2)
    states = [learner.state_of(n) for n in range(len(BASES))], collector.states()
    other, other_collector, other_rollout = made.together()
    for policy, own in zip(other.learners, alone, strict=True):
        policy.policy.load_state_dict(own[0].policy.state_dict())
    other.load_states([own.state_dict() for own, _, _ in alone])
    other_collector.load_states([own.state_dict() for _, own, _ in alone])
    for each in ((learner, collector, rollout), (other, other_collector, other_rollout)):
        each[1].collect(each[2])
        each[0].update(each[2])
    assert_same(other_rollout.obs, rollout.obs, atol=1e-4, rtol=1e-3)
    assert_same(other.weights().flat, learner.weights().flat, atol=1e-4, rtol=1e-2)
    own, own_collector, own_rollout = alone[1]
    own.load_state_dict(states[0][1])
    own_collector.load_state_dict(states[1][1])
    own_collector.collect(own_rollout)
    assert_same(own_rollout.obs, rollout.of_rows(SHARE, SHARE).obs, atol=1e-4, rtol=1e-3)


def test_what_does_not_fit_together_is_refused():
    made = Made("cartpole", "ppo", {})
    vec, graphs = made.vec(SHARE), Graphs("cpu")
    one, two = made.learner(vec, 0, graphs), made.learner(vec, 1, graphs)
    with pytest.raises(HurtleError, match="at least one"):
        EpochsTogether([], LearnerSetup(graphs=graphs))
    other = Made("cartpole", "ppo", {"gamma": 0.5}).learner(vec, 1, graphs)
    with pytest.raises(HurtleError, match="equal settings"):
        EpochsTogether([one, other], LearnerSetup(graphs=graphs))
    with pytest.raises(HurtleError, match="policy of its own"):
        EpochsTogether([one, one], LearnerSetup(graphs=graphs))
    frozen = made.learner(vec, 1, graphs)
    frozen.parameters.is_whole = False
    with pytest.raises(HurtleError, match="frozen"):
        EpochsTogether([one, frozen], LearnerSetup(graphs=graphs))
    EpochsTogether([one], LearnerSetup(graphs=graphs))
    with pytest.raises(HurtleError, match="with others already"):
        EpochsTogether([one], LearnerSetup(graphs=graphs))
    one = made.learner(vec, 0, graphs)
    EpochsTogether([one, two], LearnerSetup(graphs=graphs))
    with pytest.raises(HurtleError, match="with others already"):
        EpochsTogether([one, two], LearnerSetup(graphs=graphs))
    remembering = Made("cartpole", "ppo", {"recurrent": "gru"}).learner(vec, 0, graphs)
    with pytest.raises(HurtleError, match="a memory"):
        EpochsTogether([remembering], LearnerSetup(graphs=graphs))


@pytest.mark.parametrize("env", ["cartpole", "pendulum"])
def test_a_policy_that_is_not_finite_fails_its_seed_alone(env):
    """The others collect and learn what they would alone, their statistics too; its envs stay sound."""
    made = Made(env, "ppo", {}, statistics=True)
    (learner, collector, rollout), alone = made.together(), made.alone()
    for parameter in learner.learners[1].policy.parameters():
        parameter.data.fill_(torch.nan)
    for _ in range(3):
        collector.collect(rollout)
        for n, error in collector.take_failures().items():
            assert n == 1
            assert "env 0 of seed 6" in str(error)
            learner.leave(n)
        learner.update(rollout)
        for own, own_collector, own_rollout in alone[::2]:
            own_collector.collect(own_rollout)
            own.update(own_rollout)
    assert learner._left == {1}
    assert not any(learner.failures())
    assert rollout.obs.isfinite().all()
    for n in (0, 2):
        own = alone[n][0]
        assert_same(learner.learners[n].policy.state_dict(), own.policy.state_dict(), atol=2e-5, rtol=1e-3)
        assert_same(learner.state_of(n)["postprocess"], own.state_dict()["postprocess"], atol=2e-5, rtol=2e-3)
    assert float(learner.learners[1].postprocess.rewards.normalizer.count) == 0


def test_a_failure_is_not_forgotten_if_several_updates_are_reported_at_once(monkeypatch):
    made = Made("cartpole", "ppo", {})
    learner, collector, rollout = made.together()
    late, arrived = [], learner._readback.arrived
    monkeypatch.setattr(
        learner._readback, "arrived", lambda wait: [*late, *arrived(wait)] if wait else late.extend(arrived()) or []
    )
    for update in range(3):
        collector.collect(rollout)
        if update == 0:
            rollout.of_rows(0, SHARE).log_probs.fill_(torch.nan)
        assert not learner.update(rollout)
    metrics = learner.pending(wait=True)
    assert metrics["diverged"] == pytest.approx(1 / 3)
    assert [error is None for error in learner.failures()] == [False, True, True]
    assert not any(learner.failures())


def test_truncations_without_a_slot_are_counted_for_each_seed():
    made = Made("pendulum", "ppo", {})
    vec = hurtle.make_vec("pendulum", SHARE * len(BASES), max_steps=5)
    learners = [made.learner(vec, n, Graphs("cpu")) for n in range(len(BASES))]
    learner = EpochsTogether(learners, LearnerSetup(graphs=Graphs("cpu")))
    collector = SeedsDeviceCollector(vec, learner.policy, BASES, (5, 6, 7), postprocess=learner.postprocess, final_slots=1)
    collector.collect(collector.new_rollout(STEPS))
    assert [collector.metrics_of(n) for n in range(3)] == [{"final_overflow": 2.0 * SHARE}] * 3
    assert collector.metrics() == {"final_overflow": 6.0 * SHARE}


def test_absent_agents_are_refused():
    made = Made("snake", "ppo", {"minibatch_size": 64})
    learner, collector, rollout = made.together()
    collector.collect(rollout)
    with pytest.raises(HurtleError, match="agents may be absent"):
        learner.update(rollout)
