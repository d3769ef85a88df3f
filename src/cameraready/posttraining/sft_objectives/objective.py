"""The objective: per-token losses of demonstrations by the probability that the model gives them, for any training loop."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from cameraready.posttraining._logprobs import IGNORED, token_logprobs
from cameraready.posttraining.sft_objectives import family
from cameraready.posttraining.sft_objectives.scoring import label_logprobs, logits_of, mean_logps
from cameraready.posttraining.sft_objectives.stats import LossStats

Reduction = Literal["mean", "sum", "none"]


@dataclass(frozen=True)
class ProbabilityObjective:
    """A per-token objective for supervised fine-tuning: f of the probability p that the model gives the demonstrated token.

    The family is ``f(p) = (1 - p^alpha) / alpha``: the log-likelihood at alpha = 0, ``1 - p`` at 1 (whose gradient is that of DFT), and
    ever more trusting of the model's prior above. A token's gradient is that of cross-entropy times ``p^alpha``, so what the model finds
    unlikely, mistakes in demonstrations as well as what it has yet to learn, is left alone.

    Use it in `transformers.Trainer` (``compute_loss_func=objective``), in TRL (`ProbabilitySFTTrainer`) or in a loop of your own (`loss`, or
    `chunked`, which never makes all logits). Not for a model without a prior on the task: from p = 0.01 alpha = 1 learns a hundred times more
    slowly than the log-likelihood; ask `recommend`. Values of different objectives cannot be compared with each other.

    Parameters
    ----------
    name : {"alpha", "nll", "dft", "gce", "focal", "mixture", "label_smoothing"}
        The family; or the log-likelihood; or ``sg(p) * -log p`` (dynamic fine-tuning); generalized cross-entropy, which is the family with
        0 < alpha <= 1; ``-(1 - p)^gamma log p``; ``nll_share * -log p + (1 - nll_share) * (1 - p)``; smoothed labels.
    alpha : float, optional
        Of ``"alpha"`` (default 1) and ``"gce"`` (default 0.7); at least 0.
    gamma, nll_share, smoothing : float, optional
        Of ``"focal"`` (default 2), ``"mixture"`` (0.5) and ``"label_smoothing"`` (0.1).
    threshold : float, optional
        Train only on tokens with p at least this (``side="top"``, from 0 to below 1) or at most this (``"bottom"``, above 0 to 1), p being
        the model's at the moment, without gradient. A percentile of the base model's p (`PriorStrength.quantile`) keeps that share at first.
    side : {"top", "bottom"}
    normalize : {"all", "kept"}
        Divide by the number of labels, so that the threshold zeroes losses; or by the number that the threshold kept, so that it masks, as
        the authors' code does.
    ignore_index : int
        Label of tokens without a loss.

    Attributes
    ----------
    stats : LossStats
        Labels seen, share kept, batches in which no token survived the threshold (their loss is a zero with a graph).

    Raises
    ------
    ValueError
        A sentence that says which argument is wrong and what it may be.

    References
    ----------
    Li, Qiu, Chen, Ji and Tong, 2026, arXiv:2510.00526, Section 3. DFT: Wu et al., 2025, arXiv:2508.05629. Generalized cross-entropy: Zhang
    and Sabuncu, 2018, arXiv:1805.07836. Focal loss: Lin et al., 2017, arXiv:1708.02002.

    Examples
    --------
    >>> import torch
    >>> objective = ProbabilityObjective(alpha=1.0)
    >>> float(objective.loss(torch.zeros(1, 3, 4), torch.tensor([[-100, 2, 3]])))  # 1 - 1/4
    0.75
    """

    name: family.Name = "alpha"
    alpha: float | None = field(default=None, kw_only=True)
    gamma: float | None = field(default=None, kw_only=True)
    nll_share: float | None = field(default=None, kw_only=True)
    smoothing: float | None = field(default=None, kw_only=True)
    threshold: float | None = field(default=None, kw_only=True)
    side: Literal["top", "bottom"] = field(default="top", kw_only=True)
    normalize: Literal["all", "kept"] = field(default="all", kw_only=True)
    ignore_index: int = field(default=IGNORED, kw_only=True)
    stats: LossStats = field(default_factory=LossStats, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        given = {key: getattr(self, key) for key in ("alpha", "gamma", "nll_share", "smoothing")}
        for key, value in family.settings_of(self.name, given).items():
            object.__setattr__(self, key, value)
        if self.side not in ("top", "bottom"):
            raise ValueError(f"side must be 'top' or 'bottom', got {self.side!r}")
        if self.normalize not in ("all", "kept"):
            raise ValueError(f"normalize must be 'all' or 'kept', got {self.normalize!r}")
        if self.threshold is None:
            return
        q = family.number(self.threshold)
        if q is None or not (0 <= q < 1 if self.side == "top" else 0 < q <= 1):
            span = "from 0 to below 1" if self.side == "top" else "above 0 and up to 1"
            raise ValueError(f"a threshold with side={self.side!r} must be {span}, got {self.threshold!r}")
        object.__setattr__(self, "threshold", q)

    @classmethod
    def from_name(cls, name: str) -> ProbabilityObjective:
        """The objective that the authors' code calls `name` (its option ``trainer.objective_trans``).

        ``original`` and ``logp`` are the log-likelihood, ``p`` is 1 - p, ``GeneralFamily-A`` the family with alpha = A, and ``OnlyTopP-Q``,
        ``OnlyBottomP-Q``, ``OnlyTopLogP-Q`` and ``OnlyBottomLogP-Q`` thresholds, normalised by what they keep.

        Any other, or a number out of range (a negative alpha, a threshold that keeps nothing), raises a ValueError.
        """
        if name in ("original", "logp", "p"):
            return cls(alpha=1.0 if name == "p" else 0.0)
        found = re.fullmatch(r"(GeneralFamily|Only(Top|Bottom)(Log)?P)-(.+)", name)
        try:
            number = float(found[4]) if found else float("nan")
        except ValueError:
            found = None
        if not found:
            raise ValueError(
                f"there is no objective {name!r}; there are original, logp, p, GeneralFamily-A, OnlyTopP-Q, OnlyBottomP-Q, "
                "OnlyTopLogP-Q and OnlyBottomLogP-Q, with A and Q numbers"
            )
        if found[1] == "GeneralFamily":
            return cls(alpha=number)
        side: Any = found[2].lower()
        return cls(alpha=0.0 if found[3] else 1.0, threshold=number, side=side, normalize="kept")

    def __repr__(self) -> str:
        parts = [repr(self.name), *(f"{key}={value!r}" for key, value in self.settings.items())]
        if self.threshold is not None:
            parts += [f"threshold={self.threshold!r}", f"side={self.side!r}", f"normalize={self.normalize!r}"]
        if self.ignore_index != IGNORED:
            parts.append(f"ignore_index={self.ignore_index}")
        return f"ProbabilityObjective({', '.join(parts)})"

    @property
    def settings(self) -> dict[str, float]:
        """What this member was told, with its defaults: ``{"alpha": 1.0}``."""
        return {key: float(getattr(self, key)) for key in family.SETTINGS[self.name]}

    @property
    def needs_logits(self) -> bool:
        """Whether it is more than a function of the target's probability (label smoothing), so that `chunked` cannot serve it."""
        return self.name == "label_smoothing"

    # --- values ------------------------------------------------------------------------------------------------------

    def value(self, logps: Tensor) -> Tensor:
        """f(p) of log-probabilities, elementwise, without the threshold; any shape, float32 or float64.

        Raises
        ------
        ValueError
            For label smoothing, which is no function of p alone.
        """
        return family.values(self.name, self.settings, logps)

    def gradient_weight(self, p: Tensor) -> Tensor:
        """W_f(p) = -f'(p) p (1 - p), the size of the gradient at the target's logit (Eq. of Section 3); 0 where the threshold drops p.

        Parameters
        ----------
        p : Tensor
            Probabilities, any shape, floating.
        """
        weight = family.gradient_weight(self.name, self.settings, p)
        return torch.where(self.keeps(p), weight, 0.0)

    @property
    def peak(self) -> float:
        """The probability at which the gradient is largest, without the threshold: alpha / (1 + alpha) in the family."""
        return family.peak(self.name, self.settings)

    def keeps(self, p: Tensor) -> Tensor:
        """Which probabilities the threshold lets through; all without one."""
        if self.threshold is None:
            return torch.ones_like(p, dtype=torch.bool)
        return p >= self.threshold if self.side == "top" else p <= self.threshold

    # --- losses ------------------------------------------------------------------------------------------------------

    def __call__(self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | float | None = None) -> Tensor:
        """The loss as ``compute_loss_func`` of `transformers.Trainer` and TRL's `SFTTrainer` is called.

        Parameters
        ----------
        outputs
            What the model returned, with logits of shape (B, T, V).
        labels : LongTensor of shape (B, T)
            Unshifted; they are not changed.
        num_items_in_batch : int or Tensor, optional
            Labels in all micro-batches of the step, whose losses then add up to the whole batch's. With ``normalize="kept"`` it is their means
            that are averaged, weighted by labels: to divide by what is kept in all of them takes `ProbabilitySFTTrainer`.

        Returns
        -------
        Tensor
            A scalar.
        """
        if labels is None:
            raise ValueError("there are no labels: the data collator must return them")
        return self.loss(logits_of(outputs), labels, num_items=num_items_in_batch)

    def loss(
        self,
        logits: Tensor,
        labels: Tensor,
        *,
        reduction: Reduction = "mean",
        weights: Tensor | None = None,
        num_items: Tensor | float | None = None,
        num_kept: Tensor | float | None = None,
        chunk: int | None = None,
    ) -> Tensor:
        """The loss of logits that are there.

        Parameters
        ----------
        logits : Tensor of shape (B, T, V)
            Unscaled, of any floating dtype; worked on in float32 (float64 stays), a chunk of tokens at a time.
        labels : LongTensor of shape (B, T)
            Unshifted: ``labels[:, t]`` is predicted by ``logits[:, t - 1]``.
        reduction : {"mean", "sum", "none"}
            ``"none"`` gives shape (B, T - 1), 0 where there is no label or the threshold drops it.
        weights : Tensor of shape (B,) or (B, T), optional
            Of samples, or of labels; they multiply losses and leave the denominator alone.
        num_items, num_kept : int or Tensor, optional
            Labels, and labels that the threshold keeps, in the whole batch of which this is a part; with ``reduction="mean"``.
        chunk : int, optional
            Tokens worked on at once.

        Returns
        -------
        Tensor
            A scalar, or (B, T - 1); float32, or float64 for float64 logits.

        Raises
        ------
        ValueError
            Shapes do not fit, a label is outside the vocabulary, the reduction is unknown.
        """
        logps, mask, means = self.logprobs(logits, labels, chunk=chunk)
        return self.of_logprobs(
            logps,
            mask,
            mean_logps=means,
            reduction=reduction,
            weights=weights,
            num_items=num_items,
            num_kept=num_kept,
        )

    def logprobs(
        self, logits: Tensor, labels: Tensor, *, chunk: int | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """What `of_logprobs` takes: log-probabilities of labels (B, T - 1), which there are, and means over the vocabulary where needed."""
        if logits.ndim != 3 or labels.shape != logits.shape[:2] or logits.shape[1] < 2:
            raise ValueError(
                f"logits must be (B, T, V) and labels (B, T) with T of at least 2, got {tuple(logits.shape)} and {tuple(labels.shape)}"
            )
        targets = self._standard(labels)[:, 1:].to(logits.device)
        before = logits[:, :-1]
        logps = token_logprobs(before, targets, chunk=chunk).logps
        means = mean_logps(before, targets, logps) if self.needs_logits else None
        return logps, targets != IGNORED, means

    def _standard(self, labels: Tensor) -> Tensor:
        """Labels with -100 for what is ignored; a copy where that changes them."""
        return labels if self.ignore_index == IGNORED else labels.masked_fill(labels == self.ignore_index, IGNORED)

    def chunked(
        self,
        model: nn.Module,
        labels: Tensor,
        *,
        reduction: Reduction = "mean",
        weights: Tensor | None = None,
        num_items: Tensor | float | None = None,
        num_kept: Tensor | float | None = None,
        chunk: int | None = None,
        **inputs: Any,
    ) -> Tensor:
        """The loss of a model whose logits of all tokens are never made: its head runs on a chunk of labels at a time, and again backward.

        With 150,000 words the logits take more memory than all else. Equal to `loss` up to rounding, gradients too.

        Parameters
        ----------
        model : nn.Module
            A causal language model of transformers, wrapped or not.
        labels : LongTensor of shape (B, T)
            Unshifted.
        reduction, weights, num_items, num_kept
            As of `loss`.
        chunk : int, optional
            Labels whose logits are made at once; by default they take 64 MiB in float32.
        **inputs
            What the model is called with: ``input_ids=``, ``attention_mask=`` ...

        Raises
        ------
        ValueError
            As of `loss`, and for label smoothing, which needs logits.
        cameraready.models.UnknownArchitecture
            The model makes its logits in a way that is not known.
        """
        if self.needs_logits:
            raise ValueError(f"{self.name} needs all logits of a token; use loss(model(...).logits, labels)")
        logps, mask, _ = label_logprobs(model, self._standard(labels), chunk=chunk, **inputs)
        return self.of_logprobs(
            logps, mask, reduction=reduction, weights=weights, num_items=num_items, num_kept=num_kept
        )

    def of_logprobs(
        self,
        logps: Tensor,
        mask: Tensor,
        *,
        mean_logps: Tensor | None = None,
        reduction: Reduction = "mean",
        weights: Tensor | None = None,
        num_items: Tensor | float | None = None,
        num_kept: Tensor | float | None = None,
    ) -> Tensor:
        """The loss of log-probabilities that are there.

        Parameters
        ----------
        logps, mask : Tensors of shape (B, L)
            Of the labels, and which count. What `mask` leaves out may be anything and gets no gradient.
        mean_logps : Tensor of shape (B, L), optional
            Mean over the vocabulary, for label smoothing alone.
        reduction, weights, num_items, num_kept
            As of `loss`; weights of labels have the shape of `logps` or one column more, whose first is dropped.
        """
        if logps.shape != mask.shape or logps.ndim != 2:
            raise ValueError(
                f"logps and mask must be (B, L) of one shape, got {tuple(logps.shape)} and {tuple(mask.shape)}"
            )
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
        mask = mask.bool()
        # A NaN is kept, whatever the threshold, so that a broken model does not look like one with nothing to learn.
        keep = mask & (self.keeps(logps.detach().exp()) | logps.detach().isnan())
        self.stats.add(logps.detach(), mask, keep)
        # What is dropped is replaced before f is taken, so that no infinity meets a zero on the way back.
        inside = torch.where(keep, logps, 0.0)
        if self.needs_logits:
            if mean_logps is None:
                raise ValueError("label smoothing needs the mean log-probability over the vocabulary")
            share = self.settings["smoothing"]
            value = -(1 - share) * inside
            if share:
                value = value - share * torch.where(keep, mean_logps, 0.0)
        else:
            value = self.value(inside)
        value = torch.where(keep, value, 0.0)
        if weights is not None:
            value = torch.where(keep, value * _per_label(weights, value), 0.0)
        if reduction == "none":
            return value
        if reduction == "sum":
            return value.sum()
        return value.sum() / self._denominator(mask, keep, num_items, num_kept)

    def _denominator(
        self, mask: Tensor, keep: Tensor, num_items: Tensor | float | None, num_kept: Tensor | float | None
    ) -> Tensor:
        labels, kept = mask.sum(), keep.sum().clamp_min(1)
        if self.normalize == "all":
            return (labels if num_items is None else _number(num_items, mask)).clamp_min(1)
        if num_kept is not None:
            return _number(num_kept, mask).clamp_min(1)
        if num_items is None:
            return kept
        return kept * _number(num_items, mask).clamp_min(1) / labels.clamp_min(1)


def _number(value: Tensor | float, like: Tensor) -> Tensor:
    """A count as a scalar tensor on the device of `like`."""
    if isinstance(value, Tensor):
        return value.to(like.device).sum()
    if not value >= 0 or value != int(value):
        raise ValueError(f"a number of labels must be a whole number of at least 0, got {value}")
    return torch.as_tensor(value, device=like.device)


def _per_label(weights: Tensor, value: Tensor) -> Tensor:
    """Weights of samples or labels, for values of shape (B, L)."""
    weights = torch.as_tensor(weights).to(value)
    if weights.shape == value.shape[:1]:
        return weights[:, None]
    if weights.shape == value.shape:
        return weights
    if weights.shape == (value.shape[0], value.shape[1] + 1):
        return weights[:, 1:]
    raise ValueError(
        f"weights must be one a sample {(value.shape[0],)} or one a label {(value.shape[0], value.shape[1] + 1)}, got {tuple(weights.shape)}"
    )
