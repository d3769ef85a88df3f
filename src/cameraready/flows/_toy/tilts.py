"""Exponential tilts of Gaussian mixtures by linear or quadratic rewards, in closed form."""

from __future__ import annotations

import torch
from torch import Tensor

from cameraready.flows._paths import LinearPath, Path
from cameraready.flows._toy.mixtures import GaussianMixture


class QuadraticReward:
    """r(x) = constant + linear . x + x^T matrix x / 2.

    Parameters
    ----------
    linear : (D,)
    matrix : (D, D) symmetric, optional
        None for a linear reward.
    constant : float
    """

    def __init__(self, linear: Tensor, matrix: Tensor | None = None, constant: float = 0.0):
        self.linear = torch.as_tensor(linear, dtype=torch.float64)
        if self.linear.dim() != 1:
            raise ValueError(f"linear must be (D,), got shape {tuple(self.linear.shape)}")
        dim = len(self.linear)
        self.matrix = (
            torch.zeros(dim, dim, dtype=torch.float64)
            if matrix is None
            else torch.as_tensor(matrix, dtype=torch.float64)
        )
        if self.matrix.shape != (dim, dim) or not torch.allclose(self.matrix, self.matrix.mT):
            raise ValueError(f"matrix must be symmetric ({dim}, {dim}), got shape {tuple(self.matrix.shape)}")
        self.constant = float(constant)

    @classmethod
    def closeness(cls, target: Tensor, width: float) -> QuadraticReward:
        """-|x - target|^2 / (2 width^2)."""
        target = torch.as_tensor(target, dtype=torch.float64)
        inverse = 1 / width**2
        return cls(
            inverse * target,
            -inverse * torch.eye(len(target), dtype=torch.float64),
            -0.5 * inverse * float(target @ target),
        )

    def __call__(self, x: Tensor) -> Tensor:
        """(B,) at x (B, D)."""
        linear, matrix = self.linear.to(x), self.matrix.to(x)
        return self.constant + x @ linear + 0.5 * ((x @ matrix) * x).sum(-1)

    def scaled(self, factor: float) -> QuadraticReward:
        """`factor` times the reward."""
        return QuadraticReward(factor * self.linear, factor * self.matrix, factor * self.constant)


def log_expectation(mixture: GaussianMixture, reward: QuadraticReward) -> Tensor:
    """log E[exp r(X)] under the mixture, () float64.

    Raises
    ------
    ValueError
        The expectation is infinite: the reward grows faster than the mixture falls.
    """
    each = _component_terms(mixture.means, mixture.covariances, reward)
    return torch.logsumexp(mixture.weights.to(torch.float64).log() + each, -1)


def tilted(mixture: GaussianMixture, reward: QuadraticReward) -> GaussianMixture:
    """The law proportional to p(x) exp r(x): again a mixture, the optimum of E[r] - KL(. || p).

    Component k has covariance (C^-1 - A)^-1, mean that covariance times (C^-1 m + linear), and its weight times E_k[exp r].
    """
    means, covariances = mixture.means.to(torch.float64), mixture.covariances.to(torch.float64)
    log_weights = mixture.weights.to(torch.float64).log() + _component_terms(means, covariances, reward)
    eye = torch.eye(mixture.dim, dtype=torch.float64)
    shrink = torch.linalg.inv(eye - covariances @ reward.matrix)  # (C^-1 - A)^-1 = (I - C A)^-1 C
    after = shrink @ covariances
    centre = torch.einsum("kij,kj->ki", shrink, means + covariances @ reward.linear)
    return GaussianMixture(torch.softmax(log_weights, -1), centre, (after + after.mT) / 2).to(mixture.dtype)


def value(
    mixture: GaussianMixture,
    x_t: Tensor,
    t: float | Tensor,
    reward: QuadraticReward,
    path: Path = LinearPath(),  # noqa: B008 (a constant)
) -> Tensor:
    """V_t(x_t) = log E[exp r(X1) | x_t], (B,) for x_t (B, D); differentiable in x_t (its gradient is Doob's drift)."""
    posterior = mixture.posterior(x_t.to(torch.float64), t, path)
    covariances = posterior.covariances
    covariances = covariances if covariances.dim() == 4 else covariances.expand(len(x_t), -1, -1, -1)
    each = _component_terms(posterior.means, covariances, reward)
    tiny = torch.finfo(torch.float64).tiny
    return torch.logsumexp(posterior.weights.clamp_min(tiny).log() + each, -1).to(x_t.dtype)


def _component_terms(means: Tensor, covariances: Tensor, reward: QuadraticReward) -> Tensor:
    """log E[exp r] under Gaussians (..., K): also where a covariance is zero."""
    means, covariances = means.to(torch.float64), covariances.to(torch.float64)
    dim = means.shape[-1]
    if len(reward.linear) != dim:
        raise ValueError(f"the reward is of {len(reward.linear)} dimensions, the mixture of {dim}")
    matrix = torch.eye(dim, dtype=torch.float64) - covariances @ reward.matrix
    with torch.no_grad():
        # Eigenvalues of I - C A are real: those of I - R^T A R with C = R R^T.
        if bool((torch.linalg.eigvals(matrix).real <= 0).any()):
            raise ValueError(
                "E[exp r] is infinite: the reward's matrix grows faster than a component falls; scale the reward down"
            )
    gradient = reward.linear + means @ reward.matrix
    solved = torch.linalg.solve(matrix, torch.einsum("...ij,...j->...i", covariances, gradient)[..., None])[..., 0]
    at_mean = reward.constant + means @ reward.linear + 0.5 * ((means @ reward.matrix) * means).sum(-1)
    return at_mean - 0.5 * torch.linalg.slogdet(matrix).logabsdet + 0.5 * (gradient * solved).sum(-1)
