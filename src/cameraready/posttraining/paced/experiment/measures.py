"""From the points of a run to numbers: rollouts until an accuracy, censored at the budget, and what holds at that moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from scipy.stats import rankdata
from torch import Tensor

#: Held-out accuracy that a run has to reach.
TARGET = 0.8


def rollouts_to(
    points: Sequence[Mapping[str, Tensor]], *, limit: float, target: float = TARGET
) -> tuple[Tensor, Tensor]:
    """Rollouts until held-out accuracy first reaches `target`, between evaluations by a straight line.

    Parameters
    ----------
    points : sequence of mappings
        ``drawn`` and ``accuracy`` of each evaluation, (S,).
    limit : float
        The budget: what takes longer, or is not reached, is censored there.

    Returns
    -------
    rollouts : float64 Tensor, shape (S,)
        At most `limit`; their mean is the restricted mean.
    reached : bool Tensor, shape (S,)
    """
    drawn, accuracy = (torch.stack([point[name].double() for point in points]) for name in ("drawn", "accuracy"))
    found = torch.full_like(drawn[0], limit)
    reached = torch.zeros_like(found, dtype=torch.bool)
    for run in range(drawn.shape[1]):
        above = (accuracy[:, run] >= target).nonzero().flatten()
        if len(above):
            at = _crossing(drawn[:, run], accuracy[:, run], int(above[0]), target)
            found[run], reached[run] = min(at, limit), at <= limit
    return found, reached


def at_target(points: Sequence[Mapping[str, Tensor]], column: str, *, limit: float, target: float = TARGET) -> Tensor:
    """`column` at the moment when held-out accuracy first reaches `target`, by a straight line; NaN where it does not within `limit`."""
    times, reached = rollouts_to(points, limit=limit, target=target)
    return torch.where(reached, at_rollouts(points, column, times), torch.nan)


def at_rollouts(points: Sequence[Mapping[str, Tensor]], column: str, rollouts: Tensor | float) -> Tensor:
    """`column` after so many rollouts, (S,), by a straight line between evaluations."""
    drawn, values = (torch.stack([point[name].double() for point in points]) for name in ("drawn", column))
    wanted = torch.as_tensor(rollouts, dtype=torch.float64).expand(drawn.shape[1])
    found = torch.empty_like(wanted)
    for run in range(drawn.shape[1]):
        after = int(torch.searchsorted(drawn[:, run].contiguous(), wanted[run]).clamp(1, len(drawn) - 1))
        before_x, after_x = drawn[after - 1, run], drawn[after, run]
        share = ((wanted[run] - before_x) / (after_x - before_x)).clamp(0, 1) if after_x > before_x else 1.0
        found[run] = values[after - 1, run] + share * (values[after, run] - values[after - 1, run])
    return found


def _crossing(drawn: Tensor, accuracy: Tensor, place: int, target: float) -> float:
    if place == 0:
        return float(drawn[0])
    low, high = accuracy[place - 1], accuracy[place]
    return float(drawn[place - 1] + (target - low) / (high - low) * (drawn[place] - drawn[place - 1]))


def quality(estimate: Tensor, truth: Tensor) -> dict[str, Tensor]:
    """Mean absolute error, bias and Spearman's correlation over the pool of each run's estimates: (S, P), (S, P) -> (S,).

    The correlation is NaN where the estimates or the truths are all equal.
    """
    estimate, truth = estimate.double(), truth.double()
    a, b = (torch.as_tensor(rankdata(x.numpy(), axis=-1)) for x in (estimate, truth))
    a, b = a - a.mean(-1, keepdim=True), b - b.mean(-1, keepdim=True)
    return {
        "mae": (estimate - truth).abs().mean(-1),
        "bias": (estimate - truth).mean(-1),
        "spearman": (a * b).sum(-1) / (a.square().sum(-1) * b.square().sum(-1)).sqrt(),
    }
