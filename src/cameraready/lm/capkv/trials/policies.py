"""The policies that the study compares: which tokens of a context to keep, each as its paper or kvpress has it.

A policy is a function of what one layer read. All are given the same budget, and all keep the same sinks (`protected`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch.nn import functional

from cameraready.lm.capkv.anchors import AnchorRule, anchor_of, rotated_ahead
from cameraready.lm.capkv.scores import capkv_scores, greedy_scores, relevance
from cameraready.models import Anatomy
from cameraready.models.structure import apply_rotary

N_SINK = 4
N_FUTURE = 512
QUERIES = 512


@dataclass(frozen=True, eq=False)
class LayerState:
    """What one full-attention layer read of a context of T tokens, without padding.

    Attributes
    ----------
    parts, index
        The model's anatomy and the layer's place in it; ``parts.layers[index].attention`` has projections and head counts.
    hidden : tensor, shape (1, T, Dm)
        What the attention was given.
    keys, values : tensors, shape (1, Hkv, T, d)
        As they are cached, keys after rotary positions.
    most : int
        The largest number of tokens that will be kept.
    generator : torch.Generator
        For policies that draw.
    """

    parts: Anatomy
    index: int
    hidden: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    most: int
    generator: torch.Generator

    @property
    def attention(self) -> Any:
        return self.parts.layers[self.index].attention

    @property
    def length(self) -> int:
        return self.keys.shape[2]

    @cached_property
    def plain_queries(self) -> torch.Tensor:
        """Queries before rotary positions, (1, H, T, d)."""
        return self.attention.queries(self.hidden)

    @cached_property
    def queries(self) -> torch.Tensor:
        """Queries at their positions, (1, H, T, d)."""
        return self.rotated(self.plain_queries, torch.arange(self.length, device=self.hidden.device))

    def rotated(self, queries: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if self.attention.rotary is None:
            return queries
        cos, sin = self.parts.rotary(positions[None], layer=self.index)
        return apply_rotary(queries, cos, sin, self.attention.rotary)

    @cached_property
    def anchor(self) -> torch.Tensor:
        """CapKV's anchor, (1, H, d)."""
        return anchor_of(
            self.parts, self.index, self.hidden, None, AnchorRule(n_future_positions=N_FUTURE, n_sink=N_SINK)
        )

    def by_head(self, cached: torch.Tensor) -> torch.Tensor:
        """Keys or values repeated for the query heads that share them, (1, H, T, d)."""
        return cached.repeat_interleave(self.attention.group_size, dim=1)

    def grouped(self, scores: torch.Tensor) -> torch.Tensor:
        """Mean over the query heads of a key head: (1, H, T) -> (1, Hkv, T)."""
        return scores.unflatten(1, (-1, self.attention.group_size)).mean(2)


Policy = Callable[[LayerState], torch.Tensor]


def protected(scores: torch.Tensor) -> torch.Tensor:
    """Scores with the first tokens above all others: attention sinks are kept under every policy."""
    scores = scores.float().clone()
    scores[..., :N_SINK] = torch.inf
    return scores


# --- this paper ---------------------------------------------------------------------------------------------------------


def capkv(state: LayerState, **options: Any) -> torch.Tensor:
    return capkv_scores(state.anchor, state.keys, state.values, n_sink=N_SINK, **options)


def capkv_greedy(state: LayerState) -> torch.Tensor:
    # The choice of n tokens is the beginning of the choice of more.
    return greedy_scores(state.anchor, state.keys, state.values, state.most, n_sink=N_SINK)


def trace(state: LayerState) -> torch.Tensor:
    """w ||v||^2, of which CapKV's score is the first order in w: relevance and size, no geometry."""
    options: dict[str, Any] = {
        "tau": 5.0,
        "sigma": 1.0,
        "similarity": "cosine",
        "n_sink": N_SINK,
        "attention_mask": None,
    }
    weights, _, _, _ = relevance(state.anchor, state.keys, state.values, **options)
    return weights.mean(2) * state.values.float().square().sum(-1)


# --- others -------------------------------------------------------------------------------------------------------------


def random(state: LayerState) -> torch.Tensor:
    return torch.rand(state.keys.shape[:3], generator=state.generator).to(state.keys.device)


def knorm(state: LayerState) -> torch.Tensor:
    """Small keys first (Devoto et al., 2024, arXiv:2406.11430)."""
    return -state.keys.norm(dim=-1)


def recent(state: LayerState) -> torch.Tensor:
    """Sinks and the latest tokens (Xiao et al., 2023, arXiv:2309.17453)."""
    return torch.arange(state.length, device=state.keys.device).expand(state.keys.shape[:3]).float()


def snapkv(state: LayerState, window: int = 32, kernel: int = 5) -> torch.Tensor:
    """Attention of the last queries, smoothed over neighbours (Li et al., 2024, arXiv:2404.14469), as in kvpress.

    kvpress looks at the last 64; of 512 tokens, a tenth kept, these would be all.
    """
    length = state.length
    queries = state.attention.queries(state.hidden[:, -window:])
    queries = state.rotated(queries, torch.arange(length - window, length, device=queries.device))
    logits = queries @ state.by_head(state.keys).transpose(2, 3) / math.sqrt(queries.shape[-1])
    later = torch.ones(window, length, dtype=torch.bool, device=queries.device).triu(length - window + 1)
    attention = logits.masked_fill(later, -torch.inf).softmax(-1, dtype=torch.float32)[..., :-window].mean(2)
    smooth = functional.avg_pool1d(attention, kernel, stride=1, padding=kernel // 2)
    scores = state.grouped(smooth)
    return functional.pad(scores, (0, window), value=float(scores.max()) + 1)


def expected_attention(state: LayerState) -> torch.Tensor:
    """Attention that Gaussian future queries would pay, times the norm of the value (Devoto et al., 2025, arXiv:2510.00636), as in kvpress."""
    queries = state.plain_queries[:, :, N_SINK:].float()
    mean = queries.mean(2)
    centred = queries - mean.unsqueeze(2)
    read = torch.tensor([state.length], device=mean.device)
    mean = rotated_ahead(state.parts, state.index, mean, read, N_FUTURE)
    # R C R^T from R applied to the rows of C twice; rows stand in for heads.
    covariance = centred.transpose(2, 3) @ centred / centred.shape[2]
    turn = partial(_turned_rows, state, read)
    covariance = turn(turn(covariance).transpose(2, 3)).transpose(2, 3)
    keys = state.by_head(state.keys[:, :, N_SINK:]).float()
    size = keys.shape[-1]
    logits = (keys @ mean.unsqueeze(-1)).squeeze(-1) / math.sqrt(size)
    logits = logits + ((keys @ covariance) * keys).sum(-1) / size / 2
    scores = state.grouped(logits.softmax(-1)) * state.values[:, :, N_SINK:].float().norm(dim=-1)
    return functional.pad(scores, (N_SINK, 0), value=float(scores.max()) + 1)


def _turned_rows(state: LayerState, read: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """The mean rotation ahead, applied to each row of (1, H, d, d)."""
    return rotated_ahead(state.parts, state.index, matrices.flatten(1, 2), read, N_FUTURE).view_as(matrices)


def key_leverage(state: LayerState, sketch: int = 48) -> torch.Tensor:
    """Leverage of centred keys before positions under a Gaussian sketch (Chari and Van Durme, 2025, arXiv:2507.08143), as in kvpress."""
    keys = state.attention.keys(state.hidden)
    draw = torch.randn(*keys.shape[:2], keys.shape[-1], sketch, generator=state.generator).to(keys) / math.sqrt(sketch)
    rows = ((keys - keys.mean(2, keepdim=True)) @ draw).float()
    gram = rows.transpose(2, 3) @ rows
    gram.diagonal(dim1=-2, dim2=-1).add_(1e-2)
    solved = torch.cholesky_solve(rows.transpose(2, 3), torch.linalg.cholesky(gram))
    scores = (rows * solved.transpose(2, 3)).sum(-1).clamp_min(0)
    return (scores - scores.mean()) / scores.std().clamp_min(1e-6)


def mean_attention(state: LayerState) -> torch.Tensor:
    """Attention received, averaged over the queries that could pay it (H2O: Zhang et al., 2023, arXiv:2306.14048)."""
    length, keys = state.length, state.by_head(state.keys).transpose(2, 3)
    received = keys.new_zeros(1, keys.shape[1], length, dtype=torch.float32)
    for start in range(0, length, QUERIES):  # a few rows of the attention matrix at a time
        queries = state.queries[:, :, start : start + QUERIES]
        later = torch.ones(queries.shape[2], length, dtype=torch.bool, device=keys.device).triu(start + 1)
        logits = (queries @ keys * state.attention.scaling).masked_fill(later, -torch.inf)
        received += logits.softmax(-1, dtype=torch.float32).sum(2)
    return state.grouped(received / torch.arange(length, 0, -1, device=keys.device))


#: What the study decides between.
POLICIES: dict[str, Policy] = {
    "capkv": capkv,
    "random": random,
    "knorm": knorm,
    "recent": recent,
    "leverage": key_leverage,
    "trace": trace,
    "snapkv": snapkv,
    "expected-attention": expected_attention,
}
#: Variants of the method, beside it: the second one goes through the model as well.
VARIANTS: dict[str, Policy] = {
    "capkv-greedy": capkv_greedy,
    "capkv-tau0": partial(capkv, tau=0.0),
    "capkv-tau10": partial(capkv, tau=10.0),
    "capkv-inner": partial(capkv, tau=0.1, similarity="inner"),
}
#: More, which only the attention output is measured of.
FURTHER: dict[str, Policy] = {"h2o": mean_attention}
