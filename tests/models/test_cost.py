"""Costs told from a configuration: exact counts, caches as transformers keeps them, arithmetic as PyTorch counts it."""

import math

import pytest
import torch
from transformers import (
    AutoConfig,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
)

from cameraready import amounts
from cameraready.models import ModelError, cost, cost_of, tiny_model, tiny_tokenizer
from tests.models import gguf_files

LLAMA_3_8B = LlamaConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, max_position_embeddings=8192, dtype="bfloat16",
)  # fmt: skip

# Configurations and counts as their authors publish them (model cards and safetensors indices on the hub).
PUBLISHED = {
    "Llama-3-8B": (LLAMA_3_8B, 8_030_261_248),
    "Mistral-7B-v0.1": (
        MistralConfig(vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
                      num_attention_heads=32, num_key_value_heads=8), 7_241_732_096),
    "Qwen2.5-0.5B": (
        Qwen2Config(vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
                    num_attention_heads=14, num_key_value_heads=2, tie_word_embeddings=True), 494_032_768),
    "Qwen3-0.6B": (
        Qwen3Config(vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, head_dim=128,
                    num_attention_heads=16, num_key_value_heads=8, tie_word_embeddings=True), 596_049_920),
    "gemma-3-270m": (
        Gemma3TextConfig(vocab_size=262144, hidden_size=640, intermediate_size=2048, num_hidden_layers=18, head_dim=256,
                         num_attention_heads=4, num_key_value_heads=1, sliding_window=512), 268_098_176),
    "gpt2": (GPT2Config(), 124_439_808),
    "Mixtral-8x7B": (
        MixtralConfig(vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
                      num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2), 46_702_792_704),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_published(name):
    config, published = PUBLISHED[name]
    assert cost.size_of(config).parameters == published


def test_llama_3_8b_takes_14_96_gib_in_bfloat16():
    found = cost_of(LLAMA_3_8B, prompt_tokens=8192, device="cuda")
    assert round(found.parameters / 1e9, 2) == 8.03
    assert round(found.weights_gib, 2) == 14.96
    # 32 layers x 2 x 8 heads x 128 channels x 2 bytes = 128 KiB a token: 1 GiB for 8192 of them.
    assert found.cache_gib == 1.0
    assert found.memory_gib == pytest.approx(found.weights_gib + found.cache_gib + found.activation_gib)
    assert any("A100" in note for note in found.notes)
    assert cost_of(LLAMA_3_8B, prompt_tokens=1, dtype="float32").weights_gib == pytest.approx(2 * found.weights_gib)


def test_a_mixture_multiplies_with_the_chosen_experts_only():
    config, _ = PUBLISHED["Mixtral-8x7B"]
    size = cost.size_of(config)
    assert size.active / 1e9 == pytest.approx(12.9 - 0.131, abs=0.05)  # "13B active", less the embedding's table
    assert any("billion" in note for note in cost_of(config, prompt_tokens=8).notes)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {}),
        ("llama", {"kv_heads": 4}),
        ("qwen3", {"head_dim": 32}),
        ("mistral", {"sliding_window": 16}),
        ("gemma3", {"sliding_window": 16, "n_layers": 7}),
        ("gpt_neox", {}),
        ("gpt2", {}),
        ("phi3", {}),
    ],
)
@pytest.mark.parametrize("tokens", [5, 40])
def test_the_cache_is_as_large_as_transformers_makes_it(kind, options, tokens):
    model = tiny_model(kind, **options).eval()
    with torch.no_grad():
        kept = model(torch.zeros(3, tokens, dtype=torch.long), use_cache=True).past_key_values
    measured = sum(layer.keys.nbytes + layer.values.nbytes for layer in kept.layers)
    assert cost.cache_bytes(model.config, tokens=tokens, batch=3, width=4) == measured


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "gpt2", "gpt_neox"])
def test_arithmetic_is_what_pytorch_counts(kind):
    from torch.utils.flop_counter import FlopCounterMode

    model = tiny_model(kind, **({"sliding_window": 64} if kind == "gemma3" else {})).eval()
    model.set_attn_implementation("eager")  # the counter knows no CPU kernel for attention
    tokens, size = 24, cost.size_of(model.config)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, tokens, dtype=torch.long))
    # Whole squares of attention are computed here, of which the causal half is needed.
    causal = cost.forward_flops(model.config, size, start=0, end=tokens)
    linear = (
        2
        * tokens
        * sum(
            module.weight.numel()
            for module in model.modules()
            if isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D"
        )
    )
    square = (causal - 2 * size.active * tokens) * 2 * tokens / (tokens + 1)
    assert counter.get_total_flops() == pytest.approx(linear + square, rel=1e-9)
    assert 2 * size.active * tokens == pytest.approx(linear, rel=0.04)  # norms and biases


def test_decoding_costs_what_the_pairs_say():
    config = tiny_model("llama").config
    size = cost.size_of(config)
    whole = cost.forward_flops(config, size, start=0, end=30)
    split = cost.forward_flops(config, size, start=0, end=20) + cost.forward_flops(config, size, start=20, end=30)
    assert whole == split
    assert cost._attended(10, math.inf) == 55
    assert cost._attended(10, 3) == 1 + 2 + 3 * 8


def test_hours_grow_with_the_work():
    short = cost_of(LLAMA_3_8B, prompt_tokens=1000, new_tokens=10, device="cuda")
    assert cost_of(LLAMA_3_8B, prompt_tokens=1000, new_tokens=10, passes=10, device="cuda").hours == pytest.approx(
        10 * short.hours
    )
    assert cost_of(LLAMA_3_8B, prompt_tokens=1000, new_tokens=100, device="cuda").hours > 2 * short.hours
    # One token a pass: at least the time to read all but the table of embeddings, 15 GB, at the stated bandwidth.
    decoding = cost_of(LLAMA_3_8B, prompt_tokens=1, new_tokens=1, device="cuda").hours * 3600
    assert decoding > 15.0e9 / cost.machine_of("cuda").bandwidth
    assert cost_of(LLAMA_3_8B, prompt_tokens=1000, device="cpu").hours > short.hours
    own = cost.Machine("own", 1e12, 1e12, 1e12)
    expected = 2 * cost.size_of(LLAMA_3_8B).active / 1e12
    assert cost_of(LLAMA_3_8B, prompt_tokens=1, device="cuda", machine=own).hours * 3600 == pytest.approx(
        expected, rel=1e-3
    )


def test_decoding_reads_the_experts_that_are_chosen():
    """Mixtral: 12.9 of 46.7 billion weights for one sequence, all of them for many."""
    config = PUBLISHED["Mixtral-8x7B"][0]
    slow = cost.Machine("all bandwidth", 1e30, 1e30, 1e12)

    def gigabytes(batch):
        found = cost_of(
            config, prompt_tokens=1, new_tokens=1, batch=batch, device="cuda", dtype="bfloat16", machine=slow
        )
        return found.hours * 3600 * 1e12 / 1e9

    assert gigabytes(1) == pytest.approx(2 * 12.75, rel=0.01)
    assert gigabytes(16) == pytest.approx(2 * 46.7, rel=0.01)


def test_a_folder_with_its_configuration_only(tmp_path):
    LLAMA_3_8B.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    found = cost_of(str(tmp_path), prompt_tokens=100, device="cuda")
    assert found.parameters == 8_030_261_248
    assert round(found.weights_gib, 2) == 14.96
    assert found.downloads == ()


def test_a_gguf_by_its_header_a_pair_and_a_model(tmp_path):
    model = gguf_files.tiny("llama")
    path = gguf_files.write(tmp_path / "a.gguf", model)
    expected = sum(weight.numel() for weight in model.parameters())
    for what in (path, str(path), model, (model, tiny_tokenizer()), model.config):
        found = cost_of(what, prompt_tokens=10)
        assert found.parameters == expected
        assert found.weights_gib == pytest.approx(4 * expected / 2**30)
        assert found.downloads == ()


def test_a_packaged_model_is_not_converted_for_it(tmp_path, monkeypatch):
    from dataclasses import replace

    from cameraready.models import packaged

    monkeypatch.setenv("CAMERAREADY_MODELS", str(tmp_path))
    toy = replace(packaged.MODELS["gemma-3-270m"], name="toy", elsewhere=())
    monkeypatch.setitem(packaged.MODELS, "toy", toy)
    with pytest.raises(ModelError, match="is not on this machine"):
        cost_of("toy", prompt_tokens=10)
    model = gguf_files.tiny("llama")
    gguf_files.write(tmp_path / "toy.gguf", model)
    assert cost_of("toy", prompt_tokens=10).parameters == sum(weight.numel() for weight in model.parameters())
    assert not (tmp_path / "converted").exists()


def test_a_hub_id_says_what_would_be_downloaded(monkeypatch):
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda *_, **__: LLAMA_3_8B)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("hf:meta-llama/Meta-Llama-3-8B", "meta-llama/Meta-Llama-3-8B"):
        (download,) = cost_of(name, prompt_tokens=10, device="cuda").downloads
        assert download == "meta-llama/Meta-Llama-3-8B from the Hugging Face hub, about 15 GiB"


def test_what_cannot_be_reached_says_that_the_configuration_is_enough(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(ModelError, match=r"cannot be reached .* a folder with the model's config.json alone is enough"):
        cost_of("hf:nobody/nothing-of-this-name", prompt_tokens=10)


@pytest.mark.parametrize(
    ("size", "text"),
    [(14.96 * 2**30, "15 GiB"), (0.6 * 2**30, "0.6 GiB"), (5 << 20, "5 MiB"), (2150, "2.1 KiB"), (0, "0 GiB")],
)
def test_memory_is_told_in_a_unit_that_leaves_digits(size, text):
    assert amounts.memory(size) == text


@pytest.mark.parametrize(
    ("n", "text"),
    [(8_030_261_248, "8.03 billion"), (596_049_920, "596 million"), (71_232, "71.2 thousand"), (12, "12")],
)
def test_numbers_of_weights_are_never_zero_point_zero_million(n, text):
    assert amounts.weights(n) == text


def test_more_tokens_than_the_model_was_made_for_are_noted():
    assert any("8,192" in note for note in cost_of(LLAMA_3_8B, prompt_tokens=10_000).notes)
    assert not any("8,192" in note for note in cost_of(LLAMA_3_8B, prompt_tokens=8000).notes)


def test_numbers_and_models_that_cannot_be(tmp_path):
    for options in (
        {"prompt_tokens": 0},
        {"prompt_tokens": 1.5},
        {"prompt_tokens": 1, "batch": 0},
        {"prompt_tokens": 1, "new_tokens": -1},
    ):
        with pytest.raises(ModelError, match="must be a whole number"):
            cost_of(LLAMA_3_8B, **options)
    for name in ("nothing", "x" * 5000):
        with pytest.raises(ModelError, match="There is no model"):
            cost_of(name, prompt_tokens=1)
    with pytest.raises(ModelError, match="is empty"):
        cost_of("", prompt_tokens=1)
    with pytest.raises(ModelError, match="device='banana'"):
        cost_of(LLAMA_3_8B, prompt_tokens=1, device="banana")
    for value in (None, 5, {}):
        with pytest.raises(TypeError, match="is none of these"):
            cost_of(value, prompt_tokens=1)
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(ModelError, match="no causal language model"):
        cost_of(tmp_path, prompt_tokens=1)
