"""Trajectory balance by enumeration: Proposition 4.1, the gradient at the sampling policy, the tilted policy as its minimiser."""

import math

import pytest
import torch

from cameraready.posttraining.paced import log_z_intercept, tb_loss

pytestmark = pytest.mark.torch
BETA = 0.05


def drawn(*shape, seed=0, scale=1.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture
def enumerated():
    """Two policies over all 40 texts of 6 prompts, and rewards: log pi_old, log pi, r."""
    old = torch.log_softmax(drawn(6, 40), -1)
    new = torch.log_softmax(old + drawn(6, 40, seed=1, scale=0.3), -1)
    reward = (torch.rand(6, 40, generator=torch.Generator().manual_seed(2)) < 0.3).double()
    return old, new, reward


@pytest.mark.parametrize("rewards", ["right or wrong", "any"])
def test_the_best_intercept_is_accuracy_over_beta_plus_divergence(enumerated, rewards):
    old, new, reward = enumerated
    reward = reward if rewards == "right or wrong" else drawn(6, 40, seed=5, scale=3.0)
    found = log_z_intercept(new, old, reward, BETA, probabilities=old.exp())
    expected = (old.exp() * reward).sum(-1) / BETA + (old.exp() * (old - new)).sum(-1)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-10)
    # It is where the derivative of the expected loss vanishes, so nothing else can be lower.
    log_z = found.clone().requires_grad_()
    squares, _ = tb_loss(new, old, reward, log_z[:, None], BETA, reduction="none")
    (old.exp() * squares).sum().backward()
    assert log_z.grad.abs().max() < 1e-10


def test_the_intercept_is_not_the_log_partition_of_the_tilted_policy():
    # One right text of probability 0.3, one wrong one; pi = pi_old.
    old = torch.tensor([0.3, 0.7], dtype=torch.float64).log()
    reward = torch.tensor([1.0, 0.0], dtype=torch.float64)
    assert BETA * log_z_intercept(old, old, reward, BETA, probabilities=old.exp()) == pytest.approx(0.3, abs=1e-12)
    assert BETA * torch.logsumexp(old + reward / BETA, 0) == pytest.approx(
        0.05 * math.log(0.7 + 0.3 * math.exp(20)), abs=1e-12
    )


def test_a_sampled_intercept_is_unbiased(enumerated):
    old, new, reward = enumerated
    n = 200_000
    picked = torch.multinomial(old[0].exp(), n, replacement=True, generator=torch.Generator().manual_seed(0))
    found = log_z_intercept(new[0, picked], old[0, picked], reward[0, picked], BETA)
    exact = log_z_intercept(new[0], old[0], reward[0], BETA, probabilities=old[0].exp())
    error = (reward[0, picked] / BETA + (old - new)[0, picked]).std() / math.sqrt(n)
    assert abs(found - exact) < 4 * error


def test_at_the_sampling_policy_the_gradient_is_reinforce_with_the_partition_as_baseline(enumerated):
    old, _, reward = enumerated
    logits = old.clone().requires_grad_()
    log_z = drawn(6, 1, seed=7, scale=5.0)
    squares, _ = tb_loss(torch.log_softmax(logits, -1), old, reward, log_z, BETA, reduction="none")
    (gradient,) = torch.autograd.grad((old.exp() * squares).sum(), logits)
    again = old.clone().requires_grad_()
    surrogate = (old.exp() * (reward - BETA * log_z) * torch.log_softmax(again, -1)).sum()
    (reinforce,) = torch.autograd.grad(surrogate, again)
    torch.testing.assert_close(gradient, -2 / BETA * reinforce, rtol=1e-10, atol=1e-10)
    # In expectation a baseline changes nothing: so it is the gradient of the expected reward.
    once_more = old.clone().requires_grad_()
    (exact,) = torch.autograd.grad((torch.softmax(once_more, -1) * reward).sum(), once_more)
    torch.testing.assert_close(gradient, -2 / BETA * exact, rtol=1e-9, atol=1e-9)


def test_the_tilted_policy_and_its_partition_make_the_loss_vanish_and_are_found(enumerated):
    old, _, reward = enumerated
    beta = 0.5
    log_z = torch.logsumexp(old + reward / beta, -1)
    tilted = old + reward / beta - log_z[:, None]
    loss, info = tb_loss(tilted, old, reward, log_z[:, None], beta)
    assert loss < 1e-24
    assert info.deltas.abs().max() < 1e-12
    # Newton-like minimisation from the old policy, over all texts, ends there: the fixed point is the tilted policy.
    logits, free = old.clone().requires_grad_(), torch.zeros(6, 1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [logits, free],
        lr=1.0,
        max_iter=400,
        tolerance_grad=1e-12,
        tolerance_change=1e-16,
        line_search_fn="strong_wolfe",
    )

    def closure():
        optimizer.zero_grad()
        value, _ = tb_loss(torch.log_softmax(logits, -1), old, reward, free, beta)
        value.backward()
        return value

    optimizer.step(closure)
    torch.testing.assert_close(torch.log_softmax(logits, -1), tilted, rtol=0, atol=1e-5)
    torch.testing.assert_close(free[:, 0], log_z, rtol=0, atol=1e-5)


def test_sums_over_masked_tokens_are_what_is_balanced():
    logp, old = drawn(3, 5), drawn(3, 5, seed=1)
    mask = torch.tensor([[1, 1, 0, 1, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1]])
    reward, log_z = torch.tensor([1.0, 0.0, 0.5]).double(), torch.tensor([2.0, 3.0, 4.0]).double()
    loss, info = tb_loss(logp, old, reward, log_z, BETA, mask)
    by_hand = log_z + (logp * mask).sum(1) - (old * mask).sum(1) - reward / BETA
    torch.testing.assert_close(loss, by_hand.square().mean())
    torch.testing.assert_close(info.deltas, by_hand)
    torch.testing.assert_close(info.scores, info.log_pf - info.log_rewards)
    normalised, _ = tb_loss(logp, old, reward, log_z, BETA, mask, length_normalize=True)
    shorter = log_z + ((logp - old) * mask).sum(1) / mask.sum(1) - reward / BETA
    torch.testing.assert_close(normalised, shorter.square().mean())
    plain, _ = tb_loss((logp * mask).sum(1), (old * mask).sum(1), reward, log_z, BETA)
    torch.testing.assert_close(plain, loss)


def test_what_is_masked_may_be_anything_and_gets_no_gradient():
    logp = drawn(2, 4)
    logp[0, 3], logp[1, 2] = -math.inf, math.nan
    logp.requires_grad_()
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 1]])
    loss, _ = tb_loss(logp, torch.zeros(2, 4).double(), torch.ones(2).double(), torch.zeros(2).double(), BETA, mask)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(logp.grad).all()
    assert (logp.grad[mask == 0] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_is_kept(dtype):
    loss, info = tb_loss(*torch.ones(2, 3, dtype=dtype), torch.ones(3), torch.ones(3), BETA)
    assert {loss.dtype, info.deltas.dtype} == {dtype}


def test_sequences_that_cannot_be_balanced_are_refused_or_left_out():
    logp = torch.tensor([-1.0, -math.inf, -2.0, -3.0], requires_grad=True)
    old, reward, log_z = (
        torch.full((4,), -1.0),
        torch.tensor([1.0, 1.0, math.nan, 0.0]),
        torch.zeros(4, requires_grad=True),
    )
    with pytest.raises(ValueError, match="1 of 4 rewards are NaN"):
        tb_loss(logp, old, reward, log_z, BETA)
    with pytest.raises(ValueError, match="log-probability under the policy in training"):
        tb_loss(logp, old, reward.nan_to_num(0.0), log_z, BETA)
    with pytest.raises(ValueError, match="under the policy that sampled"):
        tb_loss(old, logp.detach(), reward.nan_to_num(0.0), log_z, BETA)
    loss, info = tb_loss(logp, old, reward, log_z, BETA, nonfinite="exclude")
    loss.backward()
    alone, _ = tb_loss(logp.detach()[[0, 3]], old[[0, 3]], reward[[0, 3]], torch.zeros(2), BETA)
    torch.testing.assert_close(loss.detach(), alone)
    assert info.used.tolist() == [True, False, False, True]
    assert torch.isfinite(logp.grad).all()
    assert logp.grad[1] == logp.grad[2] == log_z.grad[1] == 0


@pytest.mark.parametrize("case", ["empty batch", "no tokens", "all left out"])
def test_nothing_to_balance_gives_a_zero_with_a_graph(case):
    n = 0 if case == "empty batch" else 2
    logp = torch.zeros(n, 3, requires_grad=True)
    mask = torch.zeros(n, 3) if case == "no tokens" else torch.ones(n, 3)
    reward = torch.full((n,), math.nan if case == "all left out" else 1.0)
    loss, _ = tb_loss(logp, torch.zeros(n, 3), reward, torch.zeros(n), BETA, mask, nonfinite="exclude")
    loss.backward()
    assert loss == 0
    assert (logp.grad == 0).all()


def test_the_residual_of_log_z_is_not_clipped():
    # Estimates beyond [0, 1] must pull back in proportion to how far out they are.
    log_z = torch.tensor([-30.0, 60.0], requires_grad=True)
    loss, _ = tb_loss(torch.zeros(2), torch.zeros(2), torch.tensor([0.0, 1.0]), log_z, BETA, reduction="sum")
    loss.backward()
    assert log_z.grad.tolist() == [-60.0, 80.0]


def test_weights_multiply_and_carry_no_gradient():
    logp, weights = (
        drawn(4).requires_grad_(),
        torch.tensor([0.0, 1.0, 2.0, 0.5], dtype=torch.float64, requires_grad=True),
    )
    zero = torch.zeros(4).double()
    each, _ = tb_loss(logp, zero, zero, zero, BETA, reduction="none")
    loss, _ = tb_loss(logp, zero, zero, zero, BETA, weights=weights)
    torch.testing.assert_close(loss, (each * weights).mean())
    loss.backward()
    assert weights.grad is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(2), torch.zeros(3), torch.zeros(2)), "must have one shape"),
        ((torch.zeros(2, 3, 4), torch.zeros(2, 3, 4), torch.zeros(2)), "axis of tokens"),
        ((torch.zeros(2), torch.zeros(2), torch.zeros(2)), "beta must be a positive"),
    ],
)
def test_misuse_is_explained(arguments, message):
    beta = 0.0 if "beta" in message else 0.1
    with pytest.raises(ValueError, match=message):
        tb_loss(*arguments, torch.zeros(()), beta)


def test_options_are_checked():
    two = torch.zeros(2)
    for options, message in (
        ({"mask": torch.ones(2)}, "mask goes with"),
        ({"length_normalize": True}, "per token"),
        ({"weights": torch.ones(3)}, "weights must have"),
        ({"reduction": "median"}, "reduction must be"),
        ({"nonfinite": "ignore"}, "nonfinite must be"),
    ):
        with pytest.raises(ValueError, match=message):
            tb_loss(two, two, two, two, 0.1, **options)


def test_half_precision_is_summed_in_float32():
    logp, old = (
        torch.full((1, 1000), -1.5, dtype=torch.bfloat16),
        torch.full((1, 1000), -1.5078125, dtype=torch.bfloat16),
    )
    loss, _ = tb_loss(logp, old, torch.ones(1), torch.zeros(1), BETA)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx((7.8125 - 20) ** 2, rel=1e-5)


@pytest.mark.parametrize("mode", ["raise", "exclude"])
def test_a_diverged_head_is_never_left_out_in_silence(mode):
    two = torch.zeros(2)
    with pytest.raises(ValueError, match="log_z of 1 of 2 sequences is not finite"):
        tb_loss(two, two, two, torch.tensor([0.0, math.nan]), BETA, nonfinite=mode)
    with pytest.raises(ValueError, match="weights of 2 of 2"):
        tb_loss(two, two, two, two, BETA, weights=two + math.nan, nonfinite=mode)
    with pytest.raises(ValueError, match="beta must be a positive"):
        log_z_intercept(two, two, two, math.nan)
