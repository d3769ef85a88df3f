"""The card of a method: what is known of it before anything of it is imported."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

CARD_FILE = "card.toml"
RESULTS_FILE = "results.json"
BASES = ("paper", "official-code", "reconstruction")

SLUG = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_ARXIV = re.compile(r"\d{4}\.\d{4,5}")


class CardError(ValueError):
    """A card that cannot be read; the message names the file and the key."""


@dataclass(frozen=True)
class Upstream:
    """Another implementation of the method, and when it suffices."""

    name: str
    url: str = ""
    when_sufficient: str = ""


@dataclass(frozen=True)
class Card:
    """What is known of a method before anything of it is imported: the content of its ``card.toml``.

    Attributes
    ----------
    slug, title, purpose, kind, extra, basis, arxiv, openreview : str
        `kind` picks the conformance test; `extra` is the installation extra with the component's needs ("" for none);
        `basis` is ``"paper"``, ``"official-code"`` or ``"reconstruction"``; ids are bare, without a version.
    authors, use_when, avoid_when, instead_of, exports : tuple of str
        `instead_of` names what people use today for the same job (``"shap.KernelExplainer"``).
    upstream : tuple of Upstream
    claims : int
        How many claims of the paper the study numbers, from 1.
    own_arm : str
        How a method of the reader's own (``--with``) must look.
    accepts : tuple of str
        What ``--on`` takes beside shipped names: kinds of spec (``"table"``, ``"model"`` ...), or sentences.
    arms : mapping of str to str
        What stands behind the names that the study gives its competitors: ``{"kernel": "shap.KernelExplainer"}``.
    workloads : mapping of str to str
        What the study's own workloads are: ``{"digits": "a neural network on 64 pixels"}``.
    example : str
        About ten lines of use.
    module, room : str
        Where it is imported from (``"cameraready.attribution.oddshap"``) and the room's name (``"attribution"``).
    folder : Path
        Where the card lies, and beside it the results of the last desk run.
    """

    slug: str
    title: str
    authors: tuple[str, ...]
    purpose: str
    exports: tuple[str, ...]
    kind: str
    basis: str
    claims: int
    arxiv: str = ""
    openreview: str = ""
    use_when: tuple[str, ...] = ()
    avoid_when: tuple[str, ...] = ()
    instead_of: tuple[str, ...] = ()
    extra: str = ""
    upstream: tuple[Upstream, ...] = ()
    own_arm: str = ""
    accepts: tuple[str, ...] = ()
    arms: Mapping[str, str] = field(default_factory=dict, hash=False)
    workloads: Mapping[str, str] = field(default_factory=dict, hash=False)
    example: str = ""
    module: str = ""
    room: str = ""
    folder: Path = field(default=Path(), compare=False)

    @classmethod
    def minimal(cls, slug: str, module: str) -> Card:
        """A card for a study outside the catalogue, of which only the name and the place are known."""
        return cls(
            slug=slug, title=slug, authors=(), purpose="", exports=(), kind="", basis="", claims=0, module=module
        )

    @property
    def url(self) -> str:
        """Where the paper can be read; empty if neither id is known."""
        if self.arxiv:
            return f"https://arxiv.org/abs/{self.arxiv}"
        return f"https://openreview.net/forum?id={self.openreview}" if self.openreview else ""

    @property
    def results_path(self) -> Path:
        return self.folder / RESULTS_FILE

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, for ``--json``; the folder is left out."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("folder", "upstream")}
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
        values |= {"arms": dict(self.arms), "workloads": dict(self.workloads)}
        upstream = [{"name": u.name, "url": u.url, "when_sufficient": u.when_sufficient} for u in self.upstream]
        return {**values, "upstream": upstream, "url": self.url}


# --- reading a card -------------------------------------------------------------------------------------------------

_TEXTS = ("slug", "title", "purpose", "kind", "basis", "arxiv", "openreview", "extra", "own_arm", "example")
_LISTS = ("authors", "use_when", "avoid_when", "instead_of", "exports", "accepts")
_REQUIRED = ("slug", "title", "authors", "purpose", "use_when", "avoid_when", "exports", "kind", "basis", "claims")


def read_card(path: Path) -> Card:
    """Read and check one ``card.toml``, whose place gives module and room.

    Raises
    ------
    CardError
        Naming the file and the key, and what was expected.
    """
    import tomllib

    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CardError(f"{path}: not valid TOML: {error}") from error
    known = {*_TEXTS, *_LISTS, "claims", "upstream", "arms", "workloads"}
    for key in raw:
        if key not in known:
            import difflib

            close = difflib.get_close_matches(key, known, n=1)
            raise CardError(f"{path}: unknown key {key!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
    for key in _REQUIRED:
        if key not in raw:
            raise CardError(f"{path}: key {key!r} is missing")
    values: dict[str, Any] = {key: _text(path, raw, key) for key in _TEXTS if key in raw}
    values |= {key: _list(path, raw, key) for key in _LISTS if key in raw}
    values["claims"] = _count(path, raw["claims"])
    values["upstream"] = tuple(_upstream(path, raw.get("upstream", [])))
    values |= {key: _named(path, key, raw.get(key, {})) for key in ("arms", "workloads")}
    _check_values(path, values)
    folder = path.parent
    room = folder.parent.name
    return Card(**values, module=f"cameraready.{room}.{folder.name}", room=room, folder=folder)


def _check_values(path: Path, values: Mapping[str, Any]) -> None:
    if not SLUG.fullmatch(values["slug"]):
        raise CardError(f"{path}: slug must be lower-case words joined by hyphens, got {values['slug']!r}")
    if values["basis"] not in BASES:
        raise CardError(f"{path}: basis must be one of {', '.join(BASES)}, got {values['basis']!r}")
    if values.get("arxiv") and not _ARXIV.fullmatch(values["arxiv"]):
        raise CardError(f"{path}: arxiv must be a bare id such as 2602.01399, got {values['arxiv']!r}")
    for name in values["exports"]:
        if not name.isidentifier():
            raise CardError(f"{path}: exports must be Python names, got {name!r}")
    for key in ("title", "purpose", "kind", "authors", "exports"):
        if not values[key]:
            raise CardError(f"{path}: {key} must not be empty")


def _text(path: Path, raw: Mapping[str, Any], key: str) -> str:
    value = raw[key]
    if not isinstance(value, str):
        raise CardError(f"{path}: {key} must be text, got {value!r}")
    return value.strip("\n") if key == "example" else " ".join(value.split())


def _list(path: Path, raw: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """A list of texts; one text stands for a list of one."""
    value = raw[key]
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise CardError(f"{path}: {key} must be a text or a list of texts, got {value!r}")
    return tuple(" ".join(item.split()) for item in items)


def _count(path: Path, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CardError(f"{path}: claims must be the number of claims of the paper, at least 1, got {value!r}")
    return value


def _upstream(path: Path, value: Any) -> list[Upstream]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise CardError(f"{path}: upstream must be [[upstream]] tables with name, url and when_sufficient")
    found = []
    for item in value:
        extra = set(item) - {"name", "url", "when_sufficient"}
        if extra or not item.get("name") or not all(isinstance(text, str) for text in item.values()):
            raise CardError(f"{path}: upstream tables have the texts name, url and when_sufficient, got {item!r}")
        found.append(Upstream(**{key: " ".join(text.split()) for key, text in item.items()}))
    return found


def _named(path: Path, key: str, value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) and text.strip() for text in value.values()):
        raise CardError(f'{path}: {key} must be a table of texts, such as name = "what it is", got {value!r}')
    return {name: " ".join(text.split()) for name, text in value.items()}
