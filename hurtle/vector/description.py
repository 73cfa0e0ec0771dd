"""`Description`: what the learner needs to know about an env, taken from a throw-away instance.

maker → env, prepared as back ends run it → checks → spaces, layouts, agents, masks.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium
from gymnasium import spaces

from hurtle.emulation.agent_spaces import flat_mask
from hurtle.emulation.emulated_env import EmulatedEnv
from hurtle.emulation.flat_layout import SpaceLayout
from hurtle.emulation.start_checks import check_env
from hurtle.emulation.wrap import emulate
from hurtle.errors import EmulationError, EnvFailedError, HurtleError

EnvMaker = Callable[[], Any]
CONSTRUCTOR = "its constructor"


@dataclass(frozen=True)
class Description:
    """What the learner needs to know about an env."""

    observation_space: spaces.Space  # of one env, or of one agent
    action_space: spaces.Space
    layout: SpaceLayout  # layout of an observation in its row
    actions: SpaceLayout  # layout of an action in its row
    agents: tuple[str, ...] | None  # None for single-agent envs
    mask_size: int  # entries of an action mask; 0 without masks
    structure: SpaceLayout  # restores the structure of flat observations
    flat: bool  # observations are returned flat
    metadata: dict[str, Any]
    render_mode: str | None
    spec: Any = None
    drawn: tuple[str, ...] = ()  # options that are drawn anew for each episode
    resumes_exactly: bool = False  # the env's `saved_state` holds all that decides how it continues

    @property
    def num_agents(self) -> int | None:
        """Agents per env; None for single-agent envs, whose arrays have no agent axis."""
        return None if self.agents is None else len(self.agents)


def prepare(env: Any, flat: bool, check: bool = True) -> Any:
    """The env as a shard runs it: multi-agent envs are always emulated, single-agent envs only if `flat`."""
    if isinstance(env, gymnasium.Env):
        return emulate(env, check=check) if flat else env
    made = emulate(env, check=check)  # PettingZoo, old Gym, or an error that lists what is supported
    return made if flat or has_agents(made) else made.env


def has_agents(env: Any) -> bool:
    """Whether a prepared env has several agents."""
    return hasattr(env, "reset_into")


def describe(maker: EnvMaker, flat: bool, check: bool) -> Description:
    """Make an env, check it, describe it and close it.

    Raises:
        EnvFailedError: The env raised.
        HurtleError: The env contradicts its spaces (EmulationError), or there is no such env.
    """
    doing = CONSTRUCTOR
    try:
        env = prepare(maker(), flat, check)
        doing = "the start-up check"
        try:
            return description_of(env, flat, check)
        finally:
            env.close()
    except HurtleError:
        raise
    except Exception as error:
        raise env_failure(0, None, doing, error) from error


def env_failure(index: int, seed: int | None, doing: str, error: Exception, steps: int | None = None) -> EnvFailedError:
    """An error that names env, seed and step and contains the env's own traceback.

    Args:
        index: The env.
        seed: The seed of its last reset.
        doing: What it was doing: "step", or several words.
        error: The error that it raised, or that its return value caused.
        steps: Steps since the user last reset it, including this one.
    """
    text = "".join(traceback.format_exception(error)).rstrip()
    where = f"in {doing}" if " " in doing else f"in {doing}() (last seeded with {seed})"
    where += "" if steps is None else f", {steps} step{'s' if steps > 1 else ''} after its last reset"
    return EnvFailedError(f"Env {index} raised {type(error).__name__} {where}: {error}\n\n{text}", env_index=index, seed=seed)


def description_of(env: Any, flat: bool, check: bool) -> Description:
    """The description of a prepared env; resets the env."""
    about: dict[str, Any] = {"metadata": dict(getattr(env, "metadata", {})), "render_mode": getattr(env, "render_mode", None)}
    several = has_agents(env)
    layout = env.layout if several else SpaceLayout(env.observation_space)
    action_space = env.agent_action_space if several else env.action_space
    actions = SpaceLayout(action_space, "action")
    if check:
        try:
            check_env(env)
        except EmulationError as error:
            raise EmulationError(f"{error} (check=False skips this check.)") from error
    if several:
        obs_space, names = layout.flat_space if flat else layout.space, tuple(env.possible_agents)
        return Description(obs_space, action_space, layout, actions, names, env.mask_size or 0, layout, flat, **about)
    _, info = env.reset(seed=0)
    emulated = isinstance(env, EmulatedEnv) and env.layout is not None
    structure = env.layout if emulated else layout
    about["spec"] = getattr(env, "spec", None)
    about["drawn"] = env.get_wrapper_attr("drawn_options") if env.has_wrapper_attr("drawn_options") else ()
    about["resumes_exactly"] = bool(hasattr(type(env), "saved_state") and env.resumes_exactly)
    return Description(
        env.observation_space, action_space, layout, actions, None, _mask_size(info), structure, emulated, **about
    )


def _mask_size(info: dict[str, Any]) -> int:
    mask = info.get("action_mask")
    return flat_mask(mask).size if mask is not None else 0
