"""The losses that are compared, in the forms that TRL 1.16 gives them, for many seeds at once; each has one setting that says how far a step may go."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from cameraready.posttraining.bandpo.bounds import band_bounds
from cameraready.posttraining.bandpo.loss import BUCKETS, token_losses

Bounds = Callable[[Tensor, float], tuple[Tensor, Tensor]]
#: Multiples of its usual setting that an arm's sweep tries: seven for each arm.
MULTIPLES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


@dataclass(frozen=True)
class Arm:
    """A policy-gradient loss with one setting.

    Attributes
    ----------
    usual : float
        What its authors or TRL recommend.
    bounds : callable
        ``bounds(old_logps, setting)`` -> lower and upper bound of each token's ratio.
    bounded : {"token", "sequence", "weight"}
        Each token's ratio, one ratio a sequence (GSPO), or the weight of each token's gradient (CISPO).
    per : {"sequence", "token"}
        Mean over each completion's tokens and then completions (TRL's ``grpo``), or over all tokens (``dapo``, ``cispo``).
    multiples : tuple of float
    sweeps : {"bounds", "lr"}
        What the multiples multiply. A loss without a region (CISPO) is brought to equal KL by its learning rate.
    """

    usual: float
    bounds: Bounds
    bounded: Literal["token", "sequence", "weight"] = "token"
    per: Literal["sequence", "token"] = "sequence"
    multiples: tuple[float, ...] = MULTIPLES
    sweeps: Literal["bounds", "lr"] = "bounds"

    def __call__(
        self, logps: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, setting: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Losses of all seeds, and how many tokens were cut.

        Parameters
        ----------
        logps, old : Tensor (S, B, n, T)
            Of the sampled tokens; `logps` with a graph.
        advantages : Tensor (S, B, n)
        mask : Tensor (S, B, n, T), bool
        setting : Tensor (S,)

        Returns
        -------
        losses (S,), dict of (S,) tensors
        """
        each, up, down = terms(self, logps, old, advantages[..., None], mask, setting)
        each = each.masked_fill(~mask, 0.0)
        if self.per == "token":
            losses = each.sum((1, 2, 3)) / mask.sum((1, 2, 3)).clamp(min=1)
        else:
            losses = (each.sum(-1) / mask.sum(-1).clamp(min=1)).mean((1, 2))
        return losses, cuts(old, mask, up, down)


def terms(
    arm: Arm, logps: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, setting: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss of each token, and which tokens' gradient the upper and the lower bound cut; advantages broadcast over tokens."""
    old = old.detach()
    lower, upper = per_seed(arm.bounds, old, setting)
    moved = logps - old
    if arm.bounded == "weight":
        ratio = moved.detach().exp()
        cut = (ratio > upper) & (advantages > 0)
        return -torch.minimum(ratio, upper) * advantages * logps, cut & mask, torch.zeros_like(cut)
    if arm.bounded == "sequence":
        moved = ((moved * mask).sum(-1) / mask.sum(-1).clamp(min=1))[..., None].expand_as(moved)
    each = token_losses(moved, torch.zeros_like(moved), advantages, lower, upper)
    ratio = moved.detach().exp()
    return each, (ratio > upper) & (advantages > 0) & mask, (ratio < lower) & (advantages < 0) & mask


def per_seed(bounds: Bounds, old: Tensor, setting: Tensor) -> tuple[Tensor, Tensor]:
    """Bounds of all seeds, each with its own setting."""
    lower, upper = torch.empty_like(old), torch.empty_like(old)
    for value in setting.unique().tolist():
        these = setting == value
        lower[these], upper[these] = bounds(old[these], value)
    return lower, upper


@torch.no_grad()
def cuts(old: Tensor, mask: Tensor, up: Tensor, down: Tensor) -> dict[str, Tensor]:
    """Shares of tokens cut by the upper and lower bound, and of all tokens those of each bucket of old probability and their cuts; (S,) each."""
    seeds, total = len(old), mask.flatten(1).sum(1).clamp(min=1)
    bucket = torch.bucketize(old.contiguous(), torch.tensor(BUCKETS, dtype=old.dtype).log()).flatten(1)
    found = {"clip_up": up.flatten(1).sum(1) / total, "clip_down": down.flatten(1).sum(1) / total}
    for name, what in (("tokens", mask), ("up", up), ("down", down)):
        counts = torch.zeros(seeds, len(BUCKETS) + 1).scatter_add_(1, bucket, what.flatten(1).float())
        found |= {f"{name}_{place}": counts[:, place] / total for place in range(len(BUCKETS) + 1)}
    return found


def constant(up_over_down: float) -> Bounds:
    """[1 - eps, 1 + up_over_down * eps]."""

    def bounds(old: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return torch.full_like(old, max(1.0 - eps, 0.0)), torch.full_like(old, 1.0 + up_over_down * eps)

    return bounds


def dcpo(old: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """DCPO's bounds as the authors of BandPO run them: eps_high = eps, eps_low 0.8 of it (0.2 and 0.16), cap 10."""
    p = old.exp()
    lower = 0.5 + 0.5 * torch.sqrt((1 - 4 * 0.8 * eps / p).clamp(min=0))
    return lower, (0.5 + 0.5 * torch.sqrt(1 + 4 * eps / p)).clamp(max=10.0)


def band(divergence: str, relax: tuple[float, float] | None = None) -> Bounds:
    """The method's, cap 10; by table, as in training."""

    def bounds(old: Tensor, delta: float) -> tuple[Tensor, Tensor]:
        return band_bounds(old, divergence=divergence, delta=delta, relax=relax, solver="table", validate=False)

    return bounds


def cap(old: Tensor, most: float) -> tuple[Tensor, Tensor]:
    """CISPO's cap on the weight."""
    return torch.zeros_like(old), torch.full_like(old, most)


ARMS: Mapping[str, Arm] = {
    "band-kl": Arm(0.05, band("kl")),
    "band-tv": Arm(0.05, band("tv")),
    "band-chi2": Arm(0.05, band("chi2")),
    "band-relaxed": Arm(0.05, band("kl", (0.2, 0.28))),
    "clip": Arm(0.2, constant(1.0)),
    "clip-higher": Arm(0.2, constant(1.4)),
    "dapo": Arm(0.2, constant(1.4), per="token"),
    "dcpo": Arm(0.2, dcpo),
    "gspo": Arm(
        3e-4, constant(4 / 3), bounded="sequence", multiples=(1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0)
    ),  # sequences are short here
    "cispo": Arm(5.0, cap, bounded="weight", per="token", multiples=(0.15, 0.3, 0.5, 0.7, 0.85, 1.0, 1.3), sweeps="lr"),
}


@dataclass(frozen=True)
class Own:
    """A loss of the user's, ``loss(logps, old_logps, advantages, mask, setting) -> (S,)``; its setting is swept around 1."""

    loss: Callable[..., Any]
    usual: float = 1.0
    multiples: tuple[float, ...] = MULTIPLES
    sweeps: Literal["bounds", "lr"] = "bounds"

    def __call__(
        self, logps: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, setting: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        losses = self.loss(logps, old, advantages, mask, setting)
        if not isinstance(losses, Tensor) or losses.shape != (len(logps),):
            raise ValueError(f"a loss must return one number for each of the {len(logps)} seeds, as a tensor")
        return losses, {}
