"""The log marginal likelihood of a sparse Gaussian process, its gradient, and what a prediction needs of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import sparse

from cameraready.stats.gp2scale.algebra.errors import IndefiniteMatrix
from cameraready.stats.gp2scale.algebra.iterative import IterativeFactor, smallest_ritz_value
from cameraready.stats.gp2scale.algebra.system import Factor, System
from cameraready.stats.gp2scale.kernels.base import Entries, SparseKernel, mirror

# K itself must be positive semi-definite, not only K + V. Rounding perturbs its eigenvalues by a few units of n * 1e-16 of
# the largest; this share of the largest variance is above that for every n that fits, and far below the 1e-2 and more by which
# indefinite kernels fail.
PSD_JITTER = 1e-10

Assembler = Callable[[SparseKernel, bool], Entries]


class NotPositiveDefinite(ValueError):
    """A covariance matrix is not positive definite, so it has no likelihood.

    Attributes: kernel, the kernel at fault; reason, what was seen.
    """

    def __init__(self, kernel: Any, reason: str, advice: str):
        self.kernel, self.reason, self.advice = kernel, reason, advice
        super().__init__(f"the covariance of {kernel!r} is not positive definite: {reason}. {advice}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.kernel, self.reason, self.advice)


@dataclass(frozen=True)
class Evaluation:
    """A likelihood at one theta, with everything that was computed on the way.

    value; gradient (len(theta),) or None; kernel; noise (n,); mean, the learned constant (0 if it is not learned);
    weights (n,) = (K + V)^{-1} (y - mean); factor of K + V; ones (n,) = (K + V)^{-1} 1, None unless the mean is learned;
    density of K.
    """

    value: float
    gradient: np.ndarray | None
    kernel: SparseKernel
    noise: np.ndarray
    mean: float
    weights: np.ndarray
    ones: np.ndarray | None
    factor: Factor
    density: float


class LogLikelihood:
    """log N(y; mean, K(theta) + V) as a function of theta = [kernel's log-hyper-parameters, log noise if it is learned].

    Parameters
    ----------
    kernel: SparseKernel. X: n points. y: (n,), any given mean already subtracted.
    noise: (n,) variances, or None when one variance is learned as the last entry of theta.
    learn_mean: whether a constant mean is estimated by generalised least squares at every theta.
    system: how matrices are factored.
    assemble: (kernel, eval_gradient) -> entries of the upper triangle; None assembles here.
    """

    def __init__(
        self,
        kernel: SparseKernel,
        X: Any,
        y: np.ndarray,
        *,
        noise: np.ndarray | None,
        learn_mean: bool,
        system: System,
        assemble: Assembler | None = None,
    ):
        self.kernel, self.X, self.y = kernel, X, np.asarray(y, dtype=float)
        self.noise, self.learn_mean, self.system = noise, learn_mean, system
        self.assemble = assemble or self._assemble_here

    def _assemble_here(self, kernel: SparseKernel, eval_gradient: bool) -> Entries:
        return kernel.entries(self.X, None, eval_gradient)

    def __call__(self, theta: np.ndarray, eval_gradient: bool = False) -> Evaluation:
        """The likelihood at theta. Raises NotPositiveDefinite rather than return a value without meaning."""
        theta = np.asarray(theta, dtype=float)
        kernel, noise = self.split(theta)
        found = self.assemble(kernel, eval_gradient)
        factor = self._factor(kernel, found, noise)
        right = np.stack([self.y, np.ones_like(self.y)], axis=1) if self.learn_mean else self.y[:, None]
        solved = factor.solve(right)
        weights, ones, mean = solved[:, 0], None, 0.0
        if self.learn_mean:
            ones = solved[:, 1]
            mean = float(ones @ self.y / ones.sum())
            weights = weights - mean * ones
        n = len(self.y)
        value = -0.5 * ((self.y - mean) @ weights + factor.logdet + n * np.log(2 * np.pi))
        gradient = self._gradient(found, weights, factor, noise) if eval_gradient else None
        density = (2 * len(found.rows) - n) / n**2
        return Evaluation(float(value), gradient, kernel, noise, mean, weights, ones, factor, density)

    def split(self, theta: np.ndarray) -> tuple[SparseKernel, np.ndarray]:
        """The kernel and the noise variances (n,) that theta stands for."""
        size = len(self.kernel.theta)
        if len(theta) != size + (self.noise is None):
            raise ValueError(f"theta has {len(theta)} entries, expected {size + (self.noise is None)}")
        kernel = self.kernel.clone_with_theta(theta[:size])
        noise = np.full(len(self.y), np.exp(theta[-1])) if self.noise is None else self.noise
        return kernel, noise

    def _factor(self, kernel: SparseKernel, found: Entries, noise: np.ndarray) -> Factor:
        """The factor of K + V, after K itself has been checked unless its kernel is known to be positive semi-definite."""
        diagonal = found.rows == found.cols
        if not kernel.guaranteed:
            self._check(kernel, found, diagonal)
        values = found.values.copy()
        values[diagonal] += noise[found.rows[diagonal]]
        try:
            return self.system.factor(found.rows, found.cols, values)
        except IndefiniteMatrix as error:
            if kernel.guaranteed:
                advice = (
                    "The kernel is positive definite in exact arithmetic, but points this close at this length scale make "
                    f"its matrix singular in floating point: raise the noise (now {noise.min():.3g}), shorten the length "
                    "scale or take a lower smoothness."
                )
            else:
                advice = _advice(kernel)
            raise NotPositiveDefinite(kernel, f"K + noise: {error}", advice) from error

    def _check(self, kernel: SparseKernel, found: Entries, diagonal: np.ndarray) -> None:
        """Raise NotPositiveDefinite if K, without the noise that hides negative eigenvalues, has any."""
        values = found.values.copy()
        values[diagonal] += PSD_JITTER * max(float(values[diagonal].max(initial=0.0)), np.finfo(float).tiny)
        try:
            checked = self.system.factor(found.rows, found.cols, values)
            if isinstance(checked, IterativeFactor):
                self._check_by_lanczos(found, values)
        except IndefiniteMatrix as error:
            raise NotPositiveDefinite(kernel, f"K without noise: {error}", _advice(kernel)) from error

    def _check_by_lanczos(self, found: Entries, values: np.ndarray) -> None:
        rows, cols, both = mirror(found.rows, found.cols, values)
        matrix = sparse.csr_matrix((both, (rows, cols)), shape=(len(self.y),) * 2)
        smallest = smallest_ritz_value(matrix, seed=0)
        if smallest < 0:
            raise IndefiniteMatrix(f"it has an eigenvalue of {smallest:.3g} or less")

    def _gradient(self, found: Entries, weights: np.ndarray, factor: Factor, noise: np.ndarray) -> np.ndarray:
        """1/2 w' dK w - 1/2 tr((K + V)^{-1} dK): both need only the entries of dK's pattern."""
        diagonal = found.rows == found.cols
        difference = weights[found.rows] * weights[found.cols] - factor.inverse_entries()
        difference[diagonal] *= 0.5
        assert found.derivatives is not None
        gradient = [float(np.einsum("i,i->", difference, d)) for d in found.derivatives]
        if self.noise is None:
            gradient.append(float(difference[diagonal].sum() * noise[0]))
        return np.array(gradient)


def _advice(kernel: SparseKernel) -> str:
    if "PaperNonStationary" in repr(kernel):
        return "Use NonStationary, a product that is positive definite by construction."
    return (
        "Use kernels marked `guaranteed` (Wendland takes the degree that the dimension asks for, with the Euclidean distance); "
        "a product of your kernel with a valid one does not repair it."
    )
