"""Small envs with structured spaces and with agents that come and go, which the tests of emulation share."""

import gymnasium
import numpy as np
from gymnasium import spaces

try:
    from pettingzoo import ParallelEnv
except ImportError:  # the tests that need it skip themselves
    ParallelEnv = object


class Quest(gymnasium.Env):
    """A nested dict with leaves of several dtypes, text included; ends after 5 steps."""

    observation_space = spaces.Dict(
        {
            "inventory": spaces.Dict({"items": spaces.Box(0, 9, (4,), np.int64), "gold": spaces.Discrete(100, start=1)}),
            "map": spaces.Box(0, 255, (3, 3), np.uint8),
            "pose": spaces.Tuple((spaces.Box(-1, 1, (2,), np.float32), spaces.MultiBinary(3))),
            "hint": spaces.Text(8),
        }
    )
    action_space = spaces.Dict({"move": spaces.Discrete(5, start=-2), "use": spaces.MultiDiscrete([3, 2])})

    def __init__(self, spoil=None):
        self.spoil = spoil  # a function that changes observations for the worse
        self.actions = []

    def observe(self):
        rng = self.np_random
        observation = {
            "inventory": {"items": rng.integers(0, 10, 4), "gold": np.int64(1 + self.steps)},
            "map": rng.integers(0, 256, (3, 3)).astype(np.uint8),
            "pose": (rng.uniform(-1, 1, 2).astype(np.float32), rng.integers(0, 2, 3).astype(np.int8)),
            "hint": "go" + "NESW"[self.steps % 4],
        }
        self.seen = observation
        return observation if self.spoil is None else self.spoil(observation)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        print("quest begins")
        return self.observe(), {}

    def step(self, action):
        self.steps += 1
        self.actions.append(action)
        return self.observe(), float(self.steps), self.steps == 5, False, {"steps": self.steps}


class Crowd(ParallelEnv):
    """Agents follow a script: who is there at each time; `agent_2` before `agent_10`.

    Observations are [time, number of the agent]; the reward is the agent's number plus a tenth of its action.
    """

    metadata = {"name": "crowd"}
    render_mode = None

    def __init__(self, script, ends=None, possible=True, masks=False):
        self.script = script  # for each time the agents that are there
        self.ends = ends or {}  # (time, agent) -> "terminated" or "truncated"; None: vanishes without a flag
        self.masks = masks
        self.received = []
        if possible:
            self.possible_agents = sorted({agent for listed in script for agent in listed})

    def observation_space(self, agent):
        return spaces.Box(0, 100, (2,), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(4)

    @staticmethod
    def number(agent):
        return int(agent.rpartition("_")[2])

    def observe(self, agents):
        return {agent: np.array([self.time, self.number(agent)], np.float32) for agent in agents}

    def infos(self, agents):
        if not self.masks:
            return {agent: {} for agent in agents}
        return {agent: {"action_mask": np.arange(4, dtype=np.int8) % 2} for agent in agents}

    def reset(self, seed=None, options=None):
        self.time = 0
        self.agents = list(self.script[0])
        return self.observe(self.agents), self.infos(self.agents)

    def step(self, actions):
        self.received.append(dict(actions))
        acted = self.agents
        self.time += 1
        self.agents = list(self.script[self.time]) if self.time < len(self.script) else []
        everyone = acted + [agent for agent in self.agents if agent not in acted]
        flags = {agent: self.ends.get((self.time, agent), "terminated") for agent in acted if agent not in self.agents}
        return (
            self.observe(everyone),
            {agent: self.number(agent) + 0.1 * float(actions[agent]) for agent in acted},
            {agent: flags.get(agent) == "terminated" for agent in acted},
            {agent: flags.get(agent) == "truncated" for agent in acted},
            self.infos(everyone),
        )


class Mixed(Crowd):
    """A crowd of two whose spaces are given by agent; observations are all ones, rewards 0, and nobody ever ends."""

    def __init__(self, observation_spaces, action_spaces):
        super().__init__([list(observation_spaces)] * 1000)
        self.own_observation_spaces, self.own_action_spaces = observation_spaces, action_spaces

    def observation_space(self, agent):
        return self.own_observation_spaces[agent]

    def action_space(self, agent):
        return self.own_action_spaces[agent]

    def observe(self, agents):
        spaces_of = self.own_observation_spaces
        return {agent: np.ones(spaces_of[agent].shape, spaces_of[agent].dtype) for agent in agents}

    def step(self, actions):
        for agent, action in actions.items():
            assert self.action_space(agent).contains(action), (agent, action)
        outcome = super().step(dict.fromkeys(actions, 0))
        self.received[-1] = dict(actions)
        return outcome
