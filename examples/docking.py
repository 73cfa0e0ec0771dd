"""A curriculum: a spacecraft that must dock learns from far away what it would never find there by chance.

    python examples/docking.py

It is rewarded only for docking. From half a unit away it does so by chance; `gated` moves the start away, step by step, as
soon as most attempts succeed. docs/curricula.md has the curves.
"""

import math

import hurtle
from hurtle.native import Box, Discrete, Env, float32, inf


class Docking(Env):
    """Steer a spacecraft to its dock and arrive there slowly; the reward is 1 for docking and 0 for everything else."""

    observation_space = Box(-inf, inf, (4,))
    action_space = Discrete(5)  # coast, or thrust right, left, up, down
    max_steps = 150
    metrics = ("distance",)

    thrust: float = 0.05
    dock: float = 0.2  # how close it must be …
    slow: float = 0.1  # … and how slow

    class State:
        x: float32
        y: float32
        vx: float32
        vy: float32
        distance: float32 = 16.0  # of the start: an option

    def reset(self, state, rng):
        angle = rng.uniform(0.0, 2.0 * math.pi)
        state.x = state.distance * math.cos(angle)
        state.y = state.distance * math.sin(angle)
        state.vx = rng.uniform(-0.1, 0.1)
        state.vy = rng.uniform(-0.1, 0.1)

    def step(self, state, action, rng):
        if action == 1:
            state.vx += self.thrust
        elif action == 2:
            state.vx -= self.thrust
        elif action == 3:
            state.vy += self.thrust
        elif action == 4:
            state.vy -= self.thrust
        state.x += state.vx
        state.y += state.vy
        is_there = math.hypot(state.x, state.y) < self.dock and math.hypot(state.vx, state.vy) < self.slow
        is_lost = math.hypot(state.x, state.y) > 20.0
        return (1.0 if is_there else 0.0), is_there or is_lost

    def observe(self, state, obs):
        obs[0] = state.x
        obs[1] = state.y
        obs[2] = 10.0 * state.vx
        obs[3] = 10.0 * state.vy


SETTINGS = {"num_envs": 32, "num_steps": 64, "minibatch_size": 512, "num_epochs": 4, "gamma": 0.98, "learning_rate": 1e-3}

if __name__ == "__main__":
    run = hurtle.train(Docking, total_steps=200_000, curriculum={"distance": "gated:0.5:16:0.8"}, **SETTINGS)
    print(f"From {Docking.State.distance} away it docks in {run.evaluation.mean:.0%} of the episodes.")
