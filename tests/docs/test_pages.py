"""The documentation shows code that runs."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_worked_example_is_the_study_that_the_suite_runs():
    page = (ROOT / "docs" / "adding-a-method.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert (
        shown.strip() == (ROOT / "tests" / "evidence" / "studies" / "estimating.py").read_text(encoding="utf-8").strip()
    )


def test_the_readme_shows_the_answer_that_ships():
    import json

    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").replace("\n> ", " ").split())
    results = json.loads((ROOT / "src/cameraready/attribution/oddshap/results.json").read_text(encoding="utf-8"))
    assert " ".join(results["answer"].split()) in readme
