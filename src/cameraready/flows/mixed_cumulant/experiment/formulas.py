"""Closed forms of the method against autograd, Monte Carlo and the loss itself, on random settings."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from cameraready.flows.mixed_cumulant import MixedCumulant, diffusion_information_exponent, population_loss
from cameraready.flows.mixed_cumulant._activation import activation, expectations
from cameraready.flows.mixed_cumulant.denoiser import loss_and_gradient
from cameraready.flows.mixed_cumulant.exponent import noise_levels

TORCH = {"tanh": torch.tanh, "erf": torch.erf, "sin": torch.sin}


def identities(blocks: int) -> Iterator[dict[str, Any]]:
    """A row a random setting: how far each formula is off."""
    for block in range(blocks):
        rng = np.random.default_rng([77, block])
        phi = ("tanh", "erf", "sin")[block % 3]
        snr, gain = float(rng.uniform(0.3, 4)), float(rng.uniform(0.2, 1.0))
        model = MixedCumulant(
            float(rng.uniform(0, 1)), float(rng.uniform(1, 10)), "rademacher", float(rng.choice([0.0, 1.0]))
        )
        yield {
            "arm": "denoiser",
            "run": str(block),
            "activation": phi,
            "gradient_gap": gradient_gap(phi, snr, gain, rng),
            "loss_z": loss_z(model, phi, snr, gain, rng),
            "coefficient_gap": coefficient_gap(model, phi, snr, gain),
            "covariance_gap": covariance_gap(model),
            "relu_gap": relu_gap(),
        }


def gradient_gap(phi: str, snr: float, gain: float, rng: np.random.Generator) -> float:
    (a,), (s,) = noise_levels(snr)
    w, x, eps = rng.standard_normal((1, 6)), rng.standard_normal((1, 9, 6)), rng.standard_normal((1, 9, 6))
    _, gradient = loss_and_gradient(w, x, eps, a, s, gain, activation(phi))
    tw, tx, ty = torch.tensor(w, requires_grad=True), torch.tensor(x), torch.tensor(a * x + s * eps)
    value = TORCH[phi]((ty * tw[:, None]).sum(-1))
    (tx - a * ty - gain * value[..., None] * tw[:, None]).square().sum(-1).mean().backward()
    return float(np.abs(gradient - tw.grad.numpy()).max() / np.abs(gradient).max())


def loss_z(model: MixedCumulant, phi: str, snr: float, gain: float, rng: np.random.Generator) -> float:
    """Monte Carlo less quadrature, in standard errors."""
    (a,), (s,) = noise_levels(snr)
    m = rng.uniform(-0.6, 0.6, 2)
    w = np.array([m[0], m[1], math.sqrt(1 - m @ m), 0.0])
    x = model.sample(100_000, np.eye(2, 4), rng)
    y = a * x + s * rng.standard_normal(x.shape)
    losses = ((x - a * y - gain * activation(phi).function(y @ w)[:, None] * w) ** 2).sum(1)
    expected = population_loss(model, 4, (float(m[0]), float(m[1])), phi=phi, snr=snr, gain=gain)
    return float((losses.mean() - expected) / (losses.std() / math.sqrt(len(losses))))


def coefficient_gap(model: MixedCumulant, phi: str, snr: float, gain: float) -> float:
    """The loss at a small overlap less its series, along u and along v."""
    worst = 0.0
    for direction, at in (("covariance", (0.15, 0.0)), ("fourth", (0.0, 0.15))):
        found = diffusion_information_exponent(phi, snr, direction, model=model, gain=gain, max_order=20)  # type: ignore[arg-type]
        change = population_loss(model, 4, at, phi=phi, snr=snr, gain=gain) - population_loss(
            model, 4, (0.0, 0.0), phi=phi, snr=snr, gain=gain
        )
        worst = max(worst, abs(change - float(found.coefficients @ 0.15 ** np.arange(21))))
    return worst


def covariance_gap(model: MixedCumulant) -> float:
    """The variance of v.x less 1, and its covariance with u.x less what the latents' correlation makes it."""
    covariance = model.covariance(np.eye(2, 4))
    cross = math.sqrt(model.beta_u) * model.loading * model.correlation * math.sqrt(2 / math.pi)
    return float(max(abs(covariance[1, 1] - 1), abs(covariance[0, 1] - cross)))


def relu_gap() -> float:
    phi = activation("relu")
    scale = np.sqrt([math.factorial(k) for k in range(9)])
    return float(np.abs((phi.hermite(8)[0] - expectations(phi.function, 8)) / scale).max())
