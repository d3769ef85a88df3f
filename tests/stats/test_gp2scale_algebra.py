"""Factorisations against dense linear algebra, on graphs easy and hard to order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse

from cameraready.stats.gp2scale import Wendland
from cameraready.stats.gp2scale.algebra.backends import LIBRARIES
from cameraready.stats.gp2scale.algebra.dissection import graph_coordinates, nested_dissection, structure_of
from cameraready.stats.gp2scale.algebra.errors import IndefiniteMatrix, NoConvergence
from cameraready.stats.gp2scale.algebra.iterative import IterativeFactor, lanczos, smallest_ritz_value
from cameraready.stats.gp2scale.algebra.multifrontal import MultifrontalFactor
from cameraready.stats.gp2scale.algebra.system import System, _separates


def covariance(n: int = 700, d: int = 2, radius: float = 0.15, noise: float = 0.05, seed: int = 0):
    """Points, upper-triangle entries of a covariance with noise, and the dense matrix."""
    X = np.random.default_rng(seed).random((n, d))
    found = Wendland(radius).entries(X)
    values = found.values + noise * (found.rows == found.cols)
    return X, found.rows, found.cols, values, dense(n, found.rows, found.cols, values)


def dense(n, rows, cols, values):
    A = np.zeros((n, n))
    A[rows, cols] = values
    A[cols, rows] = values
    return A


def check_against_dense(factor, rows, cols, A, tolerance=1e-9):
    n = len(A)
    rng = np.random.default_rng(1)
    y = rng.standard_normal((n, 3))
    inverse = np.linalg.inv(A)
    assert factor.logdet == pytest.approx(np.linalg.slogdet(A)[1], rel=1e-11)
    np.testing.assert_allclose(factor.solve(y), inverse @ y, atol=tolerance)
    np.testing.assert_allclose(factor.solve(y[:, 0]), inverse @ y[:, 0], atol=tolerance)
    np.testing.assert_allclose(factor.inverse_entries(), inverse[rows, cols], atol=tolerance)
    left = sparse.random(40, n, 0.02, format="csr", random_state=0)
    expected = left @ inverse @ left.T
    np.testing.assert_allclose(factor.quadratic(left), np.diag(expected), atol=tolerance)
    np.testing.assert_allclose(factor.quadratic(left, full=True), expected, atol=tolerance)


@pytest.mark.parametrize(
    ("n", "d", "radius"), [(1, 2, 0.1), (5, 1, 0.5), (700, 1, 0.02), (700, 2, 0.15), (700, 3, 0.3)]
)
def test_the_multifrontal_factor_equals_dense_algebra(n, d, radius):
    X, rows, cols, values, A = covariance(n, d, radius)
    factor = MultifrontalFactor(structure_of(nested_dissection(X, rows, cols, leaf=24), rows, cols), values)
    check_against_dense(factor, rows, cols, A)
    lower = factor.multiply(np.eye(n))
    np.testing.assert_allclose(lower @ lower.T, A, atol=1e-12)


@pytest.mark.parametrize("backend", sorted(LIBRARIES))
def test_libraries_equal_dense_algebra(backend):
    if backend == "cholmod":
        pytest.importorskip("cvxopt")
    elif backend == "qdldl":
        pytest.importorskip("qdldl")
    _, rows, cols, values, A = covariance(400)
    check_against_dense(LIBRARIES[backend](400, rows, cols, values), rows, cols, A)


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 120),
    density=st.floats(0.0, 0.3),
    leaf=st.integers(1, 40),
    seed=st.integers(0, 2**32 - 1),
    by_graph=st.booleans(),
)
def test_any_graph_is_factored_whatever_its_coordinates(n, density, leaf, seed, by_graph):
    """Separators come from the edges, so that coordinates without meaning cost speed and never correctness."""
    rng = np.random.default_rng(seed)
    mask = np.triu(rng.random((n, n)) < density, 1) | np.eye(n, dtype=bool)
    rows, cols = np.nonzero(mask)
    values = rng.uniform(-1, 1, len(rows))
    values[rows == cols] = n + 1.0  # diagonally dominant
    places = graph_coordinates(n, rows, cols) if by_graph else rng.integers(0, 3, (n, 2)).astype(float)
    tree = nested_dissection(places, rows, cols, leaf=leaf)
    assert sorted(tree.order) == list(range(n))
    assert _separates(tree, rows, cols)
    check_against_dense(
        MultifrontalFactor(structure_of(tree, rows, cols), values), rows, cols, dense(n, rows, cols, values)
    )


@pytest.mark.parametrize("backend", ["multifrontal", *sorted(LIBRARIES)])
def test_indefinite_matrices_are_refused(backend):
    if backend == "cholmod":
        pytest.importorskip("cvxopt")
    elif backend == "qdldl":
        pytest.importorskip("qdldl")
    X, rows, cols, values, A = covariance(300)
    smallest = np.linalg.eigvalsh(A)[0]
    values = values - (rows == cols) * 1.05 * smallest  # one small negative eigenvalue, all others positive
    with pytest.raises(IndefiniteMatrix):
        System(300, X, backend=backend).factor(rows, cols, values)


def test_conjugate_gradients_and_quadrature():
    X, rows, cols, values, A = covariance(600, noise=0.1)
    factor = IterativeFactor(600, rows, cols, values, X, tol=1e-10, n_probes=64, seed=0)
    y = np.random.default_rng(1).standard_normal((600, 2))
    np.testing.assert_allclose(A @ factor.solve(y), y, atol=1e-8)
    left = sparse.random(10, 600, 0.02, format="csr", random_state=0)
    np.testing.assert_allclose(factor.quadratic(left), np.diag(left @ np.linalg.solve(A, left.T.toarray())), atol=1e-8)
    # An unbiased estimate is within five of its standard errors, and those are small.
    exact = np.linalg.slogdet(A)[1]
    assert abs(factor.logdet - exact) < 5 * factor.logdet_error
    assert factor.logdet_error < 0.01 * abs(exact)
    again = IterativeFactor(600, rows, cols, values, X, tol=1e-10, n_probes=64, seed=0)
    assert again.logdet == factor.logdet


def test_the_estimated_trace_is_unbiased():
    X, rows, cols, values, A = covariance(250, radius=0.2, noise=0.1)
    inverse = np.linalg.inv(A)
    estimates = []
    for seed in range(20):
        factor = IterativeFactor(250, rows, cols, values, X, tol=1e-8, n_probes=8, seed=seed)
        estimates.append((factor.inverse_entries() * values * np.where(rows == cols, 1, 2)).sum())
    # tr(A^{-1} A) = n.
    error = np.std(estimates, ddof=1) / np.sqrt(len(estimates))
    assert abs(np.mean(estimates) - 250) < 4 * error
    assert error < 2
    assert np.trace(inverse @ A) == pytest.approx(250)


def test_negative_curvature_is_found_without_a_factor():
    X, rows, cols, values, A = covariance(600)
    shifted = values - (rows == cols) * (np.linalg.eigvalsh(A)[0] + 0.05)
    with pytest.raises(IndefiniteMatrix):
        IterativeFactor(600, rows, cols, shifted, X, tol=1e-8, n_probes=8, seed=0).solve(np.ones(600))
    matrix = sparse.csr_matrix(dense(600, rows, cols, shifted))
    smallest = np.linalg.eigvalsh(matrix.toarray())[0]
    assert smallest - 1e-12 <= smallest_ritz_value(matrix, 0) < 0


def test_lanczos_finds_the_spectrum_of_a_small_matrix():
    rng = np.random.default_rng(0)
    spectrum = np.arange(1.0, 9.0)
    Q = np.linalg.qr(rng.standard_normal((8, 8)))[0]
    A = Q * spectrum @ Q.T
    alphas, betas = lanczos(lambda x: A @ x, rng.standard_normal((8, 2)), 8)
    for alpha, beta in zip(alphas, betas, strict=True):
        T = np.diag(alpha) + np.diag(beta, 1) + np.diag(beta, -1)
        np.testing.assert_allclose(np.linalg.eigvalsh(T), spectrum, atol=1e-9)


def test_a_solve_that_does_not_converge_says_so(monkeypatch):
    monkeypatch.setattr("cameraready.stats.gp2scale.algebra.iterative.MAX_CG_STEPS", 2)
    X, rows, cols, values, _ = covariance(600)
    factor = IterativeFactor(600, rows, cols, values, X, tol=1e-10, n_probes=2, seed=0)
    with pytest.raises(NoConvergence, match="in 2 steps"):
        factor.solve(np.ones(600))


def test_orderings_are_kept_while_they_serve_and_renewed_when_they_do_not():
    X = np.random.default_rng(0).random((800, 2))
    system = System(800, X)
    for radius in (0.1, 0.1, 0.099, 0.05, 0.2, 0.02):
        found = Wendland(radius).entries(X)
        values = found.values + 0.1 * (found.rows == found.cols)
        factor = system.factor(found.rows, found.cols, values)
        exact = np.linalg.slogdet(dense(800, found.rows, found.cols, values))[1]
        assert factor.logdet == pytest.approx(exact, abs=1e-9)


def test_the_factor_falls_back_to_iterations_when_it_would_not_fit():
    X, rows, cols, values, _ = covariance(600)
    system = System(600, X, max_factor_bytes=1e5)
    system.factor(rows, cols, values)
    assert system.used == "cg"
    system = System(600, X)
    system.factor(rows, cols, values)
    assert system.used == "multifrontal"


def test_fill_grows_like_n_log_n_in_two_dimensions():
    """Nested dissection's theory; a banded or natural ordering has n^1.5."""
    fill = []
    for n in (4_000, 32_000):
        X = np.random.default_rng(0).random((n, 2))
        found = Wendland(np.sqrt(20 / (np.pi * n))).entries(X)
        fill.append(structure_of(nested_dissection(X, found.rows, found.cols), found.rows, found.cols).nonzeros)
    exponent = np.log(fill[1] / fill[0]) / np.log(8)
    assert exponent < 1.27  # log(8 * log(32000) / log(4000)) / log(8) = 1.11, and leaves still weigh at these sizes
