"""How the study trains and examines any model: the same tasks, steps and recipe for all."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from cameraready.stats.sfconvcnp.workloads import (
    HIGH,
    LARGEST_CONTEXT,
    LOW,
    QUERIES,
    SMALLEST_CONTEXT,
    Family,
    Tasks,
    as_tensors,
)

BATCH = 16


@contextmanager
def one_thread() -> Iterator[None]:
    """A worker of the study has one core; torch would take all."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Initial weights from `seed`, for models that draw them from torch's default generator, which is put back."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def train(model: nn.Module, family: Family, steps: int, learning_rate: float, seed: int, device: str) -> nn.Module:
    """`steps` of AdamW on fresh tasks, rate to 1e-6 along a cosine, gradients clipped at 0.5 (the paper's recipe)."""
    generator = np.random.default_rng([seed, 1])
    model = model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, eta_min=1e-6)
    for _ in range(steps):
        size = int(generator.integers(SMALLEST_CONTEXT, LARGEST_CONTEXT + 1))
        xc, yc, xt, yt = as_tensors(family.draw(BATCH, size, QUERIES, generator, False), device)
        loss = -model(xc, yc, xt).log_prob(yt).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def likelihood(model: nn.Module, task: Tasks, shift: float, device: str) -> float:
    """Mean log-likelihood of a query output, all inputs moved by `shift`."""
    xc, yc, xt, yt = as_tensors(task, device)
    return float(model(xc + shift, yc, xt + shift).log_prob(yt).mean())


def reach(model: nn.Module, seed: int, device: str) -> float:
    """How far the prediction at the left end looks: mean distance of the context's points, weighted by the gradient of the
    predicted mean in their values (0 to 6; equal weights would give 3)."""
    generator = np.random.default_rng([seed, 3])
    x = generator.uniform(LOW, HIGH, size=(1, 60, 1))
    y = generator.normal(size=x.shape)
    query = np.full((1, 1, 1), LOW)
    xc, yc, xt, _ = as_tensors(Tasks(x, y, query, query), device)
    yc.requires_grad_()
    (gradient,) = torch.autograd.grad(model(xc, yc, xt).mean.sum(), yc)
    weight = gradient.abs()
    return float((weight * (xc - xt).abs()).sum() / weight.sum())


def gaussian_process_likelihood(task: Tasks) -> float:
    """Of a Gaussian process whose Matern kernel and noise are fitted to the context alone (scikit-learn)."""
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

    kernel = ConstantKernel(1.0, (1e-2, 1e2)) * Matern(0.5, (0.05, 20.0), nu=2.5) + WhiteKernel(0.01, (1e-4, 2.0))
    process = GaussianProcessRegressor(kernel, normalize_y=True, n_restarts_optimizer=2, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # parameters at their bounds, which is all right
        process.fit(task.xc[0], task.yc[0, :, 0])
        mean, std = process.predict(task.xt[0], return_std=True)
    return float(np.mean(-0.5 * ((task.yt[0, :, 0] - mean) / std) ** 2 - np.log(std) - 0.5 * np.log(2 * np.pi)))
