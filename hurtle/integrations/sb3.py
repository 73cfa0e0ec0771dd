"""Stable-Baselines3 on Hurtle: our vector envs as its `VecEnv`, and a torch module as its policy.

actions → `vec.step` → copies, `dones` and one info dict per env. SB3 keeps and modifies the arrays it gets, so it always gets
copies. Knows nothing of how the envs run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from torch import nn

from hurtle.errors import EnvFailedError, HurtleError, UnknownNameError
from hurtle.policies.contract import checked_policy, evaluate, per_row
from hurtle.vector.factory import make_vec

try:
    from stable_baselines3.common.monitor import Monitor
    from stable_baselines3.common.policies import ActorCriticPolicy
    from stable_baselines3.common.vec_env import VecEnv
except ImportError as error:
    raise HurtleError(f'hurtle.integrations.sb3 needs Stable-Baselines3: pip install "hurtle[sb3]" ({error}).') from error

_EPISODE_KEYS = {"final_obs", "_final_obs", "final_info", "_final_info", "episode", "_episode"}


def make_sb3_vec(env: Any, num_envs: int, **options: Any) -> SB3VecEnv:
    """`SB3VecEnv` over `hurtle.make_vec(env, num_envs, **options)`.

    Example:
        >>> vec = make_sb3_vec("cartpole", num_envs=4)
        >>> vec.reset().shape
        (4, 4)
    """
    return SB3VecEnv(make_vec(env, num_envs, **options))


class SB3VecEnv(VecEnv):
    """A Hurtle vector env (or any `gymnasium.vector.VectorEnv` with SAME_STEP autoreset) as an SB3 `VecEnv`.

    Infos follow SB3: an ended row has `terminal_observation`, `TimeLimit.truncated` and `episode` (`r`, `l`, `t`, the env's
    metrics). With several agents, each agent is a row: row `i * num_agents + a` is agent a of env i, and its infos have only
    these three. SB3 cannot exclude rows from training, so an absent agent is an error.

    Args:
        vec: The vector env; `close` closes it.
    """

    def __init__(self, vec: VectorEnv):
        _check(vec)
        self.vec: Any = vec
        inner: Any = vec.unwrapped
        self.num_agents = int(getattr(inner, "num_agents", None) or 1)
        self._several = self.num_agents > 1 or getattr(inner, "agents", None) is not None  # arrays have an agent axis
        observation_space, action_space = vec.single_observation_space, vec.single_action_space
        if self._several:
            observation_space, action_space = _agent_space(observation_space), _agent_space(action_space)
        action_space, self._first_action = _from_zero(action_space)
        super().__init__(vec.num_envs * self.num_agents, observation_space, action_space)
        self._next_options: dict[str, Any] | None = None
        self._action_mask: np.ndarray | None = None
        self._actions: Any = None
        self._began = time.time()

    def reset(self) -> Any:
        """Start new episodes with the seeds and options set before; returns the observations."""
        seeds = self._seeds[: self.vec.num_envs]
        seed = None if all(s is None for s in seeds) else seeds
        obs, infos = self.vec.reset(seed=seed, options=self._next_options)
        self._reset_seeds()
        self._next_options = None
        self._keep_masks(infos)
        self.reset_infos = [{} if self._several else _env_info(infos, i) for i in range(self.num_envs)]
        return self._rows(obs)

    def set_options(self, options: list[dict] | dict | None = None) -> None:
        """Set the options of the next reset: one dict for all envs; for native envs it may hold arrays, one value per env."""
        if options is not None and not isinstance(options, dict):
            raise HurtleError("set_options takes one dict for all envs; if values differ, pass arrays: {'size': array}.")
        self._next_options = options or None

    def step_async(self, actions: np.ndarray) -> None:
        """Store the actions for `step_wait`."""
        actions = np.asarray(actions, dtype=self.action_space.dtype)
        if self._first_action is not None:
            actions = actions + self._first_action
        if self._several:
            actions = actions.reshape(self.vec.num_envs, self.num_agents, *actions.shape[1:])
        self._actions = actions

    def step_wait(self) -> tuple[Any, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        """Step all envs; returns observations, rewards, dones and infos, all copies."""
        obs, rewards, terminated, truncated, infos = self.vec.step(self._actions)
        terminated, truncated = terminated.reshape(-1), truncated.reshape(-1)
        dones = terminated | truncated
        if self._several and "_final_obs" in infos:  # an env may end without setting each agent's flags
            dones |= np.repeat(infos["_final_obs"], self.num_agents)
        self._keep_masks(infos)
        others = {key: value for key, value in infos.items() if key not in _EPISODE_KEYS}
        if others and not self._several:
            rows = [_env_info(others, i) for i in range(self.num_envs)]
        else:
            rows = [{} for _ in range(self.num_envs)]  # separate dicts, since SB3's wrappers write into them
        for row in dones.nonzero()[0].tolist():
            self.reset_infos[row] = rows[row]  # SAME_STEP: the info belongs to the new episode, like the observation
            rows[row] = self._ended(infos, row)
            rows[row]["TimeLimit.truncated"] = bool(truncated[row] and not terminated[row])
        return self._rows(obs), np.array(rewards, np.float32).reshape(-1), dones, rows

    def close(self) -> None:
        """Close the vector env."""
        self.vec.close()

    def get_images(self) -> Sequence[np.ndarray | None]:
        """Render every env."""
        return list(self.vec.render() or [])

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """The attribute of each env; for native envs, a State field or a parameter."""
        vec = self.vec.unwrapped
        if attr_name == "render_mode":
            return [vec.render_mode for _ in self._get_indices(indices)]
        if attr_name == "action_masks" and self._action_mask is not None:  # sb3-contrib checks for masks this way
            return self.env_method("action_masks", indices=indices)
        try:
            return self._each(partial(vec.get_attr, attr_name), indices)
        except (UnknownNameError, EnvFailedError) as error:
            raise AttributeError(f"The envs have no attribute {attr_name!r}.") from error

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Set an attribute of each env."""
        envs = self._envs(self._get_indices(indices))
        self.vec.unwrapped.set_attr(attr_name, [value] * len(envs), **self._subset(envs))

    def env_method(self, method_name: str, *method_args: Any, indices: Any = None, **method_kwargs: Any) -> list[Any]:
        """Call a method of each env. Native envs have `render`, and `action_masks` if they have masks."""
        if method_name == "action_masks" and self._action_mask is not None:
            masks = self._action_mask.reshape(self.num_envs, -1)
            return [masks[row].copy() for row in self._get_indices(indices)]
        return self._each(partial(self.vec.unwrapped.call, method_name, *method_args, **method_kwargs), indices)

    def env_is_wrapped(self, wrapper_class: type[gymnasium.Wrapper], indices: Any = None) -> list[bool]:
        """True for `Monitor`, whose `episode` infos Hurtle's envs provide; other wrappers inside the envs are not detected."""
        ours = type(self.vec.unwrapped).__module__.startswith("hurtle.")
        return [ours and issubclass(wrapper_class, Monitor) for _ in self._get_indices(indices)]

    def _rows(self, obs: Any) -> Any:
        """A copy of the observations with one row per agent."""
        if isinstance(obs, dict):
            return {key: self._rows(value) for key, value in obs.items()}
        if isinstance(obs, tuple):
            return tuple(self._rows(value) for value in obs)
        return obs.reshape(self.num_envs, *obs.shape[2:]).copy() if self._several else obs.copy()

    def _keep_masks(self, infos: dict[str, Any]) -> None:
        self._action_mask = infos.get("action_mask")
        present = infos.get("agent_mask")
        if present is not None and not present.all():
            env, agent = np.argwhere(~present)[0]
            raise HurtleError(
                f"Agent {agent} of env {env} is absent, and SB3 would train on its empty row. "
                "SB3VecEnv needs envs whose agents are all present until the episode ends."
            )

    def _ended(self, infos: dict[str, Any], row: int) -> dict[str, Any]:
        """The info of a row whose episode ended with this step."""
        env, agent = divmod(row, self.num_agents)
        index = (env, agent) if self._several else env
        info = {} if self._several else _env_info(infos.get("final_info", {}), env)
        if "_final_obs" in infos and infos["_final_obs"][env]:
            info["terminal_observation"] = _entry(infos["final_obs"], index)
        source = infos if "_episode" in infos else infos.get("final_info", {})
        if "_episode" in source and source["_episode"][index]:
            stats = source["episode"]
            episode = {k: stats[k][index] for k in ("r", "l")} if self._several else _env_info(stats, env)
            info["episode"] = {"t": round(time.time() - self._began, 6), **episode}
            info["episode"] |= {"r": float(episode["r"]), "l": int(episode["l"])}
        return info

    def _each(self, ask: Callable[..., Sequence[Any]], indices: Any) -> list[Any]:
        """Query the envs of these rows once each; returns one answer per row."""
        rows = list(self._get_indices(indices))
        envs = self._envs(rows)
        answers = dict(zip(envs, ask(**self._subset(envs)), strict=True))
        return [answers[row // self.num_agents] for row in rows]

    def _envs(self, rows: Iterable[int]) -> list[int]:
        return sorted({row // self.num_agents for row in rows})

    def _subset(self, envs: list[int]) -> dict[str, Any]:
        return {} if len(envs) == self.vec.num_envs else {"indices": envs}


class ModulePolicy(ActorCriticPolicy):
    """SB3's actor-critic policy around a `TorchPolicy`; `sb3_policy` makes a subclass for a given module."""

    make_module: Callable[[spaces.Space, spaces.Space], nn.Module]

    def _build(self, lr_schedule: Callable[[float], float]) -> None:
        self.module = checked_policy(self.make_module(self.observation_space, self.action_space))
        self.optimizer = self.optimizer_class(self.parameters(), lr=lr_schedule(1), **self.optimizer_kwargs)  # type: ignore[call-arg]

    def forward(self, obs: Any, deterministic: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Actions, values and log-probabilities of a batch of observations."""
        distribution, value = evaluate(self.module, obs)
        actions = distribution.mode if deterministic else distribution.sample()
        return actions, value, per_row(distribution.log_prob(actions))

    def evaluate_actions(self, obs: Any, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Values, log-probabilities of the actions, entropies."""
        distribution, value = evaluate(self.module, obs)
        return value, per_row(distribution.log_prob(actions)), per_row(distribution.entropy())

    def predict_values(self, obs: Any) -> torch.Tensor:
        """The values `[batch, 1]`."""
        return evaluate(self.module, obs)[1]

    def get_distribution(self, obs: Any) -> Any:
        """The module's own `torch.distributions.Distribution`, not one of SB3's."""
        return evaluate(self.module, obs)[0]

    def _predict(self, observation: Any, deterministic: bool = False) -> torch.Tensor:
        distribution = self.get_distribution(observation)
        return distribution.mode if deterministic else distribution.sample()


def sb3_policy(module: nn.Module | Callable[[spaces.Space, spaces.Space], nn.Module]) -> type[ActorCriticPolicy]:
    """A policy class for `PPO(sb3_policy(Net), env)` or `A2C` that trains a torch module with `encode` and `decode`.

    Args:
        module: A class or function called with the observation space and the action space, or an existing module, which is
            trained in place. See `TorchPolicy` for its two methods.
    """
    if isinstance(module, nn.Module):
        existing = checked_policy(module)
        return type("ModulePolicy", (ModulePolicy,), {"make_module": staticmethod(lambda *spaces: existing)})
    return type("ModulePolicy", (ModulePolicy,), {"make_module": staticmethod(module)})


def _check(vec: Any) -> None:
    if not isinstance(vec, VectorEnv):
        raise HurtleError(f"SB3VecEnv takes a vector env such as hurtle.make_vec('cartpole', 8), got a {type(vec).__name__}.")
    mode = vec.metadata.get("autoreset_mode")
    if mode is not AutoresetMode.SAME_STEP:
        raise HurtleError(
            f"SB3VecEnv needs SAME_STEP autoreset, got {mode}: SB3 would train on the reset steps. "
            "Make the vector env with autoreset_mode='SameStep', the default of hurtle.make_vec."
        )
    if getattr(vec.unwrapped, "batch_size", vec.num_envs) != vec.num_envs:
        raise HurtleError("SB3 steps all envs at once, and this vector env is a pool; make it without batch_size.")
    if "cuda" in str(getattr(vec.unwrapped, "device", "cpu")):
        raise HurtleError("SB3 takes NumPy arrays, and this vector env is on the GPU; make it with device='cpu'.")


def _agent_space(space: spaces.Space) -> spaces.Space:
    """The space of one agent, from the space of all agents of an env."""
    if isinstance(space, spaces.Box):
        return spaces.Box(space.low[0], space.high[0], dtype=space.dtype.type)
    if isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim > 1:
        return spaces.MultiDiscrete(space.nvec[0], dtype=space.dtype.type, start=space.start[0])
    if isinstance(space, spaces.MultiDiscrete):
        return spaces.Discrete(int(space.nvec[0]), start=int(space.start[0]))
    raise HurtleError(f"With several agents, SB3VecEnv takes flat spaces (hurtle.emulate flattens them), got {space}.")


def _from_zero(space: spaces.Space) -> tuple[spaces.Space, Any]:
    """The space with actions counted from 0, as in SB3, and the original first action, or None if that is 0."""
    if not isinstance(space, spaces.Discrete | spaces.MultiDiscrete) or not np.any(space.start):
        return space, None
    if isinstance(space, spaces.Discrete):
        return spaces.Discrete(int(space.n)), space.start
    return spaces.MultiDiscrete(space.nvec, dtype=space.dtype.type), space.start


def _env_info(infos: dict[str, Any], env: int) -> dict[str, Any]:
    """The info of env `env`, from the infos of all envs; `infos["_key"]` marks the envs that have `key`."""
    info = {}
    for key, value in infos.items():
        is_mask = key.startswith("_") and key[1:] in infos
        if not is_mask and (f"_{key}" not in infos or infos[f"_{key}"][env]):
            info[key] = _env_info(value, env) if isinstance(value, dict) else _entry(value, env)
    return info


def _entry(values: Any, index: Any) -> Any:
    """A copy of one env's entry."""
    if isinstance(values, dict):
        return {key: _entry(value, index) for key, value in values.items()}
    if isinstance(values, tuple):
        return tuple(_entry(value, index) for value in values)
    entry = values[index]
    return entry.copy() if isinstance(entry, np.ndarray) else entry
