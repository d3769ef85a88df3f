"""Inner solvers against closed forms: memoryless chains, lean adjoints, Adjoint Matching and NFT on Gaussians."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

from cameraready.flows._paths import CosinePath, LinearPath
from cameraready.flows._samplers import sample
from cameraready.flows._toy.stacked import StackedMLP
from cameraready.flows.cfo import NFT, AdjointMatching, AugmentedLagrangian, FixedWeights, FlowPolicy
from cameraready.flows.cfo.adjoint import _by_jacobians
from cameraready.flows.cfo.memoryless import lean_adjoint, memoryless_steps, simulate
from tests.flows.cfo_models import GaussianFlow, exact_velocity, gaussian_kl, generator, tilted

pytestmark = pytest.mark.torch
PATHS = {"linear": LinearPath(), "cosine": CosinePath()}
STEPS = 20


def untouched(x):
    return 0 * x[..., 0]


# --- the memoryless chain ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize("scheme", ["euler", "ancestral"])
def test_the_end_has_the_flows_law_and_the_paths_divergence_is_that_of_the_ends(path, scheme):
    mean, std, n = 1.0, 0.7, 20_000
    g = generator()
    steps = memoryless_steps(path, 100, scheme)
    start = torch.randn(n, 1, generator=g, dtype=torch.float64)
    base = exact_velocity(0.0, 1.0, path)
    made = simulate(exact_velocity(mean, std, path), start, steps, g, base=base)
    bias = 0.012  # of first order in the step
    assert float(made.end.mean()) == pytest.approx(mean, abs=4 * std / math.sqrt(n) + bias)
    assert float(made.end.std()) == pytest.approx(std, abs=4 * std / math.sqrt(2 * n) + bias)
    assert float(torch.corrcoef(torch.cat([start, made.end], 1).T)[0, 1]) == pytest.approx(0, abs=4 / math.sqrt(n))
    exact = gaussian_kl(mean, std)
    for estimate in (made.log_ratio, made.energy):
        assert float(estimate.mean()) == pytest.approx(exact, abs=4 * float(estimate.std()) / math.sqrt(n) + bias)
    # In mean over the paths of the base, exp(log ratio) is one: the two laws are normalised alike.
    other = simulate(base, start, steps, g, base=exact_velocity(0.4, 1.0, path))
    assert float((-other.log_ratio).exp().mean()) == pytest.approx(1.0, abs=0.03)


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_the_ancestral_scheme_is_right_for_standard_normal_data_at_any_number_of_steps(path):
    """The variance is carried on exactly: keep, move and noise of the true velocity keep alpha^2 + sigma^2, and the start is forgotten."""
    velocity = exact_velocity(0.0, 1.0, path)
    for count in (2, 3, 10):
        steps, one = memoryless_steps(path, count), torch.ones(1, dtype=torch.float64)
        variance, memory = 1.0, 1.0
        for k in range(count):
            slope = steps.keep[k] + steps.move[k] * float(velocity(one, steps.times[k]))
            variance, memory = slope**2 * variance + steps.noise[k] ** 2, memory * slope
            after = steps.times[k + 1]
            assert variance == pytest.approx(path.alpha(after) ** 2 + path.sigma(after) ** 2, abs=1e-12)
        assert memory == pytest.approx(0, abs=1e-12)


def test_the_authors_scheme_begins_twice_too_wide():
    steps = memoryless_steps(LinearPath(), 40, "euler")
    assert steps.keep[0] == pytest.approx(0)
    assert steps.noise[0] ** 2 == pytest.approx(2)
    fine = memoryless_steps(LinearPath(), 40)
    assert fine.noise[0] ** 2 == pytest.approx((1 - 1 / 40) ** 2 + 1 / 40**2)
    # In the limit of small steps both are the same process.
    for scheme in ("euler", "ancestral"):
        k = 500
        late = memoryless_steps(LinearPath(), 1000, scheme)
        assert (1 - late.keep[k]) * 1000 == pytest.approx(2.0, rel=0.01)  # 1 / t
        assert late.move[k] * 1000 == pytest.approx(2.0, rel=0.01)
        assert late.noise[k] ** 2 * 1000 == pytest.approx(2.0, rel=0.01)  # 2 (1 - t) / t


@pytest.mark.parametrize("times", [1, 0, [0.0, 0.5], [0.0, 0.5, 0.4, 1.0], [0.1, 0.5, 1.0]])
def test_odd_grids_are_refused(times):
    with pytest.raises(ValueError, match="increases from 0 to 1"):
        memoryless_steps(LinearPath(), times)


# --- the lean adjoint --------------------------------------------------------------------------------------------------------


class Curved(nn.Module):
    def forward(self, x, t, y=None):
        t = t[..., None] if isinstance(t, torch.Tensor) and t.ndim else t
        return torch.sin(x) * (1 + t) - x.flip(-1) * x / 3


def test_lean_adjoint_is_autograd_through_the_base():
    steps, g = memoryless_steps(LinearPath(), [0.0, 0.1, 0.4, 0.5, 0.9, 1.0]), generator()
    base, v = FlowPolicy(Curved(), (2,)), Curved()
    start = torch.randn(6, 2, generator=g, dtype=torch.float64)
    states = simulate(v, start, steps, g).states
    shocks = [
        after - steps.keep[k] * before - steps.move[k] * v(before, steps.times[k])
        for k, (before, after) in enumerate(pairwise(states))
    ]
    terminal = torch.cos(states[-1])
    found, velocities = lean_adjoint(v, states, terminal, steps)
    for k in range(len(steps)):
        x = states[k + 1].clone().requires_grad_(True)
        end = x
        for j in range(k + 1, len(steps)):  # the same shocks again, from the state after step k
            end = steps.keep[j] * end + steps.move[j] * v(end, steps.times[j]) + shocks[j]
        (expected,) = torch.autograd.grad(end, x, terminal)
        torch.testing.assert_close(found[k], expected)
        torch.testing.assert_close(velocities[k], v(states[k], steps.times[k]))
    at_once, same = _by_jacobians(base, states, terminal, steps)
    for k in range(len(steps)):
        torch.testing.assert_close(at_once[k], found[k])
        torch.testing.assert_close(same[k], velocities[k])


# --- Adjoint Matching ------------------------------------------------------------------------------------------------------------


def tuned(solver, objective, kl, *, iterations=(120, 60), path=None, runs=(0.05, 0.005)):
    base = solver.open(GaussianFlow(STEPS, path=path or LinearPath()), (1,))
    policy, g = solver.copy(base), generator()
    for lr, count in zip(runs, iterations, strict=True):
        replace(solver, lr=lr).solve(policy, base, objective, kl=kl, steps=count, generator=g)
    return policy, base


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize(("slope", "curvature"), [(0.5, 0.0), (0.6, 0.4)])
def test_adjoint_matching_gives_the_exactly_tilted_gaussian(path, slope, curvature):
    kl = 0.5
    reward = FixedWeights(lambda x: slope * x[:, 0] - curvature / 2 * x[:, 0] ** 2, untouched, 0.0, 0.0)
    solver = AdjointMatching(
        batch=192, steps=STEPS, path=path, times_per_update=STEPS, random_share=0.75, sample_steps=STEPS, clip_norm=1e9
    )
    policy, base = tuned(solver, reward, kl, path=path)
    mean, std = tilted(slope, curvature, kl)
    g = generator(5)
    x = simulate(policy, policy.noise(20_000, g), solver.grid(), g).end
    assert float(x.mean()) == pytest.approx(mean, abs=0.03)
    assert float(x.std()) == pytest.approx(std, abs=0.03)
    assert solver.divergence(policy, base, 4000, g) == pytest.approx(gaussian_kl(mean, std), abs=0.04)
    x, _ = solver.draw(policy, 20_000, generator(6))  # by as many steps of the flow's ODE
    noise = policy.noise(20_000, generator(6))
    exact = sample(exact_velocity(mean, std, path), noise, steps=STEPS).x
    assert float((x - exact).mean()) == pytest.approx(0, abs=0.04)
    assert float(x.std() - exact.std()) == pytest.approx(0, abs=0.04)


def test_a_reward_twice_as_large_under_twice_the_kl_takes_the_same_steps():
    """alpha counts once: f / alpha is all that matters."""
    found = []
    for scale in (1.0, 2.0):
        reward = FixedWeights(lambda x, s=scale: s * torch.tanh(x[:, 0]), untouched, 0.0, 0.0)
        solver = AdjointMatching(batch=16, steps=5)
        policy, _ = tuned(solver, reward, 0.5 * scale, iterations=(3, 3))
        found.append(torch.cat([p.detach().flatten() for p in policy.parameters()]))
    torch.testing.assert_close(found[0], found[1])


def test_long_gradients_are_shortened_and_masked_samples_do_not_count():
    solver = AdjointMatching(batch=8, steps=4)
    gradient = torch.ones(200, 1, dtype=torch.float64)
    gradient[7] = 1000.0
    valid = torch.ones(200, dtype=torch.bool)
    kept = solver.shortened(gradient, valid)
    limit = 3 * float(torch.quantile(gradient.flatten(), 0.99))
    assert kept[7].item() == pytest.approx(limit)
    assert torch.equal(kept[:7], gradient[:7])
    valid[7] = False
    assert solver.shortened(gradient, valid)[7].item() == pytest.approx(3.0)
    assert torch.equal(replace(solver, gradient_factor=0.0).shortened(gradient, valid), gradient)
    # A reward that is NaN on half the line: what is learnt comes from the other half.
    broken = FixedWeights(lambda x: torch.where(x[:, 0] > 0, 0.5 * x[:, 0], torch.nan), untouched, 0.0, 0.0)
    base = solver.open(GaussianFlow(4), (1,))
    policy = solver.copy(base)
    told = solver.solve(policy, base, broken, kl=0.5, steps=5, generator=generator())
    assert 0 < told["masked"] < 40
    assert all(bool(torch.isfinite(p).all()) for p in policy.parameters())


def test_networks_trained_side_by_side_are_clipped_and_move_by_themselves():
    """A run of three is not changed by what the others are asked to raise."""
    found = []
    for weights in ([0.0, 3.0, 5.0], [0.0, 0.5, 50.0]):
        solver = AdjointMatching(batch=8, steps=4, lr=0.01)
        base = FlowPolicy(StackedMLP(3, 2, 8, 1), (2,), (3,)).freeze()
        objective = FixedWeights(
            lambda x: x[..., 0], lambda x: x[..., 1], 0.0, torch.tensor(weights).unsqueeze(-1), runs=(3,)
        )
        policy = solver.copy(base)
        solver.solve(policy, base, objective, kl=1.0, steps=4, generator=generator())
        found.append([p.detach() for p in policy.parameters()])
        assert len(solver.divergence(policy, base, 8, generator())) == 3
    for first, second in zip(*found, strict=True):
        torch.testing.assert_close(first[0], second[0])
        assert not torch.allclose(first[1], second[1])


# --- NFT ---------------------------------------------------------------------------------------------------------------------------


def test_nft_weights_are_a_half_at_the_tilted_law_itself():
    """There f - alpha log(p / p_pre) is the same for all samples: nothing pulls any more."""
    kl, slope = 0.5, 0.5
    mean, std = tilted(slope, 0.0, kl)
    steps, g = memoryless_steps(LinearPath(), 200), generator()
    start = torch.randn(4000, 1, generator=g, dtype=torch.float64)
    base = exact_velocity(0.0, 1.0)
    for law, still in ((exact_velocity(mean, std), True), (base, False)):
        made = simulate(law, start, steps, g, base=base)
        gained = slope * made.end[:, 0] - kl * made.log_ratio
        spread = float(gained.std()) / (slope * std)
        assert spread < 0.1 if still else spread > 0.9


def test_nft_raises_a_black_box_and_comes_near_the_tilted_law():
    kl, slope = 0.5, 0.5
    reward = FixedWeights(lambda x: (slope * x[:, 0]).detach().numpy(), untouched, 0.0, 0.0)
    solver = NFT(batch=192, steps=STEPS, sample_steps=STEPS, clip_norm=1e9)
    policy, _ = tuned(solver, reward, kl, iterations=(150, 80), runs=(0.02, 0.004))
    x, _ = solver.draw(policy, 20_000, generator(5))
    mean, std = tilted(slope, 0.0, kl)
    assert float(x.mean()) == pytest.approx(mean, abs=0.15)
    assert float(x.std()) == pytest.approx(std, abs=0.15)


# --- arguments -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("solver", "changed", "words"),
    [
        (AdjointMatching, {"lr": 0.0}, "lr must be above 0"),
        (AdjointMatching, {"cutoff": 1.5}, "cutoff must lie between 0 and 1"),
        (AdjointMatching, {"steps": 4, "cutoff": 0.9}, "no step begins at the cutoff"),
        (AdjointMatching, {"final_share": 0.0, "random_share": 0.0}, "no time would be trained"),
        (AdjointMatching, {"scheme": "heun"}, "scheme must be"),
        (NFT, {"decay": 1.0}, "decay must be"),
        (NFT, {"steps": (0.0, 2.0)}, "increases from 0 to 1"),
    ],
)
def test_arguments_out_of_range_are_refused(solver, changed, words):
    with pytest.raises(ValueError, match=words):
        solver(**changed)


@pytest.mark.parametrize(
    ("model", "shape", "error", "words"),
    [
        (lambda x, t: x, (1,), TypeError, "must be a torch module"),
        (GaussianFlow(4).requires_grad_(False), (1,), ValueError, "nothing to tune"),
        (GaussianFlow(4), None, ValueError, "shape must say"),
    ],
)
def test_models_that_cannot_be_tuned_are_refused(model, shape, error, words):
    with pytest.raises(error, match=words):
        AdjointMatching().open(model, shape)


def test_a_velocity_that_is_not_finite_is_told():
    model = GaussianFlow(4)
    model.a.data[2] = torch.nan
    solver = AdjointMatching(batch=4, steps=4)
    base = solver.open(model, (1,))
    with pytest.raises(FloatingPointError, match=r"not finite .* t = 0\.5"):
        solver.solve(
            solver.copy(base),
            base,
            AugmentedLagrangian(untouched, untouched, 0.0),
            kl=1.0,
            steps=1,
            generator=generator(),
        )
