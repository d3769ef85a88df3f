"""MLflow: what its own client reads back, once for each result, and nothing sent to anybody."""

import json
import math
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from cameraready.evidence.export import export, mlflow_runs
from cameraready.evidence.subject import UsageError

mlflow = pytest.importorskip("mlflow", reason="the extra mlflow is not installed")


@pytest.fixture(scope="module")
def made(tmp_path_factory, result, nasty):
    """A database with an ordinary result exported twice, another one, and a hostile one; and its client."""
    out = tmp_path_factory.mktemp("mlflow")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        written = [export(r, "mlflow", out) for r in (result, result, replace(result, answer="Another."), nasty)]
    return out, written, mlflow.MlflowClient(tracking_uri=f"sqlite:///{out / 'mlflow.db'}")


def run_of(made, result):
    client = made[-1]
    experiment = client.get_experiment_by_name("cameraready/oddshap")
    mark = mlflow_runs.digest(result)
    runs = client.search_runs([experiment.experiment_id], filter_string=f"tags.`cameraready.digest` = '{mark}'")
    assert len(runs) == 1
    return runs[0]


def test_the_same_result_is_one_run_however_often_it_is_exported(made, result):
    out, written, client = made
    assert written[0].places == [str(out / "mlflow.db")]
    assert "nothing was added" in written[1].hint
    experiment = client.get_experiment_by_name("cameraready/oddshap")
    assert len(client.search_runs([experiment.experiment_id])) == 3
    assert run_of(made, result).info.status == "FINISHED"


def test_every_number_of_every_verdict_is_a_metric(made, result):
    metrics = run_of(made, result).data.metrics
    for verdict in result.claims_shown:
        for name in ("estimate", "low", "high", "blocks"):
            value = getattr(verdict, name)
            key = f"claim-{verdict.label}/{verdict.workload}/{name}"
            if verdict.verdict != "untested" and value is not None and math.isfinite(value):
                assert metrics[key] == value
            else:
                assert key not in metrics


def test_parameters_and_tags_say_what_ran_and_what_came_out(made, result):
    run = run_of(made, result)
    assert run.data.params["tier"] == "desk"
    assert run.data.params["commit"] == result.commit
    assert run.data.params["command"] == result.command
    assert run.data.params["workloads"] == "breast-cancer, digits"
    assert run.data.params["environment/numpy"] == "2.4.6"
    assert run.data.tags["answer"] == result.answer
    for verdict in result.claims_shown:
        place = "/".join(filter(None, (verdict.label, verdict.workload)))
        assert run.data.tags[f"verdict/{place}"].startswith(verdict.verdict)
    assert run.info.end_time - run.info.start_time == round(1000 * result.seconds)


def test_artifacts_are_the_files_themselves(made, result, tmp_path):
    _, _, client = made
    folder = Path(client.download_artifacts(run_of(made, result).info.run_id, "", str(tmp_path)))
    assert {path.name for path in folder.iterdir()} == {"claims.csv", "report.html", "results.json", "results.parquet"}
    assert json.loads((folder / "results.json").read_text()) == result.to_json()
    assert_frame_equal(pl.read_parquet(folder / "results.parquet"), result.rows)
    assert result.answer in (folder / "report.html").read_text()


def test_hostile_names_and_numbers_are_logged_where_they_can_be(made, nasty):
    run = run_of(made, nasty)
    assert all(math.isfinite(value) for value in run.data.metrics.values())
    assert not any(".." in key for key in run.data.metrics)
    assert len([key for key in run.data.tags if key.startswith("verdict/")]) == len(nasty.claims)


def another(result, slug, **changes):
    """`result` as another method's, which has an experiment of its own in the same database."""
    return replace(result, card=replace(result.card, slug=slug), **changes)


def test_what_an_interrupted_export_left_is_cleared_away(made, result, tmp_path):
    out, _, client = made
    uri = f"sqlite:///{out / 'mlflow.db'}"
    broken = another(result, "broken")
    experiment = client.create_experiment("cameraready/broken", artifact_location=(tmp_path / "a").as_uri())
    half = client.create_run(experiment, tags={mlflow_runs.DIGEST: mlflow_runs.digest(broken)})
    broken.export("mlflow", tmp_path / "unused", tracking_uri=uri)
    runs = client.search_runs([experiment])
    assert [run.info.status for run in runs] == ["FINISHED"]
    assert client.get_run(half.info.run_id).info.lifecycle_stage == "deleted"
    assert not (tmp_path / "unused").exists()
    client.delete_experiment(experiment)
    with pytest.raises(UsageError, match="was deleted in MLflow"):
        broken.export("mlflow", tmp_path, tracking_uri=uri)


def test_more_verdicts_than_mlflow_takes_at_once(made, result, monkeypatch):
    out, _, client = made
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    claims = [replace(result.claims[1], workload=f"place-{n}") for n in range(250)]
    another(result, "many", claims=claims).export("mlflow", out)
    (run,) = client.search_runs([client.get_experiment_by_name("cameraready/many").experiment_id])
    assert sum(key.startswith("verdict/") for key in run.data.tags) == 250


def test_equal_names_stay_apart(result):
    first = result.claims[0]
    twins = [replace(first, workload="a/b"), replace(first, workload="a-b"), replace(first, workload="a-b-2")]
    assert len(mlflow_runs.places(twins)) == 3


def test_nothing_is_sent_anywhere(made, result, monkeypatch, no_network):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    another(result, "quiet").export("mlflow", made[0])
    assert made[-1].get_experiment_by_name("cameraready/quiet") is not None
    assert no_network == []
