"""The competitors: what each selects, what it does with a batch, and at which learning rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: Learning rates of the policy that every arm was tried at, on the seeds of `tuning`.
RATES = (2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)


@dataclass(frozen=True)
class Arm:
    """One way to train.

    Attributes
    ----------
    loss : {"tb", "grpo"}
    selection : {"uniform", "partition", "running", "own", "exact", "dynamic", "learnable"}
        Prompts at random; by the learned log-partition; by a running average; by a user's estimate; by exact accuracies, renewed every 4 steps; random prompts until
        enough groups have both right and wrong answers (DAPO's dynamic sampling); the half with the largest p (1 - p) of twice as many random
        prompts (LILO). The last two pay for what they throw away.
    replay : {"", "error", "uniform"}
        Which groups' successes are replayed.
    learns : {"fresh", "naive", "weighted"}
        What the estimate is fitted to: fresh groups alone; replayed successes with their rewards too; those with their groups' mean rewards.
    lr : float
        One of `RATES`: the one with the fewest rollouts to the target on the seeds of `tuning`.
    """

    loss: Literal["tb", "grpo"] = "tb"
    selection: Literal["uniform", "partition", "running", "own", "exact", "dynamic", "learnable"] = "uniform"
    replay: Literal["", "error", "uniform"] = ""
    learns: Literal["fresh", "naive", "weighted"] = "fresh"
    lr: float = 8e-3

    @property
    def oversamples(self) -> bool:
        return self.selection in ("dynamic", "learnable")


ARMS = {
    "paced": Arm(selection="partition", replay="error"),
    "paced-weighted": Arm(selection="partition", replay="error", learns="weighted"),
    "paced-naive": Arm(selection="partition", replay="error", learns="naive"),
    "uniform-replay": Arm(selection="partition", replay="uniform"),
    "uniform-replay-weighted": Arm(selection="partition", replay="uniform", learns="weighted"),
    "selection": Arm(selection="partition"),
    "running-average": Arm(selection="running", lr=1.6e-2),
    "oracle": Arm(selection="exact"),
    "uniform": Arm(),
    "dynamic": Arm(selection="dynamic", lr=1.6e-2),
    "lilo": Arm(selection="learnable", lr=1.6e-2),
    "grpo": Arm(loss="grpo"),
    "grpo-selection": Arm(loss="grpo", selection="partition"),
    "grpo-dynamic": Arm(loss="grpo", selection="dynamic", lr=1.6e-2),
}
