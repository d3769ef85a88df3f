"""The prior over partial orders: action i comes before j where i's latent row exceeds j's in every dimension.

Rows are independent N(0, (1 - rho) I + rho 11'); Li, Cheng, Nicholls and Kong, 2026, arXiv:2602.02806, section 3.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import gammaln


@dataclass(frozen=True)
class LatentPrior:
    """Prior over partial orders through latent Gaussian rows.

    Parameters
    ----------
    dimension : int, optional
        Number K of latent dimensions; None infers it. With one dimension every order is total; floor(n / 2) reach every
        partial order of n >= 4 actions. More dimensions make relations rarer: i before j has probability 2^-K at rho = 0.
    dimension_rate : float
        Where K is inferred it is Poisson with this rate, cut off to 1, ..., `max_dimension`.
    max_dimension : int
        Largest K.
    rho_shape : float
        rho, the correlation of the dimensions, is Beta(1, `rho_shape`). Near 1 the order is nearly total.
    """

    dimension: int | None = None
    dimension_rate: float = 3.0
    max_dimension: int = 12
    rho_shape: float = 1.0

    def __post_init__(self) -> None:
        for name in ("dimension", "max_dimension"):
            value = getattr(self, name)
            if value is None and name == "dimension":
                continue
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 1 <= value <= 64:
                raise ValueError(f"{name} must be a whole number from 1 to 64, got {value!r}")
        for name in ("dimension_rate", "rho_shape"):
            if not (np.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ValueError(f"{name} must be a positive number, got {getattr(self, name)!r}")

    @property
    def largest(self) -> int:
        """The largest K that can occur."""
        return self.max_dimension if self.dimension is None else self.dimension

    def log_dimension(self) -> np.ndarray:
        """Log-probability of K = 0, 1, ..., `largest`, float64 (largest + 1,); -inf where K cannot be."""
        k = np.arange(self.largest + 1)
        if self.dimension is not None:
            return np.where(k == self.dimension, 0.0, -np.inf)
        logs = np.where(k > 0, k * np.log(self.dimension_rate) - gammaln(k + 1), -np.inf)
        return logs - np.logaddexp.reduce(logs)

    def draw(self, n_actions: int, n_draws: int, generator: np.random.Generator) -> np.ndarray:
        """Partial orders from the prior, bool (n_draws, n, n) in the order of their dimension; closed."""
        dimensions = generator.choice(self.largest + 1, size=n_draws, p=np.exp(self.log_dimension()))
        orders = []
        for k, how_many in zip(*np.unique(dimensions, return_counts=True), strict=True):
            rho = generator.beta(1.0, self.rho_shape, size=how_many)
            orders.append(dominance(latent_rows(rho, n_actions, int(k), generator)))
        return np.concatenate(orders)


def latent_rows(rho: np.ndarray, n_actions: int, dimension: int, generator: np.random.Generator) -> np.ndarray:
    """Latent rows (n_draws, n_actions, dimension), one set for each entry of `rho` (n_draws,)."""
    own = generator.standard_normal((len(rho), n_actions, dimension))
    shared = generator.standard_normal((len(rho), n_actions, 1))
    return np.sqrt(1 - rho)[:, None, None] * own + np.sqrt(rho)[:, None, None] * shared


def dominance(latent: np.ndarray) -> np.ndarray:
    """Which rows exceed which in every dimension: float (..., n, K) -> bool (..., n, n)."""
    return np.all(latent[..., :, None, :] > latent[..., None, :, :], axis=-1)
