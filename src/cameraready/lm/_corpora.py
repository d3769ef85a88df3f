"""Real text that a Python installation has, for calibration and measurement where no network is at hand.

Four kinds: ``"documentation"`` (docstrings of the standard library, read without importing it), ``"licences"`` (of Python and the installed
distributions), ``"code"`` (the standard library's sources) and ``"prose"`` (the language reference behind ``help()``, descriptions of
scikit-learn's data sets and of the installed distributions). What there is differs between installations and is the same in every
process of one: results should name `digest`.

A passage that repeats an earlier one, up to case, digits and punctuation, is left out, and so is one most of whose runs of eight words
were seen before (the MIT licence stands in a hundred packages). This makes blocks of a study distinct; it also means that sources are
no longer programs that run. Docstrings stand in the sources, too: of two kinds only `windows` of both together is without repeats.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from email import message_from_string
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from email.message import Message
    from importlib.metadata import Distribution

    from torch import Tensor

KINDS = ("documentation", "licences", "code", "prose")

#: Parts of the standard library that some systems leave out, that are tests, or that are tables of characters.
LEFT_OUT = frozenset(
    (
        "__pycache__", "dist-packages", "distutils", "encodings", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "site-packages",
        "test", "tests", "tkinter", "turtledemo",
    )
)  # fmt: skip
#: What a folder of the user's own texts is searched for.
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".text", ".tex", ".py")
SHINGLE = 8  # words in a run
SHORT = 40  # letters below which a passage may repeat (headings, "Returns")

_BLANK = re.compile(r"\n(?:[^\S\n]*\n)+")
_NO_LETTER = re.compile(r"[\W\d_]+")
_WORD = re.compile(r"[^\W\d_]+")
_LICENCE = re.compile(r"licen[cs]e|copying|notice", re.IGNORECASE)
_MARKUP = (
    (re.compile(r"(```|~~~).*?(\1|\Z)", re.DOTALL), "\n\n"),  # fenced code
    (re.compile(r"<!--.*?-->", re.DOTALL), ""),
    (re.compile(r"`([^`<]+?)\s*<[^<>`]*>`__?"), r"\1"),  # a link of reStructuredText
    (re.compile(r"</?[a-zA-Z][^<>]*>"), " "),
    (re.compile(r"!\[[^\]]*\](\([^)]*\)|\[[^\]]*\])"), " "),  # pictures, of which badges are most
    (re.compile(r"\[([^\]\[]*)\](\([^)]*\)|\[[^\]]*\])"), r"\1"),
    (re.compile(r"^\s*(\||\.\. |:\w+:|\[[^\]]+\]:|[-=~^*#+`]{3,}\s*$).*$", re.MULTILINE), ""),
    (re.compile(r"^#+ *", re.MULTILINE), ""),
)


@cache
def documents(kind: str) -> tuple[str, ...]:
    """The texts of `kind`, one a module, distribution or topic, sorted by their names, without repeated passages.

    Raises
    ------
    ValueError
        `kind` is none of `KINDS`, or this installation has nothing of it.
    """
    if kind not in KINDS:
        raise ValueError(f"there is no corpus {kind!r}; there are {', '.join(KINDS)}")
    found = distinct(_SOURCES[kind](), shingles=kind != "code")
    if not found:
        raise ValueError(f"this installation of Python has no text for the corpus {kind!r}; take another of {KINDS}")
    return tuple(found)


def text(kind: str) -> str:
    """All of `kind` as one string, documents parted by an empty line. The same in every process of an installation."""
    return "\n\n".join(documents(kind))


def digest(kind: str) -> str:
    """SHA-256 of ``text(kind)`` (64 hexadecimal digits), to be named beside results."""
    return hashlib.sha256(text(kind).encode()).hexdigest()


def own(path: str | Path) -> tuple[str, ...]:
    """The user's texts, to be given to `windows`: those of one file, or of all text files below a folder, sorted by their paths.

    Raises
    ------
    ValueError
        There is nothing at `path`, a file is not UTF-8 text, or there is no text at all.
    """
    root = Path(path).expanduser()
    if not root.exists():
        raise ValueError(f"there is no file or folder {str(path)!r}")
    if root.is_dir():
        files = sorted(file for file in root.rglob("*") if file.suffix.lower() in TEXT_SUFFIXES and file.is_file())
        if not files:
            raise ValueError(f"the folder {str(path)!r} has no text file; looked for are {', '.join(TEXT_SUFFIXES)}")
    else:
        files = [root]
    found = []
    for file in files:
        try:
            content = file.read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
        except OSError as error:
            raise ValueError(f"{file} cannot be read: {error.strerror or error}") from None
        if "\0" in content:
            raise ValueError(f"{file} is binary, not text")
        found.append(_settled(content))
    found = [content for content in found if content.strip()]
    if not found:
        raise ValueError(f"{str(path)!r} holds no text, only empty files or spaces")
    return tuple(found)


def windows(tokenizer: Any, kind: str | Sequence[str], *, length: int, n: int, seed: int = 0) -> Tensor:
    """`n` windows of exactly `length` tokens, no two of which overlap.

    The first windows come from different documents as long as there are any, then from different parts of them; what is shorter than a
    window is joined by an empty line. A window holds no special token, neither at its start nor inside, also where the text spells one: put the model's beginning-of-text token
    in front yourself if it expects one. ``windows(n=5)`` are the first five of ``windows(n=10)``. Windows of different seeds may
    overlap: take disjoint parts of one call to calibrate on and to measure on.

    Parameters
    ----------
    tokenizer : transformers tokenizer
    kind : str or sequence of str
        One of `KINDS`, several of them (what one repeats of another is left out, docstrings of the sources, say), or documents, such
        as `own` returns.
    length, n : int
        At least 1. About 16 characters a token of the result are tokenised, or all there are if `n` is large.
    seed : int
        Decides the order of documents and the place of windows in them.

    Returns
    -------
    LongTensor of shape (n, length)
        On the CPU.

    Raises
    ------
    ValueError
        There are fewer than `n` such windows.
    """
    import torch

    if length < 1 or n < 1:
        raise ValueError(f"length and n must be at least 1, got length={length} and n={n}")
    texts = texts_of(kind)
    generator = np.random.default_rng([seed, length])
    found: list[np.ndarray] = []
    later: list[np.ndarray] = []
    for tokens in _long_enough(tokenizer, _sections(texts, 16 * length, generator), length):
        cut = tokens[: len(tokens) // length * length].reshape(-1, length)
        cut = cut[generator.permutation(len(cut))]
        found.append(cut[0])
        later.append(cut[1:])
        if len(found) == n:
            break
    depth = 0
    while len(found) < n and any(len(rest) > depth for rest in later):
        found.extend(rest[depth] for rest in later if len(rest) > depth)
        depth += 1
    if len(found) < n:
        what = f"the corpus {kind!r} of this installation" if isinstance(kind, str) else "the text"
        raise ValueError(
            f"{what} has {len(found)} windows of {length} tokens with this tokenizer, {n} were asked for; take fewer or shorter ones"
            + (f", or several of {', '.join(KINDS)} together" if isinstance(kind, str) else "")
        )
    return torch.from_numpy(np.stack(found[:n]))


def texts_of(kind: str | Sequence[str]) -> tuple[str, ...]:
    """Documents of a kind, of several kinds together, or those given."""
    if isinstance(kind, str):
        return documents(kind)
    parts = tuple(kind)
    if any(not isinstance(part, str) for part in parts):
        raise TypeError("documents must be strings")
    return _together(parts) if parts and set(parts) <= set(KINDS) else parts


@cache
def _together(kinds: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(distinct((content for kind in dict.fromkeys(kinds) for content in documents(kind)), shingles=False))


def plain_tokens(tokenizer: Any, texts: Iterable[str]) -> Iterator[np.ndarray]:
    """Tokens of each text without special ones, shape (T,), int64. What a text spells like a special token is left out."""
    special = np.fromiter(special_tokens(tokenizer), dtype=np.int64)
    for content in texts:
        tokens = np.asarray(tokenizer(content, add_special_tokens=False, verbose=False)["input_ids"], dtype=np.int64)
        yield tokens[~np.isin(tokens, special)]


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Ids and texts of the tokens that are no text, such as ``<|im_start|>``; a tokenizer may have more than it names."""
    found = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return found | {i: token.content for i, token in added.items() if token.special}


def distinct(texts: Iterable[str], *, shingles: bool = True) -> list[str]:
    """`texts` without the passages that repeat an earlier one; those of which little remains are left out.

    A passage is what stands between empty lines. It repeats if its letters alone are those of an earlier one, or, with `shingles`, if
    more than half of its runs of eight words were seen. Passages of fewer than 40 letters may repeat.
    """
    letters_seen: set[str] = set()
    runs_seen: set[str] = set()
    kept = []
    for content in texts:
        passages, remaining = [], 0
        for passage in _BLANK.split(_settled(content)):
            letters = _NO_LETTER.sub("", passage.casefold())
            if len(letters) >= SHORT:
                if letters in letters_seen:
                    continue
                letters_seen.add(letters)
                if shingles:
                    words = _WORD.findall(passage.casefold())
                    runs = {" ".join(words[i : i + SHINGLE]) for i in range(len(words) - SHINGLE + 1)}
                    repeated = len(runs & runs_seen)
                    runs_seen |= runs
                    if runs and 2 * repeated > len(runs):
                        continue
                remaining += len(letters)
            passages.append(passage)
        if remaining >= 5 * SHORT:
            kept.append("\n\n".join(passages).strip("\n"))
    return kept


def _sections(texts: Sequence[str], size: int, generator: np.random.Generator) -> Iterator[str]:
    """Pieces of about `size` characters, cut at empty lines: one of each document in random order, then a second of each ..."""
    parted = [_parted(texts[place], size) for place in generator.permutation(len(texts))]
    parted = [[pieces[place] for place in generator.permutation(len(pieces))] for pieces in parted]
    for depth in range(max(map(len, parted), default=0)):
        yield from (pieces[depth] for pieces in parted if len(pieces) > depth)


def _parted(content: str, size: int) -> list[str]:
    pieces: list[str] = []
    waiting: list[str] = []
    for passage in content.split("\n\n"):
        waiting.append(passage)
        if sum(map(len, waiting)) >= size:
            pieces.append("\n\n".join(waiting))
            waiting = []
    return [*pieces, "\n\n".join(waiting)] if waiting else pieces


def _long_enough(tokenizer: Any, sections: Iterator[str], length: int) -> Iterator[np.ndarray]:
    """Tokens of sections, joined where one alone is shorter than `length`."""
    waiting: list[np.ndarray] = []
    for tokens in plain_tokens(tokenizer, (section + "\n\n" for section in sections)):
        waiting.append(tokens)
        if sum(map(len, waiting)) >= length:
            yield np.concatenate(waiting)
            waiting = []


def _settled(content: str) -> str:
    return content.replace("\r\n", "\n").replace("\r", "\n").replace("\f", "\n").replace("\ufeff", "").expandtabs(4)


# --- where the texts come from ---------------------------------------------------------------------------------------


def _sources() -> Iterator[str]:
    """Sources of the standard library, sorted by path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    waiting = [root / name for name in sorted(sys.stdlib_module_names, reverse=True)]
    while waiting:
        place = waiting.pop()
        if place.is_dir() and place.name not in LEFT_OUT:
            waiting += sorted((part for part in place.iterdir() if part.is_dir() or part.suffix == ".py"), reverse=True)
            continue
        file = place if place.suffix == ".py" else place.with_suffix(".py")
        # Of the platform's names is what a build left behind: it names folders of the machine.
        if file.is_file() and not file.name.startswith("_sysconfigdata"):
            yield file.read_text(encoding="utf-8", errors="replace")


def _docstrings() -> Iterator[str]:
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for source in _sources():
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):  # a template or a file that is broken on purpose
            continue
        found = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, owners)]
        yield "\n\n".join(doc for doc in found if doc)


def _distributions() -> dict[str, Distribution]:
    """Installed distributions by name, sorted; of two of one name the one that would be imported. Never those of the current folder."""
    from importlib.metadata import distributions

    places = [entry for entry in sys.path if entry.rstrip("\\/").endswith("-packages")]
    found: dict[str, Distribution] = {}
    for distribution in distributions(path=places):
        name = re.sub(r"[-_.]+", "-", _metadata(distribution).get("Name") or "").lower()
        if name and name != "cameraready":  # whose own pages change with every commit
            found.setdefault(name, distribution)
    return {name: found[name] for name in sorted(found)}


def _metadata(distribution: Distribution) -> Message:
    """Its headers and description; empty where an uninstallation left a folder behind or the file is no UTF-8."""
    try:
        content = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO")
    except UnicodeDecodeError:
        content = None
    return message_from_string(content or "")


def _licences() -> Iterator[str]:
    python = Path(sysconfig.get_paths()["stdlib"]) / "LICENSE.txt"
    if python.is_file():
        yield python.read_text(encoding="utf-8", errors="replace")
    for distribution in _distributions().values():
        for file in sorted(distribution.files or (), key=str):
            if (
                ".dist-info" in str(file)
                and _LICENCE.search(file.name)
                and file.suffix not in (".py", ".json", ".html")
            ):
                path = Path(str(file.locate()))
                if path.is_file():
                    yield path.read_text(encoding="utf-8", errors="replace")


def _prose() -> Iterator[str]:
    from importlib.util import find_spec

    if find_spec("pydoc_data"):  # some systems' smallest Python has none
        from pydoc_data.topics import topics

        for name in sorted(topics):
            yield prose(topics[name])
    sklearn = find_spec("sklearn")
    for place in (sklearn.submodule_search_locations or ()) if sklearn else ():
        for path in sorted((Path(place) / "datasets" / "descr").glob("*.rst")):
            yield prose(path.read_text(encoding="utf-8", errors="replace"))
    for distribution in _distributions().values():
        metadata = _metadata(distribution)
        payload = metadata.get_payload()
        yield prose(payload if isinstance(payload, str) and payload.strip() else str(metadata.get("Description", "")))


def prose(content: str) -> str:
    """Passages of `content` (Markdown, reStructuredText or plain) that are sentences, a line each.

    Dropped are code, tables, badges, lists of names, and whatever is indented, which in these formats is an example as a rule.
    """
    for pattern, instead in _MARKUP:
        content = pattern.sub(instead, content)
    return "\n\n".join(" ".join(passage.split()) for passage in _BLANK.split(_settled(content)) if _is_prose(passage))


def _is_prose(passage: str) -> bool:
    words = passage.split()
    line = " ".join(words)
    indented = all(row.startswith("   ") for row in passage.strip("\n").splitlines())
    letters = sum(character.isalpha() or character == " " for character in line)
    capitals = sum(word[0].isupper() for word in words)
    return (
        len(line) >= 2 * SHORT
        and not indented
        and letters >= 0.88 * len(line)
        and capitals <= 0.4 * len(words)
        and not line.startswith((">>>", "$ ", "import ", "from "))
    )


_SOURCES: dict[str, Callable[[], Iterator[str]]] = {
    "documentation": _docstrings,
    "licences": _licences,
    "code": _sources,
    "prose": _prose,
}
