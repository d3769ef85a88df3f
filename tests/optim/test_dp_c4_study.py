"""The study's grids are its optimizers, its twins look at no data, its audits tell right from wrong, and a user's table is taken as it comes."""

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch
from scipy.optimize import minimize

from cameraready.evidence import Context
from cameraready.evidence.checking import check
from cameraready.evidence.specs import SpecError, parse, value_spec
from cameraready.optim.dp_c4 import arms, study, tuning, workloads
from cameraready.optim.dp_c4.arms import ARMS, Budget, Settings
from cameraready.optim.dp_c4.workloads import Problem

pytestmark = pytest.mark.torch


def small(n=60, d=4, loss="logistic", seed=0):
    return Problem("small", *workloads.student_rows(n, d, 3.0, seed, loss), loss)


@pytest.fixture
def hardly_any_noise(monkeypatch):
    """Multipliers so small that chance leaves no trace; samples hold all records."""
    for module in (arms, tuning):
        monkeypatch.setattr(module, "noise_for", lambda *args: 1e-12)
        monkeypatch.setattr(module, "count_noise", lambda n, noise: 1e-10)
    monkeypatch.setattr(arms._Training, "sample", lambda self, rate: None)
    monkeypatch.setattr(tuning._Grid, "rows", lambda self, rate: self.problem)


@pytest.mark.parametrize("loss", ["logistic", "squared"])
@pytest.mark.parametrize("arm", list(ARMS))
def test_a_grid_is_its_optimizer_for_every_setting_at_once(arm, loss, hardly_any_noise):
    problem, budget = small(loss=loss), Budget(1.0, 1e-3, 12)
    scales = (0.05, 0.4) if arm != "adaclip" else (0.5, 0.9)
    settings = [Settings(lr, second) for lr in (0.03, 0.3) for second in scales]
    together = tuning.GRIDS[arm](problem, budget, settings, 0)
    for each, weights in zip(settings, together.T, strict=True):
        np.testing.assert_allclose(ARMS[arm](problem, budget, each, 3), weights, rtol=2e-4, atol=1e-6)
        assert np.abs(weights).max() > 1e-3


def test_the_optimum_is_that_of_a_general_solver():
    for loss in ("logistic", "squared"):
        problem = small(loss=loss)
        found = minimize(
            problem.value, np.zeros(problem.d), jac=problem.slope, method="L-BFGS-B", options={"gtol": 1e-9}
        )
        np.testing.assert_allclose(problem.optimum(), found.x, atol=1e-4)
        weights = np.random.default_rng(0).normal(size=problem.d)
        step = 1e-6 * np.eye(problem.d)
        numeric = [(problem.value(weights + s) - problem.value(weights - s)) / 2e-6 for s in step]
        np.testing.assert_allclose(problem.slope(weights), numeric, rtol=1e-5, atol=1e-8)
        np.testing.assert_allclose(
            problem.gradients(weights).mean(axis=0) + problem.l2 * weights, problem.slope(weights)
        )


def test_every_arm_spends_its_gradient_evaluations_and_no_more():
    budget = Budget(2.0, 1e-3, 20)
    counted = {}
    for arm in ARMS:
        problem, rows = small(n=200), []
        original = Problem.gradients

        def counting(self, weights, rows=rows, original=original):
            rows.append(self.n)
            return original(self, weights)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(arms, "noise_for", lambda *args: 3.0)
            patch.setattr(Problem, "gradients", counting)
            ARMS[arm](problem, budget, Settings(0.01, 0.5), 0)
        counted[arm] = sum(rows) / 200
    assert all(0.85 * 20 <= number <= 1.15 * 20 for number in counted.values()), counted


def test_a_twin_depends_on_size_and_kind_alone():
    for kind in ("table", "text"):
        twins = [
            workloads.twin_of(Problem("p", X, np.ones(50), "logistic", kind), 3)
            for X in (np.zeros((50, 6)), np.random.default_rng(0).normal(size=(50, 6)))
        ]
        np.testing.assert_array_equal(twins[0].features, twins[1].features)
        np.testing.assert_array_equal(twins[0].target, twins[1].target)
        assert twins[0].features.shape == (50, 6)


def test_grids_are_of_one_size():
    twin = workloads.twin_of(small(), 0)
    assert {len(tuning.grid(twin, arm)) for arm in ARMS} == {24}
    assert set(tuning.GRIDS) == set(ARMS)
    sizes = {len(tuning.NETWORK_LR[arm]) * len(tuning.NETWORK_THRESHOLDS[arm]) for arm in tuning.NETWORK_LR}
    assert sizes == {6}


def test_noise_that_falls_spends_what_equal_noise_does():
    shares = np.array(arms.decaying_shares(30))
    assert np.sum(shares**-2.0) == pytest.approx(30)
    np.testing.assert_allclose(shares[1:] / shares[:-1], arms.NOISE_DECAY)
    ends = [arms.thresholds(3.0, steps)(steps) / arms.thresholds(3.0, steps)(0) for steps in (40, 640)]
    assert ends == pytest.approx([arms.DECAY**100] * 2)
    assert sum(arms.thresholds(3.0, 40)(step) for step in range(40)) == pytest.approx(3.0)
    assert sum(arms.thresholds(3.0, 40, 1.0)(step) for step in range(40)) == pytest.approx(3.0)


def test_the_count_of_adaclip_is_paid_for():
    """sigma^-2 = raised^-2 + (2 sigma_b)^-2: gradient and count together cost what one release with sigma does."""
    for n, noise in ((500, 5.0), (100, 60.0)):
        of_count = arms.count_noise(n, noise)
        raised = (noise**-2 - (2 * of_count) ** -2) ** -0.5
        assert raised**-2 + (2 * of_count) ** -2 == pytest.approx(noise**-2)
        assert noise < raised < 1.25 * noise


def test_normalised_gradients_are_shorter_than_one():
    rows = torch.randn(20, 3, generator=torch.Generator().manual_seed(0)) * 100
    p = torch.nn.Parameter(torch.zeros(3))
    optimizer = arms.NormalisingOptimizer(
        torch.optim.SGD([p], lr=1.0), stability=0.1, noise_multiplier=0.0, expected_batch_size=20
    )
    p.grad_sample = rows
    optimizer.step()
    expected = (rows / (rows.norm(dim=1, keepdim=True) + 0.1)).mean(dim=0)
    torch.testing.assert_close(-p.detach(), expected)


def test_noise_of_all_steps_is_left_in_the_gradient_and_the_log_tells_epsilon():
    problem = small(n=300)
    prepared = {"steps 30": np.array([0.05, 1.0]), "optimum": np.array(0.0)}
    rows = [
        study.injected(problem, Context(seed=s, prepared=prepared), Budget(2.0, problem.delta, 30), "fixed")
        for s in range(24)
    ]
    assert np.mean([row["left_over_expected"] for row in rows]) == pytest.approx(1.0, abs=0.3)
    assert all(1.98 < row["spent"] <= 2.0 for row in rows)
    assert all(row["noise_fall"] == pytest.approx(0.98 ** (29 / 2)) for row in rows)


def test_audits_tell_what_is_private_from_what_is_not():
    found = {arm: study.audited(workloads.Canaries(), 1_000, arm, 1.0)["epsilon_lower"] for arm in study.AUDITED}
    assert max(found["c4"], found["c4-snapshot"]) <= 1.0
    assert min(found["no-noise"], found["mean-reference"]) > 1.0


def table(n=200):
    generator = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "age": generator.normal(40, 10, n),
            "city": generator.choice(["Bern", "Graz", None], n),
            "joined": pd.to_datetime("2020-01-01") + pd.to_timedelta(generator.integers(0, 900, n), unit="D"),
            "member": generator.random(n) < 0.5,
            "empty": np.full(n, np.nan),
            "same": np.full(n, 7),
        }
    )
    frame.loc[::7, "age"] = np.nan
    return frame, pd.Series(np.where(frame["city"] == "Bern", "yes", "no"), name="answer")


def test_a_table_with_text_dates_and_missing_values_is_taken_as_it_is():
    features, target = table()
    problem = workloads.own_table("mine", features, target)
    assert np.isfinite(problem.features).all()
    assert problem.loss == "logistic"
    assert np.mean(np.sign(problem.features @ problem.optimum()) == problem.target) == 1.0
    number = workloads.own_table("mine", features, features["age"].rename("years"))
    assert number.loss == "squared"
    assert number.n == features["age"].notna().sum()
    spec = value_spec((features, target)).with_value((features, target))
    assert workloads.open_workload(spec).n == 200
    assert study.ready_optimizer(problem).mode == "table"


def test_a_run_on_a_users_table_has_no_failed_trial(tmp_path, monkeypatch):
    monkeypatch.setenv("CAMERAREADY_HOME", str(tmp_path))
    rng = np.random.default_rng(0)
    X = rng.normal(size=(300, 4))
    found = check("dp-c4", on=(X, X[:, 0] + 0.3 * rng.normal(size=300) > 0), tier="smoke", quiet=True)
    assert found.failures == []
    assert set(found.rows["arm"]) >= set(ARMS) - {"c4-uniform", "clip21"}


def test_unfit_tables_are_refused_with_a_sentence():
    features, target = table()
    with pytest.raises(ValueError, match="at least 100"):
        workloads.own_table("tiny", features.head(50), target.head(50))
    with pytest.raises(ValueError, match="single value"):
        workloads.own_table("constant", features, pd.Series(["yes"] * 200, name="answer"))
    with pytest.raises(ValueError, match="identifier"):
        workloads.own_table("names", features, pd.Series([f"person {i}" for i in range(200)], name="who"))
    with pytest.raises(ValueError, match="no column"):
        workloads.own_table("texts", pd.DataFrame({"id": [f"a{i}" for i in range(200)]}), target)
    with pytest.raises(SpecError):
        parse("hf:some/model", shipped=["tate"], accepts=study.STUDY.accepts)


def test_an_arm_of_ones_own_takes_part_and_one_that_returns_nothing_fails_its_trial():
    problem = small()
    own = {"zero": lambda p, b, s, seed: np.zeros(p.d), "none": lambda p, b, s, seed: np.full(p.d, np.nan)}
    context = Context(seed=0, own=own, prepared={"optimum": np.array(problem.value(problem.optimum()))})
    (row,) = study.trial(problem, context, part="compare", arm="zero", epsilon=1.0)
    assert row["excess"] == pytest.approx(problem.value(np.zeros(problem.d)) - problem.value(problem.optimum()))
    with pytest.raises(ValueError, match="finite weights"):
        study.trial(problem, context, part="compare", arm="none", epsilon=1.0)


def test_both_optimizers_are_timed_on_the_same_gradients():
    problem = small()
    rows = study.trial(problem, Context(seed=0), part="speed", epsilon=0.0)
    assert {row["arm"] for row in rows} == {"c4", "dp-sgd"}
    assert all(row["step_seconds"] > 0 for row in rows)


def test_the_answer_is_a_sentence_with_its_number():
    from cameraready.evidence.answer import answer

    rng = np.random.default_rng(0)
    rows = [
        {
            "workload": "tate",
            "part": "compare",
            "arm": arm,
            "epsilon": 2.0,
            "seed": seed,
            "excess": size * rng.uniform(0.9, 1.1),
        }
        for seed in range(12)
        for arm, size in (("c4", 0.5), ("dp-sgd", 1.0), ("clip21", 0.1))
    ]
    found = answer(study.STUDY, pl.DataFrame(rows))
    assert "at epsilon 2" in found
    assert found.startswith("Use DP-C4")
    assert "times" in found
