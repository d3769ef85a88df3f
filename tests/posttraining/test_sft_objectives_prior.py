"""The measured prior against probabilities computed by hand, and what it is taken to call for."""

import math

import numpy as np
import pytest
import torch

from cameraready.models import tiny_model, tiny_tokenizer
from cameraready.posttraining.sft_objectives import PriorStrength, ProbabilityObjective, prior_strength, recommend
from cameraready.posttraining.sft_objectives.prior import demonstration

pytestmark = pytest.mark.torch

PAIRS = [
    ("what is one", " two"),
    ("a longer prompt, with more in it", " and a longer answer to it"),
    ("x", "y"),
    ("z ", ""),
]


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", seed=4).train()


def by_hand(model, tokenizer, pairs):
    """Probabilities of completions' tokens and the end of text, one demonstration at a time, without padding."""
    found = []
    model.eval()
    for prompt, completion in pairs:
        before = tokenizer(prompt).input_ids
        ids = torch.tensor([[*before, *completion.encode(), tokenizer.eos_token_id]])
        with torch.no_grad():
            p = model(ids).logits[0, :-1].softmax(-1)
        found += p[torch.arange(ids.shape[1] - 1), ids[0, 1:]][len(before) - 1 :].tolist()
    return np.array(found)


def test_strength_is_that_of_completion_tokens_alone(model, tokenizer):
    expected = by_hand(model, tokenizer, PAIRS)
    model.train()
    found = prior_strength(model, tokenizer, PAIRS, batch_size=3)
    assert model.training
    assert found.tokens == len(expected)
    assert found.demonstrations == 4
    assert found.mean == pytest.approx(expected.mean(), rel=1e-4)
    assert found.median == pytest.approx(np.median(expected), rel=1e-4)
    np.testing.assert_allclose(found.deciles, np.percentile(expected, np.arange(10, 100, 10)), rtol=1e-4)


def test_forms_of_demonstrations_agree(model, tokenizer):
    from datasets import Dataset

    expected = prior_strength(model, tokenizer, PAIRS)
    mappings = [{"prompt": prompt, "completion": completion} for prompt, completion in PAIRS]
    tokenized = [dict(zip(("input_ids", "labels"), demonstration(tokenizer, row), strict=True)) for row in PAIRS]
    for dataset in (mappings, Dataset.from_list(mappings), tokenized):
        assert prior_strength(model, tokenizer, dataset).mean == pytest.approx(expected.mean, rel=1e-6)
    chat = [
        {"prompt": [{"role": "user", "content": p}], "completion": [{"role": "assistant", "content": c}]}
        for p, c in PAIRS
    ]
    messages = [{"messages": row["prompt"] + row["completion"]} for row in chat]
    assert prior_strength(model, tokenizer, chat).mean == prior_strength(model, tokenizer, messages).mean


def test_demonstrations_are_tokenized_and_masked_as_trl_does(tokenizer):
    trl = pytest.importorskip("trl")
    assert trl
    from tests.posttraining.sft_objectives_cases import DEMONSTRATIONS, sft_trainer

    trainer = sft_trainer(ProbabilityObjective())
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(4)])
    for row, ids, labels in zip(DEMONSTRATIONS, batch["input_ids"], batch["labels"], strict=True):
        ours = demonstration(tokenizer, row)
        assert ours[0] == ids[: len(ours[0])].tolist()
        assert ours[1] == labels[: len(ours[1])].tolist()
        assert (labels[len(ours[1]) :] == -100).all()


def test_a_token_that_straddles_prompt_and_completion_is_learned():
    class Merging:
        eos_token_id = None
        chat_template = None

        def __call__(self, text):
            return {"input_ids": {"ab": [1, 2], "abc": [1, 9]}[text]}

    assert demonstration(Merging(), ("ab", "c")) == ([1, 9], [-100, 9])


def test_summary_of_known_probabilities():
    p = np.array([0.05, 0.05, 0.5, 0.95, 1.0])
    found = PriorStrength.of_logprobs(np.log(p))
    assert found.mean == pytest.approx(p.mean())
    assert (found.below, found.above) == (0.4, 0.4)
    assert found.quantile(0.5) == pytest.approx(0.5)
    nll = 1 - p
    expected = np.array([nll[:2].sum(), 0, 0, 0, 0, nll[2], 0, 0, 0, nll[3:].sum()]) / nll.sum()
    np.testing.assert_allclose(found.gradient_mass["nll"], expected, atol=1e-12)
    one = p * (1 - p)
    np.testing.assert_allclose(found.gradient_mass["alpha=1"][0], one[:2].sum() / one.sum())


def test_threshold_at_a_percentile_keeps_that_share():
    p = np.random.default_rng(0).random(5000)
    prior = PriorStrength.of_logprobs(np.log(p))
    objective = ProbabilityObjective("nll", threshold=prior.quantile(0.9))
    assert float(objective.keeps(torch.from_numpy(p)).double().mean()) == pytest.approx(0.1, abs=2e-3)


def test_tokens_that_cannot_come_count_as_zero():
    assert PriorStrength.of_logprobs([-math.inf, 0.0]).mean == 0.5


def test_reading_stops_at_the_limit_and_cuts_long_demonstrations(model, tokenizer):
    def endless():
        while True:
            yield "a prompt", " and its answer"

    assert prior_strength(model, tokenizer, endless(), limit=3).demonstrations == 3
    whole = prior_strength(model, tokenizer, PAIRS[1:2])
    cut = prior_strength(model, tokenizer, PAIRS[1:2], max_length=40)
    assert 0 < cut.tokens < whole.tokens


@pytest.mark.parametrize(
    ("dataset", "sentence"),
    [
        ([], "the dataset is empty"),
        ([{"prompt": "a"}], "demonstration 1 has the columns prompt; expected"),
        ([("a", "b"), 3], "demonstration 2 is int"),
        ([{"input_ids": [1, 2], "labels": [-100, -100]}], "no tokens to learn"),
        ([{"input_ids": [1, 2, 3], "labels": [-100, 2]}], "has 3 input_ids and 2 labels"),
        ([{"messages": [{"role": "user", "content": "a"}]}], "demonstration 1 has 1 messages"),
        ([{"messages": []}], "has 0 messages"),
        ([{"prompt": ["a"], "completion": ["b"]}], "expected prompt and completion"),
    ],
)
def test_wrong_demonstrations_are_told_apart(model, tokenizer, dataset, sentence):
    with pytest.raises(ValueError, match=sentence):
        prior_strength(model, tokenizer, dataset)


@pytest.mark.parametrize("name", ["limit", "max_length", "batch_size"])
def test_sizes_are_at_least_one(model, tokenizer, name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1"):
        prior_strength(model, tokenizer, PAIRS, **{name: 0})


def test_objectives_without_a_weight_are_refused_before_anything_is_read(model, tokenizer):
    def unread():
        raise AssertionError("read")
        yield

    with pytest.raises(ValueError, match="'smooth' is no function of a token's probability"):
        prior_strength(model, tokenizer, unread(), objectives={"smooth": ProbabilityObjective("label_smoothing")})


def test_a_prior_is_shown_in_one_line():
    shown = repr(PriorStrength.of_logprobs(np.log([0.25, 0.75])))
    assert shown == "PriorStrength(mean=0.5, median=0.5, below=0, above=0, tokens=2, demonstrations=0)"


def test_chats_need_a_template(model):
    with pytest.raises(ValueError, match="no chat template"):
        prior_strength(
            model, tiny_tokenizer(chat_template=False), [{"messages": [{"role": "user", "content": "a"}] * 2}]
        )


# --- advice ----------------------------------------------------------------------------------------------------------------


def prior_of(mean, n=400):
    return PriorStrength.of_logprobs(np.full(n, math.log(mean)))


def test_advice_follows_the_strength():
    assert recommend(prior_of(0.01)).objective == ProbabilityObjective("nll")
    assert recommend(prior_of(0.8)).objective == ProbabilityObjective(alpha=1.0)
    assert recommend(prior_of(0.8)).loss_type == "dft"
    assert recommend(prior_of(0.3)).name == "alpha=0.5"
    ends = [recommend(prior_of(mean)).place for mean in (0.02, 0.2, 0.4, 0.7, 0.99)]
    assert ends == ["weak", "intermediate", "intermediate", "strong", "strong"]


def test_a_few_trivial_tokens_do_not_make_a_prior_strong():
    """Short answers whose end every model foresees: the mean is that of the middle, most tokens are unknown all the same."""
    prior = PriorStrength.of_logprobs(np.log([1e-4] * 300 + [0.9] * 100))
    assert prior.mean > 0.2
    assert recommend(prior).place == "weak"
    assert recommend(prior, mostly=0.8).place == "intermediate"


def test_advice_pulls_at_the_tokens_there_are():
    """On either side of the limits the objective's gradient is not lost at the mean probability."""
    for mean in (1e-6, 0.01, 0.09, 0.11, 0.4, 0.6, 0.9):
        objective = recommend(prior_of(mean)).objective
        p = torch.tensor(mean, dtype=torch.float64)
        assert float(objective.gradient_weight(p)) >= 0.3 * float(1 - p)


def test_advice_says_why_and_from_how_little():
    assert "mean probability of a demonstrated token is 0.80" in str(recommend(prior_of(0.8)))
    assert "40 tokens only" in recommend(prior_of(0.8, n=40)).reason
    with pytest.raises(TypeError, match="recommend takes what prior_strength"):
        recommend(0.5)
    with pytest.raises(ValueError, match="0 <= weak <= strong <= 1"):
        recommend(prior_of(0.5), weak=0.7, strong=0.2)


def test_a_model_in_place_of_its_prior_is_named():
    with pytest.raises(TypeError, match=r"recommend takes what prior_strength.* not Linear"):
        recommend(torch.nn.Linear(2, 2))


def test_names_splits_and_nothing_are_no_demonstrations():
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    rows = [("a", "b")]
    with pytest.raises(TypeError, match=r"not a str: load it first, AutoModelForCausalLM.from_pretrained\('mymodel'\)"):
        prior_strength("mymodel", tokenizer, rows)
    with pytest.raises(TypeError, match=r"is a dict of train, test; give .* one split, dataset\['train'\]"):
        prior_strength(model, tokenizer, {"train": rows, "test": rows})
    with pytest.raises(TypeError, match=r"not the text 'rows\.jsonl'"):
        prior_strength(model, tokenizer, "rows.jsonl")
    with pytest.raises(ValueError, match="the dataset is empty"):
        prior_strength(model, tokenizer, [])
