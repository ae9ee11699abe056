"""Trackers of runs (`log=` of the commands): the data that they get, checks, and what writes them.

`commands.results` builds a `TrackedRun` and calls `track`; `commands.settings` calls
`check_tracker` before the solve, so that a run is not lost to a missing package or key.

- `log=tensorboard` writes event files in a folder, for `tensorboard --logdir`. `commands.results`
  deletes the EVENTS of an earlier run where the folder belongs to this run alone.
- `log=wandb` writes an offline run for `wandb sync`, or an online run if asked for. A run holds
  settings and results only: no arguments, terminal output, code or description of the machine,
  which may contain secrets.
- `log=mlflow` writes a run in a folder, a database or on a server, for `mlflow ui`. The tracking
  address of the user's own runs is not changed, and nothing is printed.

Tracker packages are imported in the functions that use them, as each is optional. A change must
respect that nothing is sent from this machine unless a setting asks for it, whatever variables of
the environment say: results may be confidential.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from itertools import count
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import numpy as np
from PIL import Image

from otdd_flash.errors import InputError, choose
from otdd_flash.files.atomic import lock, unlock

if TYPE_CHECKING:
    from mlflow import MlflowClient

# Each is also the name of the package that it needs.
TRACKERS = ("tensorboard", "wandb", "mlflow")

PROJECT = "otdd-flash"

# Environment variables by which a tracker would send runs although no setting of ours asks for it.
SENDING = {
    "tensorboard": (),
    "wandb": ("WANDB_MODE", "WANDB_BASE_URL", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"),
    "mlflow": ("MLFLOW_TRACKING_URI",),
}
# Values of WANDB_MODE that send nothing.
SILENT = ("offline", "dryrun", "disabled")

# Schemes that `log.uri` may have with mlflow, besides those of its plugins. Those of LOCAL_SCHEMES
# stay on this machine.
LOCAL_SCHEMES = ("file", "sqlite")
MLFLOW_SCHEMES = (*LOCAL_SCHEMES, "http", "https", "postgresql", "mysql", "mssql")
# Databricks' MLflow is addressed by one of these words alone, or by one as a scheme.
DATABRICKS = ("databricks", "databricks-uc", "uc")
WANDB_SERVER = "https://api.wandb.ai"


@dataclass(frozen=True)
class TrackedRun:
    """The data of a run that a tracker gets.

    Args:
        name: the run's name.
        directory: the run's folder, with its pictures.
        config: all settings, nested by group.
        numbers: numbers by name, such as `value`, `lower` and `upper`.
        series: the (step, number) pairs of a flow, by name.
        store: the folder that the tracker writes to (a Path) or the address that it sends to
            (text). None, only with `online`: the server that the tracker's own settings or
            variables name.
        online: whether it sends although `store` is no address.
        project: the experiment or project; None: `PROJECT`.
        group: what the runs of one sweep have in common; None for a single run.
    """

    name: str
    directory: Path
    config: Mapping[str, Any]
    numbers: Mapping[str, float]
    series: Mapping[str, Sequence[tuple[int, float]]] = field(default_factory=dict)
    store: Path | str | None = None
    online: bool = False
    project: str | None = None
    group: str | None = None

    @property
    def pictures(self) -> list[Path]:
        return sorted(self.directory.glob("*.png"))

    @property
    def flat_config(self) -> dict[str, Any]:
        """The settings by their keys on the command line, such as `solver.tolerance`."""
        return dict(_flattened(self.config))


def check_tracker(name: str | None, uri: str | None = None, *, online: bool = False) -> None:
    """Refuse a tracker that cannot take a run, as far as can be known beforehand.

    Args:
        name: name of the tracker; None for none.
        uri: `log.uri`.
        online: `log.online`.

    Raises:
        InputError: an unknown tracker, a missing package or key, or an address that it cannot use.
    """
    if name is None:
        if online or uri is not None:
            given = "log.online=true" if uri is None else f"log.uri={uri}"
            raise InputError(
                f"{given} does nothing without a tracker; give log={' or log='.join(TRACKERS)}, or "
                "leave it out"
            )
        return
    if importlib.util.find_spec(choose("log", name, TRACKERS)) is None:
        raise InputError(
            f"log={name} needs the package {name}: pip install 'otdd-flash[integrations]'"
        )
    if uri is not None and not uri.strip():
        raise InputError("log.uri must be a folder or an address, got an empty one; leave it out")
    if name == "tensorboard":
        if online or is_remote(uri):
            given = f"log.uri={uri}" if is_remote(uri) else "log.online=true"
            raise InputError(
                f"{given} has no meaning with log=tensorboard, which writes files and knows no "
                "server; leave it out, or take log=mlflow or log=wandb"
            )
    elif online and uri is not None and not is_remote(uri):
        raise InputError(
            f"log.online=true and log.uri={uri}, which is on this machine, exclude each other; "
            "give the address of a server, or leave log.online out"
        )
    scheme = _scheme(uri)
    schemes = {"wandb": ("file", "http", "https"), "mlflow": _mlflow_schemes()}.get(name, ("file",))
    if scheme and scheme not in schemes:
        raise InputError(
            f"log={name} knows no address such as log.uri={uri}; give a folder or one of "
            f"{', '.join(f'{known}://' for known in schemes)}"
        )
    if name == "mlflow":
        _check_mlflow(scheme, uri, online=online)
    if name == "wandb" and (online or is_remote(uri)):
        _check_key_of_wandb(uri)


def is_remote(uri: str | None) -> bool:
    """Return whether `log.uri` is the address of a server, not a place on this machine."""
    return uri in DATABRICKS or _scheme(uri) not in ("", *LOCAL_SCHEMES)


def folder_at(uri: str, start: Path) -> Path:
    """Return the folder that `log.uri` names; a relative one is in `start`."""
    plain = unquote(urlsplit(uri).path) if _scheme(uri) == "file" else uri
    return start / Path(plain).expanduser()


def unfollowed(name: str, uri: str | None, *, online: bool) -> list[str]:
    """Return the variables of `SENDING` that are set and not followed.

    They are not followed where no setting asks for sending.
    """
    if uri is not None or online:
        return []
    return [
        key
        for key in SENDING[name]
        if (value := os.environ.get(key)) and not (key == "WANDB_MODE" and value in SILENT)
    ]


def track(name: str, run: TrackedRun) -> None:
    """Hand a run to the tracker of this name.

    Raises:
        InputError: no such tracker, or its package is missing; `check_tracker` saw address and key
            before the run.
    """
    check_tracker(name)
    writers = {
        "tensorboard": write_to_tensorboard,
        "wandb": write_to_wandb,
        "mlflow": write_to_mlflow,
    }
    writers[name](run)


def folder_of(name: str, directory: Path) -> Path:
    """Return where a tracker writes: a subfolder of `directory`, as its programs expect."""
    return directory / {"mlflow": "mlruns"}.get(name, name)


def finite(numbers: Mapping[str, float | None]) -> dict[str, float]:
    """Return the numbers without missing ones and those that are not finite."""
    return {
        name: float(value)
        for name, value in numbers.items()
        if value is not None and math.isfinite(value)
    }


@contextmanager
def environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Set these environment variables inside the context, and restore them afterwards."""
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


def _scheme(uri: str | None) -> str:
    """Return the scheme of an address; "" for a path, also for one with a drive's letter."""
    scheme, colon, rest = (uri or "").partition(":")
    # Only the part before the plus counts in a scheme such as mysql+pymysql.
    scheme = scheme.partition("+")[0].lower()
    is_address = colon and len(scheme) > 1 and (rest.startswith("/") or scheme in DATABRICKS)
    return scheme if is_address else ""


def _mlflow_schemes() -> tuple[str, ...]:
    plugins = entry_points(group="mlflow.tracking_store")
    return (*MLFLOW_SCHEMES, *DATABRICKS, *(plugin.name for plugin in plugins))


def _check_mlflow(scheme: str, uri: str | None, *, online: bool) -> None:
    if online and uri is None and not os.environ.get("MLFLOW_TRACKING_URI"):
        raise InputError(
            "log.online=true needs the address of an MLflow server: give log.uri=ADDRESS, or set "
            "MLFLOW_TRACKING_URI"
        )
    if scheme == "sqlite" and importlib.util.find_spec("sqlalchemy") is None:
        raise InputError(
            f"log.uri={uri} needs the package sqlalchemy: pip install mlflow, or give a folder"
        )


def _check_key_of_wandb(uri: str | None) -> None:
    """Refuse a run without an API key, for which the package would ask only after the solve.

    Raises:
        InputError: there is no key for the server.
    """
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return
    server = uri or os.environ.get("WANDB_BASE_URL") or WANDB_SERVER
    host = urlsplit(server).hostname or server
    given = os.environ.get("NETRC")
    for file in [Path(given)] if given else [Path.home() / ".netrc", Path.home() / "_netrc"]:
        try:
            if netrc(file).authenticators(host) is not None:
                return
        except (OSError, NetrcParseError):
            continue
    raise InputError(
        f"log=wandb has no API key for {host}: run `wandb login`, set WANDB_API_KEY, or leave "
        f"{'log.online' if uri is None else 'log.uri'} out to log to this machine"
    )


def _flattened(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, Mapping):
            yield from _flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


EVENTS = "events.out.tfevents.*"


def write_to_tensorboard(run: TrackedRun) -> None:
    """Write settings as text, numbers and series as scalars, pictures as images."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(_tensorboard_folder(run)))
    try:
        writer.add_text("config", f"```\n{json.dumps(run.config, indent=2, default=str)}\n```")
        for name, value in run.numbers.items():
            writer.add_scalar(name, value, 0)
        for name, points in run.series.items():
            for step, value in points:
                writer.add_scalar(name, value, step)
        for path in run.pictures:
            with Image.open(path) as image:
                writer.add_image(path.stem, np.asarray(image.convert("RGB")), 0, dataformats="HWC")
    finally:
        writer.close()


def _tensorboard_folder(run: TrackedRun) -> Path:
    """Return a folder without other event files: tensorboard shows those of a folder as one run."""
    # TensorBoard has no server, so `commands.results` always gives it a folder as `store`.
    first = Path(str(run.store))
    folders = (first.with_name(f"{first.name}-{number}") for number in count(2))
    folder = first
    while any(folder.glob(EVENTS)):
        folder = next(folders)
    return folder


# wandb would send reports of its own errors, also from an offline run.
WANDB_SETTINGS = {"WANDB_ERROR_REPORTING": "false"}


@environment(WANDB_SETTINGS)
def write_to_wandb(run: TrackedRun) -> None:
    """Write settings, series step by step, numbers as the run's summary, and pictures."""
    import wandb

    address = {"base_url": run.store} if isinstance(run.store, str) else {}
    folder = run.store if isinstance(run.store, Path) else run.directory
    folder.mkdir(parents=True, exist_ok=True)
    tracked = wandb.init(
        project=run.project or PROJECT,
        name=run.name,
        group=run.group,
        dir=str(folder),
        config=run.flat_config,
        mode="online" if run.online or address else "offline",
        reinit="create_new",
        settings=wandb.Settings(
            silent=True,
            # A run is its settings: no command-line arguments, which may hold a secret, no terminal
            # output, no code and no description of the machine.
            console="off",
            disable_code=True,
            disable_git=True,
            x_disable_meta=True,
            x_disable_stats=True,
            **address,
        ),
    )
    try:
        by_step: dict[int, dict[str, float]] = {}
        for name, points in run.series.items():
            for step, value in points:
                by_step.setdefault(step, {})[name] = value
        for step in sorted(by_step):
            tracked.log(by_step[step], step=step)
        pictures = {path.stem: wandb.Image(str(path)) for path in run.pictures}
        tracked.log({**run.numbers, **pictures})
        tracked.summary.update(dict(run.numbers))
    finally:
        tracked.finish()


# The longest parameter value, and the most parameters and metrics in one request, that every server
# accepts.
LONGEST, MOST_PARAMETERS, MOST_METRICS = 500, 100, 1000
# mlflow refuses its file store, which needs no server or database, unless the first allows it. The
# others stop telemetry, and output beside the result.
MLFLOW_SETTINGS = {
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
LOCK_FILE = ".otdd-flash.lock"
# Characters that mlflow refuses in names of metrics.
NOT_IN_NAMES = re.compile(r"[^\w.\- :/]")
DATABASE = "sqlite:///"


@environment(MLFLOW_SETTINGS)
def write_to_mlflow(run: TrackedRun) -> None:
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
        experiment = _mlflow_experiment(client, run.project or PROJECT, store)
    tags = None if run.group is None else {"sweep": run.group}
    created = client.create_run(experiment, run_name=run.name, tags=tags)
    try:
        _log_to_mlflow(client, created.info.run_id, run)
    except BaseException:
        client.set_terminated(created.info.run_id, "FAILED")
        raise
    client.set_terminated(created.info.run_id)


def _mlflow_experiment(client: MlflowClient, name: str, store: Path | str) -> str:
    if (known := client.get_experiment_by_name(name)) is not None:
        return str(known.experiment_id)
    artifacts = None
    if isinstance(store, str) and store.startswith(DATABASE):
        # Artifacts go beside the database; mlflow's default is the folder in which the command was
        # started.
        beside = Path(store.removeprefix(DATABASE)).absolute().parent
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


def _log_to_mlflow(client: MlflowClient, run_id: str, run: TrackedRun) -> None:
    from mlflow.entities import Metric, Param

    now = int(1000 * time.time())
    parameters = [Param(key, str(value)[:LONGEST]) for key, value in run.flat_config.items()]
    metrics = [Metric(_mlflow_name(name), value, now, 0) for name, value in run.numbers.items()]
    metrics += [
        Metric(_mlflow_name(name), value, now, step)
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


def _mlflow_name(name: str) -> str:
    return NOT_IN_NAMES.sub("_", name)
