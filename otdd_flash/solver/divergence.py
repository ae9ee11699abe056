"""The debiased Sinkhorn divergence S = OT(x, y) - OT(x, x) / 2 - OT(y, y) / 2, and its bounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from otdd_flash.errors import ConvergenceError, NotConvergedWarning, warn
from otdd_flash.operators.base import Operator
from otdd_flash.operators.ground import NO_OFFSET, Offset
from otdd_flash.solver.bound_width import relative_width, solve_to_width
from otdd_flash.solver.schedules.base import Schedule
from otdd_flash.solver.schedules.converged import Converged
from otdd_flash.solver.shortfall import shortfall
from otdd_flash.solver.term.result import (
    SolverProgress,
    StoppedBy,
    TransportTerm,
    largest_tolerance,
)
from otdd_flash.solver.term_solves import Known, Potentials, Solved, TermSolves


@dataclass(frozen=True, eq=False)
class Divergence:
    """S_epsilon of two clouds; without debiasing, OT_epsilon alone.

    Attributes:
        xy: the cross term.
        xx: the source's self term, or None without debiasing.
        yy: the target's self term, or None without debiasing.
        backend: how the passes of the cross term ran.
        device: where they ran.
        passes: sweeps over all scores, in units of n m.
        identical: both clouds are one; its self plan is the cross plan.
        schedule: the name of the way it was solved, `Schedule.name`.
        offset: what terms of one side of the ground cost add to a cross term. The terms here are
            those without them, as they cancel with debiasing.
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
        cls, terms: Mapping[str, TransportTerm], options: Schedule, offset: Offset, backend: str
    ) -> Divergence:
        """Build the divergence of terms that were solved together on stored scores."""
        xy, xx, yy = (terms.get(name) for name in ("xy", "xx", "yy"))
        assert xy is not None
        cells = {"xy": len(xy.f) * len(xy.g), "xx": len(xy.f) ** 2, "yy": len(xy.g) ** 2}
        swept = sum(term.passes * cells[name] for name, term in terms.items())
        found = (backend, str(xy.f.device), swept / cells["xy"])
        return cls(xy, xx, yy, *found, schedule=options.name, offset=offset)

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
        """The largest marginal error that was enough for a term, of those that missed it if any.

        None where the width of the bounds decided.
        """
        terms = self._early or list(self.terms.values())
        return largest_tolerance(term.tolerance for term in terms)

    @property
    def converged(self) -> bool:
        """Whether what was asked for was reached: by every term, or by the width of `bounds`."""
        return all(term.converged for term in self.terms.values())

    @property
    def stopped_by(self) -> StoppedBy:
        """What ended the solve: of a term that did not converge, or that rounding stopped, if any.

        Else of the cross term.
        """
        rounded = [term for term in self.terms.values() if term.stopped_by == "rounding"]
        return (*self._early, *rounded, self.xy)[0].stopped_by

    @property
    def bound_width(self) -> float:
        """(upper - lower) / |value|."""
        return relative_width(self.value, self.bounds)

    def shortfall(self, options: Schedule) -> str:
        """Why the solve did not converge, by how much, and what would help."""
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
        """The divergence whose `to_dict` this is, with its `epsilon`; potentials (f, g) by term."""
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
        """What result.json says of the solve."""
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


def solve_divergence(
    operators: Callable[[str], Operator],
    epsilon: float,
    options: Schedule,
    *,
    debias: bool = True,
    offset: Offset = NO_OFFSET,
    start: Potentials | None = None,
    known: Known | None = None,
    progress: SolverProgress | None = None,
    solved: Solved | None = None,
) -> Divergence:
    """Solve the self terms, if debiased, and the cross term, which gets the time that they leave.

    Args:
        operators: makes the operator of a term, "xy", "xx" or "yy", when its turn comes, so that
            the scores of one term at a time are held.
        epsilon: regularisation, in units of the cost.
        options: how to solve and when to stop.
        debias: False leaves the self terms out.
        offset: what terms of one side of the ground cost add to a cross term.
        start: potentials to start from at this epsilon, without scaling.
        known: self terms to take as they are, or to go on with where they keep the bounds wider
            than a width that `options` ask for.
        progress: told of every iteration.
        solved: called after each term that is solved here, as solved(name, operator, term).
    """
    names = ("xx", "yy", "xy") if debias else ("xy",)
    start, known = (start, known) if options.goes_on else ({}, {})
    solves = TermSolves(operators, epsilon, options, start=start, known=known, progress=progress)
    unknown = [name for name in names if name not in solves.terms]
    if isinstance(options, Converged) and options.bound_width is not None:
        raised = 0.0 if debias else offset.value
        solve_to_width(solves, names, options.bound_width, options.max_iterations, raised)
        if solved is not None:
            for name in unknown:
                solved(name, operators(name), solves.terms[name])
    else:
        solves.solve(dict.fromkeys(unknown, options.tolerance), solved)
    xy, xx, yy = (solves.terms.get(name) for name in ("xy", "xx", "yy"))
    assert xy is not None
    backend, passes = solves.backends["xy"], solves.passes
    return Divergence(
        xy, xx, yy, backend, str(xy.f.device), passes, schedule=options.name, offset=offset
    )


def solve_identical(
    operator: Operator,
    epsilon: float,
    options: Schedule,
    *,
    start: Potentials | None = None,
    progress: SolverProgress | None = None,
    solved: Solved | None = None,
) -> Divergence:
    """The divergence of a cloud from itself: exactly 0, with the self plan as the cross plan.

    `solved` hears of all three terms, which are one.
    """
    # Its width is 0 already; the tolerance, as far as rounding allows, is for the plan.
    solves = TermSolves(lambda _: operator, epsilon, options, start=start, progress=progress)
    solves.solve({"xx": options.tolerance})
    term = solves.terms["xx"]
    if solved is not None:
        for name in ("xy", "xx", "yy"):
            solved(name, operator, term)
    device, passes = str(term.f.device), float(term.passes)
    return Divergence(
        term,
        term,
        term,
        operator.execution.backend,
        device,
        passes,
        identical=True,
        schedule=options.name,
    )


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
