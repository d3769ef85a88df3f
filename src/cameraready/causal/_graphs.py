"""Causal graphs with latent nodes and undetermined edges: comparison with a truth, and other libraries' forms.

A graph is a `networkx.DiGraph` whose nodes may carry ``latent=True``. An edge in both directions is one undirected edge, whose
direction the data do not determine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import networkx as nx
import numpy as np


@dataclass(frozen=True)
class Score:
    """Precision, recall and F1 of a set of found edges; each is NaN where its denominator is zero (F1: both are empty)."""

    true_positives: int
    found: int
    true: int

    @property
    def precision(self) -> float:
        return self.true_positives / self.found if self.found else float("nan")

    @property
    def recall(self) -> float:
        return self.true_positives / self.true if self.true else float("nan")

    @property
    def f1(self) -> float:
        total = self.found + self.true
        return 2 * self.true_positives / total if total else float("nan")


def latent_nodes(graph: nx.DiGraph) -> list[Any]:
    """The latent nodes, in the graph's order."""
    return [node for node, latent in graph.nodes(data="latent") if latent]


def observed_nodes(graph: nx.DiGraph) -> list[Any]:
    """The observed nodes, in the graph's order."""
    return [node for node, latent in graph.nodes(data="latent") if not latent]


def skeleton(graph: nx.DiGraph) -> set[frozenset[Any]]:
    """Adjacent pairs, whatever the direction."""
    return {frozenset(edge) for edge in graph.edges if edge[0] != edge[1]}


def adjacency(graph: nx.DiGraph, nodes: Sequence[Any]) -> np.ndarray:
    """Boolean matrix over `nodes`: entry (i, j) is True for i -> j and for i - j."""
    place = {node: i for i, node in enumerate(nodes)}
    matrix = np.zeros((len(nodes), len(nodes)), dtype=bool)
    for cause, effect in graph.edges:
        if cause in place and effect in place:
            matrix[place[cause], place[effect]] = True
    return matrix


def skeleton_score(found: nx.DiGraph, truth: nx.DiGraph) -> Score:
    """How many adjacencies of `found` are adjacencies of `truth`; nodes are compared by name."""
    ours, theirs = skeleton(found), skeleton(truth)
    return Score(len(ours & theirs), len(ours), len(theirs))


def direction_score(found: nx.DiGraph, truth: nx.DiGraph) -> Score:
    """The same for directed edges alone; undirected edges count neither as found nor as true."""
    ours, theirs = _directed(found), _directed(truth)
    return Score(len(ours & theirs), len(ours), len(theirs))


def _directed(graph: nx.DiGraph) -> set[tuple[Any, Any]]:
    return {(a, b) for a, b in graph.edges if not graph.has_edge(b, a)}


def structural_hamming_distance(found: nx.DiGraph, truth: nx.DiGraph) -> int:
    """Pairs of nodes whose edge (none, ->, <-, undirected) differs; a reversed edge counts once (Tsamardinos et al., 2006)."""
    nodes = list(dict.fromkeys([*truth.nodes, *found.nodes]))
    a, b = adjacency(found, nodes), adjacency(truth, nodes)
    differs = (a != b) | (a.T != b.T)
    return int(np.triu(differs, 1).sum())


def average_precision(weights: Mapping[frozenset[Any], float], truth: nx.DiGraph) -> float:
    """Average precision of adjacencies ranked by weight: the step-wise area under the precision-recall curve.

    `weights` maps pairs of nodes to numbers, larger meaning surer; true adjacencies that it lacks are never found. Equal weights
    enter together. NaN for a truth without edges.
    """
    true = skeleton(truth)
    if not true:
        return float("nan")
    area, found, hits = 0.0, 0, 0
    for level in sorted(set(weights.values()), reverse=True):
        group = [pair for pair, weight in weights.items() if weight == level]
        found, gained = found + len(group), sum(pair in true for pair in group)
        hits += gained
        area += hits / found * gained / len(true)
    return area


def match_latents(found: nx.DiGraph, truth: nx.DiGraph) -> nx.DiGraph:
    """`found` with its latent nodes renamed after those of `truth` that they stand for.

    Latent names and their order mean nothing. The assignment maximises the overlap of neighbourhoods: pairs are weighed by the
    F1 of their observed descendants through latent nodes, ties by that of their neighbours (Hungarian algorithm). Latents without
    a partner get a name that `truth` does not have.
    """
    from scipy.optimize import linear_sum_assignment

    ours, theirs = latent_nodes(found), latent_nodes(truth)
    names: dict[Any, Any] = {}
    if ours and theirs:
        gain = np.array([[_likeness(found, a, truth, b) for b in theirs] for a in ours])
        for i, j in zip(*linear_sum_assignment(gain, maximize=True), strict=True):
            if gain[i, j] > 0:
                names[ours[i]] = theirs[j]
    spare = (f"unmatched-{i}" for i in range(len(ours) + len(truth) + len(found)))
    for node in ours:
        if node not in names:
            names[node] = next(name for name in spare if name not in truth and name not in found)
    return nx.relabel_nodes(found, names)


def _likeness(found: nx.DiGraph, a: Any, truth: nx.DiGraph, b: Any) -> float:
    def f1(x: set[Any], y: set[Any]) -> float:
        return 2 * len(x & y) / (len(x) + len(y)) if x or y else 0.0

    measured = f1(_measured(found, a), _measured(truth, b))
    beside = f1(_children(found, a), _children(truth, b))
    return beside + 1e-3 * measured if beside else 1e-3 * measured


def _children(graph: nx.DiGraph, node: Any) -> set[Any]:
    """Observed children."""
    return {child for child in graph.successors(node) if not graph.nodes[child].get("latent")}


def _measured(graph: nx.DiGraph, node: Any) -> set[Any]:
    """Observed nodes reached by paths through latent nodes alone."""
    reached: set[Any] = set()
    stack, seen = [node], {node}
    while stack:
        for child in graph.successors(stack.pop()):
            if not graph.nodes[child].get("latent"):
                reached.add(child)
            elif child not in seen:
                seen.add(child)
                stack.append(child)
    return reached


def clusters(graph: nx.DiGraph) -> dict[Any, frozenset[Any]]:
    """For every observed node the set of its latent parents (empty where it has none)."""
    return {
        node: frozenset(parent for parent in graph.predecessors(node) if graph.nodes[parent].get("latent"))
        for node in observed_nodes(graph)
    }


def observed_projection(graph: nx.DiGraph) -> nx.DiGraph:
    """The observed variables, joined by an undirected edge where they are adjacent or share a latent parent.

    What a method without latent nodes in its output, such as FCI, can be compared on.
    """
    projected = nx.DiGraph()
    projected.add_nodes_from((node, {"latent": False}) for node in observed_nodes(graph))
    parents = clusters(graph)
    for a, b in combinations(projected.nodes, 2):
        if parents[a] & parents[b] or graph.has_edge(a, b) or graph.has_edge(b, a):
            projected.add_edges_from([(a, b), (b, a)])
    return projected


def separation_number(graph: nx.DiGraph, a: Iterable[Any], b: Iterable[Any]) -> int:
    """Size of the smallest pair of sets that t-separates `a` from `b`, which is the generic rank of their cross-covariance.

    Sullivant, Talaska and Draisma (2010, Theorem 2.8): the rank of the cross-covariance of a generic linear model on an acyclic
    `graph` is the minimum of ``|C_A| + |C_B|`` over pairs of sets such that every trek from `a` to `b` meets ``C_A`` on its side
    of `a` or ``C_B`` on that of `b`. By Menger's theorem it is a maximum flow through two copies of the graph, one for each side,
    with capacity one in every vertex; O(|a| times edges).
    """
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import maximum_flow

    place = {node: i for i, node in enumerate(graph)}
    n, left, right = len(place), [place[x] for x in set(a)], [place[x] for x in set(b)]
    if not left or not right:
        return 0
    # Vertices: up-in 0..n-1, up-out n..2n-1, down-in 2n..3n-1, down-out 3n..4n-1, source 4n, sink 4n+1.
    tails: list[int] = []
    heads: list[int] = []

    def arc(tail: int, head: int) -> None:
        tails.append(tail)
        heads.append(head)

    for v in range(n):
        arc(v, n + v)
        arc(n + v, 2 * n + v)
        arc(2 * n + v, 3 * n + v)
    for cause, effect in graph.edges:
        arc(n + place[effect], place[cause])
        arc(3 * n + place[cause], 2 * n + place[effect])
    for v in left:
        arc(4 * n, v)
    for v in right:
        arc(3 * n + v, 4 * n + 1)
    capacities = csr_array((np.ones(len(tails), dtype=np.int32), (tails, heads)), shape=(4 * n + 2, 4 * n + 2))
    return int(maximum_flow(capacities, 4 * n, 4 * n + 1).flow_value)


# --- other libraries ------------------------------------------------------------------------------------------------


def to_causallearn(graph: nx.DiGraph) -> Any:
    """A causal-learn ``GeneralGraph``; undirected edges have two tails, latent nodes the type LATENT."""
    from causallearn.graph.Edge import Edge
    from causallearn.graph.Endpoint import Endpoint
    from causallearn.graph.GeneralGraph import GeneralGraph
    from causallearn.graph.GraphNode import GraphNode
    from causallearn.graph.NodeType import NodeType

    nodes = {name: GraphNode(str(name)) for name in graph}
    for name in latent_nodes(graph):
        nodes[name].set_node_type(NodeType.LATENT)
    converted = GeneralGraph(list(nodes.values()))
    for cause, effect in graph.edges:
        if not graph.has_edge(effect, cause):
            converted.add_directed_edge(nodes[cause], nodes[effect])
        elif str(cause) < str(effect):
            converted.add_edge(Edge(nodes[cause], nodes[effect], Endpoint.TAIL, Endpoint.TAIL))
    return converted


def from_causallearn(general: Any) -> nx.DiGraph:
    """From a causal-learn graph; an arrowhead at one end alone, whatever the other end, gives a directed edge.

    All other edges (two tails, two circles, circle and tail, two arrowheads) become undirected: FCI's ``<->`` says that neither
    causes the other, which this form cannot tell. Nodes of type LATENT, and nodes that were added under a name such as ``L1``
    by RLCD or GIN, which mark them so, are latent.
    """
    from causallearn.graph.Endpoint import Endpoint
    from causallearn.graph.NodeType import NodeType

    graph = nx.DiGraph()
    for node in general.get_nodes():
        graph.add_node(node.get_name(), latent=node.get_node_type() == NodeType.LATENT)
    for edge in general.get_graph_edges():
        a, b = edge.get_node1().get_name(), edge.get_node2().get_name()
        at_a, at_b = edge.get_endpoint1() == Endpoint.ARROW, edge.get_endpoint2() == Endpoint.ARROW
        if at_b or not at_a:
            graph.add_edge(a, b)
        if at_a or not at_b:
            graph.add_edge(b, a)
    return graph


def to_pgmpy(graph: nx.DiGraph) -> Any:
    """A pgmpy ``DAG``, or ``PDAG`` where edges are undirected; latent nodes are marked as such."""
    from pgmpy.base import DAG, PDAG

    latents = set(latent_nodes(graph))
    undirected = [(a, b) for a, b in graph.edges if graph.has_edge(b, a) and str(a) < str(b)]
    directed = sorted(_directed(graph))
    if undirected:
        converted = PDAG(directed_ebunch=directed, undirected_ebunch=undirected, latents=latents)
    else:
        converted = DAG(directed, latents=latents)
    converted.add_nodes_from([node for node in graph if node not in converted])
    return converted


def from_pgmpy(model: Any) -> nx.DiGraph:
    """From a pgmpy ``DAG``, ``PDAG`` or Bayesian network."""
    graph = nx.DiGraph()
    latents = set(getattr(model, "latents", ()))
    graph.add_nodes_from((node, {"latent": node in latents}) for node in model.nodes())
    graph.add_edges_from(model.edges())
    graph.add_edges_from((b, a) for a, b in getattr(model, "undirected_edges", ()))
    return graph
