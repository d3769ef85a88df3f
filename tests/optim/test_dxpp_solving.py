"""Solutions, multipliers and refusals, the same whatever solver stands behind the layer."""

import warnings

import pytest
import torch

from cameraready.optim.dxpp import InaccurateQPWarning, PenaltyQPLayer, QPError, WeaklyActiveWarning, qp_solve
from tests.optim.test_dxpp_gradients import F64, gradients, program, relative, weights_for

pytestmark = pytest.mark.torch
SOLVERS = ("clarabel", "proxqp", "osqp", "piqp")
every_solver = pytest.mark.parametrize("solver", SOLVERS)
EYE = torch.eye(2, dtype=F64)


def vector(*values):
    return torch.tensor(values, dtype=F64)


@every_solver
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("is_sparse", [False, True])
def test_the_point_meets_the_kkt_conditions_under_one_sign_convention(solver, seed, is_sparse):
    data = program(12, 9, 3, seed)
    given = {name: value.to_sparse_coo() if is_sparse and value.ndim == 2 else value for name, value in data.items()}
    s = PenaltyQPLayer(solver)(**given)
    x, lam, mu = s
    Q, q, G, h, A, b, lb, ub = data.values()
    torch.testing.assert_close(Q @ x + q + G.T @ lam + A.T @ mu + s.z, torch.zeros(12, dtype=F64), atol=1e-10, rtol=0)
    torch.testing.assert_close(A @ x, b, atol=1e-10, rtol=0)
    assert (G @ x <= h + 1e-10).all()
    assert (x >= lb - 1e-10).all()
    assert (x <= ub + 1e-10).all()
    assert (lam >= -1e-10).all()
    assert torch.allclose(lam * (h - G @ x), torch.zeros(9, dtype=F64), atol=1e-9)
    assert (s.z[x > lb + 1e-8] >= 0).all()
    assert (s.z[x < ub - 1e-8] <= 0).all()


def test_all_solvers_lead_to_the_same_gradients():
    data, weights = program(15, 10, 4, 1), weights_for(15, 10, 4)
    found = {solver: gradients(data, weights, solver=solver) for solver in SOLVERS}
    for solver in SOLVERS[1:]:
        assert found[solver][1].last_info.solver == solver
        for name in data:
            assert relative(found[solver][0][name], found["clarabel"][0][name]) < 1e-7, (solver, name)


# --- programs without a solution ------------------------------------------------------------------------------------------

INFEASIBLE = {
    "rows": (EYE, vector(0, 0), vector(1, 0)[None], vector(-1.0), None, None, vector(0, 0), None),
    "equalities": (EYE, vector(0, 0), None, None, torch.ones(2, 2, dtype=F64), vector(1, 2), None, None),
    "both": (EYE, vector(0, 0), vector(1, 1)[None], vector(0.5), vector(1, 1)[None], vector(1.0), None, None),
}
UNBOUNDED = {
    "linear": (0 * EYE, vector(-1, 0), -EYE, vector(0, 0), None, None, None, None),
    "flat direction": (
        torch.diag(vector(1, 0)),
        vector(0, 1),
        vector(1, 0)[None],
        vector(1.0),
        None,
        None,
        None,
        vector(5, 5),
    ),
    "no constraint": (torch.diag(vector(1, 0)), vector(0, 1), None, None, None, None, None, None),
    "a slow fall": (torch.diag(vector(1, 0)), vector(-1, 1e-7), None, None, None, None, None, None),
    "a slow fall from a bound": (
        torch.diag(vector(1, 0)),
        vector(-1, -1e-5),
        None,
        None,
        None,
        None,
        vector(0, 0),
        None,
    ),
}


@every_solver
@pytest.mark.parametrize("kind", INFEASIBLE)
def test_an_infeasible_program_raises_and_leaves_no_old_point(kind, solver):
    layer = PenaltyQPLayer(solver, warm_start=True)
    layer(EYE, vector(1, 1), lb=vector(0, 0))
    with pytest.raises(QPError, match="infeasible") as caught:
        layer(*INFEASIBLE[kind])
    assert caught.value.status == "infeasible"
    assert layer.last_info is None


@every_solver
@pytest.mark.parametrize("kind", UNBOUNDED)
def test_an_unbounded_program_raises(kind, solver):
    with pytest.raises(QPError, match="unbounded") as caught:
        qp_solve(*UNBOUNDED[kind], solver=solver)
    assert caught.value.status == "unbounded"


def test_contradicting_equalities_are_named():
    A, b = torch.tensor([[1.0, 1.0, 0], [0, 0, 1.0], [-2.0, -2.0, 0]], dtype=F64), vector(1, 0, -3)
    with pytest.raises(QPError, match="rows 0 and 2 of A are the same up to a factor"):
        qp_solve(torch.eye(3, dtype=F64), vector(0, 0, 0), A=A, b=b)
    assert torch.allclose(
        qp_solve(torch.eye(3, dtype=F64), vector(0, 0, 0), A=A, b=vector(1, 0, -2)), vector(0.5, 0.5, 0)
    )


def test_a_solver_that_stops_early_is_not_believed():
    data = program(12, 9, 3, 2)
    with pytest.raises(QPError, match="osqp failed") as caught:
        qp_solve(**data, solver="osqp", polish=False, solver_options={"max_iter": 3, "polishing": False})
    assert caught.value.status == "not solved"


def test_a_rough_point_that_cannot_be_polished_is_announced():
    data = program(12, 9, 3, 2)
    exact = qp_solve(**data)
    with pytest.warns(InaccurateQPWarning, match="optimality conditions"):
        rough = qp_solve(
            **data, solver="osqp", polish=False, solver_options={"eps_abs": 1e-5, "eps_rel": 1e-5, "polishing": False}
        )
    assert 1e-9 < float((rough - exact).abs().max()) < 1e-2
    polished = qp_solve(**data, solver="osqp", solver_options={"eps_abs": 1e-5, "eps_rel": 1e-5, "polishing": False})
    torch.testing.assert_close(polished, exact, atol=1e-10, rtol=0)


def test_a_solution_that_is_not_unique_has_no_derivative_unless_regularised():
    Q, q = torch.diag(vector(1, 0)), vector(0, 0)
    box = {"lb": vector(-1, -1), "ub": vector(1, 1)}
    assert qp_solve(Q, q, **box).shape == (2,)
    q.requires_grad_()
    with pytest.raises(QPError, match="not unique") as caught:
        qp_solve(Q, q, **box)
    assert caught.value.status == "not differentiable"
    x = qp_solve(Q, q, **box, regularization=1e-3)
    (slope,) = torch.autograd.grad(x[1], q)
    assert float(slope[1]) == pytest.approx(-1e3, rel=0.6)


def test_a_linear_program_with_a_face_of_solutions_is_refused_for_gradients():
    q = vector(-1, -1).requires_grad_()
    with pytest.raises(QPError, match="not unique"):
        qp_solve(0 * EYE, q, vector(1, 1)[None], vector(1.0), lb=vector(0, 0))


def test_weakly_active_constraints_can_be_an_error():
    with pytest.raises(QPError, match="one-sided") as caught:
        qp_solve(EYE, vector(-1, 0), EYE[:1], vector(1.0), weak="raise")
    assert caught.value.status == "not differentiable"


# --- what is refused before it is solved -------------------------------------------------------------------------------------


def test_an_option_that_the_solver_does_not_know_is_named():
    for solver in SOLVERS[:3]:
        with pytest.raises(ValueError, match=r"does not take this program or solver_options .*nonsense"):
            qp_solve(EYE, vector(1, 1), lb=vector(0, 0), solver=solver, solver_options={"nonsense": 1})


@pytest.mark.parametrize("backward", ["auto", "kkt"])
def test_both_ways_refuse_a_solution_that_is_not_unique(backward):
    q = vector(-0.5, 0).requires_grad_()
    with pytest.raises(QPError, match="not unique"):
        qp_solve(torch.diag(vector(1, 0)), q, lb=vector(-1, -1), ub=vector(1, 1), backward=backward)


def test_the_precision_of_q_decides_and_not_that_of_other_inputs():
    with pytest.raises(ValueError, match="negative eigenvalue"):
        qp_solve(
            torch.diag(vector(1, -0.1)), vector(-1, 0.05), lb=-torch.ones(2, dtype=torch.bfloat16), ub=torch.ones(2)
        )
    skewed = torch.tensor([[1.0, 3e-4], [0.0, 1.0]])
    torch.testing.assert_close(qp_solve(skewed, torch.ones(2)), qp_solve((skewed + skewed.T) / 2, torch.ones(2)))


def test_the_inverse_of_an_ill_conditioned_covariance_is_symmetric_enough():
    g = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(30, 30, generator=g, dtype=F64))[0]
    Q = torch.linalg.inv(basis @ torch.diag(torch.logspace(-6, 0, 30, dtype=F64)) @ basis.T)
    assert float((Q - Q.T).abs().max()) > 0
    assert qp_solve(Q, torch.ones(30, dtype=F64), lb=torch.zeros(30, dtype=F64)).shape == (30,)


def test_the_sample_of_a_batch_without_a_solution_is_named():
    with pytest.raises(QPError, match="sample 1 of the batch: the program is infeasible"):
        qp_solve(EYE, vector(0, 0), vector(1, 0)[None], torch.tensor([[1.0], [-1.0]], dtype=F64), lb=vector(0, 0))


@pytest.mark.parametrize("b", [(1.0, 2.0), (1.0, 3.0)])
def test_a_solver_that_refuses_dependent_rows_fails_in_the_layers_words(b):
    pytest.importorskip("cvxopt")
    with pytest.raises(QPError) as caught:
        qp_solve(EYE, vector(0, 0), A=torch.tensor([[1.0, 1.0], [2.0, 2.0]], dtype=F64), b=vector(*b), solver="cvxopt")
    assert caught.value.status == ("not solved" if b[1] == 2.0 else "infeasible")


GOOD = {"Q": EYE, "q": vector(1, 1)}


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"Q": torch.tensor([[1.0, 0.5], [0.0, 1.0]], dtype=F64)}, ValueError, "not symmetric"),
        ({"Q": torch.diag(vector(1, -1))}, ValueError, "negative eigenvalue"),
        ({"Q": torch.tensor([[1.0, 2.0], [2.0, 1.0]], dtype=F64)}, ValueError, r"smallest eigenvalue -1\)"),
        ({"Q": torch.diag(vector(1, -1)).to_sparse_coo()}, ValueError, "negative eigenvalue"),
        ({"q": vector(1, float("nan"))}, ValueError, "q has NaN"),
        ({"q": vector(1, float("inf"))}, ValueError, "q has infinite values"),
        ({"lb": vector(0, float("nan"))}, ValueError, "lb has NaN"),
        ({"G": vector(0, 0)[None], "h": vector(1.0)}, ValueError, "G has only zeros in row 0"),
        (
            {"A": torch.tensor([[1.0, 1.0], [0, 0]], dtype=F64), "b": vector(1, 0)},
            ValueError,
            "A has only zeros in row 1",
        ),
        ({"A": torch.ones(3, 2, dtype=F64), "b": vector(1, 1, 1)}, ValueError, "3 rows for 2 variables"),
        ({"lb": vector(0, 2), "ub": vector(1, 1)}, ValueError, "lb exceeds ub for 1 variables, first for 1: 2 > 1"),
        ({"lb": vector(0, float("inf"))}, ValueError, "below \\+infinity"),
        ({"G": EYE}, ValueError, "G and h belong together"),
        ({"b": vector(1.0)}, ValueError, "A and b belong together"),
        ({"G": torch.ones(1, 3, dtype=F64), "h": vector(1.0)}, ValueError, r"G must have shape \(1, 2\)"),
        ({"G": EYE, "h": vector(1.0)}, ValueError, r"h must have shape \(2,\)"),
        ({"Q": None}, ValueError, "Q is None"),
        ({"Q": EYE.numpy()}, TypeError, "must be a tensor, got ndarray"),
        ({"q": torch.tensor([1, 1])}, TypeError, "floating-point"),
        (
            {"q": torch.ones(3, 2, dtype=F64), "lb": torch.zeros(2, 2, dtype=F64)},
            ValueError,
            "batch sizes differ: q 3, lb 2",
        ),
        ({"q": torch.ones(1, 3, 2, dtype=F64)}, ValueError, "q must have 1 dimensions"),
        ({"q": vector(1, 1).to_sparse_coo()}, TypeError, "q must be a dense tensor"),
    ],
)
def test_bad_input_is_refused_with_a_sentence(change, error, words):
    with pytest.raises(error, match=words):
        PenaltyQPLayer()(**{**GOOD, **change})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"solver": "gurobbi"}, "'gurobbi' is not installed"),
        ({"beta": 0.0}, "beta must be"),
        ({"penalty": 1.0}, "penalty must exceed 1"),
        ({"eps_active": -1.0}, "eps_active"),
        ({"backward": "fast"}, "backward must be one of 'auto'"),
        ({"weak": "half"}, "weak must be one of 'active'"),
        ({"refine": -1}, "refine must be"),
        ({"regularization": float("nan")}, "regularization must be"),
    ],
)
def test_bad_options_are_refused_with_a_sentence(options, words):
    with pytest.raises(ValueError, match=words):
        PenaltyQPLayer(**options)


def test_a_matrix_that_is_symmetric_and_definite_up_to_its_precision_is_taken():
    root = torch.randn(30, 40, generator=torch.Generator().manual_seed(0))
    Q = root.T @ root  # singular, in single precision: its smallest eigenvalues are negative
    assert torch.linalg.eigvalsh(Q)[0] < 0
    x = qp_solve(Q, torch.ones(40), lb=-torch.ones(40), ub=torch.ones(40))
    assert x.dtype == torch.float32
    assert (x.abs() <= 1).all()


def test_a_degenerate_vertex_is_solved_and_told():
    """Three constraints meet in a plane's corner where two would do."""
    G, h = torch.tensor([[1.0, 0], [0, 1.0], [1.0, 1.0]], dtype=F64), vector(1, 1, 2)
    q = vector(-5, -5).requires_grad_()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        x = qp_solve(EYE, q, G, h)
    torch.testing.assert_close(x, vector(1, 1))
    assert all(issubclass(each.category, WeaklyActiveWarning) for each in caught)
    torch.testing.assert_close(torch.autograd.grad(x.sum(), q)[0], vector(0, 0), atol=1e-9, rtol=0)
