"""Simulated integers against torch's own and closed forms, and the search for ranges against brute force."""

import pytest
import torch

from cameraready.lm.fptquant import FPTConfig, FPTQuantizer, QuantConfig
from cameraready.lm.fptquant.quantisers import (
    StaticQuantiser,
    TokenQuantiser,
    WeightQuantiser,
    fake_quantise,
    levels,
    search_range,
)
from cameraready.lm.fptquant.simulation import quantisers
from tests.lm.fptquant_models import awkward, tokens

pytestmark = pytest.mark.torch


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_fake_quantisation_is_torchs(bits):
    x, scale = draw(50, 7), torch.tensor(0.21)
    low, high = levels(bits, symmetric=True)
    torch.testing.assert_close(
        fake_quantise(x, scale, None, bits), torch.fake_quantize_per_tensor_affine(x, 0.21, 0, low, high)
    )
    low, high = levels(bits, symmetric=False)
    zero = float((high + 1) // 3)
    torch.testing.assert_close(
        fake_quantise(x, scale, torch.tensor(zero), bits),
        torch.fake_quantize_per_tensor_affine(x, 0.21, int(zero), low, high),
    )
    rows = draw(7).abs() + 0.1
    low, high = levels(bits, symmetric=True)
    torch.testing.assert_close(
        fake_quantise(x.T, rows[:, None], None, bits),
        torch.fake_quantize_per_channel_affine(x.T, rows, torch.zeros(7, dtype=torch.int32), 0, low, high),
    )


def test_dtype_is_kept_and_what_is_on_the_grid_stays():
    grid = torch.arange(-8, 8) * 0.25
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        x = grid.to(dtype)
        assert torch.equal(fake_quantise(x, torch.tensor(0.25), None, 4), x)
        assert fake_quantise(x, torch.tensor(0.25), None, 4).dtype == dtype


def test_gradients_pass_inside_the_range_and_the_scale_learns_by_lsqs_formula():
    x = torch.tensor([0.3, -0.1, 5.0, -9.0], requires_grad=True)
    scale = torch.tensor(0.25, requires_grad=True)
    fake_quantise(x, scale, None, 4).sum().backward()
    assert x.grad.tolist() == [1, 1, 0, 0]
    # Esser et al., 2020, Eq. 3: round(v) - v inside, the clipped level outside
    expected = sum(round(v) - v for v in (0.3 / 0.25, -0.1 / 0.25)) + 7 - 8
    assert scale.grad.item() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("symmetric", [True, False])
def test_the_search_is_as_good_as_brute_force(symmetric):
    rows = torch.stack((draw(4000), draw(4000, seed=1).exp(), draw(4000, seed=2) ** 3))
    scale, zero = search_range(rows, 4, symmetric=symmetric)
    for row, s, z in zip(rows, scale, zero if zero is not None else [None] * 3, strict=True):
        found = (fake_quantise(row, s, z, 4) - row).square().mean()
        best = torch.inf
        for tried in torch.linspace(0.02, 1.0, 120) * row.abs().max() / 4:
            for shift in [None] if symmetric else [torch.tensor(float(k)) for k in range(16)]:
                best = min(best, float((fake_quantise(row, tried, shift, 4) - row).square().mean()))
        assert found <= 1.04 * best


def test_a_sixteen_level_range_over_a_uniform_variable_has_the_known_error():
    x = torch.linspace(0, 1, 100_001)[None]
    scale, zero = search_range(x, 4, symmetric=False)
    error = (fake_quantise(x, scale, zero, 4) - x).square().mean()
    assert error.item() == pytest.approx((2 / 31) ** 2 / 12, rel=0.01)  # zero is a level: 15 and a half cells


def test_massive_outliers_are_given_up_when_that_is_cheaper_and_kept_when_not():
    body = draw(10_000)
    few = torch.cat((body, torch.tensor([50.0])))[None]
    scale, _ = search_range(few, 4, symmetric=True)
    assert scale.item() * 7 < 10
    many = torch.cat((body, torch.full((500,), 50.0)))[None]
    scale, _ = search_range(many, 4, symmetric=True)
    assert scale.item() * 7 > 45


def test_rows_of_zeros_and_constant_rows_are_exact():
    x = torch.stack((torch.zeros(10), torch.full((10,), 3.0), torch.full((10,), -3.0)))
    for symmetric in (True, False):
        scale, zero = search_range(x, 4, symmetric=symmetric)
        made = fake_quantise(x, scale[:, None], None if zero is None else zero[:, None], 4)
        torch.testing.assert_close(made, x, rtol=1e-5, atol=0)


def test_each_head_has_its_own_range():
    quantiser = StaticQuantiser(4, symmetric=True, heads=3)
    x = draw(2, 3, 50, 8) * torch.tensor([0.01, 1.0, 100.0])[None, :, None, None]
    quantiser.mode = "observe"
    assert torch.equal(quantiser(x), x)
    quantiser.search()
    error = (quantiser(x) - x).square().mean((0, 2, 3)) / x.square().mean((0, 2, 3))
    assert error.max() < 0.03
    torch.testing.assert_close(error, error.mean().expand(3), rtol=0.5, atol=0)


def test_a_thinned_sample_keeps_every_channel_and_the_extremes():
    quantiser = StaticQuantiser(8, symmetric=True)
    quantiser.mode = "observe"
    x = torch.arange(64.0).repeat(4000, 1)
    x[1234, 5] = 1e6
    quantiser(x[None])
    (seen,) = quantiser.seen
    assert seen.numel() < 40_000
    assert set(range(64)) <= set(seen[0].tolist())
    assert seen.max() == 1e6


def test_a_quantiser_that_saw_nothing_says_so():
    with pytest.raises(RuntimeError, match="saw no activations"):
        StaticQuantiser(4, symmetric=True).search()


@pytest.mark.parametrize("symmetric", [True, False])
def test_dynamic_ranges_are_those_of_compressed_tensors(symmetric):
    utilities = pytest.importorskip("compressed_tensors.quantization.utils")
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize

    x = draw(3, 5, 32)
    quantiser = TokenQuantiser(4, symmetric=symmetric)
    quantiser.mode = "on"
    arguments = QuantizationArgs(num_bits=4, symmetric=symmetric, strategy="token", dynamic=True)
    scale, zero = utilities.compute_dynamic_scales_and_zp(x, arguments, torch.nn.Linear(32, 1))
    torch.testing.assert_close(quantiser(x), fake_quantize(x, scale, zero, arguments), rtol=1e-5, atol=1e-6)


def test_weights_are_searched_in_parts_as_in_one():
    weight = draw(64, 96)
    quantiser = WeightQuantiser(4, 64)
    quantiser.search(weight, grid=16)
    torch.testing.assert_close(quantiser.log_scale.exp(), search_range(weight, 4, symmetric=True, grid=16)[0])


def test_bits_are_numbers_of_bits():
    for bad in (1, 17, 4.0, True):
        with pytest.raises(ValueError, match="number of bits from 2 to 16"):
            QuantConfig(weights=bad)
    with pytest.raises(ValueError, match="positive"):
        QuantConfig(p=0)
    assert QuantConfig(weights=None, residual=8).describe() == "W16A4KV4R8"


def test_quantisers_sit_where_the_configuration_says():
    fpt = FPTQuantizer(awkward("llama", dtype=torch.float32))
    layers = len(fpt.host.layers)
    for config, count in (
        (QuantConfig(weights=None, activations=None, kv=None), 0),
        (QuantConfig(weights=4, activations=None, kv=None), 7),
        (QuantConfig(weights=None, activations=4, kv=None), 4),
        (QuantConfig(weights=None, activations=None, kv=4), 2),
        (QuantConfig(weights=None, activations=None, kv=None, residual=8), 2),
    ):
        fpt.calibrate([tokens()], config)
        assert len(list(quantisers(fpt.model))) == count * layers
    assert fpt.calibrate([tokens()], QuantConfig(weights=None, activations=None, kv=None)).difference(tokens()) < 1e-3


@pytest.mark.parametrize(
    "config", [QuantConfig(16, 16, 16, 16), QuantConfig(8, 8, 8, symmetric=True), QuantConfig(8, 8, 8, dynamic=True)]
)
def test_many_bits_give_the_models_own_logits(config):
    model = awkward("qwen2", dtype=torch.float32)
    fpt = FPTQuantizer(model).calibrate([tokens()], config)
    with torch.no_grad():
        off = (fpt.model(tokens()).logits - model(tokens()).logits).norm() / model(tokens()).logits.norm()
    assert off < (2e-3 if config.weights == 16 else 0.1)


def test_the_cache_holds_what_is_quantised_after_rope_and_repeats_itself():
    """A key is quantised alike when it is new and when it comes back from the cache."""
    model = awkward("llama", dtype=torch.float32)
    fpt = FPTQuantizer(model).calibrate([tokens()], QuantConfig(weights=None, activations=None, kv=4))
    ids = tokens(seed=3)
    with torch.no_grad():
        whole = fpt.model(ids).logits[:, -1]
        first = fpt.model(ids[:, :-1], use_cache=True)
        last = fpt.model(ids[:, -1:], past_key_values=first.past_key_values).logits[:, -1]
    torch.testing.assert_close(whole, last, rtol=0, atol=1e-4)


def test_calibration_is_in_full_precision_and_text_is_checked():
    fpt = FPTQuantizer(awkward("llama", dtype=torch.float32))
    once = fpt.calibrate([tokens()]).state_dict()["ranges"]
    again = fpt.calibrate([tokens()]).state_dict()["ranges"]
    assert all(torch.equal(once[name], again[name]) for name in once)
    for bad, message in (
        ([], "no batch"),
        ([torch.zeros(2, 3)], "token ids"),
        ([torch.zeros(3, dtype=torch.long)], "shape"),
    ):
        with pytest.raises(ValueError, match=message):
            fpt.calibrate(bad)


def test_a_residual_that_cannot_be_reached_is_not_said_to_be_quantised():
    fpt = FPTQuantizer(awkward("granite", dtype=torch.float32), FPTConfig(unsupported="skip"))
    with pytest.raises(ValueError, match="residual stream cannot be quantised"):
        fpt.calibrate([tokens()], QuantConfig(residual=8))
