"""`run` and `report`: what is said first, what is written where, which exit code ends it."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CENSUS = "tests.evidence.studies.census:STUDY"
smoke = ("--tier", "smoke")
desk = ("--jobs", "1")  # the tier that gives verdicts


@pytest.mark.usefixtures("toys")
class TestOneMethod:
    def test_the_answer_is_the_first_line_then_verdicts_then_the_report(self, cli, away):
        ran = cli("run", CENSUS, *desk)
        assert ran.exit_code == 0
        lines = ran.stdout.splitlines()
        page = Path(lines[-1].removeprefix("Report: "))
        assert page.is_file()
        saved = json.loads((page.parent / "results.json").read_text())
        assert lines[0] == saved["answer"]
        verdict = next(i for i, line in enumerate(lines) if "✗ fails" in line)
        cells = [cell.strip() for cell in lines[verdict].split("  ") if cell.strip()]
        assert cells[-4:] == ["90-bit", "600", "no violation", "12 blocks"]
        assert sum("✓ holds" in line for line in lines[1:verdict]) >= 3
        assert f"{page.parent.name}/index.html" in (away / "report" / "index.html").read_text()

    def test_an_arxiv_id_will_do(self, cli):
        assert cli("run", "2601.00000", *smoke).exit_code == 0

    def test_a_named_folder_gets_page_and_results_themselves(self, cli, away):
        cli("run", "tidy", *smoke, "--out", "mine")
        assert sorted(path.name for path in (away / "mine").iterdir()) == [
            "index.html",
            "results.json",
            "results.parquet",
        ]

    @pytest.mark.parametrize(("method", "code"), [("tests.evidence.studies.training:STUDY", 0), (CENSUS, 3)])
    def test_only_strict_makes_a_refuted_claim_an_exit_code(self, cli, method, code):
        assert cli("run", method, *desk).exit_code == 0
        assert cli("run", method, *desk, "--strict").exit_code == code

    def test_failures_are_told_and_are_no_error(self, cli):
        ran = cli("run", "shaky", *smoke)
        assert ran.exit_code == 0
        assert "1 trial failed: rival 1 (raised)" in ran.stdout
        assert "RuntimeError: shaken" in Path("report/shaky-smoke/index.html").read_text()

    def test_json_is_all_there_is_on_stdout(self, cli):
        told = json.loads(cli("run", CENSUS, *desk, "--json").stdout)
        assert told["method"] == "isqrt"
        assert {claim["verdict"] for claim in told["claims"]} == {"holds", "fails"}
        assert Path(told["report"]).is_file()

    def test_a_dry_run_writes_nothing(self, cli, away):
        ran = cli("run", "tidy", "--dry-run")
        assert ran.exit_code == 0
        assert "24 trials" in ran.stdout
        assert list(away.iterdir()) == []
        assert json.loads(cli("run", "tidy", "--dry-run", "--json").stdout)["trials"] == 24

    def test_the_report_says_how_to_run_it_again(self, cli):
        told = json.loads(cli("run", "tidy", *smoke, "--set", "block=[1,2]", "--claim", "1", "--json").stdout)
        assert shlex.split(told["command"]) == [
            "cameraready",
            "run",
            "tidy",
            *smoke,
            "--claim",
            "1",
            "--set",
            "block=[1, 2]",
        ]
        again = json.loads(cli(*shlex.split(told["command"])[1:], "--json").stdout)
        assert again["claims"] == told["claims"]


@pytest.mark.usefixtures("toys")
class TestSeveral:
    def test_a_room_runs_one_after_the_other(self, cli, away):
        ran = cli("run", "toys", *smoke)
        assert ran.exit_code == 0
        answers = [line for line in ran.stdout.splitlines() if line.split(":")[0] in ("loose", "shaky", "tidy")]
        assert len(answers) == 3
        assert "[2/3] shaky" in ran.stderr
        index = (away / "report" / "index.html").read_text()
        assert all(f"{name}-smoke/index.html" in index for name in ("loose", "shaky", "tidy"))

    def test_an_error_in_one_does_not_stop_the_others(self, cli, toys):
        (toys / "toys" / "shaky" / "study.py").write_text("import a_library_that_nobody_has\n")
        ran = cli("run", "all", *smoke, "--json", "--out", "here")
        assert ran.exit_code == 1
        assert "Error: shaky: " in ran.stderr
        assert "Traceback" not in ran.stderr
        told = json.loads(ran.stdout)
        assert [entry["method"] for entry in told] == ["loose", "shaky", "tidy"]
        assert "a_library_that_nobody_has" in told[1]["error"]
        assert Path("here/tidy-smoke/index.html").is_file()

    def test_the_smoke_tier_refutes_nothing(self, cli):
        assert cli("run", "toys", *smoke, "--strict").exit_code == 0


@pytest.mark.usefixtures("toys")
class TestUsage:
    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (["tidi"], "did you mean tidy"),
            (["tidy", "--tier", "desktop"], "smoke, desk or full"),
            (["tidy", "--set", "block"], "NAME=VALUE"),
            (["tidy", "--set", "blok=3"], "blok"),
            (["tidy", "--claim", "9"], "9"),
            (["tidy", "--without", "nobody"], "nobody"),
            (["tidy", "--on", "data.csv:y"], "data.csv"),
            (["tidy", "--seeds", "0"], "seeds"),
            (["tidy", "--max-minutes", "soon"], "--max-minutes"),
            (["no.such.module:STUDY"], "no.such.module"),
            (["tests.cli.toy_room:CARD"], "not a Study"),
        ],
    )
    def test_what_cannot_be_done_as_written_ends_with_2_and_a_sentence(self, cli, words, said):
        ran = cli("run", *words)
        assert ran.exit_code == 2
        assert said in ran.stderr
        assert "Traceback" not in ran.stderr
        assert ran.stdout == ""

    def test_debug_shows_where(self, cli, toys):
        (toys / "toys" / "tidy" / "study.py").write_text("1 / 0\n")
        plain, debugged = cli("run", "tidy"), cli("--debug", "run", "tidy")
        assert plain.exit_code == debugged.exit_code == 1
        assert "ZeroDivisionError" in plain.stderr
        assert len(plain.stderr.strip().splitlines()) == 1
        assert "Traceback" in debugged.stderr

    def test_a_foreign_ledger_is_refused_and_left_alone(self, cli, away):
        (away / "notes.txt").write_text("my notes")
        ran = cli("run", "tidy", *smoke, "--ledger", "notes.txt")
        assert ran.exit_code == 1
        assert "notes.txt" in ran.stderr
        assert (away / "notes.txt").read_text() == "my notes"


@pytest.mark.usefixtures("toys")
class TestReport:
    def test_shipped_results_give_a_page_without_running(self, cli, toys):
        folder = toys / "toys" / "tidy"
        cli("run", "tidy", *smoke, "--out", folder)
        (folder / "index.html").unlink()
        written = cli("report", "tidy", "--out", "page")
        assert written.exit_code == 0
        assert written.stdout.strip() == str(Path("page", "index.html"))
        assert json.loads((folder / "results.json").read_text())["answer"] in Path("page/index.html").read_text()

    def test_a_folder_will_do(self, cli):
        cli("run", "loose", *smoke, "--out", "mine")
        page = Path("mine/index.html").read_text()
        assert cli("report", "mine", "--out", "again").exit_code == 0
        assert Path("again/index.html").read_text() == page

    def test_nothing_to_report_is_a_usage_error(self, cli):
        nothing = cli("report", "tidy")
        assert nothing.exit_code == 2
        assert "cameraready run tidy" in nothing.stderr
        assert cli("report", "no-such-folder").exit_code == 2


# --- the real command, in a process of its own ----------------------------------------------------------------------


def start(*words, **options):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "cameraready.cli", *words]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def test_a_desk_run_through_worker_processes_is_strict(away):
    process = start("run", CENSUS, "--strict", "--json", "--jobs", "2")
    told, _ = process.communicate(timeout=120)
    assert process.returncode == 3
    found = {(claim["label"], claim["workload"]): claim["verdict"] for claim in json.loads(told)["claims"]}
    assert found["1", "all"] == "holds"
    assert found["2", "90-bit"] == "fails"


def test_a_reader_that_has_seen_enough_is_no_error(away):
    process = start("list", "--json")
    process.stdout.close()
    said = process.stderr.read()
    process.wait(timeout=60)
    assert "Traceback" not in said
    assert "Exception" not in said


SLOW = """
import time
from cameraready.evidence import Study

STUDY = Study(
    open=lambda spec: None,
    workloads={"smoke": ["w"], "desk": ["w"], "full": []},
    plan=lambda tier, workload: [{"arm": "slow", "block": block} for block in range(400)],
    trial=lambda workload, ctx, *, arm, block: (time.sleep(0.05), {"x": 1.0})[1],
    method="slow",
    arms="arm",
    block="block",
)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="SIGINT is sent")
def test_an_interrupted_run_reports_what_it_has_and_goes_on_from_there(away):
    (away / "slow.py").write_text(SLOW)
    process = start("run", "slow:STUDY", "--jobs", "1")
    ledger = away.parent / "home" / "ledger.sqlite"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and (not ledger.exists() or finished_trials(ledger) < 5):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    told, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "goes on from here" in told
    assert Path("report/slow/index.html").is_file()
    kept = finished_trials(ledger)
    plan, _ = start("run", "slow:STUDY", "--dry-run", "--json").communicate(timeout=60)
    assert json.loads(plan)["finished"] == kept >= 5


def finished_trials(ledger):
    import contextlib
    import sqlite3

    try:
        with contextlib.closing(sqlite3.connect(f"file:{ledger}?mode=ro", uri=True)) as store:
            return store.execute("SELECT count(*) FROM trials").fetchone()[0]
    except sqlite3.OperationalError:  # not there yet
        return 0


def test_a_run_in_which_nothing_finished_is_an_error(cli, toys):
    study = toys / "toys" / "tidy" / "study.py"
    study.write_text(study.read_text().replace("    pass\n", "    raise RuntimeError('broken')\n"))
    ran = cli("run", "tidy", *smoke)
    assert ran.exit_code == 1
    assert "no trial returned rows" in ran.stderr
    assert "the first failure: RuntimeError: broken" in ran.stderr
    assert Path("report/tidy-smoke/index.html").is_file()
