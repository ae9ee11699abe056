"""W_2^2 between numbers on a line: the integral of squared differences of quantile functions.

    W_2^2 = int_0^1 (F^-1(t) - G^-1(t))^2 dt

Both quantile functions are steps, so the integral is a sum over the steps of both together. With
equal masses those steps are the same for every draw and are found once, in integers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.sliced.numbers import SortedNumbers


class Steps(NamedTuple):
    """Where two quantile functions are constant together.

    Attributes:
        rows: (S,) or (C, S) which of the n sorted numbers holds on each step.
        columns: which of the m holds.
        widths: of the steps, float64, summing to 1.
    """

    rows: Tensor
    columns: Tensor
    widths: Tensor


def squared_distances(x: SortedNumbers, y: SortedNumbers) -> Tensor:
    """W_2^2 (C,) between the numbers x (C, n) and y (C, m) of C draws."""
    equal = x.masses is None and y.masses is None
    if equal and x.values.shape == y.values.shape:
        return (x.values - y.values).square_().mean(1)
    if equal:
        steps = equal_steps(x.values.shape[1], y.values.shape[1], x.values.device)
        gaps = x.values[:, steps.rows] - y.values[:, steps.columns]
        return gaps.square_() @ steps.widths
    steps = weighted_steps(_masses(x), _masses(y))
    gaps = x.values.gather(1, steps.rows) - y.values.gather(1, steps.columns)
    return gaps.square_().mul_(steps.widths).sum(1)


def equal_steps(n: int, m: int, device: torch.device) -> Steps:
    """Steps between n and m equal masses; their ends are i / n and j / m, compared as i m, j n."""
    each = [torch.arange(1, size + 1, device=device) for size in (n, m)]
    ends = torch.unique(torch.cat((each[0] * m, each[1] * n)))
    # A step that ends at e lies in the mass whose end is the first from e on.
    rows, columns = (ends + m - 1) // m - 1, (ends + n - 1) // n - 1
    widths = ends.diff(prepend=ends.new_zeros(1)).double() / (n * m)
    return Steps(rows, columns, widths)


def weighted_steps(a: Tensor, b: Tensor) -> Steps:
    """Steps between masses a (C, n) and b (C, m), each in the order of its numbers."""
    ends_a, ends_b = a.cumsum(1), b.cumsum(1)
    # Both sums are 1 but for rounding; from here on they are.
    ends_a, ends_b = ends_a / ends_a[:, -1:], ends_b / ends_b[:, -1:]
    ends = torch.cat((ends_a, ends_b), 1).sort(1).values
    widths = ends.diff(dim=1, prepend=ends.new_zeros(len(ends), 1))
    rows, columns = (
        torch.searchsorted(side.contiguous(), ends).clamp_max(side.shape[1] - 1)
        for side in (ends_a, ends_b)
    )
    return Steps(rows, columns, widths)


def _masses(numbers: SortedNumbers) -> Tensor:
    if numbers.masses is not None:
        return numbers.masses
    return torch.full_like(numbers.values, 1 / numbers.values.shape[1])
