"""`led_generate` inside transformers' `generate`: the same law as by hand, and everything that goes with it."""

import contextlib
import copy
import logging

import pytest
import torch

pytestmark = pytest.mark.torch

transformers = pytest.importorskip("transformers")

from cameraready.lm.led import (  # noqa: E402
    LEDConfig,
    LEDOutput,
    led_distribution,
    led_generate,
    led_logprobs,
)
from cameraready.models import open_model, tiny_model, tiny_tokenizer  # noqa: E402

LED = LEDConfig(depth=3, top_k=6, think_end=None)
KINDS = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "mistral", "cohere", "granite", "gpt2", "gpt_neox", "phi3")


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@contextlib.contextmanager
def hooks_unchanged(model):
    """Hooks are those of before (transformers leaves some of its own once hidden states were asked for)."""

    def hooks():
        kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
        return [(name, kind, key) for name, m in model.named_modules() for kind in kinds for key in getattr(m, kind)]

    before = hooks()
    yield
    assert hooks() == before


@contextlib.contextmanager
def warnings_of_transformers():
    """Its log from WARNING on: a logger that does not hand on what it gets, and says some things only once."""
    said = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logger = transformers.utils.logging.get_logger("transformers")
    for once in (type(logger).warning_once, type(logger).info_once):
        once.cache_clear()
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", n_layers=4)


@pytest.fixture(scope="module")
def prompts(tokenizer):
    return tokenizer(["a longer prompt", "short"], return_tensors="pt", padding=True)


def law_by_hand(model, ids, led, temperature=0.6, processors=()):
    """The law of the token after `ids` (1, T), from `output_hidden_states` and the model's own modules: no hooks, no cache."""
    with torch.no_grad():
        out = model(ids, output_hidden_states=True, use_cache=False)
        final = out.logits[:, -1].float()
        head = model.get_output_embeddings()
        base = model.base_model
        norm = next(m for m in (getattr(base, n, None) for n in ("norm", "ln_f", "final_layer_norm")) if m is not None)
        layers = [final]
        for below in range(1, led.depth):
            states = out.hidden_states[-1 - below][:, -1]  # the last entry has the final norm already; these have not
            logits = head(norm(states) if led.apply_final_norm else states)
            config = model.config
            if model.config.model_type == "cohere":
                logits = logits * config.logit_scale
            if model.config.model_type == "granite":
                logits = logits / config.logits_scaling
            if getattr(config, "final_logit_softcapping", None):
                logits = torch.tanh(logits / config.final_logit_softcapping) * config.final_logit_softcapping
            layers.append(logits.float())
        for processor in processors:
            layers[0] = processor(ids, layers[0])
    return led_distribution(torch.stack(layers), led, temperature=temperature)


def greedy_by_hand(model, ids, led, new, processors=()):
    for _ in range(new):
        ids = torch.cat([ids, law_by_hand(model, ids, led, processors=processors).best()[:, None]], dim=1)
    return ids


@pytest.mark.parametrize("kind", KINDS)
def test_the_law_is_that_of_the_models_own_hidden_states(kind, tokenizer):
    model = tiny_model(kind, n_layers=4)
    ids = tokenizer("some words", return_tensors="pt")["input_ids"]
    out = led_generate(model, ids, led=LED, do_sample=False, max_new_tokens=5, return_logprobs=True)
    for t in range(int(out.mask.sum())):
        step = law_by_hand(model, out.sequences[:, : ids.shape[1] + t], LED)
        torch.testing.assert_close(out.candidate_logprobs[:, t], step.log_probs, atol=2e-4, rtol=1e-3)
        assert torch.equal(out.candidates[:, t], step.candidates)
        assert torch.equal(out.sequences[:, ids.shape[1] + t], step.best())
        torch.testing.assert_close(out.logprobs[:, t], step.log_probs.amax(-1), atol=2e-4, rtol=1e-3)


def test_lower_layers_pass_the_final_norm_unless_told_otherwise(tokenizer):
    model = tiny_model("gpt2", n_layers=4)
    ids = tokenizer("some words", return_tensors="pt")["input_ids"]
    normed, raw = (
        LEDConfig(depth=4, top_k=6, exploit="never", think_end=None, apply_final_norm=norm) for norm in (True, False)
    )
    laws = {}
    for led in (normed, raw):
        out = led_generate(model, ids, led=led, do_sample=False, max_new_tokens=1, return_logprobs=True)
        laws[led] = out.candidate_logprobs[:, 0]
        torch.testing.assert_close(laws[led], law_by_hand(model, ids, led).log_probs, atol=1e-4, rtol=1e-3)
    assert not torch.allclose(laws[normed], laws[raw], atol=1e-2)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "cohere", "granite", "gpt2"])
def test_the_normaliser_over_candidates_reads_the_same_logits_from_rows_of_the_head(kind, tokenizer):
    model = tiny_model(kind, n_layers=4)
    ids = tokenizer("some words", return_tensors="pt")["input_ids"]
    led = LEDConfig(depth=4, think_end=None, normaliser="candidates")
    out = led_generate(model, ids, led=led, do_sample=False, max_new_tokens=1, return_logprobs=True)
    torch.testing.assert_close(
        out.candidate_logprobs[:, 0], law_by_hand(model, ids, led).log_probs, atol=1e-4, rtol=1e-3
    )


def test_depth_one_is_top_k_sampling_of_transformers(model, tokenizer):
    ids = tokenizer("some words", return_tensors="pt")["input_ids"]
    led = LEDConfig(depth=1, top_k=6, think_end=None)
    out = led_generate(model, ids, led=led, max_new_tokens=6, generator=seeded(), return_logprobs=True)
    plain = model(out.sequences, use_cache=False).logits[:, ids.shape[1] - 1 : -1] / 0.6
    for t in range(6):
        warped = transformers.TopKLogitsWarper(6)(None, plain[:, t]).log_softmax(-1)
        torch.testing.assert_close(
            out.candidate_logprobs[:, t], warped.gather(-1, out.candidates[:, t]), atol=1e-4, rtol=1e-3
        )


@pytest.mark.parametrize(
    "how", [{"use_cache": False}, {"cache_implementation": "static"}, {"prefill_chunk_size": 4}], ids=str
)
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_caches_do_not_change_the_law(kind, how, tokenizer):
    model = tiny_model(kind, n_layers=4, sliding_window=4 if kind == "gemma3" else None)
    ids = tokenizer("words that outlast a window", return_tensors="pt")["input_ids"]
    common = {"led": LED, "max_new_tokens": 8, "return_logprobs": True}
    first = led_generate(model, ids, generator=seeded(), **common)
    second = led_generate(model, ids, generator=seeded(), **common, **how)
    assert torch.equal(first.sequences, second.sequences)
    torch.testing.assert_close(first.logprobs, second.logprobs, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt2"])
def test_padding_on_the_left_does_not_change_a_row(kind, tokenizer, prompts):
    model = tiny_model(kind, n_layers=4)
    both = led_generate(model, prompts, led=LED, do_sample=False, max_new_tokens=6, return_logprobs=True)
    for row, text in enumerate(["a longer prompt", "short"]):
        one = tokenizer(text, return_tensors="pt")
        alone = led_generate(model, one, led=LED, do_sample=False, max_new_tokens=6, return_logprobs=True)
        assert torch.equal(alone.sequences[0, -6:], both.sequences[row, -6:])
        torch.testing.assert_close(alone.logprobs[0], both.logprobs[row], atol=1e-3, rtol=1e-3)


def test_the_generator_is_the_only_source_of_randomness_and_is_called_once_a_step(model, prompts):
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    kwargs = {"led": LED, "max_new_tokens": 5, "num_return_sequences": 3, "return_logprobs": True}
    first, second, third = (led_generate(model, prompts, generator=seeded(s), **kwargs) for s in (1, 1, 2))
    led_generate(model, prompts, **kwargs)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(first.sequences, second.sequences)
    assert not torch.equal(first.sequences, third.sequences)
    generator = seeded(1)
    for t in range(5):
        picked = torch.multinomial(first.candidate_logprobs[:, t].exp(), 1, generator=generator)
        token = first.candidates[:, t].gather(-1, picked)[:, 0]
        assert torch.equal(token[first.mask[:, t]], first.sequences[:, -5:][:, t][first.mask[:, t]])


def test_without_a_generator_two_calls_differ(model, prompts):
    kwargs = {"led": LED, "max_new_tokens": 12, "num_return_sequences": 8}
    first, second = (led_generate(model, prompts, **kwargs) for _ in range(2))
    assert first.shape != second.shape or not torch.equal(first, second)


def test_sequences_of_a_prompt_follow_each_other_and_have_their_log_probabilities(model, prompts):
    out = led_generate(
        model, prompts, led=LED, max_new_tokens=4, num_return_sequences=3, generator=seeded(), return_logprobs=True
    )
    assert isinstance(out, LEDOutput)
    assert out.sequences.shape == (6, prompts["input_ids"].shape[1] + 4)
    for i in range(6):
        assert torch.equal(out.sequences[i, :-4], prompts["input_ids"][i // 3])
    mask = prompts["attention_mask"].repeat_interleave(3, dim=0)
    again = led_logprobs(model, out.sequences, out.sequences.shape[1] - 4, led=LED, attention_mask=mask)
    torch.testing.assert_close(again.detach()[out.mask], out.logprobs[out.mask], atol=1e-4, rtol=1e-3)


def test_rows_end_at_their_eos_and_nothing_counts_after_it(model, prompts):
    out = led_generate(
        model, prompts, led=LED, max_new_tokens=12, num_return_sequences=8, generator=seeded(), return_logprobs=True,
        eos_token_id=list(range(0, 256, 5)), pad_token_id=256,
    )  # fmt: skip
    new = out.sequences[:, prompts["input_ids"].shape[1] :]
    ends = new % 5 == 0
    ends &= new < 256
    assert ends.any()
    for row in range(16):
        where = ends[row].nonzero()
        length = int(where[0]) + 1 if len(where) else new.shape[1]
        assert out.mask[row].tolist() == [True] * length + [False] * (new.shape[1] - length)
        assert (new[row, length:] == 256).all()
        assert (out.logprobs[row, length:] == 0).all()
        assert (out.logprobs[row, :length] < 0).all()


def test_stop_strings_and_stopping_criteria_end_rows(model, tokenizer, prompts):
    class Even(transformers.StoppingCriteria):
        def __call__(self, ids, scores, **kwargs):
            return ids[:, -1] % 2 == 0

    kwargs = {"led": LED, "max_new_tokens": 20, "num_return_sequences": 4, "generator": seeded(), "eos_token_id": 258}
    out = led_generate(
        model, prompts, return_logprobs=True, stopping_criteria=transformers.StoppingCriteriaList([Even()]), **kwargs
    )
    new = out.sequences[:, prompts["input_ids"].shape[1] :]
    for row, mask in zip(new, out.mask, strict=True):
        kept = row[mask]
        assert (kept[:-1] % 2 == 1).all()
        assert kept[-1] % 2 == 0 or mask.all()
    letter = tokenizer.decode(new[0, :1])
    stopped = led_generate(
        model, prompts, tokenizer=tokenizer, stop_strings=[letter], **(kwargs | {"generator": seeded()})
    )
    assert (stopped[0, prompts["input_ids"].shape[1] + 1 :] == 256).all()


def test_other_processors_act_before_candidates_are_chosen(model, tokenizer):
    ids = tokenizer("abcabc", return_tensors="pt")["input_ids"]
    penalty = transformers.RepetitionPenaltyLogitsProcessor(0.4)
    plain = greedy_by_hand(model, ids, LED, 6)
    expected = greedy_by_hand(model, ids, LED, 6, processors=[penalty])
    out = led_generate(model, ids, led=LED, do_sample=False, max_new_tokens=6, repetition_penalty=0.4)
    assert torch.equal(out, expected)
    own = led_generate(model, ids, led=LED, do_sample=False, max_new_tokens=6, logits_processor=[penalty])
    assert torch.equal(own, expected)
    assert not torch.equal(plain, expected)


def test_forbidden_tokens_are_forbidden_in_every_layer(model, prompts):
    bad = [[i] for i in range(256) if i % 4]
    kwargs = {
        "led": LED,
        "max_new_tokens": 6,
        "num_return_sequences": 6,
        "generator": seeded(),
        "return_logprobs": True,
    }
    out = led_generate(model, prompts, bad_words_ids=bad, **kwargs)
    assert (out.candidates % 4 == 0)[out.candidates < 256].all()
    only = led_generate(model, prompts, prefix_allowed_tokens_fn=lambda batch, ids: [65, 66], **kwargs)
    assert set(only.sequences[:, -6:].flatten().tolist()) <= {65, 66}
    assert torch.equal(only.candidate_logprobs.isfinite().sum(-1), torch.full((12, 6), 2))
    with hooks_unchanged(model), pytest.raises(ValueError, match="every token is masked"):
        led_generate(model, prompts, suppress_tokens=list(range(262)), **kwargs)


def test_a_streamer_sees_every_token(model, tokenizer):
    class Keeps(transformers.generation.streamers.BaseStreamer):
        def __init__(self):
            self.seen, self.ended = [], False

        def put(self, value):
            self.seen += value.flatten().tolist()

        def end(self):
            self.ended = True

    streamer = Keeps()
    ids = tokenizer("stream", return_tensors="pt")["input_ids"]
    out = led_generate(model, ids, led=LED, max_new_tokens=7, generator=seeded(), streamer=streamer)
    assert streamer.seen == out[0].tolist()
    assert streamer.ended


def test_a_configuration_is_honoured_and_left_alone(model, prompts):
    config = transformers.GenerationConfig(
        max_new_tokens=3, temperature=1.3, top_k=2, top_p=0.5, do_sample=True, num_return_sequences=2, eos_token_id=None
    )
    before = copy.deepcopy(config.to_dict())
    with warnings_of_transformers() as said:
        out = led_generate(model, prompts, led=LED, generation_config=config, generator=seeded(), return_logprobs=True)
    assert said == []
    assert config.to_dict() == before
    hot = led_generate(
        model, prompts, led=LED, temperature=1.3, max_new_tokens=3, num_return_sequences=2, generator=seeded(), return_logprobs=True
    )  # fmt: skip
    assert torch.equal(out.sequences, hot.sequences)
    torch.testing.assert_close(out.candidate_logprobs, hot.candidate_logprobs)
    assert out.candidates.shape[-1] == 6  # not the configuration's two


def test_what_a_models_configuration_says_of_sampling_does_not_leak_in(prompts):
    model = tiny_model("llama", n_layers=4)
    plain = led_generate(model, prompts, led=LED, max_new_tokens=4, generator=seeded())
    model.generation_config.update(do_sample=True, temperature=0.2, top_k=1, top_p=0.1, min_p=0.5)
    with warnings_of_transformers() as said:
        again = led_generate(model, prompts, led=LED, max_new_tokens=4, generator=seeded())
    assert torch.equal(plain, again)
    assert said == []
    with warnings_of_transformers() as said:
        model.generate(prompts["input_ids"], do_sample=False, temperature=0.2, max_new_tokens=1)
    assert "temperature" in str(said)  # it would have been heard


def test_an_opened_model_brings_its_tokenizer(model, tokenizer, prompts):
    lm = open_model((model, tokenizer))
    led = LEDConfig(depth=3, top_k=6)  # thinking ends with a text, for which a tokenizer is needed
    out = led_generate(lm, prompts, led=led, max_new_tokens=4, generator=seeded())
    assert torch.equal(out, led_generate(model, prompts, led=LED, max_new_tokens=4, generator=seeded()))
    length, mask = prompts["input_ids"].shape[1], prompts["attention_mask"]
    scores = led_logprobs(lm, out, length, led=led, attention_mask=mask)
    assert torch.equal(scores, led_logprobs(model, out, length, led=LED, attention_mask=mask))


def test_generates_own_return_value_is_kept(model, prompts):
    kwargs = {"led": LED, "max_new_tokens": 3, "return_dict_in_generate": True, "output_logits": True}
    out = led_generate(model, prompts, generator=seeded(), **kwargs)
    assert len(out.logits) == 3
    kept = led_generate(model, prompts, generator=seeded(), return_logprobs=True, **kwargs)
    assert torch.equal(kept.sequences, out.sequences)
    assert torch.equal(kept.generated.logits[0], out.logits[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_models_dtype_is_kept_and_log_probabilities_are_at_least_single(dtype, prompts):
    model = tiny_model("llama", n_layers=4, dtype=dtype)
    out = led_generate(model, prompts, led=LED, max_new_tokens=3, generator=seeded(), return_logprobs=True)
    assert out.logprobs.dtype == torch.float32  # `generate` hands float32 scores to its processors
    assert {p.dtype for p in model.parameters()} == {dtype}
    torch.testing.assert_close(out.candidate_logprobs.exp().sum(-1), torch.ones(2, 3), atol=1e-5, rtol=0)


def test_inputs_may_be_embeddings(model, prompts):
    embeds = model.get_input_embeddings()(prompts["input_ids"]).detach()
    given = {"inputs_embeds": embeds, "attention_mask": prompts["attention_mask"]}
    kwargs = {"led": LED, "max_new_tokens": 4, "num_return_sequences": 2, "return_logprobs": True}
    out = led_generate(model, given, generator=seeded(), **kwargs)
    ids = led_generate(model, prompts, generator=seeded(), **kwargs)
    assert torch.equal(out.sequences, ids.sequences[:, -4:])
    torch.testing.assert_close(out.logprobs, ids.logprobs)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_beams": 2}, "num_beams=2: beams rank"),
        ({"guidance_scale": 1.5}, "guidance runs the model twice"),
        ({"prompt_lookup_num_tokens": 1}, "assisted generation"),
        ({"penalty_alpha": 0.5}, "contrastive search"),
        ({"dola_layers": "low"}, "DoLa"),
        ({"watermarking_config": object()}, "after the draw"),
        ({"custom_generate": "x/y"}, "replaces the loop"),
        ({"top_p": 0.9}, "top_p has no place"),
        ({"top_k": 20}, r"LEDConfig\(top_k="),
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"temperature": 0.0}, "pass do_sample=False"),
        ({"temperature": "0.6"}, "temperature must be positive"),
        ({"num_return_sequences": -1}, "at least 1"),
        ({"num_return_sequences": 0}, "at least 1"),
        ({"led": LEDConfig(depth=9, think_end=None)}, r"more layers than the model has \(4\)"),
        ({"led": LEDConfig(depth=2)}, "needs tokenizer"),
    ],
)
def test_what_cannot_be_is_refused_with_a_sentence(model, prompts, kwargs, message):
    with hooks_unchanged(model), pytest.raises(ValueError, match=message):
        led_generate(model, prompts, **{"led": LED, "max_new_tokens": 2, **kwargs})


def test_empty_and_flat_prompts_are_refused(model, prompts):
    with pytest.raises(ValueError, match="prompt is empty"):
        led_generate(model, torch.empty(1, 0, dtype=torch.long), led=LED)
    with pytest.raises(ValueError, match=r"\(B, T\)"):
        led_generate(model, prompts["input_ids"][0], led=LED)
    with pytest.raises(TypeError, match="token ids"):
        led_generate(model, "a text", led=LED)
    cache = transformers.DynamicCache()
    with pytest.raises(ValueError, match="the cache is of one sequence"):
        led_generate(model, prompts, led=LED, num_return_sequences=2, past_key_values=cache)
    config = transformers.T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=20)
    with pytest.raises(ValueError, match="decoder"):
        led_generate(transformers.T5ForConditionalGeneration(config), prompts, led=LED)
