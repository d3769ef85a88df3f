"""How to cite a method's paper and this software, as BibTeX or CSL-JSON. Needs no extra."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from cameraready import tex
from cameraready.card import Card

PROCEEDINGS = "Proceedings of the 43rd International Conference on Machine Learning"
YEAR = 2026
FORMATS = ("bibtex",)

# What CITATION.cff says of the software; it is not at hand in an installed package. A test holds the two equal.
SOFTWARE_TITLE = "camera-ready: methods of ICML 2026 as components, with their claims put to the test"
SOFTWARE_AUTHORS = "The camera-ready authors"
SOFTWARE_URL = "https://github.com/camera-ready/camera-ready"
SOFTWARE_YEAR = 2026

#: Words that belong to the last name even with a capital: Christopher De Sa, Yann Le Cun.
_CAPITAL_PARTICLES = frozenset(
    [
        "De",
        "Del",
        "Della",
        "Den",
        "Der",
        "Di",
        "Da",
        "Dos",
        "Du",
        "El",
        "La",
        "Le",
        "Van",
        "Von",
        "Ter",
        "Ten",
        "St.",
        "Saint",
    ]
)
_SUFFIX = re.compile(r"(Jr|Sr)\.?|I{2,3}|IV")


@dataclass(frozen=True)
class Name:
    """A person's name in the parts that bibliographies sort by."""

    given: str
    family: str
    particle: str = ""  # "van der", in lower case: not sorted by
    suffix: str = ""


def parse_name(name: str) -> Name:
    """The parts of ``"Robbert van der Berg"``, ``"R. Teal Witter"``, ``"Sammy Davis Jr."`` or ``"Last, First"``.

    A comma decides where a rule would guess wrong: write ``"García Márquez, Gabriel"``.
    """
    if "and" in name.split():  # BibTeX would see two people
        return Name("", name)
    if "," in name:
        family, *between, given = (part.strip() for part in name.split(","))
        if not between and _SUFFIX.fullmatch(given):  # Sammy Davis, Jr.
            return _with_suffix(parse_name(family), given)
        words = family.split()
        particles = _leading(words[:-1], str.islower)
        rest = words[len(particles) :]
        return Name(given, " ".join(rest), " ".join(particles), " ".join(between))
    words = name.split()
    if len(words) > 2 and _SUFFIX.fullmatch(words[-1]):
        return _with_suffix(parse_name(" ".join(words[:-1])), words[-1])
    start = max(len(words) - 1, 0)
    while start > 1 and words[start - 1] in _CAPITAL_PARTICLES:
        start -= 1
    first = start
    while first > 1 and words[first - 1].islower():
        first -= 1
    return Name(" ".join(words[:first]), " ".join(words[start:]), " ".join(words[first:start]))


def _with_suffix(name: Name, suffix: str) -> Name:
    return Name(name.given, name.family, name.particle, suffix)


def _leading(words: Sequence[str], test: Any) -> list[str]:
    found = []
    for word in words:
        if not test(word):
            break
        found.append(word)
    return found


def key_of(card: Card) -> str:
    """``fumagalli2026oddshap``: first author's last name, year, slug; the same in every version."""
    family = parse_name(card.authors[0]).family if card.authors else ""
    return f"{tex.ascii_letters(family).lower()}{YEAR}{tex.ascii_letters(card.slug)}"


def version() -> str:
    """The version of this software."""
    import cameraready

    return cameraready.__version__


# --- BibTeX ---------------------------------------------------------------------------------------------------------


def bibtex(cards: Sequence[Card]) -> str:
    """One entry a paper, in the order given, and one for this software. ASCII only."""
    return "\n\n".join([*(_paper_entry(card) for card in cards), _software_entry()]) + "\n"


def _paper_entry(card: Card) -> str:
    fields = {
        "title": f"{{{tex.escape(card.title)}}}",  # braces keep the capitals
        "author": " and ".join(_bibtex_name(parse_name(author)) for author in card.authors),
        "booktitle": PROCEEDINGS,
        "year": str(YEAR),
    }
    if card.arxiv:
        fields |= {"eprint": card.arxiv, "archivePrefix": "arXiv"}
    if card.url:
        fields["url"] = _url(card.url)
    return _entry("inproceedings", key_of(card), fields)


def _software_entry() -> str:
    fields = {
        "title": f"{{{tex.escape(SOFTWARE_TITLE)}}}",
        "author": f"{{{tex.escape(SOFTWARE_AUTHORS)}}}",
        "year": str(SOFTWARE_YEAR),
        "note": f"Version {tex.escape(version())}",
        "url": _url(SOFTWARE_URL),
    }
    return _entry("misc", f"cameraready{SOFTWARE_YEAR}", fields)


def _entry(kind: str, key: str, fields: Mapping[str, str]) -> str:
    width = max(map(len, fields))
    lines = [f"  {name:<{width}} = {{{value}}}" for name, value in fields.items()]
    return f"@{kind}{{{key},\n" + ",\n".join(lines) + "\n}"


def _bibtex_name(name: Name) -> str:
    parts = [f"{name.particle} {name.family}".strip(), name.suffix, name.given]
    text = ", ".join(tex.escape(part) for part in parts if part)
    return f"{{{text}}}" if "and" in text.split() else text


def _url(url: str) -> str:
    return quote(url, safe=":/?=&-_.~+")


# --- CSL-JSON -------------------------------------------------------------------------------------------------------


def csl(cards: Sequence[Card]) -> list[dict[str, Any]]:
    """The same entries as CSL-JSON items, which pandoc, Zotero and citeproc read."""
    return [*(_paper_item(card) for card in cards), _software_item()]


def _paper_item(card: Card) -> dict[str, Any]:
    item = {
        "id": key_of(card),
        "type": "paper-conference",
        "title": card.title,
        "author": [_csl_name(parse_name(author)) for author in card.authors],
        "container-title": PROCEEDINGS,
        "issued": {"date-parts": [[YEAR]]},
        "number": f"arXiv:{card.arxiv}" if card.arxiv else "",
        "URL": card.url,
    }
    return {name: value for name, value in item.items() if value}


def _software_item() -> dict[str, Any]:
    return {
        "id": f"cameraready{SOFTWARE_YEAR}",
        "type": "software",
        "title": SOFTWARE_TITLE,
        "author": [{"literal": SOFTWARE_AUTHORS}],
        "issued": {"date-parts": [[SOFTWARE_YEAR]]},
        "version": version(),
        "URL": SOFTWARE_URL,
    }


def _csl_name(name: Name) -> dict[str, str]:
    parts = {
        "family": name.family,
        "given": name.given,
        "non-dropping-particle": name.particle,
        "suffix": name.suffix,
    }
    return {part: value for part, value in parts.items() if value}
