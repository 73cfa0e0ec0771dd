"""Random episodes in rollouts, and what a replay buffer should make of them, in plain Python."""

from dataclasses import dataclass, field

import numpy as np
import torch
from gymnasium import spaces

from hurtle.buffers.rollout import Finals, Rollout
from hurtle.policies.build import PolicyConfig, build_policy

GAMMA = 0.9


@dataclass
class Row:
    """What the reference knows of one row: its steps in order, and the observation that follows the last one."""

    steps: list = field(default_factory=list)  # (obs, action, reward, mask, "terminated" | final observation | "")
    following: object = None  # unknown
    begun: list = field(default_factory=list)  # where rollouts began: index of the step, state of the memory


class World:
    """Random episodes in rollouts. Observations count up, so that each tells what it is."""

    def __init__(
        self, seed, num_rows=3, stack=1, dtype=np.float32, shape=(2,), masked=False, absent=0.0, ends=0.2, recurrent="none"
    ):
        self.rng, self.num_rows, self.stack, self.masked, self.absent = (
            np.random.default_rng(seed),
            num_rows,
            stack,
            masked,
            absent,
        )
        self.ends, self.count, self.dtype = ends, 0, dtype
        self.shape = (stack, *shape) if stack > 1 else shape
        space = spaces.Box(0, 200 if dtype == np.uint8 else 1e9, self.shape, dtype)
        self.policy = build_policy(
            PolicyConfig(policy="mlp", hidden_sizes=(8,), recurrent=recurrent),
            space,
            spaces.Discrete(3),
            normalize_observations=dtype == np.float64,
        )
        self.rows = [Row() for _ in range(num_rows)]
        self.starting = [True] * num_rows
        self.shown = [self.first() for _ in range(num_rows)]

    def frame(self):
        self.count += 1
        shape = self.shape[1:] if self.stack > 1 else self.shape
        if self.dtype == np.uint8:  # in base 200: ids of one byte would repeat
            digits = [self.count // 200**k % 200 for k in range(int(np.prod(shape)))]
            return np.array(digits, np.uint8).reshape(shape)
        return (np.arange(np.prod(shape)).reshape(shape) + 100 * self.count).astype(self.dtype)

    def first(self):
        return np.stack([self.frame() for _ in range(self.stack)]) if self.stack > 1 else self.frame()

    def next(self, shown):
        return np.concatenate([shown[1:], self.frame()[None]]) if self.stack > 1 else self.frame()

    def new_rollout(self, num_steps):
        return Rollout(self.policy, num_steps, self.num_rows, self.masked)

    def rollout(self, num_steps=5, columns=None):
        made = Rollout(self.policy, num_steps, len(columns) if columns is not None else self.num_rows, self.masked)
        finals = []
        for n, row in enumerate(range(self.num_rows) if columns is None else columns):
            own = self.rows[row]
            if made.initial_state:
                own.begun.append((len(own.steps), float(self.count)))
                made.initial_state[0][n] = self.count
            for t in range(num_steps):
                made.starts[t, n] = self.starting[row]
                if self.rng.random() < self.absent:
                    made.valid[t, n] = made.all_valid = False
                    made.obs[t, n] = 7
                    if made.initial_state and t == 0:
                        own.begun.pop()  # what it was before it left is not known
                    continue
                obs, action, reward = self.shown[row], int(self.rng.integers(3)), float(np.float32(self.rng.normal()))
                made.obs[t, n], made.actions[t, n], made.rewards[t, n] = torch.from_numpy(obs), action, reward
                mask = self.rng.random(3) < 0.7
                if self.masked:
                    made.masks[t, n] = torch.from_numpy(mask)
                how, self.shown[row], self.starting[row] = "", self.next(obs), False
                if self.rng.random() < self.ends:
                    how = "terminated"
                    if self.rng.random() < 0.5:
                        how = self.shown[row]
                        finals.append((t, n, how))
                    made.terminated[t, n], made.truncated[t, n] = isinstance(how, str), not isinstance(how, str)
                    self.shown[row], self.starting[row] = self.first(), True
                own.steps.append((obs, action, reward, mask, how))
            made.last_obs[n] = torch.from_numpy(self.shown[row])
        for row in range(self.num_rows) if columns is None else columns:
            self.rows[row].following = self.shown[row] if made.all_valid and not self.masked else None
        if finals:
            steps, rows, obs = zip(*finals, strict=True)
            made.finals = Finals(torch.tensor(steps), torch.tensor(rows), torch.from_numpy(np.stack(obs)), ())
        return made

    def abandon(self, rows, starts):
        """Go on elsewhere, with the start of an episode or without; what followed the last steps is known."""
        for row in rows:
            obs, action, reward, mask, how = self.rows[row].steps[-1]
            if isinstance(how, str) and not how:
                self.rows[row].steps[-1] = (obs, action, reward, mask, self.shown[row])
            self.shown[row], self.starting[row] = self.first(), starts

    def transitions(self, n_step):
        """By their observation's bytes: action, mask, the discounted sum, its discount, and what follows with its mask."""
        found = {}
        for row in self.rows:
            for first in range(len(row.steps)):
                total, factor, after, mask, knows = 0.0, 1.0, None, np.ones(3, bool), False
                for k in range(first, min(first + n_step, len(row.steps))):
                    *_, reward, _, how = row.steps[k]
                    ends = not isinstance(how, str) or how == "terminated"
                    if not ends and k + 1 == len(row.steps) and row.following is None:
                        break  # what follows is not known yet
                    total, factor, knows = total + factor * reward, factor * GAMMA, True
                    if ends:
                        after, mask = (None if isinstance(how, str) else how), np.ones(3, bool)
                        factor = 0.0 if after is None else factor
                        break
                    after, mask = (
                        (row.steps[k + 1][0], row.steps[k + 1][3]) if k + 1 < len(row.steps) else (row.following, mask)
                    )
                if knows:
                    obs, action, _, own, _ = row.steps[first]
                    found[obs.tobytes()] = (action, own, total, factor, after, mask)
        return found

    def slots(self, row):
        """All slots of a row: obs, action, reward, terminated, truncated, starts, valid; and where each step is."""
        found, places, starts = [], [], True
        for obs, action, reward, _, how in self.rows[row].steps:
            if starts:
                found += [(obs[f], 0, 0.0, False, False, False, False) for f in range(self.stack - 1)]
            places.append(len(found))
            cut = not isinstance(how, str)
            found.append((obs, action, reward, not cut and how == "terminated", cut, starts, True))
            if cut:
                found.append((how, 0, 0.0, False, False, False, False))
            starts = cut or how == "terminated"
        return found, places
