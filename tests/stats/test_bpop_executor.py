"""The executor: order, what handlers see, what runs at once, what a failure stops; and the same through LangGraph."""

import asyncio
import threading

import networkx as nx
import pytest

from cameraready.stats.bpop import PartialOrderModel, compile
from cameraready.stats.bpop.executor import ended

DIAMOND = nx.DiGraph([("a", "b"), ("a", "c"), ("b", "d"), ("c", "d"), ("e", "f")])


def named(action):
    return lambda inputs, outputs: f"{action}({', '.join(outputs[x] for x in sorted(outputs))})"


def handlers_for(graph, **special):
    return {action: special.get(action, named(action)) for action in graph}


def test_handlers_see_the_outputs_of_their_ancestors_and_no_others():
    seen = {}

    def note(action):
        def handler(inputs, outputs):
            seen[action] = set(outputs)
            return inputs["x"]

        return handler

    execution = compile(DIAMOND, {action: note(action) for action in DIAMOND}).run({"x": 7})
    assert execution.ok
    assert seen == {"a": set(), "b": {"a"}, "c": {"a"}, "d": {"a", "b", "c"}, "e": set(), "f": {"e"}}
    assert set(execution.outputs.values()) == {7}
    assert execution.remaining.number_of_nodes() == 0


def test_no_action_starts_before_its_predecessors_are_done():
    async def pause(inputs, outputs):
        await asyncio.sleep(0.001)

    execution = compile(DIAMOND, dict.fromkeys(DIAMOND, pause)).run()
    for before, after in DIAMOND.edges:
        assert execution.ended[before] <= execution.started[after]
    assert execution.makespan == max(execution.ended.values())


def test_free_actions_run_at_the_same_time_on_the_loop_and_on_threads():
    """Two actions that wait for each other only end if both are running."""
    barrier = threading.Barrier(2)
    graph = nx.DiGraph()
    graph.add_nodes_from("xy")
    execution = compile(graph, dict.fromkeys("xy", lambda inputs, outputs: barrier.wait(timeout=20))).run()
    assert execution.ok

    async def both():
        meeting = {"x": asyncio.Event(), "y": asyncio.Event()}

        def meet(me, other):
            async def handler(inputs, outputs):
                meeting[me].set()
                await asyncio.wait_for(meeting[other].wait(), timeout=20)

            return handler

        return await compile(graph, {"x": meet("x", "y"), "y": meet("y", "x")}).arun()

    assert ended(lambda: asyncio.run(both())).ok


def test_max_workers_is_kept():
    at_work, most = 0, 0

    async def handler(inputs, outputs):
        nonlocal at_work, most
        at_work += 1
        most = max(most, at_work)
        await asyncio.sleep(0.001)
        at_work -= 1

    graph = nx.DiGraph()
    graph.add_nodes_from(range(6))
    compiled = compile(graph, dict.fromkeys(range(6), handler))
    assert compiled.run(max_workers=2).ok
    assert most == 2
    with pytest.raises(ValueError, match="max_workers"):
        compiled.run(max_workers=0)


def test_a_failure_cancels_descendants_and_nothing_else():
    def broken(inputs, outputs):
        raise OSError("no disk")

    execution = compile(DIAMOND, handlers_for(DIAMOND, b=broken)).run()
    assert execution.status == {
        "a": "done",
        "b": "failed",
        "c": "done",
        "d": "cancelled",
        "e": "done",
        "f": "done",
    }
    assert not execution.ok
    assert str(execution.errors["b"]) == "no disk"
    assert "d" not in execution.started
    assert list(execution.remaining.edges) == [("b", "d")]
    assert execution.outputs["f"] == "f(e())"


def test_a_fallback_is_asked_once_and_may_answer():
    asked = []

    def broken(inputs, outputs):
        raise OSError

    async def planner(execution):
        asked.append(set(execution.remaining))
        return {"b": "by hand"}

    execution = compile(DIAMOND, handlers_for(DIAMOND, b=broken)).run(fallback=planner)
    assert asked == [{"b", "d"}]
    assert execution.fell_back
    assert execution.outputs["b"] == "by hand"
    assert execution.status["b"] == "done"
    assert set(execution.remaining) == {"d"}
    untouched = compile(DIAMOND, handlers_for(DIAMOND)).run(fallback=planner)
    assert not untouched.fell_back
    with pytest.raises(ValueError, match="did not remain"):
        compile(DIAMOND, handlers_for(DIAMOND, b=broken)).run(fallback=lambda execution: {"a": 1})


def test_cancelling_a_run_cancels_its_handlers():
    stopped = []

    async def forever(inputs, outputs):
        try:
            await asyncio.sleep(3600)
        finally:
            stopped.append(True)

    async def main():
        graph = nx.DiGraph()
        graph.add_node("a")
        task = asyncio.create_task(compile(graph, {"a": forever}).arun())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)

    ended(lambda: asyncio.run(main()))
    assert stopped == [True]


def test_callable_objects_and_functions_that_return_coroutines_are_awaited():
    class Handler:
        async def __call__(self, inputs, outputs):
            return 1

    async def later():
        return 2

    graph = nx.DiGraph([("a", "b")])
    execution = compile(graph, {"a": Handler(), "b": lambda inputs, outputs: later()}).run()
    assert execution.outputs == {"a": 1, "b": 2}


def test_an_empty_graph_is_done_at_once():
    execution = compile(nx.DiGraph(), {}).run()
    assert execution.ok
    assert execution.makespan == 0


@pytest.mark.parametrize(
    ("graph", "handlers", "error", "words"),
    [
        (nx.DiGraph([("a", "b"), ("b", "a")]), handlers_for("ab"), ValueError, "cycle"),
        (nx.DiGraph([("a", "b")]), handlers_for("a"), ValueError, "no handler: b"),
        (nx.DiGraph([("a", "b")]), handlers_for("abc"), ValueError, "no action of the graph: c"),
        (nx.DiGraph([("a", "b")]), {"a": 1, "b": 2}, TypeError, "cannot be called"),
        (nx.Graph([("a", "b")]), handlers_for("ab"), TypeError, "DiGraph"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_runs(graph, handlers, error, words):
    with pytest.raises(error, match=words):
        compile(graph, handlers)


def test_langgraph_gives_the_same_outputs():
    handlers = handlers_for(DIAMOND)
    compiled = compile(DIAMOND, handlers)
    state = compiled.to_langgraph().invoke({"inputs": {}, "outputs": {}})
    assert state["outputs"] == compiled.run().outputs
    assert state["outputs"]["d"] == "d(a(), b(a()), c(a()))"


def test_langgraph_takes_coroutines_and_refuses_equal_names():
    async def handler(inputs, outputs):
        return inputs["x"] + sum(outputs.values())

    graph = nx.DiGraph([(1, 2), (1, 3)])
    exported = compile(graph, dict.fromkeys(graph, handler)).to_langgraph()
    state = ended(lambda: asyncio.run(exported.ainvoke({"inputs": {"x": 1}, "outputs": {}})))
    assert state["outputs"] == {1: 1, 2: 2, 3: 2}
    twins = nx.DiGraph([(1, "1")])
    with pytest.raises(ValueError, match="same text"):
        compile(twins, dict.fromkeys(twins, handler)).to_langgraph()


def test_an_inferred_graph_runs():
    traces = [["vpc", "subnet", "rule", "server"], ["vpc", "rule", "subnet", "server"]] * 4
    graph = PartialOrderModel(n_iter=8_000, seed=0).fit(traces).graph()
    execution = compile(graph, handlers_for(graph)).run()
    assert execution.outputs["server"] == "server(rule(vpc()), subnet(vpc()), vpc())"


def test_it_runs_where_an_event_loop_runs_already():
    async def notebook():
        return compile(nx.DiGraph([("a", "b")]), dict.fromkeys("ab", lambda inputs, done: len(done))).run()

    assert ended(lambda: asyncio.run(notebook())).outputs == {"a": 0, "b": 1}
