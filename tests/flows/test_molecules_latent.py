"""What surrogates and the workload promise, on a hundred drugs and trainings of a second."""

import pytest
import torch

pytestmark = pytest.mark.torch

for package in ("rdkit", "selfies", "datamol"):
    pytest.importorskip(package)

from cameraready.flows._molecules import SMALL, molecules  # noqa: E402
from cameraready.flows._molecules.properties import NAMES, properties  # noqa: E402
from cameraready.flows._molecules.surrogates import Surrogates, accuracy, train_surrogates  # noqa: E402


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def small():
    return molecules(settings=SMALL, keep=False, quiet=True)


def test_surrogates_find_a_smooth_function_and_its_gradient():
    """Learnt from examples with noise; gradients against the true function's, and two properties of different units."""
    latents = torch.randn(2000, 3, generator=generator())
    truth = torch.stack([latents @ torch.tensor([1.0, -2.0, 0.0]), 300 + 50 * latents[:, 2].sin()], 1)
    noisy = truth + torch.tensor([0.3, 5.0]) * torch.randn(truth.shape, generator=generator(1))
    noisy[::7] = torch.nan  # latents that decode to no molecule
    net = Surrogates(3, 2, width=32, members=3, generator=generator(2))
    train_surrogates(net, latents, noisy, steps=300, batch=64, lr=1e-2, generator=generator(3))
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


def test_drugs_are_known_and_strangers_are_told(small):
    drug = small.codebook.train[:3]
    truth = small.measured([*drug, drug[0], small.codebook.test[0], "CCO", ""])
    assert truth["novel"].tolist() == [False] * 5 + [True, False]
    assert truth["valid"].tolist() == [True] * 6 + [False]
    assert truth["unique"].tolist() == [True, True, True, False, True, True, False]
    train, test = small.data
    assert len(train) == len(small.codebook.train)
    assert len(test) == len(small.codebook.test)
    with pytest.raises(ValueError, match=r"of shape \(B, 8\), got torch.float32 \(4, 3\)"):
        small.reward(torch.zeros(4, 3))
    with pytest.raises(ValueError, match="reward must be 'qed', 'logp-window' or 'fsp3', got 'dipole'"):
        molecules("dipole")


def test_surrogates_know_more_than_the_mean_of_molecules_never_seen(small):
    """Least squares on three hundred labels; on fresh latents they explain half of what is nearly additive."""
    latents = small.sample(300, generator(8))
    found = accuracy(small.surrogates(latents), properties(small.decode(latents)), NAMES)
    assert found["tpsa"].r2 > 0.5
    assert found["fsp3"].r2 > 0.4
    assert found["sa"].rank > 0.4
    assert all(abs(one.coverage - 0.9) < 0.1 for one in found.values())


def test_the_flow_moves_noise_to_the_drugs_latents(small):
    """Its samples are nearer to the drugs' latents than noise is, by energy distance, and they depend on the generator alone."""
    from cameraready.flows._toy.distances import energy_distance

    before = torch.get_rng_state()
    samples = small.sample(400, generator(1))
    torch.testing.assert_close(samples, small.sample(400, generator(1)))
    assert torch.equal(torch.get_rng_state(), before)
    still = small.sample(400, generator(1), velocity=lambda x, t: torch.zeros_like(x))
    assert torch.equal(still, small.sample_prior(400, generator(1)))
    data = small.codebook.draw(400, generator(2))
    assert energy_distance(samples, data) < energy_distance(still, data)
    assert len(NAMES) == small.surrogates(samples).shape[1]


def test_networks_are_kept_and_read(tmp_path, monkeypatch, capsys):
    """A second opening, of another reward, reads the same weights and trains nothing."""
    from dataclasses import replace

    monkeypatch.setenv("CAMERAREADY_MODELS", str(tmp_path))
    tiny = replace(SMALL, drugs=100, flow_steps=3, labelled=60, surrogate_steps=3)
    first = molecules(settings=tiny)
    assert capsys.readouterr().err.count("training a small network once") == 2
    second = molecules("logp-window", settings=tiny, bound=2.0)
    assert capsys.readouterr().err == ""
    latents = first.sample(5, generator())
    assert torch.equal(latents, second.sample(5, generator()))
    assert first.decode(latents) == second.decode(latents)
    logp = second.predict(latents)["logp"]
    torch.testing.assert_close(second.reward(latents), 1 / (1 + (logp - 2.5) ** 2))
    assert second.bound == 2.0
