"""The band's loss: equal to a loop over tokens, gradients only where no bound is active, and statistics counted by hand."""

import math

import pytest
import torch

from cameraready.posttraining.bandpo import band_bounds, band_policy_loss, clip_counts, token_losses


@pytest.fixture
def batch():
    g = torch.Generator().manual_seed(3)
    old = -torch.rand(6, 9, generator=g, dtype=torch.float64) * 6
    logps = (old + 0.5 * torch.randn(6, 9, generator=g, dtype=torch.float64)).clamp(max=-1e-3)
    advantages = torch.tensor([1.0, -1.0, 0.3, -2.0, 0.0, 1.5], dtype=torch.float64)
    mask = torch.rand(6, 9, generator=g) < 0.8
    mask[4] = False
    return {"logps": logps, "old_logps": old, "advantages": advantages, "mask": mask}


def by_hand(logps, old_logps, advantages, mask, lo, hi):
    """Loss of each counted token, by the definition."""
    for b, t in mask.nonzero().tolist():
        r, a = math.exp(logps[b, t] - old_logps[b, t]), advantages[b].item()
        yield b, t, max(-a * r, -a * min(max(r, lo[b, t].item()), hi[b, t].item()))


def test_the_loss_is_the_definition_summed_by_hand(batch):
    lo, hi = band_bounds(batch["old_logps"])
    tokens = list(by_hand(**batch, lo=lo, hi=hi))
    total = sum(loss for *_, loss in tokens)
    rows = [[loss for b, _, loss in tokens if b == row] for row in range(6)]
    for agg, arguments, expected in (
        ("token-mean", {}, total / len(tokens)),
        ("token-mean", {"total": 100}, total / 100),
        ("constant", {"total": 6 * 9}, total / 54),
        ("seq-mean-token-mean", {}, sum(sum(row) / len(row) for row in rows if row) / 6),
    ):
        loss, _ = band_policy_loss(**batch, lo=lo, hi=hi, agg=agg, **arguments)
        assert loss.item() == pytest.approx(expected, rel=1e-12)


def test_constant_bounds_are_plain_clipping(batch):
    loss, stats = band_policy_loss(**batch, lo=0.8, hi=1.28)
    ratio = (batch["logps"] - batch["old_logps"]).exp()
    a = batch["advantages"][:, None]
    plain = -torch.min(ratio * a, ratio.clamp(0.8, 1.28) * a)
    assert loss.item() == pytest.approx(plain[batch["mask"]].mean().item(), rel=1e-12)
    up = ((ratio > 1.28) & (a > 0))[batch["mask"]]
    down = ((ratio < 0.8) & (a < 0))[batch["mask"]]
    assert 0 < stats["clip_up"].item() == pytest.approx(up.double().mean().item())
    assert 0 < stats["clip_down"].item() == pytest.approx(down.double().mean().item())


def test_gradient_is_the_policy_gradient_where_no_bound_is_active_and_zero_elsewhere(batch):
    logps = batch["logps"].requires_grad_()
    old = batch["old_logps"].requires_grad_()
    lo, hi = band_bounds(old)
    loss, _ = band_policy_loss(**batch, lo=lo, hi=hi)
    loss.backward()
    ratio, a = (logps - old).exp().detach(), batch["advantages"][:, None]
    cut = ((a > 0) & (ratio > hi)) | ((a < 0) & (ratio < lo)) | ~batch["mask"]
    expected = torch.where(cut, 0.0, -a * ratio / batch["mask"].sum())
    torch.testing.assert_close(logps.grad, expected)
    assert bool(cut[batch["mask"]].any())
    assert old.grad is None


def test_bounds_that_carry_a_graph_get_no_gradient(batch):
    lo = torch.full((6, 9), 0.9, dtype=torch.float64, requires_grad=True)
    hi = torch.full((6, 9), 1.1, dtype=torch.float64, requires_grad=True)
    logps = batch["logps"].requires_grad_()
    loss, _ = band_policy_loss(**batch, lo=lo, hi=hi)
    loss.backward()
    assert logps.grad.abs().sum() > 0
    assert lo.grad is None
    assert hi.grad is None


def test_a_ball_of_radius_zero_stops_gradients_that_would_go_on(batch):
    """At the old policy itself the first step is the policy gradient; beyond it, in the direction of A, nothing."""
    old = batch["old_logps"]
    lo, hi = band_bounds(old, delta=0)
    for shift, expected in ((0.01, 0.0), (-0.01, None)):
        moved = (old + shift * batch["advantages"].sign()[:, None]).requires_grad_()
        loss, _ = band_policy_loss(moved, old, batch["advantages"], batch["mask"], lo, hi)
        loss.backward()
        assert math.isfinite(loss.item())
        if expected is None:
            assert moved.grad.abs().sum() > 0
        else:
            assert moved.grad.abs().max() == expected


def test_statistics_by_old_probability_and_the_kl_estimate():
    p_old = torch.tensor([[0.005, 0.05, 0.3, 0.7, 0.95, 0.05]], dtype=torch.float64)
    ratio = torch.tensor([[1.5, 1.5, 0.5, 1.1, 1.01, 0.5]], dtype=torch.float64)
    advantage = torch.tensor([[1.0, 1.0, -1.0, 1.0, -1.0, 1.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1]])
    _, stats = band_policy_loss((p_old * ratio).log(), p_old.log(), advantage, mask, 0.8, 1.2)
    assert stats["tokens_by_p"].tolist() == [1, 2, 1, 1, 1]
    assert stats["clip_up_by_p"].tolist() == [1, 0.5, 0, 0, 0]
    # r = 0.5 with A > 0 is below the band, and its gradient is not cut.
    assert stats["clip_down_by_p"].tolist() == [0, 0, 1, 0, 0]
    assert (stats["clip_up"].item(), stats["clip_down"].item()) == pytest.approx((2 / 6, 1 / 6))
    assert stats["kl"].item() == pytest.approx((ratio - 1 - ratio.log()).mean().item())
    assert not any(value.requires_grad for value in stats.values())


def test_the_kl_estimate_is_unbiased_for_a_known_pair():
    g = torch.Generator().manual_seed(0)
    old, new = (torch.softmax(torch.randn(12, generator=g, dtype=torch.float64), 0) for _ in range(2))
    drawn = torch.multinomial(old, 200_000, replacement=True, generator=g)
    counts = clip_counts(
        new.log()[drawn][None],
        old.log()[drawn][None],
        torch.ones(1, 200_000),
        torch.ones(1, 200_000, dtype=torch.bool),
        0.8,
        1.2,
    )
    each = (new / old - 1 - (new / old).log())[drawn]
    exact = (old * (old / new).log()).sum().item()
    assert counts[:, 3].sum().item() / 200_000 == pytest.approx(exact, abs=4 * each.std().item() / 200_000**0.5)


def test_counts_add_up_over_micro_batches(batch):
    lo, hi = band_bounds(batch["old_logps"])
    values = (batch["logps"], batch["old_logps"], batch["advantages"][:, None].expand(6, 9), batch["mask"], lo, hi)
    parts = [clip_counts(*(value[part] for value in values)) for part in (slice(0, 2), slice(2, 6))]
    torch.testing.assert_close(parts[0] + parts[1], clip_counts(*values))


def test_masked_tokens_may_be_anything(batch):
    clean, stats = band_policy_loss(**batch, lo=0.8, hi=1.2)
    hole = ~batch["mask"]
    dirty = {**batch, "logps": batch["logps"].masked_fill(hole, torch.nan).requires_grad_()}
    dirty["old_logps"] = batch["old_logps"].masked_fill(hole, -torch.inf)
    loss, again = band_policy_loss(**dirty, lo=0.8, hi=1.2)
    loss.backward()
    assert loss.item() == clean.item()
    assert bool(torch.isfinite(dirty["logps"].grad).all())
    assert all(torch.equal(stats[name], again[name]) for name in ("clip_up", "clip_down", "kl", "tokens_by_p"))


def test_an_empty_mask_gives_a_zero_with_a_graph(batch):
    logps = batch["logps"].requires_grad_()
    nothing = torch.zeros_like(batch["mask"])
    loss, stats = band_policy_loss(logps, batch["old_logps"], batch["advantages"], nothing, 0.8, 1.2)
    loss.backward()
    assert loss.item() == 0
    assert logps.grad.abs().sum() == 0
    assert stats["clip_up"].item() == 0


def test_equal_rewards_teach_nothing(batch):
    logps = batch["logps"].requires_grad_()
    loss, _ = band_policy_loss(logps, batch["old_logps"], torch.zeros(6), batch["mask"], 0.8, 1.2)
    loss.backward()
    assert logps.grad.abs().sum() == 0


def test_ratios_do_not_overflow_and_the_dual_clip_limits_what_a_bad_token_pays():
    old, new = torch.tensor([[-80.0, -80.0]]), torch.tensor([[-0.1, -0.1]])
    advantage, mask = torch.tensor([-1.0]), torch.ones(1, 2)
    loss, _ = band_policy_loss(new, old, advantage, mask, 0.8, 1.2)
    assert loss.item() == pytest.approx(math.exp(20), rel=1e-5)
    loss, _ = band_policy_loss(new, old, advantage, mask, 0.8, 1.2, dual_clip=10)
    assert loss.item() == 10
    # A token that became impossible, A > 0: ratio exp(-20), and finite.
    loss, _ = band_policy_loss(
        torch.tensor([[-torch.inf, -1.0]]), torch.tensor([[-1.0, -1.0]]), -advantage, mask, 0.8, 1.2
    )
    assert loss.item() == pytest.approx(-0.5, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision_is_computed_in_float32(batch, dtype):
    old = batch["old_logps"].to(dtype)
    lo, hi = band_bounds(old)
    loss, _ = band_policy_loss(batch["logps"].to(dtype), old, batch["advantages"], batch["mask"], lo, hi)
    exact, _ = band_policy_loss(
        batch["logps"].to(dtype).double(), old.double(), batch["advantages"], batch["mask"], lo.double(), hi.double()
    )
    assert loss.item() == pytest.approx(exact.item(), rel=1e-5)


def test_token_losses_broadcast_over_seeds():
    g = torch.Generator().manual_seed(0)
    old = -torch.rand(3, 2, 4, 5, generator=g)
    new, advantage = old + 0.3 * torch.randn(3, 2, 4, 5, generator=g), torch.randn(3, 2, 4, 1, generator=g)
    lo, hi = band_bounds(old)
    together = token_losses(new, old, advantage, lo, hi)
    for s in range(3):
        torch.testing.assert_close(together[s], token_losses(new[s], old[s], advantage[s], lo[s], hi[s]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"agg": "mean"}, "agg must be one of"),
        ({"lo": 1.3}, "lo must be at most hi"),
        ({"lo": torch.full((6, 9), 1.3)}, "lo must be at most hi"),
        ({"hi": torch.full((6, 9), torch.nan)}, "neither may be NaN"),
        ({"lo": torch.ones(6, 1)}, "must have the shape of logps"),
        ({"advantages": torch.ones(5)}, "advantages must be"),
        ({"advantages": torch.full((6,), torch.nan)}, "rewards that are NaN"),
        ({"advantages": torch.full((6,), torch.inf)}, "infinite"),
        ({"logps": torch.full((6, 9), torch.nan)}, "logps holds NaN"),
        ({"old_logps": torch.full((6, 9), -torch.inf)}, "cannot have been sampled"),
        ({"dual_clip": 0.9}, "dual_clip"),
        ({"agg": "constant"}, "total"),
    ],
)
def test_mistakes_are_told(batch, change, message):
    with pytest.raises(ValueError, match=message):
        band_policy_loss(**{**batch, "lo": 0.8, "hi": 1.2, **change})
