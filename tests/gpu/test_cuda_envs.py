"""Native envs on a real GPU: run with `make test-gpu` where there is one."""

import gc

import numpy as np
import pytest
from sample_envs import Indexer, Late

import hurtle
from hurtle.envs.registry import names
from hurtle.errors import ActionError, DeviceError, EnvIndexError
from hurtle.native import Box, Discrete, Env, int8, uint8

pytestmark = pytest.mark.gpu


def random_actions(vec, rng):
    space = vec.native_spec.action_space
    shape = (vec.num_envs, *vec.native_spec.agents_shape)
    return np.array([space.sample() for _ in range(int(np.prod(shape)))]).reshape(*shape, *vec.native_spec.action_shape)


def agree(expected, got, name):
    if expected.dtype.kind == "f":
        np.testing.assert_allclose(got, expected, rtol=2e-4, atol=2e-4, err_msg=name)
    else:
        np.testing.assert_array_equal(got, expected, err_msg=name)


@pytest.mark.parametrize("autoreset_mode", ["SameStep", "NextStep"])
@pytest.mark.parametrize("name", names())
def test_every_step_from_the_same_state_gives_what_the_cpu_gives(name, autoreset_mode):
    cpu = hurtle.make_vec(name, 130, num_workers=1, autoreset_mode=autoreset_mode)
    gpu = hurtle.make_vec(name, 130, device="cuda", autoreset_mode=autoreset_mode)
    cpu.single_action_space.seed(0)
    cpu.native_spec.action_space.seed(0)
    expected, _ = cpu.reset(seed=5)
    got, _ = gpu.reset(seed=5)
    agree(expected, got.cpu().numpy(), "first observation")
    cpu.play(40)  # away from the start
    ended = 0
    for _ in range(60):
        gpu._batch.load_records(cpu._batch.arrays.envs)
        actions = random_actions(cpu, None)
        outcome, twin = cpu.step(actions), gpu.step(actions)
        for what, array, tensor in zip(("obs", "reward", "terminated", "truncated"), outcome, twin, strict=False):
            agree(array, tensor.cpu().numpy(), what)
        records = gpu._batch.records()
        for field in cpu._batch.arrays.envs.dtype.names:
            agree(cpu._batch.arrays.envs[field], records[field], field)
        infos = twin[4]
        over = infos["_episode"].cpu().numpy()
        ended += over.sum()
        if over.any():
            agree(outcome[4]["episode"]["r"][over], infos["episode"]["r"].cpu().numpy()[over], "episode return")
            agree(outcome[4]["episode"]["l"][over], infos["episode"]["l"].cpu().numpy()[over], "episode length")
        if "final_obs" in infos and infos["_final_obs"].any():
            rows = infos["_final_obs"].cpu().numpy()
            agree(outcome[4]["final_obs"][rows], infos["final_obs"].cpu().numpy()[rows], "final observation")
    assert ended > 0 or name in ("freeway", "mountain_car", "mountain_car_continuous", "acrobot", "pendulum", "stochastic")


def test_steps_captured_in_a_graph_equal_plain_steps():
    import torch

    plain = hurtle.make_vec("cartpole", 1000, device="cuda")
    captured = hurtle.make_vec("cartpole", 1000, device="cuda")
    plain.reset(seed=1)
    captured.reset(seed=1)
    captured.actions.fill_(1)
    captured.step(captured.actions)
    plain.step(captured.actions)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(4):
            obs, *_ = captured.step(captured.actions)
    for _ in range(10):
        graph.replay()
    for _ in range(40):
        expected, *_ = plain.step(torch.ones(1000, dtype=torch.int64, device="cuda"))
    assert torch.equal(obs, expected)


def test_tensors_stay_on_the_device_and_are_reused():
    vec = hurtle.make_vec("breakout", 100, device="cuda")
    obs, _ = vec.reset(seed=0)
    again, reward, terminated, truncated, infos = vec.step(vec.actions)
    assert obs.is_cuda
    assert obs.data_ptr() == again.data_ptr()
    assert all(t.is_cuda for t in (reward, terminated, truncated, infos["_episode"], infos["final_obs"]))
    assert obs.shape == (100, 10, 10, 4)


def test_play_equals_play_on_the_cpu():
    cpu = hurtle.make_vec("breakout", 300)
    gpu = hurtle.make_vec("breakout", 300, device="cuda")
    cpu.reset(seed=2)
    gpu.reset(seed=2)
    cpu.play(100, seed=9)
    gpu.play(100, seed=9)
    np.testing.assert_array_equal(gpu._batch.records()["_rng"], cpu._batch.arrays.envs["_rng"])
    np.testing.assert_array_equal(gpu.states["bricks"], cpu.states["bricks"])


def test_illegal_actions_are_reported():
    import torch

    vec = hurtle.make_vec("cartpole", 10, device="cuda")
    vec.reset(seed=0)
    vec.step(torch.full((10,), 7, device="cuda"))
    with pytest.raises(ActionError, match="10 actions"):
        vec._batch.check_faults()


def test_a_device_that_does_not_exist():
    with pytest.raises(DeviceError, match="cuda:99"):
        hurtle.make_vec("cartpole", 10, device="cuda:99")


def test_memory_goes_with_the_vector_env():
    import torch

    def once():
        vec = hurtle.make_vec("breakout", 20_000, device="cuda")
        vec.reset(seed=0)
        vec.play(64)

    once()
    gc.collect()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        once()
    gc.collect()
    assert torch.cuda.memory_allocated() <= before


def test_check_covers_the_gpu():
    from hurtle.envs.cartpole import CartPole

    report = hurtle.native.check(CartPole, num_steps=50)
    assert any("cuda" in line for line in report.passed)


class Picture(Env):
    """A dot in a picture too large for shared memory."""

    observation_space = Box(0, 255, (84, 84, 4), uint8)
    action_space = Discrete(4)
    max_steps = 7

    class State:
        x: int8
        y: int8

    def reset(self, state, rng):
        state.x = rng.integers(84)
        state.y = rng.integers(84)

    def step(self, state, action, rng):
        state.x = (state.x + action) % 84
        return 1.0, False

    def observe(self, state, obs):
        obs[state.y, state.x, 3] = 255


def test_observations_too_long_for_shared_memory():
    cpu, gpu = hurtle.make_vec(Picture, 300), hurtle.make_vec(Picture, 300, device="cuda")
    agree(cpu.reset(seed=1)[0], gpu.reset(seed=1)[0].cpu().numpy(), "first observation")
    for t in range(20):
        actions = np.full(300, t % 4)
        agree(cpu.step(actions)[0], gpu.step(actions)[0].cpu().numpy(), "observation")


def test_an_index_out_of_bounds_stays_in_its_env_and_is_reported():
    vec = hurtle.make_vec(Indexer, 300, device="cuda")
    vec.reset(seed=0, options={"case": 99})
    states = vec.states
    states["case"][150], states["index"][150] = 1, 12_345
    vec.load_states(states)
    vec.step(np.zeros((300, 3), np.int64))
    after, others = vec.states, np.arange(300) != 150
    for name in states.dtype.names:
        np.testing.assert_array_equal(after[name][others], states[name][others])
    assert (after["before"] == 77).all()
    assert (after["after"] == 77).all()
    with pytest.raises(EnvIndexError, match="index 12345 on axis 0, whose length is 5"):
        vec._batch.check_faults()


def test_a_loop_that_waits_for_an_index_out_of_bounds_ends():
    vec = hurtle.make_vec(Indexer, 4, device="cuda")
    vec.reset(seed=0, options={"case": 12})
    vec.step(np.zeros((4, 3), np.int64))
    with pytest.raises(EnvIndexError, match="index 5 on axis 0, whose length is 5"):
        vec._batch.check_faults()


def test_training_reports_an_index_out_of_bounds(tmp_path):
    settings = {"num_envs": 64, "num_steps": 16, "minibatch_size": 256, "hidden_sizes": (16,), "eval_episodes": 1}
    with pytest.raises(EnvIndexError, match="index 12 on axis 0, whose length is 12"):
        hurtle.train(Late, total_steps=64_000, device="cuda", runs=str(tmp_path), progress="quiet", **settings)
