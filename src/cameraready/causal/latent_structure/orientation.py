"""From covers to a graph: which of the remaining nodes are adjacent, and which directions the data determine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

import networkx as nx

from cameraready.causal.latent_structure.covers import (
    Cover,
    Node,
    Ranks,
    order_of,
    separation_pvalue,
)
from cameraready.causal.latent_structure.search import Found

#: Largest number of nodes held fixed at once when adjacency is decided.
DEPTH = 3

Pair = frozenset[int]


def skeleton_of(ranks: Ranks, nodes: Sequence[Node], alpha: float) -> tuple[set[Pair], dict[Pair, tuple[int, ...]]]:
    """Adjacent pairs among `nodes`, latent and observed, and what separates the others (indices into `nodes`).

    The skeleton phase of the PC algorithm in its order-independent form (Colombo and Maathuis, 2014), with conditional independence
    read from ranks.
    """
    pairs = {frozenset(pair) for pair in combinations(range(len(nodes)), 2)}
    adjacent = {pair for pair in pairs if not _inseparable(*(nodes[i] for i in sorted(pair)))}
    separators: dict[Pair, tuple[int, ...]] = {}
    for depth in range(DEPTH + 1):
        beside = {i: {j for j in range(len(nodes)) if frozenset((i, j)) in adjacent} for i in range(len(nodes))}
        if all(len(others) - 1 < depth for others in beside.values()):
            break
        for pair in sorted(adjacent, key=sorted):
            i, j = sorted(pair)
            found = _separator(ranks, nodes, i, j, beside, depth, alpha)
            if found is not None:
                separators[pair] = found
        adjacent -= set(separators)
    return adjacent, separators


def _inseparable(a: Node, b: Node) -> bool:
    """An edge between a cover and its observed coparent cannot be told from edges to the children; none is drawn."""
    return (isinstance(a, Cover) and b in a.coparents) or (isinstance(b, Cover) and a in b.coparents)


def _separator(
    ranks: Ranks, nodes: Sequence[Node], i: int, j: int, beside: dict[int, set[int]], depth: int, alpha: float
) -> tuple[int, ...] | None:
    best: tuple[float, tuple[int, ...]] | None = None
    for chosen in sorted(
        {*combinations(sorted(beside[i] - {j}), depth), *combinations(sorted(beside[j] - {i}), depth)}
    ):
        pvalue = separation_pvalue(ranks, [nodes[i]], [nodes[j]], [nodes[z] for z in chosen])
        if pvalue > alpha and (best is None or pvalue > best[0]):
            best = (pvalue, chosen)
    return None if best is None else best[1]


def latent_graph(
    ranks: Ranks, found: Found, columns: Sequence[int], alpha: float
) -> tuple[nx.DiGraph, dict[str, Cover]]:
    """The graph over observed and latent variables, and the cover of each latent name.

    Edges in both directions are undirected. Latents are named L1, L2 ... in the order of the first column that they drive.
    """
    names = ranks.names
    covers = sorted(found.covers, key=order_of)
    labels: dict[int, list[str]] = {}
    owner: dict[str, Cover] = {}
    for cover in covers:
        labels[id(cover)] = _fresh_names(cover.latents, owner, names)
        owner.update(dict.fromkeys(labels[id(cover)], cover))
    graph = nx.DiGraph()
    graph.add_nodes_from((names[column], {"latent": False}) for column in columns)
    graph.add_nodes_from((name, {"latent": True}) for name in owner)

    def labelled(node: Node) -> list[str]:
        return labels[id(node)] if isinstance(node, Cover) else [names[node]]

    for cover in covers:
        for child in cover.children:
            _join(graph, labelled(cover), labelled(child), directed=not isinstance(child, Cover))
            if not isinstance(child, Cover):
                _join_coparents(ranks, graph, cover, child, alpha)
    for leaf, by in found.leaves:
        if not isinstance(by, Cover):
            _join(graph, labelled(by), labelled(leaf), directed=False)
    _join_active(ranks, graph, sorted([*found.active, *found.settled], key=order_of), labelled, alpha)
    apply_meek_rules(graph)
    return graph, owner


def _fresh_names(count: int, taken: Iterable[str], columns: Sequence[str]) -> list[str]:
    used, number = {*taken, *columns}, 1
    fresh: list[str] = []
    while len(fresh) < count:
        if f"L{number}" not in used:
            fresh.append(f"L{number}")
        number += 1
    return fresh


def _join(graph: nx.DiGraph, causes: Sequence[str], effects: Sequence[str], *, directed: bool) -> None:
    for cause in causes:
        for effect in effects:
            graph.add_edge(cause, effect)
            if not directed:
                graph.add_edge(effect, cause)


def _join_coparents(ranks: Ranks, graph: nx.DiGraph, cover: Cover, child: int, alpha: float) -> None:
    for parent in cover.coparents:
        if ranks.pvalue([parent], [child], 0) <= alpha:
            graph.add_edge(ranks.names[parent], ranks.names[child])


def _join_active(ranks: Ranks, graph: nx.DiGraph, nodes: Sequence[Node], labelled: Any, alpha: float) -> None:
    adjacent, separators = skeleton_of(ranks, nodes, alpha)
    for pair in sorted(adjacent, key=sorted):
        i, j = sorted(pair)
        _join(graph, labelled(nodes[i]), labelled(nodes[j]), directed=False)
    for (i, j), middle in _colliders(len(nodes), adjacent, separators):
        for end in (i, j):
            for cause in labelled(nodes[end]):
                for effect in labelled(nodes[middle]):
                    # An earlier collider that says the opposite is kept.
                    if graph.has_edge(cause, effect) and graph.has_edge(effect, cause):
                        graph.remove_edge(effect, cause)


def _colliders(
    n: int, adjacent: set[Pair], separators: dict[Pair, tuple[int, ...]]
) -> list[tuple[tuple[int, int], int]]:
    return [
        ((i, j), middle)
        for (i, j) in combinations(range(n), 2)
        for middle in range(n)
        if frozenset((i, j)) in separators
        and {frozenset((i, middle)), frozenset((j, middle))} <= adjacent
        and middle not in separators[frozenset((i, j))]
    ]


def apply_meek_rules(graph: nx.DiGraph) -> None:
    """Orient undirected edges of `graph`, in place, whose other direction would make a new collider or a cycle (Meek, 1995)."""
    changed = True
    while changed:
        changed = False
        for a, b in sorted(edge for edge in graph.edges if graph.has_edge(edge[1], edge[0])):
            if graph.has_edge(b, a) and graph.has_edge(a, b) and _must_point(graph, a, b):
                graph.remove_edge(b, a)
                changed = True


def _must_point(graph: nx.DiGraph, a: Any, b: Any) -> bool:
    """Whether a - b must be a -> b."""

    def arrow(x: Any, y: Any) -> bool:
        return graph.has_edge(x, y) and not graph.has_edge(y, x)

    def adjacent(x: Any, y: Any) -> bool:
        return graph.has_edge(x, y) or graph.has_edge(y, x)

    if any(arrow(c, a) and not adjacent(c, b) for c in graph.predecessors(a)):
        return True
    if any(arrow(a, c) and arrow(c, b) for c in graph.successors(a)):
        return True
    beside = [c for c in graph.successors(a) if graph.has_edge(c, a) and arrow(c, b)]
    return any(not adjacent(c, d) for c, d in combinations(beside, 2))


def acyclic_extension(graph: nx.DiGraph) -> nx.DiGraph:
    """A directed acyclic graph with the skeleton and the directed edges of `graph` and, where there is one, no new collider.

    Dor and Tarsi (1992); where no such extension exists, undirected edges are directed along an order that keeps latents first.
    """
    work, directed = graph.copy(), nx.DiGraph()
    directed.add_nodes_from(graph.nodes(data=True))
    while work:
        sink = next((node for node in sorted(work) if _is_free_sink(work, node)), None)
        if sink is None:
            return _ordered(graph)
        directed.add_edges_from((other, sink) for other in nx.all_neighbors(work, sink))
        work.remove_node(sink)
    return directed


def _is_free_sink(graph: nx.DiGraph, node: Any) -> bool:
    beside = set(nx.all_neighbors(graph, node))
    if any(not graph.has_edge(other, node) for other in beside):
        return False
    undirected = {other for other in beside if graph.has_edge(node, other)}
    return all(
        graph.has_edge(u, other) or graph.has_edge(other, u) for u in undirected for other in beside if other != u
    )


def _ordered(graph: nx.DiGraph) -> nx.DiGraph:
    kept = nx.DiGraph()
    kept.add_nodes_from(graph.nodes(data=True))
    order = sorted(graph, key=lambda node: (not graph.nodes[node].get("latent"), str(node)))
    directed = sorted(edge for edge in graph.edges if not graph.has_edge(edge[1], edge[0]))
    undirected = [(a, b) for a, b in combinations(order, 2) if graph.has_edge(a, b) and graph.has_edge(b, a)]
    for cause, effect in [*directed, *undirected]:
        if nx.has_path(kept, effect, cause):
            cause, effect = effect, cause
        kept.add_edge(cause, effect)
    return kept
