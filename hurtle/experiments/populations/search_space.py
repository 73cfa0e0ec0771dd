"""The settings that a population searches: those that a run can change in mid-run, with ranges of their own.

names, dict or TOML file → `Dimension`s (space.py). Refuses settings that a run cannot change when it is resumed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, get_type_hints

from hurtle.errors import HurtleError
from hurtle.experiments.many_runs import reading
from hurtle.experiments.space import Dimension
from hurtle.experiments.space import make_space as make_shared_space
from hurtle.runners.settings import setting_types, unknown_setting

DEFAULTS: dict[str, tuple[float, float]] = {
    "learning_rate": (1e-5, 1e-2),
    "entropy_coef": (1e-4, 0.1),
    "clip_range": (0.05, 0.5),
    "gamma": (0.9, 0.999),
    "gae_lambda": (0.8, 0.99),
    "trace_lambda": (0.8, 0.99),
    "return_lambda": (0.5, 0.95),
    "num_epochs": (1, 20),
    "value_coef": (0.1, 2.0),
    "max_grad_norm": (0.1, 10.0),
    "critic_learning_rate": (1e-5, 1e-2),
    "replay_ratio": (0.1, 4.0),
    "target_rate": (1e-3, 0.1),
    "temperature": (1e-3, 1.0),
    "exploration_noise": (0.02, 0.5),
}
"""Where a setting may lie if the user only names it."""
SEARCHED = ("learning_rate", "entropy_coef", "clip_range")
"""What is searched if the user does not say, as far as the algorithm has it."""
_NETWORK = "it shapes the network, whose weights are copied from member to member"
_REPLAY = "the saved replay buffer is laid out by it, and would be lost"
_START = "it only matters at the start of a run"
FIXED = {
    "num_steps": "members must take the same steps between two comparisons",
    "optimizer": "the moments of one optimizer mean nothing to another",
    "rescale_values": "the values that were learned would mean something else",
    **dict.fromkeys(("dueling", "noisy", "distributional", "num_atoms", "value_low", "value_high"), _NETWORK),
    **dict.fromkeys(("value_bound", "critic_sizes", "num_critics"), _NETWORK),
    **dict.fromkeys(("capacity", "frame_stack", "replay_folder", "save_replay", "stored_state"), _REPLAY),
    **dict.fromkeys(("sequence_length", "burn_in"), _REPLAY),
    **dict.fromkeys(("learning_starts", "initial_temperature"), _START),
}
"""Settings of algorithms that a resumed run cannot change, and why."""


Space = dict[str, Dimension]


def make_space(given: Any, algorithm: str, fixed: Collection[str] = ()) -> Space:
    """The settings to search.

    Args:
        given: None (SEARCHED); names; or a dict or TOML file of `name = { low = 1e-4, high = 1e-2, scale = "log" }`, where the
            scale may be left out, or `name = [a, b, c]`, which are choices.
        algorithm: The algorithm.
        fixed: Settings that the user has given a value.

    Raises:
        UnknownNameError: There is no such setting; suggests the closest name.
        HurtleError: A range does not fit its setting, or a resumed run cannot change that.
    """
    types = setting_types(algorithm)
    if isinstance(given, Path) or (isinstance(given, str) and given.endswith(".toml")):
        with reading(Path(given)) as given:
            pass
    if given is None:
        given = [name for name in SEARCHED if name in types and name not in fixed]
        if not given:
            raise HurtleError(
                f"Which settings of {algorithm} to search? For example "
                "search={'learning_rate': {'low': 1e-4, 'high': 1e-2}}."
            )
    if isinstance(given, str | Path):
        given = [name.strip() for name in str(given).split(",")]
    if not isinstance(given, Mapping):
        given = dict.fromkeys(given)
    if not given:
        raise HurtleError("A population searches at least one setting, such as learning_rate.")
    table = {}
    for name, entry in given.items():
        if name not in types:
            raise unknown_setting(name, algorithm, " to search")
        if name in fixed:
            raise HurtleError(f"{name} is searched by the population: do not give it a value, or leave it out of the search.")
        _check_may_change(name, algorithm)
        if entry is None and name not in DEFAULTS:
            raise HurtleError(f"{name} has no range of its own: give one, such as {name} = {{ low = 0.1, high = 1.0 }}.")
        low, high = DEFAULTS.get(name, (None, None))
        table[name] = {"low": low, "high": high} if entry is None else entry
    found = make_shared_space(table, {"algorithm": algorithm}, " to search")
    return {dimension.name: dimension for dimension in found.dimensions}


def as_written(space: Space) -> dict[str, Any]:
    """The space as it is written in population.toml."""
    return {
        name: list(part.choices) if part.choices else {"low": part.low, "high": part.high, "scale": part.scale}
        for name, part in space.items()
    }


def _check_may_change(name: str, algorithm: str) -> None:
    from hurtle.algorithms.algorithm import find_algorithm
    from hurtle.algorithms.replay_settings import ReplayConfig

    config = find_algorithm(algorithm).config
    why = FIXED.get(name, "")
    if name == "priority_alpha" and issubclass(config, ReplayConfig):
        why = _REPLAY
    if name not in get_type_hints(config):  # of the env, the policy, the machine, the results
        why = "only settings of the algorithm change in mid-run: envs and networks stay as they are"
    if why:
        raise HurtleError(f"{name} cannot be searched by a population: {why}. Compare runs with other values instead.")
