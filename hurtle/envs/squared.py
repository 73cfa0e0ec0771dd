"""Squared: walk from the centre of a square to targets on its edge.

Example:
    >>> import hurtle
    >>> env = hurtle.make("squared", distance=1, num_targets=8)  # a 3x3 grid with targets all around
    >>> obs, info = env.reset(seed=0)
    >>> sum(float(env.step(move)[1]) for move in range(8))
    1.0
"""

import math

import numpy as np

from hurtle.errors import EnvDefinitionError
from hurtle.native import Box, Discrete, Env, int8, int16, uint8

# The eight moves clockwise, from straight up.
MOVE_X = (0, 1, 1, 1, 0, -1, -1, -1)
MOVE_Y = (-1, -1, 0, 1, 1, 1, 0, -1)

AGENT_PLANE, TARGET_PLANE = 0, 1

CELL = 16  # pixels
FLOOR, EDGE, AGENT, TARGET = (20, 20, 20), (50, 50, 50), (60, 120, 216), (240, 180, 40)


class Squared(Env):
    """Walk from the centre to targets on the edge; with options for memory, exploration and stochasticity.

    The grid reaches `distance` cells from its centre, where the agent starts, to the edge, where `num_targets` targets
    lie at random places. A move goes to one of the eight neighbours (the edge stops it), so that every target is
    exactly `distance` moves from the centre. Reaching a target removes it and moves the agent back to the centre. The
    episode ends with the last target, and is truncated after `num_targets * distance` steps, just enough to reach them
    all. The observation is the grid in two planes, agent and targets.

    The reward is the change in closeness to the nearest target, 1 - moves needed / `distance`, divided by
    `num_targets`. The return adds up to (targets reached + closeness at the end) / `num_targets`: at most 1, and only
    by reaching every target on a shortest path. Loitering next to a target, which a reward for closeness itself would
    encourage, gains nothing.

    The defaults check the plumbing: an agent that cannot learn them sees observations that are scrambled or out of step
    with its actions, or credits rewards to the wrong steps. Three options isolate other abilities:

    - `hide_targets` (memory): the targets are shown only in the first observation of an episode. Quickest to learn with
      `num_targets=1`, where an agent whose only memory is its position gets at most 7/9;
    - `sparse_reward` (exploration): 1 / `num_targets` for each target reached, and nothing else;
    - `slip_prob` (stochasticity): with this probability a move fails, and the agent stays where it is.

    The best expected return, `best_return`, is 1 without slips and 1 - `slip_prob` with them, or less if the reward is
    sparse too. The uniform policy gets 0.144 with the default parameters (`random_return`).
    """

    action_space = Discrete(8)

    distance: int = 3
    num_targets: int = 4
    hide_targets: bool = False
    sparse_reward: bool = False
    slip_prob: float = 0.0

    def __init__(self, **parameters):
        super().__init__(**parameters)
        if not 1 <= self.num_targets <= 8 * self.distance:
            raise EnvDefinitionError(f"num_targets must be between 1 and 8 * distance, got {self.num_targets}.")

    @property
    def observation_space(self):
        return Box(0, 1, (2 * self.distance + 1, 2 * self.distance + 1, 2), uint8)

    @property
    def max_steps(self):
        return self.num_targets * self.distance

    @property
    def best_return(self):
        """The return of always moving towards the nearest target: it depends only on the number of moves that do not slip."""
        if not self.sparse_reward:
            return 1.0 - self.slip_prob
        steps, success = self.max_steps, 1.0 - self.slip_prob
        hits = sum(
            moves // self.distance * math.comb(steps, moves) * success**moves * self.slip_prob ** (steps - moves)
            for moves in range(steps + 1)
        )
        return hits / self.num_targets

    @property
    def random_return(self):
        """Found by simulation, for the default parameters only: there is no closed form."""
        as_simulated = (self.distance, self.num_targets, self.sparse_reward, self.slip_prob) == (3, 4, False, 0.0)
        return 0.144 if as_simulated else math.nan

    class State:
        x: int8  # coordinates relative to the centre
        y: int8
        target_x: int8["num_targets"]  # the first `remaining` have not been reached
        target_y: int8["num_targets"]
        remaining: int16
        time: int16

    def reset(self, state, rng):
        # Selection sampling: walk along the edge and keep each cell with the probability that leaves all sets of
        # num_targets cells equally likely.
        cells = 8 * self.distance
        for i in range(cells):
            if rng.integers(cells - i) < self.num_targets - state.remaining:
                x, y = self.edge_cell(i)
                state.target_x[state.remaining] = x
                state.target_y[state.remaining] = y
                state.remaining += 1

    def step(self, state, action, rng):
        state.time += 1
        moves_before, _ = self.nearest_target(state)
        if rng.random() >= self.slip_prob:
            state.x = min(max(state.x + MOVE_X[action], -self.distance), self.distance)
            state.y = min(max(state.y + MOVE_Y[action], -self.distance), self.distance)
        moves, nearest = self.nearest_target(state)
        reward = float(moves_before - moves) / float(self.distance * self.num_targets)
        if self.sparse_reward:
            reward = float(moves == 0) / float(self.num_targets)
        if moves == 0:
            state.remaining -= 1
            state.target_x[nearest] = state.target_x[state.remaining]
            state.target_y[nearest] = state.target_y[state.remaining]
            state.x = 0
            state.y = 0
        return reward, state.remaining == 0

    def observe(self, state, obs):
        obs[state.y + self.distance, state.x + self.distance, AGENT_PLANE] = 1
        if state.time == 0 or not self.hide_targets:
            for i in range(state.remaining):
                obs[state.target_y[i] + self.distance, state.target_x[i] + self.distance, TARGET_PLANE] = 1

    def edge_cell(self, i):
        """Coordinates of the i-th of the 8 * distance cells along the edge, clockwise from the top left corner."""
        side, offset = i // (2 * self.distance), i % (2 * self.distance) - self.distance
        if side == 0:
            return offset, -self.distance
        if side == 1:
            return self.distance, offset
        if side == 2:
            return -offset, self.distance
        return -self.distance, -offset

    def nearest_target(self, state):
        """The number of moves to the nearest target, and its index."""
        nearest, fewest = 0, 2 * self.distance + 1
        for i in range(state.remaining):
            moves = max(abs(state.target_x[i] - state.x), abs(state.target_y[i] - state.y))
            if moves < fewest:
                nearest, fewest = i, moves
        return fewest, nearest

    def render(self, state):
        size = 2 * self.distance + 1
        image = np.full((size, size, 3), EDGE, np.uint8)
        image[1:-1, 1:-1] = FLOOR
        for i in range(state.remaining):
            image[state.target_y[i] + self.distance, state.target_x[i] + self.distance] = TARGET
        image[state.y + self.distance, state.x + self.distance] = AGENT
        return image.repeat(CELL, 0).repeat(CELL, 1)
