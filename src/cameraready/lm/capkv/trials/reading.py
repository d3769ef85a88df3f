"""One prefill serves every policy: a context is read once, pruned in many ways, and asked."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from cameraready.lm._scoring import negative_log_likelihood
from cameraready.lm.capkv.anchors import cache_index, full_attention
from cameraready.lm.capkv.cache import contents, prune_by_scores
from cameraready.lm.capkv.scores import information, relevance
from cameraready.lm.capkv.selection import kept_positions
from cameraready.lm.capkv.trials.policies import N_SINK, LayerState, Policy, protected
from cameraready.models import Anatomy, LanguageModel, anatomy, capture

#: Tokens of vocabulary logits that are computed at once, in entries; bounds the memory of a batch of policies.
LOGITS = 1 << 27


@dataclass(frozen=True, eq=False)
class Reading:
    """A context that a model has read, and the text that follows it.

    Attributes
    ----------
    states : mapping of layer index to LayerState
        Of the full-attention layers.
    places : mapping of layer index to index in the cache
    cache : DynamicCache
        Of the context alone; not to be changed.
    suffix : LongTensor, shape (1, S)
    scored : int
        How many of the last tokens of the suffix are scored.
    losses : tensor, shape (scored,)
        Nats of each under the whole cache.
    right : tensor of bool, shape (scored,)
        Whether the whole cache predicts it.
    after : mapping of layer index to (queries, keys, values) of the suffix at its positions
    """

    lm: LanguageModel
    parts: Anatomy
    states: Mapping[int, LayerState]
    places: Mapping[int, int]
    cache: Any
    suffix: torch.Tensor
    scored: int
    losses: torch.Tensor
    right: torch.Tensor
    after: Mapping[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def read(lm: LanguageModel, context: torch.Tensor, suffix: torch.Tensor, scored: int, most: int, seed: int) -> Reading:
    """Let the model read `context` (1, T) and then `suffix` (1, S), and keep what policies and measures need."""
    from transformers import DynamicCache

    parts = anatomy(lm.model)
    layers = full_attention(parts)
    indices = [layer.index for layer in layers]
    context, suffix = context.to(lm.device), suffix.to(lm.device)
    cache = DynamicCache(config=lm.model.config)
    with torch.inference_mode():
        with capture(lm.model, "attention_input", layers=indices) as seen:
            forward(lm, context, cache, keep=1)
            hidden = {index: seen.last("attention_input", index) for index in indices}
        whole = copy.deepcopy(cache)
        with capture(lm.model, "attention_input", layers=indices) as seen:
            losses, right = scored_of(lm, suffix, whole, scored)
            follows = {index: seen.last("attention_input", index) for index in indices}
        places = {layer.index: cache_index(layer.attention.module, layer.index) for layer in layers}
        states, after = {}, {}
        for index in indices:
            keys, values = contents(cache.layers[places[index]])
            generator = torch.Generator().manual_seed(1_000 * seed + index)
            state = LayerState(parts, index, hidden[index], keys, values, most, generator)
            positions = torch.arange(state.length, state.length + suffix.shape[1], device=lm.device)
            queries = state.rotated(state.attention.queries(follows[index]), positions)
            every_key, every_value = contents(whole.layers[places[index]])
            states[index] = state
            after[index] = (queries, every_key[:, :, state.length :], every_value[:, :, state.length :])
    return Reading(lm, parts, states, places, cache, suffix, scored, losses[0], right[0], after)


def forward(lm: LanguageModel, ids: torch.Tensor, cache: Any, keep: int) -> torch.Tensor:
    """Logits of the last `keep` tokens, (B, keep, V); `cache` is extended."""
    takes = inspect.signature(lm.model.forward).parameters
    given: dict[str, Any] = {"cache" if "cache" in takes else "past_key_values": cache}
    if "logits_to_keep" in takes:
        given["logits_to_keep"] = keep
    return lm.model(ids, use_cache=True, **given).logits[:, -keep:]


def scored_of(lm: LanguageModel, suffix: torch.Tensor, cache: Any, scored: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Nats (B, scored) of the last tokens of `suffix` (B, S) after `cache`, which is extended, and whether they are the likeliest."""
    targets = suffix[:, -scored:]
    # The last token is only predicted, but its queries and keys are wanted too.
    logits = forward(lm, suffix, cache, scored + 1)[:, :-1]
    return negative_log_likelihood(logits, targets), logits.argmax(-1) == targets


def scores_of(reading: Reading, policies: Mapping[str, Policy]) -> dict[str, dict[int, torch.Tensor]]:
    """Scores (1, Hkv, T) of each policy for each layer, sinks protected."""
    with torch.inference_mode():
        found = {
            name: {index: protected(policy(state)) for index, state in reading.states.items()}
            for name, policy in policies.items()
        }
    for name, layers in found.items():
        for index, scores in layers.items():
            wanted = reading.states[index].keys.shape[:3]
            if scores.shape != wanted or scores.isnan().any():
                raise ValueError(
                    f"the policy {name} must give scores of shape (1, Hkv, T) = {tuple(wanted)} without NaN; got {tuple(scores.shape)}"
                )
    return found


def continued(
    reading: Reading, scores: Mapping[str, Mapping[int, torch.Tensor]], n_kept: int
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Nats (scored,) and hits (scored,) of the suffix under the cache that each policy leaves; policies run as a batch."""
    names = list(scores)
    entries = reading.suffix.shape[1] * reading.parts.vocab_size
    size = max(1, LOGITS // entries)
    found = {}
    with torch.inference_mode():
        for start in range(0, len(names), size):
            batch = names[start : start + size]
            many = copy.deepcopy(reading.cache)
            many.batch_repeat_interleave(len(batch))
            stacked = {
                place: torch.cat([scores[name][index] for name in batch]) for index, place in reading.places.items()
            }
            pruned = prune_by_scores(many, stacked, n_kept)
            losses, right = scored_of(reading.lm, reading.suffix.expand(len(batch), -1), pruned, reading.scored)
            found.update({name: (losses[i], right[i]) for i, name in enumerate(batch)})
    return found


def attended(
    reading: Reading, scores: Mapping[str, Mapping[int, torch.Tensor]], kept: Mapping[float, int]
) -> dict[tuple[str, float], dict[str, float]]:
    """For each policy and share kept: ``output_error`` and ``capacity``, averaged over layers.

    ``output_error`` is the relative error of the heads' output for the queries of the suffix, which see what is kept of
    the context and the suffix up to themselves. ``capacity`` is the information that the kept tokens hold (with CapKV's
    weights, sinks apart) over that of all, averaged over heads.
    """
    total: dict[tuple[str, float], list[tuple[float, float]]] = {}
    with torch.inference_mode():
        for index, state in reading.states.items():
            queries, new_keys, new_values = reading.after[index]
            output = _Output(state, queries, new_keys, new_values)
            weights, _, power, _ = relevance(
                state.anchor, state.keys, state.values,
                tau=5.0, sigma=1.0, similarity="cosine", n_sink=N_SINK, attention_mask=None,
            )  # fmt: skip
            held = information(weights, state.values, power)
            for name, layers in scores.items():
                for share, n_kept in kept.items():
                    mask = torch.zeros(layers[index].shape, dtype=torch.bool, device=state.keys.device)
                    mask.scatter_(-1, kept_positions(layers[index], n_kept), True)
                    left = information(weights * mask.unsqueeze(2), state.values, power)
                    total.setdefault((name, share), []).append((output.error(mask), float((left / held).mean())))
    return {
        at: {"output_error": sum(e for e, _ in each) / len(each), "capacity": sum(c for _, c in each) / len(each)}
        for at, each in total.items()
    }


class _Output:
    """What the heads of a layer give the queries of a suffix, from all of the context or from a part."""

    def __init__(
        self, state: LayerState, queries: torch.Tensor, new_keys: torch.Tensor, new_values: torch.Tensor
    ) -> None:
        self._values = torch.cat([state.by_head(state.values), state.by_head(new_values)], dim=2).float()
        keys = torch.cat([state.by_head(state.keys), state.by_head(new_keys)], dim=2)
        logits = (queries @ keys.transpose(2, 3)).float() * state.attention.scaling
        softcap = state.attention.softcap
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        new, length = queries.shape[2], state.length
        later = torch.ones(new, length + new, dtype=torch.bool, device=logits.device).triu(length + 1)
        logits = logits.masked_fill(later, -torch.inf)
        self._weights = torch.exp(logits - logits.amax(-1, keepdim=True))
        self._group, self._new = state.attention.group_size, new
        self._whole = self._given(self._weights)

    def _given(self, weights: torch.Tensor) -> torch.Tensor:
        return weights @ self._values / weights.sum(-1, keepdim=True)

    def error(self, mask: torch.Tensor) -> float:
        """Relative to the norm of the whole; `mask` (1, Hkv, T) is what is kept."""
        seen = mask.repeat_interleave(self._group, dim=1).unsqueeze(2).to(self._weights.dtype)
        seen = torch.nn.functional.pad(seen, (0, self._new), value=1.0)
        # Where all that a query looks at is gone, what is left may be below the least float.
        found = (self._weights * seen) @ self._values / (self._weights * seen).sum(-1, keepdim=True).clamp_min(1e-30)
        return float((found - self._whole).norm() / self._whole.norm())
