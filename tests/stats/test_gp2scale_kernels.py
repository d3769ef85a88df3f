"""Sparse kernels: positive definiteness of what is guaranteed, exact derivatives, and scikit-learn's conventions."""

from __future__ import annotations

import doctest
from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse
from sklearn.base import clone
from sklearn.gaussian_process import kernels as dense

from cameraready.stats.gp2scale import (
    Amplitude,
    Bumps,
    Core,
    Deltas,
    Field,
    NonStationary,
    PaperNonStationary,
    SupportKernel,
    Wendland,
)
from cameraready.stats.gp2scale.kernels import custom
from cameraready.stats.gp2scale.kernels.wendland import wendland

RNG = np.random.default_rng(7)
X2 = RNG.random((60, 2))
CENTRES = [RNG.random((2, 2)), RNG.random((3, 2))]


def field() -> Field:
    return Field(RNG.random((4, 2)), RNG.random(4) + 0.3)


KERNELS = {
    "wendland": Wendland(0.4, 3) * 2.0,
    "ard": Wendland([0.3, 0.5], 2),
    "rough": Wendland(0.4, 0),
    "core": Core(dense.RBF(0.5) * dense.ConstantKernel(2.0) + dense.Matern(0.4, nu=1.5)) * Wendland(0.5),
    "rational": Core(dense.RationalQuadratic(0.5)) * Wendland(0.4),
    "far": Core(dense.RBF([0.4, 0.6]))
    * (Bumps(CENTRES, 0.3, [0.5, 0.8], 1.2, shape_bounds=(1e-2, 1e2)) + Wendland(0.3)),
    "cores": Core(dense.Matern(0.3, nu=0.5)) * Wendland(0.4) + Core(dense.DotProduct()) * Bumps(CENTRES[0], 0.4),
    "deltas": Deltas([X2[:5], X2[10:13]], 0.7) + Wendland(0.3),
    "varying": NonStationary(field(), field(), 0.5),
    "callable": NonStationary(lambda X: X + 0.2, lambda X: X[:, 0] + 0.1, 0.4),
    "paper": PaperNonStationary(field(), field()),
    "periodic": Core(dense.ExpSineSquared(0.5, 0.7)) * Wendland(0.4),
}


@pytest.mark.parametrize("name", KERNELS)
def test_matrix_and_derivatives_agree_with_each_other(name):
    kernel = KERNELS[name]
    K, slopes = kernel(X2, eval_gradient=True)
    assert sparse.isspmatrix_csr(K)
    assert K.indices.dtype == np.int32
    full = K.toarray()
    np.testing.assert_array_equal(full, full.T)
    np.testing.assert_allclose(kernel.diag(X2), full.diagonal(), rtol=1e-14)
    np.testing.assert_allclose(kernel(X2, X2).toarray(), full, atol=1e-14)
    theta, step = kernel.theta, 1e-5
    assert len(slopes) == len(theta) == len(kernel.bounds)
    for k, slope in enumerate(slopes):
        away = step * np.eye(len(theta))[k]
        up, down = (kernel.clone_with_theta(theta + s * away)(X2).toarray() for s in (1, -1))
        # Central differences err by step^2 times the third derivative, a few hundred for these kernels.
        np.testing.assert_allclose(slope.toarray(), (up - down) / (2 * step), atol=1e-7)


@pytest.mark.parametrize("name", KERNELS)
def test_scikit_learns_conventions(name):
    kernel = KERNELS[name]
    assert clone(kernel) == kernel
    moved = kernel.clone_with_theta(kernel.theta + 0.1)
    np.testing.assert_allclose(moved.theta, kernel.theta + 0.1, rtol=1e-12)
    assert moved != kernel
    names = [h.name for h in kernel.hyperparameters]
    assert set(names) <= set(kernel.get_params())


def test_no_pair_beyond_the_support_is_stored():
    kernel = Wendland(0.1)
    K = kernel(X2)
    distance = np.linalg.norm(X2[:, None] - X2[None], axis=2)
    assert K.nnz == (distance < 0.1).sum()


def test_sum_and_product_equal_the_dense_ones():
    first, second = Wendland(0.3), Wendland([0.6, 0.2], 2)
    a, b = first(X2).toarray(), second(X2).toarray()
    np.testing.assert_allclose((first + second)(X2).toarray(), a + b, atol=1e-15)
    np.testing.assert_allclose((first * second)(X2).toarray(), a * b, atol=1e-15)
    np.testing.assert_allclose((3.0 * first)(X2).toarray(), 3 * a, atol=1e-15)


@pytest.mark.parametrize(
    "inner",
    [
        dense.RBF(0.3),
        dense.RBF([0.3, 0.7]),
        dense.Matern(0.5, nu=0.5),
        dense.Matern(0.5, nu=2.5),
        dense.Matern(0.5, nu=0.8),
        dense.RationalQuadratic(0.4, 1.3),
        dense.DotProduct(0.2) ** 2,
        dense.ExpSineSquared(0.3, 0.4) + dense.ConstantKernel(0.5),
    ],
)
def test_core_evaluates_any_kernel_of_scikit_learn_at_the_support(inner):
    taper = Wendland(0.4)
    K, slopes = (Core(inner) * taper)(X2, eval_gradient=True)
    expected, gradient = inner(X2, eval_gradient=True)
    w = taper(X2).toarray()
    np.testing.assert_allclose(K.toarray(), expected * w, atol=1e-14)
    for k in range(gradient.shape[2]):
        np.testing.assert_allclose(slopes[k].toarray(), gradient[:, :, k] * w, atol=1e-13)


@settings(max_examples=60, deadline=None)
@given(
    dimension=st.integers(1, 6),
    smoothness=st.integers(0, 3),
    n=st.integers(2, 60),
    radius=st.floats(0.2, 3.0),
    seed=st.integers(0, 2**32 - 1),
    lattice=st.booleans(),
)
def test_wendland_is_positive_definite_in_every_dimension(dimension, smoothness, n, radius, seed, lattice):
    rng = np.random.default_rng(seed)
    X = rng.integers(0, 4, (n, dimension)) / 3 if lattice else rng.random((n, dimension))
    smallest = np.linalg.eigvalsh(Wendland(radius, smoothness)(X).toarray())[0]
    assert smallest > -1e-13 * n  # rounding: a unit in the last place for each point


@settings(max_examples=40, deadline=None)
@given(name=st.sampled_from(["far", "cores", "core"]), seed=st.integers(0, 2**32 - 1), spread=st.floats(-1.5, 1.5))
def test_guaranteed_combinations_are_positive_semi_definite(name, seed, spread):
    kernel = KERNELS[name]
    rng = np.random.default_rng(seed)
    moved = kernel.clone_with_theta(kernel.theta + spread * rng.standard_normal(len(kernel.theta)))
    assert moved.guaranteed
    K = moved(rng.random((50, 2))).toarray()
    assert np.linalg.eigvalsh(K)[0] > -1e-12 * np.abs(K).max()


@settings(max_examples=60, deadline=None)
@given(dimension=st.integers(1, 4), seed=st.integers(0, 2**32 - 1), log_spread=st.floats(0, 2))
def test_the_safe_non_stationary_product_is_positive_semi_definite(dimension, seed, log_spread):
    rng = np.random.default_rng(seed)
    X = rng.random((60, dimension))
    values = np.exp(log_spread * rng.standard_normal((60, dimension)) - 1)
    signal = np.exp(rng.standard_normal(60))
    K = NonStationary(lambda _: values, lambda _: signal, 0.5)(X).toarray()
    assert np.linalg.eigvalsh(K)[0] > -1e-12 * K.diagonal().max()


def test_the_papers_kernels_fail_where_ours_do_not():
    """The three places: fixed degree in high dimension, the city-block norm, and eq. (6)."""
    # (i) The printed polynomial, valid up to three dimensions, on the corners of a cube in 24.
    assert _smallest_on_cube(24, degree_of=3) < -0.02
    assert _smallest_on_cube(24, degree_of=24) > 0
    # (ii) The city-block norm in two dimensions.
    grid = np.stack(np.meshgrid(np.arange(6), np.arange(6)), axis=-1).reshape(-1, 2) / 4
    r = np.abs(grid[:, None] - grid[None]).sum(axis=2)
    worst = min(np.linalg.eigvalsh(wendland(r / scale, 2, 3))[0] for scale in np.linspace(0.6, 4, 40))
    assert worst < -1e-4
    # (iii) Small random length-scale fields in one dimension.
    worst = 0.0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        x = np.sort(rng.random((60, 1)), axis=0)
        scales = np.exp(rng.standard_normal(60) - 1.5)
        kernel = PaperNonStationary(lambda _, scales=scales: scales, smoothness=1)
        assert not kernel.guaranteed
        worst = min(worst, np.linalg.eigvalsh(kernel(x).toarray())[0])
    assert worst < -1e-3


def _smallest_on_cube(dimension: int, degree_of: int) -> float:
    """The smallest eigenvalue over radii on {0, 1}^dimension, whose eigenvalues are known: sums of Krawtchouk polynomials."""
    size = range(dimension + 1)
    krawtchouk = np.array(
        [[sum((-1) ** i * comb(k, i) * comb(dimension - k, j - i) for i in range(j + 1)) for j in size] for k in size],
        dtype=float,
    )
    distances = np.sqrt(np.arange(dimension + 1))
    return min((krawtchouk @ wendland(distances / radius, degree_of, 3)).min() for radius in np.linspace(1.1, 4, 30))


def test_bumps_switched_off_leave_no_trace():
    off = Wendland(0.3) + Bumps(CENTRES, 0.3, 0.0)
    assert np.isneginf(off.theta[1])
    difference = off(X2) - Wendland(0.3)(X2)
    assert difference.nnz == 0 or np.abs(difference.data).max() == 0
    assert off(X2).nnz == Wendland(0.3)(X2).nnz


def test_bumps_link_far_places_and_have_the_rank_of_their_groups():
    K = Bumps(CENTRES, 0.3, [1.0, 2.0])(X2).toarray()
    assert np.linalg.matrix_rank(K) == 2
    far = np.array([CENTRES[0][0], CENTRES[0][1]])
    assert Bumps(CENTRES[:1], 1e-3, 1.5)(far).toarray() == pytest.approx(np.full((2, 2), 2.25))


def test_huge_coordinates_cost_no_precision():
    moved = np.round(X2 * 2**20) / 2**20 + 2.0**30  # exactly representable, so that only the method can lose digits
    here = Wendland(0.3)(moved - 2.0**30)
    assert abs(Wendland(0.3)(moved) - here).max() == 0


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (Wendland(-1.0), "above 0"),
        (Wendland([1.0, 1.0, 1.0]), "3 entries, but the points have 2 columns"),
        (Wendland(1.0, 4), "smoothness must be"),
        (Amplitude(2.0), "multiply it by a kernel with"),
        (Core(dense.WhiteKernel()) * Wendland(), "noise belongs|noise='learn'"),
        (Bumps([np.zeros((2, 3))]), "3 columns, the points 2"),
        (Bumps(CENTRES, amplitude=[1.0, 1.0, 1.0]), "3 amplitudes for 2 groups"),
        (NonStationary(lambda X: np.zeros(len(X))), "finite values above 0"),
    ],
)
def test_mistakes_are_explained(kernel, message):
    with pytest.raises(ValueError, match=message):
        kernel(X2)


def test_dense_kernels_must_be_wrapped():
    with pytest.raises(TypeError, match=r"Core\(RBF"):
        Wendland() + dense.RBF()


def test_wrong_dimension_of_new_points():
    with pytest.raises(ValueError, match="X has 2 columns, but Y has 3"):
        Wendland(0.3)(X2, np.zeros((4, 3)))


def test_a_kernel_on_strings():
    assert doctest.testmod(custom).failed == 0


def test_a_custom_kernel_equals_the_built_in_one():
    def function(A, B, p):
        r = np.linalg.norm(A - B, axis=1) / p[0]
        return np.maximum(1 - r, 0) ** 4 * (4 * r + 1)

    def everybody(X, Y):
        return np.indices((len(X), len(Y))).reshape(2, -1)

    own = SupportKernel(function, everybody, [0.3])
    own.requires_vector_input = True
    K, slopes = own(X2, eval_gradient=True)
    expected, expected_slopes = Wendland(0.3)(X2, eval_gradient=True)
    assert abs(K - expected).max() < 1e-14
    assert abs(slopes[0] - expected_slopes[0]).max() < 1e-9
