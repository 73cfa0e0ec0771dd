"""Asterix: collect gold and dodge enemies that cross eight lanes (the rules of MinAtar's asterix).

The player walks freely over the eight lanes between the top and the bottom row. Every few frames something enters a
free lane, from the left or from the right: gold one time in three (reward 1 when touched), otherwise an enemy
(touching it ends the episode). Everything in the lanes moves at the same pace. With `difficulty_ramping`, new arrivals
become more frequent and the pace faster, up to one of each per frame.

Example:
    >>> import hurtle
    >>> env = hurtle.make("asterix")
    >>> obs, info = env.reset(seed=0)
    >>> obs.shape
    (10, 10, 4)
"""

import numpy as np

from hurtle.envs.minatar_render import render_channels
from hurtle.native import Box, Discrete, Env, bool_, int8, uint8

LEFT, UP, RIGHT, DOWN = 1, 2, 3, 4  # 0 and 5 (fire) do nothing
PLAYER, ENEMY, TRAIL, GOLD = 0, 1, 2, 3
COLOURS = ((90, 170, 255), (230, 60, 60), (120, 120, 120), (255, 205, 60))

SIZE = 10
LANES = 8  # lane i is row i + 1
SPAWN_INTERVAL = 10  # frames, at level 0; one less per level
MOVE_INTERVAL = 5  # frames, at level 0; one less every second level
LEVEL_INTERVAL = 102  # frames from one level to the next
LAST_LEVEL = 9


class Asterix(Env):
    """Collect gold and dodge enemies that cross eight lanes (MinAtar)."""

    observation_space = Box(0, 1, (SIZE, SIZE, 4), uint8)
    action_space = Discrete(6)
    max_steps = None
    sticky_action_prob: float = 0.1
    difficulty_ramping: bool = True

    class State:
        player_x: int8
        player_y: int8
        lane_x: int8[LANES]
        lane_direction: int8[LANES]  # -1 or 1; 0: the lane is empty
        lane_gold: bool_[LANES]
        spawn_timer: int8
        move_timer: int8
        level: int8
        level_timer: int8
        last_action: int8 = 0  # kept across episodes: a sticky action can carry over into the next one

    def reset(self, state, rng):
        state.player_x = 5
        state.player_y = 5
        state.spawn_timer = SPAWN_INTERVAL
        state.move_timer = MOVE_INTERVAL
        state.level_timer = LEVEL_INTERVAL

    def step(self, state, action, rng):
        if rng.random() < self.sticky_action_prob:
            action = state.last_action
        state.last_action = action
        self.walk(state, action)

        if state.spawn_timer == 0:
            self.spawn(state, rng)
            state.spawn_timer = SPAWN_INTERVAL - state.level
        state.spawn_timer -= 1

        reward, terminated = self.touch(state)
        if state.move_timer == 0:
            self.advance(state)
            state.move_timer = MOVE_INTERVAL - state.level // 2
            gold, caught = self.touch(state)
            reward += gold
            terminated = terminated or caught
        state.move_timer -= 1

        if self.difficulty_ramping and state.level < LAST_LEVEL:
            state.level_timer -= 1
            if state.level_timer == 0:
                state.level += 1
                state.level_timer = LEVEL_INTERVAL
        return reward, terminated

    def walk(self, state, action):
        if action == LEFT:
            state.player_x = max(0, state.player_x - 1)
        elif action == RIGHT:
            state.player_x = min(SIZE - 1, state.player_x + 1)
        elif action == UP:
            state.player_y = max(1, state.player_y - 1)
        elif action == DOWN:
            state.player_y = min(LANES, state.player_y + 1)

    def spawn(self, state, rng):
        """Let gold or an enemy enter a random free lane, if there is one."""
        free_lanes = 0
        for lane in range(LANES):
            if state.lane_direction[lane] == 0:
                free_lanes += 1
        if free_lanes > 0:
            to_skip = rng.integers(free_lanes)
            lane = 0
            while to_skip > 0 or state.lane_direction[lane] != 0:
                if state.lane_direction[lane] == 0:
                    to_skip -= 1
                lane += 1
            if rng.integers(2) == 0:
                state.lane_x[lane] = 0
                state.lane_direction[lane] = 1
            else:
                state.lane_x[lane] = SIZE - 1
                state.lane_direction[lane] = -1
            state.lane_gold[lane] = rng.integers(3) == 0

    def touch(self, state):
        """Pick up gold in the player's cell; returns the reward and whether there is an enemy instead."""
        lane = state.player_y - 1
        if state.lane_direction[lane] == 0 or state.lane_x[lane] != state.player_x:
            return 0.0, False
        if state.lane_gold[lane]:
            state.lane_direction[lane] = 0
            return 1.0, False
        return 0.0, True

    def advance(self, state):
        """Move everything by one cell; anything that leaves the grid frees its lane."""
        for lane in range(LANES):
            x = state.lane_x[lane] + state.lane_direction[lane]
            if x < 0 or x >= SIZE:
                state.lane_direction[lane] = 0
            else:
                state.lane_x[lane] = x

    def observe(self, state, obs):
        obs[state.player_y, state.player_x, PLAYER] = 1
        for lane in range(LANES):
            if state.lane_direction[lane] != 0:
                x = state.lane_x[lane]
                behind = x - state.lane_direction[lane]
                if state.lane_gold[lane]:
                    obs[lane + 1, x, GOLD] = 1
                else:
                    obs[lane + 1, x, ENEMY] = 1
                if behind >= 0 and behind < SIZE:
                    obs[lane + 1, behind, TRAIL] = 1

    def render(self, state):
        obs = np.zeros(self.observation_space.shape, np.uint8)
        self.observe(state, obs)
        return render_channels(obs, COLOURS)
