"""Small divergences: three terms side by side on stored scores, launched from recordings.

Below some thousand points a side the work of a solve takes less time than to launch its kernels one
by one. So three CUDA graphs hold it all: one prepares scores and potentials, one takes some
iterations of all terms, the cross term beside the self terms, and one certifies. They read sizes,
weights and epsilon from the device's memory and serve every problem that fits the room. The device
is asked once: how far iterations are, and what the certificate has seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.engine.evidence.evaluated import CROSS, SELF
from otdd_flash.engine.levels import Levels, first_level
from otdd_flash.engine.quasi_newton_kernels import QuasiNewtonKernels
from otdd_flash.engine.recording import Recorded, RecordingPool, run_branches
from otdd_flash.engine.rule import Goal, Start
from otdd_flash.kernels.stored_plan import signed_plan
from otdd_flash.operators.pooled_operator import PooledOperator
from otdd_flash.operators.pooled_segments import PooledSegments, tables_of
from otdd_flash.operators.score_pool import PooledCosts, Room, ScorePool
from otdd_flash.samples import LabeledSamples
from otdd_flash.solver.term import plans
from otdd_flash.solver.term.certificate import Seen, see_cross, see_self

# Iterations of one replay.
STEPS = 4

# Replays after which a first solve asks how far it is.
FIRST_REPLAYS = 3

# Entries of plans that are held at once.
ENTRIES = 1 << 25

# Terms in the order of everything that follows, and numbers of a goal with two unit roundoffs.
TERMS, GOAL = ("xy", "xx", "yy"), 7
UNIT = torch.finfo(torch.float32).eps / 2


class Inputs(NamedTuple):
    """Views of the numbers (k,) float64 that are sent to the device for every problem.

    Attributes:
        cross: (7,) settings of the cross term, of `engine.quasi_newton_kernels`.
        own: (7,) of the self terms.
        started: (3,) 1 where a term starts from given potentials, else 0.
        weights: (3,) lambda_x, lambda_y and the number of the classes of x.
        tables: (4, 8) int64, of `tables_of`.
    """

    cross: Tensor
    own: Tensor
    started: Tensor
    weights: Tensor
    tables: Tensor

    @classmethod
    def of(cls, numbers: Tensor) -> Inputs:
        """Of all numbers."""
        cross, own, started, weights, tables = torch.split(numbers, [GOAL, GOAL, 3, 3, 32])
        return cls(cross, own, started, weights, tables.view(torch.int64).view(4, 8))


class TermRead(NamedTuple):
    """What was read of a term.

    Attributes:
        error: the marginal error that iterations ended at.
        iterations: how many there were.
        costs: what is known of them.
        lost: mass of which errors may hide all, and for which a self term has to be lowered.
        seen: for `conclude` or `conclude_self`, with numbers on the host.
    """

    error: float
    iterations: int
    costs: PooledCosts
    lost: float
    seen: Seen


class Read(NamedTuple):
    """What was read of a problem.

    Attributes:
        done: whether iterations are.
        asymmetry: `ScorePool.asymmetry`.
        terms: in the order of `PooledSolve.terms`.
    """

    done: bool
    asymmetry: list[float]
    terms: list[TermRead]


class PooledSolve:
    """Room for one problem at a time, and the recordings that solve it.

    Args:
        room: for the points of one problem.
        debias: whether there are self terms.
    """

    def __init__(self, room: Room, *, debias: bool) -> None:
        self.room, device = room, room.device
        self.terms = TERMS if debias else TERMS[:1]
        self.pool = ScorePool(room)
        # Pinned, so that it is sent without waiting; whoever fills it has read the last result.
        pinned = device.type == "cuda"
        self._host = torch.zeros(2 * GOAL + 6 + 32, dtype=torch.float64, pin_memory=pinned)
        self._sizes = (0, 0)
        self._resize((room.n, room.m))
        self._numbers = self._host.to(device)
        self._inputs = Inputs.of(self._numbers)
        self.pool.weights = self._inputs.weights
        self._starts = torch.zeros(room.m + room.points, dtype=torch.float32, device=device)
        tables = self._inputs.tables
        cross = PooledSegments(self.pool, (tables[:1], tables[1:2]), symmetric=False)
        self._segments = [cross]
        if debias:
            self._segments.append(PooledSegments(self.pool, (tables[2:],), symmetric=True))
        self._rules = [
            QuasiNewtonKernels(segments, Goal(1.0, 1.0, 1.0, 0), form, _nowhere(segments))
            for segments, form in zip(self._segments, (CROSS, SELF), strict=False)
        ]
        recordings = RecordingPool(device)
        self._beginning, self._iterating, self._ending, self._pulling = (
            Recorded(recordings) for _ in range(4)
        )
        self._replays = FIRST_REPLAYS
        self._seen: list[Seen] = []
        self._found = self._numbers[:0]
        self._potentials = self._gradient = self._starts[:0]

    def begin(
        self,
        sides: tuple[LabeledSamples, LabeledSamples],
        table: Tensor | None,
        weights: tuple[float, float],
        goal: Goal,
        starts: Mapping[str, Tensor],
    ) -> None:
        """Load a problem and prepare it.

        Args:
            sides: x and y, on the device, no more of them than there is room for.
            table: W (V_x + V_y, V_x + V_y); None is 0.
            weights: lambda_x and lambda_y.
            goal: of all terms.
            starts: column potentials to start from, by term.
        """
        numbers = self._host.numpy()
        settings = (*goal, UNIT, UNIT)
        flags = [float(term in starts) for term in TERMS]
        numbers[: 2 * GOAL + 6] = (*settings, *settings, *flags, *weights, sides[0].class_total)
        self._resize((len(sides[0]), len(sides[1])))
        self._numbers.copy_(self._host, non_blocking=True)
        self._load(sides, table, starts)
        self._beginning.run(self._prepare)

    def _resize(self, sizes: tuple[int, int]) -> None:
        """Say how many points there are, unless it is as many as before."""
        if sizes != self._sizes:
            cross, own = (tables_of(self.room, *sizes, symmetric=own) for own in (False, True))
            Inputs.of(self._host).tables.copy_(torch.cat((*cross, *own)))
            self._sizes, self._uniform = sizes, False

    def _load(
        self,
        sides: tuple[LabeledSamples, LabeledSamples],
        table: Tensor | None,
        starts: Mapping[str, Tensor],
    ) -> None:
        pool, offsets = self.pool, (0, self.room.n)
        uniform = all(side.weights is None for side in sides)
        if not (uniform and self._uniform):
            pool.masses.zero_()
        for side, offset, before in zip(sides, offsets, (0, sides[0].class_total), strict=True):
            here = slice(offset, offset + len(side))
            pool.points[0, here].copy_(side.features)
            if side.weights is not None:
                pool.masses[0, here].copy_(side.weights)
            elif not (uniform and self._uniform):
                pool.masses[0, here] = 1 / len(side)
            if table is not None:
                labels = pool.labels[0, here]
                labels.fill_(before) if side.labels is None else torch.add(
                    side.labels, before, out=labels
                )
        self._uniform = uniform
        if table is not None:
            pool.class_distances[0, : len(table), : len(table)].copy_(table)
        n, m = self.room.m, self.room.m + self.room.n
        for term, first in zip(TERMS, (0, n, m), strict=True):
            if term in starts:
                self._starts[first : first + len(starts[term])].copy_(starts[term])

    def _prepare(self) -> None:
        """Scores, first potentials and first levels."""
        inputs, room, pool = self._inputs, self.room, self.pool
        pool.prepare(own=len(self.terms) > 1)
        epsilon, started = inputs.cross[0], inputs.started > 0
        of_cross, *of_own = torch.split(self._starts, [room.m, room.n, room.m])
        cross = self._segments[0]
        cross.restart(torch.where(started[0], of_cross, 0))
        top = torch.where(started[0], epsilon, first_level(epsilon, cross.mean_cost))
        start = Start(Levels.trying(epsilon, top), torch.zeros_like(top))
        self._rules[0].begin(inputs.cross, start)
        for own, rule in zip(self._segments[1:], self._rules[1:], strict=True):
            # As in `symmetric`.
            squares = torch.stack([pool.masses[0, side].square().sum() for side in room.sides])
            constants = torch.minimum(own.facts.mean, -epsilon * squares.log()) / 2
            parts = zip(started[1:], of_own, constants.float(), strict=True)
            own.restart(torch.cat([torch.where(*part) for part in parts]))
            level = torch.zeros_like(constants) + epsilon
            rule.begin(inputs.own, Start(Levels.descending(level), torch.zeros_like(level)))

    def iterate(self) -> None:
        """As many iterations as the last problem took."""
        for _ in range(self._replays):
            self._iterating.run(self._iterate)

    def _iterate(self) -> None:
        """Some iterations."""
        run_branches(self.room.device, *(partial(_repeat, rule) for rule in self._rules))

    def read(self) -> Read:
        """Certify, and ask the device."""
        self._ending.run(self._certify)
        found = self._found.cpu()
        (active, *asymmetry), rest = found[:5].tolist(), found[5:]
        reads = []
        for seen in self._seen:
            error, iterations, lost, *costs = rest[: 3 + len(PooledCosts._fields)].tolist()
            rest = rest[3 + len(costs) :]
            count = len(seen.numbers)
            numbers, rest = rest[:count], rest[count:]
            facts = PooledCosts(*costs)
            found_of = TermRead(error, int(iterations), facts, lost, seen._replace(numbers=numbers))
            reads.append(found_of)
        most = max(read.iterations for read in reads)
        # A replay in which nothing is active takes less time than to certify in vain.
        self._replays = 1 if active else -(-most // STEPS) + 1
        return Read(not active, asymmetry, reads)

    def _certify(self) -> None:
        """Everything that `read` reads, and the potentials that are certified."""
        (of_cross, *rest) = run_branches(
            self.room.device,
            self._certify_cross,
            *(partial(self._certify_own, term) for term in self.terms[1:]),
        )
        seen, lost = zip(of_cross, *rest, strict=True)
        facts = [torch.stack(segments.facts, 1) for segments in self._segments]
        terms = [rule.terms[:, 3::2] for rule in self._rules]
        heads = torch.cat((torch.cat(terms), torch.stack(lost)[:, None], torch.cat(facts)), 1)
        active = torch.cat([rule.active for rule in self._rules]).any().double()
        found = [active[None], self.pool.asymmetry[0]]
        for head, each in zip(heads, seen, strict=True):
            found += [head, each.numbers]
        potentials = [seen[0].f, *(each.g for each in seen)]
        self._seen = list(seen)
        self._found, self._potentials = torch.cat(found), torch.cat(potentials)

    def _certify_cross(self) -> tuple[Seen, Tensor]:
        cross, epsilon = self._segments[0], self._inputs.cross[0]
        vectors = cross.vectors
        known = vectors.rows, vectors.columns.kept, cross.updated
        seen = see_cross(PooledOperator(self.pool, "xy"), *known, epsilon)
        return seen, torch.zeros_like(epsilon)

    def _certify_own(self, term: str) -> tuple[Seen, Tensor]:
        own, epsilon = self._segments[1], self._inputs.cross[0]
        side = self.room.sides[TERMS.index(term) - 1]
        f = (own.vectors.columns.kept[side] + own.updated[side]) / 2
        operator = PooledOperator(self.pool, term)
        plan = plans.evaluate_self(operator, f.double(), epsilon, accurate=True)
        lost = plans.find_lost(plan, (operator.a, operator.a), epsilon)
        return see_self(operator, plan, lost, epsilon), lost.hidden

    def gradient(self) -> Tensor:
        """Of the divergence by all points (L, d), float32, at the potentials of `potentials`.

            d/dz_i = 2 lambda_x sum_j Q_ij (z_i - z_j)

        with the plan of the cross term in Q, both ways, less those of the self terms.
        """
        self._pulling.run(self._pull)
        return self._gradient.clone()

    def _pull(self) -> None:
        pool, room = self.pool, self.room
        epsilon, (f, g, *own) = self._inputs.cross[0], self._parts(self._potentials)
        points = (pool.points[0].double() - pool.centre[0]).float()
        # What rows of Q sum to, with the same rounding as their products.
        columns = torch.cat((points, torch.ones_like(points[:, :1])), 1)
        potentials = torch.cat((f, g)), torch.cat(own) if own else None
        height, found = max(1, ENTRIES // room.points), []
        for first in range(0, room.points, height):
            rows = slice(first, min(first + height, room.points))
            scores, masses = pool.scores[0], pool.masses[0]
            plan = signed_plan(scores, *potentials, masses, epsilon, rows, room.n)
            images = plan @ columns
            found.append(points[rows] * images[:, -1:] - images[:, :-1])
        self._gradient = torch.cat(found) * (2 * pool.lambda_x).float()

    def potentials(self, sizes: tuple[int, int]) -> list[Tensor]:
        """Copies of f (n,) and g (m,) of the cross term, then f of both self terms."""
        parts = self._parts(self._potentials.clone())
        lengths = sizes * (len(parts) // 2)
        return [part[:length] for part, length in zip(parts, lengths, strict=True)]

    def _parts(self, potentials: Tensor) -> tuple[Tensor, ...]:
        """Those of x and of y in turn."""
        rooms = [self.room.n, self.room.m]
        return torch.split(potentials, rooms * (1 if len(self.terms) == 1 else 2))


def _repeat(rule: QuasiNewtonKernels) -> None:
    for _ in range(STEPS):
        rule.step()


def _nowhere(segments: PooledSegments) -> Start:
    """Before any problem."""
    ones = torch.ones(len(segments.facts.mean), dtype=torch.float64)
    return Start(Levels.descending(ones), torch.zeros_like(ones))
