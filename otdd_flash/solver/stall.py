"""When iterations at one epsilon get nowhere any more, because rounding has the last word."""

from __future__ import annotations

from typing import NamedTuple

# Evaluations in which the marginal error has to fall to this part of itself, and how near the
# rounding floor that is asked for. A worst-case floor is soon near: to ask for half of the error
# ends solves that converge slowly.
PATIENCE, FALLEN, FLOORS = 10, 0.9, 10.0


class Progressed(NamedTuple):
    """How far iterations had come: the lowest marginal error and the highest dual value so far."""

    iteration: int
    gap: float
    dual: float


class Stall:
    """Watches the evaluations of one solve at its final epsilon.

    It is over when, within `FLOORS` times the rounding floor, `PATIENCE` evaluations have neither
    lowered the marginal error to `FALLEN` of what it was nor raised the dual value by more than its
    rounding.
    """

    def __init__(self) -> None:
        self._seen: list[Progressed] = []

    def over(self, iteration: int, gap: float, dual: float, *, floor: float, unit: float) -> bool:
        """Learn of an evaluation; whether iterations should end.

        Args:
            iteration: its number.
            gap: its marginal error, as computed.
            dual: its dual value.
            floor: the marginal error that rounding may hide.
            unit: the rounding of the dual value.
        """
        if self._seen:
            gap, dual = min(gap, self._seen[-1].gap), max(dual, self._seen[-1].dual)
        self._seen.append(Progressed(iteration, gap, dual))
        before = [seen for seen in self._seen if seen.iteration <= iteration - PATIENCE]
        if not before or gap > FLOORS * floor:
            return False
        self._seen = self._seen[len(before) - 1 :]
        return gap > FALLEN * before[-1].gap and dual <= before[-1].dual + unit
