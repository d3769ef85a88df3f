"""Structural causal models, linear and not, with latent variables, interventions and several domains: data with a known truth."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import networkx as nx
import numpy as np

#: How the domains of one family differ: in the coefficients, in the variances of the noise, in both, in the means, or not at all.
Change = Literal["none", "coefficients", "noise", "both", "means"]
#: Laws of the noise, all scaled to mean zero and variance one.
NoiseLaw = Literal["gaussian", "uniform", "laplace", "student"]


def standard_noise(law: NoiseLaw, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Independent noise of mean zero and variance one (Student's has five degrees of freedom), float64 of `shape`."""
    draw = {
        "gaussian": lambda: rng.normal(size=shape),
        "uniform": lambda: rng.uniform(-(3**0.5), 3**0.5, size=shape),
        "laplace": lambda: rng.laplace(scale=2**-0.5, size=shape),
        "student": lambda: rng.standard_t(5, size=shape) * (3 / 5) ** 0.5,
    }
    if law not in draw:
        raise ValueError(f"noise must be one of {', '.join(draw)}, got {law!r}")
    return draw[law]()


@dataclass(frozen=True)
class LinearSCM:
    """V_j = mean_j + sum_i weights[i, j] V_i + e_j with independent noise e_j: one domain of a linear model.

    Attributes
    ----------
    weights : float64 array of shape (n, n)
        ``weights[i, j]`` is the coefficient of the edge i -> j; the graph must have no cycle.
    noise_variances : float64 array of shape (n,)
        Variances of the noise; zero where a variable has been set by an intervention.
    names : tuple of str
    latent : frozenset of str
        The variables that `sample` leaves out.
    means : float64 array of shape (n,), optional
        Intercepts; zero by default.

    Raises
    ------
    ValueError
        Shapes that do not fit, negative variances, unknown or repeated names, a cycle, values that are not finite.
    """

    weights: np.ndarray
    noise_variances: np.ndarray
    names: tuple[str, ...]
    latent: frozenset[str] = frozenset()
    means: np.ndarray | None = None

    def __post_init__(self) -> None:
        n = len(self.names)
        if len(set(self.names)) != n:
            raise ValueError("two variables of the model have the same name")
        if self.weights.shape != (n, n) or self.noise_variances.shape != (n,):
            raise ValueError(
                f"{n} names need weights of shape ({n}, {n}) and variances of shape ({n},), got {self.weights.shape}"
                f" and {self.noise_variances.shape}"
            )
        if not (np.isfinite(self.weights).all() and np.isfinite(self.noise_variances).all()):
            raise ValueError("weights and noise variances must be finite")
        if (self.noise_variances < 0).any():
            raise ValueError("noise variances must not be negative")
        unknown = set(self.latent) - set(self.names)
        if unknown:
            raise ValueError(f"latent names {sorted(unknown)} are no variables of the model")
        if not nx.is_directed_acyclic_graph(self.graph):
            raise ValueError("the model's graph has a cycle")

    @property
    def graph(self) -> nx.DiGraph:
        """The causal graph; nodes carry ``latent``."""
        graph = nx.DiGraph()
        graph.add_nodes_from((name, {"latent": name in self.latent}) for name in self.names)
        graph.add_edges_from((self.names[i], self.names[j]) for i, j in zip(*np.nonzero(self.weights), strict=True))
        return graph

    @property
    def observed(self) -> tuple[str, ...]:
        """Names of the observed variables, in the model's order."""
        return tuple(name for name in self.names if name not in self.latent)

    def covariance(self, *, observed_only: bool = True) -> np.ndarray:
        """Population covariance (I - W)^-T diag(variances) (I - W)^-1, of the observed variables by default."""
        total = np.linalg.inv(np.eye(len(self.names)) - self.weights)
        covariance = (total.T * self.noise_variances) @ total
        if not observed_only:
            return covariance
        keep = [self.names.index(name) for name in self.observed]
        return covariance[np.ix_(keep, keep)]

    def sample(
        self, n: int, rng: np.random.Generator, *, noise: NoiseLaw = "gaussian", observed_only: bool = True
    ) -> np.ndarray:
        """`n` independent rows, float64 of shape (n, observed variables) or (n, all variables)."""
        if n < 0:
            raise ValueError(f"the number of rows must not be negative, got {n}")
        errors = standard_noise(noise, (n, len(self.names)), rng) * np.sqrt(self.noise_variances)
        if self.means is not None:
            errors = errors + self.means
        values = errors @ np.linalg.inv(np.eye(len(self.names)) - self.weights)
        return values[:, [self.names.index(name) for name in self.observed]] if observed_only else values

    def do(self, values: Mapping[str, float]) -> LinearSCM:
        """The model after the perfect intervention that sets each named variable to a number."""
        weights, variances = self.weights.copy(), self.noise_variances.copy()
        means = np.zeros(len(self.names)) if self.means is None else self.means.copy()
        for name, value in values.items():
            at = self._place(name)
            weights[:, at], variances[at], means[at] = 0.0, 0.0, float(value)
        return replace(self, weights=weights, noise_variances=variances, means=means)

    def shift(self, name: str, *, factor: float = 1.0, noise_factor: float = 1.0) -> LinearSCM:
        """The model in which the mechanism of `name` has its coefficients and its noise variance multiplied."""
        at = self._place(name)
        weights, variances = self.weights.copy(), self.noise_variances.copy()
        weights[:, at] *= factor
        variances[at] *= noise_factor
        return replace(self, weights=weights, noise_variances=variances)

    def _place(self, name: str) -> int:
        if name not in self.names:
            raise ValueError(f"the model has no variable {name!r}; it has {', '.join(self.names)}")
        return self.names.index(name)


def linear_scm(
    edges: Iterable[tuple[str, str]],
    rng: np.random.Generator,
    *,
    latent: Iterable[str] = (),
    isolated: Iterable[str] = (),
    coefficients: tuple[float, float] = (0.5, 2.0),
    variances: tuple[float, float] = (0.5, 1.0),
) -> LinearSCM:
    """A linear model on the given edges with random signs, absolute coefficients and variances uniform in the two ranges.

    Variables are ordered topologically, ties by first mention.
    """
    graph = nx.DiGraph()
    edges = list(edges)
    graph.add_nodes_from(dict.fromkeys([*(node for edge in edges for node in edge), *isolated]))
    graph.add_edges_from(edges)
    if not nx.is_directed_acyclic_graph(graph):
        raise ValueError("the edges form a cycle")
    place = {name: i for i, name in enumerate(graph)}
    names = tuple(nx.lexicographical_topological_sort(graph, key=place.__getitem__))
    weights = np.zeros((len(names), len(names)))
    for cause, effect in sorted(edges, key=lambda edge: (names.index(edge[0]), names.index(edge[1]))):
        weights[names.index(cause), names.index(effect)] = _signed(rng, coefficients, ())
    return LinearSCM(weights, rng.uniform(*variances, size=len(names)), names, frozenset(latent))


def domains_of(
    scm: LinearSCM,
    n_domains: int,
    change: Change,
    rng: np.random.Generator,
    *,
    variables: Sequence[str] | None = None,
    coefficients: tuple[float, float] = (0.5, 2.0),
    variances: tuple[float, float] = (0.5, 2.0),
    means: float = 2.0,
) -> list[LinearSCM]:
    """Domains that share the model's graph while the mechanisms of `variables` (default: all) are drawn anew in each.

    Parameters
    ----------
    change : {"none", "coefficients", "noise", "both", "means"}
        What is drawn anew: coefficients (uniform absolute value in `coefficients`, random sign), noise variances (uniform in
        `variances`), both, or intercepts (normal with standard deviation `means`).
    """
    if change not in ("none", "coefficients", "noise", "both", "means"):
        raise ValueError(f"change must be none, coefficients, noise, both or means, got {change!r}")
    if n_domains < 1:
        raise ValueError(f"there must be at least one domain, got {n_domains}")
    chosen = [scm._place(name) for name in (scm.names if variables is None else variables)]
    family = []
    for _ in range(n_domains):
        weights, noise = scm.weights.copy(), scm.noise_variances.copy()
        intercepts = None if scm.means is None else scm.means.copy()
        for at in chosen:
            parents = np.nonzero(scm.weights[:, at])[0]
            if change in ("coefficients", "both"):
                weights[parents, at] = _signed(rng, coefficients, (len(parents),))
            if change in ("noise", "both"):
                noise[at] = rng.uniform(*variances)
            if change == "means":
                intercepts = np.zeros(len(scm.names)) if intercepts is None else intercepts
                intercepts[at] = rng.normal(scale=means)
        family.append(replace(scm, weights=weights, noise_variances=noise, means=intercepts))
    return family


def sample_domains(
    family: Sequence[LinearSCM], rows: int | Sequence[int], rng: np.random.Generator, *, noise: NoiseLaw = "gaussian"
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of every domain stacked: data (sum of rows, observed variables) float64, and labels (sum of rows,) int."""
    counts = [rows] * len(family) if isinstance(rows, int) else list(rows)
    if len(counts) != len(family):
        raise ValueError(f"{len(family)} domains need as many numbers of rows, got {len(counts)}")
    parts = [scm.sample(count, rng, noise=noise) for scm, count in zip(family, counts, strict=True)]
    return np.concatenate(parts), np.repeat(np.arange(len(family)), counts)


def _signed(rng: np.random.Generator, bounds: tuple[float, float], shape: tuple[int, ...]) -> np.ndarray:
    return rng.uniform(*bounds, size=shape) * rng.choice([-1.0, 1.0], size=shape)


@dataclass(frozen=True)
class NonlinearSCM:
    """V_j = f_j(parents of j) + e_j with additive independent noise, evaluated in topological order.

    Attributes
    ----------
    graph : networkx.DiGraph
        Acyclic; nodes may carry ``latent=True``.
    mechanisms : mapping of name to callable
        For every variable with parents: (n, number of parents) float64 -> (n,), the parents in `sorted` order of their names.
    noise_scales : mapping of name to float
        Standard deviations of the noise; 1 where a variable is not named.
    """

    graph: nx.DiGraph
    mechanisms: Mapping[str, Callable[[np.ndarray], np.ndarray]]
    noise_scales: Mapping[str, float]

    def __post_init__(self) -> None:
        if not nx.is_directed_acyclic_graph(self.graph):
            raise ValueError("the model's graph has a cycle")
        lacking = [node for node in self.graph if self.graph.in_degree(node) and node not in self.mechanisms]
        if lacking:
            raise ValueError(f"variables with parents but without a mechanism: {', '.join(map(str, lacking))}")

    def sample(
        self,
        n: int,
        rng: np.random.Generator,
        *,
        do: Mapping[str, float] | None = None,
        noise: NoiseLaw = "gaussian",
        observed_only: bool = True,
    ) -> dict[str, np.ndarray]:
        """`n` rows by variable, each (n,) float64; `do` sets variables to numbers and cuts their causes."""
        do = dict(do or {})
        unknown = set(do) - set(self.graph)
        if unknown:
            raise ValueError(f"interventions on unknown variables {sorted(map(str, unknown))}")
        values: dict[str, np.ndarray] = {}
        place = {name: i for i, name in enumerate(self.graph)}
        for node in nx.lexicographical_topological_sort(self.graph, key=place.__getitem__):
            error = standard_noise(noise, (n,), rng) * self.noise_scales.get(node, 1.0)
            parents = sorted(self.graph.predecessors(node))
            if node in do:
                values[node] = np.full(n, float(do[node]))
            elif parents:
                values[node] = self.mechanisms[node](np.column_stack([values[p] for p in parents])) + error
            else:
                values[node] = error
        latent = {node for node, is_latent in self.graph.nodes(data="latent") if is_latent}
        return {node: values[node] for node in self.graph if not (observed_only and node in latent)}


def nonlinear_scm(
    graph: nx.DiGraph, rng: np.random.Generator, *, hidden: int = 4, noise_scale: float = 0.5
) -> NonlinearSCM:
    """Random smooth mechanisms on `graph`: sums of `hidden` sigmoidal ridge functions of the parents, plus a linear part."""
    mechanisms = {}
    for node in graph:
        parents = graph.in_degree(node)
        if parents:
            directions = rng.normal(size=(parents, hidden))
            mechanisms[node] = _ridge_sum(
                directions, rng.normal(size=hidden), rng.normal(size=hidden), _signed(rng, (0.5, 1.0), (parents,))
            )
    return NonlinearSCM(graph, mechanisms, dict.fromkeys(graph, noise_scale))


def _ridge_sum(
    directions: np.ndarray, offsets: np.ndarray, heights: np.ndarray, slopes: np.ndarray
) -> Callable[[np.ndarray], np.ndarray]:
    def mechanism(parents: np.ndarray) -> np.ndarray:
        return np.tanh(parents @ directions + offsets) @ heights + parents @ slopes

    return mechanism
