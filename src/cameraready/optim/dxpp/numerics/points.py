"""Points of a program: what counts as large and as zero there, and which constraints are active."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cameraready.optim._linear import Array
from cameraready.optim.dxpp.numerics.programs import Program
from cameraready.optim.dxpp.numerics.sensitivity import Faces


@dataclass(frozen=True)
class Point:
    """A primal-dual point: x (n,), multipliers of equalities (p,), inequalities (m,) and bounds (n,), negative at a lower bound."""

    x: Array
    equal: Array
    lam: Array
    z: Array


@dataclass(frozen=True)
class Units:
    """What counts as large: the size of x and slacks, of multipliers and gradients, and of Q."""

    x: float
    multiplier: float
    curvature: float


def units_of(program: Program, point: Point) -> Units:
    curvature = float(np.abs(program.Q.diagonal()).max(initial=0.0))
    slope = max(np.abs(program.q).max(initial=0.0), np.abs(program.Q @ point.x).max(initial=0.0))
    multiplier = max(float(np.abs(each).max(initial=0.0)) for each in (point.equal, point.lam, point.z, [slope]))
    x = max(float(np.abs(point.x).max(initial=0.0)), float(np.abs(program.b).max(initial=0.0)))
    if x == 0.0:
        x = float(slope) / curvature if curvature > 0.0 and slope > 0.0 else 1.0
    return Units(x, multiplier or 1.0, curvature)


@dataclass(frozen=True)
class Zeros:
    """Under which a slack or a multiplier counts as zero, each by what it is the small difference of: slacks of rows (m,) and of bounds
    (n,) by the terms of the row, multipliers (m,) and (n,) by the terms of stationarity that they enter."""

    rows: Array
    lower: Array
    upper: Array
    lam: Array
    z: Array


def stationarity_terms(program: Program, point: Point) -> Array:
    """Sum of the absolute values of the terms of each component of the stationarity condition, (n,)."""
    Q, G, A = program.absolute
    terms = np.abs(program.q) + Q @ np.abs(point.x) + np.abs(point.z)
    return terms + G.T @ np.abs(point.lam) + A.T @ np.abs(point.equal)


def zeros_at(program: Program, point: Point, units: Units, relative: float) -> Zeros:
    _, G, _ = program.absolute
    x, floor, size = 1e-14 * units.x, 1e-14 * units.multiplier, np.abs(point.x)
    terms = np.maximum(stationarity_terms(program, point), floor)
    if program.is_sparse:
        shares = program.rows.__abs__()
        shares = shares.data / terms[shares.indices]
        largest = np.maximum.reduceat(shares, program.rows.indptr[:-1]) if len(program.h) else np.zeros(0)
    else:
        largest = (G / terms).max(axis=1, initial=0.0)
    return Zeros(
        x + relative * (G @ size + np.abs(program.h)),
        x + relative * (size + np.where(np.isfinite(program.lb), np.abs(program.lb), 0.0)),
        x + relative * (size + np.where(np.isfinite(program.ub), np.abs(program.ub), 0.0)),
        floor + relative / largest,
        floor + relative * terms,
    )


# --- faces ---------------------------------------------------------------------------------------------------------------


def slacks(program: Program, x: Array) -> tuple[Array, Array, Array]:
    """Of rows of G (m,), lower and upper bounds (n,); infinite where there is no bound."""
    return program.h - program.G @ x, x - program.lb, program.ub - x


def guessed_faces(program: Program, point: Point, units: Units, near: float) -> Faces:
    """Constraints whose multiplier outweighs their slack, both in their units, and those with a slack under `near`."""
    rows, lower, upper = (slack / units.x for slack in slacks(program, point.x))
    lam, z = point.lam / units.multiplier, point.z / units.multiplier
    lower, upper = (lower <= np.maximum(-z, near)) | program.fixed, (upper <= np.maximum(z, near)) & ~program.fixed
    return Faces(rows <= np.maximum(lam, near), lower, upper & ~lower)


def corrected_faces(program: Program, point: Point, faces: Faces, zeros: Zeros) -> Faces:
    """`faces` without constraints whose multiplier has the wrong sign, and with those that are violated."""
    rows, lower, upper = slacks(program, point.x)
    keep_lower, keep_upper = faces.lower & (point.z <= zeros.z), faces.upper & (point.z >= -zeros.z)
    return Faces(
        (faces.rows & (point.lam >= -zeros.lam)) | (rows < -zeros.rows),
        ((keep_lower | (lower < -zeros.lower)) & ~keep_upper) | program.fixed,
        (keep_upper | (upper < -zeros.upper)) & ~program.fixed & ~keep_lower,
    )


def weak_faces(program: Program, point: Point, zeros: Zeros) -> Faces:
    """Constraints whose slack and multiplier are both zero."""
    rows, lower, upper = (np.abs(slack) for slack in slacks(program, point.x))
    small = (np.abs(point.z) <= zeros.z) & ~program.fixed
    small_rows = (rows <= zeros.rows) & (np.abs(point.lam) <= zeros.lam)
    return Faces(small_rows, (lower <= zeros.lower) & small, (upper <= zeros.upper) & small)
