"""Finds the cards: the only list of methods there is. Reads files; imports no method.

The module can itself be called, so that `cameraready.catalog()` lists the methods and `cameraready.catalog.resolve` is
still there.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType

from cameraready.card import CARD_FILE, RESULTS_FILE, SLUG, Card, CardError, Upstream, read_card

__all__ = [
    "CARD_FILE", "RESULTS_FILE", "Card", "CardError", "UnknownMethod", "Upstream", "catalog", "find", "is_room",
    "read_card", "resolve", "rooms", "select",
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
    cards = [read_card(path) for path in _card_paths(root)]
    by_slug: dict[str, Card] = {}
    for card in cards:
        other = by_slug.setdefault(card.slug, card)
        if other is not card:
            raise CardError(f"{card.folder / CARD_FILE}: slug {card.slug!r} is taken by {other.folder / CARD_FILE}")
    return tuple(sorted(cards, key=lambda card: (card.room, card.slug)))


def _card_paths(root: Path, *, room: str = "*", folder: str = "*") -> list[Path]:
    """Where cards lie: in every room, or one, and in folders of any name, or of one. Hidden and private folders have none."""
    paths = sorted(root.glob(f"{room}/{folder}/{CARD_FILE}"))
    return [path for path in paths if not any(part.startswith(("_", ".")) for part in path.parts[-3:-1])]


def rooms(root: Path | None = None) -> list[str]:
    """Names of the rooms that hold at least one method."""
    return sorted({card.room for card in catalog(root)})


def is_room(name: str, root: Path | None = None) -> bool:
    """Whether `name` is a room that holds at least one method; no card is read."""
    return name.isidentifier() and bool(_card_paths(_HERE if root is None else Path(root), room=name))


def select(name: str, root: Path | None = None) -> list[Card]:
    """The methods that `name` stands for: a room, ``"all"``, or whatever `resolve` accepts.

    Raises
    ------
    UnknownMethod
        If it stands for none.
    """
    if name == "all":
        return catalog(root)
    if is_room(name, root):
        return [card for card in catalog(root) if card.room == name]
    return [resolve(name, root)]


def resolve(name: str, root: Path | None = None) -> Card:
    """The card that `name` means: slug, module (`room.folder` too), exported name, arXiv id or URL, OpenReview id or URL.

    Raises
    ------
    UnknownMethod
        If there is none; near misses are listed.
    """
    wanted = name.strip()
    slug = wanted.lower().replace("_", "-")
    if card := _by_slug(slug, _HERE if root is None else Path(root)):
        return card
    cards = catalog(root)
    paper = _ARXIV_IN_TEXT.search(wanted)
    forum = _FORUM_IN_URL.search(wanted)
    for card in cards:
        if paper and card.arxiv == paper[1]:
            return card
        if card.openreview and card.openreview in (wanted, forum[1] if forum else None):
            return card
    for card in cards:
        folder = card.module.rpartition(".")[2]
        in_room = {f"{card.room}.{card.slug}", f"{card.room}.{folder}".replace("_", "-")}
        names = {card.slug, card.module, folder.replace("_", "-"), *in_room}
        if slug in names or wanted in names or wanted in card.exports:
            return card
    if paper or forum:
        raise UnknownMethod(f"no method of the catalogue is from {wanted}; `cameraready list` shows all {len(cards)}")
    if inside := [card.slug for card in cards if card.room == wanted]:
        raise UnknownMethod(f"{wanted!r} is a room; its methods: {', '.join(inside)}")
    shown = f"`cameraready list` shows all {len(cards)}"
    raise UnknownMethod(f"there is no method {name!r}{_near_misses(slug, cards)}; {shown}")


@cache
def _by_slug(slug: str, root: Path) -> Card | None:
    """The card whose folder is named as the slug is, as is usual: it is found without reading the others."""
    if not SLUG.fullmatch(slug):
        return None
    paths = _card_paths(root, folder=slug.replace("-", "_"))
    cards = [read_card(path) for path in paths] if len(paths) == 1 else []
    return next((card for card in cards if card.slug == slug), None)


def _near_misses(slug: str, cards: Sequence[Card]) -> str:
    import difflib

    names = [card.slug for card in cards] + sorted({card.room for card in cards})
    close = difflib.get_close_matches(slug, names, n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(close)}?" if close else ""


# --- search ---------------------------------------------------------------------------------------------------------


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
        from cameraready.ranking import rank

        cards = rank(words, cards)
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
        elif full.startswith(f"{wanted} "):  # "trl.GRPOTrainer with an outcome reward"
            best = max(best, 1.5)
        elif {wanted.partition(".")[0], wanted.rpartition(".")[2]} <= {*re.split(r"[.\s]+", full)} or full.startswith(
            f"{wanted}."
        ):
            best = max(best, 1.0)
    return best


class _CallableModule(ModuleType):
    def __call__(self, root: Path | None = None) -> list[Card]:
        return catalog(root)


sys.modules[__name__].__class__ = _CallableModule
