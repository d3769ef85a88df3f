"""What the study trains: a byte-level transformer on Python's own documentation, a vision transformer and a deep perceptron on digits, or the user's model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

from cameraready.evidence import Spec, SpecError
from cameraready.evidence.specs import load_object

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """A training run to repeat.

    `model(seed)` gives a fresh model, `batches(seed)` training batches without end, `loss(model, batch)` the mean loss of one, `validation`
    the batches on which models are compared, `optimizers(model, rate)` the base optimizers over its parameters, `blocks(model)` what
    `DepthSmoothing` is given, `errors(model, batch)` the share of wrong answers where there is one.
    """

    name: str
    model: Callable[[int], nn.Module]
    batches: Callable[[int], Iterable[Any]]
    loss: Callable[[nn.Module, Any], Tensor]
    validation: Sequence[Any]
    steps: int
    rates: Sequence[float]
    optimizers: Callable[[nn.Module, float], list[optim.Optimizer]]
    blocks: Callable[[nn.Module], Any] = lambda model: model
    errors: Callable[[nn.Module, Any], Tensor] | None = None


def open_task(spec: Spec) -> Task:
    """A shipped task by name, or the user's object."""
    if spec.kind in ("object", "value"):
        return own_task(spec.text, spec.value if spec.kind == "value" else load_object(spec.name))
    return SHIPPED[spec.name]()


def adamw(model: nn.Module, rate: float) -> list[optim.Optimizer]:
    return [optim.AdamW(model.parameters(), lr=rate, weight_decay=0.1, betas=(0.9, 0.99))]


def muon(model: nn.Module, rate: float) -> list[optim.Optimizer]:
    """Muon for the blocks' matrices, AdamW at the same rate for everything else, as Muon's ``match_rms_adamw`` allows."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and name.startswith("blocks.")]
    taken = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in taken]
    return [
        optim.Muon(matrices, lr=rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        optim.AdamW(rest, lr=rate, weight_decay=0.1, betas=(0.9, 0.99)),
    ]


# --- text -----------------------------------------------------------------------------------------------------------


@cache
def documentation() -> Tensor:
    """Python's language reference as the interpreter ships it for ``help()``: about 400,000 characters, lower case, one space a gap, as ASCII."""
    from pydoc_data.topics import topics

    text = " ".join(" ".join(topics[name] for name in sorted(topics)).lower().split())
    return torch.from_numpy(np.frombuffer(text.encode("ascii", errors="replace"), dtype=np.uint8).astype(np.int64))


class Block(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*qkv, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(mixed)
        return x + self.down(F.relu(self.up(self.norm2(x))))


class ByteTransformer(nn.Module):
    """Predicts the next of 128 characters."""

    def __init__(self, depth: int, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(128, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 128, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                # Branches begin small, so that what follows from the last character alone is learnt first.
                size = 0.3 if name.startswith(("tokens", "positions")) else parameter.shape[1] ** -0.5
                nn.init.normal_(parameter, std=size * (0.1 if name.endswith(("out.weight", "down.weight")) else 1.0))

    def forward(self, codes: Tensor) -> Tensor:
        x = self.tokens(codes) + self.positions.weight[: codes.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_character_loss(model: nn.Module, codes: Tensor) -> Tensor:
    return F.cross_entropy(model(codes[:, :-1]).flatten(0, 1), codes[:, 1:].flatten())


def text_task(
    name: str,
    optimizers: Callable[[nn.Module, float], list[optim.Optimizer]],
    rates: Sequence[float],
    *,
    depth: int = 6,
    width: int = 32,
    length: int = 32,
    batch: int = 16,
    steps: int = 120,
) -> Task:
    """The last tenth of the text is for validation; windows are drawn at random."""
    codes = documentation()
    cut = len(codes) * 9 // 10
    train, held_out = codes[:cut], codes[cut:]
    rows = len(held_out) // (length + 1)
    validation = held_out[: rows * (length + 1)].view(rows, length + 1)

    def batches(seed: int) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            starts = torch.randint(len(train) - length, (batch, 1), generator=generator)
            yield train[starts + torch.arange(length + 1)]

    return Task(
        name,
        model=lambda seed: ByteTransformer(depth, width, width // 16, length),
        batches=batches,
        loss=next_character_loss,
        validation=validation[: 8 * 64].split(128) if width < 64 else validation[: 16 * 64].split(64),
        steps=steps,
        rates=rates,
        optimizers=optimizers,
    )


# --- digits -----------------------------------------------------------------------------------------------------------


@cache
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scikit-learn's 1,797 digits, standardised as a whole: 1,200 for training, 597 for validation."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    x = torch.tensor((pixels - pixels.mean()) / pixels.std(), dtype=torch.float32).view(-1, 1, 8, 8)
    y = torch.tensor(labels)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    train, held_out = order[:1200], order[1200:]
    return x[train], y[train], x[held_out], y[held_out]


class PerceptronBlock(nn.Module):
    """A residual block of two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(self.norm(x))))


class ResidualPerceptron(nn.Module):
    """Residual blocks between two linear layers."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, width), nn.Linear(width, 10)
        self.blocks = nn.Sequential(*(PerceptronBlock(width) for _ in range(depth)))

    def forward(self, images: Tensor) -> Tensor:
        return self.last(self.blocks(self.first(images.flatten(1))))


def vision_transformer(depth: int = 6, width: int = 32) -> nn.Module:
    """A small ViT of transformers, from scratch: patches of 4 x 4 pixels."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        num_hidden_layers=depth,
        hidden_size=width,
        num_attention_heads=width // 8,
        intermediate_size=2 * width,
        image_size=8,
        patch_size=4,
        num_channels=1,
        num_labels=10,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return ViTForImageClassification(config)


def scores(model: nn.Module, images: Tensor) -> Tensor:
    found = model(images)
    return found if isinstance(found, Tensor) else found.logits


def label_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(scores(model, batch[0]), batch[1])


def wrong_labels(model: nn.Module, batch: Batch) -> Tensor:
    return (scores(model, batch[0]).argmax(1) != batch[1]).float().mean()


def digits_task(name: str, model: Callable[[], nn.Module], rates: Sequence[float], steps: int, batch: int = 64) -> Task:
    x, y, held_out, labels = digits()

    def batches(seed: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            rows = torch.randint(len(y), (batch,), generator=generator)
            yield x[rows], y[rows]

    return Task(
        name,
        model=lambda seed: model(),
        batches=batches,
        loss=label_loss,
        validation=[(held_out, labels)],
        steps=steps,
        rates=rates,
        optimizers=adamw,
        errors=wrong_labels,
    )


SHIPPED: dict[str, Callable[[], Task]] = {
    "text-adamw": lambda: text_task("text-adamw", adamw, (8e-3, 1.6e-2, 3.2e-2, 6.4e-2)),
    "text-muon": lambda: text_task("text-muon", muon, (4e-2, 8e-2, 1.6e-1), width=16, steps=100),
    "digits-vit": lambda: digits_task("digits-vit", vision_transformer, (3e-3, 6e-3, 1.2e-2), steps=100),
    "digits-mlp": lambda: digits_task(
        "digits-mlp", lambda: ResidualPerceptron(8, 32), (4e-3, 8e-3, 1.6e-2, 3.2e-2), steps=80
    ),
    "depth-12": lambda: text_task("depth-12", adamw, (1e-3,), depth=12, width=128, length=128, batch=8),
    "text-large": lambda: text_task(
        "text-large", adamw, (1e-3, 2e-3, 4e-3), depth=12, width=256, length=256, batch=32, steps=3_000
    ),
}


# --- the user's own ------------------------------------------------------------------------------------------------------


def own_task(name: str, given: Any) -> Task:
    """A task from an object with ``model``, ``batches``, ``loss`` and ``validation``, and, where they matter, the other attributes of `Task`.

    ``learning_rate`` (1e-3) is the middle of the three rates that are tried; ``steps`` defaults to 200 and ``optimizers`` to AdamW. If
    ``batches`` ends, it is called again.
    """
    missing = [part for part in ("model", "batches", "loss", "validation") if not hasattr(given, part)]
    if missing:
        raise SpecError(
            f"{name} has no {', '.join(missing)}; expected are model(seed) -> Module, batches(seed) -> iterable of batches,"
            " loss(model, batch) -> scalar, and validation, a list of batches"
        )
    validation = list(given.validation)
    if not validation:
        raise SpecError(f"{name}.validation is empty; models are compared on its batches")
    rate, steps = float(getattr(given, "learning_rate", 1e-3)), int(getattr(given, "steps", 200))
    if steps < 1 or not rate > 0:
        raise SpecError(f"{name} has steps = {steps} and learning_rate = {rate:g}; both must be positive")

    def batches(seed: int) -> Iterator[Any]:
        epoch = 0
        while True:
            count = 0
            for batch in given.batches(seed + 100_003 * epoch):
                count += 1
                yield batch
            if not count:
                raise ValueError(f"{name}.batches({seed}) gave no batch")
            epoch += 1

    def optimizers(model: nn.Module, rate: float) -> list[optim.Optimizer]:
        found = given.optimizers(model, rate) if hasattr(given, "optimizers") else adamw(model, rate)
        return [found] if isinstance(found, optim.Optimizer) else list(found)

    return Task(
        name,
        model=given.model,
        batches=batches,
        loss=given.loss,
        validation=validation,
        steps=steps,
        rates=(rate / 2, rate, 2 * rate),
        optimizers=optimizers,
        blocks=getattr(given, "blocks", lambda model: model),
        errors=getattr(given, "errors", None),
    )
