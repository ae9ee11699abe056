"""What a command hands to the tracker that `log=` names, once its results are written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from otdd_flash.integrations.tracking import TrackedRun, finite, folder_of, track
from otdd_flash.report.figures.drawing import Report, write_each
from otdd_flash.shown import display

# As `settings.recorded` makes them.
Settings = Mapping[str, Any]

# Trackers take names of some 250 characters.
LONGEST_LABEL = 80

if TYPE_CHECKING:
    from otdd_flash.flows.result import FlowResult
    from otdd_flash.result import DistanceResult
    from otdd_flash.study.result import StudyResult


def track_distance(
    result: DistanceResult, log: str | None, config: Settings, directory: Path
) -> Report:
    """Value, solver bounds, epsilon, seconds, and the marginal error of every term."""
    lower, upper = result.bounds
    errors = {f"marginal_error/{k}": v.marginal_error for k, v in result.divergence.terms.items()}
    numbers = {
        **{"value": result.value, "lower": lower, "upper": upper, "epsilon": result.epsilon},
        **{"converged": float(result.converged), **errors},
        **{f"seconds/{phase}": spent for phase, spent in result.seconds.items()},
    }
    name = f"{_label(result.source.name)} to {_label(result.target.name)}"
    return _track(log, TrackedRun(name, directory, config, finite(numbers)))


def track_flow(result: FlowResult, log: str | None, config: Settings, directory: Path) -> Report:
    """The distance before and after with its solver bounds, and what every step found."""
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


def track_study(result: StudyResult, log: str | None, config: Settings, directory: Path) -> Report:
    """What every measure says of every pair, with bounds, and how it follows what was gained."""
    numbers: dict[str, float | None] = {}
    for pair in result.pairs():
        key = f"{pair.measure}/{_label(pair.source)} to {_label(pair.target)}"
        numbers |= {key: pair.value, f"{key}/lower": pair.lower, f"{key}/upper": pair.upper}
    for found in result.correlations():
        key = f"{found.measure}/{found.statistic}"
        numbers |= {key: found.value, f"{key}/lower": found.lower, f"{key}/upper": found.upper}
    run = TrackedRun("study", directory, config, finite(numbers))
    return _track(log, run)


def _label(name: str) -> str:
    """Return a name without slashes, which would make groups of runs or metrics."""
    return re.sub(r"[/\\]", "_", display(name, LONGEST_LABEL))


def _track(log: str | None, run: TrackedRun) -> Report:
    """A tracker that fails is a notice, as a picture is: the result is there already."""
    if log is None:
        return Report()
    return write_each({folder_of(log, run.directory): lambda _: track(log, run)})
