"""What an inner solver is, and what those that tune a velocity network share."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from cameraready.flows._adapters import Velocity, velocity_of
from cameraready.flows._paths import LINEAR, Path
from cameraready.flows._samplers import sample
from cameraready.flows._toy.stacked import clip_per_seed
from cameraready.flows.cfo.memoryless import MemorylessSteps, Scheme, memoryless_steps, normal, simulate
from cameraready.flows.cfo.objective import Objective


class Policy(Protocol):
    """A law that a solver tunes. `module` is what the user is given in the end."""

    @property
    def module(self) -> Any: ...

    def state_dict(self) -> dict[str, Tensor]: ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> Any: ...


@runtime_checkable
class Solver(Protocol):
    """What `ConstrainedFlowOptimizer` asks of an inner solver; a trainer of your own needs these five.

    Most derive from `FlowSolver`, which has all but `solve`. A solver keeps nothing between rounds that matters: what it draws comes from
    the generator, what it learns goes into the policy; so a run can be taken up at the beginning of any round.
    """

    def open(self, model: Any, shape: tuple[int, ...] | None) -> Policy:
        """The pretrained model, frozen; `shape` is that of one sample."""
        ...

    def copy(self, base: Any) -> Policy:
        """A policy equal to the base, to be tuned."""
        ...

    def solve(
        self,
        policy: Any,
        base: Any,
        objective: Objective,
        *,
        kl: float,
        steps: int,
        generator: torch.Generator,
        report: Callable[[int], None] | None = None,
    ) -> dict[str, float]:
        """Tune `policy` in place towards the maximum of E[f] - kl KL(policy || base), in `steps` iterations; returns numbers for the record.

        f is ``objective.reward(x)`` of samples, or ``objective.gradient(x)``. `kl` counts once: it is not in f. `report` is called with the number of iterations done.
        """
        ...

    def draw(self, policy: Any, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor | None]:
        """n fresh samples (n, *shape), and their probabilities where these are not equal."""
        ...

    def divergence(self, policy: Any, base: Any, n: int, generator: torch.Generator) -> float:
        """An estimate of KL(policy || base) in nats; NaN where there is none."""
        ...


class FlowPolicy:
    """A velocity network and the shape of its samples.

    Parameters
    ----------
    velocity : Module, called as v(x, t)
    shape : tuple of int
        Of one sample.
    runs : tuple of int
        Leading axes of the batch, for networks trained side by side (`StackedMLP`): states have shape (*runs, B, *shape).
    trained : frozenset of str, optional
        Names of the parameters that a copy tunes; by default those that require gradients.

    Attributes
    ----------
    evaluations : int
        Of the network so far, each on a batch at one time.
    together : bool
        Whether batches at several times are handed to the network in one call.
    """

    def __init__(
        self,
        velocity: nn.Module,
        shape: tuple[int, ...],
        runs: tuple[int, ...] = (),
        trained: frozenset[str] | None = None,
    ) -> None:
        self.velocity, self.shape, self.runs = velocity, tuple(shape), tuple(runs)
        names = frozenset(name for name, each in velocity.named_parameters() if each.requires_grad)
        self.trained = names if trained is None else trained
        self.together = True
        self.evaluations = 0

    @property
    def module(self) -> nn.Module:
        """The user's network inside."""
        return self.velocity.model if isinstance(self.velocity, Velocity) else self.velocity

    @property
    def dtype(self) -> torch.dtype:
        """Of states: the network's, float32 at least."""
        return torch.promote_types(next(self.velocity.parameters()).dtype, torch.float32)

    @property
    def device(self) -> torch.device:
        return next(self.velocity.parameters()).device

    def __call__(self, x: Tensor, t: float | Tensor) -> Tensor:
        self.evaluations += 1
        found = self.velocity(x, t)
        if not isinstance(self.velocity, Velocity) and not bool(torch.isfinite(found.detach()).all()):
            raise FloatingPointError(
                f"the velocity is not finite at t = {t if isinstance(t, float) else 'several times'}; look at the network"
            )
        return found

    def at_times(self, states: list[Tensor], times: list[float]) -> Tensor:
        """Velocities of several batches of states, each at its time, in one call; shape (*runs, len(times) * B, *shape)."""
        axis, n = len(self.runs), states[0].shape[len(self.runs)]
        if not self.together:
            return torch.cat([self(x, t) for x, t in zip(states, times, strict=True)], axis)
        when = torch.tensor(times, dtype=states[0].dtype, device=states[0].device).repeat_interleave(n)
        found = self(torch.cat(states, axis), when)
        self.evaluations += len(times) - 1
        return found

    def noise(self, n: int, generator: torch.Generator) -> Tensor:
        """Standard normal states (*runs, n, *shape)."""
        return normal((*self.runs, n, *self.shape), generator, torch.empty(0, dtype=self.dtype, device=self.device))

    def parameters(self) -> list[nn.Parameter]:
        """Those that are trained."""
        return [each for each in self.velocity.parameters() if each.requires_grad]

    def freeze(self) -> FlowPolicy:
        """No gradients, evaluation mode; `trained` remembers what they were for. Returns itself."""
        self.velocity.eval().requires_grad_(False)
        return self

    def copy(self) -> FlowPolicy:
        """A copy in evaluation mode whose `trained` parameters require gradients."""
        made = FlowPolicy(copy.deepcopy(self.velocity).eval(), self.shape, self.runs, self.trained)
        made.together = self.together
        for name, each in made.velocity.named_parameters():
            each.requires_grad_(name in self.trained)
        return made

    def state_dict(self) -> dict[str, Tensor]:
        """The network's parameters and buffers, copied to the CPU."""
        return {key: value.detach().to("cpu", copy=True) for key, value in self.module.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over parameters and buffers."""
        self.module.load_state_dict(state)


@dataclass(frozen=True, kw_only=True)
class FlowSolver:
    """Base of solvers that tune a velocity network: everything but `solve`. Derive from it to plug in a trainer of your own.

    Parameters
    ----------
    lr : float
        Of Adam, which starts afresh in every round.
    batch : int
        Trajectories, or samples, of one iteration.
    steps : int, or increasing sequence from 0 to 1
        Of the memoryless trajectories.
    path : Path
        On which the network is the velocity.
    scheme : {"ancestral", "euler"}
        How trajectories are discretised; see `memoryless_steps`.
    clip_norm : float
        Largest norm of the parameters' gradient.
    sample_steps : int
        Of the sampler whose samples E[c] is estimated from: Euler's on the flow's ODE, as the tuned model will be used.
    sample_method : str
        Another of `cameraready.flows._samplers.sample`'s.
    micro_batch : int
        Most samples drawn at once.
    times_together : bool
        Whether a training step hands the network all its times in one call. False asks once for each time: less memory, and needed by networks that take one time
        for the whole batch.
    """

    lr: float = 1e-4
    batch: int = 256
    steps: int | tuple[float, ...] = 40
    path: Path = LINEAR
    scheme: Scheme = "ancestral"
    clip_norm: float = 1.0
    sample_steps: int = 50
    sample_method: Literal["euler", "midpoint", "heun", "rk4", "ab2"] = "euler"
    micro_batch: int = 4096
    times_together: bool = True

    _positive: ClassVar[tuple[str, ...]] = ("lr", "batch", "clip_norm", "sample_steps", "micro_batch")

    def __post_init__(self) -> None:
        for name in self._positive:
            value = getattr(self, name)
            if isinstance(value, bool) or not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be above 0, got {value!r}")
        self.grid()

    def grid(self) -> MemorylessSteps:
        """The memoryless chain of this solver."""
        return memoryless_steps(self.path, self.steps if isinstance(self.steps, int) else list(self.steps), self.scheme)

    # --- the protocol ---------------------------------------------------------------------------------------------------

    def open(self, model: Any, shape: tuple[int, ...] | None) -> FlowPolicy:
        """`model` (a module v(x, t), or what `velocity_of` made of one) as a frozen copy; half precision becomes float32."""
        if not isinstance(model, nn.Module) or (isinstance(model, Velocity) and not isinstance(model.model, nn.Module)):
            raise TypeError(
                f"the model must be a torch module whose parameters can be tuned, got {type(getattr(model, 'model', model)).__name__}; describe another convention with "
                "cameraready.flows.velocity_of(model, ...)"
            )
        if not any(each.requires_grad for each in model.parameters()):
            raise ValueError("no parameter of the model requires a gradient, so there is nothing to tune")
        if (
            not isinstance(shape, tuple | list)
            or not shape
            or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in shape)
        ):
            raise ValueError(f"shape must say that of one sample, such as (2,) or (1, 8, 8), got {shape!r}")
        velocity = copy.deepcopy(model if isinstance(model, Velocity) else velocity_of(model, path=self.path))
        if velocity.path != self.path:
            raise ValueError(
                f"the model's velocity is on {velocity.path}, and the solver is told {self.path}; give the solver path="
            )
        if any(each.dtype in (torch.float16, torch.bfloat16) for each in velocity.parameters()):
            velocity = velocity.float()
        policy = FlowPolicy(velocity, tuple(shape)).freeze()
        policy.together = self.times_together
        return policy

    def copy(self, base: FlowPolicy) -> FlowPolicy:
        """A copy of the base whose parameters are tuned where the user's required gradients; in evaluation mode throughout."""
        return base.copy()

    def solve(self, policy: Any, base: Any, objective: Objective, **keywords: Any) -> dict[str, float]:
        raise NotImplementedError(
            f"{type(self).__name__} must define solve(policy, base, objective, *, kl, steps, generator, report)"
        )

    @torch.no_grad()
    def draw(self, policy: FlowPolicy, n: int, generator: torch.Generator) -> tuple[Tensor, None]:
        """Samples of the flow's ODE, drawn in pieces of at most `micro_batch`."""
        noise = policy.noise(n, generator)
        parts = noise.split(self.micro_batch, len(policy.runs))
        made = [sample(policy, part, steps=self.sample_steps, method=self.sample_method).x for part in parts]
        return torch.cat(made, len(policy.runs)), None

    def divergence(self, policy: FlowPolicy, base: FlowPolicy, n: int, generator: torch.Generator) -> Any:
        """KL(policy || base) of the memoryless trajectories, which is that of their ends: E of squared controls over two. One number a run."""
        if n < 1:
            return math.nan
        noise = policy.noise(n, generator)
        made = simulate(policy, noise, self.grid(), generator, base=base, events=len(policy.shape))
        assert made.energy is not None
        return float(made.energy.mean()) if not policy.runs else made.energy.mean(-1)

    # --- for solvers ----------------------------------------------------------------------------------------------------

    def optimizer(self, policy: FlowPolicy) -> torch.optim.Optimizer:
        return torch.optim.Adam(policy.parameters(), lr=self.lr)

    def step(self, loss: Tensor, optimizer: torch.optim.Optimizer, policy: FlowPolicy, done: int) -> None:
        """One clipped step of the optimizer; of runs side by side each is clipped by its own norm."""
        if not bool(torch.isfinite(loss.detach())):
            raise FloatingPointError(
                f"the loss is not finite in iteration {done + 1}; take a smaller lr, or look at the rewards' gradients"
            )
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if policy.runs:
            clip_per_seed(policy.parameters(), self.clip_norm)
        else:
            nn.utils.clip_grad_norm_(policy.parameters(), self.clip_norm)
        optimizer.step()
