"""Results as a Trackio logbook: a folder of pages that Trackio shows and, if told to, publishes.

The pages follow the template of the ICML 2026 reproduction challenge (``ICML-2026-agent-repro`` on Hugging Face): an
index, an executive summary with a pinned poster, one page a claim, a conclusion.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cameraready.evidence.export import Written, pages
from cameraready.evidence.export.frames import claims_frame, csv_bytes
from cameraready.evidence.export.landing import landing_folder
from cameraready.evidence.export.pictures import Picture, claim_pictures, figure_pictures
from cameraready.evidence.outcomes import Verdict
from cameraready.evidence.report import page_name, wording
from cameraready.evidence.subject import UsageError

if TYPE_CHECKING:
    import polars as pl

    from cameraready.evidence.results import Result

PROJECT = ".trackio"
CHALLENGE_TAG = "icml2026-repro"
_OPENREVIEW = re.compile(r"[A-Za-z0-9_-]{8,14}")
_FORUM = re.compile(r"openreview\.net/(?:forum|pdf|attachment)\?(?:.*&)?id=([\w-]+)", re.IGNORECASE)


def write_logbook(result: Result, out: Path, *, publish: bool = False, openreview: str | None = None) -> Written:
    """Write the logbook into ``NAME-logbook`` in the folder `out`; nothing is sent anywhere unless `publish`.

    Raises
    ------
    ModuleNotFoundError
        If Trackio is not installed.
    UsageError
        If it cannot be published: no token, no OpenReview id, or an id that is none.
    """
    trackio = _import_trackio()
    paper = openreview_id(openreview if openreview is not None else result.card.openreview)
    owner = _owner(result, paper) if publish else ""
    place = out / f"{page_name(result)}-logbook"
    with landing_folder(place) as folder:
        _build(trackio, result, folder / PROJECT, paper)
    if publish:
        address = _publish(trackio, place, f"{owner}/{space_name(result, owner)}")
        return Written([str(place), address], f"Published for everybody to read: {address}")
    missing = "" if paper else " The challenge's board finds a logbook by its paper: --openreview ID adds that."
    return Written([str(place)], f"Look at it: trackio logbook serve {place}.{missing}")


def _import_trackio() -> Any:
    try:
        from trackio import logbook
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f'{error.name} is not installed: pip install "cameraready[trackio]"', name=error.name
        ) from error
    return logbook


def openreview_id(text: str) -> str:
    """The id in `text`, which is one or a URL with one; empty if `text` is.

    Raises
    ------
    UsageError
        If `text` is neither.
    """
    text = text.strip()
    found = _FORUM.search(text)
    name = found[1] if found else text
    if name and not _OPENREVIEW.fullmatch(name):
        raise UsageError(f"an OpenReview id has about ten letters and digits, such as ay4Q69fAJL; got {text!r}")
    return name


# --- building -------------------------------------------------------------------------------------------------------


def _build(trackio: Any, result: Result, project: Path, paper: str) -> None:
    """A logbook in the folder `project`, which must be new. Trackio writes every page but the index's first lines."""
    book = project / "logbook"
    (book / "pages").mkdir(parents=True)
    (book / "pages" / "index.md").write_text(pages.index(result), encoding="utf-8")
    trackio.write_metadata(project, _metadata(result, paper))
    result.save(book / "media")  # everything below `logbook` can be downloaded from the shown or published pages
    charts = {picture.label: picture for picture in claim_pictures(result)}
    claims = wording.by_claim(result.claims_shown)
    # Pages stand in the index in the order in which they are first named.
    summary = trackio.ensure_page(project, pages.SUMMARY)
    slugs = {label: trackio.ensure_page(project, pages.claim_title(label, claims[label][0])) for label in claims}
    conclusion = trackio.ensure_page(project, pages.CONCLUSION)

    trackio.add_markdown_cell(project, summary, pages.summary(result), title=pages.SUMMARY)
    _pin_last(trackio, project, summary)
    poster = pages.poster(result, charts, slugs)
    trackio.add_figure_cell(project, summary, html=poster, title="Reproduction poster")
    _pin_last(trackio, project, summary)
    for picture in figure_pictures(result):
        trackio.add_figure_cell(project, summary, html=pages.figure_html(picture), title=picture.title)
    frame = claims_frame(result)
    for label, group in claims.items():
        _claim_page(trackio, project, slugs[label], result, group, charts.get(label), frame)
    trackio.add_markdown_cell(project, conclusion, pages.conclusion(result), title=pages.CONCLUSION)
    trackio.add_markdown_cell(project, conclusion, pages.provenance(result), title="How to repeat it")


def _metadata(result: Result, paper: str) -> dict[str, Any]:
    card = result.card
    known = {"title": card.title, "openreview_id": paper, "arxiv_id": card.arxiv}
    return {
        "space_id": None,
        "emoji": "🎯",
        "created_at": result.started,
        "paper": {name: value for name, value in known.items() if value},
        "tags": [CHALLENGE_TAG, *([f"paper-{paper}"] if paper else []), "cameraready"],
    }


def _pin_last(trackio: Any, project: Path, page: str) -> None:
    """Show the page's last cell above all pages."""
    trackio.set_cell_pinned(project, trackio.last_cell_id(project, page), page=page)


def _claim_page(
    trackio: Any,
    project: Path,
    page: str,
    result: Result,
    group: Sequence[Verdict],
    chart: Picture | None,
    frame: pl.DataFrame,
) -> None:
    """What was claimed and found, the picture with its numbers, and the command that measures it again."""
    label = group[0].label
    trackio.add_markdown_cell(project, page, pages.claim(group), title="Claim and verdict")
    if chart is not None:
        rows = frame.filter(frame["label"] == label).select("workload", "verdict", "estimate", "low", "high", "blocks")
        raw = pages.unfenced(csv_bytes(rows).decode())
        trackio.add_figure_cell(project, page, html=pages.figure_html(chart), raw=raw, title="Estimates and intervals")
    if group[0].verdict != "untested":
        trackio.add_code_cell(
            project,
            page,
            output=pages.unfenced(pages.verdict_lines(group)),
            code_text=pages.unfenced(pages.command(result, label)),
            language="bash",
            title="Measure it again",
        )


# --- publishing -----------------------------------------------------------------------------------------------------


def _owner(result: Result, paper: str) -> str:
    """The Hugging Face user whose token is at hand.

    Raises
    ------
    UsageError
        If nothing may be published.
    """
    import huggingface_hub

    if not paper:
        raise UsageError(
            f"a published logbook is found by its paper, and the card of {result.card.slug} has no OpenReview id; "
            "add --openreview ID. Nothing was sent"
        )
    token = huggingface_hub.get_token()
    if not token:
        raise UsageError(
            "--publish needs a Hugging Face token that may write: `hf auth login`, or HF_TOKEN in the environment. "
            "Nothing was sent"
        )
    return str(huggingface_hub.HfApi(token=token).whoami()["name"])


def space_name(result: Result, owner: str) -> str:
    """``repro-`` and the paper's title, as the challenge wants it, short enough to be the name of a host."""
    room = 63 - len(owner) - 1  # a host's name, OWNER-SPACE, has at most 63 characters
    title = re.sub(r"[^a-z0-9]+", "-", result.card.title.lower()).strip("-")
    return f"repro-{title}"[: max(room, 16)].rstrip("-")


def _publish(trackio: Any, place: Path, space: str) -> str:
    with contextlib.chdir(place):  # Trackio publishes the logbook of the working folder
        try:
            return str(trackio.publish(space))
        except trackio.LogbookError as error:
            raise RuntimeError(f"{error} The logbook is kept in {place}.") from error
