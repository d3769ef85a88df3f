"""The method against each alternative by itself."""

import polars as pl
import pytest

from cameraready.evidence.measures import ratio
from cameraready.evidence.rivals import rivals
from cameraready.evidence.study import Answer
from cameraready.evidence.verdicts import evidence
from tests.evidence.studies.estimating import STUDY


def rows(sizes=(50, 200), blocks=12, arms=("trimmed", "mean", "median"), failed=()):
    found = []
    for size in sizes:
        for seed in range(blocks):
            for place, arm in enumerate(arms):
                bad = (arm, seed) in failed
                found.append(
                    {
                        "workload": "dirty", "size": size, "seed": seed, "estimator": arm,
                        "error": None if bad else (1 + place) * (2 + seed % 3) / size,
                        "status": "raised" if bad else "done", "trial": f"{size}-{seed}-{arm}",
                        "failure": "ValueError" if bad else None,
                    }
                )  # fmt: skip
    return pl.DataFrame(found, infer_schema_length=None)


def test_each_alternative_gets_the_ratio_that_a_claim_would_have():
    frame = rows()
    found = {rival.arm: rival for rival in rivals(STUDY, frame)}
    assert set(found) == {"mean", "median"}
    for arm, times in (("mean", 1 / 2), ("median", 1 / 3)):
        direct = evidence(STUDY, frame, ratio("error", "trimmed", arm), "dirty", pl.col("size") == 200, {})
        assert (found[arm].estimate, found[arm].low, found[arm].high) == (direct.estimate, direct.low, direct.high)
        assert found[arm].estimate == pytest.approx(times)
        assert found[arm].level == 200
        assert found[arm].blocks == 12


def test_the_largest_level_with_enough_blocks_is_compared():
    frame = pl.concat([rows(sizes=(50,)), rows(sizes=(200,), blocks=3)])
    assert {rival.level for rival in rivals(STUDY, frame)} == {50}
    assert {rival.level for rival in rivals(STUDY, rows(sizes=(50, 200), blocks=3))} == {200}


def test_a_level_may_be_called_n():
    from dataclasses import replace

    study = replace(STUDY, answer=replace(STUDY.answer, by="n"))
    assert {rival.level for rival in rivals(study, rows().rename({"size": "n"}))} == {200}


def test_what_is_no_competitor_is_left_out_and_failures_are_told():
    from dataclasses import replace

    from cameraready.evidence.measures import versus_best

    narrow = replace(STUDY.answer, measure=versus_best("error", "trimmed", exclude=("median",)))
    study = replace(STUDY, answer=narrow)
    (only,) = rivals(study, rows(failed={("mean", 0)}))
    assert only.arm == "mean"
    assert only.blocks == 11
    assert "mean" in only.reason


def test_an_answer_may_speak_for_a_variant_of_the_method():
    from dataclasses import replace

    measure = replace(STUDY.answer.measure, method="mean")
    study = replace(STUDY, answer=replace(STUDY.answer, measure=measure))
    assert study.method == "trimmed"
    (found,) = rivals(study, rows())
    assert (found.arm, found.level) == ("median", 200)
    assert found.estimate == pytest.approx(2 / 3)


def test_a_study_without_an_answer_compares_with_no_one():
    from dataclasses import replace

    assert rivals(replace(STUDY, answer=None), rows()) == []
    plain = Answer(measure=ratio("error", "trimmed", "mean"), better="a", worse="b", tie="c")
    assert rivals(replace(STUDY, answer=plain), rows()) == []
