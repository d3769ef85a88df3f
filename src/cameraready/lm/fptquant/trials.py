"""What the study's trials measure: cross-entropies of quantised models, exactness, the time of the online transforms."""

from __future__ import annotations

import itertools
import math
import weakref
from typing import Any

import numpy as np
import torch

from cameraready.evidence import Context, interleave
from cameraready.lm._judged import lm_eval_rows, lm_eval_tasks
from cameraready.lm._workload import LMWorkload
from cameraready.lm.fptquant.base_model import ill_conditioned, in_float64
from cameraready.lm.fptquant.host import TRANSFORMS
from cameraready.lm.fptquant.merging import FPTConfig
from cameraready.lm.fptquant.optimisation import p_norm
from cameraready.lm.fptquant.quantisers import QuantConfig
from cameraready.lm.fptquant.quantizer import FPTQuantizer
from cameraready.lm.fptquant.rivals import NONE, RECIPES
from cameraready.lm.fptquant.workloads import TrainedModel, WideModel, nats, texts

FULL_BITS = 16  # stands for "not quantised" in conditions


def bits_of(weights: int, activations: int, kv: int, residual: int) -> QuantConfig:
    given = {"weights": weights, "activations": activations, "kv": kv, "residual": residual}
    return QuantConfig(**{name: None if bits >= FULL_BITS else bits for name, bits in given.items()})


def on_trained(
    workload: TrainedModel,
    ctx: Context,
    *,
    block: int,
    quantizer: str,
    outliers: bool,
    local: int,
    steps: int,
    **bits: int,
) -> list[dict[str, Any]]:
    seed = 1_000 * ctx.seed + block
    batches, held_out = workload.text(seed)
    model = workload.model(ctx.prepared)
    if outliers:
        model = ill_conditioned(model, seed, ids=torch.cat(batches))
    arm = ctx.select(RECIPES)[quantizer]
    row: dict[str, Any] = {"windows": len(held_out)}
    if quantizer in RECIPES and quantizer not in ctx.own:
        options = {"steps": local, "lr": 3e-2}
        made = arm.make(model, batches, bits_of(**bits), seed=seed, local=options, steps=steps)
        row["weight_norm"] = weight_norm(made)
        made = made.model
    else:
        made = arm(model, batches)
    found, plain = nats(made, held_out), nats(model, held_out)
    return [{**row, **scores(float(np.mean(found)), float(np.mean(plain)))}]


#: Cross-entropies of opened models in full precision, found once a worker.
PLAIN: weakref.WeakKeyDictionary[Any, dict[Any, list[float]]] = weakref.WeakKeyDictionary()


def weight_norm(fpt: FPTQuantizer) -> float:
    """Sum over the projections of the decoder layers of (mean |w|^4)^(1/4), as merged."""
    names = [
        name
        for layer in fpt.host.layers
        for name in (layer.q, layer.k, layer.v, layer.o, layer.gate, layer.up, layer.down)
    ]
    return sum(float(p_norm(fpt.model.get_submodule(name).weight.detach(), 4.0)) for name in names)


def scores(found: float, plain: float) -> dict[str, float]:
    """Cross-entropies in nats a token, the perplexity, and the excess over full precision."""
    return {"nats": found, "full_nats": plain, "excess": found - plain, "perplexity": math.exp(min(found, 50.0))}


def on_given(
    workload: LMWorkload,
    ctx: Context,
    *,
    quantizer: str,
    windows: int,
    length: int,
    calibration: int,
    local: int,
    rows: int,
    steps: int,
    **bits: int,
) -> list[dict[str, Any]]:
    lm = workload.model(ctx.device, ctx.dtype or "float32")
    batches, held_out = texts(workload, lm, calibration=calibration, evaluation=windows, length=length)
    batches = [ids.to(ctx.device) for ids in batches]
    options = {"steps": local, "lr": 3e-2, "rows": rows}
    made, skipped = on_batches(lm.model, batches, ctx, quantizer, bits_of(**bits), options, steps)
    known = PLAIN.setdefault(lm.model, {})
    key = tuple(tuple(row.tolist()) for row in held_out)
    if key not in known:
        known[key] = nats(lm.model, held_out, ctx.device)
    pairs = zip(nats(made, held_out, ctx.device), known[key], strict=True)
    return [
        {"block": block, "outliers": False, "skipped": skipped, **scores(*pair)} for block, pair in enumerate(pairs)
    ]


def on_batches(
    model: Any,
    batches: list[torch.Tensor],
    ctx: Context,
    quantizer: str,
    bits: QuantConfig,
    local: dict[str, Any],
    steps: int,
) -> tuple[Any, str]:
    """The model that an arm makes of an opened one, and which transforms it went without."""
    arm = ctx.select(RECIPES)[quantizer]
    if quantizer not in RECIPES or quantizer in ctx.own:
        return arm(model, batches), ""
    fpt = arm.make(model, batches, bits, seed=ctx.seed, local=local, steps=steps)
    return fpt.model, ", ".join(fpt.skipped)


def judged(
    workload: LMWorkload,
    ctx: Context,
    *,
    quantizer: str,
    limit: int,
    windows: int,
    length: int,
    calibration: int,
    local: int,
    rows: int,
    steps: int,
    **bits: int,
) -> list[dict[str, Any]]:
    """The user's tasks of lm-eval on the model ("full") or on what an arm makes of it, a row a task and metric; none without such tasks."""
    names = lm_eval_tasks(workload)
    if not names:
        return []
    lm = workload.model(ctx.device, ctx.dtype or "float32")
    made, skipped = lm.model, ""
    if quantizer != "full":
        batches, _ = texts(workload, lm, calibration=calibration, evaluation=windows, length=length)
        batches = [ids.to(ctx.device) for ids in batches]
        options = {"steps": local, "lr": 3e-2, "rows": rows}
        made, skipped = on_batches(lm.model, batches, ctx, quantizer, bits_of(**bits), options, steps)
    return [{"block": 0, "skipped": skipped, **row} for row in lm_eval_rows(made, lm.tokenizer, names, limit=limit)]


# --- exactness -------------------------------------------------------------------------------------------------------


def exact_everywhere(workload: TrainedModel, ctx: Context, *, block: int, quantizer: str) -> list[dict[str, Any]]:
    """A tenth of the 64 subsets of transforms, with parameters drawn at random, in float64; a row each."""
    seed = 1_000 * ctx.seed + block
    model = in_float64(workload.model(ctx.prepared))
    ids = workload.text(seed)[1][:2]
    rows = []
    for names in subsets(block):
        fpt = shaken(FPTQuantizer(model, FPTConfig(**{**NONE, **dict.fromkeys(names, True)})), seed)
        rows.append({"subset": "+".join(names), "difference": fpt.difference(ids), "limit": 1e-9})
    return rows


def subsets(block: int) -> list[tuple[str, ...]]:
    """Every tenth of all subsets of the transforms, beginning with the block's own."""
    every = [names for size in range(len(TRANSFORMS) + 1) for names in itertools.combinations(TRANSFORMS, size)]
    return every[block % 10 :: 10]


def exact_here(
    workload: LMWorkload, ctx: Context, *, quantizer: str, windows: int, length: int, calibration: int
) -> list[dict[str, Any]]:
    """All transforms that the model allows, at random parameters, in the model's dtype; a row a window."""
    lm = workload.model(ctx.device, ctx.dtype or "float32")
    _, held_out = texts(workload, lm, calibration=calibration, evaluation=windows, length=length)
    fpt = shaken(FPTQuantizer(lm.model, FPTConfig(unsupported="skip")), ctx.seed, size=0.1)
    with torch.no_grad():
        spread = float(lm.model(held_out[0].to(ctx.device)[None]).logits.float().std())
    return [
        {
            "block": block,
            "subset": "+".join(fpt.config.wanted),
            "skipped": ", ".join(fpt.skipped),
            "difference": fpt.difference(row.to(ctx.device)[None]),
            "logit_deviation": spread,
            "limit": 1e-3,
        }
        for block, row in enumerate(held_out)
    ]


@torch.no_grad()
def shaken(fpt: FPTQuantizer, seed: int, size: float = 0.3) -> FPTQuantizer:
    """With every parameter of the transforms moved at random: at their start most are the identity."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in fpt.transforms.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        # Cayley's map of a d x d matrix turns by an angle that grows with the root of d.
        parameter.add_(
            (size * noise / parameter.shape[-1] ** 0.5 if parameter.ndim > 1 else size * noise).to(parameter.device)
        )
    return fpt.refresh()


# --- time ------------------------------------------------------------------------------------------------------------

ONLINE = {
    "merged": {},
    "residual_scale": {"residual_scale": True},
    "down_hadamard": {"down_hadamard": True},
    "fpt": {"residual_scale": True, "down_hadamard": True},
}


def speed(workload: WideModel, ctx: Context, *, tokens: int, repeats: int) -> list[dict[str, Any]]:
    """A forward pass in full precision, with the online transforms and without, in turn; a row an arm and repeat, two repeats a block."""
    model = workload.model()
    ids = torch.arange(tokens)[None] % 1000
    calls = {}
    for name, online in ctx.select(ONLINE).items():
        if name in ctx.own:
            continue
        net = FPTQuantizer(model, FPTConfig(**{**NONE, **online})).model

        def forward(net: Any = net) -> None:
            with torch.no_grad():
                net(ids, use_cache=False)

        calls[name] = forward
    timed = interleave(calls, warmup=2, repeats=repeats, arm_column="quantizer")
    return [
        {
            "quantizer": row["quantizer"],
            "block": row["repeat"] // 2,
            "repeat": row["repeat"],
            "forward_seconds": row["seconds"],
        }
        for row in timed
    ]
