"""`AgentSpaces`: one flat observation space and one flat action space for all agents of an env.

spaces by agent → common spaces, padded where sizes differ → writers and decoders for each row. Does not step the env.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from gymnasium import spaces

from hurtle.emulation.action_layout import ActionLayout
from hurtle.emulation.agents import Agent
from hurtle.emulation.flat_layout import SpaceLayout
from hurtle.emulation.hooks import Featurize, featurized_space
from hurtle.errors import EmulationError


class AgentSpaces:
    """The common layout of all agents' rows.

    Args:
        env: A PettingZoo parallel env, or one with the same interface.
        models: For each row, an agent whose spaces that row has.
        featurize: Runs on each observation before it is written.
        observations: False leaves observations structured; `layout` is then None.
        actions: False leaves actions structured; `action_layout` is then None.
        limits: `max_length`, `max_nodes`, `max_edges`.

    Raises:
        EmulationError: The agents' spaces cannot be unified; the message names two agents and their spaces.
    """

    def __init__(
        self,
        env: Any,
        models: list[Agent],
        featurize: Featurize | None,
        observations: bool,
        actions: bool,
        limits: dict[str, Any],
    ):
        self.env, self.models, self.featurize, self._limits = env, models, featurize, limits
        self.own = {agent: self._space_of(agent) for agent in models}
        raw = [env.observation_space(agent) for agent in models]
        self.mask_in_observation = all(isinstance(space, spaces.Dict) and "action_mask" in space.spaces for space in raw)
        self.layout: Any = SpaceLayout(common_observation_space(self.own), **limits) if observations else None
        self.action_layout: Any = None
        self.legal: np.ndarray | None = None
        """bool [agents, n]: the choices that each agent has; None with Box actions."""
        self.differ_in_choices = False
        self.decoders: list[Callable[[Any], Any]] = []
        self._action_layouts: dict[Agent, ActionLayout] = {}
        if actions:
            self._unify_actions()

    def _space_of(self, agent: Agent) -> spaces.Space:
        space = self.env.observation_space(agent)
        return space if self.featurize is None else featurized_space(self.featurize, space)

    def _unify_actions(self) -> None:
        self._action_layouts = layouts = {agent: ActionLayout(self.env.action_space(agent)) for agent in self.models}
        common = common_action_space(layouts)
        alike = all(layout.flat_space == common for layout in layouts.values())
        self.action_layout = layouts[self.models[0]] if alike else ActionLayout(common)
        self._connect()
        self.idle_actions = [decode(_idle(common)) for decode in self.decoders]
        width = mask_width(common)
        if width is not None:
            choices = [mask_width(layouts[agent].flat_space) for agent in self.models]
            self.legal = np.arange(width) < np.array(choices)[:, None]
            self.differ_in_choices = not alike

    def _connect(self) -> None:
        """Make the decoders of each row's actions."""
        self.decoders = [row_decoder(self._action_layouts[agent], self.action_layout.flat_space) for agent in self.models]

    def admit(self, agent: Agent) -> None:
        """Check that a newly seen agent has the spaces of the first row.

        Raises:
            EmulationError: Its spaces differ.
        """
        if agent in self.own:
            return
        model = self.models[0]
        self.own[agent] = self._space_of(agent)
        pairs = [(self.own[model], self.own[agent]), (self.env.action_space(model), self.env.action_space(agent))]
        for expected, got in pairs:
            if got != expected:
                raise EmulationError(
                    f"With max_agents all agents need the same spaces: agent {model!r} has {expected}, "
                    f"agent {agent!r} has {got}."
                )

    def writers(self, memory: np.ndarray) -> list[Callable[[Any], None]]:
        """For each row of `memory`, uint8 [agents, nbytes], a function that writes an observation into it."""
        memory[...] = 0  # the padding of smaller observations is never written again
        found = [row_writer(self.layout, self.own[agent], row) for agent, row in zip(self.models, memory, strict=True)]
        return found if self.featurize is None else [_after(self.featurize, write) for write in found]

    def mask_of(self, observation: Any, info: dict[str, Any]) -> np.ndarray | None:
        """An agent's action mask, from its observation or its info, as one flat array."""
        source = observation if self.mask_in_observation else info
        return flat_mask(source["action_mask"]) if "action_mask" in source else None

    def check(self, agent: Agent, slot: int, observation: Any, info: dict[str, Any]) -> None:
        """Compare an agent's observation and action mask with its spaces.

        Raises:
            EmulationError: They differ; the message names the agent and the leaf, what was expected and what it got.
        """
        if self.layout is not None:
            value = observation if self.featurize is None else self.featurize(observation)
            SpaceLayout(self.own[agent], f'observation["{agent}"]', **self._limits).check(value)
        mask = None if self.legal is None else self.mask_of(observation, info)
        if mask is not None and self.legal is not None and mask.size != self.legal[slot].sum():
            raise EmulationError(
                f'action_mask["{agent}"]: expected {self.legal[slot].sum()} entries, one per choice, got {mask.size}.'
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "decoders": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.action_layout is not None:
            self._connect()


def common_observation_space(of_agents: Mapping[Agent, spaces.Space]) -> spaces.Space:
    """The space that contains every agent's observation: their own if all are equal, else a Box of the largest shape.

    Raises:
        EmulationError: The spaces differ in other ways; the message names two agents and their spaces.
    """
    (first, wanted), *_ = of_agents.items()
    for agent, space in of_agents.items():
        if space != wanted and not _can_pad(wanted, space):
            raise EmulationError(
                f"All agents need the same observation space, or Boxes with the same dtype and number of axes: "
                f"agent {first!r} has {wanted}, agent {agent!r} has {space}. Make them equal with featurize=…"
            )
    if all(space == wanted for space in of_agents.values()):
        return wanted
    return _padded_box(list(of_agents.values()))


def common_action_space(of_agents: Mapping[Agent, ActionLayout]) -> spaces.Space:
    """The space that contains every agent's flat action: their own if all are equal, else the largest Discrete or 1-D Box.

    Raises:
        EmulationError: The spaces differ in other ways; the message names two agents and their spaces.
    """
    (first, wanted), *_ = ((agent, layout.flat_space) for agent, layout in of_agents.items())
    flat_spaces = [layout.flat_space for layout in of_agents.values()]
    for agent, layout in of_agents.items():
        space = layout.flat_space
        both_discrete = isinstance(space, spaces.Discrete) and isinstance(wanted, spaces.Discrete)
        both_vectors = _can_pad(wanted, space) and len(space.shape or ()) == 1
        if space != wanted and not both_discrete and not both_vectors:
            raise EmulationError(
                f"All agents need the same action space, or all Discrete, or all one-dimensional Boxes with the same dtype: "
                f"agent {first!r} has {wanted}, agent {agent!r} has {space}."
            )
    if all(space == wanted for space in flat_spaces):
        return wanted
    if isinstance(wanted, spaces.Discrete):
        return spaces.Discrete(max(int(space.n) for space in flat_spaces if isinstance(space, spaces.Discrete)))
    return _padded_box(flat_spaces)


def _can_pad(one: spaces.Space, other: spaces.Space) -> bool:
    return (
        isinstance(one, spaces.Box)
        and isinstance(other, spaces.Box)
        and one.dtype == other.dtype
        and len(one.shape) == len(other.shape)
    )


def _padded_box(boxes: list[Any]) -> spaces.Box:
    """A Box of the largest size along each axis, whose bounds contain every agent's values and the zero padding."""
    shape = tuple(int(n) for n in np.max([box.shape for box in boxes], axis=0))
    low, high = np.zeros(shape, boxes[0].dtype), np.zeros(shape, boxes[0].dtype)
    for box in boxes:
        part = _leading(box.shape)
        low[part] = np.minimum(low[part], box.low)
        high[part] = np.maximum(high[part], box.high)
    return spaces.Box(low, high, shape, boxes[0].dtype.type)


def _leading(shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(0, n) for n in shape)


def row_writer(layout: SpaceLayout, space: spaces.Space, row: np.ndarray) -> Callable[[Any], None]:
    """A function that writes one agent's observation into its row (uint8 [nbytes]), padded at the end of each axis."""
    if space == layout.space:
        return layout.writer(row)
    part = layout.flat(row)[_leading(space.shape or ())]  # a Box; the padding stays zero

    def write(value: Any) -> None:
        part[...] = value

    return write


def row_decoder(layout: ActionLayout, common: spaces.Space) -> Callable[[Any], Any]:
    """A function that turns a flat action of the common space into an agent's own action.

    Surplus entries are dropped; a choice that the agent does not have becomes its first.
    """
    own = layout.flat_space
    if isinstance(own, spaces.Discrete) and own != common:
        return partial(_decode_choice, layout.decode, int(own.n))
    if isinstance(own, spaces.Box) and own.shape != common.shape:
        return partial(_decode_part, layout.decode, own.shape[0])
    return layout.decode


def _decode_choice(decode: Callable[[Any], Any], choices: int, flat: Any) -> Any:
    return decode(flat if flat < choices else 0)


def _decode_part(decode: Callable[[Any], Any], size: int, flat: np.ndarray) -> Any:
    return decode(flat[:size])


def mask_width(flat_action_space: spaces.Space) -> int | None:
    """Number of entries of an action mask: one per choice, summed over the parts of a MultiDiscrete; None for Box."""
    if isinstance(flat_action_space, spaces.Discrete):
        return int(flat_action_space.n)
    if isinstance(flat_action_space, spaces.MultiDiscrete):
        return int(flat_action_space.nvec.sum())
    return None


def flat_mask(mask: Any) -> np.ndarray:
    """An action mask in Gymnasium's form (an array, or a tuple or dict of masks) as one flat array."""
    if isinstance(mask, Mapping):
        mask = tuple(mask.values())
    if isinstance(mask, tuple | list) and mask and not np.isscalar(mask[0]):
        return np.concatenate([flat_mask(part) for part in mask])
    return np.asarray(mask).ravel()


def _idle(flat_space: spaces.Space) -> Any:
    """A flat action for an agent whose action does not matter: zero, or the nearest legal value."""
    if isinstance(flat_space, spaces.Box):
        return np.clip(np.zeros(flat_space.shape, flat_space.dtype), flat_space.low, flat_space.high)
    return np.zeros(flat_space.shape or (), np.int64)[()]


def _after(featurize: Featurize, write: Callable[[Any], None]) -> Callable[[Any], None]:
    return lambda observation: write(featurize(observation))
