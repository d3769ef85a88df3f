"""TRL's supervised trainer with a probability objective, in place of the hook that TRL 2.0 removes."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cameraready.models import anatomy
from cameraready.posttraining._logprobs import IGNORED
from cameraready.posttraining._trl import import_trl
from cameraready.posttraining.sft_objectives.objective import ProbabilityObjective
from cameraready.posttraining.sft_objectives.scoring import label_logprobs, logits_of

_SFTTrainer: Any = import_trl().SFTTrainer


class ProbabilitySFTTrainer(_SFTTrainer):
    """`trl.SFTTrainer` that trains on a `ProbabilityObjective`: the way to use one in TRL.

    TRL's hook ``compute_loss_func`` takes one as well, at the price of a second forward pass a step, and goes away in TRL 2.0.

    Exact under gradient accumulation, and over processes with ``average_tokens_across_devices=True`` (its default), also where a threshold's kept
    labels are the denominator: they are counted in a forward pass of their own before the step, under the same dropout. Logs
    ``kept_fraction``, ``mean_probability`` and ``batches_without_survivors``, of all processes, beside the loss, whose values cannot be
    compared between objectives: follow ``eval_loss`` of one objective only, or the metrics of your task. In place of these go the entries
    of TRL's own loss, ``entropy``, ``mean_token_accuracy`` and ``num_tokens``; ``include_num_input_tokens_seen="all"`` of the config counts tokens.

    Parameters
    ----------
    *args, **kwargs
        As of `trl.SFTTrainer`, with ``loss_type="nll"`` (its default) and without label smoothing or ``compute_loss_func``.
    objective : ProbabilityObjective
    chunked : bool
        Never make the logits of all tokens, as TRL's own loss (``chunked_nll`` in some of its versions). False makes them, which label
        smoothing needs.

    Raises
    ------
    ValueError
        The objective and the settings of the trainer contradict each other.
    ImportError
        TRL is missing or too old (raised when this class is imported).

    Warns
    -----
    UserWarning
        Once, when the threshold has let no token through, so that nothing was learned: at the first steps, or since the last log.
    """

    def __init__(self, *args: Any, objective: ProbabilityObjective, chunked: bool = True, **kwargs: Any) -> None:
        if not isinstance(objective, ProbabilityObjective):
            raise TypeError(f"objective must be a ProbabilityObjective, got {type(objective).__name__}")
        if chunked and objective.needs_logits:
            raise ValueError(f"{objective.name} needs all logits of a token; pass chunked=False")
        if kwargs.get("compute_loss_func") is not None:
            raise ValueError("the objective is the loss; leave compute_loss_func out")
        super().__init__(*args, **kwargs)
        if self.args.loss_type not in ("nll", "chunked_nll"):
            raise ValueError(f"the objective is the loss; leave loss_type at 'nll', not {self.args.loss_type!r}")
        if objective.ignore_index != IGNORED:
            raise ValueError(
                f"TRL marks tokens without a loss with {IGNORED}; leave the objective's ignore_index there"
            )
        if self.args.label_smoothing_factor:
            raise ValueError("for smoothed labels use ProbabilityObjective('label_smoothing', smoothing=...)")
        if getattr(self, "aux_loss_enabled", False):
            raise ValueError(
                "the load-balancing loss of a mixture of experts is not added here; set router_aux_loss_coef=0"
            )
        self.objective, self.chunked = objective, chunked
        self.model_accepts_loss_kwargs = True  # so that labels of all micro-batches are counted, whatever the model
        self._evaluated = replace(objective)
        self._num_kept: Tensor | None = None
        self._survived = self._warned = (
            False  # whether a token ever passed the threshold; whether it was said that none did
        )

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list[Any], Any]:
        """The micro-batches of the next step; where the denominator is what a threshold keeps, that is counted in all of them first."""
        if not self._survived and self.accelerator.num_processes == 1:
            self._warn_of_nothing(self.objective.stats.summary())
        samples, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        counts = self.objective.normalize == "kept" and self.objective.threshold is not None
        self._num_kept = self._count_kept(samples, device) if counts and len(samples) else None
        return samples, num_items

    @torch.no_grad()
    def _count_kept(self, samples: list[Any], device: torch.device) -> Tensor:
        kept = torch.zeros((), dtype=torch.long, device=device)
        self.model_wrapped.train()
        if self.chunked:
            anatomy(self.model_wrapped)  # which looks at a model once, and may draw random numbers then
        # The losses that follow draw the same dropout in the same order.
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            for sample in samples:
                inputs = {key: each.to(device) if isinstance(each, Tensor) else each for key, each in sample.items()}
                with self.compute_loss_context_manager():
                    logps, mask, _, _ = self._scores(self.model_wrapped, inputs, self.chunked)
                kept += (mask & self.objective.keeps(logps.exp())).sum()
        if self.args.average_tokens_across_devices and self.args.world_size > 1:
            kept = self.accelerator.gather(kept).sum()
        return kept

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The objective's loss of a micro-batch, a part of the whole step's; see `ProbabilityObjective`."""
        inputs = dict(inputs)
        wants_logits = return_outputs and inputs.pop("_prediction_loss_only", None) is not True
        logps, mask, mean_logps, outputs = self._scores(model, inputs, self.chunked and not wants_logits)
        objective = self.objective if self.model.training else self._evaluated
        loss = objective.of_logprobs(
            logps,
            mask,
            mean_logps=mean_logps,
            num_items=num_items_in_batch,
            num_kept=self._num_kept if self.model.training else None,
        )
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            # Labels were counted over all processes, and gradients are averaged over those that hold different data.
            loss = loss * (self.accelerator.num_processes // self.get_tp_size())
        return (loss, outputs) if return_outputs else loss

    def _scores(self, model: Any, inputs: dict[str, Any], chunked: bool) -> tuple[Tensor, Tensor, Tensor | None, Any]:
        """Log-probabilities of the labels, which there are, their means over the vocabulary where needed, what the model returned."""
        if "shift_labels" in inputs or inputs.get("labels") is None:
            raise ValueError(
                "the objective needs the batch's unshifted labels; context and sequence parallelism, which cut and shift them, are not supported"
            )
        labels = inputs["labels"]
        given = {key: value for key, value in inputs.items() if key not in ("labels", "_prediction_loss_only")}
        given["use_cache"] = False
        if chunked:
            logps, mask, outputs = label_logprobs(model, labels, **given)
            return logps, mask, None, outputs
        outputs = model(**given)
        return *self.objective.logprobs(logits_of(outputs), labels), outputs

    def _warn_of_nothing(self, seen: dict[str, float]) -> None:
        """Warns once, if no token of those seen passed the threshold."""
        objective = self.objective
        if objective.threshold is None or not seen["tokens"]:
            return
        starved = seen["kept_fraction"] == 0
        self._survived |= not starved
        if starved and not self._warned:
            self._warned = True
            side = "at least" if objective.side == "top" else "at most"
            warnings.warn(
                f"none of the {seen['tokens']:,} tokens of the last steps has a probability of {side} {objective.threshold:g}, the objective's "
                f"threshold, so that nothing was learned from them; their mean probability is {seen['mean_probability']:.2g}. "
                "threshold=prior_strength(model, tokenizer, dataset).quantile(0.5) keeps half of them",
                UserWarning,
                stacklevel=2,
            )

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Adds what the objective has seen since the last time."""
        training = self.model.training
        stats = (self.objective if training else self._evaluated).stats
        stats.reduce(self.accelerator)
        seen = stats.summary()
        if training:
            self._warn_of_nothing(seen)
        if seen["tokens"]:
            for name in ("kept_fraction", "mean_probability", "batches_without_survivors"):
                logs[name if training else f"eval_{name}"] = seen[name]
            stats.reset()
        super().log(logs, *args, **kwargs)
