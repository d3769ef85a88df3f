"""Checkpoints of a merged model: plain, or integers in compressed-tensors' format, which transformers and vLLM load."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cameraready.lm.fptquant.quantisers import StaticQuantiser

if TYPE_CHECKING:
    from torch import Tensor, nn

    from cameraready.lm.fptquant.quantizer import FPTQuantizer


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
