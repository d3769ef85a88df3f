"""diffusers' schedulers on the room's grids: the same numbers as the room's own methods where they are the same method, and no shift put on twice."""

import math
from itertools import pairwise

import pytest
import torch

from cameraready.flows._samplers import SCHEDULERS, evaluations, grid, sample, scheduler_sample
from tests.flows.flow_cases import exact

pytestmark = pytest.mark.torch
diffusers = pytest.importorskip("diffusers")

GRIDS = {
    "uniform": grid(8),
    "shifted": grid(8, kind="shift"),
    "odd": torch.tensor([0.0, 0.013, 0.5, 0.52, 0.9, 1.0]),
    "one step": grid(1),
    "from later": grid(4, start=0.2),
}
FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}


def draws(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def heun_with_euler_last(velocity, x, times):
    """What diffusers' Heun does: its last step is Euler's, since it has no slope at noise level 0."""
    if len(times) > 2:
        x = sample(velocity, x, times=times[:-1], method="heun").x
    return sample(velocity, x, times=times[-2:], method="euler").x


@pytest.mark.parametrize("times", GRIDS.values(), ids=GRIDS)
def test_euler_and_heun_are_the_rooms_own(times):
    x = draws(6, 3)
    torch.testing.assert_close(
        scheduler_sample(exact(), x, "euler", times=times).x, sample(exact(), x, times=times).x, rtol=0, atol=2e-6
    )
    torch.testing.assert_close(
        scheduler_sample(exact(), x, "heun", times=times).x, heun_with_euler_last(exact(), x, times), rtol=0, atol=2e-6
    )


def test_a_scheduler_with_a_shift_does_not_shift_the_grid_again():
    x, times = draws(6, 3), grid(6, kind="shift", shift=3.0)
    ours = sample(exact(), x, times=times).x
    for scheduler in (
        diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift_terminal=0.1),
        diffusers.FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True),
    ):
        torch.testing.assert_close(scheduler_sample(exact(), x, scheduler, times=times).x, ours, rtol=0, atol=2e-6)
    # The trap itself: its own `set_timesteps` shifts levels that it is given.
    trapped = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    trapped.set_timesteps(sigmas=(1 - times[:-1]).tolist())
    assert float((trapped.sigmas[:-1] - (1 - times[:-1])).abs().max()) > 0.1
    heun = diffusers.FlowMatchHeunDiscreteScheduler(shift=3.0)
    torch.testing.assert_close(
        scheduler_sample(exact(), x, heun, times=times).x, heun_with_euler_last(exact(), x, times), rtol=0, atol=2e-6
    )


def test_the_grid_a_scheduler_makes_itself_is_met_when_it_is_handed_over():
    x = draws(6, 3)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(7)
    state = x
    for timestep in scheduler.timesteps:
        state = scheduler.step(-exact()(state, 1 - float(timestep) / 1000), timestep, state, return_dict=False)[0]
    times = 1 - scheduler.sigmas.double()
    torch.testing.assert_close(scheduler_sample(exact(), x, scheduler, times=times).x, state, rtol=0, atol=2e-6)


def by_hand(x, times, order):
    """DPM-Solver++ (2M) of Lu et al., 2022, arXiv:2211.01095, Alg. 2, on data prediction, its first and last step of first order."""
    x, levels = x.double(), (1 - times).clone()
    levels[0] = min(float(levels[0]), 1 - 1e-6)
    log_snr = [math.log((1 - s) / s) if s > 0 else math.inf for s in levels.tolist()]
    previous = None
    for i, (s, s_next) in enumerate(pairwise(levels.tolist())):
        clean = x + s * exact()(x, float(times[i]))
        h = log_snr[i + 1] - log_snr[i]
        used = clean
        if order == 2 and previous is not None and i < len(times) - 2:
            used = clean + h / (log_snr[i] - log_snr[i - 1]) / 2 * (clean - previous)
        x = s_next / s * x - (1 - s_next) * math.expm1(-h) * used
        previous = clean
    return x


@pytest.mark.parametrize("times", GRIDS.values(), ids=GRIDS)
def test_dpm_solver_is_its_algorithm_on_this_grid(times):
    x = draws(6, 3)
    torch.testing.assert_close(
        scheduler_sample(exact(), x, "dpm++2m", times=times).x.double(), by_hand(x, times, 2), rtol=0, atol=2e-5
    )
    first = diffusers.DPMSolverMultistepScheduler(solver_order=1, **FLOW)
    torch.testing.assert_close(
        scheduler_sample(exact(), x, first, times=times).x.double(), by_hand(x, times, 1), rtol=0, atol=2e-5
    )


@pytest.mark.parametrize("order", [2, 3])
def test_unipc_is_its_own_loop_where_its_grid_has_this_one(order):
    x, times = draws(6, 3), GRIDS["odd"]
    scheduler = diffusers.UniPCMultistepScheduler(solver_order=order, **FLOW)
    scheduler.set_timesteps(sigmas=(1 - times[:-1]).numpy())
    scheduler.set_begin_index(0)
    state = x
    for t, timestep in zip(times.tolist(), scheduler.timesteps, strict=False):
        state = scheduler.step(-exact()(state, t), timestep, state, return_dict=False)[0]
    # A shift of its own, which it would put on again, changes nothing.
    shifted = diffusers.UniPCMultistepScheduler(solver_order=order, flow_shift=3.0, **FLOW)
    for given in (scheduler, shifted, *(["unipc"] if order == 2 else [])):
        torch.testing.assert_close(scheduler_sample(exact(), x, given, times=times).x, state, rtol=0, atol=2e-6)


def test_multistep_schedulers_converge_to_the_flow_and_faster_than_euler():
    x = draws(32, 3)
    reference = sample(exact(), x.double(), steps=400, method="rk4").x.float()

    def error(scheduler, steps):
        return float((scheduler_sample(exact(), x, scheduler, times=grid(steps)).x - reference).square().mean().sqrt())

    for name in ("dpm++2m", "unipc"):
        assert error(name, 64) < 0.3 * error(name, 16)
        assert error(name, 16) < 0.5 * error("euler", 16)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_evaluations_are_counted_and_made_at_the_grids_times(name):
    asked = []

    def v(x, t):
        asked.append(t)
        return exact()(x, t)

    times = GRIDS["odd"]
    sampled = scheduler_sample(v, draws(2, 3), name, times=times)
    assert sampled.calls == len(asked) == evaluations(name, 5, scheduler=True)
    assert sorted(set(asked)) == pytest.approx(times[:-1].tolist(), abs=1e-12)  # no whole-numbered timesteps


def test_images_and_dtypes_are_kept():
    def v(x, t):
        return -x

    for name in SCHEDULERS:
        found = scheduler_sample(v, draws(2, 1, 4, 4).to(torch.float64), name, times=grid(4)).x
        assert (found.dtype, found.shape) == (torch.float64, (2, 1, 4, 4))


def test_what_cannot_be_is_said():
    x, before = draws(2, 3), torch.get_rng_state()
    for scheduler, times, words in (
        ("ddim", grid(3), "no scheduler 'ddim'; choose one of euler, heun"),
        ("euler", grid(3, end=0.9), r"end at t = 1; the grid runs from 0 to 0\.9"),
        ("euler", grid(3).flip(0), "end at t = 1"),
        (
            diffusers.UniPCMultistepScheduler(),
            grid(3),
            "is set for epsilon; for a velocity make it with prediction_type='flow_prediction'",
        ),
        (diffusers.FlowMatchEulerDiscreteScheduler(stochastic_sampling=True), grid(3), "stochastic_sampling"),
        (object(), grid(3), "one of diffusers' flow schedulers, got object"),
        (
            diffusers.DPMSolverMultistepScheduler(algorithm_type="sde-dpmsolver++", **FLOW),
            grid(3),
            "DPMSolverMultistepScheduler draws random numbers",
        ),
        (diffusers.FlowMatchLCMScheduler(), grid(3), "FlowMatchLCMScheduler draws random numbers"),
    ):
        with pytest.raises(ValueError, match=words):
            scheduler_sample(exact(), x, scheduler, times=times)
    with pytest.raises(
        FloatingPointError, match=r"the state of DEISMultistepScheduler is not finite in 6 of 6 entries"
    ):
        scheduler_sample(exact(), x, diffusers.DEISMultistepScheduler(**FLOW), times=grid(3))
    with pytest.raises(ValueError, match=r"taken as 0\.5, which is not above the second, 0\.66"):
        scheduler_sample(exact(), x, "unipc", times=grid(3), first_noise=0.5)
    assert torch.equal(torch.get_rng_state(), before)
