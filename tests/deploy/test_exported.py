"""An exported policy acts like the run's: it remembers, takes what envs give, and needs no torch."""

import gymnasium
import numpy as np
import pytest
from emulation_envs import Quest
from export_helpers import TOLERANCE, fresh_observations, hand_made, scramble
from gymnasium.envs.classic_control import CartPoleEnv
from hand_made_runs import policy_for, write_run

import hurtle
from hurtle.deploy.exported import ExportedPolicy
from hurtle.deploy.policy_file import read_policy_file
from hurtle.errors import HurtleError, NonFiniteError, PolicyFileError, TrustError, UnknownNameError
from hurtle.runners.evaluate import evaluate_run
from hurtle.runners.evaluate_file import evaluate_file

both = pytest.mark.parametrize("suffix", [".onnx", ".pt2"])


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory):
    """Runs with memory, and their files: kind → (run, {suffix: file})."""
    made = {}

    def make(kind):
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            run, files = hand_made(folder, action="squashed", recurrent=kind), {}
            for suffix in (".onnx", ".pt2"):
                files[suffix] = hurtle.export(run, folder / f"policy{suffix}", outputs=("action", "value")).path
            made[kind] = run, files
        return made[kind]

    return make


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A run of an MLP and its file."""
    folder = tmp_path_factory.mktemp("plain")
    run = hand_made(folder)
    return run, hurtle.export(run, folder / "policy.onnx", outputs=("action", "value")).path


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


# Memory.


@both
@pytest.mark.parametrize("kind", ["lstm", "gru", "mingru"])
def test_memory_is_kept_over_a_sequence(recurrent, kind, suffix):
    run, files = recurrent(kind)
    policy, reference = hurtle.load(files[suffix]), hurtle.load(run)
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


@both
@pytest.mark.parametrize("kind", ["lstm", "gru", "mingru"])
def test_memory_of_a_batch(recurrent, kind, suffix):
    run, files = recurrent(kind)
    policy, reference = hurtle.load(files[suffix]), hurtle.load(run)
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


@both
def test_a_state_is_the_same_in_torch_and_in_the_file(recurrent, suffix):
    run, files = recurrent("lstm")
    policy, reference = hurtle.load(files[suffix]), hurtle.load(run)
    obs = np.stack(fresh_observations(reference, 4))
    own, theirs = policy.initial_state(4), reference.initial_state(4)
    assert [part.shape for part in own] == [(4, 8), (4, 8)]
    for _ in range(5):
        action, own = policy.act(obs, own)
        expected, theirs = reference.act(obs, theirs)
        close(action, expected)
        for part, other in zip(own, theirs, strict=True):
            close(part, other)
    crossed, _ = policy.act(obs, theirs)  # tensors are taken too
    close(crossed, policy.act(obs, own)[0])
    with pytest.raises(HurtleError, match=r"state: expected tensors \[\[4, 8\], \[4, 8\]\]"):
        policy.act(obs, policy.initial_state(2))


def test_a_plain_policy_remembers_nothing(plain):
    policy = hurtle.load(plain[1])
    obs = np.stack(fresh_observations(policy, 4))
    assert policy.initial_state() == ()
    policy.act(obs)
    assert policy.act(obs[0], ()) == (policy.act(obs[0]), ())


# What goes in and out.


def test_structured_spaces(tmp_path):
    policy = scramble(policy_for(Quest, emulate=True)[0])
    run, _ = write_run(tmp_path, Quest, weights_of=policy, emulate=True)
    reference, env = hurtle.load(run), Quest()
    obs, _ = env.reset(seed=0)
    for suffix in (".onnx", ".pt2"):
        exported = hurtle.load(hurtle.export(run, tmp_path / f"quest{suffix}").path)
        assert exported.observation_space == Quest.observation_space
        action = exported.act(obs)
        assert env.action_space.contains(action)
        assert str(action) == str(reference.act(obs))
        flat, _ = hurtle.emulate(Quest()).reset(seed=0)
        assert str(exported.act(flat)) == str(action)
        with pytest.raises(HurtleError, match="gold"):
            exported.act({**obs, "inventory": {"items": obs["inventory"]["items"]}})


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
def test_the_action_is_one_of_its_own(tmp_path, runtime):
    """What a caller does to an action must not change the next."""
    run = hand_made(tmp_path, action="gaussian")
    policy = hurtle.load(hurtle.export(run, tmp_path / "policy.onnx").path, runtime=runtime)
    obs = np.ones(5, np.float32)
    first = policy.act(obs)
    kept = first.copy()
    first += 100
    np.testing.assert_array_equal(policy.act(obs), kept)


def test_masks(tmp_path, plain):
    file = hurtle.export(plain[0], tmp_path / "masked.onnx", masked=True).path
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


def test_a_file_is_either_deterministic_or_not(tmp_path, plain):
    obs = np.ones(5, np.float32)
    for runtime in ("native", "onnxruntime"):
        policy = hurtle.load(plain[1], runtime=runtime)
        assert policy.act(obs, deterministic=True) == policy.act(obs)
        with pytest.raises(HurtleError, match=r"takes the most likely action: for the other, export it with stochastic=True"):
            policy.act(obs, deterministic=False)
    for suffix in (".onnx", ".pt2"):
        sampling = hurtle.load(hurtle.export(plain[0], tmp_path / f"policy{suffix}", stochastic=True).path)
        assert len({sampling.act(obs, deterministic=False) for _ in range(60)} | {sampling.act(obs)}) > 1
        with pytest.raises(HurtleError, match=r"samples: for the other, export it without stochastic=True"):
            sampling.act(obs, deterministic=True)


def test_what_was_not_exported(tmp_path, plain):
    obs = np.ones(5, np.float32)
    logits = hurtle.load(hurtle.export(plain[0], tmp_path / "logits.onnx", outputs=("logits",)).path)
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
    _, files = recurrent("lstm")
    assert [hurtle.load(files[suffix]).runtime for suffix in (".onnx", ".pt2")] == ["onnxruntime", "torch"]
    with pytest.raises(HurtleError, match=r"runtime='native' cannot run"):
        hurtle.load(files[".onnx"], runtime="native")
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


@pytest.mark.parametrize("runtime", ["native", "onnxruntime"])
def test_an_onnx_file_needs_no_torch(plain, recurrent, run_python, runtime):
    _, files = recurrent("lstm")
    file, size = (plain[1], 5) if runtime == "native" else (files[".onnx"], 5)
    code = f"""
import sys
import numpy as np
import hurtle
policy = hurtle.load(sys.argv[1], runtime={runtime!r})
policy.act(np.ones({size}, np.float32)), policy.act(np.ones((3, {size}), np.float32), policy.initial_state(3))
assert policy.runtime == {runtime!r}
assert "torch" not in sys.modules, "torch"
"""
    run_python(code, file)


@both
def test_what_a_runtime_refuses_names_the_file(recurrent, suffix):
    _, files = recurrent("gru")
    policy = hurtle.load(files[suffix])
    with pytest.raises(PolicyFileError, match=rf"cannot run .*policy\{suffix}: "):
        policy.run({port.name: np.zeros((2, 3), np.float32) for port in policy.card.inputs})


# Scores.


@both
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
        file = hurtle.export(run, tmp_path / "reader.onnx").path
        for env in (None, "Reader-v0"):
            with pytest.raises(TrustError, match=r"reader.onnx names a file .*: env_parameters = \{'path': 'a/b'\}"):
                evaluate_file(file, episodes=2, env=env)
        evaluate_file(file, episodes=2, trust=True)
        evaluate_file(file, episodes=2, env_parameters={"path": "mine/b"})
    finally:
        del gymnasium.registry["Reader-v0"]
    for env, numbers, mean in (("cartpole", {"gravity": 5.0}, None), ("CartPole-v1", {"sutton_barto_reward": True}, -1.0)):
        run, _ = write_run(tmp_path, env, parameters=numbers)
        found = evaluate_file(hurtle.export(run, tmp_path / "cartpole.onnx").path, episodes=2)
        assert mean in (None, found.mean)  # CartPole-v1's reward is then -1 at the end, else 0


def test_rows_that_begin_an_episode_remember_nothing(recurrent):
    _, files = recurrent("gru")
    policy = ExportedPolicy(read_policy_file(files[".onnx"]))
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
