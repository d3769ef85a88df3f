"""Prompts of medium difficulty from a learned log-partition, trajectory balance, and replay of what was misjudged (PACED-RL)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cameraready.posttraining.paced.balance import Balance, log_z_intercept, tb_loss
from cameraready.posttraining.paced.embedding import prompt_embeddings
from cameraready.posttraining.paced.head import AccuracyEstimate, PartitionHead, RunningAccuracy
from cameraready.posttraining.paced.replay import ErrorReplay, Replayed, importance_weights
from cameraready.posttraining.paced.sampler import PacedSampler
from cameraready.posttraining.paced.settings import PacedSettings

if TYPE_CHECKING:
    from cameraready.posttraining.paced.trainer import PacedGRPOTrainer

__all__ = [
    "AccuracyEstimate",
    "Balance",
    "ErrorReplay",
    "PacedGRPOTrainer",
    "PacedSampler",
    "PacedSettings",
    "PartitionHead",
    "Replayed",
    "RunningAccuracy",
    "importance_weights",
    "log_z_intercept",
    "prompt_embeddings",
    "tb_loss",
]


def __getattr__(name: str) -> Any:
    # TRL is needed for the trainer alone.
    if name == "PacedGRPOTrainer":
        from cameraready.posttraining.paced.trainer import PacedGRPOTrainer

        return PacedGRPOTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
