"""A digest of a result, by which an export knows what it has exported already."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from cameraready.evidence.export.frames import csv_bytes

if TYPE_CHECKING:
    from cameraready.evidence.results import Result


def digest(result: Result) -> str:
    """A digest of everything in a result; equal for equal results, whenever and wherever it is taken."""
    text = json.dumps(result.to_json(), sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode() + csv_bytes(result.rows)).hexdigest()
