"""A torch Sampler that takes the prompts whose estimated accuracy is nearest to a target."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from cameraready.posttraining.paced.head import AccuracyEstimate


class PacedSampler(Sampler[int]):
    """Greedy selection of the `batch_size` prompts with the least ``|p_hat - target|``, some of them at random instead.

    Each selection is made when its first index is asked for, from the estimate as it stands then. A loader that fetches ahead therefore
    selects by an older estimate: accelerate's, which `transformers.Trainer` uses, is one batch ahead; a `DataLoader` with workers is
    ``num_workers * prefetch_factor`` batches ahead; a plain `DataLoader` without workers is not. `staleness` says how many updates of the
    estimate a selection has missed.

    Parameters
    ----------
    estimate : AccuracyEstimate
        A `PartitionHead`, a `RunningAccuracy`, or anything with ``n_prompts`` and ``accuracy(prompt_ids, clip=False)``.
    batch_size : int
        Prompts in a selection; at most half of the pool, because no prompt is taken in two selections running.
    target : float
        0.5 where rewards are 0 or 1: where a group has the largest spread. In units of the reward otherwise.
    explore : float
        Expected share of a selection that is drawn uniformly from the rest of the pool, in [0, 1]; 1 is uniform sampling. With 0, a prompt whose
        estimate is wrong is never corrected.
    candidates : int, optional
        Look at this many random prompts instead of all. At least ``batch_size``.
    group, repeat : int
        Each index is yielded `group` times in a row, and each selection `repeat` times: for TRL `num_generations` and
        ``num_iterations * steps_per_generation``.
    batches : int, optional
        Selections in an epoch (one ``iter``); by default ``n_prompts // batch_size``.
    seed : int
        Of the sampler's own generator, which draws exploration and breaks ties.

    Raises
    ------
    ValueError
        An argument out of range; while iterating, an estimate that is not finite.

    Notes
    -----
    Kim et al., 2026, arXiv:2602.12642, Sec. 4.2, where tau = 0.5; exploration, the ban on immediate repeats and random ties are ours.
    `state_dict` holds tensors alone (safetensors, ``weights_only=True``), also in the middle of an epoch.
    """

    def __init__(
        self,
        estimate: AccuracyEstimate,
        batch_size: int,
        *,
        target: float = 0.5,
        explore: float = 0.1,
        candidates: int | None = None,
        group: int = 1,
        repeat: int = 1,
        batches: int | None = None,
        seed: int = 0,
    ) -> None:
        n = estimate.n_prompts
        for name, count in (
            ("batch_size", batch_size),
            ("group", group),
            ("repeat", repeat),
            ("candidates", candidates),
            ("batches", batches),
        ):
            if count is not None and not isinstance(count, int):
                raise TypeError(f"{name} must be a whole number, got {count!r}")
        if not 1 <= batch_size <= n // 2:
            raise ValueError(
                f"batch_size must be from 1 to half of the {n} prompts, for no prompt is taken twice running; got {batch_size}"
            )
        if candidates is not None and not batch_size <= candidates <= n:
            raise ValueError(
                f"candidates must be from batch_size = {batch_size} to the {n} prompts there are, got {candidates}"
            )
        if not math.isfinite(target) or not 0 <= explore <= 1:
            raise ValueError(f"target must be finite and explore in [0, 1], got {target} and {explore}")
        batches = max(n // batch_size, 1) if batches is None else batches
        if min(group, repeat, batches) < 1:
            raise ValueError(f"group, repeat and batches must be at least 1, got {group}, {repeat} and {batches}")
        self.estimate, self.batch_size, self.target, self.explore = estimate, batch_size, float(target), float(explore)
        self.candidates, self.group, self.repeat, self.batches = candidates, group, repeat, batches
        self.generator = torch.Generator().manual_seed(seed)
        self._last = torch.empty(0, dtype=torch.int64)
        self._history: list[Tensor] = []  # selections of the epoch under way
        self._updates: list[int] = []  # updates of the estimate when each was made
        self._yielded = 0  # indices given out in the epoch under way
        self._resume: int | None = None  # where the next epoch starts: set by load_state_dict alone

    def __len__(self) -> int:
        return self.batches * self.batch_size * self.group * self.repeat

    def __iter__(self) -> Iterator[int]:
        if self._resume is None:
            self._history, self._updates, self._yielded = [], [], 0
        else:
            self._yielded, self._resume = self._resume, None
        return self._indices()

    def _indices(self) -> Iterator[int]:
        a_round = self.batch_size * self.group
        while self._yielded < len(self):
            number, inside = divmod(self._yielded, a_round * self.repeat)
            if number == len(self._history):
                self._updates.append(self._estimates_updates())
                self._history.append(self.select())
            chosen = self._history[number]
            self._yielded += 1
            yield int(chosen[inside % a_round // self.group])

    def select(self) -> Tensor:
        """One selection, int64 of shape (batch_size,), in random order; remembered as the last one, which the next avoids."""
        estimate = self.estimate.accuracy(clip=False).detach().to("cpu", torch.float64)
        if not bool(torch.isfinite(estimate).all()):
            bad = int((~torch.isfinite(estimate)).sum())
            raise ValueError(
                f"the estimate of {bad} of {len(estimate)} prompts is not finite: the head's training diverged"
            )
        allowed = torch.ones(len(estimate), dtype=torch.bool)
        allowed[self._last] = False
        order = torch.randperm(len(estimate), generator=self.generator)
        order = order[allowed[order]]
        n_random = int((torch.rand(self.batch_size, generator=self.generator) < self.explore).sum())
        looked_at = order if self.candidates is None else order[: max(self.candidates, self.batch_size)]
        # A stable sort of a random order breaks ties at random.
        nearest = looked_at[(estimate[looked_at] - self.target).abs().argsort(stable=True)][
            : self.batch_size - n_random
        ]
        taken = torch.zeros(len(estimate), dtype=torch.bool)
        taken[nearest] = True
        chosen = torch.cat([nearest, order[~taken[order]][:n_random]])
        self._last = chosen[torch.randperm(self.batch_size, generator=self.generator)]
        return self._last.clone()

    def staleness(self, selection: Tensor | None = None) -> int:
        """Updates of the estimate since a selection of this epoch was made.

        Parameters
        ----------
        selection : int64 Tensor, optional
            Its prompts in any order; by default the newest one.

        Returns
        -------
        int
            0 for estimates that do not count theirs in ``updates``, and where no such selection was made.
        """
        wanted = None if selection is None else set(selection.tolist())
        for made, drawn in zip(reversed(self._updates), reversed(self._history), strict=True):
            if wanted is None or wanted == set(drawn.tolist()):
                return self._estimates_updates() - made
        return 0

    def _estimates_updates(self) -> int:
        return int(getattr(self.estimate, "updates", 0))

    def state_dict(self) -> dict[str, Tensor]:
        """Generator, last selection, and the epoch under way: its selections and how many indices were given out."""
        drawn = torch.stack(self._history) if self._history else torch.empty(0, self.batch_size, dtype=torch.int64)
        return {
            "generator": self.generator.get_state(),
            "last": self._last.clone(),
            "history": drawn,
            "updates": torch.tensor(self._updates, dtype=torch.int64),
            "yielded": torch.tensor(self._yielded),
        }

    def load_state_dict(self, state: dict[str, Any], *, from_start: bool = False) -> None:
        """Go on as the saved sampler would.

        Parameters
        ----------
        state : dict
            Of `state_dict`; the estimate's own state is loaded apart.
        from_start : bool
            The next ``iter`` gives out the epoch's recorded selections again before it makes new ones: for trainers that resume by iterating
            over what was consumed, as `transformers.Trainer` does. By default it goes on behind the last index.

        Raises
        ------
        ValueError
            The state is of another batch size or pool.
        """
        history, n = state["history"], self.estimate.n_prompts
        if history.shape[1:] != (self.batch_size,):
            raise ValueError(
                f"the state has selections of {tuple(history.shape[1:])} prompts, this sampler takes {self.batch_size}"
            )
        if history.numel() and int(history.max()) >= n:
            raise ValueError(
                f"the state is of a larger pool: it selected prompt {int(history.max())}, this pool has {n}"
            )
        self.generator.set_state(state["generator"].cpu())
        self._last = state["last"].clone().cpu()
        self._history = [row.clone() for row in history.cpu()]
        self._updates = [int(count) for count in state["updates"]]
        self._yielded = int(state["yielded"])
        ended = self._yielded == len(self) and not from_start
        self._resume = None if ended else 0 if from_start else self._yielded
