"""The band as its users make it in TRL, for the conformance test that the room's trainers share."""

from functools import partial

from tests.posttraining.trainer_cases import TrainerCase


def make(model, tokenizer, args, dataset, reward_funcs, **options):
    from cameraready.posttraining.bandpo import BandGRPOTrainer

    return BandGRPOTrainer(
        model=model, processing_class=tokenizer, args=args, train_dataset=dataset, reward_funcs=reward_funcs, **options
    )


#: Constant bounds: TRL's own clip through the tensors that carry the band.
off = partial(make, divergence=None)

CASES = [
    TrainerCase("bandpo", make, off),
    TrainerCase(
        "bandpo-grpo-chi2", partial(make, divergence="chi2"), off, settings={"loss_type": "grpo", "delta": 12.0}
    ),
    TrainerCase("bandpo-dr_grpo", make, off, settings={"loss_type": "dr_grpo", "epsilon_high": 0.28}),
]
