"""How far two samples are apart: energy distance, sliced Wasserstein distance, Frechet distance of features."""

from __future__ import annotations

import torch
from torch import Tensor

#: Distances held at once.
_BLOCK = 1 << 22


def energy_distance(x: Tensor, y: Tensor) -> Tensor:
    """Unbiased estimate of 2 E|X - Y| - E|X - X'| - E|Y - Y'| (Szekely and Rizzo, 2013), the squared energy distance.

    Parameters
    ----------
    x, y : (..., n, D) and (..., m, D), or images (n, C, H, W)
        Samples, at least two each; dimensions before the last two are a batch (tensors of four dimensions are images, flattened).

    Returns
    -------
    (...) float64
        Differentiable. Zero in expectation when the laws are equal (so it may come out negative), positive when they differ; in units of the data.

    Notes
    -----
    O(n m D) time, in blocks; memory does not grow with n m unless gradients are asked for. `scipy.stats.energy_distance` gives the square root of the
    biased estimate. The estimate's spread for equal laws falls like 1/n.
    """
    x, y = _samples(x), _samples(y)
    if x.shape[-1] != y.shape[-1]:
        raise ValueError(f"samples must have the same dimension, got {x.shape[-1]} and {y.shape[-1]}")
    n, m = x.shape[-2], y.shape[-2]
    if min(n, m) < 2:
        raise ValueError(f"give at least two draws of each, got {n} and {m}")
    between = _sum_of_distances(x, y) / (n * m)
    within_x, within_y = _sum_of_distances(x, x) / (n * (n - 1)), _sum_of_distances(y, y) / (m * (m - 1))
    return 2 * between - within_x - within_y


def sliced_wasserstein(
    x: Tensor, y: Tensor, generator: torch.Generator, *, projections: int = 256, order: int = 1
) -> Tensor:
    """Sliced Wasserstein distance (Bonneel et al., 2015): over random directions, the mean of W_p^p of the projections, to the power 1/p.

    Parameters
    ----------
    x, y : (n, D) and (m, D), or images (n, C, H, W)
    generator : torch.Generator
        Of the directions.
    projections : int
        Number of directions; in one dimension there is only one, and the distance is exact.
    order : int
        p, 1 or 2.

    Returns
    -------
    () float64
        In units of the data; biased upwards at finite n (of order n^-1/2 for equal laws).
    """
    x, y = _samples(x), _samples(y)
    if x.dim() != 2 or y.dim() != 2 or x.shape[1] != y.shape[1]:
        raise ValueError(f"samples must be (n, D) and (m, D), got {tuple(x.shape)} and {tuple(y.shape)}")
    if order not in (1, 2) or projections < 1:
        raise ValueError(f"order must be 1 or 2 and projections at least 1, got {order} and {projections}")
    dim = x.shape[1]
    directions = torch.ones(1, 1, dtype=torch.float64)
    if dim > 1:
        directions = torch.randn(dim, projections, generator=generator, dtype=torch.float64)
        directions = directions / directions.norm(dim=0)
    directions = directions.to(x.device)
    a, b = (x @ directions).sort(0).values, (y @ directions).sort(0).values
    n, m = len(a), len(b)
    # Steps of the two quantile functions, in units of 1 / (n m), so that they are exact.
    steps = torch.cat([torch.arange(1, n + 1, device=x.device) * m, torch.arange(1, m + 1, device=x.device) * n])
    ends = steps.unique()
    weights = ends.diff(prepend=ends.new_zeros(1)).to(torch.float64) / (n * m)
    gap = (a[(ends - 1) // m] - b[(ends - 1) // n]).abs() ** order
    return (weights @ gap).mean() ** (1 / order)


def frechet(x: Tensor, y: Tensor) -> Tensor:
    """Frechet distance of the Gaussians fitted to two sets of features (Heusel et al., 2017, arXiv:1706.08500, with any features).

    Parameters
    ----------
    x, y : (n, F) and (m, F)
        Features, at least two each; more than F for a covariance of full rank.

    Returns
    -------
    () float64
        |mean x - mean y|^2 + tr(C_x + C_y - 2 (C_x C_y)^(1/2)). Biased upwards by of order F/n: compare only at equal numbers, and hold it against the
        distance between two sets of real data of those numbers.
    """
    x, y = (v.detach().to(torch.float64) for v in (x, y))
    if x.dim() != 2 or y.dim() != 2 or x.shape[1] != y.shape[1] or min(len(x), len(y)) < 2:
        raise ValueError(f"features must be (n, F) and (m, F), n, m > 1, got {tuple(x.shape)} and {tuple(y.shape)}")
    return frechet_gaussians(x.mean(0), x.T.cov().reshape(x.shape[1], -1), y.mean(0), y.T.cov().reshape(y.shape[1], -1))


def frechet_gaussians(mean_x: Tensor, cov_x: Tensor, mean_y: Tensor, cov_y: Tensor) -> Tensor:
    """The same between Gaussians with means (F,) and covariances (F, F): their squared 2-Wasserstein distance."""
    values, vectors = torch.linalg.eigh(cov_x)
    root = (vectors * values.clamp_min(0).sqrt()) @ vectors.T
    cross = torch.linalg.eigvalsh(root @ cov_y @ root).clamp_min(0).sqrt().sum()
    return (mean_x - mean_y).square().sum() + cov_x.trace() + cov_y.trace() - 2 * cross


def digit_features(images: Tensor) -> Tensor:
    """Features (N, 64) of images (N, 1, 8, 8) in [-1, 1] from the digits classifier (trained when first asked for)."""
    from cameraready.flows._toy.trained import trained

    net = trained("digits-classifier")
    with torch.no_grad():
        return torch.cat([net.features(part) for part in images.to(torch.float32).split(1024)])


def _samples(x: Tensor) -> Tensor:
    if x.dim() == 4:
        x = x.flatten(1)
    if x.dim() < 2:
        raise ValueError(f"a sample must be (n, D), got shape {tuple(x.shape)}")
    return x.to(torch.float64)


def _sum_of_distances(x: Tensor, y: Tensor) -> Tensor:
    """Over all pairs, (...)."""
    batch = x.shape[:-2].numel()
    rows = max(1, _BLOCK // (y.shape[-2] * max(1, batch)))
    return sum(torch.cdist(part, y).sum((-2, -1)) for part in x.split(rows, -2))
