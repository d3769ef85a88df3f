"""The fixed point behind regularised empirical risk minimisation with as many features as samples, and its solution.

Re-derived by leaving one sample out (see the notes), for the statement of Yaakoubi, Louart, Tiomoko and Liao, 2026,
arXiv:2604.03146: the score of a fresh x is mu'x plus an independent N(0, v). Symbols as there: `mu` and C are the mean and covariance of
the coefficients, `kappa` what a sample's own presence adds to its score per unit of slope, `chi` the mean curvature of the loss
after that, P = R + chi Sigma with R the penalty's curvature at zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from scipy.linalg import cho_factor, cho_solve

from cameraready.stats.erm.laws import Array, Component
from cameraready.stats.erm.losses import Loss, SeparablePenalty

Fluctuations = Literal["by-component", "common"]
#: Trapezoid nodes for the normal part of a score; kinks of a loss cost the square of their distance.
FINE = np.linspace(-8.0, 8.0, 161)
COARSE = np.linspace(-8.0, 8.0, 41)
LARGEST = 1e8


class NoMinimiserError(ValueError):
    """The empirical risk has no minimiser at this size: it can be lowered for ever by growing coefficients."""


# --- matrices: a diagonal plus few rank-one terms, or dense ----------------------------------------------------------


@dataclass(frozen=True)
class LowRankPlusDiagonal:
    """diag(d) + U V', shapes (p,), (p, k), (p, k); sums, products and the inverse are of the same form."""

    d: Array
    U: Array
    V: Array

    def __add__(self, other: LowRankPlusDiagonal) -> LowRankPlusDiagonal:
        return LowRankPlusDiagonal(self.d + other.d, np.hstack([self.U, other.U]), np.hstack([self.V, other.V]))

    def __mul__(self, factor: float) -> LowRankPlusDiagonal:
        return LowRankPlusDiagonal(factor * self.d, factor * self.U, self.V)

    def __matmul__(self, other: LowRankPlusDiagonal) -> LowRankPlusDiagonal:
        right = other.d[:, None] * self.V + other.V @ (other.U.T @ self.V)
        return LowRankPlusDiagonal(
            self.d * other.d, np.hstack([self.d[:, None] * other.U, self.U]), np.hstack([other.V, right])
        )

    def apply(self, x: Array) -> Array:
        return self.d * x + self.U @ (self.V.T @ x)

    def trace_with(self, other: LowRankPlusDiagonal) -> float:
        product = self @ other
        return float(product.d.sum() + (product.U * product.V).sum())

    def diagonal(self) -> Array:
        return self.d + (self.U * self.V).sum(axis=1)

    def inverse(self) -> LowRankPlusDiagonal:
        # A coordinate without diagonal (an unpenalised intercept) borrows one, which the low-rank part gives back.
        borrow = np.flatnonzero(self.d <= 1e-12 * self.d.max())
        unit = np.zeros((len(self.d), len(borrow)))
        unit[borrow, np.arange(len(borrow))] = 1.0
        loan = self.d.max()
        d = self.d.copy()
        d[borrow] += loan
        U, V = np.hstack([self.U, -loan * unit]), np.hstack([self.V, unit])
        left = U / d[:, None]
        inner = np.linalg.solve(np.eye(U.shape[1]) + V.T @ left, (V / d[:, None]).T)
        return LowRankPlusDiagonal(1.0 / d, -left, inner.T)

    def dense(self) -> Array:
        return np.diag(self.d) + self.U @ self.V.T


@dataclass(frozen=True)
class Dense:
    """A matrix (p, p), with the same operations."""

    matrix: Array

    def __add__(self, other: Dense) -> Dense:
        return Dense(self.matrix + other.matrix)

    def __mul__(self, factor: float) -> Dense:
        return Dense(factor * self.matrix)

    def __matmul__(self, other: Dense) -> Dense:
        return Dense(self.matrix @ other.matrix)

    def apply(self, x: Array) -> Array:
        return self.matrix @ x

    def trace_with(self, other: Dense) -> float:
        return float((self.matrix * other.matrix.T).sum())

    def diagonal(self) -> Array:
        return np.diag(self.matrix).copy()

    def inverse(self) -> Dense:
        return Dense(cho_solve(cho_factor(self.matrix), np.eye(len(self.matrix))))

    def dense(self) -> Array:
        return self.matrix


Matrix = LowRankPlusDiagonal | Dense


# --- the system in coordinates ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """A component in the coordinates of the solver: second moment E[x x'] and the covariance of `w`, as matrices."""

    weight: float
    loadings: Array
    nodes: Array
    labels: Array
    node_weights: Array
    second: Matrix
    noise: Matrix


def assemble(components: Sequence[Component]) -> list[Part]:
    """Components as parts; dense where one of them has a dense covariance."""
    dense = any(component.noise.ndim == 2 for component in components)
    parts = []
    for c in components:
        p = len(c.loadings)
        moment = (c.nodes * c.node_weights[:, None]).T @ c.nodes
        removed = np.zeros((p, 0)) if c.removed is None else c.removed
        if dense:
            base = c.noise_scale * (np.diag(c.noise) if c.noise.ndim == 1 else c.noise)
            noise: Matrix = Dense(base - removed @ removed.T)
            second: Matrix = Dense(noise.dense() + c.loadings @ moment @ c.loadings.T)
        else:
            d = c.noise_scale * c.noise
            noise = LowRankPlusDiagonal(d, -removed, removed)
            second = LowRankPlusDiagonal(
                d, np.hstack([-removed, c.loadings @ moment]), np.hstack([removed, c.loadings])
            )
        parts.append(Part(c.weight, c.loadings, c.nodes, c.labels, c.node_weights, second, noise))
    return parts


@dataclass(frozen=True)
class Solution:
    """The fixed point, in the solver's coordinates.

    `mu` (p,); `kappa`, `chi`, `v`, `slope_square` (E xi^2) and `sd` (of the normal part of a score) a number a component; `covariance`
    is C; `residual` the largest relative change of the last iteration.
    """

    mu: Array
    kappa: Array
    chi: Array
    v: Array
    slope_square: Array
    sd: Array
    covariance: Matrix
    n_iter: int
    converged: bool
    residual: float


@dataclass(frozen=True)
class System:
    """The equations for `parts`, `loss`, the curvature `ridge` (p,) of the penalty at zero, and `n` samples.

    With `penalty` the gradient at the mean is the penalty's, otherwise ``ridge * mu`` (an l2 penalty); `penalised` marks the
    coordinates that the penalty sees. `fluctuations` "common" is the paper's statement with one v for all rows; "by-component" lets v
    and kappa follow the second moment of each component, which matters where the components differ in it.
    """

    parts: Sequence[Part]
    loss: Loss
    ridge: Array
    n: float
    penalty: SeparablePenalty | None = None
    penalised: Array | None = None
    fluctuations: Fluctuations = "by-component"

    def scores(self, mu: Array, v: Array) -> list[tuple[Array, float]]:
        """For each part: centres of the score at its nodes (m,), and the standard deviation of its normal part."""
        found = []
        for part, v_part in zip(self.parts, v, strict=True):
            spread = max(float(mu @ part.noise.apply(mu)), 0.0)
            found.append((part.nodes @ (part.loadings.T @ mu), float(np.sqrt(spread + v_part))))
        return found

    def slopes(self, part: Part, centre: Array, sd: float, kappa: float) -> tuple[float, float, Array]:
        """chi, E xi^2 and E[u xi] of a part."""
        g = FINE if len(centre) <= 64 else COARSE
        g_weights = np.exp(-0.5 * g * g)
        g_weights /= g_weights.sum()
        s = centre[:, None] + sd * g
        xi = (s - self.loss.prox(part.labels[:, None], s, kappa)) / kappa
        mean = xi @ g_weights
        # Stein's identity: E[d xi / d s] without a second derivative, which hinge and Huber lack.
        chi = float(part.node_weights @ (xi @ (g * g_weights))) / sd
        square = float(part.node_weights @ (xi**2 @ g_weights))
        return max(chi, 1e-12), square, part.nodes.T @ (part.node_weights * mean)

    def penalty_gradient(self, mu: Array) -> tuple[Array, Array]:
        """Gradient and curvature of the penalty at mu, (p,) each."""
        if self.penalty is None:
            return self.ridge * mu, self.ridge
        seen = np.ones(len(mu), bool) if self.penalised is None else self.penalised
        return np.where(seen, self.penalty.gradient(mu), 0.0), np.where(seen, self.penalty.curvature(mu), 0.0)

    def diagonal(self, d: Array) -> Matrix:
        if isinstance(self.parts[0].noise, Dense):
            return Dense(np.diag(d))
        return LowRankPlusDiagonal(d, np.zeros((len(d), 0)), np.zeros((len(d), 0)))

    def step(self, mu: Array, v: Array, kappa: Array) -> tuple[Array, Array, Array, Array, Array, Matrix]:
        """One application of the map: new mu, v, kappa, and chi, E xi^2 and C at the old ones."""
        weights = np.array([part.weight for part in self.parts])
        scored = self.scores(mu, v)
        found = [self.slopes(part, *score, k) for part, score, k in zip(self.parts, scored, kappa, strict=True)]
        chi, square = np.array([f[0] for f in found]), np.array([f[1] for f in found])
        gradient, curvature = self.penalty_gradient(mu)
        for part, (chi_part, _, moment) in zip(self.parts, found, strict=True):
            gradient = gradient + part.weight * (part.loadings @ moment + chi_part * part.noise.apply(mu))
        hessian = weighted_sum(self.parts, weights * chi)
        inverse = (hessian + self.diagonal(self.ridge)).inverse()
        newton = inverse if curvature is self.ridge else (hessian + self.diagonal(curvature)).inverse()
        cov = inverse @ weighted_sum(self.parts, weights * square) @ inverse * (1.0 / self.n)
        new_kappa = np.array([part.second.trace_with(inverse) for part in self.parts]) / self.n
        new_v = np.array([part.second.trace_with(cov) for part in self.parts])
        if self.fluctuations == "common":
            new_kappa, new_v = np.full_like(new_kappa, weights @ new_kappa), np.full_like(new_v, weights @ new_v)
        return mu - newton.apply(gradient), new_v, new_kappa, chi, square, cov

    def solve(self, *, tol: float = 1e-8, max_iter: int = 500, start: Solution | None = None) -> Solution:
        """The fixed point by Anderson-accelerated iteration on (mu, log v, log kappa).

        O(m) proximal maps an iteration for m quadrature nodes, and O(p) algebra, or O(p^3) with dense covariances.

        Raises
        ------
        NoMinimiserError
            If `kappa` or the coefficients grow without bound.
        """
        x = self._start() if start is None else np.concatenate([start.mu, np.log(start.v), np.log(start.kappa)])
        p, c = len(self.ridge), len(self.parts)
        history: list[tuple[Array, Array]] = []
        residual = np.inf
        n_iter = 0
        while residual >= tol and n_iter < max_iter:
            n_iter += 1
            mu, v, kappa = x[:p], np.exp(x[p : p + c]), np.exp(x[p + c :])
            self._check(mu, v, kappa)
            new_mu, new_v, new_kappa, chi, square, cov = self.step(mu, v, kappa)
            change = np.concatenate([new_mu, np.log(np.maximum(new_v, 1e-300)), np.log(new_kappa)]) - x
            scale = np.concatenate([np.full(p, max(1e-12, float(np.linalg.norm(new_mu)))), np.ones(2 * c)])
            residual = float(np.abs(change / scale).max())
            x = anderson(x, change, history, p)
        sd = np.array([score[1] for score in self.scores(mu, v)])
        return Solution(mu, kappa, chi, v, square, sd, cov, n_iter, residual < tol, residual)

    def _start(self) -> Array:
        scale = np.array([part.second.diagonal().sum() for part in self.parts]) / self.n
        kappa = np.log(np.maximum(scale, 1e-12)) - np.log(float(self.ridge.max()) + 0.5)
        return np.concatenate([np.zeros(len(self.ridge)), np.full(len(self.parts), np.log(0.1)), kappa])

    def _check(self, mu: Array, v: Array, kappa: Array) -> None:
        weighted = np.array([np.sqrt(max(mu @ part.second.apply(mu), 0.0)) for part in self.parts])
        curved = float(self.ridge[self.ridge > 0].min(initial=np.inf))
        unbounded = weighted.max() > LARGEST or v.max() > LARGEST**2
        if not np.isfinite(mu).all() or unbounded or (np.isinf(curved) and kappa.max() > LARGEST):
            raise NoMinimiserError(
                "the fixed point runs away: at this number of samples the data can be fitted without error (separated) with high"
                " probability, and the loss without a penalty has no minimiser; use alpha > 0 or more samples"
            )


def weighted_sum(parts: Sequence[Part], factors: Array) -> Matrix:
    total = parts[0].second * float(factors[0])
    for part, factor in zip(parts[1:], factors[1:], strict=True):
        total = total + part.second * float(factor)
    return total


def anderson(
    x: Array, change: Array, history: list[tuple[Array, Array]], p: int, *, window: int = 6, damping: float = 0.7
) -> Array:
    """The next iterate from the last few (x, change), which are updated in place; log v and log kappa move at most by 2."""
    if history and np.linalg.norm(change) > 2.0 * np.linalg.norm(history[-1][1]):
        history.clear()  # the model of the map was wrong here
    history.append((x, change))
    del history[: -window - 1]
    step = damping * change
    if len(history) > 1:
        d_x = np.stack([b[0] - a[0] for a, b in pairwise(history)], axis=1)
        d_r = np.stack([b[1] - a[1] for a, b in pairwise(history)], axis=1)
        weights = np.linalg.lstsq(d_r, change, rcond=1e-10)[0]
        step = step - (d_x + damping * d_r) @ weights
    step[p:] = np.clip(step[p:], -2.0, 2.0)
    return x + step
