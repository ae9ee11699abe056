"""The tracker `log=mlflow`: a run in a folder, a database or on a server, for `mlflow ui`.

`integrations.tracking.track` imports this module and calls `write`. mlflow is an optional package,
so it is imported in the functions that use it. The tracking address of the user's own runs is not
changed. Nothing is printed, and nothing is sent unless `log.uri` is an address or `log.online` is
set.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from otdd_flash.files.atomic import lock, unlock
from otdd_flash.integrations.tracking import PROJECT, TrackedRun, environment

if TYPE_CHECKING:
    from mlflow import MlflowClient

# The longest parameter value, and the most parameters and metrics in one request, that every server
# accepts.
LONGEST, MOST_PARAMETERS, MOST_METRICS = 500, 100, 1000
# mlflow refuses its file store, which needs no server or database, unless the first allows it. The
# others stop telemetry, and output beside the result.
SETTINGS = {
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
LOCK_FILE = ".otdd-flash.lock"
# Characters that mlflow refuses in names of metrics.
_NOT_IN_NAMES = re.compile(r"[^\w.\- :/]")
_DATABASE = "sqlite:///"


@environment(SETTINGS)
def write(run: TrackedRun) -> None:
    """Write settings as parameters, numbers and series as metrics, pictures as artifacts."""
    from mlflow import MlflowClient

    # `check_tracker` has refused a run that is sent without an address or this variable.
    store = os.environ["MLFLOW_TRACKING_URI"] if run.store is None else run.store
    if isinstance(store, Path):
        store.mkdir(parents=True, exist_ok=True)
    address = store.absolute().as_uri() if isinstance(store, Path) else store
    # The run has a client of its own, so that the user's tracking address is unchanged.
    client = MlflowClient(tracking_uri=address)
    with _alone(store):
        experiment = _experiment(client, run.project or PROJECT, store)
    tags = None if run.group is None else {"sweep": run.group}
    created = client.create_run(experiment, run_name=run.name, tags=tags)
    try:
        _log(client, created.info.run_id, run)
    except BaseException:
        client.set_terminated(created.info.run_id, "FAILED")
        raise
    client.set_terminated(created.info.run_id)


def _experiment(client: MlflowClient, name: str, store: Path | str) -> str:
    if (known := client.get_experiment_by_name(name)) is not None:
        return str(known.experiment_id)
    artifacts = None
    if isinstance(store, str) and store.startswith(_DATABASE):
        # Artifacts go beside the database; mlflow's default is the folder in which the command was
        # started.
        beside = Path(store.removeprefix(_DATABASE)).absolute().parent
        artifacts = (beside / "mlartifacts").as_uri()
    return str(client.create_experiment(name, artifact_location=artifacts))


@contextmanager
def _alone(store: Path | str) -> Iterator[None]:
    """Lock a store that is a folder, so that jobs of a sweep do not create one experiment twice."""
    if not isinstance(store, Path):
        yield
        return
    while (descriptor := lock(store / LOCK_FILE)) is None:
        time.sleep(0.05)
    try:
        yield
    finally:
        unlock(store / LOCK_FILE, descriptor)


def _log(client: MlflowClient, run_id: str, run: TrackedRun) -> None:
    from mlflow.entities import Metric, Param

    now = int(1000 * time.time())
    parameters = [Param(key, str(value)[:LONGEST]) for key, value in run.flat_config.items()]
    metrics = [Metric(_name(name), value, now, 0) for name, value in run.numbers.items()]
    metrics += [
        Metric(_name(name), value, now, step)
        for name, points in run.series.items()
        for step, value in points
    ]
    for start in range(0, len(parameters), MOST_PARAMETERS):
        some = parameters[start : start + MOST_PARAMETERS]
        client.log_batch(run_id, params=some, synchronous=True)
    for start in range(0, len(metrics), MOST_METRICS):
        client.log_batch(run_id, metrics=metrics[start : start + MOST_METRICS], synchronous=True)
    for path in run.pictures:
        client.log_artifact(run_id, str(path))


def _name(name: str) -> str:
    return _NOT_IN_NAMES.sub("_", name)
