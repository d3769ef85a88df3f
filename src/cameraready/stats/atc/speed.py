"""Processor time per sample of ATC and of the packages with the same exact scan, in turn, in one process each, one thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from cameraready.evidence import Context
from cameraready.stats.atc import ATC, atc

#: Lengths over which the growth of the time per sample is looked at.
LENGTHS = (1_000, 10_000, 100_000)
BATCH, STREAM = 100_000, 10_000

Timed = Callable[[np.ndarray], float]


def timed_batch(scan: str) -> Timed:
    """Seconds of `atc` for all statistics of a series; the threshold is never reached, as in the rivals."""

    def call(x: np.ndarray) -> float:
        started = time.thread_time()
        atc(x, scan=scan, threshold=1e90)  # type: ignore[arg-type]
        return time.thread_time() - started

    return call


def timed_stream(x: np.ndarray) -> float:
    detector, samples = ATC(threshold=1e90), x.tolist()
    statistic = np.empty(len(samples))
    started = time.thread_time()
    for i, value in enumerate(samples):
        detector.update(value)
        statistic[i] = detector.statistic
    return time.thread_time() - started


def elsewhere(ctx: Context, peer: str, function: str) -> Timed:
    return lambda x: float(getattr(ctx.peer(peer), function)(x)["seconds"])


def batch_arms(ctx: Context) -> dict[str, Timed]:
    arms = {"atc": timed_batch("exact"), "atc-geometric": timed_batch("geometric")}
    return ctx.select({**arms, "focus-cpt": elsewhere(ctx, "focus-cpt", "focus_batch")})


def stream_arms(ctx: Context) -> dict[str, Timed]:
    return ctx.select(
        {
            "atc": timed_stream,
            "focus-cpt": elsewhere(ctx, "focus-cpt", "focus_stream"),
            "changepoint-online": elsewhere(ctx, "changepoint-online", "changepoint_stream"),
        }
    )


def interleaved(arms: dict[str, Timed], how: str, length: int, first: int, count: int) -> list[dict[str, Any]]:
    """Rows of microseconds per sample for `count` series from number `first` on; the order of the arms rotates.

    A short series is gone through several times, so that what is timed is never shorter than `STREAM` samples.
    """
    repeats = max(STREAM // length, 1)
    for call in arms.values():
        call(np.random.default_rng(0).normal(size=1_000))  # compilation and first use
    rows = []
    for block in range(first, first + count):
        x = np.random.default_rng([77, block]).normal(size=length)
        names = list(arms)
        turn = block % len(names)
        for name in names[turn:] + names[:turn]:
            micros = sum(arms[name](x) for _ in range(repeats)) / (repeats * length) * 1e6
            rows.append({"arm": name, "block": f"series {block}", "how": how, "length": length, "micros": micros})
    return rows


def measure(ctx: Context, first: int, count: int) -> list[dict[str, Any]]:
    """All timings: streams, batches, and batches of growing length of the geometric scan."""
    rows = interleaved(stream_arms(ctx), "stream", STREAM, first, count)
    rows += interleaved(batch_arms(ctx), "batch", BATCH, first, count)
    own = {name: call for name, call in batch_arms(ctx).items() if name != "focus-cpt"}
    for length in LENGTHS:
        rows += interleaved(own, "growth", length, first, count)
    return rows
