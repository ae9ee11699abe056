"""`ground="gromov"` of `dataset_distance` and `pairwise_distances`: checks, tables and results.

`otdd` and `pairwise` call it after they have read their arguments. Errors of input must come before
anything is solved, which may take long.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations

from otdd_flash.cost.compute import ComputeOptions
from otdd_flash.cost.facts import Pair
from otdd_flash.cost.ground import GroundCost
from otdd_flash.devices import check_one_device
from otdd_flash.errors import InputError
from otdd_flash.fingerprint import Unchanged
from otdd_flash.gromov.classes import check_metric, gromov_table
from otdd_flash.gromov.solve import Problem, prepare, solve_gromov
from otdd_flash.labels import (
    ClassDistances,
    Given,
    JointClassDistances,
    LabelMetric,
    drop_small_classes,
    notice_single_samples,
)
from otdd_flash.labels.measuring import matched
from otdd_flash.labels.table import class_names
from otdd_flash.operators.comparison import Comparison
from otdd_flash.result import DistanceResult
from otdd_flash.samples import LabeledSamples, check_squares
from otdd_flash.solver.divergence import Divergence, report_convergence
from otdd_flash.solver.schedules.base import Schedule
from otdd_flash.solver.schedules.converged import Converged
from otdd_flash.solver.schedules.exact import Exact
from otdd_flash.solver.term import SolverProgress, epsilon_given_as, resolve_epsilon


def gromov_options(
    metric: LabelMetric | None,
    lambda_y: float | None,
    options: Schedule,
    compute: ComputeOptions,
    *,
    debias: bool,
    unbalanced: object,
) -> Converged | Exact:
    """Refuse what a sequence of transport problems does not have; return the options of each.

    `metric` is None where a table is given.

    Raises:
        InputError: as said.
    """
    check_metric(metric, lambda_y)
    if debias:
        raise InputError("ground=gromov is not debiased; set debias=false")
    if unbalanced is not None:
        raise InputError("ground=gromov takes exact marginals; leave out unbalanced")
    if compute.group is not None:
        raise InputError(
            "ground=gromov runs in one process; leave out compute.group, or start without torchrun"
        )
    if not isinstance(options, Converged | Exact):
        raise InputError(f"ground=gromov takes solver=converged or exact, got {options.name}")
    if isinstance(options, Converged) and options.bound_width is not None:
        raise InputError(
            "the bounds of ground=gromov do not get narrower with the solver's work; leave out "
            "solver.bound_width"
        )
    return options


def gromov_distance(
    datasets: tuple[LabeledSamples, LabeledSamples],
    cost: GroundCost,
    metric: LabelMetric,
    options: Converged | Exact,
    compute: ComputeOptions,
    *,
    epsilon: float | None,
    epsilon_relative: float | None,
    starts: int,
    statistics: tuple[LabeledSamples, LabeledSamples] | None,
    min_class_size: int | None,
    progress: SolverProgress | None,
) -> DistanceResult:
    """Compare two datasets by a checked request; arguments as for `dataset_distance`."""
    sides = checked(datasets, metric, min_class_size)
    source, target = sides
    unchanged, started = Unchanged.of(source, target), time.perf_counter()
    table = class_table((source, target), metric, statistics)
    measured = time.perf_counter()
    compared = prepare(sides, cost, compute).with_classes(table.full)
    independent = Problem.of(compared).independent
    name, given, used = resolve_epsilon(epsilon, epsilon_relative, lambda: independent)
    with epsilon_given_as(name, given, used), compared.within_memory():
        linear, solved, gromov = solve_gromov(compared.at(used), options, starts, progress)
    report_convergence(solved, options)
    seconds = {"class_distances": measured - started, "solve": time.perf_counter() - measured}
    return DistanceResult(
        source,
        target,
        table,
        solved,
        cost,
        compute,
        method=metric.name,
        seconds=seconds,
        comparison=linear,
        unchanged=unchanged,
        required=options.require_convergence,
        gromov=gromov,
    )


def gromov_pairs(
    compared: Comparison,
    table: JointClassDistances,
    options: Schedule,
    starts: int,
    pairs: Iterable[Pair],
) -> Iterator[Divergence]:
    """Yield the solves of pairs (i, j), i < j, of several datasets at an epsilon."""
    assert isinstance(options, Converged | Exact)
    for i, j in pairs:
        one = compared.of(i, j).with_classes(table.between(i, j).full)
        with one.within_memory():
            yield solve_gromov(one, options, starts)[1]


def mean_independent(compared: Comparison, table: JointClassDistances) -> float:
    """Return the mean of F(a b^T) over all pairs of different datasets."""
    values = [
        Problem.of(compared.of(i, j).with_classes(table.between(i, j).full)).independent
        for i, j in combinations(range(len(compared.given)), 2)
    ]
    return sum(values, 0.0) / len(values)


def checked(
    datasets: Sequence[LabeledSamples], metric: LabelMetric | None, min_class_size: int | None
) -> tuple[LabeledSamples, ...]:
    """Check datasets of any dimensions; return them without small classes.

    Raises:
        InputError: they are on different devices, or hold numbers whose squares overflow.
    """
    for other in datasets[1:]:
        check_one_device(datasets[0].features.device, other.features.device)
    check_squares(*datasets)
    sides = tuple(drop_small_classes(samples, min_class_size) for samples in datasets)
    if metric is not None:
        notice_single_samples(sides, metric)
    return sides


def class_table(
    sides: tuple[LabeledSamples, LabeledSamples],
    metric: LabelMetric,
    statistics: tuple[LabeledSamples, LabeledSamples] | None,
) -> ClassDistances:
    """Read or measure W between the classes of two datasets, perhaps of the rows of others."""
    if isinstance(metric, Given):
        return metric.read().named_for(*map(class_names, sides))
    if statistics is not None and not metric.fixed:
        source, target = (
            matched(whole, samples) for whole, samples in zip(statistics, sides, strict=True)
        )
        sides = source, target
    return gromov_table(sides, metric).pair(0, 1)
