"""`LatentStructure`: the graph over observed and hidden variables, what changes between domains, and how stable each edge is."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import networkx as nx
import numpy as np
from sklearn.base import BaseEstimator, clone

from cameraready.causal._graphs import match_latents, skeleton, to_causallearn
from cameraready.causal.latent_structure.covers import Cover, Ranks
from cameraready.causal.latent_structure.domains import read_matrix, split_rows, summarise
from cameraready.causal.latent_structure.orientation import latent_graph
from cameraready.causal.latent_structure.rank_test import Method, RankTest
from cameraready.causal.latent_structure.search import find_covers

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class LatentCover:
    """Latent variables with the same neighbours: their names, the variables that they drive, and observed coparents."""

    latents: tuple[str, ...]
    children: tuple[str, ...]
    coparents: tuple[str, ...]


def automatic_level(rows: int) -> float:
    """20 over the number of rows, at most 0.05: 0.01 for 2,000 rows; it falls to zero, as consistency of a search by tests asks."""
    return min(0.05, 20.0 / rows)


class LatentStructure(BaseEstimator):
    """Causal graph over observed variables and the hidden ones behind them, from data that may differ between domains.

    Finds linear models in which groups of observed variables have hidden common causes, which may cause one another, be hierarchical
    and have observed causes and effects. All that must be common to the domains is the graph: coefficients, noise and means may
    change. Every decision is a `RankTest`. After Dong et al. (2026, OpenReview NpreoXT7O7), with the search of their RLCD (ICLR
    2024) rebuilt; see the notes of the method for what differs.

    Use it for questionnaires, sensors or genes measured in several groups, sites or periods. Not for non-linear relations, for
    discrete variables with two or three values, or with fewer than about 8 rows a column in the typical domain. A latent is found
    only if enough variables hang on it: of a cover of k latents, at least k + 1 children and k + 1 further neighbours.

    Parameters
    ----------
    max_cover : int, default 2
        Largest number of parents of one group, latent and observed, that is searched for; the cost grows with its power.
    alpha : float or "auto", default "auto"
        Level of every rank test. A structure is what is *not* rejected, so that with few rows nearly everything fits; ``"auto"`` falls
        with the number of rows, see `automatic_level`.
    method : {"sum", "pooled", "fisher"}, default "sum"
        How domains are combined, see `RankTest`.
    windows : int or "auto", default "auto"
        Rows of a window where `fit` gets `time`.
    missing : {"error", "drop"}, default "error"
        What happens to rows with missing values.
    close_fit : float, default 0
        0 tests exact constraints; 0.05 asks only that they nearly hold, see `RankTest`. Try it where thousands of rows of
        questionnaire data leave hardly a latent.
    shifts : bool, default True
        Whether to look for the mechanisms that change between domains.

    Attributes
    ----------
    graph_ : networkx.DiGraph
        Nodes carry ``latent``; a pair of opposite edges is one whose direction the data do not determine. Between a latent and an
        observed child the latent is drawn as the cause, as in a measurement model.
    covers_ : list of LatentCover
    shifts_ : pandas.DataFrame or None
        One row a variable: ``variable``, ``statistic``, ``df``, ``pvalue`` (of its mechanism being the same in all domains, given
        the other shifts), ``pvalue_holm``, ``shifted``. None for a single domain, or with ``shifts=False``.
    alpha_ : float
        The level used.
    rank_test_ : RankTest
    n_tests_ : int
    n_features_in_, feature_names_in_

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> cause = rng.normal(size=(900, 1))
    >>> X = cause * rng.uniform(1, 2, 4) + rng.normal(size=(900, 4))
    >>> LatentStructure().fit(X).covers_[0].children
    ('x1', 'x2', 'x3', 'x4')
    """

    def __init__(
        self,
        max_cover: int = 2,
        *,
        alpha: float | Literal["auto"] = "auto",
        method: Method = "sum",
        windows: int | Literal["auto"] = "auto",
        missing: Literal["error", "drop"] = "error",
        close_fit: float = 0.0,
        shifts: bool = True,
    ) -> None:
        self.max_cover = max_cover
        self.alpha = alpha
        self.method = method
        self.windows = windows
        self.missing = missing
        self.close_fit = close_fit
        self.shifts = shifts

    def fit(self, X: Any, y: Any = None, *, domain: Any = None, time: Any = None) -> LatentStructure:
        """Find the graph.

        Parameters
        ----------
        X : array or data frame of shape (n, p)
        y : ignored
        domain, time : array-like of shape (n,), optional
            Group, site or period of each row; or its time, along which the rows are cut into windows.

        Raises
        ------
        ValueError
            As `RankTest`, and for parameters out of range.
        """
        self._check_parameters()
        domains = summarise(X, domain, time, self.windows, self.missing)
        self._forget()
        test = RankTest.from_domains(domains, self.method, self.close_fit)
        self._search(test, automatic_level(int(domains.rows.sum())) if self.alpha == "auto" else float(self.alpha))
        self.rank_test_ = test
        if hasattr(X, "columns"):
            self.feature_names_in_ = np.array(test.names, dtype=object)
        self.shifts_ = self._find_shifts() if self.shifts and len(domains.rows) > 1 else None
        return self

    def fit_ranks(self, ranks: Ranks) -> LatentStructure:
        """Find the graph from any source of ranks, such as an `OracleRank`; `shifts_` and stability need data."""
        self._check_parameters()
        self._forget()
        self._search(ranks, 0.01 if self.alpha == "auto" else float(self.alpha))
        return self

    def _forget(self) -> None:
        """Drop what an earlier fit to other columns left."""
        for name in ("feature_names_in_", "rank_test_"):
            self.__dict__.pop(name, None)

    def to_causallearn(self) -> Any:
        """`graph_` as causal-learn's ``GeneralGraph``."""
        return to_causallearn(self.graph_)

    def edge_stability(
        self,
        X: Any,
        *,
        domain: Any = None,
        time: Any = None,
        n_resamples: int = 50,
        resample: Literal["half", "bootstrap"] = "half",
        seed: int = 0,
    ) -> pd.DataFrame:
        """Refit the search on resampled rows and count how often each edge of the graph, and any other, is found.

        Rows are drawn within domains. With `time`, whole windows stay in order and lose or repeat rows.

        Parameters
        ----------
        X, domain, time
            The data that the estimator was fitted to.
        n_resamples : int
        resample : {"half", "bootstrap"}
            ``"half"`` draws half of the rows without replacement (Meinshausen and Bühlmann, 2010): tests keep their level, so that true
            constraints survive, with the power of half the rows. ``"bootstrap"`` draws as many rows as there are with replacement: the
            resampled covariance has full rank even where the true one has not, so that frequencies of true edges come out too low.
        seed : int

        Returns
        -------
        pandas.DataFrame
            ``source``, ``target``, ``directed`` and ``in_graph`` of the graph's edges and of every other one that was found,
            ``frequency`` of the adjacency and ``standard_error`` over resamples; sorted by these. Latents are matched by what they drive;
            latents of a resample without a partner are left out.
        """
        return _edge_stability(self, X, domain=domain, time=time, n_resamples=n_resamples, resample=resample, seed=seed)

    def _search(self, ranks: Ranks, alpha: float) -> None:
        columns = list(range(len(ranks.names)))
        before = ranks.n_tests
        found = find_covers(ranks, columns, alpha, self.max_cover)
        self.graph_, owner = latent_graph(ranks, found, columns, alpha)
        self.covers_ = _described(self.graph_, owner, ranks.names)
        self.alpha_ = alpha
        self.n_tests_ = ranks.n_tests - before
        self.n_features_in_ = len(columns)
        self.shifts_ = None

    def _find_shifts(self) -> pd.DataFrame:
        from cameraready.causal.latent_structure.shifts import find_shifts

        return find_shifts(self.graph_, self.rank_test_.domains)

    def _check_parameters(self) -> None:
        if isinstance(self.max_cover, bool) or not isinstance(self.max_cover, (int, np.integer)) or self.max_cover < 1:
            raise ValueError(f"max_cover must be an integer of at least 1, got {self.max_cover!r}")
        if self.alpha != "auto" and not (isinstance(self.alpha, (int, float)) and 0 < self.alpha < 1):
            raise ValueError(f"alpha must be 'auto' or lie between 0 and 1, got {self.alpha!r}")


def _described(graph: nx.DiGraph, owner: dict[str, Cover], names: tuple[str, ...]) -> list[LatentCover]:
    label = {id(cover): tuple(name for name in owner if owner[name] is cover) for cover in owner.values()}
    found = {}
    for cover in owner.values():
        children = [
            name
            for child in cover.children
            for name in (label[id(child)] if isinstance(child, Cover) else (names[child],))
        ]
        found[id(cover)] = LatentCover(label[id(cover)], tuple(children), tuple(names[i] for i in cover.coparents))
    return list(found.values())


# --- stability ------------------------------------------------------------------------------------------------------


def _edge_stability(
    estimator: LatentStructure,
    X: Any,
    *,
    domain: Any = None,
    time: Any = None,
    n_resamples: int = 50,
    resample: Literal["half", "bootstrap"] = "half",
    seed: int = 0,
) -> pd.DataFrame:

    import pandas as pd

    if isinstance(n_resamples, bool) or n_resamples < 2:
        raise ValueError(f"n_resamples must be at least 2, got {n_resamples!r}")
    if resample not in ("half", "bootstrap"):
        raise ValueError(f"resample must be 'half' or 'bootstrap', got {resample!r}")
    counts: dict[frozenset[Any], int] = {}
    for graph in _refits(estimator, X, domain, time, n_resamples, resample, seed):
        matched = match_latents(graph, estimator.graph_)
        for pair in skeleton(matched):
            if pair <= set(estimator.graph_):
                counts[pair] = counts.get(pair, 0) + 1
    pairs = skeleton(estimator.graph_) | set(counts)
    rows = [_row(estimator.graph_, pair, counts.get(pair, 0) / n_resamples, n_resamples) for pair in pairs]
    table = pd.DataFrame(rows, columns=["source", "target", "directed", "in_graph", "frequency", "standard_error"])
    return table.sort_values(
        ["in_graph", "frequency", "source", "target"], ascending=[False, False, True, True], ignore_index=True
    )


def _row(graph: nx.DiGraph, pair: frozenset[Any], frequency: float, n: int) -> dict[str, Any]:
    source, target = sorted(pair)
    if graph.has_edge(target, source) and not graph.has_edge(source, target):
        source, target = target, source
    there = graph.has_edge(source, target)
    return {
        "source": source,
        "target": target,
        "directed": there and not graph.has_edge(target, source),
        "in_graph": there,
        "frequency": frequency,
        "standard_error": float(np.sqrt(frequency * (1 - frequency) / n)),
    }


def _refits(
    estimator: LatentStructure, X: Any, domain: Any, time: Any, n_resamples: int, resample: str, seed: int
) -> Iterator[nx.DiGraph]:
    values, names, kept = read_matrix(X, estimator.missing)
    if list(names) != list(estimator.rank_test_.names):
        raise ValueError("the columns are not those that the estimator was fitted to")
    groups, timed = split_rows(len(values), domain, time, kept)
    generator = np.random.default_rng(seed)
    for _ in range(n_resamples):
        drawn, labels = [], []
        for place, (_, rows) in enumerate(groups):
            take = len(rows) if resample == "bootstrap" else max(len(rows) // 2, min(len(rows), 3))
            chosen = np.sort(generator.choice(len(rows), size=take, replace=resample == "bootstrap"))
            drawn.append(rows[chosen])
            labels.append(np.full(take, place))
        table = values[np.concatenate(drawn)]
        again = clone(estimator).set_params(shifts=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what concerns the data has been said at the first fit
            again.fit(table, domain=np.concatenate(labels), time=np.arange(len(table)) if timed else None)
        yield nx.relabel_nodes(again.graph_, dict(zip(again.rank_test_.names, names, strict=True)))
