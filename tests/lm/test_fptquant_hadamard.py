"""Hadamard matrices of many orders against their definition and scipy, and the grouped product against the dense one."""

import numpy as np
import pytest
import scipy.linalg
import torch

from cameraready.lm.fptquant.hadamard import GroupedHadamard, hadamard_matrix, hadamard_order

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("order", [1, 2, 4, 12, 20, 28, 36, 44, 48, 60, 76, 640, 896, 1792])
def test_a_hadamard_matrix_has_entries_of_one_size_and_orthogonal_rows(order):
    matrix = hadamard_matrix(order)
    torch.testing.assert_close(matrix.abs(), torch.full_like(matrix, order**-0.5), rtol=1e-12, atol=0)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(order, dtype=torch.float64), rtol=0, atol=1e-12)


def test_powers_of_two_are_sylvesters_matrices():
    for order in (1, 2, 8, 128):
        np.testing.assert_allclose(hadamard_matrix(order), scipy.linalg.hadamard(order) / order**0.5, rtol=1e-12)


@pytest.mark.parametrize(
    ("width", "order"),
    [(896, 896), (4864, 4864), (14336, 14336), (640, 640), (2048, 2048), (11008, 256), (6, 2), (7, 1), (100, 20)],
)
def test_widths_of_real_models_get_the_largest_known_blocks(width, order):
    assert hadamard_order(width) == order


@pytest.mark.parametrize(
    ("width", "group"), [(96, None), (256, None), (11008, None), (896, None), (24, 12), (24, 4), (9, 1)]
)
def test_the_grouped_product_is_the_block_diagonal_one_and_its_transpose_undoes_it(width, group):
    transform = GroupedHadamard(width, group)
    x = torch.randn(2, 3, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    if width <= 1000:
        dense = torch.block_diag(*[hadamard_matrix(transform.order)] * (width // transform.order))
        torch.testing.assert_close(transform(x), x @ dense, rtol=0, atol=1e-12)
    torch.testing.assert_close(transform.transposed(transform(x)), x, rtol=0, atol=1e-12)
    torch.testing.assert_close(transform(x).norm(dim=-1), x.norm(dim=-1), rtol=1e-12, atol=0)
    assert transform(x.float()).dtype == torch.float32


def test_what_cannot_be_is_said():
    with pytest.raises(ValueError, match="do not divide"):
        GroupedHadamard(10, 4)
    with pytest.raises(ValueError, match="of order 6 is known"):
        hadamard_matrix(6)
    with pytest.raises(ValueError, match="last dimension of 8"):
        GroupedHadamard(8)(torch.zeros(2, 4))
    with pytest.raises(ValueError, match="positive"):
        hadamard_order(0)
