"""Envs on the CPU, the policy on a real GPU: copies in pinned memory that overlap, and rollouts that are the CPU's."""

from functools import partial

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from scripted_envs import Script, assert_finals_of_truncations, collector_of, finals_of, sharp_policy

import hurtle
from hurtle.algorithms.ppo import evaluate_actions
from hurtle.buffers.rollout import Finals, Rollout
from hurtle.collect.transfer import Staging
from hurtle.errors import DeviceError
from hurtle.runners.devices import gpu_errors

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
GIVEN = ("obs", "terminated", "truncated", "starts", "valid")  # what does not depend on the actions
NUM_ENVS, NUM_STEPS = 6, 9
LONG = 200_000_000  # cycles, about 0.1 s
CLOSE = {
    "rtol": 1e-3,
    "atol": 1e-3,
}  # float32 in another order, through weights that `sharp_policy` makes a hundred times larger


@pytest.fixture(autouse=True)
def full_precision(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def busy():
    """Keep the GPU at work, so that copies lag far behind the host."""
    torch.cuda._sleep(LONG)


def test_nothing_is_overwritten_while_copies_lag_behind():
    staging, rng = Staging(DEVICE), np.random.default_rng(0)
    sent, tensors = [], []
    busy()
    for step in range(400):
        if step % 100 == 50:
            busy()
        rows = int(rng.integers(1, 300))
        sent.append([rng.normal(size=(rows, 7)).astype(np.float32), rng.integers(0, 9, rows), rng.random(rows) < 0.5])
        given = [array.copy() for array in sent[-1]]
        tensors.append([staging.to_device(name, array) for name, array in zip(("obs", "at", "starts"), given, strict=True)])
        for array in given:
            array[:] = 0  # as an env's memory changes
    for arrays, found in zip(sent, tensors, strict=True):
        for array, tensor in zip(arrays, found, strict=True):
            np.testing.assert_array_equal(tensor.cpu().numpy(), array)


def test_what_comes_back_is_what_was_there():
    staging, generator = Staging(DEVICE), torch.Generator(DEVICE).manual_seed(0)
    tensor, before = torch.zeros(256, 5, device=DEVICE), None
    for step in range(400):
        if step % 100 == 50:
            busy()
        tensor.normal_(generator=generator)
        expected = tensor.clone()
        arrival = staging.start_to_host("actions", tensor)
        tensor.zero_()  # launched after the copy
        if before is not None:
            np.testing.assert_array_equal(before[0].wait(), before[1].cpu().numpy())
        before = arrival, expected


def test_waiting_for_a_copy_does_not_wait_for_what_was_launched_after_it():
    staging, later = Staging(DEVICE), torch.cuda.Event()
    staging.to_host("actions", torch.zeros(4, device=DEVICE))  # pinned memory is made
    torch.cuda.synchronize()
    arrival = staging.start_to_host("actions", torch.full((4,), 3.0, device=DEVICE))
    busy()
    later.record()
    assert arrival.wait().tolist() == [3.0] * 4
    assert not later.query()
    torch.cuda.synchronize()


def collected(device, make, recurrent, rollouts, normalize=False, mode="raw"):
    """The rollouts of one run, on the CPU."""
    vec = make()
    policy = sharp_policy(vec.single_observation_space, vec.single_action_space, recurrent, normalize=normalize).to(device)
    collector, like = collector_of(vec, policy, NUM_STEPS, mode=mode, seed=3)
    rollout = Rollout(policy, NUM_STEPS, like.num_rows, collector.has_masks, device)
    found = []
    for _ in range(rollouts):
        collector.collect(rollout)
        found.append(on_cpu(policy, rollout))
    collector.close()
    return found


def on_cpu(policy, rollout):
    copied = Rollout(policy, rollout.num_steps, rollout.num_rows, rollout.masks is not None)
    for name, field in vars(rollout).items():
        if isinstance(field, torch.Tensor):
            setattr(copied, name, field.cpu().clone())
    copied.initial_state = tuple(part.clone().cpu() for part in rollout.initial_state)
    copied.all_valid, copied.finals = rollout.all_valid, Finals(*(part.cpu() for part in rollout.finals[:3]))
    return copied


def check_policy_fields(rollout, recurrent):
    """Log-probs and values are those of a policy on the CPU that sees the same and remembers the same."""
    policy = sharp_policy(Script.observation_space, Script.action_space, recurrent)
    batch = rollout.segments(torch.arange(rollout.num_rows)) if recurrent != "none" else rollout.steps(rollout.valid_steps())
    log_probs, _, values = evaluate_actions(policy, batch)
    torch.testing.assert_close(log_probs, batch.log_probs, **CLOSE)
    torch.testing.assert_close(values, batch.values, **CLOSE)


def check_actions_reached_the_envs(rollout):
    """A `Script`'s observation names its seed and step, and its reward the action that it got."""
    # The reward of a step is seed + 0.1 * (step + 1) + 0.01 * action, and the observation (seed, episode, step) / 10.
    expected = 10 * rollout.obs[..., 0] + (rollout.obs[..., 2] + 0.1) + 0.01 * rollout.actions
    torch.testing.assert_close(rollout.rewards[rollout.valid], expected[rollout.valid], rtol=0, atol=1e-4)


@pytest.mark.parametrize("recurrent", ["none", "lstm"])
@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP])
def test_rollouts_are_those_of_the_cpu(mode, recurrent):
    make = partial(hurtle.make_vec, partial(Script, masks=True), NUM_ENVS, backend="serial", autoreset_mode=mode)
    found, expected = (collected(device, make, recurrent, 8) for device in (DEVICE, "cpu"))
    for rollout, reference in zip(found, expected, strict=True):
        for name in (*GIVEN, "masks"):
            assert torch.equal(getattr(rollout, name), getattr(reference, name)), name
        assert rollout.all_valid == reference.all_valid
        torch.testing.assert_close(rollout.last_values, reference.last_values, **CLOSE)
        torch.testing.assert_close(rollout.final_values, reference.final_values, **CLOSE)
        assert_finals_of_truncations(rollout)
        assert all(torch.equal(obs, finals_of(reference)[place]) for place, obs in finals_of(rollout).items())
        assert rollout.masks.gather(-1, rollout.actions[..., None]).all()
        check_actions_reached_the_envs(rollout)
        check_policy_fields(rollout, recurrent)
    same = torch.stack([(r.actions == e.actions).float().mean() for r, e in zip(found, expected, strict=True)])
    assert same.mean() > 0.99  # rounding may tip one


def test_normalized_observations_and_rewards_are_those_of_the_cpu():
    make = partial(hurtle.make_vec, Script, NUM_ENVS, backend="serial")
    found, expected = (collected(device, make, "none", 6, True, "normalize") for device in (DEVICE, "cpu"))
    for rollout, reference in zip(found, expected, strict=True):
        assert torch.equal(rollout.obs, reference.obs)
        torch.testing.assert_close(rollout.inputs, reference.inputs, rtol=1e-6, atol=1e-6)
        scaled, expected_rewards = rollout.scaled_rewards, reference.scaled_rewards
        torch.testing.assert_close(scaled, expected_rewards, rtol=0.02, atol=0.02)  # an action may differ


@pytest.mark.parametrize("recurrent", ["none", "lstm"])
@pytest.mark.parametrize("backend", ["serial", "process"])
def test_pools(backend, recurrent):
    """Half of the envs at a time: every step of every segment holds together, whichever env it is of."""
    how = {"num_workers": 2} if backend == "process" else {}
    make = partial(hurtle.make_vec, Script, NUM_ENVS, backend=backend, batch_size=NUM_ENVS // 2, **how)
    for rollout in collected(DEVICE, make, recurrent, 8):
        step, ended = (10 * rollout.obs[..., 2]).round(), rollout.terminated | rollout.truncated
        assert torch.equal(rollout.obs[..., 0], rollout.obs[:1, :, 0].expand(NUM_STEPS, -1))  # a segment is of one env
        assert torch.equal(step[1:], torch.where(ended[:-1], 0.0, step[:-1] + 1))
        assert torch.equal(rollout.starts, step == 0)
        assert rollout.all_valid
        check_actions_reached_the_envs(rollout)
        check_policy_fields(rollout, recurrent)


def test_too_much_memory_is_explained():
    with pytest.raises(DeviceError, match=r"out of memory \(.* of .* GiB are free\).*num_envs") as caught, gpu_errors(DEVICE):
        torch.empty(1 << 50, dtype=torch.uint8, device=DEVICE)
    assert not caught.value.device_lost
    assert torch.ones(3, device=DEVICE).sum().item() == 3


def test_a_failed_gpu_is_explained(run_python):
    """In a process of its own, whose GPU is lost afterwards."""
    code = """
import os
import torch
from hurtle.errors import DeviceError
from hurtle.runners.devices import gpu_errors
try:
    with gpu_errors("cuda"):
        torch.zeros(4, device="cuda")[torch.tensor([9], device="cuda")].cpu()
except DeviceError as error:
    print(error.device_lost, error, flush=True)
os._exit(0)  # torch's own clean-up would fail
"""
    assert run_python(code).stdout.startswith("True The GPU has failed")
