"""The query that stands for future ones: a mean over past queries, rotated to where future tokens will be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal

import torch
from torch import nn

from cameraready.lm.capkv.scores import check_left
from cameraready.models import Anatomy, UnknownArchitecture, anatomy
from cameraready.models.structure import apply_rotary
from cameraready.models.structure.probing import PROBING

AnchorKind = Literal["history", "window"]


@dataclass(frozen=True)
class AnchorRule:
    """Which queries are averaged, and where to they are rotated. See `QueryAnchors`."""

    anchor: AnchorKind = "history"
    window: int = 64
    n_future_positions: int = 512
    n_sink: int = 4

    def __post_init__(self) -> None:
        if self.anchor not in ("history", "window"):
            raise ValueError(f"anchor is 'history' or 'window', got {self.anchor!r}")
        for name, least in (("window", 1), ("n_future_positions", 0), ("n_sink", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
                raise ValueError(f"{name} is a number of tokens, {least} or more, got {value!r}")


class QueryAnchors(Mapping[int, torch.Tensor]):
    """Records, while a model reads a context, the anchor query of each full-attention layer.

    A context manager: enter it, let the model read the context (in one call or in pieces, into one cache), and give the
    result to `prune_cache`. One prefill serves any number of prunings.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Any decoder-only language model whose parts `cameraready.models.anatomy` finds.
    anchor : {"history", "window"}
        Average over all queries after the sinks, or over the last `window` ones (which follow the question, where there is
        one at the end).
    window : int
        Number of queries of ``anchor="window"``.
    n_future_positions : int
        Queries before rotary positions are averaged and turned by the mean rotation over the next so many positions, as in
        kvpress's CapPress; 0 averages queries as they were, at their own positions.
    n_sink : int
        Queries of the first so many real tokens are left out.

    Attributes
    ----------
    attention_mask : bool tensor of shape (B, T), or None
        Real tokens; None where nothing was padded.

    Raises
    ------
    UnknownArchitecture
        The model's attention modules are not found, or none has full attention.
    ValueError
        While reading: a second context, or padding that is not on the left.

    Examples
    --------
    >>> with QueryAnchors(model) as anchors:
    ...     cache = model(ids, use_cache=True).cache
    >>> pruned = prune_cache(cache, anchors, compression_ratio=0.5)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        anchor: AnchorKind = "history",
        window: int = 64,
        n_future_positions: int = 512,
        n_sink: int = 4,
    ) -> None:
        self.rule = AnchorRule(anchor, window, n_future_positions, n_sink)
        self.attention_mask: torch.Tensor | None = None
        self._parts = anatomy(model)
        self._layers = {layer.index: layer.attention.module for layer in full_attention(self._parts)}
        self._read: dict[int, _Reading] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> QueryAnchors:
        if self._handles:
            raise RuntimeError("these QueryAnchors are recording already; make others for another context")
        self._read = {index: _Reading(self._parts, index, self.rule) for index in self._layers}
        self.attention_mask = None
        for index, module in self._layers.items():
            self._handles.append(module.register_forward_pre_hook(self._before(index), with_kwargs=True))
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __getitem__(self, layer: int) -> torch.Tensor:
        """The anchor of a layer, shape (B, H, d), float32 (float64 for a float64 model)."""
        return self._read[layer].anchor()

    def __iter__(self) -> Iterator[int]:
        return (index for index, read in self._read.items() if read.length)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def places(self) -> list[tuple[int, int]]:
        """Layers with an anchor, and where in a cache their pairs are."""
        return [(index, cache_index(self._layers[index], index)) for index in self]

    def lengths(self) -> dict[int, int]:
        """How many tokens of the context each layer read, padding included."""
        return {index: self._read[index].length for index in self}

    def _before(self, index: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if PROBING.get():
                return
            hidden = hidden_of(args, kwargs)
            cache = cache_of(args, kwargs)
            before = cache.get_seq_length(cache_index(module, index)) if cache is not None else 0
            if before != self._read[index].length:
                raise ValueError(
                    "QueryAnchors records one context in one cache: this call goes on from "
                    f"{before} tokens, but {self._read[index].length} were read so far; use a with block for each context"
                )
            real = real_tokens(kwargs.get("attention_mask"), hidden.shape[0], before + hidden.shape[1])
            self._read[index].add(hidden.detach(), real)
            self.attention_mask = real

        return hook


class _Reading:
    """What one layer read, added up call by call.

    Where queries are a linear map of the hidden states (no query norm) these are averaged, and their mean alone is
    projected: the mean query at the price of one token's.
    """

    def __init__(self, parts: Anatomy, index: int, rule: AnchorRule) -> None:
        self._parts, self._index, self._rule = parts, index, rule
        self._attention = parts.layers[index].attention
        at_own_positions = rule.n_future_positions == 0 and self._attention.rotary is not None
        self._linear = self._attention.q_norm is None and self._attention.clip is None and not at_own_positions
        self._dtype: torch.dtype | None = None
        self._sum: torch.Tensor | None = None  # (B, H, d), or (B, 1, Dm) where linear
        self._count: torch.Tensor | None = None  # (B,)
        self._tail: torch.Tensor | None = None  # (B, H or 1, up to window, d or Dm)
        self._usable: torch.Tensor | None = None  # (B, up to window)
        self._real: torch.Tensor | None = None  # (B,) real tokens so far
        self.length = 0

    @torch.no_grad()
    def add(self, hidden: torch.Tensor, real: torch.Tensor | None) -> None:
        """`hidden` (B, t, Dm) are the newest t of the tokens that `real` (B, T) is about; None: all are real."""
        batch, new, _ = hidden.shape
        self.length += new
        if real is None:
            ranks = torch.arange(self.length - new, self.length, device=hidden.device).expand(batch, new)
            usable = ranks >= self._rule.n_sink
            self._real = torch.full((batch,), self.length, device=hidden.device)
        else:
            check_left(real)
            every = real.long().cumsum(-1) - 1
            ranks = every[:, -new:].clamp_min(0)
            usable = real[:, -new:] & (ranks >= self._rule.n_sink)
            self._real = every[:, -1] + 1
        if self._rule.anchor == "window":
            self._tail = _last(self._tail, self._states(hidden, ranks), self._rule.window, dim=2)
            self._usable = _last(self._usable, usable, self._rule.window, dim=1)
            return
        total = (self._states(hidden, ranks) * usable[:, None, :, None]).sum(dim=2)
        self._sum = total if self._sum is None else self._sum + total
        self._count = usable.sum(-1) if self._count is None else self._count + usable.sum(-1)

    def _states(self, hidden: torch.Tensor, ranks: torch.Tensor) -> torch.Tensor:
        """What is averaged: queries (B, H, t, d), or hidden states (B, 1, t, Dm) where that is the same."""
        self._dtype = hidden.dtype
        wide = torch.promote_types(hidden.dtype, torch.float32)
        if self._linear:
            return hidden.unsqueeze(1).to(wide)
        queries = self._attention.queries(hidden)
        if self._rule.n_future_positions == 0 and self._attention.rotary is not None:
            cos, sin = self._parts.rotary(ranks, layer=self._index)
            queries = apply_rotary(queries, cos, sin, self._attention.rotary)
        return queries.to(wide)

    @torch.no_grad()
    def anchor(self) -> torch.Tensor:
        if self._tail is not None and self._usable is not None:
            total, count = (self._tail * self._usable[:, None, :, None]).sum(dim=2), self._usable.sum(-1)
        elif self._sum is not None and self._count is not None:
            total, count = self._sum, self._count
        else:
            raise ValueError("the model has read nothing yet: call it inside the with block of QueryAnchors")
        mean = total / count.clamp_min(1)[:, None, None]
        if self._linear:
            mean = self._attention.queries(mean.to(self._dtype)).squeeze(2).to(mean.dtype)
        if self._rule.n_future_positions == 0 or self._real is None:
            return mean
        return rotated_ahead(self._parts, self._index, mean, self._real, self._rule.n_future_positions)


def _last(before: torch.Tensor | None, new: torch.Tensor, n: int, dim: int) -> torch.Tensor:
    joined = new if before is None else torch.cat([before, new], dim=dim)
    return joined.narrow(dim, max(joined.shape[dim] - n, 0), min(n, joined.shape[dim]))


def anchor_of(
    parts: Anatomy, index: int, hidden: torch.Tensor, real: torch.Tensor | None, rule: AnchorRule
) -> torch.Tensor:
    """The anchor (B, H, d) of layer `index` when its attention is given all of `hidden` (B, T, Dm) at once."""
    reading = _Reading(parts, index, rule)
    reading.add(hidden, real)
    return reading.anchor()


def rotated_ahead(parts: Anatomy, index: int, mean: torch.Tensor, real: torch.Tensor, n: int) -> torch.Tensor:
    """Queries before positions, turned by the mean rotation over the next `n` positions of their row.

    The mean of rotated queries is the mean query under the mean rotation, since rotations are linear.

    Parameters
    ----------
    mean : tensor, shape (B, H, d)
    real : int tensor, shape (B,)
        Real tokens of each row so far: the first future position.
    """
    kind = parts.layers[index].attention.rotary
    if kind is None:
        return mean
    positions = real[:, None] + torch.arange(n, device=real.device)
    cos, sin = parts.rotary(positions, layer=index)
    cos, sin = (angle.to(mean.dtype).mean(dim=1, keepdim=True) for angle in (cos, sin))
    return apply_rotary(mean.unsqueeze(2), cos, sin, kind).squeeze(2)


# --- what attention modules are called with -----------------------------------------------------------------------------


def full_attention(parts: Anatomy) -> list[Any]:
    """The layers whose attention sees the whole context."""
    found = [layer for layer in parts.layers if layer.attention is not None and layer.attention.sliding_window is None]
    if not found:
        raise UnknownArchitecture(
            "no layer of this model has full attention: its caches are bounded by a sliding window, and there is nothing to prune"
        )
    return found


def hidden_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """The hidden states (B, T, Dm) that an attention module is called with."""
    hidden = kwargs.get("hidden_states", args[0] if args else None)
    if not isinstance(hidden, torch.Tensor):
        raise UnknownArchitecture("an attention module was called without hidden states")
    return hidden


def cache_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The transformers cache among an attention module's arguments, whatever its name, or None."""
    from transformers import Cache

    return next((value for value in (*kwargs.values(), *args) if isinstance(value, Cache)), None)


def cache_index(module: nn.Module, index: int) -> int:
    """Where in the cache an attention module keeps its pairs."""
    own = getattr(module, "layer_idx", None)
    return own if isinstance(own, int) else index


def real_tokens(mask: Any, batch: int, total: int) -> torch.Tensor | None:
    """Bool (B, total): which tokens the newest query sees, from the mask of a full-attention module; None means all.

    Masks are (B, T), as given to FlashAttention, or (B, 1, t, T), boolean or added to scores.
    """
    if not isinstance(mask, torch.Tensor):
        return None
    if mask.ndim == 4:
        mask = mask[:, 0, -1]
        # Added to scores: 0 where a key is seen, the least number elsewhere.
        seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    elif mask.ndim == 2:
        seen = mask > 0
    else:
        raise ValueError(f"attention masks are (B, T) or (B, 1, t, T), got one of shape {tuple(mask.shape)}")
    if seen.shape[-1] < total:
        return None
    return seen[:, :total].expand(batch, total)
