"""Seeds side by side: each learns what it would alone, from its own rows, and stays a learner that acts and is saved."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from replay_worlds import World
from test_off_policy_native import BOX, THREE_CHOICES, TWO_NUMBERS, batch

from hurtle.algorithms.algorithm import LearnerSetup, find_algorithm
from hurtle.algorithms.side_by_side import SideBySide
from hurtle.buffers.replay import Transitions
from hurtle.buffers.rollout import Rollout
from hurtle.collect.inference import Actor
from hurtle.collect.seeds_actor import SeedsActor
from hurtle.errors import HurtleError, NonFiniteError
from hurtle.kernels.cuda_graphs import Graphs
from hurtle.policies.build import build_policy
from hurtle.policies.policy_config import PolicyConfig

SEEDS, BATCH = 3, 32
SLOW = pytest.mark.slow


def learners(name, seeds=SEEDS, hidden=(24, 40), compiled=False, discrete=False, device="cpu", normalize=False, **settings):
    """The learners of the first few seeds."""
    algorithm, graphs = find_algorithm(name), Graphs(device)
    config = algorithm.config(learning_rate=1e-3, **settings)
    network = PolicyConfig(hidden_sizes=hidden, activation="relu", orthogonal_init=False)
    actions = THREE_CHOICES if discrete or name == "dqn" else TWO_NUMBERS
    make = algorithm.network_maker(config)
    made = []
    for seed in range(seeds):
        policy = build_policy(network, BOX, actions, make_network=make, seed=seed, normalize_observations=normalize).to(device)
        setup = LearnerSetup(seed=seed, graphs=graphs, compiled=compiled, num_rows=2)
        made.append(algorithm.make_learner("device", policy, config, setup))
    return made


def batches(seeds, discrete, step=0, masked=False):
    """A batch for each seed, and all of them as one."""
    each = [batch(BATCH, discrete, masked, seed=100 * step + n) for n in range(seeds)]
    return each, Transitions(*(None if parts[0] is None else torch.stack(parts) for parts in zip(*each, strict=True)))


def assert_equal_states(found, expected, where=""):
    """Saved states to a few roundings: weights, moments, counts of steps, targets."""
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-4, msg=lambda text: f"{where}: {text}")
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_equal_states(found[key], value, f"{where} {key}")
    elif isinstance(expected, list):
        for n, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_equal_states(one, other, f"{where} {n}")


def networks(learner):
    saved = learner.state_dict()
    return {"policy": learner.policy.state_dict(), "trained": saved["trained"], "targets": saved["targets"]}


def step_both(together, alone, steps=4, discrete=False, masked=False):
    """The same steps of all seeds together and of each alone, with the same batches and noise."""
    noise = torch.Generator().manual_seed(5)
    for step in range(steps):
        each, all_of_them = batches(len(alone), discrete, step, masked)
        drawn = [torch.randn(len(alone), BATCH, 2, generator=noise) for _ in range(2)]
        given = iter(drawn)
        together._steps.normals = lambda *shape, given=given: torch.zeros(shape) if shape[1:] == () else next(given)
        errors, metrics = together.gradient_step(all_of_them)
        for n, learner in enumerate(alone):
            own = iter(drawn)
            learner.normals = lambda *shape, own=own, n=n: next(own)[n] if shape else torch.zeros(())
            expected_errors, expected = learner.gradient_step(each[n])
            torch.testing.assert_close(errors[n], expected_errors, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(metrics[n], expected, atol=1e-4, rtol=1e-4, equal_nan=True)
        for learner in (together, *alone):
            learner.gradient_steps += 1
            if learner.gradient_steps % learner.config.target_every == 0:
                learner.move_targets()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sac", {}),
        ("td3", {}),
        ("dqn", {"target_every": 2, "max_grad_norm": 0.05}),
        ("xqc", {"critic_sizes": (12, 7), "num_atoms": 21, "policy_every": 2}),
        pytest.param("sac", {"num_critics": 3, "temperature": 0.3, "max_grad_norm": 0.1, "hidden": (7, 5)}, marks=SLOW),
        pytest.param("sac", {"discrete": True}, marks=SLOW),
        pytest.param("td3", {"policy_every": 3, "target_every": 3, "hidden": (8,)}, marks=SLOW),
        pytest.param("dqn", {"dueling": True, "distributional": "c51", "num_atoms": 11}, marks=SLOW),
        pytest.param("dqn", {"distributional": "qr", "num_atoms": 5, "double": False, "rescale_values": True}, marks=SLOW),
        pytest.param("sac", {"compiled": True}, marks=SLOW),
        pytest.param("td3", {"compiled": True}, marks=SLOW),
        pytest.param("xqc", {"compiled": True, "critic_sizes": (12, 7), "num_critics": 3}, marks=SLOW),
        pytest.param("dqn", {"compiled": True}, marks=SLOW),
    ],
    ids=str,
)
def test_each_seed_learns_what_it_would_alone(name, options, monkeypatch):
    """Weights, moments, targets, temperature, errors and metrics; what is compiled is one graph each, here without C++."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager", fullgraph=True))
    alone = learners(name, **{**options, "compiled": False})
    together = SideBySide(learners(name, **options))
    before = copy.deepcopy(networks(alone[0]))
    step_both(together, alone, discrete=name == "dqn" or options.get("discrete", False), masked=name == "dqn")
    for found, expected in zip(together.learners, alone, strict=True):
        assert_equal_states(networks(found), networks(expected))
    with pytest.raises(AssertionError):
        assert_equal_states(networks(alone[0]), before)


def test_seeds_act_as_each_would_alone():
    """Also after their weights have changed, and at random while `epsilon` says so."""
    together = SideBySide(learners("sac"))
    policies = [learner.policy for learner in together.learners]
    share = 2
    actor = SeedsActor(policies, SEEDS * share, 7, Graphs("cpu"))
    alone = [Actor(policy, share, 7 + n * share) for n, policy in enumerate(policies)]
    generator = torch.Generator().manual_seed(0)
    starts = torch.zeros(SEEDS * share, dtype=torch.bool)
    seen = []
    for epsilon in (1.0, 0.0, 0.0):
        together._acting.epsilon.fill_(epsilon)
        obs = torch.randn((SEEDS * share, *policies[0].observation_space.shape), generator=generator)
        found = actor.act(obs, None, starts)
        each = [one.act(part, None, starts[:share]) for one, part in zip(alone, obs.split(share), strict=True)]
        for part, expected in zip(found, zip(*each, strict=True), strict=True):
            torch.testing.assert_close(part, torch.cat(expected))
        np.testing.assert_array_equal(actor.env_actions(), np.concatenate([one.env_actions() for one in alone]))
        seen.append(found[0].clone())
        for learner in together.learners:
            for parameter in learner.policy.parameters():
                parameter.data.mul_(0.5)
    assert len({tuple(actions.flatten().tolist()) for actions in seen}) == len(seen)
    with pytest.raises(HurtleError, match="evenly by 3"):
        SeedsActor(policies, 8, 0, Graphs("cpu"))


def test_a_seed_whose_loss_is_not_finite_leaves_the_others_as_they_are():
    alone, together = learners("sac"), SideBySide(learners("sac"))
    lost = copy.deepcopy(networks(together.learners[1])["trained"])
    for k in range(3):
        each, bad = batches(SEEDS, False, k)
        bad.rewards[1, 3] = bad.obs[1, 3] = torch.nan
        noise = [torch.randn(SEEDS, BATCH, 2, generator=torch.Generator().manual_seed(k)) for _ in range(2)]
        drawn = iter(noise)
        together._steps.normals = lambda *shape, drawn=drawn: next(drawn)
        _, metrics = together.gradient_step(bad)
        together.move_targets()
        for n in (0, 2):
            own = iter(noise)
            alone[n].normals = lambda *shape, own=own, n=n: next(own)[n]
            alone[n].gradient_step(each[n])
            alone[n].move_targets()
    for n in (0, 2):
        assert_equal_states(networks(together.learners[n]), networks(alone[n]))
    assert_equal_states(networks(together.learners[1])["trained"], lost)
    seen = together.checked(metrics.tolist())
    assert seen["diverged"] == pytest.approx(1 / 3)
    assert np.isfinite([*seen.values()]).all()
    assert np.isnan(together.seed_metrics[1]["value_loss"])
    with pytest.raises(NonFiniteError, match="value_loss"):
        together.checked([[float("nan")] * len(together.METRICS)] * SEEDS)
    one_of_two = together.mean_metrics([metrics.nan_to_num(1.0), metrics])
    assert one_of_two[:, 0].isnan().tolist() == [False, True, False], "one step in a graph is enough"


def test_a_gradient_that_is_not_finite_is_reported_though_the_loss_is():
    (learner,) = learners("sac", seeds=1)
    learner.trained_critics.descend = lambda *given: (torch.tensor(torch.inf), torch.zeros(BATCH), torch.ones(3))
    _, metrics = learner.gradient_step(batch(BATCH, False))
    with pytest.raises(NonFiniteError):
        learner.checked(metrics.tolist())


def test_learners_go_on_where_they_were():
    """Saved after learning side by side, loaded into new learners, joined again: counts and targets are kept."""
    how = {"learning_starts": 8, "capacity": 64, "batch_size": 16, "save_replay": False}
    together = SideBySide(learners("td3", **how))
    together.prepare(rollout_of(together.policy, 4, 2 * SEEDS, 0))
    for k in range(3):
        together.update(rollout_of(together.policy, 4, 2 * SEEDS, k))
    assert together.gradient_steps == 16
    loaded = learners("td3", **how)
    for one, other in zip(loaded, together.learners, strict=True):
        one.policy.load_state_dict(other.policy.state_dict())
        one.load_state_dict(copy.deepcopy(other.state_dict()))
    again = SideBySide(loaded)
    again.prepare(rollout_of(again.policy, 4, 2 * SEEDS, 0))
    assert (again.updates, again.gradient_steps) == (3, 16)
    assert_equal_states([networks(one) for one in again.learners], [networks(one) for one in together.learners])


def test_parameters_that_are_no_longer_trained_are_noticed():
    together = SideBySide(learners("sac", learning_starts=8, capacity=64, batch_size=16))
    together.prepare(rollout_of(together.policy, 4, 2 * SEEDS, 0))
    together.learners[1].policy.double().float()
    with pytest.raises(HurtleError, match="replaced or frozen"):
        together.update(rollout_of(together.policy, 4, 2 * SEEDS, 0))


def rollout_of(policy, steps, rows, seed):
    rollout, rng = Rollout(policy, steps, rows), torch.Generator().manual_seed(seed)
    for field in (rollout.obs, rollout.rewards, rollout.last_obs):
        field.copy_(torch.randn(field.shape, generator=rng))
    if rollout.actions.is_floating_point():
        rollout.actions.copy_(torch.randn(rollout.actions.shape, generator=rng))
    rollout.obs[..., 0] = (torch.arange(rows) // 2).float()  # the seed that a row belongs to
    rollout.last_obs[..., 0] = (torch.arange(rows) // 2).float()
    return rollout


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sac", {}),
        ("dqn", {"priority_alpha": 0.6, "replay_ratio": 1.0}),
        ("xqc", {"critic_sizes": (8,), "num_atoms": 11, "policy_every": 2}),
    ],
)
def test_it_learns_from_rollouts_as_one_learner_and_is_saved(name, options):
    """Each seed from its own rows; what is per seed in the settings is per seed."""
    how = {"learning_starts": 8, "capacity": 64, "batch_size": 16, "save_replay": True, **options}

    def made():
        together = SideBySide(learners(name, **how))
        together.prepare(rollout_of(together.policy, 4, 2 * SEEDS, 0))
        return together

    together = made()
    for k in range(2):
        together.update(rollout_of(together.policy, 4, 2 * SEEDS, k))
    assert (together.steps, together.gradient_steps) == (16, 8)
    assert together.replay.capacity == 64 * SEEDS
    drawn = together.replay.sample(16)
    assert drawn.obs.shape == (SEEDS, 16, 5)
    assert (drawn.obs[..., 0] == torch.arange(SEEDS).unsqueeze(1)).all()
    metrics = together.update(rollout_of(together.policy, 4, 2 * SEEDS, 2), 1.0)
    assert np.isfinite(metrics["value_loss"])
    assert len(together.seed_metrics) == SEEDS
    assert {float(one.policy.network.epsilon) for one in together.learners} == {float(np.float32(metrics["epsilon"]))}

    again = made()
    again.load_state_dict(copy.deepcopy(together.state_dict()))
    for one, other in zip(again.learners, together.learners, strict=True):
        one.policy.load_state_dict(other.policy.state_dict())
    again.prepare(rollout_of(together.policy, 4, 2 * SEEDS, 0))
    for each in (together, again):
        torch.manual_seed(3)
        each.update(rollout_of(together.policy, 4, 2 * SEEDS, 3), 1.0)
    assert_equal_states([networks(one) for one in again.learners], [networks(one) for one in together.learners])


def test_rewards_are_scaled_by_those_of_the_same_seed():
    together, alone = (learners("xqc", critic_sizes=(8,), learning_starts=1_000, capacity=64) for _ in range(2))
    together = SideBySide(together)
    together.prepare(rollout_of(together.policy, 4, 2 * SEEDS, 0))
    for k in range(2):
        rollout = rollout_of(together.policy, 4, 2 * SEEDS, k)
        rollout.rewards.mul_(torch.arange(2 * SEEDS) // 2 + 1)
        together.update(rollout)
        rewards, ended = rollout.rewards.chunk(SEEDS, 1), rollout.truncated.chunk(SEEDS, 1)
        for learner, its_rewards, its_ended in zip(alone, rewards, ended, strict=True):
            learner.scale.update(its_rewards, its_ended, torch.ones_like(its_ended))
    scales = torch.stack([learner.scale.value for learner in alone])
    assert len(set(scales.tolist())) == SEEDS
    torch.testing.assert_close(torch.stack([learner.scale.value for learner in together.learners]), scales)
    given = batches(SEEDS, False)[1]
    torch.testing.assert_close(together.prepared(given).rewards, given.rewards / scales.unsqueeze(-1))


def test_a_learner_is_still_one():
    """Its policy acts with the weights of the last step, it saves what continues alone, and the flat weights are its own."""
    together = SideBySide(learners("sac"))
    together.gradient_step(batches(SEEDS, False)[1])
    taken, obs = together.learners[1], torch.zeros(4, 5)
    (fresh,) = learners("sac", seeds=1)
    fresh.policy.load_state_dict(taken.policy.state_dict())
    fresh.load_state_dict(copy.deepcopy(taken.state_dict()))
    assert torch.equal(fresh.policy(obs)[0].mode(), taken.policy(obs)[0].mode())
    assert not torch.equal(together.learners[0].policy(obs)[0].mode(), taken.policy(obs)[0].mode())
    given, noise = batch(BATCH, False), torch.zeros(BATCH, 2)
    for learner in (fresh, taken):
        learner.normals = lambda *shape: noise
        learner.gradient_step(given)
    assert_equal_states(networks(taken), networks(fresh))
    weights = together.weights()
    assert torch.equal(weights.flat[1], taken.weights().flat)
    assert weights.flat.is_contiguous()
    alone = copy.deepcopy(taken.policy)
    together.gradient_step(batches(SEEDS, False, 1)[1])
    assert not torch.equal(alone(obs)[0].mode(), taken.policy(obs)[0].mode())


def test_what_cannot_learn_side_by_side():
    first, second, third = learners("sac")
    longer, joined = learners("sac"), learners("sac")
    longer[2].gradient_steps = 7
    SideBySide(joined)
    refused = {
        "equally long": longer,
        "with others already": joined,
        "at least one": [],
        "equal settings": [first, *learners("sac", seeds=1, gamma=0.5)],
        "a policy of its own": [first, second, third, first],
        "one shape": [first, *learners("sac", seeds=1, hidden=(8, 8))],
        "noisy=False": learners("dqn", noisy=True),
        "normalize_observations=False": learners("sac", seeds=2, normalize=True),
    }
    for why, given in refused.items():
        with pytest.raises(HurtleError, match=why):
            SideBySide(given)
    with pytest.raises(HurtleError, match="5 rows cannot be shared evenly by 3 seeds"):
        SideBySide(learners("dqn")).prepare(World(0, num_rows=5).new_rollout(5))
