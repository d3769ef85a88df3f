"""`cite`: entries that BibTeX's own program and another parser read back as the names and titles that they came from."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from pybtex.database import parse_string

from cameraready import citation, tex
from cameraready.card import Card
from cameraready.catalog import resolve
from tests.evidence.export.programs import need

ROOT = Path(__file__).parents[2]


def a_card(*authors, title="A Title", slug="a-method", **more):
    fields = {"purpose": "", "exports": ("A",), "kind": "sampler", "basis": "paper", "claims": 1, "arxiv": "2601.00001"}
    return Card(slug=slug, title=title, authors=authors, **{**fields, **more})


def test_the_paper_and_this_software_are_read_back(cli):
    entries = parse_string(cli("cite", "oddshap").stdout, "bibtex").entries
    paper, software = entries["fumagalli2026oddshap"], entries["cameraready2026"]
    card = resolve("oddshap")
    assert paper.type == "inproceedings"
    assert paper.fields["title"] == f"{{{card.title}}}"
    assert paper.fields["booktitle"] == "Proceedings of the 43rd International Conference on Machine Learning"
    assert (paper.fields["year"], paper.fields["eprint"]) == ("2026", card.arxiv)
    assert paper.fields["archivePrefix"] == "arXiv"
    assert paper.fields["url"] == card.url
    assert [" ".join([*p.first_names, *p.middle_names, *p.last_names]) for p in paper.persons["author"]] == list(
        card.authors
    )
    assert [str(person) for person in software.persons["author"]] == ["{The camera-ready authors}"]
    assert list(entries) == ["fumagalli2026oddshap", "cameraready2026"]


def test_what_we_say_of_ourselves_is_what_citation_cff_says():
    cff = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert cff["title"] == citation.SOFTWARE_TITLE
    assert [author["name"] for author in cff["authors"]] == [citation.SOFTWARE_AUTHORS]
    assert cff["repository-code"] == citation.SOFTWARE_URL
    assert cff["date-released"].year == citation.SOFTWARE_YEAR
    assert str(cff["version"]) == project["version"]


@pytest.mark.parametrize(
    ("written", "given", "particle", "family", "suffix"),
    [
        ("R. Teal Witter", "R. Teal", "", "Witter", ""),
        ("Robbert van der Berg", "Robbert", "van der", "Berg", ""),
        ("Christopher De Sa", "Christopher", "", "De Sa", ""),
        ("Yann Le Cun", "Yann", "", "Le Cun", ""),
        ("Quoc V. Le", "Quoc V.", "", "Le", ""),
        ("Simon S. Du", "Simon S.", "", "Du", ""),
        ("bell hooks", "bell", "", "hooks", ""),
        ("Plato", "", "", "Plato", ""),
        ("Sammy Davis Jr.", "Sammy", "", "Davis", "Jr."),
        ("Sammy Davis, Jr.", "Sammy", "", "Davis", "Jr."),
        ("García Márquez, Gabriel", "Gabriel", "", "García Márquez", ""),
        ("de la Cruz, Juan", "Juan", "de la", "Cruz", ""),
        ("Shai Ben-David", "Shai", "", "Ben-David", ""),
    ],
)
def test_names(written, given, particle, family, suffix):
    assert citation.parse_name(written) == citation.Name(given, family, particle, suffix)
    person = parse_string(citation.bibtex([a_card(written)]), "bibtex").entries
    (person,) = next(iter(person.values())).persons["author"]
    assert " ".join(person.prelast_names) == particle
    assert " ".join(person.last_names) == tex.escape(family)
    assert " ".join([*person.first_names, *person.middle_names]) == given
    assert " ".join(person.lineage_names) == suffix


def test_keys_are_stable_ascii_and_apart():
    assert citation.key_of(a_card("Łukasz Gómez-Núñez", slug="odd-shap-2")) == "gomeznunez2026oddshap2"
    assert citation.key_of(a_card("Robbert van der Berg", slug="x")) == "berg2026x"
    assert citation.key_of(a_card("Christopher De Sa", slug="x")) == "desa2026x"
    one, two = (citation.key_of(a_card("Ada Lovelace", slug=slug)) for slug in ("tidy", "loose"))
    assert one != two


def test_several_methods_a_room_and_all_have_one_entry_each(cli, toys):
    text = cli("cite", "tidy", "toys", "https://arxiv.org/abs/2601.00000").stdout
    keys = list(parse_string(text, "bibtex").entries)
    assert keys == ["lovelace2026tidy", "lovelace2026loose", "lovelace2026shaky", "cameraready2026"]
    assert set(parse_string(cli("cite", "all").stdout, "bibtex").entries) == set(keys)
    assert list(parse_string(cli("cite").stdout, "bibtex").entries) == ["cameraready2026"]


def test_csl_json_says_the_same(cli):
    paper, software = json.loads(cli("cite", "oddshap", "--json").stdout)
    assert paper["type"] == "paper-conference"
    assert paper["author"][4] == {"family": "Witter", "given": "R. Teal"}
    assert paper["issued"] == {"date-parts": [[2026]]}
    assert software["author"] == [{"literal": "The camera-ready authors"}]


def test_what_cannot_be_cited_is_one_sentence(cli):
    for words, message in ((["odshap"], "did you mean oddshap"), (["oddshap", "--format", "ris"], "must be bibtex")):
        shown = cli("cite", *words)
        assert shown.exit_code == 2
        assert message in shown.stderr
        assert shown.stdout == ""


def test_it_works_without_the_study_extra_and_without_citation_cff(tmp_path):
    """In a process in which the evidence engine cannot be imported, away from the sources."""
    script = (
        "import sys\n"
        "for name in ('polars', 'altair', 'jinja2', 'vl_convert', 'pebble', 'yaml'): sys.modules[name] = None\n"
        "from cameraready.cli import main\n"
        "sys.argv = ['cameraready', 'cite', 'oddshap']\n"
        "main()\n"
    )
    shown = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert "fumagalli2026oddshap" in parse_string(shown.stdout, "bibtex").entries


HOSTILE = '100% of {a_b} & #1 ~ ^ \\ $x$ "q" α ≤ – ’ é ø Ł ř ą 中'


def test_bibtex_and_latex_print_a_hostile_entry(tmp_path):
    need("pdflatex", "bibtex", "pdftotext")
    cards = [
        a_card("Éva Łukasz-Ørsted", "Robbert van der Berg", "Sammy Davis Jr.", title=HOSTILE, slug="odd"),
        resolve("oddshap"),
    ]
    (tmp_path / "r.bib").write_text(citation.bibtex(cards), encoding="ascii")
    keys = ",".join([*map(citation.key_of, cards), "cameraready2026"])
    source = "\\documentclass{article}\\begin{document}Text~\\cite{%s}.\\bibliographystyle{plain}\\bibliography{r}\\end{document}"
    (tmp_path / "p.tex").write_text(source % keys)
    latex = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "p"]
    for command in (latex, ["bibtex", "p"], latex, latex):
        run = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=120)
        assert run.returncode == 0, run.stdout.decode(errors="replace")[-2000:]
        if command[0] == "bibtex":
            assert b"Warning" not in run.stdout, run.stdout.decode()
    text = subprocess.run(["pdftotext", "p.pdf", "-"], cwd=tmp_path, capture_output=True, check=True).stdout.decode()
    text = " ".join(text.split())
    for said in (
        "[2, 1, 3]",
        "100% of {a",
        "An Odd Estimator for Shapley Values",
        "R. Teal Witter",
        "Version",
        "van der Berg",
        "Davis, Jr.",
        "[U+4E2D]",
    ):
        assert said in text, text
