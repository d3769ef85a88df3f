"""Wraps a scikit-learn estimator: fits it once, and says what its error on fresh rows will be, and how far to trust that."""

from __future__ import annotations

import warnings
from typing import Any, Literal

import numpy as np
from scipy.special import expit, ndtr
from sklearn.base import BaseEstimator, MetaEstimatorMixin, clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.pipeline import Pipeline
from sklearn.utils import get_tags
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_array, check_is_fitted, column_or_1d

from cameraready.stats.erm.asymptotics import HighDimERM, ScoreLaw
from cameraready.stats.erm.correspondence import matching_erm
from cameraready.stats.erm.laws import Array
from cameraready.stats.erm.leave_out import FittedRows, fitted_rows
from cameraready.stats.erm.losses import HingeLoss, Loss, ScaledHuberLoss, named_loss
from cameraready.stats.erm.universality import UniversalityCheck, check_rows

#: Largest gradient that a fit may leave, as a share of the penalty's.
LOOSE = 0.2


def _fitted_has(name: str) -> Any:
    def check(self: AsymptoticErrorEstimator) -> bool:
        return hasattr(getattr(self, "estimator_", self.estimator), name)

    return available_if(check)


class AsymptoticErrorEstimator(MetaEstimatorMixin, BaseEstimator):
    """Fit a linear model once, and estimate its error on fresh rows from the same training rows.

    Scores of the training rows are corrected for what each row's own presence did to them (no refitting, no test set, no covariance
    estimate), and the error is read off the corrected scores: by counting, or from their normal law where a check finds nothing
    against it, which varies less. Source: the theory of Yaakoubi et al., 2026, arXiv:2604.03146 (data-driven form derived here).

    Use it for ridge, logistic, hinge and Huber models when cross-validation is too slow or too noisy. Not for models tuned on the
    same rows, nor when rows come in groups: like leave-one-out it assumes independent rows.

    Parameters
    ----------
    estimator : estimator
        One that `matching_erm` knows (Ridge, RidgeClassifier, LinearRegression, LogisticRegression, LinearSVC, linear SVC,
        HuberRegressor), or a `Pipeline` that ends in one, whose earlier steps do without y. Two classes for classifiers.
    leverage : {"auto", "by-class", "individual"}
        Whether all rows of a class share one kappa (the theory), or each has its own (approximate leave-one-out). "auto" shares
        unless rows are found to differ in scale.
    law : {"auto", "empirical", "normal"}
        How a classifier's error is read off the scores: counted, from a normal law a class (which varies less, and is biased where
        scores are not normal), or by a mean of both. "auto" gives the normal law the weight 1 / (1 + z^2), with z the difference of the
        two in standard errors, and none where a check of the rows speaks against it.

    Attributes
    ----------
    estimator_ : estimator
        The fitted estimator.
    test_error_ : float
        Estimated share of wrong classes, or mean squared error, on fresh rows.
    test_error_se_ : float
        Its standard error as an estimate of this model's error.
    test_loss_ : float
        Estimated mean loss on fresh rows, without the penalty.
    train_error_ : float
        The same as `test_error_` on the training rows as they are.
    scores_ : ndarray of shape (n_samples,)
        What the decision function (or prediction) would be for each row, had it been left out.
    kappa_ : ndarray of shape (n_samples,)
    universality_ : UniversalityCheck
    normal_weight_ : float
        Weight of the normal law: 0 for regression.
    leverage_ : str
        What "auto" chose.
    erm_ : HighDimERM
        The risk that was minimised, for predictions at other sample sizes.
    classes_ : ndarray of shape (2,)
        For classifiers; scores are those of ``classes_[1]``.

    Raises
    ------
    ValueError
        From `fit`: more than two classes or one; an interpolating fit; separated classes without a penalty; parameters whose risk is
        not covered.

    Notes
    -----
    O(n p min(n, p)) beside the fit itself.
    """

    def __init__(
        self,
        estimator: Any,
        *,
        leverage: Literal["auto", "by-class", "individual"] = "auto",
        law: Literal["auto", "empirical", "normal"] = "auto",
    ) -> None:
        self.estimator = estimator
        self.leverage = leverage
        self.law = law

    def fit(self, X: Any, y: Any) -> AsymptoticErrorEstimator:
        """Fit the estimator to `X` (n_samples, n_features) and `y` (n_samples,), and estimate its error."""
        before = self.__dict__.copy()
        for name in [name for name in before if name.endswith("_")]:
            del self.__dict__[name]  # what an earlier fit to another kind of target left
        try:
            return self._fit(X, y)
        except BaseException:  # a fit that fails leaves the estimator as it was
            self.__dict__.clear()
            self.__dict__.update(before)
            raise

    def _fit(self, X: Any, y: Any) -> AsymptoticErrorEstimator:
        self._check_parameters()
        erm = matching_erm(self._last(self.estimator), _rows(X))
        loss = named_loss(erm.loss)
        labels = self._labels(y, loss.is_classification)
        self.estimator_ = _fitted(self.estimator, X, y)
        last = self._last(self.estimator_)
        if loss.is_classification:
            self.classes_ = np.asarray(last.classes_)
            labels = np.where(labels == self.classes_[1], 1.0, -1.0)
        rows = self._features(X)
        self.erm_ = erm
        alpha = erm.alpha
        if isinstance(loss, ScaledHuberLoss):
            loss, alpha = loss.at(float(last.scale_)), alpha * float(last.scale_)
        coef, offset, rows, free = _coordinates(last, rows, erm)
        fitted = self._fitted(rows, labels, coef, offset, loss, alpha, free, last)
        self._estimate(fitted, loss)
        return self

    # --- parts of fit --------------------------------------------------------------------------------------------------

    def _check_parameters(self) -> None:
        if self.leverage not in ("auto", "by-class", "individual"):
            raise ValueError(f"leverage must be 'auto', 'by-class' or 'individual', got {self.leverage!r}")
        if self.law not in ("auto", "empirical", "normal"):
            raise ValueError(f"law must be 'auto', 'empirical' or 'normal', got {self.law!r}")

    @staticmethod
    def _last(estimator: Any) -> Any:
        return estimator.steps[-1][1] if isinstance(estimator, Pipeline) else estimator

    @staticmethod
    def _labels(y: Any, is_classification: bool) -> Array:
        if y is None:
            raise ValueError("This estimator requires y to be passed, but the target y is None.")
        labels = column_or_1d(np.asarray(y), warn=True)
        if not is_classification:
            return np.asarray(labels, dtype=float)
        check_classification_targets(labels)
        classes = np.unique(labels)
        if len(classes) == 1:
            raise ValueError(f"y has only one class, {classes[0]!r}; there is nothing to tell apart")
        if len(classes) > 2:
            raise ValueError(
                f"Only binary classification is supported. The type of the target is multiclass: y has {len(classes)} classes; compare"
                " two of them, or each with the rest"
            )
        return labels

    def _features(self, X: Any) -> Array:
        if isinstance(self.estimator_, Pipeline) and len(self.estimator_.steps) > 1:
            X = self.estimator_[:-1].transform(X)
        X = X.toarray() if hasattr(X, "toarray") else X
        return check_array(X, dtype=np.float64)

    def _fitted(
        self, rows: Array, y: Array, coef: Array, offset: float, loss: Loss, alpha: float, free: bool, last: Any
    ) -> FittedRows:
        if loss.is_classification and alpha == 0 and (y * (rows @ coef + offset) > 0).all():
            raise ValueError(
                "the classes are separated without error and there is no penalty: the minimiser does not exist (coefficients grow without"
                " bound, whatever the solver returned); set a finite C"
            )
        _warn_unless_minimal(rows, y, coef, offset, loss, alpha)
        kink = 10.0 * float(getattr(last, "tol", 1e-4)) if isinstance(loss, HingeLoss) else 0.0
        return fitted_rows(rows, y, coef, offset, loss, alpha, free_intercept=free, kink=kink)

    def _estimate(self, fitted: FittedRows, loss: Loss) -> None:
        y = fitted.y
        groups = y if loss.is_classification else np.zeros(len(y))
        own = fitted.influence.kappas()
        shared = np.empty_like(own)
        for value in np.unique(groups):
            shared[groups == value] = own[groups == value].mean()
        centred = self._centred_factor(fitted, groups)
        check = check_rows(groups, fitted.left_out(own), fitted.influence, centred)
        individual = self.leverage == "individual" or (self.leverage == "auto" and not check.concentrates)
        self.kappa_ = own if individual else shared
        self.leverage_ = "individual" if individual else "by-class"
        self.scores_ = fitted.left_out(self.kappa_)
        self.universality_: UniversalityCheck = check
        self.test_loss_ = float(loss.value(y, self.scores_).mean())
        self._labels_ = y
        if loss.is_classification:
            self.train_error_ = float(np.mean(y * fitted.z <= 0))
            self._classification_error(y)
        else:
            squares = (y - self.scores_) ** 2
            self.train_error_ = float(np.mean((y - fitted.z) ** 2))
            self.normal_weight_ = 0.0
            self.test_error_ = float(squares.mean())
            self.test_error_se_ = float(squares.std(ddof=1) / np.sqrt(len(y)))

    @staticmethod
    def _centred_factor(fitted: FittedRows, groups: Array) -> Array:
        """The influence's factor for rows less the mean of their group: it is linear in the row."""
        factor = fitted.influence.factor.copy()
        for value in np.unique(groups):
            factor[:, groups == value] -= factor[:, groups == value].mean(axis=1, keepdims=True)
        return factor

    def _classification_error(self, y: Array) -> None:
        margins = y * self.scores_
        wrong = (margins < 0) + 0.5 * (margins == 0)
        counted = float(wrong.mean())
        likely = (wrong.sum() + 0.5) / (len(y) + 1.0)  # no error among n rows does not mean that there is none
        counted_se = float(np.sqrt(likely * (1.0 - likely) / len(y)))
        if min((y > 0).sum(), (y < 0).sum()) < 2 and self.law == "normal":
            raise ValueError("a class has one row, which has no normal law; use law='empirical'")
        alone = min((y > 0).sum(), (y < 0).sum()) < 2
        smooth, smooth_se = (counted, counted_se) if alone else self._normal_error(margins, y)
        weight = 0.0 if alone else {"normal": 1.0, "empirical": 0.0}.get(self.law)
        if weight is None:
            # Counting is consistent, the normal law efficient where it is right: their difference has the difference of variances.
            spread = max(counted_se**2 - smooth_se**2, 1e-300)
            weight = 1.0 / (1.0 + (smooth - counted) ** 2 / spread) if self.universality_.trusted else 0.0
        self.normal_weight_ = weight
        self.test_error_ = weight * smooth + (1.0 - weight) * counted
        kept = (1.0 - weight) ** 2
        self.test_error_se_ = float(np.sqrt(kept * counted_se**2 + (1.0 - kept) * smooth_se**2))

    @staticmethod
    def _normal_error(margins: Array, y: Array) -> tuple[float, float]:
        """Sum over classes of share * Phi(-mean / sd) of the margins, and its standard error by the delta method."""
        error, variance = 0.0, 0.0
        for label in (-1.0, 1.0):
            own = margins[y == label]
            share, sd = len(own) / len(y), max(float(own.std(ddof=1)) if len(own) > 1 else 0.0, 1e-300)
            t = float(own.mean()) / sd
            error += share * float(ndtr(-t))
            density = np.exp(-0.5 * min(t * t, 1e3)) / np.sqrt(2 * np.pi)
            variance += share**2 * density**2 * (1 + t * t / 2) / len(own)
        return error, float(np.sqrt(variance))

    # --- after fit -----------------------------------------------------------------------------------------------------

    def margin_law(self) -> ScoreLaw:
        """Law of y * score for a classifier, and of the residual y - score for a regression, on fresh rows.

        A normal law a class with weight `normal_weight_`, and the left-out rows themselves, smoothed by Silverman's rule.
        """
        check_is_fitted(self)
        y, weight = self._labels_, self.normal_weight_
        margins = y * self.scores_ if hasattr(self, "classes_") else y - self.scores_
        quartiles = np.subtract(*np.percentile(margins, [75, 25])) / 1.34
        width = max(0.9 * min(margins.std(), quartiles or margins.std()) * len(y) ** -0.2, 1e-300)
        own = ScoreLaw(np.full(len(y), 1.0 / len(y)), margins, np.full(len(y), width), y)
        if weight == 0:
            return own
        groups = [margins[y == label] for label in (-1.0, 1.0)]
        shares = np.array([len(group) for group in groups]) / len(y)
        sds = np.array([max(float(g.std(ddof=1)), 1e-300) if len(g) > 1 else 1e-300 for g in groups])
        return ScoreLaw(
            np.concatenate([weight * shares, (1 - weight) * own.weights]),
            np.concatenate([[group.mean() for group in groups], own.centres]),
            np.concatenate([sds, own.sds]),
            np.concatenate([[-1.0, 1.0], own.labels]),
        )

    def calibration(self, n_bins: int = 10) -> tuple[Array, Array]:
        """Mean predicted probability of ``classes_[1]`` and observed share of it, in bins of equally many left-out rows, (n_bins,) each.

        Raises
        ------
        ValueError
            For an estimator without probabilities (only `LogisticRegression` has them here).
        """
        check_is_fitted(self)
        if not hasattr(self.estimator_, "predict_proba") or self.erm_.loss != "logistic":
            raise ValueError(
                f"{type(self._last(self.estimator_)).__name__} predicts no probabilities, which calibration is about"
            )
        probability, positive = expit(self.scores_), self._labels_ > 0
        bins = np.array_split(np.argsort(probability, kind="stable"), min(n_bins, len(probability)))
        return np.array([probability[b].mean() for b in bins]), np.array([positive[b].mean() for b in bins])

    def predict(self, X: Any) -> Array:
        """Predictions of the fitted estimator."""
        check_is_fitted(self)
        return self.estimator_.predict(X)

    @_fitted_has("decision_function")
    def decision_function(self, X: Any) -> Array:
        """Scores of the fitted estimator."""
        check_is_fitted(self)
        return self.estimator_.decision_function(X)

    @_fitted_has("predict_proba")
    def predict_proba(self, X: Any) -> Array:
        """Probabilities of the fitted estimator."""
        check_is_fitted(self)
        return self.estimator_.predict_proba(X)

    def score(self, X: Any, y: Any) -> float:
        """The fitted estimator's own score: accuracy, or R^2."""
        check_is_fitted(self)
        return self.estimator_.score(X, y)

    @property
    def n_features_in_(self) -> int:
        """Number of features seen in `fit`."""
        check_is_fitted(self)
        return self.estimator_.n_features_in_

    @property
    def feature_names_in_(self) -> Array:
        """Names of the features seen in `fit`, where it had names."""
        return self.estimator_.feature_names_in_

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        inner = get_tags(self.estimator)
        tags.estimator_type = inner.estimator_type
        tags.classifier_tags, tags.regressor_tags = inner.classifier_tags, inner.regressor_tags
        tags.target_tags, tags.input_tags = inner.target_tags, inner.input_tags
        tags.target_tags.multi_output = False
        if tags.classifier_tags is not None:
            tags.classifier_tags.multi_class = False
        return tags


def _fitted(estimator: Any, X: Any, y: Any) -> Any:
    """A fitted clone; a pipeline's earlier steps are fitted without y, so that what they do to a row owes nothing to its label."""
    fitted = clone(estimator)
    if not isinstance(fitted, Pipeline) or len(fitted.steps) == 1:
        return fitted.fit(X, y)
    first = fitted[:-1]
    try:
        transformed = first.fit_transform(X)
    except (ValueError, TypeError) as error:
        clone(estimator)[:-1].fit(X, y)  # what is wrong with X is raised again here
        raise ValueError(
            "a step of the pipeline needs y, so that no row can be left out of it after the fact; select features within"
            f" cross-validation instead ({error})"
        ) from error
    fitted.steps[-1][1].fit(transformed, y)
    fitted.steps[:-1] = first.steps  # with a memory, its steps are clones
    return fitted


def _warn_unless_minimal(rows: Array, y: Array, coef: Array, offset: float, loss: Loss, alpha: float) -> None:
    """Warn where the solver stopped away from the minimum, on which leaving rows out by formula rests."""
    slope = getattr(loss, "slope", None)
    if slope is None:
        return
    slopes = np.asarray(slope(y, rows @ coef + offset), dtype=float)
    pull = alpha * coef
    left = float(np.linalg.norm(rows.T @ slopes / len(y) + pull))
    scale = max(float(np.linalg.norm(pull)), 1e-3 * float(np.linalg.norm(np.abs(rows).T @ np.abs(slopes) / len(y))))
    if left > LOOSE * scale:
        warnings.warn(
            f"the solver stopped where the risk's gradient is still {left / scale:.0%} of the penalty's: errors of left-out rows rest on "
            "a minimum; give the estimator a smaller tol, more iterations or another solver",
            ConvergenceWarning,
            stacklevel=4,
        )


def _rows(X: Any) -> int:
    shape = getattr(X, "shape", None)
    n = int(shape[0]) if shape else len(X) if hasattr(X, "__len__") else len(np.asarray(X))
    if n < 2:
        raise ValueError(f"n_samples={n}: an error cannot be estimated from fewer than two rows")
    return n


def _coordinates(last: Any, rows: Array, erm: HighDimERM) -> tuple[Array, float, Array, bool]:
    """Coefficients, offset and rows in which every penalised parameter is a coefficient, and whether the intercept is free."""
    coef = (
        last.coef_.toarray() if hasattr(last.coef_, "toarray") else last.coef_
    )  # of a support vector machine on sparse rows
    coef = np.ravel(coef).astype(float)
    if len(coef) != rows.shape[1]:
        raise ValueError(
            f"the fitted model has coefficients of shape {np.shape(last.coef_)}; one target and two classes are supported"
        )
    offset = float(np.ravel(last.intercept_)[0]) if erm.intercept != "none" else 0.0
    if erm.intercept == "penalised":
        scaling = erm.intercept_scaling
        return np.append(coef, offset / scaling), 0.0, np.column_stack([rows, np.full(len(rows), scaling)]), False
    return coef, offset, rows, erm.intercept == "free"
