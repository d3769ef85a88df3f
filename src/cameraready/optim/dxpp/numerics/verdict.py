"""Whether a point is a solution, and if there is none, why."""

from __future__ import annotations

from typing import Literal

import numpy as np
import scipy.sparse as sparse
from scipy.optimize import linprog

from cameraready.optim.dxpp.numerics.points import Point, slacks, stationarity_terms, units_of
from cameraready.optim.dxpp.numerics.programs import Program, contradiction


def residuals(program: Program, point: Point) -> tuple[float, float, float]:
    """Primal, dual and complementarity, relative, as in `QPInfo`; a multiplier of the wrong sign counts as dual."""
    units = units_of(program, point)
    rows, lower, upper = slacks(program, point.x)
    equal = np.abs(program.A @ point.x - program.b)
    primal = max(float(np.max(each, initial=0.0)) for each in (-rows, -lower, -upper, equal)) / units.x
    stationarity = program.gradient(point.x) + point.z + program.G.T @ point.lam + program.A.T @ point.equal
    z = np.where(program.fixed, 0.0, point.z)
    wrong = max(
        np.max(-point.lam, initial=0.0),
        np.max(z[np.isinf(program.ub)], initial=0.0),
        np.max(-z[np.isinf(program.lb)], initial=0.0),
    )
    dual = max(float(np.abs(stationarity).max(initial=0.0)), float(wrong)) / units.multiplier
    gaps = [(rows, point.lam), (lower, -z), (upper, z)]
    gap = max(
        float(np.max(np.minimum(np.abs(s) / units.x, np.maximum(y, 0.0) / units.multiplier), initial=0.0))
        for s, y in gaps
    )
    return primal, dual, gap


def drift(program: Program, point: Point) -> float:
    """Largest component of stationarity that is left, relative to its own terms; of those above rounding.

    Along a flat direction all terms are small, and a point may run away while the residual looks small beside other components.
    """
    left = np.abs(program.gradient(point.x) + point.z + program.G.T @ point.lam + program.A.T @ point.equal)
    terms = stationarity_terms(program, point)
    above = left > 1e-12 * units_of(program, point).multiplier
    return float(np.max(left[above] / terms[above], initial=0.0))


def diagnosis(
    program: Program, point: Point | None = None
) -> tuple[Literal["infeasible", "unbounded", "not solved"], str]:
    """Why a program has no solution, by linear programs (HiGHS): one for a feasible point, one for a direction of descent."""
    bounds = np.column_stack([program.lb, program.ub])
    rows = {"A_ub": program.G if len(program.h) else None, "A_eq": program.A if len(program.b) else None}
    n = len(program.q)
    feasible = linprog(
        np.zeros(n),
        **rows,
        b_ub=program.h if len(program.h) else None,
        b_eq=program.b if len(program.b) else None,
        bounds=bounds,
    )
    if feasible.status == 2:
        return "infeasible", contradiction(program) or "no x meets all constraints"
    if falls_for_ever(program, point):
        return "unbounded", "there is a direction along which the objective falls for ever"
    return (
        "not solved",
        "the solver gave no point that meets the optimality conditions; try another solver or tighter solver_options",
    )


def falls_for_ever(program: Program, point: Point | None) -> bool:
    """Whether there is a direction d with Qd = 0 that leaves no constraint and along which the objective falls.

    Looked for among those that the linear part, or what is left of stationarity at `point`, points to.
    """
    Q = program.Q
    flat = sparse.vstack([Q, program.A], format="csc") if program.is_sparse else np.concatenate([Q, program.A])
    box = np.column_stack([np.where(np.isfinite(program.lb), 0.0, -1.0), np.where(np.isfinite(program.ub), 0.0, 1.0)])
    pulls = [program.q]
    if point is not None:
        pulls.append(program.gradient(point.x) + point.z + program.G.T @ point.lam + program.A.T @ point.equal)
    m = len(program.h)
    for pull in pulls:
        size = float(np.abs(pull).max(initial=0.0))
        if size == 0.0:
            continue
        limits = {"A_ub": program.G, "b_ub": np.zeros(m)} if m else {}
        ray = linprog(pull / size, **limits, A_eq=flat, b_eq=np.zeros(flat.shape[0]), bounds=box)
        if ray.status != 0 or ray.fun > -1e-6:
            continue
        d = np.asarray(ray.x)
        bends = float(np.abs(Q @ d).max(initial=0.0))
        if bends <= 1e-9 * float(abs(Q).max()) and program.q @ d < -1e-6 * float(np.abs(program.q) @ np.abs(d)):
            return True
    return False
