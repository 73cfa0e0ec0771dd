"""`hurtle train`: the command line → `hurtle.train`. Flags, defaults and help come from the settings dataclasses.

arguments → algorithm → ENV → its settings (preset, TOML file, or the run to resume) → flags on top → train.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import textwrap
from dataclasses import is_dataclass, make_dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, get_origin

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from hurtle.algorithms.algorithm import algorithm_name, allow_algorithm, find_algorithm
from hurtle.cli.flags import all_flags, count_flag, given_flag
from hurtle.errors import HurtleError
from hurtle.runners.presets import preset_for
from hurtle.runners.settings import (
    KIND_DEPENDS_ON,
    Settings,
    TrainConfig,
    allow_algorithm_of_file,
    check_settings,
    check_settings_file,
    make_settings,
    read_settings_file,
    setting_types,
    settings_from_dict,
    settings_to_dict,
    unknown_setting,
)
from hurtle.runners.torchrun import launched
from hurtle.runners.values import shown

_EXAMPLES = """\
  hurtle train cartpole
  hurtle train CartPole-v1 --total-steps 200_000 --clip-range 0.1
  hurtle train my_env.py:MyEnv --config my.toml
  hurtle train cartpole --algorithm my_algo.py:Reinforce
  hurtle train cartpole --seeds 5
  hurtle train pendulum --population 8 --population-every 20_000
  hurtle train --resume runs/cartpole-ppo-0-20260101-120000"""

# The help shows the settings of TrainConfig in these groups; the policy and the algorithm have their own groups.
_GROUPS = {
    "Run": "algorithm total_steps seed device stop_at_return fine_tune preset gear compile precision threads num_learners",
    "Actors": "runner lag num_actors actor_devices",
    "Cluster": "address num_collectors collector_cpus collector_gpus collector_timeout collector_wait",
    "Envs": "num_envs backend num_workers pool_batch_size step_timeout restart_workers env_parameters "
    "curriculum unsafe normalize_observations observation_clip "
    "reward_mode reward_clip",
    "Results": "eval_every eval_episodes eval_sampled checkpoint_every keep_checkpoints runs name progress curve trackers",
}
_METAVARS = {
    "env_parameters": "NAME=VALUE",
    "curriculum": "NAME=RULE",
    "fine_tune": "RUN",
    "name": "NAME",
    "address": "HOST:PORT",
}  # where the default is empty
_WIDTH = 32  # of the flag column
_OF_POPULATIONS = ("population", "population_every", "search")  # flags that are no settings


def run_train(arguments: list[str]) -> int:
    """Parse the arguments of `hurtle train` and train, or print the help; returns the exit code."""
    given = [argument for argument in arguments if argument not in ("-h", "--help")]
    wants_help = len(given) < len(arguments)
    resume, config = given_flag(given, "--resume"), given_flag(given, "--config")
    seeds, parallel, together = count_flag(given, "--seeds"), count_flag(given, "--parallel"), _together(given)
    if resume:
        from hurtle.experiments.populations.population import find_population
        from hurtle.experiments.seeds import find_seeds

        runs = given_flag(given, "--runs") or "runs"
        if (many := find_seeds(resume, runs) or find_population(resume, runs)) is not None:
            return _resume_many(given, many, config, wants_help)
        if several := all_flags(given).keys() & {"seeds", "parallel", "side_by_side", *_OF_POPULATIONS}:
            raise HurtleError(f"{resume} is one run: {_spelled(min(several))} is for many.")
        _resume(given, resume, config, wants_help)
        return 0
    if wants_help:
        print_help(read_settings(given, wants_help=True))
        return 0
    settings = read_settings(given)
    if launched().size > 1 and (several := all_flags(given).keys() & {"seeds", "population"}):
        raise HurtleError(f"torchrun starts the learners of one run: leave out {_spelled(min(several))}, or torchrun.")
    if "population" in all_flags(given):
        if seeds is not None:
            raise HurtleError("--population already trains many runs, with seeds of their own: leave out --seeds.")
        _train_population(given, settings, config)
        return 0  # members that failed were replaced
    if alone := all_flags(given).keys() & set(_OF_POPULATIONS):
        raise HurtleError(f"{_spelled(min(alone))} is for populations: add --population 8.")
    if seeds is not None:
        from hurtle.experiments.seeds import train_seeds

        values = settings_to_dict(settings)
        return 1 if train_seeds(seeds=seeds, parallel=parallel, side_by_side=together, **values).failed else 0
    if parallel is not None or together is not None:
        flag = "side-by-side" if parallel is None else "parallel"
        raise HurtleError(f"--{flag} is for many seeds: add --seeds 5{', or --population 8' * (parallel is not None)}.")
    from hurtle.runners.training import train

    train(**settings_to_dict(settings))
    return 0


def read_settings(arguments: list[str], wants_help: bool = False) -> Settings:
    """The settings of a new run from the arguments of the command line; for the help, ENV and flags need not be there.

    Raises:
        HurtleError: There is no env, or a flag or its value does not fit.
    """
    config = given_flag(arguments, "--config")
    algorithm = algorithm_name(given_flag(arguments, "--algorithm"))
    if config and not algorithm:
        allow_algorithm_of_file(config, "--trust" in arguments)
    in_file: dict[str, Any] = read_settings_file(config, algorithm) if config else {}
    algorithm = algorithm or in_file.get("algorithm", "ppo")
    base = settings_from_dict({**find_algorithm(algorithm).defaults, **in_file, "algorithm": algorithm, "env": ""})
    first = _parse(arguments, base)  # finds ENV; the second pass uses its preset
    env = first.train.env or in_file.get("env", "")
    if not env and not wants_help:
        raise HurtleError(
            f"Which env? For example:\n{_EXAMPLES}\n`hurtle envs` lists the native ones, `hurtle train --help` the settings."
        )
    if config:  # before its env is looked at
        given = {*all_flags(arguments), *(["env"] if first.train.env else [])}
        check_settings_file(config, given, "--trust" in arguments, algorithm)
    if env:
        asked = {"algorithm": algorithm, "preset": first.train.preset, **_asked(arguments, first)}
        base = make_settings(env, asked, config or None)
    if wants_help:
        return base
    settings = _settings(arguments, base)
    _check_name(settings.train.env)
    return settings


def _asked(arguments: list[str], parsed: Settings) -> dict[str, Any]:
    """The given settings that the preset of a kind of envs depends on; wrong ones are reported later."""
    raw = vars(parsed.train) | vars(parsed.policy) | vars(parsed.algorithm)
    names = [name for name in KIND_DEPENDS_ON if name in all_flags(arguments) and name in raw]
    with contextlib.suppress(HurtleError):
        return check_settings({name: raw[name] for name in names}, parsed.train.algorithm)
    return {}


def _check_name(env: str) -> None:
    """Raise if the env does not exist, before torch is imported; names that import user code are left to training."""
    if ":" not in env:
        from hurtle.envs.registry import resolve

        resolve(env, {})


def _resume(arguments: list[str], resume: str, config: str, wants_help: bool) -> None:
    from hurtle.cli.options import find_run
    from hurtle.tracking.run_folder import RunFolder

    file = Path(resume)  # a checkpoint is RUN/checkpoints/step-….pt
    folder = file.parent.parent if file.is_file() else Path(find_run(resume, given_flag(arguments, "--runs") or "runs"))
    saved = RunFolder.open(folder).read_config()
    if moved := given_flag(arguments, "--algorithm"):  # the user names it, perhaps in another place
        saved["algorithm"] = algorithm_name(moved)
    else:
        allow_algorithm(folder / "config.toml", saved, "--trust" in arguments)
    base = settings_from_dict(saved)
    if wants_help:
        print_help(base)
        return
    if config:
        raise HurtleError("--resume continues with the run's own settings: leave out --config.")
    settings = _settings(arguments, base)
    before, after = base.train.env, settings.train.env
    if after != before:
        raise HurtleError(
            f"{resume} is a run on {before}: leave out {after!r} to continue it, "
            f"or start from its weights: hurtle train {after} --fine-tune {resume}"
        )
    from hurtle.runners.training import train

    # All flags, not only those that differ from config.toml: a resume that crashed before saving has written them there.
    values = settings_to_dict(settings)
    overrides = {name: values[name] for name in all_flags(arguments) if name in values}
    if "--trust" in arguments:
        overrides["trust"] = True
    train(resume=resume if file.is_file() else str(folder), **overrides)


def _resume_many(arguments: list[str], folder: Path, config: str, wants_help: bool) -> int:
    from hurtle.experiments.populations.population import read_population, train_population
    from hurtle.experiments.records import POPULATION_FILE, SEEDS_FILE
    from hurtle.experiments.seeds import read_seeds, train_seeds

    is_population = (folder / POPULATION_FILE).is_file()
    saved = (read_population if is_population else read_seeds)(folder)[0]
    trusts = "--trust" in arguments
    allow_algorithm(folder / (POPULATION_FILE if is_population else SEEDS_FILE), saved, trusts)
    base = settings_from_dict(saved)
    if wants_help:
        print_help(base)
        return 0
    if config or (again := all_flags(arguments).keys() & {"seeds", *_OF_POPULATIONS}):
        what = "--config" if config else _spelled(min(again))
        raise HurtleError(f"--resume goes on with the settings of {folder}, and as many runs: leave out {what}.")
    settings = _settings(arguments, base)
    if settings.train.env != base.train.env:
        raise HurtleError(f"{folder} holds runs on {base.train.env}: leave out {settings.train.env!r} to continue them.")
    values = settings_to_dict(settings)
    overrides = {name: values[name] for name in all_flags(arguments) if name in values and name != "runs"}
    parallel, together = count_flag(arguments, "--parallel"), _together(arguments)
    if is_population:
        if together is not None:
            raise HurtleError(f"{folder} is a population, whose members have processes of their own: leave out --side-by-side.")
        train_population(resume=folder, parallel=parallel, trust=trusts, **overrides)
        return 0
    found = train_seeds(resume=folder, parallel=parallel, side_by_side=together, trust=trusts, **overrides)
    return 1 if found.failed else 0


def _together(arguments: list[str]) -> bool | None:
    """The switch --side-by-side or --no-side-by-side; None if it is not given."""
    found = {"--side-by-side": True, "--no-side-by-side": False}
    return next((found[argument] for argument in reversed(arguments) if argument in found), None)


def _train_population(arguments: list[str], settings: Settings, config: str) -> None:
    """Train a population; what the user has not given stays open, such as whether rates are annealed."""
    from hurtle.experiments.populations.population import train_population

    values = settings_to_dict(settings)
    train_population(
        settings.train.env,
        count_flag(arguments, "--population") or 0,
        count_flag(arguments, "--population-every"),
        search=given_flag(arguments, "--search") or None,
        parallel=count_flag(arguments, "--parallel"),
        config=config or None,
        trust="--trust" in arguments,
        **{name: values[name] for name in all_flags(arguments) if name in values},
    )


def _settings(arguments: list[str], base: Settings) -> Settings:
    """The settings of `base` with the given flags on top, checked."""
    parsed, algorithm = _parse(arguments, base), base.train.algorithm
    raw = vars(parsed.train) | vars(parsed.policy) | vars(parsed.algorithm)
    changed: dict[str, Any] = {}
    for name in filter(raw.__contains__, all_flags(arguments)):  # without --config and --resume
        try:
            changed |= check_settings({name: raw[name]}, algorithm, spelling=_spelled)
        except HurtleError as error:
            raise HurtleError(f"{error}{_preset_value(name, base)}") from None
    if changed.get("hidden_sizes") == ():
        raise HurtleError(f"--hidden-sizes: give at least one width, such as 64 64.{_preset_value('hidden_sizes', base)}")
    return settings_from_dict(settings_to_dict(base) | {"env": parsed.train.env} | changed)


def _preset_value(name: str, base: Settings) -> str:
    """A sentence with the value of a setting in the env's preset, or "" if it has none."""
    train = base.train
    preset = preset_for(train.env, train.algorithm) if train.preset else {}
    return f" The preset of {train.env} has {shown(check_settings(preset, train.algorithm)[name])}." if name in preset else ""


def _check_form(arguments: list[str], types: dict[str, Any]) -> None:
    """Reject a switch with a value, and any other flag without one."""
    for name, (attached, following) in all_flags(arguments).items():
        kind, flag = types.get(name), _spelled(name)
        if kind is bool and (
            attached is not None or following.lower() in ("true", "false", "yes", "no", "on", "off", "1", "0")
        ):
            raise HurtleError(f"{flag} is a switch: {flag} or {flag.replace('--', '--no-', 1)}, without a value.")
        needs_one = kind not in (None, bool) and get_origin(kind) not in (tuple, dict)
        if needs_one and (attached == "" or (attached is None and (not following or following.startswith("--")))):
            raise HurtleError(f"{flag} needs a value.")


def _parse(arguments: list[str], base: Settings) -> Settings:
    """The settings of `base` with the given flags on top; their values are still text."""
    _check_form(arguments, setting_types(base.train.algorithm))
    parts = [("train", TrainConfig), ("policy", type(base.policy)), ("algorithm", type(base.algorithm))]
    switch = tyro.conf.FlagCreatePairsOff[bool]
    texts = ("config", "resume", "seeds", "parallel", *_OF_POPULATIONS)  # read before, by `given_flag`
    own = [*((name, str) for name in texts), ("side_by_side", bool), ("trust", switch)]
    command = make_dataclass("Train", [*parts, *own], frozen=True)
    parsed: Any
    parsed, unknown = tyro.cli(
        command,
        prog="hurtle train",
        args=arguments,
        default=command(base.train, base.policy, base.algorithm, *[""] * len(texts), False, False),
        config=(tyro.conf.OmitArgPrefixes,),
        registry=_registry(),
        return_unknown_args=True,
    )
    for argument in unknown:
        if argument.startswith("-"):
            name = argument.partition("=")[0].lstrip("-").removeprefix("no-")
            raise unknown_setting(name.replace("-", "_"), base.train.algorithm, spelling=_spelled)
    if unknown:
        raise HurtleError(f"One env at a time: {parsed.train.env}, and then {' '.join(unknown)}?")
    return Settings(parsed.train, parsed.policy, parsed.algorithm)


def _registry() -> ConstructorRegistry:
    """Keeps values as text: they are parsed later, as in TOML and Python, so that 1e6 is an integer and errors match."""
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


def print_help(settings: Settings) -> None:
    """Print one line per flag, with its default as the value, in groups."""
    from rich.console import Console
    from rich.text import Text

    env = settings.train.env
    console = Console(highlight=False)
    say = partial(console.print, markup=False)
    say(f"usage: hurtle train {env or 'ENV'} [--flag value ...]\n\n{_EXAMPLES}\n")
    say(f"The values shown are the defaults{f', the preset of {env} included' if env and settings.train.preset else ''}.")
    documents = {name: text for part in vars(settings).values() for name, text in field_documents(type(part)).items()}
    title = (inspect.getdoc(type(settings.algorithm)) or "").splitlines()[0].rstrip(".")
    groups = {group: names.split() for group, names in _GROUPS.items()}
    groups |= {"Policy": list(vars(settings.policy)), title: list(vars(settings.algorithm))}
    values = vars(settings.train) | vars(settings.policy) | vars(settings.algorithm)
    rows = {
        group: [(_flag(name, values[name]), documents[name] + _state(values[name])) for name in names]
        for group, names in groups.items()
    }
    rows["Run"] += [
        ("--config FILE", "A TOML file of settings, flat or in tables"),
        ("--seeds N", "Train N seeds, from --seed on"),
        ("--[no-]side-by-side", "Seeds as one learner; default: on a GPU, if possible"),
        ("--population N", "Train N members; the worst copy the best and change settings"),
        ("--population-every N", "Steps between two comparisons; default: a tenth of all"),
        ("--search WHAT", "What a population searches: names, or a TOML file of ranges"),
        ("--parallel N", "The most seeds or members at a time; default: what cores and memory allow"),
        ("--resume RUN", "Continue a run, a population, or the seeds that are not finished"),
        ("--trust", "Run code named by the file of --config or --resume"),
    ]
    for group, lines in rows.items():
        console.print(Text(f"\n{group}", style="bold"))
        for flag, text in lines:
            first, *others = textwrap.wrap(text, min(console.width, 110) - _WIDTH) or [""]
            left = f"  {flag}".ljust(_WIDTH)
            say(left + first if left.endswith(" ") else f"{left}\n{' ' * _WIDTH}{first}")
            for line in others:
                say(" " * _WIDTH + line)


def _spelled(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _flag(name: str, value: Any) -> str:
    """`--learning-rate 0.001`, `--[no-]shuffle`."""
    if isinstance(value, bool):
        return _spelled(name).replace("--", "--[no-]")
    return f"{_spelled(name)} {shown(value) or _METAVARS.get(name, 'VALUE')}"


def _state(value: Any) -> str:
    return f" ({'on' if value else 'off'})" if isinstance(value, bool) else ""


def field_documents(cls: type) -> dict[str, str]:
    """The docstring of each field of a dataclass, inherited ones included, on one line, without the final full stop."""
    found = {}
    for owner in filter(is_dataclass, reversed(cls.__mro__)):
        body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0].body  # type: ignore[attr-defined]
        for statement, following in zip_longest(body, body[1:]):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
                found[statement.target.id] = " ".join(str(following.value.value if is_text else "").split()).rstrip(".")
    return found
