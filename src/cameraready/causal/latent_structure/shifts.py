"""Which mechanisms change between domains: multi-group maximum likelihood on the graph that was found, with as few changes as possible.

The paper's abstract promises the shifted variables; how they are found here is a reconstruction. The scale of a latent is not
determined within a domain: multiplying its variance by s^2 equals multiplying all its effects by s. Among all explanations the one
with the fewest changed mechanisms is taken, which is right as long as fewer than half of a latent's children change.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import networkx as nx
import numpy as np
from scipy.optimize import minimize
from scipy.stats import chi2

from cameraready.causal.latent_structure.domains import Domains
from cameraready.causal.latent_structure.orientation import acyclic_extension

if TYPE_CHECKING:
    import pandas as pd

#: Level at which the model with few changes must pass against the one in which everything changes, and of `shifted`.
LEVEL = 0.01
#: Variables of the largest score that are tried at each step.
TRIED = 4


@dataclass(frozen=True)
class _Fit:
    """A fitted model: coefficients (C, v, v), noise variances (C, v), deviance."""

    coefficients: np.ndarray
    variances: np.ndarray
    deviance: float


class MultiGroupModel:
    """Gaussian likelihood of a linear model with latents on one graph in several domains.

    A mechanism, which is the coefficients of a variable's causes and its noise variance, is either one for all domains or free in
    each. The noise variance of a latent is 1 in the first domain and free in the others, since its scale is arbitrary.

    Parameters
    ----------
    graph : networkx.DiGraph
        Acyclic; the nodes that are not ``latent`` are `domains.names`.
    domains : Domains
    """

    def __init__(self, graph: nx.DiGraph, domains: Domains) -> None:
        latents = [node for node, latent in graph.nodes(data="latent") if latent]
        self.nodes: list[Any] = [*domains.names, *latents]
        self.n_observed, self.covariances = len(domains.names), domains.covariances
        place = {node: i for i, node in enumerate(self.nodes)}
        self.parents = [sorted(place[cause] for cause in graph.predecessors(node)) for node in self.nodes]
        # Bartlett's correction of the sample size for factor models.
        p, k = self.n_observed, len(latents)
        self.weights = np.maximum(domains.rows - 1 - (2 * p + 5) / 6 - 2 * k / 3, 1.0)
        self.n_domains = len(domains.rows)

    def is_latent(self, v: int) -> bool:
        return v >= self.n_observed

    def changed_df(self, v: int) -> int:
        """Degrees of freedom between one mechanism of `v` for all domains and one for each."""
        return (self.n_domains - 1) * (len(self.parents[v]) + 1)

    def fit(self, free: Iterable[int], start: _Fit | None = None, fixed_scale: Iterable[int] = ()) -> _Fit:
        """Maximum likelihood with the mechanisms `free` free; latents in `fixed_scale` keep one noise variance in all domains."""
        layout = _Layout(self, set(free), set(fixed_scale))
        first = start if start is not None else self._start()
        result = minimize(
            lambda x: self._objective(layout, x),
            layout.pack(first),
            jac=True,
            method="L-BFGS-B",
            bounds=layout.bounds(),
            options={"maxiter": 500, "ftol": 1e-9, "gtol": 1e-5},
        )
        coefficients, variances = layout.unpack(result.x)
        return _Fit(coefficients, variances, float(result.fun) * float(self.weights.sum()))

    def _start(self) -> _Fit:
        """Loadings from leading eigenvectors of the pooled correlations of each latent's children."""
        weights = self.weights[:, None, None] / self.weights.sum()
        pooled = (weights * self.covariances).sum(axis=0)
        v = len(self.nodes)
        coefficients = np.zeros((v, v))
        direction = np.eye(v)[: self.n_observed].copy()
        children = [[c for c in range(v) if j in self.parents[c]] for j in range(v)]
        for j in range(self.n_observed, v):
            measured = [c for c in children[j] if not self.is_latent(c)]
            if not measured:
                continue
            twins = [i for i in range(self.n_observed, j) if children[i] == children[j]]
            values, vectors = np.linalg.eigh(pooled[np.ix_(measured, measured)])
            at = -1 - len(twins) if len(twins) < len(measured) else -1
            coefficients[j, measured] = vectors[:, at] * np.sqrt(max(values[at], 0.1)) * 0.8
            direction[measured, j] = vectors[:, at]
        scores = direction.T @ pooled @ direction
        deviations = np.sqrt(np.maximum(np.diag(scores), 1e-9))
        for c in range(v):
            for j in self.parents[c]:
                if coefficients[j, c] == 0:
                    related = scores[j, c] / (deviations[j] * deviations[c])
                    coefficients[j, c] = 0.5 * related if abs(related) > 1e-3 else 0.1
        variances = np.full(v, 0.5)
        variances[self.n_observed :] = 1.0
        shape = (self.n_domains, v)
        return _Fit(
            np.broadcast_to(coefficients, (*shape, v)).copy(), np.broadcast_to(variances, shape).copy(), float("nan")
        )

    def gradients(self, coefficients: np.ndarray, variances: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        """Deviance over the sum of weights, and its derivatives by coefficients (C, v, v) and by log variances (C, v).

        With M = inv(I - F), Sigma = M' Omega M and G the derivative of the discrepancy by Sigma of the observed variables: by F it
        is 2 Sigma G M', by Omega the diagonal of M G M'.
        """
        v, p = len(self.nodes), self.n_observed
        total = np.linalg.inv(np.eye(v) - coefficients)
        implied = (total.swapaxes(-1, -2) * variances[:, None, :]) @ total
        inside = implied[:, :p, :p]
        inverse = np.linalg.inv(inside)
        sign, logdet = np.linalg.slogdet(inside)
        if (sign <= 0).any():
            return np.inf, np.zeros_like(coefficients), np.zeros_like(variances)
        share = self.weights / self.weights.sum()
        product = inverse @ self.covariances
        value = float(share @ (logdet + np.einsum("cii->c", product)))
        outer = np.zeros_like(coefficients)
        outer[:, :p, :p] = share[:, None, None] * (inverse - product @ inverse)
        turned = total @ outer
        by_coefficients = 2.0 * implied @ outer @ total.swapaxes(-1, -2)
        by_variances = np.einsum("cij,cij->ci", turned, total)
        return value, by_coefficients, by_variances * variances

    def _objective(self, layout: _Layout, x: np.ndarray) -> tuple[float, np.ndarray]:
        value, by_coefficients, by_logs = self.gradients(*layout.unpack(x))
        if not np.isfinite(value):
            return 1e10, np.zeros_like(x)
        return value, layout.gather(by_coefficients, by_logs)


class _Layout:
    """Where the parameters of a constrained model lie: every parameter is an edge or a log variance in a set of domains."""

    def __init__(self, model: MultiGroupModel, free: set[int], fixed_scale: set[int]) -> None:
        everywhere = list(range(model.n_domains))
        self.shape = (model.n_domains, len(model.nodes))
        index: dict[str, list[list[int]]] = {"edge": [], "log": []}
        count = 0
        self.entries: list[tuple[str, list[int], tuple[int, ...]]] = []
        for v in range(len(model.nodes)):
            parts = [[c] for c in everywhere] if v in free else [everywhere]
            for domains in parts:
                self.entries += [("edge", domains, (j, v)) for j in model.parents[v]]
            if model.is_latent(v):
                parts = [] if v in fixed_scale else [[c] for c in everywhere[1:]]
            self.entries += [("log", domains, (v,)) for domains in parts]
        for number, (kind, domains, at) in enumerate(self.entries):
            index[kind] += [[number, c, *at] for c in domains]
            count += 1
        self.count = count
        self.edges = np.array(index["edge"], dtype=int).reshape(-1, 4).T
        self.logs = np.array(index["log"], dtype=int).reshape(-1, 3).T

    def bounds(self) -> list[tuple[float, float]]:
        return [(-50.0, 50.0) if kind == "edge" else (-9.0, 9.0) for kind, _, _ in self.entries]

    def pack(self, fit: _Fit) -> np.ndarray:
        x = np.zeros(self.count)
        sizes = np.bincount(np.concatenate([self.edges[0], self.logs[0]]), minlength=self.count)
        number, domain, cause, effect = self.edges
        np.add.at(x, number, fit.coefficients[domain, cause, effect])
        number, domain, node = self.logs
        np.add.at(x, number, np.log(fit.variances[domain, node]))
        return x / sizes

    def unpack(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        coefficients = np.zeros((*self.shape, self.shape[1]))
        number, domain, cause, effect = self.edges
        coefficients[domain, cause, effect] = x[number]
        variances = np.ones(self.shape)
        number, domain, node = self.logs
        variances[domain, node] = np.exp(x[number])
        return coefficients, variances

    def gather(self, by_coefficients: np.ndarray, by_logs: np.ndarray) -> np.ndarray:
        gradient = np.zeros(self.count)
        number, domain, cause, effect = self.edges
        np.add.at(gradient, number, by_coefficients[domain, cause, effect])
        number, domain, node = self.logs
        np.add.at(gradient, number, by_logs[domain, node])
        return gradient


# --- the search for few changes -------------------------------------------------------------------------------------


def find_shifts(graph: nx.DiGraph, domains: Domains) -> pd.DataFrame:
    """The mechanisms that differ between domains, by forward search from "none does".

    Parameters
    ----------
    graph : networkx.DiGraph
        As `LatentStructure.graph_`; undirected edges are directed consistently first.
    domains : Domains
        At least two.

    Returns
    -------
    pandas.DataFrame
        One row a variable, observed ones first: ``variable``, ``latent``, ``statistic``, ``df``, ``pvalue``, ``pvalue_holm`` and
        ``shifted``. The statistic is the likelihood ratio between one mechanism of this variable for all domains and one for each,
        given the final model. ``shifted`` marks observed variables, and coefficients of latents, that the search freed, and latents
        whose variance or coefficients differ at 0.01 after Holm's correction. It costs some thirty fits of O(C v^3) a step each.
    """
    if len(domains.rows) < 2:
        raise ValueError("mechanisms can only change between domains; there is one")
    model = MultiGroupModel(acyclic_extension(graph), domains)
    free, final = _few_changes(model)
    statistics = np.array([_changed(model, free, final, v) for v in range(len(model.nodes))])
    degrees = np.array([model.changed_df(v) for v in range(len(model.nodes))])
    pvalues = chi2.sf(statistics, degrees)
    holm = _holm(pvalues)
    shifted = [v in free or (model.is_latent(v) and holm[v] <= LEVEL) for v in range(len(model.nodes))]
    return _table(model, statistics, degrees, pvalues, holm, shifted)


def _table(model: MultiGroupModel, *columns: Any) -> pd.DataFrame:
    import pandas as pd

    names = ("statistic", "df", "pvalue", "pvalue_holm", "shifted")
    latent = [model.is_latent(v) for v in range(len(model.nodes))]
    return pd.DataFrame({"variable": model.nodes, "latent": latent, **dict(zip(names, columns, strict=True))})


def _few_changes(model: MultiGroupModel) -> tuple[set[int], _Fit]:
    """Free one mechanism after the other until the model passes against the one in which all are free."""
    everything = range(len(model.nodes))
    free: set[int] = set()
    current = model.fit(free)
    full = model.fit(everything, current)
    candidates = [v for v in everything if not model.is_latent(v) or model.parents[v]]
    while len(free) < len(candidates) and not _passes(model, free, current, full):
        if 2 * len(free) > len(candidates):
            warnings.warn(
                "more than half of the mechanisms seem to change between domains, so that what changed cannot be told from what"
                " did not; the table of shifts lists the strongest ones only",
                stacklevel=4,
            )
            break
        left = [v for v in candidates if v not in free]
        tried = sorted(left, key=lambda v: -_score(model, current, v))[:TRIED]
        fits = {v: model.fit({*free, v}, current) for v in tried}
        best = min(tried, key=lambda v: fits[v].deviance - _expected(model, v))
        free.add(best)
        current = fits[best]
    return free, current


def _expected(model: MultiGroupModel, v: int) -> float:
    """What freeing a mechanism that is the same everywhere lowers the deviance by on average."""
    return -float(model.changed_df(v))


def _passes(model: MultiGroupModel, free: set[int], current: _Fit, full: _Fit) -> bool:
    left = [v for v in range(len(model.nodes)) if v not in free]
    # The noise variances of latents are free in both models.
    df = sum(model.changed_df(v) - model.is_latent(v) * (model.n_domains - 1) for v in left)
    return df == 0 or float(chi2.sf(max(current.deviance - full.deviance, 0.0), df)) > LEVEL


def _score(model: MultiGroupModel, fit: _Fit, v: int) -> float:
    """How much freeing `v` promises, from the derivatives in each domain at the common fit (a score test with rough information)."""
    _, by_coefficients, by_logs = model.gradients(fit.coefficients, fit.variances)
    n = model.weights
    slope = by_logs[:, v] * n.sum()
    gain = float((slope**2 / (2 * n)).sum()) if not model.is_latent(v) else 0.0
    parents = model.parents[v]
    if parents:
        total = np.linalg.inv(np.eye(len(model.nodes)) - fit.coefficients)
        implied = (total.swapaxes(-1, -2) * fit.variances[:, None, :]) @ total
        spread = np.einsum("cii->ci", implied)[:, parents]
        slopes = by_coefficients[:, parents, v] * n.sum()
        gain += float((slopes**2 * fit.variances[:, v, None] / (4 * n[:, None] * spread)).sum())
    return gain


def _changed(model: MultiGroupModel, free: set[int], final: _Fit, v: int) -> float:
    """Likelihood ratio of one mechanism of `v` for all domains against one for each, all else as in the final model."""
    with_it = final if v in free else model.fit({*free, v}, final)
    without = (
        final
        if v not in free and not model.is_latent(v)
        else model.fit(free - {v}, final, {v} if model.is_latent(v) else ())
    )
    return max(without.deviance - with_it.deviance, 0.0)


def _holm(pvalues: Sequence[float] | np.ndarray) -> np.ndarray:
    """Holm's (1979) adjusted p-values."""
    values = np.asarray(pvalues)
    order = np.argsort(values, kind="stable")
    adjusted = np.empty(len(values))
    adjusted[order] = np.minimum(np.maximum.accumulate(values[order] * np.arange(len(values), 0, -1)), 1.0)
    return adjusted
