"""How a model of any common kind is asked for one number per row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cameraready.attribution._game import select_output
from cameraready.attribution._tables import kind_of, stacked, taken

Predict = Callable[[Any], np.ndarray]

#: Trees of scikit-learn that shap.TreeExplainer handles; LightGBM, XGBoost and CatBoost are known by their package.
_TREE_NAMES = ("DecisionTree", "ExtraTree", "RandomForest", "GradientBoosting", "HistGradientBoosting")


def prediction_function(
    model: Any,
    background: Any,
    rows: Any,
    *,
    output: Any = None,
    background_rows: int | None = 100,
    seed: int = 0,
) -> tuple[Predict, Any, Any]:
    """One number per row from any model, with a background sample and rows to explain brought to common dtypes.

    Parameters
    ----------
    model : object
        In this order of preference: an XGBoost booster; an object with ``predict_proba``, ``decision_function`` or
        ``predict`` (scikit-learn, pipelines, LightGBM and its booster, XGBoost, CatBoost); a callable table -> (n,) or
        (n, n_outputs). For a binary classifier the second class is explained.
    background, rows : 2-d numpy arrays, or pandas or polars frames of the same columns
    output : class label or int, optional
        Which class (by label, for classifiers with ``classes_``) or column is explained where there are several.
    background_rows : int or None
        Rows drawn by `seed` where `background` has more; None keeps all.

    Returns
    -------
    predict : callable
        Table of the background's kind -> float64 array (n,), finite.
    background, rows : the same kinds of table as given

    Raises
    ------
    ValueError, TypeError
        As sentences, for tables that are empty, not two-dimensional or do not fit each other or the model, a model without
        numeric output, an unknown `output`.
    """
    background, rows = _table(background, "the background"), _table(rows, "the rows to explain")
    if background.shape[0] == 0:
        raise ValueError("the background is empty; it needs at least one row that absent features are taken from")
    if rows.shape[0] == 0:
        raise ValueError("there are no rows to explain")
    if background_rows is not None and background.shape[0] > background_rows:
        chosen = np.sort(np.random.default_rng(seed).permutation(background.shape[0])[:background_rows])
        background = taken(background, chosen)
    if kind_of(rows) != kind_of(background):
        raise TypeError(
            f"the rows to explain are a {kind_of(rows)} table and the background is a {kind_of(background)} one; pass both in "
            "the form that the model takes"
        )
    if rows.shape[1] != background.shape[1]:
        raise ValueError(f"the rows to explain have {rows.shape[1]} features, the background has {background.shape[1]}")
    expected = _expected_features(model)
    if expected is not None and expected != background.shape[1]:
        raise ValueError(f"the model expects {expected} features, the table has {background.shape[1]}")
    if hasattr(background, "columns"):
        table = stacked(rows, background)
        rows, background = taken(table, range(len(rows))), taken(table, range(len(rows), len(table)))
    call, column = _chosen(model, background, output)

    def predict(table: Any) -> np.ndarray:
        return select_output(call(table), table.shape[0], column)

    predict(taken(background, [0]))  # what does not work is said before any work is done
    return predict, background, rows


def is_tree_ensemble(model: Any) -> bool:
    """Whether `shap.TreeExplainer` explains this model exactly: trees on their own, not a pipeline or a stack."""
    for base in type(model).__mro__:
        package = base.__module__.partition(".")[0]
        if package in ("lightgbm", "xgboost", "catboost"):
            return getattr(model, "booster", None) != "gblinear"
        if base.__module__.startswith(("sklearn.tree", "sklearn.ensemble")) and base.__name__.startswith(_TREE_NAMES):
            return True
    return False


def _table(table: Any, what: str) -> Any:
    if hasattr(table, "collect") and hasattr(table, "lazy"):  # a polars LazyFrame
        table = table.collect()
    if hasattr(table, "tocsr"):
        raise TypeError(f"{what} is a sparse matrix; pass a dense array: X.toarray()")
    if hasattr(table, "columns"):
        return table
    if isinstance(table, str) or (isinstance(table, (list, tuple)) and any(isinstance(entry, str) for entry in table)):
        raise TypeError(
            f"{what} must be a table of rows and features, got text; for a text model make a game over its words and pass it to "
            "OddShap(n_words).approximate(budget, game)"
        )
    array = np.asarray(table)
    if array.ndim != 2:
        hint = "; a single row is X[:1] or x[None, :]" if array.ndim == 1 else ""
        raise ValueError(f"{what} must be a table of shape (rows, features), got shape {array.shape}{hint}")
    return array


def _expected_features(model: Any) -> int | None:
    for name in ("n_features_in_", "num_feature", "num_features"):
        try:
            found = getattr(model, name, None)
            found = found() if callable(found) else found
        except (AttributeError, ValueError):  # sklearn meta-estimators raise where the inner model has none
            continue
        if isinstance(found, (int, np.integer)) and found > 0:
            return int(found)
    return None


def _chosen(model: Any, background: Any, output: Any) -> tuple[Callable[[Any], Any], int | None]:
    """What to call, and which column of its answer."""
    package = type(model).__module__.partition(".")[0]
    if package == "xgboost" and type(model).__name__ == "Booster":
        return _xgboost_caller(model), output
    if package == "lightgbm" and type(model).__name__ == "Booster":
        return lambda table: model.predict(table.to_pandas() if hasattr(table, "to_pandas") else table), output
    classes = _classes(model)
    call = next((getattr(model, name) for name in ("predict_proba", "decision_function") if hasattr(model, name)), None)
    if call is not None and classes is not None:
        width = np.asarray(call(taken(background, [0]))).ravel().size
        return call, _class_column(classes, width, output)
    if call is None and classes is not None:
        raise TypeError(
            f"{type(model).__name__} is a classifier without predict_proba or decision_function; pass a function that returns a "
            "probability or a score"
        )
    if call is None:
        call = getattr(model, "predict", model)
    if not callable(call):
        raise TypeError(
            f"the model must be callable or have predict, predict_proba or decision_function; {type(model).__name__} is not"
        )
    return call, output


def _classes(model: Any) -> list[Any] | None:
    try:
        classes = model.classes_
    except AttributeError:
        return None
    return list(np.asarray(classes).tolist()) if np.ndim(classes) == 1 else None


def _class_column(classes: list[Any], width: int, output: Any) -> int | None:
    if output is None:
        if len(classes) > 2:
            raise ValueError(
                f"the model has {len(classes)} classes; say which one to explain with output=, one of {classes}"
            )
        return None if width == 1 else 1
    if output not in classes:
        raise ValueError(f"output={output!r} is not one of the model's classes {classes}")
    column = classes.index(output)
    if width == 1:
        if column != len(classes) - 1:
            raise ValueError(
                f"the model gives one score, that of {classes[-1]!r}; explain that class and change the sign"
            )
        return None
    return column


def _xgboost_caller(booster: Any) -> Callable[[Any], Any]:
    import xgboost

    def call(table: Any) -> Any:
        names = None if hasattr(table, "columns") else booster.feature_names
        return booster.predict(xgboost.DMatrix(table, feature_names=names, enable_categorical=True))

    return call
