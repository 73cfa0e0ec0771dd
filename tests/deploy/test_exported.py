"""An exported policy acts like the run's: it remembers, takes what envs give, and needs no torch."""

import json
import re

import gymnasium
import numpy as np
import pytest
from export_helpers import ACTIONS, OBSERVATIONS, TOLERANCE, fresh_observations, random_env, scramble
from file_helpers import pt2_with
from gymnasium.envs.classic_control import CartPoleEnv
from hand_made_runs import policy_for, write_run

import hurtle
from hurtle.deploy.exported import ExportedPolicy
from hurtle.deploy.policy_file import read_policy_file
from hurtle.errors import HurtleError, NonFiniteError, PolicyFileError, TrustError, UnknownNameError
from hurtle.runners.evaluate import evaluate_run
from hurtle.runners.evaluate_file import evaluate_file

both = pytest.mark.parametrize("suffix", [".onnx", ".pt2"])


kinds = pytest.mark.parametrize(
    ("kind", "suffix"),
    [
        ("lstm", ".onnx"),
        ("mingru", ".pt2"),
        pytest.param("lstm", ".pt2", marks=pytest.mark.slow),
        pytest.param("gru", ".onnx", marks=pytest.mark.slow),
        pytest.param("gru", ".pt2", marks=pytest.mark.slow),
        pytest.param("mingru", ".onnx", marks=pytest.mark.slow),
    ],
)


@pytest.fixture
def recurrent(shared_run, shared_export):
    """A function that returns a run with memory and its file."""

    def make(kind, suffix):
        words = {"action": "squashed", "recurrent": kind}
        return shared_run(**words), shared_export(suffix, **words).path

    return make


@pytest.fixture
def plain(shared_run, shared_export):
    """A run of an MLP and its file."""
    return shared_run(), shared_export(".onnx").path


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


# Memory.


@kinds
def test_memory_is_kept_over_a_sequence(recurrent, kind, suffix):
    run, file = recurrent(kind, suffix)
    policy, reference = hurtle.load(file), hurtle.load(run)
    observations = fresh_observations(reference, 20)
    own = [policy.act(obs) for obs in observations]
    close(own, [reference.act(obs) for obs in observations])
    policy.reset()
    np.testing.assert_array_equal([policy.act(obs) for obs in observations], own)
    afresh = [policy.act(obs, policy.initial_state())[0] for obs in observations]
    assert not np.allclose(afresh[1:], own[1:], atol=1e-3)  # it does remember

    state, carried = policy.initial_state(), []
    for obs in observations:
        action, state = policy.act(obs, state)
        carried.append(action)
    np.testing.assert_array_equal(carried, own)


@kinds
def test_memory_of_a_batch(recurrent, kind, suffix):
    run, file = recurrent(kind, suffix)
    policy, reference = hurtle.load(file), hurtle.load(run)
    steps = np.stack(fresh_observations(reference, 20 * 3)).reshape(20, 3, 5)
    for k, batch in enumerate(steps):
        close(policy.value(batch), reference.value(batch))
        close(policy.act(batch), reference.act(batch))
        if k == 10:  # the second episode ends
            for each in (policy, reference):
                each.reset(np.array([False, True, False]))
    with pytest.raises(HurtleError, match=r"keeps the state of 3 episodes and got 1 observations"):
        policy.act(steps[0, 0])
    policy.reset()
    policy.act(steps[0, 0])


@kinds
def test_a_state_is_the_same_in_torch_and_in_the_file(recurrent, kind, suffix):
    run, file = recurrent(kind, suffix)
    policy, reference = hurtle.load(file), hurtle.load(run)
    obs = np.stack(fresh_observations(reference, 4))
    own, theirs = policy.initial_state(4), reference.initial_state(4)
    parts = 2 if kind == "lstm" else 1
    assert [part.shape for part in own] == [(4, 8)] * parts
    for _ in range(5):
        action, own = policy.act(obs, own)
        expected, theirs = reference.act(obs, theirs)
        close(action, expected)
        for part, other in zip(own, theirs, strict=True):
            close(part, other)
    crossed, _ = policy.act(obs, theirs)  # tensors are taken too
    close(crossed, policy.act(obs, own)[0])
    with pytest.raises(HurtleError, match=re.escape(f"state: expected tensors {[[4, 8]] * parts}")):
        policy.act(obs, policy.initial_state(2))


def test_a_plain_policy_remembers_nothing(plain):
    policy = hurtle.load(plain[1])
    obs = np.stack(fresh_observations(policy, 4))
    assert policy.initial_state() == ()
    policy.act(obs)
    assert policy.act(obs[0], ()) == (policy.act(obs[0]), ())


# What goes in and out.


STRUCTURED = {"observation": "mixed", "action": "structured"}


@pytest.mark.parametrize("suffix", [".onnx", pytest.param(".pt2", marks=pytest.mark.slow)])
def test_structured_spaces(shared_run, shared_export, suffix):
    exported, reference = hurtle.load(shared_export(suffix, **STRUCTURED).path), hurtle.load(shared_run(**STRUCTURED))
    make_env = random_env(OBSERVATIONS["mixed"], ACTIONS["structured"][0])
    env = make_env()
    obs, _ = env.reset(seed=0)
    assert exported.observation_space == env.observation_space
    action = exported.act(obs)
    assert env.action_space.contains(action)
    assert str(action) == str(reference.act(obs))
    flat, _ = hurtle.emulate(make_env()).reset(seed=0)
    assert str(exported.act(flat)) == str(action)
    with pytest.raises(HurtleError, match="gold"):
        exported.act({**obs, "bag": {"items": obs["bag"]["items"]}})


def test_an_onnx_file_carries_its_card_as_json(shared_export):
    onnx = pytest.importorskip("onnx")
    file = shared_export(".onnx", **STRUCTURED).path
    model = onnx.load(str(file))
    onnx.checker.check_model(model, full_check=True)
    card = json.loads({entry.key: entry.value for entry in model.metadata_props}["hurtle"])
    assert card["structure"]["observation"]["space"]["type"] == "Dict"
    assert card["structure"]["action"]["type"] == "Dict"
    policy = hurtle.load(file)
    assert policy.observation_space == OBSERVATIONS["mixed"]
    assert policy.action_space == ACTIONS["structured"][0]


@pytest.mark.parametrize("runtime", ["native", "onnxruntime"])
def test_observations_that_do_not_fit(plain, runtime):
    policy = hurtle.load(plain[1], runtime=runtime)
    for wrong in (np.zeros(4, np.float32), np.zeros((2, 2, 5), np.float32), "left", None, np.zeros((0, 5), np.float32)):
        with pytest.raises(HurtleError, match=r"observation: expected float32 \[5\]"):
            policy.act(wrong)
    with pytest.raises(NonFiniteError, match="NaN"):
        policy.act(np.array([0, np.nan, 0, 0, 0], np.float32))
    obs = fresh_observations(policy, 1)[0]
    assert policy.act(obs) == policy.act(obs.tolist()) == policy.act(obs.astype(np.float64)) == policy.act(obs[None])[0]
    assert type(policy.act(obs)) is int


@pytest.mark.parametrize("runtime", ["native", "onnxruntime"])
def test_the_action_is_one_of_its_own(shared_export, runtime):
    """What a caller does to an action must not change the next."""
    policy = hurtle.load(shared_export(".onnx", action="float64").path, runtime=runtime)
    obs = np.ones(5, np.float32)
    first = policy.act(obs)
    kept = first.copy()
    first += 100
    np.testing.assert_array_equal(policy.act(obs), kept)


def test_masks(plain, shared_export):
    file = shared_export(".onnx", masked=True).path
    with pytest.raises(HurtleError, match="takes masks, which a native function cannot"):
        _ = hurtle.load(file).native
    for runtime in ("native", "onnxruntime"):
        policy = hurtle.load(file, runtime=runtime)
        obs = np.ones((4, 5), np.float32)
        np.testing.assert_array_equal(policy.act(obs, mask=np.eye(4, dtype=bool)), [-1, 0, 1, 2])
        assert policy.act(obs[0], mask=[0, 0, 1, 0]) == 1
        assert policy.act(obs[0]) == hurtle.load(plain[0]).act(obs[0])  # without a mask all are legal
        with pytest.raises(HurtleError, match=r"mask: expected bool \[4, 4\], got bool \[4\]"):
            policy.act(obs, mask=np.ones(4, bool))
    with pytest.raises(HurtleError, match=r"exported without masks \(masked=True\)"):
        hurtle.load(plain[1]).act(np.ones(5, np.float32), mask=np.ones(4, bool))


def test_what_was_not_exported(tmp_path, plain):
    obs = np.ones(5, np.float32)
    logits = hurtle.load(hurtle.export(plain[0], tmp_path / "logits.pt2", outputs=("logits",)).path)
    with pytest.raises(HurtleError, match=r"without an action; it computes logits"):
        logits.act(obs)
    with pytest.raises(HurtleError, match=r"without values: export it with outputs=\('action', 'value'\)"):
        logits.value(obs)
    assert logits.outputs(obs)["logits"].shape == (1, 4)
    with pytest.raises(HurtleError, match="Only plain MLPs"):
        _ = logits.native


# Runtimes.


def test_runtimes(plain, recurrent):
    file = plain[1]
    assert hurtle.load(file).runtime == "native"
    assert hurtle.load(file, runtime="onnxruntime").runtime == "onnxruntime"
    assert "native" in repr(hurtle.load(file))
    with pytest.raises(UnknownNameError, match=r"No runtime 'nativ'\. Did you mean native"):
        hurtle.load(file, runtime="nativ")
    with pytest.raises(HurtleError, match=r"runtime='torch' cannot run .*policy.onnx; native or onnxruntime can"):
        hurtle.load(file, runtime="torch")
    files = [recurrent(*each)[1] for each in (("lstm", ".onnx"), ("mingru", ".pt2"))]
    assert [hurtle.load(file).runtime for file in files] == ["onnxruntime", "torch"]
    with pytest.raises(HurtleError, match=r"runtime='native' cannot run"):
        hurtle.load(files[0], runtime="native")
    with pytest.raises(HurtleError, match="is for exported files"):
        hurtle.load(plain[0], runtime="native")
    with pytest.raises(HurtleError, match="it takes no module"):
        hurtle.load(file, device="cuda")


def test_the_compiled_policy_in_a_loop_without_python(plain):
    import numba

    policy = hurtle.load(plain[1])
    native, rows = policy.native, np.stack(fresh_observations(policy, 50))

    @numba.njit(nogil=True)
    def play(rows):
        actions = np.empty(len(rows), np.int64)
        for k in range(len(rows)):
            actions[k] = native(rows[k])
        return actions

    np.testing.assert_array_equal(play(rows), policy.act(rows))


def test_an_onnx_file_needs_no_torch(plain, recurrent, run_python):
    code = """
import sys
import numpy as np
import hurtle
for runtime, file in zip(("onnxruntime", "native"), sys.argv[1:], strict=True):
    policy = hurtle.load(file, runtime=runtime)
    policy.act(np.ones(5, np.float32)), policy.act(np.ones((3, 5), np.float32), policy.initial_state(3))
    assert policy.runtime == runtime
    assert "torch" not in sys.modules, runtime
"""
    run_python(code, recurrent("lstm", ".onnx")[1], plain[1])


@kinds
def test_what_a_runtime_refuses_names_the_file(recurrent, kind, suffix):
    policy = hurtle.load(recurrent(kind, suffix)[1])
    with pytest.raises(PolicyFileError, match=rf"cannot run .*policy\{suffix}: "):
        policy.run({port.name: np.zeros((2, 3), np.float32) for port in policy.card.inputs})


# Scores.


@pytest.mark.parametrize("suffix", [pytest.param(".onnx", marks=pytest.mark.slow), ".pt2"])  # .onnx: test_exporting.py
def test_a_file_is_scored_like_its_run(tmp_path, suffix):
    policy = scramble(policy_for("cartpole")[0])
    run, _ = write_run(tmp_path, "cartpole", weights_of=policy)
    file = hurtle.export(run, tmp_path / f"cartpole{suffix}").path
    by_file, by_run = evaluate_file(file, episodes=10), evaluate_run(run, episodes=10)
    assert by_file.mean == by_run.mean
    assert by_file.mean != evaluate_file(file, episodes=10, seed=1).mean
    with pytest.raises(HurtleError, match=r"takes the most likely actions.*with --stochastic"):
        evaluate_file(file, episodes=2, sampled=True)


def test_a_file_does_not_choose_the_parameters_of_envs_of_others(tmp_path):
    gymnasium.register("Reader-v0", lambda path, **words: CartPoleEnv(**words), max_episode_steps=9)
    try:
        run, _ = write_run(tmp_path, "Reader-v0", parameters={"path": "a/b"})
        file = hurtle.export(run, tmp_path / "reader.pt2").path
        for env in (None, "Reader-v0"):
            with pytest.raises(TrustError, match=r"reader.pt2 names a file .*: env_parameters = \{'path': 'a/b'\}"):
                evaluate_file(file, episodes=2, env=env)
        evaluate_file(file, episodes=2, trust=True)
        evaluate_file(file, episodes=2, env_parameters={"path": "mine/b"})
    finally:
        del gymnasium.registry["Reader-v0"]
    content = file.read_bytes()
    for env, numbers, mean in (("cartpole", {"gravity": 9.8}, None), ("CartPole-v1", {"sutton_barto_reward": True}, -1.0)):
        file.write_bytes(pt2_with(content, change_card=lambda card: card.update(env=env, env_parameters=numbers)))  # noqa: B023
        found = evaluate_file(file, episodes=2)
        assert mean in (None, found.mean)  # CartPole-v1's reward is then -1 at the end, else 0


def test_rows_that_begin_an_episode_remember_nothing(recurrent):
    policy = ExportedPolicy(read_policy_file(recurrent("lstm", ".onnx")[1]))
    rows = np.stack(fresh_observations(policy, 3))
    player = policy.for_rows()
    never, second = np.zeros(3, bool), np.array([False, True, False])
    fresh, state = player.choose_rows(rows, policy.initial_state(3), None, never)
    mixed, _ = player.choose_rows(rows, state, None, second)
    np.testing.assert_array_equal(mixed[1], fresh[1])
    assert (mixed[[0, 2]] != fresh[[0, 2]]).any(1).all()


@pytest.mark.slow
@both
def test_an_exported_lstm_solves_memory(tmp_path, suffix):
    run = hurtle.train("memory", runs=str(tmp_path), progress="quiet", trackers=())
    file = hurtle.export(run, tmp_path / f"memory{suffix}").path
    assert evaluate_file(file, episodes=100).mean >= 0.99
