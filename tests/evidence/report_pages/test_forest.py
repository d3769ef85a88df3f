"""The forest: margins are what a reader thinks they are, and only what shares a scale is drawn on it."""

import re
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest

from cameraready.evidence import above, below, within
from cameraready.evidence.report import forest
from cameraready.evidence.report.forest import margin


@pytest.fixture(scope="module")
def claims(result):
    return {claim.label: claim for claim in result.study.claims}


def ruled(claim, verdict, rule):
    """Both under another rule."""
    return replace(claim, rule=rule), replace(verdict, rule=rule.describe())


def of(result, label, workload="digits"):
    return next(v for v in result.claims if (v.label, v.workload) == (label, workload))


def test_a_margin_above_one_obeys_the_rule_whichever_way_it_points(result, claims):
    claim, verdict = claims["3a"], of(result, "3a")
    for rule in (below(0.05), below(0.5), below(3.0), above(0.05), above(0.3), above(3.0)):
        found = margin(*ruled(claim, verdict, rule))
        assert found.low <= found.estimate <= found.high
        judgement = {"yes": found.low > 1, "no": found.high <= 1, "open": found.low <= 1 < found.high}
        assert judgement[rule.judge(verdict.estimate, verdict.low, verdict.high)]


def test_a_margin_says_how_many_times_better_than_the_limit(result, claims):
    verdict = replace(of(result, "3a"), low=0.05, estimate=0.1, high=0.2)
    found = margin(*ruled(claims["3a"], verdict, below(1.0)))
    np.testing.assert_allclose((found.low, found.estimate, found.high), (5, 10, 20))
    found = margin(*ruled(claims["3a"], verdict, above(0.05)))
    np.testing.assert_allclose((found.low, found.estimate, found.high), (1, 2, 4))


@pytest.mark.parametrize("label", ["1", "4", "5", "6"])
def test_counts_shares_differences_and_untested_claims_have_none(result, claims, label):
    assert margin(claims[label], of(result, label, "digits" if label != "6" else "")) is None


def test_a_range_and_too_few_blocks_have_none(result, claims):
    verdict = of(result, "3a")
    assert margin(*ruled(claims["3a"], verdict, within(0.5, 2))) is None
    assert margin(claims["3a"], replace(verdict, rule="below 0.9")) is None  # measured under another rule
    assert margin(claims["3a"], replace(verdict, blocks=9)) is None
    assert margin(claims["3a"], replace(verdict, low=None)) is None
    assert margin(claims["3a"], replace(verdict, low=0.0)) is None


def shares(strip):
    """Limit, low, estimate and high of a strip, in per cent of its width."""
    root = ElementTree.fromstring(strip)
    limit, bar = root.findall("line")
    return [
        float(x.rstrip("%")) for x in (limit.get("x1"), bar.get("x1"), root.find("circle").get("cx"), bar.get("x2"))
    ]


def test_all_strips_share_one_logarithmic_scale(result, claims):
    grown = forest.grow(claims, result.claims)
    points = []
    for (label, workload), found in grown.margins.items():
        places = shares(grown.strip(of(result, label, workload)))
        points += zip((1.0, found.low, found.estimate, found.high), places, strict=True)
    times, places = np.array(points).T
    slope, shift = np.polyfit(np.log(times), places, 1)
    assert slope > 0
    np.testing.assert_allclose(slope * np.log(times) + shift, places, atol=0.1)
    for tick, place in re.findall(r'<text x="([\d.]+)%"[^>]*>([\d.]+)×<', grown.axis()):
        np.testing.assert_allclose(slope * np.log(float(place)) + shift, float(tick), atol=0.1)


def test_what_lies_beyond_the_scale_is_written_at_its_edge(result, claims):
    far = [replace(v, low=1e-4, estimate=2e-4, high=3e-4) if v.workload == "digits" else v for v in result.claims]
    verdict = next(v for v in far if (v.label, v.workload) == ("3a", "digits"))
    strip = forest.grow(claims, far).strip(verdict)
    assert "1,670× ›" in strip
    assert "<circle" not in strip


def test_one_tree_is_no_forest(result, claims):
    alone = [of(result, "3a"), of(result, "5"), of(result, "1")]
    assert forest.grow(claims, alone) is None
    assert forest.grow({}, result.claims) is None
