"""The base of kernels that return sparse matrices, and their sums and products.

A kernel says two things: which pairs of points it may link (`support`), and its values on given pairs (`pairs`). Everything
else, the CSR matrix, its derivatives, sums and products, follows from these two. A kernel without a support of its own (a
constant, any kernel of scikit-learn) is a *factor*: it is evaluated where the kernel it multiplies has its support.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from scipy import sparse
from sklearn.gaussian_process.kernels import Hyperparameter, Kernel, KernelOperator

# Column indices stay 32 bits wide until the number of entries no longer fits.
INT32_LIMIT = 2**31 - 1


class Entries(NamedTuple):
    """Values of a kernel on pairs: rows (m,), cols (m,), values (m,), derivatives: a list of (m,) or None."""

    rows: np.ndarray
    cols: np.ndarray
    values: np.ndarray
    derivatives: list[np.ndarray] | None


class SparseKernel(Kernel):
    """A covariance function with exact zeros, in the conventions of `sklearn.gaussian_process.kernels`.

    Subclasses implement `support` (or leave it at None: a factor) and `pairs`. Hyper-parameters, `theta` (natural
    logarithms), `bounds`, `clone_with_theta` and `get_params` are scikit-learn's. `+` and `*` build sums and products; a
    positive number stands for the constant kernel.

    `guaranteed` is True when the kernel is positive semi-definite in every dimension it accepts, by a theorem that its
    docstring names. For the others the regressor checks each matrix before it returns a likelihood.
    """

    guaranteed = True

    def support(self, X: Any, Y: Any = None) -> tuple[np.ndarray, np.ndarray] | None:
        """Pairs that may be non-zero: row indices into X and column indices into Y.

        With Y None the pairs are those of X with itself, the upper triangle alone: row <= column, the diagonal included.
        None means that the kernel is a factor, non-zero everywhere.
        """
        return None

    def pairs(
        self, X: Any, Y: Any, rows: np.ndarray, cols: np.ndarray, eval_gradient: bool = False
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """Values (m,) at the pairs (X[rows], Y[cols]), and one derivative (m,) for each free log-hyper-parameter.

        The list is empty unless `eval_gradient`.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say its values on pairs")

    def entries(self, X: Any, Y: Any = None, eval_gradient: bool = False) -> Entries:
        """The non-zero entries; with Y None those of the upper triangle with the whole diagonal."""
        found = self.support(X, Y)
        if found is None:
            raise ValueError(
                f"{self!r} is non-zero for all pairs, so its matrix would be dense; multiply it by a kernel with "
                f"compact support, for example `{type(self).__name__}(...) * Wendland(...)`"
            )
        if Y is None:
            return self.entries_at(X, *with_diagonal(*found, np.arange(count_points(X))), eval_gradient)
        values, _ = self.pairs(X, Y, *found)
        _require_finite(self, values)
        kept = values != 0
        return Entries(found[0][kept], found[1][kept], values[kept], None)

    def entries_at(self, X: Any, rows: np.ndarray, cols: np.ndarray, eval_gradient: bool = False) -> Entries:
        """Those of the given pairs of X with itself that are not zero, and all of the diagonal among them."""
        values, derivatives = self.pairs(X, X, rows, cols, eval_gradient)
        _require_finite(self, values)
        kept = (values != 0) | (rows == cols)
        if not kept.all():
            rows, cols, values = rows[kept], cols[kept], values[kept]
            derivatives = [derivative[kept] for derivative in derivatives]
        return Entries(rows, cols, values, derivatives if eval_gradient else None)

    def __call__(self, X: Any, Y: Any = None, eval_gradient: bool = False) -> Any:
        """The covariance of X (n points) with Y (m points, or X itself) as CSR (n, m), exact zeros left out.

        With `eval_gradient` (Y must be None) also a list of CSR derivatives, one for each entry of `theta`.
        """
        if eval_gradient and Y is not None:
            raise ValueError("the gradient is defined for the covariance of X with itself: leave Y at None")
        found = self.entries(X, Y, eval_gradient)
        shape = (count_points(X), count_points(X if Y is None else Y))
        matrix = _csr(found.values, found, shape, symmetric=Y is None)
        if not eval_gradient:
            return matrix
        return matrix, [_csr(d, found, shape, symmetric=True) for d in found.derivatives or []]

    def diag(self, X: Any) -> np.ndarray:
        """The variances k(x, x), (n,)."""
        index = np.arange(count_points(X))
        return self.pairs(X, X, index, index)[0]

    def is_stationary(self) -> bool:
        """Whether the kernel depends on differences of points alone."""
        return False

    def __eq__(self, other: object) -> bool:
        """Same class, same parameters (arrays by their values)."""
        if type(self) is not type(other):
            return False
        mine, theirs = self.get_params(deep=False), other.get_params(deep=False)
        return all(_same(mine[name], theirs[name]) for name in mine)

    __hash__ = None  # type: ignore[assignment]

    def __add__(self, other: Any) -> SparseKernel:
        return self if _is_zero(other) else Sum(self, _as_sparse(other))

    def __radd__(self, other: Any) -> SparseKernel:
        return self if _is_zero(other) else Sum(_as_sparse(other), self)  # sum([...]) begins with 0

    def __mul__(self, other: Any) -> Product:
        return Product(self, _as_sparse(other))

    def __rmul__(self, other: Any) -> Product:
        return Product(_as_sparse(other), self)

    def __pow__(self, exponent: Any) -> Any:
        raise TypeError("a kernel of this package has no powers; multiply kernels instead, k1 * k2")


class _Pair(KernelOperator, SparseKernel):
    """Two kernels joined; scikit-learn's KernelOperator joins their hyper-parameters."""

    def __init__(self, k1: SparseKernel, k2: SparseKernel):
        super().__init__(k1, k2)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.k1 == other.k1 and self.k2 == other.k2

    __hash__ = None

    @property
    def guaranteed(self) -> bool:  # type: ignore[override]
        return bool(self.k1.guaranteed and self.k2.guaranteed)

    @property
    def requires_vector_input(self) -> bool:
        return self.k1.requires_vector_input or self.k2.requires_vector_input

    def is_stationary(self) -> bool:
        return self.k1.is_stationary() and self.k2.is_stationary()


class Sum(_Pair):
    """k1 + k2 on the union of their supports; positive semi-definite when both are."""

    def support(self, X: Any, Y: Any = None) -> tuple[np.ndarray, np.ndarray] | None:
        first, second = self.k1.support(X, Y), self.k2.support(X, Y)
        if first is None or second is None:
            return None
        width = count_points(X if Y is None else Y)
        return union_of_pairs(first, second, width)

    def pairs(
        self, X: Any, Y: Any, rows: np.ndarray, cols: np.ndarray, eval_gradient: bool = False
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        first, d_first = self.k1.pairs(X, Y, rows, cols, eval_gradient)
        second, d_second = self.k2.pairs(X, Y, rows, cols, eval_gradient)
        return first + second, d_first + d_second

    def diag(self, X: Any) -> np.ndarray:
        return self.k1.diag(X) + self.k2.diag(X)

    def __repr__(self) -> str:
        return f"{self.k1!r} + {self.k2!r}"


class Product(_Pair):
    """k1 * k2 on the smaller of their supports; positive semi-definite when both are (Schur's product theorem)."""

    def support(self, X: Any, Y: Any = None) -> tuple[np.ndarray, np.ndarray] | None:
        first, second = self.k1.support(X, Y), self.k2.support(X, Y)
        if first is None or second is None:
            return second if first is None else first
        return first if len(first[0]) <= len(second[0]) else second

    def pairs(
        self, X: Any, Y: Any, rows: np.ndarray, cols: np.ndarray, eval_gradient: bool = False
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        first, d_first = self.k1.pairs(X, Y, rows, cols, eval_gradient)
        second, d_second = self.k2.pairs(X, Y, rows, cols, eval_gradient)
        return first * second, [d * second for d in d_first] + [first * d for d in d_second]

    def diag(self, X: Any) -> np.ndarray:
        return self.k1.diag(X) * self.k2.diag(X)

    def __repr__(self) -> str:
        left = f"({self.k1!r})" if isinstance(self.k1, Sum) else repr(self.k1)
        right = f"({self.k2!r})" if isinstance(self.k2, Sum) else repr(self.k2)
        return f"{left} * {right}"


class Amplitude(SparseKernel):
    """A constant factor: multiplies the covariance by `variance`. Positive semi-definite.

    Parameters
    ----------
    variance: the factor itself, not its square root; > 0.
    variance_bounds: bounds for its optimisation, or "fixed".
    """

    requires_vector_input = False

    def __init__(self, variance: float = 1.0, *, variance_bounds: Any = (1e-5, 1e5)):
        self.variance = variance
        self.variance_bounds = variance_bounds

    @property
    def hyperparameter_variance(self) -> Hyperparameter:
        return Hyperparameter("variance", "numeric", self.variance_bounds)

    def pairs(
        self, X: Any, Y: Any, rows: np.ndarray, cols: np.ndarray, eval_gradient: bool = False
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        if not self.variance > 0:
            raise ValueError(f"the variance of Amplitude must be above 0, got {self.variance}")
        values = np.full(len(rows), float(self.variance))
        free = eval_gradient and not self.hyperparameter_variance.fixed
        return values, [values] if free else []

    def is_stationary(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"Amplitude({self.variance:.3g})"


def _is_zero(other: Any) -> bool:
    return not isinstance(other, Kernel) and np.ndim(other) == 0 and bool(other == 0)


def _as_sparse(other: Any) -> SparseKernel:
    """A kernel of this module; a number becomes a constant factor."""
    if isinstance(other, SparseKernel):
        return other
    if isinstance(other, Kernel):
        raise TypeError(f"{other!r} is a dense kernel of scikit-learn; wrap it: Core({other!r}) * Wendland(...)")
    if not float(other) > 0:
        raise ValueError(f"a kernel can be multiplied by, or added to, a number above 0; got {other!r}")
    return Amplitude(float(other))


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(_same(a, b) for a, b in zip(first, second, strict=True))
    if isinstance(first, np.ndarray) or isinstance(second, np.ndarray):
        return np.array_equal(first, second)
    return bool(first == second)


def count_points(X: Any) -> int:
    """The number of points in X, an array or any sequence."""
    return X.shape[0] if hasattr(X, "shape") else len(X)


def with_diagonal(rows: np.ndarray, cols: np.ndarray, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distinct pairs, and those (i, i) for i in `index` that are not among them: noise is added there, whatever the kernel."""
    there = rows[rows == cols]
    if len(there) == len(index):
        return rows, cols
    lacking = np.setdiff1d(index, there)
    return np.concatenate([rows, lacking]), np.concatenate([cols, lacking])


def union_of_pairs(
    first: tuple[np.ndarray, np.ndarray], second: tuple[np.ndarray, np.ndarray], width: int
) -> tuple[np.ndarray, np.ndarray]:
    """Pairs in either list, each once; `width` is the number of columns."""
    if not len(first[0]) or not len(second[0]):
        return second if not len(first[0]) else first
    keys = np.concatenate([rows.astype(np.int64) * width + cols for rows, cols in (first, second)])
    keys = np.unique(keys)
    return keys // width, keys % width


def mirror(rows: np.ndarray, cols: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All entries of a symmetric matrix from those of its upper triangle."""
    off = rows != cols
    return (
        np.concatenate([rows, cols[off]]),
        np.concatenate([cols, rows[off]]),
        np.concatenate([values, values[off]]),
    )


def _csr(values: np.ndarray, found: Entries, shape: tuple[int, int], *, symmetric: bool) -> sparse.csr_matrix:
    rows, cols = found.rows, found.cols
    if symmetric:
        rows, cols, values = mirror(rows, cols, values)
    kind = np.int32 if max(len(values), *shape) <= INT32_LIMIT else np.int64
    return sparse.csr_matrix((values, (rows.astype(kind), cols.astype(kind))), shape=shape)


def _require_finite(kernel: Kernel, values: np.ndarray) -> None:
    if not np.isfinite(values).all():
        raise ValueError(f"{kernel!r} returned values that are not finite; look at its parameters and its inputs")
