"""Trials on larger networks: molecules in a latent, and a user's own flow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cameraready.flows._toy.stacked import StackedMLP
from cameraready.flows.cfo import NFT, AdjointMatching, FlowPolicy, FlowSolver
from cameraready.flows.cfo.experiment import arms
from cameraready.flows.cfo.experiment.arms import Tuned
from cameraready.flows.cfo.experiment.own import OwnProblem
from cameraready.flows.cfo.experiment.problems import Steering
from cameraready.flows.cfo.experiment.trials import MOLECULE_ARMS, OWN_ARMS, generator, judged, round_rows

if TYPE_CHECKING:
    from cameraready.evidence import Context
    from cameraready.flows._molecules import Molecules

Rows = Iterator[dict[str, Any]]
#: Price of a nat in reward (shares of sp3 carbons), at which the unbounded optimum is about 2 nats away, and rates of the two solvers.
MOLECULE_KL = 0.1
MOLECULE_RATES = {"am": 1e-3, "nft": 1e-3}
PICTURES = 4


def flat(score: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A score of (B, D) for states with leading axes."""

    def of(x: Tensor) -> Tensor:
        return score(x.reshape(-1, x.shape[-1])).reshape(x.shape[:-1])

    return of


def molecule_arm(
    workload: Molecules, ctx: Context, *, arm: str, runs: int, budget: int, rounds: int, batch: int, n: int
) -> Rows:
    """One arm on molecules, all runs at once: tuned on surrogates (or on rdkit itself), judged by both."""
    g = generator(2000 + (MOLECULE_ARMS.index(arm) if arm in MOLECULE_ARMS else len(MOLECULE_ARMS)))
    net = workload.velocity
    stack = StackedMLP(runs, net.dim, net.width, net.depth, fourier=net.fourier)
    for place in range(runs):
        stack.load(place, net)
    base = FlowPolicy(stack.requires_grad_(True), (workload.dim,), (runs,)).freeze()
    task = Steering(flat(workload.reward), flat(workload.constraint), workload.bound, MOLECULE_KL)
    common: dict[str, Any] = {"batch": batch, "steps": 16, "sample_steps": 40, "micro_batch": 500}
    am = AdjointMatching(lr=MOLECULE_RATES["am"], **common)
    penalty = "per_sample" if arm == "cfo" else "expectation"
    loop: dict[str, Any] = {"rounds": rounds, "inner": max(budget // rounds, 1), "n_mc": n, "penalty": penalty}
    if arm in ctx.own:
        own = {key: value for key, value in loop.items() if key != "penalty"}
        tuned = arms.one_by_one(ctx.own[arm], base, task, g, **own)
    elif arm == "pretrained":
        tuned = Tuned(base, 0)
    elif arm == "am":
        tuned = arms.alone(am, base, task, g, iterations=budget)
    elif arm in ("cfo", "cfo-expectation"):
        tuned = arms.cfo(am, base, task, g, **loop)
    else:
        # rdkit is asked for every sample, which costs more than the network: half the rounds, of half the size.
        rdkit = Rdkit(workload)
        truth = Steering(rdkit.score("reward"), rdkit.score("constraint"), workload.bound, MOLECULE_KL)
        nft = NFT(lr=MOLECULE_RATES["nft"], **(common | {"batch": max(batch // 2, 4)}))
        halved = {"rounds": max(rounds // 2, 1), "n_mc": max(n // 4, 10)}
        tuned = arms.cfo(nft, base, truth, g, **{**loop, **halved})
    x, _ = am.draw(tuned.policy, n, g)
    kl = am.divergence(tuned.policy, base, max(n // 2, 20), g)
    for number, row in enumerate(judged(task, x, base.runs)):
        measured = workload.truth(x[number])
        valid = measured["valid"]
        true = {name: float(measured[name][valid].mean()) for name in ("reward", "constraint", "qed", "weight")}
        yield {
            "arm": arm,
            "run": str(number),
            "stage": "end",
            **row,
            "kl": float(kl[number]),
            **{f"true_{name}": value for name, value in true.items()},
            "true_excess": (true["constraint"] - workload.bound) / workload.bound,
            "valid": float(valid.double().mean()),
            "unique": float(measured["unique"].double().mean()),
            "novel": float(measured["novel"].double().mean()),
        }
        if number == 0 and budget >= 20:
            yield from pictures(workload, arm, measured)
    yield from round_rows(arm, tuned)


class Rdkit:
    """What rdkit says of decoded latents, as black boxes; NaN where there is no molecule. Reward and constraint share what they decode."""

    def __init__(self, workload: Molecules) -> None:
        self.workload = workload
        self._last: tuple[Tensor, dict[str, Any]] | None = None

    def score(self, name: str) -> Callable[[Tensor], Tensor]:
        def of(x: Tensor) -> Tensor:
            if self._last is None or not torch.equal(self._last[0], x):
                self._last = (x.detach().clone(), self.workload.truth(x.detach()))
            return self._last[1][name].to(x.dtype)

        return flat(of)


def pictures(workload: Molecules, arm: str, measured: dict[str, Any]) -> Rows:
    """Drawings of the first few different molecules."""
    shown: list[str] = []
    for place, smiles in enumerate(measured["smiles"]):
        if len(shown) == PICTURES:
            return
        if not smiles or smiles in shown or len(smiles) > 70:
            continue
        shown.append(smiles)
        numbers = f"sp3 {float(measured['reward'][place]):.2f}, SA {float(measured['constraint'][place]):.1f}"
        yield {
            "arm": arm,
            "run": "0",
            "stage": "picture",
            "picture": workload.draw(smiles),
            "alt": f"{workload.described(smiles)}: {numbers}",
            "caption": numbers,
        }


# --- a user's own ------------------------------------------------------------------------------------------------------------


def own_arm(workload: OwnProblem, ctx: Context, *, run: str, budget: int, rounds: int, n: int, batch: int) -> Rows:
    """All arms of one run on the user's flow; those of the user's own are inner solvers under the expectation form."""
    task, shape = workload.steering, workload.flow.shape
    am = AdjointMatching(lr=1e-3, batch=batch, steps=20, sample_steps=20, path=workload.flow.path)
    inner: dict[str, FlowSolver | None] = {"pretrained": None, "am": am, "cfo": am, "cfo-expectation": am}
    for arm, solver in ctx.select(inner).items():
        g = generator(3000 + 17 * int(run) + (OWN_ARMS.index(arm) if arm in OWN_ARMS else 0))
        opened = arms.checked(solver or am).open(workload.network, shape)
        if solver is None:
            tuned = Tuned(opened, 0)
        elif arm == "am":
            tuned = arms.alone(solver, opened, task, g, iterations=budget)
        else:
            penalty = "per_sample" if arm == "cfo" else "expectation"
            tuned = arms.cfo(
                solver, opened, task, g, rounds=rounds, inner=max(budget // rounds, 1), n_mc=n, penalty=penalty
            )
        with torch.no_grad():
            x, _ = am.draw(tuned.policy, n, g)
            (row,) = judged(task, x, ())
        kl = am.divergence(tuned.policy, opened, min(n, 500), g)
        yield {"arm": arm, "run": run, "stage": "end", **row, "kl": kl}
