"""The trainer's own state beside each checkpoint of TRL's."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

#: File beside a checkpoint's own.
STATE = "paced.pt"


class Saving(TrainerCallback):
    """Writes the trainer's own state beside each checkpoint."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not args.should_save:
            return
        folder = os.path.join(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        complete = abs(state.epoch - round(state.epoch)) < 1e-9
        torch.save({**self.trainer.paced_state(), "epoch_complete": complete}, os.path.join(folder, STATE))


def read_state(path: str, device: Any) -> dict[str, Any]:
    """What `Saving` wrote; tensors, numbers and lists alone, so that a foreign file runs nothing.

    Raises
    ------
    ValueError
        The file is broken, or of something else.
    """
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except OSError:
        raise
    except Exception as error:  # a broken file makes the unpickler raise nearly anything
        raise ValueError(
            f"{path} is no state of PacedGRPOTrainer ({type(error).__name__}); remove it to start the estimate of difficulty afresh"
        ) from None
    if not isinstance(state, dict) or not {"head", "optimizer", "epoch_complete"} <= {*state}:
        raise ValueError(
            f"{path} is no state of PacedGRPOTrainer; remove it to start the estimate of difficulty afresh"
        )
    return state
