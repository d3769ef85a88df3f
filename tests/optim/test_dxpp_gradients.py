"""The layer's gradients against finite differences, the KKT system, closed forms and limits."""

import itertools
import warnings

import numpy as np
import pytest
import torch

from cameraready.optim.dxpp import InaccurateQPWarning, PenaltyQPLayer, WeaklyActiveWarning, qp_solve

pytestmark = pytest.mark.torch
F64 = torch.float64
NAMES = ("Q", "q", "G", "h", "A", "b", "lb", "ub")


def program(n=8, m=6, p=2, seed=0):
    """Random and regular: some rows and bounds of either side active, none weakly."""
    g = torch.Generator().manual_seed(seed)
    root = torch.randn(n, n, generator=g, dtype=F64)
    Q = root @ root.T / n + 0.3 * torch.eye(n, dtype=F64)
    q, G, A = (torch.randn(*shape, generator=g, dtype=F64) for shape in ((n,), (m, n), (p, n)))
    inside = 0.1 * torch.randn(n, generator=g, dtype=F64)
    h = G @ inside + 0.2 * torch.rand(m, generator=g, dtype=F64)
    lb, ub = (
        inside - 0.4 * torch.rand(n, generator=g, dtype=F64) - 0.01,
        inside + 0.4 * torch.rand(n, generator=g, dtype=F64) + 0.01,
    )
    lb[0], ub[1] = -torch.inf, torch.inf
    return {"Q": Q, "q": q, "G": G, "h": h, "A": A, "b": A @ inside, "lb": lb, "ub": ub}


def loss_of(layer, data, weights, through="all"):
    s = layer(**data)
    parts = {"x": s.x, "lam": s.lam, "mu": s.mu, "z": s.z}
    return sum((weights[name] * part).sum() for name, part in parts.items() if through in (name, "all"))


def weights_for(n, m, p):
    g = torch.Generator().manual_seed(9)
    return {
        name: torch.randn(size, generator=g, dtype=F64) for name, size in (("x", n), ("lam", m), ("mu", p), ("z", n))
    }


def gradients(data, weights, through="all", **options):
    inputs = {name: value.clone().requires_grad_() for name, value in data.items()}
    layer = PenaltyQPLayer(**options)
    loss = loss_of(layer, inputs, weights, through)
    found = torch.autograd.grad(loss, list(inputs.values()), allow_unused=True)
    return dict(zip(inputs, found, strict=True)), layer


def relative(a, b):
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-12))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_gradients_of_every_input_through_every_output_agree_with_finite_differences(seed):
    data, weights, step = program(seed=seed), weights_for(8, 6, 2), 1e-5
    layer, through = PenaltyQPLayer(), ("x", "lam", "mu", "z")
    analytic = {name: gradients(data, weights, name)[0] for name in through}
    places = np.random.default_rng(seed)
    for name, value in data.items():
        if name in ("lb", "ub"):
            hidden = ~torch.isfinite(value)
            assert all((analytic[each][name][hidden] == 0.0).all() for each in through)
        every = [place for place in np.ndindex(*value.shape) if torch.isfinite(value[place])]
        for place in places.permutation(every)[:7]:
            where = tuple(int(each) for each in place)
            moved = []
            for sign in (1.0, -1.0):
                other = {key: each.clone() for key, each in data.items()}
                other[name][where] += sign * step
                if name == "Q":
                    other[name] = (other[name] + other[name].T) / 2
                s = layer(**other)
                moved.append({each: float((weights[each] * getattr(s, each)).sum()) for each in through})
            assert layer.last_info.n_active >= 3
            assert layer.last_info.n_weak == 0
            for each in through:
                difference = (moved[0][each] - moved[1][each]) / (2 * step)
                assert float(analytic[each][name][where]) == pytest.approx(difference, rel=1e-5, abs=1e-6), (
                    name,
                    where,
                    each,
                )


@pytest.mark.parametrize("backward", ["direct", "iterative"])
@pytest.mark.parametrize("seed", range(6))
def test_the_penalised_hessian_gives_the_sensitivity_of_the_kkt_system(seed, backward):
    data, weights = program(20, 12, 4, seed), weights_for(20, 12, 4)
    exact, _ = gradients(data, weights, backward="kkt")
    found, layer = gradients(data, weights, backward=backward)
    assert layer.last_info.gradient_residual < 1e-9
    for name in NAMES:
        assert relative(found[name], exact[name]) < 1e-8, name


def test_without_refinement_the_error_falls_in_proportion_to_beta():
    """The paper's formula; through x and through the duals."""
    data, weights = program(20, 12, 4, 3), weights_for(20, 12, 4)
    exact, _ = gradients(data, weights, backward="kkt")
    errors = []
    for beta in (1e-3, 1e-4, 1e-5):
        found, layer = gradients(data, weights, beta=beta, refine=0)
        assert layer.last_info.gradient_residual == float("inf")
        errors.append(max(relative(found[name], exact[name]) for name in NAMES))
    assert errors[2] > 1e-9
    for larger, smaller in itertools.pairwise(errors):
        assert 5.0 < larger / smaller < 20.0


def test_the_projection_on_the_simplex_has_the_centring_matrix_of_its_support_as_its_derivative():
    g = torch.Generator().manual_seed(0)
    point = torch.randn(30, generator=g, dtype=F64)
    one = torch.ones(1, dtype=F64)

    def project(y):
        return qp_solve(
            torch.eye(30, dtype=F64), -y, A=torch.ones(1, 30, dtype=F64), b=one, lb=torch.zeros(30, dtype=F64)
        )

    jacobian = torch.autograd.functional.jacobian(project, point)
    support = (project(point) > 1e-9).to(F64)
    expected = torch.diag(support) - torch.outer(support, support) / support.sum()
    torch.testing.assert_close(jacobian, expected, atol=1e-12, rtol=0)


def test_an_unconstrained_program_is_a_linear_solve():
    data = program()
    q = data["q"].clone().requires_grad_()
    x = qp_solve(data["Q"], q)
    torch.testing.assert_close(x, -torch.linalg.solve(data["Q"], q))
    (slope,) = torch.autograd.grad(x.sum(), q)
    torch.testing.assert_close(slope, -torch.linalg.solve(data["Q"], torch.ones(8, dtype=F64)))


def test_at_a_vertex_of_a_linear_program_x_follows_the_constraints_and_not_the_costs():
    G = torch.tensor([[1.0, 2.0], [3.0, 1.0], [-1.0, 0.0], [0.0, -1.0]], dtype=F64)
    h = torch.tensor([4.0, 6.0, 0.0, 0.0], dtype=F64, requires_grad=True)
    q = torch.tensor([-1.0, -1.0], dtype=F64, requires_grad=True)
    x = qp_solve(torch.zeros(2, 2, dtype=F64), q, G, h)
    torch.testing.assert_close(x, torch.linalg.solve(G[:2], h[:2]))
    slope_q, slope_h = torch.autograd.grad(x[0], (q, h))
    torch.testing.assert_close(slope_q, torch.zeros(2, dtype=F64), atol=1e-9, rtol=0)
    torch.testing.assert_close(slope_h, torch.cat([torch.linalg.inv(G[:2])[0], torch.zeros(2, dtype=F64)]))


@pytest.mark.parametrize(("objective", "rows"), [(1e6, 1.0), (1e-6, 1.0), (1.0, 1e3), (1e-4, 1e4)])
@pytest.mark.parametrize("refine", [0, 8])
def test_units_of_objective_and_rows_do_not_matter(objective, rows, refine):
    data, weights = program(12, 8, 3, 4), weights_for(12, 8, 3)
    scaled = {**data, "Q": objective * data["Q"], "q": objective * data["q"]}
    factor = torch.where(torch.arange(8) % 2 == 0, rows, 1.0).to(F64)
    scaled |= {"G": factor[:, None] * data["G"], "h": factor * data["h"], "A": rows * data["A"], "b": rows * data["b"]}
    plain, _ = gradients(data, weights, "x", refine=refine)
    found, _ = gradients(scaled, weights, "x", refine=refine)
    assert relative(objective * found["q"], plain["q"]) < 1e-5
    assert relative(objective * found["Q"], plain["Q"]) < 1e-5
    assert relative(factor * found["h"], plain["h"]) < 1e-5
    assert relative(rows * found["A"], plain["A"]) < 1e-5


@pytest.mark.parametrize("unit", [1e-5, 1e5])
def test_units_of_the_variables_do_not_matter_either(unit):
    data, weights = program(12, 8, 3, 4), weights_for(12, 8, 3)
    scaled = {**data, "q": data["q"] / unit, "Q": data["Q"] / unit**2}
    scaled |= {name: data[name] / unit for name in ("G", "A")} | {name: data[name] * unit for name in ("lb", "ub")}
    plain, _ = gradients(data, weights, "x")
    found, layer = gradients(scaled, weights, "x")
    assert layer.last_info.polished
    assert relative(found["q"] / unit, unit * plain["q"]) < 1e-6


@pytest.mark.parametrize("seed", range(4))
def test_units_of_single_variables_do_not_matter(seed):
    data, weights = program(8, 6, 2, seed), weights_for(8, 6, 2)
    unit = 10.0 ** torch.empty(8, dtype=F64).uniform_(-4, 4, generator=torch.Generator().manual_seed(seed))
    scaled = {"Q": data["Q"] / unit[:, None] / unit, "q": data["q"] / unit}
    scaled |= {name: data[name] / unit for name in ("G", "A")} | {name: data[name] for name in ("h", "b")}
    scaled |= {name: data[name] * unit for name in ("lb", "ub")}
    plain, _ = gradients(data, weights)
    weights = {**weights, "x": weights["x"] / unit, "z": weights["z"] * unit}
    found, layer = gradients(scaled, weights)
    assert layer.last_info.polished
    for name, factor in (
        ("q", 1 / unit),
        ("h", 1.0),
        ("b", 1.0),
        ("lb", unit),
        ("ub", unit),
        ("Q", 1 / unit[:, None] / unit),
    ):
        assert relative(found[name] * factor, plain[name]) < 1e-6, name


def test_bounds_far_away_change_nothing():
    data, weights = program(8, 6, 2, 3), weights_for(8, 6, 2)
    data["ub"] = torch.full((8,), torch.inf, dtype=F64)
    plain, _ = gradients(data, weights)
    for far in (1e4, 1e8, 1e10, 1e12, 1e16, 1e20, 1e30):
        rows = {
            **data,
            "G": torch.cat([data["G"], torch.eye(8, dtype=F64)]),
            "h": torch.cat([data["h"], torch.full((8,), min(far, 1e16), dtype=F64)]),
        }
        found, _ = gradients({**data, "ub": torch.full((8,), far, dtype=F64)}, weights)
        by_rows, _ = gradients(rows, {**weights, "lam": torch.cat([weights["lam"], torch.zeros(8, dtype=F64)])})
        for name in ("Q", "q", "b", "lb"):
            assert relative(found[name], plain[name]) < 1e-8, (far, name)
            assert relative(by_rows[name], plain[name]) < 1e-8, (far, name)


def test_a_small_variable_beside_a_large_one_keeps_its_derivative():
    q = torch.tensor([-1e6, -1e-5], dtype=F64, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x = qp_solve(torch.eye(2, dtype=F64), q, lb=torch.zeros(2, dtype=F64))
    torch.testing.assert_close(torch.autograd.grad(x[1], q)[0], torch.tensor([0.0, -1.0], dtype=F64))
    costs = torch.tensor([1e10, -1.0, 0.5], dtype=F64)
    layer = PenaltyQPLayer(weak="raise")
    torch.testing.assert_close(
        layer(torch.eye(3, dtype=F64), costs, lb=torch.zeros(3, dtype=F64)).x, torch.tensor([0.0, 1.0, 0.0], dtype=F64)
    )


def test_a_tiny_multiplier_is_as_good_as_a_large_one():
    """x is held at 1 - 1e-8 by a multiplier of 1e-8: its derivative is that of the bound, 1."""
    for value in (1e-3, 1e-6, 1e-8):
        h = torch.tensor([1.0 - value], dtype=F64, requires_grad=True)
        one = torch.ones(1, 1, dtype=F64)
        s = PenaltyQPLayer()(one, -torch.ones(1, dtype=F64), one, h)
        assert s.lam.item() == pytest.approx(value, rel=1e-5)
        assert float(torch.autograd.grad(s.x, h)[0]) == pytest.approx(1.0, abs=1e-9)


def test_a_slack_left_by_the_solver_does_not_thin_the_weights():
    """The official weight decays like exp(-slack / beta): without a polished point its gradient is off by a factor here."""
    data, weights = program(20, 12, 4, 5), weights_for(20, 12, 4)
    exact, _ = gradients(data, weights, "x", backward="kkt")
    loose = {"tol_gap_abs": 1e-5, "tol_gap_rel": 1e-5, "tol_feas": 1e-5, "max_iter": 50}
    for polish in (True, False):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", InaccurateQPWarning)
            found, layer = gradients(data, weights, "x", polish=polish, solver_options=loose)
        assert layer.last_info.polished == polish
        assert relative(found["q"], exact["q"]) < (1e-9 if polish else 1e-3)
        if not polish:
            assert layer.last_info.slack_over_beta > 0.1


def touching(shift=0.0):
    """min (x - 1)^2 / 2 with x <= 1 + shift: slack and multiplier are both zero at shift = 0."""
    one = torch.ones(1, 1, dtype=F64)
    q = -torch.ones(1, dtype=F64, requires_grad=True)
    h = torch.full((1,), 1.0 + shift, dtype=F64, requires_grad=True)
    return one, q, one, h


@pytest.mark.parametrize(("weak", "slope_q", "slope_h"), [("active", 0.0, 1.0), ("inactive", -1.0, 0.0)])
@pytest.mark.parametrize("solver", ["clarabel", "proxqp", "osqp", "piqp"])
def test_weakly_active_constraints_follow_the_policy_with_a_warning(weak, slope_q, slope_h, solver):
    Q, q, G, h = touching()
    with pytest.warns(WeaklyActiveWarning, match=f"taken as {weak}"):
        x = qp_solve(Q, q, G, h, weak=weak, solver=solver)
    found = torch.autograd.grad(x.sum(), (q, h))
    assert float(found[0]) == pytest.approx(slope_q, abs=1e-6)
    assert float(found[1]) == pytest.approx(slope_h, abs=1e-6)


@pytest.mark.parametrize("shift", [-1e-4, 1e-4])
def test_the_policy_takes_one_of_the_two_one_sided_derivatives(shift):
    Q, q, G, h = touching(shift)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x = qp_solve(Q, q, G, h)
    slope_q, slope_h = torch.autograd.grad(x.sum(), (q, h))
    expected = (0.0, 1.0) if shift < 0 else (-1.0, 0.0)
    assert (float(slope_q), float(slope_h)) == pytest.approx(expected, abs=1e-9)


def test_repeated_constraints_leave_the_gradient_as_it_is():
    """The KKT matrix is singular then; the penalised Hessian is not."""
    data, weights = program(12, 8, 3, 6), weights_for(12, 8, 3)
    plain, _ = gradients(data, weights, "x")
    twice = {
        **data,
        "G": data["G"].repeat(2, 1),
        "h": data["h"].repeat(2),
        "A": data["A"].repeat(2, 1),
        "b": data["b"].repeat(2),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WeaklyActiveWarning)
        found, layer = gradients(twice, {"x": weights["x"]}, "x")
    assert layer.last_info.gradient_residual < 1e-9
    for name in ("Q", "q"):
        assert relative(found[name], plain[name]) < 1e-7
    # Copies share the multiplier: moved together they move x as the one row did.
    assert relative(found["h"].view(2, -1).sum(0), plain["h"]) < 1e-7
    assert relative(found["b"].view(2, -1).sum(0), plain["b"]) < 1e-7
    with pytest.warns(InaccurateQPWarning, match="singular"):
        least, _ = gradients(twice, {"x": weights["x"]}, "x", backward="kkt")
    assert relative(least["q"], plain["q"]) < 1e-6


def test_bounds_are_the_same_as_rows():
    data, weights = program(10, 5, 2, 7), weights_for(10, 5, 2)
    boxed, _ = gradients(data, weights, "x")
    eye = torch.eye(10, dtype=F64)
    low, high = torch.isfinite(data["lb"]), torch.isfinite(data["ub"])
    rows = {name: data[name] for name in ("Q", "q", "A", "b")}
    rows["G"] = torch.cat([data["G"], eye[high], -eye[low]])
    rows["h"] = torch.cat([data["h"], data["ub"][high], -data["lb"][low]])
    by_rows, _ = gradients(rows, weights, "x")
    for name in ("Q", "q", "A", "b"):
        assert relative(boxed[name], by_rows[name]) < 1e-8
    upper, lower = by_rows["h"][5 : 5 + int(high.sum())], by_rows["h"][5 + int(high.sum()) :]
    torch.testing.assert_close(boxed["ub"][high], upper, atol=1e-9, rtol=1e-7)
    torch.testing.assert_close(boxed["lb"][low], -lower, atol=1e-9, rtol=1e-7)


def test_equal_bounds_fix_a_variable_and_share_its_derivative():
    data = program(8, 4, 1, 8)
    data["lb"][3] = data["ub"][3] = 0.05
    lb, ub = (data[name].clone().requires_grad_() for name in ("lb", "ub"))
    x = qp_solve(**{**data, "lb": lb, "ub": ub})
    assert float(x[3].detach()) == 0.05
    low, high = torch.autograd.grad(x[3], (lb, ub))
    assert float(low[3] + high[3]) == pytest.approx(1.0)


def test_gradcheck_and_a_second_derivative_is_refused():
    data = program(5, 4, 1, 9)
    free = ("q", "G", "h", "A", "b")
    inputs = [data[name].clone().requires_grad_() for name in free]
    layer = PenaltyQPLayer()

    def f(*values):
        s = layer(data["Q"], **dict(zip(free, values, strict=True)))
        return s.x, s.lam, s.mu

    assert torch.autograd.gradcheck(f, inputs, eps=1e-6, atol=1e-6)
    (slope,) = torch.autograd.grad((f(*inputs)[0] ** 2).sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated once only"):
        torch.autograd.grad(slope.sum(), inputs[0])


def test_a_second_derivative_of_a_loss_that_is_linear_in_x_is_refused_too():
    def loss(s):
        return qp_solve(torch.diag(s), torch.tensor([-1.0, -2.0], dtype=F64)).sum() + (s**3).sum()

    with pytest.raises(RuntimeError, match="differentiated once only"):
        torch.autograd.functional.hessian(loss, torch.tensor([2.0, 3.0], dtype=F64))
