"""Gradient smoothing put to the test: losses against the base and against controls that decide, smoothness over depth, norms, overhead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import polars as pl

from cameraready.evidence import (
    Answer,
    Claim,
    Context,
    Figure,
    Study,
    Untested,
    above,
    average,
    below,
    difference,
    interleave,
    ratio,
    versus_best,
    within,
)
from cameraready.optim.depth_smoothing.optimizer import DepthSmoothing
from cameraready.optim.depth_smoothing.training import COMPARED, STRENGTH, Arm, arms, rate_of, train
from cameraready.optim.depth_smoothing.workloads import Task, open_task

PAPER = "Meng, Sugolov and Papyan, 2026, arXiv:2606.30813"
SPEED = "depth-12"

# --- trials ----------------------------------------------------------------------------------------------------------

RUNS = {"digits-mlp": 12}


def plan(tier: str, workload: str) -> Iterator[dict[str, Any]]:
    smoke = tier == "smoke"
    if workload == SPEED:
        yield {"part": "speed", "runs": 10 if tier == "desk" else 20}
        return
    runs = RUNS.get(workload, 10) * (1 if tier == "desk" else 2)
    for run in range((2 if workload == "digits-mlp" else 1) if smoke else runs):
        for name in COMPARED.get(workload, COMPARED["own"]):
            yield {"part": "train", "run": run, "steps": 4 if smoke else 0, "optimizer": name}


#: Learning rates of the user's own tasks and arms, tuned once a worker.
FOUND: dict[tuple[str, str], float] = {}


def trial(
    task: Task, ctx: Context, *, part: str, run: int = 0, steps: int = 0, optimizer: str = "", runs: int = 0
) -> list[dict[str, Any]]:
    seed = 10_000 * ctx.seed + run
    every = ctx.select(arms(task, seed))
    if part == "speed":
        return overhead(task, ctx, every, runs)
    arm = every[optimizer]
    rate = rate_of(task, optimizer, arm, FOUND)
    row = train(task, arm, rate, seed, steps=steps, device=ctx.device, probe=optimizer == "base")
    return [{**row, "alpha": STRENGTH.get(optimizer)}]


def overhead(task: Task, ctx: Context, every: dict[str, Arm], runs: int) -> list[dict[str, Any]]:
    """Forward, backward and step, with and without smoothing, in turn; a row an arm and repeat, two repeats a run."""
    calls = {}
    batch = next(iter(task.batches(0)))
    for name in (name for name in every if name in ("base", "smooth") or name in ctx.own):
        model = task.model(0)
        optimizers = [every[name](base, model) for base in task.optimizers(model, task.rates[0])]

        def step(model: Any = model, optimizers: Any = optimizers) -> None:
            for optimizer in optimizers:
                optimizer.zero_grad()
            task.loss(model, batch).backward()
            for optimizer in optimizers:
                optimizer.step()

        calls[name] = step
    timed = interleave(calls, warmup=2, repeats=2 * runs, arm_column="optimizer")
    return [
        {
            "optimizer": row["optimizer"],
            "run": row["repeat"] // 2,
            "repeat": row["repeat"],
            "step_seconds": row["seconds"],
        }
        for row in timed
    ]


def ready_optimizer(task: Task) -> DepthSmoothing:
    """Over a fresh model of the task."""
    model = task.model(0)
    return DepthSmoothing(task.optimizers(model, task.rates[0])[0], task.blocks(model))


# --- claims ----------------------------------------------------------------------------------------------------------

TRAINED = pl.col("part") == "train"
TEXT = ["text-adamw", "text-muon"]
REDUCED: dict[str, Any] = {"scope": "reduced", "where": TRAINED, "pooled": False, "source": f"{PAPER}, abstract"}
OURS: dict[str, Any] = {"scope": "ours", "where": TRAINED, "pooled": False, "source": "this study"}

STUDY = Study(
    open=open_task,
    workloads={
        "smoke": ["digits-mlp", "text-adamw"],
        "desk": [*TEXT, "digits-vit", "digits-mlp", SPEED],
        "full": ["text-large", *TEXT, "digits-vit", "digits-mlp", SPEED],
    },
    plan=plan,
    trial=trial,
    method="smooth",
    arms="optimizer",
    block="run",
    alone=lambda condition: condition["part"] == "speed",
    libraries={"*": ["torch", "transformers", "scikit-learn", "numpy"]},
    accepts=["object", "value"],
    own_arm="a callable (optimizer, model) -> torch.optim.Optimizer; optimizer is the base (AdamW, say) over the model's parameters",
    component=ready_optimizer,
    covers="the initial weights and the order of the training data",
    covers_own="the seeds that are passed to your model and batches",
    claims=[
        *(
            Claim(
                1,
                part=part,
                paper=f"Language models trained with {name} end at a lower loss.",
                tested=f"Byte-level transformer of six blocks on Python's documentation, {name}, rates tuned for both: validation loss below the base's.",
                measure=ratio("loss", "smooth", "base"),
                rule=below(1.0),
                workloads=[workload],
                **REDUCED,
            )
            for part, name, workload in (("a", "AdamW", TEXT[0]), ("b", "Muon", TEXT[1]))
        ),
        Claim(
            1,
            part="c",
            paper="It is neighbourhood in depth that helps.",
            tested="Validation loss below that of the same smoothing along a shuffled order of the blocks, rates tuned for both.",
            measure=ratio("loss", "smooth", "shuffled"),
            rule=below(1.0),
            workloads=TEXT,
            **REDUCED,
        ),
        Claim(
            1,
            part="d",
            paper="Coupling neighbours is better than coupling everything.",
            tested="Validation loss below that of mixing each update with the average of all blocks, rates tuned for both.",
            measure=ratio("loss", "smooth", "average"),
            rule=below(1.0),
            workloads=TEXT,
            **REDUCED,
        ),
        Claim(
            1,
            part="e",
            paper="The gain is no change of the learning rate.",
            tested="Validation loss below that of the base with the blocks' tuned rate times 0.81 (0.91 at the ends), as smoothing shortens uncorrelated updates.",
            measure=ratio("loss", "smooth", "lr-cut"),
            rule=below(1.0),
            workloads=[TEXT[0]],
            **REDUCED,
        ),
        Claim(
            2,
            part="a",
            paper="Vision transformers train to a lower loss.",
            tested="A ViT of six blocks on scikit-learn's digits, AdamW, rates tuned for both: validation loss below the base's.",
            measure=ratio("loss", "smooth", "base"),
            rule=below(1.0),
            workloads=["digits-vit"],
            **REDUCED,
        ),
        Claim(
            2,
            part="b",
            paper="They classify better.",
            tested="Share of wrong digits below the base's.",
            measure=difference("error", "smooth", "base"),
            rule=below(0.0),
            workloads=["digits-vit"],
            **REDUCED,
        ),
        Claim(
            2,
            part="c",
            paper="It is neighbourhood in depth that helps.",
            tested="Validation loss below that of smoothing along a shuffled order of the blocks, rates tuned for both.",
            measure=ratio("loss", "smooth", "shuffled"),
            rule=below(1.0),
            workloads=["digits-vit"],
            **REDUCED,
        ),
        Untested(
            2,
            part="d",
            paper="Diffusion transformers reach a lower FID.",
            needs="a GPU for days: U-ViT-S/2 on CIFAR-10, 500,000 steps, 50,000 samples and Inception weights",
            source=f"{PAPER}, abstract",
        ),
        Untested(
            3,
            paper="Post-training of language models by reinforcement learning improves.",
            needs="GPUs and the weights of a language model",
            source=f"{PAPER}, abstract",
        ),
        Claim(
            4,
            paper="The overhead is minimal.",
            tested="Transformer of 12 blocks and width 128, 1,024 tokens a step, AdamW: forward, backward and smoothed step below 1.05 times the time of the plain one.",
            scope="reduced",
            source=f"{PAPER}, abstract; the figure of 5 % is ours",
            measure=ratio("step_seconds", "smooth", "base"),
            rule=below(1.05),
            where=pl.col("part") == "speed",
            workloads=[SPEED],
        ),
        Claim(
            5,
            part="a",
            paper="Representations evolve more smoothly over depth.",
            tested="After training, the cosine of what successive blocks add to the residual stream is above the base's.",
            measure=difference("cosine", "smooth", "base"),
            rule=above(0.0),
            workloads=[*TEXT, "digits-vit"],
            **REDUCED,
        ),
        Claim(
            6,
            part="a",
            paper="Without norm control smoothing shortens updates.",
            tested="A tenth into training AdamW's updates (and Muon's), smoothed, are between 0.95 and 1.05 times as long as they would be if neighbours were uncorrelated.",
            measure=average("length", "base"),
            rule=within(0.95, 1.05),
            workloads=[*TEXT, "digits-vit", "digits-mlp"],
            **REDUCED,
        ),
        Claim(
            6,
            part="b",
            paper="Restoring the norms afterwards is better than no control.",
            tested="Validation loss below that of smoothing without normalisation at the base's rate.",
            measure=ratio("loss", "smooth", "unnormalised"),
            rule=below(1.0),
            workloads=[TEXT[0], "digits-mlp"],
            **REDUCED,
        ),
        Claim(
            6,
            part="c",
            paper="It matters whether norms are controlled before or after.",
            tested="Normalising before mixing gives a lower validation loss than rescaling afterwards, rates tuned for both.",
            measure=ratio("loss", "before", "smooth"),
            rule=below(1.0),
            workloads=["digits-mlp"],
            **REDUCED,
        ),
        *(
            Claim(
                7,
                part=part,
                paper=f"(Ours.) A deep perceptron gains from smoothing, compared with {what}.",
                tested=f"Residual perceptron of eight blocks on digits (and your own model): validation loss below that of {what}.",
                measure=ratio("loss", "smooth", peer),
                rule=below(1.0),
                workloads=["digits-mlp", "own"],
                **OURS,
            )
            for part, peer, what in (
                ("a", "base", "AdamW"),
                ("b", "shuffled", "a shuffled order of the blocks"),
                ("c", "average", "the average of all blocks"),
            )
        ),
        Claim(
            7,
            part="d",
            paper="(Ours.) Sharpening over depth, the opposite, does harm.",
            tested="Residual perceptron on digits: validation loss of the Laplacian kernel above the base's, rates tuned for both.",
            measure=ratio("loss", "laplacian", "base"),
            rule=above(1.0),
            workloads=["digits-mlp"],
            **OURS,
        ),
        Claim(
            8,
            paper="(Ours.) Without norm control, what smoothing does to the loss is what a learning rate cut by the same factor does.",
            tested="Validation loss of smoothing without normalisation within 1 % of that of the base with the blocks' rate times 0.81 (0.91 at the ends).",
            measure=ratio("loss", "unnormalised", "lr-cut"),
            rule=within(0.99, 1.01),
            workloads=[TEXT[0], "own"],
            **OURS,
        ),
        Claim(
            9,
            paper="(Ours.) That representations evolve more smoothly is due to neighbourhood in depth.",
            tested="The cosine of what successive blocks add is above that after smoothing along a shuffled order.",
            measure=difference("cosine", "smooth", "shuffled"),
            rule=above(0.0),
            workloads=[*TEXT, "digits-vit", "digits-mlp"],
            **OURS,
        ),
    ],
    answer=Answer(
        measure=versus_best(
            "loss", "smooth", exclude=("laplacian", "before", "unnormalised", "smooth-0.1", "smooth-0.4")
        ),
        where=TRAINED,
        better="smooth over depth on {workload}: the validation loss is {estimate} times [{low}, {high}] that of {peer}",
        worse="do without smoothing on {workload}: its validation loss is {estimate} times [{low}, {high}] that of {peer}",
        tie="smoothing over depth makes no difference on {workload}: {estimate} times [{low}, {high}] the validation loss of {peer}",
        workloads=[*TEXT, "digits-vit", "digits-mlp", "text-large", "own"],
    ),
    figures=[
        Figure(
            "Validation loss and strength of the smoothing, deep perceptron on digits",
            x="alpha",
            y="loss",
            source="this study",
            where=TRAINED & pl.col("alpha").is_not_null(),
            workloads=["digits-mlp"],
            log_x=False,
            x_title="alpha (0: the base)",
            y_title="validation loss",
        ),
    ],
    timeout=600.0,
    memory=4.0,
)
