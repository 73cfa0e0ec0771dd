"""Pictures of an env: RGB arrays as coloured terminal text, and the few shapes that the classic envs draw.

Two pixels share one character cell: the upper half block takes the upper pixel's colour in front, the lower one's behind.
"""

from __future__ import annotations

import numpy as np

Colour = tuple[int, int, int]
RESET = "\x1b[0m"


def to_ansi(image: np.ndarray, max_width: int = 80, max_height: int = 48) -> str:
    r"""An RGB image as text with 24-bit colours, shrunk to at most the given pixels (two pixel rows per text row).

    Example:
        >>> print(to_ansi(np.zeros((2, 1, 3), np.uint8)).encode("unicode_escape").decode())
        \x1b[38;2;0;0;0;48;2;0;0;0m\u2580\x1b[0m
    """
    least = max(1, -(-image.shape[1] // max_width), -(-image.shape[0] // max_height))
    whole = [s for s in range(least, 2 * least) if image.shape[0] % s == 0 == image.shape[1] % s]
    shrink = whole[0] if whole else least  # a factor that divides the picture keeps the cells of a grid sharp
    rows, columns = image.shape[0] // shrink * shrink, image.shape[1] // shrink * shrink
    blocks = image[:rows, :columns].reshape(rows // shrink, shrink, columns // shrink, shrink, 3)
    pixels = blocks.mean(axis=(1, 3)).astype(np.uint8)
    if len(pixels) % 2:
        pixels = np.concatenate([pixels, np.zeros_like(pixels[:1])])
    lines = []
    for upper, lower in zip(pixels[::2].tolist(), pixels[1::2].tolist(), strict=True):
        line, last = "", None
        for top, bottom in zip(upper, lower, strict=True):
            if (top, bottom) != last:
                line += "\x1b[38;2;{};{};{};48;2;{};{};{}m".format(*top, *bottom)
                last = (top, bottom)
            line += "▀"
        lines.append(line + RESET)
    return "\n".join(lines)


class Canvas:
    """A small RGB picture in world coordinates: x to the right, y up.

    Args:
        x_range: World coordinates of the left and right edge.
        y_range: World coordinates of the bottom and top edge.
        width: Pixels across; the height follows from the ranges.
        background: Colour of the empty picture.
    """

    def __init__(
        self,
        x_range: tuple[float, float],
        y_range: tuple[float, float],
        width: int = 400,
        background: Colour = (250, 250, 250),
    ):
        self.scale = width / (x_range[1] - x_range[0])
        self.origin = (x_range[0], y_range[1])
        height = max(2, round((y_range[1] - y_range[0]) * self.scale))
        self.image = np.full((height, width, 3), background, np.uint8)
        rows, columns = np.mgrid[0:height, 0:width]
        self._x = x_range[0] + (columns + 0.5) / self.scale
        self._y = y_range[1] - (rows + 0.5) / self.scale

    def circle(self, x: float, y: float, radius: float, colour: Colour) -> None:
        """A filled disc."""
        self.image[(self._x - x) ** 2 + (self._y - y) ** 2 <= radius**2] = colour

    def rectangle(self, x0: float, y0: float, x1: float, y1: float, colour: Colour) -> None:
        """A filled box between two corners."""
        inside = (self._x >= min(x0, x1)) & (self._x <= max(x0, x1)) & (self._y >= min(y0, y1)) & (self._y <= max(y0, y1))
        self.image[inside] = colour

    def line(self, x0: float, y0: float, x1: float, y1: float, thickness: float, colour: Colour) -> None:
        """A thick line with round ends."""
        dx, dy = x1 - x0, y1 - y0
        along = ((self._x - x0) * dx + (self._y - y0) * dy) / max(dx * dx + dy * dy, 1e-12)
        along = np.clip(along, 0.0, 1.0)
        distance = (self._x - x0 - along * dx) ** 2 + (self._y - y0 - along * dy) ** 2
        self.image[distance <= (thickness / 2) ** 2] = colour

    def below(self, height: np.ndarray, colour: Colour) -> None:
        """Everything under a curve given as one height per pixel column."""
        self.image[self._y <= height[None, :]] = colour

    @property
    def columns(self) -> np.ndarray:
        """World x of each pixel column."""
        return self._x[0]
