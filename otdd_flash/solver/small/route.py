"""Which divergences and matrices are small, and their solve by a `PooledSolve`.

`solver.solving` asks `is_small` and calls `solve_small`, which returns a `Divergence`, or None if a
term needs another solve; `solver.divergence` then solves the problem. `derivatives.loss` asks
`suits` for a batch of pairs and solves it by `solve_batch`, which returns values, gradients and
whether they are proved. `ranking.bounds` calls `is_small` and `solve_terms`, which returns the
certified terms of each problem, or None where one of them needs another solve.

Bounds and stopping rules must be those of a solve by `solver.solve`: whatever the certificate of a
pooled term does not prove is left to such a solve. The limits of size may decide only time and
memory (`tests/solver/test_small.py`, `tests/solver/test_torch_pool.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from otdd_flash.cost.class_table import ROUNDING
from otdd_flash.cost.compute import ComputeOptions, uses_triton
from otdd_flash.cost.facts import SIDES, TERMS, CostFacts
from otdd_flash.errors import InputError
from otdd_flash.formulas.marginals import EXACT, Constraints
from otdd_flash.memory import ASSUMED_FREE, budget_in_bytes, free_memory
from otdd_flash.operators.score_pool import UNIT, Room, ScorePool
from otdd_flash.solver.certificate import (
    PlanEvidence,
    check_moving,
    conclude,
    conclude_many,
    shows_rounding,
)
from otdd_flash.solver.divergence import (
    Compared,
    Divergence,
    GradientCallbacks,
    Potentials,
    Solved,
)
from otdd_flash.solver.evidence import rounding_floor
from otdd_flash.solver.matrix_comparison import MatrixComparison
from otdd_flash.solver.penalties import beyond_digits, refuse_beyond_digits
from otdd_flash.solver.schedules import Converged
from otdd_flash.solver.small.pooled_solve import (
    Batch,
    GivenCosts,
    PooledSolve,
    Read,
    TermRead,
    is_kept,
    kept,
)
from otdd_flash.solver.solve import TOLERANCE_AIM, within_reach
from otdd_flash.solver.term import (
    LOOSEST_DEFAULT,
    SolverProgress,
    TransportTerm,
    goal_of,
    reachable_tolerance,
)

if TYPE_CHECKING:
    # It needs Triton, which may be missing where no kernel runs.
    from otdd_flash.operators.matrix_kernel import MatrixKernelOperator

# Points of a side, and products of coordinates, up to which it pays on a processor.
MOST_POINTS, MOST_ON_PROCESSOR = 1 << 10, 1 << 28

# Scores of a cross term up to which storing them pays, and products of coordinates on cards that
# compute as fast in float64 as in float32, and on others.
MOST_SCORES = 1 << 27
FAST_IN_DOUBLE, MOST_PRODUCTS = ((8, 0), (9, 0), (10, 0)), (1 << 38, 1 << 31)

# Bytes of the problems that are solved at once, on a GPU and on a processor, whose cache they
# should not exceed by much; and how many they are: kernels have a program for each along an axis
# that holds 65,535.
MOST_BYTES, MOST_BYTES_CPU, MOST_PROBLEMS = 1 << 30, 1 << 25, 1 << 15


def is_small(compared: Compared, options: Converged) -> bool:
    """Return whether a problem is small, with options and costs that a `PooledSolve` takes."""
    if options.bound_width is not None or options.max_seconds is not None:
        return False
    if isinstance(compared, MatrixComparison):
        return _is_swept(compared)
    compute, device = compared.compute, compared.device
    if compute.group is not None or compared.streaming is not None or compared.signed:
        return False
    in_triton = uses_triton(compute, device)
    if device.type == "cuda":
        room = Batch.of_one(compared).room(1, in_triton=in_triton)
        return suits(room, compute) and _has_memory(room)
    # A limit of one iteration is the certificate's own, which follows an iteration at the least
    # where terms are pooled.
    if in_triton or compute.dtype != torch.float32 or options.max_iterations == 1:
        return False
    whole = all(isinstance(side.features, Tensor) for side in compared.transformed)
    return whole and suits(Batch.of_one(compared).room(1, in_triton=False), compute)


def _is_swept(compared: MatrixComparison) -> bool:
    """Whether a matrix is solved in recordings that read it where it is, a row at a time.

    Not with self costs, forbidden pairs or relaxed marginals, nor where a sweep cannot hold a row.
    """
    on_gpu = compared.in_triton and compared.device.type == "cuda"
    if not on_gpu or compared.self_costs is not None or compared.facts.forbidden:
        return False
    # A sweep sums columns by potentials of rows that are softmins.
    if not compared.constraints.exact:
        return False
    return _kernel_operator(compared).fits_sweeps


def _kernel_operator(compared: MatrixComparison) -> MatrixKernelOperator:
    # Triton may be missing where no kernel runs.
    from otdd_flash.operators.matrix_kernel import MatrixKernelOperator

    operator = compared.operator("xy")
    assert isinstance(operator, MatrixKernelOperator)
    return operator


def suits(room: Room, compute: ComputeOptions) -> bool:
    """Return whether storing the scores of a problem saves time and is within its memory.

    The limits are MOST_SCORES and MOST_PRODUCTS on a GPU, and MOST_POINTS and MOST_ON_PROCESSOR,
    with the memory budget, on a processor.
    """
    scores = max(room.n, room.m) ** 2
    products = scores * room.dim
    if room.device.type == "cuda":
        fast = torch.cuda.get_device_capability(room.device) in FAST_IN_DOUBLE
        few = scores <= MOST_SCORES and products <= MOST_PRODUCTS[0 if fast else 1]
        return room.in_triton and few
    few = scores <= MOST_POINTS**2 and products <= MOST_ON_PROCESSOR
    if room.device.type != "cpu" or room.in_triton or not few:
        return False
    free = compute.memory_budget == "auto" and room.bytes <= ASSUMED_FREE
    return free or room.bytes <= budget_in_bytes(compute.memory_budget, room.device)


def _has_memory(room: Room) -> bool:
    """Return whether at most half of the free memory is needed, or a solve like it is cached."""
    if room.bytes <= ASSUMED_FREE or is_kept(room):
        return True
    return room.bytes <= free_memory(room.device) // 2


def solve_small(
    compared: Compared,
    options: Converged,
    *,
    start: Potentials | None = None,
    progress: SolverProgress | None = None,
    solved: Solved | None = None,
    gradient_callbacks: GradientCallbacks | None = None,
) -> Divergence | None:
    """Solve a divergence at once; return None where one of its terms needs another solve.

    Args:
        compared: for which `is_small` holds.
        options: when to stop.
        start: potentials to start from, by term.
        progress: called whenever the device was asked, for every term.
        solved: called after each term, as solved(name, operator, term).
        gradient_callbacks: called instead, each with the gradient by the points of its side.

    Raises:
        InputError: rounding alone exceeds the tolerance at this epsilon and precision.
    """
    if isinstance(compared, MatrixComparison):
        return _solve_swept(compared, options, start=start, progress=progress, solved=solved)
    batch, in_triton = Batch.of_one(compared), uses_triton(compared.compute, compared.device)
    room = batch.room(1, in_triton=in_triton)
    with kept(room, compared.debias, compared.constraints) as solve:
        small = solve_single(
            solve,
            batch,
            compared.epsilon,
            options,
            start=start,
            progress=progress,
            constraints=compared.constraints,
        )
        if small is None:
            return None
        terms, costs = small
        if gradient_callbacks is not None:
            for place, take in gradient_callbacks.items():
                take(solve.gradient(place)[0, : batch.sizes[place]])
        elif solved is not None:
            assert isinstance(solve.pool, ScorePool)
            for name in (*compared.terms[1:], "xy"):
                operator = solve.pool.operator(name, batch.sizes, costs[name])
                solved(name, operator, terms[name])
    backend = f"{'triton' if in_triton else 'torch'}, scores kept"
    return Divergence.of_terms(terms, options, compared.offset, backend)


def _solve_swept(
    compared: MatrixComparison,
    options: Converged,
    *,
    start: Potentials | None,
    progress: SolverProgress | None,
    solved: Solved | None,
) -> Divergence | None:
    """Solve the cross term of a matrix; arguments as for `solve_small`.

    An iteration reads whole contiguous rows: where columns are contiguous the transpose is solved.
    """
    operator, known = _kernel_operator(compared), compared.torch_operator("xy").costs
    masses, magnitudes = (compared.a, compared.b), compared.facts.magnitudes
    if operator.transposed:
        masses, magnitudes = masses[::-1], magnitudes[::-1]
        start = {
            name: operator.softmin_rows(g, compared.epsilon) for name, g in (start or {}).items()
        }
    where = operator.place_numbers, operator.aligned
    batch = GivenCosts(operator.lines, masses, magnitudes, *where, known)
    with kept(batch.room, False) as solve:
        small = solve_single(
            solve, batch, compared.epsilon, options, start=start, progress=progress
        )
    if small is None:
        return None
    terms, _ = small
    term = terms["xy"]
    if operator.transposed:
        term = replace(term, f=term.g, g=term.f)
    if solved is not None:
        solved("xy", operator, term)
    return Divergence.of_terms({"xy": term}, options, compared.offset, operator.passes.backend)


def facts_of(read: TermRead) -> CostFacts:
    """The facts of a term's costs that were read."""
    mean, lowest, highest = read.costs
    facts = CostFacts(torch.float32, mean, lowest, highest, error=0.0)
    # Nearly all of it is the rounding of stored scores.
    return facts._replace(error=UNIT * (1 + 2.0**-8) * facts.magnitude)


def solve_single(
    solve: PooledSolve,
    batch: Batch | GivenCosts,
    epsilon: float,
    options: Converged,
    *,
    start: Potentials | None = None,
    progress: SolverProgress | None = None,
    constraints: Constraints = EXACT,
) -> tuple[dict[str, TransportTerm], dict[str, CostFacts]] | None:
    """Solve a batch of one problem; None where one of its terms needs another solve.

    Args:
        solve: with room for it.
        batch: the problem.
        epsilon: regularisation, in units of the cost.
        options: when to stop.
        start: potentials to start from, by term.
        progress: called for every term whenever the device was asked.
        constraints: exact or relaxed marginals.

    Returns:
        The terms, and the facts of the costs of each, by name.

    Raises:
        InputError: rounding alone exceeds the tolerance at this epsilon and precision.
    """
    # A certificate finds a little more than the iterations: it lowers g for rounding.
    goal = goal_of(options, epsilon, TOLERANCE_AIM)
    starts = {
        name: within_reach(g, constraints.between(*SIDES[name]))[None]
        for name, g in (start or {}).items()
    }
    solve.begin(batch, goal, starts, constraints)
    known = batch.facts if isinstance(batch, GivenCosts) else None
    in_triton, costs, done = solve.room.in_triton, dict[str, CostFacts](), False
    while not done:
        solve.iterate(progress)
        found = solve.read()
        reads = dict(zip(TERMS, found.terms(0), strict=False))
        costs = {name: known or facts_of(read) for name, read in reads.items()}
        refuse_beyond_digits(constraints, costs["xy"], epsilon)
        if not all(_in_range(facts, epsilon, options) for facts in costs.values()):
            return None
        if progress is not None and in_triton:
            for name, read in reads.items():
                progress(name, int(read.iterations), read.error)
        # Costs that are not finite end nowhere.
        done = found.done or any(math.isnan(read.error) for read in reads.values())
    apart, largest = found.asymmetry[0].view(2, 2)
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
    return terms, costs


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
    exhausted = read.iterations >= options.max_iterations - 1
    if exhausted and not math.isfinite(numbers.penalties.moving):
        # A plan of few iterations may overflow where the one after another update does not.
        return None
    if name == "xy" and shows_rounding(costs, numbers, epsilon):
        return None
    certificate = conclude(costs, evidence, numbers, epsilon)
    # The certificate counts as the last iteration.
    check_moving(certificate, epsilon, int(read.iterations) + 1, settled=not exhausted)
    floor = rounding_floor(costs, numbers.size, epsilon)
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


def solve_terms(
    batch: Batch,
    epsilon: float,
    options: Converged,
    *,
    debias: bool,
    in_triton: bool,
    constraints: Constraints = EXACT,
) -> list[dict[str, TransportTerm] | None]:
    """Solve the terms of a batch, as many problems at once as memory is meant to hold.

    Args:
        batch: the problems; a point of mass 0 stands for none.
        epsilon: regularisation, in units of the cost.
        options: when to stop, without limits of time and width.
        debias: whether there are self terms.
        in_triton: whether kernels solve it, on a GPU; else PyTorch on a processor.
        constraints: exact or relaxed marginals.

    Returns:
        For every problem its terms by name, each with its certificate, or None where one of them
        needs another solve. Potentials are of all points that the batch has.

    Raises:
        InputError: rounding alone exceeds the tolerance at this epsilon and precision.
    """
    found: list[dict[str, TransportTerm] | None] = []
    most = MOST_BYTES if in_triton else MOST_BYTES_CPU
    for part, room in _parts(batch, most, in_triton=in_triton):
        with kept(room, debias, constraints) as solve:
            read, _ = _iterated(solve, part, epsilon, options, constraints)
            evidence = [each._replace(f=each.f.clone(), g=each.g.clone()) for each in read.evidence]
            found += [
                _terms_of(read, evidence, place, batch.sizes, epsilon, options)
                for place in range(room.problems)
            ]
    return found


def _terms_of(
    read: Read,
    evidence: Sequence[PlanEvidence],
    place: int,
    sizes: tuple[int, int],
    epsilon: float,
    options: Converged,
) -> dict[str, TransportTerm] | None:
    """Return the terms of one of B problems, or None where one of them needs another solve."""
    reads = dict(zip(TERMS, read.terms(place), strict=False))
    apart, largest = read.asymmetry[place].view(2, 2)
    if len(reads) > 1 and bool((apart > ROUNDING * largest).any()):
        return None
    terms: dict[str, TransportTerm] = {}
    for (name, one), each in zip(reads.items(), evidence, strict=True):
        costs = facts_of(one)
        if math.isnan(one.error) or not _in_range(costs, epsilon, options):
            return None
        rows, columns = (sizes[side] for side in SIDES[name])
        g = each.g[place, :columns]
        own = each._replace(f=each.f[place, :rows] if name == "xy" else g, g=g)
        term = _concluded(name, one, costs, own, epsilon, options)
        if term is None:
            return None
        terms[name] = term
    return terms


class BatchSolved(NamedTuple):
    """The results of B problems.

    Attributes:
        values: S_epsilon, or OT_epsilon without self terms, (B,) float64 on the host.
        proved: (B,) bool, whether every term has converged by its certificate; else the value is
            of no use.
        gradients: of the values by x (B, n, d) or y (B, m, d), as they were asked for, float32 on
            the device, 0 where they are not proved.
    """

    values: Tensor
    proved: Tensor
    gradients: tuple[Tensor, ...]


def solve_batch(
    batch: Batch,
    epsilon: float,
    options: Converged,
    *,
    debias: bool,
    wanted: Sequence[int],
    in_triton: bool,
    budget: int | None = None,
    constraints: Constraints = EXACT,
) -> BatchSolved:
    """Solve the divergences of a batch, as many problems at once as memory is meant to hold.

    Args:
        batch: float32 points.
        epsilon: regularisation, in units of the cost.
        options: when to stop, without limits of time and width.
        debias: whether there are self terms.
        wanted: sides, 0 for x and 1 for y, by whose points gradients are.
        in_triton: whether kernels solve it, on a GPU; else PyTorch on a processor.
        budget: bytes of the problems that a processor solves at once, if fewer are wanted.
        constraints: exact or relaxed marginals.
    """
    most = MOST_BYTES if in_triton else min(MOST_BYTES_CPU, budget or MOST_BYTES_CPU)
    solved = []
    for part, room in _parts(batch, most, in_triton=in_triton):
        with kept(room, debias, constraints) as solve:
            read, terms = _iterated(solve, part, epsilon, options, constraints)
            solved.append(_concluded_batch(solve, read, terms, part, epsilon, wanted))
    values, proved, gradients = zip(*solved, strict=True)
    by_side = tuple(torch.cat(parts) for parts in zip(*gradients, strict=True))
    return BatchSolved(torch.cat(values), torch.cat(proved), by_side)


def _concluded_batch(
    solve: PooledSolve,
    read: Read,
    terms: Sequence[tuple[TermRead, Tensor]],
    batch: Batch,
    epsilon: float,
    wanted: Sequence[int],
) -> BatchSolved:
    """Compute the divergences of a batch from what was read of it, while its solve is lent."""
    apart, largest = read.asymmetry.split(2, 1)  # type: ignore[no-untyped-call]
    proved = torch.ones(len(apart), dtype=torch.bool)
    if len(terms) > 1:
        proved = (apart <= ROUNDING * largest).all(1)
    values = torch.zeros(len(apart), dtype=torch.float64)
    for k, (term, tolerance) in enumerate(terms):
        evidence = read.evidence[k]
        value, error, holds = conclude_many(term.numbers, evidence.sums, UNIT, epsilon)
        values += value if k == 0 else -value / 2
        proved &= holds & (error <= tolerance)
    fine = proved.to(batch.points[0].device)[:, None, None] if wanted else proved
    gradients = tuple(
        torch.where(fine, solve.gradient(place)[:, : batch.sizes[place]], 0) for place in wanted
    )
    return BatchSolved(values, proved, gradients)


def _parts(batch: Batch, most: int, *, in_triton: bool) -> Iterator[tuple[Batch, Room]]:
    """Yield parts of about equal size of a batch, and room of up to `most` bytes for each."""
    problems, one = len(batch.points[0]), batch.room(1, in_triton=in_triton)
    at_once = max(1, min(MOST_PROBLEMS, most // one.bytes))
    size = -(-problems // -(-problems // at_once))
    for first in range(0, problems, size):
        part = batch.part(slice(first, first + size))
        yield part, one._replace(problems=len(part.points[0]))


def _iterated(
    solve: PooledSolve, batch: Batch, epsilon: float, options: Converged, constraints: Constraints
) -> tuple[Read, list[tuple[TermRead, Tensor]]]:
    """Iterate on a batch to its end; return what was read last, and each term's `_tolerance`."""
    # As for a single problem.
    solve.begin(batch, goal_of(options, epsilon, TOLERANCE_AIM), {}, constraints)
    while True:
        solve.iterate()
        read = solve.read()
        terms = [
            (term, _tolerance(term, epsilon, options, constraints, cross=k == 0))
            for k, term in enumerate(read.terms())
        ]
        # A hopeless problem ends nowhere, and is left to a solve of its own.
        if read.done or any(bool(tolerance.isnan().any()) for _, tolerance in terms):
            return read, terms


def _tolerance(
    term: TermRead, epsilon: float, options: Converged, constraints: Constraints, *, cross: bool
) -> Tensor:
    """Return the marginal error to reach in a term, (B,), as rounding allows.

    It is NaN where a problem is hopeless, whatever its iterations.
    """
    least = 2 * rounding_floor(facts_of(term), term.numbers.size, epsilon)
    asked, gives_way = options.asked_tolerance, options.tolerance is None
    tolerance = least.clamp_min(asked) if gives_way else torch.full_like(least, asked)
    largest = torch.maximum(term.costs.lowest.abs(), term.costs.highest.abs())
    in_range = largest < torch.finfo(torch.float32).max / 4
    within_rounding = least <= (LOOSEST_DEFAULT if gives_way else asked)
    hopeless = ~(in_range & within_rounding) | term.error.isnan()
    if cross:
        hopeless |= beyond_digits(constraints, largest.clamp_min(epsilon))
    return tolerance.masked_fill(hopeless, torch.nan)
