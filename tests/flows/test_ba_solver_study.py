"""The study's own machinery: equal budgets, grids chosen elsewhere, errors that mean something, a user's own solver, shipped rows."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cameraready.evidence import Context
from cameraready.flows import FlowProblem
from cameraready.flows._samplers import sample
from cameraready.flows.ba_solver import study
from cameraready.flows.ba_solver.experiment import arms, trials
from cameraready.flows.ba_solver.experiment.flows import QUICK, _guided, open_workload

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def quick():
    return open_workload(SimpleNamespace(kind="shipped", name=QUICK))


@pytest.fixture(scope="module")
def side(quick):
    return quick.trained_side(0, steps=3)


@pytest.mark.parametrize("nfe", [4, 5, 7])
def test_every_arm_keeps_to_its_budget(quick, side, nfe):
    noise, y = quick.noise(0, 8)
    taken = {}
    for arm in (arms.METHOD, *arms.PEERS, *arms.VARIANTS):
        made = arms.solver(quick, arm, nfe, side)
        if made is not None:
            taken[arm] = made.run(noise, arms.times_of(made.steps, 0.6), y).calls
    assert set(taken.values()) == {nfe}
    assert {"ba", "euler", "ab2", "ab3", "dpm++2m", "dpm++3m", "unipc", "unipc3", "heun"} <= set(taken)
    assert ("rk4" in taken) == (nfe == 4)


def test_three_step_adams_bashforth_integrates_parabolas_on_unequal_steps():
    """A velocity that is a parabola in time, from its third step on: the first two see one and two points of it."""
    times = torch.tensor([0.0, 0.1, 0.25, 0.5, 0.6, 1.0], dtype=torch.float64)
    x = torch.zeros(2, 1, dtype=torch.float64)
    found = arms.adams_bashforth(lambda x, t: torch.full_like(x, 1 + 2 * t - 3 * t**2), x, times, None)
    begun = 0.1 * 1.0 + 0.15 * 1.17 + 0.15**2 / 2 * 0.17 / 0.1  # Euler, then two steps
    exact = (1 + 1 - 1) - (0.25 + 0.25**2 - 0.25**3)
    assert float(found.x[0]) == pytest.approx(begun + exact, abs=1e-12)
    assert found.calls == 5


def test_more_evaluations_come_closer_and_the_reference_is_far_closer_still(quick, side):
    noise, y = quick.noise(0, 50)
    reference = quick.reference(noise, y)
    finer = sample(quick.exact, noise.double(), steps=4 * quick.fine, method="rk4").x
    errors = [
        arms.error(arms.solver(quick, "ba", nfe, side).run(noise, arms.times_of(nfe, 0.6), y).x, reference)
        for nfe in (4, 16, 40)
    ]
    assert errors[0] > errors[1] > errors[2]
    assert arms.error(reference, finer) < 0.2 * errors[2]


def test_grids_are_chosen_on_noise_that_no_verdict_sees(quick, side):
    assert not torch.equal(quick.noise(-1)[0], quick.noise(0)[0])
    assert torch.equal(quick.noise(3)[0], quick.noise(3)[0])
    shifts = arms.chosen_shifts(quick, {"ba": side})
    assert set(shifts.values()) <= set(arms.SHIFTS)
    again = arms.unpacked({**arms.packed(shifts), "side.head": np.zeros(1)})
    assert again == shifts
    # What was chosen is the best on that noise.
    errors = dict.fromkeys(arms.SHIFTS, 1.0)
    for run in (-1, -2):
        noise, y = quick.noise(run, min(quick.samples, 200))
        for shift in arms.SHIFTS:
            errors[shift] *= arms.error(
                arms.solver(quick, "euler", 7, None).run(noise, arms.times_of(7, shift), y).x, quick.reference(noise, y)
            )
    assert min(errors, key=errors.get) == shifts["euler", 7]


def test_a_round_trip_of_many_steps_comes_back(quick, side):
    data = quick.reference(*quick.noise(0, 20)).float()
    for arm in arms.INVERTED:
        near, far = (arms.error(arms.inverted(quick, arm, nfe, side, data, 1.0, None), data) for nfe in (80, 10))
        assert near < 0.5 * far


def test_peers_get_guidance_in_one_call_as_the_solver_does():
    from cameraready.flows.ba_solver import BAConfig, ba_sample

    calls = []

    def net(x, t, y):
        calls.append(len(x))
        return x * (1 + y[:, None]) - t

    config = BAConfig(guidance=2.0, null_label=3)
    x, y = torch.randn(4, 2, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0])
    peer = sample(_guided(net, config), x, steps=5, method="ab2", y=y)
    assert (peer.calls, set(calls)) == (5, {8})
    torch.testing.assert_close(ba_sample(net, None, x, steps=5, y=y, config=config).x, peer.x)


def test_a_solver_of_the_users_is_judged_and_its_evaluations_are_counted(quick):
    def theirs(velocity, x, times, y):
        for t, after in zip(times[:-1].tolist(), times[1:].tolist(), strict=True):
            x = x + (after - t) * velocity(x, t, y)
        return x

    context = Context(seed=0, own={"theirs": theirs}, prepared={})
    rows = [
        row for row in trials.quality(quick, context, run=1) if row["arm"] in ("theirs", "euler") and row["nfe"] == 7
    ]
    assert [row["calls"] for row in rows] == [7, 7]
    assert rows[0]["rmse"] == pytest.approx(rows[1]["rmse"], rel=1e-5)
    with pytest.raises(ValueError, match="14 times with a budget of 7"):
        arms.solver(quick, "theirs", 7, None, lambda v, x, times, y: theirs(v, theirs(v, x, times, y), times, y)).run(
            quick.noise(0, 4)[0], arms.times_of(7, 1.0), None
        )
    with pytest.raises(ValueError, match="must return samples"):
        arms.solver(quick, "theirs", 7, None, lambda v, x, times, y: x[:1]).run(
            quick.noise(0, 4)[0], arms.times_of(7, 1.0), None
        )


def test_the_users_flow_gets_a_sidenet_of_its_own_once_for_all_runs():
    data = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))

    def velocity(x, t, y=None):
        t = torch.as_tensor(t, dtype=x.dtype).reshape(-1, 1)
        return x * (2 * t - 1) / (t**2 + (1 - t) ** 2)

    flow = open_workload(
        SimpleNamespace(kind="value", name="own", value=FlowProblem("own", data, velocity=velocity), options={})
    )
    arrays = {f"side.{n}": v.numpy() for n, v in flow.untrained(0).state_dict().items()}
    stored = trials._sides(flow, Context(seed=0, prepared=arrays), 5)["ba"]
    for name, value in stored.state_dict().items():
        assert np.array_equal(value.numpy(), arrays[f"side.{name}"])
    assert isinstance(flow.noise(0)[0], torch.Tensor)
    assert study.component(flow).func is study.ba_sample


def test_an_oracle_of_the_orders_trial_is_the_change_of_velocity_along_the_flow():
    field = trials._field(0)
    x, t, h = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64), 0.3, 0.2
    end = sample(field, x, times=torch.linspace(t, t + h, 200, dtype=torch.float64), method="rk4").x
    expected = field(end, t + h) - field(x, t)
    times = torch.full((5,), t, dtype=torch.float64)
    found = trials._oracle(field, torch.zeros(3))(x, field(x, t), times, torch.full_like(times, h))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
