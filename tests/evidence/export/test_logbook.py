"""The Trackio logbook: read back by Trackio, laid out as the challenge asks, safe from its texts, and kept at home."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from cameraready.evidence.export import pages
from cameraready.evidence.export.logbook import openreview_id, space_name
from cameraready.evidence.report import wording
from cameraready.evidence.subject import UsageError
from tests.evidence.report_runs import a_result

trackio = pytest.importorskip("trackio.logbook", reason="the extra trackio is not installed")


def written(result, out, **options):
    return Path(result.export("trackio", out, **options)[0]) / ".trackio"


@pytest.fixture(scope="module")
def book(result, tmp_path_factory):
    return written(result, tmp_path_factory.mktemp("book"), openreview="ay4Q69fAJL")


@pytest.fixture(scope="module")
def nasty_book(nasty, tmp_path_factory):
    return written(nasty, tmp_path_factory.mktemp("nasty"))


def cells(project, page):
    """The cells of a page with their whole bodies, as Trackio reads them."""
    outline = trackio.read_page_outline(project, page)
    return [trackio.read_cell(project, cell["id"], include_full=True) for cell in outline["cells"]]


def text_of(project, page):
    return (project / "logbook" / "pages" / page / "page.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("which", ["book", "nasty_book"])
def test_it_is_laid_out_as_the_challenge_asks(which, request):
    """The rules of the challenge's own validator: index, order of pages, pinned cells, tags."""
    project = request.getfixturevalue(which)
    index = (project / "logbook" / "pages" / "index.md").read_text(encoding="utf-8")
    title, between, listed = re.match(r"# (.+)\n(.*?)## Pages\n(.*)", index, re.DOTALL).groups()
    assert title.startswith("Reproduction: ")
    assert between.strip() == ""
    named = re.findall(r"\(#/([A-Za-z0-9._-]+)\)", listed)
    on_disk = {path.parent.name for path in (project / "logbook" / "pages").glob("*/page.md")}
    assert len(named) == len(set(named))
    assert set(named) == on_disk
    assert (named[0], named[-1]) == ("executive-summary", "conclusion")
    assert all(re.match(r"claim-\d+", slug) for slug in named[1:-1])
    pinned = [cell for cell in cells(project, "executive-summary") if cell["metadata"].get("pinned")]
    assert [(cell["type"], cell["title"]) for cell in pinned] == [
        ("markdown", "Executive summary"),
        ("figure", "Reproduction poster"),
    ]
    assert "icml2026-repro" in json.loads((project / "metadata.json").read_text())["tags"]


def test_trackio_reads_the_paper_and_every_page(book, result):
    manifest = trackio.build_manifest(book)
    assert manifest["title"] == f"Reproduction: {result.card.title}"
    assert manifest["paper"] == {"title": result.card.title, "openreview_id": "ay4Q69fAJL", "arxiv_id": "2602.01399"}
    assert "paper-ay4Q69fAJL" in manifest["tags"]
    titles = [page["title"] for page in trackio.list_pages(book)]
    labels = list(dict.fromkeys(v.label for v in result.claims_shown))
    assert titles[1] == "Executive summary"
    assert titles[-1] == "Conclusion"
    assert [re.match(r"Claim (\w+): ", title)[1] for title in titles[2:-1]] == labels


def test_the_summary_gives_the_outcome_first_and_what_it_took(book, result):
    first = cells(book, "executive-summary")[0]["body"]
    assert first.startswith(f"**Answer.** {result.answer}")
    for row in ("Scope", "Hardware", "Compute time", "Cost", "Outcome"):
        assert f"| {row} |" in first
    assert wording.tally(result.claims) in first


def test_a_claims_page_has_verdicts_picture_numbers_and_command(book, result):
    group = [v for v in result.claims_shown if v.label == "3a"]
    page = next(p["slug"] for p in trackio.list_pages(book) if p["title"].startswith("Claim 3a:"))
    said, figure, again = cells(book, page)
    assert [cell["type"] for cell in (said, figure, again)] == ["markdown", "figure", "code"]
    for text in (group[0].paper, group[0].claim, group[0].source, group[0].rule, group[0].measure):
        assert text in said["body"]
    for verdict in group:
        assert f"| {wording.place(verdict.workload)} | " in said["body"]
        assert wording.interval(verdict) in said["body"]
    assert "<svg" in figure["html"]
    assert pl.read_csv(figure["raw"].encode())["estimate"].to_list() == [v.estimate for v in group]
    assert "cameraready run oddshap --claim 3a" in again["body"]


def test_the_conclusion_names_every_claim_under_its_verdicts(book, result):
    body = cells(book, "conclusion")[0]["body"]
    for verdict in result.claims:
        line = next(line for line in body.splitlines() if line.startswith(f"- **{verdict.verdict}**"))
        assert f"claim {verdict.label}" in line


def test_the_results_can_be_downloaded_from_it(book, result):
    media = book / "logbook" / "media"
    assert json.loads((media / "results.json").read_text()) == result.to_json()
    assert_frame_equal(pl.read_parquet(media / "results.parquet"), result.rows)
    assert "(media/results.parquet)" in text_of(book, "conclusion")


def test_no_page_names_a_folder_of_this_machine(book, result):
    for path in [*book.rglob("*.md"), *book.rglob("*.json")]:
        assert str(book.parent.parent) not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("scope", "verdict", "word"),
    [
        ("exact", "holds", "verified"),
        ("exact", "fails", "falsified"),
        ("reduced", "holds", "toy"),
        ("proxy", "holds", "toy"),
        ("reduced", "not seen", "inconclusive"),
        ("exact", "inconclusive", "inconclusive"),
        ("", "untested", "not attempted"),
        ("ours", "holds", ""),
    ],
)
def test_a_smaller_setting_neither_verifies_nor_refutes(result, scope, verdict, word):
    assert pages.challenge_word(replace(result.claims[0], scope=scope, verdict=verdict)) == word


def test_a_hostile_text_opens_no_cell_no_link_and_no_script(nasty_book, nasty):
    for page in trackio.list_pages(nasty_book):
        if page["slug"] == "index":
            continue
        for cell in cells(nasty_book, page["slug"]):
            assert cell["title"] in {
                "Executive summary", "Reproduction poster", "Claim and verdict", "Estimates and intervals",
                "Measure it again", "Conclusion", "How to repeat it",
            } or cell["title"].startswith("Error by budget")  # fmt: skip
            if cell["type"] == "markdown":
                assert not re.search(r"\]\((?!media/)", cell["body"])
            if cell["type"] == "figure":
                assert _scripts(cell["html"]) <= {pages._NAVIGATE}


def _scripts(html):
    found, inside = set(), []

    class Reader(HTMLParser):
        def handle_starttag(self, tag, attributes):
            inside.append(tag)
            assert not any(name.startswith("on") for name, _ in attributes)

        def handle_data(self, data):
            if inside and inside[-1] == "script":
                found.add(data)

        def handle_endtag(self, tag):
            inside.append("")

    Reader().feed(html)
    return found


def test_a_second_export_replaces_the_first(tmp_path):
    written(a_result(), tmp_path)
    fewer = a_result()
    fewer.claims = [v for v in fewer.claims if v.label == "1"]
    project = written(fewer, tmp_path)
    assert len(trackio.list_pages(project)) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["oddshap-logbook"]


def test_a_logbook_around_it_is_not_touched(result, tmp_path, monkeypatch):
    """Trackio itself would write into the logbook of a folder above."""
    outer = tmp_path / ".trackio" / "logbook" / "pages"
    outer.mkdir(parents=True)
    (outer / "index.md").write_text("# Mine\n")
    monkeypatch.chdir(tmp_path)
    written(result, Path("export"))
    assert [path.name for path in outer.iterdir()] == ["index.md"]
    assert (outer / "index.md").read_text() == "# Mine\n"


# --- what leaves this machine ---------------------------------------------------------------------------------------


def test_nothing_is_sent_anywhere(result, tmp_path, no_network, monkeypatch):
    for name in ("TRACKIO_SPACE_ID", "HF_TOKEN"):
        monkeypatch.setenv(name, "somebody/something")
    written(result, tmp_path)
    assert no_network == []


def test_publishing_needs_the_papers_id_and_a_token_before_anything_is_sent(result, tmp_path, no_network, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(UsageError, match=r"add --openreview ID\. Nothing was sent"):
        result.export("trackio", tmp_path, publish=True)
    with pytest.raises(UsageError, match="needs a Hugging Face token"):
        result.export("trackio", tmp_path, publish=True, openreview="ay4Q69fAJL")
    assert no_network == []
    assert list(tmp_path.iterdir()) == []


def test_ids_of_openreview_are_taken_bare_or_in_a_url():
    assert openreview_id("ay4Q69fAJL") == "ay4Q69fAJL"
    assert openreview_id("https://openreview.net/forum?id=ay4Q69fAJL&noteId=x") == "ay4Q69fAJL"
    assert openreview_id("") == ""
    with pytest.raises(UsageError, match="such as ay4Q69fAJL"):
        openreview_id("2602.01399")


def test_a_space_is_named_after_the_paper_and_fits_a_host_name(result):
    name = space_name(result, "somebody")
    assert name == "repro-an-odd-estimator-for-shapley-values"
    long = replace(result, card=replace(result.card, title="A very long title " * 9))
    assert len(f"somebody-{space_name(long, 'somebody')}") <= 63
