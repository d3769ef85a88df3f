"""Cross-fitted outcome and propensity models, and the doubly robust scores that follow from them.

Notation: mu_t(v) = E[Y | T = t, V = v], e(v) = P(T = 1 | V = v) with V the features and controls together; the doubly robust score is
phi = mu_1 - mu_0 + T (Y - mu_1) / e - (1 - T) (Y - mu_0) / (1 - e) (Robins, Rotnitzky and Zhao, 1994), with E[phi | V] = tau(V).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from sklearn.base import BaseEstimator, clone, is_classifier

from cameraready.causal.rank_learner.network import TorchModel

#: An outcome model for each arm, or one for both with the treatment as a column.
Arms = Literal["separate", "joint"]
#: (training rows, number of the fold) -> outcome models.
FitOutcomes = Callable[[np.ndarray, int], "SeparateOutcomes | JointOutcomes"]

#: Fewer training rows than this, and boosted trees are not tried by ``"auto"``.
TREES_FROM = 100


class OverlapWarning(UserWarning):
    """Some rows were left out of the ranking's training because one of the two arms is next to impossible for them."""


class SingleOutcomeWarning(UserWarning):
    """In some fold every row of an arm has the same binary outcome; its model is that constant."""


@dataclass(frozen=True)
class Overlap:
    """What overlap trimming did.

    Attributes
    ----------
    bounds : (float, float)
        Propensities allowed.
    lowest, highest : float
        Propensities found, before trimming.
    trimmed, rows : int
        Rows left out of the ranking's training, and rows in all.
    """

    bounds: tuple[float, float]
    lowest: float
    highest: float
    trimmed: int
    rows: int

    def __str__(self) -> str:
        return (
            f"{self.trimmed} of {self.rows} rows left out: propensity outside [{self.bounds[0]:g}, {self.bounds[1]:g}]; "
            f"propensities from {self.lowest:.3g} to {self.highest:.3g}"
        )


@dataclass(frozen=True)
class Predictions:
    """Predicted nuisances of some rows, each (n,)."""

    control: np.ndarray
    treated: np.ndarray
    propensity: np.ndarray

    @property
    def effects(self) -> np.ndarray:
        return self.treated - self.control

    def doubly_robust(self, Y: np.ndarray, T: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Scores of the effect and of the outcome without treatment, (n,) each."""
        with np.errstate(divide="ignore", invalid="ignore"):
            inverse_treated = np.where(T == 1, 1.0 / self.propensity, 0.0)
            inverse_control = np.where(T == 0, 1.0 / (1.0 - self.propensity), 0.0)
        treated = self.treated + inverse_treated * (Y - self.treated)
        control = self.control + inverse_control * (Y - self.control)
        return treated - control, control


@dataclass(frozen=True)
class SeparateOutcomes:
    """A model for each arm."""

    control: Any
    treated: Any

    def predict(self, V: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return _mean(self.control, V), _mean(self.treated, V)


@dataclass(frozen=True)
class JointOutcomes:
    """One model of both arms, which has the treatment as its last column."""

    model: Any

    def predict(self, V: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        n = len(V)
        both = np.column_stack([np.concatenate([V, V]), np.repeat([0.0, 1.0], n)])
        found = _mean(self.model, both)
        return found[:n], found[n:]


@dataclass(frozen=True)
class FoldModels:
    """The nuisance models fitted without one fold."""

    outcomes: SeparateOutcomes | JointOutcomes
    propensity: Any

    def predict(self, V: np.ndarray) -> Predictions:
        control, treated = self.outcomes.predict(V)
        return Predictions(control, treated, np.clip(_mean(self.propensity, V), 0.0, 1.0))


@dataclass(frozen=True)
class Nuisances:
    """Cross-fitted nuisances: out-of-fold predictions (n,), the models behind them, and each row's fold."""

    predictions: Predictions
    models: list[FoldModels]
    folds: np.ndarray

    def predict_new(self, V: np.ndarray) -> Predictions:
        """For rows that no model has seen: the mean over the models of all folds."""
        each = [models.predict(V) for models in self.models]
        control, treated, propensity = (
            np.mean([getattr(p, name) for p in each], axis=0) for name in ("control", "treated", "propensity")
        )
        return Predictions(control, treated, propensity)


class Constant(BaseEstimator):
    """Predicts one number: a known propensity, or an outcome that never varies."""

    def __init__(self, value: float = 0.0) -> None:
        self.value = value

    def fit(self, X: Any, y: Any = None) -> Constant:
        return self

    def predict(self, X: Any) -> np.ndarray:
        return np.full(len(X), float(self.value))


def cross_fit(
    Y: np.ndarray,
    T: np.ndarray,
    V: np.ndarray,
    *,
    model_y: Any,
    model_t: Any,
    cv: Any,
    binary: bool,
    seed: int,
    arms: Arms = "separate",
) -> Nuisances:
    """Fit mu_0, mu_1 and e on all folds but one and predict that one, for every fold.

    Parameters
    ----------
    Y, T : float arrays (n,)
        Outcomes; treatments 0 or 1.
    V : float array (n, n_features)
    model_y, model_t
        As in `RankLearner`.
    cv : int, splitter or iterable of (train, test) index arrays
    binary : bool
        Whether Y is 0 or 1, so that `model_y` may be a classifier.
    seed : int
    arms : {"separate", "joint"}
        An outcome model for each arm, or one for both with the treatment as a column.

    Raises
    ------
    ValueError
        An arm with fewer rows than folds; a split whose training rows lack an arm, or that leaves rows unpredicted.
    """
    splits = folds_of(Y, T, V, cv, binary, seed)
    fit_outcomes = (_separate if arms == "separate" else _joint)(Y, T, V, model_y, binary, seed)
    propensity = resolved(model_t, V, T, classification=True, seed=seed, name="model_t")
    n = len(Y)
    out, folds, models = np.full((3, n), np.nan), np.full(n, -1), []
    for number, (train, test) in enumerate(splits):
        models.append(FoldModels(fit_outcomes(train, number), _fitted(propensity, V, T, train, number)))
        found = models[-1].predict(V[test])
        out[:, test] = found.control, found.treated, found.propensity
        folds[test] = number
    if (folds < 0).any():
        raise ValueError(f"cv leaves {int((folds < 0).sum())} of {n} rows in no test fold; every row needs one")
    if not np.isfinite(out).all():
        raise ValueError("a nuisance model predicted values that are missing or infinite")
    return Nuisances(Predictions(*out), models, folds)


def _separate(Y: np.ndarray, T: np.ndarray, V: np.ndarray, model_y: Any, binary: bool, seed: int) -> FitOutcomes:
    models = [
        resolved(model_y, V[arm == T], Y[arm == T], classification=binary, seed=seed, name="model_y") for arm in (0, 1)
    ]
    return lambda train, fold: SeparateOutcomes(
        *(_fitted(models[arm], V, Y, train[T[train] == arm], fold) for arm in (0, 1))
    )


def _joint(Y: np.ndarray, T: np.ndarray, V: np.ndarray, model_y: Any, binary: bool, seed: int) -> FitOutcomes:
    both = np.column_stack([V, T])
    model = resolved(model_y, both, Y, classification=binary, seed=seed, name="model_y")
    return lambda train, fold: JointOutcomes(_fitted(model, both, Y, train, fold))


def folds_of(
    Y: np.ndarray, T: np.ndarray, V: np.ndarray, cv: Any, binary: bool, seed: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Training and test rows of every fold, stratified by arm (and by binary outcome where there are enough of each)."""
    from sklearn.model_selection import StratifiedKFold  # slow to import

    if isinstance(cv, (int, np.integer)) and not isinstance(cv, bool):
        if cv < 2:
            raise ValueError(f"cv must be at least 2 folds, got {cv}")
        fewest = int(min((T == 0).sum(), (T == 1).sum()))
        if fewest < max(cv, 3):
            raise ValueError(
                f"{fewest} rows are the fewer of treated and untreated, too few for {cv} folds: it takes {max(cv, 3)}"
            )
        strata = T + 2 * Y if binary and np.unique(T + 2 * Y, return_counts=True)[1].min() >= cv else T
        splits: Iterable[Any] = StratifiedKFold(int(cv), shuffle=True, random_state=seed).split(V, strata)
    elif hasattr(cv, "split") and not isinstance(cv, str):
        splits = cv.split(V, T)
    elif isinstance(cv, Iterable) and not isinstance(cv, str):
        splits = cv
    else:
        raise ValueError(f"cv must be a number of folds, a splitter or (train, test) pairs, got {cv!r}")
    found = [(np.asarray(train), np.asarray(test)) for train, test in splits]
    for number, (train, _) in enumerate(found):
        for arm, name in ((0, "untreated"), (1, "treated")):
            if (T[train] == arm).sum() < 2:
                raise ValueError(
                    f"fold {number + 1} of cv leaves fewer than two {name} rows to learn from; stratify the folds by treatment"
                )
    return found


# --- models ---------------------------------------------------------------------------------------------------------


def resolved(model: Any, V: np.ndarray, target: np.ndarray, *, classification: bool, seed: int, name: str) -> Any:
    """An unfitted estimator for what the user gave: ``"auto"``, a number, an estimator, or a torch module."""
    if isinstance(model, str):
        if model != "auto":
            raise ValueError(f"{name} must be 'auto', an estimator or a torch module, got {model!r}")
        return chosen(V, target, classification=classification, seed=seed)
    if name == "model_t" and isinstance(model, (float, np.floating)):
        if not 0.0 < model < 1.0:
            raise ValueError(f"a known propensity must lie between 0 and 1, got {model}")
        return Constant(float(model))
    if hasattr(model, "fit") and (hasattr(model, "predict") or hasattr(model, "predict_proba")):
        if is_classifier(model) and not classification:
            raise ValueError(f"{name} is a classifier, but the outcome is not binary; give a regressor")
        return model
    if hasattr(model, "state_dict") and hasattr(model, "forward"):
        return TorchModel(model, classification=classification, seed=seed)
    raise TypeError(f"{name} must have fit and predict, or be a torch module, got {type(model).__name__}")


def chosen(V: np.ndarray, target: np.ndarray, *, classification: bool, seed: int) -> Any:
    """Linear or boosted trees, whichever predicts `target` better in three-fold cross-validation; linear for few rows."""
    # Slow to import.
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
    from sklearn.linear_model import LogisticRegression, RidgeCV
    from sklearn.model_selection import StratifiedKFold
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    if classification:
        candidates = [make_pipeline(StandardScaler(), LogisticRegression(max_iter=500))]
        trees: Any = HistGradientBoostingClassifier(max_iter=80, max_leaf_nodes=8, random_state=seed)
    else:
        candidates = [make_pipeline(StandardScaler(), RidgeCV(np.logspace(-2, 4, 13)))]
        trees = HistGradientBoostingRegressor(max_iter=80, max_leaf_nodes=8, random_state=seed)
    if V.shape[1] == 0:
        return Constant(float(target.mean()))
    counts = np.unique(target, return_counts=True)[1]
    if len(target) < TREES_FROM or (classification and (len(counts) < 2 or counts.min() < 10)):
        return candidates[0]
    candidates.append(trees)
    labels = target if classification else np.argsort(np.argsort(target)) * 5 // len(target)
    splits = list(StratifiedKFold(3, shuffle=True, random_state=seed).split(V, labels))
    losses = [
        sum(_loss(clone(model).fit(V[a], target[a]), V[b], target[b], classification) for a, b in splits)
        for model in candidates
    ]
    return candidates[int(np.argmin(losses))]


def _loss(model: Any, V: np.ndarray, target: np.ndarray, classification: bool) -> float:
    predicted = _mean(model, V)
    if not classification:
        return float(np.mean((predicted - target) ** 2))
    p = np.clip(np.where(target == 1, predicted, 1.0 - predicted), 1e-12, 1.0)
    return float(-np.log(p).mean())


def _fitted(model: Any, V: np.ndarray, target: np.ndarray, rows: np.ndarray, fold: int) -> Any:
    if isinstance(model, Constant):
        return model
    values = target[rows]
    takes_classes = is_classifier(model) or getattr(model, "classification", False)
    if takes_classes and len(np.unique(values)) == 1:
        warnings.warn(
            f"fold {fold + 1}: all {len(rows)} rows of an arm have the outcome {values[0]:g}; its model is that constant",
            SingleOutcomeWarning,
            stacklevel=2,
        )
        return Constant(float(values[0]))
    return clone(model).fit(V[rows], values)


def _mean(model: Any, V: np.ndarray) -> np.ndarray:
    """Predicted mean (n,); of a classifier the probability of 1."""
    if not hasattr(model, "predict_proba"):
        return np.asarray(model.predict(V), dtype=float).reshape(len(V))
    found = np.asarray(model.predict_proba(V), dtype=float)
    if found.ndim == 1:
        return found
    classes = list(getattr(model, "classes_", range(found.shape[1])))
    return found[:, classes.index(1)]
