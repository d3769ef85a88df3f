"""What running a language model takes, told from its configuration alone: memory, hours, downloads.

No weight is read or downloaded. Parameters are counted on a model without storage (PyTorch's meta device), so they are exact;
cache and arithmetic follow from the configuration; hours rest on a stated machine and are an estimate within a factor of about
three.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cameraready.amounts import memory, weights
from cameraready.models import ModelError, _loading, gguf, packaged

GIB = 1 << 30


@dataclass(frozen=True)
class Machine:
    """What hours are reckoned with.

    Attributes
    ----------
    title : str
    flops : float
        Floating-point operations a second that are sustained in 16-bit arithmetic.
    flops_32 : float
        The same in 32-bit arithmetic.
    bandwidth : float
        Bytes of weights and cache a second that are sustained when one token at a time is decoded.
    """

    title: str
    flops: float
    flops_32: float
    bandwidth: float


@dataclass(frozen=True)
class Size:
    """A model's numbers.

    Attributes
    ----------
    parameters : int
        All of them; tied ones once.
    active : int
        Those a token is multiplied with: without tables that are looked up (embeddings) and experts not
        chosen; with the head.
    """

    parameters: int
    active: int


@dataclass(frozen=True)
class Cost:
    """What a run takes.

    Attributes
    ----------
    hours : float
        On the machine that `notes` name.
    memory_gib : float
        Weights, cache and activations together, in GiB of 2**30 bytes.
    downloads : tuple of str
        What would be downloaded first, each a sentence with its size.
    notes : tuple of str
        What was assumed.
    parameters : int
    weights_gib, cache_gib, activation_gib : float
    flops : float
        Floating-point operations of all passes.
    """

    hours: float
    memory_gib: float
    downloads: tuple[str, ...]
    notes: tuple[str, ...]
    parameters: int
    weights_gib: float
    cache_gib: float
    activation_gib: float
    flops: float


def machine_of(device: str) -> Machine:
    """The machine that hours are reckoned with: this one's cores for ``"cpu"``, one A100 for ``"cuda"``."""
    if device.partition(":")[0] == "cuda":
        # 312 TFLOP/s in bfloat16, 19.5 in float32 and 2.04 TB/s by its data sheet.
        title = "one NVIDIA A100 80 GB at 40 % of its arithmetic and 60 % of its bandwidth"
        return Machine(title, 0.4 * 312e12, 0.4 * 19.5e12, 0.6 * 2.04e12)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    title = f"this machine's {cores} cores at 25 GFLOP/s each and 8 GB/s together"
    return Machine(title, cores * 25e9, cores * 25e9, 8e9)


def cost_of(
    name: Any,
    *,
    prompt_tokens: int,
    new_tokens: int = 0,
    batch: int = 1,
    passes: int = 1,
    device: str = "cpu",
    dtype: Any = None,
    revision: str | None = None,
    machine: Machine | None = None,
) -> Cost:
    """What `passes` runs of a prompt and an answer take, without opening the model.

    Parameters
    ----------
    name : str, path, configuration, (model, tokenizer) or LanguageModel
        As for `cameraready.models.open_model`; of a folder ``config.json`` is enough, of a GGUF its header, of a hub id the
        configuration (a few kB, downloaded if need be). Or a configuration of transformers.
    prompt_tokens, new_tokens : int
        Tokens read, and then written one after the other, by each sequence.
    batch : int, optional
        Sequences at a time.
    passes : int, optional
        Batches in all.
    device : str, optional
        ``"cpu"`` or ``"cuda"``.
    dtype : str or torch.dtype, optional
        Of weights, cache and activations; as `open_model` would choose by default.
    machine : Machine, optional
        Instead of that of `machine_of`.

    Returns
    -------
    Cost

    Raises
    ------
    ModelError
        If the configuration cannot be had or is of no causal language model, or a number is out of range.
    """
    if str(device).partition(":")[0] not in ("cpu", "cuda"):
        raise ModelError(
            f"device={device!r}: a cost is told for cpu or cuda; give another machine as machine=Machine(...)."
        )
    numbers = {"prompt_tokens": prompt_tokens, "new_tokens": new_tokens, "batch": batch, "passes": passes}
    for label, number in numbers.items():
        least = 0 if label == "new_tokens" else 1
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise ModelError(f"{label}={number!r} must be a whole number, at least {least}.")
    config = config_of(name, revision=revision)
    text = config.get_text_config()
    width = _width(config, dtype, device)
    size = size_of(config)
    tokens = prompt_tokens + new_tokens
    held, cache = size.parameters * width, cache_bytes(config, tokens=tokens, batch=batch, width=width)
    activations = activation_bytes(config, tokens=prompt_tokens, batch=batch, width=width)
    machine = machine or machine_of(device)
    rate = machine.flops if width < 4 else machine.flops_32
    prefill = batch * forward_flops(config, size, start=0, end=prompt_tokens)
    decode = batch * forward_flops(config, size, start=prompt_tokens, end=tokens)
    # Every step reads the cache once, and of the weights those that its tokens are multiplied with.
    read = width * min(size.parameters, size.active * batch)
    reading = new_tokens * (read + cache) / machine.bandwidth
    seconds = passes * (prefill / rate + max(decode / rate, reading))
    notes = [
        f"hours on {machine.title}, {8 * width}-bit arithmetic: an estimate within a factor of about three",
        f"memory of weights, a cache of {tokens:,} tokens for {batch} sequence{'s' * (batch > 1)}, and one layer's activations with "
        "logits at every place; without a T x T attention matrix, as scaled-dot-product kernels work",
    ]
    limit = _loading.context_of(config)
    if limit is not None and tokens > limit:
        notes.append(f"{tokens:,} tokens are more than the {limit:,} the model was made for")
    if getattr(text, "num_experts_per_tok", None):
        notes.append(f"a token is multiplied with {weights(size.active)} of the {weights(size.parameters)} parameters")
    return Cost(
        hours=seconds / 3600,
        memory_gib=(held + cache + activations) / GIB,
        downloads=_downloads(name, config, size, revision),
        notes=tuple(notes),
        parameters=size.parameters,
        weights_gib=held / GIB,
        cache_gib=cache / GIB,
        activation_gib=activations / GIB,
        flops=float(passes * (prefill + decode)),
    )


def config_of(name: Any, *, revision: str | None = None) -> Any:
    """The configuration of what `open_model` would open, without its weights."""
    _loading.needs_extra()
    import transformers

    if isinstance(name, transformers.PreTrainedConfig):
        return name
    if isinstance(name, tuple) and name:
        name = name[0]
    model = getattr(name, "model", name)
    if isinstance(config := getattr(model, "config", None), transformers.PreTrainedConfig):
        return config
    if not isinstance(name, str | os.PathLike):
        raise TypeError(
            f"A model is named by a text or path, or given with its configuration; {type(name).__name__} is none of these."
        )
    text = os.fspath(name)
    if not text.strip():
        raise ModelError("The name of a model is empty; give a hub id (hf:OWNER/NAME), a folder or a .gguf file.")
    if text in packaged.MODELS:
        text = str(packaged.found_at(text))
    path = Path(text.removeprefix("hf:")).expanduser()
    if not text.startswith("hf:") and os.path.isdir(path):
        return _config_at(str(path), text)
    if not text.startswith("hf:") and (os.path.isfile(path) or (text.endswith(".gguf") and len(path.name) < 256)):
        return _config_of_gguf(path)
    identifier, _, written = text.removeprefix("hf:").partition("@")
    if not _loading.looks_like_an_id(identifier, owner=not text.startswith("hf:")):
        raise ModelError(
            f"There is no model {text!r}: it is no folder, no .gguf file, no packaged model and no hub id (hf:OWNER/NAME)."
        )
    return _config_at(identifier, text, written or revision)


def size_of(config: Any) -> Size:
    """Parameters of the model of a configuration, counted without storage for them."""
    import torch
    import transformers

    try:
        with torch.device("meta"):
            model: Any = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:
        raise _loading.explained(error, str(getattr(config, "model_type", "the configuration"))) from error
    text = config.get_text_config()
    counts = {name: parameter.numel() for name, parameter in model.named_parameters()}  # a tied one comes once
    total = sum(counts.values())
    head = model.get_output_embeddings()
    tables = [module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    active = total - sum(table.numel() for table in tables if head is None or table is not head.weight)
    chosen = getattr(text, "num_experts_per_tok", None)
    labels = ("num_local_experts", "num_experts", "n_routed_experts")
    n_experts = next((n for label in labels if (n := getattr(text, label, None))), None)
    if chosen and n_experts:
        experts = sum(count for name, count in counts.items() if ".experts." in name)
        active -= round(experts * (1 - chosen / n_experts))
    return Size(total, active)


def cache_bytes(config: Any, *, tokens: int, batch: int, width: int) -> int:
    """Bytes of keys and values: grouped queries, head sizes and sliding windows as the configuration has them.

    A layer with a sliding window keeps the last ``window - 1`` tokens, as transformers' `DynamicCache` does.
    """
    return batch * width * sum(kept * keys_and_values for kept, keys_and_values in _layers(config, tokens))


def activation_bytes(config: Any, *, tokens: int, batch: int, width: int) -> int:
    """Bytes that a forward pass without gradients holds at its widest: the stream and one block's inside, or the logits.

    An estimate: kernels keep scratch of their own.
    """
    text = config.get_text_config()
    hidden = _number(text, "hidden_size", "n_embd", "d_model")
    inside = _number(text, "intermediate_size", "n_inner", "ffn_dim", "d_ff", default=0) or 4 * hidden
    block = 2 * hidden + max(
        3 * inside, 2 * hidden + 3 * _number(text, "num_attention_heads", "n_head", "num_heads") * _head_dim(text)
    )
    return batch * tokens * width * (hidden + max(block, text.vocab_size))


def forward_flops(config: Any, size: Size, *, start: int, end: int) -> int:
    """Floating-point operations of the tokens from `start` to `end` of one sequence, earlier ones being cached.

    Two for each parameter that a token meets, the head included at every place, and four for each pair of a token and a place
    it attends to, head and channel. Norms, activations and rotary embeddings are left out.
    """
    text = config.get_text_config()
    channels = _number(text, "num_attention_heads", "n_head", "num_heads") * _head_dim(text)
    pairs = 0
    for window in _windows(config):
        if window == 0:  # a layer without attention
            continue
        pairs += _attended(end, window) - _attended(start, window)
    return 2 * size.active * (end - start) + 4 * channels * pairs


def _attended(tokens: int, window: float) -> int:
    """Places that the first `tokens` tokens attend to in all, themselves among them."""
    short = int(min(tokens, window))
    return short * (short + 1) // 2 + (tokens - short) * short


def _layers(config: Any, tokens: int) -> list[tuple[int, int]]:
    """Of each layer with a cache of its own the tokens kept and numbers a token."""
    text = config.get_text_config()
    heads = _number(text, "num_attention_heads", "n_head", "num_heads")
    kv_heads = _number(text, "num_key_value_heads", default=heads)
    if getattr(text, "multi_query", False):
        kv_heads = 1
    per_token = 2 * kv_heads * _head_dim(text)
    if getattr(text, "kv_lora_rank", None):  # latent attention; transformers keeps keys and values written out
        per_token = heads * (text.qk_nope_head_dim + text.qk_rope_head_dim + text.v_head_dim)
    windows = _windows(config)
    windows = windows[: len(windows) - int(getattr(text, "num_kv_shared_layers", 0) or 0)]
    return [(int(tokens if math.isinf(window) else min(tokens, max(window - 1, 0))), per_token) for window in windows]


def _windows(config: Any) -> list[float]:
    """Of each layer how far it sees: infinity for full attention, 0 for none."""
    text = config.get_text_config()
    n_layers = _number(text, "num_hidden_layers", "n_layer", "num_layers")
    window = getattr(text, "sliding_window", None)
    chunk = getattr(text, "attention_chunk_size", None)
    kinds = getattr(text, "layer_types", None)
    if kinds is None:
        sliding = window is not None and getattr(text, "use_sliding_window", True)
        kinds = ["sliding_attention" if sliding else "full_attention"] * n_layers
    reach = {
        "full_attention": math.inf,
        "sliding_attention": window or math.inf,
        "chunked_attention": chunk or math.inf,
    }
    return [reach.get(kind, 0.0 if "attention" not in kind or "linear" in kind else math.inf) for kind in kinds]


def _head_dim(text: Any) -> int:
    heads = _number(text, "num_attention_heads", "n_head", "num_heads")
    hidden = _number(text, "hidden_size", "n_embd", "d_model")
    return int(getattr(text, "head_dim", None) or hidden // heads)


def _number(text: Any, *names: str, default: int | None = None) -> int:
    for name in names:
        if isinstance(found := getattr(text, name, None), int):
            return found
    if default is None:
        raise ModelError(
            f"The configuration ({getattr(text, 'model_type', '?')}) does not say its {names[0]}; its cost cannot be told."
        )
    return default


def _width(config: Any, dtype: Any, device: str) -> int:
    import torch

    chosen = _loading.dtype_of(dtype)
    if chosen is None:
        chosen = torch.float32 if device.partition(":")[0] == "cpu" else _own_dtype(config)
    return int(chosen.itemsize)


def _own_dtype(config: Any) -> Any:
    import torch

    found = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    return _loading.dtype_of(found) or torch.float32


def _config_at(where: str, name: str, revision: str | None = None) -> Any:
    import transformers

    options = {} if Path(where).is_dir() else _loading.hub_options(revision)
    try:
        return transformers.AutoConfig.from_pretrained(where, trust_remote_code=False, **options)
    except Exception as error:
        told = _loading.explained(error, name)
        if "cannot be reached" in str(told):
            told = ModelError(
                f"{told} To tell the cost no weights are needed: a folder with the model's config.json alone is enough."
            )
        raise told from error


def _config_of_gguf(path: Path) -> Any:
    import transformers

    gguf.needs_extra()
    header = gguf.read_header(path)
    gguf.check_supported(header)
    path = header.path.resolve()
    try:
        config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as error:
        raise _loading.explained(error, str(header.path)) from error
    if hasattr(config, "quantization_config"):  # it is opened with plain weights
        del config.quantization_config
    return config


def _downloads(name: Any, config: Any, size: Size, revision: str | None) -> tuple[str, ...]:
    """What `open_model` would fetch from the hub; nothing for what lies on this machine."""
    if not isinstance(name, str) or name in packaged.MODELS:
        return ()
    if not name.startswith("hf:") and Path(name).expanduser().exists():
        return ()
    from huggingface_hub import try_to_load_from_cache

    identifier, _, written = name.removeprefix("hf:").partition("@")
    for file in ("model.safetensors", "model.safetensors.index.json"):
        if isinstance(try_to_load_from_cache(identifier, file, revision=written or revision), str):
            return ()
    return (f"{identifier} from the Hugging Face hub, about {memory(size.parameters * _own_dtype(config).itemsize)}",)
