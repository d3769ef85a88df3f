"""Rotary scaling of a GGUF file, which transformers' loader leaves out: without it long contexts come out wrong."""

from __future__ import annotations

from typing import Any

from cameraready.models import ModelError
from cameraready.models.gguf.header import Header

#: Its loader reads these itself.
_READ_BY_LOADER = frozenset(("gpt-oss",))


def parameters(header: Header, config: Any) -> dict[str, Any] | None:
    """The configuration's ``rope_parameters`` with the file's scaling; None where there is nothing to add.

    llama.cpp keeps Llama 3's scaling as a tensor of frequency factors; the parameters it was made from are found again
    and must give that tensor.

    Raises
    ------
    ModelError
        If the file scales positions in a way that cannot be put into the configuration.
    """
    architecture = header.architecture
    if architecture in _READ_BY_LOADER:
        return None
    if any(name.startswith("rope_factors_") for name in header.tensors):
        raise _cannot(header, "by factors of its own for long and short contexts")
    base = getattr(config, "rope_parameters", None)
    kind = str(header.metadata.get(f"{architecture}.rope.scaling.type", ""))
    factor = header.metadata.get(
        f"{architecture}.rope.scaling.factor", header.metadata.get(f"{architecture}.rope.scale_linear")
    )
    if "rope_freqs.weight" in header.tensors:
        scaling = _llama3(header, config)
    elif kind == "none" or factor is None or float(factor) in (0.0, 1.0):
        return None
    elif kind in ("", "linear"):
        scaling = {"rope_type": "linear", "factor": float(factor)}
    elif kind == "yarn":
        original = header.metadata.get(f"{architecture}.rope.scaling.original_context_length")
        scaling = {"rope_type": "yarn", "factor": float(factor)}
        if original is not None:
            scaling["original_max_position_embeddings"] = int(original)
    else:
        raise _cannot(header, f"as {kind!r}")
    if scaling is None:
        return None
    if not isinstance(base, dict):
        raise _cannot(header, f"as {scaling['rope_type']!r}, which its configuration has no place for")
    if "full_attention" in base:  # Gemma 3 scales its full-attention layers alone
        return {**base, "full_attention": {**base["full_attention"], **scaling}}
    return {**base, **scaling}


def _llama3(header: Header, config: Any) -> dict[str, Any] | None:
    import numpy as np

    tensor = header.tensors["rope_freqs.weight"]
    if tensor.kind != "F32":
        raise _cannot(header, f"by a tensor of type {tensor.kind}")
    with header.path.open("rb") as file:
        file.seek(tensor.start)
        factors = np.frombuffer(file.read(tensor.n_bytes), np.float32).astype(np.float64)
    if np.allclose(factors, 1.0):
        return None
    theta = float(config.rope_parameters["rope_theta"])
    frequencies = theta ** (-np.arange(len(factors)) / len(factors))
    for original in (8192, 4096, 16384, 32768):
        scaling = {
            "rope_type": "llama3",
            "factor": round(float(factors.max()), 5),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": original,
        }
        if np.allclose(factors, _llama3_factors(frequencies, scaling), rtol=1e-3):
            return scaling
    raise _cannot(header, "by a tensor of frequency factors that are not Llama 3's")


def _llama3_factors(frequencies: Any, scaling: dict[str, Any]) -> Any:
    """What each frequency is divided by (Grattafiori et al., 2024, arXiv:2407.21783, as transformers computes it)."""
    import numpy as np

    waves = 2 * np.pi / frequencies
    original, low, high = (
        scaling[name] for name in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    smooth = np.clip((original / waves - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / scaling["factor"] + smooth)


def _cannot(header: Header, how: str) -> ModelError:
    return ModelError(
        f"{header.path} scales its positions {how}, which cannot be converted faithfully; open the model's safetensors from its "
        "hub id instead (hf:OWNER/NAME)."
    )
