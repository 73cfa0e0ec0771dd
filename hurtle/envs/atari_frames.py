"""`Frames`: screens of the Atari emulator, pooled and resized into small frames; redraws only what changed.

screens of palette indices → gray or RGB where a screen changed → their maximum → means of areas → one frame of a stack.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import njit

_WORD = 8  # pixels that are compared at once
_NEAR = np.float32(1e-3)
"""Means this close to n + ½ are computed again in float32, as OpenCV would: see `drawer`."""


class Frames:
    """Draws what an emulator shows.

    `see` takes in the emulator's screen, `draw` resizes the maximum of the screens seen since the last time. What they computed
    is kept: most of a screen is as it was, and comparing is fast.

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
        self._screens = [np.zeros((height, width), np.uint8) for _ in range(2)]  # the last one, and the one before
        self._shades = np.zeros((channels, height, width), np.uint8)  # what the last screen shows …
        self._pooled = np.zeros((channels, height, width), np.uint8)  # … and its maximum with those since the last `draw`
        self._differs = np.zeros(height, np.bool_)  # rows in which these two may differ
        self._changed = np.ones(height, np.bool_)  # rows of `_pooled` since the last `draw`
        self._is_first = True  # since the last `draw`
        self._frame = np.zeros((size, size, channels), np.uint8)
        self._draw = drawer(height, width, size)
        self.shape = (size, size) if grayscale else (size, size, 3)
        self._ale.getScreen(self._screens[0])
        self._learn()

    def see(self) -> None:
        """Take in the emulator's screen."""
        before, screen = self._screens
        self._screens.reverse()
        self._ale.getScreen(screen)
        kept = (self._shades, self._pooled, self._palette, self._known, self._differs, self._changed)
        if not _take(screen, screen.view(np.uint64), before.view(np.uint64), *kept, self._is_first):
            self._learn()
        self._is_first = False

    def draw(self, frames: np.ndarray) -> None:
        """Shift `frames` [num_stack, *shape] by one and write the newest as the last."""
        self._draw(self._pooled, self._changed, self._frame, frames)
        self._is_first = True

    def _learn(self) -> None:
        """Learn the colours of the last screen, which the emulator still shows."""
        screen, colours = self._screens[0], self._read()
        colours = colours.reshape(*screen.shape, -1)
        self._palette[screen], self._known[screen] = colours, True
        self._shades[...] = np.moveaxis(colours, 2, 0)
        self._pooled[...] = self._shades if self._is_first else np.maximum(self._pooled, self._shades)
        self._differs[:] = self._changed[:] = True


@njit(nogil=True, cache=True)
def _take(screen, words, before, shades, pooled, palette, known, differs, changed, is_first):
    """Bring shades and maximum up to date, row by row; False if the screen has a colour that is not known yet."""
    for y in range(len(screen)):
        difference = np.uint64(0)
        for w in range(words.shape[1]):
            difference |= words[y, w] ^ before[y, w]
        if difference != 0 and not _take_row(screen[y], words[y], before[y], shades[:, y], pooled[:, y], palette, known):
            return False
        if is_first and (difference != 0 or differs[y]):
            for c in range(len(shades)):
                pooled[c, y] = shades[c, y]
            differs[y], changed[y] = False, True
        elif difference != 0:
            differs[y] = changed[y] = True
    return True


@njit(nogil=True, cache=True, inline="never")
def _take_row(screen, words, before, shades, pooled, palette, known):
    for w in range(len(words)):
        if words[w] == before[w]:
            continue
        for x in range(w * _WORD, (w + 1) * _WORD):
            colour = screen[x]
            if not known[colour]:
                return False
            for c in range(len(shades)):
                shades[c, x] = palette[colour, c]
                pooled[c, x] = max(pooled[c, x], palette[colour, c])
    return True


@njit(nogil=True, cache=True)
def _push(frames, newest):
    for k in range(len(frames) - 1):
        for i in range(len(newest)):
            frames[k, i] = frames[k + 1, i]
    for i in range(len(newest)):
        frames[-1, i] = newest[i]


def drawer(height: int, width: int, size: int) -> Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], None]:
    """A function (screen, changed, frame, frames) that resizes a screen into a frame and pushes that into a stack of frames.

    The screen is [channels, height, width], the frame [size, size, channels]; rows that have not changed are left as they are.

    A new pixel is the mean of the area that it covers. With weights that are whole numbers its sum is exact and fast; it is
    rounded as OpenCV's INTER_AREA rounds. That sums in float32, so its result is another only within a hair of n + ½: there,
    the sum is made again in float32 and in OpenCV's order.
    """
    row_first, row_overlaps, row_weights = _areas(height, size)
    column_first, column_overlaps, column_weights = _areas(width, size)
    loop = _compiled(len(row_weights), len(column_weights))
    line, mean = np.zeros(width, np.int32), np.zeros(size, np.float32)
    inverse = np.float32(1 / (row_overlaps[:, 0].sum() * column_overlaps[:, 0].sum()))

    def draw(screen: np.ndarray, changed: np.ndarray, frame: np.ndarray, frames: np.ndarray) -> None:
        tables = (row_first, row_overlaps, row_weights, column_first, column_overlaps, column_weights)
        loop(screen, changed, frame, frames.reshape(len(frames), -1), *tables, line, mean, inverse)

    return draw


@cache
def _compiled(row_taps: int, column_taps: int) -> Callable[..., None]:
    """The loop for these numbers of old rows and columns per new pixel, which are constants to the compiler."""

    @njit(nogil=True, error_model="numpy", cache=True)
    def loop(
        screen,
        changed,
        frame,
        frames,
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
                        line[x] += weight * np.int32(screen[c, top + i, x])
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
                                total_in_row += np.float32(screen[c, top + i, q]) * column_weights[j, x]
                            value += row_weights[i, y] * total_in_row
                        rounded = np.rint(value)
                    frame[y, x, c] = np.uint8(rounded)
        changed[:] = False
        _push(frames, frame.reshape(-1))

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
