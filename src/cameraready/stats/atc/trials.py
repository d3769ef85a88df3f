"""What the study of ATC runs: which arms on which streams, and what one trial measures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from cameraready.evidence import Context, Spec
from cameraready.stats.atc import ATC, atc, speed
from cameraready.stats.atc.rivals import DEPLOYABLE, TRACKERS, Knowledge, Track, Tracker, regret
from cameraready.stats.atc.workloads import (
    LOADERS,
    SCENARIOS,
    SWEEP,
    Scenario,
    Series,
    alternating,
    changes_of,
    f1_score,
    noise_of,
    own_series,
)

# --- plan -----------------------------------------------------------------------------------------------------------

#: Blocks, and runs averaged in each.
BLOCKS = {"smoke": 2, "desk": 12, "full": 20}
RUNS = {"smoke": 2, "desk": 10, "full": 50}
NULL_RUNS = {"smoke": 20, "desk": 200, "full": 1_000}
PRACTICE = 10  # series that a tuned arm may tune on
STRETCHES = 12  # of a user's series, which has no other blocks
WHERE = {
    "confounded": ("atc", "cusum-frozen", "oracle"),
    "noise": ("atc", "atc-geometric", "atc-mad", "constant-6"),
    "many": ("atc", "bocpd", "oracle"),
    "dense": ("atc", "atc-each"),
    "annotated": ("atc", "atc-mad", "constant-6", *DEPLOYABLE, "pelt"),
    "own": ("atc", "atc-mad", "constant-6", *DEPLOYABLE),
}
EVERYWHERE = tuple(name for name in TRACKERS if name != "cusum-frozen")


def plan(tier: str, workload: str) -> Iterator[dict[str, Any]]:
    if workload == "speed":
        yield from ({"part": "speed", "first": first, "count": 5} for first in (0, 5))
        return
    if workload == "own":
        yield from ({"part": "own", "arm": arm} for arm in WHERE["own"])
        return
    if workload == "annotated":
        names = list(LOADERS)[:2] if tier == "smoke" else list(LOADERS)
        yield from ({"part": "annotated", "block": name, "arm": arm} for name in names for arm in WHERE["annotated"])
        return
    runs = (NULL_RUNS if workload == "noise" else RUNS)[tier]
    for block in range(BLOCKS[tier]):
        for arm in WHERE.get(workload, EVERYWHERE):
            part = {"noise": "alarms", "many": "sweep", "dense": "dense"}.get(workload, "regret")
            yield {"part": part, "block": f"seed {block}", "arm": arm, "runs": runs, "tier": tier}


# --- trials ---------------------------------------------------------------------------------------------------------


def open_workload(spec: Spec) -> Any:
    """A scenario, "annotated" or "speed" by name; the user's column as a `Series`."""
    if spec.kind == "table":
        return own_series(spec)
    return SCENARIOS.get(spec.name, spec.name)


def trial(
    workload: Any,
    ctx: Context,
    *,
    part: str,
    arm: str = "",
    block: str = "",
    runs: int = 0,
    tier: str = "",
    **more: int,
) -> list[dict[str, Any]]:
    if part == "speed":
        return speed.measure(ctx, more["first"], more["count"])
    if part == "dense":
        return dense(workload, ctx, arm, block, runs, tier)
    track = tracker(ctx, arm)
    if part == "annotated":
        return [on_series(LOADERS[block](), track)]
    if part == "own":
        return stretches(workload, track)
    seed = int(block.removeprefix("seed "))
    if part == "sweep":
        rows = []
        for n_changes in SWEEP:
            scenario = Scenario("many", alternating(n_changes), workload.horizons)
            row = regrets(scenario, track, scenario.horizons[tier][-1], ctx.seed, seed, runs)
            segments = n_changes + 1
            rows.append({**row, "segments": segments, "loss_per_segment": row["loss"] / segments})
        return rows
    if part == "alarms":
        return [false_alarms(workload, track, ctx.seed, seed, runs, tier)]
    return [regrets(workload, track, horizon, ctx.seed, seed, runs) for horizon in workload.horizons[tier]]


def tracker(ctx: Context, arm: str) -> Tracker:
    """The arm by name; a user's own, ``f(x) -> predictions``, is also held to not looking ahead."""
    chosen = ctx.select(TRACKERS)[arm]
    if arm not in ctx.own:
        return chosen

    def track(x: np.ndarray, known: Knowledge) -> Track:
        prediction = np.asarray(chosen(x.copy()), dtype=np.float64)  # type: ignore[call-arg]
        if prediction.shape != x.shape or not np.isfinite(prediction[1:]).all():
            raise ValueError(
                f"{arm} must return {len(x)} finite predictions (the first may be NaN), got {prediction.shape}"
            )
        half = len(x) // 2
        if not np.allclose(np.asarray(chosen(x[:half].copy()), dtype=np.float64)[1:], prediction[1:half]):  # type: ignore[call-arg]
            raise ValueError(f"{arm} predicts otherwise when later samples are withheld: it looks ahead")
        none = np.empty(0, dtype=np.int64)
        return Track(prediction, none, none)

    return track


def regrets(scenario: Scenario, track: Tracker, horizon: int, base: int, block: int, runs: int) -> dict[str, Any]:
    """Regret and alarms, averaged over `runs` streams; the same streams for every arm."""
    level = scenario.level(horizon)
    practice = np.array([scenario.sample(horizon, (1, base, block, horizon, i)) for i in range(PRACTICE)])
    known = Knowledge(tuple(int(c) for c in changes_of(level)), practice, level)
    tracks = [track(scenario.sample(horizon, (0, base, block, horizon, run)), known) for run in range(runs)]
    loss = float(np.mean([regret(found.prediction, level) for found in tracks]))
    return {
        "horizon": horizon,
        "loss": loss,
        "loss_per_log": loss / np.log(horizon),
        "alarms": float(np.mean([len(found.alarms) for found in tracks])),
    }


def false_alarms(scenario: Scenario, track: Tracker, base: int, block: int, runs: int, tier: str) -> dict[str, Any]:
    """Share of streams of pure noise with any alarm, and its Clopper-Pearson upper limit at 99.5 %: 95 % for ten blocks together."""
    from scipy.special import betaincinv

    horizon = scenario.horizons[tier][-1]
    alarmed = sum(
        len(track(scenario.sample(horizon, (0, base, block, horizon, run)), Knowledge()).alarms) > 0
        for run in range(runs)
    )
    bound = 1.0 if alarmed == runs else float(betaincinv(alarmed + 1, runs - alarmed, 1 - 0.05 / 10))
    return {
        "horizon": horizon,
        "streams": runs,
        "alarmed": alarmed,
        "alarmed_share": alarmed / runs,
        "alarm_bound": bound,
    }


def dense(scenario: Scenario, ctx: Context, arm: str, block: str, runs: int, tier: str) -> list[dict[str, Any]]:
    """Ten streams followed by one detector or by one each."""
    horizon = scenario.horizons[tier][-1]
    level = scenario.level(horizon)
    losses, alarms = [], []
    for run in range(runs):
        x = scenario.sample(horizon, (0, ctx.seed, int(block.removeprefix("seed ")), horizon, run))
        found = [atc(x)] if arm == "atc" else [atc(stream, alpha=0.05 / x.shape[1]) for stream in x.T]
        prediction = found[0].prediction if arm == "atc" else np.stack([each.prediction for each in found], axis=1)
        losses.append(float(((prediction[1:] - level[1:]) ** 2).sum()))
        alarms.append(sum(len(each.alarms) for each in found))
    return [{"horizon": horizon, "loss": float(np.mean(losses)), "alarms": float(np.mean(alarms))}]


def on_series(series: Series, track: Tracker) -> dict[str, Any]:
    """Mean squared error of predictions, in units of the noise's variance, and how well annotated changes were found."""
    x = series.standardised()
    found = track(x, Knowledge())
    return {
        "length": len(x),
        "loss": float(np.mean((found.prediction[1:] - x[1:]) ** 2)),
        "alarms": float(len(found.alarms)),
        "f1": f1_score(found.changes, series.annotations),
    }


def stretches(series: Series, track: Tracker) -> list[dict[str, Any]]:
    """The same for each of `STRETCHES` equal stretches of time of one run over the user's series."""
    x = series.standardised()
    found = track(x, Knowledge())
    squared = (found.prediction - x) ** 2
    squared[0] = np.nan
    alarms = np.isin(np.arange(len(x)), found.alarms)
    return [
        {
            "block": f"stretch {i + 1}",
            "length": len(part),
            "loss": float(np.nanmean(squared[part])),
            "alarms": float(alarms[part].sum()),
        }
        for i, part in enumerate(np.array_split(np.arange(len(x)), STRETCHES))
    ]


def ready_detector(workload: Any) -> ATC:
    """An `ATC` for the user's series: the noise that was found in it, all its samples taken in."""
    if not isinstance(workload, Series):
        raise AttributeError("only a series of the user's has a detector of its own")
    return ATC(sigma=noise_of(workload.values)).learn_many(workload.values)
