"""Writing: whole or not at all, only what is the export's own, and never a damaged result."""

from dataclasses import replace

import pytest

from cameraready.evidence.export import FORMATS
from cameraready.evidence.export.landing import land_files, landing_folder
from cameraready.evidence.export.soundness import digest
from cameraready.evidence.soundness import check
from cameraready.evidence.subject import UsageError
from tests.evidence.report_runs import a_result


def test_either_all_files_are_written_or_none(tmp_path):
    (tmp_path / "a.csv").write_text("old")
    (tmp_path / "b.csv").mkdir()
    with pytest.raises(UsageError, match=r"b\.csv is a folder"):
        land_files(tmp_path, {"a.csv": b"new", "b.csv": b"new"})
    assert (tmp_path / "a.csv").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.csv", "b.csv"]


def test_a_folder_is_replaced_whole_or_stays_as_it_was(tmp_path):
    place = tmp_path / "book"
    with landing_folder(place) as folder:
        (folder / "page").write_text("1")
    with pytest.raises(FileNotFoundError), landing_folder(place) as folder:
        (folder / "page").rename(folder / "no" / "such" / "folder")
    assert (place / "page").read_text() == "1"
    with landing_folder(place) as folder:
        (folder / "other").write_text("3")
    assert [path.name for path in place.iterdir()] == ["other"]
    assert [path.name for path in tmp_path.iterdir()] == ["book"]


def test_what_is_not_the_exports_own_is_left_alone(result, tmp_path):
    (tmp_path / "mine.csv").write_text("mine")
    result.export("csv", tmp_path)
    result.export("csv", tmp_path)
    assert (tmp_path / "mine.csv").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 3


def test_a_file_in_the_way_of_the_folder_is_named(result, tmp_path):
    (tmp_path / "file").write_text("")
    for to in FORMATS:
        with pytest.raises(UsageError, match="file"):
            result.export(to, tmp_path / "file" / "sub")


@pytest.mark.parametrize("to", FORMATS)
def test_a_damaged_result_is_refused_by_every_format(to, tmp_path):
    damaged = a_result()
    damaged.claims[2] = replace(damaged.claims[2], estimate="0.3")
    with pytest.raises(ValueError, match=r"estimate of claim \w+ should be a number, got '0.3'"):
        damaged.export(to, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"label": 3}, "label of a claim should be text"),
        ({"verdict": "great"}, "known are holds, fails"),
        ({"blocks": 1.5}, "blocks of claim 1 should be a whole number"),
        ({"blocks": True}, "blocks of claim 1 is True"),
        ({"provisional": "no"}, "provisional of claim 1 should be true or false"),
        ({"workload": None}, "workload of claim 1 should be text"),
    ],
)
def test_a_verdict_that_is_none_is_named(result, change, message):
    with pytest.raises(ValueError, match=message):
        check(replace(result, claims=[replace(result.claims[0], **change)]))


@pytest.mark.parametrize(
    "change",
    [
        {"tier": 1},
        {"environment": []},
        {"environment": {"a": 1}},
        {"workloads": ["x"]},
        {"notes": "x"},
        {"seconds": "1"},
    ],
)
def test_provenance_that_is_none_is_refused(result, change):
    with pytest.raises(ValueError, match="damaged"):
        check(replace(result, **change))


def test_the_digest_tells_results_apart(result):
    assert digest(result) == digest(a_result())
    assert digest(result) != digest(replace(result, rows=result.rows.head(3)))
    assert digest(result) != digest(replace(result, answer="other"))


def test_formats_and_options_are_checked(result, tmp_path):
    with pytest.raises(UsageError, match="formats: csv, parquet, latex, pdf, mlflow, trackio"):
        result.export("excel", tmp_path)
    with pytest.raises(UsageError, match="takes no option 'publish'"):
        result.export("csv", tmp_path, publish=True)
    with pytest.raises(UsageError, match="into a folder"):
        result.export("csv", tmp_path / "x.csv")
