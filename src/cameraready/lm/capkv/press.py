"""CapKVPress: keep the tokens of a context that tell most, in transformers' `generate` or as one of kvpress's presses."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from cameraready.lm.capkv.anchors import (
    AnchorKind,
    AnchorRule,
    QueryAnchors,
    anchor_of,
    cache_index,
    cache_of,
    full_attention,
    hidden_of,
    real_tokens,
)
from cameraready.lm.capkv.scores import Similarity, capkv_scores, check_options, greedy_scores, is_number
from cameraready.lm.capkv.selection import adaptive_positions, kept_positions, n_kept_of
from cameraready.models import anatomy

Selection = Literal["topk", "greedy"]
HeadBudgets = Literal["uniform", "adaptive"]


@dataclass
class CapKVPress:
    """Evicts, after the prompt was read, the cached tokens that tell least about what the layer will output.

    With transformers alone it is a context manager: ``with CapKVPress(0.5)(model): model.generate(...)``. Where kvpress is
    installed, an instance also is a `kvpress.ScorerPress`: kvpress's own hooks run it, in its pipeline and inside its
    wrappers (AdaKVPress, ChunkPress, PerLayerCompressionPress, ComposedPress).

    Only layers with full attention are pruned, once, when an empty cache is filled; positions are not renumbered. What comes
    later in the same cache, a second turn or the further pieces of a prefill in pieces (``prefill_chunk_size``), is kept whole,
    and without a cache nothing happens. See `prune_cache` for a context that is read in pieces, or once and asked often.
    Assisted generation is refused on pruned caches, since drafts would be pruned with the prompt.

    Parameters
    ----------
    compression_ratio : float in [0, 1)
        Share of the context's tokens to drop; int(T (1 - ratio)) stay, never fewer than the sinks. 0 changes nothing.
    tau, sigma, similarity, n_sink
        See `capkv_scores`.
    anchor, window, n_future_positions
        See `QueryAnchors`.
    selection : {"topk", "greedy"}
        The highest scores (the paper), or one token after the other so that copies do not crowd out the rest; slower, see
        `greedy_scores`.
    head_budgets : {"uniform", "adaptive"}
        Whether key heads keep equally many tokens, or share a layer's budget by their scores. The latter pads to the largest
        head, saves less memory, and needs masks in the attention modules: stay inside the with block while generating, and
        use the attention implementation "sdpa" or "eager". Under kvpress wrap the press in AdaKVPress instead.
    safeguard : float in [0, 1]
        Share of the uniform budget that each head keeps under ``head_budgets="adaptive"``.

    Raises
    ------
    ValueError
        An option is out of its range.
    UnknownArchitecture
        On entering: the model's attention is not found by structure, or is sliding in every layer.

    Notes
    -----
    When to use it: contexts that repeat themselves, with a question that comes later and may be about anything. When not: on
    ordinary text SnapKV and expected attention stayed closer to the whole cache in this package's study.

    A row padded on the left loses its padding first; its sinks are its first real tokens. Rows of a batch store equally many
    pairs, int(T (1 - ratio)) with the T of the padded batch, so that a short row keeps more of itself than it would alone.

    References
    ----------
    Yang et al., 2026, arXiv:2604.25975.
    """

    compression_ratio: float = 0.0
    tau: float = 5.0
    sigma: float = 1.0
    similarity: Similarity = "cosine"
    n_sink: int = 4
    anchor: AnchorKind = "history"
    window: int = 64
    n_future_positions: int = 512
    selection: Selection = "topk"
    head_budgets: HeadBudgets = "uniform"
    safeguard: float = 0.2

    def __new__(cls, *args: Any, **kwargs: Any) -> CapKVPress:
        if cls is CapKVPress and importlib.util.find_spec("kvpress") is not None:
            from cameraready.lm.capkv.hosted import HostedCapKVPress

            return object.__new__(HostedCapKVPress)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        ratio = self.compression_ratio
        if not is_number(ratio) or not 0 <= ratio < 1:
            raise ValueError(f"compression_ratio is the share of tokens to drop, at least 0 and below 1, got {ratio!r}")
        check_options(self.tau, self.sigma, self.similarity, self.n_sink)
        self.anchor_rule()
        if self.selection not in ("topk", "greedy"):
            raise ValueError(f"selection is 'topk' or 'greedy', got {self.selection!r}")
        if self.head_budgets not in ("uniform", "adaptive"):
            raise ValueError(f"head_budgets is 'uniform' or 'adaptive', got {self.head_budgets!r}")
        if not is_number(self.safeguard) or not 0 <= self.safeguard <= 1:
            raise ValueError(f"safeguard is a share of the budget between 0 and 1, got {self.safeguard!r}")

    def anchor_rule(self) -> AnchorRule:
        return AnchorRule(self.anchor, self.window, self.n_future_positions, self.n_sink)

    def n_kept(self, length: int) -> int:
        """How many of `length` tokens each head keeps."""
        if self.compression_ratio == 0:
            return length
        return n_kept_of(length, self.compression_ratio, self.n_sink)

    def token_scores(
        self, anchor: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, real: torch.Tensor | None
    ) -> torch.Tensor:
        """Scores (B, Hkv, T) under this press's options; see `capkv_scores` and `greedy_scores`."""
        options: dict[str, Any] = {
            "tau": self.tau,
            "sigma": self.sigma,
            "similarity": self.similarity,
            "n_sink": self.n_sink,
            "attention_mask": real,
        }
        if self.selection == "greedy":
            return greedy_scores(anchor, keys, values, self.n_kept(keys.shape[2]), **options)
        return capkv_scores(anchor, keys, values, **options)

    @torch.no_grad()
    def pruned(self, layer: Any, anchor: torch.Tensor, real: torch.Tensor | None) -> Any:
        """A cache layer with what this press keeps of `layer`; `layer` itself where that is all."""
        from cameraready.lm.capkv.cache import contents, pruned_layer

        keys, values = contents(layer)
        n_kept = self.n_kept(keys.shape[2])
        if n_kept >= keys.shape[2]:
            return layer
        scores = self.token_scores(anchor, keys, values, real)
        if self.head_budgets == "uniform":
            return pruned_layer(layer, kept_positions(scores, n_kept))
        return pruned_layer(layer, *adaptive_positions(scores, n_kept, self.safeguard))

    @contextmanager
    def __call__(self, model: nn.Module) -> Iterator[CapKVPress]:
        """Prune the caches that `model` fills from empty inside the with block; nothing stays hooked after it."""
        self.__post_init__()  # options may have been set since
        if self.compression_ratio == 0:
            yield self
            return
        told: list[bool] = []  # whether the user was warned in this block
        if self.head_budgets == "adaptive":
            check_backend(model)
        parts = anatomy(model)
        layers = full_attention(parts)
        with ExitStack() as stack:
            for layer in parts.layers:
                if layer.attention is not None and layer.attention.sliding_window is not None:
                    watching = layer.attention.module.register_forward_hook(refuse_whole(layer), with_kwargs=True)
                    stack.callback(watching.remove)
            for layer in layers:
                module = layer.attention.module
                hook = self._after(parts, layer.index, told)
                stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
                if self.head_budgets == "adaptive":
                    masking = module.register_forward_pre_hook(mask_short_heads(layer), with_kwargs=True)
                    stack.callback(masking.remove)
            yield self

    def _after(self, parts: Any, index: int, told: list[bool]) -> Any:
        from cameraready.lm.capkv.cache import PrunedLayer, prunable

        rule = self.anchor_rule()

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
            cache = cache_of(args, kwargs)
            if cache is None:
                return
            at = cache_index(module, index)
            hidden = hidden_of(args, kwargs)
            if cache.get_seq_length(at) != hidden.shape[1]:  # the context was read before
                if hidden.shape[1] > 1 and isinstance(cache.layers[at], PrunedLayer) and not told:
                    told.append(True)
                    warnings.warn(
                        f"CapKVPress prunes what fills an empty cache; {hidden.shape[1]} further tokens are kept whole. A prompt that is "
                        "read in pieces (prefill_chunk_size) is pruned whole with QueryAnchors and prune_cache.",
                        stacklevel=2,
                    )
                return
            if isinstance(cache.layers[at], PrunedLayer):
                raise ValueError("two presses prune the same cache; use one, with the compression ratio of both")
            if not prunable(cache.layers[at]):
                raise ValueError(
                    f"CapKVPress prunes dynamic caches, and this one holds a {type(cache.layers[at]).__name__}; leave out "
                    "cache_implementation, or pass a DynamicCache made with the model's config"
                )
            real = real_tokens(kwargs.get("attention_mask"), *hidden.shape[:2])
            anchor = anchor_of(parts, index, hidden, real, rule)
            cache.layers[at] = self.pruned(cache.layers[at], anchor, real)

        return hook


def prune_cache(
    cache: Any,
    anchors: QueryAnchors,
    compression_ratio: float,
    *,
    tau: float = 5.0,
    sigma: float = 1.0,
    similarity: Similarity = "cosine",
    selection: Selection = "topk",
) -> Any:
    """The cache of a context, with the tokens that tell most: read a context once, prune it as you like, ask it often.

    Parameters
    ----------
    cache : transformers.DynamicCache or QuantizedCache
        As the model left it after the context; it stays as it is.
    anchors : QueryAnchors
        Recorded while the context was read; names the layers with full attention, which are pruned, and the padding.
    compression_ratio : float in [0, 1)
        Share of the context's tokens to drop. 0 gives `cache` itself back, and so does a context no longer than the sinks.
    tau, sigma, similarity, selection
        See `CapKVPress`.

    Returns
    -------
    Cache
        Of the same class. It knows how many tokens were read, so that positions go on from there: give it to `generate` together
        with the input ids (and attention mask) of context *and* question, or to the model with the question alone.

    Raises
    ------
    ValueError
        The cache does not fit the anchors, was pruned before, is static, or holds layers with a sliding window whole.
    TypeError
        One of the two is something else.

    Examples
    --------
    >>> with QueryAnchors(model) as anchors:
    ...     cache = model(context, use_cache=True).cache
    >>> small = prune_cache(cache, anchors, compression_ratio=0.75)
    >>> model.generate(torch.cat([context, question], dim=1), cache=small)
    """
    from cameraready.lm.capkv.cache import PrunedLayer, check_cache, check_even, contents, prunable, with_layers

    check_cache(cache)
    if not isinstance(anchors, QueryAnchors):
        raise TypeError(
            f"anchors are a QueryAnchors, recorded while the context was read, not {type(anchors).__name__}"
        )

    press = CapKVPress(compression_ratio, tau, sigma, similarity, anchors.rule.n_sink, selection=selection)
    if compression_ratio == 0:
        return cache
    if not len(anchors):
        raise ValueError(
            "the anchors are empty: let the model read the context inside `with QueryAnchors(model) as anchors`"
        )
    changed = {}
    for index, module_index in anchors.places():
        if module_index >= len(cache.layers):
            raise ValueError(f"the cache has {len(cache.layers)} layers, and the anchors are of layer {module_index}")
        layer = cache.layers[module_index]
        if isinstance(layer, PrunedLayer):
            raise ValueError("this cache was pruned before; prune the whole one, which prune_cache leaves as it is")
        if not prunable(layer):
            raise ValueError(
                f"prune_cache works on dynamic caches, and this one holds a {type(layer).__name__} where the model has full attention"
            )
        length, read = contents(layer)[0].shape[2], anchors.lengths()[index]
        if length != read:
            raise ValueError(f"the cache holds {length} tokens, but the anchors were recorded over {read}")
        new = press.pruned(layer, anchors[index], anchors.attention_mask)
        if new is not layer:
            changed[module_index] = new
    check_even(cache, changed)
    return with_layers(cache, changed) if changed else cache


def refuse_whole(layer: Any) -> Any:
    """A hook after an attention module with a sliding window: its cache must be one with a window too."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        from cameraready.lm.capkv.cache import prunable

        cache = cache_of(args, kwargs)
        if cache is not None and prunable(cache.layers[cache_index(module, layer.index)]):
            raise ValueError(
                "this cache holds layers with a sliding window whole, and a model makes one mask for all that do; make it with "
                "DynamicCache(config=model.config)"
            )

    return hook


# --- heads of different length ------------------------------------------------------------------------------------------


def check_backend(model: nn.Module) -> None:
    chosen = getattr(model.config, "_attn_implementation", "eager")
    if chosen not in ("sdpa", "eager"):
        raise ValueError(
            f"head_budgets='adaptive' needs masks that differ between heads, which the attention implementation {chosen!r} does not "
            "take; load the model with attn_implementation='sdpa', or use head_budgets='uniform'"
        )


def mask_short_heads(layer: Any) -> Any:
    """A hook before an attention module that hides, head by head, the pairs that only fill up the cache."""
    attention = layer.attention

    def hook(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        cache = cache_of(args, kwargs)
        at = cache_index(module, layer.index)
        stored = cache.layers[at] if cache is not None and at < len(cache.layers) else None
        if getattr(stored, "valid", None) is None:
            return args, kwargs
        hidden = hidden_of(args, kwargs)
        batch, new = hidden.shape[:2]
        after = stored.get_mask_sizes(new)[0] - stored.stored  # tokens since the pruning, the new ones included
        since = seen_by(kwargs.get("attention_mask"), after)  # without padding of later turns
        if since is None:
            since = torch.ones(new, after, dtype=torch.bool, device=hidden.device).tril(after - new)[None, None]
        seen = torch.cat(
            [
                stored.valid.repeat_interleave(attention.group_size, dim=1).unsqueeze(2).expand(-1, -1, new, -1),
                since.expand(batch, attention.n_heads, new, after),
            ],
            dim=-1,
        )
        mask = torch.zeros(seen.shape, dtype=hidden.dtype, device=hidden.device)
        stored.masked_by_caller = True
        return args, {**kwargs, "attention_mask": mask.masked_fill(~seen, torch.finfo(hidden.dtype).min)}

    return hook


def seen_by(mask: Any, last: int) -> torch.Tensor | None:
    """Which of the `last` keys each query sees, (B, 1, t, last), from a mask as attention modules get it; None where there is none."""
    if not isinstance(mask, torch.Tensor) or mask.ndim != 4:
        return None
    mask = mask[..., mask.shape[-1] - last :]
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
