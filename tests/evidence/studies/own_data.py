"""A study that takes the user's data: the mean of some values, wherever they come from."""

import numpy as np

from cameraready.evidence import Study
from cameraready.evidence.specs import read_table


def open_values(spec):
    if spec.kind == "table":
        return read_table(spec)[1].to_numpy(dtype=float)
    if spec.kind == "value":
        return spec.value["values"] if isinstance(spec.value, dict) else spec.value
    return np.arange(5.0)


def trial(values, ctx, *, resample):
    chosen = values[ctx.rows(len(values))] if resample else values
    return {"arm": "mean", "value": float(np.mean(chosen))}


def settled(values, conditions):
    values = values["values"] if isinstance(values, dict) else values
    return f"all three values are {values[0]:g}" if len(values) == 3 and len(set(values)) == 1 else ""


STUDY = Study(
    open=open_values,
    workloads={"smoke": ["five"], "desk": ["five"], "full": []},
    plan=lambda tier, workload: [{"resample": False}],
    trial=trial,
    method="mean",
    arms="arm",
    block="seed",
    seeds={"smoke": 2, "desk": 12},
    accepts=["table", "value"],
    settled=settled,
    component=lambda values: lambda: float(np.mean(values)),
)
