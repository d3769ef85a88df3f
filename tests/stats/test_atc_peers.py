"""Our exact scan against the packages with the same one, in environments of their own."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cameraready.stats.atc as package
from cameraready.stats.atc import atc


def streams() -> list[np.ndarray]:
    generator = np.random.default_rng(4)
    noise = generator.normal(size=3_000)
    return [noise, noise + 3.0 * (np.arange(3_000) > 1_200), np.arange(300.0), generator.standard_cauchy(500)]


def same_statistics(remote: Any, function: str) -> None:
    for x in streams():
        theirs = getattr(remote, function)(x)["statistic"]
        ours = atc(x, threshold=1e90).statistic
        np.testing.assert_allclose(ours[1:] ** 2, theirs[1:], rtol=1e-6, atol=1e-6)


def opened(name: str) -> Any:
    from cameraready.evidence.peers.environments import open_peer
    from cameraready.stats.atc.study import STUDY

    return open_peer(STUDY.peer(name), Path(package.__file__).parent)


@pytest.mark.peers
def test_changepoint_online_has_the_same_statistics() -> None:
    with opened("changepoint-online") as remote:
        same_statistics(remote, "changepoint_stream")


@pytest.mark.peers
@pytest.mark.skipif(
    not (shutil.which("cmake") and Path("/usr/include/libqhullcpp").is_dir()),
    reason="focus-cpt is built from source, with cmake and Qhull's headers (Debian: libqhull-dev)",
)
def test_focus_cpt_has_the_same_statistics() -> None:
    with opened("focus-cpt") as remote:
        same_statistics(remote, "focus_batch")
        same_statistics(remote, "focus_stream")
