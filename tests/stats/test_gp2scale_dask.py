"""A cluster of separate processes gives the result of one process, also when a worker is killed in the middle."""

from __future__ import annotations

import os
import signal
import threading

import numpy as np
import pytest

from cameraready.stats.gp2scale import Bumps, NonStationary, SparseGPRegressor, Wendland
from cameraready.stats.gp2scale.spreading import Spread

distributed = pytest.importorskip("distributed")

X = np.random.default_rng(0).random((700, 2))
y = np.sin(6 * X[:, 0]) + X[:, 1] + 0.1 * np.random.default_rng(1).standard_normal(700)
NEW = np.random.default_rng(2).random((200, 2))
KERNEL = 1.0 * Wendland(0.1, length_scale_bounds=(0.03, 0.2))


@pytest.fixture(scope="module")
def client():
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, local_directory=None
        ) as cluster,
        distributed.Client(cluster) as connected,
    ):
        yield connected


def kill_one(client) -> None:
    """SIGKILL to one of the workers that this test started; its nanny starts another."""
    client.wait_for_workers(2, timeout=120)
    os.kill(next(iter(client.run(os.getpid).values())), signal.SIGKILL)


@pytest.mark.parametrize("kernel", [KERNEL, Wendland(0.1) + Bumps([NEW[:2]], 0.1), NonStationary(0.2, 1.0, 0.1)])
def test_blocks_make_up_the_whole_matrix(client, kernel):
    spread = Spread(client, X, X)
    assert len(spread._blocks) > 2
    entries, whole = spread(kernel, True), kernel.entries(X, None, True)
    order = np.lexsort((whole.cols, whole.rows))
    np.testing.assert_array_equal(entries.rows, whole.rows[order])
    np.testing.assert_array_equal(entries.cols, whole.cols[order])
    np.testing.assert_allclose(entries.values, whole.values[order], rtol=1e-13)
    for ours, theirs in zip(entries.derivatives, whole.derivatives, strict=True):
        np.testing.assert_allclose(ours, theirs[order], rtol=1e-12, atol=1e-14)


def test_a_worker_killed_during_assembly_changes_nothing(client, monkeypatch):
    calls = []
    original = Spread.__call__

    def killing(self, kernel, eval_gradient):
        calls.append(kernel)
        if len(calls) == 3:
            kill_one(client)
        return original(self, kernel, eval_gradient)

    monkeypatch.setattr(Spread, "__call__", killing)
    options = {"noise": "learn", "max_iter": 4, "random_state": 0}
    model = SparseGPRegressor(KERNEL, **options).fit(X, y, client=client)
    assert len(calls) > 3
    alone = SparseGPRegressor(KERNEL, **options).fit(X, y)
    np.testing.assert_allclose(model.theta_, alone.theta_, atol=1e-10)
    for ours, theirs in zip(
        model.predict(NEW, return_std=True, client=client), alone.predict(NEW, return_std=True), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-10)


def test_chains_side_by_side_survive_a_killed_worker(client):
    options = {"noise": 0.01, "optimizer": "mcmc", "n_samples": 12, "n_restarts_optimizer": 2, "random_state": 0}
    timer = threading.Timer(0.3, kill_one, (client,))
    timer.start()
    model = SparseGPRegressor(KERNEL, **options).fit(X, y, client=client)
    timer.join()
    alone = SparseGPRegressor(KERNEL, **options).fit(X, y)
    assert model.samples_.shape == (18, 2)
    np.testing.assert_allclose(model.samples_, alone.samples_, atol=1e-10)
    np.testing.assert_allclose(model.predict(NEW), alone.predict(NEW), atol=1e-10)
