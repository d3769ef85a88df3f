"""`list`, `find`, `show`: what is printed for a person, what for a script."""

import json

import pytest

from cameraready.catalog import resolve

pytestmark = pytest.mark.usefixtures("toys")


def test_list_shows_every_method_under_its_room(cli):
    shown = cli("list")
    assert shown.exit_code == 0
    lines = shown.stdout.splitlines()
    assert lines[0] == "toys"
    assert [line.split()[0] for line in lines[1:]] == ["loose", "shaky", "tidy"]


def test_piped_output_keeps_a_method_on_a_line(cli, toys):
    card = toys / "toys" / "tidy" / "card.toml"
    long = "Sort " + "very " * 60 + "many numbers."
    card.write_text(card.read_text().replace("Sort numbers into tidy piles.", long))
    assert [line for line in cli("list").stdout.splitlines() if long in line]


def test_list_for_a_script(cli):
    cards = json.loads(cli("list", "--json").stdout)
    assert [card["slug"] for card in cards] == ["loose", "shaky", "tidy"]
    assert cards[2]["module"] == "cameraready.toys.tidy"
    assert cards[2]["url"] == "https://arxiv.org/abs/2601.00000"


def test_an_unknown_room_is_a_usage_error_that_lists_the_rooms(cli):
    shown = cli("list", "vision")
    assert shown.exit_code == 2
    assert "rooms: toys" in shown.stderr
    assert shown.stdout == ""


def test_find_ranks_and_takes_words_with_and_without_quotes(cli):
    assert cli("find", "tidy piles").stdout == cli("find", "tidy", "piles").stdout
    assert cli("find", "tidy piles").stdout.split()[0] == "tidy"


def test_find_by_what_is_used_today(cli):
    found = json.loads(cli("find", "--instead-of", "sort", "--json").stdout)
    assert {card["slug"] for card in found} == {"loose", "shaky", "tidy"}
    nothing = cli("find", "--instead-of", "pandas")
    assert nothing.exit_code == 0
    assert "Replacements are known for parts of numpy." in nothing.stdout
    assert "Did you mean numpy.sort?" in cli("find", "--instead-of", "numpy.sorts").stdout


def test_a_search_for_nothing_is_a_usage_error(cli):
    assert cli("find").exit_code == 2


def test_show_by_id_tells_everything_on_the_card(cli):
    shown = cli("show", "https://arxiv.org/abs/2601.00000v1")
    assert shown.exit_code == 0
    for text in ("A tidy method", "Ada Lovelace", "Numbers are plenty.", "There are none.", "numpy.sort", "Sorter()"):
        assert text in shown.stdout
    assert "from cameraready.toys.tidy import Sorter" in shown.stdout
    assert "no desk run has been published" in shown.stdout


def test_show_tells_the_shipped_verdicts(cli, toys):
    cli("run", "tidy", "--tier", "smoke", "--out", toys / "toys" / "tidy")
    shipped = resolve("tidy").results_path
    results = json.loads(shipped.read_text())
    results["claims"][0].update(verdict="holds", reason="")  # as a desk run would have found
    shipped.write_text(json.dumps(results))
    shown = cli("show", "tidy")
    assert "✓ holds" in shown.stdout
    assert "0.25" in shown.stdout
    assert "a large machine" in shown.stdout
    assert json.loads(cli("show", "tidy", "--json").stdout)["results"]["claims"][0]["verdict"] == "holds"


def test_damaged_results_are_an_error_that_names_the_file(cli):
    path = resolve("tidy").results_path
    path.write_text("{")
    shown = cli("show", "tidy")
    assert shown.exit_code == 1
    assert str(path) in shown.stderr


def test_a_misspelt_method_brings_near_misses(cli):
    shown = cli("show", "tidi")
    assert shown.exit_code == 2
    assert "did you mean tidy" in shown.stderr


def test_show_takes_a_room_and_a_method_by_room_and_folder(cli):
    assert cli("show", "toys").stdout == cli("list", "toys").stdout
    assert json.loads(cli("show", "toys", "--json").stdout) == json.loads(cli("list", "toys", "--json").stdout)
    assert cli("show", "toys.tidy").stdout == cli("show", "tidy").stdout
    assert cli("cite", "toys.tidy").stdout == cli("cite", "tidy").stdout
    assert json.loads(cli("run", "toys.tidy", "--tier", "smoke", "--dry-run", "--json").stdout)["trials"] > 0


def test_a_bad_card_is_one_sentence(cli, toys):
    card = toys / "toys" / "tidy" / "card.toml"
    card.write_text(card.read_text().replace("claims = 2", "claims = 0"))
    shown = cli("list")
    assert shown.exit_code == 1
    assert len(shown.stderr.strip().splitlines()) == 1
    assert "claims must be" in shown.stderr


def test_show_tells_what_your_own_must_look_like(cli, toys):
    card = toys / "toys" / "tidy" / "card.toml"
    card.write_text(card.read_text() + 'own_arm = "A function of numbers."\naccepts = ["table", "your sentence"]\n')
    assert "Your own" not in cli("show", "loose").stdout
    lines = cli("show", "tidy").stdout.splitlines()
    at = lines.index("Your own")
    assert lines[at + 1] == "  --with  A function of numbers."
    assert lines[at + 2].startswith("  --on    a table with the column to predict")
    assert any(line.strip() == "your sentence" for line in lines)
