"""What every card of kind "optimizer" keeps to: the conventions of `torch.optim.Optimizer`."""

import copy
import dataclasses
import importlib
import io

import pytest
import torch

from cameraready.catalog import catalog
from tests.optim.optimizer_cases import Regressor

pytestmark = pytest.mark.torch

CASES = [
    pytest.param(case, id=f"{card.slug}-{case.name}")
    for card in catalog()
    if card.kind == "optimizer"
    for case in importlib.import_module(f"tests.{card.room}.{card.module.rsplit('.', 1)[1]}_cases").CASES
]
every_optimizer = pytest.mark.parametrize("case", CASES)


def problem(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    x = torch.randn(12, 4, generator=generator, dtype=dtype)
    return Regressor(dtype), x, torch.sin(x.sum(dim=1))


def steps(case, model, optimizer, x, y, number, scheduler=None):
    found = []
    for _ in range(number):
        found.append(optimizer.step(case.closure(model, optimizer, x, y)))
        if scheduler is not None:
            scheduler.step()
    return found


def parameters(model):
    return [p.detach().clone() for p in model.parameters()]


def tensors_of(returned):
    """What a closure returned, a tensor, a tuple of them or a dataclass with them, as a list of tensors without a graph."""
    if dataclasses.is_dataclass(returned):
        returned = tuple(getattr(returned, field.name) for field in dataclasses.fields(returned))
    if isinstance(returned, tuple):
        return [tensor for part in returned for tensor in tensors_of(part)]
    return [returned.detach()]


def same(left, right, **tolerance):
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b, **tolerance)


@every_optimizer
def test_it_is_a_torch_optimizer_that_lowers_the_loss(case):
    model, x, y = problem()
    optimizer = case.build(model, model.parameters())
    assert isinstance(optimizer, torch.optim.Optimizer)
    before = ((model(x) - y) ** 2).mean().item()
    steps(case, model, optimizer, x, y, 5)
    assert ((model(x) - y) ** 2).mean().item() < before
    assert all(p.requires_grad and p.grad_fn is None for p in model.parameters())


@every_optimizer
def test_a_group_with_learning_rate_zero_stays_where_it_is(case):
    model, x, y = problem()
    groups = [{"params": list(model.last.parameters()), "lr": 0.0}]
    groups += [{"params": [p for name, p in model.named_parameters() if not name.startswith("last")]}]
    optimizer = case.build(model, groups)
    before, moved = model.last.weight.detach().clone(), model.first.weight.detach().clone()
    steps(case, model, optimizer, x, y, 3)
    assert torch.equal(model.last.weight, before)
    assert not torch.equal(model.first.weight, moved)


@every_optimizer
def test_a_run_goes_on_from_its_state_as_if_it_had_not_stopped(case):
    model, x, y = problem()
    optimizer = case.build(model, model.parameters())
    steps(case, model, optimizer, x, y, 3)
    stored = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, stored)
    steps(case, model, optimizer, x, y, 3)

    stored.seek(0)
    loaded = torch.load(stored, weights_only=True)
    again, _, _ = problem()
    again.load_state_dict(loaded["model"])
    resumed = case.build(again, again.parameters())
    resumed.load_state_dict(loaded["optimizer"])
    steps(case, again, resumed, x, y, 3)
    same(parameters(again), parameters(model), rtol=0, atol=0)


@every_optimizer
def test_step_returns_what_the_closure_returned(case):
    model, x, y = problem()
    optimizer = case.build(model, model.parameters())
    told = []
    inner = case.closure(model, optimizer, x, y)

    def closure():
        told.append(inner())
        return told[-1]

    returned = optimizer.step(closure)
    expected = told[0]
    assert type(returned) is type(expected)
    same(tensors_of(returned), tensors_of(expected), rtol=0, atol=0)


@every_optimizer
def test_schedulers_act_as_a_learning_rate_set_by_hand(case):
    model, x, y = problem()
    optimizer = case.build(model, model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    steps(case, model, optimizer, x, y, 3, scheduler)

    by_hand, _, _ = problem()
    plain = case.build(by_hand, by_hand.parameters())
    for _ in range(3):
        steps(case, by_hand, plain, x, y, 1)
        for group in plain.param_groups:
            group["lr"] = group["lr"] * 0.5
    same(parameters(model), parameters(by_hand), rtol=0, atol=0)


@every_optimizer
def test_accelerate_prepares_it(case):
    accelerate = pytest.importorskip("accelerate")
    model, x, y = problem()
    optimizer = case.build(model, model.parameters())
    steps(case, model, optimizer, x, y, 3)

    other, _, _ = problem()
    inner = case.build(other, other.parameters())
    prepared, wrapped = accelerate.Accelerator(cpu=True).prepare(other, inner)
    for _ in range(3):
        wrapped.step(case.closure(prepared, wrapped, x, y))
    same(parameters(other), parameters(model), rtol=1e-12, atol=1e-12)


@every_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_is_kept(case, dtype):
    model, x, y = problem(dtype)
    optimizer = case.build(model, model.parameters())
    steps(case, model, optimizer, x, y, 2)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert all(torch.isfinite(p).all() for p in model.parameters())


@every_optimizer
def test_a_parameter_without_a_gradient_is_left_alone(case):
    model, x, y = problem()
    optimizer = case.build(model, model.parameters())
    steps(case, model, optimizer, x, y, 2)
    assert torch.equal(model.unused, torch.ones(2, dtype=torch.float64))


@every_optimizer
def test_frozen_parameters_are_left_alone(case):
    model, x, y = problem()
    model.blocks[1].requires_grad_(False)
    before = model.blocks[1].weight.clone()
    optimizer = case.build(model, model.parameters())
    steps(case, model, optimizer, x, y, 2)
    assert torch.equal(model.blocks[1].weight, before)


@every_optimizer
def test_a_group_can_be_added_in_mid_run(case):
    model, x, y = problem()
    optimizer = case.build(model, [p for name, p in model.named_parameters() if not name.startswith("last")])
    steps(case, model, optimizer, x, y, 2)
    before = model.last.weight.detach().clone()
    optimizer.add_param_group({"params": list(model.last.parameters())})
    steps(case, model, optimizer, x, y, 2)
    assert not torch.equal(model.last.weight, before)


@every_optimizer
def test_a_copy_goes_its_own_way(case):
    model, x, y = problem()
    optimizer = case.build(model, model.parameters())
    steps(case, model, optimizer, x, y, 2)
    before = parameters(model)
    other, twin = copy.deepcopy((model, optimizer))
    steps(case, other, twin, x, y, 2)
    same(parameters(model), before, rtol=0, atol=0)
    steps(case, model, optimizer, x, y, 2)
    same(parameters(model), parameters(other), rtol=0, atol=0)


@every_optimizer
def test_nothing_to_optimise_is_refused(case):
    model, _, _ = problem()
    with pytest.raises(ValueError, match="empty"):
        case.build(model, [])
