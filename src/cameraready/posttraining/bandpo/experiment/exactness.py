"""A census of the bounds against arbitrary precision, and what they cost in a loss step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mpmath
import torch

from cameraready.evidence import interleave
from cameraready.posttraining.bandpo.bounds import GENERATORS, BandTable, band_bounds
from cameraready.posttraining.bandpo.loss import token_losses

#: Blocks of the census: log-probabilities of each, from p = 1e-12 to p = 1 - 1e-12.
BLOCKS = 12
#: Lower bounds below this count as this in relative errors. Of KL float64 holds them down to 1e-290. Those of the others are 1 - x, and where x
#: is 1, at the edge of the simplex, the last digit of log p moves them by more than they are.
SMALLEST = {"kl": 1e-290, "tv": 1e-6, "chi2": 1e-6}


def probabilities(block: int, count: int) -> list[float]:
    """log p of a block: evenly spaced in the log-odds, both ends of all blocks together at 1e-12 and 1 - 1e-12."""
    ends = 27.631021115928547
    edges = torch.linspace(-ends, ends, BLOCKS + 1, dtype=torch.float64)
    odds = torch.linspace(edges[block].item(), edges[block + 1].item(), count, dtype=torch.float64)
    return torch.nn.functional.logsigmoid(odds).tolist()


def census(block: int, count: int) -> Iterator[dict[str, Any]]:
    """For each divergence and radius the largest errors within the block.

    Columns: ``newton``, ``bisect``, ``given`` (the divergence as the user's own function): largest error of both bounds relative to the
    exact root (see `SMALLEST`); ``table_up`` relative and ``table_down`` absolute, over what the table states for itself in ``table_stated``; ``outside``:
    p * upper - 1, where above 0.
    """
    log_p = probabilities(block, count)
    for divergence in ("kl", "tv", "chi2"):
        for delta in (1e-6, 1e-3, 0.05, 0.5):
            exact = [exact_bounds(divergence, each, delta) for each in log_p]
            at = torch.tensor(log_p, dtype=torch.float64)
            row: dict[str, Any] = {"run": block, "arm": f"band-{divergence}", "radius": delta}
            for name, options in (
                ("newton", {"divergence": divergence}),
                ("bisect", {"divergence": divergence, "solver": "bisect"}),
                ("given", {"divergence": GENERATORS[divergence]}),
            ):
                found = band_bounds(at, delta=delta, max_ratio=None, **options)
                row[name] = max(_errors(found, exact, SMALLEST[divergence]))
            table = BandTable(divergence, delta)
            lower, upper = table(at)
            row["table_stated"] = max(table.tolerance)
            row["table_down"] = max(abs(float(low - pair[0])) for low, pair in zip(lower.tolist(), exact, strict=True))
            row["table_up"] = max(
                abs(float(high / pair[1] - 1)) for high, pair in zip(upper.tolist(), exact, strict=True)
            )
            row["outside"] = max(
                0.0,
                float((at.exp() * band_bounds(at, divergence=divergence, delta=delta, max_ratio=None)[1]).max()) - 1,
            )
            yield row


def rooms(block: int) -> Iterator[dict[str, Any]]:
    """How much a token's probability may grow, at delta = 0.05 without a cap, and by clip 0.2; p from 0.08 down by a third from block to block."""
    p = 0.08 * 0.66**block
    for arm, upper in (
        ("band-kl", band_bounds(torch.tensor([p], dtype=torch.float64).log(), max_ratio=None)[1].item()),
        ("clip", 1.2),
    ):
        yield {"run": block, "arm": arm, "p": p, "room": p * (upper - 1)}


def exact_bounds(divergence: str, log_p: float, delta: float) -> tuple[mpmath.mpf, mpmath.mpf]:
    """Both bounds with 40 digits; of KL by bisection in the log-odds, of the others in closed form."""
    with mpmath.workdps(40):
        log, radius = mpmath.mpf(log_p), mpmath.mpf(delta)
        p, q = mpmath.exp(log), -mpmath.expm1(log)
        if divergence != "kl":
            step = radius / p if divergence == "tv" else mpmath.sqrt(radius * q / p)
            return max(mpmath.mpf(0), 1 - step), min(1 / p, 1 + step)

        def root(sign: int) -> mpmath.mpf:
            def gap(d: mpmath.mpf) -> mpmath.mpf:
                token, others = p / (p + q * mpmath.exp(-sign * d)), q / (q + p * mpmath.exp(sign * d))
                return p * mpmath.log(p / token) + q * mpmath.log(q / others) - radius

            high = mpmath.mpf(1)
            while gap(high) < 0:
                high *= 2
            low = high / 2 if high > 1 else mpmath.mpf(0)
            for _ in range(60):
                middle = (low + high) / 2
                low, high = (middle, high) if gap(middle) < 0 else (low, middle)
            return 1 / (p + q * mpmath.exp(-sign * low))

        return root(-1), root(1)


def _errors(found: Any, exact: Any, smallest: float) -> Iterator[float]:
    for lower, upper, (low, high) in zip(found[0].tolist(), found[1].tolist(), exact, strict=True):
        yield float(abs(lower - low) / max(low, mpmath.mpf(smallest)))
        yield float(abs(upper - high) / high)


def step_times(blocks: int, sequences: int, length: int, vocabulary: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Seconds of a loss step, and of its clipped objective alone, band (KL, table) against constants; a block is a round of interleaved runs.

    The step: log-softmax of float32 logits (sequences x length, vocabulary), log-probabilities of the sampled tokens, the clipped
    objective, its mean, and backward to the logits. The model itself, which takes most of a real step, is not in it.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = sequences * length
    logits = torch.randn(tokens, vocabulary, generator=generator) * 3
    sampled = torch.distributions.utils.logits_to_probs(logits).multinomial(1, generator=generator)
    with torch.no_grad():
        old = torch.log_softmax(logits, -1).gather(1, sampled)[:, 0] + 0.1 * torch.randn(tokens, generator=generator)
        old = old.clamp(max=0.0)
    advantages = torch.randn(tokens, generator=generator)
    logits.requires_grad_()

    def bounds(arm: str) -> tuple[Any, Any]:
        return band_bounds(old, solver="table") if arm == "band-kl" else (0.8, 1.2)

    def step(arm: str) -> None:
        logits.grad = None
        logps = torch.log_softmax(logits, -1).gather(1, sampled)[:, 0]
        token_losses(logps, old, advantages, *bounds(arm)).mean().backward()

    moved = old + 0.1 * torch.randn(tokens, generator=generator)

    def alone(arm: str) -> None:
        logps = moved.clone().requires_grad_()
        token_losses(logps, old, advantages, *bounds(arm)).mean().backward()

    for what, work, repeats in (("step", step, 1), ("clip alone", alone, 20)):
        for name in ("band-kl", "clip"):
            work(name)
        for block in range(blocks):
            arms: dict[str, Callable[[], None]] = {
                name: lambda name=name, work=work, repeats=repeats: [work(name) for _ in range(repeats)] and None
                for name in ("band-kl", "clip")
            }
            for row in interleave(arms, warmup=0, repeats=rounds):
                yield {"run": block, "what": what, "arm": row["arm"], "seconds": row["seconds"] / repeats}
