"""What a solver is asked to raise: rewards and constraints of samples, evaluated, masked, combined, differentiated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

#: A reward or constraint: samples (B, ...) to numbers (B,), or (B, m) for m constraints. Arrays and lists are taken too.
Score = Callable[[Tensor], Any]

ZERO_ORDER = "take a solver that needs no gradients, such as cameraready.flows.cfo.NFT"


@dataclass(frozen=True)
class Scores:
    """Rewards and constraints of samples, in float64.

    Attributes
    ----------
    reward : Tensor of shape (*runs, B)
    constraint : Tensor of shape (*runs, B, m)
    valid : BoolTensor of shape (*runs, B)
        Where both are finite; elsewhere they hold 0.
    """

    reward: Tensor
    constraint: Tensor
    valid: Tensor

    @property
    def masked(self) -> int:
        """How many samples had a reward or constraint that is not finite."""
        return int((~self.valid).sum())


@dataclass(frozen=True)
class Gradient:
    """The objective's gradient in each sample, like the samples; zero where `valid` is false."""

    value: Tensor
    gradient: Tensor
    scores: Scores


class Objective:
    """A reward less something that depends on constraints: what inner solvers raise.

    A solver calls `reward` (values alone, of black boxes too) or `gradient` (first order). Subclasses say how the two are combined.

    Parameters
    ----------
    reward : callable, optional
        Samples of shape (B, ...) to rewards of shape (B,); None is zero, for constrained generation.
    constraint : callable or sequence of callables
        Samples to (B,), or (B, m) for m constraints at once.
    count : int
        How many constraints, m.
    runs : tuple of int
        Leading axes of samples for models that are trained side by side; samples then have shape (*runs, B, ...).
    """

    def __init__(
        self, reward: Score | None, constraint: Score | Sequence[Score], count: int, runs: tuple[int, ...] = ()
    ) -> None:
        many = isinstance(constraint, Sequence)
        self.reward_of, self.constraints_of = reward, tuple(constraint) if many else (constraint,)
        for name, each in [("reward", reward), *(("constraint", each) for each in self.constraints_of)]:
            if not callable(each) and not (name == "reward" and each is None):
                raise TypeError(f"the {name} must be a function of samples, got {type(each).__name__}")
        if many and len(self.constraints_of) != count:
            raise ValueError(f"there are {len(self.constraints_of)} constraints and {count} bounds")
        self.count, self.runs = count, tuple(runs)
        self._proven = False

    # --- values ------------------------------------------------------------------------------------------------------

    def scores(self, x: Tensor) -> Scores:
        """Rewards and constraints of samples (*runs, B, ...), checked and masked. Gradients flow where they can."""
        scored = [each for each in (self.reward_of, *self.constraints_of) if isinstance(each, nn.Module)]
        modes = {module: module.training for each in scored for module in each.modules()}
        for module in modes:
            module.training = False
        try:
            reward = self._numbers("reward", self.reward_of, x) if self.reward_of else self._zeros(x)
            parts = [self._numbers("constraint", each, x) for each in self.constraints_of]
        finally:  # each module has a mode of its own: one frozen inside a training one stays frozen
            for module, mode in modes.items():
                module.training = mode
        parts = [part.unsqueeze(-1) if part.ndim == len(self.runs) + 1 else part for part in parts]
        constraint = torch.cat(parts, -1)
        if constraint.shape[-1] != self.count:
            raise ValueError(f"there are {constraint.shape[-1]} constraints and {self.count} bounds")
        valid = torch.isfinite(reward) & torch.isfinite(constraint).all(-1)
        reward = torch.where(valid, reward, 0.0)
        return Scores(reward, torch.where(valid.unsqueeze(-1), constraint, 0.0), valid)

    def combine(self, scores: Scores) -> Tensor:
        """The objective of each sample, shape (*runs, B), float64."""
        raise NotImplementedError

    def reward(self, x: Tensor) -> Tensor:
        """The objective of each sample, shape (*runs, B), float64: a reward for any trainer.

        Samples whose reward or constraint is not finite get the lowest value of the others, so that a trainer learns to avoid them.
        """
        scores = self.scores(x)
        return self.filled(self.combine(scores), scores.valid)

    def filled(self, value: Tensor, valid: Tensor) -> Tensor:
        """`value` with the lowest valid one in place of those masked."""
        if bool(valid.all()):
            return value
        self._check_any(valid)
        lowest = torch.where(valid, value, torch.inf).amin(-1, keepdim=True).detach()
        return torch.where(valid, value, lowest)

    # --- gradients ---------------------------------------------------------------------------------------------------

    def gradient(self, x: Tensor) -> Gradient:
        """Gradient of the objective in each sample by itself (the sum over samples is differentiated, not their mean).

        Raises
        ------
        ValueError
            Reward or constraint has no gradient in the samples; the sentence says which, and what to do.
        """
        leaf = x.detach().clone().requires_grad_(True)
        with torch.enable_grad():
            scores = self.scores(leaf)
            self._check_any(scores.valid)
            if not self._proven:
                self._prove(leaf, scores)
            value = self.combine(scores)
            (gradient,) = torch.autograd.grad(value.sum(), leaf, allow_unused=True)
        gradient = torch.zeros_like(leaf) if gradient is None else gradient
        event = leaf.ndim - scores.valid.ndim
        finite = torch.isfinite(gradient.flatten(scores.valid.ndim - 0) if event else gradient.unsqueeze(-1)).all(-1)
        valid = scores.valid & finite
        self._check_any(valid)
        mask = valid.reshape(*valid.shape, *[1] * event)
        kept = Scores(scores.reward.detach(), scores.constraint.detach(), valid)
        return Gradient(value.detach(), torch.where(mask, gradient, 0.0), kept)

    def _prove(self, leaf: Tensor, scores: Scores) -> None:
        """Raise a ValueError unless reward and constraints can be differentiated; asked once."""
        parts = [
            (f"constraint {i}" if self.count > 1 else "constraint", scores.constraint[..., i])
            for i in range(self.count)
        ]
        if self.reward_of is not None:
            parts.insert(0, ("reward", scores.reward))
        for name, part in parts:
            found = None
            if part.requires_grad:
                (found,) = torch.autograd.grad(part.sum(), leaf, retain_graph=True, allow_unused=True)
            if found is None:
                raise ValueError(
                    f"the {name} has no gradient in the samples (it leaves torch, or detaches, or compares), and this solver needs "
                    f"one: {ZERO_ORDER}"
                )
            values = part.detach()[scores.valid]
            if not bool((found != 0).any()) and values.numel() > 1 and float(values.std()) > 0:
                raise ValueError(
                    f"the {name} differs from sample to sample, and yet its gradient is zero in all of them, as of a function in "
                    f"steps; this solver needs a gradient: {ZERO_ORDER}"
                )
        self._proven = True

    # --- checks ------------------------------------------------------------------------------------------------------

    def _zeros(self, x: Tensor) -> Tensor:
        return torch.zeros(x.shape[: len(self.runs) + 1], dtype=torch.float64, device=x.device)

    def _numbers(self, name: str, score: Score, x: Tensor) -> Tensor:
        found = score(x)
        if not isinstance(found, Tensor):
            found = torch.as_tensor(found)
        lead = tuple(x.shape[: len(self.runs) + 1])
        allowed = tuple(found.shape) == lead or (
            name == "constraint" and found.ndim == len(lead) + 1 and tuple(found.shape[:-1]) == lead
        )
        if not allowed:
            more = f" or {(*lead, self.count)}" if name == "constraint" else ""
            raise ValueError(
                f"the {name} of samples of shape {tuple(x.shape)} must be one number each, shape {lead}{more}, got {tuple(found.shape)}"
            )
        return found.to(device=x.device, dtype=torch.float64)

    @staticmethod
    def _check_any(valid: Tensor) -> None:
        empty = ~valid.any(-1)
        if bool(empty.any()):
            raise FloatingPointError(
                f"the reward or the constraint is NaN or infinite in all {valid.shape[-1]} samples of a batch, so there is nothing to learn "
                "from; look at what the model draws"
            )


class FixedWeights(Objective):
    """The reward less fixed weights times the constraints: what most people do, r(x) - weight (c(x) - bound).

    Its optimum under a KL penalty alpha is the law that CFO looks for, if the weight happens to be the right one; the weight is found by trying.

    Parameters
    ----------
    reward, constraint, runs
        As of `Objective`.
    bound, weight : float or sequence of float
        Of each constraint; weights are at least 0.
    """

    def __init__(
        self,
        reward: Score | None,
        constraint: Score | Sequence[Score],
        bound: float | Sequence[float] | Tensor,
        weight: float | Sequence[float] | Tensor,
        *,
        runs: tuple[int, ...] = (),
    ) -> None:
        self.bound = torch.as_tensor(bound, dtype=torch.float64).reshape(-1)
        super().__init__(reward, constraint, self.bound.shape[-1], runs)
        weights = torch.as_tensor(weight, dtype=torch.float64)
        self.weight = weights.unsqueeze(-1) if weights.ndim == 0 else weights
        if not bool(torch.isfinite(self.weight).all() and (self.weight >= 0).all()):
            raise ValueError(f"weights must be finite and at least 0, got {weight}")

    def combine(self, scores: Scores) -> Tensor:
        over = scores.constraint - self.bound.to(scores.constraint.device)
        return scores.reward - (self.weight.to(over.device).unsqueeze(-2) * over).sum(-1)
