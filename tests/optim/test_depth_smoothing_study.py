"""The study's own measurements against closed forms, and the user's model as a workload."""

import collections
import importlib.resources
import types

import polars as pl
import pytest
import torch
from torch import nn

from cameraready.evidence import SpecError
from cameraready.evidence.checking import check
from cameraready.optim.depth_smoothing.training import (
    AT_THE_RATE_OF_BASE,
    COMPARED,
    TUNED,
    Updates,
    arms,
    moved,
    rate_of,
    residual_cosine,
    train,
)
from cameraready.optim.depth_smoothing.workloads import SHIPPED, documentation, own_task

pytestmark = pytest.mark.torch


class Adds(nn.Module):
    """A block that adds a constant vector."""

    def __init__(self, vector):
        super().__init__()
        self.layer = nn.Linear(len(vector), len(vector))
        nn.init.zeros_(self.layer.weight)
        self.layer.bias.data = torch.tensor(vector)

    def forward(self, x):
        return x + self.layer(x)


def mine(vectors=((1.0, 0.0), (1.0, 0.0), (0.0, 2.0)), **extra):
    """A user's object: blocks that add known vectors; the loss pulls their sum to one."""
    x = torch.zeros(4, 2)
    return types.SimpleNamespace(
        model=lambda seed: nn.Sequential(*(Adds(list(vector)) for vector in vectors)),
        batches=lambda seed: [x, x],
        loss=lambda model, batch: (model(batch) - 1).pow(2).mean(),
        validation=[x],
        **extra,
    )


def test_the_cosine_is_that_of_what_successive_blocks_add():
    task = own_task("mine", mine())
    model = task.model(0)
    assert residual_cosine(task, model, task.validation[0]) == pytest.approx((1 + 0) / 2)


def test_lengths_are_one_for_uncorrelated_updates_and_above_one_for_equal_ones():
    task = own_task("mine", mine(vectors=((0.0,) * 40,) * 6))
    for same, expected in ((False, 1.0), (True, None)):
        model = task.model(0)
        watched = Updates(task, model)
        generator = torch.Generator().manual_seed(0)
        shared = torch.randn(40, 40, generator=generator)
        for block in model:
            block.layer.weight.data += shared if same else torch.randn(40, 40, generator=generator)
        if (
            expected is None
        ):  # equal updates keep their length; uncorrelated ones would have that of a row of the matrix
            inside, end = (0.8**2 + 2 * 0.1**2) ** -0.5, (0.9**2 + 0.1**2) ** -0.5
            assert watched.length() == pytest.approx((inside**4 * end**2) ** (1 / 6), rel=1e-5)
        else:
            assert watched.length() == pytest.approx(1.0, abs=0.01)


def test_a_run_is_repeatable_leaves_global_randomness_alone_and_arms_differ_only_as_they_say():
    task = own_task("mine", mine(steps=5, learning_rate=0.1))
    every = arms(task)
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = train(task, every["smooth"], 0.1, 3)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert first == train(task, every["smooth"], 0.1, 3)
    assert train(task, every["base"], 0.1, 3)["loss"] != first["loss"]


def test_the_cut_rates_are_those_of_the_blocks_alone_and_the_decay_stays():
    task = SHIPPED["text-adamw"]()
    model = task.model(0)
    (base,) = task.optimizers(model, 0.01)
    cut = arms(task)["lr-cut"](base, model)
    group_of = {id(p): group for group in cut.param_groups for p in group["params"]}
    assert len(group_of) == len(list(model.parameters()))
    inside, end = (0.8**2 + 2 * 0.1**2) ** 0.5, (0.9**2 + 0.1**2) ** 0.5
    for name, p in model.named_parameters():
        factor = 1.0 if "blocks" not in name else end if name.startswith(("blocks.0.", "blocks.5.")) else inside
        assert group_of[id(p)]["lr"] == pytest.approx(0.01 * factor)
        assert group_of[id(p)]["lr"] * group_of[id(p)]["weight_decay"] == pytest.approx(0.01 * 0.1)


def test_a_base_without_blocks_is_left_as_it_is():
    def optimizers(model, rate):
        return [torch.optim.SGD(model[:2].parameters(), lr=rate), torch.optim.AdamW(model[2:].parameters(), lr=rate)]

    given = mine(vectors=((0.0,) * 4,) * 2, steps=1, optimizers=optimizers, blocks=lambda model: list(model[:2]))
    plain = given.model
    given.model = lambda seed: nn.Sequential(*plain(seed), nn.Linear(4, 1))
    given.batches = lambda seed: [torch.ones(3, 4)]
    given.validation = [torch.ones(3, 4)]
    row = train(own_task("mine", given), arms(own_task("mine", given))["smooth"], 0.1, 0)
    assert row["loss"] >= 0


def test_blocks_called_by_keyword_and_blocks_that_change_shape():
    class Keyword(Adds):
        def forward(self, *, x):
            return super().forward(x)

    class Calls(nn.Module):
        def __init__(self, blocks):
            super().__init__()
            self.blocks = nn.ModuleList(blocks)

        def forward(self, x):
            for block in self.blocks:
                x = block(x=x)
            return x

    given = mine()
    given.model = lambda seed: Calls([Keyword([1.0, 0.0]), Keyword([1.0, 0.0])])
    task = own_task("mine", given)
    assert residual_cosine(task, task.model(0), task.validation[0]) == pytest.approx(1.0)

    class Tuple(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x):
            return (torch.cat([x, x]),)

    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Tuple(), Tuple()])

        def forward(self, x):
            for block in self.blocks:
                (x,) = block(x)
            return x

    given.model = lambda seed: Stack()
    task = own_task("mine", given)
    assert residual_cosine(task, task.model(0), task.validation[0]) is None


def test_batches_of_any_nesting_move():
    Pair = collections.namedtuple("Pair", "x y")
    batch = moved({"pair": Pair(torch.ones(1), [torch.zeros(1), "text"])}, "meta")
    assert type(batch["pair"]).__name__ == "Pair"
    assert batch["pair"].x.device.type == "meta"
    assert batch["pair"].y[1] == "text"


@pytest.mark.parametrize("extra", [{"steps": 0}, {"learning_rate": 0.0}])
def test_nothing_to_train_is_refused(extra):
    with pytest.raises(SpecError, match="positive"):
        own_task("mine", mine(**extra))


def test_batches_begin_again_when_they_end_and_none_at_all_is_an_error():
    task = own_task("mine", mine())
    stream = iter(task.batches(0))
    assert len([next(stream) for _ in range(5)]) == 5
    given = mine()
    given.batches = lambda seed: []
    with pytest.raises(ValueError, match="no batch"):
        next(iter(own_task("mine", given).batches(0)))


def test_what_an_object_lacks_is_named():
    with pytest.raises(SpecError, match="loss, validation"):
        own_task("mine", types.SimpleNamespace(model=None, batches=None))


def test_rates_are_tuned_alike_for_every_arm_of_a_users_task():
    task = own_task("mine", mine(steps=3, learning_rate=0.3))
    found = {}
    every = arms(task)
    for name in ("base", "smooth", "lr-cut"):
        assert rate_of(task, name, every[name], found) in task.rates
    assert set(found) == {("mine", "base"), ("mine", "smooth")}
    losses = {rate: train(task, every["smooth"], rate, 1_000)["loss"] for rate in task.rates}
    assert losses[found["mine", "smooth"]] == min(losses.values())


def test_a_run_on_a_users_task_has_no_failed_trial(tmp_path, monkeypatch):
    monkeypatch.setenv("CAMERAREADY_HOME", str(tmp_path))
    found = check("gradient-smoothing", on=mine(steps=3, learning_rate=0.3), tier="smoke", quiet=True)
    assert found.failures == []
    assert set(found.rows["optimizer"]) == set(COMPARED["own"])


def test_every_tuned_arm_has_a_rate_of_its_tasks_grid():
    for name, rates in TUNED.items():
        assert set(rates) == set(COMPARED[name]) - set(AT_THE_RATE_OF_BASE)
        assert set(rates.values()) <= set(SHIPPED[name]().rates)


def test_the_text_is_pythons_documentation_and_validation_is_held_out():
    codes = documentation()
    text = bytes(codes.tolist()).decode()
    assert "assignment statements" in text
    assert codes.max() < 128
    task = SHIPPED["text-adamw"]()
    held_out = bytes(torch.cat([row.flatten() for row in task.validation]).tolist()).decode()
    assert text[len(text) * 9 // 10 :].startswith(held_out)


def test_a_shipped_row_comes_out_again():
    rows = pl.read_parquet(importlib.resources.files("cameraready.optim.depth_smoothing") / "results.parquet")
    task = SHIPPED["digits-mlp"]()
    for name in ("base", "smooth"):
        here = (pl.col("workload") == task.name) & (pl.col("optimizer") == name) & (pl.col("run") == 0)
        (shipped,) = rows.filter(here).get_column("loss").to_list()
        again = train(task, arms(task)[name], TUNED[task.name][name], 0)["loss"]
        assert again == pytest.approx(shipped, rel=0.05)  # rounding differs between machines, and training amplifies it
