"""The side of the study that runs in libdqp's environment: its own backward pass from a solution that is handed to it."""

import contextlib
import io
import time

import numpy as np
import torch
from dqp.dQP import build_settings, dQP_layer

torch.set_default_dtype(torch.float64)


def as_tensor(value, is_sparse, n):
    if value is None:
        return None
    if isinstance(value, dict):
        parts = (torch.from_numpy(np.array(value[name])) for name in ("indptr", "indices", "data"))
        return torch.sparse_csc_tensor(*parts, size=tuple(value["shape"]))
    return torch.from_numpy(np.array(value))


def forget_factorisations():
    """PARDISO's binding keeps the last factor and would not compute it again for the same matrix."""
    with contextlib.suppress(ImportError):
        from pypardiso.scipy_aliases import pypardiso_solver

        pypardiso_solver.remove_stored_factorization()


class Shared:
    """A layer of libdqp that is told the solution instead of solving for it."""

    def __init__(self, problem, x, lam, mu, linear_solver):
        self.is_sparse = isinstance(problem["Q"], dict)
        n = len(x)
        self.inputs = [as_tensor(problem[name], self.is_sparse, n) for name in ("Q", "q", "G", "h", "A", "b")]
        self.inputs = [None if each is None else each.requires_grad_() for each in self.inputs]
        kind = "sparse" if self.is_sparse else "dense"
        settings = build_settings(
            solve_type=kind,
            qp_solver="clarabel",
            lin_solver=linear_solver,
            empty_batch=False,
            eps_abs=1e-10,
            eps_rel=1e-10,
        )
        self.layer = dQP_layer(settings)
        self.solution = x, mu, lam

    def take_solution(self):
        """What its forward pass does up to the solver."""
        layer, (x, mu, lam) = self.layer, self.solution
        layer.reset_parameters()
        layer.get_shapes(*self.inputs)
        layer.data_to_np(*self.inputs)
        layer.x_star_np, layer.nu_star_np = x.copy(), lam.copy()
        layer.mu_star_np = mu.copy() if self.inputs[4] is not None else None
        layer.nu_star_with_inactive_np = lam.copy()

    def differentiated(self, upstream):
        """Seconds for active set and KKT matrix, seconds for the backward pass, and gradients of all inputs."""
        self.take_solution()
        forget_factorisations()
        started = time.perf_counter()
        x, _, _ = self.layer.setup_diff(*self.inputs)
        ready = time.perf_counter()
        wanted = [each for each in self.inputs if each is not None]
        found = torch.autograd.grad(x, wanted, torch.from_numpy(upstream))
        return ready - started, time.perf_counter() - ready, found


def open_problem(problem, x, lam, mu, linear_solver, key):
    """Keep a problem under a key; nothing is timed."""
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(io.StringIO()):
        KEPT[key] = Shared(problem, x, lam, mu, linear_solver)
    return key


def differentiate(key, upstream):
    """Seconds of one differentiation, its two parts, the gradient of q, and whether libdqp fell back to least squares."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        setup, backward, found = KEPT[key].differentiated(np.array(upstream))
    return {
        "setup": setup,
        "backward": backward,
        "q": found[1].numpy(),
        "least_squares": "least-squares" in said.getvalue(),
    }


def whole(key, upstream):
    """Seconds of forward (clarabel at 1e-10) and backward together."""
    shared = KEPT[key]
    forget_factorisations()
    with contextlib.redirect_stdout(io.StringIO()):
        started = time.perf_counter()
        x = shared.layer(*shared.inputs)[0]
        wanted = [each for each in shared.inputs if each is not None]
        torch.autograd.grad(x, wanted, torch.from_numpy(np.array(upstream)))
        return time.perf_counter() - started


KEPT = {}
