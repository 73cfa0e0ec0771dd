"""Small native envs for tests; integers and exact fractions only, so that every target must agree to the bit."""

from types import SimpleNamespace

import numpy as np

from hurtle.native import Box, Discrete, Env, MultiDiscrete, bool_, float32, int8, int16, int32, uint8
from hurtle.native import rng as reference

# Parameters that several files share: with each set the env is one more program to compile, snake for up to half a minute.
ASTERIX = {"max_steps": 17, "sticky_action_prob": 0.0}  # compiled for the comparison with MinAtar too
SHORT_CARTPOLE, SHORT_PENDULUM = {"max_steps": 14}, {"max_steps": 9}
SNAKES = {"num_agents": 3, "height": 6, "width": 6, "vision": 1, "respawn_delay": 2, "max_steps": 23}


class Walk(Env):
    """A walk on a line until a goal on either side; some steps go astray."""

    observation_space = Box(-100.0, 100.0, (3,))
    action_space = Discrete(3)
    max_steps = 7
    metrics = ("visits", "drift")

    start_range: int = 3

    class State:
        x: int16
        visits: int32  # how often the walk came through 0
        drift: float32
        trail: uint8[4]
        goal: int16 = 5
        gain: float32 = 0.5

    def reset(self, state, rng):
        state.x = rng.integers(-self.start_range, self.start_range + 1)

    def step(self, state, action, rng):
        move = action - 1
        if rng.random() < 0.25:
            move = -move
        state.x += move
        if state.x == 0:
            state.visits += 1
        state.trail[abs(state.x) % 4] += 1
        state.drift += state.gain * float(move)
        return state.gain * float(move) - 0.125, abs(state.x) >= state.goal

    def observe(self, state, obs):
        obs[0] = float(state.x)
        if state.visits > 0:
            obs[1] = float(state.visits)
        obs[2] = float(state.trail[1] - state.trail[2])

    def render(self, state):
        image = np.zeros((2, 11, 3), np.uint8)
        image[:, min(max(state.x + 5, 0), 10)] = 255
        return image


class PlainWalk:
    """`Walk` written down once more, in plain Python without the engine."""

    def __init__(self, seed, max_steps=7, goal=5, gain=0.5, start_range=3):
        self.rng = SimpleNamespace(_rng=reference.stream_state(seed))
        self.max_steps, self.goal, self.gain, self.start_range = max_steps, goal, gain, start_range

    def reset(self):
        self.x = reference.rng_integers(self.rng, -self.start_range, self.start_range + 1)
        self.visits, self.steps, self.drift, self.trail = 0, 0, 0.0, [0, 0, 0, 0]
        self.rewards = []
        return self.obs()

    def step(self, action):
        move = action - 1
        if reference.rng_random(self.rng) < 0.25:
            move = -move
        self.x += move
        self.visits += self.x == 0
        self.trail[abs(self.x) % 4] += 1
        self.drift += self.gain * move
        self.steps += 1
        reward = self.gain * move - 0.125
        self.rewards.append(reward)
        return self.obs(), reward, abs(self.x) >= self.goal, self.steps >= self.max_steps

    def obs(self):
        return [self.x, self.visits, self.trail[1] - self.trail[2]]

    def episode(self):
        return {"r": sum(self.rewards), "l": self.steps, "visits": self.visits, "drift": self.drift}


class Levers(Env):
    """Two levers with their own ranges; an observation of five bytes, which no machine word divides."""

    observation_space = Box(0, 255, (5,), uint8)
    action_space = MultiDiscrete([2, 3], start=[1, -1])
    max_steps = 6

    class State:
        time: int8
        pulled: int8[2]
        dice: uint8

    def reset(self, state, rng):
        state.dice = rng.integers(1, 7)

    def step(self, state, action, rng):
        state.time += 1
        state.pulled[0] = action[0]
        state.pulled[1] = action[1]
        state.dice = rng.integers(1, 7)
        return float(action[0] * 10 + action[1]), state.dice == 6

    def observe(self, state, obs):
        obs[0] = state.time
        obs[1] = state.pulled[0]
        obs[2] = state.pulled[1] + 1
        obs[4] = state.dice

    def mask(self, state, mask):
        mask[0] = state.time % 2 == 0
        mask[4] = state.dice > 3


class Thrust(Env):
    """Two real actions; each observation writes one row of the two and leaves the other as it comes."""

    observation_space = Box(-100.0, 100.0, (2, 3))
    action_space = Box(np.array([-1.0, -np.inf], np.float32), np.array([1.0, 2.0], np.float32))
    max_steps = 5

    class State:
        time: int16
        total: float32
        last: float32[2]

    def reset(self, state, rng):
        state.last[0] = rng.uniform(-1.0, 1.0)

    def step(self, state, action, rng):
        state.time += 1
        for k in range(2):
            state.last[k] = action[k]
            state.total += action[k]
        return action[0] - action[1], False

    def observe(self, state, obs):
        row = state.time % 2
        obs[row, 0] = state.last[0]
        obs[row, 1] = state.last[1]
        obs[row, 2] = state.total


class Masked(Env):
    """Four actions of which the state allows some; actions start at 2 and observations are 16-bit integers."""

    observation_space = Box(-1000, 1000, (3,), np.int16)
    action_space = Discrete(4, start=2)
    max_steps = 9

    class State:
        level: int8
        lit: bool_[3]
        armed: bool_

    def reset(self, state, rng):
        state.level = rng.integers(3)
        state.lit[state.level] = True

    def step(self, state, action, rng):
        state.level = (state.level + action - 1) % 5
        state.armed = not state.armed
        if state.level < 3:
            state.lit[state.level] = not state.lit[state.level]
        return float(action), state.level == 4 and not state.lit[0]

    def observe(self, state, obs):
        for k in range(3):
            obs[k] = -100 * (k + 1) if state.lit[k] else state.level

    def mask(self, state, mask):
        for k in range(state.level, 4):
            mask[k] = False
        if state.armed:
            mask[3] = True


class Crew(Env):
    """Three agents; agent a works a + 2 steps and is done. All of them stop when the clock strikes `closing`."""

    observation_space = Box(-100.0, 100.0, (2,))
    action_space = Discrete(3)
    max_steps = 12
    metrics = ("clock",)

    num_agents: int = 3

    class State:
        clock: int16
        age: int16["num_agents"]
        rest: int16["num_agents"]
        closing: int16 = 9

    def reset(self, state, rng):
        for a in range(self.num_agents):
            state.age[a] = 0

    def step(self, state, action, reward, terminated, rng):
        for a in range(self.num_agents):
            if state.rest[a] > 0:
                state.rest[a] -= 1
            else:
                state.age[a] += 1
                reward[a] = float(a + 1) + 0.25 * float(action[a])
                if state.age[a] == a + 2:
                    terminated[a] = True
                    state.age[a] = 0
                    state.rest[a] = self.pause()
        state.clock += 1
        return state.clock >= state.closing

    def pause(self):
        return 0

    def observe(self, state, obs):
        for a in range(self.num_agents):
            obs[a, 0] = float(state.age[a])
            obs[a, 1] = float(state.rest[a])

    def mask(self, state, mask):
        for a in range(self.num_agents):
            if state.age[a] == 0:
                mask[a, 2] = False


class Shift(Crew):
    """The crew, but whoever is done is away for two steps and then comes back."""

    def pause(self):
        return 2

    def present(self, state, present):
        for a in range(self.num_agents):
            present[a] = state.rest[a] == 0


class Indexer(Env):
    """Indexes one of its arrays, `case`, at `index`; both are options. What it read is its observation and its reward."""

    observation_space = Box(-100.0, 100.0, (2, 3))
    action_space = MultiDiscrete([2, 2, 2])
    max_steps = 100
    TABLE = np.arange(10, 17)
    MOVES = (3, 5, 7, 9)

    class State:
        before: int32[4]
        items: int8[5]
        grid: int32[4, 3]
        after: int32[4]
        case: int32 = 0
        index: int32 = 0

    def reset(self, state, rng):
        for k in range(4):
            state.before[k] = 77
            state.after[k] = 77
            for j in range(3):
                state.grid[k, j] = 20 + 3 * k + j
        for k in range(5):
            state.items[k] = k + 1

    def step(self, state, action, rng):
        found = 0
        row = state.grid[2]
        if state.case == 0:
            found = state.items[state.index]
        elif state.case == 1:
            state.items[state.index] = 50
        elif state.case == 2:
            state.grid[state.index, 1] += 50
        elif state.case == 3:
            state.grid[3, state.index] = 50
        elif state.case == 4:
            found = row[state.index]
        elif state.case == 5:
            found = state.grid[1][state.index]
        elif state.case == 6:
            found = self.TABLE[state.index]
        elif state.case == 7:
            found = self.MOVES[state.index]
        elif state.case == 8:
            found = self.look(state.items, state.index)
        elif state.case == 9:
            found = 1 + action[state.index]
        elif state.case == 10:
            found = state.items[1:4][state.index]
        elif state.case == 11:
            found = rng.choice(state.items[state.index :])
        elif state.case == 12:
            k = state.index
            while state.items[k] != 0:  # never: in plain Python the index ends the loop
                k += 1
            found = k
        return float(found), False

    def look(self, items, k):
        return items[k]

    def observe(self, state, obs):
        obs[0, 0] = float(state.items[0])
        if state.case == 13:
            obs[state.index, 2] = 9.0
        if state.case == 14:
            obs[1, state.index] = 9.0


class Late(Env):
    """Indexes an array at the number of the step, which is out of bounds after the twelfth."""

    observation_space = Box(0.0, 1.0, (1,))
    action_space = Discrete(2)
    max_steps = 100

    class State:
        time: int32
        seen: int8[12]

    def reset(self, state, rng):
        state.time = 0

    def step(self, state, action, rng):
        state.seen[state.time] = 1
        state.time += 1
        return 0.0, False

    def observe(self, state, obs):
        obs[0] = 0.5
