"""What the search knows at any time: observed variables, covers (groups of latents with the same neighbours), and whom it asks for ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import networkx as nx
import numpy as np

from cameraready.causal._graphs import separation_number


class Ranks(Protocol):
    """What the search asks: `RankTest` answers from data, `OracleRank` from a graph."""

    names: tuple[str, ...]
    n_tests: int

    def pvalue(self, a: Sequence[int], b: Sequence[int], r: int, given: Sequence[int] = ...) -> float: ...

    def scan(
        self, universe: Sequence[int], candidates: Sequence[Sequence[int]], r: int, given: Sequence[int] = ...
    ) -> np.ndarray: ...


class OracleRank:
    """Answers rank tests from a graph instead of data, for checking a search; `LatentStructure.fit_ranks` takes it.

    Parameters
    ----------
    graph : networkx.DiGraph
        Acyclic; nodes with ``latent=True`` are not among the columns.
    """

    def __init__(self, graph: nx.DiGraph) -> None:
        if not nx.is_directed_acyclic_graph(graph):
            raise ValueError("the graph has a cycle")
        self.graph = graph
        self.names = tuple(node for node, latent in graph.nodes(data="latent") if not latent)
        self.n_tests = 0
        self._known: dict[tuple[frozenset[int], frozenset[int]], int] = {}

    def rank(self, a: Sequence[int], b: Sequence[int], given: Sequence[int] = ()) -> int:
        """Generic rank of the cross-covariance of columns `a` and `b` after regression on the columns `given`."""
        left, right = frozenset(a) | frozenset(given), frozenset(b) | frozenset(given)
        if (left, right) not in self._known:
            self._known[left, right] = separation_number(
                self.graph, (self.names[i] for i in left), (self.names[i] for i in right)
            )
        return self._known[left, right] - len(set(given))

    def pvalue(self, a: Sequence[int], b: Sequence[int], r: int, given: Sequence[int] = ()) -> float:
        """1 where the rank is at most `r`, otherwise 0."""
        self.n_tests += 1
        return float(self.rank(a, b, given) <= r)

    def scan(
        self, universe: Sequence[int], candidates: Sequence[Sequence[int]], r: int, given: Sequence[int] = ()
    ) -> np.ndarray:
        """`pvalue` of each candidate set of columns against the rest of `universe`."""
        return np.array(
            [self.pvalue(a, [j for j in universe if j not in set(a)], r, given) for a in candidates], dtype=float
        )


@dataclass(eq=False)
class Cover:
    """Latent variables that share all neighbours, and so can be told from one another only up to rotation.

    Attributes
    ----------
    latents : int
        How many latent variables it has.
    children : list of int or Cover
        Observed variables (column indices) and covers that it separates from everything else.
    coparents : tuple of int
        Observed variables that together with the latents separate the children.
    """

    latents: int
    children: list[Node]
    coparents: tuple[int, ...] = ()
    measured: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.refresh()

    def refresh(self) -> None:
        """Recompute the observed variables that stand for the cover, after a change of `children`."""
        self.measured = tuple(sorted({column for child in self.children for column in columns_of(child)}))


Node = int | Cover


def columns_of(node: Node) -> tuple[int, ...]:
    """The observed variables that stand for a node in a rank test."""
    return node.measured if isinstance(node, Cover) else (node,)


def columns_of_all(nodes: Iterable[Node]) -> list[int]:
    return sorted({column for node in nodes for column in columns_of(node)})


def size_of(node: Node) -> int:
    """The largest rank that a node can contribute."""
    return node.latents if isinstance(node, Cover) else 1


def total_size(nodes: Iterable[Node]) -> int:
    return sum(size_of(node) for node in nodes)


def order_of(node: Node) -> tuple[int, ...]:
    """A key that sorts nodes independently of how they were found."""
    return columns_of(node)


def context_of(nodes: Iterable[Node]) -> set[int]:
    """Observed variables that must be held fixed for the covers among `nodes` to stand for their latents alone."""
    found: set[int] = set()
    for node in nodes:
        if isinstance(node, Cover):
            found |= set(node.coparents) | context_of(child for child in node.children if isinstance(child, Cover))
    return found


def halves(cover: Cover) -> tuple[list[int], list[int]] | None:
    """The columns of a cover's children in two parts, each of at least the cover's rank; None where there are too few.

    To hold a latent cover fixed in a rank test, one part joins either side (Silva et al., 2006).
    """
    parts: tuple[list[int], list[int]] = ([], [])
    sizes = [0, 0]
    for child in sorted(cover.children, key=lambda child: (-size_of(child), order_of(child))):
        to = int(sizes[1] < sizes[0])
        parts[to].extend(columns_of(child))
        sizes[to] += size_of(child)
    return parts if min(sizes) >= cover.latents else None


def separation_pvalue(
    ranks: Ranks, a: Sequence[Node], b: Sequence[Node], by: Sequence[Node], fixed: Iterable[int] = ()
) -> float:
    """P-value of "`by` separates `a` from `b`": conditional independence of observed and latent nodes alike, as a rank.

    Observed separators are regressed on; a latent one gives half of its children to either side, so that it accounts for as much
    rank as it has latents, and nothing may be left (trek separation; Sullivant et al., 2010). 0.0 where that cannot be tested: a
    cover has too few children to be split, or one side must itself be held fixed.
    """
    left, right = set(columns_of_all(a)), set(columns_of_all(b))
    given = set(fixed) | context_of([*a, *b, *by])
    rank = 0
    for node in by:
        if isinstance(node, Cover):
            parts = halves(node)
            if parts is None:
                return 0.0
            left |= set(parts[0])
            right |= set(parts[1])
            rank += node.latents
        else:
            given.add(node)
    if not set(columns_of_all(a)) - given or not set(columns_of_all(b)) - given:
        return 0.0
    left, right = left - given, right - given
    if min(len(left), len(right)) <= rank:
        return 0.0
    return ranks.pvalue(sorted(left), sorted(right), rank, sorted(given))
