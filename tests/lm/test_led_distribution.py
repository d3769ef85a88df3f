"""The sampling law against its definition, its limits and its frequencies."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from cameraready.lm.led import LEDConfig, LEDStep, led_distribution

pytestmark = pytest.mark.torch


def random_logits(d=8, b=4, v=200, seed=0, scale=3.0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(b, v, generator=generator, dtype=torch.float64)
    return scale * (common + torch.randn(d, b, v, generator=generator, dtype=torch.float64)).to(dtype)


def by_definition(logits, k, temperature, exploit="confidence", floor=1e-6):
    """Tan et al.'s algorithm, row by row in plain Python, without a clever word: pi over the vocabulary, (B, V)."""
    d, batch, v = logits.shape
    out = np.zeros((batch, v))
    for b in range(batch):
        p = []
        for layer in range(d):
            e = np.array([math.exp(z / temperature) for z in logits[layer, b].tolist()])
            p.append(e / e.sum())
        chosen = [int(i) for i in np.argsort(-p[0], kind="stable")[:k] if p[0][i] > 0]
        best, best_entropy, total = None, -1.0, np.zeros(len(chosen))
        for layer in range(d):
            total = total + np.maximum(p[layer][chosen], floor)
            a = total / total.sum()
            entropy = -sum(x * math.log(x) for x in a)
            if entropy > best_entropy:
                best, best_entropy = a, entropy
        top = p[0][chosen] / p[0][chosen].sum()
        confidence = p[0].max() if exploit == "confidence" else 0.0
        out[b, chosen] = confidence * top + (1 - confidence) * best
    return out


def plain_top_k(final, k, temperature):
    """transformers' own warpers."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper

    return TopKLogitsWarper(k)(None, TemperatureLogitsWarper(temperature)(None, final)).softmax(-1)


@pytest.mark.parametrize("exploit", ["confidence", "never"])
@pytest.mark.parametrize(("d", "k", "temperature"), [(8, 8, 0.6), (2, 3, 1.0), (5, 20, 1.7), (3, 300, 0.9)])
def test_the_law_is_that_of_the_algorithm(d, k, temperature, exploit):
    logits = random_logits(d)
    led = LEDConfig(depth=d, top_k=k, exploit=exploit)
    pi = led_distribution(logits, led, temperature=temperature).dense(200).exp()
    expected = by_definition(logits.numpy(), k, temperature, exploit)
    np.testing.assert_allclose(pi.numpy(), expected, atol=1e-12)


def test_it_is_a_distribution_on_the_final_layers_best_tokens():
    logits = random_logits(b=32, dtype=torch.float32)
    step = led_distribution(logits, LEDConfig())
    torch.testing.assert_close(step.log_probs.exp().sum(-1), torch.ones(32), atol=1e-5, rtol=0)
    assert torch.equal(step.candidates, logits[0].topk(8).indices)
    assert torch.equal(step.dense(200).isfinite().sum(-1), torch.full((32,), 8))
    assert (step.entropy.gather(1, step.level[:, None])[:, 0] >= step.entropy[:, 0]).all()


@pytest.mark.parametrize("exploit", ["confidence", "never"])
def test_depth_one_is_plain_top_k_sampling_however_sure_the_model_is(exploit):
    logits = random_logits(1, 16, scale=8.0)
    pi = led_distribution(logits, LEDConfig(depth=1, exploit=exploit), temperature=0.7).dense(200).exp()
    torch.testing.assert_close(pi, plain_top_k(logits[0], 8, 0.7), rtol=1e-12, atol=0)


def test_full_confidence_is_plain_top_k_sampling():
    logits = random_logits(dtype=torch.float32)
    logits[0, :, 5] = 90.0
    step = led_distribution(logits, LEDConfig(), temperature=1.0)
    assert torch.equal(step.confidence, torch.ones(4))
    assert torch.equal(step.dense(200).exp().argmax(-1), torch.full((4,), 5))
    torch.testing.assert_close(step.dense(200).exp(), plain_top_k(logits[0], 8, 1.0), atol=1e-7, rtol=0)


def test_after_the_thinking_phase_it_is_plain_top_k_sampling():
    logits = random_logits()
    both = led_distribution(logits, LEDConfig(), explores=torch.tensor([True, False, True, False]))
    led, plain = led_distribution(logits, LEDConfig()).dense(200), plain_top_k(logits[0], 8, 0.6).log()
    torch.testing.assert_close(both.dense(200), torch.stack([led[0], plain[1], led[2], plain[3]]))


def test_a_sure_final_layer_is_loosened_and_never_made_surer():
    logits = random_logits(b=64)
    logits[0] *= 3
    step = led_distribution(logits, LEDConfig())
    final = plain_top_k(logits[0], 8, 0.6)
    assert (step.dense(200).exp().amax(-1) <= final.amax(-1) + 1e-12).all()
    pi = step.log_probs.exp()
    assert (torch.special.entr(pi).sum(-1) >= torch.special.entr(final).sum(-1) - 1e-12).all()


def test_masked_tokens_do_not_exist_in_any_layer():
    """The law with tokens at -inf in the final layer is the law of a vocabulary without them."""
    logits = random_logits()
    kept = torch.arange(200) % 3 != 0
    masked = logits.clone()
    masked[0, :, ~kept] = -math.inf
    pi = led_distribution(masked, LEDConfig()).dense(200).exp()
    without = led_distribution(logits[:, :, kept], LEDConfig()).dense(int(kept.sum())).exp()
    assert (pi[:, ~kept] == 0).all()
    torch.testing.assert_close(pi[:, kept], without, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("normaliser", ["exact", "candidates"])
@pytest.mark.parametrize("possible", [1, 3])
def test_fewer_possible_tokens_than_k_leave_no_uniform_tail(possible, normaliser):
    logits = random_logits()
    logits[0, :, possible:] = -math.inf
    pi = led_distribution(logits, LEDConfig(normaliser=normaliser)).dense(200).exp()
    assert (pi[:, possible:] == 0).all()
    torch.testing.assert_close(pi[:, :possible].sum(-1), torch.ones(4, dtype=torch.float64))
    assert (pi[:, :possible] > 0).all()


def test_the_floor_acts_before_the_sum():
    """Both layers are sure of the same one of two tokens: the other counts 1e-6 a layer, as it does after one."""
    logits = torch.tensor([[[40.0, 0.0]], [[40.0, 0.0]]], dtype=torch.float64)
    led = LEDConfig(depth=2, top_k=2, exploit="never")
    pi = led_distribution(logits, led, temperature=1.0).dense(2).exp()
    assert pi[0, 1].item() == pytest.approx(1e-6 / (1 + 1e-6), rel=1e-9)
    logits = torch.tensor([[[40.0, 0.0]], [[0.0, 0.0]]], dtype=torch.float64)
    pi = led_distribution(logits, led, temperature=1.0).dense(2).exp()
    assert pi[0, 1].item() == pytest.approx((1e-6 + 0.5) / (2 + 1e-6), rel=1e-9)


def test_two_layers_in_closed_form():
    """p^L = (.8, .2), p^{L-1} = (.4, .6): a^{L-1} = (.6, .4) has the larger entropy, and conf = .8."""
    p = torch.tensor([[[0.8, 0.2]], [[0.4, 0.6]]], dtype=torch.float64)
    step = led_distribution(p.log(), LEDConfig(depth=2, top_k=2), temperature=1.0)
    expected = 0.8 * p[0] + 0.2 * torch.tensor([[0.6, 0.4]], dtype=torch.float64)
    torch.testing.assert_close(step.dense(2).exp(), expected)
    assert step.level.item() == 1
    same = led_distribution(p.log().flip(0)[[0, 0]], LEDConfig(depth=2, top_k=2), temperature=1.0)
    assert same.level.item() == 0  # the higher layer where entropies are equal


def test_the_temperature_divides_the_logits_of_all_layers():
    logits = random_logits()
    one = led_distribution(logits / 0.35, LEDConfig(), temperature=1.0).dense(200)
    torch.testing.assert_close(one, led_distribution(logits, LEDConfig(), temperature=0.35).dense(200))


@pytest.mark.parametrize("normaliser", ["exact", "candidates"])
def test_no_temperature_is_too_low_or_too_high(normaliser):
    logits = random_logits(dtype=torch.float32)
    cold = led_distribution(logits, LEDConfig(normaliser=normaliser), temperature=1e-45)
    assert torch.equal(cold.best(), logits[0].argmax(-1))
    torch.testing.assert_close(cold.log_probs.exp().amax(-1), torch.ones(4))
    hot = led_distribution(logits, LEDConfig(normaliser=normaliser), temperature=1e30)
    torch.testing.assert_close(hot.log_probs.exp(), torch.full((4, 8), 1 / 8), atol=1e-6, rtol=0)


def test_rows_do_not_look_at_each_other_and_names_of_tokens_do_not_matter():
    logits = random_logits()
    pi = led_distribution(logits, LEDConfig()).dense(200)
    alone = torch.cat([led_distribution(logits[:, b : b + 1], LEDConfig()).dense(200) for b in range(4)])
    torch.testing.assert_close(pi, alone)
    order = torch.randperm(200, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(led_distribution(logits[..., order], LEDConfig()).dense(200), pi[:, order])


def test_the_normaliser_over_candidates_is_exact_where_lower_layers_believe_in_nothing_else():
    logits = random_logits()
    outside = torch.ones(4, 200, dtype=torch.bool).scatter(-1, logits[0].topk(8).indices, False)
    logits[1:] -= 200.0 * outside
    exact = led_distribution(logits, LEDConfig()).dense(200)
    torch.testing.assert_close(led_distribution(logits, LEDConfig(normaliser="candidates")).dense(200), exact)


def test_the_normaliser_over_candidates_gives_every_layer_its_full_weight():
    p = torch.tensor([[[0.8, 0.2, 0.0]], [[0.02, 0.03, 0.95]]], dtype=torch.float64)
    led = LEDConfig(depth=2, top_k=2, exploit="never", normaliser="candidates")
    pi = led_distribution(p.clamp_min(1e-30).log(), led, temperature=1.0).dense(3).exp()
    expected = torch.tensor([[0.6, 0.4, 0.0]], dtype=torch.float64)  # (.8, .2) + (.4, .6), halved
    torch.testing.assert_close(pi, expected)


def test_draws_have_the_frequencies_of_pi():
    logits = random_logits(8, 4, 1000, dtype=torch.float32)
    step = led_distribution(logits, LEDConfig())
    fields = (getattr(step, field.name) for field in dataclasses.fields(step))
    rows = LEDStep(*(field.repeat_interleave(20_000, dim=0) for field in fields))
    drawn = rows.draw(torch.Generator().manual_seed(0)).view(4, 20_000)
    for b in range(4):
        counts = np.array([(drawn[b] == token).sum().item() for token in step.candidates[b]])
        assert counts.sum() == 20_000
        expected = step.log_probs[b].double().exp()
        common = expected.numpy() / expected.sum().item() * 20_000
        rare = common < 5
        counts, common = np.append(counts[~rare], counts[rare].sum()), np.append(common[~rare], common[rare].sum())
        assert chisquare(counts[common > 0], common[common > 0]).pvalue > 1e-3


def test_the_best_token_is_that_of_largest_pi_and_draws_repeat_with_their_generator():
    step = led_distribution(random_logits(), LEDConfig())
    assert torch.equal(step.best(), step.dense(200).argmax(-1))
    draws = [step.draw(torch.Generator().manual_seed(7)) for _ in range(2)]
    assert torch.equal(*draws)


def test_gradients_are_those_of_the_law():
    logits = random_logits(3, 2, 12).requires_grad_()
    led = LEDConfig(depth=3, top_k=4)
    assert torch.autograd.gradcheck(lambda x: led_distribution(x, led, temperature=1.0).log_probs, logits)


def test_gradients_stay_finite_where_tokens_are_impossible():
    logits = random_logits(3, 2, 12)
    logits[0, :, 2:] = -math.inf
    logits.requires_grad_()
    log_probs = led_distribution(logits, LEDConfig(depth=3, top_k=4)).log_probs
    log_probs[log_probs.isfinite()].sum().backward()
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)],
)
def test_half_precision_is_computed_in_single_and_double_stays(dtype, expected):
    logits = random_logits().to(dtype)
    step = led_distribution(logits, LEDConfig())
    assert step.log_probs.dtype == expected
    torch.testing.assert_close(step.log_probs, led_distribution(logits.to(expected), LEDConfig()).log_probs)


def test_bad_logits_are_refused():
    logits = random_logits(2)
    led = LEDConfig(depth=2)
    with pytest.raises(ValueError, match="final layer first"):
        led_distribution(logits[0], led)
    with pytest.raises(ValueError, match=r"2 layers but led\.depth is 8"):
        led_distribution(logits, LEDConfig())
    for temperature in (0.0, -1.0, math.inf, math.nan, True):
        with pytest.raises(ValueError, match="temperature must be positive"):
            led_distribution(logits, led, temperature=temperature)
    with pytest.raises(ValueError, match="temperature must be positive"):
        led_distribution(logits, led, temperature="0.6")
    for bad in (math.nan, math.inf):
        broken = logits.clone()
        broken[1, 0, 3] = bad
        for normaliser in ("exact", "candidates"):
            broken[1, 0, logits[0, 0].argmax()] = bad
            with pytest.raises(ValueError, match="the layer 1 below the final one hold NaN"):
                led_distribution(broken, LEDConfig(depth=2, normaliser=normaliser))
    broken = logits.clone()
    broken[1, 2] = -math.inf
    with pytest.raises(ValueError, match="nothing else than -inf"):
        led_distribution(broken, led)
    logits[0, 1] = -math.inf
    with pytest.raises(ValueError, match="every token is masked"):
        led_distribution(logits, led)
    logits[0, 1, 3] = math.nan
    with pytest.raises(ValueError, match="NaN"):
        led_distribution(logits, led)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"depth": 0}, "depth must be a whole number"),
        ({"top_k": 2.5}, "top_k must be a whole number"),
        ({"depth": True}, "depth must be a whole number"),
        ({"exploit": "always"}, "'confidence' or 'never'"),
        ({"normaliser": "k"}, "'exact' or 'candidates'"),
        ({"floor": 0.0}, "floor must lie between 0 and 1"),
        ({"think_end": " "}, "think_end is empty"),
        ({"think_end": ()}, "text, token ids, or None"),
        ({"think_end": 3.5}, "text, token ids, or None"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        LEDConfig(**settings)


def test_a_single_id_or_a_list_ends_thinking_and_configs_compare():
    assert LEDConfig(think_end=7).think_end == (7,)
    assert LEDConfig(think_end=[7, 8]) == LEDConfig(think_end=(7, 8))
    assert hash(LEDConfig(think_end=[7])) == hash(LEDConfig(think_end=7))
