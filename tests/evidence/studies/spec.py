"""A stand-in for a spec: just a name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PlainSpec:
    text: str
    kind: str = "shipped"

    @property
    def name(self) -> str:
        return self.text
