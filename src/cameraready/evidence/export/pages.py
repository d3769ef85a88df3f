"""The text of a logbook's pages: Markdown and self-contained HTML, with nothing in it that a claim could break."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from cameraready.evidence.export.pictures import light_colours
from cameraready.evidence.outcomes import Verdict
from cameraready.evidence.report import wording

if TYPE_CHECKING:
    from cameraready.evidence.export.pictures import Picture
    from cameraready.evidence.results import Result

SUMMARY, CONCLUSION = "Executive summary", "Conclusion"
TITLE_LENGTH = 72
POSTER_CHARTS = 4

#: Our verdicts in the challenge's words. A smaller setting verifies a claim only as a toy, and refutes nothing.
CHALLENGE_WORDS = {
    ("exact", "holds"): "verified",
    ("exact", "fails"): "falsified",
    ("reduced", "holds"): "toy",
    ("proxy", "holds"): "toy",
}


def challenge_word(verdict: Verdict) -> str:
    """``verified``, ``falsified``, ``toy``, ``inconclusive`` or ``not attempted``; empty for a claim that is ours."""
    if verdict.verdict == "untested":
        return "not attempted"
    if verdict.scope == "ours":
        return ""
    return CHALLENGE_WORDS.get((verdict.scope, verdict.verdict), "inconclusive")


# --- pages ----------------------------------------------------------------------------------------------------------


def index(result: Result) -> str:
    """The index before Trackio lists the pages in it; the challenge wants a title and the list, nothing else."""
    return f"# Reproduction: {heading(result.card.title)}\n\n## Pages\n\n| Page |\n| --- |\n"


def claim_title(label: str, verdict: Verdict) -> str:
    """``Claim 3a: On boosted trees ...``, short enough to be a folder's name."""
    text = heading(verdict.claim or verdict.paper)
    short = text if len(text) <= TITLE_LENGTH else f"{text[: TITLE_LENGTH - 1].rsplit(' ', 1)[0]}…"
    number = label if re.match(r"\d", label) else f"{verdict.number} {label}"
    return f"Claim {heading(number)[:24]}: {short}"


def summary(result: Result) -> str:
    """The outcome first, then what was done beside what a full replication would take."""
    untested = [v for v in result.claims_shown if v.verdict == "untested"]
    needs = "; ".join(dict.fromkeys(plain(v.reason) for v in untested if v.reason))
    scopes = [scope for scope in wording.SCOPES if any(v.scope == scope for v in result.claims)]
    outcome = wording.tally(result.claims)
    rows = [
        (
            "Scope",
            f"{result.tier} run on {wording.count(len(result.workloads), 'workload')}; scopes: {', '.join(scopes)}",
            f"the study's full tier{f'; untested here: {needs}' if needs else ''}",
        ),
        ("Hardware", _hardware(result), "see the paper"),
        ("Compute time", compute_time(result), "not measured"),
        ("Cost", "not recorded", "not measured"),
        ("Outcome", outcome, "not attempted"),
    ]
    text = [
        f"**Answer.** {plain(result.answer)}",
        f"**Verdicts.** {outcome}. {_counts(result)}",
        *([f"**Not complete.** {_INCOMPLETE}"] if result.incomplete else []),
        "## Scope & cost",
        table(("", "This reproduction", "Full replication"), rows),
        f"Made by a program, cameraready, from the rows that its run measured; every number is one of theirs. "
        f"The files: {_files()}.",
    ]
    return "\n\n".join(text)


_INCOMPLETE = "This run has not finished; provisional verdicts rest on the trials that have."


def claim(group: Sequence[Verdict]) -> str:
    """What the paper says, what was tested, by which rule, and what came out on each workload."""
    head = group[0]
    facts = [
        ("The paper", head.paper),
        ("Tested", head.claim if head.claim != head.paper else ""),
        ("Source", head.source),
        ("Scope", f"{head.scope}. {wording.SCOPES.get(head.scope, '')}" if head.scope else ""),
        ("Measure", head.measure),
        ("Rule", f"{head.rule}, fixed before the run" if head.rule else ""),
        ("Rule changed", head.changed),
        ("Needs", head.reason if head.verdict == "untested" else ""),
    ]
    text = [f"**{name}.** {plain(value)}" for name, value in facts if value]
    if head.verdict != "untested":
        text.append(verdict_table(group))
    words = dict.fromkeys(word for word in map(challenge_word, group) if word)
    if words:
        text.append(f"**In the challenge's words.** {', '.join(words)}")
    return "\n\n".join(text)


def conclusion(result: Result) -> str:
    """Which claims were supported and which were not, and what to know about the run."""
    groups = wording.by_claim(result.claims_shown)
    text = []
    for word, look in wording.LOOKS.items():
        named = [label for label, group in groups.items() if any(v.verdict == word for v in group)]
        if named:
            text.append(f"- **{word}** ({look.meaning}): {', '.join(f'claim {heading(label)}' for label in named)}")
    lines = ["A claim is named under every verdict that it has on some workload.\n\n" + "\n".join(text)] if text else []
    lines += [f"**Note.** {plain(note)}" for note in result.notes]
    if result.failures:
        failed = wording.count(len(result.failures), "trial")
        lines.append(
            f"**Failures.** {failed} failed; `results.json` says why. A failed trial of the method forbids “holds”."
        )
    if result.incomplete:
        lines.append(f"**Not complete.** {_INCOMPLETE}")
    return "\n\n".join(lines) or "This run judged no claims."


def provenance(result: Result) -> str:
    """Command, code, environment and files."""
    card = result.card
    sha, changed, _ = result.commit.partition("+")
    code = f"{_repository()}/tree/{sha}" if re.fullmatch(r"[0-9a-f]{40}", sha) else plain(result.commit)
    facts = [
        ("Paper", card.url),
        ("Command", f"`{plain(result.command).replace('`', chr(39))}`" if result.command else ""),
        ("Code", f"{code}{' with changes that are not committed' if changed else ''}"),
        ("Component", f"`{card.module}`{f' (basis: {card.basis})' if card.basis else ''}"),
        ("Started", result.started),
        ("Files", _files()),
    ]
    text = [
        f"**{name}.** {value if name in ('Command', 'Component', 'Files') else plain(value)}"
        for name, value in facts
        if value
    ]
    text.append(table(("Environment", "Version"), list(result.environment.items())))
    loads = [
        (str(load.get("name", "")), "the user's" if load.get("own") else "shipped", str(load.get("digest") or "")[:12])
        for load in result.workloads
    ]
    text.append(table(("Workload", "Origin", "Content"), loads))
    return "\n\n".join(text)


def _files() -> str:
    return "[results.json](media/results.json), [results.parquet](media/results.parquet)"


def _repository() -> str:
    from cameraready.citation import SOFTWARE_URL

    return SOFTWARE_URL


def _hardware(result: Result) -> str:
    told = [result.environment.get("system", ""), f"{result.environment.get('cores', '?')} cores"]
    return ", ".join(part for part in told if part)


def compute_time(result: Result) -> str:
    """The summed time of all trials, as far as the rows tell it."""
    rows = result.rows
    if not {"trial", "trial_seconds"} <= set(rows.columns) or not rows["trial_seconds"].dtype.is_numeric():
        return "not recorded"
    seconds = float(rows.unique(subset=["trial"])["trial_seconds"].sum() or 0.0)
    return f"{wording.duration(seconds)} summed over all trials"


def _counts(result: Result) -> str:
    counted: dict[str, int] = {}
    for group in wording.by_claim(result.claims_shown).values():
        for word in dict.fromkeys(filter(None, map(challenge_word, group))):
            counted[word] = counted.get(word, 0) + 1
    listed = ", ".join(f"{n} {word}" for word, n in counted.items())
    return f"In the challenge's words, by claim: {listed}." if listed else ""


# --- evidence -------------------------------------------------------------------------------------------------------


def verdict_table(group: Sequence[Verdict]) -> str:
    """One row a workload: verdict, estimate, interval, blocks, what must be said beside them."""
    rows = [
        (
            wording.place(v.workload),
            f"{wording.LOOKS[v.verdict].sign} {wording.word(v)}",
            wording.number(v.estimate),
            wording.interval(v) or "–",
            f"{v.blocks:,}",
            "; ".join(wording.remarks(v)),
        )
        for v in group
    ]
    return table(("Workload", "Verdict", "Estimate", "95 % interval", "Blocks", "Remarks"), rows)


def verdict_lines(group: Sequence[Verdict]) -> str:
    """The same as plain lines, as a terminal shows them."""
    return "\n".join(
        f"{v.label}  {wording.word(v)}  {wording.place(v.workload)}  {wording.estimate(v)}  {v.rule}  "
        f"{wording.count(v.blocks, 'block')}"
        for v in group
    )


def command(result: Result, label: str) -> str:
    """The line that measures one claim again."""
    line = result.command or f"cameraready run {shlex.quote(result.card.slug)}"
    return " ".join(f"{line} --claim {shlex.quote(label)}".split()) if "--claim" not in line else " ".join(line.split())


def figure_html(picture: Picture) -> str:
    """A picture as a document of its own, white under both of Trackio's themes."""
    return (
        f'<!doctype html><html lang="en"><body style="margin:8px;background:#fff">{_fluid(picture.svg)}</body></html>'
    )


def poster(result: Result, charts: Mapping[str, Picture], slugs: Mapping[str, str]) -> str:
    """One page at a glance: the answer, every verdict, the pictures of the first claims. Needs no other file.

    A claim's row leads to its page, by the message that Trackio's pages listen to.
    """
    groups = wording.by_claim(result.claims_shown)
    rows = "".join(_poster_row(label, group, slugs.get(label, "")) for label, group in groups.items())
    drawable = sorted((label for label in groups if label in charts), key=lambda label: groups[label][0].low is None)
    shown = [charts[label] for label in drawable[:POSTER_CHARTS]]
    drawn = "".join(f"<figure><figcaption>{escape(p.title)}</figcaption>{_fluid(p.svg)}</figure>" for p in shown)
    authors = escape(", ".join(result.card.authors))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><!-- poster_embed.html -->'
        f"<title>{escape(result.card.title)}</title><style>{_poster_style()}</style></head><body>"
        f'<h1>{escape(result.card.title)}</h1><p class="who">{authors}</p>'
        f'<p class="answer">{escape(result.answer)}</p>'
        f"<table><thead><tr><th>Claim</th><th>Verdicts</th></tr></thead><tbody>{rows}</tbody></table>"
        f'<div class="charts">{drawn}</div><script>{_NAVIGATE}</script></body></html>'
    )


_NAVIGATE = (
    "document.querySelectorAll('[data-logbook-target]').forEach(function (link) {"
    "link.addEventListener('click', function (event) { event.preventDefault();"
    "parent.postMessage({ type: 'trackio-logbook:navigate', target: link.dataset.logbookTarget }, '*'); }); });"
)


def _poster_row(label: str, group: Sequence[Verdict], page: str) -> str:
    said = "<br>".join(
        f'<b style="color:{light_colours()["--" + wording.LOOKS[v.verdict].tone]}">{wording.LOOKS[v.verdict].sign} '
        f"{escape(wording.word(v))}</b> {escape(wording.place(v.workload))} {escape(wording.estimate(v))}"
        for v in group
    )
    sentence = escape(group[0].claim or group[0].paper)
    link = f'<a href="#" data-logbook-target="{escape(page)}">{escape(label)}</a>'
    scope = f" <small>{escape(group[0].scope)}</small>" if group[0].scope else ""
    return f"<tr><td>{link} {sentence}{scope}</td><td>{said}</td></tr>"


def _poster_style() -> str:
    ink, muted, line, accent = (light_colours()[name] for name in ("--ink", "--muted", "--line", "--accent"))
    return (
        f"body{{margin:16px;background:#fff;color:{ink};font:14px/1.45 system-ui,sans-serif}}h1{{font-size:22px;margin:0}}"
        f".who,small{{color:{muted}}}.answer{{font-size:17px;border-left:5px solid {accent};padding:4px 0 4px 12px}}"
        f"table{{border-collapse:collapse;width:100%}}td,th{{text-align:left;vertical-align:top;padding:5px 8px 5px 0;"
        f"border-bottom:1px solid {line}}}td:first-child{{width:55%}}a{{color:{accent};font-weight:700}}"
        f".charts{{display:grid;grid-template-columns:repeat(auto-fit,minmax(300px,1fr));gap:18px;margin-top:18px}}"
        f"figure{{margin:0}}figcaption{{font-weight:600}}svg{{max-width:100%;height:auto}}"
    )


def _fluid(svg: str) -> str:
    """`svg` no wider than its place."""
    return svg.replace("<svg ", '<svg style="max-width:100%;height:auto" ', 1)


# --- text that stays text -------------------------------------------------------------------------------------------


def plain(text: str) -> str:
    """`text` on one line, with nothing in it that Markdown would take for a link or a comment."""
    return " ".join(text.split()).replace("](", "]\u200b(").replace("<!--", "<\u200b!--")


def heading(text: str) -> str:
    """`text` for a title, which is also a cell of the index and the name of a link."""
    # Trackio takes a backslash in a title for a reference to a group, and stops.
    for sign, instead in (("[", "("), ("]", ")"), ("|", "/"), ("`", "'"), ("#", "no. "), ("\\", "∖")):
        text = text.replace(sign, instead)
    return plain(text)


def unfenced(text: str) -> str:
    """`text` without what would end the fence around it, or begin another cell."""
    text = re.sub(r"[`~]{3,}", lambda match: "'" * len(match[0]), text)
    return text.replace("<!--", "<\u200b!--")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(plain(str(cell)).replace("|", r"\|") for cell in line) + " |" for line in lines)
