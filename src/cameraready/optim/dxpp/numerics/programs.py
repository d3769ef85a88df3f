"""A quadratic program in numbers: taken from tensors, checked, and brought to a common scale."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import scipy.sparse as sparse

from cameraready.optim._linear import Array, Matrix, is_positive_semidefinite


@dataclass(frozen=True)
class Program:
    """Minimise ``x'Qx/2 + q'x`` subject to ``Gx <= h``, ``Ax = b`` and ``lb <= x <= ub``; float64.

    Attributes
    ----------
    Q : ndarray or csc_array of shape (n, n)
    q : ndarray of shape (n,)
    G, A : ndarray or csc_array of shapes (m, n) and (p, n)
        Of the kind of `Q`; without rows where there are no such constraints.
    h, b : ndarray of shapes (m,) and (p,)
    lb, ub : ndarray of shape (n,)
        Infinite where there is no bound.
    """

    Q: Matrix
    q: Array
    G: Matrix
    h: Array
    A: Matrix
    b: Array
    lb: Array
    ub: Array

    @property
    def is_sparse(self) -> bool:
        return sparse.issparse(self.Q)

    @property
    def has_box(self) -> bool:
        return bool(np.isfinite(self.lb).any() or np.isfinite(self.ub).any())

    @cached_property
    def fixed(self) -> Array:
        """Variables whose bounds are equal, boolean (n,)."""
        return self.lb == self.ub

    @cached_property
    def rows(self) -> Matrix:
        """`G`, row by row: a matrix from which rows are cheaply taken."""
        return sparse.csr_array(self.G) if self.is_sparse else self.G

    @cached_property
    def absolute(self) -> tuple[Matrix, Matrix, Matrix]:
        """Absolute values of Q, G and A."""
        return abs(self.Q), abs(self.G), abs(self.A)

    def gradient(self, x: Array) -> Array:
        """Of the objective, (n,)."""
        return self.Q @ x + self.q


@dataclass(frozen=True)
class Scales:
    """Units of a normalised program.

    Attributes
    ----------
    x : ndarray of shape (n,)
        Of the variables.
    size : float
        What they have in common.
    objective : float
    G, A : ndarray of shapes (m,) and (p,)
        Norms of the rows, in units of the variables over `size`.
    """

    x: Array
    size: float
    objective: float
    G: Array
    A: Array

    @property
    def columns(self) -> Array:
        """Units of the variables beside what they have in common, (n,)."""
        return self.x / self.size

    @property
    def response(self) -> float:
        """How far x moves for a change of q, in units of what the normalised one moves."""
        return self.size**2 / self.objective

    def true_multipliers(self, lam: Array, equal: Array, z: Array) -> tuple[Array, Array, Array]:
        """Of inequalities, equalities and bounds, from those of the normalised program."""
        unit = self.objective / self.size
        return lam * unit / self.G, equal * unit / self.A, z * self.objective / self.x


# --- checks --------------------------------------------------------------------------------------------------------------


def check_finite(name: str, values: Array, infinite: bool = False) -> None:
    bad = np.isnan(values) if infinite else ~np.isfinite(values)
    if bad.any():
        what = "NaN" if infinite or np.isnan(values).any() else "infinite values"
        raise ValueError(f"{name} has {what} ({int(bad.sum())} of {values.size} entries); every entry must be finite")


def checked_quadratic(Q: Matrix, precision: float) -> Matrix:
    """`Q`, made symmetric to the last digit.

    Raises ValueError unless it is symmetric and positive semi-definite up to rounding of relative size `precision`.
    """
    largest = float(abs(Q).max()) if Q.shape[0] else 0.0
    gap = float(abs(Q - Q.T).max()) if Q.shape[0] else 0.0
    if gap > max(np.sqrt(precision), 1e-6) * largest:
        raise ValueError(
            f"Q is not symmetric: entries across the diagonal differ by up to {gap:.3g}; pass (Q + Q.T) / 2, which is the same objective"
        )
    if gap > 0.0:
        Q = sparse.csc_array((Q + Q.T) / 2.0) if sparse.issparse(Q) else (Q + Q.T) / 2.0
    if not is_positive_semidefinite(Q, 8.0 * precision * Q.shape[0] * largest + np.finfo(float).tiny):
        smallest = f" (smallest eigenvalue {np.linalg.eigvalsh(Q)[0]:.3g})" if not sparse.issparse(Q) else ""
        raise ValueError(
            f"Q has a negative eigenvalue{smallest}: the program is not convex; Q must be positive semi-definite"
        )
    return Q


def row_norms(name: str, rows: Matrix) -> Array:
    """Euclidean norms, (k,). Raises ValueError for a row of zeros."""
    if sparse.issparse(rows):
        squares = sparse.csc_array((rows.data**2, rows.indices, rows.indptr), rows.shape)
        norms = np.sqrt(np.asarray(squares.sum(axis=1)).ravel())
    else:
        norms = np.linalg.norm(rows, axis=1)
    empty = np.flatnonzero(norms == 0.0)
    if len(empty):
        shown = ", ".join(map(str, empty[:5])) + (" ..." if len(empty) > 5 else "")
        raise ValueError(
            f"{name} has only zeros in row {shown}, which constrains nothing or cannot be met; leave such rows out"
        )
    return norms


def check_bounds(program: Program) -> None:
    """Raises ValueError for bounds that cross or exclude every number."""
    crossed = np.flatnonzero(program.lb > program.ub)
    if len(crossed):
        i = crossed[0]
        raise ValueError(
            f"lb exceeds ub for {len(crossed)} variables, first for {i}: {program.lb[i]:g} > {program.ub[i]:g}"
        )
    if (program.lb == np.inf).any() or (program.ub == -np.inf).any():
        raise ValueError(
            "lb must be below +infinity and ub above -infinity; infinite bounds of the other sign mean no bound"
        )


def contradiction(program: Program) -> str:
    """Two rows of `A` that are the same up to a factor but ask for different values, in words; empty if there are none."""
    if not len(program.b):
        return ""
    norms = row_norms("A", program.A)
    # Products with a few random vectors tell rows apart without comparing them entry by entry.
    prints = (program.A @ np.random.default_rng(0).normal(size=(len(program.q), 3))) / norms[:, np.newaxis]
    sign = np.where(prints[:, 0] < 0.0, -1.0, 1.0)
    value = program.b / norms * sign
    _, group = np.unique(np.round(prints * sign[:, np.newaxis], 8) + 0.0, axis=0, return_inverse=True)
    first: dict[int, int] = {}
    for i, key in enumerate(np.ravel(group)):
        j = first.setdefault(int(key), i)
        if abs(value[i] - value[j]) > 1e-9 * max(1.0, abs(value[i])):
            return f"rows {j} and {i} of A are the same up to a factor but ask for different values of b"
    return ""


# --- scaling -------------------------------------------------------------------------------------------------------------


def scale_rows(rows: Matrix, norms: Array) -> Matrix:
    if not sparse.issparse(rows):
        return rows / norms[:, np.newaxis]
    return sparse.csc_array((rows.data / norms[rows.indices], rows.indices, rows.indptr), rows.shape)


def scale_columns(matrix: Matrix, factor: Array) -> Matrix:
    if not sparse.issparse(matrix):
        return matrix * factor
    return sparse.csc_array(
        (matrix.data * np.repeat(factor, np.diff(matrix.indptr)), matrix.indices, matrix.indptr), matrix.shape
    )


def column_units(Q: Matrix) -> Array:
    """Powers of two that bring the positive entries of the diagonal of `Q` within a factor of four of each other; ones if they are within 16."""
    diagonal = Q.diagonal()
    positive = diagonal > 0.0
    units = np.ones(len(diagonal))
    if positive.any() and diagonal.max() > 16.0 * diagonal[positive].min():
        middle = np.log2(diagonal[positive]).mean()
        units[positive] = 2.0 ** np.clip(np.round((middle - np.log2(diagonal[positive])) / 2.0), -100, 100)
    return units


def typical_size(program: Program) -> float:
    """The size of x: what the constraints force, or the smaller of what they allow and of the free minimum; rows must have norm one."""
    lb, ub = program.lb[np.isfinite(program.lb)], program.ub[np.isfinite(program.ub)]
    forced = max(float(np.max(each, initial=0.0)) for each in (np.abs(program.b), -program.h, lb, -ub))
    allowed = np.concatenate([program.h[program.h > 0.0], -lb[lb < 0.0], ub[ub > 0.0]])
    slope, curvature = float(np.abs(program.q).max()), float(np.abs(program.Q.diagonal()).max(initial=0.0))
    sizes = [float(np.median(allowed))] if len(allowed) else []
    if slope > 0.0 and curvature > 0.0:
        sizes.append(slope / curvature)
    return max(forced, min(sizes, default=0.0)) or 1.0


def power_of_two(value: float) -> float:
    """The nearest, so that scaling by it rounds nothing; 1 for what is too large or small for a float's exponent."""
    return float(2.0 ** np.round(np.log2(value))) if 1e-290 < value < 1e290 else 1.0


def normalised(program: Program, G_norms: Array, A_norms: Array, regularization: float = 0.0) -> tuple[Program, Scales]:
    """The same program with rows of length one, variables of like curvature and order one, and an objective of order one.

    Neither the solver's tolerances nor slacks, multipliers and penalties depend on units then. `regularization` is added to
    the diagonal of the scaled Q. `G_norms` and `A_norms` are the norms of the rows as they are.
    """
    columns = column_units(program.Q)
    if (columns != 1.0).any():
        Q = scale_rows(scale_columns(program.Q, columns), 1.0 / columns)
        G, A = scale_columns(program.G, columns), scale_columns(program.A, columns)
        program = replace(
            program, Q=Q, q=program.q * columns, G=G, A=A, lb=program.lb / columns, ub=program.ub / columns
        )
        G_norms, A_norms = row_norms("G", G), row_norms("A", A)
    program = replace(
        program,
        G=scale_rows(program.G, G_norms),
        h=program.h / G_norms,
        A=scale_rows(program.A, A_norms),
        b=program.b / A_norms,
    )
    size = power_of_two(typical_size(program))
    largest = max(size * float(np.abs(program.q).max(initial=0.0)), size**2 * float(abs(program.Q).max()))
    objective = power_of_two(largest)
    Q = program.Q * (size**2 / objective)
    if regularization:
        n = len(program.q)
        Q = (
            sparse.csc_array(Q + regularization * sparse.eye_array(n))
            if program.is_sparse
            else Q + regularization * np.eye(n)
        )
    bounds = {"lb": program.lb / size, "ub": program.ub / size}
    scaled = replace(program, Q=Q, q=program.q * (size / objective), h=program.h / size, b=program.b / size, **bounds)
    return scaled, Scales(size * columns, size, objective, G_norms, A_norms)
