"""CSV and Parquet: what other libraries read back is what was measured."""

import datetime
import math
from dataclasses import fields, replace
from pathlib import Path

import pandas as pd
import polars as pl
import pytest
from polars.testing import assert_frame_equal

from cameraready.evidence.export.frames import CLAIM_COLUMNS, claims_frame, flat_frame
from cameraready.evidence.outcomes import Verdict
from tests.evidence.report_runs import a_result

DOCS = Path(__file__).parents[3] / "docs" / "exports.md"


@pytest.mark.parametrize("which", ["result", "nasty"])
def test_parquet_is_read_back_equal_by_polars_and_pandas(which, request, tmp_path):
    result = request.getfixturevalue(which)
    claims, rows = result.export("parquet", tmp_path)
    assert [Path(claims).name, Path(rows).name] == ["oddshap-claims.parquet", "oddshap-rows.parquet"]
    assert_frame_equal(pl.read_parquet(rows), result.rows)
    assert_frame_equal(pl.read_parquet(claims), claims_frame(result))
    frame = pd.read_parquet(claims)
    assert list(frame.columns) == list(CLAIM_COLUMNS)
    assert frame["claim"].tolist() == [v.claim for v in result.claims_shown]


@pytest.mark.parametrize("which", ["result", "nasty"])
def test_csv_is_read_back_equal_by_polars(which, request, tmp_path):
    result = request.getfixturevalue(which)
    claims, rows = result.export("csv", tmp_path)
    assert_frame_equal(pl.read_csv(claims, schema=CLAIM_COLUMNS), claims_frame(result))
    assert_frame_equal(pl.read_csv(rows, schema=result.rows.schema), result.rows)


def test_csv_is_read_back_by_pandas_to_the_last_digit(result, tmp_path):
    claims, rows = result.export("csv", tmp_path)
    frame = pd.read_csv(claims)
    for column in ("estimate", "low", "high"):
        for read, verdict in zip(frame[column], result.claims_shown, strict=True):
            value = getattr(verdict, column)
            assert (value is None and math.isnan(read)) or read == value
    assert pd.read_csv(rows)["mse"].dropna().tolist() == result.rows["mse"].drop_nulls().to_list()


def test_every_field_of_a_verdict_is_a_column_and_documented():
    assert {field.name for field in fields(Verdict)} | {"method", "tier"} == set(CLAIM_COLUMNS)
    text = DOCS.read_text(encoding="utf-8")
    assert [name for name in CLAIM_COLUMNS if f"`{name}`" not in text] == []


def test_missing_infinite_and_undefined_numbers_stay_apart(result, tmp_path):
    values = [None, math.nan, math.inf, -math.inf, 0.1 + 0.2]
    first = result.claims[0]
    odd = replace(result, claims=[replace(first, label=str(i), estimate=v) for i, v in enumerate(values)])
    for to, read in (("csv", lambda p: pl.read_csv(p, schema=CLAIM_COLUMNS)), ("parquet", pl.read_parquet)):
        column = read(odd.export(to, tmp_path)[0]).sort("label")["estimate"]
        assert column.is_null().to_list() == [True, False, False, False, False]
        assert column.is_nan().to_list()[1]
        assert column.to_list()[2:] == values[2:]


def test_columns_without_a_place_in_csv_are_told_in_text(tmp_path):
    rows = pl.DataFrame(
        {
            "list": [[1, 2], None],
            "struct": [{"a": 1.5}, {"a": None}],
            "bytes": [b"\x00\xff", None],
            "took": [datetime.timedelta(seconds=1, milliseconds=500), None],
            "day": [datetime.date(2026, 7, 1), None],
            "text": ["", None],
        }
    )
    flat = flat_frame(rows)
    assert flat["list"].to_list() == ["[1, 2]", None]
    assert flat["struct"].to_list() == ['{"a": 1.5}', '{"a": null}']
    assert flat["bytes"].to_list() == ["00ff", None]
    assert flat["took"].to_list() == [1.5, None]
    _, path = a_result(rows=rows).export("csv", tmp_path)
    assert_frame_equal(pl.read_csv(path, schema=flat.schema), flat)  # the empty text is not the missing one
    _, path = a_result(rows=rows).export("parquet", tmp_path)
    assert_frame_equal(pl.read_parquet(path), rows)
