"""The mixed cumulant model: data with a spike in the covariance and a spike in the fourth cumulant, dialled separately."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from scipy.special import ndtr
from sklearn.utils import Bunch, check_random_state

from cameraready.flows.mixed_cumulant._activation import gaussian_rule, hermite_values

Latent = Literal["rademacher", "uniform", "laplace", "gaussian"]
LATENTS = ("rademacher", "uniform", "laplace", "gaussian")


@dataclass(frozen=True)
class MixedCumulant:
    """The mixed cumulant model (Bardone and Goldt, 2024, arXiv:2404.08602; Bardone et al., 2026, arXiv:2603.12901).

    ``x = sqrt(beta_u) lam u + S (sqrt(beta_v) nu v + z)`` with orthonormal u, v in R^d, ``lam ~ N(0, 1)``, ``z ~ N(0, I)``, nu of unit
    variance, and S shrinking v by ``1 / sqrt(1 + beta_v)``. With independent latents the covariance is exactly
    ``I + beta_u u u^T``: v is invisible at second order and carries a fourth cumulant of ``kappa4(nu) (beta_v / (1 + beta_v))^2``.

    Parameters
    ----------
    beta_u, beta_v : float
        Signal strengths, at least 0.
    latent : {"rademacher", "uniform", "laplace", "gaussian"}
        Law of nu, of mean 0 and variance 1; its fourth cumulant is -2, -1.2, 3 or 0.
    correlation : float in [-1, 1]
        rho: nu is the quantile transform of ``rho lam + sqrt(1 - rho^2) g`` (for ``"rademacher"`` its sign). Other than 0 it adds
        ``sqrt(beta_u beta_v / (1 + beta_v)) E[lam nu] (u v^T + v u^T)`` to the covariance.

    Raises
    ------
    ValueError
        A negative strength, a correlation outside [-1, 1], an unknown latent.
    """

    beta_u: float = 4.0
    beta_v: float = 10.0
    latent: Latent = "rademacher"
    correlation: float = 0.0

    def __post_init__(self) -> None:
        for name in ("beta_u", "beta_v"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be at least 0, got {value!r}")
        if self.latent not in LATENTS:
            raise ValueError(f"latent must be one of {', '.join(LATENTS)}, all of unit variance, got {self.latent!r}")
        if not -1 <= self.correlation <= 1:
            raise ValueError(f"correlation must lie in [-1, 1], got {self.correlation!r}")

    @property
    def loading(self) -> float:
        """r in ``v.x = r nu + sqrt(1 - r^2) z``: ``sqrt(beta_v / (1 + beta_v))``."""
        return math.sqrt(self.beta_v / (1 + self.beta_v))

    @property
    def kappa4(self) -> float:
        """The fourth cumulant along v."""
        return float(self.hermite_moments_v(4)[4])

    @cached_property
    def latent_correlation(self) -> float:
        """``E[lam nu]``; ``rho sqrt(2 / pi)`` for Rademacher nu."""
        nodes, weights = gaussian_rule()
        return self.correlation * float(weights @ (nodes * self.quantile(nodes)))

    def covariance(self, directions: np.ndarray) -> np.ndarray:
        """The population covariance (d, d) for `directions` (2, d), rows u and v."""
        u, v = directions
        cross = math.sqrt(self.beta_u) * self.loading * self.latent_correlation
        return np.eye(len(u)) + self.beta_u * np.outer(u, u) + cross * (np.outer(u, v) + np.outer(v, u))

    def quantile(self, t: np.ndarray) -> np.ndarray:
        """nu as an odd function of a standard Gaussian t."""
        if self.latent == "rademacher":
            return np.sign(t)
        if self.latent == "gaussian":
            return np.asarray(t, dtype=float)
        if self.latent == "uniform":
            return math.sqrt(3) * (2 * ndtr(t) - 1)
        return -np.sign(t) * np.log(2 * ndtr(-np.abs(t))) / math.sqrt(2)

    def hermite_moments_u(self, order: int) -> np.ndarray:
        """``E[h_k(u.x)]`` for k = 0..order: ``beta_u^(k/2) (k - 1)!!`` for even k."""
        found = np.zeros(order + 1)
        for k in range(0, order + 1, 2):
            found[k] = self.beta_u ** (k / 2) * math.prod(range(k - 1, 0, -2))
        return found

    def hermite_moments_v(self, order: int) -> np.ndarray:
        """``E[h_k(v.x)] = r^k E[h_k(nu)]`` for k = 0..order; k = 4 is the fourth cumulant."""
        if self.latent == "gaussian":
            moments = np.eye(1, order + 1)[0]
        else:
            nodes, weights = gaussian_rule()
            moments = hermite_values(self.quantile(nodes), order) @ weights
            moments[np.abs(moments) < 1e-10 * np.sqrt([math.factorial(k) for k in range(order + 1)])] = 0.0
        return moments * self.loading ** np.arange(order + 1)

    def latents(self, shape: tuple[int, ...], generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """lam and nu, each of `shape`."""
        lam = generator.standard_normal(shape)
        if self.latent == "rademacher" and self.correlation == 0:
            return lam, 2.0 * generator.integers(0, 2, size=shape) - 1
        t = generator.standard_normal(shape)
        if self.correlation:
            t = self.correlation * lam + math.sqrt(1 - self.correlation**2) * t
        return lam, self.quantile(t)

    def sample(
        self, shape: int | tuple[int, ...], directions: np.ndarray, generator: np.random.Generator
    ) -> np.ndarray:
        """Draws x of shape (*shape, d), float64.

        Parameters
        ----------
        shape : int or tuple of int
        directions : float64 array, (2, d), or (S, 2, d) for a different pair a run, `shape` then starting with S
            Rows u and v, orthonormal.
        generator : numpy.random.Generator
        """
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        directions = np.asarray(directions, dtype=float)
        lam, nu = self.latents(shape, generator)
        x = generator.standard_normal((*shape, directions.shape[-1]))
        u, v = directions[..., 0, :], directions[..., 1, :]
        if directions.ndim == 3:
            u, v = u[:, None], v[:, None]
        along = np.einsum("...d,...d->...", x, np.broadcast_to(v, x.shape))
        # S (sqrt(bv) nu v + z): the component along v becomes (sqrt(bv) nu + z_v) / sqrt(1 + bv), the rest of z stays.
        change = (math.sqrt(self.beta_v) * nu + along) / math.sqrt(1 + self.beta_v) - along
        x += change[..., None] * v
        x += (math.sqrt(self.beta_u) * lam)[..., None] * u
        return x


def random_directions(d: int, generator: np.random.Generator, runs: int | None = None) -> np.ndarray:
    """Orthonormal u and v, uniform on the sphere: (2, d), or (runs, 2, d)."""
    if d < 3:
        raise ValueError(
            f"the mixed cumulant model needs d of at least 3 (u, v and a direction without signal), got {d}"
        )
    frame, triangle = np.linalg.qr(generator.standard_normal((runs or 1, d, 2)))
    frame = (frame * np.sign(np.diagonal(triangle, axis1=1, axis2=2))[:, None]).swapaxes(1, 2)
    return frame if runs else frame[0]


def make_mixed_cumulant(
    n_samples: int = 100,
    n_features: int = 20,
    *,
    beta_u: float = 4.0,
    beta_v: float = 10.0,
    latent: Latent = "rademacher",
    correlation: float = 0.0,
    shuffle_axes: bool = True,
    random_state: int | np.random.RandomState | None = None,
    return_directions: bool = False,
) -> np.ndarray | Bunch:
    """Draw data from the mixed cumulant model, in the manner of scikit-learn's data-set makers.

    When to use: to see whether a denoiser, an ICA or a kernel finds structure beyond the covariance, with the truth known. When not: as a
    stand-in for images; there is one direction of each kind.

    Parameters
    ----------
    n_samples, n_features : int
        At least 1 and 3.
    beta_u, beta_v, latent, correlation
        See `MixedCumulant`.
    shuffle_axes : bool
        True draws u and v uniformly; False takes the first two coordinate axes, which leak through anything that works by coordinates.
    random_state : int, RandomState or None
    return_directions : bool

    Returns
    -------
    X : float64 array (n_samples, n_features)
        Or, with `return_directions`, a `sklearn.utils.Bunch` with ``data``, ``directions`` (2, n_features; rows u and v), ``covariance``
        (n_features, n_features) and ``model``.

    Raises
    ------
    ValueError
        A size or parameter out of range.

    References
    ----------
    Bardone and Goldt, 2024, arXiv:2404.08602, Eq. 4; Bardone et al., 2026, arXiv:2603.12901.
    """
    if n_samples < 1:
        raise ValueError(f"n_samples must be at least 1, got {n_samples}")
    model = MixedCumulant(beta_u, beta_v, latent, correlation)
    state = check_random_state(random_state)
    generator = np.random.default_rng(state.randint(2**31 - 1, size=4))
    directions = random_directions(n_features, generator) if shuffle_axes else _first_axes(n_features)
    data = model.sample(n_samples, directions, generator)
    if not return_directions:
        return data
    return Bunch(data=data, directions=directions, covariance=model.covariance(directions), model=model)


def _first_axes(d: int) -> np.ndarray:
    if d < 3:
        raise ValueError(f"the mixed cumulant model needs n_features of at least 3, got {d}")
    return np.eye(2, d)
