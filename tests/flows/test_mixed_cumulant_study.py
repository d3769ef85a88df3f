"""The study's arms, peers and networks are what they say, and a user's data, model and activation are taken as they come."""

import math
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

from cameraready.evidence import Context
from cameraready.evidence.checking import check
from cameraready.evidence.specs import SpecError, value_spec
from cameraready.flows import FlowProblem
from cameraready.flows.mixed_cumulant import MixedCumulant, study
from cameraready.flows.mixed_cumulant._activation import activation
from cameraready.flows.mixed_cumulant.denoiser import loss_and_gradient
from cameraready.flows.mixed_cumulant.experiment import bias, growth
from cameraready.flows.mixed_cumulant.experiment.networks import StackedMixer
from cameraready.flows.mixed_cumulant.exponent import noise_levels
from cameraready.flows.mixed_cumulant.model import random_directions

pytestmark = pytest.mark.torch


# --- arms and peers --------------------------------------------------------------------------------------------------------


def test_the_steps_constants_are_those_of_the_gradient():
    """Variance of a coordinate of the gradient in white directions, by simulation; drift by the loss's slope."""
    drift, noise = growth.drift_and_noise(growth.SINE, 3.0, 0.5, "fourth", 4)
    (a,), (s,) = noise_levels(3.0)
    rng, d = np.random.default_rng(0), 400
    w = np.zeros((1, d))
    w[0, 0] = 1
    each = [
        loss_and_gradient(w, *rng.standard_normal((2, 1, 1, d)), a, s, 0.5, growth.SINE)[1][0, 1:] for _ in range(400)
    ]
    assert np.mean(np.square(each)) == pytest.approx(noise, rel=0.1)
    assert drift > 0
    for scale in (12, 48):
        step = growth.options(growth.FOURTH, growth.arms(growth.FOURTH)["denoiser"], scale)["step_size"]
        assert drift * 16 / (noise * step * scale) == pytest.approx(growth.KAPPA)


def test_controls_keep_the_methods_noise_and_lack_its_signal():
    arms = growth.arms(growth.FOURTH)
    for name in ("relu", "no-signal"):
        phi = arms[name].phi
        noise = growth.drift_and_noise(phi, 3.0, 0.5, "fourth", 4)[1]
        step = growth.options(growth.FOURTH, arms[name], 24)["step_size"]
        method = growth.options(growth.FOURTH, arms["denoiser"], 24)["step_size"]
        own = growth.drift_and_noise(growth.SINE, 3.0, 0.5, "fourth", 4)[1]
        assert step**2 * noise == pytest.approx(method**2 * own)
    assert growth.drift_and_noise(activation("relu"), 3.0, 0.5, "fourth", 4)[0] == pytest.approx(0, abs=1e-9)
    assert growth.model_of(growth.FOURTH, arms["no-signal"]).kappa4 == 0
    assert abs(growth.COSINE.hermite(3)[0][3]) < 1e-12
    assert growth.drift_and_noise(growth.COSINE, 3.0, 0.5, "fourth", 4)[0] > 0


def test_peers_find_their_direction_with_plenty_of_samples():
    rng = np.random.default_rng(1)
    directions = random_directions(6, rng)
    x = MixedCumulant().sample(3_000, directions, rng)
    assert growth.principal(x, directions[0]) > 0.95
    assert growth.independent(x, directions[1]) > 0.9
    assert growth.independent(rng.standard_normal((3_000, 40)), np.eye(40)[0]) < 0.8
    rows = list(growth.offline(growth.PAIRWISE, 50, 2, "pca", 0))
    assert all(1 < row["samples"] < 100 for row in rows)


def test_v_comes_after_u_in_the_same_run():
    rows = list(growth.measured(growth.CORRELATED, 40, 6, lambda arms: {"denoiser": arms["denoiser"]}, 0))
    assert all(row["recovered"] == 1 for row in rows)
    assert 0.5 < np.mean([row["lag"] for row in rows]) < 4


# --- networks ----------------------------------------------------------------------------------------------------------------


def test_seeds_of_the_mixer_are_independent_of_each_other():
    one, three = (StackedMixer(seeds, width=8).requires_grad_(False) for seeds in (1, 3))
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(one(x, 0.4)[0], three(x, 0.4)[0])
    assert float((three(x, 0.4)[0] - three(x, 0.4)[1]).abs().max()) > 1e-3
    torch.testing.assert_close(three(x, torch.full((5,), 0.4)), three(x, 0.4))
    # Patches: a change of one pixel reaches its own token's output first, and through mixing all others.
    moved = x.clone()
    moved[:, 9] += 1
    assert bool(((three(moved, 0.4) - three(x, 0.4)).abs() > 0).all())


def test_summaries_of_a_curve_made_by_hand():
    #            step  data  clones
    rows = [(1, 4.0, 4.0), (10, 1.2, 1.3), (100, 1.0, 1.2), (1_000, 0.6, 1.4)]
    found = bias.summary([{"step": s, "data": d, "clones": c} for s, d, c in rows], 1.0)
    assert found["final"] == 0.6
    assert (found["pairwise_step"], found["half_step"], found["lag"]) == (10, 1_000, 100)
    assert found["early_gap"] == pytest.approx(0.1)
    assert found["early_share"] == pytest.approx(0.1 / 0.8)
    assert found["clone_turn"] == 100
    assert found["clone_rise"] == pytest.approx(1.4 / 1.2)
    never = bias.summary([{"step": s, "data": d, "clones": d - 0.1} for s, d, _ in rows], 1.0)
    assert (never["lag"], never["early_share"]) == (0, 1)


# --- a user's own ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("CAMERAREADY_HOME", str(tmp_path))


def corners(n=400, d=3):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(3)).sign() + 0.1 * torch.randn(
        n, d, generator=torch.Generator().manual_seed(4)
    )


@pytest.mark.usefixtures("home")
def test_a_users_data_get_a_network_in_training_and_a_users_model_is_judged():
    found = check("diffusion-information-exponent", on=corners().numpy(), tier="smoke", quiet=True)
    assert found.failures == []
    assert {"denoiser", "denoiser-on-clones", "wiener"} <= set(found.rows["arm"])

    # A model that is the posterior mean of independent signs: E[x1 | x_t] = tanh(t x / (1 - t)^2), as a velocity.
    def velocity(x, t, y=None):
        t = torch.as_tensor(t, dtype=x.dtype).expand(len(x))[:, None]
        return (torch.tanh(t * x / (1 - t).clamp_min(1e-3) ** 2) - x) / (1 - t).clamp_min(1e-3)

    found = check("diffusion-information-exponent", on=(velocity, corners()), tier="smoke", quiet=True)
    assert found.failures == []
    means = dict(found.rows.filter(pl.col("time") == 0.65).group_by("arm").agg(pl.col("error").mean()).iter_rows())
    assert means["denoiser"] < 0.6 * means["wiener"]


@pytest.mark.usefixtures("home")
def test_an_activation_of_the_users_is_one_more_arm():
    pair = (lambda x: np.sin(x), lambda x: np.cos(x))
    select = lambda arms: {"denoiser": arms["denoiser"], "mine": pair}  # noqa: E731
    rows = list(growth.measured(growth.FOURTH, 8, 2, select, 0))
    assert {row["arm"] for row in rows} == {"denoiser", "mine"}
    assert all(math.isfinite(row["samples"]) for row in rows)
    linear = growth.checked({"flat": (lambda x: x, np.ones_like)})["flat"]
    assert linear.limited  # no coupling at degree four: its runs end


def test_too_few_rows_are_told():
    problem = FlowProblem("few", corners(50))
    with pytest.raises(SpecError, match="100 or more"):
        list(bias.own(problem, Context(seed=0), runs=2, short=True))
    with pytest.raises(SpecError, match="array of data"):
        study.open_workload(value_spec(3).with_value(3))
    assert study.component("digits").times


# --- what ships ----------------------------------------------------------------------------------------------------------------


def test_shipped_rows_are_what_the_trial_gives():
    shipped = pl.read_parquet(Path(study.__file__).with_name("results.parquet")).filter(
        (pl.col("workload") == growth.PAIRWISE) & (pl.col("arm") == "overlaps-only") & (pl.col("d") == 25)
    )
    select = lambda arms: {"overlaps-only": arms["overlaps-only"]}  # noqa: E731
    again = list(growth.measured(growth.PAIRWISE, 25, growth.RUNS[growth.PAIRWISE], select, shipped["seed"][0]))
    wanted = dict(zip(shipped["run"], shipped["samples"], strict=True))
    # A processor that rounds otherwise may let a run pass a threshold a batch earlier or later.
    assert len(wanted) == growth.RUNS[growth.PAIRWISE]
    assert sum(abs(row["samples"] - wanted[row["run"]]) > 64 for row in again) <= 2
