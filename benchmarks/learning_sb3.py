"""Stable-Baselines3's PPO on the Gymnasium twin of a task, with the hyperparameters that Hurtle is given.

settings → SB3's words → PPO.learn → 100 episodes. Where a setting has no counterpart, it says so rather than leave it out.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from learning_jobs import Curve, evaluated
from learning_tasks import Task

from hurtle.errors import HurtleError
from hurtle.runners.assembly import run_seed
from hurtle.runners.playing import eval_seed
from hurtle.runners.settings import Settings

if TYPE_CHECKING:
    from stable_baselines3.common.vec_env import VecEnv

ACTIVATIONS = {"tanh": torch.nn.Tanh, "relu": torch.nn.ReLU}


def train_sb3(task: Task, seed: int, curve: Curve, quick: bool) -> tuple[int, float, dict[str, Any]]:
    """Train and evaluate; steps, seconds and the final evaluation."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.evaluation import evaluate_policy

    class Record(BaseCallback):
        """A point of the curve after every rollout."""

        def _on_step(self) -> bool:
            return True

        def _on_rollout_end(self) -> None:
            ended = self.model.ep_info_buffer or []  # the last 100 episodes
            curve.add(self.num_timesteps, float(np.mean([e["r"] for e in ended])) if ended else float("nan"))

    settings = task.settings(seed, quick)
    train = settings.train
    torch.set_num_threads(train.threads)
    vec = make_envs(task.sb3, settings, train.num_envs, run_seed(seed))
    model = PPO("MlpPolicy", vec, seed=run_seed(seed), device="cpu", **sb3_words(settings))
    began = time.perf_counter()
    model.learn(train.total_steps, callback=Record())
    seconds = time.perf_counter() - began
    fresh = make_envs(task.sb3, settings, 16, eval_seed(seed), trained=vec)
    returns, _ = evaluate_policy(
        model, fresh, train.eval_episodes, deterministic=not train.eval_sampled, return_episode_rewards=True
    )
    vec.close()
    fresh.close()
    return model.num_timesteps, seconds, evaluated(np.asarray(returns), not train.eval_sampled)


def make_envs(name: str, settings: Settings, num_envs: int, seed: int, trained: VecEnv | None = None) -> VecEnv:
    """SB3's vector of Gymnasium envs, normalized as the settings say; to evaluate, by the statistics of `trained`."""
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    train = settings.train
    vec = make_vec_env(name, num_envs, seed=seed)
    normalizes = {"norm_obs": train.normalize_observations, "norm_reward": train.reward_mode == "normalize"}
    if not any(normalizes.values()):
        return vec
    clips = {"clip_obs": train.observation_clip, "clip_reward": train.reward_clip}
    if trained is None:
        return VecNormalize(vec, **normalizes, **clips, gamma=settings.algorithm.gamma)
    normalized = VecNormalize(vec, training=False, norm_obs=train.normalize_observations, norm_reward=False, **clips)
    if train.normalize_observations:
        normalized.obs_rms = trained.obs_rms
    return normalized


def sb3_words(settings: Settings) -> dict[str, Any]:
    """Hurtle's PPO settings as the arguments of SB3's PPO.

    Raises:
        HurtleError: A setting that SB3's PPO does not have.
    """
    policy, ppo = settings.policy, settings.algorithm
    same = {  # what SB3 has in one way only
        "policy": policy.policy in ("auto", "mlp"),
        "recurrent": policy.recurrent == "none",
        "separate_networks": policy.separate_networks is not False,
        "distribution": policy.distribution in ("auto", "gaussian"),
        "reward_mode": settings.train.reward_mode in ("raw", "normalize"),
        "shuffle": ppo.shuffle,
        "priority_alpha": ppo.priority_alpha == 0,
        "vtrace": not ppo.vtrace,
        "target_kl": ppo.target_kl is None,
        "optimizer": ppo.optimizer == "adam",
        "weight_decay": ppo.weight_decay == 0,
    }
    if others := [word for word, fits in same.items() if not fits]:
        raise HurtleError(f"SB3's PPO has no counterpart of {', '.join(others)} as set for this task.")
    sizes = list(policy.hidden_sizes)
    return {
        "n_steps": ppo.num_steps,
        "batch_size": ppo.minibatch_size,
        "n_epochs": ppo.num_epochs,
        "learning_rate": _annealed(ppo.learning_rate, ppo.anneal_learning_rate),
        "gamma": ppo.gamma,
        "gae_lambda": ppo.gae_lambda,
        "clip_range": _annealed(ppo.clip_range, ppo.anneal_clip_range),
        "clip_range_vf": _annealed(ppo.clip_range, ppo.anneal_clip_range) if ppo.clip_values else None,
        "ent_coef": ppo.entropy_coef,
        "vf_coef": 0.5 * ppo.value_coef,  # of the squared error; ours, as in the paper's code, is of half of it
        "max_grad_norm": ppo.max_grad_norm,
        "normalize_advantage": ppo.normalize_advantages,
        "policy_kwargs": {
            "net_arch": {"pi": sizes, "vf": sizes},
            "activation_fn": ACTIVATIONS[policy.activation],
            "ortho_init": policy.orthogonal_init,
            "log_std_init": policy.log_std_init,
            "optimizer_kwargs": {"eps": ppo.adam_eps},
        },
    }


def _annealed(value: float, anneal: bool) -> Any:
    return (lambda remaining: remaining * value) if anneal else value
