"""What one trial of the study does, by part."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from cameraready.lm._tasks import Problem
from cameraready.posttraining.cal_grpo.advantages import credited
from cameraready.posttraining.cal_grpo.attempts import later_failures
from cameraready.posttraining.cal_grpo.experiment import training
from cameraready.posttraining.cal_grpo.experiment.dialogue import Chances, converse
from cameraready.posttraining.cal_grpo.experiment.games import GAMES, Game
from cameraready.posttraining.cal_grpo.experiment.gradient import Moments, moments

#: Optimizer steps; learning rates that each arm's sweep tries; seeds that choose the rate, and seeds of the verdicts.
STEPS: Mapping[str, int] = {"key": 100, "hidden": 150, "maze": 60, "number": 250, "ask": 80}
RATES = (3e-3, 1e-2, 3e-2, 6e-2)
TUNING = tuple(range(100, 103))
SEEDS = tuple(range(12))
#: Batches of each seed's checkpoint from which the variance of the gradient is taken, and steps before that checkpoint.
REPEATS, WARM = 24, 40


# --- exact gradients -----------------------------------------------------------------------------------------------------


def arms_of(probabilities: np.ndarray) -> dict[str, dict[str, Any]]:
    """Estimators of the gradient study, by arm."""
    p = probabilities[:, 0]
    return {
        "trajectory": {"method": "trajectory"},
        "naive": {"method": "naive"},
        "cal": {},
        "known-w": {"weights": later_failures(p)},
        "known": {"weights": later_failures(p), "baseline": p},
        "whole": {"lam": 1.0},
    }


def exact(probabilities: np.ndarray, n: int, options: Any) -> Moments:
    """Moments with every group by itself."""

    def estimator(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
        return credited(options, rewards, groups, groups)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of groups of one
        return moments(probabilities, n, estimator)


def gradient(_workload: str, ctx: Any, *, draws: int, most: int) -> Iterator[dict[str, Any]]:
    """Bias and variance of every estimator at random probabilities: M answers, K attempts, N trajectories; a block is a draw."""
    for draw in range(draws):
        rng = np.random.default_rng([draw, 5])
        for answers in (2, 3, 5, 10):
            for attempts in (1, 2, 3):
                probabilities = rng.dirichlet(np.ones(answers), size=attempts)
                w = later_failures(probabilities[:, 0])
                for n in [n for n in (2, 4, 16) if n <= most and (attempts > 1 or n == 4)]:
                    found = {arm: exact(probabilities, n, o) for arm, o in ctx.select(arms_of(probabilities)).items()}
                    base = exact(probabilities, n, {"method": "trajectory"})
                    for arm, moment in found.items():
                        yield {
                            "arm": arm,
                            "run": draw,
                            "answers": answers,
                            "tries": attempts,
                            "group": n,
                            "smallest_w": float(w.min()),
                            "bias": moment.bias,
                            "relative_bias": moment.relative_bias,
                            "variance": moment.variance,
                            "variance_ratio": moment.variance / base.variance,
                            "first_ratio": moment.variances[0] / base.variances[0],
                            "shared_ratio": moment.shared / base.shared,
                        }


# --- training ------------------------------------------------------------------------------------------------------------


def started(game: Game, seeds: tuple[int, ...], prepared: Mapping[str, Any]) -> training.GRUs:
    """Policies before training: fresh, or warm from `prepared`."""
    policy = training.policies(game, seeds)
    if prepared:
        place = [(*TUNING, *SEEDS).index(seed) for seed in seeds]
        policy.load({name: torch.as_tensor(np.asarray(values))[place] for name, values in prepared.items()})
    return policy


def prepared(workload: Any, _ctx: Any) -> dict[str, np.ndarray]:
    """Warm policies of all seeds, where the game needs them: nobody finds the way out of a maze, or the use of an answer, by chance."""
    if workload not in ("maze", "ask"):
        return {}
    game, seeds = GAMES[workload](), (*TUNING, *SEEDS)
    policy = training.imitate(training.policies(game, seeds), game, seeds)
    return {name: values.numpy() for name, values in policy.state().items()}


def train(workload: str, ctx: Any, *, arm: str, steps: int, tuning: int, seeds: int) -> Iterator[dict[str, Any]]:
    """One arm on one game: the learning rate is chosen on tuning seeds, by V@K over training, and the verdict's seeds are trained with it."""
    game, options = GAMES[workload](), ctx.select(training.ARMS)[arm]
    chosen, table = RATES[1], {}
    if tuning:
        run = TUNING[:tuning]
        policy = started(game, run, ctx.prepared).select(list(range(tuning)) * len(RATES))
        rates = torch.tensor(RATES).repeat_interleave(tuning)
        curve = _Curve()
        training.train(policy, game, options, rates, steps, run * len(RATES), curve, max(1, steps // 4))
        scores = curve.over_training(game.attempts).view(len(RATES), tuning).mean(1)
        chosen = RATES[int(scores.argmax())]
        table = {f"tuned_{rate:g}": float(score) for rate, score in zip(RATES, scores, strict=True)}
    run, curve = SEEDS[:seeds], _Curve()
    policy = started(game, run, ctx.prepared)
    training.train(policy, game, options, torch.full((seeds,), chosen), steps, run, curve, max(1, steps // 8))
    last = curve.chances[-1]
    budget = steps * game.per_step * training.GROUP * game.length
    for s in range(seeds):
        yield {
            "run": run[s],
            "rate": chosen,
            "first": float(last.verified[s, 0]),
            "verified": float(last.verified[s, -1]),
            "first_mean": float(curve.over_training(1)[s]),
            "verified_mean": float(curve.over_training(game.attempts)[s]),
            "verified_at_tokens": curve.at_tokens(s, budget),
            "first_weight": float(later_failures(last.rates[s].numpy())[0]),
            "repeats": float(last.repeats[s]),
            "tokens": int(curve.written[-1][s]),
            **{f"v{k + 1}": float(last.verified[s, k]) for k in range(game.attempts)},
            **{f"p{k + 1}": float(last.rates[s, k]) for k in range(game.attempts)},
            **table,
        }
        for step, chances in list(zip(curve.steps, curve.chances, strict=True))[::2]:
            solved = chances.success[s].sum(-1)  # V@K by prompt
            yield {
                "run": run[s],
                "step": step,
                "curve": float(chances.verified[s, -1]),
                "curve_first": float(chances.verified[s, 0]),
                "curve_repeats": float(chances.repeats[s]),
                "silent": float((solved**training.GROUP + (1 - solved).clamp_min(0) ** training.GROUP).mean()),
            }


class _Curve:
    """What is recorded while an arm trains."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.written: list[torch.Tensor] = []
        self.chances: list[Chances] = []

    def __call__(self, step: int, written: torch.Tensor, chances: Chances) -> None:
        self.steps.append(step)
        self.written.append(written)
        self.chances.append(chances)

    def over_training(self, k: int) -> torch.Tensor:
        """Mean V@k of the checkpoints after the first, (S,)."""
        return torch.stack([c.verified[:, k - 1] for c in self.chances[1:]]).mean(0)

    def at_tokens(self, seed: int, budget: int) -> float:
        """V@K once `budget` words were written, between checkpoints along a line."""
        written = [int(w[seed]) for w in self.written]
        return float(np.interp(budget, written, [float(c.verified[seed, -1]) for c in self.chances]))


# --- variance at checkpoints ---------------------------------------------------------------------------------------------


def variance(workload: str, ctx: Any, *, seeds: int, repeats: int, warm: int) -> Iterator[dict[str, Any]]:
    """Total variance of the parameters' gradient at the same checkpoints, all estimators on the same stored dialogues.

    A checkpoint is a seed's policy after some steps by outcome; a repeat is a step's batch.
    """
    game, run = GAMES[workload](), SEEDS[:seeds]
    policy = started(game, run, ctx.prepared)
    training.train(policy, game, training.ARMS["trajectory"], torch.full((seeds,), RATES[1]), warm, run)
    success = training.judged(policy, game).rates.mean(0).numpy()
    from cameraready.posttraining.cal_grpo.experiment.own import weight_text

    weight = weight_text(float(later_failures(success)[0]))
    for s in range(seeds):
        copies = policy.select([s] * repeats)
        generators = [torch.Generator().manual_seed(30_000 + 1_000 * s + r) for r in range(repeats)]
        dialogues = converse(copies, game, training.drawn_prompts(game, generators), generators)
        known = known_rates(training.judged(policy.select([s]), game, each=256))
        for arm, options in ctx.select({**training.ARMS, "known": known}).items():
            if training.is_running(options):
                continue  # a running estimate has no history at a checkpoint; "known" is what it tends to
            made = options
            if arm == "known":
                made = {name: value[dialogues.prompts.flatten()] for name, value in known.items()}
            advantages = training.Credit(made, game, repeats).of(dialogues)
            loss = training.objective(copies, game, dialogues, advantages)
            slopes = torch.autograd.grad(loss.sum(), copies.parameters())
            total = sum(float(g.double().flatten(1).var(0).sum()) for g in slopes)
            norm = sum(float(g.double().flatten(1).mean(0).square().sum()) for g in slopes)
            yield {"arm": arm, "run": run[s], "variance": total, "slope": norm**0.5, "weight": weight}


def known_rates(chances: Chances) -> dict[str, Any]:
    """w and p of each prompt, (P, K), from its exact (or many sampled) chances."""
    p = (chances.success[0] / chances.reach[0].clamp_min(1e-9)).numpy().clip(0, 1)
    return {"weights": later_failures(p), "baseline": p}


# --- a language model ----------------------------------------------------------------------------------------------------


def own(
    workload: Any, ctx: Any, *, n: int, group: int, attempts: int, problems: int, tokens: int
) -> Iterator[dict[str, Any]]:
    """V@K of the model and the estimators' variances on the same dialogues; a block is a problem."""
    from cameraready.posttraining.cal_grpo.experiment import own as measured

    lm = workload.model(ctx.device, ctx.dtype or None)
    if workload.is_tiny:
        listed = [Problem(f"{place}:", "", _even, "own") for place in range(problems)]
    else:
        listed = workload.split(lm, train=problems_of(workload, problems), test=0)[0]
    arms = ctx.select(measured.ARMS)
    yield from measured.report(
        lm, listed, arms, attempts=attempts, n=n, group=group, max_new_tokens=tokens, seed=ctx.seed
    )


def problems_of(workload: Any, wanted: int) -> int:
    """As many problems as there are, at most those wanted."""
    return wanted if workload.prompts is None or "own" not in workload.tasks else min(wanted, len(workload.prompts))


def _even(text: str) -> bool:
    """What a random model gets right now and then."""
    return len(text) % 2 == 0
