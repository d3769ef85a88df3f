"""`SNG` and `SPRING` as PyTorch optimizers."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from cameraready.optim._per_sample import flatten, unflatten
from cameraready.optim.sng.direction import sng_direction, spring_update
from cameraready.optim.sng.jacobian import DenseJacobian, Jacobian, Known, Linearised, Recorder
from cameraready.optim.sng.momentum import learning_rate_for

Returned = Tensor | Linearised | tuple[Tensor | Linearised, Tensor]
#: Options that the kernel, one for all parameters, makes common to all groups.
_COMMON = ("mu", "damping", "norm_constraint", "centered")


class UnstableStepWarning(UserWarning):
    """The learning rate is large for the momentum."""


class _KernelOptimizer(torch.optim.Optimizer):
    """What both share: reading the closure, the update over all groups, the norm constraint."""

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self._patterns: dict[int, Known] = {}
        self.last_info: dict[str, Any] = {}
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Copies and pickles hold options and state alone; which patterns are exact is found out again."""
        super().__setstate__(state)
        self._patterns, self.last_info = {}, {}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; ``mu``, ``damping``, ``norm_constraint`` and ``centered`` must be those of the other groups.

        Raises
        ------
        ValueError
            If an option is out of range or differs from that of the other groups.
        TypeError
            If a parameter is not float32 or float64, or an option is no number.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check(group)
            for p in group["params"]:
                if p.dtype not in (torch.float32, torch.float64):
                    raise TypeError(f"parameters must be float32 or float64, got {p.dtype}")
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        if group["mu"] >= 0.8 and group["lr"] >= 0.5 and group["norm_constraint"] is None:
            warnings.warn(
                f"lr={group['lr']:g} with mu={group['mu']:g} diverges even on least squares; lr=None takes "
                f"{learning_rate_for(group['mu']):.3g}, projection_stats suggests a pair for your problem",
                UnstableStepWarning,
                stacklevel=5,
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load options and buffers of an optimizer of the same class.

        Raises
        ------
        ValueError
            If the state is that of another class, or a buffer's shape is not its parameter's.
        """
        for group in state_dict["param_groups"]:
            lacks = [name for name in ("lr", *_COMMON) if name not in group]
            if lacks:
                raise ValueError(f"this is the state of another kind of optimizer: its groups lack {', '.join(lacks)}")
            if isinstance(self, SNG) and group["mu"] != 0.0:
                raise ValueError(f"this is SPRING's state, with mu={group['mu']}; load it into SPRING")
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, p in zip(numbers, (p for group in self.param_groups for p in group["params"]), strict=False):
            stored = state_dict["state"].get(number, {}).get("direction")
            if stored is not None and stored.shape != p.shape:
                raise ValueError(
                    f"the state has a buffer of shape {tuple(stored.shape)} for a parameter of shape {tuple(p.shape)}; it belongs to "
                    "another model, or to parameters in another order"
                )
        super().load_state_dict(state_dict)

    def _check(self, group: dict[str, Any]) -> None:
        for name in ("mu", "damping", "lr", "norm_constraint"):
            value = group[name]
            if value is None and name in ("lr", "norm_constraint"):
                continue
            if isinstance(value, bool) or not isinstance(value, Real | Tensor):
                raise TypeError(f"{name} must be a number, got {value!r}")
        mu, damping, limit = group["mu"], group["damping"], group["norm_constraint"]
        if not (0.0 <= mu < 1.0):
            raise ValueError(f"mu must be in [0, 1), got {mu}")
        if group["lr"] is None:
            group["lr"] = learning_rate_for(mu)
        if not (math.isfinite(group["lr"]) and group["lr"] >= 0.0):
            raise ValueError(f"lr must be a finite number of at least 0, or None, got {group['lr']}")
        if not (math.isfinite(damping) and damping >= 0.0):
            raise ValueError(f"damping must be a finite number of at least 0, got {damping}")
        if limit is not None and not limit > 0.0:
            raise ValueError(f"norm_constraint must be above 0, or None, got {limit}")
        for name in _COMMON:
            if group[name] != self.param_groups[0][name]:
                raise ValueError(
                    f"all groups share one kernel, so {name} must be equal in all of them; got {group[name]} beside "
                    f"{self.param_groups[0][name]}"
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Returned] | None = None) -> Returned:  # type: ignore[override]
        """One update from one evaluation of the closure.

        Parameters
        ----------
        closure : callable
            Computes the batch with the current parameters, without reduction and without ``backward()``. It gives one of

            - the residuals, a tensor of shape (k,) or (k, m) with its graph; the loss is half the mean of their squares;
            - a pair (outputs, derivative of the loss *summed* over samples with respect to the outputs), of equal shape;
            - a `Linearised`, or a pair of it and the derivative.

        Returns
        -------
        What the closure gave, detached from the graph.

        Raises
        ------
        TypeError
            Without a closure (as a `torch.amp.GradScaler` calls it: a loss scaling would cancel here, and is not supported), or if
            the closure gives something else.
        CoupledSamplesError
            If the closure uses PyTorch's batch normalisation or dropout in training mode.
        ValueError
            If shapes do not fit or numbers are not finite; the parameters are then as they were.
        """
        if torch.is_inference_mode_enabled():
            raise RuntimeError("step needs derivatives; call it outside torch.inference_mode()")
        if closure is None:
            raise TypeError(
                f"{type(self).__name__}.step needs a closure that returns the residuals of the batch; gradients in .grad are not "
                "enough, and gradient scaling is not supported"
            )
        for group in self.param_groups:
            self._check(group)
        first = self.param_groups[0]
        params = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        if not params:
            raise ValueError("no parameter needs a gradient")
        if len({(p.dtype, p.device) for p in params}) > 1:
            raise ValueError("parameters must share one dtype and one device, for they share one kernel")
        recorder = Recorder(params)
        with torch.enable_grad(), recorder:
            returned = closure()
        with torch.enable_grad():
            outputs, residual, jacobian = self._read(returned, params, recorder)
        k = residual.numel()
        damping = k * first["damping"]
        phi = flatten([self.state.get(p, {}).get("direction", torch.zeros_like(p)) for p in params])
        if first["mu"] > 0.0:
            phi = spring_update(jacobian, residual, phi, first["mu"], damping, centered=first["centered"])
        else:
            phi = sng_direction(jacobian, residual, damping, centered=first["centered"])
        if not torch.isfinite(phi).all():
            raise ValueError("the direction is not finite; parameters were left as they were. Use more damping")
        pieces = dict(zip(params, unflatten(phi, params), strict=True))
        scale = self._scale(pieces)
        for group in self.param_groups:
            for p in group["params"]:
                if p in pieces:
                    # phi is kept as it is, without learning rate and constraint: mu J phi needs it so.
                    if first["mu"] > 0.0:
                        self.state[p]["direction"] = pieces[p].clone()
                    p.add_(pieces[p], alpha=-float(group["lr"]) * scale)
        self.last_info = {"jacobian": type(jacobian).__name__, "samples": outputs.shape[0], "scale": scale}
        return returned_detached(returned)

    def _scale(self, pieces: dict[Tensor, Tensor]) -> float:
        limit = self.param_groups[0]["norm_constraint"]
        if limit is None:
            return 1.0
        squares = sum(
            group["lr"] ** 2
            * float(pieces[p].double().square().sum() if p.device.type != "mps" else pieces[p].square().sum())
            for group in self.param_groups
            for p in group["params"]
            if p in pieces
        )
        return min(1.0, math.sqrt(limit / squares)) if squares > 0.0 else 1.0

    def _read(self, returned: Returned, params: list[Tensor], recorder: Recorder) -> tuple[Tensor, Tensor, Jacobian]:
        """Outputs, derivative of the loss with respect to them, (k,), and their Jacobian."""
        pair = isinstance(returned, tuple)
        if pair and len(returned) != 2:
            raise TypeError(
                f"the closure must return residuals, or a pair (outputs, derivative), got {len(returned)} values"
            )
        outputs, signal = returned if pair else (returned, None)
        values = outputs.values if isinstance(outputs, Linearised) else outputs
        if not isinstance(values, Tensor) or not (signal is None or isinstance(signal, Tensor)):
            raise TypeError(
                "the closure must return the residuals of the batch as a tensor or Linearised, or a pair (outputs, derivative of the "
                f"loss with respect to them), got {type(outputs).__name__}"
            )
        if values.ndim == 0:
            raise ValueError(
                "the closure returned a scalar; return the residuals of the batch, one a sample, without taking squares or a mean"
            )
        if values.numel() == 0:
            raise ValueError("the batch is empty")
        if values.ndim == 2 and values.shape[0] == values.shape[1] > 8:
            raise ValueError(
                f"the closure returned shape {tuple(values.shape)}, k rows of k; residuals are one a sample. Did the targets, of shape "
                "(k, 1), spread over the outputs, of shape (k,)?"
            )
        if values.dtype != params[0].dtype:
            raise ValueError(
                f"outputs are {values.dtype} and parameters {params[0].dtype}; compute both in one precision"
            )
        if signal is None:
            signal = values
        if signal.is_complex():
            raise TypeError("the derivative of the loss is complex; outputs and their derivative must be real")
        if signal.shape != values.shape:
            raise ValueError(
                f"outputs have shape {tuple(values.shape)}, so their derivative has it too, got {tuple(signal.shape)}"
            )
        residual = signal.detach().reshape(-1).to(values.dtype)
        if isinstance(outputs, Linearised):
            return values, residual, DenseJacobian(_columns(outputs, params))
        if not values.requires_grad:
            raise ValueError(
                "what the closure returned has no graph: compute it from the parameters, and do not detach it"
            )
        return values, residual, recorder.jacobian(values, self._patterns)


class SNG(_KernelOptimizer):
    """Subsampled natural gradient descent: a Gauss-Newton step on each batch, at the cost of a k-by-k system.

    Use it where a loss is a sum of squares (or nearly) that is to become very small, as in physics-informed networks, and Adam's
    progress stalls. Not for noisy labels at a constant learning rate, where it stalls at a noise floor; nor where the loss need not
    be small, where Adam's cheaper steps go further.

    Parameters
    ----------
    params : iterable
        Parameters or groups of them, as for any optimizer; ``lr`` may differ from group to group.
    lr : float, optional
        eta; None means 1, a full step.
    damping : float
        lambda, relative to the mean over samples: the system is ``J J' / k + damping I``. 0 uses the pseudo-inverse.
    norm_constraint : float, optional
        Largest squared norm of a step over all parameters; longer ones are shortened. Set it for networks, such as 0.1: early steps
        are long, and one can saturate a network for good.
    centered : bool
        Take the batch's mean off outputs and residuals, for losses that a constant added to all outputs does not change.

    Raises
    ------
    ValueError
        If there are no parameters or an option is out of range.
    TypeError
        If a parameter is not float32 or float64, or an option is no number.

    Notes
    -----
    `step` takes a closure that returns the residuals; see there. If all parameters belong to linear layers that see k rows, a step
    costs O(k^2) per width of a layer beyond a forward and a backward pass, and no Jacobian is held. Otherwise the Jacobian takes
    k n numbers, and a backward pass per sample unless the closure returns `linearise`'s result. ``last_info["jacobian"]`` says
    which it was. The system is solved in double precision whatever the parameters' is; products with J are not, so that in single
    precision a step has a relative error of about 1e-7 times J's condition number. Use float64 for losses below 1e-8.

    The residuals of a batch must be independent of each other: row i of a layer's output serves residual i alone. Where it does not,
    the Jacobian is taken row by row, which is exact; that is looked for when a closure's calls or its graph are new, and at every
    eighth step. A coupling that opens later without changing the graph (a weight that was zero) is therefore noticed after at most
    seven steps, which are wrong.

    References
    ----------
    Goldshlager, Hu and Lin, 2026, arXiv:2508.21022, the SNG step.

    Examples
    --------
    >>> import torch
    >>> from cameraready.optim.sng import SNG
    >>> x = torch.linspace(0, 1, 32, dtype=torch.float64)[:, None]
    >>> model = torch.nn.Sequential(torch.nn.Linear(1, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()
    >>> optimizer = SNG(model.parameters(), damping=1e-6)
    >>> for _ in range(30):
    ...     residuals = optimizer.step(lambda: model(x)[:, 0] - torch.sin(6 * x[:, 0]))
    >>> bool(residuals.square().mean() < 1e-3)
    True
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | None = None,
        damping: float = 1e-3,
        norm_constraint: float | None = None,
        centered: bool = False,
    ) -> None:
        options = {"lr": lr, "mu": 0.0, "damping": damping, "norm_constraint": norm_constraint, "centered": centered}
        super().__init__(params, options)


class SPRING(_KernelOptimizer):
    """Subsampled natural gradient descent with the momentum of accelerated sketch-and-project.

    Use it instead of `SNG` where the kernel's spectrum decays fast, which is when acceleration pays; `projection_stats` says how much
    on a linear model. The buffer is a vector of the parameters' size.

    Parameters
    ----------
    params : iterable
        Parameters or groups of them, as for any optimizer; ``lr`` may differ from group to group.
    lr : float, optional
        eta. None means ``1 - mu``, the smallest step that the map between (mu, eta) and the convergence constants allows;
        `learning_rate_for` gives the larger one of a known beta. Large momentum needs a small step.
    mu : float
        Momentum in [0, 1). 0 is `SNG`.
    damping : float
        lambda, relative to the mean over samples: the system is ``J J' / k + damping I``. 0 uses the pseudo-inverse.
    norm_constraint : float, optional
        Largest squared norm of a step over all parameters; longer ones are shortened. The buffer is not. Set it for networks: early
        steps are long, and one can saturate a network for good. 0.1 serves small physics-informed networks, 1e-3 is in use for neural
        wavefunctions.
    centered : bool
        Take the batch's mean off outputs and residuals, for losses that a constant added to all outputs does not change.

    Raises
    ------
    ValueError
        If there are no parameters or an option is out of range.
    TypeError
        If a parameter is not float32 or float64, or an option is no number.

    Warns
    -----
    UnstableStepWarning
        For mu of at least 0.8 with lr of at least 0.5 and no norm constraint, which diverges on plain least squares.

    Notes
    -----
    Costs, memory, precision and the assumption of independent residuals are those of `SNG`, with one product more with the Jacobian.

    References
    ----------
    Goldshlager, Hu and Lin, 2026, arXiv:2508.21022, the SPRING step.

    Examples
    --------
    >>> import torch
    >>> from cameraready.optim.sng import SPRING
    >>> model = torch.nn.Linear(3, 1, dtype=torch.float64)
    >>> SPRING(model.parameters(), mu=0.9).param_groups[0]["lr"]  # doctest: +ELLIPSIS
    0.09999...
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | None = None,
        mu: float = 0.9,
        damping: float = 1e-3,
        norm_constraint: float | None = None,
        centered: bool = False,
    ) -> None:
        options = {"lr": lr, "mu": mu, "damping": damping, "norm_constraint": norm_constraint, "centered": centered}
        super().__init__(params, options)


def _columns(found: Linearised, params: list[Tensor]) -> Tensor:
    """The Jacobian's columns in the order of the optimizer's parameters; zeros for those that it lacks."""
    known = dict(zip(found.params, found.jacobian.split([p.numel() for p in found.params], dim=1), strict=True))
    if not any(p in known for p in params):
        raise ValueError(
            "the closure linearised with respect to other tensors than this optimizer's parameters; "
            "pass dict(model.named_parameters()) of the model that is trained"
        )
    k = found.values.shape[0]
    if len(known) == len(params) and all(a is b for a, b in zip(found.params, params, strict=True)):
        return found.jacobian
    return torch.cat([known[p] if p in known else p.new_zeros(k, p.numel()) for p in params], dim=1)


def returned_detached(returned: Returned) -> Returned:
    """Without the graph, which would otherwise live as long as what the caller keeps."""
    if isinstance(returned, tuple):
        outputs, signal = returned
        return (outputs.detach() if isinstance(outputs, Tensor) else outputs), signal.detach()
    return returned.detach() if isinstance(returned, Tensor) else returned
