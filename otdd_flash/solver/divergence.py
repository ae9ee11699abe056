"""The debiased Sinkhorn divergence S = OT(x, y) - OT(x, x) / 2 - OT(y, y) / 2, and its bounds.

`TermSolves` solves its terms in turn, within a limit of time for all of them and of iterations for
each. If a width of the bounds is asked for instead of a marginal error, `solve_to_width` solves
them several times. The bounds of the cross term are about as wide as its marginal error times the
costs, and those of a self term are narrower, but the width is relative to the value, which is known
only once all terms are solved. So the terms are solved coarsely first; then those that make the
interval wide continue from their potentials, to a marginal error smaller by about the factor by
which the interval is too wide.

`solver.solving` calls `solve_divergence` for problems that are not small, or that
`solver.small.route` leaves to it, and `solve_identical` for equal clouds; `ranking.bounds` calls
both for single terms. `solver.small.route` and `solver.exact.solve` make a `Divergence` too.
Results, flows and derivatives read it. Entry points call `checked_start` and `report_convergence`;
`pairwise` and `ranking.bounds` call `whole_term`.

`SOLVES` says which function solves a term by which options, and `commands.settings` reads
SCHEDULES: a new schedule needs an entry of `SOLVES` and a file in `conf/solver`
(`tests/solver/test_schedules.py`). A divergence of equal clouds must stay 0 with the bounds [0, 0].
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from otdd_flash.checks import shown
from otdd_flash.cost.facts import SIDES, TERMS
from otdd_flash.cost.ground import NO_OFFSET, Offset
from otdd_flash.errors import ConvergenceError, InputError, NotConvergedWarning, warn
from otdd_flash.formulas.decision import CROSS, SELF, Form
from otdd_flash.operators.base import Operator
from otdd_flash.operators.comparison import Comparison
from otdd_flash.real_numbers import real_tensor
from otdd_flash.solver.geomloss import GeomlossSchedule, solve_by_schedule
from otdd_flash.solver.matrix_comparison import MatrixComparison
from otdd_flash.solver.schedules import Converged, Exact, Schedule, needs_zero
from otdd_flash.solver.shortfall import shortfall
from otdd_flash.solver.solve import solve_term
from otdd_flash.solver.term import (
    SolverProgress,
    StoppedBy,
    TermProgress,
    TransportTerm,
    largest_tolerance,
)

# A cross term that continues from its potentials restarts from a large epsilon after at least so
# many iterations.
FEWEST_CONTINUED = 50

# The marginal error of the coarse solves that precede a width.
FIRST_TOLERANCE = 0.1

# Terms that add less than this share of the allowed width are not tightened further. Two such self
# terms leave the rest of it to the cross term.
NEGLIGIBLE = 0.1

# The share of the allowed width that the next tolerances aim at, and the factors by which they are
# lowered at the least and at the most, as the first values are rough.
WIDTH_AIM = 0.8
LEAST_FALL, MOST_FALL = 0.5, 0.01

# The seconds of a term whose time is over: it then gets its one iteration.
NO_TIME = 1e-9

# The share of its own width that a term adds to that of the divergence.
SHARES = {"xy": 1.0, "xx": 0.5, "yy": 0.5}

# Two sides and the costs between them, of points or of matrices.
Compared = Comparison | MatrixComparison

# Potentials by term: g (m,) of "xy", f (n,) of "xx", g (m,) of "yy"; any may be left out.
Potentials = Mapping[str, Tensor]

# Self terms "xx" and "yy" that have been solved before, of the same cloud at the same cost.
SolvedTerms = Mapping[str, TransportTerm]

# solved(term, operator, result): called for "xy", "xx" or "yy" as long as its operator exists.
Solved = Callable[[str, Operator, TransportTerm], None]

# For each side, 0 or 1, of which it is wanted: called with the gradient of the divergence by the
# points of that side, as the ground cost transforms them.
GradientCallbacks = Mapping[int, Callable[[Tensor], None]]


def checked_start(compared: Compared, start: Potentials | None) -> Potentials:
    """Check the potentials that a user starts from; return them detached, on the device.

    Args:
        compared: the problem to solve.
        start: potentials by term; None is {}.

    Raises:
        InputError: there is no such term, or a potential is of other clouds or not finite.
    """
    found = {}
    for name, potential in (start or {}).items():
        if name not in TERMS:
            raise InputError(f"start holds potentials by term, xy, xx or yy, got {name!r}")
        given, length = real_tensor(f"start[{name!r}]", potential), compared.shape[SIDES[name][1]]
        if given.shape != (length,):
            raise InputError(f"start[{name!r}] must have shape ({length},), got {shown(given)}")
        if not bool(given.isfinite().all()):
            raise InputError(
                f"start[{name!r}] holds NaN or infinite entries; leave it out, or give the "
                "potential of a solve"
            )
        found[name] = given.detach().to(compared.device)
    return found


class SolveTerm(Protocol):
    """A function that solves one term by one class of options, with bounds."""

    def __call__(
        self,
        operator: Operator,
        epsilon: float,
        options: Any,
        form: Form,
        *,
        start: Tensor | None,
        progress: TermProgress | None,
    ) -> TransportTerm:
        """Solve one term; arguments as for `solver.solve.solve_term`.

        Raises:
            InputError: rounding alone exceeds the tolerance or width asked for.
        """


# The function that solves a term by each class of options, and these classes by their names;
# `solver.exact` is for `Exact`.
SOLVES: dict[type[Schedule], SolveTerm] = {
    Converged: solve_term,
    GeomlossSchedule: solve_by_schedule,
}
KINDS: tuple[type[Schedule], ...] = (*SOLVES, Exact)
SCHEDULES = {kind.name: kind for kind in KINDS}


@dataclass(frozen=True, eq=False)
class Divergence:
    """S_epsilon of two clouds; without debiasing, OT_epsilon alone.

    Attributes:
        xy: the cross term.
        xx: the source's self term, or None without debiasing.
        yy: the target's self term, or None without debiasing.
        backend: how the passes of the cross term ran.
        device: where they ran.
        passes: evaluations of all scores, in units of n m.
        identical: both clouds are one; its self plan is the cross plan.
        schedule: the name of the options' class, `Schedule.name`.
        offset: the separable terms of the ground cost, of one side each, in a cross term. The terms
            here are without them, as they cancel with debiasing.
    """

    xy: TransportTerm
    xx: TransportTerm | None
    yy: TransportTerm | None
    backend: str
    device: str
    passes: float
    identical: bool = False
    schedule: str = "converged"
    offset: Offset = NO_OFFSET

    @classmethod
    def of_terms(
        cls,
        terms: Mapping[str, TransportTerm],
        options: Schedule,
        offset: Offset,
        backend: str,
        passes: float | None = None,
        *,
        identical: bool = False,
    ) -> Divergence:
        """Build the divergence from its terms by name; `passes` are theirs unless given."""
        xy, xx, yy = (terms.get(name) for name in TERMS)
        assert xy is not None
        if passes is None:
            cells = {"xy": len(xy.f) * len(xy.g), "xx": len(xy.f) ** 2, "yy": len(xy.g) ** 2}
            passes = sum(term.passes * cells[name] for name, term in terms.items()) / cells["xy"]
        return cls(
            xy,
            xx,
            yy,
            backend,
            str(xy.f.device),
            passes,
            identical=identical,
            schedule=options.name,
            offset=offset,
        )

    @property
    def terms(self) -> dict[str, TransportTerm]:
        named = {"xy": self.xy, "xx": self.xx, "yy": self.yy}
        return {name: term for name, term in named.items() if term is not None}

    @property
    def value(self) -> float:
        """D_xy - (D_xx + D_yy) / 2."""
        value = self.xy.value - sum(term.value for term in self._self_terms) / 2
        return value if self._self_terms else value + self.offset.value

    @property
    def bounds(self) -> tuple[float, float]:
        """Solver bounds of S_epsilon: each end takes the opposite end of the self terms."""
        if self.identical:
            return (0.0, 0.0)
        lower, upper = self.xy.bounds
        if not self._self_terms:
            value, error = self.offset
            return lower + value - error, upper + value + error
        return (
            lower - sum(term.bounds[1] for term in self._self_terms) / 2,
            upper - sum(term.bounds[0] for term in self._self_terms) / 2,
        )

    @property
    def marginal_error(self) -> float:
        """The largest marginal error of the terms."""
        return max(term.marginal_error for term in self.terms.values())

    @property
    def tolerance(self) -> float | None:
        """The largest stopping tolerance of the terms, or of those that missed it if there are any.

        None where the width of the bounds decided.
        """
        terms = self._early or list(self.terms.values())
        return largest_tolerance(term.tolerance for term in terms)

    @property
    def converged(self) -> bool:
        """Whether every term reached its tolerance, or `bounds` the width that was asked for."""
        return all(term.converged for term in self.terms.values())

    @property
    def stopped_by(self) -> StoppedBy:
        """The reason why the solve ended: of a term that did not converge or that rounding stopped.

        If there is none, that of the cross term.
        """
        rounded = [term for term in self.terms.values() if term.stopped_by == "rounding"]
        return (*self._early, *rounded, self.xy)[0].stopped_by

    @property
    def bound_width(self) -> float:
        """(upper - lower) / |value|."""
        return relative_width(self.value, self.bounds)

    def shortfall(self, options: Schedule) -> str:
        """Describe why the solve did not converge, by how much, and what would help."""
        return shortfall(
            options,
            self.stopped_by,
            where=", ".join(name for name, term in self.terms.items() if not term.converged),
            marginal_error=self.marginal_error,
            tolerance=self.tolerance,
            dtype=self.xy.f.dtype,
            bound_width=self.bound_width,
        )

    def widened(self, error: float) -> Divergence:
        """Widen bounds and errors for costs that are off by at most `error`."""
        if error == 0:
            return self
        xy, xx, yy = (
            None if term is None else term.widened(error) for term in (self.xy, self.xx, self.yy)
        )
        assert xy is not None
        return replace(self, xy=xy, xx=xx, yy=yy)

    @property
    def _early(self) -> list[TransportTerm]:
        return [term for term in self.terms.values() if not term.converged]

    @property
    def _self_terms(self) -> tuple[TransportTerm, ...]:
        return tuple(term for term in (self.xx, self.yy) if term is not None)

    @classmethod
    def from_dict(
        cls, summary: Mapping[str, Any], potentials: Mapping[str, tuple[Tensor, Tensor]]
    ) -> Divergence:
        """Restore a divergence from its `to_dict` and `epsilon`, and potentials (f, g) by term."""
        terms = {
            name: TransportTerm.from_dict(*potentials[name], summary["epsilon"], term)
            for name, term in summary["terms"].items()
        }
        return cls(
            terms["xy"],
            terms.get("xx"),
            terms.get("yy"),
            summary["backend"],
            summary["device"],
            summary["passes"],
            identical=summary["identical"],
            # Earlier versions knew one schedule, and no offset.
            schedule=summary.get("schedule", "converged"),
            offset=Offset(*summary.get("offset", NO_OFFSET)),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the summary of the solve for result.json."""
        return {
            "value": self.value,
            "bounds": list(self.bounds),
            "terms": {name: term.to_dict() for name, term in self.terms.items()},
            "marginal_error": self.marginal_error,
            "tolerance": self.tolerance,
            "iterations": self.xy.iterations,
            "passes": self.passes,
            "converged": self.converged,
            "stopped_by": self.stopped_by,
            "schedule": self.schedule,
            "identical": self.identical,
            **({} if self.offset == NO_OFFSET else {"offset": list(self.offset)}),
        }


def whole_term(term: TransportTerm, compared: Comparison) -> TransportTerm:
    """Return a term with the separable terms of costs between many sets of labels added.

    They cancel in a divergence of three terms. Different comparisons have different ones, because
    the columns that stand for sets of labels are others for every pair of datasets.
    """
    if not compared.signed:
        return term
    value, error = replace(compared, debias=False).offset
    low, high = (end + value for end in term.bounds)
    return replace(term, value=term.value + value, bounds=(low - error, high + error))


def solve_divergence(
    compared: Compared,
    options: Schedule,
    *,
    start: Potentials | None = None,
    known: SolvedTerms | None = None,
    progress: SolverProgress | None = None,
    solved: Solved | None = None,
) -> Divergence:
    """Solve the self terms, if debiased, and the cross term, which gets the time that they leave.

    Args:
        compared: builds the operator of a term when its turn comes, so that the scores of one term
            at a time are stored.
        options: how to solve and when to stop.
        start: potentials to start from at this epsilon, without scaling.
        known: self terms that are solved already; they are continued only if the bounds are wider
            than a width that `options` ask for.
        progress: called in every iteration.
        solved: called after each term that is solved here, as solved(name, operator, term).
    """
    if isinstance(options, Exact):
        raise needs_zero()
    names, offset = (*compared.terms[1:], "xy"), compared.offset
    if isinstance(options, GeomlossSchedule):
        # It depends on both clouds, and starts from nothing.
        start = known = None
    solves = TermSolves(compared, options, start=start, known=known, progress=progress)
    unknown = [name for name in names if name not in solves.terms]
    if isinstance(options, Converged) and options.bound_width is not None:
        limits = options.bound_width, options.max_iterations
        solve_to_width(solves, names, *limits, offset.value)
        if solved is not None:
            for name in unknown:
                solved(name, compared.operator(name), solves.terms[name])
    else:
        solves.solve(dict.fromkeys(unknown, options.tolerance), solved)
    return Divergence.of_terms(solves.terms, options, offset, solves.backends["xy"], solves.passes)


def solve_identical(
    compared: Compared,
    options: Schedule,
    *,
    start: Potentials | None = None,
    progress: SolverProgress | None = None,
    solved: Solved | None = None,
) -> Divergence:
    """Solve the divergence of a cloud from itself: 0 exactly, with the self plan as the cross plan.

    `solved` is called for all three terms, which are one.
    """

    def solved_each(_: str, operator: Operator, term: TransportTerm) -> None:
        if solved is not None:
            for name in TERMS:
                solved(name, operator, term)

    # The width of its bounds is 0 already; the tolerance is for the plan alone.
    solves = TermSolves(compared, options, start=start, progress=progress)
    solves.solve({"xx": options.tolerance}, solved_each)
    term = solves.terms["xx"]
    terms, passes = dict.fromkeys(TERMS, term), float(term.passes)
    backend = solves.backends["xx"]
    return Divergence.of_terms(terms, options, NO_OFFSET, backend, passes, identical=True)


def report_convergence(divergence: Divergence, options: Schedule) -> None:
    """Warn, or raise if convergence is required, when the solve did not reach what was asked.

    Raises:
        ConvergenceError: `options.require_convergence` is set and a term stopped early.
    """
    if divergence.converged:
        return
    message = divergence.shortfall(options)
    if options.require_convergence:
        raise ConvergenceError(message)
    warn(message, NotConvergedWarning)


class TermSolves:
    """The solves of the terms of one divergence, in turn; a solved term can be continued.

    Args:
        compared: builds the operator of a term when its turn comes, so that the scores of one term
            at a time are stored.
        options: how to solve and when to stop; a limit of seconds counts from here, for all terms
            together, and one of iterations for each term, however often it is continued.
        start: potentials to start from at this epsilon, without scaling.
        known: self terms that are solved already.
        progress: called in every iteration.

    Attributes:
        terms: solved terms, those of `known` among them, by name.
        iterations: those taken here, by term.
        backends: how passes ran, by term.
    """

    def __init__(
        self,
        compared: Compared,
        options: Schedule,
        *,
        start: Potentials | None = None,
        known: SolvedTerms | None = None,
        progress: SolverProgress | None = None,
    ) -> None:
        self.compared, self.options = compared, options
        self.terms: dict[str, TransportTerm] = dict(known or {})
        self.iterations: Counter[str] = Counter()
        self.backends: dict[str, str] = {}
        self._start, self._progress = start or {}, progress
        self._started = time.perf_counter()
        self._cells: dict[str, int] = {}
        self._swept = 0.0

    @property
    def passes(self) -> float:
        """Evaluations of all scores so far, in units of n m; "xy" must have been solved here."""
        return self._swept / self._cells["xy"]

    def solve(self, tolerances: Mapping[str, float | None], solved: Solved | None = None) -> None:
        """Solve terms, in the given order, to a marginal error each; None is the default.

        A term may take an equal share of the time that is left to it and those that follow.
        """
        for turn, (name, tolerance) in enumerate(tolerances.items()):
            self._solve(name, tolerance, len(tolerances) - turn, solved)

    def _solve(
        self, name: str, tolerance: float | None, sharers: int, solved: Solved | None
    ) -> None:
        operator = self.compared.operator(name)
        before = self.terms.get(name)
        start = self._start.get(name) if before is None else before.g
        # At a small epsilon, mass between points that are far apart may take thousands of
        # iterations to move. A descent from large ones moves it within some ten a level.
        most = None if before is None or name != "xy" else max(FEWEST_CONTINUED, before.iterations)
        self._iterate(operator, name, tolerance, sharers, start, most)
        stopped_by = self.terms[name].stopped_by
        if most is not None and stopped_by == "max_iterations" and self._left(name):
            self._iterate(operator, name, tolerance, sharers, None)
        if solved is not None:
            solved(name, operator, self.terms[name])

    def _left(self, name: str) -> bool:
        """Return whether a term has iterations left."""
        options = self.options
        return isinstance(options, Converged) and self.iterations[name] < options.max_iterations

    def _iterate(
        self,
        operator: Operator,
        name: str,
        tolerance: float | None,
        sharers: int,
        start: Tensor | None,
        most: int | None = None,
    ) -> None:
        """Solve a term from given potentials, or without, in `most` iterations at the most."""
        options = self.options
        if isinstance(options, Converged):
            options = self._limited(options, name, tolerance, sharers, most)
        solve = next(solve for kind, solve in SOLVES.items() if isinstance(options, kind))
        progress = None if self._progress is None else partial(self._progress, name)
        form = CROSS if name == "xy" or self.compared.signed else SELF
        form = form._replace(constraints=self.compared.constraints.between(*SIDES[name]))
        epsilon = self.compared.epsilon
        term = solve(operator, epsilon, options, form, start=start, progress=progress)
        self.backends[name] = operator.passes.backend
        self._cells[name] = len(operator.a) * len(operator.b)
        self._swept += term.passes * self._cells[name]
        self.iterations[name] += term.iterations
        if (before := self.terms.get(name)) is not None:
            iterations, passes = before.iterations + term.iterations, before.passes + term.passes
            term = replace(term, iterations=iterations, passes=passes)
        self.terms[name] = term

    def _limited(
        self,
        options: Converged,
        name: str,
        tolerance: float | None,
        sharers: int,
        most: int | None,
    ) -> Converged:
        """Return the options with an equal share of the time and all iterations left, or `most`."""
        limit, left = options.max_seconds, options.max_iterations - self.iterations[name]
        seconds = time.perf_counter() - self._started
        return replace(
            options,
            tolerance=tolerance,
            max_iterations=left if most is None else min(left, most),
            max_seconds=None if limit is None else max((limit - seconds) / sharers, NO_TIME),
        )


def solve_to_width(
    solves: TermSolves,
    names: Sequence[str],
    bound_width: float,
    max_iterations: int,
    offset: float = 0.0,
) -> None:
    """Tighten the terms until the bounds are `bound_width` times the value wide, or stop early.

    All terms then have the same `stopped_by`, and have converged if the width was reached.

    Args:
        solves: the terms, of which self terms may be solved already.
        names: the terms of the value, in the order of their turns.
        bound_width: (upper - lower) / |value| of the divergence.
        max_iterations: of a term, after which it is not continued.
        offset: added to the value, see `Divergence.offset`.
    """
    asked = {name: FIRST_TOLERANCE for name in names if name not in solves.terms}
    solves.solve(asked)
    while True:
        terms = {name: solves.terms[name] for name in names}
        wide, factor = _terms_to_tighten(terms, bound_width, offset)
        able = [name for name in wide if terms[name].marginal_error <= asked.get(name, math.inf)]
        reason = _reason(wide, able, solves, max_iterations)
        if reason is not None:
            reached = reason == "bound_width"
            for name, term in terms.items():
                solves.terms[name] = replace(
                    term, converged=reached, stopped_by=reason, tolerance=None
                )
            return
        following = {name: terms[name].marginal_error * factor for name in able}
        solves.solve(following)
        asked |= following


def relative_width(value: float, bounds: tuple[float, float]) -> float:
    """Return (upper - lower) / |value|."""
    width = bounds[1] - bounds[0]
    if width == 0:
        return 0.0
    return width / abs(value) if value and math.isfinite(width) else math.inf


def _terms_to_tighten(
    terms: Mapping[str, TransportTerm], target: float, offset: float
) -> tuple[list[str], float]:
    """Return the terms to tighten, none at the end, and the factor for their marginal errors."""
    parts = {name: SHARES[name] * (term.bounds[1] - term.bounds[0]) for name, term in terms.items()}
    signed = (term.value if name == "xy" else -term.value / 2 for name, term in terms.items())
    allowed, total = target * abs(sum(signed) + offset), sum(parts.values())
    if total <= allowed:
        return [], 1.0
    factor = min(max(WIDTH_AIM * allowed / total, MOST_FALL), LEAST_FALL)
    return [name for name, part in parts.items() if part > NEGLIGIBLE * allowed], factor


def _reason(
    wide: Sequence[str], able: Sequence[str], solves: TermSolves, most: int
) -> StoppedBy | None:
    """Return what ends the solve, or None if it continues.

    A term that did not spend its budget, and yet is above the marginal error it was asked for, is
    at its rounding floor.
    """
    if not wide:
        return "bound_width"
    late = [term for name in wide if not (term := solves.terms[name]).converged]
    if late:
        return late[-1].stopped_by
    if not able:
        return "rounding"
    return "max_iterations" if any(solves.iterations[name] >= most for name in able) else None
