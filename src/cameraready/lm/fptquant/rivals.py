"""What FPTQuant is compared with, all with the same quantisers, calibration text and steps: rounding, scaling, Hadamard and learned rotations."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cameraready.lm.fptquant.host import TRANSFORMS, Host, read_host
from cameraready.lm.fptquant.merging import FPTConfig
from cameraready.lm.fptquant.quantisers import QuantConfig
from cameraready.lm.fptquant.quantizer import FPTQuantizer

NONE: dict[str, Any] = dict.fromkeys(TRANSFORMS, False)
#: QuaRot's four rotations: the stream, the values of a head, online the down projection's input and, after RoPE, queries and keys.
QUAROT: dict[str, Any] = {
    **NONE,
    "rotate": True,
    "rotation_initial": "random-hadamard",
    "value": True,
    "value_form": "rotation",
    "value_initial": "hadamard",
    "down_hadamard": True,
    "qk_hadamard": True,
}


@dataclass(frozen=True)
class Recipe:
    """How one competitor makes a quantised model.

    Attributes
    ----------
    transforms : mapping
        Arguments of `FPTConfig`.
    smooth : bool
        Whether activations are scaled into the weights first, as SmoothQuant does.
    local, trained : bool
        Whether the transforms are fitted to the weights, and end to end with the ranges.
    """

    transforms: Mapping[str, Any] = field(default_factory=dict)
    smooth: bool = False
    local: bool = False
    trained: bool = False

    def make(
        self, model: Any, batches: list[Tensor], bits: QuantConfig, *, seed: int, local: Mapping[str, Any], steps: int
    ) -> FPTQuantizer:
        """The quantised model, calibrated (and trained, for `steps`) on `batches`; transforms that are not exact on it are skipped."""
        given = smoothed(model, batches) if self.smooth else model
        large = sum(p.numel() for p in model.parameters()) > 50_000_000
        options = {"precision": "float32" if large else "float64", "unsupported": "skip", "seed": seed}
        fpt = FPTQuantizer(given, FPTConfig(**{**options, **self.transforms}))
        if self.local:
            fpt.optimize_local(**local, progress=False)
        fpt.calibrate(batches, bits)
        if self.trained and steps:
            fpt.train_end_to_end(batches, steps=steps, **TRAINING, progress=False)
        return fpt


#: Rates of the end-to-end training, the same for all that are trained.
TRAINING: dict[str, Any] = {"lr": 1e-2, "range_lr": 1e-2, "loss": "jsd"}

RECIPES: dict[str, Recipe] = {
    "rtn": Recipe(NONE),
    "smooth": Recipe(NONE, smooth=True),
    "hadamard": Recipe(QUAROT),
    "spin": Recipe(QUAROT, trained=True),
    "ranges": Recipe(NONE, trained=True),
    "fpt-start": Recipe(),
    "fpt-local": Recipe(local=True),
    "fpt": Recipe(local=True, trained=True),
    # One left out, fitted to the weights; two of them also trained. One alone.
    **{f"no-{name}": Recipe({name: False}, local=True) for name in TRANSFORMS},
    **{f"trained-no-{name}": Recipe({name: False}, local=True, trained=True) for name in ("prerope", "value")},
    **{f"only-{name}": Recipe({**NONE, name: True}, local=True) for name in TRANSFORMS},
}


@torch.no_grad()
def smoothed(model: Any, batches: list[Tensor], alpha: float = 0.5) -> Any:
    """A copy with the spread of activations moved into weights (Xiao et al., 2023, arXiv:2211.10438, Eq. 4), by scales that preserve the function.

    Channel j of a layer's input is divided by max|x_j|^alpha / max|w_j|^(1 - alpha): in the gain of the norm before it, in the value
    projection (one scale for all query heads that share it) or in the up projection.
    """
    host = read_host(model)
    reach = _reach(model, host, batches)
    out = copy.deepcopy(model)
    weights = dict(out.named_parameters())

    def scale(channels: Tensor, readers: list[str]) -> Tensor:
        columns = torch.stack([weights[f"{name}.weight"].abs().amax(0) for name in readers]).amax(0)
        return _ratio(channels, columns, alpha)

    for layer in host.layers:
        for norm, readers in (
            (layer.attention_norm, (layer.q, layer.k, layer.v)),
            (layer.mlp_norm, (layer.gate, layer.up)),
        ):
            by = scale(reach[readers[0]], list(readers))
            gain = weights[f"{norm.name}.weight"]
            gain.copy_((gain + norm.offset) / by - norm.offset)
            for name in readers:
                weights[f"{name}.weight"].mul_(by)
        heads = (layer.kv_heads, layer.heads // layer.kv_heads, layer.value_dim)
        columns = weights[f"{layer.o}.weight"].abs().amax(0).view(heads).amax(1)
        by = (
            _ratio(reach[layer.o].view(heads).amax(1), columns, alpha)
            if layer.free_values
            else torch.ones_like(columns)
        )
        _divide_rows(weights, layer.v, by.flatten())
        weights[f"{layer.o}.weight"].mul_(by[:, None].expand(heads).flatten())
        by = scale(reach[layer.down], [layer.down])
        _divide_rows(weights, layer.up, by)
        weights[f"{layer.down}.weight"].mul_(by)
    return out


def _ratio(channels: Tensor, columns: Tensor, alpha: float) -> Tensor:
    return (channels.clamp_min(1e-5) ** alpha / columns.clamp_min(1e-5) ** (1 - alpha)).clamp_min(1e-5)


def _divide_rows(weights: dict[str, Any], name: str, by: Tensor) -> None:
    weights[f"{name}.weight"].div_(by[:, None])
    if f"{name}.bias" in weights:
        weights[f"{name}.bias"].div_(by)


def _reach(model: Any, host: Host, batches: list[Tensor]) -> dict[str, Tensor]:
    """Largest magnitude of each channel of the inputs of q, o, gate and down projections."""
    reach: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(module: Any, args: tuple[Tensor, ...]) -> None:
            here = args[0].abs().flatten(0, -2).amax(0)
            reach[name] = torch.maximum(reach[name], here) if name in reach else here

        return hook

    handles = []
    try:
        for layer in host.layers:
            for name in (layer.q, layer.o, layer.gate, layer.down):
                handles.append(model.get_submodule(name).register_forward_pre_hook(keep(name)))
        for ids in batches:
            model(ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return reach
