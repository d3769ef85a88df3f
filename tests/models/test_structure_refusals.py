"""Models that are wrapped are seen through; models of another make are refused with a sentence, and no sooner than needed."""

import pytest
import torch
from torch import nn

from cameraready.models import UnknownArchitecture, anatomy, capture, tiny_model
from cameraready.models.hooks import hooks_of
from cameraready.models.structure import attend

IDS = torch.arange(10)[None] + 50


def small(**options):
    common = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return {**common, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **options}


def made(model_class, config):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return model_class(config).eval()


def reproduces(model, ids=IDS):
    """Whether attention of every layer, put together, and logits are those of the model."""
    parts = anatomy(model)
    with torch.no_grad(), capture(parts, "attention_input", "attention_output", "residual") as seen:
        logits = model(input_ids=ids).logits
    for layer in parts.layers:
        if layer.attention is not None:
            angles = parts.rotary(torch.arange(ids.shape[1]), layer=layer.index) if layer.attention.rotary else None
            with torch.no_grad():
                ours = attend(layer.attention, seen.last("attention_input", layer.index), angles)
            torch.testing.assert_close(ours, seen.last("attention_output", layer.index), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(parts.logits(seen.last("residual", -1)), logits, rtol=1e-5, atol=1e-5)
    return parts


def test_an_adapter_of_peft_does_not_hide_the_model():
    peft = pytest.importorskip("peft")
    base = tiny_model("qwen2")
    with torch.random.fork_rng(devices=[]):
        model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2)).eval()
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(0))
    parts = reproduces(model)
    assert parts.n_layers == 2
    assert parts.layers[0].attention.q_proj.lora_A is not None


def test_compiled_and_parallel_wrappers_do_not_hide_the_model():
    model = tiny_model("llama")
    compiled = torch.compile(model, backend="eager")
    assert anatomy(compiled).layers[0].module is model.model.layers[0]
    assert anatomy(nn.DataParallel(model)).layers[1].module is model.model.layers[1]


def test_the_language_model_is_found_beside_an_image_encoder():
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    config = Gemma3Config(
        text_config=small(
            intermediate_size=48, num_key_value_heads=2, head_dim=8, layer_types=["sliding_attention", "full_attention"]
        ),
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 5,
            "num_attention_heads": 4,
            "image_size": 28,
            "patch_size": 14,
        },
        mm_tokens_per_image=4,
        image_token_index=98,
        boi_token_index=96,
        eoi_token_index=97,
    )
    model = made(Gemma3ForConditionalGeneration, config)
    parts = reproduces(model, IDS % 40 + 3)
    assert parts.n_layers == 2
    assert parts.decoder is model.model.language_model


def test_layers_of_linear_attention_have_none_and_gated_ones_are_known():
    pytest.importorskip("transformers.models.qwen3_next", reason="this transformers has no Qwen3-Next yet")
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        **small(
            intermediate_size=48,
            num_key_value_heads=2,
            head_dim=16,
            layer_types=["linear_attention", "full_attention"],
            linear_num_value_heads=4,
            linear_num_key_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
        )
    )
    parts = reproduces(made(Qwen3NextForCausalLM, config))
    assert parts.layers[0].attention is None
    assert parts.layers[1].attention.gated
    with pytest.raises(UnknownArchitecture, match="Layer 0 of Qwen3NextForCausalLM has no softmax attention"):
        parts.rotary(torch.arange(3), layer=0)
    with pytest.raises(ValueError, match="Layer 0 has no 'attention_output': it has no softmax attention"):
        capture(parts, "attention_output", layers=[0])


def test_layers_without_positions_among_others_are_found_by_running_them():
    from transformers import Cohere2Config, Cohere2ForCausalLM

    config = Cohere2Config(
        **small(
            intermediate_size=48,
            num_key_value_heads=2,
            sliding_window=4,
            layer_types=["sliding_attention", "full_attention"],
        )
    )
    parts = reproduces(made(Cohere2ForCausalLM, config))
    assert [layer.attention.rotary for layer in parts.layers] == ["interleaved", None]
    with pytest.raises(ValueError, match="Layer 1 has no rotary positions"):
        parts.rotary(torch.arange(3), layer=1)


def test_attention_sinks_take_part():
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        **small(
            intermediate_size=16,
            num_key_value_heads=2,
            head_dim=8,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=4,
        )
    )
    model = made(GptOssForCausalLM, config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.copy_(torch.tensor([1.0, -1.0, 2.0, 0.0]))
    assert reproduces(model).layers[0].attention.sinks is not None


def test_attention_of_another_make_is_refused_only_when_its_pieces_are_asked_for():
    from transformers import BloomConfig, BloomForCausalLM

    config = BloomConfig(vocab_size=100, hidden_size=32, n_layer=2, n_head=4)
    model = made(BloomForCausalLM, config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    parts = anatomy(model)
    attention = parts.layers[0].attention
    assert not attention.verified
    with pytest.raises(UnknownArchitecture, match=r"The attention of layer 0 of BloomForCausalLM .* not supported"):
        attention.keys(torch.zeros(1, 2, 32))
    with torch.no_grad(), capture(parts, "residual") as seen:
        logits = model(IDS).logits
    assert torch.equal(parts.logits(seen.last("residual", -1)), logits)


def test_norms_of_single_heads_that_do_not_fit_are_refused_with_a_sentence():
    from transformers import StableLmConfig, StableLmForCausalLM, __version__

    if __version__.startswith("4."):
        pytest.skip("transformers 4 cannot make this model: it sets biases that its norms do not have")
    config = StableLmConfig(**small(intermediate_size=48, num_key_value_heads=2, qk_layernorm=True))
    parts = anatomy(made(StableLmForCausalLM, config))
    with pytest.raises(UnknownArchitecture, match="layer 1 of StableLmForCausalLM"):
        parts.layers[1].attention.keys(torch.zeros(1, 2, 32))
    assert parts.logits(torch.zeros(1, 32)).shape == (1, 100)


def test_queries_scaled_by_their_position_are_refused_since_a_short_run_cannot_see_it():
    pytest.importorskip("transformers.models.ministral3", reason="this transformers has no Ministral 3 yet")
    from transformers import Ministral3Config, Ministral3ForCausalLM

    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 16}
    options = small(intermediate_size=48, num_key_value_heads=2, head_dim=8, max_position_embeddings=64)
    model = made(
        Ministral3ForCausalLM, Ministral3Config(**options, rope_parameters={**rope, "llama_4_scaling_beta": 0.1})
    )
    attention = anatomy(model).layers[0].attention
    assert not attention.verified
    with pytest.raises(UnknownArchitecture, match="a factor that grows with their position"):
        attention.queries(torch.zeros(1, 2, 32))


def test_weights_that_are_not_finite_are_called_so():
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight[0, 0] = float("nan")
    with pytest.raises(UnknownArchitecture, match="not finite"):
        anatomy(model).layers[0].attention.keys(torch.zeros(1, 2, 64))


def test_latent_attention_is_refused_only_when_its_pieces_are_asked_for():
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        **small(
            intermediate_size=48,
            num_key_value_heads=4,
            q_lora_rank=8,
            kv_lora_rank=8,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            moe_intermediate_size=16,
            first_k_dense_replace=1,
            head_dim=8,
        )
    )
    parts = anatomy(made(DeepseekV3ForCausalLM, config))
    assert parts.n_layers == 2
    with pytest.raises(UnknownArchitecture, match="no query, key and value projections"):
        parts.layers[0].attention.keys(torch.zeros(1, 2, 32))


def test_logits_made_in_another_way_are_refused_when_asked_for():
    class Colder(nn.Module):
        def __init__(self, head):
            super().__init__()
            self.weight, self.in_features, self.out_features = head.weight, head.in_features, head.out_features

        def forward(self, x):
            return nn.functional.linear(x, self.weight)

    model = tiny_model("llama", tie=False)
    handle = model.register_forward_hook(lambda _m, _a, out: type(out)(logits=out.logits + out.logits.sin()))
    with pytest.raises(UnknownArchitecture, match="The logits of LlamaForCausalLM are not those of its final norm"):
        anatomy(model).logits(torch.zeros(1, 64))
    handle.remove()
    model.lm_head = Colder(model.lm_head)
    assert anatomy(model).logits(torch.zeros(1, 64)).shape == (1, 262)


def test_a_model_without_weights_is_described_but_not_verified():
    with torch.device("meta"):
        model = tiny_model_on_meta()
    parts = anatomy(model)
    assert parts.unverified == "its weights are not loaded"
    attention = parts.layers[0].attention
    assert (attention.verified, attention.rotary, attention.n_kv_heads) == (False, "half", 2)


def tiny_model_on_meta():
    from transformers import AutoModelForCausalLM, LlamaConfig

    return AutoModelForCausalLM.from_config(LlamaConfig(**small(intermediate_size=48, num_key_value_heads=2)))


def other_makes():
    import transformers as hf

    yield (
        "encoder-decoder",
        hf.T5ForConditionalGeneration,
        hf.T5Config(vocab_size=100, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4),
        "T5ForConditionalGeneration is an encoder-decoder",
    )
    yield "encoder", hf.BertForMaskedLM, hf.BertConfig(**small(intermediate_size=48)), "does not generate text"
    yield "no-head", hf.LlamaModel, hf.LlamaConfig(**small(intermediate_size=48)), "LlamaModel does not generate text"
    yield (
        "state-space",
        hf.MambaForCausalLM,
        hf.MambaConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, state_size=4),
        "MambaForCausalLM has no list of layers with attention",
    )


@pytest.mark.parametrize("name", ["encoder-decoder", "encoder", "no-head", "state-space"])
def test_other_makes_of_model_give_a_sentence(name):
    _, model_class, config, message = next(entry for entry in other_makes() if entry[0] == name)
    model = made(model_class, config)
    with pytest.raises(UnknownArchitecture, match=message):
        anatomy(model)
    assert hooks_of(model) == 0


def test_a_network_of_ones_own_is_no_language_model():
    with pytest.raises(UnknownArchitecture, match="Linear has no `config`"):
        anatomy(nn.Linear(2, 2))


def test_an_opened_model_is_asked_for_its_model():
    class Opened:
        model, tokenizer = None, None

    with pytest.raises(TypeError, match=r"pass its `\.model`"):
        anatomy(Opened())


@pytest.mark.models
@pytest.mark.parametrize(
    ("name", "kind", "windowed", "tied"),
    # The file of the first holds its head and its embedding as two quantisations of one matrix.
    [("qwen2.5-coder-0.5b-instruct", "half", 0, False), ("gemma-3-270m", "half", 15, True)],
)
def test_real_models_are_put_together_exactly(name, kind, windowed, tied):
    from cameraready.models import ModelError, open_model

    try:
        opened = open_model(name)
    except ModelError as error:
        pytest.skip(f"{name} is not at hand: {error}")
    ids = opened.encode("def add(a, b):\n    return a + b  # the sum of two numbers")
    parts = reproduces(opened.model, ids)
    assert parts.unverified is None
    assert all(layer.attention.verified for layer in parts.layers)
    assert {layer.attention.rotary for layer in parts.layers} == {kind}
    assert sum(layer.attention.sliding_window is not None for layer in parts.layers) == windowed
    assert parts.tied == tied
