"""Models of any convention as velocities: the same numbers whichever way they are written, counted, checked and differentiable."""

import copy
import doctest
import math
import pickle

import pytest
import torch
from torch import nn

from cameraready.flows import check_direction, looks_reversed, velocity_of
from cameraready.flows._paths import CosinePath, LinearPath, convert
from cameraready.flows._samplers import sample
from cameraready.flows._toy.mixtures import GaussianMixture, eight_gaussians
from tests.flows.flow_cases import exact, mixture, writings

pytestmark = pytest.mark.torch


def draws(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


class Net(nn.Module):
    """A perceptron of states (B, 3), times (B,) and labels (B,)."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first, self.last = nn.Linear(5, 16, dtype=dtype), nn.Linear(16, 3, dtype=dtype)
        self.asked = []

    def forward(self, x, t, y=None):
        self.asked.append((x.dtype, t.dtype, t.shape))
        y = torch.zeros_like(t) if y is None else y.to(t.dtype)
        return self.last(torch.tanh(self.first(torch.cat([x, t[:, None], y[:, None]], 1))))


TIMES = [0.3, torch.tensor(0.3), torch.tensor([0.1, 0.3, 0.6, 0.9])]


@pytest.mark.parametrize("name", writings())
@pytest.mark.parametrize("t", TIMES, ids=["float", "0-d", "(B,)"])
def test_the_same_model_written_otherwise_has_the_same_velocity(name, t):
    x = draws(4, 3)
    found = writings()[name](x, t)
    torch.testing.assert_close(found, exact()(x, t if isinstance(t, float) else t.double()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["velocity", "score", "x1", "noise"])
@pytest.mark.parametrize("direction", ["noise_to_data", "data_to_noise"])
def test_predictions_on_another_path_become_velocities_on_this_one(kind, direction):
    on_cosine = mixture().velocity(CosinePath())

    def model(x, s):
        t = 1 - s if direction == "data_to_noise" else s
        v = on_cosine(x, t)
        found = convert(v, x, t, source="velocity", target=kind, path=CosinePath())
        return -found if kind == "velocity" and direction == "data_to_noise" else found

    velocity = velocity_of(model, kind=kind, direction=direction, path=LinearPath(), model_path=CosinePath())
    x = draws(4, 3)
    for t in (0.2, 0.7, torch.tensor([0.2, 0.4, 0.6, 0.8], dtype=torch.float64)):
        torch.testing.assert_close(velocity(x, t), exact()(x, t), rtol=1e-8, atol=1e-9)


def test_ends_where_a_prediction_says_nothing_raise_unless_eps_is_given():
    x = draws(4, 3)
    for kind, end in (("noise", 0.0), ("score", 0.0), ("x1", 1.0)):

        def model(x, t, kind=kind):
            return convert(exact()(x, t), x, t, source="velocity", target=kind)

        with pytest.raises(ValueError, match=f"velocity does not follow from {kind} at t = {end:g}"):
            velocity_of(lambda x, t: x, kind=kind)(x, end)
        torch.testing.assert_close(velocity_of(model, kind=kind, eps=1e-5)(x, end), exact()(x, end), rtol=0, atol=1e-3)


@pytest.mark.parametrize("path", [LinearPath(), CosinePath()], ids=["linear", "cosine"])
def test_ends_are_kept_away_from_on_another_path_too(path):
    x, other = draws(4, 3), CosinePath() if path == LinearPath() else LinearPath()
    for kind, end in (("noise", 0.0), ("score", 0.0), ("x1", 1.0)):

        def model(x, t, kind=kind):
            return convert(mixture().velocity(other)(x, t), x, t, source="velocity", target=kind, path=other)

        v = velocity_of(model, kind=kind, path=path, model_path=other, eps=1e-4)
        for t in (end, torch.full((4,), end, dtype=torch.float64)):
            torch.testing.assert_close(v(x, t), mixture().velocity(path)(x, end), rtol=0, atol=5e-3)


def test_times_outside_the_unit_interval_are_told():
    v, x = velocity_of(lambda x, t: x), draws(4, 3)
    for t in (1000.0, -0.5, math.nan, torch.tensor(500.0), torch.tensor([0.1, 0.2, 0.3, 1.5])):
        with pytest.raises(ValueError, match=r"times lie between 0 \(noise\) and 1 \(data\), got .*have to be divided"):
            v(x, t)
    assert v.calls == 0
    for t in (1 + 1e-12, -1e-4, torch.tensor(1 + 1e-6)):  # rounding, and differences that test a derivative
        v(x, t)


def test_times_come_as_the_model_wants_them():
    net = Net()
    v = velocity_of(net, time_scale=1000.0)
    v(draws(4, 3, dtype=torch.float32), 0.25)
    assert net.asked == [(torch.float32, torch.float32, (4,))]
    seen = []
    velocity_of(lambda x, t: seen.append(t) or x, time="scalar", time_scale=10)(draws(4, 3), torch.full((4,), 0.5))
    assert (seen[0].shape, float(seen[0])) == ((), 5.0)
    with pytest.raises(ValueError, match="one time for the whole batch"):
        velocity_of(lambda x, t: x, time="scalar")(draws(2, 3), torch.tensor([0.1, 0.2]))


def test_calls_are_counted_and_counted_anew():
    v = velocity_of(Net())
    sample(v, draws(4, 3, dtype=torch.float32), steps=3, method="rk4")
    assert v.calls == 12
    v.reset()
    assert v.calls == 0


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_models_of_half_precision_get_their_dtype_and_give_back_the_states(low):
    net, x = Net(low), draws(4, 3, dtype=torch.float32)
    found = velocity_of(net)(x, 0.3)
    assert found.dtype == torch.float32
    assert net.asked == [(low, low, (4,))]
    torch.testing.assert_close(found, net(x.to(low), torch.full((4,), 0.3, dtype=low)).float())
    net.asked.clear()
    velocity_of(Net(), time_dtype=torch.float32)(x.to(low), 0.3)
    assert velocity_of(Net())(x.to(low), 0.3).dtype == low


def test_labels_go_by_place_or_by_name():
    y, x = torch.tensor([1, 2, 3, 4]), draws(4, 3, dtype=torch.float32)
    net = Net()
    expected = net(x, torch.full((4,), 0.3), y)
    torch.testing.assert_close(velocity_of(net)(x, 0.3, y), expected)
    torch.testing.assert_close(velocity_of(net, label="y")(x, 0.3, y), expected)
    assert not torch.allclose(velocity_of(net)(x, 0.3), expected)


def test_parameters_gradients_jvps_and_copies_reach_the_model():
    net, x = Net(torch.float64), draws(4, 3)
    v = velocity_of(net, direction="data_to_noise")
    assert {id(p) for p in v.parameters()} == {id(p) for p in net.parameters()}
    t, one = torch.tensor(0.3, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64)
    _, slope = torch.func.jvp(lambda time: v(x, time), (t,), (one,))
    torch.testing.assert_close(slope, (v(x, t + 1e-6) - v(x, t - 1e-6)) / 2e-6, rtol=1e-5, atol=1e-7)
    v(x, 0.3).sum().backward()
    assert net.first.weight.grad is not None
    twin = copy.deepcopy(v)
    with torch.no_grad():
        twin.model.last.bias.add_(1)
    assert not torch.allclose(twin(x, 0.3), v(x, 0.3))
    loaded = pickle.loads(pickle.dumps(v))
    torch.testing.assert_close(loaded(x, 0.3), v(x, 0.3))
    mapped = torch.func.vmap(lambda each: velocity_of(net, check_finite=False)(each[None], 0.3)[0])(x)
    torch.testing.assert_close(mapped, velocity_of(net)(x, 0.3))


def test_outputs_that_are_no_velocities_are_told():
    x = draws(4, 3)

    def not_a_number(x, t):
        return torch.where(t[:, None] > 0.5, math.nan, x)

    assert velocity_of(not_a_number)(x, 0.4).shape == (4, 3)
    with pytest.raises(
        FloatingPointError, match=r"the output of the model is not finite in 12 of 12 entries at t = 0\.6"
    ):
        velocity_of(not_a_number)(x, 0.6)
    assert velocity_of(not_a_number, check_finite=False)(x, 0.6).isnan().all()
    with pytest.raises(ValueError, match="returned tuple, and a tensor"):
        velocity_of(lambda x, t: (x,))(x, 0.5)
    with pytest.raises(ValueError, match=r"returned shape \(4, 4\) for states of shape \(4, 3\)"):
        velocity_of(lambda x, t: x[:, :1] * t)(x, 0.5)
    for options, words in (
        ({"kind": "eps"}, "no kind 'eps'"),
        ({"direction": "up"}, "no direction 'up'"),
        ({"call": "t"}, "no call 't'"),
        ({"time": "row"}, "no time 'row'"),
        ({"time_scale": 0.0}, "time_scale must be above 0"),
        ({"eps": 0.7}, "eps lies between"),
    ):
        with pytest.raises(ValueError, match=words):
            velocity_of(lambda x, t: x, **options)
    with pytest.raises(ValueError, match="a module or a function"):
        velocity_of("model")


def test_the_example_of_a_velocity_is_true():
    from cameraready.flows._adapters import velocity

    found = doctest.testmod(velocity)
    assert found.attempted > 0
    assert found.failed == 0


# --- direction -------------------------------------------------------------------------------------------------------


def data(n=400):
    return mixture().sample(n, torch.Generator().manual_seed(1))


def generator():
    return torch.Generator().manual_seed(2)


def test_a_model_of_the_rooms_direction_passes_and_one_read_the_wrong_way_does_not():
    backwards = lambda x, s: -exact()(x, 1 - s)  # noqa: E731
    for right in (exact(), *writings().values()):
        assert looks_reversed(right, data(), generator=generator()) < 0.8
        assert check_direction(right, data(), generator=generator()) < 0.8
    assert looks_reversed(backwards, data(), generator=generator()) > 1.25
    with pytest.raises(ValueError, match="give direction='data_to_noise' to velocity_of"):
        check_direction(backwards, data(), generator=generator())
    with pytest.raises(ValueError, match="give direction='data_to_noise' to velocity_of"):
        check_direction(velocity_of(backwards), data(), generator=generator())
    with pytest.raises(ValueError, match="give direction='noise_to_data' to velocity_of"):
        check_direction(
            velocity_of(lambda x, t: exact()(x, t), direction="data_to_noise"), data(), generator=generator()
        )


def test_a_noise_prediction_read_the_wrong_way_is_found_too():
    def backwards(x, s):
        return convert(exact()(x, 1 - s), x, 1 - s, source="velocity", target="noise")

    with pytest.raises(ValueError, match="data_to_noise"):
        check_direction(velocity_of(backwards, kind="noise"), data(), generator=generator())


def test_a_turned_sign_or_time_alone_has_its_own_sentence():
    with pytest.raises(ValueError, match="its sign is turned"):
        check_direction(lambda x, t: -exact()(x, t), data(), generator=generator())
    with pytest.raises(ValueError, match="hand it 1 - t"):
        check_direction(lambda x, t: exact()(x, 1 - t), data(), generator=generator())


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (lambda x, t: x * math.nan, "not finite in 1200 of 1200 entries"),
        (lambda x, t: x[:, :1], r"shape \(400, 1\) for data of shape \(400, 3\)"),
        (lambda x, t: (x,), "returned tuple"),
    ],
    ids=["nan", "shape", "tuple"],
)
def test_what_is_no_velocity_has_no_direction(broken, words):
    for look in (check_direction, looks_reversed):
        with pytest.raises((ValueError, FloatingPointError), match=words):
            look(broken, data(), generator=generator())


def test_a_model_that_fits_in_no_reading_is_not_advised_into_a_wrong_one():
    own, v = data(), exact()
    ring = eight_gaussians()
    on_ring, eight = ring.velocity(LinearPath()), ring.sample(400, generator())
    words = r"fits these data in no reading .* scale, labels, kind, time_scale"
    for wrong, given in (
        (v, 50 * own),  # in other units than it was trained in
        (on_ring, 50 * eight),
        (lambda x, t: on_ring(x, t, torch.zeros(len(x), dtype=torch.long)), eight),  # of one class alone
        (lambda x, t: on_ring(x, t / 1000), eight),  # asked at other times
        (lambda x, t: x - t[:, None] * v(x, t), own),  # a prediction of the noise
        (lambda x, t: 4 * x, own),
    ):
        with pytest.raises(ValueError, match=words):
            check_direction(wrong, given, generator=generator())
        looks_reversed(wrong, given, generator=generator())
    for scale in (0.1, 10.0):  # data of any variance, where the model knows them
        law = GaussianMixture(mixture().weights, scale * mixture().means, scale**2 * torch.tensor([0.2, 0.3]).double())
        check_direction(law.velocity(LinearPath()), scale * own, generator=generator())
        with pytest.raises(ValueError, match="data_to_noise"):
            check_direction(
                lambda x, s, law=law: -law.velocity(LinearPath())(x, 1 - s), scale * own, generator=generator()
            )


def test_looking_changes_nothing_in_the_model():
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)).double()
    net[2].eval()
    modes, before = [m.training for m in net.modules()], copy.deepcopy(net.state_dict())
    random = torch.get_rng_state()

    class Timed(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x, t):
            assert not net[1].training
            return 0.1 * self.net(x)

    for model in (Timed(), velocity_of(Timed())):
        check_direction(model, data(), generator=generator())
        looks_reversed(model, data(), generator=generator())
    assert [m.training for m in net.modules()] == modes
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name])
    assert torch.equal(torch.get_rng_state(), random)


def test_a_model_of_one_time_for_the_whole_batch_is_looked_at_too():
    def model(x, t):
        assert t.dim() == 0
        return exact()(x, t)

    assert check_direction(velocity_of(model, time="scalar"), data(), generator=generator()) < 0.8
    with pytest.raises(ValueError, match="give direction='data_to_noise' to velocity_of"):
        check_direction(
            velocity_of(lambda x, s: -model(x, 1 - s), time="scalar"), data(), y=None, generator=generator()
        )


def test_a_network_that_has_learnt_nothing_passes_and_looking_is_not_counted():
    v = velocity_of(Net(torch.float64))
    check_direction(v, data(), generator=generator())
    assert v.calls == 0
    first = looks_reversed(v, data(), generator=generator())
    torch.manual_seed(5)
    assert looks_reversed(v, data(), generator=generator()) == first
