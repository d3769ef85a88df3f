"""Pictures for reports: grids of small images as PNG, points and trajectories in the plane as SVG. No library draws them."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

#: The page's colours of arms as they are in its light look; pictures lie on white in both.
COLOURS = ("#b3261e", "#1f5fa8", "#2a7d4f", "#94620a", "#6c4bb0", "#0e7c86", "#a4427c", "#5b636d")


def image_grid(images: Any, *, columns: int = 8, scale: int = 4, low: float = -1.0, high: float = 1.0) -> str:
    """Small grey images side by side, as ``data:image/png;base64`` text for a `Gallery`.

    Parameters
    ----------
    images : array or tensor, shape (n, height, width) or (n, 1, height, width)
        Values from `low` (black) to `high` (white); what lies outside is cut off.
    columns : int
        Images in a row.
    scale : int
        Edge of one pixel of theirs, in pixels of the picture.

    Raises
    ------
    ValueError
        No image, another shape, or values that are not finite.
    """
    values = _numbers(images)
    if not low < high:
        raise ValueError(f"low must lie below high, got {low} and {high}")
    if columns < 1 or scale < 1:
        raise ValueError(f"columns and scale are whole numbers, at least 1, got {columns} and {scale}")
    if values.ndim == 4 and values.shape[1] == 1:
        values = values[:, 0]
    if values.ndim != 3 or 0 in values.shape:
        raise ValueError(f"images must be (n, height, width) with one channel at most, got shape {values.shape}")
    if not np.isfinite(values).all():
        raise ValueError("images hold values that are not finite")
    n, height, width = values.shape
    columns = min(columns, n)
    rows = -(-n // columns)
    grey = np.rint(np.clip((values - low) / (high - low), 0, 1) * 255).astype(np.uint8)
    sheet = np.full((rows * (height * scale + 2) + 2, columns * (width * scale + 2) + 2), 255, np.uint8)
    for index, image in enumerate(grey.repeat(scale, 1).repeat(scale, 2)):
        top = 2 + (index // columns) * (height * scale + 2)
        left = 2 + (index % columns) * (width * scale + 2)
        sheet[top : top + height * scale, left : left + width * scale] = image
    return f"data:image/png;base64,{base64.b64encode(_png(sheet)).decode()}"


def _png(grey: np.ndarray) -> bytes:
    """An 8-bit grey PNG (the format of RFC 2083): header, one compressed block of unfiltered lines, end."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    height, width = grey.shape
    lines = np.concatenate([np.zeros((height, 1), np.uint8), grey], axis=1).tobytes()
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines, 9)) + chunk(b"IEND", b"")


def plane(
    *clouds: Any,
    paths: Any = None,
    labels: Sequence[str] = (),
    span: tuple[float, float, float, float] | None = None,
    size: int = 220,
    radius: float = 1.3,
) -> str:
    """Points and trajectories in the plane, as an SVG document for a `Gallery`.

    Parameters
    ----------
    *clouds : arrays or tensors, shape (n, 2)
        Each in a colour of its own.
    paths : array or tensor, shape (steps, n, 2), optional
        Trajectories, drawn as thin grey lines under the points.
    labels : sequence of str
        What each cloud is, for the legend.
    span : (left, right, bottom, top), optional
        What is shown; by default all points with a margin. Points outside are left out.
    size : int
        Edge of the picture, in pixels.
    radius : float
        Of a point, in pixels.

    Raises
    ------
    ValueError
        A cloud that is not (n, 2), or nothing finite to draw.
    """
    arrays = [_flat(cloud, 2) for cloud in clouds]
    lines = _flat(paths, 3) if paths is not None else np.empty((0, 0, 2))
    every = np.concatenate([*arrays, lines.reshape(-1, 2)])
    every = every[np.isfinite(every).all(1)]
    if not len(every):
        raise ValueError("there is nothing finite to draw")
    if span is None:
        (left, bottom), (right, top) = every.min(0), every.max(0)
        room = 0.05 * max(right - left, top - bottom, 1e-9)
        left, right, bottom, top = left - room, right + room, bottom - room, top + room
    else:
        left, right, bottom, top = span
        if not (left < right and bottom < top):
            raise ValueError(f"span must be (left, right, bottom, top) with left < right and bottom < top, got {span}")
    unit = size / max(right - left, top - bottom)

    def place(points: np.ndarray) -> np.ndarray:
        return np.stack([(points[..., 0] - left) * unit, (top - points[..., 1]) * unit], axis=-1)

    width, height = (right - left) * unit, (top - bottom) * unit
    legend = 14 * len(labels)
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height + legend:.0f}" '
        f'viewBox="0 0 {width:.1f} {height + legend:.1f}">'
    ]
    if lines.size:
        steps = "".join(
            "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in place(run))
            for line in lines.swapaxes(0, 1)
            for run in _unbroken(line)
        )
        drawn.append(f'<path d="{steps}" fill="none" stroke="#8a9099" stroke-width=".5"/>')
    for number, points in enumerate(arrays):
        points = points[np.isfinite(points).all(1)]
        inside = points[
            (points[:, 0] >= left) & (points[:, 0] <= right) & (points[:, 1] >= bottom) & (points[:, 1] <= top)
        ]
        dots = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in place(inside))
        colour = COLOURS[number % len(COLOURS)]
        drawn.append(f'<path d="{dots}" stroke="{colour}" stroke-width="{2 * radius:g}" stroke-linecap="round"/>')
    for number, label in enumerate(labels):
        y = height + 14 * number + 10
        words = label.replace("&", "&amp;").replace("<", "&lt;")
        drawn.append(f'<circle cx="6" cy="{y - 4:.1f}" r="3" fill="{COLOURS[number % len(COLOURS)]}"/>')
        drawn.append(f'<text x="14" y="{y:.1f}" font-size="11" font-family="sans-serif" fill="#1c1e21">{words}</text>')
    return "".join([*drawn, "</svg>"])


def _unbroken(line: np.ndarray) -> list[np.ndarray]:
    """The stretches of a trajectory (steps, 2) between places that are not finite."""
    finite = np.isfinite(line).all(1)
    cuts = np.flatnonzero(np.diff(finite)) + 1
    return [run for run, kept in zip(np.split(line, cuts), np.split(finite, cuts), strict=True) if len(run) and kept[0]]


def _numbers(values: Any) -> np.ndarray:
    if hasattr(values, "detach"):
        values = values.detach().cpu().double()  # numpy knows no bfloat16
    return np.asarray(values, dtype=np.float64)


def _flat(points: Any, dimensions: int) -> np.ndarray:
    values = _numbers(points)
    if values.ndim != dimensions or values.shape[-1] != 2:
        raise ValueError(
            f"points in the plane are {'(steps, n, 2)' if dimensions == 3 else '(n, 2)'}, got {values.shape}"
        )
    return values
