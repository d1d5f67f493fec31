"""MLflow: a run of an experiment on the server in `MLFLOW_TRACKING_URI`, else in a SQLite file in the data folder."""

import os
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from agentrl.workflow.trackers import EVALUATION, ITERATION, PROJECT, SAMPLES, TrackedRun, TrackedStep, Tracker

STATUS = {"done": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}
"""A mapping from the final status of a run to MLflow's status. A paused run stays RUNNING in MLflow."""
MAX_PARAM_CHARS = 6000
PARAMS_PER_CALL = 100


class _Session:
    """A session in MLflow."""

    def __init__(self, run: TrackedRun, handle: str) -> None:
        from mlflow import MlflowClient

        run.folder.mkdir(parents=True, exist_ok=True)
        server = os.environ.get("MLFLOW_TRACKING_URI")
        uri = server or f"sqlite:///{run.folder / 'mlflow.db'}"
        self._client = MlflowClient(tracking_uri=uri)
        self.handle = handle or self._create_run(run, None if server else str(run.folder / "mlflow"))
        info = self._client.get_run(self.handle).info
        self._client.update_run(self.handle, status="RUNNING")
        page = f"{uri}/#/experiments/{info.experiment_id}/runs/{self.handle}"
        self.url = page if uri.startswith("http") else f"mlflow ui --backend-store-uri {uri}"

    def _create_run(self, run: TrackedRun, files: str | None) -> str:
        from mlflow.entities import Param

        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self._client.create_experiment(name, files)
        tags = {**dict.fromkeys(run.tags, "true"), "mlflow.note.content": f"[{run.name}]({run.page})"}
        handle: str = self._client.create_run(number, tags=tags, run_name=run.name).info.run_id
        params = [Param(key, str(value)[:MAX_PARAM_CHARS]) for key, value in run.config.items()]
        for start in range(0, len(params), PARAMS_PER_CALL):
            self._client.log_batch(handle, params=params[start : start + PARAMS_PER_CALL])
        return handle

    def last_numbers(self) -> Mapping[str, int]:
        present = self._client.get_run(self.handle).data.metrics
        return {series: int(present[series]) for series in (ITERATION, EVALUATION) if series in present}

    def log(self, step: TrackedStep) -> None:
        if step.text:  # first: a step whose metrics are there counts as written
            self._client.log_text(self.handle, step.text, f"{SAMPLES}-{step.number:06}.md")
        self._client.log_batch(self.handle, metrics=list(_metrics(step)))

    def finish(self, status: str) -> None:
        if status in STATUS:
            self._client.set_terminated(self.handle, STATUS[status], int(datetime.now(UTC).timestamp() * 1000))


def _metrics(step: TrackedStep) -> Iterator[Any]:
    from mlflow.entities import Metric

    milliseconds = int(step.at.timestamp() * 1000)
    return (Metric(name, value, milliseconds, step.number) for name, value in step.numbers.items())


mlflow = Tracker("mlflow", _Session)
