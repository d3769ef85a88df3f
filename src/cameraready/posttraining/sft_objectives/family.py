"""The objectives as functions of one token's probability: values, the weights of their gradients, and where those peak."""

from __future__ import annotations

import math
import numbers
from typing import Any, Literal

import torch
from torch import Tensor

Name = Literal["alpha", "nll", "dft", "gce", "focal", "mixture", "label_smoothing"]

#: What each member can be told, with its default.
SETTINGS: dict[str, dict[str, float]] = {
    "alpha": {"alpha": 1.0},
    "nll": {},
    "dft": {},
    "gce": {"alpha": 0.7},
    "focal": {"gamma": 2.0},
    "mixture": {"nll_share": 0.5},
    "label_smoothing": {"smoothing": 0.1},
}
_RANGES = {
    "alpha": (0.0, math.inf, "alpha must be a number of at least 0 (0 is the log-likelihood)"),
    "gamma": (0.0, math.inf, "gamma must be a number of at least 0 (0 is the log-likelihood)"),
    "nll_share": (0.0, 1.0, "nll_share must be from 0 (1 - p alone) to 1 (the log-likelihood alone)"),
    "smoothing": (0.0, 1.0, "smoothing must be from 0 to 1"),
}
#: Below this the family is the log-likelihood to within rounding: (1 - p^a) / a = -log p (1 - a |log p| / 2 + ...).
_LIMIT = 1e-6


def settings_of(name: str, given: dict[str, float | None]) -> dict[str, float]:
    """The settings of member `name`: those given, else its defaults.

    Raises
    ------
    ValueError
        There is no such member, it has no such setting, or a setting is out of range.
    """
    if name not in SETTINGS:
        raise ValueError(f"there is no objective {name!r}; there are {', '.join(SETTINGS)}")
    settings = dict(SETTINGS[name])
    for key, value in given.items():
        if value is None:
            continue
        if key not in settings:
            takes = ", ".join(settings) or "no settings"
            raise ValueError(f"objective {name!r} has no setting {key!r}; it takes {takes}")
        low, high, sentence = _RANGES[key]
        plain = number(value)
        if plain is None or not low <= plain <= high or math.isinf(plain):
            raise ValueError(f"{sentence}, got {value!r}")
        settings[key] = plain
    if name == "gce" and not 0 < settings["alpha"] <= 1:
        raise ValueError(f"generalized cross-entropy has 0 < alpha <= 1, got {settings['alpha']}; 'alpha' takes others")
    return settings


def number(value: Any) -> float | None:
    """A number as a float: Python's, NumPy's or a tensor of one; None for anything else, truth values included."""
    if isinstance(value, Tensor) and value.ndim == 0 and value.dtype != torch.bool:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    return float(value)


def values(name: str, settings: dict[str, float], logps: Tensor) -> Tensor:
    """f(p) of log p, elementwise and differentiable, for the members that are functions of p alone.

    Finite, with a finite gradient, for every log p in [-inf, 0], but for the infinite value of those that hold -log p at p = 0.
    """
    if name in ("alpha", "gce"):
        alpha = settings["alpha"]
        return -logps if alpha < _LIMIT else _one_minus_exp(alpha * logps) / alpha
    if name == "nll":
        return -logps
    absent = torch.isneginf(logps)
    present = logps.masked_fill(absent, 0.0)
    if name == "dft":  # p log p is 0 at p = 0
        return torch.where(absent, 0.0, present.detach().exp() * -present)
    if name == "focal":
        # At p = 1 a power of 1 - p below 1 has no slope; the clamp gives it the slope 0 that the product has.
        rest = (-torch.expm1(present)).clamp_min(torch.finfo(logps.dtype).tiny)
        return torch.where(absent, -logps, rest ** settings["gamma"] * -present)
    if name == "mixture":
        share = settings["nll_share"]
        linear = _one_minus_exp(logps)
        return linear if share == 0 else share * -logps + (1 - share) * linear
    raise ValueError(f"{name!r} is no function of the target's probability alone")


def _one_minus_exp(x: Tensor) -> Tensor:
    """1 - e^x with the slope -e^x to full precision; that of torch.expm1 is its value plus 1, which loses e^x where that is small."""
    grown = x.exp()
    return -torch.expm1(x.detach()) - (grown - grown.detach())


def gradient_weight(name: str, settings: dict[str, float], p: Tensor) -> Tensor:
    """W_f(p) = -f'(p) p (1 - p): the size of the gradient at the target's logit, as in Section 3 of the paper.

    The gradient at every other logit j is ``W_f(p) pi_j / (1 - p)``, so W_f is half of the gradient's 1-norm.
    """
    if name in ("alpha", "gce"):
        return p ** settings["alpha"] * (1 - p)
    if name == "nll":
        return 1 - p
    if name == "dft":
        return p * (1 - p)
    if name == "mixture":
        share = settings["nll_share"]
        return (share + (1 - share) * p) * (1 - p)
    if name == "focal":
        gamma = settings["gamma"]
        return (1 - p) ** (gamma + 1) - gamma * (1 - p) ** gamma * torch.xlogy(p, p)
    raise ValueError(f"{name!r} is no function of the target's probability alone, so it has no weight W_f(p)")


def peak(name: str, settings: dict[str, float]) -> float:
    """The probability at which `gradient_weight` is largest: alpha / (1 + alpha) in the family."""
    if name in ("alpha", "gce"):
        return settings["alpha"] / (1 + settings["alpha"])
    if name == "nll":
        return 0.0
    if name == "dft":
        return 0.5
    if name == "mixture":
        # (s + (1 - s) p)(1 - p) is a parabola.
        share = settings["nll_share"]
        return 0.0 if share >= 0.5 else (1 - 2 * share) / (2 * (1 - share))
    if name == "focal":
        return _focal_peak(settings["gamma"])
    raise ValueError(f"{name!r} is no function of the target's probability alone, so it has no weight W_f(p)")


def _focal_peak(gamma: float) -> float:
    """Where d/dp log W = 0, by bisection: the slope of W has one change of sign in (0, 1/2)."""
    if gamma == 0:
        return 0.0

    def slope(p: float) -> float:
        # W' / (1 - p)^(gamma - 1) of W = (1 - p)^(gamma + 1) - gamma p log p (1 - p)^gamma
        return -(1 + 2 * gamma) * (1 - p) - gamma * math.log(p) * (1 - p) + gamma**2 * p * math.log(p)

    low, high = 1e-300, 0.5
    for _ in range(200):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if slope(middle) > 0 else (low, middle)
    return low
