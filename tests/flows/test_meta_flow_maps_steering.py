"""Values, their gradients and steering against tilted laws that are known; counts, clamps and what is refused."""

import math

import pytest
import torch

from cameraready.flows import CosinePath, LinearPath
from cameraready.flows._toy.mixtures import GaussianMixture
from cameraready.flows.meta_flow_maps import MetaFlowMap, PosteriorFlow, Steered, value_estimate, value_gradient
from tests.flows.mfm_exact import F64, GaussianBackbone, generator, noise

pytestmark = pytest.mark.torch
PAIR = GaussianMixture(torch.tensor([0.8, 0.2]), torch.tensor([[-1.0], [1.0]], dtype=F64), torch.tensor([0.05, 0.05]))
GAUSS = GaussianMixture(torch.ones(1), torch.full((1, 1), 0.7, dtype=F64), torch.tensor([0.5]))
SLOPE = 1.4


def linear(x1):
    return SLOPE * x1[:, 0]


def value(x, t, mixture=PAIR):
    """log E[exp(SLOPE x1) | x_t = x] in closed form, (B,)."""
    law = mixture.posterior(x, t)
    return torch.logsumexp(law.weights.log() + SLOPE * law.means[..., 0] + SLOPE**2 / 2 * law.covariances[:, 0, 0], 1)


def gradient(x, t, mixture=PAIR):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(value(x, t, mixture).sum(), x)[0]


@pytest.mark.parametrize("t", [0.0, 0.4, 0.8])
def test_the_value_of_a_state_and_its_standard_error(t):
    x = torch.tensor([[-0.3], [0.2]], dtype=F64)
    flow = PosteriorFlow(PAIR.velocity(), steps=8)
    truth = value(x, t)
    found = [value_estimate(flow, x, t, linear, n=64, generator=generator(seed)) for seed in range(40)]
    values = torch.stack([each.value for each in found])
    errors = torch.stack([each.standard_error for each in found])
    # Too low by half the squared standard error, as the docstring says, to the accuracy of 40 repeats.
    low = errors.square().mean(0) / 2
    assert ((values.mean(0) + low - truth).abs() < 4 * values.std(0) / 40**0.5 + 3e-3).all()
    torch.testing.assert_close(errors.mean(0), values.std(0), rtol=0.45, atol=1e-3)
    assert all(((each.effective >= 1) & (each.effective <= 64 + 1e-9)).all() for each in found)


def test_the_bias_of_the_gradient_falls_with_the_number_of_draws_and_that_of_dps_stays():
    x, t = torch.tensor([[-0.4]], dtype=F64), 0.45
    flow = PosteriorFlow(PAIR.velocity(), steps=5)
    truth = gradient(x, t)
    bias = {}
    for n in (1, 4, 32):
        repeats = {1: 3000, 4: 1500, 32: 400}[n]
        states = x.expand(repeats, 1)
        slopes, _ = value_gradient(flow, states, t, linear, n=n, generator=generator(n))
        bias[n] = float((slopes.mean(0) - truth).abs() / truth.abs())
    assert bias[32] < 0.15
    assert bias[1] > 1.4 * bias[4] > 2 * bias[32]
    state = x.clone().requires_grad_()
    mean = state + (1 - t) * PAIR.velocity()(state, t)
    (slope,) = torch.autograd.grad(linear(mean).sum(), state)
    assert float((slope - truth).abs() / truth.abs()) > 0.5


@pytest.mark.parametrize("path", [LinearPath(), CosinePath()], ids=["linear", "cosine"])
@pytest.mark.parametrize("method", ["grad", "weights"])
@pytest.mark.parametrize("dynamics", ["ode", "sde"])
def test_steering_by_exact_draws_samples_the_tilted_law(path, method, dynamics):
    """A Gaussian tilted by exp(slope x) is the same Gaussian moved by slope times its variance."""
    mfm = MetaFlowMap(GaussianBackbone(path=path), path)
    steered = Steered(mfm, linear, n=32, method=method, dynamics=dynamics)
    found = steered.sample((800, 1), steps=40, noise=noise(800, 1), generator=generator(2))
    assert abs(float(found.x.mean()) - (0.7 + SLOPE * 0.5)) < 0.08
    assert abs(float(found.x.var()) - 0.5) < 0.08
    assert found.clamped["max_gain"] <= 0.08


@pytest.mark.parametrize("method", ["grad", "weights"])
def test_modes_get_the_weights_of_the_tilt(method):
    steered = Steered(PosteriorFlow(PAIR.velocity(), steps=4), linear, n=24, method=method)
    x = steered.sample((300, 1), steps=20, noise=noise(300, 1), generator=generator(2)).x
    odds = 0.2 / 0.8 * math.exp(2 * SLOPE)
    right = odds / (1 + odds)
    assert abs(float((x > 0).double().mean()) - right) < 0.09
    base = Steered(PosteriorFlow(PAIR.velocity(), steps=1), linear, n=2, scale=0.0, method="weights")
    x = base.sample((500, 1), steps=15, noise=noise(500, 1), generator=generator(2)).x
    assert abs(float((x > 0).double().mean()) - 0.2) < 0.06


def test_every_call_is_counted_for_each_particle():
    mfm = MetaFlowMap(GaussianBackbone())
    asked = []

    def reward(x1):
        asked.append(len(x1))
        return x1[:, 0]

    steps, n, particles = 6, 5, 3
    expected = {"grad": (1 + steps * (1 + n), steps * n, steps * n), "weights": (1 + steps * (1 + n), steps * n, 0)}
    expected["dps"] = (1 + steps, steps, steps)
    for method, numbers in expected.items():
        asked.clear()
        before = mfm.evaluations
        found = Steered(mfm, reward, n=n, method=method).sample((particles, 2), steps=steps, noise=noise(particles, 2))
        assert (found.network_calls, found.reward_calls, found.backward_passes) == numbers, method
        assert sum(asked) == found.reward_calls * particles
        assert mfm.evaluations - before == found.network_calls * particles
        assert len(found.effective) == steps
    outside = Steered(mfm, reward, n=2, velocity=lambda x, t, y=None: -x).sample((3, 2), steps=4, noise=noise(3, 2))
    assert outside.network_calls == 1 + 4 * 3


def test_effective_sizes_and_clamps_are_told():
    mfm = MetaFlowMap(GaussianBackbone())
    flat = Steered(mfm, lambda x1: 0 * x1[:, 0], n=7, method="weights").sample((3, 1), steps=5, noise=noise(3, 1))
    torch.testing.assert_close(flat.effective, torch.full_like(flat.effective, 7.0))
    steep = Steered(mfm, lambda x1: 1e4 * x1[:, 0], n=7, method="weights").sample((3, 1), steps=5, noise=noise(3, 1))
    assert float(steep.effective.max()) < 1.2
    held = Steered(mfm, linear, n=2, max_gain=0.5).sample((3, 1), steps=20, noise=noise(3, 1))
    assert 0.6 < held.clamped["max_gain"] < 0.75  # (1 - t) / t > 1 / 2 up to t = 2 / 3


def test_normalised_guidance_has_the_norm_of_the_velocity():
    mfm = MetaFlowMap(GaussianBackbone())
    x = noise(4, 3)
    b, push, _, _ = Steered(mfm, linear, normalise=True).guidance(x, 0.3, generator=generator())
    torch.testing.assert_close(push.norm(dim=1), b.norm(dim=1))


def test_a_reward_without_a_gradient_gets_a_sentence_where_a_gradient_is_needed():
    mfm, start = MetaFlowMap(GaussianBackbone()), noise(3, 1)
    rewards = {
        "step": lambda x1: (x1[:, 0] > 1).double(),
        "numpy": lambda x1: x1.numpy()[:, 0],
        "list": lambda x1: [0.0] * len(x1),
        "detached": lambda x1: x1.detach()[:, 0],
    }
    for reward in rewards.values():
        for method in ("grad", "dps"):
            with pytest.raises(ValueError, match=r"no gradient.*method='weights'"):
                Steered(mfm, reward, n=2, method=method).sample((3, 1), steps=2, noise=start)
        found = Steered(mfm, reward, n=2, method="weights").sample((3, 1), steps=2, noise=start)
        assert torch.isfinite(found.x).all()
    with pytest.warns(UserWarning, match="0 at every step.*weights"):
        Steered(mfm, lambda x1: x1[:, 0].round(), n=2).sample((3, 1), steps=2, noise=start)


def test_rewards_that_are_no_numbers_and_settings_that_cannot_be_are_refused():
    mfm, start = MetaFlowMap(GaussianBackbone()), noise(3, 1)
    with pytest.raises(ValueError, match="NaN or"):
        Steered(mfm, lambda x1: x1[:, 0] * math.nan, n=2).sample((3, 1), steps=2, noise=start)
    with pytest.raises(ValueError, match=r"one number for each, \(6,\)"):
        Steered(mfm, lambda x1: x1, n=2, method="weights").sample((3, 1), steps=2, noise=start)
    ruled_out = Steered(mfm, lambda x1: torch.where(x1[:, 0] > 0.5, 0.0, -math.inf), n=3, method="weights")
    assert torch.isfinite(ruled_out.sample((50, 1), steps=20, noise=noise(50, 1)).x).all()
    unseen = value_estimate(mfm, start, 0.5, lambda x1: torch.full((len(x1),), -math.inf), n=4)
    assert torch.isinf(unseen.standard_error).all()
    assert (unseen.effective == 0).all()
    with pytest.raises(TypeError, match="must be a callable"):
        Steered(mfm, 3.0)
    with pytest.raises(ValueError, match="method must be one of"):
        Steered(mfm, linear, method="gradient")
    with pytest.raises(ValueError, match="at least 2 for weights"):
        Steered(mfm, linear, n=1, method="weights")
    with pytest.raises(ValueError, match=r"increase in \[0, 1\]"):
        Steered(mfm, linear).sample((3, 1), times=[0.1, 0.5, 0.4], noise=start)
    with pytest.raises(FloatingPointError, match="t = 0"):
        Steered(mfm, linear, velocity=lambda x, t, y=None: x * math.nan).sample((3, 1), steps=2, noise=start)
    with pytest.raises(ValueError, match="at least 2"):
        value_estimate(mfm, start, 0.5, linear, n=1)


def test_long_first_steps_of_the_diffusion_stay_where_states_are():
    mfm = MetaFlowMap(GaussianBackbone())
    found = Steered(mfm, linear, n=2, dynamics="sde").sample((400, 1), steps=8, noise=noise(400, 1), trajectory=True)
    assert float(found.trajectory.square().mean((1, 2)).sqrt().max()) < 3


def test_trajectories_begin_with_the_noise_and_end_in_the_samples():
    mfm, start = MetaFlowMap(GaussianBackbone()), noise(3, 1)
    found = Steered(mfm, linear, n=2).sample((3, 1), steps=5, noise=start, trajectory=True)
    assert found.trajectory.shape == (7, 3, 1)
    assert torch.equal(found.trajectory[0], start)
    assert torch.equal(found.trajectory[-1], found.x)
    assert found.times.tolist()[0] == 0
    assert found.times.tolist()[-1] == 1


def test_states_are_rounded_for_the_network_only():
    """Many small steps in bfloat16 end where those in float64 do, rounded once."""
    steered = Steered(MetaFlowMap(GaussianBackbone()), linear, n=2, method="dps", velocity=GAUSS.velocity())
    start = noise(200, 1).bfloat16()
    half = steered.sample((200, 1), steps=200, noise=start).x
    exact = steered.sample((200, 1), steps=200, noise=start.double()).x
    assert float((half.double() - exact).square().mean().sqrt()) < 0.02
