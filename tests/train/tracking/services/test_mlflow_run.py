"""MLflow with a database file, read back with its own client."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from heads.api.errors import UserError
from tests.train.tracking.services.a_run import track
from train.tracking.services.mlflow_run import ID_FILE
from train.tracking.tracker import LOG_FILE, Tracker, TrackerConfig, read_log

NEEDED = ("mlflow", "sqlalchemy", "alembic")


@pytest.mark.skipif(
    not all(map(find_spec, NEEDED)), reason="mlflow, or what its database needs, is not installed"
)
def test_a_run_with_its_group_figures_table_and_checkpoint(
    in_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    address = f"sqlite:///{in_folder}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    length = track(in_folder / "out", mlflow=True, artifact=True)
    track(in_folder / "out", mlflow=True, length=length, first=2)  # the same command after a kill
    client = MlflowClient(address)
    experiment = client.get_experiment_by_name("headstart")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_id == (in_folder / "out" / ID_FILE).read_text().strip()
    assert (run.info.run_name, run.info.status) == ("demo/eagle3", "FINISHED")
    tags = {key: run.data.tags[key] for key in ("group", "job_type", "tags")}
    assert tags == {"group": "demo", "job_type": "train", "tags": "first-tag"}
    assert run.data.params == {"kind": "eagle3", "optim.lr": "0.001"}
    assert run.data.metrics["best/tau"] == 2.0 and run.data.metrics["tau"] == 1.5
    assert {item.step for item in client.get_metric_history(run.info.run_id, "loss")} == {1, 2, 3}
    table = client.download_artifacts(run.info.run_id, "transcripts.json", str(in_folder))
    content = json.loads(Path(table).read_text())
    assert content["columns"] == ["prompt", "answer", "tokens", "tau"]
    assert content["data"][0][0] == "What is a list?"
    names = [item.path for item in client.list_artifacts(run.info.run_id, "checkpoint")]
    assert names == ["checkpoint/config.json"]


@pytest.mark.skipif(
    not all(map(find_spec, NEEDED)), reason="mlflow, or what its database needs, is not installed"
)
def test_a_training_goes_on_without_a_service_that_fails(
    in_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{in_folder}/mlflow.db")
    out = in_folder / "out"
    config = TrackerConfig(wandb="disabled", mlflow=True)
    with Tracker(config, out, length=0, settings={}) as tracker:
        tracker.write(1, {"loss": 2.0})
        from mlflow import MlflowClient

        MlflowClient().delete_run((out / ID_FILE).read_text().strip())  # it takes no more figures
        tracker.write(2, {"loss": 1.0})
        tracker.write(3, {"loss": 0.5})
    assert [line["step"] for line in read_log(out / LOG_FILE)] == [1, 2, 3]
    assert caplog.text.count("MlflowRun failed and gets no more figures") == 1


def test_without_mlflow_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    config = TrackerConfig(wandb="disabled", mlflow=True)
    with pytest.raises(UserError, match=r"mlflow is not installed.*\.\[mlflow\]"):
        Tracker(config, tmp_path, length=0, settings={})
