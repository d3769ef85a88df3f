"""Discrete diffusions of diffusers at the ends of their schedules, with a network whose prediction is exact."""

import pytest
import torch
from torch import nn

from cameraready.flows import from_diffusers
from cameraready.flows._samplers import sample

pytestmark = pytest.mark.torch
diffusers = pytest.importorskip("diffusers")


def draws(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


class GaussianNoise(nn.Module):
    """The exact noise prediction for data N(2, 0.5^2) at a discrete scheduler's whole-numbered levels."""

    def __init__(self, scheduler):
        super().__init__()
        self.kept = scheduler.alphas_cumprod.double()
        self.asked = []

    def forward(self, x, timestep, return_dict=False):
        self.asked.append((float(timestep[0]), x))
        kept = self.kept[timestep.round().long()].reshape(-1, 1)
        away = (x - 2 * kept.sqrt()) / (0.25 * kept + 1 - kept)
        return ((1 - kept).sqrt() * away,)


def test_a_schedule_that_ends_short_of_pure_noise_is_asked_at_states_of_its_own_scale():
    """Stable Diffusion's: its last level still holds 7 % of the data, so that all times below 0.064 have that level."""
    scheduler = diffusers.DDIMScheduler(
        beta_schedule="scaled_linear",
        beta_start=0.00085,
        beta_end=0.012,
        clip_sample=False,
        set_alpha_to_one=True,
        timestep_spacing="trailing",
    )
    net, x = GaussianNoise(scheduler), draws(400, 3)
    v = from_diffusers(net, scheduler)
    data = 2 + 0.5 * x
    begin, end = v(x, 0.0), v(data, 1.0)
    for asked, level, state in zip(net.asked, (999.0, 0.0), (x, data), strict=True):
        assert asked[0] == level
        torch.testing.assert_close(asked[1], state)  # data and noise of variance one have variance one there
    torch.testing.assert_close(begin, 2 - x, rtol=0, atol=0.1)
    torch.testing.assert_close(end, data, rtol=0, atol=0.25)  # what level 0 still takes for noise
    low = v(x, 0.03)
    exact = 2 + 0.25 * 0.03 * (x - 0.06) / (0.25 * 0.03**2 + 0.97**2)
    torch.testing.assert_close(low, (exact - x) / 0.97, rtol=0, atol=0.1)
    whole = sample(v, x, steps=200).x
    torch.testing.assert_close(whole, 2 + 0.5 * x, rtol=0, atol=0.05)  # where the exact flow leads
    scheduler.set_timesteps(200)
    state = x
    for (
        timestep
    ) in scheduler.timesteps:  # DDIM takes the noise at t = 0 for a state of level 999 and misses part of the mean
        state = scheduler.step(net(state, timestep[None])[0], timestep, state).prev_sample
    torch.testing.assert_close(whole, state, rtol=0, atol=0.1)
    assert float((whole - 2 - 0.5 * x).abs().mean()) < float((state - 2 - 0.5 * x).abs().mean())


def test_a_scheduler_of_trained_betas_has_as_many_timesteps_as_there_are():
    scheduler = diffusers.DDPMScheduler(trained_betas=torch.linspace(1e-3, 0.3, 50).tolist())
    net = GaussianNoise(scheduler)
    v = from_diffusers(net, scheduler)
    v(draws(2, 3), 0.0)
    v(draws(2, 3), 1.0)
    assert [level for level, _ in net.asked] == [49, 0]
