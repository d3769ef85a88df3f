"""The map as a module: exactly the teacher at first, a flow map, posterior draws at every time, and few steps without a condition."""

import copy
import math

import pytest
import torch
from torch import nn

from cameraready.flows import CosinePath, LinearPath
from cameraready.flows._toy.distances import energy_distance
from cameraready.flows._toy.mixtures import GaussianMixture
from cameraready.flows._toy.networks import MLPVelocity, TinyDiT, UNet
from cameraready.flows.meta_flow_maps import (
    FlowBackbone,
    MapMLP,
    MetaFlowMap,
    MFMTrainer,
    PosteriorFlow,
    Steered,
    finetune,
    inner_velocity,
)
from tests.flows.mfm_exact import F64, GaussianBackbone, generator, noise

pytestmark = pytest.mark.torch
PAIR = GaussianMixture(torch.tensor([0.4, 0.6]), torch.tensor([[-1.0], [0.8]], dtype=F64), torch.tensor([0.12, 0.2]))
TIMES = (0.0, 0.4, 0.9, 1.0)


@pytest.fixture(scope="module")
def learned():
    """A small map of two modes on a line, trained on the analytic teacher."""
    mfm = MetaFlowMap(MapMLP(1, width=48, depth=3))
    single = PAIR.to(torch.float32)
    trainer = MFMTrainer(
        mfm, single.velocity(), distill="psd", batch=192, lr=5e-3, cooldown=0.7, ema=0.99, warmup=30, diagonal=0.3
    )
    return trainer.fit(single.sample, 700)


NETWORKS = {
    "unet": (lambda: UNet(width=8, blocks=1, classes=10), (1, 8, 8), ("first", "embed")),
    "dit": (lambda: TinyDiT(width=16, depth=1, heads=2, classes=10), (1, 8, 8), ("first", "embed")),
    "mlp": (lambda: MLPVelocity(5, width=12, depth=2, classes=10), (5,), ("layers.0",)),
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("path", [LinearPath(), CosinePath()], ids=["linear", "cosine"])
def test_a_map_made_of_a_flow_network_is_exactly_its_inner_velocity_until_it_is_trained(name, path):
    make, shape, layers = NETWORKS[name]
    network = make().to(F64)
    mfm = MetaFlowMap(FlowBackbone(copy.deepcopy(network), shape, layers, path).to(F64), path)
    x, y, label = noise(3, *shape, seed=1), noise(3, *shape, seed=2), torch.tensor([1, 7, 10])
    u = inner_velocity(network, path)
    for t in TIMES:
        for s in TIMES:
            found = mfm.average_velocity(s, max(s, 0.95), y, t, x, label)
            torch.testing.assert_close(found, u(s, y, t, x, label), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(mfm.velocity(x, t, label), network(x, torch.full((3,), t, dtype=F64), label))
    # And once the conditioners are not zero, it depends on where it is going and on both states.
    for conditioner in mfm.backbone.conditioners:
        nn.init.constant_(conditioner.last.weight, 0.05)
    one = mfm.average_velocity(0.2, 0.5, y, 0.5, x, label)
    for other in ((0.2, 0.9, y, 0.5, x), (0.2, 0.5, y + 0.1, 0.5, x), (0.2, 0.5, y, 0.5, x + 0.1)):
        assert not torch.allclose(one, mfm.average_velocity(*other, label), atol=1e-6)
    torch.testing.assert_close(mfm(0.1, 0.8, y, 0.0, x, label), mfm(0.1, 0.8, y, 0.0, 0 * x, label))


def test_layers_that_are_not_there_or_too_large_are_told():
    with pytest.raises(ValueError, match=r"no submodule 'frist'.*first"):
        FlowBackbone(UNet(width=8, blocks=1), (1, 8, 8), ["frist"])
    with pytest.raises(ValueError, match="too many for a dense conditioner"):
        FlowBackbone(MLPVelocity(20_000, width=4, depth=1), (20_000,), ["layers.0"], width=1000)


@pytest.mark.parametrize("path", [LinearPath(), CosinePath()], ids=["linear", "cosine"])
def test_the_exact_map_composes_and_one_call_is_a_posterior_draw(path):
    backbone = GaussianBackbone(path=path)
    mfm = MetaFlowMap(backbone, path)
    x, y, t = noise(5, 2, seed=1), noise(5, 2, seed=2), 0.4
    whole = mfm(0.1, 0.9, y, t, x)
    torch.testing.assert_close(mfm(0.6, 0.9, mfm(0.1, 0.6, y, t, x), t, x), whole)
    torch.testing.assert_close(mfm(0.3, 0.3, y, t, x), y)
    draws = mfm.sample_posterior(x, t, 20_000, generator=generator())
    mean, variance = backbone.posterior(x, torch.full((5, 1), t, dtype=F64))
    assert ((draws.mean(0) - mean).abs() < 5 * (variance / 20_000).sqrt()).all()
    torch.testing.assert_close(draws.var(0), variance.expand(5, 2), rtol=0.06, atol=0)
    eps = noise(3, 5, 2)
    torch.testing.assert_close(
        mfm.sample_posterior(x, t, 3, steps=4, noise=eps), mfm.sample_posterior(x, t, 3, noise=eps)
    )


@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize("steps", [1, 3])
def test_few_step_samples_of_the_exact_map_have_the_law_of_the_data(kernel, steps):
    x = MetaFlowMap(GaussianBackbone()).sample((20_000, 1), steps=steps, kernel=kernel, generator=generator(steps))
    assert x.dtype == torch.float32
    assert abs(float(x.mean()) - 0.7) < 0.02
    assert abs(float(x.var()) - 0.5) < 0.02


@pytest.mark.parametrize("t", [0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.97])
def test_draws_of_a_trained_map_have_posterior_mean_spread_and_weights(learned, t):
    x = t * PAIR.sample(16, generator(5)) + (1 - t) * noise(16, 1, seed=6)
    law = PAIR.posterior(x, t)
    draws = learned.sample_posterior(x.float(), t, 800, generator=generator(8)).double()
    scale = law.covariance[:, 0].sqrt()
    assert float(((draws.mean(0) - law.mean).abs() / scale).mean()) < 0.15
    assert float((draws.std(0) / scale).log().abs().mean()) < 0.15
    exact = PAIR.posterior_sample(x, t, 800, generator(9))
    left = [(v < -0.1).double().mean(0)[:, 0] for v in (draws, exact)]
    assert float((left[0] - left[1]).abs().mean()) < 0.06
    apart = energy_distance(draws.transpose(0, 1), exact.transpose(0, 1))
    point = energy_distance(law.mean[:, None].expand(-1, 800, -1), exact.transpose(0, 1))
    assert float(apart.mean()) < 0.1 * float(point.mean())


def test_a_trained_map_composes_and_its_diagonal_is_the_teachers_velocity(learned):
    x, y = noise(200, 1, seed=1, dtype=torch.float32), noise(200, 1, seed=2, dtype=torch.float32)
    t = torch.rand(200, generator=generator(3))
    x = 0.9 * t[:, None] * PAIR.sample(200, generator(4)).float() + (1 - t[:, None]) * x
    u = inner_velocity(PAIR.to(torch.float32).velocity())
    s = 0.8 * torch.rand(200, generator=generator(5))
    state = PAIR.to(torch.float32).posterior_sample(x, t, 1, generator(6))[0] * s[:, None] + (1 - s[:, None]) * y
    truth, found = u(s, state, t, x), learned.average_velocity(s, s, state, t, x)
    assert float((truth - found).square().mean() / truth.square().mean()) < 0.03
    whole, parts = learned(0.0, 1.0, y, t, x), learned(0.5, 1.0, learned(0.0, 0.5, y, t, x), t, x)
    assert float((whole - parts).square().mean().sqrt()) < 0.2 * float(whole.std())


def test_the_gradient_through_a_trained_draw_is_that_of_finite_differences(learned):
    mfm = copy.deepcopy(learned).to(F64)
    eps, x = noise(2, 6, 1, seed=1), noise(6, 1, seed=2).requires_grad_()

    def total(state):
        return (mfm.sample_posterior(state, 0.5, 2, noise=eps) ** 3).sum()

    (slope,) = torch.autograd.grad(total(x), x)
    with torch.no_grad():
        difference = (total(x + 1e-5) - total(x - 1e-5)) / 2e-5
    torch.testing.assert_close(slope.sum(), difference, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, F64])
def test_dtypes_of_states_and_networks_may_differ(learned, dtype):
    eps = noise(2, 3, 1).to(dtype)
    found = learned.sample_posterior(noise(3, 1, seed=4).to(dtype), 0.4, 2, noise=eps)
    assert found.dtype == dtype
    half = copy.deepcopy(learned).to(torch.bfloat16)
    again = half.sample_posterior(noise(3, 1, seed=4).to(dtype), 0.4, 2, noise=eps)
    assert again.dtype == dtype
    torch.testing.assert_close(again.double(), found.double(), rtol=0, atol=0.15)


def test_weights_and_counts_and_refusals(learned, tmp_path):
    other = MetaFlowMap(MapMLP(1, width=48, depth=3, generator=generator(7)))
    torch.save(learned.state_dict(), tmp_path / "map.pt")
    other.load_state_dict(torch.load(tmp_path / "map.pt", weights_only=True))
    eps = noise(1, 4, 1, dtype=torch.float32)
    x = noise(4, 1, dtype=torch.float32)
    assert torch.equal(other.sample_posterior(x, 0.2, noise=eps), learned.sample_posterior(x, 0.2, noise=eps))
    before = other.evaluations
    other.sample_posterior(x, 0.2, 5, steps=3)
    assert other.evaluations - before == 4 * 5 * 3
    for t in (1.2, -0.1, torch.tensor([0.1, 0.2, 0.3, 700.0])):
        with pytest.raises(ValueError, match=r"0 .noise. to 1"):
            learned.sample_posterior(x, t)
    with pytest.raises(ValueError, match="steps must be at least 1"):
        learned.sample_posterior(x, 0.5, steps=0)
    with pytest.raises(FloatingPointError, match="not finite"):
        learned.sample_posterior(x * math.nan, 0.5)
    with pytest.raises(ValueError, match="data_std"):
        MapMLP(2, data_std=0.0)


@pytest.mark.parametrize("path", [LinearPath(), CosinePath()], ids=["linear", "cosine"])
def test_the_perceptron_begins_as_the_exact_map_of_a_gaussian(path):
    mfm = MetaFlowMap(MapMLP(2, width=8, depth=1, data_std=0.5**0.5, path=path).to(F64), path)
    exact = MetaFlowMap(GaussianBackbone(mean=0.0, variance=0.5, path=path), path)
    x, y = noise(6, 2, seed=1), noise(6, 2, seed=2)
    for t in (0.0, 0.4, 0.9):
        for s, u in ((0.0, 1.0), (0.2, 0.7), (0.5, 0.5005), (0.3, 0.3)):
            found, truth = (m.average_velocity(s, u, y, t, x) for m in (mfm, exact))
            torch.testing.assert_close(found, truth, rtol=1e-6, atol=1e-6)


class Plain(nn.Module):
    """A velocity of x and t alone, as most are."""

    def __init__(self):
        super().__init__()
        self.inner = MLPVelocity(2, width=8, depth=1)

    def forward(self, x, t):
        return self.inner(x, t)


def test_velocities_without_labels_will_do_everywhere():
    x, network = noise(8, 2, dtype=torch.float32), Plain()
    mfm = MetaFlowMap(FlowBackbone(network, (2,), ["inner.layers.0"]))
    MFMTrainer(mfm, network, batch=8).step(x)
    flow = PosteriorFlow(network, steps=2)
    assert Steered(flow, lambda x1: x1[:, 0], n=2).sample((3, 2), steps=2, noise=x[:3]).x.shape == (3, 2)
    tuned = finetune(network, flow, lambda x1: x1[:, 0], data=x, steps=1, batch=8)
    assert tuned.network(x, 0.5).shape == x.shape
    label = torch.zeros(8, dtype=torch.long)
    with pytest.raises(TypeError):
        flow.sample_posterior(x, 0.5, label=label)


@pytest.mark.parametrize("steps", [16, 256])
def test_more_steps_in_half_precision_do_no_harm(steps):
    v = PAIR.velocity()
    flow = PosteriorFlow(v, steps=steps, method="euler")
    eps, x = noise(1, 200, 1, seed=1).bfloat16(), noise(200, 1, seed=2).bfloat16()
    found = flow.sample_posterior(x, 0.5, noise=eps)
    exact = flow.sample_posterior(x.double(), 0.5, noise=eps.double())
    assert float((found.double() - exact).square().mean().sqrt()) < 0.01
