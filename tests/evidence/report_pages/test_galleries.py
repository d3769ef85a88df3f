"""Pictures that trials returned: shown arm by arm, the method's first, only as an image, and only what is one."""

import base64
import re
from dataclasses import replace

import polars as pl
import pytest

from cameraready.evidence.report import galleries, page, render
from cameraready.evidence.study import Gallery
from tests.evidence.report_runs import a_frame, a_result, a_study

HOSTILE = '<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>'
DOT = "data:image/png;base64,iVBORw0KGgo="


def a_run(picture, *, study=None, per_arm=2):
    """A run whose first rows of every arm carry a picture."""
    gallery = Gallery("Samples & such", alt="seen", caption="below", per_arm=per_arm)
    study = study or a_study(galleries=[gallery])
    rows = a_frame().with_row_index().with_columns(
        picture=pl.when(pl.col("instance") < 3).then(pl.lit(picture)),
        seen=pl.concat_str(pl.lit("a <digit> of "), pl.col("estimator")),
        below=pl.concat_str(pl.lit("row "), pl.col("index").cast(pl.String)),
    )  # fmt: skip
    return replace(a_result(study=study), rows=rows)


def images(html):
    return re.findall(r'<img src="([^"]*)" alt="([^"]*)">', html)


def test_each_arm_shows_its_first_pictures_and_the_method_comes_first():
    result = a_run(DOT)
    (view,) = page.gallery_views(result)
    assert [workload for workload, _ in view.panels] == ["breast-cancer", "digits"]
    for workload, arms in view.panels:
        assert arms[0][0] == result.study.method
        assert {arm for arm, _ in arms} == set(result.rows["estimator"])
        for arm, shown in arms:
            mine = result.rows.filter(
                (pl.col("workload") == workload) & (pl.col("estimator") == arm) & pl.col("picture").is_not_null()
            )
            assert [each.caption for each in shown] == mine["below"].to_list()[:2]
            assert {each.alt for each in shown} == {f"a <digit> of {arm}"}


def test_a_page_holds_pictures_as_images_alone():
    """In an image a document runs no script; its text never becomes part of the page."""
    html = render(a_run(HOSTILE))
    shown = images(html)
    assert shown
    assert "alert(1)" not in html
    for source, alt in shown:
        kind, _, code = source.partition("base64,")
        assert kind == "data:image/svg+xml;"
        assert base64.b64decode(code).decode() == HOSTILE
        assert "&lt;digit&gt;" in alt
    assert 'href="#pictures"' in html


@pytest.mark.parametrize(
    ("picture", "words"),
    [
        ("https://example.org/x.png", "must be an SVG document"),
        ("javascript:alert(1)", "must be an SVG document"),
        ('data:image/png;base64,AA" onerror="x', "must be an SVG document"),
        ("<svg" + " " * galleries.MOST_CHARACTERS, "is over the"),
    ],
)
def test_what_is_no_picture_is_told_and_not_shown(picture, words):
    result = a_run(picture)
    (view,) = page.gallery_views(result)
    assert view.panels == []
    assert words in view.left_out
    assert images(render(result)) == []


def test_a_run_without_pictures_has_no_such_part():
    bare = a_result(study=a_study(galleries=[Gallery("Samples")]))
    assert 'id="pictures"' not in render(bare)
    assert page.gallery_views(bare)[0].left_out == "no finished trial of this run made its pictures"


def test_a_gallery_about_own_workloads_shows_the_users_and_no_other():
    gallery = Gallery("Samples", workloads=["own"])
    result = a_run(DOT, study=a_study(galleries=[gallery]))
    assert page.gallery_views(result)[0].panels == []
    shipped = set(result.rows["workload"])
    renamed = replace(result, rows=result.rows.with_columns(workload=pl.col("workload").replace("digits", "mine.csv")))
    assert [workload for workload, _ in page.gallery_views(renamed)[0].panels] == ["mine.csv"]
    assert "mine.csv" not in shipped
