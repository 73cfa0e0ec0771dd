"""Action heads: how many outputs, which distribution, and what the env gets."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from hurtle.errors import HurtleError, UnknownNameError
from hurtle.kernels.cpu import policy_table
from hurtle.policies.action_head import ActionHead
from hurtle.policies.action_transform import HEAD_KINDS
from hurtle.policies.distributions import Beta, Categorical, Gaussian, MultiCategorical, SquashedGaussian

BOX = spaces.Box(np.array([-1.0, 0.0, 5.0], np.float32), np.array([1.0, 4.0, 6.0], np.float32))
MANY = {
    "discrete": (spaces.Discrete(3, start=-1), "auto", Categorical),
    "multi": (spaces.MultiDiscrete([[3, 2], [2, 5]], start=[[1, 0], [-2, 7]], dtype=np.int32), "auto", MultiCategorical),
    "binary": (spaces.MultiBinary((2, 2)), "auto", MultiCategorical),
    "gaussian": (BOX, "auto", Gaussian),
    "matrix": (spaces.Box(-1.0, 1.0, (2, 3), np.float64), "gaussian", Gaussian),
    "squashed": (BOX, "squashed_gaussian", SquashedGaussian),
    "beta": (BOX, "beta", Beta),
    "integers": (spaces.Box(-3, 3, (2,), np.int8), "gaussian", Gaussian),
    "unbounded": (spaces.Box(-np.inf, np.inf, (2,)), "auto", Gaussian),
}


@pytest.mark.parametrize("name", MANY)
def test_every_sample_is_an_action_of_the_space(name):
    space, kind, expected = MANY[name]
    head = ActionHead(space, kind)
    outputs = 3.0 * torch.randn(40, head.num_outputs)
    log_std = torch.zeros(head.log_std_size) if head.log_std_size else None
    distribution = head.distribution(outputs, log_std)
    assert type(distribution) is expected
    assert distribution.num_uniforms == head.num_uniforms
    for raw in (distribution.sample(torch.rand(40, head.num_uniforms)), distribution.mode()):
        assert raw.shape == (40, *head.action_shape)
        assert raw.dtype == head.action_dtype
        assert distribution.log_prob(raw).shape == (40,)
        assert torch.isfinite(distribution.log_prob(raw)).all()
        actions = head.env_actions(raw.numpy())
        assert actions.shape == (40, *space.shape)
        assert actions.dtype == space.dtype
        for action in actions:
            assert space.contains(action)
    if name in ("discrete", "multi", "binary"):
        assert len(np.unique(actions.reshape(40, -1), axis=0)) > 2


def test_sizes():
    head = ActionHead(MANY["multi"][0])
    assert (head.num_outputs, head.mask_size, head.action_shape, head.num_uniforms, head.log_std_size) == (12, 12, (4,), 4, 0)
    head = ActionHead(spaces.Discrete(5))
    assert (head.num_outputs, head.mask_size, head.action_shape, head.num_uniforms) == (5, 5, (), 1)
    head = ActionHead(BOX)
    assert (head.num_outputs, head.mask_size, head.action_shape, head.num_uniforms, head.log_std_size) == (3, None, (3,), 6, 3)
    head = ActionHead(BOX, "beta")
    assert (head.num_outputs, head.log_std_size) == (6, 0)


def test_what_the_env_gets():
    discrete = ActionHead(spaces.Discrete(3, start=-1))
    assert discrete.env_actions(np.array([0, 2])).tolist() == [-1, 1]
    gaussian = ActionHead(BOX)
    raw = np.array([[-9.0, 1.5, 9.0]], np.float32)
    assert gaussian.env_actions(raw).tolist() == [[-1.0, 1.5, 6.0]]
    assert raw.tolist() == [[-9.0, 1.5, 9.0]]  # raw actions are unchanged
    squashed = ActionHead(BOX, "squashed_gaussian").env_actions(np.array([[0.0, np.arctanh(0.5), 50.0]], np.float32))
    np.testing.assert_allclose(squashed, [[0.0, 3.0, 6.0]], rtol=1e-6)
    np.testing.assert_allclose(ActionHead(BOX, "beta").env_actions(np.array([[0.5, 0.25, 1.0]], np.float32)), [[0.0, 1.0, 6.0]])
    integers = ActionHead(MANY["integers"][0])
    assert integers.env_actions(np.array([[0.6, -99.0]], np.float32)).tolist() == [[1, -3]]


def test_alpha_and_beta_are_above_one():
    distribution = ActionHead(BOX, "beta").distribution(torch.tensor([[-9.0, 0.0, 9.0, 0.0, -9.0, 9.0]]))
    assert (distribution.alpha > 1).all()
    torch.testing.assert_close(distribution.alpha[0], 1 + torch.tensor([-9.0, 0.0, 9.0]).exp().log1p())
    torch.testing.assert_close(distribution.beta[0], 1 + torch.tensor([0.0, -9.0, 9.0]).exp().log1p())


def test_what_does_not_fit_is_refused():
    with pytest.raises(HurtleError, match=r"distribution='beta' is for Box actions, but this env's are Discrete\(2\)"):
        ActionHead(spaces.Discrete(2), "beta")
    with pytest.raises(HurtleError, match=r"'squashed_gaussian' needs a Box with finite bounds, got Box\(-inf, inf"):
        ActionHead(spaces.Box(-np.inf, np.inf, (2,)), "squashed_gaussian")
    with pytest.raises(UnknownNameError, match=r"No distribution 'gausian'\. Did you mean gaussian"):
        ActionHead(BOX, "gausian")
    with pytest.raises(HurtleError, match=r"Actions must be Discrete, .* got Dict.*hurtle\.emulate"):
        ActionHead(spaces.Dict(a=spaces.Discrete(2)))


@pytest.mark.parametrize("name", MANY)
def test_a_tensor_becomes_what_an_array_becomes(name):
    space, kind, _ = MANY[name]
    head = ActionHead(space, kind)
    log_std = torch.ones(head.log_std_size) if head.log_std_size else None
    distribution = head.distribution(3.0 * torch.randn(50, head.num_outputs), log_std)
    raw = distribution.sample(torch.rand(50, head.num_uniforms))
    before = raw.clone()
    expected = head.env_actions(raw.numpy())
    found = head.env_tensor(raw)
    assert found.shape == (50, max(1, int(np.prod(space.shape))))
    assert torch.equal(raw, before)
    np.testing.assert_allclose(found.numpy().reshape(expected.shape), expected, rtol=1e-6, atol=1e-6)
    if kind in ("auto", "gaussian"):  # only tanh and the scaling of Betas may round differently
        np.testing.assert_array_equal(found.numpy().reshape(expected.shape), expected)
    for action in found.numpy().reshape(expected.shape).astype(space.dtype):
        assert space.contains(action)


def test_tensors_at_and_beyond_the_bounds():
    raw = torch.tensor([[-9.0, 1.5, 9.0]])
    assert ActionHead(BOX).env_tensor(raw).tolist() == [[-1.0, 1.5, 6.0]]
    squashed = ActionHead(BOX, "squashed_gaussian").env_tensor(torch.tensor([[-50.0, 0.0, 50.0]]))
    assert squashed.tolist() == [[-1.0, 2.0, 6.0]]
    assert ActionHead(BOX, "beta").env_tensor(torch.tensor([[0.0, 0.25, 1.0]])).tolist() == [[-1.0, 1.0, 6.0]]
    integers = ActionHead(MANY["integers"][0])
    assert integers.env_tensor(torch.tensor([[0.6, -99.0], [0.5, 1.5]])).tolist() == [[1, -3], [0, 2]]  # halves to even
    with torch.inference_mode():  # cached tensors can also be used in training
        head = ActionHead(BOX)
        head.env_tensor(raw)
    weight = torch.ones(3, requires_grad=True)
    head.env_tensor(raw * weight).sum().backward()
    assert weight.grad.tolist() == [0.0, 1.5, 0.0]


def test_compiled_code_numbers_the_kinds_of_heads_in_the_same_way():
    assert {kind: getattr(policy_table, kind.upper()) for kind in HEAD_KINDS} == HEAD_KINDS
