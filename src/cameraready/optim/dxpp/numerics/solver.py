"""One call of a solver of qpsolvers, with multipliers under one sign convention."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import scipy.sparse as sparse

from cameraready.optim._linear import Array, Matrix
from cameraready.optim.dxpp.numerics.points import Point
from cameraready.optim.dxpp.numerics.programs import Program
from cameraready.optim.dxpp.numerics.sensitivity import Method

#: Settings that bring a solver to ten digits where it can; `solver_options` go over them.
TIGHT: Mapping[str, Mapping[str, Any]] = {
    "clarabel": {"tol_gap_abs": 1e-10, "tol_gap_rel": 1e-10, "tol_feas": 1e-10},
    "proxqp": {"eps_abs": 1e-9, "eps_rel": 0.0},
    "osqp": {"eps_abs": 1e-8, "eps_rel": 1e-8, "max_iter": 50_000, "polishing": True},
    "scs": {"eps_abs": 1e-9, "eps_rel": 1e-9},
    "cvxopt": {"feastol": 1e-9, "abstol": 1e-9, "reltol": 1e-9},
    "piqp": {"eps_abs": 1e-10, "eps_rel": 1e-10, "check_duality_gap": True},
}
#: Solvers that qpsolvers lets start from a point.
CAN_START = frozenset({"osqp", "proxqp", "cvxopt", "hpipm", "qpalm", "scs", "pdhcg", "nppro", "sip"})
#: Right-hand sides and bounds this many times the size of x are left out of what the solver sees; they blind it to the others.
FAR = 1e8


@dataclass(frozen=True)
class Options:
    """What `PenaltyQPLayer` was given; see there."""

    solver: str = "clarabel"
    beta: float = 1e-6
    penalty: float = 10.0
    eps_active: float | None = None
    backward: Method = "auto"
    refine: int = 8
    weak: Literal["active", "inactive", "raise"] = "active"
    polish: bool = True
    solver_options: Mapping[str, Any] | None = None


def ask_solver(program: Program, options: Options, start: Array | None) -> Point | None:
    """The point of the named solver, whatever it says of it; None if there is none. Multipliers it does not give are zero.

    Raises
    ------
    ValueError
        If the solver is not installed or does not know an option.
    """
    import qpsolvers

    if options.solver not in qpsolvers.available_solvers:
        raise ValueError(
            f"solver {options.solver!r} is not installed; installed are {', '.join(qpsolvers.available_solvers)}; others come by"
            f" pip install qpsolvers[{options.solver}]"
        )
    fixed = np.flatnonzero(program.fixed)
    matrix = (
        (lambda rows: sparse.csc_matrix(rows))
        if program.is_sparse or options.solver in ("clarabel", "osqp")
        else (lambda rows: rows)
    )
    A, b, lb, ub = program.A, program.b, program.lb, program.ub
    if len(fixed):
        # An interior-point method needs an interior: a variable between equal bounds is an equality.
        unit = sparse.csc_array(
            (np.ones(len(fixed)), (np.arange(len(fixed)), fixed)), shape=(len(fixed), len(program.q))
        )
        A = sparse.vstack([A, unit]) if program.is_sparse else np.concatenate([A, unit.toarray()])
        b, lb, ub = np.concatenate([b, lb[fixed]]), lb.copy(), ub.copy()
        lb[fixed], ub[fixed] = -np.inf, np.inf
    G, h, m = program.G, program.h, len(program.h)
    has_box = bool(np.isfinite(lb).any() or np.isfinite(ub).any())
    low, high = np.flatnonzero(np.isfinite(lb)), np.flatnonzero(np.isfinite(ub))
    if has_box and options.solver == "clarabel":
        # It knows no bounds; qpsolvers would write a row for infinite ones too.
        G, h = with_bounds(program, low, high), np.concatenate([h, -lb[low], ub[high]])
    problem = qpsolvers.Problem(
        P=matrix(program.Q),
        q=program.q.copy(),
        G=matrix(G) if len(h) else None,
        h=h.copy() if len(h) else None,
        A=matrix(A) if len(b) else None,
        b=b.copy() if len(b) else None,
        lb=lb.copy() if has_box and options.solver != "clarabel" else None,
        ub=ub.copy() if has_box and options.solver != "clarabel" else None,
    )
    settings = {**TIGHT.get(options.solver, {}), **(options.solver_options or {})}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what the solver has to say is judged by the KKT conditions
            found = qpsolvers.solve_problem(problem, options.solver, initvals=start, **settings)
    except (qpsolvers.ProblemError, qpsolvers.SolverError) as error:
        raise RuntimeError(str(error)) from error
    except (AttributeError, TypeError, ValueError, qpsolvers.ParamError) as error:
        raise ValueError(
            f"{options.solver} does not take this program or solver_options {dict(options.solver_options or {})}: {error}"
        ) from error
    if found.x is None or not np.isfinite(found.x).all():
        return None
    equal, lam = multipliers(found.y, len(b)), multipliers(found.z, len(h))
    if len(h) > m:
        z = np.zeros(len(program.q))
        z[low] -= lam[m : m + len(low)]
        z[high] += lam[m + len(low) :]
        lam = lam[:m]
    else:
        z = multipliers(found.z_box, len(program.q))
    if len(fixed):
        z[fixed], equal = equal[len(program.b) :], equal[: len(program.b)]
    return Point(np.array(found.x, dtype=float), equal, lam, z)


def with_bounds(program: Program, low: Array, high: Array) -> Matrix:
    """`G` with a row ``-x_i`` for each variable in `low` and ``x_i`` for each in `high`."""
    n, sign = len(program.q), np.repeat([-1.0, 1.0], [len(low), len(high)])
    place = (np.arange(len(sign)), np.concatenate([low, high]))
    if program.is_sparse:
        return sparse.vstack([program.G, sparse.csc_array((sign, place), shape=(len(sign), n))], format="csc")
    rows = np.zeros((len(sign), n))
    rows[place] = sign
    return np.concatenate([program.G, rows])


def multipliers(values: Any, count: int) -> Array:
    if values is None or np.size(values) != count or not np.isfinite(values).all():
        return np.zeros(count)
    return np.array(values, dtype=float).ravel()


def within_reach(program: Program) -> tuple[Program, Array]:
    """The program without rows and bounds that are too far away to matter, and which rows of G are left, boolean (m,)."""
    rows = program.h <= FAR
    far_low, far_high = program.lb < -FAR, program.ub > FAR
    if rows.all() and not (far_low & np.isfinite(program.lb)).any() and not (far_high & np.isfinite(program.ub)).any():
        return program, rows
    G = sparse.csc_array(program.rows[rows]) if program.is_sparse else program.G[rows]
    lb, ub = np.where(far_low, -np.inf, program.lb), np.where(far_high, np.inf, program.ub)
    return replace(program, G=G, h=program.h[rows], lb=lb, ub=ub), rows
