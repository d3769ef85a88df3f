"""What the tests of peers call on the far side."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time


def echo(value):
    return value


def surroundings():
    return {
        "path": sys.path,
        "modules": sorted(sys.modules),
        "variables": dict(os.environ),
        "python": sys.executable,
        "pid": os.getpid(),
        "group": os.getpgid(0),
    }


def batch(game, n_rows, n_players, times=1):
    import numpy as np

    rows = np.random.default_rng(0).random((n_rows, n_players)) < 0.5
    started = time.perf_counter()
    for _ in range(times):
        values = game(rows)
    return {
        "rows": rows,
        "values": values,
        "waited": game.seconds,
        "calls": game.calls,
        "elapsed": time.perf_counter() - started,
    }


def composed(outer, inner, value, *, scale):
    return outer(inner(value)) * scale


def raise_key_error():
    raise KeyError("no such player")


def leave():
    raise SystemExit("done here")


def swallow(game):
    try:
        game(1)
    except RuntimeError as error:
        return f"swallowed {error}"


def unsendable():
    return object()


def print_and_die(status):
    print("last words")
    print("to the error stream", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(status)


def die_by_signal():
    os.kill(os.getpid(), signal.SIGKILL)


def hold_the_interpreter():
    """Compiled code that never lets another thread run."""
    return sum(range(10**12))


def leave_children():
    """Two children, one forked and one started, that would sleep for an hour; returns their ids."""
    forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(3600,))
    forked.start()
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    return [forked.pid, started.pid]
