"""The prefix tree of an enumerable task: its distinct prefixes, level by level, so that a network runs over each of them once."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Level:
    """The prefixes of one length that leave a choice below them.

    Attributes
    ----------
    parent : (M_t,) int64
        Position in the level above of the prefix without its last token.
    token : (M_t,) int64
        Last token of the prefix; at the root, 0 and unused.
    allowed : (M_t, V) bool
        Tokens that may follow.
    child : (M_t, V) int64
        Position in the level below; ``-1 - i`` where completion ``i`` is determined from there on; ``NOWHERE`` where the token may not follow.
    """

    parent: Tensor
    token: Tensor
    allowed: Tensor
    child: Tensor

    def __len__(self) -> int:
        return len(self.token)


NOWHERE = torch.iinfo(torch.int64).min


class Trie:
    """Prefix tree of completions (N, T).

    A prefix below which one completion remains is not a node: its tokens have probability one. A policy's distribution at a node is its softmax over the tokens allowed there, so the probabilities of all completions sum to one.

    Parameters
    ----------
    tokens : (N, T) int64
    lengths : (N,) int64
    vocabulary : int

    Attributes
    ----------
    levels : list of Level
    tokens : (N, T) int64
    path : (N, T) int64
        Position in level ``t`` of the prefix of length ``t`` of each completion, -1 where it is determined.

    Raises
    ------
    ValueError
        If two completions are equal or one begins another.
    """

    def __init__(self, tokens: Tensor, lengths: Tensor, vocabulary: int):
        table, length = tokens.numpy(), lengths.numpy()
        count, longest = table.shape
        self.levels: list[Level] = []
        path = np.full((count, longest), -1, dtype=np.int64)
        alive = np.arange(count)
        node = np.zeros(count, dtype=np.int64)  # position of each live completion's prefix in the present level
        parent, last = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
        if count == 1:
            alive = alive[:0]
        for depth in range(longest):
            if not len(alive):
                break
            ended = alive[length[alive] <= depth]
            if len(ended):
                raise ValueError(
                    f"completion {int(ended[0])} is equal to another or begins another: give each an end token, so that the set is prefix-free"
                )
            path[alive, depth] = node
            edges, edge = np.unique(node * vocabulary + table[alive, depth], return_inverse=True)
            below = np.bincount(edge, minlength=len(edges))
            goes_on = below > 1
            position = np.cumsum(goes_on) - 1
            only = np.zeros(len(edges), dtype=np.int64)
            only[edge] = alive
            child = np.full((len(parent), vocabulary), NOWHERE, dtype=np.int64)
            child[edges // vocabulary, edges % vocabulary] = np.where(goes_on, position, -1 - only)
            self.levels.append(
                Level(
                    torch.from_numpy(parent),
                    torch.from_numpy(last),
                    torch.from_numpy(child != NOWHERE),
                    torch.from_numpy(child),
                )
            )
            keep = goes_on[edge]
            alive, node = alive[keep], position[edge[keep]]
            parent, last = edges[goes_on] // vocabulary, edges[goes_on] % vocabulary
        if len(alive):
            raise ValueError(
                f"completion {int(alive[0])} is equal to another: the completions of a task must be different"
            )
        self.tokens = tokens
        self.path = torch.from_numpy(path)
        self.vocabulary = vocabulary

    @property
    def nodes(self) -> int:
        """Number of prefixes with a choice below them."""
        return sum(map(len, self.levels))

    def conditionals(self, weights: Tensor) -> list[Tensor]:
        """Next-token distributions (P, M_t, V) at each level's prefixes of a distribution (P, N) over completions.

        Uniform over the allowed tokens below prefixes without mass.
        """
        weights = weights.to(torch.float64)
        tables = []
        for depth, level in enumerate(self.levels):
            alive = torch.nonzero(self.path[:, depth] >= 0)[:, 0]
            edge = self.path[alive, depth] * self.vocabulary + self.tokens[alive, depth]
            flow = torch.zeros(len(weights), len(level) * self.vocabulary, dtype=torch.float64).index_add_(
                1, edge, weights[:, alive]
            )
            flow = flow.view(len(weights), len(level), self.vocabulary)
            total = flow.sum(-1, keepdim=True)
            uniform = level.allowed / level.allowed.sum(-1, keepdim=True)
            tables.append(torch.where(total > 0, flow / total.clamp_min(torch.finfo(torch.float64).tiny), uniform))
        return tables

    def sequences(self, edges: list[Tensor]) -> Tensor:
        """Log-probabilities (..., N) of the completions, from those of the tokens at each level's prefixes, (..., M_t, V)."""
        reach: Tensor | None = None
        pieces, order = [], []
        for depth, level in enumerate(self.levels):
            flow = (edges[depth] if reach is None else edges[depth] + reach[..., None]).flatten(-2)
            child = level.child.flatten()
            ends = torch.nonzero((child < 0) & (child != NOWHERE))[:, 0]
            pieces.append(flow[..., ends])
            order.append(-1 - child[ends])
            if depth + 1 < len(self.levels):
                below = self.levels[depth + 1]
                reach = flow[..., below.parent * self.vocabulary + below.token]
        return torch.cat(pieces, -1)[..., torch.argsort(torch.cat(order))]
