"""Structural models: closed forms of their covariances, what interventions and domains change, and what they leave."""

import networkx as nx
import numpy as np
import pytest

from cameraready.causal._scm import (
    LinearSCM,
    NonlinearSCM,
    domains_of,
    linear_scm,
    nonlinear_scm,
    sample_domains,
    standard_noise,
)


def two_step(b=2.0, c=-1.5):
    weights = np.zeros((3, 3))
    weights[0, 1], weights[1, 2] = b, c
    return LinearSCM(weights, np.array([1.0, 0.5, 0.25]), ("x", "m", "y"), frozenset({"m"}))


def test_the_covariance_of_a_chain_is_the_closed_form():
    b, c = 2.0, -1.5
    full = two_step(b, c).covariance(observed_only=False)
    middle = b * b + 0.5
    expected = [[1, b, b * c], [b, middle, c * middle], [b * c, c * middle, c * c * middle + 0.25]]
    np.testing.assert_allclose(full, expected, rtol=1e-12)
    np.testing.assert_allclose(two_step(b, c).covariance(), np.array(expected)[np.ix_([0, 2], [0, 2])], rtol=1e-12)


@pytest.mark.parametrize("law", ["gaussian", "uniform", "laplace", "student"])
def test_samples_have_the_models_covariance_whatever_the_noise(law):
    scm, n = two_step(), 200_000
    sample = scm.sample(n, np.random.default_rng(0), noise=law, observed_only=False)
    covariance = scm.covariance(observed_only=False)
    # The standard error of a variance is at most sqrt(kurtosis / n) of it; Student's with five degrees has kurtosis 9.
    scale = np.sqrt(np.outer(np.diag(covariance), np.diag(covariance)))
    assert np.abs((np.cov(sample.T) - covariance) / scale).max() < 5 * np.sqrt(9 / n)
    assert np.abs(sample.mean(axis=0) / np.sqrt(np.diag(covariance))).max() < 5 / np.sqrt(n)


def test_an_intervention_sets_the_variable_and_cuts_its_causes():
    done = two_step().do({"m": 3.0})
    sample = done.sample(20_000, np.random.default_rng(1), observed_only=False)
    assert np.ptp(sample[:, 1]) < 1e-9
    np.testing.assert_allclose(sample[:, 1], 3.0)
    assert abs(sample[:, 2].mean() - 3.0 * -1.5) < 5 * 0.5 / np.sqrt(20_000)
    assert set(done.graph.edges) == {("m", "y")}


def test_a_shift_changes_one_mechanism_only():
    scm = two_step()
    shifted = scm.shift("y", factor=2.0, noise_factor=4.0)
    np.testing.assert_allclose(shifted.weights[:, 2], 2 * scm.weights[:, 2])
    np.testing.assert_allclose(shifted.weights[:, :2], scm.weights[:, :2])
    np.testing.assert_allclose(shifted.noise_variances, [1.0, 0.5, 1.0])


@pytest.mark.parametrize(
    ("change", "weights_move", "noise_moves", "means_move"),
    [
        ("none", False, False, False),
        ("coefficients", True, False, False),
        ("noise", False, True, False),
        ("both", True, True, False),
        ("means", False, False, True),
    ],
)
def test_domains_share_the_graph_and_change_what_is_asked(change, weights_move, noise_moves, means_move):
    rng = np.random.default_rng(2)
    scm = linear_scm([("h", "a"), ("h", "b"), ("a", "c")], rng, latent=["h"])
    family = domains_of(scm, 3, change, rng, variables=["a", "b"])
    kept = [scm.names.index(name) for name in ("h", "c")]
    for member in family:
        assert set(member.graph.edges) == set(scm.graph.edges)
        np.testing.assert_array_equal(member.weights[:, kept], scm.weights[:, kept])
        np.testing.assert_array_equal(member.noise_variances[kept], scm.noise_variances[kept])
        assert (not np.array_equal(member.weights, scm.weights)) == weights_move
        assert (not np.array_equal(member.noise_variances, scm.noise_variances)) == noise_moves
        assert (member.means is not None and np.any(member.means != 0)) == means_move


def test_rows_of_domains_come_in_order_with_their_labels():
    scm = two_step()
    data, labels = sample_domains([scm, scm.do({"y": 7.0})], [3, 5], np.random.default_rng(0))
    assert data.shape == (8, 2)
    assert labels.tolist() == [0] * 3 + [1] * 5
    np.testing.assert_allclose(data[3:, 1], 7.0)


def test_a_nonlinear_model_obeys_its_mechanism_and_interventions():
    graph = nx.DiGraph([("a", "c"), ("b", "c")])
    graph.add_node("a", latent=True)
    model = NonlinearSCM(graph, {"c": lambda p: p[:, 0] * p[:, 1]}, {"c": 0.0})
    drawn = model.sample(50, np.random.default_rng(0), observed_only=False)
    np.testing.assert_allclose(drawn["c"], drawn["a"] * drawn["b"])
    assert list(model.sample(5, np.random.default_rng(0))) == ["c", "b"]
    np.testing.assert_allclose(model.sample(5, np.random.default_rng(0), do={"c": 2.0})["c"], 2.0)
    np.testing.assert_allclose(model.sample(5, np.random.default_rng(0), do={"a": 0.0})["c"], 0.0)


def test_random_nonlinear_mechanisms_are_reproducible_and_not_linear():
    graph = nx.DiGraph([("a", "b")])
    f, g = (nonlinear_scm(graph, np.random.default_rng(3)).mechanisms["b"] for _ in range(2))
    grid = np.linspace(-3, 3, 7)[:, None]
    np.testing.assert_array_equal(f(grid), g(grid))
    assert np.abs(np.diff(f(grid), 2)).max() > 1e-3


def test_impossible_models_are_refused():
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="cycle"):
        linear_scm([("a", "b"), ("b", "a")], rng)
    with pytest.raises(ValueError, match="cycle"):
        NonlinearSCM(nx.DiGraph([("a", "b"), ("b", "a")]), {}, {})
    with pytest.raises(ValueError, match="without a mechanism: b"):
        NonlinearSCM(nx.DiGraph([("a", "b")]), {}, {})
    with pytest.raises(ValueError, match="no variable 'z'"):
        two_step().do({"z": 1.0})
    with pytest.raises(ValueError, match="unknown variables"):
        NonlinearSCM(nx.DiGraph(), {}, {}).sample(3, rng, do={"z": 1.0})
    with pytest.raises(ValueError, match="same name"):
        LinearSCM(np.zeros((2, 2)), np.ones(2), ("a", "a"))
    with pytest.raises(ValueError, match="shape"):
        LinearSCM(np.zeros((2, 2)), np.ones(3), ("a", "b"))
    with pytest.raises(ValueError, match="negative"):
        LinearSCM(np.zeros((1, 1)), np.array([-1.0]), ("a",))
    with pytest.raises(ValueError, match="finite"):
        LinearSCM(np.array([[np.nan]]), np.ones(1), ("a",))
    with pytest.raises(ValueError, match="one of"):
        standard_noise("cauchy", (3,), rng)
    with pytest.raises(ValueError, match="as many numbers"):
        sample_domains([two_step()], [3, 4], rng)
