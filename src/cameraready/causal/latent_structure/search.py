"""The search for latent covers: which sets of variables hang on the rest by fewer dimensions than they have members.

After the rank-based search of Dong et al. (ICLR 2024, "A Versatile Causal Discovery Framework to Allow Causally-Related Hidden
Variables"). What differs: candidates are merged only if the union passes the test as a whole; an explanation by nodes that are known
takes precedence over a new latent; of several explanations at one rank the one that accounts for most nodes is adopted, and those
that rest on a single test wait until nothing better is found; what remains is handed to a skeleton search over latent and observed
nodes (`cameraready.causal.latent_structure.orientation`) instead of being unfolded again and again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from cameraready.causal.latent_structure.covers import (
    Cover,
    Node,
    Ranks,
    columns_of,
    columns_of_all,
    context_of,
    order_of,
    separation_pvalue,
    size_of,
    total_size,
)

#: Known nodes explain a candidate unless that is rejected, latent ones at this fraction of the level: a cover that was found at a p-value
#: near the level would otherwise fail in every test that it takes part in, and new latents would be put in its place. Observed ones
#: must fit better than that: with few rows a reliable indicator looks like the latent that it measures.
LATENT_FACTOR, OBSERVED_FACTOR = 0.1, 10.0


def _level(alpha: float, known: Sequence[Node]) -> float:
    """Level at which an explanation by `known` nodes is rejected."""
    latent = all(isinstance(node, Cover) for node in known)
    return LATENT_FACTOR * alpha if latent else min(OBSERVED_FACTOR * alpha, 0.5)


@dataclass
class Found:
    """The search's state.

    Attributes
    ----------
    active : list of nodes
        Nodes that have not been explained yet.
    covers : list of Cover
        In the order of discovery.
    leaves : list of (leaf, neighbour)
        Nodes with a single neighbour, which was active then.
    settled : list of nodes
        Nodes that two or more known nodes separate from all others; the skeleton search decides which of them are neighbours.
    isolated : list of nodes
    """

    active: list[Node]
    covers: list[Cover] = field(default_factory=list)
    leaves: list[tuple[Node, Node]] = field(default_factory=list)
    settled: list[Node] = field(default_factory=list)
    isolated: list[Node] = field(default_factory=list)

    def remove(self, nodes: Sequence[Node]) -> None:
        self.active = [node for node in self.active if node not in nodes]


@dataclass(frozen=True)
class Explanation:
    """Members that `known` nodes and `latents` new ones separate from the other active nodes and, where latents are none, each other."""

    members: tuple[Node, ...]
    known: tuple[Node, ...]
    latents: int
    pvalue: float

    @property
    def merit(self) -> tuple[int, int, float]:
        """More nodes accounted for first, then fewer new latents, then the larger p-value."""
        return len(self.members) + len(self.known), -self.latents, self.pvalue

    @property
    def rests_on_one_test(self) -> bool:
        """Too little to act on while there may be better; a single leaf of a latent is not, whose own tests have been passed."""
        if self.latents:
            return len(self.members) < self.latents + 2
        return len(self.members) < 2 and not any(isinstance(node, Cover) for node in self.known)


def find_covers(ranks: Ranks, columns: Sequence[int], alpha: float, max_cover: int) -> Found:
    """Search for covers of up to `max_cover` members among `columns`, from small to large, starting over after each success."""
    found = Found(list(columns))
    _drop_isolated(ranks, found, alpha)
    while len(found.active) > 2:
        levels = [(k, minimal) for minimal in (False, True) for k in range(1, max_cover + 1)]
        if not any(_grow(ranks, found, k, alpha, minimal) for k, minimal in levels):
            break
    return found


def _drop_isolated(ranks: Ranks, found: Found, alpha: float) -> None:
    """Take out variables that are independent of all others, the least dependent first (Bonferroni: noise alone stays without edges)."""
    while len(found.active) > 1:
        universe = columns_of_all(found.active)
        pvalues = ranks.scan(universe, [(column,) for column in universe], 0)
        best = int(pvalues.argmax())
        if pvalues[best] <= alpha / len(universe):
            return
        found.isolated.append(universe[best])
        found.remove([universe[best]])
    found.isolated.extend(found.active)
    found.active = []


def _grow(ranks: Ranks, found: Found, k: int, alpha: float, minimal: bool) -> bool:
    """Adopt the best explanations by `k` parents; `minimal` admits those that rest on a single test. True if there was one."""
    families = [[e] for e in _known_explanations(ranks, found, k, alpha)]
    observed = [node for node in sorted(found.active, key=order_of) if not isinstance(node, Cover)]
    for fixed_count in range(k - 1, -1, -1):
        for fixed in combinations(observed, fixed_count):
            families.append(_latent_explanations(ranks, found, k - fixed_count, fixed, alpha))
    families = [[e for e in family if minimal or not e.rests_on_one_test] for family in families]
    families = [family for family in families if family]
    if not families:
        return False
    for explanation in max(families, key=lambda family: max(e.merit for e in family)):
        _adopt(found, explanation)
    return True


def _adopt(found: Found, explanation: Explanation) -> None:
    members = sorted(explanation.members, key=order_of)
    found.remove(members)
    if explanation.latents:
        fixed = tuple(node for node in explanation.known if not isinstance(node, Cover))
        cover = Cover(explanation.latents, members, fixed)
        found.covers.append(cover)
        found.active.append(cover)
    elif len(explanation.known) > 1:
        found.settled.extend(members)
    else:
        by = explanation.known[0]
        found.leaves.extend((member, by) for member in members)
        if isinstance(by, Cover):
            by.children.extend(members)
            for cover in found.covers:
                cover.refresh()


# --- explanations by known nodes ------------------------------------------------------------------------------------


def _known_explanations(ranks: Ranks, found: Found, k: int, alpha: float) -> list[Explanation]:
    """For every set of active nodes of total size `k`: the active nodes that it separates from all others, if any."""
    nodes = sorted(found.active, key=order_of)
    explanations = []
    for count in range(1, k + 1):
        for known in combinations(nodes, count):
            if total_size(known) != k:
                continue
            others = [*(node for node in nodes if node not in known), *found.settled]
            if len(others) < 2:
                continue
            separated = [
                (leaf, pvalue)
                for leaf, pvalue in zip(others, _leaf_pvalues(ranks, others, known), strict=True)
                if pvalue > max(alpha, _level(alpha, known))
                and leaf not in found.settled
                and any(_linked(ranks, leaf, by, alpha) for by in known)
            ]
            if separated:
                members = tuple(leaf for leaf, _ in separated)
                explanations.append(Explanation(members, known, 0, max(p for _, p in separated)))
    return explanations


def _leaf_pvalues(ranks: Ranks, others: Sequence[Node], known: Sequence[Node]) -> list[float]:
    """P-values of "`known` separates this node from all the others", for each of `others`."""
    if not any(isinstance(node, Cover) for node in [*others, *known]):
        columns = [column for node in others for column in columns_of(node)]
        return [float(p) for p in ranks.scan(columns, [(c,) for c in columns], 0, columns_of_all(known))]
    return [separation_pvalue(ranks, [leaf], [node for node in others if node is not leaf], known) for leaf in others]


def _linked(ranks: Ranks, a: Node, b: Node, alpha: float) -> bool:
    return separation_pvalue(ranks, [a], [b], []) <= alpha


# --- explanations by new latents ------------------------------------------------------------------------------------


def _candidates(nodes: Sequence[Node], rank: int) -> Iterator[tuple[Node, ...]]:
    """Smallest sets of two or more nodes that could contribute more than `rank`."""
    for count in range(2, rank + 2):
        for chosen in combinations(nodes, count):
            size = total_size(chosen)
            smaller = size - max(size_of(node) for node in chosen)
            if size > rank and (count == 2 or smaller <= rank):
                yield chosen


def _latent_explanations(
    ranks: Ranks, found: Found, rank: int, fixed: tuple[int, ...], alpha: float
) -> list[Explanation]:
    """Disjoint groups of active nodes under `rank` new latents, given the observed nodes `fixed`."""
    everything = [*found.active, *found.settled]
    given = sorted(set(fixed) | context_of(everything))
    nodes = sorted((node for node in everything if node not in given), key=order_of)
    total = total_size(nodes)
    open_nodes = [node for node in nodes if node not in found.settled]
    candidates = [c for c in _candidates(open_nodes, rank) if total - total_size(c) > rank]
    if not candidates:
        return []
    universe = columns_of_all(nodes)
    pvalues = ranks.scan(universe, [columns_of_all(candidate) for candidate in candidates], rank, given)
    known = {frozenset(candidate): float(p) for candidate, p in zip(candidates, pvalues, strict=True)}
    groups: list[Explanation] = []
    for i in sorted(range(len(candidates)), key=lambda i: (-pvalues[i], i)):
        if pvalues[i] <= alpha:
            break
        new = Explanation(candidates[i], fixed, rank, float(pvalues[i]))
        groups = _with(ranks, groups, known, nodes, new, alpha)
    return groups


def _with(
    ranks: Ranks,
    groups: list[Explanation],
    known: Mapping[frozenset[Node], float],
    nodes: Sequence[Node],
    new: Explanation,
    alpha: float,
) -> list[Explanation]:
    """`groups` with a candidate: merged with those that it touches if it shares all but one of its nodes with one, or beside them."""
    members = set(new.members)
    touching = [group for group in groups if members & set(group.members)]
    if any(members <= set(group.members) for group in touching) or not _sound(ranks, nodes, new, alpha):
        return groups
    if not touching:
        return [*groups, new]
    if max(len(members & set(group.members)) for group in touching) < len(members) - 1:
        return groups
    union = tuple(sorted({node for group in [*touching, new] for node in group.members}, key=order_of))
    pvalue = _union_pvalue(ranks, known, nodes, union, new)
    if pvalue <= alpha:
        return groups
    return [*(group for group in groups if group not in touching), Explanation(union, new.known, new.latents, pvalue)]


def _union_pvalue(
    ranks: Ranks,
    known: Mapping[frozenset[Node], float],
    nodes: Sequence[Node],
    union: Sequence[Node],
    new: Explanation,
) -> float:
    """P-value of the union as one group; where it leaves too little over for a test, that of its parts (Bonferroni)."""
    rest = [node for node in nodes if node not in union]
    given = _given(new, nodes)
    if total_size(rest) > new.latents:
        left, right = (sorted(set(columns_of_all(side)) - set(given)) for side in (union, rest))
        return ranks.pvalue(left, right, new.latents, given)
    parts = [part for part in _candidates(union, new.latents) if frozenset(part) in known]
    return min(1.0, min(known[frozenset(part)] for part in parts) * len(parts))


def _given(new: Explanation, nodes: Sequence[Node]) -> list[int]:
    return sorted(set(columns_of_all(new.known)) | context_of(nodes))


def _sound(ranks: Ranks, nodes: Sequence[Node], new: Explanation, alpha: float) -> bool:
    """Whether a candidate needs new latents: it is no effect of a collider, and no known nodes explain it."""
    rest = [node for node in nodes if node not in new.members]
    return not _collides(ranks, new, rest, alpha) and not _explained(ranks, new, rest, alpha)


def _collides(ranks: Ranks, new: Explanation, rest: Sequence[Node], alpha: float) -> bool:
    """Some members have less to do with one another or the rest than common latents give them, or too little rest has to do with them."""
    given = _given(new, [*new.members, *rest])
    for a, b in combinations(new.members, 2):
        if separation_pvalue(ranks, [a], [b], [], given) > alpha:
            return True
    if not _opposed(ranks, new, rest, given, alpha):
        return True
    right = sorted(set(columns_of_all(rest)) - set(given))
    if new.known:
        # Holding a common effect fixed links its causes; what latents link is linked without that.
        left = sorted(set(columns_of_all(new.members)) - set(given))
        context = sorted(set(given) - set(columns_of_all(new.known)))
        if ranks.pvalue(left, right, new.latents - 1, context) > alpha:
            return True
    for count in range(1, len(new.members)):
        for part in combinations(new.members, count):
            left = sorted(set(columns_of_all(part)) - set(given))
            most = min(total_size(part), new.latents)
            if left and right and ranks.pvalue(left, right, most - 1, given) > alpha:
                return True
    return False


def _opposed(ranks: Ranks, new: Explanation, rest: Sequence[Node], given: Sequence[int], alpha: float) -> bool:
    """Whether the rest holds nodes that could have shown a higher rank: more than the latents, each few of them of full rank.

    Without them the rank is low because of few nodes on the other side, not because of something behind the members.
    """
    left = sorted(set(columns_of_all(new.members)) - set(given))
    opposite = [node for node in rest if separation_pvalue(ranks, new.members, [node], [], given) <= alpha]
    return any(
        total_size(chosen) > new.latents
        and all(
            ranks.pvalue(left, columns_of_all(part), min(total_size(part), new.latents) - 1, given) <= alpha
            for size in range(2, count)
            for part in combinations(chosen, size)
        )
        for count in range(1, new.latents + 2)
        for chosen in combinations(opposite, count)
    )


def _explained(ranks: Ranks, new: Explanation, rest: Sequence[Node], alpha: float) -> bool:
    """Known nodes of the same total size as the new latents separate the members from the rest."""
    everything = [*new.members, *rest]
    fixed = columns_of_all(new.known)
    for count in range(1, new.latents + 1):
        for by in combinations(everything, count):
            if total_size(by) != new.latents:
                continue
            left = [node for node in new.members if node not in by]
            right = [node for node in rest if node not in by]
            if left and right and separation_pvalue(ranks, left, right, by, fixed) > _level(alpha, by):
                return True
    return False
