"""The objective in TRL's trainer and in transformers': exact under accumulation, refusals, logs, evaluation, dtypes."""

import warnings

import pytest
import torch

from cameraready.models import tiny_model
from cameraready.posttraining.sft_objectives import ProbabilityObjective

pytest.importorskip("trl")

from tests.posttraining.sft_objectives_cases import losses_and_gradients, sft_trainer

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def assert_same(found, expected, rtol=1e-4, atol=1e-6):
    assert found[0] == pytest.approx(expected[0], rel=1e-5, abs=1e-6)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=rtol, atol=atol)


@pytest.mark.parametrize("hook", ["trainer", "plain", "function"])
def test_alpha_zero_is_trls_own_loss(hook):
    assert_same(losses_and_gradients(ProbabilityObjective("nll"), hook=hook), losses_and_gradients(None))


@pytest.mark.parametrize("hook", ["trainer", "function"])
def test_accumulated_micro_batches_are_the_whole_batch(hook):
    """Demonstrations of very unequal length, so that means of micro-batches would differ."""
    objective = ProbabilityObjective(alpha=0.5)
    whole = losses_and_gradients(objective, hook=hook)
    assert_same(losses_and_gradients(objective, hook=hook, accumulation=4), whole)


def test_accumulation_is_exact_where_the_threshold_is_the_denominator():
    base = losses_and_gradients(ProbabilityObjective(alpha=1.0, threshold=1e-3, side="top", normalize="kept"))
    objective = ProbabilityObjective(alpha=1.0, threshold=1e-3, side="top", normalize="kept")
    assert_same(losses_and_gradients(objective, accumulation=4), base)


def test_kept_labels_are_counted_under_the_dropout_of_the_losses():
    """So that the micro-batches' losses add up to a mean of what is kept, even after an evaluation."""
    peft = pytest.importorskip("peft")
    objective = ProbabilityObjective("nll", threshold=2e-3, normalize="kept")
    trainer = sft_trainer(objective, accumulation=4)
    adapted = peft.get_peft_model(
        tiny_model("llama", seed=3), peft.LoraConfig(r=4, lora_dropout=0.6, init_lora_weights=False)
    )
    trainer.model = trainer.model_wrapped = adapted
    adapted.eval()
    batches = [trainer.data_collator([trainer.train_dataset[i]]) for i in range(4)]
    torch.manual_seed(0)
    samples, items = trainer.get_batch_samples(iter(batches), 4, torch.device("cpu"))
    for sample in samples:
        trainer.compute_loss(adapted, sample, num_items_in_batch=items)
    seen = objective.stats.summary()
    assert int(trainer._num_kept) == round(seen["kept_fraction"] * seen["tokens"])
    assert 0 < seen["kept_fraction"] < 1


def test_the_threshold_of_that_test_drops_some_tokens():
    trainer = sft_trainer(ProbabilityObjective(alpha=1.0, threshold=1e-3))
    trainer.train()
    assert 0 < trainer.state.log_history[0]["kept_fraction"] < 1


def test_plain_and_chunked_trainers_agree():
    objective = ProbabilityObjective("focal")
    assert_same(losses_and_gradients(objective, hook="plain"), losses_and_gradients(objective))


def test_the_log_tells_what_the_objective_saw():
    trainer = sft_trainer(ProbabilityObjective(alpha=1.0, threshold=0.999))
    trainer.train()
    first = trainer.state.log_history[0]
    assert first["kept_fraction"] == 0
    assert first["loss"] == 0
    assert first["batches_without_survivors"] == 1
    assert 0 < first["mean_probability"] < 0.1
    found = trainer.evaluate()
    # 1 - p summed over what survives is 0, and the evaluation does not count as training.
    assert found["eval_loss"] == 0
    assert found["eval_kept_fraction"] == 0
    assert trainer.objective.stats.summary()["batches"] == 0


def starvation(trainer):
    """The warnings of a training run that say that the threshold let nothing through."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    return [str(w.message) for w in caught if "nothing was learned" in str(w.message)]


@pytest.mark.parametrize("settings", [{}, {"logging_steps": 100}, {"logging_strategy": "no"}])
def test_a_threshold_that_lets_nothing_through_is_told_once(settings):
    trainer = sft_trainer(ProbabilityObjective(alpha=0.5, threshold=0.99, normalize="kept"))
    for name, value in {**settings, "max_steps": 3}.items():
        setattr(trainer.args, name, value)
    (told,) = starvation(trainer)
    assert trainer.state.global_step == 3
    assert "probability of at least 0.99" in told
    assert "quantile(0.5)" in told


def test_a_threshold_at_the_median_keeps_half_and_is_not_warned_of():
    from cameraready.models import tiny_tokenizer
    from cameraready.posttraining.sft_objectives import prior_strength
    from tests.posttraining.sft_objectives_cases import DEMONSTRATIONS

    median = prior_strength(tiny_model("llama", seed=3), tiny_tokenizer(), DEMONSTRATIONS).median
    trainer = sft_trainer(ProbabilityObjective(alpha=0.5, threshold=median))
    assert starvation(trainer) == []
    assert 0.3 < trainer.state.log_history[0]["kept_fraction"] < 0.7
    assert starvation(sft_trainer(ProbabilityObjective(alpha=0.5))) == []
    assert "at most 1e-09" in starvation(sft_trainer(ProbabilityObjective(threshold=1e-9, side="bottom")))[0]


def test_the_log_holds_what_the_docstring_says():
    trainer = sft_trainer(ProbabilityObjective(), include_num_input_tokens_seen="all")
    trainer.train()
    first = trainer.state.log_history[0]
    assert not {"entropy", "mean_token_accuracy", "num_tokens"} & first.keys()
    assert first["num_input_tokens_seen"] > 0


def test_the_cards_example_trains(tmp_path, monkeypatch, capsys):
    from cameraready.catalog import resolve

    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(resolve("beyond-log-likelihood").example, "card", "exec"), names)
    assert names["trainer"].state.global_step == 1
    assert str(names["advice"]) in capsys.readouterr().out


def test_the_card_is_found_by_what_it_replaces_and_not_by_a_word_of_another_job():
    import cameraready

    assert cameraready.find(instead_of="trl.SFTTrainer")[0].slug == "beyond-log-likelihood"
    assert cameraready.find("SFT on noisy demonstrations")[0].slug == "beyond-log-likelihood"
    assert "beyond-log-likelihood" not in [card.slug for card in cameraready.find("entropy collapse")]


def test_evaluation_gives_the_objective_on_whole_logits_where_metrics_want_them():
    def metrics(predicted):
        return {"width": predicted.predictions.shape[-1]}

    trainer = sft_trainer(ProbabilityObjective(alpha=1.0))
    expected = trainer.evaluate()["eval_loss"]
    trainer.compute_metrics = metrics
    trainer.args.prediction_loss_only = False
    found = trainer.evaluate()
    assert found["eval_loss"] == pytest.approx(expected, rel=1e-5)
    assert found["eval_width"] == trainer.model.config.vocab_size


def test_labels_smoothed_in_the_trainer_are_transformers_own():
    """`label_smoothing_factor` of transformers, through TRL where it still takes it."""
    from transformers.trainer_pt_utils import LabelSmoother

    trainer = sft_trainer(ProbabilityObjective("label_smoothing", smoothing=0.1), hook="plain")
    inputs = trainer.data_collator([trainer.train_dataset[i] for i in range(4)])
    trainer.model.eval()
    with torch.no_grad():
        found = trainer.compute_loss(trainer.model, inputs)
        outputs = trainer.model(**{key: value for key, value in inputs.items() if key != "labels"})
        expected = LabelSmoother(0.1)(outputs, inputs["labels"], shift_labels=True)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_transformers_trainer_takes_it_as_a_function(tmp_path):
    """Accumulated over four micro-batches of unequal numbers of labels, equal to one batch, in transformers alone."""
    from transformers import Trainer, TrainingArguments

    generator = torch.Generator().manual_seed(0)
    rows = []
    for n in (1, 3, 7, 2):
        ids = torch.randint(0, 200, (10,), generator=generator)
        labels = torch.full_like(ids, -100)
        labels[-n:] = ids[-n:]
        rows.append({"input_ids": ids, "labels": labels})
    weights = []
    for accumulation in (1, 4):
        args = TrainingArguments(
            str(tmp_path / str(accumulation)), per_device_train_batch_size=4 // accumulation, gradient_accumulation_steps=accumulation,
            max_steps=1, report_to="none", use_cpu=True, optim="sgd", learning_rate=0.1, save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        model = tiny_model("llama", seed=5)
        Trainer(model, args, train_dataset=rows, compute_loss_func=ProbabilityObjective(alpha=0.5)).train()
        weights.append({name: p.detach().clone() for name, p in model.named_parameters()})
    start = dict(tiny_model("llama", seed=5).named_parameters())
    assert any(not torch.equal(weights[0][name], start[name]) for name in start)
    for name in start:
        torch.testing.assert_close(weights[1][name], weights[0][name], rtol=1e-5, atol=1e-7)


def test_no_warning_about_the_hook_that_trl_2_removes():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sft_trainer(ProbabilityObjective(alpha=1.0))
    assert not [w for w in caught if "compute_loss_func" in str(w.message)]


def test_contradictions_are_refused():
    with pytest.raises(ValueError, match="leave loss_type at 'nll'"):
        sft_trainer(ProbabilityObjective(), loss_type="dft")
    with pytest.raises(ValueError, match="for smoothed labels use"):
        sft_trainer(ProbabilityObjective(), label_smoothing_factor=0.1)
    with pytest.raises(ValueError, match="pass chunked=False"):
        sft_trainer(ProbabilityObjective("label_smoothing"))
    with pytest.raises(ValueError, match="ignore_index"):
        sft_trainer(ProbabilityObjective(ignore_index=-1))
    with pytest.raises(TypeError, match="must be a ProbabilityObjective, got str"):
        sft_trainer("dft")


def test_shifted_labels_are_refused_and_not_trained_on_otherwise():
    trainer = sft_trainer(ProbabilityObjective())
    inputs = trainer.data_collator([trainer.train_dataset[0]])
    inputs["shift_labels"] = inputs["labels"]
    with pytest.raises(ValueError, match="sequence parallelism"):
        trainer.compute_loss(trainer.model, inputs)


def test_batches_are_left_as_they_were():
    trainer = sft_trainer(ProbabilityObjective(alpha=1.0))
    inputs = trainer.data_collator([trainer.train_dataset[i] for i in range(4)])
    before = {key: value.clone() for key, value in inputs.items()}
    trainer.compute_loss(trainer.model, inputs)
    assert before.keys() == inputs.keys()
    assert all(torch.equal(before[key], inputs[key]) for key in before)


def test_demonstrations_packed_in_one_row_are_scored_each_by_itself():
    """Padding-free batches come as one row with positions that start anew, and no mask."""
    model = tiny_model("llama", seed=2).eval()
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, 200, (1, n), generator=generator) for n in (5, 9, 3)]
    labels = [row.clone() for row in rows]
    for each in labels:
        each[:, 0] = -100
    packed = {
        "input_ids": torch.cat(rows, 1),
        "position_ids": torch.cat([torch.arange(row.shape[1])[None] for row in rows], 1),
    }
    objective = ProbabilityObjective(alpha=0.5)
    with torch.no_grad():
        together = objective.chunked(model, torch.cat(labels, 1), **packed)
        alone = sum(
            objective.chunked(model, each, num_items=14, input_ids=row) for row, each in zip(rows, labels, strict=True)
        )
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)


def test_adapters_train_through_the_objective():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny_model("llama", seed=1), peft.LoraConfig(r=2, target_modules="all-linear"))
    ids = torch.randint(0, 200, (2, 8), generator=torch.Generator().manual_seed(0))
    objective = ProbabilityObjective(alpha=1.0)
    objective.chunked(model, ids, input_ids=ids).backward()
    plain = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    objective.loss(model(ids).logits, ids).backward()
    assert plain
    for name, p in model.named_parameters():
        if p.requires_grad:
            torch.testing.assert_close(plain[name], p.grad, rtol=1e-4, atol=1e-7)
