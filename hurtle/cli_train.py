"""`hurtle train`: the command line → `hurtle.train`. Its flags, defaults and help are those of the configs and of ENV's preset.

arguments → which algorithm → which ENV → its settings (preset, TOML file, or the run to resume) → flags on top → train.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import is_dataclass, make_dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, get_origin

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from hurtle.errors import HurtleError
from hurtle.runners.config import (
    Settings,
    TrainConfig,
    check_settings_file,
    checked_words,
    make_settings,
    read_settings_file,
    setting_types,
    settings_from_dict,
    settings_to_dict,
    unknown_setting,
)
from hurtle.runners.presets import preset_for
from hurtle.runners.values import shown

_EXAMPLES = """\
  hurtle train cartpole
  hurtle train CartPole-v1 --total-steps 200_000 --clip-range 0.1
  hurtle train my_env.py:MyEnv --config my.toml
  hurtle train --resume runs/cartpole-ppo-0-20260101-120000"""

# The help shows the words of TrainConfig in these groups; those of the policy and the algorithm are groups of their own.
_GROUPS = {
    "Run": "algorithm total_steps seed device stop_at_return fine_tune preset gear compile precision threads",
    "Envs": "num_envs backend num_workers pool_batch_size step_timeout restart_workers env_parameters "
    "unsafe normalize_observations observation_clip "
    "reward_mode reward_clip",
    "Results": "eval_every eval_episodes eval_sampled checkpoint_every keep_checkpoints runs name progress trackers",
}
_METAVARS = {"env_parameters": "NAME=VALUE", "fine_tune": "RUN", "name": "NAME"}  # for defaults that are empty
_WIDTH = 32  # of the column of flags


def run_train(arguments: list[str]) -> None:
    """Parse the arguments of `hurtle train` and train, or print the help."""
    asked = [word for word in arguments if word not in ("-h", "--help")]
    wants_help = len(asked) < len(arguments)
    resume, config = _given(asked, "--resume"), _given(asked, "--config")
    if resume:
        _resume(asked, resume, config, wants_help)
        return
    algorithm = _given(asked, "--algorithm")
    words: dict[str, Any] = read_settings_file(config, algorithm) if config else {}
    algorithm = algorithm or words.get("algorithm", "ppo")
    base = settings_from_dict(words | {"algorithm": algorithm, "env": ""})
    first = _parse(asked, base)  # to learn ENV; then again on its preset
    env = first.train.env or words.get("env", "")
    if not env and not wants_help:
        raise HurtleError(
            f"Which env? For example:\n{_EXAMPLES}\n`hurtle envs` lists the native ones, `hurtle train --help` the settings."
        )
    if env:
        base = make_settings(env, {"algorithm": algorithm, "preset": first.train.preset}, config or None)
    if wants_help:
        _print_help(base)
        return
    settings = _settings(asked, base)
    if config:
        check_settings_file(config, {*_flags(asked), *(["env"] if first.train.env else [])}, "--trust" in asked, algorithm)
    from hurtle.runners.training import train

    train(**settings_to_dict(settings))


def _resume(arguments: list[str], resume: str, config: str, wants_help: bool) -> None:
    from hurtle.tracking.run_folder import RunFolder

    file = Path(resume)
    runs = _given(arguments, "--runs") or "runs"
    folder = RunFolder.open(file.parent.parent if file.is_file() else resume, runs)  # a checkpoint is RUN/checkpoints/step-….pt
    base = settings_from_dict(folder.read_config())
    if wants_help:
        _print_help(base)
        return
    if config:
        raise HurtleError("--resume goes on with the settings of the run: leave out --config.")
    settings = _settings(arguments, base)
    before, after = base.train.env, settings.train.env
    if after != before:
        raise HurtleError(
            f"{resume} is a run on {before}: leave out {after!r} to go on with it, "
            f"or take over its weights: hurtle train {after} --fine-tune {resume}"
        )
    from hurtle.runners.training import train

    # The flags as given, not what differs from config.toml: that already has those of a resume that crashed before it saved.
    words = settings_to_dict(settings)
    source = resume if file.is_file() else str(folder.path)
    given = {word: words[word] for word in _flags(arguments) if word in words}
    if "--trust" in arguments:
        given["trust"] = True
    train(resume=source, **given)


def _given(arguments: list[str], flag: str) -> str:
    """The value of a flag, found before the flags are known; "" when it is not there."""
    value = ""
    for argument, following in zip_longest(arguments, arguments[1:], fillvalue=""):
        name, equals, rest = argument.partition("=")
        if name == flag:
            value = rest if equals else following
            if not value or (not equals and value.startswith("--")):
                raise HurtleError(f"{flag} needs a value.")
    return value


def _flags(arguments: list[str]) -> dict[str, tuple[str | None, str]]:
    """The flags that are given, by their words: what each has after its =, and the argument that follows it."""
    found = {}
    for argument, following in zip_longest(arguments, arguments[1:], fillvalue=""):
        if argument.startswith("--"):
            name, equals, rest = argument.partition("=")
            found[name[2:].replace("-", "_").removeprefix("no_")] = (rest if equals else None, following)
    return found


def _settings(arguments: list[str], base: Settings) -> Settings:
    """The settings of `base` with the flags that were given on top, checked."""
    parsed, algorithm = _parse(arguments, base), base.train.algorithm
    raw = vars(parsed.train) | vars(parsed.policy) | vars(parsed.algorithm)
    words: dict[str, Any] = {}
    for word in filter(raw.__contains__, _flags(arguments)):  # not --config and --resume
        try:
            words |= checked_words({word: raw[word]}, algorithm, spelling=_spelled)
        except HurtleError as error:
            raise HurtleError(f"{error}{_default_of(word, base)}") from None
    if words.get("hidden_sizes") == ():
        raise HurtleError(f"--hidden-sizes: give at least one width, such as 64 64.{_default_of('hidden_sizes', base)}")
    return settings_from_dict(settings_to_dict(base) | {"env": parsed.train.env} | words)


def _default_of(word: str, base: Settings) -> str:
    """A sentence on the value that a word has by the preset of the env; empty where no preset names it."""
    train = base.train
    preset = preset_for(train.env, train.algorithm) if train.preset else {}
    return f" The preset of {train.env} has {shown(checked_words(preset, train.algorithm)[word])}." if word in preset else ""


def _check_form(arguments: list[str], types: dict[str, Any]) -> None:
    """Refuse switches with a value, and others without one."""
    for word, (attached, following) in _flags(arguments).items():
        kind, flag = types.get(word), _spelled(word)
        if kind is bool and (
            attached is not None or following.lower() in ("true", "false", "yes", "no", "on", "off", "1", "0")
        ):
            raise HurtleError(f"{flag} is a switch: {flag} or {flag.replace('--', '--no-', 1)}, without a value.")
        needs_one = kind not in (None, bool) and get_origin(kind) not in (tuple, dict)
        if needs_one and (attached == "" or (attached is None and (not following or following.startswith("--")))):
            raise HurtleError(f"{flag} needs a value.")


def _parse(arguments: list[str], base: Settings) -> Settings:
    """The settings of `base` with the flags that were given on top, as text."""
    _check_form(arguments, setting_types(base.train.algorithm))
    parts = [("train", TrainConfig), ("policy", type(base.policy)), ("algorithm", type(base.algorithm))]
    switch = tyro.conf.FlagCreatePairsOff[bool]
    command = make_dataclass("Train", [*parts, ("config", str), ("resume", str), ("trust", switch)], frozen=True)
    parsed: Any
    parsed, unknown = tyro.cli(
        command,
        prog="hurtle train",
        args=arguments,
        default=command(base.train, base.policy, base.algorithm, "", "", False),
        config=(tyro.conf.OmitArgPrefixes,),
        registry=_registry(),
        return_unknown_args=True,
    )
    for word in unknown:
        if word.startswith("-"):
            name = word.partition("=")[0].lstrip("-").removeprefix("no-")
            raise unknown_setting(name.replace("-", "_"), base.train.algorithm, spelling=_spelled)
    if unknown:
        raise HurtleError(f"One env at a time: {parsed.train.env}, and then {' '.join(unknown)}?")
    return Settings(parsed.train, parsed.policy, parsed.algorithm)


def _registry() -> ConstructorRegistry:
    """Values stay text: they are read later, as in TOML and Python, so that 1e6 is a whole number and mistakes read alike."""
    registry = ConstructorRegistry()

    @registry.primitive_rule
    def rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
        if info.type is bool or is_dataclass(info.type):
            return None  # --flag and --no-flag; a group of flags
        several = get_origin(info.type) in (tuple, dict)
        return PrimitiveConstructorSpec(
            nargs="*" if several else 1,
            metavar="VALUE ..." if several else "VALUE",
            instance_from_str=lambda texts: texts if several else texts[0],
            is_instance=lambda value: True,
            str_from_instance=lambda value: shown(value).split() if several else [shown(value)],
        )

    return registry


def _print_help(settings: Settings) -> None:
    """One line per flag, with its default as the value, in groups."""
    from rich.console import Console
    from rich.text import Text

    env = settings.train.env
    console = Console(highlight=False)
    say = partial(console.print, markup=False)
    say(f"usage: hurtle train {env or 'ENV'} [--flag value ...]\n\n{_EXAMPLES}\n")
    say(f"The values shown are the defaults{f', the preset of {env} included' if env and settings.train.preset else ''}.")
    documents = {word: text for part in vars(settings).values() for word, text in field_documents(type(part)).items()}
    title = (inspect.getdoc(type(settings.algorithm)) or "").splitlines()[0].rstrip(".")
    groups = {name: words.split() for name, words in _GROUPS.items()}
    groups |= {"Policy": list(vars(settings.policy)), title: list(vars(settings.algorithm))}
    values = vars(settings.train) | vars(settings.policy) | vars(settings.algorithm)
    rows = {
        group: [(_flag(word, values[word]), documents[word] + _state(values[word])) for word in words]
        for group, words in groups.items()
    }
    rows["Run"] += [
        ("--config FILE", "A TOML file of settings, flat or in tables"),
        ("--resume RUN", "Go on with a run"),
        ("--trust", "Run code that the file of --config or --resume names"),
    ]
    for group, lines in rows.items():
        console.print(Text(f"\n{group}", style="bold"))
        for flag, text in lines:
            first, *others = textwrap.wrap(text, min(console.width, 110) - _WIDTH) or [""]
            left = f"  {flag}".ljust(_WIDTH)
            say(left + first if left.endswith(" ") else f"{left}\n{' ' * _WIDTH}{first}")
            for line in others:
                say(" " * _WIDTH + line)


def _spelled(word: str) -> str:
    return f"--{word.replace('_', '-')}"


def _flag(word: str, value: Any) -> str:
    """`--learning-rate 0.001`, `--[no-]shuffle`."""
    if isinstance(value, bool):
        return _spelled(word).replace("--", "--[no-]")
    return f"{_spelled(word)} {shown(value) or _METAVARS.get(word, 'VALUE')}"


def _state(value: Any) -> str:
    return f" ({'on' if value else 'off'})" if isinstance(value, bool) else ""


def field_documents(cls: type) -> dict[str, str]:
    """The docstring under each field of a dataclass, on one line, without its last full stop."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body  # type: ignore[attr-defined]
    found = {}
    for statement, following in zip_longest(body, body[1:]):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            text = (
                following.value.value if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant) else ""
            )
            found[statement.target.id] = " ".join(str(text).split()).rstrip(".")
    return found
