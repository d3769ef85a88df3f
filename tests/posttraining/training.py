"""Short trainings of tiny random models by TRL, for tests: three or four steps that exercise clipping, accumulation and early ends."""

import contextlib
import random
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

LETTERS = range(ord("a"), ord("u"))
#: All tokens but twenty letters and the end, so that completions end at different lengths.
NEVER = [token for token in range(262) if token not in (*LETTERS, 258)]

#: Two prompts with four completions each in two micro-batches, and two optimizer steps on each batch, so that ratios leave 1 and are
#: clipped. Plain SGD: AdamW would make steps of full size from gradients that are rounding alone.
_COMMON = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "learning_rate": 0.1,
    "lr_scheduler_type": "constant",
    "optim": "sgd",
    "max_grad_norm": 1.0,
    "logging_steps": 1,
    "save_strategy": "steps",
    "save_steps": 2,
    "seed": 3,
    "bf16": False,
    "use_cpu": True,
    "disable_tqdm": True,
    "gradient_checkpointing": False,
    "report_to": [],
}
GRPO = {
    **_COMMON,
    "num_generations": 4,
    "num_iterations": 2,
    "max_completion_length": 12,
    "generation_kwargs": {"suppress_tokens": NEVER},
}
SFT = {**_COMMON, "max_length": 64}


@dataclass
class Trained:
    """What came of a training."""

    losses: list[float]
    weights: dict[str, Any]
    trainer: Any

    @property
    def log(self) -> list[dict[str, Any]]:
        return self.trainer.state.log_history


def letters(completions, answer, **_columns):
    """How often the wanted letter and its successor stand in each completion."""
    return [float(text.count(a) + text.count(chr(ord(a) + 1))) for text, a in zip(completions, answer, strict=True)]


def dataset(host="grpo"):
    from datasets import Dataset

    rows = [{"prompt": f"{'say ' * (1 + i % 3)}{chr(97 + i)}:", "answer": chr(97 + i)} for i in range(12)]
    if host == "sft":
        rows = [
            {"prompt": row["prompt"], "completion": row["answer"] * (1 + 5 * (i % 4))} for i, row in enumerate(rows)
        ]
    return Dataset.from_list(rows)


def config(host, folder, steps, *, made_by=None, **settings):
    """Settings of a short training, as TRL's config or as what `made_by` makes of them."""
    import trl

    usual, common = (trl.GRPOConfig, GRPO) if host == "grpo" else (trl.SFTConfig, SFT)
    return (made_by or usual)(**{**common, "output_dir": str(folder), "max_steps": steps, **settings})


def trls_own(model, tokenizer, args, data, reward_funcs):
    """TRL's trainer as it is."""
    import trl

    if reward_funcs is None:
        return trl.SFTTrainer(model=model, processing_class=tokenizer, args=args, train_dataset=data)
    return trl.GRPOTrainer(
        model=model, processing_class=tokenizer, args=args, train_dataset=data, reward_funcs=reward_funcs
    )


def train(make, args, host="grpo", resume=None) -> Trained:
    """Train the tiny model that is the same for all; `make` has the five arguments of a `TrainerCase`."""
    import transformers

    from cameraready.models import tiny_model, tiny_tokenizer

    with warnings.catch_warnings(), _without_bars():
        warnings.simplefilter("ignore", FutureWarning)  # deprecations between TRL and transformers
        trainer = make(
            tiny_model("llama"), tiny_tokenizer(), args, dataset(host), [letters] if host == "grpo" else None
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train(resume_from_checkpoint=resume)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return Trained(losses, {name: p.detach().clone() for name, p in trainer.model.named_parameters()}, trainer)


def furthest(first, second) -> float:
    """The largest difference between two sets of weights."""
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


@contextlib.contextmanager
def untouched_randomness():
    import torch

    python, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=[]):
        yield
    random.setstate(python)
    np.random.set_state(numpy_state)  # noqa: NPY002


@contextlib.contextmanager
def _without_bars():
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()
