"""Which empirical risk a scikit-learn estimator minimises, in the conventions of `HighDimERM`; exact, or refused with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cameraready.stats.erm.asymptotics import HighDimERM
from cameraready.stats.erm.losses import ScaledHuberLoss, SquaredLoss


def matching_erm(estimator: Any, n_samples: int) -> HighDimERM:
    """The `HighDimERM` of a scikit-learn estimator on `n_samples` rows.

    scikit-learn sums losses where the theory takes their mean, so that the penalty per sample is 1 / (C n) or alpha / n.
    `HuberRegressor` also estimates a scale (see `ScaledHuberLoss`); `LinearSVC`, and `LogisticRegression` with liblinear, penalise
    the intercept.

    Parameters
    ----------
    estimator : Ridge, RidgeClassifier, LinearRegression, LogisticRegression, LinearSVC, SVC with a linear kernel, or HuberRegressor
        Fitted or not; two classes where there are classes.
    n_samples : int
        Rows that it is, or will be, fitted to.

    Raises
    ------
    TypeError
        For another estimator.
    ValueError
        For parameters whose risk is not of the form of `HighDimERM`: an l1 penalty, class weights, sign constraints.
    """
    from sklearn.linear_model import HuberRegressor, LinearRegression, LogisticRegression, Ridge, RidgeClassifier
    from sklearn.svm import SVC, LinearSVC

    known: dict[type, Callable[[Any, int], HighDimERM]] = {
        RidgeClassifier: _ridge,
        Ridge: _ridge,
        LinearRegression: _least_squares,
        LogisticRegression: _logistic,
        LinearSVC: _linear_svc,
        SVC: _svc,
        HuberRegressor: _huber,
    }
    for kind, translate in known.items():
        if type(estimator) is kind:
            if not n_samples >= 2:
                raise ValueError(f"n_samples must be at least 2, got {n_samples}")
            if getattr(estimator, "class_weight", None) is not None:
                raise ValueError(
                    f"{kind.__name__} with class_weight weighs losses by sample, which is not supported; use None"
                )
            if getattr(estimator, "positive", False):
                raise ValueError(
                    f"{kind.__name__}(positive=True) constrains signs; its coefficients do not fluctuate normally"
                )
            return translate(estimator, n_samples)
    names = ", ".join(kind.__name__ for kind in known)
    raise TypeError(
        f"{type(estimator).__name__} is not one of {names}, whose risks are known; for another convex loss build HighDimERM yourself"
    )


def _strength(name: str, value: Any) -> float:
    if np.ndim(value) != 0 or not value >= 0:
        raise ValueError(f"{name} must be one number that is not negative, got {value!r}")
    return float(value)


def _ridge(estimator: Any, n: int) -> HighDimERM:
    loss = SquaredLoss(is_classification=type(estimator).__name__ == "RidgeClassifier")
    intercept = "free" if estimator.fit_intercept else "none"
    return HighDimERM(loss, alpha=_strength("alpha", estimator.alpha) / n, intercept=intercept)


def _least_squares(estimator: Any, n: int) -> HighDimERM:
    return HighDimERM("squared", alpha=0.0, intercept="free" if estimator.fit_intercept else "none")


def _logistic(estimator: Any, n: int) -> HighDimERM:
    l1_ratio = getattr(estimator, "l1_ratio", None)
    if getattr(estimator, "penalty", "l2") in ("l1", "elasticnet") or (l1_ratio is not None and l1_ratio > 0):
        raise ValueError(
            "LogisticRegression with an l1 penalty: it has no second derivative at zero, which the theory needs; use l1_ratio=0"
        )
    if not estimator.C > 0:
        raise ValueError(f"C must be positive, got {estimator.C!r}")
    alpha = 0.0 if getattr(estimator, "penalty", "l2") is None else 1.0 / (float(estimator.C) * n)
    penalised = estimator.solver == "liblinear"
    intercept = ("penalised" if penalised else "free") if estimator.fit_intercept else "none"
    return HighDimERM(
        "logistic", alpha=alpha, intercept=intercept, intercept_scaling=float(estimator.intercept_scaling)
    )


def _linear_svc(estimator: Any, n: int) -> HighDimERM:
    if estimator.penalty != "l2":
        raise ValueError(
            "LinearSVC with an l1 penalty: it has no second derivative at zero, which the theory needs; use penalty='l2'"
        )
    if not estimator.C > 0:
        raise ValueError(f"C must be positive, got {estimator.C!r}")
    intercept = "penalised" if estimator.fit_intercept else "none"
    scaling = float(estimator.intercept_scaling)
    return HighDimERM(
        estimator.loss, alpha=1.0 / (float(estimator.C) * n), intercept=intercept, intercept_scaling=scaling
    )


def _svc(estimator: Any, n: int) -> HighDimERM:
    if estimator.kernel != "linear":
        raise ValueError(f"SVC with kernel={estimator.kernel!r} is not linear in its features; only kernel='linear' is")
    if not estimator.C > 0:
        raise ValueError(f"C must be positive, got {estimator.C!r}")
    return HighDimERM("hinge", alpha=1.0 / (float(estimator.C) * n), intercept="free")


def _huber(estimator: Any, n: int) -> HighDimERM:
    intercept = "free" if estimator.fit_intercept else "none"
    return HighDimERM(
        ScaledHuberLoss(float(estimator.epsilon)), alpha=_strength("alpha", estimator.alpha) / n, intercept=intercept
    )
