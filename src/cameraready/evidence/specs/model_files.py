"""Opens the user's saved models from formats that hold no code: LightGBM, XGBoost, skops, ONNX."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from cameraready.evidence.specs.spec import Spec, SpecError
from cameraready.evidence.specs.tables import listed, needs

MODEL_SUFFIXES = (".txt", ".json", ".ubj", ".skops", ".onnx")
#: Types that skops lists as untrusted although they only describe data. Nearly every imputer holds a dtype.
HARMLESS = frozenset({"numpy.dtype"})
ModelKind = Literal["lightgbm", "xgboost", "skops", "onnx"]


@dataclass(frozen=True)
class OpenedModel:
    """A model of the user's, ready to be called.

    Attributes
    ----------
    kind : {"lightgbm", "xgboost", "skops", "onnx"}
    native : object
        What the format's library opened: `lightgbm.Booster`, `xgboost.Booster`, a scikit-learn estimator, or
        `onnxruntime.InferenceSession`.
    feature_names : list of str or None
        Names of the columns the model was trained on, in order; None where the file does not say.
    n_features : int or None
    predict : callable
        ``predict(X)`` with a pandas DataFrame or an array of shape (n_rows, n_features). A frame's columns are chosen
        by name where the model knows names. Returns what the library's own ``predict`` does, shape (n_rows,) or
        (n_rows, n_outputs): probabilities for LightGBM and XGBoost classifiers, labels for scikit-learn and ONNX ones.
    predict_proba : callable or None
        Class probabilities of shape (n_rows, n_classes), for scikit-learn and ONNX classifiers that have them.
    """

    kind: ModelKind
    native: Any
    feature_names: list[str] | None
    n_features: int | None
    predict: Callable[[Any], np.ndarray]
    predict_proba: Callable[[Any], np.ndarray] | None = None

    def __call__(self, X: Any) -> np.ndarray:
        return self.predict(X)


def open_model(spec: Spec) -> OpenedModel:
    """Open the model file of `spec`. Nothing is unpickled.

    Raises
    ------
    SpecError
        The library is missing (with the pip command), the file is not what its name says, or a skops file holds types
        that skops does not trust by itself. Calling `predict` with the wrong columns raises it too.
    """
    suffix = Path(spec.path).suffix.lower()
    opener = {".txt": _lightgbm, ".json": _json, ".ubj": _xgboost, ".skops": _skops, ".onnx": _onnx}[suffix]
    try:
        if Path(spec.path).stat().st_size == 0:
            raise SpecError(f"{spec.path} is empty")
        return opener(spec.path)
    except OSError as error:
        raise SpecError(f"{spec.path} cannot be read: {error.strerror or error}") from error


def columns_for(X: Any, names: Sequence[str] | None, count: int | None, model: str) -> Any:
    """`X` with the model's columns in the model's order, or an error that says which are missing."""
    if hasattr(X, "columns"):
        if names is not None and not generic(names):
            missing = [name for name in names if name not in X.columns]
            if missing:
                raise SpecError(
                    f"{model} wants the columns {listed(missing)}, which the rows lack; they have {listed(X.columns)}"
                )
            return X[list(names)]
    else:
        X = np.asarray(X)
        if X.ndim != 2:
            raise SpecError(f"{model} wants rows of shape (n_rows, n_features), got an array of shape {X.shape}")
    if count is not None and X.shape[1] != count:
        raise SpecError(f"{model} wants {count} columns, the rows have {X.shape[1]}")
    return X


def generic(names: Sequence[str]) -> bool:
    """Whether names were made up by the library: ``Column_0`` ... of LightGBM."""
    return list(names) == [f"Column_{place}" for place in range(len(names))]


def categories_of_text(X: Any) -> Any:
    """A frame's columns of strings as categories, the one form of text that boosting libraries take."""
    if not hasattr(X, "columns"):
        return X
    text = [name for name in X.columns if X[name].dtype == object or str(X[name].dtype).startswith(("str", "string"))]
    return X.astype(dict.fromkeys(text, "category")) if text else X


def _json(path: str) -> OpenedModel:
    """XGBoost's JSON; other JSON is told what it is."""
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise SpecError(f"{path} is not JSON: {error}") from None
    if isinstance(content, dict) and "tree_info" in content:
        raise SpecError(
            f"{path} is LightGBM's dump, which cannot be loaded back; save with booster.save_model('model.txt')"
        )
    if not isinstance(content, dict) or "learner" not in content:
        raise SpecError(
            f"{path} is JSON but no model of XGBoost (it has no 'learner'); save with model.save_model('model.json')"
        )
    return _xgboost(path)


def _lightgbm(path: str) -> OpenedModel:
    with open(path, "rb") as file:
        first = file.readline(64).strip()
    if first != b"tree":
        raise SpecError(
            f"{path} is no model of LightGBM (its first line is not 'tree'); save with booster.save_model('model.txt')"
        )
    needs("lightgbm", "opening a LightGBM model")
    import lightgbm

    try:
        booster = lightgbm.Booster(model_file=path)
    except (lightgbm.basic.LightGBMError, ValueError, KeyError, IndexError) as error:
        raise SpecError(f"{path} is damaged; LightGBM says: {error}") from error
    names, count = booster.feature_name(), booster.num_feature()

    def predict(X: Any) -> np.ndarray:
        if hasattr(X, "columns"):
            # LightGBM stores blanks in names as underscores.
            X = X.set_axis([str(name).replace(" ", "_") for name in X.columns], axis=1)
        return np.asarray(booster.predict(categories_of_text(columns_for(X, names, count, "the LightGBM model"))))

    return OpenedModel("lightgbm", booster, None if generic(names) else names, count, predict)


def _xgboost(path: str) -> OpenedModel:
    needs("xgboost", "opening an XGBoost model")
    import xgboost

    booster = xgboost.Booster()
    try:
        booster.load_model(path)
    except (xgboost.core.XGBoostError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise SpecError(f"{path} is no model of XGBoost, or damaged: {reason}") from error
    if "c" in (booster.feature_types or ()) and tuple(map(int, xgboost.__version__.split(".")[:2])) < (3, 1):
        # Older versions number the categories anew in every batch of rows, and predict nonsense without a word.
        raise SpecError(
            f"{path} uses categories, which need xgboost>=3.1 to be told apart; this is {xgboost.__version__}"
        )
    names = None if booster.feature_names is None else list(booster.feature_names)
    count = booster.num_features()

    def predict(X: Any) -> np.ndarray:
        X = categories_of_text(columns_for(X, names, count, "the XGBoost model"))
        if hasattr(X, "columns") and names is not None:
            rows = xgboost.DMatrix(X, enable_categorical=True)
        else:
            rows = xgboost.DMatrix(np.asarray(X), feature_names=names, feature_types=booster.feature_types)
        return booster.predict(rows)

    return OpenedModel("xgboost", booster, names, count, predict)


def _skops(path: str) -> OpenedModel:
    needs("skops", "opening a .skops model")
    import zipfile

    import skops.io
    from skops.io.exceptions import UnsupportedTypeException, UntrustedTypesFoundException

    if not zipfile.is_zipfile(path):
        raise SpecError(f"{path} is no skops file; save with skops.io.dump(model, 'model.skops')")
    try:
        untrusted = sorted(set(skops.io.get_untrusted_types(file=path)) - HARMLESS)
        if untrusted:
            raise SpecError(
                f"{path} holds types that skops does not trust by itself: {listed(untrusted)}; if you trust them, load "
                "the model in a module of your own and name it as package.module:object"
            )
        model = skops.io.load(path, trusted=sorted(HARMLESS))
    except (UnsupportedTypeException, UntrustedTypesFoundException) as error:
        raise SpecError(f"{path} holds a type that skops does not load: {error}") from error
    except (zipfile.BadZipFile, KeyError, ValueError, TypeError, AttributeError, ImportError) as error:
        if isinstance(error, SpecError):
            raise
        raise SpecError(f"{path} is damaged, or made by another version of skops: {error}") from error
    if not hasattr(model, "predict"):
        raise SpecError(f"{path} holds a {type(model).__name__}, which cannot predict")
    known = getattr(model, "feature_names_in_", None)
    names = None if known is None else [str(name) for name in known]
    count = getattr(model, "n_features_in_", None)

    def call(method: Callable[[Any], Any]) -> Callable[[Any], np.ndarray]:
        return lambda X: np.asarray(method(columns_for(X, names, count, f"the {type(model).__name__}")))

    proba = call(model.predict_proba) if hasattr(model, "predict_proba") else None
    return OpenedModel("skops", model, names, count, call(model.predict), proba)


def _onnx(path: str) -> OpenedModel:
    needs("onnxruntime", "opening an .onnx model")
    from cameraready.evidence.specs.onnx_models import OnnxModel

    model = OnnxModel(path)
    proba = model.predict_proba if model.has_probabilities else None
    return OpenedModel("onnx", model.session, model.feature_names, model.n_features, model.predict, proba)
