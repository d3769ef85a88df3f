"""The side of the study that runs in randngd's own environment: natural gradient with randomised preconditioners, in JAX."""

import os
import sys
import time
from functools import partial
from pathlib import Path

# One thread, as the arms in PyTorch have; must be set before JAX starts.
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import randngd

# Compiled steps are kept with the environment, so that only its first run waits for them.
jax.config.update("jax_compilation_cache_dir", str(Path(sys.prefix, "jax-cache")))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)

VISCOSITY = 0.05
_READY = {}


def network(params, x):
    """A tanh network whose biases are the last columns of its weights."""
    h = x
    for i, weight in enumerate(params):
        h = weight[:, :-1] @ h + weight[:, -1]
        if i + 1 < len(params):
            h = jnp.tanh(h)
    return h[0]


def along(f, x, direction):
    """First and second derivative of f at x in a direction."""

    def slope(y):
        return jax.jvp(f, (y,), (direction,))[1]

    return jax.jvp(slope, (x,), (direction,))


def poisson_inside(params, x):
    u = partial(network, params)
    second = along(u, x[:2], jnp.array([1.0, 0.0]))[1] + along(u, x[:2], jnp.array([0.0, 1.0]))[1]
    return -second / (2 * jnp.pi**2) - x[2]


def burgers_inside(params, x):
    u = partial(network, params)
    time_slope = jax.jvp(u, (x[:2],), (jnp.array([1.0, 0.0]),))[1]
    slope, second = along(u, x[:2], jnp.array([0.0, 1.0]))
    return time_slope + u(x[:2]) * slope - VISCOSITY * second


def edge(params, x):
    return network(params, x[:2]) - x[2]


def linear(params, x):
    return params[0][0] @ x[:-1] - x[-1]


def terms_of(points):
    """(residual of one point, points) for each term of the loss; the last column of the points is the right-hand side."""
    if points["kind"] == "least-squares":
        return [(linear, np.column_stack([points["A"], points["b"]]))]
    inner, x, given = points["inner"], points["x"], points["f"]
    rows = np.column_stack([x, given])
    if points["kind"] == "poisson":
        rows[~inner, 2] = 0.0
        return [(poisson_inside, rows[inner]), (edge, rows[~inner])]
    return [(burgers_inside, rows[inner]), (edge, rows[~inner])]


def prepared(points, start, solver_name, damping, ell_max):
    """A compiled step and the state to start from; compiled once for a problem and a solver."""
    key = (points["kind"], solver_name, damping, ell_max)
    if key not in _READY:
        terms = terms_of(points)
        total = sum(len(rows) for _, rows in terms)
        pairs = [(residual, jnp.asarray(rows)) for residual, rows in terms]

        def loss(params, args):
            squares = [(jax.vmap(residual, (None, 0))(params, rows) ** 2).sum() for residual, rows in pairs]
            return sum(squares) / (2 * total), None

        weighted = [(residual, rows, 1.0 / total) for residual, rows in pairs]
        rule = randngd.LevenbergMarquardt() if damping == "lm" else None
        if solver_name == "full":
            metric = randngd.metrics.gauss_newton(weighted, start, representation="full")
            preconditioner = randngd.NGDFull(metric, damping=rule, key=0)
        else:
            metric = randngd.metrics.gauss_newton(weighted, start)
            preconditioner = randngd.NystromNGD(metric, ell_max=ell_max, ell_levels=(ell_max,), damping=rule, key=0)
        solver = randngd.ngd_solver(preconditioner)
        step = eqx.filter_jit(lambda y, state: solver.step(loss, y, None, {}, state, frozenset()))
        evaluate = eqx.filter_jit(lambda y: loss(y, None)[0])

        def first(y):
            struct = jax.eval_shape(lambda: loss(y, None)[0])
            return solver.init(loss, y, None, {}, struct, None, frozenset())

        _READY[key] = step, first, evaluate
    return _READY[key]


def loss_at(points, weights):
    """Half the mean square of all residuals, for a check against the caller's own."""
    start = [jnp.asarray(w) for w in weights]
    return float(prepared(points, start, "full", "eigenvalue", 1)[2](start))


def train(points, weights, solver_name, damping, ell_max, seconds, marks):
    """Weights, seconds and steps at each share of the time; compilation is not counted.

    Returns a list of dicts, one a mark.
    """
    y = [jnp.asarray(w) for w in weights]
    step, first, _ = prepared(points, y, solver_name, damping, ell_max)
    state = first(y)
    jax.block_until_ready(step(y, state)[0])
    found, spent, steps = [], 0.0, 0
    for mark in marks:
        while spent < mark * seconds:
            started = time.perf_counter()
            y, state, _ = step(y, state)
            jax.block_until_ready(y)
            spent += time.perf_counter() - started
            steps += 1
        found.append({"weights": [np.asarray(w) for w in y], "seconds": spent, "steps": steps})
    return found
