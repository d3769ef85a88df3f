"""Walking a policy down a task's prefix tree: shared by sampling, by log-probabilities of samples and by the whole enumeration.

A policy offers ``walk(task, prompts)`` with prompts (S, B); the walk's ``level(depth, parent, node, origin)`` returns the log-probabilities (S, U, V) of the tokens at U prefixes a seed: ``node`` (S, U) is their position in the level,
``origin`` (S, U) their prompt's position in the batch, ``parent`` (S, U) the row among all seeds' rows of the level above, S * U of them (at the root: of the S * B prompts), from which they come.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class Walk(Protocol):
    """A policy on its way down the tree."""

    def level(self, depth: int, parent: Tensor, node: Tensor, origin: Tensor) -> Tensor:
        """Log-probabilities (S, U, V), minus infinity at tokens that may not follow."""
        ...


@dataclass(frozen=True)
class Visits:
    """The distinct prefixes of one level that a batch of completions passes through, and where each completion's is.

    Attributes
    ----------
    parent, node, origin : (S, U) int64
        As the walk wants them; seeds with fewer prefixes repeat the first one of the level.
    row : (S, B, n) int64
        Row of the completion's prefix among all S * U; 0 where `active` is false.
    active : (S, B, n) bool
        Whether the completion still has a choice here.
    """

    parent: Tensor
    node: Tensor
    origin: Tensor
    row: Tensor
    active: Tensor


def visits(node: Tensor, active: Tensor, previous: Tensor, size: int) -> Visits:
    """Distinct (prompt, prefix) pairs of each seed.

    Parameters
    ----------
    node : (S, B, n) int64
        Position of each completion's prefix in the level.
    active : (S, B, n) bool
        At least one must be true.
    previous : (S, B, n) int64
        Rows in the level above.
    size : int
        Number of prefixes of the level.
    """
    seeds, batch, n = node.shape
    origin = torch.arange(batch)[None, :, None]
    seed = torch.arange(seeds)[:, None, None]
    key = ((seed * batch + origin) * size + node)[active]
    # The keys are small whole numbers: a table of marks finds the distinct ones faster than a sort.
    mark = torch.zeros(seeds * batch * size, dtype=torch.bool)
    mark[key] = True
    per_seed = mark.view(seeds, -1)
    slot = per_seed.cumsum(1) - 1
    width = int(per_seed.sum(1).max())
    unique = torch.nonzero(mark)[:, 0]
    owner = unique // (batch * size)
    where = slot.flatten()[unique] + owner * width

    def spread(values: Tensor, fill: Tensor) -> Tensor:
        table = fill.expand(seeds, width).flatten().clone()
        table[where] = values
        return table.view(seeds, width)

    row = torch.zeros(seeds, batch, n, dtype=torch.int64)
    row[active] = slot.flatten()[key] + (key // (batch * size)) * width
    above = torch.zeros(seeds * width, dtype=torch.int64)
    above[row[active]] = previous[active]
    zero = torch.zeros((), dtype=torch.int64)
    return Visits(
        parent=above.view(seeds, width),
        node=spread(unique % size, zero),
        origin=spread(unique % (batch * size) // size, zero),
        row=row,
        active=active,
    )


def roots(seeds: int, batch: int, n: int) -> Tensor:
    """Rows (S, B, n) of the prompts, from which the first level's prefixes come."""
    return torch.arange(seeds * batch).view(seeds, batch, 1).expand(seeds, batch, n)


def as_rows(prompts: Tensor | None, task: Any, seeds: int) -> Tensor:
    """Prompts as (S, B): all of the task for None, the same for every seed for a list (B,).

    Raises
    ------
    ValueError
        If a prompt is not of the task, or the shape fits neither.
    """
    rows = torch.arange(task.prompts) if prompts is None else torch.as_tensor(prompts, dtype=torch.int64)
    if rows.dim() == 1:
        rows = rows.expand(seeds, -1)
    if rows.dim() != 2 or len(rows) != seeds:
        raise ValueError(f"prompts must have shape (B,) or ({seeds}, B), got {tuple(rows.shape)}")
    if rows.numel() and (int(rows.min()) < 0 or int(rows.max()) >= task.prompts):
        raise ValueError(
            f"prompts must be between 0 and {task.prompts - 1}, got {int(rows.min())} to {int(rows.max())}"
        )
    return rows


def node_log_probs(policy: Any, task: Any, prompts: Tensor | None = None) -> list[Tensor]:
    """Log-probabilities of the next token at every prefix: for each level (S, B, M_t, V)."""
    rows = as_rows(prompts, task, policy.seeds)
    seeds, batch = rows.shape
    walk = policy.walk(task, rows)
    prompt = torch.arange(batch)[:, None]
    found = []
    above = 1
    for depth, level in enumerate(task.trie.levels):
        size = len(level)
        parent = (prompt * above + level.parent).flatten()
        parent = torch.arange(seeds)[:, None] * (batch * above) + parent
        node = torch.arange(size).repeat(batch).expand(seeds, -1)
        found.append(
            walk.level(depth, parent, node, prompt.expand(-1, size).flatten().expand(seeds, -1)).view(
                seeds, batch, size, -1
            )
        )
        above = size
    return found


def all_log_probs(policy: Any, task: Any, prompts: Tensor | None = None) -> Tensor:
    """Exact log-probabilities (S, B, N) of all completions; see `GRUs.all_log_probs`."""
    rows = as_rows(prompts, task, policy.seeds)
    like = policy.parameters()[0]
    if not task.trie.levels:
        return like.new_zeros(*rows.shape, task.completions)
    if torch.is_grad_enabled():
        return task.trie.sequences(node_log_probs(policy, task, rows))
    widest = max(map(len, task.trie.levels))
    part = max(1, min(rows.shape[1], 8192 // (policy.seeds * widest)))
    out = like.new_empty(*rows.shape, task.completions)
    for start in range(0, rows.shape[1], part):
        piece = rows[:, start : start + part]
        out[:, start : start + part] = task.trie.sequences(node_log_probs(policy, task, piece))
    return out


def sample_log_probs(policy: Any, task: Any, prompts: Tensor, index: Tensor, *, entropy: bool = False) -> Any:
    """Log-probabilities (S, B, n, T) of the tokens of completions ``index`` (S, B, n); see `GRUs.sample_log_probs`."""
    rows = as_rows(prompts, task, policy.seeds)
    if index.dim() != 3 or index.shape[:2] != rows.shape:
        raise ValueError(f"index must have shape {(*rows.shape, 'n')} to go with the prompts, got {tuple(index.shape)}")
    seeds, batch, n = index.shape
    like = policy.parameters()[0]
    longest = task.tokens.shape[1]
    columns = [like.new_zeros(seeds, batch, n)] * longest
    entropies = list(columns)
    path, tokens = task.trie.path[index], task.tokens[index]
    walk = policy.walk(task, rows)
    previous = roots(seeds, batch, n)
    for depth, level in enumerate(task.trie.levels):
        active = path[..., depth] >= 0
        if not bool(active.any()):
            break
        seen = visits(path[..., depth].clamp_min(0), active, previous, len(level))
        log_p = walk.level(depth, seen.parent, seen.node, seen.origin).flatten(0, 1)
        chosen = log_p.flatten()[
            seen.row * task.vocabulary + torch.where(active, tokens[..., depth], _first(level, seen)[seen.row])
        ]
        columns[depth] = torch.where(active, chosen, 0.0)
        if entropy:
            h = -torch.where(log_p > -torch.inf, log_p.exp() * log_p, 0.0).sum(-1)
            entropies[depth] = torch.where(active, h[seen.row], 0.0)
        previous = seen.row
    logps = torch.stack(columns, -1)
    return (logps, torch.stack(entropies, -1)) if entropy else logps


def _first(level: Any, seen: Visits) -> Tensor:
    """A token that may follow each visited prefix, so that completions without a choice read a finite number."""
    return level.allowed.to(torch.uint8).argmax(-1)[seen.node].flatten()
