"""Every transform leaves the function of every kind of model as it is: the property that all else rests on."""

import itertools

import pytest
import torch
from transformers import AutoModelForCausalLM

from cameraready.lm.fptquant import FPTConfig, FPTQuantizer, PreRopeTransform, ValueTransform
from cameraready.lm.fptquant.host import TRANSFORMS
from cameraready.models import tiny_model
from tests.lm.fptquant_models import awkward, exact, shaken, tokens

pytestmark = pytest.mark.torch

SUBSETS = [c for n in range(len(TRANSFORMS) + 1) for c in itertools.combinations(TRANSFORMS, n)]


def only(names, **more):
    return FPTConfig(**{name: name in names for name in TRANSFORMS}, **more)


@pytest.fixture(scope="module")
def models():
    return {kind: awkward(kind) for kind in ("llama", "qwen2")}


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_all_subsets_of_transforms_preserve_the_logits(models, kind):
    model, ids = models[kind], tokens()
    with torch.no_grad():
        expected = model(ids).logits
    for names in SUBSETS:
        fpt = shaken(FPTQuantizer(model, only(names)))
        with torch.no_grad():
            found = fpt.model(ids).logits
        assert found.dtype == torch.float64
        assert (found - expected).abs().max() < 1e-9, names


def test_a_shaken_transform_does_change_the_weights(models):
    """So the test above is no comparison of a model with itself."""
    own = dict(models["llama"].named_parameters())
    for name in ("prerope", "value", "updown", "rotate"):
        fpt = shaken(FPTQuantizer(models["llama"], only((name,))))
        changed = {n for n, p in fpt.model.named_parameters() if n in own and not torch.allclose(p, own[n])}
        assert changed, name


@pytest.mark.parametrize("kind", ["qwen3", "mistral", "gemma2", "gemma3", "granite"])
def test_other_architectures_keep_what_is_exact_and_say_what_is_not(kind):
    model = awkward(kind)
    fpt = shaken(FPTQuantizer(model, FPTConfig(unsupported="skip")))
    assert fpt.difference(tokens()) < 1e-9
    expected = {"gemma2": {"rotate"}, "gemma3": {"rotate"}, "granite": {"residual_scale"}}.get(kind, set())
    assert set(fpt.skipped) == expected
    for name in expected:
        with pytest.raises(ValueError, match=f"{name}=True is not exact on {type(model).__name__}"):
            FPTQuantizer(model, only((name,)))


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_where_queries_and_keys_are_normalised_only_scales_go_into_the_gains(kind):
    fpt = shaken(FPTQuantizer(awkward(kind), only(("prerope",))))
    own = fpt.transforms.layers[0].prerope
    assert own.angle is None
    assert own.log_scale.shape == (1, fpt.host.layers[0].head_dim // 2)
    layer = fpt.host.layers[0]
    given = dict(fpt.given.named_parameters())
    for name, parameter in fpt.model.named_parameters():
        if name in (f"{layer.q}.weight", f"{layer.k}.weight"):
            assert torch.equal(parameter, given[name])


def test_a_rotation_before_a_key_norm_would_not_be_exact():
    """Why T_k is refused there: the published code has no guard for it."""
    model = awkward("qwen3")
    layer = FPTQuantizer(model, only(())).host.layers[0]
    turn = PreRopeTransform(layer.kv_heads, layer.heads, layer.head_dim)
    with torch.no_grad():
        turn.angle.fill_(0.7)
        before = model(tokens()).logits
        for name, act in ((layer.q, turn.queries), (layer.k, turn.keys)):
            linear = model.get_submodule(name)
            linear.weight.copy_(act(linear.weight))
        assert (model(tokens()).logits - before).abs().max() > 1e-3


def test_biases_of_output_and_down_projections_are_divided_by_the_scale_too():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=262, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attention_bias=True, mlp_bias=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).double().eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model = exact(model)
    for names in (("residual_scale",), ("rotate",), TRANSFORMS):
        assert shaken(FPTQuantizer(model, only(names))).difference(tokens()) < 1e-9


def test_tokens_over_eight_decades_are_exact_and_the_stream_stays_small():
    model = awkward("llama")
    with torch.no_grad():
        rows = model.get_input_embeddings().weight
        rows *= torch.logspace(-4, 4, len(rows), dtype=torch.float64)[:, None]
    ids = torch.arange(0, 240, 5)[None]
    fpt = FPTQuantizer(model, only(("residual_scale",)))
    assert fpt.difference(ids) < 1e-9
    norms = [n.name for layer in fpt.host.layers for n in (layer.attention_norm, layer.mlp_norm)]
    largest = {}
    for who, net in (("given", model), ("fpt", fpt.model)):
        seen = []
        handles = [
            net.get_submodule(name).register_forward_pre_hook(
                lambda m, args, seen=seen: seen.append(args[0].abs().max())
            )
            for name in norms
        ]
        net(ids)
        largest[who] = max(seen)
        for handle in handles:
            handle.remove()
    assert largest["given"] > 1000
    assert largest["fpt"] <= fpt.host.hidden**0.5  # all of a token's unit mean square in one channel


def test_epsilon_is_divided_by_the_square_of_the_scale():
    """With the epsilon left alone, tokens of tiny norm would come out wrong."""
    model = awkward("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1e-4)
    fpt = FPTQuantizer(model, only(("residual_scale",)))
    assert fpt.difference(tokens()) < 1e-9
    for module in fpt.model.modules():
        if hasattr(module, "eps") and hasattr(module, "scaling"):
            module.scaling = None
    assert fpt.difference(tokens()) > 1e-3


def test_a_token_that_is_zero_stays_finite():
    model = awkward("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[3] = 0
    assert FPTQuantizer(model).difference(torch.tensor([[3, 3, 5]])) < 1e-9


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("rotary", [8, 4])
def test_attention_logits_survive_rope_with_two_query_heads_a_key_head(layout, rotary):
    generator = torch.Generator().manual_seed(0)
    kv, heads, size, width, length = 3, 6, 8, 10, 5
    transform = PreRopeTransform(kv, heads, size, rotary, layout=layout)
    with torch.no_grad():
        for parameter in transform.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    draw = {"generator": generator, "dtype": torch.float64}
    x, wq, wk = (
        torch.randn(length, width, **draw),
        torch.randn(heads * size, width, **draw),
        torch.randn(kv * size, width, **draw),
    )

    def rope(v):
        v = v.clone()
        angle = torch.arange(length)[:, None] * 0.9 ** torch.arange(rotary // 2)
        first, second = (
            (slice(0, rotary // 2), slice(rotary // 2, rotary))
            if layout == "half"
            else (slice(0, rotary, 2), slice(1, rotary, 2))
        )
        a, b = v[..., first].clone(), v[..., second].clone()
        v[..., first], v[..., second] = a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()
        return v

    def logits(wq, wk):
        q = rope((x @ wq.T).view(length, heads, size).transpose(0, 1))
        k = rope((x @ wk.T).view(length, kv, size).transpose(0, 1)).repeat_interleave(heads // kv, 0)
        return q @ k.mT

    plain, made = logits(wq, wk), logits(transform.queries(wq), transform.keys(wk))
    torch.testing.assert_close(made, plain, rtol=0, atol=1e-11)
    assert (transform.keys(wk) - wk).abs().max() > 0.5


def test_the_value_matrix_and_its_inverse_multiply_to_one_and_rotations_do_not_scale():
    for form in ("full", "rotation"):
        transform = ValueTransform(2, 4, 8, form=form, initial="hadamard")
        with torch.no_grad():
            for parameter in transform.parameters():
                parameter.add_(
                    torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
                )
        product = transform.matrix() @ transform.inverse()
        torch.testing.assert_close(product, torch.eye(8, dtype=torch.float64).expand(2, 8, 8), rtol=0, atol=1e-10)
        spread = torch.linalg.svdvals(transform.matrix())
        assert bool(((spread - 1).abs().max() < 1e-10) == (form == "rotation"))


def test_tied_embeddings_are_untied_in_the_copies_and_stay_tied_in_the_model(tmp_path):
    model = tied()
    fpt = shaken(FPTQuantizer(model, FPTConfig.mergeable()))
    assert fpt.host.tied
    assert fpt.difference(tokens()) < 1e-4
    plain = fpt.merge()
    plain.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not again.config.tie_word_embeddings
    assert again.lm_head.weight is not again.get_input_embeddings().weight
    torch.testing.assert_close(again(tokens()).logits, model(tokens()).logits, rtol=0, atol=1e-4)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert model.config.tie_word_embeddings


def tied():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=262, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "gemma3"])
def test_the_merged_model_is_a_plain_one_and_computes_the_same(kind, tmp_path):
    model = awkward(kind)
    fpt = shaken(FPTQuantizer(model, FPTConfig.mergeable(unsupported="skip")))
    plain = fpt.merge()
    assert type(plain) is type(model)
    assert [name for name, _ in plain.named_modules()] == [name for name, _ in model.named_modules()]
    assert (plain(tokens()).logits - model(tokens()).logits).abs().max() < 1e-9


def test_merging_in_float64_and_storing_in_bfloat16_costs_no_more_than_the_rounding():
    model = awkward("llama", dtype=torch.float32)
    fpt = shaken(FPTQuantizer(model, FPTConfig.mergeable()), size=0.2)
    half = fpt.merge(torch.bfloat16)
    assert next(half.parameters()).dtype == torch.bfloat16
    once = fpt.merge(torch.float64)
    for (name, low), (_, high) in zip(half.named_parameters(), once.named_parameters(), strict=True):
        assert torch.equal(low, high.to(torch.bfloat16)), name
    stored = fpt.given.to(torch.bfloat16)
    assert FPTQuantizer(stored).difference(tokens()) < 0.1 * stored(tokens()).logits.detach().float().std()


def test_padding_cache_and_generation_are_as_before():
    model = awkward("llama", dtype=torch.float32)
    fpt = shaken(FPTQuantizer(model))
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    found, expected = (net(ids, attention_mask=mask).logits[mask.bool()] for net in (fpt.model, model))
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-3)
    made, wanted = (net.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0) for net in (fpt.model, model))
    assert torch.equal(made, wanted)


def test_sliding_windows_are_kept():
    model = awkward("mistral", sliding_window=4)
    assert shaken(FPTQuantizer(model)).difference(tokens()) < 1e-9


def test_eager_attention_is_intercepted_as_well():
    model = awkward("llama")
    model.set_attn_implementation("eager")
    fpt = shaken(FPTQuantizer(model))
    assert fpt.difference(tokens()) < 1e-6  # transformers' eager attention takes its softmax in float32
    assert fpt.given.config._attn_implementation == "eager"


def test_quarots_transform_of_queries_and_keys_preserves_too():
    assert shaken(FPTQuantizer(awkward("llama"), FPTConfig(qk_hadamard=True))).difference(tokens()) < 1e-9


def test_the_given_model_is_left_alone():
    model = awkward("llama", dtype=torch.float32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    logits, state = model(tokens()).logits, torch.random.get_rng_state()
    fpt = FPTQuantizer(model).optimize_local(steps=3).calibrate([tokens()]).train_end_to_end([tokens()], steps=2)
    fpt.model(tokens())
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(model(tokens()).logits, logits)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("kind", ["phi3", "gpt_neox", "gpt2", "olmo2", "cohere", "glm"])
def test_architectures_of_another_shape_are_refused_with_a_sentence(kind):
    with pytest.raises(ValueError, match=r"layer 0|not an RMSNorm|separate"):
        FPTQuantizer(tiny_model(kind))


def test_verify_raises_where_something_is_not_exact():
    fpt = FPTQuantizer(awkward("llama", dtype=torch.float32)).verify(tokens())
    with torch.no_grad():
        fpt.model.get_submodule(fpt.host.layers[0].up).weight.mul_(1.5)
    with pytest.raises(RuntimeError, match="are not exact"):
        fpt.verify(tokens())
