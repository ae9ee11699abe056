"""What the engine asks of transport problems, one or many side by side, and what it answers.

A segment is one problem: a cost C (n, m) with masses a (n,) and b (m,). The engine holds its
vectors, all of its columns (m,), and only they:

    candidate            the potential g to evaluate next;
    kept, residual       the g that was kept last, and r = T'(T(g)) - g there;
    remembered           `memory` steps s of g and their residual differences y;
    level                the g at which the last level of epsilon ended.

An evaluation asks the problems for T(g) and T'(T(g)) of the candidate, two softmins, and makes some
numbers of them for each segment. Among them are inner products of the vectors, <u, v> = sum_j b_j
u_j v_j. Decisions are made from these numbers alone and never read the vectors. A decision is a few
coefficients, and a move makes the next candidate: the combination of the vectors with these
coefficients. A problem of a cloud with itself has one potential, its rows are its columns, and
r = T(g) - g. Where a marginal is relaxed, T'(T(g)) is translated by `Constraints.translation`.

Problems choose how they hold scores: `TorchProblems` in PyTorch, `KernelProblems` of
`quasi_newton_kernels` in Triton. Their iterations are `Iterations`, which `run` repeats. The
problems are in `operators` (`operators.one_problem`, `operators.kernel_segments`, ...). The numbers
of a segment must not depend on the segments beside it, to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from otdd_flash.formulas.decision import Decision, Form, Goal, Levels
from otdd_flash.formulas.differences import Step
from otdd_flash.formulas.evidence import CostNumbers, Evaluation, PassErrors
from otdd_flash.formulas.marginals import Constraints
from otdd_flash.formulas.operations import Numbers


class WeightedPoints(NamedTuple):
    """A cloud.

    Attributes:
        points: (n, d), of any real type.
        masses: (n,) float64, positive, summing to 1.
    """

    points: Tensor
    masses: Tensor


class Move(NamedTuple):
    """How to go on after an evaluation; (S,) each if nothing else is said.

    With g and r those of the candidate where it is kept, and else those kept before, the next
    candidate is

        h = g + scale r + shift + sum_k weights_k remembered_k,

    and where a level ends h + extrapolation (h - level), with level <- h. Columns without mass, of
    which differences say nothing, take their softmin.

    Attributes:
        kept: bool.
        learnt: bool, whether the newest differences are remembered, in `slot`.
        slot: int64, below memory.
        mean_step: what the newest step is lowered by to have mean zero.
        mean_difference: likewise the residual difference.
        scale: float64.
        shift: float64.
        ends: bool, whether a level of epsilon ends here.
        extrapolation: float64, the share of the way from the end of the level before to here that
            the candidate goes on; 0 but where a level ends.
        weights: (S, 2 memory) float64, of steps and of residual differences, the newest among them.
    """

    kept: Numbers
    learnt: Numbers
    slot: Numbers
    mean_step: Numbers
    mean_difference: Numbers
    scale: Numbers
    shift: Numbers
    ends: Numbers
    extrapolation: Numbers
    weights: Numbers

    @classmethod
    def after(cls, found: Evaluation, decision: Decision, slot: Numbers, step: Step) -> Move:
        """Return the move after an evaluation, whose differences go into a slot."""
        return cls(
            decision.kept,
            step.learnt,
            slot,
            found.mean_step,
            found.mean_difference,
            step.scale,
            step.shift,
            decision.changes,
            decision.extrapolation,
            step.weights,
        )

    @property
    def numbers(self) -> Tensor:
        """The fields as (S, 9 + 2 memory) float64, in this order."""
        return torch.cat((torch.stack([part.double() for part in self[:-1]], 1), self.weights), 1)


class Costs(Protocol):
    """The costs of S transport problems; all attributes of shape (S,) are float64.

    Costs may be known up to terms of one side, C_ij = C'_ij + p_i + q_j: potentials, spread and
    rounding then are those of C', and `offset` is what the value has to be raised by.
    """

    @property
    def dtype(self) -> torch.dtype:
        """The type of the potentials."""
        ...

    @property
    def sum_dtype(self) -> torch.dtype:
        """The type in which exponentials are summed."""
        ...

    @property
    def mean_cost(self) -> Numbers:
        """Bound on the mean |C'| over a plan, where epsilon scaling starts (S,)."""
        ...

    @property
    def cost_spread(self) -> Numbers:
        """R >= max C' - min C' over the support (S,)."""
        ...

    @property
    def errors(self) -> PassErrors:
        """What rounding may do to a pass; of a coarse form, about what it does."""
        ...

    @property
    def offset(self) -> Numbers:
        """<a, p> + <b, q> (S,)."""
        ...


class TorchProblems(Protocol):
    """S transport problems of one padded length whose passes run in PyTorch.

    Masses are 0 for padding. Where problems are left out (`keep`), S falls.
    """

    @property
    def constraints(self) -> Constraints:
        """What marginals owe."""
        ...

    @property
    def row_masses(self) -> Tensor | None:
        """a (S, n) float64; None of clouds with themselves."""
        ...

    @property
    def column_masses(self) -> Tensor:
        """b (S, m) float64."""
        ...

    def softmins(
        self,
        g: Tensor,
        before: Tensor | None,
        epsilon: Sequence[float] | Tensor,
        active: Sequence[bool] | Tensor,
    ) -> tuple[Tensor | None, Tensor]:
        """Return f = T(g) (S, n) and T'(f) (S, m), or None and T(g) of clouds with themselves.

        T and T' are the updates of potentials: softmins, and what the marginals make of them.

        Args:
            g: (S, m) potentials of columns.
            before: (S, n) the f returned last, zeros at first; those of problems that are not
                active are returned again. None of clouds with themselves.
            epsilon: of each problem, in units of the cost.
            active: which problems to evaluate; what is returned of the others is unspecified.
        """
        ...


def numbers_of(costs: Costs) -> CostNumbers:
    """Return what formulas take of costs."""
    facts = costs.mean_cost, costs.cost_spread, costs.offset, costs.errors
    return CostNumbers(*facts, *units_of(costs))


def units_of(costs: Costs) -> tuple[float, float]:
    """Return the unit roundoffs of potentials and of sums of exponentials."""
    return torch.finfo(costs.dtype).eps / 2, torch.finfo(costs.sum_dtype).eps / 2


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
        terms: (S, 8) float64, the `run.SegmentReport` of each, of when it was active last.
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
