"""Small problems on a processor: their scores, segments of the engine, and terms for certificates.

A launch of an operation of PyTorch takes as long as to compute thousands of numbers. So the cross
terms of all problems of a batch are iterated on side by side, and so are their self terms. With
scores S = -C (n, m), masses b (m,) and the softmin T(g) (n,) of potentials g (m,), one softmin that
was computed, T° = T(g°) at an epsilon, is an anchor for those near it:

    p_ij = b_j exp((g°_j + S_ij + T°_i) / epsilon),    sum_j p_ij = 1,
    T(g)_i = T°_i - epsilon log sum_j p_ij exp((g_j - g°_j) / epsilon),

a product of a matrix and a vector in place of n m exponentials (Schmitzer 2019, Stabilized sparse
scaling algorithms for entropy regularized transport problems, absorbs potentials into the kernel in
this way).

p is stored in float32, for softmins of rows and for those of columns. An entry that underflows is
below e^-87, and after shifts of at most `MOST_SHIFT` each below e^-47 of its sum.

`solver.small.pooled_solve` makes a `TorchPool` and fills it with one batch after another. Scores
and masses change with the batch, so `begin` must forget every anchor. Certificates must not read p:
they compute plans anew, from the scores, in float64 (`tests/solver/test_torch_pool.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from otdd_flash.cost.facts import SIDES
from otdd_flash.cost.host_points import spans
from otdd_flash.engine.few_problems import MEMORY, FewQuasiNewton, FewVectors
from otdd_flash.engine.problems import Evaluated, Start, Vectors
from otdd_flash.engine.quasi_newton import ManyVectors, QuasiNewton
from otdd_flash.formulas.decision import Form
from otdd_flash.formulas.marginals import EXACT
from otdd_flash.operators.base import Epsilon, Marginals, Passes
from otdd_flash.operators.one_problem import Scalars
from otdd_flash.operators.score_pool import (
    UNIT,
    PooledIterations,
    PooledSegments,
    Room,
    ScorePool,
    pass_errors,
)
from otdd_flash.operators.torch_operator import (
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

# Problems up to which decisions are made one by one, in Python floats.
FEW = 4


class TorchPool(ScorePool):
    """Stored scores of B problems, made and read by PyTorch.

    Attributes:
        own_scores: (B, n, n) and (B, m, m) float32, of the self terms; views of one tensor
            (B, 2, n, n) where both sides have as many points.
    """

    def __init__(self, room: Room) -> None:
        super().__init__(room)
        n, m, dtype = room.n, room.m, torch.float32
        self.square = n == m
        if not self.square:
            self.own_scores = [self.zeros(n, n, dtype=dtype), self.zeros(m, m, dtype=dtype)]
        else:
            self._both = self.zeros(2, n, n, dtype=dtype)
            self.own_scores = list(self._both.unbind(1))
            self.both_self_terms = self._both_self_terms()
        # Rows are contiguous in either direction.
        self._between = [self.zeros(n, m, dtype=dtype), self.zeros(m, n, dtype=dtype)]

    def block(self, rows: int, columns: int) -> Tensor:
        return self.own_scores[rows] if rows == columns else self._between[rows]

    def both(self) -> Tensor:
        """Scores (2 B, n, n) of the self terms of x and y of each problem in turn, `square`."""
        return self._both.flatten(0, 1)

    def segments(self, tables: Sequence[Tensor], *, own: bool) -> TorchSegments:
        return TorchSegments(self, own=own)

    def term(self, name: str) -> TorchTerm:
        one, two = SIDES[name]
        own, (rows, columns) = one == two, (self.room.sides[side] for side in (one, two))
        magnitudes = self.own_magnitudes if own else self.cross_magnitudes
        return TorchTerm(
            self.block(one, two),
            (self.masses[:, rows], self.masses[:, columns]),
            (magnitudes[:, rows], magnitudes[:, columns]),
            self.error_share,
            own=own,
        )

    def _both_self_terms(self) -> TorchTerm:
        masses, sizes = (each.view(-1, self.room.n) for each in (self.masses, self.own_magnitudes))
        pairs = (masses, masses), (sizes, sizes)
        return TorchTerm(self.both(), *pairs, self.error_share, own=True)

    def signed_plan(
        self, cross: Tensor, own: Tensor | None, epsilon: Tensor, rows: slice
    ) -> Tensor:
        masses, level = self.masses.float(), float(epsilon)
        sides = self.room.sides
        mine = 0 if rows.stop <= self.room.n else 1
        here = slice(rows.start - sides[mine].start, rows.stop - sides[mine].start)
        out = masses.new_zeros((len(masses), rows.stop - rows.start, self.room.points))
        for side, columns in enumerate(sides):
            potential, sign = (own, -1.0) if side == mine else (cross, 1.0)
            if potential is None:
                continue
            sums = potential[:, rows, None] + potential[:, None, columns]
            entries = sums.add_(self.block(mine, side)[:, here]).div_(level).exp_()
            factors = sign * masses[:, rows, None], masses[:, None, columns]
            torch.mul(entries.mul_(factors[0]), factors[1], out=out[:, :, columns])
        return out

    def _store(self, points: Tensor, squares: Tensor, rows: slice, columns: slice) -> None:
        symmetric, scale = rows is columns, float(self.lambda_x)
        ends, starts = squares * -scale, (rows.start, columns.start)
        sides = [0 if start == 0 else 1 for start in starts]
        scores, transposed = self.block(*sides), self.block(*reversed(sides))
        # Tiles that fit the cache.
        for some in spans(rows.start, rows.stop, TILE):
            for others in spans(columns.start, columns.stop, TILE):
                if symmetric and others.start < some.start:
                    continue
                tile = ends[:, some, None] + ends[:, None, others]
                tile.baddbmm_(points[:, some], points[:, others].mT, alpha=2 * scale)
                if self.room.classes > 1:
                    tile -= self._between_classes(some, others)
                if symmetric and some == others:
                    # Two products of the same points may differ in their last bits.
                    tile = (tile + tile.mT).div_(2)
                one, two = (
                    slice(part.start - start, part.stop - start)
                    for part, start in zip((some, others), starts, strict=True)
                )
                scores[:, one, two] = tile
                if not symmetric or some != others:
                    transposed[:, two, one] = tile.mT

    def _between_classes(self, rows: slice, columns: slice) -> Tensor:
        """Look up lambda_y W between the classes of some points (B, r, c)."""
        problem = torch.arange(self.room.problems)[:, None, None]
        labels = self.labels[:, rows, None], self.labels[:, None, columns]
        return self.class_costs[problem, *labels]


class TorchSegments(PooledSegments):
    """Segments of a pool on a processor.

    Args:
        pool: the problems.
        own: whether these are the self terms.

    Attributes:
        constraints: exact or relaxed marginals, of the form of their iterations.
    """

    constraints = EXACT

    def __init__(self, pool: TorchPool, *, own: bool) -> None:
        super().__init__(pool, own=own)
        room = pool.room
        x, y = (pool.masses[:, side] for side in room.sides)
        self._lengths = (room.n, room.m) if own else (room.m,)
        if not own:
            self._anchors = [_Anchor(pool.block(0, 1), y), _Anchor(pool.block(1, 0), x)]
        elif pool.square:
            self._anchors = [_Anchor(pool.both(), pool.masses.view(-1, room.n))]
        else:
            self._anchors = [_Anchor(pool.block(0, 0), x), _Anchor(pool.block(1, 1), y)]
        self.row_masses = None if own else x
        self._flat_masses = pool.masses if own else y
        self._updated = torch.zeros_like(self.column_masses)

    @property
    def column_masses(self) -> Tensor:
        """Masses (B, M) of cross terms, (2 B, longest) of self terms."""
        return self._padded(self._flat_masses)

    @property
    def scalars(self) -> list[Scalars]:
        """Facts of each term's costs for decisions, in floats."""
        facts = self.facts
        every = facts.mean, facts.lowest, facts.above_lowest, facts.spread
        return [
            Scalars(self.dtype, self.dtype, scale, spread, pass_errors(mean, lowest), 0.0)
            for mean, lowest, scale, spread in zip(*(each.tolist() for each in every), strict=True)
        ]

    def iterations(self, form: Form) -> FewQuasiNewton | QuasiNewton:
        """Make their iterations: few problems are decided upon one by one, in Python floats."""
        self.constraints = form.constraints
        nothing = torch.zeros_like(self.column_masses, dtype=torch.float32)
        goal, start = self.placeholder
        if self._pool.room.problems <= FEW:
            few = FewVectors(self, nothing)
            return FewQuasiNewton(self, few, goal, form, start)
        many = ManyVectors(self, nothing, MEMORY)
        return QuasiNewton(self, many, goal, form, start)

    def begin(
        self, iterations: PooledIterations, candidate: Tensor, settings: Tensor, start: Start
    ) -> None:
        for anchor in self._anchors:
            anchor.forget()
        iterations.begin(settings, start, self._padded(candidate).float())

    def evaluated(self, vectors: Vectors, epsilon: Tensor) -> Evaluated:
        g, updated = (self._flat(part).float() for part in (vectors.kept, vectors.updated))
        return Evaluated(g if vectors.rows is None else vectors.rows.flatten(), g, updated)

    def softmins(
        self,
        g: Tensor,
        before: Tensor | None,
        epsilon: Sequence[float] | Tensor,
        active: Sequence[bool] | Tensor,
    ) -> tuple[Tensor | None, Tensor]:
        levels, flags = list(map(float, epsilon)), list(map(bool, active))
        marginals, level = self.constraints, _of_each(levels)
        if before is None:
            softmin = self._self_softmins(g, levels, flags)
            return None, marginals.columns.updated(softmin, level)
        rows = marginals.rows.updated(self._anchors[0].softmin(g, levels), level).float()
        if not all(flags):
            # Rows of a problem that is done go with what it kept, not with its next candidate.
            rows = torch.where(torch.tensor(flags)[:, None], rows, before)
        return rows, marginals.columns.updated(self._anchors[1].softmin(rows, levels), level)

    def _self_softmins(self, g: Tensor, epsilon: list[float], active: list[bool]) -> Tensor:
        """Compute T(g) of self terms."""
        if len(self._anchors) == 1:
            return self._anchors[0].softmin(g, epsilon)
        for k, (anchor, length) in enumerate(zip(self._anchors, self._lengths, strict=True)):
            if any(active[k::2]):
                found = anchor.softmin(g[k::2, :length], epsilon[k::2])
                self._updated[k::2, :length] = found
        return self._updated

    def keep(self, order: Tensor) -> None:
        """Go on with all problems: those of a pool are never left out."""
        assert len(order) == len(self.column_masses)

    def _padded(self, flat: Tensor) -> Tensor:
        """Shape vectors of self terms (B L,) as (2 B, longest), of cross terms (B M,) as (B, M)."""
        problems, lengths = self._pool.room.problems, self._lengths
        if min(lengths) == max(lengths):
            return flat.reshape(-1, lengths[0])
        out = flat.new_zeros((problems, 2, max(lengths)))
        for k, part in enumerate(torch.split(flat.view(problems, -1), list(lengths), 1)):
            out[:, k, : lengths[k]] = part
        return out.flatten(0, 1)

    def _flat(self, padded: Tensor) -> Tensor:
        """Undo `_padded`."""
        lengths = self._lengths
        if min(lengths) == max(lengths):
            return padded.flatten()
        parts = [padded[k :: len(lengths), :length] for k, length in enumerate(lengths)]
        return torch.cat(parts, 1).flatten()


def _of_each(epsilon: list[float]) -> float | Tensor:
    """Return epsilon of all problems, or of each as (S, 1) where they differ."""
    if all(level == epsilon[0] for level in epsilon):
        return epsilon[0]
    return torch.tensor(epsilon, dtype=torch.float64)[:, None]


class _Anchor:
    """p (S, n, m) of the rows' softmins over some columns, T° (S, n), g° (S, m) and epsilon.

    Args:
        scores: (S, n, m) float32, which may change before `forget`.
        masses: (S, m) float64, which may change before `forget`.
    """

    def __init__(self, scores: Tensor, masses: Tensor) -> None:
        self._scores, self._masses = scores, masses
        self._plan = torch.empty_like(scores, memory_format=torch.contiguous_format)
        self._softmin = torch.empty(scores.shape[:2], dtype=torch.float64)
        self._potential = torch.empty_like(masses)
        self._epsilon: list[float] = []

    def forget(self) -> None:
        """Begin with other scores and masses."""
        self._epsilon = []
        self._log2_masses = self._masses.log2().clamp_min_(LOG2_ZERO)
        absent = self._masses == 0
        self._absent = absent if bool(absent.any()) else None

    def softmin(self, potential: Tensor, epsilon: list[float]) -> Tensor:
        """Compute T(g) (S, n) float64 of potentials g (S, m)."""
        level = _of_each(epsilon)
        if not self._epsilon:
            return self._move(potential, epsilon, level)
        shift = torch.sub(potential, self._potential).div_(level)
        if self._absent is not None:
            shift.masked_fill_(self._absent, 0)
        far = torch.linalg.vector_norm(shift, torch.inf, 1).tolist()
        # Those with NaN are stale too.
        stale = [
            k
            for k, (one, other, apart) in enumerate(zip(epsilon, self._epsilon, far, strict=True))
            if one != other or not apart <= MOST_SHIFT
        ]
        if len(stale) == len(epsilon):
            return self._move(potential, epsilon, level)
        if stale:
            shift[stale] = 0
            self._move_some(torch.tensor(stale), potential, epsilon)
        sums = self._times(shift.exp_().float())
        return self._softmin - sums.double().log_().mul_(level)

    def _times(self, factors: Tensor) -> Tensor:
        """Compute sum_j p_ij v_j (S, n) for factors v (S, m)."""
        if len(factors) == 1:
            return torch.mv(self._plan[0], factors[0])[None]
        return torch.bmm(self._plan, factors.unsqueeze(2)).squeeze(2)

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

    def _move_some(self, places: Tensor, potential: Tensor, epsilon: list[float]) -> None:
        """Take the potentials of some problems (K,) as theirs."""
        some = _Anchor(self._scores[places], self._masses[places])
        some.forget()
        levels = [epsilon[k] for k in places.tolist()]
        some.softmin(potential[places], levels)
        self._plan[places], self._softmin[places] = some._plan, some._softmin
        self._potential[places] = some._potential
        self._epsilon = [*epsilon]

    def _tiles(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield rows, their scores, and where p of them is, as many as fit the cache."""
        count, n, m = self._plan.shape
        height = max(1, TILE_ELEMENTS_CPU // (count * m))
        for rows in spans(0, n, height):
            yield rows, self._scores[:, rows], self._plan[:, rows]


class TorchTerm:
    """A term of S problems; potentials and all that is made of them have a leading dimension S.

    Args:
        scores: (S, n, m) float32, read whenever they are asked for, like all others.
        masses: (S, n) and (S, m) float64.
        magnitudes: (S, n) and (S, m) float64 with |C_ij| at most their sum.
        error_share: error of a cost in float64 over the magnitudes.
        own: whether rows are columns, and scores symmetric.
    """

    passes = Passes(torch.float32, "torch, scores kept")

    def __init__(
        self,
        scores: Tensor,
        masses: tuple[Tensor, Tensor],
        magnitudes: tuple[Tensor, Tensor],
        error_share: float,
        *,
        own: bool,
    ) -> None:
        self._scores, self._own = scores, own
        self.a, self.b = masses
        self._magnitudes, self._error_share = magnitudes, error_share

    def marginals(
        self, f: Tensor, g: Tensor | None, epsilon: Epsilon, *, accurate: bool = False
    ) -> Marginals:
        """Sum the rows and columns of the plan of f (S, n) and g (S, m), in float64 throughout.

        Of a term of clouds with themselves there is no g, and the columns are the rows.
        """
        level, own_costs = float(epsilon), None
        if g is None:
            own_costs = -self._scores.diagonal(dim1=1, dim2=2).double()
        f, g = present(self.a, f), present(self.b, f if g is None else g)
        # f_i + g_j as a product of matrices: one read and one write of a tile.
        left = torch.stack((f / level, torch.ones_like(f)), 2)
        right = torch.stack((torch.ones_like(g), g / level), 1)
        rows, columns = torch.zeros_like(self.a), torch.zeros_like(self.b)
        if self._own:
            columns = rows
        _, n, m = self._scores.shape
        height = max(1, TILE_ELEMENTS_CPU // (2 * len(f) * m))
        for part in spans(0, n, height):
            first = part.start
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
        errors = self._error_share * self._magnitudes[0], self._error_share * self._magnitudes[1]
        sums = measured((rows, columns), (f, g), self._magnitudes, errors, UNIT, own_costs)
        return sums._replace(column_errors=sums.row_errors) if self._own else sums

    def expected_costs(self, masses: Tensor) -> Tensor:
        """sum_j C_ij q_j (S, n) for masses q (S, m), float64: one read of the scores."""
        return -torch.bmm(self._scores.double(), masses.unsqueeze(2)).squeeze(2)
