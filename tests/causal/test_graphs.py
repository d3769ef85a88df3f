"""Graph scores by hand, agreement with sklearn, networkx and causal-learn, and round trips to other libraries."""

from itertools import combinations, permutations

import networkx as nx
import numpy as np
import pytest

from cameraready.causal import _graphs as graphs


def graph(*edges, latent=(), nodes=()):
    found = nx.DiGraph()
    for name in dict.fromkeys([*nodes, *(node for edge in edges for node in edge[:2])]):
        found.add_node(name, latent=name in latent)
    for a, b, *undirected in edges:
        found.add_edge(a, b)
        if undirected:
            found.add_edge(b, a)
    return found


def random_graph(seed, n=7, p=0.4):
    rng = np.random.default_rng(seed)
    found = graph(nodes=[f"v{i}" for i in range(n)])
    for a, b in combinations(found.nodes, 2):
        kind = rng.choice(4, p=[1 - p, p / 3, p / 3, p / 3])
        if kind in (1, 3):
            found.add_edge(a, b)
        if kind in (2, 3):
            found.add_edge(b, a)
    return found


def test_scores_by_hand():
    truth = graph(("a", "b"), ("b", "c"), ("c", "d"))
    found = graph(("a", "b"), ("c", "b"), ("b", "d"))
    score = graphs.skeleton_score(found, truth)
    assert (score.true_positives, score.found, score.true) == (2, 3, 3)
    assert score.precision == score.recall == score.f1 == pytest.approx(2 / 3)
    assert graphs.direction_score(found, truth).true_positives == 1
    # b-c reversed, c-d missing, b-d extra
    assert graphs.structural_hamming_distance(found, truth) == 3


def test_an_undirected_edge_differs_from_a_directed_one():
    assert graphs.structural_hamming_distance(graph(("a", "b", "-")), graph(("a", "b"))) == 1
    assert graphs.skeleton_score(graph(("a", "b", "-")), graph(("a", "b"))).f1 == 1
    assert graphs.direction_score(graph(("a", "b", "-")), graph(("a", "b"))).recall == 0


@pytest.mark.parametrize("seed", range(5))
def test_the_hamming_distance_is_a_metric(seed):
    a, b, c = (random_graph(10 * seed + i) for i in range(3))
    distance = graphs.structural_hamming_distance
    assert distance(a, a) == 0
    assert distance(a, b) == distance(b, a)
    assert distance(a, c) <= distance(a, b) + distance(b, c)


def test_empty_graphs_have_undefined_scores():
    score = graphs.skeleton_score(graph(nodes="ab"), graph(nodes="ab"))
    assert np.isnan([score.precision, score.recall, score.f1]).all()


@pytest.mark.parametrize("seed", range(4))
def test_average_precision_is_sklearns(seed):
    from sklearn.metrics import average_precision_score

    rng = np.random.default_rng(seed)
    truth = random_graph(seed)
    pairs = [frozenset(pair) for pair in combinations(truth.nodes, 2)]
    weights = {pair: float(rng.integers(4)) for pair in pairs}
    labels = [pair in graphs.skeleton(truth) for pair in pairs]
    expected = average_precision_score(labels, [weights[pair] for pair in pairs])
    assert graphs.average_precision(weights, truth) == pytest.approx(expected, rel=1e-12)


def test_latents_are_matched_by_what_they_drive_not_by_name():
    truth = graph(("L1", "a"), ("L1", "b"), ("L2", "c"), ("L2", "d"), ("L1", "L2"), latent=("L1", "L2"))
    for names in permutations(["L1", "L2"]):
        renamed = nx.relabel_nodes(truth, dict(zip(("L1", "L2"), names, strict=True)), copy=True)
        assert graphs.structural_hamming_distance(graphs.match_latents(renamed, truth), truth) == 0
    extra = graph(("L1", "c"), ("L1", "d"), ("L9", "a"), latent=("L1", "L9"))
    matched = graphs.match_latents(graph(("L1", "c"), ("L1", "d"), ("L3", "z"), latent=("L1", "L3")), truth)
    assert set(graphs.latent_nodes(matched)) == {"L2", "unmatched-0"}
    assert set(graphs.latent_nodes(graphs.match_latents(extra, truth))) == {"L1", "L2"}


def test_a_latent_without_observed_children_is_matched_by_its_descendants():
    edges = [("top", "p"), ("top", "q"), *(("p", x) for x in "ab"), *(("q", x) for x in "cd")]
    truth = graph(*edges, latent=("top", "p", "q"))
    renamed = nx.relabel_nodes(truth, {"top": "L1", "p": "L3", "q": "L2"})
    assert graphs.structural_hamming_distance(graphs.match_latents(renamed, truth), truth) == 0


def test_the_projection_joins_what_shares_a_latent_parent():
    projected = graphs.observed_projection(graph(("L", "a"), ("L", "b"), ("b", "c"), latent=("L",)))
    assert graphs.skeleton(projected) == {frozenset("ab"), frozenset("bc")}
    assert graphs.clusters(graph(("L", "a"), nodes="b", latent=("L",))) == {"a": frozenset("L"), "b": frozenset()}


@pytest.mark.parametrize("seed", range(3))
def test_causal_learn_and_back(seed):
    pytest.importorskip("causallearn")
    original = random_graph(seed)
    original.nodes["v0"]["latent"] = True
    back = graphs.from_causallearn(graphs.to_causallearn(original))
    assert set(back.edges) == set(original.edges)
    assert graphs.latent_nodes(back) == ["v0"]


def test_the_hamming_distance_is_causal_learns():
    """Theirs counts a reversed edge as one error as well."""
    pytest.importorskip("causallearn")
    from causallearn.graph.SHD import SHD

    for seed in range(6):
        truth, found = random_graph(seed), random_graph(seed + 50)
        theirs = SHD(graphs.to_causallearn(truth), graphs.to_causallearn(found)).get_shd()
        assert graphs.structural_hamming_distance(found, truth) == theirs


def test_pgmpy_and_back():
    pytest.importorskip("pgmpy")
    directed = graph(("L", "a"), ("L", "b"), ("a", "c"), latent=("L",), nodes="z")
    for original in (directed, graph(("L", "a"), ("a", "b", "-"), latent=("L",))):
        back = graphs.from_pgmpy(graphs.to_pgmpy(original))
        assert set(back.edges) == set(original.edges)
        assert set(back.nodes) == set(original.nodes)
        assert graphs.latent_nodes(back) == ["L"]
