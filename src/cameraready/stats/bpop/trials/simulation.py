"""What running an inferred graph would save: the real executor on a clock that jumps, with tokens counted."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cameraready.stats.bpop import Execution, compile, posets
from cameraready.stats.bpop.executor import ended

#: Tokens of the instruction that every action is asked with.
PROMPT_TOKENS = 200


class _JumpingSelector(selectors.DefaultSelector):
    """Instead of waiting, moves the clock on by the time to wait."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready and timeout:
            self.now += timeout
        return ready


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop on which sleeping takes no time, only the clock moves."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run_simulated(coroutine: Callable[[], Any]) -> Any:
    """The result of ``coroutine()`` on a simulated clock. Handlers may not use threads."""

    def work() -> Any:
        loop = SimulatedLoop()
        try:
            return loop.run_until_complete(coroutine())
        finally:
            loop.close()

    return ended(work)


@dataclass(frozen=True)
class Costs:
    """What every action costs: `seconds` (n,) of work and `tokens` (n,) of output."""

    seconds: np.ndarray
    tokens: np.ndarray

    @classmethod
    def drawn(cls, n: int, generator: np.random.Generator) -> Costs:
        """Log-normal costs: a median of 2 seconds and of 300 tokens, each times or by about two."""
        return cls(np.exp(generator.normal(np.log(2), 0.7, n)), np.exp(generator.normal(np.log(300), 0.7, n)))

    @property
    def serial_seconds(self) -> float:
        return float(self.seconds.sum())

    def serial_tokens(self, trace: list[int]) -> float:
        """Tokens read by an agent that does one action after another with everything so far in its context."""
        return float(len(trace) * PROMPT_TOKENS + np.concatenate([[0.0], np.cumsum(self.tokens[trace])[:-1]]).sum())


class MissingPrerequisite(RuntimeError):
    """An action was started without the output of one that it depends on."""


def execute(inferred: np.ndarray, truth: np.ndarray, costs: Costs, trace: list[int]) -> dict[str, float]:
    """Run the inferred order with actions that fail without what they truly depend on.

    Parameters
    ----------
    inferred, truth : bool arrays (n, n)
        Closed orders.
    trace : list of int
        A true order of all actions, by which an agent goes on alone with what remains after a failure, and with which
        time and tokens are compared.

    Returns
    -------
    dict
        ``fell_back`` (1 where any action failed), ``time_ratio`` and ``token_ratio`` to the serial agent's.
    """
    import networkx as nx

    needs = posets.cover(truth)
    read = 0.0

    def handler(action: int) -> Callable[..., Any]:
        async def work(inputs: Mapping[str, Any], outputs: Mapping[int, float]) -> float:
            nonlocal read
            read += PROMPT_TOKENS + sum(outputs.values())
            if not set(np.flatnonzero(needs[:, action]).tolist()) <= set(outputs):
                raise MissingPrerequisite(str(action))
            await asyncio.sleep(float(costs.seconds[action]))
            return float(costs.tokens[action])

        return work

    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(truth)))
    graph.add_edges_from(np.argwhere(posets.cover(inferred)).tolist())
    late = 0.0

    def go_on_alone(execution: Execution) -> dict[int, float]:
        nonlocal read, late
        known = sum(execution.outputs.values())
        answers = {}
        assert execution.remaining is not None
        for action in (a for a in trace if a in execution.remaining):
            read += PROMPT_TOKENS + known
            known += costs.tokens[action]
            late += costs.seconds[action]
            answers[action] = float(costs.tokens[action])
        return answers

    compiled = compile(graph, {action: handler(action) for action in graph})
    execution = run_simulated(lambda: compiled.arun(fallback=go_on_alone))
    return {
        "fell_back": float(execution.fell_back),
        "time_ratio": float(execution.makespan + late) / costs.serial_seconds,
        "token_ratio": float(read) / costs.serial_tokens(trace),
    }
