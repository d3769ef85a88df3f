"""Spreads assembly, chains and predictions over a Dask cluster.

Everything a task needs is itself a task with its data in the graph, so that a worker that dies takes nothing with it: the
scheduler runs its tasks again elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cameraready.stats.gp2scale.algebra.iterative import kd_clusters
from cameraready.stats.gp2scale.kernels.base import Entries, SparseKernel, count_points, with_diagonal

# Blocks of rows for each thread of the cluster: enough to even out slow ones.
BLOCKS_PER_THREAD = 4
SMALLEST_BLOCK = 256


class Spread:
    """A Dask client that computes over one set of points.

    Parameters
    ----------
    client: a `distributed.Client`.
    X: the n points. coordinates: (n, d) or None, to cut X into compact blocks.
    """

    def __init__(self, client: Any, X: Any, coordinates: np.ndarray | None):
        self._client = client
        self._X = client.submit(_itself, X, pure=False)
        n = count_points(X)
        size = max(SMALLEST_BLOCK, -(-n // max(1, BLOCKS_PER_THREAD * threads(client))))
        self._blocks = [np.arange(i, min(i + size, n)) for i in range(0, n, size)]
        if coordinates is not None and n:
            self._blocks = [np.sort(block) for block in kd_clusters(coordinates, size)]

    def __call__(self, kernel: SparseKernel, eval_gradient: bool) -> Entries:
        """The entries of the upper triangle of K(X, X)."""
        tasks = [
            self._client.submit(strip, kernel, self._X, block, eval_gradient, pure=False) for block in self._blocks
        ]
        parts = self._client.gather(tasks)
        rows, cols, values = (np.concatenate([part[k] for part in parts]) for k in range(3))
        # One order whatever the blocks are, so that equal patterns are recognised as equal.
        order = np.lexsort((cols, rows))
        derivatives = None
        if eval_gradient:
            derivatives = [
                np.concatenate(column)[order] for column in zip(*(p.derivatives for p in parts), strict=True)
            ]
        return Entries(rows[order], cols[order], values[order], derivatives)


def strip(kernel: SparseKernel, X: Any, block: np.ndarray, eval_gradient: bool) -> Entries:
    """The entries of the upper triangle of K(X, X) whose row is in `block`."""
    part = X[block] if hasattr(X, "shape") else [X[i] for i in block]
    found = kernel.support(part, X)
    if found is None:
        return kernel.entries(X, None, eval_gradient)  # raises: this kernel has no support
    rows, cols = block[found[0]], found[1]
    upper = rows <= cols
    rows, cols = rows[upper], cols[upper]
    return kernel.entries_at(X, *with_diagonal(rows, cols, block), eval_gradient)


def run_everywhere(client: Any, tasks: list[tuple[Callable[..., Any], tuple[Any, ...]]]) -> list[Any]:
    """The results of calls, one task each."""
    return client.gather([client.submit(call, *arguments, pure=False) for call, arguments in tasks])


def share(client: Any, value: Any) -> Any:
    """A future that holds `value` and can be computed again if its worker dies."""
    return client.submit(_itself, value, pure=False)


def threads(client: Any) -> int:
    """The threads of all workers."""
    return sum(client.nthreads().values())


def _itself(value: Any) -> Any:
    return value
