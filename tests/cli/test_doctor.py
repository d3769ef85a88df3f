"""`doctor`: what it finds, and that only what is broken fails."""

import json
import sys

import pytest

from cameraready.cli import failing

pytestmark = pytest.mark.usefixtures("toys")


def findings(ran):
    return {finding["what"]: finding for finding in json.loads(ran.stdout)}


def test_a_healthy_machine_is_ready(cli):
    ran = cli("doctor", "--json")
    assert ran.exit_code == 0
    found = findings(ran)
    assert sys.executable in found["python"]["text"]
    assert found["catalogue"]["text"] == "3 methods in toys"
    assert "none yet" in found["ledger"]["text"]
    assert "Ready." in cli("doctor").stdout


def test_a_run_shows_in_the_ledger(cli):
    cli("run", "tidy", "--tier", "smoke")
    assert "24 finished trials" in findings(cli("doctor", "--json"))["ledger"]["text"]


def test_a_damaged_ledger_is_broken_and_stays_as_it_is(cli, away):
    (away / "ledger.sqlite").write_bytes(b"SQLite format 3\0" + b"rubbish" * 100)
    before = (away / "ledger.sqlite").read_bytes()
    ran = cli("doctor", "--ledger", "ledger.sqlite", "--json")
    assert ran.exit_code == 1
    assert findings(ran)["ledger"]["state"] == "broken"
    assert (away / "ledger.sqlite").read_bytes() == before


def test_a_bad_card_is_broken(cli, toys):
    (toys / "toys" / "tidy" / "card.toml").write_text("slug = 3")
    ran = cli("doctor", "--json")
    assert ran.exit_code == 1
    assert "card.toml" in findings(ran)["catalogue"]["text"]


def test_a_method_whose_study_cannot_be_imported_is_broken(cli, toys):
    assert findings(cli("doctor", "tidy", "--json"))["tidy"]["state"] == "fine"
    (toys / "toys" / "loose" / "study.py").write_text("import a_library_that_nobody_has\n")
    ran = cli("doctor", "loose", "--json")
    assert ran.exit_code == 1
    assert "a_library_that_nobody_has" in findings(ran)["loose"]["text"]


def test_an_unknown_method_is_a_usage_error(cli):
    assert cli("doctor", "nobody").exit_code == 2


def test_what_is_missing_comes_with_its_pip_line(monkeypatch):
    monkeypatch.setattr(failing, "extras", lambda: {"study": ["polars", "vl-convert-python"], "formats": ["skops"]})
    assert failing.missing("skops.io") == 'skops is not installed: pip install "cameraready[formats]"'
    assert failing.missing("elsewhere") == "elsewhere is not installed: pip install elsewhere"
