"""The study's own machinery: problems and their truth, rivals that are what they say, a user's own flow."""

import math

import numpy as np
import pytest
import torch

from cameraready import check
from cameraready.evidence import Context
from cameraready.evidence.specs import SpecError, value_spec
from cameraready.flows import CosinePath, FlowProblem, velocity_of
from cameraready.flows._toy.mixtures import GaussianMixture
from cameraready.flows._toy.stacked import StackedMLP
from cameraready.flows.cfo import AugmentedLagrangian, FlowPolicy
from cameraready.flows.cfo.experiment import arms, larger, own, problems, trials
from tests.flows.cfo_models import generator

pytestmark = pytest.mark.torch


def test_every_bound_of_the_grids_binds_and_can_be_met():
    for number in range(problems.PROBLEMS):
        given = problems.grid_problem(number)
        best = given.optimum()
        assert bool((best.price > 1e-3).any()), number
        assert float((best.constraint - torch.tensor(given.bound, dtype=torch.float64)).max()) < 1e-9
        free = torch.softmax(given.prior.log_weights + given.reward(given.prior.points) / given.kl, 0)
        c = given.constraint(given.prior.points)
        spread = (free @ (c - free @ c).square()).sqrt()
        torch.testing.assert_close(spread, torch.ones_like(spread))


def test_what_a_law_lacks_of_the_optimum_is_its_divergence_from_it():
    """J* - (E[r] - alpha KL - mu (E[c] - B)) = alpha KL(p || p*) for any law: what the study's column is."""
    best, grid = problems.plane_optimum(), problems.plane_grid()
    task = problems.PLANE
    r, c = task.reward(grid.points), task.constraint(grid.points)
    for weight in (0.0, 1.0, 20.0):
        law = grid.copy()
        law.log_weights = torch.log_softmax(grid.log_weights + (r - weight * c.sin()) / task.kl, 0)
        paid = float(law.expectation(r)) - task.kl * law.divergence(grid)
        paid -= float(best.price) * (float(law.expectation(c)) - task.bound)
        assert (best.objective - paid) / task.kl == pytest.approx(law.divergence(best.law), abs=1e-6)


def test_draws_of_the_optimum_have_its_means():
    best = problems.plane_optimum()
    x = trials.drawn(best, 20_000, generator())
    assert float(problems.PLANE.reward(x).mean()) == pytest.approx(best.reward, abs=0.03)
    assert float(problems.PLANE.constraint(x).mean()) == pytest.approx(1.0, abs=0.03)


def test_coopers_price_and_steps_are_those_of_the_expectation_form():
    """In its own convention: the same prices, and multipliers of the other sign; only the penalty grows by another rule."""
    task = problems.PLANE
    theirs = arms.Cooper(task, (3,))
    ours = AugmentedLagrangian(task.reward, task.constraint, 1.0, penalty="expectation", eta=1.0, runs=(3,))
    g = generator()
    for number in range(3):
        x = torch.randn(3, 50, 2, generator=g, dtype=torch.float64)
        torch.testing.assert_close(theirs.reward(x), ours.reward(x))
        c = task.constraint(x + torch.tensor([1.0, 0.0]))[..., None]
        found, expected = theirs.update(c), ours.update(c)
        torch.testing.assert_close(-theirs.lagrange.weight.detach(), ours.multiplier[:, 0])
        violated = expected.gap[:, 0] > 0
        grown = torch.where(violated, 1.25, 1.0) * found.penalty
        torch.testing.assert_close(theirs.coefficient.value, grown)
        ours.penalty = theirs.coefficient.value[:, None].clone()
        assert number > 0 or bool(violated.any())


def test_a_sweep_takes_the_feasible_setting_with_the_most_reward():
    reward = torch.tensor([[5.0, 5.0], [3.0, 3.0], [4.0, 4.0]]).repeat_interleave(2, 0)
    constraint = torch.tensor([[2.0, 2.0], [0.5, 0.5], [0.9, 0.9]]).repeat_interleave(2, 0)
    assert arms.chosen(reward, constraint, 1.0, 3).tolist() == [2, 2]
    assert arms.chosen(reward, constraint, 0.1, 3).tolist() == [1, 1]  # none is feasible: the least violation


def test_taking_networks_out_of_a_stack_keeps_them():
    stack = StackedMLP(3, 2, 8, 2)
    x = torch.randn(3, 5, 2, generator=generator())
    torch.testing.assert_close(arms.taken(stack, torch.tensor([2, 0]))(x[[2, 0]], 0.3), stack(x, 0.3)[[2, 0]])
    many = arms.repeated(stack, 2)
    torch.testing.assert_close(many(torch.cat([x, x]), 0.3)[3:], stack(x, 0.3))


class Exact(torch.nn.Module):
    """The exact velocity of N(0, I) data: guidance by a linear reward is then exact."""

    def forward(self, x, t, y=None):
        return (2 * t - 1) * x / (t**2 + (1 - t) ** 2)


class Flow(Exact):
    """The same with a parameter."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))


def test_guidance_by_a_linear_reward_shifts_a_gaussian_as_it_should():
    """E[f | x_t] is linear, and log E[exp f | x_t] differs from f(E[x_1 | x_t]) by a constant: strength 1 is exact."""
    task = problems.Steering(lambda x: x[..., 0], lambda x: x[..., 1], 1.0, kl=1.0)
    base = FlowPolicy(Exact(), (2,), (1,))
    noise = torch.randn(1, 4000, 2, generator=generator(), dtype=torch.float64)
    x = arms.guided(base, task, noise, torch.tensor(0.5), strength=1.0, steps=400)[0]
    plain = arms.guided(base, task, noise, torch.tensor(0.0), strength=0.0, steps=400)[0]
    shift = (x - plain).mean(0)
    assert shift.tolist() == pytest.approx([1.0, -0.5], abs=0.02)


def test_resampling_meets_the_bound_without_training():
    """N(0, I) under r = x_1, c = x_1 + x_2, alpha = 1: tilted by (1 - mu, -mu), and E[c] = 1 - 2 mu."""
    task = problems.Steering(lambda x: x[..., 0], lambda x: x[..., 0] + x[..., 1], 0.4, kl=1.0)
    told = {}
    base = FlowPolicy(Flow(), (2,), (1,)).freeze()
    x = arms.resampled(trials.solver_of("am"), base, task, generator(), 3000, 10, told)[0]
    assert x.mean(0).tolist() == pytest.approx([0.7, -0.3], abs=0.06)
    assert told["draws_each"][0] == pytest.approx(math.exp(0.7**2 + 0.3**2), rel=0.2)


def test_rates_and_good_weights():
    assert trials.slowest_rate([9.0, 5.0, 4.0, 2.0, 1.5, 0.15, 1e-12]) == pytest.approx(0.75)
    assert 0 <= trials.good_weights(0) <= 18


# --- a user's own -------------------------------------------------------------------------------------------------------


def reward(x):
    return x[..., 0]


def limited(x):
    return x[..., 0] + x[..., 1]


DATA = np.random.default_rng(3).normal(size=(60, 2))


def velocity(x, t, y=None):
    t = torch.as_tensor(t, dtype=x.dtype).reshape(-1, *[1] * (x.ndim - 1))
    return (2 * t - 1) * x / (t**2 + (1 - t) ** 2)


def test_a_run_on_a_users_own_flow_has_no_failed_trial(tmp_path, monkeypatch):
    monkeypatch.setenv("CAMERAREADY_HOME", str(tmp_path))
    data = np.random.default_rng(0).normal(size=(300, 2))
    given = ((velocity, data), reward, limited, 0.3, 1.0)
    found = check("cfo", on=given, tier="smoke", quiet=True)
    assert found.failures == []
    assert set(found.rows["arm"]) == {"pretrained", "am", "cfo", "cfo-expectation"}


def test_a_table_becomes_a_flow_with_reward_and_constraint(tmp_path):
    from cameraready.evidence.specs import parse

    rng = np.random.default_rng(1)
    x = rng.normal(size=(200, 3))
    columns = [*x.T, 2 * x[:, 0] - x[:, 1] ** 2, x[:, 0] + x[:, 2]]
    path = tmp_path / "mine.csv"
    path.write_text(
        "a,b,c,gain,cost\n" + "\n".join(",".join(f"{v:.6f}" for v in row) for row in zip(*columns, strict=True))
    )
    opened = own.open_own(parse(f"{path}:reward=gain,constraint=cost", shipped=[], accepts=["table"]))
    assert opened.flow.shape == (3,)
    standard = torch.from_numpy((x - x.mean(0)) / x.std(0))
    for score, target in ((opened.steering.reward, columns[3]), (opened.steering.constraint, columns[4])):
        fit = np.corrcoef(score(standard).numpy(), target)[0, 1]
        assert fit > 0.97
    slope = torch.autograd.functional.jacobian(lambda z: opened.steering.constraint(z).sum(), standard[:5])
    assert slope[:, 0].mean() > 0.4
    with pytest.raises(SpecError, match="no column 'nothing'"):
        own.open_own(parse(f"{path}:reward=nothing,constraint=cost", shipped=[], accepts=["table"]))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (3, "give .flow, reward, constraint, bound"),
        ((np.zeros((20, 2)), 1, limited, 0.3), "must be functions"),
        ((np.zeros((20, 2)), reward, limited, "low"), "must be numbers"),
        ((np.zeros((20, 2)), reward, limited, 0.0), "other than 0"),
        ((np.zeros((20, 2)), reward, limited, 1.0), "never change"),
        (((velocity, DATA, np.arange(60) % 2), reward, limited, 1.0), "labels is not taken"),
        (((velocity, DATA.reshape(30, 1, 2, 2)), reward, limited, 1.0), "no parameters to tune"),
    ],
)
def test_what_is_no_problem_is_refused(given, words):
    with pytest.raises(SpecError, match=words):
        own.open_own(value_spec(given).with_value(given))


def test_a_correction_begins_as_nothing_and_a_users_solver_is_run_one_network_at_a_time():
    net = own.Corrected(velocity, 2)
    x, t = torch.randn(6, 2, generator=generator()), torch.full((6,), 0.3)
    torch.testing.assert_close(net(x, t), velocity(x, t))
    solver = trials.solver_of("am")
    base = trials.plane_base([7, 8], 5, keep=False, quiet=True)
    tuned = arms.one_by_one(solver, base, problems.PLANE, generator(), rounds=2, inner=2, n_mc=20)
    assert tuned.policy.runs == (2,)
    assert [len(each["excess"]) for each in tuned.rounds] == [2, 2]
    before, after = base.state_dict(), tuned.policy.state_dict()
    assert all(not torch.equal(before[k][i], after[k][i]) for k in before if "weight" in k for i in range(2))
    rows = list(trials.plane_rows("mine", base, generator(), budget=20, n=50, own={"mine": solver}))
    assert {row["arm"] for row in rows} == {"mine"}
    assert all(math.isfinite(row["energy"]) for row in rows if row["stage"] == "end")


def test_a_flow_on_another_path_is_tuned_on_it_and_what_is_no_solver_is_told():
    mixture = GaussianMixture(torch.ones(1), torch.zeros(1, 2), torch.ones(1))
    network = velocity_of(own.Corrected(mixture.velocity(CosinePath()), 2), path=CosinePath())
    flow = FlowProblem("cosine", DATA, velocity=network, path=CosinePath())
    workload = own.OwnProblem(flow, problems.Steering(reward, limited, 1.0, 1.0))
    settings = {"run": "0", "budget": 2, "rounds": 1, "n": 20, "batch": 8}
    rows = list(larger.own_arm(workload, Context(seed=0), **settings))
    assert {row["arm"] for row in rows} == set(trials.OWN_ARMS)
    with pytest.raises(ValueError, match="give the solver path="):  # this one is told the linear path
        list(larger.own_arm(workload, Context(seed=0, own={"mine": trials.solver_of("am")}), **settings))
    with pytest.raises(TypeError, match="must be a Solver"):
        list(larger.own_arm(workload, Context(seed=0, own={"mine": reward}), **settings))


def test_exact_rows_say_what_the_arms_reached():
    rows = [row for row in trials.exact("grids", Context(seed=0), problem=3, rounds=30) if row["stage"] == "end"]
    found = {row["arm"]: row for row in rows}
    assert found["cfo-expectation"]["gap"] < 1e-6
    assert found["cfo-expectation"]["distance"] < 1e-6
    assert found["cfo"]["distance"] > 1e-3
