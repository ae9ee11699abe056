"""Batches in chunks that fit a cache, with matrices along the last dimension, (n, m, s).

Operations then run along the matrices, whatever their shape.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from otdd_flash.batched.problems import Problems, computed_in

# Entries of the matrices of a chunk: enough for an operation to use all cores, and few enough for
# their caches.
ENTRIES_AT_ONCE = 1 << 18


class Chunk(NamedTuple):
    """Problems (n, m, s) side by side.

    Attributes:
        logits: (x - h 1^T) / t, at most 0 (n, m, s).
        highest: h (n, s), the largest of each row of x.
        scale: 1 / t (s,) or (1,).
        a: (n, s) or (n, 1); None where all masses are 1.
        b: (m, s) or (m, 1), likewise.
        rows: which there are (n, s), None for all.
        columns: likewise (m, s).
    """

    logits: Tensor
    highest: Tensor
    scale: Tensor
    a: Tensor | None
    b: Tensor | None
    rows: Tensor | None
    columns: Tensor | None

    def take(self, which: Tensor) -> Chunk:
        """Keep the problems where the flags (s,) are set."""
        return Chunk(*(taken(values, which) for values in self))

    def masses(self, log: bool) -> tuple[Tensor | None, Tensor | None]:
        """Both masses, or their logarithms; None where all are 1."""
        if self.a is None or self.b is None:
            return None, None
        return (self.a.log(), self.b.log()) if log else (self.a, self.b)


def taken(values: Tensor | None, which: Tensor) -> Any:
    """Values (..., s) of some problems, by flags (s,); what all problems share as it is."""
    if values is None or values.shape[-1] == 1 != len(which):
        return values
    return values[..., which]


def parts(matrices: Tensor, *, kept: int = 0) -> list[slice]:
    """Chunks of a batch, for which `kept` more numbers of each matrix are kept."""
    count, n, m = matrices.shape
    height = max(1, ENTRIES_AT_ONCE // max(n * m + kept, 1))
    return [slice(first, min(first + height, count)) for first in range(0, count, height)]


def chunk_of(problems: Problems, part: slice) -> Chunk:
    """Make a chunk of some of the problems, matrices along the last dimension."""
    matrices = problems.matrices
    dtype, (n, m) = computed_in(matrices), matrices.shape[1:]
    x = matrices_last(matrices[part], dtype)
    if problems.negated:
        x.neg_()
    rows = columns = None
    if problems.sizes is not None:
        places = torch.arange(max(n, m), device=x.device)[:, None]
        rows, columns = (
            places[:size] < given
            for size, given in zip((n, m), problems.sizes[part].T, strict=True)
        )
        x.masked_fill_(~(rows[:, None] & columns), -torch.inf)
    highest = present(x.amax(1), rows)
    scale = problems.scale[part] if problems.scale.ndim else problems.scale[None]
    scale = scale.to(dtype)
    a, b = (
        _masses(given, part, dtype, side)
        for given, side in ((problems.a, rows), (problems.b, columns))
    )
    return Chunk(x.sub_(highest[:, None]).mul_(scale), highest, scale, a, b, rows, columns)


def matrices_last(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy (n, m, s) of matrices (s, n, m)."""
    return matrices.permute(1, 2, 0).to(dtype, copy=True, memory_format=torch.contiguous_format)


def _masses(
    given: Tensor | None, part: slice, dtype: torch.dtype, side: Tensor | None
) -> Tensor | None:
    if given is None:
        return None if side is None else side.to(dtype)
    masses = (given[part] if given.ndim == 2 else given[None]).to(dtype).T.contiguous()
    return masses if side is None else torch.where(side, masses, 0)


def present(values: Tensor, side: Tensor | None) -> Tensor:
    """Values of rows or columns, 0 beyond them."""
    return values if side is None else torch.where(side, values, 0)
