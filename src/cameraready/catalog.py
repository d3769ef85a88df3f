"""Finds the cards: the only list of methods there is. Reads files; imports no method.

The module can itself be called, so that `cameraready.catalog()` lists the methods and `cameraready.catalog.resolve` is
still there.
"""

from __future__ import annotations

import difflib
import math
import re
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType

from cameraready.card import CARD_FILE, RESULTS_FILE, Card, CardError, Upstream, read_card

__all__ = [
    "CARD_FILE", "RESULTS_FILE", "Card", "CardError", "UnknownMethod", "Upstream", "catalog", "find", "read_card",
    "resolve", "rooms", "select",
]  # fmt: skip

_HERE = Path(__file__).parent
_ARXIV_IN_TEXT = re.compile(r"(?:^|arxiv:|/)(\d{4}\.\d{4,5})(?:v\d+)?(?:\.pdf)?/?(?:[?#].*)?$", re.IGNORECASE)
_FORUM_IN_URL = re.compile(r"openreview\.net/(?:forum|pdf|attachment)\?(?:.*&)?id=([\w-]+)", re.IGNORECASE)


class UnknownMethod(LookupError):
    """No card answers to what was asked for; the message lists near misses."""

    def __str__(self) -> str:
        return str(self.args[0])


# --- the list -------------------------------------------------------------------------------------------------------


def catalog(root: Path | None = None) -> list[Card]:
    """All cards, by room and slug.

    `root` is the package folder that holds the rooms; by default the one of `cameraready` itself.

    Raises
    ------
    CardError
        If a card is malformed, or two cards share a slug.
    """
    return list(_read_all(_HERE if root is None else Path(root)))


@cache
def _read_all(root: Path) -> tuple[Card, ...]:
    paths = [
        p
        for p in sorted(root.glob(f"*/*/{CARD_FILE}"))
        if not any(part.startswith(("_", ".")) for part in p.parts[-3:-1])
    ]
    cards = [read_card(path) for path in paths]
    by_slug: dict[str, Card] = {}
    for card in cards:
        other = by_slug.setdefault(card.slug, card)
        if other is not card:
            raise CardError(f"{card.folder / CARD_FILE}: slug {card.slug!r} is taken by {other.folder / CARD_FILE}")
    return tuple(sorted(cards, key=lambda card: (card.room, card.slug)))


def rooms(root: Path | None = None) -> list[str]:
    """Names of the rooms that hold at least one method."""
    return sorted({card.room for card in catalog(root)})


def select(name: str, root: Path | None = None) -> list[Card]:
    """The methods that `name` stands for: a room, ``"all"``, or whatever `resolve` accepts.

    Raises
    ------
    UnknownMethod
        If it stands for none.
    """
    cards = catalog(root)
    if name == "all":
        return cards
    return [card for card in cards if card.room == name] or [resolve(name, root)]


def resolve(name: str, root: Path | None = None) -> Card:
    """The card that `name` means: slug, module, exported name, arXiv id or URL, OpenReview id or URL.

    Raises
    ------
    UnknownMethod
        If there is none; near misses are listed.
    """
    cards = catalog(root)
    wanted = name.strip()
    paper = _ARXIV_IN_TEXT.search(wanted)
    forum = _FORUM_IN_URL.search(wanted)
    for card in cards:
        if paper and card.arxiv == paper[1]:
            return card
        if card.openreview and card.openreview in (wanted, forum[1] if forum else None):
            return card
    slug = wanted.lower().replace("_", "-")
    for card in cards:
        names = {card.slug, card.module, card.module.rpartition(".")[2].replace("_", "-")}
        if slug in names or wanted in names or wanted in card.exports:
            return card
    if paper or forum:
        raise UnknownMethod(f"no method of the catalogue is from {wanted}; `cameraready list` shows all {len(cards)}")
    shown = f"`cameraready list` shows all {len(cards)}"
    raise UnknownMethod(f"there is no method {name!r}{_near_misses(slug, cards)}; {shown}")


def _near_misses(slug: str, cards: Sequence[Card]) -> str:
    names = [card.slug for card in cards] + sorted({card.room for card in cards})
    close = difflib.get_close_matches(slug, names, n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(close)}?" if close else ""


# --- search ---------------------------------------------------------------------------------------------------------

_STOP_WORDS = frozenset((
    "a", "an", "and", "are", "as", "at", "be", "by", "can", "do", "for", "from", "how", "i", "in", "is", "it", "my",
    "of", "on", "or", "that", "the", "this", "to", "use", "want", "what", "when", "with",
))  # fmt: skip
_ENDINGS = ("ations", "ation", "ings", "ing", "ers", "er", "ors", "or", "ions", "ion", "ed", "es", "s", "ly", "al")
_WEIGHTS = {
    "slug": 4.0,
    "exports": 4.0,
    "instead_of": 3.0,
    "purpose": 3.0,
    "title": 3.0,
    "use_when": 2.0,
    "room": 2.0,
    "kind": 2.0,
    "authors": 1.0,
}


def find(
    words: str | None = None, *, instead_of: str | None = None, room: str | None = None, root: Path | None = None
) -> list[Card]:
    """The methods that suit a job, best first; empty if none does.

    Parameters
    ----------
    words : str
        What you want to do. Ranked by how many of the words a card has, then by where it has them (rarer words count
        more). Endings and small typing errors are forgiven.
    instead_of : str
        What you use today: ``"shap.KernelExplainer"``, ``"KernelExplainer"`` or ``"shap"``.
    room : str
        Only methods of this room.

    Raises
    ------
    ValueError
        If nothing was asked, or there is no such room.
    """
    cards = catalog(root)
    if room is not None:
        known = sorted({card.room for card in cards})
        if room not in known:
            raise ValueError(f"there is no room {room!r}; rooms: {', '.join(known)}")
        cards = [card for card in cards if card.room == room]
    if words is None and instead_of is None and room is None:
        raise ValueError("say what to look for: words, instead_of or room")
    if instead_of is not None:
        ranked = sorted(((_replaces(card, instead_of), card) for card in cards), key=lambda pair: -pair[0])
        cards = [card for score, card in ranked if score > 0]
    if words is not None:
        asked = [word for word in _words(words) if word not in _STOP_WORDS]
        if not asked:
            raise ValueError(f"{words!r} has no word to look for")
        cards = _rank(asked, cards)
    return cards


def _replaces(card: Card, name: str) -> float:
    wanted = name.strip().lower()
    best = 0.0
    for known in card.instead_of:
        full = known.lower()
        if full == wanted:
            best = max(best, 3.0)
        elif full.rpartition(".")[2] == wanted.rpartition(".")[2]:
            best = max(best, 2.0)
        elif wanted in re.split(r"[.\s]+", full):
            best = max(best, 1.0)
    return best


def _rank(asked: Sequence[str], cards: Sequence[Card]) -> list[Card]:
    texts = [_weighted_words(card) for card in cards]
    scored = []
    rarity = {word: math.log(1 + len(cards) / (1 + sum(_match(word, text) > 0 for text in texts))) for word in asked}
    for card, text in zip(cards, texts, strict=True):
        found = [_match(word, text) for word in asked]
        hits = sum(score > 0 for score in found)
        if hits:
            scored.append((hits, sum(score * rarity[word] for score, word in zip(found, asked, strict=True)), card))
    return [card for _, _, card in sorted(scored, key=lambda item: (-item[0], -item[1], item[2].slug))]


def _weighted_words(card: Card) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, weight in _WEIGHTS.items():
        value = getattr(card, name)
        for word in _words(value if isinstance(value, str) else " ".join(value)):
            found[word] = max(found.get(word, 0.0), weight)
    return found


def _match(word: str, text: Mapping[str, float]) -> float:
    """Weight of the best place where `text` has `word`; a near match counts for less."""
    if word in text:
        return text[word]
    stem = _stem(word)
    best = 0.0
    for other, weight in text.items():
        if _stem(other) == stem:
            best = max(best, 0.9 * weight)
        elif len(stem) >= 4 and (other.startswith(stem) or _alike(word, other) or _alike(stem, _stem(other))):
            best = max(best, 0.6 * weight)
    return best


def _alike(one: str, other: str) -> bool:
    if one[:1] != other[:1] or abs(len(one) - len(other)) > 2:
        return False
    return difflib.SequenceMatcher(None, one, other).ratio() >= 0.9


def _stem(word: str) -> str:
    for ending in _ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= 4:
            return word.removesuffix(ending)
    return word


def _words(text: str) -> list[str]:
    """Lower-case words; ``OddShap`` gives both ``oddshap`` and its parts."""
    found = []
    for token in re.findall(r"[A-Za-z0-9]+", text):
        parts = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+", token)
        found += [token, *(parts if len(parts) > 1 else [])]
    return [word.lower() for word in found]


class _CallableModule(ModuleType):
    def __call__(self, root: Path | None = None) -> list[Card]:
        return catalog(root)


sys.modules[__name__].__class__ = _CallableModule
