"""Training: the law is learnt, stacks train as single networks do, and an interrupted run ends with the bits of one that was not."""

import itertools
import math
import os
import signal

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from cameraready.flows._paths import CosinePath
from cameraready.flows._toy import checkpoints
from cameraready.flows._toy.checkpoints import Checkpoint
from cameraready.flows._toy.classifier import ImageClassifier, train_classifier
from cameraready.flows._toy.mixtures import GaussianMixture
from cameraready.flows._toy.networks import MLPVelocity
from cameraready.flows._toy.stacked import StackedMLP
from cameraready.flows._toy.training import fit, train_flow

pytestmark = pytest.mark.torch
LAW = GaussianMixture(torch.tensor([0.5, 0.5]), torch.tensor([[2.0], [-2.0]]), torch.tensor([0.25, 0.25]))


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@torch.no_grad()
def error(net, path, y=None):
    """Mean square of the velocity less the exact one, over states of the path; relative to the velocity's own."""
    g = seeded(99)
    t = torch.rand(2000, generator=g)
    state = path.interpolate(LAW.sample(2000, g, labels=y).float(), torch.randn(2000, 1, generator=g), t)
    exact = LAW.velocity(path)(state, t, y)
    found = net(state, t) if y is None else net(state, t, y)
    return float((found - exact).square().mean() / exact.square().mean())


@pytest.fixture(scope="module")
def conditional():
    """A class-conditional network of the two components, trained on fresh draws."""

    def draw(n, generator):
        y = torch.randint(2, (n,), generator=generator)
        return LAW.sample(n, generator, labels=y), y

    net = MLPVelocity(1, 48, 2, classes=2, generator=seeded(1))
    return train_flow(
        net, draw, path=CosinePath(), steps=600, batch=256, lr=5e-3, ema=0.99, label_dropout=0.3, generator=seeded(2)
    )


def test_flow_matching_learns_the_exact_velocity_of_each_class_and_of_all(conditional):
    path = CosinePath()
    assert error(conditional, path) < 0.08  # sees three of ten draws
    for label in (0, 1):
        assert error(conditional, path, torch.full((2000,), label)) < 0.02
    assert not conditional.training
    assert not any(p.requires_grad for p in conditional.parameters())


def test_global_randomness_is_not_touched():
    before = torch.get_rng_state()
    net = MLPVelocity(1, 8, 1)
    train_flow(net, torch.randn(20, 1, generator=seeded()), steps=3, generator=seeded())
    assert torch.equal(before, torch.get_rng_state())


def test_a_stack_learns_in_every_seed():
    from cameraready.flows._paths import LinearPath

    stack = StackedMLP(3, 1, 32, 2)
    train_flow(stack, LAW.sample, steps=500, batch=256, lr=5e-3, ema=0.99, generator=seeded(3))
    for s in range(3):
        assert error(stack.single(s), LinearPath()) < 0.05


def test_the_average_of_a_quadratic_follows_its_recursion():
    """Weights and average against a loop in plain numbers, Adam by torch."""

    class Point(nn.Module):
        def __init__(self):
            super().__init__()
            self.x = nn.Parameter(torch.tensor([3.0]))

    steps, lr, ema = 30, 0.1, 0.9
    got = fit(Point(), lambda net, g: net.x.square().sum(), steps=steps, lr=lr, ema=ema, clip=1.0, generator=seeded())
    x = nn.Parameter(torch.tensor([3.0]))
    adam = torch.optim.Adam([x], betas=(0.9, 0.99))
    average = x.detach().clone()
    for k in range(steps):
        rate = lr * min(1.0, k + 1) * 0.5 * (1 + math.cos(math.pi * k / steps))
        adam.param_groups[0]["lr"] = rate
        x.grad = (2 * x.detach()).clamp(-1, 1)
        adam.step()
        keep = min(ema, (1 + k) / (10 + k))
        average = keep * average + (1 - keep) * x.detach()
    assert float(got.x) == pytest.approx(float(average), rel=1e-4)


DATA = torch.randn(50, 2, generator=seeded(4))


def trained(checkpoint=None, *, die_at=None, steps=40):
    """A short training; with `die_at` the process kills itself when it draws that batch."""
    batches = itertools.count(1)

    def draw(n, generator):
        if next(batches) == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return DATA[torch.randint(50, (n,), generator=generator)]

    net = MLPVelocity(2, 8, 1, generator=seeded(5))
    return train_flow(net, draw, steps=steps, batch=8, lr=1e-2, generator=seeded(6), checkpoint=checkpoint)


def test_a_killed_training_goes_on_to_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "EVERY", 0.0)
    place = tmp_path / "state"
    child = os.fork()
    if child == 0:
        try:
            trained(place, die_at=15)
        finally:  # whatever happens, the child does not go on with the tests
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert place.exists()
    seen = []
    monkeypatch.setattr(Checkpoint, "save", lambda self, step, tensors: seen.append(step))
    resumed = trained(place)
    assert seen == list(range(15, 41))  # fourteen steps were done before
    assert not place.exists()
    for a, b in zip(resumed.parameters(), trained().parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("spoil", ["another", "damaged", "stepless", "lacking"])
def test_a_state_that_does_not_fit_is_told_and_not_used(tmp_path, monkeypatch, capsys, spoil):
    monkeypatch.setattr(checkpoints, "EVERY", 0.0)
    place = tmp_path / "state"

    def interrupted(net, generator):
        if place.exists():
            raise KeyboardInterrupt
        return net(DATA, 0.5).square().mean()

    def go_on(steps):
        return fit(
            MLPVelocity(2, 8, 1),
            lambda net, g: net(DATA, 0.5).square().mean(),
            steps=steps,
            lr=0.01,
            generator=seeded(),
            checkpoint=place,
        )

    with pytest.raises(KeyboardInterrupt):
        fit(MLPVelocity(2, 8, 1), interrupted, steps=9, lr=0.01, generator=seeded(), checkpoint=place)
    if spoil == "damaged":
        place.write_bytes(place.read_bytes()[:100])
    if spoil in ("stepless", "lacking"):
        with safe_open(place, framework="pt") as file:
            facts, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        facts.pop("step") if spoil == "stepless" else tensors.pop("average.last.bias")
        save_file(tensors, place, metadata=facts)
    again = go_on(8 if spoil == "another" else 9)
    assert ("other settings" if spoil == "another" else "cannot be read") in capsys.readouterr().err
    fresh = go_on(8 if spoil == "another" else 9)
    for a, b in zip(again.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(a, b)


def test_progress_is_on_stderr_alone_and_names_the_work(capsys):
    fit(
        MLPVelocity(2, 4, 1),
        lambda net, g: net(DATA, 0.5).square().mean(),
        steps=3,
        lr=0.01,
        generator=seeded(),
        progress="a flow",
    )
    said = capsys.readouterr()
    assert said.out == ""
    assert "a flow: step 3 of 3, loss" in said.err
    trained(steps=2)
    assert capsys.readouterr().err == ""


def test_a_classifier_learns_what_can_be_told():
    g = seeded(7)
    labels = torch.randint(2, (400,), generator=g)
    images = 0.5 * torch.randn(400, 1, 8, 8, generator=g)
    images[:, 0, :4] += labels[:, None, None] - 0.5
    net = ImageClassifier(classes=2, width=8, generator=seeded(8))
    train_classifier(net, images[:300], labels[:300], steps=60, batch=32, lr=3e-3, generator=seeded(9))
    assert float((net(images[300:]).argmax(1) == labels[300:]).float().mean()) > 0.95


def test_mistakes_are_named():
    net = MLPVelocity(2, 4, 1)
    with pytest.raises(ValueError, match="one label for each of the 50 data, got 3"):
        train_flow(net, DATA, torch.zeros(3), steps=1, generator=seeded())
    with pytest.raises(ValueError, match="let it return"):
        train_flow(net, lambda n, g: DATA, torch.zeros(50), steps=1, generator=seeded())
    with pytest.raises(ValueError, match="steps and lr must be positive"):
        train_flow(net, DATA, steps=0, generator=seeded())
    for data, words in ((DATA * math.nan, "50 of 50 data are not finite"), (DATA[:0], "there are no data")):
        with pytest.raises(ValueError, match=words):
            train_flow(MLPVelocity(2, 8, 1), data, steps=2, generator=seeded())
    with pytest.raises(FloatingPointError, match="the loss is nan at step 0: before anything was learnt"):
        train_flow(net, lambda n, g: DATA[:n] * math.nan, steps=2, batch=50, generator=seeded())
