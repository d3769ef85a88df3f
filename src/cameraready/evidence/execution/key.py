"""Keys of trials: digests of everything that a trial's rows depend on."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.machinery
import importlib.metadata
import importlib.util
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cameraready.evidence.study import Study

#: Parts of the package that run and show trials but do not shape their rows: a change there keeps finished trials
#: valid.
NOT_PART_OF_A_TRIAL = ("cameraready.evidence", "cameraready.cli", "cameraready.catalog")


def trial_key(
    *,
    code: str,
    content: str,
    condition: Mapping[str, Any],
    seed: int,
    versions: Mapping[str, str],
    settings: Mapping[str, Any] | None = None,
) -> str:
    """The key of one trial.

    Parameters
    ----------
    code : str
        `code_digest` of the study's module.
    content : str
        Digest of the workload's content (`Spec.content_digest`).
    condition, seed
        What the trial is called with. Conditions hold JSON values; numpy scalars count as the Python value they hold.
    versions : mapping
        `arm_versions` of the trial's arm.
    settings : mapping, optional
        Whatever else shapes the rows: device, dtype, digests of the user's own arms, arms left out.

    Returns
    -------
    str
        32 hexadecimal digits.

    Raises
    ------
    TypeError
        A condition or setting holds something other than JSON values.
    """
    parts = {
        "code": code,
        "content": content,
        "condition": condition,
        "seed": seed,
        "versions": versions,
        "settings": settings or {},
    }
    return _digest(canonical_json(parts))


def canonical_json(value: Any) -> str:
    """`value` as JSON that is equal for equal values: sorted keys, no spaces, exact floats (NaN and infinities too)."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=_plain)


def code_digest(module_name: str) -> str:
    """Digest of a module's code and of all internal code that it imports, directly or not.

    Internal is what lies in the same top-level package, or beside the module where it has no package. Comments,
    docstrings and formatting do not count. Imports inside functions count, imports under ``TYPE_CHECKING`` do not, and
    neither do the engine and the command line (`NOT_PART_OF_A_TRIAL`). An ``__init__`` counts where it is imported from
    by name, not where it is merely on the way to a module below it: it exports things, it does not change them. Imports
    are read from the source; no module is executed.

    Raises
    ------
    ModuleNotFoundError
        `module_name` cannot be found, or it is not written in Python.
    SyntaxError
        An internal module does not parse.
    """
    start = _find(module_name)
    if start is None:
        raise ModuleNotFoundError(
            f"module {module_name!r} was not found as a Python file, so its trials cannot be told apart from those of"
            " another version; a study must live in a .py file that can be imported"
        )
    is_internal = _inside_package(module_name) if "." in module_name else _inside_folder(start.parent)
    sources: dict[str, str] = {}
    waiting = [module_name]
    while waiting:
        name = waiting.pop()
        if name in sources or _is_engine(name) or not is_internal(name):
            continue
        path = start if name == module_name else _find(name)
        if path is None:
            continue
        code, imported = _read(path, path.stat().st_mtime_ns, name)
        sources[name] = code
        waiting.extend(imported)
    return _digest(canonical_json(sources))


def file_code_digest(path: Path) -> str:
    """Digest of one Python file without comments, docstrings and formatting (a peer's script)."""
    return _digest(_read(path, path.stat().st_mtime_ns, path.stem)[0])


def versions_of(names: Iterable[str]) -> dict[str, str]:
    """Installed versions of distributions by name; ``"absent"`` for those that are not installed."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


def arm_versions(study: Study, arm: str, folder: Path) -> dict[str, str]:
    """What an arm runs on: versions of its libraries, and requirement, lock and script of each of its peers.

    Parameters
    ----------
    arm : str
        ``""`` for trials that return rows of several arms: then the libraries of all arms count.
    folder : Path
        The study's folder, where peer scripts and locks lie.
    """
    from cameraready.evidence.peers.environments import lock_of

    arms = [*study.libraries] if not arm else [arm, "*"]
    wanted = {name for each in arms for name in study.libraries.get(each, ())}
    peers = {peer.name: peer for peer in study.peers if peer.name in wanted}
    versions = versions_of(sorted(wanted - set(peers)))
    for name, peer in sorted(peers.items()):
        script = file_code_digest(folder / peer.script) if peer.script else ""
        parts = [peer.requirement, peer.python, list(peer.also), peer.dependencies, lock_of(peer, folder), script]
        versions[name] = f"{peer.requirement} {_digest(canonical_json(parts))}"
    return versions


def _digest(text: str) -> str:
    # surrogatepass: source and conditions may hold any string that Python can.
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _plain(value: Any) -> Any:
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        return value.item()
    raise TypeError(
        f"a condition holds {value!r} of type {type(value).__name__}; conditions must be JSON values"
        " (numbers, strings, true, false, null, and lists and dicts of them)"
    )


def _is_engine(name: str) -> bool:
    # The root package is the Python door; it holds no method.
    return name == "cameraready" or any(name == part or name.startswith(part + ".") for part in NOT_PART_OF_A_TRIAL)


def _inside_package(module_name: str) -> Callable[[str], bool]:
    top = module_name.split(".")[0]
    return lambda name: name == top or name.startswith(top + ".")


def _inside_folder(folder: Path) -> Callable[[str], bool]:
    def is_beside(name: str) -> bool:
        path = _find(name.split(".")[0])
        return path is not None and path.is_relative_to(folder) and "site-packages" not in path.parts

    return is_beside


def _find(name: str) -> Path | None:
    """The source file of a module, or None where there is none (built in, compiled, a namespace, or no module at all).

    Nothing is executed: only the top-level name is left to Python's finders (which know editable installs), the rest is
    looked up along the packages' paths.
    """
    top, *below = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # __main__ of a notebook: loaded, but from nowhere
        return None
    for part in below:
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(f"{spec.name}.{part}", spec.submodule_search_locations)
    if spec is None or spec.origin is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
        return None
    return Path(spec.origin)


@functools.lru_cache(maxsize=4096)
def _read(path: Path, changed: int, name: str) -> tuple[str, tuple[str, ...]]:
    """The code of a file in normal form, and the names of modules it may import. `changed` tells versions apart."""
    tree = ast.parse(path.read_bytes(), filename=str(path))
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    imported = tuple(dict.fromkeys(_imports(tree, package)))
    return ast.unparse(_WithoutDocstrings().visit(tree)), imported


def _imports(tree: ast.AST, package: str) -> Iterator[str]:
    for node in _nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            if base:
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names if alias.name != "*")


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes except those that only a type checker sees."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.If) and _names_type_checking(node.test):
            waiting.extend(node.orelse)
        else:
            waiting.extend(ast.iter_child_nodes(node))


def _names_type_checking(test: ast.expr) -> bool:
    return getattr(test, "id", getattr(test, "attr", "")) == "TYPE_CHECKING"


class _WithoutDocstrings(ast.NodeTransformer):
    """Drops statements that are a bare string: docstrings, and those under attributes. They do nothing."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            return None
        return node

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        if getattr(node, "body", None) == [] and not isinstance(node, ast.Module):
            node.body = [ast.Pass()]  # type: ignore[attr-defined]
        return node
