"""How far the probability of one token may move within an f-divergence ball: roots of a convex function of one variable.

For a token of probability p, the extreme distributions in the ball D_f(old || new) <= delta rescale all other tokens by one factor, so that
only the token's new probability P remains. Every root here is found in the change d of its log-odds: P = p / (p + q exp(-d)), q = 1 - p. In
d the KL divergence is the cumulant function of a coin less its mean, log(1 + p (e^d - 1)) - p d: convex, smooth, with straight tails and no
pole, so that Newton's method cannot leave its domain, and from the far side of the root it only approaches it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

Divergence = Literal["kl", "tv", "chi2"] | Callable[[Tensor], Tensor]

#: Smallest log-probability that is told from zero probability: exp(-700) is the last power of ten before float64's subnormal numbers.
SMALLEST_LOG = -700.0
#: Newton steps; five leave rounding errors only, for p from 1e-300 to 1 - 1e-15 and delta from 1e-12 to 50 (see the tests).
NEWTON_STEPS = 8
#: Halvings of the bracket in d; 1,500 / 2^64 is below the resolution of d.
BISECTIONS = 64
#: Half-width of the bracket in d for a divergence of the user's: e^750 is more than a float64 holds.
WIDEST = 750.0


def log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x <= 0, to relative rounding at both ends (Maechler, 2012)."""
    return torch.where(x > -math.log(2.0), torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))


def kl_ratios(log_p: Tensor, delta: float) -> tuple[Tensor, Tensor]:
    """The two roots r of p (-log r) + (1 - p) (-log((1 - r p) / (1 - p))) = delta, i.e. KL(old || new) = delta.

    Parameters
    ----------
    log_p : Tensor, float64
        Log-probabilities in [SMALLEST_LOG, 0].
    delta : float
        Above 0.

    Returns
    -------
    lower, upper : Tensor, float64
        The lower root in terms of the token is the upper one in terms of all others together (the mirror identity), so that one function finds both.
    """
    p, q = torch.exp(log_p), -torch.expm1(log_p)
    rise = _rise(p, q, log_p, delta)
    fall = _rise(q, p, torch.log1p(-p), delta)
    upper, lower = 1.0 / (p + q * torch.exp(-rise)), 1.0 / (p + q * torch.exp(fall))
    # A certain token: the ball is KL = -log r.
    certain = q == 0
    return torch.where(certain, math.exp(-delta), lower), torch.where(certain, 1.0, upper)


def _rise(a: Tensor, b: Tensor, log_a: Tensor, delta: float) -> Tensor:
    """The d > 0 with log(1 + a (e^d - 1)) - a d = delta, where b = 1 - a; `NEWTON_STEPS` steps, none of which depends on the data."""
    small = a <= 0.5
    tiny = torch.finfo(a.dtype).tiny
    # Good to a few per cent at both ends: a -> 0 is e^d - 1 - d = delta / a, a -> 1 is d - 1 + e^-d = delta / b; between them d^2 a b / 2 = delta.
    y = delta / (a * b).clamp(min=tiny)
    root = torch.sqrt(2.0 * y)
    d = torch.where(small, torch.log1p(y + torch.log1p(y + root)), y + 1.0 - torch.exp(-(y + root)))
    for _ in range(NEWTON_STEPS):
        # Three forms of log(1 + a (e^d - 1)) - a d, none of which overflows or cancels where it is used.
        down = b * torch.expm1(-d)
        value = torch.where(
            small,
            torch.where(
                d <= 700.0,
                torch.log1p(a * torch.expm1(d.clamp(max=700.0))) - a * d,
                log_a + torch.log1p(b / a.clamp(min=tiny) * torch.exp(-d)) + b * d,
            ),
            b * d + torch.log1p(down),
        )
        # The new probability less the old one, P - a.
        slope = -a * down / (a + b * torch.exp(-d)).clamp(min=tiny)
        d = (d - (value - delta) / slope.clamp(min=tiny)).clamp(min=0.0)
    return d


def tv_ratios(log_p: Tensor, delta: float) -> tuple[Tensor, Tensor]:
    """1 -+ delta / p within [0, 1 / p]: total variation, f(u) = |u - 1| / 2."""
    inverse = torch.exp(-log_p)
    step = delta * inverse
    return (1.0 - step).clamp(min=0.0), torch.minimum(1.0 + step, inverse)


def chi2_ratios(log_p: Tensor, delta: float) -> tuple[Tensor, Tensor]:
    """1 -+ sqrt(delta (1 - p) / p) within [0, 1 / p]: Pearson's chi-square, f(u) = (u - 1)^2."""
    inverse = torch.exp(-log_p)
    step = torch.sqrt(delta * -torch.expm1(log_p) * inverse)
    return (1.0 - step).clamp(min=0.0), torch.minimum(1.0 + step, inverse)


def convex_ratios(log_p: Tensor, delta: float, f: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """The extreme ratios for any convex f with f(1) = 0, by bisection in the log-odds.

    A bound at which the divergence stays within delta up to the edge of the simplex is that edge (0, or 1 / p). f is called with arguments of
    at least 1e-300, so that one that is infinite or undefined at 0 is no trouble; p is taken as at most 1 - 2^-52, the last before 1.

    Parameters
    ----------
    log_p : Tensor, float64
    delta : float
    f : callable
        Elementwise, float64 to float64, checked by `check_convex` beforehand.
    """
    log_p = log_p.clamp(max=math.log1p(-(2.0**-52)))
    p, q = torch.exp(log_p), -torch.expm1(log_p)

    def divergence(d: Tensor) -> Tensor:
        token, others = _new_ratios(p, q, d)
        return p * f(token.clamp(min=1e-300)) + q * f(others.clamp(min=1e-300))

    found = []
    for sign in (-1.0, 1.0):
        inside, outside = torch.zeros_like(p), torch.full_like(p, WIDEST)
        for _ in range(BISECTIONS):
            middle = 0.5 * (inside + outside)
            within = divergence(sign * middle) <= delta
            inside, outside = torch.where(within, middle, inside), torch.where(within, outside, middle)
        token, _ = _new_ratios(p, q, sign * inside)
        saturated = outside == WIDEST
        edge = torch.zeros_like(p) if sign < 0 else 1.0 / p
        found.append(torch.where(saturated, edge, token))
    return found[0], found[1]


def _new_ratios(p: Tensor, q: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    """New over old probability of the token, and of all others, when its log-odds change by d."""
    up, down = torch.exp(d.clamp(max=700.0)), torch.exp((-d).clamp(max=700.0))
    return 1.0 / (p + q * down), 1.0 / (q + p * up)


def check_convex(f: Callable[[Tensor], Tensor]) -> None:
    """Raises ValueError unless f looks like the generator of an f-divergence: elementwise, f(1) = 0, convex and not a straight line.

    Convexity is looked at on 2,001 points from 1e-4 to 1e4 evenly spaced in the logarithm.
    """
    grid = torch.logspace(-4, 4, 2001, dtype=torch.float64)
    values = f(grid)
    if not isinstance(values, Tensor) or values.shape != grid.shape or values.dtype != grid.dtype:
        raise ValueError("the divergence's f must map a float64 tensor to one of the same shape, element by element")
    if not bool(torch.isfinite(values).all()):
        worst = grid[~torch.isfinite(values)][0].item()
        raise ValueError(f"the divergence's f is not finite at u = {worst:.3g}; it must be finite for every u > 0")
    # Not to the last bit: vectorised powers and logarithms differ in it from place to place.
    for other, same in ((f(grid[::7]), values[::7]), (f(grid.flip(0)).flip(0), values)):
        if not torch.allclose(other, same, rtol=1e-9, atol=1e-12):
            raise ValueError(
                "the divergence's f is not elementwise: what it gives for one number depends on the others"
            )
    wide = torch.logspace(-300, 300, 1201, dtype=torch.float64)
    if bool(torch.isnan(f(wide)).any()):
        worst = wide[torch.isnan(f(wide))][0].item()
        raise ValueError(f"the divergence's f is NaN at u = {worst:.3g}; infinite is allowed there, undefined is not")
    at_one = f(torch.ones(1, dtype=torch.float64)).item()
    if abs(at_one) > 1e-12:
        raise ValueError(
            f"an f-divergence needs f(1) = 0, so that a distribution is at distance 0 from itself; f(1) = {at_one:.3g}"
        )
    slopes = values.diff() / grid.diff()
    bend = slopes.diff()
    scale = torch.maximum(slopes[1:].abs(), slopes[:-1].abs()) + values[1:-1].abs() / grid[1:-1]
    if bool((bend < -1e-9 * (scale + 1e-12)).any()):
        where = grid[1:-1][bend < -1e-9 * (scale + 1e-12)][0].item()
        raise ValueError(f"the divergence's f is not convex: its slope falls at u = {where:.3g}")
    below, above = f(torch.tensor([0.5, 1.5], dtype=torch.float64)).tolist()
    if below + above <= 1e-12:
        raise ValueError(
            "the divergence's f is a straight line around 1, so that it tells no distribution from another"
        )
