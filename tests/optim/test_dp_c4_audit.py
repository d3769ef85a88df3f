"""The audit refutes claims that are false, and only those."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import binom

from cameraready.optim.dp_c4 import (
    C4Optimizer,
    ConstantThreshold,
    GeometricThreshold,
    MovementThreshold,
    Sampling,
    audit_one_run,
    calibrate_noise,
    epsilon_lower_bound,
)

pytestmark = pytest.mark.torch

CANARIES, RECORDS, STEPS, DELTA = 300, 400, 12, 1e-5


def train(included, mode, noise, *, seed=0, publish=None):
    """Records with a feature of their own each; what is published is the sum of all gradients the optimizer has seen."""
    weight = torch.nn.Parameter(torch.zeros(CANARIES, dtype=torch.float64))
    schedule = MovementThreshold(1.0, anchor=1.0) if mode == "snapshot" else GeometricThreshold(1.0, 0.8, floor=0.05)
    optimizer = C4Optimizer(
        torch.optim.SGD([weight], lr=1.0),
        noise_multiplier=noise,
        schedule=schedule if mode != "off" else ConstantThreshold(1.0),
        sampling=Sampling("full", RECORDS),
        mode=mode,
        generator=torch.Generator().manual_seed(seed),
    )
    rows = torch.zeros(RECORDS, CANARIES, dtype=torch.float64)
    rows[:CANARIES] = torch.diag(-5.0 * included.double())

    def closure():
        weight.grad_sample = rows * (1.0 + weight.detach())

    scores = torch.zeros(CANARIES, dtype=torch.float64)
    for _ in range(STEPS):
        optimizer.step(closure)
        scores -= weight.grad
        if publish is not None:
            scores = publish(optimizer, weight)
    return scores, optimizer


def audited(mode, noise, claim, **options):
    return audit_one_run(
        lambda included: train(included, mode, noise, **options)[0],
        CANARIES,
        claimed_epsilon=claim,
        delta=DELTA,
        generator=torch.Generator().manual_seed(11),
    )


def noise_for(epsilon):
    _, optimizer = train(torch.zeros(CANARIES, dtype=torch.bool), "off", 1.0)
    return calibrate_noise(lambda noise: optimizer.plan.releases(noise, STEPS), epsilon, DELTA)


@pytest.mark.parametrize("mode", ["off", "table", "snapshot"])
def test_right_noise_passes_and_missing_noise_is_caught(mode):
    noise = noise_for(1.0)
    honest = audited(mode, noise, 1.0)
    assert not honest.refutes_claim
    missing = audited(mode, 0.0, 1.0)
    assert missing.refutes_claim
    assert missing.epsilon_lower > 3.0
    assert "refutes the claimed 1" in str(missing)


@pytest.mark.parametrize("mode", ["off", "table", "snapshot"])
def test_noise_divided_by_the_number_of_records_once_too_often_is_caught(mode):
    assert audited(mode, noise_for(1.0) / RECORDS, 1.0).refutes_claim


def test_publishing_the_mean_reference_with_noise_of_the_present_threshold_is_caught():
    """What would reach the optimum: the exact mean of h plus noise that shrinks with the threshold. It is not private."""
    noise = noise_for(1.0)
    generator = torch.Generator().manual_seed(5)

    def publish(optimizer, weight):
        mean = optimizer.memory.of(weight)["references"].mean(dim=0)
        return -(mean + torch.randn(CANARIES, generator=generator, dtype=torch.float64) * noise * 0.05 / RECORDS)

    assert audited("table", noise, 1.0, publish=publish).refutes_claim


def test_the_bound_has_its_closed_form_when_all_guesses_are_right():
    """All r right at delta = 0: (e^eps / (1 + e^eps))^r = 1 - confidence."""
    for r in (10, 100, 1_000):
        q = 0.05 ** (1 / r)
        assert epsilon_lower_bound(r, r, r, 0.0) == pytest.approx(math.log(q / (1 - q)), rel=1e-6)
    assert epsilon_lower_bound(50, 100, 100, 0.0) == 0.0
    assert epsilon_lower_bound(100, 100, 100, 1e-5) < epsilon_lower_bound(100, 100, 100, 0.0)


def test_the_bound_agrees_with_a_plain_search():
    def p_value(m, r, v, epsilon, delta):
        pmf = binom.pmf(range(r + 1), r, math.exp(epsilon) / (1 + math.exp(epsilon)))
        return pmf[v:].sum() + 2 * m * delta * max(pmf[v - i : v].sum() / i for i in range(1, v + 1))

    for m, r, v, delta in ((100, 60, 50, 1e-4), (200, 200, 150, 1e-3), (50, 20, 20, 1e-5)):
        refuted = [epsilon for epsilon in np.linspace(0, 5, 501) if p_value(m, r, v, epsilon, delta) < 0.05]
        assert epsilon_lower_bound(v, r, m, delta) == pytest.approx(max(refuted), abs=0.011)


def test_randomised_response_is_refuted_no_more_often_than_the_confidence_allows():
    """Scores that tell membership with probability e^eps / (1 + e^eps): exactly epsilon-private."""
    epsilon, wrong, trials = 1.0, 0, 200
    right = math.exp(epsilon) / (1 + math.exp(epsilon))
    for seed in range(trials):
        generator = torch.Generator().manual_seed(seed)

        def respond(included, generator=generator):
            truthful = torch.rand(len(included), generator=generator) < right
            return torch.where(truthful, included, ~included).double()

        report = audit_one_run(
            respond, 200, claimed_epsilon=epsilon, delta=0.0, generator=generator, guess_fraction=0.9
        )
        wrong += report.refutes_claim
    assert wrong <= 0.05 * trials + 3 * math.sqrt(0.05 * 0.95 * trials)


def test_scores_and_arguments_are_checked():
    options = {"claimed_epsilon": 1.0, "delta": 1e-5, "generator": torch.Generator()}
    with pytest.raises(ValueError, match="finite scores"):
        audit_one_run(lambda included: torch.zeros(3), 20, **options)
    with pytest.raises(ValueError, match="finite scores"):
        audit_one_run(lambda included: torch.full((20,), math.nan), 20, **options)
    with pytest.raises(ValueError, match="at least 10"):
        audit_one_run(lambda included: included.double(), 5, **options)
    with pytest.raises(ValueError, match="correct"):
        epsilon_lower_bound(5, 4, 10, 0.0)
    with pytest.raises(ValueError, match="delta"):
        epsilon_lower_bound(4, 4, 10, 1.0)
