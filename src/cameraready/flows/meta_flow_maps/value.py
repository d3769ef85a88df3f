"""What reward a noisy state will come to: the value function, its gradient, and how sure the estimate is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from cameraready.flows._paths import Path, Time
from cameraready.flows.meta_flow_maps.rewards import CountedReward, Reward, effective, log_mean_exp, shares


class Posterior(Protocol):
    """What draws from posteriors: a `MetaFlowMap`, a `PosteriorFlow`, or anything with this method."""

    path: Path

    def sample_posterior(self, x_t: Tensor, t: Time, n: int = ..., **options: object) -> Tensor:
        """(n, B, ...) draws."""


@dataclass(frozen=True)
class ValueEstimate:
    """Values of B states, ``log E[exp(scale r(x1)) | x_t]``.

    Attributes
    ----------
    value : (B,)
        Log-mean-exp of `n` rewards. By Jensen's inequality too low by about ``standard_error^2 / 2``, which vanishes as 1 / n.
    standard_error : (B,)
        By the delta method: that of the mean of ``exp``, divided by the mean. Not to be trusted where `effective` is near 1.
    effective : (B,)
        Effective sample size, between 1 and `n`; 0 (and an infinite standard error) where all rewards were -inf.
    n : int
    """

    value: Tensor
    standard_error: Tensor
    effective: Tensor
    n: int


def value_estimate(
    mfm: Posterior,
    x_t: Tensor,
    t: Time,
    reward: Reward,
    *,
    n: int = 16,
    scale: float = 1.0,
    steps: int | None = None,
    label: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> ValueEstimate:
    """The value of noisy states under a reward, with its standard error.

    Parameters
    ----------
    mfm : MetaFlowMap or PosteriorFlow
    x_t : (B, ...) tensor
    t : float, or tensor () or (B,)
    reward : callable ``reward(x1) -> (B,)``
        Need not be differentiable.
    n : int
        Posterior draws, and rewards, of each state; at least 2.
    scale : float
        The tilt is ``exp(scale * reward)``.
    steps : int, optional
        Calls of the network per draw.
    label, generator
        As in `MetaFlowMap.sample_posterior`.

    Returns
    -------
    ValueEstimate

    References
    ----------
    Potaptchik et al., 2026, arXiv:2601.14430; the standard error is ours.
    """
    if n < 2:
        raise ValueError(f"n must be at least 2 for a standard error, got {n}")
    with torch.no_grad():
        draws = mfm.sample_posterior(x_t, t, n, steps=steps, label=label, generator=generator)
        rewards = CountedReward(reward, scale)(draws.flatten(0, 1)).reshape(n, -1)
        weights = shares(rewards)
        # The mean of exp is 1 / n in units of their sum, so that n w has mean 1.
        error = (n * weights).std(0) / n**0.5
        unseen = torch.isinf(rewards).all(0)
        sizes = torch.where(unseen, 0.0, effective(weights))
        return ValueEstimate(log_mean_exp(rewards), torch.where(unseen, torch.inf, error), sizes, n)


def value_gradient(
    mfm: Posterior,
    x_t: Tensor,
    t: Time,
    reward: Reward,
    *,
    n: int = 16,
    scale: float = 1.0,
    steps: int | None = None,
    label: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """The gradient in `x_t` of the log-mean-exp of `n` rewards, and their effective sample sizes: what MFM-G steers by.

    It is the exact gradient of an estimate that is too low by O(1 / n), and so has a bias of that order itself; it is consistent, which the
    gradient of the reward of the posterior mean (DPS) is not.

    Parameters are those of `value_estimate`; `n` may be 1.

    Returns
    -------
    gradient : tensor like `x_t`
    effective : (B,)

    Raises
    ------
    ValueError
        The reward has no gradient.
    """
    counted = reward if isinstance(reward, CountedReward) else CountedReward(reward, scale)
    with torch.enable_grad():
        x = x_t.detach().requires_grad_()
        draws = mfm.sample_posterior(x, t, n, steps=steps, label=label, generator=generator)
        rewards = counted(draws.flatten(0, 1), differentiable=True).reshape(n, -1)
        usable = ~torch.isinf(rewards).all(0)
        total = log_mean_exp(rewards[:, usable]).sum()
        gradient = torch.autograd.grad(total, x)[0] if bool(usable.any()) else torch.zeros_like(x)
    return gradient, effective(shares(rewards.detach()))
