"""How fast rollouts are filled with a policy's actions, beside the peers in the same run: CartPole, 64 × 64 tanh networks.

python benchmarks/collect.py            # saves benchmarks/results/collect.md, .json and .png
python benchmarks/collect.py --quick    # see that it runs: few steps, nothing is saved
python benchmarks/collect.py --plot     # draw the committed results

For everybody, a rollout ends with its advantages. Nobody learns.
"""

from __future__ import annotations

import argparse
import contextlib
import warnings
from functools import partial
from typing import Any

import gymnasium
import peers
import torch
from peers import GAE_LAMBDA, GAMMA, Sizes
from record import save
from side_by_side import GENERAL, NATIVE, Makers, Timed, compare, plot, repeated, report

import hurtle

SIZES = (8, 64, 512)
TITLE = "Rollouts of CartPole with a policy, 64 × 64 tanh"
NOTE = (
    "Medians over rounds; ratios are within a round. Rollouts of 128 steps, advantages included; separate networks of policy "
    "and value. Torch has one thread. In rlox's CandleCollector and in hurtle native, the policy is compiled code, too."
)

cartpole = partial(gymnasium.make, "CartPole-v1", disable_env_checker=True)


def native(sizes: Sizes, seconds: float, stack: contextlib.ExitStack, num_threads: int | None = None) -> Timed:
    from hurtle.collect.native_collector import NativeCollector

    vec, stage = _parts(sizes, stack)
    collector = NativeCollector(vec, stage.policy, postprocess=stage, num_threads=num_threads)
    return _collecting(collector, stage, sizes, seconds)


def general(sizes: Sizes, seconds: float, stack: contextlib.ExitStack) -> Timed:
    from hurtle.collect.general_collector import GeneralCollector
    from hurtle.collect.inference import Actor

    vec, stage = _parts(sizes, stack)
    return _collecting(GeneralCollector(vec, Actor(stage.policy, sizes.num_envs, seed=0)), stage, sizes, seconds)


def _parts(sizes: Sizes, stack: contextlib.ExitStack) -> tuple[Any, Any]:
    from hurtle.collect.postprocess import Postprocess
    from hurtle.policies.build import PolicyConfig, build_policy

    torch.set_num_threads(1)
    vec = hurtle.make_vec("cartpole", sizes.num_envs, seed=0)
    stack.callback(vec.close)
    config = PolicyConfig(hidden_sizes=(peers.HIDDEN, peers.HIDDEN))
    policy = build_policy(config, vec.single_observation_space, vec.single_action_space)
    return vec, Postprocess(policy, GAMMA, GAE_LAMBDA)


def _collecting(collector: Any, stage: Any, sizes: Sizes, seconds: float) -> Timed:
    rollout = collector.new_rollout(sizes.num_steps)

    def collect() -> None:
        collector.collect(rollout)
        stage(rollout)

    collect()
    return repeated(collect, sizes.batch, seconds)


def entrants(sizes: Sizes, seconds: float) -> Makers:
    return {
        "SB3": partial(peers.sb3_collecting, cartpole, sizes, seconds),
        "plain torch script": partial(peers.plain_collecting, cartpole, sizes, seconds),
        "rlox PPO's collector": lambda _: peers.rlox_collecting(sizes, seconds),
        "rlox CandleCollector": lambda _: peers.candle_collecting(sizes, seconds),
        GENERAL: partial(general, sizes, seconds),
        f"{NATIVE}, 1 thread": partial(native, sizes, seconds, num_threads=1),
        NATIVE: partial(native, sizes, seconds),
    }


def measure(cases: list[Sizes], seconds: float, rounds: int) -> tuple[dict[str, Any], str]:
    results, rows = {}, []
    for sizes in cases:
        case = f"{sizes.num_envs} envs"
        results[case], more = compare(case, entrants(sizes, seconds), rounds)
        rows += more
    return results, report(TITLE, rows, NOTE)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="turns of each (7)")
    parser.add_argument("--quick", action="store_true", help="see that it runs: few steps, nothing is saved")
    parser.add_argument("--plot", action="store_true", help="draw the committed results")
    chosen = parser.parse_args(arguments)
    if chosen.plot:
        return plot("collect", TITLE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if chosen.quick:
            _, text = measure([Sizes(8)], 0.0, 1)
            return print(f"\n{text}")
        results, text = measure([Sizes(size) for size in SIZES], 0.3, chosen.rounds)
    print(f"\n{text}")
    save("collect", results, text)
    plot("collect", TITLE)


if __name__ == "__main__":
    main()
