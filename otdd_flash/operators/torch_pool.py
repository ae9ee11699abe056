"""Small problems on a processor: their scores, segments of the engine, and terms for certificates.

An operation of PyTorch takes as long to be asked for as to compute thousands of numbers. So the
terms of a divergence are iterated on side by side, and a softmin that was computed once, at g° and
epsilon, is an anchor for those near it: with

    p_ij = b_j exp((g°_j + S_ij + T°_i) / epsilon),    sum_j p_ij = 1,

T(g)_i is T°_i - epsilon log sum_j p_ij exp((g_j - g°_j) / epsilon), a product of a matrix and a
vector in place of n m exponentials (Schmitzer 2019, Stabilized sparse scaling algorithms for
entropy regularized transport problems, absorbs potentials into the kernel in this way).

p is float32, of rows and of columns. What underflows in it is smaller than e^-87, and after shifts
of at most `MOST_SHIFT` each e^-47 of its sum. Certificates compute plans anew, from the scores.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from otdd_flash.engine.evidence.evaluated import Form
from otdd_flash.engine.few_problems import FewQuasiNewton
from otdd_flash.engine.levels import Levels
from otdd_flash.engine.rule import Goal, Start
from otdd_flash.engine.segments import Evaluation, Move, PassErrors
from otdd_flash.operators.base import CostFacts, Epsilon, Marginals
from otdd_flash.operators.few_vectors import MEMORY, FewVectors
from otdd_flash.operators.one_segment import Scalars
from otdd_flash.operators.score_pool import (
    SIDES,
    UNIT,
    PooledCosts,
    PooledSegments,
    ScorePool,
)
from otdd_flash.operators.tiled import (
    LEAST_EXPONENT,
    LN_2,
    LOG2_E,
    LOG2_ZERO,
    TILE_ELEMENTS_CPU,
    measured,
    present,
)

# How far, in units of epsilon, a potential may be from that of an anchor.
MOST_SHIFT = 20.0

# Rows and columns of a tile of scores while it is made.
TILE = 256

# Facts are asked for where they are.
UNKNOWN = CostFacts(torch.float32, 0.0, 0.0, 0.0, 0.0)


class TorchPool(ScorePool):
    """Stored scores of B problems, made and read by PyTorch."""

    def segments(self, tables: Sequence[Tensor], *, own: bool) -> TorchSegments:
        return TorchSegments(self, own=own)

    def rule(self, segments: PooledSegments, form: Form) -> FewQuasiNewton:
        ones = torch.ones(len(segments.mean_cost), dtype=torch.float64)
        nowhere = Start(Levels.descending(ones), torch.zeros_like(ones))
        problems = cast(TorchSegments, segments)
        return FewQuasiNewton(problems, Goal(1.0, 1.0, 1.0, 0), form, nowhere)

    def term(self, name: str) -> TorchTerm:
        return TorchTerm(self, name)

    def signed_plan(
        self, cross: Tensor, own: Tensor | None, epsilon: Tensor, rows: slice
    ) -> Tensor:
        scores, masses, level = self.scores[:, rows], self.masses.float(), float(epsilon)
        out = torch.zeros_like(scores)
        mine = self.room.sides[0 if rows.stop <= self.room.n else 1]
        for side in self.room.sides:
            potential, sign = (own, -1.0) if side == mine else (cross, 1.0)
            if potential is None:
                continue
            sums = potential[:, rows, None] + potential[:, None, side]
            entries = sums.add_(scores[:, :, side]).div_(level).exp_()
            factors = sign * masses[:, rows, None], masses[:, None, side]
            torch.mul(entries.mul_(factors[0]), factors[1], out=out[:, :, side])
        return out

    def _store(self, points: Tensor, squares: Tensor, rows: slice, columns: slice) -> None:
        symmetric, scale = rows is columns, float(self.lambda_x)
        ends = squares * -scale
        for some in _parts(rows):
            for others in _parts(columns):
                if symmetric and others.start < some.start:
                    continue
                tile = ends[:, some, None] + ends[:, None, others]
                tile.baddbmm_(points[:, some], points[:, others].mT, alpha=2 * scale)
                if self.room.classes > 1:
                    tile -= self._between_classes(some, others)
                if symmetric and some == others:
                    # Two products of the same points may differ in their last bits.
                    tile = (tile + tile.mT).div_(2)
                self.scores[:, some, others] = tile
                if some != others:
                    self.scores[:, others, some] = tile.mT

    def _between_classes(self, rows: slice, columns: slice) -> Tensor:
        """lambda_y W of the classes of some points (B, r, c)."""
        problem = torch.arange(self.room.problems)[:, None, None]
        labels = self.labels[:, rows, None], self.labels[:, None, columns]
        return self.class_costs[problem, *labels]


def _parts(points: slice) -> list[slice]:
    """Cut points into tiles that fit the cache."""
    starts = range(points.start, points.stop, TILE)
    return [slice(start, min(start + TILE, points.stop)) for start in starts]


class TorchSegments:
    """The cross terms of a pool, or its self terms, those of x and of y of each problem in turn.

    Args:
        pool: the problems.
        own: whether these are the self terms.
    """

    memory = MEMORY

    def __init__(self, pool: TorchPool, *, own: bool) -> None:
        self._pool, self._own, room = pool, own, pool.room
        x, y = room.sides
        blocks = [(x, x), (y, y)] if own else [(x, y), (y, x)]
        self._anchors = [_Anchor(pool, *block) for block in blocks]
        self._lengths = (room.n, room.m) if own else (room.m,)
        self._updated = pool.zeros(len(self._lengths), max(self._lengths)).flatten(0, 1)
        self._rows = pool.zeros(room.n, dtype=torch.float32)
        self.scalars: list[Scalars] = []
        self.restart(torch.zeros(sum(self._lengths) * room.problems))

    def restart(self, candidate: Tensor) -> None:
        pool, (x, y) = self._pool, self._pool.room.sides
        self.scalars = [_scalars(*facts) for facts in zip(*self._numbers(), strict=True)]
        masses = pool.masses if self._own else pool.masses[:, y]
        self._vectors = FewVectors(self._padded(masses), self._padded(candidate.float()))
        self._row_masses = pool.masses[:, x].unsqueeze(2)
        if self._own:
            self._row_masses = self._padded(masses)[:, :, None]
        for anchor in self._anchors:
            anchor.forget()

    @property
    def facts(self) -> PooledCosts:
        known = self._pool.own if self._own else self._pool.cross
        return PooledCosts(*(number.reshape(-1) for number in known))

    @property
    def mean_cost(self) -> Tensor:
        return self.facts.above_lowest

    @property
    def rows(self) -> Tensor:
        return self.kept if self._own else self._rows.flatten()

    @property
    def kept(self) -> Tensor:
        return self._flat(self._vectors.kept).float()

    def updated(self, epsilon: Tensor) -> Tensor:
        return self._flat(self._vectors.kept + self._vectors.residual).float()

    def evaluate(self, epsilon: Sequence[float], active: Sequence[bool]) -> list[Evaluation]:
        """Evaluate the candidates in two softmins, or one of a cloud with itself."""
        candidate, levels = self._vectors.candidate, list(epsilon)
        if not self._own:
            self._rows = self._anchors[0].softmin(candidate, levels).float()
            self._updated = self._anchors[1].softmin(self._rows, levels)
            return self._vectors.evaluate((self._rows, self._row_masses), self._updated, epsilon)
        for k, (anchor, length) in enumerate(zip(self._anchors, self._lengths, strict=True)):
            if any(active[k::2]):
                found = anchor.softmin(candidate[k::2, :length], levels[k::2])
                self._updated[k::2, :length] = found
        return self._vectors.evaluate((candidate, self._row_masses), self._updated, epsilon)

    def move(self, k: int, move: Move) -> None:
        self._vectors.move(k, move)

    def _numbers(self) -> tuple[list[float], ...]:
        return tuple(fact.tolist() for fact in self.facts)

    def _padded(self, flat: Tensor) -> Tensor:
        """Vectors of self terms (B L,) as (2 B, longest), of cross terms (B M,) as (B, M)."""
        problems, lengths = self._pool.room.problems, self._lengths
        if min(lengths) == max(lengths):
            return flat.reshape(-1, lengths[0])
        out = flat.new_zeros((problems, 2, max(lengths)))
        for k, part in enumerate(flat.view(problems, -1).split(lengths, 1)):
            out[:, k, : lengths[k]] = part
        return out.flatten(0, 1)

    def _flat(self, padded: Tensor) -> Tensor:
        """Undo `_padded`."""
        lengths = self._lengths
        if min(lengths) == max(lengths):
            return padded.flatten()
        parts = [padded[k :: len(lengths), :length] for k, length in enumerate(lengths)]
        return torch.cat(parts, 1).flatten()


def _scalars(mean: float, lowest: float, highest: float) -> Scalars:
    """Put together what decisions need of a cost, with estimates of what a pass rounds."""
    size = mean - 2 * min(lowest, 0.0)
    costs = UNIT * size / 2
    errors = PassErrors(costs, costs, 0.0, UNIT / 2, 0.0, 0.0, UNIT, UNIT * size, 0.0)
    above_lowest = mean - min(lowest, 0.0)
    return Scalars(torch.float32, torch.float32, above_lowest, highest - lowest, errors, 0.0)


class _Anchor:
    """p (B, n, m) of the rows' softmins over some columns, T° (B, n), g° (B, m) and epsilon.

    Args:
        pool: the problems.
        rows: where the rows are among the points of a problem.
        columns: where the columns are.
    """

    def __init__(self, pool: TorchPool, rows: slice, columns: slice) -> None:
        self._pool, self._rows, self._columns = pool, rows, columns
        count, n, m = pool.scores[:, rows, columns].shape
        self._plan = torch.empty((count, n, m))
        self._softmin = torch.empty((count, n), dtype=torch.float64)
        self._potential = torch.empty((count, m), dtype=torch.float64)
        self._epsilon: list[float] = []

    def forget(self) -> None:
        """Take the scores for others from now on, and the masses."""
        self._epsilon = []
        masses = self._pool.masses[:, self._columns]
        self._log2_masses = masses.log2().clamp_min_(LOG2_ZERO)
        absent = masses == 0
        self._absent = absent if bool(absent.any()) else None

    def softmin(self, potential: Tensor, epsilon: list[float]) -> Tensor:
        """T(g) (B, n) float64 of potentials g (B, m)."""
        level: float | Tensor = epsilon[0]
        if any(each != level for each in epsilon):
            level = torch.tensor(epsilon, dtype=torch.float64)[:, None]
        if epsilon != self._epsilon:
            return self._move(potential, epsilon, level)
        shift = torch.sub(potential, self._potential).div_(level)
        if self._absent is not None:
            shift.masked_fill_(self._absent, 0)
        least, most = torch.aminmax(shift)
        # Not what is NaN either.
        if not (float(most) <= MOST_SHIFT and float(least) >= -MOST_SHIFT):
            return self._move(potential, epsilon, level)
        sums = torch.bmm(self._plan, shift.exp_().float().unsqueeze(2)).squeeze(2)
        return self._softmin - sums.double().log_().mul_(level)

    def _move(self, potential: Tensor, epsilon: list[float], level: float | Tensor) -> Tensor:
        """Take the potentials as the anchor."""
        self._epsilon = epsilon
        self._potential.copy_(potential)
        scale = LOG2_E / level
        term = (self._log2_masses + self._potential * scale).float().unsqueeze(1)
        factor = scale.float().unsqueeze(2) if isinstance(scale, Tensor) else scale
        logs = self._softmin
        for rows, scores, plan in self._tiles():
            torch.add(torch.mul(scores, factor, out=plan), term, out=plan)
            highest = plan.amax(2, keepdim=True)
            sums = plan.sub_(highest).exp2_().sum(2, keepdim=True)
            plan.div_(sums)
            logs[:, rows] = (highest + sums.log2_()).squeeze(2)
        self._softmin = logs.mul_(LN_2).mul_(-level)
        return self._softmin

    def _tiles(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield rows, their scores, and where p of them is, as many as fit the cache."""
        count, n, m = self._plan.shape
        scores = self._pool.scores[:, self._rows, self._columns]
        height = max(1, TILE_ELEMENTS_CPU // (count * m))
        for first in range(0, n, height):
            rows = slice(first, min(first + height, n))
            yield rows, scores[:, rows], self._plan[:, rows]


class TorchTerm:
    """A term of B problems; potentials and all that is made of them have a leading dimension B.

    Args:
        pool: as `prepare` left it.
        term: "xy", "xx" or "yy".
    """

    dtype, costs = torch.float32, UNKNOWN

    def __init__(self, pool: TorchPool, term: str) -> None:
        self._pool, (one, two) = pool, SIDES[term]
        rows, columns = pool.room.sides[one], pool.room.sides[two]
        self.a, self.b = pool.masses[:, rows], pool.masses[:, columns]
        self._scores, self._own = pool.scores[:, rows, columns], one == two
        magnitudes = pool.own_magnitudes if self._own else pool.cross_magnitudes
        self._magnitudes = magnitudes[:, rows], magnitudes[:, columns]

    def marginals(
        self, f: Tensor, g: Tensor, epsilon: Epsilon, *, accurate: bool = False
    ) -> Marginals:
        """Row and column sums of the plan of f (B, n) and g (B, m), in float64 throughout."""
        level = float(epsilon)
        f, g = present(self.a, f), present(self.b, g)
        # f_i + g_j as a product of matrices: one read and one write of a tile.
        left = torch.stack((f / level, torch.ones_like(f)), 2)
        right = torch.stack((torch.ones_like(g), g / level), 1)
        rows, columns = torch.zeros_like(self.a), torch.zeros_like(self.b)
        if self._own:
            columns = rows
        _, n, m = self._scores.shape
        height = max(1, TILE_ELEMENTS_CPU // (2 * len(f) * m))
        for first in range(0, n, height):
            part = slice(first, min(first + height, n))
            # Of a symmetric plan, entries from the diagonal on.
            others = slice(first if self._own else 0, m)
            tile = self._scores[:, part, others].double()
            tile.baddbmm_(left[:, part], right[:, :, others], beta=1 / level)
            # Below it exp is slow.
            tile.clamp_min_(LEAST_EXPONENT).exp_()
            rows[:, part] += torch.bmm(tile, self.b[:, others, None]).squeeze(2)
            rest = height if self._own else 0
            if m > first + rest or not self._own:
                others = slice(first + rest if self._own else 0, m)
                columns[:, others] += torch.bmm(self.a[:, None, part], tile[:, :, rest:]).squeeze(1)
        rows = self.a * rows
        columns = rows if self._own else self.b * columns
        share, (x, y) = self._pool.error_share, self._magnitudes
        errors = share * x, share * y
        return measured((rows, columns), (f, g), self._magnitudes, errors, self._pool.rounding)

    def expected_costs(self, masses: Tensor) -> Tensor:
        """sum_j C_ij q_j (B, n) for masses q (B, m), float64: one read of the scores."""
        return -torch.bmm(self._scores.double(), masses.unsqueeze(2)).squeeze(2)

    def own_costs(self) -> Tensor:
        """C_ii (B, n) for the cost of a cloud with itself, float64; computed once."""
        return self._own_costs

    @cached_property
    def _own_costs(self) -> Tensor:
        return -self._scores.diagonal(dim1=1, dim2=2).double()
