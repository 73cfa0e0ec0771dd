"""`make_vec`: makes a vector env; picks the back end and validates the request."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import sys
from collections.abc import Callable, Sequence
from copy import copy as copied
from functools import partial
from typing import Any

from gymnasium.envs.registration import EnvSpec as GymnasiumSpec
from gymnasium.vector import AutoresetMode

from hurtle.envs.extras import load_module
from hurtle.envs.packages import make_gymnasium
from hurtle.envs.registry import EnvLike, make, resolve, unchecked
from hurtle.errors import HurtleError, UnknownNameError, did_you_mean
from hurtle.mujoco.task import RENDER_MODES, Task
from hurtle.native.batch_arrays import batch_bytes, check_fits
from hurtle.native.drawn import drawing
from hurtle.native.env import Env, EnvSpec
from hurtle.references import is_reference
from hurtle.vector.drawn_options import with_drawn_options
from hurtle.vector.options import VecOptions, autoreset_mode_of, check_count
from hurtle.vector.vec_env import VecEnv

BACKENDS = ("auto", "native", "mujoco", "serial", "process", "ray")


def make_vec(
    env: EnvLike,
    num_envs: int,
    *,
    backend: str = "auto",
    num_workers: int | None = None,
    batch_size: int | None = None,
    device: str = "cpu",
    seed: int = 0,
    autoreset_mode: AutoresetMode | str = AutoresetMode.SAME_STEP,
    copy: bool = False,
    order: str = "ready",
    emulate: bool = False,
    check: bool = True,
    step_timeout: float | None = None,
    start_timeout: float = 300.0,
    restart_workers: bool = False,
    render_mode: str | None = None,
    debug: bool = False,
    unsafe: bool = False,
    drawn: Sequence[str] = (),
    **parameters: Any,
) -> VecEnv:
    """Make a vector env.

    Args:
        env: A native env's short name ("cartpole") or class, "my_env.py:MyEnv", a Gymnasium id ("CartPole-v1"), or a callable
            that makes a Gymnasium or PettingZoo env; lambdas and closures work with every back end.
        num_envs: Number of envs; env i behaves exactly like a single env reset with `seed + i`.
        backend: "native" for native envs; "mujoco" for Gymnasium's v5 MuJoCo tasks and your own `hurtle.mujoco.Task`;
            "serial", "process" (workers with shared memory) or "ray" for Python envs; "auto" uses native or mujoco if
            possible, else measures the env briefly, chooses and reports why.
        num_workers: The most threads for native and MuJoCo envs, else worker processes; None chooses the best number.
        batch_size: Less than num_envs makes a pool: `recv` returns this many envs, the first that are ready.
        device: "cpu", or "cuda" to keep native envs, observations and rewards on the GPU as torch tensors.
        seed: Base seed of the first reset, if that is called without one.
        autoreset_mode: SAME_STEP (default), NEXT_STEP, or DISABLED (Python envs only).
        copy: Return copies; by default the next step reuses the returned arrays.
        order: Order of a pool: "ready" returns the first envs that are done, "fair" those sent longest ago.
        emulate: Return flat observations and take flat actions, like `hurtle.emulate`; `vec.unflatten` restores the structure.
        check: Check the first reset and steps against the spaces.
        step_timeout: Seconds that one reset or step may take before it is an error (process and ray); None waits forever.
        start_timeout: Seconds that the env's constructor may take (process and ray).
        restart_workers: Replace dead or stuck workers: their envs come back reset, marked truncated (process and ray).
        render_mode: "rgb_array", "ansi" or None; for Gymnasium envs, whatever they support.
        debug: Run the code of a native env uncompiled.
        unsafe: Compile a native env without bounds checks; an index out of bounds then corrupts memory.
        drawn: Options to draw whenever an episode begins, from the ranges that `vec.set_ranges` sets; see docs/curricula.md.
        **parameters: Parameters of the env, such as `gravity=1.6`.

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
    kind = str(device).split(":")[0]
    if kind not in ("cpu", "cuda"):
        raise HurtleError(f"device must be 'cpu' or 'cuda', got {device!r}.")
    _refuse_misspelt(env, parameters)
    found = resolve(env, parameters)
    found = unchecked(found) if unsafe else found
    if not isinstance(found, Env) and backend == "native":
        raise HurtleError(f"backend='native' is for native envs, and {env!r} is not one; leave it out, or see `hurtle envs`.")
    if isinstance(found, Env) and backend not in ("auto", "native") and EnvSpec.of(found).num_agents > 1:
        raise HurtleError(f"{env!r} is a native multi-agent env: backend='native' runs it, {backend!r} does not.")
    if isinstance(found, Env) and backend in ("auto", "native"):
        python_only = {
            "order": order != "ready",
            "emulate": emulate,
            "step_timeout": step_timeout is not None,
            "restart_workers": restart_workers,
        }
        if asked := [name for name, given in python_only.items() if given]:
            raise HurtleError(f"Native envs do not take {' and '.join(asked)}: leave it out.")
        settings = {"seed": seed, "autoreset_mode": autoreset_mode, "copy": copy, "render_mode": render_mode}
        found = drawing(found, drawn) if drawn else found
        return _native(found, num_envs, kind, device, num_workers, batch_size, debug, settings)
    if kind == "cuda":
        raise HurtleError(f"device='cuda' runs native envs; {env!r} with backend={backend!r} runs on the CPU.")
    if backend in ("auto", "mujoco"):
        obstacles = {
            f"batch_size={batch_size}": batch_size not in (None, num_envs),
            f"autoreset_mode={autoreset_mode!r}": autoreset_mode_of(autoreset_mode) is AutoresetMode.DISABLED,
            f"order={order!r}": order != "ready",
            "emulate": emulate,
            "step_timeout": step_timeout is not None,
            "restart_workers": restart_workers,
            "debug": debug,
            "drawn": bool(drawn),
        }
        settings = {"seed": seed, "autoreset_mode": autoreset_mode, "copy": copy, "render_mode": render_mode}
        made = _mujoco(
            env, num_envs, found, backend, num_workers, [name for name, given in obstacles.items() if given], settings
        )
        if made is not None:
            return made
    if debug:
        raise HurtleError("debug=True is for native envs with backend='native'; Python envs are plain Python already.")
    options = VecOptions(
        num_envs,
        num_envs if batch_size is None else batch_size,
        num_workers,
        seed,
        autoreset_mode_of(autoreset_mode),
        copy,
        order,
        emulate,
        check,
        step_timeout,
        start_timeout,
        restart_workers,
    )
    maker = _maker(env, found, parameters, render_mode)
    if drawn:
        maker = partial(with_drawn_options, maker, tuple(drawn))
    if backend == "auto":
        from hurtle.vector.backend_choice import choose

        backend, options, why = choose(maker, options)
        if why:
            print(f"hurtle: {why}", file=sys.stderr)
    return _python(maker, backend, options)


def _refuse_misspelt(env: EnvLike, parameters: dict[str, Any]) -> None:
    """Refuse env parameters that look like misspelt arguments of `make_vec`, unless the env takes them."""
    own = [name for name in inspect.signature(make_vec).parameters if name not in ("env", "parameters")]
    known: Any = ()
    if callable(env):
        with contextlib.suppress(ValueError, TypeError):  # built-ins have no signature
            known = inspect.signature(env).parameters
    for name in parameters:
        if name not in known and difflib.get_close_matches(name, own, cutoff=0.85):
            raise UnknownNameError(f"make_vec has no argument {name!r}. {did_you_mean(name, own)}")


def _native(
    env: Env,
    num_envs: int,
    kind: str,
    device: str,
    num_workers: int | None,
    batch_size: int | None,
    debug: bool,
    settings: dict[str, Any],
) -> VecEnv:
    if kind == "cuda":
        from hurtle.vector.cuda_vec import CudaVecEnv

        if debug:
            raise HurtleError("debug=True runs on the CPU; leave out device='cuda'.")
        if batch_size not in (None, num_envs):
            raise HurtleError("batch_size: envs on the GPU step together; leave it out.")
        return CudaVecEnv(env, num_envs, device=device, **settings)
    from hurtle.vector.native_vec import NativeVecEnv

    check_count("num_envs", num_envs)
    check_fits(f"num_envs={num_envs}", batch_bytes(EnvSpec.of(env), num_envs))
    if batch_size in (None, num_envs):
        return NativeVecEnv(env, num_envs, num_workers=num_workers, debug=debug, **settings)
    from hurtle.vector.native_pool import NativePool

    return NativePool(env, num_envs, batch_size, num_workers=num_workers, debug=debug, **settings)


def _mujoco(
    env: EnvLike,
    num_envs: int,
    found: Any,
    backend: str,
    num_workers: int | None,
    obstacles: list[str],
    settings: dict[str, Any],
) -> VecEnv | None:
    """A vector of a MuJoCo task; with backend="auto", None if the env is none, or if its vector does not take the settings."""
    task, spec = task_of(found)
    if backend == "auto" and (task is None or obstacles or settings["render_mode"] not in (None, *RENDER_MODES)):
        return None
    if task is None:
        raise HurtleError(
            f"backend='mujoco' is for Gymnasium's v5 MuJoCo tasks without more wrappers, and for a hurtle.mujoco.Task of your "
            f"own; {env!r} is neither: leave it out."
        )
    if obstacles:
        raise HurtleError(f"backend='mujoco' does not take {' and '.join(obstacles)}: leave it out, or use backend='process'.")
    from hurtle.vector.mujoco_vec import MujocoVecEnv

    load_module("mujoco", spec.id if spec is not None else type(task).__name__)
    return MujocoVecEnv(task, num_envs, num_workers=num_workers, spec=spec, **settings)


def task_of(found: Any) -> tuple[Task | None, Any]:
    """The MuJoCo task that `resolve` found, and Gymnasium's spec of it."""
    if not isinstance(found, partial):
        return None, None
    if found.args and isinstance(found.args[0], Task):
        return found.args[0], None
    spec = found.args[0] if found.func is make_gymnasium else None
    if not isinstance(spec, GymnasiumSpec):
        return None, None
    from hurtle.mujoco import gymnasium_tasks

    return gymnasium_tasks.task_of(spec, found.keywords), spec


def _maker(env: EnvLike, found: Any, parameters: dict[str, Any], render_mode: str | None) -> Callable[[], Any]:
    """A callable that makes one env, here or in another process."""
    rendered: dict[str, Any] = {} if render_mode is None else {"render_mode": render_mode}
    if isinstance(found, Env) and found.unsafe:
        rendered["unsafe"] = True
    if isinstance(env, str) and (isinstance(found, Env) or is_reference(env)):
        return partial(make, env, **rendered, **parameters)  # by name: the file is loaded where the env is made
    if isinstance(found, Env):
        return partial(make, found, **rendered)
    if isinstance(found, partial) and found.func is make_gymnasium:
        # The vector env does these checks itself; two wrappers fewer on every step.
        spec = copied(found.args[0])
        if isinstance(spec, GymnasiumSpec):
            spec.order_enforce = False
        return partial(make_gymnasium, spec, disable_env_checker=True, **rendered, **found.keywords)
    return partial(found, **rendered)


def _python(maker: Callable[[], Any], backend: str, options: VecOptions) -> VecEnv:
    if backend == "serial":
        asked = {
            "num_workers": options.num_workers not in (None, 1),
            "step_timeout": options.step_timeout is not None,
            "restart_workers": options.restart_workers,
        }
        if unfit := [name for name, given in asked.items() if given]:
            raise HurtleError(f"serial steps all envs in this process: leave out {' and '.join(unfit)}, or use 'process'.")
        from hurtle.vector.serial_vec import SerialVecEnv

        return SerialVecEnv(maker, options)
    if backend == "process":
        from hurtle.vector.process_vec import ProcessVecEnv

        return ProcessVecEnv(maker, options)
    from hurtle.vector.ray_vec import RayVecEnv

    return RayVecEnv(maker, options)
