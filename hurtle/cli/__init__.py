"""The command line: `hurtle VERB …`, one file per verb."""

from hurtle.cli.dispatch import main

__all__ = ["main"]
