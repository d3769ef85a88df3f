"""The side of the study that runs in fvGP's own environment: one log-likelihood with its support-aware kernel, timed."""

import time
import warnings

import numpy as np
from distributed import Client, LocalCluster
from fvgp import GP
from fvgp.kernels import wendland_anisotropic_gp2Scale_cpu_sparse

CLIENT = {}


def start_client():
    """Start a Dask client in this process, once; the seconds that it took."""
    started = time.perf_counter()
    if "client" not in CLIENT:
        cluster = LocalCluster(processes=False, n_workers=1, threads_per_worker=1, dashboard_address=None)
        CLIENT["client"] = Client(cluster)
    return time.perf_counter() - started


def likelihood(X, y, hyperparameters, noise, solver):
    """The log-likelihood of zero-mean data at `hyperparameters` (variance, radius of every column), and its seconds.

    One block holds all points: the covariance is assembled by one call of the kernel, and Dask has nothing to schedule.
    The model starts from a radius at which nothing correlates, so that nothing but the call timed costs anything; a
    first call at a third of the hyper-parameters pays for imports.
    """
    client_seconds = start_client()
    apart = np.concatenate([hyperparameters[:1], hyperparameters[1:] * 1e-6])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on batches that are not sorted, of which there is one
        model = GP(
            X,
            y,
            init_hyperparameters=apart,
            noise_variances=np.full(len(y), noise),
            kernel_function=wendland_anisotropic_gp2Scale_cpu_sparse,
            prior_mean_function=lambda x, hyperparameters: np.zeros(len(x)),
            gp2Scale=True,
            gp2Scale_batch_size=len(y),
            dask_client=CLIENT["client"],
            linalg_mode=solver,
        )
        model.log_likelihood(hyperparameters * 0.3)
        started = time.perf_counter()
        value = float(model.log_likelihood(hyperparameters))
    return {"value": value, "seconds": time.perf_counter() - started, "client_seconds": client_seconds}
