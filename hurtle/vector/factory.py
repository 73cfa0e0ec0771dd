"""`make_vec`: the one way to many environments; picks the back end and checks that the request makes sense."""

from __future__ import annotations

from typing import Any

from gymnasium.vector import AutoresetMode, VectorEnv

from hurtle.envs.registry import EnvLike, resolve
from hurtle.errors import HurtleError, UnknownNameError, did_you_mean
from hurtle.native.env import Env

BACKENDS = ("auto", "native")


def make_vec(
    env: EnvLike,
    num_envs: int,
    *,
    backend: str = "auto",
    num_workers: int | None = None,
    device: str = "cpu",
    seed: int = 0,
    autoreset_mode: AutoresetMode | str = AutoresetMode.SAME_STEP,
    copy: bool = False,
    render_mode: str | None = None,
    debug: bool = False,
    **parameters: Any,
) -> VectorEnv:
    """Make a vector of environments.

    Args:
        env: A native env's short name ("cartpole") or class, or "my_env.py:MyEnv".
        num_envs: How many; env i behaves exactly like a single env reset with `seed + i`.
        backend: "auto" or "native".
        num_workers: Threads; None uses all cores where that is faster, one where it is not.
        device: "cpu", or "cuda" to keep envs, observations and rewards on the GPU as torch tensors.
        seed: Base seed of the first reset without one.
        autoreset_mode: SAME_STEP (default) or NEXT_STEP.
        copy: Return copies; by default the arrays returned are reused by the next step.
        render_mode: "rgb_array", "ansi" or None.
        debug: Run the author's code uncompiled.
        **parameters: The env's own parameters, such as `gravity=1.6`.

    Example:
        >>> import numpy as np
        >>> vec = make_vec("cartpole", num_envs=4)
        >>> obs, infos = vec.reset(seed=0)
        >>> obs, rewards, terminated, truncated, infos = vec.step(np.array([0, 1, 0, 1]))
        >>> rewards
        array([1., 1., 1., 1.], dtype=float32)
    """
    if backend not in BACKENDS:
        raise UnknownNameError(f"No back end {backend!r}. {did_you_mean(backend, BACKENDS)}")
    found = resolve(env, parameters)
    if not isinstance(found, Env):
        raise HurtleError(
            f"make_vec takes native envs, and {env!r} is none; `hurtle envs` lists them. "
            "For Gymnasium's own vector envs use gymnasium.make_vec."
        )
    settings: dict[str, Any] = {
        "seed": seed,
        "autoreset_mode": autoreset_mode,
        "copy": copy,
        "render_mode": render_mode,
    }
    kind = str(device).split(":")[0]
    if kind == "cuda":
        from hurtle.vector.cuda import CudaVecEnv

        if debug:
            raise HurtleError("debug=True runs on the CPU; leave out device='cuda'.")
        return CudaVecEnv(found, num_envs, device=device, **settings)
    if kind != "cpu":
        raise HurtleError(f"device must be 'cpu' or 'cuda', got {device!r}.")
    from hurtle.vector.native import NativeVecEnv

    return NativeVecEnv(found, num_envs, num_workers=num_workers, debug=debug, **settings)
