"""The table for papers: compiles in a minimal document, says every number, and takes any text."""

import math
import re
import subprocess
import unicodedata
from dataclasses import replace

import pytest

from cameraready import tex
from cameraready.evidence.export import latex
from tests.evidence.export.programs import need
from tests.evidence.report_runs import a_result

DOCUMENT = r"""\documentclass[%s]{article}
\usepackage{booktabs}
\begin{document}
See Table~\ref{%s}.
\input{verdicts}
\end{document}
"""


def compiled(folder, source, name="paper"):
    """The text of the PDF that pdflatex makes of `source`, and its log."""
    (folder / f"{name}.tex").write_text(source, encoding="utf-8")
    for _ in range(2):
        run = subprocess.run(
            ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", name],
            cwd=folder,
            capture_output=True,
            timeout=120,
        )
        assert run.returncode == 0, run.stdout.decode(errors="replace")[-2000:]
    text = subprocess.run(
        ["pdftotext", "-layout", f"{name}.pdf", "-"], cwd=folder, capture_output=True, check=True
    ).stdout
    return " ".join(unicodedata.normalize("NFC", text.decode()).split()), (folder / f"{name}.log").read_text(
        errors="replace"
    )


@pytest.mark.parametrize("columns", ["", "twocolumn"])
def test_it_compiles_with_booktabs_alone_and_says_every_verdict(result, columns, tmp_path):
    need("pdflatex", "pdftotext")
    result.export("latex", tmp_path / "verdicts.tex")
    text, log = compiled(tmp_path, DOCUMENT % (columns, latex.label_of(result)))
    assert "See Table 1." in text
    assert "Overfull" not in log
    assert "Float too large" not in log
    for verdict in result.claims_shown:
        assert (verdict.claim or verdict.paper).replace("'", "’") in text
        assert verdict.verdict in text
    assert result.commit[:12] in text
    assert "2026-11-30" in text
    assert "uncommitted changes" in text
    assert "0.333" not in text  # the estimate is the number of the table, not the rule


def test_a_hostile_text_is_printed_as_it_is(nasty, tmp_path):
    need("pdflatex", "pdftotext")
    nasty.export("latex", tmp_path / "verdicts.tex")
    text, _ = compiled(tmp_path, DOCUMENT % ("", latex.label_of(nasty)))
    assert r"50% of a_b & #1 ˜x ˆ2 \input{/etc/passwd} $x$ {}" in text.replace("a b &", "a_b &")
    assert "a ≤ b × c – d’s é [U+4E2D]" in text
    assert "root:" not in text


def test_every_character_of_the_escapes_compiles(tmp_path):
    need("pdflatex", "pdftotext")
    special = [
        *tex._SPECIAL,
        *tex._MATH,
        *tex._GREEK,
        *tex._SUPER,
        *tex._SUB,
        *map(chr, range(0x20, 0x250)),
        "中",
        "😀",
    ]
    body = "\n\n".join(f"{number}: {tex.escape(f'x{char}y')}" for number, char in enumerate(special))
    text, _ = compiled(tmp_path, f"\\documentclass{{article}}\\begin{{document}}\n{body}\n\\end{{document}}")
    assert "[U+1F600]" in text


def test_escapes_are_ascii_and_balanced():
    for code in [*range(0x20, 0x2FFF), 0x1F600]:
        source = tex.escape(f"a{chr(code)}b")
        assert source.isascii()
        plain = re.sub(r"\\[{}]", "", source)
        assert plain.count("{") == plain.count("}") == source.count("{")


@pytest.mark.parametrize(
    ("value", "source"),
    [
        (0.0286801, "0.0287"),
        (12345.6, "12{,}300"),
        (-3.1e-7, r"-3.1 \times 10^{-7}"),
        (1e30, r"1 \times 10^{30}"),
        (0.0, "0"),
        (math.inf, r"\infty"),
        (-math.inf, r"-\infty"),
        (math.nan, r"\mathrm{NaN}"),
    ],
)
def test_numbers_in_math_mode(value, source):
    assert latex.number(value) == source


def test_too_few_blocks_show_no_interval(result):
    verdict = replace(result.claims[0], estimate=0.5, low=0.4, high=0.6, blocks=9)
    assert latex.estimate(verdict) == "$0.5$"
    assert latex.estimate(replace(verdict, blocks=10)) == "$0.5$ $[0.4, 0.6]$"


def test_a_long_table_goes_on_in_further_floats_and_loses_nothing(tmp_path):
    need("pdflatex", "pdftotext")
    one = a_result().claims[1]
    claims = [replace(one, label=f"{n}", number=n, claim=f"Claim number {n} says this.") for n in range(1, 61)]
    claims += [replace(one, label="61", number=61, claim="Everywhere.", workload=f"place-{n:03}") for n in range(120)]
    long = a_result(claims=claims)
    long.export("latex", tmp_path / "verdicts.tex")
    text, log = compiled(tmp_path, DOCUMENT % ("", latex.label_of(long)))
    assert "Float too large" not in log
    assert all(f"Claim number {n} says this." in text for n in range(1, 61))
    assert all(f"place-{n:03}" in text for n in range(120))
    assert text.count("Table 1: Claims of") == 1
    assert "Table 2" not in text


def test_a_run_without_claims_is_a_table_without_rows(tmp_path):
    need("pdflatex", "pdftotext")
    empty = a_result(claims=[])
    empty.export("latex", tmp_path / "verdicts.tex")
    text, _ = compiled(tmp_path, DOCUMENT % ("", latex.label_of(empty)))
    assert "Table 1: Claims of oddshap" in text
    assert "Claim, workload Scope Verdict Estimate [95 %] Blocks" in text
