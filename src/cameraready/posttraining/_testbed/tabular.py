"""Tabular policies: a free logit for every token at every prefix of every prompt, for S seeds."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cameraready.posttraining._testbed import walking


class Tabular:
    """One softmax for each prompt and prefix of a task, S times.

    Nothing carries over from prompt to prompt: what remains is the update rule itself. On a task of single tokens it is a bandit.

    Parameters
    ----------
    task : EnumerableTask
    seeds : int or sequence of int
        Only their number matters: the tables start alike.
    start : (P, N) float, optional
        Distribution to start from, exactly where it is positive; by default every softmax is uniform. The task's own: ``start=task.start``.
    dtype : torch.dtype
    """

    def __init__(
        self, task: Any, seeds: int | Sequence[int], *, start: Tensor | None = None, dtype: torch.dtype = torch.float32
    ):
        self.seeds = seeds if isinstance(seeds, int) else len(seeds)
        if self.seeds < 1:
            raise ValueError("give at least one seed")
        self.vocabulary = task.vocabulary
        levels = task.trie.levels
        self._offset = [sum(map(len, levels[:depth])) for depth in range(len(levels))]
        logits = torch.zeros(task.prompts, max(task.trie.nodes, 1), task.vocabulary, dtype=torch.float64)
        if start is not None:
            if start.shape != task.correct.shape or bool((start < 0).any()) or not bool((start.sum(-1) > 0).all()):
                raise ValueError(
                    f"start must be weights of shape {tuple(task.correct.shape)}, none negative, some positive for each prompt"
                )
            # A logit of -40 is a probability of 4e-18: as good as zero, and a gradient can still leave it.
            for offset, table in zip(self._offset, task.trie.conditionals(start), strict=True):
                logits[:, offset : offset + table.shape[1]] = table.log().clamp_min(-40.0)
        self._logits = logits.to(dtype).expand(self.seeds, -1, -1, -1).clone().requires_grad_()

    def parameters(self) -> list[Tensor]:
        """The logits (S, P, M, V), M prefixes of all levels one after the other."""
        return [self._logits]

    def state(self) -> dict[str, Tensor]:
        """A copy of the logits, under the name ``logits``."""
        return {"logits": self._logits.detach().clone()}

    def load(self, state: dict[str, Tensor]) -> "Tabular":
        """Take over logits as `state` gives them; returns itself."""
        if state.keys() != {"logits"} or state["logits"].shape != self._logits.shape:
            raise ValueError(f"the state must hold logits of shape {tuple(self._logits.shape)}")
        with torch.no_grad():
            self._logits.copy_(state["logits"])
        return self

    def copy(self) -> "Tabular":
        """The same tables with logits of their own."""
        return self.select(slice(None))

    def select(self, seeds: Any) -> "Tabular":
        """Some of the tables, with logits of their own: a slice or a list of positions."""
        other = object.__new__(Tabular)
        other.__dict__.update(self.__dict__)
        other._logits = self._logits.detach()[seeds].clone().requires_grad_()
        other.seeds = len(other._logits)
        return other

    def walk(self, task: Any, prompts: Tensor) -> "_TableWalk":
        """Start down the task's prefix tree from prompts (S, B)."""
        return _TableWalk(self, task, prompts)

    def all_log_probs(self, task: Any, prompts: Tensor | None = None) -> Tensor:
        """Exact log-probabilities (S, B, N) of all completions; prompts (B,), (S, B) or None for all."""
        return walking.all_log_probs(self, task, prompts)

    def sample_log_probs(self, task: Any, prompts: Tensor, index: Tensor, *, entropy: bool = False) -> Any:
        """Log-probabilities (S, B, n, T) of the tokens of completions ``index`` (S, B, n), 0 at padding and tokens without a choice; with ``entropy`` a pair."""
        return walking.sample_log_probs(self, task, prompts, index, entropy=entropy)


class _TableWalk:
    def __init__(self, policy: Tabular, task: Any, prompts: Tensor):
        if policy._logits.shape[1] != task.prompts or policy._logits.shape[2] != max(task.trie.nodes, 1):
            raise ValueError("this table was made for another task: build it with Tabular(task, seeds)")
        self.policy, self.task, self.prompts = policy, task, prompts

    def level(self, depth: int, parent: Tensor, node: Tensor, origin: Tensor) -> Tensor:
        logits = self.policy._logits
        seeds, prompts, nodes, vocabulary = logits.shape
        row = (
            (torch.arange(seeds)[:, None] * prompts + self.prompts.gather(1, origin)) * nodes
            + self.policy._offset[depth]
            + node
        )
        picked = logits.flatten(0, 2).index_select(0, row.flatten()).view(*node.shape, vocabulary)
        return torch.log_softmax(picked.masked_fill(~self.task.trie.levels[depth].allowed[node], -torch.inf), -1)
