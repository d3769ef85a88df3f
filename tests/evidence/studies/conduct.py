"""A study whose trials behave well or badly as their condition says."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cameraready.evidence.study import Study


def open_workload(spec: Any) -> dict[str, Any]:
    if spec.text == "closed":
        raise FileNotFoundError("this workload is closed")
    if spec.text == "deadly":
        os.kill(os.getpid(), signal.SIGSEGV)
    if spec.text.startswith("big:"):
        try:  # whoever comes second is killed, as by a system that is out of memory
            os.link(spec.text[4:], spec.text[4:] + ".taken")
        except FileExistsError:
            os.kill(os.getpid(), signal.SIGKILL)
    return {"name": spec.text, "opened_by": os.getpid()}


def trial(workload: Mapping[str, Any], ctx: Any, *, does: str = "count", value: Any = 0, **more: Any) -> Any:
    return globals()[f"do_{does}"](workload, ctx, value, **more)


def do_count(workload: Any, ctx: Any, value: Any) -> dict[str, Any]:
    return {"value": value, "square": value * value, "seed_seen": ctx.seed}


def do_count_on_file(workload: Any, ctx: Any, value: Any, file: str) -> dict[str, Any]:
    """Leaves a line for each time that it was run to the end."""
    time.sleep(0.002)
    with open(file, "a") as log:
        log.write(f"{value}\n")
    return {"value": value}


def do_nap(workload: Any, ctx: Any, value: Any, file: str) -> dict[str, Any]:
    time.sleep(0.001)
    return {"value": value}


def do_rows(workload: Any, ctx: Any, value: Any) -> Iterator[dict[str, Any]]:
    for step in range(value):
        yield {"step": step, "loss": 1.0 / (step + 1)}


def do_who(workload: Any, ctx: Any, value: Any) -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "opened_by": workload["opened_by"],
        "began": time.time(),
        "omp": os.environ["OMP_NUM_THREADS"],
    }


def do_span(workload: Any, ctx: Any, value: Any) -> dict[str, Any]:
    began = time.monotonic()
    time.sleep(value)
    return {"pid": os.getpid(), "began": began, "ended": time.monotonic()}


def do_raise(workload: Any, ctx: Any, value: Any) -> None:
    raise ZeroDivisionError(f"divided {value} by zero")


def do_leave(workload: Any, ctx: Any, value: Any) -> None:
    sys.exit(3)


def do_hang(workload: Any, ctx: Any, value: Any) -> None:
    time.sleep(1000)


def do_hang_hard(workload: Any, ctx: Any, value: Any) -> None:
    """Holds the interpreter so that no Python code in this process can run."""
    sum(range(10**13))


def do_exit(workload: Any, ctx: Any, value: Any) -> None:
    os._exit(value)


def do_crash(workload: Any, ctx: Any, value: Any) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def do_hoard(workload: Any, ctx: Any, value: Any) -> None:
    """Asks for `value` MiB at once."""
    hoard = bytearray(value * 2**20)
    raise AssertionError(f"{len(hoard)} bytes were granted")


def do_hoard_shared(workload: Any, ctx: Any, value: Any) -> dict[str, Any]:
    """Holds `value` MiB of a kind that the kernel's limit on data does not cover."""
    hoard = mmap.mmap(-1, value * 2**20)
    for start in range(0, value * 2**20, 2**20):
        hoard[start : start + 2**20] = b"x" * 2**20
        time.sleep(0.001)
    return {"value": len(hoard)}


def do_hoard_in_child(workload: Any, ctx: Any, value: Any) -> dict[str, Any]:
    """Has a child process, which lifts the limit that it inherits, hold `value` MiB."""
    limit = "import resource as r; hard = r.getrlimit(r.RLIMIT_DATA)[1]; r.setrlimit(r.RLIMIT_DATA, (hard, hard))"
    code = f"{limit}; import time; hoard = bytearray({value} * 2**20); time.sleep(1000)"
    subprocess.run([sys.executable, "-c", code], check=True)
    return {"value": 0}


def do_touch(workload: Any, ctx: Any, value: Any) -> dict[str, Any]:
    """Holds `value` MiB for a moment."""
    held = bytearray(value * 2**20)
    held[:: 2**12] = b"x" * len(held[:: 2**12])
    return {"held": len(held)}


def do_leave_child(workload: Any, ctx: Any, value: Any, file: str) -> None:
    """Starts a process that ignores polite signals, notes its id, and hangs."""
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)"
    child = subprocess.Popen([sys.executable, "-c", code])
    Path(file).write_text(f"{os.getpid()} {child.pid}")
    time.sleep(1000)


def do_print(workload: Any, ctx: Any, value: Any) -> dict[str, Any]:
    print("noise on standard output", flush=True)
    os.write(2, b"noise on standard error\n")
    return {"value": value}


def do_scratch(workload: Any, ctx: Any, value: Any) -> dict[str, Any]:
    empty = not list(ctx.scratch.iterdir())
    (ctx.scratch / "deep" / "er").mkdir(parents=True)
    (ctx.scratch / "deep" / "file").write_text("x")
    return {"empty": empty, "folder": str(ctx.scratch)}


def do_own(workload: Any, ctx: Any, value: Any) -> dict[str, Any]:
    arms = ctx.select({"theirs": lambda x: -x})
    return {name: arm(value) for name, arm in arms.items()}


def do_return(workload: Any, ctx: Any, value: Any) -> Any:
    """Returns something from the table below."""
    import numpy as np

    return {
        "scalars": {"a": np.float32(0.1), "b": np.int64(3), "c": np.bool_(True), "d": np.array(2.5), "e": np.str_("x")},
        "special": {"nan": float("nan"), "inf": float("inf"), "ninf": -float("inf"), "zero": -0.0, "none": None},
        "array": {"a": np.zeros(3)},
        "complex": {"a": 1j},
        "huge": {"a": 2**80},
        "nothing": [],
        "engine": {"status": 1},
        "contradiction": {"value": "another"},
        "prepared": {"total": float(np.sum(ctx.prepared.get("numbers", np.nan)))},
    }[value]


def prepare(workload: Mapping[str, Any], ctx: Any) -> dict[str, Any]:
    import numpy as np

    if workload["name"] == "objects":
        return {"numbers": np.array([object()])}
    if workload["name"] == "unready":
        raise ValueError("cannot be prepared")
    return {"numbers": np.arange(5.0), "names": np.array(["a", "b"])}


STUDY = Study(
    open=open_workload,
    workloads={"smoke": ["plain"], "desk": ["plain"]},
    plan=lambda tier, workload: [],
    trial=trial,
    method="count",
    arms="does",
    block="seed",
    prepare=prepare,
)
