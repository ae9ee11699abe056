"""`ground="gromov"` of `dataset_distance` and `pairwise_distances`: checks, tables and results.

`otdd` and `pairwise` call it after they have read their arguments. `gromov_distance` returns the
`DistanceResult` of two datasets; `GromovPairs` yields the solves of `pairwise`. `commands.compare`
calls `gromov_options`. Errors of input must be raised before anything is solved, because a solve
may take long (`tests/gromov/test_gromov.py`).

`gromov_table` is the table W of classes whose points have different dimensions, of two datasets or
of those of `pairwise`. With the method `gaussian`, W has the units of E, length^4: it is the
Gromov-Wasserstein distance between Gaussians over Gaussian couplings (Delon, Desolneux and Salmona
2022, Gromov-Wasserstein distances between Gaussian distributions), an upper bound of that over all
couplings of these Gaussians:

    4 (tr S - tr T)^2 + 8 sum_k (l_k - h_k)^2

with sorted eigenvalues l of S and h of T, the shorter list padded with 0.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations

import torch
from torch import Tensor

from otdd_flash.cost.compute import ComputeOptions
from otdd_flash.cost.facts import Pair
from otdd_flash.cost.ground import GroundCost
from otdd_flash.errors import InputError
from otdd_flash.fingerprint import Unchanged
from otdd_flash.gromov.energy import Cloud, Energy
from otdd_flash.gromov.problem import Problem
from otdd_flash.gromov.record import GromovRecord
from otdd_flash.gromov.solve import prepare, solve_gromov
from otdd_flash.labels import (
    ClassDistances,
    Gaussian,
    Given,
    JointClassDistances,
    LabelMetric,
    NoLabels,
    Tree,
    drop_small_classes,
    notice_single_samples,
)
from otdd_flash.labels.gaussian import covariance_factor
from otdd_flash.labels.measuring import matched
from otdd_flash.labels.metrics import Continuous
from otdd_flash.labels.pairs import ClassCloud, split_classes
from otdd_flash.labels.table import class_names, joint_table
from otdd_flash.operators.comparison import Comparison, check_comparable
from otdd_flash.operators.label_costs import MOST_SETS
from otdd_flash.result import DistanceResult
from otdd_flash.samples import LabeledSamples
from otdd_flash.solver.divergence import Divergence, report_convergence
from otdd_flash.solver.schedules import Converged, Exact, Schedule
from otdd_flash.solver.term import SolverProgress, epsilon_given_as, resolve_epsilon


def gromov_options(
    metric: LabelMetric | None,
    lambda_x: float,
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
        InputError: as `check_metric`; debiasing, unmatched mass, several processes, a schedule
            without a criterion, or a width of bounds that was asked for.
    """
    check_metric(metric, lambda_x, lambda_y)
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
    if options.bound_width not in (None, 0, Exact.bound_width):
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
    compared = prepare(sides, cost, compute)
    table = class_table((source, target), metric, statistics)
    measured = time.perf_counter()
    compared = compared.with_classes(None if isinstance(metric, NoLabels) else table.full)
    with compared.within_memory():
        problem = Problem.of(compared)
        name, given, used = resolve_epsilon(epsilon, epsilon_relative, lambda: problem.independent)
        with epsilon_given_as(name, given, used):
            problem = replace(problem, compared=compared.at(used))
            linear, solved, record = solve_gromov(problem, options, starts, progress)
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
        gromov=record,
    )


class GromovPairs:
    """The problems between every two of several datasets.

    Args:
        compared: all of them, by `prepare`.
        table: their class distances, or None where labels are not compared.

    Attributes:
        records: of the pairs that were solved.
    """

    def __init__(self, compared: Comparison, table: JointClassDistances | None) -> None:
        self._compared, self._table = compared, table
        with compared.within_memory():
            self._clouds = [Cloud.of(samples) for samples in compared.transformed]
        self.records: dict[Pair, GromovRecord] = {}

    @property
    def mean_cost(self) -> float:
        """The mean of F(a b^T) over all pairs."""
        pairs = list(combinations(range(len(self._clouds)), 2))
        return sum(self._problem(*pair, 0.0).independent for pair in pairs) / len(pairs)

    def solve(
        self, epsilon: float, options: Schedule, starts: int, pairs: Iterable[Pair]
    ) -> Iterator[Divergence]:
        """Yield the solves of pairs (i, j), i < j."""
        assert isinstance(options, Converged | Exact)
        for i, j in pairs:
            problem = self._problem(i, j, epsilon)
            with problem.compared.within_memory():
                _, solved, self.records[i, j] = solve_gromov(problem, options, starts)
            yield solved

    def _problem(self, i: int, j: int, epsilon: float) -> Problem:
        table = None if self._table is None else self._table.between(i, j).full
        one = self._compared.of(i, j).with_classes(table).at(epsilon)
        return Problem(one, Energy(self._clouds[i], self._clouds[j]))


def checked(
    datasets: Sequence[LabeledSamples], metric: LabelMetric | None, min_class_size: int | None
) -> tuple[LabeledSamples, ...]:
    """Check datasets of any dimensions before they are prepared; return them less small classes.

    Raises:
        InputError: they are on different devices, hold numbers whose squares overflow, or too many
            sets of labels.
    """
    check_comparable(*datasets, dimensions=False)
    sides = tuple(drop_small_classes(samples, min_class_size) for samples in datasets)
    if metric is not None:
        notice_single_samples(sides, metric)
    for side in sides:
        sets = 0 if side.label_sets is None else side.class_total
        if sets > MOST_SETS and not isinstance(metric, NoLabels):
            raise InputError(
                f"ground=gromov compares up to {MOST_SETS} sets of labels, and {side.name} has "
                f"{sets}; set labels=none, or give each row one label"
            )
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


MEASURED = "gaussian, given, none, or a tree that adds nothing"


def check_metric(metric: LabelMetric | None, lambda_x: float, lambda_y: float | None) -> None:
    """Refuse metrics between points of one dimension, labels without `lambda_y`, and no cost.

    Raises:
        InputError: one of these.
    """
    plain = metric is None or isinstance(metric, Gaussian | Given | NoLabels)
    tree = isinstance(metric, Tree) and metric.add is None
    if metric is not None and (isinstance(metric, Continuous) or not (plain or tree)):
        raise InputError(
            f"ground=gromov compares no points of different datasets, as labels={metric.name} "
            f"does; take one of {MEASURED}"
        )
    if lambda_y is None and not isinstance(metric, NoLabels):
        raise InputError(
            "ground=gromov adds lambda_x E, a length to the fourth, and lambda_y W, which is "
            "whatever the class distances are; give lambda_y, or set labels=none"
        )
    if lambda_x == 0 and isinstance(metric, NoLabels):
        raise InputError("lambda_x is 0 and labels=none, so every cost is 0; raise lambda_x")


def gromov_table(datasets: Sequence[LabeledSamples], metric: LabelMetric) -> JointClassDistances:
    """Measure the table of all classes of some datasets, by any checked metric but `Given`."""
    names = [name for samples in datasets for name in class_names(samples)]
    if isinstance(metric, Gaussian):
        clouds = [cloud for samples in datasets for cloud in split_classes(samples)]
        return joint_table(datasets, gaussian_table(spectra(clouds, metric)))
    named = metric.by_names(names)
    zeros = torch.zeros(len(names), len(names), dtype=torch.float64)
    return joint_table(datasets, zeros if named is None else named)


def spectra(clouds: Sequence[ClassCloud], metric: Gaussian) -> Tensor:
    """Return the eigenvalues of class covariances (V, d), the largest first, padded with 0."""
    found = []
    for cloud in clouds:
        factor = covariance_factor(cloud, metric.unbiased)
        if metric.diagonal:
            values = factor.square().sum(0).sort(descending=True).values
        else:
            values = torch.linalg.svdvals(factor).square()
        found.append(values.cpu())
    return torch.nn.utils.rnn.pad_sequence(found, batch_first=True)


def gaussian_table(eigenvalues: Tensor) -> Tensor:
    """Return the table (V, V) of Gaussians with eigenvalues (V, d), sorted and padded."""
    traces = eigenvalues.sum(1)
    gaps = torch.cdist(eigenvalues, eigenvalues, compute_mode="donot_use_mm_for_euclid_dist")
    return (4 * (traces[:, None] - traces).square() + 8 * gaps.square()).fill_diagonal_(0)
