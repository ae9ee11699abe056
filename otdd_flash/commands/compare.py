"""The work of `python -m otdd_flash.distance`: one distance, its sampling error and its files.

For the entry point `otdd_flash.distance`, `commands.start.run_work` imports this module by name and
`commands.outcome.run_job` calls `compare`. Reading and solving take long, so it checks the settings
of the comparison and of its sampling error before any data are read, and before the solve whether
the datasets allow that error. Keys of a dataset are checked when it is loaded. result.json is
written and the tables are printed before anything is drawn: an error in drawing then loses no
number.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.console import RenderableType

from otdd_flash.arguments import Count
from otdd_flash.commands.messages import Phases
from otdd_flash.commands.ranks import leading
from otdd_flash.commands.results import track_distance, write_run, write_tensors
from otdd_flash.commands.settings import DatasetPairSettings, SamplingSettings, parse, recorded
from otdd_flash.commands.sides import Sides, prepare_sides
from otdd_flash.contributions import Contributions
from otdd_flash.errors import ConvergenceError, InputError
from otdd_flash.files.tensor_file import SUMMARY_FILE
from otdd_flash.gromov.distance import gromov_options
from otdd_flash.labels import (
    ClassDistances,
    Continuous,
    Given,
    LabelMetric,
    NoLabels,
    settled_metric,
)
from otdd_flash.otdd import dataset_distance, refuse_starts
from otdd_flash.report.distance import (
    WITHOUT_CLASSES,
    nearest_table,
    summary_table,
    unmatched_table,
    write_contributions,
    write_report,
)
from otdd_flash.report.page import Report
from otdd_flash.result import DistanceResult
from otdd_flash.sampling.comparison import drawable
from otdd_flash.sampling.subsampling import (
    LEVEL,
    check_count,
    half_size,
    noise_floor,
    subsample_interval,
    subsample_sizes,
)
from otdd_flash.shown import interval
from otdd_flash.solver.penalties import penalties_of
from otdd_flash.solver.schedules import Converged, Exact, Schedule

logger = logging.getLogger("otdd_flash.distance")


@dataclass
class DistanceSettings(DatasetPairSettings, SamplingSettings):
    """The settings of conf/distance.yaml."""

    starts: Count | None
    debias: bool
    contributions: bool

    @property
    def debiased(self) -> bool:
        return self.debias

    def check(self) -> None:
        """Raise an `InputError` for settings that are invalid for any data."""
        super().check()
        schedule = self.schedule()
        if self.contributions and isinstance(schedule, Exact) and schedule.bound_width > 0:
            raise InputError(
                "contributions=true at epsilon=0 is of a plan that is proven optimal; add "
                "solver=exact solver.bound_width=0"
            )
        if self.ground != "gromov":
            refuse_starts(self.starts)
        else:
            given = {key: getattr(self, key) for key in ("subsample", "noise_floor")}
            given["contributions"] = self.contributions
            for key in (key for key, value in given.items() if value):
                raise InputError(f"{key} is not there with ground=gromov; leave it out")
            if self.extractor.get("standardize") or self.extractor.get("pca") is not None:
                raise InputError(
                    "extractor.standardize and extractor.pca fit one map to both datasets, whose "
                    "features need not match with ground=gromov; leave them out, or transform each "
                    "side beforehand and take extractor=identity"
                )

    def check_metric(self, metric: LabelMetric) -> None:
        """Raise an `InputError` for a metric, or anything else, that the ground does not have."""
        if self.ground != "gromov":
            super().check_metric(metric)
            return
        relaxed = self.unbalanced if self.unbalanced_relative is None else self.unbalanced_relative
        gromov_options(
            metric,
            self.lambda_x,
            self.lambda_y,
            self.schedule(),
            self.compute_options(),
            debias=self.debias,
            unbalanced=relaxed,
        )


def compare(config: DictConfig, directory: Path) -> None:
    """Compute one distance and write its files into `directory`."""
    settings = parse(config, DistanceSettings)
    kept = recorded(settings, config)
    arguments = settings.arguments()
    solver, metric = arguments["solver"], arguments["labels"]
    check_request(settings)
    with Phases() as phases:
        # With `labels.full` classes are measured on all rows, also on those that max_samples leaves
        # out.
        sides = prepare_sides(settings, phases, whole=settings.labels.full)
        check_sampling(settings, sides, metric)
        with (
            phases.solving("comparing", solver) as progress,
            phases.counting("class distances") as class_progress,
        ):
            result = dataset_distance(
                sides.source,
                sides.target,
                class_statistics=sides.whole,
                lambda_x=settings.lambda_x,
                lambda_y=settings.lambda_y,
                ground=settings.ground,
                starts=settings.starts,
                debias=settings.debias,
                class_progress=class_progress,
                progress=progress,
                **arguments,
            )
        _check_finite(result)
        _log(result)
        sampling = measure_sampling(settings, result, metric, solver, phases)
    contributions, refused = None, None
    if settings.contributions:
        # The solve ran without `require_convergence`, so that its result is written first. Here it
        # holds again; the error is kept and raised at the end.
        try:
            required = settings.solver.require_convergence
            contributions = replace(result, required=required).contributions()
        except ConvergenceError as error:
            refused = error
    more = {
        "seconds": phases.all_seconds(result.seconds),
        "choices": sides.choices,
        **sampling,
        "seed": settings.seed,
        "config": kept,
        **_class_distance_gap(result.class_distances),
        **_contributions_through_classes(result, contributions),
    }

    summary = result.to_dict(**more)

    def tables() -> Iterator[RenderableType]:
        yield summary_table(summary)
        if result.method not in WITHOUT_CLASSES:
            yield nearest_table(result.class_distances.nearest(), result.ground)
        if not result.constraints.exact:
            yield unmatched_table(result.unmatched())

    def draw() -> Report:
        drawn = write_tensors(result, directory, more) if settings.save_result else Report()
        order = settings.report.order
        drawn += write_report(result, directory, seed=settings.seed, order=order, content=content)
        if contributions is not None:
            drawn += write_contributions(
                result.source,
                contributions.values,
                directory,
                sides.image_shape,
                target=result.target.name,
                content=content,
            )
        return drawn

    content, brief = settings.report.content, [interval(result.value, *result.bounds)]
    report = write_run(directory / SUMMARY_FILE, summary, content, brief, tables, draw)
    report += track_distance(result, settings.log, kept, directory)
    if settings.solver.require_convergence and not result.converged:
        raise ConvergenceError(
            f"{result.divergence.shortfall(solver)}; solver.require_convergence is set, and the "
            f"result was written to {directory}"
        )
    if refused is not None:
        raise ConvergenceError(
            f"{refused}; solver.require_convergence is set, and the result was written to "
            f"{directory} without them"
        )
    report.require_complete()


def _check_finite(result: DistanceResult) -> None:
    if not all(math.isfinite(number) for number in (result.value, *result.bounds)):
        double = result.compute.precision == "double"
        raise InputError(
            f"the distance came out as {result.value}: the squared distances between features "
            f"overflow precision={result.compute.precision}; scale the features, with "
            f"extractor.standardize=true{'' if double else ', or set precision=double'}"
        )


def _log(result: DistanceResult) -> None:
    """Log what `auto` and relative settings became, and how the solve went."""
    divergence, classes = result.divergence, tuple(map(len, result.class_names))
    logger.info("class distances by %s between %d + %d classes", result.method, *classes)
    logger.info(
        "solved on %s by %s in %s precision at epsilon %.6g",
        divergence.xy.f.device,
        divergence.backend,
        result.compute.precision,
        result.epsilon,
    )
    for name, term in divergence.terms.items():
        logger.info(
            "%s: %d iterations, marginal error %.1e, OT %.6g [%.6g, %.6g]",
            name,
            term.iterations,
            term.marginal_error,
            term.value,
            *term.bounds,
        )


def _class_distance_gap(table: ClassDistances) -> dict[str, float]:
    """Return the width of the widest interval of a class distance, if there are intervals."""
    if table.lower is None or table.upper is None:
        return {}
    return {"class_distance_gap": float((table.upper - table.lower).max())}


def _contributions_through_classes(
    result: DistanceResult, contributions: Contributions | None
) -> dict[str, Any]:
    """Return what result.json holds of contributions, if they were asked for."""
    if contributions is None:
        return {}
    named = () if result.source.label_sets is not None else result.source.class_names
    slopes = {
        # An unbounded end is null, because JSON has no infinity. Without labels there is one slope
        # and no name.
        name: None if math.isnan(ends[0]) else [end if math.isfinite(end) else None for end in ends]
        for name, ends in zip(named, contributions.slopes.T.tolist(), strict=False)
    }
    return {
        "contributions_through_classes": contributions.through_classes,
        "contribution_slopes": slopes,
    }


def check_request(settings: SamplingSettings) -> None:
    """Raise an `InputError` for sampling settings that no data can meet."""
    if settings.subsample is not None:
        check_count(settings.subsample, LEVEL)
    elif settings.subsample_size is not None:
        raise InputError(
            f"subsample_size={settings.subsample_size} needs subsample=K, the number of subsamples"
        )


def check_sampling(settings: DistanceSettings, sides: Sides, metric: LabelMetric) -> None:
    """Raise an `InputError` if these datasets are too small, before they are compared."""
    if settings.subsample is None and not settings.noise_floor:
        return
    source, target = (
        drawable(side, metric, settings.min_class_size) for side in (sides.source, sides.target)
    )
    if settings.subsample is not None:
        subsample_sizes(source, target, settings.subsample_size)
    if settings.noise_floor:
        half_size(source, target)


def measure_sampling(
    settings: DistanceSettings,
    result: DistanceResult,
    metric: LabelMetric,
    solver: Schedule,
    phases: Phases,
) -> dict[str, Any]:
    """Return the sampling error for result.json, under the names of the settings."""
    rows = (result.source, result.target)
    # With `labels=none` there are no class distances to keep.
    full = settings.labels.full and not isinstance(metric, NoLabels)
    if result.target_scale is not None:
        # Numbers of subsamples have the scale of the whole.
        metric = Continuous(result.target_scale)
    if result.labels_epsilon is not None:
        # Class distances of subsamples use the whole datasets' epsilon.
        metric = settled_metric(metric, result.labels_epsilon, ())
    # The distance of two halves is nearly 0, so no relative width can be reached.
    if isinstance(solver, Converged):
        solver = replace(solver, bound_width=None)
    if isinstance(solver, Exact):
        solver = replace(solver, bound_width=0.0)
    fixed_classes = full or isinstance(metric, Given)
    arguments: dict[str, Any] = {
        "epsilon": result.epsilon,
        **{key: getattr(result.cost, key) for key in ("lambda_x", "lambda_y", "ground")},
        "labels": metric,
        "class_distances": result.class_distances if fixed_classes else None,
        "debias": settings.debias,
        "unbalanced": penalties_of(result.constraints),
        "solver": solver,
        # The ranks that this process leads, if torchrun started it.
        "compute": replace(result.compute, group=leading()),
        "seed": settings.seed,
    }
    content: dict[str, Any] = {}
    if settings.subsample is not None:
        with phases.phase("sampling", "subsamples") as progress:
            content["subsample"] = subsample_interval(
                *rows,
                result.value,
                count=settings.subsample,
                size=settings.subsample_size,
                level=LEVEL,
                progress=progress,
                **arguments,
            ).to_dict()
    if settings.noise_floor:
        with phases.phase("sampling", "halves") as progress:
            floor = noise_floor(*rows, progress=progress, **arguments)
        content["noise_floor"] = floor.to_dict()
    return content
