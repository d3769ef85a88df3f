"""Per-token objectives for supervised fine-tuning beyond the log-likelihood, and which of them a model and its data call for."""

from typing import TYPE_CHECKING, Any

from cameraready.posttraining.sft_objectives.advice import Recommendation, recommend
from cameraready.posttraining.sft_objectives.objective import ProbabilityObjective
from cameraready.posttraining.sft_objectives.prior import PriorStrength, prior_strength
from cameraready.posttraining.sft_objectives.stats import LossStats

if TYPE_CHECKING:
    from cameraready.posttraining.sft_objectives.trainer import ProbabilitySFTTrainer

__all__ = [
    "LossStats",
    "PriorStrength",
    "ProbabilityObjective",
    "ProbabilitySFTTrainer",
    "Recommendation",
    "prior_strength",
    "recommend",
]


def __getattr__(name: str) -> Any:
    """The trainer needs TRL, which is imported when it is first asked for."""
    if name == "ProbabilitySFTTrainer":
        from cameraready.posttraining.sft_objectives.trainer import ProbabilitySFTTrainer

        return ProbabilitySFTTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
