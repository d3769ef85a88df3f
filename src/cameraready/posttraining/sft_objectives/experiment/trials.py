"""What one trial of the study does, by part; and what is computed once for a workload."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from cameraready.evidence import Context, Cost, Spec
from cameraready.lm import _tasks
from cameraready.models import LanguageModel
from cameraready.posttraining._workload import PosttrainingWorkload
from cameraready.posttraining.sft_objectives import PriorStrength, ProbabilityObjective, recommend
from cameraready.posttraining.sft_objectives.experiment import arms, synthetic

CONTINUUM, QUICK, FORMULAS, MEMORY = "continuum", "continuum-quick", "formulas", "memory"
#: Tasks on the shipped models: one that they know, with a share of wrong demonstrations, and one that they do not.
TASKS = ("arithmetic", "figlet_font")
NOISE = {"arithmetic": 0.3}
#: Demonstrations of a run, and those that judge it.
TRAIN, HELD_OUT = 40, 24
RATES = (1e-4, 4e-4, 1.5e-3)
#: The split on which learning rates are chosen; those that give verdicts are numbered from 0.
TUNING_SPLIT = 1_000
WORDS = {"arithmetic": "sums with wrong demonstrations", "figlet_font": "words in a font"}
#: Fewest demonstrations of a user that ten divisions make sense of.
FEWEST = 20
#: What is run on a language model.
COMPARED = ("nll", "alpha=1", "top")
#: What `recommend` may say.
ADVICE = ("nll", "alpha=0.5", "alpha=1")


def prepared(workload: Any, ctx: Context) -> Mapping[str, Any]:
    """Pre-trained networks of the continuum, or the learning rate of each objective on a language model."""
    if workload == CONTINUUM:
        return synthetic.prepare()
    if workload == QUICK:
        return synthetic.prepare(synthetic.JUDGED[:2], {"none": 0, "strong": 80})
    if not isinstance(workload, PosttrainingWorkload) or workload.is_tiny:
        return {}
    found = {}
    for task in tasks_of(workload):
        for name, value in _rates(workload, ctx, task).items():
            found[f"{task}/{name}"] = np.array(value)
    return found


def opened(workload: PosttrainingWorkload, ctx: Context) -> LanguageModel:
    """The model; the shipped ones in bfloat16, whose log-probabilities are worked out in float32, unless another type is asked for."""
    shipped = workload.spec.kind == "shipped" and not workload.is_tiny
    return workload.model(ctx.device, ctx.dtype or ("bfloat16" if shipped else ""))


def tasks_of(workload: PosttrainingWorkload) -> tuple[str, ...]:
    return TASKS if workload.spec.kind == "shipped" else ("own",)


def demonstrations(
    workload: PosttrainingWorkload, lm: LanguageModel, task: str, split: int
) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Prompts with answers to train on and to judge by, none in both, another draw for each split."""
    train, test = (TRAIN, HELD_OUT) if not workload.is_tiny else (16, 8)
    if task == "own":
        if workload.prompts is not None:
            n = len(workload.prompts)
            test = min(test, max(1, n // 3))
            train = min(train, n - test)
        problems = workload.split(lm, train=train, test=test, seed=split)
        return tuple([(p.prompt, p.answer) for p in part] for part in problems)  # type: ignore[return-value]
    n = train + test
    if task == "arithmetic":
        drawn = _tasks.arithmetic(n=2 * n, seed=split, digits=2)
    else:
        drawn = _tasks.reasoning_gym(
            task, n=2 * n, seed=split, static_font="mini", min_word_len=3, max_word_len=4, space_letters=False
        )
    different = list({p.prompt: (lm.prompt(p.prompt), p.answer) for p in drawn}.values())[:n]
    kept, judged = different[:train], different[train:]
    wrong = np.random.default_rng([split, 17]).random(train) < NOISE.get(task, 0.0)
    others = [different[(i + 1) % train][1] for i in range(train)]
    return [(p, others[i] if wrong[i] else a) for i, (p, a) in enumerate(kept)], judged


def _rates(
    workload: PosttrainingWorkload, ctx: Context, task: str, only: Sequence[str] | None = None
) -> dict[str, float]:
    """The learning rate of each objective with the highest accuracy on the tuning split, and ``advice``, a place in `ADVICE`."""
    from cameraready.posttraining.sft_objectives.experiment.adapters import Tuned

    lm = opened(workload, ctx)
    train, test = demonstrations(workload, lm, task, TUNING_SPLIT)
    tuned = Tuned(lm, [*train, *test])
    places, judged = range(len(train)), range(len(train), len(train) + len(test))
    found = {}
    with tuned.opened():
        prior = tuned.prior(places)
        for name, objective in _compared(ctx, prior).items():
            # What is prepared is kept for later runs, which may bring other arms of the user's: those are tuned in their trials.
            if name in ctx.own if only is None else name not in only:
                continue
            scores = {}
            for rate in RATES:
                tuned.train(objective, places, rate=rate, seed=TUNING_SPLIT)
                result = tuned.judge(judged)
                scores[rate] = result["accuracy"], result["nll_held_out"]
            found[name] = arms.best_rate(scores)
    return {"advice": ADVICE.index(recommend(prior).name), **found}


def _compared(ctx: Context, prior: PriorStrength) -> dict[str, ProbabilityObjective]:
    known = arms.objectives(prior)
    names = dict.fromkeys((*COMPARED, *(ADVICE if ctx.is_own_workload else ())))
    return arms.checked(ctx.select({name: known[name] for name in names}))


# --- trials ----------------------------------------------------------------------------------------------------------


def synthetic_cell(workload: Any, ctx: Context, *, level: str, noise: float) -> Iterator[dict[str, Any]]:
    short = {"steps": 10, "rates": (1e-2,), "judged": synthetic.JUDGED[:2], "only": ("nll", "alpha=1", "alpha=3")}
    yield from synthetic.trial(ctx.prepared, ctx.select, level, noise, **(short if workload == QUICK else {}))  # type: ignore[arg-type]


def formulas(workload: Any, ctx: Context, *, blocks: int) -> Iterator[dict[str, Any]]:
    from cameraready.posttraining.sft_objectives.experiment.formulas import identities

    yield from identities(blocks)


def memory(workload: Any, ctx: Context, *, blocks: int, vocabulary: int) -> Iterator[dict[str, Any]]:
    from cameraready.posttraining.sft_objectives.experiment.formulas import costs

    yield from costs(blocks, vocabulary=vocabulary)


def adapters(workload: PosttrainingWorkload, ctx: Context, *, task: str, split: int) -> Iterator[dict[str, Any]]:
    """A run of each objective on the same demonstrations, in the same order, from the same adapters."""
    from cameraready.posttraining.sft_objectives.experiment.adapters import Tuned

    lm = opened(workload, ctx)
    train, test = demonstrations(workload, lm, task, split)
    rates = {name: float(rate) for key, rate in ctx.prepared.items() for name in [key.removeprefix(f"{task}/")]}
    if workload.is_tiny:
        rates = dict.fromkeys((*COMPARED, *ADVICE, *ctx.own), RATES[1])
    untuned = [name for name in ctx.own if name not in rates and name not in ctx.without]
    if untuned:
        rates.update(_rates(workload, ctx, task, untuned))
    tuned = Tuned(lm, [*train, *test])
    places, judged = range(len(train)), range(len(train), len(train) + len(test))
    with tuned.opened():
        prior = tuned.prior(places)
        # One advice for all splits, from the demonstrations that tune the rates.
        key = f"{task}/advice"
        advised = ADVICE[int(ctx.prepared[key])] if key in ctx.prepared else recommend(prior).name
        against = "alpha=1" if advised == "nll" else "nll"
        shared = {
            "run": split,
            "setting": f"{advised} rather than {against} on {WORDS.get(task, 'your demonstrations')}",
            "prior": prior.mean,
            "below": prior.below,
            "above": prior.above,
        }
        found = {"untrained": tuned.judge(judged)}
        for name, objective in _compared(ctx, prior).items():
            seen = tuned.train(objective, places, rate=rates[name], seed=split)
            found[name] = {**seen, **tuned.judge(judged)}
    for name, numbers in found.items():
        row = {**shared, **numbers, "rate": rates.get(name, 0.0), "error": 1 - numbers["accuracy"]}
        if "nll" in found:
            row["gain"] = row["accuracy"] - found["nll"]["accuracy"]
        yield {"arm": name, **row}
        if name in (advised, against):
            yield {"arm": "recommended" if name == advised else "alternative", **row}


def cost(spec: Spec, conditions: Sequence[Mapping[str, Any]], device: str, dtype: str) -> Cost:
    """Hours, memory and downloads of the runs on a language model."""
    from cameraready.lm._workload import cost as cost_of

    # Bodies run once over all demonstrations; last layers and head as often as there are objectives, and three times for each gradient.
    passes = max(1, len(conditions)) * (1 + len(COMPARED))
    return cost_of(
        spec, prompt_tokens=128, new_tokens=0, passes=passes, batch=TRAIN + HELD_OUT, device=device, dtype=dtype or None
    )
