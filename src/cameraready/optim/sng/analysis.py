"""How fast a linear model converges, and whether momentum will help: sketch-and-project constants and the averaged step."""

from __future__ import annotations

import itertools
import math
import warnings
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from cameraready.optim.sng.momentum import accelerated_parameters
from cameraready.optim.sng.sampling import SquaredVolumeSampler, as_matrix, check_volume, log_symmetric

#: Enumerate all batches instead of sampling them up to this many.
ENUMERABLE = 2_000
Interval = tuple[float, float]


@dataclass(frozen=True)
class ProjectionStats:
    """Constants of a linear model under batches of k rows, and what follows from them.

    Attributes
    ----------
    alpha : float
        Smallest eigenvalue of the mean projection on the range of J'. SNG's squared error shrinks by ``1 - alpha`` a step.
    beta : float
        The second constant. SPRING's squared error shrinks by ``1 - sqrt(alpha / beta)`` a step.
    alpha_interval, beta_interval : (float, float)
        Rough intervals: between an estimate whose direction was chosen on the same batches and one whose was not, each widened by two
        standard errors; equal ends where the constant is exact.
    mu, eta : float
        Momentum and learning rate that these constants suggest; 0 and 1 where alpha is unknown, which is NaN then.
    n_samples : int
        Batches that were looked at; all of them if `exact`.
    exact : bool
        Whether nothing was estimated.
    """

    alpha: float
    beta: float
    alpha_interval: tuple[float, float]
    beta_interval: tuple[float, float]
    mu: float
    eta: float
    n_samples: int
    exact: bool

    @property
    def rate(self) -> float:
        """SNG's gain a step, alpha."""
        return self.alpha

    @property
    def accelerated_rate(self) -> float:
        """SPRING's gain a step, sqrt(alpha / beta)."""
        return math.sqrt(self.alpha / self.beta)


def projection_stats(
    J: Tensor | np.ndarray,
    k: int,
    damping: float = 0.0,
    *,
    sampling: Literal["uniform", "svs"] = "uniform",
    n_samples: int | None = None,
    seed: int = 0,
) -> ProjectionStats:
    """Predict the convergence of SNG and SPRING on least squares, and the momentum and learning rate to use.

    For each batch S let P be ``J_S' (J_S J_S' + damping I)^-1 J_S`` and Q its mean. Then alpha is the smallest eigenvalue of Q on the
    range of J', and beta the largest one of the mean of ``Q^-1/2 P Q^-1 P Q^-1/2``. For a nonlinear model, J at the current
    parameters tells about its neighbourhood.

    Parameters
    ----------
    J : array or Tensor of shape (N, n)
        A row a sample. Computed in double precision.
    k : int
        Batch size, at most N.
    damping : float
        Added to the kernel of a batch as it is; k times that of the optimizers.
    sampling : {"uniform", "svs"}
        How batches are drawn: k distinct rows, or by squared volume (then alpha is exact).
    n_samples : int, optional
        Batches to look at. None: all of them where there are at most 2,000, otherwise 2,000.
    seed : int

    Returns
    -------
    ProjectionStats

    Raises
    ------
    ValueError
        If J is not a finite matrix other than zero, or `k`, `damping`, `sampling` or `n_samples` is out of range.
        J's rank is judged at the precision in which it is given.

    Warns
    -----
    UserWarning
        If the sampled batches do not reach all of J's range, so that alpha is unknown.

    Notes
    -----
    Costs O(N n^2) and O(k n^2) a batch, memory O(k n) a batch. With sampled batches the smallest eigenvalue errs downwards, which is
    the safe side; beta's error is of either sign under uniform sampling and upwards under squared volume.

    References
    ----------
    Goldshlager, Hu and Lin, 2026, arXiv:2508.21022; Gower, Hanzely, Richtarik and Stich, 2018, arXiv:1802.04079, for beta.

    Examples
    --------
    >>> import numpy as np
    >>> from cameraready.optim.sng import projection_stats
    >>> found = projection_stats(np.eye(4), 1)
    >>> round(found.alpha, 6), round(found.beta, 6), round(found.mu, 6), round(found.eta, 6)
    (0.25, 4.0, 0.6, 0.4)
    """
    matrix, eps = as_matrix(J)
    N = matrix.shape[0]
    if isinstance(k, bool) or not (isinstance(k, int | np.integer) and 1 <= k <= N):
        raise ValueError(f"k must be a whole number from 1 to {N}, the number of rows, got {k!r}")
    k = int(k)
    if not (math.isfinite(damping) and damping >= 0.0):
        raise ValueError(f"damping must be a finite number of at least 0, got {damping}")
    if sampling not in ("uniform", "svs"):
        raise ValueError(f"sampling must be 'uniform' or 'svs', got {sampling!r}")
    if n_samples is not None and (n_samples != int(n_samples) or n_samples < 4):
        raise ValueError(f"n_samples must be a whole number of at least 4, got {n_samples}")
    rows = coordinates(matrix, eps)
    exact = n_samples is None and math.comb(N, k) <= ENUMERABLE
    if exact:
        batches = torch.tensor(list(itertools.combinations(range(N), k)))
        weights = torch.ones(len(batches), dtype=torch.float64)
        if sampling == "svs":
            check_volume(matrix, k, damping, eps)
            weights = volumes(rows, batches, damping)
        weights = weights / weights.sum()
        factors = batch_factors(rows, batches, damping)
        mean = _mean(factors, weights)
        alpha = float(torch.linalg.eigvalsh(mean)[0])
        beta = float(torch.linalg.eigvalsh(_spread(factors, mean, weights))[-1])
        intervals = (alpha, alpha), (beta, beta)
        number = len(batches)
    else:
        number = int(n_samples or ENUMERABLE)
        if sampling == "svs":
            sampler = SquaredVolumeSampler(J, k, damping, n_batches=number, seed=seed)
            batches = torch.tensor(list(sampler))
        else:
            generator = torch.Generator().manual_seed(seed)
            batches = torch.stack([torch.randperm(N, generator=generator)[:k] for _ in range(number)])
        known = _mean_projection(rows, k, damping) if sampling == "svs" else None
        alpha, beta, intervals = _estimated(batch_factors(rows, batches, damping), known)
    if math.isnan(alpha):
        warnings.warn(
            f"{number} batches of {k} rows do not reach every direction of J's range, so that alpha and beta are unknown and nothing "
            "is suggested beyond SNG's mu = 0, eta = 1; raise n_samples or k",
            UserWarning,
            stacklevel=2,
        )
        return ProjectionStats(alpha, math.nan, intervals[0], (1.0, math.inf), 0.0, 1.0, number, exact)
    beta = min(max(beta, 1.0), 1.0 / alpha)
    mu, eta = accelerated_parameters(alpha, beta)
    return ProjectionStats(alpha, beta, *intervals, mu, eta, number, exact)


@dataclass(frozen=True)
class SVSPreconditioner:
    """The matrix g(J'J) by which squared-volume sampling preconditions the gradient, on the range of J'.

    Attributes
    ----------
    eigenvalues : Tensor of shape (r,)
        Those of J'J that are not zero, in descending order.
    values : Tensor of shape (r,)
        g of each.
    vectors : Tensor of shape (n, r)
    """

    eigenvalues: Tensor
    values: Tensor
    vectors: Tensor

    def __call__(self, gradient: Tensor) -> Tensor:
        """``g(J'J) gradient``, (n,) -> (n,), for a gradient in the range of J'."""
        return self.vectors @ (self.values * (self.vectors.mT @ gradient.to(self.vectors)))

    def matrix(self) -> Tensor:
        """g(J'J) on the range of J', shape (n, n)."""
        return (self.vectors * self.values) @ self.vectors.mT


def svs_preconditioner(J: Tensor | np.ndarray, k: int, damping: float = 0.0) -> SVSPreconditioner:
    """The preconditioner that the SNG direction has on average under squared-volume sampling.

    If a batch S of k rows is drawn with probability proportional to ``det(J_S J_S' + damping I)``, then for every residual r the
    mean of ``J_S' (J_S J_S' + damping I)^-1 r_S`` is ``g(J'J) J'r``. No such identity holds for uniform batches.

    Parameters
    ----------
    J : array or Tensor of shape (N, n)
    k : int
        At most N, and at most the rank of J for damping = 0.
    damping : float

    Returns
    -------
    SVSPreconditioner
        Of double precision.

    Raises
    ------
    ValueError
        If J is not a finite matrix other than zero, or `k` or `damping` is out of range.

    Notes
    -----
    With l the eigenvalues of JJ' + damping I and e_k the elementary symmetric polynomial, g of an eigenvalue is e_{k-1} of the others
    over e_k of all, computed in logarithms in O(N r k).

    References
    ----------
    Goldshlager, Hu and Lin, 2026, arXiv:2508.21022, for the idea; the formula is derived from the gradient of the sum of all
    principal minors of order k.
    """
    matrix, eps = as_matrix(J)
    check_volume(matrix, k, damping, eps)
    k = int(k)
    _, singular, vectors = torch.linalg.svd(matrix, full_matrices=False)
    kept = singular > singular[0] * max(matrix.shape) * eps
    squares = singular[kept] ** 2
    values = _preconditioner_values(squares, matrix.shape[0], k, damping)
    return SVSPreconditioner(squares, values, vectors[kept].mT.contiguous())


# --- numbers behind them ----------------------------------------------------------------------------------------------


def coordinates(matrix: Tensor, eps: float) -> Tensor:
    """Rows of J in an orthonormal basis of its row space, shape (N, r); r is the rank at J's own precision `eps`."""
    left, singular, _ = torch.linalg.svd(matrix, full_matrices=False)
    kept = singular > singular[0] * max(matrix.shape) * eps
    return left[:, kept] * singular[kept]


def batch_factors(rows: Tensor, batches: Tensor, damping: float) -> Tensor:
    """F with F'F the projection of each batch, (b, k) row numbers -> (b, min(k, r), r)."""
    _, singular, right = torch.linalg.svd(rows[batches], full_matrices=False)
    cutoff = singular.amax(dim=1, keepdim=True) * max(rows.shape) * torch.finfo(rows.dtype).eps
    shrunk = torch.where(singular > cutoff, singular / (singular**2 + damping).sqrt().clamp(min=1e-300), 0.0)
    return shrunk[..., None] * right


def volumes(rows: Tensor, batches: Tensor, damping: float) -> Tensor:
    """det(J_S J_S' + damping I) of each batch, up to a common factor, shape (b,)."""
    picked = rows[batches]
    kernels = picked @ picked.mT + damping * torch.eye(batches.shape[1], dtype=rows.dtype)
    logs = torch.linalg.slogdet(kernels).logabsdet
    return torch.exp(logs - logs.max())


def _inverse_root(mean: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(mean)
    return (vectors * values.clamp(min=values[-1] * 1e-14).rsqrt()) @ vectors.mT


def _mean(factors: Tensor, weights: Tensor) -> Tensor:
    """Mean projection, (b, k, r) and (b,) -> (r, r)."""
    return torch.tensordot(weights[:, None, None] * factors, factors, dims=([0, 1], [0, 1]))


def _spread(factors: Tensor, mean: Tensor, weights: Tensor) -> Tensor:
    """Mean of Q^-1/2 P Q^-1 P Q^-1/2."""
    turned = factors @ _inverse_root(mean)
    return torch.tensordot(weights[:, None, None] * (turned @ turned.mT @ turned), turned, dims=([0, 1], [0, 1]))


def _estimated(factors: Tensor, known: Tensor | None) -> tuple[float, float, tuple[Interval, Interval]]:
    """alpha and beta from sampled batches, with intervals; `known` is the mean projection where it is."""
    number = len(factors)
    even = torch.full((number,), 1.0 / number, dtype=torch.float64)
    mean = _mean(factors, even) if known is None else known
    values, vectors = torch.linalg.eigh(mean)
    alpha = float(values[0]) if values[0] > 1e-12 * values[-1] else math.nan
    tops, directions = torch.linalg.eigh(_spread(factors, mean, even))
    beta = float(tops[-1])
    turned = factors @ _inverse_root(mean)

    def along(part: slice, direction: Tensor) -> Tensor:
        """The quadratic form whose mean is beta's, of each batch."""
        inner = turned[part] @ direction
        return (turned[part].mT @ inner[..., None])[..., 0].square().sum(dim=-1)

    halves = (slice(0, number // 2), slice(number // 2, None))
    low_betas, high_alphas = [], []
    for one, other in (halves, halves[::-1]):
        part = factors[one]
        share = torch.full((len(part),), 1.0 / len(part), dtype=torch.float64)
        low_betas.append(float(along(other, torch.linalg.eigh(_spread(part, mean, share))[1][:, -1]).mean()))
        slowest = torch.linalg.eigh(_mean(part, share))[1][:, 0]
        high_alphas.append(float((factors[other] @ slowest).square().sum(dim=-1).mean()))
    error = float(along(slice(None), directions[:, -1]).std() / math.sqrt(number))
    beta_interval = (max(1.0, min(low_betas) - 2 * error), beta + 2 * error)
    if known is not None:
        return alpha, beta, ((alpha, alpha), beta_interval)
    gains = (factors @ vectors[:, 0]).square().sum(dim=-1)
    error = float(gains.std() / math.sqrt(number))
    lowest = max(0.0, float(values[0]) - 2 * error)
    return alpha, beta, ((lowest, min(1.0, max(high_alphas) + 2 * error)), beta_interval)


def _mean_projection(rows: Tensor, k: int, damping: float) -> Tensor:
    """Q under squared-volume sampling, diagonal in the coordinates of `coordinates`."""
    squares = rows.square().sum(dim=0)
    return torch.diag(squares * _preconditioner_values(squares, rows.shape[0], k, damping))


def _preconditioner_values(squares: Tensor, N: int, k: int, damping: float) -> Tensor:
    """g of each of the r nonzero eigenvalues, shape (r,)."""
    r = len(squares)
    everything = torch.full((N,), float(damping), dtype=torch.float64)
    everything[:r] += squares
    logs = everything.log()
    total = log_symmetric(logs, k)[k]
    # All r leave-one-out polynomials at once: column i skips eigenvalue i.
    table = torch.full((k, r), -math.inf, dtype=torch.float64)
    table[0] = 0.0
    for j in range(N):
        grown = table.clone()
        if k > 1:
            grown[1:] = torch.logaddexp(table[1:], table[:-1] + logs[j])
        if j < r:
            grown[:, j] = table[:, j]
        table = grown
    return torch.exp(table[k - 1] - total)
