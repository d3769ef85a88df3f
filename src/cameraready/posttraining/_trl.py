"""The door to TRL: its module, or one sentence that says what to install. TRL is imported here, when a trainer is asked for, and not before."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

#: The oldest TRL that the room's trainers work with, and the newest that they were tested with.
OLDEST, NEWEST = "1.0.0", "1.16.0"
_INSTALL = 'pip install "cameraready[posttraining]"'


def import_trl() -> ModuleType:
    """The module ``trl``.

    Returns
    -------
    module
        With `GRPOTrainer`, `GRPOConfig`, `SFTTrainer`, `SFTConfig` and whatever else TRL exports.

    Raises
    ------
    ImportError
        TRL, or something that TRL needs, is not installed, or TRL is older than `OLDEST`; the message says what to install.
    """
    try:
        trl = import_module("trl")
    except ModuleNotFoundError as error:
        missing = error.name or "trl"
        if missing.partition(".")[0] == "trl":
            raise ImportError(f"Training needs TRL: {_INSTALL}", name="trl") from None
        raise ImportError(f"TRL needs {missing}, which is not installed: {_INSTALL}", name=missing) from error
    check_version(str(trl.__version__))
    return trl


def check_version(version: str) -> None:
    """Raise an ImportError for a version of TRL before `OLDEST`; later ones pass, releases in development too.

    Raises
    ------
    ImportError
    """
    if _release(version) < _release(OLDEST):
        raise ImportError(
            f"TRL {version} is installed, and cameraready's trainers need {OLDEST} or newer (tested up to {NEWEST}): "
            f'pip install -U "trl>={OLDEST}"',
            name="trl",
        )


def _release(version: str) -> tuple[int, ...]:
    """``(1, 16, 0)`` of ``"1.16.0.dev0"``: the leading numbers, three of them."""
    numbers: list[int] = []
    for part in version.partition("+")[0].split("."):
        if not part.isdecimal():
            break
        numbers.append(int(part))
    return (*numbers, 0, 0, 0)[:3]
