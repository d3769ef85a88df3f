"""The study's programs, rivals and tasks are what they say, and a user's program is taken as it comes."""

import warnings
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import scipy.sparse as sparse
import torch

import cameraready.optim.dxpp.trials as package
from cameraready.evidence import Context
from cameraready.evidence.checking import check
from cameraready.evidence.specs import SpecError, parse, value_spec
from cameraready.optim.dxpp.trials import measured, planned, rivals, training, workloads

pytestmark = pytest.mark.torch
GENERATORS = {
    "random-dense": (workloads.random_dense, 20),
    "chain": (workloads.chain, 200),
    "simplex": (workloads.simplex, 50),
}
OWN = (np.eye(3), np.array([-1.0, 0.5, -0.2]), None, None, np.ones((1, 3)), np.ones(1), np.zeros(3))


@pytest.mark.parametrize("name", GENERATORS)
def test_all_arms_agree_on_the_gradient_up_to_what_they_promise(name):
    make, n = GENERATORS[name]
    forward = rivals.solved_forward(make(n, 0))
    gx = measured.upstream_for(n, 0)
    truth = rivals.exact(forward, gx)
    assert measured.margin(forward) > 1e-6
    assert rivals.worst_error(rivals.differentiation(forward, "dxpp", gx)(), truth) < 1e-9
    assert rivals.worst_error(rivals.differentiation(forward, "kkt", gx)(), truth) < 1e-9
    formula = rivals.worst_error(rivals.differentiation(forward, "formula", gx)(), truth)
    assert 1e-12 < formula < 1e-4
    assert rivals.relative_error(rivals.full_kkt(forward, gx)(), truth["q"]) < 1e-7


def test_the_official_rules_are_right_where_nothing_is_left_over_and_wrong_where_slack_is():
    data = workloads.random_dense(20, 1)
    forward, gx = rivals.solved_forward(data), measured.upstream_for(20, 1)
    truth = rivals.exact(forward, gx)["q"]
    assert forward.solved.faces.count > 0
    exact_point = forward.x, forward.lam, forward.mu
    assert rivals.relative_error(rivals.as_published(data, *exact_point, gx, 1e-6), truth) < 1e-4
    # A step of 1e-5 inwards from every active row leaves its weight exp(-10) of what it was.
    active = data["G"][forward.solved.faces.rows]
    inwards = np.linalg.lstsq(np.concatenate([active, data["A"]]), np.r_[-9e-6 * np.ones(len(active)), np.zeros(10)])[0]
    moved = (forward.x + inwards, *exact_point[1:])
    assert rivals.relative_error(rivals.as_published(data, *moved, gx, 2e-7), truth) > 1e-3


def test_rows_repeated_leave_the_solution():
    data = workloads.random_dense(20, 2)
    twice = workloads.with_repeated_rows(data, 2)
    assert twice["G"].shape == (40, 20)
    forward = rivals.solved_forward(twice)
    assert rivals.kkt_is_singular(forward)
    np.testing.assert_allclose(forward.x, rivals.solved_forward(data).x, atol=1e-9)


def test_chains_are_chains():
    data = workloads.chain(300, 0)
    x = rivals.solved_forward(data).x.reshape(100, 3)
    assert (np.abs(x - np.roll(x, -1, axis=0)) <= 1 + 1e-9).all()
    assert data["Q"].shape == (300, 300)


# --- tasks ---------------------------------------------------------------------------------------------------------------


def test_boards_are_sudokus_and_the_true_rules_solve_a_puzzle():
    boards = training.boards(np.random.default_rng(0), 20)
    for board in boards:
        blocks = [board[i : i + 2, j : j + 2].ravel() for i in (0, 2) for j in (0, 2)]
        assert all(sorted(group) == [0, 1, 2, 3] for group in (*board, *board.T, *blocks))
    assert len({board.tobytes() for board in boards}) > 5


@pytest.mark.parametrize("name", training.TASKS)
def test_all_layers_take_the_same_first_step(name):
    task = training.TASKS[name](3)
    made = training.layers(task, name == "sudoku")
    found = {}
    for arm in ("dxpp", "kkt") if name == "sudoku" else ("dxpp", "kkt", "cvxpylayers"):
        parameters = [each.clone().requires_grad_() for each in task.start]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of cvxpylayers, on NumPy's new arguments
            task.loss(parameters, made[arm](), 0).backward()
        found[arm] = parameters[0].grad.numpy()
    assert np.abs(found["dxpp"]).max() > 0
    for arm, gradient in found.items():
        assert rivals.relative_error(gradient, found["dxpp"]) < (5e-3 if arm == "cvxpylayers" else 1e-8)


def test_training_reduces_the_held_out_loss_of_sudoku():
    found = measured.trained("sudoku", 3, "dxpp", 4)
    assert found["loss"] < 0.9 * found["untrained_loss"]
    assert 0.0 <= found["cells"] <= 1.0


# --- a user's own ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        OWN,
        {"Q": sparse.eye_array(3), "q": [-1.0, 0.5, -0.2], "A": torch.ones(1, 3), "b": [1], "lb": np.zeros(3)},
        {
            "Q": torch.eye(3).to_sparse_csr(),
            "q": torch.tensor([-1.0, 0.5, -0.2]),
            "A": np.ones((1, 3)),
            "b": np.ones(1),
            "lb": np.zeros(3),
        },
    ],
)
def test_a_users_program_is_run_with_their_own_arm(given):
    workload = workloads.open_workload(value_spec(given).with_value(given))
    rows = []
    for condition in planned.plan("desk", "own"):
        if condition.get("instance", "0") == "0" and condition["part"] == "layer":
            rows += planned.trial(workload, Context(seed=0), **condition)
    assert all(row["q_error"] < 1e-4 for row in rows)

    def theirs(Q, q, G, h, A, b, lb, ub):
        return torch.softmax(-q, 0)

    ctx = Context(seed=0, own={"mine": theirs})
    (row,) = planned.trial(workload, ctx, part="layer", instance="0", arm="mine", n=0)
    assert row["q_error"] > 0.1
    speed = planned.trial(workload, Context(seed=0), part="speed", instances=1, sizes=[0], repeats=1)
    assert {row["arm"] for row in speed} == {"dxpp", "formula", "kkt"}


def test_a_run_on_a_users_program_has_no_failed_trial(tmp_path, monkeypatch):
    monkeypatch.setenv("CAMERAREADY_HOME", str(tmp_path))
    program = (
        np.diag([1.0, 2.0, 3.0]),
        np.array([-1.0, 0.5, 0.2]),
        None,
        None,
        np.ones((1, 3)),
        np.ones(1),
        np.zeros(3),
    )
    found = check("dxpp", on=program, tier="smoke", quiet=True)
    assert found.failures == []
    assert set(found.rows["part"]) == {"layer", "speed"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (3, "got int"),
        ({"Q": np.eye(2)}, "Q, q and any of"),
        ({"Q": np.eye(2), "q": [1, 2], "C": 1}, "got keys"),
        ((np.eye(2), ["a", "b"]), "q is not an array of numbers"),
        ((np.eye(2)[None], [1, 2]), "without a batch"),
    ],
)
def test_what_is_no_program_is_refused(given, words):
    with pytest.raises(SpecError, match=words):
        workloads.own_program(given)


def test_an_object_in_a_module_is_a_program_too(tmp_path, monkeypatch):
    (tmp_path / "mine_qp.py").write_text("import numpy as np\nprogram = (np.eye(2), np.ones(2))\n")
    monkeypatch.chdir(tmp_path)
    workload = workloads.open_workload(parse("mine_qp:program", shipped=["chain"], accepts=["object"]))
    np.testing.assert_array_equal(workload.own["q"], np.ones(2))


# --- what ships ------------------------------------------------------------------------------------------------------------


def test_a_shipped_row_is_what_its_trial_gives():
    shipped = pl.read_parquet(Path(package.__file__).parent.parent / "results.parquet").filter(
        (pl.col("part") == "accuracy")
        & (pl.col("instance") == "3")
        & (pl.col("n") == 20)
        & (pl.col("arm") == "formula")
    )
    workload = workloads.Workload("random-dense", workloads.random_dense)
    again = planned.trial(workload, Context(seed=0), part="accuracy", instance="3", sizes=[20])
    again = {(row["beta"], row["zeta"]): row["error"] for row in again if row["arm"] == "formula"}
    # With smaller beta, and for smaller errors, what is seen is rounding in good part, which processors do differently.
    large = [row for row in shipped.to_dicts() if row["error"] > 1e-6 and row["beta"] >= 1e-6]
    assert len(large) >= 4
    for row in large:
        assert again[row["beta"], row["zeta"]] == pytest.approx(row["error"], rel=0.01)


# --- peers ---------------------------------------------------------------------------------------------------------------


def opened(name):
    from cameraready.evidence.peers.environments import open_peer
    from cameraready.optim.dxpp.study import STUDY

    return open_peer(STUDY.peer(name), Path(package.__file__).parent)


@pytest.mark.peers
def test_libdqp_gives_the_same_gradients_from_our_solution():
    with opened("libdqp") as remote:
        ctx = Context(seed=0, open_peer=lambda name: remote)
        for make, n in GENERATORS.values():
            assert measured.libdqp_errors(ctx, make(n, 0), 0, "libdqp")["q_error"] < 1e-9
        rows = list(measured.speed(ctx, workloads.chain(1_000, 0), 0, "0", 1, False, True))
    assert all(row["q_error"] < 1e-4 for row in rows if "q_error" in row)
    timed = {(row["arm"], column) for row in rows for column in row if column.endswith("_seconds")}
    columns = ("own_seconds", "pass_seconds", "whole_seconds")
    assert {(arm, column) for arm in ("dxpp", "libdqp", "libdqp-pardiso") for column in columns} <= timed


@pytest.mark.peers
def test_diffqcp_is_asked_for_the_same_gradient():
    with opened("diffqcp") as remote:
        rows = list(measured.against_diffqcp(Context(seed=0, open_peer=lambda name: remote), "portfolio", [3], 1))
    errors = {row["arm"]: row["q_error"] for row in rows}
    assert errors["dxpp"] < 1e-9
    assert errors["diffqcp"] < 0.05
