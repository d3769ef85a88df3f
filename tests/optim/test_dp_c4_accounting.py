"""Epsilon against closed forms, dp-accounting and Opacus's accountant, and from the log alone."""

import json
import math

import pytest
from scipy.stats import norm

from cameraready.optim.dp_c4 import PrivacyLedger, Release, calibrate_noise, epsilon_from_log

pytestmark = pytest.mark.torch


def gaussian_delta(epsilon, noise_multiplier):
    """Exact delta of the Gaussian mechanism with sensitivity 1: Balle and Wang, 2018, arXiv:1805.06530, Theorem 8."""
    mu = 1.0 / noise_multiplier
    loss = norm.logcdf(-mu / 2.0 - epsilon / mu)
    return float(norm.cdf(mu / 2.0 - epsilon / mu) - math.exp(min(epsilon + loss, 0.0)))


def zcdp_epsilon(rho, delta):
    """The simple bound of zero-concentrated privacy: Bun and Steinke, 2016, arXiv:1605.02065."""
    return rho + 2.0 * math.sqrt(rho * math.log(1.0 / delta))


def full(noise, count=1):
    return [Release(step, "coupled", noise, 1.0, "full") for step in range(count)]


def poisson(noise, rate, count):
    return [Release(step, "difference", noise, 1.0, "poisson", rate=rate) for step in range(count)]


def cyclic(noises, parts):
    return [Release(s, "coupled", noise, 1.0, "cyclic", part=s % parts, parts=parts) for s, noise in enumerate(noises)]


def epsilon(releases, delta=1e-5, **options):
    return epsilon_from_log(PrivacyLedger(releases=list(releases)).log(), delta, **options)


@pytest.mark.parametrize(("noise", "count"), [(0.8, 1), (2.0, 1), (10.0, 50), (30.0, 400)])
def test_gaussian_releases_have_the_closed_form_epsilon(noise, count):
    """T releases with multiplier sigma are one with sigma / sqrt(T) (Balle and Wang, 2018)."""
    for accountant, slack in (("pld", 1e-3), ("rdp", 0.6)):
        found = epsilon(full(noise, count), accountant=accountant)
        single = noise / math.sqrt(count)
        assert gaussian_delta(found, single) <= 1e-5 * (1 + 1e-6)
        assert gaussian_delta(found - slack, single) > 1e-5


def test_zcdp_bounds_from_above():
    for noise, count in ((5.0, 10), (20.0, 100), (3.0, 100)):
        exact, bound = epsilon(full(noise, count)), zcdp_epsilon(count / (2 * noise**2), 1e-5)
        assert exact < bound < 1.6 * exact


def test_mixed_multipliers_compose_as_their_precisions_add():
    noises = [1.0, 4.0, 9.0, 2.5]
    mixed = [release for noise in noises for release in full(noise)]
    single = sum(noise**-2 for noise in noises) ** -0.5
    assert epsilon(mixed) == pytest.approx(epsilon(full(single)), rel=1e-9)


@pytest.mark.parametrize(("noise", "rate", "count"), [(2.0, 0.1, 200), (0.8, 0.02, 100)])
def test_poisson_samples_agree_with_dp_accounting_and_with_opacus(noise, rate, count):
    import dp_accounting
    from dp_accounting import pld
    from opacus.accountants import PRVAccountant, RDPAccountant

    releases = poisson(noise, rate, count)
    direct = pld.PLDAccountant()
    direct.compose(dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise)), count)
    assert epsilon(releases) == pytest.approx(direct.get_epsilon(1e-5), rel=1e-3)

    opacus = RDPAccountant()
    opacus.history = [(noise, rate, count)]
    assert epsilon(releases, accountant="rdp") == pytest.approx(opacus.get_epsilon(1e-5), rel=0.01)
    prv = PRVAccountant()
    prv.history = [(noise, rate, count)]
    assert epsilon(releases) == pytest.approx(prv.get_epsilon(1e-5), rel=0.01)
    assert epsilon(releases) < epsilon(releases, accountant="rdp") < epsilon(full(noise, count), accountant="rdp")


def test_small_budgets_of_many_steps_are_not_overstated():
    from opacus.accountants import PRVAccountant

    prv = PRVAccountant()
    prv.history = [(10.0, 0.01, 10_000)]
    assert epsilon(poisson(10.0, 0.01, 10_000)) == pytest.approx(prv.get_epsilon(1e-5, eps_error=0.002), rel=0.01)
    assert epsilon(full(100.0), 1e-9) == pytest.approx(epsilon(full(1_000.0, 100), 1e-9), rel=1e-3)


def test_hardly_any_noise_is_a_large_epsilon_soon_told():
    for noise in (0.01, 0.001):
        found = epsilon(full(noise))
        assert gaussian_delta(found, noise) <= 1e-5
        assert gaussian_delta(0.99 * found, noise) > 1e-5


def test_a_rate_of_one_is_full_participation():
    assert epsilon(poisson(3.0, 1.0, 7)) == epsilon(full(3.0, 7))


def test_fixed_parts_compose_in_parallel_and_the_worst_part_counts():
    assert epsilon(cyclic([3.0] * 12, 4)) == pytest.approx(epsilon(full(3.0, 3)))
    assert epsilon(cyclic([3.0] * 13, 4)) == pytest.approx(epsilon(full(3.0, 4)))  # the first part takes part once more
    assert epsilon(cyclic([3.0, 1.0, 3.0, 3.0], 2)) == pytest.approx(epsilon([*full(1.0), *full(3.0)]))
    both = [*cyclic([3.0] * 4, 4), *cyclic([3.0] * 2, 2)]  # two ways of parting the data may share records
    assert epsilon(both) == pytest.approx(epsilon(full(3.0, 2)))


def test_only_multipliers_matter_not_thresholds():
    small = [Release(0, "coupled", 2.0, 1e-9, "full")]
    assert epsilon(small) == epsilon(full(2.0))


def test_replacing_a_record_doubles_its_influence():
    for accountant in ("pld", "rdp"):
        twice = epsilon(full(4.0, 9), accountant=accountant, adjacency="replace-one")
        assert twice == pytest.approx(epsilon(full(2.0, 9), accountant=accountant))
    one = epsilon(poisson(2.0, 0.1, 50))
    assert one < epsilon(poisson(2.0, 0.1, 50), adjacency="replace-one") < 2.2 * one
    with pytest.raises(ValueError, match="replace-one"):
        epsilon(poisson(2.0, 0.1, 50), accountant="rdp", adjacency="replace-one")


def test_releases_without_noise_cost_everything_and_no_release_nothing():
    assert epsilon([]) == 0.0
    assert math.isinf(epsilon([*full(5.0, 3), *full(0.0)]))
    assert math.isinf(epsilon(poisson(0.0, 0.1, 1)))


def test_the_log_is_plain_json_and_refuses_what_it_cannot_read():
    ledger = PrivacyLedger(releases=[*full(3.0, 2), *poisson(2.0, 0.1, 5), *cyclic([2.0], 3)])
    text = json.dumps(ledger.log())
    assert epsilon_from_log(text, 1e-5) == epsilon_from_log(ledger.log(), 1e-5)
    for wrong in ({"version": 99, "releases": []}, {"releases": []}, {"version": 1}):
        with pytest.raises(ValueError, match="expected a log"):
            epsilon_from_log(wrong, 1e-5)
    with pytest.raises(ValueError, match="delta"):
        epsilon_from_log(text, 0.0)
    with pytest.raises(ValueError, match="accountant"):
        epsilon_from_log(text, 1e-5, accountant="moments")
    with pytest.raises(ValueError, match="adjacency"):
        epsilon_from_log(text, 1e-5, adjacency="bounded")
    for text in ("[]", "null", "3", "{", '{"version": 1, "releases": 3}', '{"version": 1, "releases": [{"noise": 1}]}'):
        with pytest.raises(ValueError, match="expected a log"):
            epsilon_from_log(text, 1e-5)
    for wrong in (
        {"noise_multiplier": -1.0},
        {"noise_multiplier": math.inf},
        {"noise_multiplier": "2"},
        {"threshold": math.nan},
        {"rate": 0.0},
        {"rate": 0.5},
        {"participation": "shuffled"},
        {"part": 2, "parts": 2},
        {"part": 0.1, "parts": 2, "participation": "cyclic"},
        {"parts": 2},
    ):
        with pytest.raises(ValueError, match="must be"):
            Release(
                **{"step": 0, "kind": "x", "noise_multiplier": 1.0, "threshold": 1.0, "participation": "full", **wrong}
            )


@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one"])
@pytest.mark.parametrize("plan", [lambda s: full(s, 40), lambda s: poisson(s, 0.05, 60), lambda s: cyclic([s] * 30, 5)])
def test_calibrated_noise_is_enough_and_no_more_than_that(plan, adjacency):
    noise = calibrate_noise(plan, 1.5, 1e-5, adjacency=adjacency)
    assert epsilon(plan(noise), adjacency=adjacency) <= 1.5
    assert epsilon(plan(noise * 0.999), adjacency=adjacency) > 1.5 * 0.995


def test_targets_that_cannot_be_met_are_refused():
    with pytest.raises(ValueError, match="target_epsilon"):
        calibrate_noise(lambda s: full(s), -1.0, 1e-5)
    with pytest.raises(ValueError, match="no noise multiplier"):
        calibrate_noise(lambda s: full(0.0), 1.0, 1e-5)


def test_a_file_outlives_its_run(tmp_path):
    """A run that breaks off after a checkpoint has released more than the checkpoint knows."""
    first = PrivacyLedger(tmp_path / "log.jsonl")
    for release in full(3.0, 2):
        first.add(release)
    checkpoint = first.log()
    for release in full(3.0, 5)[2:]:
        first.add(release)

    second = PrivacyLedger(tmp_path / "log.jsonl")
    second.restore(checkpoint)
    assert len(second.releases) == 5
    second.add(Release(2, "coupled", 3.0, 1.0, "full"))
    assert epsilon_from_log(second.log(), 1e-5) == pytest.approx(epsilon(full(3.0, 6)))
    third = PrivacyLedger(tmp_path / "log.jsonl")
    assert len(third.releases) == 6
    forgetful = PrivacyLedger()
    forgetful.restore(checkpoint)
    assert len(forgetful.releases) == 2


def test_a_line_that_broke_off_is_taken_out_and_any_other_fault_is_named(tmp_path):
    path = tmp_path / "log.jsonl"
    ledger = PrivacyLedger(path)
    for release in full(3.0, 3):
        ledger.add(release)
    path.write_text(path.read_text()[:-20])
    with pytest.warns(UserWarning, match="broken off"):
        again = PrivacyLedger(path)
    assert len(again.releases) == 2
    again.add(full(3.0)[0])
    path.write_text(path.read_text() + "\n")  # a blank line is no fault
    assert len(PrivacyLedger(path).releases) == 3
    path.write_text("{}\n" + path.read_text())
    with pytest.raises(ValueError, match="line 1"):
        PrivacyLedger(path)
