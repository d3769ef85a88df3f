"""Figures for papers: one vector PDF a picture, every word in it, fonts inside, no colour left to a style sheet."""

import re
import subprocess
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from cameraready.evidence.export.pictures import light_colours, pictures, slug
from cameraready.evidence.subject import UsageError
from tests.evidence.export.programs import need
from tests.evidence.report_runs import ARMS, a_result


def words(path):
    need("pdftotext")
    return " ".join(subprocess.run(["pdftotext", path, "-"], capture_output=True, check=True).stdout.decode().split())


@pytest.fixture(scope="module")
def files(result, tmp_path_factory):
    return [Path(path) for path in result.export("pdf", tmp_path_factory.mktemp("pdf"))]


def test_every_claim_with_an_estimate_and_every_panel_has_a_file(result, files):
    labels = {v.label for v in result.claims if v.estimate is not None}
    expected = {f"oddshap-claim-{label}.pdf" for label in labels}
    expected |= {f"oddshap-figure-1-{workload}.pdf" for workload in ("breast-cancer", "digits")}
    assert {path.name for path in files} == expected


def test_each_is_one_whole_pdf_page(files):
    for path in files:
        content = path.read_bytes()
        assert content.startswith(b"%PDF-1.")
        assert content.rstrip().endswith(b"%%EOF")
        assert not re.search(rb"/Subtype\s*/Image", content)  # vectors, no bitmap


def test_fonts_are_embedded(files):
    need("pdffonts")
    for path in files:
        table = subprocess.run(["pdffonts", path], capture_output=True, check=True, text=True).stdout
        lines = table.splitlines()[2:]
        assert lines
        assert all(re.search(r" yes\s+yes\s+(yes|no)\s+\d+\s+\d+$", line) for line in lines)


def test_a_claims_picture_says_workloads_measure_and_rule(result, files):
    text = words(next(path for path in files if path.name == "oddshap-claim-3a.pdf"))
    verdict = next(v for v in result.claims if v.label == "3a")
    for said in ("breast-cancer", "digits", verdict.rule, verdict.measure.split(",")[0]):
        assert said in text


def test_a_panel_has_its_titles_and_the_legend_of_its_arms(files):
    text = words(next(path for path in files if path.name == "oddshap-figure-1-digits.pdf"))
    for said in ("digits", "mean squared error", "model calls", *ARMS):
        assert said in text


def test_colours_are_the_reports_light_ones(result):
    for picture in pictures(result):
        assert "var(" not in picture.svg
        root = ElementTree.fromstring(picture.svg)
        used = {element.get(key) for element in root.iter() for key in ("fill", "stroke")} - {None, "none"}
        assert used <= set(light_colours().values())
    assert light_colours()["--card"] == "#ffffff"


def test_names_of_files_are_safe_and_apart(nasty, tmp_path):
    paths = [Path(path) for path in nasty.export("pdf", tmp_path)]
    assert all(path.parent == tmp_path and re.fullmatch(r"[a-z0-9-]+\.pdf", path.name) for path in paths)
    assert slug("../../etc/passwd") == "etc-passwd"
    twins = a_result()
    first = next(v for v in twins.claims if v.label == "3a")
    twins.claims = [first, replace(first, label="3A")]
    twins.study = replace(
        twins.study,
        claims=[c for claim in twins.study.claims if claim.label == "3a" for c in (claim, replace(claim, part="A"))],
    )
    assert len(set(twins.export("pdf", tmp_path / "twins"))) == len(pictures(twins))


def test_a_run_without_numbers_has_nothing_to_draw(result, tmp_path):
    empty = a_result(claims=[], rows=result.rows.clear())
    with pytest.raises(UsageError, match="nothing to draw"):
        empty.export("pdf", tmp_path)
