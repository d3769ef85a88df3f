"""The optimizers: what a step is, which traps are closed, what is refused."""

import math
import warnings

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev

from cameraready.optim.sng import SNG, SPRING, CoupledSamplesError, UnstableStepWarning, linearise, spring_update

pytestmark = pytest.mark.torch


def network(width=8, n_in=2, seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(n_in, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)).to(
        dtype
    )


def data(k=12, n_in=2, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(k, n_in, generator=generator, dtype=torch.float64)
    return x, torch.sin(3 * x[:, 0]) * x[:, -1]


def vector(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def jacobian(model, x):
    params = {name: p.detach() for name, p in model.named_parameters()}
    found = jacrev(lambda p: functional_call(model, p, (x,))[:, 0])(params)
    return torch.cat([found[name].reshape(len(x), -1) for name in params], dim=1)


def test_full_batch_with_tiny_damping_is_a_gauss_newton_step():
    model, (x, y) = network(), data()
    before, r = vector(model), model(x)[:, 0].detach() - y
    expected = before - torch.linalg.lstsq(jacobian(model, x), r[:, None], driver="gelsd").solution[:, 0]
    SNG(model.parameters(), damping=1e-13).step(lambda: model(x)[:, 0] - y)
    torch.testing.assert_close(vector(model), expected, rtol=1e-4, atol=1e-5)


def test_linear_least_squares_is_solved_in_one_full_step():
    model, (x, _) = nn.Linear(2, 1, dtype=torch.float64), data()
    y = x @ torch.tensor([2.0, -1.0], dtype=torch.float64) + 0.5
    SNG(model.parameters(), damping=0.0).step(lambda: model(x)[:, 0] - y)
    torch.testing.assert_close(vector(model), torch.tensor([2.0, -1.0, 0.5], dtype=torch.float64))


@pytest.mark.parametrize("norm_constraint", [None, 1e-4])
def test_spring_follows_its_recursion_on_fresh_batches(norm_constraint):
    """By hand: the current batch's Jacobian in mu J phi, the buffer before learning rate and constraint."""
    model, (x, y) = network(), data(40)
    optimizer = SPRING(model.parameters(), lr=0.2, mu=0.9, damping=1e-3, norm_constraint=norm_constraint)
    theta, phi = vector(model), torch.zeros_like(vector(model))
    shortened = 0
    for step in range(4):
        S = torch.arange(10) + 10 * step
        r = model(x[S])[:, 0].detach() - y[S]
        phi = spring_update(jacobian(model, x[S]), r, phi, 0.9, 10 * 1e-3)
        scale = 1.0 if norm_constraint is None else min(1.0, math.sqrt(norm_constraint) / (0.2 * phi.norm().item()))
        theta = theta - 0.2 * scale * phi
        optimizer.step(lambda S=S: model(x[S])[:, 0] - y[S])
        torch.testing.assert_close(vector(model), theta, rtol=1e-8, atol=1e-10)
        stored = torch.cat([optimizer.state[p]["direction"].reshape(-1) for p in model.parameters()])
        torch.testing.assert_close(stored, phi, rtol=1e-8, atol=1e-10)
        shortened += scale < 1.0
    assert shortened == (0 if norm_constraint is None else 4)


def test_without_momentum_spring_is_sng():
    (x, y), one, two = data(), network(), network()
    plain, spring = SNG(one.parameters(), lr=0.5), SPRING(two.parameters(), lr=0.5, mu=0.0)
    for _ in range(3):
        plain.step(lambda: one(x)[:, 0] - y)
        spring.step(lambda: two(x)[:, 0] - y)
    assert torch.equal(vector(one), vector(two))


@pytest.mark.parametrize("centered", [False, True])
def test_a_batch_twice_as_large_of_the_same_samples_makes_the_same_step(centered):
    """Damping is relative to the mean over samples, for Jacobian and residual alike."""
    (x, y), one, two = data(), network(), network()
    SNG(one.parameters(), damping=0.1, centered=centered).step(lambda: one(x)[:, 0] - y)
    twice, target = torch.cat([x, x]), torch.cat([y, y])
    SNG(two.parameters(), damping=0.1, centered=centered).step(lambda: two(twice)[:, 0] - target)
    torch.testing.assert_close(vector(one), vector(two), rtol=1e-9, atol=1e-11)


def test_duplicated_samples_without_damping_are_harmless():
    model, (x, y) = network(), data(4)
    x, y = torch.cat([x, x]), torch.cat([y, y])
    before = (model(x)[:, 0] - y).square().mean().item()
    SNG(model.parameters(), lr=0.1, damping=0.0).step(lambda: model(x)[:, 0] - y)
    assert (model(x)[:, 0] - y).square().mean().item() < before


def test_a_general_loss_gives_the_natural_gradient_of_its_sum():
    """Poisson regression: outputs are log rates, the derivative is rate - count."""
    model, (x, _) = network(), data()
    counts = torch.arange(12, dtype=torch.float64) % 4
    before, J = vector(model), jacobian(model, x)
    signal = model(x)[:, 0].detach().exp() - counts
    expected = before - 0.3 * J.T @ torch.linalg.solve(J @ J.T + 12 * 0.01 * torch.eye(12, dtype=J.dtype), signal)

    def closure():
        outputs = model(x)[:, 0]
        loss = (outputs.exp() - counts * outputs).sum()
        (derivative,) = torch.autograd.grad(loss, outputs, retain_graph=True)
        return outputs, derivative

    outputs, derivative = SNG(model.parameters(), lr=0.3, damping=0.01).step(closure)
    torch.testing.assert_close(vector(model), expected, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(derivative, signal)
    assert not outputs.requires_grad


def test_learning_rates_of_groups_scale_their_part_of_the_step_alone():
    (x, y), one, two = data(), network(), network()
    SNG(one.parameters(), lr=1.0).step(lambda: one(x)[:, 0] - y)
    groups = [{"params": two[0].parameters(), "lr": 0.25}, {"params": [*two[2].parameters(), *two[4].parameters()]}]
    start = network()
    SNG(groups, lr=1.0).step(lambda: two(x)[:, 0] - y)
    torch.testing.assert_close(two[0].weight - start[0].weight, 0.25 * (one[0].weight - start[0].weight))
    torch.testing.assert_close(two[2].weight, one[2].weight)


def test_the_norm_constraint_holds_over_all_parameters():
    model, (x, y) = network(), data()
    before = vector(model)
    optimizer = SNG(model.parameters(), norm_constraint=1e-3)
    optimizer.step(lambda: model(x)[:, 0] - y)
    assert (vector(model) - before).square().sum().item() == pytest.approx(1e-3)
    assert optimizer.last_info["scale"] < 1.0


def test_the_learning_rate_follows_from_mu():
    parameters = list(network().parameters())
    assert SNG(parameters).param_groups[0]["lr"] == 1.0
    assert SPRING(parameters, mu=0.95).param_groups[0]["lr"] == pytest.approx(0.05)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SPRING(parameters, mu=0.99)
        SPRING(parameters, lr=1.0, mu=0.7)
        SPRING(parameters, lr=1.0, mu=0.9, norm_constraint=1e-3)
    for mu in (0.8, 0.99):
        with pytest.warns(UnstableStepWarning, match="diverges"):
            SPRING(parameters, lr=1.0, mu=mu)


def test_inconsistent_least_squares_stalls_at_a_floor_that_a_smaller_step_lowers():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 5, generator=generator, dtype=torch.float64)
    y = x.sum(dim=1) + torch.randn(200, generator=generator, dtype=torch.float64)
    best = torch.linalg.lstsq(x, y[:, None]).solution[:, 0]
    floors = []
    for lr in (1.0, 0.05):
        model = nn.Linear(5, 1, bias=False, dtype=torch.float64)
        optimizer = SNG(model.parameters(), lr=lr)
        late = []
        for step in range(160):
            S = torch.randperm(200, generator=generator)[:10]
            optimizer.step(lambda S=S, model=model: model(x[S])[:, 0] - y[S])
            if step >= 60:
                late.append((model.weight[0] - best).square().sum().item())
        floors.append(sum(late) / len(late))
    assert floors[0] > 0.1
    assert floors[1] < 0.2 * floors[0]


def test_single_precision_reaches_its_rounding():
    x, _ = data(64)
    model, teacher = network(dtype=torch.float32), network(seed=5, dtype=torch.float32)
    target = 0.1 * teacher(x.float())[:, 0].detach()
    optimizer = SNG(model.parameters(), damping=1e-7)
    for _ in range(60):
        residual = optimizer.step(lambda: model(x.float())[:, 0] - target)
    assert residual.square().mean().sqrt() < 3e-5
    assert residual.dtype == torch.float32


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm1d(8),
        nn.BatchNorm1d(8, track_running_stats=False).eval(),
        nn.Dropout(0.1),
        nn.AlphaDropout(0.1),
        nn.RReLU(),
    ],
)
@pytest.mark.parametrize("form", ["closure", "linearise"])
def test_layers_that_couple_samples_or_draw_are_refused(layer, form):
    x, y = data()
    model = nn.Sequential(nn.Linear(2, 8), layer, nn.Linear(8, 1)).double()
    before = vector(model)
    optimizer = SNG(model.parameters())

    def one(params, x, y):
        return functional_call(model, params, (x[None],))[0, 0] - y

    closures = {
        "closure": lambda: model(x)[:, 0] - y,
        "linearise": lambda: linearise(one, dict(model.named_parameters()), x, y),
    }
    with pytest.raises(CoupledSamplesError, match=r"evaluation mode|GroupNorm"):
        optimizer.step(closures[form])
    assert torch.equal(vector(model), before)


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(8), nn.Dropout(0.1), nn.RReLU()])
def test_in_evaluation_mode_they_are_as_good_as_any(layer):
    x, y = data()
    model = nn.Sequential(nn.Linear(2, 8), layer, nn.Linear(8, 1)).double().eval()
    before = (model(x)[:, 0] - y).square().mean()
    SNG(model.parameters(), lr=0.3).step(lambda: model(x)[:, 0] - y)
    assert (model(x)[:, 0] - y).square().mean() < before


def closures(model, x, y):
    other = network(seed=9)
    return {
        "scalar": (lambda: ((model(x)[:, 0] - y) ** 2).mean(), ValueError, "scalar"),
        "no graph": (lambda: model(x)[:, 0].detach() - y, ValueError, "no graph"),
        "nothing": (lambda: None, TypeError, "NoneType"),
        "three": (lambda: (model(x)[:, 0], y, y), TypeError, "3 values"),
        "shapes": (lambda: (model(x)[:, 0], y[:-1]), ValueError, r"shape \(12,\).* got \(11,\)"),
        "spread": (lambda: model(x)[:, 0] - y[:, None], ValueError, r"shape \(12, 12\).*spread"),
        "empty": (lambda: model(x[:0])[:, 0], ValueError, "empty"),
        "precision": (lambda: (model(x)[:, 0] - y).float(), ValueError, "float32"),
        "nan": (lambda: model(x)[:, 0] * float("nan"), ValueError, "not finite"),
        "strangers": (
            lambda: linearise(lambda p, x: functional_call(other, p, (x,))[0], dict(other.named_parameters()), x),
            ValueError,
            "other tensors",
        ),
    }


@pytest.mark.parametrize("name", list(closures(network(), *data())))
def test_a_closure_that_gives_something_else_is_refused_and_nothing_moves(name):
    model, (x, y) = network(), data()
    closure, error, says = closures(model, x, y)[name]
    optimizer = SPRING(model.parameters(), mu=0.5)
    optimizer.step(lambda: model(x)[:, 0] - y)
    before, state = vector(model), {k: v["direction"].clone() for k, v in optimizer.state.items()}
    with pytest.raises(error, match=says):
        optimizer.step(closure)
    assert torch.equal(vector(model), before)
    assert all(torch.equal(optimizer.state[k]["direction"], v) for k, v in state.items())


def test_gradients_alone_are_not_enough_and_loss_scaling_is_refused():
    model, (x, y) = network(), data()
    optimizer = SNG(model.parameters())
    (model(x)[:, 0] - y).square().mean().backward()
    with pytest.raises(TypeError, match="needs a closure"):
        optimizer.step()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale((model(x)[:, 0] - y).square().mean()).backward()
    with pytest.raises(TypeError, match="scaling is not supported"):
        scaler.step(optimizer)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"lr": -1.0}, "lr must"),
        ({"lr": float("nan")}, "lr must"),
        ({"mu": 1.0}, "mu must"),
        ({"damping": -1e-3}, "damping must"),
        ({"damping": float("inf")}, "damping must"),
        ({"norm_constraint": 0.0}, "norm_constraint must"),
    ],
)
def test_options_out_of_range_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        SPRING(network().parameters(), **options)


def test_options_of_the_one_kernel_must_agree_between_groups():
    model = network()
    first, rest = list(model[0].parameters()), [*model[2].parameters(), *model[4].parameters()]
    with pytest.raises(ValueError, match="damping must be equal"):
        SNG([{"params": first, "damping": 1.0}, {"params": rest}])
    optimizer = SPRING(first, mu=0.5)
    with pytest.raises(ValueError, match="mu must be equal"):
        optimizer.add_param_group({"params": rest, "mu": 0.6})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": rest})
    optimizer.param_groups[1]["damping"] = 5.0
    with pytest.raises(ValueError, match="damping must be equal"):
        optimizer.step(lambda: model(data()[0])[:, 0])


@pytest.mark.parametrize("options", [{"mu": None}, {"damping": None}, {"lr": "a"}, {"norm_constraint": True}])
def test_options_that_are_no_numbers_are_named(options):
    with pytest.raises(TypeError, match=next(iter(options))):
        SPRING(network().parameters(), **options)


def test_numbers_of_numpy_are_numbers():
    import numpy as np

    model, (x, y) = network(), data()
    optimizer = SNG(model.parameters(), lr=np.float32(0.1), norm_constraint=np.int64(1))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: np.float32(0.9) ** epoch)
    for _ in range(3):
        optimizer.step(lambda: model(x)[:, 0] - y)
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.9**3, rel=1e-6)


def test_options_changed_on_the_way_are_checked():
    model, (x, y) = network(), data()
    optimizer = SNG(model.parameters())
    before = vector(model)
    for name, value in (("lr", float("nan")), ("damping", -1.0)):
        kept = optimizer.param_groups[0][name]
        optimizer.param_groups[0][name] = value
        with pytest.raises(ValueError, match=f"{name} must .* got {value}"):
            optimizer.step(lambda: model(x)[:, 0] - y)
        optimizer.param_groups[0][name] = kept
    assert torch.equal(vector(model), before)


def test_the_state_of_something_else_is_refused():
    model, (x, y) = network(), data()
    spring = SPRING(model.parameters(), mu=0.5)
    spring.step(lambda: model(x)[:, 0] - y)
    with pytest.raises(ValueError, match="load it into SPRING"):
        SNG(model.parameters()).load_state_dict(spring.state_dict())
    with pytest.raises(ValueError, match="another kind"):
        spring.load_state_dict(torch.optim.Adam(model.parameters()).state_dict())
    other = SPRING(reversed(list(model.parameters())), lr=0.3, mu=0.5)
    with pytest.raises(ValueError, match="another model"):
        other.load_state_dict(spring.state_dict())
    assert other.param_groups[0]["lr"] == 0.3  # nothing was loaded
    assert not other.state


def test_a_complex_derivative_and_half_precision_are_refused():
    model, (x, _) = network(), data()
    with pytest.raises(TypeError, match="complex"):
        SNG(model.parameters()).step(lambda: (model(x)[:, 0], model(x)[:, 0].detach() * 1j))
    for dtype in (torch.bfloat16, torch.float16):
        with pytest.raises(TypeError, match="float32 or float64"):
            SNG(network(dtype=dtype).parameters())


def test_complex_and_mixed_parameters_are_refused():
    with pytest.raises(TypeError, match="complex"):
        SNG([torch.zeros(2, dtype=torch.complex64, requires_grad=True)])
    model = nn.Sequential(nn.Linear(2, 2).double(), nn.Linear(2, 1))
    with pytest.raises(ValueError, match="one dtype"):
        SNG(model.parameters()).step(lambda: model(data()[0])[:, 0])
