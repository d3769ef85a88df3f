"""ATC in a stream: loop and batch agree, state survives, bad input is refused without loss, river takes it."""

import copy
import json
import math
import pickle
import signal

import numpy as np
import pytest

from cameraready.stats.atc import ATC, atc


def stream(n=900, d=None, seed=0):
    generator = np.random.default_rng(seed)
    level = np.repeat([0.0, 2.0, -1.0], n // 3)
    return level + generator.normal(size=n) if d is None else level[:, None] + generator.normal(size=(n, d))


VARIANTS = [
    {},
    {"scan": "geometric"},
    {"sigma": "mad"},
    {"sigma": "mad", "scan": "geometric", "warmup": 8},
    {"threshold": 5.0, "sigma": 0.9},
]


def said(detector):
    return (
        detector.predict_one(),
        detector.drift_detected,
        detector.last_change,
        detector.last_restart,
        detector.statistic,
        detector.current_threshold,
        detector.n_samples,
        detector.n_alarms,
    )


@pytest.mark.parametrize("options", VARIANTS)
def test_loop_batch_and_pieces_are_the_same_to_the_last_bit(options):
    x = stream()
    x[[0, 5, 310, 311]] = np.nan
    options = {**options, "missing": "skip"}
    batch, loop, pieces = atc(x, **options), ATC(**options), ATC(**options)
    assert len(batch.alarms) >= 2
    alarms = []
    for i, value in enumerate(x):
        np.testing.assert_equal(loop.predict_one(), batch.prediction[i])
        assert loop.update(value) is loop
        np.testing.assert_equal(loop.statistic, batch.statistic[i])
        np.testing.assert_equal(loop.current_threshold, batch.threshold[i])
        if loop.drift_detected:
            alarms.append((i, loop.last_change))
            assert loop.last_restart == i
            assert loop.predict_one() == pytest.approx(value)
    assert alarms == list(zip(batch.alarms.tolist(), batch.changes.tolist(), strict=True))
    for part in np.array_split(x, [1, 2, 300, 313, 700]):
        pieces.learn_many(part)
    np.testing.assert_equal(said(pieces), said(loop))
    np.testing.assert_equal(said(batch.detector), said(loop))


@pytest.mark.parametrize("options", VARIANTS)
@pytest.mark.parametrize("d", [None, 3])
def test_copies_of_every_kind_go_on_like_the_original(options, d):
    if d and "threshold" in options:
        options = {**options, "sigma": [0.9, 1.0, 1.1], "threshold": 6.0}
    x = stream(d=d)
    for cut in (0, 1, 400):
        original = ATC(**options).learn_many(x[:cut])
        text = json.dumps(original.state_dict())
        twins = [
            pickle.loads(pickle.dumps(original)),
            copy.deepcopy(original),
            ATC.from_state(json.loads(text)),
            original.clone(include_attributes=True),
        ]
        fresh = original.clone()
        original.learn_many(x[cut:])
        for twin in twins:
            for sample in x[cut:]:
                twin.update(sample)
            np.testing.assert_equal(said(twin), said(original))
        assert fresh.n_samples == 0
        np.testing.assert_equal(said(fresh.learn_many(x)), said(original))
        np.testing.assert_equal(said(copy.deepcopy(original).reset().learn_many(x)), said(original))


def test_a_copy_does_not_share_state():
    original = ATC().learn_many([1.0, 2.0, 3.0])
    before = said(original)
    for twin in (copy.copy(original), copy.deepcopy(original), ATC.from_state(original.state_dict())):
        twin.learn_many(np.full(50, 100.0))
        assert said(original) == before


def test_a_broken_state_is_refused_with_a_sentence():
    state = ATC().learn_many(stream()).state_dict()
    with pytest.raises(ValueError, match="no state of an ATC"):
        ATC.from_state({"weights": [1.0]})
    with pytest.raises(ValueError, match="lacks _marks"):
        ATC.from_state({**state, "arrays": {k: v for k, v in state["arrays"].items() if k != "_marks"}})
    with pytest.raises(ValueError, match="_counts has shape"):
        ATC.from_state({**state, "arrays": {**state["arrays"], "_counts": [1, 2, 3]}})
    for bad in ([10**6] * 12, [-1] * 12):
        with pytest.raises(ValueError, match="counts do not fit"):
            ATC.from_state({**state, "arrays": {**state["arrays"], "_counts": bad}})


# --- edge cases -------------------------------------------------------------------------------------------------------


def test_before_and_at_the_first_sample():
    detector = ATC()
    assert math.isnan(detector.predict_one())
    assert (detector.drift_detected, detector.n_samples, detector.last_change, detector.statistic) == (
        False,
        0,
        -1,
        0.0,
    )
    detector.update(4.0)
    assert (detector.predict_one(), detector.drift_detected, detector.statistic) == (4.0, False, 0.0)
    result = atc([4.0])
    assert np.isnan(result.prediction).tolist() == [True]
    assert (result.alarms.size, result.breakpoints) == (0, [1])
    empty = atc([])
    assert (len(empty.prediction), empty.breakpoints, empty.detector.n_samples) == (0, [0], 0)


@pytest.mark.parametrize("sigma", [1.0, "mad"])
def test_a_constant_stream_never_alarms_and_a_step_after_it_does(sigma):
    result = atc(np.full(5000, 1.1), sigma=sigma)
    assert len(result.alarms) == 0
    assert (result.statistic == 0).all()
    assert result.prediction[1:] == pytest.approx(1.1)
    step = atc(np.r_[np.full(400, 7.0), np.full(20, 70.0)], sigma=sigma)
    assert step.changes.tolist() == [400]
    assert step.prediction[-1] == pytest.approx(70.0)


def test_one_constant_stream_among_several_has_no_say():
    x = stream()
    both = atc(np.c_[x, np.full(900, 3.0)], sigma="mad", threshold=1e90)
    np.testing.assert_allclose(both.statistic, atc(x, sigma="mad", threshold=1e90).statistic)


def test_mostly_equal_counts_have_a_spread():
    """The median difference is 0; the root mean square steps in."""
    generator = np.random.default_rng(0)
    counts = np.r_[generator.poisson(0.15, 1500), generator.poisson(3.0, 60)]
    result = atc(counts, sigma="mad")
    assert result.detector.noise[0] > 0
    assert len(result.alarms) >= 1
    assert abs(result.changes[0] - 1500) <= 3


@pytest.mark.parametrize("bad", [math.inf, -math.inf, 1e101, np.float32(np.inf)])
@pytest.mark.parametrize("missing", ["raise", "skip"])
def test_infinite_and_absurd_values_are_refused_and_change_nothing(bad, missing):
    detector = ATC(missing=missing).learn_many(stream())
    before = said(detector)
    with pytest.raises(ValueError, match="sample 900 is"):
        detector.update(bad)
    with pytest.raises(ValueError, match="sample 902 is"):
        detector.learn_many([1.0, 2.0, bad, 3.0])
    assert said(detector) == before


def test_a_nan_raises_unless_it_may_be_skipped():
    detector = ATC().learn_many(stream())
    before = said(detector)
    for call in (lambda: detector.update(math.nan), lambda: detector.learn_many([math.nan, 0.0])):
        with pytest.raises(ValueError, match="sample 900 is NaN; missing='skip'"):
            call()
    assert said(detector) == before
    # A skipped sample is as if it had never been there, but for positions.
    x = stream()
    holes = np.insert(x, [10, 10, 305, 600], np.nan)
    whole, holed = atc(x), atc(holes, missing="skip")
    kept = np.flatnonzero(~np.isnan(holes))
    assert kept[whole.alarms].tolist() == holed.alarms.tolist()
    assert holed.detector.n_missing == 4
    np.testing.assert_array_equal(holed.prediction[kept], whole.prediction)
    np.testing.assert_array_equal(holed.statistic[kept], whole.statistic)
    assert all(holes[c - 1 : c + 1].size for c in holed.changes)
    assert np.isnan(holed.statistic[10])
    nothing = atc([np.nan, np.nan], missing="skip")
    assert (nothing.detector.n_missing, math.isnan(nothing.detector.predict_one())) == (2, True)


def test_huge_values_are_tracked_like_small_ones():
    x = stream()
    for size in (1e90, 1e-90):
        result = atc(size * x, sigma=size)
        assert result.alarms.tolist() == atc(x).alarms.tolist()
        np.testing.assert_allclose(result.prediction / size, atc(x).prediction, rtol=1e-9)
    jump = atc(np.r_[np.zeros(50), 1e99, 1e99], sigma=1e-90)
    assert jump.alarms.tolist() == [50]
    assert np.isfinite(jump.prediction[1:]).all()


@pytest.mark.parametrize(
    ("x", "error", "words"),
    [
        (np.zeros((3, 2, 2)), ValueError, r"\(n,\) or \(n, n_streams\)"),
        (np.zeros((3, 0)), ValueError, "n_streams"),
        (3.0, ValueError, "shape"),
        (["a", "b"], TypeError, "must be numbers"),
        ([1.0, None, "x"], TypeError, "must be numbers"),
        (np.array(["2020-01-01"], dtype="datetime64[D]"), TypeError, "must be numbers"),
        (np.array([1 + 2j]), TypeError, "must be numbers"),
    ],
)
def test_other_shapes_and_types_are_refused(x, error, words):
    with pytest.raises(error, match=words):
        atc(x)


def test_integers_booleans_and_single_precision_are_numbers():
    for made in (np.arange(5), np.array([True, False]), np.float32([0.5, 1.5]), [1, 2.5]):
        assert atc(made).detector.predict_one() == pytest.approx(np.mean(np.asarray(made, dtype=float)))
    assert ATC().update(True).update(np.int8(3)).update(np.float32(0.5)).predict_one() == pytest.approx(1.5)


def test_columns_of_tables_are_taken_with_their_own_missing_values():
    pd, pl = pytest.importorskip("pandas"), pytest.importorskip("polars")
    x = [1.0, None, 3.0, 2.0]
    for column in (
        pd.Series(x),
        pd.Series([1, None, 3, 2], dtype="Int64"),
        pl.Series(x),
        x,
        pd.Series(x, dtype=object),
    ):
        result = atc(column, missing="skip")
        assert (result.detector.n_missing, result.detector.predict_one()) == (1, 2.0)
        assert result.prediction.shape == (4,)
        with pytest.raises(ValueError, match="sample 1 is NaN"):
            atc(column)
    table = pd.DataFrame({"a": pd.array([1, None], dtype="Int64"), "b": [2.0, 3.0]})
    assert atc(table, missing="skip").detector.predict_one().tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sigma": 0.0}, "positive and finite"),
        ({"sigma": -1.0}, "positive and finite"),
        ({"sigma": [1.0, math.nan]}, "positive and finite"),
        ({"sigma": "std"}, "'mad'"),
        ({"alpha": 0.0}, "between 0 and 1"),
        ({"alpha": 1.0}, "between 0 and 1"),
        ({"scan": "focus"}, "'exact' or 'geometric'"),
        ({"threshold": 0}, "positive number"),
        ({"threshold": "tuned"}, "positive number"),
        ({"threshold": math.inf}, "positive number"),
        ({"warmup": 2}, "at least 8"),
        ({"missing": "ignore"}, "'raise' or 'skip'"),
    ],
)
def test_parameters_out_of_range_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        ATC(**options)


def test_the_number_of_streams_must_stay_and_dicts_keep_their_keys():
    detector = ATC().update([1.0, 2.0])
    with pytest.raises(ValueError, match="3 streams, expected 2"):
        detector.update([1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="1 streams, expected 2"):
        detector.update(1.0)
    with pytest.raises(ValueError, match="2 streams, expected 3"):
        ATC(sigma=[1.0, 1.0, 1.0]).update([1.0, 2.0])
    with pytest.raises(ValueError, match="arrays so far, got a dict"):
        detector.update({"a": 1.0, "b": 2.0})
    named = ATC().update({"cpu": 1.0, "memory": 5.0}).update({"memory": 7.0, "cpu": 2.0})
    assert named.predict_one() == {"cpu": 1.5, "memory": 6.0}
    with pytest.raises(ValueError, match="keys cpu, memory"):
        named.update({"cpu": 1.0})
    assert ATC.from_state(json.loads(json.dumps(named.state_dict()))).predict_one() == named.predict_one()


def learn_for_ever(detector, x):
    while True:
        detector.learn_many(x)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs POSIX timers")
def test_an_interrupt_loses_nothing():
    x = np.tile(stream(9_000), 400)

    def interrupt(signum, frame):
        raise KeyboardInterrupt

    ATC().learn_many(x[:10])  # compiled before the clock runs
    detector = ATC()
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.25)
        with pytest.raises(KeyboardInterrupt):
            learn_for_ever(detector, x)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    done = detector.n_samples
    assert done > 0
    position = done % len(x)
    detector.learn_many(x[position : position + 20_000])
    replay = ATC().learn_many(np.resize(x, done)).learn_many(x[position : position + 20_000])
    assert said(detector) == said(replay)


def test_importing_the_package_does_not_import_the_compiler():
    import subprocess
    import sys

    code = "import sys, cameraready.stats.atc as a; a.ATC(); print('numba' in sys.modules, 'river' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        == "False False\n"
    )


# --- river ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("native", [False, True])
def test_river_retrains_a_model_at_its_alarms(native):
    pytest.importorskip("river")
    from river import drift, naive_bayes

    detector = ATC(sigma=0.5).to_river() if native else ATC(sigma=0.5)
    model = drift.DriftRetrainingClassifier(
        naive_bayes.GaussianNB(), drift_detector=detector, train_in_background=False
    )
    generator = np.random.default_rng(0)
    right = []
    for i in range(1200):
        x = {"a": float(generator.normal()), "b": float(generator.normal())}
        y = bool(x["a"] > 0) ^ (i >= 600)  # the labels swap
        right.append(model.predict_one(x) == y)
        model.learn_one(x, y)
    assert model.drift_detector.n_alarms >= 1
    assert np.mean(right[300:600]) > 0.9
    assert np.mean(right[-300:]) > 0.9


def test_it_becomes_a_detector_of_rivers_own():
    pytest.importorskip("river")
    from river import base, drift, naive_bayes

    x = stream()
    half = ATC("mad", alpha=0.01).learn_many(x[:400])
    native = half.to_river()
    assert isinstance(native, base.DriftDetector)
    np.testing.assert_equal(said(native), said(half))
    np.testing.assert_equal(
        said(pickle.loads(pickle.dumps(native)).learn_many(x[400:])), said(half.learn_many(x[400:]))
    )
    assert native.n_samples == 400
    model = drift.DriftRetrainingClassifier(naive_bayes.GaussianNB(), drift_detector=native, train_in_background=False)
    cloned = model.clone().drift_detector
    assert (cloned.n_samples, cloned.sigma, cloned.alpha) == (0, "mad", 0.01)


def test_river_takes_it_in_an_adaptive_forest():
    pytest.importorskip("river")
    from river import forest

    model = forest.ARFClassifier(n_models=2, seed=0, drift_detector=ATC(0.5), warning_detector=ATC(0.5, alpha=0.5))
    generator = np.random.default_rng(0)
    for i in range(600):
        x = {"a": float(generator.normal())}
        model.learn_one(x, bool(x["a"] > 0) ^ (i >= 300))
    assert model.n_drifts_detected() >= 1


def test_a_long_stream_costs_the_same_at_its_end():
    """Work is counted, not timed: the splits looked at per sample stay near 2 log(L)."""
    detector = ATC()
    looked = []
    for part in np.split(np.random.default_rng(1).normal(size=200_000), 400):
        detector.learn_many(part)
        looked.append(detector.n_splits)
    assert np.mean(looked[-100:]) < 2 * math.log(200_000) + 4
