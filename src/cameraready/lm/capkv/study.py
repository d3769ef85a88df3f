"""CapKV put to the test: exact statements, what a language model loses under eight policies, time of scoring, equality with kvpress's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import polars as pl

from cameraready.evidence import (
    Answer,
    Claim,
    Context,
    Cost,
    Figure,
    Peer,
    Spec,
    Study,
    Untested,
    above,
    always,
    below,
    difference,
    ratio,
    versus_best,
    violations,
)
from cameraready.lm._workload import ACCEPTS, open_lm
from cameraready.lm.capkv.press import CapKVPress
from cameraready.lm.capkv.trials import measured
from cameraready.lm.capkv.trials.measured import KEEPS
from cameraready.lm.capkv.trials.policies import FURTHER, POLICIES, VARIANTS

PAPER = "Yang et al., 2026, arXiv:2604.25975"
KVPRESS = Peer("kvpress==0.5.5", script="trials/kvpress_peer.py", also=["torch==2.13.0"], installer="pip")

MODELS = ["qwen2.5-coder-0.5b-instruct", "gemma-3-270m"]
LARGE = ["Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B-Instruct"]
#: Workloads that are no language model.
BARE = ("vectors", "shapes", "kvpress")
RIVALS = [name for name in POLICIES if name != "capkv"]
#: Query heads, key heads and head size of the models whose shapes scoring is timed on.
SHAPES = {"0.5b": (14, 2, 64), "8b": (32, 8, 128)}

# --- trials ----------------------------------------------------------------------------------------------------------


def open_workload(spec: Spec) -> Any:
    if spec.kind == "shipped" and spec.name in BARE:
        return spec.name
    if spec.kind == "shipped" and spec.name in LARGE:
        return open_lm(Spec(f"hf:{spec.name}", "hf", spec.name, options=spec.options))
    return open_lm(spec)


def plan(tier: str, workload: str) -> Iterator[dict[str, Any]]:
    smoke = tier == "smoke"
    if workload == "vectors":
        for document in range(1 if smoke else 20):
            for kind in ("random", "copies"):
                shared = {"document": document, "kind": kind, "length": 100 if smoke else 400, "size": 32}
                yield {"part": "identity", **shared}
                yield {"part": "capacity", **shared}
    elif workload == "shapes":
        for shape in SHAPES:
            yield {"part": "speed", "shape": shape, "length": 2048, "runs": 2 if smoke else 12}
    elif workload == "kvpress":
        for document in range(12):
            yield {"part": "equal", "document": document}
        yield {"part": "peer-speed", "runs": 12}
    else:
        yield from plan_of_model(tier, workload)


def plan_of_model(tier: str, workload: str) -> Iterator[dict[str, Any]]:
    smoke, large = tier == "smoke", tier == "full"
    length = 768 if smoke else 8_192 if large else 512
    n = 2 if smoke else 40 if large else 10 if workload == MODELS[0] else 12
    for document in range(1 if smoke else n):
        shared = {"document": document, "n": n}
        yield {"part": "text", "length": length, **shared}
        yield {"part": "retrieval", "length": length, **shared}
        yield {"part": "copies", "length": length, **shared}
        yield {"part": "logs", "length": length, **shared}
    for document in range(1 if smoke else 10):
        yield {"part": "exact", "length": length // 4, "document": document, "n": n}
    if workload == "own":  # the tasks that the user named with --tasks lm-eval:NAME, if any
        yield {"part": "lm-eval", "document": 0, "limit": 2 if smoke else 50}
    yield {
        "part": "serve",
        "length": 256 if smoke else 2 * length,
        "new_tokens": 4 if smoke else 16,
        "repeats": 1 if smoke else 3,
    }


def trial(workload: Any, ctx: Context, *, part: str, **condition: Any) -> list[dict[str, Any]]:
    if part == "identity":
        return measured.identities(**condition)
    if part == "capacity":
        return measured.capacities(**condition)
    if part == "speed":
        shape = SHAPES[condition.pop("shape")]
        return measured.scoring(ctx, *shape, **condition)
    if part in ("equal", "peer-speed"):
        return measured.under_kvpress(ctx, part, condition.get("document", 0), condition.get("runs", 0))
    if part == "exact":
        return measured.exactness(workload, ctx, **condition)
    if part == "lm-eval":
        return measured.judged(workload, ctx, **condition)
    if part == "serve":
        return measured.serving(workload, ctx, **condition)
    keeps = KEEPS if part in ("text", "retrieval") else KEEPS[1:]
    return measured.documents(workload, ctx, part, keeps=keeps, **condition)


def cost(spec: Spec, conditions: Sequence[dict[str, Any]], device: str, dtype: str) -> Cost:
    """Each context is read once, and what follows it once for every policy and share."""
    from cameraready.lm._workload import cost as cost_of_model

    prompts = [c for c in conditions if c["part"] in ("text", "retrieval", "copies", "logs")]
    runs = (len(POLICIES) + 1) * len(KEEPS)
    tokens = sum(c["length"] + 40 * runs for c in prompts) + sum(
        2 * c["length"] for c in conditions if c not in prompts
    )
    passes = max(len(conditions), 1)
    return cost_of_model(
        spec, prompt_tokens=max(tokens // passes, 1), new_tokens=0, passes=passes, device=device, dtype=dtype
    )


# --- claims ----------------------------------------------------------------------------------------------------------


def part_is(part: str, *, keep: float | None = None, kind: str | None = None) -> pl.Expr:
    found = pl.col("part") == part
    if keep is not None:
        found &= pl.col("keep") == keep
    return found if kind is None else found & (pl.col("kind") == kind)


EXACT: dict[str, Any] = {
    "scope": "exact",
    "workloads": ["vectors"],
    "pooled": False,
    "source": f"{PAPER}, abstract; derivation",
}
PROXY: dict[str, Any] = {
    "scope": "proxy",
    "workloads": [*MODELS, "own"],
    "pooled": False,
    "source": f"{PAPER}, abstract",
}
OURS: dict[str, Any] = {"scope": "ours", "pooled": False, "source": "this study"}
OUTPERFORMS = "CapKV consistently outperforms prior eviction methods across models and long-context benchmarks."

STUDY = Study(
    open=open_workload,
    workloads={
        "smoke": ["vectors", "tiny-llama", "tiny-gemma3"],
        "desk": ["vectors", *MODELS, "shapes", "kvpress"],
        "full": ["vectors", *LARGE, "shapes", "kvpress"],
    },
    plan=plan,
    trial=trial,
    method="capkv",
    arms="policy",
    block="document",
    alone=lambda condition: condition["part"] in ("speed", "peer-speed", "serve"),
    # Arms are columns of rows, so no arm of `libraries` asks for the peer: the trials of the workload kvpress open it themselves.
    peers=[KVPRESS],
    libraries={"*": ["torch", "transformers", "numpy"]},
    accepts=list(ACCEPTS),
    takes=["data", "tasks"],
    cost=cost,
    own_arm="a callable (state) -> scores (1, Hkv, T) of the tokens that one layer read, the highest are kept; state has keys, values "
    "(1, Hkv, T, d), queries (1, H, T, d), hidden (1, T, Dm) and length",
    component=lambda workload: CapKVPress(0.5),
    covers="the contexts",
    covers_own="the contexts",
    claims=[
        Claim(
            1,
            part="a",
            paper="A token's ridge leverage is the exact capacity that is lost when it alone is evicted.",
            tested="400 vectors of 32 dimensions, float64: no deviation above 1e-8 between -log(1 - s_i) and the drop of the log-determinant.",
            measure=violations(pl.col("loss_deviation") > 1e-8, "a deviation above 1e-8"),
            rule=always(),
            where=part_is("identity"),
            **EXACT,
        ),
        Claim(
            1,
            part="b",
            paper="Ranking by the score is ranking by the loss.",
            tested="The same: sorted by loss, scores never fall by more than 1e-10.",
            measure=violations(pl.col("order_deviation") > 1e-10, "a pair in another order"),
            rule=always(),
            where=part_is("identity"),
            **EXACT,
        ),
        Claim(
            2,
            part="a",
            paper="Scores add up to the effective dimension d - tr A^-1.",
            tested="The same: no deviation above 1e-8.",
            measure=violations(pl.col("sum_deviation") > 1e-8, "a deviation above 1e-8"),
            rule=always(),
            where=part_is("identity"),
            **EXACT,
        ),
        Claim(
            2,
            part="b",
            paper="Scores lie between 0 and 1.",
            tested="The same: no score below 0, none of 1 or more.",
            measure=violations((pl.col("smallest") < 0) | (pl.col("largest") >= 1), "a score outside"),
            rule=always(),
            where=part_is("identity"),
            **EXACT,
        ),
        Claim(
            2,
            part="c",
            paper="A common rotation of the values changes no score.",
            tested="The same: no change above 1e-8 under a random orthogonal map.",
            measure=violations(pl.col("rotation_deviation") > 1e-8, "a change above 1e-8"),
            rule=always(),
            where=part_is("identity"),
            **EXACT,
        ),
        Claim(
            3,
            part="a",
            paper=OUTPERFORMS,
            tested="Real text, 512 tokens read, 50, 25 and 10 % kept: relative error of the attention output over the next 40 tokens below the best other policy's.",
            measure=versus_best("output_error", "capkv", RIVALS),
            rule=below(1.0),
            where=part_is("text"),
            **PROXY,
        ),
        Claim(
            3,
            part="b",
            paper=OUTPERFORMS,
            tested="The same: nats a token that pruning adds to the loss of what follows, below the best other policy's.",
            measure=versus_best("added", "capkv", RIVALS, kind="difference"),
            rule=below(0.0),
            where=part_is("text"),
            **PROXY,
        ),
        Claim(
            3,
            part="c",
            paper=OUTPERFORMS,
            tested="A pass key or one of six values hidden in prose, question after pruning: nats a token of the answer below the best other policy's.",
            measure=versus_best("loss", "capkv", RIVALS, kind="difference"),
            rule=below(0.0),
            where=part_is("retrieval"),
            **PROXY,
        ),
        Claim(
            3,
            part="d",
            paper=OUTPERFORMS,
            tested="The same: share of answers found word for word above the best other policy's.",
            measure=versus_best("correct", "capkv", RIVALS, kind="difference", lower_is_better=False),
            rule=above(0.0),
            where=part_is("retrieval"),
            **PROXY,
        ),
        Claim(
            3,
            part="e",
            paper="CapKV preserves more information than heuristics do.",
            tested="Real text: retained share of the log-determinant, weighted as CapKV weighs, above the best other policy's.",
            measure=versus_best("capacity", "capkv", RIVALS, kind="difference", lower_is_better=False),
            rule=above(0.0),
            where=part_is("text"),
            **PROXY,
        ),
        Claim(
            3,
            part="f",
            paper="CapKV outperforms policies that do not look at attention.",
            tested="Real text: nats that pruning adds, below the best of random choice, small keys and key leverage.",
            measure=versus_best("added", "capkv", ["random", "knorm", "leverage"], kind="difference"),
            rule=below(0.0),
            where=part_is("text"),
            **PROXY,
        ),
        Untested(
            3,
            part="g",
            paper=OUTPERFORMS,
            needs="a GPU of 80 GB: Llama-3.1-8B and Qwen3-8B on RULER (4k to 32k) and LongBench; the full tier runs this study's contexts at 8,192 tokens",
            source=f"{PAPER}, abstract",
        ),
        Claim(
            4,
            part="a",
            paper="Geometry matters: the leverage helps over attention times squared value norm.",
            tested="Real text, 10 % kept: error of the attention output below that of w ||v||^2.",
            measure=ratio("output_error", "capkv", "trace"),
            rule=below(1.0),
            where=part_is("text", keep=0.1),
            **PROXY,
        ),
        Claim(
            4,
            part="b",
            paper="Geometry matters.",
            tested="Real text, 10 % kept: nats that pruning adds, below those of w ||v||^2.",
            measure=difference("added", "capkv", "trace"),
            rule=below(0.0),
            where=part_is("text", keep=0.1),
            **PROXY,
        ),
        *(
            Claim(
                5,
                part=part,
                paper="One-shot selection by leverage is near the optimum of the log-determinant.",
                tested=f"{what}, 50, 25 and 10 % kept: at least 0.95 of the information that greedy choice retains.",
                measure=ratio("capacity", "capkv", "capkv-greedy"),
                rule=above(0.95),
                where=where,
                **{**scope, "source": f"{PAPER}, abstract; the figure of 0.95 is ours"},
            )
            for part, what, where, scope in (
                (
                    "a",
                    "400 random vectors of 32 dimensions",
                    part_is("capacity", kind="random"),
                    {**EXACT, "scope": "reduced"},
                ),
                (
                    "b",
                    "400 near-copies of 32 vectors",
                    part_is("capacity", kind="copies"),
                    {**EXACT, "scope": "reduced"},
                ),
                ("c", "Keys and values of real text", part_is("text"), PROXY),
            )
        ),
        *(
            Claim(
                6,
                part=part,
                paper=f"(Ours.) Among near-duplicates, at high compression, CapKV keeps what {name} loses.",
                tested=f"A pass key in {what}, 10 % kept: nats a token of the key below those under {name}.",
                measure=difference("loss", "capkv", name),
                rule=below(0.0),
                where=part_is(where, keep=0.1),
                workloads=[*MODELS, "own"],
                **OURS,
            )
            for where, what, parts in (
                ("copies", "512 tokens of five sentences over and over", "abc"),
                ("logs", "512 tokens of a server's log", "def"),
            )
            for part, name in zip(parts, ("snapkv", "expected-attention", "leverage"), strict=True)
        ),
        Claim(
            7,
            part="a",
            paper="(Ours.) Among near-duplicates greedy choice is better than one-shot choice.",
            tested="The same contexts, 10 % kept: nats a token of the key under greedy choice below those of one-shot choice.",
            measure=difference("loss", "capkv-greedy", "capkv"),
            rule=below(0.0),
            where=part_is("copies", keep=0.1),
            workloads=[*MODELS, "own"],
            **OURS,
        ),
        Claim(
            7,
            part="b",
            paper="(Ours.) Greedy choice is better on real text too.",
            tested="Real text, 10 % kept: nats that pruning adds under greedy choice below those of one-shot choice.",
            measure=difference("added", "capkv-greedy", "capkv"),
            rule=below(0.0),
            where=part_is("text", keep=0.1),
            workloads=[*MODELS, "own"],
            **OURS,
        ),
        *(
            Claim(
                8,
                part=part,
                paper="(Ours.) Scoring costs no more than a few times what SnapKV's does.",
                tested=f"One layer of a {shape.upper()} model's shape, 2,048 tokens, one thread: seconds below four times SnapKV's.",
                measure=ratio("score_seconds", "capkv", "snapkv", repeats="min"),
                rule=below(4.0),
                where=part_is("speed") & (pl.col("shape") == shape),
                workloads=["shapes"],
                **OURS,
            )
            for part, shape in (("a", "0.5b"), ("b", "8b"))
        ),
        Claim(
            9,
            part="a",
            paper="(Ours.) The scores are those of kvpress's own press for this paper.",
            tested="Tiny Llama, Qwen3 and Phi-3 models in kvpress: no score more than 0.1 % from CapPress's.",
            measure=violations(pl.col("score_deviation") > 1e-3, "a score apart"),
            rule=always(),
            where=part_is("equal"),
            workloads=["kvpress"],
            **OURS,
        ),
        Claim(
            9,
            part="b",
            paper="(Ours.) Scoring is not slower than in kvpress's own press.",
            tested="One layer of a 0.5B model's shape, 1,024 tokens, one thread, in kvpress: seconds below CapPress's.",
            measure=ratio("score_seconds", "capkv", "cappress", repeats="min"),
            rule=below(1.0),
            where=part_is("peer-speed"),
            workloads=["kvpress"],
            **OURS,
        ),
        Claim(
            10,
            paper="(Ours.) A pruned cache goes on exactly as the whole one with the dropped pairs masked, and ratio 0 changes nothing.",
            tested="128 tokens of real text, a quarter kept, 40 more tokens: no logit further off than 1e-5 of the largest; eight generated tokens the same at ratio 0.",
            measure=violations((pl.col("deviation") > 1e-5) | (pl.col("tokens_changed") > 0), "another logit or token"),
            rule=always(),
            where=part_is("exact"),
            workloads=[*MODELS, "own"],
            **OURS,
        ),
    ],
    answer=Answer(
        measure=versus_best("loss", "capkv", exclude=(*VARIANTS, *FURTHER, "whole")),
        where=part_is("text", keep=0.25),
        better="prune with CapKV on {workload}: where the text goes on and a quarter is kept, its loss is {estimate} times [{low}, {high}] that under {peer}",
        worse="prune with {peer} on {workload}: where the text goes on and a quarter is kept, CapKV's loss is {estimate} times [{low}, {high}] as large; contexts that repeat themselves are judged apart (claim 6)",
        tie="keep {peer} if you have it on {workload}: where the text goes on and a quarter is kept, CapKV cannot be told apart from it (its loss is {estimate} times [{low}, {high}]); contexts that repeat themselves are judged apart (claim 6)",
        workloads=[*MODELS, *LARGE, "own"],
    ),
    figures=[
        Figure(
            "Error of the attention output",
            x="keep",
            y="output_error",
            source="this study",
            where=part_is("text") & pl.col("policy").is_in(list(POLICIES)),
            workloads=[*MODELS, "own"],
            x_title="share of the context kept",
            y_title="relative error",
        ),
        Figure(
            "Loss of what follows a pruned context",
            x="keep",
            y="loss",
            source="this study",
            where=part_is("text") & pl.col("policy").is_in([*POLICIES, "capkv-greedy"]),
            workloads=[*MODELS, "own"],
            log_y=False,
            x_title="share of the context kept",
            y_title="nats a token",
        ),
        Figure(
            "Speed of decoding against the size of the cache",
            x="cache_gib",
            y="tokens_per_second",
            source="this study",
            where=part_is("serve"),
            workloads=[*MODELS, "own"],
            log_y=False,
            x_title="GiB of keys and values",
            y_title="tokens a second",
        ),
    ],
    timeout=900.0,
    memory=8.0,
)
