"""`hurtle compare`: a table in the terminal, a picture, and a page that needs no other file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from hurtle.cli.options import POSITIONAL, SWITCH, Runs, option
from hurtle.errors import HurtleError


def compare(
    run: Annotated[
        tuple[str, ...],
        POSITIONAL,
        option("Run folders, folders of seeds, globs, or NAME=RUN to name a method.", "RUN [RUN ...]", ""),
    ],
    return_: Annotated[float | None, option("Also show the seconds to this return.", "R", "none", name="return")] = None,
    metric: Annotated[str, option("What the curves show: return, evaluation, length or any metric.", "NAME")] = "return",
    out: Annotated[str, option("Write FILE.png and FILE.html.", "FILE")] = "comparison",
    json: Annotated[bool, SWITCH, option("Print JSON, and draw nothing.", default="")] = False,
    runs: Runs = "runs",
) -> None:
    """Compare runs: curves, returns with intervals, speed, settings."""
    from hurtle.experiments.comparison import compare as compare_runs

    found = compare_runs(named_runs(run), target=return_, metric=metric, folder=runs)
    if json:
        from hurtle.tracking.json_text import to_json

        print(to_json(found.to_dict(), indent=2), end="")
        return
    _print(found)
    stem = Path(out).with_suffix("") if out.endswith((".png", ".html")) else Path(out)
    try:
        for file in (
            found.write_png(stem.with_name(f"{stem.name}.png")),
            found.write_html(stem.with_name(f"{stem.name}.html")),
        ):
            print(f"written     {file}")
    except HurtleError as error:
        if "Matplotlib" not in str(error):
            raise
        print(f"No pictures: {error}")


def named_runs(places: tuple[str, ...]) -> Any:
    """The places by the names of their methods, where NAME=RUN gives them; places that exist are not split."""
    if not places:
        raise HurtleError("Compare which runs? For example: hurtle compare runs/cartpole-ppo-* ours=runs/mine")
    named: dict[str, list[str]] = {}
    for place in places:
        name, equals, rest = place.partition("=")
        is_named = bool(equals and name and rest) and not Path(place).exists()
        named.setdefault(name if is_named else "", []).append(rest if is_named else place)
    return named[""] if list(named) == [""] else named


def _print(found: Any) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(emoji=False, highlight=False)
    if not console.is_terminal:
        console.width = 200
    tables = [("", *found.table())]
    if found.overalls:
        tables.append(("Over all tasks (0: worst run of a task, 1: best one)", *found.tasks_table()))
    if found.settings:
        tables.append(("Settings that differ", *found.settings_table()))
    for title, header, rows in tables:
        if title:
            console.print(f"\n{title}", style="bold")
        table = Table(box=None, pad_edge=False, header_style="dim")
        for name in header:
            table.add_column(Text(name), overflow="fold")
        for row in rows:
            table.add_row(*map(Text, row))
        console.print(table)
    for note in found.notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)
    console.print()
