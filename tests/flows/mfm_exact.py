"""Gaussian data, for which the flow map of every posterior is known: a backbone without error."""

import torch
from torch import nn

from cameraready.flows import LinearPath

F64 = torch.float64


class GaussianBackbone(nn.Module):
    """Average velocities of the posterior's flow for data N(mean, variance I); `amiss` times the inner state is added to them."""

    def __init__(self, mean=0.7, variance=0.5, path=None, amiss=0.0):
        super().__init__()
        self.mean, self.variance, self.path = mean, variance, path or LinearPath()
        self.amiss = nn.Parameter(torch.tensor(float(amiss), dtype=F64))

    def posterior(self, x, t):
        """Mean and variance of the data given x at t (B, 1)."""
        alpha, sigma = self.path.alpha(t), self.path.sigma(t)
        total = alpha**2 * self.variance + sigma**2
        return self.mean + alpha * self.variance * (x - alpha * self.mean) / total, sigma**2 * self.variance / total

    def forward(self, s, u, y, t, x, label=None):
        s, u, t = (value[:, None] for value in (s, u, t))
        mean, variance = self.posterior(x, t)
        a, b, c, d = self.path.alpha(s), self.path.sigma(s), self.path.alpha(u), self.path.sigma(u)
        before, after = (a**2 * variance + b**2).sqrt(), (c**2 * variance + d**2).sqrt()
        near = (u - s).abs() < 1e-9
        step = torch.where(near, 1.0, u - s)
        moved = (c * mean + after / before * (y - a * mean) - y) / step
        da, db = self.path.d_alpha(s), self.path.d_sigma(s)
        instant = da * mean + (da * a * variance + db * b) / before**2 * (y - a * mean)
        return torch.where(near, instant, moved) + self.amiss * y


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def noise(*shape, seed=0, dtype=F64):
    return torch.randn(shape, generator=generator(seed), dtype=dtype)
