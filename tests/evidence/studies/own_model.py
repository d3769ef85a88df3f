"""A study that takes a language model with the user's own prompts and tasks: it measures the length of what it was given."""

from pathlib import Path

from cameraready.evidence import Cost, Study


def open_model(spec):
    prompts = Path(spec.options["data"]).read_text().splitlines() if "data" in spec.options else []
    weights = Path(spec.path).stat().st_size if spec.path else 0
    return {"prompts": len(prompts), "options": dict(spec.options), "weights": weights}


def trial(model, ctx, *, tokens):
    tasks = model["options"].get("tasks", "")
    columns = model["options"].get("data_columns", "")
    return {"arm": "long", "prompts": model["prompts"], "tasks": tasks, "columns": columns, "own": ctx.is_own_workload}


def cost(spec, conditions, device, dtype):
    """An hour for each thousand tokens; half the memory in 16 bits."""
    if spec.name == "org/nowhere":
        raise ValueError("there is no such model")
    return Cost(
        hours=sum(condition["tokens"] for condition in conditions) / 1000,
        memory_gib=8.0 if dtype == "bfloat16" else 16.0,
        downloads=[f"{spec.name}, 16 GB"] if spec.kind == "hf" else [],
        notes=[f"speed of {device} assumed"],
    )


STUDY = Study(
    open=open_model,
    workloads={"smoke": ["small"], "desk": ["small"], "full": []},
    plan=lambda tier, workload: [{"tokens": 500}, {"tokens": 1500}],
    trial=trial,
    method="long",
    arms="arm",
    block="seed",
    seeds={"smoke": 1, "desk": 12},
    accepts=["hf", "checkpoint", "value"],
    takes=["data", "tasks"],
    cost=cost,
)
