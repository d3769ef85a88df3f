"""Verification@K: by hand, its coverage, and what it is not."""

import math

import numpy as np
import pytest
import torch

from cameraready.posttraining.cal_grpo import verification_at_k

NAN = math.nan


def simulated(rng, prompts, n, attempts=3):
    """Trajectories of prompts whose rates differ: a prompt's trajectories go together."""
    p = rng.beta(1, 1, size=prompts)
    rewards = (rng.random((prompts * n, attempts)) < np.repeat(p, n)[:, None]).astype(float)
    rewards[np.cumsum(rewards, axis=1) - rewards > 0] = NAN
    return rewards, np.repeat(np.arange(prompts), n)


def test_rates_by_hand():
    rewards = np.array([[1, NAN], [0, 1], [0, 0], [0, 0]])
    first, second = verification_at_k(rewards, group_ids=[0, 0, 1, 1])
    assert (first.value, second.value) == (0.25, 0.5)
    assert second.standard_error == pytest.approx(np.std([1.0, 0.0], ddof=1) / math.sqrt(2))
    assert (first.success, second.success, second.reach) == (0.25, pytest.approx(1 / 3), 0.75)
    assert (second.prompts, second.trajectories) == (2, 4)
    assert verification_at_k(torch.tensor(rewards), ks=[2], group_ids=torch.tensor([0, 0, 1, 1])) == [second]


def test_verification_is_the_complement_of_failing_throughout():
    rng = np.random.default_rng(0)
    rewards, groups = simulated(rng, 200, 10)
    found = verification_at_k(rewards, group_ids=groups)
    # One prompt a trajectory set: 1 - prod (1 - p_k) with pooled rates is the pooled V@k, exactly, as all groups are equal in size.
    fail = np.cumprod([1 - rate.success for rate in found])
    np.testing.assert_allclose([rate.value for rate in found], 1 - fail)
    assert [rate.value for rate in found] == sorted(rate.value for rate in found)


@pytest.mark.parametrize("interval", ["t", "bootstrap"])
def test_intervals_cover_where_errors_of_single_trajectories_would_not(interval):
    """200 draws of 24 prompts with 8 trajectories; V@2 of Beta(1, 1) rates is 1 - E(1 - p)^2 = 2/3."""
    rng = np.random.default_rng(1)
    hits, naive_hits, draws = 0, 0, 200 if interval == "t" else 60
    for _ in range(draws):
        rewards, groups = simulated(rng, 24, 8)
        (rate,) = verification_at_k(rewards, ks=[2], group_ids=groups, interval=interval, seed=rng)
        hits += rate.low <= 2 / 3 <= rate.high
        half = 1.96 * math.sqrt(rate.value * (1 - rate.value) / len(rewards))
        naive_hits += abs(rate.value - 2 / 3) <= half
    assert hits / draws > 0.95 - 3 * math.sqrt(0.05 * 0.95 / draws) - 0.02
    assert naive_hits / draws < 0.85


def test_prompts_count_alike_whatever_their_trajectories():
    rewards = np.array([[1.0]] * 9 + [[0.0]])
    (rate,) = verification_at_k(rewards, group_ids=[0] * 9 + [1])
    assert rate.value == 0.5


def test_all_solved_is_no_certainty():
    (rate,) = verification_at_k(np.ones((10, 1)), group_ids=np.arange(10))
    assert (rate.value, rate.high) == (1.0, 1.0)
    assert rate.low == pytest.approx(0.025 ** (1 / 10))
    (rate,) = verification_at_k(np.zeros((10, 1)), group_ids=np.arange(10))
    assert rate.high == pytest.approx(1 - 0.025 ** (1 / 10))


def test_equal_rates_are_no_certainty_either():
    (_, rate) = verification_at_k(np.array([[0, 1], [0, 0]] * 2), group_ids=[0, 0, 1, 1])
    assert (rate.value, rate.standard_error) == (0.5, 0.0)
    assert rate.low < 0.05
    assert rate.high > 0.95


def test_it_is_not_pass_at_k():
    """Independent samples of the first attempt would give another number where the context matters."""
    rewards = np.array([[0, 1]] * 6 + [[0, 0]] * 2)
    second = verification_at_k(rewards, ks=[2], group_ids=np.arange(8))[0].value
    assert second == 0.75  # pass@2 of the first attempts is 0


def test_bad_requests_are_sentences():
    rewards = np.array([[1, NAN], [0, 1]])
    with pytest.raises(ValueError, match="ks must be from 1 to 2"):
        verification_at_k(rewards, ks=[3], group_ids=[0, 1])
    with pytest.raises(ValueError, match="ks must be from 1 to 2"):
        verification_at_k(rewards, ks=np.array([1, 3]), group_ids=[0, 1])
    with pytest.raises(ValueError, match="no trajectories"):
        verification_at_k(np.zeros((0, 2)), group_ids=[])
    with pytest.raises(ValueError, match="interval must be"):
        verification_at_k(rewards, group_ids=[0, 1], interval="wald")
    with pytest.raises(ValueError, match="comes after a success"):
        verification_at_k(np.array([[1, 1]]), group_ids=[0])
    with pytest.warns(UserWarning, match="one prompt says nothing about others"):
        (rate, _) = verification_at_k(rewards, group_ids=[0, 0])
    assert math.isnan(rate.standard_error)
    assert math.isnan(rate.low)
