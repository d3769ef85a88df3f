"""Commands that run nothing stay quick with 76 methods: what they import and read is counted; `tests.cli.speed` times them."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cameraready import ranking
from cameraready.catalog import catalog
from tests.cli import many_cards

HEAVY = {
    *("altair", "execnet", "jinja2", "lightgbm", "numba", "numpy", "pandas", "pebble", "platformdirs", "polars"),
    *("psutil", "pydantic", "scipy", "shap", "sklearn", "uv", "vl_convert"),
}
SPY = """
import sys
opened = []
def note(event, args):
    if event == "open" and str(args[0]).endswith(("card.toml", "results.json", "results.parquet")):
        opened.append(str(args[0]))
sys.addaudithook(note)
sys.argv = ["cameraready", *sys.argv[1:]]
from cameraready.cli import main
code = 1
try:
    main()
except SystemExit as end:
    code = end.code
for path in opened:
    print("opened", path, file=sys.stderr)
for name in sorted({name.partition(".")[0] for name in sys.modules}):
    print("imported", name, file=sys.stderr)
sys.exit(code)
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    return many_cards.build(tmp_path_factory.mktemp("many"))


@pytest.mark.parametrize(
    ("command", "cards", "results"),
    [
        ("--help", 0, 0),
        ("run --help", 0, 0),
        ("list", many_cards.N_CARDS, 0),
        ("list room03 --json", many_cards.N_CARDS, 0),
        ("find explain single predictions", many_cards.N_CARDS, 0),
        ("find --instead-of shap.KernelExplainer --room room03", many_cards.N_CARDS, 0),
        ("show method-07", 1, 1),
        ("show method_07 --json", 1, 1),
        ("cite method-07", 1, 0),
    ],
)
def test_a_command_reads_what_it_shows_once_and_imports_nothing_heavy(package, tmp_path, command, cards, results):
    ran = subprocess.run(
        [sys.executable, "-c", SPY, *command.split()],
        env={"PYTHONPATH": str(package.parent), "PATH": "", "HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    words = [line.split(maxsplit=1) for line in ran.stderr.splitlines()]
    read = Counter(path for word, path in words if word == "opened")
    assert set(read.values()) <= {1}
    assert Counter(Path(path).name for path in read) == +Counter({"card.toml": cards, "results.json": results})
    assert not {name for word, name in words if word == "imported"} & HEAVY


def test_the_stand_in_catalogue_is_as_large_as_the_finished_one(package):
    found = catalog(package)
    assert len(found) == many_cards.N_CARDS
    assert len({card.room for card in found}) == many_cards.ROOMS
    shipped = (many_cards.MODEL / "card.toml").stat().st_size
    assert all((card.folder / "card.toml").stat().st_size > 0.9 * shipped for card in found)
    assert len({card.purpose for card in found}) == many_cards.N_CARDS


words = st.text("abcdeinorst", min_size=1, max_size=12)


@given(words, st.sets(words, max_size=30))
def test_cheap_bounds_change_no_match(word, vocabulary):
    """Words are alike if their matching letters are nine tenths, however that is found out."""
    from difflib import SequenceMatcher

    alike = {
        other
        for other in vocabulary
        if other[0] == word[0]
        and abs(len(other) - len(word)) <= 2
        and SequenceMatcher(None, word, other).ratio() >= 0.9
    }
    assert {other for other in vocabulary if ranking._alike(word, other)} == alike


def test_a_word_is_compared_once_with_each_different_word(package):
    """Seventy-six cards with the same words cost as many comparisons as one of them."""

    def comparisons(cards) -> int:
        ranking._stem.cache_clear()
        calls = 0

        def count(frame, event, _):
            nonlocal calls
            calls += event == "call" and frame.f_code is ranking._alike.__code__

        sys.setprofile(count)
        try:
            ranking.rank("explian single predictoins", cards)
        finally:
            sys.setprofile(None)
        return calls

    card = catalog(package)[0]
    assert comparisons([card]) == comparisons([card] * many_cards.N_CARDS) > 0
