"""Calls ONNX models on tables: one matrix, or one input for each column, as scikit-learn converters write them."""

from __future__ import annotations

from typing import Any

import numpy as np

from cameraready.evidence.specs.spec import SpecError
from cameraready.evidence.specs.tables import listed

DTYPES = {
    "tensor(float)": np.float32,
    "tensor(double)": np.float64,
    "tensor(float16)": np.float16,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(bool)": np.bool_,
    "tensor(string)": np.str_,
}


class OnnxModel:
    """An ONNX graph as a function of a table, on the CPU and one thread.

    Parameters
    ----------
    path : str
        The file.

    Raises
    ------
    SpecError
        The file is no ONNX model, or its inputs are not those of a table.
    """

    def __init__(self, path: str) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 4  # errors come as exceptions; warnings would go to the user's terminal
        try:
            self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's exceptions share no base class but Exception
            reason = " ".join(str(error).split())[:200]
            raise SpecError(f"{path} is no ONNX model that onnxruntime opens: {reason}") from error
        self.path = path
        self.inputs = self.session.get_inputs()
        self.outputs = self.session.get_outputs()
        strange = [given for given in self.inputs if given.type not in DTYPES]
        if strange or not self.inputs:
            raise SpecError(f"{path} takes {strange[0].type if strange else 'nothing'} as input, not a table")
        widths = [width(given) for given in self.inputs]
        if len(self.inputs) == 1:
            if len(self.inputs[0].shape) != 2:
                raise SpecError(
                    f"{path} takes an array of shape {tuple(self.inputs[0].shape)}, not a table of shape "
                    "(n_rows, n_features)"
                )
            self.n_features = widths[0]
            self.feature_names = None
        elif any(one != 1 for one in widths):
            raise SpecError(
                f"{path} takes {len(self.inputs)} inputs of widths {', '.join(map(str, widths))}; a table is passed as "
                "one matrix or as one input for each column"
            )
        else:
            self.n_features = len(self.inputs)
            self.feature_names = [given.name for given in self.inputs]
        kinds = [produced.type for produced in self.outputs]
        self._proba = next((place for place, kind in enumerate(kinds) if place > 0 and kind in PROBABILITIES), None)

    @property
    def has_probabilities(self) -> bool:
        return self._proba is not None

    def predict(self, X: Any) -> np.ndarray:
        """The first output, shape (n_rows,) or (n_rows, n_outputs); an output of one column is flattened."""
        return flat(np.asarray(self.run(X, 0)))

    def predict_proba(self, X: Any) -> np.ndarray:
        """Class probabilities of shape (n_rows, n_classes), from a matrix or from a list of maps."""
        assert self._proba is not None
        found = self.run(X, self._proba)
        if isinstance(found, list):
            return np.array([list(row.values()) for row in found])
        return np.asarray(found)

    def run(self, X: Any, output: int) -> Any:
        try:
            return self.session.run([self.outputs[output].name], self.feed(X))[0]
        except SpecError:
            raise
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            raise SpecError(f"{self.path} cannot be run on these rows: {reason}") from error

    def feed(self, X: Any) -> dict[str, np.ndarray]:
        framed = hasattr(X, "columns")
        if not framed:
            X = np.asarray(X)
        if X.ndim != 2:
            raise SpecError(f"{self.path} wants rows of shape (n_rows, n_features), got an array of shape {X.shape}")
        if len(self.inputs) == 1:
            if self.n_features is not None and X.shape[1] != self.n_features:
                raise SpecError(f"{self.path} wants {self.n_features} columns, the rows have {X.shape[1]}")
            return {self.inputs[0].name: self.convert(X, self.inputs[0], "the rows")}
        assert self.feature_names is not None
        if framed:
            missing = [name for name in self.feature_names if name not in X.columns]
            if missing:
                raise SpecError(
                    f"{self.path} wants the columns {listed(missing)}, which the rows lack; they have "
                    f"{listed(X.columns)}"
                )
            columns = [X[name].to_numpy() for name in self.feature_names]
        elif X.shape[1] == self.n_features:
            columns = list(X.T)
        else:
            raise SpecError(f"{self.path} wants {self.n_features} columns, the rows have {X.shape[1]}")
        return {
            given.name: self.convert(column[:, None], given, f"the column {given.name!r}")
            for given, column in zip(self.inputs, columns, strict=True)
        }

    def convert(self, values: Any, given: Any, what: str) -> np.ndarray:
        """`values` in the input's type; what would be lost on the way (missing values, fractions) is an error."""
        import pandas as pd

        dtype = np.dtype(DTYPES[given.type])
        values = np.asarray(values)
        if dtype.kind != "f" and pd.isna(values).any():
            raise SpecError(f"{self.path} wants {given.type}, which has no missing values, and {what} has some")
        try:
            converted = np.ascontiguousarray(values.astype(dtype))
        except (TypeError, ValueError) as error:
            raise SpecError(f"{self.path} wants {given.type}, and {what} cannot be turned into it: {error}") from None
        if dtype.kind == "i" and values.dtype.kind == "f" and (converted != values).any():
            raise SpecError(f"{self.path} wants {given.type}, and {what} has fractions")
        return converted


PROBABILITIES = ("tensor(float)", "tensor(double)", "seq(map(int64,tensor(float)))", "seq(map(string,tensor(float)))")


def width(given: Any) -> int | None:
    """The number of columns of an input; None where the graph leaves it open."""
    size = given.shape[1] if len(given.shape) == 2 else None
    return size if isinstance(size, int) else None


def flat(values: np.ndarray) -> np.ndarray:
    return values[:, 0] if values.ndim == 2 and values.shape[1] == 1 else values
