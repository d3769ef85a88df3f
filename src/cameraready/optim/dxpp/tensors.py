"""The autograd function behind the layer, and its backward pass."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cameraready.optim._linear import Array
from cameraready.optim.dxpp.errors import InaccurateQPWarning, QPError
from cameraready.optim.dxpp.inputs import MATRICES, NAMES, Inputs, Pattern, Run
from cameraready.optim.dxpp.numerics.programs import Scales
from cameraready.optim.dxpp.numerics.sensitivity import KKTSystem
from cameraready.optim.dxpp.numerics.solving import Solved, solve_program

N_OUTPUTS = 4
Like = tuple[Sequence[int], torch.dtype, torch.device]
#: Relative residual of a backward solve above which a user is warned.
DOUBTED_GRADIENT = 1e-6


class QPFunction(torch.autograd.Function):
    """``apply(run, Q, q, G, h, A, b, lb, ub) -> x, lam, mu, z``; of sparse matrices the values, whose patterns are in `run`."""

    @staticmethod
    def forward(run: Run, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        inputs = Inputs(dict(zip(NAMES, tensors, strict=True)), run.patterns)
        run.batched = inputs.batched
        starts = inputs.starts(run)
        found: list[list[Array]] = [[], [], [], []]
        for i in range(inputs.count):
            program, scales = inputs.program(i, run.regularization)
            start = None if starts is None else starts[i] / scales.x
            try:
                solved = solve_program(program, run.options, start, run.differentiable)
            except QPError as error:
                if inputs.batched:
                    raise QPError(error.status, f"sample {i} of the batch: {error}") from error
                raise
            run.solved.append(solved)
            run.scales.append(scales)
            point = solved.point
            lam, equal, z = scales.true_multipliers(point.lam, point.equal, point.z)
            for kept, part in zip(found, (point.x * scales.x, lam, equal, z), strict=True):
                kept.append(part)
        like = tensors[1]
        assert like is not None
        sizes = (inputs.n, inputs.m, inputs.p, inputs.n)
        stacked = (
            np.reshape(kept, (inputs.count, size)) if inputs.batched else kept[0]
            for kept, size in zip(found, sizes, strict=True)
        )
        return tuple(torch.from_numpy(np.ascontiguousarray(each)).to(like.device, like.dtype) for each in stacked)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.run, tensors = inputs[0], inputs[1:]
        ctx.like = [None if t is None else (t.shape, t.dtype, t.device) for t in tensors]
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        needed = [name for name, wanted in zip(NAMES, ctx.needs_input_grad[1:], strict=True) if wanted]
        if not needed or all(each is None for each in upstream):
            return (None,) * (1 + len(NAMES))
        likes = {name: like for name, like in zip(NAMES, ctx.like, strict=True) if name in needed}
        # With the inputs, on which it depends although it does not look at them: a second derivative must not come out as zero.
        found = dict(zip(needed, QPAdjoint.apply(ctx.run, likes, *upstream, *ctx.saved_tensors), strict=True))
        return (None, *(found.get(name) for name in NAMES))

    @staticmethod
    def vmap(
        info: Any, in_dims: Sequence[int | None], run: Run, *tensors: Tensor | None
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        moved = [t if t is None or d is None else t.movedim(d, 0) for t, d in zip(tensors, in_dims[1:], strict=True)]
        for name, t, d in zip(NAMES, moved, in_dims[1:], strict=True):
            expected = (2 if name in MATRICES else 1) + (d is not None)
            if name in run.patterns or (t is not None and t.ndim != expected):
                raise RuntimeError(f"vmap takes dense inputs without a batch of their own; {name} is sparse or has one")
        inner = Run(run.options, run.regularization, run.patterns, run.differentiable, run.start, run.kept)
        out = QPFunction.apply(inner, *moved)
        run.solved, run.scales, run.batched, run.family = inner.solved, inner.scales, inner.batched, inner.family
        return out, (0,) * len(out)


class QPAdjoint(torch.autograd.Function):
    """``apply(run, likes, *upstream)`` -> gradients of the inputs in `likes`, of the shapes, dtypes and devices given there.

    A function of its own, so that torch.func's transforms reach the backward pass too.
    """

    @staticmethod
    def forward(run: Run, likes: Mapping[str, Like], *tensors: Tensor | None) -> tuple[Tensor, ...]:
        upstream = tensors[:N_OUTPUTS]
        given = [None if each is None else each.detach().cpu().to(torch.float64).numpy() for each in upstream]
        sums = {name: np.zeros(like[0]) for name, like in likes.items()}
        for i, (solved, scales) in enumerate(zip(run.solved, run.scales, strict=True)):
            mine = [each if each is None or not run.batched else each[i] for each in given]
            for name, value in gradients(solved, scales, mine, list(likes), run.patterns, i).items():
                target, pattern = sums[name], run.patterns.get(name)
                if pattern is not None:
                    target[slice(None) if pattern.sample is None else pattern.sample == i] += value
                elif target.ndim == value.ndim:
                    target += value
                else:
                    target[i] = value
        return tuple(torch.from_numpy(sums[name]).to(device, dtype) for name, (_, dtype, device) in likes.items())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        raise RuntimeError(
            "a quadratic program's solution can be differentiated once only; second derivatives are not computed"
        )

    @staticmethod
    def vmap(
        info: Any, in_dims: Sequence[Any], run: Run, likes: Mapping[str, Like], *tensors: Tensor | None
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        n, dims = info.batch_size, in_dims[2:]
        upstream, inputs = tensors[:N_OUTPUTS], tensors[N_OUTPUTS:]
        if all(d is None for d in dims[N_OUTPUTS:]):  # several vectors for the same programs, as for a Jacobian
            each = [
                QPAdjoint.apply(
                    run,
                    likes,
                    *(u if d is None else u.select(d, i) for u, d in zip(upstream, dims, strict=False)),
                    *inputs,
                )
                for i in range(n)
            ]
            return tuple(torch.stack(parts) for parts in zip(*each, strict=True)), (0,) * len(likes)
        moved = [
            u if u is None else u.expand(n, *u.shape) if d is None else u.movedim(d, 0)
            for u, d in zip(upstream, dims, strict=False)
        ]
        mapped = {name: ((n, *shape), dtype, device) for name, (shape, dtype, device) in likes.items()}
        given = [
            t if t is None or d is None else t.movedim(d, 0) for t, d in zip(inputs, dims[N_OUTPUTS:], strict=True)
        ]
        out = QPAdjoint.apply(run, mapped, *moved, *given)
        return out, (0,) * len(out)


def gradients(
    solved: Solved,
    scales: Scales,
    upstream: Sequence[Array | None],
    needed: Sequence[str],
    patterns: Mapping[str, Pattern],
    i: int,
) -> dict[str, Array]:
    """Of the inputs in `needed`, for upstream gradients of x, lam, mu and z, any of which may be None; in the user's units."""
    program, point = solved.program, solved.point
    n, response, columns = len(program.q), scales.response, scales.columns
    gx, glam, gmu, gz = (
        np.zeros(size) if each is None else each
        for each, size in zip(upstream, (n, len(program.h), len(program.b), n), strict=True)
    )
    joined = solved.ready_system().on.joined
    s = joined(gmu / scales.A, glam / scales.G, gz / columns) / response
    v, y = adjoint(solved, columns * gx, s)
    equal, rows, box = solved.ready_system().on.split(y)
    v, equal, rows, box = v * columns * response, equal / scales.A, rows / scales.G, box / columns
    x = point.x * scales.x
    lam, mu, _ = scales.true_multipliers(point.lam, point.equal, point.z)
    result: dict[str, Array] = {}
    if "q" in needed:
        result["q"] = -v
    if "h" in needed:
        result["h"] = rows
    if "b" in needed:
        result["b"] = equal
    faces = solved.faces
    half = np.where(program.fixed, 0.5, 1.0)  # equal bounds share it, so that moving both moves x by as much
    if "lb" in needed:
        result["lb"] = np.where(faces.lower, half * box, 0.0)
    if "ub" in needed:
        result["ub"] = np.where(faces.upper, box, np.where(program.fixed, half * box, 0.0))
    pairs = {"Q": (0.5 * v, x, 0.5 * x, v), "G": (lam, v, rows, x), "A": (mu, v, equal, x)}
    for name in MATRICES:
        if name in needed:
            result[name] = -two_products(*pairs[name], patterns.get(name), i)
    return result


def two_products(a: Array, b: Array, c: Array, d: Array, pattern: Pattern | None, i: int) -> Array:
    """``outer(a, b) + outer(c, d)``, or its entries on a pattern."""
    if pattern is None:
        return np.outer(a, b) + np.outer(c, d)
    mine = slice(None) if pattern.sample is None else pattern.sample == i
    row, column = pattern.row[mine], pattern.column[mine]
    return a[row] * b[column] + c[row] * d[column]


def adjoint(solved: Solved, r: Array, s: Array) -> tuple[Array, Array]:
    """v and y of the adjoint system; by the KKT matrix where the penalised Hessian leaves a residual, with a warning where both do."""
    system, info = solved.ready_system(), solved.info
    v, y, quality = system.solve(r, s, solved.options.refine)
    doubtful = system.failed or (np.isfinite(quality.residual) and quality.residual > DOUBTED_GRADIENT)
    if doubtful and not isinstance(system, KKTSystem):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", InaccurateQPWarning)  # of least squares; the residual tells
            by_kkt = KKTSystem(system.on)
            other = by_kkt.solve(r, s, 1)
        if by_kkt.kind == "KKT" and other[2].residual < DOUBTED_GRADIENT:
            v, y, quality = other
            info.factorisation, doubtful = by_kkt.kind, False
    info.gradient_residual, info.refinements = quality.residual, quality.steps
    if doubtful:
        warnings.warn(
            f"the backward solve left a relative residual of {quality.residual:.1g}: active constraints depend on each other, the"
            " solution is not unique, or the program is badly scaled; the gradient is approximate",
            InaccurateQPWarning,
            stacklevel=3,
        )
    return v, y
