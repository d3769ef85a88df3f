"""The page of a run: everything is said and escaped, nothing comes from elsewhere."""

import itertools
import re
from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from cameraready.evidence.outcomes import Failure
from cameraready.evidence.report import (
    curves,
    render,
    render_summary,
    wording,
)
from cameraready.evidence.study import Figure
from tests.evidence.report_pages.reading import Page
from tests.evidence.report_runs import a_result, a_study


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
    assert all(a.get("scope") in ("row", "col", "rowgroup") for a in page.all("th"))
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
