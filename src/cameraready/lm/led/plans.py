"""What the study runs on each workload, and the names of both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

LAW, CHAINS = "random-logits", "chains"
QWEN, GEMMA, LARGE = "qwen2.5-coder-0.5b-instruct", "gemma-3-270m", "Qwen/Qwen2.5-Coder-1.5B-Instruct"
RL = ["Qwen/Qwen3-4B-Thinking-2507", "XiaomiMiMo/MiMo-7B-RL"]
RIVALS = ("temperature", "top-p", "min-p", "top-k", "dola")
#: Variants of the method, and rows that are no decoding rule of the sharpened model.
VARIANTS = ("led-2", "led-6", "led-always", "before-sharpening", "final-norm")
WARMER = ("1.0", "1.5")


def all_but(temperature: str) -> tuple[str, ...]:
    """The rules at other temperatures than this, and what is no competitor: what a comparison at one temperature leaves out."""
    marks = {"0.6": "", **{t: f"@{t}" for t in WARMER}}
    return (*VARIANTS, *(f"{kind}{mark}" for t, mark in marks.items() if t != temperature for kind in (*RIVALS, "led")))


def plan(tier: str, workload: str) -> Iterator[dict[str, Any]]:
    smoke = tier == "smoke"
    if workload == LAW:
        for block in range(2 if smoke else 12):
            yield {"part": "law", "block": block}
    elif workload == CHAINS:
        sizes = (
            {"imitate": 3, "reinforce": 2, "unseen": 4} if smoke else {"imitate": 150, "reinforce": 200, "unseen": 60}
        )
        for block in range(1 if smoke else 40 if tier == "full" else 10):
            yield {"part": "walk", "block": block, **sizes}
    else:
        yield from plan_of_model(tier, workload)


def plan_of_model(tier: str, workload: str) -> Iterator[dict[str, Any]]:
    smoke, thinks = tier == "smoke", workload in RL
    depth = 2 if smoke else 8 if thinks else 4
    if workload != GEMMA:
        new_tokens = 3 if smoke else 16_384 if thinks else 12 if workload in (QWEN, LARGE) else 256
        n, samples = (2, 16) if smoke else (60 if tier == "full" else 20, 16)
        for block in range(n):
            yield {
                "part": "solve",
                "block": block,
                "n": n,
                "samples": samples,
                "new_tokens": new_tokens,
                "depth": depth,
            }
    n, length, positions = (1, 64, 4) if smoke else (12, 128, 8)
    for block in range(n):
        yield {"part": "layers", "block": block, "n": n, "length": length, "positions": positions}
    if workload != GEMMA:
        for batch in (1, 2) if smoke else (1, 16):
            yield {
                "part": f"batch-{batch}",
                "batch": batch,
                "new_tokens": 2 if smoke else 3,
                "repeats": 1 if smoke else 10,
            }
