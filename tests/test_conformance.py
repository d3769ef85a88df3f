"""What every method of the catalogue keeps to; a new card is picked up by itself."""

import importlib
import json
import re
import tomllib

import polars as pl
import pytest

from cameraready.catalog import catalog
from cameraready.cli import browse
from cameraready.evidence import Claim, Study, Untested
from cameraready.evidence.checking import check
from cameraready.evidence.specs import SpecError
from cameraready.evidence.verdicts import judge

CARDS = {card.slug: card for card in catalog()}
every_method = pytest.mark.parametrize("slug", CARDS)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("CAMERAREADY_HOME", str(tmp_path))


def study_of(slug) -> Study:
    return importlib.import_module(f"{CARDS[slug].module}.study").STUDY


def nonconformities(card, study, component) -> list[str]:
    """What a method lacks of the contract, as sentences."""
    lacks = []
    missing = [name for name in card.exports if not hasattr(component, name)]
    if missing:
        lacks.append(f"the card exports {', '.join(missing)}, which the component lacks")
    undocumented = [
        n for n in card.exports if hasattr(component, n) and not (getattr(component, n).__doc__ or "").strip()
    ]
    if undocumented:
        lacks.append(f"{', '.join(undocumented)} have no docstring")
    if set(study.workloads) != {"smoke", "desk", "full"}:
        lacks.append(f"workloads for the tiers {sorted(study.workloads)}, expected smoke, desk and full")
    of_the_paper = {c.number for c in study.claims if isinstance(c, Untested) or c.scope != "ours"}
    if of_the_paper != set(range(1, card.claims + 1)):
        lacks.append(f"the card counts {card.claims} claims, the study numbers {sorted(of_the_paper)}")
    ours = {c.number for c in study.claims if isinstance(c, Claim) and c.scope == "ours"}
    if ours and min(ours) <= card.claims:
        lacks.append(f"claims of our own must be numbered beyond {card.claims}, got {sorted(ours)}")
    for tier, names in study.workloads.items():
        for name in names:
            conditions = list(study.plan(tier, name))
            if not conditions:
                lacks.append(f"nothing is planned for {name} at tier {tier}")
            json.dumps(conditions)  # conditions are JSON values
    return lacks


@every_method
def test_card_component_and_study_fit_together(slug):
    card = CARDS[slug]
    assert nonconformities(card, study_of(slug), importlib.import_module(card.module)) == []


@every_method
def test_smoke_runs_without_a_failed_trial(slug):
    result = check(slug, tier="smoke", quiet=True)
    assert [(f.arm, f.error) for f in result.failures] == []
    assert result.rows.height > 0
    assert not [note for note in result.notes if "was not run" in note or "prepared" in note]


@every_method
def test_shipped_verdicts_follow_from_the_shipped_rows(slug):
    folder = importlib.resources.files(CARDS[slug].module)
    assert (folder / "results.json").is_file(), f"{slug} ships no results: run `make study METHOD={slug}`"
    written = json.loads((folder / "results.json").read_text())
    assert len((folder / "results.parquet").read_bytes()) <= 200_000
    study, rows = study_of(slug), pl.read_parquet(folder / "results.parquet")
    ran = set(study.workloads[written["tier"]])
    spoken_to = {c.label for c in study.claims if isinstance(c, Untested) or not c.workloads or ran & {*c.workloads}}
    again = {(v.label, v.workload): v for v in judge(study, rows)}
    assert {(c["label"], c["workload"]) for c in written["claims"]} == {key for key in again if key[0] in spoken_to}
    for claim in written["claims"]:
        verdict = again[claim["label"], claim["workload"]]
        assert claim["verdict"] == verdict.verdict, claim
        for name in ("estimate", "low", "high"):
            value = getattr(verdict, name)
            if value is None or value != value:
                assert claim[name] is None, claim
            else:
                assert claim[name] == pytest.approx(value, rel=1e-9), claim


@every_method
def test_what_show_says_a_study_takes_is_what_it_takes(slug):
    study = study_of(slug)
    assert browse.taken(CARDS[slug]) == [option for option in ("data", "tasks") if option in study.takes]


def test_the_tasks_that_show_names_are_those_that_there_are():
    workload = pytest.importorskip("cameraready.lm._workload")
    every = {*workload.RETRIEVAL, *workload.REASONING, f"{workload.LM_EVAL}NAME", f"{workload.GYM}NAME"}
    named = {
        room: set(re.findall(r"\w+:NAME|\w+-\w+:NAME|[a-z_]{5,}", text.partition(", as far")[0]))
        for room, text in browse.TASKS.items()
    }
    assert named["lm"] == every
    training = importlib.import_module("cameraready.posttraining._workload")
    for task in every - {f"{workload.GYM}NAME"}:
        if task in named["posttraining"]:
            training.check_trainable(task)
        else:
            with pytest.raises(SpecError, match=re.escape(task)):
                training.check_trainable(task)
    assert named["posttraining"] == {*workload.REASONING, f"{workload.GYM}NAME"}


@every_method
def test_the_card_is_complete(slug):
    raw = tomllib.loads((importlib.resources.files(CARDS[slug].module) / "card.toml").read_text())
    for key in (
        "title",
        "authors",
        "purpose",
        "use_when",
        "avoid_when",
        "instead_of",
        "kind",
        "basis",
        "example",
    ):
        assert raw.get(key), f"{slug}: card.toml lacks {key}"
    assert raw.get("arxiv") or raw.get("openreview"), f"{slug}: card.toml lacks arxiv and openreview"


@every_method
def test_the_notes_have_the_sections_of_the_methods_page_and_the_card_names_arms_that_exist(slug):
    folder = CARDS[slug].folder
    headings = [line for line in (folder / "notes.md").read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    assert headings[0].startswith("# ")
    assert headings[1:] == ["## How it works", "## What we corrected, and why", "## What it does not tell"]
    study = study_of(slug)
    measured = pl.read_parquet(folder / "results.parquet").get_column(study.arms).unique().to_list()
    assert set(CARDS[slug].arms) <= set(measured)
    assert set(CARDS[slug].workloads) <= {name for names in study.workloads.values() for name in names}


def test_a_broken_method_is_caught():
    """The same check finds each defect that it claims to find."""
    import dataclasses
    import types

    card = dataclasses.replace(next(iter(CARDS.values())), exports=("Thing",), claims=2)
    claim = Claim(2, paper="", tested="", scope="exact", source="", measure=None, rule=None)
    broken = Study(
        open=lambda spec: None,
        workloads={"smoke": ["a"], "desk": []},
        plan=lambda tier, workload: [],
        trial=lambda workload, ctx: [],
        method="m",
        arms="arm",
        block="seed",
        claims=[claim, dataclasses.replace(claim, number=1, scope="ours")],
    )
    found = "\n".join(nonconformities(card, broken, types.ModuleType("component")))
    for defect in (
        "exports Thing",
        "smoke, desk and full",
        "counts 2 claims",
        "numbered beyond 2",
        "nothing is planned for a",
    ):
        assert defect in found
