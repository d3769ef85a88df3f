"""What one trial measures; every function gives rows of numbers, one an arm."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import scipy.sparse as sparse
import torch

from cameraready.evidence import Context, interleave
from cameraready.optim.dxpp.errors import InaccurateQPWarning, WeaklyActiveWarning
from cameraready.optim.dxpp.layer import PenaltyQPLayer
from cameraready.optim.dxpp.trials import training
from cameraready.optim.dxpp.trials.rivals import (
    Forward,
    as_published,
    differentiation,
    exact,
    full_kkt,
    kkt_is_singular,
    peer_problem,
    relative_error,
    solved_forward,
    worst_error,
)
from cameraready.optim.dxpp.trials.workloads import (
    NAMES,
    Array,
    Data,
    random_dense,
    simplex,
    tensors,
    with_repeated_rows,
)

Rows = Iterator[dict[str, Any]]
BETAS = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-9)
#: Sizes at which forward and backward are timed together as well.
WHOLE = (1_000, 10_000)
#: Larger programs are tried with the middle ones only.
MOST_BETAS = 100
SOLVERS = ("clarabel", "proxqp", "osqp", "piqp")
LIBDQP = {"libdqp": ("scipy SPLU", "scipy LU"), "libdqp-pardiso": ("pardiso", "")}


def upstream_for(n: int, seed: int) -> Array:
    return np.random.default_rng([seed, n, 5]).normal(size=n)


def margin(forward: Forward) -> float:
    """How regular a solution is: the smallest multiplier of an active row and the smallest slack of another, both relative."""
    program, point, faces = forward.solved.program, forward.solved.point, forward.solved.faces
    slack = (program.h - program.G @ point.x)[~faces.rows]
    lam = point.lam[faces.rows]
    smallest = [
        lam.min() / lam.max() if len(lam) else 1.0,
        slack.min() / max(np.abs(point.x).max(), 1e-300) if len(slack) else 1.0,
    ]
    return float(min(smallest))


# --- accuracy ------------------------------------------------------------------------------------------------------------


def accuracy(data: Data, seed: int, betas: tuple[float, ...] = BETAS) -> Rows:
    """Errors against the KKT system, of every gradient (`error`) and of that of q (`q_error`)."""
    n = len(data["q"])
    betas = betas if n <= MOST_BETAS else BETAS[1:5]
    forward, gx = solved_forward(data), upstream_for(n, seed)
    truth, regular = exact(forward, gx), margin(forward)
    common = {"n": n, "margin": regular}
    yield {"arm": "dxpp", **common, **errors(differentiation(forward, "dxpp", gx)(), truth)}
    for beta in betas:
        for zeta in (2.0, 10.0, 100.0) if beta == 1e-6 and n <= MOST_BETAS else (10.0,):
            found = differentiation(forward, "formula", gx, beta=beta, penalty=zeta)()
            yield {"arm": "formula", "beta": beta, "zeta": zeta, **common, **errors(found, truth)}
    x, lam, mu = rough_point(data, 1e-6)
    for beta in betas:
        q_error = relative_error(as_published(data, x, lam, mu, gx, beta), truth["q"])
        yield {"arm": "as-published", "beta": beta, "zeta": 10.0, **common, "q_error": q_error}


def errors(found: dict[str, Array], truth: dict[str, Array]) -> dict[str, float]:
    return {"error": worst_error(found, truth), "q_error": relative_error(found["q"], truth["q"])}


def rough_point(data: Data, tolerance: float) -> tuple[Array, Array, Array]:
    """x and multipliers as piqp leaves them at an absolute tolerance, the official layer's default being 1e-6."""
    import qpsolvers

    given = {name: sparse.csc_matrix(value) if sparse.issparse(value) else value for name, value in data.items()}
    problem = qpsolvers.Problem(*(given.get(name) for name in ("Q", "q", "G", "h", "A", "b", "lb", "ub")))
    found = qpsolvers.solve_problem(problem, "piqp", **rough_settings(tolerance))
    return np.array(found.x), np.array(found.z), np.array(found.y)


def rough_settings(tolerance: float) -> dict[str, Any]:
    return {"eps_abs": tolerance, "eps_rel": 0.0, "eps_duality_gap_abs": tolerance, "eps_duality_gap_rel": 0.0}


def finite_differences(data: Data, seed: int, step: float = 1e-6) -> Rows:
    """Gradients along random directions of all data at once, through x and the multipliers, against central differences."""
    rng = np.random.default_rng([seed, 6])
    direction = {name: rng.normal(size=value.shape) for name, value in data.items()}
    direction["Q"] = (direction["Q"] + direction["Q"].T) / 2
    weights = [torch.from_numpy(rng.normal(size=len(data[name]))) for name in ("q", "h", "b")]

    def loss(values: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
        s = PenaltyQPLayer(**options)(**values)
        return sum((w * part).sum() for w, part in zip(weights, s, strict=True))

    moved = [float(loss(tensors({k: v + sign * step * direction[k] for k, v in data.items()}))) for sign in (1.0, -1.0)]
    difference = (moved[0] - moved[1]) / (2.0 * step)
    regular = margin(solved_forward(data))
    for arm, options in {"dxpp": {}, "formula": {"refine": 0}, "kkt": {"backward": "kkt"}}.items():
        inputs = {name: value.requires_grad_() for name, value in tensors(data).items()}
        found = torch.autograd.grad(loss(inputs, **options), list(inputs.values()))
        slope = sum(float((g.numpy() * direction[name]).sum()) for name, g in zip(inputs, found, strict=True))
        size = sum(float(np.abs(g.numpy() * direction[name]).sum()) for name, g in zip(inputs, found, strict=True))
        yield {"arm": arm, "n": len(data["q"]), "margin": regular, "difference_error": abs(slope - difference) / size}


# --- traps ---------------------------------------------------------------------------------------------------------------


def traps(seed: int, n: int) -> Rows:
    """The official rules and ours where slacks are left over, and where rows and objective have other units."""
    plain = {**simplex(n, seed), "Q": np.eye(n), "G": -np.eye(n), "A": np.ones((1, n))}
    factor = np.where(np.arange(n) % 2 == 0, 1e3, 1.0)
    cases = {
        "loose": plain,
        "row units": {**plain, "G": factor[:, np.newaxis] * plain["G"]},
        "objective units": {**plain, "Q": 1e6 * plain["Q"], "q": 1e6 * plain["q"]},
    }
    gx = upstream_for(n, seed)
    for case, data in cases.items():
        tolerance = 1e-5 if case == "loose" else 1e-9
        truth = exact(solved_forward(data), gx)["q"]
        x, lam, mu = rough_point(data, tolerance)
        for beta in (1e-6, 1e-4):
            error = relative_error(as_published(data, x, lam, mu, gx, beta), truth)
            yield {"arm": "as-published", "case": case, "beta": beta, "n": n, "q_error": error}
            # The same solver at the same tolerance: the layer polishes whatever it gets.
            forward = solved_forward(data, solver="piqp", solver_options=rough_settings(tolerance))
            for arm in ("formula", "dxpp"):
                found = differentiation(forward, arm, gx, beta=beta)()["q"]
                yield {"arm": arm, "case": case, "beta": beta, "n": n, "q_error": relative_error(found, truth)}


def repeated_rows(seed: int, n: int) -> Rows:
    """Gradients of q when every inequality stands twice, against those of the same program without the copies."""
    plain = random_dense(n, seed)
    gx = upstream_for(n, seed)
    single = solved_forward(plain)
    truth = exact(single, gx)["q"]
    with warnings.catch_warnings():
        # Copies make weakly active rows and dependent ones: what the warnings say is what is measured.
        warnings.simplefilter("ignore", (WeaklyActiveWarning))
        warnings.simplefilter("ignore", (InaccurateQPWarning))
        twice = solved_forward(with_repeated_rows(plain, seed))
        active = int(single.solved.faces.count)
        for arm in ("dxpp", "formula"):
            found = differentiation(twice, arm, gx)()
            finite = all(np.isfinite(each).all() for each in found.values())
            yield {
                "arm": arm,
                "n": n,
                "active": active,
                "finite": float(finite),
                "q_error": relative_error(found["q"], truth),
            }
        yield {"arm": "kkt", "n": n, "active": active, "singular": float(kkt_is_singular(twice))}


def solvers(data: Data, seed: int) -> Rows:
    """How far apart the gradients are that four forward solvers lead to, relative to the largest."""
    n = len(data["q"])
    gx, regular = upstream_for(n, seed), margin(solved_forward(data))
    for arm in ("dxpp", "formula"):
        found = [differentiation(solved_forward(data, solver=solver), arm, gx)() for solver in SOLVERS]
        spread = max(worst_error(other, found[0]) for other in found[1:])
        yield {"arm": arm, "n": n, "margin": regular, "spread": spread}


# --- speed ---------------------------------------------------------------------------------------------------------------


def speed(ctx: Context, data: Data, seed: int, instance: str, repeats: int, with_full: bool, peers: bool) -> Rows:
    """Seconds from the solution to the gradients of every input, of the backward pass alone, and of forward and backward together.

    Arms take turns, one thread each. What follows the solution is, for ours and `kkt`, the system on the known active set, its
    factorisation, solves and gradients; for libdqp, which is handed the solution, its own active set, KKT matrix and the same.
    """
    n = len(data["q"])
    forward, gx = solved_forward(data), upstream_for(n, seed)
    truth = exact(forward, gx)["q"]
    calls: dict[str, Any] = {arm: differentiation(forward, arm, gx) for arm in ("dxpp", "formula", "kkt")}
    if with_full:
        calls["full-kkt"] = full_kkt(forward, gx)
    timers = {arm: clocked(call) for arm, call in calls.items() if arm not in ctx.without}
    timers["dxpp, pass"] = clocked(backward_pass(forward, gx), "pass_seconds")
    if peers:
        timers |= libdqp_timers(ctx, forward, gx)
    if peers and n in WHOLE:
        timers["dxpp, whole"] = clocked(whole_layer(data, gx), "whole_seconds")
    shared = {"n": n, "active": forward.solved.info.n_active, "instance": instance}
    names = list(timers)
    for repeat in range(-1, repeats):
        turn = repeat % len(names)
        for name in names[turn:] + names[:turn]:
            found = timers[name]()
            if repeat >= 0:
                gradient = found.pop("q", None)
                error = {} if gradient is None else {"q_error": relative_error(gradient, truth)}
                yield {"arm": name.split(",")[0], "repeat": repeat, **found, **error, **shared}


def clocked(call: Any, column: str = "own_seconds") -> Any:
    """A call that returns its seconds under `column` and the gradient of q, if it makes one."""

    def timer() -> dict[str, Any]:
        started = time.perf_counter()
        found = call()
        seconds = time.perf_counter() - started
        if column != "own_seconds":
            return {column: seconds}
        return {column: seconds, "q": found["q"] if isinstance(found, dict) else found}

    return timer


def backward_pass(forward: Forward, upstream: Array) -> Any:
    """The layer's backward pass as a user sees it: its forward pass has left a factorisation."""
    inputs, gx = list(forward.inputs.values()), torch.from_numpy(upstream)
    return lambda: torch.autograd.grad(forward.output, inputs, gx, retain_graph=True)


def whole_layer(data: Data, upstream: Array) -> Any:
    """Forward by clarabel at 1e-10, and backward."""
    inputs = {name: value.requires_grad_() for name, value in tensors(data).items()}
    layer, gx = PenaltyQPLayer("clarabel"), torch.from_numpy(upstream)
    return lambda: torch.autograd.grad(layer(**inputs).x, list(inputs.values()), gx)


def libdqp_timers(ctx: Context, forward: Forward, gx: Array) -> dict[str, Any]:
    """libdqp in its own environment, timed there: from our solution, and at some sizes its whole layer with clarabel at 1e-10."""
    is_sparse = forward.solved.program.is_sparse
    wanted = {arm: names[0] if is_sparse else names[1] for arm, names in LIBDQP.items() if arm not in ctx.without}
    timers: dict[str, Any] = {}
    if not any(wanted.values()):
        return timers
    remote = ctx.peer("libdqp")
    for arm, solver in wanted.items():
        if not solver:
            continue
        remote.open_problem(peer_problem(forward.data), forward.x, forward.lam, forward.mu, solver, arm)
        timers[arm] = lambda arm=arm: from_our_solution(remote.differentiate(arm, gx))
        if len(gx) in WHOLE:
            timers[f"{arm}, whole"] = lambda arm=arm: {"whole_seconds": remote.whole(arm, gx)}
    return timers


def from_our_solution(found: dict[str, Any]) -> dict[str, Any]:
    return {"own_seconds": found["setup"] + found["backward"], "pass_seconds": found["backward"], "q": found["q"]}


# --- models with a program inside ----------------------------------------------------------------------------------------


def layer_errors(data: Data, seed: int, solve: Any) -> dict[str, Any]:
    """A whole layer, ours or a user's, by its gradient of q against the KKT system, and the seconds of forward and backward."""
    gx = upstream_for(len(data["q"]), seed)
    truth = exact(solved_forward(data), gx)["q"]
    given = tensors(data)
    q = given["q"].requires_grad_()
    inputs = [given.get(name) for name in NAMES]
    started = time.perf_counter()
    x = solve(*inputs)
    if tuple(x.shape) != tuple(q.shape):
        raise ValueError(f"the arm returned a solution of shape {tuple(x.shape)} for {len(q)} variables")
    (slope,) = torch.autograd.grad(x, q, torch.from_numpy(gx))
    seconds = time.perf_counter() - started
    return {"n": len(q), "q_error": relative_error(slope.numpy(), truth), "layer_seconds": seconds}


def libdqp_errors(ctx: Context, data: Data, seed: int, arm: str) -> dict[str, Any]:
    """The error of libdqp's gradient of q from our solution."""
    forward, gx = solved_forward(data), upstream_for(len(data["q"]), seed)
    solver = LIBDQP[arm][0 if forward.solved.program.is_sparse else 1]
    remote = ctx.peer("libdqp")
    remote.open_problem(peer_problem(data), forward.x, forward.lam, forward.mu, solver, arm)
    found = remote.differentiate(arm, gx)
    error = relative_error(found["q"], exact(forward, gx)["q"])
    return {"n": len(gx), "q_error": error, "least_squares": float(found["least_squares"])}


def trained(workload: str, seed: int, arm: str, steps: int) -> dict[str, Any]:
    task = training.TASKS[workload](seed)
    solve = training.layers(task, workload == "sudoku")[arm]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of cvxpylayers, on NumPy's new arguments
        return training.trained(task, solve, steps)


def step_seconds(ctx: Context, workload: str, seed: int, instance: str, repeats: int, peers: bool) -> Rows:
    """Seconds of a training step (forward, backward), arms in turn, one thread each."""
    task = training.TASKS[workload](seed)
    made = {arm: make for arm, make in training.layers(task, workload == "sudoku").items() if arm not in ctx.without}
    made.pop("formula", None)
    if not peers:
        made.pop("cvxpylayers", None)
    torch.set_num_threads(1)

    def step(solve: training.Solve) -> None:
        parameters = [each.clone().requires_grad_() for each in task.start]
        task.loss(parameters, solve, 0).backward()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        ready = {arm: make() for arm, make in made.items()}
        calls = {arm: lambda solve=solve: step(solve) for arm, solve in ready.items()}
        for row in interleave(calls, warmup=1, repeats=repeats):
            yield {"arm": row["arm"], "repeat": row["repeat"], "own_seconds": row["seconds"], "instance": instance}


def against_diffqcp(ctx: Context, workload: str, seeds: list[int], repeats: int) -> Rows:
    """diffqcp's gradients at our solutions of the first programs of a task, and the seconds of its product, in turn with ours."""
    made = [first_program(workload, seed) for seed in seeds]
    upstreams = [upstream_for(len(forward.x), seed) for forward, seed in zip(made, seeds, strict=True)]
    remote = ctx.peer("diffqcp")
    remote.open_programs([as_cone_program(forward) for forward in made], upstreams)
    torch.set_num_threads(1)
    for place, (seed, forward, gx) in enumerate(zip(seeds, made, upstreams, strict=True)):
        truth = exact(forward, gx)["q"]
        ours = clocked(differentiation(forward, "dxpp", gx))
        timers = {"dxpp": ours, "diffqcp": lambda place=place: remote.gradient(place)}
        for repeat in range(-1, repeats):
            for arm in list(timers)[:: 1 if repeat % 2 else -1]:
                found = timers[arm]()
                if repeat >= 0:
                    error = relative_error(np.asarray(found["q"]), truth)
                    yield {
                        "arm": arm,
                        "instance": str(seed),
                        "own_seconds": float(found["own_seconds"]),
                        "q_error": error,
                    }


def first_program(workload: str, seed: int) -> Forward:
    """The first program of a task's first step, solved."""
    task = training.TASKS[workload](seed)
    caught: list[Any] = []

    def keep(q: torch.Tensor, A: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        caught.append([each.detach().numpy() for each in (q[0], A, b)])
        return training.our_layer(task)(q, A, b)

    task.loss(task.start, keep, 0)
    q, A, b = caught[0]
    return solved_forward({"Q": task.Q.numpy(), "q": q, "A": A, "b": b, "lb": task.lb.numpy(), "ub": task.ub.numpy()})


def diffqcp_errors(ctx: Context, workload: str, seed: int) -> dict[str, Any]:
    """The error of diffqcp's gradient of q from our solution."""
    forward = first_program(workload, seed)
    gx = upstream_for(len(forward.x), seed)
    remote = ctx.peer("diffqcp")
    remote.open_programs([as_cone_program(forward)], [gx])
    return {"n": len(gx), "q_error": relative_error(np.asarray(remote.gradient(0)["q"]), exact(forward, gx)["q"])}


def as_cone_program(forward: Forward) -> dict[str, Any]:
    """Rows ``Ax + s = target``, equalities first, then finite bounds, with duals and slacks, as diffqcp takes them."""
    data, n = forward.data, len(forward.x)
    low, high = np.flatnonzero(np.isfinite(data["lb"])), np.flatnonzero(np.isfinite(data["ub"]))
    rows = np.concatenate([data["A"], -np.eye(n)[low], np.eye(n)[high]])
    target = np.concatenate([data["b"], -data["lb"][low], data["ub"][high]])
    duals = np.concatenate([forward.mu, np.maximum(-forward.z, 0.0)[low], np.maximum(forward.z, 0.0)[high]])
    slack = np.maximum(target - rows @ forward.x, 0.0)
    slack[: len(data["b"])] = 0.0
    slack[duals > 0.0] = 0.0
    parts = {"Q": data["Q"], "q": data["q"], "rows": rows, "target": target, "x": forward.x, "y": duals, "slack": slack}
    return {**parts, "n_equal": len(data["b"])}
