"""What `learning.py` trains on: tasks, the returns they must reach, and what other libraries report for them.

A task names an env and what differs from the env's preset; nothing here runs anything.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hurtle.envs.cartpole import BOUNDS, CartPole
from hurtle.native import Box
from hurtle.runners.settings import Settings, make_settings

Numbers = dict[str, Any]
"""An evaluation as a result file has it: mean, std, iqm, low, high, episodes."""


@dataclass(frozen=True)
class Goal:
    """What a task asks for."""

    kind: Literal["at least", "below", "times random", "above random", "none"] = "none"
    number: float = 0.0

    @property
    def needs_random(self) -> bool:
        """Whether a random policy must be measured too."""
        return "random" in self.kind

    def threshold(self, random: Numbers | None = None) -> float | None:
        """The return that decides; None where there is none, or while the random policy is not measured."""
        if not self.needs_random:
            return None if self.kind == "none" else self.number
        if random is None:
            return None
        return self.number * random["mean"] if self.kind == "times random" else random["high"]

    def is_met(self, value: float, low: float, random: Numbers | None = None) -> bool | None:
        """Whether a return, whose 95 % interval begins at `low`, meets the goal; None if that cannot be said."""
        threshold = self.threshold(random)
        if threshold is None:
            return None
        if self.kind == "above random":  # the intervals do not overlap
            return low > threshold
        return value < threshold if self.kind == "below" else value >= threshold

    def text(self, random: Numbers | None = None) -> str:
        """For the table."""
        threshold = self.threshold(random)
        if self.kind in ("at least", "below"):
            return f"{'≥' if self.kind == 'at least' else '<'} {self.number:g}"
        if self.kind == "none":
            return "–"
        what = f"≥ {self.number:g} × random" if self.kind == "times random" else "> random"
        return what if threshold is None else f"{what}: {threshold:.2f}"


@dataclass(frozen=True)
class Task:
    """A cell of the grid's first axis."""

    about: str
    env: Any
    """As `hurtle.train` takes it."""
    goal: Goal
    words: dict[str, Any] = field(default_factory=dict)
    """Settings on top of the env's preset."""
    sampled: bool = False
    """Evaluate with sampled actions."""
    episodes: int = 100
    """Of the final evaluation."""
    sb3: str = ""
    """The Gymnasium id that SB3 trains on; empty: SB3 does not run."""
    zoo: str = "–"
    """What SB3's zoo reports, tuned."""
    cleanrl: str = "–"
    """What CleanRL reports."""

    def settings(self, seed: int = 0, quick: bool = False) -> Settings:
        """Everything `hurtle.train` is told."""
        return make_settings(self.env, self.overrides(seed, quick))

    def overrides(self, seed: int = 0, quick: bool = False) -> dict[str, Any]:
        """The words for `hurtle.train`, without those that say where files go."""
        words = {"num_workers": 1, **self.words}  # of native envs; the grid runs several trainings side by side
        words |= {"seed": seed, "eval_episodes": self.episodes, "eval_sampled": self.sampled}
        if quick:
            words |= {"total_steps": 2 * self._rollout(), "eval_episodes": 8}
        return words

    def _rollout(self) -> int:
        settings = make_settings(self.env, self.words)
        return settings.train.num_envs * settings.algorithm.num_steps


class MaskedCartPole(CartPole):
    """CartPole that shows where cart and pole are, not how fast they move: one observation is not enough to act well."""

    observation_space = Box(-BOUNDS[::2], BOUNDS[::2])

    def observe(self, state, obs):
        """Position and angle."""
        obs[0] = state.x
        obs[1] = state.theta


def _at_least(number: float) -> Goal:
    return Goal("at least", number)


MASKED = {
    "total_steps": 700_000,
    "num_envs": 32,
    "num_steps": 64,
    "minibatch_size": 512,
    "num_epochs": 10,
    "learning_rate": 3e-3,
    "anneal_clip_range": True,
    "clip_values": False,
    "gamma": 0.98,
    "gae_lambda": 0.8,
    "entropy_coef": 0.0,
    "normalize_observations": True,
}
"""One configuration for both policies, so that only the memory differs."""

LAG_1 = {"runner": "async", "lag": "1"}
R2D2 = {"algorithm": "r2d2", "num_envs": 16, "learning_rate": 1e-3, "epsilon_fraction": 0.3, "device": "auto", "runner": "auto"}
ZERO_STATE = {"stored_state": False, "burn_in": 0, "sequence_length": 40}
OCEAN = {"sampled": True, "episodes": 4_000}
"""The returns of single episodes are noise on purpose (bandit, stochastic): many are needed, and they are short."""

# MinAtar's published figures are returns while training, hence sampled; that also ends games in which a policy goes in circles.
TASKS: dict[str, Task] = {
    "cartpole_100k": Task(
        "CartPole, 100K steps",
        "cartpole",
        _at_least(495),
        {"total_steps": 100_000},
        sb3="CartPole-v1",
        zoo="500 ± 0 (100K)",
        cleanrl="490 ± 6 (500K)",
    ),
    "pendulum_200k": Task(
        "Pendulum, 200K steps",
        "pendulum",
        _at_least(-180),
        {"total_steps": 200_000},
        sb3="Pendulum-v1",
        zoo="-172 ± 104 (100K, gSDE)",
    ),
    "dqn_cartpole_50k": Task(
        "DQN: CartPole, 50K steps",
        "cartpole",
        _at_least(490),
        {"algorithm": "dqn", "total_steps": 50_000},
        zoo="500 (50K)",
        cleanrl="489 ± 16 (500K)",
    ),
    "sac_pendulum_20k": Task(
        "SAC: Pendulum, 20K steps",
        "pendulum",
        _at_least(-160),
        {"algorithm": "sac", "total_steps": 20_000},
        zoo="-157 ± 89 (20K)",
    ),
    "td3_pendulum_20k": Task(
        "TD3: Pendulum, 20K steps",
        "pendulum",
        _at_least(-160),
        {"algorithm": "td3", "total_steps": 20_000},
        zoo="-152 ± 90 (20K)",
    ),
    "bandit": Task("Ocean: bandit", "bandit", _at_least(0.9), **OCEAN),
    "memory": Task("Ocean: memory (LSTM)", "memory", _at_least(0.9), **OCEAN),
    "password": Task("Ocean: password", "password", _at_least(0.9), **OCEAN),
    "squared": Task("Ocean: squared", "squared", _at_least(0.9), **OCEAN),
    "stochastic": Task("Ocean: stochastic", "stochastic", _at_least(0.9), **OCEAN),
    "cartpole_masked_lstm": Task(
        "CartPole without velocities, LSTM",
        MaskedCartPole,
        _at_least(475),
        {**MASKED, "recurrent": "lstm"},
        zoo="500 (100K, PPO-LSTM)",
    ),
    "cartpole_masked_mlp": Task("CartPole without velocities, no memory", MaskedCartPole, Goal("below", 475), MASKED),
    "acrobot_1m": Task(
        "Acrobot, 1M steps",
        "acrobot",
        _at_least(-85),
        {"total_steps": 1_000_000},
        sb3="Acrobot-v1",
        zoo="-73.5 ± 18 (1M)",
        cleanrl="-86.4 ± 1.3",
    ),
    "mountain_car_1m": Task(
        "MountainCar, 1M steps",
        "mountain_car",
        _at_least(-115),
        {"total_steps": 1_000_000},
        sb3="MountainCar-v0",
        zoo="-110 ± 20 (1M)",
        cleanrl="-200",
    ),
    "acrobot_process": Task(
        "Gymnasium's Acrobot-v1 in worker processes, 1M steps",
        "Acrobot-v1",
        _at_least(-85),
        {"total_steps": 1_000_000, "backend": "process", "num_workers": 2},
        zoo="-73.5 ± 18 (1M)",
        cleanrl="-86.4 ± 1.3",
    ),
    # Without the penalty for dying a return is the food eaten: a random snake's is below zero with it, and no yardstick.
    "snake": Task(
        "Snake, four agents, return = food eaten",
        "snake",
        Goal("times random", 5),
        {"env_parameters": {"reward_death": 0.0}},
        sampled=True,
    ),
    "simple_spread": Task(
        "PettingZoo's MPE simple_spread, three agents",
        "pettingzoo/mpe/simple_spread_v3",
        Goal("above random"),
        {
            "total_steps": 600_000,
            "backend": "serial",  # one training per core; workers would fight for it
            "num_workers": None,
            "num_envs": 16,
            "num_steps": 50,
            "minibatch_size": 400,
            "num_epochs": 8,
            "learning_rate": 1e-3,
            "gamma": 0.95,
            "normalize_observations": True,
            "reward_mode": "normalize",
        },
    ),
    **{
        name: Task(f"MinAtar: {name}, 10M steps", name, goal, {"total_steps": 10_000_000, "device": "auto"}, sampled=True)
        for name, goal in {
            "breakout": _at_least(28),
            "asterix": _at_least(16),
            "freeway": _at_least(55),
            "space_invaders": _at_least(130),
            "seaquest": Goal(),
        }.items()
    },
    **{
        f"pqn_{name}": Task(f"PQN: MinAtar {name}, 10M steps", name, goal, {"algorithm": "pqn", "device": "auto"})
        for name, goal in {"breakout": _at_least(43.8), "asterix": _at_least(42.6)}.items()  # what our PPO reaches
    },
    **{
        f"qr_{name}": Task(f"QR-DQN: MinAtar {name}, 5M steps", name, Goal(), {"algorithm": "dqn", "device": "auto"})
        for name in ("breakout", "asterix")
    },
}

# With actors: PPO at lag 1 has the goals of the same tasks without lag; the seeds' intervals should overlap.
TASKS |= {
    f"lag1_{name}": replace(TASKS[name], about=f"Lag 1: {TASKS[name].about}", words={**TASKS[name].words, **LAG_1}, sb3="")
    for name in ("cartpole_100k", "pendulum_200k", "acrobot_1m", "mountain_car_1m", "memory")
}
TASKS |= {
    "impala_cartpole": Task(
        "IMPALA, lag 1: CartPole, 500K steps",
        "cartpole",
        _at_least(490),
        {"algorithm": "impala", **LAG_1},
        cleanrl="490 ± 6 (500K, PPO)",
    ),
    "r2d2_cartpole_masked": Task(
        "R2D2: CartPole without velocities, 200K steps", MaskedCartPole, _at_least(475), {**R2D2, "total_steps": 200_000}
    ),
    "r2d2_cartpole_masked_zero": Task(
        "R2D2: the same from zero states, without burn-in",
        MaskedCartPole,
        Goal(),
        {**R2D2, **ZERO_STATE, "total_steps": 200_000},
    ),
    "r2d2_memory": Task(
        "R2D2: Ocean's memory, 200K steps", "memory", _at_least(0.9), {**R2D2, "total_steps": 200_000}, episodes=4_000
    ),
    "r2d2_asterix": Task(
        "R2D2: MinAtar asterix, 50M steps",
        "asterix",
        _at_least(16),
        {"algorithm": "r2d2", "device": "cuda", "precision": "bf16"},
    ),
    **{
        f"impala_{name}": Task(
            f"IMPALA: MinAtar {name}, 10M steps",
            name,
            TASKS[name].goal,
            {"algorithm": "impala", "device": "auto"},
            sampled=True,
        )
        for name in ("breakout", "asterix")
    },
}

# On the CPU, one training per core; Ant first, since it takes longest. The goals are what Tianshou's PPO reaches.
TASKS |= {
    f"ppo_{name.lower()}": Task(f"PPO: {name}-v5, 1M steps", f"{name}-v5", _at_least(goal), episodes=20, zoo=zoo)
    for name, goal, zoo in (
        ("Ant", 3_200, "1327 ± 452 (1M, v3)"),
        ("Walker2d", 3_500, "3479 ± 822 (1M, v3)"),
        ("Hopper", 2_600, "2410 ± 10 (1M, v3)"),
        ("HalfCheetah", 5_800, "5819 ± 664 (1M, v3)"),
    )
}

ON_GPU = {"device": "cuda", "precision": "tf32", "compile": True, "backend": "process", "num_workers": 4}
SAC = {"algorithm": "sac", "hidden_sizes": (256, 256), "num_envs": 16, "learning_starts": 10_000, "total_steps": 1_000_000}
XQC = {"algorithm": "xqc", "hidden_sizes": (256,) * 4, "num_envs": 32, "num_workers": 8, "replay_ratio": 0.5}
MUJOCO: dict[str, Task] = {
    f"sac_{name.lower()}": Task(
        f"SAC: {name}-v5, 1M steps",
        f"{name}-v5",
        _at_least(goal),
        {**ON_GPU, **SAC},
        episodes=20,
        zoo=zoo,
        cleanrl=cleanrl,
    )
    for name, goal, zoo, cleanrl in (
        ("HalfCheetah", 9_500, "9535 (1M, v3)", "9635 ± 1424 (1M)"),
        ("Hopper", 2_400, "2326 (1M, v3)", "2311 ± 343 (1M)"),
        ("Walker2d", 3_900, "3863 (1M, v3)", "3592 ± 911 (1M)"),
        ("Ant", 4_600, "4616 (1M, v3)", "–"),
    )
}
MUJOCO |= {
    f"xqc_{name.lower()}": Task(
        f"XQC: {name}-v5, 1M steps", f"{name}-v5", _at_least(goal), {**ON_GPU, **SAC, **XQC}, episodes=20
    )
    for name, goal in (("HalfCheetah", 12_000), ("Walker2d", 5_500), ("Ant", 6_000), ("Humanoid", 9_000))
}
"""What `learning_seeds.py` trains on, seeds of a task side by side on a GPU where the algorithm can."""
ALL = {**TASKS, **MUJOCO}
