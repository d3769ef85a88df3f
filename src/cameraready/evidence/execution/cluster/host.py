"""The process that runs the trials of one run on one host: it owns the crew and speaks with a Dask worker over pipes.

``python -m cameraready.evidence.execution.cluster.host`` reads requests ``(number, kind, ...)`` from standard input and
answers ``(number, "ok", value)`` or ``(number, "error", text)`` on standard output. When its input ends, because the run
is over or the Dask worker is gone, it ends its workers and itself.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from cameraready.evidence.execution.cluster import cargo, wire
from cameraready.evidence.execution.cluster.passport import Terms, passport
from cameraready.evidence.execution.crew import Crew, Ending, Stop, Task
from cameraready.evidence.execution.ledger import data_folder
from cameraready.evidence.execution.pool import outcome_of, scratch_folder
from cameraready.evidence.execution.worker import load_job, load_study, prepare_workload, run_trial
from cameraready.evidence.outcomes import Outcome, Trial
from cameraready.evidence.study import Study, study_folder

_PARENT_EVERY = 1.0  # seconds between looks at whether the Dask worker still lives


@dataclass(frozen=True)
class Begin:
    """How the crew is to work: processes at a time, threads of each, seconds for opening a workload and for a trial."""

    hands: int
    threads: int
    open_timeout: float
    timeout: float


@dataclass(frozen=True)
class _Request:
    """On whose behalf a task is done: the number to answer under, and the trial if it is one."""

    number: int
    trial: Trial | None = None

    @property
    def alone(self) -> bool:
        return self.trial is not None and self.trial.alone


@dataclass(frozen=True)
class _Cut:
    """A request to end what runs and to forget what waits."""

    number: int


class Host:
    """Reads requests in one thread and does them in another, which is the crew's."""

    def __init__(self, requests: BinaryIO, answers: BinaryIO, folder: Path) -> None:
        self._requests = requests
        self._answers = answers
        self._answering = threading.Lock()
        self._folder = folder
        self._inbox: queue.SimpleQueue[Task | _Cut] = queue.SimpleQueue()
        self._waiting: deque[Task] = deque()
        self._begun: queue.SimpleQueue[tuple[int, Begin] | None] = queue.SimpleQueue()
        self._timeout = float("inf")
        self._study: Study | None = None
        self._crew: Crew | None = None
        self._stop = Stop()
        self._cuts: deque[int] = deque()
        self._ended = False

    def serve(self) -> None:
        """Answer requests until there are no more."""
        threading.Thread(target=self._listen, name="requests", daemon=True).start()
        begun = self._begun.get()
        if begun is None:
            return
        number, how = begun
        self._timeout = how.timeout
        self._crew = crew = Crew(None, self._folder, threads=how.threads, open_timeout=how.open_timeout)
        try:
            self._answer(number, self._try_job(crew, how))
            while not self._ended:
                self._work(crew, how.hands, alone=False)
                self._work(crew, 1, alone=True)
        finally:
            crew.close()

    def _work(self, crew: Crew, hands: int, *, alone: bool) -> None:
        """Do tasks until one of the other kind is next, or the rest was cut off."""
        self._stop = stop = Stop(interrupted=self._ended)
        crew.work((), hands, self._tell, stop, fresh=alone, feed=lambda: self._feed(stop, alone))
        crew.finish_dismissals()  # nothing of what ran so far may disturb what is measured next
        for note in crew.notes:
            _log(note)
        crew.notes.clear()
        while self._cuts:
            self._answer(self._cuts.popleft(), None)

    def _feed(self, stop: Stop, alone: bool) -> list[Task] | None:
        while not self._inbox.empty():
            item = self._inbox.get()
            if isinstance(item, _Cut):
                self._waiting.clear()
                self._cuts.append(item.number)
            else:
                self._waiting.append(item)
        if self._ended or self._cuts:
            stop.interrupted = True
            return None
        tasks: list[Task] = []
        while self._waiting and self._waiting[0].subject.alone == alone:
            tasks.append(self._waiting.popleft())
        return None if self._waiting and not tasks else tasks

    def _try_job(self, crew: Crew, how: Begin) -> str:
        """Unpack the job in a worker: what is missing here shows before the first trial."""
        errors: list[str] = []
        task = Task(None, load_job, (), how.open_timeout)
        crew.work([task], 1, lambda _, ending: errors.append(_error_of(ending)), self._stop)
        return errors[0] if errors else "it was ended"

    def _tell(self, task: Task, ending: Ending) -> None:
        request: _Request = task.subject
        if request.trial is not None:
            self._answer(request.number, outcome_of(request.trial, ending))
        else:
            self._answer(request.number, _error_of(ending))

    def _answer(self, number: int, value: Any, kind: str = "ok") -> None:
        with self._answering:
            try:
                wire.send(self._answers, (number, kind, value))
            except OSError:
                self._end()  # nobody listens any more

    def _end(self) -> None:
        self._ended = True
        self._stop.interrupted = True
        self._begun.put(None)
        if self._crew is not None:
            self._crew.wake()

    def _listen(self) -> None:
        threading.Thread(target=self._watch_parent, args=(os.getppid(),), name="watch-parent", daemon=True).start()
        while True:
            try:
                number, kind, *args = wire.receive(self._requests)
            except (EOFError, OSError):
                self._end()
                return
            try:
                getattr(self, f"_on_{kind}")(number, *args)
            except Exception:  # told to the driver, which decides
                self._answer(number, traceback.format_exc(), "error")

    def _watch_parent(self, parent: int) -> None:
        # The pipe may be held open by some other child of a Dask worker that was killed.
        while os.getppid() == parent:
            time.sleep(_PARENT_EVERY)
        self._end()

    # --- requests ---------------------------------------------------------------------------------------------------

    def _on_arrive(self, number: int, terms: Terms, path: list[str]) -> None:
        sys.path.extend(entry for entry in path if entry not in sys.path)
        held = passport(terms)
        if "missing: " not in held.get(f"the code of {terms.reference}", ""):
            self._study = load_study(terms.reference)
        shelf = data_folder() / "prepared"
        shelf.mkdir(parents=True, exist_ok=True)
        (self._folder / cargo.PREPARED).symlink_to(shelf)
        self._answer(number, (held, str(self._folder)))

    def _on_begin(self, number: int, how: Begin) -> None:
        self._begun.put((number, how))

    def _on_trial(self, number: int, trial: Trial) -> None:
        task = Task(_Request(number, trial), run_trial, (trial,), self._timeout, trial.workload)
        self._with_peers(number, trial, lambda: self._put(task))

    def _on_prepare(self, number: int, workload: str, path: str) -> None:
        self._put(Task(_Request(number), prepare_workload, (workload, self._folder / path), float("inf")))

    def _on_cut(self, number: int) -> None:
        """End what runs, forget what waits, and answer once all of it is gone."""
        self._put(_Cut(number))

    def _put(self, item: Task | _Cut) -> None:
        self._inbox.put(item)
        if self._crew is not None:
            self._crew.wake()

    def _with_peers(self, number: int, trial: Trial, then: Callable[[], None]) -> None:
        """Build the environments that a trial needs, aside and outside of its time, where they are not there yet."""
        from cameraready.evidence.peers import environments

        assert self._study is not None
        folder = study_folder(self._study)
        peers = [peer for peer in self._study.peers_of(trial.arm) if not environments.is_built(peer, folder)]

        def build() -> None:
            try:
                for peer in peers:
                    environments.ensure(peer, folder, progress=_log)
            except environments.PeerUnavailable as error:
                self._answer(number, Outcome(trial.key, "raised", error=str(error), final=False))
                return
            then()

        if peers:
            threading.Thread(target=build, name="build-peers", daemon=True).start()
        else:
            then()


def _error_of(ending: Ending) -> str:
    return ending.value if ending.kind == "returned" else ending.text


def _log(text: str) -> None:
    print(f"cameraready: {text}", file=sys.stderr, flush=True)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run's end is told by the end of the input
    answers = os.fdopen(os.dup(1), "wb")
    requests = os.fdopen(os.dup(0), "rb")
    os.dup2(2, 1)  # what libraries print goes to the Dask worker's log
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    with scratch_folder() as folder:
        Host(requests, answers, folder).serve()
    os._exit(0)  # the thread that listens may be in the middle of a read


if __name__ == "__main__":
    main()
