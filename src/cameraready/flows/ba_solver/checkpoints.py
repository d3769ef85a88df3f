"""A SideNet's training on disk: weights, averages, moments and the generator in one safetensors file, written whole or not at all."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Progress:
    """How far a training has come: losses of its steps, evaluations of the backbone, seconds."""

    losses: tuple[float, ...] = ()
    calls: int = 0
    seconds: float = 0.0


def save(
    file: Path,
    side: nn.Module,
    average: dict[str, Tensor],
    optimizer: torch.optim.Optimizer,
    drawn: Tensor,
    settings: dict[str, Any],
    progress: Progress,
) -> None:
    """Write everything that going on needs; `drawn` is the generator's state at the beginning of the next step."""
    from safetensors.torch import save_file

    tensors = {f"side.{name}": value for name, value in side.state_dict().items()}
    tensors |= {f"average.{name}": value for name, value in average.items()}
    for place, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{place}.{name}": value for name, value in state.items()}
    tensors["generator"] = drawn
    tensors["losses"] = torch.tensor(progress.losses, dtype=torch.float64)
    about = {"settings": settings, "calls": progress.calls, "seconds": progress.seconds}
    file.parent.mkdir(parents=True, exist_ok=True)
    aside = file.with_name(f"{file.name}.{os.getpid()}.part")
    contiguous = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    save_file(contiguous, aside, metadata={"training": json.dumps(about)})
    os.replace(aside, file)


def load(
    file: Path,
    side: nn.Module,
    average: dict[str, Tensor],
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator,
    settings: dict[str, Any],
) -> Progress:
    """Put everything back into place.

    Raises
    ------
    ValueError
        The file is of another network or other settings; the sentence says which.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as stored:
            about = json.loads((stored.metadata() or {}).get("training", "{}"))
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 (not a dict)
    except SafetensorError as error:
        raise ValueError(f"{file} is no checkpoint, or a damaged one ({error}); remove it to begin anew") from error
    before = about.get("settings")
    if before is None:
        raise ValueError(f"{file} is no checkpoint of train_sidenet")
    for name, value in settings.items():
        if before.get(name) != value:
            raise ValueError(
                f"{file} was made with {name}={before.get(name)}, this training has {name}={value}; remove the file to begin anew"
            )
    weights = _under("side.", tensors)
    mine = side.state_dict()
    if weights.keys() != mine.keys() or any(weights[name].shape != mine[name].shape for name in mine):
        raise ValueError(f"{file} is of a SideNet of another size; remove it to begin anew")
    side.load_state_dict(weights)
    for name, value in _under("average.", tensors).items():
        average[name].copy_(value)
    states: dict[int, dict[str, Tensor]] = {}
    for name, value in _under("optimizer.", tensors).items():
        place, _, what = name.partition(".")
        states.setdefault(int(place), {})[what] = value
    optimizer.load_state_dict({**optimizer.state_dict(), "state": states})
    generator.set_state(tensors["generator"])
    return Progress(tuple(tensors["losses"].tolist()), int(about["calls"]), float(about["seconds"]))


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
