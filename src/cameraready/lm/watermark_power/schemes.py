"""Which tokens are green: the seeds and lists of transformers' watermark and of MarkLLM's KGW, for many tokens at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

#: Size of the table that transformers hashes tokens with.
TABLE = 1_000_003


@dataclass(frozen=True)
class GreenLists:
    """A keyed family of green lists.

    `kind` is "lefthash" or "selfhash" (transformers), or "time", "additive", "skip" or "min" (MarkLLM's KGW, window "left").
    `width` is the number of tokens before the scored one that a detector needs.
    """

    kind: str
    gamma: float
    key: int
    width: int
    vocab_size: int
    device: str = "cpu"

    @property
    def size(self) -> int:
        """Tokens on a list."""
        return int(self.vocab_size * self.gamma)

    @property
    def share(self) -> float:
        """Of the vocabulary that is green."""
        return self.size / self.vocab_size

    @property
    def context(self) -> int:
        """Tokens before the scored one in an n-gram: of "selfhash" the scored token is one of the width."""
        return self.width - 1 if self.kind == "selfhash" else self.width

    @classmethod
    def of(cls, config: Any, vocab_size: int, device: str = "cpu") -> GreenLists:
        """From transformers' `WatermarkingConfig` (or its dict) or MarkLLM's KGW dict.

        Raises
        ------
        TypeError, ValueError
            For what is neither, or a scheme that has no green lists known here.
        """
        values = config if isinstance(config, Mapping) else config.to_dict() if hasattr(config, "to_dict") else None
        if values is None:
            raise TypeError(
                f"config must be a Plan, transformers' WatermarkingConfig or MarkLLM's KGW dict, got {type(config).__name__}"
            )
        if "greenlist_ratio" in values:
            found = cls(
                values.get("seeding_scheme", "lefthash"),
                float(values["greenlist_ratio"]),
                int(values.get("hashing_key", 15485863)),
                int(values.get("context_width", 1)),
                vocab_size,
                device,
            )
            known: tuple[str, ...] = ("lefthash", "selfhash")
        elif values.get("algorithm_name") == "KGW":
            if values.get("window_scheme", "left") != "left":
                raise ValueError("of MarkLLM's KGW only window_scheme 'left' can be detected here")
            found = cls(
                values.get("f_scheme", "time"),
                float(values["gamma"]),
                int(values["hash_key"]),
                int(values["prefix_length"]),
                vocab_size,
                device,
            )
            known = ("time", "additive", "skip", "min")
        else:
            raise ValueError(
                "config describes no green-list watermark: it has neither transformers' 'greenlist_ratio' nor MarkLLM's algorithm_name 'KGW'"
            )
        if found.kind not in known:
            raise ValueError(f"unknown scheme {found.kind!r}; known: {', '.join(known)}")
        if not -(2**63) <= found.key < 2**63:
            raise ValueError("the key must fit in 64 bits with its sign: from -2**63 to 2**63 - 1")
        if found.width < 1:
            raise ValueError(f"the scheme's context must be at least one token wide, got {found.width}")
        if not 0 < found.gamma < 1 or found.size == 0:
            raise ValueError(f"gamma = {found.gamma!r} gives no green list in a vocabulary of {vocab_size}")
        return found

    def seeds(self, ngrams: torch.Tensor) -> torch.Tensor:
        """What names the list of each n-gram, whose last token is the scored one: (n, context + 1) -> (n,), int64.

        It is the generator's seed, except for "lefthash", whose seed, the key times this number, may not fit.
        """
        context, last = ngrams[:, :-1], ngrams[:, -1]
        if self.kind == "lefthash":
            return context[:, -1]
        if self.kind == "selfhash":
            table = self._permutation(self.key, TABLE) + 1
            # In 64 bits, which overflow: so do transformers' own seeds.
            return (self.key * table[ngrams % TABLE] * table[last % TABLE][:, None]).min(dim=1).values
        prf = self._permutation(self.key, self.vocab_size)
        before = context[:, -self.width :]
        if self.kind == "time":
            # Python's integers do not overflow, and MarkLLM multiplies them: reduce after every factor.
            product = torch.ones(len(before), dtype=torch.int64, device=before.device)
            for column in before.T:
                product = product * (column % self.vocab_size) % self.vocab_size
            hashed = prf[product]
        elif self.kind == "additive":
            hashed = prf[before.sum(dim=1) % self.vocab_size]
        elif self.kind == "skip":
            hashed = prf[before[:, 0]]
        else:
            hashed = prf[before].min(dim=1).values
        return self.key % self.vocab_size * hashed % self.vocab_size

    def green(self, seeds: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Whether each token is on the list of its seed: (n,), (n,) -> booleans (n,). One permutation of the vocabulary a distinct seed."""
        return self.place(seeds, tokens) < self.size

    def place(self, seeds: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Where each token stands in the permutation of its seed, whose first `size` tokens are green; the same for every gamma."""
        order = torch.argsort(seeds, stable=True)
        found = torch.empty(len(seeds), dtype=torch.int64, device=tokens.device)
        distinct, counts = torch.unique_consecutive(seeds[order], return_counts=True)
        places = torch.empty(self.vocab_size, dtype=torch.int64, device=tokens.device)
        numbers = torch.arange(self.vocab_size, device=tokens.device)
        start = 0
        for seed, count in zip(distinct.tolist(), counts.tolist(), strict=True):
            rows = order[start : start + count]
            start += count
            if self.kind == "lefthash":
                seed *= self.key
            places[self._permutation(seed % (2**64 - 1), self.vocab_size)] = numbers
            found[rows] = places[tokens[rows]]
        return found

    def _permutation(self, seed: int, n: int) -> torch.Tensor:
        generator = torch.Generator(device=self.device)
        generator.manual_seed(seed)
        return torch.randperm(n, generator=generator, device=self.device)


def ngrams_of(texts: list[np.ndarray], context: int, skip: int, device: str) -> tuple[torch.Tensor, np.ndarray]:
    """All n-grams of `context` + 1 tokens whose last token lies behind the first `skip`, and the text of each."""
    windows, owners = [], []
    for number, text in enumerate(texts):
        first = max(skip - context, 0)
        if len(text) - context - first < 1:
            continue
        view = np.lib.stride_tricks.sliding_window_view(text[first:], context + 1)
        windows.append(view)
        owners.append(np.full(len(view), number))
    if not windows:
        return torch.empty((0, context + 1), dtype=torch.int64, device=device), np.empty(0, dtype=int)
    return torch.from_numpy(np.concatenate(windows)).to(device), np.concatenate(owners)
