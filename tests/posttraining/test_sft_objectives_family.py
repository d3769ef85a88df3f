"""The objectives as functions of a probability: limits, gradients, weights and their peaks, against formulas and autograd in float64."""

import math

import numpy as np
import pytest
import torch

from cameraready.posttraining.sft_objectives import ProbabilityObjective

pytestmark = pytest.mark.torch

MEMBERS = [
    ProbabilityObjective("nll"),
    *(ProbabilityObjective(alpha=alpha) for alpha in (0.0, 0.1, 0.5, 1.0, 3.0, 10.0)),
    ProbabilityObjective("dft"),
    ProbabilityObjective("gce", alpha=0.7),
    *(ProbabilityObjective("focal", gamma=gamma) for gamma in (0.5, 1.0, 2.0, 5.0)),
    *(ProbabilityObjective("mixture", nll_share=share) for share in (0.0, 0.2, 0.5, 1.0)),
]
every_member = pytest.mark.parametrize("objective", MEMBERS, ids=lambda o: f"{o.name}-{o.settings}")


def grid():
    return torch.cat([torch.logspace(-12, -2, 30, dtype=torch.float64), torch.linspace(0.02, 1.0, 50).double()])


def test_family_is_its_formula_in_exact_arithmetic():
    import mpmath

    with mpmath.workdps(60):
        for alpha in (1e-5, 0.1, 1.0, 3.0, 10.0):
            for p in (1e-12, 0.01, 0.5, 1 - 1e-9):
                exact = float((1 - mpmath.mpf(p) ** mpmath.mpf(alpha)) / mpmath.mpf(alpha))
                logp = torch.tensor(float(mpmath.log(mpmath.mpf(p))), dtype=torch.float64)
                assert float(ProbabilityObjective(alpha=alpha).value(logp)) == pytest.approx(exact, rel=1e-12)


def test_small_alpha_tends_to_the_log_likelihood_without_a_jump():
    logps = grid().log()
    for alpha in (1e-3, 1e-5, 2e-6, 1e-6, 1e-7, 0.0):
        gap = (ProbabilityObjective(alpha=alpha).value(logps) + logps).abs()
        # (1 - p^a) / a = l - a l^2 / 2 + ..., l = -log p
        assert (gap <= 0.51 * alpha * logps**2 + 1e-9 * logps.abs() + 1e-15).all()


def test_alpha_one_is_one_minus_p():
    p = grid()
    torch.testing.assert_close(ProbabilityObjective(alpha=1.0).value(p.log()), 1 - p, rtol=1e-12, atol=1e-15)


def test_generalized_cross_entropy_is_that_of_zhang_and_sabuncu():
    p = grid().numpy()
    for q in (0.3, 0.7, 1.0):
        found = ProbabilityObjective("gce", alpha=q).value(torch.from_numpy(np.log(p))).numpy()
        np.testing.assert_allclose(found, (1 - p**q) / q, rtol=1e-9, atol=1e-14)


def test_convex_up_to_alpha_one_and_concave_beyond():
    """Second differences of f over an even grid of p, as the paper's classes are defined."""
    logps = torch.linspace(0.01, 1.0, 200, dtype=torch.float64).log()
    for alpha in (0.0, 0.1, 0.5):
        assert (ProbabilityObjective(alpha=alpha).value(logps).diff().diff() > 0).all()
    for alpha in (3.0, 10.0):  # up to rounding, where p^10 is lost in 1
        assert (ProbabilityObjective(alpha=alpha).value(logps).diff().diff()[20:] < 0).all()


@every_member
def test_gradient_is_the_weight_times_the_softmax_direction(objective):
    """dL/dz_y = -W_f(p) and dL/dz_j = W_f(p) pi_j / (1 - p), by autograd in float64."""
    generator = torch.Generator().manual_seed(3)
    logits = (4 * torch.randn(40, 2, 7, dtype=torch.float64, generator=generator)).requires_grad_()
    labels = torch.randint(0, 7, (40, 2), generator=generator)
    objective.loss(logits, labels, reduction="sum").backward()
    pi = logits.detach()[:, 0].softmax(-1)
    y = labels[:, 1]
    p = pi.gather(-1, y[:, None])
    expected = objective.gradient_weight(p) * pi / (1 - p)
    expected.scatter_(-1, y[:, None], -objective.gradient_weight(p))
    torch.testing.assert_close(logits.grad[:, 0], expected, rtol=1e-9, atol=1e-12)
    assert torch.equal(logits.grad[:, 1], torch.zeros_like(logits.grad[:, 1]))


@every_member
def test_weight_peaks_where_it_is_said_to(objective):
    p = torch.linspace(1e-9, 1 - 1e-9, 400_001, dtype=torch.float64)
    weights = objective.gradient_weight(p)
    assert objective.peak == pytest.approx(float(p[weights.argmax()]), abs=5e-6)


def test_slopes_of_unlikely_tokens_are_exact_in_single_precision():
    """-p^alpha at each p, to rounding: that of torch.expm1 is lost below 1e-7."""
    p = torch.logspace(-30, -0.01, 200, dtype=torch.float64)
    for alpha in (0.1, 1.0, 3.0):
        for objective in (ProbabilityObjective(alpha=alpha), ProbabilityObjective("mixture", nll_share=0.0)):
            logps = p.log().float().requires_grad_()
            objective.value(logps).sum().backward()
            exact = -(logps.detach().double() * objective.settings.get("alpha", 1.0)).exp()
            there = exact.abs() > 1e-37  # what float32 can hold
            torch.testing.assert_close(logps.grad.double()[there], exact[there], rtol=1e-5, atol=0)


def test_convex_members_peak_in_the_lower_half_and_concave_ones_in_the_upper():
    """Proposition 3.2."""
    for alpha in (0.0, 0.1, 0.5, 1.0, 3.0, 10.0):
        peak = ProbabilityObjective(alpha=alpha).peak
        assert peak == pytest.approx(alpha / (1 + alpha))
        assert (peak <= 0.5) == (alpha <= 1)


def test_dynamic_fine_tuning_has_the_gradient_of_one_minus_p_and_another_value():
    logits = torch.randn(6, 5, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(0, 9, (6, 5), generator=torch.Generator().manual_seed(1))
    found = []
    for objective in (ProbabilityObjective("dft"), ProbabilityObjective(alpha=1.0)):
        given = logits.clone().requires_grad_()
        loss = objective.loss(given, labels)
        loss.backward()
        found.append((loss.detach(), given.grad))
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-12, atol=1e-14)
    assert abs(found[0][0] - found[1][0]) > 0.1


def test_values_of_members_at_one_half():
    half = torch.tensor(math.log(0.5), dtype=torch.float64)
    expected = {
        ("nll", ()): math.log(2),
        ("dft", ()): math.log(2) / 2,
        ("focal", (("gamma", 2.0),)): math.log(2) / 4,
        ("mixture", (("nll_share", 0.25),)): 0.25 * math.log(2) + 0.75 * 0.5,
    }
    for (name, settings), value in expected.items():
        assert float(ProbabilityObjective(name, **dict(settings)).value(half)) == pytest.approx(value)


@every_member
def test_impossible_and_certain_tokens_have_finite_gradients(objective):
    logps = torch.tensor([-math.inf, -200.0, -1e-30, 0.0], dtype=torch.float64, requires_grad=True)
    value = objective.value(logps)
    value.sum().backward()
    assert torch.isfinite(logps.grad).all()
    assert not value.isnan().any()
    assert float(value.detach()[3]) == 0
    holds_nll = (
        objective.name in ("nll", "focal")
        or objective.settings.get("alpha") == 0
        or objective.settings.get("nll_share")
    )
    assert math.isinf(value.detach()[0]) == bool(holds_nll)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"name": "alpah"}, "there is no objective 'alpah'"),
        ({"alpha": -1.0}, "alpha must be a number of at least 0"),
        ({"alpha": math.nan}, "alpha must be a number of at least 0"),
        ({"alpha": math.inf}, "alpha must be a number of at least 0"),
        ({"alpha": "1"}, "alpha must be a number of at least 0"),
        ({"alpha": True}, "alpha must be a number of at least 0"),
        ({"name": "gce", "alpha": 1.5}, "0 < alpha <= 1"),
        ({"name": "gce", "alpha": 0.0}, "0 < alpha <= 1"),
        ({"name": "focal", "alpha": 1.0}, "has no setting 'alpha'; it takes gamma"),
        ({"name": "nll", "alpha": 1.0}, "takes no settings"),
        ({"name": "focal", "gamma": -2.0}, "gamma must be"),
        ({"name": "mixture", "nll_share": 1.1}, "nll_share must be from 0"),
        ({"name": "label_smoothing", "smoothing": 2.0}, "smoothing must be from 0 to 1"),
        ({"threshold": 1.0}, "side='top' must be from 0 to below 1"),
        ({"threshold": -0.1}, "side='top' must be from 0 to below 1"),
        ({"threshold": 0.0, "side": "bottom"}, "side='bottom' must be above 0"),
        ({"threshold": math.nan}, "must be from 0 to below 1"),
        ({"side": "left"}, "side must be"),
        ({"normalize": "tokens"}, "normalize must be"),
    ],
)
def test_wrong_arguments_are_told_apart(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        ProbabilityObjective(**arguments)


def test_numbers_of_numpy_and_torch_are_numbers():
    for one in (np.float32(1.0), np.int64(1), torch.tensor(1.0), 1):
        assert ProbabilityObjective(alpha=one) == ProbabilityObjective(alpha=1.0)
    assert ProbabilityObjective(threshold=np.float64(0.25)).threshold == 0.25


def test_an_objective_can_be_read_back():
    for objective in (
        *MEMBERS,
        ProbabilityObjective(alpha=1 / 3, threshold=1 / 7, side="bottom", normalize="kept", ignore_index=-1),
    ):
        assert eval(repr(objective)) == objective


def test_names_of_the_authors_code():
    named = ProbabilityObjective.from_name
    assert named("original") == named("logp") == ProbabilityObjective(alpha=0.0)
    assert named("p") == ProbabilityObjective(alpha=1.0)
    assert named("GeneralFamily-0.3") == ProbabilityObjective(alpha=0.3)
    top = ProbabilityObjective(alpha=0.0, threshold=0.2, side="top", normalize="kept")
    assert named("OnlyTopLogP-0.2") == top
    assert named("OnlyBottomP-0.7") == ProbabilityObjective(alpha=1.0, threshold=0.7, side="bottom", normalize="kept")
    for wrong in ("GeneralFamily--1", "GeneralFamily-", "OnlyTopP", "OnlyTopP-1.0", "OnlyBottomP-0", "q", "OnlyTopP-x"):
        with pytest.raises(ValueError, match=r"there is no objective|must be"):
            named(wrong)


def test_label_smoothing_is_no_function_of_p():
    smoothed = ProbabilityObjective("label_smoothing")
    for ask in (
        lambda: smoothed.value(torch.zeros(1)),
        lambda: smoothed.gradient_weight(torch.zeros(1)),
        lambda: smoothed.peak,
    ):
        with pytest.raises(ValueError, match="no function of the target's probability alone"):
            ask()
