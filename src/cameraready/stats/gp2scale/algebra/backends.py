"""Other libraries' sparse factorisations behind the interface of the multifrontal one.

SuperLU ships with SciPy; qdldl (Apache-2.0) and cvxopt's CHOLMOD (GPL) are used when installed and asked for. All of them
take the matrix in the order that nested dissection or their own minimum-degree ordering gives, whichever they support. They
factor and solve; entries of the inverse cost one solve for each column, so gradients are for the multifrontal backend.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
from scipy import sparse
from scipy.sparse import linalg

from cameraready.stats.gp2scale.algebra.errors import IndefiniteMatrix
from cameraready.stats.gp2scale.kernels.base import mirror

COLUMNS_AT_ONCE = 256


class LibraryFactor:
    """A factor of the symmetric positive definite matrix with upper-triangle entries (rows, cols, values).

    Attributes: logdet; nonzeros, the stored entries of the factor.
    """

    logdet: float
    nonzeros: int

    def __init__(self, n: int, rows: np.ndarray, cols: np.ndarray, values: np.ndarray):
        self._n, self._rows, self._cols = n, rows, cols
        self._factorise(n, rows, cols, values)

    def _factorise(self, n: int, rows: np.ndarray, cols: np.ndarray, values: np.ndarray) -> None:
        raise NotImplementedError

    def _solve_columns(self, right: np.ndarray) -> np.ndarray:
        raise NotImplementedError

    def __len__(self) -> int:
        return self._n

    def solve(self, right: np.ndarray) -> np.ndarray:
        """A^{-1} right for right (n,) or (n, m)."""
        return self._solve_columns(np.asarray(right, dtype=float).reshape(self._n, -1)).reshape(right.shape)

    def quadratic(self, left: sparse.csr_matrix, *, full: bool = False) -> np.ndarray:
        """left A^{-1} left': the diagonal (m,), or the whole matrix (m, m), for sparse left (m, n)."""
        return quadratic_by_solves(self.solve, left, full=full)

    def inverse_entries(self) -> np.ndarray:
        """The entries of A^{-1} at the pairs that the factor was made of; n solves."""
        found = np.empty(len(self._rows))
        order = np.argsort(self._cols, kind="stable")
        for begin in range(0, self._n, COLUMNS_AT_ONCE):
            end = min(begin + COLUMNS_AT_ONCE, self._n)
            unit = np.zeros((self._n, end - begin))
            unit[np.arange(begin, end), np.arange(end - begin)] = 1.0
            inverse = self._solve_columns(unit)
            first, last = np.searchsorted(self._cols[order], [begin, end])
            these = order[first:last]
            found[these] = inverse[self._rows[these], self._cols[these] - begin]
        return found


class SuperLUFactor(LibraryFactor):
    """SciPy's SuperLU in symmetric mode: pivots stay on the diagonal, so their signs are the matrix' inertia."""

    def _factorise(self, n: int, rows: np.ndarray, cols: np.ndarray, values: np.ndarray) -> None:
        i, j, both = mirror(rows, cols, values)
        matrix = sparse.csc_matrix((both, (i, j)), shape=(n, n))
        try:
            self._lu = linalg.splu(
                matrix, permc_spec="MMD_AT_PLUS_A", diag_pivot_thresh=0.0, options={"SymmetricMode": True}
            )
        except RuntimeError as error:
            raise IndefiniteMatrix("the matrix is exactly singular") from error
        pivots = self._lu.U.diagonal()
        if not np.array_equal(self._lu.perm_r, self._lu.perm_c) or not (pivots > 0).all():
            raise IndefiniteMatrix(f"{int((pivots <= 0).sum())} pivots of the factorisation are not positive")
        self.logdet = float(np.log(pivots).sum())
        self.nonzeros = int(self._lu.nnz)

    def _solve_columns(self, right: np.ndarray) -> np.ndarray:
        return self._lu.solve(right)


class QDLDLFactor(LibraryFactor):
    """OSQP's qdldl: a simplicial LDL' with approximate minimum degree."""

    def _factorise(self, n: int, rows: np.ndarray, cols: np.ndarray, values: np.ndarray) -> None:
        qdldl = require("qdldl", "pip install qdldl")
        matrix = sparse.csc_matrix((values, (rows, cols)), shape=(n, n))
        try:
            self._solver = qdldl.Solver(matrix, upper=True)
        except RuntimeError as error:
            raise IndefiniteMatrix("a pivot of the factorisation is exactly zero") from error
        lower, pivots, _ = self._solver.factors()
        if not (pivots > 0).all():
            raise IndefiniteMatrix(f"{int((pivots <= 0).sum())} pivots of the factorisation are not positive")
        self.logdet = float(np.log(pivots).sum())
        self.nonzeros = int(lower.nnz) + n

    def _solve_columns(self, right: np.ndarray) -> np.ndarray:
        return np.stack([self._solver.solve(np.ascontiguousarray(column)) for column in right.T], axis=1)


class CholmodFactor(LibraryFactor):
    """CHOLMOD's supernodal Cholesky through cvxopt (GPL, installed by the user)."""

    def _factorise(self, n: int, rows: np.ndarray, cols: np.ndarray, values: np.ndarray) -> None:
        cvxopt = require("cvxopt", "pip install cvxopt (GPL-3.0)")
        self._cholmod = importlib.import_module("cvxopt.cholmod")
        self._matrix = cvxopt.matrix
        self._cholmod.options["supernodal"] = 2
        matrix = cvxopt.spmatrix(values, cols.astype(np.int64), rows.astype(np.int64), (n, n))
        self._factor = self._cholmod.symbolic(matrix)
        try:
            self._cholmod.numeric(matrix, self._factor)
        except ArithmeticError as error:
            raise IndefiniteMatrix(f"pivot {error} of the factorisation is not positive") from error
        diagonal = np.asarray(self._cholmod.diag(self._factor)).ravel()
        self.logdet = float(2 * np.log(diagonal).sum())
        self.nonzeros = 0  # cvxopt does not tell

    def _solve_columns(self, right: np.ndarray) -> np.ndarray:
        work = self._matrix(np.asfortranarray(right))
        self._cholmod.solve(self._factor, work)
        return np.asarray(work)


LIBRARIES = {"superlu": SuperLUFactor, "qdldl": QDLDLFactor, "cholmod": CholmodFactor}


def require(name: str, how: str) -> Any:
    """An optional library, or an error with the command that installs it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"this backend needs {name}: {how}") from error


def quadratic_by_solves(solve: Any, left: sparse.csr_matrix, *, full: bool) -> np.ndarray:
    """left A^{-1} left' in batches of solves."""
    m = left.shape[0]
    result = np.empty((m, m) if full else m)
    for begin in range(0, m, COLUMNS_AT_ONCE):
        part = slice(begin, min(begin + COLUMNS_AT_ONCE, m))
        right = left[part].toarray().T
        solved = solve(right)
        if full:
            result[:, part] = left @ solved
        else:
            result[part] = np.einsum("ij,ij->j", right, solved)
    return (result + result.T) / 2 if full else result
