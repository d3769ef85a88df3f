"""Opacus's optimizer with coupled clipping: gradients are released as noised changes of a running estimate."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from opacus.optimizers import DPOptimizer
from torch import Tensor
from torch.optim import Optimizer

from cameraready.optim.dp_c4.accounting import (
    Accountant,
    Adjacency,
    PrivacyLedger,
    PrivacyStatement,
    PrivateQuantityWarning,
    Release,
    epsilon_of,
)
from cameraready.optim.dp_c4.clipping import CoupledMemory, clip_rows, work_dtype
from cameraready.optim.dp_c4.sampling import Handover, Randomness, Sampling, StepRecords
from cameraready.optim.dp_c4.schedules import StepPlan, ThresholdSchedule

Mode = Literal["snapshot", "table", "off"]
Closure = Callable[[], Any]


class BudgetSpentError(RuntimeError):
    """The run has made all the steps that its noise was calibrated for, or the next release would exceed its budget."""


class PrivacyBudget(NamedTuple):
    """What a run may spend, and who counts."""

    epsilon: float
    delta: float
    accountant: Accountant = "pld"


class C4Optimizer(DPOptimizer):
    r"""Private optimizer whose clipping bias vanishes: per-sample differences to a reference are clipped, noised and added up.

    Step t releases :math:`D_t = \frac1b (\sum_i \mathrm{clip}_{\tau_t}(\nabla f_i(x_t) - h_i) + N(0, \sigma_t^2 \tau_t^2 I))` and gives the
    wrapped optimizer :math:`G_t = G + D_t` as its gradient. In mode ``"table"`` every record keeps its own h_i, which moves by what was
    released, and G is :math:`G_{t-1}`. In mode ``"snapshot"`` h_i is the gradient at an earlier point w of the run, and G the private mean gradient there.
    In mode ``"off"`` h_i = G = 0: Opacus's own step.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Any; it is given :math:`G_t`. Weight decay in it is public and is not clipped.
    noise_multiplier : float
        sigma, at least 0. 0 is not private.
    schedule : ThresholdSchedule
        tau_t, from public quantities.
    sampling : Sampling
        How the records of a step are chosen. Without a loader of `make_private_c4` you vouch for it.
    mode : {"snapshot", "table", "off"}
        Table mode needs ``n_records`` times the memory of the parameters, and gains nothing from Poisson sampling: a reference depends on
        the steps in which its record took part. Snapshot mode evaluates each batch twice, through the closure.
    shares : sequence of float, optional
        sigma_t = noise_multiplier * shares[t] (see `noise_shares`); then there are as many steps as shares. By default 1.
    steps : int, optional
        After so many steps the next one raises `BudgetSpentError`; by default no limit.
    snapshot_every : int
        Steps between moves of w. A move costs nothing: G_t, already released, is the private mean gradient at the new w.
    restart_every : int, optional
        Steps between releases of a gradient itself, clipped at ``schedule.at_anchor()``, from which G starts anew; by default only the first.
    anchor_share : float
        sigma of these releases is ``noise_multiplier * anchor_share``.
    loss_reduction : {"mean", "sum"}
        As in Opacus: for ``"sum"`` the gradient is not divided by the batch size.
    generator : torch.Generator, optional
        For the noise; part of ``state_dict``, so that a run resumes exactly. By default one with a fresh secret seed.
    secure_mode : bool
        Noise from the operating system's secure source; then a run cannot be repeated.
    ledger : PrivacyLedger, optional
        By default an empty one in memory.
    adjacency : {"add-remove", "replace-one"}
        What `get_epsilon` speaks of.
    record_private : bool
        Keep clipped fractions in `private_diagnostics`, with a warning.

    Raises
    ------
    ValueError
        For arguments out of range, fixed parts in snapshot mode, or a step that does not fit the sampling.
    BudgetSpentError
        From ``step``, beyond `steps`.

    Notes
    -----
    A ``state_dict`` holds references and the generator's state: it is as secret as the data, and two runs resumed from the same one, or
    an optimizer and its copy, must not both be published. In table mode Poisson sampling is allowed but accounted as full participation.

    References
    ----------
    DP-C4, 2026, OpenReview nw0pePP5qd (reconstructed from its abstract). Murata and Suzuki, 2022, arXiv:2206.03884 (gradient differences).

    See Also
    --------
    make_private_c4 : makes one with its loader, and finds the noise for a budget.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        noise_multiplier: float,
        schedule: ThresholdSchedule,
        sampling: Sampling,
        mode: Mode = "snapshot",
        shares: Sequence[float] | None = None,
        steps: int | None = None,
        snapshot_every: int = 1,
        restart_every: int | None = None,
        anchor_share: float = 1.0,
        loss_reduction: Literal["mean", "sum"] = "mean",
        generator: torch.Generator | None = None,
        secure_mode: bool = False,
        ledger: PrivacyLedger | None = None,
        adjacency: Adjacency = "add-remove",
        record_private: bool = False,
    ) -> None:
        if not 0.0 <= noise_multiplier < math.inf:
            raise ValueError(f"noise_multiplier must be a finite number of at least 0, got {noise_multiplier}")
        self.plan = StepPlan(
            mode,
            sampling,
            schedule,
            None if shares is None else tuple(float(share) for share in shares),
            snapshot_every,
            restart_every,
            anchor_share,
        )
        if shares is not None and steps not in (None, len(shares)):
            raise ValueError(f"shares must be one for each of the {steps} steps, got {len(shares)}")
        expected = sampling.n_records if mode == "table" else sampling.expected_batch_size
        super().__init__(
            optimizer,
            noise_multiplier=noise_multiplier,
            max_grad_norm=schedule.at_anchor(),
            # Opacus counts in whole records, and mode "off" is to equal it.
            expected_batch_size=max(1, int(expected)) if mode == "off" else expected,
            loss_reduction=loss_reduction,
            secure_mode=secure_mode,
        )
        self.randomness = Randomness(generator, secure=secure_mode)
        self.generator = self.randomness.generator
        self.mode, self.sampling = mode, sampling
        self.steps = len(shares) if steps is None and shares is not None else steps
        self.ledger = PrivacyLedger() if ledger is None else ledger
        self.adjacency: Adjacency = adjacency
        self.budget: PrivacyBudget | None = None
        self._calibrated = float(noise_multiplier)
        # A run that leaves its plan is held to its budget release by release.
        self._off_plan = bool(self.ledger.releases)
        # Numbers of a generator that releases have used already, of noise and of samples, are not used again.
        self._used_up = {"noise": bool(self.ledger.releases), "samples": bool(self.ledger.releases)}
        self._restored = False
        self.private_diagnostics: dict[str, list[float]] = {}
        if record_private:
            self.private_diagnostics["clipped_fraction"] = []
            warnings.warn(
                "clipped fractions are private: publishing them, or choosing anything by them, needs budget of its own",
                PrivateQuantityWarning,
                stacklevel=2,
            )
        self.memory = CoupledMemory(sampling.n_records)
        self._took_part: dict[Tensor, bool] = {}
        self._step = self._since_restart = self._since_move = 0
        self._book = StepRecords(sampling, numbered=mode == "table")
        self._rows = self._shortened = 0  # private counts of the step, kept for `record_private` alone

    @property
    def steps_left(self) -> int | None:
        """How many steps the budget still allows, as far as the number of releases tells; None without a limit."""
        return None if self.steps is None else max(self.steps - max(self._step, len(self.ledger.releases)), 0)

    def hold_to(self, budget: PrivacyBudget, noise_multiplier: float) -> None:
        """Set the noise that was calibrated for a budget, and keep to the budget even where the run leaves its plan."""
        self.budget = budget
        self.noise_multiplier = self._calibrated = noise_multiplier

    def expect_loader(self) -> None:
        """From now on every step needs a batch that a loader of `make_private_c4` has handed over."""
        self._book.has_loader = True

    def used_up(self, *, resumed: bool) -> bool:
        """Asked by the loader at the start of an epoch, and told whether its own state was restored: whether to draw samples anew."""
        used = self._used_up["samples"] or (self._restored and not resumed)
        self._used_up["samples"] = self._restored = False
        return used

    # --- a step ----------------------------------------------------------------------------------------------------------

    def hand_over(self, handover: Handover) -> None:
        """Told by a loader of `make_private_c4`: which records the batch holds that it gives out."""
        if self._book.hand_over(handover):
            for p in self._all_params():
                p.summed_grad = None
        self._step_skip_queue = [handover.more]

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        """Clip, add noise, write the release down, and step; gives back what the closure returned.

        Parameters
        ----------
        closure : callable, optional
            Zeroes gradients, evaluates the batch, calls ``backward`` and returns the loss. Needed in snapshot mode, which calls it a second
            time with the parameters at the snapshot; it must do the same at both.
        """
        if self.steps_left == 0:
            raise BudgetSpentError(f"all {self.steps} steps that the noise was calibrated for have been made")
        kind = self.plan.kind(self._since_restart)
        if kind == "difference" and closure is None:
            raise ValueError("snapshot mode evaluates each batch twice: call optimizer.step(closure)")
        value = None
        if closure is not None:
            with torch.enable_grad():
                value = closure()
        taking_part = self._check_who_takes_part()
        records = self._book.take(len(self._flat(taking_part[0])))
        self.max_grad_norm = threshold = self.plan.threshold(kind, self._step, self.memory.movement(self.params))
        if self.mode == "off":
            self._drop_broken_rows(taking_part)
            self.clip_and_accumulate()
        else:
            self._accumulate(taking_part, kind, records, closure)
        if self._check_skip_next_step():
            self._is_last_step_skipped = True
            return value
        part = self._book.close()
        # Written down before anything of it leaves: a run that breaks off here is counted.
        release = self.plan.release(self._step, kind, self.noise_multiplier, threshold, part)
        self._check_budget(release)
        self.ledger.add(release)
        self._publish(taking_part, kind, release)
        if self.step_hook:
            self.step_hook(self)
        self._is_last_step_skipped = False
        # Whatever else a backward pass left behind is raw.
        released = set(taking_part)
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = p.grad if p in released else None
        self.original_optimizer.step()
        self._finish(kind)
        return value

    def _accumulate(
        self, taking_part: list[Tensor], kind: str, records: Tensor | None, closure: Closure | None
    ) -> None:
        rows = [self._flat(p).to(work_dtype(p)) for p in taking_part]
        held, whole = [], False
        if kind == "coupled":
            assert records is not None
            held = [self.memory.references(p) for p in taking_part]
            whole = len(records) == self.sampling.n_records and bool((records[1:] > records[:-1]).all())
            rows = [row - (h if whole else h[records]) for h, row in zip(held, rows, strict=True)]
        elif kind == "difference":
            assert closure is not None
            there = self._at_snapshot(taking_part, closure)
            rows = [here - at_w.to(here.dtype) for here, at_w in zip(rows, there, strict=True)]
        deltas, shortened = clip_rows(rows, self.max_grad_norm)
        if self.private_diagnostics:
            self._rows += len(shortened)
            self._shortened += int(shortened.sum())
        for p, delta in zip(taking_part, deltas, strict=True):
            total = delta.sum(dim=0)
            p.summed_grad = total if p.summed_grad is None else p.summed_grad + total
            p.grad_sample = None
        for h, delta in zip(held, deltas, strict=bool(held)):
            if whole:
                h.add_(delta)
            else:
                h.index_add_(0, records.to(delta.device), delta)  # type: ignore[union-attr]

    def _at_snapshot(self, taking_part: list[Tensor], closure: Closure) -> list[Tensor]:
        """Per-sample gradients of the same batch with the parameters at the snapshot, to which they are brought back after."""
        moved = [(p, p.detach().clone(), snapshot) for p, snapshot in self.memory.moved(self.params)]
        sizes = [len(self._flat(p)) for p in taking_part]
        try:
            for p, _, snapshot in moved:
                p.copy_(snapshot)
            for p in taking_part:
                p.grad_sample = None
            with torch.enable_grad():
                closure()
            found = [self._flat(p) for p in taking_part]
        finally:
            for p, here, _ in moved:
                p.copy_(here)
        if [len(row) for row in found] != sizes:
            raise ValueError(
                "the closure evaluated other records at the second call; it must evaluate the same batch both times"
            )
        return found

    def _publish(self, taking_part: list[Tensor], kind: str, release: Release) -> None:
        """Noise, and the gradient that the wrapped optimizer sees."""
        if self.private_diagnostics and self.mode != "off":
            self.private_diagnostics["clipped_fraction"].append(self._shortened / max(self._rows, 1))
        self._rows = self._shortened = 0
        if self._used_up["noise"]:
            self.randomness.renew()
            self._used_up["noise"] = False
        for p in taking_part:
            noised = p.summed_grad + self.randomness.normal(release.noise_multiplier * release.threshold, p.summed_grad)
            p.summed_grad = None
            if self.mode == "off":
                p.grad = noised.view_as(p)
                continue
            memory = self.memory.of(p)
            estimate = noised.view_as(p) / self.expected_batch_size
            if kind in ("coupled", "difference") and "running" in memory:
                estimate += memory["running"]
            if kind == "coupled" or kind == "anchor" or self._since_move + 1 >= self.plan.snapshot_every:
                memory["running"] = estimate
                if self.mode == "snapshot":
                    memory["snapshot"] = p.detach().clone()
            scale = self.expected_batch_size if self.loss_reduction == "sum" else 1.0
            p.grad = (estimate * scale).to(p.dtype)
        if self.mode == "off" and self.loss_reduction == "mean":
            for p in taking_part:
                p.grad /= self.expected_batch_size

    def _finish(self, kind: str) -> None:
        self._step += 1
        self._since_restart = 1 if kind == "anchor" else self._since_restart + 1
        moves = kind == "anchor" or self._since_move + 1 >= self.plan.snapshot_every
        self._since_move = 0 if moves else self._since_move + 1

    # --- who takes part -------------------------------------------------------------------------------------------------------

    def _all_params(self) -> list[Any]:
        return [p for group in self.param_groups for p in group["params"] if p.requires_grad]

    @property
    def params(self) -> list[Any]:
        """Parameters that train; as soon as some have per-sample gradients, those."""
        found = [p for p in self._all_params() if getattr(p, "grad_sample", None) is not None]
        return found or self._all_params()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As of any optimizer. In snapshot mode the next step releases a gradient anew, for the new parameters have none."""
        self.original_optimizer.add_param_group(param_group)
        for p in self._all_params():
            p.summed_grad = getattr(p, "summed_grad", None)
        self._since_restart = 0
        self._off_plan = True

    def _flat(self, p: Any) -> Tensor:
        rows = p.grad_sample
        if isinstance(rows, list):
            if len(rows) > 1:
                raise ValueError(
                    f"gradients of {len(rows)} batches were added up before a step; call step after each (see physical_batch_size)"
                )
            rows = torch.cat(rows)
        return rows.to(p.dtype)

    def _drop_broken_rows(self, taking_part: list[Any]) -> None:
        """Zero for records whose gradient is not finite, which Opacus would pass on."""
        rows = {p: self._flat(p) for p in taking_part}
        finite = torch.stack(
            [torch.isfinite(row).reshape(len(row), -1).all(dim=1) for row in rows.values() if row.numel()]
            or [torch.ones(1, dtype=torch.bool)]
        ).all(dim=0)
        if not finite.all():
            for p, row in rows.items():
                p.grad_sample = torch.where(finite.reshape(-1, *[1] * (row.ndim - 1)), row, 0.0)

    def _check_budget(self, release: Release) -> None:
        """Raise if a run that has left its plan would leave its budget by this release."""
        self._off_plan |= self.noise_multiplier != self._calibrated
        if self.budget is None or not self._off_plan:
            return
        epsilon, delta, accountant = self.budget
        if (
            epsilon_of([*self.ledger.releases, release], delta, accountant=accountant, adjacency=self.adjacency)
            > epsilon
        ):
            raise BudgetSpentError(f"one more release would exceed epsilon {epsilon} at delta {delta}")

    def _check_who_takes_part(self) -> list[Any]:
        found = [p for p in self._all_params() if getattr(p, "grad_sample", None) is not None]
        if not found:
            raise ValueError(
                "no parameter has per-sample gradients: call backward() on the loss of a module that make_private_c4 returned, "
                "or step with a per_sample_closure"
            )
        present = set(found)
        silent = [p for p in self._all_params() if p not in present]
        if any(p.grad is not None and bool(p.grad.any()) for p in silent):
            raise ValueError(
                "a parameter has a gradient and no per-sample gradients, so that it cannot be made private: call layers, not their "
                "weights, or step with a per_sample_closure"
            )
        if self.mode == "off" and any(p.dtype.itemsize < 4 for p in found):
            raise ValueError(
                "16-bit parameters would be summed up in 16 bits, which is not private; use a coupled mode or float32"
            )
        if any(self._took_part.setdefault(p, p in present) != (p in present) for p in self._all_params()):
            raise RuntimeError(
                "a parameter has per-sample gradients at some steps and none at others, which may give data away; "
                "freeze it by requires_grad_(False), or see to it that every batch uses it"
            )
        return found

    # --- what can be said, and state -----------------------------------------------------------------------------------------------

    def get_epsilon(self, delta: float, *, accountant: Accountant = "pld") -> float:
        """Epsilon of what has been released so far, under the optimizer's adjacency; see `epsilon_from_log`."""
        return epsilon_of(self.ledger.releases, delta, accountant=accountant, adjacency=self.adjacency)

    def audit_log(self) -> dict[str, Any]:
        """All releases as plain numbers, from which `epsilon_from_log` computes epsilon again. Public."""
        return self.ledger.log()

    def privacy_statement(self, delta: float) -> PrivacyStatement:
        """The guarantee so far in words and numbers, for both kinds of neighbours."""
        releases = self.ledger.releases
        return PrivacyStatement(
            epsilon_of(releases, delta, adjacency=self.adjacency),
            delta,
            self.adjacency,
            epsilon_of(releases, delta, adjacency="replace-one"),
            "pld",
            len(releases),
            any(release.participation == "poisson" and release.rate < 1.0 for release in releases),
        )

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state, and under ``"c4"`` this one's. Private: keep it as secret as the data.

        Raises
        ------
        RuntimeError
            Between the physical batches of one step.
        """
        if self._book.rows:
            raise RuntimeError("a step is under way: store the state after its last physical batch")
        params = [p for group in self.param_groups for p in group["params"]]
        c4 = {
            "mode": self.mode,
            "step": self._step,
            "since_restart": self._since_restart,
            "since_move": self._since_move,
            "memory": self.memory.state(params),
            "generator": self.randomness.state(),
            "log": self.audit_log(),
        }
        return {**self.original_optimizer.state_dict(), "c4": c4}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state of an optimizer of the same mode over parameters of the same shapes.

        Raises
        ------
        ValueError
            If the state is of another mode, of other shapes, or lacks what `state_dict` adds.
        """
        if "c4" not in state_dict:
            raise ValueError("the state has no entry 'c4': it is not that of a C4Optimizer, and its budget is unknown")
        c4 = state_dict["c4"]
        if c4["mode"] != self.mode:
            raise ValueError(f"the state is that of mode {c4['mode']!r}, this optimizer has mode {self.mode!r}")
        params = [p for group in self.param_groups for p in group["params"]]
        self.memory.load(params, c4["memory"])
        lost = self.ledger.restore(c4["log"])
        self._off_plan = bool(lost) or not self.plan.begins_with(self.ledger.releases, self._calibrated, self.steps)
        # Steps made after that state have used up the numbers that it would go on with.
        self._used_up = {"noise": bool(lost), "samples": bool(lost)}
        self._restored = c4["step"] > 0
        self.randomness.restore(c4["generator"])
        self.original_optimizer.load_state_dict({key: value for key, value in state_dict.items() if key != "c4"})
        self._step, self._since_restart, self._since_move = c4["step"], c4["since_restart"], c4["since_move"]
        self._took_part = {}
        expects_loader = self._book.has_loader
        self._book = StepRecords(self.sampling, numbered=self.mode == "table")
        self._book.has_loader = expects_loader

    # An ordinary optimizer copies its groups and state alone.
    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "step"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
