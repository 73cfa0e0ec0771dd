"""Password: guess a fixed binary string, with a reward only for the complete string.

Example:
    >>> import hurtle
    >>> env = hurtle.make("password", length=3)
    >>> obs, info = env.reset(seed=0)
    >>> [float(env.step(digit)[1]) for digit in (1, 0, 1)]
    [0.0, 0.0, 1.0]
"""

import numpy as np

from hurtle.errors import EnvDefinitionError
from hurtle.native import Box, Discrete, Env, int8

CELL = 16  # pixels
UNKNOWN, RIGHT, WRONG = (40, 40, 40), (60, 180, 90), (210, 60, 60)


class Password(Env):
    """Guess a fixed binary password; the only reward is for a completely correct guess.

    Each step guesses the next of `length` digits (at most 32). After the last one the episode ends with a reward of 1
    if the whole guess was right and 0 otherwise. The observation holds the guesses so far: -1 for a 0, +1 for a 1, and
    0 for the remaining digits. The password is the same in every episode and every copy of the environment.

    The best return is 1, and uniform play finds the password once in 2**length episodes. An agent that stays at 0
    became deterministic before it saw the first reward (initial logits not near zero, too little entropy bonus), or
    does not learn from the few rewards it sees: the reward of the last step is dropped at the episode boundary, is not
    credited to the earlier guesses, or rare rewards are normalised or clipped away.
    """

    action_space = Discrete(2)
    max_steps = None

    length: int = 5

    best_return = 1.0

    # The binary digits of e after the point: a fixed sequence without a pattern
    DIGITS = np.array([1, 0, 1, 1, 0, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 1, 0, 1, 0, 1, 0, 0, 0, 1, 0, 1, 1, 0, 0, 0, 1, 0], np.int8)

    def __init__(self, **parameters):
        super().__init__(**parameters)
        if not 1 <= self.length <= len(self.DIGITS):
            raise EnvDefinitionError(f"length must be between 1 and {len(self.DIGITS)}, got {self.length}.")

    @property
    def observation_space(self):
        return Box(-1.0, 1.0, (self.length,))

    @property
    def random_return(self):
        return 0.5**self.length

    class State:
        guess: int8["length"]  # -1, +1, or 0 where not yet guessed
        position: int8
        mistakes: int8

    def reset(self, state, rng):
        state.position = 0

    def step(self, state, action, rng):
        state.guess[state.position] = 2 * action - 1
        if action != self.DIGITS[state.position]:
            state.mistakes += 1
        state.position += 1
        # A wrong digit does not end the episode, which would give away where the mistake was.
        terminated = state.position == self.length
        return float(terminated and state.mistakes == 0), terminated

    def observe(self, state, obs):
        for i in range(self.length):
            obs[i] = float(state.guess[i])

    def render(self, state):
        """One cell per digit: green for a right guess, red for a wrong one."""
        image = np.full((1, self.length, 3), UNKNOWN, np.uint8)
        for i in range(state.position):
            image[0, i] = RIGHT if state.guess[i] == 2 * self.DIGITS[i] - 1 else WRONG
        image = image.repeat(CELL, 0).repeat(CELL, 1)
        image[:, CELL - 1 :: CELL] = 0  # a gap between digits
        return image
