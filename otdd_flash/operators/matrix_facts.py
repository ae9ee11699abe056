"""Facts of a cost matrix from one pass over it: its range, its mean, its forbidden pairs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.errors import InputError
from otdd_flash.operators.base import CostRange


class MatrixFacts(NamedTuple):
    """Facts of a cost C (n, m) between masses a and b; entries of +inf are forbidden pairs.

    Attributes:
        range: of the finite entries between points with mass.
        mean: sum_ij a_i b_j C_ij of the finite entries.
        magnitudes: (n,) and (m,) float64, with |C_ij| at most their sum for those entries.
        extreme: the largest |C_ij| of all finite entries.
        partners: rows (n,) and columns (m,), bool, that have a finite entry with a point of mass;
            None where no pair is forbidden.
    """

    range: CostRange
    mean: float
    magnitudes: tuple[Tensor, Tensor]
    extreme: float
    partners: tuple[Tensor, Tensor] | None

    @property
    def forbidden(self) -> bool:
        return self.partners is not None


def matrix_facts(
    blocks: Iterable[tuple[slice, Tensor]], a: Tensor, b: Tensor, name: str = "costs"
) -> MatrixFacts:
    """The facts of a matrix that comes in blocks of rows.

    Args:
        blocks: rows, in order, and C of these, of any floating type.
        a: (n,) masses, float64.
        b: (m,) masses, float64.
        name: of the matrix, for messages.

    Raises:
        InputError: an entry is NaN or -inf, or a point with mass has none but forbidden pairs.
    """
    rows, columns = a > 0, b > 0
    every = bool(rows.all()) and bool(columns.all())
    largest, forbidden = torch.zeros_like(a), False
    partners = torch.zeros_like(rows), torch.zeros_like(columns)
    lowest, highest, extreme, mean = math.inf, -math.inf, 0.0, 0.0
    for part, block in blocks:
        costs = block.double()
        ends = torch.aminmax(costs, dim=1)
        low, high = float(ends.min.amin()), float(ends.max.amax())
        if not low > -math.inf:
            raise _not_a_cost(name, part.start, costs)
        if every and high < math.inf:
            partners[0][part] = partners[1][:] = True
            extreme = max(extreme, abs(low), abs(high))
        else:
            allowed = costs < math.inf
            forbidden |= high == math.inf
            costs = costs.where(allowed, 0)
            extreme = max(extreme, float(costs.abs().max()))
            partners[0][part] = (allowed & columns).any(1)
            partners[1].logical_or_((allowed & rows[part, None]).any(0))
            counted = allowed & columns & rows[part, None]
            ends = torch.aminmax(costs.where(counted, 0), dim=1)
            low = float(costs.where(counted, math.inf).min())
            high = float(costs.where(counted, -math.inf).max())
        largest[part] = torch.maximum(ends.min.abs(), ends.max.abs())
        mean += float(a[part] @ (costs @ b))
        lowest, highest = min(lowest, low), max(highest, high)
    for side, masses, has in (("row", rows, partners[0]), ("column", columns, partners[1])):
        if bool((masses & ~has).any()):
            raise InputError(
                f"{name} forbids all pairs of {side} {int((masses & ~has).nonzero()[0])}, which "
                "has mass, with points that have; allow one, or give it the mass 0"
            )
    found = partners if forbidden else None
    magnitudes = largest, torch.zeros_like(b)
    return MatrixFacts(CostRange(lowest, highest), mean, magnitudes, extreme, found)


def _not_a_cost(name: str, first: int, costs: Tensor) -> InputError:
    row, column = (~(costs > -math.inf)).nonzero()[0].tolist()
    return InputError(
        f"{name} must not be NaN or -inf; {name}[{first + row}, {column}] is "
        f"{float(costs[row, column])}; +inf forbids a pair"
    )
