"""Pages that lead from a problem to a method: by room, and by what a reader uses today."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import methods
import pages

from cameraready.catalog import Card, catalog, resolve
from cameraready.evidence.rivals import Rival, rivals


def rooms(cards: Sequence[Card]) -> list[str]:
    return sorted({card.room for card in cards})


def room_path(room: str) -> str:
    return f"problems/{room}.md"


def room_title(room: str) -> str:
    return _described(room)[0]


def _described(room: str) -> tuple[str, str, str]:
    """Title, question and paragraph of a room: the docstring of its package, ``Title: question``, then the paragraph."""
    spec = importlib.util.find_spec(f"cameraready.{room}")
    if spec is None or spec.origin is None:
        raise ValueError(f"room {room} is not a package")
    text = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or ""
    head, _, body = text.partition("\n\n")
    title, colon, question = head.partition(": ")
    if not colon or not body:
        raise ValueError(
            f"the docstring of cameraready.{room} must be 'Title: what the room is about', and a paragraph for its page"
        )
    return title, question.strip(), " ".join(body.split())


def room_page(room: str, cards: Sequence[Card]) -> str:
    """A room's page: the question, which method, when not, when another library suffices."""
    title, question, paragraph = _described(room)
    return pages.render(
        "room.md.j2", title=title, question=question, paragraph=paragraph, entries=[_entry(card) for card in cards]
    )


@dataclass(frozen=True)
class Entry:
    """A method as the pages list it."""

    card: Card
    name: str
    href: str  # from a page one folder deep
    answer: str
    claims: list


def _entry(card: Card) -> Entry:
    result = methods.result_of(card)
    return Entry(
        card,
        methods.display_name(card),
        f"../methods/{card.slug}.html",
        result.answer if result else "",
        result.claims if result else [],
    )


def problems_index(cards: Sequence[Card]) -> str:
    return pages.render("problems.md.j2", rooms=_listed(cards), replacements=_replacements(cards))


def methods_index(cards: Sequence[Card]) -> str:
    listed = [(room_title(room), room, [_entry(card) for card in _of(cards, room)]) for room in rooms(cards)]
    return pages.render("methods.md.j2", rooms=listed)


def _listed(cards: Sequence[Card]) -> list[tuple[str, str, str, list[Card]]]:
    """Title, question, name and methods of every room."""
    return [(room_title(room), _described(room)[1], room, _of(cards, room)) for room in rooms(cards)]


def _of(cards: Sequence[Card], room: str) -> list[Card]:
    return [card for card in cards if card.room == room]


@dataclass(frozen=True)
class Replacement:
    """What a reader uses today, the method that may replace it, and what was measured of the two."""

    today: str
    card: Card
    name: str
    measured: list[Rival]


def _replacements(cards: Sequence[Card]) -> list[Replacement]:
    found = []
    for card in cards:
        result = methods.result_of(card)
        measured = rivals(result.study, result.rows) if result else []
        for today in card.instead_of:
            arms = [arm for arm, what in card.arms.items() if what.partition(",")[0] == today]
            found.append(Replacement(today, card, methods.display_name(card), [r for r in measured if r.arm in arms]))
    return sorted(found, key=lambda r: (r.today.lower(), r.name))


# --- what hand-written pages show -----------------------------------------------------------------------------------


def problems() -> str:
    """The rooms and their methods, for the front page."""
    return pages.render("front_rooms.md.j2", rooms=_listed(catalog()), name=methods.display_name)


def flagship(slug: str, today: str) -> str:
    """One replacement in a sentence with its numbers: the worked example of the front page."""
    card = resolve(slug)
    (found,) = [r for r in _replacements([card]) if r.today == today]
    if not found.measured:
        raise ValueError(f"{slug} was never measured against {today}")
    result = methods.result_of(card)
    assert result is not None
    figure = next((f for f in result.study.figures if f.y == result.study.answer.measure.column), None)
    measured = figure.y_title if figure else result.study.answer.measure.column
    # The hardest cases first: the best ratio would say more of the case than of the method.
    found = replace(found, measured=sorted(found.measured, key=lambda r: -(r.estimate or 0.0)))
    return pages.render(
        "flagship.md.j2", found=found, card=card, name=found.name, level=result.study.answer.by, measured=measured
    )
