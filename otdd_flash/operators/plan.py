"""The plan of two potentials, ready to be applied to one matrix after another.

    P_ij = a_i b_j exp((f_i + g_j - C_ij) / epsilon),      r = P 1,  c = P^T 1

An operator evaluates it anew for every product; where it is held instead, a product is one read of
it. Row and column sums are those of the very numbers that are multiplied, whatever rounded them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from otdd_flash.operators.base import Operator

# A (n, r) and B (m, r), entries of whose product A B^T weight those of a plan.
Factors = tuple[Tensor, Tensor]


class Products(Protocol):
    """Products with a plan P (n, m), float64, and the sums of what they multiply."""

    @property
    def rows(self) -> Tensor:
        """P 1 (n,), float64."""
        ...

    @property
    def columns(self) -> Tensor:
        """P^T 1 (m,), float64."""
        ...

    def times(self, values: Tensor) -> Tensor:
        """P V (n, k) for V (m, k)."""
        ...

    def transposed_times(self, values: Tensor) -> Tensor:
        """P^T U (m, k) for U (n, k)."""
        ...


class Plan(Products, Protocol):
    """A plan P (n, m) to the accuracy of its operator's type."""

    @property
    def quick(self) -> Products:
        """The same, or one near it, whose products take less time and are less accurate."""
        ...

    def times(self, values: Tensor, factors: Factors | None = None) -> Tensor:
        """P V (n, k) for V (m, k), or (P o A B^T) V."""
        ...

    def transposed_times(self, values: Tensor, factors: Factors | None = None) -> Tensor:
        """P^T U (m, k) for U (n, k), or (P o A B^T)^T U."""
        ...


class StreamedPlan:
    """Evaluated anew for every product.

    Args:
        operator: the cost and the masses.
        f: (n,) potential, in units of the cost.
        g: (m,) potential.
        epsilon: regularisation, in units of the cost.
    """

    def __init__(self, operator: Operator, f: Tensor, g: Tensor, epsilon: float) -> None:
        self._operator, self._at = operator, (f, g, epsilon)

    @cached_property
    def rows(self) -> Tensor:
        """P 1 (n,)."""
        return self._operator.apply_plan(*self._at, _ones(self._operator.b)).masses

    @cached_property
    def columns(self) -> Tensor:
        """P^T 1 (m,)."""
        ones = _ones(self._operator.a)
        return self._operator.apply_plan(*self._at, ones, transposed=True).masses

    @cached_property
    def quick(self) -> Products:
        """One that is held, if the operator can and memory allows it."""
        hold = self._operator.execution.rounded_plan
        held: Products | None = None if hold is None else hold(*self._at)
        return self if held is None else held

    def times(self, values: Tensor, factors: Factors | None = None) -> Tensor:
        """P V (n, k), or (P o A B^T) V."""
        return self._apply(values, factors, transposed=False)

    def transposed_times(self, values: Tensor, factors: Factors | None = None) -> Tensor:
        """P^T U (m, k), or (P o A B^T)^T U."""
        return self._apply(values, factors, transposed=True)

    def _apply(self, values: Tensor, factors: Factors | None, *, transposed: bool) -> Tensor:
        # An operator may round all columns on one scale, so they come at the same one.
        largest = values.abs().amax(0).clamp_min(torch.finfo(torch.float32).tiny)
        scale = largest.log2().ceil().exp2()
        applied = self._operator.apply_plan(
            *self._at, values / scale, transposed=transposed, factors=factors
        )
        return applied.values.double() * scale


class KeptPlan:
    """Held as a matrix P (n, m).

    Products are summed in float64, a few rows at a time, or in the type of the entries.

    Args:
        entries: P.
        products: the type to multiply and sum in.
    """

    def __init__(self, entries: Tensor, products: torch.dtype = torch.float64) -> None:
        self._entries, self._products = entries, products
        self.rows, self.columns = (entries.sum(side, dtype=torch.float64) for side in (1, 0))

    @cached_property
    def quick(self) -> KeptPlan:
        """The same with products in the type of the entries."""
        same = self._entries.dtype == self._products
        return self if same else KeptPlan(self._entries, self._entries.dtype)

    def times(self, values: Tensor, factors: Factors | None = None) -> Tensor:
        """P V (n, k), or (P o A B^T) V."""
        values = values.to(self._products)
        found = values.new_empty((len(self._entries), values.shape[1]))
        for rows, entries in self._blocks(factors):
            torch.mm(entries, values, out=found[rows])
        return found.double()

    def transposed_times(self, values: Tensor, factors: Factors | None = None) -> Tensor:
        """P^T U (m, k), or (P o A B^T)^T U."""
        values = values.to(self._products)
        found = values.new_zeros((self._entries.shape[1], values.shape[1]))
        for rows, entries in self._blocks(factors):
            found.addmm_(entries.T, values[rows])
        return found.double()

    def _blocks(self, factors: Factors | None) -> Iterator[tuple[slice, Tensor]]:
        """Rows and their entries, weighted, in the type of the products."""
        n, m = self._entries.shape
        whole = factors is None and self._entries.dtype == self._products
        height = n if whole else max(1, BLOCK_ENTRIES // m)
        for first in range(0, n, height):
            rows = slice(first, first + height)
            entries = self._entries[rows].to(self._products)
            if factors is not None:
                left, right = (factor.to(self._products) for factor in factors)
                entries = (left[rows] @ right.T).mul_(entries)
            yield rows, entries


# Entries that are weighted, or converted, at once.
BLOCK_ENTRIES = 1 << 20


def plan_of(operator: Operator, f: Tensor, g: Tensor, epsilon: float) -> Plan:
    """The plan of f (n,) and g (m,), held if the operator can and memory allows it."""
    keep = operator.execution.kept_plan
    kept = None if keep is None else keep(f, g, epsilon)
    return StreamedPlan(operator, f, g, epsilon) if kept is None else kept


def _ones(masses: Tensor) -> Tensor:
    return torch.ones_like(masses).unsqueeze(1)
