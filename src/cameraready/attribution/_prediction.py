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
    seed: int | None = 0,
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
    check_model(model, rows)
    if background_rows is not None and (
        isinstance(background_rows, bool) or not isinstance(background_rows, (int, np.integer)) or background_rows < 1
    ):
        raise ValueError(f"background_rows must be None or a whole number of at least 1, got {background_rows!r}")
    background, rows = as_table(background, "the background"), as_table(rows, "the rows to explain")
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


def check_model(model: Any, rows: Any) -> None:
    """Raise a TypeError for what cannot be asked for predictions, tables in the place of the model above all."""
    if not _is_model(model):
        swapped = "; the model comes first: explain(model, X)" if _is_model(rows) else ""
        raise TypeError(
            f"the model must be callable or have predict, predict_proba or decision_function; {type(model).__name__} is "
            f"not{swapped}"
        )


def _is_model(thing: Any) -> bool:
    if kind_of(thing) != "numpy":  # a frame, whose columns may have any name
        return False
    return callable(thing) or any(hasattr(thing, name) for name in ("predict", "predict_proba", "decision_function"))


def as_table(table: Any, what: str) -> Any:
    """A frame as it is, a LazyFrame collected, anything else as a 2-d numpy array; errors call it `what`."""
    if hasattr(table, "collect") and hasattr(table, "lazy"):  # a polars LazyFrame
        table = table.collect()
    if hasattr(table, "tocsr"):
        raise TypeError(f"{what} is a sparse matrix; pass a dense array: X.toarray()")
    if np.ma.is_masked(table):
        raise TypeError(
            f"{what} must not be a masked array with masked entries, whose mask would be lost; pass X.filled(np.nan), or an "
            "imputed array"
        )
    if hasattr(table, "columns"):
        if len(table.columns) == 0:
            raise ValueError(f"{what} must have at least one feature, got a table without columns")
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
    if array.shape[1] == 0:
        raise ValueError(f"{what} must have at least one feature, got a table without columns")
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
        return _xgboost_caller(model), _column(output)
    if package == "lightgbm" and type(model).__name__ == "Booster":
        call = lambda table: model.predict(table.to_pandas() if hasattr(table, "to_pandas") else table)  # noqa: E731
        return call, _column(output)
    classes = _classes(model)
    call = next((getattr(model, name) for name in ("predict_proba", "decision_function") if hasattr(model, name)), None)
    if call is not None and classes is not None:
        pairwise = getattr(model, "decision_function_shape", "") == "ovo" and not hasattr(model, "predict_proba")
        if pairwise and len(classes) == 3:  # as many pairs as classes, so their number does not tell
            raise ValueError("the model scores pairs of classes; build it with decision_function_shape='ovr'")
        width = np.asarray(call(taken(background, [0]))).ravel().size
        return call, _class_column(classes, width, output)
    if call is None and classes is not None:
        raise TypeError(
            f"{type(model).__name__} is a classifier without predict_proba or decision_function; pass a function that returns a "
            "probability or a score"
        )
    if call is None:
        call = getattr(model, "predict", model)
    return call, _column(output)


def _column(output: Any) -> int | None:
    if output is not None and (isinstance(output, (bool, np.bool_)) or not isinstance(output, (int, np.integer))):
        raise ValueError(
            f"output={output!r}, but the model has no classes known by label; pass the number of its output column: 0, 1, ..."
        )
    return output


def _classes(model: Any) -> list[Any] | None:
    try:
        classes = model.classes_
    except AttributeError:
        return None
    if isinstance(classes, list) and any(np.ndim(entry) for entry in classes):  # several outputs, each with its own
        return None
    return list(np.asarray(classes).tolist()) if np.ndim(classes) == 1 else None


def _class_column(classes: list[Any], width: int, output: Any) -> int | None:
    if width not in (1, len(classes)):
        raise ValueError(
            f"the model gives {width} scores for {len(classes)} classes (one per pair?); pass a function that returns the score "
            "to explain"
        )
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
