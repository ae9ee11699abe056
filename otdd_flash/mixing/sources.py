"""Several sources as one cloud, whose classes stay apart, and the value of their mixtures.

`Sources.of` makes the cloud: the rows of all sources, one after the other, so that one solve at the
masses w_k a_ki is that of a mixture. `compared` measures class distances between all classes of
sources and those of the target once, and settles epsilon once: a mixture of other weights has the
same cost.

`MixtureOracle` solves a mixture at some weights; its potentials bound the value at all others. Rows
i of all sources have masses A_i = w_k a_ki. For any f, g the dual value

    D(f, g) = <b, g> + epsilon + sum_i A_i (f_i - epsilon r_i),
    r_i = sum_j b_j exp((f_i + g_j - C_ij) / epsilon),

is linear in w, as r does not depend on it, and never above OT_epsilon. So for all weights w'

    OT_epsilon(w') >= <b, g> + sum_k w'_k price_k,
    price_k = sum_i a_ki (f_i + epsilon (1 - r_i)).

The mean potential alone is no such bound: f_i + epsilon (1 - r_i) is largest where r_i = 1, at the
softmin of g, and far below f_i where r_i is large. Sources without weight have prices too, as their
rows take softmins. `priced` computes all prices in one pass, at equal weights, so that every row
has mass. Its cut is <b, g> + price_k less the errors of that pass, E, F and rho (A, B and rho in
`solver.evidence`): the sums are of costs C' with |C'_ij - C_ij| <= E_i + F_j + rho |C_ij|, and OT
of C' exceeds that of C by no more than <a, E> + <b, F> + rho <|C|, P>.

The second derivative is epsilon M^T Q^+ M, with the mass M_jk that column j gets from source k, a
unit of weight, and Q = diag(b) - P^T diag(1 / A) P. As Q <= diag(b), it is no less than epsilon M^T
diag(1 / b) M, which takes one product (`MixtureOracle.curvature`).

`mixing.mixture` names and compares the sources and makes a `MixtureOracle`; `mixing.weights` asks
it for values and cuts, and takes its lower bound from the cuts. So without debiasing a cut must
stay below the value at all weights, rounding included (`tests/mixing/test_prices.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from otdd_flash.checks import refused
from otdd_flash.cost.compute import ComputeOptions
from otdd_flash.cost.ground import GroundCost
from otdd_flash.data.given import Samples, as_samples
from otdd_flash.errors import InputError
from otdd_flash.labels import (
    Given,
    JointClassDistances,
    LabelMetric,
    NoLabels,
    drop_small_classes,
    notice_single_samples,
    settled_metric,
)
from otdd_flash.labels.by_ranks import measured_by_ranks
from otdd_flash.labels.measuring import class_block, measure_all
from otdd_flash.labels.metrics import (
    Continuous,
    measures_nothing,
    refuse_table,
    scale_of,
    targets_of,
    with_numbers,
)
from otdd_flash.mixing.weights import NO_TIME, Allowed, Vector, without_small
from otdd_flash.operators.base import Operator
from otdd_flash.operators.comparison import Comparison, check_comparable
from otdd_flash.samples import LabeledSamples, needs_classes
from otdd_flash.shown import display, told_apart
from otdd_flash.solver.divergence import Divergence
from otdd_flash.solver.evidence import DOUBLE_UNIT, share_of_costs
from otdd_flash.solver.schedules import Converged
from otdd_flash.solver.solving import solve
from otdd_flash.solver.term import UnreachableTolerance, epsilon_of_datasets, resolve_epsilon

# The most sources of a mixture.
MOST_SOURCES = 200


@dataclass(frozen=True, eq=False)
class Sources:
    """K sources and their rows as one cloud.

    Attributes:
        names: K names, distinct.
        each: the K sources.
        cloud: their n rows, classes numbered through; weights are those of equal shares.
        members: (n,) int64, the source of each row.
        own: (n,) float64, the mass of each row within its source.
    """

    names: tuple[str, ...]
    each: tuple[LabeledSamples, ...]
    cloud: LabeledSamples
    members: Tensor
    own: Tensor

    @classmethod
    def of(cls, names: Sequence[str], each: Sequence[LabeledSamples], *, labelled: bool) -> Sources:
        """Put sources together; without `labelled`, the rows have no classes."""
        sizes = torch.tensor([len(one) for one in each])
        members = torch.repeat_interleave(torch.arange(len(each)), sizes)
        home = each[0].features.device
        own = torch.cat([one.masses for one in each])
        labels, classes, targets = None, tuple[str, ...](), None
        if labelled:
            found, first = list[Tensor](), 0
            for one in each:
                if one.labels is None:
                    raise needs_classes(one)
                found.append(one.labels + first)
                first += one.class_total
                classes += one.class_names
            labels = torch.cat(found)
        elif all(one.targets is not None for one in each):
            targets = torch.cat([targets_of(one) for one in each])
        cloud = LabeledSamples(
            torch.cat([one.points_of(slice(None)) for one in each]),
            labels,
            classes,
            weights=own / len(each),
            name="mixture",
            targets=targets,
        )
        return cls(tuple(names), tuple(each), cloud, members.to(home), own)

    def masses(self, w: NDArray[np.float64]) -> Tensor:
        """Return w_k a_ki (n,) of weights (K,)."""
        of_rows = torch.from_numpy(np.ascontiguousarray(w)).to(self.own.device)[self.members]
        return self.own * of_rows

    def used(self, w: NDArray[np.float64]) -> Tensor:
        """Return which rows are of sources with weight, (n,) bool, of weights (K,)."""
        return torch.from_numpy(w > 0).to(self.members.device)[self.members]

    def sums(self, values: Tensor) -> NDArray[np.float64]:
        """Return sum_i a_ki v_i (K,) of values (n,), on the host."""
        found = torch.zeros(len(self.names), dtype=torch.float64, device=self.own.device)
        # Rows without mass may have any value.
        held = torch.where(self.own > 0, self.own * values.to(self.own.device), 0.0)
        total: NDArray[np.float64] = found.index_add_(0, self.members, held).cpu().numpy()
        return total


def named_sources(
    sources: Sequence[Samples] | Mapping[str, Samples],
) -> tuple[tuple[str, ...], list[LabeledSamples]]:
    """Return distinct names and samples of sources, of which a name may occur several times.

    Raises:
        InputError: there is none, or there are too many, or one cannot be converted.
    """
    if isinstance(sources, Mapping):
        given = [(str(name), one) for name, one in sources.items()]
        each = [replace(as_samples(one, f"sources[{name!r}]"), name=name) for name, one in given]
    elif isinstance(sources, list | tuple | Iterator):
        each = [as_samples(one, f"sources[{place}]") for place, one in enumerate(sources)]
    else:
        raise refused("sources", "be a list of datasets, or datasets by name", sources)
    if not 1 <= len(each) <= MOST_SOURCES:
        raise InputError(f"a mixture has 1 to {MOST_SOURCES} sources, got {len(each)}")
    return tuple(told_apart(one.name for one in each)), each


def compared(
    names: Sequence[str],
    given: Sequence[LabeledSamples],
    *,
    debias: bool,
    metric: LabelMetric,
    cost: GroundCost,
    compute: ComputeOptions,
    epsilon: float | None = None,
    epsilon_relative: float | None = None,
    table: JointClassDistances | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> tuple[Sources, Comparison]:
    """Check sources and target, measure class distances and settle epsilon.

    Args:
        names: of the K sources.
        given: K sources and the target.
        debias: whether the sources' own class distances are needed.
        metric: how class distances are measured.
        cost: the ground cost.
        compute: where and how passes run.
        epsilon: regularisation, in units of the cost.
        epsilon_relative: the same as a multiple of the mean cost at equal weights.
        table: class distances to use instead.
        cache_dir: folder of measured class distances.

    Returns:
        The sources, and their comparison at equal weights.

    Raises:
        InputError: they cannot be compared, or the class distances cannot be measured.
    """
    measured = table is None
    refuse_table(metric, table)
    if isinstance(metric, Given):
        raise measures_nothing()
    metric, sides = with_numbers(metric, given)
    if cost.ground == "inner":
        raise InputError("a mixture takes ground=sqeuclidean or cosine, got inner")
    cost.check_labels(metric.name if measured else "given")
    check_comparable(*sides)
    for one in sides:
        if one.label_sets is not None:
            raise InputError(
                f"{display(one.name)} has several labels a row, and a mixture takes one; choose "
                "one column, or labels=none on rows without labels"
            )
    # A class without rows has nothing to measure.
    sides = [drop_small_classes(one, None) for one in sides]
    if measured:
        notice_single_samples(sides, metric)
    labelled = not (measured and isinstance(metric, NoLabels))
    target = sides[-1]
    if not labelled and not isinstance(metric, Continuous):
        target = replace(target, labels=None)
    if labelled and target.labels is None:
        raise needs_classes(target)
    sources = Sources.of(names, sides[:-1], labelled=labelled)
    comparison = Comparison.prepare(
        (sources.cloud, target), cost, compute, debias=debias, target_scale=scale_of(metric)
    )
    x, y = comparison.transformed
    if table is not None:
        full = table.named_for(sides).full
    elif not labelled:
        full = torch.zeros(2, 2, dtype=torch.float64)
    else:
        metric = settled_metric(metric, epsilon, (x, y), comparison.streaming)
        if compute.group is not None and comparison.streaming is None:
            metric = measured_by_ranks(metric, compute.group)
        full = _table(x, y, metric, cache_dir, debias=debias)
    comparison = comparison.with_classes(full)
    mean, scale = comparison.mean_cost, cost.standardized(target.dim)
    name, said, used = resolve_epsilon(epsilon, epsilon_relative, mean)
    with epsilon_of_datasets(name, said, used, mean, scale):
        return sources, comparison.at(used)


def _table(
    x: LabeledSamples,
    y: LabeledSamples,
    metric: LabelMetric,
    cache_dir: str | os.PathLike[str] | None,
    *,
    debias: bool,
) -> Tensor:
    """Measure class distances (V, V); without self terms, those of sources and target alone."""
    if debias:
        return measure_all((x, y), metric, cache_dir=cache_dir).full
    block = class_block(x, y, metric, cache_dir=cache_dir).values.double()
    zeros = [block.new_zeros(size, size) for size in block.shape]
    return torch.cat((torch.cat((zeros[0], block), 1), torch.cat((block.T, zeros[1]), 1)))


def at_weights(comparison: Comparison, sources: Sources, w: NDArray[np.float64]) -> Comparison:
    """Return the comparison of the mixture of weights w (K,), without rows of unused sources."""
    source, target = comparison.transformed
    home = source.features.device
    masses, used = sources.masses(w), sources.used(w)
    if not used.all():
        source, masses = source.take(used.nonzero().squeeze(1).to(home)), masses[used]
    sides = replace(source, weights=masses.to(home)), target
    return replace(comparison, given=sides, transformed=sides)


# Updates with weights: the first level of epsilon over the mean cost, the factor between levels and
# the updates at each; those after which the centre of the penalty follows, and the least weight in
# it, over 1 / K; those in which the bound has to rise or weights to change, by how much; the most.
FIRST_LEVEL, LEVELS, PER_LEVEL = 0.1, 4.0, 6
PER_CENTRE, LEAST_CENTRE = 3, 1e-6
SLOW, STEADY, MOST_TAKEN = 10, 5e-4, 300
# With debiasing the share of all sources in the mixtures that are searched, less of those that are
# farther than the nearest: at weight 0 slopes of self terms are infinite, or as good as that.
LIFTED = 1e-5
# The marginal error of debiased solves over the width of bounds that is asked for, and the largest.
OF_SLOPES, MOST_OF_SLOPES = 0.1, 1e-4


class Priced(NamedTuple):
    """Prices of sources at some potentials.

    Attributes:
        prices: (K,) price_k, as computed.
        cut: (K,) e_k with OT_epsilon(w) >= <e, w> for all weights w that sum to 1.
    """

    prices: Vector
    cut: Vector


def priced(
    operator: Operator, sources: Sources, f: Tensor, g: Tensor, epsilon: float, error: float = 0.0
) -> Priced:
    """Compute prices and a cut at potentials f (n,) and g (m,), in one pass.

    Args:
        operator: the cost, with masses of equal weights, so that rows have mass as in their source.
        sources: of the rows.
        f: potential of rows, any.
        g: potential of columns, any.
        epsilon: regularisation, in units of the cost.
        error: bound on the error of the costs that the operator is given.
    """
    f, g = f.double(), g.double()
    sums = operator.marginals(f, g, epsilon)
    r, b = sums.rows / operator.a, operator.b
    prices = sources.sums(f + epsilon * (1 - r))
    # The exact sums are at most the computed ones over 1 - relative_error.
    share = sums.relative_error * (1 + 2 * sums.relative_error)
    lost = sources.sums(sums.row_errors + epsilon * (share * r + sums.underflow))
    held = b > 0
    level, columns, size = (
        float((b * torch.where(held, each, 0.0)).sum()) for each in (g, sums.column_errors, g.abs())
    )
    costs = operator.costs
    shares = share_of_costs(sums.cost_rounding, costs.highest, costs.lowest)
    terms = (len(f) + len(g) + 16) * DOUBLE_UNIT
    additions = terms * (size + sources.sums(f.abs() + epsilon * (1 + r)))
    return Priced(prices, level + prices - (lost + columns + shares + additions + error))


class Solved(NamedTuple):
    """A mixture that was solved.

    Attributes:
        upper: an upper bound of its value; with debiasing its value less an entropy, at weights of
            which none is 0.
        cut: (K,), see `Priced`; with debiasing the tangent of its value.
        slope: (K,) the gradient of `upper` by weights, up to a constant.
        prices: (K,) the gradient of the value itself; see `MixtureOracle.entropy`.
        divergence: the solve, with solver bounds.
        potentials: f (n,) and g (m,) of the cross term; rows without mass have softmins.
    """

    upper: float
    cut: Vector
    slope: Vector
    prices: Vector
    divergence: Divergence
    potentials: tuple[Tensor, Tensor]


class MixtureOracle:
    """The value of mixtures of some sources, each solve started from the potentials of the last.

    Args:
        comparison: of sources and target, at equal weights and an epsilon.
        sources: the sources.
        left: returns the seconds that are left, or None.

    Attributes:
        scale: the value of the last cross term, to which widths are relative.
    """

    def __init__(
        self,
        comparison: Comparison,
        sources: Sources,
        left: Callable[[], float | None] = lambda: None,
    ) -> None:
        self.comparison, self.sources, self._left = comparison, sources, left
        self.scale = 1.0
        self._start: dict[str, Tensor] = {}
        self._known: dict[str, Any] = {}
        # Its passes are few: scores are not stored.
        self._equal = comparison.operator("xy", keep_scores=False).refined
        self._lift = np.zeros(len(sources.names))
        if comparison.debias:
            far = sources.sums(self._equal.expected_costs(self._equal.b))
            near = max(float(far.min()), comparison.epsilon)
            self._lift = LIFTED / len(far) * near / np.maximum(far, near)

    @property
    def convex(self) -> bool:
        """Whether the value is convex in the weights: a debiased one need not be."""
        return not self.comparison.debias

    def approach(self, allowed: Allowed, width: float) -> Vector:
        """Return weights near the best ones, and start solves from the potentials found with them.

        Sinkhorn's updates with weights as a third block: f = T(g), then the weights that prices
        <a_k, f> and a penalty epsilon KL(w | v) ask for, then g = T'(f). For fixed v each is an
        exact step of one concave dual; v follows every `PER_CENTRE` updates, as in a proximal
        point method. Mass need not move between sources, so that it takes fewer updates than solves
        at fixed weights. Epsilon falls through levels. It ends where the lower bound rises by less
        than `width` of itself, weights stand, `MOST_TAKEN` updates are done or the time is over.
        """
        operator, epsilon, w = (
            self.comparison.operator("xy"),
            self.comparison.epsilon,
            allowed.centre,
        )
        dtype, members = operator.costs.dtype, self.sources.members
        level = max(epsilon, FIRST_LEVEL * operator.costs.above_lowest)
        count, g, centre = len(w), torch.zeros_like(operator.b, dtype=operator.costs.dtype), w
        bounds, taken, before = list[float](), 0, w
        while True:
            f = operator.softmin_rows(g, level)
            prices = self.sources.sums(f.double())
            w = allowed.nearest(prices, 1 / level, centre)
            if (taken := taken + 1) % PER_CENTRE == 0:
                centre = np.maximum(w, LEAST_CENTRE / count)
            shift = torch.from_numpy(level * np.log(np.maximum(count * w, 1e-300)))
            shift = shift.to(f.device)[members.to(f.device)]
            g = operator.softmin_columns((f.double() + shift).to(dtype), level)
            bounds.append(float(operator.b @ g.double()) + allowed.lowest(prices))
            if level > epsilon and taken % PER_LEVEL == 0:
                level, bounds, before = max(level / LEVELS, epsilon), [], w
            if len(bounds) > SLOW and len(bounds) % SLOW == 1:
                rise = abs(bounds[-1] - bounds[-SLOW])
                if rise < width * abs(bounds[-1]) or np.abs(w - before).max() < STEADY:
                    break
                before = w
            left = self._left()
            if taken >= MOST_TAKEN or (left is not None and left <= NO_TIME):
                break
        self._start = {"xy": g}
        return without_small(w, 10 * LEAST_CENTRE / count, allowed.most)

    def at(self, w: Vector, width: float) -> Solved:
        """Solve the mixture of weights w (K,), to bounds `width` times the value wide."""
        given, held, epsilon = w, 1 - float(self._lift.sum()), self.comparison.epsilon
        w = held * w + self._lift
        own: dict[str, Tensor] = {}

        def solved(name: str, operator: Operator, term: Any) -> None:
            if name == "xx":
                own[name] = operator.softmin_self(term.f, epsilon)

        divergence = self.solve(w, width, solved)
        xy = divergence.xy
        self._start = {name: term.g for name, term in divergence.terms.items()}
        if divergence.yy is not None and not divergence.identical:
            self._known = {"yy": divergence.yy}
        self.scale = max(abs(xy.value), 1e-12 * abs(self._equal.costs.mean), 1e-300)
        f, g = self._extended(w, xy.f, xy.g)
        found = priced(self._equal, self.sources, f, g, epsilon, self.comparison.cost_error)
        told = divergence, (f, g)
        if not self.comparison.debias:
            return Solved(divergence.bounds[1], found.cut, found.prices, found.prices, *told)
        prices = found.prices - self.sources.sums(own["xx"].double())
        entropy = self.entropy * np.log(w * len(w))
        slope, value = held * (prices - entropy), divergence.value - float(w @ entropy)
        return Solved(value, value + slope - float(given @ slope), slope, prices, *told)

    def solve(
        self, w: Vector, width: float, solved: Callable[[str, Operator, Any], None] | None = None
    ) -> Divergence:
        """Solve the mixture of just these weights w (K,); see `solver.divergence` for `solved`."""
        comparison, start = at_weights(self.comparison, self.sources, w), dict(self._start)
        if "xx" in start:
            # The start of a debiased solve, which gives every source some weight.
            start["xx"] = start["xx"][self.sources.used(w).to(start["xx"].device)]

        def by(options: Converged) -> Divergence:
            options = replace(options, max_seconds=self._left())
            return solve(comparison, options, start=start, known=self._known, solved=solved)

        if not comparison.debias:
            return by(Converged(bound_width=width))
        # A debiased value may be 0, and slopes are as exact as marginals.
        try:
            return by(Converged(min(OF_SLOPES * width, MOST_OF_SLOPES)))
        except UnreachableTolerance:
            return by(Converged())

    @property
    def entropy(self) -> float:
        """The price of KL(w | 1 / K) that is left out of debiased values; 0 of others.

        The self term of rows far from all others has the slope epsilon log(w_k) / 2, which is left
        to the problem of the next weights.
        """
        return self.comparison.epsilon / 2 if self.comparison.debias else 0.0

    def curvature(self, answer: Solved) -> NDArray[np.float64]:
        """Return epsilon M^T diag(1 / b) M (K, K) at the potentials of an answer."""
        sources, operator, epsilon = self.sources, self._equal, self.comparison.epsilon
        count = len(sources.names)
        plan = operator.plan(*answer.potentials, epsilon)
        one_hot = torch.nn.functional.one_hot(sources.members, count).to(plan.dtype)
        of_members = plan.times(one_hot.to(operator.a.device), transposed=True)
        got = of_members.double() * count
        held = torch.where(operator.b > 0, 1 / operator.b, 0.0)
        found: NDArray[np.float64] = (epsilon * (got.T @ (got * held[:, None]))).cpu().numpy()
        return (found + found.T) / 2

    def _extended(self, w: Vector, f: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Return potentials of all rows: those of unused sources have softmins."""
        if (w > 0).all():
            return f, g
        softmins = self._equal.softmin_rows(g.to(self._equal.costs.dtype), self.comparison.epsilon)
        whole = softmins.to(f)
        whole[self.sources.used(w).to(f.device)] = f
        return whole, g
