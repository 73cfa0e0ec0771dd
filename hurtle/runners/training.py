"""`hurtle.train`: from a name and a few settings to a finished run; can resume a stopped one.

env, settings → `Settings` (settings.py) → Trainer (trainer.py) → Run. Imports torch only after the display says so.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hurtle.algorithms.algorithm import algorithm_name, allow_algorithm, short_name
from hurtle.errors import CheckpointError, HurtleError, UnknownNameError
from hurtle.garbage import RARE_COLLECTIONS
from hurtle.references import absolute_reference
from hurtle.runners.settings import Settings, check_settings_file, make_settings, settings_from_dict
from hurtle.runners.torchrun import launched
from hurtle.tracking.dashboard import Display, make_display
from hurtle.tracking.run_folder import RunFolder
from hurtle.trust import SIGNATURE, check_code

if TYPE_CHECKING:
    import gymnasium
    from torch import nn

    from hurtle.contracts import Learner
    from hurtle.envs.registry import EnvLike
    from hurtle.runners.rank_group import Task
    from hurtle.runners.run import Run
    from hurtle.runners.trainer import Callback


def train(
    env: EnvLike | gymnasium.vector.VectorEnv | None = None,
    algorithm: str | type[Learner] | None = None,
    total_steps: int | None = None,
    device: str | None = None,
    seed: int | None = None,
    *,
    policy: nn.Module | type[nn.Module] | str | None = None,
    callbacks: Callback | Sequence[Callback] = (),
    config: str | Path | None = None,
    resume: str | Path | Run | None = None,
    until: int | None = None,
    trust: bool = False,
    **overrides: Any,
) -> Run:
    """Train a policy; everything about the run is kept in its own folder.

    Args:
        env: A native env's short name or class, a Gymnasium id, "my_env.py:MyEnv", a callable that makes an env, or an existing
            vector env.
        algorithm: "ppo" (default), "a2c", "my_algo.py:Reinforce", or your own `Learner` class; see docs/algorithms.md.
        total_steps: Steps in all, summed over envs and agents.
        device: Where the networks are: "cpu" (default), "cuda", "cuda:1" or "auto".
        seed: The same seed gives the same run.
        policy: "auto", "mlp", "grid_cnn", "nature_cnn", "structured", "my_policy.py:MyPolicy", or your own `torch.nn.Module`
            with `encode` and `decode`: a module, which is trained in place, or a class, which is called with the two spaces.
        callbacks: One or several, called with the `Trainer` after every update; returning False ends the run. Of several
            learners the first calls them.
        config: A TOML file of settings.
        resume: A run folder, "latest" or a checkpoint file: continue where it stopped. Overrides apply, such as total_steps.
        until: Pause after so many steps: saved, without the final evaluation and the curve; `resume` goes on. Unlike
            `total_steps` it changes nothing else, such as annealed rates.
        trust: Run code (`my_env.py:MyEnv`) that the checkpoint of `resume` or the file of `config` names, even if it is not one
            of your own runs; see `docs/training.md`. What you name yourself needs no trust.
        **overrides: Any setting, flat: `num_envs=16, clip_range=0.1, hidden_sizes=(64, 64)`; `hurtle train --help` lists them.

    Raises:
        UnknownNameError: There is no such setting or env; suggests the closest name.
        TrustError: `resume` or `config` names code that you have not allowed.
        HurtleError: Settings conflict with each other, the env or the machine.

    Example:
        >>> run = train("bandit", total_steps=20_000, progress="quiet", trackers=(), runs=tmp, eval_episodes=20)
        >>> run.mean_return > 0.9, run.stopped_by
        (True, 'total_steps')
    """
    if until is not None and (isinstance(until, bool) or not isinstance(until, int) or until < 1):
        raise HurtleError(f"until must be a whole number of steps of at least 1, got {until!r}.")
    env, policy = absolute_reference(env), absolute_reference(policy)
    algorithm = None if algorithm is None else algorithm_name(algorithm)
    given: dict[str, Any] = {"algorithm": algorithm, "total_steps": total_steps, "device": device, "seed": seed}
    callbacks = [callbacks] if callable(callbacks) else callbacks
    module = None if policy is None or isinstance(policy, str) else policy
    if policy is not None:
        given["policy"] = policy if module is None else "auto"  # never a name from a file, which would then be signed
    values = {**{name: value for name, value in given.items() if value is not None}, **overrides}
    if resume is not None:
        if config is not None:
            raise HurtleError("resume continues with the run's own settings; leave out config, and pass changes as overrides.")
        values |= {} if env is None else {"env": _title_of(env)}
        return _resume(resume, env, values, module, callbacks, trust, until)
    if config is not None:
        check_settings_file(config, values if env is None else {*values, "env"}, trust, algorithm)
    settings = make_settings(_title_of(env), values, config, played=env)
    with _display(settings) as display:
        with RARE_COLLECTIONS:
            from hurtle.runners.rank_group import Task, train_ranks

        played = settings.train.env if env is None else env
        return train_ranks(Task(_with_name(settings, env), played, module, algorithm), callbacks, display, until)


def _display(settings: Settings) -> Display:
    """The display of a run; it already shows that torch is being imported."""
    train = settings.train
    progress = "quiet" if launched().rank else train.progress  # of torchrun's processes the first one reports
    display = make_display(progress, f"{train.env} · {short_name(train.algorithm)}", train.total_steps)
    if "torch" not in sys.modules:
        display.status("importing torch")
    return display


def _with_name(settings: Settings, env: Any) -> Settings:
    """The settings with the name by which another process can find a class or function, if it has one."""
    if env is None or isinstance(env, str):
        return settings
    from hurtle.envs.registry import name_of

    try:
        return replace(settings, train=replace(settings.train, env=name_of(env)))
    except UnknownNameError:  # the run reports why at its end
        return settings


def _title_of(env: Any) -> str | None:
    """The name of an env in the settings; for a vector env its id or class."""
    if env is None or isinstance(env, str):
        return env
    if isinstance(env, type) or not hasattr(env, "single_observation_space"):
        return getattr(env, "__name__", type(env).__name__)
    return env.spec.id if env.spec is not None else type(env.unwrapped).__name__


def _resume(
    source: str | Path | Run,
    env: Any,
    values: dict[str, Any],
    policy: Any,
    callbacks: Sequence[Callback],
    trust: bool,
    until: int | None,
) -> Run:
    path = Path(source) if isinstance(source, str | Path) else source.path
    if path.is_file() and not (path.parent.parent / "config.toml").is_file():
        raise HurtleError(f"{path} is not in a run folder: a run's checkpoints are RUN/checkpoints/step-….pt.")
    folder = RunFolder.open(path.parent.parent if path.is_file() else path)
    config = folder.read_config()
    if "algorithm" not in values:
        allow_algorithm(folder.path / "config.toml", config, trust)
    with _display(settings_from_dict({**config, **values})) as display:
        from hurtle.runners.rank_group import train_ranks

        return train_ranks(_resumed(folder, path, env, values, policy, trust, until), callbacks, display, until)


def _resumed(
    folder: RunFolder,
    path: Path,
    env: Any,
    values: dict[str, Any],
    policy: Any,
    trust: bool,
    until: int | None,
) -> Task:
    """What is to be continued."""
    from hurtle.deploy.restore import is_trusted
    from hurtle.runners.rank_group import Task
    from hurtle.tracking.checkpoints import Checkpoints, load_checkpoint

    file = path if path.is_file() else Checkpoints(folder.checkpoints).latest()
    if file is None:
        raise CheckpointError(f"{folder.path} has no checkpoint to resume from.")
    saved = load_checkpoint(file)
    named = {name: value for name, value in saved["settings"].items() if name not in values}
    check_code(file, named, is_trusted(saved, trust), saved["settings"].get(SIGNATURE))
    if "algorithm" not in values:
        allow_algorithm(file, saved["settings"], trust)
    settings = settings_from_dict({**saved["settings"], **values})
    if saved["progress"]["steps"] >= settings.train.total_steps:
        done = saved["progress"]["steps"]
        raise HurtleError(f"{folder.path} is done after {done:,} steps. To continue, ask for more with --total-steps.")
    if until is not None and saved["progress"]["steps"] >= until:
        raise HurtleError(f"{folder.path} has {saved['progress']['steps']:,} steps: until={until} must be more.")
    if env is None and not saved["named_env"]:
        raise HurtleError(
            f"{folder.path} was trained on {settings.train.env}, which has no name: pass it, train(env, resume=…)."
        )
    if policy is None and not saved["named_policy"]:
        raise HurtleError(f"{folder.path} was trained with your own module: pass it in Python, train(policy=module, resume=…).")
    played = settings.train.env if env is None else env
    return Task(_with_name(settings, env), played, policy, values.get("algorithm"), folder.path, file, saved)
