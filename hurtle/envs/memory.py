"""Memory: watch a binary sequence go by, wait, then recite it.

Example:
    >>> import hurtle
    >>> env = hurtle.make("memory", mem_length=1, mem_delay=0)
    >>> obs, info = env.reset(seed=0)
    >>> token = int(obs[0] > 0)  # shown on the first step only
    >>> obs, reward, terminated, truncated, info = env.step(0)  # actions do not matter while watching
    >>> obs, reward, terminated, truncated, info = env.step(token)
    >>> reward, terminated
    (1.0, True)
"""

import numpy as np

from hurtle.native import Box, Discrete, Env, int8, int16

CELL = 16  # pixels
UNKNOWN, ZERO, ONE, CURSOR = (40, 40, 40), (60, 120, 216), (240, 180, 40), (255, 255, 255)


class Memory(Env):
    """Recite a binary sequence seen earlier; impossible without recurrence.

    An episode has three phases: `mem_length` steps that each show one random token, `mem_delay` steps that show
    nothing, and `mem_length` steps in which the agent repeats the tokens in order; each correct one pays 1 /
    `mem_length`. Actions before the recital are ignored. The observation is (token, recite): the token is -1 or +1
    while it is shown and 0 otherwise, `recite` is 1 during the recital.

    The best return is 1. Observations during the recital do not depend on the tokens, so a policy without memory
    expects 0.5 whatever it does. A recurrent agent that stays at 0.5 has a bug in its recurrence: the hidden state is
    not carried from step to step, is cleared at the wrong steps, or the learner replays sequences in another order or
    from another initial state than the actor. Scores between 0.5 and 1 mean that it remembers only part of the sequence:
    gradients do not reach back `mem_length + mem_delay` steps.
    """

    action_space = Discrete(2)
    observation_space = Box(-1.0, 1.0, (2,))
    max_steps = None

    mem_length: int = 2
    mem_delay: int = 2

    best_return = 1.0
    random_return = 0.5

    class State:
        tokens: int8["mem_length"]
        time: int16

    def reset(self, state, rng):
        for i in range(self.mem_length):
            state.tokens[i] = rng.integers(2)

    def step(self, state, action, rng):
        reward = 0.0
        position = state.time - self.mem_length - self.mem_delay
        if position >= 0 and action == state.tokens[position]:
            reward = 1.0 / float(self.mem_length)
        state.time += 1
        return reward, state.time == 2 * self.mem_length + self.mem_delay

    def observe(self, state, obs):
        if state.time < self.mem_length:
            obs[0] = 2.0 * float(state.tokens[state.time]) - 1.0
        elif state.time >= self.mem_length + self.mem_delay:
            obs[1] = 1.0

    def render(self, state):
        """One column per step: the tokens shown, then the tokens recited; a white mark under the current step."""
        recital = self.mem_length + self.mem_delay
        image = np.zeros((2, recital + self.mem_length, 3), np.uint8)
        for i in range(self.mem_length):
            colour = ONE if state.tokens[i] else ZERO
            image[0, i] = colour if i <= state.time else UNKNOWN
            image[0, recital + i] = colour if recital + i < state.time else UNKNOWN
        image[1, min(state.time, recital + self.mem_length - 1)] = CURSOR
        return image.repeat(CELL, 0).repeat(CELL, 1)
