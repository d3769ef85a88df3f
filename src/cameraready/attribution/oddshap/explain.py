"""Shapley values of a model's predictions, row by row, as a `shap.Explanation`."""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from cameraready.attribution._game import MarginalGame
from cameraready.attribution._prediction import as_table, check_model, is_tree_ensemble, prediction_function
from cameraready.attribution._tables import taken
from cameraready.attribution.oddshap.estimator import (
    Approximation,
    LowBudget,
    LowBudgetWarning,
    OddShap,
    ShapleyEstimate,
)

if TYPE_CHECKING:
    import shap

#: Most evaluations a row that ``budget="auto"`` spends.
AUTO_CAP = 20_000


class TreeModelWarning(UserWarning):
    """The model is a plain tree ensemble, which TreeSHAP explains exactly and at less cost."""


class IncompleteExplanationWarning(UserWarning):
    """Time ran out or the run was interrupted; the explanation holds the rows that were finished."""


def explain(
    model: Any,
    X: Any,
    *,
    background: Any = None,
    output: Any = None,
    budget: int | Literal["auto"] = "auto",
    max_seconds: float | None = None,
    tolerance: float = 0.02,
    background_rows: int | None = 100,
    eta: int = 10,
    surrogate: Any = "boosting",
    low_budget: LowBudget = "tree",
    seed: int | None = 0,
    progress: bool | None = None,
) -> shap.Explanation:
    """Explain rows of a table with OddSHAP (Fumagalli et al., 2026, arXiv:2602.01399).

    The value of a set of features is the model's mean output with these features from the explained row and the others from
    `background` (interventional Shapley values). One evaluation of a set predicts every background row.

    Parameters
    ----------
    model : object
        Any scikit-learn estimator or pipeline, LightGBM or XGBoost model or booster, object with ``predict``, or callable
        from a table to (n,) or (n, n_outputs). ``predict_proba`` is explained if there is one, else ``decision_function``,
        else ``predict``; of a binary classifier the second class.
    X : array (n_rows, n_features), pandas or polars frame
        Rows to explain. The model gets tables of the same kind with the same dtypes: strings, categories, dates and missing
        values are left as they are.
    background : table like X, optional
        Rows that stand for absent features, usually from the training data. None takes X, which then needs at least 10 rows.
    output : class label or int, optional
        Which class (by label) or output column to explain; needed if there are more than two classes or several outputs.
    budget : int or "auto"
        Evaluations a row. ``"auto"`` starts at ``2 * eta * n_features`` (or all ``2^n_features`` if they are at most twice that), doubles and reuses what it has, until the largest standard
        error is at most `tolerance` times the row's largest attribution, all ``2^n_features`` sets are known, or 20,000
        evaluations are spent.
    max_seconds : float, optional
        Time for all rows, shared equally among those left. A row stops early when its share is used up, though not before its
        first stage; rows not begun in time are left out with an `IncompleteExplanationWarning`.
    tolerance : float
        See `budget`.
    background_rows : int or None
        Rows drawn from a larger background by `seed`; None uses all.
    eta, surrogate, low_budget
        See `OddShap`.
    seed : int or None
        Each row draws its own coalitions from it; None draws others at every call.
    progress : bool, optional
        Progress on stderr; by default only if that is a terminal.

    Returns
    -------
    shap.Explanation
        ``values`` (n_rows, n_features), ``base_values`` (n_rows,), ``error_std`` standard errors like values (NaN where the
        low-budget trees answered), ``data`` (numbers; dates as days since 1970, text and categories as codes) and ``display_data`` (as given),
        ``feature_names``. An interrupted run (Ctrl-C) returns the finished rows with an `IncompleteExplanationWarning`.

    Raises
    ------
    ValueError, TypeError
        For tables or outputs that do not fit, an empty background, and models that return NaN or text.

    Warns
    -----
    TreeModelWarning, LowBudgetWarning, IncompleteExplanationWarning
    """
    explanation_class = _explanation_class()
    if budget != "auto" and (isinstance(budget, bool) or not isinstance(budget, (int, np.integer)) or budget < 2):
        raise ValueError(f"budget must be 'auto' or a whole number of at least 2 evaluations a row, got {budget!r}")
    if max_seconds is not None and not (_is_number(max_seconds) and max_seconds > 0):
        raise ValueError(f"max_seconds must be positive, or None for no limit, got {max_seconds!r}")
    if not (_is_number(tolerance) and 0 < tolerance < math.inf):
        raise ValueError(f"tolerance must be a positive finite number, got {tolerance!r}")
    if seed is None:
        seed = int(np.random.default_rng().integers(2**63))
    elif isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0:
        raise ValueError(f"seed must be None or a whole number of at least 0, got {seed!r}")
    check_model(model, X)
    if background is None:
        X = as_table(X, "the rows to explain")
        if len(X) < 10:
            raise ValueError(
                f"pass background= (some training rows): {len(X)} rows of X are too few to stand for absent features"
            )
        background = X
    predict, background, rows = prediction_function(
        model, background, X, output=output, background_rows=background_rows, seed=seed
    )
    if is_tree_ensemble(model):
        warnings.warn(
            f"{type(model).__name__} is a tree ensemble: shap.TreeExplainer(model, background, "
            "feature_perturbation='interventional') gives the same values exactly and cheaper",
            TreeModelWarning,
            stacklevel=2,
        )
    n_rows, n_features = rows.shape
    shown = _for_plots(rows)  # before the evaluations, so that what fails here costs none
    estimates: list[ShapleyEstimate] = []
    deadline = math.inf if max_seconds is None else time.monotonic() + max_seconds
    stopped = ""
    try:
        with _progress(n_rows, progress) as advance:
            for index in range(n_rows):
                now = time.monotonic()
                if estimates and now >= deadline:
                    stopped = f"max_seconds={max_seconds:g} ran out"
                    break
                settings = OddShap(
                    n_features,
                    eta=eta,
                    surrogate=surrogate,
                    low_budget=low_budget,
                    seed=np.random.default_rng([seed, index]),
                )
                approximation = settings.begin(MarginalGame(predict, taken(rows, [index]), background))
                estimates.append(
                    _spend(approximation, settings, budget, tolerance, now + (deadline - now) / (n_rows - index))
                )
                advance()
    except KeyboardInterrupt:
        if not estimates:
            raise
        stopped = "interrupted"
    if stopped:
        warnings.warn(
            f"{stopped}: {len(estimates)} of {n_rows} rows are explained, the first ones; the result holds only these",
            IncompleteExplanationWarning,
            stacklevel=2,
        )
    low = [estimate for estimate in estimates if estimate.low_budget]
    if low:
        warnings.warn(
            f"{len(low)} of {len(estimates)} rows had fewer than eta * n_features = {eta * n_features} evaluations: their values are those of "
            + (
                "the tree surrogate, without standard errors"
                if low_budget == "tree"
                else "a regression without interactions"
            ),
            LowBudgetWarning,
            stacklevel=2,
        )
    return _explanation(explanation_class, estimates, shown)


def _spend(
    approximation: Approximation, settings: OddShap, budget: int | str, tolerance: float, deadline: float
) -> ShapleyEstimate:
    """Raise a row's budget stage by stage until it is accurate enough, at its cap, or out of time."""
    n = settings.n_players
    cap = AUTO_CAP if budget == "auto" else int(budget)
    cap = min(cap, 2**n)
    staged = budget == "auto" or deadline < math.inf
    size = min(cap, 2 * settings.eta * n) if staged else cap
    if budget == "auto" and cap == 2**n <= 2 * size:  # few features: exact at once
        size = cap
    started = time.monotonic()
    while True:
        estimate = approximation.silent_estimate(max(size, 2))
        if size >= cap or (budget == "auto" and _accurate(estimate, tolerance)):
            return estimate
        now = time.monotonic()
        # The solve grows faster than the evaluations; a fifth is left for it.
        affordable = int(0.8 * (deadline - started) / (now - started) * size) if deadline < math.inf else cap
        following = min(2 * size, cap, affordable)
        if following < 1.2 * size:  # not worth another fit
            return estimate
        size = following


def _accurate(estimate: ShapleyEstimate, tolerance: float) -> bool:
    return bool(estimate.standard_errors.max() <= tolerance * np.abs(estimate.values).max())  # False for NaN


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def _explanation(
    explanation_class: Any,
    estimates: list[ShapleyEstimate],
    rows_for_plots: tuple[np.ndarray, np.ndarray | None, list[str]],
) -> Any:
    """The finished rows, which are the first of those prepared for plots."""
    data, shown, names = rows_for_plots
    n = len(estimates)
    return explanation_class(
        values=np.array([estimate.values for estimate in estimates]),
        base_values=np.array([estimate.baseline for estimate in estimates]),
        error_std=np.array([estimate.standard_errors for estimate in estimates]),
        data=data[:n],
        display_data=None if shown is None else shown[:n],
        feature_names=names,
    )


def _for_plots(rows: Any) -> tuple[np.ndarray, np.ndarray | None, list[str]]:
    """The rows as numbers for colours, as given for labels (None if the same), and the features' names."""
    if hasattr(rows, "columns"):
        names = [str(name) for name in rows.columns]
        columns = [np.asarray(rows.iloc[:, j] if hasattr(rows, "iloc") else rows[:, j]) for j in range(len(names))]
    else:
        names = [f"Feature {j}" for j in range(rows.shape[1])]
        columns = list(rows.T)
    if all(column.dtype.kind in "biuf" for column in columns):
        return np.column_stack(columns).astype(float), None, names
    shown = np.empty((len(rows), len(names)), dtype=object)
    for j, column in enumerate(columns):
        # NumPy turns dates in nanoseconds into integers, those in microseconds into datetimes.
        shown[:, j] = column.astype(f"{column.dtype.kind}8[us]") if column.dtype.kind in "mM" else column
    return np.column_stack([_as_numbers(column) for column in columns]), shown, names


def _as_numbers(column: np.ndarray) -> np.ndarray:
    if column.dtype.kind in "biuf":
        return column.astype(float)
    if column.dtype.kind in "mM":
        days = column.astype(f"{column.dtype.kind}8[us]").astype(float) / 86_400e6
        return np.where(np.isnat(column), np.nan, days)
    present = np.array([not _is_missing(value) for value in column.tolist()], dtype=bool)
    found = np.full(len(column), np.nan)
    kept = column[present]
    if all(isinstance(value, date) for value in kept):
        found[present] = [_days(value) for value in kept]
        return found
    try:
        found[present] = kept.astype(float)  # numbers in an object column
    except (TypeError, ValueError):  # text, categories: codes in order of their text
        found[present] = np.unique([str(value) for value in kept], return_inverse=True)[1]
    return found


def _is_missing(value: Any) -> bool:
    try:
        return value is None or bool(value != value)
    except TypeError:  # pandas.NA is neither
        return True
    except ValueError:  # an array in a cell
        return False


def _days(value: date) -> float:
    """Days since 1970, of times without a zone as if in UTC."""
    if not isinstance(value, datetime):
        return float(value.toordinal() - date(1970, 1, 1).toordinal())
    return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp() / 86_400


def _explanation_class() -> Any:
    try:
        from shap import Explanation
    except ImportError as error:
        raise ImportError("explain() returns a shap.Explanation: pip install 'cameraready[attribution]'") from error
    return Explanation


@contextmanager
def _progress(n_rows: int, wanted: bool | None) -> Iterator[Any]:
    if not (sys.stderr.isatty() if wanted is None else wanted):
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("explaining rows"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=n_rows)
        yield lambda: bar.advance(task)
