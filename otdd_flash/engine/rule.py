"""Transport problems that are solved side by side, and the iterations that solve them."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from otdd_flash.engine.segments import Costs
from otdd_flash.formulas.decision import Form, Goal, Levels


class Start(NamedTuple):
    """Where problems start: levels, and iterations (S,) taken before; on any device."""

    levels: Levels
    iterations: Tensor


class Vectors(Protocol):
    """The potentials of all problems, in the layout of the problems."""

    @property
    def candidates(self) -> Tensor:
        """The last candidates g of all problems, those that were left out included."""
        ...

    @property
    def rows(self) -> Tensor | None:
        """The f of the last evaluation; None of clouds with themselves that hold no rows."""
        ...

    @property
    def kept(self) -> Tensor:
        """The g that were kept last, the first candidates before any evaluation."""
        ...

    @property
    def updated(self) -> Tensor:
        """T'(T(g)) of these, or T(g) of clouds with themselves; g before any evaluation.

        Kernels may leave out columns without mass.
        """
        ...


class Evaluated(NamedTuple):
    """Potentials of the last evaluation, in the layout of whoever asks.

    Attributes:
        f: T(g) of rows; g of a cloud with itself.
        g: that of columns that was kept last, the first candidate before any evaluation.
        updated: T'(f), or T(g) of a cloud with itself; g before any evaluation.
    """

    f: Tensor
    g: Tensor
    updated: Tensor


class Iterations(Protocol):
    """The iterations of all segments, which own their vectors.

    Attributes:
        active: (S,) bool, which are not done.
        terms: (S, 8) float64, what is `Told` of each, of when it was active last.
        vectors: potentials and what else is remembered of each column.
        waits: whether to ask the device after every step, as one takes longer than to launch the
            next.
    """

    @property
    def active(self) -> Tensor: ...

    @property
    def terms(self) -> Tensor: ...

    @property
    def vectors(self) -> Vectors: ...

    @property
    def waits(self) -> bool: ...

    def step(self) -> None:
        """Take one iteration; nothing of segments that are not active changes."""
        ...

    def advance(self) -> None:
        """Take as many iterations as pay before the device is asked which segments are done."""
        ...

    def restart(self, candidate: Tensor, aim: float) -> None:
        """Go on at the final epsilon to so many times the tolerance, from other candidates."""
        ...

    def keep(self, order: Tensor) -> None:
        """Go on with the segments `order` (S',) only, in that order."""
        ...


class Segments(Costs, Protocol):
    """S transport problems that are solved side by side."""

    @property
    def first(self) -> Tensor:
        """Potentials of columns to begin from, in the layout of the problems."""
        ...

    def coarse(self, tolerance: float) -> Segments | None:
        """The same problems in a faster form; None without one.

        It can reach a marginal error of `tolerance` if these problems can.
        """
        ...

    def iterations(self, candidate: Tensor, goal: Goal, form: Form, start: Start) -> Iterations:
        """Make the iterations of all segments, where their passes run; used up by them."""
        ...
