"""Our distributions against torch's, against closed forms, and against the uniforms they sample from."""

import math

import numpy as np
import pytest
import torch
from torch import distributions as td

from hurtle.errors import HurtleError
from hurtle.native.rng import rng_normal
from hurtle.policies.distributions import (
    GAMMA_TRIES,
    Beta,
    Categorical,
    Gaussian,
    MultiCategorical,
    SquashedGaussian,
    TorchDistribution,
    adapted,
    masked,
)

LARGEST_UNIFORM = 1.0 - 2.0**-24
NVEC = (3, 2, 5)


def uniforms(rows, count, seed=0):
    """As the kernel draws them: multiples of 2^-24 in [0, 1)."""
    bits = np.random.default_rng(seed).integers(0, 1 << 24, (rows, count))
    return torch.from_numpy((bits * 2.0**-24).astype(np.float32))


def parameters(*shape, scale=1.0):
    return (scale * torch.randn(*shape, dtype=torch.float64)).requires_grad_()


def multi(logits):
    """The reference for MultiCategorical: one torch Categorical per component."""
    return [td.Categorical(logits=part) for part in logits.split(NVEC, -1)]


def cases():
    """Ours, torch's log-prob and entropy, the parameters that gradients are taken for, and some actions."""
    torch.manual_seed(1)
    logits = parameters(6, 4, scale=3.0)
    actions = torch.tensor([0, 1, 2, 3, 0, 2])
    theirs = td.Categorical(logits=logits)
    yield "categorical", Categorical(logits), theirs.log_prob(actions), theirs.entropy(), [logits], actions
    logits = parameters(6, sum(NVEC), scale=2.0)
    actions = torch.stack([torch.randint(n, (6,)) for n in NVEC], 1)
    parts = multi(logits)
    log_prob = sum(part.log_prob(actions[:, i]) for i, part in enumerate(parts))
    yield "multi", MultiCategorical(logits, NVEC), log_prob, sum(part.entropy() for part in parts), [logits], actions
    mean, actions = parameters(6, 3), torch.randn(6, 3, dtype=torch.float64)
    for name, log_std in (("gaussian", parameters(3)), ("gaussian_per_row", parameters(6, 3))):
        theirs = td.Independent(td.Normal(mean, log_std.exp().expand(6, 3)), 1)
        yield name, Gaussian(mean, log_std), theirs.log_prob(actions), theirs.entropy(), [mean, log_std], actions
    alpha, beta = (parameters(6, 2).exp() + 1.0 for _ in range(2))
    alpha, beta = alpha.detach().requires_grad_(), beta.detach().requires_grad_()
    theirs, actions = td.Independent(td.Beta(alpha, beta), 1), 0.02 + 0.96 * torch.rand(6, 2, dtype=torch.float64)
    yield "beta", Beta(alpha, beta), theirs.log_prob(actions), theirs.entropy(), [alpha, beta], actions


CASES = {name: rest for name, *rest in cases()}


@pytest.mark.parametrize("name", CASES)
def test_log_prob_and_entropy_and_their_gradients_are_those_of_torch(name):
    ours, log_prob, entropy, leaves, actions = CASES[name]
    weights = torch.linspace(-1.0, 2.0, 6, dtype=torch.float64)

    def gradients(quantity):
        return torch.autograd.grad((weights * quantity).sum(), leaves, retain_graph=True, materialize_grads=True)

    for mine, theirs in ((ours.log_prob(actions), log_prob), (ours.entropy(), entropy)):
        assert mine.shape == (6,)
        torch.testing.assert_close(mine, theirs, atol=1e-9, rtol=0)
        for my_grad, grad in zip(gradients(mine), gradients(theirs), strict=True):
            torch.testing.assert_close(my_grad, grad, atol=1e-6, rtol=0)


def test_half_precision_parameters_are_computed_in_float32():
    logits = torch.randn(4, 3)
    assert Categorical(logits.bfloat16()).log_probs.dtype == torch.float32
    assert Gaussian(logits.bfloat16(), torch.zeros(3)).log_prob(logits).dtype == torch.float32


# sampling


def test_categorical_samples_as_often_as_it_says():
    probs = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05])
    count = 40_000
    samples = Categorical(probs.log().expand(count, 5)).sample(uniforms(count, 1))
    assert samples.dtype == torch.int64
    assert samples.shape == (count,)
    found = torch.bincount(samples, minlength=5)
    assert found[1] == 0
    expected = count * probs[probs > 0]
    chi_square = ((found[probs > 0] - expected) ** 2 / expected).sum().item()
    assert chi_square < 16.3  # 0.1 % of such samples have a larger one, with 3 degrees of freedom


def test_categorical_is_the_inverse_of_the_cumulative_probabilities():
    logits = torch.tensor([[0.2, 0.5, 0.3]]).log().expand(5, 3)
    samples = Categorical(logits).sample(torch.tensor([[0.0], [0.19], [0.21], [0.69], [0.71]]))
    assert samples.tolist() == [0, 0, 1, 1, 2]


@pytest.mark.parametrize("uniform", [0.0, LARGEST_UNIFORM])
def test_what_is_masked_or_impossible_is_never_sampled(uniform):
    generator = np.random.default_rng(0)
    mask = torch.from_numpy(generator.random((4000, 7)) < 0.4)
    mask[:, 3] |= ~mask.any(1)
    logits = torch.from_numpy(generator.normal(0.0, 8.0, (4000, 7)).astype(np.float32))
    given = torch.full((4000, 1), uniform)
    for distribution in (masked(Categorical(logits), mask), Categorical(logits.masked_fill(~mask, -torch.inf))):
        samples = distribution.sample(given)
        assert mask.gather(1, samples.unsqueeze(1)).all()
        assert (distribution.log_prob(samples) > -100).all()
    two_choices = MultiCategorical(torch.cat([logits, logits[:, :2]], 1), (7, 2))
    several = masked(two_choices, torch.cat([mask, mask[:, 3:4], ~mask[:, 3:4]], 1))
    samples = several.sample(given.expand(-1, 2))
    assert mask.gather(1, samples[:, :1]).all()
    assert torch.equal(samples[:, 1] == 0, mask[:, 3])


def test_components_are_sampled_by_their_own_uniforms():
    logits = torch.randn(50, sum(NVEC))
    given = uniforms(50, 3)
    distribution = MultiCategorical(logits, NVEC)
    samples = distribution.sample(given)
    parts = logits.split(NVEC, 1)
    for i, part in enumerate(parts):
        assert torch.equal(samples[:, i], Categorical(part).sample(given[:, i : i + 1]))
    assert torch.equal(distribution.mode(), torch.stack([part.argmax(1) for part in parts], 1))
    assert distribution.num_uniforms == 3


def test_equal_components_need_no_padding_and_give_the_same():
    logits = torch.randn(8, 6)
    distribution, actions = MultiCategorical(logits, (3, 3)), torch.randint(3, (8, 2))
    by_hand = sum(td.Categorical(logits=part).log_prob(actions[:, i]) for i, part in enumerate(logits.split(3, 1)))
    torch.testing.assert_close(distribution.log_prob(actions), by_hand)


def test_gaussian_samples_are_those_of_the_native_generator():
    given = uniforms(3, 4)
    samples = Gaussian(torch.tensor([[1.0, -2.0]] * 3), torch.tensor([0.0, math.log(3.0)])).sample(given)
    for row in range(3):
        for d, (mean, std) in enumerate(((1.0, 1.0), (-2.0, 3.0))):
            expected = reference_normal(given[row, 2 * d : 2 * d + 2].tolist(), mean, std)
            assert samples[row, d].item() == pytest.approx(expected, abs=2e-6)


def reference_normal(pair, mean, std):
    """`rng_normal` fed with two given uniforms in place of its stream."""
    numbers = iter(pair)
    original = rng_normal.__globals__["rng_random"]
    rng_normal.__globals__["rng_random"] = lambda rng: np.float32(next(numbers))
    try:
        return float(rng_normal(None, mean, std))
    finally:
        rng_normal.__globals__["rng_random"] = original


def test_gaussian_samples_have_its_mean_and_variance():
    count = 60_000
    given = uniforms(count, 4)
    samples = Gaussian(torch.tensor([2.0, -1.0]).expand(count, 2), torch.tensor([0.5, -1.0])).sample(given)
    std = torch.tensor([0.5, -1.0]).exp()
    assert torch.isfinite(samples).all()
    assert ((samples.mean(0) - torch.tensor([2.0, -1.0])).abs() < 4 * std / math.sqrt(count)).all()
    assert ((samples.var(0) / std.square() - 1.0).abs() < 4 * math.sqrt(2.0 / count)).all()
    kurtosis = (((samples - samples.mean(0)) / std) ** 4).mean(0)
    assert ((kurtosis - 3.0).abs() < 4 * math.sqrt(96.0 / count)).all()
    assert abs(torch.corrcoef(samples.T)[0, 1]) < 4 / math.sqrt(count)
    edges = Gaussian(torch.zeros(2, 1), torch.zeros(1)).sample(torch.tensor([[0.0, 0.0], [LARGEST_UNIFORM, 0.0]]))
    assert edges.flatten().tolist() == pytest.approx([0.0, math.sqrt(2.0 * 24.0 * math.log(2.0))])


@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (1.5, 4.0), (30.0, 2.0), (500.0, 700.0)])
def test_beta_samples_have_its_mean_and_variance(alpha, beta):
    count = 20_000
    distribution = Beta(torch.full((count, 1), alpha), torch.full((count, 1), beta))
    assert distribution.num_uniforms == 2 * GAMMA_TRIES * 3
    samples = distribution.sample(uniforms(count, distribution.num_uniforms))
    theirs = td.Beta(torch.tensor(alpha, dtype=torch.float64), torch.tensor(beta, dtype=torch.float64))
    assert ((samples > 0.0) & (samples < 1.0)).all()
    assert abs(samples.mean() - theirs.mean) < 4 * theirs.stddev / math.sqrt(count)
    # the variance of a sample variance is at most 2 / n of the normal's for these shapes
    assert abs(samples.var() / theirs.variance - 1.0) < 5 * math.sqrt(2.0 / count)
    if alpha == beta == 1.0:  # uniform: ten bins of equal size
        found = torch.histc(samples, 10, 0.0, 1.0)
        assert ((found - count / 10) ** 2 / (count / 10)).sum() < 27.9  # 0.1 %, 9 degrees of freedom


@pytest.mark.parametrize("uniform", [0.0, LARGEST_UNIFORM])
def test_beta_samples_stay_inside_at_the_edges(uniform):
    distribution = Beta(torch.tensor([[1.0, 50.0]]), torch.tensor([[1.0, 1.0]]))
    sample = distribution.sample(torch.full((1, distribution.num_uniforms), uniform))
    assert ((sample > 0) & (sample < 1)).all()
    assert torch.isfinite(distribution.log_prob(sample)).all()


def test_modes():
    assert Categorical(torch.tensor([[0.0, 2.0, 1.0]])).mode().tolist() == [1]
    mean = torch.randn(3, 2)
    assert torch.equal(Gaussian(mean, torch.zeros(2)).mode(), mean)
    assert torch.equal(SquashedGaussian(mean, torch.zeros(2)).mode(), mean)
    mean = Beta(torch.tensor([[3.0, 1.0, 1.0, 1e9]]), torch.tensor([[2.0, 1.0, 9.0, 1.0]])).mode()
    assert mean[0, :3].tolist() == pytest.approx([0.6, 0.5, 0.1])
    assert 0.99999 < mean[0, 3] < 1.0


# the squashed Gaussian


def test_squashed_density_is_that_of_torchs_transform():
    mean, log_std = parameters(5, 2), parameters(2)
    raw = torch.randn(5, 2, dtype=torch.float64)
    normal = td.Independent(td.Normal(mean, log_std.exp().expand(5, 2)), 1)
    theirs = td.TransformedDistribution(normal, td.TanhTransform(cache_size=1)).log_prob(raw.tanh())
    mine = SquashedGaussian(mean, log_std).log_prob(raw)
    torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=0)
    for my_grad, grad in zip(*(torch.autograd.grad(x.sum(), [mean, log_std]) for x in (mine, theirs)), strict=True):
        torch.testing.assert_close(my_grad, grad, atol=1e-6, rtol=0)


def test_squashed_density_is_stable_far_out():
    raw = torch.tensor([[-20.0], [-9.0], [9.0], [20.0]])
    distribution = SquashedGaussian(torch.zeros(4, 1, requires_grad=True), torch.full((1,), 2.0))
    exact = raw.double()
    slope = 2.0 * (math.log(2.0) - exact.abs() - torch.log1p((-2.0 * exact.abs()).exp()))  # log of 1 / cosh(u)^2
    expected = td.Normal(0.0, math.exp(2.0)).log_prob(exact) - slope
    torch.testing.assert_close(distribution.log_prob(raw).double(), expected.squeeze(1), atol=1e-4, rtol=0)
    assert torch.isfinite(torch.autograd.grad(distribution.log_prob(raw).sum(), distribution.mean)[0]).all()


@pytest.mark.parametrize(("mean", "std", "error"), [(0.0, 0.1, 1e-6), (0.0, 1.0, 1e-4), (2.0, 1.0, 1e-4), (-1.0, 3.0, 1e-2)])
def test_squashed_entropy_is_the_integral_of_the_density(mean, std, error):
    u = torch.linspace(mean - 12 * std, mean + 12 * std, 40_001, dtype=torch.float64)
    log_normal = td.Normal(mean, std).log_prob(u)
    slope = 2.0 * (math.log(2.0) - u.abs() - torch.log1p((-2.0 * u.abs()).exp()))
    expected = -torch.trapezoid(log_normal.exp() * (log_normal - slope), u)
    log_std = torch.tensor([math.log(std)] * 2, dtype=torch.float64)
    entropy = SquashedGaussian(torch.full((1, 2), mean, dtype=torch.float64), log_std).entropy()
    assert entropy.item() == pytest.approx(2 * expected.item(), abs=2 * error)


def test_squashed_entropy_trains_after_a_rollout_without_gradients():
    mean = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
    with torch.inference_mode():
        SquashedGaussian(mean.detach(), torch.zeros(1)).entropy()
    assert torch.autograd.grad(SquashedGaussian(mean + 1.0, torch.zeros(1)).entropy().sum(), mean)[0] < 0


# masks


def test_masking_is_renormalizing_over_what_is_legal():
    logits = parameters(3, 4)
    mask = torch.tensor([[True, False, True, True], [False, False, True, False], [True, True, True, True]])
    distribution = masked(Categorical(logits), mask)
    theirs = td.Categorical(logits=logits.masked_fill(~mask, -1e30))
    actions = torch.tensor([3, 2, 1])
    torch.testing.assert_close(distribution.log_prob(actions), theirs.log_prob(actions))
    torch.testing.assert_close(distribution.entropy(), theirs.entropy())
    total = (distribution.log_prob(actions) + 100.0 * distribution.entropy()).sum()
    (grad,) = torch.autograd.grad(total, logits)
    assert torch.isfinite(grad).all()
    assert (grad[~mask] == 0).all()
    assert mask.gather(1, distribution.mode().unsqueeze(1)).all()


def test_masks_of_several_choices():
    logits = torch.randn(6, sum(NVEC))
    mask = torch.rand(6, sum(NVEC)) < 0.5
    mask[:, [0, 3, 5]] = True
    distribution, actions = masked(MultiCategorical(logits, NVEC), mask), torch.zeros(6, 3, dtype=torch.int64)
    parts = multi(logits.masked_fill(~mask, -1e30))
    torch.testing.assert_close(distribution.log_prob(actions), sum(part.log_prob(actions[:, 0]) for part in parts))
    torch.testing.assert_close(distribution.entropy(), sum(part.entropy() for part in parts))


def test_a_row_without_a_legal_action_is_uniform():
    logits = torch.tensor([[5.0, -5.0, 0.0]], requires_grad=True)
    distribution = masked(Categorical(logits), torch.zeros(1, 3, dtype=torch.bool))
    torch.testing.assert_close(distribution.log_probs.exp(), torch.full((1, 3), 1 / 3))
    assert distribution.entropy().item() == pytest.approx(math.log(3.0))
    assert torch.autograd.grad(distribution.entropy().sum(), logits)[0].tolist() == [[0.0, 0.0, 0.0]]


def test_a_choice_without_a_legal_option_is_uniform_over_its_own_options():
    mask = torch.ones(1, sum(NVEC), dtype=torch.bool)
    mask[0, 3:5] = False  # the second choice has only two options; the third has five
    distribution = masked(MultiCategorical(torch.zeros(1, sum(NVEC), requires_grad=True), NVEC), mask)
    assert distribution.entropy().item() == pytest.approx(sum(math.log(n) for n in NVEC))
    assert distribution.sample(torch.full((1, 3), LARGEST_UNIFORM)).tolist() == [[2, 1, 4]]


def test_continuous_actions_take_no_mask():
    with pytest.raises(HurtleError, match=r"needs a Categorical or MultiCategorical distribution, got a Gaussian"):
        masked(Gaussian(torch.zeros(1, 2), torch.zeros(2)), torch.ones(1, 2, dtype=torch.bool))


# torch's distributions


def test_torchs_distributions_become_ours():
    logits = torch.randn(5, 3)
    given = uniforms(5, 8)
    ours = adapted(td.Categorical(logits=logits))
    assert torch.equal(ours.sample(given[:, :1]), Categorical(logits).sample(given[:, :1]))
    normal = td.Normal(logits, torch.tensor([0.5, 1.0, 2.0]))
    for distribution in (normal, td.Independent(normal, 1)):
        ours = adapted(distribution)
        assert type(ours) is Gaussian
        torch.testing.assert_close(ours.log_prob(logits + 1.0), normal.log_prob(logits + 1.0).sum(1))
        torch.testing.assert_close(ours.entropy(), normal.entropy().sum(1))
    matrix = adapted(td.Normal(torch.zeros(5, 2, 2), torch.ones(2, 2)))
    assert matrix.sample(given).shape == (5, 4)
    several = adapted(td.Independent(td.Categorical(logits=torch.randn(5, 4, 3)), 1))
    assert several.nvec == (3, 3, 3, 3)
    bits = td.Bernoulli(logits=logits)
    ours, actions = adapted(bits), torch.randint(2, (5, 3))
    torch.testing.assert_close(ours.log_prob(actions), bits.log_prob(actions.float()).sum(1))
    assert adapted(ours) is ours


def test_other_distributions_sample_by_themselves():
    theirs = td.Gamma(torch.full((4, 2, 3), 2.0), torch.ones(2, 3))
    ours = adapted(theirs)
    assert type(ours) is TorchDistribution
    assert ours.num_uniforms == 0
    torch.manual_seed(3)
    actions = ours.sample(torch.empty(4, 0))
    torch.manual_seed(3)
    assert torch.equal(actions, theirs.sample().flatten(1))
    torch.testing.assert_close(ours.log_prob(actions), theirs.log_prob(actions.view(4, 2, 3)).sum((1, 2)))
    torch.testing.assert_close(ours.entropy(), theirs.entropy().sum((1, 2)))
    assert ours.mode().shape == (4, 6)


# log-probabilities side by side


@pytest.mark.parametrize("nvec", [(4,), NVEC, (2, 2, 2), (1, 3)])
def test_flat_log_probs_are_those_of_each_choice(nvec):
    logits = 2.0 * torch.randn(6, sum(nvec))
    ours = Categorical(logits) if len(nvec) == 1 else MultiCategorical(logits, nvec)
    flat = ours.flat_log_probs()
    assert flat.shape == logits.shape
    expected = torch.cat([td.Categorical(logits=part).logits for part in logits.split(nvec, -1)], 1)
    torch.testing.assert_close(flat, expected)
    choices = torch.stack([torch.randint(n, (6,)) for n in nvec], 1)
    first = torch.tensor([0, *nvec[:-1]]).cumsum(0)
    log_prob = ours.log_prob(choices if len(nvec) > 1 else choices[:, 0])
    torch.testing.assert_close(flat.gather(1, choices + first).sum(1), log_prob)


def test_flat_log_probs_of_what_is_masked():
    mask = torch.rand(6, sum(NVEC)) < 0.6
    mask[:, [0, 3, 5]] = True
    logits = torch.randn(6, sum(NVEC))
    flat = masked(MultiCategorical(logits, NVEC), mask).flat_log_probs()
    assert torch.equal(flat.exp() > 0, mask)
    torch.testing.assert_close(torch.stack([part.exp().sum(1) for part in flat.split(NVEC, 1)]), torch.ones(3, 6))
