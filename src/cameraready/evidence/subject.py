"""The method under test: found by slug, arXiv id or URL, or named as a study of one's own."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cameraready.catalog import Card, resolve
from cameraready.evidence.execution import key
from cameraready.evidence.study import Study, study_folder


class UsageError(ValueError):
    """The call cannot be carried out as written; the message says what is accepted."""


@dataclass(frozen=True)
class Subject:
    """A method under test: its card, its study, and where the study lives."""

    card: Card
    study: Study
    reference: str  # "package.module:STUDY"

    @property
    def folder(self) -> Path:
        return study_folder(self.study)

    @property
    def code(self) -> str:
        return key.code_digest(self.reference.partition(":")[0])


def load_subject(method: str) -> Subject:
    """The method named by slug, arXiv id, URL, or ``package.module:STUDY`` for a study outside the catalogue.

    Raises
    ------
    UsageError
        If there is no such method, or its study cannot be imported because an extra is missing.
    """
    if ":" in method and not method.startswith(("http:", "https:", "arxiv:", "arXiv:")):
        module_name, _, attribute = method.partition(":")
        study = getattr(_import_study(module_name, extra=""), attribute, None)
        if not isinstance(study, Study):
            raise UsageError(f"{method!r} is not a Study; name one as package.module:STUDY")
        slug = study.method
        return Subject(Card.minimal(slug=slug, module=module_name.rpartition(".")[0] or module_name), study, method)
    card = resolve(method)
    module_name = f"{card.module}.study"
    return Subject(card, _import_study(module_name, card.extra).STUDY, f"{module_name}:STUDY")


def _import_study(module_name: str, extra: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name.startswith(error.name) or error.name.startswith("cameraready")):
            raise UsageError(
                f"there is no module {module_name if module_name.startswith(error.name) else error.name}"
            ) from error
        wanted = f"study,{extra}" if extra else "study"
        raise UsageError(f'this study needs {error.name}: pip install "cameraready[{wanted}]"') from error
