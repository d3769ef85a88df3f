"""A second denoiser of the study, of another build than the perceptron: a small mixer, stacked over seeds."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cameraready.flows._toy.networks import time_features
from cameraready.flows._toy.stacked import StackedLinear

_PATCH, _SIDE, _FOURIER = 2, 8, 8


class StackedMixer(nn.Module):
    """An MLP-mixer (Tolstikhin et al., 2021, arXiv:2105.01601) for 8 x 8 grey images, S seeds side by side.

    ``forward(x, t)``: x (S, B, 64), or (B, 64), which all seeds are given; t a number, (B,) or (S, B); returns (S, B, 64).

    Parameters
    ----------
    seeds : int
    width : int
        Channels of each of the 16 tokens.
    blocks : int
    """

    def __init__(self, seeds: int, width: int = 32, blocks: int = 2) -> None:
        super().__init__()
        generators = [torch.Generator().manual_seed(20_000 + s) for s in range(seeds)]
        pixels, self.tokens, self.width, self.seeds = _PATCH**2, (_SIDE // _PATCH) ** 2, width, seeds
        self.enter = StackedLinear(generators, pixels, width)
        self.clock = StackedLinear(generators, 2 * _FOURIER, width)
        self.place = nn.Parameter(
            torch.stack([torch.randn(1, self.tokens, width, generator=g) for g in generators]) / 2
        )
        self.mix = nn.ModuleList(
            nn.ModuleList(
                [
                    StackedLinear(generators, self.tokens, 2 * self.tokens, gain=1.4),
                    StackedLinear(generators, 2 * self.tokens, self.tokens, gain=0.3),
                    StackedLinear(generators, width, 2 * width, gain=1.4),
                    StackedLinear(generators, 2 * width, width, gain=0.3),
                ]
            )
            for _ in range(blocks)
        )
        self.leave = StackedLinear(generators, width, pixels)

    def forward(self, x: Tensor, t: float | Tensor) -> Tensor:
        if x.dim() == 2:
            x = x.expand(self.seeds, *x.shape)
        s, b = x.shape[:2]
        count, width, side = self.tokens, self.width, _SIDE // _PATCH
        h = x.reshape(s, b, side, _PATCH, side, _PATCH).transpose(3, 4).reshape(s, b * count, _PATCH**2)
        times = torch.as_tensor(t, dtype=x.dtype).expand(s, b)
        h = self.enter(h).view(s, b, count, width) + self.place + self.clock(time_features(times, _FOURIER))[:, :, None]
        for token_in, token_out, channel_in, channel_out in self.mix:
            across = F.layer_norm(h, (width,)).transpose(2, 3).reshape(s, b * width, count)
            h = h + token_out(F.silu(token_in(across))).view(s, b, width, count).transpose(2, 3)
            within = F.layer_norm(h, (width,)).reshape(s, b * count, width)
            h = h + channel_out(F.silu(channel_in(within))).view(s, b, count, width)
        out = self.leave(h.reshape(s, b * count, width)).view(s, b, side, side, _PATCH, _PATCH)
        return out.transpose(3, 4).reshape(s, b, _SIDE**2)
