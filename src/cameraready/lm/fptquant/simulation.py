"""A copy of a language model that runs with the online transforms and with quantisers, its modules' names unchanged."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from cameraready.lm.fptquant.hadamard import GroupedHadamard
from cameraready.lm.fptquant.host import Host, HostLayer, Norm
from cameraready.lm.fptquant.quantisers import (
    QuantConfig,
    StaticQuantiser,
    TokenQuantiser,
    WeightQuantiser,
    quantiser_parameters,
)
from cameraready.lm.fptquant.transforms import DownHadamard, ResidualScaling

if TYPE_CHECKING:
    from cameraready.lm.fptquant.merging import FPTConfig

ATTENTION = "fptquant_"


class SimulatedNorm(nn.Module):
    """RMSNorm with an effective gain, computed in float32 or wider; epsilon is divided by S^2 where the stream is kept at unit RMS."""

    def __init__(self, gain: Tensor, eps: float, scaling: ResidualScaling | None):
        super().__init__()
        self.weight = nn.Parameter(gain.detach().clone(), requires_grad=False)
        self.eps, self.scaling = eps, scaling
        self.output_quantiser: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        eps: float | Tensor = self.eps
        if self.scaling is not None and self.scaling.scale is not None:
            eps = self.eps / self.scaling.scale.square()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        out = (normed * self.weight.to(wide.dtype)).to(x.dtype)
        return out if self.output_quantiser is None else self.output_quantiser(out)


class SimulatedLinear(nn.Module):
    """A linear layer with, before it, the division by S, an online transform and a quantiser; its bias is divided by S as well."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach().clone(), requires_grad=False)
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().clone(), requires_grad=False)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.scaling: ResidualScaling | None = None
        self.online: nn.Module | None = None
        self.input_quantiser: nn.Module | None = None
        self.weight_quantiser: WeightQuantiser | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.scaling is not None:
            x = self.scaling.divide(x)
        if self.online is not None:
            x = self.online(x)
        if self.input_quantiser is not None:
            x = self.input_quantiser(x)
        weight = self.weight if self.weight_quantiser is None else self.weight_quantiser(self.weight)
        out = nn.functional.linear(x, weight)
        if self.bias is None:
            return out
        bias = self.bias.expand(out.shape)
        return out + (bias if self.scaling is None else self.scaling.divide(bias))


class CacheSite(nn.Module):
    """What happens to queries, keys and values between RoPE and the attention product."""

    def __init__(self, hadamard: GroupedHadamard | None = None):
        super().__init__()
        self.hadamard = hadamard
        self.keys: nn.Module | None = None
        self.values: nn.Module | None = None

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.hadamard is not None:
            query, key = self.hadamard(query), self.hadamard(key)
        key = key if self.keys is None else self.keys(key)
        return query, key, value if self.values is None else self.values(value)


class LayerForward:
    """The forward pass of a decoder layer with the residual stream in sight: rescaled, and quantised, before each sub-block."""

    def __init__(self, layer: nn.Module, plan: HostLayer, scaling: ResidualScaling | None, *, tuple_out: bool):
        def part(name: str) -> nn.Module:
            return layer.get_submodule(name.removeprefix(plan.name + "."))

        self.attention_norm, self.attention = part(plan.attention_norm.name), part(plan.attention)
        self.mlp_norm, self.mlp = part(plan.mlp_norm.name), part(plan.mlp)
        self.after_attention = part(plan.post_attention_norm.name) if plan.post_attention_norm else None
        self.after_mlp = part(plan.post_mlp_norm.name) if plan.post_mlp_norm else None
        self.scaling, self.first, self.tuple_out = scaling, plan.index == 0, tuple_out
        self.quantisers = nn.ModuleList()
        layer.residual_quantisers = self.quantisers

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.scaling is not None and self.first:
            self.scaling.begin(hidden_states)
        hidden = self._before(hidden_states, 0)
        given = self.attention(*args, hidden_states=self.attention_norm(hidden), **kwargs)
        attended, *rest = given if isinstance(given, tuple) else (given,)
        hidden = hidden + self._after(attended, self.after_attention)
        hidden = self._before(hidden, 1)
        hidden = hidden + self._after(self.mlp(self.mlp_norm(hidden)), self.after_mlp)
        return (hidden, *rest) if self.tuple_out else hidden

    def _before(self, hidden: Tensor, which: int) -> Tensor:
        if self.scaling is not None:
            hidden = self.scaling.rescale(hidden)
        return self.quantisers[which](hidden) if len(self.quantisers) else hidden

    def _after(self, added: Tensor, norm: nn.Module | None) -> Tensor:
        if norm is None:
            return added
        added = norm(added)
        # Behind a norm the division inside the sub-block would be undone, so it happens here.
        return added if self.scaling is None else self.scaling.divide(added)


def simulate(model: nn.Module, host: Host, config: FPTConfig, hadamards: list[DownHadamard | None]) -> nn.Module:
    """A deep copy of `model` with the online parts built in, quantisers absent; weights are still the model's own.

    Norms are computed in float64 where the model is (transformers' own compute in float32 always). The copy keeps the names of all
    parameters; a tied head becomes a parameter of its own where a rotation will make it one.
    """
    twin = copy.deepcopy(model)
    twin.requires_grad_(False)
    if config.rotate:
        untie(twin, host)
    scaling = ResidualScaling() if config.residual_scale else None
    _replace_norm(twin, host.final_norm, scaling)
    implementation = _attention_implementation(twin)
    for plan, online in zip(host.layers, hadamards, strict=True):
        for norm in (plan.attention_norm, plan.mlp_norm):
            _replace_norm(twin, norm, scaling)
        for inner in (plan.post_attention_norm, plan.post_mlp_norm, plan.q_norm, plan.k_norm):
            if inner is not None:
                _replace_norm(twin, inner, None)
        for name in (plan.q, plan.k, plan.v, plan.o, plan.gate, plan.up, plan.down):
            twin.set_submodule(name, SimulatedLinear(twin.get_submodule(name)))
        if scaling is not None and plan.post_attention_norm is None:
            twin.get_submodule(plan.o).scaling = scaling  # type: ignore[assignment]
        if scaling is not None and plan.post_mlp_norm is None:
            twin.get_submodule(plan.down).scaling = scaling  # type: ignore[assignment]
        if online is not None:
            twin.get_submodule(plan.down).online = online  # type: ignore[assignment]
        attention = twin.get_submodule(plan.attention)
        attention.cache_site = CacheSite(GroupedHadamard(plan.head_dim) if config.qk_hadamard else None)
    if host.obstacles.get("residual_scale") is None:
        for plan in host.layers:
            layer = twin.get_submodule(plan.name)
            layer.forward = LayerForward(layer, plan, scaling, tuple_out=_returns_tuple(model, plan))
    _intercept_attention(twin, implementation)
    return twin.eval()


def untie(model: nn.Module, host: Host) -> None:
    """Give the head a parameter of its own (a copy) and tell the configuration."""
    if not host.tied:
        return
    head = model.get_submodule(host.head)
    head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    for config in {id(c): c for c in (model.config, model.config.get_text_config())}.values():
        config.tie_word_embeddings = False


def _replace_norm(twin: nn.Module, norm: Norm, scaling: ResidualScaling | None) -> None:
    gain = twin.get_submodule(norm.name).weight.detach() + norm.offset
    twin.set_submodule(norm.name, SimulatedNorm(gain, norm.eps, scaling))


def _returns_tuple(model: nn.Module, plan: HostLayer) -> bool:
    kept: list[Any] = []
    handle = model.get_submodule(plan.name).register_forward_hook(lambda module, args, output: kept.append(output))
    try:
        with torch.no_grad():
            model(torch.zeros(1, 1, dtype=torch.long, device=next(model.parameters()).device), use_cache=False)
    finally:
        handle.remove()
    return isinstance(kept[0], tuple)


# --- attention, through transformers' own interface for it ------------------------------------------------------------


def _attention_implementation(model: Any) -> str:
    name = getattr(model.config.get_text_config(), "_attn_implementation", None) or "eager"
    return name.removeprefix(ATTENTION)


def _intercept_attention(twin: Any, implementation: str) -> None:
    """Let `twin` attend by `implementation`, with each module's `cache_site` in front."""
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if implementation not in ("eager", "sdpa"):
        raise ValueError(
            f"the model attends by {implementation!r}; open it with attn_implementation='sdpa' or 'eager', where keys and "
            "values can be seen between RoPE and attention"
        )

    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        query, key, value = module.cache_site(query, key, value)
        if implementation == "eager":
            inner = sys.modules[type(module).__module__].eager_attention_forward  # type: ignore[attr-defined]
        else:
            inner = ALL_ATTENTION_FUNCTIONS[implementation]
        return inner(module, query, key, value, mask, **kwargs)

    name = ATTENTION + implementation
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[implementation])
    twin.set_attn_implementation(name)


# --- quantisers -------------------------------------------------------------------------------------------------------


def insert_quantisers(twin: nn.Module, host: Host, config: QuantConfig) -> None:
    """Put quantisers of `config` where they belong, switched off; earlier ones are removed."""
    device = next(twin.parameters()).device

    def activation(bits: int | None, *, heads: int = 0, static: bool = True) -> nn.Module | None:
        if bits is None:
            return None
        if config.dynamic and not static:
            return TokenQuantiser(bits, symmetric=config.symmetric)
        return StaticQuantiser(bits, symmetric=config.symmetric, heads=heads, p=config.p).to(device)

    for plan in host.layers:
        for norm in (plan.attention_norm, plan.mlp_norm):
            twin.get_submodule(norm.name).output_quantiser = activation(config.activations, static=False)  # type: ignore[assignment]
        for name in (plan.o, plan.down):
            twin.get_submodule(name).input_quantiser = activation(config.activations, static=False)  # type: ignore[assignment]
        for name in (plan.q, plan.k, plan.v, plan.o, plan.gate, plan.up, plan.down):
            linear = twin.get_submodule(name)
            linear.weight_quantiser = (
                None
                if config.weights is None
                else WeightQuantiser(config.weights, linear.out_features, p=config.p).to(device)
            )
        site = twin.get_submodule(plan.attention).cache_site
        site.keys, site.values = (activation(config.kv, heads=plan.kv_heads) for _ in range(2))
        layer = twin.get_submodule(plan.name)
        if isinstance(layer.forward, LayerForward):
            made = [activation(config.residual) for _ in range(2)] if config.residual is not None else []
            layer.forward.quantisers = nn.ModuleList(q for q in made if q is not None)
            layer.residual_quantisers = layer.forward.quantisers
        elif config.residual is not None:
            raise ValueError(f"the residual stream cannot be quantised here: {host.obstacles['residual_scale']}")
    for parameter in quantiser_parameters(twin):
        parameter.requires_grad_(False)  # `train` switches them on


def remember_quantisers(twin: nn.Module, host: Host) -> Callable[[], None]:
    """A function that puts the quantisers back that are in place now."""
    places: list[tuple[Any, str]] = []
    for plan in host.layers:
        places += [(twin.get_submodule(norm.name), "output_quantiser") for norm in (plan.attention_norm, plan.mlp_norm)]
        for name in (plan.q, plan.k, plan.v, plan.o, plan.gate, plan.up, plan.down):
            places += [(twin.get_submodule(name), part) for part in ("input_quantiser", "weight_quantiser")]
        site = twin.get_submodule(plan.attention).cache_site
        places += [(site, "keys"), (site, "values")]
        layer = twin.get_submodule(plan.name)
        if isinstance(layer.forward, LayerForward):
            places += [(layer.forward, "quantisers"), (layer, "residual_quantisers")]
    kept = [(place, part, getattr(place, part)) for place, part in places]

    def put_back() -> None:
        for place, part, value in kept:
            setattr(place, part, value)

    return put_back


def quantisers(twin: nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, quantiser) of all of them."""
    for name, module in twin.named_modules():
        if isinstance(module, (StaticQuantiser, TokenQuantiser, WeightQuantiser)):
            yield name, module


@contextmanager
def switched(twin: nn.Module, mode: Literal["off", "observe"]) -> Iterator[None]:
    """All quantisers in one mode for the length of a with statement; only static ranges observe, the others are off meanwhile."""
    before = [(quantiser, quantiser.mode) for _, quantiser in quantisers(twin)]
    try:
        for quantiser, _ in before:
            quantiser.mode = mode if isinstance(quantiser, StaticQuantiser) else "off"
        yield
    finally:
        for quantiser, was in before:
            quantiser.mode = was
