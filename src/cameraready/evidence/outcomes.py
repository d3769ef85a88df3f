"""The small records that the parts of the engine hand to each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

#: done: rows came back. raised: the trial raised. timeout, memory: it broke a limit. died: its process ended without a word
#: (retried by the next run; the others are final until ``--retry``).
Status = Literal["done", "raised", "timeout", "memory", "died"]

VerdictWord = Literal["holds", "fails", "not seen", "inconclusive", "untested"]


@dataclass(frozen=True)
class Trial:
    """One call of a study's trial function, before it has run."""

    key: str  # digest of everything that the rows depend on
    method: str  # slug
    workload: str  # shipped name or the user's spec
    condition: Mapping[str, Any]
    seed: int
    arm: str  # "" where the trial returns rows of several arms
    block: str  # the block's value as text, for ordering and display
    alone: bool = False


@dataclass(frozen=True)
class Outcome:
    """What became of a trial."""

    key: str
    status: Status
    rows: Sequence[Mapping[str, Any]] = ()
    seconds: float = 0.0
    peak_mb: float = 0.0
    error: str = ""  # traceback or a sentence
    final: bool = (
        True  # False: the surroundings failed (a process died, a workload did not open); the next run tries again
    )


@dataclass(frozen=True)
class Verdict:
    """The answer to one claim on one workload, or over all of them (`workload` is ``"all"``)."""

    label: str  # "3a"
    number: int
    claim: str  # the sentence tested
    paper: str
    scope: str
    verdict: VerdictWord
    workload: str
    rule: str = ""  # "below 0.333"
    measure: str = ""  # "mse of oddshap / mse of leverage, geometric mean"
    source: str = ""
    estimate: float | None = None
    low: float | None = None
    high: float | None = None
    blocks: int = 0
    peer: str = ""  # the peer chosen, where the measure chooses one
    seconds: float = 0.0  # summed trial time behind it
    provisional: bool = False  # blocks are still missing
    reason: str = ""  # why it is not a plain holds or fails; failures, blocks lost
    failed_trials: int = 0  # of the method, among the rows that count
    lost_blocks: int = 0  # blocks left out because a peer failed there
    changed: str = ""
    value: Mapping[str, float] = field(default_factory=dict)  # per-workload estimates behind a pooled verdict


@dataclass(frozen=True)
class Failure:
    """A trial that did not return rows."""

    workload: str
    arm: str
    block: str
    seed: int
    condition: Mapping[str, Any]
    status: str
    error: str
