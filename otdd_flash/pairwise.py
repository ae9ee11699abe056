"""Optimal Transport Dataset Distances between all pairs of several labelled datasets.

    S_epsilon(x, y) = OT_epsilon(x, y) - OT_epsilon(x, x) / 2 - OT_epsilon(y, y) / 2

A self term depends on one dataset and its block of W alone. So K datasets take K self terms and K
(K - 1) / 2 cross terms, and the table W over all their classes is measured once.
`pairwise_distances` is public, and no module of this package calls it; it uses the same request,
problem and solver as `otdd.dataset_distance`. A change must keep every number equal to that of
`dataset_distance` for the same two datasets and epsilon, also if several ranks solve the terms, so
that results of both can be compared.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations

from otdd_flash.arguments import Count, Ground, NotNegative, Positive, takes
from otdd_flash.data.given import Samples
from otdd_flash.distributed.ranks import Ranks, balanced, ranks_of, restored, saved
from otdd_flash.eager import computes
from otdd_flash.errors import ConvergenceError, InputError, NotConvergedWarning, warn
from otdd_flash.labels import (
    JointClassDistances,
    Labels,
    drop_small_classes,
    metric_of,
    notice_single_samples,
    settled_metric,
)
from otdd_flash.labels.by_ranks import measured_by_ranks
from otdd_flash.labels.many import as_datasets, measure_all
from otdd_flash.labels.pairs import Progress
from otdd_flash.operators.build import Compute, ComputeOptions, mean_cost
from otdd_flash.operators.ground import GroundCost
from otdd_flash.operators.request import Pair, Request, check_comparable
from otdd_flash.pairwise_result import PairwiseResult, gather
from otdd_flash.shown import display
from otdd_flash.solver.divergence import Divergence
from otdd_flash.solver.problem import SIDES, Problem
from otdd_flash.solver.schedules.base import Schedule
from otdd_flash.solver.schedules.converged import Converged
from otdd_flash.solver.shortfall import joint_shortfall
from otdd_flash.solver.term.epsilon import epsilon_of_datasets, refuse_both, settled_epsilon


@computes
@takes()
def pairwise_distances(
    datasets: Sequence[Samples],
    *,
    epsilon: Positive | None = None,
    epsilon_relative: Positive | None = None,
    labels: Labels = "gaussian",
    class_distances: JointClassDistances | None = None,
    min_class_size: Count | None = None,
    lambda_x: NotNegative = 0.5,
    lambda_y: NotNegative = 0.5,
    ground: Ground = "sqeuclidean",
    solver: Schedule | None = None,
    compute: Compute | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    class_progress: Progress | None = None,
    progress: Progress | None = None,
) -> PairwiseResult:
    """Compare several labelled datasets, each with each.

    Every number is that of `dataset_distance` between the same two datasets, the earlier one as the
    source, at the same epsilon.

    Args:
        datasets: K >= 2 labelled datasets of one dimension, on one device, as samples, as arrays
            (features, labels) or as any datasets of vectors that `otdd.embed` takes.
        epsilon: entropic regularisation of all pairs, in units of the cost.
        epsilon_relative: the same as a multiple of the mean cost, the mean over all pairs of
            different datasets; instead of `epsilon`. Neither given means 0.01 of that mean.
        labels: how distances between classes are measured, a name such as "gaussian", a metric such
            as `otdd.labels.Gaussian(diagonal=True)`, or a function f(x, y) of the points (n, d) and
            (m, d) of two classes that returns their squared distance.
        class_distances: a table to use instead of measuring one, from `otdd.class_distances` on the
            same datasets or on those of which they are subsets; classes are matched by name.
        min_class_size: drop classes with fewer samples, with a notice.
        lambda_x: weight of the squared distance between features, or of the `ground` cost.
        lambda_y: weight of the squared distance between classes.
        ground: the cost between features, as for `dataset_distance`.
        solver: how to solve and when to stop, `otdd.Converged()` by default.
        compute: where and how passes run, or only the device.
        cache_dir: folder of a database of measured class distances, keyed by the content of the
            classes; known distances are read from it. None: no cache.
        class_progress: called as class_progress(pairs of classes measured, their total).
        progress: called as progress(terms solved, their total).

    Raises:
        InputError: the request cannot be met; the message says what to change.
        ConvergenceError: `solver.require_convergence` is set and a term stopped early.

    Warns:
        NotConvergedWarning: a term stopped early.
    """
    refuse_both(epsilon, epsilon_relative)
    cost, compute = GroundCost(lambda_x, lambda_y, ground), ComputeOptions.of(compute)
    options, metric = solver or Converged(), metric_of(labels)
    if not isinstance(options, Converged) or options.bound_width or options.max_seconds:
        raise InputError(
            "pairwise_distances solves every term once, to solver.tolerance; solver.bound_width, "
            "solver.max_seconds and solver.schedule=geomloss are for dataset_distance"
        )
    whole = as_datasets(datasets, at_least=2)
    check_comparable(*whole)
    sides = [drop_small_classes(samples, min_class_size) for samples in whole]
    cost.check_labels(metric.name if class_distances is None else "given")
    if class_distances is None:
        notice_single_samples(sides, metric)
    # Checked before class distances, which may take longer than everything else.
    request = Request.prepare(sides, cost, compute)

    started = time.perf_counter()
    if class_distances is None:
        metric = settled_metric(metric, epsilon, request.seen, request.streaming)
        measure = measured_by_ranks(metric, None if request.streaming else compute.group)
        table = measure_all(request.seen, measure, cache_dir=cache_dir, progress=class_progress)
    else:
        table = class_distances.named_for(sides)
    measured = time.perf_counter()
    mean = _mean_cost(request, table)
    key, given, used = settled_epsilon(epsilon, epsilon_relative, lambda: mean)
    scale = cost.standardized(sides[0].dim)
    with epsilon_of_datasets(key, given, used, lambda: mean, scale):
        found = _Solves(request, table, used, options, progress).run()
    solved = time.perf_counter()
    streaming = request.streaming
    return gather(
        found,
        sides,
        table,
        cost=cost,
        compute=compute.alone,
        method=metric.name if class_distances is None else "given",
        labels_epsilon=getattr(metric, "epsilon", None) if class_distances is None else None,
        mean_cost=mean,
        seconds={"class_distances": measured - started, "solve": solved - measured},
        streamed=None if streaming is None else streaming.tally.summary(solved - measured),
    )


def _mean_cost(request: Request, table: JointClassDistances) -> float:
    """Return the mean cost over all pairs of different datasets."""
    means = [
        mean_cost(request.of(*pair).inputs(SIDES["xy"], table.between(*pair).xy))
        for pair in combinations(range(len(request.seen)), 2)
    ]
    return sum(means, 0.0) / len(means)


class _Solves:
    """The terms of all pairs, each solved once."""

    def __init__(
        self,
        request: Request,
        table: JointClassDistances,
        epsilon: float,
        options: Schedule,
        progress: Progress | None,
    ) -> None:
        self.request, self.table, self.epsilon = request, table, epsilon
        self.options, self.progress = options, progress
        self.found: dict[tuple[int, int], Divergence] = {}

    def run(self) -> dict[tuple[int, int], Divergence]:
        """Return the divergence of every pair (i, j), i <= j; of a dataset from itself it is 0.

        Raises:
            ConvergenceError: convergence is required and a term stopped early.
        """
        count = len(self.request.seen)
        # A dataset's self term comes before the pairs that need it.
        pairs = [(i, j) for j in range(count) for i in (j, *range(j))]
        for (i, j), solved in zip(pairs, self._solved(pairs), strict=True):
            if solved is None:
                solved = self.found[j, j]
            elif i < j:
                solved = replace(solved, xx=self.found[i, i].xx, yy=self.found[j, j].xx)
            self._keep(i, j, solved)
        late = [pair for pair, divergence in self.found.items() if not divergence.converged]
        if late:
            warn(self._message(late), NotConvergedWarning)
        return self.found

    def _solved(self, pairs: Sequence[Pair]) -> Iterator[Divergence | None]:
        """Yield the terms of pairs, solved by this process or distributed over ranks by size."""
        if (ranks := ranks_of(self.request.compute.group)) is None:
            yield from (self.term(*pair) for pair in pairs)
            return
        sizes = [len(side) for side in self.request.seen]
        owners = balanced(
            [sizes[i] * sizes[j] / (2 if i == j else 1) for i, j in pairs], ranks.size
        )
        content = saved((self.request, self.table, self.epsilon, self.options))
        yield from ranks.order(_solve_owned, content, pairs, owners)

    def term(self, i: int, j: int) -> Divergence | None:
        """Solve a self term, or a cross term alone; return None for equal datasets."""
        problem = self._problem(i, j)
        if i == j:
            return problem.solve(self.options)
        return None if problem.identical else problem.solve(self.options, debias=False)

    def _problem(self, i: int, j: int) -> Problem:
        return Problem(self.request.of(i, j), self.epsilon, self.table.between(i, j).full)

    def _keep(self, i: int, j: int, divergence: Divergence) -> None:
        self.found[i, j] = divergence
        if not divergence.converged and self.options.require_convergence:
            raise ConvergenceError(self._message([(i, j)]))
        if self.progress is not None:
            count = len(self.request.seen)
            self.progress(len(self.found), count * (count + 1) // 2)

    def _message(self, late: Sequence[tuple[int, int]]) -> str:
        found = {pair: self.found[pair] for pair in late}
        return joint_shortfall(found, self.options, self._named, found[late[0]].xy.f.dtype)

    def _named(self, pairs: Sequence[tuple[int, int]]) -> str:
        names = [display(name) for name in self.table.datasets]
        shown = [f"{names[i]} and {names[j] if i < j else 'itself'}" for i, j in pairs[:5]]
        more = f" and {len(pairs) - 5} more" if len(pairs) > 5 else ""
        return f"{'; '.join(shown)}{more}"


def _solve_owned(
    ranks: Ranks, content: bytes, pairs: Sequence[Pair], owners: Sequence[int]
) -> list[Divergence | None]:
    """Solve this rank's share of the terms and gather all; run by every rank."""
    request, table, epsilon, options = restored(content)
    solves = _Solves(request, table, epsilon, options, None)
    own = [place for place, owner in enumerate(owners) if owner == ranks.rank]
    found = ranks.together(lambda: {place: solves.term(*pairs[place]) for place in own})
    together: dict[int, Divergence | None] = {}
    for others in ranks.all_gathered_objects(saved(found)):
        together |= restored(others)
    return [together[place] for place in range(len(pairs))]
