"""The logits processor by itself, the end of thinking, and log-probabilities of given sequences."""

import pytest
import torch

pytestmark = pytest.mark.torch

transformers = pytest.importorskip("transformers")

from cameraready.lm.led import LEDConfig, LEDProcessor, led_generate, led_logprobs  # noqa: E402
from cameraready.lm.led.thinking import ThinkEnd  # noqa: E402
from cameraready.models import open_model, tiny_model, tiny_tokenizer  # noqa: E402
from tests.lm.test_led_generate import LED, hooks_unchanged, law_by_hand, seeded  # noqa: E402

SAMPLING = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", n_layers=4)


def merging_tokenizer():
    """A byte-pair tokenizer in which the marker's last character melts with what follows: `>` and a newline are one token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(["x>\n"] * 50, trainers.BpeTrainer(vocab_size=258, initial_alphabet=alphabet))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False)


# --- the processor ---------------------------------------------------------------------------------------------------


def test_the_processor_alone_draws_what_led_generate_draws(model, tokenizer):
    inputs = tokenizer(["one", "twenty"], return_tensors="pt", padding=True)
    expected = led_generate(model, inputs, led=LED, max_new_tokens=5, generator=seeded())
    with hooks_unchanged(model), LEDProcessor(model, LED, generator=seeded()) as processor:
        out = model.generate(**inputs, logits_processor=[processor], do_sample=False, max_new_tokens=5)
    assert torch.equal(out, expected)


def test_emitted_log_probabilities_are_the_law_and_let_generate_draw(model, tokenizer):
    ids = tokenizer("one", return_tensors="pt")["input_ids"]
    n = 4000
    with torch.random.fork_rng(), LEDProcessor(model, LED, emit="log_probs") as processor:
        torch.manual_seed(0)
        out = model.generate(
            ids, logits_processor=[processor], max_new_tokens=1, num_return_sequences=n, **SAMPLING,
            return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
    step = law_by_hand(model, ids, LED)
    torch.testing.assert_close(out.scores[0][:1], step.dense(out.scores[0].shape[-1]), atol=1e-4, rtol=1e-3)
    drawn = out.sequences[:, -1]
    for token, log_p in zip(step.candidates[0], step.log_probs[0], strict=True):
        p = float(log_p.exp())
        assert abs((drawn == token).float().mean().item() - p) < 4.5 * (p * (1 - p) / n) ** 0.5 + 1e-9


def test_one_context_serves_several_generations(model, tokenizer):
    first, second = (tokenizer(text, return_tensors="pt")["input_ids"] for text in ("one", "two"))
    with LEDProcessor(model, LED, emit="best") as processor:
        for ids in (first, second, first):
            out = model.generate(ids, logits_processor=[processor], do_sample=False, max_new_tokens=4)
            assert len(processor.steps) == len(processor.tokens) == 4
            assert processor.prompt_length == ids.shape[1]
            assert torch.equal(torch.stack(processor.tokens, dim=1), out[:, -4:])


def test_outside_of_its_context_it_refuses(model, tokenizer):
    ids = tokenizer("one", return_tensors="pt")["input_ids"]
    processor = LEDProcessor(model, LED)
    with pytest.raises(RuntimeError, match="only inside 'with"):
        model.generate(ids, logits_processor=[processor], do_sample=False, max_new_tokens=2)
    with hooks_unchanged(model), processor, pytest.raises(RuntimeError, match="watched already"):
        processor.__enter__()


def test_another_model_beams_and_guidance_are_noticed(model, tokenizer):
    ids = tokenizer("one", return_tensors="pt")["input_ids"]
    other = tiny_model("llama", n_layers=4, seed=1)
    with hooks_unchanged(model), LEDProcessor(model, LED) as processor:
        with pytest.raises(ValueError, match="not of one forward pass"):
            other.generate(ids, logits_processor=[processor], do_sample=False, max_new_tokens=2)
        model(ids.expand(2, -1))
        with pytest.raises(ValueError, match="not of one forward pass"):
            processor(ids, torch.zeros(1, 262))
        for emit in ("draw", "log_probs"):
            processor.emit = emit
            with pytest.raises(ValueError, match="rows have changed places, as beams do"):
                model.generate(
                    ids, logits_processor=[processor], do_sample=False, max_new_tokens=8, num_beams=4, eos_token_id=None
                )
    with pytest.raises(ValueError, match="emit must be"):
        LEDProcessor(model, LED, emit="sample")
    with pytest.raises(ValueError, match="temperature must be positive"):
        LEDProcessor(model, LED, temperature=0)


def test_nothing_stays_hooked_or_held_after_an_exception(model, tokenizer):
    class Fails(transformers.StoppingCriteria):
        def __call__(self, ids, scores, **kwargs):
            raise KeyError("mine")

    ids = tokenizer("one", return_tensors="pt")["input_ids"]
    failing = transformers.StoppingCriteriaList([Fails()])
    with hooks_unchanged(model), pytest.raises(KeyError, match="mine"):
        led_generate(model, ids, led=LED, max_new_tokens=3, stopping_criteria=failing)
    processor = LEDProcessor(model, LED)
    with hooks_unchanged(model), pytest.raises(KeyError, match="mine"), processor:
        model.generate(ids, max_new_tokens=2, stopping_criteria=failing)
    assert processor.layers.hidden == {}


def test_the_head_must_offer_rows_for_the_normaliser_over_candidates(tokenizer):
    model = tiny_model("llama", n_layers=3)
    head = model.lm_head

    class Wrapped(torch.nn.Linear):
        def __init__(self):
            super().__init__(head.in_features, head.out_features, bias=False)
            self.base_layer = head

        def forward(self, x):
            return self.base_layer(x)

    model.lm_head = Wrapped()
    led = LEDConfig(depth=2, think_end=None, normaliser="candidates")
    with pytest.raises(ValueError, match="use normaliser='exact'"):
        led_generate(model, torch.tensor([[1, 2]]), led=led, max_new_tokens=1)


# --- the end of thinking ---------------------------------------------------------------------------------------------


def scripted(model, tokenizer, text, led, prompt="think: "):
    """Generate exactly `text`, and return the processor that saw it."""
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
    script = tokenizer(text, add_special_tokens=False)["input_ids"]
    with LEDProcessor(model, led, tokenizer=tokenizer) as processor:
        model.generate(
            ids, logits_processor=[processor], do_sample=False, max_new_tokens=len(script), eos_token_id=None,
            prefix_allowed_tokens_fn=lambda batch, now: [script[len(now) - ids.shape[1]]],
        )  # fmt: skip
    return [bool(step.explores) for step in processor.steps]


def test_a_marker_of_several_tokens_ends_exploration_where_it_is_complete(model, tokenizer):
    explores = scripted(model, tokenizer, "</think</think>ab", LEDConfig(depth=2))
    assert explores == [True] * 15 + [False, False]


def test_it_stays_ended(model, tokenizer):
    explores = scripted(model, tokenizer, "</think>abcdefghijklmnopqrstuvwxyz", LEDConfig(depth=2))
    assert explores == [True] * 8 + [False] * 26


def test_ids_and_none_end_it_as_they_say(model, tokenizer):
    assert scripted(model, tokenizer, "abcb", LEDConfig(depth=2, think_end=(98, 99))) == [True, True, True, False]
    assert scripted(model, tokenizer, "abcb", LEDConfig(depth=2, think_end=97)) == [True, False, False, False]
    assert scripted(model, tokenizer, "</think>", LEDConfig(depth=2, think_end=None)) == [True] * 8


def test_a_marker_that_melts_with_what_follows_is_found(model):
    merging = merging_tokenizer()
    assert merging("</think>")["input_ids"][-1] not in merging("</think>\n")["input_ids"]
    ids = merging("abc</think>\nabc")["input_ids"]
    explores = scripted(model, merging, "abc</think>\nabc", LEDConfig(depth=2))
    melted = next(i for i, token in enumerate(ids) if ">" in merging.decode([token]))
    assert explores == [True] * (melted + 1) + [False] * (len(ids) - melted - 1)


def test_a_prompt_that_ends_with_the_marker_has_no_thinking_phase_and_an_earlier_one_does_not_count(model, tokenizer):
    led = LEDConfig(depth=2)
    assert scripted(model, tokenizer, "ab", led, prompt="<think>\n\n</think>\n\n") == [False, False]
    assert scripted(model, tokenizer, "ab", led, prompt="<think>hm</think>an answer. next: ") == [True, True]
    merging = merging_tokenizer()
    assert scripted(model, merging, "ab", led, prompt="<think>\n\n</think>\n\n") == [False, False]


def test_rows_end_each_for_themselves():
    end = ThinkEnd((7, 8))
    over = end.begin(torch.tensor([[7, 8], [1, 2], [1, 7]]))
    assert over.tolist() == [True, False, False]
    over = end.update(over, torch.tensor([[1], [7], [8]]))
    assert over.tolist() == [True, False, False]  # a marker that began in the prompt is none
    over = end.update(over, torch.tensor([[1, 1], [7, 8], [8, 7]]))
    assert over.tolist() == [True, True, False]


def test_text_that_a_tokenizer_cannot_write_is_refused():
    from tokenizers import Tokenizer, models, pre_tokenizers

    core = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words = transformers.PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[UNK]")
    with pytest.raises(ValueError, match="cannot write"):
        ThinkEnd("</think>", words)


# --- log-probabilities of given sequences ----------------------------------------------------------------------------


@pytest.mark.parametrize("positions_at_once", [1, 3, 100])
def test_scores_are_those_of_generation_across_the_end_of_thinking(model, tokenizer, positions_at_once):
    led = LEDConfig(depth=3, think_end=(104,))
    model = tiny_model("llama", n_layers=4)
    model.lm_head.bias = torch.nn.Parameter(2.5 * (torch.arange(262) == 104))  # so that thinking ends soon
    inputs = tokenizer(["one", "twenty"], return_tensors="pt", padding=True)
    kwargs = {"max_new_tokens": 10, "num_return_sequences": 8, "return_logprobs": True}
    out = led_generate(model, inputs, led=led, generator=seeded(), **kwargs)
    length = inputs["input_ids"].shape[1]
    ended = (out.sequences[:, length:-1] == 104).any(-1)
    assert 0 < ended.sum() < 16
    mask = inputs["attention_mask"].repeat_interleave(8, dim=0)
    with torch.no_grad():
        scores = led_logprobs(
            model, out.sequences, length, led=led, attention_mask=mask, positions_at_once=positions_at_once
        )
    torch.testing.assert_close(scores[out.mask], out.logprobs[out.mask], atol=1e-4, rtol=1e-3)


def test_what_led_would_not_draw_has_no_probability(model, tokenizer):
    ids = tokenizer("one and more", return_tensors="pt")["input_ids"]
    scores = led_logprobs(model, ids, 4, led=LED).detach()
    for t in range(scores.shape[1]):
        step = law_by_hand(model, ids[:, : 4 + t], LED)
        expected = step.dense(262)[0, ids[0, 4 + t]]
        torch.testing.assert_close(scores[0, t], expected, atol=1e-4, rtol=1e-3)
    assert scores.isinf().any()


def test_gradients_reach_lower_layers_and_head(tokenizer):
    model = tiny_model("llama", n_layers=4)
    ids = tokenizer("one", return_tensors="pt")["input_ids"]
    out = led_generate(model, ids, led=LED, max_new_tokens=4, generator=seeded())
    with hooks_unchanged(model):
        led_logprobs(model, out, ids.shape[1], led=LED).sum().backward()
    norms = {name: p.grad.norm().item() for name, p in model.named_parameters() if p.grad is not None}
    assert norms["lm_head.weight"] > 0
    assert norms["model.layers.0.mlp.down_proj.weight"] > 0
    weight = model.model.layers[1].mlp.down_proj.weight
    direction = torch.randn(weight.shape, generator=seeded())
    direction /= direction.norm()
    slope = (weight.grad * direction).sum().item()
    values = []
    with torch.no_grad():
        for sign in (1, -1):
            weight += sign * 1e-2 * direction
            values.append(led_logprobs(model, out, ids.shape[1], led=LED).sum().item())
            weight -= sign * 1e-2 * direction
    assert (values[0] - values[1]) / 2e-2 == pytest.approx(slope, rel=0.05, abs=5e-3)


def test_scoring_refuses_shapes_that_do_not_fit(model):
    ids = torch.randint(200, (2, 6), generator=seeded())
    for length in (0, 6):
        with pytest.raises(ValueError, match="prompt_length must be from 1 to 5"):
            led_logprobs(model, ids, length, led=LED)
    with pytest.raises(ValueError, match="attention_mask must be"):
        led_logprobs(model, ids, 3, led=LED, attention_mask=torch.ones(2, 4))
    with pytest.raises(ValueError, match="positions_at_once"):
        led_logprobs(model, ids, 3, led=LED, positions_at_once=0)


@pytest.mark.models
def test_a_real_model_has_the_law_of_its_hidden_states():
    lm = open_model("qwen2.5-coder-0.5b-instruct")
    ids = lm.encode(lm.prompt("What is 17 + 25?"))
    led = LEDConfig(depth=8, think_end=None)
    out = led_generate(
        lm.model, ids, led=led, do_sample=False, max_new_tokens=2, repetition_penalty=1.0, return_logprobs=True
    )
    for t in range(2):
        step = law_by_hand(lm.model, out.sequences[:, : ids.shape[1] + t], led)
        torch.testing.assert_close(out.candidate_logprobs[:, t], step.log_probs, atol=5e-3, rtol=5e-3)
