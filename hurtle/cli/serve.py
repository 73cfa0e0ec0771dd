"""`hurtle serve`: the command line → `ServeConfig` → a server, in one process or several.

TOML file → HURTLE_SERVE_… variables → flags on top → serve until a signal.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Annotated, Any

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from hurtle import __version__
from hurtle.errors import HurtleError
from hurtle.serving.address import joined
from hurtle.serving.config import PREFIX, MaybeFile, ServeConfig, defaults_from, describe, parse_pairs

_EXAMPLES = """\
  hurtle serve policy.onnx
  hurtle serve models/ --watch 2 --grpc-port 9001
  hurtle serve ranker.npz --backend dlrm --parameters device=cuda precision=fp16
  hurtle serve --config serve.toml"""
_HELP = (
    "Serve models over the Open Inference Protocol, gRPC and REST.\n\nOptions come from flags, then "
    f"{PREFIX}… variables such as {PREFIX}HTTP_PORT, then the TOML file of --config ({PREFIX}CONFIG).\n\nexamples:\n{_EXAMPLES}"
)


@dataclass(frozen=True)
class _Flags(ServeConfig):
    """The options that `hurtle serve --help` lists."""

    config: MaybeFile = None
    """TOML file with any of these options; options of one model go under [model.NAME]."""
    trust: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Run code that the --config file names: your own backends, libraries, trusted=true."""


def run_serve(arguments: list[str]) -> int:
    """Parse the arguments of `hurtle serve` and serve until a signal; returns the exit code."""
    arguments, path = _without_config(arguments)
    config = parse(arguments, defaults_from(path or os.environ.get(PREFIX + "CONFIG"), trust="--trust" in arguments))
    if not config.models:
        raise HurtleError(f"Which models? For example:\n{_EXAMPLES}\n`hurtle serve --help` lists the options.")
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    from hurtle.serving.processes import Parent
    from hurtle.serving.server import Server, run_server

    _say(f"hurtle {__version__}: loading {', '.join(config.models)} ({describe(config)})")
    if config.processes > 1:
        clean = Parent(config, lambda http, grpc: _announce(config, http, grpc)).run()
    else:
        clean = run_server(Server(config), lambda server: _announce(config, server.http_port, server.grpc_port))
    _say("stopped" if clean else "stopped; some requests were not answered")
    return 0 if clean else 1


def parse(arguments: list[str], default: ServeConfig) -> ServeConfig:
    """The options of `default` with the given flags on top."""
    names = [option.name for option in fields(ServeConfig)]
    try:
        found = tyro.cli(
            _Flags,
            prog="hurtle serve",
            description=_HELP,
            args=arguments,
            default=_Flags(**{name: getattr(default, name) for name in names}),
            registry=_pairs(),
            config=(tyro.conf.OmitArgPrefixes,),
        )
        return ServeConfig(**{name: getattr(found, name) for name in names})
    except ValueError as error:
        raise HurtleError(str(error)) from None


def _without_config(arguments: list[str]) -> tuple[list[str], str | None]:
    """The arguments without --config FILE, and FILE."""
    others: list[str] = []
    path, remaining = None, iter(arguments)
    for argument in remaining:
        if argument == "--config":
            path = next(remaining, None)
            if path is None:
                raise HurtleError("--config needs a file.")
        elif argument.startswith("--config="):
            path = argument.removeprefix("--config=")
        else:
            others.append(argument)
    return others, path


def _announce(config: ServeConfig, http_port: int | None, grpc_port: int | None) -> None:
    scheme = "https" if config.tls_cert else "http"
    lines = []
    if http_port is not None:
        lines.append(f"REST, page and metrics  {scheme}://{joined(config.host, http_port)}/")
    if grpc_port is not None:
        lines.append(f"gRPC                    {joined(config.host, grpc_port)}")
    _say("\n".join([*lines, "ready; Ctrl-C stops it"]))


def _say(text: str) -> None:
    """Print to standard error; a server may outlive the terminal that started it, so a closed one is not an error."""
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def _pairs() -> ConstructorRegistry:
    registry = ConstructorRegistry()

    @registry.primitive_rule
    def rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
        if info.type != dict[str, str]:
            return None
        return PrimitiveConstructorSpec(
            nargs="*",
            metavar="[NAME=VALUE ...]",
            instance_from_str=parse_pairs,
            is_instance=lambda value: isinstance(value, dict),
            str_from_instance=lambda pairs: [f"{name}={value}" for name, value in pairs.items()],
        )

    return registry
