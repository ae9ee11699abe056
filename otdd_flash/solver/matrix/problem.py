"""A cost matrix with masses and epsilon: checked, on the device, with the operators to solve."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from otdd_flash.devices import resolve_device
from otdd_flash.errors import InputError
from otdd_flash.operators.base import Operator
from otdd_flash.operators.build import Compute, ComputeOptions, scores_fit, uses_triton
from otdd_flash.operators.cost_blocks import AskedCosts, CostBlocks
from otdd_flash.operators.ground import NO_OFFSET
from otdd_flash.operators.matrix import CostSource, HeldCosts, MatrixOperator, exact_blocks
from otdd_flash.operators.matrix_facts import MatrixFacts, matrix_facts
from otdd_flash.solver.divergence import (
    Divergence,
    Potentials,
    Solved,
    checked_start,
    solve_divergence,
)
from otdd_flash.solver.matrix.given import (
    SelfCosts,
    checked_masses,
    checked_self_costs,
    given_matrix,
)
from otdd_flash.solver.schedules.base import Schedule
from otdd_flash.solver.schedules.converged import Converged
from otdd_flash.solver.schedules.geomloss import GeomlossSchedule
from otdd_flash.solver.term.result import SolverProgress, TransportTerm
from otdd_flash.solver.term.tolerance import EpsilonOutOfRange

# What `matrix_transport` takes for costs.
Costs = Tensor | np.ndarray[Any, Any] | CostBlocks


@dataclass(frozen=True, eq=False)
class MatrixProblem:
    """Costs C (n, m) between masses a and b; `prepare` makes one.

    Attributes:
        source: C, stored or computed in blocks, on the device.
        a: (n,) masses, float64, on the device.
        b: (m,) masses, likewise.
        compute: how passes run.
        self_costs: C_xx (n, n) and C_yy (m, m) for a divergence, on the device.
    """

    source: CostSource
    a: Tensor
    b: Tensor
    compute: ComputeOptions
    self_costs: tuple[SelfCosts, SelfCosts] | None = None

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
    ) -> MatrixProblem:
        """Check a matrix and its masses, and move them to the device.

        Without `compute` that is the device of the costs, with this precision.

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
            source = AskedCosts(costs, device)
        else:
            source = HeldCosts(given.to(device))
        device, dtype = source.device, source.dtype
        chosen = ComputeOptions.of(compute)
        if compute is None:
            chosen = ComputeOptions(str(device), precision=precision)
        if dtype == torch.float64:
            chosen = replace(chosen, precision="double")
        if isinstance(source, AskedCosts) and scores_fit(source.shape, dtype, chosen, device):
            source = HeldCosts(source.held())
        n, m = source.shape
        masses = (checked_masses("a", a, n).to(device), checked_masses("b", b, m).to(device))
        own = None if self_costs is None else checked_self_costs(self_costs, (n, m), device)
        return cls(source, *masses, chosen, own)

    @property
    def dtype(self) -> torch.dtype:
        """The type of the potentials."""
        return self.compute.dtype

    @property
    def device(self) -> torch.device:
        return self.source.device

    @cached_property
    def facts(self) -> MatrixFacts:
        """Facts of the costs from one pass over them.

        Raises:
            InputError: an entry is no cost, a point with mass has only forbidden pairs, or the
                backend cannot run.
        """
        if self.in_triton:
            from otdd_flash.operators.matrix_kernel import kernel_facts

            assert isinstance(self.source, HeldCosts)
            return kernel_facts(self.source, self.a, self.b)
        return matrix_facts(exact_blocks(self.source), self.a, self.b)

    @cached_property
    def operator(self) -> Operator:
        """The cost between both sides.

        Raises:
            InputError: as for `facts`.
        """
        return self._executed(self.tiles)

    @cached_property
    def tiles(self) -> MatrixOperator:
        """The cost in PyTorch, for products with a solved plan."""
        return MatrixOperator(self.source, self.a, self.b, dtype=self.dtype, facts=self.facts)

    @cached_property
    def in_triton(self) -> bool:
        """Whether passes run in Triton kernels.

        Raises:
            InputError: they cannot.
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

    def _executed(self, tiles: MatrixOperator) -> Operator:
        if not self.in_triton:
            return tiles
        from otdd_flash.operators.matrix_kernel import MatrixKernelOperator

        return MatrixKernelOperator(tiles)

    def _self_operator(self, name: str) -> Operator:
        return self._executed(self.self_tiles(name))

    def self_tiles(self, name: str) -> MatrixOperator:
        """Return the cost of the self term "xx" or "yy", in PyTorch."""
        assert self.self_costs is not None
        side = ("xx", "yy").index(name)
        (matrix, errors), masses = self.self_costs[side], (self.a, self.b)[side]
        return MatrixOperator(matrix, masses, masses, dtype=self.dtype, errors=errors)

    def solve(
        self,
        epsilon: float,
        options: Schedule,
        *,
        start: Potentials | None = None,
        progress: SolverProgress | None = None,
        solved: Solved | None = None,
    ) -> Divergence:
        """Solve for OT_epsilon, or with self costs for S_epsilon.

        Raises:
            InputError: epsilon or a tolerance is out of reach at this precision, a start of
                another size, a goal that forbidden pairs do not allow.
        """
        self._check_epsilon(epsilon)
        if isinstance(options, GeomlossSchedule) and options.diameter is None:
            raise InputError(
                "solver.schedule=geomloss starts at the diameter of the features, which a matrix "
                "of costs does not tell; set solver.diameter"
            )
        width = options.bound_width if isinstance(options, Converged) else None
        if self.facts.forbidden and width is not None:
            raise InputError(
                "solver.bound_width is no goal where pairs are forbidden, as bounds are known at "
                "the end alone; set solver.tolerance"
            )
        start = checked_start(start, (len(self.a), len(self.b)), self.device)
        term = self._recorded(epsilon, options, start, progress)
        if term is not None:
            if solved is not None:
                solved("xy", self.operator, term)
            backend = self.operator.execution.backend
            return Divergence.of_terms({"xy": term}, options, NO_OFFSET, backend)
        made: dict[str, Callable[[], Operator]] = {"xy": lambda: self.operator}
        if self.self_costs is not None:
            made |= {name: partial(self._self_operator, name) for name in ("xx", "yy")}
        return solve_divergence(
            lambda name: made[name](),
            epsilon,
            options,
            debias=self.self_costs is not None,
            start=start,
            progress=progress,
            solved=solved,
        )

    def _recorded(
        self,
        epsilon: float,
        options: Schedule,
        start: Potentials,
        progress: SolverProgress | None,
    ) -> TransportTerm | None:
        """Solve by recorded CUDA graphs; return None where these do not apply."""
        if not (isinstance(options, Converged) and self.in_triton):
            return None
        # Triton may be missing where no kernel runs.
        from otdd_flash.solver.small import matrix_route

        if not matrix_route.is_recorded_matrix(self, options):
            return None
        return matrix_route.solve_recorded_matrix(
            self, epsilon, options, start=start, progress=progress
        )

    def _check_epsilon(self, epsilon: float) -> None:
        """Refuse an epsilon that costs cannot be divided by in their type."""
        most, largest = torch.finfo(self.dtype).max / 4, self.facts.extreme
        way_out = "" if self.dtype == torch.float64 else ", or set precision=double"
        if not largest < most * min(1.0, epsilon):
            raise InputError(
                f"costs of up to {largest:.1e} over epsilon={epsilon:g} overflow in {self.dtype}; "
                f"scale them down, raise epsilon{way_out}"
            )
        if not torch.finfo(self.dtype).tiny <= epsilon <= most:
            raise EpsilonOutOfRange(
                f"{{given}} is out of the range of {self.dtype}; scale costs and {{name}} alike"
                f"{way_out}",
                epsilon,
            )


def relative_to_mean(multiple: float, facts: MatrixFacts) -> float:
    """Convert an epsilon given as a multiple of the mean cost to units of the cost.

    Raises:
        InputError: the mean cost is not positive.
    """
    if not facts.mean > 0:
        raise InputError(
            f"epsilon_relative needs a positive mean cost; here it is {facts.mean:g}: set epsilon"
        )
    return multiple * facts.mean
