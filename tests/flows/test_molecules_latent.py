"""The latent: what the autoencoder, the surrogates and the whole workload promise, on a hundred drugs and trainings of a second."""

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.torch

for package in ("rdkit", "selfies", "datamol"):
    pytest.importorskip(package)

from cameraready.flows._molecules import SMALL, molecules  # noqa: E402
from cameraready.flows._molecules.autoencoder import SequenceAutoencoder  # noqa: E402
from cameraready.flows._molecules.drugs import END, PAD  # noqa: E402
from cameraready.flows._molecules.properties import NAMES  # noqa: E402
from cameraready.flows._molecules.surrogates import Surrogates, accuracy, train_surrogates  # noqa: E402
from cameraready.flows._toy.training import fit  # noqa: E402


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def small():
    return molecules(settings=SMALL, keep=False, quiet=True)


@pytest.fixture(scope="module")
def memoriser():
    """An autoencoder that was shown twelve rows of digits until it knew them, and the rows."""
    rows = torch.full((12, 9), PAD)
    for number in range(12):
        length = 4 + number % 4
        rows[number, :length] = torch.randint(2, 10, (length,), generator=generator(number))
        rows[number, length] = END
    net = SequenceAutoencoder(10, 9, latent=6, hidden=32, embedding=8, properties=1, generator=generator())
    values = (rows == 3).sum(1, keepdim=True).float()
    fit(
        net,
        lambda net, g: net.loss(rows, values, kl=0.01, hide=0.0, generator=g),
        steps=400,
        lr=1e-2,
        generator=generator(1),
        ema=0.9,
    )
    net.standardise(rows)
    return net, rows, values


def test_rows_that_were_learnt_come_back(memoriser):
    net, rows, values = memoriser
    assert (net.write(net.read(rows)) == rows).all(1).float().mean() >= 11 / 12
    mean, _ = net.posterior(rows)
    assert (net.head(mean) - values).abs().max() < 0.5


def test_a_latent_depends_on_the_molecule_alone(memoriser):
    """Not on padding, nor on the other rows of a batch."""
    net, rows, _ = memoriser
    together = net.read(rows)
    padded = nn.functional.pad(rows, (0, 5), value=PAD)
    torch.testing.assert_close(net.read(padded), together, rtol=1e-4, atol=1e-5)
    for number in (0, 7):
        alone = rows[number : number + 1, : int((rows[number] != PAD).sum())]
        torch.testing.assert_close(net.read(alone)[0], together[number], rtol=1e-4, atol=1e-5)
        assert torch.equal(net.write(together[number : number + 1])[0], net.write(together)[number])


def test_standardised_draws_have_mean_zero_and_variance_one(memoriser):
    net, rows, _ = memoriser
    draws = torch.stack([net.read(rows, generator(seed)) for seed in range(300)])
    torch.testing.assert_close(draws.mean((0, 1)), torch.zeros(6), atol=0.05, rtol=0)
    # `var(0)` of twelve means divides by 11, so the draws' variance lies between 11/12 and 1.
    torch.testing.assert_close(draws.flatten(0, 1).var(0), torch.ones(6), atol=0.15, rtol=0)


def test_writing_ends_at_the_end_and_begins_with_a_code(small):
    rows = small.codes.write(torch.randn(100, small.dim, generator=generator()))
    padding = rows == PAD
    assert not padding[:, 0].any()
    assert (padding[:, 1:] >= padding[:, :-1]).all()  # once it stops it stays so
    ended = rows[padding.any(1)]
    last = (ended != PAD).sum(1) - 1
    assert (ended.gather(1, last[:, None]) == END).all()


def test_weights_come_from_the_generator():
    before = torch.get_rng_state()

    def build(seed):
        sizes = {"latent": 3, "hidden": 8, "embedding": 4, "properties": 2}
        return nn.utils.parameters_to_vector(SequenceAutoencoder(12, 9, generator=generator(seed), **sizes).parameters())

    assert torch.equal(build(0), build(0))
    assert not torch.equal(build(0), build(1))
    assert torch.equal(torch.get_rng_state(), before)


def test_surrogates_find_a_smooth_function_and_its_gradient():
    """Learnt from examples with noise; gradients against the true function's, and two properties of different units."""
    latents = torch.randn(2000, 3, generator=generator())
    truth = torch.stack([latents @ torch.tensor([1.0, -2.0, 0.0]), 300 + 50 * latents[:, 2].sin()], 1)
    noisy = truth + torch.tensor([0.3, 5.0]) * torch.randn(truth.shape, generator=generator(1))
    noisy[::7] = torch.nan  # latents that decode to no molecule
    net = Surrogates(3, 2, width=32, members=3, generator=generator(2))
    train_surrogates(net, latents, noisy, steps=500, batch=128, lr=5e-3, generator=generator(3))
    fresh = torch.randn(400, 3, generator=generator(4), dtype=torch.float64, requires_grad=True)
    found = net(fresh)
    assert found.dtype == torch.float64
    torch.testing.assert_close(net.members(fresh).mean(0), found)
    real = torch.stack([fresh @ torch.tensor([1.0, -2.0, 0.0]).double(), 300 + 50 * fresh[:, 2].sin()], 1)
    scored = accuracy(found.detach(), real.detach(), ["line", "sine"])
    assert scored["line"].r2 > 0.97
    assert scored["sine"].r2 > 0.95
    (slope,) = torch.autograd.grad(found[:, 0].sum(), fresh)
    torch.testing.assert_close(slope.mean(0), torch.tensor([1.0, -2.0, 0.0]).double(), atol=0.15, rtol=0)
    with pytest.raises(ValueError, match="at least 2 molecules with known properties, got 0"):
        train_surrogates(net, latents, noisy * torch.nan, steps=1, batch=1, lr=1e-3, generator=generator())


def test_accuracy_has_its_closed_forms():
    """Truth = prediction / 2 + noise: slope 1/2, R2 from the variances, interval from the normal distribution, coverage 90 %."""
    predicted = torch.randn(20_000, 2, generator=generator(), dtype=torch.float64)
    noise = torch.randn(20_000, generator=generator(1), dtype=torch.float64)
    truth = torch.stack([predicted[:, 0] / 2 + 0.1 * noise - 3, predicted[:, 1]], 1)
    truth[5] = torch.nan
    bold, exact = accuracy(predicted, truth, ["bold", "exact"]).values()
    assert bold.slope == pytest.approx(0.5, abs=0.005)
    assert bold.bias == pytest.approx(3, abs=0.02)
    assert bold.r2 == pytest.approx(1 - (9 + 0.25 + 0.01) / 0.26, abs=1.0)
    assert bold.coverage == pytest.approx(0.9, abs=0.01)
    assert bold.count == 19_999
    assert (exact.r2, exact.width, exact.coverage) == (1.0, 0.0, 1.0)
    with pytest.raises(ValueError, match="at least 20 molecules"):
        accuracy(predicted[:5], truth[:5], ["bold", "exact"])


def test_the_workload_has_gradients_truth_and_dtypes(small):
    latents = small.sample(24, generator()).double().requires_grad_()
    reward, constraint = small.reward(latents), small.constraint(latents)
    assert reward.shape == constraint.shape == (24,)
    assert reward.dtype == constraint.dtype == torch.float64
    for value in (reward, constraint):
        (slope,) = torch.autograd.grad(value.sum(), latents, retain_graph=True)
        assert slope.isfinite().all()
        assert (slope != 0).any(1).all()
    torch.testing.assert_close(small.predict(latents)["qed"], reward)
    truth = small.truth(latents.detach())
    assert truth["smiles"] == small.decode(latents.detach())
    known = truth["valid"]
    assert torch.equal(truth["constraint"].isnan(), ~known)
    assert truth["unique"].sum() == len({text for text in truth["smiles"] if text})
    torch.testing.assert_close(truth["reward"], truth["qed"], equal_nan=True)
    assert ((truth["sa"][known] >= 1) & (truth["sa"][known] <= 10)).all()


def test_drugs_are_read_back_as_known_and_strangers_are_refused(small):
    drug = small.library.smiles[:3]
    truth = small.measured([*drug, drug[0], ""])
    assert truth["novel"].tolist() == [False] * 5
    assert truth["valid"].tolist() == [True] * 4 + [False]
    assert truth["unique"].tolist() == [True, True, True, False, False]
    train, test = small.data
    assert len(train) + len(test) == len(small.library)
    torch.testing.assert_close(train.mean(0), torch.zeros(small.dim), atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match=r"1 of 2 molecules cannot be coded .*first '\[Fe\]'"):
        small.encode([drug[0], "[Fe]"])
    with pytest.raises(ValueError, match=r"of shape \(B, 8\), got torch.float32 \(4, 3\)"):
        small.reward(torch.zeros(4, 3))
    with pytest.raises(ValueError, match="reward must be 'qed', 'logp-window' or 'fsp3', got 'dipole'"):
        molecules("dipole")


def test_the_flow_moves_noise_to_the_drugs_latents(small):
    """Its samples are nearer to the drugs' latents than noise is, by energy distance, and they depend on the generator alone."""
    from cameraready.flows._toy.distances import energy_distance

    before = torch.get_rng_state()
    samples = small.sample(400, generator(1))
    torch.testing.assert_close(samples, small.sample(400, generator(1)))
    assert torch.equal(torch.get_rng_state(), before)
    still = small.sample(400, generator(1), velocity=lambda x, t: torch.zeros_like(x))
    assert torch.equal(still, small.sample_prior(400, generator(1)))
    data = small.data[0]
    assert energy_distance(samples, data) < energy_distance(still, data)
    assert len(NAMES) == small.surrogates(samples).shape[1]


def test_networks_are_kept_and_read(tmp_path, monkeypatch, capsys):
    """A second opening, of another reward, reads the same weights and trains nothing."""
    from dataclasses import replace

    monkeypatch.setenv("CAMERAREADY_MODELS", str(tmp_path))
    tiny = replace(SMALL, crossed=0, steps=3, flow_steps=3, labelled=60, surrogate_steps=3)
    first = molecules(settings=tiny)
    assert capsys.readouterr().err.count("training a small network once") == 3
    second = molecules("logp-window", settings=tiny, bound=2.0)
    assert capsys.readouterr().err == ""
    latents = first.sample(5, generator())
    assert torch.equal(latents, second.sample(5, generator()))
    assert first.decode(latents) == second.decode(latents)
    logp = second.predict(latents)["logp"]
    torch.testing.assert_close(second.reward(latents), 1 / (1 + (logp - 2.5) ** 2))
    assert second.bound == 2.0
