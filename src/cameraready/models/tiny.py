"""Tiny random language models and a byte-level tokenizer, made in code: what tests and examples run on without a network."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

#: Kinds of model that `tiny_model` makes.
TINY_KINDS = (
    "llama",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "mistral",
    "phi3",
    "gpt_neox",
    "gpt2",
    "olmo2",
    "granite",
    "cohere",
    "glm",
)

_PAD, _BOS, _EOS = "<|pad|>", "<|bos|>", "<|eos|>"
_ROLES = ("<|system|>", "<|user|>", "<|assistant|>")

_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

#: Number of tokens of `tiny_tokenizer`: 256 bytes, then padding, begin, end and three roles.
TINY_VOCABULARY = 256 + 3 + len(_ROLES)


def tiny_tokenizer(
    *, pad: bool = True, bos: bool = True, eos: bool = True, chat_template: bool = True, max_positions: int = 1024
) -> PreTrainedTokenizerFast:
    """A tokenizer with one token for each byte, so that any text makes an exact round trip.

    The token of byte b has the id b; ids 256, 257 and 258 are padding, begin and end, and 259 to 261 the chat roles.
    ``tokenizer(text)`` puts the begin token first, as Llama's does.

    Parameters
    ----------
    pad, bos, eos : bool
        Whether the tokenizer declares a padding, begin or end token. Without one the id stays reserved, so that models and
        tokenizers of one size go together; only the declaration is missing.
    chat_template : bool
        Whether there is a chat template.
    max_positions : int
        ``model_max_length``, in tokens.

    Returns
    -------
    transformers.PreTrainedTokenizerFast
        Pads on the left, as generation needs.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {character: byte for byte, character in enumerate(_characters_of_bytes())}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=False))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in (_PAD, _BOS, _EOS, *_ROLES)])
    if bos:
        core.post_processor = processors.TemplateProcessing(
            single=f"{_BOS} $A", pair=f"{_BOS} $A {_BOS} $B", special_tokens=[(_BOS, core.token_to_id(_BOS))]
        )
    declared = {
        "pad_token": _PAD if pad else None,
        "bos_token": _BOS if bos else None,
        "eos_token": _EOS if eos else None,
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        **{name: text for name, text in declared.items() if text is not None},
        chat_template=_CHAT_TEMPLATE if chat_template else None,
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        model_max_length=max_positions,
    )


def _characters_of_bytes() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary, in the order of the bytes."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    characters, shifted = [], 0
    for byte in range(256):
        if byte in printable:
            characters.append(chr(byte))
        else:
            characters.append(chr(256 + shifted))
            shifted += 1
    return characters


def tiny_model(
    kind: str = "llama",
    *,
    seed: int = 0,
    n_layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    vocab: int | None = None,
    head_dim: int | None = None,
    intermediate: int | None = None,
    sliding_window: int | None = None,
    tie: bool | None = None,
    attention_bias: bool | None = None,
    max_positions: int = 1024,
    scale: float = 2.0,
    attention: str | None = None,
    dtype: torch.dtype | None = None,
) -> PreTrainedModel:
    """A causal language model of a known family with few, random weights, in evaluation mode.

    Weights depend on the arguments alone; the global random state is neither read nor changed. Their sizes are those of
    trained networks rather than of fresh ones: attention prefers some positions, logits have a standard deviation near 2.

    Parameters
    ----------
    kind : str
        One of ``TINY_KINDS``. ``phi3`` and ``gpt_neox`` have fused projections, ``gpt2`` no rotary positions, ``cohere`` and
        ``glm`` interleaved rotary pairs, ``gemma2`` soft-capped logits, ``olmo2`` norms behind its blocks.
    seed : int
        Seed of the weights.
    n_layers, hidden, heads, kv_heads : int
        Numbers of layers, features, query heads and key-value heads. ``gpt_neox`` and ``gpt2`` have as many key-value heads as
        heads, whatever `kv_heads` says.
    vocab : int, optional
        Number of tokens; `tiny_tokenizer`'s by default, whose special tokens are then the model's.
    head_dim : int, optional
        Features of a head; ``hidden // heads`` by default.
    intermediate : int, optional
        Features inside the MLP; ``2 * hidden`` by default.
    sliding_window : int, optional
        Width of the attention window in tokens, where the family has one: on all layers (``mistral``, ``phi3``), on the first
        half of them (``qwen2``, ``qwen3``) or on every second (``gemma2``, ``gemma3``, which have one of 8 tokens by default).
    tie : bool, optional
        Whether head and embedding share their weights; the family's habit by default.
    attention_bias : bool, optional
        Biases in the attention's projections; the family's habit by default. ``qwen2``, ``mistral``, ``phi3`` and ``gpt2``
        have no such choice.
    max_positions : int
        Longest sequence in tokens.
    scale : float
        Standard deviation of the attention logits before the softmax, roughly. 0 gives uniform attention.
    attention : str, optional
        transformers' ``attn_implementation``; ``"sdpa"`` by default, ``"eager"`` for ``gemma2``, whose soft-cap the former
        leaves out.
    dtype : torch.dtype, optional
        ``torch.float32`` by default.

    Returns
    -------
    transformers.PreTrainedModel
        With a head, in evaluation mode, on the CPU.

    Raises
    ------
    ValueError
        For an unknown kind, sizes that do not divide, or an option that the family does not have.
    """
    import torch

    config = _config(
        kind,
        n_layers=n_layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        vocab=TINY_VOCABULARY if vocab is None else vocab,
        head_dim=head_dim,
        intermediate=2 * hidden if intermediate is None else intermediate,
        sliding_window=sliding_window,
        tie=tie,
        attention_bias=attention_bias,
        max_positions=max_positions,
    )
    from transformers import AutoModelForCausalLM

    if attention is None:
        attention = "eager" if kind == "gemma2" else "sdpa"
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    _fill(model, seed=seed, scale=scale)
    if dtype is not None:
        _cast(model, dtype)
    return model.eval()


def _config(kind: str, *, vocab: int, **sizes: Any) -> Any:
    from transformers import AutoConfig

    if kind not in TINY_KINDS:
        raise ValueError(f"There is no tiny model of the kind {kind!r}; there are {', '.join(TINY_KINDS)}.")
    heads, kv_heads, hidden = sizes["heads"], sizes["kv_heads"], sizes["hidden"]
    if hidden % heads and sizes["head_dim"] is None:
        raise ValueError(f"{hidden} features do not divide into {heads} heads; choose `head_dim` or other sizes.")
    if kind not in ("gpt_neox", "gpt2") and heads % kv_heads:
        raise ValueError(f"{heads} query heads do not divide among {kv_heads} key-value heads.")
    specials = (256, 257, 258) if vocab >= TINY_VOCABULARY else (None, None, None)
    common: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": sizes["n_layers"],
        "num_attention_heads": heads,
        "max_position_embeddings": sizes["max_positions"],
        "pad_token_id": specials[0],
        "bos_token_id": specials[1],
        "eos_token_id": specials[2],
    }
    if kind != "gpt2":
        common["intermediate_size"] = sizes["intermediate"]
    if kind not in ("gpt2", "gpt_neox"):
        common["num_key_value_heads"] = kv_heads
    if sizes["tie"] is not None:
        common["tie_word_embeddings"] = sizes["tie"]
    return AutoConfig.for_model("gemma3_text" if kind == "gemma3" else kind, **common, **_family(kind, **sizes))


def _family(
    kind: str,
    *,
    n_layers: int,
    hidden: int,
    heads: int,
    head_dim: int | None,
    intermediate: int,
    sliding_window: int | None,
    attention_bias: bool | None,
    **_others: Any,
) -> dict[str, Any]:
    """What a family's configuration says beyond the sizes that all have."""
    options: dict[str, Any] = {}
    if kind in ("gpt2", "gpt_neox", "olmo2", "cohere", "phi3", "granite"):
        if head_dim is not None and head_dim * heads != hidden:
            raise ValueError(f"{kind} divides its features evenly among its heads: head_dim must be {hidden // heads}.")
    else:
        options["head_dim"] = hidden // heads if head_dim is None else head_dim
    if attention_bias is not None:
        if kind in ("qwen2", "mistral", "phi3", "gpt2"):
            raise ValueError(f"{kind} has no choice of attention biases; leave `attention_bias` out.")
        options["attention_bias"] = attention_bias
    windowed = ("mistral", "phi3", "qwen2", "qwen3", "gemma2", "gemma3")
    if sliding_window is not None and kind not in windowed:
        raise ValueError(f"{kind} has no sliding window; {', '.join(windowed)} have.")
    if kind in ("mistral", "phi3"):
        options["sliding_window"] = sliding_window
    elif kind in ("qwen2", "qwen3"):
        options["use_sliding_window"] = sliding_window is not None
        options["sliding_window"] = sliding_window
        local = 0 if sliding_window is None else (n_layers + 1) // 2
        options["layer_types"] = ["sliding_attention"] * local + ["full_attention"] * (n_layers - local)
    elif kind in ("gemma2", "gemma3"):
        options["sliding_window"] = 8 if sliding_window is None else sliding_window
        options["layer_types"] = ["full_attention" if i % 2 else "sliding_attention" for i in range(n_layers)]
        options["query_pre_attn_scalar"] = options["head_dim"]
    if kind == "gemma2":
        options |= {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 4.0}
    elif kind == "gpt_neox":
        options["rotary_pct"] = 0.5
    elif kind == "gpt2":
        options |= {"n_inner": intermediate, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    elif kind == "granite":
        options |= {"logits_scaling": 1.5, "residual_multiplier": 0.7, "embedding_multiplier": 3.0}
        options["attention_multiplier"] = 0.8 / math.sqrt(hidden // heads)
    elif kind == "cohere":
        options |= {"logit_scale": 0.6, "use_qk_norm": False}
    elif kind == "glm":
        options["partial_rotary_factor"] = 0.5
    return options


def _fill(model: PreTrainedModel, *, seed: int, scale: float) -> None:
    """Weights of the sizes that trained networks have, from a generator of their own."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim < 2:  # norms keep their centre (0 or 1), biases theirs
                parameter.add_(0.1 * noise)
                continue
            transposed = name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight"))  # GPT-2's Conv1D
            parameter.copy_(noise / math.sqrt(parameter.shape[0 if transposed else -1]))
            part = name.split(".")[-2]
            if part in ("o_proj", "down_proj", "c_proj", "dense", "dense_4h_to_h"):
                parameter.mul_(0.5)
            elif part in ("lm_head", "embed_out", "embed_tokens", "wte", "embed_in"):
                parameter.mul_(2.0)
        for name, parameter in model.named_parameters():
            _sharpen(name, parameter, scale)


def _sharpen(name: str, parameter: torch.Tensor, scale: float) -> None:
    """Scales what decides how far attention logits spread: the norm of the queries, else their projection."""
    part = name.split(".")[-2]
    if part == "q_norm":
        # A norm whose weight is stored around zero multiplies by one plus it.
        offset = 1.0 if float(parameter.mean().abs()) < 0.5 else 0.0
        parameter.copy_(scale * (parameter + offset) - offset)
    elif part == "q_proj":
        parameter.mul_(scale)
    elif part in ("qkv_proj", "query_key_value", "c_attn"):
        parameter.mul_(math.sqrt(scale))


def _cast(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Parameters to another dtype, but not the rotary frequencies, which checkpoints in half precision keep exact too."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
