"""What studies are tried on: models of every source, opened once; the user's prompts and tasks, or a sentence that says what is wrong."""

import csv
import json
import subprocess
import sys

import polars as pl
import pytest
import torch

from cameraready.evidence import Spec, SpecError
from cameraready.evidence.specs import parse, with_own
from cameraready.lm._prompts import read_prompts
from cameraready.lm._workload import ACCEPTS, TINY, LMWorkload, cost, open_lm, shipped_names
from cameraready.models import ModelError, opened, tiny_model, tiny_tokenizer
from tests.lm.conftest import assert_clean

pytestmark = pytest.mark.torch


def shipped(name, **options):
    return Spec(name, "shipped", name, options=options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint as users have one."""
    path = tmp_path_factory.mktemp("checkpoint")
    tiny_model("qwen3", seed=3).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


# --- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TINY)
def test_tiny_models_open_in_code_and_answer(name):
    workload = open_lm(shipped(name))
    lm = workload.model()
    assert workload.is_tiny
    assert workload.name == lm.name == name
    assert lm.model.config.model_type.startswith(TINY[name])
    assert_clean(lm.model)
    with torch.no_grad():
        assert torch.isfinite(lm.model(lm.encode("What is kept?")).logits).all()
    assert open_lm(shipped(name)).model() is lm
    assert workload.model("cpu", "bfloat16").dtype == torch.bfloat16
    assert workload.model("cpu", "").dtype == torch.float32


def test_a_folder_is_opened_once_and_is_what_was_saved(folder):
    spec = parse(str(folder), shipped=shipped_names(), accepts=ACCEPTS)
    workload = open_lm(spec)
    lm = workload.model()
    assert lm is open_lm(spec).model() is opened(str(folder))
    assert not workload.is_tiny
    wanted = tiny_model("qwen3", seed=3).state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in lm.model.state_dict().items())


def test_a_pair_is_taken_as_it_is(tiny, tokenizer):
    model = tiny("mistral")
    spec = Spec("a pair", "value", "own").with_value((model, tokenizer))
    assert open_lm(spec).model().model is model
    assert open_lm(spec).model().tokenizer is tokenizer


@pytest.mark.parametrize(
    ("text", "reference"), [("hf:Qwen/Qwen3-0.6B", "hf:Qwen/Qwen3-0.6B"), ("hf:a/b@main", "hf:a/b@main")]
)
def test_a_hub_id_is_passed_on(text, reference):
    assert open_lm(parse(text, shipped=shipped_names(), accepts=ACCEPTS)).reference == reference


def test_a_packaged_model_that_is_not_here_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("CAMERAREADY_MODELS", str(tmp_path))
    with pytest.raises(ModelError, match="not on this machine"):
        open_lm(shipped("qwen2.5-coder-1.5b-instruct")).model()


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        (shipped("tiny-lama"), "no language model 'tiny-lama'; did you mean tiny-llama"),
        (shipped("zzz"), "no language model 'zzz'; there are gemma-3-270m"),
        (Spec("rows.csv:y", "table", "rows.csv", "/rows.csv", "y"), "'rows.csv:y' is no language model but .* 'table'"),
        (Spec("x", "value", "own").with_value(3), r"as \(model, tokenizer\), not int"),
        (shipped("tiny-llama", tasks="passkeys"), "no task 'passkeys'; did you mean passkey"),
        (shipped("tiny-llama", tasks="passkey,lm-eval:"), "no task 'lm-eval:'; there are passkey, .*lm-eval:NAME"),
    ],
)
def test_what_cannot_be_opened_is_told_at_once(spec, complaint):
    with pytest.raises(SpecError, match=complaint):
        open_lm(spec)


def test_nothing_heavy_is_imported_before_a_model_is_asked_for(tmp_path):
    code = (
        "import sys; import cameraready.lm._workload, cameraready.lm._tasks, cameraready.lm._corpora;"
        "print([m for m in ('torch', 'transformers', 'polars', 'pandas', 'reasoning_gym', 'scipy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"


# --- cost ------------------------------------------------------------------------------------------------------------


def test_the_cost_of_a_folder_is_that_of_its_model(folder):
    spec = parse(str(folder), shipped=shipped_names(), accepts=ACCEPTS)
    found = cost(spec, prompt_tokens=100, new_tokens=28, passes=3)
    model = tiny_model("qwen3", seed=3)
    weights = 4 * sum(p.numel() for p in model.parameters())
    cache = 4 * 128 * sum(2 * layer.self_attn.k_proj.out_features for layer in model.model.layers)
    # What else is held are the activations of one pass, here logits for the most part.
    rest = found.memory_gib * 2**30 - weights - cache
    assert 4 * 100 * model.config.vocab_size <= rest <= 16 * 100 * model.config.vocab_size
    assert cost(spec, prompt_tokens=100, new_tokens=28, passes=6).hours == pytest.approx(2 * found.hours)
    assert found.downloads == ()
    assert any("128 tokens" in note for note in found.notes)
    half = cost(spec, prompt_tokens=100, new_tokens=28, passes=3, dtype="bfloat16")
    assert half.memory_gib == pytest.approx(found.memory_gib / 2)


def test_an_8b_model_has_a_cost_without_its_weights(tmp_path):
    from transformers import LlamaConfig

    LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131_072,
        tie_word_embeddings=False,
        dtype="bfloat16",
    ).save_pretrained(tmp_path)
    spec = parse(str(tmp_path), shipped=shipped_names(), accepts=ACCEPTS)
    found = cost(spec, prompt_tokens=8000, new_tokens=192, passes=100, device="cuda")
    weights, cache = 8_030_261_248 * 2 / 2**30, 8192 * 131_072 / 2**30  # of the released model; 128 KiB a token
    assert weights + cache < found.memory_gib < weights + cache + 5
    # Reading is twice the parameters for each token at some 125 TFLOP/s, writing a sweep of weights and cache for each.
    assert (
        0.7 < found.hours / (100 * (2 * 7.5e9 * 8000 / 125e12 + 192 * (weights + cache) * 2**30 / 1.22e12) / 3600) < 1.6
    )
    assert found.downloads == ()


def test_tiny_models_and_values_have_a_cost_too(tiny, tokenizer):
    given = cost(Spec("x", "value", "own").with_value((tiny("llama"), tokenizer)), prompt_tokens=64)
    shipped_one = cost(shipped("tiny-llama"), prompt_tokens=64, dtype="")
    assert given.memory_gib == shipped_one.memory_gib > 0


# --- tasks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["passkey", "key_value", "multi_hop", "arithmetic", "countdown", "subset_sum", "own"])
def test_problems_of_a_task_are_put_as_the_model_expects_them(task, tmp_path):
    rows = tmp_path / "prompts.jsonl"
    rows.write_text('{"prompt": "6 times 7?", "answer": 42}\n{"prompt": "Capital of France?", "answer": "Paris"}\n')
    workload = open_lm(with_own(shipped("tiny-qwen3"), data=str(rows), tasks=[task, "lm-eval:arc_easy"]))
    assert workload.tasks == (task, "lm-eval:arc_easy")
    lm = workload.model()
    problems = workload.problems(task, lm, n=2, seed=1, length=600)
    assert len(problems) == 2
    for problem in problems:
        assert problem.prompt.startswith("<|user|>")
        assert "<|assistant|>" in problem.prompt
        assert problem.check(problem.answer)
    if task in ("passkey", "key_value", "multi_hop"):
        assert lm.encode(problems[0].prompt)[0].tolist() == problems[0].extra["ids"]
        assert len(problems[0].extra["ids"]) == 600


def test_tasks_that_have_no_problems_say_so():
    workload = open_lm(shipped("tiny-llama"))
    with pytest.raises(ValueError, match="run by cameraready"):
        workload.problems("lm-eval:arc_easy", workload.model(), n=1)
    with pytest.raises(ValueError, match="no prompts"):
        workload.problems("own", workload.model(), n=1)
    assert workload.prompts is None
    assert workload.tasks == ()


# --- prompts ---------------------------------------------------------------------------------------------------------

LONG = "long " * 60_000
PROMPTS = [('one, "two"\nthree', "x"), ("ünï 🤗", "7"), (LONG, "true story"), ("=1+1", "007")]


def written(path, rows):
    if path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps({"question": p, "gold": a, "id": 3}) for p, a in rows), encoding="utf-8")
    elif path.suffix == ".parquet":
        pl.DataFrame(
            {"id": [3] * len(rows), "question": [p for p, _ in rows], "gold": [a for _, a in rows]}
        ).write_parquet(path)
    else:
        with open(path, "w", encoding="utf-8-sig", newline="") as file:
            csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",").writerows([("question", "gold"), *rows])
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".tsv", ".parquet"])
def test_prompts_come_as_they_stand_in_the_file(suffix, tmp_path):
    path = written(tmp_path / f"prompts{suffix}", PROMPTS)
    limit = csv.field_size_limit()
    assert read_prompts(str(path), ["question", "gold"]) == PROMPTS
    assert read_prompts(str(path), ["question"]) == [(prompt, None) for prompt, _ in PROMPTS]
    assert csv.field_size_limit() == limit
    workload = LMWorkload(with_own(shipped("tiny-llama"), data=f"{path}:question,gold"))
    assert workload.prompts == PROMPTS


def test_columns_have_names_by_default(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a", "answer": 1}\n\n{"prompt": "b", "answer": 2.5}\n')
    assert read_prompts(str(path)) == [("a", "1"), ("b", "2.5")]
    path.write_text('\ufeff{"prompt": "a"}', encoding="utf-8")
    assert read_prompts(str(path)) == [("a", None)]
    pl.DataFrame({"prompt": ["a"], "answer": [12]}).write_parquet(tmp_path / "p.parquet")
    assert read_prompts(str(tmp_path / "p.parquet")) == [("a", "12")]


@pytest.mark.parametrize(
    ("name", "content", "columns", "complaint"),
    [
        (
            "p.jsonl",
            '{"prompt": "a"}\n{"prompt": \n',
            [],
            r"line 2 of .*p\.jsonl is not a JSON object \(Expecting value",
        ),
        ("p.jsonl", '["a", "b"]', [], "line 1 of .* is not a JSON object but a list; each line must be one"),
        (
            "p.jsonl",
            '{"prompt": "a", "prompt": "b"}',
            [],
            r"line 1 of .* is not a JSON object \(several values are named prompt",
        ),
        ("p.jsonl", '{"Prompt": "a"}', [], "no column 'prompt'; did you mean 'Prompt'"),
        ("p.jsonl", '{"text": "a"}', ["question"], "no column 'question'; the columns are text"),
        ("p.jsonl", '{"prompt": "a"}', ["prompt", "answr"], "no column 'answr'; the columns are prompt"),
        ("p.jsonl", '{"prompt": "a"}\n{"prompt": "  "}', [], "the prompt in line 2 of .* is empty"),
        ("p.jsonl", '{"prompt": "a"}\n{"other": 1}', [], "line 2 of .* has no prompt"),
        ("p.jsonl", '{"prompt": 3}', [], "the prompt in line 1 of .* is no text but a number"),
        ("p.jsonl", '{"prompt": [{"role": "user"}]}', [], "no text but a list; write the text of the turn"),
        ("p.jsonl", '{"prompt": "a", "answer": null}', [], "line 1 of .* has no answer; leave the column"),
        ("p.jsonl", '{"prompt": "a", "answer": true}', [], "neither text nor a number but true or false"),
        ("p.jsonl", "{}\n{}", [], "no column 'prompt'"),
        ("p.jsonl", "\n \n", [], "is empty"),
        ("p.csv", "prompt,answer\n", [], "has no rows"),
        ("p.csv", "prompt,answer\na,b\nc,d,e\n", [], "line 3 of .* has 3 cells, its first line names 2 columns"),
        ("p.csv", 'prompt,answer\n"a\nb",c\n"open,d\n', [], "line 4 of .* cannot be read"),
        ("p.csv", "prompt;answer\na;b\n", [], "separated by semicolons"),
        ("p.csv", "prompt,prompt\na,b\n", [], "several columns named prompt"),
        ("p.csv", "prompt,answer\na,\n", [], "line 2 of .* has no answer"),
        ("p.csv", "prompt\n\xe9".encode("latin-1"), [], "not UTF-8 text"),
        ("p.parquet", b"PAR1 but not really", [], r"cannot be read as \.parquet"),
        ("p.json", "{}", [], r"prompts are read from \.jsonl, \.csv, \.tsv, \.parquet"),
        ("p.jsonl", '{"a": "x"}', ["a", "b", "c"], "one of answers, but a, b, c were named"),
        ("p.jsonl", '{"a": "x"}', ["a", "a"], "named for prompts and for answers"),
    ],
)
def test_what_is_wrong_with_a_file_is_a_sentence(name, content, columns, complaint, tmp_path):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SpecError, match=complaint):
        read_prompts(str(tmp_path / name), columns)


@pytest.mark.parametrize("name", ["gone.jsonl", "gone.csv", "gone.parquet"])
def test_a_missing_file_is_a_sentence(name, tmp_path):
    with pytest.raises(SpecError, match="cannot be read: No such file"):
        read_prompts(str(tmp_path / name))
