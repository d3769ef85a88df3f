"""The guide "Which optimizer, which layer" prints what it says."""

import contextlib
import io
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch

GUIDE = Path(__file__).parents[2] / "docs" / "which-optimizer.md"


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_block_prints_what_the_page_shows():
    text = GUIDE.read_text(encoding="utf-8")
    pairs = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", text, flags=re.DOTALL)
    assert len(pairs) == text.count("```python")
    names: dict[str, object] = {}
    for code, shown in pairs:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        assert printed.getvalue() == shown
