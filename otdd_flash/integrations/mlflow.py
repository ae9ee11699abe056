"""`log=mlflow`: a run in RUN/mlruns, for `mlflow ui --backend-store-uri`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from otdd_flash.integrations.tracking import TrackedRun, folder_of

EXPERIMENT = "otdd-flash"
# The longest value of a parameter that every server takes.
LONGEST = 500
# The store in files needs no server and no database, and has to be asked for. Nothing is sent.
SETTINGS = {"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_DISABLE_TELEMETRY": "true"}
_NOT_IN_NAMES = re.compile(r"[^\w.\- :/]")


def write(run: TrackedRun) -> None:
    """Write settings as parameters, numbers and series as metrics, pictures as artifacts."""
    with _environment(SETTINGS):
        _write(run)


@contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    """The environment with these variables, and afterwards as it was."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _write(run: TrackedRun) -> None:
    from mlflow import MlflowClient

    folder = folder_of("mlflow", run.directory)
    folder.mkdir(parents=True, exist_ok=True)
    # A client of its own: the user's tracking address stays as it is.
    client = MlflowClient(tracking_uri=folder.absolute().as_uri())
    known = client.get_experiment_by_name(EXPERIMENT)
    experiment = client.create_experiment(EXPERIMENT) if known is None else known.experiment_id
    tracked = client.create_run(experiment, run_name=run.name).info.run_id
    for key, value in run.flat_config.items():
        client.log_param(tracked, key, str(value)[:LONGEST])
    for name, value in run.numbers.items():
        client.log_metric(tracked, _NOT_IN_NAMES.sub("_", name), value)
    for name, points in run.series.items():
        for step, value in points:
            client.log_metric(tracked, _NOT_IN_NAMES.sub("_", name), value, step=step)
    for path in run.pictures:
        client.log_artifact(tracked, str(path))
    client.set_terminated(tracked)
