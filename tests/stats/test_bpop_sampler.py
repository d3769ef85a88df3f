"""The sampler: the same chain as a second implementation, the prior without traces, the exact posterior with them."""

import math

import numpy as np
import pytest

from cameraready.stats.bpop import LatentPrior, PartialOrderModel, exact_posterior, posets
from cameraready.stats.bpop.inference.bitsets import encode, unpacked
from cameraready.stats.bpop.inference.numpy_sampler import NumpyChain, row_log_density
from cameraready.stats.bpop.inference.sampler import Target, advance, begin_chain


def traces_of(order, count, *, seed, beta=1.0, eps=0.05):
    generator = np.random.default_rng(seed)
    return [posets.frontier_walk(order, generator, beta=beta, eps=eps) for _ in range(count)]


@pytest.mark.parametrize(
    ("n", "prior", "n_steps"),
    [
        (6, LatentPrior(max_dimension=4), 150),
        (7, LatentPrior(dimension=3, rho_shape=2.0), 150),
        (1, LatentPrior(max_dimension=4), 150),
        (70, LatentPrior(), 15),
    ],
)
def test_the_compiled_chain_is_the_plain_one_state_by_state(n, prior, n_steps):
    order = LatentPrior(dimension=2).draw(n, 1, np.random.default_rng(1))[0]
    traces = traces_of(order, 5, seed=2, eps=0.1)
    target = Target(encode(traces, n), n, prior, (2.0, 2.0), (1.0, 20.0))
    latent = np.random.default_rng(3).standard_normal((n, 3))
    compiled = begin_chain(target, latent, np.random.default_rng(4))
    plain = NumpyChain(target, traces, latent, np.random.default_rng(4))
    orders, scalars = np.zeros((0, *compiled.after.shape), dtype=np.uint64), np.zeros((0, 5))
    for _ in range(4):
        advance(target, compiled, n_steps, thin=1, orders=orders, scalars=scalars)
        plain.advance(n_steps)
        np.testing.assert_array_equal(unpacked(compiled.after, n), plain.order)
        k = plain.state.latent.shape[1]
        assert compiled.dimension[0] == k
        np.testing.assert_allclose(compiled.latent[:, :k], plain.state.latent, rtol=1e-9, atol=1e-9)
        state = plain.state
        np.testing.assert_allclose(compiled.scalars, [state.rho, state.beta, state.eps, state.value], rtol=1e-8)
    assert compiled.counts[:, 1].sum() == plain.accepted
    assert plain.accepted > n_steps


def test_the_density_of_a_row_is_the_normal_one():
    from scipy.stats import multivariate_normal

    rows, rho = np.random.default_rng(0).standard_normal((4, 3)), 0.7
    expected = multivariate_normal(cov=(1 - rho) * np.eye(3) + rho).logpdf(rows) + 1.5 * math.log(2 * math.pi)
    np.testing.assert_allclose(row_log_density(rows, rho), expected)


def test_without_traces_the_chain_samples_the_prior():
    """Closed forms: uniform rho, truncated Poisson dimension, and P(i before j) = 1/2 - 1 / (2 pi) in two dimensions."""
    flat = PartialOrderModel(prior=LatentPrior(dimension=2), n_iter=60_000, seed=1).fit([], actions="abc")
    edge = flat.edge_probability.to_numpy()[~np.eye(3, dtype=bool)]
    np.testing.assert_allclose(edge, 0.5 - 1 / (2 * math.pi), atol=0.03)
    assert flat.parameters["rho"].mean() == pytest.approx(0.5, abs=0.03)
    assert flat.parameters["beta"].mean() == pytest.approx(1.0, abs=0.06)

    prior = LatentPrior(max_dimension=5, rho_shape=3.0)
    jumping = PartialOrderModel(prior=prior, n_iter=60_000, seed=2, eps=(2.0, 8.0)).fit([], actions="ab").parameters
    shares = np.bincount(jumping["dimension"].astype(int).ravel(), minlength=6) / jumping["dimension"].size
    np.testing.assert_allclose(shares, np.exp(prior.log_dimension()), atol=0.03)
    assert jumping["rho"].mean() == pytest.approx(1 / 4, abs=0.02)
    assert jumping["eps"].mean() == pytest.approx(0.2, abs=0.02)


def test_one_trace_of_two_actions_in_closed_form():
    """P(a before b | ab) = 2 q (1 - eps / 2) where q = 1/2 - 1 / (2 pi) is the prior's."""
    model = PartialOrderModel(prior=LatentPrior(dimension=2), n_iter=60_000, eps=0.1, seed=3)
    found = model.fit([["a", "b"]]).edge_probability.loc["a", "b"]
    assert found == pytest.approx(2 * (0.5 - 1 / (2 * math.pi)) * 0.95, abs=0.025)


@pytest.mark.parametrize(
    ("n", "count", "beta"), [(3, 3, (2.0, 2.0)), (4, 4, 0.0), (5, 4, (2.0, 2.0)), (5, 12, 1.0), (4, 6, (4.0, 1.0))]
)
def test_the_posterior_is_the_enumerated_one(n, count, beta):
    order = LatentPrior(dimension=2).draw(n, 1, np.random.default_rng(n))[0]
    traces = traces_of(order, count, seed=count, eps=0.1)
    exact = exact_posterior(traces, range(n), beta=beta, eps=0.05, n_prior_draws=60_000, seed=0)
    assert exact.probability.sum() == pytest.approx(1)
    found = PartialOrderModel(n_iter=60_000, beta=beta, eps=0.05, seed=1).fit(traces, actions=range(n))
    p, size = exact.edge_probability, found.diagnostics().effective_size.to_numpy()
    error = np.sqrt(p * (1 - p) * (1 / np.minimum(size, 4_000) + 1 / 60_000))
    assert (np.abs(found.edge_probability.to_numpy() - p) <= 4 * error + 0.002).all()


def test_enumeration_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match="1 to 5 actions, got 6"):
        exact_posterior([], range(6))
    with pytest.raises(ValueError, match="'z'"):
        exact_posterior([["z"]], ["a"])


def test_a_known_order_is_recovered():
    layer = np.array([0, 0, 1, 1, 1, 2, 2, 9])
    order = (layer[:, None] < layer) & (layer < 9)  # three layers, and one action that is free
    posterior = PartialOrderModel(n_iter=20_000, seed=0).fit(traces_of(order, 60, seed=1), actions=range(8))
    np.testing.assert_array_equal(posterior.relation(), order)
    assert posterior.diagnostics().converged


def test_noise_is_found_where_it_is_inferred():
    order = np.triu(np.ones((5, 5), dtype=bool), k=1)
    noisy = traces_of(order, 60, seed=0, eps=0.3)
    eps = PartialOrderModel(n_iter=20_000, eps=(1.0, 9.0), seed=0).fit(noisy).parameters["eps"]
    assert eps.mean() == pytest.approx(0.3, abs=0.1)


@pytest.mark.filterwarnings("ignore:chains disagree")
def test_runs_are_repeated_by_seed_whatever_the_threads_and_extended_as_if_never_stopped():
    traces = [["a", "b", "c"], ["b", "a", "c"]]

    def draws(**options):
        return PartialOrderModel(n_iter=2_000, chains=2, thin=1, **options).fit(traces)

    one = draws(seed=5)
    np.testing.assert_array_equal(one.orders, draws(seed=5, n_jobs=2).orders)
    assert (one.orders != draws(seed=6).orders).any()
    at_once, in_parts = draws(seed=5).extend(4_000), draws(seed=5).extend(2_000).extend(2_000)
    np.testing.assert_array_equal(at_once.orders, in_parts.orders)
    assert at_once.n_iter == 6_000
    assert at_once.orders.shape[1] == 3_000
