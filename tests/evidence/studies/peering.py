"""A study one of whose arms is a peer."""

from __future__ import annotations

from typing import Any

from cameraready.evidence.study import Peer, Study


def trial(workload: Any, ctx: Any, *, arm: str, breaks: bool = False) -> dict[str, Any]:
    peer = ctx.peer("local")
    return {
        "answer": peer.end_yourself() if breaks else peer.double(21),
        "pid": peer.process_id(),
        "seed_seen": ctx.seed,
    }


STUDY = Study(
    open=lambda spec: None,
    workloads={"smoke": ["plain"], "desk": ["plain"]},
    plan=lambda tier, workload: [],
    trial=trial,
    method="ours",
    arms="arm",
    block="seed",
    libraries={"theirs": ["local"]},
    peers=[Peer("local==1", script="peering_peer.py")],
)
