"""`list`, `find` and `show`: which methods there are, and what one of them is for."""

from __future__ import annotations

import difflib
import re
import textwrap
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cameraready.catalog import Card, CardError, UnknownMethod, catalog, find, is_room, resolve, rooms
from cameraready.cli.failing import BadUsage

if TYPE_CHECKING:
    from rich.console import Console

#: What `--data` and `--tasks` bring, for a study that takes them, and the tasks that each room knows.
TAKEN = {
    "data": "prompts and answers of yours for a language model, as FILE:PROMPT,ANSWER (prompts.jsonl:prompt,answer)",
    "tasks": "for a language model: {tasks}",
}
TASKS = {
    "lm": "passkey, key_value, multi_hop, arithmetic, countdown, subset_sum, reasoning_gym:NAME or lm-eval:NAME, as far as "
    "the study has a use for them",
    "posttraining": "arithmetic, countdown, subset_sum or reasoning_gym:NAME",
}
OBJECTS = {
    (
        "flows",
        "table",
    ): "a table of numbers whose rows are the data (data.csv), or with a column that is their labels (data.csv:COLUMN)",
    (
        "flows",
        "object",
    ): "package.module:object: an array of data, a pair (velocity, data), a cameraready.flows.FlowProblem, or a function that returns one",
    ("flows", "value"): "from Python, the object itself (check(..., on=(velocity, data)))",
    (
        "posttraining",
        "object",
    ): "package.module:object: an EnumerableTask, a pair (model, tokenizer), or a function that returns one",
    ("posttraining", "value"): "from Python, the object itself (check(..., on=(model, tokenizer)))",
}
BASIS_WORDS = {"paper": "the paper", "official-code": "the official code", "reconstruction": "a reconstruction"}


def complete_method(incomplete: str) -> list[tuple[str, str]]:
    """Slugs that begin with `incomplete`, each with its purpose, for the shell."""
    try:
        found = [card for card in catalog() if card.slug.startswith(incomplete)]
    except CardError:
        return []  # whoever is typing learns of it from the command itself
    # A line that typer would wrap becomes two proposals.
    return [(card.slug, textwrap.shorten(card.purpose, 70, placeholder=" ...")) for card in found]


def complete_room(incomplete: str) -> list[tuple[str, str]]:
    """Rooms that begin with `incomplete`, for the shell."""
    try:
        return [(room, f"the room {room}") for room in rooms() if room.startswith(incomplete)]
    except CardError:
        return []


def complete_shown(incomplete: str) -> list[tuple[str, str]]:
    """What `show` takes: slugs and rooms."""
    return [*complete_method(incomplete), *complete_room(incomplete)]


def complete_selection(incomplete: str) -> list[tuple[str, str]]:
    """What stands for one method or for several: slugs, rooms, ``all``."""
    every = [("all", "every method")] if "all".startswith(incomplete) else []
    return [*complete_method(incomplete), *complete_room(incomplete), *every]


Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def list_methods(
    room: Annotated[
        str | None, typer.Argument(help="Only the methods of this room.", autocompletion=complete_room)
    ] = None,
    as_json: Json = False,
) -> None:
    """List the methods, room by room."""
    from cameraready.cli import terminal

    found = catalog()
    if room is not None:
        found = [card for card in found if card.room == room]
        if not found:
            raise BadUsage(f"there is no room {room!r}; rooms: {', '.join(rooms())}")
    if as_json:
        terminal.print_json([card.to_json() for card in found])
        return
    terminal.print_methods(terminal.console(), found, by_room=True)


def find_methods(
    words: Annotated[
        list[str] | None, typer.Argument(help='What you want to do: "explain single predictions".')
    ] = None,
    instead_of: Annotated[str | None, typer.Option(help="What you use today: shap.KernelExplainer.")] = None,
    room: Annotated[
        str | None, typer.Option(help="Only the methods of this room.", autocompletion=complete_room)
    ] = None,
    as_json: Json = False,
) -> None:
    """Find methods by what you want to do, or use today."""
    from cameraready.cli import terminal

    text = " ".join(words) if words else None
    try:
        found = find(text, instead_of=instead_of, room=room)
    except ValueError as error:
        raise BadUsage(str(error)) from error
    if as_json:
        terminal.print_json([card.to_json() for card in found])
        return
    out = terminal.console()
    if not found:
        more = "" if instead_of is None else _near(instead_of)
        out.print(terminal.paragraph(f"Nothing found.{more} `cameraready list` shows every method.", out.width))
        return
    terminal.print_methods(out, found, by_room=False)


def _near(instead_of: str) -> str:
    """What a name that nothing replaces was perhaps meant to be, or of which libraries parts are replaced."""
    known = sorted({name for card in catalog() for name in card.instead_of})
    parts = {part.casefold(): name for name in known for part in [name, *re.split(r"[ .]", name)] if len(part) > 3}
    near = dict.fromkeys(
        parts[part] for part in difflib.get_close_matches(instead_of.casefold(), parts, n=5, cutoff=0.85)
    )
    if near:
        return f" Did you mean {' or '.join(near)}?"
    libraries = sorted({name.partition(".")[0] for name in known if re.fullmatch(r"\w+(\.\w+)+", name)})
    return f" Replacements are known for parts of {', '.join(libraries)}." if libraries else ""


def show_method(
    method: Annotated[
        str, typer.Argument(help="Slug, arXiv id, or the URL of the paper; or a room.", autocompletion=complete_shown)
    ],
    as_json: Json = False,
) -> None:
    """Show what a method is for and what its test found."""
    from cameraready.cli import terminal

    if is_room(method):
        list_methods(method, as_json)
        return
    try:
        card = resolve(method)
    except UnknownMethod as error:
        raise BadUsage(str(error)) from error
    found = shipped_results(card)
    if as_json:
        terminal.print_json({**card.to_json(), "results": found})
        return
    out = terminal.console()
    _print_card(out, card)
    _print_shipped(out, card, found)
    _print_own(out, card)
    if card.example:
        out.print("Use", style="bold")
        out.print("\n".join(f"  {line}" for line in card.example.splitlines()))
        out.print()
    out.print(f"Put it to the test: cameraready run {card.slug}")


def shipped_results(card: Card) -> dict[str, Any] | None:
    """What the last desk run found, as it is shipped beside the card; None if there was none.

    Raises
    ------
    ValueError
        If the file is damaged.
    """
    import json

    path = card.results_path
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        found["claims"], found["tier"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}); run the study again to write it anew") from error
    return found


def _print_card(out: Console, card: Card) -> None:
    from rich.text import Text

    from cameraready.cli.terminal import paragraph

    out.print(Text.assemble((card.slug, "bold cyan"), "  ", (card.title, "bold")))
    out.print(paragraph(card.purpose, out.width))
    out.print()
    extra = f"cameraready[{card.extra}]" if card.extra else "cameraready"
    facts = [
        ("paper", f"{', '.join(card.authors)}. {card.url}".strip()),
        ("import", f"from {card.module} import {', '.join(card.exports)}"),
        ("install", f'pip install "{extra}"'),
        ("kind", f"{card.kind}, room {card.room}"),
        ("built from", BASIS_WORDS[card.basis]),
        *(("use when", text) for text in card.use_when),
        *(("avoid when", text) for text in card.avoid_when),
        ("instead of", ", ".join(card.instead_of)),
        *(("also in", _upstream(item.name, item.url, item.when_sufficient)) for item in card.upstream),
    ]
    width = max(len(name) for name, _ in facts) + 2
    last = ""
    for name, text in facts:
        if text:
            lead = f"{name if name != last else '':<{width}}"
            out.print(paragraph(text, out.width, " " * width, first=lead))
            last = name
    out.print()


def _upstream(name: str, url: str, suffices: str) -> str:
    place = f" ({url})" if url else ""
    return f"{name}{place}. It suffices when: {suffices}" if suffices else f"{name}{place}"


def _print_own(out: Console, card: Card) -> None:
    """What the reader's own method must look like, and which workloads of theirs the study takes."""
    if not (card.own_arm or card.accepts):
        return
    from cameraready.cli.terminal import paragraph
    from cameraready.evidence.study import ACCEPTED

    out.print("Your own", style="bold")
    lines = [
        ("--with", card.own_arm),
        *(("--on", OBJECTS.get((card.room, kind), ACCEPTED.get(kind, kind))) for kind in card.accepts),
    ]
    told = " ".join(card.accepts)  # a card may say it in its own words
    lines += [
        (f"--{option}", TAKEN[option].format(tasks=TASKS.get(card.room, "")))
        for option in taken(card)
        if f"--{option}" not in told
    ]
    width = max(len(option) for option, text in lines if text) + 2
    last = ""
    for option, text in lines:
        if text:
            lead = f"  {option if option != last else '':<{width}}"
            out.print(paragraph(text, out.width, " " * (width + 2), first=lead))
            last = option
    out.print()


def taken(card: Card) -> list[str]:
    """What a study takes beside a model (`Study.takes`), read from its file: nothing of the method is imported."""
    path = card.folder / "study.py"
    found = (
        re.search(r"^ *takes=[(\[](.*?)[)\]]", path.read_text(encoding="utf-8"), re.MULTILINE)
        if path.is_file()
        else None
    )
    return [option for option in TAKEN if found and f'"{option}"' in found[1]]


def _print_shipped(out: Console, card: Card, found: dict[str, Any] | None) -> None:
    from cameraready.cli import terminal
    from cameraready.evidence.report.saved import verdicts_of

    count = f"{card.claims} claims of the paper" if card.claims > 1 else "1 claim of the paper"
    if found is None:
        out.print(f"{count} to put to the test; no desk run has been published yet.")
        out.print()
        return
    ours = len({claim["label"] for claim in found["claims"] if claim.get("scope") == "ours"})
    count += f" and {ours} of ours" if ours else ""
    head = f"{count}, as the last {found['tier']} run found them"
    out.print(f"{head} ({found['started'][:10]})" if found.get("started") else head, style="bold")
    if found.get("answer"):
        out.print(terminal.paragraph(found["answer"], out.width))
    terminal.print_verdicts(out, verdicts_of(found))
    out.print()
