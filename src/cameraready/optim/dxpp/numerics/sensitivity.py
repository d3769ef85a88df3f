"""How the solution of a quadratic program moves with its data: by the penalised Hessian, or by the KKT system as a reference.

Both solve ``Qv + C'y = r``, ``Cv = s`` for the rows C that hold with equality. The penalty way replaces the indefinite system by
``H = Q + C'WC``, positive definite and of size n (Linghu et al., 2026, arXiv:2602.14154, with the official code's constants): one solve
gives v up to O(beta), and each further solve on the residual multiplies the error by about beta.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import scipy.linalg as dense_linalg
import scipy.sparse as sparse
import scipy.sparse.linalg as sparse_linalg

from cameraready.optim._linear import Array, Matrix, WeightedGram, iterative_solve
from cameraready.optim.dxpp.errors import InaccurateQPWarning
from cameraready.optim.dxpp.numerics.programs import Program

#: Residual, relative to the right-hand side, at which refinement has nothing left to do.
ROUNDING = 1e-13
#: Above these sizes ``backward="auto"`` forms no matrix (the official code's limits).
MATRIX_FREE_VARIABLES, MATRIX_FREE_ENTRIES = 50_000, 5e7


@dataclass(frozen=True)
class Faces:
    """Which constraints hold with equality beside ``Ax = b``: rows of G, boolean (m,), and bounds, boolean (n,) each."""

    rows: Array
    lower: Array
    upper: Array

    @property
    def box(self) -> Array:
        return self.lower | self.upper

    @property
    def count(self) -> int:
        return int(self.rows.sum() + self.box.sum())

    def same(self, other: Faces) -> bool:
        return all(np.array_equal(getattr(self, name), getattr(other, name)) for name in ("rows", "lower", "upper"))


class EqualityProgram:
    """The program on its faces: rows C are those of A, the active ones of G, and unit rows of variables at a bound.

    Attributes
    ----------
    target : ndarray of shape (k,)
        Right-hand side of ``Cx = target``.
    """

    def __init__(self, program: Program, faces: Faces) -> None:
        self.program, self.faces = program, faces
        active = program.rows[faces.rows]
        if program.is_sparse:
            self.C = sparse.vstack([sparse.csr_array(program.A), active], format="csr")
        else:
            self.C = np.concatenate([program.A, active])
        self.at = np.flatnonzero(faces.box)
        bound = np.where(faces.lower, program.lb, program.ub)[self.at]
        self.target = np.concatenate([program.b, program.h[faces.rows], bound])
        self.parts = np.cumsum([len(program.b), int(faces.rows.sum())])

    def product(self, v: Array) -> Array:
        """``C v``."""
        return np.concatenate([self.C @ v, v[self.at]])

    @cached_property
    def _transposed(self) -> Matrix:
        return self.C.T.tocsr() if self.program.is_sparse else self.C.T

    def pulled_back(self, y: Array) -> Array:
        """``C' y``."""
        result = self._transposed @ y[: self.parts[1]]
        result[self.at] += y[self.parts[1] :]
        return result

    def split(self, y: Array) -> tuple[Array, Array, Array]:
        """`y` by equalities (p,), inequalities (m,) and variables (n,), zero where a constraint is not active."""
        equal, rows, box = np.split(y, self.parts)
        lam, z = np.zeros(len(self.program.h)), np.zeros(len(self.program.q))
        lam[self.faces.rows], z[self.at] = rows, box
        return equal, lam, z

    def joined(self, equal: Array, lam: Array, z: Array) -> Array:
        """Inverse of `split`."""
        return np.concatenate([equal, lam[self.faces.rows], z[self.at]])


@dataclass(frozen=True)
class Penalty:
    """How heavily rows are penalised.

    Attributes
    ----------
    beta : float
        Width of the smoothed penalty, relative to the size of x.
    level : float
        rho over the largest multiplier, the official code's zeta.
    multiplier : float
        The largest multiplier over the curvature times the size of x.
    curvature : float
        Largest diagonal entry of Q; the unit of weights.
    """

    beta: float
    level: float
    multiplier: float
    curvature: float

    @property
    def weight(self) -> float:
        """Of an inequality whose slack is zero, rho / (4 beta); that of an equality is twice as large.

        rho is bounded below, or tiny multipliers would give rows that are neither active nor inactive, and above, or a linear
        objective would make H as good as singular.
        """
        return self.level * float(np.clip(self.multiplier, 1.0, 100.0)) * self.curvature / (4.0 * self.beta)


Method = Literal["auto", "direct", "iterative", "kkt"]


@dataclass
class Quality:
    """What a solve came to: residual relative to the right-hand side, solves beyond the first, and whether it can be trusted."""

    residual: float = np.inf
    steps: int = 0


class PenaltySystem:
    """Solves on the faces by the penalised Hessian; `method` is ``"direct"``, ``"iterative"`` or ``"auto"``."""

    def __init__(self, on: EqualityProgram, penalty: Penalty, method: Method = "auto") -> None:
        self.on, program = on, on.program
        # A force r moves x by about r over this, were nothing in its way: the unit that v is measured in where it is zero.
        self._curvature = penalty.curvature
        p, active = len(program.b), int(on.faces.rows.sum())
        self.weights = np.full(p + active + len(on.at), penalty.weight)
        self.weights[:p] *= 2.0
        self._gram: WeightedGram | None = None
        n = len(program.q)
        if method == "auto":
            large = program.is_sparse and (n > MATRIX_FREE_VARIABLES or self._entries() > MATRIX_FREE_ENTRIES)
            method = "iterative" if large else "direct"
        diagonal = np.zeros(n)
        diagonal[on.at] = self.weights[on.parts[1] :]
        if method == "direct":
            self._gram = WeightedGram(program.Q, on.C, self.weights[: on.parts[1]], diagonal)
            self.kind, self.pivot_ratio, self.shift = self._gram.kind, self._gram.pivot_ratio, self._gram.shift
        else:
            squares = on.C.multiply(on.C) if program.is_sparse else on.C**2
            self._diagonal = program.Q.diagonal() + squares.T @ self.weights[: on.parts[1]] + diagonal
            self._diagonal[self._diagonal <= 0.0] = 1.0
            self.kind, self.pivot_ratio, self.shift = "conjugate gradients", float("nan"), 0.0
        self.failed = False

    def _entries(self) -> float:
        """An upper bound on the entries of H without its dense rows."""
        counts = np.diff(self.on.C.indptr).astype(float)
        limit = max(64.0, 4.0 * np.sqrt(len(self.on.program.q)))
        return float(self.on.program.Q.nnz + (counts[counts <= limit] ** 2).sum())

    def hessian_product(self, v: Array) -> Array:
        return self.on.program.Q @ v + self.on.pulled_back(self.weights * self.on.product(v))

    def _inverse(self, rhs: Array) -> Array:
        if self._gram is not None:
            return self._gram.solve(rhs)
        found, converged = iterative_solve(self.hessian_product, rhs, diagonal=self._diagonal)
        if not converged:
            found, converged = iterative_solve(self.hessian_product, rhs, diagonal=self._diagonal, method="minres")
        self.failed |= not converged
        return found

    def solve(self, r: Array, s: Array, steps: int, y: Array | None = None) -> tuple[Array, Array, Quality]:
        """v (n,) and y (k,) with ``Qv + C'y = r``, ``Cv = s``.

        Parameters
        ----------
        r, s : ndarray of shapes (n,) and (k,)
        steps : int
            Solves beyond the first, each on what is left; stops early at rounding.
        y : ndarray of shape (k,), optional
            Where to start; zero by default, with which the first solve is the penalty method's answer.
        """
        on = self.on
        size_r = float(np.abs(r).max(initial=0.0))
        v, y = np.zeros(len(r)), np.zeros(len(s)) if y is None else y
        left_r, left_s = r - on.pulled_back(y) if y.any() else r, s
        best: tuple[float, Array, Array] = (np.inf, v, y)
        quality = Quality()
        for step in range(steps + 1):
            dv = self._inverse(left_r + on.pulled_back(self.weights * left_s))
            v, y = v + dv, y + self.weights * (on.product(dv) - left_s)
            if steps == 0:
                return v, y, quality
            Qv, Cy = on.program.Q @ v, on.pulled_back(y)
            left_r, left_s = r - Qv - Cy, s - on.product(v)
            scale_r = max(size_r, float(np.abs(Qv).max(initial=0.0)), float(np.abs(Cy).max(initial=0.0)))
            scale_s = max(
                float(np.abs(v).max(initial=0.0)), float(np.abs(s).max(initial=0.0)), size_r / self._curvature
            )
            residual = max(
                float(np.abs(left_r).max(initial=0.0)) / (scale_r or 1.0),
                float(np.abs(left_s).max(initial=0.0)) / (scale_s or 1.0),
            )
            quality.steps = step
            if residual < best[0]:
                worsened, best = residual > 0.5 * best[0], (residual, v, y)
            else:
                worsened = True
            if residual <= ROUNDING or (worsened and step > 1) or not np.isfinite(residual):
                break
        quality.residual, v, y = best
        return v, y, quality

    def flatness(self) -> float:
        """The smallest curvature of H that a few inverse iterations find, over the largest entry of Q; 0 if it is singular.

        Costs nothing where the pivots already tell that H is far from singular.
        """
        unit = float(np.abs(self.on.program.Q.diagonal()).max(initial=0.0)) or 1.0
        if self._gram is None or (self.shift == 0.0 and self.pivot_ratio > 1e-13):
            return 1.0
        v = np.random.default_rng(0).normal(size=len(self.on.program.q))
        for _ in range(3):
            v = self._gram.solve(v / np.linalg.norm(v))
            if not np.isfinite(v).all():
                return 0.0
        v /= np.linalg.norm(v)
        on_rows = self.on.product(v)
        return float((v @ (self.on.program.Q @ v) + on_rows @ (self.weights * on_rows)) / unit)


class KKTSystem:
    """The same by the reduced KKT matrix ``[[Q, C'], [C, 0]]``: LU, or least squares with a warning where it is singular."""

    shift = 0.0
    pivot_ratio = float("nan")

    def __init__(self, on: EqualityProgram) -> None:
        self.on = on
        n, k = len(on.program.q), len(on.target)
        unit = (np.ones(len(on.at)), (np.arange(len(on.at)), on.at))
        self._lu = None
        if on.program.is_sparse:
            C = sparse.vstack([on.C, sparse.csr_array(unit, shape=(len(on.at), n))])
            self.matrix: Matrix = (
                sparse.block_array([[on.program.Q, C.T], [C, None]], format="csc") if k else on.program.Q
            )
            try:
                lu = sparse_linalg.splu(sparse.csc_matrix(self.matrix))
                pivots = np.abs(lu.U.diagonal())
                self._lu = lu.solve if pivots.min() > 1e-14 * pivots.max() else None
            except RuntimeError:  # exactly singular
                pass
        else:
            C = np.concatenate([on.C, np.eye(n)[on.at]])
            self.matrix = np.block([[on.program.Q, C.T], [C, np.zeros((k, k))]])
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", dense_linalg.LinAlgWarning)
                lu = dense_linalg.lu_factor(self.matrix, check_finite=False)
            pivots = np.abs(np.diagonal(lu[0]))
            if pivots.min() > 1e-14 * pivots.max():
                self._lu = lambda rhs: dense_linalg.lu_solve(lu, rhs, check_finite=False)
        self.kind = "KKT" if self._lu else "KKT by least squares"
        self.failed = False

    def solve(self, r: Array, s: Array, steps: int = 0, y: Array | None = None) -> tuple[Array, Array, Quality]:
        """v and y as in `PenaltySystem.solve`; at most one refinement, and `y` is ignored."""
        rhs = np.concatenate([r, s])
        if self._lu:
            found = self._lu(rhs)
            if steps:
                found = found + self._lu(rhs - self.matrix @ found)
        else:
            warnings.warn(
                "the KKT matrix is singular (dependent active constraints, or a solution that is not unique); the gradient is a "
                "least-squares one",
                InaccurateQPWarning,
                stacklevel=2,
            )
            if sparse.issparse(self.matrix):
                found = sparse_linalg.lsmr(self.matrix, rhs, atol=1e-13, btol=1e-13, conlim=0, maxiter=20 * len(rhs))[0]
            else:
                found = dense_linalg.lstsq(self.matrix, rhs, check_finite=False)[0]
        if not steps:
            return found[: len(r)], found[len(r) :], Quality()
        size = float(np.abs(rhs).max(initial=0.0)) or 1.0
        residual = float(np.abs(rhs - self.matrix @ found).max(initial=0.0)) / size
        return found[: len(r)], found[len(r) :], Quality(residual, min(steps, 1))

    def flatness(self) -> float:
        return 1.0
