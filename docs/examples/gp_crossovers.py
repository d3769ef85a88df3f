"""Measures the table of the guide "Choosing a GP for your data": four Gaussian processes on functions of one to four columns.

    python docs/examples/gp_crossovers.py > crossovers.md

Functions are sums of 20 cosines over the unit cube: smooth ones with frequencies N(0, 4^2 / d), rough ones with N(0, 25^2 / d); noise
0.1, 1,000 test points. Every arm may use 20 seconds of processor time on one thread (Vecchia's approximation finishes its third
iteration). Numbers are medians over `--seeds`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from cameraready.evidence import Context
from cameraready.evidence.peers.environments import open_peer
from cameraready.stats.gp2scale import rivals, study, workloads
from cameraready.stats.gp2scale.measurements import scores

ARMS = {"gp2scale": "sparse", "matern": "dense", "svgp-256": "SVGP", "vecchia": "Vecchia"}
FREQUENCIES = {"smooth": 4.0, "rough": 25.0}
Cell = tuple[float, float, float]  # seconds, CRPS, density


def problem(kind: str, d: int, n: int, seed: int) -> workloads.Split:
    generator = np.random.default_rng([seed, d, 9])
    waves = generator.normal(size=(d, 20)) * FREQUENCIES[kind] / np.sqrt(d)
    phases, heights = generator.uniform(0, 2 * np.pi, size=20), generator.normal(size=20) / np.sqrt(10)
    X = generator.random((n + 1_000, d))
    y = np.cos(X @ waves + phases) @ heights + 0.1 * generator.normal(size=len(X))
    return workloads.standardised(X[:n], y[:n], X[n:], y[n:])


def measured(
    peers: Callable[[str], Any], kind: str, d: int, n: int, seeds: int, seconds: float
) -> Iterator[tuple[str, Cell]]:
    for arm in ARMS:
        if arm == "matern" and n > rivals.MOST_DENSE:
            continue
        found = []
        for seed in range(seeds):
            split = problem(kind, d, n, seed)
            row = rivals.arms(Context(seed=seed, open_peer=peers))[arm](split, seconds)
            crps = scores(split, row["mean"], row["std"])["crps"]
            found.append((row["fit_seconds"], crps, row.get("density", np.nan)))
        yield arm, tuple(np.median(found, axis=0))


def line(kind: str, d: int, n: int, cells: dict[str, Cell]) -> str:
    best = min(crps for _, crps, _ in cells.values())
    texts = []
    for arm in ARMS:
        if arm not in cells:
            texts.append("too large")
            continue
        seconds, crps, density = cells[arm]
        mark = "**" if crps <= 1.02 * best else ""
        texts.append(f"{seconds:.1f} s, {mark}{crps:.4f}{mark}" + (f", {density:.0%}" if density == density else ""))
    return f"| {kind} | {d} | {n:,} | {' | '.join(texts)} |"


def main(sizes: list[int], seeds: int, seconds: float) -> None:
    print("| function | d | n | sparse: s, CRPS, density | dense: s, CRPS | SVGP: s, CRPS | Vecchia: s, CRPS |")
    print("|---|---|---|---|---|---|---|")
    with contextlib.ExitStack() as stack:

        @functools.cache
        def peers(name: str) -> Any:
            return stack.enter_context(open_peer(study.STUDY.peer(name), Path(study.__file__).parent))

        for kind, d, n in itertools.product(FREQUENCIES, (1, 2, 4), sizes):
            print(line(kind, d, n, dict(measured(peers, kind, d, n, seeds, seconds))), flush=True)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--sizes", type=int, nargs="+", default=[500, 2_000, 8_000])
    options.add_argument("--seeds", type=int, default=1)
    options.add_argument("--seconds", type=float, default=20.0)
    arguments = options.parse_args()
    main(arguments.sizes, arguments.seeds, arguments.seconds)
