"""The smoothed step against the explicit algorithm: step a copy, take differences, mix them, add them to the old values."""

import copy

import pytest
import torch
from torch import nn

from cameraready.optim.depth_smoothing import DepthSmoothing, smooth_updates, smoothing_matrix
from tests.optim.optimizer_cases import Regressor

pytestmark = pytest.mark.torch

CLOSE = {"rtol": 1e-9, "atol": 1e-12}


def problem(dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    x = torch.randn(12, 4, dtype=dtype)
    return Regressor(dtype), x, torch.sin(x.sum(dim=1))


def backward(model, x, y):
    model.zero_grad()
    ((model(x) - y) ** 2).mean().backward()


def values(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def explicit(model, base, alpha, normalize="none", decay=lambda base: 0.0, matrix=None):
    """Parameters after one step of the authors' algorithm on `model` (which is left stepped plainly)."""
    old = values(model)
    share = decay(base)
    base.step()
    new = values(model)
    expected = dict(new)
    n = len(model.blocks)
    matrix = smoothing_matrix(n, alpha) if matrix is None else matrix
    for slot in ("weight", "bias"):
        names = [f"blocks.{k}.{slot}" for k in range(n)]
        deltas = torch.stack([new[name] - old[name] + share * old[name] for name in names])
        own = deltas.flatten(1).norm(dim=1).reshape(-1, *[1] * (deltas.ndim - 1))
        source = deltas / own if normalize == "normalize_before" else deltas
        mixed = torch.einsum("lj,j...->l...", matrix, source)
        if normalize != "none":
            mixed = mixed / mixed.flatten(1).norm(dim=1).reshape(own.shape) * own
        for k, name in enumerate(names):
            expected[name] = (1 - share) * old[name] + mixed[k]
    return expected


BASES = {
    "sgd": (lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, nesterov=True), lambda base: 0.0),
    "sgd-l2": (lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, weight_decay=0.1), lambda base: 0.0),
    "adam-l2": (lambda ps: torch.optim.Adam(ps, lr=0.01, weight_decay=0.1), lambda base: 0.0),
    "adamw": (lambda ps: torch.optim.AdamW(ps, lr=0.01, weight_decay=0.3), lambda base: 0.01 * 0.3),
    "adamw-foreach": (lambda ps: torch.optim.AdamW(ps, lr=0.01, weight_decay=0.3, foreach=True), lambda base: 0.003),
    "adamw-fused": (lambda ps: torch.optim.AdamW(ps, lr=0.01, weight_decay=0.3, fused=True), lambda base: 0.003),
    "adamw-tensor": (
        lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(0.01, dtype=torch.float64), weight_decay=0.3),
        lambda base: 0.003,
    ),
    "adamw-amsgrad": (
        lambda ps: torch.optim.AdamW(ps, lr=0.01, weight_decay=0.3, amsgrad=True, maximize=True),
        lambda base: 0.003,
    ),
    "nadam": (
        lambda ps: torch.optim.NAdam(ps, lr=0.01, weight_decay=0.3, decoupled_weight_decay=True),
        lambda base: 0.003,
    ),
    "radam": (lambda ps: torch.optim.RAdam(ps, lr=0.01, weight_decay=0.3), lambda base: 0.0),
    "rmsprop": (lambda ps: torch.optim.RMSprop(ps, lr=0.01, centered=True, momentum=0.5), lambda base: 0.0),
    "adagrad": (lambda ps: torch.optim.Adagrad(ps, lr=0.01), lambda base: 0.0),
    "adamax": (lambda ps: torch.optim.Adamax(ps, lr=0.01), lambda base: 0.0),
    "asgd": (lambda ps: torch.optim.ASGD(ps, lr=0.01, lambd=0.1), lambda base: 0.0),
    "adafactor": (lambda ps: torch.optim.Adafactor(ps, lr=0.01), lambda base: 0.0),
}


@pytest.mark.parametrize("normalize", ["none", "rescale", "normalize_before"])
@pytest.mark.parametrize("name", BASES)
def test_it_is_the_explicit_algorithm(name, normalize):
    build, decay = BASES[name]
    model, x, y = problem()
    other = copy.deepcopy(model)
    optimizer = DepthSmoothing(build(model.parameters()), model.blocks, alpha=0.3, normalize=normalize)
    plain = build(other.parameters())
    for _ in range(4):
        backward(model, x, y)
        optimizer.step()
        backward(other, x, y)
        expected = explicit(other, plain, 0.3, normalize, decay)
        other.load_state_dict({**other.state_dict(), **expected})
        for key, value in values(model).items():
            torch.testing.assert_close(value, expected[key], **CLOSE)


@pytest.mark.parametrize("kernel", ["laplacian", "ema", "ema-forward", "shuffled", "average"])
def test_every_kernel_is_its_matrix(kernel):
    model, x, y = problem()
    model.blocks.extend(nn.Linear(6, 6, dtype=torch.float64) for _ in range(2))
    other = copy.deepcopy(model)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = DepthSmoothing(base, model.blocks, alpha=0.4, kernel=kernel, normalize="none", seed=2)
    backward(model, x, y)
    optimizer.step()
    backward(other, x, y)
    matrix = smoothing_matrix(5, 0.4, kernel, seed=2)
    expected = explicit(other, torch.optim.SGD(other.parameters(), lr=0.1), 0.4, matrix=matrix)
    for key, value in values(model).items():
        torch.testing.assert_close(value, expected[key], **CLOSE)


def test_muon_with_its_decay_kept_apart():
    """Muon computes in bfloat16, whose result is the same bits when run from zero."""
    model, x, y = problem(torch.float32)
    other = copy.deepcopy(model)

    def build(model):
        return torch.optim.Muon([b.weight for b in model.blocks], lr=0.05, weight_decay=0.3)

    optimizer = DepthSmoothing(build(model), model.blocks, alpha=0.3)
    plain = build(other)
    for _ in range(3):
        backward(model, x, y)
        optimizer.step()
        backward(other, x, y)
        old = [b.weight.detach().clone() for b in other.blocks]
        plain.step()
        deltas = [[b.weight.detach() - (1 - 0.015) * o] for b, o in zip(other.blocks, old, strict=True)]
        for block, o, (mixed,) in zip(other.blocks, old, smooth_updates(deltas, 0.3, normalize="rescale"), strict=True):
            block.weight.data.copy_((1 - 0.015) * o + mixed)
        for a, b in zip(model.blocks, other.blocks, strict=True):
            torch.testing.assert_close(a.weight, b.weight, rtol=1e-5, atol=1e-6)
    assert torch.equal(model.first.weight, other.first.weight)


def test_smoothing_sgd_is_sgd_on_smoothed_gradients():
    model, x, y = problem()
    other = copy.deepcopy(model)
    optimizer = DepthSmoothing(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), model.blocks, alpha=0.4, normalize="none"
    )
    plain = torch.optim.SGD(other.parameters(), lr=0.05, momentum=0.9)
    for _ in range(5):
        backward(model, x, y)
        optimizer.step()
        backward(other, x, y)
        for slot in ("weight", "bias"):
            grads = [[getattr(block, slot).grad] for block in other.blocks]
            for block, (mixed,) in zip(other.blocks, smooth_updates(grads, 0.4), strict=True):
                getattr(block, slot).grad = mixed
        plain.step()
    for a, b in zip(values(model).values(), values(other).values(), strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


@pytest.mark.parametrize("name", [*BASES])
def test_strength_zero_is_the_base_bit_for_bit(name):
    model, x, y = problem(torch.float32 if name != "adamw-tensor" else torch.float64)
    other = copy.deepcopy(model)
    optimizer = DepthSmoothing(BASES[name][0](model.parameters()), model.blocks, alpha=0.0)
    plain = BASES[name][0](other.parameters())
    for _ in range(3):
        for m, o in ((model, optimizer), (other, plain)):
            backward(m, x.to(m.last.weight), y.to(m.last.weight))
            o.step()
    assert all(torch.equal(a, b) for a, b in zip(values(model).values(), values(other).values(), strict=True))


def test_what_is_not_in_a_block_gets_the_plain_step_bit_for_bit_and_states_agree():
    model, x, y = problem(torch.float32)
    other = copy.deepcopy(model)
    optimizer = DepthSmoothing(torch.optim.AdamW(model.parameters(), lr=0.01), model.blocks, alpha=0.3)
    plain = torch.optim.AdamW(other.parameters(), lr=0.01)
    for m, o in ((model, optimizer), (other, plain)):
        backward(m, x, y)
        o.step()
    assert torch.equal(model.first.weight, other.first.weight)
    assert torch.equal(model.last.bias, other.last.bias)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        for key, value in plain.state.get(b, {}).items():
            assert torch.equal(optimizer.state[a][key], value)
    assert not torch.equal(model.blocks[0].weight, other.blocks[0].weight)


def test_a_group_without_updates_still_decays_by_itself():
    """With a zero gradient AdamW only shrinks tensors, each by its own value: nothing of it may cross blocks."""
    model, _x, _y = problem()
    before = values(model)
    optimizer = DepthSmoothing(torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5), model.blocks, alpha=0.5)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), before[name] * 0.95, **CLOSE)


def test_coupling_the_decay_mixes_it_with_the_update():
    model, _x, _y = problem()
    before = values(model)
    optimizer = DepthSmoothing(
        torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5),
        model.blocks,
        alpha=0.5,
        normalize="none",
        decouple_weight_decay=False,
    )
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    old = torch.stack([before[f"blocks.{k}.weight"] for k in range(3)])
    expected = old - 0.05 * torch.einsum("lj,jab->lab", smoothing_matrix(3, 0.5), old)
    torch.testing.assert_close(torch.stack([b.weight.detach() for b in model.blocks]), expected, **CLOSE)


@pytest.mark.parametrize("how", ["frozen", "no gradient", "not in the optimizer", "learning rate zero"])
def test_an_absent_block_is_no_neighbour(how):
    model, x, y = problem()
    other = copy.deepcopy(model)
    if how == "frozen":
        model.blocks[2].requires_grad_(False)
    names = [name for name, _ in model.named_parameters() if not name.startswith("blocks.2")]
    named = dict(model.named_parameters())
    groups = [{"params": [named[name] for name in names]}]
    if how != "not in the optimizer":
        groups.append({"params": list(model.blocks[2].parameters()), "lr": 0.0 if "rate" in how else 0.1})
    optimizer = DepthSmoothing(torch.optim.SGD(groups, lr=0.1), model.blocks, alpha=0.3, normalize="none")
    backward(model, x, y)
    if how == "no gradient":
        for p in model.blocks[2].parameters():
            p.grad = None
    optimizer.step()
    backward(other, x, y)
    for slot in ("weight", "bias"):
        a, b, c = (getattr(block, slot) for block in other.blocks)
        expected = (a - 0.1 * (0.85 * a.grad + 0.15 * b.grad), b - 0.1 * (0.85 * b.grad + 0.15 * a.grad), c)
        for block, value in zip(model.blocks, expected, strict=True):
            torch.testing.assert_close(getattr(block, slot).detach(), value.detach(), **CLOSE)


def test_a_block_between_absent_ones_gets_the_whole_of_its_own_update():
    model, x, y = problem()
    other = copy.deepcopy(model)
    model.blocks[1].requires_grad_(False)
    optimizer = DepthSmoothing(torch.optim.SGD(model.parameters(), lr=0.1), model.blocks, alpha=0.5, normalize="none")
    plain = torch.optim.SGD(other.parameters(), lr=0.1)
    for m, o in ((model, optimizer), (other, plain)):
        backward(m, x, y)
        o.step()
    assert torch.equal(model.blocks[0].weight, other.blocks[0].weight)
    assert torch.equal(model.blocks[2].bias, other.blocks[2].bias)


def test_a_tied_tensor_is_smoothed_once():
    model, x, y = problem()
    model.blocks[2].weight = model.blocks[0].weight
    other = copy.deepcopy(model)
    optimizer = DepthSmoothing(torch.optim.SGD(model.parameters(), lr=0.1), model.blocks, alpha=0.4, normalize="none")
    backward(model, x, y)
    optimizer.step()
    backward(other, x, y)
    a, b = other.blocks[0].weight, other.blocks[1].weight
    torch.testing.assert_close(
        model.blocks[0].weight.detach(), (a - 0.1 * (0.8 * a.grad + 0.2 * b.grad)).detach(), **CLOSE
    )
    torch.testing.assert_close(
        model.blocks[1].weight.detach(), (b - 0.1 * (0.8 * b.grad + 0.2 * a.grad)).detach(), **CLOSE
    )
    assert model.blocks[2].weight is model.blocks[0].weight


def test_the_order_of_parameters_and_groups_does_not_matter():
    results = []
    for reverse in (False, True):
        model, x, y = problem()
        named = sorted(model.parameters(), key=lambda p: p.numel(), reverse=reverse)
        groups = [{"params": named[::2]}, {"params": named[1::2]}]
        optimizer = DepthSmoothing(torch.optim.AdamW(groups, lr=0.01), model.blocks, alpha=0.3)
        for _ in range(3):
            backward(model, x, y)
            optimizer.step()
        results.append(values(model))
    assert all(torch.equal(results[0][key], results[1][key]) for key in results[0])


def test_layers_may_have_learning_rates_of_their_own():
    model, x, y = problem()
    other = copy.deepcopy(model)
    groups = [{"params": list(block.parameters()), "lr": 0.1 * (k + 1)} for k, block in enumerate(model.blocks)]
    optimizer = DepthSmoothing(torch.optim.SGD(groups, lr=1.0), model.blocks, alpha=0.4, normalize="none")
    backward(model, x, y)
    optimizer.step()
    backward(other, x, y)
    a, b, c = (block.weight for block in other.blocks)
    expected = b - (0.6 * 0.2 * b.grad + 0.2 * (0.1 * a.grad + 0.3 * c.grad))
    torch.testing.assert_close(model.blocks[1].weight.detach(), expected.detach(), **CLOSE)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "transposed"])
def test_layouts_are_kept_and_do_not_change_the_result(layout):
    def build(seed=0):
        torch.manual_seed(seed)
        model = nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3)))
        if layout == "channels_last":
            model = model.to(memory_format=torch.channels_last)
        if layout == "transposed":
            for conv in model:
                conv.weight = nn.Parameter(conv.weight.detach().transpose(0, 1).contiguous().transpose(0, 1))
        return model

    model, reference = build(), nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3)))
    reference.load_state_dict(model.state_dict())
    x = torch.randn(2, 4, 5, 5)
    for m in (model, reference):
        optimizer = DepthSmoothing(torch.optim.AdamW(m.parameters(), lr=0.01), list(m), alpha=0.3)
        strides, pointers = m[1].weight.stride(), m[1].weight.data_ptr()
        for _ in range(2):
            m.zero_grad()
            m(x).pow(2).mean().backward()
            optimizer.step()
        assert m[1].weight.stride() == strides
        assert m[1].weight.data_ptr() == pointers
    torch.testing.assert_close(model[1].weight, reference[1].weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_loses_no_more_than_one_rounding(dtype):
    """The update of the neighbour arrives although it is smaller than what the tensor's own rounding would show."""
    blocks = nn.ModuleList(nn.Linear(8, 8, bias=False, dtype=dtype) for _ in range(2))
    torch.manual_seed(0)
    for block in blocks:
        nn.init.uniform_(block.weight, 1.0, 1.9)
        block.weight.grad = torch.randn(8, 8).to(dtype)
    old = [block.weight.detach().float() for block in blocks]
    grads = [block.weight.grad.float() for block in blocks]
    optimizer = DepthSmoothing(torch.optim.SGD(blocks.parameters(), lr=2.0**-8), blocks, alpha=0.5, normalize="none")
    optimizer.step()
    for k, block in enumerate(blocks):
        expected = old[k] - 2.0**-8 * (0.75 * grads[k] + 0.25 * grads[1 - k])
        assert block.weight.dtype == dtype
        assert torch.equal(block.weight.detach(), expected.to(dtype))


def test_half_precision_is_refused_where_the_update_would_be_a_difference_of_rounded_numbers():
    for build in (
        lambda ps: torch.optim.SGD(ps, lr=0.1, weight_decay=0.1),
        lambda ps: torch.optim.Adamax(ps, lr=0.1),
    ):
        blocks = nn.ModuleList(nn.Linear(4, 4, dtype=torch.bfloat16) for _ in range(2))
        optimizer = DepthSmoothing(build(blocks.parameters()), blocks)
        for p in blocks.parameters():
            p.grad = torch.ones_like(p)
        before = blocks[0].weight.detach().clone()
        with pytest.raises(ValueError, match="keep the parameters in float32"):
            optimizer.step()
        assert torch.equal(blocks[0].weight, before)
