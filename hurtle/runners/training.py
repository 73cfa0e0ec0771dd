"""`hurtle.train`: from a name and a few words to a finished run, or on with one that was stopped.

env, words → settings (config.py) → Trainer (trainer.py) → Run. Imports torch only after the display says so.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hurtle.errors import CheckpointError, HurtleError, UnknownNameError
from hurtle.references import absolute_reference
from hurtle.runners.config import Settings, check_settings_file, make_settings, settings_from_dict, settings_to_dict
from hurtle.tracking.dashboard import Display, make_display
from hurtle.tracking.run_folder import RunFolder
from hurtle.trust import SIGNATURE, check_code

if TYPE_CHECKING:
    import gymnasium
    from torch import nn

    from hurtle.envs.registry import EnvLike
    from hurtle.runners.trainer import Callback, Run, Trainer


def train(
    env: EnvLike | gymnasium.vector.VectorEnv | None = None,
    algorithm: str | None = None,
    total_steps: int | None = None,
    device: str | None = None,
    seed: int | None = None,
    *,
    policy: nn.Module | type[nn.Module] | str | None = None,
    callbacks: Callback | Sequence[Callback] = (),
    config: str | Path | None = None,
    resume: str | Path | Run | None = None,
    trust: bool = False,
    **overrides: Any,
) -> Run:
    """Train a policy; everything about the run is kept in a folder of its own.

    Args:
        env: A native env's short name or class, a Gymnasium id, "my_env.py:MyEnv", a callable that makes an env, or a ready
            vector env.
        algorithm: "ppo" (default) or "a2c".
        total_steps: Steps in all, summed over envs and agents.
        device: Of the networks: "cpu" (default), "cuda", "cuda:1" or "auto".
        seed: The same seed gives the same run.
        policy: "auto", "mlp", "grid_cnn", "nature_cnn", "structured", "my_policy.py:MyPolicy", or your own `torch.nn.Module`
            with `encode` and `decode`: a module, which is trained in place, or a class, which is called with the two spaces.
        callbacks: One or several, called with the `Trainer` after every update; one that returns False ends the run.
        config: A TOML file of settings.
        resume: A run folder, "latest" or a checkpoint file: go on where it stopped. Overrides apply, such as more total_steps.
        trust: Run code (`my_env.py:MyEnv`) that the checkpoint of `resume` or the file of `config` names, also if it is none of
            your own runs; see `docs/training.md`. What you name yourself needs no trust.
        **overrides: Any setting, flat: `num_envs=16, clip_range=0.1, hidden_sizes=(64, 64)`; `hurtle train --help` lists them.

    Raises:
        UnknownNameError: A setting or env that does not exist; the message suggests the nearest.
        TrustError: `resume` or `config` names code that you have not allowed.
        HurtleError: Settings that contradict each other, the env or the machine.

    Example:
        >>> run = train("bandit", total_steps=20_000, progress="quiet", trackers=(), runs=tmp, eval_episodes=20)
        >>> run.mean_return > 0.9, run.stopped_by
        (True, 'total_steps')
    """
    env, policy = absolute_reference(env), absolute_reference(policy)
    given: dict[str, Any] = {"algorithm": algorithm, "total_steps": total_steps, "device": device, "seed": seed}
    callbacks = [callbacks] if callable(callbacks) else callbacks
    module = None if policy is None or isinstance(policy, str) else policy
    if policy is not None:
        given["policy"] = policy if module is None else "auto"  # never the name that a file has, which would be signed
    words = {**{word: value for word, value in given.items() if value is not None}, **overrides}
    if resume is not None:
        if config is not None:
            raise HurtleError(
                "resume goes on with the run's own settings; leave out config, and give what changes as overrides."
            )
        words |= {} if env is None else {"env": _title_of(env)}
        return _resume(resume, env, words, module, callbacks, trust)
    if config is not None:
        check_settings_file(config, words if env is None else {*words, "env"}, trust, algorithm)
    settings = make_settings(_title_of(env), words, config)
    with _display(settings) as display:
        from hurtle.runners.trainer import Trainer

        return Trainer(
            _with_name(settings, env), settings.train.env if env is None else env, module, callbacks, display=display
        ).run()


def _display(settings: Settings) -> Display:
    """The display of a run, which says already that torch is being imported, where it is not yet."""
    train = settings.train
    display = make_display(train.progress, f"{train.env} · {train.algorithm}", train.total_steps)
    if "torch" not in sys.modules:
        display.status("importing torch")
    return display


def _with_name(settings: Settings, env: Any) -> Settings:
    """The settings with a name by which another process finds a class or function, where it has one."""
    if env is None or isinstance(env, str):
        return settings
    from hurtle.envs.registry import name_of

    try:
        return replace(settings, train=replace(settings.train, env=name_of(env)))
    except UnknownNameError:  # the run says why at its end
        return settings


def _title_of(env: Any) -> str | None:
    """What the settings call an env: by its name, a vector env by its id or its class."""
    if env is None or isinstance(env, str):
        return env
    if isinstance(env, type) or not hasattr(env, "single_observation_space"):
        return getattr(env, "__name__", type(env).__name__)
    return env.spec.id if env.spec is not None else type(env.unwrapped).__name__


def _resume(
    source: str | Path | Run, env: Any, words: dict[str, Any], policy: Any, callbacks: Sequence[Callback], trust: bool
) -> Run:
    path = Path(source) if isinstance(source, str | Path) else source.path
    if path.is_file() and not (path.parent.parent / "config.toml").is_file():
        raise HurtleError(f"{path} is in no run folder: a run's checkpoints are RUN/checkpoints/step-….pt.")
    folder = RunFolder.open(path.parent.parent if path.is_file() else path)
    with _display(settings_from_dict({**folder.read_config(), **words})) as display:
        return _resumed(folder, path, env, words, policy, callbacks, trust, display).run()


def _resumed(
    folder: RunFolder,
    path: Path,
    env: Any,
    words: dict[str, Any],
    policy: Any,
    callbacks: Sequence[Callback],
    trust: bool,
    display: Display,
) -> Trainer:
    """The trainer as it was when it saved."""
    from hurtle.runners.restore import saved_settings
    from hurtle.runners.trainer import Trainer
    from hurtle.tracking.checkpoints import Checkpoints, load_checkpoint

    file = path if path.is_file() else Checkpoints(folder.checkpoints).latest()
    if file is None:
        raise CheckpointError(f"{folder.path} has no checkpoint to resume from.")
    saved = load_checkpoint(file)
    own, trusted = saved_settings(saved, trust)
    named = {word: value for word, value in settings_to_dict(own).items() if word not in words}
    check_code(file, named, trusted, saved["settings"].get(SIGNATURE))
    settings = settings_from_dict({**saved["settings"], **words})
    if saved["progress"]["steps"] >= settings.train.total_steps:
        done = saved["progress"]["steps"]
        raise HurtleError(f"{folder.path} is done: it has trained for {done:,} steps. To go on, ask for more: --total-steps.")
    if env is None and not saved["named_env"]:
        raise HurtleError(
            f"{folder.path} was trained on {settings.train.env}, which has no name: pass it, train(env, resume=…)."
        )
    if policy is None and not saved["named_policy"]:
        raise HurtleError(f"{folder.path} was trained with your own module: pass it in Python, train(policy=module, resume=…).")
    played = settings.train.env if env is None else env
    return Trainer(_with_name(settings, env), played, policy, callbacks, folder, saved, display=display)
