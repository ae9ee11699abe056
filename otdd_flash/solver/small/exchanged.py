"""What small solves send to the device, and what they read from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from otdd_flash.cost.facts import TERMS
from otdd_flash.operators.score_pool import Pool, PooledCosts, ScorePool
from otdd_flash.samples import LabeledSamples
from otdd_flash.solver.certificate import CrossNumbers, PlanEvidence, SelfNumbers

# Numbers of a goal with two unit roundoffs.
GOAL = 7
# Numbers of inputs before tables.
COUNT = 2 * GOAL + 10


class Inputs(NamedTuple):
    """Views of the numbers (k,) float64 that are sent to the device for every batch.

    Attributes:
        cross: (7,) settings of the cross term, of `engine.quasi_newton_kernels`.
        own: (7,) of the self terms.
        started: (3,) 1 where a term starts from given potentials, else 0.
        of_costs: (3,) as a pool takes them.
        place: (4,) int64, where a matrix that is given is, of `kernels.matrix.place`.
        tables: (4 B, 8) int64, of `tables_of`.
    """

    cross: Tensor
    own: Tensor
    started: Tensor
    of_costs: Tensor
    place: Tensor
    tables: Tensor

    @classmethod
    def of(cls, numbers: Tensor, problems: int) -> Inputs:
        """Cut the views out of all numbers for B problems, `COUNT + 32 B` of them."""
        parts = [GOAL, GOAL, 3, 3, 4, 32 * problems]
        cross, own, started, of_costs, place, tables = torch.split(numbers, parts)
        whole = place.view(torch.int64), tables.view(torch.int64).view(-1, 8)
        return cls(cross, own, started, of_costs, *whole)


class Batch(NamedTuple):
    """B problems, on the device; one is a batch of one.

    Attributes:
        points: x (B, n, d) and y (B, m, d).
        masses: (B, n) and (B, m), 0 where a problem has no point; None is uniform.
        labels: (B, n) and (B, m) int64, of each side; None is one class.
        class_totals: V_x and V_y.
        table: W (V_x + V_y, V_x + V_y), of all problems, or None: 0.
    """

    points: tuple[Tensor, Tensor]
    masses: tuple[Tensor | None, Tensor | None]
    labels: tuple[Tensor | None, Tensor | None]
    class_totals: tuple[int, int]
    table: Tensor | None

    @classmethod
    def of_one(cls, sides: tuple[LabeledSamples, LabeledSamples], table: Tensor | None) -> Batch:
        x, y = sides

        def first(part: Tensor | None) -> Tensor | None:
            return None if part is None else part[None]

        return cls(
            (x.features[None], y.features[None]),
            (first(x.weights), first(y.weights)),
            (first(x.labels), first(y.labels)),
            (x.class_total, y.class_total),
            table,
        )

    def fill(self, pool: Pool, *, uniform: bool) -> bool:
        """Fill in a pool's inputs.

        Args:
            pool: with room for as many problems, and no fewer points.
            uniform: whether masses are uniform there already.

        Returns:
            Whether they are now.
        """
        assert isinstance(pool, ScorePool)
        now = self.masses == (None, None)
        if not (now and uniform):
            pool.masses.zero_()
        for k, (offset, size) in enumerate(zip((0, pool.room.n), self.sizes, strict=True)):
            here, masses, labels = slice(offset, offset + size), self.masses[k], self.labels[k]
            pool.points[:, here].copy_(self.points[k])
            if masses is not None:
                pool.masses[:, here].copy_(masses)
            elif not (now and uniform):
                pool.masses[:, here] = 1 / size
            if self.table is not None:
                before, into = k * self.class_totals[0], pool.labels[:, here]
                into.fill_(before) if labels is None else torch.add(labels, before, out=into)
        if self.table is not None:
            total = len(self.table)
            pool.class_distances[:, :total, :total].copy_(self.table)
        return now

    def part(self, problems: slice | Tensor) -> Batch:
        """Take some problems, a slice or (P,) int64 on their device."""

        def of(given: tuple[Tensor | None, Tensor | None]) -> Any:
            return tuple(None if side is None else side[problems] for side in given)

        return self._replace(points=of(self.points), masses=of(self.masses), labels=of(self.labels))

    @property
    def place(self) -> tuple[int, ...]:
        """Zeros: the pool computes its scores, and no matrix is given."""
        return 0, 0, 0, 0

    @property
    def sizes(self) -> tuple[int, int]:
        """Points of a problem on both sides, n and m."""
        x, y = self.points
        return x.shape[1], y.shape[1]


class GivenCosts(NamedTuple):
    """One problem whose costs are given, on the device.

    Attributes:
        costs: C (n, m), finite, a row contiguous.
        masses: (n,) and (m,) float64.
        magnitudes: (n,) and (m,) float64, with |C_ij| at most their sum.
        place: the numbers of the costs' `kernels.matrix.place.Place`.
    """

    costs: Tensor
    masses: tuple[Tensor, Tensor]
    magnitudes: tuple[Tensor, Tensor]
    place: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, int]:
        return self.costs.shape[0], self.costs.shape[1]

    def fill(self, pool: Pool, *, uniform: bool) -> bool:
        for known, sides in ((pool.masses, self.masses), (pool.cross_magnitudes, self.magnitudes)):
            known.zero_()
            for start, given in zip((0, pool.room.n), sides, strict=True):
                known[0, start : start + len(given)].copy_(given)
        return False


class TermRead(NamedTuple):
    """What was read of a term: numbers of one problem, or tensors (B,).

    Attributes:
        error: the marginal error that iterations ended at.
        iterations: how many there were.
        costs: of `PooledCosts`.
        numbers: `CrossNumbers` or `SelfNumbers`.
    """

    error: Any
    iterations: Any
    costs: Any
    numbers: Any

    @classmethod
    def of(cls, values: Sequence[Any], *, cross: bool) -> TermRead:
        """Unpack the values, in this order."""
        error, iterations, *rest = values
        known = len(PooledCosts._fields)
        numbers = (CrossNumbers if cross else SelfNumbers)(*rest[known:])
        return cls(error, iterations, PooledCosts(*rest[:known]), numbers)


class Read(NamedTuple):
    """What was read of a batch.

    Attributes:
        done: whether all iterations are.
        numbers: (B, .) float64 on the host, `Pool.asymmetry` and then those of every term.
        evidence: what they are of, by term.
    """

    done: bool
    numbers: Tensor
    evidence: list[PlanEvidence]

    def asymmetry(self) -> Tensor:
        """`Pool.asymmetry` (B, 4)."""
        return self.numbers[:, :4]

    def terms(self, problem: int | None = None) -> list[TermRead]:
        """Unpack the terms in the order of `PooledSolve.terms`, of one problem or of all."""
        numbers = self.numbers
        rest = list(numbers.unbind(1)) if problem is None else numbers[problem].tolist()
        reads, first = [], 4
        for term, evidence in zip(TERMS, self.evidence, strict=False):
            last = first + 2 + len(PooledCosts._fields) + evidence.numbers.shape[-1]
            reads.append(TermRead.of(rest[first:last], cross=term == "xy"))
            first = last
        return reads
