"""One layer's attention: its projections, whether separate or fused, and queries, keys and values as it makes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from cameraready.models.structure import shapes
from cameraready.models.structure.errors import UnknownArchitecture
from cameraready.models.structure.rotary import Layout, RotaryKind

#: Order of the outputs of a fused projection: all queries, all keys, all values; or group by group of heads.
FusedLayout = Literal["parts", "groups"]


@dataclass(frozen=True, eq=False)
class Attention:
    """Self-attention of one decoder layer, softmax(scaling * Q K^T + mask) V, followed by the output projection.

    Attributes
    ----------
    module : nn.Module
        What the layer calls.
    q_proj, k_proj, v_proj : nn.Module or None
        Linear maps; None where they are fused.
    fused_qkv : nn.Module or None
        The one linear map that gives all three.
    o_proj : nn.Module or None
        Linear map from the heads, side by side, back to the residual stream.
    q_norm, k_norm, v_norm : nn.Module or None
        Norms of queries, keys and values before positions.
    n_heads, n_kv_heads, head_dim : int
        Query heads; key-value heads, each shared by ``n_heads // n_kv_heads`` neighbouring query heads; features of a head.
    value_dim : int
        Features of a value head; equal to `head_dim` almost everywhere.
    scaling : float
        Factor of the inner products.
    softcap : float or None
        c, where attention logits are ``c * tanh(logits / c)``.
    sliding_window : int or None
        A query sees itself and the ``sliding_window - 1`` tokens before it; None means all before it.
    rotary : {"half", "interleaved"} or None
        Pairs of features that rotary positions turn; None where this layer has none.
    gated : bool
        Whether the output of the heads is multiplied by a sigmoid gate that the query projection gives too.
    refusal : str or None
        Why queries, keys and values cannot be had, where the attention is of another make (latent attention, position biases,
        norms at other places): asking for them raises `UnknownArchitecture` with this sentence. The module can still be
        captured and changed.
    verified : bool
        Whether a run of the model gave what these pieces say (not possible without weights).
    """

    module: nn.Module
    n_heads: int
    n_kv_heads: int
    head_dim: int
    value_dim: int
    scaling: float
    q_proj: nn.Module | None = None
    k_proj: nn.Module | None = None
    v_proj: nn.Module | None = None
    o_proj: nn.Module | None = None
    fused_qkv: nn.Module | None = None
    fused_layout: FusedLayout | None = None
    q_norm: nn.Module | None = None
    k_norm: nn.Module | None = None
    v_norm: nn.Module | None = None
    softcap: float | None = None
    clip: float | None = None
    sinks: nn.Parameter | None = None
    gated: bool = False
    sliding_window: int | None = None
    rotary: RotaryKind | None = None
    rotary_layout: Layout = "same"
    refusal: str | None = None
    verified: bool = False

    @property
    def group_size(self) -> int:
        """Number of query heads that share one key-value head."""
        return self.n_heads // self.n_kv_heads

    def queries(self, hidden: torch.Tensor) -> torch.Tensor:
        """Queries before positions, after the layer's query norm if it has one.

        Parameters
        ----------
        hidden : torch.Tensor, shape (B, T, hidden_size)
            What the attention is given (site ``attention_input``), in the model's dtype and on its device.

        Returns
        -------
        torch.Tensor, shape (B, n_heads, T, head_dim)

        Raises
        ------
        UnknownArchitecture
            If the attention is of a make that is not known (see `refusal`).
        """
        return self._heads(self._projected(hidden, "q"), self.n_heads, self.head_dim, self.q_norm)

    def keys(self, hidden: torch.Tensor) -> torch.Tensor:
        """Keys before positions, after the layer's key norm; shape (B, n_kv_heads, T, head_dim). See `queries`."""
        return self._heads(self._projected(hidden, "k"), self.n_kv_heads, self.head_dim, self.k_norm)

    def values(self, hidden: torch.Tensor) -> torch.Tensor:
        """Values; shape (B, n_kv_heads, T, value_dim). See `queries`."""
        return self._heads(self._projected(hidden, "v"), self.n_kv_heads, self.value_dim, self.v_norm)

    def _projected(self, hidden: torch.Tensor, part: Literal["q", "k", "v"]) -> torch.Tensor:
        """One of the three, with its heads side by side: (B, T, heads * D)."""
        if self.refusal is not None:
            raise UnknownArchitecture(self.refusal)
        if self.fused_qkv is None:
            projection = {"q": self.q_proj, "k": self.k_proj, "v": self.v_proj}[part]
            assert projection is not None
            out = projection(hidden)
            if part == "q" and self.gated:
                out = out.unflatten(-1, (self.n_heads, 2 * self.head_dim))[..., : self.head_dim].flatten(-2)
        else:
            out = self._from_fused(self.fused_qkv(hidden), part)
        return out if self.clip is None else out.clamp(-self.clip, self.clip)

    def _from_fused(self, fused: torch.Tensor, part: Literal["q", "k", "v"]) -> torch.Tensor:
        if self.fused_layout == "parts":
            keys = self.n_kv_heads * self.head_dim
            sizes = (self.n_heads * self.head_dim, keys, self.n_kv_heads * self.value_dim)
            return fused.split(sizes, dim=-1)["qkv".index(part)]
        grouped = fused.unflatten(-1, (self.n_kv_heads, self.group_size + 2, self.head_dim))
        chosen = {"q": slice(0, self.group_size), "k": slice(-2, -1), "v": slice(-1, None)}[part]
        return grouped[..., chosen, :].flatten(-3)

    def _heads(self, flat: torch.Tensor, heads: int, size: int, norm: nn.Module | None) -> torch.Tensor:
        if norm is not None and _over_all_heads(norm, heads, size):
            flat, norm = norm(flat), None
        split = flat.unflatten(-1, (heads, size))
        if norm is None:
            return split.transpose(1, 2)
        # A norm with weights of its own for each head takes heads before positions, one for all takes either order.
        return norm(split).transpose(1, 2)


def _over_all_heads(norm: nn.Module, heads: int, size: int) -> bool:
    weight = getattr(norm, "weight", None)
    return heads > 1 and weight is not None and weight.ndim == 1 and weight.shape[0] == heads * size


def find_attention(layer: nn.Module) -> nn.Module | None:
    """The self-attention module of a decoder layer.

    It holds query, key and value projections, separate or fused; failing that, it is named so and projects queries in some
    other way.
    """
    for judge in (_projects, _attends_otherwise):
        for name, module in layer.named_modules():
            words = name.lower()
            if name and "cross" not in words and "encoder" not in words and name.count(".") < 4 and judge(name, module):
                return module
    return None


def _projects(_name: str, module: nn.Module) -> bool:
    if "A_log" in module._parameters or shapes.child(module, ("conv1d", "conv")) is not None:
        return False  # a state-space or delta-rule mixer
    if shapes.linear_child(module, shapes.FUSED) is not None:
        return True
    return all(shapes.linear_child(module, names) is not None for names in (shapes.QUERY, shapes.KEY, shapes.VALUE))


def _attends_otherwise(name: str, module: nn.Module) -> bool:
    last = name.rpartition(".")[2].lower()
    if ("attn" not in last and "attention" not in last) or "norm" in last or "linear" in last:
        return False
    projections = (part for part, child in module.named_children() if shapes.linear_size(child) is not None)
    return any(part.startswith(("q_", "q", "kv")) for part in projections)


def read_attention(module: nn.Module, config: Any, *, layer: int, hidden_size: int) -> Attention:
    """Everything but the rotary kind, from the shapes of the weights and what module and configuration declare."""
    where = f"The attention of layer {layer} ({type(module).__name__})"
    heads = _declared(module, config, "num_heads", "num_attention_heads", "n_head", "n_heads")
    q, k, v = (shapes.linear_child(module, names) for names in (shapes.QUERY, shapes.KEY, shapes.VALUE))
    fused = None if q is not None and k is not None and v is not None else shapes.linear_child(module, shapes.FUSED)
    o_proj = shapes.linear_child(module, shapes.OUTPUT)
    sizes: dict[str, Any] | str
    if heads is None:
        sizes = f"{where} does not say how many heads it has, and neither does the model's configuration."
    elif _scaled_by_place(module, config):
        sizes = f"{where} multiplies queries by a factor that grows with their position (Llama 4's temperature); that is not supported."
    elif fused is not None:
        sizes = _fused_sizes(module, config, fused, o_proj, heads, where)
    elif q is not None and k is not None and v is not None:
        sizes = _separate_sizes(module, config, (q, k, v), heads, where)
    else:
        sizes = f"{where} has no query, key and value projections, separate or fused (it may be latent attention)."
    if isinstance(sizes, str):
        heads = heads or 1
        kv_heads = _declared(module, config, "num_key_value_heads", "num_kv_heads", "n_kv_heads") or heads
        size = _declared(module, config, "head_dim", "head_size") or hidden_size // heads
        sizes = {"n_kv_heads": kv_heads, "head_dim": size, "value_dim": size, "refusal": sizes}
    return Attention(
        module=module,
        n_heads=heads,
        o_proj=o_proj,
        fused_qkv=fused,
        q_proj=None if fused is not None else q,
        k_proj=None if fused is not None else k,
        v_proj=None if fused is not None else v,
        q_norm=shapes.child(module, shapes.QUERY_NORM),
        k_norm=shapes.child(module, shapes.KEY_NORM),
        v_norm=shapes.child(module, shapes.VALUE_NORM),
        softcap=_positive(_declared(module, config, "attn_logit_softcapping", "attn_logit_softcap")),
        clip=_positive(_declared(module, config, "clip_qkv")),
        sinks=module._parameters.get("sinks"),
        scaling=_scaling(module, sizes["head_dim"]),
        **sizes,
    )


def _scaled_by_place(module: nn.Module, config: Any) -> bool:
    """Whether queries get a temperature by their position, 1 over the first thousands: a short run cannot see it."""
    parameters = getattr(config, "rope_parameters", None)
    if isinstance(parameters, dict) and parameters.get("llama_4_scaling_beta"):
        return True
    return bool(getattr(module, "attn_temperature_tuning", False)) and not getattr(module, "use_rope", False)


def _separate_sizes(
    module: nn.Module, config: Any, projections: tuple[nn.Module, nn.Module, nn.Module], heads: int, where: str
) -> dict[str, Any] | str:
    """Numbers and sizes of heads; a sentence where the projections do not divide into heads."""
    q_out, k_out, v_out = ((shapes.linear_size(part) or (0, 0))[1] for part in projections)
    head_dim = _declared(module, config, "head_dim", "head_size")
    gated = False
    if head_dim is None or head_dim * heads != q_out:
        gated = head_dim is not None and 2 * head_dim * heads == q_out
        head_dim = head_dim if gated else q_out // heads
    assert head_dim is not None
    if k_out % head_dim or q_out % head_dim or heads % max(k_out // head_dim, 1):
        return (
            f"{where} projects to {q_out}, {k_out} and {v_out} features, which do not divide into {heads} query heads "
            f"of {head_dim} and as many or fewer key-value heads."
        )
    kv_heads = k_out // head_dim
    return {"n_kv_heads": kv_heads, "head_dim": head_dim, "value_dim": v_out // kv_heads, "gated": gated}


def _fused_sizes(
    module: nn.Module, config: Any, fused: nn.Module, o_proj: nn.Module | None, heads: int, where: str
) -> dict[str, Any] | str:
    """The same for a fused projection, whose outputs must divide into queries, keys and values."""
    out = (shapes.linear_size(fused) or (0, 0))[1]
    inside = shapes.linear_size(o_proj)
    declared = _declared(module, config, "num_key_value_heads", "num_kv_heads", "n_kv_heads")
    size = inside[0] // heads if inside is not None else _declared(module, config, "head_dim", "head_size")
    sizes = (size,) if inside is not None else (size, out // (heads + 2 * (declared or heads)))
    fits = [
        (kv, each)
        for each in sizes
        for kv in (declared, heads, 1)
        if kv and each and (heads + 2 * kv) * each == out and heads % kv == 0
    ]
    if not fits:
        return (
            f"{where} has a fused projection to {out} features, which is no number of query, key and value heads of one "
            f"size for {heads} query heads."
        )
    name = next(name.lower() for name, part in module.named_children() if part is fused)
    layout: FusedLayout = "groups" if name == "query_key_value" else "parts"
    return {"n_kv_heads": fits[0][0], "head_dim": fits[0][1], "value_dim": fits[0][1], "fused_layout": layout}


def _scaling(module: nn.Module, head_dim: int) -> float:
    for name in ("scaling", "scale", "softmax_scale", "inv_norm_factor"):
        value = getattr(module, name, None)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    return float(head_dim) ** -0.5


def _declared(module: nn.Module, config: Any, *names: str) -> Any:
    """What the module, else the configuration, says under the first of the names that it has."""
    for holder in (module, config):
        for name in names:
            value = getattr(holder, name, None)
            if isinstance(value, int | float) and not isinstance(value, bool):
                return value
    return None


def _positive(value: float | None) -> float | None:
    return float(value) if value else None
