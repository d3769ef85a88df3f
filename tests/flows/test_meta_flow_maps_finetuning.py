"""Fine-tuning: the mean of its targets has its fixed point at the exact tilt drift, and what it trains ends in the tilted law."""

import math

import pytest
import torch
from torch import nn

from cameraready.flows import CosinePath, LinearPath, sample
from cameraready.flows._toy.mixtures import GaussianMixture
from cameraready.flows._toy.networks import MLPVelocity
from cameraready.flows.meta_flow_maps import MetaFlowMap, PosteriorFlow, finetune
from cameraready.flows.meta_flow_maps.finetuning import drawn, target_of
from cameraready.flows.meta_flow_maps.rewards import CountedReward
from tests.flows.mfm_exact import F64, GaussianBackbone, generator, noise

pytestmark = pytest.mark.torch
SLOPE = 0.8
PAIR = GaussianMixture(torch.tensor([0.7, 0.3]), torch.tensor([[-1.0], [1.0]], dtype=F64), torch.tensor([0.1, 0.1]))
GAUSS = GaussianMixture(torch.ones(1), torch.full((1, 1), 0.7, dtype=F64), torch.tensor([0.5]))


def linear(x1):
    return SLOPE * x1[:, 0]


def tilted(mixture):
    """The law of the mixture tilted by exp(SLOPE x), again a mixture."""
    means, variances = mixture.means, mixture.covariances[:, 0, 0]
    logits = mixture.weights.log() + SLOPE * means[:, 0] + SLOPE**2 / 2 * variances
    return GaussianMixture(torch.softmax(logits, 0), means + SLOPE * variances[:, None], variances)


@pytest.mark.parametrize("path", [LinearPath(), CosinePath()], ids=["linear", "cosine"])
@pytest.mark.parametrize("method", ["grad", "weights"])
@pytest.mark.parametrize("law", ["gaussian", "mixture"])
def test_the_mean_error_vanishes_at_the_exact_tilted_velocity_and_only_there(path, method, law):
    """With one draw a state, R and its gradient are noise; their means are not biased."""
    mixture = GAUSS if law == "gaussian" else PAIR
    mfm = (
        MetaFlowMap(GaussianBackbone(path=path), path)
        if law == "gaussian"
        else PosteriorFlow(PAIR.velocity(path), path, steps=8)
    )
    goal, base = tilted(mixture).velocity(path), mixture.velocity(path)
    n = 2000
    for t in (0.15, 0.5, 0.8):
        time = torch.full((n,), t, dtype=F64)
        x = torch.full((n, 1), 0.2, dtype=F64)
        weight, pull = drawn(mfm, CountedReward(linear), x, time, None, 0.3, method, generator(7))
        for off in (0.0, 0.5):
            now = goal(x, t) + off
            target, _ = target_of(now, base(x, t), x, time, weight, pull, path=path, method=method)
            found = (now - target)[:, 0]
            expected = off * float(weight.mean())
            assert abs(float(found.mean()) - expected) < 4.5 * float(found.std()) / math.sqrt(n) + 4e-3


def test_a_constant_sigma_is_another_law():
    x, time = noise(8, 1), torch.full((8,), 0.5, dtype=F64)
    base, ones = torch.zeros(8, 1, dtype=F64), torch.ones(8, dtype=F64)
    pull = torch.ones(8, 1, dtype=F64)
    exact, _ = target_of(base, base, x, time, ones, pull, path=LinearPath())
    torch.testing.assert_close(exact, torch.ones_like(exact))  # (1 - t) / t at one half
    constant, _ = target_of(base, base, x, time, ones, pull, path=LinearPath(), sigma=200**0.5)
    torch.testing.assert_close(constant, torch.full_like(constant, 100.0))
    own, _ = target_of(base, base, x, time, ones, pull, path=LinearPath(), sigma=lambda t: 2 * t)
    torch.testing.assert_close(own, torch.full_like(own, 0.5))


class Affine(nn.Module):
    """All velocities between Gaussians on a line, by their mean and log variance; starts at GAUSS."""

    def __init__(self):
        super().__init__()
        self.mean = nn.Parameter(torch.tensor(0.7, dtype=F64))
        self.log_variance = nn.Parameter(torch.tensor(0.5, dtype=F64).log())

    def forward(self, x, t, y=None):
        t = t.reshape(-1, 1) if isinstance(t, torch.Tensor) else t
        variance = self.log_variance.exp()
        return self.mean + (t * variance - (1 - t)) / (t**2 * variance + (1 - t) ** 2) * (x - t * self.mean)


@pytest.mark.parametrize("method", ["grad", "weights"])
def test_a_family_that_holds_the_tilted_flow_is_trained_to_it(method):
    network = Affine()
    found = finetune(
        network,
        MetaFlowMap(GaussianBackbone()),
        linear,
        data=GAUSS.sample(4000, generator(1)),
        steps=150,
        batch=256,
        lr=0.03,
        method=method,
    )
    assert abs(float(found.network.mean) - (0.7 + SLOPE * 0.5)) < 0.05
    assert abs(float(found.network.log_variance.exp()) - 0.5) < 0.05
    assert float(network.mean) == pytest.approx(0.7)  # what was given is left as it was
    assert found.network_calls == 150 * 256 * 3
    assert found.reward_calls == 150 * 256 + 1024
    assert 0.5 < found.effective < 1


class Corrected(nn.Module):
    """The mixture's velocity and what a network adds to it, nothing at first."""

    def __init__(self):
        super().__init__()
        self.base, self.network = PAIR.to(torch.float32).velocity(), MLPVelocity(1, width=24, depth=2)
        nn.init.zeros_(self.network.last.weight)

    def forward(self, x, t, y=None):
        return self.base(x, t) + self.network(x, t)


def test_a_network_ends_in_the_tilted_mixture():
    base = PAIR.to(torch.float32).velocity()
    mfm = PosteriorFlow(base, steps=4)
    found = finetune(
        base,
        mfm,
        linear,
        data=PAIR.to(torch.float32).sample,
        steps=180,
        batch=128,
        lr=1e-2,
        ema=0.95,
        network=Corrected(),
        method="weights",
    )
    x = sample(found.network, noise(2000, 1, dtype=torch.float32), steps=25, method="heun").x.double()
    goal = tilted(PAIR)
    assert abs(float(goal.weights[1]) - 0.3) > 0.2
    assert abs(float((x > 0).double().mean()) - float(goal.weights[1])) < 0.1
    assert abs(float(x.mean()) - float(goal.mean())) < 0.12


def test_what_cannot_be_trained_or_asked_is_told():
    data, mfm = GAUSS.sample(64, generator()), MetaFlowMap(GaussianBackbone())
    with pytest.raises(TypeError, match="pass network="):
        finetune(GAUSS.velocity(), mfm, linear, data=data, steps=1)
    with pytest.raises(ValueError, match=r"no gradient.*weights"):
        finetune(Affine(), mfm, lambda x1: (x1[:, 0] > 0).double(), data=data, steps=1)
    with pytest.raises(ValueError, match="has no sigma"):
        finetune(Affine(), mfm, linear, data=data, steps=1, method="weights", sigma=3.0)
    with pytest.raises(ValueError, match="sigma must be"):
        finetune(Affine(), mfm, linear, data=data, steps=1, sigma="memoryless")
    with pytest.raises(FloatingPointError, match=r"not finite|the loss is"):
        finetune(Affine(), mfm, linear, data=data * math.inf, steps=1, offset=0.0)


def test_frozen_parameters_of_a_network_of_ones_own_stay_as_they_are():
    network = Affine()
    network.log_variance.requires_grad_(False)
    finetune(
        Affine(),
        MetaFlowMap(GaussianBackbone()),
        linear,
        data=GAUSS.sample(64, generator()),
        steps=3,
        batch=16,
        lr=0.1,
        network=network,
    )
    assert float(network.log_variance) == pytest.approx(math.log(0.5))
    assert float(network.mean) != pytest.approx(0.7, abs=1e-4)
