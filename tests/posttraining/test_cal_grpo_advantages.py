"""Advantages of attempts: identities, limits, invariances and refusals."""

import math
import warnings

import numpy as np
import pytest
import torch

from cameraready.posttraining.cal_grpo import RunningRates, attempt_advantages, attempt_weights, spread_to_tokens
from cameraready.posttraining.cal_grpo.attempts import later_failures

NAN = math.nan
METHODS = ("cal", "naive", "trajectory")
#: Four trajectories of at most three attempts: solved at 1, at 2, at 3, never.
FOUR = np.array([[1, NAN, NAN], [0, 1, NAN], [0, 0, 1], [0, 0, 0]])


def drawn(rng, groups=5, n=6, attempts=3, rates=(0.3, 0.4, 0.5)):
    """Random trajectories (groups * n, attempts) and their groups."""
    p = np.asarray(rates)[:attempts]
    rewards = (rng.random((groups * n, attempts)) < p).astype(float)
    before = np.cumsum(rewards, axis=1) - rewards
    rewards[before > 0] = NAN
    return rewards, np.repeat(np.arange(groups), n)


# --- closed forms ------------------------------------------------------------------------------------------------------


def test_weights_and_advantages_of_four_trajectories_by_hand():
    # n = (4, 3, 2), c = (1, 1, 1): p = (1/4, 1/3, 1/2), w = (2/3 * 1/2, 1/2, 1).
    np.testing.assert_allclose(attempt_weights(FOUR), np.tile([1 / 3, 1 / 2, 1], (4, 1)))
    found = attempt_advantages(FOUR)
    expected = np.array(
        [
            [1 / 3 * 1, NAN, NAN],
            [1 / 3 * (0 - 1 / 3), 1 / 2 * 1, NAN],
            [1 / 3 * (0 - 1 / 3), 1 / 2 * (0 - 1 / 2), 1.0],
            [1 / 3 * (0 - 1 / 3), 1 / 2 * (0 - 1 / 2), -1.0],
        ]
    )
    np.testing.assert_allclose(found, expected)
    np.testing.assert_allclose(attempt_advantages(FOUR, method="naive"), expected / [1 / 3, 1 / 2, 1])
    outcome = np.array([1 - 2 / 3, 1 - 2 / 3, 1 - 2 / 3, 0 - 1])
    np.testing.assert_allclose(
        attempt_advantages(FOUR, method="trajectory"), np.where(np.isnan(FOUR), NAN, outcome[:, None])
    )


def test_self_included_baseline_shrinks_by_n_less_one_over_n():
    rewards, groups = drawn(np.random.default_rng(0))
    loo, mean = (attempt_advantages(rewards, group_ids=groups, method="naive", baseline=b) for b in ("loo", "mean"))
    n = np.stack([(~np.isnan(rewards))[groups == g].sum(0) for g in range(5)])[groups]
    np.testing.assert_allclose(
        np.where(n > 1, loo * (n - 1) / n, 0.0)[~np.isnan(rewards)], mean[~np.isnan(rewards)], atol=1e-12
    )


@pytest.mark.parametrize("seed", range(5))
def test_weights_telescope(seed):
    rewards, groups = drawn(np.random.default_rng(seed))
    weights = attempt_weights(rewards, group_ids=groups)
    reached = ~np.isnan(rewards)
    for g in range(5):
        own = groups == g
        n, c = reached[own].sum(0), np.nansum(rewards[own], axis=0)
        fail = (np.nansum(rewards[own], axis=1) == 0).sum()
        ok = n > c
        np.testing.assert_allclose(weights[own][0][ok], fail / (n - c)[ok])


@pytest.mark.parametrize("seed", range(5))
def test_pathwise_identity_of_outcome_and_attempts(seed):
    """R - V_k = w_k (r_k - p_k) + (1 - r_k) (R - F_{k+1}) with F = 1 - w: for any probabilities."""
    rng = np.random.default_rng(seed)
    rewards, _ = drawn(rng)
    p = rng.random(3)
    w = later_failures(p)
    v = p + (1 - p) * (1 - w)
    solved = np.nansum(rewards, axis=1)[:, None]
    cal = attempt_advantages(rewards, weights=w, baseline=p)
    rest = (1 - rewards) * (solved - (1 - w))
    reached = ~np.isnan(rewards)
    np.testing.assert_allclose((solved - v)[reached], (cal + rest)[reached], atol=1e-12)


def test_lam_joins_calibrated_and_outcome():
    rewards, groups = drawn(np.random.default_rng(1))
    by = {lam: attempt_advantages(rewards, group_ids=groups, lam=lam) for lam in (0.0, 0.3, 1.0)}
    np.testing.assert_allclose(by[0.3], 0.7 * by[0.0] + 0.3 * by[1.0])
    # At 1: the outcome less that of the others who reached the attempt.
    for i, k in [(0, 0), (7, 1), (13, 1)]:
        if np.isnan(rewards[i, k]):
            continue
        others = (groups == groups[i]) & ~np.isnan(rewards[:, k]) & (np.arange(30) != i)
        solved = np.nansum(rewards, axis=1)
        assert by[1.0][i, k] == pytest.approx(solved[i] - (solved[others].mean() if others.any() else 0))


# --- limits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("baseline", ["loo", "mean"])
def test_one_attempt_makes_all_methods_one(baseline):
    rewards, groups = drawn(np.random.default_rng(2), attempts=1)
    first, *others = (attempt_advantages(rewards, group_ids=groups, method=m, baseline=baseline) for m in METHODS)
    for other in others:
        np.testing.assert_allclose(first, other)


@pytest.mark.parametrize("method", METHODS)
def test_groups_that_all_fail_or_all_solve_at_once_teach_nothing(method):
    fail = attempt_advantages(np.zeros((5, 3)), method=method)
    np.testing.assert_array_equal(fail, 0.0)
    solved = attempt_advantages(np.array([[1, NAN, NAN]] * 5), method=method)
    np.testing.assert_array_equal(solved[:, 0], 0.0)


def test_solved_groups_train_naively_but_not_calibrated():
    rewards = np.array([[1, NAN], [1, NAN], [0, 1], [0, 1]])
    assert (attempt_advantages(rewards, method="naive")[:, 0] != 0).all()
    for method in ("cal", "trajectory"):
        np.testing.assert_array_equal(np.nan_to_num(attempt_advantages(rewards, method=method)), 0.0)


def test_a_lone_success_at_the_last_attempt_keeps_its_credit():
    """Not zero, though all are solved: zeroing it would bias late attempts."""
    found = attempt_advantages(np.array([[1, NAN], [1, NAN], [0, 1]]))
    np.testing.assert_array_equal(np.nan_to_num(found), [[0, 0], [0, 0], [0, 1]])
    found = attempt_advantages(np.array([[1, NAN], [1, NAN], [0, 1]]), baseline="mean")
    np.testing.assert_array_equal(np.nan_to_num(found), 0.0)


def test_naive_can_point_the_other_way():
    """A parameter shared by both attempts that raises p_1 and lowers p_2: V@2 falls where the naive gradient rises."""
    p, slope, reach = np.array([0.2, 0.9]), np.array([1.0, -0.5]), np.array([1.0, 0.8])
    naive, exact = (reach * slope).sum(), (reach * later_failures(p) * slope).sum()
    step = 1e-6
    numeric = (np.prod(1 - p) - np.prod(1 - p - step * slope)) / step
    assert exact == pytest.approx(numeric, rel=1e-4)
    assert exact < 0 < naive


# --- the corner 0/0 ----------------------------------------------------------------------------------------------------


def test_where_nobody_went_on_other_groups_stand_in():
    alone = np.array([[1, NAN, NAN], [1, NAN, NAN], [1, NAN, NAN], [0, 1, NAN]])
    others = np.array([[0, 0, 1], [0, 0, 0], [0, 0, 0], [0, 0, 0]])
    rewards, groups = np.concatenate([alone, others]), np.repeat([0, 1], 4)
    assert attempt_weights(rewards, group_ids=groups)[3, 1] == pytest.approx(3 / 4)
    assert attempt_advantages(rewards, group_ids=groups)[3, 1] == pytest.approx(3 / 4)
    # Without any other group: the rate of all attempts, 4 of 5.
    assert attempt_weights(alone)[3, 1] == pytest.approx(1 / 5)
    # Pools keep independent runs apart.
    assert attempt_weights(rewards, group_ids=groups, pool_ids=groups)[3, 1] == pytest.approx(1 / 5)


# --- truncation --------------------------------------------------------------------------------------------------------


def test_a_trajectory_cut_off_counts_until_it_was_cut():
    rewards = np.array([[0, NAN, NAN], [0, 1, NAN], [0, 0, 1], [0, 0, 0]])
    # n = (4, 3, 2), c = (0, 1, 1): the first was cut at attempt 1. Product form: w_1 = (1 - 1/3)(1 - 1/2).
    np.testing.assert_allclose(attempt_weights(rewards)[0], [1 / 3, 1 / 2, 1])
    assert attempt_advantages(rewards, method="trajectory")[0, 0] == pytest.approx(-2 / 3)


def test_a_trajectory_without_any_attempt_counts_nowhere():
    with_it = np.vstack([FOUR, [[NAN] * 3]])
    for method in METHODS:
        found = attempt_advantages(with_it, method=method)
        np.testing.assert_allclose(found[:4], attempt_advantages(FOUR, method=method))
        assert np.isnan(found[4]).all()


# --- invariances -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"method": "naive"}, {"method": "trajectory"}, {"lam": 0.5}, {"scale": "group"}, {"scale": "batch"}]
)
def test_order_of_trajectories_and_names_of_groups_do_not_matter(options):
    rng = np.random.default_rng(3)
    rewards, groups = drawn(rng)
    found = attempt_advantages(rewards, group_ids=groups, **options)
    order = rng.permutation(len(rewards))
    names = np.array(["q", "a", "z", "b", "m"])[groups]
    np.testing.assert_allclose(attempt_advantages(rewards[order], group_ids=names[order], **options), found[order])


def test_groups_do_not_touch_one_another_unless_they_lack_data():
    rewards, groups = drawn(np.random.default_rng(4), n=12)
    together = attempt_advantages(rewards, group_ids=groups)
    for g in range(5):
        np.testing.assert_allclose(together[groups == g], attempt_advantages(rewards[groups == g]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("method", METHODS)
def test_tensors_and_arrays_agree(method, dtype):
    rewards, groups = drawn(np.random.default_rng(5))
    found = attempt_advantages(torch.tensor(rewards, dtype=dtype), group_ids=torch.tensor(groups), method=method)
    assert found.dtype == dtype
    expected = torch.tensor(attempt_advantages(rewards, group_ids=groups, method=method))
    torch.testing.assert_close(found.double(), expected.to(dtype).double(), equal_nan=True, rtol=0, atol=0)


def test_reached_and_nan_say_the_same():
    rewards, groups = drawn(np.random.default_rng(6))
    reached = ~np.isnan(rewards)
    filled = np.where(reached, rewards, 0).astype(int)
    found = attempt_advantages(filled, reached, groups)
    assert found.dtype == np.float64
    np.testing.assert_array_equal(found, attempt_advantages(rewards, group_ids=groups))


def test_one_scale_for_all_attempts_of_a_group():
    rewards, groups = drawn(np.random.default_rng(7), rates=(0.2, 0.2, 0.2))
    plain, scaled = (attempt_advantages(rewards, group_ids=groups, scale=s) for s in (None, "group"))
    for g in range(5):
        own = groups == g
        spread = np.nansum(rewards[own], axis=1).std(ddof=1)
        np.testing.assert_allclose(scaled[own] * (spread + 1e-4 if spread else 1.0), plain[own])


def test_outcome_with_a_mean_and_a_scale_is_the_formula_of_grpo():
    rewards, groups = drawn(np.random.default_rng(8))
    found = attempt_advantages(rewards, group_ids=groups, method="trajectory", baseline="mean", scale="group")
    outcomes = torch.tensor(np.nansum(rewards, axis=1)).view(5, 6)
    grpo = (outcomes - outcomes.mean(1, keepdim=True)) / (outcomes.std(1, keepdim=True) + 1e-4)
    np.testing.assert_allclose(found[:, 0], grpo.flatten().numpy(), atol=1e-12)


# --- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rewards", "words"),
    [
        ([[1, 0]], "attempt 2 of trajectory 0 comes after a success"),
        ([[0, NAN, NAN], [0, 1, 1]], "attempt 3 of trajectory 1 comes after a success"),
        ([[0.9999, NAN]], r"attempt 1 of trajectory 0 \(0.9999\) is neither 0 nor 1"),
        ([[0.5]], "neither 0 nor 1"),
        ([[-1.0]], "neither 0 nor 1"),
        ([[np.inf]], "neither 0 nor 1"),
        ([[0, NAN, 1]], "attempt 3 of trajectory 0 was made though the one before it was not"),
        ([0.0, 1.0], "one outcome a trajectory is rewards"),
        (np.zeros((3, 0)), "no attempts"),
    ],
)
def test_what_cannot_be_a_verdict_is_refused(rewards, words):
    with pytest.raises(ValueError, match=words):
        attempt_advantages(np.array(rewards, dtype=float))


def test_nan_where_reached_is_refused():
    with pytest.raises(ValueError, match="attempt 2 of trajectory 0 is NaN though the attempt was made"):
        attempt_advantages(np.array([[0.0, NAN]]), np.array([[True, True]]))
    with pytest.raises(TypeError, match="numbers or booleans"):
        attempt_advantages(np.array([["right"]]))


def test_a_float32_one_is_a_success():
    rewards = np.array([[np.float32(1 - 6e-8), NAN], [0, 0]], dtype=np.float32)
    found = attempt_advantages(rewards)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, attempt_advantages(np.array([[1, NAN], [0, 0]])).astype(np.float32))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "vanilla"}, "method must be one of 'cal', 'naive', 'trajectory'"),
        ({"lam": 2.0}, "lam must be from 0"),
        ({"lam": 0.5, "method": "naive"}, "has no meaning for 'naive'"),
        ({"weights": "ema"}, "pass rates=RunningRates"),
        ({"weights": np.ones(4)}, r"weights must be \(K,\) or \(T, K\)"),
        ({"weights": [2.0, 1.0, 1.0]}, "from 0 to 1"),
        ({"baseline": "median"}, "baseline must be one of"),
        ({"baseline": [0.1, 0.1, 0.1], "lam": 0.5}, "'loo' and 'mean' only"),
        ({"scale": "attempt"}, "scale must be one of"),
        ({"group_ids": [0, 1]}, "group_ids must say for each of the 4 trajectories"),
        ({"reached": np.ones((4, 2), dtype=bool)}, "reached must have the shape of rewards"),
        ({"weights": "ema", "rates": RunningRates(2)}, "rates is for 2 attempts"),
        ({"weights": "ema", "rates": RunningRates(3), "keys": ["a"]}, "keys must name the prompt of each of the 4"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        attempt_advantages(FOUR, **options)


def test_groups_of_one_are_warned_about():
    with pytest.warns(UserWarning, match="1 of 1 groups have a single trajectory"):
        found = attempt_advantages(np.array([[0.0, 1.0]]))
    assert found[0, 1] == 1.0  # baseline 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attempt_advantages(np.array([[0.0, 1.0]]), weights=[0.5, 1.0], baseline=[0.5, 0.5])
    with pytest.warns(UserWarning, match="single trajectory"):
        attempt_advantages(np.array([[0.0, 1.0]]), method="trajectory")


def test_groups_may_be_named_by_anything():
    rewards = np.array([[1.0], [0.0], [1.0], [0.0]])
    names = np.array(["a", 1, "a", 1], dtype=object)
    np.testing.assert_array_equal(
        attempt_advantages(rewards, group_ids=names), attempt_advantages(rewards, group_ids=[0, 1, 0, 1])
    )


def test_no_trajectories_give_no_advantages():
    assert attempt_advantages(np.zeros((0, 3))).shape == (0, 3)
    assert attempt_weights(torch.zeros(0, 2)).shape == (0, 2)


# --- tokens ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", [np.asarray, torch.as_tensor])
def test_each_token_gets_its_attempts_advantage(library):
    advantages = library(np.array([[0.5, NAN], [-0.25, 2.0]]))
    ids = library(np.array([[-1, 0, 0, -3, -3, -3], [-1, 0, -2, -2, 1, 1]]))
    found = spread_to_tokens(advantages, ids)
    assert type(found) is type(advantages)
    np.testing.assert_array_equal(np.asarray(found), [[0, 0.5, 0.5, 0, 0, 0], [0, -0.25, 0, 0, 2, 2]])


def test_tokens_without_an_advantage_are_refused():
    with pytest.raises(ValueError, match="token 1 of trajectory 0 belongs to attempt 1, which has no advantage"):
        spread_to_tokens(np.array([[0.5, NAN]]), np.array([[0, 1]]))
    with pytest.raises(ValueError, match="go up to 2, but there are advantages of 2"):
        spread_to_tokens(np.array([[0.5, 0.1]]), np.array([[0, 2]]))
    with pytest.raises(ValueError, match="equal T"):
        spread_to_tokens(np.array([[0.5, 0.1]]), np.array([[0], [1]]))
    with pytest.raises(ValueError, match="must be integers"):
        spread_to_tokens(np.array([[0.5, 0.1]]), np.array([[0.0]]))


# --- running rates -----------------------------------------------------------------------------------------------------


def test_running_rates_find_the_probabilities():
    rng = np.random.default_rng(9)
    rates = RunningRates(3, decay=0.99)
    for _ in range(400):
        rewards, _ = drawn(rng, groups=2, n=16)
        rates.update(rewards, keys=["a", "b"] * 16)
    np.testing.assert_allclose(rates.rates([None])[0], (0.3, 0.4, 0.5), atol=0.03)
    np.testing.assert_allclose(rates.weights(["a"])[0], later_failures(np.array([0.3, 0.4, 0.5])), atol=0.06)


def test_a_prompt_is_drawn_towards_all_and_leaves_them_with_its_own_data():
    rates = RunningRates(1, decay=0.5, prior=2.0)
    rates.update(np.ones((4, 1)), keys=["easy"] * 4)
    rates.update(np.zeros((4, 1)), keys=["hard"] * 4)
    # All: (0.5 * 4 + 0) / (0.5 * 4 + 4) = 1/3; easy: (4 + 2/3) / 6.
    np.testing.assert_allclose(rates.rates(["easy", "hard", "new"])[:, 0], [(4 + 2 / 3) / 6, (2 / 3) / 6, 1 / 3])


def test_rates_before_any_data_leave_the_group_in_charge():
    rates = RunningRates(3)
    assert np.isnan(rates.rates(["x"])).all()
    np.testing.assert_allclose(attempt_advantages(FOUR, weights="ema", rates=rates), attempt_advantages(FOUR))


def test_rates_come_back_from_their_state():
    import json

    rates = RunningRates(3, decay=0.8, prior=1.5)
    rates.update(FOUR, keys=["a", "a", "b", None])
    other = RunningRates(3)
    other.load_state_dict(json.loads(json.dumps(rates.state_dict())))
    np.testing.assert_array_equal(rates.rates(["a", "b", "c"]), other.rates(["a", "b", "c"]))
    with pytest.raises(ValueError, match="is for 3 attempts"):
        RunningRates(2).load_state_dict(rates.state_dict())
    for bad in ({"attempts": 0}, {"attempts": 2.5}, {"attempts": 2, "decay": 1.0}, {"attempts": 2, "prior": 0.0}):
        with pytest.raises(ValueError, match="must be"):
            RunningRates(**bad)


def test_lists_of_unequal_length_are_told_to_be_padded():
    with pytest.raises(ValueError, match=r"rows of 1 to 2 attempts: pad with NaN"):
        attempt_advantages([[1], [0, 1]])
    assert np.isnan(attempt_advantages([[1, float("nan")], [0, 1]])[0, 1])
