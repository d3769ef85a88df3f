"""Networks: derivatives forwards and under vmap, independence within a batch, labels, and stacks equal to single networks."""

import pytest
import torch

from cameraready.flows._toy.classifier import ImageClassifier
from cameraready.flows._toy.networks import MLPVelocity, TinyDiT, UNet
from cameraready.flows._toy.stacked import StackedMLP, clip_per_seed

pytestmark = pytest.mark.torch


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


NETWORKS = {
    "mlp": lambda: MLPVelocity(64, 32, 2, classes=10, generator=seeded(1)),
    "unet": lambda: UNet(width=16, blocks=1, generator=seeded(2)),
    "dit": lambda: TinyDiT(width=32, depth=2, heads=2, generator=seeded(3)),
}


@pytest.fixture(params=NETWORKS)
def net(request):
    return NETWORKS[request.param]()


@pytest.fixture
def inputs():
    g = seeded(4)
    return torch.randn(4, 1, 8, 8, generator=g), torch.rand(4, generator=g), torch.tensor([3, 0, 10, 9])


def test_weights_come_from_the_generator_alone(net, request):
    before = torch.get_rng_state()
    again = NETWORKS[request.node.callspec.params["net"]]()
    assert torch.equal(before, torch.get_rng_state())
    for a, b in zip(net.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


def test_forward_mode_derivatives_are_those_of_differences(net, inputs):
    net = net.double()
    x, t, y = (v.double() if v.is_floating_point() else v for v in inputs)
    g = seeded(5)
    dx, dt = torch.randn(x.shape, generator=g, dtype=x.dtype), torch.ones_like(t)
    out, slope = torch.func.jvp(lambda x, t: net(x, t, y), (x, t), (dx, dt))
    step = 1e-5
    with torch.no_grad():
        torch.testing.assert_close(out, net(x, t, y))
        numeric = (net(x + step * dx, t + step * dt, y) - net(x - step * dx, t - step * dt, y)) / (2 * step)
    torch.testing.assert_close(slope, numeric, rtol=1e-5, atol=1e-5)
    assert float(slope.detach().abs().mean()) > 1e-3


def test_each_state_is_by_itself(net, inputs):
    x, t, y = inputs
    together = net(x, t, y)
    single = torch.cat([net(x[i : i + 1], float(t[i]), y[i : i + 1]) for i in range(4)])
    torch.testing.assert_close(together, single, rtol=1e-5, atol=1e-5)
    mapped = torch.vmap(lambda x, t, y: net(x[None], t, y)[0])(x, t, y)
    torch.testing.assert_close(together, mapped, rtol=1e-5, atol=1e-5)


def test_no_label_is_the_null_label_and_labels_times_and_states_matter(net, inputs):
    x, t, _ = inputs
    none = net(x, t)
    torch.testing.assert_close(none, net(x, t, torch.full((4,), 10)))
    for other in (net(x, t, 3), net(x, 1 - t), net(-x, t)):
        assert float((other - none).detach().abs().mean()) > 1e-3


def test_bfloat16_stays(net, inputs):
    x, t, y = inputs
    out = net.bfloat16()(x.bfloat16(), t, y)
    assert out.dtype == torch.bfloat16
    assert out.shape == x.shape


def test_mistakes_are_named(net, inputs):
    x, t, y = inputs
    with pytest.raises(ValueError, match=r"labels must lie in 0..10 \(10 is the null label\), got 0..11"):
        net(x, t, torch.tensor([0, 1, 2, 11]))
    with pytest.raises(ValueError, match="one time for each of the 4 states"):
        net(x, t[:3], y)
    with pytest.raises(ValueError, match=r"takes images|have 64 numbers"):
        net(x[..., :4], t, y)


def test_labels_and_times_of_a_wrong_kind_are_told_by_all(net, inputs):
    x, _, y = inputs
    with pytest.raises(ValueError, match="labels are whole numbers"):
        net(x, 0.5, y + 0.7)
    for wrong in (torch.rand(4, 1), torch.rand(4, 1, 1, 1)):
        with pytest.raises(ValueError, match="one time for each of the 4 states"):
            net(x, wrong, y)


@pytest.mark.parametrize("label", [-1, 9])
def test_a_stack_names_labels_that_it_does_not_know(label):
    with pytest.raises(ValueError, match=rf"labels must lie in 0\.\.3 \(3 is the null label\), got {label}\.\.{label}"):
        StackedMLP(2, 2, width=4, depth=1, classes=3)(torch.zeros(2, 5, 2), 0.5, label)


def test_a_network_without_classes_takes_no_labels(inputs):
    x, t, y = inputs
    with pytest.raises(ValueError, match="knows no classes"):
        UNet(width=8, blocks=1, classes=0)(x, t, y)
    for wrong in (
        lambda: UNet(size=7),
        lambda: UNet(width=12),
        lambda: TinyDiT(patch=3),
        lambda: MLPVelocity(2, depth=0),
    ):
        with pytest.raises(ValueError, match="must"):
            wrong()


def test_sizes_of_the_shipped_backbones():
    """One to two million parameters."""
    for net in (UNet(width=48), TinyDiT(width=96)):
        assert 1e6 < sum(p.numel() for p in net.parameters()) < 2e6


def test_the_classifier_gives_a_gradient_in_the_image(inputs):
    net = ImageClassifier(width=8, generator=seeded(6)).double()
    x = inputs[0].double().requires_grad_()
    torch.testing.assert_close(net.last(net.features(x)), net(x))
    assert net.features(x).shape == (4, 64)
    assert torch.autograd.gradcheck(lambda v: net(v).log_softmax(-1)[:, 3].sum(), x[:1], fast_mode=True)


SHAPE = {"dim": 2, "width": 16, "depth": 2, "classes": 3, "fourier": 4, "extra": 5, "times": 2}


def stack_inputs(batch=6):
    g = seeded(7)
    x, context = torch.randn(3, batch, 2, generator=g), torch.randn(3, batch, 5, generator=g)
    t = (torch.rand(3, batch, generator=g), torch.rand(batch, generator=g))
    return x, t, torch.randint(4, (3, batch), generator=g), context


def test_a_stack_equals_single_networks_in_value_and_gradient():
    stack = StackedMLP([5, 0, 7], **SHAPE)
    singles = [MLPVelocity(**SHAPE, generator=seeded(s)) for s in (5, 0, 7)]
    x, t, y, context = stack_inputs()
    out = stack(x, t, y, context)
    out.square().sum().backward()
    for s, net in enumerate(singles):
        own = net(x[s], (t[0][s], t[1]), y[s], context[s])
        torch.testing.assert_close(out[s], own, rtol=1e-5, atol=1e-5)
        own.square().sum().backward()
        for mine, its in zip([*stack.layers, stack.last], [*net.layers, net.last], strict=True):
            torch.testing.assert_close(mine.weight.grad[s].mT, its.weight.grad, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(mine.bias.grad[s, 0], its.bias.grad, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(stack.table.grad[s], net.table.weight.grad, rtol=1e-4, atol=1e-4)


def test_one_adam_with_clipping_per_seed_is_independent_adams():
    shape = {**SHAPE, "classes": 0, "extra": 0, "times": 1}
    stack = StackedMLP(3, **shape)
    singles = [MLPVelocity(**shape, generator=seeded(s)) for s in range(3)]
    x, (t, _), _, _ = stack_inputs()
    optimizers = [torch.optim.Adam(net.parameters(), lr=0.01) for net in (stack, *singles)]
    scale = torch.tensor([0.01, 1.0, 100.0])  # the first seed's gradient is below the limit, the others' above
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        (scale * stack(x, t).square().flatten(1).mean(1)).sum().backward()
        norms = clip_per_seed(stack.parameters(), 0.3)
        optimizers[0].step()
        for s, net in enumerate(singles):
            (scale[s] * net(x[s], t[s]).square().mean()).backward()
            own = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.3)
            torch.testing.assert_close(norms[s], own, rtol=1e-4, atol=1e-6)
            optimizers[1 + s].step()
    assert float(norms[0]) < 0.3 < float(norms[2])
    for s, net in enumerate(singles):
        torch.testing.assert_close(stack.single(s)(x[s], t[s]), net(x[s], t[s]), rtol=1e-3, atol=1e-4)


def test_single_and_load_are_inverse_and_a_seed_is_the_same_in_any_company():
    stack, other = StackedMLP([4, 9], **SHAPE), StackedMLP(2, **SHAPE)
    alone = StackedMLP([9], **SHAPE)
    x, t, y, context = stack_inputs()
    t = (t[0][0], t[1])
    torch.testing.assert_close(stack(x[:2], t, y[0], context[0])[1], alone(x[1:2], t, y[0], context[0])[0])
    for index in range(2):
        other.load(index, stack.single(index))
    for a, b in zip(stack.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_shared_state_reaches_all_seeds_and_wrong_shapes_are_named():
    stack = StackedMLP(3, 2, 8, 1)
    x = torch.randn(5, 2, generator=seeded(8))
    torch.testing.assert_close(stack(x, 0.3), stack(x.expand(3, 5, 2), torch.tensor(0.3)))
    with pytest.raises(ValueError, match=r"states of 3 seeds are \(3, B, 2\), got shape \(2, 5, 2\)"):
        stack(x.expand(2, 5, 2), 0.3)
    with pytest.raises(ValueError, match="at least one seed"):
        StackedMLP([], 2)
    with pytest.raises(ValueError, match="given 1 time"):
        stack(x, (0.1, 0.2))
    with pytest.raises(ValueError, match="context must have 0 numbers"):
        stack(x, 0.1, None, x)
    with pytest.raises(ValueError, match="no parameter has a gradient"):
        clip_per_seed(stack.parameters(), 1.0)
