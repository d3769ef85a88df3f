"""The band's bounds: roots against arbitrary precision, closed forms, limits, the simplex, and random distributions that try to get past them."""

from dataclasses import dataclass

import mpmath
import numpy as np
import pytest
import torch

from cameraready.posttraining.bandpo import BandTable, band_bounds
from cameraready.posttraining.bandpo.divergences import chi2_ratios, kl_ratios, tv_ratios

DELTAS = [1e-12, 1e-6, 1e-3, 0.05, 0.5, 3.0]
#: log p for p from 1e-12 to 1 - 1e-12.
LOG_P = torch.cat(
    [
        torch.linspace(np.log(1e-12), -0.01, 60, dtype=torch.float64),
        torch.log1p(-torch.logspace(-2, -12, 40, dtype=torch.float64)),
        torch.tensor([-0.6931471805599453, -0.693147, -0.6932], dtype=torch.float64),
    ]
)
GENERATORS = {
    "kl": lambda u: -torch.log(u) + u - 1,
    "tv": lambda u: (u - 1).abs() / 2,
    "chi2": lambda u: (u - 1) ** 2,
}


def logs(*p):
    return torch.tensor(p, dtype=torch.float64).log()


def exact_kl_bounds(log_p, delta):
    """Both roots of p (-log r) - q log((1 - r p) / q) = delta with 45 digits, by bisection in the log-odds."""
    with mpmath.workdps(45):
        log_p, delta = mpmath.mpf(log_p), mpmath.mpf(delta)
        p, q = mpmath.exp(log_p), -mpmath.expm1(log_p)

        def root(sign):
            def gap(d):
                new, others = p / (p + q * mpmath.exp(-sign * d)), q / (q + p * mpmath.exp(sign * d))
                return p * mpmath.log(p / new) + q * mpmath.log(q / others) - delta

            low, high = mpmath.mpf(0), mpmath.mpf(1)
            while gap(high) < 0:
                high *= 2
            for _ in range(100):
                middle = (low + high) / 2
                low, high = (middle, high) if gap(middle) < 0 else (low, middle)
            return 1 / (p + q * mpmath.exp(-sign * low))

        return root(-1), root(1)


@pytest.mark.parametrize("delta", DELTAS)
def test_newton_agrees_with_arbitrary_precision_from_1e_12_to_1_less_1e_12(delta):
    some = LOG_P[:: 3 if delta == 0.05 else 12]
    lower, upper = band_bounds(some, delta=delta, max_ratio=None)
    for log_p, low, high in zip(some.tolist(), lower.tolist(), upper.tolist(), strict=True):
        exact_low, exact_high = exact_kl_bounds(log_p, delta)
        assert abs(high / exact_high - 1) < 1e-12
        # Lower bounds of the rarest tokens are below the smallest float64.
        assert abs(low - exact_low) <= 1e-12 * exact_low + 1e-307


def test_the_sheets_reference_values():
    lower, upper = band_bounds(logs(0.01, 0.1, 0.5, 0.9))
    assert lower.tolist() == pytest.approx([0.0024974, 0.312784, 0.691516, 0.866579], rel=2e-5)
    assert upper.tolist() == pytest.approx([7.80985, 2.200786, 1.308484, 1.076357], rel=1e-6)


@pytest.mark.parametrize("divergence", ["kl", "tv", "chi2"])
@pytest.mark.parametrize("delta", [1e-3, 0.05, 0.5])
def test_solvers_agree(divergence, delta):
    newton = band_bounds(LOG_P, divergence=divergence, delta=delta)
    bisect = band_bounds(LOG_P, divergence=divergence, delta=delta, solver="bisect")
    table = band_bounds(LOG_P, divergence=divergence, delta=delta, solver="table")
    given = band_bounds(LOG_P, divergence=GENERATORS[divergence], delta=delta)
    for one, other, looked_up, own in zip(newton, bisect, table, given, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(own, one, rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(looked_up, one, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("divergence", [*GENERATORS, GENERATORS["chi2"]], ids=["kl", "tv", "chi2", "callable"])
def test_the_table_keeps_the_tolerance_it_states(divergence):
    table = BandTable(divergence, 0.05)
    log_p = -torch.rand(20_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64).square() * 80
    exact = band_bounds(log_p, divergence=divergence, max_ratio=None)
    lower, upper = table(log_p)
    assert (lower - exact[0]).abs().max() <= 1.3 * table.tolerance[0] + 1e-12
    assert (upper / exact[1] - 1).abs().max() <= 1.3 * table.tolerance[1] + 1e-12
    if divergence == "kl":
        assert max(table.tolerance) < 1e-5


@pytest.mark.parametrize("delta", [1e-4, 0.05, 1.0])
def test_the_table_of_kl_is_within_1e_5_in_float32(delta):
    log_p = -torch.rand(20_000, generator=torch.Generator().manual_seed(0)).square() * 80
    exact = band_bounds(log_p.double(), delta=delta)
    lower, upper = band_bounds(log_p, delta=delta, solver="table")
    assert lower.dtype == upper.dtype == torch.float32
    assert (lower - exact[0]).abs().max() < 1e-5
    assert (upper / exact[1] - 1).abs().max() < 1e-5


@pytest.mark.parametrize("divergence", ["kl", "tv", "chi2"])
def test_bounds_are_attained_and_nothing_in_the_ball_passes_them(divergence):
    """Among random distributions over a small vocabulary, pushed to the edge of the ball."""
    rng, delta, f = np.random.default_rng(5), 0.05, GENERATORS[divergence]

    def distance(new, old):
        return (old * f(new / old)).sum(-1)

    for p in (0.01, 0.08, 0.5, 0.9, 0.97):
        rest = rng.dirichlet(np.ones(4)) * (1 - p)
        old = torch.tensor([p, *rest], dtype=torch.float64)
        lower, upper = (bound.item() for bound in band_bounds(old[:1].log(), divergence=divergence, max_ratio=None))
        # The extreme distributions rescale all other tokens by one factor, and lie in the ball, on its edge unless on the simplex's.
        for ratio in (lower, upper):
            extreme = torch.cat([old[:1] * ratio, old[1:] * (1 - ratio * p) / (1 - p)]).clamp(min=1e-300)
            spent = distance(extreme, old).item()
            assert spent <= delta * (1 + 1e-9)
            assert spent == pytest.approx(delta, rel=1e-6) or ratio in (0.0, pytest.approx(1 / p, rel=1e-12))
        # Towards random distributions, half of which nearly keep the others' proportions, as far as the ball allows.
        share = rng.beta(0.3, 0.3, size=(4_000, 1))
        others = np.concatenate([rng.dirichlet(a, size=2_000) for a in (np.full(4, 0.3), 200 * rest / (1 - p))])
        goals = torch.tensor(np.hstack([share, (1 - share) * others])).clamp(min=1e-12)
        near, far = torch.zeros(4_000, 1), torch.ones(4_000, 1)
        for _ in range(50):
            middle = (near + far) / 2
            within = distance(old + middle * (goals - old), old)[:, None] <= delta
            near, far = torch.where(within, middle, near), torch.where(within, far, middle)
        ratios = (old + near * (goals - old))[:, 0] / p
        assert lower * (1 - 1e-9) - 1e-12 <= ratios.min()
        assert ratios.max() <= upper * (1 + 1e-9)
        # The ball is really felt: random distributions come near both bounds.
        assert ratios.max() > 1 + 0.8 * (upper - 1)
        assert ratios.min() < 1 - 0.8 * (1 - lower)


def test_the_mirror_identity_of_kl():
    p = torch.tensor([1e-3, 0.02, 0.3, 0.5, 0.77, 0.999], dtype=torch.float64)
    lower, _ = band_bounds(p.log(), max_ratio=None)
    _, mirrored = band_bounds(torch.log1p(-p), max_ratio=None)
    torch.testing.assert_close(lower, (1 - (1 - p) * mirrored) / p, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(("divergence", "constant"), [("kl", 2**0.5), ("chi2", 1.0)])
def test_small_balls_are_ellipses(divergence, constant):
    p, delta = torch.tensor([0.02, 0.3, 0.9], dtype=torch.float64), 1e-10
    lower, upper = band_bounds(p.log(), divergence=divergence, delta=delta)
    reach = constant * torch.sqrt(delta * (1 - p) / p)
    torch.testing.assert_close(upper - 1, reach, rtol=2e-4, atol=0)
    torch.testing.assert_close(1 - lower, reach, rtol=2e-4, atol=0)


def test_total_variation_moves_probability_by_delta():
    lower, upper = band_bounds(logs(0.03, 0.2, 0.5, 0.97), divergence="tv", max_ratio=None)
    assert (upper * logs(0.03, 0.2, 0.5, 0.97).exp()).tolist() == pytest.approx([0.08, 0.25, 0.55, 1.0])
    assert lower.tolist() == pytest.approx([0.0, 0.75, 0.9, 1 - 0.05 / 0.97])


@pytest.mark.parametrize(
    ("divergence", "up", "down"), [("tv", 0.95, 0.05), ("chi2", 1 / 1.05, 0.05 / 1.05)], ids=["tv", "chi2"]
)
def test_where_bounds_reach_the_edge_of_the_simplex(divergence, up, down):
    p = torch.tensor([down * 0.99, down * 1.01, up * 0.999, up * 1.001], dtype=torch.float64)
    for solver in ("newton", "bisect"):
        lower, upper = band_bounds(p.log(), divergence=divergence, max_ratio=None, solver=solver)
        assert lower[0] == 0
        assert lower[1] > 0
        assert upper[2] < 1 / p[2] * (1 - 1e-9)
        assert upper[3].item() == pytest.approx(1 / p[3].item(), rel=1e-12)


@pytest.mark.parametrize("divergence", ["kl", "tv", "chi2", GENERATORS["kl"]], ids=["kl", "tv", "chi2", "callable"])
def test_order_monotony_and_the_simplex(divergence):
    p = torch.linspace(0.001, 0.999, 400, dtype=torch.float64)
    before = None
    for delta in (0.01, 0.05, 0.2):
        lower, upper = band_bounds(p.log(), divergence=divergence, delta=delta, max_ratio=None)
        assert bool(((lower >= 0) & (lower <= 1) & (upper >= 1)).all())
        assert bool((p * upper <= 1 + 1e-12).all())
        assert bool((upper.diff() <= 1e-9).all())  # the likelier, the tighter
        assert bool((lower.diff() >= -1e-9).all())
        if before is not None:
            assert bool((upper >= before[1] - 1e-12).all())
            assert bool((lower <= before[0] + 1e-12).all())
        before = lower, upper


@pytest.mark.parametrize("solver", ["newton", "bisect", "table"])
def test_certain_and_impossible_tokens(solver):
    ends = torch.tensor([0.0, 5e-4, -float("inf"), -1e4], dtype=torch.float64)
    for divergence, at_one in (("kl", np.exp(-0.05)), ("tv", 0.95), ("chi2", 1.0)):
        lower, upper = band_bounds(ends, divergence=divergence, solver=solver)
        assert lower.tolist() == pytest.approx([at_one, at_one, 0, 0], abs=1e-6)
        assert upper.tolist() == pytest.approx([1, 1, 10, 10], abs=1e-6)


def test_what_the_cap_and_the_relaxation_do():
    log_p = logs(0.001, 0.02, 0.3, 0.95)
    lower, upper = band_bounds(log_p, max_ratio=None)
    capped = band_bounds(log_p, max_ratio=3.0)
    assert capped[1].tolist() == pytest.approx(upper.clamp(max=3).tolist())
    assert upper[0] > 10
    torch.testing.assert_close(capped[0], lower)
    wide = band_bounds(log_p, relax=(0.2, 0.28))
    assert wide[0].tolist() == pytest.approx(lower.clamp(max=0.8).tolist())
    assert wide[1].tolist() == pytest.approx(upper.clamp(1.28, 10).tolist())


def test_a_ball_of_radius_zero_lets_nothing_move():
    for solver in ("newton", "bisect", "table"):
        lower, upper = band_bounds(logs(0.1, 0.5, 1.0), delta=0, solver=solver)
        assert lower.tolist() == upper.tolist() == [1, 1, 1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_dtypes_and_shapes(dtype):
    log_p = torch.tensor([[-0.25, -2.0], [-5.0, -0.0078125]]).to(dtype)  # exact in all of them
    exact = band_bounds(log_p.double())
    for solver in ("newton", "table"):
        for bound, truth in zip(band_bounds(log_p, solver=solver), exact, strict=True):
            assert bound.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
            assert bound.shape == (2, 2)
            torch.testing.assert_close(bound.double(), truth, rtol=1e-5, atol=1e-5)
    assert band_bounds(log_p[:0])[0].shape == (0, 2)


def test_no_gradient_flows_through_bounds():
    log_p = logs(0.1, 0.5).requires_grad_()
    for solver in ("newton", "table"):
        assert not any(bound.requires_grad for bound in band_bounds(log_p, solver=solver))


@pytest.mark.parametrize(
    ("f", "message"),
    [
        (lambda u: u**2, r"f\(1\) = 0"),
        (lambda u: torch.sin(u - 1), "not convex"),
        (lambda u: -((u - 1) ** 2), "not convex"),
        (lambda u: 3 * (u - 1), "straight line"),
        (lambda u: torch.log(u - 2), "not finite"),
        (lambda u: u.sum(), "element by element"),
        (lambda u: (u - 1) ** 2 / u.max(), "not elementwise"),
        (lambda u: torch.where(u < 1e-6, torch.nan, (u - 1) ** 2), "NaN"),
    ],
)
def test_functions_that_are_no_divergence_are_refused(f, message):
    with pytest.raises(ValueError, match=message):
        band_bounds(logs(0.5), divergence=f)


def test_a_divergence_of_the_users_may_be_infinite_at_zero_or_have_another_slope_at_one():
    log_p = logs(0.003, 0.2, 0.8)
    reverse_kl = band_bounds(log_p, divergence=lambda u: u * torch.log(u), delta=0.1, max_ratio=None)
    shifted = band_bounds(log_p, divergence=lambda u: u * torch.log(u) + 7 * (1 - u), delta=0.1, max_ratio=None)
    for one, other in zip(reverse_kl, shifted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    p, new = log_p.exp(), log_p.exp() * reverse_kl[1]
    spent = new * torch.log(new / p) + (1 - new) * torch.log((1 - new) / (1 - p))
    torch.testing.assert_close(spent, torch.full_like(spent, 0.1), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"delta": -0.1}, ValueError, "delta"),
        ({"delta": float("nan")}, ValueError, "delta"),
        ({"delta": True}, ValueError, "delta"),
        ({"max_ratio": 0.5}, ValueError, "max_ratio"),
        ({"divergence": "js"}, ValueError, "'kl', 'tv', 'chi2'"),
        ({"solver": "secant"}, ValueError, "solver"),
        ({"relax": (0.2, -1.0)}, ValueError, "relax"),
        ({"relax": 0.2}, ValueError, "relax"),
        ({"max_ratio": "10"}, ValueError, "max_ratio"),
        ({"delta": 10**400}, ValueError, "delta"),
        ({"divergence": ["kl"]}, ValueError, "'kl', 'tv', 'chi2'"),
        ({"old_logps": torch.tensor([0.5, -1.0])}, ValueError, "were probabilities or logits passed"),
        ({"old_logps": torch.tensor([float("nan")])}, ValueError, "NaN"),
        ({"old_logps": torch.tensor([1, 2])}, TypeError, "floating-point"),
        ({"old_logps": [-1.0]}, TypeError, "floating-point"),
    ],
)
def test_mistakes_are_told(arguments, error, message):
    with pytest.raises(error, match=message):
        band_bounds(**{"old_logps": torch.tensor([-1.0]), **arguments})


def test_divergences_with_a_parameter_need_no_hash_and_are_told_apart():
    @dataclass
    class Alpha:
        a: float

        def __call__(self, u):
            return (u**self.a - 1 - self.a * (u - 1)) / (self.a * (self.a - 1))

    one, other = Alpha(2.0), Alpha(1.5)
    for solver in ("newton", "table"):
        a, b = (band_bounds(logs(0.1), divergence=each, solver=solver)[1].item() for each in (one, other))
        # a = 2 is half of chi-square.
        assert a == pytest.approx(band_bounds(logs(0.1), divergence="chi2", delta=0.1)[1].item(), rel=1e-5)
        assert b > a * 1.01


def test_small_steps_of_the_named_solvers_are_the_closed_forms():
    log_p = logs(0.05, 0.4)
    p = log_p.exp()
    torch.testing.assert_close(chi2_ratios(log_p, 0.01)[1], 1 + torch.sqrt(0.01 * (1 - p) / p))
    torch.testing.assert_close(tv_ratios(log_p, 0.01)[1], 1 + 0.01 / p)
    lower, upper = kl_ratios(log_p, 0.01)
    for ratio in (lower, upper):
        spent = -p * ratio.log() - (1 - p) * torch.log((1 - ratio * p) / (1 - p))
        torch.testing.assert_close(spent, torch.full_like(p, 0.01), rtol=1e-9, atol=0)
