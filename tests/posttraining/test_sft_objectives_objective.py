"""The loss on logits: against torch, transformers and TRL; thresholds, normalisation, accumulation, and labels that are all ignored."""

import math

import pytest
import torch
from torch.nn import functional
from transformers.trainer_pt_utils import LabelSmoother

from cameraready.models import tiny_model
from cameraready.posttraining.sft_objectives import ProbabilityObjective

pytestmark = pytest.mark.torch

B, T, V = 4, 9, 23


def batch(seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(B, T, V, dtype=torch.float64, generator=generator)
    labels = torch.randint(0, V, (B, T), generator=generator)
    likely = logits.argmax(-1).roll(1, 1)
    labels = torch.where(torch.rand(B, T, generator=generator) < 0.5, likely, labels)
    labels[torch.rand(B, T, generator=generator) < 0.3] = -100
    return logits.to(dtype), labels


def graded(loss_of, logits):
    given = logits.clone().requires_grad_()
    loss = loss_of(given)
    loss.backward()
    return loss.detach(), given.grad


OBJECTIVES = {
    "alpha": ProbabilityObjective(alpha=0.5),
    "top": ProbabilityObjective(alpha=0.0, threshold=0.05),
    "bottom": ProbabilityObjective(alpha=1.0, threshold=0.2, side="bottom"),
    "focal": ProbabilityObjective("focal"),
    "mixture": ProbabilityObjective("mixture"),
    "label_smoothing": ProbabilityObjective("label_smoothing"),
}


# --- against libraries ---------------------------------------------------------------------------------------------------


def test_alpha_zero_is_torchs_cross_entropy():
    logits, labels = batch()
    ours = graded(lambda z: ProbabilityObjective(alpha=0.0).loss(z, labels), logits)
    theirs = graded(lambda z: functional.cross_entropy(z[:, :-1].reshape(-1, V), labels[:, 1:].reshape(-1)), logits)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("num_items", [None, 57])
def test_label_smoothing_is_that_of_transformers(num_items):
    logits, labels = batch(1)
    objective = ProbabilityObjective("label_smoothing", smoothing=0.2)
    smoother = LabelSmoother(0.2)
    ours = graded(lambda z: objective.loss(z, labels, num_items=num_items), logits)
    theirs = graded(
        lambda z: smoother({"logits": z}, labels.clone(), shift_labels=True, num_items_in_batch=num_items), logits
    )
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-8)  # theirs sums in float32


def test_gradient_and_value_of_trls_dynamic_fine_tuning():
    """TRL's own loss, computed by its trainer on a tiny model: equal in value to "dft", in gradient to alpha = 1 as well."""
    pytest.importorskip("trl")
    from tests.posttraining.sft_objectives_cases import losses_and_gradients

    theirs = losses_and_gradients(None, loss_type="dft")
    for objective, same_value in ((ProbabilityObjective("dft"), True), (ProbabilityObjective(alpha=1.0), False)):
        ours = losses_and_gradients(objective)
        assert (abs(ours[0] - theirs[0]) < 1e-6) is same_value
        for name, gradient in theirs[1].items():
            torch.testing.assert_close(ours[1][name], gradient, rtol=1e-5, atol=1e-7)


# --- chunked --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gemma2", "cohere"])
@pytest.mark.parametrize("name", ["alpha", "top", "bottom", "focal", "mixture"])
def test_chunked_is_the_plain_loss(kind, name):
    model = tiny_model(kind, seed=1).train()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 200, (3, 11), generator=generator)
    labels = ids.clone()
    labels[:, :4] = -100
    labels[1, 8:] = -100
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    objective = OBJECTIVES[name]
    plain = objective.loss(model(ids, attention_mask=mask).logits, labels, num_items=40)
    plain.backward()
    expected = {key: p.grad.clone() for key, p in model.named_parameters()}
    model.zero_grad()
    chunked = objective.chunked(model, labels, num_items=40, chunk=3, input_ids=ids, attention_mask=mask)
    chunked.backward()
    torch.testing.assert_close(chunked, plain, rtol=1e-5, atol=1e-7)
    for key, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[key], rtol=1e-4, atol=1e-6)


def test_chunks_of_logits_change_nothing():
    logits, labels = batch(2)
    for objective in OBJECTIVES.values():
        whole = graded(lambda z, o=objective: o.loss(z, labels), logits)
        parts = graded(lambda z, o=objective: o.loss(z, labels, chunk=2), logits)
        for one, other in zip(whole, parts, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)


def test_label_smoothing_cannot_be_chunked():
    with pytest.raises(ValueError, match="needs all logits"):
        OBJECTIVES["label_smoothing"].chunked(tiny_model("llama"), torch.zeros(1, 3, dtype=torch.long))


# --- reductions, accumulation ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OBJECTIVES)
def test_micro_batches_add_up_to_the_batch(name):
    logits, labels = batch(3)
    labels[0, 1:] = -100
    labels[0, 4] = 2  # very unequal numbers of labels
    n = int((labels[:, 1:] != -100).sum())
    whole = graded(lambda z: OBJECTIVES[name].loss(z, labels), logits)
    total, gradients = 0.0, []
    for part in (slice(0, 1), slice(1, 4)):
        loss, gradient = graded(
            lambda z, part=part: OBJECTIVES[name]({"logits": z}, labels[part], num_items_in_batch=torch.tensor(n)),
            logits[part],
        )
        total += loss
        gradients.append(gradient)
    torch.testing.assert_close(total, whole[0], rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(torch.cat(gradients), whole[1], rtol=1e-12, atol=1e-15)


def test_kept_labels_add_up_where_their_number_is_given():
    logits, labels = batch(4)
    objective = ProbabilityObjective(alpha=1.0, threshold=0.05, normalize="kept")
    whole = objective.loss(logits, labels)
    kept = objective.stats.summary()["kept_fraction"] * int((labels[:, 1:] != -100).sum())
    parts = [
        objective.loss(logits[part], labels[part], num_items=1000, num_kept=round(kept))
        for part in (slice(0, 1), slice(1, 4))
    ]
    torch.testing.assert_close(sum(parts), whole)


def test_kept_without_a_count_averages_means_by_labels():
    logits, labels = batch(4)
    objective = ProbabilityObjective(alpha=1.0, threshold=0.05, normalize="kept")
    parts = [slice(0, 1), slice(1, 4)]
    n = [int((labels[part][:, 1:] != -100).sum()) for part in parts]
    found = sum(objective.loss(logits[part], labels[part], num_items=sum(n)) for part in parts)
    means = [objective.loss(logits[part], labels[part]) for part in parts]
    torch.testing.assert_close(found, (means[0] * n[0] + means[1] * n[1]) / sum(n))


def test_threshold_zeroes_losses_or_masks():
    logits, labels = batch(5)
    rest = {"alpha": 1.0, "threshold": 0.1}
    logps = logits[:, :-1].log_softmax(-1).gather(-1, labels[:, 1:].clamp_min(0)[..., None])[..., 0]
    mask = labels[:, 1:] != -100
    for side in ("top", "bottom"):
        keep = mask & ((logps.exp() >= 0.1) if side == "top" else (logps.exp() <= 0.1))
        total = (1 - logps.exp())[keep].sum()
        for normalize, denominator in (("all", mask.sum()), ("kept", keep.sum())):
            objective = ProbabilityObjective(**rest, side=side, normalize=normalize)
            torch.testing.assert_close(objective.loss(logits, labels), total / denominator)


def test_thresholds_that_keep_everything_change_nothing():
    logits, labels = batch(6)
    for side, q in (("top", 0.0), ("bottom", 1.0)):
        for normalize in ("all", "kept"):
            kept = ProbabilityObjective(alpha=3.0, threshold=q, side=side, normalize=normalize)
            torch.testing.assert_close(kept.loss(logits, labels), ProbabilityObjective(alpha=3.0).loss(logits, labels))


def test_no_gradient_through_the_comparison():
    logits, labels = batch(7)
    objective = ProbabilityObjective(alpha=0.0, threshold=0.05)
    _, gradient = graded(lambda z: objective.loss(z, labels, reduction="sum"), logits)
    p = logits[:, :-1].softmax(-1).gather(-1, labels[:, 1:].clamp_min(0)[..., None])[..., 0]
    dropped = (labels[:, 1:] == -100) | (p < 0.05)
    assert 0 < int(dropped.sum()) < dropped.numel()
    assert torch.equal(gradient[:, :-1].abs().sum(-1) == 0, dropped)


def test_reductions_agree():
    logits, labels = batch(8)
    for objective in OBJECTIVES.values():
        each = objective.loss(logits, labels, reduction="none")
        assert each.shape == (B, T - 1)
        assert (each[labels[:, 1:] == -100] == 0).all()
        torch.testing.assert_close(each.sum(), objective.loss(logits, labels, reduction="sum"))
        n = (labels[:, 1:] != -100).sum()
        torch.testing.assert_close(each.sum() / n, objective.loss(logits, labels))


def test_weights_multiply_losses_and_leave_the_denominator_alone():
    logits, labels = batch(9)
    objective = OBJECTIVES["alpha"]
    each = objective.loss(logits, labels, reduction="none")
    samples = torch.tensor([0.0, 1.0, 2.0, 0.5])
    n = (labels[:, 1:] != -100).sum()
    torch.testing.assert_close(objective.loss(logits, labels, weights=samples), (each * samples[:, None]).sum() / n)
    tokens = torch.rand(B, T, generator=torch.Generator().manual_seed(0)).double()
    torch.testing.assert_close(objective.loss(logits, labels, weights=tokens), (each * tokens[:, 1:]).sum() / n)
    tokens[labels == -100] = math.nan
    assert torch.isfinite(objective.loss(logits, labels, weights=tokens))
    torch.testing.assert_close(objective.loss(logits, labels, weights=[1.0] * B), objective.loss(logits, labels))
    with pytest.raises(ValueError, match="weights must be one a sample"):
        objective.loss(logits, labels, weights=torch.ones(3))


def test_another_ignored_label():
    logits, labels = batch(10)
    other = labels.masked_fill(labels == -100, -1)
    objective = ProbabilityObjective(alpha=0.5, ignore_index=-1)
    torch.testing.assert_close(objective.loss(logits, other), ProbabilityObjective(alpha=0.5).loss(logits, labels))
    with pytest.raises(ValueError):
        ProbabilityObjective(alpha=0.5).loss(logits, other)


def test_labels_are_not_changed():
    logits, labels = batch(11)
    before = labels.clone()
    for objective in OBJECTIVES.values():
        objective({"logits": logits}, labels, num_items_in_batch=9)
    assert torch.equal(labels, before)


# --- nothing to learn ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("normalize", ["all", "kept"])
def test_ignored_labels_give_a_zero_with_a_graph(name, normalize):
    import dataclasses

    objective = dataclasses.replace(OBJECTIVES[name], normalize=normalize)
    logits, labels = batch(12)
    loss, gradient = graded(lambda z: objective.loss(z, torch.full_like(labels, -100)), logits)
    assert float(loss) == 0
    assert float(gradient.abs().sum()) == 0
    assert objective.stats.summary()["empty_batches"] == 1
    assert objective.stats.summary()["batches_without_survivors"] == 0
    assert math.isnan(objective.stats.summary()["kept_fraction"])


@pytest.mark.parametrize("normalize", ["all", "kept"])
def test_batches_without_survivors_are_counted(normalize):
    objective = ProbabilityObjective(alpha=0.0, threshold=0.999999, normalize=normalize)
    logits, labels = batch(13)
    loss, gradient = graded(lambda z: objective.loss(0.01 * z, labels), logits)
    assert float(loss) == 0
    assert float(gradient.abs().sum()) == 0
    objective.loss(100 * logits, logits.argmax(-1).roll(1, 1))
    seen = objective.stats.summary()
    assert (seen["batches"], seen["batches_without_survivors"], seen["empty_batches"]) == (2, 1, 0)
    objective.stats.reset()
    assert objective.stats.summary()["batches"] == 0


def test_stats_are_those_of_the_labels():
    logits, labels = batch(14)
    objective = ProbabilityObjective(alpha=1.0, threshold=0.1)
    objective.loss(logits, labels)
    mask = labels[:, 1:] != -100
    p = logits[:, :-1].softmax(-1).gather(-1, labels[:, 1:].clamp_min(0)[..., None])[..., 0][mask]
    seen = objective.stats.summary()
    assert seen["tokens"] == int(mask.sum())
    assert seen["mean_probability"] == pytest.approx(float(p.mean()))
    assert seen["kept_fraction"] == pytest.approx(float((p >= 0.1).double().mean()))


# --- numbers that break others ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OBJECTIVES)
def test_half_precision_is_worked_out_in_single(name):
    logits, labels = batch(15, torch.bfloat16)
    objective = OBJECTIVES[name]
    found, gradient = graded(lambda z: objective.loss(z, labels), logits)
    expected, slope = graded(lambda z: objective.loss(z, labels), logits.float())
    assert found.dtype == torch.float32
    assert gradient.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(gradient.float(), slope, rtol=0.01, atol=1e-4)


@pytest.mark.parametrize("name", ["alpha", "top", "bottom", "focal", "mixture"])
def test_words_that_cannot_come_do_no_harm(name):
    """Logits of -inf, at targets and elsewhere: no NaN, and finite gradients everywhere."""
    logits, labels = batch(16)
    logits[:, :, 5] = -math.inf
    labels = labels.masked_fill(labels == 5, 6)
    loss, gradient = graded(lambda z: OBJECTIVES[name].loss(z, labels), logits)
    assert torch.isfinite(loss)
    labels[0, 3] = 5
    loss, gradient = graded(lambda z: OBJECTIVES[name].loss(z, labels), logits)
    assert not loss.isnan()
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("side", ["top", "bottom"])
def test_a_broken_model_is_not_hidden_by_a_threshold(side):
    logits, labels = batch(19)
    objective = ProbabilityObjective("nll", threshold=0.1, side=side)
    assert objective.loss(logits * math.nan, labels).isnan()


def test_a_masked_label_may_be_anything():
    logits, labels = batch(17)
    labels[:, 4] = -100
    expected = OBJECTIVES["focal"].loss(logits, labels)
    logits[:, 3] = math.nan
    torch.testing.assert_close(OBJECTIVES["focal"].loss(logits, labels), expected)


@pytest.mark.parametrize(
    ("ask", "sentence"),
    [
        (lambda o, z, y: o.loss(z, y[:, :-1]), "logits must be"),
        (lambda o, z, y: o.loss(z[:, :1], y[:, :1]), "T of at least 2"),
        (lambda o, z, y: o.loss(z, y.masked_fill(y >= 0, V)), "vocabulary"),
        (lambda o, z, y: o.loss(z, y, reduction="average"), "reduction must be"),
        (lambda o, z, y: o.loss(z, y, num_items=-1), "whole number of at least 0"),
        (lambda o, z, y: o.loss(z, y, num_items=math.nan), "whole number of at least 0"),
        (lambda o, z, y: o.loss(z, y, num_items=0.5), "whole number of at least 0"),
        (lambda o, z, y: o({"loss": 1}, y), "returned no logits"),
        (lambda o, z, y: o({"logits": z}, None), "there are no labels"),
    ],
)
def test_wrong_batches_are_told_apart(ask, sentence):
    logits, labels = batch(18)
    with pytest.raises(ValueError, match=sentence):
        ask(OBJECTIVES["alpha"], logits, labels)
