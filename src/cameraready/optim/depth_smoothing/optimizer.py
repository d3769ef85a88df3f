"""`DepthSmoothing`: a wrapper around a torch optimizer that mixes the updates of neighbouring blocks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim

from cameraready.optim.depth_smoothing.blocks import Slot, Wanted, groups_from, slots
from cameraready.optim.depth_smoothing.kernels import (
    SIGN_CHANGING,
    Kernel,
    Normalize,
    check_alpha,
    check_kernel,
    check_normalize,
    runs,
    smooth_,
)
from cameraready.optim.depth_smoothing.stepping import HALF, Run, decay_of, is_known, only, portions, starts_from_zero

#: Key of our own part of a state dict.
OWN = "depth_smoothing"


class DepthSmoothing(optim.Optimizer):
    """Any optimizer, with the updates of repeated blocks smoothed over depth.

    The base optimizer says what it would add to each tensor; tensors that correspond in neighbouring blocks have these updates
    mixed, ``(1 - alpha) u_l + (alpha / 2) (u_(l-1) + u_(l+1))`` (a block with one neighbour keeps ``1 - alpha / 2`` of its own, one
    without neighbours keeps all of it), and the result is added. Everything else gets the plain step.

    When to use it: a network of repeated blocks (transformer, residual network) trained with SGD, AdamW or Muon, where
    a step may cost a little more. When not: few blocks, blocks that do different things at each depth, or a fine-tuned learning rate that nobody will
    tune again. Whether it helps depends on model and data; the method's study runs on yours.

    Parameters
    ----------
    base_optimizer : torch.optim.Optimizer
        Already built over the parameters. SGD, Adam, AdamW, NAdam, RAdam, RMSprop, Adagrad and Muon of torch are run a portion of
        tensors at a time, from zero, so that the extra memory is that of the largest smoothed tensor over all blocks (or 4 MiB), twice.
        Others, and subclasses with a step of their own, are run once, on a copy of all block tensors. LBFGS, and anything that needs its
        closure, is refused, and so is a base with step hooks, which would see stand-ins: register them on this object.
        Where Muon takes the matrices and AdamW the rest, wrap each.
    blocks : Module, ModuleList, list of Module, or list of those lists
        A model, which is searched (see `find_blocks`); the blocks in depth order; or several groups, such as encoder and decoder,
        which are not mixed with each other.
    alpha : float or callable
        Strength in [0, 1]; 0 is the base optimizer, bit for bit. A callable maps the number of steps taken, from 0, to a strength. The attribute
        ``alpha`` may be set at any time. Above 0.5 modes that alternate over depth are stepped uphill: a warning tells.
    kernel : str or callable
        See `smoothing_matrix`.
    normalize : {"rescale", "none", "normalize_before"}
        See `smooth_updates`. ``"none"`` makes updates of nearly orthogonal neighbours shorter by about
        ``sqrt((1 - alpha)**2 + alpha**2 / 2)``, which acts like a lower learning rate.
    params : {"all", "matrices"} or callable
        Which tensors of a block: all, those of two or more dimensions, or ``params(name, parameter) -> bool`` with the name inside the block.
    decouple_weight_decay : bool
        Keep the decoupled decay of AdamW and Muon (``-lr * weight_decay * tensor``, exactly) out of the mixing. An L2 penalty
        (SGD, Adam) is part of the gradient and is mixed with it.
    seed : int
        Of the order of ``kernel="shuffled"``.

    Attributes
    ----------
    base_optimizer : torch.optim.Optimizer
        Shares ``param_groups`` and ``state`` with this object.
    depths : dict of str to int
        How many blocks each list has, by its name. Look at it where a model was searched: parallel lists look like depth.
    slots : list of Slot
        The tensors that are mixed.

    Raises
    ------
    TypeError
        `base_optimizer` is no optimizer, `blocks` no modules, or (in ``step``) a tensor is a distributed or other subclass.
    ValueError
        No repeated tensors, none of them in the base optimizer, a bad option, a base that is smoothed already; in ``step``, 16-bit tensors whose
        update could only be had as a difference of rounded numbers (L2 penalty, or a base that is not in the list above), or step hooks on the base.

    Notes
    -----
    Absent tensors are no neighbours. Absent are those without a gradient, frozen, not in the base optimizer, or in a group with
    learning rate 0 (a tensor on an accelerator is not looked at); an average with a zero in their place, as in the authors' code, would shrink their neighbours' updates. Tensors
    of different shape, dtype, device or layout are not mixed. A tensor used at several depths is mixed once, at the first.

    Gradient clipping and unscaling come before ``step`` as always; a step that ``GradScaler`` skips is skipped here too. With ``closure``
    it is called once. 16-bit tensors are summed in float32 and rounded once.
    ``torch.compile`` may compile the model; this step runs uncompiled, and leaves a compiled training step by a graph break.
    Data-parallel training needs nothing; sharded parameters (FSDP, DTensor) are refused. ``torch.distributed.checkpoint`` keeps no more than
    ``state`` and ``param_groups``: there, keep `steps_taken` yourself if alpha follows a schedule.

    References
    ----------
    Meng, Sugolov and Papyan, 2026, arXiv:2606.30813 (window smoothing of updates), and the authors' public code.

    Examples
    --------
    >>> model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2), 3)
    >>> optimizer = DepthSmoothing(optim.AdamW(model.parameters(), lr=1e-3), model, alpha=0.2)
    >>> optimizer.depths
    {'layers': 3}
    """

    def __init__(
        self,
        base_optimizer: optim.Optimizer,
        blocks: nn.Module | Sequence[nn.Module] | Sequence[Sequence[nn.Module]],
        *,
        alpha: float | Callable[[int], float] = 0.2,
        kernel: Kernel = "window",
        normalize: Normalize = "rescale",
        params: Wanted = "all",
        decouple_weight_decay: bool = True,
        seed: int = 0,
    ) -> None:
        if not isinstance(base_optimizer, optim.Optimizer):
            raise TypeError(f"base_optimizer must be a torch optimizer, got {type(base_optimizer).__name__}")
        if isinstance(base_optimizer, DepthSmoothing):
            raise ValueError("the base optimizer is smoothed already; give DepthSmoothing the one inside it")
        if isinstance(base_optimizer, optim.LBFGS):
            raise ValueError("LBFGS evaluates its closure several times a step, which has no single update to smooth")
        check_kernel(kernel)
        check_normalize(normalize)
        if not callable(params) and params not in ("all", "matrices"):
            raise ValueError(
                f"params must be 'all', 'matrices' or a callable (name, parameter) -> bool, got {params!r}"
            )
        groups = groups_from(blocks)
        depths: dict[str, int] = {}
        for group in groups:
            depths[group.name] = depths.get(group.name, 0) + len(group.blocks)
        found = slots(groups, params)
        if not found:
            raise ValueError("no tensor of the blocks repeats in name and shape: there is nothing to smooth")
        held = {id(tensor) for group in base_optimizer.param_groups for tensor in group["params"]}
        if not any(id(tensor) in held for slot in found for tensor in slot.tensors):
            raise ValueError(
                "the base optimizer holds none of the blocks' tensors; build it over this model's parameters"
            )
        # What unpickling does. Optimizer.__init__ would register the parameters a second time.
        self.__setstate__(
            {
                "base_optimizer": base_optimizer,
                "depths": depths,
                "slots": found,
                "kernel": kernel,
                "normalize": normalize,
                "decouple_weight_decay": decouple_weight_decay,
                "seed": seed,
                "steps_taken": 0,
                "_alpha": alpha,
                "_warned": False,
            }
        )
        self.alpha = alpha

    # --- what it shares with the base ---------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.base_optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.base_optimizer.param_groups = groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.base_optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.base_optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.base_optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.base_optimizer.defaults = defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the base optimizer does; tensors of the blocks that it brings are smoothed from then on."""
        self.base_optimizer.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the base optimizer does."""
        self.base_optimizer.zero_grad(set_to_none)

    def register_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> Any:
        """On the base optimizer, whose ``state_dict`` is called."""
        return self.base_optimizer.register_state_dict_pre_hook(hook, prepend)

    def register_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> Any:
        """On the base optimizer, whose ``state_dict`` is called."""
        return self.base_optimizer.register_state_dict_post_hook(hook, prepend)

    def register_load_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> Any:
        """On the base optimizer, whose ``load_state_dict`` is called."""
        return self.base_optimizer.register_load_state_dict_pre_hook(hook, prepend)

    def register_load_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> Any:
        """On the base optimizer, whose ``load_state_dict`` is called."""
        return self.base_optimizer.register_load_state_dict_post_hook(hook, prepend)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "kernel":
            check_kernel(value)
        if name == "normalize":
            check_normalize(value)
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        left_out = ("step",)  # a scheduler's wrapper around this object's step
        return {key: value for key, value in self.__dict__.items() if key not in left_out}

    def __repr__(self) -> str:
        where = ", ".join(f"{name}: {depth}" for name, depth in self.depths.items())
        kernel = self.kernel if isinstance(self.kernel, str) else getattr(self.kernel, "__name__", repr(self.kernel))
        return (
            f"DepthSmoothing({kernel}, alpha={self.alpha}, normalize={self.normalize!r}, blocks=[{where}],"
            f" {len(self.slots)} tensors each)\n{self.base_optimizer!r}"
        )

    # --- strength -----------------------------------------------------------------------------------------------------

    @property
    def alpha(self) -> float | Callable[[int], float]:
        """Strength of the smoothing, or the schedule that gives it."""
        return self._alpha

    @alpha.setter
    def alpha(self, alpha: float | Callable[[int], float]) -> None:
        self._alpha = alpha if callable(alpha) else check_alpha(alpha)
        if not callable(alpha):
            self._warn_if_strong(self._alpha)

    def _strength(self) -> float:
        """The strength of the step that comes now."""
        alpha = check_alpha(self._alpha(self.steps_taken)) if callable(self._alpha) else self._alpha
        self._warn_if_strong(alpha)
        return alpha

    def _warn_if_strong(self, alpha: float) -> None:
        if alpha > 0.5 and self.kernel in SIGN_CHANGING and not self._warned:
            self._warned = True
            warnings.warn(
                f"alpha = {alpha:g} is above 0.5: updates that alternate over depth change their sign, so that the step is no"
                " descent direction any more",
                UserWarning,
                stacklevel=4,
            )

    # --- state ----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The base optimizer's, with the number of steps and the strength (unless it is a schedule) under ``"depth_smoothing"``."""
        own: dict[str, Any] = {"steps_taken": self.steps_taken}
        if not callable(self._alpha):
            own["alpha"] = self._alpha
        return {**self.base_optimizer.state_dict(), OWN: own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, or a state of the base optimizer alone, from which smoothing begins at step 0.

        Raises
        ------
        ValueError
            From the base optimizer, for another number or size of parameter groups; for a strength outside [0, 1].
        """
        own = state_dict.get(OWN, {})
        if "alpha" in own:
            check_alpha(own["alpha"])
        self.base_optimizer.load_state_dict({key: value for key, value in state_dict.items() if key != OWN})
        self.steps_taken = int(own.get("steps_taken", 0))
        if "alpha" in own and not callable(self._alpha):
            self.alpha = own["alpha"]

    # --- the step -------------------------------------------------------------------------------------------------------

    @torch.compiler.disable
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take one smoothed step.

        Parameters
        ----------
        closure : callable, optional
            Called once, with gradients enabled, before the step.

        Returns
        -------
        object
            What `closure` returned, else None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        alpha = self._strength()
        found = self._runs() if alpha > 0.0 else []
        for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            if found and getattr(self.base_optimizer, hooks, None):
                raise ValueError(
                    "the base optimizer has step hooks, which would run on stand-ins for the tensors; register them on the"
                    " DepthSmoothing object"
                )
        if not found:
            self.base_optimizer.step()
        else:
            held = portions(found) if is_known(self.base_optimizer) else [found]
            # The last portion takes what is not smoothed with it.
            waiting = {id(tensor) for group in self.param_groups for tensor in group["params"]}
            for k, portion in enumerate(held, start=1):
                mine = {id(tensor) for run in portion for tensor in run.tensors}
                self._smoothed_step(portion, alpha, mine if k < len(held) else waiting)
                waiting -= mine
        self.steps_taken += 1
        return loss

    def _smoothed_step(self, portion: Sequence[Run], alpha: float, stepped: set[int]) -> None:
        """Step the base on `stepped` (ids), with stand-ins for the tensors of the runs; mix what it did, and do that to them."""
        prepared: list[Run] = []
        try:
            for run in portion:
                prepared.append(run)
                run.prepare(self.base_optimizer)
            with only(self.base_optimizer, stepped):
                self.base_optimizer.step()
        finally:
            for run in prepared:
                run.restore()
        for run in portion:
            shares = [decay_of(self.base_optimizer, group) for group in run.groups]
            updates = run.collect(shares)
            if not self.decouple_weight_decay:
                for row, tensor, share in zip(run.rows(), run.tensors, shares, strict=True):
                    row.sub_(tensor * share)
                shares = [0.0] * len(shares)
            smooth_(updates, alpha, self.kernel, self.normalize)
            run.apply(shares)

    def _runs(self) -> list[Run]:
        """The neighbours of this step: tensors with a gradient, in the base optimizer, alike in dtype, device and layout."""
        group_of = {id(tensor): group for group in self.param_groups for tensor in group["params"]}
        found = []
        for slot in self.slots:
            present = [tensor.grad is not None and _moves(group_of.get(id(tensor))) for tensor in slot.tensors]
            for run in runs(present, slot.linked, self.kernel, self.seed):
                for part in _alike([slot.tensors[k] for k in run], self.kernel == "average"):
                    if len(part) > 1:
                        self._check(slot, part, group_of)
                        found.append(Run(part, [group_of[id(tensor)] for tensor in part]))
        return found

    def _check(self, slot: Slot, part: Sequence[nn.Parameter], group_of: dict[int, dict[str, Any]]) -> None:
        first = part[0]
        if type(first.data) is not Tensor:
            raise TypeError(
                f"{slot.name} is a {type(first.data).__name__}; only plain tensors can be smoothed, not sharded or wrapped ones"
            )
        if any(group_of[id(tensor)].get("differentiable") for tensor in part):
            raise ValueError("differentiable=True is not supported: the update is applied outside the graph")
        if first.dtype in HALF and not all(starts_from_zero(self.base_optimizer, group_of[id(t)]) for t in part):
            raise ValueError(
                f"{slot.name} is {first.dtype}, where the update of {type(self.base_optimizer).__name__} is lost in rounding: keep"
                " the parameters in float32 (autocast the forward pass), or use SGD without weight_decay, AdamW or Muon"
            )


def _moves(group: dict[str, Any] | None) -> bool:
    """Whether the base moves tensors of this group at all. A rate on an accelerator is not waited for."""
    if group is None:
        return False
    rate = group.get("lr", 1.0)
    return bool(rate != 0) if not isinstance(rate, Tensor) or rate.device.type == "cpu" else True


def _alike(tensors: Sequence[nn.Parameter], anywhere: bool) -> list[list[nn.Parameter]]:
    """Tensors of one dtype, device and layout: neighbours that follow each other, or, with `anywhere`, all that are alike."""
    parts: list[list[nn.Parameter]] = []
    for tensor in tensors:
        candidates = parts if anywhere else parts[-1:]
        for part in candidates:
            if (part[0].dtype, part[0].device, part[0].stride()) == (tensor.dtype, tensor.device, tensor.stride()):
                part.append(tensor)
                break
        else:
            parts.append([tensor])
    return parts
