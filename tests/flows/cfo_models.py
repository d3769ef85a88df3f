"""Small models and problems of CFO's tests, whose tilted laws have a closed form."""

import math

import torch
from torch import nn

from cameraready.flows._paths import LinearPath


class GaussianFlow(nn.Module):
    """v = a(t) x + b(t) by a table over the steps of a grid; begins as the exact velocity of N(mean, std^2)."""

    def __init__(self, steps, mean=0.0, std=1.0, dim=1, path=LinearPath(), dtype=torch.float64):  # noqa: B008
        super().__init__()
        self.steps = steps
        slopes, shifts = [], []
        for k in range(steps):
            t = k / steps
            alpha, sigma, rise, fall = path.alpha(t), path.sigma(t), path.d_alpha(t), path.d_sigma(t)
            slope = (rise * alpha * std**2 + fall * sigma) / (alpha**2 * std**2 + sigma**2)
            slopes.append([slope] * dim)
            shifts.append([rise * mean - slope * alpha * mean] * dim)
        self.a = nn.Parameter(torch.tensor(slopes, dtype=dtype))
        self.b = nn.Parameter(torch.tensor(shifts, dtype=dtype))

    def forward(self, x, t, y=None):
        k = (torch.as_tensor(t) * self.steps).round().long().clamp(max=self.steps - 1)
        return self.a[k] * x + self.b[k]


def exact_velocity(mean, std, path=LinearPath()):  # noqa: B008
    """The velocity of N(mean, std^2), as a function."""

    def v(x, t):
        alpha, sigma = path.alpha(t), path.sigma(t)
        centred = (x - alpha * mean) / (alpha**2 * std**2 + sigma**2)
        return path.d_alpha(t) * (mean + alpha * std**2 * centred) + path.d_sigma(t) * sigma * centred

    return v


def tilted(slope, curvature, kl):
    """Mean and standard deviation of N(0, 1) tilted by exp((slope x - curvature x^2 / 2) / kl)."""
    precision = 1 + curvature / kl
    return slope / kl / precision, precision**-0.5


def gaussian_kl(mean, std):
    """KL(N(mean, std^2) || N(0, 1))."""
    return -math.log(std) + (std**2 + mean**2 - 1) / 2


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def bumps():
    """A grid of two hills on the line: points and log-densities."""
    x = torch.linspace(-7, 7, 1401, dtype=torch.float64)
    return x, torch.logaddexp(-((x + 1.5) ** 2), -((x - 1.5) ** 2))
