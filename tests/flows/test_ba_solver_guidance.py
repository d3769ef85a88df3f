"""Guidance told from what a pipeline's network returned: any weighted sum, any number of calls, and what is refused."""

import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.torch
pytest.importorskip("diffusers")

from diffusers import FlowMatchEulerDiscreteScheduler  # noqa: E402

from cameraready.flows.ba_solver import BAScheduler, MLPSideNet, SideNet  # noqa: E402
from cameraready.flows.ba_solver.quadrature import closed_rule  # noqa: E402
from tests.flows.ba_pipelines import seeded  # noqa: E402


def stepping(side, network):
    scheduler = BAScheduler(side=side)
    scheduler.watch(network)
    scheduler.set_timesteps(3)
    return scheduler


@pytest.mark.parametrize("weights", [(1.0,), (-6.0, 7.0), (4.0, -3.0), (-2.0, 5.5, -2.5)])
def test_any_weighted_sum_is_recognised_however_many_calls_it_takes(weights):
    """Skipped layers make three; per-sample rescaling multiplies each sample's weights by another number."""
    seen, network, x = [], nn.Identity(), torch.randn(2, 5, generator=seeded(0))

    def side(x, v, t, h, y):
        seen.append(v)
        return torch.tanh(3 * v) * h[:, None]

    scheduler = stepping(side, network)
    parts = [x + 0.05 * torch.randn(2, 5, generator=seeded(seed)) for seed in range(1, 1 + len(weights))]
    rescaled = torch.tensor([[0.9], [1.1]]) if len(weights) > 1 else 1.0
    combined = rescaled * sum(w * network(part) for w, part in zip(weights, parts, strict=True))
    found = scheduler.step(combined, scheduler.timesteps[0], x).prev_sample
    rule, h = closed_rule("lobatto"), float(scheduler.sigmas[0] - scheduler.sigmas[1])
    expected = x - h * combined
    for node, weight in zip(rule.nodes[1:], rule.weights[1:], strict=True):
        change = sum(w * torch.tanh(-3 * part) * node * h for w, part in zip(weights, parts, strict=True))
        expected = expected + h * weight * rescaled * change
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert len(seen) == 1, "all halves and nodes in one call of the SideNet"


def test_equal_halves_and_a_guidance_in_bfloat16_are_no_trouble():
    network, x = nn.Identity(), torch.randn(4, 300, generator=seeded(0)).bfloat16()
    scheduler = stepping(lambda x, v, t, h, y: v * h[:, None], network)
    half = network(torch.cat([x, x]))
    free, given = half.chunk(2)
    first = scheduler.step(free + 7.0 * (given - free), scheduler.timesteps[0], x).prev_sample
    assert first.dtype == torch.bfloat16
    halves = network(torch.cat([x, x + 0.3 * torch.randn(4, 300, generator=seeded(1)).bfloat16()]))
    free, given = halves.chunk(2)
    assert scheduler.step(free + 7.0 * (given - free), scheduler.timesteps[1], first).prev_sample.isfinite().all()


def test_what_cannot_be_told_apart_is_refused_with_a_sentence():
    network, x = nn.Identity(), torch.randn(2, 50, generator=seeded(0))
    side = MLPSideNet(50, width=8, depth=1)
    unwatched = BAScheduler(side=side)
    unwatched.set_timesteps(3)
    with pytest.raises(ValueError, match=r"BAScheduler.attach\(pipe, side\)"):
        unwatched.step(x, unwatched.timesteps[0], x)
    scheduler = stepping(side, network)
    with pytest.raises(ValueError, match="no weighted sum"):
        scheduler.step(torch.tanh(network(x) + network(x.flip(1))), scheduler.timesteps[0], x)
    scheduler = stepping(side, network)
    with pytest.raises(ValueError, match="without asking the watched network"):
        scheduler.step(x, scheduler.timesteps[0], x)
    scheduler = stepping(side, network)
    with pytest.raises(ValueError, match="as the network gives it"):
        scheduler.step(network(torch.cat([x, x], 1))[:, :50], scheduler.timesteps[0], x)


@pytest.mark.parametrize("name", ["unet", "transformer"])
@pytest.mark.parametrize("classes", [0, 3])
def test_a_refusal_names_the_network_that_there_is_and_the_labels_that_it_needs(name, classes):
    side = SideNet(2, width=8, depth=1, heads=0, classes=classes)
    pipe = SimpleNamespace(scheduler=FlowMatchEulerDiscreteScheduler(), **{name: nn.Identity()})
    named = ", labels='class_labels'" if classes else ""
    x = torch.ones(1, 2, 4, 4)
    loaded = BAScheduler(side=side)
    attached = BAScheduler.attach(pipe, side, labels="class_labels" if classes else None)
    attached.unwatch()
    for scheduler, ways in (
        (loaded, f"scheduler.watch(pipe.transformer{named}) or scheduler.watch(pipe.unet{named}), whichever"),
        (attached, f"scheduler.watch(pipe.{name}{named});"),
    ):
        scheduler.set_timesteps(3)
        with pytest.raises(ValueError, match=re.escape(f"BAScheduler.attach(pipe, side{named}) or {ways}")):
            scheduler.step(x, scheduler.timesteps[0], x)
        if classes:
            with pytest.raises(ValueError, match=re.escape(f"scheduler.watch(pipe.{name}{named})")):
                scheduler.watch(pipe)
