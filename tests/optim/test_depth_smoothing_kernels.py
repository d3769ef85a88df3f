"""The smoothing matrix: its identities, and that mixing in place is multiplication with it."""

import math
from itertools import pairwise

import pytest
import torch

from cameraready.optim.depth_smoothing import smooth_updates, smoothing_matrix
from cameraready.optim.depth_smoothing.kernels import mix_, shuffled_order, smooth_

pytestmark = pytest.mark.torch

KERNELS = ["window", "laplacian", "ema", "ema-forward", "shuffled", "average"]
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def as_blocks(matrix):
    return [[row] for row in matrix]


def as_matrix(blocks):
    return torch.stack([row for (row,) in blocks])


def test_the_window_is_the_one_of_the_paper():
    expected = [[0.9, 0.1, 0, 0], [0.1, 0.8, 0.1, 0], [0, 0.1, 0.8, 0.1], [0, 0, 0.1, 0.9]]
    torch.testing.assert_close(smoothing_matrix(4, 0.2), torch.tensor(expected, dtype=torch.float64), **CLOSE)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 12])
@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.5, 1.0])
def test_the_windows_eigenvalues_are_those_of_the_path(n, alpha):
    matrix = smoothing_matrix(n, alpha)
    expected = [1 - alpha * (1 - math.cos(math.pi * k / n)) for k in range(n)]
    torch.testing.assert_close(
        torch.linalg.eigvalsh(matrix), torch.tensor(sorted(expected), dtype=torch.float64), **CLOSE
    )
    torch.testing.assert_close(matrix, matrix.T, **CLOSE)


@pytest.mark.parametrize("kernel", ["window", "shuffled", "average"])
def test_rows_and_columns_sum_to_one_so_that_the_mean_update_is_kept(kernel):
    matrix = smoothing_matrix(6, 0.3, kernel)
    torch.testing.assert_close(matrix.sum(0), torch.ones(6, dtype=torch.float64), **CLOSE)
    torch.testing.assert_close(matrix.sum(1), torch.ones(6, dtype=torch.float64), **CLOSE)
    updates = normal(6, 5)
    mixed = as_matrix(smooth_updates(as_blocks(updates), 0.3, kernel))
    torch.testing.assert_close(mixed.mean(0), updates.mean(0), **CLOSE)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("n", [1, 2, 5])
def test_mixing_is_multiplication_with_the_matrix(kernel, n):
    updates = normal(n, 4, 3)
    mixed = as_matrix(smooth_updates(as_blocks(updates), 0.35, kernel, seed=3))
    expected = torch.einsum("lj,jab->lab", smoothing_matrix(n, 0.35, kernel, seed=3), updates)
    torch.testing.assert_close(mixed, expected, **CLOSE)


@pytest.mark.parametrize("kernel", KERNELS)
def test_strength_zero_is_the_identity_bit_for_bit(kernel):
    updates = normal(5, 4, dtype=torch.float32)
    assert torch.equal(mix_(updates.clone(), 0.0, kernel), updates)
    assert torch.equal(smoothing_matrix(5, 0.0, kernel), torch.eye(5, dtype=torch.float64))


def test_equal_updates_pass_the_averaging_kernels_unchanged():
    updates = normal(1, 4).expand(5, 4)
    for kernel in ("window", "ema", "ema-forward", "shuffled", "average"):
        torch.testing.assert_close(as_matrix(smooth_updates(as_blocks(updates), 0.4, kernel)), updates, **CLOSE)


def test_the_laplacian_is_the_window_with_every_second_block_reversed():
    signs = torch.diag(torch.tensor([1.0, -1, 1, -1, 1], dtype=torch.float64))
    torch.testing.assert_close(smoothing_matrix(5, 0.3, "laplacian"), signs @ smoothing_matrix(5, 0.3) @ signs, **CLOSE)


def test_the_running_mean_follows_its_recursion():
    updates, mean = normal(4, 3), None
    mixed = as_matrix(smooth_updates(as_blocks(updates), 0.5, "ema"))
    for depth in (3, 2, 1, 0):
        mean = updates[depth] if mean is None else 0.5 * mean + 0.5 * updates[depth]
        torch.testing.assert_close(mixed[depth], mean, **CLOSE)
    forward = as_matrix(smooth_updates(as_blocks(updates.flip(0)), 0.5, "ema-forward")).flip(0)
    torch.testing.assert_close(forward, mixed, **CLOSE)


@pytest.mark.parametrize("n", [4, 5, 6, 12, 24])
def test_shuffling_leaves_no_neighbours_together(n):
    for seed in range(5):
        order = shuffled_order(n, seed)
        assert sorted(order) == list(range(n))
        assert all(abs(a - b) > 1 for a, b in pairwise(order))
    assert shuffled_order(n, 7) == shuffled_order(n, 7)
    original, shuffled = smoothing_matrix(n, 0.2), smoothing_matrix(n, 0.2, "shuffled", seed=1)
    torch.testing.assert_close(torch.linalg.eigvalsh(original), torch.linalg.eigvalsh(shuffled), **CLOSE)
    neighbours = torch.diagonal(shuffled, 1)
    assert torch.equal(neighbours, torch.zeros_like(neighbours))


def test_rescale_keeps_each_norm_and_the_mixed_direction():
    updates = normal(5, 30) * torch.tensor([1.0, 10, 0.1, 3, 1], dtype=torch.float64)[:, None]
    plain = as_matrix(smooth_updates(as_blocks(updates), 0.3))
    scaled = as_matrix(smooth_updates(as_blocks(updates), 0.3, normalize="rescale"))
    torch.testing.assert_close(scaled.norm(dim=1), updates.norm(dim=1), **CLOSE)
    torch.testing.assert_close(torch.cosine_similarity(plain, scaled), torch.ones(5, dtype=torch.float64), **CLOSE)


def test_normalising_before_mixes_directions_and_then_gives_each_its_own_norm():
    updates = normal(5, 30) * torch.tensor([1.0, 10, 0.1, 3, 1], dtype=torch.float64)[:, None]
    norms = updates.norm(dim=1, keepdim=True)
    directions = smoothing_matrix(5, 0.3) @ (updates / norms)
    expected = directions / directions.norm(dim=1, keepdim=True) * norms
    found = as_matrix(smooth_updates(as_blocks(updates), 0.3, normalize="normalize_before"))
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("normalize", ["rescale", "normalize_before"])
def test_zero_updates_stay_zero_and_all_zeros_make_no_nan(normalize):
    updates = normal(4, 6)
    updates[1] = 0
    found = smooth_(updates.clone(), 0.2, "window", normalize)
    assert torch.equal(found[1], torch.zeros(6, dtype=torch.float64))
    torch.testing.assert_close(found.norm(dim=1), updates.norm(dim=1), **CLOSE)
    assert torch.equal(smooth_(torch.zeros(4, 6), 0.2, "window", normalize), torch.zeros(4, 6))
    tiny = smooth_(torch.tensor([[1.0, 0.0], [0.0, 0.0]]), 1e-7, "window", normalize)
    assert torch.equal(tiny[1], torch.zeros(2))


@pytest.mark.parametrize("normalize", ["rescale", "normalize_before"])
def test_updates_that_cancel_are_not_blown_up_to_a_full_step(normalize):
    direction = normal(50, dtype=torch.float32)
    updates = torch.stack([direction * (1 + 3e-8), -direction, direction])
    found = smooth_(updates.clone(), 1.0, lambda n, alpha: torch.full((n, n), 0.5), normalize)
    mixed = smooth_(updates[:2].clone(), 1.0, lambda n, alpha: torch.full((n, n), 0.5), normalize)
    assert mixed.norm() < 1e-5 * direction.norm()
    assert torch.isfinite(found).all()


def test_norms_are_kept_however_much_longer_the_updates_of_other_blocks_are():
    """Gradients that vanish over depth: what is rounding error beside the first block is an update at the last."""
    rows = [[1.0, 0.0], [1e-9, 0.0], [1e-9, 1e-9], [1e-9, 0.0], [1e-7, 0.0], [1e-9, 0.0]]
    updates = torch.tensor(rows, dtype=torch.float32)
    for normalize in ("rescale", "normalize_before"):
        found = smooth_(updates.clone(), 0.2, "window", normalize)
        torch.testing.assert_close(found.norm(dim=1) / updates.norm(dim=1), torch.ones(6), rtol=1e-5, atol=0)
    updates[0] = torch.nan
    found = smooth_(updates.clone(), 0.2, "window", "rescale")
    torch.testing.assert_close(found[2:].norm(dim=1) / updates[2:].norm(dim=1), torch.ones(4), rtol=1e-5, atol=0)


def test_an_absent_tensor_is_no_neighbour_and_a_block_without_neighbours_is_not_shrunk():
    a, b, d, f = normal(4, 3)
    found = [row for (row,) in smooth_updates([[a], [b], [None], [d], [None], [f]], 0.2)]
    torch.testing.assert_close(found[0], 0.9 * a + 0.1 * b, **CLOSE)
    torch.testing.assert_close(found[1], 0.9 * b + 0.1 * a, **CLOSE)
    assert found[2] is None
    assert found[4] is None
    assert torch.equal(found[3], d)
    assert torch.equal(found[5], f)
    (alone,) = smooth_updates([[a]], 0.2)
    assert torch.equal(alone[0], a)


def test_the_average_reaches_over_absent_tensors():
    a, b, d = normal(3, 3)
    found = [row for (row,) in smooth_updates([[a], [b], [None], [d]], 0.3, "average")]
    torch.testing.assert_close(found[3], 0.7 * d + 0.1 * (a + b + d), **CLOSE)


def test_each_entry_is_mixed_by_itself_and_inputs_are_left_alone():
    first, second = normal(4, 3), normal(4, 2, 2, seed=1)
    before = first.clone()
    found = smooth_updates([[a, b] for a, b in zip(first, second, strict=True)], 0.2)
    torch.testing.assert_close(torch.stack([a for a, _ in found]), as_matrix(smooth_updates(as_blocks(first))), **CLOSE)
    torch.testing.assert_close(
        torch.stack([b for _, b in found]), as_matrix(smooth_updates(as_blocks(second))), **CLOSE
    )
    assert torch.equal(first, before)


def test_half_precision_is_mixed_in_float32():
    updates = normal(4, 200, dtype=torch.float32).bfloat16()
    found = as_matrix(smooth_updates(as_blocks(updates), 0.2))
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, as_matrix(smooth_updates(as_blocks(updates.float()), 0.2)).bfloat16())


def test_a_kernel_of_ones_own():
    def forward(n, alpha):
        return torch.eye(n) + alpha * torch.diag(torch.ones(n - 1), 1)

    updates = normal(4, 3)
    found = as_matrix(smooth_updates(as_blocks(updates), 0.25, forward))
    torch.testing.assert_close(found, forward(4, 0.25).double() @ updates, **CLOSE)
    torch.testing.assert_close(smoothing_matrix(4, 0.25, forward), forward(4, 0.25).double(), **CLOSE)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: smoothing_matrix(0, 0.2), "n_blocks"),
        (lambda: smoothing_matrix(3, 1.2), "between 0"),
        (lambda: smoothing_matrix(3, float("nan")), "between 0"),
        (lambda: smoothing_matrix(3, 0.2, "gauss"), "window, laplacian"),
        (lambda: smoothing_matrix(3, 0.2, lambda n, a: torch.eye(2)), "shape"),
        (lambda: smooth_updates([[torch.ones(2)]], normalize="unit"), "normalize_before"),
        (lambda: smooth_updates([[torch.ones(2)], []]), "absent"),
        (lambda: smooth_updates([[torch.ones(2)], [torch.ones(3)]]), "one shape"),
        (lambda: smooth_updates([[torch.ones(2)], [torch.ones(2).double()]]), "dtype"),
        (lambda: smooth_updates([[torch.ones(2).long()], [torch.ones(2).long()]]), "floating-point"),
        (lambda: smoothing_matrix(2, 0.2, lambda n, a: torch.full((2, 2), torch.nan)), "not finite"),
    ],
)
def test_bad_input_is_refused_with_what_was_expected(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("alpha", [None, "x", True])
def test_a_strength_that_is_no_number_is_refused(alpha):
    with pytest.raises(TypeError, match="number"):
        smoothing_matrix(3, alpha)
