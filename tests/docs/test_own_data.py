"""What docs/own-data.md says of judging, tasks and objects is so."""

import importlib
import re
import sys
from pathlib import Path

import pytest

TEXT = (Path(__file__).parents[2] / "docs" / "own-data.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("answer", "text", "right"),
    [
        ("1000", "That makes 1,000.0", True),
        ("7", "12 - 5 = 7", True),
        ("7", "it is 7, not 5", False),
        ("-3.", "so -3", True),
        ("1,000", "1000", True),
        ("7", "7" + "." * 20_001, False),
        ("Paris", "It is paris.", True),
        ("Paris", "a Parisian", False),
        ("Paris", "London, Paris, Rome", True),
        ('"New  York."', "in new york, I think", True),
        ("50 %", "50", False),
        ("50 %", "it is 50 % or 60 %", True),
        ("1/2", "0.5", False),
    ],
)
def test_an_answer_is_judged_as_the_page_says(answer, text, right):
    tasks = pytest.importorskip("cameraready.lm._tasks")
    (problem,) = tasks.own([("?", answer)])
    assert problem.check(text) is right


def test_every_task_stands_in_the_table():
    workload = pytest.importorskip("cameraready.lm._workload")
    table = TEXT[TEXT.index("| `--tasks`") : TEXT.index("Where a study lets")]
    named = set(re.findall(r"`([a-z_-]+(?::NAME)?)`", table))
    wanted = {*workload.RETRIEVAL, *workload.REASONING, f"{workload.LM_EVAL}NAME", f"{workload.GYM}NAME", "own"}
    assert wanted <= named


def test_the_world_of_the_page_opens(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    from cameraready.evidence.specs import parse
    from cameraready.posttraining._workload import ACCEPTS, open_posttraining

    (code,) = re.findall(r"```python\n(# in world.py.*?)```", TEXT, re.DOTALL)
    (tmp_path / "world.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        task = open_posttraining(parse("world:task", shipped=(), accepts=ACCEPTS))
    finally:
        sys.modules.pop("world", None)
    assert (task.prompts, task.completions) == (17, 100)
    assert int(task.correct.sum()) == 98  # all pairs but those with the sums 0 and 18


def test_the_flow_of_the_page_is_understood_and_found_out(tmp_path, monkeypatch):
    """The stand-in of the page, once trained, is taken as it is told, and refused when it is told wrongly."""
    torch = pytest.importorskip("torch")
    from cameraready.evidence import SpecError
    from cameraready.evidence.specs import parse
    from cameraready.flows._workload import ACCEPTS, open_flow
    from cameraready.flows.cfo import study as cfo

    (code,) = re.findall(r"```python\n(# in mine.py.*?)```", TEXT, re.DOTALL)
    (tmp_path / "mine.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        mine = importlib.import_module("mine")
        train(torch, mine.data, mine.predict, mine.network)
        spec = parse("mine:flow", shipped=(), accepts=ACCEPTS)
        problem = open_flow(spec)
        assert (problem.name, problem.shape, len(problem.data)) == ("mine", (2,), 2_000)
        (more,) = re.findall(r"```python\n(# also in mine.py.*?)```", TEXT, re.DOTALL)
        exec(more, vars(mine))
        assert cfo.STUDY.open(parse("mine:task", shipped=(), accepts=cfo.STUDY.accepts)) is not None
        monkeypatch.setattr(mine, "velocity_of", lambda predict, direction: lambda x, t, y=None: predict(x, t))
        with pytest.raises(SpecError, match="direction"):
            open_flow(spec)
    finally:
        sys.modules.pop("mine", None)


def train(torch, data, predict, network):
    """A few steps of flow matching with time running from 1 (noise) to 0 (data)."""
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.03)
    for _ in range(200):
        noise = torch.randn(data.shape, generator=generator)
        t = torch.rand(len(data), generator=generator)
        loss = (predict((1 - t[:, None]) * data + t[:, None] * noise, t) - (noise - data)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
