"""Every way to a Jacobian leads to the same one, and the cheap way is taken only where it is exact."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call, hessian
from torch.nn import functional as F

from cameraready.optim.sng import SNG, SPRING, CoupledSamplesError, Linearised, SlowJacobianWarning, linearise
from cameraready.optim.sng.jacobian import DenseJacobian, LayerJacobian, Recorder, gram
from cameraready.optim.sng.jacobian.layers import WeightPart

pytestmark = pytest.mark.torch


def points(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def truth(outputs, params):
    """Row by row, with nothing of ours."""
    rows = []
    for value in outputs.reshape(-1):
        found = torch.autograd.grad(value, params, retain_graph=True, allow_unused=True)
        rows.append(
            torch.cat(
                [
                    torch.zeros_like(p).reshape(-1) if g is None else g.reshape(-1)
                    for g, p in zip(found, params, strict=True)
                ]
            )
        )
    return torch.stack(rows)


class Twice(nn.Module):
    """One layer used twice, and a layer without bias."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 1, bias=False)

    def forward(self, x):
        return self.outer(torch.tanh(self.inner(torch.tanh(self.inner(x)))))


class Sequence(nn.Module):
    """Layers that see several positions a sample, summed in the end."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 5), nn.Linear(5, 1)

    def forward(self, x):
        return self.outer(torch.tanh(self.inner(x))).sum(dim=1)


class Tied(nn.Module):
    """A weight that is used as such and transposed; only one of both is seen as a layer."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return (torch.tanh(self.inner(x)) @ self.inner.weight.T)[:, :1]


class Scaled(nn.Module):
    """A parameter that belongs to no layer."""

    def __init__(self):
        super().__init__()
        self.inner, self.scale = nn.Linear(4, 1), nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.scale * torch.tanh(self.inner(x))


def frozen():
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1))
    model[0].weight.requires_grad_(False)
    return model


MODELS = {
    "plain": (lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)), (7, 4), True),
    "overwriting": (lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 1)), (7, 4), True),
    "several outputs": (lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), (7, 4), True),
    "twice": (Twice, (7, 4), True),
    "sequence": (Sequence, (7, 3, 4), True),
    "frozen": (frozen, (7, 4), True),
    "norm": (
        lambda: nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6, elementwise_affine=False), nn.Linear(6, 1)),
        (7, 4),
        True,
    ),
    "affine norm": (lambda: nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 1)), (7, 4), False),
    "convolution": (lambda: nn.Sequential(nn.Conv1d(3, 2, 2), nn.Flatten(), nn.Linear(6, 1)), (7, 3, 4), False),
    "tied": (Tied, (7, 4), False),
    "scaled": (Scaled, (7, 4), False),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_jacobian_is_exact_and_comes_from_layers_where_it_can(name):
    make, shape, from_layers = MODELS[name]
    torch.manual_seed(0)
    model, x = make().double(), points(*shape)
    params = [p for p in model.parameters() if p.requires_grad]
    known = {}
    for _ in range(2):  # the second time the pattern is known
        recorder = Recorder(params)
        with recorder:
            outputs = model(x)
        found = recorder.jacobian(outputs, known)
        J = truth(outputs, params)
        assert isinstance(found, LayerJacobian if from_layers else DenseJacobian)
        assert found.shape == tuple(J.shape)
        torch.testing.assert_close(found.kernel(), J @ J.T)
        v, z = points(J.shape[1], seed=1), points(J.shape[0], seed=2)
        torch.testing.assert_close(found.push(v), J @ v)
        torch.testing.assert_close(found.pull(z), J.T @ z)


def test_coupled_samples_are_noticed_and_their_true_jacobian_is_taken():
    """Residuals less their mean: row i of a layer's output reaches every residual."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double(), points(7, 4)
    params = list(model.parameters())
    recorder = Recorder(params)
    with recorder:
        outputs = model(x)[:, 0]
        outputs = outputs - outputs.mean()
    found = recorder.jacobian(outputs, {})
    assert isinstance(found, DenseJacobian)
    torch.testing.assert_close(found.matrix, truth(outputs, params))


def test_a_permuted_batch_is_noticed():
    torch.manual_seed(0)
    model, x = nn.Linear(4, 1).double(), points(7, 4)
    recorder = Recorder(list(model.parameters()))
    with recorder:
        outputs = model(x)[:, 0].flip(0)
    found = recorder.jacobian(outputs, {})
    J = truth(outputs, list(model.parameters()))
    torch.testing.assert_close(found.kernel(), J @ J.T)


def test_another_pattern_is_checked_anew():
    """A closure that couples samples only from its second call on."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double(), points(7, 4)
    optimizer = SNG(model.parameters(), lr=0.1)
    optimizer.step(lambda: model(x)[:, 0])
    assert optimizer.last_info["jacobian"] == "LayerJacobian"
    optimizer.step(lambda: torch.cat([model(x[:3])[:, 0], model(x[3:])[:, 0]]))
    assert optimizer.last_info["jacobian"] == "DenseJacobian"
    optimizer.step(lambda: model(x)[:, 0])
    assert optimizer.last_info["jacobian"] == "LayerJacobian"


@pytest.mark.parametrize(("k", "t", "n_in", "n_out"), [(3, 1, 5, 4), (4, 3, 2, 2), (4, 6, 3, 2), (2, 2, 40, 30)])
def test_both_ways_to_a_layers_kernel_agree(k, t, n_in, n_out):
    part = WeightPart(points(k, t, n_in), points(k, t, n_out, seed=1))
    rows = torch.einsum("kto,kti->koi", part.slopes, part.inputs).reshape(k, -1)
    torch.testing.assert_close(part.kernel(), rows @ rows.T)


def test_a_kernel_of_single_precision_rows_is_that_of_double_precision():
    rows = points(6, 3000).float()
    wide = rows.double()
    assert gram(rows).dtype == torch.float64
    torch.testing.assert_close(gram(rows), wide @ wide.T, rtol=1e-13, atol=1e-10)


def poisson(model):
    def u(params, x):
        return functional_call(model, params, (x,))[0]

    return lambda params, x, f: -torch.trace(hessian(u, argnums=1)(params, x)) - f


def test_linearise_agrees_with_a_closure_that_differentiates_its_inputs():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    x, f = points(5, 2).requires_grad_(), points(5, seed=1)
    u = model(x)[:, 0]
    (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    laplacian = sum(torch.autograd.grad(slope[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(2))
    outputs = -laplacian - f
    found = linearise(poisson(model), dict(model.named_parameters()), x.detach(), f)
    torch.testing.assert_close(found.values, outputs.detach())
    torch.testing.assert_close(found.jacobian, truth(outputs, list(model.parameters())))


@pytest.mark.parametrize("chunk_size", [None, 1, 3])
def test_chunks_change_nothing(chunk_size):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    x, f = points(5, 2), points(5, seed=1)
    params = dict(model.named_parameters())
    torch.testing.assert_close(
        linearise(poisson(model), params, x, f, chunk_size=chunk_size).jacobian,
        linearise(poisson(model), params, x, f).jacobian,
    )


def test_all_three_forms_of_a_closure_make_the_same_steps():
    x, y = points(9, 2), points(9, seed=1)

    def after(form):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1)).double()
        optimizer = SPRING(model.parameters(), mu=0.6, damping=1e-2)

        def one(params, x, y):
            return functional_call(model, params, (x,))[0] - y

        def layers():
            return model(x)[:, 0] - y

        def rows():
            return torch.stack([model(x[i])[0] - y[i] for i in range(9)])

        def linearised():
            named = dict(reversed(list(model.named_parameters())))  # columns in another order
            return linearise(one, named, x, y)

        for _ in range(3):
            optimizer.step({"layers": layers, "rows": rows, "linearised": linearised}[form])
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    torch.testing.assert_close(after("rows"), after("layers"), rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(after("linearised"), after("layers"), rtol=1e-9, atol=1e-11)


def test_terms_of_a_loss_are_put_together_with_weights():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    params = dict(model.named_parameters())
    inside, f, edge = points(5, 2), points(5, seed=1), points(3, 2, seed=2)
    interior = linearise(poisson(model), params, inside, f)
    boundary = linearise(lambda p, x: functional_call(model, p, (x,))[0], params, edge)
    both = Linearised.cat([interior, 3.0 * boundary])
    torch.testing.assert_close(both.values[5:], 3 * model(edge)[:, 0].detach())
    torch.testing.assert_close(both.jacobian[:5], interior.jacobian)
    torch.testing.assert_close(both.jacobian[5:], 3 * truth(model(edge)[:, 0], list(model.parameters())))
    SNG(model.parameters(), lr=0.1).step(lambda: both)
    other = linearise(lambda p, x: p["w"] @ x, {"w": torch.ones(2, dtype=torch.float64, requires_grad=True)}, edge)
    with pytest.raises(ValueError, match="different parameters"):
        Linearised.cat([interior, other])
    with pytest.raises(ValueError, match="nothing"):
        Linearised.cat([])


def test_constants_are_not_differentiated():
    torch.manual_seed(0)
    model = frozen().double()
    x = points(5, 4)
    found = linearise(lambda p, x: functional_call(model, p, (x,))[0], dict(model.named_parameters()), x)
    assert found.jacobian.shape == (5, sum(p.numel() for p in model.parameters() if p.requires_grad))
    for p in model.parameters():
        p.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter"):
        linearise(lambda p, x: functional_call(model, p, (x,))[0], dict(model.named_parameters()), x)


def test_a_backward_pass_a_sample_is_told_of():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 300), nn.LayerNorm(300), nn.Linear(300, 100), nn.Linear(100, 1))
    x = points(80, 4).float()
    with pytest.warns(SlowJacobianWarning, match=r"80 backward passes.*linearise"):
        SNG(model.parameters(), lr=0.1).step(lambda: model(x)[:, 0])


def test_bare_functions_are_layers_too():
    weight, bias = points(1, 4).requires_grad_(), points(1, seed=1).requires_grad_()
    x = points(6, 4, seed=2)
    optimizer = SNG([weight, bias], damping=0.0)
    optimizer.step(lambda: F.linear(x, weight, bias=bias)[:, 0] - x.sum(dim=1))
    assert optimizer.last_info["jacobian"] == "LayerJacobian"
    torch.testing.assert_close(weight.detach(), torch.ones(1, 4, dtype=torch.float64))


# --- what one look at the first batch would miss ------------------------------------------------------------------------


def follows(model, x, y, steps=3, **options):
    """Largest difference between the optimizer's parameters and those of a recursion with explicit Jacobians."""
    twin = copy.deepcopy(model)
    optimizer, params = SNG(model.parameters(), lr=0.3, damping=1e-2, **options), list(twin.parameters())
    for _ in range(steps):
        optimizer.step(lambda: model(x).reshape(-1) - y)
        outputs = twin(x).reshape(-1) - y
        J = truth(outputs, params)
        kernel = J @ J.T + len(y) * 1e-2 * torch.eye(len(y), dtype=J.dtype)
        direction = J.T @ torch.linalg.solve(kernel, outputs.detach())
        with torch.no_grad():
            for p, d in zip(params, direction.split([p.numel() for p in params]), strict=True):
                p -= 0.3 * d.view(p.shape)
    return max((a - b).abs().max().item() for a, b in zip(model.parameters(), params, strict=True)), optimizer


def test_parameters_without_gradient_in_the_first_batch_are_trained_later():
    """A head of zeros: at the first step nothing but the head has a gradient that is not zero."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 1)).double()
    nn.init.zeros_(model[3].weight)
    x = points(6, 3)
    gap, optimizer = follows(model, x, x.sum(dim=1).sin())
    assert gap < 1e-10
    assert optimizer.last_info["jacobian"] == "DenseJacobian"
    assert (model[1].weight - 1).abs().max() > 1e-3


def test_a_small_gradient_beside_large_ones_counts_in_single_precision():
    class Offset(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.offset = nn.Linear(2, 1), nn.Parameter(torch.zeros(1))

        def forward(self, x):
            return self.linear(x) + self.offset

    x = points(16, 2) * 1e4
    found = []
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(0)
        model = Offset().to(dtype)
        SNG(model.parameters(), damping=1e-6).step(lambda: model(x.to(dtype))[:, 0] - (x.sum(dim=1) + 5).to(dtype))  # noqa: B023
        found.append(model.offset.item())
    assert found[0] == pytest.approx(found[1], rel=1e-2)


def test_a_parameter_that_joins_later_is_trained():
    torch.manual_seed(0)
    model, x = Scaled().double(), points(7, 4)
    optimizer = SNG(model.inner.parameters(), lr=0.1)
    optimizer.step(lambda: model(x)[:, 0] - 1)
    assert optimizer.last_info["jacobian"] == "LayerJacobian"
    optimizer.add_param_group({"params": [model.scale]})
    optimizer.step(lambda: model(x)[:, 0] - 1)
    assert model.scale.item() != 1.0


def test_a_closure_that_gains_a_term_through_the_weights_is_followed():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double(), points(7, 4)
    optimizer = SNG(model.parameters(), lr=0.1)
    optimizer.step(lambda: model(x)[:, 0])
    optimizer.step(lambda: model(x)[:, 0] + 0.5 * model[0].weight.square().sum())
    assert optimizer.last_info["jacobian"] == "DenseJacobian"


def test_a_coupling_behind_a_factor_of_zero_is_noticed_when_it_opens():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double(), points(7, 4)
    optimizer, gate = SNG(model.parameters(), lr=0.01), torch.zeros((), dtype=torch.float64)

    def closure():
        outputs = model(x)[:, 0]
        return outputs - gate * outputs.mean()

    optimizer.step(closure)
    assert optimizer.last_info["jacobian"] == "LayerJacobian"
    gate.fill_(1.0)
    for _ in range(32):
        optimizer.step(closure)
    assert optimizer.last_info["jacobian"] == "DenseJacobian"


def test_a_weight_made_of_parameters_is_followed_to_them():
    class Product(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.gain = nn.Parameter(torch.ones(1, 4)), nn.Parameter(torch.ones(1))
            self.bias = nn.Parameter(torch.zeros(1))

        def forward(self, x):
            return F.linear(x, self.gain * self.weight, self.bias)

    gap, optimizer = follows(Product().double(), points(6, 4), points(6, seed=1))
    assert gap < 1e-10
    assert optimizer.last_info["jacobian"] == "DenseJacobian"


def test_a_batch_that_is_not_finite_does_not_slow_the_next():
    torch.manual_seed(0)
    model, x = nn.Linear(4, 1).double(), points(7, 4)
    optimizer = SNG(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="not finite"):
        optimizer.step(lambda: model(x)[:, 0] * float("nan"))
    optimizer.step(lambda: model(x)[:, 0])
    assert optimizer.last_info["jacobian"] == "LayerJacobian"


def test_outputs_of_another_model_are_refused():
    model, other = nn.Linear(4, 1).double(), nn.Linear(4, 1).double()
    with pytest.raises(ValueError, match="does not depend on any"):
        SNG(model.parameters()).step(lambda: other(points(7, 4))[:, 0])


def attention():
    layer = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)
    return layer, lambda x: layer(x, x, x)[0].sum(dim=(1, 2))


def recurrent(kind):
    layer = kind(4, 3, 2, dropout=0.5, batch_first=True)
    return layer, lambda x: layer(x)[0].sum(dim=(1, 2))


@pytest.mark.parametrize(
    "make",
    [attention, lambda: recurrent(nn.LSTM), lambda: recurrent(nn.GRU), lambda: recurrent(nn.RNN)],
    ids=["attention", "lstm", "gru", "rnn"],
)
def test_dropout_within_a_layer_is_refused_and_without_it_the_layer_is_not(make):
    torch.manual_seed(0)
    layer, outputs = make()
    layer.double()
    x = points(5, 3, 4)
    optimizer = SNG(layer.parameters(), lr=0.1)
    with pytest.raises(CoupledSamplesError, match="dropout"):
        optimizer.step(lambda: outputs(x))
    layer.eval()
    optimizer.step(lambda: outputs(x))
    assert optimizer.last_info["jacobian"] == "DenseJacobian"


def test_sparse_gradients_are_refused():
    layer = nn.Embedding(5, 1, sparse=True)
    with pytest.raises(TypeError, match="sparse=False"):
        SNG(layer.parameters()).step(lambda: layer(torch.arange(4))[:, 0])


@pytest.mark.parametrize("n", [5, 9])
def test_weights_a_sample_multiply_rows(n):
    w = torch.ones(n, dtype=torch.float64, requires_grad=True)
    x = points(5, n)
    found = linearise(lambda p, x: p["w"] @ x, {"w": w}, x)
    weights = torch.arange(1.0, 6.0, dtype=torch.float64)
    torch.testing.assert_close((found * weights).jacobian, weights[:, None] * x)
    torch.testing.assert_close((found * weights).values, weights * found.values)
    with pytest.raises(ValueError, match="number or a tensor"):
        found * torch.ones(5, 1)


def test_a_function_that_does_not_use_its_parameters_is_told_of():
    model, x = nn.Linear(4, 1).double(), points(5, 4)
    with pytest.warns(UserWarning, match="derivatives are zero"):
        linearise(lambda p, x: model(x)[0].detach() + 0 * p["weight"].sum(), dict(model.named_parameters()), x)
    with pytest.raises(TypeError, match="map names"):
        linearise(lambda p, x: x.sum(), list(model.parameters()), x)


def test_reentrant_checkpoints_are_refused_and_others_are_not():
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    body, head = nn.Sequential(nn.Linear(4, 5), nn.Tanh()).double(), nn.Linear(5, 1).double()
    x = points(6, 4).requires_grad_()
    params = [*body.parameters(), *head.parameters()]
    with pytest.raises(TypeError, match="use_reentrant=False"):
        SNG(params).step(lambda: head(checkpoint(body, x, use_reentrant=True))[:, 0])
    twin_body, twin_head = copy.deepcopy((body, head))
    SNG(params, lr=0.1).step(lambda: head(checkpoint(body, x, use_reentrant=False))[:, 0])
    SNG([*twin_body.parameters(), *twin_head.parameters()], lr=0.1).step(lambda: twin_head(twin_body(x))[:, 0])
    for a, b in zip(
        [*body.parameters(), *head.parameters()], [*twin_body.parameters(), *twin_head.parameters()], strict=True
    ):
        torch.testing.assert_close(a, b)


def test_inference_mode_is_named_as_the_cause():
    model = nn.Linear(4, 1).double()
    optimizer = SNG(model.parameters())
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inference_mode"):
        optimizer.step(lambda: model(points(5, 4))[:, 0])
