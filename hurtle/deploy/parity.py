"""`check_parity`: compare an exported policy with the torch policy, on random and extreme observations, masks and states.

policy × runtime → the same inputs to both → largest difference, or an error that names the output. Knows no file format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from hurtle.deploy.card import Feeds, Port
from hurtle.deploy.policy_graph import PolicyGraph, head_outputs
from hurtle.emulation.flat_layout import SpaceLayout
from hurtle.emulation.leaves import tree_leaves
from hurtle.errors import EmulationError, HurtleError, PolicyFileError
from hurtle.policies.distributions import Categorical, Distribution, MultiCategorical
from hurtle.policies.numpy_acting import see
from hurtle.policies.policy import Policy

TOLERANCE = 1e-5
"""Relative to the number itself, or to the largest float in its observation if that is above 1."""
SAMPLED_TOLERANCE = 1e-4
"""For sampled actions: float32 logarithms and cosines differ more between libraries than sums do."""
OBSERVATIONS, EXTREME = 256, 24
BATCHES = (256, 1, 3)
UNBOUNDED, ENORMOUS = 1e4, 1e9
"""UNBOUNDED replaces bounds that are infinite or beyond ENORMOUS."""


def check_parity(
    policy: Policy,
    graph: PolicyGraph,
    run: Callable[[Feeds], Feeds],
    layout: SpaceLayout | None,
    what: str,
    seed: int = 0,
) -> tuple[float, int]:
    """Compare a runtime with the trained policy.

    Args:
        policy: The trained policy.
        graph: The exported graph, for its inputs and outputs.
        run: Runs the exported policy: inputs by name → some or all outputs by name.
        layout: How the env's structured observation lies in the flat one.
        what: The runtime's name, for errors.
        seed: Seed of the random inputs, and of torch's generator for programs that draw from it.

    Returns:
        The largest difference, and the number of observations tried.

    Raises:
        PolicyFileError: They differ.
        HurtleError: The policy's own outputs are not finite.
    """
    worst, count = 0.0, 0
    with torch.random.fork_rng(devices=[]):
        for rows, feeds in _batches(graph, layout, np.random.default_rng(seed)):
            torch.manual_seed(seed)
            distribution, expected = _expected(policy, graph, rows, feeds)
            torch.manual_seed(seed)
            found = run(feeds)
            count += len(rows)
            scale = _scale(graph, feeds)
            for name, array in found.items():
                is_choice = name == "action" and not graph.stochastic
                difference = _difference(expected[name], array, scale, distribution if is_choice else None, policy)
                limit = SAMPLED_TOLERANCE if name == "action" and graph.stochastic else TOLERANCE
                if not difference <= limit:
                    raise PolicyFileError(
                        f"The exported policy differs from the trained one: on {what}, {name!r} differs by {difference:.2e} "
                        f"(more than {limit:.0e}). Nothing was written."
                    )
                worst = max(worst, difference)
    return worst, count


@torch.inference_mode()
def _expected(policy: Policy, graph: PolicyGraph, rows: np.ndarray, feeds: Feeds) -> tuple[Distribution, Feeds]:
    """The policy's distribution for flat observations, and all its outputs by name."""
    state = tuple(torch.from_numpy(feeds[port.name]) for port in graph.states)
    mask = torch.from_numpy(feeds["mask"]) if "mask" in feeds else None
    distribution, value, after = policy(see(policy, rows, torch.device("cpu")), state, mask)
    raw = distribution.mode()
    if graph.stochastic:
        given = feeds.get("uniforms")
        raw = distribution.sample(torch.rand(len(rows), policy.num_uniforms) if given is None else torch.from_numpy(given))
    found = {"action": policy.head.env_actions(raw.numpy()), "value": value.float().numpy()}
    found |= {name: part.numpy() for name, part in head_outputs(distribution).items()}
    found |= {f"state_out_{k}": part.numpy() for k, part in enumerate(after)}
    for name in (port.name for port in graph.outputs):
        if not np.isfinite(found[name]).all():
            raise HurtleError(f"The policy's {name!r} is not finite for some observations: its training has diverged.")
    return distribution, found


def _scale(graph: PolicyGraph, feeds: Feeds) -> np.ndarray:
    """The largest float that the network sees in each row, and at least 1: the scale of float32 rounding errors."""
    rows = len(feeds[graph.inputs[0].name])
    floats = [np.abs(feeds[port.name]).reshape(rows, -1) for port in graph.leaf_ports if port.dtype.startswith("float")]
    largest = np.concatenate([np.ones((rows, 1)), *floats], 1).max(1)
    normalizer = graph.policy.normalizer
    return largest if normalizer is None else np.minimum(largest, max(1.0, normalizer.clip))


def _difference(
    expected: np.ndarray, array: np.ndarray, scale: np.ndarray, chosen: Distribution | None, policy: Policy
) -> float:
    """The largest difference over its row's scale; for discrete actions, the loss in log-probability, as ties may differ."""
    if array.shape != expected.shape or array.dtype != expected.dtype:
        return float("inf")
    if isinstance(chosen, Categorical | MultiCategorical):
        raw = torch.from_numpy(array.astype(np.int64).reshape(len(array), -1) - policy.head.transform.start)
        raw = raw.squeeze(1) if isinstance(chosen, Categorical) else raw
        return float(((chosen.log_prob(chosen.mode()) - chosen.log_prob(raw)).numpy() / scale).max())
    reference, found = expected.astype(np.float64), array.astype(np.float64)
    off = np.abs(reference - found) / np.maximum(scale.reshape(-1, *[1] * (reference.ndim - 1)), np.abs(reference))
    return float(off.max(initial=0.0)) if np.isfinite(off).all() else float("inf")


def _batches(graph: PolicyGraph, layout: SpaceLayout | None, rng: np.random.Generator) -> Iterator[tuple[np.ndarray, Feeds]]:
    """Batches of flat observations, each with the inputs of the file that hold the same."""
    rows, leaves = _observations(graph, layout, rng)
    for size in BATCHES:
        chosen = rng.permutation(OBSERVATIONS)[:size]
        feeds = {port.name: np.ascontiguousarray(leaf[chosen]) for port, leaf in zip(graph.inputs, leaves, strict=False)}
        for port in graph.inputs[len(leaves) :]:
            feeds[port.name] = _other_input(port, size, graph, rng)
        yield np.ascontiguousarray(rows[chosen]), feeds


def _other_input(port: Port, size: int, graph: PolicyGraph, rng: np.random.Generator) -> np.ndarray:
    shape = (size, *port.shape)
    if port.name == "mask":  # some rows allow everything, most only a part; every choice has a legal option
        mask = (rng.random(shape) < 0.6) | (rng.random((size, 1)) < 0.3)
        first = 0
        for options in graph.policy.head.nvec or (port.shape[0],):
            mask[np.arange(size), first + rng.integers(0, options, size)] = True
            first += options
        return mask
    if port.name == "uniforms":
        return rng.random(shape, np.float32)
    state = rng.standard_normal(shape, np.float32)
    state[: size // 4] = 0.0  # an episode begins
    return state


def _observations(
    graph: PolicyGraph, layout: SpaceLayout | None, rng: np.random.Generator
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Flat observations (samples, bounds, zeros, ones), and views of them, one array per input."""
    ports, unfit = graph.leaf_ports, []
    if layout is not None and ports[0].name != "obs":
        layout.space.seed(int(rng.integers(1 << 31)))
        memory = layout.memory(OBSERVATIONS)
        for k, row in enumerate(memory):
            try:
                layout.writer(row)(layout.space.sample())
            except EmulationError:  # a Sequence may be sampled longer than the layout's maximum
                unfit.append(k)
        rows = layout.flat(memory)
        leaves = tree_leaves(layout.unflatten(rows))
        bounds = [(leaf.low, leaf.high) for leaf in tree_leaves(layout.tree)]
    else:
        space = graph.policy.observation_space
        space.seed(int(rng.integers(1 << 31)))
        rows = np.stack([np.asarray(space.sample(), ports[0].dtype) for _ in range(OBSERVATIONS)])
        leaves, bounds = [rows], [_bounds(space)]
    for leaf, (least, greatest) in zip(leaves, bounds, strict=True):
        low, high = _finite(least, -UNBOUNDED), _finite(greatest, UNBOUNDED)
        leaf[unfit] = rng.uniform(low, high, (len(unfit), *leaf.shape[1:]))
        for k, edge in enumerate((low, high, np.clip(0.0, low, high), np.clip(1.0, low, high))):
            leaf[k] = edge
        pick = rng.random((EXTREME, *leaf.shape[1:])) < 0.5
        leaf[4 : 4 + EXTREME] = np.where(pick, low, high)
    return rows, leaves


def _finite(bound: Any, instead: float) -> np.ndarray:
    """A bound of a space, with infinite and enormous values replaced."""
    bound = np.asarray(bound, np.float64)
    return np.where(np.abs(bound) < ENORMOUS, bound, instead)


def _bounds(space: spaces.Space) -> tuple[np.ndarray, np.ndarray]:
    if isinstance(space, spaces.Box):
        return space.low, space.high
    if isinstance(space, spaces.MultiBinary):
        return np.zeros(space.shape), np.ones(space.shape)
    assert isinstance(space, spaces.Discrete | spaces.MultiDiscrete)
    count = space.n if isinstance(space, spaces.Discrete) else space.nvec
    return np.asarray(space.start), np.asarray(space.start + count - 1)
