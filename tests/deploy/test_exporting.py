"""What an export computes, samples and says about itself, in Python and on the command line."""

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from export_helpers import (
    ACTIONS,
    OBSERVATIONS,
    assert_agrees,
    assert_outputs_equal,
    expected_outputs,
    fresh_observations,
    hand_made,
    own_module,
    random_env,
    scramble,
    train_tiny,
)
from gymnasium import spaces
from hand_made_runs import policy_for, write_run

import hurtle
from hurtle.cli import main
from hurtle.deploy.policy_file import read_policy_file
from hurtle.errors import HurtleError, UnknownNameError


def test_a_policy_at_its_initialization(tmp_path):
    """ONNX leaves biases of zeros out."""
    run, _ = write_run(tmp_path, "cartpole")
    exported = hurtle.export(run, tmp_path / "policy.onnx")
    assert {layer["bias"] for layer in exported.card.mlp["layers"]} == {None}
    for runtime in ("native", "onnxruntime"):
        assert_agrees(hurtle.load(tmp_path / "policy.onnx", runtime=runtime), hurtle.load(run))


def test_what_an_export_says(shared_export):
    exported = shared_export(".onnx")
    assert exported.path.parent.name == "new"  # a folder that was not there
    assert exported.path.is_file()
    assert exported.runtimes == ("native", "onnxruntime")
    assert exported.observations == 260
    assert 0 <= exported.max_difference <= 1e-5
    assert "obs → value, logits, action" in str(exported)
    assert "native and onnxruntime against torch" in str(exported)


# Outputs.


@pytest.mark.parametrize(
    ("suffix", "action", "heads"),
    [
        (".onnx", "float64", ("mean", "log_std")),
        (".pt2", "float64", ("mean", "log_std")),
        pytest.param(".pt2", "beta", ("alpha", "beta"), marks=pytest.mark.slow),
        pytest.param(".pt2", "multi_discrete", ("logits",), marks=pytest.mark.slow),
        pytest.param(".onnx", "multi_discrete", ("logits",), marks=pytest.mark.slow),
        pytest.param(".onnx", "beta", ("alpha", "beta"), marks=pytest.mark.slow),
    ],
)
def test_all_outputs_at_any_batch_size(shared_run, shared_export, suffix, action, heads):
    exported, reference = shared_export(suffix, action=action), hurtle.load(shared_run(action=action))
    card, policy = exported.card, hurtle.load(exported.path, runtime="onnxruntime" if suffix == ".onnx" else "torch")
    assert [port.name for port in card.outputs] == ["value", *heads, "action"]
    for size in (1, 2, 7, 300):
        rows = np.stack(fresh_observations(policy, size, seed=size))
        found = policy.outputs(rows)
        assert list(found) == ["value", *heads, "action"]
        for port in card.outputs:
            assert found[port.name].shape == (size, *port.shape)
            assert found[port.name].dtype == port.dtype
        assert_outputs_equal(found, expected_outputs(reference, rows))
        np.testing.assert_allclose(policy.value(rows), reference.value(rows), rtol=1e-5, atol=1e-5)
        assert policy.act(rows).shape == reference.act(rows).shape


def assert_tensors_are_those_of_its_card(exported):
    onnxruntime = pytest.importorskip("onnxruntime")
    card = exported.card
    session = onnxruntime.InferenceSession(str(exported.path), providers=["CPUExecutionProvider"])
    kinds = {"float32": "float", "float64": "double"}
    for ports, tensors in ((card.inputs, session.get_inputs()), (card.outputs, session.get_outputs())):
        assert [port.name for port in ports] == [tensor.name for tensor in tensors]
        assert [["batch", *port.shape] for port in ports] == [tensor.shape for tensor in tensors]
        assert [f"tensor({kinds.get(port.dtype, port.dtype)})" for port in ports] == [tensor.type for tensor in tensors]
    return [port.name for port in card.inputs], [port.name for port in card.outputs]


@pytest.mark.parametrize(
    ("words", "inputs", "outputs"),
    [
        (
            {"observation": "mixed", "action": "structured"},
            ["obs.bag.items", "obs.bag.gold", "obs.map", "obs.pose.0", "obs.pose.1"],
            ["value", "logits", "action"],
        ),
        (
            {"action": "squashed", "recurrent": "lstm"},
            ["obs", "state_in_0", "state_in_1"],
            ["value", "mean", "log_std", "action", "state_out_0", "state_out_1"],
        ),
        ({"masked": True}, ["obs", "mask"], ["value", "logits", "action"]),
    ],
)
def test_the_file_has_the_tensors_that_its_card_names(shared_export, words, inputs, outputs):
    assert assert_tensors_are_those_of_its_card(shared_export(".onnx", **words)) == (inputs, outputs)


@pytest.mark.slow
def test_the_tensors_of_all_kinds_together(tmp_path):
    run = hand_made(tmp_path, "mixed", "multi_discrete", recurrent="lstm")
    exported = hurtle.export(run, tmp_path / "policy.onnx", outputs=("logits", "action"), masked=True)
    inputs, outputs = assert_tensors_are_those_of_its_card(exported)
    assert inputs == [
        "obs.bag.items", "obs.bag.gold", "obs.map", "obs.pose.0", "obs.pose.1", "mask", "state_in_0", "state_in_1",
    ]  # fmt: skip
    assert outputs == ["logits", "action", "state_out_0", "state_out_1"]


def test_outputs_that_the_policy_has_not(tmp_path):
    run, file = hand_made(tmp_path), tmp_path / "policy.onnx"
    with pytest.raises(UnknownNameError, match=r"No output 'logit'\. Did you mean logits\?"):
        hurtle.export(run, file, outputs=("action", "logit"))
    with pytest.raises(UnknownNameError, match="No output 'mean'"):
        hurtle.export(run, file, outputs=("mean",))
    with pytest.raises(HurtleError, match="at least one output"):
        hurtle.export(run, file, outputs=())
    with pytest.raises(HurtleError, match="have no masks"):
        hurtle.export(hand_made(tmp_path, action="gaussian"), file, masked=True)
    assert not file.exists()


# Sampled actions.

DRAWS, SIGMAS = 20_000, 6
WIDE = spaces.Box(-100.0, 100.0, (2,), np.float32)
CHOICES = {"action": "multi_discrete", "stochastic": True, "masked": False}
NUMBERS = {"action": (WIDE, "gaussian"), "stochastic": True}


def export_sampling(folder, suffix, action):
    run = hand_made(folder, action=action)
    return hurtle.export(run, folder / f"policy{suffix}", outputs=("action", "heads"), stochastic=True)


def drawn(exported):
    """Many samples for one observation, and what the distribution is made of."""
    assert not exported.card.deterministic
    assert "uniforms" not in [port.name for port in exported.card.inputs]
    policy = hurtle.load(exported.path)
    rows = np.repeat(np.array([[0.5, -1.0, 2.0, 0.0, 1.0]], np.float32), DRAWS, 0)
    found = policy.outputs(rows)
    assert not np.array_equal(found["action"], policy.outputs(rows)["action"])
    return found["action"], {name: array[0] for name, array in found.items()}


def assert_mean(samples, mean, deviation):
    assert np.abs(samples.mean(0) - mean).max() < SIGMAS * np.max(deviation) / np.sqrt(DRAWS)


@pytest.mark.parametrize("suffix", [".onnx", pytest.param(".pt2", marks=pytest.mark.slow)])
def test_sampled_choices_are_as_frequent_as_they_are_likely(shared_export, suffix):
    actions, heads = drawn(shared_export(suffix, **CHOICES))
    assert actions.dtype == np.int64
    first = 0
    for k, (size, start) in enumerate(((3, 1), (2, 0), (4, -2))):
        chances = np.exp(heads["logits"][first : first + size].astype(np.float64))
        assert np.sort(chances)[-2] > 0.02  # there is something to draw
        for choice, chance in enumerate(chances):
            assert_mean(actions[:, k] == choice + start, chance, np.sqrt(chance * (1 - chance)))
        first += size


@pytest.mark.parametrize("suffix", [pytest.param(".onnx", marks=pytest.mark.slow), ".pt2"])
def test_sampled_gaussians_have_the_mean_and_the_deviation_of_the_distribution(shared_export, suffix):
    actions, heads = drawn(shared_export(suffix, **NUMBERS))
    deviation = np.exp(heads["log_std"])
    assert_mean(actions, heads["mean"], deviation)
    assert_mean((actions - heads["mean"]) ** 2, deviation**2, np.sqrt(2) * deviation**2)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [pytest.param(".onnx", marks=pytest.mark.slow), ".pt2"])
def test_sampled_betas_have_the_mean_and_the_deviation_of_the_distribution(tmp_path, suffix):
    actions, heads = drawn(export_sampling(tmp_path, suffix, (WIDE, "beta")))
    alpha, beta = heads["alpha"].astype(np.float64), heads["beta"].astype(np.float64)
    unit, total = (actions + 100.0) / 200.0, alpha + beta
    variance = alpha * beta / (total**2 * (total + 1))
    assert_mean(unit, alpha / total, np.sqrt(variance))
    squares = (unit - alpha / total) ** 2
    assert_mean(squares, variance, squares.std(0))


@pytest.mark.slow
def test_squashed_samples_stay_inside(tmp_path):
    actions, heads = drawn(export_sampling(tmp_path, ".onnx", "squashed"))
    low, high = np.array([-2.0, 0.0]), np.array([2.0, 3.0])
    assert (actions >= low).all()
    assert (actions <= high).all()
    inner = np.clip((actions - low) / (high - low) * 2 - 1, -1 + 1e-6, 1 - 1e-6)
    assert_mean(np.arctanh(inner), heads["mean"], np.exp(heads["log_std"]))


def test_a_file_is_either_deterministic_or_not(shared_export):
    obs = np.ones(5, np.float32)
    for runtime in ("native", "onnxruntime"):
        policy = hurtle.load(shared_export(".onnx").path, runtime=runtime)
        assert policy.act(obs, deterministic=True) == policy.act(obs)
        with pytest.raises(HurtleError, match=r"takes the most likely action: for the other, export it with stochastic=True"):
            policy.act(obs, deterministic=False)
    for suffix, words in {".onnx": CHOICES, ".pt2": NUMBERS}.items():
        sampling = hurtle.load(shared_export(suffix, **words).path)
        actions = [sampling.act(obs, deterministic=False) for _ in range(60)] + [sampling.act(obs)]
        assert len({tuple(action) for action in actions}) > 1
        with pytest.raises(HurtleError, match=r"samples: for the other, export it without stochastic=True"):
            sampling.act(obs, deterministic=True)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".onnx", pytest.param(".pt2", marks=pytest.mark.slow)])
def test_a_sampling_recurrent_policy_with_masks(tmp_path, suffix):
    run, file = hand_made(tmp_path, recurrent="gru"), tmp_path / f"policy{suffix}"
    hurtle.export(run, file, stochastic=True, masked=True)
    policy = hurtle.load(file)
    mask = np.tile([False, True, False, True], (500, 1))
    actions = policy.act(np.ones((500, 5), np.float32), mask=mask)
    assert set(actions) == {0, 2}  # actions begin at -1


@pytest.mark.slow
def test_a_users_distribution_that_draws_by_itself_is_not_sampled(tmp_path):
    module = own_module(OBSERVATIONS["float32"], spaces.Discrete(3))
    run, _ = write_run(tmp_path, random_env(OBSERVATIONS["float32"], spaces.Discrete(3)), module=module)
    hurtle.export(run, tmp_path / "policy.pt2", policy=module, stochastic=True)  # a Categorical is ours
    with pytest.raises(HurtleError, match="module of your own"):
        hurtle.export(run, tmp_path / "policy.pt2")


# What a file says about itself.


def all_bytes(file):
    """The bytes of a file, and those of its members where it is an archive."""
    yield file.read_bytes()
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            yield from (archive.read(name) for name in archive.namelist())


@pytest.mark.parametrize("suffix", [pytest.param(".onnx", marks=pytest.mark.slow), ".pt2"])
def test_a_file_says_where_its_policy_comes_from(tmp_path, suffix):
    action_space, _ = ACTIONS["discrete"]
    run = train_tiny(tmp_path / "runs", random_env(OBSERVATIONS["float64"], action_space), algorithm="a2c", seed=5)
    file = tmp_path / f"policy{suffix}"
    hurtle.export(run, file)
    card = read_policy_file(file).card
    assert (card.env, card.algorithm, card.steps, card.seed) == ("", "a2c", 32, 5)
    assert card.mean_return == run.evaluation.mean
    assert card.hurtle == hurtle.__version__
    about = json.loads((run.path / "about.json").read_text())
    assert card.commit == (about["git"] or {}).get("commit")
    assert card.spaces == (OBSERVATIONS["float64"], action_space)
    assert card.layouts == (None, None)
    assert card.deterministic
    assert card.initial_state == "zeros"
    assert card.distribution == "categorical"


def assert_no_path_in(file, folder):
    places = {str(folder), str(Path(hurtle.__file__).parent), str(Path(__file__).parent), str(Path(torch.__file__).parent)}
    for content in all_bytes(file):
        for place in (*places, str(Path.home()) + "/"):
            assert place.encode() not in content, place


@pytest.mark.parametrize(("suffix", "kind"), [(".onnx", "lstm"), (".pt2", "mingru")])
def test_a_graph_holds_no_path_of_this_machine(shared_export, suffix, kind):
    file = shared_export(suffix, action="squashed", recurrent=kind).path
    assert_no_path_in(file, file.parents[2])


@pytest.mark.parametrize("suffix", [pytest.param(".onnx", marks=pytest.mark.slow), ".pt2"])
def test_a_file_holds_no_path_of_an_env(tmp_path, suffix, monkeypatch):
    env = tmp_path / "my_env.py"
    env.write_text("from gymnasium.envs.classic_control import CartPoleEnv as Mine\n")
    monkeypatch.chdir(tmp_path)
    run, _ = write_run(tmp_path / "runs", f"{env}:Mine", hidden_sizes=(8,))
    file = tmp_path / f"policy{suffix}"
    assert hurtle.export(run, file).card.env == "my_env.py:Mine"
    assert_no_path_in(file, tmp_path)
    assert main(["eval", file.name, "--episodes", "2"]) == 2  # a file may not name code to run
    assert main(["eval", file.name, "--episodes", "2", "--env", "my_env.py:Mine"]) == 0


def test_a_normalized_mlp_runs_compiled(tmp_path):
    options = {"normalize_observations": True, "hidden_sizes": (8,)}
    policy = scramble(policy_for("cartpole", **options)[0])
    policy.normalizer.update(5 + 3 * torch.randn(64, 2, 4, generator=torch.Generator().manual_seed(0)), None)
    run, _ = write_run(tmp_path / "runs", "cartpole", weights_of=policy, **options)
    assert hurtle.export(run, tmp_path / "policy.onnx").runtimes == ("native", "onnxruntime")
    assert hurtle.load(tmp_path / "policy.onnx").runtime == "native"
    for runtime in ("native", "onnxruntime"):
        assert_agrees(hurtle.load(tmp_path / "policy.onnx", runtime=runtime), hurtle.load(run))


def test_one_output_may_be_named_alone(tmp_path, capsys):
    run, _ = write_run(tmp_path / "runs", "cartpole")
    with pytest.raises(UnknownNameError, match=r"No output 'values'. Did you mean value"):
        hurtle.export(run, tmp_path / "value.pt2", outputs="values")
    assert main(["export", str(run), str(tmp_path / "value.pt2"), "--outputs", "value"]) == 0
    assert "obs → value" in capsys.readouterr().out
    assert [port.name for port in read_policy_file(tmp_path / "value.pt2").card.outputs] == ["value"]


# The command line.


def test_export_and_eval_on_the_command_line(tmp_path, capsys):
    run, _ = write_run(tmp_path / "runs", "cartpole", weights_of=scramble(policy_for("cartpole")[0]))
    file = tmp_path / "cartpole.onnx"
    assert main(["export", str(run), str(file), "--outputs", "action", "value"]) == 0
    out, err = capsys.readouterr()
    assert [line for line in err.splitlines() if line.startswith("hurtle: ")][:4] == [
        "hurtle: loading torch …", "hurtle: loading onnx …", "hurtle: tracing the network …", "hurtle: converting it to ONNX …",
    ]  # fmt: skip
    assert "hurtle: comparing the onnxruntime runtime with the policy …" in err
    assert f"wrote       {file}" in out
    assert "cartpole, ppo, 100 steps" in out
    assert "obs → action, value" in out
    assert main(["eval", str(file), "--episodes", "4"]) == 0
    by_file = capsys.readouterr().out
    assert main(["eval", str(run), "--episodes", "4"]) == 0
    assert by_file.split("\n")[0] == capsys.readouterr().out.split("\n")[0]
    assert main(["eval", str(file), "--sampled"]) == 2
    assert "takes the most likely actions" in capsys.readouterr().err
    assert main(["eval", str(file), "--device", "cuda"]) == 2
    assert "run on the CPU" in capsys.readouterr().err
    assert main(["export", str(run), str(tmp_path / "cartpole.bin")]) == 2
    assert "must end in .onnx or .pt2" in capsys.readouterr().err
    assert main(["eval", str(tmp_path / "none.onnx")]) == 2
    assert "none.onnx" in capsys.readouterr().err


@pytest.mark.slow
def test_sampling_files_on_the_command_line(tmp_path, capsys):
    run, _ = write_run(tmp_path / "runs", "cartpole")
    file = tmp_path / "cartpole.pt2"
    assert main(["export", str(run), str(file), "--stochastic", "--masked", "yes"]) == 0
    assert "obs, mask → action" in capsys.readouterr().out
    assert main(["eval", str(file), "--sampled", "--episodes", "4"]) == 0
    assert main(["eval", str(file), "--episodes", "4"]) == 0


@pytest.mark.parametrize(
    ("verb", "lines"), [("export", ["RUN", "FILE", "--outputs", "--stochastic", "--masked"]), ("eval", [".onnx, .pt2"])]
)
def test_help(capsys, verb, lines):
    with pytest.raises(SystemExit) as ended:
        main([verb, "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    for line in lines:
        assert line in out
