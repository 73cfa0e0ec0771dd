"""An export that cannot be right leaves no file, says why, and lets other errors be what they are."""

import logging
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from export_helpers import OBSERVATIONS, hand_made, random_env
from gymnasium import spaces
from hand_made_runs import policy_for, write_run
from torch import nn
from torch.nn import functional

import hurtle
from hurtle.deploy import exporting, writing
from hurtle.errors import HurtleError, PolicyFileError


def spoil(monkeypatch, amount):
    """Let the exported graph be another than the policy's."""
    traced = writing._traced

    def wrong(graph):
        with torch.no_grad():
            graph.policy.network.actor.bias[0] += amount
        return traced(graph)

    monkeypatch.setattr(writing, "_traced", wrong)


@pytest.mark.parametrize("suffix", [pytest.param(".onnx", marks=pytest.mark.slow), ".pt2"])
@pytest.mark.parametrize(
    ("outputs", "amount"), [pytest.param(("action",), 100.0, marks=pytest.mark.slow), (("action", "logits"), 1e-4)]
)
def test_a_difference_leaves_no_file_and_the_old_one_untouched(tmp_path, monkeypatch, suffix, outputs, amount):
    run, folder = hand_made(tmp_path), tmp_path / "out"
    file = folder / f"policy{suffix}"
    folder.mkdir()
    file.write_bytes(b"the old one")
    spoil(monkeypatch, amount)
    for name in (file.name, f"another{suffix}"):
        with pytest.raises(PolicyFileError, match=r"differs from the trained one: on .* differs by .*Nothing was written"):
            hurtle.export(run, folder / name, outputs=outputs)
    assert [entry.name for entry in folder.iterdir()] == [file.name]
    assert file.read_bytes() == b"the old one"


def test_a_difference_smaller_than_the_tolerance_is_none(tmp_path, monkeypatch):
    spoil(monkeypatch, 1e-7)
    exported = hurtle.export(hand_made(tmp_path), tmp_path / "policy.pt2", outputs=("action", "logits"))
    assert exported.max_difference > 0


@pytest.fixture
def traced_before(shared_run, shared_export, monkeypatch):
    """A function that returns a run whose next exports write what an earlier one wrote, and neither trace nor compare it."""

    def prepare(suffix):
        content = shared_export(suffix).path.read_bytes()
        monkeypatch.setattr(exporting, "policy_bytes", lambda *given: content)
        monkeypatch.setattr(exporting, "_check", lambda *given: (0.0, 0, ()))  # as it was then
        return shared_run()

    return prepare


@pytest.mark.parametrize("suffix", [pytest.param(".onnx", marks=pytest.mark.slow), ".pt2"])
def test_places_that_cannot_be_written(tmp_path, traced_before, suffix):
    run = traced_before(suffix)
    (tmp_path / "file").write_text("")
    (tmp_path / f"folder{suffix}").mkdir()
    with pytest.raises(PolicyFileError, match=r"Cannot write .*/file/policy.*: "):
        hurtle.export(run, tmp_path / "file" / f"policy{suffix}")
    with pytest.raises(PolicyFileError, match=r"Cannot write .*folder.*: "):
        hurtle.export(run, tmp_path / f"folder{suffix}")
    with pytest.raises(PolicyFileError, match=r"Cannot write /proc/policy"):
        hurtle.export(run, f"/proc/policy{suffix}")
    assert not [entry for entry in tmp_path.iterdir() if entry.name.startswith(".")]


@pytest.mark.parametrize("name", ["policy", "policy.pt", "policy.ONNX", "policy.onnx.txt", ""])
def test_names_must_end_in_onnx_or_pt2(tmp_path, name):
    with pytest.raises(HurtleError, match=r"must end in \.onnx or \.pt2, got"):
        hurtle.export(tmp_path, name)


def test_what_json_has_not(tmp_path):
    run, _ = write_run(tmp_path, "CartPole-v1", parameters={"sutton_barto_reward": float("inf")})
    with pytest.raises(HurtleError, match=r"env_parameters \{'sutton_barto_reward': inf\} cannot be written to a file"):
        hurtle.export(run, tmp_path / "policy.pt2")
    run, _ = write_run(tmp_path, "cartpole")
    (run / "evaluation.json").write_text('{"mean": NaN}')
    assert hurtle.export(run, tmp_path / "policy.pt2").card.mean_return is None


def test_there_must_be_a_run(tmp_path):
    with pytest.raises(HurtleError, match="There is no run nowhere"):
        hurtle.export("nowhere", tmp_path / "policy.onnx")


def test_a_network_that_cannot_be_traced_is_an_error(tmp_path):
    class Branching(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(5, 3)

        def encode(self, obs):
            return obs if obs.sum().item() > 0 else -obs

        def decode(self, features):
            return torch.distributions.Categorical(logits=self.layer(features)), features.sum(1)

    run, _ = write_run(tmp_path, random_env(OBSERVATIONS["float32"], spaces.Discrete(3)), module=Branching())
    for suffix in (".onnx", ".pt2"):
        with pytest.raises(HurtleError, match=r"cannot trace the policy's network"):
            hurtle.export(run, tmp_path / f"policy{suffix}", policy=Branching())
    assert not list(tmp_path.glob("*policy*"))


class Strange(nn.Module):
    """With an operation that no policy file may have."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(10, 3)

    def encode(self, obs):
        return functional.interpolate(obs[:, None], scale_factor=2).flatten(1)

    def decode(self, features):
        return torch.distributions.Categorical(logits=self.layer(features)), features.sum(1)


@pytest.mark.parametrize(("suffix", "operation"), [(".onnx", "Resize"), (".pt2", r"torch\.ops\.aten\.upsample_nearest1d\.vec")])
def test_an_operation_that_no_file_may_have_is_named(tmp_path, suffix, operation):
    run, _ = write_run(tmp_path, random_env(OBSERVATIONS["float32"], spaces.Discrete(3)), module=Strange())
    file = tmp_path / "new" / f"policy{suffix}"
    with pytest.raises(HurtleError, match=rf"has the operation '{operation}'.*Nothing was written"):
        hurtle.export(run, file, policy=Strange())
    assert not file.parent.exists()


class Ordinary(nn.Module):
    """What users' networks are made of, beyond Hurtle's own."""

    def __init__(self):
        super().__init__()
        self.places = nn.Parameter(torch.randn(5, 8))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norms = nn.ModuleList([nn.LayerNorm(8), nn.GroupNorm(2, 8), nn.BatchNorm1d(8)])
        self.mix = nn.Sequential(
            nn.Conv1d(8, 8, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool1d(2), nn.Dropout(0.5), nn.GELU()
        )
        self.actor, self.critic = nn.Linear(16, 3), nn.Linear(16, 1)

    def encode(self, obs):
        tokens = obs[:, :, None] * self.places
        tokens = self.norms[0](tokens + self.attention(tokens, tokens, tokens, need_weights=False)[0])
        mixed = self.norms[2](self.norms[1](self.mix(tokens.transpose(1, 2))))
        return torch.cat([mixed.mean(2), functional.softmax(mixed, 1).amax(2)], 1)

    def decode(self, features):
        gate = torch.where(features.sum(1, keepdim=True) > 0, 1.0, 0.5)
        return torch.distributions.Categorical(logits=self.actor(functional.silu(features) * gate)), self.critic(features)


@pytest.mark.parametrize("suffix", [pytest.param(".onnx", marks=pytest.mark.slow), ".pt2"])
def test_a_users_network_of_ordinary_operations_is_exported(tmp_path, suffix):
    torch.manual_seed(0)
    module = Ordinary()
    run, _ = write_run(tmp_path, random_env(spaces.Box(-1, 1, (5,)), spaces.Discrete(3)), module=module)
    exported = hurtle.export(run, tmp_path / f"policy{suffix}", policy=module, outputs=("action", "value", "logits"))
    assert exported.max_difference <= 1e-5
    obs = np.linspace(-1, 1, 35, dtype=np.float32).reshape(7, 5)
    np.testing.assert_allclose(hurtle.load(exported.path).value(obs), hurtle.load(run, policy=module).value(obs), atol=1e-5)


@pytest.mark.parametrize("suffix", [".onnx", ".pt2"])
def test_what_could_not_be_read_again_is_not_written(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(exporting, "policy_bytes", lambda *given: b"no policy")
    file = tmp_path / "new" / f"policy{suffix}"
    with pytest.raises(HurtleError, match=rf"cannot be exported: .*/new/policy\{suffix} is not a policy.*Nothing was written"):
        hurtle.export(hand_made(tmp_path), file)
    assert not file.parent.exists()


def test_a_file_that_is_too_large_to_be_read_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setitem(exporting.MAX_BYTES, ".pt2", 1000)
    with pytest.raises(HurtleError, match=r"policy.pt2 would have [\d,]+ bytes; the limit is 1,000"):
        hurtle.export(hand_made(tmp_path), tmp_path / "policy.pt2")
    assert not (tmp_path / "policy.pt2").exists()


@pytest.mark.parametrize("error", [OSError("of torch"), MemoryError(), ImportError("a part of torch")])
@pytest.mark.parametrize("suffix", [".onnx", ".pt2"])
def test_errors_of_tracing_are_not_called_errors_of_writing(tmp_path, monkeypatch, error, suffix):
    def fail(*given, **named):
        raise error

    monkeypatch.setattr(torch.onnx if suffix == ".onnx" else torch.export, "export", fail)
    is_wrapped = isinstance(error, OSError)  # of somebody's code: what it means is said in its own words
    with pytest.raises(HurtleError if is_wrapped else type(error)) as caught:
        hurtle.export(hand_made(tmp_path), tmp_path / f"policy{suffix}")
    assert "Cannot write" not in str(caught.value)


def test_a_disk_that_is_full_leaves_the_old_file(tmp_path, traced_before, monkeypatch):
    run, file = traced_before(".pt2"), tmp_path / "out" / "policy.pt2"
    hurtle.export(run, file)
    before = file.read_bytes()

    def full(path):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(exporting, "sync", full)
    with pytest.raises(PolicyFileError, match=r"Cannot write .*/out/policy.pt2: No space left on device\.$"):
        hurtle.export(run, file)
    assert [entry.name for entry in file.parent.iterdir()] == [file.name]
    assert file.read_bytes() == before


@pytest.mark.slow
def test_threads_export_one_at_a_time(tmp_path, monkeypatch):
    """Each sets the process's logging, output and random numbers, and must find them as they were."""
    run, at_work, most = hand_made(tmp_path), [], []
    write = exporting.policy_bytes

    def watched(*given):
        at_work.append(1)
        most.append(len(at_work))
        time.sleep(0.05)
        content = write(*given)
        at_work.pop()
        return content

    monkeypatch.setattr(exporting, "policy_bytes", watched)
    before = logging.root.manager.disable, sys.stdout, torch.distributions.Distribution._validate_args
    with ThreadPoolExecutor(2) as pool:
        files = [tmp_path / f"policy{n}.pt2" for n in range(2)]
        list(pool.map(lambda file: hurtle.export(run, file), files))
    assert most == [1, 1]
    assert (logging.root.manager.disable, sys.stdout, torch.distributions.Distribution._validate_args) == before
    assert all(file.is_file() for file in files)


# How much may differ.


def relu_run(folder, seed):
    """A policy that sees numbers without bounds, with weights as they are after training."""
    env = random_env(spaces.Box(-np.inf, np.inf, (17,), np.float32), spaces.Discrete(4))
    words = {"hidden_sizes": (64, 64), "activation": "relu"}
    policy, generator = policy_for(env, **words)[0], torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * (2 / weight.shape[-1]) ** 0.5)
    return write_run(folder, env, weights_of=policy, **words)[0]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_the_rounding_of_large_observations_is_no_difference(tmp_path, seed):
    hurtle.export(relu_run(tmp_path, seed), tmp_path / "policy.onnx", outputs=("action", "value", "logits"))


@pytest.mark.slow
def test_large_observations_do_not_hide_a_difference_elsewhere(tmp_path, monkeypatch):
    spoil(monkeypatch, 1e-3)  # far less than rounding at the largest observations
    with pytest.raises(PolicyFileError, match=r"'logits' differs by"):
        hurtle.export(relu_run(tmp_path, 0), tmp_path / "policy.onnx", outputs=("action", "value", "logits"))
    assert not (tmp_path / "policy.onnx").exists()
