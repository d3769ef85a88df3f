"""The layer as a PyTorch module: batches, sparse layouts, dtypes, warm starts, transforms, training."""

import copy
import io

import numpy as np
import pytest
import scipy.sparse as sparse
import torch

from cameraready.optim.dxpp import PenaltyQPLayer, QPSolution, qp_solve
from tests.optim.test_dxpp_gradients import F64, program, relative, weights_for

pytestmark = pytest.mark.torch
LAYOUTS = {"coo": torch.Tensor.to_sparse_coo, "csr": torch.Tensor.to_sparse_csr, "csc": torch.Tensor.to_sparse_csc}


def coo(matrix):
    matrix = sparse.coo_array(matrix)
    with torch.sparse.check_sparse_tensor_invariants():
        where = torch.tensor(np.stack(matrix.coords).astype(np.int64))
        return torch.sparse_coo_tensor(where, torch.tensor(matrix.data), matrix.shape)


def chain(points, dim, seed):
    """Points on a ring in `dim` dimensions whose neighbours differ by at most one; smooth."""
    eye = sparse.eye_array(dim)
    second = sparse.kron(sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(points, points)), eye)
    step = sparse.lil_array(sparse.eye_array(points) - sparse.eye_array(points, k=1))
    step[-1, 0] = -1.0
    first = sparse.kron(sparse.csr_array(step), eye)
    Q = 0.5 * sparse.eye_array(points * dim) + second.T @ second
    q = -10.0 * np.random.default_rng(seed).normal(size=points * dim)
    G = sparse.vstack([first, -first])
    return coo(Q), torch.tensor(q), coo(G), torch.ones(G.shape[0], dtype=F64)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sparse_and_dense_inputs_give_the_same_solution_and_the_same_gradients_on_the_pattern(layout):
    Q, q, G, h = chain(12, 2, 0)
    dense = [each.to_dense().requires_grad_() for each in (Q, q, G, h)]
    weights = torch.linspace(-1, 1, 24, dtype=F64)
    full = torch.autograd.grad((PenaltyQPLayer()(*dense).x * weights).sum(), dense)
    given = [
        LAYOUTS[layout](Q.to_dense()).requires_grad_(),
        dense[1],
        LAYOUTS[layout](G.to_dense()).requires_grad_(),
        dense[3],
    ]
    layer = PenaltyQPLayer()
    s = layer(*given)
    found = torch.autograd.grad((s.x * weights).sum(), given)
    assert found[0].layout == given[0].layout
    for name, mine, theirs, pattern in zip("QqGh", found, full, (Q, q, G, h), strict=True):
        shown = torch.where(pattern.to_dense() != 0, theirs, 0.0) if name in "QG" else theirs
        assert relative(mine.to_dense(), shown) < 1e-9, name


@pytest.mark.parametrize("backward", ["direct", "iterative"])
def test_large_sparse_programs_agree_with_the_kkt_system(backward):
    for data in (chain(60, 10, 1), simplex(700, 2)):
        found = {}
        for way in (backward, "kkt"):
            q = data[1].clone().requires_grad_()
            layer = PenaltyQPLayer(backward=way)
            s = layer(data[0], q, *data[2:])
            found[way] = torch.autograd.grad((s.x**2).sum() + (s.lam**2).sum(), q)[0]
            assert layer.last_info.n_active > 0.3 * len(q)
            assert layer.last_info.factorisation.startswith(
                {"direct": ("banded", "diagonal"), "iterative": "conj", "kkt": "KKT"}[way]
            )
        assert relative(found[backward], found["kkt"]) < 1e-8


def simplex(n, seed):
    q = torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=F64)
    return coo(sparse.eye_array(n)), q, coo(-sparse.eye_array(n)), torch.zeros(n, dtype=F64), torch.ones(1, n, dtype=F64).to_sparse_coo(), torch.ones(1, dtype=F64)  # fmt: skip


def test_a_dense_row_does_not_fill_the_matrix_and_bounds_add_a_diagonal_only():
    n = 3_000
    Q, q, _, _, A, b = simplex(n, 3)
    layer = PenaltyQPLayer()
    q.requires_grad_()
    x, _, _ = layer(Q, q, A=A, b=b, lb=torch.zeros(n, dtype=F64))
    assert layer.last_info.factorisation == "diagonal with dense rows by Woodbury"
    (slope,) = torch.autograd.grad(x[x.argmax()], q)
    support = (x > 1e-9).detach()
    assert int(support.sum()) > 1
    expected = torch.where(support, 1.0 / support.sum(), 0.0).to(F64)
    expected[x.argmax()] -= 1.0
    torch.testing.assert_close(slope, expected, atol=1e-9, rtol=0)


# --- batches -------------------------------------------------------------------------------------------------------------


def stacked(names, count=3):
    """`count` programs, the inputs in `names` differing, the others those of the first."""
    many = [program(8, 6, 2, seed) for seed in range(count)]
    return {name: torch.stack([each[name] for each in many]) if name in names else many[0][name] for name in many[0]}


@pytest.mark.parametrize("names", [("Q", "q", "G", "h", "A", "b", "lb", "ub"), ("q",), ("Q", "q")])
def test_a_batch_is_its_samples_one_by_one(names):
    data = {name: value.requires_grad_() for name, value in stacked(names).items()}
    weights = weights_for(8, 6, 2)
    layer = PenaltyQPLayer()

    def loss(s):
        return (s.x @ weights["x"] + s.lam @ weights["lam"] + s.mu @ weights["mu"] + s.z @ weights["z"]).sum()

    together = layer(**data)
    assert together.x.shape == (3, 8)
    assert len(layer.last_info) == 3
    alone = [layer(**{name: value[i] if name in names else value for name, value in data.items()}) for i in range(3)]
    torch.testing.assert_close(together.lam, torch.stack([each.lam for each in alone]))
    one = torch.autograd.grad(loss(together), list(data.values()))
    other = torch.autograd.grad(sum(loss(each) for each in alone), list(data.values()))
    for name, a, b in zip(data, one, other, strict=True):
        assert relative(a, b) < 1e-9, name


def test_batched_and_shared_sparse_matrices():
    Q, q, G, h = chain(12, 2, 0)
    qs = torch.stack([q, -q, 2 * q])
    shared = Q.clone().requires_grad_()
    many = torch.stack([Q, 1.5 * Q, Q]).coalesce().requires_grad_()
    weights = torch.linspace(-1, 1, 24, dtype=F64)
    a = PenaltyQPLayer()(shared, qs, G, h).x
    (slope,) = torch.autograd.grad((a @ weights).sum(), shared)
    alone = [torch.autograd.grad((qp_solve(shared, each, G, h) * weights).sum(), shared)[0] for each in qs]
    assert relative(slope.to_dense(), sum(each.to_dense() for each in alone)) < 1e-9
    b = PenaltyQPLayer()(many, qs, G, h).x
    torch.testing.assert_close(b[0], a[0])
    (slope,) = torch.autograd.grad((b @ weights).sum(), many)
    assert relative(slope.to_dense()[2], alone[2].to_dense()) < 1e-9


def test_a_batch_of_one_keeps_its_dimension():
    data = stacked(("q",), count=1)
    assert qp_solve(**data).shape == (1, 8)


# --- dtype, transforms, module ---------------------------------------------------------------------------------------------


def test_single_precision_comes_back_as_single_precision_and_is_solved_in_double():
    data = program(10, 6, 2, 1)
    exact = torch.autograd.grad(qp_solve(data["Q"], q := data["q"].clone().requires_grad_(), **rest(data)).sum(), q)[0]
    single = {name: value.float() for name, value in data.items()}
    q = single["q"].requires_grad_()
    s = PenaltyQPLayer()(**single)
    assert {each.dtype for each in (*s, s.z)} == {torch.float32}
    (slope,) = torch.autograd.grad(s.x.sum(), q)
    assert slope.dtype == torch.float32
    assert relative(slope.double(), exact) < 1e-4


def rest(data):
    return {name: value for name, value in data.items() if name not in ("Q", "q")}


def test_transforms_of_torch_func():
    data = program(6, 4, 1, 2)
    weights = torch.linspace(-1, 1, 6, dtype=F64)

    def f(q):
        return (qp_solve(data["Q"], q, **rest(data)) * weights).sum()

    q = data["q"].clone().requires_grad_()
    expected = torch.autograd.grad(f(q), q)[0]
    torch.testing.assert_close(torch.func.grad(f)(data["q"]), expected)
    qs = torch.stack([data["q"], 2 * data["q"]])
    mapped = torch.func.vmap(lambda each: qp_solve(data["Q"], each, **rest(data)))(qs)
    torch.testing.assert_close(mapped, qp_solve(data["Q"], qs, **rest(data)))
    each = torch.func.vmap(torch.func.grad(f))(qs)
    torch.testing.assert_close(each, torch.stack([torch.func.grad(f)(q) for q in qs]))

    def of_h(h):
        return qp_solve(data["Q"], data["q"], **{**rest(data), "h": h})

    jacobian = torch.func.jacrev(of_h)
    one_by_one = torch.autograd.functional.jacobian(of_h, data["h"])
    torch.testing.assert_close(jacobian(data["h"]), one_by_one)
    torch.testing.assert_close(torch.func.vmap(jacobian)(data["h"].expand(4, -1)), one_by_one.expand(4, -1, -1))
    with pytest.raises(RuntimeError, match="without a batch of their own"):
        torch.func.vmap(lambda q: qp_solve(torch.stack(3 * [data["Q"]]), q))(torch.stack(3 * [data["q"]]))


def test_the_solution_unpacks_into_three_and_names_four():
    s = PenaltyQPLayer()(**program())
    x, lam, mu = s
    assert isinstance(s, QPSolution)
    assert (x is s.x, lam is s.lam, mu is s.mu) == (True, True, True)
    assert s.z.shape == x.shape
    again = copy.deepcopy(s)
    torch.testing.assert_close(again.z, s.z)


def test_empty_tensors_stand_for_no_constraints_as_in_qpth():
    data, none = program(), torch.tensor([])
    torch.testing.assert_close(qp_solve(data["Q"], data["q"], none, none, none, none), qp_solve(data["Q"], data["q"]))


def test_constraints_without_rows_are_none():
    data = program()
    none = qp_solve(data["Q"], data["q"], data["G"][:0], data["h"][:0], data["A"][:0], data["b"][:0])
    torch.testing.assert_close(none, qp_solve(data["Q"], data["q"]))
    s = PenaltyQPLayer()(
        data["Q"], data["q"].expand(2, -1), data["G"][:0].expand(2, -1, -1), data["h"][:0].expand(2, -1)
    )
    assert s.lam.shape == (2, 0)


def test_an_empty_batch_has_an_empty_result():
    data = program()
    layer = PenaltyQPLayer()
    s = layer(**{**data, "q": data["q"].expand(0, -1).clone().requires_grad_()})
    assert s.x.shape == (0, 8)
    assert s.lam.shape == (0, 6)
    assert layer.last_info == []


def test_what_wraps_modules_goes_on_working():
    data, layer = program(), PenaltyQPLayer()
    seen = []
    handle = layer.register_full_backward_hook(lambda module, grad_in, grad_out: seen.append(grad_out[0].shape))
    q = data["q"].clone().requires_grad_()
    layer(data["Q"], q, **rest(data))[0].sum().backward()
    handle.remove()
    assert seen == [(8,)]
    compiled = torch.compile(lambda q: 2.0 * layer(data["Q"], q, **rest(data)).x, backend="eager")
    torch.testing.assert_close(compiled(data["q"]), 2.0 * layer(**data).x)
    with pytest.raises(ValueError, match="belong together"):
        layer(data["Q"], data["q"], data["G"])
    assert layer.last_info is None


def test_layouts_that_are_not_understood_are_refused():
    blocks = torch.eye(4, dtype=F64).to_sparse_bsr((2, 2))
    hybrid = torch.sparse_coo_tensor(torch.tensor([[0, 1]]), torch.eye(2, dtype=F64), (2, 2))
    for matrix, n in ((blocks, 4), (hybrid, 2)):
        with pytest.raises(TypeError, match="must be COO, CSR or CSC"):
            qp_solve(matrix, torch.ones(n, dtype=F64))


def test_the_layer_has_no_state_and_survives_saving():
    layer = PenaltyQPLayer("piqp", refine=2)
    assert layer.state_dict() == {}
    layer(**program())
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)  # our own file
    torch.testing.assert_close(loaded(**program()).x, layer(**program()).x)
    assert "piqp" in repr(layer)


def test_upstream_gradients_of_any_subset_of_outputs():
    data = program()
    q = data["q"].clone().requires_grad_()
    layer = PenaltyQPLayer()
    parts = [
        torch.autograd.grad(getattr(layer(data["Q"], q, **rest(data)), name).sum(), q)[0]
        for name in ("x", "lam", "mu", "z")
    ]
    s = layer(data["Q"], q, **rest(data))
    whole = torch.autograd.grad(s.x.sum() + s.lam.sum() + s.mu.sum() + s.z.sum(), q)[0]
    torch.testing.assert_close(sum(parts), whole)


def test_a_graph_can_be_walked_twice_and_mixed_with_other_calls():
    data, layer = program(), PenaltyQPLayer()
    q = data["q"].clone().requires_grad_()
    x = layer(data["Q"], q, **rest(data)).x
    first = torch.autograd.grad(x.sum(), q, retain_graph=True)[0]
    layer(**program(seed=5))
    torch.testing.assert_close(torch.autograd.grad(x.sum(), q)[0], first)


# --- warm starts ---------------------------------------------------------------------------------------------------------


def test_a_warm_start_is_for_the_same_matrices_only():
    first, second = program(seed=1), program(seed=2)
    layer = PenaltyQPLayer("osqp", warm_start=True)
    cold = PenaltyQPLayer("osqp")
    layer(**first)
    assert not layer.last_info.warm_started
    layer(**{**first, "q": first["q"] + 0.01})
    assert layer.last_info.warm_started
    other = layer(**second)
    assert not layer.last_info.warm_started
    for mine, theirs in zip(other, cold(**second), strict=True):
        assert torch.equal(mine, theirs)
    layer(**program(9, 6, 2, 2))  # another shape
    assert not layer.last_info.warm_started
    layer(**first)
    layer.reset_warm_start()
    layer(**first)
    assert not layer.last_info.warm_started


def test_a_solver_that_cannot_start_from_a_point_does_not_say_that_it_did():
    layer = PenaltyQPLayer("clarabel", warm_start=True)
    layer(**program())
    layer(**program())
    assert not layer.last_info.warm_started


def test_a_point_to_start_from_changes_the_way_and_not_the_solution():
    data = program(seed=3)
    cold = PenaltyQPLayer("proxqp")(**data)
    layer = PenaltyQPLayer("proxqp")
    warm = layer(**data, start=torch.full((8,), 7.0, dtype=F64))
    assert layer.last_info.warm_started
    torch.testing.assert_close(warm.x, cold.x, atol=1e-10, rtol=0)
    with pytest.raises(ValueError, match=r"start must have shape \(8,\)"):
        layer(**data, start=torch.zeros(3, dtype=F64))


# --- training ------------------------------------------------------------------------------------------------------------


def test_hidden_costs_are_recovered_from_solutions():
    """Projections on the simplex of a linear map of features, whose weights are learnt from the projections."""
    g = torch.Generator().manual_seed(4)
    features, truth = torch.randn(8, 3, generator=g, dtype=F64), torch.randn(3, 5, generator=g, dtype=F64)
    layer, eye, one = PenaltyQPLayer(), torch.eye(5, dtype=F64), torch.ones(1, dtype=F64)
    box = {"A": one.expand(1, 5), "b": one, "lb": torch.zeros(5, dtype=F64)}
    target = layer(eye, -features @ truth, **box).x.detach()
    weights = torch.zeros(3, 5, dtype=F64, requires_grad=True)
    optimizer = torch.optim.Adam([weights], lr=0.2)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = ((layer(eye, -features @ weights, **box).x - target) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.05 * losses[0]
