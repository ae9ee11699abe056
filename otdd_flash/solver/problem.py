"""Two labelled clouds and their class distances: the three terms of a divergence, and its solve."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.devices import check_one_device, resolve_device
from otdd_flash.dimensions import check_same_dimension
from otdd_flash.errors import InputError
from otdd_flash.operators.base import Operator
from otdd_flash.operators.build import (
    ComputeOptions,
    build_operator,
    check_resources,
    cost_size,
)
from otdd_flash.operators.ground import NO_OFFSET, GroundCost
from otdd_flash.operators.memory import within_memory
from otdd_flash.samples import LabeledSamples, real_tensor
from otdd_flash.solver.class_blocks import ROUNDING, largest_entry, symmetrized
from otdd_flash.solver.divergence import Divergence, solve_divergence, solve_identical
from otdd_flash.solver.epsilon import EpsilonOutOfRange
from otdd_flash.solver.schedule import Progress, Schedule
from otdd_flash.solver.term import TransportTerm
from otdd_flash.solver.term_solves import Known, Solved, Start

Cloud = LabeledSamples | Tensor

# Of the largest cost: an epsilon below this is too small for float64 as well.
WITHIN_DOUBLE = 1e-12


class TermInputs(NamedTuple):
    """What the cost of one term is made of: two clouds, their block of W (V_x, V_y), weights."""

    source: LabeledSamples
    target: LabeledSamples
    class_distances: Tensor
    weights: GroundCost


class Problem:
    """Two clouds, checked, and the three costs between them.

    Args:
        source: n points, with labels and weights if they are `LabeledSamples`.
        target: m points, likewise.
        epsilon: regularisation, in units of the cost.
        class_table: W (V_x + V_y, V_x + V_y), squared distances between all classes, on any device;
            None is 0.
        cost: what it compares and its weights, half the squared distances by default.
        compute: where and how passes run.

    Attributes:
        given: both clouds.
        source: n points as the cost sees them.
        target: m points likewise.
        weights: of squared distances between these.
        device: where passes run.
        table: W (V_x + V_y, V_x + V_y), float64, on the device.
        classes: the rows and columns of the table that belong to "x" and to "y".

    Raises:
        InputError: a bad epsilon, or one that the precision cannot hold, clouds on two devices or
            of different dimension, a table of another size or not finite, or no such device.
    """

    def __init__(
        self,
        source: Cloud,
        target: Cloud,
        epsilon: float,
        class_table: Tensor | None = None,
        cost: GroundCost | None = None,
        compute: ComputeOptions | None = None,
    ) -> None:
        self.epsilon = epsilon
        self.given = _as_samples(source), _as_samples(target)
        self.source, self.target = self.given
        check_one_device(self.source.features.device, self.target.features.device)
        check_same_dimension(self.source, self.target)
        self.cost, self.compute = cost or GroundCost(), compute or ComputeOptions()
        self.weights = self.cost.squared
        same = self.source is self.target
        self.source = self.cost.seen(self.source)
        self.target = self.source if same else self.cost.seen(self.target)
        if epsilon > torch.finfo(self.compute.dtype).max / 4:
            in_double = epsilon < torch.finfo(torch.float64).max / 4
            raise EpsilonOutOfRange(
                f"{{given}} overflows in precision={self.compute.precision}; lower {{name}}"
                f"{' or set precision=double' if in_double else ''}",
                epsilon,
            )
        if epsilon < torch.finfo(self.compute.dtype).tiny:
            in_double = epsilon > WITHIN_DOUBLE * self._largest_cost()
            raise EpsilonOutOfRange(
                f"{{given}} underflows in precision={self.compute.precision}; raise "
                f"{{name}}{', scale' if in_double else ' or scale'} the features up"
                f"{' or set precision=double' if in_double else ''}",
                epsilon,
            )
        self.device = resolve_device(self.compute.device)
        sizes = self.source.class_total, self.target.class_total
        self.table = _checked_table(class_table, sizes, self.device)
        self.classes = {"x": slice(0, sizes[0]), "y": slice(sizes[0], sum(sizes))}
        self._sides = {"x": self.source, "y": self.target}

    def _largest_cost(self) -> float:
        """A bound on ||x - y||^2 lambda_x, float64."""
        largest = max(float(side.features.abs().amax()) for side in (self.source, self.target))
        return self.weights.lambda_x * self.source.dim * (2 * largest) ** 2

    @property
    def identical(self) -> bool:
        """Whether both sides are the same samples at the same class distances."""
        # Different clouds nearly always differ in their first row, which is read faster than all.
        one, other = self.source, self.target
        if len(one) != len(other) or not torch.equal(one.features[0], other.features[0]):
            return False
        return (one is other or one.fingerprint == other.fingerprint) and all(
            torch.allclose(self.block("xx"), self.block(term), rtol=1e-6, atol=0)
            for term in ("xy", "yy")
        )

    def block(self, term: str) -> Tensor:
        """The class distances of the term "xy", "xx" or "yy"; [y, x] is never read.

        Raises:
            InputError: the block of a self term is not symmetric.
        """
        return self._self_blocks[term] if term in ("xx", "yy") else self._given_block(term)

    def inputs(self, term: str) -> TermInputs:
        """What the cost of a term is made of, on the device."""
        x, y = (self._on_device(side) for side in term)
        return TermInputs(x, y, self.block(term), self.weights)

    def operator(self, term: str) -> Operator:
        """The cost of a term."""
        return build_operator(*self.inputs(term), self.compute)

    def solve(
        self,
        options: Schedule,
        *,
        debias: bool = True,
        start: Start | None = None,
        known: Known | None = None,
        progress: Progress | None = None,
        solved: Solved | None = None,
    ) -> Divergence:
        """The divergence, or without `debias` the cross term alone.

        Clouds of equal fingerprint are one cloud: a single self term. `known` holds self terms that
        need no solve: the caller answers for their being of these clouds at this cost.

        Raises:
            InputError: the block of W of a self term is not symmetric, the backend cannot run on
                the device, or the memory is short: seen before the first term as far as possible,
                else when an allocation fails.
        """
        options = options.between(self.source.features, self.target.features)
        identical = debias and self.identical
        terms = ("xx",) if identical else ("xy", "xx", "yy") if debias else ("xy",)
        for term in terms:
            self.block(term)
        needed = max(
            check_resources(self._sides[term[0]], self._sides[term[1]], self.compute, self.device)
            for term in terms
        )

        def solve() -> Divergence:
            if identical:
                return solve_identical(
                    self.operator("xx"),
                    self.epsilon,
                    options,
                    start=start,
                    progress=progress,
                    solved=solved,
                )
            return solve_divergence(
                self.operator,
                self.epsilon,
                options,
                debias=debias,
                offset=NO_OFFSET if debias else self.cost.offset(*self.given),
                start=start,
                known=known,
                progress=progress,
                solved=solved,
            )

        size = cost_size(self.source, self.target)
        divergence = within_memory(solve, size, needed, self.device, self.compute.dtype)
        return divergence.widened(self.cost.error(self.source.dim))

    def cross_term(self, divergence: Divergence) -> TransportTerm:
        """The cross term for the cost itself, whose potentials have its terms of one side too."""
        term = divergence.xy
        p, q = (self.cost.one_side(side.features) for side in self.given)
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

    @cached_property
    def _self_blocks(self) -> dict[str, Tensor]:
        """The blocks of both self terms, symmetric; not asked for by a cross term alone."""
        blocks = {}
        for term in ("xx", "yy"):
            given = self._given_block(term)
            blocks[term] = symmetrized(
                f"the entries [{term[0]}, {term[1]}] of class_table",
                given,
                ROUNDING * largest_entry(given),
                "; squared distances are the same both ways: give W with W == W.T, or set "
                "debias=False, which reads the block [x, y] alone",
            )
        return blocks

    def _given_block(self, term: str) -> Tensor:
        return self.table[self.classes[term[0]], self.classes[term[1]]]

    def _on_device(self, side: str) -> LabeledSamples:
        """One side, moved to the device once for all terms."""
        held = self._sides[side]
        if held.features.device != self.device:
            moved = held.to(self.device)
            # Two sides that are one object stay one.
            self._sides = {
                key: moved if value is held else value for key, value in self._sides.items()
            }
        return self._sides[side]


def _checked_table(table: Tensor | None, sizes: tuple[int, int], device: torch.device) -> Tensor:
    """The class distances (V_x + V_y, V_x + V_y) on a device, zeros if there are none."""
    total = sum(sizes)
    if table is None:
        return torch.zeros(total, total, dtype=torch.float64, device=device)
    table = real_tensor("class_table", table)
    if table.shape != (total, total):
        raise InputError(
            f"class_table must have shape {(total, total)} for {sizes[0]} + {sizes[1]} classes, "
            f"got {tuple(table.shape)}"
        )
    bad = ~torch.isfinite(table)
    if bool(bad.any()):
        row, column = torch.nonzero(bad)[0].tolist()
        raise InputError(
            f"class_table holds {int(bad.sum())} NaN or infinite entries, the first at "
            f"[{row}, {column}]; measure it with otdd.class_distances, or give finite distances"
        )
    return table.to(device, torch.float64)


def _as_samples(cloud: Cloud) -> LabeledSamples:
    return cloud if isinstance(cloud, LabeledSamples) else LabeledSamples(cloud, None, ())
