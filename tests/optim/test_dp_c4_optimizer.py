"""The optimizer: equal to Opacus without coupling, right in scale and sensitivity with it, and honest about what it released."""

import copy
import math
import warnings

import pytest
import torch
from opacus.optimizers import DPOptimizer
from torch import nn

from cameraready.optim.dp_c4 import (
    BudgetSpentError,
    C4Optimizer,
    ConstantThreshold,
    GeometricThreshold,
    MovementThreshold,
    PrivateQuantityWarning,
    Sampling,
    epsilon_from_log,
    per_sample_closure,
)
from tests.optim.dp_c4_cases import without_names

pytestmark = pytest.mark.torch


class Location(nn.Module):
    """Parameters x; the gradient of (x - a)^2 / 2 at record a is x - a."""

    def __init__(self, d=1):
        super().__init__()
        self.x = nn.Parameter(torch.zeros(d, dtype=torch.float64))


def private(d, n, schedule, *, lr=0.5, mode="table", sampling=None, noise=0.0, seed=0, **options):
    model = Location(d)
    base = torch.optim.SGD(model.parameters(), lr=lr)
    sampling = sampling or Sampling("full", n)
    generator = torch.Generator().manual_seed(seed)
    return model, C4Optimizer(
        base, noise_multiplier=noise, schedule=schedule, mode=mode, sampling=sampling, generator=generator, **options
    )


def squares(model, a):
    def closure():
        model.x.grad_sample = model.x.detach() - a
        return torch.zeros(())

    return closure


def set_rows(model, rows):
    model.x.grad_sample = rows


# --- equality with Opacus -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_coupling_it_is_opacus_bit_for_bit(reduction, dtype):
    outcomes = []
    for private_optimizer in (True, False):
        generator = torch.Generator().manual_seed(3)
        model = nn.Linear(5, 3, dtype=dtype)
        nn.init.constant_(model.weight, 0.1)
        nn.init.zeros_(model.bias)
        base = torch.optim.Adam(model.parameters(), lr=0.01)
        if private_optimizer:
            optimizer = C4Optimizer(
                base,
                noise_multiplier=1.3,
                schedule=ConstantThreshold(0.7),
                mode="off",
                sampling=Sampling("poisson", 40, rate=0.2),
                loss_reduction=reduction,
                generator=generator,
            )
        else:
            optimizer = DPOptimizer(
                base,
                noise_multiplier=1.3,
                max_grad_norm=0.7,
                expected_batch_size=8,
                loss_reduction=reduction,
                generator=generator,
            )
        rows = torch.Generator().manual_seed(5)
        for size in (7, 0, 11, 8):
            optimizer.zero_grad()
            model.weight.grad_sample = 3 * torch.randn(size, 3, 5, generator=rows, dtype=dtype)
            model.bias.grad_sample = torch.randn(size, 3, generator=rows, dtype=dtype)
            optimizer.step()
        outcomes.append([p.detach().clone() for p in model.parameters()])
    for mine, theirs in zip(*outcomes, strict=True):
        assert torch.equal(mine, theirs)


def test_opacus_schedulers_of_noise_act_and_are_accounted():
    from opacus.schedulers import ExponentialNoise

    model, optimizer = private(2, 4, ConstantThreshold(1.0), mode="off", noise=2.0)
    scheduler = ExponentialNoise(optimizer, gamma=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        set_rows(model, torch.ones(4, 2, dtype=torch.float64))
        optimizer.step()
        scheduler.step()
    assert [release.noise_multiplier for release in optimizer.ledger.releases] == [2.0, 1.0, 0.5]


def test_the_first_step_of_table_mode_is_a_step_of_plain_clipping():
    rows = 4 * torch.randn(6, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = []
    for mode in ("off", "table", "snapshot"):
        model, optimizer = private(2, 6, ConstantThreshold(1.5), mode=mode, noise=0.8)
        set_rows(model, rows)
        optimizer.step()
        found.append(model.x.detach().clone())
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)  # Opacus adds 1e-6 to norms
    assert torch.equal(found[1], found[2])


# --- what it computes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tau", [1.0, 0.05])
def test_without_noise_it_reaches_the_optimum_where_plain_clipping_does_not(tau):
    a = torch.tensor([[0.0], [0.0], [10.0]], dtype=torch.float64)
    for mode, target in (("table", 10 / 3), ("off", tau / 2)):
        model, optimizer = private(1, 3, ConstantThreshold(tau), mode=mode, lr=0.2)
        for _ in range(800):
            optimizer.zero_grad()
            optimizer.step(squares(model, a))
        assert model.x.item() == pytest.approx(target, abs=1e-5 if mode == "off" else 1e-9)


def test_snapshot_mode_reaches_the_optimum_once_differences_fit():
    a = torch.tensor([[0.0], [0.0], [10.0]], dtype=torch.float64)
    for every in (1, 4):
        schedule = MovementThreshold(1.0, anchor=20.0)
        model, optimizer = private(1, 3, schedule, mode="snapshot", lr=0.3, snapshot_every=every)
        for _ in range(200):
            optimizer.step(squares(model, a))
        assert model.x.item() == pytest.approx(10 / 3, abs=1e-9)


def test_the_gradient_is_the_mean_of_all_references_plus_all_noise():
    """G_t = mean(h_i) + sum of noises, each N(0, (sigma tau / n)^2)."""
    n, d, tau, sigma = 5, 3, 0.5, 1.2
    a = 3 * torch.randn(n, d, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    model, optimizer = private(d, n, ConstantThreshold(tau), noise=sigma, seed=9)
    noises, twin = torch.zeros(d, dtype=torch.float64), torch.Generator().manual_seed(9)
    for _ in range(6):
        optimizer.step(squares(model, a))
        noises += torch.normal(0.0, sigma * tau, (d,), generator=twin, dtype=torch.float64) / n
        references = optimizer.memory.of(model.x)["references"]
        torch.testing.assert_close(model.x.grad, references.mean(dim=0) + noises, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("mode", "rate"), [("off", 0.25), ("table", 0.25), ("snapshot", 0.25), ("table", 1.0)])
def test_noise_has_the_scale_of_threshold_over_the_expected_size(mode, rate):
    """Not of the threshold alone, nor of the batch that happened to come: 40 records, sigma tau / (expected size)."""
    n, d, tau, sigma = 40, 20_000, 0.5, 3.0
    kind = "poisson" if rate < 1 else "full"
    for size in (0, 3, 40) if mode != "table" else (40,):
        sampling = Sampling(kind, n, rate=rate) if mode != "table" else Sampling("full", n)
        model, optimizer = private(d, n, ConstantThreshold(tau), mode=mode, noise=sigma, sampling=sampling)
        set_rows(model, torch.zeros(size, d, dtype=torch.float64))
        optimizer.step()
        expected = n if mode == "table" else n * rate
        assert model.x.grad.std().item() == pytest.approx(sigma * tau / expected, rel=0.03)


def test_an_empty_batch_still_adds_noise_and_steps():
    for mode in ("off", "snapshot"):
        sampling = Sampling("poisson", 40, rate=0.1)
        model, optimizer = private(3, 40, ConstantThreshold(1.0), mode=mode, noise=1.0, sampling=sampling)
        moved = model.x.detach().clone()
        for _ in range(3):
            optimizer.zero_grad()
            optimizer.step(squares(model, torch.zeros(0, 3, dtype=torch.float64)))
            assert not torch.equal(model.x, moved)
            moved = model.x.detach().clone()
        assert len(optimizer.ledger.releases) == 3


@pytest.mark.parametrize("mode", ["table", "snapshot"])
def test_sensitivity_by_brute_force(mode):
    """For fixed past releases, taking any record out (its gradient counts as zero) changes the noised sum by at most tau, replacing it by at most 2 tau.

    The two worlds are run with the noise of the second chosen so that both have released the same so far.
    """
    n, d = 6, 4
    schedule = GeometricThreshold(0.8, 0.9) if mode == "table" else MovementThreshold(0.5, anchor=0.8)
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        a = 5 * torch.randn(n, d, generator=generator, dtype=torch.float64)
        other = a.clone()
        other[2] = 50 * torch.randn(d, generator=generator, dtype=torch.float64)

        def rows(model, points, out=None):
            found = (model.x.detach() - points) * (1 + (model.x.detach() - points).norm(dim=1, keepdim=True))
            if out is not None:
                found[out] = 0.0
            return found

        worlds = {"same": (a, None), "out": (a, 2), "replaced": (other, None)}
        made = {name: private(d, n, schedule, mode=mode, noise=0.5, lr=0.3, seed=seed) for name in worlds}
        for _ in range(7):
            releases = {}
            for name, (model, optimizer) in made.items():
                points, out = worlds[name]

                def closure(model=model, points=points, out=out):
                    model.x.grad_sample = rows(model, points, out)

                optimizer.step(closure)
                releases[name] = model.x.grad.clone()
            tau = made["same"][1].max_grad_norm
            gap = (releases["out"] - releases["same"]).norm().item()
            assert gap <= tau / n * (1 + 1e-9)
            assert (releases["replaced"] - releases["same"]).norm().item() <= 2 * tau / n * (1 + 1e-9)
            # Past releases are the same in all worlds: what differed is taken for a difference of the noise.
            model, optimizer = made["same"]
            for name in ("out", "replaced"):
                twin, follower = made[name]
                with torch.no_grad():
                    twin.x.copy_(model.x)
                follower.memory.of(twin.x)["running"] = optimizer.memory.of(model.x)["running"].clone()
        if mode == "table":
            assert gap > 0.2 * tau / n  # the bound is about right


def test_the_headline_implementation_without_privacy_is_what_this_is_not():
    """Publishing mean(h_i) itself with noise of the present threshold has a sensitivity of the sum of all thresholds."""
    n, tau = 3, 1.0
    a = torch.tensor([[0.0], [0.0], [50.0]], dtype=torch.float64)
    model, optimizer = private(1, n, ConstantThreshold(tau), lr=1e-9)
    for _ in range(20):
        optimizer.step(squares(model, a))
    with_record = optimizer.memory.of(model.x)["references"].sum()
    without = optimizer.memory.of(model.x)["references"][:2].sum()
    assert abs(with_record - without) == pytest.approx(20 * tau)


def test_parameters_come_back_after_the_visit_to_the_snapshot_also_when_it_fails():
    a = torch.randn(4, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model, optimizer = private(2, 4, MovementThreshold(1.0, anchor=5.0), mode="snapshot", snapshot_every=3)
    for _ in range(2):
        optimizer.step(squares(model, a))
    before, calls = model.x.detach().clone(), []

    def failing():
        calls.append(model.x.detach().clone())
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        squares(model, a)()

    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step(failing)
    assert torch.equal(model.x, before)
    assert not torch.equal(calls[0], calls[1])
    assert len(optimizer.ledger.releases) == 2  # nothing was released


# --- refusals --------------------------------------------------------------------------------------------------------------------


def test_steps_that_do_not_fit_the_accounting_are_refused():
    a = torch.zeros(4, 2, dtype=torch.float64)
    model, optimizer = private(2, 4, ConstantThreshold(1.0), steps=2)
    with pytest.raises(ValueError, match="which records"):
        optimizer.step(squares(model, a[:3]))
    model.x.grad_sample = [a, a]
    with pytest.raises(ValueError, match="added up"):
        optimizer.step()
    model.x.grad_sample = None
    with pytest.raises(ValueError, match="per-sample gradients"):
        optimizer.step()
    optimizer.step(squares(model, a))
    optimizer.step(squares(model, a))
    with pytest.raises(BudgetSpentError, match="all 2 steps"):
        optimizer.step(squares(model, a))
    assert len(optimizer.ledger.releases) == 2

    model, optimizer = private(2, 4, ConstantThreshold(1.0), mode="off")
    with pytest.raises(ValueError, match="all 4 records"):
        optimizer.step(squares(model, a[:3]))
    model, optimizer = private(2, 4, MovementThreshold(1.0, anchor=1.0), mode="snapshot")
    optimizer.step(squares(model, a))
    with pytest.raises(ValueError, match="closure"):
        optimizer.step()

    sizes = iter((4, 3))
    with pytest.raises(ValueError, match="same batch"):
        optimizer.step(lambda: squares(model, a[: next(sizes)])())


def test_a_parameter_that_comes_and_goes_is_refused():
    model = nn.ParameterDict({"a": torch.zeros(2), "b": torch.zeros(2)})
    optimizer = C4Optimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        noise_multiplier=1.0,
        schedule=ConstantThreshold(1.0),
        sampling=Sampling("full", 3),
        mode="table",
    )
    model["a"].grad_sample = torch.ones(3, 2)
    optimizer.step()
    model["a"].grad_sample = model["b"].grad_sample = torch.ones(3, 2)
    with pytest.raises(RuntimeError, match="at some steps and none at others"):
        optimizer.step()
    assert torch.equal(model["b"], torch.zeros(2))


def test_arguments_out_of_range_are_refused():
    for wrong, match in (
        ({"mode": "table-top"}, "mode"),
        ({"noise": -1.0}, "noise_multiplier"),
        ({"noise": math.inf}, "noise_multiplier"),
        ({"snapshot_every": 0}, "snapshot_every"),
        ({"anchor_share": 0.0}, "anchor_share"),
        ({"shares": [1.0, -1.0]}, "shares"),
        ({"shares": [1.0], "steps": 2}, "shares"),
        ({"mode": "snapshot", "sampling": Sampling("cyclic", 4, parts=2)}, "table mode"),
    ):
        with pytest.raises(ValueError, match=match):
            private(2, 4, ConstantThreshold(1.0), **wrong)
    for wrong in ({"kind": "shuffle"}, {"rate": 0.0}, {"n_records": 0}, {"kind": "full", "rate": 0.5}, {"parts": 2}):
        with pytest.raises(ValueError, match="must"):
            Sampling(**{"kind": "poisson", "n_records": 5, **wrong})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_half_precision_are_not_rounded_before_the_noise(dtype):
    """One record moves the sum by one threshold, with 600 as with 6 records."""
    n, sums = 600, {}
    for size in (597, 598, 599, 600):
        model = nn.Linear(1, 1, bias=False).to(dtype)
        optimizer = C4Optimizer(
            torch.optim.SGD(model.parameters(), lr=0.0),
            noise_multiplier=0.0,
            schedule=ConstantThreshold(1.0),
            sampling=Sampling("poisson", n, rate=1.0),
        )
        model.weight.grad_sample = torch.full((size, 1, 1), -5.0, dtype=dtype)
        optimizer.step()
        sums[size] = optimizer.memory.of(model.weight)["running"].item() * n
        assert model.weight.grad.dtype == dtype
    for size, total in sums.items():
        assert total == pytest.approx(-size, abs=1e-3)
    plain = C4Optimizer(
        torch.optim.SGD(model.parameters(), lr=0.0),
        noise_multiplier=1.0,
        schedule=ConstantThreshold(1.0),
        sampling=Sampling("poisson", n, rate=1.0),
        mode="off",
    )
    model.weight.grad_sample = torch.ones(3, 1, 1, dtype=dtype)
    with pytest.raises(ValueError, match="16-bit"):
        plain.step()


@pytest.mark.parametrize("mode", ["off", "table", "snapshot"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_broken_record_is_not_seen_in_what_is_published(mode, bad):
    rows = torch.ones(3, 2, dtype=torch.float64)
    outcomes = []
    for value in (bad, 0.0):
        model, optimizer = private(2, 3, ConstantThreshold(0.5), mode=mode, noise=1.0)
        broken = rows.clone()
        broken[1] = torch.tensor([value, 0.0])
        set_rows(model, broken)
        optimizer.step()
        outcomes.append(model.x.grad.clone())
    assert torch.equal(*outcomes)


def test_a_schedule_of_ones_own_may_give_any_kind_of_number():
    import json

    import numpy as np

    class Own:
        def __call__(self, step, movement):
            return np.float32(0.5) if step else torch.tensor(0.5)

        def at_anchor(self):
            return np.float64(0.5)

    for mode in ("off", "table", "snapshot"):
        model, optimizer = private(2, 3, Own(), mode=mode, noise=np.float32(2.0))
        for _ in range(2):
            optimizer.zero_grad()
            optimizer.step(squares(model, torch.ones(3, 2, dtype=torch.float64)))
        assert "0.5" in json.dumps(optimizer.audit_log())

    class Wrong(Own):
        def __call__(self, step, movement):
            return -1.0

    model, optimizer = private(2, 3, Wrong(), mode="table")
    with pytest.raises(ValueError, match="threshold -1"):
        optimizer.step(squares(model, torch.ones(3, 2, dtype=torch.float64)))


def test_all_records_are_no_amplification():
    model, optimizer = private(
        2, 3, ConstantThreshold(0.5), mode="off", noise=1.0, sampling=Sampling("poisson", 3, rate=1.0)
    )
    set_rows(model, torch.ones(3, 2, dtype=torch.float64))
    optimizer.step()
    assert not optimizer.privacy_statement(1e-5).amplified


# --- what is said and stored --------------------------------------------------------------------------------------------------------


def test_epsilon_follows_from_the_log_alone_and_statement_names_both_kinds_of_neighbours():
    a = torch.randn(4, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model, optimizer = private(2, 4, GeometricThreshold(1.0, 0.5, floor=0.1), noise=6.0)
    for _ in range(5):
        optimizer.step(squares(model, a))
    log = optimizer.audit_log()
    assert epsilon_from_log(log, 1e-5) == optimizer.get_epsilon(1e-5) > 0
    assert [entry["threshold"] for entry in log["releases"]] == [1.0, 0.5, 0.25, 0.125, 0.1]
    assert optimizer.get_epsilon(1e-5, accountant="rdp") >= optimizer.get_epsilon(1e-5)
    said = optimizer.privacy_statement(1e-5)
    assert said.epsilon_replace_one == epsilon_from_log(log, 1e-5, adjacency="replace-one") > 1.8 * said.epsilon
    assert "add-remove" in str(said)
    assert "without amplification" in str(said)


def test_nothing_private_is_in_the_log_and_clipped_fractions_only_on_demand():
    a = torch.randn(4, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, optimizer = private(2, 4, ConstantThreshold(0.5), noise=1.0)
    other, twin = private(2, 4, ConstantThreshold(0.5), noise=1.0, seed=1)
    optimizer.step(squares(model, a))
    twin.step(squares(other, 100 * a))
    assert without_names(optimizer.audit_log()) == without_names(
        twin.audit_log()
    )  # other data, other noise, the same log
    assert optimizer.private_diagnostics == {}
    with pytest.warns(PrivateQuantityWarning):
        model, optimizer = private(2, 4, ConstantThreshold(0.5), noise=1.0, record_private=True)
    optimizer.step(squares(model, a))
    share = (a.norm(dim=1) > 0.5).double().mean().item()
    assert optimizer.private_diagnostics["clipped_fraction"] == [pytest.approx(share)]


@pytest.mark.parametrize("mode", ["table", "snapshot"])
def test_a_resumed_run_goes_on_exactly_and_counts_what_was_before(mode):
    a = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    schedule = GeometricThreshold(1.0, 0.9) if mode == "table" else MovementThreshold(1.0, anchor=1.0)
    options = {"mode": mode, "noise": 2.0, "steps": 6}
    model, optimizer = private(3, 6, schedule, **options)
    for _ in range(3):
        optimizer.step(squares(model, a))
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    again, resumed = private(3, 6, schedule, seed=77, **options)
    again.load_state_dict(weights)
    resumed.load_state_dict(state)
    for _ in range(3):
        optimizer.step(squares(model, a))
        resumed.step(squares(again, a))
    assert torch.equal(model.x, again.x)
    assert without_names(resumed.audit_log()) == without_names(optimizer.audit_log())
    with pytest.raises(BudgetSpentError):
        resumed.step(squares(again, a))


def test_states_that_do_not_fit_are_refused():
    _, optimizer = private(2, 4, ConstantThreshold(1.0))
    with pytest.raises(ValueError, match="no entry 'c4'"):
        optimizer.load_state_dict(optimizer.original_optimizer.state_dict())
    _, other = private(2, 4, ConstantThreshold(1.0), mode="off")
    with pytest.raises(ValueError, match="mode 'off'"):
        optimizer.load_state_dict(other.state_dict())
    model, smaller = private(2, 3, ConstantThreshold(1.0))
    smaller.step(squares(model, torch.ones(3, 2, dtype=torch.float64)))
    with pytest.raises(ValueError, match=r"references of parameter 0 has shape \(3, 2\)"):
        optimizer.load_state_dict(smaller.state_dict())


def test_secure_noise_is_normal_differs_every_time_and_cannot_be_stored():
    rows = torch.zeros(2, 40_000, dtype=torch.float64)
    seen = []
    for _ in range(2):
        model = Location(40_000)
        optimizer = C4Optimizer(
            torch.optim.SGD(model.parameters(), lr=1.0),
            noise_multiplier=2.0,
            schedule=ConstantThreshold(0.5),
            sampling=Sampling("full", 2),
            mode="table",
            secure_mode=True,
        )
        set_rows(model, rows)
        optimizer.step()
        seen.append(model.x.grad.clone())
        assert optimizer.state_dict()["c4"]["generator"] is None
        standard = model.x.grad * 2 / (2.0 * 0.5)
        assert abs(standard.mean().item()) < 0.03
        assert standard.std().item() == pytest.approx(1.0, abs=0.02)
        assert (standard.abs() < 1).double().mean().item() == pytest.approx(0.6827, abs=0.01)
        assert standard.pow(4).mean().item() == pytest.approx(3.0, abs=0.2)
    assert not torch.equal(*seen)
    with pytest.raises(ValueError, match="operating system"):
        private(2, 4, ConstantThreshold(1.0), secure_mode=True)
    _, plain = private(40_000, 2, ConstantThreshold(1.0))
    with pytest.raises(ValueError, match="secure"):
        plain.load_state_dict(optimizer.state_dict())


def test_the_functional_closure_gives_the_gradients_of_each_record_and_their_mean_loss():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    optimizer = C4Optimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        noise_multiplier=0.0,
        schedule=ConstantThreshold(1e6),
        sampling=Sampling("full", 5),
        mode="table",
    )
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 1, dtype=torch.float64)
    value = per_sample_closure(model, optimizer, nn.functional.mse_loss, x, y)()
    torch.testing.assert_close(value, nn.functional.mse_loss(model(x), y).detach())
    for i in range(5):
        grads = torch.autograd.grad(nn.functional.mse_loss(model(x[i : i + 1]), y[i : i + 1]), list(model.parameters()))
        for p, grad in zip(model.parameters(), grads, strict=True):
            torch.testing.assert_close(p.grad_sample[i], grad)
    per_sample_closure(model, optimizer, nn.functional.mse_loss, x[:0], y[:0])()
    assert all(p.grad_sample.shape == (0, *p.shape) for p in model.parameters())
