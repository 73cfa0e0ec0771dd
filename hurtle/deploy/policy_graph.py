"""`PolicyGraph`: a trained policy as a function of tensors, from the env's observation to the env's action.

obs (one tensor, or one per leaf), mask, state → normalizer → policy → action, value, logits …, state. Knows no file format.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hurtle.buffers.rollout import torch_dtype
from hurtle.deploy.card import Port
from hurtle.emulation.flat_layout import SpaceLayout
from hurtle.emulation.leaves import map_tree, tree_leaves
from hurtle.errors import HurtleError, UnknownNameError, did_you_mean
from hurtle.policies.action_transform import HEAD_OUTPUTS
from hurtle.policies.actor_critic import ActorCritic
from hurtle.policies.distributions import Beta, Categorical, Distribution, EpsilonGreedy, Gaussian, MultiCategorical
from hurtle.policies.policy import Policy
from hurtle.policies.structured import StructuredBody

MEAN, STD = "observation_mean", "observation_std"
"""Names of the normalizer's constants in a file; "mean" alone is an output of Gaussian policies."""


class PolicyGraph(nn.Module):
    """The module that is traced and exported.

    Args:
        policy: A trained policy on the CPU; it is copied.
        layout: How the env's structured observation lies in the flat one; None if the env was not emulated.
        outputs: The outputs in order: "action", "value", and those of `HEAD_OUTPUTS`, or "heads" for all of the latter.
        masked: Take a mask of legal actions as an input.
        stochastic: Sample the action, with uniforms from the input "uniforms".
        draws: Draw the uniforms inside instead.

    Attributes:
        leaf_ports: The inputs of the observation.
        inputs: All inputs, in the order of `forward`'s arguments.
        outputs: All outputs, in the order in which `forward` returns them, the next state last.

    Raises:
        HurtleError: The policy does not have what is asked for.
    """

    observation_mean: Tensor
    observation_std: Tensor

    def __init__(
        self,
        policy: Policy,
        layout: SpaceLayout | None = None,
        outputs: tuple[str, ...] = ("action",),
        masked: bool = False,
        stochastic: bool = False,
        draws: bool = False,
    ):
        super().__init__()
        self.policy = copy.deepcopy(policy).cpu().eval().requires_grad_(False)
        head = self.policy.head
        self._wanted = _expanded(outputs, head.kind)
        self.stochastic, self._draws = stochastic, draws
        if masked and head.mask_size is None:
            raise HurtleError(f"masked: actions in {head.action_space} have no masks; export without masked.")
        if stochastic and not self.policy.num_uniforms:
            raise HurtleError(
                "stochastic: the policy's distribution samples with torch's own generator, which a file cannot hold."
            )
        self._tree, self._places = self._see_leaves(layout)
        self.inputs: list[Port] = tree_leaves(self._tree)
        self.leaf_ports = list(self.inputs)
        self._masked = masked
        if masked:
            self.inputs.append(Port("mask", "bool", (int(head.mask_size or 0),)))
        if stochastic and not draws:
            self.inputs.append(Port("uniforms", "float32", (self.policy.num_uniforms,)))
        states = [tuple(part.shape[1:]) for part in self.policy.initial_state(1)]
        self.states = [Port(f"state_in_{k}", "float32", shape) for k, shape in enumerate(states)]
        self.inputs += self.states
        self._prepare_memory()
        if "value" not in self._wanted:
            self._drop_critic()
        if self._wanted == ["action"] and not stochastic:
            self._keep_greedy()
        self._prepare_normalizer()
        shapes = {"action": (head.action_space.dtype, head.action_space.shape or ()), "value": (np.float32, ())}
        size = head.num_outputs // 2 if head.kind == "beta" else head.num_outputs
        shapes |= dict.fromkeys(HEAD_OUTPUTS[head.kind], (np.float32, (size,)))
        self.outputs = [Port(name, str(np.dtype(shapes[name][0])), tuple(shapes[name][1])) for name in self._wanted]
        self.outputs += [Port(f"state_out_{k}", "float32", shape) for k, shape in enumerate(states)]

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """All `inputs`, [B, …] each → all `outputs`."""
        distribution, value, state = self.run(*tensors)
        found = [self._output(name, distribution, value, tensors) for name in self._wanted]
        return (*found, *state)

    def run(self, *tensors: Tensor) -> tuple[Distribution, Tensor, tuple[Tensor, ...]]:
        """All `inputs` → the distribution of actions, the values and the next state."""
        leaves = iter(tensors)
        obs = map_tree(lambda _: next(leaves), self._tree)
        mask = next(leaves) if self._masked else None
        if self.stochastic and not self._draws:
            next(leaves)
        return self.policy(self._seen(obs), tuple(leaves), mask)

    def _output(self, name: str, distribution: Distribution, value: Tensor, tensors: tuple[Tensor, ...]) -> Tensor:
        if name == "action":
            return self._action(distribution, tensors)
        return value.float() if name == "value" else head_outputs(distribution)[name]

    def _action(self, distribution: Distribution, tensors: tuple[Tensor, ...]) -> Tensor:
        space = self.policy.head.action_space
        raw = distribution.sample(self._uniforms(tensors)) if self.stochastic else distribution.mode()
        actions, shape = self.policy.head.env_tensor(raw), space.shape or ()
        actions = actions.squeeze(1) if not shape else actions.unflatten(1, shape)
        return actions.to(getattr(torch, np.dtype(space.dtype).name))

    def _uniforms(self, tensors: tuple[Tensor, ...]) -> Tensor:
        if self._draws:
            return torch.rand(tensors[0].shape[0], self.policy.num_uniforms)
        return tensors[len(self.leaf_ports) + self._masked]

    def _seen(self, obs: Any) -> Any:
        """The network's input: normalized, or in the dtype that rollouts store."""
        if self._places is not None:
            leaves = tree_leaves(obs)
            obs = torch.cat([leaves[k].reshape(leaves[k].shape[0], self.inputs[k].size) for k in self._places], 1)
        if not isinstance(obs, Tensor):
            return obs
        if self.policy.normalizer is not None:
            return ((obs.double() - self.observation_mean) / self.observation_std).clamp(-self._clip, self._clip).float()
        return obs.to(torch_dtype(self.policy.observation_space.dtype))

    def _see_leaves(self, layout: SpaceLayout | None) -> tuple[Any, list[int] | None]:
        """The tree of the observation's inputs, and their order in one vector; None if the network takes the tree."""
        flat = self.policy.observation_space
        bodies = [module for module in self.policy.modules() if isinstance(module, StructuredBody)]
        if layout is None or layout.is_plain or (layout.is_bytes and not bodies):
            return Port("obs", np.dtype(flat.dtype).name, tuple(flat.shape or ())), None
        tree = _unique(_named(layout.tree, "obs"))
        if bodies:
            for body in bodies:
                body.layout = AsGiven()  # type: ignore[assignment]
            return tree, None
        starts = [leaf.start for leaf in tree_leaves(layout.tree)]
        return tree, sorted(range(len(starts)), key=starts.__getitem__)

    # Changes to the copy.

    def _prepare_memory(self) -> None:
        memory: Any = self.policy.memory
        if hasattr(memory, "capturable"):
            memory.capturable = True  # plain operations, which both formats know

    def _drop_critic(self) -> None:
        network = self.policy.network
        if isinstance(network, ActorCritic) and network.critic_body is not None and self.policy.memory is None:
            network.critic_body = None

    def _keep_greedy(self) -> None:
        """Keep only what acting without exploring needs."""
        network: Any = self.policy.network
        greedy = network.greedy(self.policy.head) if hasattr(network, "greedy") else None
        if greedy is not None:
            self.policy.network = greedy.eval().requires_grad_(False)

    def _prepare_normalizer(self) -> None:
        """Register mean and standard deviation as named constants, instead of running statistics."""
        normalizer = self.policy.normalizer
        if normalizer is not None:
            self.register_buffer(MEAN, normalizer.mean.clone())
            self.register_buffer(STD, (normalizer.variance + normalizer.eps).sqrt())
            self._clip = normalizer.clip


def head_outputs(distribution: Distribution) -> dict[str, Tensor]:
    """The parameters of a distribution by name (`HEAD_OUTPUTS`), float32 [B, …] each; {} if it is not one of Hurtle's."""
    if isinstance(distribution, EpsilonGreedy):
        return {"logits": distribution.action_values}
    if isinstance(distribution, Categorical | MultiCategorical):
        return {"logits": distribution.flat_log_probs()}
    if isinstance(distribution, Beta):
        return {"alpha": distribution.alpha, "beta": distribution.beta}
    if isinstance(distribution, Gaussian):
        return {"mean": distribution.mean, "log_std": distribution.log_std.expand_as(distribution.mean)}
    return {}


class AsGiven:
    """Stands in for a layout where the observation is a tree already."""

    @staticmethod
    def unflatten(tree: Any) -> Any:
        """Return the tree."""
        return tree


def _named(tree: Any, name: str) -> Any:
    """The tree of leaves as a tree of ports, named by their paths: `obs.camera`, `obs.inventory.0`."""
    if isinstance(tree, dict | tuple):
        keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
        named = [_named(tree[key], f"{name}.{key}") for key in keys]
        return dict(zip(keys, named, strict=True)) if isinstance(tree, dict) else tuple(named)
    return Port(name, tree.dtype_name, tuple(tree.shape))


def _unique(tree: Any) -> Any:
    """The tree of ports with numbers after duplicate names, such as those of the key "a.b" and of "b" in "a"."""
    seen: set[str] = set()

    def renamed(port: Port) -> Port:
        name, number = port.name, 2
        while name in seen:
            name, number = f"{port.name}_{number}", number + 1
        seen.add(name)
        return Port(name, port.dtype, port.shape)

    return map_tree(renamed, tree)


def _expanded(outputs: tuple[str, ...], kind: str) -> list[str]:
    """The names of the outputs, each once, with "heads" expanded.

    Raises:
        UnknownNameError: The policy has no such output.
    """
    known = ("action", "value", *HEAD_OUTPUTS[kind])
    found: list[str] = []
    for name in outputs:
        for part in HEAD_OUTPUTS[kind] if name == "heads" else (name,):
            if part not in known:
                raise UnknownNameError(f"No output {part!r}. {did_you_mean(part, (*known, 'heads'))}")
            if part not in found:
                found.append(part)
    if not found:
        raise HurtleError(f"An export needs at least one output: {', '.join(known)} or heads.")
    return found
