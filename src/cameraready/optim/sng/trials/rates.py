"""Averages by enumeration, contraction on least squares by many runs at once, and the seconds of a step."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cameraready.evidence import interleave
from cameraready.optim.sng.analysis import projection_stats, svs_preconditioner
from cameraready.optim.sng.direction import sng_direction
from cameraready.optim.sng.optimizer import SNG, SPRING
from cameraready.optim.sng.trials.problems import Problem, decaying_system
from cameraready.optim.sng.trials.rivals import ARMS, ON_SAMPLES, on_samples
from cameraready.optim.sng.trials.settings import chosen

# --- averages over all batches ------------------------------------------------------------------------------------------


def averages(seed: int, n_rows: int) -> list[dict[str, Any]]:
    """Gap between the mean step and the preconditioned gradient, and what uniform batches do instead; a row each (k, damping)."""
    rng = np.random.default_rng([seed, 1])
    n = 5
    J, r = torch.from_numpy(rng.normal(size=(n_rows, n))), torch.from_numpy(rng.normal(size=n_rows))
    gradient = J.T @ r
    rows = []
    for k, damping in itertools.product(range(1, 5), (0.0, 0.1)):
        batches = [list(S) for S in itertools.combinations(range(n_rows), k)]
        steps = torch.stack([sng_direction(J[S], r[S], damping) for S in batches])
        volumes = torch.stack(
            [torch.linalg.det(J[S] @ J[S].T + damping * torch.eye(k, dtype=J.dtype)) for S in batches]
        )
        expected = svs_preconditioner(J, k, damping)(gradient)
        shares = volumes / volumes.sum()
        common = {"k": k, "damping": damping}
        rows.append({"arm": "svs", **common, "gap": float((shares @ steps - expected).abs().max())})
        uniform = torch.full_like(shares, 1.0 / len(batches))
        row = {"arm": "uniform", **common, "mixing": _mixing(J, batches, uniform, damping)}
        if damping > 0.0:
            row["coupling"] = _coupling(J, r, batches, steps.mean(dim=0), damping)
        rows.append(row)
    return rows


def _mixing(J: Tensor, batches: list[list[int]], shares: Tensor, damping: float) -> float:
    """Relative norm of the commutator of the mean step's matrix with J J'; zero if it is any function of J J'."""
    mean = torch.zeros(len(J), len(J), dtype=J.dtype)
    for S, share in zip(batches, shares, strict=True):
        kernel = J[S] @ J[S].T + damping * torch.eye(len(S), dtype=J.dtype)
        mean[np.ix_(S, S)] += share * torch.linalg.inv(kernel)
    K = J @ J.T
    return float((mean @ K - K @ mean).norm() / (mean @ K).norm())


def _coupling(J: Tensor, r: Tensor, batches: list[list[int]], mean_step: Tensor, damping: float) -> float:
    """Relative distance of the mean step from the one with the gradient of a second, independent batch."""
    n, k = J.shape[1], len(batches[0])
    inverse = sum(torch.linalg.inv(J[S].T @ J[S] + damping * torch.eye(n, dtype=J.dtype)) for S in batches) / len(
        batches
    )
    decoupled = inverse @ (J.T @ r) * (k / len(J))
    return float((mean_step - decoupled).norm() / mean_step.norm())


# --- contraction on least squares --------------------------------------------------------------------------------------


def exact_contraction(seed: int, decay: float, k: int) -> list[dict[str, Any]]:
    """The factor a step of the mean squared error, computed without simulation, against alpha and sqrt(alpha / beta); 14 rows, 6 columns."""
    J, _ = decaying_system(14, 6, decay, seed)
    stats = projection_stats(J, k)
    rows = []
    for arm, mu, eta, predicted in (
        ("sng", 0.0, 1.0, stats.rate),
        ("spring", stats.mu, stats.eta, stats.accelerated_rate),
    ):
        gain = 1.0 - moment_factor(J.numpy(), k, mu, eta)
        rows.append(
            {"arm": arm, "decay": decay, "k": k, "gain": gain, "predicted": predicted, "over": gain / predicted}
        )
    return rows


def moment_factor(A: np.ndarray, k: int, mu: float, eta: float) -> float:
    """Spectral radius of the map of second moments of (theta, phi) from one step to the next, over all batches."""
    n = A.shape[1]
    one = np.eye(n)
    batches = list(itertools.combinations(range(len(A)), k))
    moments = np.zeros(((2 * n) ** 2, (2 * n) ** 2))
    for S in batches:
        P = np.linalg.pinv(A[list(S)]) @ A[list(S)]
        step = np.block([[one - eta * P, -eta * mu * (one - P)], [P, mu * (one - P)]])
        moments += np.kron(step, step)
    return float(np.abs(np.linalg.eigvals(moments / len(batches))).max())


SGD_STEPS = np.logspace(-2.0, 1.25, 14)


def simulated_contraction(
    seed: int, decay: float, k: int, n_rows: int, runs: int, longest: int
) -> list[dict[str, Any]]:
    """Gain a step, one minus the factor of the mean squared error over runs, from the slowest direction and from anywhere."""
    J, _ = decaying_system(n_rows, 40, decay, seed)
    stats = projection_stats(J, k, n_samples=1_000, seed=seed)
    steps = int(min(max(60, 3.0 / stats.rate), longest))
    slowest = torch.linalg.eigh(J.T @ J).eigenvectors[:, 0].expand(runs, -1)
    generator = torch.Generator().manual_seed(seed)
    anywhere = torch.randn(runs, J.shape[1], generator=generator, dtype=J.dtype)
    common = {"decay": decay, "k": k, "steps": steps}
    plain = late_gain(momentum_runs(J, slowest, k, 0.0, 1.0, steps, seed))
    fast = late_gain(momentum_runs(J, slowest, k, stats.mu, stats.eta, steps, seed))
    sng = momentum_runs(J, anywhere, k, 0.0, 1.0, steps, seed)
    # SGD's step is chosen by the outcome itself, in its favour.
    sgd = min(gradient_runs(J, anywhere, k, SGD_STEPS, steps, seed))
    return [
        {"arm": "sng", **common, "gain": plain, "predicted": stats.rate},
        {"arm": "spring", **common, "gain": fast, "predicted": stats.accelerated_rate, "acceleration": fast / plain},
        {"arm": "sng-anywhere", **common, "gain": 1 - (sng[-1] / sng[0]) ** (1 / steps)},
        {"arm": "sgd", **common, "gain": 1 - (sgd / sng[0]) ** (1 / steps)},
    ]


def late_gain(squares: list[float]) -> float:
    """Gain a step over the last three quarters."""
    start = len(squares) // 4
    return 1.0 - (squares[-1] / squares[start]) ** (1 / (len(squares) - 1 - start))


def momentum_runs(J: Tensor, start: Tensor, k: int, mu: float, eta: float, steps: int, seed: int) -> list[float]:
    """Mean squared distance from the solution 0 after each step, over runs side by side, (runs, n)."""
    generator = torch.Generator().manual_seed(seed)
    theta, phi = start.clone(), torch.zeros_like(start)
    squares = [float(theta.square().sum(dim=1).mean())]
    for _ in range(steps):
        A = J[draws(len(J), len(theta), k, generator)]
        target = torch.einsum("rkn,rn->rk", A, theta - mu * phi)
        factors = torch.linalg.cholesky(A @ A.mT)
        weights = torch.cholesky_solve(target[..., None], factors)[..., 0]
        phi = mu * phi + torch.einsum("rkn,rk->rn", A, weights)
        theta = theta - eta * phi
        squares.append(float(theta.square().sum(dim=1).mean()))
    return squares


def gradient_runs(J: Tensor, start: Tensor, k: int, sizes: np.ndarray, steps: int, seed: int) -> list[float]:
    """Mean squared distance at the end for SGD with each step size, relative to the inverse of the largest eigenvalue of J'J / N."""
    generator = torch.Generator().manual_seed(seed)
    rates = torch.from_numpy(sizes) / (torch.linalg.matrix_norm(J, 2) ** 2 / len(J)) / k
    theta = start.expand(len(sizes), *start.shape).clone()
    for _ in range(steps):
        A = J[draws(len(J), len(start), k, generator)]
        residual = torch.einsum("rkn,srn->srk", A, theta)
        theta = theta - rates[:, None, None] * torch.einsum("rkn,srk->srn", A, residual)
        theta = theta.clamp(-1e12, 1e12)  # those that diverge stay finite, and last
    return theta.square().sum(dim=2).mean(dim=1).tolist()


def draws(n_rows: int, runs: int, k: int, generator: torch.Generator) -> Tensor:
    """k distinct rows for each run, uniformly, (runs, k)."""
    return torch.rand(runs, n_rows, generator=generator).topk(k, dim=1).indices


# --- seconds of a step --------------------------------------------------------------------------------------------------


def perceptron(width: int) -> nn.Module:
    """32 inputs, three hidden layers, one output: about 2 width^2 parameters, in single precision."""
    sizes = [32, width, width, width]
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, 1))


def network_seconds(problem: Problem, seed: int, repeats: int) -> list[dict[str, Any]]:
    """Seconds of a step of Adam, SPRING and SPRING on residuals of one sample, on one batch of a physics-informed network, in turn."""
    rows = torch.randperm(problem.n_rows, generator=torch.Generator().manual_seed(seed))[: problem.batch]
    calls = {}
    for name in ("adam", "spring", ON_SAMPLES):
        model = problem.start(seed)
        step, _ = ARMS["spring" if name == ON_SAMPLES else name](model, chosen(problem.name, name))
        compute = on_samples if name == ON_SAMPLES else None

        def once(step: Any = step, model: nn.Module = model, compute: Any = compute) -> None:
            step(lambda: problem.residuals(model, rows) if compute is None else compute(problem, model, rows))

        calls[name] = once
    found = interleave(calls, warmup=3, repeats=repeats)
    return [{"arm": row["arm"], "repeat": row["repeat"], "step_seconds": row["seconds"]} for row in found]


def step_seconds(seed: int, width: int, batch: int, repeats: int) -> list[dict[str, Any]]:
    """Seconds of a step of Adam, SNG and SPRING on one network and one batch, in turn."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(batch, 32, generator=generator), torch.randn(batch, generator=generator)

    def adam() -> Any:
        model = perceptron(width)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = (model(x)[:, 0] - y).square().mean()
            loss.backward()
            return loss

        return lambda: optimizer.step(closure)

    def ours(kind: Any, **options: Any) -> Any:
        model = perceptron(width)
        optimizer = kind(model.parameters(), **options)
        return lambda: optimizer.step(lambda: model(x)[:, 0] - y)

    arms = {"adam": adam(), "sng": ours(SNG, lr=0.1), "spring": ours(SPRING)}
    rows = interleave(arms, warmup=3, repeats=repeats)
    return [{"arm": row["arm"], "repeat": row["repeat"], "step_seconds": row["seconds"]} for row in rows]
