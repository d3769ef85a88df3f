"""The built site: whole, quiet, and leading from a problem to a method without a network."""

import html
import json
import re
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

import pytest

from cameraready.catalog import catalog

pytestmark = pytest.mark.xdist_group("browser")  # with whom the browser is shared


class _Links(HTMLParser):
    """Collects what a page points to, what it loads, and its anchors."""

    def __init__(self, text):
        super().__init__()
        self.links, self.loaded, self.ids = [], [], set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.ids.update(found[name] for name in ("id", "name") if found.get(name))
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
        if tag in ("script", "img", "iframe", "source") and found.get("src"):
            self.loaded.append(found["src"])
        if tag == "link" and found.get("href") and found.get("rel") != "canonical":
            self.loaded.append(found["href"])


def pages_of(site):
    """All pages but the one for what is not found, which is served from anywhere, so that its links are absolute."""
    return [path for path in sorted(site.rglob("*.html")) if path.name != "404.html"]


@pytest.fixture(scope="session")
def parsed(site):
    return {path.relative_to(site): _Links(path.read_text(encoding="utf-8")) for path in pages_of(site)}


def test_every_link_leads_to_a_page_and_an_anchor_that_are_there(site, parsed):
    broken = []
    for page, found in parsed.items():
        for link in [*found.links, *found.loaded]:
            parts = urlsplit(link)
            if parts.scheme or link.startswith("//"):
                continue
            target = (site / page).parent / unquote(parts.path) if parts.path else site / page
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                broken.append(f"{page} -> {link}")
            elif parts.fragment and target.suffix == ".html":
                known = parsed[target.resolve().relative_to(site.resolve())].ids
                if unquote(parts.fragment) not in known:
                    broken.append(f"{page} -> {link} (no such anchor)")
    assert broken == []


def test_no_snippet_is_left_unfilled(site):
    left = [
        path.name for path in pages_of(site) if re.search(r"--8|8 &lt;|generated: ", path.read_text(encoding="utf-8"))
    ]
    assert left == []
    page = (site / "adding-a-method.html").read_text(encoding="utf-8")
    assert {"TrimmedMean", "check_estimator", "trimmed-mean", "versus_best"} <= set(re.findall(r"[\w-]+", page))


def test_no_page_loads_anything_from_another_host(parsed):
    foreign = {f"{page}: {src}" for page, found in parsed.items() for src in found.loaded if urlsplit(src).netloc}
    assert foreign == set()


@pytest.mark.parametrize("card", catalog(), ids=lambda card: card.slug)
def test_a_methods_page_shows_every_claim_with_its_published_numbers(site, card):
    page = (site / "methods" / f"{card.slug}.html").read_text(encoding="utf-8")
    text = " ".join(html.unescape(re.sub(r"<[^>]+>", " ", page)).split())
    results = json.loads(card.results_path.read_text(encoding="utf-8"))
    assert " ".join(results["answer"].split()) in text
    from cameraready.evidence.report import wording
    from cameraready.evidence.report.saved import verdicts_of

    for verdict in verdicts_of(results):
        assert f'id="claim-{verdict.label}"' in page
        shown = re.sub(r"(?<![\w.\-])-(?=[\d.])", "−", wording.estimate(verdict))
        assert shown in text, (verdict.label, verdict.workload)
        assert " ".join((verdict.claim or verdict.paper).split()) in text
    for line in (*card.use_when, *card.avoid_when, *card.instead_of):
        assert line in text
    assert (site / "methods" / f"{card.slug}-report.html").is_file()


def test_a_rooms_page_says_when_which_method_and_when_not(site):
    for card in catalog():
        page = html.unescape((site / "problems" / f"{card.room}.html").read_text(encoding="utf-8"))
        for line in (card.purpose, *card.use_when, *card.avoid_when, *(u.when_sufficient for u in card.upstream)):
            assert line in page


def test_the_front_page_leads_from_kernel_explainer_to_the_method_with_a_number(site):
    page = (site / "index.html").read_text(encoding="utf-8")
    box = page[page.index("cr-answer") :][:2500]
    assert "shap.KernelExplainer" in box
    assert 'href="methods/oddshap.html"' in box
    assert "mean squared error" in box
    assert re.search(r"<b>0\.\d+</b> \[0\.\d+, 0\.\d+\] times as large", box)


def test_the_command_reference_has_every_command(site):
    from typer.main import get_command

    from cameraready.cli.app import app

    page = (site / "reference" / "cli.html").read_text(encoding="utf-8")
    commands = list(get_command(app).commands)
    assert {"run", "show", "find", "export", "cite"} <= set(commands)
    for name in commands:
        assert f'id="{name}"' in page


# --- in a browser ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", ["KernelExplainer", "kernel explainer", "shapley values"])
def test_search_finds_the_method_from_a_folder_without_a_server(site, visit, words):
    tab = visit(site / "index.html", width=1280)
    tab.locator("input.md-search__input").click()
    tab.keyboard.type(words)
    tab.locator(".md-search-result__item").first.wait_for()
    found = tab.locator(".md-search-result__item h1").all_inner_texts()
    assert any("OddSHAP" in title for title in found[:3])
    assert tab.said == []
    assert all(url.startswith(("file:", "data:")) for url in tab.asked)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_page_is_wider_than_a_phone_or_has_an_error(site, visit, scheme):
    tab = visit(site / "index.html", scheme=scheme, width=360, height=800)
    pages = pages_of(site)
    for path in pages if scheme == "light" else pages[::5]:  # colours change no width
        tab.goto(path.as_uri())
        assert tab.evaluate("document.documentElement.scrollWidth") <= 360, path.name
    assert tab.said == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["index", "methods/oddshap", "problems/attribution", "verdicts"])
def test_what_the_pages_add_to_the_theme_is_accessible(site, visit, axe, scheme, name):
    tab = visit(site / f"{name}.html", scheme=scheme, width=1280)
    tab.evaluate(axe)
    ours = "[...document.querySelectorAll('[class^=cr-], [class*=\" cr-\"]')]"
    found = tab.evaluate(
        f"""async () => {{
          const run = await axe.run({{include: {ours}}}, {{resultTypes: ['violations']}});
          return run.violations.map(v => `${{v.id}}: ` + v.nodes.slice(0, 3).map(n => n.html.slice(0, 140)).join(' | '));
        }}"""
    )
    assert found == []


# --- the generator refuses what it cannot show -----------------------------------------------------------------------


def test_a_method_without_its_notes_is_refused(generator, tmp_path):
    from dataclasses import replace

    card = replace(catalog()[0], slug="new", folder=tmp_path)
    with pytest.raises(ValueError, match=r"notes\.md"):
        generator["methods"].notes(card)
    (tmp_path / "notes.md").write_text("# New\n\n## How it works\nSo.\n", encoding="utf-8")
    with pytest.raises(ValueError, match="What we corrected"):
        generator["methods"].notes(replace(card, slug="newer"))


def test_an_unknown_marker_is_refused(generator):
    class Page:
        class file:
            src_uri = "index.md"

    with pytest.raises(ValueError, match="nothing generates 'nonsense'"):
        generator["hooks"].on_page_markdown("<!-- generated: nonsense -->", Page, None, None)


def test_a_figure_of_a_study_can_stand_in_a_guide_and_only_one_that_is_there(generator):
    shown = generator["methods"].one_figure("oddshap", "1", "digits")
    assert re.findall(r"<figcaption>(\S+)", shown) == ["digits"]
    assert "<svg" in shown
    names = re.findall(r'id="([^"]+)"', shown)
    assert names
    assert all(name.startswith("oddshap-figure-1-") for name in names)
    with pytest.raises(ValueError, match="so none of number 99"):
        generator["methods"].one_figure("oddshap", "99")
    with pytest.raises(ValueError, match="shows"):
        generator["methods"].one_figure("oddshap", "1", "nowhere")
