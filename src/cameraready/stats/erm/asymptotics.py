"""Predicts mean and covariance of an estimator, the law of its score, and its errors, from a design and a sample size."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from scipy.optimize import brentq
from scipy.special import ndtr
from sklearn.exceptions import ConvergenceWarning

from cameraready.stats.erm.laws import Array, Component, Design, LinearTarget
from cameraready.stats.erm.losses import Loss, ScaledHuberLoss, SeparablePenalty, named_loss
from cameraready.stats.erm.system import FINE, Fluctuations, NoMinimiserError, Solution, System, assemble

Intercept = Literal["none", "free", "penalised"]


@dataclass(frozen=True, eq=False)
class ScoreLaw:
    """A mixture of normal laws, one a quadrature node: the law of a fresh score, beside the label that goes with it.

    Attributes
    ----------
    weights, centres, sds, labels : ndarrays of shape (m,)
    """

    weights: Array
    centres: Array
    sds: Array
    labels: Array

    def cdf(self, x: Any) -> Array:
        """Distribution function at `x`, of any shape; O(size * m)."""
        x = np.asarray(x, dtype=float)
        found = [self.weights @ ndtr((value - self.centres) / self.sds) for value in x.ravel()]
        return np.reshape(found, x.shape)

    def pdf(self, x: Any) -> Array:
        """Density at `x`, of any shape."""
        x = np.asarray(x, dtype=float)
        z = (x[..., None] - self.centres) / self.sds
        return (np.exp(-0.5 * z * z) / (self.sds * np.sqrt(2 * np.pi))) @ self.weights

    def rvs(self, size: int, seed: int | np.random.Generator = 0) -> Array:
        """Independent draws, (size,)."""
        rng = np.random.default_rng(seed)
        node = rng.choice(len(self.weights), size=size, p=self.weights)
        return self.centres[node] + self.sds[node] * rng.standard_normal(size)

    def expect(self, f: Callable[[Array, Array], Array]) -> float:
        """E f(label, score) for a function on arrays."""
        g_weights = np.exp(-0.5 * FINE * FINE)
        g_weights /= g_weights.sum()
        total = 0.0
        for rows in np.array_split(np.arange(len(self.weights)), max(1, len(self.weights) // 2_000)):
            s = self.centres[rows, None] + self.sds[rows, None] * FINE
            total += float(self.weights[rows] @ (f(self.labels[rows, None], s) @ g_weights))
        return total

    @property
    def mean(self) -> float:
        return float(self.weights @ self.centres)

    @property
    def variance(self) -> float:
        return float(self.weights @ (self.sds**2 + self.centres**2)) - self.mean**2

    def given(self, label: float) -> ScoreLaw:
        """The law among rows with this label.

        Raises
        ------
        ValueError
            If no row has it.
        """
        rows = self.labels == label
        if not rows.any():
            raise ValueError(f"no row has the label {label!r}")
        weights = self.weights[rows] / self.weights[rows].sum()
        return ScoreLaw(weights, self.centres[rows], self.sds[rows], self.labels[rows])

    def shifted(self, offset: Array, factor: Array) -> ScoreLaw:
        """The law of offset + factor * score, with one offset and one factor (-1 or 1) a node."""
        return replace(self, centres=offset + factor * self.centres)


@dataclass(frozen=True, eq=False)
class Asymptotics:
    """What is predicted of an estimator at one sample size.

    Attributes
    ----------
    coef_mean : ndarray of shape (p,)
        mu, the expected coefficients.
    intercept_mean : float
        0 without an intercept.
    coef_trace : float
        tr C, the summed variances of the coefficients.
    score_law : ScoreLaw
        Of a fresh row's score x'coef + intercept.
    margin_law : ScoreLaw
        Of y * score for classes, and of the residual y - score for numbers.
    test_error : float
        Share of wrong signs for classes, mean squared error for numbers.
    test_loss, train_loss : float
        Mean of the loss on fresh rows and on the training rows, without the penalty.
    kappa, chi, v : ndarrays of shape (components,)
        v is the variance of a score that is due to the training sample.
    scale : float
        Estimated scale of `ScaledHuberLoss`; NaN for other losses.
    converged : bool
    n_iter : int
    """

    coef_mean: Array
    intercept_mean: float
    coef_trace: float
    score_law: ScoreLaw
    margin_law: ScoreLaw
    test_error: float
    test_loss: float
    train_loss: float
    kappa: Array
    chi: Array
    v: Array
    scale: float
    converged: bool
    n_iter: int
    covariance: Callable[[], Array]

    def coef_cov(self) -> Array:
        """C, the covariance of the coefficients, (p, p); computed on demand, O(p^3).

        Right in averages over many directions (its trace, its trace with a covariance), which is what scores need; along the single
        direction of the signal the estimator's variance is another.
        """
        return self.covariance()


@dataclass(frozen=True)
class HighDimERM:
    """Predictions for ``argmin mean_i loss(y_i, x_i'coef + intercept) + penalty(coef)`` when features are many.

    Valid when the numbers of features and samples are both large (a few tens suffice for 2 %) and rows concentrate: light tails, no
    common random scale. Source: Yaakoubi et al., 2026, arXiv:2604.03146, with the fixed point re-derived here. Use it when the law of
    the features is known or modelled; to estimate the error of a model fitted to data use `AsymptoticErrorEstimator`.

    Parameters
    ----------
    loss : {"squared", "logistic", "hinge", "squared_hinge", "huber"} or a loss object
        Objects as in `cameraready.stats.erm.losses`; classifiers' labels are -1 and 1.
    penalty : "l2" or SeparablePenalty
        "l2" is ``alpha / 2 * ||coef||^2``. A `SeparablePenalty` is taken as it is, and `alpha` ignored.
    alpha : float
        Strength of the l2 penalty *per sample*: 1 / (C n) of `LogisticRegression`, alpha / n of `Ridge`; see `matching_erm`.
    intercept : {"none", "free", "penalised"}
        "penalised" as in `LinearSVC`: a constant feature `intercept_scaling` whose coefficient is penalised with the others.
    intercept_scaling : float
    fluctuations : {"by-component", "common"}
        Whether the variance due to the training sample follows a row's component (its class, its radius), or is the same for all
        rows, as the paper states it. They agree where components share a covariance.
    tol, max_iter
        Of the fixed point; `Asymptotics.converged` says whether it was reached, and a `ConvergenceWarning` if it was not.
    """

    loss: str | Loss | ScaledHuberLoss = "logistic"
    penalty: str | SeparablePenalty = "l2"
    alpha: float = 0.1
    intercept: Intercept = "none"
    intercept_scaling: float = 1.0
    fluctuations: Fluctuations = "by-component"
    tol: float = 1e-8
    max_iter: int = 500

    def predict_asymptotics(self, design: Design, n_samples: int) -> Asymptotics:
        """Solve the fixed point for `n_samples` rows of `design`.

        Raises
        ------
        ValueError
            If parameters are out of range, the loss does not go with the labels, or `alpha` is 0 with no more samples than features.
        NoMinimiserError
            If without a penalty the data would be separated (a `ValueError`).
        """
        loss = self._checked(design, n_samples)
        problem = _Problem.of(self, design)
        if isinstance(loss, ScaledHuberLoss):
            return self._scaled(loss, problem, design, n_samples)
        solution = self._solve(problem, loss, n_samples, self.alpha, None)
        return self._report(problem, loss, solution, design, float("nan"))

    def _checked(self, design: Design, n_samples: int) -> Loss | ScaledHuberLoss:
        loss = named_loss(self.loss)
        if not (np.isfinite(self.alpha) and self.alpha >= 0):
            raise ValueError(f"alpha must be finite and not negative, got {self.alpha!r}")
        if not (np.isfinite(n_samples) and n_samples >= 2):
            raise ValueError(f"n_samples must be at least 2, got {n_samples!r}")
        if self.intercept not in ("none", "free", "penalised"):
            raise ValueError(f"intercept must be 'none', 'free' or 'penalised', got {self.intercept!r}")
        if self.fluctuations not in ("by-component", "common"):
            raise ValueError(f"fluctuations must be 'by-component' or 'common', got {self.fluctuations!r}")
        if not (self.penalty == "l2" or isinstance(self.penalty, SeparablePenalty)):
            raise ValueError(
                f"penalty must be 'l2' or a SeparablePenalty, got {self.penalty!r}; the l1 norm has no second derivative at zero, and"
                " the theory's quadratic equivalent does not exist for it"
            )
        if loss.is_classification and not design.is_classification:
            raise ValueError("this loss needs labels -1 and 1, but the design's labels are numbers")
        if self.penalty == "l2" and self.alpha == 0 and n_samples <= design.n_features:
            raise ValueError(
                f"alpha is 0 and there are {n_samples} samples for {design.n_features} features: the minimiser is not unique; use alpha > 0"
            )
        return loss

    def _solve(self, problem: _Problem, loss: Loss, n: int, alpha: float, start: Solution | None) -> Solution:
        separable = self.penalty if isinstance(self.penalty, SeparablePenalty) else None
        p = problem.n_features
        curvature = alpha if separable is None else float(separable.curvature(np.zeros(1))[0])
        ridge = np.full(problem.size, float(curvature))
        penalised = np.ones(problem.size, dtype=bool)
        if self.intercept == "free":
            ridge[p:], penalised[p:] = 0.0, False
        system = System(problem.parts, loss, ridge, n, separable, penalised, self.fluctuations)
        solution = system.solve(tol=self.tol, max_iter=self.max_iter, start=start)
        if curvature == 0 and not solution.converged:
            raise NoMinimiserError(
                "no fixed point was found without a penalty: the data can probably be fitted without error at this number of samples,"
                " so that there is no minimiser, or no single one; use alpha > 0 or more samples"
            )
        return solution

    def _scaled(self, loss: ScaledHuberLoss, problem: _Problem, design: Design, n: int) -> Asymptotics:
        """The scale makes the training mean of min((r / scale)^2, epsilon^2) one; it is found by bracketing its logarithm."""
        last: list[Solution | None] = [None]

        def excess(log_scale: float) -> float:
            scale = float(np.exp(log_scale))
            last[0] = self._solve(problem, loss.at(scale), n, self.alpha * scale, last[0])
            bounded = lambda y, z: np.minimum(((y - z) / scale) ** 2, loss.epsilon**2)  # noqa: E731
            return problem.trained(last[0], loss.at(scale), bounded) - 1.0

        centre = np.log(problem.label_spread())
        low, high = centre - 1.0, centre + 0.5
        while excess(low) < 0 and low > centre - 20:
            low -= 2.0
        while excess(high) > 0 and high < centre + 20:
            high += 1.0
        log_scale = brentq(excess, low, high, xtol=1e-6)
        excess(log_scale)
        scale = float(np.exp(log_scale))
        assert last[0] is not None
        return self._report(problem, loss.at(scale), last[0], design, scale)

    def _report(self, problem: _Problem, loss: Loss, solution: Solution, design: Design, scale: float) -> Asymptotics:
        if not solution.converged:
            warnings.warn(
                f"the fixed point still moved by {solution.residual:.2g} after {solution.n_iter} iterations; predictions are approximate",
                ConvergenceWarning,
                stacklevel=4,
            )
        score_law = problem.score_law(solution)
        if loss.is_classification:
            margin_law = score_law.shifted(np.zeros(1), score_law.labels)
            error = float(margin_law.cdf(0.0))
        else:
            margin_law = score_law.shifted(score_law.labels, np.array(-1.0))
            error = float(margin_law.expect(lambda _, residual: residual**2))
            target = getattr(design, "target", None)
            if isinstance(target, LinearTarget) and not np.isfinite(target.variance):
                error = float("inf")  # the quadrature of the noise is finite, its variance is not
        p = problem.n_features
        mean = problem.original(solution.mu[:p])
        return Asymptotics(
            coef_mean=mean,
            intercept_mean=float(self.intercept_scaling * solution.mu[p]) if problem.size > p else 0.0,
            coef_trace=float(solution.covariance.diagonal()[:p].sum()),
            score_law=score_law,
            margin_law=margin_law,
            test_error=error,
            test_loss=score_law.expect(loss.value),
            train_loss=problem.trained(solution, loss, loss.value),
            kappa=solution.kappa,
            chi=solution.chi,
            v=solution.v,
            scale=scale,
            converged=solution.converged,
            n_iter=solution.n_iter,
            covariance=lambda: problem.original_matrix(solution.covariance.dense()[:p, :p]),
        )


@dataclass(frozen=True)
class _Problem:
    """A design in the solver's coordinates: its covariance diagonal where one rotation does it, an intercept as last feature."""

    parts: Sequence[Any]
    n_features: int
    size: int
    basis: Array | None

    @classmethod
    def of(cls, erm: HighDimERM, design: Design) -> _Problem:
        components, basis = design.components(), None
        shared = components[0].noise
        if shared.ndim == 2 and erm.penalty == "l2" and all(c.noise is shared for c in components):
            values, basis = np.linalg.eigh(shared)
            values = np.maximum(values, 0.0)
            components = [_rotated(c, basis, values) for c in components]
        if erm.intercept != "none":
            components = [_with_constant(c, erm.intercept_scaling) for c in components]
        return cls(assemble(components), design.n_features, len(components[0].loadings), basis)

    def original(self, coef: Array) -> Array:
        return coef if self.basis is None else self.basis @ coef

    def original_matrix(self, matrix: Array) -> Array:
        return matrix if self.basis is None else self.basis @ matrix @ self.basis.T

    def label_spread(self) -> float:
        weights = np.concatenate([part.weight * part.node_weights for part in self.parts])
        labels = np.concatenate([part.labels for part in self.parts])
        mean = weights @ labels
        return max(float(np.sqrt(weights @ (labels - mean) ** 2)), 1e-12)

    def score_law(self, solution: Solution) -> ScoreLaw:
        centres = [part.nodes @ (part.loadings.T @ solution.mu) for part in self.parts]
        weights = np.concatenate([part.weight * part.node_weights for part in self.parts])
        sds = np.concatenate([np.full(len(c), sd) for c, sd in zip(centres, solution.sd, strict=True)])
        labels = np.concatenate([part.labels for part in self.parts])
        return ScoreLaw(weights / weights.sum(), np.concatenate(centres), np.maximum(sds, 1e-300), labels)

    def trained(self, solution: Solution, loss: Loss, f: Callable[[Array, Array], Array]) -> float:
        """E f(y, z) for the score z of a training row."""
        law, total = self.score_law(solution), 0.0
        first = 0
        for part, kappa in zip(self.parts, solution.kappa, strict=True):
            rows = slice(first, first + len(part.labels))
            first = rows.stop
            own = ScoreLaw(law.weights[rows], law.centres[rows], law.sds[rows], law.labels[rows])
            total += own.expect(lambda y, s, kappa=kappa: f(y, loss.prox(y, s, kappa)))
        return total


def _rotated(component: Component, basis: Array, values: Array) -> Component:
    removed = None if component.removed is None else basis.T @ component.removed
    return replace(component, loadings=basis.T @ component.loadings, noise=values, removed=removed)


def _with_constant(component: Component, scaling: float) -> Component:
    """The component with one more feature, which is always `scaling`."""
    p, k = component.loadings.shape
    loadings = np.zeros((p + 1, k + 1))
    loadings[:p, :k], loadings[p, k] = component.loadings, scaling
    noise = component.noise
    noise = np.append(noise, 0.0) if noise.ndim == 1 else np.pad(noise, (0, 1))
    removed = None if component.removed is None else np.pad(component.removed, ((0, 1), (0, 0)))
    nodes = np.column_stack([component.nodes, np.ones(len(component.nodes))])
    return replace(component, loadings=loadings, nodes=nodes, noise=noise, removed=removed)
