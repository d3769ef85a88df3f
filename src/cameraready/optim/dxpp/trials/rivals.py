"""Ways to the gradient of a program's solution, from one shared forward solution."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.linalg as dense_linalg
import scipy.sparse as sparse
import torch
from scipy.special import expit
from torch import Tensor

from cameraready.optim.dxpp.inputs import NAMES, Run
from cameraready.optim.dxpp.layer import PenaltyQPLayer
from cameraready.optim.dxpp.numerics.sensitivity import EqualityProgram, KKTSystem
from cameraready.optim.dxpp.numerics.solving import Solved
from cameraready.optim.dxpp.tensors import QPAdjoint
from cameraready.optim.dxpp.trials.workloads import Array, Data, tensors

#: Options of `PenaltyQPLayer` behind each arm.
OPTIONS: dict[str, dict[str, Any]] = {
    "dxpp": {},
    "formula": {"refine": 0},
    "kkt": {"backward": "kkt", "refine": 0},
}


@dataclass(frozen=True)
class Forward:
    """A forward solution that several arms differentiate: the layer's run, inputs and output, and multipliers in the user's units."""

    data: Data
    run: Run
    inputs: dict[str, Tensor]
    x: Array
    lam: Array
    mu: Array
    z: Array
    output: Tensor

    @property
    def solved(self) -> Solved:
        return self.run.solved[0]


def solved_forward(data: Data, **options: Any) -> Forward:
    """Solve once, polished, so that every arm starts from the same primal-dual point and active set."""
    inputs = {name: value.requires_grad_() for name, value in tensors(data).items()}
    if not sparse.issparse(data["Q"]):
        options = {
            "solver": "piqp",
            **options,
        }  # Clarabel's factorisation is for sparse programs, and takes seconds at n = 450
    s = PenaltyQPLayer(**options)(**inputs)
    found = (each.detach().numpy() for each in (s.x, s.lam, s.mu, s.z))
    return Forward(data, s.x.grad_fn.run, inputs, *found, output=s.x)


def differentiation(forward: Forward, arm: str, upstream: Array, **options: Any) -> Callable[[], dict[str, Array]]:
    """A call that does all that follows the solution: system, factorisation, solves, gradients of every input (on patterns)."""
    chosen = dataclasses.replace(forward.solved.options, **{**OPTIONS[arm], **options})
    run = forward.run
    likes = {}
    for name, value in forward.inputs.items():
        shape = run.patterns[name].row.shape if name in run.patterns else tuple(value.shape)
        likes[name] = (shape, torch.float64, torch.device("cpu"))
    gx = torch.from_numpy(upstream)

    def call() -> dict[str, Array]:
        fresh = dataclasses.replace(forward.solved, options=chosen, system=None)
        again = Run(chosen, 0.0, run.patterns, True, solved=[fresh], scales=run.scales)
        found = QPAdjoint.forward(again, likes, gx, None, None, None)
        return {name: value.numpy() for name, value in zip(likes, found, strict=True)}

    return call


def exact(forward: Forward, upstream: Array) -> dict[str, Array]:
    """The reference: the KKT system, refined to rounding."""
    return differentiation(forward, "kkt", upstream, refine=1)()


def full_kkt(forward: Forward, upstream: Array) -> Callable[[], Array]:
    """A call for the gradient of q by the full KKT matrix, with every inequality in it: 2m + n + p unknowns where reduced ones have fewer."""
    program, point = forward.solved.program, forward.solved.point
    slack, lam = program.h - program.G @ point.x, point.lam

    def call() -> Array:
        Q, G, A = program.Q, program.G, program.A
        n, p = len(program.q), len(program.b)
        if program.is_sparse:
            by = sparse.dia_array((lam[np.newaxis], [0]), shape=(len(lam), len(lam)))
            diagonal = sparse.dia_array((-slack[np.newaxis], [0]), shape=(len(lam), len(lam)))
            blocks = [[Q, G.T @ by, A.T], [G, diagonal, None], [A, None, None]]
            matrix = sparse.csc_matrix(sparse.block_array(blocks, format="csc"))
            from scipy.sparse.linalg import splu

            found = splu(matrix).solve(np.concatenate([upstream, np.zeros(len(lam) + p)]))
        else:
            zero = np.zeros((p, p + len(lam)))
            matrix = np.block([[Q, G.T * lam, A.T], [G, np.diag(-slack), np.zeros((len(lam), p))], [A, zero]])
            found = dense_linalg.solve(matrix, np.concatenate([upstream, np.zeros(len(lam) + p)]))
        return -found[:n] * forward.run.scales[0].response

    return call


def as_published(
    data: Data, x: Array, lam: Array, mu: Array, upstream: Array, beta: float, zeta: float = 10.0
) -> Array:
    """Gradient of q by the rules of the official code, on the program as given: no scaling, no clamp, no floor, no refinement.

    Linghu et al., 2026, arXiv:2602.14154, official code: rho is zeta times the 1-norm of the multipliers, rows count as active below
    a slack of 1e-5, weights are (rho / beta) sigmoid' of slack / beta, and H gets 1e-9 on its diagonal.
    """
    dense = {name: value.toarray() if sparse.issparse(value) else value for name, value in data.items()}
    H = dense["Q"] + 1e-9 * np.eye(len(x))
    if "G" in dense:
        slack = dense["h"] - dense["G"] @ x
        near, rho = slack < 1e-5, zeta * np.abs(lam).sum()
        if rho >= 1e-12 and near.any():
            s = expit(-slack[near] / beta)
            H = H + dense["G"][near].T @ ((rho / beta * s * (1.0 - s))[:, np.newaxis] * dense["G"][near])
    if "A" in dense:
        s, rho = expit((dense["A"] @ x - dense["b"]) / beta), zeta * np.abs(mu).sum()
        if rho >= 1e-12:
            H = H + dense["A"].T @ ((2.0 * rho / beta * s * (1.0 - s))[:, np.newaxis] * dense["A"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dense_linalg.LinAlgWarning)  # at small beta; the error is what is measured
        return -dense_linalg.solve(H, upstream, assume_a="sym")


def kkt_is_singular(forward: Forward) -> bool:
    """Whether the reduced KKT matrix of the solution cannot be factorised."""
    return KKTSystem(EqualityProgram(forward.solved.program, forward.solved.faces)).kind != "KKT"


def relative_error(found: Array, truth: Array) -> float:
    """Largest difference over the largest entry of the truth."""
    return float(np.abs(found - truth).max() / max(np.abs(truth).max(), 1e-300))


def worst_error(found: dict[str, Array], truth: dict[str, Array]) -> float:
    """Of all inputs; an input whose gradient is zero is measured against the largest gradient of all."""
    largest = max(float(np.abs(each).max(initial=0.0)) for each in truth.values())
    errors = []
    for name, value in truth.items():
        size = float(np.abs(value).max(initial=0.0))
        errors.append(
            float(np.abs(found[name] - value).max(initial=0.0)) / (size if size > 1e-9 * largest else largest)
        )
    return max(errors)


def peer_problem(data: Data) -> dict[str, Any]:
    """The program in a form that goes to another process: sparse matrices as dicts of arrays."""
    sent: dict[str, Any] = {}
    for name in NAMES[:6]:
        value = data.get(name)
        if sparse.issparse(value):
            value = sparse.csc_array(value)
            sent[name] = {
                "data": value.data,
                "indices": value.indices,
                "indptr": value.indptr,
                "shape": list(value.shape),
            }
        else:
            sent[name] = value
    return sent
