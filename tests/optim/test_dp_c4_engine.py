"""From a loader and a budget to a private run: sampling, batches, refusals, resuming, and the same run as Opacus makes it."""

import copy
import math

import pytest
import torch
from opacus import GradSampleModule, PrivacyEngine
from torch import nn
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from cameraready.optim.dp_c4 import (
    BudgetSpentError,
    ConstantThreshold,
    GeometricThreshold,
    MovementThreshold,
    PrivateTraining,
    ThresholdSumWarning,
    epsilon_from_log,
    make_private_c4,
)
from tests.optim.dp_c4_cases import without_names

pytestmark = pytest.mark.torch


def table(n=60, d=4):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, d, generator=generator)
    return TensorDataset(x, x.sum(dim=1, keepdim=True))


def linear(d=4):
    model = nn.Linear(d, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


def generators(seed=0):
    return {
        "noise_generator": torch.Generator().manual_seed(seed),
        "sampling_generator": torch.Generator().manual_seed(seed + 1_000),
    }


def private(model=None, *, data=None, batch_size=15, lr=0.2, **options) -> PrivateTraining:
    model = linear() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    settings = {"schedule": ConstantThreshold(1.0), "steps": 8, "target_delta": 1e-3, "noise_multiplier": 1.0}
    settings |= generators() | options
    return make_private_c4(model, optimizer, DataLoader(data or table(), batch_size=batch_size), **settings)


def closure(made, x, y):
    def evaluate():
        made.optimizer.zero_grad()
        loss = nn.functional.mse_loss(made.module(x), y)
        loss.backward()
        return loss

    return evaluate


def run(made, steps=None):
    """Train until the budget or a number of steps is used up; the batches' sizes."""
    sizes = []
    while made.optimizer.steps_left:
        for x, y in made.loader:
            made.optimizer.step(closure(made, x, y))
            sizes.append(len(x))
            if not made.optimizer.steps_left or len(made.optimizer.ledger.releases) == steps:
                return sizes
    return sizes


def weights(made):
    return torch.cat([p.detach().reshape(-1) for p in made.module.parameters()])


def test_without_coupling_a_whole_run_is_opacus_bit_for_bit():
    made = private(mode="off", noise_multiplier=0.9)
    run(made)
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    loader = DataLoader(table(), batch_size=15, generator=torch.Generator().manual_seed(1_000))
    engine = PrivacyEngine(accountant="prv")
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=0.9,
        max_grad_norm=1.0,
        noise_generator=torch.Generator().manual_seed(0),
    )
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    assert torch.equal(weights(made), torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    assert made.optimizer.get_epsilon(1e-3) == pytest.approx(engine.get_epsilon(1e-3), rel=0.01)


@pytest.mark.parametrize(
    "options",
    [
        {
            "mode": "snapshot",
            "schedule": MovementThreshold(2.0, anchor=2.0),
            "restart_every": 4,
            "anchor_share": 0.7,
            "accountant": "rdp",
        },
        {"mode": "table", "schedule": GeometricThreshold(2.0, 0.9, floor=0.1), "allocation": "by-threshold"},
        {"mode": "table", "participation": "cyclic"},
        {"mode": "off", "accountant": "rdp"},
        {"mode": "off", "participation": "full", "adjacency": "replace-one"},
        {"mode": "snapshot", "participation": "full"},
    ],
)
def test_the_budget_is_met_by_what_ran_and_by_its_log(options):
    made = private(noise_multiplier=None, target_epsilon=2.0, **options)
    run(made)
    keys = {"accountant": options.get("accountant", "pld"), "adjacency": options.get("adjacency", "add-remove")}
    spent = epsilon_from_log(made.optimizer.audit_log(), 1e-3, **keys)
    assert 1.97 < spent <= 2.0
    assert len(made.optimizer.ledger.releases) == 8
    x, y = next(iter(made.loader))
    with pytest.raises(BudgetSpentError):
        made.optimizer.step(closure(made, x, y))


def test_an_interrupted_run_has_spent_only_what_it_released():
    made = private(noise_multiplier=None, target_epsilon=2.0, mode="off", participation="full")
    run(made, steps=3)
    assert len(made.optimizer.ledger.releases) == 3
    assert 0 < made.optimizer.get_epsilon(1e-3) < 1.5


def test_coupling_learns_what_plain_clipping_misses():
    """Two far records; without noise the coupled modes end at least squares, plain clipping does not."""
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = x.sum(dim=1, keepdim=True)
    y[:2] += 20.0
    data = TensorDataset(x, y)
    design = torch.cat([x, torch.ones(60, 1, dtype=torch.float64)], dim=1)
    exact = torch.linalg.lstsq(design, y).solution[:, 0]
    errors = {}
    for name, options in {
        "off": {"mode": "off", "participation": "full"},
        "table": {"mode": "table"},
        "snapshot": {"mode": "snapshot", "participation": "full", "schedule": MovementThreshold(50.0, anchor=1e3)},
    }.items():
        made = private(linear().double(), data=data, lr=0.2, steps=250, noise_multiplier=0.0, **options)
        run(made)
        errors[name] = (weights(made) - exact).norm().item()
    assert errors["table"] < 1e-6
    assert errors["snapshot"] < 1e-6
    assert errors["off"] > 0.5


def test_poisson_samples_have_the_stated_rate_and_epochs():
    made = private(mode="off", steps=400)
    sizes = run(made)
    assert len(set(sizes)) > 3
    assert abs(sum(sizes) / 400 - 15) < 4 * math.sqrt(60 * 0.25 * 0.75 / 400)
    assert len(made.loader) == 4
    assert {release.rate for release in made.optimizer.ledger.releases} == {0.25}


def test_empty_batches_keep_their_structure_and_are_stepped_through():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 1))
    images = torch.randn(8, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    data = [{"image": image, "label": torch.tensor([1.0])} for image in images]
    for mode in ("off", "snapshot"):
        made = private(copy.deepcopy(model), data=data, batch_size=1, mode=mode, steps=24)
        sizes = []
        while made.optimizer.steps_left:
            for batch in made.loader:
                made.optimizer.step(closure(made, batch["image"], batch["label"]))
                sizes.append(len(batch["image"]))
        assert 0 in sizes
        assert len(made.optimizer.ledger.releases) == 24 == len(sizes)
        assert torch.isfinite(weights(made)).all()


@pytest.mark.parametrize(
    "options", [{"mode": "table"}, {"mode": "off"}, {"mode": "snapshot"}, {"mode": "table", "participation": "cyclic"}]
)
def test_physical_batches_change_nothing_but_memory(options):
    whole, pieces = private(steps=6, **options), private(steps=6, physical_batch_size=4, **options)
    run(whole)
    sizes = run(pieces)
    assert max(sizes) <= 4
    assert len(sizes) > 6
    torch.testing.assert_close(weights(whole), weights(pieces), rtol=1e-4, atol=1e-5)
    assert without_names(whole.optimizer.audit_log()) == without_names(pieces.optimizer.audit_log())


def test_table_mode_moves_the_references_of_the_records_in_the_batch():
    made = private(mode="table", participation="cyclic", noise_multiplier=0.0, schedule=ConstantThreshold(1e-3))
    seen = torch.zeros(60)
    for step, (x, y) in enumerate(made.loader):
        made.optimizer.step(closure(made, x, y))
        references = made.optimizer.memory.of(next(made.module.parameters()))["references"]
        moved = references.reshape(60, -1).norm(dim=1) > 0
        assert torch.equal(moved.nonzero()[:, 0] % 4 <= step, torch.ones(15 * (step + 1), dtype=torch.bool))
        seen[step::4] = 1
    assert seen.all()
    assert [release.part for release in made.optimizer.ledger.releases] == [0, 1, 2, 3]


def test_no_amplification_is_claimed_for_poisson_samples_in_table_mode():
    with pytest.warns(UserWarning, match="not amplified"):
        made = private(mode="table", participation="poisson", noise_multiplier=4.0)
    run(made)
    full = private(mode="table", noise_multiplier=4.0)
    run(full)
    assert made.optimizer.get_epsilon(1e-3) == full.optimizer.get_epsilon(1e-3)
    assert not made.optimizer.privacy_statement(1e-3).amplified
    snapshot = private(mode="snapshot", noise_multiplier=4.0)
    run(snapshot)
    assert snapshot.optimizer.get_epsilon(1e-3) < 0.6 * full.optimizer.get_epsilon(1e-3)


def test_a_batch_is_stepped_through_once_and_whole():
    made = private(mode="off", participation="full")
    x, y = next(iter(made.loader))
    made.optimizer.step(closure(made, x, y))
    with pytest.raises(RuntimeError, match="fresh batch"):
        made.optimizer.step(closure(made, x, y))
    x, y = next(iter(made.loader))
    with pytest.raises(ValueError, match="gave out 60 records"):
        made.optimizer.step(closure(made, x[:10], y[:10]))
    assert len(made.optimizer.ledger.releases) == 1


def test_a_step_broken_off_between_its_batches():
    """Without references what was added up is forgotten; with references the run cannot go on."""
    for mode in ("off", "table"):
        made = private(mode=mode, participation="full", physical_batch_size=20, noise_multiplier=0.0)
        x, y = next(iter(made.loader))
        made.optimizer.step(closure(made, x, y))
        if mode == "table":
            with pytest.raises(RuntimeError, match="broken off"):
                run(made)
            continue
        run(made, steps=1)
        fresh = private(mode=mode, participation="full", noise_multiplier=0.0)
        run(fresh, steps=1)
        torch.testing.assert_close(weights(made), weights(fresh))


@pytest.mark.parametrize(
    "options", [{"mode": "off"}, {"mode": "snapshot"}, {"mode": "table"}, {"mode": "table", "participation": "cyclic"}]
)
def test_a_run_resumes_exactly_in_the_middle_of_an_epoch(options, tmp_path):
    whole = private(**options)
    run(whole)
    first = private(**options)
    run(first, steps=2)
    torch.save(
        {
            "module": first.module.state_dict(),
            "optimizer": first.optimizer.state_dict(),
            "loader": first.loader.state_dict(),
        },
        tmp_path / "run.pt",
    )
    state = torch.load(tmp_path / "run.pt", weights_only=True)
    again = private(**options, **generators(seed=55))
    again.module.load_state_dict(state["module"])
    again.optimizer.load_state_dict(state["optimizer"])
    again.loader.load_state_dict(state["loader"])
    run(again)
    assert torch.equal(weights(again), weights(whole))
    assert without_names(again.optimizer.audit_log()) == without_names(whole.optimizer.audit_log())


def test_what_a_lost_run_released_is_counted_and_its_noise_not_used_again(tmp_path):
    """Two releases with the same noise would differ by the exact difference of two private sums."""
    options = {"mode": "off", "audit_file": tmp_path / "audit.jsonl"}
    made = private(**options)
    run(made, steps=2)
    module, optimizer = copy.deepcopy(made.module.state_dict()), copy.deepcopy(made.optimizer.state_dict())
    run(made, steps=3)
    lost = next(made.module.parameters()).grad.clone()
    again = private(**options)
    again.module.load_state_dict(module)
    again.optimizer.load_state_dict(optimizer)
    assert again.optimizer.steps_left == 5
    run(again, steps=4)
    assert not torch.equal(next(again.module.parameters()).grad, lost)
    run(again)
    assert len(again.optimizer.ledger.releases) == 8


def test_going_back_to_a_checkpoint_gives_nothing_back():
    made = private(noise_multiplier=None, target_epsilon=2.0, mode="off", participation="full")
    run(made, steps=3)
    state = copy.deepcopy(made.optimizer.state_dict())
    run(made, steps=6)
    spent = made.optimizer.get_epsilon(1e-3)
    made.optimizer.load_state_dict(state)
    assert made.optimizer.get_epsilon(1e-3) == spent
    assert made.optimizer.steps_left == 2
    run(made)
    assert made.optimizer.get_epsilon(1e-3) <= 2.0


@pytest.mark.parametrize("leave", ["noise", "group"])
def test_a_run_that_leaves_its_plan_keeps_to_its_budget(leave):
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    made = make_private_c4(
        model,
        optimizer,
        DataLoader(table(), batch_size=15),
        schedule=MovementThreshold(1.0, anchor=1.0),
        steps=10,
        target_epsilon=2.0,
        target_delta=1e-3,
        participation="full",
        anchor_share=0.5,
        **generators(),
    )
    run(made, steps=3)
    if leave == "noise":
        made.optimizer.noise_multiplier *= 0.8
    else:
        made.optimizer.add_param_group({"params": list(model[1].parameters())})
        made.optimizer._took_part = {}
    with pytest.raises(BudgetSpentError, match="exceed epsilon 2"):
        run(made)
    assert 1.5 < made.optimizer.get_epsilon(1e-3) <= 2.0


def test_weights_used_outside_their_layer_are_refused_not_published():
    class Borrowing(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x):
            return nn.functional.linear(torch.tanh(self.a(x)), self.b.weight, self.b.bias)

    for mode in ("off", "table", "snapshot"):
        model = Borrowing()
        before = model.b.weight.detach().clone()
        made = private(model, mode=mode)
        with pytest.raises(ValueError, match="cannot be made private"):
            run(made, steps=1)
        assert torch.equal(model.b.weight, before)


def test_a_frozen_parameter_does_not_move_by_an_old_gradient():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model(torch.ones(2, 4)).sum().backward()
    model[0].requires_grad_(False)
    before = model[0].weight.detach().clone()
    made = private(model, mode="table")
    x, y = next(iter(made.loader))
    nn.functional.mse_loss(made.module(x), y).backward()
    made.optimizer.step()  # without zero_grad
    assert torch.equal(model[0].weight, before)


def test_loaders_that_choose_records_themselves_are_refused():
    data = table(20)
    for wrong in (
        {"sampler": SubsetRandomSampler(range(5)), "batch_size": 5},
        {"sampler": WeightedRandomSampler([1.0] * 20, 20), "batch_size": 5},
        {"sampler": RandomSampler(data, replacement=True), "batch_size": 5},
        {"batch_sampler": [[0, 1], [2, 3]]},
    ):
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ValueError, match="Subset"):
            make_private_c4(
                model,
                optimizer,
                DataLoader(data, **wrong),
                schedule=ConstantThreshold(1.0),
                steps=1,
                target_delta=1e-3,
                noise_multiplier=1.0,
            )
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    empty = DataLoader(data, batch_size=30, drop_last=True)
    with pytest.raises(ValueError, match="no batch"):
        make_private_c4(
            model, optimizer, empty, schedule=ConstantThreshold(1.0), steps=1, target_delta=1e-3, noise_multiplier=1.0
        )


@pytest.mark.parametrize("batches", [93, 99, 198])
def test_an_epoch_has_as_many_steps_as_the_loader_has_batches(batches):
    made = private(data=table(batches), batch_size=1, mode="off")
    assert len(made.loader) == batches
    assert {release.rate for release in made.optimizer.plan.releases(1.0, 2)} == {made.loader.sampling.drawn_rate}
    assert 0 <= made.loader.sampling.drawn_rate - 1 / batches <= 2**-24


def test_secure_runs_differ_and_take_no_generator():
    options = {"noise_generator": None, "sampling_generator": None, "secure_mode": True, "mode": "off"}
    first, second = private(**options), private(**options)
    assert run(first) != run(second)
    assert not torch.equal(weights(first), weights(second))
    with pytest.raises(ValueError, match="operating system"):
        private(secure_mode=True, noise_generator=None, mode="off")
    shared = torch.Generator()
    with pytest.raises(ValueError, match="generators of their own"):
        private(mode="off", noise_generator=shared, sampling_generator=shared)


def test_runs_without_generators_never_share_noise():
    options = {"noise_generator": None, "sampling_generator": None, "mode": "off"}
    first, second = private(**options), private(**options)
    run(first)
    run(second)
    assert not torch.equal(weights(first), weights(second))


def test_modules_whose_samples_are_not_apart_are_refused():
    for mode in ("off", "snapshot", "table"):
        with pytest.raises(ValueError, match="BatchNorm"):
            private(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)), mode=mode)
    dropping = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    for mode in ("snapshot", "table"):
        with pytest.raises(ValueError, match="random numbers"):
            private(dropping, mode=mode)
    assert isinstance(private(dropping, mode="off").module, GradSampleModule)


def test_arguments_that_cannot_be_right_are_refused():
    for wrong, match in (
        ({"target_epsilon": 1.0}, "either"),
        ({"noise_multiplier": None}, "either"),
        ({"steps": 0}, "steps"),
        ({"target_delta": 1.0}, "target_delta"),
        ({"schedule": MovementThreshold(1.0, anchor=1.0), "mode": "table"}, "MovementThreshold"),
        (
            {"mode": "snapshot", "allocation": "by-threshold", "schedule": MovementThreshold(1.0, anchor=1.0)},
            "known before",
        ),
        ({"allocation": "greedy"}, "allocation"),
        ({"participation": "shuffle"}, "kind"),
        ({"mode": "table", "max_table_bytes": 100}, "mode='snapshot'"),
        ({"physical_batch_size": 0}, "physical_batch_size"),
    ):
        with pytest.raises(ValueError, match=match):
            private(**{"mode": "off", **wrong})
    with pytest.raises(TypeError, match="schedule"):
        private(schedule=1.0)
    with pytest.warns(UserWarning, match="publish a record"):
        private(target_delta=0.1, mode="off")
    with pytest.warns(ThresholdSumWarning, match="add up to 1.99"):
        private(mode="table", schedule=GeometricThreshold(1.0, 0.5))

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(table())

    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"schedule": ConstantThreshold(1.0), "steps": 1, "target_delta": 1e-3, "noise_multiplier": 1.0}
    with pytest.raises(TypeError, match="length"):
        make_private_c4(model, optimizer, DataLoader(Stream(), batch_size=4), **options)
    with pytest.raises(ValueError, match="not the module's"):
        make_private_c4(linear(), optimizer, DataLoader(table(), batch_size=4), **options)


def test_the_example_of_the_documentation_runs():
    import doctest

    import cameraready.optim.dp_c4.clipping
    import cameraready.optim.dp_c4.engine

    for module in (cameraready.optim.dp_c4.engine, cameraready.optim.dp_c4.clipping):
        found = doctest.testmod(module)
        assert (found.failed, found.attempted > 0) == (0, True)
