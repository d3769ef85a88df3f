"""Constrained Flow Optimization: rounds of an inner solver under an augmented Lagrangian."""

from __future__ import annotations

import math
import numbers
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path as FilePath
from typing import Any

import torch
from torch import Tensor, nn

from cameraready.flows._adapters import Velocity
from cameraready.flows.cfo.adjoint import AdjointMatching
from cameraready.flows.cfo.checkpoint import Checkpoint, digest
from cameraready.flows.cfo.lagrangian import AugmentedLagrangian, Contraction, Penalty
from cameraready.flows.cfo.objective import Score
from cameraready.flows.cfo.result import CFOResult, Round, round_of, scored, settled, status_of
from cameraready.flows.cfo.solver import Policy, Solver

Progress = Callable[[str], None]


class ConstrainedFlowOptimizer:
    """Fine-tune a flow model so that its samples have as much reward as possible while E[c] stays below a bound.

    Solves max E[r] - alpha KL(p || p_pre) subject to E[c] <= B by rounds of an unconstrained fine-tuner, whose reward an `AugmentedLagrangian` changes
    from round to round: no penalty weight has to be found by trying. With ``reward=None`` it is constrained generation. Nothing is added at sampling time.

    Not where each sample must meet the bound (reject, or project), nor where a few feasible samples are all that is needed: then rejection is cheaper.

    Parameters
    ----------
    solver : Solver
        `AdjointMatching` (default), `NFT` for black boxes, `ExactTilt` for fixed samples, or a trainer of your own.
    rho, eta, tau, lambda_min, rho_max, penalty, contraction
        As of `AugmentedLagrangian`. Only ``penalty="expectation"`` aims at the problem's own optimum, and leaves a model alone whose unconstrained optimum meets
        the bound; ``"per_sample"`` is the paper's.
    slack : float
        A bound counts as met while G lies at most so many standard errors above 0. At the optimum G is 0, and half of all estimates lie above: negative values
        ask for a margin.
    reward_tolerance : float, optional
        Stop once, for `patience` rounds in a row, no G was further than 2 standard errors from 0 (or lay below it with lambda = 0), and the mean reward moved by less than
        this. None runs all rounds.
    patience : int
    keep : {"all", "best"}
        Whether the networks of all rounds are kept (on the CPU), or the last and the best feasible one.
    kl_samples : int
        Trajectories from which KL is estimated after each round; 0 for none.

    References
    ----------
    Gutjahr, De Santi, Schaufelberger, Jorner and Krause, 2026, arXiv:2605.30610, Alg. 1.

    Examples
    --------
    >>> import torch
    >>> from cameraready.flows.cfo import ExactTilt
    >>> x = torch.linspace(-6, 6, 2001, dtype=torch.float64)
    >>> cfo = ConstrainedFlowOptimizer(ExactTilt(), penalty="expectation")
    >>> found = cfo.fit((x, -0.5 * x**2), reward=lambda x: x, constraint=lambda x: x, bound=0.5, kl=1.0, rounds=60, generator=torch.Generator())
    >>> found.status, round(found.history[-1].gap[0], 6), round(found.lagrangian.multiplier.item(), 4)
    ('feasible', 0.0, -0.5)
    """

    def __init__(
        self,
        solver: Solver | None = None,
        *,
        rho: float | Sequence[float] = 0.5,
        eta: float = 1.25,
        tau: float = 0.99,
        lambda_min: float = -10.0,
        rho_max: float = 1e4,
        penalty: Penalty = "per_sample",
        contraction: Contraction = "paper",
        slack: float = 2.0,
        reward_tolerance: float | None = None,
        patience: int = 3,
        keep: str = "all",
        kl_samples: int = 512,
    ) -> None:
        self.solver = AdjointMatching() if solver is None else solver
        if not isinstance(self.solver, Solver):
            raise TypeError(
                f"a solver has open, copy, solve, draw and divergence (derive from FlowSolver and write solve); {type(self.solver).__name__} lacks some"
            )
        if keep not in ("all", "best"):
            raise ValueError(f"keep must be 'all' or 'best', got {keep!r}")
        if patience < 1 or kl_samples < 0:
            raise ValueError(f"patience must be at least 1 and kl_samples at least 0, got {patience} and {kl_samples}")
        if reward_tolerance is not None and not reward_tolerance >= 0:
            raise ValueError(f"reward_tolerance must be at least 0 or None, got {reward_tolerance!r}")
        if not math.isfinite(slack):
            raise ValueError(f"slack must be a finite number of standard errors, got {slack!r}")
        self.multipliers: dict[str, Any] = {
            "rho": rho,
            "eta": eta,
            "tau": tau,
            "lambda_min": lambda_min,
            "rho_max": rho_max,
            "penalty": penalty,
            "contraction": contraction,
        }
        self.slack, self.reward_tolerance, self.patience = float(slack), reward_tolerance, patience
        self.keep, self.kl_samples = keep, kl_samples

    def fit(
        self,
        model: Any,
        *,
        reward: Score | None = None,
        constraint: Score | Sequence[Score],
        bound: float | Sequence[float],
        kl: float,
        shape: tuple[int, ...] | None = None,
        rounds: int = 20,
        inner_steps: int = 300,
        n_mc: int = 4096,
        generator: torch.Generator | None = None,
        checkpoint: str | FilePath | None = None,
        progress: bool | Progress = True,
    ) -> CFOResult:
        """Run the rounds. The model given is not changed.

        Parameters
        ----------
        model : Module
            v(x, t) of the room's convention (t = 0 noise, 1 data), or what `velocity_of`, `from_torchcfm`, `from_flow_matching` or `from_diffusers` made of
            another. Trained are its parameters that require gradients (freeze the others, or add adapters, before). Half precision is trained in float32 and given back as it was.
            With `ExactTilt`, samples (N, ...) or (points, log_prior).
        reward : callable, optional
            Samples (B, *shape) to (B,). NaN and infinite values are masked and counted. A module is asked in evaluation mode.
        constraint : callable, or one of each bound
            Samples to (B,), or to (B, m).
        bound : float or sequence of float
            B.
        kl : float
            alpha, above 0, in units of the reward a nat.
        shape : tuple of int
            Of one sample: (2,), (1, 8, 8). Not for `ExactTilt`.
        rounds, inner_steps : int
            K and N. Few long rounds leave lambda too little time, many short ones leave the network behind lambda.
        n_mc : int
            Fresh samples a round, from which E[c] is estimated: the standard error std(c) / sqrt(n_mc) should lie well below the gap that matters.
        generator : torch.Generator, optional
            Of all that is drawn; by default a new one with seed 0, on the CPU.
        checkpoint : path, optional
            A folder; without one an interruption loses all rounds. After each round the network, multipliers and generator are written to it; a run that finds
            one goes on after its last round, to the same bits as without the interruption (on the same machine), with the generator as it was then, whatever
            the one given. One that has as many rounds or more comes back as it is. Model, settings, and what reward and constraint say of a few states must be the same (functions that answer at random are not compared).
        progress : bool or callable
            True: one line a round on stderr if that is a terminal. A callable gets each line.

        Returns
        -------
        CFOResult

        Raises
        ------
        ValueError, TypeError
            A sentence that says which argument is wrong; a reward without gradient for a solver that needs one; a checkpoint of another run.
        FloatingPointError
            Velocities, losses, or all rewards of a batch are not finite.
        KeyboardInterrupt
            On Ctrl-C, with a note that says after which round, and how to go on from `checkpoint`, which holds that round. The model given is as it was.
        """
        if isinstance(kl, bool) or not isinstance(kl, numbers.Real) or not (math.isfinite(kl) and kl > 0):
            raise ValueError(f"kl must be above 0 (without a KL term the optimum is a point mass), got {kl!r}")
        for name, number in (("rounds", rounds), ("inner_steps", inner_steps), ("n_mc", n_mc)):
            least = 2 if name == "n_mc" else 1
            if isinstance(number, bool) or not isinstance(number, int) or number < least:
                raise ValueError(f"{name} must be a whole number, at least {least}, got {number!r}")
        lagrangian = AugmentedLagrangian(reward, constraint, bound, **self.multipliers)
        base = self.solver.open(model, shape)
        policy = self.solver.copy(base)
        drawn = torch.Generator().manual_seed(0) if generator is None else generator
        say = _teller(progress)
        settings = {"solver": repr(self.solver), "kl": float(kl), "inner_steps": inner_steps, "n_mc": n_mc}
        if checkpoint is not None:
            settings |= {"model": digest(base.state_dict()), "shape": None if shape is None else list(shape)}
            settings |= {"scores": _probed(lagrangian, self.solver, base)}
        settings |= {"kl_samples": self.kl_samples, "slack": self.slack, "bound": lagrangian.bound.tolist()}
        settings |= {
            key: v if isinstance(v, str) else torch.as_tensor(v).tolist() for key, v in self.multipliers.items()
        }
        saved = None if checkpoint is None else Checkpoint(FilePath(checkpoint), settings)
        states: dict[int, dict[str, Tensor]] = {}
        history: list[Round] = []
        if saved is not None and saved.exists():
            loaded = saved.load()
            pretrained, *history = [Round(**each) for each in loaded["rounds"]]
            states = {number: saved.network(number) for number in loaded["networks"]}
            lagrangian.load_state_dict(loaded["lagrangian"])
            drawn.set_state(loaded["generator"])
            if history:
                policy.load_state_dict(states[history[-1].round])
            there = f"after round {len(history)} of {checkpoint}"
            say(
                f"went on {there}"
                if len(history) < rounds
                else f"as it was {there}: {rounds} rounds asked for, none left to run"
            )
        else:
            x, weights = self.solver.draw(base, n_mc, drawn)
            pretrained = round_of(0, scored(lagrangian, x), weights, lagrangian.bound, self.slack)
            states[0] = base.state_dict()
            say(str(pretrained))
        stopped = "all rounds"
        kept = len(history)
        try:
            while len(history) < rounds:
                if self._converged([pretrained, *history]):
                    stopped = "converged"
                    break
                told = self.solver.solve(policy, base, lagrangian, kl=float(kl), steps=inner_steps, generator=drawn)
                x, weights = self.solver.draw(policy, n_mc, drawn)
                scores = scored(lagrangian, x)
                update = lagrangian.update(scores.constraint, weights=weights, valid=scores.valid)
                divergence = self.solver.divergence(policy, base, self.kl_samples, drawn)
                history.append(
                    round_of(
                        update.round,
                        scores,
                        weights,
                        lagrangian.bound,
                        self.slack,
                        divergence=divergence,
                        update=update,
                        told=told,
                    )
                )
                states[update.round] = policy.state_dict()
                best = self._best(history, kl)
                if self.keep == "best":
                    wanted = {0, update.round} | ({best.round} if best else set())
                    states = {number: state for number, state in states.items() if number in wanted}
                if saved is not None:
                    saved.save(
                        [asdict(each) for each in (pretrained, *history)], states, lagrangian.state_dict(), drawn
                    )
                    kept = len(history)
                say(str(history[-1]))
        except KeyboardInterrupt as interruption:
            interruption.add_note(_interrupted(kept if saved is not None else len(history), rounds, checkpoint))
            raise
        restore = _restorer(self.solver, base, model)
        return CFOResult(
            model=restore(states[history[-1].round]),
            status=status_of(history[-1]),
            stopped=stopped,
            history=history,
            pretrained=pretrained,
            best_feasible=self._best(history, kl),
            lagrangian=lagrangian,
            slack=self.slack,
            _states=states,
            _restore=restore,
        )

    # --- decisions -----------------------------------------------------------------------------------------------------

    def _converged(self, rounds: list[Round]) -> bool:
        if self.reward_tolerance is None or len(rounds) <= self.patience + 1:
            return False
        last = rounds[-self.patience :]
        before = rounds[-self.patience - 1 : -1]
        still = all(abs(a.reward - b.reward) < self.reward_tolerance for a, b in zip(last, before, strict=True))
        return still and all(settled(each) for each in last)

    @staticmethod
    def _best(history: list[Round], kl: float) -> Round | None:
        def worth(each: Round) -> float:
            return each.reward - (kl * each.divergence if math.isfinite(each.divergence) else 0.0)

        return max((each for each in history if each.feasible), key=worth, default=None)


def _restorer(solver: Solver, base: Policy, model: Any) -> Callable[[dict[str, Tensor]], Any]:
    """From kept parameters to a network of the class, dtype and mode of the user's."""

    def restore(state: dict[str, Tensor]) -> Any:
        policy = solver.copy(base)
        policy.load_state_dict(state)
        found = policy.module
        if isinstance(found, nn.Module):
            inner = model.model if isinstance(model, Velocity) else model
            found.train(inner.training)
            for mine, its in zip(found.parameters(), inner.parameters(), strict=True):
                mine.data = mine.data.to(its.dtype)
                mine.requires_grad_(its.requires_grad)
            for mine, its in zip(found.buffers(), inner.buffers(), strict=True):
                mine.data = mine.data.to(its.dtype)
        return found

    return restore


def _probed(lagrangian: AugmentedLagrangian, solver: Solver, base: Policy) -> list[list[float]] | None:
    """Rewards and constraints of a few samples of the base, by which functions are told from others; None where they answer at random."""
    x, _ = solver.draw(base, 8, torch.Generator().manual_seed(0))
    found = []
    for _ in range(2):
        scores = scored(lagrangian, x[:8])
        found.append([scores.reward.tolist(), *scores.constraint.T.tolist()])
    return found[0] if found[0] == found[1] else None


def _interrupted(done: int, rounds: int, checkpoint: str | FilePath | None) -> str:
    """What Ctrl-C leaves, in a sentence."""
    if checkpoint is None:
        return f"fit was interrupted after round {done} of {rounds}; nothing is kept, since it had no checkpoint: give checkpoint=FOLDER, and it can go on"
    if not done:
        return f"fit was interrupted before round 1 of {rounds} was done; nothing is kept in {checkpoint} yet, and it begins anew"
    return f"fit was interrupted after round {done} of {rounds}, which {checkpoint} holds; call fit again with the same arguments to go on"


def _teller(progress: bool | Progress) -> Progress:
    if callable(progress):
        return progress
    shown = bool(progress) and sys.stderr.isatty()
    return lambda line: print(line, file=sys.stderr, flush=True) if shown else None
