"""Sinkhorn's alternating updates for a cross term, with epsilon scaling and warm starts.

    f <- T(g),  g <- T'(f),      T(g)_i = -epsilon log sum_j b_j exp((g_j - C_ij) / epsilon)

Each update makes one marginal exact. The update of g also tells how far the plan before it was from
the column masses, so checking convergence costs nothing. Epsilon starts at the mean cost, where a
few iterations suffice, and halves each time the marginal error falls to 0.01 or ten times the
tolerance; each level starts from the potentials of the level before (Schmitzer 2019, Stabilized
sparse scaling algorithms for entropy regularized transport problems).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.operators.base import Operator
from otdd_flash.solver.certificate import certify, column_marginal, magnitude, rounding_floor
from otdd_flash.solver.late_reader import LateReader, Reading
from otdd_flash.solver.options import Progress, SolverOptions
from otdd_flash.solver.sweep import State, steps_between_looks, sweep
from otdd_flash.solver.term import TransportTerm, check_reachable

SCALING = 0.5
LEVEL_TOLERANCE = 0.01


def solve_alternating(
    operator: Operator,
    epsilon: float,
    options: SolverOptions,
    *,
    start: Tensor | None = None,
    progress: Progress | None = None,
) -> TransportTerm:
    """OT_epsilon between the two sides of an operator.

    An operator that rounds the points iterates first; its refined form, which knows the original
    points, starts from there and ends the solve.

    Args:
        operator: the cost (n, m) and the masses.
        epsilon: regularisation, in units of the cost.
        options: when to stop.
        start: (m,) column potential to start from at the final epsilon, without scaling.
        progress: called whenever the marginals were looked at, as progress("xy", iteration, error).

    Raises:
        InputError: rounding alone exceeds the tolerance at this epsilon and precision.
    """
    # Most hopeless tolerances show before the first iteration, by the size of the costs alone.
    floor = rounding_floor(operator, 0.0, epsilon)
    check_reachable(options.tolerance, floor, epsilon, operator.dtype)
    solve = _Solve(epsilon, options, progress)
    f = torch.zeros_like(operator.a, dtype=operator.dtype)
    if start is None:
        g = torch.zeros_like(operator.b, dtype=operator.dtype)
        f, g = solve.iterate(operator, f, g, max(epsilon, operator.mean_cost))
    else:
        f, g = solve.iterate(operator, f, start.to(operator.dtype), epsilon)
    refined = operator.refined
    if refined is not operator:
        f, g = solve.iterate(refined, f, g, epsilon)
    certificate, iterations = certify(refined, f, g, epsilon), solve.iterations + 1
    if progress is not None:
        progress("xy", iterations, certificate.marginal_error)
    return TransportTerm.from_certificate(
        certificate,
        epsilon,
        iterations=iterations,
        passes=2 * iterations + 1,
        tolerance=options.tolerance,
    )


class _Look(NamedTuple):
    """The plan of (f, g) at an epsilon after some iterations."""

    iteration: int
    level: float
    f: Tensor
    g: Tensor


class _Solve:
    """The iterations of one term, counted over all operators that take part."""

    def __init__(self, epsilon: float, options: SolverOptions, progress: Progress | None) -> None:
        self.epsilon, self.options, self.progress = epsilon, options, progress
        self.iterations = 0

    def iterate(
        self, operator: Operator, f: Tensor, g: Tensor, level: float
    ) -> tuple[Tensor, Tensor]:
        """Alternate from f (n,) and g (m,), down from epsilon = level, until done."""
        level_tolerance = max(LEVEL_TOLERANCE, 10 * self.options.tolerance)
        reader: LateReader[_Look] = LateReader()
        # The certificate is the last iteration: it updates f, and knows the update of g.
        while (left := self.options.max_iterations - 1 - self.iterations) > 0:
            count = min(left, steps_between_looks(operator))
            f, updated, g = sweep(operator, alternate, level, (f, g, g), count)
            self.iterations += count
            look = _Look(self.iterations, level, f, g)
            reading = reader.exchange(_measured(operator, look, updated), look)
            g = updated
            if reading is None:
                continue
            seen, error = reading.kept, self._error(operator, reading)
            if seen.level > self.epsilon:
                if error <= level_tolerance and seen.level == level:
                    level = max(self.epsilon, level * SCALING)
            elif error <= self.options.tolerance:
                return seen.f, seen.g
        late = reader.last()
        if late is not None:
            self._error(operator, late)
        return f, g

    def _error(self, operator: Operator, reading: Reading[_Look]) -> float:
        """The marginal error of a look, reported; refuses what rounding makes hopeless."""
        (gap, size), seen = reading.numbers, reading.kept
        floor = rounding_floor(operator, size, seen.level)
        if self.progress is not None:
            self.progress("xy", seen.iteration, gap + floor)
        if seen.level == self.epsilon:
            check_reachable(self.options.tolerance, floor, self.epsilon, operator.dtype)
        return gap + floor


def alternate(operator: Operator, epsilon: float, state: State) -> State:
    """One iteration: (f, g, .) -> (T(g), T'(T(g)), g)."""
    f, g, _ = state
    f = operator.softmin_rows(g, epsilon, f)
    return f, operator.softmin_columns(f, epsilon, g), g


def _measured(operator: Operator, look: _Look, updated: Tensor) -> Tensor:
    """||c - b||_1 of the plan of (f, g), from the update of g, and the potentials' magnitude."""
    columns = column_marginal(operator.b, look.g, updated, look.level)
    gap = (columns - operator.b).abs().sum()
    return torch.stack((gap, magnitude(operator, look.f, look.g)))
