"""The work of `python -m otdd_flash.distance`: one distance, its sampling error and its files.

`compare` is the job that the entry point `otdd_flash.distance` passes to Hydra. It checks all
settings before any data are read, and before the solve whether the datasets allow the sampling
error that was asked for, because reading and solving take long. result.json is written and the
tables are printed before anything is drawn, so that no failure to draw loses the number.
"""

from __future__ import annotations

import logging
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from otdd_flash.commands.messages import Terminal
from otdd_flash.commands.progress import Phases
from otdd_flash.commands.ranks import leading
from otdd_flash.commands.settings import (
    ComparisonSettings,
    DatasetPairSettings,
    ReportSettings,
    SamplingSettings,
    parse,
    recorded,
)
from otdd_flash.commands.sides import Sides, prepare_sides
from otdd_flash.commands.tracked import track_distance
from otdd_flash.contributions import Contributions
from otdd_flash.errors import ConvergenceError, InputError
from otdd_flash.files.atomic import write_json
from otdd_flash.files.result_files import SUMMARY_FILE, TENSOR_FILE, remove_result
from otdd_flash.labels import ClassDistances, Given, LabelMetric, NoLabels, Sinkhorn
from otdd_flash.otdd import dataset_distance
from otdd_flash.report.distance import (
    nearest_table,
    summary_table,
    write_contributions,
    write_report,
)
from otdd_flash.report.figures.page import Report, write_each
from otdd_flash.result import DistanceResult
from otdd_flash.sampling import noise_floor, subsample_interval
from otdd_flash.sampling.halves import check_halves
from otdd_flash.sampling.subsampling import check_count, check_subsamples
from otdd_flash.shown import interval
from otdd_flash.solver.schedules.converged import Converged

logger = logging.getLogger("otdd_flash.distance")


@dataclass
class DistanceSettings(ComparisonSettings, SamplingSettings, DatasetPairSettings):
    """The settings of conf/distance.yaml."""

    debias: bool
    report: ReportSettings
    save_result: bool
    contributions: bool


def compare(config: DictConfig, directory: Path) -> None:
    """Compute one distance and write its files into `directory`."""
    settings = parse(config, DistanceSettings)
    kept = recorded(settings, config)
    # Checked before data are read: a bad setting should not cost the time of loading.
    settings.check()
    solver = settings.solver.deferred()
    metric = settings.labels.metric(solver.asked_tolerance, settings.epsilon)
    compute_options = settings.compute_options()
    settings.cost().check_labels(metric.name)
    settings.report.check()
    settings.log.check()
    check_request(settings)
    with Phases() as phases:
        sides = prepare_sides(settings, phases, whole=settings.labels.full)
        check_sampling(settings, sides, metric, settings.min_class_size)
        with (
            phases.solving("comparing", solver) as progress,
            phases.counting("class distances") as class_progress,
        ):
            result = dataset_distance(
                sides.source,
                sides.target,
                epsilon=settings.epsilon,
                epsilon_relative=settings.epsilon_relative,
                labels=metric,
                class_statistics=sides.whole,
                min_class_size=settings.min_class_size,
                lambda_x=settings.lambda_x,
                lambda_y=settings.lambda_y,
                ground=settings.ground,
                debias=settings.debias,
                solver=solver,
                compute=compute_options,
                cache_dir=settings.cache_dir,
                class_progress=class_progress,
                progress=progress,
            )
        _check_finite(result)
        _log(result)
        full = settings.labels.full and not isinstance(metric, NoLabels)
        fixed_classes = full or isinstance(metric, Given)
        sampling = measure_sampling(
            settings,
            result,
            phases,
            seed=settings.seed,
            # Class distances of subsamples use the whole datasets' epsilon, if there is one.
            labels=metric
            if result.labels_epsilon is None
            else Sinkhorn(result.labels_epsilon, solver.asked_tolerance),
            class_distances=result.class_distances if fixed_classes else None,
            debias=settings.debias,
            # The distance of two halves is nearly 0, so no relative width can be reached.
            solver=replace(solver, bound_width=None) if isinstance(solver, Converged) else solver,
        )
    more = {"seconds": _seconds(phases, result), "choices": sides.choices, **sampling}
    contributions, refused = None, None
    if settings.contributions:
        try:
            required = settings.solver.require_convergence
            contributions = replace(result, required=required).contributions()
        except ConvergenceError as error:
            refused = error
    report = _write(result, contributions, settings, kept, more, directory, sides.image_shape)
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


def _seconds(phases: Phases, result: DistanceResult) -> dict[str, float]:
    """Return the wall time of every phase, in the order of the work."""
    sampling = {name: phases.seconds[name] for name in ("sampling",) if name in phases.seconds}
    return phases.all_seconds(
        {
            "load": phases.seconds["load"],
            "extract": phases.seconds["extract"],
            **result.seconds,
            **sampling,
        }
    )


def _write(
    result: DistanceResult,
    contributions: Contributions | None,
    settings: DistanceSettings,
    kept: dict[str, Any],
    more: dict[str, Any],
    directory: Path,
    image_shape: tuple[int, int, int] | None,
) -> Report:
    """Write result.json and print the tables; then write tensors, tables and pictures."""
    more = {**more, "seed": settings.seed, "config": kept}
    if (gap := _class_distance_gap(result.class_distances)) is not None:
        more["class_distance_gap"] = gap
    if contributions is not None:
        more["contributions_through_classes"] = contributions.through_classes
        more["contribution_slopes"] = {
            # An unbounded end is null, because JSON has no infinity.
            name: None
            if math.isnan(ends[0])
            else [end if math.isfinite(end) else None for end in ends]
            for name, ends in zip(
                result.source.class_names, contributions.slopes.T.tolist(), strict=False
            )
        }
    summary, console = result.to_dict(**more), Terminal()
    content = settings.report.content
    try:
        remove_result(directory)
        write_json(directory / SUMMARY_FILE, summary)
    finally:
        # Printed even if the file cannot be written, because the number is known.
        if content == "none":
            console.print(interval(result.value, *result.bounds))
        else:
            console.print(summary_table(summary))
            if result.method != "none":
                console.print(nearest_table(result.class_distances.nearest()))
    report = Report()
    if settings.save_result:
        report += write_each({directory / TENSOR_FILE: lambda _: result.save(directory, **more)})
    # New progress bars, because the first would have drawn over the tables.
    with Phases() as phases, phases.phase("report", "drawing"):
        order = settings.report.order
        report += write_report(result, directory, seed=settings.seed, order=order, content=content)
        if contributions is not None:
            report += write_contributions(
                result.source,
                contributions.values,
                directory,
                image_shape,
                target=result.target.name,
                content=content,
            )
    if content != "none":
        console.print(f"written to {directory}", soft_wrap=True)
    return report


def _class_distance_gap(table: ClassDistances) -> float | None:
    """Return the width of the widest interval of W, if its method gives intervals."""
    if table.lower is None or table.upper is None:
        return None
    return float((table.upper - table.lower).max())


LEVEL = 0.95


def check_request(settings: SamplingSettings) -> None:
    """Raise an `InputError` for sampling settings that no data can meet."""
    if settings.subsample is not None:
        check_count(settings.subsample, LEVEL)
    elif settings.subsample_size is not None:
        raise InputError(
            f"subsample_size={settings.subsample_size} needs subsample=K, the number of subsamples"
        )


def check_sampling(
    settings: SamplingSettings, sides: Sides, metric: LabelMetric, min_class_size: int | None
) -> None:
    """Raise an `InputError` if these datasets are too small, before they are compared."""
    rows = (sides.source, sides.target)
    if settings.subsample is not None:
        check_subsamples(*rows, settings.subsample_size, metric, min_class_size)
    if settings.noise_floor:
        check_halves(*rows, metric, min_class_size)


def measure_sampling(
    settings: SamplingSettings,
    result: DistanceResult,
    phases: Phases,
    *,
    seed: int,
    **arguments: Any,
) -> dict[str, Any]:
    """Return the sampling error for result.json, under the names of the settings.

    Args:
        settings: which sampling errors to compute.
        result: the distance between the whole datasets.
        phases: gets the phase "sampling".
        seed: of the draws.
        **arguments: of `dataset_distance`, if they do not follow from the result.
    """
    compute = replace(result.compute, group=leading())
    arguments |= {"epsilon": result.epsilon, "compute": compute, **asdict(result.cost)}
    rows = (result.source, result.target)
    content: dict[str, Any] = {}
    if settings.subsample is not None:
        with phases.phase("sampling", "subsamples") as progress:
            content["subsample"] = subsample_interval(
                *rows,
                result.value,
                count=settings.subsample,
                size=settings.subsample_size,
                level=LEVEL,
                seed=seed,
                progress=progress,
                **arguments,
            ).to_dict()
    if settings.noise_floor:
        with phases.phase("sampling", "halves") as progress:
            floor = noise_floor(*rows, seed=seed, progress=progress, **arguments)
        content["noise_floor"] = floor.to_dict()
    return content
