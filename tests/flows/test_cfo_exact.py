"""The outer loop with exact rounds: the expectation form reaches the analytic optimum, geometrically; the per-sample form another law."""

import math

import pytest
import torch
from scipy.optimize import brentq

from cameraready.flows.cfo import ConstrainedFlowOptimizer, ExactTilt, WeightedPoints, exact_optimum
from tests.flows.cfo_models import bumps, generator

pytestmark = pytest.mark.torch


def plane():
    axis = torch.linspace(-3, 3, 41, dtype=torch.float64)
    points = torch.cartesian_prod(axis, axis)
    return points, -0.5 * ((points - 0.5) ** 2).sum(-1)


#: Prior, reward, constraint, bound.
PROBLEMS = {
    "line": (bumps(), lambda x: x, lambda x: x**2, 1.5),
    "exponential": (bumps(), lambda x: -((x - 3) ** 2) / 2, torch.exp, 2.0),
    "plane": (plane(), lambda x: x[:, 0] + x[:, 1], lambda x: x[:, 0] ** 2 + x[:, 1], 1.0),
    "two bounds": (plane(), lambda x: x.sum(-1), lambda x: torch.stack([x[:, 0], x[:, 1] ** 2], -1), [0.6, 1.0]),
}


def run(problem, rounds=50, **settings):
    prior, reward, constraint, bound = PROBLEMS[problem]
    cfo = ConstrainedFlowOptimizer(ExactTilt(), **settings)
    return cfo.fit(
        prior, reward=reward, constraint=constraint, bound=bound, kl=0.8, rounds=rounds, generator=generator()
    )


def optimum(problem):
    prior, reward, constraint, bound = PROBLEMS[problem]
    return exact_optimum(WeightedPoints(*prior), reward, constraint, bound, kl=0.8)


def distance(law, other):
    return float((law.log_weights.exp() - other.log_weights.exp()).abs().sum() / 2)


def test_the_optimum_is_that_of_a_root_finder():
    (x, log_prior), reward, constraint, bound = PROBLEMS["line"]

    def law(mu):
        return torch.softmax(log_prior + (reward(x) - mu * constraint(x)) / 0.8, 0)

    mu = brentq(lambda mu: float(law(mu) @ constraint(x)) - bound, 0, 50, xtol=1e-14)
    found = optimum("line")
    assert found.price.item() == pytest.approx(mu, abs=1e-10)
    torch.testing.assert_close(found.law.log_weights.exp(), law(mu), rtol=0, atol=1e-12)
    kl = float((law(mu) * (law(mu).log() - torch.log_softmax(log_prior, 0))).sum())
    assert found.objective == pytest.approx(float(law(mu) @ reward(x)) - 0.8 * kl, abs=1e-10)


@pytest.mark.parametrize("problem", PROBLEMS)
def test_expectation_rounds_reach_the_analytic_optimum(problem):
    found, best = run(problem, penalty="expectation", rho=2.0, lambda_min=-100.0), optimum(problem)
    assert max(abs(gap) for gap in found.history[-1].gap) < 1e-6
    assert distance(found.model, best.law) < 1e-6
    torch.testing.assert_close(-found.lagrangian.multiplier, best.price, rtol=0, atol=1e-6)
    assert found.status == "feasible"
    assert found.history[-1].divergence == pytest.approx(best.divergence, abs=1e-6)


def test_the_rate_is_the_proximal_points():
    """With rho held, G shrinks by 1 / (1 + rho Var(c) / alpha) a round near the optimum: one proximal step on the dual."""
    found = run("line", rounds=14, penalty="expectation", rho=0.5, eta=1.0)
    best, (x, _) = optimum("line"), PROBLEMS["line"][0]
    weights, c = best.law.log_weights.exp(), x**2
    variance = float(weights @ c**2 - (weights @ c) ** 2)
    gaps = [abs(each.gap[0]) for each in found.history]
    assert gaps[-1] / gaps[-2] == pytest.approx(1 / (1 + 0.5 * variance / 0.8), rel=1e-3)


@pytest.mark.parametrize("problem", ["line", "plane"])
def test_per_sample_rounds_meet_the_bound_at_another_law(problem):
    """The textbook test keeps rho, and with it the penalty's shape: E[c] = B, but less E[r] - alpha KL than possible; the less so, the smaller rho."""
    best, lost, far = optimum(problem), [], []
    for rho, rounds in ((0.04, 800), (0.2, 200)):
        found = run(problem, rounds=rounds, penalty="per_sample", contraction="textbook", rho=rho, eta=1.0)
        last = found.history[-1]
        assert abs(last.gap[0]) < 1e-4
        far.append(distance(found.model, best.law))
        lost.append(best.objective - (last.reward - 0.8 * last.divergence))
    assert 0 < lost[0] < 0.2 * lost[1]
    assert 1e-3 < far[0] < 0.4 * far[1]


def test_a_large_rho_makes_the_per_sample_form_stay_far_below_the_bound():
    last = run("line", rounds=30, penalty="per_sample", contraction="textbook", rho=20.0).history[-1]
    assert last.multiplier == [0.0]
    assert last.gap[0] < -0.3  # samples above B are squeezed although the mean is far below it


def test_a_bound_that_is_met_anyway_leaves_the_unconstrained_optimum():
    prior, reward, constraint, _ = PROBLEMS["line"]
    tilt = WeightedPoints(*prior)
    expected = torch.log_softmax(tilt.log_prior + reward(prior[0]) / 0.8, 0)
    bound = float(expected.exp() @ constraint(prior[0])) + 0.01
    laws = {}
    for form in ("expectation", "per_sample"):
        cfo = ConstrainedFlowOptimizer(ExactTilt(), penalty=form)
        found = cfo.fit(prior, reward=reward, constraint=constraint, bound=bound, kl=0.8, rounds=5)
        assert found.lagrangian.multiplier.item() == 0
        laws[form] = found.model.log_weights
    torch.testing.assert_close(laws["expectation"], expected)
    # The paper's form taxes every sample above the bound all the same.
    assert float((laws["per_sample"].exp() - expected.exp()).abs().sum()) > 0.05


def test_without_a_reward_it_is_the_nearest_law_that_meets_the_bound():
    prior, _, _, _ = PROBLEMS["line"]
    found = ConstrainedFlowOptimizer(ExactTilt(), penalty="expectation", rho=5.0).fit(
        prior, constraint=lambda x: x, bound=-1.0, kl=1.0, rounds=40
    )
    assert found.model.expectation(prior[0]).item() == pytest.approx(-1.0, abs=1e-8)
    log_ratio = found.model.log_weights - found.model.log_prior
    slope = log_ratio.diff() / prior[0].diff()
    torch.testing.assert_close(slope, slope.mean().expand_as(slope), rtol=1e-6, atol=1e-6)  # exponential in c


def test_an_infeasible_bound_is_told():
    prior, reward, constraint, _ = PROBLEMS["line"]
    with pytest.raises(ValueError, match=r"no law on the points meets the bound -0.1: the constraint is at least 0"):
        exact_optimum(WeightedPoints(*prior), reward, constraint, -0.1, kl=1.0)
    settings = {"penalty": "expectation", "contraction": "textbook", "rho_max": 3.0}
    fit = {"reward": reward, "constraint": constraint, "bound": -0.1, "kl": 1.0}
    found = ConstrainedFlowOptimizer(ExactTilt(), **settings).fit(prior, rounds=200, **fit)
    assert found.status == "infeasible bound"
    assert found.best_feasible is None
    assert found.lagrangian.multiplier.item() == -10
    assert found.lagrangian.penalty.item() == 3
    short = ConstrainedFlowOptimizer(ExactTilt(), **settings).fit(prior, rounds=2, **fit)
    assert short.status == "not feasible within budget"


def test_samples_are_tilted_like_grids_until_too_few_are_left():
    draws = torch.randn(20_000, dtype=torch.float64, generator=generator())
    found = ConstrainedFlowOptimizer(ExactTilt(), penalty="expectation", rho=4.0).fit(
        draws, reward=lambda x: x, constraint=lambda x: x, bound=0.4, kl=1.0, rounds=30
    )
    # N(0, 1) tilted by x (1 - mu) has mean 1 - mu; the tilt's standard error is 1 / sqrt(n) or so.
    assert found.lagrangian.multiplier.item() == pytest.approx(-0.6, abs=4 / math.sqrt(20_000) * 1.5)
    assert found.history[-1].solver["effective_share"] == pytest.approx(math.exp(-(0.4**2)), abs=0.03)
    with pytest.raises(ValueError, match="effective share"):
        ConstrainedFlowOptimizer(ExactTilt()).fit(
            draws, reward=lambda x: 6 * x, constraint=lambda x: x, bound=10.0, kl=1.0, rounds=1
        )


def test_it_stops_when_nothing_moves_any_more():
    found = run("line", penalty="expectation", rho=5.0, reward_tolerance=1e-6)
    assert found.stopped == "converged"
    assert 5 < len(found.history) < 50
    assert abs(found.history[-1].gap[0]) < 1e-6


def test_the_best_feasible_round_is_the_one_with_the_highest_objective():
    found = run("line", rounds=25, penalty="per_sample", rho=2.0)
    worth = {each.round: each.reward - 0.8 * each.divergence for each in found.history if each.feasible}
    assert found.best_feasible.round == max(worth, key=worth.get)
    law = found.model_of(found.best_feasible)
    assert float(law.expectation(PROBLEMS["line"][2](law.points))) <= 1.5 + 1e-5
    assert found.model_of(0).divergence() == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    ("model", "error", "words"),
    [
        (torch.nn.Linear(1, 1), TypeError, "AdjointMatching or NFT"),
        ((torch.zeros(3), torch.zeros(4)), ValueError, "one number for each of the 3 points"),
    ],
)
def test_what_is_no_law_on_points_is_refused(model, error, words):
    with pytest.raises(error, match=words):
        ExactTilt().open(model)
