"""MLflow, by its own client: the server of MLFLOW_TRACKING_URI, the experiment of MLFLOW_EXPERIMENT_NAME or "vitkit".

The server itself is asked which steps it has, so a run that was killed between sending and remembering repeats nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from vitkit.errors import MissingPackage
from vitkit.training.trackers.base import About, Numbers, Tracker

_STATES = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_AT_ONCE = 100  # of everything that one request carries: the server refuses more parameters
_LONGEST = 500  # characters of a parameter
# An unreachable server is given up within seconds; what it missed is sent at the end.
_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}


class MLflow(Tracker):
    @classmethod
    def check(cls) -> None:
        for name, value in _PATIENCE.items():
            os.environ.setdefault(name, value)
        try:
            import mlflow.tracking  # noqa: F401
        except ImportError as e:
            raise MissingPackage("mlflow", "--track mlflow", "mlflow") from e

    def open(self, about: About, id: str | None) -> str:
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self.client = MlflowClient()
        if id is not None:
            self.id = id
            self.client.update_run(id, status="RUNNING")
            return id
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", "vitkit")
        known = self.client.get_experiment_by_name(experiment)
        number = known.experiment_id if known is not None else self.client.create_experiment(experiment)
        self.id = str(self.client.create_run(number, tags=about.tags, run_name=about.name).info.run_id)
        params = [Param(name, value[:_LONGEST]) for name, value in about.settings.items()]
        for start in range(0, len(params), _AT_ONCE):
            self.client.log_batch(self.id, params=params[start : start + _AT_ONCE])
        return self.id

    def sent(self) -> Mapping[str, int]:
        names = self.client.get_run(self.id).data.metrics
        return {name: max(m.step for m in self.client.get_metric_history(self.id, name)) for name in names}

    def log(self, lines: Sequence[tuple[int, Numbers]]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for step, numbers in lines for name, value in numbers.items()]
        for start in range(0, len(metrics), _AT_ONCE):
            self.client.log_batch(self.id, metrics=metrics[start : start + _AT_ONCE])

    def close(self, state: str, summary: Numbers, files: Sequence[Path]) -> None:
        for name, value in summary.items():
            self.client.set_tag(self.id, f"vitkit.{name}", f"{value:.6g}")
        for file in files:
            self.client.log_artifact(self.id, str(file))
        self.client.set_terminated(self.id, _STATES[state])
