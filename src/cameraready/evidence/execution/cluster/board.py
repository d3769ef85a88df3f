"""Which trial goes to which host next: the plan's order, pinned blocks, hosts that cannot do a thing, suspects."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from cameraready.evidence.outcomes import Outcome, Trial

#: Hosts that may be lost with a trial on them until it counts as having died.
LOSSES = 3
#: Short trials are sent ahead, so that no hand waits for the way through Dask: this much work, at most this many.
_AHEAD_SECONDS = 0.1
_AHEAD = 32


@dataclass(eq=False)
class Seat:
    """A host as the board sees it: a Dask worker that takes part, and what it is at.

    Attributes
    ----------
    address : str
        Of the Dask worker.
    name, machine : str
        Host name for people; and what tells whether two Dask workers share a machine.
    hands : int
        Trials at a time.
    """

    address: str
    name: str
    machine: str
    hands: int
    at: set[str] = field(default_factory=set)  # keys of the trials that were given to it
    quarantined: bool = False  # it is at a suspect, which is to be alone there
    closed: bool = False  # it is on its way out
    seconds: float = 1.0  # what its trials take, about

    @property
    def room(self) -> int:
        """Trials that may be given to it. Short ones wait there for a hand, so that no hand waits for the next."""
        ahead = min(int(_AHEAD_SECONDS / max(self.seconds, 1e-6)), _AHEAD)
        return 0 if self.closed or self.quarantined else self.hands * (1 + ahead) - len(self.at)

    def note(self, outcome: Outcome) -> None:
        self.seconds += 0.2 * (outcome.seconds - self.seconds)


class Board:
    """The trials that wait, in lanes: one for an arm on a workload, or for a block where trials run alone.

    A lane of trials that run alone belongs to the machine that took its first trial, since what is measured is compared
    within the block.
    """

    def __init__(self, trials: Iterable[Trial], seats: Sequence[Seat]) -> None:
        self.seats = seats  # those that live, kept up to date by the owner
        self.left = 0  # trials that have not ended
        self.notes: list[str] = []
        self._lanes: dict[tuple[str, ...], deque[tuple[int, Trial]]] = {}
        self._numbers: dict[str, int] = {}
        self._suspects: deque[Trial] = deque()
        self._losses: Counter[str] = Counter()
        self._unfit: set[tuple[str, str, str]] = set()
        self._owners: dict[tuple[str, ...], str] = {}
        self._moved: set[tuple[str, ...]] = set()
        for number, trial in enumerate(trials):
            self._numbers[trial.key] = number
            self._lanes.setdefault(_lane(trial), deque()).append((number, trial))
            self.left += 1

    def deal(self) -> Iterator[tuple[Seat, Trial]]:
        """Who does what now; each pair is noted as begun."""
        progress = True
        while progress:
            progress = False
            for seat in self.seats:  # a trial each in turn, so that hosts are loaded evenly
                trial = self._take(seat)
                if trial is not None:
                    seat.at.add(trial.key)
                    progress = True
                    yield seat, trial

    def ended(self, seat: Seat, trial: Trial, outcome: Outcome) -> list[tuple[Trial, Outcome]]:
        """A trial came back from its host; returns what is to be recorded.

        Where the surroundings failed and not the trial (no peer, no workload), the other hosts get such trials.
        """
        self.leave(seat, trial)
        seat.note(outcome)
        if outcome.final or outcome.status != "raised":
            self.left -= 1
            return [(trial, outcome)]
        what = (seat.machine, trial.workload, trial.arm)
        if what not in self._unfit:
            self._unfit.add(what)
            last = outcome.error.strip().splitlines()[-1] if outcome.error.strip() else "no reason given"
            self.notes.append(f"{seat.name} did not run {trial.arm or 'trials'} on {trial.workload}: {last}")
        if any(self._is_fit(other, trial) for other in self.seats):
            self._put_back(trial)
            return []
        return self._settle_like(trial, outcome)

    def lost(self, seat: Seat, trial: Trial, *, suspicious: bool) -> list[tuple[Trial, Outcome]]:
        """The host of a trial is gone; returns what is to be recorded: a trial that lost too many hosts has died.

        `suspicious` where the trial may have been the reason. Such a trial gets its next host to itself, so that those
        beside it do not come under suspicion again.
        """
        self.leave(seat, trial)
        self._losses[trial.key] += suspicious
        if self._losses[trial.key] >= LOSSES:
            self.left -= 1
            text = f"{LOSSES} hosts were lost while this trial was there, the last of them {seat.name}"
            return [(trial, Outcome(trial.key, "died", error=text, final=False))]
        self._put_back(trial)
        return []

    def close(self) -> None:
        """Give no more out; what is left are the trials that run."""
        self._lanes.clear()
        self._suspects.clear()
        self.left = sum(len(seat.at) for seat in self.seats)

    def leave(self, seat: Seat, trial: Trial) -> None:
        """A trial is no longer at its host."""
        seat.at.discard(trial.key)
        seat.quarantined = seat.quarantined and bool(seat.at)

    def _put_back(self, trial: Trial) -> None:
        if self._losses[trial.key]:
            self._suspects.append(trial)
        else:
            self._lanes.setdefault(_lane(trial), deque()).appendleft((self._numbers[trial.key], trial))

    def _take(self, seat: Seat) -> Trial | None:
        if seat.room < 1:
            return None
        for trial in self._suspects:
            if not seat.at and self._may(seat, trial):
                self._suspects.remove(trial)
                seat.quarantined = True
                return self._given(seat, trial)
        lanes = (lane for lane in self._lanes.values() if self._may(seat, lane[0][1]))
        lane = next(lanes, None)
        if lane is None:
            return None
        if not lane[0][1].alone:  # lanes of blocks are many, and in order already
            lane = min([lane, *lanes], key=lambda lane: lane[0][0])
        trial = lane.popleft()[1]
        if not lane:
            del self._lanes[_lane(trial)]
        return self._given(seat, trial)

    def _given(self, seat: Seat, trial: Trial) -> Trial:
        if trial.alone:
            lane = _lane(trial)
            owner = self._owners.setdefault(lane, seat.machine)
            if owner != seat.machine:
                self._owners[lane] = seat.machine
                if lane not in self._moved:
                    self._moved.add(lane)
                    self.notes.append(
                        f"block {trial.block} of {trial.workload} was measured on more than one host, since"
                        " the first was lost"
                    )
        return trial

    def _may(self, seat: Seat, trial: Trial) -> bool:
        if not self._is_fit(seat, trial):
            return False
        if not trial.alone:
            return True
        if any(other.at for other in self.seats if other.machine == seat.machine):
            return False
        owner = self._owners.get(_lane(trial), seat.machine)
        return owner == seat.machine or not any(
            other.machine == owner and self._is_fit(other, trial) for other in self.seats
        )

    def _is_fit(self, seat: Seat, trial: Trial) -> bool:
        return (seat.machine, trial.workload, trial.arm) not in self._unfit

    def _settle_like(self, trial: Trial, outcome: Outcome) -> list[tuple[Trial, Outcome]]:
        """No host can do this: the same goes for all trials of its kind."""
        kind = (trial.workload, trial.arm)
        waiting = [t for lane in self._lanes.values() for _, t in lane if (t.workload, t.arm) == kind]
        self._lanes = {
            name: kept
            for name, lane in self._lanes.items()
            if (kept := deque(item for item in lane if (item[1].workload, item[1].arm) != kind))
        }
        settled = [trial, *waiting]
        self.left -= len(settled)
        return [(each, replace(outcome, key=each.key)) for each in settled]


def _lane(trial: Trial) -> tuple[str, ...]:
    return (trial.workload, trial.block) if trial.alone else (trial.workload, trial.arm)
