"""TOC, AUTOC and policy value: against their formulas, EconML's, the jackknife, and the sampling distribution."""

import numpy as np
import pytest
from sklearn.linear_model import LinearRegression, LogisticRegression

from cameraready.causal.rank_learner import autoc, policy_value, toc_curve


def rows(n=300, seed=0, ties=False):
    generator = np.random.default_rng(seed)
    scores = generator.normal(size=n)
    effects = 0.8 * scores + generator.normal(size=n) * 1.5 + 0.3
    return effects, np.round(scores, 0) if ties else scores


def top_means(effects, scores):
    ranked = effects[np.argsort(-scores, kind="stable")]
    return np.cumsum(ranked) / np.arange(1, len(ranked) + 1)


def test_autoc_is_the_mean_gain_of_the_first_k_over_all_k():
    effects, scores = rows()
    assert autoc(effects, scores).value == pytest.approx(
        (top_means(effects, scores) - effects.mean()).mean(), rel=1e-12
    )


def test_autoc_is_the_area_under_the_curve_at_every_share():
    effects, scores = rows(n=80)
    curve = toc_curve(effects, scores, np.arange(1, 81) / 80)
    np.testing.assert_allclose(curve.values, top_means(effects, scores) - effects.mean(), atol=1e-12)
    assert autoc(effects, scores).value == pytest.approx(curve.values.mean(), rel=1e-10)


def test_only_the_order_counts():
    effects, scores = rows(n=100)
    one, other = autoc(effects, scores), autoc(effects, np.exp(3 * scores) + 7)
    assert (one.value, one.standard_error) == (other.value, other.standard_error)
    moved = autoc(5 * effects + 2, scores)
    assert moved.value == pytest.approx(5 * one.value)
    assert moved.standard_error == pytest.approx(5 * one.standard_error)


def test_tied_rows_share_their_places():
    """The value is the mean over all orders within groups of ties."""
    effects, scores = rows(n=60, ties=True)
    generator = np.random.default_rng(1)
    broken = [autoc(effects, scores + 1e-6 * generator.random(60)).value for _ in range(4000)]
    spread = np.std(broken) / np.sqrt(len(broken))
    assert autoc(effects, scores).value == pytest.approx(np.mean(broken), abs=4 * spread)
    again = generator.permutation(60)
    assert autoc(effects[again], scores[again]).value == pytest.approx(autoc(effects, scores).value, rel=1e-12)


def test_equal_scores_are_a_random_order():
    effects, _ = rows(n=50)
    flat = autoc(effects, np.zeros(50))
    assert flat.value == pytest.approx(0, abs=1e-12)
    assert flat.standard_error == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("statistic", [autoc, policy_value])
def test_standard_errors_equal_the_jackknifes(statistic, ties):
    """AUTOC's is the delete-one jackknife in closed form; the policy value's the infinitesimal one, equal to first order."""
    effects, scores = rows(n=400, ties=ties)
    keep = ~np.eye(400, dtype=bool)
    without = np.array([statistic(effects[k], scores[k]).value for k in keep])
    jackknife = np.sqrt(399 / 400 * ((without - without.mean()) ** 2).sum())
    assert statistic(effects, scores).standard_error == pytest.approx(
        jackknife, rel=1e-9 if statistic is autoc else 0.02
    )


def test_standard_errors_are_the_spread_over_samples():
    """400 samples of 300 rows: the spread is known to about 3.5 %."""
    statistics = {
        "autoc": lambda e, s: autoc(e, s),
        "average": lambda e, s: policy_value(e, s, outcomes=e - 1),
        "share": lambda e, s: policy_value(e, s, share=0.3),
        "toc": lambda e, s: Value(toc_curve(e, s, [0.3])),
        "first": lambda e, s: Value(toc_curve(e, s, [0.05])),
    }
    for name, statistic in statistics.items():
        found = [statistic(*rows(seed=seed)) for seed in range(400)]
        spread = np.std([f.value for f in found])
        assert np.mean([f.standard_error for f in found]) == pytest.approx(spread, rel=0.12), name


class Value:
    def __init__(self, curve):
        self.value, self.standard_error = curve.values[0], curve.standard_errors[0]


class AsEconML:
    """A ranking in the place of a CATE model, as EconML's tester asks one."""

    def __init__(self, score):
        self.score = score

    def effect(self, X, T0=0, T1=1):
        return self.score(X)


def test_values_equal_econmls():
    """At the shares that EconML's thresholds select, its tester's curve and ours are the same numbers."""
    validate = pytest.importorskip("econml.validate")
    generator = np.random.default_rng(0)
    X, T = generator.normal(size=(800, 2)), generator.integers(0, 2, 800)
    Y = X[:, 1] + T * X[:, 0] + generator.normal(size=800)
    train, test = slice(0, 300), slice(300, 800)
    tester = validate.DRTester(
        model_regression=LinearRegression(), model_propensity=LogisticRegression(), cate=AsEconML(lambda x: x[:, 0])
    )
    tester.fit_nuisance(X[test], T[test], Y[test], X[train], T[train], Y[train])
    percentiles = np.linspace(5, 95, 19)
    found = tester.evaluate_uplift(X[test], X[train], percentiles=percentiles, metric="toc", n_bootstrap=10)
    effects, scores = np.ravel(tester.dr_val_), X[test][:, 0]
    curve_data = found.curves[1]
    shares = [(scores >= threshold).mean() for threshold in np.percentile(X[train][:, 0], percentiles)]
    curve = toc_curve(effects, scores, shares)
    np.testing.assert_allclose(curve.values, curve_data["value"].to_numpy(), atol=1e-10)
    # Theirs is the sum over a grid without its ends, ours over all rows.
    assert found.params[0] == pytest.approx(float(np.sum(curve.values[:-1] * np.diff(percentiles) / 100)), rel=1e-9)
    # Their errors hold the thresholds fixed, and are too large in the tails; the test above shows what ours are.
    theirs = curve_data["err"].to_numpy()
    np.testing.assert_allclose(curve.standard_errors[4:15], theirs[4:15], rtol=0.15)
    assert (curve.standard_errors < 1.1 * theirs).all()
    assert 0.5 * found.errs[0] < autoc(effects, scores).standard_error < 1.5 * found.errs[0]


def test_policy_value_is_the_mean_outcome_of_who_is_treated():
    effects, scores = rows(n=40)
    untreated = np.random.default_rng(3).normal(size=40)
    order = np.argsort(-scores)
    by_hand = []
    for k in range(1, 41):
        outcome = untreated.copy()
        outcome[order[:k]] += effects[order[:k]]
        by_hand.append(outcome.mean())
        one = policy_value(effects, scores, share=k / 40, outcomes=untreated)
        assert one.value == pytest.approx(by_hand[-1], rel=1e-10)
    assert policy_value(effects, scores, outcomes=untreated).value == pytest.approx(np.mean(by_hand), rel=1e-10)
    assert policy_value(effects, scores, share=0.0, outcomes=untreated).value == pytest.approx(untreated.mean())
    assert policy_value(effects, scores, share=1.0, cost=0.5).value == pytest.approx(effects.mean() - 0.5)


def test_the_best_order_cannot_be_beaten():
    effects, scores = rows(n=200)
    best = toc_curve(effects, effects)
    assert (best.values >= toc_curve(effects, scores).values - 1e-12).all()
    assert best.values[-1] == pytest.approx(0, abs=1e-12)
    assert (np.diff(best.values) <= 1e-12).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.0, 2.0], [1.0]), "effects has 2 rows, scores has 1"),
        (([1.0], [1.0]), "at least two rows"),
        (([1.0, np.nan], [1.0, 2.0]), "missing or infinite"),
        (([1.0, 2.0], [np.inf, 2.0]), "missing or infinite"),
        ((np.ones((2, 2)), [1.0, 2.0]), "one number a row"),
    ],
)
def test_bad_input_is_told(arguments, message):
    for statistic in (autoc, toc_curve, policy_value):
        with pytest.raises(ValueError, match=message):
            statistic(*arguments)


def test_shares_and_levels_out_of_range_are_told():
    effects, scores = rows(n=10)
    for shares in ([0.0], [1.2], []):
        with pytest.raises(ValueError, match="shares"):
            toc_curve(effects, scores, shares)
    with pytest.raises(ValueError, match="share must lie"):
        policy_value(effects, scores, share=-0.1)
    with pytest.raises(ValueError, match="level"):
        autoc(effects, scores).interval(1.0)
