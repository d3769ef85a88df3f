"""The paced trainer as its users have it, for the conformance test that the room's trainers share."""

from typing import Any

from tests.posttraining.trainer_cases import TrainerCase


def paced(**settings: Any):
    """A trainer with these of `PacedSettings`, and a head small enough for a test."""

    def make(model, tokenizer, args, dataset, reward_funcs):
        from cameraready.posttraining.paced import PacedGRPOTrainer, PacedSettings

        chosen = PacedSettings(hidden=8, **settings)
        return PacedGRPOTrainer(
            model, reward_funcs, args=args, train_dataset=dataset, processing_class=tokenizer, settings=chosen
        )

    return make


def remembered(trainer: Any) -> dict[str, Any]:
    """What a resumed run must have too."""
    state = trainer.paced_state()
    found = {f"head.{name}": value for name, value in state["head"].items()}
    for place, moments in state["optimizer"]["state"].items():
        found |= {f"optimizer.{place}.{name}": value for name, value in moments.items()}
    for part in ("pacer", "replay"):
        found |= {f"{part}.{name}": value for name, value in state.get(part, {}).items()}
    return found


OFF = paced(selection="uniform", loss="trl")
CASES = [
    TrainerCase("trajectory balance", paced(), OFF, state=remembered),
    TrainerCase("trajectory balance with replay", paced(replay=2), OFF, state=remembered),
    TrainerCase(
        "paced selection, TRL's loss", paced(loss="trl"), OFF, settings={"loss_type": "dr_grpo"}, state=remembered
    ),
]
