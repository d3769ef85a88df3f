"""The private optimizers that the study compares on linear models: ours through its component, Opacus's, and variants of it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from opacus import GradSampleModule
from opacus.optimizers import AdaClipDPOptimizer, DPOptimizer
from opacus.schedulers import ExponentialNoise
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from cameraready.optim.dp_c4.accounting import Release, calibrate_noise
from cameraready.optim.dp_c4.engine import make_private_c4
from cameraready.optim.dp_c4.optimizer import C4Optimizer
from cameraready.optim.dp_c4.sampling import Sampling
from cameraready.optim.dp_c4.schedules import GeometricThreshold, MovementThreshold, noise_shares
from cameraready.optim.dp_c4.workloads import Array, Canaries, Images, Problem

#: Gradient evaluations of each record that every arm may spend.
EVALUATIONS = 100
#: Sampling rate of the arms that sample.
RATE = 0.2
#: Fixed by looks at breast-cancer and digits with seeds from 1000 on; the rest is tuned on twins.
DECAY = 0.98  # of thresholds in table mode
NOISE_DECAY = 0.98  # of DP-SGD's noise
SMOOTHNESS, RESTART, ANCHOR_SHARE = 0.5, 2, 0.5  # snapshot mode


@dataclass(frozen=True)
class Settings:
    """What is tuned: a step size, and a second number that each arm reads in its own way (a threshold, a quantile)."""

    lr: float
    second: float


@dataclass(frozen=True)
class Budget:
    """What an arm may spend: privacy, and gradient evaluations a record."""

    epsilon: float
    delta: float
    evaluations: int = EVALUATIONS


Arm = Callable[[Problem, Budget, Settings, int], Array]


#: Multipliers that have been calibrated, by budget and plan.
_CALIBRATED: dict[tuple[float, ...], float] = {}


def noise_for(budget: Budget, steps: int, rate: float = 1.0, anchors: tuple[int, float] = (1, 1.0)) -> float:
    """Noise multiplier of `steps` equal releases; every anchors[0]-th one has anchors[1] times the multiplier."""
    key = (budget.epsilon, budget.delta, steps, rate, *anchors)
    if key not in _CALIBRATED:
        kind = "poisson" if rate < 1.0 else "full"

        def plan(noise: float) -> list[Release]:
            shares = [anchors[1] if step % anchors[0] == 0 else 1.0 for step in range(steps)]
            return [Release(step, "planned", noise * share, 1.0, kind, rate=rate) for step, share in enumerate(shares)]  # type: ignore[arg-type]

        _CALIBRATED[key] = calibrate_noise(plan, budget.epsilon, budget.delta)
    return _CALIBRATED[key]


def calibrated() -> Array:
    """What has been calibrated in this process, a row each, for others."""
    return np.array([[*key, noise] for key, noise in _CALIBRATED.items()]).reshape(-1, 7)


def take_over(table: Array) -> None:
    """Use what another process has calibrated."""
    for epsilon, delta, steps, rate, every, share, noise in table.tolist():
        _CALIBRATED[epsilon, delta, int(steps), rate, int(every), share] = noise


def thresholds(total: float, steps: int, decay: float | None = None) -> GeometricThreshold:
    """Thresholds that add up to `total` over `steps` steps, and by default fall as much over them as over `EVALUATIONS` steps by `DECAY` each."""
    decay = DECAY ** (EVALUATIONS / steps) if decay is None else decay
    start = total / steps if decay == 1.0 else total * (1.0 - decay) / (1.0 - decay**steps)
    return GeometricThreshold(start, decay)


# --- how a linear model is trained through an optimizer of per-sample gradients ---------------------------------------------------


class _Training:
    """Weights, their per-sample gradients in closed form, and samples of the records."""

    def __init__(self, problem: Problem, settings: Settings, seed: int) -> None:
        self.problem = problem
        self.weights = torch.nn.Parameter(torch.zeros(problem.d, dtype=torch.float64))
        self.base = torch.optim.SGD([self.weights], lr=settings.lr, weight_decay=problem.l2)
        self.noise = torch.Generator().manual_seed(seed)
        self._samples = np.random.default_rng([seed, 0x5A])
        self._rows: Array | slice = slice(None)

    def sample(self, rate: float) -> None:
        self._rows = np.nonzero(self._samples.random(self.problem.n) < rate)[0]

    def evaluate(self) -> None:
        problem, rows = self.problem, self._rows
        part = Problem("part", problem.features[rows], problem.target[rows], problem.loss)
        self.weights.grad_sample = torch.from_numpy(part.gradients(self.weights.detach().numpy()))  # type: ignore[attr-defined]

    def run(
        self, optimizer: torch.optim.Optimizer, steps: int, rate: float = 1.0, after: Callable[[], object] | None = None
    ) -> Array:
        for _ in range(steps):
            if rate < 1.0:
                self.sample(rate)
            optimizer.zero_grad()
            optimizer.step(self.evaluate)
            if after is not None:
                after()
        return self.weights.detach().numpy().copy()


def c4_optimizer(
    problem: Problem,
    training: _Training,
    noise: float,
    steps: int,
    total: float,
    *,
    decay: float | None = None,
    uniform: bool = False,
) -> C4Optimizer:
    """Table mode with all records in every step."""
    schedule = thresholds(total, steps, decay)
    return C4Optimizer(
        training.base,
        noise_multiplier=noise,
        schedule=schedule,
        sampling=Sampling("full", problem.n),
        mode="table",
        shares=None if uniform else noise_shares([schedule(step) for step in range(steps)]),
        steps=steps,
        generator=training.noise,
    )


def c4(problem: Problem, budget: Budget, settings: Settings, seed: int) -> Array:
    """Table mode, thresholds adding up to `second`, the budget shared by thresholds."""
    return coupled_run(problem, budget, settings, seed)[0]


def coupled_run(
    problem: Problem, budget: Budget, settings: Settings, seed: int, decay: float | None = None
) -> tuple[Array, C4Optimizer]:
    """As `c4`, with the optimizer."""
    training, steps = _Training(problem, settings, seed), budget.evaluations
    optimizer = c4_optimizer(problem, training, noise_for(budget, steps), steps, settings.second, decay=decay)
    return training.run(optimizer, steps), optimizer


def c4_uniform(problem: Problem, budget: Budget, settings: Settings, seed: int) -> Array:
    """The same with equal noise multipliers."""
    training, steps = _Training(problem, settings, seed), budget.evaluations
    optimizer = c4_optimizer(problem, training, noise_for(budget, steps), steps, settings.second, uniform=True)
    return training.run(optimizer, steps)


def clip21(problem: Problem, budget: Budget, settings: Settings, seed: int) -> Array:
    """The same with a constant threshold: error feedback as in Clip21."""
    training, steps = _Training(problem, settings, seed), budget.evaluations
    optimizer = c4_optimizer(
        problem, training, noise_for(budget, steps), steps, settings.second, decay=1.0, uniform=True
    )
    return training.run(optimizer, steps)


def c4_snapshot(problem: Problem, budget: Budget, settings: Settings, seed: int) -> Array:
    """Snapshot mode on Poisson samples, anchors clipped at `second`; two evaluations a record and step where there is a difference."""
    training, steps = _Training(problem, settings, seed), snapshot_steps(budget)
    optimizer = C4Optimizer(
        training.base,
        noise_multiplier=noise_for(budget, steps, RATE, (RESTART, ANCHOR_SHARE)),
        schedule=MovementThreshold(SMOOTHNESS, anchor=settings.second),
        sampling=Sampling("poisson", problem.n, rate=RATE),
        restart_every=RESTART,
        anchor_share=ANCHOR_SHARE,
        steps=steps,
        generator=training.noise,
    )
    return training.run(optimizer, steps, RATE)


def snapshot_steps(budget: Budget) -> int:
    """Steps for which the evaluations suffice: of RESTART steps one costs one evaluation, the others two."""
    return int(budget.evaluations / RATE * RESTART / (2 * RESTART - 1))


def dp_sgd(problem: Problem, budget: Budget, settings: Settings, seed: int) -> Array:
    """Opacus with threshold `second`, all records in every step."""
    training, steps = _Training(problem, settings, seed), budget.evaluations
    return training.run(_opacus(problem, training, noise_for(budget, steps), settings.second), steps)


def dp_sgd_poisson(problem: Problem, budget: Budget, settings: Settings, seed: int) -> Array:
    """Opacus with threshold `second` on Poisson samples, so many more steps."""
    training, steps = _Training(problem, settings, seed), int(budget.evaluations / RATE)
    return training.run(_opacus(problem, training, noise_for(budget, steps, RATE), settings.second, RATE), steps, RATE)


def decaying_noise(problem: Problem, budget: Budget, settings: Settings, seed: int) -> Array:
    """Opacus with threshold `second` and its scheduler of exponentially falling noise, all records in every step."""
    training, steps = _Training(problem, settings, seed), budget.evaluations
    optimizer = _opacus(problem, training, noise_for(budget, steps) * decaying_shares(steps)[0], settings.second)
    return training.run(optimizer, steps, after=ExponentialNoise(optimizer, gamma=NOISE_DECAY).step)


def decaying_shares(steps: int) -> list[float]:
    """Multipliers that fall by `NOISE_DECAY` a step and spend what equal ones of size 1 do."""
    shares = NOISE_DECAY ** np.arange(steps)
    return list(shares * np.sqrt(np.mean(shares**-2.0)))


class NormalisingOptimizer(DPOptimizer):
    """AUTO-S: each gradient divided by its norm plus `stability`, whence norms below one. Bu et al., 2022, arXiv:2206.07136, Eq. 4.2."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, stability: float, **options: object) -> None:
        super().__init__(optimizer, max_grad_norm=1.0, **options)  # type: ignore[arg-type]
        self.stability = stability

    def clip_and_accumulate(self) -> None:
        norms = torch.stack([rows.flatten(1).norm(dim=1) for rows in self.grad_samples], dim=1).norm(dim=1)
        for p, rows in zip(self.params, self.grad_samples, strict=True):
            total = torch.einsum("i,i...", 1.0 / (norms + self.stability), rows)
            p.summed_grad = total if p.summed_grad is None else p.summed_grad + total


def auto_s(problem: Problem, budget: Budget, settings: Settings, seed: int) -> Array:
    """Normalised gradients with stability constant `second`, all records in every step."""
    training, steps = _Training(problem, settings, seed), budget.evaluations
    optimizer = NormalisingOptimizer(
        training.base,
        stability=settings.second,
        noise_multiplier=noise_for(budget, steps),
        expected_batch_size=problem.n,
        generator=training.noise,
    )
    return training.run(optimizer, steps)


def adaclip(problem: Problem, budget: Budget, settings: Settings, seed: int) -> Array:
    """Opacus's AdaClip at quantile `second`, all records in every step.

    The noised count of unclipped records is paid for out of the same budget: Opacus raises the gradients' noise for it (Andrew et al., 2021,
    arXiv:1905.03871, Theorem 1).
    """
    training, steps = _Training(problem, settings, seed), budget.evaluations
    noise = noise_for(budget, steps)
    optimizer = AdaClipDPOptimizer(
        training.base,
        noise_multiplier=noise,
        target_unclipped_quantile=settings.second,
        clipbound_learning_rate=0.2,
        max_clipbound=1e3,
        min_clipbound=1e-3,
        unclipped_num_std=count_noise(problem.n, noise),
        max_grad_norm=1.0,
        expected_batch_size=problem.n,
        generator=training.noise,
    )
    return training.run(optimizer, steps)


def count_noise(n: int, noise: float) -> float:
    """Noise of the count: a twentieth of the records, as its authors advise, but enough to keep the gradients' noise within 1.2 times."""
    return max(n / 20.0, 0.91 * noise)


def _opacus(problem: Problem, training: _Training, noise: float, threshold: float, rate: float = 1.0) -> DPOptimizer:
    return DPOptimizer(
        training.base,
        noise_multiplier=noise,
        max_grad_norm=threshold,
        expected_batch_size=rate * problem.n,  # type: ignore[arg-type]
        generator=training.noise,
    )


ARMS: Mapping[str, Arm] = {
    "c4": c4,
    "c4-uniform": c4_uniform,
    "clip21": clip21,
    "c4-snapshot": c4_snapshot,
    "dp-sgd": dp_sgd,
    "dp-sgd-poisson": dp_sgd_poisson,
    "auto-s": auto_s,
    "adaclip": adaclip,
    "decay": decaying_noise,
}


# --- a small network: the same optimizers through Opacus's hooks ----------------------------------------------------------------

#: Gradient evaluations of each record, and the sampling rate, of the arms that train a network.
NETWORK_EVALUATIONS, NETWORK_RATE = 20, 0.2


def network_steps(arm: str, evaluations: int) -> tuple[int, float]:
    """Number of steps and sampling rate of an arm."""
    rate = 1.0 if arm in ("c4", "dp-sgd") else NETWORK_RATE
    steps = int(evaluations / rate)
    return (int(steps * RESTART / (2 * RESTART - 1)), rate) if arm == "c4-snapshot" else (steps, rate)


def network_noise(budget: Budget) -> dict[str, float]:
    """Noise multipliers of the arms that train a network."""
    anchors = {"c4-snapshot": (RESTART, ANCHOR_SHARE)}
    arms = ("c4", "dp-sgd", "c4-snapshot", "dp-sgd-poisson")
    return {arm: noise_for(budget, *network_steps(arm, budget.evaluations), anchors.get(arm, (1, 1.0))) for arm in arms}


def train_network(images: Images, arm: str, budget: Budget, settings: Settings, seed: int) -> float:
    """Share of held-out images that a network of 32 hidden units, trained by `arm`, gets wrong."""
    n = len(images.labels)
    torch_seed = torch.Generator().manual_seed(seed)
    network = nn.Sequential(nn.Linear(images.features.shape[1], 32), nn.Tanh(), nn.Linear(32, 10))
    with torch.no_grad():
        for p in network.parameters():
            p.copy_(torch.randn(p.shape, generator=torch_seed) * (p.shape[-1] ** -0.5 if p.ndim == 2 else 0.0))
    base = torch.optim.SGD(network.parameters(), lr=settings.lr)
    steps, rate = network_steps(arm, budget.evaluations)
    noise = network_noise(budget)[arm]
    if arm.startswith("c4"):
        schedule = (
            thresholds(settings.second, steps) if arm == "c4" else MovementThreshold(SMOOTHNESS, anchor=settings.second)
        )
        module, optimizer, loader = make_private_c4(
            network,
            base,
            DataLoader(TensorDataset(images.features, images.labels), batch_size=math.ceil(n * rate)),
            mode="table" if arm == "c4" else "snapshot",
            schedule=schedule,
            steps=steps,
            target_delta=budget.delta,
            noise_multiplier=noise,
            allocation="by-threshold" if arm == "c4" else "uniform",
            restart_every=None if arm == "c4" else RESTART,
            anchor_share=ANCHOR_SHARE,
            noise_generator=torch.Generator().manual_seed(seed + 1),
            sampling_generator=torch.Generator().manual_seed(seed + 2),
        )
        batches: Iterator[tuple[Tensor, Tensor]] = itertools.chain.from_iterable(itertools.repeat(loader))
    else:
        module = GradSampleModule(network)
        optimizer = DPOptimizer(
            base,
            noise_multiplier=noise,
            max_grad_norm=settings.second,
            expected_batch_size=rate * n,  # type: ignore[arg-type]
            generator=torch.Generator().manual_seed(seed + 1),
        )
        batches = _poisson(images, rate, seed)
    for _ in range(steps):
        x, y = next(batches)

        def closure(x: Tensor = x, y: Tensor = y) -> None:
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(x), y).backward()

        optimizer.step(closure)  # type: ignore[arg-type]
    with torch.no_grad():
        return float((network(images.test_features).argmax(dim=1) != images.test_labels).double().mean())


def _poisson(images: Images, rate: float, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed + 2)
    while True:
        rows = torch.rand(len(images.labels), generator=generator) < rate
        yield images.features[rows], images.labels[rows]


# --- without noise, audited, and timed --------------------------------------------------------------------------------------------


def residual(problem: Problem, arm: str, seed: int) -> float:
    """Length of the gradient after 800 steps without noise on 200 rows with a penalty of 0.1, thresholds far below the gradients' norms."""
    rows = np.random.default_rng([seed, 0xB1]).choice(problem.n, 200, replace=False)
    part = Problem("part", problem.features[rows], problem.target[rows], problem.loss, l2=0.1)
    unit = float(np.median(np.linalg.norm(part.features, axis=1)))
    curvature = np.linalg.eigvalsh(part.features.T @ part.features / part.n)[-1] / 4.0 + part.l2
    training = _Training(part, Settings(1.0 / curvature, 0.02 * unit), seed)
    if arm == "c4":
        optimizer: DPOptimizer = C4Optimizer(
            training.base,
            noise_multiplier=0.0,
            schedule=GeometricThreshold(0.2 * unit, 0.95, floor=0.02 * unit),
            sampling=Sampling("full", part.n),
            mode="table",
        )
    else:
        optimizer = _opacus(part, training, 0.0, 0.02 * unit)
    return float(np.linalg.norm(part.slope(training.run(optimizer, 800))))


def audited_scores(canaries: Canaries, arm: str, noise: float, included: Tensor, seed: int) -> Tensor:
    """Minus the sum of all that a run publishes, at each canary's own feature; canaries that take part pull it down."""
    weights = torch.nn.Parameter(torch.zeros(canaries.n_canaries, dtype=torch.float64))
    schedule = GeometricThreshold(1.0, 0.8, floor=0.05)
    optimizer = C4Optimizer(
        torch.optim.SGD([weights], lr=0.1),
        noise_multiplier=0.0 if arm == "no-noise" else noise,
        schedule=MovementThreshold(1.0, anchor=1.0) if arm == "c4-snapshot" else schedule,
        sampling=Sampling("full", canaries.n_records),
        mode="snapshot" if arm == "c4-snapshot" else "table",
        generator=torch.Generator().manual_seed(1_000 + seed),
    )
    rows = torch.zeros(canaries.n_records, canaries.n_canaries, dtype=torch.float64)
    rows[: canaries.n_canaries] = torch.diag(-5.0 * included.double())
    generator = torch.Generator().manual_seed(2_000 + seed)

    def closure() -> None:
        weights.grad_sample = rows * (1.0 + weights.detach())  # type: ignore[attr-defined]

    scores = torch.zeros(canaries.n_canaries, dtype=torch.float64)
    for _ in range(canaries.steps):
        optimizer.step(closure)
        published = weights.grad
        if arm == "mean-reference":
            mean = optimizer.memory.references(weights).mean(dim=0)
            scale = noise * optimizer.max_grad_norm / canaries.n_records
            published = mean + scale * torch.randn(len(mean), generator=generator, dtype=torch.float64)
        scores -= published  # type: ignore[operator]
    return scores


def one_step(mode: str, rows: Tensor, seed: int) -> Callable[[], object]:
    """A step on `rows` (n, d), fully prepared: of Opacus's optimizer or of ours."""
    weights = torch.nn.Parameter(torch.zeros(rows.shape[1], dtype=rows.dtype))
    base = torch.optim.SGD([weights], lr=1e-3)
    generator = torch.Generator().manual_seed(seed)
    n = len(rows)
    if mode == "dp-sgd":
        optimizer: DPOptimizer = DPOptimizer(
            base, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=n, generator=generator
        )
    else:
        schedule = GeometricThreshold(1.0, 0.99, floor=0.1)
        optimizer = C4Optimizer(
            base,
            noise_multiplier=1.0,
            schedule=schedule,
            sampling=Sampling("full", n),
            mode="table",
            generator=generator,
        )

    def step() -> None:
        optimizer.zero_grad()
        weights.grad_sample = rows.clone()  # type: ignore[attr-defined]
        optimizer.step()

    return step
