"""Traces from what people have: lists, pandas or polars tables of events, pm4py event logs."""

from __future__ import annotations

import difflib
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

Action = Hashable
Repeats = Literal["refuse", "number"]

#: Text that sorts as the time it names.
ISO_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")


def read_traces(
    log: Any,
    *,
    case: str = "case:concept:name",
    activity: str = "concept:name",
    timestamp: str | None = "time:timestamp",
    lifecycle: str | None = "lifecycle:transition",
) -> list[tuple[Action, ...]]:
    """The traces of an event log: one tuple of actions for each case.

    Parameters
    ----------
    log : sequence of traces, table or pm4py EventLog
        A sequence of sequences of actions (any hashable values); a pandas or polars table with one event a row; or a
        pm4py log, which is a sequence of sequences of mappings.
    case, activity : str
        Columns of a table (and the key of a pm4py event's activity); the defaults are pm4py's.
    timestamp : str, optional
        Column to sort the events of a case by, ties in the order of the rows; None keeps the order of the rows.
    lifecycle : str, optional
        Where there is such a column or key and it says that some events are complete, the others are left out.

    Returns
    -------
    list of tuples
        Cases in the order of their first event.

    Raises
    ------
    ValueError
        For a missing column, or a missing action, case or time.
    TypeError
        Where a trace is a single string, or no sequence.
    """
    if hasattr(log, "columns"):
        return _from_table(log, case, activity, timestamp, lifecycle)
    if isinstance(log, (str, bytes)) or not isinstance(log, Iterable):
        raise TypeError(f"traces are a sequence of sequences of actions, a table or an event log, got {type(log)}")
    return [_one_trace(i, trace, activity, lifecycle) for i, trace in enumerate(log)]


def _one_trace(index: int, trace: Any, activity: str, lifecycle: str | None) -> tuple[Action, ...]:
    if isinstance(trace, (str, bytes)):
        raise TypeError(f"trace {index} is the single string {trace!r}; a trace is a sequence of actions")
    if isinstance(trace, (set, frozenset)):
        raise TypeError(f"trace {index} is a set, which has no order; give a list")
    if not isinstance(trace, Iterable):
        raise TypeError(f"trace {index} is no sequence of actions but {type(trace).__name__}")
    events = list(trace)
    if events and all(hasattr(event, "keys") and activity in event for event in events):
        if lifecycle is not None:
            events = [events[i] for i in _complete([event.get(lifecycle) for event in _mappings(events)])]
        actions = [event[activity] for event in events]
    else:
        actions = events
    for action in actions:
        if _missing(action):
            raise ValueError(f"trace {index} has a missing action ({action!r})")
        if not isinstance(action, Hashable):
            raise TypeError(f"trace {index} has the action {action!r}, which cannot be hashed; name actions by text")
    return tuple(actions)


def _mappings(events: Sequence[Any]) -> list[Mapping[str, Any]]:
    return [{key: event[key] for key in event.keys()} for event in events]  # noqa: SIM118  (pm4py's events iterate so)


def _complete(states: Sequence[Any]) -> list[int]:
    """Places of the events that are complete; all of them where the log does not tell."""
    complete = [i for i, state in enumerate(states) if isinstance(state, str) and state.lower() == "complete"]
    return complete or list(range(len(states)))


def _from_table(
    table: Any, case: str, activity: str, timestamp: str | None, lifecycle: str | None
) -> list[tuple[Action, ...]]:
    columns = [str(name) for name in table.columns]
    for role, name in (("case", case), ("activity", activity), ("timestamp", timestamp)):
        if name is not None and name not in columns:
            hint = "; timestamp=None keeps the order of the rows" if role == "timestamp" else ""
            raise ValueError(f"the table has no column {name!r} for {role}=; it has {', '.join(columns)}{hint}")
    cases, actions = _values(table, case), _values(table, activity)
    for name, values in ((case, cases), (activity, actions)):
        missing = [i for i, value in enumerate(values) if _missing(value)]
        if missing:
            raise ValueError(f"column {name!r} has no value in row {missing[0]} (and {len(missing) - 1} others)")
    rows = list(range(len(cases)))
    if timestamp is not None:
        times = np.asarray(table[timestamp])
        if any(_missing(value) for value in times):
            raise ValueError(f"column {timestamp!r} has missing times; fill them or pass timestamp=None")
        if any(isinstance(value, str) and not ISO_DATE.match(value) for value in times):
            raise ValueError(
                f"column {timestamp!r} holds text that does not sort as time; convert it with pandas.to_datetime"
            )
        rows = np.argsort(times, kind="stable").tolist()
    if lifecycle is not None and lifecycle in columns:
        states = _values(table, lifecycle)
        keep = set(_complete(states))
        rows = [row for row in rows if row in keep]
    traces: dict[Any, list[Action]] = {value: [] for value in cases}
    for row in rows:
        traces[cases[row]].append(actions[row])
    return [tuple(trace) for trace in traces.values() if trace]


def _missing(value: Any) -> bool:
    if value is None or type(value).__name__ == "NAType":
        return True
    try:
        return bool(value != value)
    except ValueError:  # an array, which is no action either
        raise TypeError(f"{value!r} cannot be an action or a time; name actions by text") from None


def _values(table: Any, name: str) -> list[Any]:
    column = table[name]
    return column.to_list() if hasattr(column, "to_list") else list(column)


def numbered(trace: Sequence[Action]) -> tuple[Action, ...]:
    """`trace` with the second and later occurrences of an action told apart: ``"a"``, ``"a#2"``, ``"a#3"``."""
    seen: dict[Action, int] = {}
    told = []
    for action in trace:
        seen[action] = seen.get(action, 0) + 1
        times = seen[action]
        told.append(action if times == 1 else f"{action}#{times}" if isinstance(action, str) else (action, times))
    if len(set(told)) < len(told):
        raise ValueError(f"numbering repeated actions gives one name twice in the trace {list(trace)}; rename them")
    return tuple(told)


def checked_traces(traces: Sequence[Sequence[Action]], repeats: Repeats) -> list[tuple[Action, ...]]:
    """`traces` without empty ones or repeated actions, or a ValueError that names the first bad one."""
    if repeats not in ("refuse", "number"):
        raise ValueError(f"repeats must be 'refuse' or 'number', got {repeats!r}")
    checked = []
    for index, trace in enumerate(traces):
        if len(trace) == 0:
            raise ValueError(f"trace {index} is empty: it says nothing about any order; leave it out")
        told = numbered(trace) if repeats == "number" else tuple(trace)
        if len(set(told)) < len(told):
            again = next(action for i, action in enumerate(told) if action in told[:i])
            raise ValueError(
                f"trace {index} has the action {again!r} more than once; repeats='number' makes each occurrence an action"
            )
        checked.append(told)
    return checked


class Vocabulary:
    """The actions and their places."""

    def __init__(self, actions: Iterable[Action]) -> None:
        self.actions = tuple(actions)
        self.place = {action: i for i, action in enumerate(self.actions)}
        if len(self.place) < len(self.actions):
            raise ValueError("actions must be different from each other")
        if not self.actions:
            raise ValueError("there are no actions: give at least one trace, or actions=")

    def places(self, trace: Iterable[Action], what: str) -> list[int]:
        """Places of the actions of `trace`; a ValueError, with near misses, for one that is unknown or repeated."""
        found = []
        for action in trace:
            if action not in self.place:
                near = difflib.get_close_matches(str(action), [str(a) for a in self.actions], n=3)
                known = ", ".join(near) if near else ", ".join(repr(a) for a in self.actions[:10])
                raise ValueError(f"{what} has the unknown action {action!r}; {'near' if near else 'known'}: {known}")
            if self.place[action] in found:
                raise ValueError(f"{what} has the action {action!r} more than once")
            found.append(self.place[action])
        return found
