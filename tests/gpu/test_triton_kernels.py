"""The Triton kernels on a real GPU: the checks that their interpreter runs elsewhere, in every precision."""

import pytest

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")

import checks_fused  # noqa: E402
import checks_grid_conv  # noqa: E402
import checks_loss  # noqa: E402
import checks_optimizer  # noqa: E402
import checks_scan  # noqa: E402
import torch  # noqa: E402

SPACES = {"choices": checks_fused.DISCRETE, "numbers": checks_fused.BOX}
LIMITS = {"float32": 1e-4, "tf32": None, "bf16": None}  # None: as good as torch in that precision


@pytest.mark.parametrize("actions", SPACES)
@pytest.mark.parametrize("options", [{}, {"activation": "relu", "hidden": 128}, {"normalizes": True, "hidden": 32}])
def test_the_fused_policy_acts_as_the_policy(actions, options):
    checks_fused.check_acting(SPACES[actions], "cuda", rows=1000, **{"hidden": 64, **options})


def test_a_nan_in_a_cnn_is_not_lost():
    checks_fused.check_nan(checks_fused.DISCRETE, "cuda", grid=(10, 10, 4))


@pytest.mark.parametrize("actions", SPACES)
@pytest.mark.parametrize("hidden", [16, 64, 128])
@pytest.mark.parametrize("precision", LIMITS)
def test_the_fused_gradients_are_those_of_the_loss(actions, hidden, precision):
    if precision == "bf16" and hidden > 32 and actions == "numbers":
        pytest.skip("runs in tf32, see FusedMLP")
    limit = LIMITS[precision]
    checks_fused.check_gradients(SPACES[actions], limit, "cuda", total=40_000, count=30_000, hidden=hidden, precision=precision)


GRIDS = [(10, 10, 4), (9, 9, 7), (12, 10, 10), (3, 3, 1)]


@pytest.mark.parametrize("grid", GRIDS)
def test_the_fused_cnn(grid):
    for rows in (1000, 20_000):
        checks_fused.check_acting(checks_fused.DISCRETE, "cuda", rows=rows, grid=grid, masked=True, tolerance=2e-2)
    for parts in ((), ("masks", "valid", "weights")):
        checks_fused.check_gradients(checks_fused.DISCRETE, None, "cuda", total=40_000, count=30_000, grid=grid, parts=parts)


@pytest.mark.parametrize("options", [{"hidden": 64}, {"hidden": 64, "precision": "bf16"}, {"grid": (10, 10, 4)}])
def test_masks_weights_and_invalid_steps(options):
    parts = ("masks", "valid", "weights")
    if "hidden" in options:
        limit = None if "precision" in options else 1e-4
        checks_fused.check_gradients(checks_fused.DISCRETE, limit, "cuda", total=40_000, count=30_000, parts=parts, **options)
        tolerance = 2e-2 if "precision" in options else 1e-4
        checks_fused.check_acting(checks_fused.DISCRETE, "cuda", rows=1000, masked=True, tolerance=tolerance, **options)
    checks_fused.check_empty("cuda", **options)


@pytest.mark.parametrize("options", checks_loss.OPTIONS)
def test_the_loss(options):
    checks_loss.check_options("cuda", *options, size=70_000)


@pytest.mark.parametrize("has_absent", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
def test_the_loss_without_clipping(has_absent, normalize):
    checks_loss.check_without_clipping("cuda", has_absent, normalize, size=70_000)


@pytest.mark.parametrize("options", [{"hidden": 64}, {"hidden": 64, "precision": "bf16"}, {"grid": (10, 10, 4)}])
def test_the_fused_gradients_without_clipping(options):
    limit = None if "grid" in options or "precision" in options else 1e-4
    parts = ("masks", "valid")
    checks_fused.check_gradients(
        checks_fused.DISCRETE, limit, "cuda", total=40_000, count=30_000, parts=parts, clips=False, **options
    )


@pytest.mark.parametrize("check", ["ties", "few_valid_steps", "equal_advantages", "large_mean", "nan_is_seen"])
def test_the_loss_at_its_edges(check):
    getattr(checks_loss, f"check_{check}")("cuda")


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("name", checks_optimizer.NAMES)
def test_the_optimizers(name, weight_decay, in_parts):
    checks_optimizer.check_steps("cuda", name, weight_decay, in_parts, inputs=300)
    checks_optimizer.check_not_finite("cuda", name, in_parts)


def test_the_optimizers_at_their_edges():
    checks_optimizer.check_late_steps("cuda")
    checks_optimizer.check_rows_with_gaps("cuda")
    checks_optimizer.check_rows_of_several("cuda")


@pytest.mark.parametrize("kind", ["none", "some", "all"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (32, 500, 192), (67, 33, 130)])
def test_the_scan_of_mingru(shape, kind):
    checks_scan.check_min_gru(*shape, kind, device="cuda")
    checks_scan.check_min_gru(*shape, kind, stored=torch.bfloat16, tolerance=1e-2, device="cuda")


@pytest.mark.parametrize("kind", ["none", "some", "all"])
def test_the_lstm(kind):
    checks_scan.check_lstm(32, 500, 168, kind, stored=torch.bfloat16, tolerance=2e-2, device="cuda")


@pytest.mark.parametrize("activation", ["none", "tanh", "relu"])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(10, 3000, 400, 168), (1, 1, 1, 1), (7, 333, 65, 3)])
def test_linear_layers(shape, stored, activation):
    *inputs, width = shape
    checks_scan.check_dense(inputs, width, activation, stored, "cuda", torch.bfloat16, tolerance=2e-2)
    checks_scan.check_dense(inputs, width, activation, stored, "cuda", torch.float32, tolerance=2e-2)


@pytest.mark.parametrize("name", ["lstm", "gru", "mingru"])
def test_memories_in_half_precision(name):
    with torch.autocast("cuda", torch.bfloat16):
        checks_scan.check_memory(name, "cuda", tolerance=3e-2)


@pytest.mark.parametrize("name", ["lstm", "gru", "mingru"])
def test_memories_without_a_word_to_the_host(name):
    checks_scan.check_memory(name, "cuda")


@pytest.mark.parametrize("kind", checks_grid_conv.SCALING)
@pytest.mark.parametrize("shape", [(1, 3, 3, 1), (1000, 10, 10, 4), (333, 10, 10, 10), (3, 5, 8, 7)])
def test_the_convolution_of_grids(shape, kind):
    checks_grid_conv.check_grid_convolution(shape, kind=kind, device="cuda")


def test_the_convolution_of_grids_in_half_precision():
    checks_grid_conv.check_grid_convolution(
        (1000, 10, 10, 4), kind="bytes", dtype=torch.bfloat16, tolerance=1e-2, grad_tolerance=1e-5, device="cuda"
    )


def test_the_convolution_of_very_many_grids():
    checks_grid_conv.check_body("cuda")
    checks_grid_conv.check_beyond_32_bits("cuda")


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("precision", LIMITS)
def test_nan_is_not_lost(precision, activation):
    checks_fused.check_nan(checks_fused.DISCRETE, "cuda", precision=precision, activation=activation, hidden=64)


@pytest.mark.parametrize(
    ("actions", "options"),
    [
        ("choices", {"hidden": 64}),
        ("choices", {"hidden": 32, "masked": True}),
        ("numbers", {"hidden": 64}),
        ("numbers", {"hidden": 32, "normalizes": True}),
    ],
)
def test_the_kernels_of_several_seeds(actions, options):
    checks_fused.check_seeds(SPACES[actions], "cuda", each=700, count=1000, tolerance=1e-4, **options)
