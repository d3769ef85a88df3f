"""A dry run says what would run: on data without a velocity it trains no network, and what cannot be run is refused."""

import numpy as np
import pytest

from cameraready import check
from cameraready.evidence.specs import SpecError
from cameraready.flows import FlowProblem
from cameraready.flows.ba_solver import study
from cameraready.flows.ba_solver.experiment import flows

pytestmark = pytest.mark.torch


MINE = """
import numpy, torch
from cameraready.flows import FlowProblem

flow = FlowProblem("mine", numpy.random.default_rng(0).normal(size=(60, 2)))
def model(x, t): return x
three = (flow, model, model)
module = torch.nn.Module()
"""


class Asked(Exception):
    """A network was to be trained."""


@pytest.fixture
def untrained(monkeypatch, tmp_path):
    def trained(problem):
        raise Asked(problem.name)

    monkeypatch.setattr(FlowProblem, "_trained", trained)
    monkeypatch.setenv("CAMERAREADY_HOME", str(tmp_path))
    rows = np.random.default_rng(0).normal(size=(60, 4))
    lines = [",".join([*(f"{value:.4f}" for value in row), str(i % 2)]) for i, row in enumerate(rows)]
    path = tmp_path / "data.csv"
    path.write_text("\n".join(["a,b,c,d,kind", *lines]))
    return str(path)


@pytest.mark.parametrize("tier", ["smoke", "desk"])
@pytest.mark.parametrize(
    ("method", "columns"),
    [
        ("ba-solver", ""),
        ("ba-solver", ":kind"),
        ("diffusion-information-exponent", ":kind"),
        ("cfo", ":reward=a,constraint=b"),
        ("meta-flow-maps", ""),
        ("meta-flow-maps", ":kind"),
    ],
)
def test_a_dry_run_on_a_table_trains_nothing(untrained, method, columns, tier):
    assert check(method, on=untrained + columns, tier=tier, dry_run=True, quiet=True).trials > 0


def test_the_velocity_is_trained_when_the_trials_are_prepared(untrained):
    from cameraready.evidence.specs import parse

    workload = study.open_workload(parse(untrained, shipped=[], accepts=["table"]))
    with pytest.raises(Asked, match=r"data\.csv"):
        study.prepare(workload, None)
    with pytest.raises(Asked, match=r"data\.csv"):
        study.component(workload)
    workload._velocity = lambda x, t, y=None: -x  # as a trained one is kept
    assert isinstance(flows.ready(workload), flows.Flow)
    assert flows.ready("orders") == "orders"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("flow", r"give \(flow, reward, constraint, bound\).*not a FlowProblem, which has no reward"),
        ("three", r"give \(flow, reward, constraint, bound\).*not a tuple of FlowProblem, function, function"),
        ("model", r"model\(\) raised TypeError.*give \(flow, reward, constraint, bound\)"),
        ("module", r"give \(flow, reward, constraint, bound\).*not a Module"),
    ],
)
def test_cfo_refuses_a_flow_without_reward_before_anything_runs(untrained, tmp_path, monkeypatch, name, words):
    (tmp_path / "mine_of_dry_run.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SpecError, match=words):
        check("cfo", on=f"mine_of_dry_run:{name}", tier="smoke", dry_run=True, quiet=True)


def test_a_table_without_its_columns_is_shown_the_tuple_too(untrained):
    with pytest.raises(SpecError, match=r"reward=COLUMN,constraint=COLUMN.*\(flow, reward, constraint, bound\)"):
        check("cfo", on=untrained, tier="smoke", dry_run=True, quiet=True)
