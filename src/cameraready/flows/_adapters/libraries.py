"""Models as torchcfm, flow_matching and diffusers call them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cameraready.flows._adapters.velocity import Reading, Velocity, velocity_of
from cameraready.flows._paths import LINEAR, DiscretePath, Kind, Path, time_like


def from_torchcfm(model: nn.Module, *, path: Path = LINEAR) -> Velocity:
    """A model of torchcfm's convention: 0 is noise, called as ``model(t, x, y)``, or (its small networks) with ``t`` as last column of ``x``.

    Its conditional flow matchers with ``sigma = 0`` have the linear path, its variance-preserving one `cameraready.flows.CosinePath`.
    A network wrapped for torchdyn (``torch_wrapper``) is unwrapped, since the wrapper takes no batch of times.
    """
    inner = getattr(model, "model", None)
    wrapper = _parameters(model) == ("t", "x", "args", "kwargs")
    if wrapper and isinstance(inner, nn.Module) and len(_parameters(inner)) == 1:
        model = inner
    if len(_parameters(model)) > 1:
        return velocity_of(model, call="t,x", path=path)
    return Velocity(_with_time_column, model, Reading(path=path, model_path=path))


def from_flow_matching(model: Callable[..., Tensor], *, label: str = "y", path: Path = LINEAR) -> Velocity:
    """A ``ModelWrapper`` (or callable) of flow_matching: 0 is noise, called as ``model(x=x, t=t, **extras)``.

    Parameters
    ----------
    model : ModelWrapper or callable
    label : str
        The name of the extra that takes labels.
    path : Path
        Linear for its ``CondOTScheduler``, `cameraready.flows.CosinePath` for its ``CosineScheduler``.
    """

    return Velocity(_KeywordCall(label), model, Reading(path=path, model_path=path))


def from_diffusers(
    model: nn.Module,
    scheduler: Any,
    *,
    time_scale: float | None = None,
    path: Path = LINEAR,
    eps: float | None = None,
    **call_kwargs: Any,
) -> Velocity:
    """A transformer or UNet of diffusers, read as its scheduler reads it.

    Parameters
    ----------
    model : module
        Its states come first, its time is called ``timestep``; labels go to ``class_labels`` where it has that.
    scheduler : diffusers scheduler
        A flow scheduler (``FlowMatchEulerDiscreteScheduler`` and those made with ``flow_prediction``): velocity from data to noise on the linear path. One with
        ``alphas_cumprod``: predictions ``epsilon``, ``sample`` or ``v_prediction`` on its own variance-preserving path, between whose timesteps it is
        made continuous. Only the path is read: shifts and spacings belong to the grid of times, which the sampler is given.
    time_scale : float, optional
        What the noise level is multiplied by for the model: the scheduler's ``num_train_timesteps``, or 1 for models of Flux's kind (with ids of image positions),
        which multiply themselves.
    path : Path
        On which the velocity is wanted; linear by default, on which Euler's method is exactly DDIM.
    eps : float, optional
        As in `velocity_of`.
    **call_kwargs
        Whatever else the model takes in every call: ``encoder_hidden_states``, ``pooled_projections``, ``img_ids``, ``guidance``, with this batch size.

    Raises
    ------
    ValueError
        A scheduler whose path cannot be told, a prediction type that is not known.
    """
    config = getattr(scheduler, "config", None)
    if config is None:
        raise ValueError(f"expected one of diffusers' schedulers, got {type(scheduler).__name__}")
    accepted = _parameters(model)
    levels = config.get("num_train_timesteps", 1000)
    prediction = config.get("prediction_type", "flow_prediction")
    discrete = getattr(scheduler, "alphas_cumprod", None)
    kinds: dict[str, Kind] = {"epsilon": "noise", "sample": "x1", "v_prediction": "x1", "flow_prediction": "velocity"}
    flow = _is_flow(scheduler)
    if prediction not in kinds or (prediction == "flow_prediction") != flow or (discrete is None and not flow):
        raise ValueError(
            f"{type(scheduler).__name__} with prediction_type={prediction!r} is not known; give a flow scheduler, or one with alphas_cumprod "
            "that predicts epsilon, sample or v_prediction, or describe the model to velocity_of"
        )
    if config.get("invert_sigmas"):
        raise ValueError("schedulers with invert_sigmas are not read; describe the model to velocity_of")
    model_path: Path = LINEAR if prediction == "flow_prediction" else DiscretePath.of(discrete)
    if time_scale is None:
        itself = any(name in accepted for name in ("img_ids", "img_shapes"))
        if isinstance(model_path, DiscretePath):
            time_scale = len(model_path.angles) - 1  # of trained_betas there may be fewer than num_train_timesteps
        else:
            time_scale = 1.0 if itself else levels
    call = _DiffusersCall(
        call_kwargs,
        takes_labels="class_labels" in accepted,
        learnt_variance=str(config.get("variance_type", "")).startswith("learned"),
        v_path=model_path if prediction == "v_prediction" else None,
        time_scale=float(time_scale),
    )
    reading = Reading(kinds[prediction], "data_to_noise", path, model_path, float(time_scale), torch.float32, eps)
    return Velocity(call, model, reading)


@dataclass(frozen=True)
class _KeywordCall:
    """As flow_matching's solvers call a model."""

    label: str

    def __call__(self, model: Callable[..., Tensor], x: Tensor, t: Tensor, y: Tensor | None) -> Tensor:
        return model(x=x, t=t) if y is None else model(x=x, t=t, **{self.label: y})


@dataclass(frozen=True)
class _DiffusersCall:
    """As diffusers' pipelines call a model; of predictions of v, on `v_path`, the clean data are returned."""

    extra: dict[str, Any]
    takes_labels: bool
    learnt_variance: bool
    v_path: Path | None
    time_scale: float

    def __call__(self, model: nn.Module, x: Tensor, t: Tensor, y: Tensor | None) -> Tensor:
        extra = dict(self.extra)
        if y is not None:
            if not self.takes_labels:
                raise ValueError(
                    f"{type(model).__name__} takes no class_labels; give what it is conditioned on when it is adapted"
                )
            extra["class_labels"] = y
        output = model(x, timestep=t, return_dict=False, **extra)[0]
        if self.learnt_variance and output.shape[1] == 2 * x.shape[1]:
            output = output.chunk(2, dim=1)[0]
        if self.v_path is not None:  # alpha noise - sigma x1 (Salimans and Ho, 2022, arXiv:2202.00512, Appendix D)
            at = time_like(1 - t / self.time_scale, x)
            output = (self.v_path.alpha(at) * x - self.v_path.sigma(at) * output).to(output.dtype)
        return output


def _with_time_column(model: nn.Module, x: Tensor, t: Tensor, y: Tensor | None) -> Tensor:
    if y is not None:
        raise ValueError("this network takes no labels: its only argument is the state with the time as last column")
    return model(torch.cat([x, t[:, None]], dim=1))


def _parameters(model: Any) -> tuple[str, ...]:
    """Names of the arguments of a model's call."""
    return tuple(inspect.signature(model.forward if isinstance(model, nn.Module) else model).parameters)


def _is_flow(scheduler: Any) -> bool:
    config = scheduler.config
    return bool(config.get("use_flow_sigmas")) or (not hasattr(scheduler, "alphas_cumprod") and "shift" in config)
