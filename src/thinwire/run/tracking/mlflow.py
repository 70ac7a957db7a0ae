"""MLflow, in a database in the run's folder `mlflow` unless MLFLOW_TRACKING_URI names a server.

To look at it: mlflow ui --backend-store-uri sqlite:///DIR/mlflow/mlflow.db
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from thinwire.run.tracking.base import PROJECT, About, unless_set

LONGEST_VALUE = 500  # characters that a parameter may have


class MLflow:
    """Each number is a metric; settings are parameters. The tag thinwire.id finds a run that goes on."""

    def __init__(self, about: About) -> None:
        folder = about.folder.absolute() / "mlflow"
        with unless_set(MLFLOW_DISABLE_TELEMETRY="true", MLFLOW_TRACKING_URI=f"sqlite:///{folder}/mlflow.db"):
            from mlflow import MlflowClient

            folder.mkdir(exist_ok=True)
            self.client: Any = MlflowClient(tracking_uri=os.environ["MLFLOW_TRACKING_URI"])
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = self.client.get_experiment_by_name(experiment)
        place = (
            found.experiment_id if found else self.client.create_experiment(experiment, f"file://{folder}/artifacts")
        )
        runs = self.client.search_runs([place], f"tags.`thinwire.id` = '{about.id}'", max_results=1)
        if runs:
            self.run = runs[0].info.run_id
            self.client.update_run(self.run, status="RUNNING")
            return
        self.run = self.client.create_run(place, tags={"thinwire.id": about.id}, run_name=about.folder.name).info.run_id
        for name, value in about.settings.items():
            self.client.log_param(self.run, name, str(value)[:LONGEST_VALUE])

    def write(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = round(1000 * time.time())
        self.client.log_batch(self.run, metrics=[Metric(name, value, now, step) for name, value in values.items()])

    def close(self, is_complete: bool) -> None:
        self.client.set_terminated(self.run, "FINISHED" if is_complete else "FAILED")


open_run = MLflow
