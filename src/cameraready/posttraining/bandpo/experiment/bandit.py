"""A bandit with a hundred arms and exact gradients: nothing is sampled, so that what differs between losses is the operator alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from cameraready.posttraining import _testbed
from cameraready.posttraining.bandpo.experiment.arms import ARMS, Own, terms
from cameraready.posttraining.bandpo.experiment.matching import matched
from cameraready.posttraining.bandpo.experiment.training import MINIBATCHES, TUNING, buckets
from cameraready.posttraining.bandpo.loss import BUCKETS

#: Of Adam on the logits: a round of eight steps could raise a rare arm's logit by a quarter.
RATE = 0.03


class Bandits:
    """Instances, one a seed: five right arms that have a probability of 0.02 together, ninety-five wrong ones with unequal shares."""

    def __init__(self, seeds: int, rounds: int, tuning_rounds: int) -> None:
        self.seeds, self.rounds, self.tuning_rounds = seeds, rounds, tuning_rounds


def targets(bandits: Bandits) -> dict[str, np.ndarray]:
    return {"target": np.array(_sweep(bandits, ARMS["clip"], (1.0,))[0])}


def played(bandits: Bandits, arm: Any, target: float, multiple: float | None = None) -> list[dict[str, Any]]:
    """Rows like those of `training.trained`."""
    if multiple is None:
        multiple = matched(arm.multiples, _sweep(bandits, arm, arm.multiples), target)
    curve = play(arm, range(bandits.seeds), torch.full((bandits.seeds,), multiple), bandits.rounds)
    rows, rounds = [], np.arange(bandits.rounds + 1)
    for seed in range(bandits.seeds):
        now = {name: values[:, seed] for name, values in curve.items()}
        reached = np.nonzero(now["rare"] >= 0.5)[0]
        per_round = now["spent"][bandits.tuning_rounds] / bandits.tuning_rounds
        end = {
            "kl_round": per_round,
            "kl_ratio": per_round / target,
            "rounds_to_goal": float(reached[0]) if len(reached) else float(bandits.rounds),
            "reached": float(len(reached) > 0),
        }
        end |= {name: now[name][1:].mean() for name in ("clip_up", "clip_down") if name in now}
        for name, values in (("accuracy", now["rare"]), ("token_entropy", now["entropy"]), ("pass16", now["pass16"])):
            end[name] = values[-1]
            end[f"{name}_mean"] = np.trapezoid(values, rounds) / bandits.rounds
            end[f"{name}_at_kl"] = np.interp(0.5 * target * bandits.rounds, now["spent"], values)
        rows.append(
            {
                "run": seed,
                "kind": "end",
                "multiple": multiple,
                **{k: float(f"{v:.6g}") for k, v in end.items()},
            }
        )
        rows += buckets(seed, {name: float(values[1:].sum()) for name, values in now.items() if name[-2:-1] == "_"})
        for place in range(0, bandits.rounds + 1, 10):
            point = {
                "entropy_now": now["entropy"],
                "accuracy_now": now["rare"],
                "rare_now": now["rare"],
                "pass16_now": now["pass16"],
            }
            point |= {f"{name}_now": now[name] for name in ("clip_up", "clip_down") if name in now}
            point["spent"] = curve["spent"].mean(1)  # over runs, so that they share their abscissa
            rows.append(
                {
                    "run": seed,
                    "kind": "curve",
                    "round": place,
                    **{name: float(f"{value[place]:.4g}") for name, value in point.items()},
                }
            )
    return rows


def play(arm: Any, seeds: Any, multiples: Tensor, rounds: int) -> dict[str, np.ndarray]:
    """Curves (rounds + 1, S): probability of the right arms, entropy, pass@16, KL spent, and shares of cut probability.

    Every round weighs each arm with its old probability, as infinitely many samples would, and takes `MINIBATCHES` steps of Adam on all of them.
    """
    tasks = [_testbed.arms(100, seed=seed) for seed in seeds]
    reward = torch.stack([task.reward[0] for task in tasks]).double()
    logits = torch.stack([task.start[0] for task in tasks]).double().log().requires_grad_()
    by_rate = arm.sweeps == "lr"
    setting = torch.full_like(multiples, arm.usual) if by_rate else arm.usual * multiples
    update = _testbed.AdamW([logits], (RATE * multiples if by_rate else torch.full_like(multiples, RATE)).double())
    spent, curve, shares = torch.zeros(len(reward), dtype=torch.float64), [], {}
    for turn in range(rounds + 1):
        old = torch.log_softmax(logits.detach(), -1)
        rare = (old.exp() * reward).sum(-1)
        curve.append(
            {
                "rare": rare,
                "entropy": _testbed.exact.sequence_entropy(old),
                "pass16": _testbed.exact.pass_at_k(rare, 16),
                "spent": spent,
                **shares,
            }
        )
        if turn == rounds:
            break
        advantage = (reward - rare[:, None]) / (rare * (1 - rare)).sqrt()[:, None].clamp(min=1e-4)
        shares = {}
        for _ in range(MINIBATCHES):
            logps = torch.log_softmax(logits, -1)
            everything = torch.ones_like(old, dtype=torch.bool)[:, None, :, None]
            if isinstance(arm, Own):
                # Weighed by the advantages instead: a loss of samples is linear in their size.
                weighed = advantage * old.exp() * old.shape[1]
                losses, _ = arm(
                    logps[:, None, :, None], old[:, None, :, None], weighed[:, None, :], everything, setting
                )
                (logits.grad,) = torch.autograd.grad(losses.sum(), [logits])
                update.step()
                continue
            each, up, down = terms(
                arm, logps[:, None, :, None], old[:, None, :, None], advantage[:, None, :, None], everything, setting
            )
            losses = (old.exp() * each[:, 0, :, 0]).sum(-1)
            (logits.grad,) = torch.autograd.grad(losses.sum(), [logits])
            update.step()
            for name, value in _weighted(old, up[:, 0, :, 0], down[:, 0, :, 0]).items():
                shares[name] = shares.get(name, 0.0) + value / MINIBATCHES
        spent = spent + _testbed.exact.kl(old, torch.log_softmax(logits.detach(), -1))
    curve[0] |= {name: torch.zeros_like(spent) for name in curve[-1] if name not in curve[0]}
    return {name: torch.stack([point[name] for point in curve]).numpy() for name in curve[0]}


def _weighted(old: Tensor, up: Tensor, down: Tensor) -> dict[str, Tensor]:
    """Shares of probability that was cut: all of it, and by bucket of probability."""
    p = old.exp()
    bucket = torch.bucketize(old, torch.tensor(BUCKETS, dtype=old.dtype).log())
    found = {"clip_up": (p * up).sum(-1), "clip_down": (p * down).sum(-1)}
    for place in range(len(BUCKETS) + 1):
        here = p * (bucket == place)
        found |= {
            f"tokens_{place}": here.sum(-1),
            f"up_{place}": (here * up).sum(-1),
            f"down_{place}": (here * down).sum(-1),
        }
    return found


def _sweep(bandits: Bandits, arm: Any, multiples: Any) -> list[float]:
    seeds = [seed for _ in multiples for seed in TUNING]
    each = torch.tensor([multiple for multiple in multiples for _ in TUNING])
    curve = play(arm, seeds, each, bandits.tuning_rounds)
    return (curve["spent"][-1].reshape(len(multiples), len(TUNING)).mean(1) / bandits.tuning_rounds).tolist()
