"""`Frames`: screens of the Atari emulator, pooled and resized into small frames; redraws only what changed.

two screens of palette indices → gray or RGB where a screen changed → their maximum → means of areas → one frame of a stack.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import njit

_WORD = 8  # pixels that are compared at once
_NEAR = np.float32(1e-3)
"""Means this close to n + ½ are computed again in float32, as OpenCV would: see `resizer`."""


class Frames:
    """Draws what an emulator shows.

    `see` takes the emulator's screen into slot 0 or 1; `draw` resizes the maximum of the two. Both keep what they computed
    from the last screens: most of a screen is as it was, and comparing is fast.

    Args:
        ale: The emulator.
        size: Height and width of a frame.
        grayscale: Frames are gray; else they have three channels, red, green and blue.

    Attributes:
        shape: Shape of a frame.
    """

    def __init__(self, ale: Any, size: int, grayscale: bool = True):
        height, width = ale.getScreenDims()
        channels = 1 if grayscale else 3
        self._ale = ale
        self._read = ale.getScreenGrayscale if grayscale else ale.getScreenRGB
        self._palette = np.zeros((256, channels), np.uint8)
        self._known = np.zeros(256, np.bool_)  # colours of the palette that have been on the screen
        self._screens = np.zeros((2, height, width), np.uint8)
        self._words = self._screens.view(np.uint64)
        self._seen = self._words.copy()  # the screens that `_shades` shows
        self._shades = np.zeros((2, channels, height, width), np.uint8)
        self._changed = np.ones(height, np.bool_)  # rows of `_shades` since the last `draw`
        self._frame = np.zeros((size, size, channels), np.uint8)
        self._resize = resizer(height, width, size)
        self.shape = (size, size) if grayscale else (size, size, 3)
        for slot in (0, 1):
            self._learn(slot)

    def see(self, slot: int) -> None:
        """Take in the emulator's screen."""
        self._ale.getScreen(self._screens[slot])
        if not _take(self._screens, self._words, self._seen, self._shades, self._palette, self._known, self._changed, slot):
            self._learn(slot)

    def draw(self, frames: np.ndarray) -> None:
        """Shift `frames` [num_stack, *shape] by one and write the newest as the last."""
        self._resize(self._shades, self._changed, self._frame)
        _push(frames.reshape(len(frames), -1), self._frame.reshape(-1))

    def _learn(self, slot: int) -> None:
        """Learn the colours of the emulator's screen."""
        self._ale.getScreen(self._screens[slot])
        height, width = self._screens.shape[1:]
        colours = self._read().reshape(height, width, -1)
        self._palette[self._screens[slot]] = colours
        self._known[self._screens[slot]] = True
        self._shades[slot] = colours.transpose(2, 0, 1)
        self._seen[slot] = self._words[slot]
        self._changed[:] = True


@njit(nogil=True, cache=True)
def _take(screens, words, seen, shades, palette, known, changed, slot):
    """Bring the shades of a slot up to date; False if its screen has a colour that is not known yet."""
    for y in range(seen.shape[1]):
        difference = np.uint64(0)
        for w in range(seen.shape[2]):
            difference |= words[slot, y, w] ^ seen[slot, y, w]
        if difference != 0:
            changed[y] = True
            if not _take_row(screens[slot, y], words[slot, y], seen[slot, y], shades[slot, :, y], palette, known):
                return False
    return True


@njit(nogil=True, cache=True, inline="never")
def _take_row(screen, words, seen, shades, palette, known):
    for w in range(len(words)):
        if words[w] == seen[w]:
            continue
        for x in range(w * _WORD, (w + 1) * _WORD):
            colour = screen[x]
            if not known[colour]:
                return False
            for c in range(len(shades)):
                shades[c, x] = palette[colour, c]
        seen[w] = words[w]
    return True


@njit(nogil=True, cache=True)
def _push(frames, newest):
    for k in range(len(frames) - 1):
        for i in range(len(newest)):
            frames[k, i] = frames[k + 1, i]
    for i in range(len(newest)):
        frames[-1, i] = newest[i]


def resizer(height: int, width: int, size: int) -> Callable[[np.ndarray, np.ndarray, np.ndarray], None]:
    """A function (shades, changed, frame) that draws the rows of the frame that show a changed row, and clears `changed`.

    A new pixel is the mean of the area that it covers. With weights that are whole numbers its sum is exact and fast; it is
    rounded as OpenCV's INTER_AREA rounds. That sums in float32, so its result is another only within a hair of n + ½: there,
    the sum is made again in float32 and in OpenCV's order.
    """
    row_first, row_overlaps, row_weights = _areas(height, size)
    column_first, column_overlaps, column_weights = _areas(width, size)
    loop = _compiled(len(row_weights), len(column_weights))
    line, mean = np.zeros(width, np.int32), np.zeros(size, np.float32)
    inverse = np.float32(1 / (row_overlaps[:, 0].sum() * column_overlaps[:, 0].sum()))

    def resize(shades: np.ndarray, changed: np.ndarray, frame: np.ndarray) -> None:
        loop(
            *(shades, changed, frame, row_first, row_overlaps, row_weights, column_first, column_overlaps, column_weights),
            *(line, mean, inverse),
        )

    return resize


@cache
def _compiled(row_taps: int, column_taps: int) -> Callable[..., None]:
    """The loop for these numbers of old rows and columns per new pixel, which are constants to the compiler."""

    @njit(nogil=True, error_model="numpy", cache=True)
    def loop(
        shades,
        changed,
        frame,
        row_first,
        row_overlaps,
        row_weights,
        column_first,
        column_overlaps,
        column_weights,
        line,
        mean,
        inverse,
    ):
        for y in range(frame.shape[0]):
            top = row_first[y]
            stale = False
            for i in range(row_taps):
                stale |= changed[top + i]
            if not stale:
                continue
            for c in range(frame.shape[2]):
                for x in range(line.size):
                    line[x] = 0
                for i in range(row_taps):
                    weight = row_overlaps[i, y]
                    for x in range(line.size):
                        line[x] += weight * np.int32(max(shades[0, c, top + i, x], shades[1, c, top + i, x]))
                for x in range(mean.size):
                    total = np.int32(0)
                    for j in range(column_taps):
                        total += line[column_first[x] + j] * column_overlaps[j, x]
                    mean[x] = np.float32(total) * inverse
                for x in range(mean.size):
                    rounded = np.rint(mean[x])
                    if abs(abs(mean[x] - rounded) - np.float32(0.5)) < _NEAR:
                        value = np.float32(0.0)
                        for i in range(row_taps):
                            total_in_row = np.float32(0.0)
                            for j in range(column_taps):
                                q = column_first[x] + j
                                pixel = max(shades[0, c, top + i, q], shades[1, c, top + i, q])
                                total_in_row += np.float32(pixel) * column_weights[j, x]
                            value += row_weights[i, y] * total_in_row
                        rounded = np.rint(value)
                    frame[y, x, c] = np.uint8(rounded)
        changed[:] = False

    return loop


def _areas(length: int, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each of `size` new pixels: the first old pixel that it covers, and from there on overlaps and weights [taps, size].

    In units in which the frame is `length * size` long, an old pixel has length `size` and a new one `length`. Overlaps are
    whole numbers, as small as possible; weights are their shares.
    """
    begin = np.arange(size) * length
    end = begin + length
    taps = int((-(-end // size) - begin // size).max())
    first = np.minimum(begin // size, length - taps)
    old = first + np.arange(taps)[:, None]
    overlap = (np.minimum(end, (old + 1) * size) - np.maximum(begin, old * size)).clip(0)
    whole = overlap // np.gcd(length, size)
    return first.astype(np.uint32), whole.astype(np.int32), (overlap / length).astype(np.float32)
