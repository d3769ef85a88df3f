"""A copy of the package with as many methods as the finished catalogue: cards and results of real size, no code."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path

import cameraready
from cameraready.catalog import catalog

N_CARDS = 76
ROOMS = 15
SHIPPED = Path(cameraready.__file__).parent
MODEL = SHIPPED / "attribution" / "oddshap"
_WITHOUT_METHODS = shutil.ignore_patterns("__pycache__", *{card.room for card in catalog()})


def build(folder: Path, n_cards: int = N_CARDS) -> Path:
    """Write the package into `folder`, which then goes on PYTHONPATH; returns the package itself.

    Every card has the size of OddSHAP's, with words of its own; every method ships results of the size of OddSHAP's.
    """
    package = folder / "cameraready"
    shutil.copytree(SHIPPED, package, ignore=_WITHOUT_METHODS)
    card = (MODEL / "card.toml").read_text(encoding="utf-8")
    results = (MODEL / "results.json").read_text(encoding="utf-8")
    vocabulary = [f"{head}{tail}" for head in _SYLLABLES for tail in _SYLLABLES]
    for number in range(n_cards):
        method = package / f"room{number % ROOMS:02d}" / f"method_{number:02d}"
        method.mkdir(parents=True)
        (method / "__init__.py").touch()
        (method / "card.toml").write_text(_own_words(card, number, vocabulary), encoding="utf-8")
        (method / "results.json").write_text(
            json.dumps({**json.loads(results), "method": f"method-{number:02d}"}), encoding="utf-8"
        )
    return package


_SYLLABLES = (
    *("ba", "cor", "del", "fin", "gra", "hul", "jun", "kel", "lom", "mar", "nes", "ol", "pra", "quil", "ros", "sten"),
    *("tru", "ven", "wis", "yar", "zen", "ach", "bri", "clo", "dro", "fle", "gno", "hea", "isk", "jor", "kra", "lun"),
)


def _own_words(card: str, number: int, vocabulary: list[str]) -> str:
    """`card` with another slug and id, and with every third of the words in its sentences replaced."""
    chance = random.Random(number)
    texts = re.compile(r"(?<=[ \"])[a-z]{3,}(?=[ .,:;\"])")
    lines = []
    for line in card.replace("2602.01399", f"2603.{number:05d}").splitlines():
        if line.startswith('slug = "'):
            line = f'slug = "method-{number:02d}"'
        elif line.startswith(('title = "', 'purpose = "', '  "')):
            line = texts.sub(lambda word: chance.choice(vocabulary) if chance.random() < 1 / 3 else word[0], line)
        lines.append(line)
    return "\n".join(lines) + "\n"
