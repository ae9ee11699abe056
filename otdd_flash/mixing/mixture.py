"""The mixture of sources that is nearest to a target: `mixture`, which users call.

    min over w in the simplex of OT_epsilon(sum_k w_k mu_k, nu),

with mu_k the source k at its own masses: convex in w, with potentials as its gradient. A mixture of
other weights has the same cost, so classes are measured and epsilon is settled once. The search has
two parts: updates of potentials and weights together (`sources.MixtureOracle.approach`), then
solves at fixed weights, whose cuts bound all others (`weights.minimise`).

Intervals of the weights come from subsamples drawn without replacement, as `sampling.subsampling`
makes those of distances: the deviations of weights of subsamples of m of n rows, times sqrt((m / n)
/ (1 - m / n)), give their standard errors at all rows. Rows are drawn from every source and from
the target; classes are measured anew, unless a table is given; epsilon is that of the whole.
Intervals are cut at 0 and 1. One that reaches 0 or 1 is rough, because weights at a border are not
normal.

`commands.mix` and users call `mixture`, which returns a `Mixture` (`mixing.result`). Without
debiasing the bounds must contain the least objective over all allowed weights: the upper one is
that of the best solve, the lower one comes from cuts alone (`mixing.weights`). With debiasing they
are solver bounds at the weights found. `tests/mixing/test_mixture.py` checks both.
"""

from __future__ import annotations

import os
import time
import warnings
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from otdd_flash.arguments import Count, Ground, NotNegative, Positive, Seed, takes
from otdd_flash.checks import mapping, number, optional
from otdd_flash.cost.compute import Compute, ComputeOptions
from otdd_flash.cost.ground import GroundCost
from otdd_flash.data.given import Samples, as_samples
from otdd_flash.eager import computes
from otdd_flash.errors import DataNotice, EpsilonOutOfRange, InputError, NotConvergedWarning, warn
from otdd_flash.labels import (
    JointClassDistances,
    Labels,
    drop_small_classes,
    metric_of,
    settled_metric,
)
from otdd_flash.mixing.result import Mixture, OtherWeights, WeightInterval
from otdd_flash.mixing.sources import MixtureOracle, Sources, at_weights, compared, named_sources
from otdd_flash.mixing.weights import NO_TIME, NO_WEIGHT, Allowed, Found, Vector, minimise
from otdd_flash.operators.comparison import Comparison
from otdd_flash.result import versions
from otdd_flash.samples import LabeledSamples
from otdd_flash.sampling.comparison import least_rows, subsample
from otdd_flash.sampling.subsampling import (
    LEVEL,
    check_count,
    deviation_interval,
    sampling_rate,
)
from otdd_flash.shown import listing
from otdd_flash.solver.schedules import Converged
from otdd_flash.solver.solving import solve

# progress(solves, (upper - lower) / |value|).
MixtureProgress = Callable[[int, float], None]

# The share of the width at which the updates with weights end.
APPROACH = 0.2
# The least change of a weight that counts as undetermined, the most directions that are tried, and
# the least change that is named.
MEANT, MOST_DIRECTIONS, NAMED_MOVE = 0.05, 10, 5e-3


# `takes` checks arguments by their annotations; `computes` keeps PyTorch's surrounding modes out.
@computes
@takes(max_weights=optional(mapping()), towards=optional(mapping()))
def mixture(
    target: Samples,
    sources: Sequence[Samples] | Mapping[str, Samples],
    *,
    max_weights: Mapping[str, float] | None = None,
    max_rows: Count | None = None,
    penalty: Positive | None = None,
    towards: Mapping[str, float] | None = None,
    debias: bool = False,
    bound_width: Positive = 1e-3,
    max_seconds: Positive | None = None,
    epsilon: Positive | None = None,
    epsilon_relative: Positive | None = None,
    labels: Labels = "gaussian",
    class_distances: JointClassDistances | None = None,
    min_class_size: Count | None = None,
    lambda_x: NotNegative = 0.5,
    lambda_y: NotNegative = 0.5,
    ground: Ground = "sqeuclidean",
    subsample: Count | None = None,
    seed: Seed = 0,
    compute: Compute | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: MixtureProgress | None = None,
) -> Mixture:
    """Find the weights of sources whose mixture is nearest to a target, and prove how near.

    Classes of different sources stay separate, even if they share a name.

    Args:
        target: m points, as samples, as arrays (features, labels) or as any dataset of vectors that
            `otdd.embed` takes; without labels only `labels="none"` applies.
        sources: K datasets of the same dimension, 1 to 200, in a list or by name.
        max_weights: largest weights by source; 1 for sources that are not named.
        max_rows: number of rows that will be drawn (`Mixture.rows`): no source gets more weight
            than its rows allow.
        penalty: factor of KL(weights | towards) in the objective, in units of the cost.
        towards: weights by source towards which the penalty draws; equal ones by default.
        debias: subtract half of both self terms. With labels the value may then not be convex in
            the weights: the result is a stationary point, without a bound over other weights.
            False: epsilon favours sources that are narrower than the target.
        bound_width: relative width of the bounds to reach, (upper - lower) / value.
        max_seconds: wall time after which the search ends, with what is proven then; comparisons
            with other weights and undetermined changes are left out. Subsamples take their own
            time.
        epsilon: entropic regularisation, in units of the cost.
        epsilon_relative: the same as a multiple of the mean cost at equal weights, instead of
            `epsilon`. Neither given means 0.01 of that mean.
        labels: how distances between classes are measured, as for `dataset_distance`, but not
            `given`.
        class_distances: a table to use instead, from `otdd.class_distances([*sources, target])`.
        min_class_size: drop classes with fewer samples, with a notice.
        lambda_x: weight of the cost between features.
        lambda_y: weight of the squared distance between classes.
        ground: the cost between features, `sqeuclidean` or `cosine`.
        subsample: K, the number of subsamples for intervals of the weights, at least 39; None: no
            intervals.
        seed: seed of the subsamples.
        compute: `otdd.ComputeOptions`, or only a device.
        cache_dir: folder of a database of measured class distances.
        progress: called as progress(solves, gap divided by the value).

    Returns:
        The weights, the value with bounds, and which weights stay undetermined.

    Raises:
        InputError: the request cannot be met; the message says what to change.

    Warns:
        NotConvergedWarning: the search ended before `bound_width`.
    """
    started = time.monotonic()

    def left() -> float | None:
        spent = time.monotonic() - started
        return None if max_seconds is None else max(max_seconds - spent, NO_TIME)

    names, each = named_sources(sources)
    given = [
        drop_small_classes(one, min_class_size) for one in (*each, as_samples(target, "target"))
    ]
    sizes = [int((one.masses > 0).sum()) for one in given[:-1]]
    limits = _limits(names, sizes, max_weights, max_rows)
    allowed = Allowed(limits, penalty or 0.0, _towards(names, towards, penalty))
    check_room(allowed, _limits(names, sizes, max_weights, None), sizes, max_rows)
    metric, cost = metric_of(labels), GroundCost(lambda_x, lambda_y, ground)
    compare = partial(
        compared,
        names,
        debias=debias,
        metric=metric,
        cost=cost,
        compute=ComputeOptions.of(compute),
        table=class_distances,
        cache_dir=cache_dir,
    )
    pool, comparison = compare(given, epsilon=epsilon, epsilon_relative=epsilon_relative)
    with comparison.within_memory():
        found, oracle = searched(comparison, pool, allowed, bound_width, left, progress)
        in_time = left() != NO_TIME
        # A debiased search lifts weights of 0 a little; results are of the weights themselves.
        last = oracle.at(found.w, bound_width) if debias else found.answer
        there = oracle.solve(found.w, bound_width) if debias else last.divergence
        others = other_weights(comparison, pool, found, bound_width, left) if in_time else ()
        moves = undetermined(found, oracle, allowed, bound_width) if in_time else ()
    intervals = None
    if subsample is not None:
        # As the whole: also the epsilon between classes, and nothing of a subsample is cached.
        settled = settled_metric(metric, epsilon, comparison.transformed, comparison.streaming)
        again = partial(compare, epsilon=comparison.epsilon, metric=settled, cache_dir=None)
        drawn = weight_intervals(again, given, allowed, bound_width, found.w, subsample, seed)
        intervals = dict(zip(names, drawn, strict=True))
    if found.stopped_by != "bound_width":
        warn(_shortfall(found, oracle, bound_width), NotConvergedWarning)
    charged = allowed.charge(found.w)
    # Prices of a single solve are not unique at a kink; those of the cut that proves the bound are
    # within the gap of a minimum at w.
    prices = last.prices if debias else found.cut
    # With debiasing nothing is known of other weights.
    bounds = there.bounds if debias else (found.lower - charged, found.upper - charged)
    value = there.value if debias else last.upper
    towards_all = allowed.towards.tolist() if penalty else None
    return Mixture(
        dict(zip(names, found.w.tolist(), strict=True)),
        value + charged,
        (bounds[0] + charged, bounds[1] + charged),
        value,
        dict(zip(names, _marginal_costs(prices, found.w, allowed).tolist(), strict=True)),
        moves,
        others,
        intervals,
        dict(zip(names, limits.tolist(), strict=True)),
        dict(zip(names, sizes, strict=True)),
        found.stopped_by == "bound_width",
        found.stopped_by,
        debias,
        found.solves,
        given[-1].name,
        details={
            "epsilon": comparison.epsilon,
            "mean_cost": comparison.mean_cost(),
            "bound_width": bound_width,
            "penalty": penalty,
            "towards": towards_all and dict(zip(names, towards_all, strict=True)),
            "labels": metric.name if class_distances is None else "given",
            **cost.to_dict(),
            "device": there.device,
            "backend": there.backend,
            "versions": versions(),
            "seconds": time.monotonic() - started,
        },
        sources=tuple(given[:-1]),
    )


def _shortfall(found: Found, oracle: MixtureOracle, width: float) -> str:
    """Say how far a search came, and what ended it."""
    gap = (found.upper - found.lower) / oracle.scale
    far = f"the bounds of the mixture are {gap:.2g} of its value wide"
    if not oracle.convex:
        far = f"slopes promise another {gap:.2g} of the cost"
    return f"{far}, and bound_width={width:g} was asked for; it stopped by {found.stopped_by}"


def searched(
    comparison: Comparison,
    sources: Sources,
    allowed: Allowed,
    width: float,
    left: Callable[[], float | None] = lambda: None,
    progress: MixtureProgress | None = None,
) -> tuple[Found, MixtureOracle]:
    """Search the best weights of the sources for the target; return them and the oracle."""
    oracle = MixtureOracle(comparison, sources, left)
    start = oracle.approach(allowed, APPROACH * width)
    if oracle.entropy:
        allowed = allowed.with_entropy(oracle.entropy)
    return minimise(oracle, allowed, start, width, left, progress), oracle


def _limits(
    names: Sequence[str],
    sizes: Sequence[int],
    max_weights: Mapping[str, float] | None,
    max_rows: int | None,
) -> Vector:
    """Return the largest weights (K,)."""
    most = np.ones(len(names))
    for name, limit in _by_name("max_weights", names, max_weights, 1.0).items():
        most[names.index(name)] = limit
    if max_rows is not None:
        most = np.minimum(most, np.array(sizes) / max_rows)
    return most


def _towards(
    names: Sequence[str], towards: Mapping[str, float] | None, penalty: float | None
) -> Vector:
    """Return the weights (K,) that a penalty draws to."""
    if towards is None:
        return np.full(len(names), 1 / len(names))
    if penalty is None:
        raise InputError("towards= needs penalty=, the price of other weights in units of the cost")
    given = _by_name("towards", names, towards)
    found = np.array([given.get(name, 0.0) for name in names])
    if not found.sum() > 0:
        raise InputError("towards must have a weight above 0")
    total: Vector = found / found.sum()
    return total


def _by_name(
    argument: str, names: Sequence[str], given: Mapping[str, float] | None, most: float = np.inf
) -> dict[str, float]:
    said = "be a weight, 0 or more" if most == np.inf else "be a weight, 0 to 1"
    check = number(said, lambda value: 0 <= value < np.inf and value <= most)
    # Keys of sources are text, too.
    named = {str(name): one for name, one in (given or {}).items()}
    for name in named:
        if name not in names:
            raise InputError(f"{argument} names {name!r}, and the sources are {listing(names, 12)}")
    return {name: float(check(f"{argument}[{name!r}]", one)) for name, one in named.items()}


def check_room(allowed: Allowed, own: Vector, sizes: Sequence[int], max_rows: int | None) -> None:
    """Refuse limits that leave no weights, and say what would leave some.

    Args:
        allowed: the weights, with all limits.
        own: (K,) the limits of `max_weights` alone.
        sizes: rows of the sources.
        max_rows: rows to be drawn.

    Raises:
        InputError: the limits sum to less than 1.
    """
    usable, count = allowed.usable, np.array(sizes)

    def enough(limits: Vector, rows: int | None, held: NDArray[np.bool_] = usable) -> bool:
        most = limits if rows is None else np.minimum(limits, count / rows)
        return float(most[held].sum()) >= 1 - 1e-9

    if enough(own, max_rows):
        return
    ways = list[str]()
    if (own < 1).any() and enough(np.ones_like(own), max_rows):
        ways.append("raise max_weights")
    if max_rows is not None and enough(own, 1):
        most = bisect_left(range(1, max_rows), True, key=lambda rows: not enough(own, rows))
        ways.append(f"lower max_rows to {most}")
    if enough(own, max_rows, allowed.most > 0):
        ways.append("give more sources a weight in towards")
    way = " or ".join(ways) or "allow more by max_weights, max_rows and towards together"
    total = float(allowed.most[usable].sum())
    raise InputError(f"the largest weights sum to {total:.4g}, and weights to 1: {way}")


def _marginal_costs(slope: Vector, w: Vector, allowed: Allowed) -> Vector:
    """Return prices, with those of the penalty, less their mean under w (K,)."""
    prices = slope
    if allowed.penalty:
        # Weights below NO_WEIGHT are 0 here, and the slope of the penalty is infinite at 0.
        held = np.maximum(w, NO_WEIGHT) / np.maximum(allowed.towards, 1e-300)
        prices = slope + allowed.penalty * np.log(held)
    found: Vector = prices - float(w @ prices)
    return found


def other_weights(
    comparison: Comparison,
    sources: Sources,
    found: Found,
    width: float,
    left: Callable[[], float | None],
) -> tuple[OtherWeights, ...]:
    """Solve the best single source, uniform weights, and those in proportion to sizes.

    Those whose costs are too large for epsilon and the precision are left out: they are far. All
    are, if the time is over before.
    """
    count, asked = len(sources.names), None if comparison.debias else width
    start = {"xy": found.answer.divergence.xy.g}

    def solved(name: str, w: Vector, part: Comparison) -> OtherWeights | None:
        options = Converged(bound_width=asked, max_seconds=left())
        try:
            divergence = solve(part, options, start=start)
        except EpsilonOutOfRange:
            return None
        # The value is chosen as that of a mixture is.
        value = divergence.value if comparison.debias else divergence.bounds[1]
        return OtherWeights(name, tuple(w.tolist()), value, *divergence.bounds)

    best: OtherWeights | None = None
    # A cut bounds the value of each source alone.
    floors = found.cuts.max(0)
    for k in np.argsort(floors):
        if best is not None and not comparison.debias and floors[k] >= best.upper:
            break
        rows = (sources.members == int(k)).nonzero().squeeze(1)
        source, target = comparison.transformed
        alone = replace(source.take(rows.to(source.features.device)), weights=sources.own[rows])
        part = replace(comparison, given=(alone, target), transformed=(alone, target))
        one = solved(f"{sources.names[k]} alone", np.eye(count)[k], part)
        if one is not None and (best is None or one.value < best.value):
            best = one
    sizes = np.array([float((one.masses > 0).sum()) for one in sources.each])
    equal, by_size = np.full(count, 1 / count), sizes / sizes.sum()
    uniform = solved("uniform", equal, at_weights(comparison, sources, equal))
    named = "proportional to size"
    if (sizes == sizes[0]).all():
        proportional = uniform and uniform._replace(name=named)
    else:
        proportional = solved(named, by_size, at_weights(comparison, sources, by_size))
    if left() == NO_TIME:
        return ()
    return tuple(one for one in (best, uniform, proportional) if one is not None)


def undetermined(
    found: Found, oracle: MixtureOracle, allowed: Allowed, width: float
) -> tuple[dict[str, float], ...]:
    """Find directions in which weights change by `MEANT` or more, and the value by less than a gap.

    Candidates are the directions of little curvature among sources that are in use or at no cost;
    each is followed as far as the gap or the limits allow, and kept if a solve there agrees.
    """
    names = oracle.sources.names
    gap, w = width * oracle.scale, found.w
    slope = _marginal_costs(found.answer.slope, w, allowed)
    active = np.flatnonzero(allowed.usable & ((w > 0) | (slope < gap)))
    if len(active) < 2 or not oracle.convex:
        return ()
    curvature = oracle.curvature(found.answer)[np.ix_(active, active)]
    if allowed.penalty:
        curvature += np.diag(allowed.penalty / np.maximum(w[active], 1e-12))
    # A basis of the directions that sum to 0.
    basis = np.linalg.svd(np.ones((1, len(active))))[2][1:]
    values, vectors = np.linalg.eigh(basis @ curvature @ basis.T)
    kept: list[dict[str, float]] = []
    for value, vector in list(zip(values, vectors.T, strict=True))[:MOST_DIRECTIONS]:
        direction = np.zeros(len(w))
        direction[active] = vector @ basis
        moves = [
            _followed(w, sign * direction, float(value), slope, allowed, gap) for sign in (1, -1)
        ]
        move = max(moves, key=lambda one: float(np.abs(one).max()))
        if np.abs(move).max() < MEANT:
            continue
        # A weight that is given away is 0, up to rounding.
        there = np.maximum(w + move, 0.0)
        answer = oracle.at(there / there.sum(), width / 4)
        if answer.upper + allowed.charge(there) <= found.upper + gap:
            named = {n: float(d) for n, d in zip(names, move, strict=True) if abs(d) >= NAMED_MOVE}
            kept.append(named)
    return tuple(kept)


def _followed(
    w: Vector, direction: Vector, curvature: float, slope: Vector, allowed: Allowed, gap: float
) -> Vector:
    """Return the move along a direction by which the value rises by half a gap, or to a limit."""
    along = max(float(slope @ direction), 0.0)
    length = gap / (along + np.sqrt(along**2 + max(curvature, 0.0) * gap) + 1e-300)
    moves = np.abs(direction) > 1e-9
    room = np.where(direction < 0, w, allowed.most - w)[moves] / np.abs(direction[moves])
    move: Vector = min(length, float(room.min())) * direction
    return np.where(np.abs(move) < 1e-9, 0.0, move)


# The part of the rows that a subsample has: of a quarter, deviations of weights were a fifth less
# than those of new samples.
FRACTION = 0.5


def weight_intervals(
    compare: Callable[[list[LabeledSamples]], tuple[Sources, Comparison]],
    given: Sequence[LabeledSamples],
    allowed: Allowed,
    width: float,
    w: Vector,
    count: int,
    seed: int,
) -> list[WeightInterval]:
    """Estimate 95% intervals of the weights w (K,) from `count` subsamples.

    `compare` compares parts of the K sources and the target `given`, at the epsilon of the whole.

    Raises:
        InputError: there are too few subsamples, or rows.
    """
    check_count(count, LEVEL)
    fraction = max(FRACTION, *(least_rows(one) / len(one) for one in given))
    if fraction > 0.9:
        raise InputError(
            "subsamples take two rows of every class, and some dataset has few more; leave out "
            "subsample, or drop small classes with min_class_size"
        )
    generator, drawn = np.random.default_rng(seed), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotConvergedWarning)
        warnings.simplefilter("ignore", DataNotice)
        for _ in range(count):
            some = [subsample(one, max(2, round(fraction * len(one))), generator) for one in given]
            sources, comparison = compare(some)
            drawn.append(searched(comparison, sources, allowed, width)[0].w)
    ends = deviation_interval(w, np.array(drawn).T, sampling_rate(fraction))
    lower, upper = (np.clip(end, 0.0, 1.0) for end in ends)
    return [WeightInterval(*pair) for pair in zip(lower.tolist(), upper.tolist(), strict=True)]
