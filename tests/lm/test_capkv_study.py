"""The study's own means: its competitors are kvpress's, one prefill serves every policy, contexts are what they say."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch

import cameraready
from cameraready.evidence import Context, Spec
from cameraready.evidence.peers.environments import open_peer
from cameraready.lm import capkv as package
from cameraready.lm.capkv import study
from cameraready.lm.capkv.anchors import full_attention
from cameraready.lm.capkv.cache import prune_by_scores
from cameraready.lm.capkv.trials import contexts
from cameraready.lm.capkv.trials.policies import FURTHER, POLICIES, VARIANTS, LayerState, mean_attention, recent, snapkv
from cameraready.lm.capkv.trials.reading import attended, continued, forward, read, scores_of
from cameraready.models import anatomy, capture, tiny_model

pytestmark = pytest.mark.torch

SOURCE = str(Path(cameraready.__file__).parents[1])
PRESSES = {
    "snapkv": ("SnapKVPress", {"window_size": 32}),
    "expected-attention": ("ExpectedAttentionPress", {}),
    "knorm": ("KnormPress", {}),
    "leverage": ("LeverageScorePress", {}),
    "capkv": ("CapPress", {}),
}


def tokens(length, seed=0):
    return torch.randint(0, 250, (1, length), generator=torch.Generator().manual_seed(seed))


def states_of(model, ids):
    parts = anatomy(model)
    layers = [layer.index for layer in full_attention(parts)]
    generator = torch.Generator().manual_seed(0)
    with capture(model, "attention_input", layers=layers) as seen, torch.no_grad():
        cache = model(ids, use_cache=True).cache
    return [
        LayerState(
            parts, i, seen.last("attention_input", i), cache.layers[i].keys, cache.layers[i].values, 48, generator
        )
        for i in layers
    ]


@pytest.fixture(scope="module")
def peer():
    with open_peer(study.KVPRESS, Path(package.__file__).parent) as remote:
        yield remote


@pytest.mark.peers
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("name", PRESSES)
def test_competitors_score_as_kvpress_does(peer, kind, name):
    press, options = PRESSES[name]
    theirs = peer.scores(SOURCE, kind, {"seed": 5}, tokens(96).numpy(), press, {"compression_ratio": 0.5, **options})
    with torch.no_grad():
        found = [POLICIES[name](state) for state in states_of(tiny_model(kind, seed=5), tokens(96))]
    for one, other in zip(found, theirs, strict=True):
        shared = np.isfinite(one.numpy())
        np.testing.assert_allclose(one.numpy()[shared], other[shared], rtol=2e-3, atol=2e-5)


def test_h2o_is_the_mean_attention_of_the_model_itself():
    model = tiny_model("llama", seed=5, attention="eager")
    with torch.no_grad():
        whole = model(tokens(40), output_attentions=True).attentions
        found = [mean_attention(state) for state in states_of(model, tokens(40))]
    for one, weights in zip(found, whole, strict=True):
        received = weights.sum(2) / torch.arange(40, 0, -1)
        torch.testing.assert_close(one, received.unflatten(1, (2, 2)).mean(2), rtol=1e-4, atol=1e-6)


def workload(name="tiny-llama"):
    return study.open_workload(Spec(name, "shipped", name))


def reading_of(name="tiny-llama"):
    lm = workload(name).model()
    return read(lm, tokens(60), tokens(8, seed=1), 7, 60, seed=0)


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gemma3"])
def test_keeping_everything_changes_nothing(name):
    reading = reading_of(name)
    scores = scores_of(reading, {"recent": recent, "snapkv": snapkv})
    for losses, _ in continued(reading, scores, 60).values():
        torch.testing.assert_close(losses, reading.losses, rtol=1e-5, atol=1e-5)
    measured = attended(reading, scores, {1.0: 60})
    assert measured["recent", 1.0]["output_error"] < 1e-5
    assert measured["recent", 1.0]["capacity"] == pytest.approx(1.0, abs=1e-5)


def test_policies_in_a_batch_are_policies_alone():
    reading = reading_of()
    scores = scores_of(reading, {**POLICIES, **VARIANTS, **FURTHER})
    together = continued(reading, scores, 20)
    for name in ("capkv", "snapkv", "random"):
        alone = continued(reading, {name: scores[name]}, 20)
        torch.testing.assert_close(alone[name][0], together[name][0], rtol=1e-4, atol=1e-4)
    assert len({round(float(losses.mean()), 6) for losses, _ in together.values()}) > 8


def test_the_error_of_the_output_is_that_of_the_models_own_attention():
    reading = reading_of()
    scores = scores_of(reading, {"snapkv": snapkv})
    attention = reading.parts.layers[0].attention
    given = {}
    handle = attention.o_proj.register_forward_pre_hook(lambda module, args: given.setdefault("heads", args[0].clone()))
    heads = []
    try:
        for n_kept in (60, 20):
            cache = prune_by_scores(
                copy.deepcopy(reading.cache), {0: scores["snapkv"][0], 1: scores["snapkv"][1]}, n_kept
            )
            given.clear()
            with torch.no_grad():
                forward(reading.lm, reading.suffix, copy.deepcopy(cache), keep=1)
            heads.append(given["heads"])
    finally:
        handle.remove()
    expected = float((heads[1] - heads[0]).norm() / heads[0].norm())
    first = {"snapkv": {0: scores["snapkv"][0]}}
    alone = type(reading)(**{**vars(reading), "states": {0: reading.states[0]}})
    assert attended(alone, first, {0.3: 20})["snapkv", 0.3]["output_error"] == pytest.approx(expected, rel=1e-3)


def test_a_policy_of_the_users_must_give_scores():
    reading = reading_of()
    with pytest.raises(ValueError, match="policy mine must give scores of shape"):
        scores_of(reading, {"mine": lambda state: state.keys})


def test_contexts_are_as_long_as_they_say_and_answers_follow_their_question():
    load, n = workload(), 4
    lm = load.model()
    for part, length in (("text", 200), ("retrieval", 768), ("copies", 512), ("logs", 512)):
        for document in range(2):
            asked = contexts.asked_of(load, lm, part, document, length, n)
            assert asked.scored <= asked.suffix.shape[1]
            if part == "text":
                assert asked.context.shape == (1, length)
            else:
                text = lm.tokenizer.decode(torch.cat([asked.context, asked.suffix], dim=1)[0])
                answer = lm.tokenizer.decode(asked.suffix[0, -asked.scored :]).strip()
                assert text.endswith(answer)
                assert answer in lm.tokenizer.decode(asked.context[0])
                assert asked.context.shape[1] + asked.suffix.shape[1] >= length


def test_prompts_of_the_user_are_contexts_with_their_answers(tmp_path):
    file = tmp_path / "prompts.jsonl"
    long = "A sentence that is there to be read. " * 6
    file.write_text(f'{{"prompt": "{long}", "answer": "yes"}}\n{{"prompt": "short", "answer": "no"}}\n')
    load = study.open_workload(
        Spec("tiny-llama", "shipped", "tiny-llama", options={"data": str(file), "data_columns": "prompt,answer"})
    )
    ctx = Context(seed=0)
    rows = study.trial(load, ctx, part="text", document=0, length=512, n=12)
    assert {row["policy"] for row in rows} >= {*POLICIES, "whole"}
    assert study.trial(load, ctx, part="logs", document=0, length=512, n=12) == []
    assert study.trial(load, ctx, part="text", document=2, length=512, n=12) == []
    with pytest.raises(ValueError, match=r"prompt 2 has .* give longer prompts"):
        study.trial(load, ctx, part="text", document=1, length=512, n=12)


def test_tasks_without_a_context_are_refused_with_a_sentence():
    load = study.open_workload(Spec("tiny-llama", "shipped", "tiny-llama", options={"tasks": "arithmetic"}))
    with pytest.raises(ValueError, match="no context that could be pruned"):
        study.trial(load, Context(seed=0), part="retrieval", document=0, length=512, n=12)


@pytest.fixture
def task_folder(tmp_path, monkeypatch):
    """Writes a folder with one task of lm-eval over two local documents: ``task_folder("generate_until")``."""
    pytest.importorskip("lm_eval", reason="needs lm-eval")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))

    def write(output_type):
        folder = tmp_path / output_type
        folder.mkdir()
        asked = "A long list of words that nobody reads. " * 4
        (folder / "data.jsonl").write_text(f'{{"q": "{asked}", "a": "x"}}\n{{"q": "{asked} again", "a": "y"}}\n')
        choices = "doc_to_choice: [x, y]\n" if output_type == "multiple_choice" else ""
        metric = "acc" if output_type == "multiple_choice" else "exact_match"
        (folder / "toy.yaml").write_text(
            "task: toy\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: data.jsonl\ntest_split: test\n"
            f"output_type: {output_type}\ndoc_to_text: '{{{{q}}}}'\ndoc_to_target: '{{{{a}}}}'\n{choices}"
            f"metric_list:\n  - metric: {metric}\n"
            + ("generation_kwargs:\n  max_gen_toks: 3\n" if output_type == "generate_until" else "")
        )
        return study.open_workload(Spec("tiny-llama", "shipped", "tiny-llama", options={"tasks": f"lm-eval:{folder}"}))

    return write


def test_a_task_of_lm_eval_is_run_on_pruned_caches(task_folder):
    load = task_folder("generate_until")
    rows = study.trial(load, Context(seed=0), part="lm-eval", document=0, limit=2)
    assert [(row["policy"], row["keep"]) for row in rows] == [
        ("whole", 1.0),
        *(("capkv", keep) for keep in (0.5, 0.25, 0.1)),
    ]
    assert all(row["task"] == "toy" and row["documents"] == 2 and 0 <= row["score"] <= 1 for row in rows)
    assert study.trial(load, Context(seed=0), part="retrieval", document=0, length=512, n=12) == []


def test_a_task_that_uses_no_cache_is_refused_with_a_sentence(task_folder):
    with pytest.raises(ValueError, match="no pruned cache was read, because lm-eval scores given answers in one go"):
        study.trial(task_folder("multiple_choice"), Context(seed=0), part="lm-eval", document=0, limit=1)


def test_without_such_a_task_nothing_is_run():
    load = study.open_workload(Spec("tiny-llama", "shipped", "tiny-llama"))
    assert study.trial(load, Context(seed=0), part="lm-eval", document=0, limit=2) == []


def test_every_planned_condition_is_taken_by_its_trial():
    for tier in ("smoke", "desk", "full"):
        for name in study.STUDY.workloads[tier]:
            found = list(study.plan(tier, name))
            assert found
            assert all({"part"} <= set(condition) for condition in found)


@pytest.mark.parametrize("name", study.LARGE)
def test_the_large_models_are_asked_of_the_hub(name):
    load = study.open_workload(Spec(name, "shipped", name))
    assert load.reference == f"hf:{name}"


def test_the_press_takes_the_shape_of_an_8b_model():
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128_256, rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    layers = full_attention(anatomy(model))
    assert len(layers) == 32
    assert {(layer.attention.n_heads, layer.attention.n_kv_heads, layer.attention.head_dim) for layer in layers} == {
        study.SHAPES["8b"]
    }
