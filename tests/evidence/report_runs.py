"""Finished runs for the tests of report and command line: a real study and real verdicts on invented rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from cameraready.catalog import Card
from cameraready.evidence import (
    Answer,
    Claim,
    Failure,
    Figure,
    Study,
    Untested,
    above,
    always,
    below,
    difference,
    ratio,
    versus_best,
    violations,
    win_rate,
    within,
)
from cameraready.evidence.answer import answer
from cameraready.evidence.results import Result, make_frame
from cameraready.evidence.verdicts import judge

#: Arms and how many times their error is the method's.
ARMS = {"oddshap": 1.0, "leverage": 4.0, "permutation": 6.0, "kernel": 5.0, "svarm": 20.0, "proxyshap": 1.3}
BUDGETS = (300, 1_000, 3_000, 10_000)
SOURCE = "Fumagalli et al., 2026, arXiv:2602.01399, Table 1"

CARD = Card(
    slug="oddshap",
    title="An Odd Estimator for Shapley Values",
    authors=("Fabian Fumagalli", "Landon Butler", "R. Teal Witter"),
    purpose="Shapley values of any black-box model.",
    exports=("OddShap", "explain"),
    kind="explainer",
    basis="paper",
    claims=6,
    arxiv="2602.01399",
    module="cameraready.attribution.oddshap",
    room="attribution",
)


def _unused(*args: object, **kwargs: object) -> None:
    raise AssertionError("a report must not run anything")


def _claims() -> list[Claim | Untested]:
    """A claim of every look: a census, ratios, a share, a difference, an untested one."""
    large, small = pl.col("budget") == 10_000, pl.col("budget") == 300
    own_rows = large & (pl.col("estimator") == "oddshap")
    mine, best = ratio("mse", "oddshap", "leverage"), versus_best("mse", "oddshap")

    def claim(number: int, part: str, tested: str, scope: Any, **more: Any) -> Claim:
        paper = f"What the paper says under {number}{part}."
        return Claim(number, part=part, paper=paper, tested=tested, scope=scope, source=SOURCE, **more)

    return [
        claim(
            1, "", "Game and odd part agree.", "exact",
            where=own_rows, measure=violations(pl.col("gap") > 1e-9), rule=always(), pooled=False,
        ),
        claim(3, "a", "A third of LeverageSHAP's error.", "reduced", where=large, measure=mine, rule=below(1 / 3)),
        claim(3, "b", "Best at 10,000 calls.", "exact", where=large, measure=best, rule=below(1), changed="was 0.9"),
        claim(3, "c", "On par at 300 calls.", "exact", where=small, measure=mine, rule=within(0.8, 1.25)),
        claim(
            4, "", "Wins on nine instances of ten.", "proxy",
            where=large, measure=win_rate("mse", "oddshap", "permutation"), rule=above(0.9),
        ),
        claim(
            5, "", "Four seconds less than LeverageSHAP.", "exact",
            where=large, measure=difference("seconds", "oddshap", "leverage"), rule=below(-4.0),
        ),
        Untested(6, paper="On ViT-B the error is halved.", needs="a GPU and ViT-B weights", source=SOURCE),
    ]  # fmt: skip


def a_study(**changes: Any) -> Study:
    fields: dict[str, Any] = {
        "open": _unused,
        "workloads": {"smoke": [], "desk": ["breast-cancer", "digits"], "full": []},
        "plan": _unused,
        "trial": _unused,
        "method": "oddshap",
        "arms": "estimator",
        "block": "instance",
        "claims": _claims(),
        "answer": Answer(
            versus_best("mse", "oddshap"),
            better="use OddSHAP: its error is {estimate} times [{low}, {high}] that of {peer}",
            worse="keep {peer}: OddSHAP's error is {estimate} times [{low}, {high}] as large",
            tie="OddSHAP and {peer} are equally good",
            by="budget",
            by_label="at {level:,} calls",
        ),
        "figures": [Figure("Error by budget", "budget", "mse", x_title="model calls", y_title="mean squared error")],
        "covers": "Other predictions of the same model on the same data.",
        "covers_own": "Other rows of the same table, and other random numbers.",
    }
    return Study(**{**fields, **changes})


def a_frame(workloads: tuple[str, ...] = ("breast-cancer", "digits"), blocks: int = 15) -> pl.DataFrame:
    """Log-normal errors; one block of one workload in which `svarm` failed."""
    generator = np.random.default_rng(0)
    records = []
    for load, name in enumerate(workloads):
        for block in range(blocks):
            level = generator.lognormal(0, 0.8)
            for arm, factor in ARMS.items():
                for budget in BUDGETS:
                    head = {"workload": name, "estimator": arm, "budget": budget, "instance": block, "seed": 0}
                    tail = {"trial": f"{load}-{arm}-{budget}-{block}", "trial_seconds": budget * 2e-4}
                    if (arm, block, load) == ("svarm", 3, 0):
                        records.append({**head, **tail, "status": "timeout", "error": "took longer than 60 s"})
                        continue
                    on_par = arm in ("oddshap", "leverage") and budget == 300
                    gain = 0.6 if load == 0 else 1.4
                    scale = 4.0 if on_par else factor * (gain if arm == "oddshap" else 1.0)
                    measured = {
                        "mse": 0.3 / budget * level * scale * generator.lognormal(0, 0.3),
                        "gap": 1e-14,
                        "seconds": budget * 1e-4 * factor * generator.lognormal(0, 0.1),
                    }
                    records.append({**head, **measured, **tail, "status": "done", "trial_peak_mb": 180.0})
    return make_frame(records)


def a_result(
    workloads: tuple[str, ...] = ("breast-cancer", "digits"), *, blocks: int = 15, own: bool = False, **changes: Any
) -> Result:
    """A finished run of `a_study`, judged by the real verdicts."""
    study = changes.pop("study", None) or a_study()
    rows = a_frame(workloads, blocks)
    traceback = "Traceback (most recent call last):\n  ...\nTimeoutError: took longer than 60 s"
    failures = [
        Failure(
            row["workload"], row["estimator"], str(row["instance"]), 0, {"budget": row["budget"]}, "timeout", traceback
        )
        for row in rows.filter(pl.col("status") != "done").iter_rows(named=True)
    ]
    kind = "table" if own else "shipped"
    fields: dict[str, Any] = {
        "card": CARD,
        "study": study,
        "tier": "desk",
        "answer": answer(study, rows),
        "claims": judge(study, rows),
        "rows": rows,
        "failures": failures,
        "workloads": [{"name": name, "kind": kind, "own": own, "digest": "f3a9c1d27be4"} for name in workloads],
        "environment": {"python": "3.11.2", "system": "Linux x86_64", "cameraready": "0.1.0", "numpy": "2.4.6"},
        "command": "cameraready run oddshap",
        "commit": "4f1c2aa90be7d1f3c5e7a9b1d3f5a7c9e1b3d5f7+changes",
        "started": "2026-11-30T11:04:00+00:00",
        "seconds": 431.2,
        "notes": ["svarm was slow here"],
    }
    return Result(**{**fields, **changes})
