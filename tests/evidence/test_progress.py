"""Progress says what is true: how many, how many failed, how long it will take."""

from __future__ import annotations

import io

import pytest

from cameraready.evidence.execution import progress as module
from cameraready.evidence.execution.progress import duration, progress, progress_line
from cameraready.evidence.outcomes import Outcome, Trial

TRIAL = Trial("k", "m", "w", {}, 0, "a", "0")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def tell_three(tell) -> None:
    for status in ("done", "raised", "done"):
        tell(TRIAL, Outcome("k", status))


def test_lines_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 4.0, 12.0, 30.0])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    stream = io.StringIO()
    with progress(10, stream=stream) as tell:
        tell_three(tell)
    # The second after 12 s, with 8 to go at 6 s each; the third after 30 s, with 7 to go at 10 s each.
    assert stream.getvalue().splitlines() == [
        "2 of 10 trials, 1 failed, about 48 s left",
        "3 of 10 trials, 1 failed, about 70 s left",
    ]


def test_a_bar_on_a_terminal() -> None:
    stream = Terminal()
    with progress(10, stream=stream) as tell:
        tell_three(tell)
    assert "trials, 1 failed" in stream.getvalue()
    assert "3/10" in stream.getvalue()


def test_nothing_where_there_is_nothing_to_do() -> None:
    for stream in (io.StringIO(), Terminal()):
        with progress(0, stream=stream) as tell:
            tell_three(tell)
        assert stream.getvalue() == ""


def test_spans_are_told_as_people_say_them() -> None:
    told = [duration(seconds) for seconds in (0.2, 42, 89, 300, 5399, 12_000)]
    assert told == ["1 s", "42 s", "89 s", "5 min", "1 h 30 min", "3 h 20 min"]
    assert progress_line(1, 2, 0, 5) == "1 of 2 trials, about 5 s left"


def test_no_estimate_before_enough_trials_and_none_beyond_the_limit() -> None:
    assert module.time_left(9, 1000, 5.0, 500.0, None) is None
    assert module.time_left(10, 1000, 5.0, 500.0, None) == 500.0
    assert module.time_left(1, 20, 5.0, 95.0, None) == 95.0  # 5 % of a short run
    assert module.time_left(10, 1000, 5.0, 500.0, 60.0) == 55.0
    assert module.time_left(10, 1000, 70.0, 500.0, 60.0) == 0.0
    assert progress_line(3, 1000, 1, None) == "3 of 1000 trials, 1 failed"


def test_the_bar_keeps_to_the_limit() -> None:
    stream = Terminal()
    with progress(10, 1.0, stream=stream) as tell:
        tell_three(tell)
    assert "3/10" in stream.getvalue()
