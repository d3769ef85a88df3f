"""What the study compares with and measures by: the exact posterior, equal sizes, known reaches, known memory."""

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, Matern
from torch import nn
from torch.distributions import Normal

from cameraready.evidence.specs import SpecError, parse
from cameraready.stats.sfconvcnp import probes, rivals, training, workloads

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("name", ["rbf", "matern"])
def test_the_ceiling_is_the_exact_posteriors_likelihood(name):
    kernel = {"rbf": RBF(0.7), "matern": Matern(0.7, nu=2.5)}[name]
    generator = np.random.default_rng(0)
    x, y = generator.uniform(-3, 3, size=(1, 12)), generator.normal(size=(1, 12))
    covariance = workloads.KERNELS[name](np.abs(x[:, :, None] - x[:, None]) / 0.7) + 0.01 * np.eye(12)
    found = workloads.posterior_likelihood(covariance, y, 8)
    process = GaussianProcessRegressor(kernel, alpha=0.01, optimizer=None).fit(x[0, :8, None], y[0, :8])
    mean, std = process.predict(x[0, 8:, None], return_std=True)
    expected = Normal(torch.tensor(mean), torch.tensor(np.sqrt(std**2 + 0.01))).log_prob(torch.tensor(y[0, 8:])).mean()
    assert found[0] == pytest.approx(expected.item(), rel=1e-8)


def test_draws_have_the_variance_and_the_noise_that_were_named():
    generator = np.random.default_rng(1)
    tasks = workloads.gaussian_process(workloads.rbf)(400, 10, 20, generator, True)
    assert tasks.yc.std() == pytest.approx(np.sqrt(1.01), abs=0.05)
    assert tasks.xc.shape == (400, 10, 1)
    assert tasks.ceiling.shape == (400,)
    waves = workloads.sawtooth(50, 10, 20, generator, False)
    assert np.abs(waves.yt).max() < 1.3


def equal_in_size(names, size="small", device="cpu"):
    with torch.device(device):
        found = {name: sum(p.numel() for p in rivals.models(size)[name]().parameters()) for name in names}
    return max(found.values()) / min(found.values())


def test_arms_have_equally_many_parameters():
    assert equal_in_size(["sfconv", "sfvconv", "tnp", "tetnp"]) < 1.1


def test_the_papers_size_can_be_built():
    assert equal_in_size(["sfconv", "tnp", "tetnp"], "paper", "meta") < 1.1


def test_the_librarys_arms_are_as_large_and_keep_the_order_of_axes():
    pytest.importorskip("neuralprocesses")
    assert equal_in_size(["sfconv", "convcnp", "cnp"]) < 1.1
    for name in ("convcnp", "cnp"):
        found = rivals.models()[name]()(torch.rand(2, 5, 1), torch.rand(2, 5, 1), torch.rand(2, 7, 1))
        assert found.mean.shape == found.stddev.shape == (2, 7, 1)
        assert found.mean.requires_grad


def test_the_equivariant_transformer_is_so_and_the_other_is_not():
    xc, yc, xt = (torch.rand(2, n, 1, dtype=torch.float64) for n in (6, 6, 4))
    for name, same in (("tetnp", True), ("tnp", False)):
        model = rivals.models()[name]().double()
        change = (model(xc + 5, yc, xt + 5).mean - model(xc, yc, xt).mean).abs().max()
        assert (change < 1e-10) == same


class Nearest(nn.Module):
    """Predicts the value of the point nearest to each target, or the mean of all."""

    def __init__(self, everywhere):
        super().__init__()
        self.everywhere = everywhere

    def forward(self, xc, yc, xt):
        weight = torch.softmax(-(xt - xc.transpose(1, 2)).abs() * (0.0 if self.everywhere else 1e6), -1)
        return Normal(weight @ yc, torch.ones_like(xt))


def test_reach_is_that_of_models_whose_reach_is_known():
    near = np.mean([training.reach(Nearest(False), seed, "cpu") for seed in range(20)])
    far = np.mean([training.reach(Nearest(True), seed, "cpu") for seed in range(20)])
    assert near == pytest.approx(6 / 61, abs=0.1)
    assert far == pytest.approx(3.0, abs=0.2)


def test_peak_memory_is_that_of_a_call_whose_memory_is_known(tmp_path):
    def call():
        a = torch.zeros(1_000_000)
        b = a + 1  # 8 MB with a
        del a
        b + 1  # 8 MB again, not 12

    assert probes.peak_bytes(call, tmp_path) == pytest.approx(8_000_000, rel=0.01)


def test_real_series_give_at_least_the_ten_blocks_of_a_verdict_and_no_missing_value():
    for name, (_, known) in workloads.REAL.items():
        tasks = workloads.real_tasks(name)
        assert len(tasks) >= 10
        for task in tasks:
            assert task.xc.shape == (1, known, 1)
            assert task.yt.shape[1] >= 5
            assert np.isfinite(task.yc).all()
            assert np.isfinite(task.yt).all()
            assert np.abs(task.xt).max() <= 3.0


def series_table(tmp_path, n_series=24, columns=("t",)):
    generator = np.random.default_rng(0)
    rows = []
    for i in range(n_series):
        x = np.sort(generator.uniform(0, 100, size=15))
        rows.append(pd.DataFrame({"id": f"s{i}", "y": np.sin(x / 10) + i, **dict.fromkeys(columns, x)}))
    path = tmp_path / "data.csv"
    pd.concat(rows).to_csv(path, index=False)
    return parse(f"{path}:target=y,series=id", shipped=[], accepts=["table"])


def test_a_table_of_series_is_split_by_series_and_scaled(tmp_path):
    family = workloads.open_family(series_table(tmp_path))
    tests = family.test(64, 100, np.random.default_rng(0))
    assert len(tests) == 12
    drawn = family.draw(16, 8, 5, np.random.default_rng(0), False)
    assert drawn.xc.shape == (16, 8, 1)
    assert drawn.xt.shape == (16, 5, 1)
    assert np.ptp(drawn.xc) < 12


@pytest.mark.parametrize(
    ("n_series", "columns", "message"),
    [(10, ("t",), "10 series of at least 8 points; 20 are needed"), (24, ("t", "u"), "must have one column beside")],
)
def test_tables_without_enough_series_or_with_several_inputs_are_refused(tmp_path, n_series, columns, message):
    with pytest.raises(SpecError, match=message):
        workloads.open_family(series_table(tmp_path, n_series, columns))
