"""The settings of a run: every word flat and unique, the same in Python, in TOML files and on the command line.

defaults < preset of the env < TOML file < overrides → `Settings`, checked; unknown words raise with a suggestion.
Knows nothing of how a run is carried out. Algorithms and policies own their configs; they are imported when first needed.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import tyro

from hurtle.errors import HurtleError, UnknownNameError, did_you_mean
from hurtle.references import absolute_reference
from hurtle.runners.presets import preset_for
from hurtle.runners.values import fit
from hurtle.trust import SIGNATURE, check_code, is_signed

if TYPE_CHECKING:
    from hurtle.algorithms.configs import A2CConfig, PPOConfig
    from hurtle.policies.config import PolicyConfig

ALGORITHMS = {"ppo": "hurtle.algorithms.configs:PPOConfig", "a2c": "hurtle.algorithms.configs:A2CConfig"}
_POLICY = "hurtle.policies.config:PolicyConfig"


@dataclass(frozen=True)
class TrainConfig:
    """What is trained, for how long and where, and what is kept of it."""

    env: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ENV")] = ""
    """A name: cartpole, CartPole-v1, atari/Pong, my_env.py:MyEnv."""
    algorithm: str = "ppo"
    """ppo or a2c; decides which settings there are."""
    total_steps: int = 1_000_000
    """Steps in all, summed over envs and agents."""
    seed: int = 0
    """The same seed gives the same run."""
    device: str = "cpu"
    """Of the networks: cpu, cuda, cuda:1 or auto."""
    stop_at_return: float | None = None
    """End when the last 100 episodes reach it."""
    fine_tune: str = ""
    """Begin with the weights of this run or checkpoint."""
    preset: bool = True
    """Use the settings known to be good for ENV."""

    num_envs: int = 8
    """Copies of the env that run side by side."""
    backend: Literal["auto", "native", "serial", "process", "ray"] = "auto"
    """auto, native, serial, process or ray."""
    num_workers: int | None = None
    """Threads or processes that step the envs."""
    pool_batch_size: int | None = None
    """Act on the first so many envs that are ready."""
    step_timeout: float | None = None
    """Seconds a step may take (process and ray)."""
    restart_workers: bool = False
    """Replace dead or stuck workers (process and ray)."""
    env_parameters: dict[str, Any] = field(default_factory=dict)
    """The env's own, such as gravity=1.6."""
    unsafe: bool = False
    """Leave out the bounds checks of native envs."""
    normalize_observations: bool = False
    """To mean 0 and variance 1, as seen so far."""
    observation_clip: float = 10.0
    """Bound of normalized observations."""
    reward_mode: Literal["raw", "sign", "normalize"] = "raw"
    """raw, sign (-1, 0 or 1) or normalize."""
    reward_clip: float = 10.0
    """Bound of normalized rewards."""

    eval_every: int = 0
    """Evaluate after so many steps; 0: at the end only."""
    eval_episodes: int = 100
    """Episodes of one evaluation."""
    eval_sampled: bool = False
    """Evaluate with sampled actions."""
    checkpoint_every: int = 0
    """Save after so many steps; 0: ten times in all, but not more than once a second."""
    keep_checkpoints: int = 3
    """How many of the newest to keep."""
    runs: str = "runs"
    """Folder in which each run gets its own."""
    name: str = ""
    """Of the run's folder; else env, algorithm, time."""
    progress: Literal["auto", "live", "plain", "quiet"] = "auto"
    """auto, live (dashboard), plain (lines) or quiet."""
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ("tensorboard",)
    """Of tensorboard, wandb and mlflow."""

    gear: Literal["auto", "native", "device", "general"] = "auto"
    """auto, native (compiled), device (GPU) or general."""
    compile: bool = False
    """Compile the networks with torch.compile."""
    precision: Literal["float32", "tf32", "bf16"] = "float32"
    """float32, or on a GPU tf32 or bf16."""
    threads: int = 1
    """CPU threads of torch; more helps large networks."""


@dataclass(frozen=True)
class Settings:
    """All settings of a run, one part per concern."""

    train: TrainConfig
    policy: PolicyConfig
    algorithm: PPOConfig | A2CConfig


def make_settings(env: Any, overrides: Mapping[str, Any], config_file: str | Path | None = None) -> Settings:
    """Join what is known about a run: defaults < preset of the env < `config_file` < `overrides`.

    Args:
        env: A name, or a class or callable that makes envs; None takes the name from the file.
        overrides: Flat words, such as `{"clip_range": 0.1, "hidden_sizes": (64, 64)}`.
        config_file: A TOML file of the same words; tables such as [train] or [ppo] are allowed, not needed.

    Raises:
        UnknownNameError: A word that does not exist; the message suggests the nearest.
        HurtleError: A value of the wrong type or out of range.
    """
    algorithm = overrides.get("algorithm")
    words = read_settings_file(config_file, algorithm) if config_file is not None else {}
    words |= checked_words(overrides, algorithm or words.get("algorithm", "ppo"))
    if env is not None:
        words["env"] = env if isinstance(env, str) else getattr(env, "__name__", type(env).__name__)
    if not words.get("env"):
        raise HurtleError("A run needs an env: a name such as cartpole, CartPole-v1 or my_env.py:MyEnv.")
    if words.get("preset", True):
        words = preset_for(words["env"], words.get("algorithm", "ppo")) | words
    return settings_from_dict(words)


def settings_from_dict(words: Mapping[str, Any]) -> Settings:
    """Settings from flat words; those left out have their defaults, and no preset is used. Undoes `settings_to_dict`.

    A run's signature among them is left out.
    """
    words = {word: value for word, value in words.items() if word != SIGNATURE}
    algorithm = words.get("algorithm", "ppo")
    values = checked_words(words, algorithm)
    parts = [cls(**{word: values[word] for word in _types(cls) if word in values}) for cls in _parts(algorithm).values()]
    pool = values.get("pool_batch_size")
    if pool is not None and pool > parts[0].num_envs:
        raise HurtleError(f"pool_batch_size must be at most num_envs={parts[0].num_envs}, got {pool}.")
    return Settings(*parts)


def settings_to_dict(settings: Settings) -> dict[str, Any]:
    """All words and values, flat and as TOML has them: lists for tuples, "none" for None."""
    words = asdict(settings.train) | asdict(settings.policy) | asdict(settings.algorithm)
    for word, value in words.items():
        words[word] = "none" if value is None else list(value) if isinstance(value, tuple) else value
    return words


def check_settings_file(path: str | Path, given: Collection[str], trust: bool, algorithm: str | None = None) -> None:
    """Refuse code that a TOML file names, unless the user trusts it or it is the config.toml of a run of this user's.

    Args:
        path: The file.
        given: The words that the user gave, which override the file's.
        trust: The user said that it may name code.
        algorithm: As for `read_settings_file`.

    Raises:
        TrustError: Names the file and the code.
    """
    words = read_settings_file(path, algorithm)
    signature = _read_toml(path).get(SIGNATURE)
    trusted = trust or is_signed(words, signature)
    check_code(path, {word: value for word, value in words.items() if word not in given}, trusted, signature)


def read_settings_file(path: str | Path, algorithm: str | None = None) -> dict[str, Any]:
    """The flat words of a TOML file, checked, without the tables of algorithms other than `algorithm` (None: the file's)."""
    where = f" in {path}"
    content = _read_toml(path)
    content.pop(SIGNATURE, None)
    tables = {name: content.pop(name) for name in ("train", "policy", *ALGORITHMS) if isinstance(content.get(name), dict)}
    algorithm = algorithm or content.get("algorithm") or tables.get("train", {}).get("algorithm", "ppo")
    words = checked_words(content, algorithm, where)
    for name, table in tables.items():
        if name in ALGORITHMS and name != algorithm:
            checked_words(table, name, where)  # a typo is an error even where it has no effect
            continue
        if twice := sorted(words.keys() & table):
            raise HurtleError(f"{', '.join(twice)}{where}: set twice, the second time in [{name}].")
        words |= checked_words(table, algorithm, where)
    return words | {word: absolute_reference(words[word]) for word in ("env", "policy") if word in words}


def _read_toml(path: str | Path) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise HurtleError(f"Cannot read the settings file {path}: {error.strerror}.") from None
    except ValueError as error:
        raise HurtleError(f"{path} is not a TOML file: {error}.") from None


def check_divides(batch: int, minibatch: int) -> None:
    """Refuse a minibatch size that does not divide the batch, naming the nearest ones that do."""
    if batch % minibatch == 0:
        return
    divisors = sorted(d for low in range(1, int(batch**0.5) + 1) if batch % low == 0 for d in {low, batch // low})
    near = [max(d for d in divisors if d < minibatch), *(d for d in divisors if d > minibatch)][:2]
    problem = f"is more than the batch of {batch}" if minibatch > batch else f"does not divide the batch of {batch}"
    raise HurtleError(
        f"minibatch_size={minibatch} {problem} steps (num_steps × num_envs × agents). "
        f"Nearest that fit: {' or '.join(map(str, near))}; or change num_steps or num_envs."
    )


def algorithm_config(algorithm: str) -> type:
    """The config class of an algorithm."""
    if algorithm not in ALGORITHMS:
        raise UnknownNameError(f"No algorithm {algorithm!r}. {did_you_mean(str(algorithm), ALGORITHMS)}")
    return _imported(ALGORITHMS[algorithm])


def setting_types(algorithm: str) -> dict[str, Any]:
    """Every word that a run with `algorithm` knows, with the type of its value."""
    return {word: kind for cls in _parts(algorithm).values() for word, kind in _types(cls).items()}


def unknown_setting(word: str, algorithm: str, where: str = "", spelling: Callable[[str], str] = str) -> UnknownNameError:
    """The error for a word that a run with `algorithm` does not know; `spelling` is how the user writes words."""
    owners = [name for name in ALGORITHMS if word in _types(algorithm_config(name))]
    if owners:
        return UnknownNameError(f"{spelling(word)}{where} is a setting of {' and '.join(owners)}, not of {algorithm}.")
    near = difflib.get_close_matches(word, setting_types(algorithm), n=1)
    hint = f"Did you mean {spelling(near[0])}?" if near else "`hurtle train --help` lists them."
    return UnknownNameError(f"No setting {spelling(word)}{where}. {hint}")


def _parts(algorithm: str) -> dict[str, type]:
    return {"train": TrainConfig, "policy": _imported(_POLICY), "algorithm": algorithm_config(algorithm)}


def _imported(reference: str) -> type:
    module, name = reference.split(":")
    return getattr(import_module(module), name)


@cache
def _types(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def checked_words(
    words: Mapping[str, Any], algorithm: str, where: str = "", spelling: Callable[[str], str] = str
) -> dict[str, Any]:
    """The same words, each value of its field's type and in range; `spelling` is how the user writes words."""
    types = setting_types(algorithm)
    values = {}
    for word, value in words.items():
        if word not in types:
            raise unknown_setting(word, algorithm, where, spelling)
        try:
            values[word] = fit(value, types[word])
            _check_range(word, values[word])
        except ValueError as error:
            raise HurtleError(f"{spelling(word)}{where} {error}") from None
    return values


_LIMITS: dict[str, Callable[[Any], bool]] = {
    "1 or more": lambda value: value >= 1,
    "0 or more": lambda value: value >= 0,
    "more than 0": lambda value: value > 0,
    "from 0 to 1": lambda value: 0 <= value <= 1,
    "from 0 to 2**63 - 1": lambda value: 0 <= value < 2**63,
}
_RANGES = {
    word: limit
    for limit, words in {
        "1 or more": "total_steps num_envs num_workers pool_batch_size eval_episodes keep_checkpoints threads "
        "num_steps minibatch_size num_epochs hidden_sizes",
        "0 or more": "eval_every checkpoint_every entropy_coef value_coef weight_decay priority_alpha",
        "more than 0": "observation_clip reward_clip learning_rate clip_range max_grad_norm target_kl rho_clip c_clip "
        "adam_eps step_timeout",
        "from 0 to 1": "gamma gae_lambda priority_beta",
        "from 0 to 2**63 - 1": "seed",
    }.items()
    for word in words.split()
}
_MAY_BE_INFINITE = ("observation_clip", "reward_clip", "max_grad_norm", "rho_clip", "c_clip")  # bounds: infinity is none
_CHOICES = {
    "activation": ("tanh", "relu"),
    "distribution": ("auto", "gaussian", "squashed_gaussian", "beta"),
    "recurrent": ("none", "lstm", "gru", "mingru"),
    "optimizer": ("adam", "adamw", "rmsprop", "muon"),
}


def _check_range(word: str, value: Any) -> None:
    if word in _RANGES:
        for item in value if isinstance(value, tuple) else [value]:
            if item is not None and not _LIMITS[_RANGES[word]](item):
                raise ValueError(f"must be {_RANGES[word]}, got {value!r}.")
    if isinstance(value, float) and math.isinf(value) and word not in _MAY_BE_INFINITE:
        raise ValueError(f"must be finite, got {value!r}.")
    if value not in _CHOICES.get(word, [value]):
        raise ValueError(f"must be one of {', '.join(_CHOICES[word])}, got {value!r}.")
    if word == "device" and not (value in ("cpu", "cuda", "auto") or (value.startswith("cuda:") and value[5:].isdecimal())):
        raise ValueError(f"must be cpu, cuda, cuda:N (the number of a GPU) or auto, got {value!r}.")
