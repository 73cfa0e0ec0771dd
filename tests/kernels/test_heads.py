"""Action heads: samples, log-probabilities, entropies and gradients against the torch distributions, in float64."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from hurtle.kernels.loader import load_kernels
from hurtle.policies.action_head import ActionHead
from hurtle.policies.distributions import masked

kernels = load_kernels()
heads, kinds, TILE = kernels.heads, kernels.policy_table, kernels.host.TILE
f4 = np.float32
VALUES = {"rtol": 1e-5, "atol": 1e-6}
GRADIENTS = {"rtol": 1e-4, "atol": 1e-6}
CANARY = f4(-77.0)
AT, PADDING = 5, 3  # arrays begin somewhere, rows are further apart than they are long


class Head:
    """A head, its reference, and the three kernels on arrays of any number of rows."""

    def __init__(self, kind, *nvec):
        self.kind, self.nvec = kind, np.array(nvec, np.int64)
        self.discrete = kind in (kinds.CATEGORICAL, kinds.MULTI_CATEGORICAL)
        self.size = len(nvec) if self.discrete else nvec[0]
        box = spaces.Box(-1.0, 1.0, (nvec[0],))
        self.reference = {
            kinds.CATEGORICAL: lambda: ActionHead(spaces.Discrete(nvec[0])),
            kinds.MULTI_CATEGORICAL: lambda: ActionHead(spaces.MultiDiscrete(nvec)),
            kinds.GAUSSIAN: lambda: ActionHead(box),
            kinds.BETA: lambda: ActionHead(box, "beta"),
        }[kind]()
        self.num_outputs = self.reference.num_outputs
        self.num_uniforms = self.reference.num_uniforms
        self.log_std = np.random.default_rng(3).normal(-0.5, 0.5, self.size).astype(f4)

    def __repr__(self):
        return f"{self.reference.kind}{self.nvec.tolist()}"

    def distribution(self, outputs, masks=None, log_std=None):
        """In float64."""
        outputs = torch.as_tensor(outputs).double()
        log_std = torch.as_tensor(self.log_std).double() if log_std is None else log_std
        found = self.reference.distribution(outputs, log_std)
        return found if masks is None else masked(found, torch.as_tensor(masks))

    def random(self, rows, seed=0, scale=2.0):
        rng = np.random.default_rng(seed)
        outputs = rng.normal(0.0, scale, (rows, self.num_outputs)).astype(f4)
        return outputs, rng.random((rows, self.num_uniforms), f4)

    def random_masks(self, rows, seed=0):
        """Some of each choice's options; where that leaves none, one. Row 0 has one legal option of each choice."""
        rng = np.random.default_rng(seed)
        parts = []
        for n in self.nvec:
            part, one = rng.random((rows, n)) < 0.6, rng.integers(n, size=rows)
            part[0] = False
            part[np.arange(rows), one] = True
            parts.append(part)
        return np.concatenate(parts, 1)

    def _given(self, outputs, masks, first, last):
        """The arguments that all kernels have."""
        rows = last - first
        given = np.full((rows, self.num_outputs + PADDING), np.nan, f4)
        given[:, : self.num_outputs] = outputs[first:last]
        given = np.concatenate([np.full(AT, np.nan, f4), given.ravel()])
        log_std = np.concatenate([np.full(AT, np.nan, f4), self.log_std])
        legal = np.zeros(1, bool) if masks is None else np.concatenate([np.zeros(AT, bool), masks[first:last].ravel()])
        return self.kind, self.nvec, given, AT, self.num_outputs + PADDING, rows, log_std, AT, legal, AT, masks is not None

    def _scratch(self):
        """Its size is exact: what lies after it must stay."""
        size = heads.scratch_size(self.kind, self.nvec)
        whole = np.full(size + TILE, CANARY, f4)
        whole[:size] = np.nan
        return whole, whole[:size]

    def sample(self, outputs, uniforms, masks=None, tile=TILE):
        """Raw actions and log-probabilities."""
        rows = len(outputs)
        ints, floats = np.zeros(AT + rows * self.size, np.int64), np.zeros(AT + rows * self.size, f4)
        log_probs = np.full(AT + rows, CANARY, f4)
        for first in range(0, rows, tile):
            last = min(rows, first + tile)
            given = self._given(outputs, masks, first, last)
            own, (whole, scratch), at = uniforms[first:last].ravel(), self._scratch(), AT + first * self.size
            heads.sample_rows(*given[:8], own, *given[8:], ints, at, floats, at, log_probs, AT + first, scratch)
            assert (whole[scratch.size :] == CANARY).all()
        assert (log_probs[:AT] == CANARY).all()
        actions = (ints if self.discrete else floats)[AT:].reshape(rows, self.size)
        return actions[:, 0] if self.kind == kinds.CATEGORICAL else actions, log_probs[AT:]

    def score(self, outputs, actions, d_log_probs, d_entropies, masks=None, tile=TILE):
        """Log-probabilities, entropies, gradients of the outputs and of log_std."""
        rows, stride = len(outputs), self.num_outputs + 2
        log_probs, entropies = np.zeros(rows, f4), np.zeros(rows, f4)
        grads, d_log_std = np.full(AT + rows * stride + AT, CANARY, f4), np.zeros(1 + self.size, f4)
        for first in range(0, rows, tile):
            last = min(rows, first + tile)
            given, (whole, scratch) = self._given(outputs, masks, first, last), self._scratch()
            own = actions[first:last].ravel()
            raw = (own, np.zeros(1, f4)) if self.discrete else (np.zeros(1, np.int64), own)
            heads.score_rows(*given, *raw, log_probs[first:last], entropies[first:last], scratch)
            at, slopes = AT + first * stride, d_log_probs[first:last]
            bonus = np.pad(d_entropies[first:last], (0, TILE - (last - first)))
            heads.gradient_rows(*given, *raw, slopes, bonus, scratch, grads, at, stride, d_log_std, 1)
            assert (whole[scratch.size :] == CANARY).all()
        assert (grads[:AT] == CANARY).all()
        assert (grads[-AT:] == CANARY).all()
        grads = grads[AT:-AT].reshape(rows, stride)
        assert (grads[:, self.num_outputs :] == 0.0).all()
        return log_probs, entropies, grads[:, : self.num_outputs], d_log_std[1:]

    def expected_score(self, outputs, actions, d_log_probs, d_entropies, masks=None):
        outputs = torch.tensor(outputs).double().requires_grad_()
        log_std = torch.tensor(self.log_std).double().requires_grad_()
        distribution = self.distribution(outputs, masks, log_std)
        raw = torch.tensor(actions)
        log_probs, entropies = distribution.log_prob(raw if self.discrete else raw.double()), distribution.entropy()
        of_log_probs, of_entropies = torch.tensor(d_log_probs).double(), torch.tensor(d_entropies).double()
        ((of_log_probs * log_probs).sum() + (of_entropies * entropies).sum()).backward()
        d_log_std = np.zeros(self.size) if log_std.grad is None else log_std.grad.numpy()
        return log_probs.detach().numpy(), entropies.detach().numpy(), outputs.grad.numpy(), d_log_std

    def check_score(self, outputs, actions, masks=None, seed=0):
        d_log_probs, d_entropies = np.random.default_rng(seed).normal(size=(2, len(outputs))).astype(f4)
        found = self.score(outputs, actions, d_log_probs, d_entropies, masks)
        expected = self.expected_score(outputs, actions, d_log_probs, d_entropies, masks)
        for ours, theirs, close in zip(found, expected, (VALUES, VALUES, GRADIENTS, GRADIENTS), strict=True):
            np.testing.assert_allclose(ours, theirs, **close)
        return found


HEADS = [
    Head(kinds.CATEGORICAL, 2),
    Head(kinds.CATEGORICAL, 1),
    Head(kinds.CATEGORICAL, 19),
    Head(kinds.MULTI_CATEGORICAL, 3, 3),
    Head(kinds.MULTI_CATEGORICAL, 2, 5, 1, 3),
    Head(kinds.GAUSSIAN, 1),
    Head(kinds.GAUSSIAN, 6),
    Head(kinds.BETA, 1),
    Head(kinds.BETA, 3),
]
DISCRETE = [head for head in HEADS if head.discrete]
every_head = pytest.mark.parametrize("head", HEADS, ids=repr)
every_discrete_head = pytest.mark.parametrize("head", DISCRETE, ids=repr)
with_masks = pytest.mark.parametrize(
    ("head", "has_masks"), [(head, has) for head in HEADS for has in (False, True)[: 1 + head.discrete]], ids=repr
)


@every_head
def test_sizes(head):
    assert heads.num_uniforms(head.kind, head.nvec) == head.num_uniforms


@with_masks
@pytest.mark.parametrize("rows", [1, 63, 64, 200])
def test_scores_and_gradients(head, has_masks, rows):
    outputs, uniforms = head.random(rows)
    masks = head.random_masks(rows) if has_masks else None
    actions, log_probs = head.sample(outputs, uniforms, masks)
    found = head.check_score(outputs, actions, masks)
    np.testing.assert_allclose(log_probs, found[0], rtol=1e-6, atol=1e-6)


@every_discrete_head
def test_where_nothing_is_legal_all_is_equally_likely(head):
    outputs, uniforms = head.random(8)
    masks = np.zeros((8, head.num_outputs), bool)
    actions, _ = head.sample(outputs, uniforms, masks)
    _, entropies, grads, _ = head.check_score(outputs, actions, masks)
    np.testing.assert_allclose(entropies, np.log(head.nvec).sum(), rtol=1e-6)
    assert (grads == 0.0).all()


@every_discrete_head
def test_a_single_legal_option_is_chosen_for_sure(head):
    outputs, uniforms = head.random(64)
    masks = np.zeros((64, head.num_outputs), bool)
    masks[:, np.cumsum(head.nvec) - 1] = True
    actions, log_probs = head.sample(outputs, uniforms, masks)
    assert (actions.reshape(64, -1) == head.nvec - 1).all()
    assert (log_probs == 0.0).all()
    head.check_score(outputs, actions, masks)


@with_masks
def test_extreme_outputs(head, has_masks):
    outputs, uniforms = head.random(64)
    outputs = np.sign(outputs) * f4(1e4)
    masks = head.random_masks(64) if has_masks else None
    actions, log_probs = head.sample(outputs, uniforms, masks)
    assert np.isfinite(log_probs).all()
    if head.kind == kinds.GAUSSIAN:  # samples hold little of the noise
        actions = outputs + 1.0
    head.check_score(outputs, actions, masks)


@pytest.mark.parametrize("action", [1e-6, 0.5, 1.0 - 1e-6])
def test_beta_at_the_edges(action):
    head = Head(kinds.BETA, 2)
    outputs, _ = head.random(64, scale=5.0)
    head.check_score(outputs, np.full((64, 2), action, f4))


@every_discrete_head
def test_options_that_cannot_be_chosen(head):
    outputs, uniforms = head.random(64)
    impossible = ~head.random_masks(64)
    outputs[impossible] = -np.inf
    actions, log_probs = head.sample(outputs, uniforms)
    places = actions.reshape(64, -1) + np.cumsum(head.nvec) - head.nvec
    assert not impossible[np.arange(64)[:, None], places].any()
    expected = head.distribution(outputs).log_prob(torch.tensor(actions)).numpy()
    np.testing.assert_allclose(log_probs, expected, **VALUES)
    found = head.score(outputs, actions, np.ones(64, f4), np.ones(64, f4))
    np.testing.assert_allclose(found[1], head.distribution(outputs).entropy().numpy(), **VALUES)
    assert np.isfinite(found[2]).all()


@with_masks
def test_nan_stays_in_its_row(head, has_masks):
    outputs, uniforms = head.random(64)
    masks = head.random_masks(64) if has_masks else None
    actions, log_probs = head.sample(outputs, uniforms, masks)
    slopes, others = np.ones(64, f4), np.arange(64) != 7
    before = head.score(outputs, actions, slopes, np.full(len(outputs), 0.5, f4), masks)
    for place in range(head.num_outputs):
        spoilt = outputs.copy()
        spoilt[7, place] = np.nan
        sampled_actions, sampled = head.sample(spoilt, uniforms, masks)
        after = head.score(spoilt, actions, slopes, np.full(len(outputs), 0.5, f4), masks)
        assert np.isnan(sampled[7])
        assert np.isnan(after[0][7])
        assert np.isnan(after[2][7]).any()
        assert (sampled[others] == log_probs[others]).all()
        assert (sampled_actions[others] == actions[others]).all()
        assert all((a[others] == b[others]).all() for a, b in zip(after[:3], before[:3], strict=True))


@every_discrete_head
@pytest.mark.parametrize("value", [np.inf, -np.inf])
def test_infinite_outputs_spoil_what_they_spoil_in_torch(head, value):
    outputs, _ = head.random(1)
    actions = np.zeros((1, head.size), np.int64) if head.kind == kinds.MULTI_CATEGORICAL else np.zeros(1, np.int64)
    for masks in (None, head.random_masks(1)):
        for place in range(head.num_outputs):
            spoilt = outputs.copy()
            spoilt[0, place] = value
            found = head.score(spoilt, actions, np.ones(1, f4), np.full(1, 0.5, f4), masks)
            expected = head.distribution(spoilt, masks).entropy().numpy()
            np.testing.assert_allclose(found[1], expected, **VALUES)


@with_masks
def test_a_row_does_not_depend_on_its_tile(head, has_masks):
    rows = 64
    outputs, uniforms = head.random(rows)
    masks = head.random_masks(rows) if has_masks else None
    slopes, d_entropies = np.random.default_rng(1).normal(size=(2, rows)).astype(f4)
    actions, log_probs = head.sample(outputs, uniforms, masks)
    scored = head.score(outputs, actions, slopes, d_entropies, masks)
    for tile in (1, 3, 33):
        again = head.sample(outputs, uniforms, masks, tile)
        assert (again[0] == actions).all()
        assert (again[1] == log_probs).all()
        assert all(
            (a == b).all() for a, b in zip(head.score(outputs, actions, slopes, d_entropies, masks, tile), scored, strict=True)
        )
    order = np.random.default_rng(2).permutation(rows)
    moved = None if masks is None else masks[order]
    again = head.sample(outputs[order], uniforms[order], moved)
    assert (again[0] == actions[order]).all()
    assert (again[1] == log_probs[order]).all()
    after = head.score(outputs[order], actions[order], slopes[order], d_entropies[order], moved)
    assert all((a == b[order]).all() for a, b in zip(after[:3], scored[:3], strict=True))


@every_discrete_head
@pytest.mark.parametrize("has_masks", [False, True])
def test_choices_are_those_of_torch(head, has_masks):
    rows = 40 * TILE
    outputs, uniforms = head.random(rows)
    uniforms[0], uniforms[1] = 0.0, 1.0 - 2.0**-24
    masks = head.random_masks(rows) if has_masks else None
    distribution = head.distribution(outputs, masks)
    actions, _ = head.sample(outputs, uniforms, masks)
    expected = distribution.sample(torch.tensor(uniforms).double()).numpy().reshape(rows, -1)
    cdf = distribution.log_probs.exp().cumsum(-1).numpy().reshape(rows, head.size, -1)
    near_an_edge = (np.abs(cdf - uniforms[:, :, None]) < 1e-6).any(-1)
    assert ((actions.reshape(rows, -1) == expected) | near_an_edge).all()
    assert len(np.unique(expected)) == head.nvec.max()


@pytest.mark.parametrize("size", [1, 6])
def test_gaussian_samples_are_those_of_torch(size):
    head = Head(kinds.GAUSSIAN, size)
    outputs, uniforms = head.random(10 * TILE)
    uniforms[0], uniforms[1] = 0.0, 1.0 - 2.0**-24
    actions, _ = head.sample(outputs, uniforms)
    expected = head.distribution(outputs).sample(torch.tensor(uniforms).double()).numpy()
    np.testing.assert_allclose(actions, expected, **VALUES)


def clear_tries(shapes, uniforms):
    """Whether each try [..., tries] of Marsaglia and Tsang's method is far from the edge between accepted and not."""
    u = uniforms.astype(np.float64)
    d = shapes[..., None] - 1.0 / 3.0
    normals = np.sqrt(-2.0 * np.log(1.0 - u[..., 0])) * np.cos(2.0 * np.pi * u[..., 1])
    v = np.maximum(1.0 + normals / np.sqrt(9.0 * d), 1e-6) ** 3
    return np.abs(0.5 * normals**2 + d * (1.0 - v + np.log(v)) - np.log(1.0 - u[..., 2])) > 1e-5


@pytest.mark.parametrize("size", [1, 3])
def test_beta_samples_are_those_of_torch(size):
    head = Head(kinds.BETA, size)
    outputs, uniforms = head.random(20 * TILE)
    tries = uniforms.reshape(-1, size, 2, heads.GAMMA_TRIES, 3)
    tries[:8, ..., 2] = 0.0  # log(1 - 0) = 0: as good as never accepted, so that the last try counts
    distribution = head.distribution(outputs)
    actions, _ = head.sample(outputs, uniforms)
    expected = distribution.sample(torch.tensor(uniforms).double()).numpy()
    shapes = torch.stack([distribution.alpha, distribution.beta], -1).numpy()
    clear = clear_tries(shapes, tries).all((-1, -2))
    assert clear.mean() > 0.95
    np.testing.assert_allclose(actions[clear], expected[clear], **VALUES)


def test_beta_samples_keep_off_the_bounds():
    head = Head(kinds.BETA, 1)
    _, uniforms = head.random(TILE)
    outputs = np.tile(np.array([[3e7, -3e7], [-3e7, 3e7]], f4), (TILE // 2, 1))
    actions, log_probs = head.sample(outputs, uniforms)
    assert (actions.ravel() == np.tile(np.array([1.0 - 1e-6, 1e-6], f4), TILE // 2)).all()
    assert np.isfinite(log_probs).all()


def test_gradients_of_log_std_are_added():
    head = Head(kinds.GAUSSIAN, 2)
    outputs, uniforms = head.random(TILE)
    actions, _ = head.sample(outputs, uniforms)
    slopes = np.ones(2 * TILE, f4)
    bonus = np.full(2 * TILE, 0.1, f4)
    once = head.score(outputs, actions, slopes[:TILE], bonus[:TILE])[3]
    twice = head.score(np.tile(outputs, (2, 1)), np.tile(actions, (2, 1)), slopes, bonus)[3]
    np.testing.assert_allclose(twice, 2.0 * once, rtol=1e-5)
