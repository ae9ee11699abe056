"""Small divergences of B pairs of clouds, side by side in one `PooledSolve`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.cost.class_table import ROUNDING
from otdd_flash.operators.score_pool import UNIT, Room
from otdd_flash.solver.certificate import conclude_many
from otdd_flash.solver.evidence import rounding_floor
from otdd_flash.solver.schedules.converged import Converged
from otdd_flash.solver.small.pooled_solve import Batch, TermRead, kept
from otdd_flash.solver.small.route import facts_of
from otdd_flash.solver.solve import TOLERANCE_AIM
from otdd_flash.solver.term import LOOSEST_DEFAULT, goal_of

# Bytes of the problems that are solved at once, on a GPU and on a processor, whose cache they
# should not exceed by much; and how many they are: kernels have a program for each along an axis
# that holds 65,535.
MOST_BYTES, MOST_BYTES_CPU, MOST_PROBLEMS = 1 << 30, 1 << 25, 1 << 15


class BatchSolved(NamedTuple):
    """What came of B problems.

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
    """
    problems = len(batch.points[0])
    one = batch.room(1, in_triton=in_triton)
    most = MOST_BYTES if in_triton else min(MOST_BYTES_CPU, budget or MOST_BYTES_CPU)
    at_once = max(1, min(MOST_PROBLEMS, most // one.bytes))
    parts = -(-problems // at_once)
    size = -(-problems // parts)
    solved = [
        _solve(
            batch.part(slice(first, first + size)),
            one,
            epsilon,
            options,
            debias,
            wanted,
        )
        for first in range(0, problems, size)
    ]
    values, proved, gradients = zip(*solved, strict=True)
    by_side = tuple(torch.cat(parts) for parts in zip(*gradients, strict=True))
    return BatchSolved(torch.cat(values), torch.cat(proved), by_side)


def _solve(
    batch: Batch,
    room: Room,
    epsilon: float,
    options: Converged,
    debias: bool,
    wanted: Sequence[int],
) -> BatchSolved:
    problems = len(batch.points[0])
    # As for a single problem.
    goal = goal_of(options, epsilon, TOLERANCE_AIM)
    with kept(room._replace(problems=problems), debias) as solve:
        solve.begin(batch, goal, {})
        done = False
        while not done:
            solve.iterate()
            found = solve.read()
            reads = [
                _Reached(read, options, epsilon, cross=k == 0)
                for k, read in enumerate(found.terms())
            ]
            # What is hopeless ends nowhere, and is refused when it is solved alone.
            done = found.done or any(bool(read.hopeless.any()) for read in reads)
        apart, largest = found.asymmetry.split(2, 1)  # type: ignore[no-untyped-call]
        proved = torch.ones(problems, dtype=torch.bool)
        if debias:
            proved = (apart <= ROUNDING * largest).all(1)
        values = torch.zeros(problems, dtype=torch.float64)
        for read, evidence in zip(reads, found.evidence, strict=True):
            value, error, holds = conclude_many(read.numbers, evidence.sums, UNIT, epsilon)
            values += value if read.cross else -value / 2
            proved &= holds & read.within(error)
        fine = proved.to(batch.points[0].device)[:, None, None] if wanted else proved
        gradients = tuple(
            torch.where(fine, solve.gradient(place)[:, : batch.sizes[place]], 0) for place in wanted
        )
    return BatchSolved(values, proved, gradients)


class _Reached:
    """What rounding makes of the tolerance for the terms (B,) that were read."""

    def __init__(self, read: TermRead, options: Converged, epsilon: float, *, cross: bool) -> None:
        self.cross, self.numbers = cross, read.numbers
        least = 2 * rounding_floor(facts_of(read), read.numbers.size, epsilon)
        asked, gives_way = options.asked_tolerance, options.tolerance is None
        self.tolerance = least.clamp_min(asked) if gives_way else torch.full_like(least, asked)
        largest = torch.maximum(read.costs.lowest.abs(), read.costs.highest.abs())
        in_range = largest < torch.finfo(torch.float32).max / 4
        within_rounding = least <= (LOOSEST_DEFAULT if gives_way else asked)
        self.hopeless = ~(in_range & within_rounding) | read.error.isnan()

    def within(self, error: Tensor) -> Tensor:
        """Whether marginal errors (B,) are small enough."""
        reached: Tensor = (error <= self.tolerance) & ~self.hopeless
        return reached
