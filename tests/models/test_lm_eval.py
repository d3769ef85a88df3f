"""lm-eval's tasks on models that are open and changed: the numbers are those of a direct computation."""

import json
import random
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from cameraready.models import ModelError, as_lm_eval, evaluate, open_model, tiny_model, tiny_tokenizer

pytest.importorskip("lm_eval", reason="needs lm-eval")

QUESTIONS = [
    {"question": "one and one", "choices": ["two", "seven", "a hat"], "answer": 0},
    {"question": "the sky is", "choices": ["green", "blue", "a hat"], "answer": 1},
    {"question": "a cat says", "choices": ["moo", "woof", "meow"], "answer": 2},
    {"question": "left and", "choices": ["right", "wrong", "tea"], "answer": 0},
]


@pytest.fixture
def task(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "data.jsonl").write_text("\n".join(json.dumps(row) for row in QUESTIONS))
    (folder / "toy.yaml").write_text(
        "task: toy_choice\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: data.jsonl\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: '{{question}}:'\ndoc_to_choice: '{{choices}}'\n"
        "doc_to_target: answer\nmetric_list:\n  - metric: acc\n"
    )
    return folder


@pytest.fixture
def lm():
    return open_model((tiny_model("llama"), tiny_tokenizer()))


def direct(lm, context, continuation):
    """Log-probability of a continuation by one forward pass, and whether it is the most probable one."""
    before = lm.tokenizer(context).input_ids
    whole = lm.tokenizer(context + continuation).input_ids
    with torch.no_grad():
        logs = lm.model(torch.tensor([whole])).logits[0].double().log_softmax(-1)
    places = range(len(before) - 1, len(whole) - 1)
    tokens = whole[len(before) :]
    total = sum(float(logs[place, token]) for place, token in zip(places, tokens, strict=True))
    return total, all(int(logs[place].argmax()) == token for place, token in zip(places, tokens, strict=True))


def ask(wrapped, pairs, kind="loglikelihood"):
    from lm_eval.api.instance import Instance

    return getattr(wrapped, kind)([Instance(kind, {}, pair, number) for number, pair in enumerate(pairs)])


@pytest.mark.parametrize("batch_size", [1, 3])
def test_loglikelihoods_are_those_of_one_forward_pass(lm, batch_size):
    pairs = [("one and one:", " two"), ("a", " much longer continuation, padded"), ("the sky is", " blue"), ("x", "y")]
    found = ask(as_lm_eval(lm, batch_size=batch_size), pairs)
    for pair, (value, greedy) in zip(pairs, found, strict=True):
        expected, most_probable = direct(lm, *pair)
        assert value == pytest.approx(expected, abs=1e-4)
        assert greedy == most_probable


def test_a_local_folder_of_tasks_works_without_a_network(lm, task, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    chosen = [
        int(np.argmax([direct(lm, f"{row['question']}:", f" {choice}")[0] for choice in row["choices"]]))
        for row in QUESTIONS
    ]
    accuracy = np.mean([choice == row["answer"] for choice, row in zip(chosen, QUESTIONS, strict=True)])
    wrapped = as_lm_eval(lm)
    (row,) = evaluate(wrapped, task)
    assert (row["task"], row["metric"], row["n"]) == ("toy_choice", "acc", 4)
    assert row["value"] == accuracy
    assert evaluate(wrapped, str(task / "toy.yaml"), limit=2)[0]["n"] == 2


def test_a_changed_model_is_what_is_judged(lm, task):
    """A hook and a changed head count, and the head is not tied to the embedding again."""
    model = tiny_model("llama", tie=True).eval()
    changed = torch.nn.Linear(model.config.hidden_size, model.config.vocab_size, bias=False)
    model.lm_head = changed
    lm = open_model((model, tiny_tokenizer()))
    weight = changed.weight.detach().clone()
    (value, _), *_ = ask(as_lm_eval(lm), [("a", "b")])
    assert torch.equal(model.lm_head.weight, weight)
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert value == pytest.approx(direct(lm, "a", "b")[0], abs=1e-4)
    handle = model.model.layers[0].register_forward_hook(lambda module, given, out: out * 0.5)
    (hooked, _), *_ = ask(as_lm_eval(lm), [("a", "b")])
    assert hooked != pytest.approx(value, abs=1e-3)
    assert hooked == pytest.approx(direct(lm, "a", "b")[0], abs=1e-4)
    handle.remove()


def test_around_is_entered_for_every_call_and_left(lm):
    entered, inside = [], []

    @contextmanager
    def around():
        entered.append(1)
        inside.append(1)
        handle = lm.model.model.layers[0].register_forward_hook(lambda module, given, out: out * 0.5)
        try:
            yield
        finally:
            inside.pop()
            handle.remove()

    plain = ask(as_lm_eval(lm), [("a", "b"), ("ab", "cd")])
    changed = ask(as_lm_eval(lm, around=around), [("a", "b"), ("ab", "cd")])
    assert len(entered) == 2
    assert not inside
    assert not lm.model.model.layers[0]._forward_hooks
    assert changed != plain
    assert ask(as_lm_eval(lm), [("a", "b"), ("ab", "cd")]) == plain
    ask(as_lm_eval(lm, around=around), [("a", {"until": ["\n"], "max_gen_toks": 3})], kind="generate_until")
    assert len(entered) == 3


def test_around_is_left_when_the_model_fails(lm):
    inside = []

    @contextmanager
    def around():
        inside.append(1)
        try:
            yield
        finally:
            inside.pop()

    def fail(*_):
        raise RuntimeError("broken layer")

    handle = lm.model.model.layers[0].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="broken layer"):
        ask(as_lm_eval(lm, around=around), [("a", "b")])
    handle.remove()
    assert not inside


def test_nothing_else_is_touched(lm, task):
    tokenizer = tiny_tokenizer(pad=False)
    model = lm.model
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    states = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()  # noqa: NPY002
    evaluate(as_lm_eval(model, tokenizer), task)
    assert tokenizer.pad_token is None
    assert random.getstate() == states[0]
    assert np.array_equal(np.random.get_state()[1], states[1])  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), states[2])
    assert all(torch.equal(weights[name], weight) for name, weight in model.state_dict().items())
    assert "tie_weights" not in vars(model)


def test_generation_is_that_of_the_model(lm):
    (written,) = ask(as_lm_eval(lm), [("abc", {"until": [], "max_gen_toks": 6})], kind="generate_until")
    ids = lm.encode("abc")
    expected = lm.model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
    assert written == lm.tokenizer.decode(expected, skip_special_tokens=True)


def test_tasks_that_cannot_be_run_say_why(lm, task, tmp_path, monkeypatch):
    import datasets

    wrapped = as_lm_eval(lm)
    with pytest.raises(ModelError, match="No task"):
        evaluate(wrapped, [])
    with pytest.raises(ModelError, match="limit=0"):
        evaluate(wrapped, task, limit=0)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ModelError, match="holds no task file"):
        evaluate(wrapped, empty)
    (task / "data.jsonl").unlink()
    with pytest.raises(ModelError, match=r"data of the task 'toy_choice' cannot be reached"):
        evaluate(wrapped, task)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    (task / "toy.yaml").write_text(
        (task / "toy.yaml")
        .read_text()
        .replace("dataset_path: json", "dataset_path: nobody/nothing")
        .replace("dataset_kwargs:\n  data_files:\n    test: data.jsonl\n", "")
    )
    with pytest.raises(ModelError, match=r"data of the task 'toy_choice' cannot be reached"):
        evaluate(wrapped, task)
    (task / "toy.yaml").write_text("task: [")
    with pytest.raises(ModelError, match="cannot be read"):
        evaluate(wrapped, task)


@pytest.mark.slow
def test_names_of_lm_eval_are_known_with_near_misses(lm):
    with pytest.raises(ModelError, match=r"no task 'arc_eazy'.*did you mean.*arc_easy"):
        evaluate(as_lm_eval(lm), "arc_eazy")


def test_tokenizers_batches_and_models_that_lm_eval_cannot_use(task):
    with pytest.raises(ModelError, match="no beginning-of-text and no end-of-text token"):
        as_lm_eval(tiny_model("llama"), tiny_tokenizer(pad=False, bos=False, eos=False))
    with pytest.raises(ModelError, match="batch_size=0"):
        as_lm_eval(tiny_model("llama"), tiny_tokenizer(), batch_size=0)
    with pytest.raises(ModelError, match=r"as_lm_eval, not LlamaForCausalLM"):
        evaluate(tiny_model("llama"), task)


def test_a_missing_package_is_named_with_the_extra_that_has_it(monkeypatch):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "lm_eval" else find(name))
    with pytest.raises(ModelError, match=r'pip install "cameraready\[lm-tasks\]"'):
        as_lm_eval(tiny_model("llama"), tiny_tokenizer())


def test_what_is_no_model():
    with pytest.raises(ModelError, match="needs a tokenizer too"):
        as_lm_eval(tiny_model("llama"))
    with pytest.raises(ModelError, match="not int"):
        as_lm_eval(3, tiny_tokenizer())
