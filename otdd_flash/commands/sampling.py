"""The sampling error that a command was asked for: checked before the solve, measured after it."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from otdd_flash.commands.progress import Phases
from otdd_flash.commands.ranks import leading
from otdd_flash.commands.settings import SamplingSettings
from otdd_flash.commands.sides import Sides
from otdd_flash.errors import InputError
from otdd_flash.labels import LabelMetric
from otdd_flash.result import DistanceResult
from otdd_flash.sampling import noise_floor, subsample_interval
from otdd_flash.sampling.halves import check_halves
from otdd_flash.sampling.subsampling import check_count, check_subsamples

LEVEL = 0.95


def check_request(settings: SamplingSettings) -> None:
    """Raise an `InputError` for what no data can meet."""
    if settings.subsample is not None:
        check_count(settings.subsample, LEVEL)
    elif settings.subsample_size is not None:
        raise InputError(
            f"subsample_size={settings.subsample_size} needs subsample=K, the number of subsamples"
        )


def check_sampling(
    settings: SamplingSettings, sides: Sides, metric: LabelMetric, min_class_size: int | None
) -> None:
    """Raise an `InputError` where these datasets are too small, before they are compared."""
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
    """What result.json says of the sampling error, under the names of the settings.

    Args:
        settings: what was asked for.
        result: the distance between the whole datasets.
        phases: gets the phase "sampling".
        seed: of the draws.
        **arguments: of `dataset_distance`, where they do not follow from the result.
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
