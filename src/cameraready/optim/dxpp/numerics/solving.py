"""From a program to its solution: a solver of qpsolvers, its faces, a refined primal-dual point, and a verdict that is the KKT conditions'."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

import numpy as np

from cameraready.optim._linear import Array, NotPositiveDefiniteError
from cameraready.optim.dxpp.errors import InaccurateQPWarning, QPError, WeaklyActiveWarning
from cameraready.optim.dxpp.numerics.points import (
    Point,
    corrected_faces,
    guessed_faces,
    slacks,
    units_of,
    weak_faces,
    zeros_at,
)
from cameraready.optim.dxpp.numerics.programs import Program
from cameraready.optim.dxpp.numerics.sensitivity import (
    EqualityProgram,
    Faces,
    KKTSystem,
    Method,
    Penalty,
    PenaltySystem,
)
from cameraready.optim.dxpp.numerics.solver import CAN_START, Options, ask_solver, within_reach
from cameraready.optim.dxpp.numerics.verdict import diagnosis, drift, falls_for_ever, residuals

#: KKT residuals, relative, above which a point is no solution, and above which a user is warned.
REJECTED, DOUBTED = 1e-4, 1e-7
#: How many times the active set is corrected before the solver's own point is kept.
MAX_CORRECTIONS = 12


@dataclass
class QPInfo:
    """What is known of one solution, in the units of the normalised program.

    Attributes
    ----------
    status : str
        ``"solved"``; anything else is raised as a `QPError`.
    solver : str
    primal_residual, dual_residual, complementarity : float
        Largest violation of the constraints relative to the size of x, of stationarity relative to the size of the gradient, and
        the largest smaller of slack and multiplier.
    n_active, n_weak : int
        Inequalities and bounds that hold with equality; those of them whose multiplier is zero as well.
    slack_over_beta : float
        Largest slack of an active constraint over beta; the weights are those of a slack of zero, whatever it is.
    polished : bool
        Whether the point was refined on its active set.
    warm_started : bool
    factorisation : str
        How the Hessian was factorised; empty before it was.
    condition_estimate : float
        Largest over smallest pivot of the factorisation, a rough lower bound of the condition number.
    gradient_residual : float
        Residual of the last backward solve, relative; infinite before there was one, and with ``refine=0``, which computes none.
    refinements : int
        Solves beyond the first in the last backward pass.
    """

    status: str = "solved"
    solver: str = ""
    primal_residual: float = np.inf
    dual_residual: float = np.inf
    complementarity: float = np.inf
    n_active: int = 0
    n_weak: int = 0
    slack_over_beta: float = 0.0
    polished: bool = False
    warm_started: bool = False
    factorisation: str = ""
    condition_estimate: float = float("nan")
    gradient_residual: float = np.inf
    refinements: int = 0


@dataclass
class Solved:
    """A solution with what its derivative needs."""

    program: Program
    point: Point
    faces: Faces
    options: Options
    info: QPInfo
    system: PenaltySystem | KKTSystem | None = None

    def ready_system(self) -> PenaltySystem | KKTSystem:
        """The factorised system on the faces, made when it is first asked for."""
        if self.system is None:
            on = EqualityProgram(self.program, self.faces)
            if self.options.backward == "kkt":
                self.system = KKTSystem(on)
            else:
                self.system = PenaltySystem(
                    on, penalty_for(self.program, self.point, self.options), self.options.backward
                )
        self.info.factorisation = self.system.kind
        self.info.condition_estimate = 1.0 / self.system.pivot_ratio if self.system.pivot_ratio else np.inf
        return self.system


def penalty_for(program: Program, point: Point, options: Options) -> Penalty:
    units = units_of(program, point)
    curvature = units.curvature or units.multiplier / units.x
    largest = max(float(np.abs(each).max(initial=0.0)) for each in (point.equal, point.lam, point.z))
    return Penalty(options.beta, options.penalty, largest / (curvature * units.x), curvature)


# --- all together --------------------------------------------------------------------------------------------------------


def solve_program(
    program: Program, options: Options, start: Array | None = None, differentiable: bool = True
) -> Solved:
    """Solve a normalised program.

    Parameters
    ----------
    program : Program
        Of `normalised`.
    options : Options
    start : ndarray of shape (n,), optional
        Where a solver that can should start.
    differentiable : bool
        Whether a derivative will be asked for, so that a solution without one is an error.

    Returns
    -------
    Solved

    Raises
    ------
    QPError
        If the program is infeasible or unbounded, the solver fails, or, with `differentiable`, the solution is not unique.
    """
    info = QPInfo(solver=options.solver, warm_started=start is not None and options.solver in CAN_START)
    reached, kept = within_reach(program)
    candidate = candidate_for(program, reached, kept, options, start)
    if reached is not program and (candidate is None or max(residuals(program, candidate.point)) > DOUBTED):
        candidate = candidate_for(program, program, np.ones_like(kept), options, start)
    if candidate is None:
        raise failure(program, options)
    solved, near = Solved(program, candidate.point, candidate.faces, options, info, candidate.system), candidate.near
    info.polished = solved.system is not None
    info.primal_residual, info.dual_residual, info.complementarity = residuals(program, solved.point)
    worst = max(info.primal_residual, info.dual_residual, info.complementarity)
    if not worst <= REJECTED:
        raise failure(program, options, point=solved.point)
    suspicious = worst > DOUBTED or drift(program, solved.point) > 1e-3
    if suspicious and falls_for_ever(program, solved.point):
        raise QPError(
            "unbounded", "the program is unbounded: there is a direction along which the objective falls for ever"
        )
    if worst > DOUBTED:
        warnings.warn(
            f"{options.solver}'s solution meets the optimality conditions to {worst:.1g} only, and its active set could not be settled;"
            " gradients may be off by as much; use tighter solver_options or another solver",
            InaccurateQPWarning,
            stacklevel=4,
        )
    settle_weak(solved, near)
    if differentiable:
        require_unique(solved)
    if options.backward == "kkt":
        solved.system = None  # polished by the penalised Hessian, differentiated by the KKT system
    if solved.system is not None or differentiable:
        solved.ready_system()
    return solved


@dataclass(frozen=True)
class Candidate:
    """A point with its faces, and the factorised system on them if it was polished; `near` counts as zero on it."""

    point: Point
    faces: Faces
    system: PenaltySystem | None
    near: float


def candidate_for(
    program: Program, seen: Program, kept: Array, options: Options, start: Array | None
) -> Candidate | None:
    """What the solver makes of `seen`, the rows `kept` of `program`, polished on all of it; None without a finite point."""
    if len(seen.h) or len(seen.b) or seen.has_box:
        try:
            raw = ask_solver(seen, options, start)
        except (ArithmeticError, RuntimeError, AssertionError) as error:
            raise failure(program, options, str(error)) from error
        if raw is None:
            return None
        lam = np.zeros(len(program.h))
        lam[kept] = raw.lam
        raw = replace(raw, lam=lam)
    else:
        raw = Point(np.zeros(len(program.q)), np.zeros(0), np.zeros(len(program.h)), np.zeros(len(program.q)))
    unconstrained = not (len(program.h) or len(program.b) or program.has_box)
    found = polished(program, raw, options) if options.polish or unconstrained else None
    if found is not None:
        return Candidate(
            found[0], found[1].on.faces, found[1], 1e-10 if options.eps_active is None else options.eps_active
        )
    near = 1e-5 if options.eps_active is None else options.eps_active
    return Candidate(raw, guessed_faces(program, raw, units_of(program, raw), near), None, near)


def failure(program: Program, options: Options, said: str = "", point: Point | None = None) -> QPError:
    status, reason = diagnosis(program, point)
    words = {
        "infeasible": "the program is infeasible",
        "unbounded": "the program is unbounded",
        "not solved": f"{options.solver} failed",
    }
    return QPError(status, f"{words[status]}: {reason}" + (f" ({said})" if said else ""))


def polished(program: Program, raw: Point, options: Options) -> tuple[Point, PenaltySystem] | None:
    """The exact solution on the active set, corrected until signs and slacks are right; None if that does not come about."""
    units = units_of(program, raw)
    zero = 1e-10 if options.eps_active is None else min(options.eps_active, 1e-10)
    faces = guessed_faces(program, raw, units, 0.0)
    method: Method = "auto" if options.backward == "kkt" else options.backward
    before = max(residuals(program, raw))
    seen: list[Faces] = []
    for _ in range(MAX_CORRECTIONS):
        on = EqualityProgram(program, faces)
        try:
            system = PenaltySystem(on, penalty_for(program, raw, options), method)
        except NotPositiveDefiniteError:
            return None
        y = on.joined(raw.equal, raw.lam, raw.z)
        dx, dy, _ = system.solve(-program.gradient(raw.x) - on.pulled_back(y), on.target - on.product(raw.x), steps=4)
        point = Point(raw.x + dx, *on.split(y + dy))
        if not np.isfinite(point.x).all():
            return None
        point = replace(point, x=on_bounds(program, faces, point.x))
        seen.append(faces)
        faces = corrected_faces(program, point, faces, zeros_at(program, point, units, zero))
        if faces.same(seen[-1]):
            return (point, system) if max(residuals(program, point)) <= max(before, DOUBTED) else None
        if any(faces.same(each) for each in seen):
            return None
    return None


def on_bounds(program: Program, faces: Faces, x: Array) -> Array:
    """`x` with variables at a bound put exactly there."""
    return np.where(faces.lower, program.lb, np.where(faces.upper, program.ub, x))


def settle_weak(solved: Solved, zero: float) -> None:
    """Count weakly active constraints, warn of them, and treat them as `weak` says."""
    program, faces = solved.program, solved.faces
    weak = weak_faces(program, solved.point, zeros_at(program, solved.point, units_of(program, solved.point), zero))
    solved.info.n_weak = weak.count
    if weak.count:
        policy = solved.options.weak
        said = f"{weak.count} constraints hold with equality and multiplier zero: the solution has one-sided derivatives only there"
        if policy == "raise":
            raise QPError("not differentiable", f"{said}; weak='active' or 'inactive' takes one of them")
        warnings.warn(f"{said}; they are taken as {policy}", WeaklyActiveWarning, stacklevel=5)
        names = ("rows", "lower", "upper")
        if policy == "active":
            settled = Faces(*(getattr(faces, name) | getattr(weak, name) for name in names))
            settled = replace(settled, upper=settled.upper & ~settled.lower)
        else:
            settled = Faces(*(getattr(faces, name) & ~getattr(weak, name) for name in names))
        if not settled.same(faces):
            solved.faces, solved.system = settled, None
    solved.info.n_active = solved.faces.count
    rows, lower, upper = slacks(program, solved.point.x)
    active = np.concatenate([rows[solved.faces.rows], lower[solved.faces.lower], upper[solved.faces.upper]])
    unit = solved.options.beta * units_of(program, solved.point).x
    solved.info.slack_over_beta = float(np.abs(active).max(initial=0.0)) / unit


def require_unique(solved: Solved) -> None:
    """Raises QPError if the objective is flat along a direction that the faces leave free; the iterative way cannot tell."""
    system = solved.system
    if system is None:
        method: Method = "auto" if solved.options.backward == "kkt" else solved.options.backward
        penalty = penalty_for(solved.program, solved.point, solved.options)
        try:
            system = PenaltySystem(EqualityProgram(solved.program, solved.faces), penalty, method)
        except NotPositiveDefiniteError:
            system = None
    if system is None or system.flatness() < 1e-11:
        raise QPError(
            "not differentiable",
            "the solution is not unique: the objective is flat along a direction that the active constraints leave free, so that it has"
            " no derivative; regularization=1e-6, say, adds that to the diagonal of the normalised Q",
        )
    solved.system = system
