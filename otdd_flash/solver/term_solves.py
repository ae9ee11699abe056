"""The terms of a divergence, solved in turn within one budget of time and iterations."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import Tensor

from otdd_flash.operators.base import Operator
from otdd_flash.solver.schedules.base import Schedule
from otdd_flash.solver.schedules.converged import Converged
from otdd_flash.solver.term.result import SolverProgress, TransportTerm

# The fewest iterations after which a cross term that goes on from its potentials is begun anew.
FEWEST_ON = 50

# Potentials by term: g (m,) of "xy", f (n,) of "xx", g (m,) of "yy"; any may be left out.
Potentials = Mapping[str, Tensor]

# Self terms "xx" and "yy" that have been solved before, of the same cloud at the same cost.
Known = Mapping[str, TransportTerm]

# solved(term, operator, result): what to do with "xy", "xx" or "yy" while its operator is held.
Solved = Callable[[str, Operator, TransportTerm], None]

# By side, 0 or 1, of which it is wanted: what takes the gradient of the divergence by the points of
# that side as the ground cost sees them.
Pulled = Mapping[int, Callable[[Tensor], None]]


class TermSolves:
    """Solves terms one after the other, and goes on with those that it has solved.

    Args:
        operators: makes the operator of a term when its turn comes, so that the scores of one term
            at a time are held.
        epsilon: regularisation, in units of the cost.
        options: how to solve and when to stop; a limit of seconds counts from here, for all terms
            together, and one of iterations for each term, however often it goes on.
        start: potentials to start from at this epsilon, without scaling.
        known: self terms that are there already.
        progress: told of every iteration.

    Attributes:
        terms: what has been solved or was known, by name.
        iterations: what was done here, by term.
        backends: how passes ran, by term.
    """

    def __init__(
        self,
        operators: Callable[[str], Operator],
        epsilon: float,
        options: Schedule,
        *,
        start: Potentials | None = None,
        known: Known | None = None,
        progress: SolverProgress | None = None,
    ) -> None:
        self.operators, self.epsilon, self.options = operators, epsilon, options
        self.terms: dict[str, TransportTerm] = dict(known or {})
        self.iterations: Counter[str] = Counter()
        self.backends: dict[str, str] = {}
        self._start, self._progress = start or {}, progress
        self._started = time.perf_counter()
        self._cells: dict[str, int] = {}
        self._swept = 0.0

    @property
    def passes(self) -> float:
        """Sweeps over all scores so far, in units of n m; "xy" must be among the solved ones."""
        return self._swept / self._cells["xy"]

    def solve(self, tolerances: Mapping[str, float | None], solved: Solved | None = None) -> None:
        """Bring terms to a marginal error each, None for the default, in the given order.

        A term may take an equal share of the time that is left to it and those that follow.
        """
        for turn, (name, tolerance) in enumerate(tolerances.items()):
            self._solve(name, tolerance, len(tolerances) - turn, solved)

    def _solve(
        self, name: str, tolerance: float | None, sharers: int, solved: Solved | None
    ) -> None:
        operator = self.operators(name)
        before = self.terms.get(name)
        if before is None:
            self._iterate(operator, name, tolerance, sharers, self._start.get(name))
        elif name != "xy":
            self._iterate(operator, name, tolerance, sharers, before.g)
        else:
            # At a small epsilon, mass between points that are far apart may take thousands of
            # iterations to move. A descent from large ones moves it within some ten a level.
            most = max(FEWEST_ON, before.iterations)
            self._iterate(operator, name, tolerance, sharers, before.g, most)
            if self.terms[name].stopped_by == "max_iterations" and self._left(name):
                self._iterate(operator, name, tolerance, sharers, None)
        if solved is not None:
            solved(name, operator, self.terms[name])

    def _left(self, name: str) -> bool:
        """Whether a term that stopped for its iterations may have more."""
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
        """Solve a term from potentials or from nothing, in `most` iterations at the most."""
        options = self.options.for_term(
            tolerance,
            iterations=self.iterations[name],
            seconds=time.perf_counter() - self._started,
            sharers=sharers,
            most=most,
        )
        term = options.solve_term(
            operator, self.epsilon, name=name, start=start, progress=self._progress
        )
        self.backends[name] = operator.execution.backend
        self._cells[name] = len(operator.a) * len(operator.b)
        self._swept += term.passes * self._cells[name]
        self.iterations[name] += term.iterations
        if (before := self.terms.get(name)) is not None:
            iterations, passes = before.iterations + term.iterations, before.passes + term.passes
            term = replace(term, iterations=iterations, passes=passes)
        self.terms[name] = term
