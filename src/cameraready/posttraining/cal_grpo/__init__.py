"""Credit for attempts of a model that may try again: each counts as much as all later attempts are expected to fail."""

from typing import TYPE_CHECKING, Any

from cameraready.posttraining.cal_grpo.advantages import attempt_advantages, attempt_weights, spread_to_tokens
from cameraready.posttraining.cal_grpo.rates import RunningRates
from cameraready.posttraining.cal_grpo.verification import VerificationRate, verification_at_k

if TYPE_CHECKING:
    from cameraready.posttraining.cal_grpo.rollouts import AttemptRollouts
    from cameraready.posttraining.cal_grpo.trainer import MultiAttemptGRPOTrainer

__all__ = [
    "AttemptRollouts",
    "MultiAttemptGRPOTrainer",
    "RunningRates",
    "VerificationRate",
    "attempt_advantages",
    "attempt_weights",
    "spread_to_tokens",
    "verification_at_k",
]


def __getattr__(name: str) -> Any:
    # torch and TRL are asked for when rollouts or a trainer are, and not before.
    if name == "AttemptRollouts":
        from cameraready.posttraining.cal_grpo.rollouts import AttemptRollouts

        return AttemptRollouts
    if name == "MultiAttemptGRPOTrainer":
        from cameraready.posttraining.cal_grpo.trainer import MultiAttemptGRPOTrainer

        return MultiAttemptGRPOTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
