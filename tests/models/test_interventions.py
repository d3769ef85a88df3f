"""Captures and interventions: what they see and change, and that nothing of them stays however their block ends."""

import gc

import pytest
import torch

from cameraready.models import anatomy, capture, intervene, tiny_model, tiny_tokenizer
from cameraready.models.hooks import SITES, hooks_of

IDS = torch.arange(12).reshape(2, 6) + 60
KINDS = ["llama", "qwen3", "gemma3", "mistral", "phi3", "gpt_neox", "gpt2", "olmo2", "cohere"]


@pytest.fixture(scope="module")
def llama():
    return tiny_model("llama", n_layers=3)


def logits_of(model, ids=IDS):
    with torch.no_grad():
        return model(ids).logits


def double(hidden, _layer):
    return 2 * hidden


@pytest.mark.parametrize("kind", KINDS)
def test_residuals_are_the_hidden_states_that_the_model_reports(kind):
    model = tiny_model(kind, n_layers=3)
    with torch.no_grad(), capture(model, "residual", "layer_input") as seen:
        states = model(IDS, output_hidden_states=True).hidden_states
    for layer in range(3):
        assert torch.equal(seen.last("layer_input", layer), states[layer])
        if layer < 2:  # the last one that the model reports is behind its final norm
            assert torch.equal(seen.last("residual", layer), states[layer + 1])


@pytest.mark.parametrize("kind", ["llama", "mistral", "phi3", "gpt2", "gpt_neox", "cohere"])
def test_the_residual_is_the_sum_of_what_its_parts_add(kind):
    model = tiny_model(kind)
    with torch.no_grad(), capture(model, "layer_input", "attention_output", "mlp_output", "residual") as seen:
        model(IDS)
    for layer in range(2):
        parts = [seen.last(site, layer) for site in ("layer_input", "attention_output", "mlp_output")]
        torch.testing.assert_close(sum(parts), seen.last("residual", layer))


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_site_of_every_family_can_be_replaced(kind, site):
    model = tiny_model(kind)
    plain = logits_of(model)
    with intervene(model, {site: lambda hidden, _layer: hidden}):
        assert torch.equal(logits_of(model), plain)
    noise = torch.randn(64, generator=torch.Generator().manual_seed(0))
    with intervene(model, {site: lambda hidden, _layer: hidden + noise}):
        assert not torch.allclose(logits_of(model), plain, atol=1e-3)
    assert torch.equal(logits_of(model), plain)
    assert hooks_of(model) == 0


@pytest.mark.parametrize("kind", ["llama", "gpt_neox", "phi3"])
def test_a_layer_whose_parts_give_nothing_passes_its_input_on(kind):
    model = tiny_model(kind)
    nothing = {site: lambda hidden, _layer: torch.zeros_like(hidden) for site in ("attention_output", "mlp_output")}
    with intervene(model, nothing), torch.no_grad(), capture(model, "layer_input", "residual") as seen:
        model(IDS)
    for layer in range(2):
        assert torch.equal(seen.last("residual", layer), seen.last("layer_input", layer))


@pytest.mark.parametrize("asked_before", [False, True])
def test_hidden_states_inside_an_intervention_are_those_it_made(asked_before):
    """transformers keeps its collecting hooks from the first time on; whether there was one makes no difference."""
    model = tiny_model("llama")
    ids = torch.arange(3, 9)[None]
    with torch.no_grad():
        if asked_before:
            model(ids, output_hidden_states=True)
        with capture(model, "residual") as plain:
            model(ids)
        with intervene(model, {"residual": lambda hidden, _: 2 * hidden}, layers=0):
            states = model(ids, output_hidden_states=True).hidden_states
    assert torch.equal(states[1], 2 * plain.last("residual", 0))


def test_a_replaced_residual_decides_what_follows(llama):
    parts = anatomy(llama)
    target = torch.randn(2, 6, 64, generator=torch.Generator().manual_seed(0))
    with intervene(parts, {"residual": lambda _hidden, _layer: target}, layers=-1):
        assert torch.equal(logits_of(llama), parts.logits(target))


def test_only_chosen_layers_are_touched(llama):
    touched = []
    with intervene(llama, {"residual": lambda hidden, layer: touched.append(layer) or hidden}, layers=[0, -1]):
        logits_of(llama)
    assert touched == [0, 2]
    with capture(llama, "residual", layers=1) as seen:
        logits_of(llama)
    assert list(seen["residual"]) == [1]


def test_captures_inside_see_the_change_and_captures_outside_what_was_there(llama):
    with (
        capture(llama, "residual", layers=0) as outside,
        intervene(llama, {"residual": double}, layers=0),
        capture(llama, "residual", layers=0) as inside,
    ):
        logits_of(llama)
    assert torch.equal(inside.last("residual", 0), 2 * outside.last("residual", 0))


def test_interventions_nest_the_outer_first(llama):
    with capture(llama, "residual", layers=0) as plain:
        logits_of(llama)
    with (
        intervene(llama, {"residual": double}, layers=0),
        intervene(llama, {"residual": lambda hidden, _layer: hidden + 1}, layers=0),
        capture(llama, "residual", layers=0) as seen,
    ):
        logits_of(llama)
    assert torch.equal(seen.last("residual", 0), 2 * plain.last("residual", 0) + 1)


def test_one_block_may_be_entered_again_within_itself(llama):
    doubled = intervene(llama, {"residual": double}, layers=0)
    kept = capture(llama, "residual", layers=0)
    with capture(llama, "residual", layers=0) as plain:
        logits_of(llama)
    with doubled, doubled, kept as seen:
        logits_of(llama)
        with kept as again:
            logits_of(llama)
        logits_of(llama)
    assert torch.equal(seen.last("residual", 0), 4 * plain.last("residual", 0))
    assert (len(seen["residual"][0]), len(again["residual"][0])) == (3, 1)
    assert hooks_of(llama) == 0


class Stop(BaseException):
    pass


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, Stop, GeneratorExit])
def test_nothing_stays_after_an_exception(llama, error):
    plain = logits_of(llama)

    def run():
        with capture(llama, *SITES), intervene(llama, {"mlp_output": double}):
            assert not torch.equal(logits_of(llama), plain)
            raise error

    with pytest.raises(error):
        run()
    assert hooks_of(llama) == 0
    assert torch.equal(logits_of(llama), plain)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_nothing_stays_after_an_exception_inside_the_model(llama, error):
    def broken(_hidden, _layer):
        raise error

    with pytest.raises(error), intervene(llama, {"attention_output": broken}), capture(llama, "residual"):
        logits_of(llama)
    assert hooks_of(llama) == 0


def test_nothing_stays_after_a_generator_is_left_early(llama):
    def layers():
        with capture(llama, "residual") as seen:
            logits_of(llama)
            yield from seen["residual"]

    running = layers()
    assert next(running) == 0
    assert hooks_of(llama) == 3
    running.close()
    assert hooks_of(llama) == 0
    forgotten = layers()
    next(forgotten)
    del forgotten
    gc.collect()
    assert hooks_of(llama) == 0


def test_nothing_stays_if_entering_breaks_off(llama, monkeypatch):
    taken = []
    original = torch.nn.Module.register_forward_hook

    def interrupted(self, *args, **kwargs):
        taken.append(self)
        if len(taken) == 2:
            raise KeyboardInterrupt
        return original(self, *args, **kwargs)

    kept, changed = capture(llama, "residual"), intervene(llama, {"residual": double})
    monkeypatch.setattr(torch.nn.Module, "register_forward_hook", interrupted)
    for block in (kept, changed):
        taken.clear()
        with pytest.raises(KeyboardInterrupt), block:
            pass
    monkeypatch.undo()
    assert hooks_of(llama) == 0
    with kept as seen:
        logits_of(llama)
    assert len(seen["residual"][0]) == 1


def test_generation_with_a_cache_shows_the_prompt_and_then_one_token_at_a_time(llama):
    tokenizer = tiny_tokenizer()
    batch = tokenizer(["one", "another"], padding=True, return_tensors="pt")
    length = batch.input_ids.shape[1]
    options = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
    with capture(llama, "residual", layers=1) as seen:
        out = llama.generate(**batch, **options)
    assert [tuple(x.shape) for x in seen["residual"][1]] == [(2, length, 64), (2, 1, 64), (2, 1, 64)]
    with capture(llama, "residual", layers=1, keep="last") as latest:
        llama.generate(**batch, **options)
    assert len(latest["residual"][1]) == 1
    assert torch.equal(latest.last("residual", 1), seen.last("residual", 1))
    with intervene(llama, {"residual": lambda hidden, _layer: -hidden}, layers=-1):
        assert not torch.equal(llama.generate(**batch, **options), out)
    assert torch.equal(llama.generate(**batch, **options), out)


def test_a_steered_generation_is_the_same_with_and_without_a_cache(llama):
    direction = 3 * torch.randn(64, generator=torch.Generator().manual_seed(1))
    with intervene(llama, {"residual": lambda hidden, _layer: hidden + direction}, layers=1):
        runs = [
            llama.generate(IDS, max_new_tokens=5, min_new_tokens=5, do_sample=False, use_cache=cache)
            for cache in (True, False)
        ]
    assert torch.equal(*runs)


def test_gradients_flow_through_interventions():
    model = tiny_model("llama", dtype=torch.float64)
    added = torch.zeros(64, dtype=torch.float64, requires_grad=True)
    with intervene(model, {"layer_input": lambda hidden, _layer: hidden + added}, layers=0):
        model(IDS).logits.square().sum().backward()
    # The same shift, given to the model as its embeddings.
    shift = torch.zeros(64, dtype=torch.float64, requires_grad=True)
    model(inputs_embeds=model.get_input_embeddings()(IDS) + shift).logits.square().sum().backward()
    assert added.grad.abs().sum() > 0
    torch.testing.assert_close(added.grad, shift.grad, rtol=1e-12, atol=0)


def test_captured_tensors_with_their_graph_carry_gradients(llama):
    llama.zero_grad()
    with capture(llama, "residual", layers=0, detach=False) as attached, capture(llama, "residual", layers=0) as loose:
        llama(IDS)
    assert not loose.last("residual", 0).requires_grad
    attached.last("residual", 0).sum().backward()
    assert llama.model.layers[0].mlp.up_proj.weight.grad.abs().sum() > 0
    assert llama.model.layers[1].mlp.up_proj.weight.grad is None
    llama.zero_grad()


def test_what_was_captured_is_a_copy(llama):
    with capture(llama, "residual", layers=1) as plain:
        logits_of(llama)
    with capture(llama, "residual", layers=1) as seen:
        handle = llama.model.layers[1].register_forward_hook(lambda _module, _args, output: output.zero_())
        logits_of(llama)
    handle.remove()
    assert torch.equal(seen.last("residual", 1), plain.last("residual", 1))


def test_an_intervention_may_change_what_it_is_given_and_nothing_else(llama):
    def states():
        with torch.no_grad():
            return llama(IDS, output_hidden_states=True).hidden_states

    plain = states()
    with intervene(llama, {"layer_input": lambda hidden, _layer: hidden.zero_()}, layers=1):
        changed = states()
    assert torch.equal(changed[1], plain[1])
    assert not torch.equal(changed[2], plain[2])


def test_parts_of_tensors_can_be_kept_elsewhere(llama):
    with capture(llama, "residual", select=lambda hidden: hidden[:, -1], on="cpu") as seen:
        logits_of(llama)
    assert seen.last("residual", 2).shape == (2, 64)
    seen.clear()
    with pytest.raises(ValueError, match="Nothing passed 'residual' of layer 2 yet"):
        seen.last("residual", 2)


def test_an_intervention_in_another_dtype_takes_the_models():
    model = tiny_model("llama", dtype=torch.bfloat16)
    with (
        intervene(model, {"residual": lambda hidden, _layer: hidden + torch.ones(64)}),
        capture(model, "residual") as seen,
    ):
        assert logits_of(model).dtype == torch.bfloat16
    assert seen.last("residual", 0).dtype == torch.bfloat16


def test_looking_for_parts_inside_a_block_is_neither_seen_nor_changed():
    model, other = tiny_model("llama"), tiny_model("llama")
    kept, changed = capture(model, "residual"), intervene(model, {"attention_output": double})
    model.model.layers[0].extra = torch.nn.Identity()  # so that the parts are looked for anew
    with kept as seen, changed:
        assert anatomy(model).layers[0].attention.verified
        assert seen["residual"][0] == []
    assert anatomy(other).layers[0].attention.verified


def test_an_anatomy_stands_for_its_model(llama):
    with capture(anatomy(llama), "residual") as seen:
        logits_of(llama)
    assert len(seen["residual"]) == 3


@pytest.mark.parametrize(
    ("sites", "options", "message"),
    [
        (["residul"], {}, "no site 'residul'; did you mean residual"),
        (["zzz"], {}, "no site 'zzz'; there are layer_input"),
        ([], {}, "at least one site"),
        (["residual"], {"layers": [3]}, "no layer 3; this model has the layers 0 to 2"),
        (["residual"], {"layers": -4}, "no layer -4"),
        (["residual"], {"layers": []}, "at least one layer"),
        (["residual"], {"keep": "first"}, "'all' or 'last'"),
    ],
)
def test_wrong_sites_and_layers_give_a_sentence(llama, sites, options, message):
    with pytest.raises(ValueError, match=message):
        capture(llama, *sites, **options)
    assert hooks_of(llama) == 0


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda hidden, _layer: hidden[:, :-1], r"at 'mlp_output' of layer 0 returned the shape \(2, 5, 64\)"),
        (lambda _hidden, _layer: None, "at 'mlp_output' of layer 0 returned None; return the new tensor"),
        (lambda hidden, _layer: hidden.tolist(), "returned list"),
        (lambda hidden, _layer: hidden.to("meta"), "returned a tensor on meta"),
    ],
)
def test_wrong_results_of_interventions_give_a_sentence(llama, function, message):
    with pytest.raises(ValueError, match=message), intervene(llama, {"mlp_output": function}):
        logits_of(llama)
    assert hooks_of(llama) == 0


def test_wrong_arguments_give_a_sentence(llama):
    with pytest.raises(TypeError, match="Layers are whole numbers, not '0'"):
        capture(llama, "residual", layers=["0"])
    with pytest.raises(TypeError, match="a mapping of sites to functions"):
        intervene(llama, double)
    with pytest.raises(TypeError, match="at 'residual' is a float, not a function"):
        intervene(llama, {"residual": 2.0})
    with capture(llama, "residual", layers=0) as seen, pytest.raises(ValueError, match="Layer 1 was not captured"):
        seen.last("residual", 1)
    with pytest.raises(KeyError, match="'mlp_output' was not captured"):
        seen["mlp_output"]
