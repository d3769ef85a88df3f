"""Derivatives of each sample, against one backward pass a sample; refusals of what has none."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

from cameraready.optim._per_sample import (
    chunk_size_for,
    flatten,
    jacobian_of_graph,
    per_sample_gradients,
    per_sample_values_and_gradients,
    refuse_coupled_samples,
    unflatten,
)

pytestmark = pytest.mark.torch


def problem():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.GroupNorm(2, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(7, 3, generator=generator, dtype=torch.float64)
    y = torch.randn(7, generator=generator, dtype=torch.float64)

    def loss(params, x, y):
        return (functional_call(model, params, (x[None],))[0, 0] - y) ** 2

    return model, loss, x, y


def one_by_one(model, x, y):
    rows = []
    for i in range(len(x)):
        loss = ((model(x[i : i + 1])[:, 0] - y[i]) ** 2).sum()
        rows.append(flatten(torch.autograd.grad(loss, list(model.parameters()))))
    return torch.stack(rows)


@pytest.mark.parametrize("chunk_size", [None, 1, 2, 7, 100])
def test_gradients_are_those_of_one_sample_at_a_time(chunk_size):
    model, loss, x, y = problem()
    params = dict(model.named_parameters())
    found = per_sample_gradients(loss, params, x, y, chunk_size=chunk_size)
    assert {name: tuple(g.shape) for name, g in found.items()} == {n: (7, *p.shape) for n, p in params.items()}
    assert not any(g.requires_grad for g in found.values())
    expected = one_by_one(model, x, y)
    torch.testing.assert_close(torch.cat([found[n].reshape(7, -1) for n in params], dim=1), expected)
    values, _ = per_sample_values_and_gradients(loss, params, x, y, chunk_size=chunk_size)
    torch.testing.assert_close(values, (model(x)[:, 0] - y).detach() ** 2)


def test_the_mean_of_the_rows_is_the_gradient_of_the_mean():
    model, loss, x, y = problem()
    rows = per_sample_gradients(loss, dict(model.named_parameters()), x, y)
    ((model(x)[:, 0] - y) ** 2).mean().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(rows[name].mean(dim=0), p.grad)


@pytest.mark.parametrize("chunk_size", [None, 1, 3])
def test_the_jacobian_of_a_graph_has_zeros_where_nothing_depends(chunk_size):
    model, _, x, y = problem()
    unused = torch.ones(2, dtype=torch.float64, requires_grad=True)
    outputs = (model(x)[:, 0] - y) ** 2
    found = jacobian_of_graph(outputs, [unused, *model.parameters()], chunk_size=chunk_size)
    torch.testing.assert_close(found[:, 2:], one_by_one(model, x, y))
    assert not found[:, :2].any()
    assert not found.requires_grad
    outputs.sum().backward()  # the graph is kept


def test_dtype_is_kept():
    model, loss, x, y = problem()
    model.float()
    rows = per_sample_gradients(loss, dict(model.named_parameters()), x.float(), y.float())
    assert {g.dtype for g in rows.values()} == {torch.float32}


def test_flatten_and_unflatten_are_inverse():
    tensors = [torch.arange(6.0).view(2, 3), torch.tensor(7.0), torch.arange(2.0)]
    back = unflatten(flatten(tensors), tensors)
    assert all(torch.equal(a, b) for a, b in zip(back, tensors, strict=True))
    with pytest.raises(ValueError, match="9 entries"):
        unflatten(torch.zeros(8), tensors)


def test_chunks_keep_within_their_bytes():
    assert chunk_size_for(1_000, torch.float64, 80_000) == 10
    assert chunk_size_for(1_000, torch.float32, 80_000) == 20
    assert chunk_size_for(10**12, torch.float64) == 1


def test_what_has_no_rows_is_refused():
    _, loss, x, y = problem()
    params = {"w": torch.ones(3, dtype=torch.float64)}
    for batch, says in (((), "at least one"), ((x[:0], y[:0]), "empty"), ((x, y[:3]), "share"), ((x, y[0]), "share")):
        with pytest.raises(ValueError, match=says):
            per_sample_gradients(loss, params, *batch)
    with pytest.raises(ValueError, match="no parameters"):
        per_sample_gradients(loss, {}, x, y)
    with pytest.raises(ValueError, match="vector"):
        jacobian_of_graph(torch.ones(2, 2, requires_grad=True) * 2, [])
    with pytest.raises(ValueError, match="no graph"):
        jacobian_of_graph(torch.ones(2), [])


def test_random_numbers_within_a_sample_are_refused():
    with pytest.raises(RuntimeError, match="random"):
        per_sample_gradients(lambda p, x: (p["w"] * torch.rand_like(x)).sum(), {"w": torch.ones(3)}, torch.ones(4, 3))


@pytest.mark.parametrize(
    ("layer", "refused"),
    [
        (nn.BatchNorm1d(3), True),
        (nn.SyncBatchNorm(3), True),
        (nn.BatchNorm2d(3, track_running_stats=False).eval(), True),
        (nn.Dropout(0.1), True),
        (nn.RReLU(), True),
        (nn.BatchNorm1d(3).eval(), False),
        (nn.Dropout(0.1).eval(), False),
        (nn.Dropout(0.0), False),
        (nn.GroupNorm(1, 3), False),
        (nn.LayerNorm(3), False),
        (nn.InstanceNorm1d(3), False),
    ],
)
def test_modules_that_couple_samples_or_draw_are_refused(layer, refused):
    model = nn.Sequential(nn.Linear(3, 3), layer)
    model.training = layer.training
    if refused:
        with pytest.raises(ValueError, match=r"^1 "):
            refuse_coupled_samples(model)
    else:
        refuse_coupled_samples(model)


def test_a_backward_that_cannot_be_batched_goes_row_by_row():
    class Clipped(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * (2.0 if g.abs().max().item() > 0 else 0.0)

    weight = torch.randn(3, dtype=torch.float64, requires_grad=True)
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(jacobian_of_graph(Clipped.apply(x @ weight), [weight]), 2 * x)
