"""Record numbers and media in MLflow: on the server of MLFLOW_TRACKING_URI, or in `RUN/mlflow/`.

The run has the tag `unisono.id`, by which a resume finds it. Numbers are sent in batches. A server stores a batch whole
or not at all, and ignores metrics that it has. Media are artifacts, whose path has the step. So a second upload
replaces the first one by the same file.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import mlflow
from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag
from mlflow.environment_variables import MLFLOW_EXPERIMENT_NAME
from mlflow.exceptions import MlflowException

from unisono.security.file_modes import make_folder
from unisono.trackers.tracker import Media, TrackedRun

EXPERIMENT = "unisono"
"""The experiment, unless MLFLOW_EXPERIMENT_NAME names one."""

METRICS, PARAMS, VALUE = 1000, 100, 6000
"""Limits of a batch: metrics, parameters, and characters of a parameter's value (mlflow.utils.validation)."""

SQL_PACKAGES = ("sqlalchemy", "alembic")
"""Packages that the client needs to write a database itself. `mlflow` has them, `mlflow-skinny` does not."""


class MLflow:
    """Send batches to a server, or write them to a database."""

    def start(self, run: TrackedRun) -> int:
        for name in ("mlflow", "alembic", "urllib3"):
            logging.getLogger(name).setLevel(logging.ERROR)
        self._uri = mlflow.get_tracking_uri()
        local = run.dir / "mlflow"
        if self._uri.startswith("sqlite:") and not all(find_spec(package) for package in SQL_PACKAGES):
            remedy = "Set MLFLOW_TRACKING_URI=http://HOST:PORT, or: pip install mlflow"
            raise ImportError(f"no server is named, and mlflow-skinny cannot write {self._uri}. {remedy}")
        if self._uri.endswith(f"{local}/mlflow.db"):
            make_folder(local)
        self._pending: list[Metric] = []
        self._client = MlflowClient(self._uri)
        try:
            experiment = self._experiment(str(local / "artifacts") if self._uri.startswith("sqlite:") else None)
            found = self._client.search_runs([experiment], f"tags.`unisono.id` = '{run.id}'", max_results=1)
            self._run = found[0].info.run_id if found else self._create(experiment, run)
        except MlflowException as error:
            remedy = "Does the server of MLFLOW_TRACKING_URI run?"
            raise ConnectionError(f"MLflow at {self._uri}: {_reason(error)}. {remedy}") from error
        keys = found[0].data.metrics if found else ()
        histories = (self._client.get_metric_history(self._run, key) for key in keys)
        last = max((metric.step for history in histories for metric in history), default=-1)
        self._client.update_run(self._run, status="RUNNING")
        return last

    def log(self, step: int, time: float, numbers: Mapping[str, float]) -> None:
        if len(self._pending) + len(numbers) > METRICS:
            self.flush()
        self._pending += [Metric(_key(name), value, round(1000 * time), step) for name, value in numbers.items()]

    def log_media(self, step: int, time: float, media: Media) -> None:
        folder = f"media/{_key(media.name)}"
        if media.kind == "histogram":
            content = json.dumps({"counts": list(media.counts), "edges": list(media.edges)})
            self._client.log_text(self._run, content, f"{folder}/{step}.histogram.json")
        else:
            self._client.log_artifact(self._run, str(media.file), folder)

    def flush(self) -> None:
        while self._pending:
            batch, self._pending = self._pending[:METRICS], self._pending[METRICS:]
            try:
                self._client.log_batch(self._run, batch)
            except MlflowException as error:
                raise ConnectionError(f"MLflow at {self._uri}: {_reason(error)}") from error

    def finish(self, result: Mapping[str, Any]) -> None:
        self.flush()
        if result:
            self._client.log_dict(self._run, dict(result), "result.json")
        self._client.set_terminated(self._run, "FINISHED" if result else "KILLED")

    def _experiment(self, artifacts: str | None) -> str:
        """Return the id of the experiment. Create it if it is new; `artifacts`: where its files go, if not as usual."""
        name = MLFLOW_EXPERIMENT_NAME.get() or EXPERIMENT
        found = self._client.get_experiment_by_name(name)
        return found.experiment_id if found else str(self._client.create_experiment(name, artifacts))

    def _create(self, experiment: str, run: TrackedRun) -> str:
        created = self._client.create_run(experiment, tags={"unisono.id": run.id}, run_name=run.name)
        run_id = str(created.info.run_id)
        params = [Param(_key(name), str(value)[:VALUE]) for name, value in run.settings.items()]
        for first in range(0, len(params), PARAMS):
            self._client.log_batch(run_id, params=params[first : first + PARAMS])
        tags = [RunTag("unisono.directory", str(run.dir.absolute()))]
        self._client.log_batch(run_id, tags=tags)
        self._client.log_dict(run_id, dict(run.environment), "environment.json")
        return run_id


def _key(name: str) -> str:
    """Return a name without the characters that MLflow refuses."""
    allowed = "".join(letter if letter.isalnum() or letter in "_-. /" else "_" for letter in name)
    return "/".join(part for part in allowed.split("/") if part.strip(". ")) or "_"


def _reason(error: MlflowException) -> str:
    """Return the innermost cause of an error in one line."""
    cause: BaseException = error
    while (inner := cause.__cause__ or cause.__context__) is not None:
        cause = inner
    return str(cause).strip().partition("\n")[0] or type(cause).__name__
