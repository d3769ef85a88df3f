"""Replayed rollouts of S runs as one batch."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass
class Rollouts:
    """Replayed rollouts of S runs: (S, R) or (S, R, T), with an empty mask where a run has fewer."""

    prompts: Tensor
    index: Tensor
    rewards: Tensor
    group_means: Tensor
    old_logps: Tensor
    mask: Tensor

    @classmethod
    def empty(cls, runs: int, n: int, longest: int) -> Rollouts:
        whole, real = torch.zeros(runs, n, dtype=torch.int64), torch.zeros(runs, n)
        tokens = torch.zeros(runs, n, longest)
        return cls(whole, whole.clone(), real, real.clone(), tokens, tokens.bool())

    def part(self, number: int, of: int) -> Rollouts:
        return Rollouts(*(getattr(self, f.name)[:, number::of] for f in fields(self)))
