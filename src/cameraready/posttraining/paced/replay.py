"""A buffer of rollouts whose prompts the estimate got most wrong, with what is needed to train on them later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Replayed:
    """Rollouts taken from an `ErrorReplay`, n of them, padded on the right to the longest.

    Attributes
    ----------
    prompt_ids : int64 Tensor, shape (n,)
    tokens : int64 Tensor, shape (n, L)
        0 beyond each rollout's end.
    mask : bool Tensor, shape (n, L)
        Tokens that the policy wrote.
    old_logps : Tensor, shape (n, L)
        Of the policy that sampled each rollout, 0 beyond its end.
    rewards : Tensor, shape (n,)
    group_means : Tensor, shape (n,)
        Mean reward of the whole group that the rollout came from: what the estimate may learn from it (see `ErrorReplay`).
    steps : int64 Tensor, shape (n,)
        When each was sampled.
    """

    prompt_ids: Tensor
    tokens: Tensor
    mask: Tensor
    old_logps: Tensor
    rewards: Tensor
    group_means: Tensor
    steps: Tensor

    def __len__(self) -> int:
        return len(self.prompt_ids)


class ErrorReplay:
    """Keeps rollouts of the prompts with the largest ``|mean reward of the group - p_hat|``.

    `tb_loss` may be given texts of any policy, so that a rollout can be used again, with the log-probabilities of the policy that sampled it.
    The *estimate* may not: replayed successes have mean reward 1 and would draw p_hat there, and importance weights do not help, for they
    know nothing of the failures that were not kept. Leave replayed rollouts out of `PartitionHead.update`, or give it their `group_means` in
    place of their rewards, or keep and weight all rollouts.

    Parameters
    ----------
    capacity, add : int
        Rollouts that are held at most, and that enter at most in a step; 128 and 64 in the paper.
    keep : {"correct", "all"}
        Which rollouts of the chosen groups.
    correct_at : float
        A reward of at least this is correct.
    max_age : int, optional
        Steps after which a rollout is dropped (age 0 is the step it was sampled in); None never.
    priority : {"error", "uniform"}
        Which groups come first: by error, or in random order (uniform replay, the control).
    seed : int
        Of the generator that draws samples and breaks ties.

    Notes
    -----
    Kim et al., 2026, arXiv:2602.12642, Sec. 4.3. Over capacity the oldest leave first, among equally old ones those of the smallest error.
    Age limit, ties and the order of leaving are ours.
    """

    def __init__(
        self,
        capacity: int = 128,
        *,
        add: int = 64,
        keep: Literal["correct", "all"] = "correct",
        correct_at: float = 1.0,
        max_age: int | None = None,
        priority: Literal["error", "uniform"] = "error",
        seed: int = 0,
    ) -> None:
        if capacity < 1 or add < 1 or (max_age is not None and max_age < 0):
            raise ValueError(
                f"capacity and add must be at least 1 and max_age not negative, got {capacity}, {add} and {max_age}"
            )
        if keep not in ("correct", "all") or priority not in ("error", "uniform"):
            raise ValueError(
                f"keep must be 'correct' or 'all' and priority 'error' or 'uniform', got {keep!r} and {priority!r}"
            )
        self.capacity, self.limit, self.keep, self.correct_at = capacity, add, keep, correct_at
        self.max_age, self.priority = max_age, priority
        self.generator = torch.Generator().manual_seed(seed)
        self._items: list[dict[str, Tensor]] = []

    def __len__(self) -> int:
        return len(self._items)

    def add(
        self,
        prompt_ids: Tensor,
        tokens: Sequence[Sequence[Tensor]] | Tensor,
        old_logps: Sequence[Sequence[Tensor]] | Tensor,
        rewards: Tensor,
        estimates: Tensor,
        *,
        step: int,
        mask: Tensor | None = None,
    ) -> int:
        """Offer the groups of a step.

        Parameters
        ----------
        prompt_ids : int64 Tensor, shape (B,)
        tokens, old_logps : Tensor, shape (B, G, L), or nested sequences of 1-d tensors
            A group's rollouts. A group may be empty, and rollouts may have different lengths in sequences.
        rewards : Tensor, shape (B, G)
            NaN where a rollout was not scored or does not exist: it is left out, also of the group's mean.
        estimates : Tensor, shape (B,)
            p_hat before the estimate has seen these groups.
        step : int
            Now; rollouts that have become too old are dropped.
        mask : bool Tensor, shape (B, G, L), optional
            Tokens that the policy wrote, for tensors.

        Returns
        -------
        int
            How many entered.

        Raises
        ------
        ValueError
            Shapes that do not fit, an estimate or a log-probability of a rollout that is not finite; nothing has entered then.
        """
        if not len(tokens) == len(old_logps) == len(rewards) == len(estimates) == len(prompt_ids):
            raise ValueError(
                f"{len(prompt_ids)} prompts need as many groups; got {len(tokens)} of tokens, {len(old_logps)} of log-probabilities,"
                f" {len(rewards)} of rewards and {len(estimates)} estimates"
            )
        rewards, estimates = rewards.detach().cpu(), estimates.detach().cpu()
        self._check(tokens, old_logps, rewards, estimates)
        scored = torch.isfinite(rewards)
        means = torch.where(scored, rewards, 0.0).sum(1) / scored.sum(1)  # NaN for groups without a score
        errors = (means - estimates.to(means.dtype)).abs()
        entering: list[dict[str, Tensor]] = []
        for group in self._in_turn(errors, scored.any(1)):
            wanted = scored[group] & ((rewards[group] >= self.correct_at) | (self.keep == "all"))
            for place in wanted.nonzero().flatten().tolist()[: self.limit - len(entering)]:
                written = None if mask is None else mask[group][place].cpu().bool()
                item = self._item(tokens[group][place], old_logps[group][place], written)
                item |= {"prompt": prompt_ids[group].cpu(), "reward": rewards[group, place], "mean": means[group]}
                entering.append(item | {"error": errors[group], "step": torch.tensor(step)})
        # Nothing changes before all of it is known to be sound.
        self.forget(step)
        self._items = sorted([*self._items, *entering], key=lambda item: (int(item["step"]), float(item["error"])))
        self._items = self._items[-self.capacity :]
        return len(entering)

    @staticmethod
    def _check(tokens: Any, old_logps: Any, rewards: Tensor, estimates: Tensor) -> None:
        if not bool(torch.isfinite(estimates).all()):
            raise ValueError("an estimate is not finite: what made it has diverged, and errors can't be ranked by it")
        if rewards.ndim != 2:
            raise ValueError(f"rewards must have shape (B, G), got {tuple(rewards.shape)}")
        there = torch.isfinite(rewards)
        for group, (texts, logps) in enumerate(zip(tokens, old_logps, strict=True)):
            last = int(there[group].nonzero()[-1]) if bool(there[group].any()) else -1
            if len(texts) != len(logps) or last >= len(texts):
                raise ValueError(
                    f"group {group} has {len(texts)} rollouts, {len(logps)} lists of log-probabilities and a reward at place {last};"
                    " places without a rollout have the reward NaN"
                )

    def _in_turn(self, errors: Tensor, any_scored: Tensor) -> list[int]:
        order = torch.randperm(len(errors), generator=self.generator)
        if self.priority == "error":
            order = order[errors[order].nan_to_num(-1.0).argsort(descending=True, stable=True)]
        return [int(group) for group in order if any_scored[group]]

    @staticmethod
    def _item(tokens: Tensor, logps: Tensor, written: Tensor | None) -> dict[str, Tensor]:
        tokens, logps = tokens.detach().cpu().clone(), logps.detach().cpu().clone()
        if tokens.ndim != 1 or tokens.shape != logps.shape:
            raise ValueError(
                f"a rollout has one log-probability for each token, got shapes {tuple(tokens.shape)} and {tuple(logps.shape)}"
            )
        written = torch.ones_like(tokens, dtype=torch.bool) if written is None else written.clone()
        if not bool(torch.isfinite(logps[written]).all()):
            raise ValueError("a rollout has a token whose log-probability is not finite; it can't be replayed")
        end = int(written.nonzero()[-1]) + 1 if bool(written.any()) else 0
        return {"tokens": tokens[:end], "logps": torch.where(written, logps, 0.0)[:end], "written": written[:end]}

    def forget(self, step: int) -> None:
        """Drop what is older than `max_age` at `step`."""
        if self.max_age is not None:
            self._items = [item for item in self._items if step - int(item["step"]) <= self.max_age]

    def sample(self, n: int, *, before: int | None = None) -> Replayed:
        """`n` rollouts without replacement, uniformly, or all there are if fewer; of length 0 where there is none.

        Parameters
        ----------
        n : int
        before : int, optional
            Only rollouts of earlier steps than this: a batch that is still trained on is not replayed beside itself.
        """
        if n < 0:
            raise ValueError(f"n must not be negative, got {n}")
        known = [item for item in self._items if before is None or int(item["step"]) < before]
        drawn = torch.randperm(len(known), generator=self.generator)[:n].tolist()
        return self._batch([known[place] for place in drawn])

    def contents(self) -> Replayed:
        """All rollouts, oldest first."""
        return self._batch(self._items)

    @staticmethod
    def _batch(items: Sequence[dict[str, Tensor]]) -> Replayed:
        if not items:
            none, empty = torch.empty(0, dtype=torch.int64), torch.empty(0)
            return Replayed(
                none, none.reshape(0, 0), none.reshape(0, 0).bool(), empty.reshape(0, 0), empty, empty, none
            )

        def padded(key: str) -> Tensor:
            return torch.nn.utils.rnn.pad_sequence([item[key] for item in items], batch_first=True)

        def column(key: str) -> Tensor:
            return torch.stack([item[key] for item in items])

        return Replayed(
            column("prompt"),
            padded("tokens"),
            padded("written"),
            padded("logps"),
            column("reward"),
            column("mean"),
            column("step"),
        )

    def state_dict(self) -> dict[str, Tensor]:
        """The rollouts, one after another, and the generator; tensors alone."""
        state = {
            "generator": self.generator.get_state(),
            "lengths": torch.tensor([len(i["tokens"]) for i in self._items], dtype=torch.int64),
        }
        if self._items:
            for key in ("tokens", "logps", "written"):
                state[key] = torch.cat([item[key] for item in self._items])
            for key in ("prompt", "reward", "mean", "error", "step"):
                state[key] = torch.stack([item[key] for item in self._items])
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the rollouts and the generator of `state_dict`; those beyond this buffer's capacity, the oldest, are dropped."""
        self.generator.set_state(state["generator"].cpu())
        lengths = state["lengths"].tolist()
        parts = {key: state[key].split(lengths) for key in ("tokens", "logps", "written")} if lengths else {}
        self._items = [
            {
                **{key: parts[key][i].clone() for key in parts},
                **{k: state[k][i].clone() for k in ("prompt", "reward", "mean", "error", "step")},
            }
            for i in range(len(lengths))
        ][-self.capacity :]


def importance_weights(
    logps: Tensor, old_logps: Tensor, mask: Tensor | None = None, *, cap: float | None = 10.0
) -> Tensor:
    """``pi(y) / pi_sampled(y)`` of whole sequences, without gradient, truncated at `cap`.

    Parameters
    ----------
    logps, old_logps : Tensor, shape (..., L)
        Per token, under the policy of now and the one that sampled.
    mask : Tensor, shape (..., L), optional
    cap : float, optional
        None leaves the weights unbiased, and their variance unbounded.

    Returns
    -------
    Tensor, shape (...)

    Raises
    ------
    ValueError
        A token without a finite log-probability under the policy that sampled it.
    """
    written = torch.ones_like(logps, dtype=torch.bool) if mask is None else mask.bool()
    if bool((written & ~torch.isfinite(old_logps)).any()):
        raise ValueError("a sampled token has no finite log-probability under the policy that sampled it")
    log_ratio = torch.where(written, logps.detach() - old_logps.detach(), 0.0)
    weights = log_ratio.sum(dim=-1).exp()
    return weights if cap is None else weights.clamp(max=cap)
