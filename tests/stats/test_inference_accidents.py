"""What happens by accident to traces, streams and fitted models: handlers that stop, solvers that stop early, sets."""

from __future__ import annotations

import warnings

import networkx as nx
import numpy as np
import pandas as pd
import pytest
from scipy import sparse
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LinearRegression, LogisticRegression, Ridge
from sklearn.svm import SVC, LinearSVC

from cameraready.stats.atc import ATC
from cameraready.stats.bpop import PartialOrderModel, compile, read_traces
from cameraready.stats.erm import AsymptoticErrorEstimator, matching_erm

DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(120, 10))
CLASSES = (X[:, 0] + DRAW.normal(size=120) > 0).astype(int)


def test_a_handler_that_raises_stop_iteration_fails_and_ends():
    graph = nx.DiGraph([("a", "b")])
    run = compile(graph, {"a": lambda inputs, done: next(iter([])), "b": lambda inputs, done: 1}).run()
    assert run.status == {"a": "failed", "b": "cancelled"}
    assert "StopIteration" in str(run.errors["a"])


@pytest.mark.parametrize(
    ("log", "error", "message"),
    [
        ([{"a", "b"}], TypeError, "is a set"),
        ([["a", pd.NA]], ValueError, "missing action"),
        ([["a", np.ones(2)]], TypeError, "name actions by text"),
    ],
)
def test_traces_that_are_none(log, error, message):
    with pytest.raises(error, match=message):
        read_traces(log)


def test_times_as_text_sort_as_time_or_are_refused():
    names = {"case": "case", "activity": "step", "timestamp": "time"}
    table = pd.DataFrame({"case": 1, "step": ["x", "y"], "time": ["9:00", "10:00"]})
    with pytest.raises(ValueError, match="does not sort as time"):
        read_traces(table, **names)
    table["time"] = ["2024-01-09", "2024-01-10"]
    assert read_traces(table, **names) == [("x", "y")]


def test_thinning_that_leaves_no_draw_is_refused():
    with pytest.raises(ValueError, match="leaves no draw"):
        PartialOrderModel(n_iter=400, thin=1_000)


def test_a_detectors_parameters_are_fixed_once_it_has_seen_samples():
    detector = ATC(sigma=1.0)
    detector.threshold = 5.0
    detector.update(0.0)
    for name in ("threshold", "sigma"):
        with pytest.raises(AttributeError, match="cannot change once samples were seen"):
            setattr(detector, name, 2.0)
    assert detector.reset().n_samples == 0
    detector.sigma = 2.0


def test_a_solver_that_stops_early_is_told():
    wide = DRAW.normal(size=(60, 90))
    labels = (wide[:, 0] + DRAW.normal(size=60) > 0).astype(int)
    with pytest.warns(ConvergenceWarning, match="give the estimator a smaller tol"):
        AsymptoticErrorEstimator(LogisticRegression(C=1e4)).fit(wide, labels)
    with pytest.warns(ConvergenceWarning, match="give the estimator a smaller tol"):
        AsymptoticErrorEstimator(Ridge(0.1, solver="lsqr", tol=0.1)).fit(wide, wide[:, 0])
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        for estimator in (LogisticRegression(), LogisticRegression(C=0.1), LinearSVC()):
            AsymptoticErrorEstimator(estimator).fit(X, CLASSES)
        for estimator in (Ridge(), Ridge(10.0), LinearRegression()):
            AsymptoticErrorEstimator(estimator).fit(X, X[:, 0] + CLASSES)


def test_another_kind_of_target_leaves_nothing_behind():
    estimator = AsymptoticErrorEstimator(LogisticRegression()).fit(X, CLASSES)
    numbers = X[:, 0] + DRAW.normal(size=120)
    fresh = AsymptoticErrorEstimator(Ridge(3.0)).fit(X, numbers)
    estimator.set_params(estimator=Ridge(3.0)).fit(X, numbers)
    assert not hasattr(estimator, "classes_")
    assert estimator.margin_law().mean == fresh.margin_law().mean
    with pytest.raises(ValueError, match=r"interpol|fitted exactly"):
        estimator.set_params(estimator=LinearRegression()).fit(X[:8], numbers[:8])
    assert estimator.test_error_ == fresh.test_error_


def test_a_class_of_one_row_is_counted():
    labels = np.zeros(120, dtype=int)
    labels[3] = 1
    estimator = AsymptoticErrorEstimator(LogisticRegression()).fit(X, labels)
    assert 0 <= estimator.test_error_ <= 0.1
    assert estimator.normal_weight_ == 0
    with pytest.raises(ValueError, match="one row"):
        AsymptoticErrorEstimator(LogisticRegression(), law="normal").fit(X, labels)


def test_sparse_rows_and_strengths_that_are_none():
    dense = AsymptoticErrorEstimator(SVC(kernel="linear")).fit(X, CLASSES)
    assert AsymptoticErrorEstimator(SVC(kernel="linear")).fit(
        sparse.csr_matrix(X), CLASSES
    ).test_error_ == pytest.approx(dense.test_error_, abs=0.02)
    for estimator in (LinearSVC(C=-1), SVC(kernel="linear", C=0)):
        with pytest.raises(ValueError, match="C must be positive"):
            matching_erm(estimator, 100)
    with pytest.raises(ValueError, match="n_samples must be at least 2"):
        matching_erm(Ridge(), np.nan)
