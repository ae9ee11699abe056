"""The interface between the engine and transport problems, one or many side by side.

A segment is one problem: a cost C (n, m) with masses a (n,) and b (m,). The engine holds the
potentials f (n,) of the last evaluation, and these vectors of the columns (m,):

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
`quasi_newton_kernels` in Triton. Their iterations are `Iterations`, which say when a segment is
done. `solver.solve` calls `run` for many segments and `run_one` for one. Both repeat iterations;
`run` stores the terms of segments that have finished and goes on with the others. Whether a segment
is done is decided on the device. On a GPU the host reads this one step late (`LateReader`, also of
`derivatives.plan_system` and `operators.parts`), so that the device does not wait for the host.

The problems are in `operators` (`operators.one_problem`, `operators.kernel_segments`, ...). The
numbers of a segment must not depend on the segments beside it, to the last bit.
`kernels.segments.decision` writes moves and terms in the order of the fields of `Move` and
`SegmentReport`, so a change of these must be made there too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

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
        mean_step: number subtracted from the newest step to give it mean zero.
        mean_difference: number subtracted from the residual difference to give it mean zero.
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
    rounding then are those of C', and `offset` has to be added to the value.
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
        """Bounds of the rounding errors of a pass; of a coarse form, estimates."""
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
        """Exact or relaxed marginals of both sides."""
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
            active: which problems to evaluate; results of the others are unspecified.
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
    """The start of problems: levels, and iterations (S,) taken before; on any device."""

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
        terms: (S, 8) float64, the `SegmentReport` of each, of when it was active last.
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


# finished(count): so many more segments are done.
Finished = Callable[[int], None]

# watch(marginal error, iterations): of one segment, whether to end.
Watch = Callable[[float, int], bool]


class SegmentTerms(NamedTuple):
    """OT_epsilon of many problems, (S,) float64 each, as `term.TransportTerm` has it for one.

    Attributes:
        value: the dual value.
        lower: lower bound.
        upper: upper bound.
        marginal_error: bound of the larger of ||P 1 - a||_1, ||P^T 1 - b||_1, rounding included.
        rounding: the part of `marginal_error` that rounding may hide; all of it where iterations
            no longer lower it.
        iterations: evaluations of both potentials, or at the only one.
    """

    value: Tensor
    lower: Tensor
    upper: Tensor
    marginal_error: Tensor
    rounding: Tensor
    iterations: Tensor


class SegmentReport(NamedTuple):
    """The numbers of a segment in `Iterations.terms`: its `SegmentTerms`, and two more.

    Attributes:
        value: as in `SegmentTerms`.
        lower: as in `SegmentTerms`.
        upper: as in `SegmentTerms`.
        marginal_error: as in `SegmentTerms`.
        rounding: as in `SegmentTerms`.
        iterations: as in `SegmentTerms`.
        size: <a, |f|> + <b, |g|> of the potentials, both of which are one in a self term.
        active: 1 until the segment is done, then 0.
    """

    value: float
    lower: float
    upper: float
    marginal_error: float
    rounding: float
    iterations: float
    size: float
    active: float


def run(iterations: Iterations, finished: Finished | None = None) -> SegmentTerms:
    """Iterate until all segments are done; there are none afterwards.

    Args:
        iterations: of the segments.
        finished: called with how many segments are done.
    """
    results = torch.zeros_like(iterations.terms)
    left = torch.arange(len(results), device=results.device)
    reader = LateReader()
    while len(left):
        iterations.advance()
        numbers = reader.exchange(iterations.active.sum().reshape(1))
        if numbers is None or numbers[0] == len(left):
            continue
        results[left] = iterations.terms
        order = _compacted(iterations.active)
        if finished is not None:
            finished(len(left) - len(order))
        left = left[order]
        iterations.keep(order)
        reader = LateReader()
    return SegmentTerms(*results[:, : len(SegmentTerms._fields)].unbind(1))


def run_one(iterations: Iterations, watch: Watch) -> SegmentReport:
    """Iterate until the only segment is done or `watch` ends it; return the last numbers read.

    Args:
        iterations: of the segment.
        watch: called with every reading.
    """
    reader = LateReader(wait=iterations.waits)
    while True:
        iterations.advance()
        numbers = reader.exchange(iterations.terms[0])
        if numbers is None:
            continue
        report = SegmentReport(*numbers)
        if watch(report.marginal_error, int(report.iterations)) or not report.active:
            return report


def _compacted(active: Tensor) -> Tensor:
    """Order the active segments: in place where possible, the last ones in places left free."""
    kept = torch.nonzero(active).squeeze(1)
    order = torch.arange(len(kept), device=active.device)
    order[~active[: len(kept)]] = kept[kept >= len(kept)]
    return order


class LateReader:
    """Hands out the numbers of the step before the one that was just launched.

    While the host waits for them the device already works on the next step. On a CPU, where nothing
    runs behind the host's back, a step's own numbers come back at once.

    Args:
        wait: hand out a step's own numbers on a GPU too: for steps that take longer than to launch
            the next one, which may not be needed.
    """

    def __init__(self, *, wait: bool = False) -> None:
        self._wait = wait
        self._pending: tuple[Tensor, Any] | None = None

    def exchange(self, numbers: Tensor) -> list[float] | None:
        """Send a few numbers (k,); receive those sent before, or None the first time on a GPU."""
        if self._wait or not numbers.is_cuda:
            return numbers.tolist()
        copied = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        copied.copy_(numbers, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record(torch.cuda.current_stream(numbers.device))
        before, self._pending = self._pending, (copied, arrived)
        return None if before is None else _wait(*before)

    def last(self) -> list[float] | None:
        """Receive the numbers that are still on their way."""
        before, self._pending = self._pending, None
        return None if before is None else _wait(*before)


def _wait(copied: Tensor, arrived: Any) -> list[float]:
    arrived.synchronize()
    return copied.tolist()
