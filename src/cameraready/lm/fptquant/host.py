"""What a language model offers to the transforms, found by structure and by running it, never by class name."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: The six transforms, and QuaRot's online transform of queries and keys (for comparisons), as options name them.
TRANSFORMS = ("prerope", "value", "updown", "residual_scale", "rotate", "down_hadamard")


@dataclass(frozen=True)
class Norm:
    """An RMSNorm: output = (offset + weight) * x / sqrt(mean x^2 + eps)."""

    name: str
    eps: float
    offset: float

    def gain(self, read: Any) -> Tensor:
        return read(f"{self.name}.weight") + self.offset


@dataclass(frozen=True)
class HostLayer:
    """Names of one decoder layer's modules, and the shapes that the transforms need."""

    index: int
    name: str
    attention: str
    mlp: str
    q: str
    k: str
    v: str
    o: str
    gate: str
    up: str
    down: str
    attention_norm: Norm
    mlp_norm: Norm
    post_attention_norm: Norm | None
    post_mlp_norm: Norm | None
    q_norm: Norm | None
    k_norm: Norm | None
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    rotary_dim: int
    layout: str | None
    free_values: bool
    width: int


@dataclass(frozen=True)
class Host:
    """A model's plan. `obstacles` says, for each transform that would not be exact here, why."""

    layers: tuple[HostLayer, ...]
    embedding: str
    head: str
    final_norm: Norm
    tied: bool
    hidden: int
    obstacles: dict[str, str] = field(default_factory=dict)

    @property
    def scaled_norms(self) -> bool:
        """Whether queries and keys pass through RMSNorms, in the gains of which T_k then lives."""
        return self.layers[0].q_norm is not None


def read_host(model: PreTrainedModel) -> Host:
    """The plan of `model`, which is run once on a few tokens and not changed.

    Raises
    ------
    ValueError
        With a sentence, for a model that has not the shape that any of the transforms is derived for: decoder layers
        of attention and gated MLP, each behind an RMSNorm, one after the other, with separate projections.
    """
    from cameraready.models import anatomy

    found = anatomy(model)
    names = {id(module): name for name, module in model.named_modules()}
    layers = tuple(_layer(model, found, each, names) for each in found.layers)
    final = _norm(found.final_norm, names[id(found.final_norm)], found.hidden_size)
    host = Host(
        layers=layers,
        embedding=names[id(found.embedding)],
        head=names[id(found.head)],
        final_norm=final,
        tied=found.head.weight is found.embedding.weight,
        hidden=found.hidden_size,
    )
    return dataclasses.replace(host, obstacles=_obstacles(model, found, host))


def _layer(model: Any, found: Any, each: Any, names: dict[int, str]) -> HostLayer:
    where = f"decoder layer {each.index}"
    attention, mlp = each.attention, each.mlp
    if attention is None or mlp is None:
        raise ValueError(
            f"{where} has no softmax attention or no MLP of its own; FPTQuant is derived for layers of both"
        )
    parts: dict[str, Any] = {
        "q": attention.q_proj,
        "k": attention.k_proj,
        "v": attention.v_proj,
        "o": attention.o_proj,
        "gate": mlp.gate_proj,
        "up": mlp.up_proj,
        "down": mlp.down_proj,
    }
    for part, module in parts.items():
        if module is None:
            raise ValueError(
                f"{where} has no separate {part} projection (it is fused, or the MLP is not a gated one or a mixture of experts); FPTQuant's "
                "transforms are derived for layers with q, k, v, o, gate, up and down projections"
            )
        if not isinstance(module, nn.Linear) or not module.weight.is_floating_point():
            raise ValueError(
                f"{names[id(module)]} is a {type(module).__name__} and not a floating-point Linear layer; open the model "
                "unquantised and without adapters (PEFT: merge_and_unload()) first"
            )
    norms = (each.input_norm, each.attention_post_norm, each.mlp_norm, each.mlp_post_norm)
    made = [None if norm is None else _norm(norm, names[id(norm)], found.hidden_size) for norm in norms]
    if made[0] is None or made[2] is None:
        raise ValueError(f"{where} has a sub-block without a norm before it; there is nothing to fold transforms into")
    if each.mlp_norm is each.input_norm:
        raise ValueError(
            f"{where} runs attention and MLP side by side; the transforms are derived for one after the other"
        )
    if attention.clip is not None:
        raise ValueError(f"{where} clips queries, keys and values, which no scale or rotation commutes with")
    inner = [
        None if norm is None else _norm(norm, names[id(norm)], attention.head_dim)
        for norm in (attention.q_norm, attention.k_norm)
    ]
    if (inner[0] is None) != (inner[1] is None):
        raise ValueError(f"{where} normalises queries or keys but not both")
    rotary = 0
    if attention.rotary is not None:
        cos, _ = found.rotary(torch.zeros(1, 1, dtype=torch.long), layer=each.index)
        rotary = cos.shape[-1]
    return HostLayer(
        index=each.index,
        name=names[id(each.module)],
        attention=names[id(attention.module)],
        mlp=names[id(mlp.module)],
        **{part: names[id(module)] for part, module in parts.items()},
        attention_norm=made[0],
        post_attention_norm=made[1],
        mlp_norm=made[2],
        post_mlp_norm=made[3],
        q_norm=inner[0],
        k_norm=inner[1],
        heads=attention.n_heads,
        kv_heads=attention.n_kv_heads,
        head_dim=attention.head_dim,
        value_dim=attention.value_dim,
        rotary_dim=rotary,
        layout=attention.rotary,
        free_values=attention.v_norm is None and not attention.gated,
        width=parts["up"].out_features,
    )


def _norm(module: nn.Module, name: str, width: int) -> Norm:
    """How `module` normalises, tried on a vector; ValueError if it is no RMSNorm over `width`."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", None)
    if eps is None:
        eps = getattr(module, "eps", None)
    if isinstance(weight, Tensor) and weight.shape == (width,) and getattr(module, "bias", None) is None:
        eps = torch.finfo(weight.dtype).eps if eps is None else float(eps)
        probe = torch.linspace(-1.0, 3.0, width, device=weight.device) + 0.5 * torch.arange(
            width, device=weight.device
        ).remainder(3)
        with torch.no_grad():
            out = module(probe.to(weight.dtype)[None])[0].float()
            plain = probe * torch.rsqrt(probe.pow(2).mean() + eps)
            for offset in (0.0, 1.0):
                expected = plain * (weight.float() + offset)
                if torch.allclose(out, expected, rtol=3e-2 if weight.dtype.itemsize < 4 else 1e-4, atol=1e-4):
                    return Norm(name, eps, offset)
    raise ValueError(f"{name} ({type(module).__name__}) is not an RMSNorm, which the transforms of the stream rest on")


def _obstacles(model: Any, found: Any, host: Host) -> dict[str, str]:
    obstacles: dict[str, str] = {}
    if any(layer.layout is None for layer in host.layers):
        obstacles["prerope"] = "T_k rests on rotary position embeddings, which not every layer of this model has"
    if not all(layer.free_values for layer in host.layers):
        obstacles["value"] = (
            "T_v would not be exact: a norm on the values or a gate on the heads stands between its two halves"
        )
    widths = [model.get_submodule(name).weight.shape[-1] for name in (host.embedding, host.head)]
    if any(layer.post_attention_norm or layer.post_mlp_norm for layer in host.layers):
        obstacles["rotate"] = (
            "T_r cannot be merged: norms after the sub-blocks scale the channels of what is written to the residual stream, "
            "and such gains do not commute with a rotation"
        )
    elif widths != [host.hidden, host.hidden]:
        obstacles["rotate"] = (
            "T_r needs embedding and head of the residual stream's width; here a projection stands between"
        )
    if not _adds_up(model, found):
        obstacles["residual_scale"] = (
            "S_n needs layers that add what attention and MLP give to the stream as it is; here it is multiplied by a factor or "
            "goes another way"
        )
    return obstacles


def _adds_up(model: Any, found: Any) -> bool:
    """Whether a layer's output is its input plus what attention and MLP (behind their norms) gave."""
    layer = found.layers[0]
    seen: dict[str, Tensor] = {}
    writers = {
        "attention": layer.attention_post_norm or layer.attention.module,
        "mlp": layer.mlp_post_norm or layer.mlp.module,
    }

    def keep(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            seen[name] = output[0] if isinstance(output, tuple) else output
            if name == "layer":
                seen["input"] = args[0] if args else kwargs["hidden_states"]

        return hook

    handles = []
    try:
        for name, module in (*writers.items(), ("layer", layer.module)):
            handles.append(module.register_forward_hook(keep(name), with_kwargs=True))
        device = next(model.parameters()).device
        with torch.no_grad():
            model(torch.arange(3, device=device)[None] % found.vocab_size, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    total = seen["input"].float() + seen["attention"].float() + seen["mlp"].float()
    tolerance = 3e-2 if seen["layer"].dtype.itemsize < 4 else 1e-4
    return bool((total - seen["layer"].float()).norm() <= tolerance * total.norm())
