"""The parts of a model give what the model gives: attention put together from them, and logits, for every family."""

import math

import pytest
import torch
from torch import nn

from cameraready.models import anatomy, capture, tiny_model, tiny_tokenizer
from cameraready.models.hooks import hooks_of
from cameraready.models.structure import apply_rotary, attend, causal_mask, rotate
from cameraready.models.tiny import TINY_KINDS

VARIANTS = [
    *((kind, {}) for kind in TINY_KINDS),
    ("mistral", {"sliding_window": 5}),
    ("phi3", {"sliding_window": 5}),
    ("qwen2", {"sliding_window": 5, "n_layers": 3}),
    ("qwen3", {"sliding_window": 5, "head_dim": 24}),
    ("gemma3", {"sliding_window": 5, "head_dim": 32, "kv_heads": 1}),
    ("llama", {"head_dim": 24, "attention_bias": True, "kv_heads": 4, "tie": True}),
    ("llama", {"heads": 1, "kv_heads": 1}),
    ("gpt_neox", {"heads": 2}),
    ("granite", {"tie": False, "attention_bias": True}),
]
NAMES = [f"{kind}-{'-'.join(f'{key}{value}' for key, value in options.items())}" for kind, options in VARIANTS]

T = 14


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, 256, (2, T), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("kind", "options"), VARIANTS, ids=NAMES)
def test_attention_from_its_pieces_is_the_models_own(kind, options, ids):
    model = tiny_model(kind, dtype=torch.float64, **options)
    parts = anatomy(model)
    with torch.no_grad(), capture(parts, "attention_input", "attention_output") as seen:
        model(ids)
    # Eager soft-capping and Cohere's rotary turn run in float32 inside the model, whatever its dtype.
    tolerance = 1e-5 if kind in ("gemma2", "cohere") else 1e-10
    for layer in parts.layers:
        attention = layer.attention
        assert attention.verified
        angles = parts.rotary(torch.arange(T), layer=layer.index) if attention.rotary else None
        ours = attend(attention, seen.last("attention_input", layer.index), angles)
        torch.testing.assert_close(ours, seen.last("attention_output", layer.index), rtol=0, atol=tolerance)


@pytest.mark.parametrize(("kind", "options"), VARIANTS, ids=NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_the_last_residual_are_the_models_to_the_bit(kind, options, dtype, ids):
    model = tiny_model(kind, dtype=dtype, **options)
    parts = anatomy(model)
    with torch.no_grad(), capture(parts, "residual", "final_hidden") as seen:
        out = model(ids, output_hidden_states=True)
    assert torch.equal(parts.logits(seen.last("residual", -1)), out.logits)
    assert torch.equal(parts.logits(seen.last("final_hidden", -1)), out.logits)
    assert torch.equal(parts.logits(out.hidden_states[-1], normed=True), out.logits)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "gemma3", "phi3", "olmo2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_recognised_even_with_large_keys(kind, dtype, ids):
    model = tiny_model(kind, dtype=dtype, n_layers=4)
    with torch.no_grad():
        for layer in model.model.layers:
            if kind == "qwen2":  # whose real biases of keys are of this size
                layer.self_attn.k_proj.bias[15::16] += 400.0
    parts = anatomy(model)
    assert all(layer.attention.verified for layer in parts.layers)
    assert {layer.attention.rotary for layer in parts.layers} == {"half"}


@pytest.mark.parametrize("kind", TINY_KINDS)
def test_shapes_and_what_is_shared(kind, ids):
    model = tiny_model(kind, n_layers=3)
    parts = anatomy(model)
    assert parts.n_layers == 3
    assert (parts.hidden_size, parts.vocab_size) == (64, 262)
    assert parts.tied == (parts.head.weight.data_ptr() == parts.embedding.weight.data_ptr())
    hidden = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(1))
    attention = parts.layers[0].attention
    kv_heads = 4 if kind in ("gpt2", "gpt_neox") else 2
    assert (attention.n_heads, attention.n_kv_heads, attention.head_dim) == (4, kv_heads, 16)
    assert attention.queries(hidden).shape == (2, 4, 5, 16)
    assert attention.keys(hidden).shape == attention.values(hidden).shape == (2, kv_heads, 5, 16)
    assert (attention.q_proj is None) == (attention.fused_qkv is not None)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "phi3", "glm", "olmo2"])
def test_keys_and_values_are_what_the_cache_holds(kind, ids):
    model = tiny_model(kind, dtype=torch.float64, sliding_window=32 if kind == "gemma3" else None)
    parts = anatomy(model)
    with torch.no_grad(), capture(parts, "attention_input") as seen:
        cache = model(ids, use_cache=True).past_key_values
    for layer in parts.layers:
        hidden, attention = seen.last("attention_input", layer.index), layer.attention
        cos, sin = parts.rotary(torch.arange(T), layer=layer.index)
        keys = apply_rotary(attention.keys(hidden), cos, sin, attention.rotary)
        torch.testing.assert_close(keys, cache.layers[layer.index].keys, rtol=0, atol=1e-12)
        torch.testing.assert_close(attention.values(hidden), cache.layers[layer.index].values, rtol=0, atol=1e-12)


def test_windows_follow_the_layers():
    windows = {
        "llama": tiny_model("llama", n_layers=4),
        "mistral": tiny_model("mistral", n_layers=4, sliding_window=6),
        "qwen2": tiny_model("qwen2", n_layers=4, sliding_window=6),
        "gemma3": tiny_model("gemma3", n_layers=4, sliding_window=6),
    }
    found = {name: [layer.attention.sliding_window for layer in anatomy(m).layers] for name, m in windows.items()}
    assert found == {
        "llama": [None] * 4,
        "mistral": [6] * 4,
        "qwen2": [6, 6, None, None],
        "gemma3": [6, None, 6, None],
    }


def test_rotary_kinds_are_told_apart():
    found = {kind: anatomy(tiny_model(kind)).layers[0].attention.rotary for kind in TINY_KINDS}
    assert {kind for kind, rotary in found.items() if rotary == "interleaved"} == {"cohere", "glm"}
    assert {kind for kind, rotary in found.items() if rotary is None} == {"gpt2"}


def test_layers_of_one_model_may_turn_by_different_angles():
    parts = anatomy(tiny_model("gemma3"))
    local, wide = (parts.rotary(torch.arange(50), layer=layer)[0] for layer in (0, 1))
    assert not torch.allclose(local, wide)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_asking_for_angles_of_long_inputs_does_not_change_those_of_short_ones(kind):
    from transformers import AutoModelForCausalLM

    config = tiny_model(kind, max_positions=16).config
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    if kind == "gemma3":
        if not hasattr(config, "rope_parameters"):
            pytest.skip("before transformers 5 Gemma 3 has one kind of rope for its windows")
        config.rope_parameters = {"sliding_attention": dynamic, "full_attention": dynamic}
    else:
        setattr(config, "rope_parameters" if hasattr(config, "rope_parameters") else "rope_scaling", dynamic)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.arange(40)[None]
    with torch.no_grad():
        first = model(ids).logits
        wide = anatomy(model).rotary(torch.arange(200))
        assert not torch.allclose(wide[0][:, :40], anatomy(model).rotary(torch.arange(40))[0])
        assert torch.equal(model(ids).logits, first)
    assert all(layer.attention.verified for layer in anatomy(model).layers)


def test_asking_for_angles_leaves_frequencies_that_are_overwritten_in_place():
    from transformers import AutoModelForCausalLM

    config = tiny_model("phi3", max_positions=64).config
    config.original_max_position_embeddings = 16
    ropes = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [8.0] * 8}
    setattr(config, "rope_parameters" if hasattr(config, "rope_parameters") else "rope_scaling", ropes)
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config).eval()
    rotary = model.model.rotary_emb
    before = {name: buffer.clone() for name, buffer in rotary.named_buffers()}
    attributes = set(vars(rotary))
    short, long = (anatomy(model).rotary(torch.arange(n))[0][:, 1:16] for n in (16, 40))
    assert not torch.allclose(long, short)
    assert set(vars(rotary)) == attributes
    assert all(torch.equal(before[name], buffer) for name, buffer in rotary.named_buffers())


def test_a_rotary_module_that_others_hung_into_every_layer_is_still_the_shared_one():
    model = tiny_model("gemma3", n_layers=3)
    expected = [anatomy(model).rotary(torch.arange(9), layer=layer)[0] for layer in range(3)]
    for layer in model.model.layers:
        layer.self_attn.rotary_emb = model.model.rotary_emb
    parts = anatomy(model)
    assert [layer.attention.rotary for layer in parts.layers] == ["half"] * 3
    for layer in range(3):
        assert torch.equal(parts.rotary(torch.arange(9), layer=layer)[0], expected[layer])


def test_partial_rotary_positions_leave_the_rest_alone():
    parts = anatomy(tiny_model("gpt_neox"))
    cos, sin = parts.rotary(torch.arange(6)[None].expand(3, -1))
    assert cos.shape == sin.shape == (3, 6, 8)
    x = torch.randn(3, 4, 6, 16, generator=torch.Generator().manual_seed(0))
    turned = apply_rotary(x, cos, sin, parts.layers[0].attention.rotary)
    assert torch.equal(turned[..., 8:], x[..., 8:])
    assert not torch.allclose(turned[..., 1:, :8], x[..., 1:, :8])


@pytest.mark.parametrize("kind", ["half", "interleaved"])
def test_a_turn_keeps_lengths_and_depends_on_distance_alone(kind):
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 8, generator=generator, dtype=torch.float64)
    frequencies = torch.tensor([1.0, 0.3, 0.1, 0.03], dtype=torch.float64)

    def turned(x, position):
        angles = position * frequencies
        angles = torch.cat((angles, angles)) if kind == "half" else angles.repeat_interleave(2)
        return apply_rotary(x, angles.cos()[None, None], angles.sin()[None, None], kind)

    assert torch.allclose(turned(q, 5.0).norm(), q.norm())
    assert torch.allclose((turned(q, 9.0) * turned(k, 4.0)).sum(), (turned(q, 105.0) * turned(k, 100.0)).sum())
    assert torch.equal(apply_rotary(q, torch.ones(1, 1, 8), torch.zeros(1, 1, 8), None), q)
    assert torch.equal(rotate(rotate(q, kind), kind), -q)


def test_angles_of_more_features_than_the_head_are_refused():
    with pytest.raises(ValueError, match="angles are of 8 features, but the heads have only 4"):
        apply_rotary(torch.zeros(1, 1, 1, 4), torch.ones(1, 1, 8), torch.zeros(1, 1, 8), "half")
    with pytest.raises(ValueError, match="'half' or 'interleaved'"):
        rotate(torch.zeros(4), "halves")


def test_the_causal_mask_counts_the_query_itself():
    assert causal_mask(4, 2).int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    assert causal_mask(3).sum() == 6


def test_norms_play_the_roles_of_their_families():
    def roles(kind):
        layer = anatomy(tiny_model(kind)).layers[0]
        names = {id(part): name for name, part in layer.module.named_children()} | {id(None): None}
        norms = (layer.input_norm, layer.mlp_norm, layer.attention_post_norm, layer.mlp_post_norm)
        return [names[id(norm)] for norm in norms]

    assert roles("llama") == ["input_layernorm", "post_attention_layernorm", None, None]
    assert roles("gemma3") == [
        "input_layernorm",
        "pre_feedforward_layernorm",
        "post_attention_layernorm",
        "post_feedforward_layernorm",
    ]
    assert roles("olmo2") == [None, None, "post_attention_layernorm", "post_feedforward_layernorm"]
    assert roles("cohere") == ["input_layernorm", "input_layernorm", None, None]
    assert roles("gpt2") == ["ln_1", "ln_2", None, None]


def test_norms_are_judged_by_where_they_stand_and_not_by_their_names():
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    class Renamed(LlamaDecoderLayer):
        """The same layer, its norms under misleading names."""

        input_layernorm = property(lambda self: self._modules["post_mlp_norm"])
        post_attention_layernorm = property(lambda self: self._modules["input_norm"])

    model = tiny_model("llama")
    for layer in model.model.layers:
        layer._modules["post_mlp_norm"] = layer._modules.pop("input_layernorm")
        layer._modules["input_norm"] = layer._modules.pop("post_attention_layernorm")
        layer.__class__ = Renamed
    layer = anatomy(model).layers[0]
    assert layer.input_norm is layer.module._modules["post_mlp_norm"]
    assert layer.mlp_norm is layer.module._modules["input_norm"]
    assert layer.mlp_post_norm is None


def test_norms_between_attention_and_mlp_come_in_their_order():
    gemma = anatomy(tiny_model("gemma3")).layers[0]
    assert gemma.post_attention_norms == (gemma.attention_post_norm, gemma.mlp_norm)
    assert gemma.post_attention_norm is gemma.mlp_norm


def test_hooks_of_others_that_change_the_attention_do_not_mislead():
    model = tiny_model("llama")
    handles = [
        layer.self_attn.register_forward_hook(lambda _module, _args, out: (3 * out[0], *out[1:]))
        for layer in model.model.layers
    ]
    assert all(layer.attention.verified for layer in anatomy(model).layers)
    assert hooks_of(model) == len(handles)


def test_mlps_gate_their_features_or_not():
    gated, fused, plain = (anatomy(tiny_model(kind)).layers[0].mlp for kind in ("llama", "phi3", "gpt2"))
    x = torch.randn(1, 3, 64, generator=torch.Generator().manual_seed(0))
    ours = gated.down_proj(nn.functional.silu(gated.gate_proj(x)) * gated.up_proj(x))
    assert torch.allclose(ours, gated.module(x))
    assert fused.gate_proj is None
    gate, up = fused.fused_gate_up(x).chunk(2, dim=-1)
    assert torch.allclose(fused.down_proj(nn.functional.silu(gate) * up), fused.module(x))
    assert plain.gate_proj is None
    assert torch.allclose(plain.down_proj(plain.module.act(plain.up_proj(x))), plain.module(x))


def test_scale_and_soft_cap_of_logits_are_told():
    granite, gemma = anatomy(tiny_model("granite")), anatomy(tiny_model("gemma2"))
    assert math.isclose(granite.logit_scale, 1 / 1.5)
    assert gemma.final_softcap == 4.0
    assert gemma.layers[0].attention.softcap == 5.0
    with pytest.raises(ValueError, match="have 32 features, but this model has 64"):
        granite.logits(torch.zeros(1, 32))


def test_asking_changes_nothing():
    model = tiny_model("gemma3").train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.random.get_rng_state()
    anatomy(model)
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert hooks_of(model) == 0
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_was_found_is_asked_again_when_modules_change():
    model = tiny_model("llama")
    calls = []
    handle = model.register_forward_hook(lambda *_: calls.append(1))
    for _ in range(3):
        anatomy(model)
    assert len(calls) == 1
    model.model.layers[0].self_attn.q_proj = nn.Linear(64, 64)
    assert anatomy(model).layers[0].attention.q_proj is model.model.layers[0].self_attn.q_proj
    assert len(calls) == 2
    model.set_attn_implementation("eager")
    anatomy(model)
    assert len(calls) == 3
    handle.remove()


def test_a_tokenizer_is_no_model():
    with pytest.raises(TypeError, match=r"A model .* was expected, but this is a"):
        anatomy(tiny_tokenizer())


def test_dropout_of_adapters_in_training_neither_misleads_nor_draws_random_numbers():
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, lora_dropout=0.5, target_modules="all-linear", init_lora_weights=False)
    torch.manual_seed(0)
    wrapped = get_peft_model(tiny_model("llama", seed=3), config).train()
    before = torch.get_rng_state()
    parts = anatomy(wrapped.get_base_model())
    assert torch.equal(torch.get_rng_state(), before)
    assert all(layer.attention.refusal is None for layer in parts.layers)
    assert all(module.training for module in wrapped.modules())
