"""Two models with a quadratic program inside: a portfolio trained on decisions, and a layer that learns the rules of 4x4 sudoku."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cameraready.optim.dxpp.layer import PenaltyQPLayer
from cameraready.optim.dxpp.trials.rivals import OPTIONS

Array = np.ndarray[Any, Any]
#: ``solve(q, A, b)`` -> x (batch, n), differentiable; the rest of the program is the task's and fixed.
Solve = Callable[[Tensor, Tensor, Tensor], Tensor]
F64 = torch.float64


@dataclass(frozen=True)
class Task:
    """A training problem: a loss, what is held out, where to start, and the fixed parts of its program.

    Attributes
    ----------
    Q, A, lb, ub : Tensor
        Of the layer; `A` and its right-hand side may be replaced by learnt ones in a call of `solve`.
    loss : callable
        ``loss(parameters, solve, step) -> scalar Tensor``; the same for every arm.
    held_out : callable
        ``held_out(parameters, solve) -> dict``: ``loss`` on data not trained on, and what else is of interest.
    start : list of Tensor
        Parameters before training.
    lr : float
        Of Adam.
    """

    Q: Tensor
    A: Tensor
    lb: Tensor
    ub: Tensor
    loss: Callable[[list[Tensor], Solve, int], Tensor]
    held_out: Callable[[list[Tensor], Solve], dict[str, float]]
    start: list[Tensor]
    lr: float


def trained(task: Task, solve: Solve, steps: int) -> dict[str, float]:
    """After `steps` of Adam: training losses of the first and the last step, and what is held out, before and after."""
    parameters = [each.clone().requires_grad_() for each in task.start]
    optimizer = torch.optim.Adam(parameters, lr=task.lr)
    with torch.no_grad():
        before = task.held_out(parameters, solve)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = task.loss(parameters, solve, step)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        after = task.held_out(parameters, solve)
    return {"first_loss": losses[0], "last_loss": losses[-1], "untrained_loss": before["loss"], **after}


# --- layers --------------------------------------------------------------------------------------------------------------


def our_layer(task: Task, **options: Any) -> Solve:
    layer = PenaltyQPLayer(**options)
    return lambda q, A, b: layer(task.Q, q, A=A, b=b, lb=task.lb, ub=task.ub).x


def cvxpy_layer(task: Task, learns_rows: bool) -> Solve:
    """The same program as a cone layer of cvxpylayers, at tight tolerances."""
    import cvxpy as cp
    from cvxpylayers.torch import CvxpyLayer

    n, p = len(task.lb), len(task.A)
    x, q, b = cp.Variable(n), cp.Parameter(n), cp.Parameter(p)
    A = cp.Parameter((p, n)) if learns_rows else task.A.numpy()
    objective = 0.5 * cp.quad_form(x, cp.psd_wrap(task.Q.numpy())) + q @ x
    rows = [A @ x == b, x >= task.lb.numpy()]
    if torch.isfinite(task.ub).all():
        rows.append(x <= task.ub.numpy())
    problem = cp.Problem(cp.Minimize(objective), rows)
    assert problem.is_dpp()
    layer = CvxpyLayer(problem, parameters=[q, A, b] if learns_rows else [q, b], variables=[x])
    # Clarabel, as in our arms and to their tolerance; it is faster here than the default SCS at 1e-10.
    tight = {"solve_method": "Clarabel", "tol_gap_abs": 1e-10, "tol_gap_rel": 1e-10, "tol_feas": 1e-10}

    def solve(q: Tensor, A: Tensor, b: Tensor) -> Tensor:
        given = (q, A, b) if learns_rows else (q, b)
        return layer(*given, solver_args=tight)[0]

    return solve


def layers(task: Task, learns_rows: bool) -> dict[str, Callable[[], Solve]]:
    """Ready to be made, by arm."""
    ours = {name: functools.partial(our_layer, task, **options) for name, options in OPTIONS.items()}
    return {**ours, "cvxpylayers": functools.partial(cvxpy_layer, task, learns_rows)}


# --- portfolio -----------------------------------------------------------------------------------------------------------

PERIODS, DAYS, LOOKBACK = 4, 5, 120
RISK, TURNOVER, MOST = 2.0, 0.5, 0.5


@functools.cache
def daily_returns() -> Array:
    """Per cent a day of 20 companies of the S&P 500, 1990 to 2022, from skfolio's data set; (days, companies)."""
    from skfolio.datasets import load_sp500_dataset

    prices = load_sp500_dataset().to_numpy(dtype=float)
    return 100.0 * (prices[1:] / prices[:-1] - 1.0)


def portfolio(seed: int, n_assets: int = 5, windows: int = 6) -> Task:
    """Learn to forecast returns from past ones by what the forecast leads a four-week portfolio to earn, net of risk.

    Weights of each week are at least 0, at most a half, and sum to one; the objective has the forecast, the covariance of the last 120 days
    and a quadratic cost of turnover. The following windows are held out. The forecast is linear in the mean returns of the last 5, 20 and 60 days.
    """
    returns = daily_returns()
    rng = np.random.default_rng([seed, 7])
    assets = rng.choice(returns.shape[1], n_assets, replace=False)
    first = int(rng.integers(LOOKBACK, len(returns) - 2 * PERIODS * DAYS * windows - 1))
    n = n_assets * PERIODS
    past = returns[first - LOOKBACK : first, assets]
    cov = DAYS * (0.8 * np.cov(past.T) + 0.2 * np.diag(past.var(axis=0)))
    risk = np.kron(np.eye(PERIODS), cov)
    turn = np.eye(n) - np.eye(n, k=-n_assets)
    Q = RISK * risk + TURNOVER * turn.T @ turn
    features, earned = [], []
    for w in range(2 * windows):
        day = first + w * PERIODS * DAYS
        recent = [returns[day - d : day, assets].mean(axis=0) * DAYS for d in (5, 20, 60)]
        features.append(np.stack([*recent, np.ones(n_assets)], axis=1))
        ahead = returns[day : day + PERIODS * DAYS, assets].reshape(PERIODS, DAYS, n_assets).sum(axis=1)
        earned.append(ahead.ravel())
    X, r, covariance = (torch.from_numpy(np.array(each)) for each in (features, earned, risk))
    bought = torch.zeros(n, dtype=F64)
    bought[:n_assets] = -TURNOVER / n_assets
    A, one = torch.from_numpy(np.kron(np.eye(PERIODS), np.ones((1, n_assets)))), torch.ones(PERIODS, dtype=F64)

    def over(rows: slice, parameters: list[Tensor], solve: Solve) -> Tensor:
        forecast = (X[rows] @ parameters[0]).repeat(1, PERIODS)
        w = solve(bought - forecast, A, one)
        risky = 0.5 * RISK * torch.einsum("bi,ij,bj->b", w, covariance, w)
        return (risky - (w * r[rows]).sum(1)).mean() / PERIODS

    def loss(parameters: list[Tensor], solve: Solve, step: int) -> Tensor:
        return over(slice(windows), parameters, solve)

    def held_out(parameters: list[Tensor], solve: Solve) -> dict[str, float]:
        return {"loss": float(over(slice(windows, None), parameters, solve))}

    box = torch.zeros(n, dtype=F64), torch.full((n,), MOST, dtype=F64)
    return Task(torch.from_numpy(Q), A, *box, loss, held_out, [torch.tensor([0.0, 0.1, 0.1, 0.1], dtype=F64)], lr=0.1)


# --- sudoku --------------------------------------------------------------------------------------------------------------


def boards(rng: np.random.Generator, count: int) -> Array:
    """Solved 4x4 sudokus, digits 0 to 3; (count, 4, 4)."""
    base = np.array([[0, 1, 2, 3], [2, 3, 0, 1], [1, 0, 3, 2], [3, 2, 1, 0]])
    made = []
    for _ in range(count):
        rows = np.concatenate([2 * band + rng.permutation(2) for band in rng.permutation(2)])
        columns = np.concatenate([2 * band + rng.permutation(2) for band in rng.permutation(2)])
        board = rng.permutation(4)[base][rows][:, columns]
        made.append(board.T if rng.random() < 0.5 else board)
    return np.array(made)


def sudoku(seed: int, batch: int = 4) -> Task:
    """OptNet's task (Amos and Kolter, 2017) at 4x4: the equalities of the program are learnt from puzzles and their solutions.

    x has 64 entries, one for each cell and digit; the layer projects the puzzle on ``Ax = A exp(z), x >= 0`` with 40 learnt rows A and
    learnt z. The rules of sudoku have rank 40. Every step has fresh puzzles with about half of their cells shown; 20 others are
    held out.
    """

    def drawn(stream: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Puzzles and solutions (count, 64), and which cells are blank (count, 16)."""
        rng = np.random.default_rng([seed, 11, stream])
        solved = torch.nn.functional.one_hot(torch.from_numpy(boards(rng, count)), 4).to(F64)
        shown = torch.from_numpy(rng.random((count, 4, 4, 1)) < 0.5)
        puzzles = torch.where(shown, solved, 0.0)
        return puzzles.reshape(count, 64), solved.reshape(count, 64), ~shown.reshape(count, 16)

    def filled(parameters: list[Tensor], solve: Solve, puzzles: Tensor) -> Tensor:
        rows, log_inside = parameters
        return solve(-puzzles, rows, rows @ log_inside.exp())

    def loss(parameters: list[Tensor], solve: Solve, step: int) -> Tensor:
        puzzles, truth, _ = drawn(step + 1, batch)
        return ((filled(parameters, solve, puzzles) - truth) ** 2).mean()

    def held_out(parameters: list[Tensor], solve: Solve) -> dict[str, float]:
        puzzles, truth, blank = drawn(0, 20)
        x = filled(parameters, solve, puzzles)
        right = x.view(20, 16, 4).argmax(2) == truth.view(20, 16, 4).argmax(2)
        return {"loss": float(((x - truth) ** 2).mean()), "cells": float(right[blank].to(F64).mean())}

    A, z = torch.from_numpy(np.random.default_rng([seed, 12]).random((40, 64))), torch.zeros(64, dtype=F64)
    box = torch.zeros(64, dtype=F64), torch.full((64,), torch.inf, dtype=F64)
    return Task(0.1 * torch.eye(64, dtype=F64), A, *box, loss, held_out, [A, z], lr=0.1)


TASKS: dict[str, Callable[[int], Task]] = {"portfolio": portfolio, "sudoku": sudoku}
