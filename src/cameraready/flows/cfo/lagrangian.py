"""The outer loop's state: multipliers and penalties that turn a bound on E[c] into a sequence of rewards."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from cameraready.flows.cfo.objective import Objective, Score, Scores

Penalty = Literal["per_sample", "expectation"]
Contraction = Literal["paper", "textbook"]


@dataclass(frozen=True)
class Update:
    """One step of the multipliers; every tensor has shape (*runs, m), float64.

    Attributes
    ----------
    round : int
        From 1.
    mean, gap, standard_error : Tensor
        Estimates of E[c] and G = E[c] - B, and the standard error of both (0 where expectations are exact).
    contraction : Tensor
        V, of the multiplier and penalty before the step.
    multiplier, penalty : Tensor
        lambda and rho that the round was run with.
    next_multiplier, next_penalty : Tensor
        Those of the next round.
    at_floor, at_cap : BoolTensor
        Whether lambda was stopped by `lambda_min`, and rho by `rho_max`.
    used, masked : int
        Samples that counted, and those left out because c was not finite.
    """

    round: int
    mean: Tensor
    gap: Tensor
    standard_error: Tensor
    contraction: Tensor
    multiplier: Tensor
    penalty: Tensor
    next_multiplier: Tensor
    next_penalty: Tensor
    at_floor: Tensor
    at_cap: Tensor
    used: int
    masked: int

    def interval(self, z: float = 1.96) -> tuple[Tensor, Tensor]:
        """Normal confidence interval of G, each end of shape (*runs, m)."""
        return self.gap - z * self.standard_error, self.gap + z * self.standard_error


class AugmentedLagrangian(Objective):
    r"""A bound on E[c] as a reward that any trainer can raise, with multipliers that learn how much the bound costs.

    With lambda <= 0 (a textbook's multiplier is -lambda) and s = c - B - lambda / rho, the reward of a round is

    - ``penalty="per_sample"``, the paper's: f(x) = r(x) - sum_i rho_i / 2 max(0, s_i(x))^2. Its optimum squeezes every sample above the shifted bound, also where
      E[c] is below B already, and so is in general not the law that the constrained problem asks for; the less so, the smaller rho.
    - ``"expectation"``, what the authors' code evaluates: E[r] - sum_i rho_i / 2 max(0, E[s_i])^2. Its derivative in the law is r(x) - mu . c(x) with
      mu_i = max(0, rho_i (E[c_i] - B_i) - lambda_i), E over the batch at hand, and the rounds converge to the constrained optimum.

    After a round ``update`` moves lambda by -rho (E[c] - B) into [lambda_min, 0], and rho grows by `eta` unless V has contracted by `tau`.

    Use it with `ConstrainedFlowOptimizer`, or alone: hand `reward` (or `gradient`) to a trainer of your own, draw fresh samples, `update`. Not for bounds that
    every single sample must obey: only the mean is held.

    Parameters
    ----------
    reward, constraint, runs
        As of `Objective`.
    bound : float or sequence of float
        B, one of each constraint.
    rho : float or sequence of float
        rho_1 > 0.
    multiplier : float or sequence of float
        lambda_1, from `lambda_min` to 0.
    eta : float
        Growth of rho, at least 1.
    tau : float
        By how much V must shrink for rho to stay, above 0 and below 1.
    lambda_min : float
        Floor of lambda, below 0.
    rho_max : float
        Cap of rho. Large penalties make gradients of the per-sample form stiff.
    penalty : {"per_sample", "expectation"}
    contraction : {"paper", "textbook"}
        ``"paper"``: V = min(G, -lambda / rho), and rho stays if V_k < tau V_(k-1). From lambda_1 = 0 and a violated bound V_1 = 0, so that rho grows in round 2
        whatever happens. ``"textbook"``: V = min(-G, -lambda / rho), and rho stays if abs(V_k) <= tau abs(V_(k-1)), which is Birgin and Martinez's test.

    Raises
    ------
    ValueError, TypeError
        A sentence that says which argument is out of range.

    References
    ----------
    Gutjahr, De Santi, Schaufelberger, Jorner and Krause, 2026, arXiv:2605.30610, Alg. 1. Birgin and Martinez, 2014, Practical Augmented Lagrangian Methods for
    Constrained Optimization, Alg. 4.1.

    Examples
    --------
    >>> import torch
    >>> lagrangian = AugmentedLagrangian(lambda x: x[:, 0], lambda x: x[:, 0] ** 2, bound=1.0)
    >>> lagrangian.reward(torch.tensor([[0.5], [2.0]])).tolist()  # 2 - 0.5 / 2 * (4 - 1)^2
    [0.5, -0.25]
    >>> lagrangian.update(torch.tensor([4.0, 0.0])).next_multiplier.tolist()
    [-0.5]
    """

    def __init__(
        self,
        reward: Score | None,
        constraint: Score | Sequence[Score],
        bound: float | Sequence[float] | Tensor,
        *,
        rho: float | Sequence[float] = 0.5,
        multiplier: float | Sequence[float] = 0.0,
        eta: float = 1.25,
        tau: float = 0.99,
        lambda_min: float = -10.0,
        rho_max: float = 1e4,
        penalty: Penalty = "per_sample",
        contraction: Contraction = "paper",
        runs: tuple[int, ...] = (),
    ) -> None:
        self.bound = _vector("bound", bound)
        count = self.bound.shape[0]
        super().__init__(reward, constraint, count, runs)
        if penalty not in get_args(Penalty):
            raise ValueError(f"penalty must be 'per_sample' or 'expectation', got {penalty!r}")
        if contraction not in get_args(Contraction):
            raise ValueError(f"contraction must be 'paper' or 'textbook', got {contraction!r}")
        if not (math.isfinite(eta) and eta >= 1):
            raise ValueError(f"eta must be at least 1, got {eta!r}")
        if not 0 < tau < 1:
            raise ValueError(f"tau must be above 0 and below 1, got {tau!r}")
        if not (math.isfinite(lambda_min) and lambda_min < 0):
            raise ValueError(f"lambda_min must be below 0 (multipliers are at most 0 here), got {lambda_min!r}")
        self.eta, self.tau, self.lambda_min, self.rho_max = float(eta), float(tau), float(lambda_min), float(rho_max)
        self.penalty_form: Penalty = penalty
        self.contraction_test: Contraction = contraction
        shape = (*self.runs, count)
        self.penalty = _expanded("rho", _vector("rho", rho), shape)
        self.multiplier = _expanded("multiplier", _vector("multiplier", multiplier), shape)
        self._check_ranges(self.multiplier, self.penalty)
        self.contraction = torch.full(shape, torch.nan, dtype=torch.float64)
        self.round = 0

    def _check_ranges(self, multiplier: Tensor, penalty: Tensor) -> None:
        if not bool(((penalty > 0) & (penalty <= self.rho_max)).all()):
            raise ValueError(f"rho must be above 0 and at most rho_max={self.rho_max:g}, got {penalty.tolist()}")
        if not bool(((multiplier <= 0) & (multiplier >= self.lambda_min)).all()):
            raise ValueError(
                f"multipliers must lie between lambda_min={self.lambda_min:g} and 0 (a textbook's multiplier with its sign changed), got {multiplier.tolist()}"
            )

    def __repr__(self) -> str:
        return (
            f"AugmentedLagrangian(bound={self.bound.tolist()}, penalty={self.penalty_form!r}, round={self.round}, "
            f"multiplier={self.multiplier.tolist()}, rho={self.penalty.tolist()})"
        )

    # --- the reward of a round -----------------------------------------------------------------------------------------

    def combine(self, scores: Scores) -> Tensor:
        """f of each sample, shape (*runs, B), float64; of the expectation form its derivative in the law, r - mu . (c - B)."""
        device = scores.reward.device
        bound, multiplier, rho = (each.to(device) for each in (self.bound, self.multiplier, self.penalty))
        over = scores.constraint - bound
        if self.penalty_form == "per_sample":
            shifted = torch.clamp(over - (multiplier / rho).unsqueeze(-2), min=0.0)
            return scores.reward - 0.5 * (rho.unsqueeze(-2) * shifted.square()).sum(-1)
        price = self.price(_mean(scores.constraint.detach(), scores.valid)).to(device)
        return scores.reward - (price.unsqueeze(-2) * over).sum(-1)

    def price(self, mean: Tensor) -> Tensor:
        """mu = max(0, rho (E[c] - B) - lambda), what a unit of c costs in the expectation form; `mean` and the result (*runs, m)."""
        over = mean.to(device="cpu", dtype=torch.float64) - self.bound
        return torch.clamp(self.penalty * over - self.multiplier, min=0.0)

    # --- the step between rounds ----------------------------------------------------------------------------------------

    def update(self, constraint: Any, *, weights: Any = None, valid: Tensor | None = None) -> Update:
        """Move lambda and rho by what fresh samples of the round's model say of E[c].

        Parameters
        ----------
        constraint : array of shape (*runs, n) or (*runs, n, m)
            c of samples drawn for this purpose (those that the model was trained on are older). What is not finite is left out and counted.
        weights : array of shape (*runs, n), optional
            Probabilities, where the expectation is known exactly: the standard error is then 0.
        valid : BoolTensor of shape (*runs, n), optional
            Which samples count at all.

        Raises
        ------
        ValueError
            The shape is wrong, or no sample is left.
        """
        c = torch.as_tensor(constraint).detach().to(device="cpu", dtype=torch.float64)
        lead = len(self.runs) + 1
        c = c.unsqueeze(-1) if c.ndim == lead and self.count == 1 else c
        if c.ndim != lead + 1 or c.shape[-1] != self.count or tuple(c.shape[: lead - 1]) != self.runs:
            raise ValueError(
                f"constraints must have shape {(*self.runs, 'n', self.count)}, one row a sample, got {tuple(c.shape)}"
            )
        usable = torch.isfinite(c).all(-1)
        if valid is not None:
            usable &= valid.to("cpu")
        if not bool(usable.any(-1).all()):
            raise ValueError("no sample has a finite constraint, so E[c] cannot be estimated")
        c = torch.where(usable.unsqueeze(-1), c, 0.0)
        if weights is None:
            n = usable.sum(-1, keepdim=True).to(torch.float64)
            mean = _mean(c, usable)
            spread = torch.where(usable.unsqueeze(-1), (c - mean.unsqueeze(-2)).square(), 0.0).sum(-2)
            # Of one sample nothing is known of the spread.
            error = torch.where(n > 1, (spread / (n - 1).clamp(min=1) / n).sqrt(), torch.inf)
        else:
            given = torch.as_tensor(weights).to(device="cpu", dtype=torch.float64)
            if given.shape != usable.shape or not bool((given >= 0).all()) or not bool(torch.isfinite(given).all()):
                raise ValueError(
                    f"weights must be finite and at least 0, one of each sample, shape {tuple(usable.shape)}, got shape {tuple(given.shape)}"
                )
            w = torch.where(usable, given, 0.0).unsqueeze(-1)
            if not bool((w.sum(-2) > 0).all()):
                raise ValueError("all samples with a finite constraint have weight 0, so E[c] cannot be estimated")
            mean = (w * c).sum(-2) / w.sum(-2)
            error = torch.zeros_like(mean)
        return self._step(mean, error, int(usable.sum()), int((~usable).sum()))

    def _step(self, mean: Tensor, error: Tensor, used: int, masked: int) -> Update:
        gap, before, rho = mean - self.bound, self.multiplier, self.penalty
        slack = -before / rho
        if self.contraction_test == "paper":
            contraction = torch.minimum(gap, slack)
            stays = contraction < self.tau * self.contraction
        else:
            contraction = torch.minimum(-gap, slack)
            stays = contraction.abs() <= self.tau * self.contraction.abs()
        if self.round == 0:
            stays = torch.ones_like(stays)
        wanted = before - rho * gap
        after = wanted.clamp(min=self.lambda_min, max=0.0)
        grown = torch.where(stays, rho, self.eta * rho)
        capped = grown.clamp(max=self.rho_max)
        self.round += 1
        self.multiplier, self.penalty, self.contraction = after, capped, contraction
        return Update(
            round=self.round,
            mean=mean,
            gap=gap,
            standard_error=error,
            contraction=contraction,
            multiplier=before,
            penalty=rho,
            next_multiplier=after,
            next_penalty=capped,
            at_floor=wanted <= self.lambda_min,
            at_cap=grown >= self.rho_max,
            used=used,
            masked=masked,
        )

    # --- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Multipliers, penalties, the last V and the round, as lists of float64 that JSON keeps exactly."""
        return {
            "round": self.round,
            "multiplier": self.multiplier.tolist(),
            "penalty": self.penalty.tolist(),
            "contraction": [None if v != v else v for v in self.contraction.flatten().tolist()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned.

        Raises
        ------
        ValueError
            A key is missing, or the state is of another number of constraints.
        """
        missing = {"round", "multiplier", "penalty", "contraction"} - set(state)
        if missing:
            raise ValueError(f"the state lacks {', '.join(sorted(missing))}")
        shape = self.multiplier.shape
        loaded = {key: torch.as_tensor(state[key], dtype=torch.float64) for key in ("multiplier", "penalty")}
        values = [math.nan if v is None else float(v) for v in state["contraction"]]
        for key, found in [
            *((key, tuple(each.shape)) for key, each in loaded.items()),
            ("contraction", (len(values),)),
        ]:
            wanted = (math.prod(shape),) if key == "contraction" else tuple(shape)
            if found != wanted:
                raise ValueError(f"{key} of the state has shape {found}, and here it is {wanted}")
        self._check_ranges(loaded["multiplier"], loaded["penalty"])
        if int(state["round"]) < 0:
            raise ValueError(f"the round of the state must be at least 0, got {state['round']}")
        self.contraction = torch.tensor(values, dtype=torch.float64).reshape(shape)
        self.round, self.multiplier, self.penalty = int(state["round"]), loaded["multiplier"], loaded["penalty"]


def _mean(c: Tensor, valid: Tensor) -> Tensor:
    """Means over samples that count: c (..., B, m), valid (..., B), result (..., m)."""
    return (c * valid.unsqueeze(-1)).sum(-2) / valid.sum(-1, keepdim=True).clamp(min=1)


def _expanded(name: str, value: Tensor, shape: tuple[int, ...]) -> Tensor:
    if value.numel() not in (1, shape[-1]):
        raise ValueError(
            f"{name} must be one number, or one of each of the {shape[-1]} constraints, got {value.numel()}"
        )
    return value.expand(shape).clone()


def _vector(name: str, value: Any) -> Tensor:
    if isinstance(value, str | bool):
        raise TypeError(f"{name} must be a number or a sequence of numbers, got {value!r}")
    found = torch.as_tensor(value, dtype=torch.float64).reshape(-1)
    if found.numel() == 0 or not bool(torch.isfinite(found).all()):
        raise ValueError(f"{name} must be finite, one number or one of each constraint, got {value!r}")
    return found
