"""The side of the study that runs in pm4py's own environment: its miners, and the order of actions that each model says."""

import contextlib
import io
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

with contextlib.redirect_stdout(io.StringIO()):  # it greets on standard output
    import pandas as pd
    import pm4py
    from pm4py.objects.powl.obj import StrictPartialOrder


def mine(name: str, traces: list[list[int]], n: int) -> np.ndarray:
    """Precedence weights (n, n) that the model found in `traces` (lists of int) says; 0 where it says nothing."""
    events = [(str(i), str(action), place) for i, trace in enumerate(traces) for place, action in enumerate(trace)]
    table = pd.DataFrame(events, columns=["case:concept:name", "concept:name", "time:timestamp"])
    table["time:timestamp"] = pd.Timestamp("2026-01-01", tz="UTC") + pd.to_timedelta(
        table["time:timestamp"], unit="min"
    )
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        return {
            "inductive": lambda: of_tree(pm4py.discover_process_tree_inductive(table), n),
            "inductive-noise": lambda: of_tree(pm4py.discover_process_tree_inductive(table, noise_threshold=0.2), n),
            "heuristics": lambda: of_net(pm4py.discover_heuristics_net(table), n),
            "powl": lambda: of_powl(pm4py.discover_powl(table), n),
        }[name]()


def leaves(node: Any) -> list[int]:
    """The actions in a model or a part of it."""
    if not node.children:
        return [int(node.label)] if node.label is not None else []
    return [leaf for child in node.children for leaf in leaves(child)]


def of_tree(tree: Any, n: int) -> np.ndarray:
    """A sequence orders the actions of its parts; parallel, exclusive and repeated parts are not ordered."""
    weight = np.zeros((n, n))
    for node in inner_nodes(tree):
        if str(node.operator) == "->":
            order_parts(weight, node.children, [(i, j) for j in range(len(node.children)) for i in range(j)])
    return weight


def of_powl(model: Any, n: int) -> np.ndarray:
    """A partial order of parts orders their actions."""
    weight = np.zeros((n, n))
    for node in inner_nodes(model):
        if isinstance(node, StrictPartialOrder):
            parts = list(node.children)
            pairs = [
                (i, j) for i in range(len(parts)) for j in range(len(parts)) if node.order.is_edge(parts[i], parts[j])
            ]
            order_parts(weight, parts, pairs)
    return weight


def of_net(net: Any, n: int) -> np.ndarray:
    """The dependency measure of every arc between two different actions that the net keeps."""
    weight = np.zeros((n, n))
    for name, node in net.nodes.items():
        for after in node.output_connections:
            if after.node_name != name:
                weight[int(name), int(after.node_name)] = net.dependency_matrix[name][after.node_name]
    return weight


def inner_nodes(node: Any) -> Iterator[Any]:
    """All nodes that have parts."""
    if node.children:
        yield node
        for child in node.children:
            yield from inner_nodes(child)


def order_parts(weight: np.ndarray, parts: list[Any], pairs: list[tuple[int, int]]) -> None:
    """Note in `weight` that the actions of part i come before those of part j for every pair (i, j)."""
    members = [leaves(part) for part in parts]
    for i, j in pairs:
        weight[np.ix_(members[i], members[j])] = 1.0
