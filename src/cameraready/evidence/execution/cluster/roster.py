"""The hosts of a run: who may take part, what they are given before their first trial, and who is gone."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError as Withdrawn
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from cameraready.evidence.execution.cluster import cargo, carrier
from cameraready.evidence.execution.cluster.board import Seat
from cameraready.evidence.execution.cluster.carrier import Arrival, HostGone
from cameraready.evidence.execution.cluster.host import Begin
from cameraready.evidence.execution.cluster.link import Link
from cameraready.evidence.execution.cluster.passport import Terms, differences

Say = Callable[[str], None]

_ENDINGS = 10  # how often in a row a host may end without a finished trial on a Dask worker that stays


@dataclass(frozen=True)
class Setup:
    """All that the hosts of a run have to be told.

    Attributes
    ----------
    passport : mapping
        The driver's own, which a host's must be equal to.
    items : sequence
        The job and its files.
    prepared : mapping
        Name below the run's folder, and path here, of each workload's prepared arrays.
    jobs : int or None
        Trials at a time in each Dask worker; as many as it has threads (by the threads of a trial) where None.
    """

    terms: Terms
    passport: Mapping[str, str]
    items: Sequence[cargo.Item]
    prepared: Mapping[str, tuple[str, Path]]
    jobs: int | None
    threads: int
    open_timeout: float
    timeout: float


@dataclass(eq=False)
class Host:
    """A Dask worker that takes part, and what is under way there."""

    link: Link
    seat: Seat
    has_finished: bool = False  # some trial
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    equipped: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    def start(self, work: Any) -> asyncio.Task[Any]:
        """Begin something that is cancelled when the host is lost."""
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task


class Refused(Exception):
    """A Dask worker cannot take part; says why."""


class Roster:
    """Dask workers and what has become of them. Lives in one event loop; calls `on_change` when hosts came or went."""

    def __init__(self, setup: Setup, say: Say, on_change: Callable[[], None]) -> None:
        self.setup = setup
        self.run = uuid.uuid4().hex
        self.present: dict[str, Host] = {}
        self.seats: list[Seat] = []
        self.refused: dict[str, str] = {}
        self.notes: list[str] = []
        self.had_any = False
        self._say = say
        self._on_change = on_change
        self._lives: dict[str, asyncio.Task[None]] = {}
        self._endings: Counter[str] = Counter()
        self._numbers = itertools.count()

    @property
    def joining(self) -> int:
        """Dask workers that may be hosts in a moment."""
        return len(self._lives) - len(self.present)

    def update(self, link: Link, workers: Mapping[str, int]) -> None:
        """Take in who is new among the Dask workers (threads by address), and let go who is no longer there."""
        for address in [a for a in self._lives if a not in workers]:
            self._lives[address].cancel()
        for address, threads in workers.items():
            if address not in self._lives and address not in self.refused:
                life = self._lives[address] = asyncio.create_task(self._live(link, address, threads))
                life.add_done_callback(partial(self._forget, address))

    def let_go(self, address: str) -> None:
        """Give up a host; where its Dask worker is still there, it may begin anew."""
        if address in self.present:
            self._lives[address].cancel()

    def _forget(self, address: str, life: asyncio.Task[None]) -> None:
        del self._lives[address]
        self._on_change()

    async def clear(self) -> None:
        """Let all go."""
        lives = list(self._lives.values())
        for life in lives:
            life.cancel()
        await asyncio.gather(*lives, return_exceptions=True)
        self.refused.clear()  # a new scheduler's workers have new addresses

    def key(self, what: str) -> str:
        """A name for a Dask task; Dask's dashboard groups them by what stands before the number."""
        return f"cameraready_{what}-{self.run}-{next(self._numbers)}"

    async def call(self, link: Link, what: str, function: Callable[..., Any], *args: Any, **more: Any) -> Any:
        """The value of ``function(run, *args)`` on a Dask worker."""
        return await link.call(self.key(what), function, self.run, *args, **more)

    async def equip(self, host: Host, workload: str) -> None:
        """See to it that a host has the prepared arrays of a workload: sent once, into its cache."""
        if workload in self.setup.prepared:
            if workload not in host.equipped or host.equipped[workload].cancelled():
                host.equipped[workload] = host.start(self._equip(host, workload))
            await asyncio.shield(host.equipped[workload])

    async def _live(self, link: Link, address: str, threads: int) -> None:
        """A Dask worker's part in the run, from its arrival to its loss."""
        staying = asyncio.create_task(self.call(link, "host", carrier.stay, to=address, priority=10))
        joining = asyncio.create_task(self._join(link, address, threads))
        try:
            await asyncio.wait({staying, joining}, return_when=asyncio.FIRST_COMPLETED)
            if not staying.done():
                joining.result()
            await staying  # it lasts until the host is gone
            raise HostGone("its process ended")
        except Exception as error:  # whatever went wrong on that worker concerns that worker alone
            self._note_end(link, address, error)
        finally:
            await self._bury(address, [staying, joining])

    def _note_end(self, link: Link, address: str, error: Exception) -> None:
        host = self.present.get(address)
        name = host.seat.name if host is not None else f"the Dask worker at {address}"
        self._endings[address] = 1 if host is not None and host.has_finished else self._endings[address] + 1
        if isinstance(error, Refused):
            self._refuse(address, str(error))
        elif isinstance(error, ImportError):
            self._refuse(
                address, f"{name} cannot import the engine ({error}); install the same cameraready[study] there"
            )
        elif host is None and not isinstance(error, HostGone | Withdrawn | OSError):
            last = str(error).strip().splitlines() or [type(error).__name__]
            self._refuse(address, f"{name} could not begin: {last[-1]}")
        elif self._endings[address] >= _ENDINGS:
            self._refuse(address, f"{name} broke off {_ENDINGS} times ({type(error).__name__}: {error})")

    def _refuse(self, address: str, why: str) -> None:
        self.refused[address] = why
        text = f"left out: {why}"
        if text not in self.notes:
            self.notes.append(text)
            self._say(text)

    async def _bury(self, address: str, tasks: Sequence[asyncio.Task[Any]]) -> None:
        host = self.present.pop(address, None)
        if host is not None:
            self.seats.remove(host.seat)
            tasks = [*tasks, *host.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _join(self, link: Link, address: str, threads: int) -> None:
        """Check a Dask worker, and give it all that it needs. Raises `Refused`."""
        setup = self.setup
        there: Arrival = await self.call(link, "arrive", carrier.arrive, setup.terms, to=address, priority=5)
        different = differences(setup.passport, there.passport)
        if different:
            raise Refused(f"{there.name} would not compute the same as this machine: {'; '.join(different)}")
        for item in setup.items:
            await self._ship(link, address, item)
        hands = setup.jobs or max(1, min(threads, there.cores) // setup.threads)
        how = Begin(hands, setup.threads, setup.open_timeout, setup.timeout)
        error = await self.call(link, "begin", carrier.begin, how, to=address, priority=5)
        if error:
            raise Refused(
                f"{there.name} cannot load what was sent ({error.strip().splitlines()[-1]}); what is missing must be"
                " installed there, or lie on the PYTHONPATH of its Dask worker"
            )
        seat = Seat(address, there.name, there.machine, hands)
        self.present[address] = Host(link, seat)
        self.seats.append(seat)
        self.had_any = True
        self._on_change()

    async def _ship(self, link: Link, address: str, item: cargo.Item) -> None:
        first = True
        for piece, last in item.pieces():
            await self.call(link, "ship", carrier.put, item.name, piece, to=address, first=first, last=last)
            first = False

    async def _equip(self, host: Host, workload: str) -> None:
        name, path = self.setup.prepared[workload]
        if await self.call(host.link, "missing", carrier.missing, [name], to=host.seat.address):
            await self._ship(host.link, host.seat.address, cargo.Item(name, path))
