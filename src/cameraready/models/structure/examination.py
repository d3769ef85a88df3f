"""What the parts of a model say, checked against a run of the model; what fits is settled, what does not is refused."""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from cameraready.models.structure import shapes
from cameraready.models.structure.attention import Attention
from cameraready.models.structure.errors import UnknownArchitecture
from cameraready.models.structure.parts import Anatomy, Layer
from cameraready.models.structure.probing import (
    LENGTH,
    Flow,
    Observation,
    observe,
    quietly,
    relative_error,
    settle,
    tolerance_of,
)
from cameraready.models.structure.rotary import Angles, declared_kind, spoken_kind

#: What a layer was found to be, without reference to its modules.
_Settled = dict[str, Any]


@dataclass(frozen=True)
class _Findings:
    """What a run told of a model; kept for as long as the model has the same modules."""

    fingerprint: tuple[Any, ...]
    attentions: tuple[_Settled | None, ...]
    norms: tuple[dict[str, str | None], ...]
    logits_refusal: str | None
    unverified: str | None


_KNOWN: weakref.WeakKeyDictionary[nn.Module, _Findings] = weakref.WeakKeyDictionary()


def examined(parts: Anatomy, language_model: nn.Module, config: Any) -> Anatomy:
    """The anatomy with rotary kinds, norms and windows as a run of the model shows them."""
    fingerprint = _fingerprint(language_model, config)
    findings = _KNOWN.get(language_model)
    if findings is None or findings.fingerprint != fingerprint:
        findings = _find(parts, language_model, config, fingerprint)
        _KNOWN[language_model] = findings
    layers = []
    for layer, settled, norms in zip(parts.layers, findings.attentions, findings.norms, strict=True):
        children = dict(layer.module.named_children())
        found: dict[str, Any] = {role: None if name is None else children[name] for role, name in norms.items()}
        attention = (
            layer.attention if settled is None or layer.attention is None else replace(layer.attention, **settled)
        )
        layers.append(replace(layer, attention=attention, **found))
    return replace(parts, layers=tuple(layers), logits_refusal=findings.logits_refusal, unverified=findings.unverified)


def _fingerprint(model: nn.Module, config: Any) -> tuple[Any, ...]:
    weight = next(model.parameters(), None)
    return (
        tuple((name, id(module)) for name, module in model.named_modules()),
        tuple((name, repr(value)) for name, value in vars(config).items()),
        None if weight is None else weight.is_meta,
    )


def _find(parts: Anatomy, model: nn.Module, config: Any, fingerprint: tuple[Any, ...]) -> _Findings:
    watched: list[nn.Module] = [parts.final_norm]
    for layer in parts.layers:
        watched += [part for _, part in layer.module.named_children() if shapes.is_norm(part, parts.hidden_size)]
        watched += [part.module for part in (layer.attention, layer.mlp) if part is not None]
    with contextlib.nullcontext() if parts.rotary_source is None else parts.rotary_source.kept():
        seen = observe(model, dict.fromkeys(watched), parts.vocab_size)
    with quietly(model):  # what is computed again below is computed as it was: without dropout
        return _findings(parts, model, config, fingerprint, seen)


def _findings(
    parts: Anatomy, model: nn.Module, config: Any, fingerprint: tuple[Any, ...], seen: Observation
) -> _Findings:
    name = type(parts.model).__name__
    window = getattr(config, "sliding_window", None)
    attentions: list[_Settled | None] = []
    known: dict[tuple[Any, ...], _Settled] = {}
    for layer in parts.layers:
        if layer.attention is None:
            attentions.append(None)
            continue
        sort = (type(layer.attention.module), layer.attention.sliding_window is None)
        settled = _attention(
            parts, layer, seen, known.get(sort), (window if isinstance(window, int) else None, None), name
        )
        if settled.get("refusal") is None:
            known[sort] = settled
        attentions.append(settled)
    return _Findings(
        fingerprint,
        tuple(attentions),
        tuple(_norms(layer, seen, parts.hidden_size) for layer in parts.layers),
        _logits_refusal(parts, seen, name),
        seen.failure,
    )


def _attention(
    parts: Anatomy,
    layer: Layer,
    seen: Observation,
    alike: _Settled | None,
    windows: tuple[int | None, ...],
    name: str,
) -> _Settled:
    """Rotary kind, layout, window and refusal of one layer's attention."""
    attention = layer.attention
    assert attention is not None
    if attention.refusal is not None:
        return _settled(attention)
    flow = seen.flows.get(attention.module, Flow())
    try:
        angles = _angles(parts, layer.index)
    except UnknownArchitecture as error:
        return _settled(replace(attention, refusal=str(error)))
    if angles is not None and flow.angles is not None and relative_error(angles[0], flow.angles[0]) > 1e-3:
        return _settled(
            replace(attention, refusal=f"The rotary angles of layer {layer.index} of {name} come from elsewhere.")
        )
    angles = flow.angles if angles is None else angles
    if alike is not None:
        attention = replace(
            attention, **{key: alike[key] for key in ("rotary", "rotary_layout", "fused_layout")}, verified=False
        )
    else:
        kind = declared_kind(attention.module, *angles) if angles is not None else None
        if kind is None and angles is None and parts.rotary_modules[layer.index] is not None:
            spoken = spoken_kind(attention.module)
            kind = None if spoken is None else (spoken, "same")
        if kind is not None:
            attention = replace(attention, rotary=kind[0], rotary_layout=kind[1])
    if flow.given is None:  # not run: without weights, or a layer that text alone does not reach
        return _settled(attention)
    if flow.gave is not None and not bool(torch.isfinite(flow.gave).all()):
        return _settled(
            replace(
                attention,
                refusal=f"The attention of layer {layer.index} of {name} gives numbers that are not finite: its weights are damaged, "
                "or its dtype is too narrow.",
            )
        )
    found = settle(attention, flow, angles, windows, like_another=alike is not None)
    if found is None:
        return _settled(
            replace(
                attention,
                refusal=f"The attention of layer {layer.index} of {name} ({type(attention.module).__name__}) gives something "
                "else than its projections, norms, rotary positions and scaling say; it is of a make that is not supported.",
            )
        )
    return _settled(found)


def _settled(attention: Attention) -> _Settled:
    names = ("rotary", "rotary_layout", "fused_layout", "sliding_window", "refusal", "verified")
    return {name: getattr(attention, name) for name in names}


def _angles(parts: Anatomy, layer: int) -> Angles | None:
    """The angles of the first positions, from the model's own module; None where there is none or it has no weights."""
    module = parts.rotary_modules[layer]
    attention = parts.layers[layer].attention
    if module is None or attention is None or parts.rotary_source is None:
        return None
    like = next((p for p in attention.module.parameters() if p.is_floating_point()), None)
    if like is None or like.is_meta:
        return None
    positions = torch.arange(LENGTH, device=like.device)[None]
    return parts.rotary_source.raw(module, positions, layer, like.new_empty(1))


def _norms(layer: Layer, seen: Observation, hidden_size: int) -> dict[str, str | None]:
    """The child that plays each role, by name: by where it stood in the run, else as it was read."""
    children = dict(layer.module.named_children())
    names = {id(part): name for name, part in children.items()}
    read = {
        role: None if part is None else names.get(id(part))
        for role, part in (
            ("input_norm", layer.input_norm),
            ("mlp_norm", layer.mlp_norm),
            ("attention_post_norm", layer.attention_post_norm),
            ("mlp_post_norm", layer.mlp_post_norm),
        )
    }
    flows = {
        name: seen.flows[part]
        for name, part in children.items()
        if part in seen.flows and shapes.is_norm(part, hidden_size)
    }
    for part, fed, behind in (
        (layer.attention, "input_norm", "attention_post_norm"),
        (layer.mlp, "mlp_norm", "mlp_post_norm"),
    ):
        flow = None if part is None else seen.flows.get(part.module)
        if flow is None or flow.given is None:
            continue
        read[fed] = next((name for name, norm in flows.items() if flow.follows(norm)), None)
        read[behind] = next((name for name, norm in flows.items() if norm.follows(flow)), None)
    if read["attention_post_norm"] == read["mlp_norm"]:
        read["attention_post_norm"] = None  # the attention adds the residual stream itself (BLOOM)
    return read


def _logits_refusal(parts: Anatomy, seen: Observation, name: str) -> str | None:
    flow = seen.flows.get(parts.final_norm)
    if seen.failure is not None or seen.logits is None:
        return None
    if flow is not None and flow.given is not None:
        with torch.no_grad():
            ours = parts.logits(flow.given)
        if ours.shape == seen.logits.shape and relative_error(ours, seen.logits) < tolerance_of(seen.logits.dtype):
            return None
    return f"The logits of {name} are not those of its final norm, head and the scaling in its configuration."
