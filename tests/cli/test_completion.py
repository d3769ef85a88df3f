"""Completion in the shell: what is proposed, and that a real bash takes it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from cameraready.cli import browse
from cameraready.cli.app import app

pytestmark = pytest.mark.usefixtures("toys")


def proposals(command: str, incomplete: str, parameter: str = "method") -> list[str]:
    found = get_command(app).commands[command]
    param = next(param for param in found.params if param.name == parameter)
    context = found.make_context(command, [], resilient_parsing=True)
    return [item.value for item in param.shell_complete(context, incomplete)]


def test_slugs_are_proposed_where_one_method_is_meant():
    assert proposals("doctor", "") == ["loose", "shaky", "tidy"]
    assert proposals("doctor", "t") == ["tidy"]


def test_slugs_and_rooms_are_proposed_where_something_is_shown():
    assert proposals("show", "") == ["loose", "shaky", "tidy", "toys"]
    assert proposals("show", "t") == ["tidy", "toys"]


@pytest.mark.parametrize(
    ("command", "parameter"), [("run", "method"), ("report", "method"), ("export", "method"), ("cite", "methods")]
)
def test_rooms_and_all_are_proposed_where_several_may_be_meant(command, parameter):
    assert proposals(command, "", parameter) == ["loose", "shaky", "tidy", "toys", "all"]
    assert proposals(command, "t", parameter) == ["tidy", "toys"]


@pytest.mark.parametrize("command", ["list", "find"])
def test_rooms_are_proposed_where_a_room_is_meant(command):
    assert proposals(command, "", "room") == ["toys"]


def test_a_bad_card_proposes_nothing_and_says_nothing(toys):
    (toys / "toys" / "tidy" / "card.toml").write_text("slug = 3")
    assert browse.complete_selection("") == [("all", "every method")]


def test_a_proposal_fits_on_a_line(toys):
    card = toys / "toys" / "tidy" / "card.toml"
    card.write_text(card.read_text().replace("Sort numbers into tidy piles.", "Sort " + "very many " * 60))
    assert all(len(text) < 80 for _, text in browse.complete_selection(""))


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_a_slug(tmp_path):
    script = (
        'eval "$(cameraready --show-completion)"\n'
        "COMP_WORDS=(cameraready run odds); COMP_CWORD=2\n"
        '_cameraready_completion cameraready; echo "${COMPREPLY[@]}"\n'
    )
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    ran = subprocess.run(
        ["bash", "--norc"],
        input=script,
        env={**os.environ, "PATH": path, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert ran.stdout.strip() == "oddshap", ran.stderr
