"""Hidden facts: prompts of exact length, needles where they are said to be, contexts that tell the answer, verifiers that cannot be fooled."""

import itertools
import pickle
import random
import re

import numpy as np
import pytest
import torch

from cameraready.lm import _retrieval
from cameraready.lm._tasks import arithmetic, countdown, key_value, multi_hop, own, passkey, subset_sum

pytestmark = pytest.mark.torch

RETRIEVAL = [passkey, key_value, multi_hop]
every_retrieval = pytest.mark.parametrize("make", RETRIEVAL, ids=lambda make: make.__name__)


@pytest.fixture(params=["bytes", "bpe"])
def any_tokenizer(request, tokenizer, bpe_tokenizer):
    return {"bytes": tokenizer, "bpe": bpe_tokenizer}[request.param]


def ids_of(tokenizer, prompt):
    twice = tokenizer.bos_token and prompt.startswith(tokenizer.bos_token)
    return tokenizer(prompt, add_special_tokens=not twice)["input_ids"]


def chat(tokenizer):
    return lambda text: tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    )


@every_retrieval
@pytest.mark.parametrize("length", [*range(420, 430), 700])
@pytest.mark.parametrize("filler", ["noise", "prose"])
def test_a_prompt_has_exactly_the_tokens_asked_for(make, length, filler, any_tokenizer):
    for problem in make(any_tokenizer, length=length, n=2, seed=length, filler=filler):
        assert len(ids_of(any_tokenizer, problem.prompt)) == length
        assert problem.extra["ids"] == ids_of(any_tokenizer, problem.prompt)


@every_retrieval
def test_a_chat_template_counts_and_stands_before_the_words_that_begin_the_answer(make, tokenizer):
    for problem in make(tokenizer, length=600, n=3, template=chat(tokenizer)):
        assert problem.prompt.startswith("<|user|>")
        assert re.search(r"\?\n<\|assistant\|>The (pass key|value of .*) is$", problem.prompt)
        assert len(ids_of(tokenizer, problem.prompt)) == 600


def test_a_template_that_begins_the_text_itself_gets_no_second_beginning(tokenizer):
    problem = passkey(tokenizer, length=400, n=1, template=lambda text: f"<|bos|>{text}\n")[0]
    assert problem.extra["ids"].count(tokenizer.bos_token_id) == 1
    assert len(problem.extra["ids"]) == 400


@every_retrieval
def test_needles_are_where_they_are_said_to_be_and_nowhere_else(make, any_tokenizer):
    for problem in make(any_tokenizer, length=900, n=5, seed=2, filler="prose"):
        ids, needles = problem.extra["ids"], problem.extra["needles"]
        assert needles == sorted(needles)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(needles))
        written = "".join(any_tokenizer.decode(ids[begin:end]) for begin, end in needles)
        assert problem.answer in written
        rest = list(ids[: problem.extra["question"]])
        for begin, end in reversed(needles):
            del rest[begin:end]
        assert problem.answer not in any_tokenizer.decode(rest)
        assert problem.answer not in any_tokenizer.decode(ids[problem.extra["question"] :])


def test_the_context_tells_the_answer_of_a_chain_and_its_needles_are_the_chain(any_tokenizer):
    for hops, chains in ((0, 1), (2, 2), (3, 4)):
        for problem in multi_hop(any_tokenizer, length=900, n=4, seed=hops, hops=hops, chains=chains):
            known = {}
            for name, source in re.findall(r"Let (\w+) = (\w+)\.", problem.prompt):
                known[name] = source if source.isdigit() else known[source]  # fails where a chain runs backwards
            asked = re.search(r"value of (\w+)\?", problem.prompt).group(1)
            assert known[asked] == problem.answer
            assert len(known) == chains * (hops + 1)
            assert len(set(known.values())) == chains
            ids = problem.extra["ids"]
            steps = [any_tokenizer.decode(ids[begin:end]) for begin, end in problem.extra["needles"]]
            assert problem.answer in steps[0]
            assert asked in steps[-1]
            assert len(steps) == hops + 1
            assert len(problem.extra["others"]) == (chains - 1) * (hops + 1)


@pytest.mark.parametrize("form", ["word", "uuid"])
@pytest.mark.parametrize("needles", [1, 3])
def test_the_context_tells_the_values_of_the_keys_asked_for(form, needles, any_tokenizer):
    for problem in key_value(any_tokenizer, length=1200, n=4, seed=1, form=form, needles=needles):
        context, asked = problem.prompt.split("\n\nWhat", 1)
        pairs = re.findall(r"The value of (.+?) is (\S+)\.", context)
        assert len(pairs) == len(dict(pairs)) == problem.extra["keys"] >= needles
        names = [name for name, _ in pairs if name in asked.split("?")[0]]
        assert len(names) == needles
        assert ", ".join(dict(pairs)[name] for name in names) == problem.answer
        assert len(problem.extra["needles"]) == needles


def test_as_many_pairs_as_fit_or_as_many_as_asked_for(any_tokenizer):
    full = key_value(any_tokenizer, length=1500, n=2)
    per_pair = [(p.extra["question"] - 60) / p.extra["keys"] for p in full]
    assert all(len(any_tokenizer("The value of quick maple is 12345. ")["input_ids"]) * 1.5 > size for size in per_pair)
    few = key_value(any_tokenizer, length=1500, n=2, keys=5)
    assert [problem.extra["keys"] for problem in few] == [5, 5]
    spans = sorted(few[0].extra["needles"] + few[0].extra["others"])
    gaps = [after[0] - before[1] for before, after in itertools.pairwise(spans)]
    assert min(gaps) > 0.5 * max(gaps)  # evenly spread over the filler


@pytest.mark.parametrize(("depth", "low", "high"), [(0.0, 0.0, 0.12), (0.5, 0.4, 0.6), (1.0, 0.88, 1.0)])
def test_the_needle_stands_at_the_depth_asked_for(depth, low, high, any_tokenizer):
    for problem in passkey(any_tokenizer, length=1500, n=2, depth=depth):
        begin, end = problem.extra["needles"][0]
        place = begin / (problem.extra["question"] - (end - begin))
        assert low <= place <= high
    pairs = key_value(any_tokenizer, length=1500, n=2, depth=depth)
    for problem in pairs:
        assert low <= problem.extra["needles"][0][0] / problem.extra["question"] <= high


def test_depths_are_spread_evenly_by_default(tokenizer):
    problems = passkey(tokenizer, length=1200, n=8)
    assert sorted(problem.extra["depths"][0] for problem in problems) == [(i + 0.5) / 8 for i in range(8)]
    places = np.array([problem.extra["needles"][0][0] for problem in problems])
    assert np.corrcoef(places, [problem.extra["depths"][0] for problem in problems])[0, 1] > 0.99


@every_retrieval
def test_the_context_does_not_depend_on_the_question(make, any_tokenizer):
    problem = make(any_tokenizer, length=600, n=1)[0]
    ids, start = problem.extra["ids"], problem.extra["question"]
    assert any_tokenizer.decode(ids[start:]).lstrip().startswith(("What", "Which"))
    # What stands before the question is the same when it is tokenised alone.
    before = any_tokenizer.decode(ids[:start], skip_special_tokens=True)
    assert ids_of(any_tokenizer, before)[: start - 2] == ids[: start - 2]


@every_retrieval
def test_only_the_right_answer_is_right(make, tokenizer):
    for problem in make(tokenizer, length=700, n=3, seed=4):
        assert problem.check(f" {problem.answer}.")
        assert problem.check(f"{problem.answer}\nAnd so on, with 99999 other numbers.")
        assert not problem.check(f"12345, no, {problem.answer}")
        assert not problem.check(problem.answer + "0")
        assert not problem.check("")
        assert not problem.check(problem.answer[:-1])


def test_several_needles_must_all_be_named(tokenizer):
    problem = key_value(tokenizer, length=900, n=1, needles=3)[0]
    first, second, third = problem.answer.split(", ")
    assert problem.check(f"{third}, {first} and {second}")
    assert not problem.check(f"{first}, {second}")


@every_retrieval
def test_problems_depend_on_the_seed_alone(make, tokenizer):
    def states():
        return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002

    before = states()
    first = [(problem.prompt, problem.answer) for problem in make(tokenizer, length=500, n=3, seed=7)]
    assert states() == before
    assert first == [(problem.prompt, problem.answer) for problem in make(tokenizer, length=500, n=3, seed=7)]
    other = [(problem.prompt, problem.answer) for problem in make(tokenizer, length=500, n=3, seed=8)]
    assert {answer for _, answer in first}.isdisjoint(answer for _, answer in other)


def test_where_keys_run_out_filler_takes_their_place(tokenizer, monkeypatch):
    monkeypatch.setattr(_retrieval, "QUALITIES", ["quick", "quiet"])
    monkeypatch.setattr(_retrieval, "THINGS", ["fox", "owl", "oak"])
    problem = key_value(tokenizer, length=1500, n=1)[0]
    assert len(problem.extra["ids"]) == 1500
    assert problem.extra["keys"] == 6
    assert "The sky is blue." in problem.prompt
    with pytest.raises(ValueError, match="there are 6 keys of two words, 7 were asked for"):
        key_value(tokenizer, length=1500, n=1, keys=7)


def test_problems_can_be_sent_to_another_process(tokenizer):
    made = [
        *(make(tokenizer, length=400, n=1)[0] for make in RETRIEVAL),
        *(make(n=1)[0] for make in (arithmetic, countdown, subset_sum)),
        *own([("a", "b"), ("c", "3")]),
    ]
    for problem in made:
        again = pickle.loads(pickle.dumps(problem))
        assert again.prompt == problem.prompt
        assert again.check(problem.answer)
        assert not again.check("something else")


@every_retrieval
def test_what_cannot_be_built_is_refused(make, tokenizer):
    with pytest.raises(
        ValueError, match=r"a prompt of 40 tokens cannot hold the question and \d+ facts, which take \d+"
    ):
        make(tokenizer, length=40, n=1)
    with pytest.raises(ValueError, match=r"the filler ends after \d+ of the \d+ tokens"):
        make(
            tokenizer,
            length=5000,
            n=1,
            filler=["One sentence. Another one."],
            **({"keys": 3} if make is key_value else {}),
        )
    with pytest.raises(ValueError, match="a fast tokenizer"):
        make(object(), length=500, n=1)
    with pytest.raises(ValueError, match="n must be at least 1"):
        make(tokenizer, length=500, n=0)


def test_arguments_out_of_range_are_refused(tokenizer):
    with pytest.raises(ValueError, match=r"depth must be in \[0, 1\]"):
        passkey(tokenizer, length=500, n=1, depth=1.5)
    with pytest.raises(ValueError, match="3 needles cannot be among 2 keys"):
        key_value(tokenizer, length=500, n=1, keys=2, needles=3)
    with pytest.raises(ValueError, match="form must be"):
        key_value(tokenizer, length=500, n=1, form="json")
    with pytest.raises(ValueError, match="hops"):
        multi_hop(tokenizer, length=500, n=1, hops=-1)


def test_filler_that_tells_the_answer_or_spells_a_special_token_is_left_out(tokenizer):
    # Every number of five digits stands in this filler, so that none of its sentences but the last may be used with any key.
    giveaway = ["The tokens <|eos|> and <|user|> end a turn. Plain words follow one another here. " * 40]
    problem = passkey(tokenizer, length=600, n=1, filler=giveaway)[0]
    assert "<|" not in problem.prompt
    key = problem.answer
    spoiled = passkey(tokenizer, length=600, n=1, filler=[f"It is {key}. Plain words follow one another here. " * 40])[
        0
    ]
    assert spoiled.answer == key
    assert spoiled.prompt.count(key) == 2


@pytest.mark.models
@pytest.mark.parametrize("name", ["gemma-3-270m", "qwen2.5-coder-0.5b-instruct"])
@every_retrieval
def test_lengths_are_exact_for_real_tokenizers_and_what_the_model_is_given(name, make, real_model):
    lm = real_model(name)
    template = lm.prompt if lm.tokenizer.chat_template else None
    for filler in ("noise", "documentation"):
        for problem in make(lm.tokenizer, length=1000, n=2, filler=filler, template=template):
            assert lm.encode(problem.prompt)[0].tolist() == problem.extra["ids"]
            assert len(problem.extra["ids"]) == 1000
