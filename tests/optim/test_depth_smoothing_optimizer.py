"""What the wrapper promises beside the step itself: memory, failures, schedules, state, and what it refuses."""

import copy
import warnings

import pytest
import torch
from torch import nn

from cameraready.optim.depth_smoothing import DepthSmoothing
from cameraready.optim.depth_smoothing.stepping import Run, portions
from tests.optim.test_depth_smoothing_step import CLOSE, backward, explicit, problem, values

pytestmark = pytest.mark.torch


def test_only_a_portion_is_held_at_a_time():
    def run(numel, blocks=3):
        return Run([nn.Parameter(torch.empty(numel, device="meta")) for _ in range(blocks)], [{}] * blocks)

    runs = [run(n) for n in (2_000_000, 10, 1_000_000, 900_000, 20, 2_000_000)]
    packed = portions(runs)
    assert sorted(id(r) for portion in packed for r in portion) == sorted(map(id, runs))
    limit = max(r.nbytes for r in runs)
    assert max(sum(r.nbytes for r in portion) for portion in packed) <= limit
    assert len(packed) == 3
    assert len(portions([run(1000) for _ in range(12)])) == 1


def test_small_portions_change_nothing(monkeypatch):
    results = []
    for floor in (1 << 22, 1):
        monkeypatch.setattr(
            "cameraready.optim.depth_smoothing.optimizer.portions", lambda runs, floor=floor: portions(runs, floor)
        )
        model, x, y = problem()
        optimizer = DepthSmoothing(torch.optim.AdamW(model.parameters(), lr=0.01), model.blocks)
        for _ in range(3):
            backward(model, x, y)
            optimizer.step()
        results.append(values(model))
    assert all(torch.equal(results[0][key], results[1][key]) for key in results[0])


def test_a_failing_base_leaves_tensors_and_groups_as_they_were():
    model, x, y = problem()
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = DepthSmoothing(base, model.blocks)
    backward(model, x, y)
    before, groups = values(model), [list(group["params"]) for group in base.param_groups]
    pointers = [p.data_ptr() for p in model.parameters()]

    def broken(*args, **kwargs):
        raise RuntimeError("out of memory")

    base.step = broken
    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(values(model).values(), before.values(), strict=True))
    assert [p.data_ptr() for p in model.parameters()] == pointers
    assert [[id(p) for p in g["params"]] for g in base.param_groups] == [[id(p) for p in g] for g in groups]


def test_strength_may_follow_a_schedule_or_be_set():
    def run(alpha, change=None):
        model, x, y = problem()
        optimizer = DepthSmoothing(torch.optim.SGD(model.parameters(), lr=0.1), model.blocks, alpha=alpha)
        for step in range(3):
            if change is not None:
                optimizer.alpha = change[step]
            backward(model, x, y)
            optimizer.step()
        return values(model)

    strengths = [0.1, 0.0, 0.4]
    a, b = run(lambda step: strengths[step]), run(0.3, strengths)
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert not torch.equal(a["blocks.0.weight"], run(0.1)["blocks.0.weight"])


def test_strength_and_steps_travel_with_the_state():
    model, x, y = problem()
    optimizer = DepthSmoothing(torch.optim.SGD(model.parameters(), lr=0.1), model.blocks, alpha=0.4)
    backward(model, x, y)
    optimizer.step()
    other = DepthSmoothing(torch.optim.SGD(model.parameters(), lr=0.1), model.blocks, alpha=0.1)
    other.load_state_dict(optimizer.state_dict())
    assert (other.alpha, other.steps_taken) == (0.4, 1)
    schedule = DepthSmoothing(torch.optim.SGD(model.parameters(), lr=0.1), model.blocks, alpha=lambda step: 0.1 * step)
    schedule.load_state_dict(optimizer.state_dict())
    assert schedule.steps_taken == 1
    assert callable(schedule.alpha)


def test_a_state_of_the_base_alone_can_be_loaded_and_the_base_can_go_on_from_ours():
    model, x, y = problem()
    plain = torch.optim.AdamW(model.parameters(), lr=0.02)
    backward(model, x, y)
    plain.step()
    optimizer = DepthSmoothing(torch.optim.AdamW(model.parameters(), lr=0.01), model.blocks)
    optimizer.load_state_dict(plain.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.02
    assert optimizer.param_groups is optimizer.base_optimizer.param_groups
    state = optimizer.state_dict()
    del state["depth_smoothing"]
    again = torch.optim.AdamW(model.parameters())
    again.load_state_dict(state)
    assert torch.equal(again.state[model.last.weight]["exp_avg"], plain.state[model.last.weight]["exp_avg"])


def test_a_strength_above_one_half_warns_once_where_signs_can_change():
    model, x, y = problem()
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="above 0.5"):
        DepthSmoothing(base, model.blocks, alpha=0.6)
    optimizer = DepthSmoothing(base, model.blocks, alpha=lambda step: 0.7)
    backward(model, x, y)
    with pytest.warns(UserWarning, match="above 0.5"):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        DepthSmoothing(base, model.blocks, alpha=0.5)
        DepthSmoothing(base, model.blocks, alpha=0.9, kernel="average")


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda m: DepthSmoothing(m, m.blocks), TypeError, "torch optimizer"),
        (lambda m: DepthSmoothing(torch.optim.LBFGS(m.parameters()), m.blocks), ValueError, "LBFGS"),
        (lambda m: DepthSmoothing(torch.optim.SGD(m.parameters()), m.blocks, alpha=-0.1), ValueError, "alpha"),
        (lambda m: DepthSmoothing(torch.optim.SGD(m.parameters()), m.blocks, kernel="gauss"), ValueError, "kernel"),
        (lambda m: DepthSmoothing(torch.optim.SGD(m.parameters()), m.blocks, normalize="l2"), ValueError, "normalize"),
        (lambda m: DepthSmoothing(torch.optim.SGD(m.parameters()), m.blocks, params="linear"), ValueError, "matrices"),
        (lambda m: DepthSmoothing(torch.optim.SGD(m.last.parameters()), m.blocks), ValueError, "none of the blocks"),
        (lambda m: DepthSmoothing(torch.optim.SGD(m.parameters()), [m.first, m.last]), ValueError, "nothing to smooth"),
        (
            lambda m: DepthSmoothing(DepthSmoothing(torch.optim.SGD(m.parameters()), m.blocks), m.blocks),
            ValueError,
            "smoothed already",
        ),
    ],
)
def test_bad_input_is_refused(build, error, message):
    model, _, _ = problem()
    with pytest.raises(error, match=message):
        build(model)


def test_tensor_subclasses_are_refused():
    class Shard(torch.Tensor):
        pass

    blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
    for block in blocks:
        block.weight = nn.Parameter(torch.ones(3, 3).as_subclass(Shard))
    optimizer = DepthSmoothing(torch.optim.SGD(blocks.parameters(), lr=0.1), blocks)
    for p in blocks.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(TypeError, match="Shard"):
        optimizer.step()


def test_hooks_of_the_base_are_refused_and_nothing_is_stepped():
    model, x, y = problem()
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = DepthSmoothing(base, model.blocks)
    handle = base.register_step_post_hook(lambda *args: None)
    backward(model, x, y)
    before = values(model)
    with pytest.raises(ValueError, match="register them on the DepthSmoothing"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(values(model).values(), before.values(), strict=True))
    handle.remove()
    optimizer.step()
    assert not torch.equal(model.last.weight, before["last.weight"])


def test_a_learning_rate_of_zero_in_a_tensor_is_zero_too():
    blocks = nn.ModuleList(nn.Linear(1, 1, bias=False, dtype=torch.float64) for _ in range(3))
    for block in blocks:
        block.weight.data.zero_()
        block.weight.grad = torch.ones_like(block.weight)
    still = {"params": [blocks[1].weight], "lr": torch.tensor(0.0)}
    base = torch.optim.SGD([still, {"params": [blocks[0].weight, blocks[2].weight], "lr": 1.0}])
    DepthSmoothing(base, blocks, normalize="none").step()
    assert [block.weight.item() for block in blocks] == [-1.0, 0.0, -1.0]


class PlainSubclass(torch.optim.AdamW):
    """Says nothing of its own."""


class OwnStep(torch.optim.AdamW):
    """A step of its own, so that nothing may be assumed of it but what its groups say."""

    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize("cls", [PlainSubclass, OwnStep])
def test_subclasses_of_adamw_keep_their_decay_apart(cls):
    model, x, y = problem()
    other = copy.deepcopy(model)
    optimizer = DepthSmoothing(cls(model.parameters(), lr=0.01, weight_decay=0.3), model.blocks, alpha=0.3)
    plain = torch.optim.AdamW(other.parameters(), lr=0.01, weight_decay=0.3)
    for _ in range(2):
        backward(model, x, y)
        optimizer.step()
        backward(other, x, y)
        expected = explicit(other, plain, 0.3, "rescale", lambda base: 0.003)
        other.load_state_dict({**other.state_dict(), **expected})
        for key, value in values(model).items():
            torch.testing.assert_close(value, expected[key], **CLOSE)


def test_a_state_with_a_bad_strength_is_refused_before_anything_is_loaded():
    model, _, _ = problem()
    optimizer = DepthSmoothing(torch.optim.SGD(model.parameters(), lr=0.1), model.blocks)
    state = DepthSmoothing(torch.optim.SGD(model.parameters(), lr=0.5), model.blocks).state_dict()
    state["depth_smoothing"]["alpha"] = 7
    with pytest.raises(ValueError, match="alpha"):
        optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_options_are_checked_when_they_are_changed_and_state_hooks_are_called():
    model, _, _ = problem()
    optimizer = DepthSmoothing(torch.optim.SGD(model.parameters(), lr=0.1), model.blocks)
    for name in ("kernel", "normalize"):
        with pytest.raises(ValueError, match=name):
            setattr(optimizer, name, "bogus")
    calls = []
    optimizer.register_state_dict_pre_hook(lambda opt: calls.append("saving"))
    optimizer.register_state_dict_post_hook(lambda opt, state: calls.append("saved"))
    optimizer.register_load_state_dict_pre_hook(lambda opt, state: calls.append("loading"))
    optimizer.register_load_state_dict_post_hook(lambda opt: calls.append("loaded"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["saving", "saved", "loading", "loaded"]
