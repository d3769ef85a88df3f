"""diffusers' schedulers on exactly a given grid: no shift put on twice, no rounded timestep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cameraready.flows._paths import check_finite
from cameraready.flows._samplers.asking import Counted, Sampled, grid_of
from cameraready.flows._samplers.fixed import SCHEDULERS


def scheduler_sample(
    velocity: Callable[..., Tensor],
    x: Tensor,
    scheduler: Any = "euler",
    *,
    times: Tensor | Sequence[float],
    y: Tensor | None = None,
    first_noise: float | None = None,
) -> Sampled:
    """Sample by one of diffusers' schedulers on exactly this grid: the competitors that its users have.

    Parameters
    ----------
    velocity, x, y
        As for `sample`, on the linear path (the one these schedulers assume).
    scheduler : {"euler", "heun", "dpm++2m", "unipc"}, or a diffusers scheduler
        One of diffusers is copied with its shift, dynamic shifting and spacing put aside: a grid that already is shifted would otherwise be shifted
        twice (diffusers issue 13243), and whole-numbered timesteps would not match it (issue 14013). Its other options stay.
    times : (steps + 1,)
        Rising, ending at 1: these schedulers append the noise level 0.
    first_noise : float, optional
        The multistep schedulers work with ``log((1 - s) / s)``, which pure noise ``s = 1`` makes infinite; their own grids therefore begin a little below.
        By default the first level is at most ``1 - 1e-6``, as in `UniPCMultistepScheduler`.

    Returns
    -------
    Sampled
        Computed in float32, as the schedulers do, and returned in the dtype of `x`. Heun's costs ``2 steps - 1`` evaluations, the others `steps`.

    Raises
    ------
    ValueError
        A grid that does not end at 1; a scheduler that is not for flows, or that draws random numbers.
    FloatingPointError
        A velocity that is not finite, or a scheduler that cannot take the last step to noise level 0 (DEIS).
    """
    times = grid_of(None, times)
    if times[-1] < times[0] or times[-1] != 1:
        raise ValueError(f"diffusers' schedulers end at t = 1; the grid runs from {times[0]:g} to {times[-1]:g}")
    stepper = _prepared(scheduler, 1 - times, first_noise)
    asked = Counted(velocity, x, y)
    levels = [float(t) for t in times[:-1]]
    if stepper.order == 2:  # Heun: every level but the first is visited twice
        levels = levels[:1] + [t for t in levels[1:] for _ in range(2)]
    with torch.no_grad():
        state = x.to(torch.float32)
        for timestep, t in zip(stepper.timesteps, levels, strict=True):
            v = -asked(state, t).to(torch.float32)  # theirs points from data to noise
            state = _stepped(stepper, v, timestep, state)
    check_finite(state, 1.0, f"the state of {type(stepper).__name__}")
    return Sampled(state.to(x.dtype), asked.calls, times)


def _stepped(stepper: Any, v: Tensor, timestep: Tensor, state: Tensor) -> Tensor:
    """One step; a ValueError where the scheduler drew from the global generator, which is then put back."""
    with torch.random.fork_rng([state.device] if state.is_cuda else []):
        before = _random_state(state)
        after = stepper.step(v, timestep, state, return_dict=False)[0]
        if not torch.equal(_random_state(state), before):
            raise ValueError(
                f"{type(stepper).__name__} draws random numbers, and a sampler of the flow itself was expected; make it without noise "
                "(no algorithm of name sde-...), or use euler_maruyama"
            )
    return after


def _random_state(state: Tensor) -> Tensor:
    return torch.cuda.get_rng_state(state.device) if state.is_cuda else torch.get_rng_state()


def _prepared(scheduler: Any, sigmas: Tensor, first_noise: float | None) -> Any:
    """A scheduler of diffusers whose noise levels are `sigmas`, the last 0, and nothing else."""
    import diffusers

    flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 1.0}
    made: dict[str, Callable[[], Any]] = {
        "euler": lambda: diffusers.FlowMatchEulerDiscreteScheduler(),
        "heun": lambda: diffusers.FlowMatchHeunDiscreteScheduler(),
        "dpm++2m": lambda: diffusers.DPMSolverMultistepScheduler(**flow),
        "unipc": lambda: diffusers.UniPCMultistepScheduler(**flow),
    }
    if isinstance(scheduler, str):
        if scheduler not in made:
            raise ValueError(
                f"there is no scheduler {scheduler!r}; choose one of {', '.join(SCHEDULERS)} or give one of diffusers"
            )
        stepper = made[scheduler]()
    else:
        stepper = _unshifted(scheduler)
    count = len(sigmas) - 1
    levels = sigmas.to(torch.float32)
    multistep = hasattr(stepper.config, "solver_order")
    if multistep:
        levels = levels.clone()
        levels[0] = min(float(levels[0]), 1 - 1e-6 if first_noise is None else first_noise)
        if levels[0] <= levels[1]:
            raise ValueError(
                f"the first noise level is taken as {float(levels[0]):g}, which is not above the second, {float(levels[1]):g}; give a larger first_noise"
            )
    stepper.set_timesteps(count)
    timesteps = levels[:-1] * stepper.config.num_train_timesteps
    if stepper.order == 2:
        levels = torch.cat([levels[:1], levels[1:-1].repeat_interleave(2), levels[-1:]])
        timesteps = torch.cat([timesteps[:1], timesteps[1:].repeat_interleave(2)])
    # The levels are put in place directly: `set_timesteps(sigmas=...)` shifts what it is given, and not every scheduler has it.
    stepper.sigmas, stepper.timesteps = levels, timesteps
    stepper.set_begin_index(0)
    return stepper


def _unshifted(scheduler: Any) -> Any:
    """A fresh copy of a flow scheduler, deterministic and with the linear path; ValueError for another."""
    config = getattr(scheduler, "config", None)
    if config is None or not hasattr(scheduler, "set_timesteps") or not hasattr(scheduler, "set_begin_index"):
        raise ValueError(f"expected one of diffusers' flow schedulers, got {type(scheduler).__name__}")
    if "prediction_type" in config and not (
        config.get("use_flow_sigmas") and config["prediction_type"] == "flow_prediction"
    ):
        raise ValueError(
            f"{type(scheduler).__name__} is set for {config['prediction_type']}; for a velocity make it with "
            "prediction_type='flow_prediction' and use_flow_sigmas=True"
        )
    if config.get("stochastic_sampling") or config.get("invert_sigmas"):
        raise ValueError("stochastic_sampling and invert_sigmas are not supported; make the scheduler without them")
    neutral = {
        "shift": 1.0,
        "flow_shift": 1.0,
        "use_dynamic_shifting": False,
        "shift_terminal": None,
        "final_sigmas_type": "zero",
    }
    neutral |= dict.fromkeys(
        ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "use_lu_lambdas"), False
    )
    return type(scheduler).from_config(config, **{name: value for name, value in neutral.items() if name in config})
