"""What displays of many runs share: lines that are printed, and panels that redraw themselves."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.live import Live

from hurtle.tracking.dashboard import can_redraw, ignoring_closed_pipe


def kind_of_display(mode: str, console: Console) -> str:
    """Which of live, plain and quiet; "auto" is live on a terminal, else plain."""
    return ("live" if can_redraw(console) else "plain") if mode == "auto" else mode


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
