"""The search returns the true graph when it is told the true ranks, and from data of domains that differ."""

import warnings
from itertools import combinations

import networkx as nx
import numpy as np
import pandas as pd
import pytest

from cameraready.causal import _graphs as graphs
from cameraready.causal._scm import domains_of, linear_scm, sample_domains
from cameraready.causal.latent_structure import LatentStructure, OracleRank
from cameraready.causal.latent_structure.orientation import acyclic_extension, apply_meek_rules


def drives(cause, effects):
    return [(cause, effect) for effect in effects.split()]


STRUCTURES = {
    "two latents": ([("A", "B"), *drives("A", "x1 x2 x3 x4"), *drives("B", "x5 x6 x7 x8")], "A B"),
    "two-dimensional cover": (
        [*drives("A", "x1 x2 x3 x4 x5 x6 C"), *drives("B", "x1 x2 x3 x4 x5 x6 C"), *drives("C", "x7 x8 x9")],
        "A B C",
    ),
    "observed cause of some": ([*drives("A", "x1 x2 x3 x4 x5 x6"), *drives("o", "x1 x2 x3")], "A"),
    "observed cause of all": ([*drives("A", "x1 x2 x3 x4 x5 x6"), *drives("o", "x1 x2 x3 x4 x5 x6")], "A"),
    "chain": (
        [("A", "B"), ("B", "C"), *drives("A", "a1 a2 a3"), *drives("B", "b1 b2 b3"), *drives("C", "c1 c2 c3")],
        "A B C",
    ),
    "hierarchy": (
        [
            *drives("H", "A B C D"),
            *drives("A", "a1 a2 a3"),
            *drives("B", "b1 b2 b3"),
            *drives("C", "c1 c2 c3"),
            *drives("D", "d1 d2 d3"),
        ],
        "H A B C D",
    ),
    "observed mediator": ([("A", "m"), ("m", "B"), *drives("A", "a1 a2 a3"), *drives("B", "b1 b2 b3")], "A B"),
    "cross-loading": ([*drives("A", "a1 a2 a3 m"), *drives("B", "b1 b2 b3 m")], "A B"),
    "causes of a latent": ([("c1", "A"), ("c2", "A"), *drives("A", "x1 x2 x3 x4")], "A"),
    "observed only": ([("a", "b"), ("b", "c"), ("c", "d"), ("e", "c")], ""),
}


def truth(name):
    edges, latent = STRUCTURES[name]
    return linear_scm(edges, np.random.default_rng(0), latent=latent.split())


def equivalence_class(graph):
    """CPDAG with the convention that latents cause their observed leaves."""
    latents, leaves = set(graphs.latent_nodes(graph)), {node for node in graph if graph.out_degree(node) == 0}
    found = nx.DiGraph()
    found.add_nodes_from(graph.nodes(data=True))
    for a, b in graph.edges:
        found.add_edge(a, b)
        if not (a in latents and b in leaves - latents and graph.in_degree(b) == 1):
            found.add_edge(b, a)
    for b in graph:
        for a, c in combinations(sorted(graph.predecessors(b)), 2):
            if not graph.has_edge(a, c) and not graph.has_edge(c, a):
                found.remove_edges_from(edge for edge in [(b, a), (b, c)] if found.has_edge(*edge))
    apply_meek_rules(found)
    return found


# --- ranks from a graph ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_the_separation_number_is_the_rank_of_the_population_covariance(seed):
    """Sullivant et al. (2010), Theorem 2.8, in every domain; by singular values of a random model's covariance."""
    rng = np.random.default_rng(seed)
    names = [f"v{i}" for i in range(8)]
    edges = [pair for pair in combinations(names, 2) if rng.random() < 0.35]
    scm = linear_scm(edges, rng, isolated=names)
    for domain in domains_of(scm, 2, "both", rng):
        covariance = domain.covariance()
        for _ in range(25):
            a, b = (rng.choice(8, size=rng.integers(1, 5), replace=False) for _ in range(2))
            values = np.linalg.svd(covariance[np.ix_(a, b)], compute_uv=False)
            rank = int((values > 1e-9 * np.abs(covariance).max()).sum())
            assert graphs.separation_number(scm.graph, [scm.names[i] for i in a], [scm.names[i] for i in b]) == rank


def test_given_columns_lower_the_oracles_rank():
    oracle = OracleRank(nx.DiGraph([("a", "b"), ("b", "c")]))
    a, b, c = (oracle.names.index(name) for name in "abc")
    assert oracle.rank([a], [c]) == 1
    assert oracle.rank([a], [c], [b]) == 0
    with pytest.raises(ValueError, match="cycle"):
        OracleRank(nx.DiGraph([("a", "b"), ("b", "a")]))


# --- the search with true ranks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STRUCTURES)
def test_true_ranks_give_the_true_equivalence_class(name):
    graph = truth(name).graph
    found = graphs.match_latents(LatentStructure(max_cover=2).fit_ranks(OracleRank(graph)).graph_, graph)
    assert graphs.skeleton_score(found, graph).f1 == 1
    found_arrows = {edge for edge in found.edges if edge[::-1] not in found.edges}
    must = equivalence_class(graph)
    latents = set(graphs.latent_nodes(graph))
    determined = {edge for edge in must.edges if edge[::-1] not in must.edges}
    # A cover's latents are told apart by convention only, and so is what they do to an observed child.
    assert {e for e in determined if e[0] not in latents} <= found_arrows
    assert {e for e in found_arrows if not (e[0] in latents and e[1] not in latents)} <= set(graph.edges)


def test_three_parents_are_found_when_asked_for():
    edges = [edge for latent in "ABC" for edge in drives(latent, "x1 x2 x3 x4 x5 x6 x7 x8")]
    graph = linear_scm(edges, np.random.default_rng(0), latent="ABC").graph
    found = LatentStructure(max_cover=3).fit_ranks(OracleRank(graph)).graph_
    assert graphs.skeleton_score(graphs.match_latents(found, graph), graph).f1 == 1


@pytest.mark.parametrize("seed", range(8))
def test_random_latent_graphs_come_back_as_their_equivalence_class(seed):
    rng = np.random.default_rng(seed)
    graph = nx.DiGraph()
    latents = [f"H{i}" for i in range(rng.integers(2, 5))]
    graph.add_nodes_from(latents, latent=True)
    graph.add_edges_from(pair for pair in combinations(latents, 2) if rng.random() < 0.5)
    for latent in latents:
        graph.add_nodes_from((f"x{latent}{j}" for j in range(4)), latent=False)
        graph.add_edges_from((latent, f"x{latent}{j}") for j in range(4))
    found = LatentStructure().fit_ranks(OracleRank(graph)).graph_
    assert graphs.structural_hamming_distance(graphs.match_latents(found, graph), equivalence_class(graph)) == 0


@pytest.mark.parametrize("seed", range(8))
def test_random_observed_graphs_come_back_without_latents(seed):
    rng = np.random.default_rng(100 + seed)
    graph = nx.DiGraph()
    graph.add_nodes_from((f"o{i}" for i in range(6)), latent=False)
    graph.add_edges_from(pair for pair in combinations(sorted(graph), 2) if rng.random() < 0.3)
    found = LatentStructure().fit_ranks(OracleRank(graph)).graph_
    assert graphs.structural_hamming_distance(found, equivalence_class(graph)) == 0


def test_the_order_of_columns_does_not_matter():
    graph = truth("two-dimensional cover").graph
    rng = np.random.default_rng(1)
    nodes = list(graph.nodes(data=True))
    shuffled = nx.DiGraph()
    shuffled.add_nodes_from(nodes[i] for i in rng.permutation(len(nodes)))
    shuffled.add_edges_from(graph.edges)
    a, b = (LatentStructure().fit_ranks(OracleRank(g)).graph_ for g in (graph, shuffled))
    assert graphs.structural_hamming_distance(graphs.match_latents(b, a), a) == 0


# --- the search with data -------------------------------------------------------------------------------------------


def data_of(name, *, change="coefficients", n_domains=5, rows=400, seed=0):
    edges, latent = STRUCTURES[name]
    rng = np.random.default_rng(seed)
    scm = linear_scm(edges, rng, latent=latent.split())
    values, labels = sample_domains(domains_of(scm, n_domains, change, rng), rows, rng)
    return pd.DataFrame(values, columns=scm.observed), labels, scm


@pytest.mark.parametrize("name", ["two latents", "chain", "two-dimensional cover", "observed cause of all"])
def test_the_structure_is_recovered_although_coefficients_change(name):
    table, labels, scm = data_of(name)
    found = LatentStructure(shifts=False).fit(table, domain=labels).graph_
    assert graphs.skeleton_score(graphs.match_latents(found, scm.graph), scm.graph).f1 == 1
    pooled = LatentStructure(shifts=False, method="pooled").fit(table, domain=labels).graph_
    assert graphs.skeleton_score(graphs.match_latents(pooled, scm.graph), scm.graph).f1 < 0.9


def test_attributes_describe_the_graph():
    table, labels, _ = data_of("two latents", change="none")
    model = LatentStructure(shifts=False).fit(table, domain=labels)
    assert [(c.latents, len(c.children), c.coparents) for c in model.covers_] == [(("L1",), 4, ()), (("L2",), 4, ())]
    assert model.feature_names_in_.tolist() == list(table.columns)
    assert (model.n_features_in_, model.shifts_) == (8, None)
    assert model.n_tests_ > 20
    assert {frozenset(cover.children) for cover in model.covers_} == {
        frozenset(f"x{i}" for i in range(1, 5)),
        frozenset(f"x{i}" for i in range(5, 9)),
    }
    assert graphs.latent_nodes(model.graph_) == ["L1", "L2"]


def test_the_level_falls_with_the_number_of_rows():
    rng = np.random.default_rng(1)
    levels = [LatentStructure().fit(rng.normal(size=(n, 4))).alpha_ for n in (100, 1_000, 10_000)]
    assert levels == [0.05, 0.02, 0.002]
    assert LatentStructure(alpha=0.3).fit(rng.normal(size=(50, 4))).alpha_ == 0.3


def test_it_passes_sklearns_checks():
    from sklearn.utils.estimator_checks import check_estimator

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcomes = check_estimator(LatentStructure(), on_fail=None)
    assert [o["check_name"] for o in outcomes if o["status"] == "failed"] == []
    assert len(outcomes) > 30


def test_the_estimator_keeps_sklearns_conventions():
    from sklearn.base import clone

    table, labels, _ = data_of("two latents", n_domains=3)
    model = LatentStructure(max_cover=1, alpha=0.02, shifts=False)
    again = clone(model).fit(table, None, domain=labels)
    assert again.get_params() == model.get_params()
    assert not hasattr(model, "graph_")
    assert set(again.fit(table, domain=labels).graph_.edges) == set(again.graph_.edges)


def test_a_latent_named_like_a_column_gets_another_name():
    table, labels, _ = data_of("two latents")
    table = table.rename(columns={"x1": "L1"})
    assert graphs.latent_nodes(LatentStructure(shifts=False).fit(table, domain=labels).graph_) == ["L2", "L3"]


def test_causal_learns_search_takes_our_test():
    """Their RLCD finds with our test what it cannot find by pooling."""
    pytest.importorskip("causallearn")
    from cameraready.causal.latent_structure import RankTest
    from cameraready.causal.latent_structure.rivals import rlcd

    table, labels, _ = data_of("two latents")
    values = table.to_numpy()
    ours = rlcd(values, list(table.columns), test=RankTest(values, labels))
    assert len(graphs.latent_nodes(ours)) >= 2


def test_edges_that_come_back_in_half_of_the_rows():
    table, labels, _ = data_of("two latents", rows=300)
    model = LatentStructure(shifts=False).fit(table, domain=labels)
    stability = model.edge_stability(table, domain=labels, n_resamples=6)
    assert stability["in_graph"].sum() == 9
    assert (stability.loc[stability["in_graph"], "frequency"] >= 5 / 6).all()
    again = model.edge_stability(table, domain=labels, n_resamples=6)
    pd.testing.assert_frame_equal(stability, again)
    with pytest.raises(ValueError, match="at least 2"):
        model.edge_stability(table, n_resamples=1)
    with pytest.raises(ValueError, match="half"):
        model.edge_stability(table, resample="jackknife")
    with pytest.raises(ValueError, match="not those"):
        model.edge_stability(table.rename(columns={"x1": "z"}))


def test_unstable_edges_are_told_from_stable_ones():
    """With a tenth of the rows the frequencies fall."""
    table, labels, _ = data_of("chain", n_domains=2, rows=800)
    few = (np.arange(len(table)) % 10) == 0
    model = LatentStructure(shifts=False).fit(table, domain=labels)
    many = model.edge_stability(table, domain=labels, n_resamples=6)
    model.fit(table[few], domain=labels[few])
    less = model.edge_stability(table[few], domain=labels[few], n_resamples=6)
    assert less.loc[less["in_graph"], "frequency"].mean() < many.loc[many["in_graph"], "frequency"].mean()


# --- edges ----------------------------------------------------------------------------------------------------------


def test_fewer_rows_than_columns_say_so_or_are_tested_in_blocks():
    rng = np.random.default_rng(2)
    assert graphs.latent_nodes(LatentStructure().fit(rng.normal(size=(25, 40))).graph_) == []
    with pytest.raises(ValueError, match="needs at least"):
        LatentStructure().fit(rng.normal(size=(5, 12)))


def test_independent_columns_stay_alone():
    found = LatentStructure().fit(np.random.default_rng(3).normal(size=(500, 6)))
    assert list(found.graph_.edges) == []
    assert found.covers_ == []


def test_two_columns_are_joined_or_not():
    x = np.random.default_rng(4).normal(size=(200, 1))
    found = LatentStructure().fit(x + 0.5 * np.random.default_rng(5).normal(size=(200, 2))).graph_
    assert graphs.skeleton(found) == {frozenset(("x1", "x2"))}


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"max_cover": 0}, "max_cover"),
        ({"max_cover": True}, "max_cover"),
        ({"alpha": 0}, "alpha"),
        ({"alpha": "low"}, "alpha"),
        ({"method": "mean"}, "method"),
    ],
)
def test_parameters_out_of_range_are_refused(parameters, message):
    with pytest.raises(ValueError, match=message):
        LatentStructure(**parameters).fit(np.random.default_rng(0).normal(size=(30, 3)))


@pytest.mark.parametrize("seed", range(6))
def test_an_acyclic_extension_keeps_arrows_and_makes_no_new_collider(seed):
    rng = np.random.default_rng(seed)
    graph = nx.DiGraph()
    graph.add_nodes_from((f"o{i}" for i in range(7)), latent=False)
    graph.add_edges_from(pair for pair in combinations(sorted(graph), 2) if rng.random() < 0.35)
    pattern = equivalence_class(graph)
    extension = acyclic_extension(pattern)
    assert nx.is_directed_acyclic_graph(extension)
    assert graphs.structural_hamming_distance(equivalence_class(extension), pattern) == 0


def test_a_pattern_without_extension_still_gives_an_acyclic_graph():
    square = nx.DiGraph()
    square.add_nodes_from("abcd", latent=False)
    for a, b in ("ab", "bc", "cd", "da"):
        square.add_edges_from([(a, b), (b, a)])
    extension = acyclic_extension(square)
    assert nx.is_directed_acyclic_graph(extension)
    assert graphs.skeleton(extension) == graphs.skeleton(square)


def test_the_structure_is_recovered_from_a_drift_without_labels():
    """Loadings of eight indicators go through a full turn of a sine; only the time of each row is known."""
    rng = np.random.default_rng(6)
    n = 2400
    time = rng.permutation(n)
    angle = 2 * np.pi * (time[:, None] / n + rng.random(8))
    latents = rng.normal(size=(n, 2)) @ np.array([[1.0, 0.6], [0.0, 0.8]])
    values = np.repeat(latents, 4, axis=1) * (1.2 + np.sin(angle)) + 0.7 * rng.normal(size=(n, 8))
    found = LatentStructure(shifts=False).fit(values, time=time)
    groups = {frozenset(cover.children) for cover in found.covers_}
    assert groups == {frozenset(f"x{i}" for i in range(1, 5)), frozenset(f"x{i}" for i in range(5, 9))}
    assert len(found.rank_test_.domains.rows) > 5
    pooled = LatentStructure(shifts=False).fit(values)
    assert {frozenset(cover.children) for cover in pooled.covers_} != groups
