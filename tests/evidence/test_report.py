"""The page of a run: everything is said and escaped, nothing comes from elsewhere, pictures say the numbers."""

import itertools
import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import polars as pl
import pytest

from cameraready.catalog import resolve
from cameraready.evidence.outcomes import Failure, Verdict
from cameraready.evidence.report import (
    charts,
    curves,
    drawing,
    page_name,
    render,
    render_summary,
    svg,
    tables,
    wording,
    write_index,
    write_report,
)
from cameraready.evidence.report.saved import read_result, verdicts_of
from cameraready.evidence.study import Figure
from tests.cli import toy_room
from tests.evidence.report_runs import a_frame, a_result, a_study

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """Reads a page as a browser would, as far as the tests ask: elements, ids, nesting, text."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.elements, self.open, self.words, self.misnested = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.misnested.append(tag)

    def handle_data(self, data):
        if not self.open or self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())

    def all(self, tag):
        return [attrs for name, attrs in self.elements if name == tag]


@pytest.fixture(scope="module")
def result():
    return a_result()


@pytest.fixture(scope="module")
def html(result):
    return render(result)


@pytest.fixture(scope="module")
def page(html):
    return Page(html)


# --- what the page says ---------------------------------------------------------------------------------------------


def test_the_answer_comes_before_every_verdict(result, page):
    assert result.answer in page.text
    assert page.text.index(result.answer) < page.text.index("Every claim")


def test_every_verdict_is_there_with_its_numbers(result, page):
    for verdict in result.claims:
        assert verdict.claim in page.text or verdict.paper in page.text
        if verdict.estimate is not None:
            assert wording.number(verdict.estimate).replace("-", "−") in page.text
        if verdict.rule:
            assert verdict.rule.replace("-", "−") in page.text


def test_verdicts_have_words_and_signs_beside_colour(result, page, html):
    for name in {verdict.verdict for verdict in result.claims}:
        look = wording.LOOKS[name]
        assert re.search(
            rf'class="verdict {look.tone}"><span class="sign"[^>]*>{re.escape(look.sign)}</span> {name}<', html
        )


def test_provenance_is_complete(result, page):
    for text in (result.command, result.commit[:12], "not committed", "30 November 2026, 11:04 UTC", *result.notes):
        assert text in page.text
    for name, version in result.environment.items():
        assert f"{name} {version}" in page.text
    for load in result.workloads:
        assert load["digest"][:12] in page.text
    assert "Other predictions of the same model" in page.text
    assert "Other rows of the same table" not in page.text  # nothing here was the user's


def test_on_the_users_own_data_the_page_says_what_the_interval_covers():
    assert "Other rows of the same table" in Page(render(a_result(("churn.csv:left",), own=True))).text


def test_failures_are_shown_with_their_traceback(result, page):
    assert "4 trials failed" in page.text
    assert "svarm took longer than its limit" in page.text
    assert "TimeoutError: took longer than 60 s" in page.text


def test_a_changed_rule_and_an_unfinished_run_are_admitted(result):
    text = Page(
        render(replace(result, incomplete=True, claims=[replace(v, provisional=True) for v in result.claims]))
    ).text
    assert "was 0.9" in text
    assert "This run is not complete" in text
    assert "provisional" in text


def test_a_run_without_claims_figures_or_rows_is_still_a_page(result):
    empty = a_result(study=a_study(claims=[], figures=[]))
    bare = replace(
        empty, claims=[], rows=empty.rows.clear(), failures=[], workloads=[], notes=[], command="", commit=""
    )
    page = Page(render(bare))
    assert "judged no claims" in page.text
    assert not page.misnested


# --- safety and form ------------------------------------------------------------------------------------------------

NASTY = "<script>alert('1')</script>&\"'><img src=x onerror=alert(1)>"


def test_everything_is_escaped():
    result = a_result(
        (NASTY, "plain"), notes=[NASTY], command=NASTY, commit=NASTY, environment={NASTY: NASTY}, started=NASTY
    )
    arms = result.rows.with_columns(pl.col("estimator").replace("kernel", NASTY))
    nasty = Failure(NASTY, NASTY, NASTY, 0, {NASTY: NASTY}, NASTY, NASTY)
    claims = [
        replace(v, claim=NASTY, paper=NASTY, reason=NASTY, peer=NASTY, source=NASTY, rule=NASTY) for v in result.claims
    ]
    study = a_study(figures=[Figure(NASTY, "budget", "mse", source=NASTY, x_title=NASTY, y_title=NASTY)], covers=NASTY)
    result = replace(result, rows=arms, failures=[nasty], claims=claims, answer=NASTY, study=study)
    for text in (render(result), render_summary(result)):
        page = Page(text)
        assert not page.all("script")
        assert not page.all("img")
        assert not [attrs for _, attrs in page.elements if any(name.startswith("on") for name in attrs)]
        assert not page.misnested
        assert NASTY in page.text


def test_nothing_is_fetched_from_anywhere(page, html):
    assert not [a for tag, a in page.elements if "src" in a or tag in ("script", "iframe", "object", "embed")]
    assert [a["href"] for a in page.all("link")] == ["data:,"]
    assert "@import" not in html
    assert not re.findall(r"url\((?!#)", html)
    policy = next(a["content"] for a in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")


def test_the_page_is_a_few_tens_of_kilobytes(html):
    assert len(html.encode()) < 100_000


def test_structure_for_screen_readers_and_keyboards(page):
    assert not page.misnested
    assert not page.open
    ids = [a["id"] for _, a in page.elements if "id" in a]
    assert len(ids) == len(set(ids))
    referred = [a["href"][1:] for a in page.all("a") if a["href"].startswith("#")]
    named = [name for _, a in page.elements for name in a.get("aria-labelledby", "").split()]
    assert set(referred) | set(named) <= set(ids)
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    tags = [tag for tag, _ in page.elements]
    assert tags.count("table") == tags.count("caption")
    assert all(a.get("scope") in ("row", "col") for a in page.all("th"))
    assert page.all("html")[0]["lang"] == "en"
    first_link = page.all("a")[0]
    assert (first_link["class"], first_link["href"]) == ("skip", "#verdicts")
    pictures = [a for a in page.all("svg") if a.get("aria-hidden") != "true"]
    assert pictures
    assert all(a["role"] == "img" and a["aria-labelledby"] for a in pictures)


def _luminance(colour):
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))


def _contrast(one, other):
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_are_legible_in_light_and_dark(html, scheme):
    """WCAG AA: 4.5 for text, 3 for lines of a chart."""
    sheets = re.findall(r":root \{(.*?)\}", html, re.S)
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", sheets[0] if scheme == "light" else sheets[1]))
    for ground in ("paper", "card"):
        for ink in ("ink", "muted", "accent", "good", "bad", "unseen", "open", "none"):
            assert _contrast(colours[ink], colours[ground]) >= 4.5, (ink, ground)
        for arm in range(curves.COLOURS):
            assert _contrast(colours[f"arm-{arm}"], colours[ground]) >= 3, arm
    for tone in ("good", "bad", "unseen", "open", "none"):
        assert _contrast(colours[tone], colours[f"{tone}-bg"]) >= 4.5, tone


def test_pictures_take_every_colour_from_the_page(html):
    drawn = "".join(re.findall(r"<svg.*?</svg>", html, re.S))
    used = set(re.findall(r'(?:fill|stroke)="([^"]+)"', drawn))
    assert {colour for colour in used if colour != "none" and not colour.startswith("var(--")} == set()
    defined = set(re.findall(r"--([\w-]+):", html))
    assert {colour[6:-1] for colour in used if colour != "none"} <= defined


# --- pictures -------------------------------------------------------------------------------------------------------


def claim_of(result, label):
    return next(c for c in result.study.claims if c.label == label), [v for v in result.claims if v.label == label]


def marks(drawn, colour_of):
    """Horizontal bars of a claim's picture as (left, right), in the order of its rows."""
    root = ElementTree.fromstring(drawn)
    bars = []
    for line in root.iter("line"):
        if line.get("stroke-width") == "3" and line.get("stroke") in colour_of:
            left = float(re.search(r"translate\(([-\d.]+)", line.get("transform"))[1])
            bars.append(tuple(sorted((left, left + float(line.get("x2") or 0)))))
    return bars


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
    assert "Left out: figure 't' needs column 'msee'" in text


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


# --- numbers --------------------------------------------------------------------------------------------------------


def test_cost_is_the_median_over_trials():
    found = tables.cost(a_study(), a_frame())
    assert found.arms[0] == "oddshap"
    assert found.cells["kernel", "digits"] == "0.4 s, 180 MB"  # budgets 300 to 10,000 at 0.2 ms a call


def test_where_a_trial_covers_all_arms_the_cost_is_the_trials():
    rows = a_frame().with_columns(trial=pl.format("{}-{}", "workload", "instance"), trial_seconds=pl.lit(3.0))
    found = tables.cost(a_study(), rows)
    assert found.arms == [""]
    assert found.cells["", "digits"] == "3.0 s, 180 MB"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.00091, "0.91 ms"),
        (0.5, "0.5 s"),
        (3.0, "3.0 s"),
        (48, "48 s"),
        (200, "3 min 20 s"),
        (7500, "2 h 5 min"),
        (7200, "2 h"),
    ],
)
def test_durations_read_as_a_person_says_them(seconds, text):
    assert wording.duration(seconds) == text


def test_failures_of_one_sort_are_told_once(result):
    other = Failure("digits", "kernel", "1", 0, {}, "raised", "Traceback\nZeroDivisionError: division by zero")
    groups = tables.failure_groups([other, *result.failures])
    assert [(g.arm, g.count) for g in groups] == [("svarm", 4), ("kernel", 1)]
    assert groups[1].last_line == "ZeroDivisionError: division by zero"


# --- files ----------------------------------------------------------------------------------------------------------


def test_the_page_is_written_whole_and_replaces_the_last(result, tmp_path):
    first = write_report(result, tmp_path / "run")
    second = write_report(replace(result, answer="Another answer."), tmp_path / "run")
    assert first == second
    assert "Another answer." in second.read_text(encoding="utf-8")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["index.html"]


def test_what_was_saved_is_read_back(result, tmp_path):
    with toy_room.installed(tmp_path / "package"):
        result = replace(result, card=resolve("tidy"), seconds=431.0)
        result.save(tmp_path)
        saved = read_result(tmp_path)
    assert saved.rows.equals(result.rows)
    assert saved.claims_shown == [replace(v, value={}) for v in result.claims_shown]
    assert saved.failures == result.failures
    assert saved.card == result.card
    assert saved.study.method == "tidy"
    for name in ("tier", "answer", "workloads", "environment", "command", "commit", "started", "seconds", "notes"):
        assert getattr(saved, name) == getattr(result, name), name


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"method": "oddshap"}'])
def test_damaged_results_are_refused(result, tmp_path, damage):
    result.save(tmp_path)
    (tmp_path / "results.json").write_text(damage)
    with pytest.raises(ValueError, match="damaged"):
        read_result(tmp_path)


def test_rows_that_are_missing_are_named(result, tmp_path):
    result.save(tmp_path)
    (tmp_path / "results.parquet").unlink()
    with pytest.raises(ValueError, match="has no results"):
        read_result(tmp_path)


def test_a_later_versions_keys_are_ignored():
    claim = {
        "label": "12b",
        "claim": "c",
        "paper": "p",
        "scope": "exact",
        "verdict": "holds",
        "workload": "w",
        "new": 1,
    }
    assert verdicts_of({"claims": [claim]}) == [Verdict("12b", 12, "c", "p", "exact", "holds", "w")]


def test_the_index_leads_to_every_run(result, tmp_path):
    for name in ("one", "two"):
        result.save(tmp_path / name)
        write_report(result, tmp_path / name)
    result.save(tmp_path / "no-page")
    page = Page(write_index(tmp_path).read_text(encoding="utf-8"))
    assert [a["href"] for a in page.all("a")] == ["one/index.html", "two/index.html"]
    assert page.text.count(result.answer) == 2
    assert not page.misnested


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "oddshap"),
        ({"tier": "smoke"}, "oddshap-smoke"),
        ({"workloads": [{"name": "/home/ada/Churn Data.csv:left", "own": True}]}, "oddshap-on-churn-data-csv-left"),
        ({"workloads": [{"name": "..\\..\\x", "own": True}]}, "oddshap-on-x"),
        ({"workloads": [{"name": "<script>" * 40, "own": True}]}, ("oddshap-on-" + "script-" * 40)[:80].rstrip("-")),
    ],
)
def test_a_pages_folder_is_named_safely(result, changes, name):
    assert page_name(replace(result, **changes)) == name


def test_in_a_notebook_answer_and_verdicts_stand_alone(result):
    fragment = Page(result._repr_html_())
    assert result.answer in fragment.text
    assert "0.137" in fragment.text or wording.number(result.claims[2].estimate) in fragment.text
    style = re.search(r"<style>(.*?)</style>", result._repr_html_(), re.S)[1]
    selectors = re.findall(r"(?:^|\})\s*([^{}@]+)\{", style)
    assert all(".cameraready" in selector for selector in selectors)


@pytest.mark.parametrize("failed", [True, False])
def test_a_run_in_which_nothing_finished_has_its_report(failed):
    rows = a_frame().head(5).select("workload", "estimator", "budget", "instance", "seed")
    rows = rows.with_columns(status=pl.lit("raised"), trial=pl.lit("t"), trial_seconds=0.1, trial_peak_mb=1.0)
    if not failed:
        rows = pl.DataFrame(schema={"workload": pl.String, "status": pl.String})
    page = render(replace(a_result(), rows=rows, claims=[]))
    assert "Left out: figure" in page


def test_intervals_from_few_blocks_are_not_told():
    verdict = next(v for v in a_result().claims if v.low is not None)
    assert wording.interval(replace(verdict, blocks=10))
    few = replace(verdict, blocks=9)
    assert wording.interval(few) == ""
    assert wording.estimate(few) == wording.number(few.estimate)


def test_a_result_shows_itself_briefly():
    result = replace(a_result(), notes=["interrupted"])
    lines = repr(result).splitlines()
    assert lines[0] == result.answer
    assert len(lines) == 2 + len(result.claims)
    assert lines[-1] == "Note: interrupted"
