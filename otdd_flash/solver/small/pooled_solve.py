"""Small divergences on stored scores, and on a GPU given matrices; on a GPU in recordings.

`solver.small.route` calls it. It takes a `PooledSolve` from the cache (`kept`) and calls `begin`
with a `Batch` of problems, or with one problem of `GivenCosts`. Then it calls `iterate` and `read`
in turn until `Read.done`, or until the numbers that were read show that a problem cannot converge.
Before it hands the solve back it takes copies of `potentials` and of a `gradient`.
`derivatives.loss` and `ranking.bounds` make a `Batch` for `route`.

Below some thousand points a side the work of a solve takes less time than to launch its kernels one
by one. So CUDA graphs hold all of it: one graph prepares scores and potentials, one takes some
iterations of all terms, the cross term beside the self terms, one certifies, and one computes the
gradient by the points of each side. They read sizes, weights, epsilon and the address of a given
matrix from the device's memory (`Inputs`), so that a solve in the cache serves every problem that
fits its `Room`. During a solve the host must wait for the device only in `read`, for the state of
the iterations and the numbers of the certificate. On a processor nothing is recorded, and
iterations end as soon as they are done.

The engine iterates on segments, one for each term of each problem (`operators.score_pool`): B of
the cross terms, and 2 B of the self terms, in which x and y of a problem follow each other.
Iterations and certificates are those of `solver.solve` and `solver.certificate`, so every term must
be what it is alone (`tests/solver/test_solve_terms.py`). `begin` writes the numbers in the order of
`Inputs`, so both change together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache, partial
from threading import Lock, RLock
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from otdd_flash.cost.facts import TERMS, CostFacts
from otdd_flash.cost.host_points import spans
from otdd_flash.devices import current
from otdd_flash.engine.problems import SegmentReport, Start
from otdd_flash.engine.recording import Recorded, RecordingPool, run_branches
from otdd_flash.formulas.decision import CROSS, SELF, Goal, Levels
from otdd_flash.formulas.marginals import EXACT, Constraints
from otdd_flash.operators.comparison import Comparison
from otdd_flash.operators.score_pool import (
    UNIT,
    AskedIterations,
    Pool,
    PooledCosts,
    PooledIterations,
    Room,
    ScorePool,
    tables_of,
)
from otdd_flash.solver.certificate import (
    CrossNumbers,
    PlanEvidence,
    SelfNumbers,
    cross_evidence,
    lowered_plan,
    read_numbers,
    self_evidence,
    self_plan,
)
from otdd_flash.solver.solve import BEFORE_LAST_UPDATE
from otdd_flash.solver.term import SolverProgress

# Iterations of one replay.
STEPS = 4

# Replays of the first `iterate` of a solve, of which no problem before says how many it takes.
FIRST_REPLAYS = 3

# Iterations of one `iterate` on a processor: only the caller gives up a problem that cannot
# converge, from what it reads in between.
MOST_UNASKED = 100

# The columns of `PooledIterations.terms` that are read: marginal error and iterations. A slice, as
# a recording cannot hold indices that come from the host.
ERROR_AND_ITERATIONS = slice(
    SegmentReport._fields.index("marginal_error"),
    SegmentReport._fields.index("iterations") + 1,
    2,
)

# Entries of plans that are held at once.
ENTRIES = 1 << 25


class PooledSolve:
    """Memory for one batch at a time, and the recordings that solve it.

    After `begin`, call `iterate` and `read` in turn until `Read.done`; then `potentials` and
    `gradient` return copies of what was certified last.

    Args:
        room: for the points of a batch.
        debias: whether there are self terms.
        constraints: exact or relaxed marginals; those of both sides are one kind with self terms.
            Recordings take their kinds alone: `begin` says which penalties they have.
    """

    def __init__(self, room: Room, *, debias: bool, constraints: Constraints = EXACT) -> None:
        self.room, device = room, room.device
        self.terms = TERMS if debias else TERMS[:1]
        # Pinned, so that it is sent without waiting. `begin` may overwrite it: the `read` of the
        # batch before has waited for the device.
        pinned = device.type == "cuda"
        numbers = COUNT + 32 * room.problems
        self._host = torch.zeros(numbers, dtype=torch.float64, pin_memory=pinned)
        self._sizes, self._uniform = (0, 0), False
        self._resize((room.n, room.m))
        self._numbers = self._host.to(device)
        self._inputs = Inputs.of(self._numbers, room.problems)
        if room.in_triton:
            constraints = constraints.at(self._inputs.penalties)
        self._constraints = constraints
        self.pool = _pool_of(room, self._inputs.place)
        self.pool.of_costs = self._inputs.of_costs
        self._starts = [
            torch.zeros((room.problems, size), dtype=torch.float32, device=device)
            for size in (room.m, room.n, room.m)
        ]
        tables = self._inputs.tables
        count = room.problems
        of_cross = tables[:count], tables[count : 2 * count]
        self._segments = [self.pool.segments(of_cross, own=False)]
        if debias:
            self._segments.append(self.pool.segments((tables[2 * count :],), own=True))
        self._iterations = [
            segments.iterations(form._replace(constraints=constraints))
            for segments, form in zip(self._segments, (CROSS, SELF), strict=False)
        ]
        recordings = RecordingPool(device)
        self._beginning, self._iterating, self._ending, *self._differentiating = (
            Recorded(recordings) for _ in range(5)
        )
        self._replays = FIRST_REPLAYS
        self._evidence: list[PlanEvidence] = []
        self._found = self._numbers[:0]
        self._potentials = self._starts[0]
        self._gradients = {0: self._potentials, 1: self._potentials}

    def begin(
        self,
        batch: Batch | GivenCosts,
        goal: Goal,
        starts: Mapping[str, Tensor],
        constraints: Constraints = EXACT,
    ) -> None:
        """Load a batch and prepare it.

        Args:
            batch: no more problems and points than there is room for.
            goal: of all terms.
            starts: column potentials (B, .) to start from, by term.
            constraints: of the kinds that the solve was made for, with their penalties.
        """
        numbers = self._host.numpy()
        settings = (*goal, UNIT, UNIT)
        own = (*goal._replace(aim=BEFORE_LAST_UPDATE), UNIT, UNIT)
        flags = [float(term in starts) for term in TERMS]
        penalties = constraints.rows.rho, constraints.columns.rho
        numbers[: COUNT - 4] = (*settings, *own, *flags, *batch.of_costs, *penalties)
        numbers[COUNT - 4 : COUNT].view("int64")[:] = batch.place
        self._resize(batch.sizes)
        self._numbers.copy_(self._host, non_blocking=True)
        self._uniform = batch.fill(self.pool, uniform=self._uniform)
        for term, into in zip(TERMS, self._starts, strict=True):
            if term in starts:
                into[:, : starts[term].shape[-1]].copy_(starts[term])
        self._beginning.run(self._prepare)

    def _resize(self, sizes: tuple[int, int]) -> None:
        """Write the tables of segments of n and m points, unless the last batch had as many."""
        if sizes != self._sizes:
            cross, own = (tables_of(self.room, *sizes, symmetric=own) for own in (False, True))
            Inputs.of(self._host, self.room.problems).tables.copy_(torch.cat((*cross, *own)))
            self._sizes, self._uniform = sizes, False

    def _prepare(self) -> None:
        """Compute scores, first potentials and first levels."""
        inputs, room, pool = self._inputs, self.room, self.pool
        pool.prepare(own=len(self.terms) > 1)
        epsilon, started = inputs.cross[0], inputs.started > 0
        of_cross, *of_own = self._starts
        cross = self._segments[0]
        levels = Levels.trying(epsilon, cross.mean_cost, started[0])
        start = Start(levels, torch.zeros_like(levels.top))
        first = torch.where(started[0], of_cross, 0).view(-1)
        cross.begin(self._iterations[0], first, inputs.cross, start)
        for own, iterations in zip(self._segments[1:], self._iterations[1:], strict=True):
            # The constant whose plan has about mass 1, as in `solve._constant`.
            squares = [pool.masses[:, side].square().sum(1) for side in room.sides]
            highest = -epsilon * torch.stack(squares, 1).log()
            constants = torch.minimum(pool.own.mean, highest) / 2
            constants = self._constraints.rows.updated(constants, epsilon / 2)
            firsts = constants.float()[:, :1], constants.float()[:, 1:]
            parts = zip(started[1:], of_own, firsts, strict=True)
            first = torch.cat([torch.where(*part) for part in parts], 1).view(-1)
            level = torch.zeros_like(constants.view(-1)) + epsilon
            start = Start(Levels.descending(level), torch.zeros_like(level))
            own.begin(iterations, first, inputs.own, start)

    def iterate(self, progress: SolverProgress | None = None) -> None:
        """Iterate: on a GPU, without waiting for it, as often as the last batch took.

        On a processor, where reading takes no time, iterate until all terms are done, until a
        marginal error is NaN, or `MOST_UNASKED` times; call `progress`, which only a batch of one
        problem may have, after each iteration.
        """
        if self.room.in_triton:
            for _ in range(self._replays):
                self._iterating.run(self._iterate)
            return
        # Costs out of the range of float32: `route` sees it in the numbers read.
        hopeless = not self._in_range()
        for _ in range(MOST_UNASKED):
            before = [each.active.tolist() for each in self._iterations]
            if hopeless or not any(map(any, before)):
                return
            for each, active in zip(self._iterations, before, strict=True):
                if any(active):
                    each.step()
            if progress is not None:
                self._report(progress, [moved for active in before for moved in active])
            hopeless = any(cast(AskedIterations, each).is_nan for each in self._iterations)

    def _in_range(self) -> bool:
        """Whether float32 holds all costs, with room for their sums."""
        facts = [torch.stack(segments.facts).abs().amax() for segments in self._segments]
        return bool(torch.stack(facts).amax() < torch.finfo(torch.float32).max / 4)

    def _report(self, progress: SolverProgress, moved: list[bool]) -> None:
        """Report the terms of the only problem that took part in the last iteration."""
        terms = [each.terms[:, ERROR_AND_ITERATIONS] for each in self._iterations]
        numbers = torch.cat(terms).tolist()
        for name, (error, iterations), has_moved in zip(self.terms, numbers, moved, strict=True):
            if has_moved:
                progress(name, int(iterations), error)

    def _iterate(self) -> None:
        run_branches(self.room.device, *(partial(_repeat, each) for each in self._iterations))

    def read(self) -> Read:
        """Certify the current potentials, and read the numbers from the device."""
        self._ending.run(self._certify)
        found = self._found.cpu()
        done = not found[0]
        numbers = found[1:].view(self.room.problems, -1)
        read = Read(done, numbers[:, :4], numbers[:, 4:], self._evidence)
        most = max(int(term.iterations.max()) for term in read.terms())
        # A replay in which nothing is active takes less time than to certify in vain.
        self._replays = -(-most // STEPS) + 1 if done else 1
        return read

    def _certify(self) -> None:
        """Compute all that `read` reads, and the potentials that are certified."""
        launches: list[Callable[[], list[PlanEvidence]]] = [self._certify_cross]
        if len(self.terms) > 1:
            together = self.pool.both_self_terms
            terms = self.terms[1:] if together is None else [None]
            launches += [partial(self._certify_own, term) for term in terms]
        parts = run_branches(self.room.device, *launches)
        found, every = [self.pool.asymmetry], [each for part in parts for each in part]
        for k, evidence in enumerate(every):
            # Segments of the self terms alternate: x and y of one problem, then of the next.
            segments, iterations = self._segments[min(k, 1)], self._iterations[min(k, 1)]
            mine = slice(None) if k == 0 else slice(k - 1, None, 2)
            facts = torch.stack(segments.facts, 1)[mine]
            found += [iterations.terms[mine, ERROR_AND_ITERATIONS], facts, evidence.numbers]
        active = torch.cat([each.active for each in self._iterations]).any().double()
        self._evidence = every
        self._found = torch.cat((active[None], torch.cat(found, 1).view(-1)))
        self._potentials = torch.cat(
            [self._evidence[0].f, *(evidence.g for evidence in self._evidence)], 1
        )

    def _certify_cross(self) -> list[PlanEvidence]:
        epsilon, room = self._inputs.cross[0], self.room
        known = self._segments[0].evaluated(self._iterations[0].vectors, epsilon)
        f, g, updated = (part.view(room.problems, -1) for part in known)
        operator = self.pool.term("xy")
        plan = lowered_plan(operator, f, g, updated, epsilon, self._constraints)
        return [cross_evidence(operator, plan, epsilon)]

    def _certify_own(self, term: str | None) -> list[PlanEvidence]:
        """Certify one self term, or both at once."""
        epsilon, room = self._inputs.cross[0], self.room
        _, g, updated = self._segments[1].evaluated(self._iterations[1].vectors, epsilon)
        f = (g + updated) / 2
        if term is None:
            operator = self.pool.both_self_terms
            assert operator is not None
            f = f.view(len(operator.a), -1)
        else:
            operator = self.pool.term(term)
            f = f.view(room.problems, -1)[:, room.sides[TERMS.index(term) - 1]]
        plan = self_plan(operator, f.double(), epsilon, self._constraints, accurate=True)
        evidence = self_evidence(operator, plan, epsilon)
        return [evidence] if term is not None else [evidence.every_other(k) for k in (0, 1)]

    def gradient(self, side: int) -> Tensor:
        """Compute the gradient of the divergences by one side's points, at the potentials read.

            d/dz_i = 2 lambda_x sum_j Q_ij (z_i - z_j)

        with the plan of the cross term in Q, both ways, less those of the self terms.

        Args:
            side: 0 for x, 1 for y.

        Returns:
            (B, n, d) or (B, m, d) float32, with all points that there is room for.
        """
        self._differentiating[side].run(partial(self._differentiate, side))
        return self._gradients[side].clone()

    def _differentiate(self, side: int) -> None:
        pool, room, epsilon = self.pool, self.room, self._inputs.cross[0]
        assert isinstance(pool, ScorePool)
        cross = self._potentials[:, : room.points].contiguous()
        own = self._potentials[:, room.points :].contiguous() if len(self.terms) > 1 else None
        points = (pool.points.double() - pool.centre).float()
        # A column of ones, for the row sums of Q with the same rounding as its products.
        columns = torch.cat((points, torch.ones_like(points[..., :1])), 2)
        places, found = room.sides[side], []
        height = max(1, ENTRIES // (room.problems * room.points))
        for rows in spans(places.start, places.stop, height):
            plan = pool.signed_plan(cross, own, epsilon, rows)
            images = plan @ columns
            found.append(points[:, rows] * images[..., -1:] - images[..., :-1])
        self._gradients[side] = torch.cat(found, 1) * (2 * pool.lambda_x).float()

    def potentials(self, sizes: tuple[int, int]) -> list[Tensor]:
        """Return copies of f (n,) and g (m,) of the first cross term, then f of its self terms."""
        rooms = [self.room.n, self.room.m] * (1 if len(self.terms) == 1 else 2)
        parts = torch.split(self._potentials[0].clone(), rooms)
        lengths = sizes * (len(parts) // 2)
        found = [part[:length] for part, length in zip(parts, lengths, strict=True)]
        # On a GPU a copy of all in one launch takes least time; elsewhere each is a copy of its
        # own, so that keeping one does not keep the memory of all.
        return found if self.room.in_triton else [part.clone() for part in found]


def _repeat(iterations: PooledIterations) -> None:
    for _ in range(STEPS):
        iterations.step()


def _pool_of(room: Room, place: Tensor) -> Pool:
    """Make a pool with this room.

    Args:
        room: of a given matrix where `room.dim` is 0, else of points.
        place: (4,) int64 on the device, numbers of the `Place` of a given matrix; else not read.
    """
    # Triton may be missing where no kernel runs.
    if not room.dim:
        from otdd_flash.operators.kernel_pool import MatrixPool

        return MatrixPool(room, place)
    if room.in_triton:
        from otdd_flash.operators.kernel_pool import KernelPool

        return KernelPool(room)
    from otdd_flash.operators.torch_pool import TorchPool

    return TorchPool(room)


# Numbers of a goal with two unit roundoffs.
GOAL = 7
# Numbers of inputs before tables.
COUNT = 2 * GOAL + 12


class Inputs(NamedTuple):
    """Views of the numbers (k,) float64 that are sent to the device for every batch.

    Attributes:
        cross: (7,) a goal and unit roundoffs for the cross term, as `PooledSegments.begin` takes
            them.
        own: (7,) for the self terms.
        started: (3,) 1 where a term starts from given potentials, else 0.
        of_costs: (3,) as a pool takes them.
        penalties: (2,) rho of rows and of columns, infinite where marginals are exact.
        place: (4,) int64, where a matrix that is given is, of `kernels.matrix.facts`.
        tables: (4 B, 8) int64, of `tables_of`: where kernels find the points of each segment.
    """

    cross: Tensor
    own: Tensor
    started: Tensor
    of_costs: Tensor
    penalties: Tensor
    place: Tensor
    tables: Tensor

    @classmethod
    def of(cls, numbers: Tensor, problems: int) -> Inputs:
        """Cut the views out of all numbers for B problems, `COUNT + 32 B` of them."""
        parts = [GOAL, GOAL, 3, 3, 2, 4, 32 * problems]
        cross, own, started, of_costs, penalties, place, tables = torch.split(numbers, parts)
        whole = place.view(torch.int64), tables.view(torch.int64).view(-1, 8)
        return cls(cross, own, started, of_costs, penalties, *whole)


class Batch(NamedTuple):
    """B problems on the device; a single problem has B = 1.

    Attributes:
        points: x (B, n, d) and y (B, m, d).
        masses: (B, n) and (B, m), 0 where a problem has no point; None is uniform.
        labels: (B, n) and (B, m) int64, of each side; None is one class.
        class_totals: V_x and V_y.
        table: W (V_x + V_y, V_x + V_y), of all problems, or (B, ...) of each; None: 0.
        weights: lambda_x and lambda_y.
    """

    points: tuple[Tensor, Tensor]
    masses: tuple[Tensor | None, Tensor | None]
    labels: tuple[Tensor | None, Tensor | None]
    class_totals: tuple[int, int]
    table: Tensor | None
    weights: tuple[float, float]

    @classmethod
    def of_one(cls, comparison: Comparison) -> Batch:
        x, y = comparison.transformed
        ground, parts = comparison.ground, (x.weights, y.weights, x.labels, y.labels)
        a, b, *labels = (None if part is None else part[None] for part in parts)
        return cls(
            (x.features[None], y.features[None]),
            (a, b),
            (labels[0], labels[1]),
            (x.class_total, y.class_total),
            comparison.classes.given,
            (ground.squared.lambda_x, ground.lambda_y),
        )

    def room(self, problems: int, *, in_triton: bool) -> Room:
        """Room for so many of these problems; in Triton of rounded sizes, so few are recorded."""
        (x, y), size = self.points, padded if in_triton else int
        n, m = map(size, self.sizes)
        classes = 1 if self.table is None else size(self.table.shape[-1])
        dtype = torch.promote_types(x.dtype, y.dtype)
        return Room(problems, n, m, x.shape[2], classes, dtype, x.device, in_triton)

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
            total = self.table.shape[-1]
            pool.class_distances[:, :total, :total].copy_(self.table)
        return now

    def part(self, problems: slice | Tensor) -> Batch:
        """Take some problems, a slice or (P,) int64 on their device."""

        def of(given: tuple[Tensor | None, Tensor | None]) -> Any:
            return tuple(None if side is None else side[problems] for side in given)

        table = self.table
        if table is not None and table.ndim == 3:
            table = table[problems]
        parts = {name: of(getattr(self, name)) for name in ("points", "masses", "labels")}
        return self._replace(**parts, table=table)

    @property
    def of_costs(self) -> tuple[float, float, float]:
        """The numbers for `Pool.of_costs`: lambda_x, lambda_y and the number of classes of x."""
        return *self.weights, self.class_totals[0]

    @property
    def place(self) -> tuple[int, ...]:
        """Zeros: the pool computes its scores, and no matrix is given."""
        return 0, 0, 0, 0

    @property
    def sizes(self) -> tuple[int, int]:
        """Points of a problem on both sides, n and m."""
        x, y = self.points
        return x.shape[1], y.shape[1]


def padded(count: int) -> int:
    """The next multiple of 16, or of an eighth of the power of two below it if that is more."""
    step = max(16, 1 << max(0, count.bit_length() - 4))
    return -(-count // step) * step


class GivenCosts(NamedTuple):
    """One problem whose costs are given, on the device.

    Attributes:
        costs: C (n, m), finite, a row contiguous.
        masses: (n,) and (m,) float64.
        magnitudes: (n,) and (m,) float64, with |C_ij| at most their sum.
        place: the numbers of the costs' `kernels.matrix.facts.Place`.
        aligned: whether rows are, as `kernels.matrix.facts` says.
        facts: of the costs.
    """

    costs: Tensor
    masses: tuple[Tensor, Tensor]
    magnitudes: tuple[Tensor, Tensor]
    place: tuple[int, ...]
    aligned: bool
    facts: CostFacts

    @property
    def room(self) -> Room:
        """Room for the problem, of rounded sizes, so that few are recorded."""
        n, m = map(padded, self.sizes)
        costs = self.costs
        return Room(1, n, m, 0, 1, costs.dtype, costs.device, aligned=self.aligned)

    @property
    def of_costs(self) -> tuple[float, float, float]:
        """The numbers for `Pool.of_costs`: the mean, the lowest and the highest cost."""
        return self.facts.mean, self.facts.lowest, self.facts.highest

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
    """The values read of a term: numbers of one problem, or tensors (B,).

    Attributes:
        error: marginal error after the last iteration.
        iterations: their number.
        costs: `PooledCosts`, the facts of the term's costs.
        numbers: `CrossNumbers` or `SelfNumbers` of the certificate.
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
        costs, numbers = PooledCosts(*rest[:known]), rest[known:]
        if cross:
            return cls(error, iterations, costs, read_numbers(CrossNumbers, numbers))
        return cls(error, iterations, costs, read_numbers(SelfNumbers, numbers))


class Read(NamedTuple):
    """The values read of a batch.

    Attributes:
        done: whether all segments have converged or stopped; else iterate again.
        asymmetry: `Pool.asymmetry` (B, 4).
        numbers: (B, .) float64 on the host, those of every term side by side; see `terms`.
        evidence: of every term, on the device.
    """

    done: bool
    asymmetry: Tensor
    numbers: Tensor
    evidence: list[PlanEvidence]

    def terms(self, problem: int | None = None) -> list[TermRead]:
        """Unpack the terms in the order of `PooledSolve.terms`, of one problem or of all."""
        numbers = self.numbers
        rest = list(numbers.unbind(1)) if problem is None else numbers[problem].tolist()
        reads, first = [], 0
        for term, evidence in zip(TERMS, self.evidence, strict=False):
            last = first + 2 + len(PooledCosts._fields) + evidence.numbers.shape[-1]
            reads.append(TermRead.of(rest[first:last], cross=term == "xy"))
            first = last
        return reads


# Solves in the cache, and bytes that they may take on a GPU and on a processor, where they save no
# more than the time to make a few tensors.
MOST_KEPT, MOST_BYTES, MOST_BYTES_CPU = 16, 1 << 32, 1 << 25

# The key of a solve in the cache: its room, whether there are self terms, and its constraints, of
# recordings their kinds alone.
Key = tuple[Room, bool, Constraints]

# The least recently used first.
_kept: list[tuple[Key, PooledSolve]] = []
_changing = Lock()

# Of each device, an event that follows all launches of the last solve.
_left: dict[torch.device, torch.cuda.Event] = {}


@lru_cache
def _turn(device: torch.device) -> RLock:
    """Return the lock of a device's solves."""
    return RLock()


@contextmanager
def kept(room: Room, debias: bool, constraints: Constraints = EXACT) -> Iterator[PooledSolve]:
    """Lend a solve to one caller; afterwards it is cached for the next problem of its size.

    On a GPU one solve runs at a time, whatever its thread and stream: recordings share the memory
    in which cuBLAS computes.
    """
    # On a processor penalties are floats, which take less time than tensors.
    key = room, debias, constraints.at((1.0, 1.0)) if room.in_triton else constraints
    turn = nullcontext() if room.device.type == "cpu" else _turn(room.device)
    with turn, current(room.device):
        with _changing:
            solve = _taken(key)
        if room.device in _left:
            torch.cuda.current_stream(room.device).wait_event(_left[room.device])
        if solve is None:
            solve = PooledSolve(room, debias=debias, constraints=constraints)
        try:
            yield solve
        finally:
            if room.device.type == "cuda":
                _left[room.device] = torch.cuda.current_stream(room.device).record_event()
        # After an exception this is not reached: a solve that failed is not cached.
        with _changing:
            _kept.append((key, solve))
            while _too_many(room.device.type):
                # The stream that used it last may be another one.
                if room.device in _left:
                    _left[room.device].synchronize()
                _taken(_kept_on(room.device.type)[0])


def is_kept(room: Room) -> bool:
    """Whether a solve with this room, whatever its number of classes, is in the cache."""
    return any(one._replace(classes=room.classes) == room for (one, *_), _ in list(_kept))


def forget() -> None:
    """Empty the cache: the memory of its solves goes back to PyTorch."""
    with _changing:
        _kept.clear()


def _taken(key: Key) -> PooledSolve | None:
    """Take a solve out of the cache; None if there is none."""
    place = next((k for k, (known, _) in enumerate(_kept) if known == key), None)
    return None if place is None else _kept.pop(place)[1]


def _kept_on(kind: str) -> list[Key]:
    """List the keys of the cache on a kind of device, the least recently used first."""
    return [key for key, _ in _kept if key[0].device.type == kind]


def _too_many(kind: str) -> bool:
    """Return whether the solves cached on a kind of device exceed a limit."""
    rooms = [room for room, *_ in _kept_on(kind)]
    # Triton's interpreter runs kernels on a processor: its solves have the limit of a GPU's.
    most = MOST_BYTES if any(room.in_triton for room in rooms) else MOST_BYTES_CPU
    return len(rooms) > MOST_KEPT or sum(room.bytes for room in rooms) > most
