"""LED put to the test: the law itself, a model sharpened until it stops exploring, a real model's problems, its layers, and the price."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import polars as pl

from cameraready.evidence import (
    Answer,
    Claim,
    Context,
    Cost,
    Figure,
    Spec,
    Study,
    Untested,
    above,
    always,
    average,
    below,
    difference,
    ratio,
    versus_best,
    violations,
    within,
)
from cameraready.lm._workload import ACCEPTS, LMWorkload, open_lm
from cameraready.lm.led import trials
from cameraready.lm.led.config import LEDConfig
from cameraready.lm.led.generation import led_generate
from cameraready.lm.led.plans import CHAINS, GEMMA, LARGE, LAW, QWEN, RL, VARIANTS, all_but, plan

PAPER = "Tan et al., 2026, arXiv:2602.01698"

# --- trials ----------------------------------------------------------------------------------------------------------


def open_workload(spec: Spec) -> Any:
    if spec.kind == "shipped" and spec.name in (LAW, CHAINS):
        return spec.name
    if spec.kind == "shipped" and spec.name in (LARGE, *RL):
        return open_lm(Spec(f"hf:{spec.name}", "hf", spec.name, options=spec.options))
    return trials.with_answers(open_lm(spec))


def trial(workload: Any, ctx: Context, *, part: str, **condition: Any) -> list[dict[str, Any]]:
    if part == "law":
        return trials.laws(10_000 * ctx.seed + condition["block"])
    if part == "walk":
        return trials.walk(ctx, **condition)
    if part == "solve":
        return trials.solve(workload, ctx, **condition)
    if part == "layers":
        return trials.layers(workload, ctx, **condition)
    return trials.overhead(workload, ctx, **condition)


def ready(workload: Any) -> LEDConfig | Callable[..., Any]:
    """`led_generate` bound to the user's model and tokenizer; settings alone where the workload is no language model."""
    if not isinstance(workload, LMWorkload):
        return LEDConfig(depth=3, think_end=None)
    lm = workload.model()
    led = trials.config_for(lm, min(4, trials.rivals.anatomy(lm.model).n_layers))
    return functools.partial(led_generate, lm.model, led=led, tokenizer=lm.tokenizer)


def cost(spec: Spec, conditions: Sequence[dict[str, Any]], device: str, dtype: str) -> Cost:
    """Each problem is read once, and answered by every rule; the study's other parts are short beside that."""
    from cameraready.lm._workload import cost as cost_of_model

    trials.with_answers(open_lm(spec))
    solved = [c for c in conditions if c["part"] == "solve"]
    rules = len(trials.rules(LEDConfig(think_end=None)))
    samples = max((c["samples"] for c in solved), default=1)
    new_tokens = max((c["new_tokens"] for c in solved), default=0)
    passes = len(solved) * rules or max(len(conditions), 1)
    return cost_of_model(
        spec, prompt_tokens=64, new_tokens=new_tokens, passes=passes, batch=samples, device=device, dtype=dtype or None
    )


# --- claims ----------------------------------------------------------------------------------------------------------


def part_is(*parts: str) -> pl.Expr:
    return pl.col("part").is_in(parts)


EXACT: dict[str, Any] = {
    "scope": "exact",
    "where": part_is("law"),
    "workloads": [LAW],
    "pooled": False,
    "rule": always(),
    "source": f"{PAPER}, algorithm as released",
}
WALK: dict[str, Any] = {"scope": "reduced", "where": part_is("walk"), "workloads": [CHAINS], "pooled": False}
SOLVE: dict[str, Any] = {"scope": "proxy", "where": part_is("solve"), "workloads": [QWEN, "own"], "pooled": False}
LOOK: dict[str, Any] = {
    "scope": "proxy",
    "where": part_is("layers"),
    "workloads": [QWEN, GEMMA, "own"],
    "pooled": False,
    "source": f"{PAPER}, figures on layer entropy and top-k coverage",
}
OURS: dict[str, Any] = {"scope": "ours", "pooled": False, "source": "this study"}
BOTH: dict[str, Any] = {**OURS, "where": part_is("walk", "solve"), "workloads": [CHAINS, QWEN, "own"]}
SHARPENED = "A walker of six layers, taught and then sharpened by policy gradients, 60 unseen problems, exact chances"
REAL = "Qwen2.5-Coder-0.5B-Instruct, or your own model, 16 samples a problem from one prompt"
TEXT = "Documentation, prose and code"
LOW, HALF = (
    "The final layer's entropy is far below that of intermediate layers.",
    "its entropy is below half of the mean of up to seven layers below it.",
)
DOUBT, SOME = (
    "Layers below keep doubts about the final layer's candidates.",
    "the entropy over its eight candidates is larger in some layer of these.",
)
DEPTHS = "LED with depth 3 on chains and 4 elsewhere"
EQUAL = "No other decoding rule solves more problems with the same samples at the same temperature."
COLLAPSE = "After RL post-training a higher temperature no longer raises pass@n."

STUDY = Study(
    open=open_workload,
    workloads={
        "smoke": [LAW, CHAINS, "tiny-llama", "tiny-gemma3"],
        "desk": [LAW, CHAINS, QWEN, GEMMA],
        "full": [LAW, CHAINS, LARGE, *RL],
    },
    plan=plan,
    trial=trial,
    method="led",
    arms="decoding",
    block="block",
    alone=lambda condition: condition["part"].startswith("batch-"),
    libraries={"*": ["torch", "transformers", "numpy"]},
    accepts=list(ACCEPTS),
    takes=["data", "tasks"],
    cost=cost,
    own_arm="a callable (model, tokenizer, input_ids (1, T), n, max_new_tokens, seed) -> LongTensor (n, T + S) of sampled continuations",
    component=ready,
    covers="the model's initial weights and the order of its training on chains, the problems, windows of text or repeats elsewhere",
    covers_own="your problems, windows of text, and repeats of the timing",
    claims=[
        Claim(
            1,
            part="a",
            paper="The slope of pass@n against temperature (0.1, 0.3, 0.6) is positive for models before RL.",
            tested="Slope of exact pass@16 of the walker that was only taught, above zero.",
            measure=average("slope_taught", "before-sharpening"),
            rule=above(0.0),
            source=f"{PAPER}, temperature study",
            **WALK,
        ),
        Claim(
            1,
            part="b",
            paper=COLLAPSE,
            tested=f"{SHARPENED}: the slope of pass@16 is smaller than before sharpening.",
            measure=average("slope_lost", "before-sharpening"),
            rule=above(0.0),
            source=f"{PAPER}, temperature study",
            **WALK,
        ),
        Claim(
            1,
            part="c",
            paper="The slope is about zero or negative for RL-trained models.",
            tested=f"{SHARPENED}: the slope of pass@16 is below 0.1 (ten points a unit of temperature).",
            measure=average("slope_sharpened", "before-sharpening"),
            rule=below(0.1),
            source=f"{PAPER}, temperature study",
            **WALK,
        ),
        *(
            Claim(2, part=part, paper=paper, tested=f"{where}: {tested}", measure=average(column, "final-norm"), rule=rule, **shared)
            for part, where, paper, tested, column, rule, shared in (
                ("a", TEXT, LOW, HALF, "entropy_ratio", below(0.5), LOOK),
                ("b", TEXT, DOUBT, SOME, "candidate_gain", above(0.0), LOOK),
                ("d", SHARPENED, LOW, HALF, "entropy_ratio", below(0.5), {**WALK, "source": LOOK["source"]}),
                ("e", SHARPENED, DOUBT, SOME, "candidate_gain", above(0.0), {**WALK, "source": LOOK["source"]}),
            )
        ),
        Claim(
            2,
            part="c",
            paper="Without the final norm lower layers share fewer candidates with the final one.",
            tested="Share of the eight best tokens that the four layers below the final one have in common with it: larger with the final norm.",
            measure=difference("coverage_near", "final-norm", "no-norm"),
            rule=above(0.0),
            **LOOK,
        ),
        *(
            Claim(
                3,
                part=part,
                paper="Pass@1 rises by 0.61 and pass@16 by 1.03 points on average against plain sampling.",
                tested=f"{what}: pass@{n} above that of plain sampling at T = 0.6.",
                measure=difference(f"pass_{n}", "led", "temperature"),
                rule=above(0.0),
                source=f"{PAPER}, abstract",
                **where,
            )
            for part, what, n, where in (
                ("a", f"{SHARPENED}, depth 3", 1, WALK),
                ("b", f"{SHARPENED}, depth 3", 16, WALK),
                ("c", f"{REAL}, depth 4", 1, SOLVE),
                ("d", f"{REAL}, depth 4", 16, SOLVE),
            )
        ),
        Untested(
            4,
            paper="RL with LED rollouts reaches a higher validation score on MATH (0.454 against 0.420 at step 91, one run whose curves already start apart).",
            needs="GPUs for days: GRPO on Qwen3-4B-Thinking-2507 with 16,384 tokens a response, several runs",
            source=f"{PAPER}, RL figure",
        ),
        *(
            Claim(
                5,
                part=part,
                paper="No training, no parameters, little overhead.",
                tested=f"Qwen2.5-Coder-0.5B-Instruct, or your own model, depth 8, exact normaliser, batch {batch}: time a token below 1.1 times that of top-k sampling in transformers.",
                scope="proxy",
                source=f"{PAPER}, abstract; the figure of 10 % is ours",
                measure=ratio("token_seconds", "led-8", "top-k"),
                rule=below(1.1),
                where=part_is(f"batch-{batch}"),
                workloads=[QWEN, "own"],
                pooled=False,
            )
            for part, batch in (("a", 1), ("b", 16))
        ),
        *(
            Claim(6, part=part, paper=paper, tested=tested, measure=violations(expression, what), **EXACT)
            for part, paper, tested, expression, what in (
                (
                    "a",
                    "The law lives on the final layer's k best tokens.",
                    "Random logits, 8 layers, 1,000 tokens, float32: no probability outside, and the sum is one within 1e-5.",
                    (pl.col("outside") > 0) | (pl.col("not_one") > 1e-5),
                    "probability outside or a sum that is not one",
                ),
                (
                    "b",
                    "The chosen aggregate is at least as unsure as the final layer.",
                    "The law that always explores never has less entropy than top-k sampling, within 1e-6 nats.",
                    pl.col("entropy_lost") > 1e-6,
                    "an entropy smaller by more than 1e-6",
                ),
                (
                    "c",
                    "With full confidence it is plain top-k sampling.",
                    "With one token at probability one, no probability differs from top-k sampling's by more than 1e-6.",
                    pl.col("from_top_k_when_sure") > 1e-6,
                    "a deviation above 1e-6",
                ),
                (
                    "d",
                    "With depth one it is plain top-k sampling.",
                    "No probability differs from top-k sampling's by more than 1e-6, whatever the confidence.",
                    pl.col("from_top_k_at_depth_1") > 1e-6,
                    "a deviation above 1e-6",
                ),
                (
                    "e",
                    "The coin and the two draws of the algorithm are one mixture.",
                    "20,000 tokens drawn with coin and two draws, by code of its own, have the mixture's frequencies: no chi-square p-value below 1e-4.",
                    pl.col("frequencies_p") < 1e-4,
                    "a p-value below 1e-4",
                ),
            )
        ),
        Claim(
            7,
            paper="(Ours.) Where a model was sharpened, LED finds more than a higher temperature does.",
            tested=f"pass@16 of LED at T = 0.6, {DEPTHS}, above that of plain sampling at T = 1.0.",
            measure=difference("pass_16", "led", "temperature@1.0"),
            rule=above(0.0),
            **BOTH,
        ),
        *(
            Claim(
                8,
                part=part,
                paper=f"(Ours.) {paper}",
                tested=f"Share of problems that 16 samples leave unsolved, {tested}, {DEPTHS}: LED's minus that of the best of temperature, top-p, min-p, top-k and DoLa, below zero.",
                measure=versus_best("unsolved", method, exclude=exclude, kind="difference"),
                rule=below(0.0),
                **BOTH,
            )
            for part, paper, tested, method, exclude in (
                ("a", EQUAL, "all at T = 0.6", "led", all_but("0.6")),
                ("b", EQUAL, "all at T = 1.0", "led@1.0", all_but("1.0")),
                ("c", "LED as published beats rules whose temperature was chosen.", "LED at T = 0.6 and the others at any temperature", "led", (*VARIANTS, "led@1.0", "led@1.5")),
            )
        ),
        Claim(
            9,
            paper="(Ours.) What LED gains is not due to its cutting off all but eight tokens.",
            tested=f"pass@16 of LED, {DEPTHS}, above that of top-k sampling with k = 8, both at T = 0.6.",
            measure=difference("pass_16", "led", "top-k"),
            rule=above(0.0),
            **BOTH,
        ),
        Claim(
            10,
            paper="(Ours.) Exploring only when unsure holds LED back on a model that is sure and wrong.",
            tested=f"{SHARPENED}: pass@16 of LED that always explores above that of LED as the paper sets it.",
            measure=difference("pass_16", "led-always", "led"),
            rule=above(0.0),
            where=part_is("walk"),
            workloads=[CHAINS],
            **OURS,
        ),
        *(
            Claim(
                11,
                part=part,
                paper="(Ours.) Normalising lower layers over the candidates alone makes LED as fast as plain sampling.",
                tested=f"Qwen2.5-Coder-0.5B-Instruct, or your own model, depth 8, batch {batch}: time a token between 0.9 and 1.1 times that of top-k sampling in transformers.",
                measure=ratio("token_seconds", "led-8-k", "top-k"),
                rule=within(0.9, 1.1),
                where=part_is(f"batch-{batch}"),
                workloads=[QWEN, "own"],
                **OURS,
            )
            for part, batch in (("a", 1), ("b", 16))
        ),
    ],
    answer=Answer(
        measure=versus_best("unsolved", "led", exclude=all_but("0.6"), kind="difference"),
        where=part_is("walk", "solve"),
        break_even=0.0,
        better="sample with LED on {workload}: at T = 0.6 the share of problems unsolved after 16 samples changes by {estimate} [{low}, {high}] against {peer}",
        worse="keep {peer} on {workload}: at T = 0.6 LED changes the share of problems unsolved after 16 samples by {estimate} [{low}, {high}]",
        tie="LED and {peer} solve as much on {workload} at T = 0.6: the share unsolved after 16 samples differs by {estimate} [{low}, {high}]",
        workloads=[CHAINS, QWEN, LARGE, *RL, "own"],
    ),
    figures=[
        Figure(
            title,
            x="layer",
            y=y,
            source=f"{PAPER}, layer entropy and top-k coverage",
            where=part_is("layers"),
            workloads=[QWEN, GEMMA],
            log_x=False,
            log_y=False,
            x_title="layer",
            y_title=unit,
        )
        for title, y, unit in (
            ("Entropy of each layer's prediction", "entropy", "entropy (nats)"),
            ("Final layer's eight best tokens among a layer's own eight best", "coverage", "share"),
        )
    ],
    timeout=900.0,
    memory=8.0,
)  # fmt: skip
