"""`export`: what a user types, what is printed, what is refused."""

import json
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

from cameraready.evidence.export import FORMATS
from tests.evidence.report_runs import a_result


@pytest.fixture
def folder(tmp_path):
    """What a run of `oddshap` wrote."""
    return a_result().save(tmp_path / "run")


def test_the_first_lines_are_the_paths_and_nothing_else_is_on_stdout(cli, folder, away):
    shown = cli("export", folder, "--to", "csv")
    assert shown.exit_code == 0, shown.stderr
    assert shown.stdout.splitlines() == ["export/oddshap-claims.csv", "export/oddshap-rows.csv"]
    assert all((away / line).is_file() for line in shown.stdout.splitlines())
    shown = cli("export", folder, "--to", "LaTeX", "--out", away / "paper" / "table.tex")
    assert shown.stdout.splitlines() == [str(away / "paper" / "table.tex")]
    assert "booktabs" in shown.stderr


def test_shipped_results_by_slug_id_and_all(cli):
    for name in ("oddshap", "arXiv:2602.01399", "all"):
        shown = cli("export", name, "--to", "parquet", "--out", "there")
        assert shown.exit_code == 0, shown.stderr
        assert "there/oddshap-claims.parquet" in shown.stdout.splitlines()
    assert pl.read_parquet("there/oddshap-claims.parquet").height > 10


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["oddshap", "--to", "excel"], "--to must be one of csv, parquet, latex, pdf, mlflow, trackio"),
        (["oddshap", "--to", "csv", "--publish"], "--publish is for --to trackio, not for csv"),
        (["oddshap", "--to", "pdf", "--tracking-uri", "x"], "--tracking-uri is for --to mlflow"),
        (["odshap", "--to", "csv"], "did you mean oddshap"),
        (["oddshap", "--to", "csv", "--out", "table.csv"], "goes into a folder"),
        (["oddshap", "--to", "trackio", "--openreview", "no id"], "such as ay4Q69fAJL"),
        (["oddshap", "--to", "trackio", "--publish"], "Nothing was sent"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(cli, words, message, away, monkeypatch):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    shown = cli("export", *words)
    assert shown.exit_code == 2
    assert message in shown.stderr
    assert len(shown.stderr.strip().splitlines()) == 1
    assert shown.stdout == ""
    assert list(away.iterdir()) == []


def test_a_folder_without_results_is_named(cli, away):
    (away / "empty").mkdir()
    shown = cli("export", "empty", "--to", "csv")
    assert shown.exit_code == 2
    assert "the folder empty has no results.json" in shown.stderr


@pytest.mark.usefixtures("toys")
def test_a_method_without_shipped_results_says_how_to_make_them(cli):
    shown = cli("export", "tidy", "--to", "csv")
    assert shown.exit_code == 2
    assert "`cameraready run tidy` makes them" in shown.stderr


@pytest.mark.parametrize(
    "damage",
    [
        lambda saved: saved["claims"][1].update(estimate="big"),
        lambda saved: saved["claims"][1].update(verdict="marvellous"),
        lambda saved: saved["claims"][1].update(label=None),
        lambda saved: saved.update(environment=["x"]),
        lambda saved: saved.update(workloads="x"),
        lambda saved: saved.update(claims=3),
        lambda saved: saved.pop("tier"),
    ],
)
def test_damaged_results_are_refused_in_one_sentence_and_nothing_is_written(cli, folder, away, damage):
    path = folder / "results.json"
    saved = json.loads(path.read_text())
    damage(saved)
    path.write_text(json.dumps(saved))
    for to in FORMATS:
        shown = cli("export", folder, "--to", to)
        assert shown.exit_code == 1
        assert "damaged" in shown.stderr
        assert len(shown.stderr.strip().splitlines()) == 1
    assert list(away.iterdir()) == []


@pytest.mark.parametrize(("module", "extra"), [("mlflow", "mlflow"), ("trackio", "trackio")])
def test_a_missing_extra_is_one_line_with_the_command(folder, module, extra, tmp_path):
    """In a process of its own, in which the library cannot be found."""
    script = (
        "import sys\n"
        f"sys.modules[{module!r}] = None\n"
        "from cameraready.cli import main\n"
        f"sys.argv = ['cameraready', 'export', {str(folder)!r}, '--to', {module!r}, '--out', {str(tmp_path / 'o')!r}]\n"
        "main()\n"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert shown.returncode == 1
    assert shown.stderr.strip().splitlines() == [
        f'Error: {module} is not installed: pip install "cameraready[{extra}]"'
    ]
    assert not (tmp_path / "o" / "oddshap-logbook").exists()


def test_every_result_can_do_the_same(tmp_path):
    places = a_result().export("csv", tmp_path)
    assert [Path(place).name for place in places] == ["oddshap-claims.csv", "oddshap-rows.csv"]
