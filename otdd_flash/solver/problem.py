"""Two labelled clouds and their class distances: the three terms of a divergence, and its solve."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from otdd_flash.errors import InputError
from otdd_flash.fingerprint import Mark, mark_of, mark_of_tensors
from otdd_flash.operators.base import Operator
from otdd_flash.operators.build import ComputeOptions, CostInputs, build_operator
from otdd_flash.operators.class_table import ClassBlocks
from otdd_flash.operators.ground import NO_OFFSET, GroundCost
from otdd_flash.operators.request import Pair, Request, check_comparable
from otdd_flash.samples import LabeledSamples, largest_entry, same_content
from otdd_flash.solver.divergence import (
    Divergence,
    Known,
    Potentials,
    Pulled,
    Solved,
    checked_start,
    solve_divergence,
    solve_identical,
)
from otdd_flash.solver.schedules.base import Schedule
from otdd_flash.solver.schedules.converged import Converged
from otdd_flash.solver.schedules.geomloss import GeomlossSchedule, at_diameter
from otdd_flash.solver.small.route import backend_of, is_small, solve_small
from otdd_flash.solver.term.result import SolverProgress, TransportTerm
from otdd_flash.solver.term.tolerance import EpsilonOutOfRange

Cloud = LabeledSamples | Tensor

# Of the largest cost: an epsilon below this is too small for float64 as well.
WITHIN_DOUBLE = 1e-12

# Most by which costs that float64 knows no better may move the plan and its marginals: what a solve
# has to reach by default.
MOST_GROWTH = 1e-3

# The rows' and the columns' side of each term.
SIDES: dict[str, Pair] = {"xy": (0, 1), "xx": (0, 0), "yy": (1, 1)}


def terms_of(*, debias: bool) -> Iterable[Pair]:
    """The pairs of sides that a divergence compares, the cross term first."""
    return SIDES.values() if debias else (SIDES["xy"],)


class Problem:
    """A request for two datasets, their class distances and epsilon: three costs between them.

    Args:
        request: two clouds, checked and on the device.
        epsilon: regularisation, in units of the cost.
        class_table: W (V_x + V_y, V_x + V_y), squared distances between all classes, on any device;
            None is 0. Or its blocks, which are not checked again.

    Attributes:
        table: W (V_x + V_y, V_x + V_y), float64, on the device.
        classes: the rows and columns of the table that belong to "x" and to "y".

    Raises:
        InputError: a bad epsilon, or one that the precision cannot hold, or a table of another size
            or not finite.
    """

    def __init__(
        self,
        request: Request,
        epsilon: float,
        class_table: Tensor | ClassBlocks | None = None,
    ) -> None:
        self.request, self.epsilon = request, epsilon
        self._check_epsilon()
        if not isinstance(class_table, ClassBlocks):
            x, y = request.seen
            sizes = x.class_total, y.class_total
            class_table = ClassBlocks(class_table, sizes, request.device)
        self._blocks = class_table
        self.table, self.classes = class_table.table, class_table.classes

    @classmethod
    def between(
        cls,
        source: Cloud,
        target: Cloud,
        epsilon: float,
        class_table: Tensor | None = None,
        cost: GroundCost | None = None,
        compute: ComputeOptions | None = None,
        *,
        debias: bool = True,
        resident: bool = False,
    ) -> Problem:
        """The problem of two clouds, with labels and weights if they are samples.

        Without `debias` it must not be asked for self terms; `resident` as for `Request.prepare`.

        Raises:
            InputError: as the class, or as `check_comparable` and `Request.prepare`.
        """
        sides = _as_samples(source), _as_samples(target)
        check_comparable(*sides)
        cost, compute = cost or GroundCost(), compute or ComputeOptions()
        pairs = terms_of(debias=debias)
        request = Request.prepare(sides, cost, compute, pairs=pairs, resident=resident)
        return cls(request, epsilon, class_table)

    def _check_epsilon(self) -> None:
        """Refuse an epsilon that scores cannot be divided by in their type."""
        epsilon, compute = self.epsilon, self.request.compute
        if epsilon > torch.finfo(compute.dtype).max / 4:
            in_double = epsilon < torch.finfo(torch.float64).max / 4
            raise EpsilonOutOfRange(
                f"{{given}} overflows in precision={compute.precision}; lower {{name}}"
                f"{' or set precision=double' if in_double else ''}",
                epsilon,
            )
        if epsilon < torch.finfo(compute.dtype).tiny:
            in_double = (
                compute.dtype != torch.float64 and epsilon > WITHIN_DOUBLE * self._largest_cost()
            )
            raise EpsilonOutOfRange(
                f"{{given}} underflows in precision={compute.precision}; raise "
                f"{{name}}{', scale' if in_double else ' or scale'} the features up"
                f"{' or set precision=double' if in_double else ''}",
                epsilon,
            )

    def _largest_cost(self) -> float:
        """A bound on ||x - y||^2 lambda_x, float64."""
        sides = self.request.seen
        largest = max(float(largest_entry(side.features)) for side in sides)
        return self.request.cost.squared.lambda_x * sides[0].dim * (2 * largest) ** 2

    @property
    def identical(self) -> bool:
        """Whether both sides are the same samples at the same class distances."""
        return same_content(*self.request.seen) and all(
            torch.equal(self.block("xx"), self.block(term)) for term in ("xy", "yy")
        )

    @property
    def mark(self) -> Mark:
        """What changes where something that it reads does, see `fingerprint`."""
        sides = (mark_of(side) for side in self.request.given)
        return (*chain(*sides), *mark_of_tensors(self.table))

    def check_unchanged(self, mark: Mark) -> None:
        """Refuse derivatives at points that are not those that it was solved for.

        Args:
            mark: of then.

        Raises:
            InputError: something was changed in place since.
        """
        if self.mark != mark:
            raise InputError(
                "an input was changed in place after the loss was computed, and its second "
                "derivative needs it as it was; clone it before"
            )

    def block(self, term: str) -> Tensor:
        """The class distances of the term "xy", "xx" or "yy"; [y, x] is never read.

        Raises:
            InputError: the block of a self term is not symmetric.
        """
        return self._blocks.of(term)

    def inputs(self, term: str) -> CostInputs:
        """What the cost of a term is made of, on the device."""
        return self.request.inputs(SIDES[term], self.block(term))

    def operator(self, term: str) -> Operator:
        return build_operator(self.inputs(term))

    def solve(
        self,
        options: Schedule,
        *,
        debias: bool = True,
        start: Potentials | None = None,
        known: Known | None = None,
        progress: SolverProgress | None = None,
        solved: Solved | None = None,
        pulled: Pulled | None = None,
    ) -> Divergence:
        """The divergence, or without `debias` the cross term alone.

        Clouds of equal fingerprint are one cloud: a single self term. `known` holds self terms that
        need no solve, though small ones get one with the others: the caller answers for their being
        of these clouds at this cost. A solve that has the gradient by the points at hand tells it
        to `pulled`, and `solved` nothing.

        Raises:
            InputError: the block of W of a self term is not symmetric, or an allocation fails.
        """
        request = self.request
        x, y = request.seen
        if isinstance(options, GeomlossSchedule):
            options = at_diameter(options, x.features, y.features)
        error = request.cost.error(x.dim)
        if error > MOST_GROWTH * self.epsilon:
            raise EpsilonOutOfRange(
                f"{{given}} is too small for ground={request.cost.ground}, whose costs are off by "
                f"up to {error:.2g}: rounding alone moves the marginals by more than "
                f"{MOST_GROWTH:g}; centre the features, or raise {{name}} to about {{advised}}",
                self.epsilon,
                1.1 * error / MOST_GROWTH,
            )
        identical = debias and self.identical
        with request.within_memory():
            offset = NO_OFFSET if debias else request.cost.offset(*request.given)
            small = None
            if not identical and isinstance(options, Converged) and is_small(request, options):
                small = solve_small(
                    request,
                    self._blocks.given,
                    self.epsilon,
                    options,
                    debias=debias,
                    start=start,
                    progress=progress,
                    solved=solved,
                    pulled=pulled,
                )
            if small is not None:
                divergence = Divergence.of_terms(small, options, offset, backend_of(request))
            elif identical:
                divergence = solve_identical(
                    self.operator("xx"),
                    self.epsilon,
                    options,
                    start=start,
                    progress=progress,
                    solved=solved,
                )
            else:
                # All of them, before the first takes its time.
                for term in ("xy", "xx", "yy") if debias else ("xy",):
                    self.block(term)
                divergence = solve_divergence(
                    self.operator,
                    self.epsilon,
                    options,
                    debias=debias,
                    offset=offset,
                    start=start,
                    known=known,
                    progress=progress,
                    solved=solved,
                )
        return divergence.widened(error)

    def checked_start(self, start: Potentials | None) -> Potentials:
        """Return potentials that a user starts from, see `divergence.checked_start`."""
        x, y = self.request.seen
        return checked_start(start, (len(x), len(y)), self.request.device)

    def cross_term(self, divergence: Divergence) -> TransportTerm:
        """The cross term for the cost itself, whose potentials have its terms of one side too."""
        term = divergence.xy
        p, q = (self.request.cost.one_side(side.features) for side in self.request.given)
        if p is None or q is None:
            return term
        low, high = term.bounds
        value, error = divergence.offset
        return replace(
            term,
            f=term.f.double() + p.to(term.f.device),
            g=term.g.double() + q.to(term.g.device),
            value=term.value + value,
            bounds=(low + value - error, high + value + error),
        )


def _as_samples(cloud: Cloud) -> LabeledSamples:
    return cloud if isinstance(cloud, LabeledSamples) else LabeledSamples(cloud, None, ())
