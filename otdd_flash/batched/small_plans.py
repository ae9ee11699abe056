"""What solving many small problems gives."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from otdd_flash.batched.adjoint import ENTRIES_AT_ONCE
from otdd_flash.batched.bounds import bounds_of
from otdd_flash.errors import InputError


@dataclass(frozen=True, eq=False)
class Solved:
    """B problems and what a launch returned for them, on the device that solved them.

    Attributes:
        costs: C (B, n, m).
        a: masses (n,) or (B, n) that sum to 1, 0 beyond the sizes.
        b: (m,) or (B, m), likewise.
        masses: both as they were given, before they were rounded to the type that is computed in.
        epsilon: () or (B,) float64, in units of the cost.
        sizes: (B, 2) int32, None for all.
        tolerance: of the marginal error.
        plans: (B, n, m).
        f: (B, n), in units of the cost.
        g: (B, m), likewise.
        errors: (B,).
        iterations: (B,) int32.
        flaws: what is wrong with the input: in order, costs that are no numbers, a row or column
            without partners, epsilon, a and b, (5,) flags.
    """

    costs: Tensor
    a: Tensor
    b: Tensor
    masses: tuple[Tensor, Tensor]
    epsilon: Tensor
    sizes: Tensor | None
    tolerance: float
    plans: Tensor
    f: Tensor
    g: Tensor
    errors: Tensor
    iterations: Tensor
    flaws: Tensor


FLAWS = (
    "costs must not be NaN or -inf; +inf forbids a pair",
    "costs forbid all pairs with mass of a row or of a column, which then cannot have its own; "
    "allow one, or leave the row or column out",
    "epsilon must be positive, and within 2^-126 and 2^126 unless costs are float64; scale costs "
    "and epsilon alike, or give float64 costs",
    "a must not be negative and must sum to 1 in each problem; divide masses by their sum",
    "b must not be negative and must sum to 1 in each problem; divide masses by their sum",
)


@dataclass(frozen=True, eq=False)
class SmallPlans:
    """Entropic plans of B problems, of `otdd.sinkhorn_plans`.

    Plans, potentials and values are differentiable. Of problems on a GPU that the function would
    have refused, the first of these that is read raises the `InputError`.
    """

    _solved: Solved = field(repr=False)
    _home: tuple[torch.device, torch.dtype] = field(repr=False)

    def check(self) -> None:
        """Raise the `InputError` of problems that have no solution, waiting for the device."""
        _ = self._checked

    @property
    def plans(self) -> Tensor:
        """P (B, n, m) of the type of the costs; 0 beyond the sizes."""
        device, dtype = self._home
        return self._checked.plans.to(device, dtype)

    @property
    def f(self) -> Tensor:
        """Potentials (B, n) of rows, in units of the cost, float32, or float64 of such costs."""
        return self._at_home(self._shifted[0])

    @property
    def g(self) -> Tensor:
        """Potentials (B, m) of columns, as `f`, with <b, g> = 0."""
        return self._at_home(self._shifted[1])

    @property
    def value(self) -> Tensor:
        """OT_epsilon (B,), in units of the cost: the dual value <a, f> + <b, g>."""
        return self._at_home(self._value.to(self._solved.f.dtype))

    @cached_property
    def bounds(self) -> Tensor:
        """Solver bounds (B, 2) of OT_epsilon, lower and upper, float64.

        They hold for the masses as given, float64 ones too, divided by their sums.

        The dual value of f and g, and what a plan with exactly these marginals costs; infinite
        where that needs a forbidden pair. Evaluated in float64, rounding included.
        """
        solved = self._checked
        count, n, m = solved.costs.shape
        found = torch.empty((count, 2), dtype=torch.float64, device=solved.costs.device)
        a, b, epsilon = (
            given.detach().double().expand(count, *shape)
            for given, shape in zip((*solved.masses, solved.epsilon), ((n,), (m,), ()), strict=True)
        )
        height = max(1, 16 * ENTRIES_AT_ONCE // max(n * m, 1))
        for first in range(0, count, height):
            part = slice(first, first + height)
            costs = solved.costs[part].detach().double()
            # Pairs without mass have no price, whatever stands there.
            costs = torch.where((a[part, :, None] > 0) & (b[part, None] > 0), costs, 0)
            found[part] = bounds_of(
                costs, a[part], b[part], solved.f[part].detach().double(),
                solved.g[part].detach().double(), epsilon[part],
            )  # fmt: skip
        value = self.value.detach().double().to(found.device)
        found[:, 0] = torch.minimum(found[:, 0], value)
        found[:, 1] = torch.maximum(found[:, 1], value)
        # Potentials that are no numbers prove nothing.
        found = torch.where(found.isnan(), found.new_tensor([-torch.inf, torch.inf]), found)
        return self._at_home(found)

    @property
    def marginal_error(self) -> Tensor:
        """The larger of ||P 1 - a||_1 and ||P^T 1 - b||_1 (B,), exact but for rounding.

        It is that of rows: columns have their masses after the last update. Plans that are given
        back in float16 or bfloat16 are rounded after it was measured.
        """
        return self._at_home(self._checked.errors)

    @property
    def iterations(self) -> Tensor:
        """Updates of both potentials (B,) int32."""
        return self._at_home(self._checked.iterations)

    @property
    def converged(self) -> Tensor:
        """Whether the marginal error is within the tolerance (B,)."""
        return self._at_home(self._checked.errors <= self._solved.tolerance)

    @cached_property
    def _checked(self) -> Solved:
        """Return what was solved; raise if it has flaws, which waits for the device."""
        for flaw, sentence in zip(self._solved.flaws.tolist(), FLAWS, strict=True):
            if flaw:
                raise InputError(sentence)
        return self._solved

    @cached_property
    def _value(self) -> Tensor:
        solved = self._checked
        # Columns have their masses, so the plan has the mass 1.
        return (solved.a * solved.f.double()).sum(1) + (solved.b * solved.g.double()).sum(1)

    @cached_property
    def _shifted(self) -> tuple[Tensor, Tensor]:
        solved = self._checked
        mean = (solved.b * solved.g.double()).sum(1, keepdim=True)
        f, g = (solved.f + mean).to(solved.f.dtype), (solved.g - mean).to(solved.g.dtype)
        if solved.sizes is None:
            return f, g
        rows, columns = (
            torch.arange(of.shape[1], device=of.device) < solved.sizes[:, side, None]
            for side, of in enumerate((f, g))
        )
        return torch.where(rows, f, 0), torch.where(columns, g, 0)

    def _at_home(self, values: Tensor) -> Tensor:
        return values.to(self._home[0])
