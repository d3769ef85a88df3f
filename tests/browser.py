"""The real browser that pages are tested in, axe-core to judge them by, and what is asked of a page in JavaScript."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import NoReturn

import platformdirs
import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
AXE_VERSION = "4.14.1"
REQUIRED = "CAMERAREADY_REQUIRE_BROWSER"


def browser_path() -> str:
    """The system's Chromium; without one the test is skipped, or fails where a browser is required."""
    for name in BROWSERS:
        if found := shutil.which(name):
            return found
    return _without(f"no browser: none of {', '.join(BROWSERS)} is on the PATH", REQUIRED, "CI")


def axe_source() -> str:
    """The JavaScript of axe-core, from npm's registry once, then from the user's cache."""
    kept = Path(platformdirs.user_cache_dir("cameraready", appauthor=False), "tests", f"axe-core-{AXE_VERSION}.min.js")
    if not kept.is_file():
        npm = shutil.which("npm")
        if npm is None:
            _without("no npm to fetch axe-core with", REQUIRED)
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
            fetched = Path(folder, "axe.min.js")
            fetched.write_bytes(_packed(npm, folder))
            fetched.replace(kept)
    return kept.read_text(encoding="utf-8")


def _packed(npm: str, folder: str) -> bytes:
    wanted = ["pack", f"axe-core@{AXE_VERSION}", "--silent", "--pack-destination", folder]
    done = subprocess.run([npm, *wanted], capture_output=True, text=True, timeout=180, cwd=folder)
    if done.returncode:
        _without(f"npm could not fetch axe-core: {done.stderr.strip()[-300:]}", REQUIRED)
    with tarfile.open(next(Path(folder).glob("*.tgz"))) as archive:
        member = archive.extractfile("package/axe.min.js")
        assert member is not None
        return member.read()


def _without(reason: str, *asked_for_by: str) -> NoReturn:
    """Skip the test, or fail it where one of these environment variables is set."""
    asking = [name for name in asked_for_by if os.environ.get(name)]
    if asking:
        pytest.fail(f"{reason}, and {' and '.join(asking)} asks for it")
    pytest.skip(reason)


#: Every rule of axe that a page breaks, with the elements and what is wrong with them.
AXE = """async () => {
  const found = await axe.run(document, {resultTypes: ['violations']});
  return found.violations.map(v => `${v.id}: ${v.help}: ` +
    v.nodes.slice(0, 3).map(n => n.html.slice(0, 120) + ' ' + n.failureSummary).join(' | '));
}"""

#: The contrast of every text in a picture with what lies under it, at the worst of the places where it stands; those
#: under the limit.
WEAK_TEXTS = """(least) => {
  const parse = text => {
    const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number);
    return {rgb: [r, g, b], a};
  };
  const luminance = rgb => {
    const [r, g, b] = rgb.map(c => c / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (one, other) => {
    const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const over = (top, alpha, ground) => ground.map((c, i) => alpha * top[i] + (1 - alpha) * c);
  const groundAt = (x, y, text) => {
    let ground = [255, 255, 255];
    for (const element of document.elementsFromPoint(x, y).reverse()) {
      const style = getComputedStyle(element);
      if (element === text || element.tagName === 'text') continue;
      if (element instanceof SVGElement) {
        if (['path', 'rect', 'circle'].includes(element.tagName) && style.fill !== 'none') {
          const fill = parse(style.fill);
          ground = over(fill.rgb, fill.a * style.fillOpacity * style.opacity, ground);
        }
      } else if (style.backgroundColor !== 'rgba(0, 0, 0, 0)') {
        const back = parse(style.backgroundColor);
        ground = over(back.rgb, back.a, ground);
      }
    }
    return ground;
  };
  const weak = [];
  let checked = 0;
  for (const text of document.querySelectorAll('svg text')) {
    text.scrollIntoView({block: 'center', behavior: 'instant'});
    const box = text.getBoundingClientRect();
    if (!box.width) continue;
    checked += 1;
    const ink = parse(getComputedStyle(text).fill).rgb;
    for (const share of [0.05, 0.5, 0.95]) {
      const ground = groundAt(box.left + share * box.width, box.top + box.height / 2, text);
      const value = contrast(ink, ground);
      if (value < least) weak.push(`${text.textContent}: ${value.toFixed(2)}`);
    }
  }
  return {weak, checked};
}"""

#: Pictures with nothing in them, or with marks outside of themselves.
POORLY_DRAWN = """() => [...document.querySelectorAll('svg[role=img]')].flatMap(svg => {
  const frame = svg.getBoundingClientRect();
  const name = svg.querySelector('title').textContent;
  if (frame.width < 100 || frame.height < 30) return [`${name}: ${frame.width} x ${frame.height}`];
  const marks = [...svg.querySelectorAll('path, text')].filter(e => !e.closest('clipPath'));
  const tones = marks.filter(e => /--(good|bad|unseen|open|none|arm)/.test(e.getAttribute('fill') + e.getAttribute('stroke')));
  if (!tones.length) return [`${name}: no estimate or curve`];
  return marks.filter(e => {
    const box = e.getBoundingClientRect();
    return box.left < frame.left - 2 || box.right > frame.right + 2 || box.top < frame.top - 2 || box.bottom > frame.bottom + 2;
  }).map(e => `${name}: ${e.outerHTML.slice(0, 120)} is outside`);
})"""

#: Whatever sticks out of the page sideways and cannot be scrolled to; texts of pictures that are too small to read.
CUT_OFF = """(smallest) => {
  const wide = document.documentElement.clientWidth;
  const out = [];
  if (document.documentElement.scrollWidth > wide) out.push(`the page is ${document.documentElement.scrollWidth} wide`);
  for (const element of document.querySelectorAll('body *')) {
    if (element.closest('.unseen-text, .skip, .scroll, pre') || element instanceof SVGElement) continue;
    const box = element.getBoundingClientRect();
    if (box.width > 1 && box.height > 1 && (box.right > wide + 1 || box.left < -1) &&
        getComputedStyle(element).clipPath === 'none') out.push(`${element.tagName} ${element.className}: ${element.textContent.slice(0, 60)}`);
  }
  for (const text of document.querySelectorAll('svg text')) {
    const scale = text.getScreenCTM().a * parseFloat(getComputedStyle(text).fontSize);
    if (text.getBoundingClientRect().width && scale < smallest) out.push(`${text.textContent} is ${scale.toFixed(1)} px`);
  }
  return out;
}"""

#: Where the focus is, and whether one sees it.
FOCUS = """() => {
  const element = document.activeElement, style = getComputedStyle(element), box = element.getBoundingClientRect();
  return {
    what: element.tagName, text: element.textContent.trim().slice(0, 40), href: element.getAttribute('href'),
    outline: style.outlineStyle === 'none' ? 0 : parseFloat(style.outlineWidth),
    visible: box.width > 0 && box.height > 0 && box.right > 0 && box.top < innerHeight && box.bottom > 0,
    position: [...document.querySelectorAll('*')].indexOf(element),
  };
}"""
