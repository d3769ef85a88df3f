"""Explaining models: whose values they are, what is accepted, what is said when something does not fit."""

from __future__ import annotations

import importlib
import warnings

import lightgbm
import numpy as np
import pandas as pd
import polars as pl
import pytest
import shap
from sklearn.compose import make_column_transformer
from sklearn.ensemble import (
    GradientBoostingClassifier,
    HistGradientBoostingRegressor,
    RandomForestClassifier,
    StackingRegressor,
)
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LinearRegression, LogisticRegression, Ridge
from sklearn.multioutput import MultiOutputClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from sklearn.svm import SVC, LinearSVC

from cameraready.attribution._game import MarginalGame, exact_shapley
from cameraready.attribution._prediction import is_tree_ensemble
from cameraready.attribution.oddshap import explain
from cameraready.attribution.oddshap.estimator import LowBudgetWarning
from cameraready.attribution.oddshap.explain import IncompleteExplanationWarning, TreeModelWarning

#: The function has the name of the module that it is defined in.
explain_module = importlib.import_module("cameraready.attribution.oddshap.explain")


def numbers(n_rows: int, n_features: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n_rows, n_features))


def mixed(n_rows: int, seed: int = 0) -> tuple[pd.DataFrame, pd.Series]:
    """Numbers with gaps, integers, text with gaps, a category and a flag, and a binary target with text labels."""
    generator = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "income": generator.normal(size=n_rows),
            "children": generator.integers(0, 5, n_rows),
            "city": generator.choice(["Oslo", "Lima", "Pune"], n_rows),
            "plan": pd.Categorical(generator.choice(["basic", "plus"], n_rows)),
            "member": generator.random(n_rows) < 0.5,
        }
    )
    frame.loc[::5, "income"] = np.nan
    frame.loc[2::7, "city"] = None
    score = frame["income"].fillna(0) + (frame["city"] == "Oslo") * 2 * (frame["plan"] == "plus") + frame["member"]
    return frame, pd.Series(np.where(score > 0.8, "yes", "no"))


def pipeline() -> LogisticRegression:
    return make_pipeline(
        make_column_transformer(
            (make_pipeline(SimpleImputer(), StandardScaler()), ["income", "children"]),
            (OneHotEncoder(handle_unknown="ignore"), ["city", "plan", "member"]),
        ),
        LogisticRegression(),
    )


# --- whose values ---------------------------------------------------------------------------------------------------


def test_a_linear_model_is_explained_by_its_weights() -> None:
    X = numbers(60, 8)
    model = LinearRegression().fit(X, X @ np.arange(8.0))
    explanation = explain(model, X[:5], background=X[5:])
    assert isinstance(explanation, shap.Explanation)
    assert explanation.values == pytest.approx(model.coef_ * (X[:5] - X[5:].mean(axis=0)), abs=1e-9)
    assert explanation.base_values == pytest.approx(np.full(5, model.predict(X[5:]).mean()), abs=1e-9)
    assert (explanation.error_std == 0).all()
    assert (explanation.data == X[:5]).all()
    assert explanation.feature_names == [f"Feature {j}" for j in range(8)]


def test_values_agree_with_interventional_treeshap_within_their_errors() -> None:
    X = numbers(400, 20)
    model = GradientBoostingClassifier(n_estimators=40, random_state=0).fit(X, X[:, 0] * X[:, 1] + X[:, 2] > 0)
    background = X[:30]
    explanation = explain(model.decision_function, X[100:103], background=background, budget=4000)
    truth = shap.TreeExplainer(model, background, feature_perturbation="interventional").shap_values(X[100:103])
    z = (explanation.values - truth) / explanation.error_std
    assert np.mean(np.abs(z) < 2) > 0.85
    assert np.abs(explanation.values - truth).max() < 0.02 * np.abs(truth).max()


def test_strings_categories_and_missing_values_go_through_a_pipeline() -> None:
    frame, target = mixed(200)
    model = pipeline().fit(frame, target)
    explanation = explain(model, frame[:4], background=frame[50:90])
    for i in range(4):
        game = MarginalGame(lambda t: model.predict_proba(t)[:, 1], frame[i : i + 1], frame[50:90])
        assert explanation.values[i] == pytest.approx(exact_shapley(game, 5), abs=1e-12)
    assert explanation.values.sum(axis=1) + explanation.base_values == pytest.approx(
        model.predict_proba(frame[:4])[:, 1]
    )
    assert explanation.feature_names == list(frame)
    assert explanation.data.dtype == float
    assert explanation.display_data[3, 2] == frame["city"][3]
    assert np.isnan(explanation.data[2, 2])  # a missing city


def test_polars_frames_reach_the_model_as_polars_frames() -> None:
    frame, _ = mixed(60)
    table = pl.from_pandas(frame).with_columns(pl.col("plan").cast(pl.Enum(["basic", "plus"])))

    def model(t: pl.DataFrame) -> np.ndarray:
        assert t.schema == table.schema
        member = pl.col("member") & (pl.col("city") == "Oslo").fill_null(False)
        return (
            t.select(pl.col("income").fill_null(0.0).fill_nan(0.0) + 2.0 * member.cast(pl.Float64))
            .to_series()
            .to_numpy()
        )

    def in_pandas(t: pd.DataFrame) -> np.ndarray:
        return (t["income"].fillna(0) + 2.0 * (t["member"] & (t["city"] == "Oslo"))).to_numpy(dtype=float)

    ours = explain(model, table[:3], background=table[20:])
    assert ours.values == pytest.approx(explain(in_pandas, frame[:3], background=frame[20:]).values, abs=1e-12)
    assert ours.display_data[0, 2] == frame["city"][0]


def test_lightgbm_and_xgboost_models_and_boosters() -> None:
    xgboost = pytest.importorskip("xgboost")
    frame, target = mixed(200)
    frame["city"] = frame["city"].astype("category")
    label = (target == "yes").astype(int)
    light = lightgbm.LGBMClassifier(n_estimators=10, verbose=-1, n_jobs=1).fit(frame, label)
    extreme = xgboost.XGBClassifier(n_estimators=10, enable_categorical=True, n_jobs=1).fit(frame, label)
    for model, booster in ((light, light.booster_), (extreme, extreme.get_booster())):
        with pytest.warns(TreeModelWarning, match="TreeExplainer.*exactly and cheaper"):
            wrapped = explain(model, frame[:2], background=frame[50:70])
        with pytest.warns(TreeModelWarning):
            bare = explain(booster, frame[:2], background=frame[50:70])
        assert wrapped.values == pytest.approx(bare.values, abs=1e-6)
        assert wrapped.values.sum(axis=1) + wrapped.base_values == pytest.approx(
            model.predict_proba(frame[:2])[:, 1], abs=1e-6
        )


def test_which_output_is_explained() -> None:
    X = numbers(200, 4)
    three = LogisticRegression().fit(X, np.array(["low", "mid", "high"])[np.digitize(X[:, 0], [-0.5, 0.5])])
    with pytest.raises(
        ValueError, match=r"3 classes; say which one to explain with output=, one of \['high', 'low', 'mid'\]"
    ):
        explain(three, X[:2], background=X)
    low = explain(three, X[:2], background=X, output="low", background_rows=None)
    assert low.base_values == pytest.approx(np.full(2, three.predict_proba(X)[:, 1].mean()))
    with pytest.raises(ValueError, match="output='none' is not one of the model's classes"):
        explain(three, X[:2], background=X, output="none")
    machine = LinearSVC().fit(X, X[:, 0] > 0)  # no probabilities: the decision function
    scores = explain(machine, X[:2], background=X)
    assert scores.values.sum(axis=1) + scores.base_values == pytest.approx(machine.decision_function(X[:2]))
    both = explain(lambda x: np.column_stack([x[:, 0], x[:, 1]]), X[:1], background=X, output=1)
    assert both.values[0, [0, 2, 3]] == pytest.approx(np.zeros(3), abs=1e-12)


def test_the_background_is_subsampled_reproducibly_or_kept() -> None:
    X, seen = numbers(300, 3), []

    def model(x: np.ndarray) -> np.ndarray:
        seen.append(len(x))
        return x.sum(axis=1)

    assert explain(model, X[:1], background=X, background_rows=None).base_values[0] == pytest.approx(
        X.sum(axis=1).mean()
    )
    a, b, c = (explain(model, X[:1], background=X, seed=seed).base_values[0] for seed in (0, 0, 1))
    assert a == b != c
    assert seen[-1] == 100 * 2**3


def test_seeds_repeat_and_rows_do_not_share_coalitions() -> None:
    X = numbers(40, 16)
    model = lambda x: np.sin(x).prod(axis=1) * 10 + x[:, 0] * x[:, 1]  # noqa: E731
    rows = np.concatenate([X[:1], X[:1]])
    a, b = (explain(model, rows, background=X, budget=500, seed=0) for _ in range(2))
    assert (a.values == b.values).all()
    assert (a.values[0] != a.values[1]).any()


# --- budgets, time, interruption ------------------------------------------------------------------------------------


def counting(function):
    calls = []

    def model(x: np.ndarray) -> np.ndarray:
        calls.append(len(x))
        return function(x)

    return model, calls


def test_the_automatic_budget_stops_when_errors_are_small_and_never_repeats_work() -> None:
    X = numbers(11, 30)
    easy, easy_calls = counting(lambda x: x @ np.arange(30.0))
    explanation = explain(easy, X[:1], background=X[1:])
    assert sum(easy_calls) - 1 == 600 * 10  # two terms' worth of evaluations per feature, times ten background rows
    hard, hard_calls = counting(
        lambda x: x @ np.arange(30.0) + 30 * np.sign(x[:, :3]).prod(axis=1) * x[:, 5:9].sum(axis=1)
    )
    explanation = explain(hard, X[:1], background=X[1:])
    spent = (sum(hard_calls) - 1) // 10
    assert spent in (1200, 2400, 4800, 9600, 19200, 20000)
    if spent < 20_000:
        assert explanation.error_std.max() <= 0.02 * np.abs(explanation.values).max()
    tight = explain(hard, X[:1], background=X[1:], tolerance=0.5)
    assert (tight.error_std > explanation.error_std).any()


def test_a_fixed_budget_is_kept_and_small_problems_are_exact() -> None:
    X = numbers(11, 20)
    model, calls = counting(lambda x: np.abs(x).prod(axis=1))
    explain(model, X[:2], background=X[1:], budget=321)
    assert sum(calls) - 1 == 2 * 321 * 10
    small = explain(lambda x: np.abs(x).prod(axis=1), X[:2, :6], background=X[1:, :6], budget=10_000)
    assert (small.error_std == 0).all()


def test_the_automatic_budget_enumerates_where_that_is_cheap() -> None:
    X = numbers(11, 8)
    model, calls = counting(lambda x: np.abs(x).prod(axis=1))
    assert (explain(model, X[:1], background=X[1:]).error_std == 0).all()
    assert sum(calls) - 1 == 2**8 * 10


def test_a_low_budget_is_announced_once() -> None:
    X = numbers(30, 20)
    with pytest.warns(LowBudgetWarning, match="3 of 3 rows had fewer than eta \\* n_features = 200") as caught:
        explanation = explain(lambda x: x.sum(axis=1), X[:3], background=X, budget=150)
    assert len(caught) == 1
    assert np.isnan(explanation.error_std).all()
    with pytest.raises(ValueError, match="below eta"):
        explain(lambda x: x.sum(axis=1), X[:3], background=X, budget=150, low_budget="raise")


def test_time_is_shared_and_rows_out_of_time_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that advances with the model's work: 1 ms a prediction."""
    X = numbers(12, 25)
    clock = [0.0]
    monkeypatch.setattr(explain_module.time, "monotonic", lambda: clock[0])

    def model(x: np.ndarray) -> np.ndarray:
        clock[0] += 1e-3 * len(x)
        return np.sign(x).prod(axis=1)

    explanation = explain(model, X[:4], background=X[:2], max_seconds=20.0, budget=10_000)
    assert explanation.shape == (4, 25)
    assert clock[0] < 21.0
    clock[0] = 0.0
    with pytest.warns(IncompleteExplanationWarning, match="max_seconds=1.5 ran out: 2 of 4 rows are explained"):
        explanation = explain(model, X[:4], background=X[:2], max_seconds=1.5)
    assert explanation.shape == (2, 25)
    assert (explanation.data == X[:2]).all()


def test_an_interruption_keeps_the_finished_rows() -> None:
    X = numbers(12, 6)

    def model(x: np.ndarray) -> np.ndarray:
        if (x[:, 0] == X[2, 0]).any():
            raise KeyboardInterrupt
        return x.sum(axis=1)

    with pytest.warns(IncompleteExplanationWarning, match="interrupted: 2 of 4 rows"):
        explanation = explain(model, X[:4], background=X[5:])
    assert explanation.values == pytest.approx(X[:2] - X[5:].mean(axis=0))
    with pytest.raises(KeyboardInterrupt):
        explain(model, X[2:4], background=X[5:])


def test_progress_is_quiet_off_a_terminal_and_shown_on_request(capfd: pytest.CaptureFixture) -> None:
    X = numbers(12, 4)
    explain(lambda x: x.sum(axis=1), X[:3], background=X)
    assert capfd.readouterr() == ("", "")
    explain(lambda x: x.sum(axis=1), X[:3], background=X, progress=True)
    assert "3/3" in capfd.readouterr().err


# --- trees, plots ---------------------------------------------------------------------------------------------------


def test_only_plain_tree_ensembles_get_the_hint() -> None:
    X = numbers(50, 4)
    forest = RandomForestClassifier(5, random_state=0).fit(X, X[:, 0] > 0)
    assert is_tree_ensemble(forest)
    assert is_tree_ensemble(HistGradientBoostingRegressor())
    assert not is_tree_ensemble(make_pipeline(StandardScaler(), RandomForestClassifier()))
    assert not is_tree_ensemble(StackingRegressor([("forest", forest)]))
    assert not is_tree_ensemble(Ridge())
    with pytest.warns(TreeModelWarning, match="RandomForestClassifier"):
        explain(forest, X[:1], background=X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        explain(forest.predict_proba, X[:1], background=X, output=1)


def test_the_explanation_can_be_sliced_and_plotted() -> None:
    frame, target = mixed(60)
    explanation = explain(pipeline().fit(frame, target), frame[:12], background=frame)
    one = explanation[0]
    assert one.values.shape == (5,)
    assert one.error_std.shape == (5,)
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("Agg")
    for draw in (
        lambda: shap.plots.bar(explanation, show=False),
        lambda: shap.plots.beeswarm(explanation, show=False),
        lambda: shap.plots.waterfall(one, show=False),
        lambda: shap.plots.heatmap(explanation, show=False),
    ):
        pyplot.figure()
        draw()
        labels = " ".join(text.get_text() for text in pyplot.gcf().findobj(pyplot.Text))
        assert "city" in labels
        pyplot.close("all")


# --- what does not fit ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"X": numbers(2, 4)}, ValueError, "have 4 features, the background has 6"),
        (
            {"X": numbers(2, 4), "background": numbers(9, 4)},
            ValueError,
            "the model expects 6 features, the table has 4",
        ),
        ({"background": numbers(0, 6)}, ValueError, "the background is empty"),
        ({"X": numbers(0, 6)}, ValueError, "no rows to explain"),
        ({"X": numbers(1, 6)[0]}, ValueError, r"a single row is X\[:1\]"),
        ({"background": None}, ValueError, "pass background="),
        ({"budget": 1}, ValueError, "budget must be 'auto' or"),
        ({"budget": "lots"}, ValueError, "budget must be 'auto' or"),
        ({"max_seconds": 0}, ValueError, "max_seconds must be positive"),
        ({"max_seconds": "1"}, ValueError, "max_seconds must be positive"),
        ({"tolerance": 0.0}, ValueError, "tolerance must be a positive finite number"),
        ({"tolerance": np.inf}, ValueError, "tolerance must be a positive finite number"),
        ({"tolerance": "low"}, ValueError, "tolerance must be a positive finite number"),
        ({"seed": -1}, ValueError, "seed must be None or a whole number"),
        ({"seed": 0.5}, ValueError, "seed must be None or a whole number"),
        ({"background_rows": 0}, ValueError, "background_rows must be None or a whole number"),
        ({"background_rows": True}, ValueError, "background_rows must be None or a whole number"),
        ({"background_rows": 2.0}, ValueError, "background_rows must be None or a whole number"),
        ({"output": True}, ValueError, "pass the number of its output column"),
        ({"output": "yes"}, ValueError, "pass the number of its output column"),
        ({"X": numbers(2, 0), "background": numbers(20, 0)}, ValueError, "must have at least one feature"),
        ({"X": np.ma.masked_less(numbers(2, 6), 9.0)}, TypeError, "masked array with masked entries"),
        ({"model": numbers(2, 6), "X": LinearRegression()}, TypeError, "ndarray is not; the model comes first"),
        ({"model": pd.DataFrame({"predict": [1.0]})}, TypeError, "DataFrame is not$"),
        ({"X": "good film", "background": ["bad film"]}, TypeError, "got text; for a text model"),
        ({"X": pd.DataFrame(numbers(2, 6))}, TypeError, "pass both in the form"),
        ({"model": 3.0}, TypeError, "must be callable or have predict"),
        ({"model": lambda x: np.full(len(x), np.nan)}, ValueError, "NaN or infinite"),
        ({"model": lambda x: ["spam"] * len(x)}, TypeError, "must return numbers, it returned .*spam"),
        ({"model": lambda x: x[:, :2]}, ValueError, "has 2 outputs; say which one"),
        ({"model": lambda x: 1.0}, ValueError, "one prediction per row"),
        ({"output": 3}, ValueError, "single output"),
        ({"low_budget": "guess"}, ValueError, "low_budget must be one of"),
    ],
)
def test_bad_input_is_refused_in_words(arguments: dict, error: type[Exception], words: str) -> None:
    X = numbers(20, 6)
    given = {"model": LinearRegression().fit(X, X[:, 0]), "X": X[:2], "background": X, **arguments}
    with pytest.raises(error, match=words):
        explain(given.pop("model"), given.pop("X"), **given)


def test_a_sparse_matrix_and_other_columns_are_refused_in_words() -> None:
    from scipy.sparse import csr_matrix

    X = numbers(20, 3)
    with pytest.raises(TypeError, match="sparse matrix; pass a dense array"):
        explain(lambda x: x.sum(axis=1), csr_matrix(X[:2]), background=X)
    frame = pd.DataFrame(X, columns=["a", "b", "c"])
    with pytest.raises(ValueError, match="different columns: missing \\['c'\\], unexpected \\['d'\\]"):
        explain(lambda t: t["a"], frame[:2].rename(columns={"c": "d"}), background=frame)


def test_lazy_and_sparse_tables_need_no_background_to_be_understood() -> None:
    from scipy.sparse import csr_matrix

    X = numbers(12, 3)
    with pytest.raises(TypeError, match="the rows to explain is a sparse matrix; pass a dense array"):
        explain(lambda x: x.sum(axis=1), csr_matrix(X))
    explanation = explain(lambda t: t.to_numpy().sum(axis=1), pl.DataFrame(X).lazy(), seed=None)
    assert explanation.values == pytest.approx(X - X.mean(axis=0))


def test_missing_text_and_dates_reach_the_plots_as_nan() -> None:
    days = pd.to_datetime(["1970-01-03 00:00", None, "1970-01-02 12:00"])
    X = pd.DataFrame(
        {
            "text": pd.array(["b", pd.NA, "a"], dtype="string"),
            "count": pd.array([7, pd.NA, 9], dtype="Int64"),
            "day": days,
            "zoned": days.tz_localize("UTC"),
            "x": [1.0, 2.0, 3.0],
        }
    )
    explanation = explain(lambda t: t["x"], X, background=X)
    assert explanation.data == pytest.approx(
        np.array([[1, 7, 2, 2, 1], [np.nan, np.nan, np.nan, np.nan, 2], [0, 9, 1.5, 1.5, 3]]), nan_ok=True
    )
    assert explanation.display_data[0, 2] == pd.Timestamp("1970-01-03")
    assert explanation.values[:, 4] == pytest.approx([-1.0, 0.0, 1.0])


def test_what_cannot_be_shown_fails_before_the_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fail(rows: object) -> None:
        raise RuntimeError("no plot")

    monkeypatch.setattr(explain_module, "_for_plots", fail)
    X = numbers(12, 3)
    with pytest.raises(RuntimeError, match="no plot"):
        explain(lambda x: asked.append(len(x)) or x.sum(axis=1), X)
    assert asked == [1]  # the trial of one row


def test_scores_of_pairs_of_classes_and_lists_of_outputs_are_refused_in_words() -> None:
    X = numbers(80, 3)
    y = np.arange(80) % 4
    model = SVC(decision_function_shape="ovo").fit(X, y)
    with pytest.raises(ValueError, match=r"gives 6 scores for 4 classes \(one per pair\?\)"):
        explain(model, X[:2], background=X, output=2)
    for second in (y % 2, y % 3):
        several = MultiOutputClassifier(LogisticRegression()).fit(X, np.column_stack([y % 2, second]))
        with pytest.raises(ValueError, match="a list of 2 arrays, one for each of its outputs; pass a function"):
            explain(several, X[:2], background=X)


@pytest.mark.parametrize("kind", ["category", "object", "string"])
def test_a_category_that_the_background_lacks_is_explained(kind: str) -> None:
    background = pd.DataFrame({"c": pd.Categorical(["p", "q", "q", "p"]), "x": [0.0, 1.0, 2.0, 3.0]})
    rows = pd.DataFrame({"c": pd.Series(["r", "q"]).astype(kind), "x": [1.0, 1.0]})

    def model(table: pd.DataFrame) -> np.ndarray:
        assert list(table["c"].cat.categories) == ["p", "q", "r"]
        return (table["c"] == "r") * 5.0

    assert explain(model, rows, background=background).values == pytest.approx(np.array([[5.0, 0.0], [0.0, 0.0]]))


def test_pairwise_scores_of_three_classes_are_not_taken_for_scores_of_classes():
    from sklearn.svm import SVC

    generator = np.random.default_rng(0)
    X, y = generator.normal(size=(60, 3)), np.arange(60) % 3
    model = SVC(decision_function_shape="ovo").fit(X, y)
    with pytest.raises(ValueError, match="pairs of classes"):
        explain(model, X[:1], background=X, output=2)
