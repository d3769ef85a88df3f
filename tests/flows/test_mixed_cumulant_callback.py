"""The callback: affine models never pass, better ones do, and it fits into loops of torch, diffusers and accelerate."""

import io
import math

import numpy as np
import pytest
import torch
from torch import nn

from cameraready.flows import CosinePath, from_diffusers
from cameraready.flows._paths import convert
from cameraready.flows._toy.mixtures import GaussianMixture
from cameraready.flows.mixed_cumulant import GaussianClone, SimplicityBiasCallback
from tests.flows.flow_cases import DIM, exact, mixture, writings

pytestmark = pytest.mark.torch
TIMES = (0.3, 0.6, 0.8)


def drawn(n=600, seed=0):
    found = mixture().sample(n, torch.Generator().manual_seed(seed))
    return (found[0] if isinstance(found, tuple) else found).float()


@pytest.fixture(scope="module")
def clone():
    return GaussianClone(drawn(50_000, seed=1))


@pytest.fixture
def callback(clone):
    return SimplicityBiasCallback(drawn(), clone=clone, times=TIMES)


def between(share, clone):
    """A velocity on the way from the Wiener denoiser to the exact posterior mean."""
    wiener, truth = clone.denoiser().velocity, exact()
    return lambda x, t: (1 - share) * wiener(x, float(t.flatten()[0])) + share * truth(x, t)


def test_the_wiener_denoiser_is_pairwise_and_the_posterior_mean_beyond(callback, clone):
    callback.evaluate(between(0.0, clone), 1)
    assert {p.phase for p in callback.passages()} == {"pair-wise"}
    assert all(abs(row["beyond"]) < 1e-3 and abs(row["parting"]) < 1e-3 for row in callback.history)
    callback.evaluate(between(1.0, clone), 2)
    for passage in callback.passages()[1:]:
        assert (passage.pairwise_step, passage.higher_order_step, passage.parting_step) == (1, 2, 2)
        assert passage.phase == "higher-order"
        assert passage.clone_turn == 1
    assert "beyond the Wiener denoiser: step 2" in callback.report()


def test_errors_on_data_and_clones_are_equal_for_every_affine_denoiser():
    data = drawn(4_000)
    own = GaussianClone(data)
    callback = SimplicityBiasCallback(data, clone=own, times=(0.5,), samples=4_000, kind="x1")
    rng = torch.Generator().manual_seed(2)
    for step in range(12):
        matrix, shift = torch.randn(DIM, DIM, generator=rng), torch.randn(DIM, generator=rng)
        (row,) = callback.evaluate(lambda x, t, m=matrix, b=shift: x @ m + b, step)
        assert abs(row["parting"]) < 4.5
        assert row["beyond"] < 3


def test_a_gaussian_is_never_passed_beyond(clone):
    gaussian = GaussianMixture(torch.ones(1, dtype=torch.float64), clone.mean[None], clone.covariance[None])
    data = gaussian.sample(1_000, torch.Generator().manual_seed(3))
    data = (data[0] if isinstance(data, tuple) else data).float()
    callback = SimplicityBiasCallback(data, clone=clone, times=TIMES, samples=1_000)
    callback.evaluate(gaussian.velocity(), 1)
    callback.evaluate(exact(), 2)  # the better denoiser for other data, and a worse one here
    assert all(p.higher_order_step is None for p in callback.passages())
    assert all(row["beyond"] < 3 for row in callback.history)


def test_a_passage_that_is_lost_again_does_not_count(callback, clone):
    for step, share in ((10, 1.0), (20, 0.0), (30, 1.0), (40, 1.0)):
        callback.evaluate(between(share, clone), step)
    assert callback.passages()[-1].higher_order_step == 30


@pytest.mark.parametrize("name", writings())
def test_the_same_model_in_any_writing_has_the_same_history(name, clone):
    reference = SimplicityBiasCallback(drawn(200), clone=clone, times=TIMES)
    other = SimplicityBiasCallback(drawn(200), clone=clone, times=TIMES, adapt=lambda model: model)
    one, two = reference.evaluate(exact(), 1), other.evaluate(writings()[name], 1)
    for a, b in zip(one, two, strict=True):
        assert b["data"] == pytest.approx(a["data"], rel=1e-4)
        assert b["clones"] == pytest.approx(a["clones"], rel=1e-4)


def test_another_path_is_read_by_velocity_of(clone):
    truth = mixture().velocity(CosinePath())
    with_path = SimplicityBiasCallback(drawn(200), clone=clone, times=(0.5,), path=CosinePath())
    wanted = with_path.evaluate(truth, 1)[0]
    noise = lambda x, t: convert(truth(x, t), x, t, source="velocity", target="noise", path=CosinePath())  # noqa: E731
    moved = SimplicityBiasCallback(drawn(200), clone=clone, times=(0.5,), kind="noise", path=CosinePath())
    assert moved.evaluate(noise, 1)[0]["data"] == pytest.approx(wanted["data"], rel=1e-4)
    wrong = SimplicityBiasCallback(drawn(200), clone=clone, adapt=lambda model: model)
    from cameraready.flows import velocity_of

    with pytest.raises(ValueError, match="give path="):
        wrong.evaluate(velocity_of(truth, path=CosinePath()), 1)


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(DIM + 1, 32), nn.SiLU(), nn.Dropout(0.5), nn.Linear(32, DIM))

    def forward(self, x, t):
        return self.body(torch.cat([x, t[:, None]], 1))


def trained(net, callback, steps, first=1, accelerator=None):
    data, optimizer = drawn(3_000, seed=4), torch.optim.Adam(net.parameters(), 1e-2)
    if accelerator is not None:
        net, optimizer = accelerator.prepare(net, optimizer)
    for step in range(first, first + steps):
        g = torch.Generator().manual_seed(step)
        x1 = data[torch.randint(len(data), (64,), generator=g)]
        x0, t = torch.randn(64, DIM, generator=g), torch.rand(64, generator=g)
        loss = (net(t[:, None] * x1 + (1 - t[:, None]) * x0, t) - (x1 - x0)).square().mean()
        optimizer.zero_grad()
        accelerator.backward(loss) if accelerator is not None else loss.backward()
        optimizer.step()
        callback.on_step(net)
    return net


def test_watching_changes_nothing_of_the_training(callback):
    net = Small()
    net.body[0].eval()  # a part that the user keeps in eval mode stays there
    before = torch.get_rng_state()
    rows = callback.on_step(net)
    assert torch.equal(torch.get_rng_state(), before)
    assert (net.training, net.body[0].training, net.body[2].training) == (True, False, True)
    assert all(p.grad is None for p in net.parameters())
    assert callback.evaluate(net, 1) == rows  # dropout is off


def test_it_is_due_ever_more_seldom_and_costs_what_it_says(clone):
    asked = []

    def model(x, t):
        asked.append(len(x))
        return torch.zeros_like(x)

    callback = SimplicityBiasCallback(drawn(), clone=clone, times=TIMES, samples=50)
    for _ in range(1_000):
        callback.on_step(model)
    steps = sorted({row["step"] for row in callback.history})
    assert steps[:4] == [1, 2, 3, 4]
    assert len(steps) < 45
    assert asked == [100] * 3 * len(steps)
    regular = SimplicityBiasCallback(drawn(), clone=clone, times=TIMES, samples=50, every=100)
    for step in range(1, 1_001):
        regular.on_step(model, step)
    assert [row["step"] for row in regular.history[::3]] == list(range(1, 1_001, 100))


def test_a_run_that_is_broken_off_goes_on_as_if_it_had_not_been(clone):
    def make():
        return SimplicityBiasCallback(drawn(), clone=clone, times=TIMES)

    whole = make()
    trained(Small(), whole, 30)
    first, net = make(), Small()
    trained(net, first, 12)
    stored = io.BytesIO()
    torch.save(first.state_dict(), stored)
    stored.seek(0)
    second = make()
    second.load_state_dict(torch.load(stored, weights_only=True))
    assert second.passages() == first.passages()
    for _ in range(18):
        second.on_step(net)
    assert [r["step"] for r in second.history] == [r["step"] for r in whole.history]
    with pytest.raises(ValueError, match="other data"):
        SimplicityBiasCallback(drawn(), clone=clone, times=TIMES, seed=1).load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match="damaged"):
        make().load_state_dict({**first.state_dict(), "history": [{"a": 1.0}]})


def test_in_a_loop_of_accelerate(callback, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.register_for_checkpointing(callback)
    net = trained(Small(), callback, 8, accelerator=accelerator)
    accelerator.save_state(str(tmp_path))
    history = list(callback.history)
    callback.evaluate(net, 9)
    accelerator.load_state(str(tmp_path))
    assert callback.history == history
    assert [row["step"] for row in history[::3]] == [1, 2, 3, 4, 5, 6, 8]


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_in_a_loop_of_diffusers(prediction):
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    net = diffusers.UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(8,),
        norm_num_groups=4,
        down_block_types=("DownBlock2D",),
        up_block_types=("UpBlock2D",),
    )
    scheduler = diffusers.DDPMScheduler(prediction_type=prediction)
    data = torch.sign(torch.randn(60, 1, 8, 8, generator=torch.Generator().manual_seed(5)))
    callback = SimplicityBiasCallback(
        data,
        clone=GaussianClone(data, shrinkage=0.5),
        times=(0.5,),
        samples=40,
        adapt=lambda model: from_diffusers(model, scheduler),
    )
    (row,) = callback.on_step(net)
    # Ask diffusers itself: at t = 0.5 of the linear path alpha = sigma, and scheduler and model see x sqrt(2) at the level of that ratio.
    (_, x, _) = callback.states()[0]
    angle = torch.atan2(scheduler.alphas_cumprod.sqrt(), (1 - scheduler.alphas_cumprod).sqrt())
    level = int((angle - math.pi / 4).abs().argmin())
    with torch.no_grad():
        output = net(x * math.sqrt(2), level).sample
    clean = (
        scheduler.step(output, level, x * math.sqrt(2)).pred_original_sample if prediction == "v_prediction" else None
    )
    if clean is None:
        a, s = scheduler.alphas_cumprod[level].sqrt(), (1 - scheduler.alphas_cumprod[level]).sqrt()
        clean = (x * math.sqrt(2) - s * output) / a
    error = float((clean - callback._data).square().mean())
    assert row["data"] == pytest.approx(error, rel=0.02 if prediction == "epsilon" else 0.2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_models_of_other_precision(dtype, callback):
    net = Small()
    plain = callback.evaluate(net, 1)
    other = callback.evaluate(net.to(dtype), 1)
    for a, b in zip(plain, other, strict=True):
        assert b["data"] == pytest.approx(a["data"], rel=0.05 if dtype == torch.bfloat16 else 1e-4)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda c: SimplicityBiasCallback(drawn(10)), ValueError, "20 or more"),
        (lambda c: SimplicityBiasCallback(drawn(), times=(0.0,)), ValueError, "strictly between"),
        (lambda c: SimplicityBiasCallback(torch.randn(30, 2), clone=c), ValueError, "clone is of samples"),
        (lambda c: SimplicityBiasCallback(drawn(), every=0), ValueError, "every"),
        (lambda c: SimplicityBiasCallback(drawn() * math.nan, clone=c), ValueError, "NaN"),
        (
            lambda c: SimplicityBiasCallback(drawn(), clone=c).evaluate(lambda x, t: x * math.nan, 1),
            FloatingPointError,
            "not finite",
        ),
        (lambda c: SimplicityBiasCallback(drawn(), clone=c, kind="flow").evaluate(exact(), 1), ValueError, "kind"),
    ],
)
def test_what_is_refused(make, error, words, clone):
    with pytest.raises(error, match=words):
        make(clone)


def test_steps_run_forwards(callback):
    callback.evaluate(exact(), 5)
    with pytest.raises(ValueError, match="comes before"):
        callback.evaluate(exact(), 4)
    assert callback.passages()[0].snr == pytest.approx((0.3 / 0.7) ** 2)
    assert np.isfinite([row["data"] for row in callback.history]).all()


def test_an_argument_that_is_none_is_told_with_those_of_the_callback():
    with pytest.raises(
        TypeError, match=r"SimplicityBiasCallback has no argument 'typo'; it takes data, clone, times.*direction"
    ) as told:
        SimplicityBiasCallback(drawn(200), typo=3)
    assert "velocity_of" not in str(told.value)
