"""Writes the functions that connect one env's methods to the engine core: constants, clearing, masks, action checks.

spec → Python text. It defines the names that `pasted.py` declares for the core.
"""

from __future__ import annotations

import numpy as np
from gymnasium import spaces

from hurtle.native.drawn import drawn_source
from hurtle.native.env import EnvSpec


def adapter_source(spec: EnvSpec, zero_obs: bool = True, has_fault: bool = False) -> str:
    """The constants and adapters of one env, as the text of module-level code.

    Args:
        spec: The checked env.
        zero_obs: Whether the observation must be zeroed before the author's `observe` writes to it.
        has_fault: Whether the author's functions take `arrays.fault`, where an index out of bounds is reported.
    """
    fault = ", arrays.fault" if has_fault else ""
    parts = [
        f"AGENTS = {spec.num_agents}",
        f"OBS_SIZE = {spec.obs_size}",
        f"OBS_DTYPE = np.dtype(np.{spec.observation_space.dtype})",
        f"OBS_IS_ZEROED = {zero_obs}",
        "OBS_BYTES = OBS_SIZE * OBS_DTYPE.itemsize",
        _clear_state(spec),
        _agents(spec),
        _calls(spec, fault),
        _present(spec, fault),
        _zero_obs(zero_obs),
        _mask(spec, fault),
        _metrics(spec),
        _actions(spec),
    ]
    return "\n\n".join(parts) + "\n"


def _function(header: str, *lines: str) -> str:
    body = "\n".join(f"    {line}" for line in lines) or "    pass"
    return f"@jit\ndef {header}:\n{body}\n"


def _loops(shape: tuple[int | str, ...], inner: str) -> list[str]:
    """Nested loops k0, k1, … over a shape around one line."""
    lines = [f"{'    ' * d}for k{d} in range({n}):" for d, n in enumerate(shape)]
    return [*lines, "    " * len(shape) + inner]


def _clear_state(spec: EnvSpec) -> str:
    lines: list[str] = []
    for name, kind in spec.fields.items():
        if name in spec.runtime_parameters:
            continue
        zero = "False" if kind.dtype.kind == "b" else "f4(0.0)" if kind.dtype.kind == "f" else "0"
        if kind.shape:
            index = ", ".join(f"k{d}" for d in range(len(kind.shape)))
            lines += _loops(kind.shape, f"env.{name}[{index}] = {zero}")
        else:
            lines.append(f"env.{name} = {zero}")
    return _function("clear_state(env)", *lines, *drawn_source(spec))


def _agents(spec: EnvSpec) -> str:
    start = ["env._start[agent] = env._steps"] if spec.num_agents > 1 else []
    return _function("begin_agent(env, agent)", "env._return[agent] = f4(0.0)", *start)


def _calls(spec: EnvSpec, fault: str) -> str:
    step = "action, reward, terminated" if spec.num_agents > 1 else "action"
    return (
        _function("call_reset(env, arrays)", f"env_reset(env, env{fault})")
        + _function(f"call_step(env, {step}, arrays)", f"return env_step(env, {step}, env{fault})")
        + _function("call_observe(env, obs, arrays)", f"env_observe(env, obs{fault})")
    )


def _present(spec: EnvSpec, fault: str) -> str:
    if not spec.has_present:
        return _function("is_present(env, agent)", "return True") + _function("write_present(env, present, arrays)")
    return _function("is_present(env, agent)", "return env._present[agent] != 0") + _function(
        "write_present(env, present, arrays)",
        "for a in range(AGENTS):",
        "    present[a] = True",
        f"env_present(env, present{fault})",
        "for a in range(AGENTS):",
        "    if present[a] and env._present[a] == 0:",
        "        begin_agent(env, a)",
        "    env._present[a] = present[a]",
    )


def _zero_obs(zero_obs: bool) -> str:
    return _function("zero_obs(obs)", *(["for k in range(OBS_SIZE):", "    obs[k] = 0"] if zero_obs else []))


def _mask(spec: EnvSpec, fault: str) -> str:
    if not spec.has_mask:
        return _function("write_mask(env, mask, arrays)")
    size = int(np.prod(spec.mask_shape))
    fill = (f"for k in range({size}):", "    mask[k] = True")
    return _function("write_mask(env, mask, arrays)", *fill, f"env_mask(env, mask{fault})")


def _metrics(spec: EnvSpec) -> str:
    lines = [f"metrics[{m}] = env.{name}" for m, name in enumerate(spec.env.metrics)]
    return _function("write_metrics(env, metrics)", *lines)


def _actions(spec: EnvSpec) -> str:
    """`action_is_legal` for one env's action and `sample_action` for a random one."""
    space, shape = spec.action_space, (*spec.agents_shape, *spec.action_shape)
    index = ", ".join(f"k{d}" for d in range(len(shape)))
    one = f"action[{index}]" if shape else "action"
    out = f"actions[{', '.join(['i', *([index] if index else [])])}]"
    last = f"k{len(shape) - 1}"
    if isinstance(space, spaces.Box):
        bad = f"{one} != {one}"  # NaN: in no Box, and clipping does not remove it
        low = np.where(np.isfinite(space.low), space.low, -1.0)  # without a bound, sample up to ±1
        width = np.where(np.isfinite(space.high), space.high, 1.0) - low
        tables = f"ACTION_LOW = np.array({low.ravel().tolist()}, np.float32)\n"
        tables += f"ACTION_RANGE = np.array({width.ravel().tolist()}, np.float32)\n\n\n"
        value = f"ACTION_LOW[flat % {space.low.size}] + ACTION_RANGE[flat % {space.low.size}] * (f4(bits) * f4(2.0**-32))"
    elif isinstance(space, spaces.MultiDiscrete):
        tables = f"NVEC = np.array({space.nvec.tolist()}, np.int64)\nSTART = np.array({space.start.tolist()}, np.int64)\n\n\n"
        bad = f"{one} < START[{last}] or {one} >= START[{last}] + NVEC[{last}]"
        value = f"START[{last}] + np.int64((bits * U64(NVEC[{last}])) >> U64(32))"
    else:
        first, n = int(space.start), int(space.n)  # type: ignore[attr-defined]
        tables = ""
        bad = f"{one} < {first} or {one} >= {first + n}"
        value = f"{first} + np.int64((bits * U64({n})) >> U64(32))"
    depth = "    " * len(shape)
    legal = [*_loops(shape, f"if {bad}:"), f"{depth}    return False", "return True"]
    count = int(np.prod(shape)) if shape else 1
    sample = ["flat = 0", *_loops(shape, f"bits = action_bits(seed, step * {count} + flat)")]
    sample += [f"{depth}{out} = {value}", f"{depth}flat += 1"]
    return tables + _function("action_is_legal(action)", *legal) + _function("sample_action(seed, step, actions, i)", *sample)
