"""The report's pictures as vector PDF files for a paper, one a picture, fonts embedded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cameraready.evidence.export import Written
from cameraready.evidence.export.landing import land_files
from cameraready.evidence.export.pictures import pictures
from cameraready.evidence.report import page_name
from cameraready.evidence.subject import UsageError

if TYPE_CHECKING:
    from cameraready.evidence.results import Result


def write_figures(result: Result, out: Path) -> Written:
    r"""``NAME-claim-3a.pdf`` and ``NAME-figure-1-digits.pdf``, each ready for ``\includegraphics``.

    Raises
    ------
    UsageError
        If the result has nothing to draw.
    """
    import vl_convert

    name = page_name(result)
    files: dict[str, bytes] = {}
    for picture in pictures(result):
        stem = f"{name}-{picture.name}"
        twins = sum(known == f"{stem}.pdf" or known.startswith(f"{stem}--") for known in files)
        files[f"{stem}--{twins + 1}.pdf" if twins else f"{stem}.pdf"] = vl_convert.svg_to_pdf(picture.svg)
    if not files:
        raise UsageError(f"there is nothing to draw: the {result.tier} run of {result.card.slug} has no estimates")
    return Written(land_files(out, files))
