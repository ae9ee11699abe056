"""Whether a divergence is small enough for `pooled_solve`, and the terms that it then ends with.

`solver.solving` asks `is_small` and calls `solve_small`; if that returns None, `divergence` solves
the problem. `matrix_route` solves a given matrix by `solve_single` too, and `batches` and `losses`
choose by the same sizes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.cost.class_table import ROUNDING
from otdd_flash.cost.compute import ComputeOptions, uses_triton
from otdd_flash.cost.facts import TERMS, CostFacts
from otdd_flash.errors import InputError
from otdd_flash.memory import ASSUMED_FREE, budget_in_bytes, free_memory
from otdd_flash.operators.comparison import Comparison
from otdd_flash.operators.score_pool import UNIT, Room, ScorePool
from otdd_flash.solver.certificate import PlanEvidence, conclude, shows_rounding
from otdd_flash.solver.divergence import GradientCallbacks, Potentials, Solved
from otdd_flash.solver.evidence import rounding_floor
from otdd_flash.solver.schedules.converged import Converged
from otdd_flash.solver.small.pooled_solve import (
    Batch,
    GivenCosts,
    PooledSolve,
    TermRead,
    is_kept,
    kept,
)
from otdd_flash.solver.solve import TOLERANCE_AIM
from otdd_flash.solver.term.result import SolverProgress, TransportTerm
from otdd_flash.solver.term.tolerance import goal_of, reachable_tolerance

# Points of a side, and products of coordinates, up to which it pays on a processor.
MOST_POINTS, MOST_ON_PROCESSOR = 1 << 10, 1 << 28

# Scores of a cross term up to which storing them pays, and products of coordinates on cards that
# compute as fast in float64 as in float32, and on others.
MOST_SCORES = 1 << 27
FAST_IN_DOUBLE, MOST_PRODUCTS = ((8, 0), (9, 0), (10, 0)), (1 << 38, 1 << 31)


def is_small(comparison: Comparison, options: Converged) -> bool:
    """Whether a problem is one for stored scores, with nothing that needs another way."""
    compute, device = comparison.compute, comparison.device
    alone = compute.group is None and comparison.streaming is None
    if not alone or options.bound_width is not None or options.max_seconds is not None:
        return False
    in_triton = uses_triton(compute, device)
    if device.type == "cuda":
        return in_triton and pays(room := room_for(comparison, None)) and _has_memory(room)
    if in_triton or device.type != "cpu" or compute.dtype != torch.float32:
        return False
    if options.max_iterations == 1:
        # The certificate's own, which follows an iteration at the least where terms are pooled.
        return False
    x, y = comparison.transformed
    whole = isinstance(x.features, Tensor) and isinstance(y.features, Tensor)
    return whole and is_quick(room := room_for(comparison, None)) and fits(room, compute)


def is_quick(room: Room) -> bool:
    """Whether a problem on a processor takes less time with its terms side by side."""
    most = max(room.n, room.m)
    return most <= MOST_POINTS and most**2 * room.dim <= MOST_ON_PROCESSOR


def fits(room: Room, compute: ComputeOptions) -> bool:
    """Whether a room on a processor is within what stored scores may take."""
    if compute.memory_budget == "auto" and room.bytes <= ASSUMED_FREE:
        return True
    return room.bytes <= budget_in_bytes(compute.memory_budget, room.device)


def backend_of(comparison: Comparison) -> str:
    """What passes of a small solve run in."""
    in_triton = uses_triton(comparison.compute, comparison.device)
    return f"{'triton' if in_triton else 'torch'}, scores kept"


def pays(room: Room) -> bool:
    """Whether stored scores of a problem take less time than others."""
    most = max(room.n, room.m) ** 2
    fast = room.device.type == "cuda" and (
        torch.cuda.get_device_capability(room.device) in FAST_IN_DOUBLE
    )
    return most <= MOST_SCORES and most * room.dim <= MOST_PRODUCTS[0 if fast else 1]


def _has_memory(room: Room) -> bool:
    """Whether at most half of what is free is needed, unless a room like it is there already."""
    if room.bytes <= ASSUMED_FREE or is_kept(room):
        return True
    return room.bytes <= free_memory(room.device) // 2


def room_for(comparison: Comparison, table: Tensor | None) -> Room:
    """A room for a problem; on a GPU with sizes rounded up, so that few are recorded."""
    x, y = comparison.transformed
    in_triton = uses_triton(comparison.compute, comparison.device)
    dtype = torch.promote_types(x.features.dtype, y.features.dtype)
    size = padded if in_triton else int
    classes = 1 if table is None else size(len(table))
    return Room(1, size(len(x)), size(len(y)), x.dim, classes, dtype, comparison.device, in_triton)


def padded(count: int) -> int:
    """The next multiple of 16, or of an eighth of the power of two below it if that is more."""
    step = max(16, 1 << max(0, count.bit_length() - 4))
    return -(-count // step) * step


def solve_small(
    comparison: Comparison,
    options: Converged,
    *,
    start: Potentials | None = None,
    progress: SolverProgress | None = None,
    solved: Solved | None = None,
    gradient_callbacks: GradientCallbacks | None = None,
) -> dict[str, TransportTerm] | None:
    """The terms of a divergence, or None where one of them needs another solve.

    Args:
        comparison: for which `is_small` holds.
        options: when to stop.
        start: potentials to start from, by term.
        progress: called whenever the device was asked, for every term.
        solved: called after each term, as solved(name, operator, term).
        gradient_callbacks: called instead, each with the gradient by the points of its side.

    Raises:
        InputError: rounding alone exceeds the tolerance at this epsilon and precision.
    """
    (x, y), table, debias = comparison.transformed, comparison.classes.given, comparison.debias
    of_costs = comparison.ground.squared.lambda_x, comparison.ground.lambda_y, x.class_total
    batch, sizes = Batch.of_one((x, y), table), (len(x), len(y))
    with kept(room_for(comparison, table), debias) as solve:
        small = solve_single(
            solve, batch, of_costs, comparison.epsilon, options, start=start, progress=progress
        )
        if small is None:
            return None
        if gradient_callbacks is not None:
            for place, take in gradient_callbacks.items():
                take(solve.gradient(place)[0, : sizes[place]])
        elif solved is not None:
            assert isinstance(solve.pool, ScorePool)
            for name in (*comparison.terms[1:], "xy"):
                operator = solve.pool.operator(name, sizes, small.costs[name])
                solved(name, operator, small.terms[name])
    return small.terms


def facts_of(read: TermRead) -> CostFacts:
    """What was read of the costs of a term."""
    mean, lowest, highest = read.costs
    facts = CostFacts(torch.float32, mean, lowest, highest, error=0.0)
    # Nearly all of it is the rounding of what is stored.
    return facts._replace(error=UNIT * (1 + 2.0**-8) * facts.magnitude)


class SolvedTerms(NamedTuple):
    """The terms of one problem, and what is known of the costs of each, by name."""

    terms: dict[str, TransportTerm]
    costs: dict[str, CostFacts]


def solve_single(
    solve: PooledSolve,
    batch: Batch | GivenCosts,
    of_costs: tuple[float, float, float],
    epsilon: float,
    options: Converged,
    *,
    known: CostFacts | None = None,
    start: Potentials | None = None,
    progress: SolverProgress | None = None,
) -> SolvedTerms | None:
    """Solve a batch of one problem; None where one of its terms needs another solve.

    Args:
        solve: with room for it.
        batch: the problem.
        of_costs: three numbers for the pool: lambda_x, lambda_y and the number of classes of x,
            or the mean, lowest and highest cost of a given matrix.
        epsilon: regularisation, in units of the cost.
        options: when to stop.
        known: facts of the costs; None where the solve learns them.
        start: potentials to start from, by term.
        progress: called for every term whenever the device was asked.

    Raises:
        InputError: rounding alone exceeds the tolerance at this epsilon and precision.
    """
    # A certificate finds a little more than the iterations: it lowers g for rounding.
    goal = goal_of(options, epsilon, TOLERANCE_AIM)
    solve.begin(batch, of_costs, goal, {name: g[None] for name, g in (start or {}).items()})
    in_triton, costs, done = solve.room.in_triton, dict[str, CostFacts](), False
    while not done:
        solve.iterate(progress)
        found = solve.read()
        reads = dict(zip(TERMS, found.terms(0), strict=False))
        costs = {name: known or facts_of(read) for name, read in reads.items()}
        if not all(_in_range(facts, epsilon, options) for facts in costs.values()):
            return None
        if progress is not None and in_triton:
            for name, read in reads.items():
                progress(name, int(read.iterations), read.error)
        # Costs that are not finite end nowhere.
        done = found.done or any(math.isnan(read.error) for read in reads.values())
    apart, largest = found.asymmetry()[0].view(2, 2)
    if len(reads) > 1 and bool((apart > ROUNDING * largest).any()):
        return None
    f, *others = solve.potentials(batch.sizes)
    terms: dict[str, TransportTerm] = {}
    for (name, read), evidence, g in zip(reads.items(), found.evidence, others, strict=True):
        evidence = evidence._replace(f=f if name == "xy" else g, g=g)
        term = _concluded(name, read, costs[name], evidence, epsilon, options)
        if term is None:
            return None
        # The certificate of a self term is an iteration more.
        if progress is not None and term.iterations > read.iterations and not in_triton:
            progress(name, term.iterations, term.marginal_error)
        terms[name] = term
    return SolvedTerms(terms, costs)


def _in_range(costs: CostFacts, epsilon: float, options: Converged) -> bool:
    """Return whether the type of potentials holds costs with room for their sums.

    Raises:
        InputError: the tolerance is out of reach.
    """
    if not costs.largest < torch.finfo(costs.dtype).max / 4:
        return False
    # As before a single term: most hopeless tolerances show by the costs alone.
    reachable_tolerance(options, rounding_floor(costs, 0.0, epsilon), epsilon, costs.dtype)
    return True


def _concluded(
    name: str,
    read: TermRead,
    costs: CostFacts,
    evidence: PlanEvidence,
    epsilon: float,
    options: Converged,
) -> TransportTerm | None:
    """The term, or None where iterations should go on."""
    numbers = read.numbers
    if name == "xy" and shows_rounding(costs, numbers, epsilon):
        return None
    certificate = conclude(costs, evidence, numbers, epsilon)
    floor = rounding_floor(costs, numbers.size, epsilon)
    exhausted = read.iterations >= options.max_iterations - 1
    try:
        tolerance = reachable_tolerance(options, floor, epsilon, costs.dtype)
    except InputError:
        if exhausted:
            # Potentials of few iterations may be far larger than those of the solution.
            return None
        raise
    if (certificate.marginal_error > tolerance and not exhausted) or numbers.unresolved > 0:
        return None
    # The certificate of a cross term takes what its last iteration evaluated.
    iterations = int(read.iterations) + (name != "xy")
    return TransportTerm.from_certificate(
        certificate,
        epsilon,
        iterations=iterations,
        passes=certificate.passes + (2.0 * iterations if name == "xy" else iterations - 1),
        tolerance=tolerance,
        asked=options.asked_tolerance,
        unless_converged="max_iterations",
    )
