"""Inner problems solved exactly on weighted points: the outer loop without a network's noise, and the true optimum."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cameraready.flows.cfo.lagrangian import AugmentedLagrangian
from cameraready.flows.cfo.objective import FixedWeights, Objective, Score, Scores


class WeightedPoints:
    """A law on fixed points: a grid with the prior's probabilities, or a sample of a model.

    Parameters
    ----------
    points : Tensor of shape (N, ...)
    log_prior : Tensor of shape (N,), optional
        Logarithms of the prior's probabilities or density on the points, up to a constant; None for a sample, in which all count alike.

    Attributes
    ----------
    log_weights : Tensor of shape (N,)
        Normalised log-probabilities of the law; float64.
    """

    def __init__(self, points: Tensor, log_prior: Tensor | None = None) -> None:
        if points.ndim < 1 or len(points) == 0:
            raise ValueError(f"points must have shape (N, ...) with N of at least 1, got {tuple(points.shape)}")
        self.points, self.is_sample = points, log_prior is None
        prior = torch.zeros(len(points), dtype=torch.float64) if log_prior is None else log_prior.detach().double()
        if prior.shape != (len(points),) or bool(torch.isnan(prior).any()) or not bool(torch.isfinite(prior).any()):
            raise ValueError(
                f"log_prior must have one number for each of the {len(points)} points, not NaN, got shape {tuple(prior.shape)}"
            )
        self.log_prior = prior - torch.logsumexp(prior, 0)
        self.log_weights = self.log_prior

    @property
    def module(self) -> WeightedPoints:
        """What a user is given as the model: the law itself."""
        return self

    def copy(self) -> WeightedPoints:
        """The same points with weights of their own."""
        made = WeightedPoints(self.points, None if self.is_sample else self.log_prior)
        made.log_weights = self.log_weights.clone()
        return made

    def expectation(self, values: Tensor) -> Tensor:
        """Mean of `values` (N, ...) under the law."""
        weights = self.log_weights.exp()
        return torch.tensordot(weights, values.double(), dims=1)

    def divergence(self, other: WeightedPoints | None = None) -> float:
        """KL to `other` on the same points, or to the prior, in nats."""
        log_q = self.log_prior if other is None else other.log_weights
        weights = self.log_weights.exp()
        return float(torch.where(weights > 0, weights * (self.log_weights - log_q), 0.0).sum())

    def state_dict(self) -> dict[str, Tensor]:
        """The weights."""
        return {"log_weights": self.log_weights}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take the weights that `state_dict` returned."""
        self.log_weights = state["log_weights"].double()


class ExactTilt:
    """Solves a round exactly on fixed points: weights proportional to those of the prior times exp(f / alpha).

    For tests of the outer loop, for small discrete problems, and to see what a bound costs before a network is trained: give samples of the model, and the answer is what an
    ideal inner solver would return, as far as the samples reach. Not where the optimum lies outside of what the samples cover; the effective sample size tells.

    Parameters
    ----------
    min_ess : float
        On a sample, the least effective share of it under the tilt; below, the round is refused.

    References
    ----------
    Gutjahr et al., 2026, arXiv:2605.30610; p proportional to p_pre exp(f / alpha) is the elementary optimum under a KL penalty.
    """

    def __init__(self, *, min_ess: float = 0.05) -> None:
        if not 0 <= min_ess < 1:
            raise ValueError(f"min_ess is a share, from 0 to below 1, got {min_ess!r}")
        self.min_ess = min_ess
        self._scored: tuple[Objective, WeightedPoints, Scores] | None = None

    def open(self, model: Any, shape: Any = None) -> WeightedPoints:
        """`model` as a law on points: a `WeightedPoints`, a sample (N, ...), or (points, log_prior)."""
        if isinstance(model, WeightedPoints):
            return model.copy()
        if isinstance(model, tuple) and len(model) == 2 and all(isinstance(each, Tensor) for each in model):
            return WeightedPoints(*model)
        if isinstance(model, Tensor):
            return WeightedPoints(model)
        raise TypeError(
            f"ExactTilt works on points: a tensor of samples (N, ...), or (points, log_prior), got {type(model).__name__}; for a network take AdjointMatching or NFT"
        )

    def copy(self, base: WeightedPoints) -> WeightedPoints:
        """The law that will be tilted."""
        return base.copy()

    def solve(
        self,
        policy: WeightedPoints,
        base: WeightedPoints,
        objective: Objective,
        *,
        kl: float,
        steps: int = 1,
        generator: torch.Generator | None = None,
        report: Callable[[int], None] | None = None,
    ) -> dict[str, float]:
        """Set the weights of `policy` to the optimum of the round.

        Raises
        ------
        ValueError
            On a sample, where the effective share of it falls below `min_ess`.
        """
        scores = self._scores(objective, base)
        log_prior = torch.where(scores.valid, base.log_weights, -torch.inf)
        if isinstance(objective, AugmentedLagrangian) and objective.penalty_form == "expectation":
            price = optimal_price(
                log_prior,
                scores.reward,
                scores.constraint,
                objective.bound,
                kl,
                shift=objective.multiplier,
                rho=objective.penalty,
            )
            tilt = scores.reward - (scores.constraint - objective.bound) @ price
        else:
            tilt = objective.combine(scores)
        policy.log_weights = torch.log_softmax(log_prior + tilt / kl, 0)
        ess = float(1 / policy.log_weights.exp().square().sum()) / len(policy.points)
        if base.is_sample and ess < self.min_ess:
            raise ValueError(
                f"the tilt leaves an effective share of {ess:.3f} of the sample (min_ess={self.min_ess:g}): the optimum is hardly in it; draw more "
                "points, take a larger kl, or tune a network"
            )
        return {"effective_share": ess}

    def draw(self, policy: WeightedPoints, n: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """All points and their probabilities: expectations over them are exact."""
        return policy.points, policy.log_weights.exp()

    def divergence(self, policy: WeightedPoints, base: WeightedPoints, n: int = 0, generator: Any = None) -> float:
        """KL(policy || base), exact."""
        return policy.divergence(base)

    def _scores(self, objective: Objective, base: WeightedPoints) -> Scores:
        if self._scored is None or self._scored[0] is not objective or self._scored[1] is not base:
            with torch.no_grad():
                self._scored = (objective, base, objective.scores(base.points))
        return self._scored[2]


# --- the optimum itself --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Optimum:
    """The constrained optimum on points.

    Attributes
    ----------
    law : WeightedPoints
        p proportional to p_pre exp((r - mu . c) / alpha).
    price : Tensor of shape (m,)
        mu, at least 0.
    reward, divergence, objective : float
        E[r], KL to the prior, and E[r] - alpha KL.
    constraint : Tensor of shape (m,)
        E[c].
    """

    law: WeightedPoints
    price: Tensor
    reward: float
    constraint: Tensor
    divergence: float
    objective: float


def exact_optimum(prior: WeightedPoints, reward: Score | None, constraint: Any, bound: Any, *, kl: float) -> Optimum:
    """The law that max E[r] - alpha KL(p || p_pre) subject to E[c] <= B asks for, on points, by its dual.

    Parameters
    ----------
    prior : WeightedPoints
    reward, constraint, bound
        As of `AugmentedLagrangian`.
    kl : float
        alpha.

    Raises
    ------
    ValueError
        No law on the points meets the bound.
    """
    scores = FixedWeights(reward, constraint, bound, 0.0).scores(prior.points)
    bounds = torch.as_tensor(bound, dtype=torch.float64).reshape(-1)
    log_prior = torch.where(scores.valid, prior.log_weights, -torch.inf)
    price = optimal_price(log_prior, scores.reward, scores.constraint, bounds, kl)
    law = prior.copy()
    law.log_weights = torch.log_softmax(log_prior + (scores.reward - (scores.constraint - bounds) @ price) / kl, 0)
    got, cost = float(law.expectation(scores.reward)), law.divergence(prior)
    return Optimum(law, price, got, law.expectation(scores.constraint), cost, got - kl * cost)


def optimal_price(
    log_prior: Tensor,
    reward: Tensor,
    constraint: Tensor,
    bound: Tensor,
    kl: float,
    *,
    shift: Tensor | None = None,
    rho: Tensor | None = None,
    tolerance: float = 1e-13,
) -> Tensor:
    """mu >= 0 that minimises the convex alpha log E_pre[exp((r - mu . (c - B)) / alpha)] + sum (mu + lambda)^2 / (2 rho).

    Its stationary point is mu = max(0, rho (E_mu[c] - B) - lambda): the inner optimum of the expectation form. Without `rho` it is the dual of the
    constrained problem. Projected Newton steps, halved until they descend.

    Parameters
    ----------
    log_prior, reward : Tensor of shape (N,)
    constraint : Tensor of shape (N, m)
    bound, shift, rho : Tensor of shape (m,)
        B, lambda and rho.
    kl : float
        alpha.

    Returns
    -------
    Tensor of shape (m,), float64

    Raises
    ------
    ValueError
        There is no minimum: no law on the points meets the bound.
    """
    over = constraint - bound
    m = over.shape[1]
    shift = torch.zeros(m, dtype=torch.float64) if shift is None else shift
    stiffness = torch.zeros(m, dtype=torch.float64) if rho is None else 1 / rho
    reachable = over[torch.isfinite(log_prior)].amin(0)
    if rho is None and bool((reachable >= 0).any()):
        which = int((reachable >= 0).nonzero()[0])
        raise ValueError(
            f"no law on the points meets the bound {float(bound[which]):g}: the constraint is at least {float(reachable[which] + bound[which]):g} on all of them"
        )

    def dual(mu: Tensor) -> tuple[Tensor, Tensor]:
        tilted = log_prior + (reward - over @ mu) / kl
        value = kl * torch.logsumexp(tilted, 0) + 0.5 * (stiffness * (mu + shift).square()).sum()
        return value, torch.softmax(tilted, 0)

    mu = (-shift).clamp(min=0).abs()  # what the last round ended with
    value, weights = dual(mu)
    close = 0
    scale = over.abs().amax(0).clamp(min=1e-300)
    for _ in range(200):
        mean = weights @ over
        slope = stiffness * (mu + shift) - mean
        free = (mu > 0) | (slope < 0)
        if close == 3 or float((slope * free / scale).abs().max()) <= tolerance:
            return mu
        centred = over - mean
        curvature = (centred * weights.unsqueeze(-1)).T @ centred / kl + torch.diag(stiffness)
        curvature = curvature + 1e-14 * torch.diag(curvature.diagonal().clamp(min=1e-300))
        step = torch.zeros(m, dtype=torch.float64)
        step[free] = torch.linalg.solve(curvature[free][:, free], slope[free])
        decrease = float(slope @ step)
        if decrease <= 1e-10 * (
            1 + abs(float(value))
        ):  # so near that whole steps converge quadratically, and values are rounding
            close += 1
            tried = (mu - step).clamp(min=0)
            new_value, new_weights = dual(tried)
        else:
            size = 1.0
            while True:
                tried = (mu - size * step).clamp(min=0)
                new_value, new_weights = dual(tried)
                if bool(new_value <= value) or size < 1e-12:
                    break
                size /= 2
        mu, value, weights = tried, new_value, new_weights
        if not math.isfinite(float(mu.abs().max())) or float(mu.abs().max()) > 1e12 * kl:
            raise ValueError(
                "no law on the points meets all bounds at once: the price of the constraints grows without end"
            )
    return mu
