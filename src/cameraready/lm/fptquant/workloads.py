"""Models and text that the study measures on: a small Llama trained here, packaged and user's models, and a wide one for timing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from cameraready.lm import _corpora
from cameraready.lm._workload import LMWorkload, open_lm
from cameraready.lm.fptquant.base_model import architecture, arrays, train

if TYPE_CHECKING:
    from cameraready.evidence import Spec

#: Trained here, in `prepare`; the small one is for smoke runs.
TRAINED = {
    "trained-llama": {"layers": 4, "hidden": 128, "steps": 300, "calibration": 64, "evaluation": 48},
    "sketched-llama": {"layers": 2, "hidden": 64, "steps": 5, "calibration": 2, "evaluation": 2},
}
SPEED = {"width-896": {"layers": 4, "hidden": 896}, "width-64": {"layers": 2, "hidden": 64}}
LENGTH = 128


@dataclass(frozen=True)
class TrainedModel:
    """A Llama with a vocabulary of bytes, trained on nine tenths of Python's documentation and measured on the last."""

    name: str
    layers: int
    hidden: int
    steps: int
    calibration: int
    evaluation: int

    def tokenizer(self) -> Any:
        from cameraready.models import tiny_tokenizer

        return tiny_tokenizer()

    def prepare(self) -> dict[str, np.ndarray]:
        """Weights, by name."""
        seen, _ = documentation()
        return arrays(train(self.empty(), seen, steps=self.steps))

    def empty(self) -> Any:
        return architecture(self.tokenizer(), layers=self.layers, hidden=self.hidden)

    def model(self, weights: Mapping[str, np.ndarray]) -> Any:
        """The model with the prepared weights."""
        model = self.empty()
        model.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in weights.items()})
        return model.eval()

    def text(self, block: int) -> tuple[list[Tensor], Tensor]:
        """Batches of 8 windows of the text it was trained on, and windows held out; both drawn anew for each block."""
        generator = torch.Generator().manual_seed(7_000 + block)
        seen, held = documentation()

        def draw(source: Tensor, n: int) -> Tensor:
            starts = torch.randperm(len(source) // LENGTH - 1, generator=generator)[:n] * LENGTH
            return torch.stack([source[start : start + LENGTH] for start in starts.tolist()])

        return list(draw(seen, self.calibration).split(8)), draw(held, self.evaluation)


@functools.cache
def documentation() -> tuple[Tensor, Tensor]:
    """Bytes of Python's documentation: nine tenths, and the last."""
    codes = torch.tensor(list(_corpora.text("documentation").encode()), dtype=torch.long)
    cut = len(codes) * 9 // 10
    return codes[:cut], codes[cut:]


@dataclass(frozen=True)
class WideModel:
    """An untrained Llama as wide as a half-billion model, shallow: for the time of a forward pass."""

    name: str
    layers: int
    hidden: int

    def model(self) -> Any:
        from transformers import LlamaConfig, LlamaForCausalLM

        heads = self.hidden // 64 or 1
        config = LlamaConfig(
            vocab_size=1024,
            hidden_size=self.hidden,
            intermediate_size=4864 if self.hidden == 896 else 3 * self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=heads,
            num_key_value_heads=2 if heads % 2 == 0 else 1,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return LlamaForCausalLM(config).eval()


def open_workload(spec: Spec) -> TrainedModel | WideModel | LMWorkload:
    """The study's `open`: own names, else whatever the room opens."""
    if spec.kind == "shipped" and spec.name in TRAINED:
        return TrainedModel(spec.name, **TRAINED[spec.name])
    if spec.kind == "shipped" and spec.name in SPEED:
        return WideModel(spec.name, **SPEED[spec.name])
    return open_lm(spec)


def texts(
    workload: LMWorkload, lm: Any, *, calibration: int, evaluation: int, length: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Windows to find ranges on, and one window a block to measure on: of the user's prompts, or of Python's documentation.

    Raises
    ------
    ValueError
        If the user's prompts are too few or too short for both.
    """
    wanted = calibration + evaluation
    if workload.prompts is not None:
        rows = [
            lm.encode(f"{prompt}\n{answer or ''}")[0, :length].cpu() for prompt, answer in workload.prompts[:wanted]
        ]
        rows = [row for row in rows if len(row) > 1]
        if len(rows) < calibration + 1:
            raise ValueError(
                f"{len(rows)} of the prompts have two tokens or more, but {calibration} are needed to find the ranges of the quantisers and some "
                "more to measure on"
            )
    else:
        windows = _corpora.windows(lm.tokenizer, "documentation", length=length, n=wanted)
        start = first_token(lm)
        rows = [row if start is None else torch.cat((start, row)) for row in windows]
    return [row[None] for row in rows[:calibration]], rows[calibration:]


def first_token(lm: Any) -> Tensor | None:
    """The token that the model's tokenizer puts in front of every text, if there is one."""
    ids = lm.encode("a")[0].cpu()
    start = lm.tokenizer.bos_token_id
    return ids[:1] if start is not None and int(ids[0]) == start else None


@torch.no_grad()
def nats(model: Callable[..., Any], rows: list[Tensor] | Tensor, device: Any = "cpu") -> list[float]:
    """Mean cross-entropy of the next token, in nats, a window each."""
    found = []
    for row in rows:
        ids = row.to(device)[None]
        logits = model(ids).logits[0, :-1].float()
        found.append(float(torch.nn.functional.cross_entropy(logits, ids[0, 1:])))
    return found
