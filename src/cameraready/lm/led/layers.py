"""What the lower layers of a model predict: hidden states caught by hooks, read through the model's own norm and head."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Literal

import torch
from torch import nn

from cameraready.lm.led.config import LEDConfig
from cameraready.lm.led.distribution import Final
from cameraready.models import LanguageModel, anatomy

#: Logits held at once while lower layers are normalised; 64 Mi numbers are 256 MiB in float32.
LOGITS_AT_ONCE = 2**26


def parts_of(model: Any, tokenizer: Any = None) -> tuple[Any, Any]:
    """A transformers model and a tokenizer, also from what `cameraready.models.open_model` returns."""
    if isinstance(model, LanguageModel):
        return model.model, model.tokenizer if tokenizer is None else tokenizer
    return model, tokenizer


class LowerLayers:
    """The layers that a config looks at below the final one. A context manager: hooks live from enter to exit.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Any decoder-only causal language model.
    led : LEDConfig
    positions : {"last", "all"}
        Which positions of each forward pass are kept.

    Raises
    ------
    ValueError
        When the model has fewer layers than `led.depth` (`UnknownArchitecture` where its parts are not found).
    """

    def __init__(self, model: Any, led: LEDConfig, positions: Literal["last", "all"] = "last") -> None:
        self.led = led
        self.anatomy = anatomy(model)
        n = self.anatomy.n_layers
        if led.depth > n:
            raise ValueError(
                f"depth={led.depth} looks at more layers than the model has ({n}); choose a depth of at most {n}"
            )
        if led.normaliser == "candidates":
            _check_head(self.anatomy)
        self.modules = [self.anatomy.layers[n - 1 - i].module for i in range(1, led.depth)]
        self.positions = positions
        self.hidden: dict[int, torch.Tensor] = {}
        self._hooks: ExitStack | None = None

    def __enter__(self) -> LowerLayers:
        if self._hooks is not None:
            raise RuntimeError("these layers are watched already; leave the context before entering it again")
        self.hidden.clear()
        with ExitStack() as hooks:
            for i, module in enumerate(self.modules):
                hooks.callback(module.register_forward_hook(self._keep(i)).remove)
            self._hooks = hooks.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        hooks, self._hooks = self._hooks, None
        self.hidden.clear()
        if hooks is not None:
            hooks.close()

    @property
    def watching(self) -> bool:
        return self._hooks is not None

    def _keep(self, i: int) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            # A copy: a view would hold the states of a whole prompt.
            self.hidden[i] = hidden[:, -1].clone() if self.positions == "last" else hidden

        return hook

    def at_candidates(self, final: Final, hidden: list[torch.Tensor]) -> list[torch.Tensor]:
        """log p^l of the candidates, each (B, k), for hidden states (B, D) of the lower layers from the top down."""
        if not hidden:
            return []
        device = final.candidates.device
        if self.led.normaliser == "candidates":
            rows = [candidate_logits(self.anatomy, self._normed(states), final.candidates) for states in hidden]
            return [final.over_candidates(row.to(device), i) for i, row in enumerate(rows, 1)]
        # Layers share one product with the head, whose weights are what a small batch has to read.
        batch = hidden[0].shape[0]
        together = max(1, LOGITS_AT_ONCE // (batch * self.anatomy.vocab_size))
        out: list[torch.Tensor] = []
        for start in range(0, len(hidden), together):
            some = hidden[start : start + together]
            logits = self.anatomy.logits(torch.cat(some), normed=not self.led.apply_final_norm)
            out += [final.at_candidates(layer.to(device), start + i) for i, layer in enumerate(logits.split(batch), 1)]
        return out

    def _normed(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.anatomy.final_norm(hidden) if self.led.apply_final_norm else hidden


def candidate_logits(anatomy: Any, normed: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
    """Logits of chosen tokens alone: (B, D), (B, k) -> (B, k), from as many rows of the head."""
    rows = anatomy.head.weight[candidates.to(anatomy.head.weight.device)]
    logits = torch.einsum("bd,bkd->bk", normed.to(rows.device, rows.dtype), rows)
    if anatomy.head.bias is not None:
        logits = logits + anatomy.head.bias[candidates.to(rows.device)]
    for step in anatomy.finish:
        logits = step(logits)
    return logits


def _check_head(anatomy: Any) -> None:
    head = anatomy.head
    if not isinstance(head, nn.Linear) or any(True for _ in head.children()) or not head.weight.is_floating_point():
        raise ValueError(
            f"normaliser='candidates' reads single rows of the head, which only a plain linear map offers, not an adapted or quantised {type(head).__name__}; use normaliser='exact'"
        )
