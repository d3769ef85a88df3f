"""Set Fourier convolutions: closed forms, naive sums, symmetries, masks, casts, and what their cost grows with."""

import itertools
import math
import warnings

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cameraready.stats.sfconvcnp import AliasingWarning, SetFourierConv, SetFourierVolterraConv
from cameraready.stats.sfconvcnp.frequencies import FrequencyGrid

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_torch_thread")]

LAYERS = {
    "plain": (SetFourierConv, {}),
    "groups": (SetFourierConv, {"groups": 2}),
    "interleaved": (SetFourierConv, {"groups": 2, "grouping": "interleaved", "mix": True}),
    "low rank": (SetFourierConv, {"rank": 2, "normalize": "count"}),
    "depthwise": (SetFourierConv, {"groups": 4}),
    "volterra": (SetFourierVolterraConv, {"volterra_rank": 3, "groups": 2}),
}
every_layer = pytest.mark.parametrize("name", LAYERS)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def layer_of(name, dim=1, max_freq=1.5, resolution=0.25, channels=4, **options):
    kind, given = LAYERS[name]
    layer = kind(dim, channels, 4, max_freq, resolution, **given, aliasing="ignore", generator=generator(), **options)
    return layer.double()


def points(batch=2, n=5, query=3, dim=1, channels=4, seed=1, scale=1.0):
    draw = generator(seed)
    z = torch.randn(batch, n, channels, generator=draw, dtype=torch.float64)
    x = scale * torch.randn(batch, n, dim, generator=draw, dtype=torch.float64)
    q = scale * torch.randn(batch, query, dim, generator=draw, dtype=torch.float64)
    return z, q, x


# --- closed forms and naive sums ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [1, 2])
def test_a_single_point_becomes_the_periodised_gaussian(dim):
    length, step = 0.3, 0.25
    layer = SetFourierConv(dim, 1, 1, 3.0, step, lengthscale=length).double()
    with torch.no_grad():
        layer.weights[0].zero_()
        layer.weights[0][:, 0, 1, 0, 0] = 1.0  # the feature passes, the density does not
    query = torch.linspace(-1.5, 1.5, 24, dtype=torch.float64).view(1, -1, dim)
    point = torch.full((1, 1, dim), 0.37, dtype=torch.float64)
    out = layer(torch.ones(1, 1, 1, dtype=torch.float64), query, point)
    images = torch.tensor(list(itertools.product(range(-3, 4), repeat=dim)), dtype=torch.float64) / step
    distances = ((query[0, :, None] - point[0, :, None] + images) ** 2).sum(-1)
    torch.testing.assert_close(out[0, :, 0], torch.exp(-distances / (2 * length**2)).sum(1), rtol=0, atol=1e-6)


def naive(layer, z, query, x):
    """The layer's kernels by a loop over the whole grid, points, kernels and channels, in complex numbers."""
    steps, step, dim = layer.grid.steps, layer.grid.resolution, layer.spatial_dim
    lengths = layer.lengthscales().detach().numpy()
    weights = layer.weights[0].detach().numpy()
    weights = weights[..., 0] + 1j * weights[..., 1]
    channels, outs, groups = layer.in_channels, layer.out_channels, layer.groups
    index_of = {tuple(np.rint(f / step).astype(int)): i for i, f in enumerate(layer.grid.frequencies.numpy())}
    order = np.arange(2 * channels).reshape(groups, -1)
    if layer.grouping == "interleaved":
        per = channels // groups
        order = np.array(
            [
                [*range(g * per, (g + 1) * per), *range(channels + g * per, channels + (g + 1) * per)]
                for g in range(groups)
            ]
        )
    out = np.zeros((layer.kernels, len(query), outs), dtype=complex)
    for index in itertools.product(range(-steps, steps + 1), repeat=dim):
        frequency = np.array(index) * step
        last = index[-1]
        opposite = tuple(-i for i in index)
        # On the plane where the last coordinate is zero both of a pair have matrices: Hermitian symmetry is their mean.
        pairs = [(index, False)] if last > 0 else [(opposite, True)] if last < 0 else [(index, False), (opposite, True)]
        density, features = 0.0, np.zeros(channels, dtype=complex)
        for point, value in zip(x, z, strict=True):
            phase = np.exp(-2j * np.pi * frequency @ point)
            density += phase
            features += value * phase
        envelope = (2 * np.pi) ** (dim / 2) * lengths.prod(0)
        envelope = envelope * np.exp(-2 * np.pi**2 * ((lengths * frequency[:, None]) ** 2).sum(0))
        embedded = np.concatenate([density * envelope, features * envelope])
        for at, conjugate in pairs:
            matrices = weights[index_of[at]].conj() if conjugate else weights[index_of[at]]
            for g in range(groups):
                product = (embedded[order[g]] @ matrices[g]).reshape(layer.kernels, -1)
                where = slice(g * outs // groups, (g + 1) * outs // groups)
                for i, place in enumerate(query):
                    back = np.exp(2j * np.pi * frequency @ place) * step**dim / len(pairs)
                    out[:, i, where] += product * back
    return out


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("name", ["plain", "groups", "depthwise", "volterra"])
def test_it_equals_complex_sums_over_the_whole_grid_whose_imaginary_part_vanishes(name, dim):
    layer = layer_of(name, dim, max_freq=1.0 if dim == 2 else 1.5, resolution=0.5 if dim == 2 else 0.25)
    z, query, x = points(batch=1, dim=dim)
    found = layer(z, query, x)[0].detach().numpy()
    expected = naive(layer, z[0].numpy(), query[0].numpy(), x[0].numpy())
    assert np.abs(expected.imag).max() < 1e-12 * np.abs(expected).max()
    kernels = expected.real
    if layer.kernels > 1:
        w = layer.product_weights.detach().numpy()
        kernels = kernels[:1] + np.einsum("r,rqc->qc", w, kernels[1::2] * kernels[2::2])[None]
    np.testing.assert_allclose(found, kernels[0], atol=1e-12)


def test_interleaved_groups_equal_the_naive_sum_too():
    layer = SetFourierConv(1, 4, 4, 1.0, 0.25, groups=2, grouping="interleaved", generator=generator()).double()
    layer.grid.aliasing = "ignore"
    z, query, x = points(batch=1)
    expected = naive(layer, z[0].numpy(), query[0].numpy(), x[0].numpy()).real[0]
    np.testing.assert_allclose(layer(z, query, x)[0].detach(), expected, atol=1e-12)


def test_blocked_groups_see_what_the_paper_says():
    """With 4 of 4 groups over 8 inputs the first two see densities alone: values cannot change them."""
    z, query, x = points()
    blocked, interleaved = layer_of("depthwise"), SetFourierConv(1, 4, 4, groups=4, grouping="interleaved").double()
    change = (blocked(z, query, x) - blocked(2 * z, query, x)).abs().amax((0, 1))
    assert (change[:2] == 0).all()
    assert (change[2:] > 0).all()
    interleaved.grid.aliasing = "ignore"
    assert ((interleaved(z, query, x) - interleaved(2 * z, query, x)).abs().amax((0, 1)) > 0).all()


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_the_half_space_lists_every_frequency_once_but_both_of_a_pair_on_the_plane(dim):
    grid = FrequencyGrid(dim, 1.0, 0.5)
    index = (grid.frequencies / 0.5).round().int()
    assert len({tuple(i.tolist()) for i in index}) == len(grid) == 5 ** (dim - 1) * 3
    on_plane = index[:, -1] == 0
    assert torch.equal(grid.weights, torch.where(on_plane, 1.0, 2.0).double() * 0.5**dim)


# --- symmetries --------------------------------------------------------------------------------------------------------


@every_layer
@pytest.mark.parametrize("shift", [3.0, 15.0, -1e4])
def test_moving_everything_moves_the_output(name, shift):
    layer = layer_of(name, max_freq=4.9, resolution=0.1)
    z, query, x = points(scale=0.8)
    x, query = (torch.round(t * 256) / 256 for t in (x, query))  # so that float32 holds the moved inputs too
    torch.testing.assert_close(layer(z, query + shift, x + shift), layer(z, query, x), rtol=0, atol=1e-10)
    layer = layer.float()
    z, query, x = z.float(), query.float(), x.float()
    torch.testing.assert_close(layer(z, query + shift, x + shift), layer(z, query, x), rtol=0, atol=1e-5)


def test_inputs_of_higher_precision_keep_their_digits_in_a_model_of_lower():
    layer = layer_of("plain", max_freq=4.9, resolution=0.1).float()
    z, query, x = points(scale=0.5)
    there = layer(z.float(), query + 1.7e9, x + 1.7e9)  # seconds since 1970
    torch.testing.assert_close(there, layer(z.float(), query, x), rtol=0, atol=1e-4)
    assert there.dtype == torch.float32


@every_layer
def test_the_order_of_points_does_not_matter_and_copies_count_double(name):
    layer = layer_of(name)
    z, query, x = points()
    order = torch.tensor([3, 1, 4, 0, 2])
    torch.testing.assert_close(layer(z[:, order], query, x[:, order]), layer(z, query, x), rtol=0, atol=1e-12)
    twice = layer(torch.cat([z, z], 1), query, torch.cat([x, x], 1))
    if name in ("plain", "groups", "depthwise"):  # linear in the sums
        torch.testing.assert_close(twice, 2 * layer(z, query, x), rtol=0, atol=1e-12)
    if name == "low rank":  # a mean
        torch.testing.assert_close(twice, layer(z, query, x), rtol=0, atol=1e-12)


def test_one_point_may_move_by_a_period_unnoticed_and_the_warning_says_so():
    layer = SetFourierConv(1, 4, 4, 1.5, 0.25).double()
    z, query, x = points(scale=0.3)
    moved = x.clone()
    moved[:, 0] += 4.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = layer(z, query, x)
    with pytest.warns(AliasingWarning, match="more than half the period of 4 .* far points look near"):
        after = layer(z, query, moved)
    torch.testing.assert_close(after, before, rtol=0, atol=1e-12)
    layer.grid.aliasing = "raise"
    with pytest.raises(ValueError, match="freq_resolution of at most"):
        layer(z, query, moved)


def test_the_automatic_step_is_fine_enough_for_the_range_that_was_named():
    layer = SetFourierConv(1, 1, 1, 4.9, "auto", x_range=30.0)
    assert layer.grid.period >= 2 * 30.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(torch.ones(1, 2, 1), torch.zeros(1, 1, 1), torch.tensor([[[0.0], [30.0]]]))
    with pytest.raises(ValueError, match="needs x_range"):
        SetFourierConv(1, 1, 1, 4.9, "auto")


# --- masks and odd sizes -----------------------------------------------------------------------------------------------


@every_layer
def test_a_masked_point_is_as_good_as_gone(name):
    layer = layer_of(name)
    z, query, x = points()
    mask = torch.tensor([[True, False, True, True, False]]).expand(2, -1)
    spoilt = torch.where(mask[..., None], z, float("nan"))
    far = torch.where(mask[..., None], x, 1e6)
    kept = mask[0]
    torch.testing.assert_close(
        layer(spoilt, query, far, mask), layer(z[:, kept], query, x[:, kept]), rtol=0, atol=1e-12
    )


@every_layer
def test_no_points_give_what_no_points_must_and_gradients_stay_finite(name):
    layer = layer_of(name)
    z, query, x = points()
    empty = layer(z[:, :0], query, x[:, :0])
    masked = layer(z, query, x, torch.zeros(2, 5, dtype=torch.bool))
    constant = layer.mixing.bias if layer.mixing is not None else torch.zeros(4, dtype=torch.float64)
    torch.testing.assert_close(empty, constant.expand(2, 3, 4))
    torch.testing.assert_close(masked, empty)
    masked.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in layer.parameters() if p.grad is not None)


def test_one_query_and_none():
    layer = layer_of("plain")
    z, query, x = points()
    torch.testing.assert_close(layer(z, query[:, :1], x), layer(z, query, x)[:, :1], rtol=0, atol=1e-12)
    assert layer(z, query[:, :0], x).shape == (2, 0, 4)


def test_three_dimensions_depthwise_and_at_low_rank():
    z, query, x = points(dim=3)
    for options in ({"groups": 4}, {"rank": 1}):
        layer = SetFourierConv(3, 4, 4, 1.0, 0.5, aliasing="ignore", **options).double()
        expected = layer(z, query, x)
        torch.testing.assert_close(layer(z, query - 7.0, x - 7.0), expected, rtol=0, atol=1e-10)
    with pytest.raises(ValueError, match="490,050 frequencies"):
        SetFourierConv(3, 4, 4, 4.9, 0.1)


# --- gradients, casts and state ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["interleaved", "low rank", "volterra"])
def test_gradients_in_values_points_query_and_weights(name):
    layer = layer_of(name, max_freq=0.5, resolution=0.25)
    z, query, x = (t.requires_grad_() for t in points(batch=1, n=3, query=2))
    mask = torch.tensor([[True, True, False]])
    names = [n for n, _ in layer.named_parameters()]

    def out(z, query, x, *values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (z, query, x, mask))

    assert torch.autograd.gradcheck(out, (z, query, x, *layer.parameters()))


@every_layer
def test_every_parameter_is_real_and_a_cast_costs_digits_only(name):
    """A cast of complex parameters would drop their imaginary part; here it is half of the last axis."""
    layer = layer_of(name)
    z, query, x = points()
    exact = layer(z, query, x)
    assert not any(p.is_complex() for p in layer.state_dict().values())
    assert all(w[..., 1].abs().min() > 0 for w in layer.weights)
    for dtype, digits in ((torch.float32, 1e-5), (torch.bfloat16, 0.05), (torch.float16, 0.01)):
        cast = layer_of(name).to(dtype)(z.to(dtype), query, x)
        assert cast.dtype == dtype
        assert (cast.double() - exact).abs().max() < digits * exact.abs().max()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = layer.float()(z.float(), query, x)
    assert (mixed.double() - exact).abs().max() < 1e-5 * exact.abs().max()


def test_half_precision_does_not_overflow_on_many_points():
    layer = SetFourierConv(1, 4, 4, 1.0, 0.5, normalize="count").half()
    z = torch.full((1, 100_000, 4), 3.0, dtype=torch.float16)
    assert torch.isfinite(layer(z, torch.zeros(1, 1, 1), torch.zeros(1, 100_000, 1))).all()


@every_layer
def test_state_goes_round_and_a_move_keeps_the_grid_exact(name, tmp_path):
    layer = layer_of(name)
    z, query, x = points()
    torch.save(layer.state_dict(), tmp_path / "state.pt")
    other = layer_of(name)
    other.reset_parameters(generator(99))
    assert not torch.equal(other(z, query, x), layer(z, query, x))
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(other(z, query, x), layer(z, query, x))
    assert layer.half().double().grid.frequencies.dtype == torch.float64
    fresh = FrequencyGrid(1, 1.5, 0.25)
    assert torch.equal(layer.grid.frequencies, fresh.frequencies)


def test_a_layer_made_on_the_meta_device_can_be_filled():
    with torch.device("meta"):
        layer = SetFourierConv(1, 4, 4, 1.5, 0.25, aliasing="ignore")
    layer = layer.to_empty(device="cpu").double()
    source = layer_of("plain")
    layer.load_state_dict(source.state_dict())
    z, query, x = points()
    assert torch.equal(layer(z, query, x), source(z, query, x))


def test_weights_come_from_the_generator_that_was_passed():
    torch.manual_seed(1)
    one = layer_of("volterra")
    torch.manual_seed(2)
    two, other = layer_of("volterra"), layer_of("volterra")
    other.reset_parameters(generator(3))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.weights[0], other.weights[0])


# --- cost and refusals -----------------------------------------------------------------------------------------------------


def multiplications(n, query):
    layer = SetFourierConv(1, 8, 8, groups=2)
    with FlopCounterMode(display=False) as counter:
        layer(torch.zeros(1, n, 8), torch.zeros(1, query, 1), torch.zeros(1, n, 1))
    return counter.get_total_flops()


def test_operations_grow_linearly_in_points_and_queries():
    base = multiplications(0, 0)
    assert base > 0
    assert multiplications(4000, 0) - base == 10 * (multiplications(400, 0) - base)
    assert multiplications(0, 4000) - base == 10 * (multiplications(0, 400) - base)
    assert multiplications(4000, 4000) - base == 10 * (multiplications(400, 400) - base)


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """The number of elements of the largest tensor that any operation returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def test_no_tensor_is_larger_than_points_times_frequencies():
    layer = SetFourierConv(1, 8, 8)
    for n in (1000, 3000):
        with Largest() as largest:
            layer(torch.zeros(1, n, 8), torch.zeros(1, n, 1), torch.zeros(1, n, 1))
        assert largest.elements <= n * 2 * len(layer.grid)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"groups": 3}, "3 groups do not divide 8 channels in"),
        ({"groups": 8, "grouping": "interleaved"}, "8 groups do not divide 4"),
        ({"grouping": "other"}, "'blocked' or 'interleaved'"),
        ({"rank": 0}, "rank must be at least 1"),
        ({"freq_resolution": 0.0}, "freq_resolution must be a positive number"),
        ({"max_freq": 0.01}, "at least one step"),
        ({"max_freq": math.nan}, "at least one step"),
        ({"lengthscale": 0.0}, "lengthscale must be above"),
        ({"normalize": "density"}, "normalize must be None or 'count'"),
        ({"aliasing": "quiet"}, "aliasing must be"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        SetFourierConv(1, 4, 4, **arguments)


def test_points_that_do_not_fit_are_refused():
    layer = layer_of("plain")
    z, query, x = points()
    with pytest.raises(ValueError, match="tasks or points differ"):
        layer(z[:, :2], query, x)
    with pytest.raises(ValueError, match="expected 4 channels at points of dimension 1"):
        layer(z, query.expand(-1, -1, 2), x)
    with pytest.raises(ValueError, match="must have the shape"):
        layer(z[0], query, x)
    with pytest.raises(TypeError, match="real floating-point"):
        layer(z.to(torch.complex128), query, x)
    with pytest.raises(ValueError, match="mask must be boolean"):
        layer(z, query, x, torch.ones(2, 5))
    with pytest.raises(ValueError, match="inputs must be finite"):
        layer(z, query, x / 0)
    with pytest.raises(ValueError, match="volterra_rank"):
        SetFourierVolterraConv(1, 4, 4, volterra_rank=0)
