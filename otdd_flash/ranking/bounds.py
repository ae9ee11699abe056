"""Bounds of OT_epsilon between a query and a member of an index, from cheap to dear.

With exact marginals moments prove

    OT_epsilon >= OT_0 >= lambda_x (||m_x - m_y||^2 + B(S_x, S_y)) + lambda_y T,

as KL(P | a b^T) >= 0 and the least sum is no less than the sum of the least. B is the
Bures-Wasserstein distance of the covariances (Gelbrich 1990, On a formula for the L2 Wasserstein
metric between measures on Euclidean and Hilbert spaces). T is a dual value of the transport of
class masses under lower bounds of W, ||m_i - m_j||^2 + (sqrt tr S_i - sqrt tr S_j)^2, feasible for
these costs and so below the least cost of that transport.

Of rows with several labels T is of the masses of labels, less what the label cost subtracts of each
side, the means of u_i^T W u_i / 2: it may be below 0. Numbers are columns of points.

`Terms` solves cross terms within growing budgets, as any potentials prove a bound. Of many rows the
first budget takes the potentials of a sample, extended to all rows by softmins (`solver.solve`);
later budgets go on from the potentials of those before. At epsilon 0 there are no budgets. Self
terms are solved to the end, and so are small cross terms on a GPU; small problems of either kind
side by side.

`index` computes moments and self terms of members by this module, and `race` those of the query,
lower bounds and cross terms. A ranking is proven by the intervals alone, so a change must keep them
valid, rounding included (`tests/ranking/test_ranking_bounds.py`). The fields of `Moments` and
`SelfTerm` are in the files of an index, so their names must stay.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from otdd_flash.cost.compute import ComputeOptions, uses_triton
from otdd_flash.cost.ground import GroundCost
from otdd_flash.cost.points import DOUBLE_UNIT
from otdd_flash.distributed.ranks import Ranks, restored, saved
from otdd_flash.errors import EpsilonOutOfRange
from otdd_flash.formulas.marginals import Constraints
from otdd_flash.labels.gaussian import class_moments, fidelities
from otdd_flash.labels.measuring import measure_pairs
from otdd_flash.labels.metrics import Continuous, Gaussian, Means, NoLabels, UpperBound, scale_of
from otdd_flash.labels.metrics import Exact as ExactMetric
from otdd_flash.labels.metrics.base import LabelMetric
from otdd_flash.labels.pairs import ClassCloud, merge_identical, pool, symmetric_table
from otdd_flash.labels.table import class_names
from otdd_flash.operators.comparison import Comparison
from otdd_flash.operators.label_costs import embedding_of_targets, has_sets
from otdd_flash.samples import LabeledSamples
from otdd_flash.solver.divergence import (
    Divergence,
    solve_divergence,
    solve_identical,
    whole_term,
)
from otdd_flash.solver.schedules import Converged, Exact
from otdd_flash.solver.small.pooled_solve import Batch
from otdd_flash.solver.small.route import is_small, solve_terms
from otdd_flash.solver.solving import refuse_below_zero, solve
from otdd_flash.solver.term import TransportTerm, UnreachableTolerance

T = TypeVar("T")

# Updates of both potentials after which a term is certified for the first times; then it is solved
# to the default tolerance, and from then on to intervals narrower by this factor.
BUDGETS, SMALLER = (2, 8, 32), 0.1
# Iterations that go on from known potentials. After them a descent from large epsilons begins, but
# not of a term that had converged: a smaller error may be below the rounding of double precision.
MOST_CONTINUED = 500
# The width of a self term's interval, over its value or epsilon, and how often a smaller error is
# tried.
SELF_WIDTH, MOST_NARROWED = 1e-6, 3
# Features up to which singular values of products of covariance factors are computed.
MOST_FEATURES = 256
# Problems that are solved side by side.
AT_ONCE = 32
# Entries of differences between classes that are held at once.
MOST_GAPS = 1 << 24


class Moments(NamedTuple):
    """The moments of a dataset's rows, float64, after the transform of the ground cost.

    Attributes:
        mean: (d,); numbers of rows are coordinates as well.
        factor: F (r, d) with F^T F the covariance, dividing by n; (0, d) of many features.
        trace: () of the covariance.
        class_means: (V, d), of labels where rows have several.
        class_traces: (V,) of the covariances as the metric of classes takes them.
        class_masses: (V,).
        within: () mean of u_i^T W u_i over rows, 0 where each has one label.
    """

    mean: Tensor
    factor: Tensor
    trace: Tensor
    class_means: Tensor
    class_traces: Tensor
    class_masses: Tensor
    within: Tensor

    def to(self, device: torch.device | str) -> Moments:
        """Return the moments on a device."""
        return Moments(*(part.to(device) for part in self))


def moments_of(
    sides: Sequence[LabeledSamples],
    metric: LabelMetric,
    cost: GroundCost,
    tables: Sequence[Tensor] | None = None,
) -> list[Moments]:
    """Compute the moments of transformed samples without empty classes, on the host.

    Args:
        sides: the datasets.
        metric: of class distances, or of numbers with their scale.
        cost: the ground cost.
        tables: W of each dataset with itself, as `class_tables` measures it; rows with several
            labels need it.
    """
    sides = [_with_numbers(side, cost, scale_of(metric)) for side in sides]
    there = [side.masses > 0 for side in sides]
    clouds = [
        ClassCloud(side.name, side.features[some], side.masses[some])
        for side, some in zip(sides, there, strict=True)
    ]
    few = sides[0].dim <= MOST_FEATURES
    wholes = class_moments(clouds, unbiased=False)
    found = []
    for place, (side, whole) in enumerate(zip(sides, wholes, strict=True)):
        means, traces, masses = _class_moments(side, getattr(metric, "unbiased", False))
        within = masses.new_zeros(())
        if tables is not None and has_sets([side]):
            count = len(class_names(side))
            shares = side.shares.to(masses)
            of_rows = (shares @ tables[place][:count, :count].to(shares) * shares).sum(1)
            within = side.masses @ of_rows
        factor = whole.factor if few else whole.factor[:0]
        found.append(Moments(whole.mean, factor, whole.trace, means, traces, masses, within))
    return [one.to("cpu") for one in found]


def _with_numbers(
    samples: LabeledSamples, cost: GroundCost, scale: tuple[float, ...] | None
) -> LabeledSamples:
    """Return points of which numbers are further coordinates, where rows have numbers."""
    if scale is None:
        return samples
    embedding = embedding_of_targets((samples, samples), cost, scale)
    # All datasets have the same centre, 0.
    return replace(embedding, centre=torch.zeros(len(scale))).appended(samples, 0)


def _class_moments(side: LabeledSamples, unbiased: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return means (V, d), traces (V,) and masses (V,) of labels, float64."""
    points, masses = side.features.double(), side.masses
    labels = side.labels
    if labels is None:
        labels = torch.zeros(len(side), dtype=torch.int64, device=points.device)
    count = len(class_names(side))
    if has_sets([side]):
        # A row for each label that a row has.
        parts = side.shares.to(masses)
        rows, labels = parts.nonzero().unbind(1)
        points, masses = points[rows], masses[rows] * parts[rows, labels]
    of_class = masses.new_zeros(count).index_add_(0, labels, masses)
    shares = masses / of_class[labels]
    means = points.new_zeros(count, points.shape[1]).index_add_(0, labels, shares[:, None] * points)
    squares = (points - means[labels]).square().sum(1)
    traces = masses.new_zeros(count).index_add_(0, labels, shares * squares)
    if unbiased:
        # As `covariance_factor`: reliability weights, and 0 of a single sample. For a share above a
        # half, which at most one row of a class has, 1 - share is the sum of all others.
        heavy = shares > 0.5
        light = masses.new_zeros(count).index_add_(0, labels, torch.where(heavy, 0, shares))
        rest = torch.where(heavy, light[labels], 1 - shares)
        unevenness = masses.new_zeros(count).index_add_(0, labels, shares * rest)
        traces = torch.where(unevenness > 0, traces / unevenness, 0)
    return means, traces, of_class


def lowest_by_moments(
    query: Moments,
    members: Sequence[Moments],
    cost: GroundCost,
    metric: LabelMetric,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Compute lower bounds of OT_0 between a query and K members, (K,) float64 on the host.

    For `inner` they are of the costs between points after its transform, as all terms are.
    """
    means, traces, within = (
        torch.stack([getattr(one, key) for one in members]) for key in ("mean", "trace", "within")
    )
    if len(query.factor):
        pairs = torch.tensor([(0, place + 1) for place in range(len(members))])
        factors = [one.factor.to(device) for one in (query, *members)]
        fidelity = fidelities(factors, pairs.to(device)).cpu()
    else:
        fidelity = (query.trace * traces).sqrt()
    gaps = (means - query.mean).square().sum(1)
    # Sums of n products, and singular values, are off by this share of the sizes at the most.
    slack = 64 * (len(query.mean) + 2**14) * DOUBLE_UNIT
    sizes = traces + query.trace + query.mean.square().sum() + means.square().sum(1)
    points = (gaps + query.trace + traces - 2 * fidelity - slack * sizes).clamp_min(0)
    squared = cost.squared
    numbered = isinstance(metric, Continuous)
    # Numbers alone are compared where points weigh nothing.
    weight = cost.lambda_y if numbered and squared.lambda_x == 0 else squared.lambda_x
    found = weight * points
    if cost.lambda_y > 0 and not numbered:
        # Several labels: the part that their cost subtracts on each side, and its rounding.
        found -= cost.lambda_y * (1 + slack) * (query.within + within) / 2
        if isinstance(metric, Gaussian | Means | UpperBound | ExactMetric):
            spread = isinstance(metric, Gaussian)
            # The entries of the differences between the class means of the query and a member.
            entries = query.class_means.numel() * max(len(one.class_means) for one in members)
            size = max(1, MOST_GAPS // entries)
            parts = [members[first : first + size] for first in range(0, len(members), size)]
            classes = [_class_transport(query, part, slack, spread) for part in parts]
            found += cost.lambda_y * torch.cat(classes)
    return found - cost.error(len(query.mean))


def _class_transport(
    query: Moments, members: Sequence[Moments], slack: float, spread: bool
) -> Tensor:
    """Return lower bounds (K,) of the transport of class masses, from two dual solutions."""
    # Classes of mass 0 fill up; they take no part in a least cost.
    y, of_y, q = (
        pad_sequence([getattr(one, f"class_{key}") for one in members], batch_first=True)
        for key in ("means", "traces", "masses")
    )
    x, of_x, p = query.class_means, query.class_traces, query.class_masses
    table = (x[:, None] - y[:, None]).square().sum(3)
    sizes = x.square().sum(1)[:, None] + y.square().sum(2)[:, None]
    if spread:
        table += (of_x.sqrt()[:, None] - of_y.sqrt()[:, None]).square()
        sizes = sizes + of_x[:, None] + of_y[:, None]
    table = (table - slack * sizes).clamp_min(0)
    table = torch.where(q[:, None] > 0, table, math.inf)
    f, g = table.amin(2), torch.where(q > 0, table.amin(1), 0)
    rest = torch.where(q > 0, (table - f[:, :, None]).amin(1), 0)
    first = f @ p + (q * rest).sum(1)
    second = (q * g).sum(1) + (table - g[:, None]).amin(2) @ p
    return torch.maximum(first, second) * (1 - slack)


def class_tables(
    sides: Sequence[LabeledSamples],
    wanted: Sequence[tuple[int, int]],
    metric: LabelMetric,
    cache_dir: str | os.PathLike[str] | None = None,
) -> list[Tensor]:
    """Measure W (V_i + V_j, V_i + V_j) of some pairs of datasets, each two classes once.

    Blocks of one dataset are measured where a row of either has several labels, or the pair is of a
    dataset with itself; else they are 0 and nobody reads them.

    Raises:
        InputError: labels are missing, or a class has no sample of positive weight or is too large
            for the method.
    """
    names = [class_names(side) for side in sides]
    places = [*accumulate(map(len, names), initial=0)]
    spans = [range(first, last) for first, last in pairwise(places)]
    blocks = {(i, j) for i, j in wanted}
    blocks |= {(k, k) for pair in wanted if has_sets([sides[p] for p in pair]) for k in pair}
    named = metric.by_names([name for some in names for name in some])
    table = torch.zeros(places[-1], places[-1], dtype=torch.float64) if named is None else named
    if not isinstance(metric.measured, NoLabels):
        clouds, _ = pool(sides)
        distinct, index = merge_identical(clouds)
        of_class = [[index[c] for c in span] for span in spans]
        pairs = {
            (max(c, k), min(c, k)) for i, j in blocks for c in of_class[i] for k in of_class[j]
        }
        listed = torch.tensor(sorted(p for p in pairs if p[0] != p[1]), dtype=torch.int64)
        listed = listed.reshape(-1, 2)
        found = measure_pairs(distinct, listed, metric.measured, cache_dir=cache_dir)
        merged = torch.tensor(index)
        measured = symmetric_table(found.values.cpu(), listed, len(distinct)).double()
        table = table + measured[merged][:, merged]
    return [_joint(table, spans[i], spans[j], own=(i, i) in blocks) for i, j in wanted]


def _joint(table: Tensor, x: range, y: range, *, own: bool) -> Tensor:
    """Return the table of two datasets from that of many, without their own blocks unless asked."""
    rows = torch.tensor([*x, *y])
    found = table[rows][:, rows]
    if not own:
        found[: len(x), : len(x)] = found[len(x) :, len(x) :] = 0
    return found


class Problem(NamedTuple):
    """A term to solve: between a query and a member, or of one dataset with itself.

    Attributes:
        x: transformed samples.
        y: transformed samples of the other side; x itself for a self term.
        table: W (V_x + V_y, V_x + V_y), as `class_tables` measures it.
        before: the term as it was solved last, or None.
        level: how often it has been solved.
    """

    x: LabeledSamples
    y: LabeledSamples
    table: Tensor
    before: TransportTerm | None = None
    level: int = 0

    @property
    def own(self) -> bool:
        return self.x is self.y


class Raised(NamedTuple):
    """A term after another budget, and whether nothing narrows its interval further.

    The term is None if rounding exceeds the tolerance of the first budget already.
    """

    term: TransportTerm | None
    last: bool


@dataclass(frozen=True)
class Terms:
    """Solves terms at one cost and epsilon, each call within the next budget of each term.

    Attributes:
        cost: the ground cost, of points that it has transformed.
        epsilon: in units of the cost; 0 is exact transport.
        constraints: on the marginals.
        compute: options of the passes, without a group.
        target_scale: of numbers, see `labels.metrics.scale_of`.
    """

    cost: GroundCost
    epsilon: float
    constraints: Constraints
    compute: ComputeOptions
    target_scale: tuple[float, ...] | None = None

    def raised(self, problems: Sequence[Problem]) -> list[Raised]:
        """Solve every problem within its next budget.

        Raises:
            InputError: of a self term rounding alone exceeds the tolerance at this epsilon and
                precision.
        """
        new = sorted((one for one in problems if one.before is None), key=lambda one: len(one.y))
        found: dict[Problem, TransportTerm | None] = {}
        if len(new) > 1 and self.takes_many(new[-1].x, new[-1].y):
            for first in range(0, len(new), AT_ONCE):
                some = new[first : first + AT_ONCE]
                with suppress(UnreachableTolerance, EpsilonOutOfRange):
                    found |= zip(some, self._together(some), strict=True)
        solved = [found.get(one) for one in problems]
        return [
            self._alone(one) if term is None else Raised(term, False)
            for one, term in zip(problems, solved, strict=True)
        ]

    def takes_many(self, x: LabeledSamples, y: LabeledSamples) -> bool:
        """Return whether new problems of such sides are solved side by side, to the end.

        On a processor the first budgets of cross terms take less time one after the other. Rows
        with several labels or numbers are solved alone, and so is exact transport.
        """
        if self.target_scale is not None or has_sets((x, y)) or self.epsilon == 0:
            return False
        if x is not y and not uses_triton(self.compute, x.features.device):
            return False
        total = x.class_total + y.class_total
        anyone = Problem(x, y, torch.zeros(total, total, dtype=torch.float64))
        return is_small(self._comparison(anyone), Converged())

    def _comparison(self, problem: Problem) -> Comparison:
        """Return the comparison of both sides, of a self term with all of its terms."""
        found = Comparison.prepare(
            (problem.x, problem.y),
            self.cost,
            self.compute,
            debias=problem.own,
            transformed=True,
            resident=True,
            target_scale=self.target_scale,
        )
        compared = found.with_classes(problem.table).at(self.epsilon)
        compared = replace(compared, constraints=self.constraints)
        refuse_below_zero(compared)
        return compared

    def _alone(self, problem: Problem) -> Raised:
        """Solve one problem within its next budget."""
        before, compared = problem.before, self._comparison(problem)
        if self.epsilon == 0:
            # Once to the width of its default, then as far as rounding allows.
            exact = Exact() if before is None else Exact(bound_width=0.0)
            return Raised(whole_term(solve(compared, exact).xy, compared), before is not None)
        again = before is not None and before.converged
        options, budgeted = Converged(), False
        if before is not None and again:
            (low, high), options = (
                before.bounds,
                Converged(tolerance=SMALLER * before.marginal_error),
            )
            # The width that a divergence is asked for is 0 for self terms.
            if not problem.own and before.value != 0 and high > low:
                options = Converged(bound_width=SMALLER * (high - low) / abs(before.value))
        elif not problem.own and problem.level < len(BUDGETS):
            options, budgeted = Converged(max_iterations=BUDGETS[problem.level]), True
        try:
            found = self._solved(compared, options, before, own=problem.own)
        except (UnreachableTolerance, EpsilonOutOfRange):
            if problem.own and not again:
                raise
            return Raised(before, True)
        term = whole_term(found.widened(compared.cost_error).xy, compared)
        if before is not None:
            # Both intervals hold, and so does their intersection.
            (low, high), (lower, upper) = before.bounds, term.bounds
            low, high = max(low, lower), min(high, upper)
            passes = before.passes + term.passes
            term = replace(term, bounds=(low, max(low, high)), passes=passes)
        ended = not found.converged or found.stopped_by == "rounding"
        return Raised(term, ended and not budgeted and before is not None)

    def _solved(
        self, compared: Comparison, options: Converged, before: TransportTerm | None, *, own: bool
    ) -> Divergence:
        """Solve a term, from known potentials if there are any."""
        solve_it, name = (solve_identical, "xx") if own else (solve_divergence, "xy")
        if before is not None:
            most = min(options.max_iterations, MOST_CONTINUED)
            start = {name: before.g}
            found = solve_it(compared, replace(options, max_iterations=most), start=start)
            if before.converged or found.converged or most == options.max_iterations:
                return found
        return solve_it(compared, options)

    def _together(self, problems: Sequence[Problem]) -> list[TransportTerm | None]:
        """Solve new problems of one kind side by side; None where one needs another solve."""
        own, many = problems[0].own, list(problems)
        if own:
            # Two self terms are those of one divergence, whose cross term is not read.
            many += many[-1:] * (len(many) % 2)
            sides = [one.x for one in many[::2]], [one.x for one in many[1::2]]
        else:
            sides = [one.x for one in many], [one.y for one in many]
        first, last = (max(side.class_total for side in some) for some in sides)
        table = torch.zeros(len(sides[0]), first + last, first + last, dtype=torch.float64)
        for k, one in enumerate(many):
            x, y = one.x.class_total, one.y.class_total
            place, rows, columns = (k // 2, k % 2, k % 2) if own else (k, 0, 1)
            table[place, rows * first :, columns * first :][:x, :y] = one.table[:x, x:]
        points, masses, labels = zip(*map(_padded, sides), strict=True)
        weights = self.cost.squared.lambda_x, self.cost.lambda_y
        batch = Batch(points, masses, labels, (first, last), table, weights)
        solved = solve_terms(
            batch,
            self.epsilon,
            Converged(),
            debias=own,
            in_triton=uses_triton(self.compute, points[0].device),
            constraints=self.constraints,
        )
        names = ("xx", "yy") if own else ("xy",)
        terms = [None if one is None else one[name] for one in solved for name in names]
        error = self.cost.error(points[0].shape[2])
        return [
            term and replace(term, f=term.f[: len(x)], g=term.g[: len(y)]).widened(error)
            for (x, y, *_), term in zip(problems, terms, strict=False)
        ]


def _padded(sides: Sequence[LabeledSamples]) -> tuple[Tensor, Tensor, Tensor]:
    """Stack points (B, n, d), masses and labels (B, n), with points of mass 0 to equal sizes."""
    most, first = max(map(len, sides)), sides[0].features
    # Copies of a point, so that nothing overflows.
    points = torch.stack([side.features[:1].expand(most, -1) for side in sides])
    masses = first.new_zeros(len(sides), most, dtype=torch.float64)
    labels = torch.zeros_like(masses, dtype=torch.int64)
    for k, side in enumerate(sides):
        points[k, : len(side)], masses[k, : len(side)] = side.features, side.masses
        if side.labels is not None:
            labels[k, : len(side)] = side.labels
    return points, masses, labels


class SelfTerm(NamedTuple):
    """The value and bounds of OT_epsilon of a dataset with itself."""

    value: float
    bounds: tuple[float, float]


def self_terms(terms: Terms, problems: list[Problem]) -> list[SelfTerm]:
    """Solve self terms until their intervals are narrow, or no narrower by rounding."""
    if terms.epsilon == 0 and not has_sets([one.x for one in problems]):
        # Costs are not negative, and nothing has to move. Costs of several labels may be negative.
        return [SelfTerm(0.0, (0.0, 0.0))] * len(problems)
    # Sent to another rank, both sides are copies of their own.
    problems = [one._replace(y=one.x) for one in problems]
    found = []
    for one, (term, last) in zip(problems, terms.raised(problems), strict=True):
        assert term is not None
        for _ in range(MOST_NARROWED):
            width = SELF_WIDTH * max(abs(term.value), terms.epsilon)
            if last or term.bounds[1] - term.bounds[0] <= width:
                break
            ((narrowed, last),) = terms.raised([one._replace(before=term)])
            term = narrowed or term
        found.append(SelfTerm(term.value, term.bounds))
    return found


def cross_terms(terms: Terms, problems: list[Problem]) -> list[Raised]:
    """Solve cross terms within their next budgets."""
    return terms.raised(problems)


def spread(
    group: object, work: Callable[[Any, list[Any]], list[T]], shared: Any, items: Sequence[Any]
) -> list[T]:
    """Return work(shared, items), with the items dealt to ranks if there are any."""
    if not isinstance(group, Ranks) or len(items) < 2:
        return work(shared, list(items))
    return group.order(_work_of_rank, work, saved((shared, list(items))))


def _work_of_rank(
    ranks: Ranks, work: Callable[[Any, list[Any]], list[T]], content: bytes
) -> list[T]:
    """Do this rank's part of the work and gather all; run by every rank."""
    shared, items = restored(content)
    own = range(ranks.rank, len(items), ranks.size)
    mine = ranks.together(lambda: work(shared, [items[place] for place in own]))
    found: dict[int, T] = {}
    for rank, content in enumerate(ranks.all_gathered_objects(saved(mine))):
        found |= dict(zip(range(rank, len(items), ranks.size), restored(content), strict=True))
    return [found[place] for place in range(len(items))]
