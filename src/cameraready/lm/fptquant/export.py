"""Checkpoints of a merged model: plain, or integers in compressed-tensors' format, which transformers and vLLM load."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cameraready.lm.fptquant.merging import FPTConfig, Read
from cameraready.lm.fptquant.quantisers import StaticQuantiser
from cameraready.lm.fptquant.simulation import untie

if TYPE_CHECKING:
    from torch import Tensor, nn

    from cameraready.lm.fptquant.quantizer import FPTQuantizer


def refuse_online(config: FPTConfig, what: str) -> None:
    """Raise ValueError if a transform is on that cannot be `what` ("merged into a plain transformers model")."""
    online = [name for name in ("residual_scale", "down_hadamard", "qk_hadamard") if getattr(config, name)]
    if online:
        raise ValueError(
            f"{' and '.join(online)} cannot be {what}: such transforms run with the model at every token and a plain checkpoint has no place "
            "for them. Use FPTConfig.mergeable(), or run FPTQuantizer.model"
        )


def merged(fpt: FPTQuantizer, dtype: torch.dtype | None) -> Any:
    """See `FPTQuantizer.merge`."""
    plain: Any = copy.deepcopy(fpt.given)
    if fpt.config.rotate:
        untie(plain, fpt.host)
    plain = plain.to(next(fpt.given.parameters()).dtype if dtype is None else dtype)
    target = dict(plain.named_parameters(remove_duplicate=False))
    norms = [fpt.host.final_norm]
    for layer in fpt.host.layers:
        norms += [n for n in (layer.attention_norm, layer.mlp_norm, layer.q_norm, layer.k_norm) if n is not None]
    offsets = {f"{norm.name}.weight": norm.offset for norm in norms}
    for name, value in fpt.transforms.merged(Read(fpt.given, torch.float64)):
        target[name].copy_(value - offsets.get(name, 0.0))
    return plain.eval()


def write(fpt: FPTQuantizer, folder: str | Path, format: str, without: Sequence[str]) -> Path:
    """See `FPTQuantizer.export`."""
    folder = Path(folder)
    if format == "plain":
        fpt.merge().save_pretrained(folder)
        return folder
    if format != "compressed-tensors":
        raise ValueError(f"format must be 'plain' or 'compressed-tensors', got {format!r}")
    quantisation = fpt.quantisation
    if quantisation is None:
        raise RuntimeError("calibrate(batches, config) comes before an export of integers: there are no ranges yet")
    for part, bits in (("kv", quantisation.kv), ("residual", quantisation.residual)):
        if bits is not None and part not in without:
            where = {"kv": "ranges of the cache a head", "residual": "ranges of the residual stream"}[part]
            raise ValueError(
                f"a compressed-tensors checkpoint that transformers loads has no place for {where}; calibrate with {part}=None, or pass "
                f"without=({part!r},) to write the rest"
            )
    if quantisation.weights is None or quantisation.weights > 8:
        raise ValueError("compressed-tensors holds integer weights of at most 8 bits; calibrate with weights=4, say")
    try:
        import compressed_tensors  # noqa: F401
    except ImportError:
        raise ImportError("pip install compressed-tensors, to write checkpoints in its format") from None
    plain = fpt.merge()
    _compress(fpt, plain, folder)
    return folder


def _compress(fpt: FPTQuantizer, plain: Any, folder: Path) -> None:
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )

    given = fpt.quantisation
    assert given is not None
    weights = QuantizationArgs(num_bits=given.weights, type="int", symmetric=True, strategy="channel")
    inputs = None
    if given.activations is not None and given.dynamic:
        inputs = QuantizationArgs(
            num_bits=given.activations, type="int", symmetric=given.symmetric, strategy="token", dynamic=True
        )
    elif given.activations is not None:
        inputs = QuantizationArgs(
            num_bits=given.activations, type="int", symmetric=given.symmetric, strategy="tensor", dynamic=False
        )
    linears = _linears(fpt)
    scheme = QuantizationScheme(targets=list(linears), weights=weights, input_activations=inputs)
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=[fpt.host.head])
    apply_quantization_config(plain, config, show_progress=False)
    for name, (linear, quantiser) in linears.items():
        target = plain.get_submodule(name)
        scale = linear.weight_quantiser.log_scale.exp()
        _set(target, "weight_scale", scale[:, None])
        if isinstance(quantiser, StaticQuantiser):
            _set(target, "input_scale", quantiser.log_scale.exp())
            if quantiser.zero is not None:
                # compressed-tensors counts from -2^(bits-1), we from 0.
                _set(target, "input_zero_point", quantiser.zero.round() - (1 << (quantiser.bits - 1)))
    compressor = ModelCompressor.from_pretrained_model(plain)
    compressor.compress_model(plain)
    compressor.remove_decompression_hook(plain)
    plain.save_pretrained(folder)
    compressor.update_config(str(folder))


def _set(module: nn.Module, name: str, value: Tensor) -> None:
    parameter = getattr(module, name)
    parameter.data = value.detach().to(parameter.dtype).reshape(parameter.shape)


def _linears(fpt: FPTQuantizer) -> dict[str, tuple[Any, Any]]:
    """Each quantised projection with the quantiser of its input."""
    found: dict[str, tuple[Any, Any]] = {}
    for plan in fpt.host.layers:
        norms = {
            **dict.fromkeys((plan.q, plan.k, plan.v), plan.attention_norm),
            **dict.fromkeys((plan.gate, plan.up), plan.mlp_norm),
        }
        for name in (plan.q, plan.k, plan.v, plan.o, plan.gate, plan.up, plan.down):
            linear: Any = fpt.model.get_submodule(name)
            norm: Any = fpt.model.get_submodule(norms[name].name) if name in norms else None
            found[name] = (linear, linear.input_quantiser if norm is None else norm.output_quantiser)
    return found
