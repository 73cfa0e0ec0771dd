"""Advantage kernels and vector states on a real GPU: run with `make test-gpu` where there is one."""

import numpy as np
import pytest

import hurtle
from hurtle.errors import HurtleError
from hurtle.kernels.gae import gae_cuda, gae_reference
from hurtle.kernels.vtrace import vtrace_cuda, vtrace_reference

pytestmark = pytest.mark.gpu
CLOSE = {"rtol": 2e-6, "atol": 1e-5}
SHAPES = [(1, 1), (1, 300), (9, 1), (40, 17), (128, 4096)]


def arrays_of(steps, columns, seed=0):
    """rewards, values, terminated, truncated, final_values, last_values; log_ratios; valid."""
    rng = np.random.default_rng(seed)
    rewards, values, final_values, log_ratios = rng.normal(size=(4, steps, columns)).astype(np.float32)
    terminated, truncated, valid = rng.random((3, steps, columns)) < np.array([0.1, 0.1, 0.7]).reshape(3, 1, 1)
    last_values = rng.normal(size=columns).astype(np.float32)
    return (rewards, values, terminated, truncated, final_values, last_values), log_ratios, valid


def on_gpu(arrays):
    import torch

    return [torch.from_numpy(array).cuda() for array in arrays]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_gae_equals_the_reference(shape, masked):
    import torch

    columns, _, valid = arrays_of(*shape)
    returns = torch.full(shape, torch.nan, device="cuda")
    found = gae_cuda(*on_gpu(columns), 0.99, 0.95, *(on_gpu([valid]) if masked else [None]), returns=returns)
    expected = gae_reference(*columns, 0.99, 0.95, valid if masked else None)
    np.testing.assert_allclose(found.cpu().numpy(), expected, **CLOSE)
    np.testing.assert_allclose(returns.cpu().numpy(), expected + columns[1], **CLOSE)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_vtrace_equals_the_reference(shape, masked):
    columns, log_ratios, valid = arrays_of(*shape)
    given = on_gpu([valid])[0] if masked else None
    found = vtrace_cuda(*on_gpu([log_ratios, *columns]), 0.99, 0.95, 1.5, 0.8, given)
    expected = vtrace_reference(log_ratios, *columns, 0.99, 0.95, 1.5, 0.8, valid if masked else None)
    for got, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(got.cpu().numpy(), wanted, **CLOSE)


def test_they_run_on_the_current_stream_and_in_a_cuda_graph():
    import torch

    columns, log_ratios, _ = arrays_of(32, 500)
    tensors, ratios = on_gpu(columns), on_gpu([log_ratios])[0]
    out = torch.empty_like(tensors[0])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        assert gae_cuda(*tensors, 0.99, 0.95, out=out) is out
        vtrace_cuda(ratios, *tensors, 0.99)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gae_cuda(*tensors, 0.99, 0.95, out=out)
        targets, advantages = vtrace_cuda(ratios, *tensors, 0.99)
    tensors[0].mul_(3.0)
    graph.replay()
    columns = (3 * columns[0], *columns[1:])
    np.testing.assert_allclose(out.cpu().numpy(), gae_reference(*columns, 0.99, 0.95), **CLOSE)
    expected = vtrace_reference(log_ratios, *columns, 0.99)
    np.testing.assert_allclose(targets.cpu().numpy(), expected[0], **CLOSE)
    np.testing.assert_allclose(advantages.cpu().numpy(), expected[1], **CLOSE)


def test_tensors_that_do_not_fit_are_named():
    tensors = on_gpu(arrays_of(10, 5)[0])
    for position, name in enumerate(["values", "terminated", "truncated", "final_values", "last_values"], 1):
        for spoil in (lambda x: x[1:], lambda x: x.double(), lambda x: x.cpu()):
            wrong = list(tensors)
            wrong[position] = spoil(wrong[position])
            with pytest.raises(HurtleError, match=name):
                gae_cuda(*wrong, 0.99, 0.95)
    with pytest.raises(HurtleError, match="rewards must be a contiguous"):
        gae_cuda(*(tensor.cpu() for tensor in tensors), 0.99, 0.95)
    with pytest.raises(HurtleError, match="log_ratios must be a contiguous"):
        vtrace_cuda(tensors[0].T.contiguous().T, *tensors, 0.99)


@pytest.mark.parametrize("autoreset_mode", ["SameStep", "NextStep"])
@pytest.mark.parametrize("name", ["cartpole", "snake"])
def test_a_vector_goes_on_bitwise_from_its_state(name, autoreset_mode):
    import torch

    vec, fresh = (hurtle.make_vec(name, 65, device="cuda", autoreset_mode=autoreset_mode) for _ in range(2))
    vec.action_space.seed(0)
    actions = [vec.action_space.sample() for _ in range(60)]
    vec.reset(seed=0)
    for action in actions[:20]:
        vec.step(action)
    vec.play(5)
    fresh.load_state_dict(vec.state_dict())
    ended = 0
    for action in actions[20:]:
        got, expected = fresh.step(action), vec.step(action)
        for one, other in zip(got[:4], expected[:4], strict=True):
            assert torch.equal(one, other)
        ended += int(expected[2].sum()) + int(expected[3].sum())
    assert ended > 0
    fresh.play(40)
    vec.play(40)
    mine, theirs = fresh.state_dict(), vec.state_dict()
    for key in theirs:
        np.testing.assert_array_equal(mine[key], theirs[key], err_msg=key)
