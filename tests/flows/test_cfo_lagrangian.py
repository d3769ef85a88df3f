"""The augmented Lagrangian: its reward against the formula, its steps against the algorithm, masks, errors, state."""

import json
import math

import pytest
import torch

from cameraready.flows.cfo import AugmentedLagrangian, FixedWeights
from tests.flows.cfo_models import generator

pytestmark = pytest.mark.torch


def coordinate(i):
    return lambda x: x[..., i]


def test_per_sample_reward_is_the_papers_formula_and_its_gradient_that_of_autograd():
    lam, rho = torch.tensor([-0.7, -0.2]).double(), torch.tensor([0.5, 2.0]).double()
    bound = torch.tensor([0.3, -0.1]).double()
    lagrangian = AugmentedLagrangian(
        coordinate(0), lambda x: x[:, 1:3] ** 2, bound, rho=rho.tolist(), multiplier=lam.tolist()
    )
    x = torch.randn(50, 3, dtype=torch.float64, generator=generator(), requires_grad=True)
    s = x[:, 1:3] ** 2 - bound - lam / rho
    expected = x[:, 0] - (rho / 2 * s.clamp(min=0) ** 2).sum(-1)
    torch.testing.assert_close(lagrangian.reward(x), expected)
    (by_hand,) = torch.autograd.grad(expected.sum(), x)
    found = lagrangian.gradient(x)
    torch.testing.assert_close(found.gradient, by_hand)
    # Each sample's gradient is its own: the batch's size does not divide it.
    torch.testing.assert_close(lagrangian.gradient(x[:1]).gradient, by_hand[:1])


def test_expectation_form_is_the_derivative_of_the_authors_batch_objective():
    rho, lam, bound = 3.0, -0.4, 0.2
    lagrangian = AugmentedLagrangian(
        coordinate(0), lambda x: x[:, 1] ** 2, bound, rho=rho, multiplier=lam, penalty="expectation"
    )
    x = torch.randn(64, 2, dtype=torch.float64, generator=generator(), requires_grad=True)
    whole = x[:, 0].mean() - rho / 2 * ((x[:, 1] ** 2).mean() - bound - lam / rho).clamp(min=0) ** 2
    (by_hand,) = torch.autograd.grad(whole, x)
    torch.testing.assert_close(lagrangian.gradient(x).gradient, 64 * by_hand)


def test_where_the_constraint_is_slack_the_expectation_form_is_the_reward_and_the_per_sample_form_is_not():
    x = torch.tensor([[1.0, -3.0], [0.5, 1.0]], dtype=torch.float64)  # mean of c is -1
    forms = {
        form: AugmentedLagrangian(coordinate(0), coordinate(1), 0.0, penalty=form).reward(x)
        for form in ("expectation", "per_sample")
    }
    assert forms["expectation"].tolist() == [1.0, 0.5]
    assert forms["per_sample"].tolist() == [1.0, 0.25]


def test_small_rho_makes_the_per_sample_form_linear_in_the_constraint():
    """(rho / 2) [g - lambda / rho]^2 = lambda^2 / (2 rho) - lambda g + O(rho): up to a constant the fixed weight -lambda."""
    x = torch.randn(40, 2, dtype=torch.float64, generator=generator())
    small = AugmentedLagrangian(coordinate(0), coordinate(1), 0.1, rho=1e-7, multiplier=-0.8)
    weight = FixedWeights(coordinate(0), coordinate(1), 0.1, 0.8)
    gap = small.reward(x) - weight.reward(x)
    assert float((gap - gap.mean()).abs().max()) < 1e-5


def stepped(contraction, gaps, **settings):
    """lambda, rho and V of rounds whose G is given, by the class."""
    lagrangian = AugmentedLagrangian(None, coordinate(0), 1.0, contraction=contraction, **settings)
    rows = []
    for gap in gaps:
        found = lagrangian.update(torch.tensor([1.0 + gap], dtype=torch.float64), weights=torch.ones(1))
        rows.append((found.next_multiplier.item(), found.next_penalty.item(), found.contraction.item()))
    return rows


@pytest.mark.parametrize("contraction", ["paper", "textbook"])
def test_steps_are_the_algorithms(contraction):
    """Written out again in plain numbers, from the algorithm's statement."""
    gaps = [1.0, 0.8, 0.5, -0.2, 0.4, 0.05, 0.0, -3.0, 0.2]
    lam, rho, last = 0.0, 0.5, None
    expected = []
    for gap in gaps:
        v = min(gap, -lam / rho) if contraction == "paper" else min(-gap, -lam / rho)
        shrank = last is None or (v < 0.99 * last if contraction == "paper" else abs(v) <= 0.99 * abs(last))
        lam = max(-1.2, min(0.0, lam - rho * gap))
        rho = min(rho if shrank else 1.25 * rho, 0.75)
        last = v
        expected.append((lam, rho, v))
    found = stepped(contraction, gaps, lambda_min=-1.2, rho_max=0.75)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-12)
    assert min(row[0] for row in expected) == -1.2  # the floor and the cap were reached
    assert max(row[1] for row in expected) == 0.75


def test_from_lambda_zero_the_papers_test_raises_rho_in_round_two_whatever_happened():
    assert [row[1] for row in stepped("paper", [1.0, 0.01, 0.001])][:2] == [0.5, 0.625]
    assert [row[1] for row in stepped("textbook", [1.0, 0.01, 0.001])] == [0.5, 0.5, 0.5]


def test_constraints_move_independently():
    both = AugmentedLagrangian(None, [coordinate(0), coordinate(1)], [0.0, 5.0], rho=[0.5, 2.0])
    x = torch.randn(30, 2, dtype=torch.float64, generator=generator()) + 2
    one = [AugmentedLagrangian(None, coordinate(i), b, rho=r) for i, (b, r) in enumerate([(0.0, 0.5), (5.0, 2.0)])]
    for _ in range(3):
        found = both.update(x)
        alone = [each.update(x[:, i]) for i, each in enumerate(one)]
        for name in ("next_multiplier", "next_penalty", "contraction", "gap", "standard_error"):
            joint = torch.cat([getattr(each, name) for each in alone])
            torch.testing.assert_close(getattr(found, name), joint)


def test_runs_side_by_side_are_runs_alone():
    x = torch.randn(3, 20, 2, dtype=torch.float64, generator=generator())
    for form in ("per_sample", "expectation"):
        settings = {"penalty": form, "multiplier": -0.3}
        side = AugmentedLagrangian(coordinate(0), coordinate(1), 0.1, runs=(3,), **settings)
        alone = [AugmentedLagrangian(coordinate(0), coordinate(1), 0.1, **settings) for _ in range(3)]
        for _ in range(2):
            torch.testing.assert_close(side.reward(x), torch.stack([each.reward(x[i]) for i, each in enumerate(alone)]))
            side.update(x[..., 1])
            for i, each in enumerate(alone):
                each.update(x[i, :, 1])
        torch.testing.assert_close(side.multiplier, torch.stack([each.multiplier for each in alone]))


def test_standard_error_and_interval_are_those_of_a_mean():
    c = torch.randn(400, dtype=torch.float64, generator=generator()) * 3
    found = AugmentedLagrangian(None, coordinate(0), 1.0).update(c)
    assert found.standard_error.item() == pytest.approx(float(c.std()) / 20, rel=1e-12)
    low, high = found.interval()
    assert (low.item(), high.item()) == pytest.approx(
        (float(c.mean()) - 1 - 1.96 * float(c.std()) / 20, float(c.mean()) - 1 + 1.96 * float(c.std()) / 20)
    )


def test_what_is_not_finite_is_masked_counted_and_never_averaged():
    nan = float("nan")
    lagrangian = AugmentedLagrangian(coordinate(0), coordinate(1), 0.0, penalty="expectation")
    x = torch.tensor([[1.0, 2.0], [nan, 1.0], [2.0, math.inf], [3.0, 4.0]], dtype=torch.float64)
    alone = AugmentedLagrangian(coordinate(0), coordinate(1), 0.0, penalty="expectation")
    valid = x[[0, 3]]
    rewards = lagrangian.reward(x)
    torch.testing.assert_close(rewards[[0, 3]], alone.reward(valid))
    assert rewards[1] == rewards[2] == alone.reward(valid).min()  # a trainer learns to avoid them
    found = lagrangian.gradient(x)
    assert found.scores.masked == 2
    assert found.gradient[1:3].abs().max() == 0
    torch.testing.assert_close(found.gradient[[0, 3]], alone.gradient(valid).gradient)
    update = lagrangian.update(x[:, 1])
    assert (update.used, update.masked, update.mean.item()) == (3, 1, pytest.approx(7 / 3))
    with pytest.raises(FloatingPointError, match="all 2 samples"):
        lagrangian.reward(torch.full((2, 2), nan))
    with pytest.raises(ValueError, match="no sample"):
        lagrangian.update(torch.tensor([nan, nan]))


def test_a_gradient_that_is_not_finite_masks_its_sample_alone():
    lagrangian = AugmentedLagrangian(lambda x: x[:, 0].sqrt(), lambda x: x[:, 0], 10.0)
    found = lagrangian.gradient(torch.tensor([[0.0], [4.0]], dtype=torch.float64))
    assert found.gradient.flatten().tolist() == [0.0, 0.25]
    assert found.scores.valid.tolist() == [False, True]


def test_state_round_trips_through_json_to_the_bit():
    def make():
        return AugmentedLagrangian(None, [coordinate(0), coordinate(1)], [0.0, 0.5], eta=1.7)

    x = torch.randn(30, 2, dtype=torch.float64, generator=generator()) / 3
    first, second = make(), make()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))  # before the first round V is unknown
    first.update(x)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for _ in range(3):
        x = x + 0.1
        a, b = first.update(x), second.update(x)
        assert torch.equal(a.next_multiplier, b.next_multiplier)
        assert torch.equal(a.next_penalty, b.next_penalty)
    with pytest.raises(ValueError, match="lacks penalty"):
        first.load_state_dict({"round": 1, "multiplier": [0.0, 0.0], "contraction": [0.0, 0.0]})
    with pytest.raises(ValueError, match="shape"):
        AugmentedLagrangian(None, coordinate(0), 0.0).load_state_dict(first.state_dict())
    kept = first.state_dict()
    for key, value, words in (
        ("multiplier", [5.0, 0.0], "between lambda_min"),
        ("multiplier", [math.nan, 0.0], "between lambda_min"),
        ("penalty", [-1.0, 1.0], "rho must be above 0"),
        ("contraction", [0.0, 0.0, 0.0], "contraction of the state has shape"),
        ("round", -1, "at least 0"),
    ):
        with pytest.raises(ValueError, match=words):
            second.load_state_dict(kept | {key: value})
        assert torch.equal(second.penalty, first.penalty)


def test_of_one_sample_nothing_is_known_and_odd_weights_are_refused():
    lagrangian = AugmentedLagrangian(None, coordinate(0), 1.0)
    assert lagrangian.update(torch.tensor([1.0])).standard_error.item() == math.inf
    for weights, words in (
        ([0.0, 0.0], "have weight 0"),
        ([-1.0, 2.0], "at least 0"),
        ([1.0], r"one of each sample, shape \(2,\), got shape \(1,\)"),
    ):
        with pytest.raises(ValueError, match=words):
            lagrangian.update(torch.ones(2), weights=torch.tensor(weights))


def test_a_module_is_asked_in_evaluation_mode_and_every_part_of_it_put_back():
    class Scored(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.frozen, self.noisy = torch.nn.Dropout(0.5).eval(), torch.nn.Dropout(0.5)

        def forward(self, x):
            return self.noisy(self.frozen(x))[:, 0]

    score = Scored()
    x = torch.randn(50, 1, generator=generator())
    torch.testing.assert_close(AugmentedLagrangian(score, coordinate(0), 10.0).reward(x), x[:, 0].double())
    assert (score.training, score.noisy.training, score.frozen.training) == (True, True, False)


class Stepped(torch.nn.Module):
    """A black box: where x is above 0."""

    def forward(self, x):
        return (x[:, 0] > 0).double()


@pytest.mark.parametrize(
    ("reward", "constraint", "words"),
    [
        (Stepped(), coordinate(0), "reward has no gradient"),
        (lambda x: x[:, 0].detach().numpy(), coordinate(0), "reward has no gradient"),
        (lambda x: x[:, 0].round(), coordinate(0), "reward differs from sample to sample, and yet"),
        (
            coordinate(0),
            lambda x: torch.stack([x[:, 0], x[:, 0].detach()], -1),
            "constraint 1 differs from sample to sample",
        ),
    ],
)
def test_without_a_gradient_a_sentence_says_what_to_do(reward, constraint, words):
    bound = [0.0, 0.0] if "constraint" in words else 0.0
    lagrangian = AugmentedLagrangian(reward, constraint, bound)
    x = torch.randn(8, 1, generator=generator()) * 3
    lagrangian.reward(x)  # values alone are fine
    with pytest.raises(ValueError, match=f"{words}.*NFT"):
        lagrangian.gradient(x)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"rho": 0.0}, "rho must be above 0"),
        ({"rho": [1.0, 2.0]}, "one of each of the 1 constraints"),
        ({"multiplier": 0.5}, "a textbook's multiplier with its sign changed"),
        ({"lambda_min": 1.0}, "lambda_min must be below 0"),
        ({"tau": 1.0}, "tau must be above 0 and below 1"),
        ({"eta": 0.5}, "eta must be at least 1"),
        ({"penalty": "both"}, "penalty must be"),
        ({"contraction": "none"}, "contraction must be"),
        ({"bound": float("nan")}, "bound must be finite"),
    ],
)
def test_arguments_out_of_range_are_refused(changed, words):
    settings = {"bound": 0.0, **changed}
    with pytest.raises(ValueError, match=words):
        AugmentedLagrangian(None, coordinate(0), settings.pop("bound"), **settings)


@pytest.mark.parametrize(
    ("reward", "constraint", "words"),
    [
        (lambda x: x.mean(), coordinate(0), r"one number each, shape \(4,\), got \(\)"),
        (coordinate(0), lambda x: x[:, None, :1], r"shape \(4,\) or \(4, 1\)"),
        (coordinate(0), lambda x: x[:, :2], "2 constraints and 1 bounds"),
    ],
)
def test_wrong_shapes_are_told(reward, constraint, words):
    with pytest.raises(ValueError, match=words):
        AugmentedLagrangian(reward, constraint, 0.0).reward(torch.ones(4, 3))
