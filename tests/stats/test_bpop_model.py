"""The estimator and its posterior: what goes in, what comes out, and what it says of odd traces."""

import itertools
import math
import warnings

import networkx as nx
import numpy as np
import pandas as pd
import polars as pl
import pytest

from cameraready.stats.bpop import (
    ConvergenceWarning,
    InterruptedFitWarning,
    LatentPrior,
    PartialOrderModel,
    PosetPosterior,
    posets,
    read_traces,
)
from cameraready.stats.bpop import posterior as posterior_module
from cameraready.stats.bpop.inference.diagnostics import calibration_table, effective_size, split_rhat, waic

TRUTH = nx.DiGraph([("net", "subnet"), ("net", "rule"), ("subnet", "server"), ("rule", "server"), ("ip", "bind"), ("server", "bind")])  # fmt: skip
ACTIONS = list(TRUTH)


def quick(**options):
    return PartialOrderModel(**{"n_iter": 6_000, "chains": 2, "seed": 0, **options})


def closed(graph, actions):
    relation = nx.to_numpy_array(graph, nodelist=actions) > 0
    return posets.closure(relation)


def traces_of(graph, count, *, eps=0.0, seed=0):
    actions, generator = list(graph), np.random.default_rng(seed)
    order = closed(graph, actions)
    return [[actions[i] for i in posets.frontier_walk(order, generator, beta=1, eps=eps)] for _ in range(count)]


@pytest.fixture(scope="module")
def fitted():
    return PartialOrderModel(n_iter=20_000, seed=0).fit(traces_of(TRUTH, 40, eps=0.03))


# --- what comes out ------------------------------------------------------------------------------------------------


def test_the_graph_is_the_reduced_truth_and_closed_on_request(fitted):
    assert set(fitted.graph().edges) == set(TRUTH.edges)
    assert set(fitted.graph(reduced=False).edges) == set(nx.transitive_closure(TRUTH).edges)
    probability = nx.get_edge_attributes(fitted.graph(), "probability")
    for (first, second), value in probability.items():
        assert value == pytest.approx(fitted.edge_probability.loc[first, second])
        assert value > 1 / 3


def test_drawn_orders_are_strict_partial_orders(fitted):
    for order in fitted.sample_orders(50, seed=1):
        np.testing.assert_array_equal(posets.closure(order), order)
    assert len(fitted.sample_orders()) == 4 * fitted.orders.shape[1]
    np.testing.assert_allclose(fitted.edge_probability, fitted.sample_orders().mean(axis=0))


def test_predictions_obey_the_chain_rule(fitted):
    """The predictive probability of a trace is the product of the predictions along it."""
    for trace in (traces_of(TRUTH, 1, seed=9)[0], list(reversed(ACTIONS))):
        steps = [fitted.predict_next(trace[:t])[trace[t]] for t in range(len(trace))]
        assert math.log(math.prod(steps)) == pytest.approx(fitted.log_likelihood(trace), rel=1e-9)


def test_predictions_add_up_to_one_and_the_likeliest_comes_first(fitted):
    for prefix in ([], ["net"], ["net", "rule"], ["bind", "server"]):
        found = fitted.predict_next(prefix)
        assert sum(found.values()) == pytest.approx(1)
        assert list(found.values()) == sorted(found.values(), reverse=True)
        assert set(found) == set(ACTIONS) - set(prefix)
    assert next(iter(fitted.predict_next())) == "net"
    assert fitted.predict_next(ACTIONS) == {}
    assert set(fitted.predict_next(["net"], choice_set=["net", "rule", "ip"])) == {"rule", "ip"}


def test_predictive_probabilities_of_all_traces_add_up_to_one():
    model = quick().fit([["a", "b", "c"], ["a", "c", "b"]])
    total = sum(math.exp(model.log_likelihood(trace)) for trace in itertools.permutations("abc"))
    assert total == pytest.approx(1)
    assert model.log_likelihood([]) == 0.0


def test_coverage_counts_free_pairs_that_were_seen_both_ways():
    free = nx.DiGraph([("a", "d")])
    free.add_nodes_from("bc")
    model = quick().fit([["a", "b", "c", "d"], ["b", "a", "c", "d"]])
    assert model.coverage(free) == pytest.approx(1 / 5)  # of ab, ac, bc, bd, cd only ab
    chain = nx.DiGraph([("a", "b"), ("b", "c"), ("c", "d")])
    assert model.coverage(chain) == 1.0
    with pytest.raises(ValueError, match="differ: e"):
        model.coverage(nx.DiGraph([("a", "e"), ("b", "c"), ("c", "d")]))


def test_feasibility_is_the_share_that_respects_the_order(fitted):
    good, bad = traces_of(TRUTH, 3, seed=5), list(reversed(ACTIONS))
    assert fitted.feasibility([*good, bad]) == 0.75
    assert fitted.feasibility([["bind"], ["server", "net"]]) == 0.5
    with pytest.raises(ValueError, match="no traces"):
        fitted.feasibility([])


def test_calibration_by_hand(fitted):
    table, ece = calibration_table(np.array([0.05, 0.05, 0.95, 0.85]), np.array([0, 1, 1, 1.0]), 10)
    assert ece == pytest.approx(0.5 * 0.45 + 0.25 * 0.05 + 0.25 * 0.15)
    np.testing.assert_allclose(table, [[0.0, 0.05, 0.5, 2], [0.8, 0.85, 1, 1], [0.9, 0.95, 1, 1]])
    found = fitted.calibration(TRUTH)
    assert found.ece < 0.1
    assert found.table["pairs"].sum() == len(ACTIONS) * (len(ACTIONS) - 1)


# --- diagnostics ----------------------------------------------------------------------------------------------------


def test_rhat_is_one_for_independent_draws_large_for_chains_apart_and_known_in_closed_form():
    generator = np.random.default_rng(0)
    alike = generator.standard_normal((4, 1_000, 3))
    assert np.abs(split_rhat(alike) - 1).max() < 0.01
    apart = alike + np.arange(4)[:, None, None]
    assert split_rhat(apart).min() > 1.5
    two = np.array([[0.0, 1, 0, 1], [0, 1, 2, 3]])[:, :, None]  # halves: means .5, .5, .5, 2.5, variances .5
    assert split_rhat(two)[0] == pytest.approx(math.sqrt(0.5 + 1.0 / 0.5))
    assert split_rhat(np.zeros((2, 10, 1)))[0] == 1.0
    assert split_rhat(np.stack([np.zeros((10, 1)), np.ones((10, 1))]))[0] == math.inf
    assert np.isnan(split_rhat(np.zeros((2, 3, 1)))[0])


def test_the_effective_size_of_an_autoregression_is_the_theory_s():
    generator, phi = np.random.default_rng(0), 0.8
    noise = generator.standard_normal((4, 20_000, 1))
    series = np.zeros_like(noise)
    for t in range(1, noise.shape[1]):
        series[:, t] = phi * series[:, t - 1] + noise[:, t]
    expected = 80_000 * (1 - phi) / (1 + phi)
    assert effective_size(series)[0] == pytest.approx(expected, rel=0.12)
    assert effective_size(noise)[0] == pytest.approx(80_000, rel=0.05)
    assert effective_size(np.zeros((4, 10, 1)))[0] == 40


def test_waic_of_constant_draws_is_the_deviance():
    logs = np.tile([[-1.0, -2.0]], (5, 1))
    assert waic(logs, np.array([1.0, 3.0])) == pytest.approx(14.0)


def test_diagnostics_tell_what_moved(fitted):
    found = fitted.diagnostics()
    assert found.converged
    assert found.chain_gap < 0.2
    assert found.effective_size.to_numpy().min() > 50
    assert math.isnan(found.acceptance["eps"])  # fixed
    assert all(0 < share < 1 for name, share in found.acceptance.items() if name != "eps")
    assert math.isfinite(found.waic)


def test_chains_that_disagree_are_announced():
    traces = [list(np.random.default_rng(i).permutation(30)) for i in range(4)]
    with pytest.warns(ConvergenceWarning, match="chains disagree"):
        quick(n_iter=200, chains=4).fit(traces)


# --- interruption ---------------------------------------------------------------------------------------------------


def test_interrupting_keeps_what_was_drawn_and_can_go_on(monkeypatch):
    traces = [["a", "b", "c"]] * 5
    real, calls = posterior_module.advance, []

    def interrupted(*args, **options):
        calls.append(1)
        if len(calls) > 120:
            raise KeyboardInterrupt
        real(*args, **options)

    monkeypatch.setattr(posterior_module, "advance", interrupted)
    with pytest.warns(InterruptedFitWarning, match=r"of 200,000 steps"):
        posterior = quick(n_iter=200_000, burn_in=0.1).fit(traces)
    assert posterior.interrupted
    assert 0 < posterior.n_iter < 200_000
    assert posterior.edge_probability.loc["a", "c"] > 0.8
    monkeypatch.setattr(posterior_module, "advance", real)
    done = posterior.n_iter
    assert not posterior.extend(4_000).interrupted
    assert posterior.n_iter >= done + 4_000
    monkeypatch.setattr(posterior_module, "advance", lambda *a, **k: interrupted())
    with pytest.raises(KeyboardInterrupt):
        quick().fit(traces)


def test_progress_is_shown_where_it_is_wanted(capsys):
    quick(progress=True).fit([["a", "b"]])
    assert "sampling orders" in capsys.readouterr().err
    quick().fit([["a", "b"]])
    assert capsys.readouterr().err == ""


# --- files ----------------------------------------------------------------------------------------------------------


def test_a_saved_posterior_is_the_same_and_goes_on_the_same(tmp_path):
    traces = [["a", 1, ("c", 2)], [1, "a", ("c", 2)]]
    saved = quick(n_iter=2_000).fit(traces)
    saved.save(tmp_path / "posterior.npz")
    loaded = type(saved).load(tmp_path / "posterior.npz")
    assert loaded.actions == saved.actions
    np.testing.assert_array_equal(loaded.orders, saved.orders)
    assert loaded.predict_next(["a"]) == saved.predict_next(["a"])
    assert loaded.coverage() == saved.coverage()
    assert loaded.diagnostics().waic == saved.diagnostics().waic
    np.testing.assert_array_equal(loaded.extend(2_000).orders, saved.extend(2_000).orders)


def test_what_cannot_be_saved_or_read_is_told(tmp_path):
    with pytest.raises(TypeError, match="cannot be saved"):
        quick(n_iter=100).fit([[frozenset("a")]]).save(tmp_path / "x.npz")
    (tmp_path / "text.npz").write_text("no")
    np.savez(tmp_path / "other.npz", a=np.zeros(2))
    for name in ("text.npz", "other.npz"):
        with pytest.raises(ValueError, match="no posterior"):
            PosetPosterior.load(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        PosetPosterior.load(tmp_path / "nothing.npz")


# --- odd traces -----------------------------------------------------------------------------------------------------


def test_one_action():
    model = quick().fit([["a"], ["a"]])
    assert model.log_likelihood(["a"]) == 0.0
    assert model.predict_next() == {"a": pytest.approx(1.0)}
    assert list(model.graph().nodes) == ["a"]
    assert model.coverage() == 1.0
    assert model.diagnostics().converged
    with pytest.raises(ValueError, match="only one action"):
        model.calibration(nx.empty_graph(["a"], create_using=nx.DiGraph))


def test_one_trace_makes_its_order_likelier_than_any_reversal():
    edge = quick(n_iter=20_000).fit([["a", "b", "c", "d"]]).edge_probability.to_numpy()
    assert (edge[np.triu_indices(4, 1)] > 10 * edge.T[np.triu_indices(4, 1)]).all()


def test_traces_that_contradict_each_other_leave_actions_free():
    traces = [["a", "b", "c"], ["b", "a", "c"]] * 10
    model = quick().fit(traces)
    edge = model.edge_probability
    assert edge.loc["a", "b"] < 0.05
    assert edge.loc["b", "a"] < 0.05
    assert edge.loc["a", "c"] > 0.95
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        strict = quick(eps=0.0).fit(traces)
    assert strict.edge_probability.loc["a", "b"] == 0.0
    with pytest.raises(ValueError, match="contradict each other"):
        quick(eps=0.0, prior=LatentPrior(dimension=1)).fit(traces)
    with pytest.raises(ValueError, match="no drawn order"):
        quick(eps=0.0).fit([["a", "b"]] * 40).predict_next(["b"])


def test_repeated_actions_are_refused_or_numbered():
    with pytest.raises(ValueError, match=r"trace 1 has the action 'a' more than once.*repeats='number'"):
        quick().fit([["a", "b"], ["a", "b", "a"]])
    model = quick().fit([["a", "b", "a"]] * 10 + [["a", "b"]], repeats="number")
    assert model.actions == ("a", "b", "a#2")
    assert set(model.graph().edges) == {("a", "b"), ("b", "a#2")}
    assert quick().fit([[1, 2, 1]], repeats="number").actions == (1, 2, (1, 2))
    with pytest.raises(ValueError, match="one name twice"):
        quick().fit([["a", "a#2", "a"]], repeats="number")
    with pytest.raises(ValueError, match="repeats must be"):
        quick().fit([["a"]], repeats="drop")


def test_unknown_actions_are_named_with_near_misses(fitted):
    with pytest.raises(ValueError, match="unknown action 'servr'; near: server"):
        fitted.log_likelihood(["net", "servr"])
    with pytest.raises(ValueError, match="trace 0 has the unknown action 'c'"):
        quick().fit([["a", "c"]], actions=["a", "b"])
    with pytest.raises(ValueError, match="prefix has the action 'net' more than once"):
        fitted.predict_next(["net", "net"])
    with pytest.raises(ValueError, match="'rule' is not in the choice set"):
        fitted.predict_next(["rule"], choice_set=["net"])


@pytest.mark.parametrize(
    ("traces", "error", "words"),
    [
        ([], ValueError, "no actions"),
        ([["a"], []], ValueError, "trace 1 is empty"),
        (["ab", "ba"], TypeError, "single string 'ab'"),
        ("ab", TypeError, "sequence of sequences"),
        ([["a", None]], ValueError, "missing action"),
        ([["a", float("nan")]], ValueError, "missing action"),
        ([[["a"], ["b"]]], TypeError, "cannot be hashed"),
        ([3, 4], TypeError, "no sequence"),
    ],
)
def test_what_is_no_trace_is_refused(traces, error, words):
    with pytest.raises(error, match=words):
        quick().fit(traces)


def test_choice_sets_say_what_a_broken_off_trace_left_undone():
    """Without them nothing is known of c; with them, that it was not taken before a and b."""
    traces = [["a", "b"]] * 12
    alone = quick(n_iter=20_000).fit(traces, actions="abc").edge_probability
    told = quick(n_iter=20_000).fit(traces, actions="abc", choice_sets=["abc"] * 12).edge_probability
    assert told.loc["b", "c"] > 0.9 > alone.loc["b", "c"]
    with pytest.raises(ValueError, match="'b', which is not in its choice set"):
        quick().fit([["a", "b"]], choice_sets=[["a"]], actions="ab")
    with pytest.raises(ValueError, match="12 traces and 1 choice sets"):
        quick().fit(traces, choice_sets=["ab"])


@pytest.mark.parametrize(
    "bad",
    [
        {"n_iter": 5},
        {"chains": 0},
        {"burn_in": 1.0},
        {"thin": 0},
        {"eps": 1.0},
        {"eps": (0.0, 1.0)},
        {"beta": -1.0},
        {"beta": (1.0, 2.0, 3.0)},
        {"beta": 51},
    ],
)
def test_settings_out_of_range_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        PartialOrderModel(**bad)
    with pytest.raises(TypeError, match="LatentPrior"):
        PartialOrderModel(prior=3)


def test_a_threshold_out_of_range_is_refused(fitted):
    with pytest.raises(ValueError, match="threshold"):
        fitted.graph(1.0)


def test_extreme_settings_stay_finite():
    traces = traces_of(TRUTH, 5)
    for options in ({"beta": 50.0}, {"eps": 0.999}, {"prior": LatentPrior(dimension=1)}, {"burn_in": 0.0}):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            model = quick(n_iter=1_000, **options).fit(traces)
        assert np.isfinite(model.parameters["log_likelihood"]).all()
        assert math.isfinite(model.log_likelihood(traces[0]))


# --- event logs -----------------------------------------------------------------------------------------------------

EVENTS = pd.DataFrame(
    {
        "case:concept:name": ["1", "2", "1", "2", "1"],
        "concept:name": ["b", "a", "a", "b", "c"],
        "time:timestamp": pd.to_datetime(["2026-01-02", "2026-01-01", "2026-01-01", "2026-01-01", "2026-01-03"]),
    }
)


@pytest.mark.filterwarnings("ignore:chains disagree")
def test_tables_are_read_by_case_and_time_ties_in_the_order_of_rows():
    expected = [("a", "b", "c"), ("a", "b")]
    assert read_traces(EVENTS) == expected
    assert read_traces(pl.from_pandas(EVENTS)) == expected
    renamed = EVENTS.rename(columns={"case:concept:name": "run", "concept:name": "step"})
    in_row_order = read_traces(renamed, case="run", activity="step", timestamp=None)
    assert in_row_order == [("b", "a", "c"), ("a", "b")]
    model = quick().fit(EVENTS)
    assert model.actions == ("a", "b", "c")


def test_only_complete_events_count_where_the_log_tells():
    events = pd.concat([EVENTS.assign(**{"lifecycle:transition": s}) for s in ("start", "complete")])
    assert read_traces(events) == [("a", "b", "c"), ("a", "b")]


def test_sequences_of_events_are_read_by_their_activity():
    log = [[{"concept:name": "a", "lifecycle:transition": "complete"}, {"concept:name": "b"}], [{"concept:name": "b"}]]
    assert read_traces(log, lifecycle=None) == [("a", "b"), ("b",)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"time:timestamp": [None] * 5}, "missing times"),
        ({"concept:name": ["a", None, "b", "c", "d"]}, "no value in row 1"),
    ],
)
def test_tables_with_holes_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        read_traces(EVENTS.assign(**change))
    with pytest.raises(ValueError, match=r"no column 'concept:name'.*it has x"):
        read_traces(pd.DataFrame({"x": [1], "case:concept:name": ["1"]}))
