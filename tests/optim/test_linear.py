"""Factorisations, dense rows by Woodbury and matrix-free solves, each against plain dense algebra."""

import numpy as np
import pytest
import scipy.sparse as sparse
import torch

from cameraready.optim import _linear
from cameraready.optim._linear import NotPositiveDefiniteError, WeightedGram, factor_spd, iterative_solve

pytestmark = pytest.mark.torch


def grid_laplacian(side):
    line = sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(side, side))
    eye = sparse.eye_array(side)
    return sparse.csc_array(sparse.kron(line, eye) + sparse.kron(eye, line) + 0.1 * sparse.eye_array(side**2))


def ring(n, order):
    """A second-difference matrix on a ring, in a scrambled order that hides its narrow band."""
    corner = sparse.csc_array(([1.0], ([0], [n - 1])), shape=(n, n))
    matrix = sparse.diags_array([-1.0, 2.5, -1.0], offsets=[-1, 0, 1], shape=(n, n)) - corner - corner.T
    return sparse.csc_array(sparse.csr_array(matrix)[order][:, order])


MATRICES = {
    "dense": lambda rng: np.cov(rng.normal(size=(12, 40))),
    "diagonal": lambda rng: sparse.diags_array(rng.random(30) + 0.1, format="csc"),
    "banded": lambda rng: ring(400, rng.permutation(400)),
    "sparse": lambda rng: grid_laplacian(40),
}


@pytest.mark.parametrize("kind", MATRICES)
def test_each_kind_of_matrix_is_recognised_and_solved(kind):
    rng = np.random.default_rng(0)
    matrix = MATRICES[kind](rng)
    factor = factor_spd(matrix)
    assert factor.kind == kind
    plain = matrix.toarray() if sparse.issparse(matrix) else matrix
    for rhs in (rng.normal(size=len(plain)), rng.normal(size=(len(plain), 3))):
        np.testing.assert_allclose(factor.solve(rhs), np.linalg.solve(plain, rhs), rtol=1e-9, atol=1e-11)


def test_a_sparse_matrix_that_is_nearly_full_is_factorised_as_a_dense_one():
    full = np.cov(np.random.default_rng(1).normal(size=(40, 100)))
    factor = factor_spd(sparse.csc_array(full))
    assert factor.kind == "dense"
    np.testing.assert_allclose(factor.solve(np.eye(40)), np.linalg.inv(full), rtol=1e-8)


@pytest.mark.parametrize("kind", MATRICES)
def test_an_indefinite_matrix_is_refused_and_told_from_a_semidefinite_one(kind):
    matrix = MATRICES[kind](np.random.default_rng(2))
    plain = matrix.toarray() if sparse.issparse(matrix) else matrix
    smallest = np.linalg.eigvalsh(plain)[0]
    eye = sparse.eye_array(len(plain), format="csc") if sparse.issparse(matrix) else np.eye(len(plain))
    shifted = matrix - (smallest + 1e-3) * eye
    with pytest.raises(NotPositiveDefiniteError):
        factor_spd(shifted)
    assert not _linear.is_positive_semidefinite(shifted, 1e-6)
    assert _linear.is_positive_semidefinite(matrix - smallest * eye, 1e-6)


def test_woodbury_keeps_dense_rows_apart_and_gives_the_same_solution():
    rng = np.random.default_rng(3)
    n = 2_000
    base = sparse.csc_array(sparse.diags_array(rng.random(n) + 0.5))
    few = sparse.csr_array(np.vstack([np.ones(n), rng.normal(size=n)]))
    rows = sparse.vstack([few, sparse.random_array((30, n), density=2 / n, rng=rng)], format="csr")
    weights, diagonal, rhs = 10.0 ** rng.uniform(0, 5, 32), rng.random(n), rng.normal(size=n)
    gram = WeightedGram(base, rows, weights, diagonal)
    assert "Woodbury" in gram.kind
    assert gram.shift == 0.0
    plain = base.toarray() + rows.toarray().T @ (weights[:, np.newaxis] * rows.toarray()) + np.diag(diagonal)
    np.testing.assert_allclose(gram.solve(rhs), np.linalg.solve(plain, rhs), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("is_sparse", [True, False])
def test_a_gram_matrix_that_is_singular_is_shifted_and_says_so(is_sparse):
    base = np.diag([1.0, 0.0, 0.0])
    rows = np.array([[0.0, 1.0, 0.0]])
    pair = (sparse.csc_array(base), sparse.csr_array(rows)) if is_sparse else (base, rows)
    gram = WeightedGram(*pair, np.array([4.0]))
    assert gram.shift > 0.0
    np.testing.assert_allclose(gram.solve(np.array([1.0, 4.0, 0.0])), [1.0, 1.0, 0.0], atol=1e-9)


@pytest.mark.parametrize("method", ["cg", "minres"])
def test_iterative_solves_meet_their_tolerance_and_say_when_they_do_not(method):
    matrix = grid_laplacian(30)
    rhs = np.random.default_rng(4).normal(size=900)
    found, converged = iterative_solve(
        lambda v: matrix @ v, rhs, method=method, tolerance=1e-11, diagonal=matrix.diagonal()
    )
    assert converged
    np.testing.assert_allclose(matrix @ found, rhs, atol=1e-8)
    assert not iterative_solve(lambda v: matrix @ v, rhs, method=method, max_steps=3)[1]
    np.testing.assert_array_equal(iterative_solve(lambda v: matrix @ v, 0 * rhs, method=method)[0], 0 * rhs)


def test_minres_solves_a_consistent_singular_system():
    matrix = np.diag([1.0, -2.0, 0.0])
    found, converged = iterative_solve(lambda v: matrix @ v, np.array([1.0, 2.0, 0.0]), method="minres")
    assert converged
    np.testing.assert_allclose(found, [1.0, -1.0, 0.0], atol=1e-9)


def test_damped_solve_is_ridge_regression_and_with_no_damping_the_pseudo_inverse():
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    kernel, rhs = rows @ rows.mT, torch.randn(6, generator=generator, dtype=torch.float64)
    eye = torch.eye(6, dtype=torch.float64)
    torch.testing.assert_close(_linear.damped_solve(kernel, rhs, 0.3), torch.linalg.solve(kernel + 0.3 * eye, rhs))
    pseudo = torch.linalg.pinv(kernel, rtol=1e-10)
    torch.testing.assert_close(_linear.damped_solve(kernel, rhs, 0.0), pseudo @ rhs)
    torch.testing.assert_close(
        _linear.damped_solve(kernel, torch.stack([rhs, 2 * rhs], 1), 0.3)[:, 1],
        2 * _linear.damped_solve(kernel, rhs, 0.3),
    )


@pytest.mark.parametrize(
    ("kernel", "rhs", "damping", "words"),
    [
        (torch.ones(2, 3), torch.ones(2), 0.1, "expected kernel"),
        (torch.eye(2), torch.ones(2), -1.0, "damping must be"),
        (torch.eye(2) * float("nan"), torch.ones(2), 0.1, "not finite"),
    ],
)
def test_damped_solve_says_what_is_wrong(kernel, rhs, damping, words):
    with pytest.raises(ValueError, match=words):
        _linear.damped_solve(kernel, rhs, damping)
