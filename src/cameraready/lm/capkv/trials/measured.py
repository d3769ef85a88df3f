"""What the study's trials measure."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

import cameraready
from cameraready.evidence import Context, interleave
from cameraready.lm._judged import lm_eval_rows, lm_eval_tasks
from cameraready.lm._workload import LMWorkload
from cameraready.lm.capkv.anchors import QueryAnchors, full_attention
from cameraready.lm.capkv.cache import contents
from cameraready.lm.capkv.press import CapKVPress, prune_cache
from cameraready.lm.capkv.scores import greedy_gains, information, leverages, relevance
from cameraready.lm.capkv.selection import kept_positions
from cameraready.lm.capkv.trials.contexts import asked_of
from cameraready.lm.capkv.trials.policies import (
    FURTHER,
    POLICIES,
    VARIANTS,
    LayerState,
    capkv,
    expected_attention,
    snapkv,
)
from cameraready.lm.capkv.trials.reading import attended, continued, forward, read, scores_of
from cameraready.models import LanguageModel, anatomy, tiny_model

Row = dict[str, Any]

#: Shares of the context that are kept.
KEEPS = (0.5, 0.25, 0.1)


class WatchedPress(CapKVPress):
    """Knows whether anything was read from a cache that it pruned."""

    was_read = False

    def pruned(self, layer: Any, anchor: torch.Tensor, real: torch.Tensor | None) -> Any:
        new = super().pruned(layer, anchor, real)
        if new is not layer:
            self.made.append(new)
        return new

    @contextmanager
    def watched(self, model: Any) -> Iterator[None]:
        """As the press itself; one entering is one request."""
        self.made: list[Any] = []
        with self(model):
            yield
        self.was_read |= any(layer.get_seq_length() > layer.stored + layer.dropped for layer in self.made)


def judged(workload: LMWorkload, ctx: Context, document: int, limit: int) -> list[Row]:
    """The user's lm-eval tasks on the model with a whole cache and with caches that CapKV pruned; none named, no rows."""
    tasks = lm_eval_tasks(workload)
    if not tasks:
        return []
    lm, rows = workload.model(ctx.device, ctx.dtype or None), []
    for keep in (1.0, *KEEPS):
        press = WatchedPress(1 - keep)
        found = lm_eval_rows(
            lm.model, lm.tokenizer, tasks, limit=limit, around=lambda press=press: press.watched(lm.model)
        )
        if keep < 1 and not press.was_read:
            raise ValueError(
                f"{', '.join(tasks)}: no pruned cache was read, because lm-eval scores given answers in one go there, or because its prompts are "
                "too short; name a task in which the model writes its answer (output_type: generate_until)"
            )
        rows += [{"policy": "capkv" if keep < 1 else "whole", "keep": keep, **row} for row in found]
    return rows


# --- exact statements ---------------------------------------------------------------------------------------------------


def vectors(kind: str, seed: int, length: int, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Anchor (1, 1, d), keys and values (1, 1, T, d) in float64: independent, or copies of a few with a little noise."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    anchor = draw(1, 1, size)
    if kind == "random":
        return anchor, draw(1, 1, length, size), draw(1, 1, length, size)
    # As many sources as dimensions; how often each is repeated falls with its rank.
    share = 1 / torch.arange(1, size + 1, dtype=torch.float64)
    source = torch.multinomial(share, length, replacement=True, generator=generator)
    keys, values = draw(size, size)[source], draw(size, size)[source]
    return anchor, (keys + 0.05 * draw(length, size))[None, None], (values + 0.05 * draw(length, size))[None, None]


def identities(document: int, kind: str, length: int, size: int) -> list[Row]:
    """Deviations from what the paper states exactly, all in float64."""
    anchor, keys, values = vectors(kind, document, length, size)
    options: dict[str, Any] = {"tau": 5.0, "sigma": 1.0, "similarity": "cosine", "n_sink": 0, "attention_mask": None}
    weights, _, power, _ = relevance(anchor, keys, values, **options)
    s = leverages(weights, values, power)[0, 0, 0]
    # Twice the information of the set without each token, by determinants and not by leverages.
    capacity = torch.eye(size, dtype=torch.float64) + (values[0, 0].T * weights[0, 0, 0]) @ values[0, 0]
    outer = weights[0, 0, 0][:, None, None] * values[0, 0, :, :, None] * values[0, 0, :, None, :]
    losses = torch.logdet(capacity) - torch.logdet(capacity - outer)
    rotation = torch.linalg.qr(
        torch.randn(size, size, generator=torch.Generator().manual_seed(document), dtype=torch.float64)
    ).Q
    turned = leverages(weights, values @ rotation, power)[0, 0, 0]
    effective = size - torch.linalg.inv(capacity).diagonal().sum()
    # Two losses closer than rounding may stand in either order.
    order = losses.argsort()
    return [
        {
            "policy": "capkv",
            "loss_deviation": float((losses + torch.log1p(-s)).abs().max()),
            "order_deviation": float((s[order][:-1] - s[order][1:]).clamp_min(0).max()),
            "sum_deviation": float((s.sum() - effective).abs()),
            "smallest": float(s.min()),
            "largest": float(s.max()),
            "rotation_deviation": float((turned - s).abs().max()),
        }
    ]


def capacities(document: int, kind: str, length: int, size: int) -> list[Row]:
    """Information retained by one-shot and by greedy choice, over that of all tokens, at each share kept."""
    anchor, keys, values = vectors(kind, document, length, size)
    options: dict[str, Any] = {"tau": 5.0, "sigma": 1.0, "similarity": "cosine", "n_sink": 0, "attention_mask": None}
    weights, _, power, candidates = relevance(anchor, keys, values, **options)
    whole = information(weights, values, power)
    found = {
        "capkv": leverages(weights, values, power)[:, :, 0],
        "capkv-greedy": greedy_gains(weights, values, power, candidates, int(length * max(KEEPS))),
    }
    rows = []
    for name, scores in found.items():
        for keep in KEEPS:
            mask = torch.zeros_like(scores).scatter_(-1, kept_positions(scores, int(length * keep)), 1.0)
            left = information(weights * mask.unsqueeze(2), values, power)
            rows.append({"policy": name, "keep": keep, "capacity": float(left / whole)})
    return rows


# --- language models ----------------------------------------------------------------------------------------------------


def documents(
    workload: LMWorkload, ctx: Context, part: str, document: int, length: int, n: int, keeps: tuple[float, ...]
) -> list[Row]:
    """A context read once, pruned by every policy to every share, and what follows it under each."""
    lm = workload.model(ctx.device, ctx.dtype or None)
    asked = asked_of(workload, lm, part, document, length, n)
    if asked is None:
        return []
    kept = {keep: int(asked.context.shape[1] * keep) for keep in keeps}
    reading = read(lm, asked.context, asked.suffix, asked.scored, max(kept.values()), seed=10_000 * ctx.seed + document)
    through = ctx.select({**POLICIES, "capkv-greedy": VARIANTS["capkv-greedy"]})
    beside = {name: policy for name, policy in {**VARIANTS, **FURTHER}.items() if name not in through}
    scores = scores_of(reading, {**through, **(beside if part == "text" else {})})
    measured = attended(reading, scores, kept) if part == "text" else {}
    rows = []
    for keep, n_kept in kept.items():
        found = continued(reading, {name: scores[name] for name in through}, n_kept)
        for name in scores:
            row = {"policy": name, "keep": keep, "n_kept": n_kept, **measured.get((name, keep), {})}
            if name in found:
                losses, right = found[name]
                row |= {
                    "loss": float(losses.mean()),
                    "added": float((losses - reading.losses).mean()),
                    "correct": float(right.all()),
                }
            rows.append(row)
    return [
        *rows,
        {"policy": "whole", "keep": 1.0, "loss": float(reading.losses.mean()), "correct": float(reading.right.all())},
    ]


def exactness(workload: LMWorkload, ctx: Context, document: int, length: int, n: int) -> list[Row]:
    """A pruned cache against the whole one with what was dropped masked; and generation at ratio 0 against none."""
    from transformers import DynamicCache

    lm = workload.model(ctx.device, ctx.dtype or None)
    asked = asked_of(workload, lm, "text", document, length, n)
    if asked is None:
        return []
    context, suffix = asked.context.to(lm.device), asked.suffix.to(lm.device)
    cache = DynamicCache(config=lm.model.config)
    with torch.inference_mode(), QueryAnchors(lm.model) as anchors:
        forward(lm, context, cache, keep=1)
    pruned = prune_cache(cache, anchors, 0.75)
    with torch.inference_mode():
        found = forward(lm, suffix, pruned, keep=suffix.shape[1])
        with whole_but_masked(lm, cache, anchors, 0.75):
            expected = forward(lm, suffix, copy.deepcopy(cache), keep=suffix.shape[1])
        options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        plain = lm.model.generate(context, **options)
        with CapKVPress(0.0)(lm.model):
            same = lm.model.generate(context, **options)
    scale = float(expected.abs().max())
    return [
        {
            "policy": "capkv",
            "deviation": float((found - expected).abs().max()) / scale,
            "tokens_changed": float((plain != same).sum()),
        }
    ]


class whole_but_masked:
    """The model on a whole cache, whose full-attention layers do not see the pairs that `prune_cache` would drop."""

    def __init__(self, lm: LanguageModel, cache: Any, anchors: QueryAnchors, ratio: float) -> None:
        self._lm, self._handles = lm, []
        press = CapKVPress(ratio)
        self._kept = {}
        for index, place in anchors.places():
            keys, values = contents(cache.layers[place])
            scores = press.token_scores(anchors[index], keys, values, None)
            positions = kept_positions(scores, press.n_kept(keys.shape[2]))
            self._kept[index] = torch.zeros(scores.shape, dtype=torch.bool, device=keys.device).scatter_(
                -1, positions, True
            )

    def __enter__(self) -> None:
        for layer in full_attention(anatomy(self._lm.model)):
            kept = self._kept[layer.index].repeat_interleave(layer.attention.group_size, dim=1)
            hook = self._masking(kept)
            self._handles.append(layer.attention.module.register_forward_pre_hook(hook, with_kwargs=True))

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    @staticmethod
    def _masking(kept: torch.Tensor) -> Any:
        def hook(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            hidden = kwargs.get("hidden_states", args[0] if args else None)
            new, length = hidden.shape[1], kept.shape[2]
            seen = torch.ones(new, length + new, dtype=torch.bool, device=kept.device).tril(length)
            seen = seen & torch.nn.functional.pad(kept, (0, new), value=True).unsqueeze(2)
            mask = torch.zeros(seen.shape, dtype=hidden.dtype, device=hidden.device)
            return args, {**kwargs, "attention_mask": mask.masked_fill(~seen, torch.finfo(hidden.dtype).min)}

        return hook


def serving(workload: LMWorkload, ctx: Context, length: int, new_tokens: int, repeats: int) -> list[Row]:
    """Size of the cache and speed of decoding with the whole and with pruned caches, in turn."""
    from transformers import DynamicCache

    lm = workload.model(ctx.device, ctx.dtype or None)
    asked = asked_of(workload, lm, "text", 0, length, 1)
    if asked is None:
        return []
    cache = DynamicCache(config=lm.model.config)
    with torch.inference_mode(), QueryAnchors(lm.model) as anchors:
        forward(lm, asked.context.to(lm.device), cache, keep=1)
    caches = {1.0: cache, **{keep: prune_cache(cache, anchors, 1 - keep) for keep in KEEPS}}
    token = asked.suffix[:, :1].to(lm.device)

    def decode(own: Any) -> None:
        own = copy.deepcopy(own)
        with torch.inference_mode():
            for _ in range(new_tokens):
                forward(lm, token, own, keep=1)

    timed = interleave(
        {str(keep): lambda c=c: decode(c) for keep, c in caches.items()}, warmup=1, repeats=repeats, arm_column="keep"
    )
    sizes = {str(keep): size_of(each) for keep, each in caches.items()}
    return [
        {
            "policy": "whole" if row["keep"] == "1.0" else "capkv",
            "keep": float(row["keep"]),
            "repeat": row["repeat"],
            "cache_gib": sizes[row["keep"]] / 2**30,
            "tokens_per_second": new_tokens / row["seconds"],
        }
        for row in timed
    ]


def size_of(cache: Any) -> int:
    """Bytes of all keys and values."""
    return sum(t.numel() * t.element_size() for layer in cache.layers for t in contents(layer) if t is not None)


# --- speed, and kvpress -------------------------------------------------------------------------------------------------


def scoring(ctx: Context, heads: int, kv_heads: int, head_dim: int, length: int, runs: int) -> list[Row]:
    """Seconds to score one layer of a context from what its attention was given, arms in turn; two repeats a run."""
    model = tiny_model("llama", n_layers=1, hidden=heads * head_dim, heads=heads, kv_heads=kv_heads, head_dim=head_dim, vocab=64,
                       max_positions=length + 1024).to(ctx.device)  # fmt: skip
    parts = anatomy(model)
    generator = torch.Generator().manual_seed(ctx.seed)
    hidden = torch.randn(1, length, heads * head_dim, generator=generator).to(ctx.device)
    keys, values = (torch.randn(2, 1, kv_heads, length, head_dim, generator=generator)).to(ctx.device)

    def scored(policy: Any) -> Any:
        def call() -> None:
            with torch.inference_mode():
                policy(LayerState(parts, 0, hidden, keys, values, length // 2, generator))
            if ctx.device.startswith("cuda"):
                torch.cuda.synchronize()

        return call

    arms = ctx.select({"capkv": capkv, "snapkv": snapkv, "expected-attention": expected_attention})
    timed = interleave(
        {name: scored(policy) for name, policy in arms.items()}, warmup=2, repeats=2 * runs, arm_column="policy"
    )
    return [
        {
            "policy": row["policy"],
            "document": row["repeat"] // 2,
            "repeat": row["repeat"],
            "score_seconds": row["seconds"],
        }
        for row in timed
    ]


SOURCE = str(Path(cameraready.__file__).parents[1])


def under_kvpress(ctx: Context, part: str, document: int, runs: int) -> list[Row]:
    """CapKVPress against kvpress's own press for the paper, both run by kvpress in its environment."""
    peer = ctx.peer("kvpress")
    if part == "equal":
        kind = ("llama", "qwen3", "phi3")[document % 3]
        ids = torch.randint(0, 250, (1, 96), generator=torch.Generator().manual_seed(document)).numpy()
        given = (SOURCE, kind, {"seed": document}, ids)
        theirs, found = (peer.scores(*given, name, {"compression_ratio": 0.5}) for name in ("CapPress", "CapKVPress"))
        apart = max(float(np.abs(a[..., 4:] / b[..., 4:] - 1).max()) for a, b in zip(found, theirs, strict=True))
        return [{"policy": "capkv", "score_deviation": apart}]
    seconds = peer.seconds(SOURCE, 14, 2, 64, 1024, 2, 2 * runs)
    return [
        {"policy": name, "document": repeat // 2, "repeat": repeat, "score_seconds": value}
        for name, values in seconds.items()
        for repeat, value in enumerate(values)
    ]
