"""Stochastic: the best policy is a biased coin flip.

Example:
    >>> import hurtle
    >>> env = hurtle.make("stochastic", p=0.75, horizon=2)
    >>> obs, info = env.reset(seed=0)
    >>> obs, reward, terminated, truncated, info = env.step(0)
    >>> obs, reward, terminated, truncated, info = env.step(0)  # always 0: deterministic, and worth nothing
    >>> reward, terminated
    (0.0, True)
"""

import numpy as np

from hurtle.errors import EnvDefinitionError
from hurtle.native import Box, Discrete, Env, int32

WIDTH, HEIGHT = 128, 32  # pixels
BACKGROUND, PLAYED, GOAL = (40, 40, 40), (60, 120, 216), (255, 255, 255)


class Stochastic(Env):
    """Play action 0 with probability p: every deterministic policy is poor.

    The agent plays 0 or 1 for `horizon` steps, always sees the same observation, and gets one reward, at the end, for
    how closely its actions follow the distribution (p, 1 - p). The reward is an unbiased estimate of

        1 - ((q - p) / min(p, 1 - p))**2

    for an agent that plays 0 with probability q, whatever the horizon. The expected returns of memoryless policies are
    therefore

    - 1 for q = p, the best (`best_return`);
    - 0 for the better of the two deterministic policies, which always plays the likelier action
      (`deterministic_return`), and 1 - (max(p, 1 - p) / min(p, 1 - p))**2 for the other: -8 if p = 0.75;
    - 1 - ((0.5 - p) / min(p, 1 - p))**2 for the uniform policy (`random_return`): also 0 for the default p = 0.75.

    An agent near 0 has learnt nothing or, more likely, become deterministic: actions are chosen by argmax during
    training, the log-probabilities in the loss are not those of the sampled actions, or updates overshoot (ratio not
    clipped, learning rate too high). Use a memoryless policy: a recurrent one can count its steps and play 0 in exactly
    a fraction p of them, deterministically, for a little more than 1, which tests nothing. Evaluate with sampled
    actions.
    """

    action_space = Discrete(2)
    observation_space = Box(0.0, 1.0, (1,))
    max_steps = None

    p: float = 0.75
    horizon: int = 32

    best_return = 1.0
    deterministic_return = 0.0

    def __init__(self, **parameters):
        super().__init__(**parameters)
        if not 0.0 < self.p < 1.0:
            raise EnvDefinitionError(f"p must be between 0 and 1, got {self.p}.")
        if self.horizon < 2:
            raise EnvDefinitionError(f"horizon must be at least 2, got {self.horizon}.")

    @property
    def random_return(self):
        return 1.0 - ((0.5 - self.p) / min(self.p, 1.0 - self.p)) ** 2

    class State:
        time: int32
        zeros: int32  # number of times action 0 was played

    def reset(self, state, rng):
        state.time = 0

    def step(self, state, action, rng):
        state.time += 1
        if action == 0:
            state.zeros += 1
        if state.time < self.horizon:
            return 0.0, False
        # Two different actions are both 0 with probability q**2, so the expected error is (q - p)**2. The squared
        # frequency would add its variance and move the best q away from p.
        n, zeros = float(self.horizon), float(state.zeros)
        error = zeros * (zeros - 1.0) / (n * (n - 1.0)) - 2.0 * self.p * zeros / n + self.p * self.p
        scale = min(self.p, 1.0 - self.p)
        return 1.0 - error / (scale * scale), True

    def observe(self, state, obs):
        obs[0] = 1.0

    def render(self, state):
        """A bar for the fraction of action 0 so far, and a line where it should end."""
        image = np.full((HEIGHT, WIDTH, 3), BACKGROUND, np.uint8)
        image[:, : round(WIDTH * state.zeros / max(state.time, 1))] = PLAYED
        goal = round(WIDTH * self.p)
        image[:, goal - 1 : goal + 1] = GOAL
        return image
