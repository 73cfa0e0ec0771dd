"""Draws the pictures of docs/environments.md: one PNG per environment, after some random steps.

python docs/make_images.py [name …] → docs/images/<name>.png. Needs Pillow, which comes with the `bench` extra.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from PIL import Image

import hurtle
from hurtle.envs.registry import names

FOLDER = Path(__file__).parent / "images"
MIN_WIDTH = 160  # pixels; smaller pictures are enlarged by a whole factor
NUM_STEPS = {
    "acrobot": 30,
    "bandit": 1,
    "memory": 5,
    "mountain_car": 40,
    "mountain_car_continuous": 40,
    "password": 4,
    "seaquest": 60,
    "snake": 60,
    "squared": 8,
}
"""Random steps before the picture; the others take DEFAULT_STEPS."""
DEFAULT_STEPS = 24


def picture(name: str) -> np.ndarray:
    """An RGB picture of an environment in the middle of an episode."""
    env = hurtle.make(name, render_mode="rgb_array", debug=True)  # a few steps are not worth compiling for
    env.action_space.seed(1)
    for seed in range(1000):
        env.reset(seed=seed)
        ended = False
        for _ in range(NUM_STEPS.get(name, DEFAULT_STEPS)):
            _, _, terminated, truncated, _ = env.step(env.action_space.sample())
            ended = bool(np.any(terminated) or np.any(truncated)) and name != "snake"  # snakes come back
            if ended:
                break
        if not ended or name == "bandit":  # whose only step ends the episode
            return env.render()
    raise SystemExit(f"{name}: no episode of random play lasts {NUM_STEPS.get(name, DEFAULT_STEPS)} steps.")


def main() -> None:
    """Draw the environments named on the command line, or all of them."""
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or names():
        image = picture(name)
        factor = -(-MIN_WIDTH // image.shape[1])
        path = FOLDER / f"{name}.png"
        enlarged = Image.fromarray(image.repeat(factor, axis=0).repeat(factor, axis=1))
        enlarged.quantize(64).save(path, optimize=True)
        print(f"{path}: {enlarged.width} x {enlarged.height}, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
