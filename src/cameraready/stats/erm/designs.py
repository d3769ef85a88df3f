"""Designs: laws of features and label that can be simulated, and for which the fixed point can be solved."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cameraready.stats.erm.laws import (
    Array,
    Component,
    Design,
    LinearTarget,
    Marginal,
    Target,
    class_component,
    covariance,
    index_component,
    localised,
    marginal,
    product_nodes,
    quantile_nodes,
    root,
    vector,
)

#: Quadrature nodes of the localised coordinates; an eighth of them where the label is a number.
MAX_NODES = 1_024


@dataclass(frozen=True, eq=False)
class IndependentDesign(Design):
    """Independent coordinates of any law around a signal: a class mean, or coefficients.

    Either ``x = y * class_mean + scale * z`` with labels -1 and 1, or ``x = scale * z`` and y drawn by `target` given x'coef.
    Coordinates that carry more than 5 % of the signal's square keep their own law; the others are averaged (central limit theorem).

    Parameters
    ----------
    marginals : name, frozen scipy.stats law, `Marginal`, or a sequence of p of them
        Laws of the coordinates of z, standardised.
    class_mean, coef : array-like of shape (p,)
        One of the two.
    target : LinearTarget or BinaryTarget
        Law of the label given x'coef.
    scale : float or array-like of shape (p,)
        Standard deviations.
    prior : float
        Probability of class 1; with `class_mean`.
    """

    marginals: Any
    class_mean: Any = None
    coef: Any = None
    target: Target = LinearTarget()  # noqa: RUF009
    scale: Any = 1.0
    prior: float = 0.5

    def __post_init__(self) -> None:
        if (self.class_mean is None) == (self.coef is None):
            raise ValueError("give either class_mean (labels -1 and 1) or coef (labels by target)")
        if not 0 < self.prior < 1:
            raise ValueError(
                f"prior must be strictly between 0 and 1, got {self.prior!r}: one class alone teaches nothing"
            )
        name = "coef" if self.class_mean is None else "class_mean"
        signal = vector(getattr(self, name), None, name)
        p = len(signal)
        given = self.marginals
        several = isinstance(given, Sequence) and not isinstance(given, str)
        if several and len(given) != p:
            raise ValueError(f"marginals has {len(given)} laws for {p} features")
        known: dict[int, Marginal] = {}  # one object a law, so that all coordinates of a kind are drawn at once
        laws = [known.setdefault(id(law), marginal(law)) for law in (given if several else [given] * p)]
        scale = np.broadcast_to(np.asarray(self.scale, dtype=float), (p,))
        if not (np.isfinite(scale).all() and (scale >= 0).all()):
            raise ValueError("scale must be finite and not negative")
        object.__setattr__(self, "_laws", laws)
        object.__setattr__(self, "_signal", signal)
        object.__setattr__(self, "_scale", scale)

    @property
    def n_features(self) -> int:  # type: ignore[override]
        return len(self._signal)

    @property
    def is_classification(self) -> bool:  # type: ignore[override]
        return self.class_mean is not None or self.target.is_classification

    def components(self) -> list[Component]:
        direction = self._signal if self.class_mean is not None else self._signal * self._scale
        active = localised(direction, self._laws)
        most = MAX_NODES if self.is_classification else MAX_NODES // 8
        z, z_weights = product_nodes([self._laws[j] for j in active], most)
        own = np.zeros((self.n_features, len(active)))
        own[active, np.arange(len(active))] = self._scale[active]
        noise = self._scale**2
        noise[active] = 0.0
        if self.class_mean is not None:
            return [class_component(self._signal, self.prior, noise, own, z, z_weights)]
        return [index_component(self._signal, self.target, noise, own, z, z_weights, fine=len(z) <= 8)]

    def sample(self, n_samples: int, seed: int | np.random.Generator) -> tuple[Array, Array]:
        rng = np.random.default_rng(seed)
        x = np.empty((n_samples, self.n_features))
        kinds = np.array([id(law) for law in self._laws])
        for kind in dict.fromkeys(kinds):
            columns = np.flatnonzero(kinds == kind)
            drawn = self._laws[columns[0]].draw(rng, (n_samples, len(columns)))
            if len(columns) == self.n_features:
                x = drawn
            else:
                x[:, columns] = drawn
        x = x * self._scale
        if self.class_mean is None:
            return x, self.target.sample(x @ self._signal, rng)
        y = np.where(rng.random(n_samples) < self.prior, 1.0, -1.0)
        x += y[:, None] * self._signal
        return x, y

    def gaussian_equivalent(self) -> IndependentDesign:
        return replace(self, marginals="normal")


@dataclass(frozen=True, eq=False)
class EllipticalDesign(Design):
    """x = (mean or y * class_mean) + r * z with normal z and one random radius r a row, independent of z: E r^2 = 1.

    Rows of this kind do not concentrate (their length is random), and the paper's theorem does not cover them. `GaussianDesign` is
    the case ``radius=None``.

    Parameters
    ----------
    radius : frozen scipy.stats law or None
        Positive, with a finite second moment; it is rescaled to ``E r^2 = 1``.
    class_mean, coef, target, prior
        As in `IndependentDesign`.
    cov : array-like of shape (p,) or (p, p), optional
        Covariance of z: variances or a matrix; the identity by default.
    mean : array-like of shape (p,), optional
        Mean of the features; with `coef` only.
    """

    radius: Any = None
    class_mean: Any = None
    coef: Any = None
    target: Target = LinearTarget()  # noqa: RUF009
    cov: Any = None
    mean: Any = None
    prior: float = 0.5

    def __post_init__(self) -> None:
        if (self.class_mean is None) == (self.coef is None):
            raise ValueError("give either class_mean (labels -1 and 1) or coef (labels by target)")
        if not 0 < self.prior < 1:
            raise ValueError(
                f"prior must be strictly between 0 and 1, got {self.prior!r}: one class alone teaches nothing"
            )
        name = "coef" if self.class_mean is None else "class_mean"
        signal = vector(getattr(self, name), None, name)
        object.__setattr__(self, "_signal", signal)
        object.__setattr__(self, "_cov", covariance(self.cov, len(signal)))
        if self.radius is not None and not (self.radius.support()[0] >= 0 and np.isfinite(self.radius.var())):
            raise ValueError("radius must be a law on positive numbers with a finite variance")
        if self.mean is not None:
            if self.class_mean is not None:
                raise ValueError(
                    "mean goes with coef; with class_mean the classes' means are -class_mean and class_mean"
                )
            object.__setattr__(self, "mean", vector(self.mean, len(signal), "mean"))

    @property
    def n_features(self) -> int:  # type: ignore[override]
        return len(self._signal)

    @property
    def is_classification(self) -> bool:  # type: ignore[override]
        return self.class_mean is not None or self.target.is_classification

    def _radii(self) -> tuple[Array, Array]:
        """Nodes of r^2 with mean one, and weights."""
        if self.radius is None:
            return np.ones(1), np.ones(1)
        radii, weights = quantile_nodes(self.radius, 24)
        return radii**2 / (weights @ radii**2), weights

    def components(self) -> list[Component]:
        p = self.n_features
        nothing = (np.zeros((p, 0)), np.zeros((1, 0)), np.ones(1))
        parts, fine = [], self.radius is None
        for square, weight in zip(*self._radii(), strict=True):
            options = {"weight": float(weight), "noise_scale": float(square)}
            if self.class_mean is not None:
                parts.append(class_component(self._signal, self.prior, self._cov, *nothing, **options))
            else:
                parts.append(
                    index_component(
                        self._signal, self.target, self._cov, *nothing, mean=self.mean, fine=fine, **options
                    )
                )
        return parts

    def sample(self, n_samples: int, seed: int | np.random.Generator) -> tuple[Array, Array]:
        rng = np.random.default_rng(seed)
        x = rng.standard_normal((n_samples, self.n_features))
        x = x * np.sqrt(self._cov) if self._cov.ndim == 1 else x @ root(self._cov).T
        if self.radius is not None:
            second = float(self.radius.var() + self.radius.mean() ** 2)
            x *= (self.radius.rvs(size=n_samples, random_state=rng) / np.sqrt(second))[:, None]
        if self.class_mean is None:
            x = x if self.mean is None else x + self.mean
            return x, self.target.sample(x @ self._signal, rng)
        y = np.where(rng.random(n_samples) < self.prior, 1.0, -1.0)
        return x + y[:, None] * self._signal, y

    def gaussian_equivalent(self) -> EllipticalDesign:
        return replace(self, radius=None)


def GaussianDesign(coef: Any, *, cov: Any = None, mean: Any = None, target: Target | None = None) -> EllipticalDesign:
    """Normal features with any covariance, and a label that depends on x'coef: `EllipticalDesign` with a constant radius.

    Parameters
    ----------
    coef : array-like of shape (p,)
    cov : array-like of shape (p,) or (p, p), optional
    mean : array-like of shape (p,), optional
    target : LinearTarget or BinaryTarget, optional
        A linear model with noise of variance one by default.
    """
    return EllipticalDesign(coef=coef, cov=cov, mean=mean, target=LinearTarget() if target is None else target)


@dataclass(frozen=True, eq=False)
class MixtureDesign(Design):
    """Classes with normal features of their own mean and covariance: x | class c ~ N(means[c], covs[c]).

    Parameters
    ----------
    means : array-like of shape (k, p)
    covs : sequence of k covariances, each (p,) or (p, p), or None for the identity
    priors : array-like of shape (k,)
    labels : array-like of shape (k,)
        y of each class; -1 and 1 for classification.
    """

    means: Any
    covs: Any = None
    priors: Any = None
    labels: Any = (-1.0, 1.0)

    def __post_init__(self) -> None:
        means = np.atleast_2d(np.asarray(self.means, dtype=float))
        if means.ndim != 2 or not np.isfinite(means).all():
            raise ValueError(f"means must be finite, of shape (classes, n_features), got {means.shape}")
        k, p = means.shape
        labels = vector(self.labels, k, "labels")
        priors = np.full(k, 1.0 / k) if self.priors is None else vector(self.priors, k, "priors")
        if (priors < 0).any() or not np.isclose(priors.sum(), 1.0):
            raise ValueError(f"priors must not be negative and must sum to one, got {priors}")
        covs = [None] * k if self.covs is None else list(self.covs)
        if len(covs) != k:
            raise ValueError(f"there are {k} means and {len(covs)} covariances")
        checked: dict[int, Array] = {}
        shared = [checked.setdefault(id(c), covariance(c, p, f"covs[{i}]")) for i, c in enumerate(covs)]
        for name, value in (("means", means), ("labels", labels), ("priors", priors), ("covs", shared)):
            object.__setattr__(self, name, value)

    @property
    def n_features(self) -> int:  # type: ignore[override]
        return self.means.shape[1]

    @property
    def is_classification(self) -> bool:  # type: ignore[override]
        return set(self.labels) == {-1.0, 1.0}

    def components(self) -> list[Component]:
        one = np.ones((1, 1))
        return [
            Component(float(prior), mean[:, None], one, np.array([label]), np.ones(1), cov)
            for prior, mean, cov, label in zip(self.priors, self.means, self.covs, self.labels, strict=True)
            if prior > 0
        ]

    def sample(self, n_samples: int, seed: int | np.random.Generator) -> tuple[Array, Array]:
        rng = np.random.default_rng(seed)
        classes = rng.choice(len(self.priors), size=n_samples, p=self.priors)
        x = rng.standard_normal((n_samples, self.n_features))
        for c, cov in enumerate(self.covs):
            rows = classes == c
            x[rows] = (x[rows] * np.sqrt(cov) if cov.ndim == 1 else x[rows] @ root(cov).T) + self.means[c]
        return x, self.labels[classes]

    def gaussian_equivalent(self) -> MixtureDesign:
        return self


class PlugInWarning(UserWarning):
    """Sample moments stand in for true ones where there are too few rows for that."""


@dataclass(frozen=True, eq=False)
class EmpiricalDesign(Design):
    """The sample's own moments in the place of the true ones: class means and covariances, or least squares and its residuals.

    **Inconsistent unless the sample has many more rows than features.** The sample covariance's eigenvalues are spread out and the
    sample means are too far apart by about p/n_rows, so that predicted errors come out too small. A `PlugInWarning` says so from
    p/n_rows > 0.05 on. To estimate the error of one fitted model from its own training data use `AsymptoticErrorEstimator`,
    which needs no covariance; this design is for questions about other sample sizes, from a large table.

    Parameters
    ----------
    X : array-like of shape (n_rows, p)
    y : array-like of shape (n_rows,)
        Labels -1 and 1, or numbers.
    """

    X: Any
    y: Any

    def __post_init__(self) -> None:
        X, y = np.asarray(self.X, dtype=float), np.asarray(self.y, dtype=float)
        if X.ndim != 2 or y.shape != (len(X),):
            raise ValueError(f"X must have shape (n_rows, n_features) and y (n_rows,), got {X.shape} and {y.shape}")
        if not (np.isfinite(X).all() and np.isfinite(y).all()):
            raise ValueError("X and y must be finite; impute missing values first")
        classes = set(np.unique(y))
        if len(classes) < 2:
            raise ValueError(f"y has the single value {y[0]:g}: there is nothing to learn")
        object.__setattr__(self, "X", X)
        object.__setattr__(self, "y", y)
        groups = [X[y == label] for label in (-1.0, 1.0)] if classes == {-1.0, 1.0} else [X]
        smallest = min(len(group) for group in groups)
        if X.shape[1] > 0.05 * smallest:
            warnings.warn(
                f"{X.shape[1]} features and {smallest} rows{' in the smaller class' if len(groups) > 1 else ''}: the sample covariance is"
                " far from the true one, and predictions from it are too optimistic; AsymptoticErrorEstimator does without it",
                PlugInWarning,
                stacklevel=3,
            )
        object.__setattr__(self, "_plug_in", self._mixture(groups) if len(groups) == 2 else self._regression())

    def _mixture(self, groups: list[Array]) -> MixtureDesign:
        if min(len(group) for group in groups) < 2:
            raise ValueError("each class needs at least two rows, or it has no covariance")
        return MixtureDesign(
            [group.mean(axis=0) for group in groups],
            [np.atleast_2d(np.cov(group, rowvar=False)) for group in groups],
            [len(group) / len(self.X) for group in groups],
        )

    def _regression(self) -> EllipticalDesign:
        n, p = self.X.shape
        if n <= p + 1:
            raise ValueError(f"{n} rows and {p} features: the noise cannot be told from the signal by least squares")
        mean, centred = self.X.mean(axis=0), self.X - self.X.mean(axis=0)
        coef = np.linalg.lstsq(centred, self.y - self.y.mean(), rcond=None)[0]
        offset = float(self.y.mean() - mean @ coef)
        residual = self.y - self.X @ coef - offset
        noise = float(np.sqrt(residual @ residual / (n - p - 1)))
        target = LinearTarget(noise, offset)
        return EllipticalDesign(coef=coef, cov=np.atleast_2d(np.cov(self.X, rowvar=False)), mean=mean, target=target)

    @property
    def n_features(self) -> int:  # type: ignore[override]
        return self.X.shape[1]

    @property
    def is_classification(self) -> bool:  # type: ignore[override]
        return self._plug_in.is_classification

    def components(self) -> list[Component]:
        return self._plug_in.components()

    def sample(self, n_samples: int, seed: int | np.random.Generator) -> tuple[Array, Array]:
        """Rows of the table, drawn with replacement."""
        rows = np.random.default_rng(seed).integers(len(self.X), size=n_samples)
        return self.X[rows], self.y[rows]

    def gaussian_equivalent(self) -> Design:
        return self._plug_in
