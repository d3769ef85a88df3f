"""TRL's GRPO trainer with the band in place of its constant clip, through its public hooks alone."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cameraready.posttraining._trl import NEWEST, OLDEST, import_trl
from cameraready.posttraining.bandpo.bounds import Solver, band_bounds, check_ball, check_solver
from cameraready.posttraining.bandpo.divergences import Divergence
from cameraready.posttraining.bandpo.loss import BUCKETS, clip_counts, shares

_GRPOTrainer: Any = import_trl().GRPOTrainer

#: TRL's losses in which each token's ratio is clipped from both sides.
LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo")
#: TRL's own epsilon; another one in a config was somebody's choice.
UNSET_EPSILON = 0.2
REPLACED = "The config has epsilon={} and epsilon_high={}, which the band replaces; its width is delta (and relax=(eps_low, eps_high) widens it)."
ON_POLICY = (
    "Each rollout is used for one optimizer step only, so that every ratio is 1 and no clip ever acts. Raise num_iterations, or "
    "steps_per_generation above gradient_accumulation_steps, for the band to matter."
)


class BandGRPOTrainer(_GRPOTrainer):
    """`trl.GRPOTrainer` whose clip is the band: bounds on each token's ratio by its old probability.

    While `compute_loss` runs, ``epsilon_low`` and ``epsilon_high`` are tensors, one number a token, made from the batch's own
    ``old_per_token_logps``; before and after they are the floats of the config. Everything else (rewards, advantages, aggregation,
    reference KL, vLLM) is TRL's. The config's ``delta``, TRL's two-sided clip, must be None or at least
    `max_ratio`, or it would cut the band.

    Parameters
    ----------
    *args, **kwargs
        As of `trl.GRPOTrainer`: model, reward_funcs, args, train_dataset ...
    divergence : {"kl", "tv", "chi2"}, callable or None
        As of `band_bounds`; None keeps TRL's clip by ``epsilon`` and ``epsilon_high``, and logs the same statistics of it; the
        other settings of the band are then unused.
    delta : float
        Radius of the ball; not the config's ``delta``, which is TRL's two-sided clip.
    max_ratio, relax
        As of `band_bounds`.
    solver : {"table", "newton", "bisect"}

    Raises
    ------
    ValueError
        A loss type in which there is no two-sided clip of token ratios (cispo, sapo, vespo, luspo), sequence-level importance sampling, the
        Liger kernel's loss, or a band that is none.
    ImportError
        TRL is not installed.

    Warns
    -----
    UserWarning
        When the config has an ``epsilon`` of its own, which the band replaces. When each rollout is used for one optimizer step only. TRL then keeps no old log-probabilities, every ratio is 1 and no clip, neither
        TRL's nor this one, ever acts; raise ``num_iterations`` or ``steps_per_generation``.

    Notes
    -----
    pi_old is the trainer's own model before the first step on a batch of rollouts, at the sampling temperature (TRL's
    ``old_per_token_logps``), not vLLM's. Logged beside TRL's ``clip_ratio/*``, averaged over tokens: ``band/clip_up``, ``band/clip_down``,
    ``band/kl`` (KL(old || new) per token, as it is before the
    step's update: 0 in the first step on a batch, and growing with each further one), and the clips by old probability, ``band/clip_up/p<=0.01`` and so on.

    References
    ----------
    Li et al., 2026, arXiv:2603.04918.
    """

    def __init__(
        self,
        *args: Any,
        divergence: Divergence | None = "kl",
        delta: float = 0.05,
        max_ratio: float | None = 10.0,
        relax: tuple[float, float] | None = None,
        solver: Solver = "table",
        **kwargs: Any,
    ) -> None:
        check_solver(solver)
        check_ball("kl" if divergence is None else divergence, delta, max_ratio, relax)
        # The config may be the third argument or absent, where TRL's default is fine.
        config = kwargs.get("args", args[2] if len(args) > 2 else None)
        if config is not None:
            _check_config(config)
            if divergence is not None:
                _check_two_sided(config.delta, max_ratio)
                if config.epsilon_high is not None or config.epsilon != UNSET_EPSILON:
                    warnings.warn(REPLACED.format(config.epsilon, config.epsilon_high), stacklevel=2)
        super().__init__(*args, **kwargs)
        self.divergence = divergence
        self._bounds: Callable[[Tensor], tuple[Tensor, Tensor]] = partial(
            band_bounds,
            divergence=divergence or "kl",
            delta=delta,
            max_ratio=max_ratio,
            relax=relax,
            solver=solver,
            validate=False,
        )
        self._counts: dict[str, Tensor] = {}
        if _is_on_policy(self.args):
            warnings.warn(ON_POLICY, stacklevel=2)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """TRL's loss of a batch, the band for its clip."""
        old, mask = inputs.get("old_per_token_logps"), inputs["completion_mask"]
        mask = (mask * inputs["tool_mask"] if "tool_mask" in inputs else mask).bool()
        if old is None:
            # TRL leaves them out where they are the current ones: every ratio is exactly 1, inside any band.
            loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            self._count(torch.zeros(len(BUCKETS) + 1, 4, device=mask.device), mask.sum())
            return loss
        known = old.masked_fill(~mask, 0.0)
        if self.divergence is None:
            below, above = torch.full_like(known, self.epsilon_low), torch.full_like(known, self.epsilon_high)
        else:
            lower, upper = self._bounds(known)
            below, above = 1 - lower, upper - 1
        ratios: list[Tensor] = []
        with self._clipping_at(_watched(below, ratios), _watched(above, ratios)):
            loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if not ratios:
            raise RuntimeError(
                f"TRL's loss did not clip its ratios with torch.clamp at epsilon_low and epsilon_high, so that the band had no effect; "
                f"this trainer was tested with TRL {OLDEST} to {NEWEST}"
            )
        with torch.no_grad():
            advantages = inputs["advantages"]
            advantages = (advantages[:, None] if advantages.dim() == 1 else advantages).expand_as(known)
            for ratio in ratios:
                new = known + ratio.to(known.dtype).masked_fill(~mask, 1.0).log()
                counts = clip_counts(new, known, advantages, mask, 1 - below, 1 + above)
                self._count(counts, mask.new_zeros((), dtype=torch.long))
        return loss

    @contextmanager
    def _clipping_at(self, below: Tensor, above: Tensor) -> Iterator[None]:
        """TRL clips at 1 - below and 1 + above meanwhile; its own epsilons come back whatever happens."""
        kept = self.epsilon_low, self.epsilon_high
        self.epsilon_low, self.epsilon_high = below, above
        try:
            yield
        finally:
            self.epsilon_low, self.epsilon_high = kept

    def _count(self, counts: Tensor, elsewhere: Tensor) -> None:
        """Add up clips over batches and processes; `elsewhere` is how many tokens have no old probability to be sorted by."""
        mode = "train" if self.model.training else "eval"
        counts = torch.cat([counts, counts.new_zeros(1, 4)])
        counts[-1, 0] = elsewhere
        counts = self.accelerator.reduce(counts, reduction="sum")
        self._counts[mode] = self._counts[mode] + counts if mode in self._counts else counts

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """TRL's log, with the clips since the last one."""
        mode = "train" if self.model.training else "eval"
        counts = self._counts.pop(mode, None)
        if counts is not None:
            prefix = "eval_" if mode == "eval" else ""
            logs = {**logs, **{prefix + name: value for name, value in _named(counts).items()}}
        super().log(logs, *args, **kwargs)


class _WatchedBound(torch.Tensor):
    """A tensor that lets through everything, and notes what `torch.clamp` clips with it.

    TRL keeps the ratios to itself; the function protocol of torch shows them without touching one of its private methods.
    """

    ratios: list[Tensor]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        watched = [each for each in (*args, *(kwargs or {}).values()) if isinstance(each, cls)]
        result = super().__torch_function__(func, types, args, kwargs or {})
        if func in _CLAMPS:
            watched[0].ratios.append((args[0] if args else kwargs["input"]).detach())
        if not isinstance(result, cls):
            return result
        if func in _SHIFTS:
            result.ratios = watched[0].ratios
            return result
        return result.as_subclass(torch.Tensor)


_CLAMPS = {torch.clamp, torch.Tensor.clamp, torch.clip, torch.Tensor.clip}
#: What makes bounds of epsilons: 1 - epsilon_low, 1 + epsilon_high.
_SHIFTS = {torch.rsub, torch.Tensor.__rsub__, torch.Tensor.add, torch.Tensor.__radd__, torch.Tensor.__add__}


def _watched(offset: Tensor, ratios: list[Tensor]) -> _WatchedBound:
    watched = offset.as_subclass(_WatchedBound)
    watched.ratios = ratios
    return watched


def _named(counts: Tensor) -> dict[str, float]:
    """Statistics by the names under which they are logged; buckets without a token are left out."""
    everything, by_p = shares(counts), shares(counts[:-1])
    named = {f"band/{name}": everything[name].item() for name in ("clip_up", "clip_down", "kl")}
    for side in ("clip_up", "clip_down"):
        for edge, share in zip((*BUCKETS, 1), by_p[f"{side}_by_p"].tolist(), strict=True):
            if not math.isnan(share):
                named[f"band/{side}/p<={edge}"] = share
    return named


def _check_config(args: Any) -> None:
    """Raises ValueError for configurations whose loss has no two-sided clip of token ratios."""
    if args.loss_type not in LOSS_TYPES:
        raise ValueError(
            f"loss_type={args.loss_type!r} does not clip each token's ratio from both sides, which is what the band replaces; "
            f"use one of {', '.join(LOSS_TYPES)}"
        )
    if args.importance_sampling_level != "token":
        raise ValueError(
            f"importance_sampling_level={args.importance_sampling_level!r} clips one ratio a sequence, and the band bounds the "
            "probability of a token; use importance_sampling_level='token'"
        )
    if getattr(args, "use_liger_kernel", False):
        raise ValueError(
            "the Liger kernel's loss takes epsilons that are numbers, not one a token; use use_liger_kernel=False with the band"
        )


def _check_two_sided(two_sided: float | None, max_ratio: float | None) -> None:
    """Raises ValueError where TRL's two-sided clip would cut the band from above, which no statistic would show."""
    if two_sided is not None and (max_ratio is None or two_sided < max_ratio):
        raise ValueError(
            f"the config's delta={two_sided} (TRL's two-sided clip) cuts every ratio above it, while the band lets rare tokens grow "
            f"{'without limit' if max_ratio is None else f'by up to {max_ratio}'}; set the config's delta to at least max_ratio, or leave it None"
        )


def _is_on_policy(args: Any) -> bool:
    """Whether TRL generates anew for every optimizer step."""
    return args.gradient_accumulation_steps % (args.steps_per_generation * args.num_iterations) == 0
