"""GGUF files: checked before anything trusts them, and converted once to a safetensors folder.

Weights are dequantised by transformers' own loader to float32 (exact: every value that a block of a quantised tensor can
take is a float32), and kept under the SHA-256 of the file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from cameraready.models import ModelError, _cache
from cameraready.models.gguf import rope
from cameraready.models.gguf.header import Header, read_header

#: transformers' names of architectures whose GGUF name differs.
_RENAMED = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss", "minimax-m2": "minimax_m2"}
#: What its loader lists beside decoder-only models.
_NOT_MODELS = frozenset(("general", "tokenizer", "t5", "umt5"))


def check_supported(header: Header) -> None:
    """Raise a ModelError if transformers cannot make a decoder-only model of this file."""
    metadata, path = header.metadata, header.path
    if not header.architecture:
        raise ModelError(f"{path} does not say its architecture (general.architecture); it holds no language model.")
    kind = metadata.get("general.type", "model")
    if kind != "model":
        raise ModelError(f"{path} holds a {kind!r}, not a whole model; open the model itself.")
    if int(metadata.get("split.count", 0)) > 1:
        raise ModelError(
            f"{path} is one of {metadata['split.count']} parts of a model; join them first: "
            "llama-gguf-split --merge FIRST-PART WHOLE.gguf."
        )
    blocks = metadata.get(f"{header.architecture}.block_count")
    behind = [name for name in header.tensors if isinstance(blocks, int) and _block(name) >= blocks]
    if behind:
        raise ModelError(
            f"{path} says it has {blocks} blocks and holds weights of more ({behind[0]}); without them it would compute something "
            "else. Its metadata do not belong to these weights."
        )
    supported = supported_architectures()
    if header.architecture not in supported:
        raise ModelError(
            f"{path} holds a model of architecture {header.architecture!r}, which transformers cannot read from GGUF; "
            f"it reads {', '.join(supported)}. Open the model's safetensors from its hub id instead (hf:OWNER/NAME)."
        )


def _block(name: str) -> int:
    """Number of the block that a tensor belongs to; -1 of one outside of all."""
    found = re.match(r"blk\.(\d+)\.", name)
    return -1 if found is None else int(found.group(1))


def supported_architectures() -> list[str]:
    """GGUF names of the decoder-only architectures that the installed transformers reads."""
    needs_extra()
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    names = {theirs: ours for ours, theirs in _RENAMED.items()}
    return sorted(names.get(name, name) for name in GGUF_SUPPORTED_ARCHITECTURES if name not in _NOT_MODELS)


def needs_extra() -> None:
    """Raise a ModelError, one line, if a package of the extra ``lm`` is missing."""
    from importlib.util import find_spec

    missing = [name for name in ("torch", "transformers", "gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise ModelError(f'GGUF files need {" and ".join(missing)}: pip install "cameraready[lm]"')


def converted(path: str | Path) -> tuple[Path, str]:
    """The safetensors folder made from a GGUF file, and the file's SHA-256; converted when first asked for.

    Returns
    -------
    (Path, str)
        A folder with ``config.json``, float32 ``model*.safetensors``, generation configuration, tokenizer and chat
        template, under `models_folder`; one a content, whatever the file is called and wherever it lies.
    """
    needs_extra()
    header = read_header(path)
    check_supported(header)
    digest = _cache.sha256_of(header.path)
    return _cache.entry(folder_of(digest), source=digest, build=lambda made: _convert(header, made)), digest


def already_converted(digest: str) -> Path | None:
    """The whole safetensors folder made from the GGUF of this SHA-256, if there is one."""
    folder = folder_of(digest)
    return folder if _cache.holds(folder, digest) else None


def folder_of(digest: str) -> Path:
    """Where the conversion of the GGUF of this SHA-256 belongs."""
    return _cache.models_folder() / "converted" / digest[:32]


def _convert(header: Header, folder: Path) -> dict[str, Any]:
    import torch
    import transformers

    from cameraready.models._loading import check_unused, quietly

    path = header.path.resolve()
    loader: Any = transformers.AutoModelForCausalLM
    try:
        with quietly():
            model, loading = loader.from_pretrained(
                path.parent, gguf_file=path.name, dtype=torch.float32, output_loading_info=True
            )
            tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except NotImplementedError as error:
        raise ModelError(f"{header.path} stores weights in a form that cannot be read: {error}.") from error
    except (ValueError, KeyError, IndexError, RuntimeError, TypeError, AttributeError, OSError) as error:
        if isinstance(error, OSError) and error.strerror:
            raise
        raise ModelError(
            f"transformers could not read {header.path} ({type(error).__name__}: {str(error).strip()[:300]}). The header is "
            "sound, so either its metadata is incomplete or this kind of model needs a newer transformers."
        ) from error
    _check_complete(header, model, loading)
    check_unused(loading, str(header.path))
    if (rotary := rope.parameters(header, model.config)) is not None:
        model.config.rope_parameters = rotary
    for stale in ("quantization_config", "_model_name_or_path"):  # of the file; the weights are plain now
        if hasattr(model.config, stale):
            delattr(model.config, stale)
    model.hf_quantizer = None
    with quietly():
        model.save_pretrained(folder, safe_serialization=True)
        tokenizer.save_pretrained(folder)
    return {
        "made_from": header.path.name,
        "architecture": header.architecture,
        "title": str(header.metadata.get("general.name", "")),
        "kinds": sorted({tensor.kind for tensor in header.tensors.values()}),
        "transformers": transformers.__version__,
    }


def _check_complete(header: Header, model: Any, loading: dict[str, Any]) -> None:
    import torch

    missing = sorted(loading.get("missing_keys", ()))
    if missing:
        raise ModelError(
            f"{header.path} lacks {len(missing)} of the weights its architecture needs, among them {missing[0]}; it is "
            "incomplete."
        )
    wrong = [name for name, weight in model.state_dict().items() if not bool(torch.isfinite(weight).all())]
    if wrong:
        raise ModelError(
            f"{header.path} holds weights that are not finite numbers ({len(wrong)} tensors, among them {wrong[0]}); the file "
            "is damaged. Get it again."
        )
