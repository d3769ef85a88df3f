"""SideNets and their training: zero where it must be, step lengths, the chain's gradient, what is learnt, resuming."""

import math

import pytest
import torch
from scipy import stats
from torch import nn

from cameraready.flows._samplers import sample
from cameraready.flows.ba_solver import MLPSideNet, SideNet, ba_sample, train_sidenet
from cameraready.flows.ba_solver.training import ROOM, step_lengths
from tests.flows.test_ba_solver_order import slope

pytestmark = pytest.mark.torch


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def awake(side, seed=0):
    """A network whose zero head was filled, so that it predicts something."""
    with torch.no_grad():
        for parameter in side.head.parameters():
            parameter.normal_(0, 0.1, generator=seeded(seed))
    return side


SIDES = {
    "image": (lambda: SideNet(2, width=16, depth=2, classes=3, heads=2, generator=seeded(1)), (2, 5, 7)),
    "without attention": (lambda: SideNet(2, width=16, depth=1, heads=0, generator=seeded(1)), (2, 6, 4)),
    "vector": (lambda: MLPSideNet(5, width=16, depth=2, classes=3, generator=seeded(1)), (5,)),
    "tokens": (lambda: MLPSideNet(5, width=16, depth=2, generator=seeded(1)), (4, 5)),
}


def inputs(shape, batch=3):
    x, v = (torch.randn(batch, *shape, generator=seeded(seed)) for seed in (2, 3))
    return x, v, torch.linspace(0.1, 0.7, batch), torch.linspace(-0.2, 0.3, batch)


# --- networks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SIDES)
def test_nothing_is_predicted_before_training_nor_ever_for_a_step_of_zero(kind):
    make, shape = SIDES[kind]
    x, v, t, h = inputs(shape)
    assert make()(x, v, t, h).abs().max() == 0
    side = awake(make())
    assert side(x, v, t, torch.zeros_like(h)).abs().max() == 0
    assert side(x, v, t, h).abs().max() > 0


@pytest.mark.parametrize("kind", SIDES)
def test_a_sample_does_not_depend_on_its_batch(kind):
    make, shape = SIDES[kind]
    side, (x, v, t, h) = awake(make()), inputs(shape)
    y = torch.tensor([0, 2, 3]) if side.settings["classes"] else None
    whole = side(x, v, t, h, y)
    alone = torch.cat(
        [
            side(x[i : i + 1], v[i : i + 1], t[i : i + 1], h[i : i + 1], None if y is None else y[i : i + 1])
            for i in range(3)
        ]
    )
    torch.testing.assert_close(alone, whole, rtol=1e-5, atol=1e-6)


def test_no_label_is_the_label_beyond_the_classes():
    side, (x, v, t, h) = awake(SIDES["vector"][0]()), inputs((5,))
    assert torch.equal(side(x, v, t, h), side(x, v, t, h, torch.full((3,), 3)))
    assert not torch.equal(side(x, v, t, h), side(x, v, t, h, torch.zeros(3, dtype=torch.long)))


@pytest.mark.parametrize("kind", SIDES)
def test_weights_come_from_the_generator_and_survive_a_folder(kind, tmp_path):
    make, shape = SIDES[kind]
    before = torch.random.get_rng_state()
    side = awake(make())
    assert torch.equal(torch.random.get_rng_state(), before)
    side.save_pretrained(tmp_path)
    again = type(side).from_pretrained(tmp_path)
    assert again.settings == side.settings
    assert torch.equal(again(*inputs(shape)), side(*inputs(shape)))
    other = MLPSideNet if isinstance(side, SideNet) else SideNet
    with pytest.raises(TypeError, match=f"not a {other.__name__}"):
        other.from_pretrained(tmp_path)


def test_the_papers_size_is_one_to_two_million():
    """The released module has 2.0 million by our count; ours has no second layer behind each time."""
    assert 1.5e6 < SideNet(4, width=256, depth=4, classes=1000).n_parameters < 2.0e6


def test_states_of_another_shape_are_refused_with_a_sentence():
    x, v, t, h = inputs((4, 5))
    with pytest.raises(ValueError, match="there is MLPSideNet"):
        SIDES["image"][0]()(x, v, t, h)
    with pytest.raises(ValueError, match=r"states \(B, ..., 7\)"):
        MLPSideNet(7, width=8)(x, v, t, h)
    with pytest.raises(ValueError, match="multiple of heads"):
        SideNet(1, width=10, heads=4)


# --- step lengths ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.0, 1e-6, 5.0, 50.0, 2000.0])
def test_steps_follow_the_truncated_exponential(rate):
    room = torch.full((20_000,), 0.6, dtype=torch.float64)
    found = step_lengths(room, rate, seeded(0)).numpy()
    assert found.min() >= 0
    assert found.max() <= 0.6
    law = stats.uniform(scale=0.6) if rate < 1e-3 else stats.truncexpon(b=0.6 * rate, scale=1 / rate)
    assert stats.kstest(found, law.cdf).pvalue > 1e-3


def test_no_room_is_a_little_room_and_float32_keeps_its_digits():
    none = step_lengths(torch.zeros(1000), 50.0, seeded(0))
    assert ((none >= 0) & (none <= ROOM)).all()
    assert none.unique().numel() > 900, "1 + u (exp(-rate room) - 1) in float32 has two dozen values here"


# --- the chain -------------------------------------------------------------------------------------------------------


class Linear(nn.Module):
    """A SideNet with one number to learn, so that its gradient can be written down."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))

    def forward(self, x, v, t, h, y=None):
        return h[:, None] * self.weight * x


def chained(side, velocity, data, seed, *, chain, rate, batch, leak):
    """The loss of one chain, written out; with `leak` gradients also flow through the moves, as they must not."""
    generator = seeded(seed)
    x1 = data[torch.randint(len(data), (batch,), generator=generator)]
    noise = torch.randn(x1.shape, generator=generator, dtype=torch.float64)
    t = torch.rand(batch, generator=generator, dtype=torch.float64)
    x = t[:, None] * x1 + (1 - t[:, None]) * noise
    v, total = velocity(x, t), 0.0
    for _ in range(chain):
        forward = torch.rand(batch, generator=generator) < 0.5
        u = torch.rand(batch, generator=generator, dtype=torch.float64)
        room = torch.where(forward, 1 - t, t).clamp(min=ROOM)
        h = -torch.log(1 + u * (torch.exp(-rate * room) - 1)) / rate
        h = torch.where(forward, h, -h)
        move = torch.zeros_like(x)
        for node, weight in ((0.5 - 0.15**0.5, 5 / 18), (0.5, 8 / 18), (0.5 + 0.15**0.5, 5 / 18)):
            move = move + weight * (v + side(x, v, t, node * h))
        x_next, t_next = x + h[:, None] * move, (t + h).clamp(0, 1)
        if not leak:
            x_next = x_next.detach()
        v_next = velocity(x_next, t_next)
        total = total + (v + side(x, v, t, h) - v_next).square().mean() / chain
        x, t, v = x_next, t_next, v_next
    return total


def test_the_gradient_is_that_of_the_prediction_alone():
    """Against the chain written out, where the roll-out is detached; a leaking one has another gradient."""
    data = torch.randn(50, 2, generator=seeded(5), dtype=torch.float64)
    settings = {"chain": 4, "rate": 3.0, "batch": 16}

    def velocity(x, t, y=None):
        return torch.sin(2 * x) * (1 + t[:, None])

    gradients = {}
    for leak in (False, True):
        side = Linear()
        loss = chained(side, velocity, data, 9, leak=leak, **settings)
        loss.backward()
        gradients[leak] = float(side.weight.grad)
    assert abs(gradients[True] - gradients[False]) > 1e-3 * abs(gradients[False])
    side = Linear()
    kept = []
    side.weight.register_post_accumulate_grad_hook(lambda p: kept.append(float(p.grad)))
    run = train_sidenet(velocity, side, data, steps=1, batch=16, chain=4, h_rate=3.0, clip=1e9, generator=seeded(9))
    assert kept[-1] == pytest.approx(gradients[False], rel=1e-9)
    assert run.losses[0] == pytest.approx(float(loss.detach()), rel=1e-9)
    assert run.calls == 5


# --- what is learnt --------------------------------------------------------------------------------------------------

TURN = torch.tensor([[0.0, 2.5], [-2.5, 0.0]])


def turning(x, t, y=None):
    """A rotation: velocities of constant size that change direction all along."""
    return x @ TURN.T


@pytest.fixture(scope="module")
def trained():
    data = torch.randn(500, 2, generator=seeded(0))
    side = MLPSideNet(2, width=32, depth=1, generator=seeded(1))
    return train_sidenet(turning, side, data, steps=150, batch=64, chain=4, h_rate=2.0, lr=1e-2, generator=seeded(2))


def test_training_makes_five_steps_much_better_than_none(trained):
    """The end of a rotation is known; against the same solver without a SideNet, which is Adams-Bashforth."""
    noise = torch.randn(200, 2, generator=seeded(3))
    exact = noise @ torch.linalg.matrix_exp(TURN).T
    errors = [
        float((ba_sample(turning, side, noise, steps=5).x - exact).square().mean().sqrt())
        for side in (trained.side, None)
    ]
    assert errors[0] < 0.3 * errors[1]
    assert not trained.side.training
    assert trained.losses[-1] < 0.3 * trained.losses[0]
    assert (trained.finished, trained.calls, len(trained.losses)) == (True, 150 * 5, 150)


def test_a_trained_network_has_order_two_as_the_second_anchor_promises(trained):
    noise = torch.randn(50, 2, generator=seeded(3), dtype=torch.float64)
    exact = noise @ torch.linalg.matrix_exp(TURN.double()).T
    side = MLPSideNet(2, width=32, depth=1).double()
    side.load_state_dict(trained.side.state_dict())

    def error(n):
        return float((ba_sample(lambda x, t, y=None: x @ TURN.double().T, side, noise, steps=n).x - exact).abs().max())

    assert slope(error, (64, 256)) > 1.7


def test_a_network_without_classes_ignores_labels_and_one_with_them_learns_what_they_change():
    """Two classes turn in opposite directions; v tells them apart, so what is tested is that dropped labels reach both networks alike."""
    data, labels = torch.randn(200, 2, generator=seeded(0)), torch.arange(200) % 2
    seen = []

    def velocity(x, t, y):
        seen.append(y)
        return turning(x, t) * (1.0 - y.to(x.dtype))[:, None]

    side = MLPSideNet(2, width=8, depth=1, classes=2)
    train_sidenet(
        velocity,
        side,
        data,
        labels=labels,
        steps=20,
        batch=50,
        chain=2,
        null_label=2,
        label_dropout=0.3,
        generator=seeded(1),
    )
    share = torch.cat(seen).eq(2).double().mean()
    assert abs(share - 0.3) < 4 * math.sqrt(0.21 / 1000)
    assert torch.equal(seen[0], seen[1]), "a chain keeps its labels"


def test_without_data_chains_start_from_the_backbones_own_samples():
    side = MLPSideNet(2, width=16, depth=1)
    before = torch.random.get_rng_state()
    shapes = set()

    def velocity(x, t, y=None):
        shapes.add(t.shape == (len(x),))
        return turning(x, t)

    run = train_sidenet(
        velocity, side, shape=(2,), steps=3, batch=8, chain=2, own_samples=32, own_steps=4, generator=seeded(0)
    )
    assert run.calls == 8 + 3 * 3
    assert torch.equal(torch.random.get_rng_state(), before)
    assert shapes == {True}, "times are (B,) wherever training asks"
    with pytest.raises(ValueError, match="give shape"):
        train_sidenet(turning, side, steps=1)


def test_a_loader_is_begun_again_when_it_ends():
    data = torch.randn(12, 2, generator=seeded(0))
    batches = [(data[i : i + 4], None) for i in range(0, 12, 4)]
    run = train_sidenet(turning, MLPSideNet(2, width=8, depth=1), batches, steps=7, chain=1, generator=seeded(0))
    assert len(run.losses) == 7
    with pytest.raises(ValueError, match="begun again"):
        train_sidenet(turning, MLPSideNet(2, width=8, depth=1), iter(batches), steps=7, chain=1)


# --- errors ----------------------------------------------------------------------------------------------------------


def test_wrong_trainings_are_refused_with_a_sentence():
    side, data = MLPSideNet(2, width=8, depth=1), torch.randn(10, 2, generator=seeded(0))
    for settings, sentence in (
        ({"chain": 0}, "chain=0 must be a whole number"),
        ({"h_rate": -1.0}, "h_rate=-1.0"),
        ({"labels": torch.zeros(3)}, "3 labels for 10 data"),
        ({"shape": (2,)}, "shape goes with data=None"),
    ):
        with pytest.raises(ValueError, match=sentence):
            train_sidenet(turning, side, data, steps=1, **settings)
    with pytest.raises(ValueError, match="every state has a time of its own"):
        train_sidenet(lambda x, t, y=None: x * t, side, data, steps=1, batch=7)
    with pytest.raises(ValueError, match="no weight of the SideNet is trainable"):
        train_sidenet(turning, MLPSideNet(2, width=8, depth=1).requires_grad_(False), data, steps=1)
    with pytest.raises(FloatingPointError, match="the velocity is not finite"):
        train_sidenet(lambda x, t, y=None: x * float("nan"), side, data, steps=1)


def test_data_in_bfloat16_train_a_network_in_float32():
    asked = []

    def velocity(x, t, y=None):
        asked.append(x.dtype)
        return turning(x.float(), t).to(x.dtype)

    side = MLPSideNet(2, width=8, depth=1)
    train_sidenet(velocity, side, torch.randn(20, 2, generator=seeded(0)).bfloat16(), steps=2, batch=4, chain=2)
    assert set(asked) == {torch.bfloat16}
    assert {p.dtype for p in side.parameters()} == {torch.float32}
    noise = torch.randn(4, 2, generator=seeded(1)).bfloat16()
    found, alike = ba_sample(velocity, side, noise, steps=3).x, sample(velocity, noise, steps=3, method="ab2").x
    assert (found.float() - alike.float()).abs().max() < 0.1
