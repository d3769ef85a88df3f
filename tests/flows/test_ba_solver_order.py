"""The solver's closed forms: what it is without a SideNet, its orders with an exact one, its direction, its calls."""

import math

import pytest
import torch

from cameraready.flows._samplers import grid, sample
from cameraready.flows.ba_solver import BAConfig, ba_invert, ba_sample
from cameraready.flows.ba_solver.quadrature import LOBATTO, closed_rule, open_rule
from tests.flows.ba_reference import paper_sampler

pytestmark = pytest.mark.torch

RULES = ["lobatto", "simpson38", "simpson", "trapezoid", 0.2]


class Logistic:
    """dx/dt = r(t) x (1 - x): the flow, and so an exact SideNet, in closed form."""

    def __init__(self, wrong=0.0):
        self.wrong, self.calls = wrong, 0

    @staticmethod
    def rate(t):
        return 1.0 + math.cos(3.0 * t) if not isinstance(t, torch.Tensor) else 1.0 + torch.cos(3.0 * t)

    @staticmethod
    def turned(t):
        return t + (math.sin(3.0 * t) if not isinstance(t, torch.Tensor) else torch.sin(3.0 * t)) / 3.0

    def velocity(self, x, t, y=None):
        self.calls += 1
        return self.rate(t) * x * (1 - x)

    def flow(self, x, start, end):
        return torch.sigmoid(torch.logit(x) + self.turned(end) - self.turned(start))

    def side(self, x, v, t, h, y=None):
        """The true change, and an error of `wrong` for each unit of time."""
        t, h = t[:, None], h[:, None]
        there = self.flow(x, t, t + h)
        return self.rate(t + h) * there * (1 - there) - v + self.wrong * h


@pytest.fixture
def start():
    return torch.linspace(0.1, 0.9, 6, dtype=torch.float64).reshape(3, 2)


def bent(x, t, y=None):
    """A velocity that is linear in nothing."""
    return torch.sin(2 * x + 3 * t) + x.flip(-1) * t


def bent_side(x, v, t, h, y=None):
    t, h = t[:, None], h[:, None]
    return h * torch.tanh(x + v * (1 + t) + 0.5 * h)


def slope(error_at, counts):
    errors = [error_at(n) for n in counts]
    return math.log(errors[0] / errors[-1]) / math.log(counts[-1] / counts[0])


# --- rules -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "degree"), [("lobatto", 5), ("simpson38", 3), ("simpson", 3), ("trapezoid", 1), (0.2, 3)]
)
def test_a_rule_integrates_polynomials_up_to_its_degree_and_no_further(nodes, degree):
    rule = closed_rule(nodes)
    errors = [
        abs(sum(w * c**k for c, w in zip(rule.nodes, rule.weights, strict=True)) - 1 / (k + 1))
        for k in range(degree + 2)
    ]
    assert max(errors[: degree + 1]) < 1e-15
    assert errors[degree + 1] > 1e-4


def test_the_weights_of_the_paper():
    assert closed_rule("lobatto").weights == pytest.approx((1 / 12, 5 / 12, 5 / 12, 1 / 12))
    assert closed_rule("simpson38").weights == pytest.approx((1 / 8, 3 / 8, 3 / 8, 1 / 8))
    assert sum(open_rule(5).weights) == pytest.approx(1.0)


# --- without a SideNet -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", RULES)
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_without_a_sidenet_it_is_adams_bashforth(start, nodes, steps):
    """Predict by Euler, evaluate, correct by the trapezoid, last step Euler: in the evaluated points this is AB2, for every rule."""
    expected = sample(bent, start, steps=steps, method="ab2")
    found = ba_sample(bent, None, start, steps=steps, config=BAConfig(nodes=nodes))
    torch.testing.assert_close(found.x, expected.x, rtol=0, atol=1e-14)
    assert found.calls == steps
    assert found.predictions == 0


def test_the_closed_form_on_unequal_steps(start):
    """p' = p + h f + h_before (f - f_before) / 2, which is AB2 only where steps are equal."""
    times = grid(6, kind="shift", shift=3.0)
    point, before, h_before = start, None, 0.0
    for t, after in zip(times[:-1].tolist(), times[1:].tolist(), strict=True):
        f = bent(point, t)
        point = point + (after - t) * f + (0.0 if before is None else h_before / 2 * (f - before))
        before, h_before = f, after - t
    torch.testing.assert_close(ba_sample(bent, None, start, times=times).x, point, rtol=0, atol=1e-14)


def test_it_is_predict_evaluate_correct_with_an_euler_last_step(start):
    x, v = start, bent(start, 0.0)
    for i in range(4):
        predicted = x + v / 4
        if i < 3:
            after = bent(predicted, (i + 1) / 4)
            x, v = x + (v + after) / 8, after
    torch.testing.assert_close(ba_sample(bent, None, start, steps=4).x, predicted, rtol=0, atol=1e-14)


def test_a_single_anchor_without_a_sidenet_is_euler(start):
    config = BAConfig(anchors="single", gauss_nodes=3)
    expected = sample(bent, start, steps=5, method="euler")
    torch.testing.assert_close(ba_sample(bent, None, start, steps=5, config=config).x, expected.x, rtol=0, atol=1e-14)


# --- orders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "order", "counts"),
    [
        (BAConfig(), 6, (6, 18)),
        (BAConfig(nodes="simpson38"), 4, (4, 16)),
        (BAConfig(nodes="simpson"), 4, (4, 16)),
        (BAConfig(nodes=0.2), 4, (4, 16)),
        (BAConfig(nodes="trapezoid"), 2, (8, 32)),
        (BAConfig(anchors="single", gauss_nodes=1), 2, (8, 32)),
        (BAConfig(anchors="single", gauss_nodes=2), 4, (4, 16)),
        (BAConfig(anchors="single", gauss_nodes=3), 6, (6, 18)),
    ],
)
def test_with_an_exact_sidenet_the_order_is_that_of_the_rule(start, config, order, counts):
    flow = Logistic()
    exact = flow.flow(start, 0.0, 1.0)

    def error(n):
        return float((ba_sample(flow.velocity, flow.side, start, steps=n, config=config).x - exact).abs().max())

    assert slope(error, counts) == pytest.approx(order, abs=0.35)


@pytest.mark.parametrize(("anchors", "order"), [("both", 2), ("single", 1)])
@pytest.mark.parametrize("wrong", [0.5, None])
def test_with_a_wrong_sidenet_the_second_anchor_is_worth_an_order(start, anchors, order, wrong):
    """Errors of predictions forward and back have opposite signs to first order and cancel; the single anchor's do not."""
    flow = Logistic(0.0 if wrong is None else wrong)
    exact = flow.flow(start, 0.0, 1.0)
    side = None if wrong is None else flow.side

    def error(n):
        found = ba_sample(flow.velocity, side, start, steps=n, config=BAConfig(anchors=anchors))
        return float((found.x - exact).abs().max())

    assert slope(error, (32, 128)) == pytest.approx(order, abs=0.15)


def test_the_order_holds_on_a_shifted_grid(start):
    flow = Logistic()
    exact = flow.flow(start, 0.0, 1.0)

    def error(n):
        times = grid(n, kind="shift", shift=3.0)
        return float((ba_sample(flow.velocity, flow.side, start, times=times).x - exact).abs().max())

    assert slope(error, (8, 24)) == pytest.approx(6, abs=0.35)


# --- direction -------------------------------------------------------------------------------------------------------


def test_a_velocity_linear_in_time_is_exact_with_its_slope_and_wrong_by_twice_as_much_with_the_other_sign():
    base, growth = torch.tensor([[1.0, -2.0]], dtype=torch.float64), torch.tensor([[3.0, 0.5]], dtype=torch.float64)
    start = torch.zeros(1, 2, dtype=torch.float64)

    def velocity(x, t, y=None):
        return base + growth * t

    right = ba_sample(velocity, lambda x, v, t, h, y: growth * h[:, None], start, steps=3)
    torch.testing.assert_close(right.x, base + growth / 2, rtol=0, atol=1e-14)
    back = ba_invert(velocity, lambda x, v, t, h, y: growth * h[:, None], right.x, steps=3)
    torch.testing.assert_close(back.x, start, rtol=0, atol=1e-14)
    # The two-sided rule undoes a slope of any size but in the last step, whose error is (wrong - right) h^2 / 2.
    for factor in (-1.0, 0.0, 2.0):
        found = ba_sample(velocity, lambda x, v, t, h, y, f=factor: f * growth * h[:, None], start, steps=3)
        expected = base + growth / 2 + (factor - 1) * growth / 18
        torch.testing.assert_close(found.x, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("name", ["lobatto", "simpson38"])
def test_it_is_the_papers_algorithm_with_time_turned_round(start, steps, name):
    a = LOBATTO if name == "lobatto" else 1 / 3
    times = torch.ones(3, dtype=torch.float64)

    def velocity(x, t, y):
        return -bent(x, 1 - t)

    def side(x, v, t, h, y):
        return -bent_side(x, -v, (1 - t) * times, h * times)

    expected = paper_sampler(velocity, side, start, steps, a, closed_rule(name).weights[1])
    found = ba_sample(bent, bent_side, start, steps=steps, config=BAConfig(nodes=name))
    torch.testing.assert_close(found.x, expected, rtol=0, atol=1e-13)
    assert (found.calls, found.predictions) == (steps, 4 * steps - 1)


def test_inversion_is_sampling_on_the_same_grid_backwards(start):
    times = grid(5, kind="shift")
    expected = ba_sample(bent, bent_side, start, times=times.flip(0))
    found = ba_invert(bent, bent_side, start, times=times)
    assert torch.equal(found.x, expected.x)
    assert torch.equal(found.times, times.flip(0))


def test_a_round_trip_comes_back_with_the_order_of_the_solver(start):
    flow = Logistic(wrong=0.5)

    def error(n):
        there = ba_sample(flow.velocity, flow.side, start, steps=n)
        return float((ba_invert(flow.velocity, flow.side, there.x, steps=n).x - start).abs().max())

    assert slope(error, (16, 64)) > 1.8


# --- guidance --------------------------------------------------------------------------------------------------------


def conditional(x, t, y):
    return bent(x, t) + 0.3 * y[:, None] * torch.cos(x)


def conditional_side(x, v, t, h, y):
    return bent_side(x, v, t, h) * (1 + y[:, None])


@pytest.mark.parametrize("interval", [(0.0, 1.0), (0.3, 1.0)])
def test_guidance_combines_both_halves_after_the_sidenet(start, interval):
    y, null, ones = torch.tensor([1, 2, 0]), torch.full((3,), 5), torch.ones(3, dtype=torch.float64)

    def velocity(x, t, y):
        return -conditional(x, 1 - t, y)

    def side(x, v, t, h, y):
        return -conditional_side(x, -v, (1 - t) * ones, h * ones, y)

    turned = (1 - interval[1], 1 - interval[0])
    weight = closed_rule("lobatto").weights[1]
    expected = paper_sampler(velocity, side, start, 5, LOBATTO, weight, guidance=2.5, y=y, null=null, interval=turned)
    config = BAConfig(guidance=2.5, null_label=5, guidance_interval=interval)
    found = ba_sample(conditional, conditional_side, start, steps=5, y=y, config=config)
    torch.testing.assert_close(found.x, expected, rtol=0, atol=1e-13)
    assert found.calls == 5
    outside = sum(t < interval[0] for t in (0.0, 0.2, 0.4, 0.6, 0.8))
    assert found.predictions == 19 * 2 - (7 if outside else 0)


def test_guidance_of_one_is_the_conditional_flow(start):
    y = torch.tensor([1, 2, 0])
    plain = ba_sample(conditional, conditional_side, start, steps=4, y=y)
    never = BAConfig(guidance=4.0, null_label=5, guidance_interval=(0.9, 1.0))
    assert torch.equal(ba_sample(conditional, conditional_side, start, steps=4, y=y, config=never).x, plain.x)


def test_inversion_guides_the_same_steps_and_so_comes_back(start):
    """A step is guided by its noisier end, whichever way it is taken: also the first one back, from t = 1."""
    y, asked = torch.tensor([1, 2, 0]), {"there": [], "back": []}

    def watched(way):
        def velocity(x, t, y):
            asked[way].append((t, len(x)))
            return conditional(x, t, y)

        return velocity

    config = BAConfig(guidance=2.5, null_label=5, guidance_interval=(0.3, 1.0))
    for run in ("there", "back"):
        solve = ba_sample if run == "there" else ba_invert
        solve(watched(run), conditional_side, start, steps=4, y=y, config=config)
    assert asked["there"] == [(0.0, 3), (0.25, 3), (0.5, 6), (0.75, 6)]
    assert asked["back"] == [(1.0, 6), (0.75, 6), (0.5, 3), (0.25, 3)]
    everywhere = BAConfig(guidance=2.5, null_label=5)

    def error(n):
        there = ba_sample(conditional, None, start, steps=n, y=y, config=everywhere)
        return float((ba_invert(conditional, None, there.x, steps=n, y=y, config=everywhere).x - start).abs().max())

    assert slope(error, (32, 128)) > 1.8


# --- batches and precision -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 2, 4])
def test_smaller_batches_of_predictions_change_nothing(start, chunk):
    y = torch.tensor([1, 2, 0])
    whole = BAConfig(guidance=2.0, null_label=5)
    split = BAConfig(guidance=2.0, null_label=5, probe_chunk=chunk)
    expected = ba_sample(conditional, conditional_side, start, steps=3, y=y, config=whole)
    found = ba_sample(conditional, conditional_side, start, steps=3, y=y, config=split)
    assert torch.equal(found.x, expected.x)


def test_a_bfloat16_backbone_has_a_state_of_float32(start):
    """Of 64 equal moves of 1/64 a state in bfloat16 would lose the small ones; and the network is asked in its own dtype."""
    asked = []

    def velocity(x, t, y=None):
        asked.append(x.dtype)
        return torch.ones_like(x)

    seen = []

    def side(x, v, t, h, y):
        seen.append(x.dtype)
        return torch.zeros_like(x)

    noise = torch.full((1, 2), 100.0, dtype=torch.bfloat16)
    found = ba_sample(velocity, side, noise, steps=64)
    assert found.x.dtype == torch.bfloat16
    assert found.x.tolist() == [[101.0, 101.0]]
    assert set(asked) == {torch.bfloat16}
    assert set(seen) == {torch.float32}


def test_the_trajectory_is_where_the_network_was_asked(start):
    points = []

    def velocity(x, t, y=None):
        points.append(x)
        return bent(x, t)

    found = ba_sample(velocity, bent_side, start, steps=3, trajectory=True)
    assert torch.equal(found.states, torch.stack([*points, found.x]))


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"nodes": "simpsons"}, "none of lobatto"),
        ({"nodes": 0.5}, "strictly between 0 and 1/2"),
        ({"anchors": "three"}, "'both' or 'single'"),
        ({"gauss_nodes": 6}, "1 to 5"),
        ({"guidance": 2.0}, "needs null_label"),
        ({"guidance_interval": (0.7, 0.3)}, "two increasing times"),
        ({"probe_chunk": -1}, "0 .all at once. or more"),
    ],
)
def test_settings_out_of_range_are_refused_with_a_sentence(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        BAConfig(**settings)


def test_wrong_calls_are_refused_with_a_sentence(start):
    with pytest.raises(ValueError, match="needs labels"):
        ba_sample(conditional, None, start, steps=2, config=BAConfig(guidance=2.0, null_label=5))
    with pytest.raises(ValueError, match="2 labels for 3 states"):
        ba_sample(conditional, None, start, steps=2, y=torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="rising times"):
        ba_invert(bent, None, start, times=[1.0, 0.5, 0.0])
    with pytest.raises(ValueError, match="either steps"):
        ba_sample(bent, None, start)
    with pytest.raises(ValueError, match="must return a change of velocity for each"):
        ba_sample(bent, lambda x, v, t, h, y: x[:1], start, steps=2)
    with pytest.raises(FloatingPointError, match=r"t = 0\.5"):
        ba_sample(lambda x, t, y=None: x / (0.5 - t), None, start, steps=2)
    with pytest.raises(FloatingPointError, match="not finite"):
        ba_sample(bent, lambda x, v, t, h, y: x * float("nan"), start, steps=2)
