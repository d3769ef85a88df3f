"""A small classifier of images, differentiable in them: a reward, a judge of class-conditional samples, and features for a Frechet distance."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cameraready.flows._toy.networks import convolution, linear, seeded
from cameraready.flows._toy.training import fit


class ImageClassifier(nn.Module):
    """Two convolutions at full, two at half resolution, and a hidden layer of 64 features.

    Parameters
    ----------
    channels, size : int
        Of the images (B, channels, size, size); `size` even.
    classes, width : int
    generator : torch.Generator, optional
        For the weights; by default that of seed 0.

    Notes
    -----
    ``forward(x)`` gives logits (B, classes), ``features(x)`` the hidden layer (B, 64).
    """

    def __init__(
        self,
        channels: int = 1,
        size: int = 8,
        classes: int = 10,
        width: int = 32,
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        g, gain = seeded(generator), math.sqrt(2)
        self.convolutions = nn.ModuleList(
            convolution(a, b, g, gain=gain)
            for a, b in ((channels, width), (width, width), (width, 2 * width), (2 * width, 2 * width))
        )
        self.hidden = linear(2 * width * (size // 2) ** 2, 64, g, gain=gain)
        self.last = linear(64, classes, g)

    def features(self, x: Tensor) -> Tensor:
        """What the last layer sees, (B, 64)."""
        for number, layer in enumerate(self.convolutions):
            if number == 2:
                x = F.avg_pool2d(x, 2)
            x = F.silu(layer(x))
        return F.silu(self.hidden(x.flatten(1)))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.features(x))


def train_classifier(
    net: nn.Module,
    images: Tensor,
    labels: Tensor,
    *,
    steps: int,
    batch: int,
    lr: float,
    generator: torch.Generator,
    noise: float = 0.2,
    smoothing: float = 0.02,
    **fitting: object,
) -> nn.Module:
    """Train by cross-entropy on images with Gaussian noise of a standard deviation drawn from [0, `noise`], so that it judges generated images fairly.

    `fitting` goes to `fit` (checkpoint, progress).
    """

    def loss(net: nn.Module, g: torch.Generator) -> Tensor:
        chosen = torch.randint(len(images), (batch,), generator=g)
        scale = noise * torch.rand(batch, 1, 1, 1, generator=g)
        x = images[chosen] + scale * torch.randn(batch, *images.shape[1:], generator=g)
        return F.cross_entropy(net(x), labels[chosen], label_smoothing=smoothing)

    return fit(net, loss, steps=steps, lr=lr, generator=generator, weight_decay=0.01, **fitting)
