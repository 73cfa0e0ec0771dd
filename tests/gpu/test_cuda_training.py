"""Whole runs on a real GPU: every kind of policy and option, saving, resuming, evaluating, leaving no memory behind."""

import gc

import pytest

import hurtle
from hurtle.errors import HurtleError
from hurtle.tracking.checkpoints import load_checkpoint

pytestmark = pytest.mark.gpu
SMALL = {
    "device": "cuda",
    "progress": "quiet",
    "trackers": (),
    "eval_episodes": 5,
    "preset": False,
    "num_envs": 8,
    "num_steps": 16,
    "hidden_sizes": (16,),
}
PPO = {**SMALL, "minibatch_size": 64, "num_epochs": 2}

CASES = {
    "plain": ("cartpole", {}),
    "several actions": ("squared", {"target_kl": 0.01, "anneal_clip_range": True}),
    "continuous": ("pendulum", {"normalize_observations": True, "reward_mode": "normalize"}),
    "beta": ("pendulum", {"distribution": "beta"}),
    "squashed": ("pendulum", {"distribution": "squashed_gaussian"}),
    "grid": ("breakout", {"policy": "grid_cnn"}),
    "agents": ("snake", {"minibatch_size": 128}),
    "lstm": ("memory", {"recurrent": "lstm"}),
    "gru": ("memory", {"recurrent": "gru"}),
    "mingru": ("memory", {"recurrent": "mingru"}),
    "priorities": ("cartpole", {"priority_alpha": 0.8}),
    "bf16": ("breakout", {"precision": "bf16"}),
    "muon": ("cartpole", {"optimizer": "muon"}),
}


def final_weights(run):
    return load_checkpoint(max((run.path / "checkpoints").glob("step-*.pt")))["policy"]


@pytest.mark.parametrize("case", CASES)
def test_a_run_ends_is_scored_and_its_policy_plays_on_the_cpu(case, tmp_path):
    env, options = CASES[case]
    run = hurtle.train(env, total_steps=4 * 8 * 16, runs=str(tmp_path), **{**PPO, **options})
    assert run.stopped_by == "total_steps"
    assert run.evaluation is not None
    assert run.evaluation.episodes >= 5  # with several agents each counts
    assert all(weights.isfinite().all() for weights in final_weights(run).values() if weights.is_floating_point())
    vec = hurtle.make_vec(env, num_envs=3)
    obs, _ = vec.reset(seed=0)
    actions = hurtle.load(run, device="cpu").act(obs[0])
    assert vec.single_action_space.contains(actions) or vec.num_agents > 1


def test_a2c_impala_and_a_pool_train(tmp_path):
    for algorithm in ("a2c", "impala"):
        run = hurtle.train("cartpole", algorithm=algorithm, total_steps=512, runs=str(tmp_path), **SMALL)
        assert run.evaluation is not None
    pooled = hurtle.train(
        "CartPole-v1", backend="process", pool_batch_size=4, num_workers=4, total_steps=512, runs=str(tmp_path), **PPO
    )
    assert pooled.steps >= 512


def test_what_was_saved_on_the_gpu_resumes_there_and_on_the_cpu(tmp_path):
    words = {**PPO, "runs": str(tmp_path), "callbacks": [lambda trainer: trainer.updates < 2]}
    half = hurtle.train("pendulum", total_steps=4 * 8 * 16, normalize_observations=True, **words)
    assert half.steps == 2 * 8 * 16
    assert hurtle.train(resume=half).steps == 4 * 8 * 16
    assert hurtle.train(resume=half, device="cpu", total_steps=6 * 8 * 16).steps == 6 * 8 * 16


def test_a_gpu_and_a_cpu_begin_with_the_same_policy_and_the_same_actions(tmp_path):
    import torch

    words = {**PPO, "runs": str(tmp_path), "learning_rate": 1e-4, "shuffle": False}  # gears shuffle differently
    on_gpu, on_cpu = (hurtle.train("cartpole", total_steps=128, **{**words, "device": device}) for device in ("cuda", "cpu"))
    weights, expected = final_weights(on_gpu), final_weights(on_cpu)
    for name in weights:
        torch.testing.assert_close(weights[name].cpu(), expected[name], rtol=1e-3, atol=1e-4)


def test_learning_on_the_gpu_solves_the_bandit(tmp_path):
    words = {"device": "cuda", "progress": "quiet", "trackers": (), "runs": str(tmp_path)}
    run = hurtle.train("bandit", eval_episodes=500, eval_sampled=True, **words)
    assert run.evaluation is not None
    assert run.evaluation.mean > 0.9


def test_the_memory_of_a_run_is_given_back_also_after_an_error(tmp_path):
    import torch

    def fail(trainer):
        raise HurtleError("enough")

    def held():
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated()

    words = {**PPO, "num_envs": 512, "hidden_sizes": (512, 512), "minibatch_size": 1024, "runs": str(tmp_path)}
    hurtle.train("cartpole", total_steps=512 * 16, **words)  # what the first run loads stays (cuBLAS workspaces)
    before = held()
    hurtle.train("cartpole", total_steps=512 * 16, **words)
    with pytest.raises(HurtleError, match="enough"):
        hurtle.train("cartpole", total_steps=512 * 16, callbacks=[fail], **words)
    assert held() <= before + 1_000_000
