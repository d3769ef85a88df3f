"""What an objective has seen: labels, the share that its threshold kept, batches in which none survived."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class LossStats:
    """What an objective has seen since it was made or `reset`, for the log of a run.

    Counts are held where the loss was computed and read when asked for, so that training does not wait for them.
    """

    _counts: Tensor | None = field(default=None, repr=False)
    _mass: Tensor | None = field(default=None, repr=False)

    def add(self, logps: Tensor, mask: Tensor, keep: Tensor) -> None:
        """Count a batch: its log-probabilities, which of them are labels, and which of those the threshold kept."""
        tokens, kept = mask.sum(), keep.sum()
        one = torch.ones_like(tokens)
        counts = torch.stack([one, tokens, kept, (tokens == 0).long(), ((tokens > 0) & (kept == 0)).long()])
        mass = torch.where(mask, logps, -torch.inf).exp().sum().double()
        if self._counts is not None and self._mass is not None:
            counts = counts + self._counts.to(counts.device)
            mass = mass + self._mass.to(mass.device)
        self._counts, self._mass = counts, mass

    def reduce(self, accelerator: Any) -> None:
        """Make the counts those of all processes of an `accelerate.Accelerator`; to be called by all of them."""
        if accelerator.num_processes == 1:
            return
        device = accelerator.device
        counts = torch.zeros(5, dtype=torch.long) if self._counts is None else self._counts
        mass = torch.zeros((), dtype=torch.double) if self._mass is None else self._mass
        self._counts = accelerator.reduce(counts.to(device), reduction="sum")
        self._mass = accelerator.reduce(mass.to(device), reduction="sum")

    def reset(self) -> None:
        """Forget everything."""
        self._counts = self._mass = None

    def summary(self) -> dict[str, float]:
        """``batches``, ``tokens``, ``kept_fraction``, ``mean_probability``, ``empty_batches`` (no label at all) and
        ``batches_without_survivors`` (labels, but none that the threshold kept); fractions are NaN before the first token."""
        if self._counts is None or self._mass is None:
            batches = tokens = kept = empty = starved = 0
            mass = 0.0
        else:
            batches, tokens, kept, empty, starved = (int(count) for count in self._counts.tolist())
            mass = float(self._mass)
        return {
            "batches": batches,
            "tokens": tokens,
            "kept_fraction": kept / tokens if tokens else float("nan"),
            "mean_probability": mass / tokens if tokens else float("nan"),
            "empty_batches": empty,
            "batches_without_survivors": starved,
        }
