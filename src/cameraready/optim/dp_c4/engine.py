"""From a module, an optimizer and a loader to private ones, with the noise that a budget asks for."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from opacus import GradSampleModule
from opacus.validators import ModuleValidator
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from cameraready.optim._per_sample import per_sample_gradients, refuse_coupled_samples
from cameraready.optim.dp_c4.accounting import Accountant, Adjacency, PrivacyLedger, calibrate_noise
from cameraready.optim.dp_c4.clipping import work_dtype
from cameraready.optim.dp_c4.optimizer import C4Optimizer, Mode, PrivacyBudget
from cameraready.optim.dp_c4.sampling import C4DataLoader, Randomness, Sampling
from cameraready.optim.dp_c4.schedules import (
    GeometricThreshold,
    MovementThreshold,
    PolynomialThreshold,
    ThresholdSchedule,
    noise_shares,
)


class PrivateTraining(NamedTuple):
    """A module whose backward pass gives per-sample gradients, its private optimizer, and the loader that goes with both."""

    module: nn.Module
    optimizer: C4Optimizer
    loader: C4DataLoader


class ThresholdSumWarning(UserWarning):
    """Thresholds fall so fast that references may never catch up."""


def make_private_c4(
    module: nn.Module,
    optimizer: Optimizer,
    data_loader: DataLoader,
    *,
    schedule: ThresholdSchedule,
    steps: int,
    target_delta: float,
    target_epsilon: float | None = None,
    noise_multiplier: float | None = None,
    mode: Mode = "snapshot",
    participation: Literal["poisson", "full", "cyclic"] | None = None,
    allocation: Literal["uniform", "by-threshold"] = "uniform",
    snapshot_every: int = 1,
    restart_every: int | None = None,
    anchor_share: float = 1.0,
    loss_reduction: Literal["mean", "sum"] = "mean",
    accountant: Accountant = "pld",
    adjacency: Adjacency = "add-remove",
    physical_batch_size: int | None = None,
    noise_generator: torch.Generator | None = None,
    sampling_generator: torch.Generator | None = None,
    secure_mode: bool = False,
    audit_file: str | Path | None = None,
    record_private: bool = False,
    max_table_bytes: int = 2**31,
) -> PrivateTraining:
    """Make training differentially private by coupled clipping, as `opacus.PrivacyEngine.make_private` does by plain clipping.

    Parameters
    ----------
    module : torch.nn.Module
        In training mode. Layers that mix samples (BatchNorm) are refused, and in coupled modes those that draw random numbers (Dropout).
    optimizer : torch.optim.Optimizer
        Over parameters of `module`.
    data_loader : torch.utils.data.DataLoader
        Over a dataset with a length. Its batch size sets the sampling rate, ``1 / len(data_loader)``, or the number of fixed parts; its
        order is replaced.
    schedule : ThresholdSchedule
        Clipping thresholds from public quantities: `GeometricThreshold`, `PolynomialThreshold`, `ConstantThreshold`, or for snapshot
        mode `MovementThreshold`.
    steps : int
        Optimizer steps of the whole run. The next one raises `BudgetSpentError`. Releases that a resumed run finds in its ledger beyond its checkpoint count too.
    target_delta : float
        Below one over the number of records.
    target_epsilon : float, optional
        The noise is the smallest that keeps the run as planned within it; a run that leaves its plan (releases lost in an interruption, a
        parameter group added, another noise multiplier) ends by `BudgetSpentError` before it would exceed it. Give this or `noise_multiplier`.
    noise_multiplier : float, optional
        Noise standard deviation over the threshold.
    mode : {"snapshot", "table", "off"}
        ``"snapshot"``: differences to the gradient at an earlier point; three vectors of memory; two evaluations of each batch, so that
        ``optimizer.step`` takes a closure. ``"table"``: differences to a reference of each record; as much memory as per-sample
        gradients of the whole data set. ``"off"``: Opacus.
    participation : {"poisson", "full", "cyclic"}, optional
        How records come to a step; by default ``"poisson"``, and in table mode ``"full"``. Fixed parts in turn (``"cyclic"``) are for table mode, where Poisson
        samples are accounted as full participation, with a warning.
    allocation : {"uniform", "by-threshold"}
        Noise multipliers all equal, or by `noise_shares` of the thresholds, for schedules that depend on the step alone.
    snapshot_every, restart_every, anchor_share
        As in `C4Optimizer`.
    loss_reduction : {"mean", "sum"}
        How the loss makes one number of a batch.
    accountant, adjacency
        As in `epsilon_from_log`.
    physical_batch_size : int, optional
        At most so many records at a time; a step then takes several batches, each with a call of ``optimizer.step``.
    noise_generator, sampling_generator : torch.Generator, optional
        For a run that can be repeated; they must not be shared. By default both are seeded by the operating system.
    secure_mode : bool
        Noise and samples from the operating system's secure source.
    audit_file : path, optional
        The audit log is also appended to this file, release by release; an interrupted run that resumes with the same file counts what
        was released after its last checkpoint.
    record_private : bool
        Keep clipped fractions, which are private, in ``optimizer.private_diagnostics``.
    max_table_bytes : int
        Larger tables of references are refused.

    Returns
    -------
    PrivateTraining
        ``(module, optimizer, loader)``. To resume a run exactly, store and load the states of all three. ``optimizer.get_epsilon(delta)``, ``optimizer.audit_log()`` and ``optimizer.privacy_statement(delta)`` tell
        what has been spent.

    Raises
    ------
    ValueError
        For arguments out of range, a module or table that cannot be used, or a budget that cannot be met.
    TypeError
        For a dataset without length.

    Warns
    -----
    ThresholdSumWarning
        If thresholds fall without a floor.

    Notes
    -----
    Use it where per-sample gradients differ much at the optimum, so that DP-SGD needs a large threshold, and a budget that is not tiny. Do
    not expect the error to vanish: at a fixed budget no private method's does. The number of records is taken as public. Losses, accuracies and
    the choice of a best step computed on the training data are not covered by the guarantee.

    References
    ----------
    DP-C4, 2026, OpenReview nw0pePP5qd. A reconstruction: the abstract is what was to be had.

    Examples
    --------
    >>> import torch
    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> from cameraready.optim.dp_c4 import GeometricThreshold, make_private_c4
    >>> x = torch.randn(200, 5, generator=torch.Generator().manual_seed(0))
    >>> data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=50)
    >>> model = torch.nn.Linear(5, 1)
    >>> model, optimizer, data = make_private_c4(
    ...     model, torch.optim.SGD(model.parameters(), 0.1), data, mode="table", steps=20,
    ...     schedule=GeometricThreshold(1.0, 0.9, floor=0.1), target_epsilon=2.0, target_delta=1e-3)
    >>> while optimizer.steps_left:
    ...     for inputs, targets in data:
    ...         optimizer.zero_grad()
    ...         torch.nn.functional.mse_loss(model(inputs), targets).backward()
    ...         optimizer.step()
    >>> bool(1.9 < optimizer.get_epsilon(1e-3) <= 2.0)
    True
    """
    if (target_epsilon is None) == (noise_multiplier is None):
        raise ValueError("give either target_epsilon or noise_multiplier")
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    n = _number_of_records(data_loader)
    if not 0.0 < target_delta < 1.0:
        raise ValueError(f"target_delta must lie between 0 and 1, got {target_delta}")
    if target_delta * n >= 1.0:
        warnings.warn(
            f"target_delta {target_delta} is at least 1/{n}: it allows to publish a record as it is",
            UserWarning,
            stacklevel=2,
        )
    if secure_mode and sampling_generator is not None:
        raise ValueError("secure_mode draws from the operating system; leave the generators out")
    if noise_generator is not None and noise_generator is sampling_generator:
        raise ValueError("noise and sampling need generators of their own")
    sampling = _sampling(participation, mode, n, len(data_loader))
    _check_module(module, optimizer, mode)
    _check_schedule(schedule, mode, steps)
    if mode == "table":
        _check_table(optimizer, n, max_table_bytes)
    private = C4Optimizer(
        optimizer,
        noise_multiplier=0.0 if noise_multiplier is None else noise_multiplier,
        schedule=schedule,
        sampling=sampling,
        mode=mode,
        shares=None if allocation == "uniform" else _shares(schedule, steps, allocation),
        steps=steps,
        snapshot_every=snapshot_every,
        restart_every=restart_every,
        anchor_share=anchor_share,
        loss_reduction=loss_reduction,
        generator=noise_generator,
        secure_mode=secure_mode,
        ledger=PrivacyLedger(None if audit_file is None else Path(audit_file)),
        adjacency=adjacency,
        record_private=record_private,
    )
    if target_epsilon is not None:
        plan = private.plan
        found = calibrate_noise(
            lambda noise: plan.releases(noise, steps),
            target_epsilon,
            target_delta,
            accountant=accountant,
            adjacency=adjacency,
        )
        private.hold_to(PrivacyBudget(target_epsilon, target_delta, accountant), found)
    randomness = Randomness(sampling_generator, secure=secure_mode)
    loader = C4DataLoader(data_loader, private, sampling, randomness, physical_batch_size)
    private.expect_loader()
    wrapped = (
        module if isinstance(module, GradSampleModule) else GradSampleModule(module, loss_reduction=loss_reduction)
    )
    return PrivateTraining(wrapped, private, loader)


def per_sample_closure(
    module: nn.Module,
    optimizer: C4Optimizer,
    loss: Callable[[Tensor, Tensor], Tensor],
    inputs: Tensor,
    targets: Tensor,
    *,
    chunk_size: int | None = None,
) -> Callable[[], Tensor]:
    """A closure for ``optimizer.step`` that needs no hooks in the module: per-sample gradients by `torch.func`.

    Parameters
    ----------
    module : torch.nn.Module
        Not wrapped. Any module that `torch.func` can differentiate, layers that Opacus does not know included.
    optimizer : C4Optimizer
        Over parameters of `module`.
    loss : callable
        ``loss(outputs, targets) -> scalar``, a mean over the batch.
    inputs, targets : Tensor
        Each of shape (b, ...).
    chunk_size : int, optional
        Samples at a time.

    Returns
    -------
    callable
        Sets ``grad_sample`` of the parameters that the loss depends on, and gives the batch's mean loss (0 for an empty batch).
    """

    def closure() -> Tensor:
        optimizer.zero_grad()
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        rest = {
            name: value for name, value in (*module.named_parameters(), *module.named_buffers()) if name not in trained
        }

        def of_one(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return loss(functional_call(module, {**rest, **params}, (x[None],)), y[None])

        batch_loss = loss(functional_call(module, {**rest, **trained}, (inputs,)), targets)
        reached = torch.autograd.grad(batch_loss, list(trained.values()), allow_unused=True)
        used = {name: p for (name, p), grad in zip(trained.items(), reached, strict=True) if grad is not None}
        rest |= {name: p.detach() for name, p in trained.items() if name not in used}
        if len(inputs):
            found = per_sample_gradients(of_one, used, inputs, targets, chunk_size=chunk_size)
        else:
            found = {name: p.detach().new_zeros(0, *p.shape) for name, p in used.items()}
        for name, rows in found.items():
            used[name].grad_sample = rows
        return batch_loss.detach() if len(inputs) else torch.zeros_like(batch_loss)

    return closure


def _number_of_records(loader: DataLoader) -> int:
    if isinstance(loader, C4DataLoader):
        raise TypeError("the loader is private already; give the original one")
    if isinstance(loader.dataset, IterableDataset) or not hasattr(loader.dataset, "__len__"):
        raise TypeError("records are sampled one by one: the dataset needs a length and access by index")
    n = len(loader.dataset)  # type: ignore[arg-type]
    if n < 1 or len(loader) < 1:
        raise ValueError(
            f"the loader has no batch: {n} records, batch_size {loader.batch_size}, drop_last {loader.drop_last}"
        )
    chosen = loader.sampler
    every = type(chosen) is SequentialSampler or (
        type(chosen) is RandomSampler and not chosen.replacement and chosen.num_samples == n
    )
    if not every or type(loader.batch_sampler) is not BatchSampler:
        raise ValueError(
            f"the loader chooses records by a {type(chosen).__name__} of its own, which private sampling replaces: give a plain loader, over a "
            "torch.utils.data.Subset if some records are to be left out"
        )
    return n


def _sampling(participation: str | None, mode: Mode, n: int, batches: int) -> Sampling:
    chosen = participation or ("full" if mode == "table" else "poisson")
    if chosen == "poisson" and mode == "table":
        warnings.warn(
            "in table mode Poisson sampling is accounted as if every record took part in every step: a reference depends on past samples, "
            "so that privacy is not amplified; 'cyclic' costs less",
            UserWarning,
            stacklevel=3,
        )
    if chosen == "poisson":
        return Sampling("poisson", n, rate=1.0 / batches)
    if chosen == "cyclic":
        return Sampling("cyclic", n, parts=batches)
    return Sampling(chosen, n)  # type: ignore[arg-type]


def _check_module(module: nn.Module, optimizer: Optimizer, mode: Mode) -> None:
    if (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    ):
        raise ValueError("training on several processes is not offered: each would have to add a share of the noise")
    errors = ModuleValidator.validate(module, strict=False)
    if errors:
        raise ValueError(
            "the module has layers without per-sample gradients: " + "; ".join(str(error) for error in errors)
        )
    if mode != "off":
        refuse_coupled_samples(module)
    known = {id(p) for p in module.parameters()}
    if any(id(p) not in known for group in optimizer.param_groups for p in group["params"]):
        raise ValueError("the optimizer has parameters that are not the module's")


def _check_schedule(schedule: ThresholdSchedule, mode: Mode, steps: int) -> None:
    if not isinstance(schedule, ThresholdSchedule):
        raise TypeError(
            f"schedule must be a ThresholdSchedule such as GeometricThreshold(1.0, 0.95, floor=0.05), got {schedule!r}"
        )
    if isinstance(schedule, MovementThreshold) and mode != "snapshot":
        raise ValueError(f"MovementThreshold measures the way from a snapshot, which mode {mode!r} has none of")
    falls = isinstance(schedule, GeometricThreshold) and schedule.decay < 1.0
    falls |= isinstance(schedule, PolynomialThreshold) and schedule.power > 1.0
    if mode == "table" and falls and schedule.floor == 0.0:  # type: ignore[attr-defined]
        total = sum(schedule(step, 0.0) for step in range(steps))
        warnings.warn(
            f"thresholds fall without a floor and add up to {total:.3g} in {steps} steps: references of records whose gradient at the "
            "optimum is longer never catch up, and the parameters drift; set a floor",
            ThresholdSumWarning,
            stacklevel=3,
        )


def _check_table(optimizer: Optimizer, n: int, limit: int) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    size = n * sum(p.numel() * work_dtype(p).itemsize for p in params)
    if size > limit:
        raise ValueError(
            f"references of {n} records would take {size / 2**30:.1f} GiB (max_table_bytes is {limit / 2**30:.1f} GiB); use mode='snapshot', "
            "or train fewer layers: freeze the others by requires_grad_(False)"
        )


def _shares(schedule: ThresholdSchedule, steps: int, allocation: str) -> Sequence[float]:
    if allocation != "by-threshold":
        raise ValueError(f"allocation must be 'uniform' or 'by-threshold', got {allocation!r}")
    if isinstance(schedule, MovementThreshold):
        raise ValueError(
            "allocation by threshold needs thresholds that are known before the run; MovementThreshold's are not"
        )
    return noise_shares([schedule(step, 0.0) for step in range(steps)])
