"""Tiny models and the byte-level tokenizer: reproducible, exact, and without a trace in the global state."""

import pytest
import torch

from cameraready.models import tiny_model, tiny_tokenizer
from cameraready.models.tiny import TINY_KINDS, TINY_VOCABULARY

TEXTS = ["plain", " two  spaces\n\ttab", "Grüße, 東京 🎉", "\x00\x7f nul", "<|eos|> inside", "", " ' s 're ## ."]


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_makes_an_exact_round_trip(text):
    tokenizer = tiny_tokenizer()
    ids = tokenizer(text).input_ids
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids[1:]) == text


def test_a_byte_is_its_own_token():
    tokenizer = tiny_tokenizer()
    text = "é€x"
    assert tokenizer(text, add_special_tokens=False).input_ids == list(text.encode())
    assert len(tokenizer) == TINY_VOCABULARY


def test_special_tokens_can_be_left_out():
    bare = tiny_tokenizer(pad=False, bos=False, eos=False, chat_template=False)
    assert (bare.pad_token, bare.bos_token, bare.eos_token, bare.chat_template) == (None, None, None, None)
    assert bare("ab").input_ids == [97, 98]
    assert len(bare) == len(tiny_tokenizer())


def test_the_chat_template_names_roles_and_asks_for_an_answer():
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    text = tiny_tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|system|>be brief\n<|user|>hi\n<|assistant|>"


def test_a_batch_is_padded_on_the_left():
    batch = tiny_tokenizer()(["a", "abc"], padding=True, return_tensors="pt")
    assert batch.attention_mask.tolist() == [[0, 0, 1, 1], [1, 1, 1, 1]]


@pytest.mark.parametrize("kind", TINY_KINDS)
def test_weights_follow_the_seed_and_the_global_generator_stays(kind):
    before = torch.random.get_rng_state()
    one, again, other = (tiny_model(kind, seed=seed).state_dict() for seed in (3, 3, 4))
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(one[name], again[name]) for name in one)
    changed = [name for name in one if one[name].ndim > 1 and not torch.equal(one[name], other[name])]
    assert changed


@pytest.mark.parametrize("kind", TINY_KINDS)
def test_sizes_are_those_asked_for(kind):
    model = tiny_model(kind, n_layers=3, hidden=48, heads=6, kv_heads=3, vocab=300, max_positions=64)
    config = model.config
    assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == (3, 48, 6)
    assert (config.vocab_size, config.max_position_embeddings) == (300, 64)
    assert model(torch.zeros(1, 2, dtype=torch.long)).logits.shape == (1, 2, 300)
    assert not model.training


def test_attention_is_uniform_without_scale_and_sharp_with_it():
    ids = torch.arange(40)[None] + 40
    entropies = []
    for scale in (0.0, 1.0, 4.0):
        model = tiny_model("qwen3", scale=scale, attention="eager")
        with torch.no_grad():
            weights = model(ids, output_attentions=True).attentions[0][0, :, -1]
        entropies.append(float(-(weights * weights.clamp_min(1e-30).log()).sum(-1).mean()))
    assert entropies[0] == pytest.approx(torch.tensor(40.0).log().item(), rel=1e-5)
    assert entropies[0] > entropies[1] > entropies[2]


@pytest.mark.parametrize("tie", [True, False])
def test_head_and_embedding_are_tied_on_demand(tie):
    model = tiny_model("llama", tie=tie)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tie


def test_half_precision_keeps_the_rotary_frequencies_exact():
    half, full = tiny_model("llama", dtype=torch.bfloat16), tiny_model("llama")
    assert half.dtype == torch.bfloat16
    assert half(torch.tensor([[1, 2]])).logits.dtype == torch.bfloat16
    assert torch.equal(half.model.rotary_emb.inv_freq, full.model.rotary_emb.inv_freq)


def test_biases_and_windows_where_the_family_has_them():
    assert tiny_model("llama", attention_bias=True).model.layers[0].self_attn.q_proj.bias.abs().sum() > 0
    assert tiny_model("qwen2").model.layers[0].self_attn.q_proj.bias.abs().sum() > 0
    assert tiny_model("mistral", sliding_window=5).config.sliding_window == 5


def test_generation_runs_with_the_tokenizer():
    model, tokenizer = tiny_model("qwen2"), tiny_tokenizer()
    batch = tokenizer(["one", "another one"], padding=True, return_tensors="pt")
    out = model.generate(**batch, max_new_tokens=4, do_sample=False)
    assert out.shape == (2, batch.input_ids.shape[1] + 4)
    assert torch.equal(out[:, :-4], batch.input_ids)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "lama"}, "no tiny model of the kind 'lama'"),
        ({"hidden": 50, "heads": 4}, "50 features do not divide into 4 heads"),
        ({"heads": 4, "kv_heads": 3}, "4 query heads do not divide among 3"),
        ({"kind": "llama", "sliding_window": 4}, "llama has no sliding window"),
        ({"kind": "qwen2", "attention_bias": False}, "no choice of attention biases"),
        ({"kind": "gpt2", "head_dim": 32}, "head_dim must be 16"),
    ],
)
def test_wrong_sizes_give_a_sentence(arguments, message):
    with pytest.raises(ValueError, match=message):
        tiny_model(**arguments)
