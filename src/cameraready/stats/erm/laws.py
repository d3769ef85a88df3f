"""Laws of single coordinates and labels, their quadrature, and the form in which the fixed point takes a design.

A design is written as a mixture of components in which ``x = loadings @ u + w``: a few coordinates `u`, of any law and jointly with
the label, carry the signal; the rest `w` is independent of them and enters any projection as a normal variable.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats
from scipy.special import expit

Array = np.ndarray
#: A coordinate with more than this share of the signal's square is not averaged out; its own law is kept.
LOCALISED = 0.05
MAX_LOCALISED = 50


@dataclass(frozen=True)
class Component:
    """One part of a mixture: ``x = loadings @ u + w`` with Cov w = noise - removed @ removed.T, and `w` independent of (u, y).

    Attributes
    ----------
    weight : float
        Probability of this part.
    loadings : ndarray of shape (p, k)
    nodes, labels, node_weights : ndarrays of shape (m, k), (m,), (m,)
        Quadrature of the joint law of `u` and `y` within the part; the weights sum to one.
    noise : ndarray of shape (p,) or (p, p)
        Variances, or a covariance matrix, before `removed`; parts of one design may share it by identity.
    noise_scale : float
        Factor of `noise`.
    removed : ndarray of shape (p, j)
    """

    weight: float
    loadings: Array
    nodes: Array
    labels: Array
    node_weights: Array
    noise: Array
    noise_scale: float = 1.0
    removed: Array | None = None


# --- laws of one coordinate ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Marginal:
    """Law of one coordinate with mean 0 and variance 1: how to draw it, its quantiles, and quadratures of it.

    `quadrature(m)` gives about `m` nodes and their weights; discrete laws give their support.
    """

    name: str
    draw: Callable[[np.random.Generator, tuple[int, ...]], Array]
    quantile: Callable[[Array], Array]
    quadrature: Callable[[int], tuple[Array, Array]]

    @property
    def is_normal(self) -> bool:
        return self.name == "normal"


def normal_nodes(m: int) -> tuple[Array, Array]:
    """Gauss-Hermite nodes and weights of the standard normal law."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(m)
    return nodes, weights / weights.sum()


def quantile_nodes(law: Any, m: int) -> tuple[Array, Array]:
    """About `m` nodes and weights of a frozen scipy.stats law, rescaled to its exact mean and variance where they are finite.

    Gauss-Legendre in the probability, in panels that narrow towards both ends, so that heavy tails keep their variance; a panel
    ends at the median, where densities may have a corner.
    """
    edges = np.array([1e-9, 1e-6, 1e-4, 0.01, 0.1, 0.5]) if m >= 48 else np.array([1e-6, 1e-3, 0.05, 0.5])
    edges[0] = 0.0
    points, weights = np.polynomial.legendre.leggauss(max(2, round(m / (2 * (len(edges) - 1)))))
    lower = (edges[:-1, None] + np.diff(edges)[:, None] * (points + 1) / 2).ravel()
    lower_weights = (np.diff(edges)[:, None] * weights / 2).ravel()
    nodes = np.concatenate([law.ppf(lower), law.isf(lower)]).astype(float)
    weights = np.concatenate([lower_weights, lower_weights])
    mean, variance = float(law.mean()), float(law.var())
    if np.isfinite(mean) and np.isfinite(variance) and variance > 0:
        nodes = nodes - weights @ nodes
        nodes = mean + nodes * np.sqrt(variance / (weights @ nodes**2))
    return nodes, weights


def two_point(probability: float) -> Marginal:
    """The standardised law of a coin that shows 1 with `probability`: Rademacher at 0.5, skewed elsewhere."""
    if not 0 < probability < 1:
        raise ValueError(f"probability must be strictly between 0 and 1, got {probability!r}")
    sd = np.sqrt(probability * (1 - probability))
    low, high = -probability / sd, (1 - probability) / sd
    return Marginal(
        "rademacher" if probability == 0.5 else f"two-point({probability:g})",
        lambda rng, shape: np.where(rng.random(shape) < probability, high, low),
        lambda q: np.where(q > 1 - probability, high, low),
        lambda m: (np.array([low, high]), np.array([1 - probability, probability])),
    )


def _continuous(name: str, law: Any, draw: Callable[[np.random.Generator, tuple[int, ...]], Array]) -> Marginal:
    mean, sd = float(law.mean()), float(law.std())
    if not (np.isfinite(mean) and np.isfinite(sd) and sd > 0):
        raise ValueError(
            f"a coordinate needs a finite mean and a positive, finite variance; {name} has {mean} and {sd}**2"
        )

    def quadrature(m: int) -> tuple[Array, Array]:
        nodes, weights = quantile_nodes(law, m)
        return (nodes - mean) / sd, weights

    return Marginal(
        name, lambda rng, shape: (draw(rng, shape) - mean) / sd, lambda q: (law.ppf(q) - mean) / sd, quadrature
    )


def marginal(law: str | Marginal | Any) -> Marginal:
    """A standardised coordinate from a name, or from a frozen `scipy.stats` distribution with a finite variance.

    Names: "normal", "rademacher", "uniform", "laplace", "skewed" (two points, 0.1 and 0.9).
    """
    if isinstance(law, Marginal):
        return law
    if law == "normal":
        return Marginal("normal", lambda rng, shape: rng.standard_normal(shape), stats.norm.ppf, normal_nodes)
    if law == "rademacher":
        return two_point(0.5)
    if law == "skewed":
        return two_point(0.1)
    if law == "uniform":
        return _continuous("uniform", stats.uniform(-1, 2), lambda rng, shape: rng.uniform(-1, 1, shape))
    if law == "laplace":
        return _continuous("laplace", stats.laplace(), lambda rng, shape: rng.laplace(size=shape))
    if hasattr(law, "ppf") and hasattr(law, "rvs"):
        name = getattr(getattr(law, "dist", law), "name", "custom")
        if name == "norm":
            return marginal("normal")
        return _continuous(name, law, lambda rng, shape: law.rvs(size=shape, random_state=rng))
    raise ValueError(
        f"a coordinate's law is 'normal', 'rademacher', 'uniform', 'laplace', 'skewed' or a frozen scipy.stats law; got {law!r}"
    )


# --- labels ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LinearTarget:
    """y = offset + t + e for the signal t = x'coef; `noise` is the standard deviation of a normal `e`, or a frozen scipy.stats law."""

    noise: Any = 1.0
    offset: float = 0.0
    is_classification = False

    def sample(self, t: Array, rng: np.random.Generator) -> Array:
        t = t + self.offset
        if hasattr(self.noise, "rvs"):
            return t + self.noise.rvs(size=t.shape, random_state=rng)
        return t + self.noise * rng.standard_normal(t.shape)

    def nodes(self, t: Array, m: int) -> tuple[Array, Array]:
        """About `m` labels and their conditional weights at each t: (k,) -> (k, m), (k, m)."""
        if hasattr(self.noise, "ppf"):
            shift, weights = quantile_nodes(self.noise, 2 * m)
        elif self.noise == 0:
            shift, weights = np.zeros(1), np.ones(1)
        else:
            shift, weights = normal_nodes(m)
            shift = self.noise * shift
        return self.offset + t[:, None] + shift, np.broadcast_to(weights, (len(t), len(weights)))

    @property
    def variance(self) -> float:
        return float(self.noise.var()) if hasattr(self.noise, "var") else float(self.noise) ** 2


@dataclass(frozen=True)
class BinaryTarget:
    """y = 1 with ``probability(t)`` for the signal t = x'coef, else -1; the default is the logistic curve."""

    probability: Callable[[Array], Array] = expit
    is_classification = True
    variance = 0.0

    def sample(self, t: Array, rng: np.random.Generator) -> Array:
        return np.where(rng.random(t.shape) < self.probability(t), 1.0, -1.0)

    def nodes(self, t: Array, m: int) -> tuple[Array, Array]:
        positive = np.asarray(self.probability(t), dtype=float)
        return np.broadcast_to([1.0, -1.0], (len(t), 2)), np.stack([positive, 1 - positive], axis=1)


Target = LinearTarget | BinaryTarget


# --- quadrature of products -------------------------------------------------------------------------------------------


def product_nodes(marginals: Sequence[Marginal], most: int) -> tuple[Array, Array]:
    """Nodes (m, k) and weights (m,) of independent coordinates, `most` at most.

    Their tensor grid where each coordinate gets eight nodes or its whole support, otherwise a Sobol sequence.
    """
    if not marginals:
        return np.zeros((1, 0)), np.ones(1)
    rules = [law.quadrature(max(8, int(min(64, most ** (1 / len(marginals)))))) for law in marginals]
    if np.prod([float(len(nodes)) for nodes, _ in rules]) <= most:
        nodes = np.array(list(itertools.product(*(nodes for nodes, _ in rules))))
        weights = np.prod(list(itertools.product(*(weights for _, weights in rules))), axis=1)
        return nodes, weights
    levels = stats.qmc.Sobol(len(marginals), seed=0).random(2 ** int(np.log2(most)))
    nodes = np.stack([law.quantile(level) for law, level in zip(marginals, levels.T, strict=True)], axis=1)
    return nodes, np.full(len(nodes), 1.0 / len(nodes))


def localised(direction: Array, marginals: Sequence[Marginal]) -> Array:
    """Indices of coordinates that are not normal and hold more than `LOCALISED` of the direction's square."""
    share = direction**2 / max(float(direction @ direction), 1e-300)
    large = np.flatnonzero((share > LOCALISED) & np.array([not law.is_normal for law in marginals]))
    return large[np.argsort(-share[large])][:MAX_LOCALISED]


# --- components ---------------------------------------------------------------------------------------------------------


def times(cov: Array, x: Array) -> Array:
    return cov * x if cov.ndim == 1 else cov @ x


def class_component(
    mean: Array,
    prior: float,
    noise: Array,
    own: Array,
    z: Array,
    z_weights: Array,
    *,
    weight: float = 1.0,
    noise_scale: float = 1.0,
) -> Component:
    """x = y mean + own z + (normal part): nodes over (y, z)."""
    y = np.repeat([1.0, -1.0], len(z))
    return Component(
        weight,
        np.column_stack([mean, own]),
        np.column_stack([y, np.tile(z, (2, 1))]),
        y,
        np.concatenate([prior * z_weights, (1 - prior) * z_weights]),
        noise,
        noise_scale,
    )


def index_component(
    coef: Array,
    target: Target,
    noise: Array,
    own: Array,
    z: Array,
    z_weights: Array,
    *,
    weight: float = 1.0,
    noise_scale: float = 1.0,
    mean: Array | None = None,
    fine: bool = True,
) -> Component:
    """x = mean + own z + (normal part): nodes over 1, z, the normal part's share t of the signal, and y given x'coef."""
    toward = noise_scale * times(noise, coef)
    variance = float(coef @ toward)
    centre = np.zeros(len(coef)) if mean is None else mean
    if variance > 1e-300:
        g, g_weights = normal_nodes(32 if fine else 12)
        t = np.sqrt(variance) * g
        loading, removed = toward[:, None] / variance, toward[:, None] / np.sqrt(variance)
    else:
        t, g_weights = np.zeros(1), np.ones(1)
        loading, removed = np.zeros((len(coef), 1)), None
    z_all, t_all = np.repeat(z, len(t), axis=0), np.tile(t, len(z))
    weights = np.outer(z_weights, g_weights).ravel()
    labels, label_weights = target.nodes(centre @ coef + z_all @ (own.T @ coef) + t_all, 24 if fine else 12)
    copies = labels.shape[1]
    nodes = np.repeat(np.column_stack([np.ones(len(t_all)), z_all, t_all]), copies, axis=0)
    return Component(
        weight,
        np.column_stack([centre, own, loading]),
        nodes,
        labels.ravel(),
        (weights[:, None] * label_weights).ravel(),
        noise,
        noise_scale,
        removed,
    )


# --- what all designs share ---------------------------------------------------------------------------------------------


class Design:
    """What every design offers: `n_features`, `is_classification`, `components`, `sample` and `gaussian_equivalent`."""

    n_features: int
    is_classification: bool

    def components(self) -> list[Component]:
        raise NotImplementedError

    def sample(self, n_samples: int, seed: int | np.random.Generator) -> tuple[Array, Array]:
        """Independent rows, (n_samples, p), and labels, (n_samples,)."""
        raise NotImplementedError

    def gaussian_equivalent(self) -> Design:
        """The design with normal features and the same first two moments (given the class, where there are classes)."""
        raise NotImplementedError


def vector(value: Any, p: int | None, name: str) -> Array:
    found = np.asarray(value, dtype=float)
    if found.ndim != 1 or (p is not None and len(found) != p) or not np.isfinite(found).all():
        raise ValueError(f"{name} must be a finite vector of length {p or 'n_features'}, got shape {found.shape}")
    return found


def covariance(value: Any, p: int, name: str = "cov") -> Array:
    """Variances (p,) or a covariance (p, p), symmetric and without negative eigenvalues; None is the identity."""
    found = np.ones(p) if value is None else np.asarray(value, dtype=float)
    if found.ndim == 0:
        found = np.full(p, float(found))
    if found.shape not in ((p,), (p, p)) or not np.isfinite(found).all():
        raise ValueError(f"{name} must be finite, of shape ({p},) or ({p}, {p}), got {found.shape}")
    if found.ndim == 1:
        smallest = found.min()
    else:
        if not np.allclose(found, found.T, atol=1e-8 * np.abs(found).max()):
            raise ValueError(f"{name} is not symmetric")
        smallest = np.linalg.eigvalsh(found)[0]
    if smallest < -1e-8 * max(np.abs(found).max(), 1e-300):
        raise ValueError(f"{name} has the negative eigenvalue {smallest:.3g}; it is no covariance")
    return found


def root(cov: Array) -> Array:
    """A matrix with root @ root.T = cov, also for a singular one."""
    values, vectors = np.linalg.eigh(cov)
    return vectors * np.sqrt(np.maximum(values, 0.0))
