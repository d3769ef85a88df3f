"""A clip whose bounds depend on the token's old probability: wide for rare tokens, tight for likely ones, inside one divergence ball for all."""

from typing import TYPE_CHECKING, Any

from cameraready.posttraining.bandpo.bounds import BandTable, band_bounds
from cameraready.posttraining.bandpo.loss import band_policy_loss, clip_counts, token_losses

if TYPE_CHECKING:
    from cameraready.posttraining.bandpo.trainer import BandGRPOTrainer

__all__ = ["BandGRPOTrainer", "BandTable", "band_bounds", "band_policy_loss", "clip_counts", "token_losses"]


def __getattr__(name: str) -> Any:
    if name != "BandGRPOTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # TRL is asked for when a trainer is, and not before.
    from cameraready.posttraining.bandpo.trainer import BandGRPOTrainer

    return BandGRPOTrainer
