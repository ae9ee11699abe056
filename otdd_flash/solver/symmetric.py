"""The self term OT_epsilon(x, x) with one potential.

The optimal potentials of a cloud against itself are equal, and the averaged update

    f <- (f + T(f)) / 2

converges to them in ten to twenty steps at any epsilon where exp(-C / epsilon) is positive
definite, so no scaling is needed (Feydy et al. 2019, Interpolating between optimal transport and
MMD using Sinkhorn divergences). Class distances can make it indefinite; it then takes longer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.operators.base import Operator
from otdd_flash.solver.certificate import (
    certify_self,
    column_marginal,
    magnitude,
    rounding_floor,
)
from otdd_flash.solver.late_reader import LateReader, Reading
from otdd_flash.solver.options import Progress, SolverOptions
from otdd_flash.solver.sweep import State, steps_between_looks, sweep
from otdd_flash.solver.term import TransportTerm, check_reachable


def solve_symmetric(
    operator: Operator,
    epsilon: float,
    options: SolverOptions,
    *,
    name: str = "xx",
    start: Tensor | None = None,
    progress: Progress | None = None,
) -> TransportTerm:
    """OT_epsilon of a cloud with itself.

    As in `solve_alternating`, an operator that rounds the points iterates first and its refined
    form ends the solve.

    Args:
        operator: the symmetric cost (n, n), with the same masses on both sides.
        epsilon: regularisation, in units of the cost.
        options: when to stop.
        name: which term this is, for `progress`.
        start: (n,) potential to start from.
        progress: called whenever the marginals were looked at, as progress(name, iteration, error).

    Raises:
        InputError: rounding alone exceeds the tolerance at this epsilon and precision.
    """
    f = torch.zeros_like(operator.a, dtype=operator.dtype) if start is None else start
    solve = _Solve(name, epsilon, options, progress)
    f = solve.iterate(operator, f)
    refined = operator.refined
    if refined is not operator:
        f = solve.iterate(refined, f)
    certificate, iterations = certify_self(refined, f, epsilon), solve.iterations + 1
    if progress is not None:
        progress(name, iterations, certificate.marginal_error)
    return TransportTerm.from_certificate(
        certificate,
        epsilon,
        iterations=iterations,
        passes=iterations,
        tolerance=options.tolerance,
    )


class _Look(NamedTuple):
    """The plan of f with itself after some iterations."""

    iteration: int
    f: Tensor


class _Solve:
    """The iterations of one term, counted over all operators that take part."""

    def __init__(
        self, name: str, epsilon: float, options: SolverOptions, progress: Progress | None
    ) -> None:
        self.name, self.epsilon, self.options, self.progress = name, epsilon, options, progress
        self.iterations = 0

    def iterate(self, operator: Operator, f: Tensor) -> Tensor:
        """Average f (n,) with its softmin until converged or out of budget."""
        reader: LateReader[_Look] = LateReader()
        # The certificate is the last iteration.
        while (left := self.options.max_iterations - 1 - self.iterations) > 0:
            count = min(left, steps_between_looks(operator))
            averaged, f, softmin = sweep(operator, _step, self.epsilon, (f, f, f), count)
            self.iterations += count
            look = _Look(self.iterations, f)
            reading = reader.exchange(_measured(operator, f, softmin, self.epsilon), look)
            f = averaged
            if reading is not None and self._error(operator, reading) <= self.options.tolerance:
                return reading.kept.f
        late = reader.last()
        if late is not None:
            self._error(operator, late)
        return f

    def _error(self, operator: Operator, reading: Reading[_Look]) -> float:
        """The marginal error of a look, reported; refuses what rounding makes hopeless."""
        (gap, size), seen = reading.numbers, reading.kept
        floor = rounding_floor(operator, size, self.epsilon)
        if self.progress is not None:
            self.progress(self.name, seen.iteration, gap + floor)
        check_reachable(self.options.tolerance, floor, self.epsilon, operator.dtype)
        return gap + floor


def _step(operator: Operator, epsilon: float, state: State) -> State:
    """(f, ., .) -> ((f + T(f)) / 2, f, T(f))."""
    f, *_ = state
    softmin = operator.softmin_rows(f, epsilon, f)
    return (f + softmin) / 2, f, softmin


def _measured(operator: Operator, f: Tensor, softmin: Tensor, epsilon: float) -> Tensor:
    """||r - a||_1 of the plan of f, scaled to mass 1, and the potential's magnitude."""
    masses = column_marginal(operator.a, f, softmin, epsilon)
    gap = (masses / masses.sum() - operator.a).abs().sum()
    return torch.stack((gap, magnitude(operator, f, f)))
