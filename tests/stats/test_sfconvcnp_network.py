"""The neural process of set Fourier convolutions: equivariance, ragged batches, missing outputs, samples, learning."""

import functools
import math
import warnings

import pytest
import torch

from cameraready.stats.sfconvcnp import AliasingWarning, SFConvCNP
from cameraready.stats.sfconvcnp.tasks import batch_of

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_torch_thread")]

MODELS = {
    "sfconv": {},
    "volterra": {"volterra_rank": 2, "groups": 8},
    "shared": {"share_blocks": True, "normalize": "count"},
}
every_model = pytest.mark.parametrize("name", MODELS)


def model_of(name="sfconv", dim_x=1, dim_y=1, seed=0, **options):
    given = {"width": 16, "n_blocks": 2, "max_freq": 2.0, "freq_resolution": 0.2, "aliasing": "ignore", **MODELS[name]}
    return SFConvCNP(dim_x, dim_y, **{**given, **options}, generator=torch.Generator().manual_seed(seed)).double()


def task(batch=2, n=6, targets=4, dim_x=1, dim_y=1, seed=1):
    draw = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.rand(*shape, generator=draw, dtype=torch.float64)

    return 4 * rand(batch, n, dim_x), rand(batch, n, dim_y), 4 * rand(batch, targets, dim_x)


def assert_same(found, expected, atol=1e-10):
    torch.testing.assert_close(found.loc, expected.loc, rtol=0, atol=atol, check_dtype=False)
    torch.testing.assert_close(found.scale, expected.scale, rtol=0, atol=atol, check_dtype=False)


@every_model
@pytest.mark.parametrize("dim_x", [1, 2])
def test_moving_all_inputs_moves_the_predictions(name, dim_x):
    model = model_of(name, dim_x)
    xc, yc, xt = task(dim_x=dim_x)
    xc, xt = (torch.round(x * 256) / 256 for x in (xc, xt))
    expected = model(xc, yc, xt)
    for shift in (3.0, 15.0, 1e4):
        assert_same(model(xc + shift, yc, xt + shift), expected)
    model = model.float()
    single = [t.float() for t in (xc, yc, xt)]
    expected = model(*single)
    for shift in (3.0, 15.0, 1e4):
        assert_same(model(single[0] + shift, single[1], single[2] + shift), expected, atol=1e-5)


@every_model
def test_a_ragged_batch_equals_its_tasks_one_by_one(name):
    model = model_of(name)
    sizes, splits = [(0, 3), (1, 1), (5, 2), (9, 4)], []
    for i, (n, t) in enumerate(sizes):
        xc, yc, xt = (part[0].numpy() for part in task(1, n, t, seed=i))
        splits.append((xc, yc, xt, xt))
    batch = batch_of(splits, torch.float64)
    together = model(batch.xc, batch.yc, batch.xt, batch.mask_c)
    for i, (xc, yc, xt, _) in enumerate(splits):
        alone = model(*(torch.as_tensor(part) for part in (xc, yc, xt)))
        torch.testing.assert_close(together.loc[i, : len(xt)], alone.loc, rtol=0, atol=1e-10)
        torch.testing.assert_close(together.scale[i, : len(xt)], alone.scale, rtol=0, atol=1e-10)
        likelihood = alone.log_prob(torch.as_tensor(xt)).mean()
        torch.testing.assert_close(batch.log_likelihood(together)[i], likelihood, rtol=0, atol=1e-9)


@every_model
def test_the_order_of_the_context_does_not_matter_and_targets_do_not_see_each_other(name):
    model = model_of(name)
    xc, yc, xt = task()
    order = torch.tensor([5, 2, 0, 1, 4, 3])
    expected = model(xc, yc, xt)
    assert_same(model(xc[:, order], yc[:, order], xt), expected)
    one = model(xc, yc, xt[:, 2:3])
    torch.testing.assert_close(one.loc, expected.loc[:, 2:3], rtol=0, atol=1e-10)


def test_a_missing_output_is_no_point_and_a_missing_one_of_two_is_flagged():
    model = model_of()
    xc, yc, xt = task()
    gone = yc.clone()
    gone[:, 3] = float("nan")
    kept = [0, 1, 2, 4, 5]
    assert_same(model(xc, gone, xt), model(xc[:, kept], yc[:, kept], xt))
    model = model_of(dim_y=2)
    xc, yc, xt = task(dim_y=2)
    half, zero = yc.clone(), yc.clone()
    half[:, 3, 1], zero[:, 3, 1] = float("nan"), 0.0
    found = model(xc, half, xt)
    assert torch.isfinite(found.loc).all()
    assert not torch.allclose(found.loc, model(xc, zero, xt).loc)  # missing is not zero
    assert not torch.allclose(found.loc, model(xc[:, kept], yc[:, kept], xt).loc)  # the other output still counts


def test_without_context_every_target_has_the_same_prediction():
    model = model_of()
    xc, yc, xt = task()
    prior = model(xc[:, :0], yc[:, :0], xt)
    assert (prior.loc == prior.loc[:, :1]).all()
    assert (prior.scale > 0).all()
    assert_same(model(xc, torch.full_like(yc, float("nan")), xt), prior)


def test_the_type_of_the_weights_is_the_type_of_the_prediction():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model, exact = model_of().to(dtype), model_of()(*task())
        found = model(*task())
        assert found.loc.dtype == found.scale.dtype == dtype
        assert_same(found, exact, atol={torch.float32: 1e-5, torch.bfloat16: 0.1, torch.float16: 0.02}[dtype])


@every_model
def test_state_goes_round(name, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model, other = model_of(name), model_of(name, seed=5)
    safetensors.save_model(model, str(tmp_path / "model.safetensors"))
    safetensors.load_model(other, str(tmp_path / "model.safetensors"))
    assert_same(other(*task()), model(*task()), atol=0)


@every_model
def test_state_holds_real_tensors_of_weights_alone(name, tmp_path):
    model, other = model_of(name), model_of(name, seed=5)
    state = model.state_dict()
    beyond = set(state) - {n for n, _ in model.named_parameters(remove_duplicate=False)}
    assert {n.rpartition(".")[2] for n in beyond} == {"_extra_state"}  # the grid that the weights belong to
    assert all(t.is_floating_point() and t.is_contiguous() for t in state.values())
    torch.save(state, tmp_path / "state.pt")
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert_same(other(*task()), model(*task()), atol=0)


def test_weights_of_another_grid_are_refused():
    with pytest.raises(ValueError, match=r"freq_resolution=0\.1 and max_freq=2, this one has 0\.05 and 1"):
        model_of(max_freq=1.0, freq_resolution=0.05).load_state_dict(
            model_of(max_freq=2.0, freq_resolution=0.1).state_dict()
        )


def test_a_wide_task_is_warned_of_once_an_automatic_step_cures_it():
    xc, yc, xt = task()
    with pytest.warns(AliasingWarning, match="x_range="):
        model_of(aliasing="warn")(xc, yc, xt)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model_of(aliasing="warn", freq_resolution="auto", x_range=4.0)(xc, yc, xt)


def test_samples_are_joint():
    """Of two targets at one place, the second is drawn knowing the first: a trained model repeats it, marginals do not."""
    model, _ = trained()
    xc, yc, xt = torch.zeros(1, 0, 1), torch.zeros(1, 0, 1), torch.zeros(1, 2, 1)
    drawn = model.sample(xc, yc, xt, n_samples=400, generator=torch.Generator().manual_seed(0))[:, 0, :, 0]
    assert torch.corrcoef(drawn.T)[0, 1] > 0.7
    at_once = model.sample(xc, yc, xt, n_samples=400, chunk=2, generator=torch.Generator().manual_seed(0))[:, 0, :, 0]
    assert torch.corrcoef(at_once.T)[0, 1].abs() < 0.2


def test_samples_have_the_shape_of_the_targets_and_follow_the_generator():
    model = model_of(dim_y=2)
    xc, yc, xt = task(dim_y=2)
    yc[0, 1] = float("nan")

    def drawn(*parts, seed=3):
        return model.sample(*parts, n_samples=3, generator=torch.Generator().manual_seed(seed))

    assert drawn(xc, yc, xt).shape == (3, 2, 4, 2)
    assert drawn(xc[0], yc[0], xt[0]).shape == (3, 4, 2)
    assert torch.equal(drawn(xc, yc, xt), drawn(xc, yc, xt))
    assert not torch.equal(drawn(xc, yc, xt), drawn(xc, yc, xt, seed=4))
    with pytest.raises(ValueError, match="at least 1"):
        model.sample(xc, yc, xt, n_samples=0)


@functools.cache
def trained(steps=150):
    """A small model of random constants seen through noise 0.1, and its losses."""
    draw = torch.Generator().manual_seed(0)
    model = model_of("sfconv", normalize="count").float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        n = int(torch.randint(0, 4, (1,), generator=draw))
        x = 2 * torch.rand(32, n + 4, 1, generator=draw)
        y = torch.randn(32, 1, 1, generator=draw) + 0.1 * torch.randn(32, n + 4, 1, generator=draw)
        loss = -model(x[:, :n], y[:, :n], x[:, n:]).log_prob(y[:, n:]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


def test_it_learns_to_what_the_exact_posterior_would_give():
    """Constants ~ N(0, 1) with noise 0.1: without context the best is N(0, 1.01), with three points nearly the noise."""
    model, losses = trained()
    assert sum(losses[-20:]) / 20 < sum(losses[:20]) / 20 - 0.5
    prior = model(torch.zeros(1, 0, 1), torch.zeros(1, 0, 1), torch.ones(1, 1, 1))
    assert prior.loc.abs().item() < 0.3
    assert abs(math.log(prior.scale.item())) < 0.3
    known = model(torch.tensor([[[0.2], [0.9], [1.5]]]), torch.full((1, 3, 1), 0.8), torch.ones(1, 1, 1))
    assert abs(known.loc.item() - 0.8) < 0.25
    assert known.scale.item() < 0.4


def test_what_does_not_fit_is_refused():
    model = model_of()
    xc, yc, xt = task()
    with pytest.raises(ValueError, match="infinite"):
        model(xc, yc / 0, xt)
    with pytest.raises(ValueError, match="inputs must be finite"):
        model(xc, yc, xt * float("nan"))
    with pytest.raises(ValueError, match="expected 1 channels"):
        model(xc, yc.expand(-1, -1, 2), xt)
    with pytest.raises(ValueError, match="activation"):
        SFConvCNP(activation="relu")
    with pytest.raises(ValueError, match="n_blocks"):
        SFConvCNP(n_blocks=0)
