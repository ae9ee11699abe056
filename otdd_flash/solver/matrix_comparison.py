"""A cost matrix with its masses: checked, moved to the device, with an operator for each term.

`matrix.transport`, `matrix.gradients` and loaded results (`matrix.result`) build one by
`MatrixComparison.prepare`. `solver.solving` and the solvers that it calls (`solver.small`,
`solver.divergence`, `solver.exact`) read it, and `derivatives.groups` takes its costs and masses.

These read a `Comparison` of point clouds (`operators.comparison`) in the same way. So a member of
it that they read must be here too, also if it is a constant, such as `signed`. Costs must stay
those that were given, in their floating-point type: results find their matrix again by its
fingerprint (`tests/matrix/test_saved.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from otdd_flash.cost.compute import Compute, ComputeOptions, scores_fit, uses_triton
from otdd_flash.cost.facts import SIDES, TERMS
from otdd_flash.cost.ground import NO_OFFSET, Offset
from otdd_flash.devices import resolve_device
from otdd_flash.errors import EpsilonOutOfRange, InputError
from otdd_flash.formulas.marginals import EXACT, Constraints
from otdd_flash.operators.base import Operator
from otdd_flash.operators.given_costs import (
    CostBlocks,
    CostSource,
    FunctionCosts,
    GivenCosts,
    HeldCosts,
    MatrixFacts,
    exact_blocks,
    matrix_facts,
    matrix_operator,
)
from otdd_flash.operators.torch_operator import TorchOperator
from otdd_flash.real_numbers import in_double, in_floating_point, real_tensor
from otdd_flash.solver.penalties import Unbalanced, resolve_constraints
from otdd_flash.solver.tensors import MASS_TOLERANCE

# The types of the costs that `matrix_transport` takes.
Costs = Tensor | np.ndarray[Any, Any] | CostBlocks

HELD_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# A matrix counts as symmetric up to so many unit roundoffs of its largest entry.
SYMMETRIC_UNITS = 64


class SelfCosts(NamedTuple):
    """A matrix C (n, n) for (C + C^T) / 2, and its errors max_j |C_ij - C_ji| / 2 (n,), float64."""

    matrix: Tensor
    errors: Tensor


@dataclass(frozen=True, eq=False)
class MatrixComparison:
    """Costs C (n, m) between masses a and b, and costs within both sides for a divergence.

    `prepare` makes one; `at` returns it at an epsilon, which is 0 until then.

    Attributes:
        source: C, stored or computed in blocks, on the device.
        a: (n,) masses, float64, on the device.
        b: (m,) masses, float64, on the device.
        compute: how passes run.
        self_costs: C_xx (n, n) and C_yy (m, m) for a divergence, on the device.
        epsilon: regularisation, in units of the cost.
        constraints: exact or relaxed marginals of plans.
        identical: False: equal masses at equal costs are not looked for.
        cost_error: 0: costs are those that were given.
        signed: False: self terms are of one cloud.
    """

    identical, cost_error, signed = False, 0.0, False

    source: CostSource
    a: Tensor
    b: Tensor
    compute: ComputeOptions
    self_costs: tuple[SelfCosts, SelfCosts] | None = None
    epsilon: float = 0.0
    constraints: Constraints = EXACT

    @classmethod
    def prepare(
        cls,
        costs: Costs,
        a: Any,
        b: Any,
        compute: Compute | None,
        self_costs: Sequence[Any] | None = None,
        *,
        precision: str = "fast",
    ) -> MatrixComparison:
        """Check a matrix and its masses, and move them to the device.

        Without `compute` that is the device of the costs, and `precision` counts.

        Raises:
            InputError: no matrix, masses that do not fit it or do not sum to 1, or self costs that
                do not fit, are not finite or not symmetric.
        """
        given = None if isinstance(costs, CostBlocks) else given_matrix("costs", costs)
        if compute is None:
            device = None if given is None else given.device
        else:
            device = resolve_device(ComputeOptions.of(compute).device)
        source: CostSource
        if given is None:
            assert isinstance(costs, CostBlocks)
            source = FunctionCosts(costs, device)
        else:
            source = HeldCosts(given.to(device))
        device, dtype = source.device, source.dtype
        chosen = ComputeOptions.of(compute)
        if compute is None:
            chosen = ComputeOptions(str(device), precision=precision)
        if dtype == torch.float64:
            chosen = replace(chosen, precision="double")
        if isinstance(source, FunctionCosts) and scores_fit(source.shape, dtype, chosen, device):
            source = HeldCosts(source.held())
        n, m = source.shape
        masses = (checked_masses("a", a, n).to(device), checked_masses("b", b, m).to(device))
        own = None if self_costs is None else checked_self_costs(self_costs, (n, m), device)
        return cls(source, *masses, chosen, own)

    def at(self, epsilon: float) -> MatrixComparison:
        """Return the comparison at an epsilon, in units of the cost; it shares what is cached.

        Raises:
            InputError: the largest cost over epsilon overflows in the type of the potentials, or
                as for `facts`.
            EpsilonOutOfRange: that type cannot hold epsilon.
        """
        dtype = self.dtype
        most, largest = torch.finfo(dtype).max / 4, self.facts.extreme
        way_out = "" if dtype == torch.float64 else ", or set precision=double"
        if not largest < most * min(1.0, epsilon):
            raise InputError(
                f"costs of up to {largest:.1e} over epsilon={epsilon:g} overflow in {dtype}; scale "
                f"them down, raise epsilon{way_out}"
            )
        if not torch.finfo(dtype).tiny <= epsilon <= most:
            raise EpsilonOutOfRange(
                f"{{given}} is out of the range of {dtype}; scale costs and {{name}} "
                f"alike{way_out}",
                epsilon,
            )
        found = copy(self)
        object.__setattr__(found, "epsilon", epsilon)
        return found

    def with_penalties(
        self, unbalanced: Unbalanced | None, relative: Unbalanced | None = None
    ) -> MatrixComparison:
        """Return the comparison at these penalties of marginals; it shares what is cached.

        Arguments and errors are those of `resolve_constraints`.
        """
        constraints = resolve_constraints(unbalanced, relative, lambda: self.facts.mean)
        found = copy(self)
        object.__setattr__(found, "constraints", constraints)
        return found

    @property
    def dtype(self) -> torch.dtype:
        """The type of the potentials."""
        return self.compute.dtype

    @property
    def shape(self) -> tuple[int, int]:
        return self.source.shape

    @property
    def device(self) -> torch.device:
        return self.source.device

    @cached_property
    def facts(self) -> MatrixFacts:
        """Range, mean and forbidden pairs of the costs, from one pass over them.

        Raises:
            InputError: an entry is no cost, a point with mass has only forbidden pairs, or the
                backend cannot run.
        """
        if self.in_triton:
            from otdd_flash.operators.matrix_kernel import kernel_facts

            assert isinstance(self.source, HeldCosts)
            return kernel_facts(self.source, self.a, self.b)
        return matrix_facts(exact_blocks(self.source), self.a, self.b)

    @property
    def terms(self) -> tuple[str, ...]:
        """The terms of the divergence, the cross term first, which is alone without self costs."""
        return TERMS[:1] if self.self_costs is None else TERMS

    @property
    def offset(self) -> Offset:
        """The separable terms of the cost, which a matrix does not have."""
        return NO_OFFSET

    @property
    def diameter(self) -> float:
        """The diameter of points, which a matrix does not determine.

        Raises:
            InputError: always.
        """
        raise InputError(
            "solver.schedule=geomloss starts at the diameter of the features, which a matrix of "
            "costs does not tell; set solver.diameter"
        )

    def within_memory(self) -> AbstractContextManager[None]:
        """Return a `with` block that does nothing, as memory is that of the costs themselves."""
        return nullcontext()

    def operator(self, term: str) -> Operator:
        """Build the operator of the term "xy", "xx" or "yy"; that of the cross term is cached.

        Raises:
            InputError: as for `facts`.
        """
        return self._cross if term == "xy" else self._executed(self.torch_operator(term))

    def torch_operator(self, term: str) -> TorchOperator[GivenCosts]:
        """Return the PyTorch operator of a term, for products with its solved plan."""
        if term == "xy":
            return self._cross_torch
        assert self.self_costs is not None
        side = SIDES[term][0]
        (matrix, errors), masses = self.self_costs[side], (self.a, self.b)[side]
        return matrix_operator(matrix, masses, masses, dtype=self.dtype, errors=errors)

    @cached_property
    def _cross(self) -> Operator:
        return self._executed(self._cross_torch)

    @cached_property
    def _cross_torch(self) -> TorchOperator[GivenCosts]:
        return matrix_operator(self.source, self.a, self.b, dtype=self.dtype, facts=self.facts)

    @cached_property
    def in_triton(self) -> bool:
        """Whether passes run in Triton kernels.

        Raises:
            InputError: Triton was asked for and cannot run.
        """
        held = isinstance(self.source, HeldCosts)
        if not held and self.compute.backend == "auto":
            return False
        found = uses_triton(self.compute, self.device)
        if found and not held:
            raise InputError(
                "backend=triton reads costs that are held; raise memory_budget, or use "
                "backend=torch, which asks for blocks in every pass"
            )
        return found

    def _executed(self, operator: TorchOperator[GivenCosts]) -> Operator:
        if not self.in_triton:
            return operator
        from otdd_flash.operators.matrix_kernel import MatrixKernelOperator

        return MatrixKernelOperator(operator)


def given_matrix(name: str, given: Any) -> Tensor:
    """Check a matrix (n, m); return it detached, in a type that costs are stored in.

    Raises:
        InputError: it is no real matrix, or has no rows or columns.
    """
    matrix = real_tensor(name, given).detach()
    if matrix.ndim != 2 or min(matrix.shape) < 1:
        raise InputError(f"{name} must be a matrix (n, m), got shape {tuple(matrix.shape)}")
    return matrix if matrix.dtype in HELD_TYPES else in_floating_point(name, matrix)


def checked_masses(name: str, given: Any, size: int) -> Tensor:
    """Check masses (size,); return them in float64, divided by their sum; None is uniform.

    Raises:
        InputError: another shape, a mass that is negative or not finite, or another sum.
    """
    if given is None:
        return torch.full((size,), 1 / size, dtype=torch.float64)
    masses = in_double(name, real_tensor(name, given).detach())
    if masses.shape != (size,):
        raise InputError(f"{name} must have shape ({size},), got {tuple(masses.shape)}")
    least, most, total = torch.stack((masses.amin(), masses.amax(), masses.sum())).tolist()
    if not (least >= 0 and most < torch.inf):
        place = int((~((masses >= 0) & (masses < torch.inf))).nonzero()[0])
        raise InputError(
            f"{name} must be finite and not negative; {name}[{place}] is {float(masses[place])}"
        )
    if abs(total - 1) > MASS_TOLERANCE:
        raise InputError(f"{name} must sum to 1, got {total:.8g}; divide it by its sum")
    shares: Tensor = masses / total
    # Division by subnormal masses would overflow: they count as 0.
    return torch.where(shares < torch.finfo(shares.dtype).tiny, 0, shares)


def checked_self_costs(
    given: Sequence[Tensor], sizes: tuple[int, int], device: torch.device
) -> tuple[SelfCosts, SelfCosts]:
    """Check the costs within both sides, (n, n) and (m, m); return them on the device.

    Raises:
        InputError: another shape, an entry that is not finite, or no symmetry.
    """
    found = []
    for place, (costs, size) in enumerate(zip(given, sizes, strict=True)):
        name = f"self_costs[{place}]"
        matrix = given_matrix(name, costs).to(device)
        if matrix.shape != (size, size):
            raise InputError(
                f"{name} must have shape {(size, size)} beside costs {sizes}, got "
                f"{tuple(matrix.shape)}"
            )
        found.append(SelfCosts(matrix, _asymmetry(name, matrix)))
    return found[0], found[1]


def _asymmetry(name: str, matrix: Tensor) -> Tensor:
    """Return max_j |C_ij - C_ji| / 2 (n,), float64.

    Raises:
        InputError: an entry is not finite, or differs by more than rounding from its mirror image.
    """
    errors = torch.empty(len(matrix), dtype=torch.float64, device=matrix.device)
    largest = 0.0
    for rows, block in exact_blocks(HeldCosts(matrix)):
        finite = block.isfinite()
        if not bool(finite.all()):
            row, column = (~finite).nonzero()[0].tolist()
            raise InputError(
                f"{name} must be finite; {name}[{rows.start + row}, {column}] is "
                f"{float(block[row, column])}"
            )
        costs = block.double()
        errors[rows] = (costs - matrix[:, rows].T).abs().amax(1) / 2
        largest = max(largest, float(costs.abs().max()))
    row = int(errors.argmax())
    if 2 * float(errors[row]) > SYMMETRIC_UNITS * torch.finfo(matrix.dtype).eps * largest:
        column = int((matrix[row].double() - matrix[:, row].double()).abs().argmax())
        raise InputError(
            f"{name} must be symmetric; {name}[{row}, {column}] is {float(matrix[row, column]):g} "
            f"and {name}[{column}, {row}] is {float(matrix[column, row]):g}; give (C + C.T) / 2"
        )
    return errors
