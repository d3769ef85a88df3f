"""Pair labels and the objectives built on them: identities, limits, orthogonality, slopes, minimisers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit
from scipy.stats import norm

from cameraready.causal.rank_learner.network import Network, NetworkClassifier, NetworkRegressor, Training
from cameraready.causal.rank_learner.objective import (
    LABELS,
    PairLabels,
    PairsOfBatch,
    RowTargets,
    UniformPairs,
    WatchedPairs,
    automatic_kappa,
    pair_loss,
    win_chances,
)
from cameraready.causal.rank_learner.scorers import fit_line, fit_networks, fit_scorer, partners
from cameraready.causal.rank_learner.workloads import label_biases

number = st.floats(-50, 50)


def labels(n=30, kind="orthogonal", seed=0, noise=1.0):
    generator = np.random.default_rng(seed)
    return PairLabels(generator.normal(size=n), noise * generator.normal(size=n), 0.7, kind)


@given(st.lists(st.tuples(number, number), min_size=2, max_size=2), st.floats(0.05, 20), st.sampled_from(LABELS))
@settings(max_examples=100, deadline=None)
def test_exchanging_a_pair_exchanges_its_label(rows, kappa, kind):
    effects, corrections = np.array(rows).T
    both = PairLabels(effects, corrections, kappa, kind).of(np.array([0, 1]), np.array([1, 0]))
    assert both.sum() == pytest.approx(1, abs=1e-9 * (1 + np.abs(both).max()))


def test_a_narrow_comparison_is_the_hard_one_and_a_wide_one_the_difference_of_scores():
    found = labels(noise=0.3)
    first, second = np.triu_indices(30, 1)
    narrow = PairLabels(found.effects, 0 * found.corrections, 1e-6, "orthogonal").of(first, second)
    np.testing.assert_allclose(narrow, found.effects[first] > found.effects[second], atol=1e-6)
    kappa = 1e5
    wide = PairLabels(found.effects, found.corrections, kappa, "orthogonal").of(first, second)
    scores = found.effects + found.corrections
    np.testing.assert_allclose(4 * kappa * (wide - 0.5), scores[first] - scores[second], atol=1e-4)


def test_noise_in_the_scores_leaves_the_mean_label_unless_it_is_clipped():
    """With t = 0.769 and w = 0.237 by quadrature; clipping at a noise of 2 a row pulls 0.769 to 0.642, at 5 to 0.563."""
    kappa, gap = 0.75, 0.75 * np.log(0.769 / 0.231)
    nodes = norm.ppf((np.arange(20_000) + 0.5) / 20_000)
    for noise, clipped in ((2.0, 0.642), (5.0, 0.563)):
        difference = np.concatenate([[0.0], np.sqrt(2) * noise * nodes])
        effects = np.concatenate([[gap], np.zeros(20_000)])
        pairs = np.zeros(20_000, dtype=int), np.arange(1, 20_001)
        assert PairLabels(effects, -difference, kappa).of(*pairs).mean() == pytest.approx(0.769, abs=2e-4)
        assert PairLabels(effects, -difference, kappa, "clipped").of(*pairs).mean() == pytest.approx(clipped, abs=2e-3)


def test_the_labels_bias_is_of_second_order_in_the_nuisances_error():
    """Exact expectations; with kind 'plug-in' the same test finds first order."""
    sizes = np.array([0.1, 0.05, 0.025, 0.0125])
    found = [label_biases(np.random.default_rng(4), size) for size in sizes]
    for kind, order in (("plug-in", 1.0), ("orthogonal", 2.0)):
        slope = np.polyfit(np.log(sizes), np.log([bias[kind] for bias in found]), 1)[0]
        assert slope == pytest.approx(order, abs=0.15), kind
    assert label_biases(np.random.default_rng(4), 0.0)["orthogonal"] < 1e-12


@pytest.mark.parametrize("objective", [PairsOfBatch, UniformPairs])
@pytest.mark.parametrize("kind", LABELS)
def test_slopes_are_the_derivatives_of_the_pairs_loss(objective, kind):
    found = labels(n=12, kind=kind)
    made = objective(found, batch=6)
    rows = made.batches(np.random.default_rng(0))[0]
    scores = np.random.default_rng(1).normal(size=len(rows))

    def loss(scores):
        if objective is PairsOfBatch:
            a, b = np.triu_indices(len(rows), 1)
        else:
            a, b = np.arange(6), np.arange(6, 12)
        gap = scores[a] - scores[b]
        return np.mean(np.logaddexp(0, gap) - found.of(rows[a], rows[b]) * gap)

    np.testing.assert_allclose(made.slope(rows, scores), numerical(loss, scores), atol=1e-7)


def numerical(loss, at, h=1e-6):
    steps = h * np.eye(len(at))
    return np.array([(loss(at + step) - loss(at - step)) / (2 * h) for step in steps])


def test_the_networks_slopes_are_its_derivatives():
    generator = np.random.default_rng(0)
    network, X = Network(4, 5, generator), generator.normal(size=(7, 4))
    objective = RowTargets(generator.normal(size=7))
    found = network.slopes(X, lambda scores: objective.slope(np.arange(7), scores))
    start = network.weights.copy()

    def loss(weights):
        network.weights = weights
        return 0.5 * np.mean((network(X) - objective.targets) ** 2)

    np.testing.assert_allclose(found, numerical(loss, start), atol=1e-6)


def test_the_pair_loss_is_the_mean_over_all_ordered_pairs():
    found = labels(n=25)
    scores = np.random.default_rng(2).normal(size=25)
    a, b = np.nonzero(~np.eye(25, dtype=bool))
    gap = scores[a] - scores[b]
    by_hand = np.mean(-found.of(a, b) * np.log(expit(gap)) - (1 - found.of(a, b)) * np.log(expit(-gap)))
    assert pair_loss(scores, found, chunk=7) == pytest.approx(by_hand, rel=1e-10)
    assert WatchedPairs(found, (a, b))(scores) == pytest.approx(by_hand, rel=1e-10)
    watched = WatchedPairs(found, (a, b))
    value, slope = watched.with_slope(scores)
    assert value == pytest.approx(by_hand, rel=1e-10)
    np.testing.assert_allclose(slope, numerical(watched, scores), atol=1e-8)
    halves = partners(25, np.random.default_rng(0))
    assert WatchedPairs(found, halves)(scores) == pytest.approx(by_hand, rel=1e-10)


@pytest.mark.parametrize("kind", LABELS)
def test_totals_of_labels_are_their_sums(kind):
    found = labels(n=20, kind=kind)
    rows = np.array([3, 7, 1, 19, 4])
    np.testing.assert_allclose(found.totals(rows), found.of(rows[:, None], rows[None, :]).sum(axis=1), rtol=1e-12)


def test_chances_of_scores_far_apart_are_finite():
    scores = np.array([-1e6, -3.0, 0.0, 2.0, 1e6])
    chances = win_chances(scores)
    np.testing.assert_allclose(chances + chances.T, 1.0)
    near = win_chances(scores[1:4])
    np.testing.assert_allclose(near, expit(scores[1:4, None] - scores[None, 1:4]), rtol=1e-12)
    assert chances[0, 4] < 1e-200


def test_a_row_is_never_paired_with_itself_and_all_pairs_are_drawn():
    batches = UniformPairs(labels(n=5), batch=50, share=20.0).batches(np.random.default_rng(0))
    pairs = np.concatenate([np.stack(np.split(rows, 2), axis=1) for rows in batches])
    assert len({tuple(pair) for pair in pairs.tolist()}) == 20
    assert (pairs[:, 0] != pairs[:, 1]).all()


@pytest.mark.parametrize("n", [2, 3, 8, 9, 64, 65, 200])
def test_partners_are_distinct_pairs_in_which_all_rows_occur_equally_often(n):
    first, second = partners(n, np.random.default_rng(0))
    assert len({frozenset(pair) for pair in zip(first.tolist(), second.tolist(), strict=True)}) == len(first)
    assert (first != second).all()
    assert len(np.unique(np.bincount(np.concatenate([first, second]), minlength=n))) == 1
    if n <= 65:
        assert len(first) == n * (n - 1) // 2


def test_the_minimiser_is_the_effect_over_kappa():
    """Theorem 5.2 with true nuisances: an unpenalised line through noiseless labels is tau / kappa."""
    generator = np.random.default_rng(0)
    X = generator.normal(size=(400, 3))
    coefficients = np.array([1.0, -0.5, 0.25])
    line = fit_line(X, PairLabels(X @ coefficients, np.zeros(400), 0.8), seed=0)
    assert line.penalty == 1e-3
    direction = line.coefficients / line.coefficients[0]
    np.testing.assert_allclose(direction, coefficients, atol=0.02)
    np.testing.assert_allclose(line.coefficients, coefficients / 0.8, rtol=0.05)


@pytest.mark.parametrize("scorer", ["mlp", "linear", "trees"])
def test_every_scorer_finds_the_order_through_noise(scorer):
    generator = np.random.default_rng(1)
    X = generator.normal(size=(600, 4))
    effects = X[:, 0] + 0.5 * X[:, 1]
    found = PairLabels(np.zeros(600), effects + 0.5 * generator.normal(size=600), 1.0)
    fitted = fit_scorer(scorer, X, found, seed=0)
    test = generator.normal(size=(1000, 4))
    assert np.corrcoef(fitted.predict(test), test[:, 0] + 0.5 * test[:, 1])[0, 1] > 0.9


def test_pure_noise_does_not_carry_the_scores_away():
    """Labels far outside [0, 1] make the empirical loss unbounded below; stopping on held-out pairs holds."""
    generator = np.random.default_rng(0)
    X = generator.normal(size=(120, 6))
    noise = 50 * generator.standard_cauchy(120)
    wild = PairLabels(np.zeros(120), noise, automatic_kappa(np.zeros(120), noise))
    scores = fit_networks(X, wild, Training(), seed=0).predict(X)
    assert np.isfinite(scores).all()
    assert np.abs(scores).max() < 50


def test_kappa_moves_with_the_unit_and_is_positive():
    found = labels(n=200)
    one = automatic_kappa(found.effects, found.corrections)
    assert automatic_kappa(1e6 * found.effects, 1e6 * found.corrections) == pytest.approx(1e6 * one)
    assert automatic_kappa(np.full(5, 3.0), np.zeros(5)) == 1.0
    noise = np.std(found.corrections)
    assert np.sqrt(2) / 4 * noise / one <= 1 + 1e-12


def test_the_network_learns_what_a_line_cannot():
    generator = np.random.default_rng(0)
    X = generator.normal(size=(800, 3))
    y = X[:, 0] * X[:, 1] * 100 + 7
    test = generator.normal(size=(500, 3))
    predicted = NetworkRegressor(random_state=0).fit(X, y).predict(test)
    assert np.corrcoef(predicted, test[:, 0] * test[:, 1])[0, 1] > 0.9
    assert abs(predicted.mean() - 7) < 20
    label = (generator.random(800) < expit(2 * X[:, 0])).astype(float)
    p = NetworkClassifier(random_state=0).fit(X, label).predict_proba(test)
    np.testing.assert_allclose(p.sum(axis=1), 1)
    assert np.abs(p[:, 1] - expit(2 * test[:, 0])).mean() < 0.08


@pytest.mark.parametrize(("scorer", "error"), [("forest", ValueError), (object(), TypeError)])
def test_an_unknown_scorer_is_told(scorer, error):
    with pytest.raises(error, match="scorer must be"):
        fit_scorer(scorer, np.zeros((5, 1)), labels(n=5), 0)
