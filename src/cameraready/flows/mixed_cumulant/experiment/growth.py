"""How many samples the neuron needs in each dimension, for the study's arms; steps follow from closed forms, nothing is tuned."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from cameraready.flows.mixed_cumulant import MixedCumulant, diffusion_information_exponent
from cameraready.flows.mixed_cumulant._activation import Activation, activation, gaussian_rule
from cameraready.flows.mixed_cumulant.exponent import noise_levels
from cameraready.flows.mixed_cumulant.model import random_directions
from cameraready.flows.mixed_cumulant.scaling import recovery_times

PAIRWISE, FOURTH, CORRELATED = "pairwise", "fourth", "correlated"
RUNS = {PAIRWISE: 60, FOURTH: 40, CORRELATED: 60}
DIMS = {PAIRWISE: (25, 50, 100, 200, 400), FOURTH: (12, 16, 24, 32, 40), CORRELATED: (25, 50, 100, 200, 400)}
#: Overlaps that count as recovery: u, v alone, v beside u. At d = 12 a random unit vector has 0.8 with probability 0.002.
THRESHOLD = {PAIRWISE: 0.5, FOURTH: 0.8, CORRELATED: 0.3}
#: Drift over what normalisation takes away, at |w.v| = d^(-1/2): the fourth direction's step is the one with this ratio, in closed form.
KAPPA = 0.3
#: FastICA is run in these dimensions and these runs only; it is slow where samples are many.
ICA_DIMS, ICA_RUNS = (12, 16, 24), 10
#: The largest dimension of activations that take ten times the samples of the method's.
SLOW = 24
OMEGA = math.sqrt(3)  # of the sine with the largest third Hermite coefficient

SINE = Activation("sine", lambda x: np.sin(OMEGA * x), lambda x: OMEGA * np.cos(OMEGA * x))
COSINE = Activation("cosine", np.cos, lambda x: -np.sin(x))


@dataclass(frozen=True)
class Arm:
    """One way to train the neuron; `step` and `batch` multiply those of the setting."""

    phi: Activation
    step: float = 1.0
    batch: int = 1
    overlaps_only: bool = True
    schedule: bool = True
    #: Latents of its own, and a budget in median samples of the method instead of one that all runs reach.
    latent: str = "rademacher"
    correlation: float | None = None
    limited: bool = False
    largest: int = 1_000_000


def arms(setting: str) -> dict[str, Arm]:
    """The arms of a setting; ``"denoiser"`` is the method, in all d dimensions."""
    phi = SINE if setting == FOURTH else activation("tanh")
    method = Arm(phi, overlaps_only=False)
    if setting == CORRELATED:
        return {"denoiser": method, "overlaps-only": Arm(phi), "independent": Arm(phi, correlation=0.0, limited=True)}
    found = {
        "denoiser": method,
        "overlaps-only": Arm(phi),
        "half-step": Arm(phi, step=0.5),
        "double-step": Arm(phi, step=2.0),
        "batch-4x": Arm(phi, step=4.0, batch=4),
    }
    if setting == FOURTH:
        found |= {
            "tanh": Arm(activation("tanh"), largest=32),
            "constant-step": Arm(phi, schedule=False),
            "relu": Arm(activation("relu"), limited=True),
            "cosine": Arm(COSINE, largest=SLOW),
            "no-signal": Arm(phi, latent="gaussian", limited=True),
        }
    return found


def model_of(setting: str, arm: Arm) -> MixedCumulant:
    if setting == FOURTH:
        return MixedCumulant(beta_u=0.0, latent=arm.latent)  # type: ignore[arg-type]
    rho = (1.0 if setting == CORRELATED else 0.0) if arm.correlation is None else arm.correlation
    return MixedCumulant(correlation=rho)


def drift_and_noise(phi: Activation, snr: float, gain: float, direction: str, degree: int) -> tuple[float, float]:
    """-k times the loss's coefficient of m^k, and the gradient's variance a coordinate and sample, in white Gaussian directions."""
    model = MixedCumulant(beta_u=0.0) if direction == "fourth" else MixedCumulant()
    found = diffusion_information_exponent(phi, snr, direction, model=model, gain=gain)  # type: ignore[arg-type]
    (_,), (s,) = noise_levels(snr)
    nodes, weights = gaussian_rule()
    size = s**2 * float(weights @ (phi.function(nodes) ** 2 + phi.derivative(nodes) ** 2))  # type: ignore[misc]
    return -degree * float(found.coefficients[degree]), 4 * gain**2 * size


def options(setting: str, arm: Arm, d: int) -> dict[str, Any]:
    """What `recovery_times` takes for an arm in d dimensions."""
    if setting != FOURTH:
        batch, step, snr, gain = 64, 4.0, 1.0, 0.5
    else:
        batch, snr, gain = 16, 3.0, 0.5
        drift, noise = drift_and_noise(arm.phi, snr, gain, "fourth", 4)
        reference, other = drift_and_noise(SINE, snr, gain, "fourth", 4)
        if drift <= 1e-6:  # no signal to set the step by: as much noise as the method has
            drift, noise = reference, math.sqrt(noise * other)
        step = drift * batch / (KAPPA * noise * (d if arm.schedule else DIMS[FOURTH][0]))
    return {"phi": arm.phi, "snr": snr, "gain": gain, "batch_size": batch * arm.batch, "step_size": step * arm.step}


def budget(setting: str, arm: Arm, d: int) -> int:
    """Samples after which a run is given up."""
    if setting == FOURTH:
        return (10 if arm.limited else 1_000) * d**3
    return (400 if arm.limited else int(400 * math.log(d))) * d


def measured(
    setting: str, d: int, runs: int, select: Callable[[dict[str, Any]], dict[str, Any]], seed: int
) -> Iterator[dict[str, Any]]:
    """Rows of every arm in one dimension, a row a run."""
    direction = 0 if setting == PAIRWISE else 1
    for name, arm in checked(select(arms(setting))).items():
        if d > arm.largest:
            continue
        rng = np.random.default_rng([seed, d, sum(map(ord, setting + name))])
        limit = budget(setting, arm, d)
        common = {"runs": runs, "budget": limit, "overlaps_only": arm.overlaps_only, **options(setting, arm, d)}
        if setting == CORRELATED and name == "denoiser":
            first, times = both_times(model_of(setting, arm), d, rng, **common)
        else:
            first = None
            times = recovery_times(
                model_of(setting, arm), d, direction=direction, threshold=THRESHOLD[setting], random_state=rng, **common
            )
        for run, samples in enumerate(times):
            seen = bool(np.isfinite(samples))
            row = {
                "arm": name,
                "run": str(run),
                "d": d,
                "recovered": float(seen),
                "early": float(samples <= 50 * d),
                "within": float(samples <= 10 * d**3),
                "step_size": common["step_size"],
            }
            if not arm.limited:
                row["samples"] = float(samples) if seen else math.nan
                row["per_log"] = row["samples"] / math.log(d)
            if first is not None:
                row["lag"] = float(samples / first[run])
            yield row


def both_times(
    model: MixedCumulant, d: int, rng: np.random.Generator, *, budget: int, **common: Any
) -> tuple[np.ndarray, np.ndarray]:
    """First passages of u (0.5) and v (0.3) of the same runs."""
    from cameraready.flows.mixed_cumulant import SphericalDenoiser

    given = {key: common[key] for key in ("phi", "snr", "gain", "batch_size", "step_size", "runs")}
    denoiser = SphericalDenoiser(**given)
    denoiser.fit_online(model, budget, n_features=d, random_state=rng, record_every=1, until=(1, THRESHOLD[CORRELATED]))
    # A start that is beyond a threshold already counts from the first batch, as in `recovery_times`.
    first, second = (
        np.maximum(denoiser.weak_recovery(THRESHOLD[setting], place), denoiser.batch_size)
        for place, setting in enumerate((PAIRWISE, CORRELATED))
    )
    return first, second


def checked(chosen: dict[str, Any]) -> dict[str, Arm]:
    """Activations of the user's own as arms; one without coupling at degree four gets a budget that ends."""
    found = {}
    for name, arm in chosen.items():
        if not isinstance(arm, Arm):
            phi = activation(arm, trained=True)
            arm = Arm(phi, limited=drift_and_noise(phi, 3.0, 0.5, "fourth", 4)[0] <= 1e-6)
        found[name] = arm
    return found


# --- peers that have all samples at once ----------------------------------------------------------------------------------------


def principal(x: np.ndarray, u: np.ndarray) -> float:
    """``|w.u|`` of the first principal component."""
    left = np.linalg.svd(x, full_matrices=False)[2][0]
    return abs(float(left @ u))


def independent(x: np.ndarray, v: np.ndarray) -> float:
    """``|w.v|`` of that FastICA component that is nearest to v (in the peer's favour: which one it is would have to be found out)."""
    from sklearn.decomposition import FastICA

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it did not converge, with few samples
        ica = FastICA(whiten="unit-variance", fun="cube", max_iter=60, tol=1e-3, random_state=0).fit(x)
    axes = ica.mixing_ / np.linalg.norm(ica.mixing_, axis=0)
    return float(np.abs(v @ axes).max())


def offline(setting: str, d: int, runs: int, name: str, seed: int) -> Iterator[dict[str, Any]]:
    """First of two sizes running, on a geometric grid, at which the peer recovers the direction; a fresh sample for each size."""
    recover, place, start, factor = (principal, 0, 2, 1.25) if name == "pca" else (independent, 1, 4 * d, 1.5)
    model = model_of(setting, Arm(SINE))
    for run in range(runs):
        rng = np.random.default_rng([seed, d, run, place])
        size, found, before = float(start), math.nan, math.nan
        while size <= 200 * d**2:
            n = round(size)
            directions = random_directions(d, rng)
            if recover(model.sample(n, directions, rng), directions[place]) < THRESHOLD[setting]:
                before = math.nan
            elif math.isnan(before):
                before = float(n)
            else:
                found = before
                break
            size *= factor
        yield {"arm": name, "run": str(run), "d": d, "samples": found, "recovered": float(np.isfinite(found))}
