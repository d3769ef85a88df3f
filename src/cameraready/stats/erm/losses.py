"""Convex losses with their proximal maps, and the smooth penalties whose curvature at zero the theory needs.

A classifier's label `y` is -1 or 1. ``prox(y, s, kappa)`` minimises ``value(y, z) + (z - s)^2 / (2 kappa)`` over `z`; it turns
the score of a point that the estimator has not seen into the score of the same point after it joined the training set.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
from scipy.special import expit

Array = np.ndarray


class Loss(Protocol):
    """What the fixed point needs of a loss; arrays broadcast, `kappa` is positive.

    `is_classification` says whether labels are -1 and 1, so that the test error is a share of wrong signs.
    """

    is_classification: bool

    def value(self, y: Array, z: Array) -> Array: ...

    def prox(self, y: Array, s: Array, kappa: float | Array) -> Array: ...


def smooth_prox(
    slope: Callable[[Array], Array],
    curvature: Callable[[Array], Array],
    s: Array,
    kappa: float | Array,
    *,
    tolerance: float = 1e-12,
    max_iter: int = 100,
) -> Array:
    """Root `z` of ``z - s + kappa * slope(z)`` for a non-decreasing `slope`, elementwise; Newton inside a bracket.

    Monotony puts the root between `s` and ``s - kappa * slope(s)``; a Newton step that leaves the
    bracket, or is not half as long as the step before, becomes a bisection.

    Raises
    ------
    ValueError
        If the root is not found, which means that the loss is not convex.
    """
    s = np.asarray(s, dtype=float)
    if (np.asarray(curvature(s)) < 0).any():
        raise ValueError("the loss must be convex, but its curvature is negative")
    step = kappa * slope(s)
    low, high = np.minimum(s, s - step), np.maximum(s, s - step)
    z, last = s - step / (1.0 + kappa * curvature(s)), high - low
    for _ in range(max_iter):
        residual = z - s + kappa * slope(z)
        low, high = np.where(residual < 0, z, low), np.where(residual > 0, z, high)
        newton = z - residual / (1.0 + kappa * curvature(z))
        done = np.abs(newton - z) <= tolerance * (1.0 + np.abs(z))  # also where rounding puts it outside the bracket
        fast = (newton > low) & (newton < high) & (np.abs(newton - z) < 0.5 * last)
        moved = np.where(done | fast, newton, 0.5 * (low + high))
        last, z = np.abs(moved - z), moved
        if done.all():
            return z
    raise ValueError(
        "the proximal map of the loss was not found: its slope must not decrease (the loss must be convex)"
    )


@dataclass(frozen=True)
class SquaredLoss:
    """(z - y)^2 / 2, the loss of `Ridge`, and of `RidgeClassifier` with ``is_classification=True``."""

    is_classification: bool = False

    def value(self, y: Array, z: Array) -> Array:
        return 0.5 * (z - y) ** 2

    def slope(self, y: Array, z: Array) -> Array:
        return z - y

    def curvature(self, y: Array, z: Array) -> Array:
        return np.ones(np.broadcast(y, z).shape)

    def prox(self, y: Array, s: Array, kappa: float | Array) -> Array:
        return (s + kappa * y) / (1.0 + kappa)


@dataclass(frozen=True)
class LogisticLoss:
    """log(1 + exp(-y z)), the loss of `LogisticRegression` with two classes."""

    is_classification: ClassVar[bool] = True

    def value(self, y: Array, z: Array) -> Array:
        return np.logaddexp(0.0, -y * z)

    def slope(self, y: Array, z: Array) -> Array:
        return -y * expit(-y * z)

    def curvature(self, y: Array, z: Array) -> Array:
        inside = expit(y * z)
        return inside * (1.0 - inside)

    def prox(self, y: Array, s: Array, kappa: float | Array) -> Array:
        sign = np.asarray(y, dtype=float)
        margin = smooth_prox(
            lambda m: -expit(-m), lambda m: expit(m) * expit(-m), *np.broadcast_arrays(sign * s, kappa)
        )
        return sign * margin


@dataclass(frozen=True)
class HingeLoss:
    """max(0, 1 - y z), the loss of `LinearSVC` with ``loss="hinge"`` and of `SVC` with a linear kernel."""

    is_classification: ClassVar[bool] = True

    def value(self, y: Array, z: Array) -> Array:
        return np.maximum(0.0, 1.0 - y * z)

    def prox(self, y: Array, s: Array, kappa: float | Array) -> Array:
        margin = y * s
        return y * np.where(margin >= 1.0, margin, np.minimum(margin + kappa, 1.0))


@dataclass(frozen=True)
class SquaredHingeLoss:
    """max(0, 1 - y z)^2, without a half: the loss of `LinearSVC` with ``loss="squared_hinge"``."""

    is_classification: ClassVar[bool] = True

    def value(self, y: Array, z: Array) -> Array:
        return np.maximum(0.0, 1.0 - y * z) ** 2

    def slope(self, y: Array, z: Array) -> Array:
        return -2.0 * y * np.maximum(0.0, 1.0 - y * z)

    def curvature(self, y: Array, z: Array) -> Array:
        return 2.0 * (y * z < 1.0)

    def prox(self, y: Array, s: Array, kappa: float | Array) -> Array:
        margin = y * s
        return y * np.where(margin >= 1.0, margin, (margin + 2.0 * kappa) / (1.0 + 2.0 * kappa))


@dataclass(frozen=True)
class HuberLoss:
    """r^2 / 2 for a residual r = y - z up to `delta` in size, then delta |r| - delta^2 / 2."""

    delta: float = 1.35
    is_classification: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not self.delta > 0:
            raise ValueError(f"delta must be positive, got {self.delta!r}")

    def value(self, y: Array, z: Array) -> Array:
        size = np.abs(y - z)
        return np.where(size <= self.delta, 0.5 * size**2, self.delta * (size - 0.5 * self.delta))

    def slope(self, y: Array, z: Array) -> Array:
        return np.clip(z - y, -self.delta, self.delta)

    def curvature(self, y: Array, z: Array) -> Array:
        return (np.abs(y - z) <= self.delta).astype(float)

    def prox(self, y: Array, s: Array, kappa: float | Array) -> Array:
        return s - kappa * np.clip((s - y) / (1.0 + kappa), -self.delta, self.delta)


@dataclass(frozen=True)
class ScaledHuberLoss:
    """Huber's loss with a scale that is estimated beside the coefficients, as `HuberRegressor` does.

    At the estimated scale sigma the coefficients minimise Huber's loss with delta = epsilon sigma and a penalty that is sigma
    times as strong; sigma itself makes the training mean of min((r / sigma)^2, epsilon^2) one.
    """

    epsilon: float = 1.35
    is_classification: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not self.epsilon > 1:
            raise ValueError(f"epsilon must be above 1, or no scale is consistent with it; got {self.epsilon!r}")

    def at(self, scale: float) -> HuberLoss:
        return HuberLoss(self.epsilon * scale)


@dataclass(frozen=True)
class SmoothLoss:
    """A convex loss of your own from its value, slope and curvature in z, each a function of (y, z) on arrays."""

    function: Callable[[Array, Array], Array]
    slope: Callable[[Array, Array], Array]
    curvature: Callable[[Array, Array], Array]
    is_classification: bool = False

    def value(self, y: Array, z: Array) -> Array:
        return self.function(y, z)

    def prox(self, y: Array, s: Array, kappa: float | Array) -> Array:
        y, s, kappa = np.broadcast_arrays(np.asarray(y, dtype=float), s, kappa)
        return smooth_prox(lambda z: self.slope(y, z), lambda z: self.curvature(y, z), s, kappa)


LOSSES: dict[str, Loss] = {
    "squared": SquaredLoss(),
    "logistic": LogisticLoss(),
    "hinge": HingeLoss(),
    "squared_hinge": SquaredHingeLoss(),
    "huber": HuberLoss(),
}


def named_loss(loss: str | Loss | ScaledHuberLoss) -> Loss | ScaledHuberLoss:
    """The loss of that name, or the loss itself.

    Raises
    ------
    ValueError
        For an unknown name, or for an object without `value` and `prox`.
    """
    if isinstance(loss, str):
        if loss not in LOSSES:
            raise ValueError(f"loss must be one of {', '.join(LOSSES)} or a loss object, got {loss!r}")
        return LOSSES[loss]
    if isinstance(loss, ScaledHuberLoss) or (hasattr(loss, "value") and hasattr(loss, "prox")):
        return loss
    raise ValueError(f"a loss needs the methods value and prox (see SmoothLoss), got {loss!r}")


@dataclass(frozen=True)
class SeparablePenalty:
    """sum_j value(theta_j) with two continuous derivatives; all functions work on arrays.

    The quadratic equivalent (Yaakoubi et al., 2026, arXiv:2604.03146) takes its curvature at zero for the fluctuations and its
    gradient at the mean. A penalty without a second derivative at zero (the l1 norm, the elastic net) has none, and is refused.
    """

    value: Callable[[Array], Array]
    gradient: Callable[[Array], Array]
    curvature: Callable[[Array], Array]

    def __post_init__(self) -> None:
        steps = np.array([-1e-4, -1e-6, 0.0, 1e-6, 1e-4])
        gradient, curvature = np.asarray(self.gradient(steps)), np.asarray(self.curvature(steps))
        slopes = np.diff(gradient) / np.diff(steps)
        smooth = np.isfinite(curvature).all() and np.allclose(slopes, curvature[2], rtol=1e-2, atol=1e-6)
        if not smooth:
            raise ValueError(
                "the penalty has no second derivative at zero (its gradient jumps or has a corner there, as that of the l1 norm);"
                " the quadratic equivalent needs one"
            )
        if (curvature < 0).any():
            raise ValueError("the penalty is not convex at zero: its curvature is negative")


def pseudo_huber_penalty(alpha: float) -> SeparablePenalty:
    """alpha * sum_j (sqrt(1 + theta_j^2) - 1): quadratic at zero, linear far away."""
    return SeparablePenalty(
        lambda t: alpha * (np.sqrt(1.0 + t * t) - 1.0),
        lambda t: alpha * t / np.sqrt(1.0 + t * t),
        lambda t: alpha * (1.0 + t * t) ** -1.5,
    )


def log_cosh_penalty(alpha: float) -> SeparablePenalty:
    """alpha * sum_j log cosh theta_j: quadratic at zero, linear far away."""
    return SeparablePenalty(
        lambda t: alpha * (np.logaddexp(t, -t) - np.log(2.0)),
        lambda t: alpha * np.tanh(t),
        lambda t: alpha / np.cosh(np.clip(t, -300, 300)) ** 2,
    )
