"""Programs that exports are opened with: without one a test is skipped, or fails where they were promised."""

import os
import shutil

import pytest


def need(*programs):
    """Skip where LaTeX or poppler is not installed, unless it was promised."""
    missing = [program for program in programs if shutil.which(program) is None]
    if missing and os.environ.get("CAMERAREADY_REQUIRE_LATEX"):
        pytest.fail(f"CAMERAREADY_REQUIRE_LATEX is set, and there is no {', '.join(missing)}")
    if missing:
        pytest.skip(f"no {', '.join(missing)} (Debian: texlive-latex-base, texlive-latex-recommended, poppler-utils)")
