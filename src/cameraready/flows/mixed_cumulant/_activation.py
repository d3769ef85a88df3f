"""Activations of the minimal denoiser, with their Hermite coefficients under a standard Gaussian."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.polynomial import hermite_e
from scipy.special import erf, expit, ndtr

Function = Callable[[np.ndarray], np.ndarray]
ROOT_TWO_PI = math.sqrt(2 * math.pi)


@dataclass(frozen=True)
class Activation:
    """An activation phi: R -> R, elementwise on float64 arrays.

    Attributes
    ----------
    name : str
    function, derivative : callable
        phi and phi'. The derivative may be None where only the exponent is wanted.
    slope : float or None
        For the piecewise linear activation ``x if x > 0 else slope * x``, whose coefficients have a closed form; else None.
    """

    name: str
    function: Function
    derivative: Function | None
    slope: float | None = None

    def hermite(self, order: int) -> tuple[np.ndarray, np.ndarray]:
        """``E[phi(g) h_k(g)]`` for k = 0..order and what the quadrature may be off by, both (order + 1,) float64."""
        if self.slope is not None:
            return _kinked(order, self.slope), np.zeros(order + 1)
        return _with_error(self.function, order)

    def hermite_of_square(self, order: int) -> tuple[np.ndarray, np.ndarray]:
        """The same of phi^2."""
        if self.slope is not None:
            return _kinked_square(order, self.slope), np.zeros(order + 1)
        return _with_error(lambda x: self.function(x) ** 2, order)


def _gelu(x: np.ndarray) -> np.ndarray:
    return x * ndtr(x)


def _gelu_slope(x: np.ndarray) -> np.ndarray:
    return ndtr(x) + x * np.exp(-(x**2) / 2) / ROOT_TWO_PI


def _leaky(slope: float, name: str) -> Activation:
    return Activation(name, lambda x: np.where(x > 0, x, slope * x), lambda x: np.where(x > 0, 1.0, slope), slope)


NAMED = {
    each.name: each
    for each in (
        Activation("tanh", np.tanh, lambda x: 1 - np.tanh(x) ** 2),
        Activation("erf", erf, lambda x: 2 / math.sqrt(math.pi) * np.exp(-(x**2))),
        Activation("sin", np.sin, np.cos),
        Activation("gelu", _gelu, _gelu_slope),
        Activation("silu", lambda x: x * expit(x), lambda x: expit(x) * (1 + x * (1 - expit(x)))),
        Activation("identity", lambda x: x, np.ones_like, 1.0),
        Activation("hermite3", lambda x: x**3 - 3 * x, lambda x: 3 * x**2 - 3),
        _leaky(0.0, "relu"),
        _leaky(0.01, "leaky_relu"),
    )
}


def activation(phi: str | Function | Sequence[Function] | Activation, *, trained: bool = False) -> Activation:
    """The `Activation` that `phi` means: a name, a function, or a pair (function, derivative).

    Raises
    ------
    ValueError
        An unknown name; or a lone function where `trained` needs its derivative.
    TypeError
        Something else.
    """
    if isinstance(phi, Activation):
        found = phi
    elif isinstance(phi, str):
        if phi not in NAMED:
            raise ValueError(
                f"there is no activation {phi!r}; there are {', '.join(NAMED)}, or give (function, derivative)"
            )
        found = NAMED[phi]
    elif callable(phi):
        found = Activation(getattr(phi, "__name__", "own"), phi, None)
    elif isinstance(phi, (tuple, list)) and len(phi) == 2 and all(map(callable, phi)):
        found = Activation(getattr(phi[0], "__name__", "own"), phi[0], phi[1])
    else:
        raise TypeError(
            f"phi must be a name, a function of arrays or a pair (function, derivative), got {type(phi).__name__}"
        )
    if trained and found.derivative is None:
        raise ValueError(
            f"training needs the derivative of the activation {found.name!r}: give phi=(function, derivative)"
        )
    return found


@cache
def gaussian_rule(nodes_a_panel: int = 24) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights for expectations under N(0, 1): Gauss-Legendre on unit panels from -13 to 13.

    Gauss-Hermite converges slowly where phi has poles near the real axis (tanh) and hardly at all where it has a kink; panels with a
    boundary at zero are exact to rounding for both.
    """
    at, weight = np.polynomial.legendre.leggauss(nodes_a_panel)
    nodes = (np.arange(-13, 13)[:, None] + (at + 1) / 2).ravel()
    weights = np.tile(weight / 2, 26) * np.exp(-(nodes**2) / 2) / ROOT_TWO_PI
    return nodes, weights


def hermite_values(x: np.ndarray, order: int) -> np.ndarray:
    """Probabilists' h_0(x) .. h_order(x), shape (order + 1, *x.shape)."""
    return np.moveaxis(hermite_e.hermevander(np.asarray(x, dtype=float), order), -1, 0)


def expectations(function: Function, order: int, nodes_a_panel: int = 24) -> np.ndarray:
    """``E[function(g) h_k(g)]`` for k = 0..order by `gaussian_rule`."""
    nodes, weights = gaussian_rule(nodes_a_panel)
    values = np.asarray(function(nodes), dtype=float)
    if values.shape != nodes.shape or not np.isfinite(values).all():
        raise ValueError("phi must be elementwise and finite on [-13, 13]; it returned another shape, NaN or infinity")
    return hermite_values(nodes, order) @ (weights * values)


def _with_error(function: Function, order: int) -> tuple[np.ndarray, np.ndarray]:
    fine = expectations(function, order, 48)
    rounding = 1e-14 * np.sqrt([math.factorial(k) for k in range(order + 1)]) * max(1.0, float(np.abs(fine).max()))
    return fine, np.abs(fine - expectations(function, order, 24)) + rounding


def _kinked(order: int, slope: float) -> np.ndarray:
    """x at positive arguments and slope x at others is slope x + (1 - slope) relu; E[relu h_k] = h_(k-2)(0) / sqrt(2 pi)."""
    relu = np.zeros(order + 1)
    relu[0] = 1 / ROOT_TWO_PI
    relu[1:2] = 0.5
    if order >= 2:
        relu[2:] = hermite_values(np.zeros(1), order - 2)[:, 0] / ROOT_TWO_PI
    found = (1 - slope) * relu
    found[1:2] += slope
    return found


def _kinked_square(order: int, slope: float) -> np.ndarray:
    """The square is slope^2 x^2 + (1 - slope^2) relu^2, and E[relu^2 h_k] = 2 E[relu h_(k-1)] for k >= 1."""
    half = np.zeros(order + 1)
    half[0] = 0.5
    half[1:] = 2 * _kinked(order, 0.0)[:order]
    found = (1 - slope**2) * half
    found[0] += slope**2
    if order >= 2:
        found[2] += 2 * slope**2
    return found
