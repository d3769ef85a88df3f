"""Nested dissection of a sparse symmetric matrix, and the structure of its Cholesky factor.

A graph whose vertices have coordinates is cut in two across its longest side; the vertices of one half that touch the other
are the separator and are eliminated last; both halves are cut again (George, 1973). All domains of a level are cut at once,
in vectorised passes over the remaining edges, so that the ordering costs O(edges x levels). Where cutting no longer pays (a
separator as large as a half) the domain becomes one dense block: for a dense matrix the method is the dense Cholesky
factorisation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy import sparse
from scipy.sparse import csgraph

# Below this many vertices a dense block is cheaper than two halves, and a separator above this share of its domain ends cutting.
LEAF = 128
WORST_SEPARATOR = 0.45


class Tree(NamedTuple):
    """The assembly tree: nodes in post-order, each with its own variables.

    order (n,): the vertex at each elimination position. start (nodes + 1,): node t owns positions start[t]:start[t + 1].
    parent (nodes,): -1 for roots. depth (nodes,): 0 for roots.
    """

    order: np.ndarray
    start: np.ndarray
    parent: np.ndarray
    depth: np.ndarray


def nested_dissection(coordinates: np.ndarray, rows: np.ndarray, cols: np.ndarray, *, leaf: int = LEAF) -> Tree:
    """The assembly tree of a graph with `coordinates` (n, d) and edges (rows, cols); self-loops are ignored.

    Correct for any graph; good when the edges join points that are close in the coordinates.
    """
    n = len(coordinates)
    owner = np.full(n, -1)
    parents: list[int] = []
    # Vertices of the domains still to cut, domain by domain; `above` is the separator node over each domain.
    vertices, sizes, above = np.arange(n), np.array([n]), np.array([-1])
    off = rows != cols
    tails, heads = rows[off].astype(np.int32), cols[off].astype(np.int32)
    where = np.empty(n, dtype=np.int32)
    while len(sizes):
        small = sizes <= leaf
        domain = np.repeat(np.arange(len(sizes)), sizes)
        side = _halves(coordinates, vertices, domain, sizes)
        halves = 2 * domain + side
        where[vertices] = halves
        cut = _separator(tails, heads, where, len(sizes))
        cut_sizes = np.bincount(domain[cut[vertices]], minlength=len(sizes))
        ends = small | (cut_sizes > WORST_SEPARATOR * sizes)
        # A domain that ends becomes a node with all its vertices; another leaves its separator behind, if it has one.
        owned = cut[vertices] | ends[domain]
        has_node = ends | (cut_sizes > 0)
        node = np.where(has_node, len(parents) + np.cumsum(has_node) - 1, above)
        parents.extend(above[has_node].tolist())
        owner[vertices[owned]] = node[domain[owned]]
        rest, halves = vertices[~owned], halves[~owned]
        vertices = rest[np.argsort(halves, kind="stable")]
        counts = np.bincount(halves, minlength=2 * len(sizes))
        above = np.repeat(node, 2)[counts > 0]
        sizes = counts[counts > 0]
        # No edge is left between two halves, because one of its ends is in the separator.
        free = owner < 0
        inner = np.flatnonzero(free[tails] & free[heads])
        tails, heads = tails[inner], heads[inner]
    return _postorder(owner, np.array(parents, dtype=np.int64))


def _halves(coordinates: np.ndarray, vertices: np.ndarray, domain: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """0 or 1 for each vertex: its side of the median across the longest side of its domain."""
    firsts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    here = coordinates[vertices]
    spread = np.maximum.reduceat(here, firsts) - np.minimum.reduceat(here, firsts)
    key = here[np.arange(len(here)), spread.argmax(axis=1)[domain]]
    ranked = np.lexsort((key, domain))
    side = np.empty(len(vertices), dtype=np.int64)
    side[ranked] = (np.arange(len(vertices)) - firsts[domain]) * 2 >= sizes[domain]
    return side


def _separator(tails: np.ndarray, heads: np.ndarray, where: np.ndarray, domains: int) -> np.ndarray:
    """A mask over all vertices: of each domain, the smaller set of those that touch its other half."""
    crossing = np.flatnonzero(where[tails] != where[heads])
    touching = np.zeros(len(where), dtype=bool)
    touching[tails[crossing]] = True
    touching[heads[crossing]] = True
    found = np.flatnonzero(touching)
    counts = np.bincount(where[found], minlength=2 * domains).reshape(domains, 2)
    smaller = 2 * np.arange(domains) + (counts[:, 1] < counts[:, 0])
    chosen = np.zeros(2 * domains, dtype=bool)
    chosen[smaller] = True
    touching[found] = chosen[where[found]]
    return touching


def _postorder(owner: np.ndarray, parent: np.ndarray) -> Tree:
    """Nodes renumbered so that each subtree is contiguous and ends with its root."""
    count = len(parent)
    children: list[list[int]] = [[] for _ in range(count + 1)]
    for node, above in enumerate(parent.tolist()):
        children[above].append(node)  # roots land in the last list, at index -1
    rank = np.empty(count, dtype=np.int64)
    stack, place = list(children[-1]), count
    while stack:  # reversed pre-order is a post-order
        node = stack.pop()
        place -= 1
        rank[node] = place
        stack.extend(children[node])
    renumbered = np.full(count, -1)
    renumbered[rank] = np.where(parent >= 0, rank[parent], -1)
    depth = np.zeros(count, dtype=np.int64)
    for node in range(count - 1, -1, -1):
        if renumbered[node] >= 0:
            depth[node] = depth[renumbered[node]] + 1
    node_of = rank[owner]
    order = np.argsort(node_of, kind="stable")
    start = np.concatenate([[0], np.cumsum(np.bincount(node_of, minlength=count))])
    return Tree(order, start, renumbered, depth)


def graph_coordinates(n: int, rows: np.ndarray, cols: np.ndarray, *, landmarks: int = 3) -> np.ndarray:
    """Coordinates (n, landmarks) for a graph that has none: distances in steps from vertices far from each other.

    Vertices that a landmark cannot reach lie beyond all others, so that components are separated first.
    """
    weights = np.ones(len(rows), dtype=np.int8)
    graph = sparse.csr_matrix((weights, (rows, cols)), shape=(n, n))
    start, found = 0, []
    for _ in range(landmarks):
        steps = csgraph.shortest_path(graph, directed=False, unweighted=True, indices=start)
        steps[np.isinf(steps)] = 2 * n
        found.append(steps)
        start = int(np.argmax(np.min(found, axis=0)))
    return np.stack(found, axis=1)


@dataclass(frozen=True)
class Structure:
    """The structure of the factor of a matrix with given upper-triangle entries, computed once for a pattern.

    boundary: for node t, the later positions its columns reach are boundary[boundary_start[t]:boundary_start[t + 1]], sorted.
    entry_order sorts the matrix' entries by node; entry_start (nodes + 1,) delimits them; entry_place is each entry's place in
    the node's panel, a C-ordered array (own + boundary rows, own columns) of which the lower part is filled.
    parent_rows: aligned with `boundary`, the row of the parent's front to which that row is added.
    """

    tree: Tree
    boundary: np.ndarray
    boundary_start: np.ndarray
    entry_order: np.ndarray
    entry_start: np.ndarray
    entry_place: np.ndarray
    parent_rows: np.ndarray

    @property
    def nonzeros(self) -> int:
        """The entries stored for the factor, dense blocks counted in full."""
        own = np.diff(self.tree.start)
        return int((own * (own + np.diff(self.boundary_start))).sum())

    @property
    def update_bytes(self) -> int:
        """The largest front in bytes: what the factorisation needs beyond the factor itself, roughly halved."""
        return int(8 * (np.diff(self.boundary_start).max(initial=0) ** 2))


def structure_of(tree: Tree, rows: np.ndarray, cols: np.ndarray) -> Structure:
    """The factor's structure for entries (rows, cols), each pair of the upper triangle once."""
    n, nodes = len(tree.order), len(tree.parent)
    position = np.empty(n, dtype=np.int64)
    position[tree.order] = np.arange(n)
    node_of = np.repeat(np.arange(nodes), np.diff(tree.start))
    first, second = position[rows], position[cols]
    early, late = np.minimum(first, second), np.maximum(first, second)
    node = node_of[early]
    keys = _boundary_keys(tree, node_of, node, late, n)
    boundary = keys % n
    boundary_start = np.searchsorted(keys, np.arange(nodes + 1) * n)
    own = np.diff(tree.start)
    inside = late < tree.start[node + 1]
    row = late - tree.start[node]
    outside = np.flatnonzero(~inside)
    row[outside] = (own - boundary_start[:-1])[node[outside]] + np.searchsorted(keys, node[outside] * n + late[outside])
    place = row * own[node] + (early - tree.start[node])
    entry_order = np.argsort(node, kind="stable")
    entry_start = np.concatenate([[0], np.cumsum(np.bincount(node, minlength=nodes))])
    return Structure(
        tree, boundary, boundary_start, entry_order, entry_start, place[entry_order],
        _parent_rows(tree, node_of, keys, boundary_start, n),
    )  # fmt: skip


def _boundary_keys(tree: Tree, node_of: np.ndarray, node: np.ndarray, late: np.ndarray, n: int) -> np.ndarray:
    """Sorted keys node * n + position of all boundaries, built from the deepest level up."""
    outside = node_of[late] != node
    keys = np.unique(node[outside] * n + late[outside])
    level = tree.depth[keys // n]
    by_level = np.argsort(level, kind="stable")
    bounds = np.searchsorted(level[by_level], np.arange(tree.depth.max(initial=0) + 2))
    carried = np.empty(0, dtype=np.int64)
    found = []
    for depth in range(len(bounds) - 2, -1, -1):
        own = keys[by_level[bounds[depth] : bounds[depth + 1]]]
        here = np.union1d(own, carried) if len(carried) else own
        found.append(here)
        parent, late_here = tree.parent[here // n], here % n
        on = node_of[late_here] != parent
        carried = parent[on] * n + late_here[on]
    return np.sort(np.concatenate(found)) if found else keys


def _parent_rows(tree: Tree, node_of: np.ndarray, keys: np.ndarray, boundary_start: np.ndarray, n: int) -> np.ndarray:
    node, late = keys // n, keys % n
    parent = tree.parent[node]
    own = np.diff(tree.start)
    rows = late - tree.start[parent]
    beyond = np.flatnonzero(node_of[late] != parent)
    above = parent[beyond]
    rows[beyond] = own[above] + np.searchsorted(keys, above * n + late[beyond]) - boundary_start[above]
    return rows
