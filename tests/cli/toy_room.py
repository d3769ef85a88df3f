"""A room of small methods for the tests of the command line: a good one, a refuted one, and one that breaks."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import cameraready

CARD = """
slug = "{name}"
title = "A {name} method"
authors = ["Ada Lovelace"]
arxiv = "2601.0000{number}"
purpose = "Sort numbers into {name} piles."
use_when = "Numbers are plenty."
avoid_when = "There are none."
instead_of = ["numpy.sort"]
exports = ["Sorter"]
kind = "sampler"
basis = "paper"
claims = 2
example = '''
from cameraready.toys.{name} import Sorter
Sorter()
'''
"""

STUDY = """
import polars as pl

from cameraready.evidence import Claim, Study, Untested, always, below, ratio, violations

def plan(tier, workload):
    for block in range(12):
        for arm in ("{name}", "rival"):
            yield {{"arm": arm, "block": block}}

def trial(workload, ctx, *, arm, block):
    {trial}
    return {{"error": {error} if arm == "{name}" else 1.0, "wrong": 0.0}}

STUDY = Study(
    open=lambda spec: spec.name,
    workloads={{"smoke": ["small"], "desk": ["small"], "full": []}},
    plan=plan,
    trial=trial,
    method="{name}", arms="arm", block="block",
    claims=[
        Claim(1, paper="It is better.", tested="Its error is below half of the rival's.",
              scope="exact", source="Table 1", measure=ratio("error", "{name}", "rival"), rule=below(0.5)),
        Untested(2, paper="It scales.", needs="a large machine"),
    ],
)
"""

METHODS = {
    "tidy": {"error": "0.25", "trial": "pass"},
    "loose": {"error": "0.75", "trial": "pass"},
    "shaky": {"error": "0.25", "trial": "if arm == 'rival' and block == 3: raise RuntimeError('shaken')"},
}


def build(root: Path) -> None:
    """Write the room `toys` into `root`."""
    for number, (name, parts) in enumerate(METHODS.items()):
        folder = root / "toys" / name
        folder.mkdir(parents=True)
        (folder / "card.toml").write_text(CARD.format(name=name, number=number))
        (folder / "__init__.py").write_text("class Sorter:\n    pass\n")
        (folder / "study.py").write_text(STUDY.format(name=name, **parts))
    (root / "toys" / "__init__.py").write_text("")


@contextlib.contextmanager
def installed(root: Path) -> Iterator[Path]:
    """The room `toys` can be imported as ``cameraready.toys`` and is all that the catalogue holds."""
    build(root)
    usual = cameraready.catalog._HERE
    cameraready.catalog._HERE = root
    cameraready.__path__.append(str(root))  # in place, for the finders hold the same list
    try:
        yield root
    finally:
        cameraready.catalog._HERE = usual
        cameraready.__path__.remove(str(root))
        vars(cameraready).pop("toys", None)
        for name in [name for name in sys.modules if name.startswith("cameraready.toys")]:
            del sys.modules[name]
