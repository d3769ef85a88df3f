"""What the study tries BPOP on: dependency graphs of procedures, and traces drawn from them in several ways."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cameraready.evidence import Spec
from cameraready.evidence.specs import load_object
from cameraready.stats.bpop import LatentPrior, posets
from cameraready.stats.bpop.traces import checked_traces, read_traces

#: Six ways to set up something in a cloud: what has to exist before what. The first is a scenario of Cloud-IaC-6, the
#: others are ours, of the same kind and size.
CLOUD: dict[str, list[tuple[str, str]]] = {
    "load-balancer": [
        ("network", "subnet"), ("network", "group"), ("group", "rule"), ("subnet", "server"), ("rule", "server"),
        ("subnet", "balancer"), ("server", "backend"), ("balancer", "backend"), ("balancer", "bind"), ("address", "bind"),
    ],
    "database": [
        ("network", "subnet"), ("network", "group"), ("subnet", "instance"), ("instance", "schema"),
        ("instance", "account"), ("schema", "grant"), ("account", "grant"), ("subnet", "server"), ("group", "server"),
    ],
    "cache": [
        ("network", "subnet"), ("subnet", "cache"), ("cache", "allow-list"), ("network", "group"), ("group", "rule"),
        ("subnet", "server"), ("rule", "server"), ("server", "configure"), ("allow-list", "configure"),
    ],
    "gateway": [
        ("network", "subnet"), ("network", "gateway"), ("gateway", "bind"), ("address", "bind"), ("bind", "translate"),
        ("subnet", "translate"), ("network", "group"), ("subnet", "server"), ("group", "server"),
    ],
    "monitoring": [
        ("network", "subnet"), ("subnet", "server"), ("server", "agent"), ("agent", "alarm"), ("contact", "team"),
        ("team", "alarm"), ("server", "disk"), ("policy", "snapshot"), ("disk", "snapshot"),
    ],
    "scaling": [
        ("network", "subnet"), ("network", "group"), ("subnet", "balancer"), ("balancer", "fleet"), ("group", "template"),
        ("image", "template"), ("fleet", "rule"), ("template", "enable"), ("fleet", "enable"), ("rule", "alarm"),
    ],
}  # fmt: skip
RECIPES = {"srasearch": "SrasearchRecipe", "epigenomics": "EpigenomicsRecipe", "montage": "MontageRecipe"}
#: Fewest and most tasks asked of a recipe.
TASKS = {"srasearch": (24, 30), "epigenomics": (43, 50), "montage": (60, 70)}
N_GENERATED = 12
#: Traces are added until the wanted pairs were seen in both orders, up to this many.
MAX_TRACES = 200


@dataclass(frozen=True)
class Workload:
    """Partial orders to be found again, one an instance; or a user's own traces.

    Attributes
    ----------
    name : str
    order : callable
        ``order(instance, prepared)`` -> the true closed order, bool (n, n), its actions in shuffled places.
    traces : list of tuples, optional
        A user's own, of which nothing else is known.
    """

    name: str
    order: Callable[[int, Mapping[str, Any]], np.ndarray] | None
    traces: list[tuple[Any, ...]] | None = None


def open_workload(spec: Spec) -> Workload:
    """A shipped workload by name, or the user's traces (see `read_traces`)."""
    if spec.kind in ("object", "value"):
        found = spec.value if spec.kind == "value" else load_object(spec.name)
        traces = checked_traces(read_traces(found() if callable(found) else found), "number")
        if len(traces) < 4:
            raise ValueError(f"half of the traces are held out, so there must be at least 4, got {len(traces)}")
        return Workload("own", None, traces)
    if spec.name == "cloud-iac":
        return Workload(spec.name, cloud_order)
    if spec.name in RECIPES:
        return Workload(spec.name, recipe_order)
    if spec.name.startswith("synthetic-k"):
        return Workload(spec.name, synthetic_order(5, int(spec.name.removeprefix("synthetic-k"))))
    return {"small": Workload("small", small_order), "latent": Workload("latent", latent_order)}[spec.name]


def cloud_order(instance: int, prepared: Mapping[str, Any]) -> np.ndarray:
    """One of the six scenarios, in turn."""
    edges = list(CLOUD.values())[instance % len(CLOUD)]
    names = sorted({action for edge in edges for action in edge})
    relation = np.zeros((len(names), len(names)), dtype=bool)
    for before, after in edges:
        relation[names.index(before), names.index(after)] = True
    return shuffled(posets.closure(relation), instance)


def synthetic_order(n: int, dimension: int) -> Callable[[int, Mapping[str, Any]], np.ndarray]:
    """Orders of the model's own prior in a given number of dimensions."""

    def order(instance: int, prepared: Mapping[str, Any]) -> np.ndarray:
        return LatentPrior(dimension=dimension).draw(n, 1, np.random.default_rng([instance, dimension]))[0]

    return order


def latent_order(instance: int, prepared: Mapping[str, Any]) -> np.ndarray:
    """Orders of 6 to 12 actions in two or three dimensions."""
    return synthetic_order(6 + instance % 7, 2 + instance % 2)(instance, prepared)


def small_order(instance: int, prepared: Mapping[str, Any]) -> np.ndarray:
    """Orders of 2 to 5 actions, small enough for enumeration."""
    return synthetic_order(2 + instance % 4, 2 + instance % 2)(instance, prepared)


def recipe_order(instance: int, prepared: Mapping[str, Any]) -> np.ndarray:
    """A workflow that WfCommons generated from a recipe (see the study's `prepare`)."""
    n = int(prepared["sizes"][instance])
    return shuffled(posets.closure(prepared["relations"][instance, :n, :n]), instance)


def shuffled(order: np.ndarray, seed: int) -> np.ndarray:
    """The same order with its actions in other places, so that no place tells anything."""
    places = np.random.default_rng([seed, 0x5411]).permutation(len(order))
    return order[np.ix_(places, places)]


# --- traces ---------------------------------------------------------------------------------------------------------

#: How a trace is drawn from an order. The model's own law has the settings of the paper's padding.
DRAWS: dict[str, Callable[[np.ndarray, np.random.Generator], list[int]]] = {
    "model": lambda order, generator: posets.frontier_walk(order, generator, beta=1.0, eps=0.01),
    "model-noisy": lambda order, generator: posets.frontier_walk(order, generator, beta=1.0, eps=0.05),
    "kahn": posets.frontier_walk,
    "extensions": posets.uniform_extension,
}


def draw_traces(
    order: np.ndarray, *, draw: str, coverage: float, noise: float, n_traces: int, padded: bool, seed: Sequence[int]
) -> list[list[int]]:
    """Traces of a true order as an agent of certain habits would leave them.

    Parameters
    ----------
    draw : str
        Key of `DRAWS`.
    coverage : float
        Share of the free pairs that occur in both orders: the agent has a habit about the others, which are always in
        one order. 1 for an agent without habits.
    noise : float
        Probability of every neighbouring pair of a trace to be exchanged.
    n_traces : int
        Fewest traces; with `padded` more are drawn until all pairs that can were seen in both orders, up to 200.
    """
    generator = np.random.default_rng(seed)
    practised = habit(order, coverage, generator)
    free = posets.incomparable(practised)
    seen = np.zeros(order.shape, dtype=bool)
    traces: list[list[int]] = []
    while len(traces) < n_traces or (padded and len(traces) < MAX_TRACES and (free & ~(seen & seen.T)).any()):
        trace = DRAWS[draw](practised, generator)
        seen |= posets.precedence_counts([trace], len(order)) > 0
        traces.append(exchanged(trace, noise, generator))
    return traces


def habit(order: np.ndarray, coverage: float, generator: np.random.Generator) -> np.ndarray:
    """A closed order that contains `order` and leaves about a share `coverage` of its free pairs free."""
    practised = order.copy()
    free = int(posets.incomparable(order).sum())
    allowed = round(coverage * free)
    rank = np.argsort(posets.uniform_extension(order, generator))
    pairs = np.argwhere(posets.incomparable(order))
    for i, j in generator.permutation(pairs) if len(pairs) else []:
        if posets.incomparable(practised).sum() <= allowed:
            break
        first, second = (i, j) if rank[i] < rank[j] else (j, i)
        grown = practised.copy()
        grown[first, second] = True
        grown = posets.closure(grown)
        if posets.incomparable(grown).sum() >= allowed:
            practised = grown
    return practised


def exchanged(trace: Sequence[int], noise: float, generator: np.random.Generator) -> list[int]:
    """`trace` with neighbours exchanged, each pair with probability `noise`, from the front."""
    changed = list(trace)
    for place in np.flatnonzero(generator.random(max(len(changed) - 1, 0)) < noise):
        changed[place], changed[place + 1] = changed[place + 1], changed[place]
    return changed
