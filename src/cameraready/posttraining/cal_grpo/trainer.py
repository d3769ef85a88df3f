"""TRL's GRPO trainer for dialogues of several attempts, each with its own advantage, through public hooks alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from accelerate.utils import gather_object
from transformers import TrainerCallback

from cameraready.posttraining._rollouts.dialogues import Feedback
from cameraready.posttraining._trl import import_trl
from cameraready.posttraining.cal_grpo.advantages import METHODS, Method, attempt_advantages, spread_to_tokens
from cameraready.posttraining.cal_grpo.attempts import check_count
from cameraready.posttraining.cal_grpo.rates import RunningRates
from cameraready.posttraining.cal_grpo.rollouts import (
    ATTEMPT_IDS,
    ATTEMPT_REWARDS,
    AttemptRollouts,
    TokenAdvantages,
    attempt_length,
    env_mask,
    outcome,
    prompt_key,
)

_trl = import_trl()
_GRPOTrainer: Any = _trl.GRPOTrainer

#: TRL's losses that divide by something common to all sequences of a batch, so that an attempt counts the same wherever it stands. The divisor
#: of "bnpo" is common to a micro-batch only: it depends on how a batch is accumulated.
LOSS_TYPES = ("dr_grpo", "dapo", "bnpo", "cispo")
_STATE = "cameraready.RunningRates"


class MultiAttemptGRPOTrainer(_GRPOTrainer):
    """`trl.GRPOTrainer` for a model that may try K times in one context, with an advantage for each attempt.

    Dialogues come from TRL's ``rollout_func``, feedback is masked by its ``env_mask``, and `compute_loss` hands TRL's own loss advantages
    (B, L) in place of (B,). Ratios, clipping, KL, aggregation and logging are TRL's.

    Use it where a hard verifier lets the model retry. With ``method="trajectory"`` it is TRL's GRPO with the outcome as reward, its
    own advantages and its own ``scale_rewards``; with ``attempts=1`` besides, TRL generates too, and nothing differs at all.

    A run resumed between two generations of the first epoch equals the uninterrupted one. From the end of that epoch on it does not: TRL's
    own sampler, with or without attempts, begins again with the first epoch's order of prompts.

    Parameters
    ----------
    model, reward_funcs, args, train_dataset, **kwargs
        As of `trl.GRPOTrainer`. ``reward_funcs`` is one function, the verifier, which gives 1 to a right attempt and 0 to a wrong one.
        Without ``args`` the loss is "dr_grpo", whose divisor is a constant, and rewards are not scaled. ``scale_rewards`` of the config is
        kept: "group" and "batch" divide by the standard deviation of the outcome, one divisor for all attempts.
    attempts : int
        K.
    method, lam, baseline
        As of `attempt_advantages`; baseline is "loo", "mean" or "ema".
    weights : {"group", "ema"}
        "ema" keeps a `RunningRates` by prompt, which is saved with checkpoints and taken up again.
    rates : RunningRates, optional
        For "ema", with another decay or prior than the default.
    feedback, max_attempt_length
        As of `AttemptRollouts`.
    rollout_func : callable, optional
        Your own, as TRL's (for vLLM, say), which returns besides "attempt_ids" (lists as long as the completions; the attempt of each
        token from 0, negative for feedback) and "attempt_rewards" (lists of K verdicts, NaN where not reached). Consecutive attempts must have
        feedback between them.

    Raises
    ------
    ValueError
        A loss type that divides by each sequence's own length (it would penalise dialogues of many attempts), sequence-level
        importance sampling (which mixes the attempts of a dialogue), the Liger kernel's loss or off-policy masks; several reward
        functions; verdicts other than 0 and 1; a ``max_completion_length`` of less than a token for each attempt.
    ImportError
        TRL is not installed.

    References
    ----------
    Ildiz et al., 2026, arXiv:2604.17912.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        *,
        attempts: int = 3,
        method: Method = "cal",
        lam: float = 0.0,
        baseline: Literal["loo", "mean", "ema"] = "loo",
        weights: Literal["group", "ema"] = "group",
        rates: RunningRates | None = None,
        feedback: Feedback = "That is wrong. Try again.",
        max_attempt_length: int | None = None,
        rollout_func: Callable[[list[Any], Any], dict[str, Any]] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        **kwargs: Any,
    ) -> None:
        if method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(map(repr, METHODS))}, got {method!r}")
        check_count("attempts", attempts)
        if args is None:
            args = _trl.GRPOConfig("cal-grpo", loss_type="dr_grpo", scale_rewards="none")
        self.attempts, self.attempt_method = attempts, method
        self.attempt_options: dict[str, Any] = {"method": method, "lam": lam, "baseline": baseline, "weights": weights}
        if "ema" in (weights, baseline):
            rates = RunningRates(attempts) if rates is None else rates
        self.attempt_rates = rates
        self._kept = {"train": TokenAdvantages(), "eval": TokenAdvantages()}
        own_rollouts = attempts > 1 or method != "trajectory"
        if own_rollouts:
            _check_config(args, method)
            unfit = [name for name in ("tools", "environment_factory") if kwargs.get(name)]
            if unfit:
                raise ValueError(
                    f"{unfit[0]} lets TRL write the dialogue itself, and attempts would not be known: leave it out"
                )
            # Options that do not fit are refused before a model is loaded.
            attempt_advantages(np.zeros((2, attempts)), rates=rates, **self.attempt_options)
            if rollout_func is None:
                if max_attempt_length is None:
                    attempt_length(args.max_completion_length, attempts)
                rollout_func = AttemptRollouts(
                    _only(reward_funcs),
                    [each for each in (train_dataset, *_listed(kwargs.get("eval_dataset"))) if each is not None],
                    attempts=attempts,
                    feedback=feedback,
                    max_attempt_length=max_attempt_length,
                )
            self._inner_rollout = rollout_func
            rollout_func, reward_funcs = _attempted, outcome
        # What TRL does not need is not passed on, so that its default stands.
        kwargs |= {} if rollout_func is None else {"rollout_func": rollout_func}
        callbacks = [*(callbacks or []), *([_Carried(rates)] if rates is not None else [])]
        super().__init__(model, reward_funcs, args, train_dataset, callbacks=callbacks or None, **kwargs)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """TRL's loss of a micro-batch, with the advantages of its attempts."""
        if self.attempt_method != "trajectory":
            kept = self._kept["train" if self.model.training else "eval"]
            inputs = {**inputs, "advantages": kept.of(inputs)}
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


def _attempted(prompts: list[Any], trainer: MultiAttemptGRPOTrainer) -> dict[str, Any]:
    """The rollouts, with masks; the advantages of their tokens are kept for the loss."""
    output = dict(trainer._inner_rollout(prompts, trainer))
    missing = {ATTEMPT_IDS, ATTEMPT_REWARDS} - output.keys()
    if missing:
        raise ValueError(f"rollout_func must also return {', '.join(sorted(missing))}")
    output["env_mask"] = env_mask(output[ATTEMPT_IDS])
    if trainer.attempt_method != "trajectory":
        mode = "train" if trainer.model.training else "eval"
        table = _gathered([list(map(float, row)) for row in output[ATTEMPT_REWARDS]], trainer.attempts)
        keys = gather_object([prompt_key(prompt) for prompt in prompts])
        size = trainer.num_generations if mode == "train" else trainer.num_generations_eval
        scale = trainer.scale_rewards
        advantages = attempt_advantages(
            table,
            group_ids=np.arange(len(table)) // size,
            rates=trainer.attempt_rates,
            keys=keys if trainer.attempt_rates is not None else None,
            scale=None if scale in ("none", False) else ("group" if scale is True else scale),
            **trainer.attempt_options,
        )
        if trainer.attempt_rates is not None and mode == "train":
            trainer.attempt_rates.update(table, keys=keys)
        start = trainer.accelerator.process_index * len(prompts)
        local = advantages[start : start + len(prompts)]
        spread = [_on_tokens(values, ids) for values, ids in zip(local, output[ATTEMPT_IDS], strict=True)]
        trainer._kept[mode].keep(output["prompt_ids"], output["completion_ids"], output["env_mask"], spread)
    return output


def _on_tokens(advantages: np.ndarray, attempt_ids: Sequence[int]) -> np.ndarray:
    return spread_to_tokens(advantages[None], np.asarray(attempt_ids, dtype=np.int64)[None])[0]


def _gathered(rows: list[list[float]], attempts: int) -> np.ndarray:
    """Verdicts of all processes, whose rows TRL groups in this order, (T, K)."""
    gathered = gather_object(rows)
    wrong = next((len(row) for row in gathered if len(row) != attempts), None)
    if wrong is not None:
        raise ValueError(
            f"{ATTEMPT_REWARDS} must have {attempts} verdicts a dialogue (NaN where not reached), got {wrong}"
        )
    return np.asarray(gathered, dtype=np.float64).reshape(len(gathered), attempts)


class _Carried(TrainerCallback):
    """Running rates go into the trainer's state, which checkpoints hold, and come back from it."""

    def __init__(self, rates: RunningRates) -> None:
        self.rates = rates

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        found = (state.stateful_callbacks or {}).get(_STATE)
        if found:
            self.rates.load_state_dict(found["attributes"])

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if control.should_save:  # decided by the callbacks that come first
            state.stateful_callbacks[_STATE] = {"args": {}, "attributes": self.rates.state_dict()}

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.on_step_end(args, state, control)


def _check_config(args: Any, method: str) -> None:
    if method == "trajectory":
        return
    if args.loss_type not in LOSS_TYPES:
        raise ValueError(
            f"loss_type={args.loss_type!r} weighs an attempt by the sequence that it stands in; with an advantage for each attempt take one of "
            f"{', '.join(map(repr, LOSS_TYPES))}"
        )
    if args.importance_sampling_level != "token":
        raise ValueError(
            "importance_sampling_level='sequence' has one ratio for all attempts of a dialogue; with an advantage for each attempt take 'token'"
        )
    if getattr(args, "use_liger_kernel", False):
        raise ValueError("the Liger kernel's loss takes one advantage a sequence: use_liger_kernel=False")
    if getattr(args, "off_policy_mask_threshold", None) is not None:
        raise ValueError("off_policy_mask_threshold drops whole sequences by one advantage: leave it unset")


def _only(reward_funcs: Any) -> Callable[..., Any]:
    listed = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
    if len(listed) != 1 or not callable(listed[0]) or isinstance(listed[0], torch.nn.Module):
        listed = []
    if not listed or inspect.iscoroutinefunction(listed[0]):
        raise ValueError(
            "pass one verifier as reward_funcs, a plain function that gives 1 to a right attempt and 0 to a wrong one"
        )
    return listed[0]


def _listed(datasets: Any) -> list[Any]:
    return list(datasets.values()) if isinstance(datasets, dict) else [datasets]
