"""Kernels whose smoothness and signal change over space: the safe product, and the paper's own."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.gaussian_process.kernels import Hyperparameter, Kernel

from cameraready.stats.gp2scale.kernels.base import count_points
from cameraready.stats.gp2scale.kernels.neighbours import as_points, close_pairs
from cameraready.stats.gp2scale.kernels.nested import Parts
from cameraready.stats.gp2scale.kernels.wendland import wendland, wendland_slope

Values = tuple[np.ndarray, list[np.ndarray]]


class _Varying(Parts):
    """What both kernels share: a length-scale field and a signal field."""

    part_names = ("length_scale", "signal")

    def _field(self, name: str, X: np.ndarray, eval_gradient: bool) -> tuple[np.ndarray, np.ndarray]:
        """A field's values (n,) or (n, d), and its log-derivatives (n, K), K = 0 unless it is learned."""
        given, n = getattr(self, name), count_points(X)
        nothing = np.empty((n, 0))
        if isinstance(given, Kernel):
            if eval_gradient and len(given.theta):
                return given(X, eval_gradient=True)
            return given(X), nothing
        values = np.asarray(given(X) if callable(given) else np.full(n, given), dtype=float)
        allowed = [(n,), X.shape] if name == "length_scale" else [(n,)]
        if values.shape not in allowed or not np.isfinite(values).all() or not (values > 0).all():
            raise ValueError(f"{name} must give {n} finite values above 0, got an array of shape {values.shape}")
        return values, nothing


class NonStationary(_Varying):
    """signal(x) signal(x') * Gibbs kernel with length_scale(x) * Wendland of fixed radius. Positive semi-definite.

    The first factor is the Gaussian kernel of Gibbs (1997) and Paciorek and Schervish (2004), valid in every dimension; the
    second gives the zeros; their product is valid by Schur's theorem. This is eq. (4) of Noack et al. (2026) with a
    non-stationary core, and the replacement for their eq. (6), which is not positive definite (see PaperNonStationary).

    Parameters
    ----------
    length_scale: of the Gaussian factor: a fixed number, a callable X -> (n,) or (n, d), or a `Field`, which is learned.
    signal: the standard deviation: a fixed number, a callable X -> (n,), or a `Field`.
    radius: of the Wendland factor's support, in units of the inputs.
    smoothness: of the Wendland factor.
    radius_bounds: bounds for the radius' optimisation, or "fixed".
    """

    def __init__(
        self,
        length_scale: Any = 1.0,
        signal: Any = 1.0,
        radius: float = 1.0,
        smoothness: int = 1,
        *,
        radius_bounds: Any = (1e-5, 1e5),
    ):
        self.length_scale = length_scale
        self.signal = signal
        self.radius = radius
        self.smoothness = smoothness
        self.radius_bounds = radius_bounds

    @property
    def hyperparameter_radius(self) -> Hyperparameter:
        return Hyperparameter("radius", "numeric", self.radius_bounds)

    def support(self, X: Any, Y: Any = None) -> tuple[np.ndarray, np.ndarray]:
        if not (np.isfinite(self.radius) and self.radius > 0):
            raise ValueError(f"radius must be finite and above 0, got {self.radius}")
        return close_pairs(as_points(X), None if Y is None else as_points(Y), self.radius)

    def pairs(self, X: Any, Y: Any, rows: np.ndarray, cols: np.ndarray, eval_gradient: bool = False) -> Values:
        first, second = as_points(X), as_points(Y)
        squares = np.square(first[rows] - second[cols])
        l_i, w_i = self._field("length_scale", first, eval_gradient)
        l_j, w_j = self._field("length_scale", second, eval_gradient)
        s_i, u_i = self._field("signal", first, eval_gradient)
        s_j, u_j = self._field("signal", second, eval_gradient)
        a, b = (_columns(f, i, squares.shape[1]) for f, i in ((l_i, rows), (l_j, cols)))
        total = a * a + b * b
        core = np.sqrt(np.prod(2 * a * b / total, axis=1)) * np.exp(-(squares / total).sum(axis=1))
        core *= s_i[rows] * s_j[cols]
        r = np.sqrt(squares.sum(axis=1)) / self.radius
        taper = wendland(r, first.shape[1], self.smoothness)
        values = core * taper
        if not eval_gradient:
            return values, []
        slopes = []
        if w_i.shape[1]:
            shared = squares / total**2
            by_i = values * (0.5 - a * a / total + 2 * a * a * shared).sum(axis=1)
            by_j = values * (0.5 - b * b / total + 2 * b * b * shared).sum(axis=1)
            slopes += [by_i * x[rows] + by_j * y[cols] for x, y in zip(w_i.T, w_j.T, strict=True)]
        slopes += [values * (x[rows] + y[cols]) for x, y in zip(u_i.T, u_j.T, strict=True)]
        if not self.hyperparameter_radius.fixed:
            slopes.append(core * wendland_slope(r, first.shape[1], self.smoothness) * r * r)
        return values, slopes

    def __repr__(self) -> str:
        return f"NonStationary(length_scale={_name(self.length_scale)}, signal={_name(self.signal)}, radius={self.radius:.3g})"


class PaperNonStationary(_Varying):
    """The paper's non-stationary kernel, eq. (6) of Noack et al. (2026), kept for comparison: NOT positive definite.

    signal(x) signal(x') |S|^{1/4} |S'|^{1/4} / |(S + S')/2|^{1/2} Wendland(sqrt(Q)), Q = d' ((S + S')/2)^{-1} d, with
    S = diag(length_scale(x)^2). The theorem behind this form needs a correlation function that is valid in every dimension,
    and no compactly supported function is. The regressor checks each matrix and raises NotPositiveDefinite instead of
    returning a likelihood from an indefinite one. Use NonStationary.

    Parameters
    ----------
    length_scale: the radius of the support around each point: a number, a callable X -> (n,) or (n, d), or a `Field`.
    signal: the standard deviation: a number, a callable X -> (n,), or a `Field`.
    smoothness: of the Wendland function; 3 is the paper's.
    """

    guaranteed = False

    def __init__(self, length_scale: Any = 1.0, signal: Any = 1.0, smoothness: int = 3):
        self.length_scale = length_scale
        self.signal = signal
        self.smoothness = smoothness

    def support(self, X: Any, Y: Any = None) -> tuple[np.ndarray, np.ndarray]:
        points = as_points(X)
        other = None if Y is None else as_points(Y)
        reach = max(float(np.max(self._field("length_scale", x, False)[0])) for x in (points, other) if x is not None)
        # Q < 1 needs |d|^2 < (l^2 + l'^2) / 2 <= reach^2; pairs that prove to be zero are dropped after evaluation.
        return close_pairs(points, other, reach)

    def pairs(self, X: Any, Y: Any, rows: np.ndarray, cols: np.ndarray, eval_gradient: bool = False) -> Values:
        first, second = as_points(X), as_points(Y)
        squares = np.square(first[rows] - second[cols])
        l_i, w_i = self._field("length_scale", first, eval_gradient)
        l_j, w_j = self._field("length_scale", second, eval_gradient)
        s_i, u_i = self._field("signal", first, eval_gradient)
        s_j, u_j = self._field("signal", second, eval_gradient)
        a, b = (_columns(f, i, squares.shape[1]) for f, i in ((l_i, rows), (l_j, cols)))
        mean = (a * a + b * b) / 2
        r = np.sqrt((squares / mean).sum(axis=1))
        front = np.sqrt(np.prod(a * b / mean, axis=1)) * s_i[rows] * s_j[cols]
        values = front * wendland(r, first.shape[1], self.smoothness)
        slopes = []
        if w_i.shape[1]:
            slope = front * wendland_slope(r, first.shape[1], self.smoothness)
            shared = squares / mean**2
            by_i = values * (0.5 - a * a / (2 * mean)).sum(axis=1) + slope * (a * a * shared / 2).sum(axis=1)
            by_j = values * (0.5 - b * b / (2 * mean)).sum(axis=1) + slope * (b * b * shared / 2).sum(axis=1)
            slopes += [by_i * x[rows] + by_j * y[cols] for x, y in zip(w_i.T, w_j.T, strict=True)]
        slopes += [values * (x[rows] + y[cols]) for x, y in zip(u_i.T, u_j.T, strict=True)]
        return values, slopes

    def __repr__(self) -> str:
        return f"PaperNonStationary(length_scale={_name(self.length_scale)}, signal={_name(self.signal)})"


def _columns(field: np.ndarray, index: np.ndarray, width: int) -> np.ndarray:
    """The field at the pairs, (m, d); an isotropic field is repeated."""
    here = field[index]
    return np.broadcast_to(here[:, None], (len(here), width)) if here.ndim == 1 else here


def _name(field: Any) -> str:
    return getattr(field, "__name__", repr(field))
