"""The enumeration against brute force and sampling, and what it says of the estimators."""

import itertools
import warnings

import numpy as np
import pytest

from cameraready.posttraining.cal_grpo import attempt_advantages
from cameraready.posttraining.cal_grpo.attempts import later_failures
from cameraready.posttraining.cal_grpo.experiment.gradient import exact_gradient, moments, patterns

TWO_TRIES = np.array([[0.3, 0.4, 0.3], [0.5, 0.25, 0.25]])
THREE = np.array([[0.2, 0.5, 0.3], [0.4, 0.1, 0.5], [0.3, 0.3, 0.4]])


def estimator(probabilities=None, **options):
    if options.get("weights") == "known":
        options["weights"] = later_failures(probabilities[:, 0])

    def made(rewards, groups):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Every group is enumerated by itself: no other stands in for it.
            return attempt_advantages(rewards, group_ids=groups, pool_ids=groups, **options)

    return made


def brute_force(probabilities, n, made):
    """Mean (K, M) and second moments by listing every group of answers, one by one."""
    attempts, answers = probabilities.shape
    ways = []
    for length in range(1, attempts + 1):
        for wrong in itertools.product(range(1, answers), repeat=length - 1):
            last = [0] if length < attempts else range(answers)
            ways += [(*wrong, a) for a in last]
    chance = np.array([np.prod([probabilities[k, a] for k, a in enumerate(way)]) for way in ways])
    assert chance.sum() == pytest.approx(1)
    mean, square, shared = 0.0, 0.0, 0.0
    total = 0.0
    for group in itertools.product(range(len(ways)), repeat=n):
        rewards = np.full((n, attempts), np.nan)
        for i, which in enumerate(group):
            for k, a in enumerate(ways[which]):
                rewards[i, k] = float(a == 0)
        advantages = made(rewards, np.zeros(n, dtype=int))
        gradient = np.zeros((attempts, answers))
        for i, which in enumerate(group):
            for k, a in enumerate(ways[which]):
                gradient[k] += advantages[i, k] * (np.eye(answers)[a] - probabilities[k]) / n
        weight = np.prod(chance[list(group)])
        mean, square = mean + weight * gradient, square + weight * (gradient**2).sum(axis=1)
        shared, total = shared + weight * (gradient.sum(axis=0) ** 2).sum(), total + weight
    assert total == pytest.approx(1)
    return mean, square - (mean**2).sum(axis=1), shared - (mean.sum(axis=0) ** 2).sum()


@pytest.mark.parametrize(
    "options", [{}, {"method": "naive"}, {"method": "trajectory"}, {"lam": 0.4}, {"baseline": "mean"}]
)
def test_moments_are_those_of_brute_force(options):
    made = estimator(**options)
    found = moments(TWO_TRIES, 3, made)
    mean, variances, shared = brute_force(TWO_TRIES, 3, made)
    np.testing.assert_allclose(found.mean, mean, atol=1e-12)
    np.testing.assert_allclose(found.variances, variances, atol=1e-12)
    assert found.shared == pytest.approx(shared, abs=1e-12)


def test_moments_are_those_of_sampling():
    made = estimator()
    rng = np.random.default_rng(0)
    n, groups = 16, 20_000
    found = moments(THREE, n, made)
    answers = np.stack([(rng.random((groups * n, 1)) > np.cumsum(p)[None, :-1]).sum(1) for p in THREE], axis=1)
    rewards = (answers == 0).astype(float)
    rewards[np.cumsum(rewards, axis=1) - rewards > 0] = np.nan
    advantages = np.nan_to_num(made(rewards, np.repeat(np.arange(groups), n)))
    scores = np.eye(3)[answers] - THREE
    gradients = (advantages[..., None] * scores).reshape(groups, n, 3, 3).mean(axis=1)
    deviation = gradients.std(axis=0) / np.sqrt(groups)
    assert (np.abs(gradients.mean(axis=0) - found.mean) < 4.5 * deviation).all()
    np.testing.assert_allclose(gradients.var(axis=0).sum(axis=1), found.variances, rtol=0.05)


def test_exact_gradient_is_the_slope_of_verification():
    logits = np.log(THREE)

    def verified(values):
        p = np.exp(values) / np.exp(values).sum(axis=1, keepdims=True)
        return 1 - np.prod(1 - p[:, 0])

    step = 1e-6
    for k, m in itertools.product(range(3), range(3)):
        shifted = logits.copy()
        shifted[k, m] += step
        numeric = (verified(shifted) - verified(logits)) / step
        assert exact_gradient(THREE)[k, m] == pytest.approx(numeric, abs=1e-6)


def test_variances_of_the_first_attempt_of_a_small_example():
    """(0.3, 0.4, 0.3) then 0.5, N = 4: 0.0464, 0.0375, 0.0218, 0.0094, the right answer having 0.3."""
    arms = {
        "trajectory": {"method": "trajectory"},
        "naive": {"method": "naive"},
        "cal": {},
        "known": {"weights": "known"},
    }
    found = {name: moments(TWO_TRIES, 4, estimator(TWO_TRIES, **options)) for name, options in arms.items()}
    first = {name: moment.variances[0] for name, moment in found.items()}
    assert first == pytest.approx({"trajectory": 0.046375, "naive": 0.0375, "cal": 0.021775, "known": 0.009375})
    np.testing.assert_allclose(found["naive"].mean[0], 2 * found["naive"].exact[0])
    np.testing.assert_allclose(found["naive"].mean[1], found["naive"].exact[1])


@pytest.mark.parametrize("probabilities", [TWO_TRIES, THREE])
@pytest.mark.parametrize("n", [2, 4, 8])
def test_known_weights_and_outcomes_are_unbiased_and_naive_is_by_one_over_w(probabilities, n):
    for options in ({"weights": "known"}, {"method": "trajectory"}, {"lam": 1.0}):
        assert moments(probabilities, n, estimator(probabilities, **options)).bias < 1e-12
    naive = moments(probabilities, n, estimator(probabilities, method="naive"))
    w = later_failures(probabilities[:, 0])
    np.testing.assert_allclose(naive.mean, naive.exact / w[:, None], atol=1e-12)


def test_group_weights_are_biased_only_where_a_lone_trajectory_succeeds():
    """The corner 0/0: without other groups to stand in, the rate of all attempts does, which is not w."""
    found = {n: moments(THREE, n, estimator()).relative_bias for n in (2, 3, 4, 8, 16)}
    assert found[2] > found[3] > found[4] > found[8] > found[16]
    assert found[4] < 0.05
    assert found[16] < 1e-3
    # With two attempts there is no such corner but at the last, whose weight is 1.
    assert moments(TWO_TRIES, 2, estimator()).bias < 1e-12


def test_at_two_answers_calibration_by_the_group_is_the_outcome():
    two = np.array([[0.3, 0.7], [0.5, 0.5]])
    cal, outcome = (moments(two, 4, estimator(**o)).variances[0] for o in ({}, {"method": "trajectory"}))
    assert cal == pytest.approx(outcome)
    patterned = list(patterns(2))
    rewards = np.array([patterned[0], patterned[1], patterned[2], patterned[2]])
    # Score-weighted: over the four trajectories the two give the same gradient of the first attempt's logits.
    scores = np.where(np.nan_to_num(rewards[:, :1]) == 1, 0.7, -0.3)
    gradient = [
        (np.nan_to_num(attempt_advantages(rewards, **o))[:, :1] * scores).sum() for o in ({}, {"method": "trajectory"})
    ]
    assert gradient[0] == pytest.approx(gradient[1])
