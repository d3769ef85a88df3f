"""CapKVPress as one of kvpress's presses; imported only where kvpress is."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from kvpress import ScorerPress
from kvpress.utils import get_prerope_query_states
from torch import nn

from cameraready.lm.capkv.anchors import real_tokens
from cameraready.lm.capkv.press import CapKVPress
from cameraready.lm.capkv.selection import gathered, kept_positions
from cameraready.models.structure import apply_rotary


class HostedCapKVPress(CapKVPress, ScorerPress):
    """What `CapKVPress(...)` makes where kvpress is installed: the same scores, under kvpress's own hooks."""

    __call__ = ScorerPress.__call__

    def __post_init__(self) -> None:
        CapKVPress.__post_init__(self)
        if self.head_budgets != "uniform":
            raise ValueError(
                "under kvpress heads share a budget by AdaKVPress(CapKVPress(...)); leave head_budgets out"
            )

    @torch.no_grad()
    def score(
        self,
        module: nn.Module,
        hidden_states: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        attentions: torch.Tensor | None,
        kwargs: Mapping[str, Any],
    ) -> torch.Tensor:
        """Scores (B, Hkv, T), finite: sinks one above the highest, padding one below the lowest."""
        batch, length = hidden_states.shape[:2]
        # A wrapper may show a piece of the context: its mask is then about other tokens than these.
        mask = real_tokens(kwargs.get("attention_mask"), batch, keys.shape[2])
        real = None if mask is None or kwargs["attention_mask"].shape[-1] != length else mask
        anchor = self._anchor(module, hidden_states, real, kwargs)
        scores = self.token_scores(anchor, keys, values, real)
        finite = torch.where(scores.isfinite(), scores, 0.0).amax(dim=(1, 2), keepdim=True)
        return torch.where(scores == torch.inf, finite + 1, torch.where(scores == -torch.inf, -1.0, scores))

    @torch.no_grad()
    def compress(
        self,
        module: nn.Module,
        hidden_states: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        attentions: torch.Tensor | None,
        kwargs: Mapping[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        n_kept = self.n_kept(keys.shape[2])
        if n_kept >= keys.shape[2] or getattr(module, "is_sliding", False):
            return keys, values
        positions = kept_positions(self.score(module, hidden_states, keys, values, attentions, kwargs), n_kept)
        return gathered(keys, positions), gathered(values, positions)

    def _anchor(
        self, module: nn.Module, hidden: torch.Tensor, real: torch.Tensor | None, kwargs: Mapping[str, Any]
    ) -> torch.Tensor:
        rule = self.anchor_rule()
        batch, length = hidden.shape[:2]
        if real is None:
            ranks = torch.arange(length, device=hidden.device).expand(batch, length)
            usable = ranks >= rule.n_sink
            # A piece of the context is followed by what follows the whole context.
            read = torch.full((batch,), _length_of_context(kwargs, length), device=hidden.device)
        else:
            ranks = real.long().cumsum(-1) - 1
            usable, read = real & (ranks >= rule.n_sink), ranks[:, -1] + 1
        if rule.anchor == "window":
            usable = usable & (torch.arange(length, device=hidden.device) >= length - rule.window)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        share = usable.to(wide) / usable.sum(-1, keepdim=True).clamp_min(1)  # (B, T)
        if rule.n_future_positions and getattr(module, "q_norm", None) is None:
            # The mean of linear projections is the projection of the mean.
            mean = torch.matmul(share.unsqueeze(1), hidden.to(wide)).to(hidden.dtype)
            mean = get_prerope_query_states(module, mean).squeeze(2).to(wide)
        else:
            queries = get_prerope_query_states(module, hidden)
            if rule.n_future_positions == 0:
                cos, sin = kwargs["position_embeddings"]
                queries = apply_rotary(queries, cos[:, -length:], sin[:, -length:], "half")
            mean = torch.matmul(share[:, None, None], queries.to(wide)).squeeze(2)
        if rule.n_future_positions == 0:
            return mean
        positions = read[:, None] + torch.arange(rule.n_future_positions, device=hidden.device)
        rotary = module.rotary_emb
        typed = "layer_type" in inspect.signature(rotary.forward).parameters
        layer_type = {"layer_type": getattr(module, "layer_type", None)} if typed else {}
        cos, sin = (angle.to(mean.dtype).mean(1, keepdim=True) for angle in rotary(mean, positions, **layer_type))
        return apply_rotary(mean.unsqueeze(2), cos, sin, "half").squeeze(2)


def _length_of_context(kwargs: Mapping[str, Any], length: int) -> int:
    embeddings = kwargs.get("position_embeddings")
    return max(embeddings[0].shape[-2], length) if embeddings is not None else length
