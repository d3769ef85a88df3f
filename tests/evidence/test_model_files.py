"""Models saved by their libraries predict the same when reopened, on other rows, orders and sets of columns."""

import io
import struct
import sys
import zipfile

import numpy as np
import pandas as pd
import pytest

from cameraready.evidence.specs import SpecError, open_model, parse, read_table


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


@pytest.fixture
def mixed():
    generator = np.random.default_rng(0)
    n = 200
    frame = pd.DataFrame(
        {
            "size": generator.normal(size=n),
            "color": generator.choice(["red", "green", "blue"], n),
            "rooms": generator.integers(0, 6, n),
            "sold": pd.date_range("2020-01-01", periods=n, freq="D"),
            "big": generator.random(n) < 0.5,
        }
    )
    frame.loc[::7, "size"] = np.nan
    frame.loc[::11, "color"] = None
    frame["price"] = frame["rooms"] + 3.0 * (frame["color"] == "red") + frame["size"].fillna(0)
    return frame


def understood(text):
    return parse(text, shipped=(), accepts=("table", "model"))


@pytest.mark.parametrize("file", ["m.txt", "m.json", "m.ubj"])
def test_boosted_trees_with_text_and_missing_values(here, mixed, file):
    rows = mixed.drop(columns=["sold", "price"]).rename(columns={"size": "living size"})
    typed = rows.astype({"color": "category"})
    if file == "m.txt":
        lightgbm = pytest.importorskip("lightgbm")
        model = lightgbm.LGBMRegressor(n_estimators=10, verbose=-1).fit(typed, mixed["price"])
        model.booster_.save_model(file)
    else:
        xgboost = pytest.importorskip("xgboost")
        model = xgboost.XGBRegressor(n_estimators=10, enable_categorical=True).fit(typed, mixed["price"])
        model.save_model(file)
    opened = open_model(understood(file))
    expected = model.predict(typed)
    assert np.ptp(expected) > 1
    np.testing.assert_array_equal(opened.predict(rows), expected)
    # A batch without blue: categories must keep their meaning, whatever the batch holds.
    part = rows[rows["color"] != "blue"].iloc[::-1][["rooms", "color", "big", "living size"]]
    np.testing.assert_array_equal(opened.predict(part.assign(extra=1)), expected[part.index])
    assert opened.n_features == 4
    with pytest.raises(SpecError, match=r"wants the columns .*rooms"):
        opened.predict(rows.drop(columns="rooms"))


@pytest.mark.parametrize("kind", ["lightgbm", "xgboost"])
def test_boosted_trees_on_arrays(here, kind):
    generator = np.random.default_rng(1)
    X = generator.normal(size=(150, 4))
    y = (X[:, 0] * X[:, 1] > 0).astype(int)
    if kind == "lightgbm":
        lightgbm = pytest.importorskip("lightgbm")
        booster = lightgbm.train({"objective": "binary", "verbose": -1}, lightgbm.Dataset(X, y), 10)
        booster.save_model("m.txt")
        expected = booster.predict(X)
    else:
        xgboost = pytest.importorskip("xgboost")
        booster = xgboost.train({"objective": "binary:logistic"}, xgboost.DMatrix(X, y), 10)
        booster.save_model("m.json")
        expected = booster.predict(xgboost.DMatrix(X))
    opened = open_model(understood("m.txt" if kind == "lightgbm" else "m.json"))
    assert opened.kind == kind
    assert opened.feature_names is None
    np.testing.assert_array_equal(opened.predict(X), expected)
    np.testing.assert_array_equal(opened(pd.DataFrame(X, columns=list("abcd"))), expected)
    with pytest.raises(SpecError, match="wants 4 columns, the rows have 3"):
        opened.predict(X[:, :3])
    with pytest.raises(SpecError, match=r"shape \(4,\)"):
        opened.predict(X[0])


def test_skops_pipeline_on_a_mixed_table(here, mixed):
    sio = pytest.importorskip("skops.io")
    from sklearn.compose import make_column_transformer
    from sklearn.impute import SimpleImputer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    rows = mixed.drop(columns=["sold", "price"]).fillna({"color": "none"})
    labels = np.where(mixed["price"] > 3, "dear", "cheap")
    prepare = make_column_transformer(
        (make_pipeline(SimpleImputer(), StandardScaler()), ["size", "rooms"]),
        (OneHotEncoder(handle_unknown="ignore"), ["color", "big"]),
    )
    model = make_pipeline(prepare, LogisticRegression()).fit(rows, labels)
    sio.dump(model, "m.skops")
    opened = open_model(understood("m.skops"))
    assert opened.feature_names == list(rows.columns)
    assert (opened.predict(rows[rows.columns[::-1]]) == model.predict(rows)).all()
    np.testing.assert_array_equal(opened.predict_proba(rows), model.predict_proba(rows))
    mixed.assign(label=labels).drop(columns=["sold", "price"]).fillna({"color": "none"}).to_csv("rows.csv", index=False)
    X, y = read_table(understood("m.skops:data=rows.csv,target=label"))
    assert (opened.predict(X) == model.predict(rows)).all()
    assert (y == labels).all()


def test_skops_with_types_that_nobody_vouches_for(here):
    sio = pytest.importorskip("skops.io")
    from sklearn.linear_model import LinearRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import FunctionTransformer

    X = np.arange(12.0).reshape(6, 2)
    model = make_pipeline(FunctionTransformer(distance), LinearRegression()).fit(X, X[:, 0])
    sio.dump(model, "m.skops")
    with pytest.raises(SpecError, match=r"does not trust by itself: .*distance; .*package.module:object"):
        open_model(understood("m.skops"))
    sio.dump({"a": 1}, "d.skops")
    with pytest.raises(SpecError, match="cannot predict"):
        open_model(understood("d.skops"))


def test_onnx_matrix(here):
    pytest.importorskip("onnxruntime")
    generator = np.random.default_rng(2)
    weight, X = generator.normal(size=(3, 1)).astype("f4"), generator.normal(size=(20, 3))
    (here / "m.onnx").write_bytes(onnx_linear(weight))
    opened = open_model(understood("m.onnx"))
    expected = X.astype("f4") @ weight[:, 0]
    np.testing.assert_allclose(opened.predict(X), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(opened.predict(pd.DataFrame(X)), expected, rtol=1e-5, atol=1e-6)
    assert opened.n_features == 3
    with pytest.raises(SpecError, match="wants 3 columns, the rows have 2"):
        opened.predict(X[:, :2])
    with pytest.raises(SpecError, match="cannot be turned into it"):
        opened.predict(pd.DataFrame({"a": ["x"], "b": ["y"], "c": ["z"]}))


def test_onnx_columns(here):
    pytest.importorskip("onnxruntime")
    (here / "m.onnx").write_bytes(onnx_sum_of_columns("age", "income"))
    opened = open_model(understood("m.onnx"))
    rows = pd.DataFrame({"income": [1.0, 2.0], "other": ["x", "y"], "age": [10.0, 20.0]})
    assert opened.feature_names == ["age", "income"]
    assert opened.predict(rows).tolist() == [11.0, 22.0]
    assert opened.predict(rows[["age", "income"]].to_numpy()).tolist() == [11.0, 22.0]
    with pytest.raises(SpecError, match="wants the columns age, which the rows lack; they have income, other"):
        opened.predict(rows.drop(columns="age"))


def test_onnx_loses_nothing_on_the_way(here):
    pytest.importorskip("onnxruntime")
    (here / "m.onnx").write_bytes(onnx_sum_of_columns("a", "b", INT64))
    opened = open_model(understood("m.onnx"))
    rows = pd.DataFrame({"a": [1.0, 2.0], "b": [3, 4]})
    assert opened.predict(rows).tolist() == [4, 6]
    with pytest.raises(SpecError, match="the column 'a' has some"):
        opened.predict(rows.assign(a=[1.0, None]))
    with pytest.raises(SpecError, match="the column 'a' has fractions"):
        opened.predict(rows.assign(a=[1.5, 2.0]))
    (here / "text.onnx").write_bytes(onnx_identity(["n", 2], STRING))
    text = open_model(understood("text.onnx"))
    assert text.predict(pd.DataFrame({"a": ["x", "ü"], "b": ["y", ""]})).tolist() == [["x", "y"], ["ü", ""]]
    with pytest.raises(SpecError, match="has some"):
        text.predict(pd.DataFrame({"a": ["x", None], "b": ["y", "z"]}))


def test_onnx_of_something_else_than_tables(here):
    pytest.importorskip("onnxruntime")
    (here / "image.onnx").write_bytes(onnx_identity([1, 3, 8, 8]))
    with pytest.raises(SpecError, match=r"takes an array of shape \(1, 3, 8, 8\), not a table"):
        open_model(understood("image.onnx"))


def test_files_that_are_not_what_they_say(here):
    contents = {
        "m.txt": (b"tree\nversion=v4\nnum_class=1\n", "damaged"),
        "n.txt": (b"some notes\n", "is no model of LightGBM"),
        "m.json": (b'{"tree_info": []}', "LightGBM's dump"),
        "n.json": (b'{"a": 1}', "no model of XGBoost"),
        "o.json": (b'{"learner": {}}', "no model of XGBoost, or damaged"),
        "p.json": (b"[" * 100_000, "is not JSON"),
        "q.json": (b"\xff\xfe", "is not JSON"),
        "m.ubj": (b"{garbage", "no model of XGBoost, or damaged"),
        "m.skops": (b"garbage", "is no skops file"),
        "n.skops": (zipped({"schema.json": b"{}"}), "damaged"),
        "o.skops": (zipped({"other": b""}), "damaged"),
        "m.onnx": (b"garbage", "no ONNX model"),
        "empty.onnx": (b"", "is empty"),
    }
    for name, (content, message) in contents.items():
        (here / name).write_bytes(content)
        with pytest.raises(SpecError, match=message):
            open_model(understood(name))


@pytest.mark.parametrize(
    ("file", "library"),
    [("m.txt", "lightgbm"), ("m.ubj", "xgboost"), ("m.skops", "skops"), ("m.onnx", "onnxruntime")],
)
def test_missing_library_names_the_extra(here, monkeypatch, file, library):
    (here / file).write_bytes(b"tree\n")
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(SpecError, match=rf'needs {library}: pip install "cameraready\[formats\]"'):
        open_model(understood(file))


def distance(values):
    return values


def zipped(files):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return stream.getvalue()


# --- ONNX files, written in protobuf's wire format so that the tests need no converter ------------------------------


def field(number, value):
    """One protobuf field: an int as a varint, bytes or text with its length."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    value = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(value)) + value


def varint(value):
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def onnx_value(name, shape, element=1):
    dims = b"".join(field(1, field(2, size) if isinstance(size, str) else field(1, size)) for size in shape)
    return field(1, name) + field(2, field(1, field(1, element) + field(2, dims)))


def onnx_node(operator, inputs, outputs):
    return (
        b"".join(field(1, name) for name in inputs) + b"".join(field(2, name) for name in outputs) + field(4, operator)
    )


def onnx_model(nodes, inputs, outputs, weights=()):
    graph = (
        b"".join(field(1, node) for node in nodes)
        + field(2, "graph")
        + b"".join(field(5, weight) for weight in weights)
    )
    graph += b"".join(field(11, value) for value in inputs) + b"".join(field(12, value) for value in outputs)
    return field(1, 8) + field(7, graph) + field(8, field(1, "") + field(2, 13))  # IR version 8, operator set 13


def onnx_linear(weight):
    data = struct.pack(f"<{weight.size}f", *weight.ravel())
    tensor = b"".join(field(1, size) for size in weight.shape) + field(2, 1) + field(8, "W") + field(9, data)
    return onnx_model(
        [onnx_node("MatMul", ["X", "W"], ["Y"])],
        [onnx_value("X", ["n", weight.shape[0]])],
        [onnx_value("Y", ["n", 1])],
        [tensor],
    )


FLOAT, INT64, STRING = 1, 7, 8


def onnx_sum_of_columns(first, second, element=FLOAT):
    return onnx_model(
        [onnx_node("Add", [first, second], ["Y"])],
        [onnx_value(first, ["n", 1], element), onnx_value(second, ["n", 1], element)],
        [onnx_value("Y", ["n", 1], element)],
    )


def onnx_identity(shape, element=FLOAT):
    return onnx_model(
        [onnx_node("Identity", ["X"], ["Y"])], [onnx_value("X", shape, element)], [onnx_value("Y", shape, element)]
    )
