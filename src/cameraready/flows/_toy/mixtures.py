"""Gaussian mixtures whose flow is known exactly: velocity, score, marginals and posterior at every time of any path."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from cameraready.flows._paths import LinearPath, Path


class Posterior(NamedTuple):
    """The law of the data x1 given a noisy state, a Gaussian mixture for each state.

    Attributes
    ----------
    weights : (B, K)
    means : (B, K, D)
    covariances : (K, D, D), or (B, K, D, D) where each state has its own time
    """

    weights: Tensor
    means: Tensor
    covariances: Tensor

    @property
    def mean(self) -> Tensor:
        """Of the mixture, (B, D)."""
        return (self.weights[..., None] * self.means).sum(1)

    @property
    def covariance(self) -> Tensor:
        """Of the mixture, (B, D, D)."""
        centred = self.means - self.mean[:, None]
        between = torch.einsum("bk,bki,bkj->bij", self.weights, centred, centred)
        inside = (
            self.covariances if self.covariances.dim() == 4 else self.covariances.expand(len(self.means), -1, -1, -1)
        )
        return between + torch.einsum("bk,bkij->bij", self.weights, inside)


class GaussianMixture:
    """A mixture of K Gaussians in D dimensions and the flow from standard normal noise to it.

    Parameters
    ----------
    weights : (K,)
        Positive, summing to one.
    means : (K, D)
    covariances : (K, D, D) or (K,)
        Symmetric positive definite matrices, or the variances of isotropic components.

    Raises
    ------
    ValueError
        Shapes do not fit, weights are no probabilities, a covariance is not symmetric positive definite.

    Notes
    -----
    On a path x_t = alpha x1 + sigma x0 component k has mean alpha m_k and covariance S_k = alpha^2 C_k + sigma^2 I, and given x_t and k

        E[x1] = m_k + alpha C_k S_k^-1 (x_t - alpha m_k),   E[x0] = sigma S_k^-1 (x_t - alpha m_k),   Cov[x1] = sigma^2 C_k S_k^-1,

    none of which divides by alpha or sigma: both ends are regular. Covariances are diagonalised once. Everything but sampling is made of plain
    operations without branches on values, for autograd, `torch.func.jvp` and `vmap`. Numbers are kept in float64 unless `to` says otherwise;
    results have the dtype of the state that is passed in.
    """

    def __init__(self, weights: Tensor, means: Tensor, covariances: Tensor):
        weights, means, covariances = (torch.as_tensor(v) for v in (weights, means, covariances))
        if means.dim() != 2 or weights.shape != means.shape[:1]:
            raise ValueError(
                f"means must be (K, D) and weights (K,), got shapes {tuple(means.shape)} and {tuple(weights.shape)}"
            )
        components, dim = means.shape
        self.weights, self.means = weights.to(torch.float64), means.to(torch.float64)
        covariances = covariances.to(torch.float64)
        if bool((self.weights <= 0).any()) or abs(float(self.weights.sum()) - 1) > 1e-6:
            raise ValueError(f"weights must be positive and sum to 1, got a sum of {float(self.weights.sum()):.6g}")
        self._basis: Tensor | None = None
        if covariances.shape == (components,):
            self._variances = covariances[:, None]
        elif covariances.shape == (components, dim, dim):
            if not torch.allclose(covariances, covariances.mT, rtol=1e-6, atol=1e-10):
                raise ValueError("covariances must be symmetric")
            self._variances, self._basis = torch.linalg.eigh(covariances)
        else:
            raise ValueError(
                f"covariances must be ({components}, {dim}, {dim}), or ({components},) variances, got {tuple(covariances.shape)}"
            )
        if not bool((self._variances > 0).all()):
            raise ValueError("covariances must be positive definite (variances above 0)")

    @property
    def components(self) -> int:
        """K."""
        return self.means.shape[0]

    @property
    def dim(self) -> int:
        """D."""
        return self.means.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """In which numbers are kept."""
        return self.means.dtype

    @property
    def covariances(self) -> Tensor:
        """(K, D, D)."""
        return self._matrices(self._variances)

    def mean(self) -> Tensor:
        """Of the mixture, (D,)."""
        return self.weights @ self.means

    def covariance(self) -> Tensor:
        """Of the mixture, (D, D)."""
        centred = self.means - self.mean()
        return torch.einsum("k,ki,kj->ij", self.weights, centred, centred) + torch.einsum(
            "k,kij->ij", self.weights, self.covariances
        )

    def to(self, *args: torch.dtype | torch.device | str) -> GaussianMixture:
        """The same mixture in another dtype, on another device, or both, as `torch.Tensor.to`."""
        other = object.__new__(GaussianMixture)
        other.weights, other.means = self.weights.to(*args), self.means.to(*args)
        other._variances = self._variances.to(*args)
        other._basis = None if self._basis is None else self._basis.to(*args)
        return other

    def sample(self, n: int, generator: torch.Generator | None = None, *, labels: Tensor | None = None) -> Tensor:
        """`n` draws, (n, D), in the mixture's dtype; from the components that `labels` (n,) names, where given."""
        if labels is None:
            labels = torch.multinomial(self.weights, n, replacement=True, generator=generator)
        noise = torch.randn(n, self.dim, generator=generator, dtype=self.dtype, device=self.means.device)
        scaled = noise * self._variances.sqrt()[labels]
        if self._basis is not None:
            scaled = torch.einsum("nij,nj->ni", self._basis[labels], scaled)
        return self.means[labels] + scaled

    def log_prob(self, x: Tensor) -> Tensor:
        """Log density at x (B, D), (B,)."""
        return self._at(x, 1.0, _DATA).log_density.to(x.dtype)

    def score(self, x: Tensor) -> Tensor:
        """Gradient of the log density at x (B, D), (B, D)."""
        found = self._at(x, 1.0, _DATA)
        return -(found.weights[..., None] * found.whitened).sum(-2).to(x.dtype)

    def velocity(self, path: Path = LinearPath()) -> Callable[..., Tensor]:  # noqa: B008 (a constant)
        """The exact velocity E[alpha' x1 + sigma' x0 | x_t] as ``v(x, t, y=None)``.

        x is (B, D) and t a number, a 0-d tensor or (B,). y (B,), where given, are components to which the flow is restricted, with K for all of
        them (the null label): a class-conditional flow whose classes are the components.
        """

        def v(x: Tensor, t: float | Tensor, y: Tensor | None = None) -> Tensor:
            found = self._at(x, t, path, labels=y)
            time = found.t
            x1 = found.weights[..., None] * found.means
            x0 = found.weights[..., None] * found.sigma[..., None, None] * found.whitened
            d_alpha, d_sigma = (_scalar(f(time), time)[..., None] for f in (path.d_alpha, path.d_sigma))
            return (d_alpha * x1.sum(-2) + d_sigma * x0.sum(-2)).to(x.dtype)

        return v

    def marginal_score(self, x: Tensor, t: float | Tensor, path: Path = LinearPath()) -> Tensor:  # noqa: B008
        """Gradient of the log density of x_t at x (B, D), (B, D)."""
        found = self._at(x, t, path)
        return -(found.weights[..., None] * found.whitened).sum(-2).to(x.dtype)

    def marginal(self, t: float, path: Path = LinearPath()) -> GaussianMixture:  # noqa: B008
        """The law of x_t, again a mixture."""
        time = torch.as_tensor(t, dtype=self.dtype, device=self.means.device)
        alpha, sigma = _scalar(path.alpha(time), time), _scalar(path.sigma(time), time)
        other = self.to(self.dtype)
        other.means, other._variances = alpha * self.means, alpha.square() * self._variances + sigma.square()
        return other

    def posterior(self, x_t: Tensor, t: float | Tensor, path: Path = LinearPath()) -> Posterior:  # noqa: B008
        """The law of x1 given x_t (B, D) at time t; at t = 0 the mixture itself, at t = 1 a point."""
        found = self._at(x_t, t, path)
        covariances = self._matrices(found.left).to(x_t.dtype)
        return Posterior(found.weights.to(x_t.dtype), found.means.to(x_t.dtype), covariances)

    def posterior_sample(
        self,
        x_t: Tensor,
        t: float | Tensor,
        n: int,
        generator: torch.Generator | None = None,
        path: Path = LinearPath(),  # noqa: B008
    ) -> Tensor:
        """`n` independent draws of x1 for each x_t (B, D), as (n, B, D)."""
        found = self._at(x_t, t, path)
        batch = len(x_t)
        chosen = torch.multinomial(found.weights, n, replacement=True, generator=generator)  # (B, n)
        noise = torch.randn(batch, n, self.dim, generator=generator, dtype=self.dtype, device=self.means.device)
        spread = found.left.sqrt().expand(batch, *found.left.shape[-2:])  # (B, K, D or 1)
        scaled = noise * spread.gather(1, chosen[..., None].expand(-1, -1, spread.shape[-1]))
        if self._basis is not None:
            scaled = torch.einsum("bnij,bnj->bni", self._basis[chosen], scaled)
        centre = found.means.gather(1, chosen[..., None].expand(-1, -1, self.dim))
        return (centre + scaled).transpose(0, 1).to(x_t.dtype)

    def _matrices(self, variances: Tensor) -> Tensor:
        """Covariances (..., K, D, D) of the eigenvalues (..., K, D or 1)."""
        full = variances.expand(*variances.shape[:-1], self.dim)
        if self._basis is None:
            return torch.diag_embed(full)
        return torch.einsum("kij,...kj,klj->...kil", self._basis, full, self._basis)

    def _at(self, x: Tensor, t: float | Tensor, path: Path, *, labels: Tensor | None = None) -> _Conditioned:
        if x.dim() < 1 or x.shape[-1] != self.dim:
            raise ValueError(f"the state must be (B, {self.dim}), got shape {tuple(x.shape)}")
        x = x.to(self.dtype)
        time = one_each(torch.as_tensor(t, dtype=self.dtype, device=x.device), x, "time")
        alpha, sigma = _scalar(path.alpha(time), time), _scalar(path.sigma(time), time)
        a, s = alpha[..., None, None], sigma[..., None, None]
        total = a.square() * self._variances + s.square()  # (..., K, D or 1)
        centred = x[..., None, :] - a * self.means  # (..., K, D)
        turned = centred if self._basis is None else torch.einsum("kji,...kj->...ki", self._basis, centred)
        scaled = turned / total
        log_det = total.log().sum(-1) * (self.dim if self._basis is None else 1)
        logits = self.weights.log() - 0.5 * ((turned * scaled).sum(-1) + log_det)
        if labels is not None:
            index = torch.arange(self.components, device=x.device)
            own = one_each(labels, x, "label")[..., None]
            logits = torch.where((own == index) | (own >= self.components), logits, -math.inf)
        shift = a * self._variances * scaled
        if self._basis is not None:
            scaled, shift = (torch.einsum("kij,...kj->...ki", self._basis, v) for v in (scaled, shift))
        return _Conditioned(
            t=time,
            sigma=sigma,
            weights=torch.softmax(logits, -1),
            log_density=torch.logsumexp(logits, -1) - 0.5 * self.dim * math.log(2 * math.pi),
            means=self.means + shift,
            whitened=scaled,
            left=s.square() * self._variances / total,
        )


class _Conditioned(NamedTuple):
    """What is known of x1 given x_t."""

    t: Tensor
    sigma: Tensor
    weights: Tensor  # (B, K) responsibilities
    log_density: Tensor  # (B,)
    means: Tensor  # (B, K, D)
    whitened: Tensor  # (B, K, D): S_k^-1 (x - alpha m_k)
    left: Tensor  # (K, D or 1) or with (B,) before: eigenvalues of the posterior's covariances


class _Data:
    """The path's end: x_t = x1."""

    @staticmethod
    def alpha(t: Tensor) -> Tensor:
        return torch.ones_like(t)

    @staticmethod
    def sigma(t: Tensor) -> Tensor:
        return torch.zeros_like(t)


_DATA = _Data()


def one_each(values: Tensor, x: Tensor, what: str) -> Tensor:
    """`values`, which must be one for all states x (..., D) or one for each; broadcasting would make pairs of others."""
    states = x.shape[:-1]
    shape = values.shape
    if len(shape) > len(states) or any(n not in (1, m) for n, m in zip(shape[::-1], states[::-1], strict=False)):
        raise ValueError(
            f"the {what} has shape {tuple(shape)}; for states of shape {tuple(x.shape)} give one for all or one for each state"
        )
    return values


def _scalar(value: float | Tensor, time: Tensor) -> Tensor:
    """A path's coefficient as a tensor of the time's shape, also where the path gives a number."""
    return torch.as_tensor(value, dtype=time.dtype, device=time.device).expand(time.shape)


def eight_gaussians(radius: float = 2.0, std: float = 0.2) -> GaussianMixture:
    """Eight equal isotropic Gaussians of standard deviation `std` on a circle in the plane; component 0 lies on the positive x axis."""
    angle = torch.arange(8, dtype=torch.float64) * (math.pi / 4)
    means = radius * torch.stack([angle.cos(), angle.sin()], -1)
    return GaussianMixture(torch.full((8,), 1 / 8), means, torch.full((8,), std**2))


def random_mixture(
    dim: int,
    components: int,
    generator: torch.Generator | None = None,
    *,
    spread: float = 2.0,
    scale: float = 0.5,
) -> GaussianMixture:
    """Random weights (Dirichlet(2)-like), means N(0, spread^2) and full covariances of mean variance `scale`^2 and condition number up to about 30.

    Without a generator it is that of seed 0.
    """
    g = torch.Generator().manual_seed(0) if generator is None else generator
    gamma = -torch.rand(2, components, generator=g, dtype=torch.float64).clamp_min(1e-12).log().sum(0)
    means = spread * torch.randn(components, dim, generator=g, dtype=torch.float64)
    basis, _ = torch.linalg.qr(torch.randn(components, dim, dim, generator=g, dtype=torch.float64))
    variances = torch.exp(math.log(30) * (torch.rand(components, dim, generator=g, dtype=torch.float64) - 0.5))
    variances = scale**2 * variances / variances.mean(-1, keepdim=True)
    covariances = torch.einsum("kij,kj,klj->kil", basis, variances, basis)
    return GaussianMixture(gamma / gamma.sum(), means, (covariances + covariances.mT) / 2)


def spiked(
    dim: int, strengths: tuple[float, ...] | list[float], generator: torch.Generator | None = None
) -> tuple[GaussianMixture, Tensor]:
    """A centred Gaussian with covariance I + sum_r strength_r u_r u_r^T and its orthonormal random directions u, (D, R).

    Without a generator it is that of seed 0.
    """
    if not 0 < len(strengths) <= dim or min(strengths) <= -1:
        raise ValueError(f"give 1 to {dim} strengths above -1, got {tuple(strengths)}")
    g = torch.Generator().manual_seed(0) if generator is None else generator
    directions, _ = torch.linalg.qr(torch.randn(dim, len(strengths), generator=g, dtype=torch.float64))
    strength = torch.tensor(strengths, dtype=torch.float64)
    covariance = torch.eye(dim, dtype=torch.float64) + (directions * strength) @ directions.T
    return GaussianMixture(torch.ones(1), torch.zeros(1, dim), (covariance + covariance.T)[None] / 2), directions
