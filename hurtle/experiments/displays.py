"""What displays of many runs share: lines that are printed, and panels that redraw themselves."""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from hurtle.tracking.dashboard import can_redraw, ignoring_closed_pipe


def kind_of_display(mode: str, console: Console) -> str:
    """Which of live, plain and quiet; "auto" is live on a terminal, else plain."""
    return ("live" if can_redraw(console) else "plain") if mode == "auto" else mode


def framed(rows: list[Text], title: str, about: str, width: int) -> Panel:
    """Lines in a frame; what does not fit into a line is cut."""
    for row in rows:
        row.no_wrap, row.overflow = True, "ellipsis"
    return Panel(
        Group(*rows), title=Text(title, "bold default"), title_align="left", subtitle=Text(about, "default dim"),
        subtitle_align="right", border_style="bright_black", width=width,
    )  # fmt: skip


class Plain:
    """Prints messages as lines."""

    _console: Console

    def message(self, text: str) -> None:
        """Print a line."""
        encoding = self._console.encoding
        with ignoring_closed_pipe(self._console):
            self._console.print(
                text.encode(encoding, "replace").decode(encoding), markup=False, highlight=False, soft_wrap=True
            )


class Redrawn:
    """Redraws a panel in place."""

    _console: Console

    def start_live(self, console: Console) -> None:
        """Draw the first frame; later ones follow by themselves."""
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=4, vertical_overflow="crop")
        with ignoring_closed_pipe(console):
            self._live.start(refresh=True)

    def frame(self, width: int, height: int) -> Any:
        """What to draw."""
        raise NotImplementedError

    def message(self, text: str) -> None:
        """Print above the dashboard."""
        with ignoring_closed_pipe(self._console):
            self._console.print(text, markup=False, highlight=False)

    def stop(self) -> None:
        """Leave the last frame on the screen."""
        if self._live.is_started:
            with ignoring_closed_pipe(self._console):
                self._live.stop()

    def _render(self) -> Any:
        size = self._console.size
        return self.frame(size.width, size.height - 1)
