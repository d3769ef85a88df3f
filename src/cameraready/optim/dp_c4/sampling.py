"""Where chance comes from, which records take part in a step, and a data loader that tells the optimizer so."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

if TYPE_CHECKING:
    from cameraready.optim.dp_c4.optimizer import C4Optimizer


class Randomness:
    """Where noise and samples come from.

    Parameters
    ----------
    generator : torch.Generator, optional
        Its state is kept with a run's state, so that a run resumes exactly. None makes one with a fresh seed of the operating system's.
    secure : bool
        Draw from the operating system's cryptographic source instead, and sum four normal numbers to one, so that an output's
        last digits do not give it away (Holohan and Braghin, 2021, arXiv:2107.10138). Nothing can be stored or repeated.

    Raises
    ------
    ValueError
        If a generator is given in secure mode: what it draws can be repeated.
    """

    def __init__(self, generator: torch.Generator | None = None, *, secure: bool = False) -> None:
        if secure and generator is not None:
            raise ValueError("secure_mode draws from the operating system; leave the generator out")
        self.secure = secure
        if generator is None and not secure:
            generator = torch.Generator()
            generator.seed()
        self.generator = generator

    def normal(self, std: float, like: Tensor) -> Tensor:
        """Independent N(0, std^2) of the shape, dtype and device of `like`; zeros where `std` is 0."""
        if std == 0.0:
            return torch.zeros_like(like)
        if self.generator is not None:
            device = self.generator.device
            drawn = torch.normal(0.0, std, like.shape, generator=self.generator, dtype=like.dtype, device=device)
            return drawn.to(like.device)
        total = sum(_secure_normals(like.numel()) for _ in range(4)) / 2.0
        return torch.from_numpy(std * np.asarray(total)).reshape(like.shape).to(like.device, like.dtype)

    def members(self, n: int, rate: float) -> list[int]:
        """Indices of a Poisson sample: each of n records by itself with probability `rate`."""
        if self.generator is not None:
            mask = torch.rand(n, generator=self.generator, device=self.generator.device) < rate
            return mask.nonzero().reshape(-1).tolist()
        return np.nonzero(_secure_uniforms(n) < rate)[0].tolist()

    def state(self) -> Tensor | None:
        """The generator's state (uint8), None in secure mode."""
        return None if self.generator is None else self.generator.get_state()

    def restore(self, state: Tensor | None) -> None:
        """Go on from a state that `state` gave."""
        if (state is None) != (self.generator is None):
            kind = "a secure run" if state is None else "a run that was not secure"
            raise ValueError(f"the state is that of {kind}; resume it with the same secure_mode")
        if self.generator is not None and state is not None:
            self.generator.set_state(state.detach().cpu().to(torch.uint8))

    def renew(self) -> None:
        """Take a fresh seed of the operating system's: what the present state leads to has been used."""
        if self.generator is not None:
            self.generator.seed()


@dataclass(frozen=True)
class Sampling:
    """How the records of a step are chosen.

    Parameters
    ----------
    kind : {"poisson", "full", "cyclic"}
        Each record by itself with probability `rate`; all records; or the `parts` fixed parts of the data in turn.
    n_records : int
        Number of records, taken as public.
    rate : float
        For ``"poisson"``, above 0 and at most 1.
    parts : int
        For ``"cyclic"``.
    """

    kind: Literal["poisson", "full", "cyclic"]
    n_records: int
    rate: float = 1.0
    parts: int = 1

    def __post_init__(self) -> None:
        if self.kind not in ("poisson", "full", "cyclic"):
            raise ValueError(f"kind must be 'poisson', 'full' or 'cyclic', got {self.kind!r}")
        if self.n_records < 1:
            raise ValueError(f"n_records must be at least 1, got {self.n_records}")
        if not 0.0 < self.rate <= 1.0 or (self.kind != "poisson" and self.rate != 1.0):
            raise ValueError(f"rate must lie between 0 and 1 for 'poisson' and be 1 for the others, got {self.rate}")
        if not 1 <= self.parts <= self.n_records or (self.kind != "cyclic" and self.parts != 1):
            raise ValueError(
                f"parts must lie between 1 and {self.n_records} for 'cyclic' and be 1 for the others, got {self.parts}"
            )

    @property
    def expected_batch_size(self) -> float:
        """Number of records that a step is expected to see; the number it does see is private under Poisson sampling."""
        return self.n_records * self.rate / self.parts

    @property
    def drawn_rate(self) -> float:
        """The probability with which a record is drawn: generators draw multiples of 2 ** -24, so that it is a little above `rate`."""
        return min(math.ceil(self.rate * 2.0**24) / 2.0**24, 1.0)

    @property
    def steps_per_epoch(self) -> int:
        return round(1.0 / self.rate) if self.kind == "poisson" else self.parts

    def members(self, step: int, randomness: Randomness) -> list[int]:
        """Indices of the records of a step."""
        if self.kind == "poisson":
            return randomness.members(self.n_records, self.rate)
        return list(range(step % self.parts, self.n_records, self.parts))


@dataclass(frozen=True)
class Handover:
    """What the loader tells the optimizer of the batch it has just given out.

    Attributes
    ----------
    records : int64 Tensor of shape (b,)
    begins, more : bool
        Whether it is the first batch of its step, and whether more of the same step follow.
    """

    records: Tensor
    begins: bool = True
    more: bool = False


class StepRecords:
    """Sees to it that a step holds the records that its accounting assumes.

    Parameters
    ----------
    sampling : Sampling
    numbered : bool
        Whether the numbers of the records are needed, as in table mode.
    """

    def __init__(self, sampling: Sampling, *, numbered: bool) -> None:
        self.sampling, self.numbered = sampling, numbered
        self.has_loader = False
        self.rows = 0
        self._handover: Handover | None = None
        self._part = 0
        self._seen: Tensor | None = None

    def hand_over(self, handover: Handover) -> bool:
        """Note what a loader gives out; true where a step begins."""
        self.has_loader = True
        if handover.begins:
            if self.rows and self.numbered:
                raise RuntimeError(
                    "a step was broken off between its batches, after references had moved; go on from the last checkpoint"
                )
            # A batch that was given out and not stepped through has released nothing.
            self.rows, self._seen = 0, None
        self._handover = handover
        return handover.begins

    def take(self, rows: int) -> Tensor | None:
        """Numbers of the records behind `rows` per-sample gradients, where they are known."""
        records = None
        if self.has_loader:
            if self._handover is None:
                raise RuntimeError(
                    "this batch has been stepped through; every step needs a fresh batch of the private loader"
                )
            records, self._handover = self._handover.records, None
            if len(records) != rows:
                raise ValueError(
                    f"the loader gave out {len(records)} records, but there are {rows} per-sample gradients"
                )
            self._part = int(records[0]) % self.sampling.parts if rows else 0
        elif self.numbered:
            if self.sampling.kind != "full" or rows != self.sampling.n_records:
                raise ValueError(
                    "table mode has to know which records a batch holds: use the loader of make_private_c4, or all "
                    f"{self.sampling.n_records} records in order (got {rows})"
                )
            records = torch.arange(rows)
        if records is not None and self.numbered:
            self._refuse_twice(records)
        self.rows += rows
        return records

    def close(self) -> int:
        """End the step: which of the fixed parts it was.

        Raises
        ------
        ValueError
            If all records were to take part and did not.
        """
        rows, self.rows, self._seen = self.rows, 0, None
        if self.sampling.kind == "full" and rows != self.sampling.n_records:
            raise ValueError(
                f"the step was to have all {self.sampling.n_records} records, as its noise assumes, but had {rows}"
            )
        return self._part

    def _refuse_twice(self, records: Tensor) -> None:
        if self._seen is None:
            self._seen = torch.zeros(self.sampling.n_records, dtype=torch.bool)
        if self._seen[records].any() or len(records.unique()) != len(records):
            raise ValueError("a record takes part twice in one step, which would double its influence")
        self._seen[records] = True


class C4DataLoader(DataLoader):
    """Gives out ordinary batches, sampled as the accounting assumes, and tells the optimizer which records they hold.

    Made by `make_private_c4`. An epoch has ``1 / rate`` steps, or as many as there are parts. Steps larger than `physical_batch_size` come in
    several batches, for which gradients are added up; call ``optimizer.step`` after each. Batches of no record come too, and have to be
    stepped through like any other.

    Notes
    -----
    Under Poisson sampling the sizes of batches are private: do not print or log them.
    """

    def __init__(
        self,
        loader: DataLoader,
        optimizer: C4Optimizer,
        sampling: Sampling,
        randomness: Randomness,
        physical_batch_size: int | None = None,
    ) -> None:
        collate = default_collate if loader.collate_fn is None else loader.collate_fn
        self._steps = _Steps(sampling, randomness, physical_batch_size)
        super().__init__(
            _Numbered(loader.dataset),
            batch_sampler=self._steps,
            collate_fn=_CollateNumbered(collate, loader.dataset),
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            # As Opacus's loader does, which draws from it at the start of an epoch.
            generator=randomness.generator,
        )
        self._optimizer = optimizer
        self._given = 0  # steps of the current epoch that have been given out

    @property
    def sampling(self) -> Sampling:
        return self._steps.sampling

    def __iter__(self) -> Iterator[Any]:
        # Two releases of one sample are less private than two of samples drawn apart, which is what is counted.
        self._steps.draws_anew = self._optimizer.used_up(resumed=self._steps.resume_from is not None)
        self._given = self._steps.skip
        for numbers, batch in super().__iter__():
            begins, more = divmod(int(numbers[-1]), 2)
            self._optimizer.hand_over(Handover(numbers[:-1], bool(begins), bool(more)))
            self._given += not more
            yield batch
        self._given = 0

    def state_dict(self) -> dict[str, Any]:
        """Where in its epoch the loader is. Private, for it tells which records come next; secure runs store the position alone."""
        return {"epoch_start": self._steps.epoch_start, "given": self._given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration goes on after the last step that was given out before the state was taken."""
        self._steps.resume_from = state["epoch_start"]
        self._steps.skip = int(state["given"])


class _Steps(Sampler):
    """Record numbers of the batches; the last entry, below 0, tells whether a batch begins its step and whether more of it follow."""

    def __init__(self, sampling: Sampling, randomness: Randomness, physical: int | None) -> None:
        if physical is not None and physical < 1:
            raise ValueError(f"physical_batch_size must be at least 1, got {physical}")
        self.sampling, self.randomness, self.physical = sampling, randomness, physical
        self.epoch_start: Tensor | None = None
        self.resume_from: Tensor | None = None
        self.draws_anew = False
        self.skip = 0

    def __len__(self) -> int:
        return self.sampling.steps_per_epoch

    def __iter__(self) -> Iterator[list[int]]:
        if self.resume_from is not None:
            self.randomness.restore(self.resume_from)
            self.resume_from = None
        if self.draws_anew:
            self.randomness.renew()
            self.draws_anew = False
        self.epoch_start = self.randomness.state()
        skip, self.skip = self.skip, 0
        for step in range(len(self)):
            members = self.sampling.members(step, self.randomness)
            if step < skip:
                continue
            size = self.physical or max(len(members), 1)
            starts = range(0, max(len(members), 1), size)
            for start in starts:
                yield [*members[start : start + size], -1 - 2 * (start == 0) - (start != starts[-1])]


class _Numbered(Dataset):
    """The records with their numbers; numbers below 0 stand for the end of a batch."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> tuple[int, Any]:
        return (index, None) if index < 0 else (index, self.dataset[index])


class _CollateNumbered:
    """Batches with the numbers of their records, and whether more follow; a batch of no record keeps the others' structure."""

    def __init__(self, collate: Callable[[list[Any]], Any], dataset: Dataset) -> None:
        self.collate, self.dataset = collate, dataset

    def __call__(self, items: list[tuple[int, Any]]) -> tuple[Tensor, Any]:
        *records, (end, _) = items
        numbers = torch.tensor([*(index for index, _ in records), -1 - end], dtype=torch.int64)
        if records:
            return numbers, self.collate([record for _, record in records])
        return numbers, _emptied(self.collate([self.dataset[0]]))


def _emptied(batch: Any) -> Any:
    """The same structure of tensors, with no record in it."""
    if isinstance(batch, Tensor):
        return batch[:0]
    if isinstance(batch, dict):
        return {key: _emptied(value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_emptied(value) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(_emptied(value) for value in batch)
    raise TypeError(
        f"a batch must be made of tensors, lists, tuples and dicts to have an empty form, got {type(batch).__name__}"
    )


def _secure_uniforms(n: int) -> np.ndarray:
    """Uniform in (0, 1), 53 bits, shape (n,)."""
    bits = np.frombuffer(os.urandom(8 * n), dtype=np.uint64) >> np.uint64(11)
    return (bits.astype(np.float64) + 0.5) * 2.0**-53


def _secure_normals(n: int) -> np.ndarray:
    """Standard normal numbers by Box and Muller, shape (n,)."""
    half = (n + 1) // 2
    radius = np.sqrt(-2.0 * np.log(_secure_uniforms(half)))
    angle = 2.0 * math.pi * _secure_uniforms(half)
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:n]
