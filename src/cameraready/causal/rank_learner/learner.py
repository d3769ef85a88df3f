"""Rank-Learner: a score that sorts people by how much a treatment does for them."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, clone
from sklearn.utils.validation import check_is_fitted

from cameraready.causal.rank_learner.curves import Estimate, autoc
from cameraready.causal.rank_learner.nuisances import (
    Arms,
    Overlap,
    OverlapWarning,
    Predictions,
    chosen,
    cross_fit,
)
from cameraready.causal.rank_learner.objective import LABELS, Labels, PairLabels, automatic_kappa
from cameraready.causal.rank_learner.scorers import fit_scorer
from cameraready.causal.rank_learner.tables import TableEncoder, n_rows


@dataclass(frozen=True)
class LabelStats:
    """The pair labels that the scorer was fitted to.

    Attributes
    ----------
    outside : float
        Share of labels below 0 or above 1, on a sample of pairs. Such labels are legal; many of them tell that the outcome is noisy.
    lowest, highest : float
    """

    outside: float
    lowest: float
    highest: float


class RankLearner(BaseEstimator):
    """Sorts rows by the effect of a treatment on them, without estimating the effect.

    Arno, Frauen, Javurek, Demeester and Feuerriegel, 2026, arXiv:2602.03517. Cross-fitted models of outcome and treatment give every
    pair of rows a Neyman-orthogonal label that says which one gains more; a scorer is fitted to the labels by pairwise logistic
    regression. Use it where only the order matters: whom to treat first under a budget. It assumes that all common causes of treatment and
    outcome are among the columns, and that everybody could have been in either arm. Where the size of an effect matters, use a
    CATE learner (`econml.dr.DRLearner`): the score has no unit.

    Parameters
    ----------
    model_y : "auto", estimator or torch.nn.Module
        Outcome model, fitted to each arm; a classifier where the outcome is binary, else a regressor (a torch module: (n, n_features) -> (n,),
        logits where binary). ``"auto"`` takes linear models or boosted trees, by cross-validation.
    model_t : "auto", estimator, torch.nn.Module or float
        Treatment model, a classifier; a number is the known propensity of a randomised trial.
    arms : "separate" or "joint"
        An outcome model for each arm, or one for both with the treatment as its last column, as in EconML's `DRLearner`; cheaper, and blind to
        effects where the model has no interactions.
    scorer : "mlp", "linear", "trees" or regressor
        What is fitted to the pairs: five small networks (the paper's, averaged), a ridge-penalised line (few rows, many columns, a score that
        can be read), boosted trees, or boosting of any scikit-learn regressor.
    labels : "orthogonal", "clipped" or "plug-in"
        See `PairLabels`. The authors' code clips, their theory does not; on a few hundred noisy rows clipping ranked no worse in our study.
    kappa : "auto" or float
        Width of the soft comparison, in the outcome's unit; ``"auto"`` follows the spread of the effects, see `automatic_kappa`.
    cv : int, splitter, or iterable of (train, test)
        Folds of the cross-fitting; an int stratifies by treatment.
    trim : float
        Rows whose estimated propensity lies outside [trim, 1 - trim] do not train the scorer. They are counted in `overlap_`, and an
        `OverlapWarning` says so; they are scored like all others.
    encoder : "auto", None or transformer
        Makes numbers of a raw table, fitted to X (and a clone of it to W): `TableEncoder`; None takes X as it is. Nuisances and scorer see its output.
    random_state : int or None

    Attributes
    ----------
    scorer_, encoder_ : fitted objects
    nuisances_ : Nuisances
        Out-of-fold predictions and the models of all folds.
    effects_, dr_scores_ : float arrays (n,)
        Estimated effects (given X) and doubly robust scores of the training rows, out of fold.
    kappa_ : float
    overlap_ : Overlap
    label_stats_ : LabelStats
    treatment_levels_ : tuple
        The values of T that mean untreated and treated.
    n_features_in_ : int
    """

    def __init__(
        self,
        *,
        model_y: Any = "auto",
        model_t: Any = "auto",
        arms: Arms = "separate",
        scorer: Any = "mlp",
        labels: Labels = "orthogonal",
        kappa: Any = "auto",
        cv: Any = 5,
        trim: float = 0.01,
        encoder: Any = "auto",
        random_state: int | None = None,
    ) -> None:
        self.model_y = model_y
        self.model_t = model_t
        self.arms = arms
        self.scorer = scorer
        self.labels = labels
        self.kappa = kappa
        self.cv = cv
        self.trim = trim
        self.encoder = encoder
        self.random_state = random_state

    def fit(self, Y: Any, T: Any, *, X: Any, W: Any = None) -> RankLearner:
        """Fit nuisances and scorer.

        Parameters
        ----------
        Y : array (n,)
            Outcome, more is better: numbers, booleans, or two values of which the second in sorted order counts as 1.
        T : array (n,)
            Treatment: two values, the second in sorted order means treated.
        X : table (n, n_features)
            What may decide the rank: array, pandas or polars frame.
        W : table (n, n_controls), optional
            Further common causes of treatment and outcome, which must not decide the rank and are not needed to predict.

        Raises
        ------
        ValueError, TypeError
            A treatment with one or more than two values, missing values in Y or T, lengths that differ, too few rows of an arm, no row left after
            trimming, parameters out of range.
        """
        before = self.__dict__.copy()
        try:
            return self._fit(Y, T, X, W)
        except BaseException:  # a fit that fails leaves the learner as it was
            self.__dict__.clear()
            self.__dict__.update(before)
            raise

    def _fit(self, Y: Any, T: Any, X: Any, W: Any) -> RankLearner:
        self._check_parameters()
        Y, T, binary = self._outcome_and_treatment(Y, T, n_rows(X))
        seed = self._seed()
        self.encoder_ = self._fitted_encoder(X)
        self.names_ = list(X.columns) if self.encoder is None and hasattr(X, "columns") else None
        coded = self._coded(self.encoder_, X)
        self.n_codes_ = coded.shape[1]
        self.n_features_in_ = X.shape[1] if hasattr(X, "shape") else coded.shape[1]
        V = coded
        if W is not None:
            if n_rows(W) != len(Y):
                raise ValueError(f"W has {n_rows(W)} rows, X has {len(Y)}")
            self.control_encoder_ = self._fitted_encoder(W)
            V = np.column_stack([coded, self._coded(self.control_encoder_, W)])
        self.has_controls_ = W is not None
        self.nuisances_ = cross_fit(
            Y,
            T,
            V,
            model_y=self.model_y,
            model_t=self.model_t,
            cv=self.cv,
            binary=binary,
            seed=seed,
            arms=self.arms,
        )
        found = self.nuisances_.predictions
        self.dr_scores_ = found.doubly_robust(Y, T)[0]
        self.effects_ = self._effects_given(coded, seed) if self.has_controls_ else found.effects
        kept = self._trimmed(found.propensity)
        effects, corrections = self.effects_[kept], (self.dr_scores_ - self.effects_)[kept]
        self.kappa_ = automatic_kappa(effects, corrections) if self.kappa == "auto" else float(self.kappa)
        labels = PairLabels(effects, corrections, self.kappa_, self.labels)
        self.label_stats_ = _stats(labels, seed)
        self.scorer_ = fit_scorer(self.scorer, coded[kept], labels, seed)
        return self

    def predict(self, X: Any) -> np.ndarray:
        """Scores (n,), the largest for those to treat first. They have no unit; only their order means something."""
        check_is_fitted(self)
        return np.asarray(self.scorer_.predict(self._known(X)), dtype=float)

    def rank(self, X: Any) -> np.ndarray:
        """Places (n,) in the order of treatment among the rows of `X`, 1 for the first; equal scores keep their order."""
        scores = self.predict(X)
        places = np.empty(len(scores), dtype=int)
        places[np.argsort(-scores, kind="stable")] = np.arange(1, len(scores) + 1)
        return places

    def doubly_robust_scores(self, Y: Any, T: Any, *, X: Any, W: Any = None) -> np.ndarray:
        """Doubly robust scores (n,) of rows that were not in `fit`, from the nuisances of all folds; for `autoc` and `toc_curve`.

        Rows outside the overlap bounds get scores with a propensity moved to the bound.
        """
        check_is_fitted(self)
        Y, T, _ = self._outcome_and_treatment(Y, T, n_rows(X), self.treatment_levels_)
        V = self._known(X)
        if self.has_controls_:
            if W is None:
                raise ValueError("the learner was fitted with controls: give W")
            V = np.column_stack([V, self._coded(self.control_encoder_, W)])
        found = self.nuisances_.predict_new(V)
        low = max(self.trim, 1e-3)
        bounded = Predictions(found.control, found.treated, np.clip(found.propensity, low, 1.0 - low))
        return bounded.doubly_robust(Y, T)[0]

    def score(self, Y: Any, T: Any, *, X: Any, W: Any = None) -> float:
        """AUTOC of the ranking on rows that were not in `fit`; see `evaluate` for its standard error."""
        return self.evaluate(Y, T, X=X, W=W).value

    def evaluate(self, Y: Any, T: Any, *, X: Any, W: Any = None) -> Estimate:
        """AUTOC of the ranking, with standard error, on rows that were not in `fit`."""
        return autoc(self.doubly_robust_scores(Y, T, X=X, W=W), self.predict(X))

    # --- parts of fit -----------------------------------------------------------------------------------------------

    def _check_parameters(self) -> None:
        if self.labels not in LABELS:
            raise ValueError(f"labels must be one of {', '.join(LABELS)}, got {self.labels!r}")
        if self.arms not in ("separate", "joint"):
            raise ValueError(f"arms must be separate or joint, got {self.arms!r}")
        if self.kappa != "auto" and not (_is_number(self.kappa) and 0 < self.kappa < np.inf):
            raise ValueError(f"kappa must be 'auto' or a positive number, got {self.kappa!r}")
        if not (_is_number(self.trim) and 0.0 <= self.trim < 0.5):
            raise ValueError(f"trim must be at least 0 and below 0.5, got {self.trim!r}")

    def _seed(self) -> int:
        if self.random_state is None:
            return int(np.random.default_rng().integers(2**31))
        if not _is_number(self.random_state) or self.random_state < 0:
            raise ValueError(f"random_state must be None or a whole number of at least 0, got {self.random_state!r}")
        return int(self.random_state)

    def _outcome_and_treatment(
        self, Y: Any, T: Any, n: int, levels: tuple[Any, Any] | None = None
    ) -> tuple[np.ndarray, np.ndarray, bool]:
        """Y as numbers, T as 0 and 1, and whether Y is binary; sets `treatment_levels_` where no levels are given."""
        Y, T = _one_column(Y, "Y"), _one_column(T, "T")
        for name, values in (("Y", Y), ("T", T)):
            if len(values) != n:
                raise ValueError(f"{name} has {len(values)} rows, X has {n}")
            lost = sum(_is_missing(value) for value in values.tolist())
            if lost:
                raise ValueError(f"{name} is missing or not finite in {lost} of {n} rows; leave these rows out")
        if levels is None:
            found = sorted(set(T.tolist()))
            if len(found) != 2:
                shown = ", ".join(map(repr, found[:5]))
                raise ValueError(f"T must have two values, untreated and treated; it has {len(found)}: {shown}")
            levels = self.treatment_levels_ = (found[0], found[1])
            self.outcome_levels_ = _text_levels(Y)
        elif not set(T.tolist()) <= set(levels):
            raise ValueError(f"T must hold {levels[0]!r} and {levels[1]!r} as in fit")
        treated = (levels[1] == T).astype(float)
        outcome = _outcome(Y, self.outcome_levels_)
        return outcome, treated, bool(np.isin(outcome, (0.0, 1.0)).all() and len(np.unique(outcome)) == 2)

    def _known(self, X: Any) -> np.ndarray:
        """`X` with the columns of `fit`, as numbers."""
        if self.names_ is not None and hasattr(X, "columns"):
            lost = [name for name in self.names_ if name not in list(X.columns)]
            if lost:
                raise ValueError(f"the table lacks the columns {', '.join(map(str, lost[:5]))} that were there in fit")
            X = X[self.names_]
        coded = self._coded(self.encoder_, X)
        if coded.shape[1] != self.n_codes_:
            raise ValueError(f"X has {coded.shape[1]} columns, {self.n_codes_} were there in fit")
        return coded

    def _fitted_encoder(self, table: Any) -> Any:
        if self.encoder is None:
            return None
        return (TableEncoder() if self.encoder == "auto" else clone(self.encoder)).fit(table)

    @staticmethod
    def _coded(encoder: Any, table: Any) -> np.ndarray:
        coded = table if encoder is None else encoder.transform(table)
        coded = np.asarray(coded.toarray() if hasattr(coded, "toarray") else coded, dtype=float)
        if coded.ndim != 2:
            raise ValueError(f"X must be a table of shape (n, n_features), got shape {coded.shape}")
        if not np.isfinite(coded).all() and encoder is not None:
            raise ValueError("the encoder returned values that are missing or infinite")
        if not np.isfinite(coded).all():
            raise ValueError("X has missing or infinite values; the encoder 'auto' takes care of missing ones")
        return coded

    def _effects_given(self, X: np.ndarray, seed: int) -> np.ndarray:
        """E[tau(X, W) | X] out of fold: the labels compare what X alone tells; W serves the nuisances."""
        predictions, folds = self.nuisances_.predictions, self.nuisances_.folds
        model = chosen(X, predictions.effects, classification=False, seed=seed)
        effects = np.empty(len(X))
        for fold in np.unique(folds):
            test = folds == fold
            effects[test] = clone(model).fit(X[~test], predictions.effects[~test]).predict(X[test])
        return effects

    def _trimmed(self, propensity: np.ndarray) -> np.ndarray:
        """Rows with overlap, boolean (n,)."""
        # Without trimming a propensity of exactly 0 or 1 still has no finite score.
        kept = (propensity >= self.trim) & (propensity <= 1.0 - self.trim) & np.isfinite(self.dr_scores_)
        self.overlap_ = Overlap(
            (self.trim, 1.0 - self.trim),
            float(propensity.min()),
            float(propensity.max()),
            int((~kept).sum()),
            len(kept),
        )
        if kept.sum() < 10:
            raise ValueError(
                f"no ranking can be learnt: {self.overlap_}; treated and untreated rows differ too much to be compared"
            )
        if self.overlap_.trimmed:
            warnings.warn(str(self.overlap_), OverlapWarning, stacklevel=3)
        return kept


def _stats(labels: PairLabels, seed: int) -> LabelStats:
    generator = np.random.default_rng([seed, 0x5354])
    n = len(labels)
    first = generator.integers(n, size=10_000)
    values = labels.of(first, (first + generator.integers(1, n, size=10_000)) % n)
    return LabelStats(float(((values < 0) | (values > 1)).mean()), float(values.min()), float(values.max()))


def _one_column(values: Any, name: str) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1:
        raise ValueError(f"{name} must have shape (n,), got {array.shape}")
    return array


def _text_levels(Y: np.ndarray) -> tuple[Any, Any] | None:
    """The two values of an outcome that is no number, the second counting as 1; None for numbers."""
    try:
        Y.astype(float)
    except (TypeError, ValueError):
        levels = sorted(set(Y.tolist()))
        if len(levels) != 2:
            raise ValueError(f"Y must be numbers or have two values, got text with {len(levels)} values") from None
        return levels[0], levels[1]
    return None


def _outcome(Y: np.ndarray, levels: tuple[Any, Any] | None) -> np.ndarray:
    if levels is None:
        return Y.astype(float)
    if not set(Y.tolist()) <= set(levels):
        raise ValueError(f"Y must hold {levels[0]!r} and {levels[1]!r} as in fit")
    return (levels[1] == Y).astype(float)


def _is_missing(value: Any) -> bool:
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(value, float) and not np.isfinite(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
