"""The solve of OT_0 (epsilon 0) by linear programs on few arcs and passes over all costs, in turn.

A round solves the linear program on the arcs so far, whose plan gives an upper bound, and passes
over all costs at its potentials. The pass gives a lower bound, and the arcs of negative reduced
cost that the program has missed; these are added. Rounds end when the bounds are as close as asked
or as rounding allows, when the time is over, or when no plan without forbidden pairs exists.

The first arcs are those of the least reduced costs of every row and every column at entropic
potentials of a small epsilon. If these have no plan, the tree of the north-west corner rule is
added, with which there always is one. It is taken in the order of the points along their principal
axis, where it is the optimal plan if the points lie on a line. For such points entropic potentials
are no guide, as thousands of points are closer than the blur, so the arcs of the tree, and those
beside them that prove it, are among the first arcs unless their costs are large. Small problems
take all arcs.

`solver.solving` and `solver.matrix.transport` call `solve_exact` for `Exact` options and get a
`Divergence` of `ExactTerm`s. The bounds of `exact.bounds` must hold after any round, because a
solve may stop at any (`tests/exact/test_exact_bounds.py`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from otdd_flash.cost.facts import TERMS
from otdd_flash.cost.ground import NO_OFFSET, Offset
from otdd_flash.cost.points import DOUBLE_UNIT, UNDERFLOW, LabelledCost
from otdd_flash.distributed.ranks import Ranks
from otdd_flash.errors import EpsilonOutOfRange, InputError
from otdd_flash.formulas.decision import CROSS
from otdd_flash.memory import free_memory
from otdd_flash.operators.base import Operator
from otdd_flash.operators.comparison import Comparison
from otdd_flash.solver.divergence import Compared, Divergence
from otdd_flash.solver.exact.bounds import (
    Bound,
    Marginals,
    centred_size,
    common_rounding,
    hub_arcs,
    lower_bound,
    marginals_of,
    mean_errors,
    negligible,
    upper_bound,
)
from otdd_flash.solver.exact.pricing import (
    Arcs,
    ExactCosts,
    MatrixCosts,
    Places,
    PointCosts,
    Priced,
    SharedCosts,
    Vector,
)
from otdd_flash.solver.exact.program import (
    NO_PLAN,
    ProgramError,
    Vertex,
    corner_tree,
    fewest_forbidden,
    integer_masses,
    solve_program,
)
from otdd_flash.solver.schedules import Converged, Exact, needs_zero
from otdd_flash.solver.solve import solve_term
from otdd_flash.solver.term import (
    ExactTerm,
    SolverProgress,
    StoppedBy,
    TermProgress,
    UnreachableTolerance,
)

if TYPE_CHECKING:
    # Of several processes alone.
    from otdd_flash.operators.sharing import ShardedOperator

# Entries of a cost up to which the program takes all of them.
FEW_ENTRIES = 1 << 15

# The epsilon of the first potentials over the mean cost: small enough that the arcs of the optimal
# plan are among the least reduced costs, large enough for few iterations.
FIRST_LEVEL = 3e-4

# By how much that is raised where its precision cannot hold it.
RAISED = 10.0

# The marginal error of the first potentials, which choose arcs and prove nothing.
FIRST_ERROR = 0.05

# Arcs of every row and of every column at first, of which most programs need no others.
FIRST_ARCS = 10

# The most of them that a round adds, so that programs stay small.
MORE_ARCS = 10

# A program takes the arcs of reduced costs up to this many times the largest one in the last plan,
# which the pass has found: the smaller the costs, the smaller their rounding.
NEAR = 100.0

# Rounds that add no arc and do not halve the gap after which rounding alone keeps the bounds apart.
MOST_STALLED = 3

# Where costs tie, the arcs that a round adds may change little: after so many rounds it adds twice
# as many.
DOUBLED = 4

# Bytes of an arc in memory, measured over 0.4 to 2 million arcs of 2,800 to 120,000 points: 130 to
# 166 of a program, most of them POT's copies, and 24 each of the arcs so far and of those used.
ARC_BYTES = 215

# Costs up to this leave sums of them, and costs of artificial arcs, in the range of float64.
LARGEST = 2.0**1000

# A value is known, whatever its costs, where both ends agree in twelve digits.
TWELVE_DIGITS = 1e-12

TINY = float(np.finfo(np.float64).tiny)


def solve_exact(
    compared: Compared,
    options: Exact,
    *,
    progress: SolverProgress | None = None,
) -> Divergence:
    """Solve OT_0, or S_0 with its self terms.

    Args:
        compared: two datasets with class distances, or given costs.
        options: the width to reach, and the time.
        progress: called as progress(term, round, relative width).

    Raises:
        InputError: epsilon is positive, costs are near the end of float64, arcs do not fit in
            memory, or points not on every process of a group.
    """
    if compared.epsilon > 0:
        raise needs_zero()
    seconds = math.inf if options.max_seconds is None else options.max_seconds
    end = time.perf_counter() + seconds
    if len(compared.terms) > 1 and compared.identical:
        term = _free_term(compared, "xx") or _started(compared, "xx", options, end, progress).run()
        terms = dict.fromkeys(TERMS, term)
        return _divergence(terms, options, NO_OFFSET, identical=True)
    terms, solves = {}, {}
    for name in (*compared.terms[1:], "xy"):
        free = _free_term(compared, name)
        if free is None:
            solves[name] = _started(compared, name, options, end, progress)
        terms[name] = free or solves[name].run()
    divergence = _divergence(terms, options, compared.offset)
    if divergence.converged and divergence.bound_width > options.bound_width:
        # Terms of which each is narrow enough, and whose difference is small, go on to the end.
        for name, solve in solves.items():
            if terms[name].stopped_by != "optimal":
                solve.width = 0.0
                terms[name] = solve.run()
        divergence = _divergence(terms, options, compared.offset)
    return divergence


def _divergence(
    terms: Mapping[str, ExactTerm], options: Exact, offset: Offset, *, identical: bool = False
) -> Divergence:
    backend, passes = "torch, network simplex of POT", sum(term.passes for term in terms.values())
    return Divergence.of_terms(terms, options, offset, backend, passes, identical=identical)


def _free_term(compared: Compared, name: str) -> ExactTerm | None:
    """Return the self term of a cloud that is at no cost from itself; None of another term."""
    if not isinstance(compared, Comparison):
        return None
    cost = compared.cost(name)
    return _diagonal_term(cost.a) if cost.symmetric and _is_zero(cost) else None


def _started(
    compared: Compared, name: str, options: Exact, end: float, progress: SolverProgress | None
) -> _Solve:
    """Find the first arcs of the term "xy", "xx" or "yy"; `end` is of `time.perf_counter`."""
    costs: ExactCosts
    told = None if progress is None else partial(progress, name)
    operator: Callable[[], Operator] = partial(compared.operator, name)
    if not isinstance(compared, Comparison):
        costs = MatrixCosts(compared.torch_operator(name))
    elif isinstance(compared.compute.group, Ranks):
        shared = cast("ShardedOperator", compared.operator(name))
        operator, costs = lambda: shared, SharedCosts(shared, compared.cost_error)
    else:
        costs = PointCosts(compared.cost(name), compared.cost_error)
    solve = _Solve(costs, options.bound_width, end, told, compared.offset)
    solve.find_first_arcs(operator)
    return solve


def _is_zero(cost: LabelledCost) -> bool:
    """Whether a cloud is at no cost from itself: C(x, x) = 0 and C is nowhere negative."""
    table = cost.class_costs
    return bool((table >= 0).all()) and not bool(cost.own_costs().any())


def _diagonal_term(a: Tensor) -> ExactTerm:
    """Return the self term of a cloud at no cost from itself."""
    nothing, every = torch.zeros_like(a), a.nonzero().squeeze(1)
    return ExactTerm(
        nothing,
        nothing,
        epsilon=0.0,
        value=0.0,
        bounds=(0.0, 0.0),
        marginal_error=0.0,
        tolerance=None,
        iterations=0,
        passes=0.0,
        converged=True,
        stopped_by="optimal",
        rows=every,
        columns=every,
        masses=a[every],
    )


class _Upper(NamedTuple):
    """A plan with integer masses on arcs, its bound and its marginals."""

    bound: Bound
    plan: Arcs
    masses: Vector
    marginals: Marginals


class _Lower(NamedTuple):
    """Potentials f (n,) and g (m,), and their bound for the best plan."""

    bound: Bound
    f: Vector
    g: Vector


class _Solve:
    """The solve of one term: the best bounds so far, and when to stop.

    Args:
        costs: C.
        width: to reach, relative to the value.
        end: the time of `time.perf_counter` after which no round begins.
        progress: called as progress(round, relative width).
        offset: added to the value, see `Divergence.offset`.
    """

    def __init__(
        self,
        costs: ExactCosts,
        width: float,
        end: float,
        progress: TermProgress | None,
        offset: Offset,
    ) -> None:
        self.costs, self.width, self.end, self.progress = costs, width, end, progress
        self.offset, self.scale = offset, 0.0
        self.a, self.b = _host(costs.a), _host(costs.b)
        largest = max(abs(costs.lowest), abs(costs.highest))
        if not largest <= LARGEST:
            raise InputError(
                f"epsilon=0 takes costs up to {LARGEST:.0e} in size, got {largest:.2g}; scale them "
                "down"
            )
        self.integers = integer_masses(self.a, self.b)
        self.errors = _host(costs.errors[0]), _host(costs.errors[1])
        self.mean_error = mean_errors(costs)
        # The errors of most costs, and of underflow.
        self.common_error = (len(self.a) + len(self.b)) * UNDERFLOW + sum(
            float(np.median(each[masses > 0]))
            for each, masses in zip(self.errors, (self.a, self.b), strict=True)
        )
        self.slack, self.rounds, self.passes = False, 0, 0.0
        self.lower: _Lower | None = None
        self.upper: _Upper | None = None
        # The potentials by which the next program reduces costs, its arcs, those of them that have
        # a plan, and the largest reduced cost that it takes.
        self.f, self.g = np.zeros_like(self.a), np.zeros_like(self.b)
        self.arcs = self.plan = Arcs.joined(1)
        self.cutoff = math.inf
        # Whether the first arcs were those at potentials of 0; rounds without an improvement, and
        # why no other follows.
        self.plain = len(self.a) * len(self.b) <= FEW_ENTRIES
        self.stalled = 0
        self.ended: StoppedBy | None = None

    def run(self) -> ExactTerm:
        """Solve until the width is reached; with a smaller `width`, go on from there."""
        while (stopped := self.stopped() or self.ended) is None:
            self.solve_round()
            if self.progress is not None:
                self.progress(self.rounds, self.relative_width)
        return self.term(stopped)

    def find_first_arcs(self, operator: Callable[[], Operator]) -> None:
        """Find arcs at entropic potentials, of `operator`, or all arcs where they are few."""
        n, m = len(self.a), len(self.b)
        rows, columns, masses = self.staircase()
        f, count = self.f, max(n, m)
        if not self.plain:
            f, self.g, self.passes = first_potentials(self.costs, operator(), self.end)
            count = FIRST_ARCS
        check_arcs(min(n * m, (n + m) * (count + 3)))
        priced = self.price(f, self.g, count, wanted=(rows, columns))
        tree, stairs, self.f = masses > 0, priced.wanted, priced.row_least
        self.plan = stairs.some(tree)
        self.improve_upper(self.plan, masses[tree])
        # Dear arcs would cost potentials digits.
        dearest = priced.arcs.reduced(self.f, self.g).max()
        cheap = stairs.some(stairs.reduced(self.f, self.g) <= dearest)
        self.arcs = Arcs.joined(m, priced.arcs, cheap)

    def staircase(self) -> tuple[Places, Places, Vector]:
        """Return the corner's tree along `ExactCosts.orders`, and the arcs beside its steps.

        Returns:
            Rows, sorted, columns and masses (k,) of at most 3 (n + m) arcs; 0 of those beside.
        """
        of_rows, of_columns = self.costs.orders
        supply, demand, _ = self.integers
        rows, columns, masses = corner_tree(supply[of_rows], demand[of_columns])
        rows = of_rows[np.concatenate((rows, rows[:-1], rows[1:]))]
        columns = of_columns[np.concatenate((columns, columns[1:], columns[:-1]))]
        m = len(demand)
        keys, places = np.unique(rows * m + columns, return_inverse=True)
        spread: Vector = np.bincount(places[: len(masses)], masses, len(keys)).astype(float)
        return keys // m, keys % m, spread

    def solve_round(self) -> None:
        """Solve the program on the arcs, and pass over all costs at its potentials for others."""
        gap, known, m = self.upper_end - self.lower_end, len(self.arcs.rows), len(self.b)
        solved = self.next_program()
        self.rounds += 1
        if solved is None:
            self.ended = self.unimproved()
            return
        used, vertex = solved
        found = used.some(vertex.which)
        hubs = hub_arcs(found, vertex.masses, len(self.a), m)
        below = -negligible(self.costs, vertex.f, vertex.g)
        priced = self.price(vertex.f, vertex.g, self.more_arcs, below=below, wanted=hubs)
        self.f, self.g = priced.row_least, vertex.g
        if self.improve_upper(found, vertex.masses, priced.wanted):
            # From here on these arcs have a plan, and the corner's are not needed.
            self.plan = found
        self.arcs = Arcs.joined(m, self.arcs, priced.arcs)
        self.cutoff = NEAR * self.plan.reduced(self.f, self.g).max()
        halved = self.upper_end - self.lower_end < gap / 2
        self.stalled = 0 if halved or len(self.arcs.rows) > known else self.stalled + 1
        if self.stalled > 0 and self.upper is None:
            # No pair is worth its cost at that of a forbidden arc, which is not beyond all costs:
            # it would leave potentials no digits.
            self.find_plan()
        elif self.stalled == MOST_STALLED and not self.plain:
            self.restart()
        elif self.stalled == MOST_STALLED:
            self.ended = self.unimproved()

    def next_program(self) -> tuple[Arcs, Vertex] | None:
        """Solve the program; return its arcs as well, None if rounding hides their plan."""
        used = self.arcs.some(self.arcs.reduced(self.f, self.g) <= self.cutoff)
        with_plan = Arcs.joined(len(self.b), used, self.plan)
        if self.rounds == 0:
            try:
                return used, self.solve_program(used)
            except ProgramError as error:
                if error.code != NO_PLAN:
                    raise
            # The first arcs alone have no plan. With the corner's, whose large costs would cost
            # potentials digits, they have one.
            self.slack = self.costs.forbidden
            return with_plan, self.solve_program(with_plan)
        try:
            return with_plan, self.solve_program(with_plan)
        except ProgramError as error:
            if error.code != NO_PLAN or self.upper is None:
                raise
            # There is one, but costs that are lost to rounding beside others hid it.
            return None

    def restart(self) -> None:
        """Take the arcs at potentials of 0.

        A few huge costs may have left the first potentials without a digit of the others.
        """
        self.plain, self.stalled, self.cutoff = True, 0, math.inf
        self.g = np.zeros_like(self.b)
        priced = self.price(np.zeros_like(self.a), self.g, FIRST_ARCS)
        self.f, self.arcs = priced.row_least, priced.arcs

    def unimproved(self) -> StoppedBy:
        """Return what ended a solve with a plan that rounds no longer improve."""
        # The integers of a plan may be others than the masses that the lower end is for.
        narrow = self.upper_end - self.lower_end <= self.common_width
        return "optimal" if narrow else "rounding"

    def solve_program(self, arcs: Arcs) -> Vertex:
        """Solve the program on some arcs, if they fit in memory."""
        check_arcs(len(arcs.rows))
        supply, demand, _ = self.integers
        return solve_program(supply, demand, arcs, self.f, self.g, slack=self.slack)

    def find_plan(self) -> None:
        """Look for a plan without forbidden pairs among all pairs, whatever their costs.

        The solve ends as infeasible if there is none, to rounding of the masses.
        """
        lowest, highest = self.costs.lowest, self.costs.highest
        # A pair that could help has f_i + g_j of 1 or more, others of 0 or less. With this unit
        # the reduced costs of the first are below -unit / 2, those of others not below 0.
        unit = 2 * max(highest - lowest, abs(lowest), abs(highest)) or 1.0
        known, self.stalled, self.cutoff = 0, 0, math.inf
        while self.seconds_left > 0:
            if known == len(self.arcs.rows):
                self.ended = "infeasible"
                return
            known, used = len(self.arcs.rows), Arcs.joined(len(self.b), self.arcs, self.plan)
            check_arcs(len(used.rows))
            vertex = fewest_forbidden(self.integers.supply, self.integers.demand, used)
            self.rounds += 1
            found = used.some(vertex.which)
            if self.improve_upper(found, vertex.masses):
                self.plan = found
                return
            f, g = lowest + unit * vertex.f, unit * vertex.g
            priced = self.price(f, g, self.more_arcs, below=-unit / 4)
            self.arcs = Arcs.joined(len(self.b), self.arcs, priced.arcs)

    @property
    def more_arcs(self) -> int:
        """The most arcs of a row, and of a column, that a round adds."""
        return MORE_ARCS << (self.rounds // DOUBLED)

    def price(
        self,
        f: Vector,
        g: Vector,
        count: int,
        *,
        below: float = math.inf,
        wanted: tuple[Places, Places] | None = None,
    ) -> Priced:
        """Pass over all costs as `ExactCosts.price`, which may raise the lower bound."""
        priced = self.costs.price(f, g, count, below=below, wanted=wanted)
        self.passes += 1
        bound = self.bounded(priced.row_least, g)
        if self.lower is None or bound.value - bound.rounding > self.lower_end:
            completed = np.where(self.b > 0, g, priced.massless)
            self.lower = _Lower(bound, priced.row_least, completed)
        return priced

    def bounded(self, f: Vector, g: Vector) -> Bound:
        """Return the lower bound of potentials, for the masses and for those of the best plan."""
        marginals = Marginals(np.zeros_like(f), np.zeros_like(g))
        if self.upper is not None:
            marginals = self.upper.marginals
        return lower_bound(self.a, self.b, f, g, self.mean_error, marginals)

    def improve_upper(self, plan: Arcs, masses: Vector, hubs: Arcs | None = None) -> bool:
        """Take a plan of integer masses if it is better; return False if it uses a forbidden pair.

        `hubs` are its `hub_arcs`.
        """
        if not np.isfinite(plan.costs).all():
            return False
        self.scale = self.common_cost(plan if hubs is None else hubs)
        spread = self.costs.highest - self.costs.lowest
        if self.costs.forbidden:
            # The bound is for the masses of the plan.
            spread, hubs = 0.0, None
        marginals = self.marginals(plan, masses)
        bound = upper_bound(plan, masses, marginals, spread, self.errors, hubs)
        if bound.value + bound.rounding < self.upper_end:
            self.upper = _Upper(bound, plan, masses, marginals)
            if self.lower is not None:
                f, g = self.lower.f, self.lower.g
                self.lower = _Lower(self.bounded(f, g), f, g)
        return True

    def common_cost(self, arcs: Arcs) -> float:
        """Return the median size of the costs of arcs that are more than their errors, or 0."""
        sizes = np.abs(arcs.costs)
        sizes = sizes[sizes > self.errors[0][arcs.rows] + self.errors[1][arcs.columns]]
        sizes = sizes[sizes < np.inf]
        return float(np.median(sizes)) if len(sizes) > 0 else 0.0

    def marginals(self, plan: Arcs, masses: Vector) -> Marginals:
        """Return how far the marginals of a plan of integer masses are from the masses."""
        supply, demand, exact = self.integers
        rows = np.bincount(plan.rows, masses, len(supply))
        columns = np.bincount(plan.columns, masses, len(demand))
        if exact and (rows == supply).all() and (columns == demand).all():
            return Marginals(np.zeros_like(rows), np.zeros_like(columns))
        return marginals_of(self.a, self.b, plan, masses)

    def stopped(self) -> StoppedBy | None:
        """Return what ends the solve, or None if it goes on."""
        if self.upper is not None and self.lower is not None:
            upper, lower = self.upper.bound, self.lower.bound
            # Complementary slackness: but for what marginals may cost, sums round by so much.
            rounding = upper.rounding - upper.marginal_cost + lower.rounding
            if upper.value - lower.value <= rounding:
                known = self.relative_width <= max(self.width, TWELVE_DIGITS)
                if known or rounding + upper.marginal_cost <= self.common_width:
                    return "optimal"
        if self.width > 0 and self.relative_width <= self.width:
            return "bound_width"
        return "max_seconds" if self.seconds_left <= 0 else None

    @property
    def common_width(self) -> float:
        """How far rounding leaves the ends apart at most; costs far above the others leave more."""
        if self.upper is None or self.lower is None:
            return 0.0
        size = centred_size(self.a, self.b, self.lower.f, self.lower.g)
        scale = max(self.scale, abs(self.upper.bound.value), size)
        return common_rounding(len(self.a) + len(self.b), scale, self.common_error)

    @property
    def seconds_left(self) -> float:
        """The time until no further round begins."""
        return self.end - time.perf_counter()

    @property
    def lower_end(self) -> float:
        """The best lower bound."""
        return (
            -math.inf if self.lower is None else self.lower.bound.value - self.lower.bound.rounding
        )

    @property
    def upper_end(self) -> float:
        """The best upper bound."""
        return (
            math.inf if self.upper is None else self.upper.bound.value + self.upper.bound.rounding
        )

    @property
    def relative_width(self) -> float:
        """(upper - lower) / |upper| of the value with its offset."""
        if self.upper is None:
            return math.inf
        value, error = self.offset
        width, end = self.upper_end - self.lower_end + 2 * error, self.upper_end + value + error
        return width / max(abs(end), TINY)

    def term(self, stopped_by: StoppedBy) -> ExactTerm:
        """Return the term, on the device of the costs."""
        assert self.lower is not None
        plan, masses, value, error = Arcs.joined(1), np.empty(0), math.inf, math.inf
        if self.upper is not None:
            plan, value = self.upper.plan, self.upper.bound.value
            masses = self.upper.masses / math.fsum(self.upper.masses)
            # The quotients, and those of the masses.
            error = self.upper.marginals.error + 4 * DOUBLE_UNIT
        arrays = self.lower.f, self.lower.g, plan.rows, plan.columns, masses
        f, g, *entries = (torch.from_numpy(each).to(self.costs.a.device) for each in arrays)
        return ExactTerm(
            f,
            g,
            epsilon=0.0,
            value=value,
            bounds=(self.lower_end, self.upper_end),
            marginal_error=error,
            tolerance=None,
            iterations=self.rounds,
            passes=self.passes,
            converged=stopped_by in ("optimal", "bound_width"),
            stopped_by=stopped_by,
            rows=entries[0],
            columns=entries[1],
            masses=entries[2],
        )


def check_arcs(count: int) -> None:
    """Refuse arcs that do not fit in memory.

    Raises:
        InputError: they do not.
    """
    needed, free = ARC_BYTES * count, free_memory(torch.device("cpu"))
    if needed > free:
        raise InputError(
            f"epsilon=0 takes {count:,} arcs, some {needed / 1e9:.1f} GB of memory, of which "
            f"{free / 1e9:.1f} GB are free; compare fewer points, or set a positive epsilon"
        )


def first_potentials(
    costs: ExactCosts, operator: Operator, end: float
) -> tuple[Vector, Vector, float]:
    """Compute entropic potentials f (n,) and g (m,) at a small epsilon, and the passes they took.

    Where the precision cannot hold an epsilon, or rounding leaves too little of the marginals, it
    is raised. Costs that are all alike or beyond the precision, or no time until `end`, a time of
    `time.perf_counter`, leave potentials of 0.

    Raises:
        InputError: costs cannot be computed, at any epsilon.
    """
    scale = costs.mean - min(costs.lowest, 0.0)
    epsilon, limits = FIRST_LEVEL * scale, torch.finfo(operator.passes.dtype)
    most = min(scale, limits.max / 4)
    while limits.tiny < epsilon <= most and (seconds := end - time.perf_counter()) > 0:
        limit = None if seconds == math.inf else seconds
        try:
            term = solve_term(operator, epsilon, Converged(FIRST_ERROR, max_seconds=limit), CROSS)
        except (EpsilonOutOfRange, UnreachableTolerance):
            epsilon *= RAISED
            continue
        return _host(term.f), _host(term.g), term.passes
    return np.zeros(len(costs.a)), np.zeros(len(costs.b)), 0.0


def _host(values: Tensor) -> Vector:
    found: Vector = values.double().cpu().numpy()
    return found
