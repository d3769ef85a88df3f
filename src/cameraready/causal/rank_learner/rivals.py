"""The study's arms: the learners compared at equal data, nuisances, networks and stopping, and the paper's own recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.special import expit
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.neural_network import MLPRegressor

from cameraready.causal.rank_learner.curves import toc_curve
from cameraready.causal.rank_learner.learner import RankLearner
from cameraready.causal.rank_learner.network import (
    Network,
    NetworkClassifier,
    NetworkRegressor,
    Training,
    held_out,
    minimise,
)
from cameraready.causal.rank_learner.nuisances import Nuisances, Predictions, cross_fit
from cameraready.causal.rank_learner.objective import Labels, PairLabels, RowTargets, UniformPairs, automatic_kappa
from cameraready.causal.rank_learner.scorers import fit_networks, parts_of
from cameraready.causal.rank_learner.workloads import Draw


@dataclass(frozen=True)
class Shared:
    """What all arms of a block get: rows, one set of cross-fitted nuisances, one seed.

    `kept` are the rows whose propensity leaves them comparable, the same for every arm.
    """

    Y: np.ndarray
    T: np.ndarray
    X: np.ndarray
    test: np.ndarray
    nuisances: Nuisances
    kept: np.ndarray
    seed: int

    @property
    def effects(self) -> np.ndarray:
        return self.nuisances.predictions.effects[self.kept]

    @property
    def doubly_robust(self) -> np.ndarray:
        return self.nuisances.predictions.doubly_robust(self.Y, self.T)[0][self.kept]


Arm = Callable[[Shared], np.ndarray]


def shared(Y: np.ndarray, T: np.ndarray, X: np.ndarray, test: np.ndarray, seed: int, **models: Any) -> Shared:
    """Cross-fit networks (or `models`) in five folds and leave out rows outside [0.01, 0.99], as `RankLearner` does."""
    options = {
        "model_y": NetworkRegressor(random_state=seed),
        "model_t": NetworkClassifier(random_state=seed),
        "cv": 5,
        "binary": bool(np.isin(Y, (0.0, 1.0)).all()),
        **models,
    }
    nuisances = cross_fit(Y, T, X, seed=seed, **options)
    e = nuisances.predictions.propensity
    return Shared(Y, T, X, test, nuisances, (e >= 0.01) & (e <= 0.99), seed)


def ranker(labels: Labels) -> Arm:
    """Networks on pairs; all of `RankLearner` behind the nuisances."""

    def scores(given: Shared) -> np.ndarray:
        corrections = given.doubly_robust - given.effects
        pairs = PairLabels(given.effects, corrections, automatic_kappa(given.effects, corrections), labels)
        return fit_networks(given.X[given.kept], pairs, Training(), given.seed).predict(given.test)

    return scores


def dr_learner(given: Shared) -> np.ndarray:
    """The same networks, number of them, optimiser and held-out parts, with squared error on the doubly robust scores."""
    X, targets = given.X[given.kept], given.doubly_robust
    scale = float(targets.std()) or 1.0
    targets = (targets - targets.mean()) / scale
    generator, training = np.random.default_rng([given.seed, 0x4E45]), Training()
    total = np.zeros(len(given.test))
    for held in parts_of(len(X), 5, generator):
        train = np.setdiff1d(np.arange(len(X)), held)
        network = Network(X.shape[1], training.hidden, generator)

        def validation(current: Network, held: np.ndarray = held) -> float:
            return float(np.mean((current(X[held]) - targets[held]) ** 2))

        minimise(network, X[train], RowTargets(targets[train], training.batch), validation, training, generator)
        total += network(given.test)
    return total / 5


def t_learner(given: Shared) -> np.ndarray:
    """mu_1 - mu_0, the mean over the networks of the five folds."""
    return given.nuisances.predict_new(given.test).effects


LEARNERS: Mapping[str, Arm] = {
    "rank-learner": ranker("orthogonal"),
    "clipped": ranker("clipped"),
    "plug-in": ranker("plug-in"),
    "dr-learner": dr_learner,
    "t-learner": t_learner,
}


def econml_dr(given: Shared) -> np.ndarray:
    """EconML's DRLearner with the same kinds of network for nuisances and effect, five folds."""
    from econml.dr import DRLearner

    learner = DRLearner(
        model_regression=NetworkRegressor(random_state=given.seed),
        model_propensity=NetworkClassifier(random_state=given.seed),
        model_final=NetworkRegressor(random_state=given.seed),
        cv=5,
        min_propensity=0.01,
        random_state=given.seed,
    )
    return np.ravel(learner.fit(given.Y, given.T, X=given.X).effect(given.test))


def causal_forest(given: Shared) -> np.ndarray:
    """EconML's CausalForestDML at its defaults, with the same kinds of network for nuisances, five folds."""
    from econml.dml import CausalForestDML

    learner = CausalForestDML(
        model_y=NetworkRegressor(random_state=given.seed),
        model_t=NetworkClassifier(random_state=given.seed),
        discrete_treatment=True,
        cv=5,
        n_jobs=1,
        random_state=given.seed,
    )
    return np.ravel(learner.fit(given.Y, given.T, X=given.X).effect(given.test))


LIBRARIES: Mapping[str, Arm] = {"econml-dr": econml_dr, "causal-forest": causal_forest}

# --- time -----------------------------------------------------------------------------------------------------------


def fits(seed: int) -> dict[str, Callable[[Draw], Any]]:
    """Whole fits, cross-fitting included, with the same forests as nuisances and five folds: ours and EconML's DRLearner.

    Once with networks for the score, once with lines (`DRLearner`'s default). DRLearner has one outcome model for both arms; so have ours here.
    """
    outcome = RandomForestRegressor(50, min_samples_leaf=5, random_state=seed)
    treatment = RandomForestClassifier(50, min_samples_leaf=5, random_state=seed)

    def ours(scorer: str) -> Callable[[Draw], Any]:
        learner = RankLearner(model_y=outcome, model_t=treatment, arms="joint", scorer=scorer, random_state=seed)
        return lambda d: learner.fit(d.Y, d.T, X=d.X)

    def theirs(**final: Any) -> Callable[[Draw], Any]:
        from econml.dr import DRLearner

        models = {"model_regression": outcome, "model_propensity": treatment, "cv": 5, "min_propensity": 0.01}
        return lambda d: DRLearner(**models, **final, random_state=seed).fit(d.Y, d.T, X=d.X)

    network = MLPRegressor(hidden_layer_sizes=(64,), early_stopping=True, random_state=seed)
    return {
        "rank-learner": ours("mlp"),
        "econml-dr": theirs(model_final=network),
        "rank-learner-linear": ours("linear"),
        "econml-dr-linear": theirs(),
    }


# --- the paper's recipe ---------------------------------------------------------------------------------------------

#: Released code: 64 units, Adam at 5e-4, batches of 128, at most 50 epochs, patience 5, a fifth of each half for validation.
RECIPE = Training(
    learning_rate=5e-4,
    weight_decay=0.0,
    max_epochs=50,
    min_steps=0,
    patience=5,
    min_gain=1e-9,
    check_every=0,
    batch=128,
    keep_untrained=False,
)
KAPPA = 0.75
GRID = np.linspace(0.05, 1.0, 21)


@dataclass(frozen=True)
class Repeated:
    """Row targets whose epoch has as many steps as another objective's."""

    inner: RowTargets
    steps: int

    def batches(self, generator: np.random.Generator) -> list[np.ndarray]:
        found: list[np.ndarray] = []
        while len(found) < self.steps:
            found += self.inner.batches(generator)
        return found[: self.steps]

    def slope(self, rows: np.ndarray, scores: np.ndarray) -> np.ndarray:
        return self.inner.slope(rows, scores)


def recipe(first: Draw, second: Draw, seed: int, pools: tuple[float, ...] = ()) -> dict[str, np.ndarray]:
    """Scores of the test rows by every arm of the paper's protocol: nuisances from `first`, the second stage from `second`.

    ``paper-dr-long`` is the DR-learner given as many steps as the ranker has; ``pairs-P%`` the ranker that only ever sees P per cent of
    the pairs, drawn once.
    """
    generator = np.random.default_rng([seed, 0x5245])
    nuisances = recipe_nuisances(first, generator)
    found = nuisances(second.X)
    bounded = replace(found, propensity=np.clip(found.propensity, 1e-3, 1.0 - 1e-3))
    scores = bounded.doubly_robust(second.Y, second.T)[0]
    held, train = held_out(len(second.Y), generator)
    labels = PairLabels(found.effects, scores - found.effects, KAPPA, "clipped").taken(train)
    pairs = UniformPairs(labels)
    steps = len(pairs.batches(np.random.default_rng(0)))
    share = {f"pairs-{100 * pool:g}%": pair_pool(len(train), pool, generator) for pool in pools}
    objectives: dict[str, Any] = {
        "paper-rank": pairs,
        "paper-plug-in": UniformPairs(replace(labels, kind="plug-in")),
        "paper-dr": RowTargets(scores[train], RECIPE.batch),
        "paper-dr-long": Repeated(RowTargets(scores[train], RECIPE.batch), steps),
        **{name: UniformPairs(labels, pool=pool) for name, pool in share.items()},
    }
    out = {"paper-t": nuisances(second.test).effects}
    for name, objective in objectives.items():
        start = np.random.default_rng([seed, 0x4E45])  # the same initial weights for every arm
        network = Network(second.X.shape[1], RECIPE.hidden, start)
        by_autoc = not name.startswith("paper-dr")

        def validation(net: Network, by_autoc: bool = by_autoc) -> float:
            predicted = net(second.X[held])
            return -grid_autoc(scores[held], predicted) if by_autoc else float(np.mean((predicted - scores[held]) ** 2))

        training = replace(RECIPE, min_gain=1e-4) if by_autoc else RECIPE
        minimise(network, second.X[train], objective, validation, training, start)
        out[name] = network(second.test)
    return out


def recipe_nuisances(first: Draw, generator: np.random.Generator) -> Callable[[np.ndarray], Predictions]:
    """mu_0, mu_1 and e as networks on four fifths of `first`."""
    held, train = held_out(len(first.Y), generator)

    def fitted(targets: np.ndarray, rows: np.ndarray, watched: np.ndarray, logistic: bool) -> Network:
        network = Network(first.X.shape[1], RECIPE.hidden, generator)

        def validation(current: Network) -> float:
            if not len(watched):
                return 0.0
            scores = current(first.X[watched])
            if logistic:
                return float(np.mean(np.logaddexp(0.0, scores) - targets[watched] * scores))
            return float(np.mean((scores - targets[watched]) ** 2))

        objective = RowTargets(targets[rows], RECIPE.batch, logistic)
        minimise(network, first.X[rows], objective, validation, RECIPE, generator)
        return network

    arms = [fitted(first.Y, train[first.T[train] == t], held[first.T[held] == t], False) for t in (0, 1)]
    propensity = fitted(first.T, train, held, True)
    return lambda X: Predictions(arms[0](X), arms[1](X), expit(propensity(X)))


def pair_pool(n: int, share: float, generator: np.random.Generator) -> np.ndarray:
    """A fixed random set of ordered pairs (m, 2): `share` of all n (n - 1)."""
    count = max(1, round(share * n * (n - 1)))
    picked = generator.choice(n * (n - 1), count, replace=False)
    first, second = np.divmod(picked, n - 1)
    return np.column_stack([first, second + (second >= first)])


def grid_autoc(effects: np.ndarray, scores: np.ndarray) -> float:
    """The released code's validation AUTOC: a left Riemann sum of TOC over 21 shares."""
    return float(toc_curve(effects, scores, GRID).values[:-1] @ np.diff(GRID))
