"""What the study compares with and measures on: outliers that change nothing, rivals by their formulas, texts, a user's model."""

import importlib.resources
import json

import polars as pl
import pytest
import torch

from cameraready.evidence import Context
from cameraready.evidence.checking import check
from cameraready.evidence.specs import Spec
from cameraready.lm.fptquant import QuantConfig
from cameraready.lm.fptquant.base_model import MASSIVE, architecture, ill_conditioned, in_float64, train
from cameraready.lm.fptquant.rivals import RECIPES, smoothed
from cameraready.lm.fptquant.study import given_model, trained_block, trial
from cameraready.lm.fptquant.trials import exact_everywhere, exact_here, subsets, weight_norm
from cameraready.lm.fptquant.workloads import TrainedModel, documentation, nats, open_workload, texts
from cameraready.models import open_model, tiny_model, tiny_tokenizer
from tests.lm.fptquant_models import awkward, tokens

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def small():
    return architecture(tiny_tokenizer(), layers=2, hidden=64)


def test_outliers_that_are_put_in_do_not_change_the_function_and_are_outliers(small):
    model = in_float64(small)
    ids = tokens(shape=(4, 32))
    made = ill_conditioned(model, 3, ids=ids)
    assert (made(ids).logits - model(ids).logits).abs().max() < 1e-9
    for name in ("k_proj", "up_proj"):
        rows = {
            who: next(p for n, p in net.named_parameters() if name in n).norm(dim=1)
            for who, net in (("before", model), ("after", made))
        }
        assert rows["after"].max() / rows["after"].min() > 5 * rows["before"].max() / rows["before"].min()
    with torch.no_grad():
        stream = {
            who: net(ids, output_hidden_states=True).hidden_states[1].square().mean((0, 1))
            for who, net in (("before", model), ("after", made))
        }
    shares = {who: value.max() / value.sum() for who, value in stream.items()}
    assert shares["after"] > 2 * shares["before"]
    other = ill_conditioned(model, 4, ids=ids)
    assert not torch.equal(next(other.parameters()), next(made.parameters())) or any(
        not torch.equal(a, b) for a, b in zip(other.parameters(), made.parameters(), strict=True)
    )


def test_training_is_repeatable_leaves_global_randomness_alone_and_makes_massive_tokens(small):
    import copy

    codes = tokens(shape=(1, 400))[0]
    state = torch.random.get_rng_state()
    nets = [train(copy.deepcopy(small), codes, steps=2, batch=2, length=16) for _ in range(2)]
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True))
    rows = nets[0].get_input_embeddings().weight.detach().norm(dim=1)
    assert rows[MASSIVE] > 1000 * rows.median()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma3"])
def test_smoothing_preserves_the_function_and_follows_the_formula(kind):
    model = awkward(kind)
    ids = tokens()
    made = smoothed(model, [ids])
    assert (made(ids).logits - model(ids).logits).abs().max() < 1e-9
    seen = {}
    for who, net in (("before", model), ("after", made)):
        handle = net.model.layers[0].mlp.down_proj.register_forward_pre_hook(
            lambda m, args, who=who: seen.__setitem__(who, args[0].abs().amax((0, 1)))
        )
        net(ids)
        handle.remove()
    column = model.model.layers[0].mlp.down_proj.weight.abs().amax(0)
    # max|x| / (max|x|^a / max|w|^(1 - a)) at a = 1/2
    torch.testing.assert_close(seen["after"], (seen["before"] * column).sqrt())
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_rivals_preserve_the_function_before_they_are_quantised():
    model, ids = awkward("qwen2", dtype=torch.float32), tokens()
    off = QuantConfig(None, None, None)
    for name in RECIPES:
        made = RECIPES[name].make(model, [ids], off, seed=1, local={"steps": 2}, steps=0)
        with torch.no_grad():
            assert (made.model(ids).logits - model(ids).logits).abs().max() < 1e-3, name


def test_quarots_rotations_stay_random_and_spinquants_move_but_stay_rotations():
    model, ids = awkward("llama", dtype=torch.float32), tokens()
    make = {
        name: RECIPES[name].make(model, [ids], QuantConfig(), seed=1, local={}, steps=5)
        for name in ("hadamard", "spin")
    }
    first, second = (make[name].transforms.matrix().detach() for name in ("hadamard", "spin"))
    assert not torch.allclose(first, second, atol=1e-3)
    torch.testing.assert_close(second @ second.T, torch.eye(len(second), dtype=torch.float64), rtol=0, atol=1e-10)
    other = RECIPES["hadamard"].make(model, [ids], QuantConfig(), seed=2, local={}, steps=0)
    assert not torch.equal(other.transforms.matrix(), first)


def test_the_cross_entropy_is_that_of_transformers():
    model = tiny_model("llama")
    ids = tokens(shape=(3, 20))
    expected = [model(row[None], labels=row[None]).loss.item() for row in ids]
    assert nats(model, ids) == pytest.approx(expected, rel=1e-5)


def test_the_weight_norm_is_that_of_the_projections_alone(small):
    made = RECIPES["rtn"].make(small, [tokens()], QuantConfig(), seed=0, local={}, steps=0)
    expected = sum(float(p.detach().abs().pow(4).mean() ** 0.25) for n, p in small.named_parameters() if "proj" in n)
    assert weight_norm(made) == pytest.approx(expected, rel=1e-5)


def test_ten_blocks_try_all_subsets_once_and_the_differences_are_measured():
    every = [names for block in range(10) for names in subsets(block)]
    assert len(every) == len(set(every)) == 64
    workload = TrainedModel("x", layers=1, hidden=64, steps=1, calibration=1, evaluation=1)
    weights = {n: p.detach().numpy() for n, p in workload.empty().state_dict().items()}
    rows = exact_everywhere(workload, Context(seed=0, prepared=weights), block=9, quantizer="fpt")
    assert [row["subset"] for row in rows] == ["+".join(names) for names in subsets(9)]
    assert max(row["difference"] for row in rows) < 1e-9
    assert max(row["difference"] for row in rows) > 0


def test_calibration_text_and_held_out_text_do_not_meet():
    workload = TrainedModel("x", layers=1, hidden=64, steps=1, calibration=4, evaluation=4)
    batches, held = workload.text(0)
    seen, last = (bytes(part.tolist()) for part in documentation())
    assert all(bytes(row.tolist()) in seen for batch in batches for row in batch)
    assert all(bytes(row.tolist()) in last for row in held)
    assert not torch.equal(workload.text(1)[1], held)


def test_a_users_prompts_are_calibrated_and_measured_on_in_turn(tmp_path):
    lines = [json.dumps({"q": f"question {i} " * 5, "a": "yes"}) for i in range(5)]
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    options = {"data": str(tmp_path / "p.jsonl"), "data_columns": "q,a"}
    lm = open_model((tiny_model("llama"), tiny_tokenizer()))
    workload = open_workload(Spec("x", "value", "own", options=options, value=(lm.model, lm.tokenizer)))
    first, rest = texts(workload, lm, calibration=2, evaluation=10, length=20)
    assert [len(first), len(rest)] == [2, 3]
    assert torch.equal(first[0][0], lm.encode("question 0 " * 5 + "\nyes")[0, :20])
    with pytest.raises(ValueError, match="5 of the prompts"):
        texts(workload, lm, calibration=5, evaluation=10, length=20)


def test_windows_begin_with_the_token_that_the_model_expects():
    lm = open_model((tiny_model("llama"), tiny_tokenizer()))
    workload = open_workload(Spec("tiny-llama", "shipped", "tiny-llama"))
    first, rest = texts(workload, lm, calibration=1, evaluation=2, length=10)
    assert all(int(row[0]) == lm.tokenizer.bos_token_id and len(row) == 11 for row in (first[0][0], *rest))


def test_arms_are_paired_within_blocks():
    for conditions in (list(trained_block(3, smoke=False)), list(given_model("own", smoke=False))):
        settings = {}
        for c in conditions:
            if c["part"] == "quantise":
                key = tuple(c.get(name) for name in ("weights", "activations", "kv", "residual", "outliers"))
                settings.setdefault(key, []).append(c["quantizer"])
        for names in settings.values():
            assert "rtn" in names
            assert len(names) == len(set(names))
    assert all(name in RECIPES for names in settings.values() for name in names)


def test_a_run_on_a_users_model_and_method_has_no_failed_trial(tmp_path, monkeypatch):
    monkeypatch.setenv("CAMERAREADY_HOME", str(tmp_path))
    found = check("fptquant", on=(tiny_model("qwen2"), tiny_tokenizer()), tier="smoke", quiet=True)
    assert found.failures == []
    assert {"rtn", "smooth", "hadamard", "fpt-local", "only-residual_scale", "fpt"} == set(found.rows["quantizer"])
    assert found.rows["perplexity"].drop_nulls().min() > 1
    ids = tokens()
    assert found.component.difference(ids) < 1e-3


@pytest.fixture
def task(tmp_path, monkeypatch):
    """A folder with one multiple-choice task of lm-eval over three local questions."""
    pytest.importorskip("lm_eval", reason="needs lm-eval")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    folder = tmp_path / "tasks"
    folder.mkdir()
    rows = [{"q": f"{word} and", "c": ["one", "two", "three"], "a": n} for n, word in enumerate(("one", "two", "six"))]
    (folder / "data.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (folder / "toy.yaml").write_text(
        "task: toy\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: data.jsonl\ntest_split: test\n"
        "output_type: multiple_choice\ndoc_to_text: '{{q}}:'\ndoc_to_choice: '{{c}}'\ndoc_to_target: a\n"
        "metric_list:\n  - metric: acc\n"
    )
    return folder


def test_a_users_tasks_are_run_on_the_model_and_on_what_is_made_of_it(task):
    workload = open_workload(Spec("tiny-llama", "shipped", "tiny-llama", options={"tasks": f"lm-eval:{task}"}))
    planned = [c for c in given_model("own", smoke=True) if c["part"] == "lm-eval"]
    assert [c["quantizer"] for c in planned] == ["full", "rtn", "fpt-local"]
    rows = [row for c in planned for row in trial(workload, Context(seed=0), **{**c, "limit": 3})]
    assert [(r["task"], r["metric"], r["documents"]) for r in rows] == [("toy", "acc", 3)] * 3
    lm = workload.model("cpu", "float32")
    right = 0
    for n, word in enumerate(("one", "two", "six")):
        scores = []
        for choice in ("one", "two", "three"):
            before, whole = (lm.tokenizer(text).input_ids for text in (f"{word} and:", f"{word} and: {choice}"))
            with torch.no_grad():
                logs = lm.model(torch.tensor([whole])).logits[0].log_softmax(-1)
            scores.append(sum(float(logs[i - 1, whole[i]]) for i in range(len(before), len(whole))))
        right += max(range(3), key=scores.__getitem__) == n
    assert rows[0]["score"] == pytest.approx(right / 3)
    assert not lm.model.model.layers[0]._forward_hooks


def test_without_tasks_none_is_run():
    workload = open_workload(Spec("tiny-llama", "shipped", "tiny-llama"))
    (first, *_) = (c for c in given_model("own", smoke=True) if c["part"] == "lm-eval")
    assert trial(workload, Context(seed=0), **first) == []


def test_shipped_rows_hang_together():
    rows = pl.read_parquet(importlib.resources.files("cameraready.lm.fptquant") / "results.parquet")
    rows = rows.filter(
        (pl.col("part") == "quantise") & (pl.col("quantizer") == "rtn") & (pl.col("workload") == "trained-llama")
    )
    assert rows.height
    assert (rows["perplexity"] - rows["nats"].exp()).abs().max() < 1e-6 * rows["perplexity"].max()
    assert ((rows["nats"] - rows["full_nats"]) - rows["excess"]).abs().max() < 1e-9


@pytest.mark.models
def test_a_real_model_keeps_its_logits_to_a_thousandth():
    """Gemma's; those of Qwen, which takes a minute and a half, are in the shipped results."""
    from cameraready.models import ModelError

    workload = open_workload(Spec("gemma-3-270m", "shipped", "gemma-3-270m"))
    try:
        workload.model("cpu", "float32")
    except ModelError as error:
        pytest.skip(str(error))
    rows = exact_here(workload, Context(seed=1), quantizer="fpt", windows=1, length=32, calibration=1)
    assert rows[0]["difference"] < 1e-3
