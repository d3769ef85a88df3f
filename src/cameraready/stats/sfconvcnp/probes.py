"""What the study measures without training: gaps of identities that hold exactly, and how time and memory grow."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from cameraready.evidence import interleave
from cameraready.stats.sfconvcnp.layers import SetFourierConv
from cameraready.stats.sfconvcnp.network import SFConvCNP

SHIFTS = (3.0, 15.0, -1e4)
QUERIES = 256


def gaps(instance: int) -> dict[str, float]:
    """Largest deviations from what must hold exactly, for a random network and random tasks of one or two dimensions."""
    draw = torch.Generator().manual_seed(instance)
    dim = 1 + instance % 2
    grid: dict[str, Any] = (
        {"max_freq": 4.9, "freq_resolution": 0.1} if dim == 1 else {"max_freq": 1.5, "freq_resolution": 0.25}
    )
    model = SFConvCNP(
        dim, width=16, n_blocks=2, groups=4, volterra_rank=(None, 2)[instance // 2 % 2], generator=draw, aliasing="ignore", **grid
    )  # fmt: skip
    reach = 0.45 / grid["freq_resolution"]  # the claim's range: less than half the period

    def inputs(n: int) -> Tensor:
        # Multiples of 1/256, which float32 holds after the shifts too: what is tested is the network, not the inputs.
        return torch.round(256 * reach * torch.rand(4, n, dim, generator=draw)) / 256

    xc, yc, xt = inputs(12), torch.randn(4, 12, 1, generator=draw), inputs(20)
    found = {
        f"gap{bits}": _shift_gap(model.to(dtype), xc.to(dtype), yc.to(dtype), xt.to(dtype)) for bits, dtype in DTYPES
    }
    moved = xc.double().clone()
    moved[:, 0] += 1 / grid["freq_resolution"]
    found["period_gap"] = _difference(model, (moved, yc.double(), xt.double()), (xc.double(), yc.double(), xt.double()))
    found["closed_gap"] = _closed_form_gap(dim, draw)
    return found


DTYPES = ((32, torch.float32), (64, torch.float64))


def _shift_gap(model: nn.Module, xc: Tensor, yc: Tensor, xt: Tensor) -> float:
    return max(_difference(model, (xc + shift, yc, xt + shift), (xc, yc, xt)) for shift in SHIFTS)


@torch.no_grad()
def _difference(model: nn.Module, first: tuple[Tensor, ...], second: tuple[Tensor, ...]) -> float:
    one, two = model(*first), model(*second)
    return float(torch.maximum((one.mean - two.mean).abs().max(), (one.stddev - two.stddev).abs().max()))


@torch.no_grad()
def _closed_form_gap(dim: int, draw: torch.Generator) -> float:
    """A single point through an identity matrix must come out as the Gaussian of its envelope."""
    length = 0.3 + 0.2 * float(torch.rand(1, generator=draw))
    layer = SetFourierConv(dim, 1, 1, 3.0, 0.1, lengthscale=length, aliasing="ignore").double()
    layer.weights[0].zero_()
    layer.weights[0][:, 0, 1, 0, 0] = 1.0
    query = 4 * torch.rand(1, 50, dim, generator=draw).double() - 2
    out = layer(torch.ones(1, 1, 1).double(), query, torch.zeros(1, 1, dim).double())
    expected = torch.exp(-(query**2).sum(-1) / (2 * length**2))
    return float((out[..., 0] - expected).abs().max())


# --- time and memory ------------------------------------------------------------------------------------------------------


def prediction(model: nn.Module, n: int) -> Callable[[], None]:
    """One prediction at 256 queries from a context of `n` points in [-3, 3]."""
    draw = torch.Generator().manual_seed(n)
    xc, xt = (6 * torch.rand(1, size, 1, generator=draw) - 3 for size in (n, QUERIES))
    yc = torch.randn(1, n, 1, generator=draw)

    def run() -> None:
        with torch.no_grad():
            model(xc, yc, xt)

    return run


def timed(models: dict[str, nn.Module], sizes: dict[str, tuple[int, ...]], first: int, rounds: int) -> list[dict]:
    """Seconds of a prediction for every model and size, in turn, `rounds` times over."""
    calls = {f"{name} {n}": prediction(model, n) for name, model in models.items() for n in sizes[name]}
    rows = []
    for row in interleave(calls, warmup=1, repeats=rounds):
        name, n = row["arm"].split()
        rows.append({"model": name, "n": int(n), "task": f"round-{first + row['repeat']}", "seconds": row["seconds"]})
    return rows


def peak_bytes(call: Callable[[], None], scratch: Path) -> int:
    """Most memory that tensors of a call held at one time, by torch's own record of its allocations."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        call()
    path = scratch / "trace.json"
    record.export_chrome_trace(str(path))
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("name") == "[memory]"]
    path.unlink()
    held = most = 0
    for event in sorted(events, key=lambda e: e["ts"]):
        held += event["args"]["Bytes"]
        most = max(most, held)
    return most
