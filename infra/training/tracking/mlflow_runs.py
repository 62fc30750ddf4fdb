"""A training as one run of MLflow (``mlflow-skinny``), found again by its key whoever continues it."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST, ErrorCode
from mlflow.tracking import MlflowClient

from ebbflow.infra.storage import private
from ebbflow.infra.training.tracking.targets import TrackTarget
from ebbflow.infra.training.tracking.trackers import Reached, Row, TrackedRun, common_name

KEY = "ebbflow.key"
_STATES = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
_MOST = 1000  # metrics of a request: MLflow's limit
_FEW = 100  # params and tags of a request: MLflow's limit
_LONG = 5000  # characters of a param or tag
_SQLITE = "sqlite:///"


class MlflowTracker:
    """See ``Tracker``. Sending a metric again changes nothing: the store has one row for a metric, step and time."""

    def __init__(self, target: TrackTarget) -> None:
        self._place, self._experiment = target.place or os.environ["MLFLOW_TRACKING_URI"], target.experiment
        self._run = ""
        self._params: set[str] = set()
        if self._place.startswith(_SQLITE):
            private.make_folder(Path(self._place.removeprefix(_SQLITE)).parent)
        self._client = MlflowClient(tracking_uri=self._place)

    def open(self, run: TrackedRun) -> tuple[str, Reached]:
        """See ``Tracker``."""
        experiment = self._experiment_id()
        self._run = (
            self._known(run.known) or self._found(experiment, run.key) or self._created(experiment, run)
        )
        found = self._client.get_run(self._run)
        self._client.update_run(self._run, status="RUNNING")
        self._params = set(found.data.params)
        latest = found.data.to_proto().metrics  # those of ``data.metrics`` have no steps
        return self._run, Reached({one.key: int(one.step) for one in latest})

    def _experiment_id(self) -> str:
        found = self._client.get_experiment_by_name(self._experiment)
        if found is not None:
            return str(found.experiment_id)
        artifacts = None
        if self._place.startswith(_SQLITE):
            artifacts = (Path(self._place.removeprefix(_SQLITE)).parent / "artifacts").as_uri()
        try:
            return str(self._client.create_experiment(self._experiment, artifact_location=artifacts))
        except MlflowException:
            found = self._client.get_experiment_by_name(self._experiment)  # another run was faster
            if found is None:
                raise
            return str(found.experiment_id)

    def _known(self, id: str) -> str:
        """Return a recorded ID; empty where there is no such run: it was deleted, or another server had it."""
        try:
            there = bool(id) and self._client.get_run(id).info.lifecycle_stage == "active"
        except MlflowException as error:
            if error.error_code != ErrorCode.Name(RESOURCE_DOES_NOT_EXIST):
                raise
            there = False
        return id if there else ""

    def _found(self, experiment: str, key: str) -> str:
        """Return the ID of a run that an earlier launcher has created and not lived to record."""
        found = self._client.search_runs([experiment], f"tags.`{KEY}` = '{key}'", max_results=1)
        return str(found[0].info.run_id) if found else ""

    def _created(self, experiment: str, run: TrackedRun) -> str:
        tags = {KEY: run.key, "ebbflow.run": run.run}
        if run.parent:
            tags["ebbflow.search"] = run.parent
        return str(self._client.create_run(experiment, tags=tags, run_name=run.name).info.run_id)

    def describe(self, params: Mapping[str, str], tags: Mapping[str, str]) -> None:
        """See ``Tracker``."""
        named = {common_name(key): str(value)[:_LONG] for key, value in params.items()}
        fresh = [Param(key, value) for key, value in named.items() if key not in self._params]
        said = [RunTag(common_name(key), str(value)[:_LONG]) for key, value in tags.items()]
        for at in range(0, max(len(fresh), len(said)), _FEW):
            self._client.log_batch(self._run, params=fresh[at : at + _FEW], tags=said[at : at + _FEW])
        self._params |= {one.key for one in fresh}

    def log(self, rows: Sequence[Row]) -> None:
        """See ``Tracker``."""
        metrics = [
            Metric(common_name(key), value, int(row.time * 1000), row.step)
            for row in rows
            for key, value in row.values.items()
        ]
        for at in range(0, len(metrics), _MOST):
            self._client.log_batch(self._run, metrics=metrics[at : at + _MOST])

    def close(self, state: str) -> None:
        """See ``Tracker``."""
        self._client.set_terminated(self._run, _STATES[state])
