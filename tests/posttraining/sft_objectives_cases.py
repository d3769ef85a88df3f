"""Cases for the conformance test of the room's trainers, and a step of TRL's supervised trainer to compare losses with."""

import tempfile

from cameraready.posttraining.sft_objectives import ProbabilityObjective
from tests.posttraining.trainer_cases import TrainerCase

DEMONSTRATIONS = [("one and two are", " three"), ("a", " b c"), ("two and two are", " four, of course"), ("x is", " y")]


def trained(objective):
    """Makes a trainer with this objective, in the trainer cases' terms."""

    def make(model, tokenizer, args, dataset, reward_funcs):
        from cameraready.posttraining.sft_objectives import ProbabilitySFTTrainer

        return ProbabilitySFTTrainer(
            model=model, args=args, train_dataset=dataset, processing_class=tokenizer, objective=objective()
        )

    return make


def as_function(objective):
    """The same through TRL's hook ``compute_loss_func``."""

    def make(model, tokenizer, args, dataset, reward_funcs):
        from cameraready.posttraining._trl import import_trl

        return import_trl().SFTTrainer(
            model=model, args=args, train_dataset=dataset, processing_class=tokenizer, compute_loss_func=objective()
        )

    return make


def nll():
    return ProbabilityObjective(alpha=0.0)


CASES = [
    TrainerCase("trainer", trained(lambda: ProbabilityObjective(alpha=1.0)), trained(nll), host="sft"),
    TrainerCase(
        "threshold",
        trained(lambda: ProbabilityObjective(alpha=1.0, threshold=1e-3, normalize="kept")),
        trained(lambda: ProbabilityObjective(alpha=0.0, threshold=0.0, normalize="kept")),
        host="sft",
    ),
    TrainerCase("function", as_function(lambda: ProbabilityObjective(alpha=1.0)), as_function(nll), host="sft"),
]


def sft_trainer(objective, *, accumulation=1, loss_type="nll", hook="trainer", batch=4, dtype=None, **options):
    """TRL's trainer (`objective` None), or ours, or TRL's with our function, on a tiny model and four demonstrations."""
    from datasets import Dataset

    from cameraready.models import tiny_model, tiny_tokenizer
    from cameraready.posttraining._trl import import_trl

    trl = import_trl()
    rows = [{"prompt": prompt, "completion": completion} for prompt, completion in DEMONSTRATIONS]
    args = trl.SFTConfig(
        tempfile.mkdtemp(),
        per_device_train_batch_size=batch // accumulation,
        gradient_accumulation_steps=accumulation,
        loss_type=loss_type,
        max_steps=1,
        learning_rate=1e-3,
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        logging_steps=1,
        seed=0,
        disable_tqdm=True,
        **options,
    )
    given = {
        "model": tiny_model("llama", seed=3),
        "args": args,
        "train_dataset": Dataset.from_list(rows),
        "eval_dataset": Dataset.from_list(rows),
        "processing_class": tiny_tokenizer(),
    }
    if objective is None:
        return trl.SFTTrainer(**given)
    if hook == "function":
        return trl.SFTTrainer(**given, compute_loss_func=objective)
    from cameraready.posttraining.sft_objectives import ProbabilitySFTTrainer

    return ProbabilitySFTTrainer(**given, objective=objective, **({"chunked": False} if hook == "plain" else {}))


def losses_and_gradients(objective, **options):
    """The loss that a first step logs and the gradients that it steps with, before clipping."""
    from transformers import TrainerCallback

    gradients = {}

    class Keep(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            gradients.update({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})

    trainer = sft_trainer(objective, max_grad_norm=0.0, **options)
    trainer.add_callback(Keep())
    trainer.train()
    return trainer.state.log_history[0]["loss"], gradients
