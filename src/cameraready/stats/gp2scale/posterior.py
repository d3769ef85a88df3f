"""The posterior of a sparse Gaussian process at new points, and exact draws from its prior."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

from cameraready.stats.gp2scale.algebra.errors import IndefiniteMatrix
from cameraready.stats.gp2scale.algebra.multifrontal import MultifrontalFactor
from cameraready.stats.gp2scale.algebra.system import System
from cameraready.stats.gp2scale.kernels.base import SparseKernel, count_points
from cameraready.stats.gp2scale.likelihood import Evaluation, NotPositiveDefinite


class EmptyNeighbourhood(UserWarning):
    """Points are out of reach of all training points, so their prediction is the prior mean."""


@dataclass(frozen=True)
class Posterior:
    """What predictions need: the likelihood's evaluation at the chosen theta, and the training points."""

    evaluation: Evaluation
    X_train: Any

    def predict(self, X: Any, *, variance: bool) -> tuple[np.ndarray, np.ndarray | None, int]:
        """The mean of y - given mean (m,), the latent variance (m,) or None, and how many points have no neighbour."""
        at = self.evaluation
        cross = at.kernel(X, self.X_train)
        empty = int((np.diff(cross.indptr) == 0).sum())
        mean = at.mean + cross @ at.weights
        if not variance:
            return mean, None, empty
        spread = at.kernel.diag(X) - at.factor.quadratic(cross)
        if at.ones is not None:
            spread += (1 - cross @ at.ones) ** 2 / at.ones.sum()
        return mean, np.maximum(spread, 0.0), empty

    def covariance(self, X: Any) -> tuple[np.ndarray, np.ndarray, int]:
        """The mean (m,), the latent covariance (m, m), and how many points have no neighbour."""
        at = self.evaluation
        cross = at.kernel(X, self.X_train)
        empty = int((np.diff(cross.indptr) == 0).sum())
        covariance = at.kernel(X).toarray() - at.factor.quadratic(cross, full=True)
        if at.ones is not None:
            lack = 1 - cross @ at.ones
            covariance += np.outer(lack, lack) / at.ones.sum()
        return at.mean + cross @ at.weights, covariance, empty


def predict_block(posterior: Posterior, X: Any, variance: bool) -> tuple[np.ndarray, np.ndarray | None, int]:
    """Posterior.predict as a function, for a cluster's tasks."""
    return posterior.predict(X, variance=variance)


def warn_of_empty(empty: int, total: int) -> None:
    """Say that some predictions are no more than the prior mean."""
    if empty:
        warnings.warn(
            f"{empty} of {total} points have no training point within reach of the kernel: their prediction is the prior "
            "mean with the prior variance. A longer length scale would reach further.",
            EmptyNeighbourhood,
            stacklevel=3,
        )


def draws(mean: np.ndarray, covariance: np.ndarray, count: int, generator: np.random.RandomState) -> np.ndarray:
    """Normal draws (m, count); rounding's negative eigenvalues count as zero."""
    values, vectors = np.linalg.eigh(covariance)
    root = vectors * np.sqrt(np.maximum(values, 0.0))
    return mean[:, None] + root @ generator.standard_normal((len(mean), count))


def sample_prior(
    kernel: SparseKernel, X: Any, *, noise: float = 1e-8, n_samples: int = 1, random_state: int = 0
) -> np.ndarray:
    """Exact draws (n, n_samples) of a zero-mean process with the kernel, plus noise of variance `noise`, at X (n points).

    Costs one sparse factorisation, so a million points in two dimensions are possible. Raises NotPositiveDefinite.
    """
    coordinates = np.asarray(X, dtype=float) if kernel.requires_vector_input else None
    found = kernel.entries(X)
    values = found.values + noise * (found.rows == found.cols)
    try:
        factor = System(count_points(X), coordinates, solver="cholesky").factor(found.rows, found.cols, values)
    except IndefiniteMatrix as error:
        raise NotPositiveDefinite(kernel, str(error), "Raise `noise` or use a kernel marked `guaranteed`.") from error
    assert isinstance(factor, MultifrontalFactor)
    return factor.multiply(np.random.default_rng(random_state).standard_normal((len(factor), n_samples)))
