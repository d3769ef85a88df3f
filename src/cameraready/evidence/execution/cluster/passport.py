"""What driver and host must have in common, so that a trial gives the same rows on both."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cameraready.evidence.execution import key
from cameraready.evidence.execution.worker import load_study
from cameraready.evidence.specs import Spec, SpecError
from cameraready.evidence.study import study_folder

_ENGINE = ("cameraready", "cloudpickle")


@dataclass(frozen=True)
class Terms:
    """What a passport is made from.

    Attributes
    ----------
    reference : str
        ``"package.module:STUDY"``.
    arms : sequence of str
        Those whose libraries must be the same.
    specs : mapping
        Workloads whose content a host has to have itself, by name.
    locks : mapping
        The exact versions in the environments of the study's peers, by peer.
    """

    reference: str
    arms: Sequence[str]
    specs: Mapping[str, Spec] = field(default_factory=dict)
    locks: Mapping[str, str] = field(default_factory=dict)


def passport(terms: Terms) -> dict[str, str]:
    """What is here: versions and digests by name. What cannot be had is there as ``"missing: reason"``."""
    found = {"Python": ".".join(map(str, sys.version_info[:2]))}
    found |= key.versions_of(_ENGINE)
    try:
        study = load_study(terms.reference)
        found[f"the code of {terms.reference}"] = key.code_digest(terms.reference.partition(":")[0])
    except (ImportError, AttributeError, SyntaxError) as error:
        return found | {f"the code of {terms.reference}": f"missing: {error}"}
    folder = study_folder(study)
    keep_locks(terms, found)
    for arm in terms.arms:
        found |= key.arm_versions(study, arm, folder)
    for name, spec in terms.specs.items():
        try:
            found[f"workload {name}"] = spec.content_digest()
        except SpecError as error:
            found[f"workload {name}"] = f"missing: {error}"
    return found


def locks_of(reference: str) -> dict[str, str]:
    """The locks of a study's peers, for `Terms`."""
    from cameraready.evidence.peers.environments import lock_of

    study = load_study(reference)
    return {peer.name: lock_of(peer, study_folder(study)) for peer in study.peers if not peer.lock}


def keep_locks(terms: Terms, found: dict[str, str]) -> None:
    """Put the driver's locks where this host will build its peers from, so that they get the same versions."""
    from cameraready.evidence.peers.environments import place, write_whole

    study = load_study(terms.reference)
    for name, lock in terms.locks.items():
        kept = place(study.peer(name), study_folder(study)).with_suffix(".lock")
        if lock.startswith("#") and not kept.exists():  # without its first line it is no lock, only what was asked for
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_whole(kept, lock)


def differences(here: Mapping[str, str], there: Mapping[str, str]) -> list[str]:
    """How `there` differs from `here`, a phrase for each difference, with what to do about it."""
    return [_phrase(name, value, there.get(name, "absent")) for name, value in here.items() if there.get(name) != value]


def _phrase(name: str, here: str, there: str) -> str:
    if there.startswith("missing: "):
        return f"{name} is missing there ({there.removeprefix('missing: ')}); install or copy it there"
    if name.startswith(("the code of ", "workload ")):
        return f"{name} is another there; install the same version on both"
    return f"{name} is {there} there and {here} here"
