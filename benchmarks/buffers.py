"""Replay buffers: transitions per second that are pushed and sampled, beside the peers' in the same run, and their memory.

python benchmarks/buffers.py            # all cases; saves benchmarks/results/buffers.md and .json
python benchmarks/buffers.py --quick    # see that it runs: small buffers, nothing is saved
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from record import Job, rates, save, short, table

from hurtle.buffers.replay import Replay
from hurtle.buffers.rollout import Rollout
from hurtle.policies.build import PolicyConfig, build_policy

ENVS, STEPS = 8, 16
NOTE = (
    "Transitions per second, the best of several rounds with the libraries taking turns; ratios are Hurtle's over theirs. "
    f"{ENVS} envs, full buffers. Hurtle gets rollouts of {STEPS} steps, as its collectors fill them. SB3 gets the steps of all "
    "envs one by one. cpprb and rlox get all transitions of a rollout at once; putting the next observations together is part "
    "of their push. A sample is a batch as the learner gets it: torch tensors for Hurtle (in memory that the next sample "
    "overwrites) and SB3, NumPy arrays for cpprb and rlox. rlox stores float32; SB3 has no priorities. Priorities are updated "
    "after every sample. Peers have their default settings, with which next observations are stored too: SB3's "
    "`optimize_memory_usage` and cpprb's `next_of` and `stack_compress` would save memory. Memory is that of the buffers' "
    "arrays (cpprb and rlox: computed)."
)


@dataclass(frozen=True)
class Case:
    """What is stored."""

    about: str
    shape: tuple[int, ...]
    dtype: Any
    capacity: int
    batch: int
    prioritized: bool = False
    stack: int = 1


CASES = {
    "vectors": Case("17-dim observations, 6-dim actions", (17,), np.float32, 1_000_000, 256),
    "vectors, by priority": Case("17-dim observations, 6-dim actions, by priority", (17,), np.float32, 1_000_000, 256, True),
    "images": Case("4 × 84 × 84 bytes", (4, 84, 84), np.uint8, 20_000, 32, stack=4),
    "images, by priority": Case("4 × 84 × 84 bytes, by priority", (4, 84, 84), np.uint8, 20_000, 32, True, stack=4),
}


@dataclass
class Buffer:
    """One library's: pushes a rollout's worth of transitions, samples a batch; each returns how many."""

    push: Job
    sample: Job
    nbytes: int


class Data:
    """The same rollout for everybody."""

    def __init__(self, case: Case):
        rng = np.random.default_rng(0)
        self.observation_space = spaces.Box(0, 255, case.shape, case.dtype)
        self.action_space: Any = spaces.Discrete(6) if case.stack > 1 else spaces.Box(-1, 1, (6,), np.float32)
        total = STEPS + case.stack
        frames = rng.integers(0, 255, (total, ENVS, *(case.shape[1:] if case.stack > 1 else case.shape)))
        if case.stack > 1:
            stacked = np.stack([frames[t : t + case.stack] for t in range(STEPS + 1)]).swapaxes(1, 2)
        else:
            stacked = frames[: STEPS + 1]
        stacked = np.ascontiguousarray(stacked.astype(case.dtype))
        self.obs, self.last_obs = stacked[:-1], stacked[-1].copy()
        self.actions = rng.integers(0, 6, (STEPS, ENVS)) if case.stack > 1 else rng.random((STEPS, ENVS, 6)).astype(np.float32)
        self.rewards = rng.random((STEPS, ENVS)).astype(np.float32)
        self.terminated = rng.random((STEPS, ENVS)) < 0.005
        self.truncated = np.zeros((STEPS, ENVS), np.bool_)

    def following(self) -> np.ndarray:
        """The observation after each step, which other buffers store too: [STEPS × ENVS, …]."""
        return self.flat(np.concatenate([self.obs[1:], self.last_obs[None]]))

    def flat(self, array: np.ndarray) -> np.ndarray:
        """An array [STEPS, ENVS, …] as [STEPS × ENVS, …]."""
        return np.ascontiguousarray(array.reshape(STEPS * ENVS, *array.shape[2:]))


def hurtle_buffer(case: Case, data: Data) -> Buffer:
    """Ours."""
    config = PolicyConfig(policy="mlp", hidden_sizes=(8,))
    rollout = Rollout(build_policy(config, data.observation_space, data.action_space), STEPS, ENVS)
    rollout.obs.copy_(torch.from_numpy(data.obs))
    rollout.last_obs.copy_(torch.from_numpy(data.last_obs))
    for name in ("actions", "rewards", "terminated", "truncated"):
        getattr(rollout, name).copy_(torch.from_numpy(getattr(data, name)))
    rollout.starts[1:] = rollout.terminated[:-1]
    replay = Replay(rollout, case.capacity, frame_stack=case.stack, priority_alpha=0.6 if case.prioritized else None)
    errors = torch.rand(case.batch)

    def push() -> int:
        replay.add(rollout)
        return STEPS * ENVS

    def sample() -> int:
        ids = replay.sample(case.batch).ids
        replay.update_priorities(ids, errors)
        return case.batch

    tree = replay._tree
    return Buffer(push, sample, replay.nbytes + (0 if tree is None else tree.nbytes))


def sb3_buffer(case: Case, data: Data) -> Buffer | None:
    """Stable-Baselines3's ReplayBuffer."""
    from stable_baselines3.common.buffers import ReplayBuffer

    if case.prioritized:
        return None
    buffer = ReplayBuffer(case.capacity, data.observation_space, data.action_space, device="cpu", n_envs=ENVS)
    infos: list[dict[str, Any]] = [{} for _ in range(ENVS)]

    def push() -> int:
        for t in range(STEPS):
            following = data.obs[t + 1] if t + 1 < STEPS else data.last_obs
            buffer.add(data.obs[t], following, data.actions[t], data.rewards[t], data.terminated[t], infos)
        return STEPS * ENVS

    def sample() -> int:
        buffer.sample(case.batch)
        return case.batch

    arrays = (buffer.observations, buffer.next_observations, buffer.actions, buffer.rewards, buffer.dones, buffer.timeouts)
    return Buffer(push, sample, sum(array.nbytes for array in arrays if array is not None))


def cpprb_buffer(case: Case, data: Data) -> Buffer:
    """The ReplayBuffer or PrioritizedReplayBuffer of cpprb."""
    import cpprb

    actions = {"dtype": np.int64} if case.stack > 1 else {"shape": 6, "dtype": np.float32}
    fields = {
        "obs": {"shape": case.shape, "dtype": case.dtype},
        "next_obs": {"shape": case.shape, "dtype": case.dtype},
        "act": actions,
        "rew": {"dtype": np.float32},
        "done": {"dtype": np.bool_},
    }
    if case.prioritized:
        buffer = cpprb.PrioritizedReplayBuffer(case.capacity, fields, alpha=0.6)
    else:
        buffer = cpprb.ReplayBuffer(case.capacity, fields)
    flat = {"obs": data.obs, "act": data.actions, "rew": data.rewards, "done": data.terminated}
    flat = {name: data.flat(array) for name, array in flat.items()}
    errors = np.random.default_rng(1).random(case.batch)

    def push() -> int:
        buffer.add(**flat, next_obs=data.following())
        return STEPS * ENVS

    def sample() -> int:
        if case.prioritized:
            found = buffer.sample(case.batch, beta=1.0)
            buffer.update_priorities(found["indexes"], errors)
        else:
            buffer.sample(case.batch)
        return case.batch

    row = 2 * int(np.prod(case.shape)) * np.dtype(case.dtype).itemsize + (8 if case.stack > 1 else 24) + 4 + 1
    return Buffer(push, sample, case.capacity * row)


def rlox_buffer(case: Case, data: Data) -> Buffer:
    """The ReplayBuffer or PrioritizedReplayBuffer of rlox, which take vectors of float32."""
    import rlox

    size, count = int(np.prod(case.shape)), 1 if case.stack > 1 else 6
    kind = rlox.PrioritizedReplayBuffer if case.prioritized else rlox.ReplayBuffer
    buffer = kind(case.capacity, size, count)
    obs = data.flat(data.obs).reshape(STEPS * ENVS, size).astype(np.float32)
    actions = data.flat(data.actions).reshape(STEPS * ENVS, count).astype(np.float32)
    rewards = data.flat(data.rewards)
    terminated, truncated = (data.flat(part).astype(np.uint8) for part in (data.terminated, data.truncated))
    errors, seeds = np.random.default_rng(1).random(case.batch), iter(range(1 << 60))

    def push() -> int:
        following = data.following().reshape(STEPS * ENVS, size).astype(np.float32, copy=False)
        if case.prioritized:  # one by one: it has no batches
            for k in range(STEPS * ENVS):
                buffer.push(obs[k], actions[k], float(rewards[k]), bool(terminated[k]), False, following[k])
        else:
            buffer.push_batch(obs.ravel(), following.ravel(), actions.ravel(), rewards, terminated, truncated)
        return STEPS * ENVS

    def sample() -> int:
        found = buffer.sample(case.batch, next(seeds))
        if case.prioritized:
            buffer.update_priorities(found["indices"], errors)
        return case.batch

    return Buffer(push, sample, case.capacity * 4 * (2 * size + count + 2))


MAKERS: dict[str, Callable[[Case, Data], Buffer | None]] = {
    "Hurtle": hurtle_buffer, "SB3": sb3_buffer, "cpprb": cpprb_buffer, "rlox": rlox_buffer,
}  # fmt: skip


def measure(case: Case, rounds: int, seconds: float) -> dict[str, Any]:
    """Rates of pushing and of sampling, by library; None where it has no such buffer or is not installed."""
    data, found = Data(case), {}
    for name, make in MAKERS.items():
        try:
            if (made := make(case, data)) is not None:
                found[name] = made
        except ImportError as error:
            print(f"without {name}: {error}")
    for made in found.values():  # a full buffer, as in most of a run
        pushed = 0
        while pushed < case.capacity:
            pushed += made.push()
    results: dict[str, Any] = {"bytes": {name: made.nbytes for name, made in found.items()}}
    for what in ("push", "sample"):
        results[what] = rates({name: getattr(made, what) for name, made in found.items()}, seconds, rounds)
    return results


def report(results: dict[str, Any]) -> str:
    """The table."""
    rows = []
    for name, found in results.items():
        for what in ("push", "sample"):
            ours = found[what]["Hurtle"]
            cells = [CASES[name].about, what, short(ours)]
            for peer in list(MAKERS)[1:]:
                rate = found[what].get(peer)
                cells.append("–" if rate is None else f"{short(rate)} ({ours / rate:.1f}×)")
            rows.append(cells)
        sizes = [found["bytes"].get(peer) for peer in MAKERS]
        rows.append([CASES[name].about, "memory", *("–" if size is None else f"{size / 2**20:,.0f} MiB" for size in sizes)])
    return table(["what", "", *MAKERS], rows)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small buffers; saves nothing")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=tuple(CASES))
    options = parser.parse_args(arguments)
    results = {}
    torch.set_num_threads(1)
    for name in options.cases:
        case = CASES[name]
        if options.quick:
            case = Case(case.about, case.shape, case.dtype, 1000, 16, case.prioritized, case.stack)
        results[name] = measure(case, 1 if options.quick else 7, 0.01 if options.quick else 0.2)
    text = report(results)
    print(text)
    if not options.quick and len(options.cases) == len(CASES):
        save("buffers", results, f"# Replay buffers\n\n{NOTE}\n\n{text}")


if __name__ == "__main__":
    main()
