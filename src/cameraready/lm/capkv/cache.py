"""Pruned caches: transformers' own cache layers with fewer pairs, which still know how many tokens were read."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from cameraready.lm.capkv.selection import gathered, kept_positions


class PrunedLayer:
    """Mixed into a cache layer's class: fewer pairs are stored than tokens were read.

    Keys keep the rotation of the position at which they were read, so new tokens must go on counting from there:
    `get_seq_length` tells how many tokens were *read*, and `get_mask_sizes` places the stored pairs right before the new
    ones, so that each new token sees all of them. Padding on the left stays aligned with the attention mask: it is dropped
    first, and what is left of it comes first.
    """

    #: A class made on the fly must not register itself as what new caches are made of.
    _layer_type = None

    dropped: int
    stored: int
    valid: torch.Tensor | None
    masked_by_caller: bool
    #: Assisted generation reads drafts with the prompt, and would have them pruned: transformers refuses it with this.
    is_croppable = False

    def get_seq_length(self, *args: Any) -> int:
        return super().get_seq_length(*args) + self.dropped  # type: ignore[misc]

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        # Before transformers 5.3 the positions of the queries are given instead of their number.
        new = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.get_seq_length() - self.dropped + new, self.dropped

    def update(self, *args: Any, **kwargs: Any) -> Any:
        if self.valid is not None and not self.masked_by_caller:
            raise RuntimeError(
                "heads of this cache hold different numbers of tokens, which only masks in the attention modules can tell; go on "
                "inside the with block of the CapKVPress that pruned it, or prune with head_budgets='uniform'"
            )
        self.masked_by_caller = False
        return super().update(*args, **kwargs)  # type: ignore[misc]

    def crop(self, tokens_to_remove: int) -> None:
        appended = self.get_seq_length() - self.dropped - self.stored
        if tokens_to_remove > 0 or -tokens_to_remove > appended:
            raise ValueError(
                f"only tokens added after pruning can be removed again, {appended} of them, as crop(-n); got {tokens_to_remove}"
            )
        super().crop(tokens_to_remove)  # type: ignore[misc]

    def reset(self) -> None:
        super().reset()  # type: ignore[misc]
        self.dropped, self.stored, self.valid = 0, 0, None

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[misc]
        self._rows(lambda valid: valid.index_select(0, beam_idx.to(valid.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)  # type: ignore[misc]
        self._rows(lambda valid: valid.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)  # type: ignore[misc]
        self._rows(lambda valid: valid[indices])

    def _rows(self, change: Any) -> None:
        if self.valid is not None:
            self.valid = change(self.valid)

    def __reduce__(self) -> tuple[Any, ...]:
        return restored, (type(self).__bases__[1], vars(self))


_CLASSES: dict[type, type] = {}


def pruned_class(kind: type) -> type:
    """The class of a pruned layer that was of class `kind`."""
    if kind not in _CLASSES:
        _CLASSES[kind] = type(f"Pruned{kind.__name__}", (PrunedLayer, kind), {})
    return _CLASSES[kind]


def restored(kind: type, state: dict[str, Any]) -> Any:
    """A pruned layer with these attributes: what copies and pickles of one are made by."""
    new = object.__new__(pruned_class(kind))
    vars(new).update(state)
    return new


def prunable(layer: Any) -> bool:
    """Whether a cache layer grows with the context and holds it whole."""
    return isinstance(layer, DynamicLayer) and not getattr(layer, "is_sliding", False)


def contents(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a cache layer, (B, Hkv, T, d), dequantised where it stores them so."""
    if getattr(layer, "_quantized_keys", None) is None:
        return layer.keys, layer.values
    pairs = []
    for quantized, recent in ((layer._quantized_keys, layer.keys), (layer._quantized_values, layer.values)):
        whole = layer._dequantize(quantized)
        pairs.append(torch.cat([whole, recent.to(whole.dtype)], dim=-2) if recent.numel() else whole)
    return pairs[0], pairs[1]


def pruned_layer(layer: Any, positions: torch.Tensor, valid: torch.Tensor | None = None) -> Any:
    """A new layer with the pairs at `positions` (B, Hkv, S) of `layer`, which stays as it is.

    `valid`, bool (B, Hkv, S), is False where a pair only fills up a shorter head.
    """
    if not prunable(layer):
        raise ValueError(
            f"a {type(layer).__name__} cannot be pruned: it must be a layer of a DynamicCache or QuantizedCache with full attention"
        )
    if isinstance(layer, PrunedLayer):
        raise ValueError("this layer was pruned before; prune the whole one, which is left as it is")
    new = restored(type(layer), vars(layer))
    length = contents(layer)[0].shape[-2]
    new.stored = positions.shape[-1]
    new.dropped = length - new.stored
    new.valid, new.masked_by_caller = valid, False
    if getattr(layer, "_quantized_keys", None) is None:
        new.keys, new.values = gathered(layer.keys, positions), gathered(layer.values, positions)
        return new
    _gather_quantized(layer, new, positions)
    new.cumulative_length = new.stored
    return new


def _gather_quantized(layer: Any, new: Any, positions: torch.Tensor) -> None:
    quantized = layer._quantized_keys
    if isinstance(quantized, tuple) and isinstance(quantized[0], torch.Tensor) and quantized[0].ndim == 4:
        # One scale for a whole tensor (float8): pairs are taken as they are stored.
        for name in ("_quantized_keys", "_quantized_values"):
            stored, scale = getattr(layer, name)
            setattr(new, name, (gathered(stored, positions), scale))
        return
    # Groups of entries share a scale: dequantised, gathered, and quantised anew.
    keys, values = (gathered(whole, positions).contiguous() for whole in contents(layer))
    new._quantized_keys = layer._quantize(keys, axis=layer.axis_key)
    new._quantized_values = layer._quantize(values, axis=layer.axis_value)
    new.keys, new.values = layer.keys.new_zeros(0), layer.values.new_zeros(0)


def with_layers(cache: Cache, layers: Mapping[int, Any]) -> Cache:
    """A copy of `cache` in which some layers are others; the rest is copied, so that it can grow on its own."""
    new = copy.copy(cache)
    new.layers = [layers[i] if i in layers else copy.copy(layer) for i, layer in enumerate(cache.layers)]
    return new


def prune_by_scores(cache: Cache, scores: Mapping[int, torch.Tensor], n_kept: int) -> Cache:
    """Keep the `n_kept` pairs with the highest scores in each head of each layer that has scores.

    Parameters
    ----------
    cache : transformers.DynamicCache or QuantizedCache
        Left as it is.
    scores : mapping of layer index to tensor of shape (B, Hkv, T)
        By any rule; ties go to the earlier token. Every layer with full attention needs some: a model makes one mask for all.
    n_kept : int

    Returns
    -------
    Cache
        A new cache that knows how many tokens were read: give it to `generate` with the full input ids, or to the model with
        the new ones alone. The same object where nothing would be dropped.

    Raises
    ------
    ValueError
        Scores are not of the shape of the layer's keys, hold NaN, or are missing for a layer that holds the whole context.
    """
    check_scores(cache, scores, n_kept)
    if all(each.shape[-1] <= n_kept for each in scores.values()):
        return cache
    return with_layers(
        cache,
        {index: pruned_layer(cache.layers[index], kept_positions(each, n_kept)) for index, each in scores.items()},
    )


def check_cache(cache: Any) -> None:
    if not isinstance(cache, Cache):
        raise TypeError(f"a transformers cache is pruned, such as a DynamicCache, not {type(cache).__name__}")


def check_scores(cache: Any, scores: Mapping[int, torch.Tensor], n_kept: int) -> None:
    check_cache(cache)
    if isinstance(n_kept, bool) or not isinstance(n_kept, Integral) or n_kept < 1:
        raise ValueError(f"n_kept is a number of tokens, 1 or more, got {n_kept!r}")
    for index, each in scores.items():
        if not 0 <= index < len(cache.layers):
            raise ValueError(
                f"there are scores for layer {index}, but the cache has the layers 0 to {len(cache.layers) - 1}"
            )
        layer = cache.layers[index]
        wanted = tuple(contents(layer)[0].shape[:3]) if layer.is_initialized else None
        if tuple(each.shape) != wanted:
            raise ValueError(
                f"scores of layer {index} must be (B, Hkv, T) = {wanted} like its keys, got {tuple(each.shape)}"
            )
        if each.isnan().any():
            raise ValueError(f"scores of layer {index} hold NaN")
    check_even(cache, scores)


def check_even(cache: Any, pruned: Iterable[int]) -> None:
    """Raise a ValueError where some of the layers that hold a whole context would be pruned and others not."""
    pruned = set(pruned)
    left = [i for i, layer in enumerate(cache.layers) if prunable(layer) and layer.is_initialized and i not in pruned]
    if pruned and left:
        raise ValueError(
            f"layers {', '.join(map(str, left))} would keep the whole context while others are pruned, and a model makes one mask for all; "
            "if these have a sliding window, make the cache with DynamicCache(config=model.config)"
        )
