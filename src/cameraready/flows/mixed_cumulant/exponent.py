"""The diffusion information exponent: how hard a direction of the data is for a denoiser that learns online."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from cameraready.flows.mixed_cumulant._activation import Activation, activation, gaussian_rule, hermite_values
from cameraready.flows.mixed_cumulant.model import MixedCumulant

Direction = Literal["covariance", "fourth", "correlated"]


@dataclass(frozen=True)
class InformationExponent:
    """The first degree in the overlap at which the denoiser's population loss changes along a direction.

    Attributes
    ----------
    order : int or float
        The exponent k; ``math.inf`` where no degree up to `max_order` has a coefficient.
    coefficient : float
        Of ``overlap ** order`` in the loss (for averaged levels, in their weighted mean); 0 where `order` is infinite.
    sign : {"attractive", "repulsive", "none"}
        Attractive: the loss falls as the overlap grows, so that training moves towards the direction.
    reason : str
        Why the order is infinite, or which lower degrees vanish and why; empty where there is nothing to say.
    coefficients : float64 array, (max_order + 1,)
        Of all degrees; entry 0 is 0.
    snr : float or None
        a^2 / s^2 of one noise level; None for an average over levels.
    levels : tuple of InformationExponent
        The exponents of each noise level, where there are several.
    """

    order: float
    coefficient: float
    sign: str
    reason: str
    coefficients: np.ndarray = field(repr=False)
    snr: float | None = None
    levels: tuple[InformationExponent, ...] = field(default=(), repr=False)

    @property
    def sample_complexity(self) -> str:
        """Samples for online spherical SGD to find the direction (Ben Arous et al., 2021, arXiv:2003.10409, Theorem 1.3)."""
        if math.isinf(self.order):
            return "never, by this loss"
        if self.sign == "repulsive":
            return "never from this side: the loss pushes away"
        return {1: "d", 2: "d log d"}.get(int(self.order), f"d^{int(self.order) - 1}")

    def __str__(self) -> str:
        order = "infinite" if math.isinf(self.order) else str(int(self.order))
        text = f"order {order} ({self.sign}, coefficient {self.coefficient:.3g}), samples: {self.sample_complexity}"
        return f"{text}; {self.reason}" if self.reason else text


def noise_levels(snr: float | Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """a and s with ``a^2 + s^2 = 1`` and ``a^2 / s^2 = snr``, each (levels,)."""
    snr = np.atleast_1d(np.asarray(snr, dtype=float))
    if snr.ndim != 1 or not snr.size or not (np.isfinite(snr) & (snr > 0)).all():
        raise ValueError(f"snr must be positive and finite, a number or a sequence of them, got {snr.tolist()}")
    return np.sqrt(snr / (1 + snr)), np.sqrt(1 / (1 + snr))


def loss_coefficients(phi: Activation, a: float, s: float, gain: float, order: int) -> tuple[np.ndarray, np.ndarray]:
    """L_j in ``loss = const + sum_j L_j c_j``, c_j = E[h_j(w.y)], and what quadrature may be off by: both (order + 1,).

    ``L_j = -2 gain (s^2 / a) phi_(j-1) / (j-1)! + gain^2 E[phi^2 h_j] / j!`` for j >= 1.
    """
    first, first_off = phi.hermite(order)
    second, second_off = phi.hermite_of_square(order)
    factorial = np.array([math.factorial(k) for k in range(order + 1)], dtype=float)
    linear, square = -2 * gain * s**2 / a, gain**2
    found, off = np.zeros(order + 1), np.zeros(order + 1)
    found[1:] = linear * first[:-1] / factorial[:-1] + square * second[1:] / factorial[1:]
    off[1:] = abs(linear) * first_off[:-1] / factorial[:-1] + square * second_off[1:] / factorial[1:]
    return found, off


def integrand(phi: Activation, p: np.ndarray, a: float, s: float, gain: float) -> np.ndarray:
    """F with ``loss = const + E[F(w.y)]``: ``-2 gain (s^2/a) (p phi - phi') + gain^2 phi^2`` (Tweedie and integration by parts)."""
    if phi.derivative is None:
        raise ValueError(
            f"the loss needs the derivative of the activation {phi.name!r}: give phi=(function, derivative)"
        )
    value = phi.function(p)
    return -2 * gain * (s**2 / a) * (p * value - phi.derivative(p)) + gain**2 * value**2


def population_loss(
    model: MixedCumulant,
    d: int,
    overlaps: tuple[float, float],
    *,
    phi: Any = "tanh",
    snr: float = 1.0,
    gain: float = 0.5,
) -> float:
    """``E ||x - a y - gain w phi(w.y)||^2`` on the mixed cumulant model, by quadrature.

    Parameters
    ----------
    model : MixedCumulant
    d : int
        Dimension of the data.
    overlaps : (float, float)
        w.u and w.v of the unit vector w; the sum of their squares is at most 1.
    phi, snr, gain
        As in `diffusion_information_exponent`.
    """
    m_u, m_v = overlaps
    if m_u**2 + m_v**2 > 1 + 1e-12:
        raise ValueError(f"overlaps {overlaps} do not belong to a unit vector: their squares add up to more than 1")
    (a,), (s,) = noise_levels(snr)
    phi = activation(phi, trained=True)
    # Given both latents, w.y is Gaussian with this mean and this variance.
    lam, nu, weight = _latent_rule(model)
    centre = a * (m_u * math.sqrt(model.beta_u) * lam + m_v * model.loading * nu)
    spread = math.sqrt(max(1 - (a * m_v * model.loading) ** 2, 0.0))
    nodes, weights = gaussian_rule()
    inner = integrand(phi, centre[:, None] + spread * nodes, a, s, gain) @ weights
    return float(s**4 * (d + model.beta_u) + a**2 * s**2 * d + weight @ inner)


def _latent_rule(model: MixedCumulant) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Nodes (lam, nu) and weights for expectations over the latents."""
    t, weights = gaussian_rule(8)
    keep = weights > 1e-18
    t, weights = t[keep], weights[keep]
    rho = model.correlation
    if abs(rho) == 1:
        return rho * t, model.quantile(t), weights
    inner, inner_weights = np.polynomial.hermite_e.hermegauss(40)
    inner_weights = inner_weights / inner_weights.sum()
    lam = rho * t[:, None] + math.sqrt(1 - rho**2) * inner
    nu = np.broadcast_to(model.quantile(t)[:, None], lam.shape)
    return lam.ravel(), nu.ravel(), np.outer(weights, inner_weights).ravel()


def diffusion_information_exponent(
    phi: Any = "tanh",
    snr: float | Sequence[float] = 1.0,
    direction: Direction = "covariance",
    *,
    model: MixedCumulant | None = None,
    gain: float = 0.5,
    weights: Sequence[float] | None = None,
    overlap: float = 0.5,
    max_order: int = 8,
    tolerance: float = 1e-9,
) -> InformationExponent:
    """The diffusion information exponent of a direction of the mixed cumulant model, analytically.

    The denoiser is ``f(y) = a y + gain w phi(w.y)`` with a unit vector w, on ``y = a x + s eps``, ``a^2 + s^2 = 1``. Its population loss is a power series in the
    overlap of w with the direction; the exponent is the first degree with a coefficient (Bardone et al., 2026, arXiv:2603.12901; the coefficients are derived
    in the method's notes).

    When to use: to know beforehand whether a loss, an activation and a noise level see a direction at all, and with what sign. When not: for networks with
    several layers, whose features are not a single projection.

    Parameters
    ----------
    phi : str, callable or (callable, callable)
        Activation: a name, a function of arrays, or it and its derivative (``"correlated"`` needs it).
    snr : float or sequence of float
        a^2 / s^2. With several, each level's exponent is given, and that of the weighted mean of their losses.
    direction : {"covariance", "fourth", "correlated"}
        u; v while w.u = 0; v once w.u has reached `overlap`.
    model : MixedCumulant, optional
        Default ``MixedCumulant()``, for ``"correlated"`` with correlation 1.
    gain : float
        The neuron's output weight; its sign decides which fourth cumulants attract.
    weights : sequence of float, optional
        Weights of the levels in the averaged loss (equal by default), at least 0.
    overlap : float in (0, 1)
        For ``"correlated"``.
    max_order : int
        The highest degree looked at, 1 to 20.
    tolerance : float
        Coefficients below it, or below what the quadrature may be off by, count as zero.

    Returns
    -------
    InformationExponent

    Raises
    ------
    ValueError, TypeError
        For parameters out of range, in a sentence.
    """
    phi = activation(phi)
    if model is None:
        model = MixedCumulant(correlation=1.0 if direction == "correlated" else 0.0)
    if not 1 <= max_order <= 20:
        raise ValueError(f"max_order must lie between 1 and 20, got {max_order}")
    if not (math.isfinite(gain) and gain):
        raise ValueError(f"gain must be a number other than 0 (the neuron would not speak), got {gain!r}")
    a, s = noise_levels(snr)
    share = np.ones(len(a)) if weights is None else np.asarray(weights, dtype=float)
    if share.shape != a.shape or (share < 0).any() or not share.sum() > 0:
        raise ValueError(f"weights must be {len(a)} numbers of at least 0, one a noise level, got {weights!r}")
    share = share / share.sum()
    if direction in ("covariance", "fourth"):
        along = model.hermite_moments_u(max_order) if direction == "covariance" else model.hermite_moments_v(max_order)
        rows = [_series(phi, each_a, each_s, gain, along) for each_a, each_s in zip(a, s, strict=True)]
        nothing = _why_not_in_data(direction, model)
    elif direction == "correlated":
        if not 0 < overlap < 1:
            raise ValueError(f"overlap must lie strictly between 0 and 1, got {overlap!r}")
        rows = [_series_given_u(phi, x, y, gain, model, overlap, max_order) for x, y in zip(a, s, strict=True)]
        nothing = "beta_v is 0: there is nothing along v" if model.beta_v == 0 else ""
    else:
        raise ValueError(f"direction must be 'covariance', 'fourth' or 'correlated', got {direction!r}")
    each = [_judged(c, off, tolerance, nothing, phi, float(q)) for (c, off), q in zip(rows, (a / s) ** 2, strict=True)]
    if len(each) == 1:
        return each[0]
    mean, off = (share @ np.array([row[i] for row in rows]) for i in range(2))
    averaged = _judged(mean, off, tolerance, nothing, phi, None)
    lowest = min(level.order for level, w in zip(each, share, strict=True) if w > 0)
    reason = averaged.reason
    if averaged.order > lowest:
        reason = f"degree {int(lowest)} is there at single noise levels and cancels in the average" + (
            f"; {reason}" if reason else ""
        )
    return InformationExponent(
        averaged.order, averaged.coefficient, averaged.sign, reason, averaged.coefficients, None, tuple(each)
    )


def _series(phi: Activation, a: float, s: float, gain: float, moments: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order = len(moments) - 1
    loss, off = loss_coefficients(phi, a, s, gain, order)
    scale = a ** np.arange(order + 1) * moments
    return loss * scale, off * np.abs(scale)


def _series_given_u(
    phi: Activation, a: float, s: float, gain: float, model: MixedCumulant, overlap: float, order: int
) -> tuple[np.ndarray, np.ndarray]:
    """Coefficients of powers of w.v at fixed w.u, exactly.

    Given the latents, w.y has mean ``a (m_u sqrt(bu) lam + m_v r nu)`` and variance ``1 - (a r m_v)^2``, so that Mehler's series gives
    ``(a r)^l / l! E[h_l(nu) E_g[F(X + g) h_l(g)]]`` with ``X = a m_u sqrt(bu) lam``. No Hermite series of the density of w.y is needed, which need not converge.
    """
    lam, nu, weight = _latent_rule(model)
    results = []
    for nodes_a_panel in (24, 16):
        g, g_weight = gaussian_rule(nodes_a_panel)
        shifted = a * overlap * math.sqrt(model.beta_u) * lam[:, None] + g
        inner = integrand(phi, shifted, a, s, gain) @ (hermite_values(g, order) * g_weight).T
        found = (weight[:, None] * hermite_values(nu, order).T * inner).sum(0)
        factorial = np.array([math.factorial(k) for k in range(order + 1)], dtype=float)
        found *= (a * model.loading) ** np.arange(order + 1) / factorial
        found[0] = 0.0
        results.append(found)
    return results[0], np.abs(results[0] - results[1]) + 1e-13


def _why_not_in_data(direction: str, model: MixedCumulant) -> str:
    strength = "beta_u" if direction == "covariance" else "beta_v"
    if getattr(model, strength) == 0:
        return f"{strength} is 0: there is nothing along this direction"
    if direction == "fourth" and model.latent == "gaussian":
        return "the latent is Gaussian: along v the data have no cumulant beyond the second, which S removes"
    return ""


def _judged(
    coefficients: np.ndarray, off: np.ndarray, tolerance: float, nothing: str, phi: Activation, snr: float | None
) -> InformationExponent:
    coefficients = coefficients.copy()
    limit = np.maximum(tolerance, 10 * off)
    seen = np.abs(coefficients) > limit
    seen[0] = False
    if not seen.any():
        order = len(coefficients) - 1
        reason = nothing or (
            f"no degree up to {order} has a coefficient above {limit.max():.1g}: the activation {phi.name!r} does not couple to what the data have there"
        )
        return InformationExponent(math.inf, 0.0, "none", reason, coefficients, snr)
    k = int(np.argmax(seen))
    coarse = float(limit[1:k].max(initial=0.0))
    reason = (
        f"lower degrees are zero only to {coarse:.1g}, the accuracy of the quadrature for {phi.name!r}"
        if coarse > 10 * tolerance
        else ""
    )
    value = float(coefficients[k])
    return InformationExponent(k, value, "attractive" if value < 0 else "repulsive", reason, coefficients, snr)
