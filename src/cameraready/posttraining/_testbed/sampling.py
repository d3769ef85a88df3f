"""Completions drawn from a policy on an enumerable task, and what a trainer makes of their rewards."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from cameraready.posttraining._testbed import walking
from cameraready.posttraining._testbed.trie import NOWHERE


@dataclass(frozen=True)
class Batch:
    """Groups of n completions of B prompts for S seeds.

    Attributes
    ----------
    prompts : (S, B) int64
    index : (S, B, n) int64
        Which completion of the task.
    tokens : (S, B, n, T) int64
    mask : (S, B, n, T) bool
        Tokens of the completion, its end token included.
    old_logps : (S, B, n, T) float
        Log-probabilities under the policy that drew them; 0 at padding and at tokens without a choice.
    rewards : (S, B, n) float
    """

    prompts: Tensor
    index: Tensor
    tokens: Tensor
    mask: Tensor
    old_logps: Tensor
    rewards: Tensor

    def rows(self, which: Tensor | slice) -> "Batch":
        """Some of the groups: a slice, positions (B',), or each seed's own positions (S, B')."""
        if isinstance(which, Tensor) and which.dim() == 2:
            seed = torch.arange(len(which))[:, None]
            return Batch(*(getattr(self, f.name)[seed, which] for f in fields(self)))
        return Batch(*(getattr(self, f.name)[:, which] for f in fields(self)))

    def with_rewards(self, rewards: Tensor) -> "Batch":
        """The same completions with other rewards, (S, B, n)."""
        if rewards.shape != self.rewards.shape:
            raise ValueError(f"rewards must have shape {tuple(self.rewards.shape)}, got {tuple(rewards.shape)}")
        return replace(self, rewards=rewards)

    @staticmethod
    def join(batches: Sequence["Batch"]) -> "Batch":
        """Groups of several batches of the same group size, one after the other."""
        return Batch(*(torch.cat([getattr(b, f.name) for b in batches], 1) for f in fields(Batch)))


@torch.no_grad()
def sample(policy: Any, task: Any, prompts: Tensor, n: int, generators: Sequence[torch.Generator]) -> Batch:
    """Draw n completions of each prompt, token by token, from exactly the distribution that `all_log_probs` gives.

    Seed ``s`` draws from ``generators[s]`` alone and always B * n * T numbers, so its completions do not depend on which seeds run beside it.

    Parameters
    ----------
    policy : GRUs or Tabular
    task : EnumerableTask
    prompts : (B,) or (S, B) int64
    n : int
    generators : list of S torch.Generator

    Raises
    ------
    ValueError
        If n or B is zero, or the number of generators is not the number of seeds.
    """
    rows = walking.as_rows(prompts, task, policy.seeds)
    seeds, batch = rows.shape
    if n < 1 or batch < 1:
        raise ValueError(f"a batch needs at least one prompt and one completion of each, got {batch} prompts and n={n}")
    if len(generators) != seeds:
        raise ValueError(f"{seeds} seeds need {seeds} generators, got {len(generators)}")
    longest = task.tokens.shape[1]
    uniform = torch.stack([torch.rand(batch, n, longest, generator=g, dtype=torch.float64) for g in generators])
    index = torch.zeros(seeds, batch, n, dtype=torch.int64)  # where nothing is to choose, the only completion
    old_logps = policy.parameters()[0].new_zeros(seeds, batch, n, longest)
    node = torch.zeros(seeds, batch, n, dtype=torch.int64)
    active = torch.full((seeds, batch, n), bool(task.trie.levels))
    walk = policy.walk(task, rows)
    previous = walking.roots(seeds, batch, n)
    for depth, level in enumerate(task.trie.levels):
        if not bool(active.any()):
            break
        seen = walking.visits(node, active, previous, len(level))
        log_p = walk.level(depth, seen.parent, seen.node, seen.origin).flatten(0, 1)
        cumulative = log_p.to(torch.float64).exp().cumsum(-1)
        where = seen.row[active]
        draw = uniform[..., depth][active] * cumulative[where, -1]
        token = torch.searchsorted(cumulative[where], draw[:, None], right=True)[:, 0]
        # A draw that rounds to the very end of the table: the last token that has probability.
        last = task.vocabulary - 1 - level.allowed[seen.node.flatten()[where]].flip(-1).to(torch.uint8).argmax(-1)
        token = torch.minimum(token, last)
        old_logps[..., depth][active] = log_p[where, token]
        child = level.child[node[active], token]
        if bool((child == NOWHERE).any()):
            raise RuntimeError("the policy gave probability to a token that may not follow")
        ended = child < 0
        index[active] = torch.where(ended, -1 - child, index[active])
        node[active] = child.clamp_min(0)
        previous = seen.row
        active = active.masked_scatter(active, ~ended)
    reward = task.reward.to(old_logps.dtype)[rows[..., None], index]
    return Batch(rows, index, task.tokens[index], task.mask[index], old_logps, reward)


def group_advantages(rewards: Tensor, scale: Literal["group", "none"] = "group") -> Tensor:
    """Rewards less their group's mean, by default divided by the group's standard deviation (Shao et al., 2024, arXiv:2402.03300; "none": Liu et al., 2025, arXiv:2503.20783).

    Parameters
    ----------
    rewards : (..., n) float
        Whole numbers and booleans are taken as float32.
    scale : {"group", "none"}
        The standard deviation has the n - 1 denominator and 1e-4 added, as in TRL.

    Returns
    -------
    (..., n) float, exactly 0 in groups without spread.

    Raises
    ------
    ValueError
        If a reward is NaN or infinite, or the groups are empty.
    """
    if scale not in ("group", "none"):
        raise ValueError(f"scale must be 'group' or 'none', got {scale!r}")
    if rewards.dim() == 0 or rewards.shape[-1] == 0:
        raise ValueError("the groups are empty: give at least one reward for each prompt")
    if not bool(torch.isfinite(rewards).all()):
        raise ValueError(
            f"{int((~torch.isfinite(rewards)).sum())} rewards are NaN or infinite: score or drop these completions first"
        )
    if not rewards.is_floating_point():
        rewards = rewards.to(torch.float32)
    flat = rewards.amax(-1, keepdim=True) == rewards.amin(-1, keepdim=True)
    centred = torch.where(flat, 0.0, rewards - rewards.mean(-1, keepdim=True))
    if scale == "none" or rewards.shape[-1] == 1:
        return centred
    return centred / (rewards.std(-1, keepdim=True) + 1e-4)
