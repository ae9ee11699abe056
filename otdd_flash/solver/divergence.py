"""The debiased Sinkhorn divergence S = OT(x, y) - OT(x, x) / 2 - OT(y, y) / 2, and its bounds."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from otdd_flash.errors import ConvergenceError, NotConvergedWarning
from otdd_flash.operators.base import Operator
from otdd_flash.solver.alternating import solve_alternating
from otdd_flash.solver.options import Progress, SolverOptions
from otdd_flash.solver.symmetric import solve_symmetric
from otdd_flash.solver.term import TransportTerm

# Potentials by term: g (m,) of "xy", f (n,) of "xx", g (m,) of "yy"; any may be left out.
Start = Mapping[str, Tensor]

# Self terms "xx" and "yy" that have been solved before, of the same cloud at the same cost.
Known = Mapping[str, TransportTerm]

# solved(term, operator, result): what to do with "xy", "xx" or "yy" while its operator is held.
Solved = Callable[[str, Operator, TransportTerm], None]


@dataclass(frozen=True, eq=False)
class Divergence:
    """S_epsilon of two clouds; without debiasing, OT_epsilon alone.

    Attributes:
        xy: the cross term.
        xx: the source's self term, or None without debiasing.
        yy: the target's self term, or None without debiasing.
        backend: how the passes of the cross term ran.
        passes: sweeps over all scores, in units of n m.
        identical: both clouds are one; its self plan is the cross plan.
    """

    xy: TransportTerm
    xx: TransportTerm | None
    yy: TransportTerm | None
    backend: str
    passes: float
    identical: bool = False

    @property
    def terms(self) -> dict[str, TransportTerm]:
        """The terms that were solved, by name."""
        named = {"xy": self.xy, "xx": self.xx, "yy": self.yy}
        return {name: term for name, term in named.items() if term is not None}

    @property
    def value(self) -> float:
        """D_xy - (D_xx + D_yy) / 2."""
        return self.xy.value - sum(term.value for term in self._self_terms) / 2

    @property
    def bounds(self) -> tuple[float, float]:
        """An interval that holds S_epsilon: each end takes the opposite end of the self terms."""
        if self.identical:
            return (0.0, 0.0)
        lower, upper = self.xy.bounds
        return (
            lower - sum(term.bounds[1] for term in self._self_terms) / 2,
            upper - sum(term.bounds[0] for term in self._self_terms) / 2,
        )

    @property
    def marginal_error(self) -> float:
        """The largest of the terms'."""
        return max(term.marginal_error for term in self.terms.values())

    @property
    def converged(self) -> bool:
        """Whether every term reached the tolerance."""
        return all(term.converged for term in self.terms.values())

    @property
    def stopped_by(self) -> str:
        """`tolerance` or `max_iterations`."""
        return "tolerance" if self.converged else "max_iterations"

    @property
    def _self_terms(self) -> tuple[TransportTerm, ...]:
        return tuple(term for term in (self.xx, self.yy) if term is not None)

    def summary(self) -> dict[str, Any]:
        """What result.json says of the solve."""
        return {
            "value": self.value,
            "bounds": list(self.bounds),
            "terms": {name: term.summary() for name, term in self.terms.items()},
            "marginal_error": self.marginal_error,
            "iterations": self.xy.iterations,
            "passes": self.passes,
            "converged": self.converged,
            "stopped_by": self.stopped_by,
            "identical": self.identical,
        }


def solve_divergence(
    operators: Callable[[str], Operator],
    epsilon: float,
    options: SolverOptions,
    *,
    debias: bool = True,
    start: Start | None = None,
    known: Known | None = None,
    progress: Progress | None = None,
    solved: Solved | None = None,
) -> Divergence:
    """Solve the cross term and, if debiased, both self terms.

    Args:
        operators: makes the operator of a term, "xy", "xx" or "yy", when its turn comes, so that
            the scores of one term at a time are held.
        epsilon: regularisation, in units of the cost.
        options: when each term stops.
        debias: False leaves the self terms out.
        start: potentials to start from at this epsilon, without scaling.
        known: self terms to take as they are.
        progress: told of every iteration.
        solved: called after each term that is solved here, as solved(name, operator, term).
    """
    operator = operators("xy")
    cells = operator.shape[0] * operator.shape[1]
    backend = operator.backend
    start, self_terms = start or {}, dict(known or {})
    xy = solve_alternating(operator, epsilon, options, start=start.get("xy"), progress=progress)
    if solved is not None:
        solved("xy", operator, xy)
    passes = float(xy.passes)
    for name in ("xx", "yy") if debias else ():
        if name in self_terms:
            continue
        del operator
        operator = operators(name)
        term = solve_symmetric(
            operator, epsilon, options, name=name, start=start.get(name), progress=progress
        )
        passes += term.passes * operator.shape[0] ** 2 / cells
        self_terms[name] = term
        if solved is not None:
            solved(name, operator, term)
    return Divergence(xy, self_terms.get("xx"), self_terms.get("yy"), backend, passes)


def solve_identical(
    operator: Operator,
    epsilon: float,
    options: SolverOptions,
    *,
    start: Start | None = None,
    progress: Progress | None = None,
    solved: Solved | None = None,
) -> Divergence:
    """The divergence of a cloud from itself: exactly 0, with the self plan as the cross plan.

    `solved` hears of all three terms, which are one.
    """
    first = None if start is None else start.get("xx")
    term = solve_symmetric(operator, epsilon, options, start=first, progress=progress)
    if solved is not None:
        for name in ("xy", "xx", "yy"):
            solved(name, operator, term)
    return Divergence(term, term, term, operator.backend, float(term.passes), identical=True)


def report_convergence(divergence: Divergence, options: SolverOptions) -> None:
    """Warn, or raise if convergence is required, when a term stopped before the tolerance.

    Raises:
        ConvergenceError: `options.require_convergence` is set and a term stopped early.
    """
    late = [name for name, term in divergence.terms.items() if not term.converged]
    if not late:
        return
    message = (
        f"not converged after {options.max_iterations} iterations in {', '.join(late)}: marginal "
        f"error {divergence.marginal_error:.2e} against solver.tolerance={options.tolerance:g}; "
        "the bounds still hold. Raise solver.max_iterations or epsilon"
    )
    if options.require_convergence:
        raise ConvergenceError(message)
    warnings.warn(message, NotConvergedWarning, stacklevel=3)
