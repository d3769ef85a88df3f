"""The pictures that trials returned (samples, trajectories, molecules), arm by arm, as a page shows them."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from cameraready.evidence.report.curves import Style, of_workloads
from cameraready.evidence.study import Gallery, Study

#: What one picture may weigh in a page.
MOST_CHARACTERS = 100_000
_PNG = re.compile(r"data:image/png;base64,[A-Za-z0-9+/]+={0,2}")


@dataclass(frozen=True)
class Shown:
    """One picture: where its bytes are, what a screen reader says, and what stands below it."""

    source: str
    alt: str
    caption: str


@dataclass(frozen=True)
class GalleryView:
    """A gallery of a page: workloads, and in each the arms with their pictures."""

    title: str
    source: str
    panels: list[tuple[str, list[tuple[str, list[Shown]]]]]
    left_out: str = ""  # why there is nothing to show


def gallery_view(gallery: Gallery, study: Study, rows: pl.DataFrame, styles: Sequence[Style]) -> GalleryView:
    """The pictures of the rows, the method's first. A picture that is none is told instead of shown."""
    wanted = [gallery.picture, study.arms, *filter(None, (gallery.alt, gallery.caption))]
    missing = [column for column in wanted if column not in rows.columns]
    if missing:
        return GalleryView(gallery.title, gallery.source, [], "no finished trial of this run made its pictures")
    table = rows if gallery.where is None else rows.filter(gallery.where)
    table = table.filter(pl.col(gallery.picture).is_not_null() & pl.col(study.arms).is_not_null())
    table = of_workloads(table, gallery.workloads, study)
    panels = []
    try:
        for workload in table["workload"].unique(maintain_order=True).to_list():
            here = table.filter(pl.col("workload") == workload)
            arms = [(style.arm, _pictures(gallery, study, here, style.arm)) for style in styles]
            panels.append((workload, [(arm, shown) for arm, shown in arms if shown]))
    except ValueError as error:
        return GalleryView(gallery.title, gallery.source, [], str(error))
    left_out = "" if panels else "no finished trial of this run made its pictures"
    return GalleryView(gallery.title, gallery.source, panels, left_out)


def _pictures(gallery: Gallery, study: Study, table: pl.DataFrame, arm: str) -> list[Shown]:
    mine = table.filter(pl.col(study.arms).cast(pl.String) == arm).head(gallery.per_arm)
    return [
        Shown(
            picture_source(str(row[gallery.picture])),
            str(row[gallery.alt] or "") if gallery.alt else f"{gallery.title}, {arm}",
            str(row[gallery.caption] or "") if gallery.caption else "",
        )
        for row in mine.to_dicts()
    ]


def picture_source(picture: str) -> str:
    """What the page's ``<img>`` points to: a PNG as ``data:`` text, or an SVG document, which can run no script there.

    Raises
    ------
    ValueError
        The text is neither, or too long.
    """
    if len(picture) > MOST_CHARACTERS:
        raise ValueError(f"a picture of {len(picture):,} characters is over the {MOST_CHARACTERS:,} that a page takes")
    if picture.startswith("<svg"):
        return f"data:image/svg+xml;base64,{base64.b64encode(picture.encode()).decode()}"
    if _PNG.fullmatch(picture):
        return picture
    raise ValueError(f"a picture must be an SVG document or data:image/png;base64 text, not {picture[:30]!r}")
