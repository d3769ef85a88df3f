"""Fits a chart's SVG into a page: no fonts, no roles and no sizes of its own, colours left to the page's style."""

from __future__ import annotations

import re
from xml.etree import ElementTree

_NUMBER = re.compile(r"-?\d+\.\d{2,}(?:e-?\d+)?")
_DROPPED = frozenset((
    "class", "role", "aria-hidden", "aria-roledescription", "aria-label", "pointer-events", "font-family", "style",
    "stroke-miterlimit",
))  # fmt: skip
_DEFAULTS = {
    "opacity": "1",
    "stroke-width": "1",
    "font-weight": "normal",
    "fill-opacity": "1",
    "stroke-opacity": "1",
}


def for_page(svg: str, *, name: str, title: str, description: str) -> str:
    """`svg` ready to be put into a page.

    Parameters
    ----------
    svg : str
        As the chart library wrote it.
    name : str
        Unique in the page; prefix of every id.
    title, description : str
        What a screen reader says.
    """
    root = ElementTree.fromstring(svg)
    _strip_namespaces(root)
    width, height = float(root.get("width", "0")), float(root.get("height", "0"))
    for child in list(root):
        if child.tag == "rect":  # the background; the page has its own
            root.remove(child)
    _clean(root, name)
    for key in list(root.attrib):
        del root.attrib[key]
    root.set("viewBox", f"0 0 {width:g} {height:g}")
    root.set("style", f"max-width:{width * 1.35:.0f}px")
    root.set("role", "img")
    root.set("aria-labelledby", f"{name}-title {name}-description")
    for position, (tag, text) in enumerate((("title", title), ("desc", description))):
        element = ElementTree.Element(tag, {"id": f"{name}-{'title' if tag == 'title' else 'description'}"})
        element.text = text
        root.insert(position, element)
    return ElementTree.tostring(root, encoding="unicode")


def _strip_namespaces(root: ElementTree.Element) -> None:
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]


def _clean(parent: ElementTree.Element, name: str) -> None:
    for element in list(parent):
        _clean(element, name)
        if _is_invisible(element):
            parent.remove(element)
            continue
        for key in list(element.attrib):
            bare = key.rpartition("}")[2]
            if bare in _DROPPED or _DEFAULTS.get(bare) == element.attrib[key]:
                del element.attrib[key]
            elif bare in ("transform", "d", "x", "x2", "y", "y2"):
                element.attrib[key] = _shorten(element.attrib[key])
        if "id" in element.attrib:
            element.set("id", f"{name}-{element.get('id')}")
        if "clip-path" in element.attrib:
            element.set("clip-path", element.attrib["clip-path"].replace("url(#", f"url(#{name}-"))
    _unwrap_plain_groups(parent)


def _unwrap_plain_groups(parent: ElementTree.Element) -> None:
    children = []
    for element in list(parent):
        children.extend(list(element) if element.tag == "g" and not element.attrib else [element])
    parent[:] = children


def _is_invisible(element: ElementTree.Element) -> bool:
    if element.tag == "path":
        return not element.get("d") or element.get("display") == "none" or element.get("class") == "background"
    if element.tag == "g":
        return len(element) == 0
    return element.get("opacity") == "0"


def _shorten(value: str) -> str:
    return _NUMBER.sub(lambda match: f"{float(match[0]):.1f}".removesuffix(".0"), value)
