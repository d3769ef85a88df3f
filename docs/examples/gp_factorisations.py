"""Measures the table of factorisations in the guide "Choosing a GP for your data".

    python docs/examples/gp_factorisations.py > factorisations.md

One exact likelihood of uniform points in a square with 30 neighbours each, by every factorisation that SparseGPRegressor can use; seconds
are medians over seeds, assembly of the covariance included (it is the same for all). qdldl and cvxopt's CHOLMOD are left out where
they are not installed.
"""

from __future__ import annotations

import importlib.util
import time

import numpy as np

from cameraready.stats.gp2scale import SparseGPRegressor
from cameraready.stats.gp2scale.measurements import points_and_values, training_step

BACKENDS = {"multifrontal": "", "superlu": "", "qdldl": "qdldl", "cholmod": "cvxopt"}
SIZES = (5_000, 20_000, 80_000)
SEEDS = 3
#: Minimum-degree orderings fill in too much for larger ones.
LARGEST = {"superlu": 20_000, "qdldl": 20_000}


def seconds(backend: str, n: int, seed: int) -> float:
    X, y = points_and_values(seed, n)
    kernel, theta = training_step(n, 30)
    model = SparseGPRegressor(kernel, noise=0.01, optimizer=None, solver="cholesky", backend=backend).fit(X, y)
    started = time.perf_counter()
    model.log_marginal_likelihood(theta)
    return time.perf_counter() - started


def cell(backend: str, n: int) -> str:
    if n > LARGEST.get(backend, n):
        return "not tried"
    return f"{np.median([seconds(backend, n, seed) for seed in range(SEEDS)]):.2f} s"


def main() -> None:
    names = [name for name, module in BACKENDS.items() if not module or importlib.util.find_spec(module)]
    print(f"| points | {' | '.join(names)} |")
    print("|---|" + "---|" * len(names))
    for n in SIZES:
        print(f"| {n:,} | {' | '.join(cell(name, n) for name in names)} |", flush=True)


if __name__ == "__main__":
    main()
