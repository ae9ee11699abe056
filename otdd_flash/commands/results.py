"""A command's result: its files, its tables, and the tracker that `log=` names.

All commands but `commands.study`, whose report is written piece by piece, call `write_run`. It
writes the numbers and prints the tables before anything is drawn, so an error in drawing loses
none. As parts of their drawing `commands.compare` and `commands.adapt` call `write_tensors`. All
commands then call `track_distance`, `track_flow`, `track_study`, `track_ranking`, `track_mixture`
or `track_shift`. These functions and `write_run` return a `Report`, which names the files written
and the files missing. A tracker that fails gives a notice and a missing file in the report instead
of an error, because the result is already on the disk (`tests/integrations/test_trackers.py`).
`_placed` decides where a tracker stores a run. Users select numbers and series in their tracker by
name, so the names must stay.
"""

from __future__ import annotations

import logging
import re
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from rich.console import RenderableType

from otdd_flash.commands.messages import Phases, Terminal
from otdd_flash.commands.settings import LogSettings
from otdd_flash.errors import DataNotice, MissingFileNotice
from otdd_flash.files.atomic import write_json
from otdd_flash.files.tensor_file import TENSOR_FILE, remove_result
from otdd_flash.integrations.tracking import (
    EVENTS,
    TrackedRun,
    finite,
    folder_at,
    folder_of,
    is_remote,
    track,
    unfollowed,
)
from otdd_flash.report.page import Report, write_each
from otdd_flash.shown import display

logger = logging.getLogger(__name__)

# All settings by group, as `commands.settings.recorded` returns them.
Settings = Mapping[str, Any]

# Trackers accept names of about 250 characters.
LONGEST_LABEL = 80

if TYPE_CHECKING:
    from otdd_flash.flows.result import FlowResult
    from otdd_flash.mixing.result import Mixture
    from otdd_flash.ranking.race import Ranking
    from otdd_flash.result import DistanceResult
    from otdd_flash.shift.result import ShiftReport
    from otdd_flash.study.result import StudyResult


def write_run(
    file: Path,
    summary: Mapping[str, Any],
    content: str,
    brief: Iterable[str],
    tables: Callable[[], Iterable[RenderableType]],
    draw: Callable[[], Report],
) -> Report:
    """Write the numbers of a result and print them; then draw.

    Args:
        file: the JSON file, in the directory of the run.
        summary: its content.
        content: of the report; `none` prints no tables.
        brief: the lines that are printed instead of the tables.
        tables: makes the tables, and sentences below them.
        draw: writes data and pictures.
    """
    console, directory = Terminal(), file.parent
    try:
        remove_result(directory)
        write_json(file, summary)
    finally:
        # Printed even if the file cannot be written, because the numbers are known.
        for part in brief if content == "none" else tables():
            console.print(part, soft_wrap=isinstance(part, str))
    # New progress bars, because the first would have drawn over the tables.
    with Phases() as phases, phases.phase("report", "drawing"):
        report = draw()
    if content != "none":
        console.print(f"written to {directory}", soft_wrap=True)
    return report


def write_tensors(
    result: DistanceResult | FlowResult, directory: Path, more: dict[str, Any]
) -> Report:
    """Write the tensors of a result, and its numbers with `more` again."""
    return write_each({directory / TENSOR_FILE: lambda _: result.save(directory, **more)})


def track_distance(
    result: DistanceResult, log: LogSettings, config: Settings, directory: Path
) -> Report:
    """Log value, solver bounds, epsilon, seconds, and the marginal error of every term."""
    lower, upper = result.bounds
    errors = {f"marginal_error/{k}": v.marginal_error for k, v in result.divergence.terms.items()}
    numbers = {
        **{"value": result.value, "lower": lower, "upper": upper, "epsilon": result.epsilon},
        **{"converged": float(result.converged), **errors},
        **{f"seconds/{phase}": spent for phase, spent in result.seconds.items()},
    }
    name = f"{_label(result.source.name)} to {_label(result.target.name)}"
    return _track(log, TrackedRun(name, directory, config, finite(numbers)))


def track_flow(result: FlowResult, log: LogSettings, config: Settings, directory: Path) -> Report:
    """Log the distance before and after with its solver bounds, and the records of all steps."""
    ends = {"before": result.before, "after": result.after}
    numbers = {
        f"{key}/{end}": getattr(record, of)
        for end, record in ends.items()
        for key, of in (("value", "divergence"), ("lower", "lower"), ("upper", "upper"))
    }
    series = {
        name: [
            (record.step, float(value))
            for record in result.evaluations
            if (value := getattr(record, name)) is not None
        ]
        for name in ("objective", "divergence", "lower", "upper", "estimate", "gradient_norm")
    }
    name = f"{_label(result.source.name)} to {_label(result.target.name)}"
    run = TrackedRun(
        name,
        directory,
        config,
        finite({**numbers, "converged": float(result.converged)}),
        {key: points for key, points in series.items() if points},
    )
    return _track(log, run)


def track_shift(
    reports: Sequence[ShiftReport], log: LogSettings, config: Settings, directory: Path
) -> Report:
    """Log p-value, distance and effect of a shift test; those of windows as series."""
    columns = {
        "p_value": [report.p_value for report in reports],
        "value": [report.statistic for report in reports],
        "effect": [report.effect.value for report in reports],
    }
    numbers = {name: values[0] for name, values in columns.items() if len(values) == 1}
    series = {
        name: list(enumerate(values, 1)) for name, values in columns.items() if len(values) > 1
    }
    first, second = reports[0].names
    name = f"{_label(first)} to {_label(second)}"
    return _track(log, TrackedRun(name, directory, config, finite(numbers), series))


def track_study(result: StudyResult, log: LogSettings, config: Settings, directory: Path) -> Report:
    """Log every measure of every pair with its bounds, and all rows of correlations.csv."""
    numbers: dict[str, float | None] = {}
    for pair in result.pairs():
        key = f"{pair.measure}/{_label(pair.source)} to {_label(pair.target)}"
        numbers |= {key: pair.value, f"{key}/lower": pair.lower, f"{key}/upper": pair.upper}
    for found in result.correlations():
        key = f"{found.measure}/{found.statistic}"
        numbers |= {key: found.value, f"{key}/lower": found.lower, f"{key}/upper": found.upper}
    run = TrackedRun("study", directory, config, finite(numbers))
    return _track(log, run)


def track_ranking(ranking: Ranking, log: LogSettings, config: Settings, directory: Path) -> Report:
    """Log value, bounds and whether it is proven of each of the first places."""
    numbers: dict[str, float | None] = {}
    for row in ranking.rows:
        key = _label(row.name)
        numbers |= {key: row.value, f"{key}/lower": row.lower, f"{key}/upper": row.upper}
        numbers |= {f"{key}/proven": float(row.proven)}
    run = TrackedRun(f"nearest to {_label(ranking.query)}", directory, config, finite(numbers))
    return _track(log, run)


def track_mixture(mixture: Mixture, log: LogSettings, config: Settings, directory: Path) -> Report:
    """Log the value of a mixture with its bounds, and all weights."""
    numbers: dict[str, float | None] = {"value": mixture.value}
    numbers |= dict(zip(("lower", "upper"), mixture.bounds, strict=True))
    numbers |= {f"weight/{_label(name)}": weight for name, weight in mixture.weights.items()}
    run = TrackedRun(f"mixture for {_label(mixture.target)}", directory, config, finite(numbers))
    return _track(log, run)


def _label(name: str) -> str:
    """Return a name without slashes, which would make groups of runs or metrics."""
    return re.sub(r"[/\\]|^\.+$", "_", display(name, LONGEST_LABEL))


def _track(log: LogSettings, run: TrackedRun) -> Report:
    """Log a run to its tracker; a failure is a notice, because the result is already written."""
    if log.tracker is None:
        return Report()
    place: Path | str = log.tracker
    try:
        run, place = _placed(log, run)
        # Variables of the environment may not send the run elsewhere, only settings may.
        if variables := unfollowed(log.tracker, log.uri, online=log.online):
            _notice_once(
                f"{' and '.join(variables)} {'is' if len(variables) == 1 else 'are'} set and not "
                f"followed: log={log.tracker} writes to this machine alone; log.online=true or "
                "log.uri=ADDRESS sends runs elsewhere"
            )
        with Phases() as phases, phases.phase("log", f"logging to {log.tracker}"):
            track(log.tracker, run)
    except Exception as error:
        logger.debug("%s", traceback.format_exc())
        reason = f"cannot log to {place} ({type(error).__name__}: {error})"
        warnings.warn(reason, MissingFileNotice, stacklevel=2)
        return Report(missing=(Path(f"the run in {log.tracker}"),))
    if run.config["report"]["content"] != "none":
        Terminal().print(f"logged to {display(place, None)}", soft_wrap=True)
    return Report()


@cache
def _notice_once(text: str) -> None:
    """Give a notice once in this process, for all jobs of a sweep."""
    warnings.warn(text, DataNotice, stacklevel=2)


def _placed(log: LogSettings, run: TrackedRun) -> tuple[TrackedRun, Path | str]:
    """Return the run with its name and its store, and the place to show to users.

    The jobs of a sweep share one store. It is in the run's folder, or in the sweep's folder for all
    of its jobs, unless `log.uri` names a folder or an address. TensorBoard identifies projects and
    runs by their folders, so its store gets subfolders for `log.project` and `log.name`. Below a
    folder of `log.uri`, which other runs may share, these contain one for the sweep and one for the
    run; in a sweep's own folder, one for the job.
    """
    assert log.tracker is not None
    start, home, job, own = Path.cwd(), run.directory, None, Path(run.directory.name)
    if HydraConfig.initialized():
        hydra = HydraConfig.get()
        # Hydra may have changed the working directory of a job.
        start = Path(hydra.runtime.cwd)
        if hydra.mode == RunMode.MULTIRUN:
            home, job = start / hydra.sweep.dir, hydra.job.num
            inside = run.directory.is_relative_to(home)
            own = run.directory.relative_to(home) if inside else Path(str(job))
    name = log.name or (run.name if job is None else f"{run.name}, job {job}")
    group = None if job is None else home.resolve().name
    run = replace(run, name=name, project=log.project, group=group, online=log.online)
    if log.uri is not None and (is_remote(log.uri) or log.uri.startswith("sqlite:")):
        return replace(run, store=log.uri), log.uri
    if log.uri is None and log.online:
        return run, f"the server of {log.tracker}"
    store = folder_of(log.tracker, home) if log.uri is None else folder_at(log.uri, start)
    place = store
    if log.tracker == "wandb" and log.uri is None:
        # wandb makes the folder itself.
        store = home
    if log.tracker == "tensorboard":
        for part in (log.project, log.name):
            store = store / _label(part) if part else store
        if log.uri is not None:
            store = store / own if group is None else store / group / own
        else:
            store = store if group is None else store / own
            # Without `log.uri` only this run writes here, so earlier events are replaced.
            for file in store.glob(EVENTS):
                file.unlink()
    return replace(run, store=store), place
