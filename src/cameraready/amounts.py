"""Amounts of memory and numbers of weights as a person says them, whatever their size."""

from __future__ import annotations

GIB, MIB, KIB = 1 << 30, 1 << 20, 1 << 10


def memory(size: float) -> str:
    """`size` bytes: ``"15 GiB"``, ``"13.4 MiB"``, ``"2.1 KiB"``; 0 is ``"0 GiB"``."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB")):
        if size >= 0.1 * unit or size == 0:
            return f"{_three(size / unit)} {name}"
    return f"{_three(size / KIB)} KiB"


def weights(n: int) -> str:
    """A number of weights: ``"8.03 billion"``, ``"596 million"``, ``"71.2 thousand"``, ``"12"``."""
    for unit, name in ((10**9, "billion"), (10**6, "million"), (10**3, "thousand")):
        if n >= unit:
            return f"{_three(n / unit)} {name}"
    return str(n)


def _three(x: float) -> str:
    """Three digits, or all those before the point."""
    return f"{x:,.0f}" if x >= 99.95 else f"{x:.3g}"
