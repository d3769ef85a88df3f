"""Methods of ICML 2026 as drop-in components, each with a study that puts the paper's claims to the test.

`check` tries a method on its shipped workloads or on your own model and data, `find` and `catalog` say which methods
there are, and every method is imported from its own place: ``from cameraready.attribution.oddshap import OddShap``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

# `catalog` is the module, which can be called: cameraready.catalog() lists the methods.
from cameraready import catalog
from cameraready.catalog import Card, find

if TYPE_CHECKING:
    from cameraready.evidence.checking import Plan, check
    from cameraready.evidence.results import Result

    __version__: str

__all__ = ["Card", "Plan", "Result", "__version__", "catalog", "check", "find"]

#: What needs the evidence engine, and with it the extra `study`; imported when first asked for.
_LAZY = {
    "check": "cameraready.evidence.checking",
    "Plan": "cameraready.evidence.checking",
    "Result": "cameraready.evidence.results",
}

#: Distributions of the extra `study`, as they are imported.
_STUDY_MODULES = frozenset(
    (
        "altair",
        "cloudpickle",
        "execnet",
        "jinja2",
        "pebble",
        "platformdirs",
        "polars",
        "psutil",
        "threadpoolctl",
        "uv",
        "vl_convert",
    )
)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name not in _LAZY:
        raise AttributeError(f"module 'cameraready' has no attribute {name!r}")
    from importlib import import_module

    try:
        return getattr(import_module(_LAZY[name]), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _STUDY_MODULES:
            raise
        raise ModuleNotFoundError(
            f'cameraready.{name} needs {error.name}: pip install "cameraready[study]"', name=error.name
        ) from error


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("cameraready")
    except PackageNotFoundError:  # a source tree on the path that was never installed
        return "0+source"
