"""Closed forms: against brute force, simulation within its own error, torch.distributions, and limits."""

import itertools
import math

import pytest
import torch

from cameraready.posttraining._testbed import exact

pytestmark = pytest.mark.torch


@pytest.fixture
def log_p():
    g = torch.Generator().manual_seed(0)
    return torch.log_softmax(1.5 * torch.randn(2, 3, 7, generator=g, dtype=torch.float64), -1)


@pytest.fixture
def correct():
    table = torch.zeros(3, 7, dtype=torch.bool)
    table[0, [1, 4, 5]] = True
    table[1, 2] = True
    return table  # the third prompt has no right answer


def test_log_partition_by_brute_force(log_p, correct):
    beta = 0.05
    found = exact.log_partition(log_p, correct.double(), beta)
    for s, p in itertools.product(range(2), range(3)):
        z = math.fsum(math.exp(float(log_p[s, p, i])) * math.exp(float(correct[p, i]) / beta) for i in range(7))
        assert float(found[s, p]) == pytest.approx(math.log(z), rel=1e-12)


def test_log_partition_of_a_right_or_wrong_reward_depends_on_the_accuracy_alone(log_p, correct):
    """The sheet's example of the true log-partition: p = 0.3 and beta = 0.05 give beta log Z = 0.94."""
    p = exact.accuracy(log_p, correct)
    beta = 0.05
    expected = torch.log(1 - p + p * math.exp(1 / beta))
    torch.testing.assert_close(exact.log_partition(log_p, correct.double(), beta), expected, rtol=1e-10, atol=1e-12)
    bandit = torch.tensor([0.3, 0.7], dtype=torch.float64).log()
    assert 0.05 * float(exact.log_partition(bandit, torch.tensor([1.0, 0.0]), 0.05)) == pytest.approx(0.94, abs=5e-3)


def test_the_tilted_policy_maximises_reward_less_divergence(log_p, correct):
    beta, reward = 0.3, correct.double()
    best = exact.tilted(log_p, reward, beta)
    torch.testing.assert_close(best.exp().sum(-1), torch.ones(2, 3, dtype=torch.float64))

    def value(q):
        return exact.mean_reward(q, reward) - beta * exact.kl(q, log_p)

    torch.testing.assert_close(value(best), beta * exact.log_partition(log_p, reward, beta), rtol=1e-10, atol=1e-12)
    g = torch.Generator().manual_seed(1)
    for _ in range(20):
        other = torch.log_softmax(best + 0.3 * torch.randn(best.shape, generator=g, dtype=torch.float64), -1)
        assert bool((value(other) < value(best)).all())


def test_divergence_and_entropy_are_those_of_torch_distributions(log_p):
    old = torch.distributions.Categorical(logits=log_p)
    new = torch.distributions.Categorical(logits=log_p.flip(-1))
    torch.testing.assert_close(
        exact.kl(log_p, log_p.flip(-1)), torch.distributions.kl_divergence(old, new), rtol=1e-10, atol=0
    )
    torch.testing.assert_close(exact.sequence_entropy(log_p), old.entropy(), rtol=1e-10, atol=0)
    assert bool((exact.kl(log_p, log_p) == 0).all())


def test_impossible_completions_count_for_nothing():
    some = torch.tensor([0.5, 0.5, 0.0]).log()
    assert float(exact.sequence_entropy(some)) == pytest.approx(math.log(2))
    assert float(exact.kl(some, torch.tensor([0.25, 0.25, 0.5]).log())) == pytest.approx(math.log(2))
    assert float(exact.kl(torch.tensor([0.25, 0.25, 0.5]).log(), some)) == math.inf


@pytest.mark.parametrize("k", [1, 2, 8])
def test_pass_at_k_and_distinct_answers_against_simulation(log_p, correct, k):
    draws = 40_000
    g = torch.Generator().manual_seed(k)
    for prompt in range(3):
        chosen = torch.multinomial(log_p[0, prompt].exp(), draws * k, replacement=True, generator=g).view(draws, k)
        hit = torch.nn.functional.one_hot(chosen, 7).sum(1).bool() & correct[prompt]
        for simulated, truth in (
            (hit.any(-1).double(), exact.pass_at_k(exact.accuracy(log_p, correct), k)[0, prompt]),
            (hit.sum(-1).double(), exact.distinct(log_p, correct, k)[0, prompt]),
        ):
            assert abs(float(simulated.mean() - truth)) <= 4.5 * float(simulated.std()) / draws**0.5 + 1e-12


def test_pass_at_k_by_enumeration_of_all_samples(log_p, correct):
    p = log_p[1, 0].exp()
    expected_pass = expected_distinct = 0.0
    for triple in itertools.product(range(7), repeat=3):
        weight = float(p[list(triple)].prod())
        right = {i for i in triple if correct[0, i]}
        expected_pass += weight * bool(right)
        expected_distinct += weight * len(right)
    assert float(exact.pass_at_k(exact.accuracy(log_p, correct), 3)[1, 0]) == pytest.approx(expected_pass, rel=1e-12)
    assert float(exact.distinct(log_p, correct, 3)[1, 0]) == pytest.approx(expected_distinct, rel=1e-12)


def test_limits(log_p, correct):
    p = exact.accuracy(log_p, correct)
    torch.testing.assert_close(exact.pass_at_k(p, 1), p)
    torch.testing.assert_close(exact.distinct(log_p, correct, 1), p)
    assert bool((p[:, 2] == 0).all())
    assert bool((exact.distinct(log_p, correct, 50)[:, 2] == 0).all())
    torch.testing.assert_close(exact.distinct(log_p, correct, 10**7)[:, 0], torch.full((2,), 3.0, dtype=torch.float64))
    assert float(exact.pass_at_k(torch.tensor(1e-12, dtype=torch.float64), 3)) == pytest.approx(3e-12, rel=1e-9)
    assert float(exact.pass_at_k(torch.tensor(1.0), 3)) == 1.0
    torch.testing.assert_close(exact.mass(log_p, correct), p)
    torch.testing.assert_close(exact.mean_reward(log_p, correct.double()), p)


def test_mistakes_are_named(log_p, correct):
    with pytest.raises(ValueError, match="beta must be positive, got 0"):
        exact.log_partition(log_p, correct.double(), 0)
    with pytest.raises(ValueError, match="k must be at least 1, got 0"):
        exact.pass_at_k(log_p.exp(), 0)
