"""`band_bounds`: how far the probability ratio of a sampled token may move, given the token's old probability and a divergence."""

from __future__ import annotations

import math
from numbers import Real
from typing import Literal

import torch
from torch import Tensor

from cameraready.posttraining.bandpo.divergences import (
    SMALLEST_LOG,
    Divergence,
    check_convex,
    chi2_ratios,
    convex_ratios,
    kl_ratios,
    tv_ratios,
)

Solver = Literal["newton", "bisect", "table"]
#: Log-probabilities up to here above zero are rounding of a log-softmax and count as 0; beyond it they are somebody's mistake.
ROUNDING = 1e-3
#: The generators of the named divergences, as `solver="bisect"` uses them.
GENERATORS = {
    "kl": lambda u: -torch.log(u) + u - 1.0,
    "tv": lambda u: (u - 1.0).abs() / 2.0,
    "chi2": lambda u: (u - 1.0) ** 2,
}


def band_bounds(
    old_logps: Tensor,
    *,
    divergence: Divergence = "kl",
    delta: float = 0.05,
    max_ratio: float | None = 10.0,
    solver: Solver = "newton",
    relax: tuple[float, float] | None = None,
    validate: bool = True,
) -> tuple[Tensor, Tensor]:
    """Lower and upper bound on the ratio pi_new / pi_old of each sampled token.

    The bounds are the extreme ratios that any new distribution over the vocabulary can give the token while D_f(old || new) <= delta at that
    position. They are wide for improbable tokens and tight for probable ones, and never leave the simplex (p * upper <= 1), where a fixed
    clip 1 + eps allows any token the same relative change. For KL the direction is KL(old || new); the reverse has other bounds.

    Parameters
    ----------
    old_logps : Tensor, any shape, floating point
        Log-probabilities (nats) of the sampled tokens under the policy that sampled them, at the sampling temperature. -inf counts as
        probability 0. Values up to 1e-3 above 0 count as 0. Mask padding beforehand (any number in [-inf, 0] will do there).
    divergence : {"kl", "tv", "chi2"} or callable
        KL(old || new), total variation, Pearson's chi-square, or a convex function f with f(1) = 0, elementwise on float64 tensors, for
        sum_i old_i f(new_i / old_i). A callable is taken to stay the same, and its
        table is made once: pass the same object each time.
    delta : float
        Radius of the ball, nats for KL. 0 gives both bounds 1 (nothing may move).
    max_ratio : float or None
        Cap on the upper bound, at least 1. With KL and delta = 0.05 the paper's cap of 10 binds for p below about 0.0071: what happens to the
        rarest tokens is the cap's doing. None leaves it away.
    solver : {"newton", "bisect", "table"}
        ``"newton"``: exact to rounding in float64 (relative 1e-12; closed forms for "tv" and "chi2", bisection for a callable).
        ``"bisect"``: 64 halvings for every divergence, for checks. ``"table"``: interpolation in a table of 8,192 points made once, in the
        dtype of the result: for KL and delta from 1e-4 to 1 the upper bound, where it is below 1e10, is within a relative and the lower within
        an absolute 1e-5 (closed forms for "tv" and "chi2" in that dtype); `BandTable.tolerance` tells it for a callable, whose bounds may have kinks. It is the
        one for training.
    relax : (eps_low, eps_high) or None
        Widen the band to hold [1 - eps_low, 1 + eps_high] as well. The authors report that it hurts.
    validate : bool
        Look for NaN and for probabilities above one, which on an accelerator waits for the device.

    Returns
    -------
    lower, upper : Tensor, the shape and device of `old_logps`
        float64 for float64 input, else float32 (half precision cannot tell a bound from 1). No gradient flows through them. Always
        0 <= lower <= 1 <= upper <= max_ratio. (Called under `torch.inference_mode`, they cannot be used in a loss; `torch.no_grad` is fine.)

    Raises
    ------
    TypeError
        `old_logps` is not a floating-point tensor, or the device knows no float64 and the solver is not "table".
    ValueError
        NaN or positive log-probabilities, a negative or infinite delta, an unknown divergence or solver, an f that is no f-divergence's.

    Notes
    -----
    Linear in the number of tokens. Float32 log-probabilities say log p to a relative 6e-8, so that the bound of a token with p = 1e-6 is
    known to about 1e-6 relative. Near p = 1 the number itself is fine, but a float32 log-softmax carries an absolute error of about 1e-7:
    1 - p below that is noise, and bounds there (which lie within 1 - p of 1 above) with it. bfloat16 keeps three digits of log p.

    Use it wherever PPO or GRPO clip ratios by constants. It does nothing where each rollout is used for one step only, because no ratio
    has moved from 1 yet.

    References
    ----------
    Li et al., 2026, arXiv:2603.04918 (the Band operator).
    """
    check_ball(divergence, delta, max_ratio, relax)
    check_solver(solver)
    delta = float(delta)
    with torch.no_grad():
        log_p = _readable(old_logps, validate)
        if delta == 0:
            lower, upper = torch.ones_like(log_p), torch.ones_like(log_p)
        elif solver == "table":
            lower, upper = _tabulated(log_p, divergence, delta)
        else:
            lower, upper = _solved(log_p, divergence, delta, solver)
        return _limited(lower, upper, max_ratio, relax)


def check_ball(
    divergence: Divergence, delta: float, max_ratio: float | None, relax: tuple[float, float] | None = None
) -> None:
    """Raises ValueError for a divergence, radius, cap or relaxation that makes no band."""
    if not (_is_number(delta) and 0 <= delta < math.inf):
        raise ValueError(f"delta, the radius of the trust region, must be a finite number >= 0, got {delta!r}")
    if max_ratio is not None and not (_is_number(max_ratio) and 1 <= max_ratio < math.inf):
        raise ValueError(f"max_ratio caps the upper bound, which is never below 1; got {max_ratio!r} (None for no cap)")
    if relax is not None:
        pair = isinstance(relax, (tuple, list)) and len(relax) == 2 and all(_is_number(each) for each in relax)
        if not (pair and 0 <= relax[0] <= 1 and 0 <= relax[1] < math.inf):
            raise ValueError(f"relax must be (eps_low in [0, 1], eps_high >= 0), got {relax!r}")
    if callable(divergence):
        check_convex(divergence)
    elif not (isinstance(divergence, str) and divergence in GENERATORS):
        raise ValueError(f"divergence must be 'kl', 'tv', 'chi2' or a convex function, got {divergence!r}")


def check_solver(solver: str) -> None:
    """Raises ValueError for a solver that there is not."""
    if solver not in ("newton", "bisect", "table"):
        raise ValueError(f"solver must be 'newton', 'bisect' or 'table', got {solver!r}")


def _is_number(value: object) -> bool:
    # Integers have no largest one, floats have.
    return isinstance(value, Real) and not isinstance(value, bool) and not abs(value) > 1e300


def _readable(old_logps: Tensor, validate: bool) -> Tensor:
    """The log-probabilities as float32 or float64 in [SMALLEST_LOG, 0]."""
    if not isinstance(old_logps, Tensor) or not old_logps.is_floating_point():
        kind = old_logps.dtype if isinstance(old_logps, Tensor) else type(old_logps).__name__
        raise TypeError(f"old_logps must be a floating-point tensor of log-probabilities, got {kind}")
    log_p = old_logps.detach()
    log_p = log_p if log_p.dtype == torch.float64 else log_p.float()
    if validate and log_p.numel():
        if bool(torch.isnan(log_p).any()):
            raise ValueError("old_logps holds NaN; put 0 at masked positions, and look for the cause at the others")
        highest = log_p.max().item()
        if highest > ROUNDING:
            raise ValueError(
                f"old_logps holds {highest:.4g}, and a log-probability is at most 0; were probabilities or logits passed?"
            )
    return log_p.clamp(min=SMALLEST_LOG, max=0.0)


def _solved(log_p: Tensor, divergence: Divergence, delta: float, solver: Solver) -> tuple[Tensor, Tensor]:
    try:
        wide = log_p.double()
    except TypeError as error:
        raise TypeError(
            f"device {log_p.device} has no float64, which solver={solver!r} computes in; use solver='table'"
        ) from error
    if callable(divergence):
        lower, upper = convex_ratios(wide, delta, divergence)
    elif solver == "bisect":
        lower, upper = convex_ratios(wide, delta, GENERATORS[divergence])
    else:
        lower, upper = {"kl": kl_ratios, "tv": tv_ratios, "chi2": chi2_ratios}[divergence](wide, delta)
    return lower.to(log_p.dtype), upper.to(log_p.dtype)


def _tabulated(log_p: Tensor, divergence: Divergence, delta: float) -> tuple[Tensor, Tensor]:
    if divergence == "tv":
        return tv_ratios(log_p.clamp(min=BandTable.FLOOR), delta)
    if divergence == "chi2":
        return chi2_ratios(log_p.clamp(min=BandTable.FLOOR), delta)
    return band_table(divergence, delta)(log_p)


def _limited(
    lower: Tensor, upper: Tensor, max_ratio: float | None, relax: tuple[float, float] | None
) -> tuple[Tensor, Tensor]:
    if relax is not None:
        lower, upper = lower.clamp(max=1.0 - relax[0]), upper.clamp(min=1.0 + relax[1])
    return lower.clamp(0.0, 1.0), upper.clamp(1.0, max_ratio)


class BandTable:
    """The bounds of one divergence and radius, ready to be looked up: no root is solved for during training.

    The table is evenly spaced in sqrt(-log p), which is fine near p = 1, where the bounds bend, and interpolated linearly: the upper bound
    in its logarithm, the lower bound as it is. Below p = exp(-87), the smallest normal float32, the bounds are those of that p.

    Parameters
    ----------
    divergence : {"kl", "tv", "chi2"} or callable
    delta : float
    points : int

    Attributes
    ----------
    tolerance : (float, float)
        Largest absolute error of the lower bound, and relative error of the upper, at eighths of the
        distance between points.
    """

    FLOOR = -87.0

    def __init__(self, divergence: Divergence = "kl", delta: float = 0.05, points: int = 8192) -> None:
        check_ball(divergence, delta, None)
        if delta == 0 or not isinstance(points, int) or points < 2:
            raise ValueError(f"a table needs delta > 0 and a whole number of points >= 2, got {delta!r} and {points!r}")
        self.step = math.sqrt(-self.FLOOR) / (points - 1)
        # Eighths of the distance between points, to see how far off a straight line between them is, kinks included.
        places = torch.arange(8 * (points - 1) + 1, dtype=torch.float64) * (self.step / 8)
        exact = torch.stack(_solved(-(places**2), divergence, delta, "newton"))
        exact[1] = exact[1].log()
        knots = exact[:, ::8]
        ahead = torch.nn.functional.pad(knots.diff(dim=1), (0, 1))
        error = torch.zeros(2, dtype=torch.float64)
        for eighth in range(1, 8):
            between = knots[:, :-1] + ahead[:, :-1] * (eighth / 8)
            error = torch.maximum(error, (between - exact[:, eighth::8]).abs().amax(dim=1))
        self.tolerance = (error[0].item(), math.expm1(error[1].item()))
        # Each row holds both values and both steps to the next point, so that a token costs one look-up.
        self._rows = torch.cat([knots, ahead]).T.contiguous()
        self._placed: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def __call__(self, log_p: Tensor) -> tuple[Tensor, Tensor]:
        """Lower and upper bound without a cap, in the dtype (float32 or float64), on the device and in the shape of `log_p` (at most 0)."""
        key = (log_p.device, log_p.dtype)
        if key not in self._placed:
            self._placed[key] = self._rows.to(device=log_p.device, dtype=log_p.dtype)
        rows = self._placed[key]
        place = log_p.clamp(min=self.FLOOR).neg().sqrt_().div_(self.step)
        index = place.long().clamp_(0, len(rows) - 1)
        lower, upper, lower_step, upper_step = rows[index].unbind(-1)
        past = place - index
        return torch.addcmul(lower, past, lower_step), torch.addcmul(upper, past, upper_step).exp_()


#: Tables by divergence and radius; a callable is known by its identity, and kept so that it stays its own.
_TABLES: dict[tuple[str | int, float], tuple[Divergence, BandTable]] = {}


@torch.compiler.disable
def band_table(divergence: Divergence, delta: float) -> BandTable:
    """The table of a divergence and radius, made once; the last 32 are kept."""
    key = (divergence if isinstance(divergence, str) else id(divergence), delta)
    if key not in _TABLES:
        while len(_TABLES) >= 32:
            _TABLES.pop(next(iter(_TABLES)), None)
        _TABLES[key] = (divergence, BandTable(divergence, delta))
    return _TABLES[key][1]
