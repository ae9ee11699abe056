"""Whether a divergence is small enough for `pooled_solve`, and what its terms are."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from otdd_flash.engine.evidence.scale import rounding_floor
from otdd_flash.kernels.adder import UNIT
from otdd_flash.kernels.matrix.place import is_aligned
from otdd_flash.kernels.matrix.rough import rough_unit
from otdd_flash.kernels.matrix.sweep import MOST_COLUMNS
from otdd_flash.operators.base import CostFacts
from otdd_flash.operators.build import uses_triton
from otdd_flash.operators.matrix_kernel import MatrixKernelOperator
from otdd_flash.operators.memory import UNASKED, free_memory, holds, stated_budget
from otdd_flash.operators.pooled_term import single_operator
from otdd_flash.operators.request import Request
from otdd_flash.operators.score_pool import Room, ScorePool
from otdd_flash.solver.class_blocks import ROUNDING
from otdd_flash.solver.schedules.converged import Converged
from otdd_flash.solver.small.exchanged import TERMS, Batch, GivenCosts, Read, TermRead
from otdd_flash.solver.small.kept_solves import is_kept, kept
from otdd_flash.solver.small.pooled_solve import PooledSolve
from otdd_flash.solver.term.certificate import conclude, conclude_self, shows_rounding
from otdd_flash.solver.term.iteration import AIM
from otdd_flash.solver.term.plan_evidence import PlanEvidence
from otdd_flash.solver.term.result import Progress, TransportTerm
from otdd_flash.solver.term.tolerance import goal_of, reachable_tolerance
from otdd_flash.solver.term_solves import Potentials, Pulled, Solved

if TYPE_CHECKING:
    from otdd_flash.solver.matrix.problem import MatrixProblem

# Scores of a cross term up to which storing them pays, and products of coordinates on cards that
# compute as fast in float64 as in float32, and on others.
MOST_SCORES = 1 << 27
FAST_IN_DOUBLE, MOST_PRODUCTS = ((8, 0), (9, 0), (10, 0)), (1 << 38, 1 << 31)


# Bytes of costs in float32 from which on a copy in float16 may pay: they exceed a cache.
LEAST_COPIED = 1 << 26
# What the rounding of the largest cost of a copy may be, over epsilon, and the tolerance of its
# iterations over that: roundings of many pairs of a point even out.
MOST_ROUNDING, ROUGH_TOLERANCE = 0.25, 2.0**-7


class Roughly(NamedTuple):
    """How to iterate on a copy in float16.

    Attributes:
        unit: of `kernels.matrix.rough`.
        tolerance: marginal error to reach.
    """

    unit: float
    tolerance: float


def facts_of(read: TermRead) -> CostFacts:
    """What was read of the costs of a term."""
    mean, lowest, highest = read.costs
    facts = CostFacts(torch.float32, mean, lowest, highest, error=0.0)
    # Nearly all of it is the rounding of what is stored.
    return facts._replace(error=UNIT * (1 + 2.0**-8) * facts.magnitude)


def is_small(request: Request, options: Converged) -> bool:
    """Whether a problem is one for stored scores on a GPU, with nothing that needs another way."""
    alone = request.compute.group is None and request.streaming is None
    if not alone or options.bound_width is not None or options.max_seconds is not None:
        return False
    on_gpu = request.device.type == "cuda" and uses_triton(request.compute, request.device)
    return on_gpu and pays(room := room_for(request, None)) and _has_memory(room)


def pays(room: Room) -> bool:
    """Whether stored scores of a problem take less time than others."""
    most = max(room.n, room.m) ** 2
    fast = room.device.type == "cuda" and (
        torch.cuda.get_device_capability(room.device) in FAST_IN_DOUBLE
    )
    return most <= MOST_SCORES and most * room.dim <= MOST_PRODUCTS[0 if fast else 1]


def _has_memory(room: Room) -> bool:
    """Whether at most half of what is free is needed, unless a room like it is there already."""
    if room.bytes <= UNASKED or is_kept(room):
        return True
    return room.bytes <= free_memory(room.device) // 2


def room_for(request: Request, table: Tensor | None) -> Room:
    """A room for a problem, with sizes rounded up so that few are needed."""
    x, y = request.seen
    classes = 1 if table is None else padded(len(table))
    dtype = torch.promote_types(x.features.dtype, y.features.dtype)
    return Room(1, padded(len(x)), padded(len(y)), x.dim, classes, dtype, request.device)


def padded(count: int) -> int:
    """The next multiple of 16, or of an eighth of the power of two below it if that is more."""
    step = max(16, 1 << max(0, count.bit_length() - 4))
    return -(-count // step) * step


def solve_small(
    request: Request,
    table: Tensor | None,
    epsilon: float,
    options: Converged,
    *,
    debias: bool,
    start: Potentials | None = None,
    progress: Progress | None = None,
    solved: Solved | None = None,
    pulled: Pulled | None = None,
) -> dict[str, TransportTerm] | None:
    """The terms of a divergence, or None where one of them needs another solve.

    Args:
        request: for which `is_small` holds.
        table: W (V_x + V_y, V_x + V_y), finite; None is 0.
        epsilon: regularisation, in units of the cost.
        options: when to stop.
        debias: whether there are self terms.
        start: potentials to start from, by term.
        progress: called whenever the device was asked, for every term.
        solved: called after each term, as solved(name, operator, term).
        pulled: called instead, each with the gradient by the points of its side.

    Raises:
        InputError: rounding alone exceeds the tolerance at this epsilon and precision.
    """
    x, y = request.seen
    of_costs = request.cost.squared.lambda_x, request.cost.lambda_y, x.class_total
    batch, sizes = Batch.of_one((x, y), table), (len(x), len(y))
    with kept(room_for(request, table), debias) as solve:
        small = _Small(solve, sizes, epsilon, options)
        terms = small.solved(batch, of_costs, start, progress)
        if terms is None or (debias and small.asymmetric):
            return None
        if pulled is not None:
            for place, take in pulled.items():
                take(solve.gradient(place)[0, : sizes[place]])
        elif solved is not None:
            assert isinstance(solve.pool, ScorePool)
            for name in ("xx", "yy", "xy") if debias else ("xy",):
                operator = single_operator(solve.pool, name, sizes, small.costs[name])
                solved(name, operator, terms[name])
    return terms


def is_recorded_matrix(problem: MatrixProblem, options: Converged) -> bool:
    """Whether costs that are given are solved for in recordings, where they are."""
    if problem.self_costs is not None:
        return False
    if options.bound_width is not None or options.max_seconds is not None:
        return False
    held = problem.in_triton and problem.device.type == "cuda" and problem.facts.partners is None
    return held and _lines(problem)[0].shape[1] <= MOST_COLUMNS


def matrix_room(lines: Tensor) -> Room:
    """A room for costs whose rows are contiguous."""
    n, m = (padded(size) for size in lines.shape)
    return Room(1, n, m, 0, 1, lines.dtype, lines.device, is_aligned(lines))


def _lines(problem: MatrixProblem) -> tuple[Tensor, bool]:
    """Costs with contiguous rows, and whether they are the transpose."""
    operator = problem.operator
    assert isinstance(operator, MatrixKernelOperator)
    return operator.lines, operator.turned


def solve_recorded_matrix(
    problem: MatrixProblem,
    epsilon: float,
    options: Converged,
    *,
    start: Potentials | None = None,
    progress: Progress | None = None,
) -> TransportTerm | None:
    """The term of costs that are given, or None where it needs another solve.

    Where columns of the costs are contiguous the transpose is solved, as an iteration reads whole
    rows.

    Args:
        problem: for which `is_recorded_matrix` holds.
        epsilon: regularisation, in units of the cost.
        options: when to stop.
        start: potentials to start from, by term.
        progress: as for `solve_small`.

    Raises:
        InputError: rounding alone exceeds the tolerance at this epsilon and precision.
    """
    facts, (lines, turned) = problem.facts, _lines(problem)
    masses, magnitudes = (problem.a, problem.b), facts.magnitudes
    if turned:
        masses, magnitudes = masses[::-1], magnitudes[::-1]
        start = {
            name: problem.operator.softmin_rows(g, epsilon) for name, g in (start or {}).items()
        }
    batch = GivenCosts(lines, masses, magnitudes)
    with kept(matrix_room(lines), False) as solve:
        small = _Small(solve, batch.sizes, epsilon, options, problem.tiles.costs)
        roughly = _roughly(problem, lines, epsilon)
        terms = small.solved(batch, (facts.mean, *facts.range), start, progress, roughly)
    if terms is None:
        return None
    term = terms["xy"]
    return replace(term, f=term.g, g=term.f) if turned else term


def _roughly(problem: MatrixProblem, lines: Tensor, epsilon: float) -> Roughly | None:
    """How to iterate on a copy of the costs in float16; None where that is no good.

    It takes as long as one and a half iterations to make, and half as long to read. Its rounding
    has to leave the plan what it is, about.
    """
    compute, spread = problem.compute, problem.operator.costs.spread
    size = lines.numel() * lines.itemsize
    if compute.precision != "fast" or lines.dtype != torch.float32 or size < LEAST_COPIED:
        return None
    rounding = torch.finfo(torch.float16).eps / 2 * spread
    if spread <= 0 or rounding > MOST_ROUNDING * epsilon:
        return None
    if not holds(size // 2, stated_budget(compute.memory_budget), lines.device):
        return None
    return Roughly(rough_unit(spread), ROUGH_TOLERANCE * rounding / epsilon)


class _Small:
    """A problem while it is solved.

    Args:
        solve: with room for it.
        sizes: n and m.
        epsilon: regularisation, in units of the cost.
        options: when to stop.
        known: of the costs; None where the solve learns it.

    Attributes:
        costs: what is known of the costs of each term, after `solved`.
        asymmetric: whether a self term's class distances are not symmetric.
    """

    def __init__(
        self,
        solve: PooledSolve,
        sizes: tuple[int, int],
        epsilon: float,
        options: Converged,
        known: CostFacts | None = None,
    ) -> None:
        self._solve, self._sizes, self._known = solve, sizes, known
        self._epsilon, self._options = epsilon, options
        self.costs: dict[str, CostFacts] = {}
        self.asymmetric = False

    def solved(
        self,
        batch: Batch | GivenCosts,
        of_costs: tuple[float, float, float],
        start: Potentials | None,
        progress: Progress | None,
        roughly: Roughly | None = None,
    ) -> dict[str, TransportTerm] | None:
        """Its terms; None where one of them needs another solve.

        Where it takes long, iterations are `roughly` those of a copy meanwhile.
        """
        # A certificate finds a little more than the iterations: it lowers g for rounding.
        goal = goal_of(self._options, self._epsilon, AIM)
        starts = {name: g[None] for name, g in (start or {}).items()}
        self._solve.begin(batch, of_costs, goal, starts)
        found, done = None, False
        while found is None or not done:
            if roughly is not None and (self._solve.long or found is not None):
                self._solve.iterate_roughly(*roughly)
                roughly = None
            self._solve.iterate()
            found = self._solve.read()
            if not self._reachable(found, progress):
                return None
            # Costs that are not finite end nowhere.
            done = found.done or any(math.isnan(read.error) for read in found.terms(0))
        apart, largest = found.asymmetry()[0].view(2, 2)
        self.asymmetric = bool((apart > ROUNDING * largest).any())
        f, *others = self._solve.potentials(self._sizes)
        terms: dict[str, TransportTerm] = {}
        reads = found.terms(0)
        for name, read, evidence, g in zip(TERMS, reads, found.evidence, others, strict=False):
            evidence = evidence._replace(f=f if name == "xy" else g, g=g)
            costs = self.costs[name]
            term = _concluded(name, read, costs, evidence, self._epsilon, self._options)
            if term is None:
                return None
            terms[name] = term
        return terms

    def _reachable(self, found: Read, progress: Progress | None) -> bool:
        """Whether costs are in range.

        Raises:
            InputError: the tolerance is out of reach.
        """
        for name, read in zip(TERMS, found.terms(0), strict=False):
            # As before a single term: most hopeless tolerances show by the costs alone.
            costs = self.costs[name] = self._known or facts_of(read)
            if not costs.largest < torch.finfo(costs.dtype).max / 4:
                return False
            floor = rounding_floor(costs, 0.0, self._epsilon)
            reachable_tolerance(self._options, floor, self._epsilon, costs.dtype)
            if progress is not None:
                progress(name, int(read.iterations), read.error)
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
    certificate = (conclude if name == "xy" else conclude_self)(costs, evidence, numbers, epsilon)
    size = numbers[10 if name == "xy" else 6]
    floor = rounding_floor(costs, size, epsilon)
    tolerance = reachable_tolerance(options, floor, epsilon, costs.dtype)
    exhausted = read.iterations >= options.max_iterations - 1
    if (certificate.marginal_error > tolerance and not exhausted) or read.lost > 0:
        return None
    # Of a cross term that had come to its end the last iteration has taken the certificate's.
    settled = name == "xy" and not (exhausted and certificate.marginal_error > tolerance)
    iterations = int(read.iterations) + (not settled)
    return TransportTerm.from_certificate(
        certificate,
        epsilon,
        iterations=iterations,
        passes=certificate.passes + (2 * iterations if name == "xy" else iterations - 1),
        tolerance=tolerance,
        asked=options.asked_tolerance,
        unless_converged="max_iterations",
    )
