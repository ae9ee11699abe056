"""Debiased Sinkhorn divergences between the points of pairs of classes (`labels=sinkhorn`).

    W_ij = OT_eps(i, j) - OT_eps(i, i) / 2 - OT_eps(j, j) / 2,   cost ||x - y||^2

(Feydy et al. 2019, "Interpolating between optimal transport and MMD using Sinkhorn divergences").
The self terms OT_eps(i, i) put a class at distance 0 from itself. A call solves each once, however
many pairs its class is in: first the self terms of all classes in its pairs, then the pairs.

On a CUDA device with Triton, kernels solve pairs side by side in float32 (`solve_in_kernels`).
Pairs that float32 cannot solve to the tolerance, and all pairs on other devices, are solved in
float64 in PyTorch: pairs of similar sizes are padded to one shape and their costs stored; a pair
with too many costs to store is solved alone, with costs recomputed in every pass. Kernels solve
pairs of small and of large classes apart, each in as few batches as half of the free memory allows.
The batch must not change a pair's numbers, because distances are cached and batches follow from the
free memory.

`labels.metrics` calls `sinkhorn_distances`. Distances are cached, so a change must keep the
numbers of a pair independent of the pairs beside it: which solver a pair takes, and its padded
shape, follow from its own two classes. A change of MOST_STORED, of `padded_size` or of a solve
gives other digits, so it must raise `labels.pair_cache.ENTRY_FORMAT`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from otdd_flash.arguments import Progress
from otdd_flash.cost.points import Cloud, LabelledCost
from otdd_flash.devices import check_triton
from otdd_flash.engine.problems import Finished, SegmentTerms, WeightedPoints
from otdd_flash.errors import InputError, NotConvergedWarning, warn
from otdd_flash.formulas.decision import CROSS, SELF
from otdd_flash.formulas.evidence import MOST_ERROR
from otdd_flash.labels.pairs import (
    ClassCloud,
    PairDistances,
    masses_of,
    merge_identical,
    named_classes,
    used_classes,
)
from otdd_flash.memory import free_memory
from otdd_flash.operators.point_scores import streamed_operator
from otdd_flash.operators.stored_segments import SIZE_STEP, StoredSegments
from otdd_flash.solver.schedules import Converged
from otdd_flash.solver.solve import solve_segments, solve_term
from otdd_flash.solver.term import epsilon_given_as, rounded_away

if TYPE_CHECKING:
    from otdd_flash.operators.kernel_segments import ClassPool


# Number of unconverged terms named in a warning.
SHOWN = 5

# Pairs solved at once: their indices and numbers take some 200 bytes per pair.
MOST_PAIRS = 1 << 24


def sinkhorn_distances(
    clouds: Sequence[ClassCloud],
    pairs: Tensor,
    epsilon: float,
    tolerance: float = 1e-3,
    *,
    progress: Progress | None = None,
) -> PairDistances:
    """Compute the debiased Sinkhorn divergences S_eps of pairs of classes.

    For the cost ||.||^2 they are not negative; a value below zero, within the tolerance, is set to
    0. The bits of a pair's value and bounds depend on its two classes alone.

    Args:
        clouds: V classes.
        pairs: (P, 2) int64, indices of the classes of each pair.
        epsilon: regularisation, in units of ||.||^2.
        tolerance: L1 marginal error at which each solve stops.
        progress: called with the number of pairs of classes done and their total.

    Returns:
        P values with bounds that hold S_eps; all 0 between classes of equal content.

    Raises:
        InputError: rounding alone exceeds the tolerance at this epsilon.

    Warns:
        NotConvergedWarning: a solve stopped before the tolerance.
    """
    options = Converged(tolerance=tolerance)
    pairs = pairs.to(clouds[0].points.device)
    out = torch.zeros((3, len(pairs)), dtype=torch.float64, device=pairs.device)
    if not len(pairs):
        return PairDistances(*out)
    used, places = named_classes(clouds, pairs)
    classes, index = merge_identical(used)
    places = torch.tensor(index, dtype=torch.int64).to(pairs.device)[places]
    solver = TermSolver(classes, epsilon, options)
    late: list[tuple[Tensor, Tensor]] = []
    own: SegmentTerms | None = None
    done = 0

    def count_pairs(finished: int) -> None:
        nonlocal done
        done += finished
        if progress is not None:
            progress(done, len(pairs))

    report = None if progress is None else count_pairs

    def solved(terms_of: Tensor, finished: Finished | None) -> SegmentTerms:
        terms = solver.solve(terms_of, finished)
        stopped = terms.marginal_error > options.asked_tolerance
        late.append((terms_of[stopped], terms.rounding[stopped]))
        return terms

    parts = torch.split(pairs, MOST_PAIRS), torch.split(out, MOST_PAIRS, 1)
    for some, found in zip(*parts, strict=True):
        different, unlike = _different(places, some)
        if len(different) < len(some):
            count_pairs(len(some) - len(different))
        if not len(different):
            continue
        # Errors about epsilon name labels.epsilon, the regularisation as the user gave it.
        with epsilon_given_as("labels.epsilon", epsilon, epsilon):
            if own is None:
                own = solved(
                    torch.arange(len(classes), device=pairs.device)[:, None].expand(-1, 2), None
                )
            cross = solved(unlike, report)
        ends = (numbers[unlike].unbind(1) for numbers in own[:3])
        value, lower, upper = ((one + two) / 2 for one, two in ends)
        found[:, different] = torch.stack(
            (cross.value - value, cross.lower - upper, cross.upper - lower)
        )
    if late:
        _warn_of_late(classes, late, options)
    values, lower, upper = out
    return PairDistances(values.clamp_min_(0), lower, upper)


def _different(places: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Select the pairs (P, 2) of classes that differ in content.

    Args:
        places: (V,) for each class, the number of its content among the distinct ones.
        pairs: (P, 2) indices of classes.

    Returns:
        The positions (Q,) of these pairs, and (Q, 2) the numbers of their contents.
    """
    one, two = places[pairs].unbind(1)
    different = torch.nonzero(one != two).squeeze(1)
    # A pair solved in the other direction would have other last digits.
    ordered = torch.stack((torch.maximum(one, two), torch.minimum(one, two)), 1)
    return different, ordered[different]


def _warn_of_late(
    clouds: Sequence[ClassCloud], late: Sequence[tuple[Tensor, Tensor]], options: Converged
) -> None:
    """Warn of the terms that stopped before the tolerance, by what stopped them.

    Args:
        clouds: V classes.
        late: in the order in which terms were solved, the classes (L, 2) of those that stopped
            early, and the marginal error due to rounding (L,).
        options: the stopping rule.
    """
    pairs, rounding = (torch.cat(parts) for parts in zip(*late, strict=True))
    tolerance = options.asked_tolerance
    # Rounding counts twice, as in `check_reachable` of `solver.term`: it is part of the
    # reported error, and the measured rest cannot fall below it.
    by_rounding = 2 * rounding > tolerance
    for which, limit in (
        (by_rounding, "as far as rounding allows in float64"),
        (~by_rounding, f"after {options.max_iterations} iterations"),
    ):
        if bool(which.any()):
            # Formatting the names of millions of pairs would take longer than solving them.
            named = pairs[which]
            shown, more = (
                [_name(clouds, *ends) for ends in named[:SHOWN].tolist()],
                len(named) - SHOWN,
            )
            message = f"labels=sinkhorn: not converged to {tolerance:g} {limit} for "
            message += ", ".join(shown) + (f" and {more} more" * (more > 0))
            if which is by_rounding:
                largest = float(rounding[which].max())
                message += f", whose marginal errors stay at up to {largest:.1e}"
            warn(
                f"{message}; the solver bounds still hold. Raise labels.epsilon",
                NotConvergedWarning,
            )


def _name(clouds: Sequence[ClassCloud], i: int, j: int) -> str:
    return clouds[i].name if i == j else f"{clouds[i].name} against {clouds[j].name}"


class TermSolver:
    """Solver of the terms OT_epsilon between V classes, cost ||x - y||^2.

    Args:
        clouds: the classes.
        epsilon: regularisation, in units of ||.||^2.
        options: the stopping rule of a solve.
    """

    def __init__(self, clouds: Sequence[ClassCloud], epsilon: float, options: Converged) -> None:
        self._clouds, self._epsilon, self._options = clouds, epsilon, options
        self._pool: ClassPool | None = None
        if kernels_run_on(clouds[0].points.device):
            from otdd_flash.operators.kernel_segments import ClassPool

            points = (cloud.points.detach() for cloud in clouds)
            self._pool = ClassPool(list(map(WeightedPoints, points, masses_of(clouds))))

    def solve(self, pairs: Tensor, finished: Finished | None = None) -> SegmentTerms:
        """Solve the terms of P pairs.

        Args:
            pairs: (P, 2) int64, on the points' device; all of them pair a class with itself, or
                none does.
            finished: called with the number of pairs that just finished.

        Returns:
            (P,) float64 each, on the points' device.

        Raises:
            InputError: rounding alone exceeds the tolerance even in float64.
        """
        if self._pool is None:
            terms = self._in_float64(pairs, finished)
        else:
            terms = solve_in_kernels(self._pool, pairs, self._epsilon, self._options, finished)
            left = torch.nonzero(self._out_of_reach(terms)).squeeze(1)
            if len(left):
                for known, new in zip(terms, self._in_float64(pairs[left]), strict=True):
                    known[left] = new
        # A solve whose iterations no longer lower its error counts all of it as rounding and is
        # reported as unconverged. In the others, rounding alone is above the tolerance; an error of
        # MOST_ERROR, the largest L1 distance of two masses, says nothing about a solve.
        stalled = (terms.rounding == terms.marginal_error) & (terms.marginal_error < MOST_ERROR)
        lost = self._out_of_reach(terms) & ~stalled
        if bool(lost.any()):
            floor = float(terms.rounding[lost].max())
            tolerance = self._options.asked_tolerance
            raise rounded_away(2 * floor, self._epsilon, torch.float64, enough=tolerance)
        return terms

    def _in_float64(self, pairs: Tensor, finished: Finished | None = None) -> SegmentTerms:
        # Few of thousands of classes may be left for float64.
        used, local = used_classes(self._clouds, pairs)
        classes = [WeightedPoints(cloud.points.detach(), cloud.masses) for cloud in used]
        return solve_in_float64(classes, local, self._epsilon, self._options, finished)

    def _out_of_reach(self, terms: SegmentTerms) -> Tensor:
        """Return which terms (P,) rounding alone keeps above the tolerance."""
        tolerance = self._options.asked_tolerance
        return (terms.marginal_error > tolerance) & (2 * terms.rounding > tolerance)


def kernels_run_on(device: torch.device) -> bool:
    """Return whether Triton kernels can run on a device."""
    if device.type != "cuda":
        return False
    try:
        check_triton(device)
    except InputError:
        return False
    return True


# Pairs with more costs are streamed; so many take 2.3 GiB with exponentials and scratch space.
MOST_STORED = 100_000_000

# Number of costs of the pairs that are updated together.
GROUP = 1 << 23


def solve_in_float64(
    classes: Sequence[WeightedPoints],
    pairs: Tensor,
    epsilon: float,
    options: Converged,
    finished: Finished | None = None,
) -> SegmentTerms:
    """Solve the terms of P pairs in PyTorch; arguments as for `TermSolver`."""
    form = SELF if bool((pairs[:, 0] == pairs[:, 1]).all()) else CROSS
    device = classes[0].points.device
    out = torch.zeros((len(SegmentTerms._fields), len(pairs)), dtype=torch.float64, device=device)
    indices = pairs.tolist()
    for shape, members in _groups([len(cloud.points) for cloud in classes], indices):
        sides = [(classes[indices[p][0]], classes[indices[p][1]]) for p in members]
        if shape[0] * shape[1] > MOST_STORED:
            terms = _solve_streamed(*sides[0], epsilon, options)
            if finished is not None:
                finished(1)
        else:
            segments = StoredSegments(sides, shape)
            terms = solve_segments(segments, form, epsilon, options, finished)
        out[:, members] = torch.stack(terms).to(device)
    return SegmentTerms(*out)


def padded_size(size: int) -> int:
    """Return the length to which a class of `size` points is padded.

    It is a multiple of SIZE_STEP up to eight of these. Larger lengths are spaced four to every
    power of two, so that padding adds less than a quarter.
    """
    step = max(SIZE_STEP, 1 << max(0, (size - 1).bit_length() - 3))
    return -(-size // step) * step


def _groups(
    sizes: Sequence[int], pairs: Sequence[Sequence[int]]
) -> Iterator[tuple[tuple[int, int], list[int]]]:
    """Yield the shape of costs and the positions of the pairs that are solved together."""
    by_shape: dict[tuple[int, int], list[int]] = defaultdict(list)
    for position, (i, j) in enumerate(pairs):
        by_shape[padded_size(sizes[i]), padded_size(sizes[j])].append(position)
    for shape, members in by_shape.items():
        costs = shape[0] * shape[1]
        together = 1 if costs > MOST_STORED else max(1, GROUP // costs)
        for first in range(0, len(members), together):
            yield shape, members[first : first + together]


def _solve_streamed(
    rows: WeightedPoints, columns: WeightedPoints, epsilon: float, options: Converged
) -> SegmentTerms:
    """Solve the term of one pair of any size."""

    def cloud(side: WeightedPoints) -> Cloud:
        labels = torch.zeros(len(side.points), dtype=torch.int64, device=side.points.device)
        return Cloud(side.points, side.masses, labels)

    x = cloud(rows)
    y = x if rows is columns else cloud(columns)
    cost = LabelledCost(x, y, rows.masses.new_zeros(1, 1), 1.0)
    operator = streamed_operator(cost, torch.float64)
    term = solve_term(operator, epsilon, options, SELF if rows is columns else CROSS)
    rounding = term.marginal_error if term.stopped_by == "rounding" else 0.0
    numbers = (term.value, *term.bounds, term.marginal_error, rounding, float(term.iterations))
    return SegmentTerms(*torch.tensor(numbers, dtype=torch.float64).unsqueeze(1))


# Pairs whose sizes are compared at once, some 100 bytes each.
AT_ONCE = 1 << 20


def solve_in_kernels(
    pool: ClassPool,
    pairs: Tensor,
    epsilon: float,
    options: Converged,
    finished: Finished | None = None,
) -> SegmentTerms:
    """Solve the terms of P pairs of classes of `pool`; other arguments as for `TermSolver`."""
    # Triton may be missing where no kernel runs.
    from otdd_flash.operators.kernel_segments import KernelSegments

    themselves = bool((pairs[:, 0] == pairs[:, 1]).all())
    form = SELF if themselves else CROSS
    out = torch.zeros(
        (len(SegmentTerms._fields), len(pairs)), dtype=torch.float64, device=pairs.device
    )
    for small, members in _batches(pool, pairs):
        rows, columns = pairs[members].T.contiguous()
        segments = KernelSegments(pool, rows, rows if themselves else columns, small=small)
        terms = solve_segments(segments, form, epsilon, options, finished)
        for numbers, found in zip(out, terms, strict=True):
            numbers[members] = found
    return SegmentTerms(*out)


def _batches(pool: ClassPool, pairs: Tensor) -> list[tuple[bool, Tensor]]:
    """Group pairs by their kind of tiles, into batches that fit half of the free memory.

    All batches are returned at once: a generator would keep lists of all pairs alive during the
    solves.

    Returns:
        Whether a batch has small tiles, and the positions of its pairs.
    """
    from otdd_flash.operators.kernel_segments import bytes_of, is_small

    small = torch.empty(len(pairs), dtype=torch.bool, device=pairs.device)
    needed = torch.empty(len(pairs), dtype=torch.int64, device=pairs.device)
    parts = (torch.split(values, AT_ONCE) for values in (pairs, small, needed))
    for some, are_small, bytes_needed in zip(*parts, strict=True):
        sizes = pool.sizes[some]
        are_small.copy_(is_small(sizes))
        bytes_needed.copy_(bytes_of(sizes))
    budget = free_memory(pool.starts.device) // 2
    batches = []
    for kind in (True, False):
        members = torch.nonzero(small == kind).squeeze(1)
        batch = needed[members].cumsum_(0).floor_divide_(budget)
        ends = torch.bincount(batch).tolist()
        batches += [(kind, chosen) for chosen in torch.split(members, ends) if len(chosen)]
    return batches
