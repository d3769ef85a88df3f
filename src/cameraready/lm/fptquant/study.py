"""FPTQuant put to the test: exactness, flat weights, massive tokens, INT4 against other transforms, what each part is worth, its price."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import polars as pl

from cameraready.evidence import (
    Answer,
    Claim,
    Context,
    Cost,
    Study,
    Untested,
    above,
    always,
    below,
    ratio,
    versus_best,
    violations,
)
from cameraready.lm._workload import ACCEPTS, LMWorkload
from cameraready.lm.fptquant.host import TRANSFORMS
from cameraready.lm.fptquant.merging import FPTConfig
from cameraready.lm.fptquant.quantizer import FPTQuantizer
from cameraready.lm.fptquant.trials import FULL_BITS, exact_everywhere, exact_here, judged, on_given, on_trained, speed
from cameraready.lm.fptquant.workloads import SPEED, TRAINED, TrainedModel, WideModel, open_workload

PAPER = "van Breugel, Bondarenko, Whatmough and Nagel, 2025, arXiv:2506.04985"
QWEN, GEMMA = "qwen2.5-coder-0.5b-instruct", "gemma-3-270m"

# --- plan ------------------------------------------------------------------------------------------------------------

FITTED = ("rtn", "smooth", "hadamard", "fpt-start", "fpt-local")
LEFT_OUT = tuple(f"no-{name}" for name in TRANSFORMS)
ALONE = tuple(f"only-{name}" for name in ("prerope", "value", "residual_scale"))
TRAINED_ARMS = ("spin", "fpt")
TRAINED_WITHOUT = ("trained-no-prerope", "trained-no-value")


def quantise(quantizer: str, block: int = -1, **more: Any) -> dict[str, Any]:
    """A condition: W4A4KV4 and the residual stream in full precision, unless `more` says otherwise."""
    bits = {"weights": 4, "activations": 4, "kv": 4, "residual": FULL_BITS}
    where = {} if block < 0 else {"block": block}
    return {"part": "quantise", **where, "quantizer": quantizer, **bits, **more}


def plan(tier: str, workload: str) -> Iterator[dict[str, Any]]:
    smoke = tier == "smoke"
    if workload in SPEED:
        yield {"part": "speed", "tokens": 16 if smoke else 256, "repeats": 2 if smoke else 20}
    elif workload in TRAINED:
        for block in range(1 if smoke else 10 if tier == "desk" else 30):
            yield from trained_block(block, smoke)
    else:
        yield from given_model(workload, smoke)


def trained_block(block: int, smoke: bool) -> Iterator[dict[str, Any]]:
    steps = 2 if smoke else 30
    yield {"part": "exact", "block": block, "quantizer": "fpt"}
    for outliers in (True,) if smoke else (True, False):
        more = {"outliers": outliers, "local": 2 if smoke else 40}
        for name in FITTED if outliers or smoke else (*FITTED, *LEFT_OUT, *ALONE):
            yield quantise(name, block, steps=0, **more)
        for name in TRAINED_ARMS if outliers else (*TRAINED_ARMS, *TRAINED_WITHOUT):
            yield quantise(name, block, steps=steps, **more)
    stream = {"weights": FULL_BITS, "activations": FULL_BITS, "kv": FULL_BITS, "residual": 8}
    for name in ("rtn", "only-residual_scale"):
        yield quantise(name, block, steps=0, outliers=False, local=0, **stream)


def given_model(workload: str, smoke: bool) -> Iterator[dict[str, Any]]:
    """A packaged or a user's model: exactness, then arms on the same ten windows of text."""
    size = {"windows": 2, "length": 24, "calibration": 1} if smoke else {"windows": 10, "length": 64, "calibration": 4}
    yield {"part": "exact", "quantizer": "fpt", **size}
    stream = {"weights": FULL_BITS, "activations": FULL_BITS, "kv": FULL_BITS, "residual": 8}
    for name in ("rtn", "only-residual_scale"):
        yield quantise(name, steps=0, local=0, rows=64, **size, **stream)
    # Packaged weights are four-bit inside already: only activations and the cache are quantised there.
    weights = 4 if workload == "own" else FULL_BITS
    local = {"local": 2 if smoke else 8, "rows": 64, "steps": 0}
    for name in ("rtn", "hadamard", "fpt-local") if workload != "own" else ():
        yield quantise(name, weights=FULL_BITS, activations=FULL_BITS, **local, **size)
    for activations in (8, 4) if workload == "own" else (8,) if workload != GEMMA else ():
        for name in (
            ("rtn", "hadamard", "fpt-local") if workload == QWEN else ("rtn", "smooth", "hadamard", "fpt-local")
        ):
            yield quantise(name, weights=weights, activations=activations, **local, **size)
    if workload == "own":  # the tasks that the user named with --tasks lm-eval:NAME, if any
        for name in ("full", "rtn", "fpt-local"):
            bits = {"weights": weights, "activations": 8}
            yield {**quantise(name, **bits, **local, **size), "part": "lm-eval", "limit": 2 if smoke else 50}


# --- trials ----------------------------------------------------------------------------------------------------------


def prepare(workload: Any, ctx: Context) -> dict[str, np.ndarray]:
    return workload.prepare() if isinstance(workload, TrainedModel) else {}


def trial(workload: Any, ctx: Context, *, part: str, **condition: Any) -> list[dict[str, Any]]:
    if part == "speed":
        return speed(workload, ctx, **condition)
    if isinstance(workload, TrainedModel):
        if part == "exact":
            return exact_everywhere(workload, ctx, **condition)
        return on_trained(workload, ctx, **condition)
    return {"exact": exact_here, "lm-eval": judged, "quantise": on_given}[part](workload, ctx, **condition)


# --- the user's model ------------------------------------------------------------------------------------------------


def ready_quantizer(workload: Any) -> FPTQuantizer:
    """A quantizer of the workload's model, with every transform that is exact on it, optimised on its weights."""
    if isinstance(workload, LMWorkload):
        lm = workload.model("cpu", "float32")
        return FPTQuantizer(lm.model, FPTConfig(unsupported="skip")).optimize_local(steps=20, rows=64)
    model = workload.model() if isinstance(workload, WideModel) else workload.empty()
    return FPTQuantizer(model).optimize_local(steps=20, rows=64)


def own_cost(spec: Any, conditions: list[dict[str, Any]], device: str, dtype: str) -> Cost:
    """Hours and memory of the trials on a user's model: passes over text, rotations merged into all weights, fitting, and two models held."""
    from cameraready.lm._workload import cost

    arms = [condition for condition in conditions if "windows" in condition and condition["part"] != "lm-eval"]
    length = max((condition["length"] for condition in arms), default=64)
    # In tokens of a forward pass: a rotation of width d merged into all weights costs about d, a step of the fitting about d / 8.
    tokens = sum((2 * c["windows"] + c["calibration"]) * length + 4096 + 512 * c.get("local", 0) for c in arms)
    found = cost(
        spec,
        prompt_tokens=length,
        new_tokens=0,
        passes=max(tokens // length, 1),
        device=device,
        dtype=dtype or "float32",
    )
    note = "the model is held twice, as it was and transformed, with a head of its own if embeddings are tied; tasks of lm-eval are not counted"
    return dataclasses.replace(found, memory_gib=2.2 * found.memory_gib, notes=(*found.notes, note))


# --- claims ----------------------------------------------------------------------------------------------------------

QUANTISED = pl.col("part") == "quantise"
INT4 = QUANTISED & (pl.col("weights") == 4) & (pl.col("activations") == 4) & (pl.col("residual") == FULL_BITS)
STREAM = QUANTISED & (pl.col("residual") == 8)
KV4 = QUANTISED & (pl.col("kv") == 4) & (pl.col("activations") == FULL_BITS)
A8KV4 = QUANTISED & (pl.col("kv") == 4) & (pl.col("activations") == 8)
SMALL = ["trained-llama"]
REAL = [QWEN, GEMMA]
STATES = (("with outliers put in", True), ("as trained", False))


def int4(number: int, part: str, paper: str, better: str, worse: str, outliers: bool, **more: Any) -> Claim:
    """One competitor against another at W4A4KV4 on the model trained here, by the perplexity on text held out."""
    state = {value: text for text, value in STATES}[outliers]
    return Claim(
        number,
        part=part,
        paper=paper,
        tested=f"Llama of four layers, {state}, static W4A4KV4: the perplexity of {better} below {more.get('limit', 1.0):g} times that of {worse}.",
        scope=more.get("scope", "reduced"),
        source=more.get("source", f"{PAPER}, abstract"),
        measure=ratio("perplexity", better, worse),
        rule=below(more.get("limit", 1.0)),
        where=INT4 & (pl.col("outliers") == outliers),
        workloads=SMALL,
        pooled=False,
    )


STUDY = Study(
    open=open_workload,
    workloads={
        "smoke": ["sketched-llama", "tiny-qwen3", "width-64"],
        "desk": ["trained-llama", QWEN, GEMMA, "width-896"],
        "full": ["trained-llama", QWEN, GEMMA, "width-896"],
    },
    plan=plan,
    trial=trial,
    prepare=prepare,
    method="fpt",
    arms="quantizer",
    block="block",
    alone=lambda condition: condition["part"] == "speed",
    libraries={"*": ["torch", "transformers"]},
    accepts=list(ACCEPTS),
    takes=["data", "tasks"],
    own_arm="a callable (model, batches) -> quantised model, called as model(ids).logits; batches are token ids (batch, tokens) to calibrate on",
    component=ready_quantizer,
    cost=own_cost,
    covers="the outliers put in, the calibration text and the text measured on; for packaged models the text measured on",
    covers_own="the text measured on, not the text that the ranges were found on",
    claims=[
        Claim(
            1,
            part="a",
            paper="Every transform leaves the model's function as it is, alone and together with others.",
            tested="All 64 subsets of the six transforms, at random parameters, on a trained Llama in float64: no logit differs by 1e-9.",
            scope="exact",
            source=f"{PAPER}, abstract",
            measure=violations(pl.col("difference") >= pl.col("limit")),
            rule=always(),
            where=pl.col("part") == "exact",
            workloads=SMALL,
            pooled=False,
        ),
        Claim(
            1,
            part="b",
            paper="The same on a real model in float32.",
            tested="All transforms that are exact on the model together, at random parameters, in float32: no logit differs by 1e-3.",
            scope="exact",
            source=f"{PAPER}, abstract; the limit is ours",
            measure=violations(pl.col("difference") >= pl.col("limit")),
            rule=always(),
            where=pl.col("part") == "exact",
            workloads=[*REAL, "own"],
            pooled=False,
        ),
        *(
            Claim(
                2,
                part=part,
                paper="Optimising the transforms on the weights alone makes the weights flatter.",
                tested=f"Llama of four layers, {text}: the sum of the projections' 4-norms below that of {what}.",
                scope="reduced",
                source=f"{PAPER}, abstract",
                measure=ratio("weight_norm", "fpt-local", peer),
                rule=below(1.0),
                where=INT4 & (pl.col("outliers") == state),
                workloads=SMALL,
                pooled=False,
            )
            for part, peer, what, (text, state) in (
                ("a", "rtn", "no transform", STATES[0]),
                ("b", "hadamard", "random Hadamard transforms", STATES[0]),
                ("c", "rtn", "no transform", STATES[1]),
                ("d", "hadamard", "random Hadamard transforms", STATES[1]),
            )
        ),
        int4(2, "e", "It lowers the error of quantisation.", "fpt-local", "rtn", True),
        int4(2, "f", "It lowers the error below that of random Hadamard transforms.", "fpt-local", "hadamard", True),
        int4(2, "g", "It lowers the error of quantisation.", "fpt-local", "rtn", False),
        int4(2, "h", "It lowers the error below that of random Hadamard transforms.", "fpt-local", "hadamard", False),
        Claim(
            3,
            part="a",
            paper="Scaling the residual stream token by token makes its static quantisation work where massive tokens forbid it.",
            tested="Llama of four layers trained with massive tokens, only the stream quantised, static 8 bits: perplexity below that without S_n.",
            scope="reduced",
            source=f"{PAPER}, abstract",
            measure=ratio("perplexity", "only-residual_scale", "rtn"),
            rule=below(1.0),
            where=STREAM,
            workloads=SMALL,
            pooled=False,
        ),
        Claim(
            3,
            part="b",
            paper="Scaling the residual stream token by token makes its static quantisation work where massive tokens forbid it.",
            tested="A real model, only the stream quantised, static 8 bits: perplexity below that without S_n.",
            scope="reduced",
            source=f"{PAPER}, abstract",
            measure=ratio("perplexity", "only-residual_scale", "rtn"),
            rule=below(1.0),
            where=STREAM,
            workloads=[*REAL, "own"],
            pooled=False,
        ),
        int4(4, "a", "On par with learned rotations (SpinQuant) or above.", "fpt", "spin", True, limit=1.01),
        int4(4, "b", "On par with learned rotations (SpinQuant) or above.", "fpt", "spin", False, limit=1.01),
        int4(4, "c", "On par with random Hadamard transforms (QuaRot) or above.", "fpt", "hadamard", True, limit=1.01),
        int4(4, "d", "On par with random Hadamard transforms (QuaRot) or above.", "fpt", "hadamard", False, limit=1.01),
        Untested(
            4,
            part="e",
            paper="Slightly less accurate than FlatQuant, which needs kernels of its own.",
            needs="FlatQuant's learned Kronecker transforms of every linear layer's input, and a model of billions of weights",
            source=f"{PAPER}, abstract",
        ),
        Untested(
            4,
            part="f",
            paper="Up to 3.9 times faster than floating point; FlatQuant is up to 29 % slower than that.",
            needs="a GPU and kernels for static INT4 matrix products",
            source=f"{PAPER}, abstract",
        ),
        int4(5, "a", "The pre-RoPE transform helps.", "fpt", "trained-no-prerope", False),
        int4(5, "b", "The value transform helps.", "fpt", "trained-no-value", False),
        int4(5, "c", "The residual scaling helps.", "fpt-local", "no-residual_scale", False),
        int4(5, "d", "The pre-RoPE transform helps.", "fpt-local", "no-prerope", False),
        int4(5, "e", "The value transform helps.", "fpt-local", "no-value", False),
        int4(
            6,
            "a",
            "(Ours.) End-to-end training adds to the local optimisation.",
            "fpt",
            "fpt-local",
            True,
            scope="ours",
            source="this study",
        ),
        int4(
            6,
            "b",
            "(Ours.) End-to-end training adds to the local optimisation.",
            "fpt",
            "fpt-local",
            False,
            scope="ours",
            source="this study",
        ),
        *(
            Claim(
                7,
                part=part,
                paper=f"(Ours.) On real models the transforms spare the cache at 4 bits more than {what}.",
                tested=f"Activations in {words}, cache at 4 bits static: perplexity of FPTQuant, fitted to the weights, below that of {what}.",
                scope="ours",
                source="this study",
                measure=ratio("perplexity", "fpt-local", peer),
                rule=below(1.0),
                where=where,
                workloads=[*REAL] if where is KV4 else [QWEN, "own"],
                pooled=False,
            )
            for part, peer, what, words, where in (
                ("a", "rtn", "rounding alone", "full precision", KV4),
                ("b", "hadamard", "random Hadamard transforms", "full precision", KV4),
                ("c", "rtn", "rounding alone", "8 bits static", A8KV4),
                ("d", "hadamard", "random Hadamard transforms", "8 bits static", A8KV4),
            )
        ),
        Claim(
            8,
            paper="(Ours.) The two transforms that run with the model cost little.",
            tested="Llama of width 896, 256 tokens, full precision: a forward pass with both below 1.1 times the one without.",
            scope="ours",
            source="this study",
            measure=ratio("forward_seconds", "fpt", "merged"),
            rule=below(1.1),
            where=pl.col("part") == "speed",
            workloads=["width-896"],
            pooled=False,
        ),
        Claim(
            9,
            paper="(Ours.) Without the end-to-end training, rounding alone is not enough at 4 bits.",
            tested="Llama of four layers as trained: the perplexity of static W4A4KV4 rounding above 1.05 times that of full FPTQuant.",
            scope="ours",
            source="this study",
            measure=ratio("perplexity", "rtn", "fpt"),
            rule=above(1.05),
            where=INT4 & ~pl.col("outliers"),
            workloads=SMALL,
            pooled=False,
        ),
    ],
    answer=Answer(
        # Parts of the method are no competitors; nor is what was trained end to end a fair one to what was not.
        measure=versus_best(
            "perplexity", "fpt-local", exclude=(*LEFT_OUT, *ALONE, *TRAINED_ARMS, *TRAINED_WITHOUT, "fpt-start")
        ),
        where=QUANTISED & (pl.col("kv") == 4) & (pl.col("residual") == FULL_BITS) & ~pl.col("outliers"),
        by="activations",
        by_label="with activations at {level} bits",
        better="transform before you quantise {workload}: fitted to the weights alone, FPTQuant's perplexity is {estimate} times [{low}, {high}] that of {peer}",
        worse="do without FPTQuant on {workload}: its perplexity is {estimate} times [{low}, {high}] that of {peer}",
        tie="FPTQuant makes no difference on {workload}: {estimate} times [{low}, {high}] the perplexity of {peer}",
        workloads=["trained-llama", *REAL, "own"],
    ),
    timeout=900.0,
    memory=12.0,
)
