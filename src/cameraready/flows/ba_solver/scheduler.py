"""The bi-anchor solver in the place of a diffusers pipeline's flow-matching scheduler.

References
----------
Chen, Li, Wang and Chen, 2026, arXiv:2601.21542.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.configuration_utils import register_to_config
from diffusers.schedulers.scheduling_utils import SchedulerMixin, SchedulerOutput
from torch import Tensor, nn

from cameraready.flows._paths import check_finite
from cameraready.flows.ba_solver.quadrature import BAConfig
from cameraready.flows.ba_solver.sidenet import _Side
from cameraready.flows.ba_solver.stepping import Half, Reading, Side, Stepper
from cameraready.flows.ba_solver.storing import WithSide
from cameraready.flows.ba_solver.watching import Recorder, reading_of

#: Pipelines look in a component's own module for the base class that says how to load it.
__all__ = ["BAScheduler", "SchedulerMixin"]

#: What pipelines call the network that gives the velocity.
NETWORKS = ("transformer", "transformer_2", "unet")


class BAScheduler(WithSide, FlowMatchEulerDiscreteScheduler):
    """A diffusers scheduler that takes bi-anchor steps: as many network evaluations as steps, no other change to the pipeline.

    It is a `FlowMatchEulerDiscreteScheduler` in everything but `step`: the same grids (shift, dynamic shifting, custom sigmas), timesteps, `scale_noise`, begin index.
    What `step` returns is the point at which the network is to be asked next, after the last step the image.
    It gives exactly what `ba_sample` gives on the same grid.

    A scheduler sees velocities only after guidance combined them, and a SideNet must see them before. So it has to watch the network
    (`attach` does, or `watch`): a forward hook keeps what each call returns, and the pipeline's guidance is found from it, whether the halves come in one
    call or in several. Without watching, a scheduler with a SideNet refuses to step, unless ``unguided=True`` says that there is no guidance. Where
    something between two steps changes the latents (inpainting, a callback), the solver starts anew from them.

    Parameters
    ----------
    num_train_timesteps, shift, use_dynamic_shifting, base_shift, max_shift, base_image_seq_len, max_image_seq_len, invert_sigmas, shift_terminal, use_karras_sigmas, use_exponential_sigmas, use_beta_sigmas, time_shift_type
        As of `diffusers.FlowMatchEulerDiscreteScheduler`; `from_config` takes them from the scheduler it replaces.
    stochastic_sampling : bool
        Must be False.
    nodes, anchors, gauss_nodes, probe_chunk
        As of `BAConfig`.
    unguided : bool
        Whether every velocity that reaches `step` is the network's own.
    sidenet : dict, optional
        Settings of the SideNet, in the saved configuration; give `side` instead.
    side : SideNet, MLPSideNet, callable or None
        The trained network; None is two-step Adams-Bashforth (on a uniform grid), and needs no watching. `save_pretrained` writes it
        beside the configuration as safetensors, `from_pretrained` reads it from there; so do a pipeline's, where this class was imported
        before. A loaded scheduler has to watch its network again.

    Raises
    ------
    ValueError
        Stochastic sampling, or a setting that `BAConfig` refuses.
    """

    ignore_for_config = ["side"]  # noqa: RUF012 (diffusers' name and type)

    @register_to_config
    def __init__(
        self,
        num_train_timesteps: int = 1000,
        shift: float = 1.0,
        use_dynamic_shifting: bool = False,
        base_shift: float | None = 0.5,
        max_shift: float | None = 1.15,
        base_image_seq_len: int = 256,
        max_image_seq_len: int = 4096,
        invert_sigmas: bool = False,
        shift_terminal: float | None = None,
        use_karras_sigmas: bool = False,
        use_exponential_sigmas: bool = False,
        use_beta_sigmas: bool = False,
        time_shift_type: Literal["exponential", "linear"] = "exponential",
        stochastic_sampling: bool = False,
        nodes: str | float = "lobatto",
        anchors: Literal["both", "single"] = "both",
        gauss_nodes: int = 2,
        probe_chunk: int = 0,
        unguided: bool = False,
        sidenet: dict[str, Any] | None = None,
        side: Side | None = None,
    ) -> None:
        if stochastic_sampling:
            raise ValueError(
                "stochastic_sampling=True draws noise in each step; the bi-anchor solver integrates the flow"
            )
        self._settings = BAConfig(nodes=nodes, anchors=anchors, gauss_nodes=gauss_nodes, probe_chunk=probe_chunk)  # type: ignore[arg-type]
        self._recorder = Recorder()
        self._networks: list[str] = []
        self._side: Side | None = None
        self._begin: int | None = None
        self._first = 0
        self._stepper: Stepper | None = None
        self._point: Tensor | None = None
        self._handed: Tensor | None = None
        super().__init__(
            num_train_timesteps=num_train_timesteps,
            shift=shift,
            use_dynamic_shifting=use_dynamic_shifting,
            base_shift=base_shift,
            max_shift=max_shift,
            base_image_seq_len=base_image_seq_len,
            max_image_seq_len=max_image_seq_len,
            invert_sigmas=invert_sigmas,
            shift_terminal=shift_terminal,  # type: ignore[arg-type]
            use_karras_sigmas=use_karras_sigmas,
            use_exponential_sigmas=use_exponential_sigmas,
            use_beta_sigmas=use_beta_sigmas,
            time_shift_type=time_shift_type,
            stochastic_sampling=stochastic_sampling,
        )
        if side is not None:
            self.side = side

    @classmethod
    def attach(cls, pipe: Any, side: Side | None, *, labels: str | int | None = None, **settings: Any) -> BAScheduler:
        """Put the solver into a pipeline: made from its scheduler's configuration, watching its network.

        Parameters
        ----------
        pipe : diffusers pipeline
            With a flow-matching scheduler, and a `transformer` or `unet`.
        side : SideNet, MLPSideNet, callable or None
        labels : str or int, optional
            As of `watch`.
        **settings
            Any parameter of `BAScheduler`, instead of what the configuration has.

        Returns
        -------
        BAScheduler
            Now ``pipe.scheduler``.

        Raises
        ------
        ValueError
            The pipeline has no network by these names, or another kind of scheduler.
        """
        found = {name: getattr(pipe, name, None) for name in NETWORKS}
        networks = {name: network for name, network in found.items() if isinstance(network, nn.Module)}
        if not networks:
            raise ValueError(
                f"{type(pipe).__name__} has neither transformer nor unet; make the scheduler with from_config(pipe.scheduler.config, side=side) and watch its network"
            )
        before = pipe.scheduler
        scheduler = cls.from_config(before.config, side=side, **settings)
        scheduler._networks = list(networks)
        if isinstance(before, BAScheduler):
            before.unwatch()
        for network in networks.values():
            scheduler.watch(network, labels)
        pipe.scheduler = scheduler
        return scheduler

    def watch(self, network: nn.Module, labels: str | int | None = None) -> None:
        """Record what `network` returns while sampling, so that guidance can be told from it. Keeps one step's answers.

        Parameters
        ----------
        network : nn.Module
        labels : str or int, optional
            Name or place of the argument by which the pipeline hands class labels to the network; a SideNet with classes needs them.

        Raises
        ------
        ValueError
            The SideNet has classes and no argument is named.
        """
        if labels is None:
            self._refuse_classes()
        self._recorder.watch(network, labels)

    def _refuse_classes(self) -> None:
        if self._has_classes:
            raise ValueError(
                "this SideNet was trained with classes, and a scheduler does not see labels: name the argument by which the network gets them, "
                f"as in {self._ways}, or train a SideNet with classes=0"
            )

    @property
    def _has_classes(self) -> bool:
        return isinstance(self._side, _Side) and bool(self._side.settings.get("classes"))

    @property
    def _ways(self) -> str:
        """The calls by which this scheduler gets to see its network, with labels where its SideNet has classes."""
        labels = ", labels='class_labels'" if self._has_classes else ""
        watched = [f"scheduler.watch(pipe.{name}{labels})" for name in self._networks or ("transformer", "unet")]
        joined = (" and " if self._networks else " or ").join(watched)
        told = "" if self._networks else ", whichever the pipeline has"
        return f"BAScheduler.attach(pipe, side{labels}) or {joined}{told}"

    def unwatch(self) -> None:
        """Take the hooks off again."""
        self._recorder.release()

    @property
    def step_index(self) -> int | None:
        """The step that comes next; None before the first and after the last."""
        return None if self._stepper is None else self._first + self._stepper.index

    @property
    def begin_index(self) -> int | None:
        """Where sampling begins on the grid, as pipelines that start from an image set it."""
        return self._begin

    def set_begin_index(self, begin_index: int = 0) -> None:
        """Begin at this index."""
        self._begin = begin_index

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: str | torch.device | None = None,
        sigmas: list[float] | None = None,
        mu: float | None = None,
        timesteps: list[float] | None = None,
    ) -> None:
        """As of diffusers; also forgets a run that was broken off.

        Without `sigmas` diffusers' grid ends on a step of 1/1000, for which the network is asked once: with few steps give
        ``sigmas=[1.0, ..., 1 / n]``, as its Flux pipelines do.
        """
        super().set_timesteps(num_inference_steps, device, sigmas, mu, timesteps)  # type: ignore[arg-type]
        self._begin = None
        self._reset()
        self._recorder.active = True

    def step(  # type: ignore[override]
        self,
        model_output: Tensor,
        timestep: float | Tensor,
        sample: Tensor,
        s_churn: float = 0.0,
        s_tmin: float = 0.0,
        s_tmax: float = float("inf"),
        s_noise: float = 1.0,
        generator: torch.Generator | None = None,
        per_token_timesteps: Tensor | None = None,
        return_dict: bool = True,
    ) -> SchedulerOutput | tuple[Tensor]:
        """From the network's answer at `sample` to the point where it is to be asked next.

        Parameters
        ----------
        model_output : (B, ...) tensor
            What the pipeline made of the network's velocity (from data to noise, diffusers' direction).
        timestep : float or 0-d tensor
            One of ``scheduler.timesteps``.
        sample : (B, ...) tensor
            Where the network was asked. What is not what the last step returned starts the solver anew.
        s_churn, s_tmin, s_tmax, s_noise, generator
            As of the scheduler that is replaced; nothing is drawn.
        per_token_timesteps
            Must be None.

        Returns
        -------
        SchedulerOutput or tuple
            The next point, after the last step the sample, in the dtype of `model_output`.

        Raises
        ------
        ValueError
            A whole-numbered timestep or one out of order, a SideNet without a watched network, a guidance that cannot be told apart, times for
            each token.
        FloatingPointError
            The velocity is not finite.
        """
        if isinstance(timestep, int) or (isinstance(timestep, Tensor) and not timestep.is_floating_point()):
            raise ValueError("pass one of scheduler.timesteps as the timestep, not its index")
        if per_token_timesteps is not None:
            raise ValueError(
                "per_token_timesteps give each token a time of its own; the bi-anchor solver has one for all"
            )
        if s_churn:
            raise ValueError("s_churn above 0 adds noise; the bi-anchor solver integrates the flow")
        if self._stepper is None:
            self._start(timestep)
        stepper = self._stepper
        assert stepper is not None
        if self._handed is not None and torch.equal(sample.to(self._handed.dtype), self._handed):
            assert self._point is not None
            point = self._point
        else:
            stepper.restart()
            point = sample.to(torch.promote_types(sample.dtype, torch.float32))
        self._check_timestep(float(timestep))
        t = stepper.times[stepper.index]
        point = stepper.advance(point, self._reading(model_output, point.dtype, t))
        check_finite(point, t)
        handed = point.to(model_output.dtype)
        if stepper.index == len(stepper.times) - 1:
            self._reset()
        else:
            self._point, self._handed = point, handed
        return SchedulerOutput(prev_sample=handed) if return_dict else (handed,)

    def _start(self, timestep: float | Tensor) -> None:
        if isinstance(timestep, Tensor):
            timestep = timestep.to(self.timesteps.device)
        self._first = self.index_for_timestep(timestep) if self._begin is None else self._begin
        levels = self.sigmas[self._first :].double().cpu()
        times = levels if self.config.invert_sigmas else 1.0 - levels
        self._stepper = Stepper(self._side, times.tolist(), self._settings)

    def _check_timestep(self, timestep: float) -> None:
        assert self.step_index is not None
        expected = float(self.timesteps[self.step_index])
        if abs(timestep - expected) > 4e-3 * expected + 1e-3:  # a pipeline in bfloat16 may have rounded it
            raise ValueError(
                f"step {self.step_index} of this grid is at timestep {expected:g}, got {timestep:g}; steps go in order"
            )

    def _reset(self) -> None:
        self._stepper = self._point = self._handed = None
        self._recorder.active = False
        self._recorder.clear()

    def _reading(self, model_output: Tensor, dtype: torch.dtype, t: float) -> Reading:
        """The answer in this package's direction, from noise to data, with the halves it was made of."""
        check_finite(model_output, t)
        sign = 1.0 if self.config.invert_sigmas else -1.0
        velocity = sign * model_output.to(dtype)
        answers = self._recorder.taken()
        if self._side is None:
            return Reading(velocity, (Half(velocity),))
        if self.config.unguided and not self._recorder.networks:
            self._refuse_classes()
            return Reading(velocity, (Half(velocity),))
        if not self._recorder.networks:
            raise ValueError(
                "a scheduler sees velocities only after guidance, and the SideNet must see them before: let it watch the network, by "
                f"{self._ways}; where the pipeline does not guide, make it with unguided=True"
            )
        return reading_of(model_output, answers, sign, dtype)
