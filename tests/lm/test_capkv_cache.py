"""Pruned caches against a reference: the whole cache, with what was dropped masked in every head."""

import contextlib
import copy
import pickle

import pytest
import torch
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import Fp8QuantizedLayer, QuantizedLayer

from cameraready.lm.capkv import CapKVPress, QueryAnchors, prune_by_scores, prune_cache
from cameraready.lm.capkv.anchors import full_attention
from cameraready.lm.capkv.cache import PrunedLayer, contents, pruned_layer
from cameraready.lm.capkv.selection import kept_positions
from cameraready.models import UnknownArchitecture, anatomy, tiny_model

pytestmark = pytest.mark.torch

KINDS = ("llama", "qwen3", "gemma3", "phi3", "gpt_neox", "glm")


def made(kind, **options):
    layers = 6 if kind == "gemma3" else 2
    window = {"sliding_window": 8} if kind == "gemma3" else {}
    return tiny_model(kind, seed=3, n_layers=layers, **window, **options)


def tokens(batch, length, seed=0):
    return torch.randint(0, 250, (batch, length), generator=torch.Generator().manual_seed(seed))


def read(model, ids, **options):
    with torch.no_grad(), QueryAnchors(model, **options.pop("anchor", {})) as anchors:
        cache = model(ids, use_cache=True, **options).cache
    return cache, anchors


@contextlib.contextmanager
def masked(model, kept):
    """The model on a whole cache, where layer i sees, of the context, what `kept[i]` (B, Hkv, T) says, and all that is newer."""
    handles = []
    for layer in full_attention(anatomy(model)):
        seen = kept[layer.index].repeat_interleave(layer.attention.group_size, dim=1)

        def hook(module, args, kwargs, seen=seen):
            hidden = kwargs.get("hidden_states", args[0] if args else None)
            new = hidden.shape[1]
            total = (
                next(v for v in kwargs.values() if isinstance(v, DynamicCache)).get_seq_length(module.layer_idx) + new
            )
            mask = torch.full((*seen.shape[:2], new, total), torch.finfo(hidden.dtype).min)
            for i in range(new):
                mask[:, :, i, : total - new + i + 1] = 0.0
            hidden_context = ~seen[:, :, None].expand(-1, -1, new, -1)
            mask[..., : seen.shape[-1]].masked_fill_(hidden_context, torch.finfo(hidden.dtype).min)
            return args, {**kwargs, "attention_mask": mask}

        handles.append(layer.attention.module.register_forward_pre_hook(hook, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def kept_by(press, cache, anchors, real=None):
    kept = {}
    for index, at in anchors.places():
        keys, values = contents(cache.layers[at])
        scores = press.token_scores(anchors[index], keys, values, real)
        positions = kept_positions(scores, press.n_kept(keys.shape[2]))
        kept[index] = torch.zeros(scores.shape, dtype=torch.bool).scatter_(-1, positions, True)
    return kept


@pytest.mark.parametrize("selection", ["topk", "greedy"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_pruned_cache_goes_on_as_the_whole_one_with_what_was_dropped_masked(kind, selection):
    model, ids = made(kind), tokens(2, 40)
    cache, anchors = read(model, ids[:, :30])
    pruned = prune_cache(cache, anchors, 0.6, selection=selection)
    kept = kept_by(CapKVPress(0.6, selection=selection), cache, anchors)
    assert all(each.sum(-1).eq(12).all() for each in kept.values())
    with torch.no_grad():
        found = model(ids[:, 30:], cache=pruned).logits
        with masked(model, kept):
            expected = model(ids[:, 30:], cache=cache).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_left_padding_stays_hidden_and_real_tokens_keep_their_positions(kind):
    model = made(kind)
    long, short = tokens(1, 40, seed=1), tokens(1, 22, seed=2)
    padded = torch.cat([long, torch.cat([torch.zeros(1, 18, dtype=torch.long), short], dim=1)])
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[1, :18] = 0
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    cache, anchors = read(model, padded[:, :32], attention_mask=mask[:, :32], position_ids=positions[:, :32])
    pruned = prune_cache(cache, anchors, 0.7)  # 9 pairs a head
    with torch.no_grad():
        both = model(padded[:, 32:], attention_mask=mask, position_ids=positions[:, 32:], cache=pruned).logits
    for row, ids, ratio in ((0, long, 0.7), (1, short, 1 - 9.5 / 14)):
        alone, its_anchors = read(model, ids[:, :-8])
        small = prune_cache(alone, its_anchors, ratio)
        assert small.layers[its_anchors.places()[0][1]].keys.shape[2] == 9
        with torch.no_grad():
            torch.testing.assert_close(
                both[row : row + 1], model(ids[:, -8:], cache=small).logits, rtol=1e-4, atol=1e-5
            )


def test_a_row_shorter_than_the_budget_keeps_all_of_itself_and_hides_its_padding():
    model = made("llama")
    short = tokens(1, 13, seed=2)
    padded = torch.cat([tokens(1, 40, seed=1), torch.cat([torch.full((1, 27), 9), short], dim=1)])
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[1, :27] = 0
    found = generated(model, padded, CapKVPress(0.5), attention_mask=mask)  # 20 pairs a head, 13 of them real
    alone = model.generate(short, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    assert found[1, 27:].tolist() == alone[0].tolist()


def generated(model, ids, press=None, **options):
    with press(model) if press else contextlib.nullcontext():
        return model.generate(ids, max_new_tokens=6, min_new_tokens=6, do_sample=False, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_ratio_zero_changes_nothing(kind):
    model, ids = made(kind), tokens(2, 30)
    assert torch.equal(generated(model, ids), generated(model, ids, CapKVPress(0.0)))
    cache, anchors = read(model, ids)
    assert prune_cache(cache, anchors, 0.0) is cache


@pytest.mark.parametrize("kind", KINDS)
def test_the_press_generates_what_the_pruned_cache_does_token_by_token(kind):
    model, ids = made(kind), tokens(2, 30)
    found = generated(model, ids, CapKVPress(0.5))
    cache, anchors = read(model, ids)
    pruned = prune_cache(cache, anchors, 0.5)
    with torch.no_grad():
        token = model(ids).logits[:, -1:].argmax(-1)  # the prompt itself is read before anything is dropped
        for step in range(6):
            assert torch.equal(found[:, 30 + step], token[:, 0])
            positions = torch.full((2, 1), 30 + step)
            token = model(token, cache=pruned, position_ids=positions).logits[:, -1:].argmax(-1)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_generate_takes_the_pruned_cache_of_a_context_with_context_and_question(kind):
    model, ids = made(kind), tokens(1, 36)
    cache, anchors = read(model, ids[:, :30])
    pruned = prune_cache(cache, anchors, 0.5)
    assert pruned.get_seq_length() == 30
    expected, current = [], prune_cache(cache, anchors, 0.5)
    with torch.no_grad():
        token = model(ids[:, 30:], cache=current).logits[:, -1:].argmax(-1)
        for step in range(6):
            expected.append(token.item())
            token = model(token, cache=current, position_ids=torch.tensor([[36 + step]])).logits[:, -1:].argmax(-1)
    assert generated(model, ids, cache=pruned)[0, 36:].tolist() == expected
    again = prune_cache(cache, anchors, 0.5)  # the whole cache was left as it was
    assert generated(model, ids, attention_mask=torch.ones_like(ids), cache=again)[0, 36:].tolist() == expected


def test_only_full_attention_is_pruned():
    model, ids = made("gemma3"), tokens(1, 30)
    cache, anchors = read(model, ids)
    pruned = prune_cache(cache, anchors, 0.5)
    windows = [layer.attention.sliding_window for layer in anatomy(model).layers]
    assert None in windows
    assert any(windows)
    for layer, before, window in zip(pruned.layers, cache.layers, windows, strict=True):
        assert isinstance(layer, PrunedLayer) == (window is None)
        assert torch.equal(layer.keys, before.keys) == (window is not None)
    all_sliding = tiny_model("mistral", sliding_window=8)
    with pytest.raises(UnknownArchitecture, match="nothing to prune"), CapKVPress(0.5)(all_sliding):
        pass


def test_short_inputs_come_back_unchanged():
    model, ids = made("llama"), tokens(1, 4)
    cache, anchors = read(model, ids)
    assert prune_cache(cache, anchors, 0.9) is cache
    assert torch.equal(generated(model, ids, CapKVPress(0.9)), generated(model, ids))
    assert generated(model, tokens(1, 1), CapKVPress(0.9)).shape == (1, 7)


# --- heads of different length --------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:CapKVPress prunes")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_heads_of_different_length_attend_to_their_own_tokens_alone(kind, attention):
    model, ids = made(kind, attention=attention), tokens(2, 36)
    cache, anchors = read(model, ids[:, :30])
    press = CapKVPress(0.6, head_budgets="adaptive", safeguard=0.1)
    kept, ragged = {}, False
    with press(model), torch.no_grad():
        small = model(ids[:, :30], use_cache=True).cache
        for index, at in anchors.places():
            layer = small.layers[at]
            assert layer.valid.sum() == 2 * 12 * layer.keys.shape[1]
            ragged |= not layer.valid.all()
            whole = contents(cache.layers[at])[0]
            same = (layer.keys.unsqueeze(3) == whole.unsqueeze(2)).all(-1) & layer.valid.unsqueeze(-1)
            kept[index] = same.any(dim=2)
        found = torch.cat([model(ids[:, 30:33], cache=small).logits, model(ids[:, 33:], cache=small).logits], dim=1)
    assert ragged
    with masked(model, kept), torch.no_grad():
        expected = model(ids[:, 30:], cache=cache).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(RuntimeError, match="inside the with block"), torch.no_grad():
        model(ids[:, :1], cache=small)


@pytest.mark.filterwarnings("ignore:CapKVPress prunes")
def test_adaptive_heads_see_no_padding_of_any_turn():
    model = made("llama")
    ids = tokens(3, 40)
    mask = torch.ones(3, 40, dtype=torch.long)
    mask[1, :7], mask[2, :33] = 0, 0
    later = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1], [1, 1, 1, 1]])
    whole = torch.cat([mask, later], dim=1)
    positions = (whole.cumsum(-1) - 1).clamp_min(0)
    more = tokens(3, 4, seed=1)
    with CapKVPress(0.5, head_budgets="adaptive")(model), torch.no_grad():
        small = model(ids, attention_mask=mask, position_ids=positions[:, :40], use_cache=True).cache
        found = model(more, attention_mask=whole, position_ids=positions[:, 40:], cache=small).logits
    cache, _ = read(model, ids, attention_mask=mask, position_ids=positions[:, :40])
    kept = {}
    for at, layer in enumerate(small.layers):
        keys = layer.keys[:, :, : layer.stored]
        same = (keys.unsqueeze(3) == cache.layers[at].keys.unsqueeze(2)).all(-1) & layer.valid.unsqueeze(-1)
        kept[at] = same.any(dim=2) & mask.bool()[:, None]
        assert kept[at][2].sum(-1).tolist() == [7, 7]
    real = torch.cat([mask, later], dim=1).bool()
    for row in range(3):  # row by row, without padding
        alone, _ = read(model, ids[row : row + 1, mask[row].bool()])
        rows = {at: each[row : row + 1, :, mask[row].bool()] for at, each in kept.items()}
        with masked(model, rows), torch.no_grad():
            expected = model(more[row : row + 1, later[row].bool()], cache=alone).logits
        torch.testing.assert_close(found[row : row + 1, real[row, 40:]], expected, rtol=1e-4, atol=1e-4)


def test_adaptive_heads_refuse_an_attention_without_masks():
    model = made("llama")
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="attn_implementation='sdpa'"), CapKVPress(0.5, head_budgets="adaptive")(model):
        pass


# --- what a cache can do after pruning ------------------------------------------------------------------------------------


def test_beams_and_rows_are_reordered_with_their_masks():
    cache = DynamicCache()
    drawn = torch.randn(3, 2, 5, 4, generator=torch.Generator().manual_seed(0))
    cache.update(drawn, drawn, 0)
    positions, valid = torch.tensor([0, 2, 4]).expand(3, 2, 3), drawn[:, :, :3, 0] > 0
    small = pruned_layer(cache.layers[0], positions, valid)
    keys = small.keys.clone()
    small.reorder_cache(torch.tensor([2, 0, 0]))
    assert torch.equal(small.keys, keys[[2, 0, 0]])
    assert torch.equal(small.valid, valid[[2, 0, 0]])
    small.batch_repeat_interleave(2)
    small.batch_select_indices(torch.tensor([1, 5]))
    assert torch.equal(small.valid, valid[[2, 0, 0]].repeat_interleave(2, dim=0)[[1, 5]])


def test_only_what_came_after_pruning_can_be_cropped():
    model, ids = made("llama"), tokens(1, 40)
    cache, anchors = read(model, ids[:, :30])
    pruned = prune_cache(cache, anchors, 0.5)
    with torch.no_grad():
        once = model(ids[:, 30:], cache=pruned).logits
        pruned.crop(-10)
        torch.testing.assert_close(model(ids[:, 30:], cache=pruned).logits, once)
    with pytest.raises(ValueError, match="10 of them"):
        pruned.crop(-11)


def test_beam_search_works_on_pruned_caches():
    model, ids = made("llama"), tokens(1, 30)
    with CapKVPress(0.5)(model):
        found = model.generate(ids, num_beams=3, max_new_tokens=5, do_sample=False)
    assert found.shape[0] == 1
    cache, _ = read(model, ids)
    # All that there is to keep gives the same object.
    by_scores = prune_by_scores(
        cache, {0: torch.arange(30.0).expand(1, 2, 30), 1: torch.arange(30.0).expand(1, 2, 30)}, 30
    )
    assert by_scores is cache


def test_quantised_caches_keep_their_stored_bits():
    model, ids = made("llama"), tokens(1, 30)
    cache, anchors = read(model, ids)
    quantised = DynamicCache()
    quantised.layers = [Fp8QuantizedLayer() for _ in cache.layers]
    for new, old in zip(quantised.layers, cache.layers, strict=True):
        new.update(old.keys, old.values)
    pruned = prune_cache(quantised, anchors, 0.5)
    for small, whole in zip(pruned.layers, quantised.layers, strict=True):
        assert contents(small)[0].shape[2] == 15
        present = (contents(small)[0].unsqueeze(3) == contents(whole)[0].unsqueeze(2)).all(-1).any(-1)
        assert present.all()
        assert small.get_seq_length() == 30
    with torch.no_grad():
        found = model(ids[:, :3], cache=pruned).logits
    assert found.isfinite().all()
    assert pruned.layers[0].get_seq_length() == 33


class Rounded(QuantizedLayer):
    """Entries in steps of 1/64 as 16-bit integers: a backend of groups without another package."""

    def _quantize(self, tensor, axis):
        return (tensor * 64).round().to(torch.int16)

    def _dequantize(self, stored):
        return stored.float() / 64


def test_caches_of_quantised_groups_are_quantised_anew():
    model, ids = made("llama"), tokens(1, 40)
    cache, anchors = read(model, ids[:, :30])
    quantised = DynamicCache()
    quantised.layers = [Rounded(residual_length=4) for _ in cache.layers]
    for new, old in zip(quantised.layers, cache.layers, strict=True):
        new.update(old.keys[:, :, :28], old.values[:, :, :28])
        new.update(old.keys[:, :, 28:], old.values[:, :, 28:])  # two pairs wait at full precision
    pruned = prune_cache(quantised, anchors, 0.5)
    plain = DynamicCache()
    for index, layer in enumerate(quantised.layers):
        plain.update(*contents(layer), index)
    expected = prune_cache(plain, anchors, 0.5)
    for one, other in zip(pruned.layers, expected.layers, strict=True):
        assert one.get_seq_length() == 30
        torch.testing.assert_close(contents(one)[0], other.keys, atol=1 / 128, rtol=0.0)
    with torch.no_grad():
        found = model(ids[:, 30:], cache=pruned).logits
        torch.testing.assert_close(found, model(ids[:, 30:], cache=expected).logits, atol=0.3, rtol=0.0)


# --- anchors ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt_neox", "glm", "gpt2"])
@pytest.mark.parametrize("anchor", ["history", "window"])
def test_the_anchor_is_the_mean_over_queries_and_future_positions(kind, anchor):
    from cameraready.models import capture
    from cameraready.models.structure import apply_rotary

    model, ids = made(kind), tokens(2, 20)
    with capture(model, "attention_input") as seen:
        _, anchors = read(model, ids, anchor={"anchor": anchor, "window": 5, "n_future_positions": 7, "n_sink": 3})
    parts = anatomy(model)
    for index, _ in anchors.places():
        attention = parts.layers[index].attention
        queries = attention.queries(seen.last("attention_input", index))[:, :, -5 if anchor == "window" else 3 :]
        turned = []
        for position in range(20, 27):
            if attention.rotary is None:
                turned.append(queries)
                continue
            cos, sin = parts.rotary(torch.full((2, queries.shape[2]), position), layer=index)
            turned.append(apply_rotary(queries, cos, sin, attention.rotary))
        torch.testing.assert_close(anchors[index], torch.stack(turned).mean(dim=(0, 3)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("anchor", ["history", "window"])
@pytest.mark.parametrize("n_future_positions", [0, 16])
def test_a_context_read_in_pieces_has_the_same_anchors(anchor, n_future_positions):
    model, ids = made("qwen3"), tokens(2, 30)
    options = {"anchor": anchor, "n_future_positions": n_future_positions, "window": 9}
    _, whole = read(model, ids, anchor=options)
    with torch.no_grad(), QueryAnchors(model, **options) as pieces:
        cache = DynamicCache(config=model.config)
        for start, stop in ((0, 3), (3, 25), (25, 30)):
            model(ids[:, start:stop], cache=cache)
    for index in whole:
        torch.testing.assert_close(pieces[index], whole[index], rtol=1e-4, atol=1e-5)


def test_assisted_generation_is_refused():
    model, ids = made("llama"), tokens(1, 20).repeat(1, 3)
    options = {"max_new_tokens": 8, "do_sample": False, "prompt_lookup_num_tokens": 3}
    with pytest.raises(ValueError, match="can be cropped"), CapKVPress(0.5)(model):
        model.generate(ids, **options)
    cache, anchors = read(model, ids[:, :-2])
    with pytest.raises(ValueError, match="can be cropped"):
        model.generate(ids, cache=prune_cache(cache, anchors, 0.5), **options)


def test_padding_on_the_right_is_refused():
    model, ids = made("llama"), tokens(2, 30)
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[1, 25:] = 0
    with pytest.raises(ValueError, match="padded on the left"), CapKVPress(0.5)(model), torch.no_grad():
        model(ids, attention_mask=mask, use_cache=True)
    with pytest.raises(ValueError, match="padded on the left"):
        read(model, ids, attention_mask=mask)


def test_a_prompt_in_pieces_is_warned_of_once():
    model, ids = made("llama"), tokens(1, 60)
    with CapKVPress(0.5)(model), pytest.warns(UserWarning, match="kept whole") as warned:
        model.generate(ids, prefill_chunk_size=16, max_new_tokens=3, do_sample=False)
    assert len([each for each in warned if "kept whole" in str(each.message)]) == 1


def test_options_set_later_are_checked_on_entering():
    press = CapKVPress(0.5)
    press.compression_ratio = 1.5
    with pytest.raises(ValueError, match="share of tokens to drop"), press(made("llama")):
        pass


def test_two_presses_on_one_cache_are_refused():
    model, ids = made("llama"), tokens(1, 30)
    with (
        pytest.raises(ValueError, match="two presses"),
        CapKVPress(0.5)(model),
        CapKVPress(0.25)(model),
        torch.no_grad(),
    ):
        model(ids, use_cache=True)


def test_gradients_and_inference_mode_are_no_matter():
    model, ids = made("llama"), tokens(1, 30)
    with torch.inference_mode(), QueryAnchors(model) as anchors:
        cache = model(ids, use_cache=True).cache
    pruned = prune_cache(cache, anchors, 0.5)
    with CapKVPress(0.5)(model):
        small = model(ids, use_cache=True).cache
    for one, other in zip(pruned.layers, small.layers, strict=True):
        torch.testing.assert_close(one.keys, other.keys.detach())


# --- errors -------------------------------------------------------------------------------------------------------------------


def test_caches_that_do_not_fit_are_refused_with_a_sentence():
    model, ids = made("llama"), tokens(1, 30)
    cache, anchors = read(model, ids)
    once = prune_cache(cache, anchors, 0.5)
    with pytest.raises(ValueError, match="pruned before"):
        prune_cache(once, anchors, 0.5)
    with torch.no_grad():
        longer = model(torch.cat([ids, ids], dim=1), use_cache=True).cache
    with pytest.raises(ValueError, match="holds 60 tokens, but the anchors were recorded over 30"):
        prune_cache(longer, anchors, 0.5)
    with pytest.raises(ValueError, match="anchors are empty"):
        prune_cache(cache, QueryAnchors(model), 0.5)
    static = StaticCache(config=model.config, max_cache_len=64)
    with pytest.raises(ValueError, match="dynamic caches"), CapKVPress(0.5)(model), torch.no_grad():
        model(ids, cache=static)
    with torch.no_grad():
        assert model(ids).logits.isfinite().all()


def test_things_that_are_no_cache_and_no_anchors_are_named():
    model, ids = made("llama"), tokens(1, 30)
    cache, anchors = read(model, ids)
    with pytest.raises(TypeError, match="not list"):
        prune_cache([], anchors, 0.5)
    with pytest.raises(TypeError, match="not dict"):
        prune_cache(cache, dict(anchors), 0.5)


@pytest.mark.parametrize(
    ("scores", "sentence"),
    [
        ({0: torch.zeros(1, 1, 30), 1: torch.zeros(1, 2, 30)}, r"\(1, 2, 30\) like its keys, got \(1, 1, 30\)"),
        ({0: torch.zeros(1, 2, 20), 1: torch.zeros(1, 2, 30)}, r"got \(1, 2, 20\)"),
        ({0: torch.full((1, 2, 30), torch.nan), 1: torch.zeros(1, 2, 30)}, "hold NaN"),
        ({9: torch.zeros(1, 2, 30)}, "layers 0 to 1"),
        ({1: torch.zeros(1, 2, 30)}, "layers 0 would keep the whole context"),
    ],
)
def test_scores_that_do_not_fit_are_refused(scores, sentence):
    cache, _ = read(made("llama"), tokens(1, 30))
    with pytest.raises(ValueError, match=sentence):
        prune_by_scores(cache, scores, 10)


def test_a_cache_that_holds_sliding_layers_whole_is_refused():
    model, ids = made("gemma3"), tokens(1, 30)
    with torch.no_grad(), QueryAnchors(model) as anchors:
        cache = DynamicCache()
        model(ids, cache=cache)
    with pytest.raises(ValueError, match=r"DynamicCache\(config=model.config\)"):
        prune_cache(cache, anchors, 0.5)
    with (
        pytest.raises(ValueError, match=r"DynamicCache\(config=model.config\)"),
        CapKVPress(0.5)(model),
        torch.no_grad(),
    ):
        model(ids, cache=DynamicCache())


def test_one_recording_is_of_one_context():
    model, ids = made("llama"), tokens(1, 30)
    with torch.no_grad(), QueryAnchors(model) as anchors:
        model(ids, use_cache=True)
        with pytest.raises(ValueError, match="a with block for each context"):
            model(ids, use_cache=True)
        with pytest.raises(RuntimeError, match="recording already"), anchors:
            pass


def test_pruned_caches_are_stored_and_copied():
    model, ids = made("llama"), tokens(1, 40)
    cache, anchors = read(model, ids[:, :30])
    pruned = prune_cache(cache, anchors, 0.5)
    again, twin = pickle.loads(pickle.dumps(pruned)), copy.deepcopy(pruned)
    with torch.no_grad():
        expected = model(ids[:, 30:], cache=pruned).logits
        assert torch.equal(model(ids[:, 30:], cache=again).logits, expected)
        assert torch.equal(model(ids[:, 30:], cache=twin).logits, expected)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"compression_ratio": 1.0}, "share of tokens to drop"),
        ({"compression_ratio": "half"}, "share of tokens to drop"),
        ({"selection": "best"}, "selection is 'topk' or 'greedy'"),
        ({"head_budgets": "free"}, "head_budgets is"),
        ({"anchor": "future"}, "anchor is 'history' or 'window'"),
        ({"window": 0}, "window is a number of tokens"),
        ({"safeguard": 2.0}, "safeguard is a share"),
        ({"sigma": -1.0}, "sigma is a standard deviation"),
    ],
)
def test_bad_options_are_refused_with_a_sentence(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        CapKVPress(**options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_of_sixteen_bits_keep_their_dtype(dtype):
    model, ids = made("llama", dtype=dtype), tokens(1, 30)
    cache, anchors = read(model, ids)
    pruned = prune_cache(cache, anchors, 0.5)
    assert pruned.layers[0].keys.dtype == dtype
    assert anchors[0].dtype == torch.float32
    assert torch.equal(generated(model, ids, CapKVPress(0.0)), generated(model, ids))
