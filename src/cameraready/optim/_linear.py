"""Symmetric positive definite systems of the room: small dense ones with damping, sparse ones with few dense rows, matrix-free ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import scipy.linalg as dense_linalg
import scipy.sparse as sparse
import scipy.sparse.linalg as sparse_linalg
import torch
from scipy.sparse.csgraph import reverse_cuthill_mckee
from torch import Tensor

Array = np.ndarray[Any, Any]
Matrix = Any  # a numpy array or a scipy sparse array

#: Half-bandwidth after reordering up to which LAPACK's banded Cholesky is taken; it is several times as fast as SuperLU there.
MAX_BANDWIDTH = 24
#: Up to this size a matrix that is more than a tenth full is factorised as a dense one.
MAX_DENSE = 6_000


def damped_solve(kernel: Tensor, rhs: Tensor, damping: float) -> Tensor:
    """Solve ``(kernel + damping * I) z = rhs`` for a positive semi-definite `kernel`.

    By an eigendecomposition whose negative eigenvalues, which only rounding makes, are taken for zero; with ``damping=0`` by the
    pseudo-inverse. Cholesky would fail on kernels of repeated samples at low precision.

    Parameters
    ----------
    kernel : Tensor of shape (k, k)
        Symmetric.
    rhs : Tensor of shape (k,) or (k, m)
    damping : float
        At least 0.

    Returns
    -------
    Tensor of the shape of `rhs`

    Raises
    ------
    ValueError
        If shapes do not fit, `damping` is negative, or an entry is not finite.
    """
    if kernel.ndim != 2 or kernel.shape[0] != kernel.shape[1] or rhs.shape[:1] != kernel.shape[:1]:
        raise ValueError(
            f"expected kernel (k, k) and rhs (k,) or (k, m), got {tuple(kernel.shape)} and {tuple(rhs.shape)}"
        )
    if not damping >= 0.0:
        raise ValueError(f"damping must be at least 0, got {damping}")
    if not (torch.isfinite(kernel).all() and torch.isfinite(rhs).all()):
        raise ValueError("kernel or right-hand side has entries that are not finite")
    values, vectors = torch.linalg.eigh(kernel)
    values = values.clamp(min=0.0)
    if damping > 0.0:
        inverse = 1.0 / (values + damping)
    else:
        cutoff = values.max() * kernel.shape[0] * torch.finfo(kernel.dtype).eps
        inverse = torch.where(values > cutoff, 1.0 / values.clamp(min=torch.finfo(kernel.dtype).tiny), 0.0)
    projected = vectors.mT @ rhs
    return vectors @ (inverse * projected if rhs.ndim == 1 else inverse[:, None] * projected)


# --- factorisations ------------------------------------------------------------------------------------------------------


class NotPositiveDefiniteError(np.linalg.LinAlgError):
    """A matrix that was to be factorised has an eigenvalue that is not positive, up to rounding."""


class Factor(Protocol):
    """A factorised symmetric positive definite matrix.

    Attributes
    ----------
    kind : str
        How it was factorised.
    pivot_ratio : float
        Smallest over largest pivot; its inverse bounds the condition number from below, up to a small factor.
    """

    kind: str
    pivot_ratio: float

    def solve(self, rhs: Array) -> Array:
        """Solution for `rhs`, shape (n,) or (n, k)."""
        ...


@dataclass(frozen=True)
class _Solver:
    kind: str
    pivot_ratio: float
    solve: Callable[[Array], Array]


def _ratio(pivots: Array) -> float:
    return float(pivots.min() / pivots.max()) if len(pivots) else 1.0


def _factor_dense(matrix: Array) -> Factor:
    try:
        factor = dense_linalg.cho_factor(matrix, lower=True, check_finite=False)
    except np.linalg.LinAlgError as error:
        raise NotPositiveDefiniteError(f"the matrix is not positive definite ({error})") from None
    pivots = np.diagonal(factor[0]) ** 2
    return _Solver("dense", _ratio(pivots), lambda rhs: dense_linalg.cho_solve(factor, rhs, check_finite=False))


def _factor_diagonal(diagonal: Array) -> Factor:
    if not (diagonal > 0.0).all():
        raise NotPositiveDefiniteError("a diagonal matrix has an entry that is not positive")
    return _Solver(
        "diagonal", _ratio(diagonal), lambda rhs: rhs / (diagonal if rhs.ndim == 1 else diagonal[:, np.newaxis])
    )


def _factor_banded(matrix: sparse.coo_array, order: Array, place: Array, width: int) -> Factor:
    """Cholesky of the matrix whose row and column ``order[i]`` stand at i; `place` is the inverse of `order`."""
    row, column = place[matrix.row], place[matrix.col]
    below = row >= column
    band = np.zeros((width + 1, matrix.shape[0]))
    band[(row - column)[below], column[below]] = matrix.data[below]
    try:
        factor = dense_linalg.cholesky_banded(band, lower=True, overwrite_ab=True, check_finite=False)
    except np.linalg.LinAlgError as error:
        raise NotPositiveDefiniteError(f"the matrix is not positive definite ({error})") from None

    def solve(rhs: Array) -> Array:
        return dense_linalg.cho_solve_banded((factor, True), rhs[order], check_finite=False)[place]

    return _Solver("banded", _ratio(factor[0] ** 2), solve)


def _factor_superlu(matrix: sparse.csc_array) -> Factor:
    """SuperLU with a minimum-degree order and diagonal pivots, which positive definite matrices do not need to leave."""
    try:
        factor = sparse_linalg.splu(
            sparse.csc_matrix(matrix),
            permc_spec="MMD_AT_PLUS_A",
            diag_pivot_thresh=0.0,
            options={"SymmetricMode": True},
        )
    except RuntimeError as error:
        raise NotPositiveDefiniteError(f"the matrix is not positive definite ({error})") from None
    pivots = factor.U.diagonal()
    if not np.array_equal(factor.perm_r, factor.perm_c) or not (pivots > 0.0).all():
        raise NotPositiveDefiniteError(f"the matrix is not positive definite (smallest pivot {pivots.min():.3g})")
    return _Solver("sparse", _ratio(pivots), factor.solve)


def factor_spd(matrix: Matrix) -> Factor:
    """Factorise a symmetric positive definite matrix in the cheapest way that fits it.

    A sparse matrix is reordered to a narrow band (reverse Cuthill-McKee) and factorised by LAPACK's banded Cholesky, in O(n width^2);
    if the band is wider than `MAX_BANDWIDTH`, by SuperLU with a minimum-degree order; if it is more than a tenth full, as a
    dense matrix. Diagonal matrices are recognised.

    Parameters
    ----------
    matrix : ndarray or scipy sparse array of shape (n, n)
        Symmetric; only one triangle may be read.

    Returns
    -------
    Factor

    Raises
    ------
    NotPositiveDefiniteError
        If a pivot is not positive.
    """
    n = matrix.shape[0]
    if not sparse.issparse(matrix):
        return _factor_dense(np.asarray(matrix, dtype=float))
    matrix = sparse.csc_array(matrix)
    matrix.sum_duplicates()
    entries = matrix.tocoo()
    distance = np.abs(entries.row - entries.col)
    if not distance.any():
        return _factor_diagonal(matrix.diagonal())
    if n <= MAX_DENSE and matrix.nnz > 0.1 * n * n:
        return _factor_dense(matrix.toarray())
    order = place = np.arange(n)
    width = int(distance.max())
    if width > 2:
        order = reverse_cuthill_mckee(sparse.csr_matrix(matrix), symmetric_mode=True)
        place = np.empty(n, dtype=order.dtype)
        place[order] = np.arange(n)
        width = int(np.abs(place[entries.row] - place[entries.col]).max())
    if width <= MAX_BANDWIDTH:
        return _factor_banded(entries, order, place, width)
    return _factor_superlu(matrix)


def is_positive_semidefinite(matrix: Matrix, tolerance: float) -> bool:
    """Whether no eigenvalue of a symmetric matrix lies below about ``-tolerance``.

    Parameters
    ----------
    matrix : ndarray or scipy sparse array of shape (n, n)
    tolerance : float
        Positive; absolute.

    Returns
    -------
    bool
    """
    diagonal = matrix.diagonal()
    radius = np.asarray(abs(matrix).sum(axis=1)).ravel() - np.abs(diagonal)
    if (diagonal >= radius - tolerance).all():
        return True
    if (diagonal < -tolerance).any():
        return False
    n = len(diagonal)
    shift = tolerance * (sparse.eye_array(n, format="csc") if sparse.issparse(matrix) else np.eye(n))
    try:
        factor_spd(matrix + shift)
    except NotPositiveDefiniteError:
        return False
    return True


# --- a few dense rows ----------------------------------------------------------------------------------------------------


def dense_rows(rows: Matrix) -> Array:
    """Which rows would fill their Gram matrix: a boolean array (k,), true where a row has over ``max(64, 4 sqrt(n))`` entries.

    Empty of true entries if more than 200 rows would be: then the Gram matrix is better formed in full.
    """
    count = np.diff(sparse.csr_array(rows).indptr)
    many = count > max(64.0, 4.0 * np.sqrt(rows.shape[1]))
    return many if many.sum() <= 200 else np.zeros(len(count), dtype=bool)


class WeightedGram:
    """Factorised ``base + rows.T @ diag(weights) @ rows``, symmetric positive definite.

    Dense rows among sparse ones are kept out of the sparse factorisation and added by the Woodbury identity, so that a single
    ``sum(x) = 1`` does not fill the matrix. If the sparse part alone is singular it is shifted by `shift` times the identity; the
    caller then has an approximate inverse, and should iterate on the residual.

    Parameters
    ----------
    base : ndarray or scipy sparse array of shape (n, n)
        Symmetric positive semi-definite.
    rows : ndarray or scipy sparse array of shape (k, n)
    weights : ndarray of shape (k,)
        Positive.
    diagonal : ndarray of shape (n,), optional
        Added to the diagonal.

    Attributes
    ----------
    kind, pivot_ratio
        As of `Factor`; of the part without dense rows.
    shift : float
        What was added to the diagonal to make the factorisation possible; 0 as a rule.

    Raises
    ------
    NotPositiveDefiniteError
        If `base` has a negative eigenvalue beyond rounding.
    """

    def __init__(self, base: Matrix, rows: Matrix, weights: Array, diagonal: Array | None = None) -> None:
        n = base.shape[0]
        self._few = np.zeros((0, n))
        if sparse.issparse(base):
            rows = sparse.csr_array(rows)
            apart = dense_rows(rows)
            if apart.any():
                self._few, inside = rows[apart].toarray(), rows[~apart]
                few_weights, weights = weights[apart], weights[~apart]
            else:
                inside = rows
            matrix = sparse.csc_array(base)
            if inside.shape[0]:
                scaled = sparse.csr_array(
                    (inside.data * np.repeat(weights, np.diff(inside.indptr)), inside.indices, inside.indptr),
                    inside.shape,
                )
                matrix = matrix + (inside.T @ scaled).tocsc()
            if diagonal is not None and diagonal.any():
                matrix = matrix + sparse.dia_array((diagonal[np.newaxis], [0]), shape=(n, n)).tocsc()
        else:
            matrix = base + rows.T @ (weights[:, np.newaxis] * rows) if len(weights) else base.copy()
            if diagonal is not None:
                matrix[np.diag_indices(n)] += diagonal
        self.shift = 0.0
        self._factor = self._factorised(matrix)
        self.kind, self.pivot_ratio = self._factor.kind, self._factor.pivot_ratio
        if len(self._few):
            self.kind += " with dense rows by Woodbury"
            self._columns = self._factor.solve(self._few.T)
            self._small = _factor_dense(np.diag(1.0 / few_weights) + self._few @ self._columns)

    def _factorised(self, matrix: Matrix) -> Factor:
        try:
            factor = factor_spd(matrix)
            if factor.pivot_ratio > 1e-15:
                return factor
        except NotPositiveDefiniteError:
            pass
        n = matrix.shape[0]
        largest = float(np.abs(matrix.diagonal()).max(initial=0.0))
        self.shift = 1e-10 * largest or 1.0
        return factor_spd(
            matrix + self.shift * (sparse.eye_array(n, format="csc") if sparse.issparse(matrix) else np.eye(n))
        )

    def solve(self, rhs: Array) -> Array:
        """Solution for `rhs`, shape (n,), at the cost of two triangular solves and a product for each dense row."""
        first = self._factor.solve(rhs)
        if not len(self._few):
            return first
        return first - self._columns @ self._small.solve(self._few @ first)


# --- matrix-free ---------------------------------------------------------------------------------------------------------


def iterative_solve(
    product: Callable[[Array], Array],
    rhs: Array,
    *,
    diagonal: Array | None = None,
    method: Literal["cg", "minres"] = "cg",
    tolerance: float = 1e-10,
    max_steps: int | None = None,
) -> tuple[Array, bool]:
    """Solve a symmetric system that is known by its products alone.

    Parameters
    ----------
    product : callable
        ``product(v) -> matrix @ v``, shapes (n,).
    rhs : ndarray of shape (n,)
    diagonal : ndarray of shape (n,), optional
        Of the matrix, positive; preconditions the iteration.
    method : {"cg", "minres"}
        Conjugate gradients need a positive definite matrix; MINRES takes a singular or indefinite one.
    tolerance : float
        Of the residual, relative to `rhs`.
    max_steps : int, optional
        By default ``10 n``, at most 20,000.

    Returns
    -------
    solution : ndarray of shape (n,)
    converged : bool
        Whether the residual, computed afresh, is within ten times `tolerance`.
    """
    if method not in ("cg", "minres"):
        raise ValueError(f"method must be 'cg' or 'minres', got {method!r}")
    n = len(rhs)
    size = float(np.linalg.norm(rhs))
    if size == 0.0:
        return np.zeros(n), True
    operator = sparse_linalg.LinearOperator((n, n), matvec=product, dtype=float)
    inverse = None
    if diagonal is not None:
        inverse = sparse_linalg.LinearOperator((n, n), matvec=lambda v: np.ravel(v) / diagonal, dtype=float)
    steps = min(10 * n, 20_000) if max_steps is None else max_steps
    if method == "cg":
        found, _ = sparse_linalg.cg(operator, rhs, rtol=tolerance, atol=0.0, maxiter=steps, M=inverse)
    else:
        # SciPy measures the residual against the norms of matrix and solution, which is a looser test.
        found, _ = sparse_linalg.minres(operator, rhs, rtol=0.01 * tolerance, maxiter=steps, M=inverse)
    residual = float(np.linalg.norm(rhs - product(found)))
    return found, residual <= 10.0 * tolerance * size
