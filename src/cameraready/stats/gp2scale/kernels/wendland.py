"""Wendland's compactly supported kernels, of the degree that the dimension of the input asks for."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.gaussian_process.kernels import Hyperparameter

from cameraready.stats.gp2scale.kernels.base import SparseKernel
from cameraready.stats.gp2scale.kernels.neighbours import as_points, close_pairs


class Wendland(SparseKernel):
    """phi(r) with r the Euclidean distance over the length scale; exactly zero from r = 1 on.

    For input dimension d and smoothness s the degree is l = floor(d / 2) + s + 1, the smallest for which the function is
    positive definite on R^d (Wendland, 2005, Theorem 9.13). Smoothness 3 is the family of gp2Scale (Noack et al., 2026,
    arXiv:2512.06143, eq. 3), whose printed degree holds up to three dimensions only. The kernel is 2s times
    continuously differentiable, so functions drawn from it are s times mean-square differentiable.

    Parameters
    ----------
    length_scale: the radius of the support, in units of the inputs: a number, or one for each dimension (d,).
    smoothness: 0, 1, 2 or 3.
    length_scale_bounds: bounds for its optimisation, or "fixed".
    """

    def __init__(self, length_scale: Any = 1.0, smoothness: int = 1, *, length_scale_bounds: Any = (1e-5, 1e5)):
        self.length_scale = length_scale
        self.smoothness = smoothness
        self.length_scale_bounds = length_scale_bounds

    @property
    def hyperparameter_length_scale(self) -> Hyperparameter:
        if np.ndim(self.length_scale):
            return Hyperparameter("length_scale", "numeric", self.length_scale_bounds, len(self.length_scale))
        return Hyperparameter("length_scale", "numeric", self.length_scale_bounds)

    def support(self, X: Any, Y: Any = None) -> tuple[np.ndarray, np.ndarray]:
        points = as_points(X)
        scale = self._scale(points)
        return close_pairs(points / scale, None if Y is None else _same_width(Y, points) / scale)

    def pairs(
        self, X: Any, Y: Any, rows: np.ndarray, cols: np.ndarray, eval_gradient: bool = False
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        points = as_points(X)
        scaled = (points[rows] - _same_width(Y, points)[cols]) / self._scale(points)
        np.square(scaled, out=scaled)
        r = np.sqrt(scaled.sum(axis=1))
        dimension = points.shape[1]
        values = wendland(r, dimension, self.smoothness)
        if not eval_gradient or self.hyperparameter_length_scale.fixed:
            return values, []
        slope = wendland_slope(r, dimension, self.smoothness)
        if np.ndim(self.length_scale):
            return values, [slope * column for column in scaled.T]
        return values, [slope * r * r]

    def diag(self, X: Any) -> np.ndarray:
        points = as_points(X)
        self._scale(points), _degree(points.shape[1], self.smoothness)
        return np.ones(len(points))

    def is_stationary(self) -> bool:
        return True

    def _scale(self, points: np.ndarray) -> np.ndarray:
        """The length scale, checked against the points' dimension."""
        scale = np.asarray(self.length_scale, dtype=float)
        if not (np.isfinite(scale).all() and (scale > 0).all()):
            raise ValueError(f"length_scale must be finite and above 0, got {self.length_scale}")
        if scale.ndim and len(scale) != points.shape[1]:
            raise ValueError(f"length_scale has {len(scale)} entries, but the points have {points.shape[1]} columns")
        return scale

    def __repr__(self) -> str:
        scale = np.array2string(np.asarray(self.length_scale), precision=3, separator=", ")
        return f"Wendland(length_scale={scale}, smoothness={self.smoothness})"


def wendland(r: np.ndarray, dimension: int, smoothness: int) -> np.ndarray:
    """phi(r), 1 at r = 0 and exactly 0 for r >= 1, positive definite on R^dimension."""
    degree = _degree(dimension, smoothness)
    rest = np.maximum(1.0 - r, 0.0)
    return _power(rest, degree + smoothness) * _polynomial(r, degree, smoothness)


def wendland_slope(r: np.ndarray, dimension: int, smoothness: int) -> np.ndarray:
    """-phi'(r) / r, which is what every derivative by a length scale is made of; finite at 0 for smoothness >= 1.

    phi_s is the integral operator of phi_{s-1}, so its derivative is -r times phi_{s-1} of the same degree.
    At smoothness 0 the quotient is infinite at r = 0 and always meets a factor that is 0 there; 0 is returned.
    """
    degree = _degree(dimension, smoothness)
    rest = np.maximum(1.0 - r, 0.0)
    if smoothness == 0:
        inverse = np.divide(1.0, r, out=np.zeros_like(r), where=r > 0)
        return degree * _power(rest, degree - 1) * (r < 1) * inverse
    lower = smoothness - 1
    factor = (degree + 2 * lower + 1) * (degree + 2 * lower + 2) / (2 * lower + 1)
    return factor * _power(rest, degree + lower) * _polynomial(r, degree, lower)


def _degree(dimension: int, smoothness: int) -> int:
    if isinstance(smoothness, float) or smoothness not in (0, 1, 2, 3):
        raise ValueError(f"smoothness must be 0, 1, 2 or 3, got {smoothness!r}")
    return dimension // 2 + smoothness + 1


def _polynomial(r: np.ndarray, degree: int, smoothness: int) -> Any:
    """The polynomial part, 1 at r = 0; `degree` is the l of the literature."""
    k = degree
    if smoothness == 0:
        return 1.0
    if smoothness == 1:
        return (k + 1) * r + 1.0
    if smoothness == 2:
        return ((k * k + 4 * k + 3) * r + (3 * k + 6)) * r / 3 + 1.0
    cubic, square = k**3 + 9 * k**2 + 23 * k + 15, 6 * k**2 + 36 * k + 45
    return ((cubic * r + square) * r + (15 * k + 45)) * r / 15 + 1.0


def _power(base: np.ndarray, exponent: int) -> np.ndarray:
    """base ** exponent by squaring: several times faster than the floating-point power."""
    result = np.ones_like(base)
    square = base
    while exponent:
        if exponent & 1:
            result = result * square
        exponent >>= 1
        if exponent:
            square = square * square
    return result


def _same_width(Y: Any, points: np.ndarray) -> np.ndarray:
    other = as_points(Y)
    if other.shape[1] != points.shape[1]:
        raise ValueError(f"X has {points.shape[1]} columns, but Y has {other.shape[1]}")
    return other
