"""Gaussian clones of data, and the best denoiser that knows nothing beyond second order."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cameraready.flows._paths import LINEAR, Path


class GaussianClone:
    """A Gaussian with the mean and covariance of given data: everything pair-wise, nothing beyond.

    When to use: as the control on which a denoiser that has learnt only pair-wise statistics does as well as on the data. When not: where values must stay in a
    range; clipping a clone makes it non-Gaussian, so none is done here.

    Parameters
    ----------
    data : tensor or array, (N, ...)
        Flattened to (N, D); moments in float64. Take the rows that the model is trained on, or more.
    shrinkage : float in [0, 1)
        Towards a multiple of the identity: ``(1 - shrinkage) cov + shrinkage tr(cov) / D I``.

    Attributes
    ----------
    mean : float64 tensor, (D,)
    covariance : float64 tensor, (D, D)
    shape : tuple of int
        Of one sample.

    Raises
    ------
    ValueError
        Fewer than two rows, NaN, a shrinkage out of range.

    References
    ----------
    Refinetti et al., 2023, arXiv:2211.11567; Bardone et al., 2026, arXiv:2603.12901.
    """

    def __init__(self, data: Any, *, shrinkage: float = 0.0) -> None:
        self._numpy = not isinstance(data, Tensor)
        rows = torch.as_tensor(np.asarray(data) if self._numpy else data.detach())
        if rows.dim() < 2 or len(rows) < 2 or not rows.is_floating_point():
            raise ValueError(
                f"data must be two or more rows (N, ...) of floating point, got {rows.dtype} of shape {tuple(rows.shape)}"
            )
        if not 0 <= shrinkage < 1:
            raise ValueError(f"shrinkage must lie in [0, 1), got {shrinkage}")
        if not bool(torch.isfinite(rows).all()):
            raise ValueError("data hold NaN or infinity; leave such rows out, or fill them in")
        self.shape, self._dtype, self._device = tuple(rows.shape[1:]), rows.dtype, rows.device
        flat = rows.flatten(1).to("cpu", torch.float64)
        self.mean = flat.mean(0)
        centred = flat - self.mean
        self.covariance = centred.T @ centred / len(flat)
        dim = flat.shape[1]
        if shrinkage:
            level = self.covariance.trace() / dim
            self.covariance = (1 - shrinkage) * self.covariance + shrinkage * level * torch.eye(
                dim, dtype=torch.float64
            )
        elif len(flat) < 2 * dim:
            warnings.warn(
                f"{len(flat)} rows are few for a covariance of {dim} dimensions: the clone shares their chance correlations; give more rows, or shrinkage=0.1",
                stacklevel=2,
            )
        variances, self._axes = torch.linalg.eigh(self.covariance)
        self._variances = variances.clamp_min(0.0)  # constant pixels have none

    def sample(self, n: int, generator: torch.Generator | np.random.Generator | int, *, matched: bool = False) -> Any:
        """`n` draws, (n, *shape), array or tensor like the data, in their dtype and on their device.

        Parameters
        ----------
        n : int
        generator : torch.Generator, numpy.random.Generator or int
        matched : bool
            Shift and turn the draws so that their own mean and covariance are exactly those of the clone; needs more draws than the rank of the covariance.
        """
        if n < 1:
            raise ValueError(f"n must be at least 1, got {n}")
        dim = len(self.mean)
        if isinstance(generator, torch.Generator):
            white = torch.randn(n, dim, generator=generator, dtype=torch.float64, device=generator.device).cpu()
        else:
            white = torch.from_numpy(np.random.default_rng(generator).standard_normal((n, dim)))
        if matched:
            rank = int((self._variances > 1e-12 * self._variances[-1]).sum())
            if n <= rank:
                raise ValueError(f"matching the moments of {rank} directions takes more than {rank} draws, got {n}")
            white = white[:, dim - rank :] - white[:, dim - rank :].mean(0)
            white = white @ torch.linalg.inv(torch.linalg.cholesky(white.T @ white / n).mT)
            spread, axes = self._variances[dim - rank :].sqrt(), self._axes[:, dim - rank :]
        else:
            spread, axes = self._variances.sqrt(), self._axes
        drawn = ((white * spread) @ axes.T + self.mean).reshape(n, *self.shape).to(self._device, self._dtype)
        return drawn.numpy() if self._numpy else drawn

    def denoiser(self, path: Path = LINEAR) -> WienerDenoiser:
        """The best denoiser for this Gaussian, which is the best affine one for the data."""
        return WienerDenoiser(self, path)


class WienerDenoiser:
    """``E[x1 | x_t]`` for a Gaussian: ``mean + alpha C (alpha^2 C + sigma^2)^-1 (x_t - alpha mean)``; the best affine denoiser of any data with these moments.

    Parameters
    ----------
    clone : GaussianClone
    path : Path
    """

    def __init__(self, clone: GaussianClone, path: Path = LINEAR) -> None:
        self._clone, self.path = clone, path

    def __call__(self, x: Tensor, t: float) -> Tensor:
        """The estimate of the clean sample at state `x` (B, ...) and time `t`, like `x`."""
        variances, axes, mean = (
            each.to(x.device) for each in (self._clone._variances, self._clone._axes, self._clone.mean)
        )
        alpha, sigma = self.path.alpha(t), self.path.sigma(t)
        gain = alpha * variances / (alpha**2 * variances + sigma**2).clamp_min(1e-300)
        flat = x.flatten(1).to(torch.float64)
        return (((flat - alpha * mean) @ axes * gain) @ axes.T + mean).reshape(x.shape).to(x.dtype)

    def velocity(self, x: Tensor, t: Any, y: Any = None) -> Tensor:
        """The same as a velocity ``v(x, t, y=None)`` of the path; labels play no part."""
        from cameraready.flows._paths import convert

        times = torch.unique(torch.as_tensor(t, dtype=torch.float64))
        if len(times) > 1:
            raise ValueError("a Wiener denoiser is asked at one time for the whole batch, and got several")
        at = float(times)
        return convert(self(x, at), x, at, source="x1", target="velocity", path=self.path)

    def error(self, t: float) -> float:
        """Its mean squared error a dimension, on the clone and on any data with the same covariance: ``mean(l s^2 / (a^2 l + s^2))`` over eigenvalues l."""
        alpha, sigma = self.path.alpha(t), self.path.sigma(t)
        variances = self._clone._variances
        return float((variances * sigma**2 / (alpha**2 * variances + sigma**2).clamp_min(1e-300)).mean())
