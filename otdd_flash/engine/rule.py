"""Transport problems that are solved side by side, and the iterations that solve them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from otdd_flash.engine.segments import Costs
from otdd_flash.formulas.decision import Form, Goal, Levels


class Start(NamedTuple):
    """Where problems start: levels, and iterations (S,) taken before; on any device."""

    levels: Levels
    iterations: Tensor


class Rule(Protocol):
    """The iterations of all segments.

    Attributes:
        active: (S,) bool, which are not done.
        terms: (S, 8) float64, what is `Told` of each, of when it was active last.
    """

    @property
    def active(self) -> Tensor: ...

    @property
    def terms(self) -> Tensor: ...

    def step(self) -> None:
        """One iteration; nothing of segments that are not active changes."""
        ...

    def restart(self, aim: float) -> None:
        """Go on at the final epsilon to so many times the tolerance, from other candidates."""
        ...

    def keep(self, order: Tensor) -> None:
        """Go on with the segments `order` (S',) only, in that order."""
        ...


class Segments(Costs, Protocol):
    """S transport problems and their vectors."""

    def coarse(self, tolerance: float) -> Segments | None:
        """The same problems in a faster form, which leaves its last candidates; None without one.

        It can reach a marginal error of `tolerance` if these problems can.
        """
        ...

    def iterations(self, goal: Goal, form: Form, start: Start) -> Rule:
        """The iterations of all segments, where their passes run."""
        ...

    def repeat(self, step: Callable[[], None]) -> None:
        """Take as many iterations as pay before the device is asked which segments are done."""
        ...

    def keep(self, order: Tensor) -> None:
        """Go on with the segments `order` (S',) only, in that order."""
        ...
