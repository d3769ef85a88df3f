"""The averaged step by enumeration, the constants against closed forms and simulation, the sampler against its law."""

import itertools
import math

import numpy as np
import pytest
import torch

from cameraready.optim.sng import (
    SquaredVolumeSampler,
    accelerated_parameters,
    learning_rate_for,
    projection_stats,
    sng_direction,
    spring_update,
    svs_preconditioner,
)

pytestmark = pytest.mark.torch


def matrix(N=8, n=5, seed=0, decay=0.0):
    generator = torch.Generator().manual_seed(seed)
    J = torch.randn(N, n, generator=generator, dtype=torch.float64)
    U, _, Vh = torch.linalg.svd(J, full_matrices=False)
    spectrum = torch.arange(1, min(N, n) + 1, dtype=torch.float64) ** -decay
    return (U * spectrum) @ Vh, torch.randn(N, generator=generator, dtype=torch.float64)


def law(J, k, damping):
    """Batches and their probabilities, by determinants."""
    batches = list(itertools.combinations(range(len(J)), k))
    A = J.numpy()
    volumes = [np.linalg.det(A[list(S)] @ A[list(S)].T + damping * np.eye(k)) for S in batches]
    return batches, np.maximum(volumes, 0.0) / np.sum(np.maximum(volumes, 0.0))


def mean_direction(J, r, k, damping, weights=None):
    batches, probabilities = law(J, k, damping)
    if weights is not None:
        probabilities = np.full(len(batches), 1 / len(batches))
    return sum(p * sng_direction(J[list(S)], r[list(S)], damping) for S, p in zip(batches, probabilities, strict=True))


@pytest.mark.parametrize("k", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("damping", [0.0, 0.1, 3.0])
@pytest.mark.parametrize("n", [3, 5, 12])
def test_under_squared_volume_sampling_the_mean_step_is_the_preconditioned_gradient(k, damping, n):
    J, r = matrix(n=n)
    if damping == 0.0 and k > min(n, 8):
        with pytest.raises(ValueError, match="volume zero"):
            svs_preconditioner(J, k)
        return
    g = svs_preconditioner(J, k, damping)
    gradient = J.T @ r
    torch.testing.assert_close(mean_direction(J, r, k, damping), g(gradient), rtol=0, atol=1e-10)
    torch.testing.assert_close(g.matrix() @ gradient, g(gradient), rtol=0, atol=1e-10)


def test_uniform_batches_have_no_such_identity():
    J, r = matrix()
    g = svs_preconditioner(J, 2, 0.1)
    assert (mean_direction(J, r, 2, 0.1, "uniform") - g(J.T @ r)).norm() > 1e-2
    # Whatever function of J'J one takes: the mean step is not in the span of the eigenvector that the gradient is in.
    direction = mean_direction(J, J @ g.vectors[:, 0], 2, 0.1, "uniform")
    assert (direction - g.vectors[:, 0] * (g.vectors[:, 0] @ direction)).norm() > 1e-3


def test_the_preconditioner_has_its_closed_forms():
    J, _ = matrix()
    kappa = svs_preconditioner(J, 1).eigenvalues
    # One row by its squared norm: randomised Kaczmarz.
    torch.testing.assert_close(svs_preconditioner(J, 1).values, (1 / kappa.sum()).expand(5))
    # All rows: the damped Gauss-Newton step.
    torch.testing.assert_close(svs_preconditioner(J, 8, 0.3).values, 1 / (kappa + 0.3))
    # Binomials, as in the sheet's formula.
    k, damping, N = 3, 0.2, 8
    e = [1.0, *(sum(math.prod(c) for c in itertools.combinations(kappa.tolist(), j)) for j in range(1, k + 1))]
    Z = sum(math.comb(N - j, k - j) * damping ** (k - j) * e[j] for j in range(k + 1))
    for i in range(5):
        rest = [v for j, v in enumerate(kappa.tolist()) if j != i]
        f = [1.0, *(sum(math.prod(c) for c in itertools.combinations(rest, j)) for j in range(1, k))]
        g = sum(math.comb(N - j, k - j) * damping ** (k - j) * f[j - 1] for j in range(1, k + 1)) / Z
        assert svs_preconditioner(J, k, damping).values[i].item() == pytest.approx(g, rel=1e-10)


def test_many_rows_do_not_overflow():
    generator = torch.Generator().manual_seed(0)
    J = 1e3 * torch.randn(400, 60, generator=generator, dtype=torch.float64)
    g = svs_preconditioner(J, 30, 1e-2)
    gain = g.values * g.eigenvalues
    assert torch.isfinite(gain).all()
    assert gain.min() > 0
    assert gain.max() < 1
    # Damping apart, a batch's projection has trace k.
    assert gain.sum().item() == pytest.approx(30, rel=1e-3)


@pytest.mark.parametrize("damping", [0.0, 0.5])
def test_the_sampler_draws_by_squared_volume(damping):
    """Frequencies of all 20 batches against determinants, by a chi-squared statistic below its 0.999 quantile."""
    from scipy import stats

    J, _ = matrix(6, 4, decay=0.5)
    batches, probabilities = law(J, 3, damping)
    number = {S: i for i, S in enumerate(batches)}
    counts = np.zeros(len(batches))
    for S in SquaredVolumeSampler(J, 3, damping, n_batches=2_500, seed=1):
        counts[number[tuple(S)]] += 1
    statistic = ((counts - 2_500 * probabilities) ** 2 / (2_500 * probabilities)).sum()
    assert statistic < stats.chi2(len(batches) - 1).ppf(0.999)
    uniform = ((counts - 125) ** 2 / 125).sum()  # the statistic would tell another law
    assert uniform > stats.chi2(len(batches) - 1).ppf(0.999)


def test_the_sampler_never_draws_a_batch_without_volume():
    J, _ = matrix(6, 4)
    J = torch.cat([J, J[:2]])
    for S in SquaredVolumeSampler(J, 3, n_batches=500):
        assert not {0, 6} <= set(S)
        assert not {1, 7} <= set(S)


def test_the_sampler_is_a_batch_sampler():
    J, _ = matrix(10, 4)
    data = torch.utils.data.TensorDataset(torch.arange(10))
    loader = torch.utils.data.DataLoader(data, batch_sampler=SquaredVolumeSampler(J, 3, 0.1, seed=2))
    assert len(loader) == 4
    first = [batch[0].tolist() for batch in loader]
    assert all(len(set(batch)) == 3 for batch in first)
    assert first != [batch[0].tolist() for batch in loader]
    assert first == list(SquaredVolumeSampler(J, 3, 0.1, seed=2))
    assert first == list(SquaredVolumeSampler(J, 3, 0.1, generator=torch.Generator().manual_seed(2)))


def test_constants_have_their_closed_forms():
    whole = projection_stats(matrix()[0], 8)
    assert (whole.alpha, whole.beta) == pytest.approx((1.0, 1.0))
    assert (whole.mu, whole.eta) == pytest.approx((0.0, 1.0))
    # Orthogonal rows, k of N: each direction is hit with probability k / N.
    N, k = 10, 3
    rotation = torch.linalg.qr(matrix(10, 10)[0]).Q
    found = projection_stats(rotation, k)
    assert found.exact
    assert found.alpha == pytest.approx(k / N)
    # E[P Q^-1 P] = (N / k) Q, since P is a projection.
    assert found.beta == pytest.approx(N / k)
    assert found.eta == pytest.approx(1 - found.mu)


@pytest.mark.parametrize("sampling", ["uniform", "svs"])
@pytest.mark.parametrize("damping", [0.0, 0.2])
def test_enumerated_constants_follow_the_definition(sampling, damping):
    J, _ = matrix(7, 4, decay=1.0)
    batches, probabilities = law(J, 2, damping)
    if sampling == "uniform":
        probabilities = np.full(len(batches), 1 / len(batches))
    A = J.numpy()
    P = [A[list(S)].T @ np.linalg.pinv(A[list(S)] @ A[list(S)].T + damping * np.eye(2)) @ A[list(S)] for S in batches]
    Q = sum(p * one for p, one in zip(probabilities, P, strict=True))
    values, vectors = np.linalg.eigh(Q)
    root = vectors @ np.diag(values**-0.5) @ vectors.T
    M = sum(p * root @ one @ np.linalg.inv(Q) @ one @ root for p, one in zip(probabilities, P, strict=True))
    found = projection_stats(J, 2, damping, sampling=sampling)
    assert found.alpha == pytest.approx(values[0], rel=1e-8)
    assert found.beta == pytest.approx(max(1.0, np.linalg.eigvalsh(M)[-1]), rel=1e-8)


def test_alpha_under_squared_volume_sampling_is_the_preconditioners_smallest_gain():
    J, _ = matrix(7, 4, decay=1.0)
    g = svs_preconditioner(J, 2, 0.1)
    assert projection_stats(J, 2, 0.1, sampling="svs").alpha == pytest.approx((g.values * g.eigenvalues).min().item())
    sampled = projection_stats(J, 2, 0.1, sampling="svs", n_samples=200)
    assert sampled.alpha == pytest.approx((g.values * g.eigenvalues).min().item())


def test_alpha_is_the_smallest_eigenvalue_that_is_not_zero():
    """More parameters than rows: the null space has no part in it."""
    J, _ = matrix(5, 12)
    found = projection_stats(J, 2)
    assert found.alpha > 0.05
    assert projection_stats(torch.cat([J, torch.zeros(5, 3)], dim=1), 2).alpha == pytest.approx(found.alpha)


@pytest.mark.parametrize("sampling", ["uniform", "svs"])
def test_sampled_constants_enclose_the_exact_ones(sampling):
    J, _ = matrix(12, 5, decay=0.5)
    exact = projection_stats(J, 3, 0.01, sampling=sampling)
    assert exact.exact
    for seed in range(5):
        found = projection_stats(J, 3, 0.01, sampling=sampling, n_samples=400, seed=seed)
        assert not found.exact
        assert found.alpha_interval[0] - 1e-9 <= exact.alpha <= found.alpha_interval[1] + 1e-9
        assert found.beta_interval[0] <= exact.beta <= found.beta_interval[1]
        assert found.beta_interval[0] < found.beta_interval[1]
        assert found.beta == pytest.approx(exact.beta, rel=0.2)


def test_estimated_beta_errs_upwards_when_batches_are_few():
    J, _ = matrix(40, 20)
    many = projection_stats(J, 4, n_samples=3_000).beta
    few = [projection_stats(J, 4, n_samples=40, seed=seed) for seed in range(5)]
    assert min(f.beta for f in few) > many
    assert all(f.beta_interval[0] < many < f.beta_interval[1] for f in few)


def test_a_table_is_a_matrix():
    import pandas as pd

    J, _ = matrix(8, 3)
    assert projection_stats(pd.DataFrame(J.numpy()), 2) == projection_stats(J, 2)


def test_too_few_batches_to_see_every_direction_warn():
    J, _ = matrix(40, 20)
    with pytest.warns(UserWarning, match="do not reach"):
        projection_stats(J, 1, n_samples=10)


def factor(J, k, mu, eta):
    """Exact factor a step of the mean squared error: spectral radius of the map of second moments of (theta, phi)."""
    n = J.shape[1]
    one, A = np.eye(n), J.numpy()
    batches = list(itertools.combinations(range(len(J)), k))
    moments = np.zeros(((2 * n) ** 2, (2 * n) ** 2))
    for S in batches:
        P = np.linalg.pinv(A[list(S)]) @ A[list(S)]
        step = np.block([[one - eta * P, -eta * mu * (one - P)], [P, mu * (one - P)]])
        moments += np.kron(step, step) / len(batches)
    return np.abs(np.linalg.eigvals(moments)).max()


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("decay", [0.0, 1.0, 2.0])
def test_least_squares_contracts_at_least_as_fast_as_predicted(decay, k):
    J, _ = matrix(7, 4, decay=decay)
    found = projection_stats(J, k)
    plain, fast = factor(J, k, 0.0, 1.0), factor(J, k, found.mu, found.eta)
    assert plain <= 1 - found.rate + 1e-9
    assert fast <= 1 - found.accelerated_rate + 1e-9
    # The bounds say something: SNG's is met within a factor of two in the exponent.
    assert math.log(plain) > 2.5 * math.log(1 - found.rate)


def test_the_exact_factor_is_that_of_the_update():
    """Second moments carried through `spring_update` over all batches, against their map."""
    J, _ = matrix(6, 3, decay=1.0)
    mu, eta = 0.6, 0.5
    batches = list(itertools.combinations(range(6), 2))
    thetas, phis = [torch.ones(3, dtype=torch.float64)], [torch.zeros(3, dtype=torch.float64)]
    for _ in range(2):
        pairs = list(zip(thetas, phis, strict=True))
        phis = [spring_update(J[list(S)], J[list(S)] @ t, p, mu, 0.0) for t, p in pairs for S in batches]
        thetas = [t - eta * p for t, p in zip([t for t, _ in pairs for _ in batches], phis, strict=True)]
    A, one = J.numpy(), np.eye(3)
    moment = np.zeros((6, 6))
    moment[:3, :3] = 1.0
    for _ in range(2):
        total = np.zeros((6, 6))
        for S in batches:
            P = np.linalg.pinv(A[list(S)]) @ A[list(S)]
            step = np.block([[one - eta * P, -eta * mu * (one - P)], [P, mu * (one - P)]])
            total += step @ moment @ step.T / len(batches)
        moment = total
    mean = np.mean([np.outer(t, t) for t in thetas], axis=0)
    np.testing.assert_allclose(mean, moment[:3, :3], rtol=1e-8, atol=1e-12)


def test_momentum_gains_where_the_spectrum_decays():
    J, _ = matrix(8, 5, decay=3.0)
    found = projection_stats(J, 2)
    assert found.accelerated_rate > 1.5 * found.rate
    assert math.log(factor(J, 2, found.mu, found.eta)) < 1.5 * math.log(factor(J, 2, 0.0, 1.0))


def test_a_full_step_with_large_momentum_diverges_and_the_default_does_not():
    for decay in (0.0, 1.0, 2.0):
        J, _ = matrix(8, 4, decay=decay)
        for mu in (0.8, 0.9):
            assert factor(J, 1, mu, 1.0) > 1.0
            assert factor(J, 1, mu, learning_rate_for(mu)) < 1.0


def test_the_map_between_constants_and_parameters():
    assert accelerated_parameters(1.0, 1.0) == (0.0, 1.0)
    for alpha, beta in ((0.1, 2.0), (0.01, 100.0), (0.25, 1.0)):
        mu, eta = accelerated_parameters(alpha, beta)
        rho = math.sqrt(alpha / beta)
        assert (1 - mu) / (1 + mu) == pytest.approx(rho)
        assert learning_rate_for(mu, beta) == pytest.approx(eta)
        assert 1 - mu - 1e-12 <= eta <= 1.0
    assert learning_rate_for(0.0) == 1.0
    assert learning_rate_for(0.9) == pytest.approx(0.1)
    rho = 0.1 / 1.9
    assert learning_rate_for(0.9, 1 / rho) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: projection_stats(np.zeros((3, 2)), 1), "zero"),
        (lambda: projection_stats(np.ones(3), 1), "shape"),
        (lambda: projection_stats(np.full((3, 2), np.nan), 1), "finite"),
        (lambda: projection_stats(np.eye(3), 4), "k must be"),
        (lambda: projection_stats(np.eye(3), 0), "k must be"),
        (lambda: projection_stats(np.eye(3), 1, -1.0), "damping"),
        (lambda: projection_stats(np.eye(3), 1, sampling="poisson"), "sampling"),
        (lambda: projection_stats(np.eye(3), 1, n_samples=1), "n_samples"),
        (lambda: SquaredVolumeSampler(np.eye(3), 4), "k must be"),
        (lambda: SquaredVolumeSampler(np.ones((3, 2)), 2), "volume zero"),
        (lambda: SquaredVolumeSampler(np.zeros((3, 2)), 1), "other than zero"),
        (lambda: SquaredVolumeSampler(np.eye(3), 1, n_batches=0), "n_batches"),
        (lambda: learning_rate_for(1.0), "mu"),
        (lambda: learning_rate_for(0.5, 10.0), "beta"),
        (lambda: accelerated_parameters(0.0, 1.0), "alpha"),
        (lambda: accelerated_parameters(0.5, 3.0), "beta"),
    ],
)
def test_what_does_not_fit_is_refused(call, says):
    with pytest.raises(ValueError, match=says):
        call()


@pytest.mark.parametrize("small", [1e-6, 1e-9])
def test_a_column_of_another_scale_is_a_direction_like_any(small):
    """Three rows span the plane whatever the scale of its axes; a kernel would have lost the small one."""
    generator = torch.Generator().manual_seed(0)
    J = torch.randn(6, 2, generator=generator, dtype=torch.float64) * torch.tensor([1.0, small], dtype=torch.float64)
    found = projection_stats(J, 3)
    assert found.exact
    assert (found.alpha, found.beta) == pytest.approx((1.0, 1.0), rel=1e-5)


def test_the_rank_is_judged_at_the_precision_given():
    generator = torch.Generator().manual_seed(0)
    J = torch.randn(20, 3, generator=generator) @ torch.randn(3, 10, generator=generator)
    assert projection_stats(J, 4, n_samples=200).alpha == pytest.approx(1.0, rel=1e-3)
    assert len(svs_preconditioner(J, 3).eigenvalues) == 3
    with pytest.raises(ValueError, match="rank 3"):
        SquaredVolumeSampler(J, 5)


def test_single_precision_near_its_rank_loses_no_direction_within_a_batch():
    generator = torch.Generator().manual_seed(0)
    J = torch.randn(60, 8, dtype=torch.float64, generator=generator) * torch.logspace(0, -7, 8, dtype=torch.float64)
    assert projection_stats(J[:, :7].float(), 10, n_samples=100).alpha == pytest.approx(1.0, rel=1e-6)
    with pytest.raises(TypeError, match="complex"):
        projection_stats(torch.eye(4) * 1j, 1)


def test_where_alpha_is_unknown_nothing_dangerous_is_suggested():
    J, _ = matrix(40, 20)
    with pytest.warns(UserWarning, match="do not reach"):
        found = projection_stats(J, 1, n_samples=10)
    assert math.isnan(found.alpha)
    assert (found.mu, found.eta) == (0.0, 1.0)
    damped = projection_stats(J[:8], 2, 1e20)  # a tiny alpha that is known
    assert damped.alpha == pytest.approx(damped.alpha_interval[0])
    assert 0 < damped.alpha < 1e-15
    assert damped.mu < 1.0
    assert accelerated_parameters(1e-300, 1.0)[0] < 1.0
