"""A small executor: runs every action of a dependency graph as soon as what it depends on is done."""

from __future__ import annotations

import asyncio
import inspect
import operator
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict

if TYPE_CHECKING:
    import networkx as nx

Action = Any
Status = Literal["done", "failed", "cancelled"]
#: ``handler(inputs, outputs)`` -> output, plain or a coroutine; `outputs` has those of its ancestors alone.
Handler = Callable[[Mapping[str, Any], Mapping[Action, Any]], Any]


@dataclass
class Execution:
    """How a run went.

    Attributes
    ----------
    outputs : dict of action to output
        Of the actions that are done.
    status : dict of action to {"done", "failed", "cancelled"}
        A cancelled action is one that waited for a failed one; it was never started.
    errors : dict of action to exception
    started, ended : dict of action to float
        Seconds since the run began, by the event loop's clock.
    remaining : DiGraph
        What failed or was cancelled, with the dependencies among it: the work of a fallback planner.
    fell_back : bool
        Whether `fallback` was asked.
    """

    outputs: dict[Action, Any] = field(default_factory=dict)
    status: dict[Action, Status] = field(default_factory=dict)
    errors: dict[Action, Exception] = field(default_factory=dict)
    started: dict[Action, float] = field(default_factory=dict)
    ended: dict[Action, float] = field(default_factory=dict)
    remaining: nx.DiGraph | None = None
    fell_back: bool = False

    @property
    def ok(self) -> bool:
        """Whether every action is done."""
        return all(state == "done" for state in self.status.values())

    @property
    def makespan(self) -> float:
        """Seconds from the begin to the end of the last action; 0 for an empty graph."""
        return max(self.ended.values(), default=0.0)


Fallback = Callable[["Execution"], Any]


def compile(graph: nx.DiGraph, handlers: Mapping[Action, Handler]) -> CompiledGraph:
    """Make `graph` executable.

    Parameters
    ----------
    graph : networkx.DiGraph
        An edge (a, b) says that a must be done before b; `PosetPosterior.graph` makes one. It may be reduced or not.
    handlers : mapping of action to callable
        ``handler(inputs, outputs)`` for each node: `inputs` are those of the run, `outputs` maps the node's ancestors,
        and no other action, to what they returned. Coroutine functions run on the event loop, others on threads.
        Handlers should be idempotent: a fallback may call them again.

    Returns
    -------
    CompiledGraph

    Raises
    ------
    ValueError
        For a cycle, a node without a handler, or a handler without a node.
    TypeError
        For a graph without direction, or a handler that cannot be called.
    """
    return CompiledGraph(graph, handlers)


class CompiledGraph:
    """An executable dependency graph; see `compile`."""

    def __init__(self, graph: nx.DiGraph, handlers: Mapping[Action, Handler]) -> None:
        import networkx as nx

        if not (hasattr(graph, "is_directed") and graph.is_directed()):
            raise TypeError(f"graph must be a networkx.DiGraph, got {type(graph).__name__}")
        if not nx.is_directed_acyclic_graph(graph):
            cycle = " -> ".join(str(edge[0]) for edge in nx.find_cycle(graph))
            raise ValueError(f"the graph has the cycle {cycle}, so no action in it could start")
        missing, extra = [a for a in graph if a not in handlers], [a for a in handlers if a not in graph]
        if missing:
            raise ValueError(f"these actions have no handler: {', '.join(map(str, missing[:10]))}")
        if extra:
            raise ValueError(f"these handlers belong to no action of the graph: {', '.join(map(str, extra[:10]))}")
        for action, handler in handlers.items():
            if not callable(handler):
                raise TypeError(f"the handler of {action!r} cannot be called: {handler!r}")
        self.graph = nx.transitive_reduction(graph)  # the same dependencies with the fewest edges
        self.handlers = dict(handlers)
        self.ancestors = {action: frozenset(nx.ancestors(graph, action)) for action in graph}
        self.descendants = {action: frozenset(nx.descendants(graph, action)) for action in graph}

    def run(
        self,
        inputs: Mapping[str, Any] | None = None,
        *,
        max_workers: int | None = None,
        fallback: Fallback | None = None,
    ) -> Execution:
        """`arun` to its end; where an event loop runs already (a notebook), on a thread of its own, and awaiting `arun` is better."""
        return ended(lambda: asyncio.run(self.arun(inputs, max_workers=max_workers, fallback=fallback)))

    async def arun(
        self,
        inputs: Mapping[str, Any] | None = None,
        *,
        max_workers: int | None = None,
        fallback: Fallback | None = None,
    ) -> Execution:
        """Run all actions, each as soon as its predecessors are done.

        Where an action fails its descendants are cancelled and everything else goes on.

        Parameters
        ----------
        inputs : mapping, optional
            Handed to every handler.
        max_workers : int, optional
            Most actions at a time; None sets no limit (threads: as many as there are actions).
        fallback : callable, optional
            ``fallback(execution)``, plain or a coroutine, is asked once where something failed, after all else is done.
            It returns outputs for actions of ``execution.remaining``, which then count as done, or an empty mapping.

        Raises
        ------
        ValueError
            For `max_workers` below 1, or a fallback that answers for an action that did not remain.
        """
        if max_workers is not None and (isinstance(max_workers, bool) or max_workers < 1):
            raise ValueError(f"max_workers must be a whole number of at least 1, got {max_workers!r}")
        execution = await _Run(self, dict(inputs or {}), max_workers or max(len(self.graph), 1)).finish()
        left = [action for action, state in execution.status.items() if state != "done"]
        execution.remaining = self.graph.subgraph(left).copy()
        if left and fallback is not None:
            execution.fell_back = True
            await _fall_back(execution, fallback)
        return execution

    def to_langgraph(self) -> Any:
        """The same graph as a compiled `langgraph.graph.StateGraph` (needs langgraph).

        Its state has ``inputs`` (a dict) and ``outputs`` (by action); invoke it with ``{"inputs": {...}, "outputs": {}}``. Node
        names are ``str(action)``. LangGraph runs in steps that wait for their slowest node, and an error ends the run.
        """
        try:
            from langgraph.graph import END, START, StateGraph
        except ImportError as error:
            raise ImportError("to_langgraph() needs langgraph: pip install langgraph") from error
        names = {action: str(action) for action in self.graph}
        if len(set(names.values())) < len(names):
            raise ValueError("two actions have the same text, which LangGraph needs as their name; rename one")
        builder = StateGraph(GraphState)
        for action, name in names.items():
            builder.add_node(name, self._langgraph_node(action))
        for action, name in names.items():
            needed = [names[before] for before in self.graph.predecessors(action)]
            builder.add_edge(needed if len(needed) > 1 else needed[0] if needed else START, name)
            if not self.graph.out_degree(action):
                builder.add_edge(name, END)
        return builder.compile()

    def _langgraph_node(self, action: Action) -> Callable[[GraphState], Any]:
        handler, ancestors = self.handlers[action], self.ancestors[action]

        def seen(state: GraphState) -> dict[Action, Any]:
            return {before: state["outputs"][before] for before in ancestors}

        if inspect.iscoroutinefunction(handler):

            async def anode(state: GraphState) -> dict[str, Any]:
                return {"outputs": {action: await handler(state["inputs"], seen(state))}}

            return anode

        def node(state: GraphState) -> dict[str, Any]:
            return {"outputs": {action: handler(state["inputs"], seen(state))}}

        return node


class GraphState(TypedDict):
    """The state that a LangGraph export carries; parallel nodes' outputs are merged."""

    inputs: dict[str, Any]
    outputs: Annotated[dict[Any, Any], operator.or_]


class _Run:
    """One run: who waits for how many, and who is at work."""

    def __init__(self, compiled: CompiledGraph, inputs: dict[str, Any], max_workers: int) -> None:
        self.compiled, self.inputs, self.max_workers = compiled, inputs, max_workers
        self.execution = Execution()
        self.waiting = {action: compiled.graph.in_degree(action) for action in compiled.graph}
        self.ready = [action for action, count in self.waiting.items() if count == 0]
        self.running: dict[asyncio.Task[Any], Action] = {}
        self.loop = asyncio.get_running_loop()
        self.origin = self.loop.time()

    async def finish(self) -> Execution:
        pool = ThreadPoolExecutor(self.max_workers)  # starts no thread before it is used
        try:
            while self.ready or self.running:
                while self.ready and len(self.running) < self.max_workers:
                    self._start(self.ready.pop(0), pool)
                ended, _ = await asyncio.wait(self.running, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(ended, key=list(self.running).index):
                    self._settle(self.running.pop(task), task)
        finally:
            for task in self.running:
                task.cancel()
            pool.shutdown(wait=False, cancel_futures=True)
        order = self.compiled.graph
        self.execution.status = {action: self.execution.status[action] for action in order}
        return self.execution

    def _start(self, action: Action, pool: ThreadPoolExecutor) -> None:
        self.execution.started[action] = self.loop.time() - self.origin
        seen = {before: self.execution.outputs[before] for before in self.compiled.ancestors[action]}
        self.running[self.loop.create_task(self._call(self.compiled.handlers[action], seen, pool))] = action

    async def _call(self, handler: Handler, seen: dict[Action, Any], pool: ThreadPoolExecutor) -> Any:
        if inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(type(handler).__call__):
            return await handler(self.inputs, seen)
        found = await self.loop.run_in_executor(pool, _called, handler, self.inputs, seen)
        return await found if inspect.isawaitable(found) else found

    def _settle(self, action: Action, task: asyncio.Task[Any]) -> None:
        now = self.loop.time() - self.origin
        self.execution.ended[action] = now
        error = asyncio.CancelledError("the handler was cancelled") if task.cancelled() else task.exception()
        if error is None:
            self.execution.status[action] = "done"
            self.execution.outputs[action] = task.result()
            for after in self.compiled.graph.successors(action):
                self.waiting[after] -= 1
                if self.waiting[after] == 0 and after not in self.execution.status:
                    self.ready.append(after)
            return
        if not isinstance(error, (Exception, asyncio.CancelledError)):
            raise error  # KeyboardInterrupt and SystemExit end the run
        self.execution.status[action] = "failed"
        self.execution.errors[action] = error if isinstance(error, Exception) else RuntimeError(str(error))
        for after in self.compiled.descendants[action]:
            self.execution.status[after] = "cancelled"


def ended(work: Callable[[], Any]) -> Any:
    """``work()``, which starts an event loop; on a thread of its own where one runs already, as a thread has one at most."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def _called(handler: Handler, inputs: Mapping[str, Any], seen: Mapping[Action, Any]) -> Any:
    try:
        return handler(inputs, seen)
    except StopIteration as error:  # a future cannot carry it, and would never be done
        raise RuntimeError("the handler raised StopIteration") from error


async def _fall_back(execution: Execution, fallback: Fallback) -> None:
    answer: Mapping[Action, Any] | Awaitable[Mapping[Action, Any]] = fallback(execution)
    found = await answer if inspect.isawaitable(answer) else answer
    assert execution.remaining is not None
    stray = [action for action in found or {} if action not in execution.remaining]
    if stray:
        raise ValueError(f"the fallback answered for {stray[0]!r}, which did not remain")
    for action, output in (found or {}).items():
        execution.outputs[action] = output
        execution.status[action] = "done"
    left = [action for action, state in execution.status.items() if state != "done"]
    execution.remaining = execution.remaining.subgraph(left).copy()
