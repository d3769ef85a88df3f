"""What one trial of the study measures: ranks, tests, graphs, shifts, and what graphs say about rows they have not seen."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import networkx as nx
import numpy as np

from cameraready.causal._graphs import (
    clusters,
    latent_nodes,
    match_latents,
    observed_projection,
    separation_number,
    skeleton_score,
)
from cameraready.causal.latent_structure import rivals
from cameraready.causal.latent_structure.domains import summarise
from cameraready.causal.latent_structure.estimator import LatentStructure
from cameraready.causal.latent_structure.orientation import acyclic_extension
from cameraready.causal.latent_structure.rank_test import RankTest
from cameraready.causal.latent_structure.shifts import MultiGroupModel, find_shifts
from cameraready.causal.latent_structure.workloads import (
    Data,
    Factor,
    Questionnaire,
    RandomGraphs,
    Structures,
    Windows,
)
from cameraready.evidence import Context, interleave

Finder = Callable[[np.ndarray, tuple[str, ...], np.ndarray], nx.DiGraph]

# --- arms -----------------------------------------------------------------------------------------------------------
# Every arm is called as find(values, names, labels) and returns a networkx.DiGraph whose latent nodes are marked.


def ours(**options: Any) -> Finder:
    def find(values: np.ndarray, names: tuple[str, ...], labels: np.ndarray) -> nx.DiGraph:
        import pandas as pd

        return LatentStructure(shifts=False, **options).fit(pd.DataFrame(values, columns=names), domain=labels).graph_

    return find


def first_domain(find: Finder) -> Finder:
    """The same on the rows of one domain."""

    def found(values: np.ndarray, names: tuple[str, ...], labels: np.ndarray) -> nx.DiGraph:
        chosen = labels == labels[0]
        return find(values[chosen], names, labels[chosen])

    return found


def without_labels(find: Callable[..., nx.DiGraph]) -> Finder:
    return lambda values, names, labels: find(values, names)


def rlcd_with_our_test(values: np.ndarray, names: tuple[str, ...], labels: np.ndarray) -> nx.DiGraph:
    return rivals.rlcd(values, names, test=RankTest(values, labels))


FINDERS: dict[str, Finder] = {
    "sum": ours(),
    "close": ours(close_fit=0.05),
    "pooled": ours(method="pooled"),
    "single": first_domain(ours()),
    "rlcd": without_labels(rivals.rlcd),
    "rlcd-single": first_domain(without_labels(rivals.rlcd)),
    "rlcd-sum": rlcd_with_our_test,
    "fci": without_labels(rivals.fci),
    "gin": without_labels(rivals.gin),
    "factor-analysis": without_labels(rivals.factor_analysis),
}

# --- trials ---------------------------------------------------------------------------------------------------------


def trial(workload: Any, ctx: Context, *, part: str, **condition: Any) -> list[dict[str, Any]]:
    parts: dict[str, Callable[..., list[dict[str, Any]]]] = {
        "constraints": constraints,
        "size": size,
        "power": power,
        "graph": graph,
        "shifts": shifts,
        "rows": rows,
        "speed": speed,
    }
    return parts[part](workload, ctx, **condition)


def constraints(workload: RandomGraphs, ctx: Context, *, graphs: int) -> list[dict[str, Any]]:
    """Ranks of the population covariance in each of three domains against the t-separation number, over 60 pairs of sets."""
    rng = np.random.default_rng([ctx.seed, 2])
    found = []
    for _ in range(graphs):
        truth, family = workload.draw(rng)
        names, mismatches = family[0].names, 0
        covariances = [member.covariance() for member in family]
        for _ in range(60):
            a, b = (rng.choice(len(names), rng.integers(1, len(names)), replace=False) for _ in range(2))
            expected = separation_number(truth, [names[i] for i in a], [names[i] for i in b])
            ranks = [np.linalg.matrix_rank(c[np.ix_(a, b)], tol=1e-9 * np.abs(c).max()) for c in covariances]
            mismatches += sum(int(rank) != expected for rank in ranks)
        found.append({"arm": "sum", "mismatches": mismatches, "n_variables": len(names)})
    return found


def rank_pvalues(ctx: Context, values: np.ndarray, labels: np.ndarray, single: bool) -> dict[str, float]:
    """P-values of rank one between columns 0, 1 and 2, 3, by arm."""
    a, b = (0, 1), (2, 3)
    together = RankTest(values, labels)

    def alone(label: int) -> float:
        return RankTest(values[labels == label]).pvalue(a, b, 1)

    n_domains = int(labels[-1]) + 1
    arms: dict[str, Callable[[], float]] = {
        "sum": lambda: together.pvalue(a, b, 1),
        "pooled": lambda: RankTest.from_domains(together.domains, "pooled").pvalue(a, b, 1),
    }
    if single:
        arms["fisher"] = lambda: RankTest.from_domains(together.domains, "fisher").pvalue(a, b, 1)
        arms["single"] = lambda: alone(0)
        arms["best-single"] = lambda: min(1.0, n_domains * min(alone(label) for label in range(n_domains)))
        arms["classical"] = lambda: rivals.classical_pvalue(values, a, b, 1)
    return {name: arm() for name, arm in arms.items() if name not in ctx.without}


def size(workload: Windows, ctx: Context, *, length: int, replicates: int) -> list[dict[str, Any]]:
    """Share of true ranks rejected at 5 %."""
    rng = np.random.default_rng([ctx.seed, length, 3])
    draws = [rank_pvalues(ctx, *workload.draw(rng, length), single=False) for _ in range(replicates)]
    return [{"arm": arm, "rejected": float(np.mean([d[arm] <= 0.05 for d in draws]))} for arm in draws[0]]


def power(workload: Windows, ctx: Context, *, length: int, replicates: int) -> list[dict[str, Any]]:
    """Share of false ranks rejected at 5 %, and how well p-values tell false from true ranks (area under the curve)."""
    rng = np.random.default_rng([ctx.seed, length, 4])
    true = [rank_pvalues(ctx, *workload.draw(rng, length), single=True) for _ in range(replicates)]
    false = [rank_pvalues(ctx, *workload.draw(rng, length, second=0.5), single=True) for _ in range(replicates)]
    found = []
    for arm in true[0]:
        null, other = (np.array([draw[arm] for draw in draws]) for draws in (true, false))
        below_null = (other[:, None] < null).mean() + 0.5 * (other[:, None] == null).mean()
        found.append({"arm": arm, "power": float((other <= 0.05).mean()), "told_apart": float(below_null)})
    return found


def graph(workload: Structures, ctx: Context, *, change: Any, arm: str) -> list[dict[str, Any]]:
    """The found graph against the true one: F1 of adjacencies, latents matched, and that of the observed variables' projection."""
    data, truth = workload.draw(ctx.seed, change)
    found, seconds = _found(ctx, arm, data)
    matched = match_latents(found, truth)
    f1 = skeleton_score(matched, truth).f1
    projected = skeleton_score(observed_projection(matched), observed_projection(truth)).f1
    extra = abs(len(latent_nodes(found)) - len(latent_nodes(truth)))
    return [{"f1": f1, "loss": 1 - f1, "projected_f1": projected, "latents_off": extra, "seconds": seconds}]


def _found(ctx: Context, arm: str, data: Data) -> tuple[nx.DiGraph, float]:
    started = time.perf_counter()
    found = ctx.select(FINDERS)[arm](data.values, data.names, data.labels)
    seconds = time.perf_counter() - started
    if not isinstance(found, nx.DiGraph) or not set(data.names) <= set(found):
        raise ValueError(f"{arm} must return a networkx.DiGraph with a node for each of the {len(data.names)} columns")
    return found, seconds


def shifts(workload: Factor, ctx: Context, *, n_domains: int, n_changed: int, arm: str) -> list[dict[str, Any]]:
    """The indicators found to change against those that did; 200 rows a domain, and the true graph for everybody."""
    import pandas as pd

    data, truth, changed = workload.draw(ctx.seed, n_domains, 200, n_changed)

    def by_likelihood() -> set[str]:
        table = find_shifts(truth, summarise(pd.DataFrame(data.values, columns=data.names), data.labels))
        return set(table.loc[table["shifted"] & ~table["latent"], "variable"])

    arms = {
        "sum": by_likelihood,
        "equal-variances": lambda: rivals.unequal_variances(data.values, data.names, data.labels),
    }
    found = arms[arm]()
    f1 = 2 * len(found & changed) / (len(found) + len(changed)) if found or changed else 1.0
    return [{"exact": float(found == changed), "shift_f1": f1}]


def rows(workload: Questionnaire, ctx: Context, *, arm: str) -> list[dict[str, Any]]:
    """A graph from half of the rows: agreement with the scales, and how well it predicts the other half's covariances."""
    data = workload.data
    rng = np.random.default_rng([ctx.seed, 5])
    half = np.zeros(len(data.values), dtype=bool)
    for label in np.unique(data.labels):
        mine = np.flatnonzero(data.labels == label)
        half[rng.permutation(mine)[: len(mine) // 2]] = True
    found, seconds = _found(ctx, arm, Data(data.values[half], data.names, data.labels[half]))
    row = {"loss": held_out_loss(found, data, half), "latents": len(latent_nodes(found)), "seconds": seconds}
    if workload.scales:
        row["agreement"] = agreement(found, workload)
    return [row]


def agreement(found: nx.DiGraph, workload: Questionnaire) -> float:
    """Adjusted Rand index of columns grouped by their latent parents and of the published scales; without parents, alone."""
    from sklearn.metrics import adjusted_rand_score

    parents = clusters(found)
    groups = [str(sorted(parents[name])) if parents[name] else name for name in workload.data.names]
    return float(adjusted_rand_score([workload.scales[name] for name in workload.data.names], groups))


def held_out_loss(found: nx.DiGraph, data: Data, half: np.ndarray) -> float:
    """Negative Gaussian log-likelihood a column of the rows outside `half`, mechanisms fitted to each domain inside it."""
    import pandas as pd

    table = pd.DataFrame(data.values, columns=data.names)
    train, test = (summarise(table[chosen], data.labels[chosen]) for chosen in (half, ~half))
    model = MultiGroupModel(acyclic_extension(found), train)
    fit = model.fit(range(len(model.nodes)), model.fit(()))
    p = len(data.names)
    total = np.linalg.inv(np.eye(len(model.nodes)) - fit.coefficients)
    implied = ((total.swapaxes(-1, -2) * fit.variances[:, None, :]) @ total)[:, :p, :p]
    scale = test.scales / train.scales
    held_out = test.covariances * scale[:, None] * scale
    terms = np.linalg.slogdet(implied)[1] + np.einsum("cii->c", np.linalg.solve(implied, held_out))
    return float((test.rows * terms).sum() / test.rows.sum() / (2 * p))


def speed(workload: Structures, ctx: Context) -> list[dict[str, Any]]:
    """Seconds of our search and of causal-learn's on the same rows, in turn, one thread each."""
    data, _ = workload.draw(ctx.seed, "none")
    chosen = {name: FINDERS[name] for name in ("sum", "rlcd") if name not in ctx.without}
    calls = {name: (lambda find=find: find(data.values, data.names, data.labels)) for name, find in chosen.items()}
    return interleave(calls, warmup=1, repeats=3)


def ready(workload: Any) -> LatentStructure:
    """The estimator, fitted where the workload has rows of its own."""
    if not isinstance(workload, Questionnaire):
        return LatentStructure()
    import pandas as pd

    data = workload.data
    return LatentStructure().fit(pd.DataFrame(data.values, columns=data.names), domain=data.labels)
