"""Quadratic programs as a PyTorch layer, differentiated by the penalised Hessian."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from cameraready.optim._linear import Array
from cameraready.optim.dxpp.inputs import MATRICES, Pattern, Run, taken_apart
from cameraready.optim.dxpp.numerics.sensitivity import Method
from cameraready.optim.dxpp.numerics.solver import Options
from cameraready.optim.dxpp.numerics.solving import QPInfo
from cameraready.optim.dxpp.tensors import QPFunction

Weak = Literal["active", "inactive", "raise"]


class QPSolution(tuple[Tensor, Tensor, Tensor]):
    """``x, lam, mu = solution``; the multipliers of bounds are ``solution.z``.

    Stationarity is ``Qx + q + G'lam + A'mu + z = 0`` whatever the solver: `lam` is at least 0, `mu` has any sign, `z` is
    negative at a lower bound, positive at an upper one, and 0 in between.

    Attributes
    ----------
    x : Tensor of shape (n,) or (batch, n)
    lam : Tensor of shape (m,) or (batch, m)
    mu : Tensor of shape (p,) or (batch, p)
    z : Tensor of the shape of `x`, or None
        None only where torch has rebuilt the tuple: behind a full backward hook of the module.
    """

    z: Tensor | None

    def __new__(cls, x: Tensor, lam: Tensor, mu: Tensor, z: Tensor | None = None) -> QPSolution:
        made = super().__new__(cls, (x, lam, mu))
        made.z = z
        return made

    def __getnewargs__(self) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return (*self, self.z)

    @property
    def x(self) -> Tensor:
        return self[0]

    @property
    def lam(self) -> Tensor:
        return self[1]

    @property
    def mu(self) -> Tensor:
        return self[2]


class PenaltyQPLayer(nn.Module):
    """Solve ``min x'Qx/2 + q'x`` subject to ``Gx <= h``, ``Ax = b``, ``lb <= x <= ub``, and differentiate the solution.

    Forward is any solver of qpsolvers on the normalised program; its point is then made exact on its active set. Backward solves
    with ``H = Q + C'WC``, C the active rows, which is positive definite and of size n where the KKT system is indefinite and larger:
    banded or sparse Cholesky with dense rows by Woodbury, refined on the KKT residual until the sensitivity is exact to rounding.

    Use it for quadratic programs with many or sparse constraints: projections, portfolios, model predictive control, structured
    prediction. Use a cone layer (cvxpylayers) for second-order or semidefinite cones, a closed form where there is one (softmax,
    sorting), and batched solvers on the GPU (qpth) for thousands of small dense programs.

    Parameters
    ----------
    solver : str
        One of ``qpsolvers.available_solvers``; ``"clarabel"``, ``"proxqp"``, ``"osqp"`` and ``"piqp"`` are set to tight tolerances.
        Clarabel is good for sparse programs; dense ones of over a hundred variables are solved many times faster by piqp.
    beta : float
        Width of the smoothed penalty, relative to the size of x. Matters with ``refine=0`` only, where the gradient's error is O(beta).
    penalty : float
        Ratio of the penalty to the largest multiplier, above 1.
    eps_active : float, optional
        Relative slack and multiplier under which a constraint counts as weakly active; by default 1e-10 on a polished point, and
        1e-5 (as in the official code) on one that is not.
    backward : {"auto", "direct", "iterative", "kkt"}
        How systems are solved: by factorisation, by conjugate gradients without forming a matrix (``"auto"`` from 50,000
        variables), or, as a reference, by factorising the reduced KKT matrix.
    refine : int
        At most so many further solves with the same factor in a backward pass; 0 is the paper's formula.
    weak : {"active", "inactive", "raise"}
        What becomes of constraints with zero slack and zero multiplier, where only one-sided derivatives exist. The first two
        warn (`WeaklyActiveWarning`).
    polish : bool
        Whether the solver's point is made exact on its active set. False keeps the solver's point, with slacks of active rows
        taken as zero in the weights.
    regularization : float
        Added to the diagonal of the normalised Q (largest coefficient of the objective about one, x of order one), in
        forward and backward alike; for linear programs and others with solutions that are not unique. Keep it small: the units of
        that normalisation are powers of two, and differ between the samples of a batch.
    warm_start : bool
        Whether a call starts from the last solution. Only where all matrices are the same, value by value; pass `start` otherwise.
    solver_options : mapping, optional
        For the solver, over the tight defaults.

    Attributes
    ----------
    last_info : QPInfo or list of QPInfo or None
        Of the last call; a list for a batch.

    Notes
    -----
    Everything is computed in float64 on the CPU; results have the dtype and device of `q`. Only first derivatives, also under
    `torch.func.grad`, `jacrev` and `vmap` (which return tensors: take ``.x``). A batch is a loop. A forward pass costs the solver plus one factorisation, which the backward pass uses again: O(n^3) dense;
    for a sparse H that can be ordered to bandwidth w O(n w^2); a dense row among sparse ones one more solve.

    References
    ----------
    Linghu et al., 2026, arXiv:2602.14154.

    Examples
    --------
    >>> import torch
    >>> from cameraready.optim.dxpp import PenaltyQPLayer
    >>> q = torch.tensor([-1.0, 0.5, -0.2], dtype=torch.float64, requires_grad=True)
    >>> one = torch.ones(1, dtype=torch.float64)
    >>> x, lam, mu = PenaltyQPLayer()(torch.eye(3, dtype=torch.float64), q, A=one.expand(1, 3), b=one, lb=torch.zeros(3))
    >>> [round(float(value), 6) for value in x]
    [0.9, 0.0, 0.1]
    >>> x[0].backward()
    >>> [round(float(value), 6) for value in q.grad]
    [-0.5, 0.0, 0.5]
    """

    last_info: QPInfo | list[QPInfo] | None

    def __init__(
        self,
        solver: str = "clarabel",
        *,
        beta: float = 1e-6,
        penalty: float = 10.0,
        eps_active: float | None = None,
        backward: Method = "auto",
        refine: int = 8,
        weak: Weak = "active",
        polish: bool = True,
        regularization: float = 0.0,
        warm_start: bool = False,
        solver_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        try:
            import qpsolvers
        except ImportError as error:
            raise ImportError("PenaltyQPLayer needs qpsolvers: pip install 'cameraready[optim-qp]'") from error
        if solver not in qpsolvers.available_solvers:
            raise ValueError(
                f"solver {solver!r} is not installed; installed are {', '.join(sorted(qpsolvers.available_solvers))}"
            )
        for name, value in (("beta", beta), ("penalty", penalty), ("regularization", regularization)):
            if not (isinstance(value, (int, float)) and math.isfinite(value)) or value < 0.0:
                raise ValueError(f"{name} must be a finite number, at least 0, got {value!r}")
        if not 0.0 < beta <= 0.1:
            raise ValueError(f"beta must be in (0, 0.1], got {beta}")
        if penalty <= 1.0:
            raise ValueError(f"penalty must exceed 1, or the penalty is not exact, got {penalty}")
        if eps_active is not None and not 0.0 <= eps_active < 0.1:
            raise ValueError(f"eps_active must be in [0, 0.1), got {eps_active}")
        for name, chosen, known in (("backward", backward, get_args(Method)), ("weak", weak, get_args(Weak))):
            if chosen not in known:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {chosen!r}")
        if isinstance(refine, bool) or not isinstance(refine, int) or refine < 0:
            raise ValueError(f"refine must be an integer, at least 0, got {refine!r}")
        self.options = Options(
            solver,
            float(beta),
            float(penalty),
            eps_active,
            backward,
            refine,
            weak,
            bool(polish),
            dict(solver_options or {}),
        )
        self.regularization = float(regularization)
        self.warm_start = bool(warm_start)
        self.last_info = None
        self._kept: tuple[str, Array] | None = None

    def extra_repr(self) -> str:
        o = self.options
        return f"solver={o.solver!r}, beta={o.beta:g}, backward={o.backward!r}, refine={o.refine}, weak={o.weak!r}"

    def reset_warm_start(self) -> None:
        """Forget the last solution."""
        self._kept = None

    @torch.compiler.disable
    def forward(
        self,
        Q: Tensor,
        q: Tensor,
        G: Tensor | None = None,
        h: Tensor | None = None,
        A: Tensor | None = None,
        b: Tensor | None = None,
        lb: Tensor | None = None,
        ub: Tensor | None = None,
        *,
        start: Tensor | None = None,
    ) -> QPSolution:
        """Solve.

        Parameters
        ----------
        Q : Tensor of shape (n, n)
            Symmetric positive semi-definite. Matrices are dense or sparse (COO, CSR, CSC); gradients of sparse ones are on their
            pattern only, and those of CSC come by `torch.autograd.grad` alone, since PyTorch cannot accumulate them in a leaf. Every
            input may have a leading batch dimension; those without are shared. Batched sparse ones are COO.
        q : Tensor of shape (n,)
        G, h : Tensor of shapes (m, n) and (m,), optional
        A, b : Tensor of shapes (p, n) and (p,), optional
        lb, ub : Tensor of shape (n,), optional
            Entries of size 1e20 and more, and infinite ones, mean no bound.
        start : Tensor of the shape of `x`, optional
            Where solvers that can (proxqp, osqp) start.

        Returns
        -------
        QPSolution
            x, lam and mu, and z as an attribute.

        Raises
        ------
        QPError
            If the program is infeasible, unbounded, not solved, or, where a gradient is wanted, has a solution that is not unique. The
            last cannot be told with conjugate gradients (``backward="iterative"``); the backward pass warns there.
        ValueError, TypeError
            If `Q` is not symmetric or not convex, entries are not finite, a row has only zeros, bounds cross, or shapes do not fit.
        """
        self.last_info = None
        tensors, patterns = self._tensors({"Q": Q, "q": q, "G": G, "h": h, "A": A, "b": b, "lb": lb, "ub": ub})
        wanted = torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in tensors)
        run = Run(self.options, self.regularization, patterns, wanted)
        if start is not None:
            run.start = start.detach().cpu().to(torch.float64).numpy()
        if self.warm_start:
            run.kept = self._kept or ("", None)
        out = QPFunction.apply(run, *tensors)
        self.last_info = run.infos if run.batched else run.infos[0]
        if self.warm_start and run.solved:
            found = [each.point.x * scales.x for each, scales in zip(run.solved, run.scales, strict=True)]
            self._kept = (run.family, np.stack(found))
        return QPSolution(*out)

    @staticmethod
    def _tensors(given: dict[str, Tensor | None]) -> tuple[list[Tensor | None], dict[str, Pattern]]:
        """The tensors, of sparse ones their values, and the patterns of the latter."""
        for left, right in (("G", "h"), ("A", "b")):
            for name in (left, right):
                tensor = given[name]
                rows = -2 if name == left else -1
                if isinstance(tensor, Tensor) and (
                    tensor.shape == (0,) or (tensor.ndim >= -rows and tensor.shape[rows] == 0)
                ):
                    given[name] = None  # no rows; an empty vector for either is qpth's way to say so
            if (given[left] is None) != (given[right] is None):
                raise ValueError(f"{left} and {right} belong together: pass both or neither")
        tensors, patterns = [], {}
        for name, tensor in given.items():
            if tensor is None:
                if name in ("Q", "q"):
                    raise ValueError(f"{name} is None; a program needs Q and q (a linear one has a Q of zeros)")
                tensors.append(None)
                continue
            if not isinstance(tensor, Tensor):
                raise TypeError(
                    f"{name} must be a tensor, got {type(tensor).__name__}; torch.as_tensor makes one of an array"
                )
            if not tensor.dtype.is_floating_point:
                raise TypeError(f"{name} must be of a floating-point dtype, got {tensor.dtype}")
            if tensor.layout is not torch.strided:
                if name not in MATRICES:
                    raise TypeError(f"{name} must be a dense tensor, got layout {tensor.layout}")
                tensor, patterns[name] = taken_apart(tensor)
            tensors.append(tensor)
        return tensors, patterns


def qp_solve(
    Q: Tensor,
    q: Tensor,
    G: Tensor | None = None,
    h: Tensor | None = None,
    A: Tensor | None = None,
    b: Tensor | None = None,
    lb: Tensor | None = None,
    ub: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """The solution of a quadratic program, differentiable; `PenaltyQPLayer` without the module.

    Parameters
    ----------
    Q, q, G, h, A, b, lb, ub : Tensor
        As for `PenaltyQPLayer.forward`; the order is that of qpth and OptNet.
    **options
        As for `PenaltyQPLayer`.

    Returns
    -------
    Tensor of shape (n,) or (batch, n)
        The solution x.

    Raises
    ------
    QPError, ValueError, TypeError
        As `PenaltyQPLayer.forward`.

    References
    ----------
    Linghu et al., 2026, arXiv:2602.14154.

    Examples
    --------
    >>> import torch
    >>> from cameraready.optim.dxpp import qp_solve
    >>> target = torch.tensor([2.0, -1.0], dtype=torch.float64, requires_grad=True)
    >>> x = qp_solve(torch.eye(2, dtype=torch.float64), -target, lb=torch.zeros(2), ub=torch.ones(2))
    >>> [round(float(value), 6) for value in x]
    [1.0, 0.0]
    """
    return PenaltyQPLayer(**options)(Q, q, G, h, A, b, lb, ub).x
