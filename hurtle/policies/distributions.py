"""Batched action distributions: uniforms in, raw actions out, so that every gear samples the same.

network outputs → Distribution → sample, mode, log_prob, entropy. A raw action is what `log_prob` takes; `ActionHead` turns it
into the env's. Constructed on every step, so constructors check nothing. Knows nothing of spaces.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor
from torch import distributions as td
from torch.nn.functional import softplus

from hurtle.errors import HurtleError

GAMMA_TRIES = 8
"""Attempts of Marsaglia and Tsang's method per Gamma; each is accepted with probability >= 95 % and needs three uniforms."""
HERMITE_NODES = 32
_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


class Distribution(ABC):
    """A distribution over the actions of a batch of rows [B].

    Attributes:
        num_uniforms: Uniforms that `sample` needs per row.
    """

    num_uniforms: int

    @abstractmethod
    def sample(self, uniforms: Tensor) -> Tensor:
        """Raw actions [B, ...], a function only of uniforms in [0, 1), float32 [B, num_uniforms]."""

    @abstractmethod
    def mode(self) -> Tensor:
        """The raw actions [B, ...] of a deterministic policy."""

    @abstractmethod
    def log_prob(self, actions: Tensor) -> Tensor:
        """Log-probabilities (densities) [B] of raw actions."""

    @abstractmethod
    def entropy(self) -> Tensor:
        """Entropies [B]."""


class Categorical(Distribution):
    """One of n choices; raw actions int64 [B].

    Args:
        logits: Unnormalized log-probabilities, [B, n].

    Example:
        >>> distribution = Categorical(torch.tensor([[0.0, 0.0], [0.0, 1.0986]]))
        >>> distribution.sample(torch.tensor([[0.4], [0.4]])), distribution.entropy()
        (tensor([0, 1]), tensor([0.6931, 0.5623]))
    """

    num_uniforms = 1

    def __init__(self, logits: Tensor):
        self.log_probs = _full_precision(logits).log_softmax(-1)

    def flat_log_probs(self) -> Tensor:
        """Log-probabilities of all choices, [B, n]."""
        return self.log_probs

    def sample(self, uniforms: Tensor) -> Tensor:
        """The first choice whose cumulative probability exceeds the uniform."""
        return _inverse_cdf(self.log_probs, uniforms)

    def mode(self) -> Tensor:
        """The likeliest choice."""
        return self.log_probs.argmax(-1)

    def log_prob(self, actions: Tensor) -> Tensor:
        """Log-probabilities [B]."""
        return self.log_probs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Tensor:
        """Entropies [B]."""
        return _entropy(self.log_probs)


class EpsilonGreedy(Categorical):
    """The action of highest value, or, with probability ε, any legal action; raw actions int64 [B].

    Args:
        action_values: Q of every action, [B, n].
        epsilon: Share of random actions; a tensor may change between calls.
        legal: Legal actions, bool [B, n]; None: all. If none is legal, all count as legal.

    Example:
        >>> greedy = EpsilonGreedy(torch.tensor([[1.0, 3.0]]), epsilon=0.5)
        >>> greedy.mode(), greedy.sample(torch.tensor([[0.2]])), greedy.log_probs.exp()
        (tensor([1]), tensor([0]), tensor([[0.2500, 0.7500]]))
    """

    def __init__(self, action_values: Tensor, epsilon: Tensor | float, legal: Tensor | None = None):
        self.action_values, self.epsilon = _full_precision(action_values), epsilon
        self.legal = None if legal is None else legal | ~legal.any(-1, keepdim=True)

    @cached_property
    def log_probs(self) -> Tensor:  # type: ignore[override]
        """Log-probabilities of all choices, [B, n]; computed where they are needed."""
        values, legal = self.action_values, self.legal
        share = torch.ones_like(values) if legal is None else legal.float()
        share = share * (self.epsilon / share.sum(-1, keepdim=True))
        best = torch.zeros_like(values).scatter_(-1, self.mode().unsqueeze(-1), 1.0)
        return (share + best * (1.0 - self.epsilon)).log()

    def mode(self) -> Tensor:
        """The legal action of highest value."""
        return (self.action_values if self.legal is None else _legal(self.action_values, self.legal)).argmax(-1)


class MultiCategorical(Distribution):
    """Several independent choices; raw actions int64 [B, k].

    Args:
        logits: Those of all choices, concatenated, [B, sum(nvec)].
        nvec: Number of options of each choice, k ints.
    """

    def __init__(self, logits: Tensor, nvec: tuple[int, ...]):
        logits = _full_precision(logits)
        self.nvec = nvec
        self.num_uniforms = len(nvec)
        if len(set(nvec)) > 1:  # choices of different sizes are padded with options of probability 0
            impossible = logits.new_full((logits.shape[0], 1), -torch.inf)  # below illegal options, in case all are illegal
            logits = torch.cat([logits, impossible], 1)[:, _padded_places(nvec, logits.device)]
        self.log_probs = logits.unflatten(1, (len(nvec), max(nvec))).log_softmax(-1)  # [B, k, max(nvec)]

    def flat_log_probs(self) -> Tensor:
        """Log-probabilities of all choices, concatenated, [B, sum(nvec)]."""
        flat = self.log_probs.flatten(1)
        return flat[:, _real_places(self.nvec, flat.device)] if len(set(self.nvec)) > 1 else flat

    def sample(self, uniforms: Tensor) -> Tensor:
        """Each choice from its own uniform."""
        return _inverse_cdf(self.log_probs, uniforms.unsqueeze(-1))

    def mode(self) -> Tensor:
        """The likeliest option of each choice."""
        return self.log_probs.argmax(-1)

    def log_prob(self, actions: Tensor) -> Tensor:
        """Log-probabilities [B]: the sum over the choices."""
        return self.log_probs.gather(-1, actions.unsqueeze(-1)).squeeze(-1).sum(-1)

    def entropy(self) -> Tensor:
        """Entropies [B]: the sum over the choices."""
        return _entropy(self.log_probs).sum(-1)


class Gaussian(Distribution):
    """Independent normals; raw actions float32 [B, D], unbounded.

    Args:
        mean: [B, D].
        log_std: Log of the standard deviations, [D] or [B, D].
    """

    def __init__(self, mean: Tensor, log_std: Tensor):
        self.mean, self.log_std = _full_precision(mean), _full_precision(log_std)
        self.num_uniforms = 2 * mean.shape[-1]

    def sample(self, uniforms: Tensor) -> Tensor:
        """Box-Muller: uniforms 2d and 2d + 1 give dimension d."""
        return self.mean + self.log_std.exp() * _normals(uniforms.unflatten(1, (-1, 2)))

    def mode(self) -> Tensor:
        """The mean."""
        return self.mean

    def log_prob(self, actions: Tensor) -> Tensor:
        """Log-densities [B]: the sum over the dimensions."""
        deviations = (actions - self.mean) * (-self.log_std).exp()
        return (-0.5 * deviations.square() - self.log_std - _HALF_LOG_2PI).sum(-1)

    def entropy(self) -> Tensor:
        """Entropies [B]."""
        return (self.log_std + (0.5 + _HALF_LOG_2PI)).expand_as(self.mean).sum(-1)


class SquashedGaussian(Gaussian):
    """tanh of independent normals; raw actions are taken before the tanh, where the density stays finite: float32 [B, D].

    `log_prob` is the density of tanh(raw) in (-1, 1). The entropy has no closed form: the tanh term is computed by
    Gauss-Hermite quadrature, accurate to 0.01 up to a standard deviation of 3, and, unlike an estimate from samples, a smooth
    function of mean and log_std.
    """

    def log_prob(self, actions: Tensor) -> Tensor:
        """Log-densities [B] of tanh(actions)."""
        return super().log_prob(actions) - _log_tanh_slope(actions).sum(-1)

    def entropy(self) -> Tensor:
        """Entropies [B] of the squashed actions."""
        nodes, weights = _hermite(self.mean.dtype, self.mean.device)
        points = self.mean.unsqueeze(-1) + self.log_std.exp().unsqueeze(-1) * nodes  # [B, D, nodes]
        return super().entropy() + (_log_tanh_slope(points) @ weights).sum(-1)


class ExploringTanh(SquashedGaussian):
    """What off-policy actors sample from: tanh actions with noise before or after the tanh, or uniform ones at first.

    Args:
        mean: [B, D].
        log_std: Log of the noise's standard deviations, [D] or [B, D].
        random: 1 makes all actions uniform, 0 none; a tensor may change between calls. []
        noise_after: Add the noise to tanh(mean) and clip; `log_prob` means nothing then.
    """

    _EDGE = 1.0 - 1e-6  # raw actions stay finite

    def __init__(self, mean: Tensor, log_std: Tensor, random: Tensor, noise_after: bool = False):
        super().__init__(mean, log_std)
        self.random, self.noise_after = random, noise_after

    def sample(self, uniforms: Tensor) -> Tensor:
        """Uniforms 2d and 2d + 1 give dimension d."""
        pairs = uniforms.unflatten(1, (-1, 2))
        noise = self.log_std.exp() * _normals(pairs)
        raw = self.mean + noise
        if self.noise_after:
            raw = (self.mean.tanh() + noise).clamp(-self._EDGE, self._EDGE).atanh()
        return torch.where(self.random > 0, ((2.0 * pairs[..., 0] - 1.0) * self._EDGE).atanh(), raw)


class Beta(Distribution):
    """Independent Betas; raw actions float32 [B, D] in (0, 1), so that nothing is lost at the bounds of an action space.

    Args:
        alpha: [B, D], at least 1.
        beta: [B, D], at least 1.
    """

    _EDGE = 1e-6  # samples stay this far from 0 and 1, where the density may be 0

    def __init__(self, alpha: Tensor, beta: Tensor):
        self.alpha, self.beta = _full_precision(alpha), _full_precision(beta)
        self.num_uniforms = alpha.shape[-1] * 2 * GAMMA_TRIES * 3

    def sample(self, uniforms: Tensor) -> Tensor:
        """X / (X + Y) of two Gammas; uniforms are [dimension, Gamma, attempt, 3]."""
        uniforms = uniforms.unflatten(1, (-1, 2, GAMMA_TRIES, 3))
        x, y = _gamma(torch.stack([self.alpha, self.beta], -1), uniforms).unbind(-1)
        return (x / (x + y)).clamp(self._EDGE, 1.0 - self._EDGE)

    def mode(self) -> Tensor:
        """The mean: the true mode is 0 / 0 for a uniform Beta, and rounding noise for a nearly uniform one."""
        return (self.alpha / (self.alpha + self.beta)).clamp(self._EDGE, 1.0 - self._EDGE)

    def log_prob(self, actions: Tensor) -> Tensor:
        """Log-densities [B]: the sum over the dimensions."""
        powers = (self.alpha - 1.0) * actions.log() + (self.beta - 1.0) * (-actions).log1p()
        return (powers - self._log_norm()).sum(-1)

    def entropy(self) -> Tensor:
        """Entropies [B]."""
        total = self.alpha + self.beta
        terms = (total - 2.0) * total.digamma()
        terms = terms - (self.alpha - 1.0) * self.alpha.digamma() - (self.beta - 1.0) * self.beta.digamma()
        return (self._log_norm() + terms).sum(-1)

    def _log_norm(self) -> Tensor:
        return self.alpha.lgamma() + self.beta.lgamma() - (self.alpha + self.beta).lgamma()


class TorchDistribution(Distribution):
    """Any other `torch.distributions.Distribution`; samples with torch's global generator. Made by `adapted`."""

    num_uniforms = 0

    def __init__(self, distribution: td.Distribution):
        self.distribution = distribution
        self._shape = distribution.batch_shape + distribution.event_shape  # [B, ...]

    def sample(self, uniforms: Tensor) -> Tensor:
        """Raw actions [B] or [B, D] from torch's generator; the uniforms are not used."""
        return self._flat(self.distribution.sample())

    def mode(self) -> Tensor:
        """The mode, or the mean where torch has no mode."""
        try:
            return self._flat(self.distribution.mode)
        except NotImplementedError:
            return self._flat(self.distribution.mean)

    def log_prob(self, actions: Tensor) -> Tensor:
        """Log-probabilities [B], summed over the parts of an action."""
        return self._sum(self.distribution.log_prob(actions.reshape(self._shape)))

    def entropy(self) -> Tensor:
        """Entropies [B], summed over the parts of an action."""
        return self._sum(self.distribution.entropy())

    @staticmethod
    def _flat(actions: Tensor) -> Tensor:
        return actions.flatten(1) if actions.ndim > 1 else actions

    @staticmethod
    def _sum(quantity: Tensor) -> Tensor:
        return quantity.flatten(1).sum(1) if quantity.ndim > 1 else quantity


def adapted(distribution: Distribution | td.Distribution) -> Distribution:
    """A user's distribution as one of ours: torch's that have a counterpart here then sample from uniforms.

    Example:
        >>> type(adapted(td.Normal(torch.zeros(2, 3), 1.0))).__name__
        'Gaussian'
    """
    if isinstance(distribution, Distribution):
        return distribution
    inner = distribution
    while isinstance(inner, td.Independent):
        inner = inner.base_dist
    if type(inner) is td.Categorical:
        if inner.logits.ndim == 2:
            return Categorical(inner.logits)
        choices, options = math.prod(inner.logits.shape[1:-1]), inner.logits.shape[-1]
        return MultiCategorical(inner.logits.flatten(1), (options,) * choices)
    if type(inner) is td.Bernoulli and inner.logits.ndim > 1:
        logits = inner.logits.flatten(1)
        return MultiCategorical(torch.stack([torch.zeros_like(logits), logits], -1).flatten(1), (2,) * logits.shape[1])
    if type(inner) is td.Normal and inner.loc.ndim > 1:
        return Gaussian(inner.loc.flatten(1), inner.scale.log().flatten(1))
    return TorchDistribution(distribution)


def masked(distribution: Distribution, mask: Tensor) -> Distribution:
    """The distribution without its illegal actions; if no action is legal, all are equally likely.

    Args:
        distribution: A Categorical or MultiCategorical.
        mask: bool [B, n] or [B, sum(nvec)]; True is legal.

    Example:
        >>> masked(Categorical(torch.zeros(1, 3)), torch.tensor([[True, False, True]])).log_probs.exp()
        tensor([[0.5000, 0.0000, 0.5000]])
    """
    if isinstance(distribution, EpsilonGreedy):
        return EpsilonGreedy(distribution.action_values, distribution.epsilon, mask.bool())
    if isinstance(distribution, Categorical):
        return Categorical(_legal(distribution.log_probs, mask))
    if isinstance(distribution, MultiCategorical):
        return MultiCategorical(_legal(distribution.flat_log_probs(), mask), distribution.nvec)
    raise HurtleError(
        f"An action mask needs a Categorical or MultiCategorical distribution, got a {type(distribution).__name__}."
    )


def _full_precision(values: Tensor) -> Tensor:
    """At least float32: under autocast, outputs may be half-precision."""
    return values if values.dtype.itemsize >= 4 else values.float()


def _legal(logits: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask.bool(), logits, torch.finfo(logits.dtype).min)


def _inverse_cdf(log_probs: Tensor, uniforms: Tensor) -> Tensor:
    """Choices [...] from log-probabilities [..., n] and uniforms [..., 1]; never one of probability 0.

    Rounding may leave the sum below a uniform near 1, and a parallel sum need not be monotonic: hence the scaling by the
    largest cumulative probability of any possible choice.
    """
    probs = log_probs.exp()
    cdf = torch.where(probs > 0, probs.cumsum(-1), 0.0)
    return (cdf > uniforms * cdf.amax(-1, keepdim=True)).byte().argmax(-1)


def _entropy(log_probs: Tensor) -> Tensor:
    """Entropies [...]; choices of probability 0 contribute nothing, to the gradient either."""
    probs = log_probs.exp()
    return -(probs * torch.where(probs > 0, log_probs, 0.0)).sum(-1)


def _normals(uniforms: Tensor) -> Tensor:
    """Standard normals [...] from uniforms [..., 2], as `hurtle.native.rng.rng_normal` computes them."""
    return (-2.0 * (1.0 - uniforms[..., 0]).log()).sqrt() * (2.0 * math.pi * uniforms[..., 1]).cos()


def _gamma(shape: Tensor, uniforms: Tensor) -> Tensor:
    """Gammas [...] with shapes [...] >= 1, from uniforms [..., attempts, 3]: the first accepted attempt, else the last."""
    d = (shape - 1.0 / 3.0).unsqueeze(-1)
    normals = _normals(uniforms[..., :2])
    v = (1.0 + normals / (9.0 * d).sqrt()).clamp_min(1e-6) ** 3
    accepted = (1.0 - uniforms[..., 2]).log() < 0.5 * normals.square() + d * (1.0 - v + v.log())
    first = accepted.byte().argmax(-1, keepdim=True)
    first = torch.where(accepted.any(-1, keepdim=True), first, GAMMA_TRIES - 1)
    return (d * v).gather(-1, first).squeeze(-1)


def _log_tanh_slope(u: Tensor) -> Tensor:
    """log(1 - tanh(u)^2), accurate even where tanh rounds to 1."""
    return 2.0 * (math.log(2.0) - u - softplus(-2.0 * u))


@lru_cache
def _hermite(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Nodes and weights for the mean over a standard normal."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(HERMITE_NODES)
    with torch.inference_mode(False):  # a cached inference tensor could not be used in training
        return (
            torch.as_tensor(nodes, dtype=dtype, device=device),
            torch.as_tensor(weights / math.sqrt(2.0 * math.pi), dtype=dtype, device=device),
        )


@lru_cache
def _padded_places(nvec: tuple[int, ...], device: torch.device) -> Tensor:
    """For each entry of [k, max(nvec)] its index among the sum(nvec) logits; padding points one past the last."""
    with torch.inference_mode(False):
        places = torch.full((len(nvec), max(nvec)), sum(nvec))
        places[_is_real(nvec)] = torch.arange(sum(nvec))
        return places.flatten().to(device)


@lru_cache
def _real_places(nvec: tuple[int, ...], device: torch.device) -> Tensor:
    """The indices of the sum(nvec) logits among the entries of [k, max(nvec)]."""
    with torch.inference_mode(False):
        return _is_real(nvec).flatten().nonzero().squeeze(1).to(device)


def _is_real(nvec: tuple[int, ...]) -> Tensor:
    return torch.arange(max(nvec)) < torch.tensor(nvec).unsqueeze(1)
