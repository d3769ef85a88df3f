"""Fits a chart's SVG into a page: no fonts, no roles and no sizes of its own, colours left to the page's style."""

from __future__ import annotations

import re
from collections import Counter
from xml.etree import ElementTree

_NUMBER = re.compile(r"-?\d+\.\d{2,}(?:e-?\d+)?")
_PLACE = re.compile(r"translate\((-?[\d.]+),(-?[\d.]+)\)")
#: Paths of the commands that charts use for points; each command is written out.
_MOVABLE = re.compile(r"(?:[MLAhv][-\d.,]+|Z)+")
_DROPPED = frozenset((
    "class", "role", "aria-hidden", "aria-roledescription", "aria-label", "pointer-events", "font-family", "style",
    "stroke-miterlimit",
))  # fmt: skip
_DEFAULTS = {
    "opacity": "1",
    "stroke-width": "1",
    "stroke-dasharray": "1,0",
    "font-weight": "normal",
    "fill-opacity": "1",
    "stroke-opacity": "1",
    "text-anchor": "start",
    "transform": "translate(0,0)",
}
_OF_TEXT = ("text-anchor", "font-size", "fill")


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
    return ElementTree.tostring(root, encoding="unicode").replace(" />", "/>")


def _strip_namespaces(root: ElementTree.Element) -> None:
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]


def _clean(parent: ElementTree.Element, name: str) -> None:
    for element in list(parent):
        _clean(element, name)
        if _is_invisible(element):
            parent.remove(element)
            continue
        _shorten_attributes(element)
        if "id" in element.attrib:
            element.set("id", f"{name}-{element.get('id')}")
        if "clip-path" in element.attrib:
            element.set("clip-path", element.attrib["clip-path"].replace("url(#", f"url(#{name}-"))
    _unwrap_plain_groups(parent)
    _join_neighbours(parent)
    _say_once(parent)


def _shorten_attributes(element: ElementTree.Element) -> None:
    for key in list(element.attrib):
        bare = key.rpartition("}")[2]
        if bare in ("transform", "d", "x", "x2", "y", "y2"):
            element.attrib[key] = _shorten(element.attrib[key])
        if bare in _DROPPED or _DEFAULTS.get(bare) == element.attrib[key]:
            del element.attrib[key]
    if "stroke" not in element.attrib:
        element.attrib.pop("stroke-width", None)
    if element.tag == "text":
        element.attrib["font-size"] = element.get("font-size", "").removesuffix("px")
        place = _PLACE.fullmatch(element.get("transform", ""))
        if place:
            del element.attrib["transform"]
            element.set("x", place[1])
            element.set("y", place[2])


def _unwrap_plain_groups(parent: ElementTree.Element) -> None:
    children = []
    for element in list(parent):
        children.extend(list(element) if element.tag == "g" and not element.attrib else [element])
    parent[:] = children


def _join_neighbours(parent: ElementTree.Element) -> None:
    """Lines and points as paths in place, neighbours that look the same as one: a grid or an arm is one element."""
    children: list[ElementTree.Element] = []
    for element in parent:
        placed = _as_path(element)
        if placed is None:
            children.append(element)
            continue
        last = children[-1] if children else None
        if last is not None and last.get("data-placed") and _look(last) == _look(placed):
            last.set("d", last.get("d", "") + placed.get("d", ""))
        else:
            children.append(placed)
    for element in children:
        element.attrib.pop("data-placed", None)
    parent[:] = children


def _as_path(element: ElementTree.Element) -> ElementTree.Element | None:
    """A line, or a path that a translation puts in its place, as a path that is there; None for anything else."""
    place = _PLACE.fullmatch(element.get("transform", "translate(0,0)"))
    if place is None:
        return None
    if element.tag == "line":
        ends = (("h", element.get("x2", "0")), ("v", element.get("y2", "0")))
        drawn = f"M{place[1]},{place[2]}" + ("".join(f"{to}{far}" for to, far in ends if far != "0") or "h0")
    elif element.tag == "path" and "transform" in element.attrib and _MOVABLE.fullmatch(element.get("d", "")):
        drawn = _moved(element.get("d", ""), float(place[1]), float(place[2]))
    else:
        return None
    looks = {key: value for key, value in element.attrib.items() if key not in ("transform", "x2", "y2", "d")}
    return ElementTree.Element("path", {"d": drawn, **looks, "data-placed": "1"})


def _moved(drawn: str, right: float, down: float) -> str:
    """A path elsewhere: its absolute moves, lines and arcs change, its relative steps do not."""
    parts = []
    for command, text in re.findall(r"([MLAZhv])([^MLAZhv]*)", drawn):
        numbers = [float(x) for x in re.findall(r"-?[\d.]+", text)]
        if command in "MLA":  # an arc's point comes after its radii, rotation and flags
            numbers[-2:] = [round(numbers[-2] + right, 1), round(numbers[-1] + down, 1)]
        parts.append(command + ",".join(f"{x:g}" for x in numbers))
    return "".join(parts)


def _look(element: ElementTree.Element) -> dict[str, str]:
    return {key: value for key, value in element.attrib.items() if key != "d"}


def _say_once(parent: ElementTree.Element) -> None:
    """What most texts of a group share is said by the group."""
    texts = [element for element in parent if element.tag == "text"]
    if parent.tag != "g" or len(texts) < 2:
        return
    group = ElementTree.Element("g")
    for key in _OF_TEXT:
        values = Counter(text.get(key, "") for text in texts)
        ((value, count),) = values.most_common(1)
        if value and count == len(texts):
            group.set(key, value)
            for text in texts:
                del text.attrib[key]
    if group.attrib:
        first = list(parent).index(texts[0])
        for text in texts:
            parent.remove(text)
        group.extend(texts)
        parent.insert(first, group)


def _is_invisible(element: ElementTree.Element) -> bool:
    if element.tag == "path":
        return not element.get("d") or element.get("display") == "none" or element.get("class") == "background"
    if element.tag == "g":
        return len(element) == 0
    return element.get("opacity") == "0"


def _shorten(value: str) -> str:
    return _NUMBER.sub(lambda match: f"{float(match[0]):.1f}".removesuffix(".0"), value)
