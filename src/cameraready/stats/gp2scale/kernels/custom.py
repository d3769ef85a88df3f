"""A user's own kernel on any kind of input, given its values on pairs and a way to find the pairs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from sklearn.gaussian_process.kernels import Hyperparameter

from cameraready.stats.gp2scale.kernels.base import SparseKernel, count_points

# The step of the central differences in a log-parameter: about the cube root of the rounding unit.
STEP = 6e-6


class SupportKernel(SparseKernel):
    """A kernel that returns exact zeros, on any space in which neighbours can be found: strings, graphs, sets.

    The regressor checks each matrix for positive definiteness unless `guaranteed` is set. Inputs are passed on as they are
    (a list or an array of any type), and `A[i]`-style indexing happens on an object array.

    Parameters
    ----------
    function: (A, B, parameters) -> (m,), the values of m pairs (A[i], B[i]).
    neighbours: (X, Y) -> (rows, cols), the pairs of X and Y that may be non-zero; Y is X for the covariance itself. Order and
        repetition do not matter.
    parameters: positive hyper-parameters (p,), learned by the regressor within `parameters_bounds` ("fixed" to keep them).
    diagonal: (X, parameters) -> (n,), the variances; None evaluates `function` on (X, X).
    gradient: (A, B, parameters) -> (p, m), derivatives by the logarithms of the parameters; None takes central differences.
    guaranteed: that the function is positive semi-definite is yours to promise.

    Example
    -------
    The share of k-mers that two strings have in common, found through an index of k-mers:

    >>> import numpy as np
    >>> def kmers(s): return {s[i:i + 3] for i in range(len(s) - 2)}
    >>> def shared(A, B, _): return np.array([len(kmers(a) & kmers(b)) / np.sqrt(len(kmers(a)) * len(kmers(b)))
    ...                                       for a, b in zip(A, B)])
    >>> def neighbours(X, Y):
    ...     index = {}
    ...     for j, s in enumerate(Y):
    ...         for m in kmers(s): index.setdefault(m, []).append(j)
    ...     found = [(i, j) for i, s in enumerate(X) for m in kmers(s) for j in index.get(m, [])]
    ...     return np.array(found).reshape(-1, 2).T
    >>> kernel = SupportKernel(shared, neighbours, guaranteed=True)
    >>> kernel(["ACGTA", "CGTAC", "TTTTT"]).toarray().round(2)
    array([[1.  , 0.67, 0.  ],
           [0.67, 1.  , 0.  ],
           [0.  , 0.  , 1.  ]])
    """

    requires_vector_input = False

    def __init__(
        self,
        function: Callable[[Any, Any, Any], np.ndarray],
        neighbours: Callable[[Any, Any], Any],
        parameters: Any = (),
        *,
        parameters_bounds: Any = (1e-5, 1e5),
        diagonal: Callable[[Any, Any], np.ndarray] | None = None,
        gradient: Callable[[Any, Any, Any], np.ndarray] | None = None,
        guaranteed: bool = False,
    ):
        self.function = function
        self.neighbours = neighbours
        self.parameters = parameters
        self.parameters_bounds = parameters_bounds
        self.diagonal = diagonal
        self.gradient = gradient
        self.guaranteed = guaranteed

    @property
    def hyperparameters(self) -> list[Hyperparameter]:
        """One block of hyper-parameters, or none."""
        count = len(self._parameters())
        return [Hyperparameter("parameters", "numeric", self.parameters_bounds, count)] if count else []

    def support(self, X: Any, Y: Any = None) -> tuple[np.ndarray, np.ndarray]:
        rows, cols = (np.asarray(side, dtype=np.int64).ravel() for side in self.neighbours(X, X if Y is None else Y))
        if len(rows) != len(cols):
            raise ValueError(f"neighbours returned {len(rows)} rows and {len(cols)} columns; they must pair up")
        height, width = count_points(X), count_points(X if Y is None else Y)
        outside = (rows < 0) | (rows >= height) | (cols < 0) | (cols >= width)
        if outside.any():
            raise ValueError(f"neighbours returned pairs outside {height} x {width} points")
        if Y is None:
            index = np.arange(height)
            rows, cols = (
                np.concatenate([np.minimum(rows, cols), index]),
                np.concatenate([np.maximum(rows, cols), index]),
            )
        keys = np.unique(rows * width + cols)
        return keys // width, keys % width

    def pairs(
        self, X: Any, Y: Any, rows: np.ndarray, cols: np.ndarray, eval_gradient: bool = False
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        left, right = _objects(X)[rows], _objects(Y)[cols]
        parameters = self._parameters()
        values = self._checked(left, right, parameters)
        if not eval_gradient or not any(not h.fixed for h in self.hyperparameters):
            return values, []
        if self.gradient is not None:
            return values, list(np.asarray(self.gradient(left, right, parameters), dtype=float))
        slopes = []
        for k in range(len(parameters)):
            step = np.exp(STEP * (np.arange(len(parameters)) == k))
            up, down = (self._checked(left, right, p) for p in (parameters * step, parameters / step))
            slopes.append((up - down) / (2 * STEP))
        return values, slopes

    def diag(self, X: Any) -> np.ndarray:
        if self.diagonal is not None:
            return np.asarray(self.diagonal(X, self._parameters()), dtype=float)
        return super().diag(X)

    def _parameters(self) -> np.ndarray:
        """As an array: scikit-learn sets a single one as a number."""
        return np.atleast_1d(np.asarray(self.parameters, dtype=float))

    def _checked(self, left: Any, right: Any, parameters: np.ndarray) -> np.ndarray:
        values = np.asarray(self.function(left, right, parameters), dtype=float)
        if values.shape != (len(left),):
            raise ValueError(f"the kernel's function must return one value a pair: {len(left)}, got {values.shape}")
        return values

    def __repr__(self) -> str:
        return (
            f"SupportKernel({getattr(self.function, '__name__', 'function')}, parameters={self._parameters().tolist()})"
        )


def _objects(X: Any) -> np.ndarray:
    """X as an array that can be indexed by an array: itself, or a list packed as objects."""
    if hasattr(X, "to_numpy"):
        return X.to_numpy()  # a pandas series would be indexed by its labels
    if hasattr(X, "shape"):
        return X
    packed = np.empty(len(X), dtype=object)
    packed[:] = X
    return packed
