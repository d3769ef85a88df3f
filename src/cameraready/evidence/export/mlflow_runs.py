"""Results as a run in MLflow: parameters, a metric a number of each verdict, tags, and the files as artifacts."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cameraready.evidence.export import Written
from cameraready.evidence.export.frames import claims_frame, csv_bytes
from cameraready.evidence.export.landing import make_folder
from cameraready.evidence.export.soundness import digest
from cameraready.evidence.outcomes import Verdict
from cameraready.evidence.report import page_name, render, wording
from cameraready.evidence.subject import UsageError

if TYPE_CHECKING:
    from cameraready.evidence.results import Result

DIGEST = "cameraready.digest"
DATABASE, ARTIFACTS = "mlflow.db", "mlflow-artifacts"
PARAMETER_LENGTH, TAG_LENGTH = 6_000, 5_000  # MLflow refuses longer ones; the artifacts hold the whole
BATCH = 100  # as many as MLflow takes at once
NUMBERS = ("estimate", "low", "high", "blocks", "failed_trials", "lost_blocks")


def log_run(result: Result, out: Path, tracking_uri: str | None = None) -> Written:
    """Log `result` as one run of the experiment ``cameraready/METHOD``. The same result is never logged twice.

    Parameters
    ----------
    tracking_uri : str
        A tracking server or a database; by default ``MLFLOW_TRACKING_URI``, else ``mlflow.db`` in the folder `out`,
        with artifacts beside it.

    Raises
    ------
    ModuleNotFoundError
        If MLflow is not installed.
    UsageError
        If the experiment was deleted in MLflow.
    """
    client_class = _import_client()
    from mlflow.exceptions import MlflowException

    uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or ""
    artifacts = None
    if not uri:
        make_folder(out)
        _make_database(client_class, (out / DATABASE).absolute())
        uri = f"sqlite:///{(out / DATABASE).absolute()}"
        artifacts = (out / ARTIFACTS).absolute().as_uri()
    mark = digest(result)
    try:
        client = client_class(tracking_uri=uri)
        experiment = _experiment(client, f"cameraready/{result.card.slug}", artifacts)
        known = _find(client, experiment, mark)
        run_id = known or _log(client, experiment, result, mark)
    except MlflowException as error:
        raise RuntimeError(f"MLflow refuses to log to {uri}: {error}") from error
    place = str(out / DATABASE) if artifacts else f"{uri} (run {run_id})"
    again = f"This result was there already, as run {run_id}; nothing was added. " if known else ""
    return Written([place], f'{again}Look at it: mlflow ui --backend-store-uri "{uri}" (pip install mlflow)')


def _make_database(client_class: Any, place: Path) -> None:
    """A database with MLflow's tables, where there is none. One whose making was broken off can never be used again."""
    if place.exists():
        return
    aside = place.with_name(f".{place.name}.{os.getpid()}")
    try:
        client_class(tracking_uri=f"sqlite:///{aside}").search_experiments(max_results=1)
        aside.replace(place)
    finally:
        aside.unlink(missing_ok=True)


def _import_client() -> Any:
    # MLflow reports its use to its makers unless told not to; an export keeps to the tracking server.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # seven take minutes to say that an address is wrong
    try:
        from mlflow import MlflowClient
    except ModuleNotFoundError as error:
        raise _missing(error) from error
    try:
        import sqlalchemy  # noqa: F401  (what MLflow's small distribution needs for a local database)
    except ModuleNotFoundError as error:
        raise _missing(error) from error
    return MlflowClient


def _missing(error: ModuleNotFoundError) -> ModuleNotFoundError:
    return ModuleNotFoundError(f'{error.name} is not installed: pip install "cameraready[mlflow]"', name=error.name)


def _experiment(client: Any, name: str, artifacts: str | None) -> str:
    found = client.get_experiment_by_name(name)
    if found is None:
        return str(client.create_experiment(name, artifact_location=artifacts))
    if found.lifecycle_stage != "active":
        raise UsageError(f"the experiment {name} was deleted in MLflow; restore it there, or clear it with `mlflow gc`")
    return str(found.experiment_id)


def _find(client: Any, experiment: str, mark: str) -> str | None:
    """The finished run with this digest; what an interrupted export left behind is deleted."""
    whole = None
    for run in client.search_runs([experiment], filter_string=f"tags.`{DIGEST}` = '{mark}'"):
        if run.info.status == "FINISHED":
            whole = run.info.run_id
        else:
            client.delete_run(run.info.run_id)
    return whole


def _log(client: Any, experiment: str, result: Result, mark: str) -> str:
    from mlflow.entities import Metric, Param, RunTag

    began = _milliseconds(result.started)
    run = client.create_run(experiment, start_time=began, tags={DIGEST: mark}, run_name=run_name(result))
    run_id = str(run.info.run_id)
    try:
        end = (began or run.info.start_time) + round(1000 * result.seconds)
        for part in batched(metrics(result)):
            client.log_batch(run_id, metrics=[Metric(name, value, end, 0) for name, value in part])
        for pairs in batched(parameters(result).items()):
            client.log_batch(run_id, params=[Param(name, value) for name, value in pairs])
        for pairs in batched(tags(result).items()):
            client.log_batch(run_id, tags=[RunTag(name, value) for name, value in pairs])
        with tempfile.TemporaryDirectory() as folder:
            _write_artifacts(result, Path(folder))
            client.log_artifacts(run_id, folder)
        client.set_terminated(run_id, end_time=end)
    except BaseException:
        client.delete_run(run_id)
        raise
    return run_id


def run_name(result: Result) -> str:
    """``oddshap-desk 2026-11-30``."""
    name = page_name(result)
    return " ".join((name if result.tier in name.split("-") else f"{name}-{result.tier}", result.started[:10])).strip()


def batched(items: Iterable[tuple[str, Any]]) -> Iterator[list[tuple[str, Any]]]:
    """`items` in lists that MLflow takes at once."""
    rest = iter(items)
    while part := list(itertools.islice(rest, BATCH)):
        yield part


def _milliseconds(started: str) -> int | None:
    import datetime

    try:
        return round(datetime.datetime.fromisoformat(started).timestamp() * 1000)
    except ValueError:
        return None


def _write_artifacts(result: Result, folder: Path) -> None:
    result.save(folder)  # results.json, results.parquet
    (folder / "claims.csv").write_bytes(csv_bytes(claims_frame(result)))
    (folder / "report.html").write_text(render(result), encoding="utf-8")


# --- names and values that MLflow takes -----------------------------------------------------------------------------


def parameters(result: Result) -> dict[str, str]:
    """What the run was: tier, commit, command, workloads, and the environment as ``environment/NAME``."""
    found = {
        "tier": result.tier,
        "commit": result.commit,
        "command": result.command,
        "workloads": ", ".join(str(load.get("name", "")) for load in result.workloads),
        "seconds": str(round(result.seconds, 1)),
        **{f"environment/{_segment(name)}": value for name, value in result.environment.items()},
    }
    return {name: _cut(value, PARAMETER_LENGTH) for name, value in found.items() if value}


def tags(result: Result) -> dict[str, str]:
    """The answer, the paper, and the verdict of each claim on each workload as ``verdict/3a/digits``."""
    card = result.card
    found = {
        "mlflow.note.content": result.answer,  # what MLflow's pages show as the description
        "answer": result.answer,
        "method": card.slug,
        "paper": card.url,
        "incomplete": str(result.incomplete).lower(),
        "notes": json.dumps(result.notes, ensure_ascii=False) if result.notes else "",
        **{f"verdict/{place}": wording.word(verdict) for place, verdict in places(result.claims_shown).items()},
    }
    return {name: _cut(value, TAG_LENGTH) for name, value in found.items() if value}


def metrics(result: Result) -> Iterator[tuple[str, float]]:
    """``claim-3a/digits/estimate``, ``low``, ``high``, ``blocks`` ... of every verdict, where finite."""
    for place, verdict in places(result.claims_shown).items():
        for name in NUMBERS:
            value = getattr(verdict, name)
            told = value != 0 or name not in ("failed_trials", "lost_blocks")
            if told and value is not None and math.isfinite(value) and verdict.verdict != "untested":
                yield f"claim-{place}/{name}", float(value)


def places(verdicts: Sequence[Verdict]) -> Mapping[str, Verdict]:
    """Verdicts by ``3a/digits``: label and workload, in characters that MLflow takes, each name once."""
    found: dict[str, Verdict] = {}
    for verdict in verdicts:
        base = "/".join(_segment(part) for part in (verdict.label, verdict.workload) if part)
        name, twin = base, 2
        while name in found:
            name, twin = f"{base}-{twin}", twin + 1
        found[name] = verdict
    return found


def _segment(text: str) -> str:
    """`text` without what MLflow refuses in a name; slashes too, for they would open a level."""
    return re.sub(r"[^A-Za-z0-9_. :-]", "-", text).strip(". ")[:80] or "unnamed"


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"
