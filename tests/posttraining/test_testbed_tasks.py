"""Enumerable tasks: the shipped families are what they say, one's own from a function, mistakes, and censored times."""

import itertools

import numpy as np
import pytest
import torch
from scipy import stats

from cameraready.posttraining._testbed import (
    EnumerableTask,
    Tabular,
    arms,
    censored,
    exact,
    first_time,
    from_function,
    many_answers,
    two_strategies,
)

pytestmark = pytest.mark.torch


def started(task):
    """Exact probabilities of the start distribution as a policy's, (P, N)."""
    return Tabular(task, 1, start=task.start, dtype=torch.float64).all_log_probs(task).detach()[0]


def test_ones_own_task_from_a_function():
    """Pairs of digits that sum to the prompt's number."""
    task = from_function(
        "sums",
        ([a, b, 10] for a, b in itertools.product(range(10), repeat=2)),
        lambda total, row: row[0] + row[1] == total,
        [0, 7, 18, 30],
        kinds={"doubles": lambda total, row: row[0] == row[1]},
    )
    assert task.correct.sum(-1).tolist() == [1, 8, 1, 0]
    assert (task.prompts, task.completions, task.vocabulary) == (4, 100, 11)
    log_p = Tabular(task, 2).all_log_probs(task)
    torch.testing.assert_close(exact.accuracy(log_p, task.correct)[0], torch.tensor([0.01, 0.08, 0.01, 0.0]))
    torch.testing.assert_close(exact.mass(log_p, task.kinds["doubles"]), torch.full((2, 4), 0.1))
    assert torch.equal(task.features, torch.eye(4))


def test_a_function_may_give_partial_credit():
    task = from_function("closeness", [[0], [1], [2]], lambda goal, row: 1 - abs(goal - row[0]) / 2, [0, 1])
    torch.testing.assert_close(task.reward, torch.tensor([[1.0, 0.5, 0.0], [0.5, 1.0, 0.5]]))
    assert task.correct.tolist() == [[True, True, False], [True, True, True]]


def test_two_strategies_are_half_right_and_always_right():
    task = two_strategies(64, routes=8, digits=4)
    rare, frequent = task.kinds["rare"], task.kinds["frequent"]
    assert torch.equal(rare, ~frequent)
    assert (task.correct & rare).sum(-1).tolist() == [1] * 64  # one answer a prompt
    assert (task.correct & frequent).sum(-1).tolist() == [4] * 64  # on half of eight routes
    log_p = started(task)
    torch.testing.assert_close(exact.mass(log_p, rare), torch.full((64,), 0.02, dtype=torch.float64))
    right = exact.mass(log_p, task.correct & rare) / 0.02
    torch.testing.assert_close(right, torch.full((64,), 0.95, dtype=torch.float64))
    right = exact.mass(log_p, task.correct & frequent) / 0.98
    torch.testing.assert_close(right, torch.full((64,), 0.35, dtype=torch.float64))  # skill 0.7, half of the routes


def test_the_answer_is_in_the_features_and_the_route_is_not():
    """The rare answer is the same function of the features for every prompt; the working routes are balanced over prompts."""
    task = two_strategies(600, digits=3, features=4, seed=1)
    answer = (task.correct & task.kinds["rare"]).to(torch.int64).argmax(-1)
    x = task.features
    nearest = torch.cdist(x[:300], x[300:]).argmin(-1)
    agree = (answer[:300] == answer[300:][nearest]).double().mean()
    shuffled = (answer[:300] == answer[300:].roll(7)[nearest]).double().mean()
    assert float(agree) > float(shuffled) + 0.25
    works = (task.correct & task.kinds["frequent"])[:, : 8 * 9].view(600, 8, 9).any(-1).double()
    assert stats.chisquare(works.sum(0).numpy()).pvalue > 1e-4


def test_many_answers_has_several_and_a_pool_of_extremes():
    task = many_answers(300)
    assert task.correct.sum(-1).unique().tolist() == [9]
    assert task.features.shape == (300, 16)
    p = exact.accuracy(started(task), task.correct)
    all_wrong, all_right = (1 - p) ** 8, p**8
    assert float((all_wrong + all_right).mean()) > 0.6  # most groups of eight teach a group-normalised method nothing
    assert float((all_wrong > 0.5).double().mean()) > 0.25
    assert float((all_right > 0.5).double().mean()) > 0.25
    right = started(task).exp()[task.correct].view(300, 9)
    ratio = right.max(-1).values / right.min(-1).values
    assert float(ratio[p > 0.5].min()) > 8  # some right answers are rarer than others
    assert float(p.min()) >= 1 / 64 - 1e-9


def test_what_many_answers_asks_is_linear_in_the_features():
    """Least squares on one half of the prompts reads both residues and the difficulty of the other half."""
    task = many_answers(1200)
    first = task.correct.to(torch.int64).argmax(-1)
    u, v = first // 24 % 8, first % 24 % 8
    assert bool((task.correct.view(1200, 3, 8, 3, 8)[torch.arange(1200), :, u, :, v]).all())
    x = torch.cat([task.features, torch.ones(1200, 1)], 1)
    p = exact.accuracy(started(task), task.correct)
    for goal in (torch.nn.functional.one_hot(u), torch.nn.functional.one_hot(v)):
        fit = torch.linalg.lstsq(x[:600], goal[:600].float()).solution
        assert float(((x[600:] @ fit).argmax(-1) == goal[600:].argmax(-1)).double().mean()) > 0.97
    fit = torch.linalg.lstsq(x[:600], p[:600, None].float()).solution[:, 0]
    assert float(torch.corrcoef(torch.stack([x[600:] @ fit, p[600:].float()]))[0, 1]) > 0.85


def test_arms_start_rare():
    task = arms(100, good=5, prompts=3)
    assert task.correct.sum(-1).tolist() == [5, 5, 5]
    torch.testing.assert_close(exact.accuracy(started(task), task.correct), torch.full((3,), 0.02, dtype=torch.float64))
    assert task.trie.nodes == 1


def test_families_are_repeated_by_their_seed():
    for make in (arms, two_strategies, many_answers):
        a, b, c = make(prompts=40), make(prompts=40), make(prompts=40, seed=1)
        assert torch.equal(a.correct, b.correct)
        assert torch.equal(a.start, b.start)
        assert not torch.equal(a.correct, c.correct)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": torch.zeros(0, 2, dtype=torch.int64)}, "at least one entry"),
        ({"lengths": torch.tensor([2])}, "one number for each of the 2"),
        ({"lengths": torch.tensor([2, 3])}, "between 1 and the table's width 2, got 2 to 3"),
        ({"lengths": torch.tensor([0, 2])}, "between 1 and"),
        ({"correct": torch.zeros(3, 5, dtype=torch.bool)}, r"shape \(prompts, 2\)"),
        ({"features": torch.zeros(2, 1)}, r"features must have shape \(3, F\)"),
        ({"features": torch.full((3, 1), torch.nan)}, "features must be finite"),
        ({"reward": torch.full((3, 2), torch.nan)}, "reward must be finite: a NaN"),
        ({"reward": torch.zeros(3)}, "reward must have shape"),
        ({"tokens": torch.tensor([[0, 1], [0, 1]])}, "equal to another"),
        ({"lengths": torch.tensor([2, 1])}, "begins another|equal to another"),
        ({"tokens": torch.tensor([[0, 1], [-1, 2]])}, "must not be negative, got -1"),
        ({"vocabulary": 2}, "token 2 is outside the vocabulary of 2"),
    ],
)
def test_mistakes_in_a_task_are_named(change, message):
    good = {
        "tokens": torch.tensor([[0, 1], [0, 2]]),
        "lengths": torch.tensor([2, 2]),
        "correct": torch.ones(3, 2, dtype=torch.bool),
        "features": torch.zeros(3, 0),
    }
    assert EnumerableTask("good", **good).completions == 2
    with pytest.raises(ValueError, match=message):
        EnumerableTask("bad", **{**good, **change})


def test_mistakes_in_a_function_are_named():
    with pytest.raises(ValueError, match=r"verdict on completion \(1,\) of prompt 'b' is not a finite number"):
        from_function("bad", [[0], [1]], lambda p, row: float("nan") if p == "b" and row == (1,) else 0.0, ["a", "b"])
    with pytest.raises(ValueError, match="at least one completion and at least one prompt"):
        from_function("bad", [], lambda p, row: True, ["a"])
    with pytest.raises(ValueError, match="needs at least one token"):
        from_function("bad", [[0], []], lambda p, row: True, ["a"])
    with pytest.raises(ValueError, match="must hold at least 17 tokens"):
        two_strategies(vocabulary=16)
    with pytest.raises(ValueError, match="need at least 15 features, got 8"):
        many_answers(features=8)
    with pytest.raises(ValueError, match="good must be between 1 and 9"):
        arms(10, good=10)


# Times until something happens.


def test_restricted_mean_is_the_area_under_the_survival_curve():
    rng = np.random.default_rng(0)
    times = rng.exponential(100, 40)
    limited = censored(times, 120.0)
    curve = stats.ecdf(limited.data()).sf
    grid = np.concatenate([[0.0], curve.quantiles, [120.0]])
    area = np.sum(np.diff(grid) * np.concatenate([[1.0], curve.probabilities])[: len(grid) - 1])
    assert limited.restricted_mean == pytest.approx(area)
    assert limited.restricted_mean == pytest.approx(np.minimum(times, 120).mean())
    rows = limited.rows("found")
    assert rows[0] == {"found": min(times[0], 120.0), "found_seen": bool(times[0] <= 120)}


def test_log_rank_sees_a_difference_and_no_difference():
    rng = np.random.default_rng(1)
    slow, fast, same = (censored(rng.exponential(scale, 60), 150.0) for scale in (100, 40, 100))
    assert slow.log_rank(fast)[1] < 1e-3
    assert slow.log_rank(same)[1] > 0.01
    assert slow.log_rank(fast)[0] == pytest.approx(-fast.log_rank(slow)[0])
    never = censored([None, None], 10)
    assert never.log_rank(censored([np.nan, 20.0], 10)) == (0.0, 1.0)
    assert never.restricted_mean == 10.0
    assert never.log_rank(censored([1.0, 2.0], 10))[1] < 0.2


def test_censoring_mistakes_are_named():
    for times, limit, message in (
        ([], 1, "no times"),
        ([-1.0], 1, "cannot be negative"),
        ([1.0], 0, "limit must be"),
        ([1.0], np.inf, "limit"),
    ):
        with pytest.raises(ValueError, match=message):
            censored(times, limit)


def test_first_time_a_level_is_reached():
    rows = [
        {"run": r, "step": s, "mass_rare": m}
        for r, ms in ((4, [0.0, 0.6, 0.4]), (5, [0.1, 0.2, 0.3]))
        for s, m in zip((0, 10, 20), ms, strict=True)
    ]
    assert first_time(rows[::-1], "mass_rare", 0.5) == {4: 10.0, 5: None}
    assert first_time(rows, "mass_rare", 0.1) == {4: 10.0, 5: 0.0}
    assert censored(list(first_time(rows, "mass_rare", 0.5).values()), 20).event.tolist() == [True, False]
