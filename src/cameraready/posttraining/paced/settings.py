"""Options of the trainer, apart from TRL's own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class PacedSettings:
    """What `PacedGRPOTrainer` does beside TRL.

    Attributes
    ----------
    selection : {"paced", "uniform"}
        `PacedSampler` on the learned estimate, or TRL's own order.
    loss : {"tb", "trl"}
        `tb_loss`, or TRL's (whatever ``loss_type`` says). With ``"uniform"`` and ``"trl"`` the run is TRL's; the estimate is only watched.
    tb_beta : float
        beta of `tb_loss`; apart from TRL's ``beta``, the weight of a penalty that `tb_loss` does not have.
    length_normalize : bool
        As of `tb_loss`.
    target, explore, candidates
        As of `PacedSampler`.
    hidden, head_learning_rate, head_steps
        Width of `PartitionHead`, and steps of AdamW on each batch of rewards.
    replay : int
        Replayed rollouts beside each micro-batch; 0 for none (`tb_loss` only).
    replay_capacity, replay_add, replay_max_age, replay_correct_at
        As of `ErrorReplay`, whose steps are batches of completions; in each process.

    Raises
    ------
    ValueError
    """

    selection: Literal["paced", "uniform"] = "paced"
    loss: Literal["tb", "trl"] = "tb"
    tb_beta: float = 0.05
    length_normalize: bool = False
    target: float = 0.5
    explore: float = 0.1
    candidates: int | None = None
    hidden: int = 256
    head_learning_rate: float = 1e-3
    head_steps: int = 4
    replay: int = 0
    replay_capacity: int = 128
    replay_add: int = 64
    replay_max_age: int | None = 4
    replay_correct_at: float = 1.0

    def __post_init__(self) -> None:
        if self.selection not in ("paced", "uniform") or self.loss not in ("tb", "trl"):
            raise ValueError(
                f"selection must be 'paced' or 'uniform' and loss 'tb' or 'trl', got {self.selection!r} and {self.loss!r}"
            )
        if not self.tb_beta > 0 or not self.head_learning_rate > 0 or not math.isfinite(self.target):
            raise ValueError(
                f"tb_beta and head_learning_rate must be positive and target finite, got {self.tb_beta}, {self.head_learning_rate}, {self.target}"
            )
        if self.head_steps < 1 or self.hidden < 1 or self.replay < 0:
            raise ValueError(
                f"head_steps and hidden must be at least 1 and replay not negative, got {self.head_steps}, {self.hidden}, {self.replay}"
            )
        if self.replay and self.loss != "tb":
            raise ValueError("replay needs loss='tb': TRL's losses are made for rollouts of the present policy")


def check_config(args: Any) -> None:
    """Raise a ValueError for settings of a `trl.GRPOConfig` that trajectory balance cannot honour."""
    if args is None:
        return
    usual = {"top_p": (None, 1.0), "top_k": (None, 0, -1), "min_p": (None, 0.0), "repetition_penalty": (None, 1.0)}
    for name, values in usual.items():
        if getattr(args, name, None) not in values:
            raise ValueError(
                f"trajectory balance needs the log-probabilities of the distribution that is sampled from, and {name}={getattr(args, name)!r} changes it"
                " behind them; sample without it, or take loss='trl'"
            )
    if args.beta:
        raise ValueError(
            f"trajectory balance has no penalty on the divergence from a reference model, so that beta={args.beta:g} would do nothing; set beta=0"
            " (how far a step may go is PacedSettings' tb_beta), or take loss='trl'"
        )
