"""What the study compares with: causal-learn's RLCD, GIN, FCI and rank test, factor analysis, and a test of equal variances."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

import networkx as nx
import numpy as np

from cameraready.causal._graphs import from_causallearn
from cameraready.causal.latent_structure.estimator import automatic_level


def rlcd(values: np.ndarray, names: Sequence[str], *, test: Any = None, max_cover: int = 2) -> nx.DiGraph:
    """causal-learn's RLCD (Dong et al., ICLR 2024) at its defaults, but for its ``maxk`` and the level of its tests, which are as ours.

    Parameters
    ----------
    values : float64 array of shape (n, p)
    test : object, optional
        Another rank test in place of its own, such as a `RankTest`.
    """
    from causallearn.search.HiddenCausal.RLCD import RLCD

    safe = [f"X{i + 1}" for i in range(len(names))]
    with _one_quiet_process():
        levels = dict.fromkeys(range(4), automatic_level(len(values)))
        found = RLCD(values, ranktest_method=test, alpha_dict=levels, maxk=max_cover, node_names=safe)
    graph = from_causallearn(found.G)
    for node in graph:  # latents are marked by their name alone
        graph.nodes[node]["latent"] = node not in safe
    return nx.relabel_nodes(graph, _renamed(graph, dict(zip(safe, names, strict=True))))


def gin(values: np.ndarray, names: Sequence[str], *, independence: str = "hsic") -> nx.DiGraph:
    """causal-learn's GIN (Xie et al., 2020): one latent a cluster, non-Gaussian noise; ``"hsic"``, since ``"kci"`` is cubic in rows."""
    from causallearn.search.HiddenCausal.GIN.GIN import GIN

    with _one_quiet_process():
        found, _ = GIN(values, indep_test_method=independence, alpha=automatic_level(len(values)))
    graph = from_causallearn(found)
    return nx.relabel_nodes(graph, _renamed(graph, {f"X{i + 1}": name for i, name in enumerate(names)}))


def fci(values: np.ndarray, names: Sequence[str]) -> nx.DiGraph:
    """causal-learn's FCI with Fisher's z; its graph has no latent nodes, so that only adjacencies can be compared."""
    from causallearn.search.ConstraintBased.FCI import fci as search

    with _one_quiet_process():
        found, _ = search(values, "fisherz", automatic_level(len(values)), show_progress=False)
    graph = from_causallearn(found)
    return nx.relabel_nodes(graph, {f"X{i + 1}": name for i, name in enumerate(names)})


def factor_analysis(values: np.ndarray, names: Sequence[str]) -> nx.DiGraph:
    """Scikit-learn's maximum-likelihood factors with varimax rotation; every column under the factor on which it loads most.

    As many factors as eigenvalues of the correlation matrix above one (Kaiser's rule); all factors are joined.
    """
    from sklearn.decomposition import FactorAnalysis

    standard = (values - values.mean(axis=0)) / values.std(axis=0)
    count = max(int((np.linalg.eigvalsh(np.corrcoef(values.T)) > 1).sum()), 1)
    loadings = FactorAnalysis(count, rotation="varimax" if count > 1 else None).fit(standard).components_
    graph = nx.DiGraph()
    graph.add_nodes_from(names, latent=False)
    graph.add_nodes_from((f"factor {k}" for k in range(count)), latent=True)
    for column, name in enumerate(names):
        graph.add_edge(f"factor {np.abs(loadings[:, column]).argmax()}", name)
    for a, b in combinations(range(count), 2):
        graph.add_edges_from([(f"factor {a}", f"factor {b}"), (f"factor {b}", f"factor {a}")])
    return graph


def classical_pvalue(values: np.ndarray, a: Sequence[int], b: Sequence[int], r: int) -> float:
    """P-value of causal-learn's ``Chi2RankTest`` on all rows together, to 1e-4: it answers yes or no at a level, so by bisection."""
    from causallearn.search.HiddenCausal.RLCD import Chi2RankTest

    test = Chi2RankTest(values)
    low, high = 0.0, 1.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        if test.test(list(a), list(b), r, middle):
            low = middle
        else:
            high = middle
    return high


def unequal_variances(values: np.ndarray, names: Sequence[str], labels: np.ndarray, alpha: float = 0.01) -> set[str]:
    """Columns whose variance differs between domains by Levene's test, with Holm's correction."""
    from scipy.stats import levene
    from statsmodels.stats.multitest import multipletests

    groups = [values[labels == label] for label in np.unique(labels)]
    pvalues = [levene(*(group[:, column] for group in groups)).pvalue for column in range(values.shape[1])]
    rejected = multipletests(pvalues, alpha, method="holm")[0]
    return {name for name, different in zip(names, rejected, strict=True) if different}


def _renamed(graph: nx.DiGraph, observed: dict[str, str]) -> dict[str, str]:
    """Names of columns for theirs; a latent whose name a column has gets another."""
    latents = [node for node in graph if node not in observed]
    taken = set(observed.values())
    return {**observed, **{node: node if node not in taken else f"latent {node}" for node in latents}}


@contextlib.contextmanager
def _one_quiet_process() -> Iterator[None]:
    """RLCD starts a process for each core at every level, and the searches print."""
    before = os.environ.get("LOKY_MAX_CPU_COUNT")
    os.environ["LOKY_MAX_CPU_COUNT"] = "1"
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        if before is None:
            del os.environ["LOKY_MAX_CPU_COUNT"]
        else:
            os.environ["LOKY_MAX_CPU_COUNT"] = before
