"""What several ranks must do as one learner of all their steps does; run as a program, one rank's part of every case.

`python joined_cases.py RANK FOLDER` joins a gloo group of each of SIZES, runs all cases and saves what they return.
"""

import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from gymnasium import spaces
from made_rollouts import ACTIONS, OBS, collected

from hurtle.algorithms.algorithm import LearnerSetup, find_algorithm
from hurtle.buffers.replay import Transitions
from hurtle.buffers.rollout import Done, Finals, Rollout
from hurtle.collect.rewards import RewardRule
from hurtle.kernels import ranks as kernels
from hurtle.kernels.cuda_graphs import Graphs
from hurtle.kernels.ranks import Ranks
from hurtle.policies.build import build_policy
from hurtle.policies.policy_config import PolicyConfig

SIZES = (2, 3)  # in this order, the third process finds in the cache what the others have compiled
ROWS, STEPS, UPDATES, BATCH = 4, 8, 3, 24
"""Of each rank."""


def part_of(rollout, policy, low, high):
    """The rollout of some rows of a rollout."""
    part = Rollout(policy, rollout.num_steps, high - low)
    for name in ("obs", "inputs", "actions", "rewards", "terminated", "truncated", "starts", "valid", "log_probs", "values"):
        getattr(part, name).copy_(getattr(rollout, name)[:, low:high])
    part.last_obs.copy_(rollout.last_obs[low:high])
    for name in ("initial_state", "last_state"):
        for own, whole in zip(getattr(part, name), getattr(rollout, name), strict=True):
            own.copy_(whole[low:high])
    steps, rows, obs, state = rollout.finals
    own = (rows >= low) & (rows < high)
    part.finals = Finals(steps[own], rows[own] - low, obs[own], tuple(each[own] for each in state))
    part.all_valid, part.done = bool(part.valid.all()), Done.NOTHING
    return part


def on_policy(name, gear, ranks, size, recurrent="none", invalid=0.0, reward_mode="raw", normalizes=False, **settings):
    """Updates from made-up rollouts, of which every rank has some rows."""
    algorithm = find_algorithm(name)
    config = algorithm.config(num_steps=STEPS, **settings)
    network = PolicyConfig(hidden_sizes=(8,), recurrent=recurrent)
    make = algorithm.network_maker(config)
    policy = build_policy(network, OBS, ACTIONS, normalize_observations=normalizes, seed=1, make_network=make)
    rollouts = [collected(policy, STEPS, ROWS * size, seed=k, invalid=invalid) for k in range(UPDATES)]
    if invalid:  # a rank that has much less than the others
        for rollout in rollouts:
            rollout.valid[1:, :ROWS] &= torch.rand(STEPS - 1, ROWS, generator=torch.Generator().manual_seed(3)) < 0.3
            rollout.all_valid = False
    if ranks.several:
        low = ranks.rank * ROWS
        rollouts = [part_of(rollout, policy, low, low + ROWS) for rollout in rollouts]
    num_rows = rollouts[0].num_rows
    graphs = Graphs("cpu") if gear == "device" else None
    rewards = RewardRule(reward_mode, num_rows, config.gamma, ranks=ranks)
    setup = LearnerSetup(seed=2, rewards=rewards, num_threads=1, num_rows=num_rows, graphs=graphs, ranks=ranks)
    learner = algorithm.make_learner(gear, policy, config, setup)
    metrics = [learner.update(rollout, k / UPDATES) for k, rollout in enumerate(rollouts)]
    found = {"weights": learner.weights().flat.clone(), "buffers": list(map(torch.clone, policy.buffers()))}
    moments = rewards.normalizer
    if moments is not None:
        found["rewards"] = torch.cat([moments.count.view(1), moments.mean, moments.m2])
    learner.close()
    return found | {"metrics": torch.tensor([list(each.values()) for each in metrics]), "names": list(metrics[0])}


def minibatches(ranks, size, parts):
    """Settings of PPO with so many minibatches, each of several ranks' parts being a part of one learner's."""
    steps = STEPS * ROWS // parts * (1 if ranks.several else size)
    return {"minibatch_size": steps, "num_epochs": 2, "shuffle": False, "learning_rate": 1e-2}


def kl_stop(gear, ranks, size, target_kl=0.0505):
    """The target lies between what the ranks measure alone: decided alone, they would stop after different epochs."""
    settings = minibatches(ranks, size, 1) | {"num_epochs": 4, "target_kl": target_kl, "learning_rate": 3e-3}
    return on_policy("ppo", gear, ranks, size, **settings)


def off_policy(name, gear, ranks, size, **settings):
    """Gradient steps on made-up batches, of which every rank has a part."""
    algorithm = find_algorithm(name)
    config = algorithm.config(batch_size=BATCH, max_grad_norm=0.5, learning_rate=1e-2, **settings)
    discrete = name == "dqn"
    network = PolicyConfig(hidden_sizes=(16, 8), activation="relu", orthogonal_init=False)
    actions = spaces.Discrete(3) if discrete else spaces.Box(-2, 1, (2,))
    make = algorithm.network_maker(config)
    policy = build_policy(network, spaces.Box(-1, 1, (5,)), actions, make_network=make, seed=1)
    graphs = Graphs("cpu") if gear == "device" else None
    setup = LearnerSetup(seed=3, num_threads=1, graphs=graphs, ranks=ranks)
    learner = algorithm.make_learner(gear, policy, config, setup)
    random = torch.Generator().manual_seed(0)
    low, high = (ranks.rank * BATCH, (ranks.rank + 1) * BATCH) if ranks.several else (0, size * BATCH)

    def normals(*shape):
        return torch.randn((size * BATCH, *shape[1:]), generator=random)[low:high].clone()

    learner.normals = normals  # all draw one learner's noise, and take their part
    seen = []
    for _ in range(UPDATES):
        choices = torch.randint(3, (size * BATCH,), generator=random)[low:high].clone()
        batch = Transitions(
            normals(0, 5), choices if discrete else normals(0, 2), normals(0), normals(0, 5), 0.9 * normals(0).sign().relu(),
            None, None, normals(0).abs(), torch.arange(high - low),
        )  # fmt: skip
        seen.append(learner.gradient_step(batch)[1])
        learner.gradient_steps += 1
        learner.move_targets()
    metrics = learner.mean_metrics(seen)
    state = learner.state_dict()
    parts = [tensor for part in state["trained"].values() for tensor in part["module"].values()]
    targets = [tensor for target in state["targets"] for tensor in target.values()]
    learner.close()
    return {"weights": torch.cat([part.flatten() for part in (*parts, *targets)]), "metrics": metrics, "buffers": []}


def waiting(ranks, size):
    """Ranks that come later than others look whether anything has happened."""
    if not ranks.several:
        return {"weights": torch.full((3,), float(size)), "metrics": torch.zeros(1), "buffers": []}
    before, kernels.LOOK_SECONDS = kernels.LOOK_SECONDS, 0.02
    try:
        time.sleep(0.1 * ranks.rank)
        total = ranks.sum_(torch.ones(3))
        if ranks.leads:
            assert [ranks.receive(rank) for rank in range(1, size)] == [bytes([rank]) * 999 for rank in range(1, size)]
        else:
            time.sleep(0.2)
            ranks.send(bytes([ranks.rank]) * 999)
    finally:
        kernels.LOOK_SECONDS = before
    return {"weights": total, "metrics": torch.zeros(1), "buffers": []}


def cases(ranks, size):
    """All of them by name."""
    two, one = minibatches(ranks, size, 2), minibatches(ranks, size, 1)
    merged = {"normalizes": True, "reward_mode": "normalize"}
    found = {"waiting": lambda: waiting(ranks, size)}
    for gear in ("general", "native", "device"):
        found[f"ppo {gear}"] = lambda gear=gear: on_policy("ppo", gear, ranks, size, **two)
        found[f"ppo {gear} statistics"] = lambda gear=gear: on_policy("ppo", gear, ranks, size, **two, **merged)
        found[f"ppo {gear} absent"] = lambda gear=gear: on_policy("ppo", gear, ranks, size, invalid=0.1, **one)
        found[f"ppo {gear} gru"] = lambda gear=gear: on_policy("ppo", gear, ranks, size, "gru", 0.1, **one)
        found[f"ppo {gear} kl"] = lambda gear=gear: kl_stop(gear, ranks, size)
        found[f"a2c {gear}"] = lambda gear=gear: on_policy("a2c", gear, ranks, size, invalid=0.1, normalize_advantages=True)
        found[f"impala {gear}"] = lambda gear=gear: on_policy("impala", gear, ranks, size, invalid=0.1)
        found[f"dqn {gear}"] = lambda gear=gear: off_policy("dqn", gear, ranks, size)
        found[f"sac {gear}"] = lambda gear=gear: off_policy("sac", gear, ranks, size)
        found[f"td3 {gear}"] = lambda gear=gear: off_policy("td3", gear, ranks, size)
    for gear in ("general", "device"):
        found[f"pqn {gear}"] = lambda gear=gear: on_policy("pqn", gear, ranks, size, invalid=0.1, **one)
    return found


def main():
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    for size in SIZES:
        if rank < size:
            store = torch.distributed.FileStore(str(folder / f"store-{size}"), size)
            torch.distributed.init_process_group(
                "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=300)
            )
            ranks = Ranks(rank, size)
            torch.save({name: run() for name, run in cases(ranks, size).items()}, folder / f"{size}-{rank}.pt")
            torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
