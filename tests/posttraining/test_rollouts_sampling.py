"""Sampled groups: drawn from the model's own distribution, with the log-probabilities of a training pass, and the same whatever stands beside them."""

import math
import warnings

import pytest
import torch

from cameraready.lm import _tasks
from cameraready.lm._tasks import Problem
from cameraready.models.tiny import TINY_KINDS
from cameraready.posttraining._logprobs import completion_logprobs
from cameraready.posttraining._rollouts import pack, sample_groups
from cameraready.posttraining._rollouts.sampling import nucleus

pytestmark = pytest.mark.torch
PROBLEMS = _tasks.own([("2+2=", "4"), ("Hello there, how are you doing today?", "7"), ("What? " * 9, "yes")])
BYTES = [*range(0, 250, 9)]  # end tokens that a model of bytes draws now and then


@pytest.fixture(scope="module")
def tokenizer():
    from cameraready.models import tiny_tokenizer

    return tiny_tokenizer()


def model_of(kind="llama", *, ends=BYTES, **options):
    from cameraready.models import tiny_model

    model = tiny_model(kind, **options)
    model.generation_config.eos_token_id = list(ends)
    return model


def assert_same_groups(ours, theirs, tolerance=1e-5):
    for one, other in zip(ours, theirs, strict=True):
        assert one.completions == other.completions
        assert [ids.tolist() for ids in one.token_ids] == [ids.tolist() for ids in other.token_ids]
        for logps, same in zip(one.logps, other.logps, strict=True):
            torch.testing.assert_close(logps, same, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", TINY_KINDS)
def test_log_probabilities_are_those_of_a_training_pass(kind, tokenizer):
    model = model_of(kind)
    groups = sample_groups(model, tokenizer, PROBLEMS, n=5, max_new_tokens=20, temperature=0.8, seed=1, batch=15)
    packed = pack(groups, tokenizer.pad_token_id)
    assert len({len(ids) for group in groups for ids in group.token_ids}) > 1  # rows end at different places
    assert len({len(group.prompt_ids) for group in groups}) == 3
    found = completion_logprobs(model, *packed[:3], temperature=0.8).logps
    torch.testing.assert_close(found, packed.logps, rtol=1e-5, atol=1e-5)
    for group in groups:
        for ids, logps in zip(group.token_ids, group.logps, strict=True):
            row = torch.cat((group.prompt_ids, ids))[None]
            alone = completion_logprobs(model, row, None, len(ids), temperature=0.8).logps[0]
            torch.testing.assert_close(alone, logps, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt2", "mistral"])
def test_in_double_precision_they_agree_to_the_last_digits(kind, tokenizer):
    options = {"sliding_window": 8} if kind in ("gemma3", "mistral") else {}
    model = model_of(kind, dtype=torch.float64, **options)
    packed = pack(sample_groups(model, tokenizer, PROBLEMS, n=4, max_new_tokens=30, seed=2), 0)
    assert packed.logps.dtype == torch.float64
    found = completion_logprobs(model, *packed[:3]).logps
    torch.testing.assert_close(found, packed.logps, rtol=1e-11, atol=1e-11)


def test_tokens_come_as_often_as_the_model_says(tokenizer):
    from scipy.stats import chisquare

    model, n = model_of(), 4000
    (group,) = sample_groups(model, tokenizer, PROBLEMS[:1], n=n, max_new_tokens=2, temperature=0.7, seed=5, batch=n)
    with torch.no_grad():
        logits = model(group.prompt_ids[None]).logits[0, -1]
    chances = (logits.double() / 0.7).softmax(-1)
    first = torch.stack([ids[0] for ids in group.token_ids])
    often = chances > 5 / n
    observed = torch.bincount(first, minlength=len(chances)).double()
    rest = lambda counts: torch.cat((counts[often], counts[~often].sum()[None]))  # noqa: E731
    assert chisquare(rest(observed).numpy(), n * rest(chances).numpy()).pvalue > 1e-3
    # And the second token by the first: the mean log-probability of what follows is minus the entropy.
    common = int(observed.argmax())
    assert common not in BYTES
    second = torch.stack(
        [logps[1] for ids, logps in zip(group.token_ids, group.logps, strict=True) if ids[0] == common]
    )
    with torch.no_grad():
        logits = model(torch.cat((group.prompt_ids, torch.tensor([common])))[None]).logits[0, -1]
    logps = (logits.double() / 0.7).log_softmax(-1)
    mean = float((logps.exp() * logps).sum())
    deviation = float((logps.exp() * (logps - mean) ** 2).sum()) ** 0.5
    assert abs(float(second.double().mean()) - mean) < 4 * deviation / len(second) ** 0.5


def test_the_same_seed_draws_the_same_and_another_seed_another(tokenizer):
    model = model_of()
    ours, again, other = (
        sample_groups(model, tokenizer, PROBLEMS, n=3, max_new_tokens=12, seed=seed) for seed in (4, 4, 5)
    )
    assert_same_groups(ours, again, 0)
    assert ours[0].completions != other[0].completions
    assert len(set(ours[0].completions)) == 3


def test_the_global_random_state_is_neither_read_nor_changed(tokenizer):
    model = model_of()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        before = torch.get_rng_state()
        first = sample_groups(model, tokenizer, PROBLEMS[:1], n=2, max_new_tokens=9)
        assert torch.equal(torch.get_rng_state(), before)
        torch.manual_seed(1)
        assert_same_groups(first, sample_groups(model, tokenizer, PROBLEMS[:1], n=2, max_new_tokens=9), 0)


@pytest.mark.parametrize("batch", [1, 2, 7, 100])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "granite", "gpt2"])
def test_draws_do_not_depend_on_the_size_of_batches(kind, batch, tokenizer):
    model = model_of(kind)
    wanted = sample_groups(model, tokenizer, PROBLEMS, n=4, max_new_tokens=16, seed=3, batch=12)
    assert_same_groups(wanted, sample_groups(model, tokenizer, PROBLEMS, n=4, max_new_tokens=16, seed=3, batch=batch))


def test_draws_depend_on_a_prompt_and_not_on_its_place_or_number_of_samples(tokenizer):
    model = model_of()
    few = sample_groups(model, tokenizer, PROBLEMS, n=2, max_new_tokens=8, seed=3)
    turned = sample_groups(model, tokenizer, PROBLEMS[::-1], n=5, max_new_tokens=16, seed=3)[::-1]
    for one, other in zip(few, turned, strict=True):
        for ids, longer in zip(one.token_ids, other.token_ids, strict=False):
            assert longer[: len(ids)].tolist() == ids.tolist()
            assert len(longer) == len(ids) or len(ids) == 8


def test_a_prompt_that_stands_twice_is_drawn_anew(tokenizer):
    twice = sample_groups(model_of(), tokenizer, [PROBLEMS[0], PROBLEMS[1], PROBLEMS[0]], n=2, max_new_tokens=12)
    assert twice[0].prompt_ids.tolist() == twice[2].prompt_ids.tolist()
    assert not set(twice[0].completions) & set(twice[2].completions)


def test_what_a_group_holds(tokenizer):
    model = model_of()
    problem = Problem("Say something.", "", lambda text: len(text) > 4, "own")
    (group,) = sample_groups(model, tokenizer, [problem], n=40, max_new_tokens=10, seed=1)
    assert group.problem is problem
    assert group.prompt_ids.tolist() == tokenizer("Say something.").input_ids
    assert group.finished.dtype == group.correct.dtype == torch.bool
    assert 0 < group.finished.sum() < 40
    assert 0 < group.correct.sum() < 40
    for text, ids, logps, right, finished in zip(
        group.completions, group.token_ids, group.logps, group.correct, group.finished, strict=True
    ):
        assert len(ids) == len(logps) <= 10
        assert bool(finished) == (int(ids[-1]) in [*BYTES, 258])
        assert not set(ids[:-1].tolist()) & {*BYTES, 258}
        assert finished or len(ids) == 10
        assert text == tokenizer.decode(ids.tolist(), skip_special_tokens=True)
        assert bool(right) == (len(text) > 4)
        assert (logps <= 0).all()


def test_an_end_token_of_the_tokenizer_or_the_configuration_ends(tokenizer):
    model = model_of(ends=[])
    model.generation_config.eos_token_id = None
    (free,) = sample_groups(model, tokenizer, PROBLEMS[:1], n=6, max_new_tokens=12)
    common = int(torch.cat(free.token_ids).mode().values)
    model.generation_config.eos_token_id = common
    (ended,) = sample_groups(model, tokenizer, PROBLEMS[:1], n=6, max_new_tokens=12)
    for ids, cut in zip(free.token_ids, ended.token_ids, strict=True):
        assert cut.tolist() == ids[: len(cut)].tolist()
        assert common not in cut[:-1].tolist()
        assert len(cut) == len(ids) or int(cut[-1]) == common
    assert ended.finished.any()


def test_without_an_end_token_completions_run_to_their_budget():
    from cameraready.models import tiny_tokenizer

    bare = tiny_tokenizer(eos=False, pad=False)
    model = model_of(ends=[])
    model.generation_config.eos_token_id = None
    with pytest.warns(UserWarning, match="declares an end token") as caught:
        groups = sample_groups(model, bare, PROBLEMS, n=3, max_new_tokens=9)
    assert caught[0].filename == __file__
    assert all(len(ids) == 9 for group in groups for ids in group.token_ids)
    assert not any(group.finished.any() for group in groups)
    packed = pack(groups)
    found = completion_logprobs(model, *packed[:3]).logps
    torch.testing.assert_close(found, packed.logps, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("top_p", [0.05, 0.3, 0.9, 0.999])
def test_the_nucleus_is_that_of_transformers(top_p):
    from transformers import TopPLogitsWarper

    logits = 2 * torch.randn(20, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    kept = TopPLogitsWarper(top_p)(None, logits).isfinite()
    assert torch.equal(nucleus(logits.softmax(-1), top_p) > 0, kept)
    assert (kept.sum(-1) >= 1).all()


def test_draws_stay_inside_the_nucleus_and_keep_the_models_log_probabilities(tokenizer):
    model = model_of()
    groups = sample_groups(model, tokenizer, PROBLEMS, n=6, max_new_tokens=10, top_p=0.3, seed=1)
    packed = pack(groups)
    torch.testing.assert_close(completion_logprobs(model, *packed[:3]).logps, packed.logps, rtol=1e-5, atol=1e-5)
    for group in groups:
        for ids in group.token_ids:
            with torch.no_grad():
                logits = model(torch.cat((group.prompt_ids, ids))[None]).logits[0, -len(ids) - 1 : -1]
            allowed = nucleus(logits.double().softmax(-1), 0.3) > 0
            assert allowed.gather(-1, ids[:, None]).all()


def test_a_vanishing_temperature_takes_the_most_likely_token(tokenizer):
    model = model_of()
    (group,) = sample_groups(model, tokenizer, PROBLEMS[:1], n=2, max_new_tokens=8, temperature=1e-5)
    assert group.completions[0] == group.completions[1]
    with torch.no_grad():
        row = torch.cat((group.prompt_ids, group.token_ids[0]))[None]
        best = model(row).logits[0, len(group.prompt_ids) - 1 : -1].argmax(-1)
    assert group.token_ids[0].tolist() == best.tolist()


def test_a_model_in_training_is_sampled_without_dropout_and_left_as_it_was(tokenizer):
    from cameraready.models.hooks import hooks_of

    model = model_of()
    wanted = sample_groups(model, tokenizer, PROBLEMS, n=2, max_new_tokens=8)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.9
    model.train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    assert_same_groups(wanted, sample_groups(model, tokenizer, PROBLEMS, n=2, max_new_tokens=8), 0)
    assert [module.training for module in model.modules()] == modes
    assert hooks_of(model) == 0
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    broken = Problem("What?", "", lambda text: 1 / 0, "own")
    with pytest.raises(ValueError, match="verifier"):
        sample_groups(model, tokenizer, [broken], n=1, max_new_tokens=2)
    assert [module.training for module in model.modules()] == modes


def test_adapters_take_part(tokenizer):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, lora_dropout=0.5)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = peft.get_peft_model(model_of(), config).train()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        groups = sample_groups(model, tokenizer, PROBLEMS, n=3, max_new_tokens=10)
    assert model.training
    model.eval()
    packed = pack(groups)
    torch.testing.assert_close(completion_logprobs(model, *packed[:3]).logps, packed.logps, rtol=1e-5, atol=1e-5)
    with model.disable_adapter():
        other = sample_groups(model, tokenizer, PROBLEMS, n=3, max_new_tokens=10)
    assert groups[0].completions != other[0].completions


def test_half_precision_is_sampled_in_single(tokenizer):
    model = model_of(dtype=torch.bfloat16)
    packed = pack(sample_groups(model, tokenizer, PROBLEMS, n=3, max_new_tokens=10))
    assert packed.logps.dtype == torch.float32
    found = completion_logprobs(model, *packed[:3]).logps
    # Keys and values that are kept and those of one pass round differently; log-probabilities then differ by some bfloat16 spacings of logits.
    assert (found - packed.logps).abs().max() < 0.25


#: Positions by attention alone, with an offset of their own, experts, sinks, states beside attention, and states alone.
FAMILIES = {
    "bloom": {"n_layer": 2, "n_head": 4},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "mixtral": {"num_local_experts": 3},
    "jamba": {"num_experts": 2, "mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "mamba": {"state_size": 4},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_any_kind_are_sampled(family, tokenizer):
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    rest = {"num_key_value_heads": 2, "max_position_embeddings": 256, "eos_token_id": BYTES, "pad_token_id": 256}
    config = AutoConfig.for_model(family, vocab_size=262, **sizes, **rest, **FAMILIES[family])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)
    for group in sample_groups(model, tokenizer, PROBLEMS, n=4, max_new_tokens=14, seed=3, batch=12):
        for ids, logps in zip(group.token_ids, group.logps, strict=True):
            with torch.no_grad():
                logits = model(torch.cat((group.prompt_ids, ids))[None]).logits[0, -len(ids) - 1 : -1]
            alone = logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0]
            torch.testing.assert_close(alone, logps, rtol=1e-4, atol=1e-4)


# --- what cannot be sampled ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"n": 0}, ValueError, "n must be at least 1, got 0"),
        ({"n": 1.0}, TypeError, "n must be a whole number"),
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens must be at least 1"),
        ({"temperature": 0.0}, ValueError, "temperature must be above 0"),
        ({"temperature": math.inf}, ValueError, "temperature must be above 0"),
        ({"top_p": 0.0}, ValueError, "top_p must be above 0"),
        ({"top_p": 1.5}, ValueError, "top_p must be above 0"),
        ({"batch": 0}, ValueError, "batch must be at least 1"),
        ({"seed": -1}, ValueError, "seed must be a whole number"),
        ({"seed": None}, ValueError, "seed must be a whole number"),
        ({"problems": []}, ValueError, "there are no problems"),
        ({"problems": ["2+2="]}, TypeError, "problem 0 is a str"),
        (
            {"problems": [PROBLEMS[0], Problem("a" * 1020, "", bool, "own")]},
            ValueError,
            "problem 1 has 1021 tokens.*1024",
        ),
        ({"tokenizer": None}, TypeError, "a model and its tokenizer"),
        ({"model": "llama"}, TypeError, "a model and its tokenizer"),
    ],
)
def test_impossible_arguments_are_refused(change, error, match, tokenizer):
    given = {"model": model_of(), "tokenizer": tokenizer, "problems": PROBLEMS, "n": 2, "max_new_tokens": 8} | change
    with pytest.raises(error, match=match):
        sample_groups(given.pop("model"), given.pop("tokenizer"), given.pop("problems"), **given)


def test_models_that_cannot_be_read_a_token_at_a_time_are_refused(tokenizer):
    peft = pytest.importorskip("peft")
    with torch.random.fork_rng(devices=[]):
        config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
        model = peft.get_peft_model(model_of(), config)
    with pytest.raises(ValueError, match="sample it by its own generate"):
        sample_groups(model, tokenizer, PROBLEMS, n=1, max_new_tokens=3)


def test_an_empty_prompt_needs_a_begin_token(tokenizer):
    from cameraready.models import tiny_tokenizer

    empty = Problem("", "", bool, "own")
    (group,) = sample_groups(model_of(), tokenizer, [empty], n=1, max_new_tokens=3)
    assert group.prompt_ids.tolist() == [tokenizer.bos_token_id]
    with pytest.raises(ValueError, match="the prompt of problem 1 cannot be given to the model: An empty text"):
        sample_groups(model_of(), tiny_tokenizer(bos=False), [PROBLEMS[0], empty], n=1, max_new_tokens=3)


def test_a_model_whose_logits_are_not_numbers_is_refused(tokenizer):
    model = model_of()
    model.lm_head.weight.data[3] = math.nan
    with pytest.raises(ValueError, match="not numbers"):
        sample_groups(model, tokenizer, PROBLEMS, n=1, max_new_tokens=3)


def test_words_that_are_masked_out_are_never_drawn(tokenizer):
    model = model_of()

    class Masked(type(model)):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits[..., :200] = -math.inf
            return output

    model.__class__ = Masked
    groups = sample_groups(model, tokenizer, PROBLEMS, n=3, max_new_tokens=10)
    assert all((ids >= 200).all() and ids.max() < 262 for group in groups for ids in group.token_ids)
    assert all(logps.isfinite().all() for group in groups for logps in group.logps)


def test_nothing_cannot_be_packed():
    with pytest.raises(ValueError, match="no rollouts"):
        pack([])
