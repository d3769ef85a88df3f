"""RankLearner: recovers known orders, keeps its invariances, takes raw tables, and tells what is wrong."""

import warnings

import numpy as np
import pytest
from scipy.special import expit
from scipy.stats import spearmanr
from sklearn.base import clone
from sklearn.dummy import DummyRegressor
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.linear_model import LinearRegression, LogisticRegression, Ridge
from sklearn.model_selection import KFold
from sklearn.tree import DecisionTreeRegressor

from cameraready.causal.rank_learner import RankLearner, assess, autoc
from cameraready.causal.rank_learner.nuisances import OverlapWarning, Predictions, SingleOutcomeWarning
from cameraready.causal.rank_learner.tables import TableEncoder


def data(n=600, seed=0, p=5):
    """Confounded: X[:, 0] drives treatment, outcome and effect."""
    generator = np.random.default_rng(seed)
    X = generator.normal(size=(n, p))
    e = expit(0.7 * X[:, 0])
    T = (generator.random(n) < e).astype(int)
    tau = X[:, 0] - 0.5 * X[:, 1]
    Y = 2 * X[:, 0] + X[:, 2] + T * tau + 0.7 * generator.normal(size=n)
    return Y, T, X, tau


def quick(**options):
    return RankLearner(
        **{"model_y": Ridge(), "model_t": LogisticRegression(), "scorer": "linear", "random_state": 0, **options}
    )


@pytest.mark.parametrize("scorer", ["linear", "mlp", "trees", DecisionTreeRegressor(max_depth=2)])
def test_the_order_is_found(scorer):
    Y, T, X, _ = data()
    _, _, test, tau = data(seed=9)
    learner = quick(scorer=scorer).fit(Y, T, X=X)
    assert spearmanr(learner.predict(test), tau).statistic > 0.8
    assert autoc(tau, learner.predict(test)).value > 0.75 * autoc(tau, tau).value


def test_defaults_find_the_order():
    Y, T, X, _ = data(n=800)
    _, _, test, tau = data(seed=9)
    assert spearmanr(RankLearner(random_state=0).fit(Y, T, X=X).predict(test), tau).statistic > 0.9


def test_ranks_are_places_and_follow_the_scores():
    Y, T, X, _ = data()
    learner = quick().fit(Y, T, X=X)
    places, scores = learner.rank(X), learner.predict(X)
    assert sorted(places) == list(range(1, len(X) + 1))
    assert (np.diff(scores[np.argsort(places)]) <= 0).all()


def test_it_is_clonable_and_deterministic():
    Y, T, X, _ = data(n=200)
    learner = quick(scorer="mlp")
    again = clone(learner)
    assert again.get_params()["scorer"] == "mlp"
    assert again.get_params(deep=True)["model_y__alpha"] == 1.0
    np.testing.assert_array_equal(learner.fit(Y, T, X=X).predict(X), again.fit(Y, T, X=X).predict(X))
    state = np.random.get_state()[1].copy()  # noqa: NPY002
    learner.fit(Y, T, X=X)
    np.testing.assert_array_equal(np.random.get_state()[1], state)  # noqa: NPY002


def test_the_outcomes_unit_does_not_matter():
    Y, T, X, _ = data(n=300)
    learner = quick(model_y=LinearRegression())
    one, other = clone(learner).fit(Y, T, X=X), clone(learner).fit(1e5 * Y + 3e5, T, X=X)
    np.testing.assert_allclose(other.kappa_, 1e5 * one.kappa_, rtol=1e-6)
    assert spearmanr(one.predict(X), other.predict(X)).statistic > 1 - 1e-6


def test_the_sign_of_the_outcome_turns_the_order():
    Y, T, X, _ = data(n=300)
    learner = quick(model_y=LinearRegression())
    assert (
        spearmanr(clone(learner).fit(Y, T, X=X).predict(X), clone(learner).fit(-Y, T, X=X).predict(X)).statistic
        < -0.999
    )


def test_a_known_propensity_repairs_a_useless_outcome_model():
    """Double robustness: with a constant outcome model the plug-in ranker knows nothing, the orthogonal one ranks."""
    generator = np.random.default_rng(0)
    X = generator.normal(size=(1500, 3))
    T = generator.integers(0, 2, 1500)
    Y = T * X[:, 0] + 0.5 * generator.normal(size=1500)
    options = {"model_y": DummyRegressor(), "model_t": 0.5}
    test = generator.normal(size=(500, 3))
    assert spearmanr(quick(**options).fit(Y, T, X=X).predict(test), test[:, 0]).statistic > 0.9
    plug_in = quick(**options, labels="plug-in").fit(Y, T, X=X).predict(test)
    assert np.ptp(plug_in) < 0.1 * np.ptp(quick(**options).fit(Y, T, X=X).predict(test))


def test_doubly_robust_scores_are_right_on_average_if_either_model_is():
    generator = np.random.default_rng(0)
    n = 200_000
    x = generator.normal(size=n)
    e = expit(x)
    T = (generator.random(n) < e).astype(float)
    Y = x + T * (1 + x) + generator.normal(size=n)
    truth = (1 + x).mean()
    right = Predictions(x, 1 + 2 * x, e)
    for wrong in (Predictions(0 * x, 0 * x, e), Predictions(x, 1 + 2 * x, 0.3 + 0 * x), right):
        scores = wrong.doubly_robust(Y, T)[0]
        assert scores.mean() == pytest.approx(truth, abs=5 * scores.std() / np.sqrt(n))


def test_controls_take_away_confounding_and_do_not_decide():
    generator = np.random.default_rng(0)
    n = 1500
    X, W = generator.normal(size=(n, 2)), generator.normal(size=(n, 1))
    T = (generator.random(n) < expit(2 * W[:, 0])).astype(int)
    Y = 5 * W[:, 0] * (1 + 0.0 * X[:, 0]) + T * (X[:, 0] + 2 * W[:, 0]) + 0.5 * generator.normal(size=n)
    learner = quick(model_y=LinearRegression()).fit(Y, T, X=X, W=W)
    assert learner.predict(X).shape == (n,)
    assert spearmanr(learner.predict(X), X[:, 0]).statistic > 0.9
    with pytest.raises(ValueError, match="give W"):
        learner.doubly_robust_scores(Y, T, X=X)
    assert np.isfinite(learner.doubly_robust_scores(Y, T, X=X, W=W)).all()


# --- outcomes, treatments, models -----------------------------------------------------------------------------------


def test_binary_outcomes_take_classifiers():
    generator = np.random.default_rng(0)
    X = generator.normal(size=(900, 3))
    T = np.where(generator.random(900) < 0.5, "mail", "no mail")
    bought = generator.random(900) < expit(-0.5 + 2.0 * X[:, 0] * (T == "no mail"))
    models = {"model_y": LogisticRegression(), "model_t": LogisticRegression()}
    learner = quick(**models).fit(bought, T, X=X)
    assert learner.treatment_levels_ == ("mail", "no mail")
    found = learner.nuisances_.predictions
    assert ((found.treated >= 0) & (found.treated <= 1)).all()
    assert spearmanr(learner.predict(X), X[:, 0]).statistic > 0.8
    words = quick(**models).fit(np.where(bought, "yes", "no"), T, X=X)
    np.testing.assert_array_equal(words.predict(X), learner.predict(X))
    with pytest.raises(ValueError, match="classifier, but the outcome is not binary"):
        quick(**models).fit(X[:, 0], T, X=X)


def test_any_scikit_learn_model_serves():
    Y, T, X, tau = data(n=400)
    forests = {
        "model_y": RandomForestRegressor(20, random_state=0),
        "model_t": RandomForestClassifier(20, min_samples_leaf=10, random_state=0),
    }
    assert spearmanr(quick(**forests).fit(Y, T, X=X).predict(X), tau).statistic > 0.7
    regression = quick(model_t=Ridge()).fit(Y, T, X=X)
    assert (
        (regression.nuisances_.predictions.propensity >= 0) & (regression.nuisances_.predictions.propensity <= 1)
    ).all()


def test_one_outcome_model_of_both_arms_serves_too():
    Y, T, X, _ = data(n=800)
    _, _, test, tau = data(seed=9)
    forest = RandomForestRegressor(50, min_samples_leaf=5, random_state=0)
    learner = quick(model_y=forest, arms="joint").fit(Y, T, X=X)
    assert spearmanr(learner.predict(test), tau).statistic > 0.8
    seen = learner.nuisances_.models[0].outcomes
    V = learner.encoder_.transform(X)
    for arm, found in enumerate(seen.predict(V)):
        np.testing.assert_allclose(found, seen.model.predict(np.column_stack([V, np.full(800, arm)])))


@pytest.mark.torch
def test_torch_modules_serve_as_nuisances():
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    Y, T, X, _ = data(n=300)
    _, _, test, tau = data(seed=9)
    layers = lambda: torch.nn.Sequential(torch.nn.Linear(5, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))  # noqa: E731
    learner = quick(model_y=layers(), model_t=layers(), cv=2)
    before = [p.clone() for p in learner.model_y.parameters()]
    assert spearmanr(learner.fit(Y, T, X=X).predict(test), tau).statistic > 0.8
    assert all(torch.equal(a, b) for a, b in zip(before, learner.model_y.parameters(), strict=True))
    e = learner.nuisances_.predictions.propensity
    assert np.corrcoef(e, expit(0.7 * X[:, 0]))[0, 1] > 0.7


def test_trimming_is_reported_and_trimmed_rows_are_scored():
    generator = np.random.default_rng(0)
    Y, T, X, _ = data(n=500)
    e = np.where(X[:, 0] > 1.5, 0.999, 0.5)
    T = (generator.random(500) < e).astype(int)
    learner = quick(model_t=DecisionTreeRegressor(max_depth=1, random_state=0), trim=0.05)
    with pytest.warns(OverlapWarning, match=r"of 500 rows left out: propensity outside \[0.05, 0.95\]"):
        learner.fit(Y, T, X=X)
    assert learner.overlap_.trimmed == pytest.approx((X[:, 0] > 1.5).sum(), abs=15)
    assert learner.predict(X).shape == (500,)
    with warnings.catch_warnings():
        warnings.simplefilter("error", OverlapWarning)
        quick(model_t=0.5).fit(Y, T, X=X)


def test_labels_outside_are_counted():
    Y, T, X, _ = data(n=300)
    free = quick(kappa=0.2).fit(Y, T, X=X)
    assert free.label_stats_.outside > 0.1
    assert free.label_stats_.lowest < 0 < 1 < free.label_stats_.highest
    assert quick(kappa=0.2, labels="clipped").fit(Y, T, X=X).label_stats_.outside == 0


# --- edges ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_huge_and_tiny_numbers_are_standardised(scale):
    Y, T, X, _ = data(n=200)
    np.testing.assert_allclose(TableEncoder().fit_transform(scale * X), TableEncoder().fit_transform(X), atol=1e-9)
    assert np.isfinite(quick().fit(Y, T, X=scale * X).predict(scale * X)).all()


def test_more_columns_than_rows():
    generator = np.random.default_rng(0)
    X = generator.normal(size=(80, 200))
    T = generator.integers(0, 2, 80)
    Y = 3 * T * X[:, 0] + 0.3 * generator.normal(size=80)
    for scorer in ("linear", "mlp"):
        learner = quick(scorer=scorer, model_y=Ridge(50.0), model_t=0.5).fit(Y, T, X=X)
        assert spearmanr(learner.predict(X), X[:, 0]).statistic > 0.25


def test_collinear_and_constant_columns_change_little():
    Y, T, X, tau = data(n=400)
    wide = np.column_stack([X, X[:, 0], -2 * X[:, 1], np.full(400, 7.0)])
    assert spearmanr(quick().fit(Y, T, X=wide).predict(wide), tau).statistic > 0.9
    flat = quick().fit(Y, T, X=np.ones((400, 2)))
    assert np.ptp(flat.predict(np.ones((3, 2)))) == 0
    assert np.ptp(flat.rank(np.ones((3, 2)))) == 2


def test_one_outcome_in_an_arm_is_a_constant_with_a_warning():
    Y, T, X, _ = data(n=200)
    rare = ((np.quantile(Y, 0.9) < Y) & (T == 1)).astype(int)
    with pytest.warns(SingleOutcomeWarning, match="all .* rows of an arm have the outcome 0"):
        learner = quick(model_y=LogisticRegression()).fit(rare, T, X=X)
    assert (learner.nuisances_.predictions.control == 0).all()
    with pytest.warns(SingleOutcomeWarning):
        RankLearner(scorer="linear", random_state=0).fit(rare, T, X=X)


@pytest.mark.parametrize("value", [0, 1])
def test_a_constant_treatment_is_told(value):
    Y, _, X, _ = data(n=50)
    with pytest.raises(ValueError, match="T must have two values, untreated and treated; it has 1"):
        quick().fit(Y, np.full(50, value), X=X)


def test_a_fold_without_an_arm_is_told():
    Y, T, X, _ = data(n=60)
    order = np.argsort(T)
    with pytest.raises(ValueError, match="fold 1 of cv leaves fewer than two untreated rows"):
        quick(cv=KFold(2)).fit(Y[order], np.sort(T) * 0 + (np.arange(60) >= 30), X=X[order])
    with pytest.raises(ValueError, match="leaves 30 of 60 rows in no test fold"):
        quick(cv=[(np.arange(30, 60), np.arange(30))]).fit(Y, T, X=X)


def test_too_few_rows_of_an_arm_are_told():
    Y, _, X, _ = data(n=40)
    T = np.zeros(40, dtype=int)
    T[:3] = 1
    with pytest.raises(ValueError, match="3 rows are the fewer of treated and untreated, too few for 5 folds"):
        quick().fit(Y, T, X=X)
    assert quick(cv=3).fit(Y, T, X=X).predict(X).shape == (40,)
    with pytest.raises(ValueError, match="two values"):
        quick().fit(Y[:1], T[:1], X=X[:1])


def test_without_overlap_there_is_nothing_to_learn():
    Y, _, X, _ = data(n=100)
    with pytest.raises(ValueError, match="no ranking can be learnt: 100 of 100 rows left out"):
        quick(model_t=DecisionTreeRegressor()).fit(Y, (X[:, 0] > 0).astype(int), X=X)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda Y, T, X: (np.where(np.arange(50) == 3, np.nan, Y), T, X), "Y is missing or not finite in 1 of 50 rows"),
        (lambda Y, T, X: (np.where(np.arange(50) == 3, np.inf, Y), T, X), "Y is missing or not finite"),
        (lambda Y, T, X: (Y, np.where(np.arange(50) == 3, np.nan, T), X), "T is missing or not finite in 1 of 50"),
        (lambda Y, T, X: (Y, T + (np.arange(50) == 3) * 2 * (1 - T), X), "T must have two values"),
        (lambda Y, T, X: (Y[:-1], T, X), "Y has 49 rows, X has 50"),
        (lambda Y, T, X: (Y, T[:-1], X), "T has 49 rows, X has 50"),
        (lambda Y, T, X: (np.column_stack([Y, Y]), T, X), r"Y must have shape \(n,\)"),
        (lambda Y, T, X: (Y, T, X[:, 0]), r"shape \(n, n_features\)"),
        (lambda Y, T, X: (Y, T, np.where(X > 2, np.inf, X)), "infinite values"),
        (lambda Y, T, X: (np.where(Y > 0, "a", np.where(Y > -1, "b", "c")), T, X), "text with 3 values"),
    ],
)
def test_bad_tables_are_told(change, message):
    Y, T, X = change(*data(n=50)[:3])
    with pytest.raises(ValueError, match=message):
        quick().fit(Y, T, X=X)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labels": "soft"}, "labels must be"),
        ({"arms": "both"}, "arms must be"),
        ({"kappa": 0.0}, "kappa must be"),
        ({"kappa": np.nan}, "kappa must be"),
        ({"trim": 0.5}, "trim must be"),
        ({"cv": 1}, "at least 2 folds"),
        ({"cv": "five"}, "cv must be"),
        ({"model_y": "best"}, "model_y must be 'auto'"),
        ({"model_t": 1.0}, "known propensity"),
        ({"random_state": -1}, "random_state"),
        ({"scorer": "forest"}, "scorer must be"),
    ],
)
def test_bad_parameters_are_told(options, message):
    Y, T, X, _ = data(n=60)
    with pytest.raises(ValueError, match=message):
        quick(**options).fit(Y, T, X=X)


def test_missing_values_need_the_encoder():
    Y, T, X, _ = data(n=60)
    X[3, 1] = np.nan
    assert np.isfinite(quick().fit(Y, T, X=X).predict(X)).all()
    with pytest.raises(ValueError, match="the encoder 'auto' takes care"):
        quick(encoder=None).fit(Y, T, X=X)


# --- is there a ranking? --------------------------------------------------------------------------------------------


def test_a_ranking_is_detected_and_its_interval_holds_the_truth():
    Y, T, X, _ = data(n=600)
    found = assess(quick(), Y, T, X=X)
    assert found.detectable
    assert str(found).startswith("There is a ranking: AUTOC")
    _, _, _, tau = data(n=20_000, seed=5)
    best = autoc(tau, tau).value
    low, high = found.autoc.interval(0.999)
    assert low < best < high * 1.05
    assert found.curve.values[-1] == pytest.approx(0, abs=1e-12)


def test_no_ranking_is_an_answer():
    """Without heterogeneity, p-values are those of a valid test: of 16, five or more below 0.05 happen once in a thousand times."""
    few = 0
    for seed in range(16):
        generator = np.random.default_rng(seed)
        X, T = generator.normal(size=(150, 2)), generator.integers(0, 2, 150)
        Y = X[:, 0] + T + generator.normal(size=150)
        found = assess(quick(model_t=0.5, cv=2), Y, T, X=X)
        few += found.p_value < 0.05
        assert found.detectable == (found.p_value < 0.05)
        if not found.detectable:
            assert str(found).startswith("No detectable ranking: AUTOC")
    assert few < 5


def test_an_assessment_needs_rows_of_both_arms():
    Y, T, X, _ = data(n=59)
    with pytest.raises(ValueError, match="it takes 60"):
        assess(quick(), Y, T, X=X)
    Y, T, X, _ = data(n=100)
    with pytest.raises(ValueError, match="two arms of at least 18 rows each"):
        assess(quick(), Y, (np.arange(100) < 10).astype(int), X=X)


def test_held_out_scores_evaluate_the_ranking():
    Y, T, X, _ = data()
    Y2, T2, X2, tau = data(seed=5)
    learner = quick(model_y=LinearRegression()).fit(Y, T, X=X)
    found = learner.evaluate(Y2, T2, X=X2)
    truth = autoc(tau, learner.predict(X2)).value
    assert abs(found.value - truth) < 4 * found.standard_error
    assert learner.score(Y2, T2, X=X2) == found.value
    with pytest.raises(ValueError, match="as in fit"):
        learner.evaluate(Y2, T2 + 1, X=X2)
