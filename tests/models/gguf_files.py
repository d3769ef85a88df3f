"""Tiny GGUF files of a known model: what a conversion must give back."""

import numpy as np

from cameraready.models import tiny_model

WORDS = ["the", "he", "in", "an", "Ġt", "Ġthe"]
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def byte_characters():
    """The printable stand-ins of the 256 bytes in a byte-level vocabulary."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shifted = iter(range(256, 1024))
    return [chr(byte) if byte in plain else chr(next(shifted)) for byte in range(256)]


def vocabulary():
    return [*byte_characters(), *WORDS, *SPECIALS]


def tiny(kind, **options):
    """A tiny model whose vocabulary is that of the files."""
    return tiny_model(kind, vocab=len(vocabulary()), **options)


def write(
    path,
    model,
    *,
    scaling=None,
    quantize=None,
    leave_out=(),
    alignment=None,
    template=CHAT_TEMPLATE,
    begins=None,
    factors=None,
):
    """Write a Llama or Qwen2 model of transformers as GGUF, as llama.cpp's converter does; returns the path."""
    import gguf

    config = model.config
    kind = config.model_type
    writer = gguf.GGUFWriter(path, kind)
    if alignment:
        writer.add_custom_alignment(alignment)
    writer.add_name("tiny")
    writer.add_type("model")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head_dim = config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(head_dim)
    for key, value in (scaling or {}).items():
        if isinstance(value, str):
            writer.add_string(f"{kind}.rope.scaling.{key}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"{kind}.rope.scaling.{key}", value)
        else:
            writer.add_float32(f"{kind}.rope.scaling.{key}", value)
    writer.add_tokenizer_model("gpt2")
    tokens = vocabulary()
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIALS else 1 for token in tokens])
    writer.add_token_merges(["h e", "t he", "i n", "a n", "Ġ t", "Ġ the"])
    writer.add_bos_token_id(tokens.index("<|endoftext|>"))
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    if begins is not None:
        writer.add_add_bos_token(begins)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", np.asarray(factors, np.float32))
    if template:
        writer.add_chat_template(template)
    for theirs, weight in named_weights(model):
        if theirs in leave_out:
            continue
        if quantize and weight.ndim == 2:
            packed = gguf.quantize(weight, quantize)
            writer.add_tensor(theirs, packed, raw_dtype=quantize)
        else:
            writer.add_tensor(theirs, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def named_weights(model):
    """llama.cpp's names and layout: Llama's queries and keys are stored with their rotary halves interleaved."""
    config = model.config
    names = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"}
    names |= {"self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up"}
    names |= {"mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    for name, weight in model.state_dict().items():
        values = weight.float().numpy()
        if name == "model.embed_tokens.weight":
            yield "token_embd.weight", values
        elif name == "model.norm.weight":
            yield "output_norm.weight", values
        elif name == "lm_head.weight":
            if not config.tie_word_embeddings:
                yield "output.weight", values
        else:
            _, _, layer, rest = name.split(".", 3)
            part, _, suffix = rest.rpartition(".")
            if config.model_type == "llama" and part in ("self_attn.q_proj", "self_attn.k_proj"):
                heads = config.num_attention_heads if part.endswith("q_proj") else config.num_key_value_heads
                values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
            yield f"blk.{layer}.{names[part]}.{suffix}", np.ascontiguousarray(values)
