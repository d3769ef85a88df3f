"""Differentiable stand-ins for properties: an ensemble of perceptrons on the latent, with what it errs on latents it never saw."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from cameraready.flows._toy.training import fit


class Surrogates(nn.Module):
    """Properties (B, P) of latents (B, D) as the mean of an ensemble, differentiable; in the properties' own units.

    Parameters
    ----------
    latent, properties : int
        D and P.
    width, members : int
        Hidden units of each of two layers, and perceptrons in the ensemble.
    generator : torch.Generator
        Of the initial weights.
    """

    def __init__(self, latent: int, properties: int, *, width: int, members: int, generator: torch.Generator) -> None:
        super().__init__()
        self.sizes = (latent, width, width, properties)
        self.weights = nn.ParameterList(
            torch.randn(members, a, b, generator=generator) / math.sqrt(a)
            for a, b in zip(self.sizes[:-1], self.sizes[1:], strict=True)
        )
        self.biases = nn.ParameterList(torch.zeros(members, 1, b) for b in self.sizes[1:])
        self.register_buffer("centre", torch.zeros(properties))
        self.register_buffer("spread", torch.ones(properties))

    def standardised(self, latent: Tensor) -> Tensor:
        """Each member's prediction (M, B, P) in standard units, for latents (B, D), or (M, B, D), a batch for each member."""
        state = latent if latent.dim() == 3 else latent.expand(len(self.weights[0]), *latent.shape)
        for number, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            state = torch.baddbmm(bias, functional.silu(state) if number else state, weight)
        return state

    def members(self, latent: Tensor) -> Tensor:
        """Each member's prediction (M, B, P), in latents' dtype."""
        found = self.standardised(latent.to(self.centre.dtype)) * self.spread + self.centre
        return found.to(latent.dtype)

    def forward(self, latent: Tensor) -> Tensor:
        """Predictions (B, P) of latents (B, D), in their dtype."""
        return self.members(latent).mean(0)


def train_surrogates(
    net: Surrogates,
    latents: Tensor,
    values: Tensor,
    *,
    steps: int,
    batch: int,
    lr: float,
    generator: torch.Generator,
    progress: str | None = None,
) -> Surrogates:
    """Fit the ensemble to values (N, P) by least squares in standard units, each member on batches of its own; rows with NaN are left out."""
    known = ~values.isnan().any(1)
    latents, values = latents[known].float(), values[known].float()
    if len(values) < 2:
        raise ValueError(f"surrogates need at least 2 molecules with known properties, got {len(values)}")
    net.centre.copy_(values.mean(0))
    net.spread.copy_(values.std(0).clamp_min(1e-6))
    targets = (values - net.centre) / net.spread
    members = len(net.weights[0])

    def loss(net: nn.Module, g: torch.Generator) -> Tensor:
        chosen = torch.randint(len(values), (members, batch), generator=g)
        # Properties have outliers (SA of a cage, the weight of a peptide) that squares would chase.
        return functional.smooth_l1_loss(net.standardised(latents[chosen]), targets[chosen])

    fit(net, loss, steps=steps, lr=lr, generator=generator, ema=0.995, weight_decay=1e-2, progress=progress)
    return net


@dataclass(frozen=True)
class Accuracy:
    """How a surrogate compares with rdkit on latents that no training saw.

    Attributes
    ----------
    r2 : float
        Share of the truth's variance explained.
    rank : float
        Spearman's correlation.
    slope : float
        Of the truth on the prediction; 1 where predictions are calibrated, less where they are too bold.
    bias : float
        Mean of prediction minus truth, in the property's unit.
    width : float
        Half-width of the interval round a prediction that holds 90 % of the truths of one half of the latents (split conformal).
    coverage : float
        Share of the truths of the other half within it.
    count : int
        Latents.
    """

    r2: float
    rank: float
    slope: float
    bias: float
    width: float
    coverage: float
    count: int


def accuracy(predicted: Tensor, truth: Tensor, names: Sequence[str]) -> dict[str, Accuracy]:
    """For each property, how predictions (N, P) compare with truth (N, P); rows of NaN truth are left out, at least 20 must stay."""
    from scipy import stats

    known = ~truth.isnan().any(1)
    predicted, truth = predicted[known].double(), truth[known].double()
    if len(truth) < 20:
        raise ValueError(f"an accuracy needs at least 20 molecules with known properties, got {len(truth)}")
    found = {}
    half = len(truth) // 2
    for column, name in enumerate(names):
        p, y = predicted[:, column], truth[:, column]
        error = (p - y).abs()
        rank = min(half, math.ceil(0.9 * (half + 1)))
        width = float(error[:half].sort().values[rank - 1])
        found[name] = Accuracy(
            r2=float(1 - (p - y).square().mean() / (y - y.mean()).square().mean()),
            rank=float(stats.spearmanr(p, y).statistic),
            slope=float(((p - p.mean()) * (y - y.mean())).mean() / (p - p.mean()).square().mean()),
            bias=float((p - y).mean()),
            width=width,
            coverage=float((error[half:] <= width).double().mean()),
            count=len(y),
        )
    return found
