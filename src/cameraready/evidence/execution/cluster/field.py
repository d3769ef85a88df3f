"""The driver's side in an event loop: keeps the connection, deals trials to the hosts, survives the loss of either.

What the driver has to know goes into a queue that `session` reads in the thread that owns the ledger.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import CancelledError as Withdrawn
from functools import partial
from pathlib import Path
from typing import Any

from cameraready.evidence.execution.cluster import cargo, carrier
from cameraready.evidence.execution.cluster.board import Board
from cameraready.evidence.execution.cluster.carrier import HostGone
from cameraready.evidence.execution.cluster.link import Link, LinkLost
from cameraready.evidence.execution.cluster.roster import Host, Roster, Setup
from cameraready.evidence.outcomes import Outcome, Trial
from cameraready.evidence.subject import UsageError

News = tuple[str, Any]

_LOOK_EVERY = 0.5  # seconds between looks at who is there
_SAY_EVERY = 5.0  # seconds between two messages while nobody is
_CUT_SECONDS = 20.0
_REFUSED_SECONDS = 5.0  # for another worker to appear where all that are there were refused
_ATTEMPTS = 3  # hosts that may be lost while they prepare a workload


class Field:
    """A run's cluster. `wait` is how long, in seconds, a run goes on without any host."""

    def __init__(self, address: str, security: Any, setup: Setup, news: queue.SimpleQueue[News], wait: float) -> None:
        self._address = address
        self._security = security
        self._news = news
        self._wait = wait
        self._link: Link | None = None
        self._knocking: asyncio.Task[Any] | None = None
        self._board: Board | None = None
        self._joined = asyncio.Event()
        self._alone_since = time.monotonic()
        self._said = time.monotonic()
        self.roster = Roster(setup, self._say, self._on_change)
        self.done: Counter[str] = Counter()  # trials by host
        self.notes: list[str] = []

    def _say(self, text: str) -> None:
        self._news.put(("say", text))

    # --- connection -------------------------------------------------------------------------------------------------

    async def connect(self) -> None:
        """Raises `UsageError` where no scheduler answers."""
        try:
            self._link = await Link.open(self._address, self._security)
        except LinkLost as error:
            raise UsageError(f"no Dask scheduler answers at {self._address} ({error})") from error

    async def keep(self) -> None:
        """Look after connection and hosts, until cancelled."""
        try:
            while True:
                if self._link is None:
                    await self._reconnect()
                else:
                    await self._look(self._link)
                self._mind_emptiness()
                await asyncio.sleep(_LOOK_EVERY)
        except Exception as error:  # the driver must not wait for a loop that has ended
            self._news.put(("failed", error))
        finally:
            await self._drop()

    async def _look(self, link: Link) -> None:
        try:
            workers = await link.workers()
        except LinkLost as error:
            if link.is_up:
                return  # slow is not gone: a connection that is dead closes by itself
            why = str(error)
        else:
            if link.is_up:
                self.roster.update(link, workers)
                self._knock(link, wanted=not workers)
                return
            why = ""
        await self._drop()
        self._say(f"the scheduler at {self._address} is gone{f' ({why})' if why else ''}; trying to reach it again")

    async def _reconnect(self) -> None:
        with contextlib.suppress(LinkLost):
            self._link = await Link.open(self._address, self._security, timeout=2.0)
            self._say(f"reached the scheduler at {self._address} again")

    def _knock(self, link: Link, *, wanted: bool) -> None:
        """While there is no worker, have a task wait for one: a cluster that adapts to its tasks would not grow else."""
        if wanted and (self._knocking is None or self._knocking.done()):
            self._knocking = asyncio.create_task(link.call(self.roster.key("knock"), carrier.knock))
        elif not wanted and self._knocking is not None:
            self._knocking.cancel()
            self._knocking = None

    async def _drop(self) -> None:
        """Let go of all hosts and of the connection."""
        link, self._link = self._link, None
        if self._knocking is not None:
            self._knocking.cancel()
            await asyncio.gather(self._knocking, return_exceptions=True)
            self._knocking = None
        await self.roster.clear()
        if link is not None:
            await link.close()

    def _mind_emptiness(self) -> None:
        """Say it, and in the end give up, where the run has no host."""
        now = time.monotonic()
        roster = self.roster
        if roster.present:
            self._alone_since = self._said = now
            return
        alone = now - self._alone_since
        if roster.refused and not roster.joining and not roster.had_any and alone > _REFUSED_SECONDS:
            reasons = "; ".join(dict.fromkeys(roster.refused.values()))
            self._news.put(("failed", UsageError(f"no host of the cluster can take part: {reasons}")))
            return
        reason = "the cluster has no worker" if self._link else f"the scheduler at {self._address} does not answer"
        if roster.joining:
            reason = f"{roster.joining} Dask workers are getting ready or busy"
        elif alone > self._wait:
            self._news.put(("gave up", f"there was no host for {self._wait:.0f} s: {reason}"))
        if now - self._said > _SAY_EVERY:
            self._said = now
            limit = "" if roster.joining else f"; giving up in {max(self._wait - alone, 0):.0f} s"
            self._say(f"waiting for a host: {reason}{limit}")

    # --- trials -----------------------------------------------------------------------------------------------------

    async def begin(self, trials: Sequence[Trial]) -> None:
        """Deal out these trials. Each that ends is news, and so is the end of all."""
        if trials[0].alone:
            await self._cut()  # what ran before has ended, but its processes wait for more
        self._board = Board(trials, self.roster.seats)
        self._deal()

    async def end_intake(self) -> None:
        """Start no more trials; news comes when those that run have ended."""
        if self._board is not None:
            self._board.close()
            self._deal()

    async def end_batch(self, *, cut: bool) -> None:
        """Deal no more; with `cut` end what still runs, and return when it is gone from all hosts."""
        board, self._board = self._board, None
        if board is not None:
            board.close()
            self.notes += board.notes
        if cut:
            await self._cut()

    def _on_change(self) -> None:
        if self.roster.present:
            self._joined.set()
        else:
            self._joined.clear()
        self._deal()

    def _deal(self) -> None:
        board = self._board
        if board is None:
            return
        for seat, trial in board.deal():
            host = self.roster.present[seat.address]
            # What becomes of it is seen from outside: a task that is cancelled before its first step never runs.
            host.start(self._run(host, trial)).add_done_callback(partial(self._ended, board, host, trial))
        if board.left == 0:
            self._board = None
            self.notes += board.notes
            self._news.put(("over", None))

    async def _run(self, host: Host, trial: Trial) -> Outcome:
        await self.roster.equip(host, trial.workload)
        return await self.roster.call(host.link, "trial", carrier.run_trial, trial, to=host.seat.address)

    def _ended(self, board: Board, host: Host, trial: Trial, task: asyncio.Task[Outcome]) -> None:
        """A trial came back from its host, or did not."""
        if board is not self._board:  # the batch was cut off
            board.leave(host.seat, trial)
            return
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or isinstance(error, HostGone | Withdrawn | OSError):
            # Where the connection broke, the trial is not to blame.
            suspicious = self._link is not None and self._link.is_up
            host.seat.closed = True
            self.roster.let_go(host.seat.address)
            self._settle(board.lost(host.seat, trial, suspicious=suspicious))
        elif error is not None:
            text = f"it could not be run on {host.seat.name}: {type(error).__name__}: {error}"
            self._settle(board.ended(host.seat, trial, Outcome(trial.key, "died", error=text, final=False)))
        else:
            host.has_finished = True
            self.done[host.seat.name] += 1
            self._settle(board.ended(host.seat, trial, task.result()))

    def _settle(self, ended: Sequence[tuple[Trial, Outcome]]) -> None:
        for each in ended:
            self._news.put(("outcome", each))
        self._deal()

    async def _cut(self) -> None:
        hosts = list(self.roster.present.values())
        running = [task for host in hosts for task in host.tasks]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        cuts = [self.roster.call(host.link, "cut", carrier.cut, to=host.seat.address, priority=5) for host in hosts]
        with contextlib.suppress(TimeoutError):  # a host that does not answer is on its way out
            await asyncio.wait_for(asyncio.gather(*cuts, return_exceptions=True), _CUT_SECONDS)

    # --- prepared arrays --------------------------------------------------------------------------------------------

    async def prepare(self, workload: str) -> None:
        """Prepare a workload on some host and fetch its arrays; the error as text is news, ``""`` where there is none."""
        error = f"{_ATTEMPTS} hosts were lost while it was prepared"
        for _ in range(_ATTEMPTS):
            await self._joined.wait()
            host = min(self.roster.present.values(), key=lambda host: len(host.tasks) / host.seat.hands)
            work = host.start(self._prepare(host, workload))
            try:
                await asyncio.wait({work})
            finally:
                work.cancel()
            if not work.cancelled() and not isinstance(work.exception(), HostGone | Withdrawn | OSError):
                failure = work.exception()
                error = work.result() if failure is None else f"{type(failure).__name__}: {failure}"
                break
        self._news.put(("prepared", (workload, error)))

    async def _prepare(self, host: Host, workload: str) -> str:
        name, path = self.roster.setup.prepared[workload]
        address = host.seat.address
        error = await self.roster.call(host.link, "prepare", carrier.prepare, workload, name, to=address)
        if error:
            return error
        aside = path.with_name(f".{path.name}.{self.roster.run}")
        try:
            with open(aside, "wb") as file:
                while piece := await self.roster.call(
                    host.link, "fetch", carrier.fetch, name, file.tell(), cargo.CHUNK, to=address
                ):
                    file.write(piece)
            aside.replace(path)
        finally:
            Path(aside).unlink(missing_ok=True)
        return ""
