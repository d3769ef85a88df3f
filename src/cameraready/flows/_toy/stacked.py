"""S perceptrons, one for each seed, run and trained side by side: parameters are stacked and every product is one batched product."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cameraready.flows._toy.networks import MLPVelocity, check_labels, inputs_of, labels_of


class StackedLinear(nn.Module):
    """S linear maps at once: (S, B, inputs) to (S, B, outputs), by one `torch.baddbmm`.

    Parameters
    ----------
    generators : sequence of S torch.Generator
        Each for the weights of its seed, N(0, gain^2 / inputs); biases are zero.
    inputs, outputs : int
    gain : float
    """

    def __init__(self, generators: Sequence[torch.Generator], inputs: int, outputs: int, *, gain: float = 1.0):
        super().__init__()
        # Drawn as (outputs, inputs), as `networks.linear` does: seed s is the single network of generator s.
        drawn = [torch.empty(outputs, inputs).normal_(0, gain / math.sqrt(inputs), generator=g) for g in generators]
        self.weight = nn.Parameter(torch.stack(drawn).mT.contiguous())
        self.bias = nn.Parameter(torch.zeros(len(drawn), 1, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.baddbmm(self.bias, x, self.weight)


class StackedMLP(nn.Module):
    """`MLPVelocity` for S seeds at once.

    Parameters
    ----------
    seeds : int or sequence of int
        How many (then 0, 1, ...) or which: each seed's weights come from a generator of its own number, so a seed is the same whichever others run
        beside it, and equal to ``MLPVelocity(..., generator=torch.Generator().manual_seed(seed))``.
    dim, width, depth, classes, fourier, extra, times
        As for `MLPVelocity`.

    Notes
    -----
    ``forward(x, t, y=None, context=None)``: x (S, B, dim), or (B, dim), which all seeds are given; t a number, 0-d, (B,) or (S, B); y (B,) or
    (S, B); returns (S, B, dim). Losses of different seeds share no parameter: the gradient of their *sum* holds each seed's own gradient, one Adam
    over the stacked parameters is S independent Adams, and `clip_per_seed` clips each seed by its own norm.
    """

    def __init__(
        self,
        seeds: int | Sequence[int],
        dim: int,
        width: int = 256,
        depth: int = 4,
        *,
        classes: int = 0,
        fourier: int = 8,
        extra: int = 0,
        times: int = 1,
    ):
        super().__init__()
        numbers = list(range(seeds)) if isinstance(seeds, int) else [int(s) for s in seeds]
        if not numbers:
            raise ValueError("give at least one seed")
        if min(dim, width, depth, fourier, times) < 1 or min(classes, extra) < 0:
            raise ValueError("dim, width, depth, fourier and times must be at least 1, classes and extra at least 0")
        self.dim, self.width, self.depth, self.classes = dim, width, depth, classes
        self.fourier, self.extra, self.times = fourier, extra, times
        generators = [torch.Generator().manual_seed(s) for s in numbers]
        widths = [dim + extra + times * 2 * fourier, *[width] * depth]
        gain = math.sqrt(2)
        self.layers = nn.ModuleList(StackedLinear(generators, a, b, gain=gain) for a, b in pairwise(widths))
        self.last = StackedLinear(generators, width, dim)
        self.table = None
        if classes:
            rows = [torch.empty(classes + 1, width).normal_(generator=g) for g in generators]
            self.table = nn.Parameter(torch.stack(rows))

    @property
    def seeds(self) -> int:
        """S."""
        return self.last.bias.shape[0]

    def forward(
        self,
        x: Tensor,
        t: float | Tensor | tuple[float | Tensor, ...],
        y: int | Tensor | None = None,
        context: Tensor | None = None,
    ) -> Tensor:
        if x.dim() == 2:
            x = x.expand(self.seeds, *x.shape)
        if x.dim() != 3 or len(x) != self.seeds:
            raise ValueError(
                f"states of {self.seeds} seeds are ({self.seeds}, B, {self.dim}), got shape {tuple(x.shape)}"
            )
        h = torch.cat(inputs_of(self, x, t, context), -1)
        labels = labels_of(y, self.classes, x.shape[:2], x.device)
        for number, layer in enumerate(self.layers):
            h = layer(h)
            if number == 0 and labels is not None:
                h = h + _one_hot(labels, self.classes).to(h.dtype) @ self.table
            h = F.silu(h)
        return self.last(h)

    def single(self, index: int) -> MLPVelocity:
        """The network of the seed at a position, with weights of its own."""
        net = MLPVelocity(
            self.dim,
            self.width,
            self.depth,
            classes=self.classes,
            fourier=self.fourier,
            extra=self.extra,
            times=self.times,
        ).to(self.last.bias)
        with torch.no_grad():
            for mine, its in zip([*self.layers, self.last], [*net.layers, net.last], strict=True):
                its.weight.copy_(mine.weight[index].mT)
                its.bias.copy_(mine.bias[index, 0])
            if self.table is not None:
                net.table.weight.copy_(self.table[index])
        return net

    def load(self, index: int, net: MLPVelocity) -> None:
        """Take over the weights of a single network for the seed at a position; the way back from `single`."""
        with torch.no_grad():
            for mine, its in zip([*self.layers, self.last], [*net.layers, net.last], strict=True):
                mine.weight[index].copy_(its.weight.mT)
                mine.bias[index, 0].copy_(its.bias)
            if self.table is not None:
                self.table[index].copy_(net.table.weight)


def _one_hot(labels: Tensor, classes: int) -> Tensor:
    try:
        return F.one_hot(labels, classes + 1)
    except RuntimeError:
        check_labels(labels, classes)
        raise


@torch.no_grad()
def clip_per_seed(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale the gradients of stacked parameters (S, ...) down, each seed's to a norm of at most `max_norm`, in place.

    Returns
    -------
    (S,)
        Norms before clipping.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        raise ValueError("no parameter has a gradient: call backward() first")
    norms = sum(g.flatten(1).square().sum(1) for g in gradients).sqrt()
    factor = (max_norm / (norms + 1e-6)).clamp_max(1.0)
    for g in gradients:
        g.mul_(factor.view(-1, *[1] * (g.dim() - 1)))
    return norms
