"""Detection and sampling against transformers' own watermark."""

import copy

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import (
    BatchEncoding,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    WatermarkDetector,
    WatermarkingConfig,
    WatermarkLogitsProcessor,
)

from cameraready.lm.watermark_power import WatermarkCalibrator, exact_detect
from cameraready.lm.watermark_power.sampling import left_padded, sampling_options, still_writing
from cameraready.lm.watermark_power.schemes import GreenLists

pytestmark = pytest.mark.torch

VOCAB = 300
CONFIGS = [("lefthash", 1), ("lefthash", 3), ("selfhash", 1), ("selfhash", 2), ("selfhash", 4)]


@pytest.fixture(scope="module")
def model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            bos_token_id=1,
            eos_token_id=2,
        )
        made = LlamaForCausalLM(config).eval()
        made.lm_head.weight.data.mul_(20)
    return made


def texts(n=6, length=60, low=3, seed=0):
    return torch.randint(low, VOCAB, (n, length), generator=torch.Generator().manual_seed(seed))


# --- detection ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scheme", "width"), CONFIGS)
def test_counts_are_those_of_transformers(model, scheme, width):
    config = WatermarkingConfig(
        greenlist_ratio=0.3, bias=2.0, seeding_scheme=scheme, context_width=width, hashing_key=99
    )
    theirs = WatermarkDetector(model.config, "cpu", config)(texts(), return_dict=True)
    mine = exact_detect(texts(), config, model, count_repeats=True)
    np.testing.assert_array_equal(mine.green, theirs.num_green_tokens)
    np.testing.assert_array_equal(mine.scored, theirs.num_tokens_scored)
    assert mine.share == 0.3
    np.testing.assert_allclose(mine.z_score, theirs.z_score, rtol=1e-9)


@pytest.mark.parametrize(("scheme", "width"), CONFIGS)
def test_lists_are_those_that_generation_favours(scheme, width):
    processor = WatermarkLogitsProcessor(
        VOCAB, "cpu", greenlist_ratio=0.4, bias=1.0, hashing_key=12345, seeding_scheme=scheme, context_width=width
    )
    lists = GreenLists(scheme, 0.4, 12345, width, VOCAB)
    grams = texts(n=20, length=lists.context + 1, seed=1)
    for gram in grams:
        prefix = gram if scheme == "selfhash" else gram[:-1]
        favoured = gram[-1] in processor._get_greenlist_ids(prefix)
        assert bool(lists.green(lists.seeds(gram[None]), gram[-1:])[0]) == favoured


def test_keys_of_63_bits_give_the_lists_of_transformers():
    key = 2**62 + 12345
    processor = WatermarkLogitsProcessor(VOCAB, "cpu", greenlist_ratio=0.5, hashing_key=key)
    config = WatermarkingConfig(greenlist_ratio=0.5, hashing_key=key)
    text = texts(n=1, length=20)[0]
    green = sum(bool(text[i + 1] in processor._get_greenlist_ids(text[: i + 1])) for i in range(19))
    assert exact_detect(text, config, VOCAB, count_repeats=True).green[0] == green


def test_what_repeats_is_counted_once():
    config = WatermarkingConfig(greenlist_ratio=0.5, bias=2.0)
    text = [5, 6, 5, 6, 5, 6, 7]  # the pairs 5 6, 6 5 and 6 7
    found = exact_detect(text, config, VOCAB)
    assert found.scored[0] == 3
    assert exact_detect(text, config, VOCAB, count_repeats=True).scored[0] == 6


def test_lefthash_repeats_do_not_hide_behind_a_wider_context():
    # transformers counts (4 5 6) and (9 5 6) as two n-grams, though one list and one token decide both.
    config = WatermarkingConfig(greenlist_ratio=0.5, bias=2.0, context_width=2)
    found = exact_detect([4, 5, 6, 9, 5, 6], config, VOCAB)
    assert found.scored[0] == 3


def test_p_value_is_the_binomial_tail_at_the_realised_share():
    config = WatermarkingConfig(greenlist_ratio=0.2549, bias=2.0)  # 76 of 300
    found = exact_detect(texts(), config, VOCAB)
    assert found.share == 76 / 300
    np.testing.assert_allclose(found.p_value, stats.binom.sf(found.green - 1, found.scored, 76 / 300))


def test_null_p_values_keep_their_level():
    config = WatermarkingConfig(greenlist_ratio=0.25, bias=2.0)
    hits = n = 0
    for key in range(12):
        keyed = WatermarkingConfig(greenlist_ratio=config.greenlist_ratio, bias=2.0, hashing_key=15485863 + 2 * key)
        found = exact_detect(texts(n=250, length=40, seed=key), keyed, VOCAB)
        hits, n = hits + found.is_watermarked(0.05).sum(), n + 250
    assert hits / n <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / n)


def test_texts_of_any_length_and_too_short_ones():
    config = WatermarkingConfig(greenlist_ratio=0.5, bias=2.0)
    found = exact_detect([[5, 6, 7], [8], [], list(range(3, 43))], config, VOCAB)
    np.testing.assert_array_equal(found.scored, [2, 0, 0, 39])
    np.testing.assert_array_equal(found.p_value[1:3], [1.0, 1.0])
    alone = exact_detect(np.arange(3, 43), config, VOCAB)
    assert alone.green[0] == found.green[3]


def test_skipping_the_prompt_still_scores_the_first_new_token():
    config = WatermarkingConfig(greenlist_ratio=0.5, bias=2.0)
    whole = texts(n=1, length=30)
    assert exact_detect(whole, config, VOCAB, skip=10).scored[0] == 20
    assert exact_detect(whole[:, 10:], config, VOCAB).scored[0] == 19
    assert exact_detect(whole, config, VOCAB, skip=10).green[0] == exact_detect(whole[:, 9:], config, VOCAB).green[0]


def test_detection_errors_are_sentences():
    config = WatermarkingConfig(greenlist_ratio=0.5, bias=2.0)
    with pytest.raises(ValueError, match="width of the model's logits"):
        exact_detect([1, 2, 3], config)
    with pytest.raises(ValueError, match="token ids go up to"):
        exact_detect([1, 2, VOCAB], config, VOCAB)
    with pytest.raises(TypeError, match="whole numbers"):
        exact_detect([0.5, 1.5], config, VOCAB)
    with pytest.raises(TypeError, match="WatermarkingConfig or MarkLLM"):
        exact_detect([1, 2], object(), VOCAB)
    with pytest.raises(ValueError, match="neither transformers'"):
        exact_detect([1, 2], {"algorithm_name": "Unigram"}, VOCAB)
    with pytest.raises(ValueError, match="skip"):
        exact_detect([1, 2], config, VOCAB, skip=-1)
    with pytest.raises(TypeError, match=r"pass \.input_ids"):
        exact_detect(BatchEncoding({"input_ids": [[1, 2]]}), config, VOCAB)
    with pytest.raises(ValueError, match="there is no token"):
        exact_detect(np.array([2**63 + 5, 1], dtype=np.uint64), config, VOCAB)
    with pytest.raises(ValueError, match="64 bits"):
        exact_detect([1, 2], WatermarkingConfig(hashing_key=2**64), VOCAB)


def test_a_key_is_needed_to_see_the_watermark(model):
    plan = WatermarkCalibrator.high_entropy(VOCAB).predict(0.5, 8.0, alpha=1e-3, length=50)
    out = generate(model, plan.to_transformers(hashing_key=777), seed=0)
    right = exact_detect(out, plan.to_transformers(hashing_key=777), model, skip=3)
    wrong = exact_detect(out, plan.to_transformers(hashing_key=778), model, skip=3)
    assert (right.p_value < 1e-4).all()
    assert (wrong.p_value > 1e-3).all()


# --- sampling -----------------------------------------------------------------------------------------------------------


def generate(model, watermark, *, seed, n=6, temperature=1.0, top_k=0, top_p=1.0, length=60):
    options = sampling_options(model, temperature=temperature, top_k=top_k, top_p=top_p, max_new_tokens=length)
    options.eos_token_id = None
    options.watermarking_config = watermark
    prompts, mask = left_padded([[5, 6, 7 + i] for i in range(n)], 0, "cpu")
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        return model.generate(prompts, attention_mask=mask, generation_config=options)


def test_predicted_green_rate_is_that_of_generated_text(model):
    prompts = [[5, 6, 7 + i] for i in range(40)]
    calibrator = WatermarkCalibrator.from_model(model, None, prompts, max_new_tokens=40, temperature=0.8, top_k=30)
    plan = calibrator.predict(0.4, 2.0, alpha=1e-3, length=40)
    rates = []
    for key in (11, 222, 3333, 44444):
        out = generate(
            model, plan.to_transformers(hashing_key=key), seed=key, n=40, temperature=0.8, top_k=30, length=40
        )
        found = exact_detect(out, plan.to_transformers(hashing_key=key), model, skip=3)
        rates.append(found.green.sum() / found.scored.sum())
    error = np.std(rates, ddof=1) / 2 + 0.005
    assert abs(np.mean(rates) - plan.green_rate) < 3 * error
    assert plan.green_rate > 0.5


def test_what_is_recorded_is_what_is_sampled(model):
    """Against the scores that `generate` returns after temperature, top-k and top-p."""
    options = sampling_options(model, temperature=0.7, top_k=20, top_p=0.9, max_new_tokens=5)
    options.eos_token_id = None
    options.output_scores = options.return_dict_in_generate = True
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(3)
        out = model.generate(
            torch.tensor([[5, 6, 7]]), attention_mask=torch.ones(1, 3, dtype=torch.long), generation_config=options
        )
    expected = torch.stack([torch.softmax(s[0].float(), -1) for s in out.scores])
    quiet = copy.deepcopy(model)
    quiet.generation_config.eos_token_id = quiet.config.eos_token_id = None
    made = WatermarkCalibrator.from_model(
        quiet, None, [[5, 6, 7]], max_new_tokens=5, temperature=0.7, top_k=20, top_p=0.9, seed=3
    )
    np.testing.assert_allclose(made.contexts.collision, (expected**2).sum(-1).numpy(), rtol=1e-5)
    np.testing.assert_allclose(made.contexts.entropy, stats.entropy(expected.numpy(), axis=1), rtol=1e-4, atol=1e-6)
    assert made.truncated
    assert made.temperature == 0.7


def test_the_bias_comes_after_the_warpers(model):
    """Under top-k 1 nothing can be favoured: the text stays the greedy one."""
    plain = generate(model, None, seed=0, top_k=1)
    marked = generate(model, WatermarkingConfig(greenlist_ratio=0.5, bias=10.0), seed=0, top_k=1)
    assert torch.equal(plain, marked)


def test_from_model_is_reproducible_and_leaves_no_trace(model):
    before = torch.get_rng_state()
    kept = copy.deepcopy(model.generation_config.to_dict())
    made = [
        WatermarkCalibrator.from_model(model, None, [[5, 6], [7, 8, 9]], max_new_tokens=6, seed=4) for _ in range(2)
    ]
    other = WatermarkCalibrator.from_model(model, None, [[5, 6], [7, 8, 9]], max_new_tokens=6, seed=5)
    assert torch.equal(before, torch.get_rng_state())
    assert model.generation_config.to_dict() == kept
    np.testing.assert_array_equal(made[0].contexts.collision, made[1].contexts.collision)
    assert not np.array_equal(made[0].contexts.collision, other.contexts.collision)
    assert made[0].vocab_size == VOCAB
    assert 0 < made[0].scored_share <= 1


def test_text_ends_with_its_end_token():
    new = torch.tensor([[4, 2, 0, 0], [4, 5, 6, 7], [2, 2, 0, 0]])
    assert still_writing(new, 2).tolist() == [
        [True, True, False, False],
        [True, True, True, True],
        [True, False, False, False],
    ]
    assert still_writing(new, None).all()


def test_sampling_errors_are_sentences(model):
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        WatermarkCalibrator.from_model(model, None, [[5], []])
    with pytest.raises(ValueError, match="no prompts"):
        WatermarkCalibrator.from_model(model, None, [])
    with pytest.raises(ValueError, match="tokenizer is needed"):
        WatermarkCalibrator.from_model(model, None, ["hello"])
    with pytest.raises(ValueError, match="one string"):
        WatermarkCalibrator.from_model(model, None, "hello")
    with pytest.raises(ValueError, match="greedy"):
        WatermarkCalibrator.from_model(model, None, [[5]], temperature=0.0)
    with pytest.raises(ValueError, match="top_p"):
        WatermarkCalibrator.from_model(model, None, [[5]], top_p=0.0)
    with pytest.raises(ValueError, match="token ids from 0 to 299"):
        WatermarkCalibrator.from_model(model, None, [[5, VOCAB]])
    with pytest.raises(ValueError, match="something else than token ids"):
        WatermarkCalibrator.from_model(model, None, [[1.7]])
    with pytest.raises(ValueError, match="max_new_tokens must be a whole number"):
        WatermarkCalibrator.from_model(model, None, [[5]], max_new_tokens=5.5)
    with pytest.raises(TypeError, match="can generate"):
        WatermarkCalibrator.from_model(torch.nn.Linear(2, 2), None, [[5]])


def test_keys_that_generation_would_refuse():
    plan = WatermarkCalibrator.high_entropy(VOCAB).predict(0.5, 2.0, alpha=1e-3, length=50)
    for key in (None, "a", 1.5, 0, 2**63):
        with pytest.raises(ValueError, match="hashing_key must be"):
            plan.to_transformers(hashing_key=key)
    with pytest.raises(ValueError, match="prefix_length"):
        plan.to_markllm(prefix_length=0)


def test_a_model_in_training_is_calibrated_without_dropout(model):
    training = copy.deepcopy(model)
    training.model.layers[0].self_attn.attention_dropout = 0.5
    training.train()
    training.model.layers[1].eval()
    before = {name: module.training for name, module in training.named_modules()}
    made = [WatermarkCalibrator.from_model(m, None, [[5, 6]], max_new_tokens=4) for m in (model, training)]
    np.testing.assert_array_equal(made[0].contexts.collision, made[1].contexts.collision)
    assert {name: module.training for name, module in training.named_modules()} == before


def test_emitted_config_is_a_generation_config(model):
    plan = WatermarkCalibrator.high_entropy(VOCAB).minimise_distortion(alpha=1e-2, power=0.9, length=60)
    config = plan.to_transformers(hashing_key=5)
    assert (config.greenlist_ratio, config.bias, config.hashing_key) == (plan.gamma, plan.delta, 5)
    GenerationConfig(watermarking_config=config).validate()
    found = exact_detect(generate(model, plan.to_transformers(), seed=1), plan, skip=3)  # the plan knows the vocabulary
    assert found.share == plan.green_share


# --- a real model -------------------------------------------------------------------------------------------------------


@pytest.mark.models
def test_a_real_model_writes_and_is_found_as_predicted(real_model):
    """Gemma 3 270M, whose logits are wider than its tokenizer counts tokens that it uses."""
    lm = real_model("gemma-3-270m")
    prompts = [
        lm.encode(text)[0].tolist()
        for text in ("The history of the town begins", "To open a file in Python", "She looked at")
    ]
    calibrator = WatermarkCalibrator.from_model(lm.model, None, 3 * prompts, max_new_tokens=16)
    plan = calibrator.predict(0.5, 3.0, alpha=1e-2, length=16)
    options = sampling_options(lm.model, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=16)
    batch, mask = left_padded(3 * prompts, options.pad_token_id, "cpu")
    options.watermarking_config = plan.to_transformers(hashing_key=4_242_424_243)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        out = lm.model.generate(batch, attention_mask=mask, generation_config=options)
    found = exact_detect(out[:, batch.shape[1] - 1 :], options.watermarking_config, lm.model, skip=1)
    rate = found.green.sum() / found.scored.sum()
    spread = np.std(found.green / found.scored, ddof=1) / 3
    assert plan.green_rate > 0.6
    assert abs(rate - plan.green_rate) < 4 * spread + 0.05
