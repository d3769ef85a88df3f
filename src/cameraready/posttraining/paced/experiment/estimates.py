"""Estimates of difficulty for S runs at once, made of the component's own parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, stack_module_state, vmap

from cameraready.posttraining._testbed import AdamW
from cameraready.posttraining.paced.head import PartitionHead, RunningAccuracy


class Heads:
    """S partition heads side by side: the parameters of `PartitionHead.network` stacked, each run's loss its own."""

    def __init__(
        self,
        embeddings: Tensor,
        numbers: Sequence[int],
        *,
        beta: float,
        start: float = 0.5,
        hidden: int = 32,
        lr: float = 3e-3,
        steps: int = 4,
    ) -> None:
        heads = [
            PartitionHead(
                embeddings, hidden=hidden, beta=beta, start=start, generator=torch.Generator().manual_seed(number)
            )
            for number in numbers
        ]
        self.embeddings, self.beta, self.steps = heads[0].embeddings, beta, steps
        self._network: Any = heads[0].network
        self._parameters, _ = stack_module_state([head.network for head in heads])
        self._optimizer = AdamW(list(self._parameters.values()), lr)
        self.runs = len(heads)

    def _estimate(self, embeddings: Tensor) -> Tensor:
        """p_hat of embeddings (S, B, F): (S, B), with gradient."""

        def one(parameters: dict[str, Tensor], rows: Tensor) -> Tensor:
            return functional_call(self._network, parameters, (rows,)).squeeze(-1)

        return vmap(one)(self._parameters, embeddings)

    @torch.no_grad()
    def accuracy(self) -> Tensor:
        """Raw estimates of the pool, (S, P)."""
        return self._estimate(self.embeddings.expand(self.runs, -1, -1))

    def update(self, prompts: Tensor, rewards: Tensor, weights: Tensor | None = None) -> None:
        """As of `PartitionHead.update`: prompts (S, B), rewards and weights (S, B, G), NaN rewards left out."""
        rows = self.embeddings[prompts]
        scored = torch.isfinite(rewards)
        known = torch.where(scored, rewards, 0.0)
        for _ in range(self.steps):
            squared = torch.where(scored, self._estimate(rows)[..., None] - known, 0.0).square()
            if weights is not None:
                squared = squared * weights
            loss = (squared.sum((1, 2)) / scored.sum((1, 2)).clamp(min=1)).sum()
            for parameter, gradient in zip(
                self._parameters.values(), torch.autograd.grad(loss, list(self._parameters.values())), strict=True
            ):
                parameter.grad = gradient
            self._optimizer.step()


class Counters:
    """S running averages."""

    def __init__(self, n_prompts: int, runs: int, **options: float) -> None:
        self.counters = [RunningAccuracy(n_prompts, **options) for _ in range(runs)]

    def accuracy(self) -> Tensor:
        return torch.stack([counter.accuracy(clip=False) for counter in self.counters])

    def update(self, prompts: Tensor, rewards: Tensor) -> None:
        for counter, ids, row in zip(self.counters, prompts, rewards, strict=True):
            counter.update(ids, row)


class Owns:
    """A user's estimates, one of each run: what the callable makes of (embeddings (P, F), seed), with `update` and `accuracy`."""

    def __init__(self, make: Callable[[Tensor, int], Any], embeddings: Tensor, numbers: Sequence[int]) -> None:
        self.estimates = [make(embeddings.clone(), number) for number in numbers]
        self.n_prompts = len(embeddings)

    def accuracy(self) -> Tensor:
        found = [torch.as_tensor(estimate.accuracy(), dtype=torch.float64) for estimate in self.estimates]
        for values in found:
            if values.shape != (self.n_prompts,):
                raise ValueError(
                    f"your estimate's accuracy() must give ({self.n_prompts},) numbers, one a prompt; got {tuple(values.shape)}"
                )
        return torch.stack(found)

    def update(self, prompts: Tensor, rewards: Tensor) -> None:
        for estimate, ids, row in zip(self.estimates, prompts, rewards, strict=True):
            estimate.update(ids.clone(), row.clone())


@dataclass
class Row:
    """One run's estimates as `PacedSampler` asks for them."""

    values: Tensor

    @property
    def n_prompts(self) -> int:
        return len(self.values)

    def accuracy(self, prompt_ids: Tensor | None = None, *, clip: bool = True) -> Tensor:
        values = self.values.clamp(0, 1) if clip else self.values
        return values if prompt_ids is None else values[prompt_ids]
