"""`main`: the verb's name → its function, with the arguments parsed; errors → exit codes.

Verbs import what they need when they run: `hurtle --help` and `hurtle envs` load no torch.
"""

from __future__ import annotations

import importlib
import os
import select
import sys
from collections.abc import Callable
from typing import Any

from hurtle import __version__
from hurtle.errors import HurtleError, UnknownNameError, did_you_mean
from hurtle.garbage import RARE_COLLECTIONS


def train() -> None:
    """Train a policy, or resume a run: hurtle train cartpole."""


def sweep() -> None:
    """Search for good settings: hurtle sweep cartpole --budget 10m."""


def serve() -> None:
    """Serve models over gRPC and REST: hurtle serve policy.onnx."""


VERBS = {
    "train": "dispatch:train",
    "sweep": "dispatch:sweep",
    "eval": "eval:evaluate",
    "watch": "watch:watch",
    "export": "export:export",
    "serve": "dispatch:serve",
    "runs": "runs:runs",
    "compare": "compare:compare",
    "plot": "plot:plot",
    "sanity": "sanity:sanity",
    "envs": "envs:envs",
    "bench": "bench:bench",
}
"""Verb → its file in this folder and its function. `train`, `sweep`, `serve` and `runs` are only for the help: they parse
their own arguments. The flags of the first three depend on other arguments and files, and `runs` does not wait for tyro."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments == ["--version"]:
        print(f"hurtle {__version__}")
        return 0
    try:
        return _run(arguments) or 0
    except HurtleError as error:
        print(f"hurtle: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        if not _output_is_closed():
            raise
        return 141


def _run(arguments: list[str]) -> int | None:
    verb = arguments[0] if arguments else "--help"
    if not verb.startswith("-") and verb not in VERBS:
        raise UnknownNameError(f"No verb {verb!r}. {did_you_mean(verb, VERBS)}")
    if verb == "train":
        with RARE_COLLECTIONS:
            from hurtle.cli.train import run_train

        return run_train(arguments[1:])
    if verb == "sweep":
        with RARE_COLLECTIONS:
            from hurtle.cli.sweep import run_sweep

        return run_sweep(arguments[1:])
    if verb == "serve":
        with RARE_COLLECTIONS:
            from hurtle.cli.serve import run_serve

        return run_serve(arguments[1:])
    if verb == "runs":
        from hurtle.cli.runs import run_runs

        return run_runs(arguments[1:])
    if arguments == ["envs"]:  # no flags to parse, which would take half the time
        from hurtle.cli.env_list import list_envs

        list_envs()
        return 0
    import tyro

    from hurtle.cli.options import number_parser

    config = (tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes)
    if verb in VERBS:  # the other verbs' flags would take longer to describe than this one to run
        rest = arguments[1:]
        return tyro.cli(_function(verb), prog=f"hurtle {verb}", args=rest, config=config, registry=number_parser(rest))
    return tyro.extras.subcommand_cli_from_dict(
        {name: _function(name) for name in VERBS},
        prog="hurtle",
        description=f"Hurtle {__version__}: reinforcement learning in Python at the speed of the hardware.",
        args=arguments or ["--help"],
        config=config,
    )


def _function(verb: str) -> Callable[..., Any]:
    file, name = VERBS[verb].split(":")
    return getattr(importlib.import_module(f"hurtle.cli.{file}"), name)


def _output_is_closed() -> bool:
    """Whether the reader of standard output, such as `head`, has gone; if so, later output is discarded."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    if not poll.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True
