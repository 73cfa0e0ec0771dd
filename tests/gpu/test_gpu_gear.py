"""The device gear on a real GPU against the general one on the CPU: every field of a rollout, gradients, whole runs, graphs."""

import gc

import pytest
from scripted_envs import Staged, finals_of

import hurtle
from hurtle.algorithms.a2c import A2C
from hurtle.algorithms.a2c_config import A2CConfig
from hurtle.algorithms.a2c_device import DeviceA2C
from hurtle.algorithms.algorithm import LearnerSetup
from hurtle.algorithms.impala import IMPALA
from hurtle.algorithms.impala_config import IMPALAConfig
from hurtle.algorithms.impala_device import DeviceIMPALA
from hurtle.algorithms.ppo import PPO
from hurtle.algorithms.ppo_config import PPOConfig
from hurtle.algorithms.ppo_device import DevicePPO
from hurtle.buffers.rollout import Done
from hurtle.collect.device_collector import DeviceCollector
from hurtle.collect.general_collector import GeneralCollector
from hurtle.collect.inference import Actor
from hurtle.collect.postprocess import Postprocess
from hurtle.collect.rewards import RewardRule
from hurtle.errors import HurtleError, NonFiniteError
from hurtle.kernels.cuda_graphs import Graphs
from hurtle.policies.build import PolicyConfig, build_policy
from hurtle.tracking.checkpoints import load_checkpoint

pytestmark = pytest.mark.gpu
CASES = {
    "cartpole": ("cartpole", {}, {}),
    "cartpole fused": ("cartpole", {}, {}),
    "pendulum fused": ("pendulum", {}, {"normalize": True}),
    "cartpole shared": ("cartpole", {"separate_networks": False}, {}),
    "pendulum": ("pendulum", {}, {"normalize": True}),
    "pendulum beta": ("pendulum", {"distribution": "beta"}, {}),
    "pendulum squashed": ("pendulum", {"distribution": "squashed_gaussian"}, {}),
    "snake": ("snake", {}, {}),
    "asterix": ("asterix", {}, {}),
    "squared": ("squared", {"recurrent": "mingru"}, {}),
    "memory lstm": ("memory", {"recurrent": "lstm"}, {}),
    "memory gru": ("memory", {"recurrent": "gru"}, {}),
    "memory mingru": ("memory", {"recurrent": "mingru"}, {}),
}
EXACT = ("actions", "terminated", "truncated", "starts", "valid", "masks")
CLOSE = ("obs", "inputs", "log_probs", "values", "rewards", "scaled_rewards", "final_values", "last_values")


def make(env, device, config, normalize=False, num_envs=64):
    vec = hurtle.make_vec(env, num_envs=num_envs, device=device)
    spaces = vec.agent_observation_space, vec.agent_action_space
    policy = build_policy(PolicyConfig(**config), *spaces, normalize_observations=normalize, seed=1).to(device)
    rule = RewardRule("normalize" if normalize else "raw", num_envs * vec.num_agents)
    return vec, policy, Postprocess(policy, 0.99, 0.95, rule)


@pytest.mark.parametrize("case", CASES)
def test_rollouts_are_those_of_the_general_gear(case):
    """Long enough for truncations; from the second on, those of the GPU are replays. Both always begin with the same states."""
    import torch

    env, config, options = CASES[case]
    cpu_vec, cpu_policy, cpu_stage = make(env, "cpu", config, **options)
    general = Staged(GeneralCollector(cpu_vec, Actor(cpu_policy, 64 * cpu_vec.num_agents, 3), 3), cpu_stage)
    gpu_vec, gpu_policy, gpu_stage = make(env, "cuda", config, **options)
    fused = fused_kernels(gpu_policy) if "fused" in case else None
    device = Staged(DeviceCollector(gpu_vec, gpu_policy, 3, postprocess=gpu_stage, fused=fused), gpu_stage)
    expected, found = general.new_rollout(24), device.new_rollout(24)
    cut = 0
    for k in range(10 if "pendulum" in case else 4):
        general.collect(expected)
        device.collect(found)
        device.pending(wait=True)
        same = (
            (expected.actions.double() - found.actions.cpu().double()).abs().flatten(2).amax(2) < 1e-3
            if (expected.actions.ndim > 2)
            else expected.actions == found.actions.cpu()
        )
        rows = same.all(0) & (expected.starts == found.starts.cpu()).all(0)  # others: rounding tipped a sample, and they parted
        assert rows.float().mean() > 0.9, f"rollout {k}"
        for name in (*EXACT, *CLOSE):
            own, wanted = getattr(found, name), getattr(expected, name)
            if wanted is None:
                assert own is None
                continue
            own, wanted = (x[..., rows] if name == "last_values" else x[:, rows] for x in (own.cpu(), wanted))
            if name in EXACT and not own.is_floating_point():
                assert torch.equal(own, wanted), name
            else:
                torch.testing.assert_close(own.float(), wanted.float(), rtol=1e-3, atol=1e-3, msg=lambda m: f"{name}: {m}")  # noqa: B023
        finals, wanted = finals_of(found), finals_of(expected)
        assert {place for place in finals if rows[place[1]]} == {place for place in wanted if rows[place[1]]}
        for place in (place for place in wanted if rows[place[1]]):
            torch.testing.assert_close(finals[place].cpu(), wanted[place], rtol=1e-3, atol=1e-3)
        cut += int(expected.truncated.sum())
        general.load_state_dict(device.state_dict())  # rounding must not add up
        cpu_policy.load_state_dict(gpu_policy.state_dict())
    assert device.graphs.failure == ""
    assert cut or env not in ("pendulum", "squared")


ONCE = {"max_grad_norm": 1e9, "optimizer": "rmsprop", "num_steps": 16}
ALGORITHMS = {
    "ppo": (PPO, DevicePPO, lambda rows: PPOConfig(**ONCE, minibatch_size=16 * rows, num_epochs=1)),
    "a2c": (A2C, DeviceA2C, lambda rows: A2CConfig(**ONCE)),
    "impala": (IMPALA, DeviceIMPALA, lambda rows: IMPALAConfig(**ONCE, rho_clip=0.9, trace_lambda=0.95)),
}


@pytest.mark.parametrize("algorithm", ["a2c", "impala"])
@pytest.mark.parametrize(
    "case", ["cartpole", "cartpole fused", "pendulum fused", "asterix", "snake", "memory lstm", "memory gru"]
)
def test_updates_without_clipping_have_the_gradients_of_the_general_gear(case, algorithm, monkeypatch):
    check_gradients(case, "float32", algorithm, monkeypatch)


@pytest.mark.parametrize("precision", ["float32", "tf32"])
@pytest.mark.parametrize("case", [*CASES])
def test_an_update_has_the_gradients_of_the_general_gear(case, precision):
    check_gradients(case, precision)


def check_gradients(case, precision, algorithm="ppo", monkeypatch=None):
    """One minibatch, RMSprop from zero moments: what it leaves as second moment is the squared gradient. IMPALA's steps lag."""
    import torch

    make_general, make_device, settings_for = ALGORITHMS[algorithm]
    env, config, _ = CASES[case]
    limit = {"float32": 1e-4, "tf32": 1e-3}[precision]
    vec, policy, _ = make(env, "cuda", config)
    device = DeviceCollector(vec, policy, 3)
    rollout = device.new_rollout(16)
    device.collect(rollout)
    if algorithm == "impala":
        noise = torch.randn(rollout.log_probs.shape, generator=torch.Generator().manual_seed(1))
        rollout.log_probs.add_(0.3 * noise.to("cuda"))
        monkeypatch.setattr(IMPALA, "bootstrap", lambda self, rollout: Done.BOOTSTRAP)  # only the collector has what follows
    settings = settings_for(rollout.num_rows)
    reference = make(env, "cpu", config)[1]
    reference.load_state_dict(policy.state_dict())
    general = make_general(reference, settings)
    copy = general_rollout(reference, rollout)
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    try:
        learner = make_device(policy, settings, LearnerSetup(precision=precision))
        learner.fuse(fused_kernels(policy, learner.parameters.values, precision) if "fused" in case else None)
        learner.update(rollout)
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
    general.update(copy)
    wanted = torch.cat([parameter.grad.flatten() for parameter in reference.parameters()])
    own = learner.parameters.gradients.cpu()
    assert (own - wanted).norm() / wanted.norm() <= limit


def general_rollout(policy, rollout):
    """The same rollout on the CPU."""
    from hurtle.buffers.rollout import Rollout

    copy = Rollout(policy, rollout.num_steps, rollout.num_rows, rollout.masks is not None)
    for name in (*EXACT, *CLOSE):
        if getattr(copy, name) is not None:
            getattr(copy, name).copy_(getattr(rollout, name))
    copy.all_valid, copy.done = bool(copy.valid.all()), rollout.done
    for own, given in zip(copy.initial_state, rollout.initial_state, strict=True):
        own.copy_(given)
    return copy


def fused_kernels(policy, weights=None, precision="float32"):
    """The kernels of a policy; without flat weights, its parameters become views of some."""
    from hurtle.kernels.flat_parameters import FlatParameters
    from hurtle.kernels.triton.grid_cnn import FusedGridCNN
    from hurtle.kernels.triton.mlp import FusedMLP
    from hurtle.policies.cnn import GridCNN
    from hurtle.policies.native_plan import grid_cnn_shape, mlp_shape

    weights = FlatParameters(policy).values if weights is None else weights
    if type(policy.network) is GridCNN:
        return FusedGridCNN(grid_cnn_shape(policy), weights)
    return FusedMLP(mlp_shape(policy), weights, precision)


REPLAYED = {
    "shared": ("cartpole", {"separate_networks": False}, {}),
    "fused": ("cartpole", {}, {}),
    "fused vtrace": ("cartpole", {}, {"vtrace": True}),
    "fused priorities": ("cartpole", {}, {"priority_alpha": 0.7}),
    "fused convolutions": ("breakout", {}, {}),
    "convolutions": ("breakout", {}, {}),
    "mingru": ("memory", {"recurrent": "mingru"}, {}),
    "lstm": ("memory", {"recurrent": "lstm"}, {}),
    "agents": ("snake", {}, {}),
    "priorities": ("cartpole", {}, {"priority_alpha": 0.7}),
    "vtrace": ("cartpole", {}, {"vtrace": True}),
    "early stop": ("cartpole", {}, {"target_kl": 1e-4}),
    "impala": ("cartpole", {}, {"num_minibatches": 4}),
    "impala fused": ("cartpole", {}, {"num_minibatches": 3}),  # of 22, 21 and 21 rows
    "impala fused convolutions": ("breakout", {}, {"num_minibatches": 4}),
    "impala convolutions": ("breakout", {}, {}),
    "impala lstm": ("memory", {"recurrent": "lstm"}, {"num_minibatches": 2}),
    "impala agents": ("snake", {}, {"num_minibatches": 2}),
    "a2c": ("cartpole", {}, {}),
    "a2c fused": ("cartpole", {}, {}),
    "a2c lstm": ("memory", {"recurrent": "lstm"}, {}),
}


@pytest.mark.parametrize("case", REPLAYED)
def test_graphs_replay_what_plain_runs_do(case):
    import torch

    env, config, options = REPLAYED[case]
    weights = []
    for enabled in (False, True):
        vec, policy, _ = make(env, "cuda", config)
        graphs = Graphs("cuda", enabled=enabled)
        setup = LearnerSetup(graphs=graphs)
        if "impala" in case:
            learner = DeviceIMPALA(policy, IMPALAConfig(num_steps=16, **options), setup)
        elif "a2c" in case:
            learner = DeviceA2C(policy, A2CConfig(num_steps=16, **options), setup)
        else:
            learner = DevicePPO(policy, PPOConfig(num_steps=16, minibatch_size=256, num_epochs=2, **options), setup)
        learner.fuse(fused_kernels(policy, learner.parameters.values) if "fused" in case else None)
        fused = learner.acting_kernels
        collector = DeviceCollector(vec, policy, 3, postprocess=learner.postprocess, graphs=graphs, fused=fused)
        rollout = collector.new_rollout(16)
        for k in range(6):
            collector.collect(rollout)
            learner.update(rollout, k / 6)
        weights.append(learner.parameters.values.clone())
        assert graphs.failure == ""
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-5, atol=1e-6)


def test_what_cannot_be_captured_runs_without_a_graph():
    import torch

    graphs = Graphs("cuda")
    total = torch.zeros(1, device="cuda")

    def waits():
        total.add_(1)
        total.item()

    run = graphs.wrap(waits)
    for _ in range(4):
        run()
    assert total.item() == 4
    assert "synchroniz" in graphs.failure
    assert not graphs.enabled
    after = Graphs("cuda")
    adds = after.wrap(lambda: total.add_(1))
    for _ in range(3):
        adds()
    assert total.item() == 7
    assert after.failure == ""


def test_rollouts_of_several_lengths_are_captured():
    vec, policy, _ = make("cartpole", "cuda", {})
    collector = DeviceCollector(vec, policy, 3)
    for steps in (7, 30, 7):
        rollout = collector.new_rollout(steps)
        for _ in range(3):
            collector.collect(rollout)
    assert collector.graphs.failure == ""
    assert collector.graphs.enabled


def test_a_users_module_with_torchs_own_distribution_is_captured(tmp_path):
    import torch
    from torch import nn
    from torch.distributions import Categorical

    class Own(nn.Module):
        def __init__(self, observation_space, action_space):
            super().__init__()
            self.body, self.out = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Dropout(0.1)), nn.Linear(32, 3)

        def encode(self, obs):
            return self.body(obs)

        def decode(self, features):
            out = self.out(features)
            return Categorical(logits=out[:, :2]), out[:, 2]

    warned = []
    words = {"progress": "quiet", "trackers": (), "preset": False, "num_envs": 64, "num_steps": 16, "minibatch_size": 256}
    words |= {"eval_episodes": 5, "callbacks": [lambda trainer: warned.append(trainer._parts.collector.warning) or True]}
    run = hurtle.train("cartpole", device="cuda", total_steps=8192, runs=str(tmp_path), policy=Own, **words)
    assert run.steps == 8192
    assert set(warned) == {""}
    assert torch.distributions.Distribution._validate_args


def test_numbers_that_are_not_finite_are_reported():
    vec, policy, _ = make("cartpole", "cuda", {})
    collector = DeviceCollector(vec, policy, 3)
    rollout = collector.new_rollout(8)
    collector.collect(rollout)
    collector.pending(wait=True)
    policy.network.actor.bias.data.fill_(float("nan"))
    collector.collect(rollout)
    with pytest.raises(NonFiniteError, match="log-probability in env 0, at step 1"):
        collector.pending(wait=True)


@pytest.mark.parametrize("algorithm", [{"minibatch_size": 256}, {"algorithm": "impala"}, {"algorithm": "a2c"}])
def test_a_run_moves_between_gears(algorithm, tmp_path):
    words = {"progress": "quiet", "trackers": (), "preset": False, "num_envs": 64, "num_steps": 16, **algorithm}
    run = hurtle.train("cartpole", device="cuda", total_steps=4096, runs=str(tmp_path), eval_episodes=5, **words)
    assert load_checkpoint(max((run.path / "checkpoints").glob("step-*.pt")))["settings"]["gear"] == "auto"
    assert '"gear": "device"' in (run.path / "about.json").read_text()
    assert hurtle.train(resume=run, device="cpu", gear="native", total_steps=8192).steps == 8192
    assert hurtle.train(resume=run, device="cpu", gear="general", total_steps=12_288).steps == 12_288
    assert hurtle.train(resume=run, device="cuda", gear="device", total_steps=16_384).steps == 16_384


def test_the_fused_kernels_learn_cartpole(tmp_path):
    words = {"progress": "quiet", "trackers": (), "preset": False, "num_envs": 4096, "num_steps": 32, "runs": str(tmp_path)}
    words |= {"minibatch_size": 32_768, "num_epochs": 4, "learning_rate": 2e-3, "anneal_learning_rate": False}
    run = hurtle.train("cartpole", device="cuda", total_steps=10_000_000, precision="bf16", **words)
    assert run.evaluation.mean >= 475


def test_impala_learns_breakout_with_the_fused_kernels(tmp_path):
    words = {"progress": "quiet", "trackers": (), "num_envs": 4096, "learning_rate": 2e-3, "runs": str(tmp_path)}
    words |= {"eval_episodes": 200, "eval_sampled": True, "precision": "bf16", "total_steps": 200_000_000}
    run = hurtle.train("breakout", algorithm="impala", device="cuda", **words)
    assert '"gear": "device"' in (run.path / "about.json").read_text()
    assert run.evaluation.mean >= 10


def test_graphs_and_buffers_are_given_back(tmp_path):
    import torch

    def held():
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    words = {"progress": "quiet", "trackers": (), "preset": False, "num_envs": 8192, "num_steps": 32, "runs": str(tmp_path)}
    words |= {"minibatch_size": 65_536, "eval_episodes": 5, "total_steps": 8192 * 32 * 4, "device": "cuda"}
    hurtle.train("breakout", **words)
    before = held()
    hurtle.train("breakout", **words)
    with pytest.raises(HurtleError, match="enough"):
        hurtle.train("breakout", callbacks=[stop], **words)
    assert held() <= before + 50_000_000


def stop(trainer):
    if trainer.updates == 3:
        raise HurtleError("enough")
