"""The layers of a stack as their modules' names and shapes declare them, before the model is asked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from cameraready.models.structure import shapes
from cameraready.models.structure.attention import Attention, find_attention, read_attention
from cameraready.models.structure.parts import Layer, Mlp


def read_layers(stack: nn.ModuleList, config: Any, hidden_size: int) -> tuple[Layer, ...]:
    """All layers; rotary kinds are not yet known."""
    kinds = getattr(config, "layer_types", None)
    layers = []
    for index, module in enumerate(stack):
        kind = kinds[index] if kinds is not None and index < len(kinds) else None
        part = None if _mixes_otherwise(kind) else find_attention(module)
        attention = None
        if part is not None:
            attention = read_attention(part, config, layer=index, hidden_size=hidden_size)
            attention = replace(attention, sliding_window=_window(part, config, kind, index))
            if kind is not None and "chunk" in kind:
                attention = replace(attention, refusal=f"Layer {index} attends within chunks, which is not supported.")
        layers.append(_layer(index, module, attention, hidden_size))
    return tuple(layers)


def _mixes_otherwise(kind: str | None) -> bool:
    return kind is not None and any(word in kind for word in ("linear", "mamba", "conv", "recurrent"))


def _window(attention: nn.Module, config: Any, kind: str | None, index: int) -> int | None:
    """The sliding window of a layer: what its module says, else what the configuration says of its kind of layer."""
    if kind is not None and "sliding" not in kind:
        return None
    window = getattr(attention, "sliding_window", None)
    if window is None and not hasattr(attention, "sliding_window"):
        window = getattr(config, "sliding_window", None)
        if getattr(config, "use_sliding_window", True) is False:
            return None
        first = getattr(config, "max_window_layers", None)
        if kind is None and first is not None and hasattr(config, "use_sliding_window") and index < first:
            return None
    return int(window) if isinstance(window, int) and window > 0 else None


def _layer(index: int, module: nn.Module, attention: Attention | None, hidden_size: int) -> Layer:
    """A layer with its norms judged by their names; a run of the model judges better (see `examination`)."""
    named = [(name.lower(), part) for name, part in module.named_children() if shapes.is_norm(part, hidden_size)]
    mlp_post = _last(named, "post_feedforward", "post_mlp", "post_ffn")
    attention_post = _last(named, "post_self_attn", "post_attn")
    others = [(name, part) for name, part in named if part is not mlp_post and part is not attention_post]
    # "post_attention_layernorm" feeds the MLP, unless another norm does or there is none before the attention either.
    behind = _last(others, "post_attention")
    before = [part for _, part in others if part is not behind]
    if behind is not None and attention_post is None and len(before) != 1:
        attention_post = behind
    elif behind is not None:
        before.append(behind)
    input_norm = before[0] if before else None
    mlp_norm = before[1] if len(before) > 1 else input_norm
    return Layer(index, module, attention, _mlp(module, attention), input_norm, mlp_norm, attention_post, mlp_post)


def _last(named: list[tuple[str, nn.Module]], *words: str) -> nn.Module | None:
    return next((part for name, part in reversed(named) if name.startswith(words)), None)


def _mlp(layer: nn.Module, attention: Attention | None) -> Mlp | None:
    named = ("mlp", "feed_forward", "feedforward", "ffn", "ff", "block_sparse_moe", "moe", "experts")
    part = shapes.child(layer, named)
    if part is None or shapes.linear_size(part) is not None or (attention is not None and part is attention.module):
        return None
    gate, up, down = (shapes.linear_child(part, names) for names in (shapes.GATE, shapes.UP, shapes.DOWN))
    fused = shapes.linear_child(part, shapes.GATE_UP)
    if down is None or (up is None and fused is None):
        gate = up = down = fused = None
    return Mlp(part, gate, up, down, fused)
