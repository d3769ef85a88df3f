"""The quadratic programs that the study tries: generators of the sheet's peers, training tasks, and a user's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sparse
import torch
from torch import Tensor

from cameraready.evidence.specs import Spec, SpecError, load_object

Array = np.ndarray[Any, Any]
NAMES = ("Q", "q", "G", "h", "A", "b", "lb", "ub")
#: The data of one program: numpy arrays and scipy sparse arrays by name, without what it does not have.
Data = dict[str, Any]


@dataclass(frozen=True)
class Workload:
    """Programs by size and seed, or one program of the user's (`own`)."""

    name: str
    make: Callable[[int, int], Data] | None = None
    own: Data | None = None


def open_workload(spec: Spec) -> Workload:
    """A shipped workload by name, or the user's program: a tuple or a mapping of Q, q and, if it has them, G, h, A, b, lb, ub."""
    if spec.kind in ("object", "value"):
        found = spec.value if spec.kind == "value" else load_object(spec.name)
        return Workload("own", own=own_program(found))
    return Workload(spec.name, {"random-dense": random_dense, "chain": chain, "simplex": simplex}.get(spec.name))


def own_program(found: Any) -> Data:
    """Raises SpecError unless `found` is the data of one program."""
    if isinstance(found, Mapping):
        unknown = set(found) - set(NAMES)
        if unknown or not {"Q", "q"} <= set(found):
            raise SpecError(
                f"a program is a mapping of Q, q and any of {', '.join(NAMES[2:])}; got keys {sorted(map(str, found))}"
            )
        given = dict(found)
    elif isinstance(found, (tuple, list)) and 2 <= len(found) <= len(NAMES):
        given = dict(zip(NAMES, found, strict=False))
    else:
        raise SpecError(
            f"a program is a tuple (Q, q, G, h, A, b, lb, ub), the last ones optional, or a mapping; got {type(found).__name__}"
        )
    return {name: as_array(name, value) for name, value in given.items() if value is not None}


def as_array(name: str, value: Any) -> Any:
    if sparse.issparse(value):
        return sparse.csc_array(value).astype(float)
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        if value.layout is not torch.strided:
            value = value.to_sparse_coo().coalesce()
            place, shape = tuple(value.indices().numpy()), tuple(value.shape)
            return sparse.csc_array((value.values().numpy().astype(float), place), shape=shape)
    try:
        array = np.asarray(value, dtype=float)
    except (TypeError, ValueError):
        raise SpecError(f"{name} is not an array of numbers, got {type(value).__name__}") from None
    if array.ndim != (2 if name in ("Q", "G", "A") else 1):
        raise SpecError(
            f"{name} must have {2 if name in ('Q', 'G', 'A') else 1} dimensions, without a batch; got shape {array.shape}"
        )
    return array


def tensors(data: Data) -> dict[str, Tensor]:
    """The same as tensors; sparse matrices as COO."""
    return {
        name: sparse_tensor(value) if sparse.issparse(value) else torch.from_numpy(np.array(value))
        for name, value in data.items()
    }


def sparse_tensor(matrix: Any) -> Tensor:
    listed = sparse.coo_array(matrix)
    where = torch.from_numpy(np.stack(listed.coords).astype(np.int64))
    return torch.sparse_coo_tensor(where, torch.from_numpy(listed.data), listed.shape, check_invariants=True).coalesce()


# --- generators ----------------------------------------------------------------------------------------------------------


def random_dense(n: int, seed: int) -> Data:
    """The generator of dQP's random dense programs: all uniform, Q = PP' + 1e-4 I, h = G1 + 1, b = A1, m = n, p = n/2."""
    rng = np.random.default_rng([seed, n])
    P, G, A = rng.random((n, n)), rng.random((n, n)), rng.random((n // 2, n))
    return {"Q": P @ P.T + 1e-4 * np.eye(n), "q": rng.random(n), "G": G, "h": G.sum(1) + 1.0, "A": A, "b": A.sum(1)}


def simplex(n: int, seed: int) -> Data:
    """Projection of a normal point on the simplex, its bounds as rows of G, as dQP writes it."""
    eye = sparse.eye_array(n, format="csc")
    q = np.random.default_rng([seed, n]).normal(size=n)
    return {"Q": eye, "q": q, "G": -eye, "h": np.zeros(n), "A": sparse.csc_array(np.ones((1, n))), "b": np.ones(1)}


def chain(n: int, seed: int) -> Data:
    """dQP's chains: 100 points on a ring in R^(n/100) whose neighbours differ by at most 1 in each coordinate; smooth."""
    points, eye = 100, sparse.eye_array(n // 100)
    second = sparse.kron(sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(points, points)), eye)
    step = sparse.lil_array(sparse.eye_array(points) - sparse.eye_array(points, k=1))
    step[-1, 0] = -1.0
    first = sparse.kron(sparse.csr_array(step), eye)
    Q = sparse.csc_array(0.5 * sparse.eye_array(n) + second.T @ second)
    q = -10.0 * np.random.default_rng([seed, n]).normal(size=n)
    return {"Q": Q, "q": q, "G": sparse.vstack([first, -first], format="csc"), "h": np.ones(2 * n)}


def with_repeated_rows(data: Data, seed: int) -> Data:
    """The same program with every row of G twice, the copy multiplied by a number between a half and two."""
    factor = 2.0 ** np.random.default_rng([seed, 1]).uniform(-1, 1, len(data["h"]))
    G, h = data["G"], data["h"]
    return {**data, "G": np.concatenate([G, factor[:, np.newaxis] * G]), "h": np.concatenate([h, factor * h])}
