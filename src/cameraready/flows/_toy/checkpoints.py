"""A file from which an interrupted training goes on to the very same end."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

#: Seconds between two savings.
EVERY = 20.0


class Checkpoint:
    """The state of a training in one safetensors file, replaced whole, so that a kill at any moment leaves the last one.

    Parameters
    ----------
    path : Path or None
        None keeps nothing.
    settings : JSON value
        Of the training; a file that another training left is told on stderr and not used.
    every : float, optional
        Seconds between two savings, by default 20.
    """

    def __init__(self, path: Path | None, settings: Any, *, every: float | None = None):
        self.path = path
        self.every = EVERY if every is None else every
        self._digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
        self._saved = time.monotonic()

    def load(self) -> tuple[int, dict[str, Tensor]] | None:
        """Steps done and the tensors saved after them; None where there is nothing to go on from."""
        if self.path is None or not self.path.exists():
            return None
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.path, framework="pt") as file:
                facts = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        except (SafetensorError, OSError) as error:
            print(f"{self.path} cannot be read ({error}); the training begins anew.", file=sys.stderr)
            return None
        if facts.get("settings") != self._digest:
            print(f"{self.path} is of a training with other settings; the training begins anew.", file=sys.stderr)
            return None
        if "step" not in facts:
            print(f"{self.path} cannot be read (it does not say its step); the training begins anew.", file=sys.stderr)
            return None
        return int(facts["step"]), tensors

    def due(self) -> bool:
        """Whether it is time to save."""
        return self.path is not None and time.monotonic() - self._saved >= self.every

    def save(self, step: int, tensors: dict[str, Tensor]) -> None:
        """Keep the state after `step` steps."""
        if self.path is None:
            return
        from safetensors.torch import save_file

        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_name(f"{self.path.name}.{os.getpid()}.part")
        kept = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        save_file(kept, part, metadata={"settings": self._digest, "step": str(step)})
        os.replace(part, self.path)
        self._saved = time.monotonic()


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The state of an optimizer whose states are tensors, by parameter number and name."""
    return {
        f"optimizer.{number}.{name}": value
        for number, state in optimizer.state_dict()["state"].items()
        for name, value in state.items()
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """The way back from `optimizer_tensors`."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        if key.startswith("optimizer."):
            _, number, name = key.split(".", 2)
            state.setdefault(int(number), {})[name] = value
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
