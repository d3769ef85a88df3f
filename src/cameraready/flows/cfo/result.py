"""What a run of rounds leaves behind: a record of each, and the networks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cameraready.flows.cfo.lagrangian import AugmentedLagrangian, Update
from cameraready.flows.cfo.objective import Objective, Scores


@dataclass(frozen=True)
class Round:
    """What is known after a round; round 0 is the pretrained model. Lists have one number for each constraint.

    Attributes
    ----------
    round : int
    reward, reward_error : float
        Mean reward of fresh samples, and its standard error.
    constraint, gap, gap_error : list of float
        E[c], G = E[c] - B, and the standard error of both.
    gap_low, gap_high : list of float
        95 % normal interval of G.
    divergence : float
        Estimate of KL to the pretrained model, in nats.
    within : float
        Share of samples that meet every bound by themselves.
    multiplier, penalty, contraction : list of float
        lambda and rho of the round, and V. Empty for round 0.
    at_floor, at_cap : bool
        Whether, after the round, a multiplier lies at `lambda_min`, and a penalty at `rho_max`.
    samples, masked : int
        Samples drawn for these estimates, and those of them with a reward or constraint that is not finite.
    feasible : bool
        Whether no G lies more than `slack` standard errors above 0.
    solver : dict
        Numbers that the inner solver told.
    """

    round: int
    reward: float
    reward_error: float
    constraint: list[float]
    gap: list[float]
    gap_error: list[float]
    divergence: float
    within: float
    samples: int
    masked: int
    feasible: bool
    multiplier: list[float] = field(default_factory=list)
    penalty: list[float] = field(default_factory=list)
    contraction: list[float] = field(default_factory=list)
    at_floor: bool = False
    at_cap: bool = False
    solver: dict[str, float] = field(default_factory=dict)

    @property
    def gap_low(self) -> list[float]:
        return [g - 1.96 * e for g, e in zip(self.gap, self.gap_error, strict=True)]

    @property
    def gap_high(self) -> list[float]:
        return [g + 1.96 * e for g, e in zip(self.gap, self.gap_error, strict=True)]

    def __str__(self) -> str:
        def row(values: list[float]) -> str:
            return ", ".join(f"{v:.4g}" for v in values)

        text = f"round {self.round}: reward {self.reward:.4g}, E[c] - B {row(self.gap)} (+- {row([1.96 * e for e in self.gap_error])}), KL {self.divergence:.3g}"
        if self.multiplier:
            text += f", lambda {row(self.multiplier)}, rho {row(self.penalty)}"
        return text + (f", {self.masked} of {self.samples} samples masked" if self.masked else "")


@dataclass
class CFOResult:
    """The end of a run.

    Attributes
    ----------
    model : Any
        The network after the last round, of the class, dtype and mode of the one given; of a model described by `velocity_of` and the like, the network
        inside: to draw from it describe it again, ``sample(from_torchcfm(found.model), noise, steps=20)``.
    status : {"feasible", "not feasible within budget", "infeasible bound"}
        Of the last round. ``"infeasible bound"``: it is violated, lambda is at its floor and rho at its cap, so that nothing is left to raise.
    stopped : str
        Why it ended: ``"all rounds"`` or ``"converged"``.
    history : list of Round
        All rounds.
    pretrained : Round
        The model before.
    best_feasible : Round or None
        Of the feasible rounds the one with the highest E[r] - alpha KL (E[r] where KL is not estimated); its network is ``model_of(best_feasible)``.
    lagrangian : AugmentedLagrangian
        Multipliers as they would go on.
    slack : float
        Standard errors above 0 at which G still counts as feasible.
    """

    model: Any
    status: str
    stopped: str
    history: list[Round]
    pretrained: Round
    best_feasible: Round | None
    lagrangian: AugmentedLagrangian
    slack: float
    _states: dict[int, dict[str, Tensor]] = field(repr=False)
    _restore: Callable[[dict[str, Tensor]], Any] = field(repr=False)

    def model_of(self, round: Round | int) -> Any:
        """The network as it was after a round (0 is the pretrained one); of the class, dtype and mode of the one given."""
        number = round.round if isinstance(round, Round) else round
        if number not in self._states:
            raise ValueError(f"there is no network of round {number}; rounds kept: {sorted(self._states)}")
        return self._restore(self._states[number])

    def __str__(self) -> str:
        lines = [
            f"{self.status} after {len(self.history)} rounds ({self.stopped})",
            str(self.pretrained),
            *map(str, self.history),
        ]
        best = "none was feasible" if self.best_feasible is None else f"best feasible: round {self.best_feasible.round}"
        best += f" (feasible: E[c] - B at most {self.slack:g} standard errors above 0)"
        return "\n".join([*lines, best])


def settled(each: Round) -> bool:
    """Whether every G is nought to two standard errors (or to rounding), or below with nothing to pay for it."""
    tolerances = (max(2 * error, 1e-6) for error in each.gap_error)
    triples = zip(each.gap, tolerances, each.multiplier, strict=True)
    return all(abs(gap) <= most or (gap < 0 and multiplier == 0) for gap, most, multiplier in triples)


def status_of(last: Round) -> str:
    if last.feasible:
        return "feasible"
    return "infeasible bound" if last.at_floor and last.at_cap else "not feasible within budget"


def scored(objective: Objective, x: Tensor, piece: int = 4096) -> Scores:
    """Scores of samples, piece by piece, without a graph."""
    with torch.no_grad():
        parts = [objective.scores(part) for part in x.split(piece)]
    return Scores(*(torch.cat([getattr(part, name) for part in parts]) for name in ("reward", "constraint", "valid")))


def round_of(
    number: int,
    scores: Scores,
    weights: Tensor | None,
    bound: Tensor,
    slack: float,
    *,
    divergence: float = 0.0,
    update: Update | None = None,
    told: dict[str, float] | None = None,
) -> Round:
    valid, n = scores.valid.cpu(), int(scores.valid.sum())
    if n == 0:
        raise FloatingPointError(
            f"the reward or the constraint is NaN or infinite in all {len(valid)} samples of round {number}; look at what the model draws"
        )
    reward, constraint = scores.reward.cpu(), scores.constraint.cpu()
    share = valid.double() if weights is None else torch.where(valid, weights.cpu(), 0.0)
    share = share / share.sum()
    mean = share @ constraint
    reward_error, gap_error = 0.0, torch.zeros_like(mean)
    if weights is None:
        reward_error = float(reward[valid].std() / math.sqrt(n)) if n > 1 else math.inf
        gap_error = constraint[valid].std(0) / math.sqrt(n) if n > 1 else torch.full_like(mean, torch.inf)
    gap = mean - bound
    of_update: dict[str, Any] = {}
    if update is not None:
        of_update = {name: getattr(update, name).tolist() for name in ("multiplier", "penalty", "contraction")}
        of_update |= {"at_floor": bool(update.at_floor.any()), "at_cap": bool(update.at_cap.any())}
    return Round(
        round=number,
        reward=float(share @ reward),
        reward_error=reward_error,
        constraint=mean.tolist(),
        gap=gap.tolist(),
        gap_error=gap_error.tolist(),
        divergence=float(divergence),
        within=float((share * (constraint <= bound).all(-1)).sum()),
        samples=len(valid),
        masked=scores.masked,
        feasible=bool(torch.isfinite(gap_error).all())
        and bool((gap <= slack * gap_error + 1e-6 * bound.abs().clamp(min=1.0)).all()),
        solver={key: float(value) for key, value in (told or {}).items()},
        **of_update,
    )
