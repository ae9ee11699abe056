"""Sums over the points of many classes that round as if each class were alone.

PyTorch chooses the order of a sum by the shape of the whole batch and by addresses. Here the
last part of a list is added to the first, element by element, until one is left:

    v_i <- v_i + v_(i + h),    h the largest power of two below the number that is left.

An addition of two numbers rounds the same whatever stands beside them, and which two are added
follows from the length of the list alone. Padding to a common length adds nothing but -0.0, which
leaves every number as it is, 0.0 and -0.0 too. A sum of n numbers passes ceil(log2 n) additions, so

    |error| <= ceil(log2 n) 2^-53 sum_i |v_i|    to first order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class ClassRows:
    """N rows that are those of k classes, one class after the other.

    Args:
        sizes: the number of rows of each class.
        device: where the rows are.

    Attributes:
        owners: (N,) int64, which class a row is of.
        places: (N,) int64, which of its class's rows it is.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        counts = torch.tensor(sizes).to(device)
        self._shape, count = (len(sizes), max(sizes)), sum(sizes)
        # Told the number of rows, a GPU is not waited for.
        self.owners = torch.repeat_interleave(counts, output_size=count)
        firsts = (counts.cumsum(0) - counts)[self.owners]
        self.places = torch.arange(count, device=device) - firsts

    def sums(self, values: Tensor) -> Tensor:
        """The sums (k, ...) of rows (N, ...) of each class; `values` are overwritten."""
        return halved_sum(self._padded(values, -0.0), 1)

    def largest(self, values: Tensor) -> Tensor:
        """The largest (k, ...) of rows (N, ...) that are not negative, of each class."""
        return self._padded(values, 0.0).amax(1)

    def _padded(self, values: Tensor, filling: float) -> Tensor:
        """The rows (k, most, ...) of each class, the same memory if all have equally many."""
        if self._shape[0] * self._shape[1] == len(values):
            return values.unflatten(0, self._shape)  # type: ignore[no-untyped-call, no-any-return]
        padded = values.new_full((*self._shape, *values.shape[1:]), filling)
        padded[self.owners, self.places] = values
        return padded


def halved_sum(values: Tensor, dim: int) -> Tensor:
    """The sum over a dimension; `values` are overwritten."""
    count = values.shape[dim]
    while count > 1:
        half = 1 << ((count - 1).bit_length() - 1)
        rest = values.narrow(dim, half, count - half)
        values.narrow(dim, 0, count - half).add_(rest)
        count = half
    # All of the values would be kept for a part of them.
    return values.select(dim, 0).clone()
