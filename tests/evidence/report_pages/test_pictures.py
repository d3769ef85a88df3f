"""The pictures of a page show the numbers, say them in words, and stay readable."""

import re
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import polars as pl
import pytest

from cameraready.evidence.report import (
    charts,
    curves,
    drawing,
    render,
    wording,
)
from cameraready.evidence.report.drawing import svg
from cameraready.evidence.rules import below
from cameraready.evidence.study import Figure
from tests.evidence.report_pages.reading import Page
from tests.evidence.report_runs import a_frame, a_result, a_study


def claim_of(result, label):
    return next(c for c in result.study.claims if c.label == label), [v for v in result.claims if v.label == label]


def marks(drawn, colour_of):
    """Horizontal bars of a claim's picture as (left, right), from the top."""
    bars = []
    for path in ElementTree.fromstring(drawn).iter("path"):
        if path.get("stroke-width") == "3" and path.get("stroke") in colour_of:
            for left, top, along in re.findall(r"M([-\d.]+),([-\d.]+)h([-\d.]+)", path.get("d")):
                bars.append((float(top), *sorted((float(left), float(left) + float(along)))))
    return [(left, right) for _, left, right in sorted(bars)]


@pytest.mark.parametrize("label", ["3a", "3b", "5"])
def test_bars_lie_where_the_intervals_are(result, label):
    """Positions in the picture are an increasing affine map of the (log) limits, the same for all rows."""
    claim, verdicts = claim_of(result, label)
    colours = {f"var(--{look.tone})" for look in wording.LOOKS.values()}
    bars = np.array(marks(charts.claim_chart(claim, verdicts), colours))
    limits = np.array([(v.low, v.high) for v in verdicts])
    limits = np.log(limits) if claim.measure.log_scale else limits
    slope, shift = np.polyfit(limits.ravel(), bars.ravel(), 1)
    assert slope > 0
    np.testing.assert_allclose(slope * limits + shift, bars, atol=0.15)  # positions are written to a tenth


def test_a_picture_says_its_numbers_to_those_who_cannot_see_it(result):
    claim, verdicts = claim_of(result, "3a")
    said = ElementTree.fromstring(charts.claim_chart(claim, verdicts)).find("desc").text
    for verdict in verdicts:
        assert wording.estimate(verdict) in said
        assert verdict.verdict in said
    assert claim.rule.describe() in said


def test_nothing_measured_gives_no_picture(result):
    claim, verdicts = claim_of(result, "3a")
    assert charts.claim_chart(claim, [replace(v, estimate=None, low=None, high=None) for v in verdicts]) == ""
    assert charts.claim_chart(claim, [replace(v, estimate=float("inf")) for v in verdicts]) == ""


@pytest.mark.parametrize(
    ("estimate", "low", "high"),
    [(0.0, 0.0, 0.0), (1e-14, 1e-15, 1e-13), (5.0, 0.0, 1e12), (0.2, float("-inf"), float("inf")), (1.0, 1.0, 1.0)],
)
@pytest.mark.parametrize("label", ["3a", "3c", "4", "5"])
def test_extreme_intervals_stay_in_the_picture(result, label, estimate, low, high):
    claim, verdicts = claim_of(result, label)
    drawn = charts.claim_chart(claim, [replace(verdicts[0], estimate=estimate, low=low, high=high)])
    assert "NaN" not in drawn
    assert "Infinity" not in drawn
    for left, right in marks(drawn, {f"var(--{look.tone})" for look in wording.LOOKS.values()}):
        assert -1 <= left <= right <= charts.WIDTH + 1


def test_curves_are_medians_and_quartiles_over_blocks():
    rows = a_frame()
    (panel, _) = curves.figure_panels(
        Figure("t", "budget", "mse"), a_study(), rows, curves.arm_styles(a_study(), ["oddshap"]), 1
    )
    mine = rows.filter((pl.col("workload") == "breast-cancer") & (pl.col("estimator") == "oddshap"))
    expected = [float(np.median(mine.filter(pl.col("budget") == x)["mse"])) for x in panel.xs]
    assert panel.xs == [300, 1_000, 3_000, 10_000]
    np.testing.assert_allclose(panel.medians["oddshap"], expected, rtol=1e-12)
    assert panel.blocks == 15


def test_a_figure_about_own_workloads_shows_the_users_and_no_other():
    study = a_study()
    shipped = next(name for names in study.workloads.values() for name in names)
    rows = a_frame((shipped, "mine.gguf"))
    styles = curves.arm_styles(study, ["oddshap"])

    def panels(*names):
        figure = Figure("t", "budget", "mse", workloads=list(names))
        return [panel.workload for panel in curves.figure_panels(figure, study, rows, styles, 1)]

    assert panels("own") == ["mine.gguf"]
    assert panels(shipped) == [shipped]
    assert panels(shipped, "own") == [shipped, "mine.gguf"]


def test_several_rows_of_a_block_count_once():
    rows = a_frame(("w",))
    twice = pl.concat([rows, rows.filter(pl.col("instance") == 0)], how="vertical")
    styles = curves.arm_styles(a_study(), ["oddshap", "kernel"])
    once = curves.figure_panels(Figure("t", "budget", "mse"), a_study(), rows, styles, 1)
    again = curves.figure_panels(Figure("t", "budget", "mse"), a_study(), twice, styles, 1)
    assert once[0].medians.keys() == again[0].medians.keys()
    for arm, medians in once[0].medians.items():
        np.testing.assert_allclose(again[0].medians[arm], medians, rtol=1e-12)


def test_zeros_on_a_logarithmic_axis_are_counted_not_hidden():
    rows = a_frame(("w",)).with_columns(
        mse=pl.when((pl.col("estimator") == "oddshap") & (pl.col("budget") == 10_000))
        .then(0.0)
        .otherwise(pl.col("mse"))
    )
    styles = curves.arm_styles(a_study(), ["oddshap", "kernel"])
    (panel,) = curves.figure_panels(Figure("t", "budget", "mse"), a_study(), rows, styles, 1)
    assert panel.undrawn == 1
    assert panel.medians["oddshap"][-1] == 0.0


def test_a_figure_of_a_missing_column_is_left_out_with_a_note():
    study = a_study(figures=[Figure("t", "budget", "msee")])
    text = "".join(Page(render(a_result(study=study))).words)
    assert "Left out: figure 't' needs column 'msee'; did you mean " in text


def test_figures_about_other_workloads_are_one_folded_line():
    """On a workload of the user's nothing is said of columns that only the shipped ones have."""
    figures = [
        Figure("of the user's", "budget", "mse", workloads=["digits", "own"]),
        Figure("of digits", "budget", "mse", workloads=["digits"]),
        Figure("of a column that own runs lack", "step", "accuracy_now"),
    ]
    own = a_result(("mine.csv",), own=True, study=a_study(figures=figures))
    page = Page(render(own))
    text = " ".join("".join(page.words).split())
    assert "Figures about the shipped workloads are left out (2)" in text
    assert "Left out:" not in text
    assert "accuracy_now" not in text
    assert not page.misnested
    unmeasured = [*figures, Figure("of the user's, unmeasured", "step", "accuracy_now", workloads=["digits", "own"])]
    text = "".join(Page(render(replace(own, study=a_study(figures=unmeasured)))).words)
    assert "Figures about the shipped workloads, or of what was not measured here, are left out (3)" in text
    assert "accuracy_now" not in text
    shipped = "".join(Page(render(a_result(("breast-cancer",), study=a_study(figures=figures[:2])))).words)
    assert "Figures about other workloads are left out (2)" in shipped


def test_every_arm_has_a_look_of_its_own():
    arms = [f"arm{i}" for i in range(20)] + ["oddshap"]
    styles = curves.arm_styles(a_study(), arms)
    assert styles[0].arm == "oddshap"
    assert len({(s.colour, tuple(s.dash)) for s in styles}) == len(arms)


@pytest.mark.parametrize("domain", [(1e-9, 1e-3), (0.9, 1.1), (0.1, 3.0), (2e-5, 7e4), (0.31, 0.33)])
def test_ticks_are_round_inside_and_few(domain):
    ticks = drawing.log_ticks(domain)
    assert 2 <= len(ticks) <= 9
    assert all(domain[0] <= tick <= domain[1] for tick in ticks)
    mantissas = [f"{tick:.6e}".partition("e")[0].rstrip("0").rstrip(".") for tick in ticks]
    assert all(len(mantissa) <= 4 for mantissa in mantissas)


def test_a_pictures_ids_are_its_own():
    clipped = '<clipPath id="c"><path d="M0,0h1.23456v1"/></clipPath><g clip-path="url(#c)"><text>a &lt; b</text></g>'
    drawn = f'<svg xmlns="http://www.w3.org/2000/svg" width="10" height="10">{clipped}</svg>'
    fitted = svg.for_page(drawn, name="x", title="<t>", description="d & e")
    root = ElementTree.fromstring(fitted)
    assert {e.get("id") for e in root.iter() if e.get("id")} == {"x-c", "x-title", "x-description"}
    assert root.find("g").get("clip-path") == "url(#x-c)"
    assert root.find("title").text == "<t>"
    assert root.find("g/text").text == "a < b"


@pytest.mark.parametrize(
    ("shape", "moved"),
    [
        ("M-1,-1h2v2h-2Z", "M9,19h2v2h-2Z"),
        ("M2,0A2,2,0,1,1,-2,0A2,2,0,1,1,2,0", "M12,20A2,2,0,1,1,8,20A2,2,0,1,1,12,20"),
        ("M0,-3L2,1.5L-2,1.5Z", "M10,17L12,21.5L8,21.5Z"),
    ],
)
def test_points_that_look_the_same_are_one_path_in_the_same_places(shape, moved):
    points = "".join(f'<path transform="translate({x},20)" d="{shape}" fill="var(--good)"/>' for x in (10, 10))
    other = f'<path transform="translate(10,20)" d="{shape}" fill="var(--bad)"/>'
    fitted = svg.for_page(f'<svg width="9" height="9">{points}{other}</svg>', name="x", title="t", description="d")
    paths = [(p.get("d"), p.get("fill")) for p in ElementTree.fromstring(fitted).iter("path")]
    assert paths == [(moved * 2, "var(--good)"), (moved, "var(--bad)")]


def test_a_path_that_cannot_be_moved_keeps_its_transform():
    drawn = '<svg width="9" height="9"><path transform="translate(1,2)" d="M0,0C1,1,2,2,3,3" fill="var(--good)"/></svg>'
    root = ElementTree.fromstring(svg.for_page(drawn, name="x", title="t", description="d"))
    assert root.find("path").attrib == {"transform": "translate(1,2)", "d": "M0,0C1,1,2,2,3,3", "fill": "var(--good)"}


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0.975, 1.025, ["0.98", "1", "1.02"]), (0.9, 1.12, ["0.9", "1", "1.1"]), (0.5, 2.0, ["0.5", "1", "2"])],
)
def test_around_one_the_axis_says_where_one_is(result, low, high, expected):
    claim, verdicts = claim_of(result, "3a")
    near = [replace(v, low=low, estimate=1.0, high=high) for v in verdicts]
    drawn = charts.claim_chart(replace(claim, rule=below(1)), near)
    labels = [text.text for text in ElementTree.fromstring(drawn).iter("text")]
    assert set(expected) <= set(labels)


def test_the_limit_of_the_rule_is_on_the_axis(result):
    claim, verdicts = claim_of(result, "3a")
    labels = [text.text for text in ElementTree.fromstring(charts.claim_chart(claim, verdicts)).iter("text")]
    assert "0.333" in labels


def test_the_legend_follows_the_ends_of_the_curves():
    study, rows = a_study(), a_frame(("w",))
    styles = curves.arm_styles(study, ["oddshap", "leverage", "permutation", "kernel", "svarm", "proxyshap"])
    panels = curves.figure_panels(Figure("t", "budget", "mse"), study, rows, styles, 1)
    at_end = rows.filter((pl.col("budget") == 10_000) & pl.col("mse").is_not_null())
    ends = {arm: float(np.median(at_end.filter(pl.col("estimator") == arm)["mse"])) for arm in panels[0].medians}
    expected = sorted(ends, key=lambda arm: -ends[arm])
    assert [style.arm for style in curves.in_curves_order(styles, panels)] == expected


def test_a_measured_abscissa_is_drawn_at_the_mean_of_its_setting():
    rows = pl.DataFrame(
        {
            "workload": ["digits"] * 4,
            "estimator": ["oddshap"] * 4,
            "instance": [0, 1, 0, 1],
            "level": ["low", "low", "high", "high"],
            "strength": [0.1, 0.3, 0.7, 0.9],
            "mse": [1.0, 3.0, 5.0, 7.0],
        }
    )
    figure = Figure("t", "strength", "mse", x_mean_by="level", log_x=False, log_y=False)
    (panel,) = curves.figure_panels(figure, a_study(), rows, curves.arm_styles(a_study(), ["oddshap"]), 1)
    assert panel.xs == pytest.approx([0.2, 0.8])
    assert panel.medians == {"oddshap": [2.0, 6.0]}
    assert panel.blocks == 2
    with pytest.raises(ValueError, match="needs column 'levels'; did you mean level"):
        curves.figure_panels(replace(figure, x_mean_by="levels"), a_study(), rows, [], 1)
