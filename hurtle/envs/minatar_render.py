"""Renders the MinAtar games: each channel of the 10x10 observation has a colour."""

from collections.abc import Sequence

import numpy as np

CELL_PIXELS = 16


def render_channels(observation: np.ndarray, colours: Sequence[tuple[int, int, int]]) -> np.ndarray:
    """Draw one coloured square per object on black; if objects overlap, the lower channel is on top.

    Args:
        observation: The binary channels, [rows, columns, channels].
        colours: One RGB triple (0 to 255) per channel.

    Returns:
        An RGB image, uint8 [rows * 16, columns * 16, 3].

    Example:
        >>> observation = np.zeros((10, 10, 2), np.uint8)
        >>> observation[0, 0, 1] = 1
        >>> image = render_channels(observation, [(255, 255, 255), (255, 0, 0)])
        >>> image.shape, image[0, 0].tolist()
        ((160, 160, 3), [255, 0, 0])
    """
    cells = np.zeros((*observation.shape[:2], 3), np.uint8)
    for channel in reversed(range(observation.shape[2])):
        cells[observation[:, :, channel] != 0] = colours[channel]
    return cells.repeat(CELL_PIXELS, axis=0).repeat(CELL_PIXELS, axis=1)
