"""What is said where a cluster cannot be had as it was asked for."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from cameraready.evidence.checking import UsageError, check
from tests.evidence.cluster.machines import free_port

STUDY = "tests.evidence.studies.roaming:STUDY"


def test_nobody_at_the_address() -> None:
    with pytest.raises(UsageError, match=r"no Dask scheduler answers at tcp://127\.0\.0\.1:\d+ \("):
        check(STUDY, scheduler=f"127.0.0.1:{free_port()}", quiet=True)


@pytest.mark.parametrize("scheduler", ["", 8786, "nothing://here:1"])
def test_what_is_no_address(scheduler: Any) -> None:
    with pytest.raises(UsageError, match="scheduler"):
        check(STUDY, scheduler=scheduler, quiet=True)


def test_the_smoke_tier_stays_here() -> None:
    with pytest.raises(UsageError, match="smoke tier runs in this process"):
        check(STUDY, tier="smoke", scheduler="tcp://127.0.0.1:1")


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(UsageError, match=r'distributed: pip install "cameraready\[study,cluster\]"'):
        check(STUDY, scheduler="tcp://127.0.0.1:1")


def test_a_dry_run_asks_no_scheduler() -> None:
    plan = check(STUDY, scheduler="tcp://127.0.0.1:1", dry_run=True)
    assert plan.trials == 60
