"""The user's tables: types are kept, and whatever is wrong with a file is said in a sentence."""

import os
import pickle
import sys

import numpy as np
import pandas as pd
import pytest

from cameraready.evidence.specs import SpecError, open_model, parse, read_columns, read_table


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


def table_refusal(text):
    with pytest.raises(SpecError) as caught:
        read_table(understood(text))
    return str(caught.value)


def test_types_are_kept(here, mixed):
    mixed.to_parquet("t.parquet")
    mixed.assign(color=mixed["color"].astype("category")).to_parquet("c.parquet")
    mixed.to_csv("t.csv", index=False)
    mixed.to_csv("labelled.csv")
    mixed.to_csv("t.tsv", sep="\t", index=False)
    mixed.assign(sold=mixed["sold"].astype(str)).to_json("t.jsonl", orient="records", lines=True, double_precision=15)
    for file in ("t.parquet", "c.parquet", "t.csv", "labelled.csv", "t.tsv", "t.jsonl"):
        X, y = read_table(understood(f"{file}:price"))
        assert list(X.columns) == ["size", "color", "rooms", "sold", "big"], file
        np.testing.assert_allclose(y, mixed["price"], rtol=1e-12)
        np.testing.assert_allclose(X["size"], mixed["size"], rtol=1e-9)
        assert X["rooms"].dtype.kind == "i"
        assert X["big"].dtype.kind == "b"
        assert X["sold"].dtype.kind == "M", file
        assert (X["sold"] == mixed["sold"]).all()
        assert (X["color"].isna() == mixed["color"].isna()).all()
        assert (X["color"].dropna().astype(str) == mixed["color"].dropna()).all()
    assert read_table(understood("c.parquet:price"))[0]["color"].dtype == "category"


def test_text_stays_text(here):
    (here / "t.csv").write_text("code,day,y\n2020-01-01,x\n".replace("day,", "", 1) + "2021-02-30,z\n")
    X, _ = read_table(understood("t.csv:y"))  # 30 February is no date
    assert list(X["code"]) == ["2020-01-01", "2021-02-30"]
    (here / "t.jsonl").write_text('{"zip": "007", "y": 1}\n{"zip": "070", "y": 2}\n')
    X, _ = read_table(understood("t.jsonl:y"))
    assert list(X["zip"]) == ["007", "070"]


def test_mixed_column_becomes_text(here):
    (here / "t.jsonl").write_text('{"a": 1, "y": 1}\n{"a": "one", "y": 2}\n{"a": null, "y": 3}\n')
    X, _ = read_table(understood("t.jsonl:y"))
    assert list(X["a"][:2]) == ["1", "one"]
    assert X["a"].isna().tolist() == [False, False, True]


def test_rows_without_a_target_are_left_out_with_a_count(here):
    (here / "t.csv").write_text("a,y\n1,0\n2,\n3,1\n4,NA\n")
    with pytest.warns(UserWarning, match="2 of 4 rows of t.csv have no y"):
        X, y = read_table(understood("t.csv:y"))
    assert X["a"].tolist() == [1, 3]
    assert y.tolist() == [0, 1]
    assert X.index.tolist() == y.index.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a,y\n1,\n2,\n", "the target 'y' of t.csv is missing in every row"),
        ("a,y\n1,inf\n2,3\n", "infinite"),
        ("a,a,y\n1,2,3\n", "several columns named a"),
        ("a,,y\n1,2,3\n", "column 2 of"),
        ("a,y\n", "has no rows"),
        ("", "is empty"),
        ("  \n \n", "is empty"),
        ("y\n1\n", "has no column beside y"),
        ("a;y\n1;2\n", "separated by semicolons"),
        ("a,y\n1,2,3,4\n1,2\n1,2,3,4,5,6\n", "cannot be read as .csv"),
        ('a,y\n"1,2\n', "cannot be read as .csv"),
    ],
)
def test_what_is_wrong_is_said(here, content, message):
    (here / "t.csv").write_text(content)
    assert message in table_refusal("t.csv:y")


def test_missing_columns_and_near_misses(here):
    (here / "t.csv").write_text("Price,area,city\n1,2,3\n")
    assert "did you mean 'Price'" in table_refusal("t.csv:price")
    assert "the columns are Price, area, city" in table_refusal("t.csv:zzzz")
    assert "name the column to predict: t.csv:COLUMN; the columns are Price, area, city" in table_refusal("t.csv")
    assert len(table_refusal("t.csv:" + "z" * 100_000)) < 500


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (pickle.dumps({"a": 1}), "is a pickle under a wrong name"),
        (b"PK\x03\x04junk", "zip archive"),
        (b"\x1f\x8b\x08junk", "gzip"),
        ("a,y\n1,2\n".encode("utf-16"), "UTF-16"),
        ("a,y\né,2\n".encode("latin-1"), "not UTF-8 text (byte 0xe9)"),
        (bytes(range(256)) * 9, "binary"),
    ],
)
def test_binary_under_a_wrong_name(here, start, message):
    (here / "t.csv").write_bytes(start)
    assert message in table_refusal("t.csv:y")
    (here / "t.jsonl").write_bytes(start)
    assert message in table_refusal("t.jsonl:y")


def test_pickle_named_as_a_table_does_not_run(here):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(here / "exploded"),)

    for protocol in range(6):
        for name in ("t.csv", "t.tsv", "t.parquet", "t.jsonl"):
            (here / name).write_bytes(pickle.dumps(Bomb(), protocol=protocol))
            table_refusal(f"{name}:y")
        for name in ("m.txt", "m.json", "m.ubj", "m.skops", "m.onnx"):
            (here / name).write_bytes(pickle.dumps(Bomb(), protocol=protocol))
            with pytest.raises(SpecError):
                open_model(understood(name))
    assert not (here / "exploded").exists()


def test_garbage_in_every_format(here):
    noise = np.random.default_rng(0).bytes(5000)
    for suffix in (".parquet", ".jsonl", ".csv", ".tsv"):
        (here / f"t{suffix}").write_bytes(noise)
        assert f"t{suffix}" in table_refusal(f"t{suffix}:y")
    (here / "t.jsonl").write_text('{"a": 1, "y"')
    assert "line 1 of" in table_refusal("t.jsonl:y")
    (here / "t.jsonl").write_text('{"a": 1, "y": 2}\n[1, 2]\n')
    assert "line 2 of" in table_refusal("t.jsonl:y")
    (here / "t.jsonl").write_text('{"a": 1, "a": 2, "y": 3}\n')
    assert "several values are named a" in table_refusal("t.jsonl:y")
    (here / "t.jsonl").write_text("[" * 50_000)
    assert "line 1 of" in table_refusal("t.jsonl:y")


def test_nested_values_are_refused(here):
    (here / "t.jsonl").write_text('{"a": [1, 2], "y": 1}\n{"a": [3], "y": 2}\n')
    assert "holds list values" in table_refusal("t.jsonl:y")
    pd.DataFrame({"a": [[1, 2], [3]], "y": [1, 2]}).to_parquet("t.parquet")
    assert "the column 'a'" in table_refusal("t.parquet:y")


def test_duplicate_names_in_parquet(here):
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table([[1], [2], [3]], names=["a", "a", "y"])
    pyarrow.parquet.write_table(table, "t.parquet")
    assert "several columns named a" in table_refusal("t.parquet:y")


def test_file_that_vanished_after_parsing(here):
    (here / "t.csv").write_text("a,y\n1,2\n")
    spec = understood("t.csv:y")
    (here / "t.csv").unlink()
    with pytest.raises(SpecError, match="cannot be read: No such file"):
        read_table(spec)
    with pytest.raises(SpecError, match="cannot be read: No such file"):
        spec.content_digest()


def test_roles(here, mixed):
    mixed.to_csv("t.csv", index=False)
    X, columns = read_columns(understood("t.csv:outcome=price,treatment=big"), ["outcome", "treatment"])
    assert list(X.columns) == ["size", "color", "rooms", "sold"]
    assert (columns["treatment"] == mixed["big"]).all()
    with pytest.raises(SpecError, match=r"outcomee= means nothing .* did you mean outcome="):
        read_columns(understood("t.csv:outcomee=price,treatment=big"), ["outcome", "treatment"])
    with pytest.raises(SpecError, match=r"name the column of treatment: t\.csv:outcome=COLUMN,treatment=COLUMN"):
        read_columns(understood("t.csv:outcome=price"), ["outcome", "treatment"])
    with pytest.raises(SpecError, match="named for two roles"):
        read_columns(understood("t.csv:outcome=price,treatment=price"), ["outcome", "treatment"])


def test_missing_library_names_the_extra(here, mixed, monkeypatch):
    mixed.to_parquet("t.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert 'needs pyarrow: pip install "cameraready[formats]"' in table_refusal("t.parquet:price")
