"""The study's trials: which are run, and what each measures."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
from sklearn.linear_model import LogisticRegression, RidgeCV

from cameraready.causal.rank_learner.curves import assess, autoc, toc_curve
from cameraready.causal.rank_learner.learner import RankLearner
from cameraready.causal.rank_learner.nuisances import Predictions
from cameraready.causal.rank_learner.rivals import LEARNERS, LIBRARIES, fits, recipe, shared
from cameraready.causal.rank_learner.tables import TableEncoder, rows_of
from cameraready.causal.rank_learner.workloads import FOLDS, Draw, Simulated, Table, label_biases
from cameraready.evidence import Context

SIZES = (100, 250, 500, 1000, 2000)
ERRORS = (0.2, 0.1, 0.05, 0.025)
POOLS = (0.01, 0.1, 1.0)
SHARES = np.linspace(0.1, 1.0, 10)
RANKED_ROWS = 100_000  # a longer table of one's own is ranked from Python
Rows = list[dict[str, Any]]


# --- plan -----------------------------------------------------------------------------------------------------------


def plan(tier: str, workload: str) -> Iterator[dict[str, Any]]:
    blocks = {"smoke": 2, "desk": 30, "full": 100}[tier]
    if workload in ("own", "nhefs-outcomes", "nsw-outcomes"):
        yield from ({"part": "outcomes", "block": fold} for fold in range(2 if tier == "smoke" else FOLDS))
        if workload == "own":
            yield {"part": "ranking", "block": 0}
    elif workload == "labels":
        yield from ({"part": "labels", "block": block} for block in range(blocks))
    elif workload == "timing":
        rows = 200 if tier == "smoke" else 1000
        draws, processes = (1, 1) if tier == "smoke" else (6, 2)
        yield from ({"part": "timing", "first": draws * p, "draws": draws, "rows": rows} for p in range(processes))
    elif workload == "no-ranking":
        tests = {"smoke": 1, "desk": 150, "full": 1000}[tier]
        yield from ({"part": "test", "block": block, "rows": 300} for block in range(tests))
    elif workload == "synthetic":
        for block in range(blocks):
            for rows in (100,) if tier == "smoke" else SIZES:
                yield {"part": "equal", "block": block, "rows": rows}
            for rows in (100,) if tier == "smoke" else (100, 250, 500) if tier == "desk" else SIZES:
                yield {"part": "recipe", "block": block, "rows": rows}
    else:
        for block in range(min(blocks, 20) if tier == "desk" else blocks):
            yield {"part": "equal", "block": block, "rows": {"noisy": 500}.get(workload, 1000)}


# --- trials ---------------------------------------------------------------------------------------------------------


def trial(
    workload: Simulated | Table,
    ctx: Context,
    *,
    part: str,
    block: int = 0,
    rows: int = 0,
    first: int = 0,
    draws: int = 0,
) -> Rows:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rows without overlap are counted in the rows of results
        if isinstance(workload, Table):
            return ranking(workload, ctx) if part == "ranking" else outcomes(workload, ctx, block)
        generator = np.random.default_rng([ctx.seed, block, rows])
        if part == "labels":
            return labels(generator)
        if part == "timing":
            return timing(workload, ctx, range(first, first + draws), rows)
        if part == "test":
            return no_ranking(workload, block, rows, generator)
        if part == "recipe":
            return by_recipe(workload, ctx, block, rows, generator)
        return at_equal_terms(workload, ctx, block, rows, generator)


def at_equal_terms(workload: Simulated, ctx: Context, block: int, rows: int, generator: np.random.Generator) -> Rows:
    """Every arm on the same rows, nuisances, networks, optimiser, held-out parts; judged by the known effects."""
    given = workload.draw(rows, generator)
    block_seed = 1_000 * ctx.seed + block
    known = shared(given.Y, given.T, given.X, given.test, block_seed)
    arms = {**LEARNERS, **(LIBRARIES if rows == 500 and workload.name == "synthetic" else {})}
    found = {"best-order": given.effects}
    for name, arm in ctx.select(arms).items():
        found[name] = (own_arm(arm) if name in ctx.own else arm)(known)
    left_out = int((~known.kept).sum())
    return [
        {"learner": name, **judged(given.effects, checked(name, scores, given.effects)), "left_out": left_out}
        for name, scores in found.items()
    ]


def own_arm(arm: Any) -> Any:
    return lambda given: np.asarray(arm(given.Y, given.T, given.X, given.test), dtype=float)


def checked(name: str, scores: np.ndarray, like: np.ndarray) -> np.ndarray:
    scores = np.asarray(scores, dtype=float)
    if scores.shape != like.shape:
        raise ValueError(f"{name} returned shape {scores.shape}, expected {like.shape}")
    if not np.isfinite(scores).all():
        raise ValueError(f"{name} returned NaN or infinite scores")
    return scores


def judged(effects: np.ndarray, scores: np.ndarray) -> dict[str, float]:
    return {"autoc": autoc(effects, scores).value}


def by_recipe(workload: Simulated, ctx: Context, block: int, rows: int, generator: np.random.Generator) -> Rows:
    """The paper's protocol: nuisances from `rows` rows, the second stage from as many others, its networks and optimiser."""
    both = workload.draw(2 * rows, generator)
    first = Draw(both.Y[:rows], both.T[:rows], both.X[:rows], both.test, both.effects)
    second = Draw(both.Y[rows:], both.T[rows:], both.X[rows:], both.test, both.effects)
    found = recipe(first, second, 1_000 * ctx.seed + block, POOLS if rows == 500 else ())
    return [
        {"learner": name, **judged(both.effects, scores)} for name, scores in found.items() if name not in ctx.without
    ]


def outcomes(workload: Table, ctx: Context, fold: int) -> Rows:
    """Rank one twelfth of a table by what the others tell; judged by doubly robust scores of the ranked rows."""
    place = folds(workload, ctx.seed)
    train, test = np.flatnonzero(place != fold), np.flatnonzero(place == fold)
    encoder = TableEncoder().fit(rows_of(workload.raw, train))
    X, held = (encoder.transform(rows_of(workload.raw, rows)) for rows in (train, test))
    models: dict[str, Any] = {
        "model_y": "auto",
        "model_t": "auto" if workload.propensity is None else workload.propensity,
    }
    given = shared(workload.Y[train], workload.T[train], X, held, 1_000 * ctx.seed + fold, **models)
    e = given.nuisances.predict_new(held)
    bounded = Predictions(e.control, e.treated, np.clip(e.propensity, 0.01, 0.99))
    effects = bounded.doubly_robust(workload.Y[test], workload.T[test])[0]
    names = ("rank-learner", "plug-in", "dr-learner", "t-learner")
    arms = ctx.select({name: LEARNERS[name] for name in names})
    rows: Rows = []
    for name, arm in arms.items():
        scores = checked(name, (own_arm(arm) if name in ctx.own else arm)(given), effects)
        rows.append(
            {
                "learner": name,
                **judged(effects, scores),
                "effect": float(effects.mean()),
                "left_out": int((~given.kept).sum()),
            }
        )
        curve = toc_curve(effects, scores, SHARES)
        rows += [
            {"learner": name, "share": float(q), "toc": float(v)} for q, v in zip(SHARES, curve.values, strict=True)
        ]
    return [*rows, {"learner": "random", "autoc": 0.0}]  # the mean over all orders, exactly


def folds(workload: Table, seed: int) -> np.ndarray:
    """The twelfth that each row belongs to, (n,); treated and untreated rows are dealt out evenly."""
    n = len(workload.Y)
    order = np.argsort(np.random.default_rng([seed, 0x464F]).permutation(n) + n * workload.T)
    place = np.empty(n, dtype=int)
    untreated = int((workload.T == 0).sum())
    place[order] = np.concatenate([np.arange(untreated), np.arange(n - untreated)]) % FOLDS
    return place


def ranking(workload: Table, ctx: Context) -> Rows:
    """The ranking itself, learnt from all rows: place and score of every row, in the order of the table."""
    if len(workload.Y) > RANKED_ROWS:
        return []
    learner = fitted(workload)
    scores, places = learner.predict(workload.raw), learner.rank(workload.raw)
    return [
        {"learner": "rank-learner", "row": index, "score": float(score), "place": int(place)}
        for index, (score, place) in enumerate(zip(scores, places, strict=True))
    ]


def fitted(workload: Simulated | Table) -> RankLearner:
    """A learner fitted to a table, or to 1,000 drawn rows."""
    if isinstance(workload, Table):
        propensity = "auto" if workload.propensity is None else workload.propensity
        return RankLearner(model_t=propensity, random_state=0).fit(workload.Y, workload.T, X=workload.raw)
    given = workload.draw(1000, np.random.default_rng(0))
    return RankLearner(random_state=0).fit(given.Y, given.T, X=given.X)


def labels(generator: np.random.Generator) -> Rows:
    """Bias of the expected pair label when every nuisance is off by `size`."""
    seed = int(generator.integers(2**31))
    rows = []
    for size in ERRORS:
        biases = label_biases(np.random.default_rng(seed), size)
        rows += [
            {"learner": name, "size": size, "bias": biases[kind]}
            for name, kind in (("rank-learner", "orthogonal"), ("plug-in", "plug-in"))
        ]
    return rows


def no_ranking(workload: Simulated, block: int, rows: int, generator: np.random.Generator) -> Rows:
    """`assess` where every effect is 1: how often it says that there is a ranking."""
    given = workload.draw(rows, generator)
    learner = RankLearner(model_y=RidgeCV(), model_t=LogisticRegression(), scorer="linear", cv=3, random_state=block)
    found = assess(learner, given.Y, given.T, X=given.X, random_state=block)
    return [{"learner": "rank-learner", "detected": float(found.detectable), "p_value": found.p_value}]


def timing(workload: Simulated, ctx: Context, draws: range, rows: int) -> Rows:
    """Seconds of whole fits, in turn."""
    warm = workload.draw(100, np.random.default_rng(0))
    for name, fit in fits(0).items():
        if name not in ctx.without:
            fit(warm)
    found = []
    for turn, draw in enumerate(draws):
        given = workload.draw(rows, np.random.default_rng([ctx.seed, draw]))
        calls = [(name, fit) for name, fit in fits(draw).items() if name not in ctx.without]
        for name, fit in calls[turn % len(calls) :] + calls[: turn % len(calls)]:
            started = time.perf_counter()
            fit(given)
            found.append({"learner": name, "block": draw, "fit_seconds": time.perf_counter() - started})
    return found
