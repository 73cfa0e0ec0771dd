"""The settings of a run: every name flat and unique, the same in Python, in TOML files and on the command line.

defaults < preset of the env < TOML file < overrides → `Settings`, checked; unknown names raise with a suggestion.
Knows nothing of how a run is executed. Ranges and choices are annotations of the config fields.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import tyro

from hurtle.algorithms.algorithm import AlgorithmConfig, algorithm_names, allow_algorithm, find_algorithm
from hurtle.collect.curriculum import check_curriculum
from hurtle.errors import HurtleError, UnknownNameError
from hurtle.policies.policy_config import PolicyConfig
from hurtle.ranges import Range, at_least, between, positive
from hurtle.references import absolute_reference
from hurtle.runners.presets import kinds, preset_for, preset_of_kind
from hurtle.runners.values import fit
from hurtle.trust import SIGNATURE, check_code, is_signed

KIND_DEPENDS_ON = ("env_parameters", "num_envs", "num_steps", "recurrent", "priority_alpha")
"""Settings that the preset of a kind of envs depends on."""


@dataclass(frozen=True)
class TrainConfig:
    """What to train, for how long and where, and what to keep."""

    env: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ENV")] = ""
    """A name: cartpole, CartPole-v1, atari/Pong, my_env.py:MyEnv."""
    algorithm: str = "ppo"
    """ppo, a2c, impala, dqn, rainbow, apex, r2d2, pqn, sac, xqc, td3 or my_algo.py:Class."""
    total_steps: Annotated[int, at_least(1)] = 1_000_000
    """Steps in all, summed over envs and agents."""
    seed: Annotated[int, between(0, 2**63 - 1, "from 0 to 2**63 - 1")] = 0
    """The same seed gives the same run."""
    device: str = "cpu"
    """Where the networks are: cpu, cuda, cuda:1, auto."""
    stop_at_return: float | None = None
    """End when the last 100 episodes reach it."""
    fine_tune: str = ""
    """Begin with the weights of this run or checkpoint."""
    preset: bool = True
    """Start from settings that are known to suit ENV."""

    num_envs: Annotated[int, at_least(1)] = 8
    """Number of parallel envs, of each learner."""
    backend: Literal["auto", "native", "mujoco", "serial", "process", "ray"] = "auto"
    """auto, native, mujoco, serial, process or ray."""
    num_workers: Annotated[int | None, at_least(1)] = None
    """The most threads for native and MuJoCo envs, or processes for others."""
    pool_batch_size: Annotated[int | None, at_least(1)] = None
    """Act as soon as this many envs are ready."""
    step_timeout: Annotated[float | None, positive()] = None
    """Seconds a step may take (process and ray)."""
    restart_workers: bool = False
    """Replace dead or stuck workers (process and ray)."""
    env_parameters: dict[str, Any] = field(default_factory=dict)
    """Parameters of the env, such as gravity=1.6."""
    curriculum: dict[str, Any] = field(default_factory=dict)
    """Options to draw per episode, such as x=uniform:1:2."""
    unsafe: bool = False
    """Skip the bounds checks of native envs."""
    normalize_observations: bool = False
    """Scale to mean 0, variance 1 with running statistics."""
    observation_clip: Annotated[float, positive(allows_infinity=True)] = 10.0
    """Bound of normalized observations."""
    reward_mode: Literal["raw", "sign", "normalize"] = "raw"
    """raw, sign (-1, 0 or 1) or normalize."""
    reward_clip: Annotated[float, positive(allows_infinity=True)] = 10.0
    """Bound of normalized rewards."""

    eval_every: Annotated[int, at_least(0)] = 0
    """Steps between evaluations; 0: only at the end."""
    eval_episodes: Annotated[int, at_least(1)] = 100
    """Episodes of one evaluation."""
    eval_sampled: bool = False
    """Evaluate with sampled actions."""
    checkpoint_every: Annotated[int, at_least(0)] = 0
    """Steps between checkpoints; 0: ten in all, at most one a second."""
    keep_checkpoints: Annotated[int, at_least(1)] = 3
    """How many of the newest to keep."""
    runs: str = "runs"
    """Folder in which each run gets its own."""
    name: str = ""
    """Run folder name; default: env, algorithm, time."""
    progress: Literal["auto", "live", "plain", "quiet"] = "auto"
    """auto, live (dashboard), plain (lines) or quiet."""
    curve: bool = True
    """Draw curve.png at the end, which takes a second."""
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ("tensorboard",)
    """Any of tensorboard, wandb and mlflow."""

    runner: Literal["local", "async", "ray", "auto"] = "local"
    """local, async (collects while it learns), ray (on a cluster) or auto."""
    lag: Literal["auto", "0", "1", "free"] = "auto"
    """async, ray: updates that acting may be behind: 0, 1 or free; auto: 1, with ray free."""
    num_actors: Annotated[int | None, at_least(1)] = None
    """async: threads that collect, each from a part of the envs."""
    actor_devices: tuple[str, ...] = ()
    """async: where actors act, in turn; none: on device."""
    address: str = ""
    """ray: the cluster: auto, HOST:PORT or local (one of the run's own); none: what Ray finds, or local."""
    num_collectors: Annotated[int | None, at_least(1)] = None
    """ray: collectors, each with a part of the envs; none: as many as there is room for."""
    collector_cpus: Annotated[float, positive()] = 1.0
    """ray: CPUs that each collector asks for."""
    collector_gpus: Annotated[float, at_least(0)] = 0.0
    """ray: GPUs that each one asks for, and acts on; may be a fraction."""
    collector_timeout: Annotated[float, positive()] = 600.0
    """ray: seconds that a rollout may take before its collector is replaced."""
    collector_wait: Annotated[float, positive()] = 300.0
    """ray: seconds without any collector after which the run ends."""

    gear: Literal["auto", "native", "device", "general"] = "auto"
    """auto, native (compiled), device (GPU) or general."""
    compile: bool = False
    """Compile the networks with torch.compile."""
    precision: Literal["float32", "tf32", "bf16"] = "float32"
    """float32, or on a GPU tf32 or bf16."""
    threads: Annotated[int, at_least(1)] = 1
    """CPU threads of torch; more helps large networks."""
    num_learners: Annotated[int, at_least(1)] = 1
    """Processes that train together, each with num_envs and minibatch_size of its own."""

    @property
    def allowed_lag(self) -> str:
        """`lag`, or what the runner takes by itself: 0, 1 or free."""
        return self.lag if self.lag != "auto" else "free" if self.runner == "ray" else "1"


@dataclass(frozen=True)
class Settings:
    """All settings of a run, one part per concern."""

    train: TrainConfig
    policy: PolicyConfig
    algorithm: AlgorithmConfig


def make_settings(
    env: Any, overrides: Mapping[str, Any], config_file: str | Path | None = None, played: Any = None
) -> Settings:
    """Merge the sources of settings: defaults (the algorithm's own first) < preset < `config_file` < `overrides`.

    Args:
        env: A name, or a class or callable that makes envs; None: the name in the file.
        overrides: Flat settings, such as `{"clip_range": 0.1, "hidden_sizes": (64, 64)}`.
        config_file: A TOML file of settings; tables such as [train] or [ppo] are optional.
        played: What is played, where `env` is only its title.

    Raises:
        UnknownNameError: There is no such setting; suggests the closest name.
        HurtleError: A value has the wrong type or is out of range.
    """
    algorithm = overrides.get("algorithm")
    values = read_settings_file(config_file, algorithm) if config_file is not None else {}
    values |= check_settings(overrides, algorithm or values.get("algorithm", "ppo"))
    if env is not None:
        values["env"] = env if isinstance(env, str) else getattr(env, "__name__", type(env).__name__)
    if not values.get("env"):
        raise HurtleError("A run needs an env: a name such as cartpole, CartPole-v1 or my_env.py:MyEnv.")
    algorithm = values.get("algorithm", "ppo")
    if values.get("preset", True):
        found = values["env"] if env is None or isinstance(env, str) else env
        values = _preset(values, algorithm, found if played is None else played) | values
    return settings_from_dict({**find_algorithm(algorithm).defaults, **values})


def _preset(values: Mapping[str, Any], algorithm: str, env: Any) -> dict[str, Any]:
    """The settings that suit the env by its name, else by its kind, which is found only if something depends on it."""
    if named := preset_for(values["env"], algorithm):
        return named
    if all(preset_of_kind(kind, algorithm, values).keys() <= values.keys() for kind in kinds()):
        return {}
    from hurtle.runners.kinds import kind_of  # makes an env

    return preset_of_kind(kind_of(env, values.get("env_parameters", {})), algorithm, values)


def settings_from_dict(values: Mapping[str, Any]) -> Settings:
    """Settings from flat values; missing ones get their defaults, and no preset is used. Inverse of `settings_to_dict`.

    A run's signature is ignored.
    """
    values = {name: value for name, value in values.items() if name != SIGNATURE}
    algorithm = values.get("algorithm", "ppo")
    values = check_settings(values, algorithm)
    parts = [cls(**{name: values[name] for name in _types(cls) if name in values}) for cls in _parts(algorithm)]
    settings = Settings(*parts)
    pool = settings.train.pool_batch_size
    if pool is not None and pool > settings.train.num_envs:
        raise HurtleError(f"pool_batch_size must be at most num_envs={settings.train.num_envs}, got {pool}.")
    return settings


def settings_to_dict(settings: Settings) -> dict[str, Any]:
    """All settings, flat and in TOML's types: lists for tuples, "none" for None."""
    values = asdict(settings.train) | asdict(settings.policy) | asdict(settings.algorithm)
    for name, value in values.items():
        values[name] = "none" if value is None else list(value) if isinstance(value, tuple) else value
    return values


def check_settings_file(path: str | Path, given: Collection[str], trust: bool, algorithm: str | None = None) -> None:
    """Refuse code that a TOML file names, unless the user trusts it or it is the config.toml of this user's own run.

    Args:
        path: The file.
        given: The settings that the user gave, which override the file's.
        trust: Whether the user allows it to name code.
        algorithm: The algorithm that the user gave, if any.

    Raises:
        TrustError: Names the file and the code.
    """
    if not algorithm:
        allow_algorithm_of_file(path, trust)
    values, signature = read_settings_file(path, algorithm), _read_toml(path).get(SIGNATURE)
    trusted = trust or is_signed(values, signature)
    check_code(path, {name: value for name, value in values.items() if name not in given}, trusted, signature)


def allow_algorithm_of_file(path: str | Path, trust: bool) -> None:
    """Allow the algorithm that a TOML file names, see `allow_algorithm`: its settings cannot be read without its code."""
    content = _read_toml(path)
    tables = [content[name] for name in ("train", "policy") if isinstance(content.get(name), dict)]
    allow_algorithm(path, content | {name: value for table in tables for name, value in table.items()}, trust)


def read_settings_file(path: str | Path, algorithm: str | None = None) -> dict[str, Any]:
    """The flat settings of a TOML file, checked, without the tables of algorithms other than `algorithm` (None: the file's)."""
    where = f" in {path}"
    content = _read_toml(path)
    content.pop(SIGNATURE, None)
    names = algorithm_names()
    tables = {name: content.pop(name) for name in ("train", "policy", *names) if isinstance(content.get(name), dict)}
    algorithm = algorithm or content.get("algorithm") or tables.get("train", {}).get("algorithm", "ppo")
    values = check_settings(content, algorithm, where)
    for name, table in tables.items():
        if name in names and name != algorithm:
            check_settings(table, name, where)  # a typo is an error even where it has no effect
            continue
        if twice := sorted(values.keys() & table):
            raise HurtleError(f"{', '.join(twice)}{where}: set twice, the second time in [{name}].")
        values |= check_settings(table, algorithm, where)
    return values | {name: absolute_reference(values[name]) for name in ("env", "policy", "algorithm") if name in values}


def _read_toml(path: str | Path) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise HurtleError(f"Cannot read the settings file {path}: {error.strerror}.") from None
    except ValueError as error:
        raise HurtleError(f"{path} is not a TOML file: {error}.") from None


def setting_types(algorithm: str) -> dict[str, Any]:
    """Every setting of a run with `algorithm`, with the type of its value."""
    return {name: kind for cls in _parts(algorithm) for name, kind in _types(cls).items()}


def unknown_setting(name: str, algorithm: str, where: str = "", spelling: Callable[[str], str] = str) -> UnknownNameError:
    """The error for a setting that a run with `algorithm` does not have; `spelling` formats names as the user writes them."""
    owners = [other for other in algorithm_names() if name in _types(find_algorithm(other).config)]
    if owners:
        return UnknownNameError(f"{spelling(name)}{where} is a setting of {' and '.join(owners)}, not of {algorithm}.")
    near = difflib.get_close_matches(name, setting_types(algorithm), n=1)
    hint = f"Did you mean {spelling(near[0])}?" if near else "`hurtle train --help` lists them."
    return UnknownNameError(f"No setting {spelling(name)}{where}. {hint}")


def check_settings(
    given: Mapping[str, Any], algorithm: str, where: str = "", spelling: Callable[[str], str] = str
) -> dict[str, Any]:
    """The settings, converted to their fields' types and range-checked; `spelling` formats names as the user writes them."""
    types, ranges = setting_types(algorithm), _ranges(algorithm)
    values = {}
    for name, value in given.items():
        if name not in types:
            raise unknown_setting(name, algorithm, where, spelling)
        try:
            values[name] = fit(value, types[name])
            _check_value(name, values[name], ranges.get(name))
        except ValueError as error:
            raise HurtleError(f"{spelling(name)}{where} {error}") from None
    return values


def _check_value(name: str, value: Any, allowed: Range | None) -> None:
    if allowed is not None:
        allowed.check(value)
    elif isinstance(value, float) and math.isinf(value):
        raise ValueError(f"must be finite, got {value!r}.")
    if name == "curriculum":
        check_curriculum(value)
    if name == "device" and not (value in ("cpu", "cuda", "auto") or (value.startswith("cuda:") and value[5:].isdecimal())):
        raise ValueError(f"must be cpu, cuda, cuda:N (the number of a GPU) or auto, got {value!r}.")


def _parts(algorithm: str) -> tuple[type, ...]:
    config = find_algorithm(algorithm).config
    if taken := sorted(_types(config).keys() & (_types(TrainConfig).keys() | _types(PolicyConfig).keys())):
        raise HurtleError(f"{config.__name__}.{taken[0]} is already the name of a setting of every run: choose another one.")
    return TrainConfig, PolicyConfig, config


@cache
def _types(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _ranges(algorithm: str) -> dict[str, Range]:
    """The ranges annotated on fields, by name."""
    return {name: found for cls in _parts(algorithm) for name, found in _field_ranges(cls).items()}


@cache
def _field_ranges(cls: type) -> dict[str, Range]:
    found: dict[str, Range] = {}
    for name, kind in get_type_hints(cls, include_extras=True).items():
        for part in (kind, *get_args(kind)):  # also in a union: Annotated[float, positive()] | None
            if get_origin(part) is Annotated:
                found.update((name, mark) for mark in get_args(part)[1:] if isinstance(mark, Range))
    return found
