"""Asking a reward: counted, checked, and with a sentence where it has no gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

#: ``reward(x1) -> (B,)`` for clean data (B, ...).
Reward = Callable[[Tensor], Any]
_HELP = (
    "use method='weights', which needs rewards and no gradients, or write the reward in differentiable torch operations"
)


class CountedReward:
    """A reward function, asked on batches of clean data, with its answers checked and its calls counted.

    Parameters
    ----------
    reward : callable ``reward(x1) -> (B,)``
        Larger is better; a tensor, or anything `torch.as_tensor` takes where no gradient is wanted. -inf means that a datum is ruled out.
    scale : float
        What rewards are multiplied by: the tilt is ``exp(scale * reward)``.

    Attributes
    ----------
    calls : int
        Data rewarded so far.
    """

    def __init__(self, reward: Reward, scale: float = 1.0) -> None:
        if not callable(reward):
            raise TypeError(f"the reward must be a callable of clean data (B, ...), got {type(reward).__name__}")
        self.reward, self.scale = reward, float(scale)
        self.calls = 0

    def __call__(self, x1: Tensor, *, differentiable: bool = False) -> Tensor:
        """Scaled rewards of `x1` (B, ...), (B,), in float32 at least.

        Raises
        ------
        ValueError
            With `differentiable`, a reward without a gradient in `x1`; a result that is not one number for each datum, is NaN, or +inf.
        """
        self.calls += len(x1)
        if differentiable:
            try:
                got = self.reward(x1)
            except RuntimeError as error:
                if "requires grad" not in str(error):
                    raise
                raise ValueError(f"the reward leaves torch's graph ({error}): it has no gradient; {_HELP}") from error
            if not (isinstance(got, Tensor) and got.requires_grad):
                raise ValueError(f"the reward has no gradient with respect to the data; {_HELP}")
        else:
            with torch.no_grad():
                got = self.reward(x1.detach())
        values = torch.as_tensor(got, device=x1.device)
        if values.shape != (len(x1),):
            raise ValueError(
                f"the reward gave shape {tuple(values.shape)} for {len(x1)} data; it must give one number for each, ({len(x1)},)"
            )
        values = values.to(torch.promote_types(x1.dtype, torch.float32)) * self.scale
        bad = int((torch.isnan(values) | (values == torch.inf)).sum())
        if bad:
            raise ValueError(f"the reward (times scale {self.scale:g}) is NaN or +inf for {bad} of {len(x1)} data")
        return values


def log_mean_exp(values: Tensor) -> Tensor:
    """``log mean exp`` over the first dimension, the largest subtracted first; -inf where all are."""
    return torch.logsumexp(values, 0) - math.log(len(values))


def shares(values: Tensor) -> Tensor:
    """``exp`` of values (n, B) normalised over n; equal shares where all are -inf."""
    return torch.where(torch.isinf(values).all(0), 1 / len(values), torch.softmax(values, 0).nan_to_num(0.0))


def effective(weights: Tensor) -> Tensor:
    """The effective sample size of normalised weights (n, B): ``1 / sum w^2``, between 1 and n; (B,)."""
    return 1 / weights.detach().square().sum(0)
