"""All transforms of one model, and the weights that it has with them merged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from cameraready.lm.fptquant.host import TRANSFORMS, Host, HostLayer
from cameraready.lm.fptquant.transforms import (
    DownHadamard,
    PreRopeTransform,
    ResidualRotation,
    UpDownScaling,
    ValueTransform,
)

if TYPE_CHECKING:
    from cameraready.lm.fptquant.transforms import Layout

#: Gives the indices of a random subset of a number of rows.
Pick = Callable[[int], Tensor]


class Read:
    """Reads the parameters of a model by name, detached, in the dtype of a computation; the model is not changed."""

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self.dtype = dtype

    def __call__(self, name: str) -> Tensor:
        return self.parameters[name].detach().to(self.dtype)

    def has(self, name: str) -> bool:
        return name in self.parameters


@dataclass(frozen=True)
class FPTConfig:
    """Which transforms are inserted.

    Attributes
    ----------
    prerope : bool
        T_k, scaled rotations of keys and queries before RoPE. Where queries and keys are normalised (Qwen3, Gemma 3) only scales, equal
        for all heads of a layer, are exact; they go into the gains of those norms.
    value : bool
        T_v, a matrix a KV head on the values.
    updown : bool
        T_u, a scale a channel of the MLP.
    residual_scale : bool
        S_n, the residual stream at unit RMS. Online: a plain checkpoint cannot express it.
    rotate : bool
        T_r, a rotation of the residual stream.
    down_hadamard : bool
        T_d, a Hadamard transform of the down projection's input. Online: a plain checkpoint cannot express it.
    value_form : {"full", "rotation"}
        Whether T_v may scale.
    value_initial : {"identity", "hadamard"}
    rotation_initial : {"hadamard", "random-hadamard", "identity"}
    qk_hadamard : bool
        QuaRot's online Hadamard transform of queries and keys after RoPE; no part of FPTQuant, for comparisons.
    unsupported : {"error", "skip"}
        What happens with a transform that would not be exact on the model: a sentence that says why, or going without
        it (`FPTQuantizer.skipped` says why).
    seed : int
        Of the signs of ``"random-hadamard"``.
    precision : {"float64", "float32"}
        In which the transforms are multiplied into the weights of `FPTQuantizer.model`, to be rounded once to the model's dtype. float32
        is several times faster on a CPU for billions of weights. `FPTQuantizer.merge` uses float64 always.
    """

    prerope: bool = True
    value: bool = True
    updown: bool = True
    residual_scale: bool = True
    rotate: bool = True
    down_hadamard: bool = True
    value_form: Literal["full", "rotation"] = "full"
    value_initial: Literal["identity", "hadamard"] = "identity"
    rotation_initial: Literal["hadamard", "random-hadamard", "identity"] = "hadamard"
    qk_hadamard: bool = False
    unsupported: Literal["error", "skip"] = "error"
    seed: int = 0
    precision: Literal["float64", "float32"] = "float64"

    def __post_init__(self) -> None:
        for name, allowed in (
            ("value_form", ("full", "rotation")),
            ("value_initial", ("identity", "hadamard")),
            ("rotation_initial", ("hadamard", "random-hadamard", "identity")),
            ("unsupported", ("error", "skip")),
            ("precision", ("float64", "float32")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        for name in (*TRANSFORMS, "qk_hadamard"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")

    @property
    def wanted(self) -> tuple[str, ...]:
        """Names of the transforms that are on."""
        return tuple(name for name in TRANSFORMS if getattr(self, name))

    @classmethod
    def mergeable(cls, **changes: object) -> FPTConfig:
        """Everything that a plain checkpoint can express: without S_n and T_d."""
        return cls(**{"residual_scale": False, "down_hadamard": False, **changes})  # type: ignore[arg-type]


class LayerTransforms(nn.Module):
    """T_k, T_v, T_u and T_d of one decoder layer; None where a transform is off."""

    def __init__(self, layer: HostLayer, config: FPTConfig):
        super().__init__()
        self.prerope: PreRopeTransform | None = None
        self.value: ValueTransform | None = None
        self.updown: UpDownScaling | None = None
        self.hadamard: DownHadamard | None = None
        if config.prerope:
            normed = layer.q_norm is not None
            layout: Layout = layer.layout  # type: ignore[assignment]
            self.prerope = PreRopeTransform(
                1 if normed else layer.kv_heads,
                1 if normed else layer.heads,
                layer.head_dim,
                layer.rotary_dim,
                layout=layout,
                rotate=not normed,
            )
        if config.value:
            self.value = ValueTransform(
                layer.kv_heads, layer.heads, layer.value_dim, form=config.value_form, initial=config.value_initial
            )
        if config.updown:
            self.updown = UpDownScaling(layer.width)
        if config.down_hadamard:
            self.hadamard = DownHadamard(layer.width)


class Transforms(nn.Module):
    """Every transform of a model. `merged` gives the weights that they make of the model's own."""

    def __init__(self, host: Host, config: FPTConfig):
        super().__init__()
        self.host, self.config = host, config
        self.rotation = (
            ResidualRotation(host.hidden, initial=config.rotation_initial, seed=config.seed) if config.rotate else None
        )
        self.layers = nn.ModuleList(LayerTransforms(layer, config) for layer in host.layers)

    def matrix(self) -> Tensor | None:
        """R of the residual stream, or None."""
        return None if self.rotation is None else self.rotation.matrix()

    def merged(self, read: Read) -> Iterator[tuple[str, Tensor]]:
        """(parameter name, transformed value) of everything that changes, layer by layer; gains of norms as effective ones."""
        return self.each(read, self.matrix())

    def each(self, read: Read, turn: Tensor | None, pick: Pick | None = None) -> Iterator[tuple[str, Tensor]]:
        """The same for a given R. With `pick`, of weights only a random part of the rows (or columns) that R leaves alone."""
        yield from self._stream(read, turn, pick)
        for layer in self.host.layers:
            own: LayerTransforms = self.layers[layer.index]  # type: ignore[assignment]
            yield from self._attention(layer, own, read, turn, pick)
            yield from self._mlp(layer, own, read, turn, pick)

    def _stream(self, read: Read, turn: Tensor | None, pick: Pick | None) -> Iterator[tuple[str, Tensor]]:
        """Embedding, head and gains of the norms (only a rotation changes them)."""
        if turn is None:
            return
        embedding, head = f"{self.host.embedding}.weight", f"{self.host.head}.weight"
        yield embedding, ResidualRotation.reader(_rows(read(embedding), pick), turn)
        gain = self.host.final_norm.gain(read)
        # A tied head has the embedding's weight, whatever it is called.
        source = embedding if self.host.tied else head
        yield head, ResidualRotation.reader(_rows(read(source), pick) * gain, turn)
        if pick is None:
            norms = [self.host.final_norm]
            norms += [n for layer in self.host.layers for n in (layer.attention_norm, layer.mlp_norm)]
            for norm in norms:
                yield f"{norm.name}.weight", torch.ones_like(norm.gain(read))

    def _attention(
        self, layer: HostLayer, own: LayerTransforms, read: Read, turn: Tensor | None, pick: Pick | None
    ) -> Iterator[tuple[str, Tensor]]:
        gain = None if turn is None else layer.attention_norm.gain(read)
        in_norms = layer.q_norm is not None
        changes: list[tuple[str, Callable[[Tensor], Tensor] | None]] = [
            (layer.q, own.prerope.queries if own.prerope is not None and not in_norms else None),
            (layer.k, own.prerope.keys if own.prerope is not None and not in_norms else None),
            (layer.v, own.value.values if own.value is not None else None),
        ]
        for name, change in changes:
            if change is not None or turn is not None:
                yield f"{name}.weight", _read_stream(read(f"{name}.weight"), change, gain, turn, pick)
            if change is not None and read.has(f"{name}.bias"):
                yield f"{name}.bias", change(read(f"{name}.bias"))
        if in_norms and own.prerope is not None:
            assert layer.q_norm is not None
            assert layer.k_norm is not None
            yield f"{layer.q_norm.name}.weight", own.prerope.queries(layer.q_norm.gain(read))
            yield f"{layer.k_norm.name}.weight", own.prerope.keys(layer.k_norm.gain(read))
        if own.value is not None or turn is not None:
            yield from self._writer(layer.o, own.value.outputs if own.value is not None else None, read, turn, pick)

    def _mlp(
        self, layer: HostLayer, own: LayerTransforms, read: Read, turn: Tensor | None, pick: Pick | None
    ) -> Iterator[tuple[str, Tensor]]:
        gain = None if turn is None else layer.mlp_norm.gain(read)
        if turn is not None:
            yield f"{layer.gate}.weight", _read_stream(read(f"{layer.gate}.weight"), None, gain, turn, pick)
        if own.updown is not None or turn is not None:
            up = own.updown.up if own.updown is not None else None
            yield f"{layer.up}.weight", _read_stream(read(f"{layer.up}.weight"), up, gain, turn, pick)
            if up is not None and read.has(f"{layer.up}.bias"):
                yield f"{layer.up}.bias", up(read(f"{layer.up}.bias"))
        if own.updown is not None or own.hadamard is not None or turn is not None:

            def change(weight: Tensor) -> Tensor:
                weight = own.updown.down(weight) if own.updown is not None else weight
                return own.hadamard.down(weight) if own.hadamard is not None else weight

            yield from self._writer(layer.down, change, read, turn, pick)

    def _writer(
        self,
        name: str,
        change: Callable[[Tensor], Tensor] | None,
        read: Read,
        turn: Tensor | None,
        pick: Pick | None,
    ) -> Iterator[tuple[str, Tensor]]:
        weight = read(f"{name}.weight")
        weight = weight if change is None else change(weight)
        if turn is not None:
            if pick is not None:
                weight = weight[:, pick(weight.shape[1])]
            weight = ResidualRotation.writer(weight, turn)
        yield f"{name}.weight", weight
        if turn is not None and read.has(f"{name}.bias"):
            yield f"{name}.bias", ResidualRotation.writer(read(f"{name}.bias"), turn)


def _rows(weight: Tensor, pick: Pick | None) -> Tensor:
    return weight if pick is None else weight[pick(weight.shape[0])]


def _read_stream(
    weight: Tensor,
    change: Callable[[Tensor], Tensor] | None,
    gain: Tensor | None,
    turn: Tensor | None,
    pick: Pick | None,
) -> Tensor:
    """Weight (out, d) of a layer that reads the stream: its rows changed, the norm's gain folded in, rotated."""
    weight = weight if change is None else change(weight)
    if turn is None:
        return weight
    weight = _rows(weight, pick)
    return ResidualRotation.reader(weight if gain is None else weight * gain, turn)
