"""Scores against closed forms, limits, brute force, and the loss that they stand for."""

import itertools
import math

import pytest
import torch

from cameraready.lm.capkv import capkv_scores, greedy_scores, scores
from cameraready.lm.capkv.scores import greedy_gains, information, leverages, relevance
from cameraready.lm.capkv.selection import adaptive_positions, gathered, kept_positions, n_kept_of

pytestmark = pytest.mark.torch


def drawn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def pairs(batch=2, heads=4, kv_heads=2, length=40, size=8, dtype=torch.float64, seed=0):
    anchor = drawn(batch, heads, size, seed=seed, dtype=dtype)
    keys = drawn(batch, kv_heads, length, size, seed=seed + 1, dtype=dtype)
    values = drawn(batch, kv_heads, length, size, seed=seed + 2, dtype=dtype)
    return anchor, keys, values


def plainly(anchor, keys, values, tau, sigma, weigh, n_sink=0):
    """The definition, head by head, with an explicit inverse."""
    found = torch.zeros(keys.shape[:3], dtype=keys.dtype)
    groups = anchor.shape[1] // keys.shape[1]
    for row, head in itertools.product(range(keys.shape[0]), range(anchor.shape[1])):
        k, v = keys[row, head // groups, n_sink:], values[row, head // groups, n_sink:]
        w = weigh(k, anchor[row, head], tau)
        inverse = torch.linalg.inv(sigma**2 * torch.eye(v.shape[1], dtype=v.dtype) + (v.T * w) @ v)
        found[row, head // groups, n_sink:] += w * torch.einsum("td,de,te->t", v, inverse, v) / groups
    return found


def by_cosine(k, mu, tau):
    cosines = k @ mu / (k.norm(dim=1) * mu.norm())
    return torch.exp(tau * (cosines - cosines.max()))


def by_product(k, mu, tau):
    return torch.exp(tau * (k @ mu))


@pytest.mark.parametrize(("similarity", "weigh", "tau"), [("cosine", by_cosine, 5.0), ("inner", by_product, 0.7)])
@pytest.mark.parametrize("sigma", [1.0, 0.1])
def test_scores_are_those_of_the_definition(similarity, weigh, tau, sigma):
    given = pairs()
    found = capkv_scores(*given, tau=tau, sigma=sigma, similarity=similarity, n_sink=3)
    expected = plainly(*given, tau, sigma, weigh, n_sink=3)
    assert (found[..., :3] == torch.inf).all()
    torch.testing.assert_close(found[..., 3:], expected[..., 3:], rtol=1e-10, atol=1e-12)


def test_the_order_is_that_of_the_loss_when_one_token_is_taken_out():
    anchor, keys, values = pairs(batch=1, heads=1, kv_heads=1, length=60)
    weights, _, power, _ = relevance(
        anchor, keys, values, tau=5.0, sigma=1.0, similarity="cosine", n_sink=0, attention_mask=None
    )
    s = leverages(weights, values, power)[0, 0, 0]
    whole = information(weights, values, power)
    for i in range(60):
        without = weights.clone()
        without[..., i] = 0
        loss = (whole - information(without, values, power)).item()
        assert loss == pytest.approx(-0.5 * math.log1p(-s[i].item()), abs=1e-12)


def test_leverages_lie_in_the_unit_interval_and_add_up_to_the_effective_dimension():
    anchor, keys, values = pairs(length=200)
    weights, _, power, _ = relevance(
        anchor, keys, values, tau=3.0, sigma=2.0, similarity="cosine", n_sink=0, attention_mask=None
    )
    s = leverages(weights, values, power)
    assert (s >= 0).all()
    assert (s < 1).all()
    repeated = values.repeat_interleave(2, dim=1).unflatten(1, (2, 2))
    capacity = 4.0 * torch.eye(8, dtype=torch.float64) + torch.einsum(
        "bkgt,bkgtd,bkgte->bkgde", weights, repeated, repeated
    )
    effective = 8 - 4.0 * torch.linalg.inv(capacity).diagonal(dim1=-2, dim2=-1).sum(-1)
    torch.testing.assert_close(s.sum(-1), effective, rtol=1e-12, atol=1e-12)


def test_a_common_rotation_of_the_values_changes_nothing():
    anchor, keys, values = pairs()
    rotation = torch.linalg.qr(drawn(8, 8, seed=9)).Q
    torch.testing.assert_close(capkv_scores(anchor, keys, values @ rotation), capkv_scores(anchor, keys, values))


def test_much_noise_leaves_the_trace_rule_and_little_noise_the_pure_leverage():
    anchor, keys, values = pairs(batch=1, heads=1, kv_heads=1)
    weights = by_cosine(keys[0, 0], anchor[0, 0], 5.0)
    loud = capkv_scores(anchor, keys, values, sigma=1e4, n_sink=0)[0, 0] * 1e8
    torch.testing.assert_close(loud, weights * values[0, 0].square().sum(-1), rtol=1e-5, atol=0.0)
    quiet = capkv_scores(anchor, keys, values, sigma=1e-6, n_sink=0)
    assert quiet.sum().item() == pytest.approx(8, abs=1e-6)
    mixed = drawn(8, 8, seed=5)  # pure leverage does not see an invertible map of the values
    torch.testing.assert_close(
        capkv_scores(anchor, keys, values @ mixed, sigma=1e-6, n_sink=0), quiet, rtol=1e-5, atol=1e-8
    )


def test_without_sharpness_keys_and_anchor_do_not_matter():
    anchor, keys, values = pairs()
    torch.testing.assert_close(
        capkv_scores(anchor, keys, values, tau=0.0), capkv_scores(-3 * anchor, keys.flip(2), values, tau=0.0)
    )


def test_raw_products_that_would_overflow_give_the_limit():
    anchor, keys, values = pairs(batch=1, heads=1, kv_heads=1, dtype=torch.float32)
    found = capkv_scores(100 * anchor, keys, values, tau=5.0, similarity="inner", n_sink=0)
    assert found.isfinite().all()
    best = (keys[0, 0] @ anchor[0, 0]).argmax()
    assert found[0, 0].argmax() == best
    assert found[0, 0, best].item() == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits_are_accumulated_in_thirty_two(dtype):
    anchor, keys, values = (each.to(dtype) for each in pairs(length=300))
    found = capkv_scores(anchor, keys, values)
    assert found.dtype == torch.float32
    exact = capkv_scores(anchor.double(), keys.double(), values.double())
    torch.testing.assert_close(found[..., 4:].double(), exact[..., 4:], rtol=2e-4, atol=1e-6)


def test_values_of_very_large_norm_do_not_break_the_factor():
    anchor, keys, values = pairs(length=30, size=16, dtype=torch.float32)
    values[..., 0] *= 1e5
    values[..., 1:] *= 1e-2
    found = capkv_scores(anchor, keys, values)
    exact = capkv_scores(anchor.double(), keys.double(), values.double())
    assert found.isfinite()[..., 4:].all()
    torch.testing.assert_close(found[..., 4:].double(), exact[..., 4:], rtol=0.02, atol=1e-3)


def test_work_in_pieces_is_the_same(monkeypatch):
    given = pairs(length=100)
    whole = capkv_scores(*given)
    monkeypatch.setattr(scores, "CHUNK", 7)
    torch.testing.assert_close(capkv_scores(*given), whole)


def test_a_context_of_200000_tokens_needs_no_square_matrix():
    anchor, keys, values = pairs(batch=1, heads=2, kv_heads=1, length=200_000, size=4, dtype=torch.float32)
    found = capkv_scores(anchor, keys, values, n_sink=0)  # its square would take 160 GB
    assert 3.5 < found.sum() < 4


def test_padding_changes_no_score_of_a_real_token():
    anchor, keys, values = pairs(batch=1)
    alone = capkv_scores(anchor, keys, values)
    padded = [torch.cat([drawn(1, 2, 5, 8, seed=7), each], dim=2) for each in (keys, values)]
    mask = torch.tensor([[0] * 5 + [1] * 40])
    found = capkv_scores(anchor, *padded, attention_mask=mask)
    assert (found[..., :5] == -torch.inf).all()
    torch.testing.assert_close(found[..., 5:], alone)


def test_a_row_that_is_all_sinks_or_padding_has_no_other_scores():
    anchor, keys, values = pairs(batch=1, length=6)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1]])
    found = capkv_scores(anchor, keys, values, attention_mask=mask)
    assert found[0, 0].tolist() == [-math.inf] * 3 + [math.inf] * 3
    assert capkv_scores(anchor, keys[:, :, :0], values[:, :, :0]).shape == (1, 2, 0)


def test_raw_products_that_are_all_far_below_zero_give_the_trace_rule():
    anchor, keys, values = pairs(batch=1, heads=1, kv_heads=1, dtype=torch.float32)
    keys, anchor = -30 * keys.abs(), anchor.abs()
    found = capkv_scores(anchor, keys, values, tau=1.0, similarity="inner", n_sink=0)[0, 0]
    order = found.argsort(descending=True).tolist()
    logits = keys[0, 0] @ anchor[0, 0]
    assert order[0] == (logits + values[0, 0].square().sum(-1).log()).argmax()
    assert (found > 0).all()
    ranks = torch.stack([found.argsort().argsort(), logits.argsort().argsort()]).double()
    assert torch.corrcoef(ranks)[0, 1] > 0.8


def test_what_stands_in_padding_may_be_anything():
    anchor, keys, values = pairs(batch=1)
    mask = torch.ones(1, 40)
    mask[:, :6] = 0
    expected = capkv_scores(anchor, keys, values, attention_mask=mask)
    keys[:, :, :6], values[:, :, :6] = torch.nan, torch.inf
    torch.testing.assert_close(capkv_scores(anchor, keys, values, attention_mask=mask), expected)


# --- greedy -----------------------------------------------------------------------------------------------------------


def capacity_of(chosen, weights, values, sigma=1.0):
    """Mean over query heads of log det(1 + sum w v v^T / sigma^2), by torch's determinant."""
    v = values[list(chosen)]
    eye = torch.eye(v.shape[1], dtype=v.dtype)
    return sum(torch.logdet(eye + (v.T * w[list(chosen)]) @ v / sigma**2).item() for w in weights) / len(weights)


def weights_of(anchor, keys, values, sigma=1.0):
    weights, _, power, candidates = relevance(
        anchor, keys, values, tau=5.0, sigma=sigma, similarity="cosine", n_sink=0, attention_mask=None
    )
    return weights, power, candidates


@pytest.mark.parametrize("sigma", [1.0, 0.3])
def test_greedy_takes_what_adds_most_at_every_step(sigma):
    anchor, keys, values = pairs(batch=1, heads=2, kv_heads=1, length=25, size=5)
    weights, power, candidates = weights_of(anchor, keys, values, sigma)
    gains = greedy_gains(weights, values, power, candidates, 12)[0, 0]
    chosen, expected = [], {}
    for _ in range(12):
        now = capacity_of(chosen, weights[0, 0], values[0, 0], sigma) if chosen else 0.0
        gain = {
            i: capacity_of([*chosen, i], weights[0, 0], values[0, 0], sigma) - now for i in range(25) if i not in chosen
        }
        best = max(gain, key=gain.get)
        chosen.append(best)
        expected[best] = gain[best]
    assert gains.argsort(descending=True)[:12].tolist() == chosen
    for i, gain in expected.items():
        assert gains[i].item() == pytest.approx(gain, abs=1e-10)


def test_greedy_is_within_its_bound_of_the_best_set():
    shares = []
    for seed in range(10):
        anchor, keys, values = pairs(batch=1, heads=2, kv_heads=1, length=10, size=4, seed=10 * seed)
        values[0, 0, 5:] = values[0, 0, :5] + 0.01 * values[0, 0, 5:]  # near-duplicates
        weights, power, candidates = weights_of(anchor, keys, values)
        gains = greedy_gains(weights, values, power, candidates, 4)[0, 0]
        found = capacity_of(gains.argsort(descending=True)[:4].tolist(), weights[0, 0], values[0, 0])
        best = max(capacity_of(each, weights[0, 0], values[0, 0]) for each in itertools.combinations(range(10), 4))
        shares.append(found / best)
    assert min(shares) >= 1 - 1 / math.e
    assert max(shares) <= 1 + 1e-12


def test_greedy_does_not_spend_its_budget_on_copies():
    size = 6
    anchor = torch.ones(1, 1, size, dtype=torch.float64)
    values = torch.eye(size, dtype=torch.float64).repeat_interleave(10, dim=0)[None, None] * 3
    values[0, 0, :10] *= 4  # ten copies of what alone is worth most
    keys = torch.ones_like(values)
    topk = kept_positions(capkv_scores(anchor, keys, values, sigma=30.0, n_sink=0), size)[0, 0]
    greedy = kept_positions(greedy_scores(anchor, keys, values, size, sigma=1.0, n_sink=0), size)[0, 0]
    assert {i.item() // 10 for i in topk} == {0}
    assert sorted(i.item() // 10 for i in greedy) == list(range(size))


def test_greedy_in_single_precision_stays_close_over_many_steps():
    given = pairs(batch=1, length=400, size=16)
    single = greedy_scores(*(each.float() for each in given), 300)
    exact = greedy_scores(*given, 300)
    torch.testing.assert_close(single[..., 4:].double(), exact[..., 4:], rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("size", [1e3, 1e4])
def test_greedy_takes_the_same_of_values_of_large_norm(size):
    given = pairs(batch=1, heads=1, kv_heads=1, length=400, size=16)
    given = (*given[:2], size * given[2])
    single = kept_positions(greedy_scores(*(each.float() for each in given), 60), 60)[0, 0].tolist()
    # The definition: a fresh determinant for every candidate at every step.
    weights, values, _, _ = relevance(*given, tau=5.0, sigma=1.0, similarity="cosine", n_sink=4, attention_mask=None)
    capacity, chosen = torch.eye(16, dtype=torch.float64), [0, 1, 2, 3]
    for _ in range(56):
        inside = torch.einsum("td,de,te->t", values[0, 0], torch.linalg.inv(capacity), values[0, 0])
        gain = torch.log1p(weights[0, 0, 0] * inside)
        gain[chosen] = -torch.inf
        chosen.append(int(gain.argmax()))
        v = values[0, 0, chosen[-1]]
        capacity = capacity + weights[0, 0, 0, chosen[-1]] * torch.outer(v, v)
    assert len(set(single) & set(chosen)) >= 58


@pytest.mark.parametrize("options", [{"sigma": 1e-15}, {"similarity": "inner", "tau": 5.0}])
def test_greedy_stays_finite_where_the_noise_vanishes(options):
    anchor, keys, values = pairs(batch=1, heads=1, kv_heads=1, dtype=torch.float32)
    found = greedy_scores(30 * anchor, keys, values, 20, n_sink=0, **options)
    assert found.isfinite().all()
    assert kept_positions(found, 20).unique().numel() == 20


def test_greedy_leaves_padding_for_last_and_sinks_for_always():
    anchor, keys, values = pairs(batch=2, length=20)
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, :12] = 0
    found = greedy_scores(anchor, keys, values, 15, attention_mask=mask)
    kept = kept_positions(found, 15)
    assert {12, 13, 14, 15, 16, 17, 18, 19} <= set(kept[1, 0].tolist())
    assert {0, 1, 2, 3} <= set(kept[0, 0].tolist())
    alone = greedy_scores(anchor[1:], keys[1:, :, 12:], values[1:, :, 12:], 15)
    torch.testing.assert_close(found[1:, :, 12:], alone)


# --- selection ----------------------------------------------------------------------------------------------------------


def test_ties_go_to_the_earlier_token_and_positions_ascend():
    assert kept_positions(torch.tensor([[[1.0, 2.0, 1.0, 2.0, 1.0]]]), 3).tolist() == [[[0, 1, 3]]]
    with pytest.raises(ValueError, match="6 tokens cannot be kept of 5"):
        kept_positions(torch.zeros(1, 1, 5), 6)


def test_the_count_is_kvpresss_but_never_below_the_sinks():
    assert [n_kept_of(100, ratio, 4) for ratio in (0.5, 0.75, 0.9, 0.99)] == [
        50,
        25,
        9,
        4,
    ]  # 100 * (1 - 0.9) is 9.99...
    assert n_kept_of(3, 0.5, 4) == 3
    assert n_kept_of(10, 0.99, 0) == 1


def test_heads_share_a_budget_by_score_above_their_safeguard():
    found = drawn(2, 3, 50, seed=3)
    found[:, 0] += 3.0
    positions, valid = adaptive_positions(found, 10, safeguard=0.2)
    counts = valid.sum(-1)
    assert counts.sum(-1).tolist() == [30, 30]
    assert (counts >= 2).all()
    assert (counts[:, 0] > counts[:, 1]).all()
    for row, head in itertools.product(range(2), range(3)):
        kept = positions[row, head][valid[row, head]]
        best = found[row, head].argsort(descending=True)[: len(kept)].sort().values
        assert kept.tolist() == best.tolist()
    even, all_valid = adaptive_positions(found, 10, safeguard=1.0)
    assert all_valid.all()
    assert torch.equal(even, kept_positions(found, 10))


def test_eight_bit_floats_are_gathered_bit_by_bit():
    cached = drawn(1, 2, 6, 4, dtype=torch.float32).to(torch.float8_e4m3fn)
    positions = torch.tensor([[[0, 5], [2, 3]]])
    assert gathered(cached, positions).float().tolist() == gathered(cached.float(), positions).tolist()


# --- errors ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"tau": -1.0}, "tau is a sharpness"),
        ({"tau": math.nan}, "tau is a sharpness"),
        ({"tau": "5"}, "tau is a sharpness"),
        ({"sigma": 0.0}, "sigma is a standard deviation"),
        ({"sigma": 1e20}, "sigma is a standard deviation"),
        ({"similarity": "dot"}, "similarity is 'cosine' or 'inner'"),
        ({"n_sink": 1.5}, "n_sink is a number of tokens"),
        ({"attention_mask": torch.ones(2, 40).index_fill(1, torch.tensor([39]), 0)}, "padded on the left"),
        ({"attention_mask": torch.ones(2, 39)}, r"\(B, T\) = \(2, 40\)"),
    ],
)
def test_bad_options_are_refused_with_a_sentence(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        capkv_scores(*pairs(), **changes)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_numbers_that_are_none_are_named(which):
    given = list(pairs())
    given[which][..., -1] = torch.nan
    with pytest.raises(ValueError, match="hold NaN or infinity"):
        capkv_scores(*given)
    with pytest.raises(TypeError, match="mask is a tensor"):
        capkv_scores(*pairs(), attention_mask=[1] * 40)


def test_shapes_that_do_not_fit_are_named():
    anchor, keys, values = pairs()
    for given in (
        (anchor[:, :3], keys, values),
        (anchor, keys[..., :4], values),
        (anchor, keys, values[:, :, 1:]),
        (anchor[0], keys, values),
    ):
        with pytest.raises(ValueError, match=r"keys \("):
            capkv_scores(*given)
    with pytest.raises(ValueError, match="n_kept is a number of tokens"):
        greedy_scores(anchor, keys, values, -1)
