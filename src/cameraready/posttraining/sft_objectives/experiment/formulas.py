"""The formulas and the identities, each tried on random batches; and what a step costs beside TRL's own loss."""

from __future__ import annotations

import ctypes
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cameraready.posttraining._trl import import_trl
from cameraready.posttraining.sft_objectives import ProbabilityObjective

ALPHAS = (0.0, 0.1, 0.5, 1.0, 3.0, 10.0)
BLOCKS = 12


def identities(blocks: int = BLOCKS) -> Iterator[dict[str, Any]]:
    """Largest deviations of each block's random batches: of gradients from W_f's formula and of its peak from alpha / (1 + alpha) (float64), of
    the family from generalized cross-entropy, of gradients from DFT's and from those of TRL's own losses (float32), relative to their norm."""
    steps = {
        name: _trl_step(objective, loss_type)
        for name, (objective, loss_type) in {
            "trl-nll": (None, "nll"),
            "trl-dft": (None, "dft"),
            "nll": (ProbabilityObjective("nll"), "nll"),
            "one": (ProbabilityObjective(alpha=1.0), "nll"),
        }.items()
    }
    for block in range(blocks):
        generator = torch.Generator().manual_seed(7_000_003 + block)
        logits = 4 * torch.randn(64, 2, 50, dtype=torch.float64, generator=generator)
        labels = torch.randint(0, 50, (64, 2), generator=generator)
        inputs = _inputs(generator, 4, 24, 256)
        gradients = {name: step(inputs) for name, step in steps.items()}
        yield {
            "arm": "objective",
            "run": block,
            "weight_gap": max(_weight_gap(alpha, logits, labels) for alpha in ALPHAS),
            "peak_gap": max(_peak_gap(alpha) for alpha in ALPHAS),
            "gce_gap": _gce_gap(logits, labels),
            "dft_gap": _gap(_gradient(ProbabilityObjective(alpha=1.0), logits, labels), _dft(logits, labels)),
            "trl_dft_gap": _gap(gradients["one"], gradients["trl-dft"]),
            "trl_nll_gap": _gap(gradients["nll"], gradients["trl-nll"]),
        }


def _gradient(objective: ProbabilityObjective, logits: Tensor, labels: Tensor) -> Tensor:
    given = logits.clone().requires_grad_()
    return torch.autograd.grad(objective.loss(given, labels, reduction="sum"), given)[0][:, 0]


def _weight_gap(alpha: float, logits: Tensor, labels: Tensor) -> float:
    """Of the gradient at the logits from p^alpha (pi - 1[j = y]), which the paper derives."""
    pi = logits[:, 0].softmax(-1)
    hot = torch.nn.functional.one_hot(labels[:, 1], pi.shape[-1])
    p = (pi * hot).sum(-1, keepdim=True)
    return float((_gradient(ProbabilityObjective(alpha=alpha), logits, labels) - p**alpha * (pi - hot)).abs().max())


def _peak_gap(alpha: float) -> float:
    p = torch.linspace(0, 1, 1_000_001, dtype=torch.float64)
    weights = ProbabilityObjective(alpha=alpha).gradient_weight(p)
    return abs(float(p[weights.argmax()]) - alpha / (1 + alpha))


def _gce_gap(logits: Tensor, labels: Tensor) -> float:
    p = logits[:, 0].softmax(-1).gather(-1, labels[:, 1:])[:, 0]
    found = ProbabilityObjective("gce", alpha=0.7).loss(logits, labels, reduction="none")[:, 0]
    return float((found - (1 - p**0.7) / 0.7).abs().max())


def _dft(logits: Tensor, labels: Tensor) -> Tensor:
    """The gradient of sg(p) * -log p, written out with torch alone."""
    given = logits.clone().requires_grad_()
    logps = given[:, 0].log_softmax(-1).gather(-1, labels[:, 1:])[:, 0]
    return torch.autograd.grad((logps.detach().exp() * -logps).sum(), given)[0][:, 0]


def _gap(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


# --- memory and time -------------------------------------------------------------------------------------------------------

#: Words, width and tokens of a batch: all logits at once take 233 MB.
VOCABULARY, WIDTH, TOKENS = 151_936, 64, 384


def costs(blocks: int = BLOCKS, *, vocabulary: int = VOCABULARY, tokens: int = TOKENS) -> Iterator[dict[str, Any]]:
    """Peak memory and seconds of a loss and its gradient, by TRL's trainer and by ours, in turn on the same batches in this process.

    A block is a batch; the order rotates. Memory is the peak of the resident set above what was held before.
    """
    arms = {
        "trl-nll": _trl_step(None, "nll", vocabulary),
        "trl-dft": _trl_step(None, "dft", vocabulary),
        "chunked": _trl_step(ProbabilityObjective(alpha=1.0), "nll", vocabulary),
        "whole-logits": _trl_step(ProbabilityObjective(alpha=1.0), "nll", vocabulary, chunked=False),
    }
    names = list(arms)
    for block in range(-1, blocks):
        inputs = _inputs(torch.Generator().manual_seed(8_000_009 + block), 4, tokens // 4, vocabulary)
        turn = block % len(names)
        for name in names[turn:] + names[:turn]:
            _trim()
            before = _peak(reset=True)
            started = time.perf_counter()
            arms[name](inputs)
            seconds = time.perf_counter() - started
            if block >= 0:  # the first batch warms up
                yield {"arm": name, "run": block, "peak_mb": (_peak() - before) / 2**20, "seconds": seconds}


def _trim() -> None:
    """Give back what earlier arms freed, where the C library keeps it for the next one."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _peak(*, reset: bool = False) -> int:
    """The most bytes this process has had resident, after `reset` the bytes that it has now."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError("this system does not tell the peak of a process's memory")


def _inputs(generator: torch.Generator, rows: int, length: int, vocabulary: int) -> dict[str, Tensor]:
    ids = torch.randint(0, vocabulary, (rows, length), generator=generator)
    labels = ids.clone()
    labels[:, : length // 4] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def _trl_step(
    objective: ProbabilityObjective | None, loss_type: str, vocabulary: int = 262, *, chunked: bool = True
) -> Callable[[dict[str, Tensor]], Tensor]:
    """A function from a batch to the gradients (flat) that TRL's trainer, or ours with `objective`, gets from it."""
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM

    from cameraready.models import tiny_tokenizer
    from cameraready.posttraining.sft_objectives.trainer import ProbabilitySFTTrainer

    trl = import_trl()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=vocabulary,
                hidden_size=WIDTH,
                intermediate_size=2 * WIDTH,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=2,
                max_position_embeddings=4096,
            )
        )
    args = trl.SFTConfig(
        tempfile.mkdtemp(prefix="cameraready-"),
        loss_type=loss_type,
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        disable_tqdm=True,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    rows = Dataset.from_list([{"input_ids": [1, 2], "labels": [1, 2]}])
    given = {"model": model, "args": args, "train_dataset": rows, "processing_class": tiny_tokenizer()}
    if objective is None:
        trainer = trl.SFTTrainer(**given)
    else:
        trainer = ProbabilitySFTTrainer(**given, objective=objective, chunked=chunked)
    trainer.model.train()

    def step(inputs: dict[str, Tensor]) -> Tensor:
        count = (inputs["labels"][:, 1:] != -100).sum()
        trainer.model.zero_grad()
        trainer.compute_loss(trainer.model, dict(inputs), num_items_in_batch=count).backward()
        if vocabulary > 1000:
            return torch.empty(0)  # a copy of these gradients would be part of the peak
        return torch.cat([p.grad.flatten() for p in trainer.model.parameters()])

    return step
