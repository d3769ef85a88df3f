"""What decoding rules make of a sharpened walker: chances computed over all right answers, no sampling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from cameraready.lm.led import chains
from cameraready.lm.led.config import LEDConfig
from cameraready.lm.led.rivals import Layers, Rule, asymmetry, law, looks
from cameraready.lm.led.sharpening import LAYERS, Budget, Learner, reinforce, rollouts, taught

#: Of 16 samples a problem: pass@1, pass@4 and pass@16.
TRIES = (1, 4, 16)
#: The temperatures at which the paper takes its slopes.
SLOPE_AT = (0.1, 0.3, 0.6)
DEPTH = 3


def rules(temperatures: Sequence[float] = (0.6, 1.0, 1.5)) -> dict[str, Rule]:
    """Every rule at every temperature; a name without a number stands for the paper's temperature, 0.6."""
    led = {"led": DEPTH, "led-2": 2, f"led-{LAYERS}": LAYERS}
    out = {}
    for temperature in temperatures:
        mark = "" if temperature == 0.6 else f"@{temperature}"
        for kind in ("temperature", "top-p", "min-p", "top-k", "dola"):
            out[kind + mark] = Rule(kind, temperature)
        for name, depth in led.items():
            if temperature == 0.6 or name == "led":
                out[name + mark] = Rule("led", temperature, LEDConfig(depth=depth, think_end=None))
    out["led-always"] = Rule("led", 0.6, LEDConfig(depth=DEPTH, exploit="never", think_end=None))
    return out


def walker(seed: int, budget: Budget, every: Mapping[str, Rule], unseen: int) -> list[dict[str, Any]]:
    """One model, taught and sharpened from `seed`: a row a rule, on the same unseen problems."""
    learner = taught(seed, budget, unseen=unseen)
    before = {t: chances(learner.model, learner.unseen, Rule("temperature", t)) for t in SLOPE_AT}
    reinforce(learner, seed, budget)
    after = {t: chances(learner.model, learner.unseen, Rule("temperature", t)) for t in SLOPE_AT}
    rows = []
    for name, rule in every.items():
        found = chances(learner.model, learner.unseen, rule)
        rows.append({"decoding": name, **passes(found.sum(1)), "different": float(expected_answers(found, 16).mean())})
    taught_slope, sharpened_slope = slope_of(before), slope_of(after)
    rows.append(
        {
            "decoding": "before-sharpening",
            **passes(before[0.6].sum(1)),
            "different": float(expected_answers(before[0.6], 16).mean()),
            "slope_taught": taught_slope,
            "slope_sharpened": sharpened_slope,
            "slope_lost": taught_slope - sharpened_slope,
        }
    )
    rows.append({"decoding": "final-norm", **doubts(learner, seed)})
    return rows


@torch.no_grad()
def doubts(learner: Learner, seed: int) -> dict[str, float]:
    """How unsure the final layer and those below it are, along answers that the model samples itself."""
    prompts = chains.prompts_of(learner.unseen).repeat_interleave(2, dim=0)
    ids = rollouts(learner.model, prompts, torch.Generator().manual_seed(seed))
    hidden = learner.model(ids, output_hidden_states=True, use_cache=False).hidden_states
    seen = Layers(learner.model, [states[:, chains.PROMPT - 1 : -1].flatten(0, 1) for states in hidden])
    final = seen.final().log_softmax(-1)
    top = final.topk(8).indices
    below = [looks(seen.below(steps).log_softmax(-1), top) for steps in range(1, LAYERS)]
    return asymmetry([looks(final, top), *below])


@torch.no_grad()
def chances(model: Any, walks: Sequence[chains.Walk], rule: Rule) -> torch.Tensor:
    """Chance of each right answer of each problem under `rule`, float64 (problems, most answers), 0 where there are fewer."""
    counts = [len(walk.answers) for walk in walks]
    ids = torch.cat(
        [torch.cat([walk.prompt.expand(n, -1), walk.answers], dim=1) for walk, n in zip(walks, counts, strict=True)]
    )
    log_p = answer_log_probs(model, ids, rule)
    out = torch.zeros(len(walks), max(counts), dtype=torch.float64)
    for i, part in enumerate(log_p.split(counts)):
        out[i, : len(part)] = part.exp()
    return out


def answer_log_probs(model: Any, ids: torch.Tensor, rule: Rule, rows_at_once: int = 512) -> torch.Tensor:
    """log-probability of each row's answer under `rule`, float64 (n,)."""
    out = []
    for rows in ids.split(rows_at_once):
        hidden = model(rows, output_hidden_states=True, use_cache=False).hidden_states
        layers = Layers(model, [states[:, chains.PROMPT - 1 : -1].flatten(0, 1) for states in hidden])
        log_p = law(rule, layers).double().gather(-1, rows[:, chains.PROMPT :].reshape(-1, 1))
        out.append(log_p.view(len(rows), -1).sum(1))
    return torch.cat(out)


def passes(chance: torch.Tensor) -> dict[str, float]:
    """pass@n, exact: the mean over problems of 1 - (1 - p)^n."""
    found = {f"pass_{n}": float((1 - (1 - chance.clamp(0, 1)) ** n).mean()) for n in TRIES}
    return {**found, "unsolved": 1 - found[f"pass_{TRIES[-1]}"]}


def expected_answers(chance: torch.Tensor, n: int) -> torch.Tensor:
    """How many different right answers n samples hold on average, by problem: (problems,)."""
    return (1 - (1 - chance.clamp(0, 1)) ** n).sum(1)


def slope_of(found: Mapping[float, torch.Tensor]) -> float:
    """Least-squares slope of pass@16 in the temperature, in shares a unit."""
    return float(np.polyfit(SLOPE_AT, [passes(found[t].sum(1))["pass_16"] for t in SLOPE_AT], 1)[0])
