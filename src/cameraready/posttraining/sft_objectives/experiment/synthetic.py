"""Trials on the synthetic continuum: every objective, tuned alike, from one strength of prior and one share of noise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from cameraready.posttraining.sft_objectives import PriorStrength, ProbabilityObjective, recommend
from cameraready.posttraining.sft_objectives.experiment import arms, continuum

#: Steps of pre-training that make each level of prior; "misled" had the strong level's steps on other sources.
LEVELS = {"none": 0, "weak": 60, "middle": 160, "strong": 450, "misled": 450}
NOISE = (0.0, 0.1, 0.3)
#: Runs that choose learning rates, and runs that give verdicts: different sources, weights and demonstrations.
TUNING, JUDGED = tuple(range(900, 904)), tuple(range(20, 32))
RATES = (1e-3, 4e-3, 1.5e-2, 6e-2)
STEPS, BATCH = 120, 16


def prepare(judged: tuple[int, ...] = JUDGED, levels: Mapping[str, int] = LEVELS) -> dict[str, Any]:
    """Pre-trained weights of all levels and runs, float32 arrays named ``level/name``."""
    runs = [*TUNING, *judged]
    marks = sorted({steps for level, steps in levels.items() if level != "misled"})
    found = dict(zip(marks, continuum.pretrain(runs, marks), strict=True))
    weights = {level: found[steps] for level, steps in levels.items() if level != "misled"}
    if "misled" in levels:
        weights["misled"] = continuum.pretrain(runs, [levels["misled"]], other=True)[0]
    return {f"{level}/{name}": value.numpy() for level, stacked in weights.items() for name, value in stacked.items()}


def trial(
    prepared: Mapping[str, Any],
    select: Callable[[Mapping[str, ProbabilityObjective]], dict[str, ProbabilityObjective]],
    level: str,
    noise: float,
    *,
    steps: int = STEPS,
    rates: tuple[float, ...] = RATES,
    judged: tuple[int, ...] = JUDGED,
    only: tuple[str, ...] = (),
) -> Iterator[dict[str, Any]]:
    """Rows of every arm and run.

    A learning rate is chosen for each objective on the tuning runs and then used on the judged ones. ``recommended`` is what `recommend`
    takes from the prior of each run; ``untrained`` the pre-trained model as it is; ``family`` repeats the members with their alpha.
    """
    runs = [*TUNING, *judged]
    stacked = {
        name.partition("/")[2]: torch.as_tensor(value)[: len(runs)]
        for name, value in prepared.items()
        if name.startswith(f"{level}/")
    }
    tuning, judging = torch.arange(len(TUNING)), torch.arange(len(TUNING), len(runs))
    source = continuum.Source.drawn(runs)
    demonstrations = source.draw(64, noise, [torch.Generator().manual_seed(6_000_011 + run) for run in runs])
    logps = continuum.demonstrated_logps(stacked, demonstrations)
    priors = [PriorStrength.of_logprobs(logps[int(run)]) for run in judging]
    known = arms.objectives(PriorStrength.of_logprobs(logps))
    compared = arms.checked(select({name: known[name] for name in only or known}))
    results = {}
    for name, objective in compared.items():
        rate = _tuned(objective, stacked, source, tuning, noise, steps, rates)
        weights, norms = _trained(objective, stacked, source, judging, judged, [rate], noise, steps)
        results[name] = {**continuum.judge(weights, source.select(judging)), "norm": norms}, rate
    base = continuum.judge({name: value[judging] for name, value in stacked.items()}, source.select(judging))
    results["untrained"] = {**base, "norm": torch.zeros(len(judged))}, 0.0
    for place, run in enumerate(judged):
        prior = priors[place]
        rows = {
            name: {
                "run": run,
                "prior": _short(prior.mean),
                "rate": rate,
                **{key: _short(float(value[place])) for key, value in found.items()},
                "error": _short(1 - float(found["accuracy"][place])),
            }
            for name, (found, rate) in results.items()
        }
        advised = recommend(prior).name
        for name, row in rows.items():
            if "nll" in rows:
                row["gain"] = _short(row["accuracy"] - rows["nll"]["accuracy"])
            yield {"arm": name, **row}
            if name == advised:
                yield {"arm": "recommended", **row}
            if name.startswith("alpha="):
                yield {"arm": "family", "alpha": float(name[6:]), **row}


def _tuned(
    objective: ProbabilityObjective,
    stacked: continuum.Weights,
    source: continuum.Source,
    tuning: Tensor,
    noise: float,
    steps: int,
    rates: tuple[float, ...],
) -> float:
    weights, _ = _trained(objective, stacked, source, tuning, TUNING, list(rates), noise, steps)
    found = continuum.judge(weights, source.select(tuning.repeat(len(rates))))
    accuracy, divergence = (found[key].view(len(rates), -1).mean(-1).tolist() for key in ("accuracy", "kl"))
    return arms.best_rate(dict(zip(rates, zip(accuracy, divergence, strict=True), strict=True)))


def _trained(
    objective: ProbabilityObjective,
    stacked: continuum.Weights,
    source: continuum.Source,
    places: Tensor,
    seeds: tuple[int, ...],
    rates: list[float],
    noise: float,
    steps: int,
) -> tuple[continuum.Weights, Tensor]:
    """The runs at `places`, once for each learning rate, all stacked."""
    many = places.repeat(len(rates))
    return continuum.train(
        {name: value[many] for name, value in stacked.items()},
        source.select(many),
        objective,
        rates=torch.tensor(rates).repeat_interleave(len(places)),
        noise=noise,
        steps=steps,
        batch=BATCH,
        seeds=list(seeds) * len(rates),
    )


def _short(value: float) -> float:
    """To five digits, so that the rows stay small."""
    return float(f"{value:.5g}")
