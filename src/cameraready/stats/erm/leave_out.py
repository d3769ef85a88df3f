"""What each training row's own presence did to its score, from one fit: leave-one-out without refitting.

The score of row i under the model fitted without it is ``z_i + kappa_i * xi_i`` with z_i its score in the fit, xi_i the slope of its loss
there and ``kappa_i = x_i' Q_i x_i / n``, where Q_i inverts the Hessian of the other rows' risk (Rad and Maleki, 2020, arXiv:1801.10243, for
the row's own kappa; the theory says that all rows of a class share one).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.linalg import LinAlgError, cholesky, solve_triangular

from cameraready.stats.erm.laws import Array
from cameraready.stats.erm.losses import HingeLoss, Loss

#: A row that keeps less than this of its residual is interpolated: leaving it out cannot be told from one fit.
INTERPOLATED = 1e-9


@dataclass(frozen=True)
class Influence:
    """The inverse Hessian of a fitted risk as seen by the rows: G = X Q X' / n, through `factor` with G = factor' factor.

    Attributes
    ----------
    factor : ndarray of shape (r, n)
    curvature : ndarray of shape (n,)
        L'' of each row at its fitted score.
    """

    factor: Array
    curvature: Array

    @classmethod
    def of(cls, X: Array, curvature: Array, alpha: float, *, free_intercept: bool) -> Influence:
        """O(n p min(n, p)). `X` (n, p) holds penalised features; an unpenalised intercept is added by `free_intercept`.

        Raises
        ------
        ValueError
            If no row has curvature, so that a free intercept is undetermined.
        """
        n, p = X.shape
        if free_intercept and not curvature.any():
            raise ValueError("no row's loss is curved at the fit, so that the intercept is not determined by it")
        if p <= n or alpha == 0:
            return cls(_by_features(X, curvature, alpha, free_intercept), curvature)
        return cls(_by_rows(X, curvature, alpha, free_intercept), curvature)

    def leverages(self) -> Array:
        """G_ii, (n,)."""
        return np.einsum("ri,ri->i", self.factor, self.factor)

    def kappas(self) -> Array:
        """kappa_i = x_i' Q_i x_i / n with row i left out of Q, (n,).

        Raises
        ------
        ValueError
            If the fit goes through a row whatever its label is (as many free parameters as rows).
        """
        leverage = self.leverages()
        kept = 1.0 - self.curvature * leverage
        if (kept < INTERPOLATED).any():
            raise ValueError(
                f"{int((kept < INTERPOLATED).sum())} rows are fitted exactly whatever their label is (as many parameters as rows, and no"
                " penalty): their error cannot be estimated from the fit; use a penalty, fewer features, or cross-validation"
            )
        return leverage / kept


def _by_features(X: Array, curvature: Array, alpha: float, free_intercept: bool) -> Array:
    n, p = X.shape
    rows = np.column_stack([X, np.ones(n)]) if free_intercept else X
    hessian = (rows * curvature[:, None]).T @ rows / n
    hessian[np.arange(p), np.arange(p)] += alpha
    try:
        if alpha == 0:
            raise LinAlgError  # collinear columns leave a Hessian that only rounding makes definite
        return solve_triangular(cholesky(hessian, lower=True), rows.T, lower=True) / np.sqrt(n)
    except LinAlgError:
        scale = np.sqrt(np.maximum(np.diag(hessian), 1e-300))
        values, vectors = np.linalg.eigh(hessian / np.outer(scale, scale))
        kept = values > 1e-10 * values[-1]
        return (vectors[:, kept] / np.sqrt(values[kept])).T @ (rows / scale).T / np.sqrt(n)


def _by_rows(X: Array, curvature: Array, alpha: float, free_intercept: bool) -> Array:
    """The same from the rows' Gram matrix, for more features than rows."""
    n = len(X)
    kernel = X @ X.T / (n * alpha)
    root = np.sqrt(curvature)
    lower = cholesky(np.eye(n) + root[:, None] * kernel * root, lower=True)
    half = solve_triangular(lower, root[:, None] * kernel, lower=True)
    response = kernel - half.T @ half
    if free_intercept:
        left = 1.0 - response @ curvature
        response += np.outer(left, left) / (curvature @ left)
    values, vectors = np.linalg.eigh(response)
    kept = values > 0
    return (vectors[:, kept] * np.sqrt(values[kept])).T


@dataclass(frozen=True)
class FittedRows:
    """Rows of a fitted model: labels, scores in the fit, slopes of the loss (xi) and the influence, in the solver's coordinates."""

    y: Array
    z: Array
    slope: Array
    influence: Influence

    def left_out(self, kappa: Array) -> Array:
        """Scores under the model without the row: z + kappa xi, (n,)."""
        return self.z + kappa * self.slope


def fitted_rows(
    X: Array,
    y: Array,
    coef: Array,
    offset: float,
    loss: Loss,
    alpha: float,
    *,
    free_intercept: bool,
    kink: float = 1e-6,
) -> FittedRows:
    """The rows of the fit ``z = X coef + offset``; `kink` is how near to the hinge's corner a margin counts as at it."""
    z = X @ coef + offset
    if isinstance(loss, HingeLoss):
        return _hinge_rows(X, y, z, coef, alpha, free_intercept, kink)
    slope, curvature = loss.slope(y, z), loss.curvature(y, z)  # type: ignore[attr-defined]
    return FittedRows(y, z, slope, Influence.of(X, curvature, alpha, free_intercept=free_intercept))


def _hinge_rows(
    X: Array, y: Array, z: Array, coef: Array, alpha: float, free_intercept: bool, kink: float
) -> FittedRows:
    """At the corner the slope lies between -y and 0: stationarity gives it; the curvature there is infinite, here very large."""
    n = len(X)
    at_corner = np.abs(1.0 - y * z) <= kink
    slope = np.where(~at_corner & (y * z < 1.0), -y, 0.0)
    if at_corner.any():
        rows = np.column_stack([X, np.ones(n)]) if free_intercept else X
        pull = np.append(n * alpha * coef, 0.0) if free_intercept else n * alpha * coef
        solved = np.linalg.lstsq(rows[at_corner].T, -(pull + rows.T @ slope), rcond=None)[0]
        slope[at_corner] = -y[at_corner] * np.clip(-y[at_corner] * solved, 0.0, 1.0)
    typical = float(np.einsum("ij,ij->", X, X)) / (n * n * alpha)
    curvature = np.where(at_corner, 1e5 / max(typical, 1e-300), 0.0)
    return FittedRows(y, z, slope, Influence.of(X, curvature, alpha, free_intercept=free_intercept))
