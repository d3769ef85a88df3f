"""Means over masks that add up over micro-batches, and numbers of attempts spread over their tokens."""

import math

import pytest
import torch

from cameraready.posttraining._masks import FEEDBACK, PADDING, PROMPT, loss_mask, masked_mean, spread

pytestmark = pytest.mark.torch
VALUES = torch.tensor([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0], [5.0, 5.0, 5.0]])
MASK = torch.tensor([[1, 1, 0], [0, 1, 0], [0, 0, 0]])


@pytest.mark.parametrize(
    ("per", "total", "wanted"),
    [
        ("token", None, 23 / 3),
        ("token", 46, 0.5),
        ("sequence", None, (1.5 + 20 + 0) / 3),  # a row without tokens counts as 0
        ("sequence", 43, 0.5),
        ("constant", 230, 0.1),
        ("constant", torch.tensor(230.0), 0.1),
    ],
)
@pytest.mark.parametrize("kind", [torch.bool, torch.long, torch.float32])
def test_means_by_hand(per, total, wanted, kind):
    assert masked_mean(VALUES, MASK.to(kind), per=per, total=total).item() == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("per", ["token", "sequence", "constant"])
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_what_the_mask_leaves_out_may_be_anything(per, odd):
    values = VALUES.masked_fill(MASK == 0, odd).requires_grad_(True)
    found = masked_mean(values, MASK, per=per, total=10)
    assert found.item() == masked_mean(VALUES, MASK, per=per, total=10).item()
    found.backward()
    assert (values.grad[MASK == 0] == 0).all()
    assert (values.grad[MASK == 1] > 0).all()


@pytest.mark.parametrize("per", ["token", "sequence", "constant"])
@pytest.mark.parametrize("rows", [0, 2])
def test_an_empty_mask_gives_0_with_a_graph(per, rows):
    values = torch.full((rows, 3), math.nan, requires_grad=True)
    found = masked_mean(values, torch.zeros(rows, 3), per=per, total=5 if per == "constant" else None)
    assert found.item() == 0
    found.backward()
    assert (values.grad == 0).all()


@pytest.mark.parametrize("per", ["token", "sequence", "constant"])
def test_any_partition_of_the_rows_adds_up(per):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(6, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(6, 5, generator=generator) < 0.5
    total = {"token": mask.sum(), "sequence": 6, "constant": 30}[per]
    whole = masked_mean(values, mask, per=per, total=total)
    for sizes in ((1, 5), (2, 3, 1), (1,) * 6):
        parts = zip(values.split(sizes), mask.split(sizes), strict=True)
        assert sum(masked_mean(*part, per=per, total=total) for part in parts).item() == pytest.approx(whole.item())
    assert whole.item() == pytest.approx(
        masked_mean(values, mask, per=per, total=None if per != "constant" else 30).item()
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("per", ["token", "sequence", "constant"])
def test_half_precision_is_summed_in_single(dtype, per):
    values = torch.full((300, 512), 2.125, dtype=dtype, requires_grad=True)  # their sum is beyond float16
    found = masked_mean(values, torch.ones(300, 512), per=per, total=300 * 512 if per == "constant" else None)
    assert found.dtype == torch.float32
    assert found.item() == 2.125
    found.backward()
    assert values.grad.dtype == dtype


def test_a_total_of_one_number_keeps_the_mean_a_scalar():
    found = masked_mean(VALUES, MASK, total=torch.tensor([46]))
    assert found.shape == ()
    assert found.item() == 0.5


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"mask": MASK * 0.5}, "numbers other than 0 and 1"),
        ({"mask": MASK * math.nan}, "numbers other than 0 and 1"),
        ({"total": torch.tensor([1, 2])}, "one number"),
        ({"mask": MASK[:, :2]}, "of one shape"),
        ({"values": VALUES[0], "mask": MASK[0]}, "of one shape"),
        ({"per": "batch"}, "per must be"),
        ({"per": "constant"}, "give it as total"),
        ({"total": 0}, "total must be above 0"),
        ({"total": math.nan}, "total must be above 0"),
    ],
)
def test_impossible_means_are_refused(change, match):
    given = {"values": VALUES, "mask": MASK} | change
    with pytest.raises(ValueError, match=match):
        masked_mean(given.pop("values"), given.pop("mask"), **given)


def test_the_numbers_of_attempts_stand_on_their_tokens():
    ids = torch.tensor([[PROMPT, 0, 0, FEEDBACK, 1, PADDING], [0, FEEDBACK, 1, 1, FEEDBACK, 2]])
    per_attempt = torch.tensor([[0.5, -1.0, math.nan], [3.0, 4.0, 5.0]], dtype=torch.float64, requires_grad=True)
    found = spread(per_attempt, ids, fill=9.0)
    assert found.tolist() == [[9, 0.5, 0.5, 9, -1, 9], [3, 9, 4, 4, 9, 5]]
    assert found.dtype == torch.float64
    found.sum().backward()
    assert per_attempt.grad.tolist() == [[2, 1, 0], [1, 2, 1]]
    assert loss_mask(ids).tolist() == [[False, True, True, False, True, False], [True, False, True, True, False, True]]


def test_a_batch_without_attempts_is_filled():
    assert spread(torch.ones(1, 2), torch.full((1, 3), PADDING), fill=2.0).tolist() == [[2, 2, 2]]


@pytest.mark.parametrize(
    ("per_attempt", "ids", "match"),
    [
        (
            torch.tensor([[1.0, 2.0], [1.0, math.nan]]),
            torch.tensor([[0, 1], [0, 1]]),
            "attempt 1 of row 1 has tokens.*NaN",
        ),
        (torch.ones(1, 2), torch.tensor([[0, 2]]), "attempt 2 has tokens.*for 2 attempts"),
        (torch.ones(2, 2), torch.tensor([[0, 1]]), "must have one B"),
        (torch.ones(2), torch.tensor([[0, 1]]), "must have one B"),
    ],
)
def test_attempts_without_a_number_are_refused(per_attempt, ids, match):
    with pytest.raises(ValueError, match=match):
        spread(per_attempt, ids)
