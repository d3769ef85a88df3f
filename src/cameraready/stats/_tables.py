"""Columns of a user's table that are no numbers, for the room's studies."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd


def as_days(frame: pd.DataFrame) -> pd.DataFrame:
    """Dates and times, with or without a zone, as days since 1970 (float64)."""
    import pandas as pd

    return frame.apply(lambda column: (column - pd.Timestamp("1970-01-01", tz=column.dt.tz)) / pd.Timedelta(days=1))


def as_text(frame: pd.DataFrame) -> pd.DataFrame:
    """Columns of any kind as text objects, "missing" where there is no value."""
    return frame.astype("string").fillna("missing").astype(object)
