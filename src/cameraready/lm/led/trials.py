"""What the study measures on a language model: solved problems, entropies of layers, time; and the law on random logits."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from cameraready.evidence import Context, SpecError, interleave
from cameraready.lm import _corpora, _tasks
from cameraready.lm._problems import Problem
from cameraready.lm._workload import LMWorkload
from cameraready.lm.led import rivals, sharpening, walking
from cameraready.lm.led.config import LEDConfig
from cameraready.lm.led.distribution import led_distribution
from cameraready.lm.led.generation import led_generate
from cameraready.lm.led.rivals import PLAIN, Layers, Rule, asymmetry, looks
from cameraready.lm.led.sharpening import cache_argument

#: Of the samples a problem, how many tries count.
TRIES = (1, 4, 16)


# --- the law on random logits ----------------------------------------------------------------------------------------


def laws(case: int, rows: int = 64, draws: int = 20_000) -> list[dict[str, Any]]:
    """Distances from what must hold, on random logits (8 layers, 1,000 tokens): the largest over `rows`."""
    generator = torch.Generator().manual_seed(case)
    common = torch.randn(rows, 1000, generator=generator)
    logits = (2 + case % 3) * (common + torch.randn(8, rows, 1000, generator=generator))
    step = led_distribution(logits, LEDConfig())
    pi, top = step.dense(1000).exp(), logits[0].topk(8).indices
    inside = torch.zeros_like(pi, dtype=torch.bool).scatter(-1, top, True)
    plain = torch.where(inside, logits[0] / 0.6, -math.inf).softmax(-1)
    sure = logits.clone()
    sure[0, :, 0] = 200.0
    sure_plain = torch.zeros(rows, 1000).scatter(-1, torch.zeros(rows, 1, dtype=torch.long), 1.0)
    always = led_distribution(logits, LEDConfig(exploit="never")).dense(1000).exp()
    gaps = {
        "outside": float(pi[~inside].max()),
        "not_one": float((pi.sum(-1) - 1).abs().max()),
        "entropy_lost": float((torch.special.entr(plain).sum(-1) - torch.special.entr(always).sum(-1)).max()),
        "from_top_k_at_depth_1": _furthest(led_distribution(logits[:1], LEDConfig(depth=1)).dense(1000).exp(), plain),
        "from_top_k_when_sure": _furthest(led_distribution(sure, LEDConfig()).dense(1000).exp(), sure_plain),
    }
    return [{"decoding": "led", **gaps, "frequencies_p": _frequencies(logits[:, 0], step, draws, generator)}]


def _furthest(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


def _frequencies(logits: torch.Tensor, step: Any, draws: int, generator: torch.Generator) -> float:
    """Chi-square p-value of the first row's law for tokens drawn as the algorithm says, by a coin and two draws; logits (8, V)."""
    from scipy.stats import chisquare

    probs = step.log_probs[0].double().exp().numpy()
    tokens = step.candidates[0].tolist()
    drawn = by_the_coin(logits, draws, generator).tolist()
    counts, expected = np.array([drawn.count(token) for token in tokens], dtype=float), probs / probs.sum() * draws
    rare = expected < 5
    counts, expected = np.append(counts[~rare], counts[rare].sum()), np.append(expected[~rare], expected[rare].sum())
    return float(chisquare(counts[expected > 0], expected[expected > 0]).pvalue) if counts.sum() == draws else 0.0


def by_the_coin(logits: torch.Tensor, draws: int, generator: torch.Generator) -> torch.Tensor:
    """Tokens drawn by the algorithm as the authors' figure and code have it, step by step and apart from the component: LongTensor (draws,)."""
    p = [torch.softmax(layer.double() / 0.6, -1) for layer in logits]
    top = torch.topk(p[0], 8).indices
    total, best, most = torch.zeros(8, dtype=torch.float64), torch.zeros(8), -1.0
    for layer in p:
        total = total + layer[top].clamp(min=1e-6)
        share = total / total.sum()
        entropy = float(-(share * share.log()).sum())
        if entropy > most:
            best, most = share, entropy
    explores = torch.rand(draws, generator=generator, dtype=torch.float64) >= p[0].max()
    exploit = torch.multinomial(p[0][top], draws, replacement=True, generator=generator)
    explore = torch.multinomial(best, draws, replacement=True, generator=generator)
    return top[torch.where(explores, explore, exploit)]


# --- a sharpened model -----------------------------------------------------------------------------------------------


def walk(ctx: Context, *, block: int, imitate: int, reinforce: int, unseen: int) -> list[dict[str, Any]]:
    """One model taught and sharpened from the block's seed, under every rule that was not left out."""
    every = {name: rule for name, rule in ctx.select(walking.rules()).items() if isinstance(rule, Rule)}
    budget = sharpening.Budget(imitate=imitate, reinforce=reinforce)
    return walking.walker(10_000 * ctx.seed + block, budget, every, unseen)


# --- problems solved -------------------------------------------------------------------------------------------------


def rules(led: LEDConfig) -> dict[str, Rule]:
    """The rules at the paper's temperature, 0.6; and those that a higher one may help at 1.0 too (``@1.0``)."""
    usual = {kind: Rule(kind, 0.6, led) for kind in (*PLAIN, "dola", "led")}
    return usual | {f"{kind}@1.0": Rule(kind, 1.0, led) for kind in ("temperature", "min-p", "top-k", "led")}


def config_for(lm: Any, depth: int) -> LEDConfig:
    """LED as the study runs it: thinking ends with ``</think>`` where the tokenizer has that token, else never."""
    ids = lm.tokenizer("</think>", add_special_tokens=False)["input_ids"]
    layers = rivals.anatomy(lm.model).n_layers
    if not 1 <= depth <= layers:
        raise SpecError(
            f"this model has {layers} layers, and the study looks at {depth}: choose with --set depth={min(3, layers)}"
        )
    return LEDConfig(depth=depth, think_end=tuple(ids) if len(ids) == 1 else None)


def with_answers(workload: LMWorkload) -> LMWorkload:
    """The workload as it is.

    Raises
    ------
    SpecError
        Where solutions could not be counted: prompts without answers, or tasks that are not sampled.
    """
    if workload.prompts is not None and any(answer is None for _, answer in workload.prompts):
        raise SpecError(
            "solved problems can be counted only where prompts have answers; name their column: --data prompts.jsonl:prompt,answer"
        )
    for task in workload.tasks:
        if task.startswith("lm-eval:"):
            raise SpecError(
                f"{task} is not sampled here; name tasks with a verifier (arithmetic, countdown, subset_sum, reasoning_gym:NAME) or your own"
                " prompts with --data"
            )
    return workload


def problem_of(workload: LMWorkload, lm: Any, place: int, n: int) -> Problem | None:
    """The problem at a place of the list: the user's own, those of the tasks that were named, or sums and subset sums in turn."""
    found = _problems(workload, lm, n)
    return found[place] if place < len(found) else None


@functools.lru_cache(maxsize=4)
def _problems(workload: LMWorkload, lm: Any, n: int) -> list[Problem]:
    if workload.tasks or workload.prompts is not None:
        tasks = workload.tasks or ("own",)
        share = -(-n // len(tasks))
        found = [workload.problems(task, lm, n=share) for task in tasks]
    else:
        half = -(-n // 2)
        sums = _tasks.arithmetic(n=half, seed=5, digits=3, terms=2)
        found = [_templated(lm, sums), _templated(lm, _tasks.subset_sum(n=half, seed=5, count=5, pick=2, largest=20))]
    longest = max(len(part) for part in found)
    return [part[i] for i in range(longest) for part in found if i < len(part)][:n]


def _templated(lm: Any, problems: list[Problem]) -> list[Problem]:
    return [Problem(lm.prompt(p.prompt), p.answer, p.check, p.kind, p.extra) for p in problems]


@torch.no_grad()
def solve(
    workload: LMWorkload, ctx: Context, *, block: int, n: int, samples: int, new_tokens: int, depth: int
) -> list[dict[str, Any]]:
    """One problem under every rule, `samples` samples each from one reading of the prompt."""
    lm = workload.model(ctx.device, ctx.dtype or None)
    problem = problem_of(workload, lm, block, n)
    if problem is None:
        return []
    ids = lm.encode(problem.prompt)
    cache = _read(lm.model, ids[:, :-1], samples)
    every: dict[str, Rule | Callable[..., Any]] = ctx.select(rules(config_for(lm, depth)))
    rows = []
    for number, (name, rule) in enumerate(every.items()):
        settings = {"cache": copy.deepcopy(cache), "new_tokens": new_tokens, "seed": 1000 * block + number + ctx.seed}
        if isinstance(rule, Rule):
            out = rivals.generate(rule, lm.model, ids.expand(samples, -1), pad=lm.pad_id, **settings)
        else:
            out = rule(lm.model, lm.tokenizer, ids, samples, new_tokens, settings["seed"])
        new = out[:, ids.shape[1] :]
        correct = sum(problem.check(text) for text in lm.tokenizer.batch_decode(new, skip_special_tokens=True))
        rows.append({"decoding": name, "kind": problem.kind, **_passes(samples, correct), "tokens": _length(new, lm)})
    return rows


def _read(model: Any, ids: torch.Tensor, copies: int) -> Any:
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    model(ids, **{cache_argument(model): cache}, use_cache=True)
    cache.batch_repeat_interleave(copies)
    return cache


def _passes(samples: int, correct: int) -> dict[str, float]:
    found = {f"pass_{k}": float(_tasks.pass_at_k(samples, correct, k)) for k in TRIES if k <= samples}
    return {**found, "unsolved": 1 - found[f"pass_{max(k for k in TRIES if k <= samples)}"]}


def _length(new: torch.Tensor, lm: Any) -> float:
    """Mean number of generated tokens, the end of text included."""
    ended = (new == lm.pad_id).long().cumsum(1) > 0
    if lm.tokenizer.eos_token_id is not None:
        ends = (new == lm.tokenizer.eos_token_id).long()
        ended |= ends.cumsum(1) - ends > 0
    return float((~ended).sum(1).float().mean())


# --- entropies of layers ---------------------------------------------------------------------------------------------


@torch.no_grad()
def layers(
    workload: LMWorkload, ctx: Context, *, block: int, n: int, length: int, positions: int
) -> list[dict[str, Any]]:
    """A window of text: how unsure each layer is, and how many of the final layer's eight best tokens are among its own."""
    lm = workload.model(ctx.device, ctx.dtype or None)
    ids = _windows(workload, lm, n, length)[block : block + 1].to(lm.device)
    hidden = lm.model(ids, output_hidden_states=True, use_cache=False).hidden_states
    at = torch.linspace(length // 4, length - 1, positions).long()
    seen = Layers(lm.model, [states[0, at] for states in hidden])
    final = seen.final().log_softmax(-1)
    top = final.topk(8).indices
    rows, found = [], {}
    for name, norm in (("final-norm", True), ("no-norm", False)):
        curves = []
        for steps in range(len(hidden) - 1):
            log_p = final if steps == 0 else seen.below(steps, norm=norm).log_softmax(-1)
            curves.append(looks(log_p, top))
            rows.append({"decoding": name, "layer": len(hidden) - 1 - steps, **curves[-1]})
        found[name] = curves
    rows += [{"decoding": name, **asymmetry(curves)} for name, curves in found.items()]
    return rows


@functools.lru_cache(maxsize=2)
def _windows(workload: LMWorkload, lm: Any, n: int, length: int) -> torch.Tensor:
    return _corpora.windows(lm.tokenizer, ("documentation", "prose", "code"), length=length, n=n, seed=3)


# --- time ------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def overhead(workload: LMWorkload, ctx: Context, *, batch: int, new_tokens: int, repeats: int) -> list[dict[str, Any]]:
    """Seconds of `new_tokens` tokens of `batch` rows after a prompt of four, in turn: plain top-k sampling and four ways of LED."""
    lm = workload.model(ctx.device, ctx.dtype or None)
    ids = _windows(workload, lm, 1, 64)[:, :4].to(lm.device).expand(batch, -1)
    common = {
        "max_new_tokens": new_tokens,
        "min_new_tokens": new_tokens,
        "repetition_penalty": 1.0,
        "pad_token_id": lm.pad_id,
    }

    def plain() -> Any:
        with torch.random.fork_rng(devices=[ids.device] if ids.is_cuda else []):
            out = lm.model.generate(ids, do_sample=True, temperature=0.6, top_k=8, top_p=1.0, **common)
        return _finished(out)

    def led(depth: int, normaliser: Any) -> Callable[[], Any]:
        config = LEDConfig(depth=depth, think_end=None, normaliser=normaliser)
        return lambda: _finished(
            led_generate(lm.model, ids, led=config, generator=torch.Generator().manual_seed(0), **common)
        )

    layers = rivals.anatomy(lm.model).n_layers
    depths = [depth for depth in (4, 8) if depth <= layers] or [layers]
    calls: Mapping[str, Callable[[], Any]] = {
        "top-k": plain,
        **{f"led-{depth}": led(depth, "exact") for depth in depths},
        **{f"led-{depth}-k": led(depth, "candidates") for depth in depths},
    }
    timed = interleave(calls, warmup=1, repeats=repeats, arm_column="decoding")
    return [
        {"decoding": row["decoding"], "block": row["repeat"], "token_seconds": row["seconds"] / new_tokens}
        for row in timed
    ]


def _finished(out: torch.Tensor) -> torch.Tensor:
    if out.is_cuda:
        torch.cuda.synchronize()
    return out
