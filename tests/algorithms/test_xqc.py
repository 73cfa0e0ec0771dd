"""XQC's losses against plain NumPy, its batch norms, its unit norms, and folding them into a plain MLP."""

import copy

import numpy as np
import pytest
import torch
from gymnasium import spaces
from test_off_policy_native import batch, learners
from test_q_targets import project_reference
from torch import nn

from hurtle.algorithms.algorithm import LearnerSetup, find_algorithm
from hurtle.collect.rewards import RewardRule
from hurtle.errors import HurtleError
from hurtle.policies.batch_norm_networks import BatchNormBody, BatchNormLayers
from hurtle.policies.mlp import VectorBody

SMALL = {"critic_sizes": (12, 7), "num_atoms": 21, "initial_temperature": 0.2}
SIZE = 40


def trained(steps=3, **settings):
    """A learner after some gradient steps, so that nothing has its initial value; and its next batch."""
    (learner,) = learners("xqc", hidden=(9, 8), gears=("general",), **{**SMALL, **settings})
    for k in range(steps):
        learner.gradient_step(batch(SIZE, False, seed=k))
        learner.move_targets()
    given = batch(SIZE, False, seed=99)
    return learner, given._replace(weights=given.weights * (given.weights > 0.2))


def layers_reference(layers, e, x, by_batch=True):
    """The hidden layers of one network, and its means and variances."""
    scales, biases = (part[e, 0].detach().double().numpy() for part in (layers.scale, layers.bias))
    scales, biases = np.append(np.ones(layers.sizes[0]), scales), np.append(np.zeros(layers.sizes[0]), biases)
    running, seen, begin = layers.statistics[:, e, 0].double().numpy(), [], 0
    for k, size in enumerate(layers.sizes):
        if k:
            x = x @ layers.weights[k - 1][e].detach().double().numpy()
        part = slice(begin, begin + size)
        mean, variance = (x.mean(0), x.var(0)) if by_batch else running[:, part]
        x = (x - mean) / np.sqrt(variance + 1e-5) * scales[part] + biases[part]
        x = np.maximum(x, 0) if k else x
        seen.append(np.stack([mean, variance]))
        begin += size
    return x, np.concatenate(seen, -1)


def probabilities_reference(critics, e, x, by_batch=True):
    features, seen = layers_reference(critics.layers, e, x, by_batch)
    logits = features @ critics.last.weight[e].detach().double().numpy() + critics.last.bias[e, 0].detach().double().numpy()
    exps = np.exp(logits - logits.max(-1, keepdims=True))
    return exps / exps.sum(-1, keepdims=True), seen


def drawn_reference(actor, features, noise):
    outputs = features @ actor.last.weight.detach().double().numpy().T + actor.last.bias.detach().double().numpy()
    mean, log_std = outputs[:, :2], -5.0 + 3.5 * (np.tanh(outputs[:, 2:]) + 1.0)
    raw = mean + np.exp(log_std) * noise
    density = -0.5 * noise**2 - log_std - 0.5 * np.log(2 * np.pi)
    return np.tanh(raw), (density - np.log(1.0 - np.tanh(raw) ** 2)).sum(-1)


def numpy_of(given):
    return {name: part.double().numpy() for name, part in given._asdict().items() if part is not None}


def test_the_critics_loss():
    """Both halves share the batch's statistics; the target has the entropy, and is that of the critic with the lower mean."""
    learner, given = trained()
    noise, b = torch.randn(SIZE, 2), numpy_of(given)
    loss, errors, _, found = learner.value_loss(given, noise)
    features, _ = layers_reference(learner.actor.body.layers, 0, b["next_obs"], by_batch=False)
    actions, log_probs = drawn_reference(learner.actor, features, noise.double().numpy())
    x = np.concatenate([np.concatenate([b["obs"], np.tanh(b["actions"])], 1), np.concatenate([b["next_obs"], actions], 1)])
    support = np.linspace(-5, 5, 21)
    following = np.stack([probabilities_reference(learner.target, e, x)[0][SIZE:] for e in range(2)])
    lowest = (following @ support).argmin(0)
    assert 0 < lowest.mean() < 1
    temperature = np.exp(float(learner.temperature.log.detach()))
    rewards = b["rewards"] - b["discounts"] * temperature * log_probs
    target = project_reference(following[lowest, np.arange(SIZE)], rewards, b["discounts"], support)
    online = [probabilities_reference(learner.critics, e, x) for e in range(2)]
    losses = np.stack([-(target * np.log(probabilities[:SIZE])).sum(-1) for probabilities, _ in online])
    assert float(loss.detach()) == pytest.approx((b["weights"] * losses).mean(1).sum(), rel=1e-4)
    np.testing.assert_allclose(errors.numpy(), losses.mean(0), rtol=1e-3)
    np.testing.assert_allclose(found[:, :, 0].numpy(), np.stack([seen for _, seen in online], 1), rtol=1e-3, atol=1e-5)


def test_the_actors_loss():
    """The actor is normalized by the batch, the critics by running statistics; the lowest counts."""
    learner, given = trained()
    noise, b = torch.randn(SIZE, 2), numpy_of(given)
    loss, slope, _, found = learner.policy_loss(given, noise)
    features, seen = layers_reference(learner.actor.body.layers, 0, b["obs"])
    actions, log_probs = drawn_reference(learner.actor, features, noise.double().numpy())
    x = np.concatenate([b["obs"], actions], 1)
    values = [probabilities_reference(learner.critics, e, x, by_batch=False)[0] @ np.linspace(-5, 5, 21) for e in range(2)]
    objective = np.exp(float(learner.temperature.log.detach())) * log_probs - np.minimum(*values)
    assert float(loss.detach()) == pytest.approx((objective * (b["weights"] > 0)).mean(), rel=1e-4)
    assert float(slope) == pytest.approx(-log_probs.mean() + 1.0, rel=1e-4)  # two actions
    np.testing.assert_allclose(found[:, 0, 0].numpy(), seen, rtol=1e-3, atol=1e-5)


def test_what_a_step_does_to_statistics_and_weights():
    """Losses change no buffer; a step updates those of the trained networks only, and leaves neurons with weights of norm 1."""
    learner, given = trained(steps=1)
    actor, critics, target = learner.actor.body.layers, learner.critics.layers, learner.target.layers
    before = [copy.deepcopy(layers.statistics) for layers in (actor, critics, target)]
    noise = torch.randn(SIZE, 2)
    found = learner.value_loss(given, noise)[-1]
    learner.policy_loss(given, noise)
    assert all(map(torch.equal, before, (layers.statistics for layers in (actor, critics, target))))
    learner.normals = lambda *shape: noise
    learner.gradient_step(given)
    torch.testing.assert_close(critics.statistics, (before[1] + found) / 2)  # the mean of two batches
    assert not torch.equal(actor.statistics, before[0])
    assert torch.equal(target.statistics, before[2])
    for layers in (actor, critics):
        for weight in layers.weights:
            torch.testing.assert_close(weight.norm(dim=1), torch.ones(weight.shape[0], weight.shape[2]))


def test_running_statistics_forget():
    layers = BatchNormLayers(1, 2, (3,), nn.ReLU())
    found = torch.full_like(layers.statistics, 4.0)
    good = torch.tensor(True)
    layers.settle(found, good)
    torch.testing.assert_close(layers.statistics, found)
    layers.batches.fill_(10_000.0)
    layers.settle(found + 1.0, good)
    torch.testing.assert_close(layers.statistics, found + 0.01)
    layers.settle(found * torch.nan, ~good)
    torch.testing.assert_close(layers.statistics, found + 0.01)
    assert int(layers.batches) == 10_001


def test_the_scale_of_weights_does_not_matter():
    layers = BatchNormLayers(2, 4, (6, 5), nn.ReLU())
    x = torch.randn(2, 30, 4)
    expected, _ = layers.by_batch(x)
    with torch.no_grad():
        layers.weights[0].mul_(100.0)
    torch.testing.assert_close(layers.by_batch(x)[0], expected, atol=1e-3, rtol=1e-3)
    layers.project()
    torch.testing.assert_close(layers.by_batch(x)[0], expected)


@pytest.mark.parametrize("kind", ["vector", "encoded"])
def test_folding_gives_a_plain_body_with_the_same_features(kind):
    space = spaces.Box(-1, 1, (4,))

    def encoder():
        layer = nn.Linear(4, 3)
        layer.num_features = 3
        return layer

    body = BatchNormBody((lambda: VectorBody(space, (6, 5), "tanh", False)) if kind == "vector" else encoder)
    for _ in range(3):
        body.layers.settle(body.by_batch(2.0 + 3.0 * torch.randn(20, 4))[1], torch.tensor(True))
    with torch.no_grad():
        body.layers.scale.uniform_(0.5, 2.0)
        body.layers.bias.normal_()
    plain, obs = body.folded(), torch.randn(50, 4)
    torch.testing.assert_close(plain(obs), body(obs), atol=1e-5, rtol=1e-4)
    assert isinstance(plain, VectorBody if kind == "vector" else nn.Sequential)
    assert not any(isinstance(module, BatchNormLayers) for module in plain.modules())


def test_rewards_are_scaled_when_they_are_drawn():
    learner, given = trained(steps=0)
    learner.scale.value.fill_(4.0)
    torch.testing.assert_close(learner.prepared(given).rewards, given.rewards / 4.0)
    saved = learner.state_dict()
    fresh, _ = trained(steps=0)
    fresh.load_state_dict(saved)
    assert float(fresh.scale.value) == 4.0


def test_the_actor_waits_for_policy_every():
    learner, given = trained(steps=0, policy_every=2)
    before = copy.deepcopy(learner.actor.state_dict())
    learner.gradient_steps = 1
    numbers = learner.gradient_step(given)[1]
    assert numbers.isnan().tolist() == [False] * 3 + [True] * 3
    assert all(torch.equal(before[name], part) for name, part in learner.actor.state_dict().items())
    learner.gradient_steps = 2
    assert learner.gradient_step(given)[1].isfinite().all()
    assert not torch.equal(before["last.weight"], learner.actor.last.weight)


def test_rewards_that_are_normalized_already_are_refused():
    algorithm = find_algorithm("xqc")
    learner, _ = trained(steps=0)
    with pytest.raises(HurtleError, match="reward_mode='raw' or 'sign'"):
        algorithm.make_learner("general", learner.policy, learner.config, LearnerSetup(rewards=RewardRule("normalize")))
