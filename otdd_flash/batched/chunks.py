"""Chunks of a batch on a CPU, and scalings of the rows and columns of their matrices.

Matrices stand along the last dimension, (n, m, s): operations then run along them, whatever their
shape. `cpu` balances chunk by chunk.

Scalings are taken of themselves or by logarithms. With a grid kernel and masses are natural
logarithms, and a scaling is a pair (2, k, s) whose sum is its logarithm: the largest exponent of
its sum, with the opposite sign, and what is left, which is small. Logits and the first of a pair
are multiples of a number, so that their sums are exact: in float32 those of logits of 1e4 would be
rounded by 1e-3, in every iteration anew. A grid is a number that values are rounded by, as
(value + grid) - grid. Sums have an order that their length decides.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Problems(NamedTuple):
    """Matrices to balance.

    Attributes:
        matrices: x (B, n, m), or -x if `negated`.
        scale: 1 / t, (B,) or () float64.
        a: (B, n) or (n,) masses; None for 1.
        b: (B, m) or (m,), likewise.
        sizes: (B, 2) int32, rows and columns that there are; None for all.
        iterations: at least 1; with a tolerance the most there may be.
        tolerance: of |R 1 - a|, summed up with masses, else its largest; None for all iterations.
        negated: whether `matrices` holds -x.
    """

    matrices: Tensor
    scale: Tensor
    a: Tensor | None
    b: Tensor | None
    sizes: Tensor | None
    iterations: int
    tolerance: float | None
    negated: bool


class Balanced(NamedTuple):
    """R (B, n, m); t log phi (B, n), t log gamma (B, m), errors (B,); iterations (B,) int32."""

    matrices: Tensor
    rows: Tensor
    columns: Tensor
    errors: Tensor
    counts: Tensor


class Derivatives(NamedTuple):
    """By matrices (B, n, m), by 1 / t (B,), by a (B, n) and by b (B, m)."""

    matrices: Tensor
    scale: Tensor
    a: Tensor
    b: Tensor


def computed_in(matrices: Tensor) -> torch.dtype:
    """Return the type to compute in: float64 for matrices of float64, else float32."""
    return torch.promote_types(matrices.dtype, torch.float32)


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


# Terms that are summed up one after the other.
MOST_IN_ORDER = 8


def scaling(
    kernel: Tensor,
    other: Tensor,
    masses: Tensor | None,
    dim: int,
    side: Tensor | None,
    grid: Tensor | None,
) -> Tensor:
    """1 over sums along a dimension of the kernel, times the scalings of it and their masses."""
    other = with_masses(other, masses, log=grid is not None)
    if grid is None:
        return present(_products(kernel, other, dim).reciprocal_(), side)
    high, low = other.unsqueeze(2 - dim)
    return _log_scaling(kernel + high, low, dim, side, grid)


def with_masses(scalings: Tensor, masses: Tensor | None, *, log: bool) -> Tensor:
    """Scalings times masses, which are 1 by default."""
    if masses is None:
        return scalings
    return torch.stack((scalings[0], scalings[1] + masses)) if log else scalings * masses


def first_scalings(chunk: Chunk, grid: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the scalings of the first iteration, by logarithms."""
    a, b = chunk.masses(log=True)
    low = chunk.logits.new_zeros((1, 1)) if b is None else b[None]
    u = _log_scaling(chunk.logits, low, 1, chunk.rows, grid)
    if a is not None:
        return u, scaling(chunk.logits, u, a, 0, chunk.columns, grid)
    # The largest logit of a row is 0, and so is the first of the pair.
    return u, _log_scaling(chunk.logits, u[1][:, None], 0, chunk.columns, grid)


def scaled(kernel: Tensor, phi: Tensor, gamma: Tensor, *, log: bool) -> Tensor:
    """Return phi_i K_ij gamma_j (n, m, s); with `log` all three are given as logarithms."""
    if log:
        exponents = (kernel + phi[0][:, None]).add_(gamma[0])
        return exponents.add_(phi[1][:, None] + gamma[1]).exp_()
    # Scalings may be far apart, and their product is nearer to 1 than that with an entry.
    return kernel * (phi[:, None] * gamma)


def grid_of(logits: Tensor) -> Tensor:
    """Return the grid for sums of two logits (s,): twice the range of a matrix's logits."""
    return -2 * torch.where(logits > -torch.inf, logits, 0).amin((0, 1))


def on_grid(values: Tensor, grid: Tensor) -> Tensor:
    """Values (..., s) rounded to the grid; as they are where it is 0."""
    return (values + grid).sub_(grid)


def _log_scaling(
    exponents: Tensor, low: Tensor, dim: int, side: Tensor | None, grid: Tensor
) -> Tensor:
    """The pair of -log sum exp(exponents + low) along a dimension."""
    highest = on_grid((exponents + low).amax(dim), grid)
    highest = torch.where(highest == -torch.inf, 0, highest)
    terms = (exponents - highest.unsqueeze(dim)).add_(low)
    # A coarse grid leaves much of the largest in what is left.
    left = terms.amax(dim)
    left = torch.where(left == -torch.inf, 0, left)
    sums = sum_by_halves(terms.sub_(left.unsqueeze(dim)).exp_(), dim)
    return present(torch.stack((-highest, sums.log_().add_(left).neg_())), side)


def _products(kernel: Tensor, other: Tensor, dim: int) -> Tensor:
    """Sums along a dimension of the kernel times the numbers along it."""
    if kernel.shape[dim] > MOST_IN_ORDER:
        return sum_by_halves(kernel * other.unsqueeze(1 - dim), dim)
    # In place of a product as large as the kernel, which is most of the traffic.
    sums = kernel.select(dim, 0) * other[0]
    for k in range(1, kernel.shape[dim]):
        sums.addcmul_(kernel.select(dim, k), other[k])
    return sums


def sum_by_halves(values: Tensor, dim: int) -> Tensor:
    """Sums along a dimension, in an order that only its length decides; overwrites."""
    while (size := values.shape[dim]) > 1:
        half = (size + 1) // 2
        second = values.narrow(dim, half, size - half)
        values = values.narrow(dim, 0, half)
        values.narrow(dim, 0, size - half).add_(second)
    return values.select(dim, 0)
