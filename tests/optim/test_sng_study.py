"""The study's problems are what they say, its measurements follow from the component, and a user's problem is taken as it comes."""

import importlib.resources
import math

import numpy as np
import polars as pl
import pytest
import torch
from torch import nn
from torch.func import hessian, jacrev

from cameraready.evidence import Context
from cameraready.evidence.checking import check
from cameraready.evidence.specs import SpecError
from cameraready.optim.sng import linearise, spring_update, study
from cameraready.optim.sng.jacobian import LayerJacobian, Recorder
from cameraready.optim.sng.trials import problems, rates, rivals, settings
from cameraready.optim.sng.trials.own import own_problem

pytestmark = pytest.mark.torch


def plain(model):
    """The same network as an ordinary function of one point."""

    def u(params, x):
        h = x
        for i in range(len(model.layers)):
            weight = params[f"layers.{i}.weight"]
            h = weight[:, :-1] @ h + weight[:, -1]
            h = torch.tanh(h) if i + 1 < len(model.layers) else h
        return h[0]

    return u


@pytest.mark.parametrize("name", ["poisson", "burgers"])
def test_residuals_are_those_of_the_equation_by_automatic_differentiation(name):
    problem = problems.PROBLEMS[name]()
    model = problem.start(3)
    u, params = plain(model), {n: p.detach() for n, p in model.named_parameters()}
    points = problem.points
    rows = torch.tensor([0, 5, 900, 1_001, 1_050, 1_150])
    found = problem.residuals(model, rows)
    for row, value in zip(rows.tolist(), found.tolist(), strict=True):
        x = torch.from_numpy(points["x"][row])
        slope, curve = jacrev(u, argnums=1)(params, x), hessian(u, argnums=1)(params, x)
        if not points["inner"][row]:
            expected = u(params, x) - (points["f"][row] if name == "burgers" else 0.0)
        elif name == "poisson":
            expected = -torch.trace(curve) / (2 * math.pi**2) - torch.sin(math.pi * x).prod()
        else:
            expected = slope[0] + u(params, x) * slope[1] - problems.VISCOSITY * curve[1, 1]
        assert value == pytest.approx(float(expected), abs=1e-12)


def test_the_networks_jacobian_comes_from_its_layers_and_agrees_with_that_of_one_sample():
    problem = problems.poisson()
    model = problem.start(3)
    params, rows = list(model.parameters()), torch.arange(990, 1_010)
    recorder = Recorder(params)
    with recorder:
        outputs = problem.residuals(model, rows)
    found = recorder.jacobian(outputs, {})
    assert isinstance(found, LayerJacobian)
    u = plain(model)

    def residual(p, x, f, inner):
        laplacian = torch.trace(hessian(u, argnums=1)(p, x))
        return torch.where(inner, -laplacian / (2 * math.pi**2) - f, u(p, x))

    x, f, inner = (torch.as_tensor(problem.points[key])[rows] for key in ("x", "f", "inner"))
    J = linearise(residual, dict(model.named_parameters()), x, f, inner).jacobian
    torch.testing.assert_close(found.kernel(), J @ J.T)


def test_the_burgers_solution_solves_the_equation():
    t, x = np.meshgrid(np.linspace(0.1, 0.9, 5), np.linspace(-0.9, 0.9, 7), indexing="ij")
    t, x, h = t.ravel(), x.ravel(), 1e-4
    u = problems.burgers_solution
    time_slope = (u(t + h, x) - u(t - h, x)) / (2 * h)
    slope = (u(t, x + h) - u(t, x - h)) / (2 * h)
    curve = (u(t, x + h) - 2 * u(t, x) + u(t, x - h)) / h**2
    np.testing.assert_allclose(time_slope + u(t, x) * slope, problems.VISCOSITY * curve, atol=1e-4)
    ends = u(np.full(2, 0.5), np.array([-1.0, 1.0]))
    np.testing.assert_allclose(ends, 0.0, atol=1e-10)
    at = np.linspace(-1, 1, 9)
    np.testing.assert_allclose(u(np.full(9, 1e-6), at), -np.sin(np.pi * at), atol=1e-3)


def test_errors_are_zero_at_the_solution_and_one_for_nothing():
    problem = problems.least_squares(100, 10)
    model = problem.start(0)
    with torch.no_grad():
        A, b = torch.from_numpy(problem.points["A"]), torch.from_numpy(problem.points["b"])
        model.weight.copy_(torch.linalg.lstsq(A, b[:, None]).solution.T)
        assert problem.error(model) < 1e-12
        model.weight.zero_()
    assert problem.error(model) == pytest.approx(1.0)
    network = problems.poisson()
    silent = network.start(0)
    with torch.no_grad():
        silent.layers[-1].weight.zero_()
    assert network.error(silent) == pytest.approx(1.0)


def test_runs_side_by_side_are_runs_of_the_update():
    J, _ = problems.decaying_system(30, 6, 1.0, seed=0)
    start = torch.ones(3, 6, dtype=torch.float64)
    squares = rates.momentum_runs(J, start, 4, 0.6, 0.5, 5, seed=2)
    generator = torch.Generator().manual_seed(2)
    theta, phi = start.clone(), torch.zeros_like(start)
    for step in range(5):
        batches = rates.draws(30, 3, 4, generator)
        for run, S in enumerate(batches):
            phi[run] = spring_update(J[S], J[S] @ theta[run], phi[run], 0.6, 0.0)
            theta[run] -= 0.5 * phi[run]
        assert squares[step + 1] == pytest.approx(theta.square().sum(dim=1).mean().item(), rel=1e-8)


def test_the_exact_factor_without_momentum_is_that_of_the_mean_projection_for_one_direction():
    """One column: P is 1 whenever the batch sees it, so that the error is gone after a step; with momentum 0 the factor is 0."""
    assert rates.moment_factor(np.ones((5, 1)), 2, 0.0, 1.0) == pytest.approx(0.0, abs=1e-8)
    # Orthogonal rows: a coordinate survives a step with probability 1 - k / N.
    assert rates.moment_factor(np.eye(5), 2, 0.0, 1.0) == pytest.approx(3 / 5)
    assert rates.moment_factor(np.eye(5), 2, 0.0, 0.5) == pytest.approx(3 / 5 + 2 / 5 * 0.25)


def test_steepest_descent_with_several_steps_is_each_by_itself():
    J, _ = problems.decaying_system(30, 6, 1.0, seed=0)
    start = torch.ones(3, 6, dtype=torch.float64)
    together = rates.gradient_runs(J, start, 4, np.array([0.1, 1.0, 1e3]), 5, seed=2)
    alone = [rates.gradient_runs(J, start, 4, np.array([step]), 5, seed=2)[0] for step in (0.1, 1.0, 1e3)]
    assert together == pytest.approx(alone)
    assert together[2] > 1e6 * together[0]


def test_every_arm_in_pytorch_has_eight_settings_and_one_of_them_is_chosen():
    for problem in problems.PROBLEMS:
        assert settings.chosen(problem, "randngd")["sketch"] == 200
        for arm in rivals.ARMS:
            options = settings.grid(problem, arm)
            assert len({str(option) for option in options}) == 8
            assert settings.chosen(problem, arm) in options
    assert settings.chosen("mine", "adam") == settings.chosen("burgers", "adam")


def ticking():
    """A clock that goes on by one at each look."""
    now = iter(range(10**9))
    return lambda: float(next(now))


@pytest.mark.parametrize("name", rivals.ARMS)
def test_arms_get_the_same_time_and_improve(name):
    """By a clock of our own: as many steps for every arm, samples counted, marks at their shares."""
    problem = problems.least_squares(200, 5, 0.5)
    rows = rivals.train(
        problem, name, rivals.ARMS[name], settings.chosen("least-squares", name), 64.0, 5, clock=ticking()
    )
    assert [row["steps"] for row in rows] == [2, 4, 8, 16, 32, 64]
    assert [row["share"] for row in rows] == list(rivals.MARKS)
    if settings.chosen("least-squares", name).get("batch") != "all":
        assert rows[-1]["samples"] == 64 * problem.batch
    else:
        assert rows[-1]["samples"] >= 64 * problem.n_rows
    assert rows[-1]["error"] < problem.error(problem.start(5))


def test_an_arm_that_diverges_counts_as_worst():
    problem = problems.least_squares(200, 5, 0.5)
    for name, bad in (("adam", {"lr": float("1e300")}), ("spring", {"lr": 1e200, "mu": 0.5, "damping": 1e-3})):
        rows = rivals.train(problem, name, rivals.ARMS[name], bad, 64.0, 5, clock=ticking())
        assert rows[-1]["error"] == pytest.approx(rivals.WORST * problem.error(problem.start(5)))


def own(seed):
    torch.manual_seed(seed)
    x = torch.linspace(-1, 1, 64, dtype=torch.float64)[:, None]
    y = torch.sin(3 * x[:, 0])
    model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    return (
        model,
        lambda m, rows: m(x[rows])[:, 0] - y[rows],
        64,
        lambda m: (m(x)[:, 0] - y).square().mean().sqrt().item(),
    )


def slow(parameters):
    return torch.optim.SGD(parameters, lr=1e-3)


def test_a_users_problem_and_optimizer_run(tmp_path, monkeypatch):
    monkeypatch.setenv("CAMERAREADY_HOME", str(tmp_path))
    result = check("sng-sketch", on=own, with_={"slow": slow}, tier="smoke", quiet=True)
    assert not result.failures
    assert set(result.rows["arm"]) == {*rivals.ARMS, "slow"}
    assert type(result.component).__name__ == "SPRING"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (3, "is int"),
        (lambda seed: None, "returned NoneType"),
        (lambda seed: (1, 2, 3, 4), "two functions"),
        (lambda seed: (*own(seed)[:2], 1.5, own(seed)[3]), "n_rows"),
        (lambda seed: (own(seed)[0], lambda m, rows: m(torch.ones(3, 1).double()), 64, own(seed)[3]), "shape"),
        (lambda seed: (nn.Sequential(own(seed)[0], nn.Dropout(0.5)), *own(seed)[1:]), "evaluation mode"),
        (lambda seed: (own(seed)[0], lambda m, rows: torch.zeros(len(rows)), 64, own(seed)[3]), "graph"),
    ],
)
def test_a_users_problem_that_cannot_be_trained_is_refused(make, says):
    with pytest.raises(SpecError, match=says):
        own_problem("mine", make)


def test_the_shipped_rows_gave_every_arm_the_same_time():
    folder = importlib.resources.files("cameraready.optim.sng")
    rows = pl.read_parquet(folder / "results.parquet").filter(pl.col("part") == "race", pl.col("share") == 1.0)
    counts = rows.group_by("workload", "arm").agg(
        n=pl.col("instance").n_unique(), late=(pl.col("spent") / pl.col("seconds")).median()
    )
    assert set(counts["arm"]) == {*rivals.ARMS, rivals.ON_SAMPLES, "randngd"}
    assert counts["n"].to_list() == [10] * (3 * (len(rivals.ARMS) + 1) + 2)
    # A step that has begun is finished: the slowest steps are those over all rows.
    assert counts["late"].min() >= 1.0
    assert counts["late"].max() < 1.5


@pytest.mark.peers
@pytest.mark.parametrize("name", problems.PROBLEMS)
def test_the_peer_computes_the_same_loss_and_lowers_it(name):
    from cameraready.evidence.peers.environments import open_peer

    problem = problems.PROBLEMS[name]()
    model = problem.start(1)
    start = [p.detach().numpy().copy() for p in model.parameters()]
    with open_peer(rivals.RANDNGD, importlib.resources.files("cameraready.optim.sng")) as remote:
        expected = problem.residuals(model, torch.arange(problem.n_rows)).square().mean().item() / 2
        assert remote.loss_at(problem.points, start) == pytest.approx(expected, rel=1e-10)
        chosen = settings.chosen(name, "randngd")
        found = remote.train(problem.points, start, chosen["solver"], chosen["damping"], chosen["sketch"], 1.0, [1.0])
        # The loss, not the error: the first steps on residuals may lead away from the solution.
        assert remote.loss_at(problem.points, found[-1]["weights"]) < expected


def test_a_trial_of_each_part_numbers_its_blocks_by_the_seed():
    found = study.trial("averages", Context(seed=3), part="averages", instances=2, n_rows=6)
    assert {row["instance"] for row in found} == {300, 301}
    assert all(row["gap"] < 1e-10 for row in found if row["arm"] == "svs")


@pytest.mark.parametrize("name", ["poisson", "burgers"])
def test_residuals_of_one_sample_are_those_of_the_batch(name):
    problem = problems.PROBLEMS[name]()
    model, rows = problem.start(2), torch.tensor([0, 7, 990, 1_020, 1_150])
    found = rivals.on_samples(problem, model, rows)
    params = list(model.parameters())
    recorder = Recorder(params)
    with recorder:
        outputs = problem.residuals(model, rows)
    torch.testing.assert_close(found.values, outputs.detach())
    torch.testing.assert_close(found.jacobian @ found.jacobian.T, recorder.jacobian(outputs, {}).kernel())
