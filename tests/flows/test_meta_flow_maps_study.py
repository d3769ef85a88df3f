"""The study's competitors and rulers are what they say, on laws that are known."""

import dataclasses
import math

import polars as pl
import pytest
import torch

from cameraready.evidence.checking import check
from cameraready.evidence.specs import SpecError, value_spec
from cameraready.flows._toy.tilts import QuadraticReward, tilted
from cameraready.flows.meta_flow_maps import PosteriorFlow
from cameraready.flows.meta_flow_maps.experiment import calibration, problems, quality, rewarding, tilting, trials
from cameraready.flows.meta_flow_maps.experiment.problems import SIXTEEN, Problem, rare_mode, two_modes
from cameraready.flows.meta_flow_maps.study import STUDY
from tests.flows.mfm_exact import generator

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def problem():
    """Two modes, a linear reward, and draws of the teacher's inner flow in place of a trained map."""
    mixture = two_modes()
    single = mixture.to(torch.float32)
    flow = PosteriorFlow(single.velocity(), steps=6)
    reward = QuadraticReward(torch.tensor([1.0]))
    return Problem("exact", (1,), single.velocity(), single.sample, flow, reward, 1.0, mixture)


def test_the_best_of_n_is_the_largest_of_n_samples_and_pays_for_each(problem):
    found = rewarding.best_of(50)(problem, 200, 8, generator(1))
    assert (found.network_calls, found.reward_calls) == (400, 50)
    singles = rewarding.best_of(1)(problem, 10_000, 8, generator(2)).x
    level = singles[:, 0].quantile(0.5 ** (1 / 50))  # the median of the largest of 50
    assert abs(float((found.x[:, 0] > level).double().mean()) - 0.5) < 0.15


def test_particles_of_the_resampled_diffusion_follow_the_tilt(problem):
    """With one particle nothing is resampled: the base law. With many, a particle that is not picked for its reward would have the tilted law."""
    alone = rewarding.smc(1)(problem, 3000, 1.0, generator(1)).x
    assert abs(float(alone.mean()) - float(problem.mixture.mean())) < 0.08
    flat = dataclasses.replace(problem, reward=lambda x: 0 * x[:, 0])
    same = rewarding.smc(8)(flat, 1000, 1.0, generator(1)).x
    assert abs(float((same > 0).double().mean()) - 0.4) < 0.06
    goal = tilted(problem.mixture, problem.reward)
    many = rewarding.smc(64)(problem, 50, 1.0, generator(2))
    assert float(many.x.mean()) > float(goal.mean())  # the best one of them
    assert (many.network_calls, many.reward_calls) == (32 * 64, 33 * 64)


def test_steered_particles_reach_the_tilted_law(problem):
    for method in ("grad", "weights"):
        found = rewarding.steered(method, 16)(problem, 300, 1.0, generator(3))
        assert abs(float(found.x.mean()) - float(tilted(problem.mixture, problem.reward).mean())) < 0.15


def test_exact_draws_are_as_far_from_exact_draws_as_can_be_seen_and_points_are_far(problem):
    arms = {
        "flow": lambda x, t, n, g: PosteriorFlow(problem.teacher, steps=12).sample_posterior(x, t, n, generator=g),
        "point": lambda x, t, n, g: problem.mixture.posterior(x.double(), t).mean.float().expand(n, *x.shape),
    }
    rows = pl.DataFrame(list(calibration.posterior(problem, arms, runs=3)))
    energy = dict(rows.group_by("arm").agg(pl.col("energy").mean()).iter_rows())
    assert abs(energy["exact"]) < 0.01
    assert energy["flow"] < 0.03
    assert energy["point"] > 0.4
    spread = dict(rows.group_by("arm").agg(pl.col("spread_ratio").mean()).iter_rows())
    assert spread["flow"] == pytest.approx(1, abs=0.05)
    assert spread["point"] < 1e-4


def test_biases_are_those_of_the_gradient_of_the_analytic_value(problem):
    small = dataclasses.replace(problem, name="two-modes")
    rows = pl.DataFrame(list(calibration.gradients(small, runs=6)))
    bias = dict(rows.group_by("arm").agg(pl.col("squared_bias").mean()).iter_rows())
    assert set(bias) == {"dps", "map-1", "map-4", "flow-1", "flow-4"}
    assert bias["dps"] > 1e-5
    error = dict(rows.group_by("arm").agg(pl.col("error").mean()).iter_rows())
    assert error["flow-4"] < 0.75 * error["flow-1"]
    truth = calibration._gradient_of_value(problem, problem.reward, torch.zeros(2, 1), torch.tensor([0.0, 0.5]))
    assert float(truth[0].abs()) < 1e-6  # a state at t = 0 tells nothing
    assert float(truth[1]) > 0.1


def test_what_remains_is_one_for_the_base(problem):
    (row,) = tilting.ends(dataclasses.replace(problem, name="two-modes"), "not-tuned", runs=1)
    assert row["remaining"] == pytest.approx(1)
    assert row["energy"] > 0.01


def test_few_steps_of_an_exact_map_are_as_good_as_data(problem):
    class Jump:
        def sample(self, shape, *, steps, kernel, generator):
            return problem.draw(shape[0], generator)

    rows = pl.DataFrame(list(quality.few_steps(dataclasses.replace(problem, mfm=Jump()), runs=2)))
    far = dict(rows.group_by("arm").agg(pl.col("distance").mean()).iter_rows())
    assert abs(far["mfm"]) < 0.01
    assert abs(far["teacher-many"]) < 0.01
    assert far["teacher"] > 0.05


def test_the_rare_mode_is_rare_and_its_reward_tells_it_apart():
    mixture = rare_mode()
    assert float(mixture.weights[-1]) == pytest.approx(0.005)
    reward = QuadraticReward.closeness(mixture.means[-1], 1.5)
    others = mixture.sample(2000, generator(), labels=torch.zeros(2000, dtype=torch.long))
    mine = mixture.sample(2000, generator(), labels=torch.full((2000,), 5))
    assert float(reward(mine).min()) > float(reward(others).quantile(0.999))
    goal = tilted(mixture, reward.scaled(2.0))
    assert float(goal.weights[-1]) > 0.5
    assert SIXTEEN == "rare-mode"


def test_a_users_velocity_and_map_are_taken_as_they_come(monkeypatch, tmp_path):
    """A user's flow gets a map trained on it, and a user's own sampler is one more arm."""
    data = two_modes().sample(400, generator()).float()

    def velocity(x, t, y=None):
        return two_modes().velocity()(x, t)

    def own(x, t, n, generator):
        return two_modes().posterior_sample(x.double(), t, n, generator).float()

    monkeypatch.setattr(problems, "OWN_STEPS", 15)
    monkeypatch.setenv("CAMERAREADY_HOME", str(tmp_path))
    result = check("meta-flow-maps", on=(velocity, data), with_={"own": own}, tier="smoke", quiet=True)
    assert [f.error for f in result.failures] == []
    energy = dict(
        result.rows.filter(pl.col("part") == "posterior").group_by("arm").agg(pl.col("energy").mean()).iter_rows()
    )
    assert energy["own"] < 0.1 < energy["teacher-1"]
    assert math.isfinite(energy["mfm"])
    for wrong, words in ((3, "not int"), (lambda x, t, n, generator: x, "draws of shape")):
        with pytest.raises((TypeError, ValueError), match=words):
            trials._drawer(wrong)(data[:4], 0.5, 2, generator())


def test_a_velocity_that_needs_labels_is_told_before_anything_is_trained():
    data, labels = two_modes().sample(64, generator()).float(), torch.arange(64) % 2
    given = (lambda x, t, y: two_modes().velocity()(x, t) + 0 * y[:, None], data, labels)
    with pytest.raises(SpecError, match=r"without labels.*y=None"):
        STUDY.open(value_spec(given).with_value(given))
