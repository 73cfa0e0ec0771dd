"""Bandit: find the one arm that pays.

Example:
    >>> import hurtle
    >>> env = hurtle.make("bandit", num_actions=4, reward_noise=0.0)
    >>> obs, info = env.reset(seed=0)
    >>> obs, reward, terminated, truncated, info = env.step(3)
    >>> reward, terminated
    (1.0, True)
"""

import numpy as np

from hurtle.native import Box, Discrete, Env, int16

CELL = 16  # pixels
ARM, BEST, PULLED = (90, 90, 90), (240, 180, 40), (255, 255, 255)


class Bandit(Env):
    """Pull one of several arms, of which only the last pays: the simplest possible task.

    An episode is a single pull. The last arm pays `reward_scale` on average, the others 0, all with Gaussian noise of
    standard deviation `reward_noise * reward_scale`. The observation is constant.

    The best expected return is `reward_scale`; uniform play gets `reward_scale / num_actions`. An agent that does not
    learn this has a basic bug: the wrong sign of the loss or the advantage, rewards paired with the wrong actions, or
    one-step episodes mishandled (a value bootstrapped across their end). Learning at a scale of 1 but not at 0.01 or
    100 points to missing advantage normalisation, or to a value loss that swamps the policy loss. The paying arm is the
    last, so that neither the tie-break of an argmax (the first) nor an off-by-one action range finds it by accident.
    """

    observation_space = Box(0.0, 1.0, (1,))
    max_steps = None

    num_actions: int = 4
    reward_scale: float = 1.0
    reward_noise: float = 1.0

    @property
    def action_space(self):
        return Discrete(self.num_actions)

    @property
    def best_return(self):
        return self.reward_scale

    @property
    def random_return(self):
        return self.reward_scale / self.num_actions

    class State:
        pulled: int16  # 1 + the arm pulled, 0 before the pull

    def reset(self, state, rng):
        state.pulled = 0

    def step(self, state, action, rng):
        state.pulled = action + 1
        payout = rng.normal(0.0, self.reward_noise)
        if action == self.num_actions - 1:
            payout += 1.0
        return self.reward_scale * payout, True

    def observe(self, state, obs):
        obs[0] = 1.0

    def render(self, state):
        """A row of arms, the paying one in gold, with a white mark above the pulled one."""
        image = np.zeros((3, self.num_actions, 3), np.uint8)
        image[1:] = ARM
        image[1:, -1] = BEST
        if state.pulled > 0:
            image[0, state.pulled - 1] = PULLED
        image = image.repeat(CELL, 0).repeat(CELL, 1)
        image[:, CELL - 1 :: CELL] = 0  # a gap between arms
        return image
